"""The kernels against their emulation, in Triton's interpreter and, with longer calls, on a GPU.
kernel_cases.py has the runners and the tolerances.

Run with ``make interpreter`` and ``make gpu``. Inputs have the layout of models ([B, N, H, D]
transposed). k has a bias in each channel and v a mean, because random normal inputs hide wrong
smoothing and one-level accumulation.
"""

import math

import pytest
import support
import torch
import torch.nn.functional as F
from kernel_cases import (
    BANDS,
    BOOL,
    DTYPES,
    LARGE,
    MASKS,
    OPS,
    SMALL,
    Interpreted,
    OfHopper,
    check_attention,
    check_codes,
    cuts,
    every,
    in_interpreter,
    length,
    on,
    on_hopper,
    tile_fits,
)
from pairs import chosen, pairs
from support import run
from torch.testing import assert_close

from bench.tritons import ROWS, VARIANTS
from sage_inductor.ops.attention import tiles
from sage_inductor.ops.attention.tiles import Tile, of_blocks
from sage_inductor.ops.formats import K_BLOCK, Prepared
from sage_inductor.ops.gpus import Gpu
from sage_inductor.ops.quantize.keys import launch_k
from sage_inductor.ops.quantize.nvfp4 import launch_nvfp4
from sage_inductor.ops.quantize.one_pass import launch_kv
from sage_inductor.ops.quantize.op import launch_prepare
from sage_inductor.ops.quantize.smooth import launch_estimate, launch_smooth, launch_unsmooth
from sage_inductor.ops.quantize.values import launch_v
from sage_inductor.ops.recipe import NAMED, Recipe
from sage_inductor.ops.reference import quantize as reference
from sage_inductor.ops.sdpa import _unsmoothed_lse
from sage_inductor.ops.visibility import BLOCK_SIZES, BlockLists

pytestmark = pytest.mark.usefixtures("poisoned")

RECIPES = list(NAMED)

# -- k and v ----

of_large = pairs(
    among=lambda shape, dtype: dtype == torch.bfloat16 or shape in LARGE[::2] + LARGE[-1:],
    shape=LARGE, dtype=DTYPES, masked=["", "heads"],
)  # fmt: skip
of_small = dict(shape=SMALL, dtype=[torch.float16], masked=["", "batch", "heads"])
HIDDEN_IN = {"batch": SMALL[-1], "heads": SMALL[0]}
of_steps = on(
    chosen(lambda shape, dtype, masked: shape == HIDDEN_IN.get(masked, shape), **of_small), of_large
)


def kv(runner, shape, dtype, masked):
    """k, v, and which rows count, for each head or each batch; the others hold no numbers."""
    B, _, H, _, N, _ = shape
    _, k, v = runner.qkv(*shape, dtype=dtype)
    if not masked:
        return k, v, None
    visible = (runner.rand(*((1, H) if masked == "heads" else (B, 1)), N) > 0.5).to(torch.uint8)
    visible[..., -1] = 1
    hidden = (visible == 0).expand(B, H, N)
    k[hidden], v[hidden] = math.inf, math.nan
    return k, v, visible


def shown(visible, codes, N, of_v=False, padding=False):
    """Which codes of k [B, H, N_pad, D], or of v [B, H, D, N_pad] as they are stored, count."""
    B, H, *size = codes.shape
    found = torch.full((B, H, size[of_v]), padding, device=codes.device)
    found[..., :N] = True if visible is None else visible.bool()
    return reference.interleave(found[:, :, None].expand(codes.shape)) if of_v else found


ROTATED = 0, 1e-6  # relative: a scale of k, which is of sums in another order if k is rotated
# A recipe of each format and number of scales.
OF_K = {
    (r.qk, r.sharing.k_groups, r.rotated): r for r in NAMED.values() if not r.of_qk.block_scaled
}  # fmt: skip


