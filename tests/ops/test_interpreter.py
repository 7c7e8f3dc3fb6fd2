"""Parts of kernels, the Hopper kernel's lists, blocks of tokens and training, in Triton's interpreter.

test_kernels.py compares whole attention kernels and the preparation of k and v with their emulation.
kernel_cases.py says what the interpreter cannot do.
"""

import collections
import functools
import itertools
import math
import random

import pytest
import support
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from kernel_cases import INTERPRETER, length
from pairs import chosen, has_every_variant, pairs, seeds
from support import attention_call, relative_l2, run, run_portable
from torch.testing import assert_close

from sage_inductor.ops import visibility
from sage_inductor.ops.attention import triton as triton_kernel
from sage_inductor.ops.attention.hopper import kernel as hopper
from sage_inductor.ops.attention.hopper import plan, tile_lists
from sage_inductor.ops.attention.tiles import Tile
from sage_inductor.ops.formats import E4M3_MAX, QK, TINY
from sage_inductor.ops.launch import doubled
from sage_inductor.ops.quantize import codes as rounding
from sage_inductor.ops.quantize import nvfp4
from sage_inductor.ops.quantize.rotate import in_16_bits
from sage_inductor.ops.quantize.smooth import launch_smooth
from sage_inductor.ops.recipe import NAMED
from sage_inductor.ops.reference import quantize as reference
from sage_inductor.ops.reference import rowscaled
from sage_inductor.ops.reference import training as of_training
from sage_inductor.ops.sparse import listed, selector
from sage_inductor.ops.sparse import pool as of_tokens
from sage_inductor.ops.sparse.selector import Selection
from sage_inductor.ops.training import kernels as training
from sage_inductor.ops.training.hopper import prepare
from sage_inductor.ops.training.hopper.prepare import launch_prepare
from sage_inductor.ops.training.kernels import empty_codes, launch_quantize
from sage_inductor.ops.visibility import BLOCK_SIZES, Band, BlockLists, Visibility

pytestmark = [*INTERPRETER.marks, pytest.mark.usefixtures("poisoned")]
qkv = INTERPRETER.qkv


@pytest.mark.parametrize("recipe, smooths_q", [("sage2-4b", False), ("sage2-8b", True)])
def test_int4_k_comes_with_what_smoothing_q_made(recipe, smooths_q):
    q, k, v = qkv(2, 4, 2, 70, 127, 64)
    a = support.attention_call(q, k, v, recipe)._replace(
        q_mean=q if smooths_q else None, delta=q if smooths_q else None
    )
    with pytest.raises(ValueError, match=f"only that: k is {NAMED[recipe].qk}"):
        triton_kernel.launch(a, Tile(64, 64, 4, 2), run)


@triton.jit
def _through_scale(X, Scale, QK_MAX: tl.constexpr):
    at = tl.arange(0, 8)
    tl.store(Scale + at, rounding.scale_of(rounding.abs_bits(tl.load(X + at)), QK_MAX)[1])


@pytest.mark.parametrize("qk", ["int4", "int8", "fp8"])
def test_the_scale_of_a_group_with_an_inf_is_nan(qk):
    qk = QK[qk]
    x = torch.tensor([0.0, -0.0, 1e-38, 3.0, -1e38, math.inf, -math.inf, math.nan])
    found = torch.empty(8)
    _through_scale[(1,)](x, found, qk.largest)
    _, scale = reference._to_codes(x[None, None, :, None], qk, torch.arange(8), 8)
    assert_close(found, scale[0, 0], rtol=2**-23, atol=0, equal_nan=True)
    assert found[5:].isnan().all() and found[:5].isfinite().all() and (found[:5] > 0).all()