@of_steps
def test_preparation(runner, case):
    k, v, visible = kv(runner, **case)
    for rows in [None] if visible is None else [visible, 0 * visible]:
        expected = *reference.smooth(k, rows), *reference.smooth(v, rows, keep=False)
        found = launch_smooth([k, v], rows, 1, run)
        for x, y, atol in zip(found, expected, 2 * (1e-5, 1e-4), strict=True):
            assert_close(x, y, rtol=1e-5, atol=atol)  # fp32 sums in another order
    k_mean, _, v_mean, v_amax = launch_smooth([k, v], visible, 1, run)
    for r in OF_K.values():
        codes, scale = launch_k(k, k_mean, r, visible, run)
        expected, expected_scale = reference.quantize_k(k, k_mean, r, visible)
        assert_close(scale, expected_scale, rtol=ROTATED[r.rotated], atol=0)
        has_nan = r.rotated or not r.of_qk.is_integer
        where = shown(visible, codes, k.shape[2], padding=True) if has_nan else ...
        check_codes(runner, codes, expected, where, r.rotated)
    for saturate in {visible is not None, True}:
        args = v, v_mean, v_amax, NAMED["sage2-8b"], saturate
        (codes, scale), (expected, expected_scale) = (
            launch_v(*args, run),
            reference.quantize_v(*args),
        )
        assert_close(scale, expected_scale, rtol=0, atol=0)
        check_codes(runner, codes, expected, shown(visible, codes, k.shape[2], True, saturate))


@on(every(dtype=[torch.float16]), every(dtype=DTYPES))
def test_a_group_of_hidden_keys_alone_has_a_scale_of_its_own(runner, case):
    """A row of nothing but fp16's lowest number sees them. One that holds no number has no part."""
    _, k, _ = runner.qkv(1, 2, 2, 8, 4 * K_BLOCK, 32, **case)
    hidden = slice(K_BLOCK, 2 * K_BLOCK + 2)  # the second group, and two keys of the third
    k[:, :, hidden] *= 50
    k[:, 1, K_BLOCK + 1] = math.inf
    visible = torch.ones(1, 1, k.shape[2], dtype=torch.uint8, device=k.device)
    visible[..., hidden] = 0
    mean = reference.smooth(k, visible)[0]
    for r in OF_K.values():
        _, scale = launch_k(k, mean, r, visible, run)
        _, expected = reference.quantize_k(k, mean, r, visible)
        assert_close(scale, expected, rtol=ROTATED[r.rotated], atol=0)
        of_visible, of_hidden, of_both, _ = scale.amax(3).unbind(2)
        assert (of_hidden > 20 * of_visible).all() and (of_both < 2 * of_visible).all()


@on(every(shape=SMALL, dtype=[torch.float16]), every(shape=LARGE[:3], dtype=DTYPES[:1]))
def test_a_mean_that_is_noise_is_kept_where_it_is_asked_for(runner, case):
    _, _, v = runner.qkv(*case["shape"], dtype=case["dtype"])
    noise = torch.randn(v.shape, device=v.device).to(v.dtype)
    for keep in (0, 1, 2):
        *found, mean, amax = launch_smooth([v, noise], None, keep, run)
        expected = *reference.smooth(v, keep=keep > 0), *reference.smooth(noise, keep=keep > 1)
        for x, y, atol in zip((*found, mean, amax), expected, 2 * (1e-5, 1e-4), strict=True):
            assert_close(x, y, rtol=1e-5, atol=atol)
        assert (mean == 0).float().mean() > 0.9 or keep == 2 or v.shape[2] < 16


@of_steps
def test_preparation_in_nvfp4(runner, case):
    """Bit-equal: the interpreter has no part in rounding to E2M1 and E4M3."""
    k, v, visible = kv(runner, **case)
    v = v.nan_to_num(nan=math.inf, posinf=math.inf)  # of which the interpreter's maximum is NaN
    for x, along_n in ((k, False), (v, True)):
        m, a = reference.smooth(x, visible, keep=not along_n)
        of_x = x, m, a, along_n, visible is not None
        beyond_amax = 2 * x, m, a, along_n, True
        # Of one row amax is 0: a code of what is beyond it has no meaning.
        for args in (of_x, beyond_amax)[: min(x.shape[2], 2)]:
            found, expected = launch_nvfp4(*args, run), reference.quantize_nvfp4(*args)
            for y, e in zip(found, expected, strict=True):
                assert torch.equal(y, e) and y.stride() == e.stride()


@on(
    chosen(lambda shape, dtype, masked: masked != "heads" or shape == SMALL[0], **of_small),
    of_large,
)
def test_preparation_in_one_pass(runner, case):
    """With another head_dim of v, and with rows beyond what a sample promises, in some heads."""
    k, v, visible = kv(runner, **case)
    v, N = torch.cat([v, v[..., :8]], 3), k.shape[2]
    mean, amax = reference.estimate(v, visible)
    # The sample has 128 of 300 rows. With a mask the scale is larger: the interpreter truncates
    # subnormals.
    large, beyond = (100, 100) if visible is None else (4, 0.1)
    beyond = 1.2 if N >= 300 else beyond
    v[0, -1, -1] = (mean + beyond * amax)[0, -1].to(v.dtype)
    if N > 1:
        v[0, :1, N // 3] *= large
    # Of one row k less its mean is noise, half of a code's step.
    for name in ("sage2-8b-per-token", "sage2-8b-fp8qk", *["sage2-8b-rotated"] * (N > 1)):
        r = NAMED[name]
        k_8bit, k_scale, k_mean, v_fp8, v_scale, v_mean = launch_kv(k, v, visible, r, run).tensors()
        *statistics, beyond = launch_estimate([k, v], visible, run)
        expected = (*reference.estimate(k, visible), *reference.estimate(v, visible))
        for x, y in zip(statistics, expected, strict=True):
            assert_close(x, y, rtol=1e-4, atol=1e-3)  # sums in another order
        of_training = launch_estimate([k, v], visible, run, shrink=False)
        expected = (y for x in (k, v) for y in reference.estimate(x, visible, shrink=False))
        for x, y in zip(of_training[:4], expected, strict=True):
            assert_close(x, y, rtol=1e-4, atol=1e-3, equal_nan=True)  # of no rows there is no mean
        assert not beyond.any()
        assert torch.equal(k_mean, statistics[0]) and torch.equal(v_mean, statistics[2])
        k_8bit_ref, k_scale_ref = reference.quantize_k(k, k_mean, r, visible)
        v_fp8_ref, v_scale_ref = reference.quantize_v_checked(v, v_mean, statistics[3], r, visible)
        assert_close(k_scale, k_scale_ref, rtol=ROTATED[r.rotated], atol=0)
        assert_close(v_scale, v_scale_ref, rtol=0, atol=0)
        # Hidden rows saturate; the interpreter rounds beyond FP8's largest. Padding is NaN there.
        check_codes(runner, k_8bit, k_8bit_ref, shown(visible, k_8bit, N), r.rotated)
        check_codes(runner, v_fp8, v_fp8_ref, shown(visible, v_fp8, N, True))
        assert v_fp8.float().isfinite().all() or visible is None
        codes, scale, mean = launch_kv(k, None, visible, r, run).tensors()
        assert_close(mean, k_mean)  # beside v it is a sum in another order
        codes_ref, scale_ref = reference.quantize_k(k, mean, r, visible)
        assert_close(scale, scale_ref, rtol=ROTATED[r.rotated], atol=0)
        check_codes(runner, codes, codes_ref, shown(visible, codes, N), r.rotated)


# A sample has 128 of 300 rows, and not the last.
@on(
    every(shape=[(2, 4, 2, 1, 300, 16)], masked=["batch", "heads"]),
    every(shape=LARGE[:2], masked=["heads"]),
)
def test_hidden_rows_of_v_saturate_in_a_head_that_is_quantized_again(runner, case):
    """A visible row is beyond what the sample promises. NaN, which a GPU would keep, is a number in
    the interpreter; so hidden rows hold what is no number of E4M3 without saturation."""
    k, v, visible = kv(runner, **case, dtype=runner.dtype)
    B, H, N, _ = v.shape
    hidden = (visible == 0).expand(B, H, N)
    v[hidden] = torch.where(torch.rand(v.shape, device=v.device) < 0.5, -5e4, math.inf)[hidden].to(
        v.dtype
    )
    estimated = reference.estimate(v, visible)[1]
    assert (reference.sample_rows(N, v.device) < N - 1).all()
    v[:, -1, -1] = (4 * estimated[:, -1]).to(v.dtype)
    *_, v_fp8, v_scale, v_mean = launch_kv(
        k, v, visible, NAMED["sage2-8b-per-token"], run
    ).tensors()
    expected, scale = reference.quantize_v_checked(
        v, v_mean, launch_estimate([k, v], visible, run)[3], NAMED["sage2-8b-per-token"], visible
    )
    assert_close(v_scale, scale, rtol=0, atol=0)
    assert (v_scale[:, -1] > 2 * estimated[:, -1] / 448).all()  # it was
    where = F.pad(hidden, (0, v_fp8.shape[3] - N))[:, :, None].expand(v_fp8.shape)
    where = reference.interleave(where)
    where[:, :, v.shape[3] :] = False
    found, expected = (x.float()[where] for x in (v_fp8, expected))
    assert torch.equal(found, expected) and (found.abs() == 448).any()


@on(
    every(shape=SMALL, dtype=[torch.float16]),
    every(shape=[*LARGE, (1, 64, 8, 8192, 300, 64)], dtype=DTYPES),
)
def test_lse_of_the_keys_before_they_were_smoothed(runner, case):
    """Also of rows that see no key, and of channels apart."""
    q, k, _ = runner.qkv(*case["shape"], dtype=case["dtype"])
    k_mean, lse = k.float().mean(2) + 3, torch.randn(q.shape[:3], device=q.device)
    lse[..., ::3] = -torch.inf
    for x in (q, q.mT.contiguous().mT):
        (expected,) = _unsmoothed_lse(lse.double(), x.double(), k_mean.double(), -0.3)
        found = launch_unsmooth(lse, x, k_mean, -0.3, run)
        assert_close(found, expected.float(), rtol=1e-5, atol=1e-4)


# -- attention ----

SMALL_BANDS = [
    (None, None, False), (None, 0, False), (None, 0, True), (20, 0, False), (40, 30, True),
    (130, None, False), (150, 70, False),
]  # fmt: skip
HEADS = [(2, 2, 1), (1, 2, 2), (1, 4, 2), (2, 1, 1)]  # B, H_q, H_kv: no group that h % H_kv tells
TILES = [(64, 64), (64, 128), (128, 64), (128, 128)]  # BLOCK_M, BLOCK_N
INTERPRETED = [
    "sage2-8b", "sage2-8b-per-token", "sage2-8b-fp8qk", "sage2-4b", "sage1", "sage1-per-token",
    "sage2-8b-rotated",
]  # fmt: skip


def that_runs(recipe, tile, heads, blocks_q, blocks_kv):
    """A tile holds all rows that share a scale; NVFP4 takes four times as long."""
    blocks = heads[0] * heads[1] * max(blocks_q, 1) * max(blocks_kv, 1)
    return blocks <= (8 if recipe == "sage3" else 16) and tile_fits(recipe, tile[0])


# The values of an axis for which a kernel runs the same lines: each runs, and of pairs one.
ALIKE = dict(
    recipe=lambda recipe: (NAMED[recipe].qk, NAMED[recipe].pv, NAMED[recipe].rotated),
    band=lambda band: tuple(side is not None for side in band[:2]),
    channels=lambda channels: tuple(D in (40, 72, 80) for D in channels),
    # None, a row of keys for all queries, numbers, a row each.
    mask=lambda mask: {"none": 0, "keys": 1, "left padding": 1, "fp16": 3, "lowest": 3, "-inf": 3}.get(mask, 2),
    heads=lambda heads: heads[1] > heads[2],
)  # fmt: skip
SMALL_CALLS = dict(
    recipe=[*INTERPRETED, "sage3"], band=SMALL_BANDS, heads=HEADS,
    channels=[(16, 16), (64, 64), (80, 32), (32, 80), (128, 64), (40, 72)],  # D, D_v
    tile=TILES, blocks_q=[0, 1, 2], end_q=[-1, 0, 1], blocks_kv=[0, 1, 2, 4], end_kv=[-1, 0, 1],
    scale=[0.125, -0.3, 0.0], tma=[False, True], out_bnhd=[True, False],
)  # fmt: skip
LARGE_CALLS = dict(
    op=list(OPS), recipe=RECIPES, band=list(BANDS), heads=[(2, 4, 4), (2, 8, 2), (1, 4, 1), (3, 2, 1)],
    channels=[
        (128, 128), (64, 64), (80, 80), (32, 32), (96, 8), (8, 96), (72, 72), (192, 256), (64, 128),
        (128, 40),
    ],
    blocks_q=[0, 1, 2, 5, 16], end_q=[-1, 0, 1, 40], blocks_kv=[0, 1, 4, 12, 32],
    end_kv=[-1, 0, 1, 33], scale=[0.1, -0.3, 0.0, 2.0],
)  # fmt: skip
SMALL_MASKS = [
    "none", "keys", "left padding", "rows", "transposed", "broadcast keys", "fp16", "lowest", "-inf",
]  # fmt: skip


def kernel_of(op=None, tile=None, size=None, **given):
    """An op on a GPU, or in the interpreter by a tile."""
    if op is not None:
        return OPS[op]
    tile = Tile(*tile, 4, 2)
    return Interpreted(tile if size is None else of_blocks(tile, *size), **given)


def check_call(
    recipe, band, heads, channels, blocks_q, end_q, blocks_kv, end_kv, scale, mask="none",
    out_bnhd=True, **of_kernel,
):  # fmt: skip
    """At the ends of tiles, with another head_dim of v."""
    lengths = length(blocks_q, 64, end_q), length(blocks_kv, 64, end_kv)
    kernel, band = kernel_of(**of_kernel), BANDS.get(band, band)
    check_attention(kernel, recipe, heads, lengths, channels, scale, band, mask, out_bnhd=out_bnhd)


@on(
    pairs(that_runs, most=800, alike=ALIKE, **SMALL_CALLS, mask=SMALL_MASKS),
    pairs(most=800, **LARGE_CALLS),
)
def test_attention(runner, case):
    check_call(**case)


@in_interpreter
@pytest.mark.parametrize("mask", [name for name in MASKS if name not in SMALL_MASKS])
def test_masks_that_else_only_a_gpu_has(mask):
    check_attention(
        kernel_of(tile=(64, 128)), "sage2-8b-per-token", (2, 4, 2), (70, 140), (16, 16), mask=mask
    )


@in_interpreter
@pytest.mark.parametrize("widths", [(1, 3), (3, 1)])
def test_the_two_lists_of_blocks_may_have_two_widths(widths):
    """Rows of each list begin where its own width says."""
    lists = []
    for width in widths:
        count = torch.randint(0, width + 1, (1, 2, 2), dtype=torch.int32)
        count[0, 0] = width
        index = torch.stack([torch.randperm(3)[:width] for _ in range(4)]).int()
        lists += [count, index.view(1, 2, 2, width)]
    check_attention(
        kernel_of(tile=(64, 64), size=(64, 64)), "sage1-per-token", (1, 2, 1), (100, 180), (16, 16),
        lists=BlockLists(*lists, 64, 64),
    )  # fmt: skip


@on(
    gpu=pairs(
        most=800, mask=[name for name in MASKS if MASKS[name]],
        **LARGE_CALLS | {"channels": [(128, 128), (64, 128), (80, 40), (8, 96), (72, 72), (192, 256)]},
    ),
)  # fmt: skip
def test_masked_attention(runner, case):
    check_call(**case)


def that_lists(recipe, block_q, tile, block_kv, heads, blocks_q, blocks_kv):
    elements = heads[0] * heads[1] * max(blocks_q, 1) * block_q * max(blocks_kv, 1) * block_kv
    return elements <= 140_000 and tile_fits(recipe, math.gcd(tile[0], block_q))


SMALL_LISTS = dict(
    recipe=INTERPRETED, block_q=BLOCK_SIZES, block_kv=BLOCK_SIZES,
    density=[0.05, 0.3, 1], full=[True, False], shared=["both", "neither"], heads=HEADS[:3],
    channels=[(64, 64), (80, 32), (16, 40)], tile=TILES[1:], blocks_q=[0, 1, 2], end_q=[-1, 0, 1],
    blocks_kv=[0, 1, 2], end_kv=[-1, 0, 1], tma=[False, True],
)  # fmt: skip
LARGE_LISTS = dict(
    block_q=BLOCK_SIZES, block_kv=BLOCK_SIZES, band=list(BANDS), mask=["none", "keys"],
    heads=[(2, 4, 4), (2, 4, 2), (2, 3, 1)], channels=[(D, D) for D in (64, 72, 128, 256)],
    density=[0.02, 0.3, 1], shared=["batch", "heads", "both", "neither"],
    full=[True, False], blocks_q=[0, 1, 2, 5], end_q=[-1, 0, 1, 40], blocks_kv=[0, 1, 3, 7],
    end_kv=[-1, 0, 1, 33],
)  # fmt: skip


def check_lists(
    recipe, block_q, block_kv, density, full, shared, heads, channels, blocks_q, end_q, blocks_kv,
    end_kv, band=(None, None, False), mask="none", tail_block=None, **of_kernel,
) -> bool:  # fmt: skip
    """Lengths at the ends of listed blocks, empty rows, duplicates, GQA, bands, masks; what lies
    beyond a list's count is no block. shared: what has the same lists. Whether it was the Hopper
    kernel, or is not for such a call."""
    lengths = length(blocks_q, block_q, end_q), length(blocks_kv, block_kv, end_kv)
    size, (B, H, _) = (block_q, block_kv), heads
    kernel, band = kernel_of(**of_kernel, size=size), BANDS.get(band, band)
    of = 1 if shared in ("batch", "both") else B, 1 if shared in ("heads", "both") else H
    lists = support.block_lists(*of, *lengths, *size, density, full, kernel.runner.device)
    lists = lists._replace(tail_block=tail_block)
    found = check_attention(kernel, recipe, heads, lengths, channels, 0.1, band, mask, lists)
    return found or (NAMED[recipe].pv == "16bit" and (mask != "none" or max(channels) > 128))


@on(
    pairs(
        that_lists, most=1800, alike=ALIKE, band=SMALL_BANDS, mask=["none", "keys", "rows", "fp16"],
        **SMALL_LISTS,
    ),
    pairs(
        lambda recipe, block_q: tile_fits(recipe, block_q), most=600, op=list(OPS),
        recipe=[name for name, r in NAMED.items() if not r.of_qk.block_scaled], **LARGE_LISTS,
    ),
)  # fmt: skip
def test_attention_by_block_lists(runner, case):
    check_lists(**case)


@on(
    gpu=pairs(
        most=600, **LARGE_LISTS,
        recipe=["sage2-8b-per-token", "sage1-per-token", "sage2-8b-rotated", "sage1-rotated"],
    )
)  # fmt: skip
@on_hopper
def test_hopper_kernel_by_block_lists(runner, case, monkeypatch):
    monkeypatch.setattr(tiles, "LISTED_KEYS", 0)  # of short calls the other kernel is faster
    assert check_lists(op="opaque", **case)


# As lists are drawn, but with at most half the blocks named, of whatever number of keys.
OF_TAIL = dict(tail_block=[32, 64], mask=["none", "keys", "left padding"], density=[0.05, 0.4, 1])
TAILED = [name for name, r in NAMED.items() if not r.of_qk.smooths_q]


@on(
    pairs(
        that_lists, most=400, alike=ALIKE,
        **SMALL_LISTS | OF_TAIL | dict(recipe=[x for x in INTERPRETED if x in TAILED], blocks_kv=[0, 1, 3]),
    ),
    pairs(
        lambda recipe, block_q: tile_fits(recipe, block_q), most=300, op=list(OPS), recipe=TAILED,
        **{x: y for x, y in LARGE_LISTS.items() if x != "band"} | OF_TAIL | dict(blocks_kv=[0, 1, 3, 40]),
    ),
)  # fmt: skip
def test_attention_by_block_lists_with_a_tail(runner, case):
    check_lists(**case)


@on(
    gpu=pairs(
        most=300, recipe=["sage2-8b-per-token", "sage1-per-token", "sage2-8b-rotated"],
        **{x: y for x, y in LARGE_LISTS.items() if x != "band"} | OF_TAIL | dict(blocks_kv=[0, 1, 3, 40]),
    )
)  # fmt: skip
@on_hopper
def test_hopper_kernel_by_block_lists_with_a_tail(runner, case, monkeypatch):
    """Of up to 10,000 keys: three tiles of the tail and more."""
    monkeypatch.setattr(tiles, "LISTED_KEYS", 0)
    assert check_lists(op="opaque", **case)


@in_interpreter
@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("recipe", ["sage2-8b", "sage1-per-token"])
def test_a_tail_of_several_tiles(recipe, tma):
    check_lists(
        recipe, 64, 64, 0.3, True, "neither", (1, 2, 1), (64, 64), 1, -20, 37, -9, mask="left padding",
        tail_block=32, tile=(64, 64), tma=tma,
    )  # fmt: skip


@in_interpreter
@pytest.mark.parametrize("full", [False, True])
def test_what_the_last_listed_block_lacks_does_not_count(full):
    """Without a band, which would hide it: a 64th key of score 0 in each row. p in 16 bits shows it."""
    lists = support.block_lists(1, 1, 64, 63, 64, 64, 1, full)
    kernel, heads = kernel_of(tile=(64, 64)), (1, 1, 1)
    check_attention(kernel, "sage1-per-token", heads, (64, 63), (16, 16), lists=lists)


@pytest.mark.gpu
@pairs(
    op=list(OPS), recipe=["sage2-8b", "sage2-8b-per-token", "sage2-8b-fp8qk", "sage2-4b"],
    band=["full", "causal", "bottom right", "narrow"],
    lengths=[(1, 300), (300, 1), (1, 1), (2, 300)],
)  # fmt: skip
def test_a_length_of_one_is_no_constant(op, recipe, band, lengths):
    """Where Triton made it one, ptxas (CUDA 12.8) converted p's equal pairs to garbage."""
    check_attention(OPS[op], recipe, (1, 2, 2), lengths, (64, 64), band=BANDS[band])


@in_interpreter
@pytest.mark.parametrize("N_q", [127, 128, 129, 256])
@pytest.mark.parametrize("recipe", ["sage2-4b", "sage3"])
def test_means_of_q_at_the_ends_of_its_blocks_of_128(recipe, N_q):
    check_attention(kernel_of(tile=(128, 64)), recipe, (1, 2, 1), (N_q, 65), (16, 16))


@in_interpreter
@pytest.mark.parametrize("mask", ["keys", "rows"])
@pytest.mark.parametrize("recipe", [*INTERPRETED, "sage3"])
def test_what_kernels_prepared_of_hidden_keys_that_hold_no_number(recipe, mask):
    """With another head_dim of v."""
    channels, heads = {"keys": ((32, 64), (2, 1, 1)), "rows": ((64, 16), (1, 2, 1))}[mask]
    kernel = kernel_of(tile=(128, 64), prepared=prepared_by_kernels)
    check_attention(kernel, recipe, heads, (66, 129), channels, mask=mask)


def prepared_by_kernels(k, v, visible, r) -> Prepared:
    found = launch_prepare(
        run, Gpu((8, 0), 1), k, v, visible, r
    )  # of an older one kernels do not overlap
    assert all(x.float().isfinite().all() for x in found.tensors())
    return found


# -- the Hopper kernel by each of its tiles ----

hopper_rows = pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row[:4])))