@triton.jit
def _through_phi(X, Codes, Scales, Back, C: tl.constexpr):
    row = tl.arange(0, 16)[:, None]
    x_fp4, x_e4m3 = nvfp4.quantize_blocks(tl.load(X + row * C + tl.arange(0, C)[None, :]), False)
    tl.store(Codes + row * (C // 2) + tl.arange(0, C // 2)[None, :], x_fp4)
    tl.store(Scales + row * (C // 16) + tl.arange(0, C // 16)[None, :], x_e4m3)
    back = nvfp4.decode_nvfp4(x_fp4, x_e4m3)
    tl.store(Back + row * C + tl.arange(0, C)[None, :], back.to(tl.float32))


def test_phi_and_back():
    """All of the formats: ties, the smallest and the largest numbers, what is not finite."""
    x = torch.randn(16, 64) * torch.logspace(-4, 4, 16)[:, None]
    e2m1 = torch.tensor(
        [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, -0.25, -0.75, -0.0, -5, 0, 1, 3, 4]
    )
    x[3], x[4], x[5] = e2m1.repeat(4), 448 * e2m1.repeat(4), 0
    x[6, 5], x[7, 20] = torch.nan, torch.inf
    codes, scales = x.new_zeros(16, 32, dtype=torch.uint8), x.new_zeros(16, 4, dtype=torch.uint8)
    back = torch.zeros_like(x)
    _through_phi[(1,)](x, codes, scales, back, 64)
    code, scale = reference.phi(x)
    assert torch.equal(codes, code[:, ::2] | code[:, 1::2] << 4) and torch.equal(scales, scale)
    assert_close(back, reference.phi_inverse(code, scale), rtol=0, atol=0, equal_nan=True)


@chosen(
    lambda recipe, bottom_right: recipe != "sage3" or bottom_right,  # 4 times slower
    recipe=["sage1-per-token", "sage3"], bottom_right=[False, True],
)  # fmt: skip
def test_a_band_shows_each_row_its_keys_and_no_other(recipe, bottom_right):
    """With k = 0 every key that a row sees weighs the same: exp(lse) is their number, exactly, and
    v, the keys' numbers, averages to their centre. Bounds at the edges of tiles of 64."""
    N_q, N_kv = 70, 140
    bounds = (None, 0, 62, 63, 64) if recipe == "sage1-per-token" else (None, 0, 63)
    q, k = (torch.randn(1, 1, N, 16).half() for N in (N_q, N_kv))
    v = (torch.arange(N_kv) / 8 - 12).half()[None, None, :, None].expand(1, 1, N_kv, 16)
    for left, right in itertools.product(bounds, bounds):
        if left not in (None, 63) and right not in (None, 0):
            continue  # each bound with none and with one of the other side
        (out, lse), _ = run_portable(
            q, k * 0, v, recipe, Tile(64, 64, 4, 2), band=(left, right, bottom_right)
        )
        seen = support.band_mask(Band(left, right, bottom_right), N_q, N_kv)
        assert_close(lse[0, 0].exp(), seen.sum(1).float(), rtol=1e-5, atol=0)
        if recipe == "sage1-per-token":
            centre = (seen * v[0, 0, :, 0]).sum(1) / seen.sum(1)
            assert_close(out[0, 0, :, 0].float(), centre.float(), rtol=1e-3, atol=2e-2)


@pytest.mark.parametrize("size, bias", [(1e7, 0.0), (1.2e8, 0.0), (4e8, 0.0), (1e7, -1e5)])
@pytest.mark.parametrize("recipe", ["sage1", "sage2-8b", "sage2-4b", "sage3"])
def test_large_scores(size, recipe, bias):
    """What is taken off them is the emulation's. With a window: tiles with and without a mask."""
    k, v = torch.randn(2, 1, 1, 150, 16).half()
    q = torch.randint(-127, 128, (1, 1, 150, 16))  # its codes: no ties, of which one moves a row
    q[..., 0] = 127
    # The maxima of rows are about `size`: numbers are 1, 16 and 64 apart there in log2 units.
    q, k = (256 * q).half(), k * (size / 256 / 830)
    mask = torch.full((150, 150), bias) if bias else None
    tile = Tile(128 if recipe == "sage1" else 64, 64, 4, 2)
    (out, lse), (expected, expected_lse) = run_portable(
        q, k, v, recipe, tile, 1.0, mask, (120, None, False)
    )
    assert_close(lse, expected_lse, rtol=1e-6, atol=0)
    assert relative_l2(out, expected) < {"sage1": 2e-3, "sage3": 5e-3}.get(recipe, 2e-2)


@triton.jit
def _through_16_bits(X, Out):
    at = tl.arange(0, 4)
    tl.store(Out + at, in_16_bits(tl.load(X + at), X).to(tl.float32))


def test_numbers_in_fp32_are_rotated_as_bf16():
    """fp16 holds neither the first three, nor is the last one rounded by it."""
    x = torch.tensor([1e6, -3e38, 1e-30, 1 + 2**-10])
    found = torch.empty(4)
    _through_16_bits[(1,)](x, found)
    assert_close(found, x, rtol=2**-7, atol=0)  # the interpreter truncates
    assert found[3] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", ["sage1-per-token", "sage3"])
def test_a_row_of_nothing_but_the_lowest_number_averages_over_all_keys(recipe, dtype):
    """As softmax by hand does: whatever is added to the lowest number is lost."""
    q, k, v = qkv(1, 1, 1, 20, 70, 16)
    attn_mask = torch.zeros(1, 1, 20, 70, dtype=dtype)
    attn_mask[:, :, 3:7] = torch.finfo(dtype).min
    tile = Tile(64, 64, 4, 2)
    (out, _), (expected, _) = run_portable(q, k, v, recipe, tile, attn_mask=attn_mask)
    mean = v.double().mean(2, keepdim=True)
    assert relative_l2(out[:, :, 3:7], mean.expand(1, 1, 4, 16)) < 0.05
    assert relative_l2(out, expected) < 2e-3


def test_indices_beyond_the_keys_name_no_key_and_counts_beyond_a_list_end_with_it():
    q, k, v = qkv(1, 1, 1, 64, 130, 16)
    tile = Tile(64, 64, 4, 2)

    def run(counts, indices):
        lists = [torch.tensor(x, dtype=torch.int32)[None, None] for x in (counts, indices)]
        return run_portable(
            q, k, v, "sage1-per-token", tile, blocks=BlockLists(*lists, None, None, 64, 128)
        )

    (out, lse), (expected, expected_lse) = run([9], [[5, 1, 2**30]])
    assert_close(lse, expected_lse, rtol=1e-4, atol=0.02)
    assert relative_l2(out, expected) < 2e-3
    (alone, _), _ = run([1], [[1, 0, 0]])
    assert torch.equal(out, alone)


def test_pieces_of_a_tile_of_hoppers_kernel_make_up_the_tile(monkeypatch):
    """Four tiles of five blocks, dealt to seven programs: shares end at blocks 2, 5 (a tile's end),
    8, 11, 14 and 17. Slots are NaN where no piece was stored; a tile in one piece, none here, is
    not touched. And to three: shares end at 6 and 13, tiles 0 and 3 in one piece."""
    monkeypatch.setattr(
        hopper, "_streamk_share", lambda c, of, n: c * n // of
    )  # an int has no `.to` here
    B, H_q, H_kv, N_q, D_V, BLOCK_M, blocks, width = 2, 1, 1, 100, 10, 64, 5, 4
    heads, num_m, offset = B * H_q, 2, math.log2(E4M3_MAX)
    x = 3 * torch.randn(heads * num_m, BLOCK_M, blocks * width)  # by tile: log2 units
    v = torch.randn(heads * num_m, blocks * width, 16)
    v_scale, v_mean = torch.rand(B, H_kv, D_V) + 1, torch.randn(B, H_kv, D_V)
    for programs, in_one_piece in ((7, ()), (3, (0, 3))):
        part = torch.full((2 * programs, BLOCK_M, 16), torch.nan)
        part_ml = torch.full((2 * programs, 2, BLOCK_M), torch.nan)
        total = heads * num_m * blocks
        for program in range(programs):
            lo, hi = (total * p // programs for p in (program, program + 1))
            for t in range(lo // blocks, (hi - 1) // blocks + 1):
                begin, end = max(lo - t * blocks, 0), min(hi - t * blocks, blocks)
                keys, slot = slice(begin * width, end * width), 2 * program + (begin == 0)
                if end - begin < blocks:
                    m = x[t, :, keys].amax(1)
                    p = torch.exp2(x[t, :, keys] - m[:, None] + offset)
                    part_ml[slot], part[slot] = torch.stack([m, p.sum(1)]), p @ v[t, keys]
        out = torch.full((B, H_q, N_q, D_V), torch.nan)
        lse, maximum = (both := torch.full((2, B, H_q, N_q), torch.nan))
        hopper._combine_kernel[(heads * num_m, 2)](
            part, part_ml, v_scale, v_mean, out, both, *doubled(out.stride())[:3], heads, H_q, H_kv, N_q,
            num_m, 0, blocks, programs, D_V, True, True, BLOCK_M, 16, 32,
        )  # fmt: skip
        for t in range(heads * num_m):
            head, m = divmod(t, num_m)
            m = num_m - 1 - m if (heads - 1 - head) % 2 == 0 else m
            here = [y[head, 0, m * BLOCK_M :][:BLOCK_M] for y in (out, lse, maximum)]
            if t in in_one_piece:
                assert all(y.isnan().all() for y in here)
                continue
            weights = (x[t] * math.log(2)).softmax(1)[: len(here[0])]
            expected = (weights @ v[t])[:, :D_V] * v_scale[head] + v_mean[head]
            assert_close(here[0], expected, rtol=1e-4, atol=1e-5)
            assert_close(here[1], (x[t] * math.log(2)).logsumexp(1)[: len(here[0])])
            assert torch.equal(here[2], x[t].amax(1)[: len(here[0])])


# -- blocks of keys that the Hopper kernel reads ----


# Of the Hopper kernel's context what `walk` reads.
WALK = collections.namedtuple("WALK", "LISTED LEFT RIGHT BOTTOM_RIGHT BLOCK_M BLOCK_N N_q N_kv")


@triton.jit
def _walk_kernel(
    First, Count, Codes, N_q, N_kv, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles,). First, Count [tiles]; Codes [tiles, BLOCK_M / 64, BLOCKS]."""
    row = tl.program_id(0) * BLOCK_M
    ctx = WALK(False, LEFT, RIGHT, BOTTOM_RIGHT, BLOCK_M, 128, N_q, N_kv)
    first, _, count = tile_lists.walk(0, 0, row, ctx)
    tl.store(First + tl.program_id(0), first)
    tl.store(Count + tl.program_id(0), count)
    for i in range(0, BLOCK_M // 64):
        j = tl.arange(0, BLOCKS)
        code = tile_lists.band_code(j, row + 64 * i, N_q, N_kv, LEFT, RIGHT, BOTTOM_RIGHT, 128)
        tl.store(Codes + (row // 64 + i) * BLOCKS + j, code)


def sees(n_q: int, n_kv: int, left: int, right: int, bottom_right: bool) -> torch.Tensor:
    """bool [n_q, n_kv]; left, right: -1 where there is no bound."""
    left, right = (None if n < 0 else n for n in (left, right))
    return support.band_mask(Band(left, right, bottom_right), n_q, n_kv)


def expected_codes(seen: torch.Tensor, block_m: int) -> torch.Tensor:
    """seen [N_q, N_kv] -> [tiles * block_m / 64, blocks], of blocks that nothing lies beyond."""
    n_q, n_kv = seen.shape
    tiles, count = -(-n_q // block_m), -(-n_kv // 128)
    some, every = torch.zeros(2, tiles * block_m, count * 128, dtype=torch.bool)
    some[:n_q, :n_kv] = seen
    every[:n_q, :n_kv] = seen
    every[n_q:] = True
    some, every = (x.unflatten(0, (-1, 64)).unflatten(2, (-1, 128)) for x in (some, every))
    some, every = some.any(3).any(1), every.all(3).all(1)
    return torch.where(some, torch.where(every, 3, 1), 0).int()


@pytest.mark.parametrize("block_m", [128, 192])
@pytest.mark.parametrize("bottom_right", [False, True])
def test_blocks_of_a_band_are_those_in_sight(bottom_right, block_m):
    """Against brute force. A row that a tile has beyond N_q may leave a block a part that its others
    see whole; no block is left out, none is whole that is not, and at most one a side is for
    nothing."""
    rng = random.Random(block_m)
    for _ in range(60 if has_every_variant() else 12):
        n_q, n_kv = rng.choice((1, 64, 65, 300, 400)), rng.choice((1, 127, 128, 300, 500))
        band = rng.choice((-1, 0, 3, 130, 400)), rng.choice((-1, 0, 5, 128, 300)), bottom_right
        count, tiles = -(-n_kv // 128), -(-n_q // block_m)
        first, number = torch.zeros(2, tiles, dtype=torch.int32)
        codes = torch.zeros(tiles * block_m // 64, 8, dtype=torch.int32)
        _walk_kernel[(tiles,)](first, number, codes, n_q, n_kv, *band, block_m, 8)
        assert not codes[:, count:].any()
        codes, expected = codes[:, :count], expected_codes(sees(n_q, n_kv, *band), block_m)
        assert ((codes > 0) >= (expected > 0)).all()
        assert ((codes == 3) <= (expected == 3)).all()
        inside = (torch.arange(len(codes)) + 1) * 64 <= n_q
        assert torch.equal(codes[inside] == 3, expected[inside] == 3)
        assert ((codes > 0) & (expected == 0)).sum(1).max() <= 1
        j = torch.arange(count)
        read = (j >= first[:, None]) & (j < (first + number)[:, None])
        of_tile = (codes > 0).unflatten(0, (tiles, -1)).any(1)
        assert (of_tile <= read).all() and (number >= 0).all()
        assert number.sum() <= of_tile.sum() + tiles


def a_mask(kind, rng, B, H, n_q, n_kv):
    """bool [B, H, n_q or 1, n_kv]"""
    of_block = torch.rand(B, H, -(-n_q // 64), -(-n_kv // 128)) * 3 - 1  # nothing, part, all
    shown = of_block.repeat_interleave(64, 2).repeat_interleave(128, 3)[..., :n_q, :n_kv]
    mask = torch.rand(B, H, n_q, n_kv) < shown
    if kind == "keys":
        return mask[:, :, :1]
    if kind == "documents":
        i, j = torch.arange(n_q) * 4 // n_q, torch.arange(n_kv) * 4 // n_kv
        return (i[:, None] == j)[None, None]
    if kind == "expanded":
        return mask[:, :, :1, :1].expand(-1, -1, n_q, n_kv)
    return mask.mT.contiguous().mT if kind == "transposed" else mask


def run_of_mask(m, mask) -> list[torch.Tensor]:
    """Words and Codes of plan._mask's m."""
    words, codes = (torch.full((n,), 85, dtype=dtype) for n, dtype in m.made)
    m.pack.kernel[m.pack.grid](mask, words, codes, *m.pack.numbers)
    return words, codes


def run_lists(of, codes, lists) -> list[list[int]]:
    """plan._lists's `of` -> of each row of List the tile, then the blocks in their order."""
    found = torch.full((of.made,), 85, dtype=torch.int32)
    of.make.kernel[of.make.grid](codes, *lists, found, *of.make.numbers)
    of.rank.kernel[of.rank.grid](found, *of.rank.numbers)
    rows = found.view(-1, of.strides[2])
    read = []
    for whole, count, tile, *entries in rows.tolist():
        read.append([tile, *entries[:whole], *entries[::-1][: count - whole]])
        every = 4 ** of.make.numbers[-3] - 1  # all warpgroups' codes are 3
        assert [entry & 63 == every for entry in read[-1][1:]] == [n < whole for n in range(count)]
    return read


def check_order(rows, num_m):
    """The tiles of each head from the shortest list to the longest."""
    for first in range(0, len(rows), num_m):
        of_head = rows[first : first + num_m]
        order = [row[0] for row in of_head]
        assert sorted(order) == list(range(num_m))
        lengths = [len(of_head[m]) for m in order]
        assert lengths == sorted(lengths)


KINDS = ["keys", "rows", "documents", "expanded", "transposed"]


@chosen(
    lambda kind, warpgroups: (KINDS.index(kind) + warpgroups) % 3 != 0,
    kind=KINDS,
    warpgroups=[1, 2, 3],
)
def test_blocks_and_words_of_a_mask_are_what_it_shows(kind, warpgroups):
    """Against brute force. With a band a block may be read that each shows a part of and both
    nothing; none is left out, none is whole that is not."""
    tile = Tile(64 * warpgroups, 128, 4, 2, warpgroups=warpgroups)
    rng = random.Random(kind)
    for _ in range(3):
        B, H = rng.choice(((1, 2), (2, 1), (2, 2)))
        n_q, n_kv = rng.choice((1, 64, 127, 193, 300)), rng.choice((127, 128, 129, 300))
        n_q = 300 if kind == "documents" else n_q
        band = rng.choice([(-1, -1, False), (-1, 0, False), (130, 5, True)])
        mask = a_mask(kind, rng, B, H, n_q, n_kv)
        m = plan._mask(mask.shape, mask.stride(), n_q, n_kv, tile.BLOCK_N)
        of = plan._lists(m, None, (B, H), n_q, n_kv, band, tile, tile.BLOCK_N)
        words, codes = run_of_mask(m, mask)
        rows = run_lists(of, codes, (codes,) * 4)

        b, h, i = (torch.arange(n).view(shape) for n, shape in
                   ((B, (-1, 1, 1, 1)), (H, (1, -1, 1, 1)), (n_q, (1, 1, -1, 1))))  # fmt: skip
        j = torch.arange(n_kv)
        of_words = m.strides[0] * b + m.strides[1] * h + m.strides[2] * i + j // 32
        assert torch.equal((words[of_words] >> j % 32 & 1).bool(), mask.expand(B, H, n_q, n_kv))

        count, num_m = -(-n_kv // 128), -(-n_q // tile.BLOCK_M)
        check_order(rows, num_m)
        for b, h, tile_m in itertools.product(range(B), range(H), range(num_m)):
            row = (of.strides[0] * b + of.strides[1] * h) // of.strides[2] + tile_m
            found = torch.tensor(rows[row][1:], dtype=torch.int64)
            assert len(found) == len((found >> 6).unique())  # each once
            given = torch.zeros(warpgroups, count, dtype=torch.int32)
            for entry in found.tolist():
                given[:, entry >> 6] = torch.tensor([entry >> 2 * w & 3 for w in range(warpgroups)])
            assert (given != 2).all() and given[:, found >> 6].any(0).all()
            seen = mask.expand(B, H, n_q, n_kv)[b, h] & sees(n_q, n_kv, *band)
            expected = expected_codes(seen, tile.BLOCK_M)[tile_m * warpgroups :][:warpgroups]
            assert ((given > 0) >= (expected > 0)).all()
            assert ((given == 3) <= (expected == 3)).all()
            if band == (-1, -1, False):
                assert torch.equal(given, expected)


@pairs(
    alike=dict(block_q=lambda n: n % 192 == 0),
    warpgroups=[1, 2, 3], block_q=BLOCK_SIZES, masked=[False, True],
)  # fmt: skip
def test_a_tile_reads_the_blocks_that_its_lists_name(warpgroups, block_q, masked):
    """Against brute force: each as often as it is named, by a full block's list whatever the band
    says, by a partial one's in the band; and only where a mask shows a key."""
    rng = random.Random(block_q + masked)
    for draw in range(2) if has_every_variant() else [(warpgroups + masked + 1) % 2]:
        block_kv, keys = rng.choice(BLOCK_SIZES), rng.choice((64, 128))
        n_q = rng.choice((127, 192, 193, 128 * warpgroups + 1))
        n_kv = rng.choice((127, 128, 257, 385))
        at_a_time = 512  # blocks of a program: there may be more in all
        if draw == 0 and block_q == 64:
            block_kv, n_q, n_kv, at_a_time = 64, 30, 2200, 32
        elif draw == 0:
            block_kv, n_q, n_kv = 64, 64 * warpgroups + 1, 385
        keys = math.gcd(keys, block_kv)
        tile = Tile(64 * warpgroups, keys, 4, 2, warpgroups=warpgroups)
        (B, H), full = ((1, 2), (2, 1))[draw], rng.random() < 0.7
        band = rng.choice([(-1, -1, False), (-1, 0, False), (130, 5, True), (100, -1, False)])
        heads = rng.choice((1, B)), rng.choice((1, H))
        lists = support.block_lists(*heads, n_q, n_kv, block_q, block_kv, 0.4, full)
        if draw == 0:  # no wider than the longest: a tile of two of the caller's blocks has more
            widths = (max(1, int(count.max())) for count, _ in lists.lists)
            narrow = (indices[..., :n].contiguous() for (_, indices), n in zip(lists.lists, widths))
            lists = lists._replace(**dict(zip(("kv_indices", "full_kv_indices"), narrow)))
        lists.kv_num_blocks[..., 0] += 1000  # beyond the list's width there is nothing
        mask = m = None
        if masked:
            mask = a_mask("rows", rng, rng.choice((1, B)), rng.choice((1, H)), n_q, n_kv)
            m = plan._mask(mask.shape, mask.stride(), n_q, n_kv, tile.BLOCK_N)
        a = attention_call(
            torch.zeros(B, H, n_q, 64), *torch.zeros(2, B, H, 1, 64), "sage2-8b-per-token",
            Visibility(blocks=lists),
        )  # fmt: skip
        tensors, *numbers = a.list_arguments()
        of_lists = heads, sum(map(tuple, numbers), ())
        of = plan._lists(m, of_lists, (B, H), n_q, n_kv, band, tile, keys)
        *rest, chunk = of.make.numbers
        assert chunk == 512
        of = of._replace(make=of.make._replace(numbers=(*rest, at_a_time)))
        codes = run_of_mask(m, mask)[1] if masked else tensors[0]
        rows = run_lists(of, codes, tensors)
        num_m = -(-n_q // tile.BLOCK_M)
        check_order(rows, num_m)
        shown = mask.expand(B, H, n_q, n_kv) if masked else torch.ones(B, H, n_q, n_kv).bool()
        for b, h, tile_m in itertools.product(range(B), range(H), range(num_m)):
            row = (of.strides[0] * b + of.strides[1] * h) // of.strides[2] + tile_m
            given = [collections.Counter() for _ in range(warpgroups)]
            for entry in rows[row][1:]:
                for wg, counter in enumerate(given):
                    counter[entry >> 6, entry >> 2 * wg & 3] += entry >> 2 * wg & 3 != 0
            for wg, counter in enumerate(given):
                first = tile_m * tile.BLOCK_M + 64 * wg
                expected = named_of(lists, b, h, first, n_q, n_kv, keys, band, shown)
                assert +counter == expected, (band, block_kv, keys)


def named_of(lists, b, h, first, n_q, n_kv, keys, band, shown) -> collections.Counter:
    """How often 64 rows from `first` read (block of `keys` keys, with code)."""
    expected = collections.Counter()
    if first >= n_q:
        return expected
    end, (block_q, block_kv) = min(first + 64, n_q), lists.size
    parts = -(-n_kv // keys)
    here = torch.arange(first, first + 64)[:, None] + (n_kv - n_q if band[2] else 0)
    j = torch.arange(parts * keys)
    in_band = ((band[0] < 0) | (j >= here - band[0])) & ((band[1] < 0) | (j <= here + band[1]))

    def some_and_every(seen):
        seen = seen.unflatten(1, (-1, keys))
        return seen.any(2).any(0), seen.all(2).all(0)

    some, every = some_and_every(F.pad(shown[b, h, first:end], (0, parts * keys - n_kv)))
    band_some, band_every = some_and_every(in_band)  # counts what lies beyond N_q and N_kv
    for is_full, (counts, indices) in zip((False, True), lists.lists):
        B, H, _ = counts.shape
        at = min(b, B - 1), min(h, H - 1), first // block_q
        for block in indices[at][: counts[at]].tolist():
            for j in range(block * block_kv // keys, (block + 1) * block_kv // keys):
                if j >= parts or not some[j] or not (is_full or band_some[j]):
                    continue
                whole = every[j] and (is_full or band_every[j])
                expected[j, 3 if whole else 2 if is_full else 1] += 1
    return expected


# -- blocks of tokens ----


def between_nan(*shape, dtype=torch.float32):
    """Random tokens [B, H, N, D], each much like the one before it, in NaN; of other strides."""
    B, H, N, D = shape
    whole = torch.full((N + 2, B, H + 1, 2 * D), torch.nan, dtype=dtype)
    x = whole[1:-1, :, :H, 1::2].permute(1, 2, 0, 3)
    return x.copy_(torch.randn(shape) + torch.randn(B, 1, N, 1).cumsum(2) / 3)


@chosen(
    lambda block, dtype: (dtype == torch.float32) == (block in (64, 192)),
    block=visibility.BLOCK_SIZES,
    dtype=[torch.float32, torch.float16],
)
def test_pooled_blocks(block, dtype):
    for B, H, N, D, shifted in (
        (1, 1, 1, 8, False), (1, 1, 2 * block, 64, True), (2, 2, block + 1, 40, False),
        (2, 2, 9, 40, True), (1, 1, 3 * block - 1, 20, True), (1, 1, block, 256, False),
    ):  # fmt: skip
        x = between_nan(B, H, N, D, dtype=dtype)
        x[:, 0, 0] = 0  # has no direction
        shift = torch.randn(B, H, D) if shifted else None
        for squares in (False, True):
            found = of_tokens._launch_pool(run, None, x, shift, block, squares)
            by_torch = of_tokens.pool_blocks(x, shift, block, squares)
            for y, expected in zip(found, by_torch, strict=True):
                assert_close(y, expected, rtol=2e-6, atol=5e-6)


def test_pooled_blocks_of_differences_that_are_rounded():
    """The shift has the dtype of the tokens. The interpreter truncates to bf16."""
    x, shift = between_nan(2, 2, 150, 40, dtype=torch.half), (9 * torch.randn(2, 2, 40)).half()
    mean, _ = of_tokens._launch_pool(run, None, x, shift, 64)
    assert_close(mean, of_tokens.pool_blocks(x, shift, 64)[0], rtol=2e-6, atol=5e-6)
    assert (mean - of_tokens.pool_blocks(x, shift.float(), 64)[0]).abs().max() > 1e-4


@seeds(24, always=8)
def test_the_largest_scores(seed):
    """Bit by bit: any length, equal scores, infinity and zeros of both signs."""
    draw = random.Random(seed)
    M = draw.choice([1, 2, 37, 511, 512, 513, 1100])
    scores = torch.randn(2, 1, 3, M) * draw.choice([1e-30, 1, 1e30])
    if draw.random() < 0.5:
        scores = scores.sign() * (scores.abs() / scores.std()).floor()  # zeros of both signs
    scores = torch.where(torch.rand(scores.shape) < draw.choice([0, 0.2, 0.9]), torch.inf, scores)
    counts = torch.randint(0, M + 1, scores.shape[:3]).int()
    counts[0] = draw.choice([0, M])
    scores = scores.to(draw.choice([torch.float32, torch.float32, torch.float16, torch.bfloat16]))
    scores = scores.mT.contiguous().mT if draw.random() < 0.3 else scores
    (found,) = of_tokens._launch_largest(run, None, scores.contiguous(), counts)
    assert torch.equal(found, of_tokens.largest(scores, counts))


@seeds(12, always=6)
def test_the_blocks_that_lists_name(seed):
    """Counts beyond the width, indices below 0 and beyond the blocks, rows that name none."""
    draw = random.Random(seed)
    blocks, width, of = draw.choice([1, 37, 600]), draw.choice([1, 37, 520]), draw.choice([1, 3])
    indices = torch.randint(-2, blocks + 2, (2, of, 5, width)).int()
    counts = (torch.randint(0, width + 3, (2, of, 5)) * torch.randint(0, 2, (2, of, 5))).int()
    (found,) = listed._launch_listed(run, None, counts, indices, blocks)
    assert torch.equal(found, listed.listed_blocks(counts, indices, blocks))


@pytest.mark.parametrize("name", ["top_k", "sparsity"])
def test_kernels_compute_as_many_blocks_of_each_head_as_it_keeps(name, monkeypatch):
    q, k, v = (x.cumsum(2) / 4 for x in support.qkv(1, 4, 2, 640, 640, 32, torch.float32))
    asked = Selection(**{name: (0.1, 0.5, 0.5, 1)}, rule="sla")
    given = q, k, 0.1, *asked.arguments()
    expected = torch.ops.sage.select_blocks(*given)
    pool, of_largest = of_tokens._launch_pool, of_tokens._launch_largest
    monkeypatch.setattr(selector, "pool_blocks", functools.partial(pool, run, None))
    monkeypatch.setattr(selector, "largest", lambda *x: of_largest(run, None, *x)[0])
    found = selector.compose_select(*given)
    assert all(map(torch.equal, found, expected))
    kept = [1, 5, 5, 10] if name == "top_k" else [9, 5, 5, 1]
    assert (found[0] == torch.tensor(kept)[:, None]).all()
    lists = BlockLists(*found, None, None, *asked.size)
    q, k, v = q.half(), k.half(), v.half()  # v would be bf16, which the interpreter cannot multiply
    by_kernel, by_torch = run_portable(q, k, v, "sage1-per-token", Tile(64, 64, 4, 2), blocks=lists)
    assert relative_l2(by_kernel[0], by_torch[0]) < 3e-3  # of fp16


def test_of_a_row_with_nan_each_block_is_listed_once():
    scores = torch.where(torch.rand(6, 520) < torch.rand(6, 1), torch.nan, torch.randn(6, 520))
    scores[0], scores[1] = torch.nan, -torch.inf
    counts = torch.randint(0, 521, (6,)).int()
    (found,) = of_tokens._launch_largest(run, None, scores, counts)
    assert torch.equal(found.sort(-1)[0], torch.arange(520).int().expand(6, -1))


@pairs(
    most=600, alike=dict(D=lambda D: D == 80, blocks_q=bool, blocks_kv=bool), among=lambda heads: heads in ((2, 2, 1), (1, 4, 2)),
    heads=[(2, 2, 1), (1, 2, 2), (1, 4, 2), (2, 1, 1)], D=[16, 32, 64, 80, 128],
    blocks_q=[0, 1, 2], end_q=[-1, 0, 1],
    blocks_kv=[0, 1, 2], end_kv=[-1, 0, 1], is_causal=[False, True], scale=[0.1, -0.2],
)  # fmt: skip
def test_training(heads, D, blocks_q, end_q, blocks_kv, end_kv, is_causal, scale):
    """sage::sagebwd's five kernels; `reference` is poisoned too, so nothing is read that is not
    written."""
    N_q, N_kv = length(blocks_q, 64, end_q), length(blocks_kv, 64, end_kv)
    q, k, v = support.qkv(*heads, N_q, N_kv, D, torch.float16)
    q = 2 * q
    grad = torch.randn_like(q)
    k_mean = reference.smooth(k)[0]
    of = [of_training.quantize(*x) for x in ((q,), (k, k_mean), (v,))]
    q_codes, q_scale, _ = training.launch_quantize(q, run=run)
    k_codes, k_scale, _ = training.launch_quantize(k, k_mean, run=run)
    v_codes, v_scale, _ = training.launch_quantize(v, turned=True, run=run)
    found = (q_codes, q_scale), (k_codes, k_scale), (v_codes.mT, v_scale)
    for (codes, scales), expected, x in zip(found, of, (q, k - k_mean[:, :, None], v), strict=True):
        assert_close(scales, expected.scale, rtol=0, atol=0)
        assert (codes.int() - expected.codes.int()).abs().max() <= 1
        # The interpreter rounds the product before it rounds to an integer, a GPU's fma does not.
        x = of_training.pad(x.float())
        product = x / expected.scale.repeat_interleave(x.shape[2] // scales.shape[2], 2)[..., None]
        from_tie = (product.abs() % 1 - 0.5).abs()
        assert (from_tie[codes != expected.codes] < 1e-4).all()
    of_q, of_k, of_v = (of_training.Quantized(*each) for each in found)

    out, lse = torch.empty_like(q), torch.empty(q.shape[:3])
    given = q_codes, q_scale, k_codes, k_scale
    training.launch_forward(
        *given, v_codes, v_scale, N_kv, scale, is_causal, out, lse, run, q.device
    )
    out_ref, lse_ref = of_training.forward(of_q, of_k, of_v, (N_q, N_kv, D), scale, is_causal)
    assert relative_l2(out, out_ref) < 1e-3
    assert_close(lse, lse_ref, rtol=1e-5, atol=1e-5)

    turned, grad_scale, delta = training.launch_quantize(
        grad, out=out.mT.contiguous().mT, turned=True, run=run
    )
    assert_close(delta, (grad.float() * out.float()).sum(3), rtol=1e-4, atol=1e-3)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    training.launch_backward(
        *given,
        v,
        grad,
        turned,
        grad_scale,
        lse,
        delta,
        scale,
        is_causal,
        dq,
        dk,
        dv,
        run,
        q.device,
    )
    expected = of_training.backward(of_q, of_k, v, grad, out, lse, scale, is_causal)
    for x, y in zip((dq, dk, dv), expected, strict=True):
        # Of one key dQ is 0 but for rounding.
        # A code of P that falls on the other side is 1 / 127 of the largest: of 2 rows and 1 key 0.7 %.
        few = 1e-3 if min(N_q, N_kv) > 16 else 8e-3
        assert (x - y).norm() <= few * y.norm() + 1e-6 * abs(scale) * grad.norm() * k.norm()


# -- what prepares the backward of sage::rowscaled ----
# FP8 codes are compared within a factor of 2 here; test_rowscaled.py compares them on a GPU.


trained = functools.partial(support.trained, dtype=torch.float16)


@pytest.mark.parametrize(
    "shape, is_causal",
    [((1, 1, 1, 256, 256, 64), False), ((2, 4, 2, 65, 70, 128), False),
     ((1, 2, 1, 1, 200, 80), False), ((1, 1, 1, 321, 1, 40), False),
     ((2, 2, 1, 100, 100, 72), True), ((1, 1, 1, 270, 270, 40), True)],
    ids=str,
)  # fmt: skip
def test_what_prepares_the_row_scaled_backward_writes_what_the_emulation_does(shape, is_causal):
    q, k, v, grad = trained(*shape)
    if is_causal:  # the largest are seen late
        v[:, :, -1] *= 30
        k[:, :, -2] *= 30
    check_preparation(q, k, v, grad, is_causal, 0.7 * shape[-1] ** -0.5)


@pytest.mark.parametrize("is_causal", [False, True])
def test_what_the_row_scaled_backward_takes_off_large_scores(is_causal):
    q, k, v, grad = trained(1, 2, 1, 100, 100, 64)
    _, kept = rowscaled.forward(q, k, v, is_causal, 2e4)
    assert (kept.stats[1].abs() > 2**16).float().mean() > 0.9
    check_preparation(q, k, v, grad, is_causal, 2e4)


def check_preparation(q, k, v, grad, is_causal, scale):
    out, kept = rowscaled.forward(q, k, v, is_causal, scale)
    found = launch_prepare(grad, out, kept, scale, run)
    expected = rowscaled.prepare(grad, out, kept, scale)
    support.same_operands(found, expected, e4m3_step=0.51)


@pytest.mark.parametrize("is_causal", [False, True])
def test_bounds_are_of_all_rounds(is_causal, monkeypatch):
    """Of the first to the last, as of sequences that are longer than one round of BOUNDS_ROWS, and
    than the turns of one program."""
    monkeypatch.setattr(prepare, "BOUNDS_ROWS", 64 if is_causal else 2)
    monkeypatch.setattr(prepare, "TURNS", 3)
    for place in (0, -1):
        q, k, v, grad = trained(1, 2, 1, 130, 130, 64)
        for x in (q, k, v, grad):
            x[:, :, place] *= 8
        check_preparation(q, k, v, grad, is_causal, 0.125)


@pytest.mark.parametrize("D", [64, 72])
def test_codes_by_each_kind_of_scales(D):
    """A scale a row, of rows less their mean; and both a scale a block and one a row at once, of
    rotated rows."""
    _, k, _, _ = trained(2, 2, 2, 70, 70, D)
    mean = launch_smooth([k], None, 1, run)[0]
    assert_close(mean, reference.smooth(k)[0])
    own, own_scale = by_row = empty_codes(k, shared=1)
    codes, scale, _ = launch_quantize(k, rotated=0.5, own=by_row, run=run)
    half = reference.rotate(0.5 * of_training.pad(k.float()), k)
    for found, of, shared, x, taken in (
        (*launch_quantize(k, mean, shared=1, run=run)[:2], 1, k, mean),
        (codes, scale, 64, half, None), (own, own_scale, 1, half, None),
    ):  # fmt: skip
        expected = of_training.quantize(x, taken, shared)
        assert found.shape == expected.codes.shape and of.shape == expected.scale.shape
        assert_close(of, expected.scale, rtol=1e-6, atol=0)
        far = (found.int() - expected.codes.int()).abs()
        assert far.max() <= 1 and (far > 0).float().mean() < 0.01


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_gradient_in_other_units_changes_scales_alone(is_causal):
    q, k, v, grad = trained(1, 2, 1, 130, 130, 64)
    out, kept = rowscaled.forward(q, k, v, is_causal, 0.3)
    grad = grad.float()
    plain, small = (launch_prepare(x, out, kept, 0.3, run) for x in (grad, grad * 2**-40))
    for name in ("g", "vectors", "v_scale"):
        assert torch.equal(getattr(plain, name), getattr(small, name)), name
    for name in ("qt", "ot", "kt", "kt_own"):
        assert torch.equal(getattr(plain, name).float(), getattr(small, name).float()), name
    for name in ("row_scale", "qt_scale", "ot_scale"):
        assert torch.equal(getattr(plain, name) * 2**-40, getattr(small, name)), name


@pytest.mark.parametrize("factor", [0, 1])
@pytest.mark.parametrize("is_causal", [False, True])
def test_no_gradient_gives_zeros(is_causal, factor):
    """Of q and k that are zeros, too, and of p that are as small as those of 5e8 keys."""
    q, k, v, grad = trained(1, 1, 1, 100, 100, 64)
    out, kept = rowscaled.forward(factor * q, factor * k, v, is_causal, 0.125)
    kept.stats[0] += 20

    def checked(kernel, grid, tensors, numbers, **options):
        run(kernel, grid, tensors, numbers, **options)
        if kernel is prepare._bounds_kernel:  # FP8 that is no number would be lost here
            of_head, beta = (tensors[kernel.arg_names.index(x)] for x in ("Of_head", "Beta"))
            assert (of_head[:2] >= TINY).all() and (beta >= TINY).all()

    x = launch_prepare(0 * grad, out, kept, 0.125, checked)
    assert not x.g.any() and not x.ot.float().any() and not x.vectors[2].any()
    for each in rowscaled.gradients(kept, x, 100, 100, 64):
        assert_close(each, torch.zeros_like(each))


@pytest.mark.parametrize("is_causal", [False, True])
def test_what_is_no_number_reaches_all_gradients(is_causal):
    """So a GradScaler skips the step. Of heads that share k and v, it stays out of the others' dQ."""
    q, k, v, grad = trained(1, 4, 2, 100, 100, 64)
    out, kept = rowscaled.forward(q, k, v, is_causal, 0.125)
    of_grad, of_out = torch.zeros(2, *grad.shape, dtype=grad.dtype)
    of_grad[0, 1, 5, 3], of_out[0, 1, 5, 3] = torch.inf, torch.nan
    of_grad, of_out = (of_out, of_grad) if is_causal else (of_grad, of_out)
    x, y = (
        launch_prepare(*given, kept, 0.125, run)
        for given in ((grad + of_grad, out), (grad, out + of_out))
    )
    for scale in (x.qt_scale, x.ot_scale):
        assert not scale[0, 0].isfinite() and scale[0, 1].isfinite()
    for each in x, y:
        assert not (each.row_scale + each.delta)[0, 1, 5].isfinite()
        dq, dk, _ = (
            x.isfinite().all((2, 3))[0] for x in rowscaled.gradients(kept, each, 100, 100, 64)
        )
        assert dq.tolist() == [True, False, True, True] and dk.tolist() == [False, True]