def check_hopper(row, shape, scale=0.1, band="", rotated=False, **given):
    """By the tile of a row of tiles.HOPPER."""
    pv, head_dim, is_causal, _, tile = row
    band = BANDS[band or ("causal" if is_causal else "full")]
    channels, r = (head_dim, head_dim), Recipe("per_token", pv, rotated=rotated)
    check_attention(OfHopper(tile=tile), r, shape[:3], shape[3:], channels, scale, band, **given)


@on_hopper
@hopper_rows
def test_hopper_kernel_at_every_length(row):
    """Tails, rows that see less than a block, programs that get one tile, or none, of the last."""
    for N in (1, 15, 63, 64, 65, 127, 129, 191, 193, 1000):
        check_hopper(row, (1, 2, 2, N, N), rotated=N > 64)
        check_hopper(row, (1, 2, 2, 193, N))
        check_hopper(row, (1, 2, 2, N, 300))


@on_hopper
@hopper_rows
def test_hopper_kernel_with_many_heads(row):
    for heads, group in ((1, 1), (8, 2), (28, 4), (21, 7), (64, 8), (200, 1)):
        check_hopper(row, (1, heads, heads // group, 321, 321))
    check_hopper(row, (3, 6, 3, 500, 200))
    check_hopper(row, (1, 3, 1, 4097, 4097))


@on_hopper
@hopper_rows
def test_hopper_kernel_on_other_memory(row):
    """[B, H, N, D] and fused q, k, v; fp16; q quantized with a negative scale, and with none."""
    shape = (2, 4, 4, 200, 300)
    check_hopper(row, shape, stored=torch.Tensor.contiguous)
    check_hopper(row, shape, stored=lambda x: torch.cat([x, x, x], 3)[..., : x.shape[3]])
    for rotated in (False, True):
        check_hopper(row, shape, dtype=torch.float16, rotated=rotated)
    for scale in (-0.3, 0.0, 2.0):
        check_hopper(row, shape, scale, rotated=scale < 0)


@on_hopper
@pairs(row=[row for row, split in VARIANTS if split], heads=[2, 50], rows=[1, 2, 3.5])
def test_hopper_kernel_split_over_keys(row, heads, rows):
    """Few tiles, or tiles that do not go round: a tile is several programs' work."""
    N_q = int(rows * row[4].BLOCK_M)
    assert cuts(heads, N_q, 5000, row[4])
    check_hopper(row, (1, heads, heads // 2, N_q, 5000), rotated=heads == 50)


MASKED = (2, 8, 2, 700, 300), (1, 4, 4, 333, 1000), (2, 2, 1, 65, 129), (1, 30, 10, 1500, 1700)
ONE = (1, 2, 2, 1, 300), (1, 2, 2, 300, 1), (1, 1, 1, 1, 1)
of_full = [row for row in ROWS if not row[2]]
ENDS = (2, 4, 2, 383, 257), (1, 2, 2, 385, 255), (1, 2, 1, 193, 641)  # of tiles


@on_hopper
@pairs(
    among=lambda shape: shape in MASKED[:3] + ONE[:1] + ENDS, row=of_full, band=list(BANDS),
    shape=[*MASKED, *ONE, *ENDS],
)  # fmt: skip
def test_hopper_kernel_in_a_band(row, band, shape):
    check_hopper(row, shape, band=band)


@on_hopper
@pairs(
    among=lambda shape: shape in MASKED[:3] + ONE[:1] + ENDS,
    row=[row for row in of_full if row[0] == "fp8"],  # triton.py computes 16-bit
    mask=BOOL, band=list(BANDS), shape=[*MASKED, *ONE, *ENDS], scale=[0.1, 0.0],
)  # fmt: skip
def test_hopper_kernel_with_a_mask(row, mask, band, shape, scale):
    check_hopper(row, shape, scale, band, mask=mask)
