"""The tail of block lists: one key and value for each block that a query's list does not name.

Shapes: B batch, H_q and H_kv heads, N sequence, D head_dim, T blocks of the tail.
"""

import collections
import itertools
import math
import random

import pytest
import support
import torch
import triton
import triton.language as tl
from kernel_cases import check_codes, in_interpreter
from pairs import seeds
from support import relative_l2, sdpa
from torch import Tensor
from torch.testing import assert_close

from sage_inductor.ops.attention.hopper import plan, tile_lists
from sage_inductor.ops.attention.tiles import Tile
from sage_inductor.ops.formats import TAIL_BLOCKS
from sage_inductor.ops.gpus import Gpu
from sage_inductor.ops.quantize.op import launch_prepare
from sage_inductor.ops.recipe import NAMED
from sage_inductor.ops.reference import attention as emulation
from sage_inductor.ops.reference import quantize as reference
from sage_inductor.ops.visibility import NO_LISTS, BlockLists, Visibility

NO_GPU = Gpu((8, 0), 108)  # launches nothing early
RECIPES = [name for name, r in NAMED.items() if not r.of_qk.smooths_q]

# -- what it means ----


def formula(q, k, v, scale, lists: BlockLists, tail_block: int, mask=None) -> tuple[Tensor, Tensor]:
    """out and lse of the softmax over what the lists name, each key as often as they do, and, where
    they name none of a block of tail_block keys, over the mean of those that mask [B or 1, 1, 1, N]
    shows, log(how many) added to its score. In float64, a row at a time."""
    (B, H, n_q, _), n_kv = q.shape, k.shape[2]
    group, blocks = H // k.shape[1], -(-n_kv // tail_block)
    q, k, v = q.double() * scale, k.double(), v.double()
    out, lse = q.new_zeros(B, H, n_q, v.shape[3]), q.new_full((B, H, n_q), -math.inf)
    for b, h, m in itertools.product(range(B), range(H), range(-(-n_q // lists.block_q))):
        rows = slice(m * lists.block_q, (m + 1) * lists.block_q)
        shown = torch.arange(n_kv)
        if mask is not None:
            shown = shown[mask.expand(B, 1, 1, n_kv)[b, 0, 0]]
        keys, values, added, named = [], [], [], set()
        for counts, indices in lists.lists:
            at = min(b, counts.shape[0] - 1), min(h, counts.shape[1] - 1), m
            for j in indices[at][: counts[at]].tolist():
                here = shown[shown // lists.block_kv == j]
                named |= {*range(j * lists.block_kv, (j + 1) * lists.block_kv)}
                keys.append(k[b, h // group, here])
                values.append(v[b, h // group, here])
                added.append(q.new_zeros(len(here)))
        for t in range(blocks):
            here = shown[shown // tail_block == t]
            if t * tail_block not in named and len(here):
                keys.append(k[b, h // group, here].mean(0, True))
                values.append(v[b, h // group, here].mean(0, True))
                added.append(q.new_tensor([math.log(len(here))]))
        if keys and len(torch.cat(keys)):
            s = q[b, h, rows] @ torch.cat(keys).mT + torch.cat(added)
            out[b, h, rows], lse[b, h, rows] = s.softmax(1) @ torch.cat(values), s.logsumexp(1)
    return out, lse


@seeds(60, always=6)
def test_the_tail_is_one_key_for_each_block_that_no_list_names(seed):
    """Five draws a seed. v less its mean is what is compared: its mean hides what a weight lacks."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(5):
        N_q, N_kv, tail_block = draw.randint(1, 200), draw.randint(1, 400), draw.choice(TAIL_BLOCKS)
        recipe, block_kv = draw.choice(RECIPES), draw.choice([64, 128, 192])
        size = draw.choice([64, 128]) if recipe != "sage1" else 128, block_kv
        B, H, density = draw.choice([1, 2]), draw.choice([1, 4]), draw.choice([0.05, 0.4, 0.8])
        lists = support.block_lists(B, H, N_q, N_kv, *size, density, draw.random() < 0.5)
        q, k, v = support.qkv(2, 4, draw.choice([1, 2, 4]), N_q, N_kv, 64)
        mask = None
        if draw.random() < 0.5:  # a block or more is hidden as a whole; none of it may be read
            mask = torch.rand(draw.choice([1, 2]), 1, 1, N_kv) > 0.3
            mask[..., : draw.choice([0, 64, 130])] = False
            hidden = ~mask.expand(2, k.shape[1], 1, N_kv)[:, :, 0]
            k[hidden], v[hidden] = draw.choice([(math.inf, math.nan), (30.0, -9.0)])
        scale = draw.choice([0.01, 0.1, -0.05])
        lists = lists._replace(tail_block=tail_block)
        given = lists._asdict() | dict(attn_mask=mask, scale=scale)
        out, lse = sdpa(q, k, v, recipe=recipe, **given)
        expected, expected_lse = formula(q, k, v, scale, lists, tail_block, mask)
        empty = expected_lse == -math.inf
        assert torch.equal(lse == -math.inf, empty) and (out[empty] == 0).all()
        if empty.all():
            continue
        assert_close(lse[~empty].double(), expected_lse[~empty], rtol=0, atol=abs(scale))
        assert (lse[~empty] - expected_lse[~empty]).abs().mean() < 0.2 * abs(scale)
        found, expected = (x[~empty].double() - 3 for x in (out, expected))
        assert relative_l2(found, expected) < 0.06


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("masked", [False, True])
def test_where_a_list_names_every_block_the_tail_changes_no_bit(recipe, masked):
    """Nor does it change rows whose list does, beside rows whose list names none."""
    q, k, v = support.qkv(1, 4, 2, 300, 333, 64)
    lists = support.block_lists(1, 4, 300, 333, 128, 64, 1, False)
    mask = torch.rand(1, 1, 1, 333) > 0.3 if masked else None
    index = torch.stack([torch.randperm(6) for _ in range(12)]).view(1, 4, 3, 6).int()
    lists = BlockLists(torch.full((1, 4, 3), 6).int(), index, None, None, 128, 64)
    given = dict(recipe=recipe, attn_mask=mask)
    expected = sdpa(q, k, v, **given, **lists._asdict())
    found = sdpa(q, k, v, **given, **lists._replace(tail_block=32)._asdict())
    assert all(map(torch.equal, found, expected))
    lists.kv_num_blocks[:, :, 1] = 0
    found = sdpa(q, k, v, **given, **lists._replace(tail_block=64)._asdict())
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x[:, :, :128], y[:, :, :128]) and torch.equal(
            x[:, :, 256:], y[:, :, 256:]
        )
        assert not torch.equal(x[:, :, 128:256], y[:, :, 128:256])


@pytest.mark.parametrize("recipe", ["sage2-8b-per-token", "sage1-per-token"])
def test_what_is_listed_and_the_tail_are_two_parts_of_one_softmax(recipe):
    """By their logsumexps: of a call without a tail, and of one whose lists say what is no part of
    it, and name nothing."""
    q, k, v = support.qkv(1, 2, 1, 200, 700, 64)
    lists = support.block_lists(1, 2, 200, 700, 64, 64, 0.3, False)
    a = support.attention_call(q, k, v, recipe, Visibility(blocks=lists._replace(tail_block=64)))
    out, lse = emulation.attention(a)
    listed = emulation.attention(a._replace(tail_block=None))
    shown = emulation._unlisted(a)
    none = a._replace(kv_num_blocks=0 * a.kv_num_blocks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulation, "_unlisted", lambda _: shown)
        of_tail = emulation.attention(none)
    assert_close(torch.logaddexp(listed[1], of_tail[1]), lse, rtol=1e-6, atol=1e-5)
    parts = [x * (y - lse).exp()[..., None] for x, y in (listed, of_tail)]
    assert relative_l2(sum(parts) - 3, out.double() - 3) < (5e-3 if "sage1" in recipe else 2e-2)


ONE = dict(zip(BlockLists._fields, (*[torch.ones(1, 1, 2).int()], torch.ones(1, 1, 2, 1).int())))
ONE = NO_LISTS._asdict() | ONE | dict(block_q=64, block_kv=64)
REFUSED = {
    "tail_block must be None or of (32, 64), got 16": ONE | dict(tail_block=16),
    "tail_block needs block lists, got none": dict(tail_block=64),
    "tail_block needs lists without a band, which may hide some of a mean, got causal":
        ONE | dict(tail_block=64, is_causal=True),
    "beside tail_block attn_mask must be bool [B or 1, 1, 1, N_kv], as keys are in a mean for all "
    "queries, got torch.bool [100, 150]": ONE | dict(tail_block=64, attn_mask=torch.ones(100, 150) > 0),
    "queries, got torch.bool [1, 2, 1, 150]": ONE | dict(
        tail_block=64, attn_mask=torch.ones(1, 2, 1, 150) > 0),
    "queries, got torch.float32 [1, 150]": ONE | dict(tail_block=64, attn_mask=torch.ones(1, 150)),
    "beside tail_block prepared must be empty": ONE | dict(tail_block=64, prepared=True),
    "no kernel for a tail with qk='int4'": ONE | dict(tail_block=64, recipe="sage2-4b"),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_a_tail_does_not_go_with_is_refused(message):
    q, k, v = support.qkv(1, 2, 1, 100, 150, 64)
    given = dict(REFUSED[message])
    if given.get("prepared"):
        recipe = NAMED["sage2-8b"].encode()
        given["prepared"] = torch.ops.sage.prepare(k, v, None, recipe, False)
    with pytest.raises(ValueError) as raised:
        sdpa(q, k, v, **given)
    assert message in str(raised.value)


def test_what_torch_asks_of_the_op():
    q, k, v = support.qkv(1, 2, 1, 100, 150, 64)
    given = support.arguments(q, k, v, **ONE | {"tail_block": 64})
    utilities = "test_schema", "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(torch.ops.sage.sdpa.default, given, test_utils=utilities)


# -- its kernels, in the interpreter ----


@in_interpreter
@seeds(24, always=8)
def test_codes_of_the_means_are_the_references(seed):
    """Of any strides and dtypes; of masks that hide whole blocks, whose keys may hold anything."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    plain = [x for x in RECIPES if not NAMED[x].rotated]  # in bf16, which no interpreter multiplies
    recipe, block = NAMED[plain[seed % len(plain)]], draw.choice(TAIL_BLOCKS)
    B, H, D, D_v = draw.choice([(1, 2, 64, 64), (2, 3, 40, 72), (1, 2, 128, 24)])
    N = draw.choice([1, block - 1, block, 4 * block + 1, 66 * block - 5])
    dtype = draw.choice([torch.float16, torch.float32])
    _, k, _ = support.qkv(B, 1, H, 1, N, D, dtype)
    *_, v = support.qkv(B, 1, H, 1, N, D_v, dtype)
    visible = torch.ones(1, 1, N, dtype=torch.uint8)
    if draw.random() < 0.6:
        visible = (torch.rand(draw.choice([1, B]), draw.choice([1, H]), N) > 0.4).to(torch.uint8)
        visible[..., : draw.choice([0, block, 2 * block + 3])] = 0
        visible[..., -1] = 1
        hidden = (visible == 0).expand(B, H, N)
        k[hidden], v[hidden] = math.inf, math.nan
    given = support.run, NO_GPU, k, v, visible, recipe
    plain, found = launch_prepare(*given), launch_prepare(*given, block)
    assert all(map(torch.equal, found[:6], plain.tensors()[:6]))  # as without
    expected, T = reference._tail(k, v, plain, visible, recipe, block), -(-N // block)
    for name, y in expected.items():
        x = getattr(found, name)
        assert x.shape == y.shape and x.dtype == y.dtype and x.is_contiguous()
    assert_close(found.tail_bias[..., :T], expected["tail_bias"][..., :T])
    # Sums in another order.
    assert_close(found.tail_k_scale, expected["tail_k_scale"], rtol=2e-6, atol=1e-12)
    check_codes(None, found.tail_k, expected["tail_k"], ..., True)
    if recipe.pv == "16bit":
        assert_close(found.tail_v, expected["tail_v"])
    else:
        where = torch.zeros(found.tail_v.shape, dtype=torch.bool)
        where[:, :, :, :T] = True
        check_codes(None, found.tail_v, expected["tail_v"], reference.interleave(where), True)


@in_interpreter
@seeds(24, always=6)
def test_a_tile_reads_the_words_of_its_own_lists(seed):
    """Against brute force: which blocks of the tail each list leaves out, and how many blocks of
    keys a tile of one, two or three warpgroups reads for that."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    block_q, block_kv = (draw.choice([64, 128, 192, 256]) for _ in range(2))
    tail_block, full = draw.choice(TAIL_BLOCKS), draw.random() < 0.5
    n_q, n_kv = draw.choice([1, 64, 129, 400]), draw.choice([1, 64, 700, 9000])
    n_q = min(n_q, 129) if n_kv == 9000 else n_q  # 400 x 9000 takes 14 s
    B, H = draw.choice([(1, 2), (2, 1)])
    heads = draw.choice([1, B]), draw.choice([1, H])
    lists = support.block_lists(*heads, n_q, n_kv, block_q, block_kv, 0.4, full)
    blocks = -(-n_kv // block_kv)
    every = torch.rand(lists.kv_num_blocks.shape) < 0.4  # lists that name all
    lists.kv_indices[every] = torch.arange(blocks + 1).int() % blocks
    lists.kv_num_blocks[every] = blocks
    a = support.attention_call(
        *(torch.zeros(B, H, n, 64) for n in (n_q, n_kv, n_kv)), "sage2-8b-per-token",
        Visibility(blocks=lists._replace(tail_block=tail_block)),
    )  # fmt: skip
    tensors, *numbers = a.list_arguments()
    numbers, chunk = sum(map(tuple, numbers), ()), draw.choice([128, 512])
    expected = emulation._unlisted(a).expand(B, H, -1, -1)
    T_pad = expected.shape[3]
    for warpgroups, keys in itertools.product((1, 2, 3), (64, 128)):
        tile = Tile(64 * warpgroups, math.gcd(keys, block_kv), 4, 2, warpgroups=warpgroups)
        of = (heads, numbers), (B, H), n_q, n_kv, (-1, -1, False), tile, tile.BLOCK_N
        plain, of = plan._lists(None, *of), plan._lists(None, *of, tail_block)
        found, expected_entries = (
            torch.full((x.made,), 85, dtype=torch.int32) for x in (of, plain)
        )
        for x, made in ((of, found), (plain, expected_entries)):
            x.make.kernel[x.make.grid](tensors[0], *tensors, made, *x.make.numbers[:-1], chunk)
        room = of.strides[2] - plain.strides[2]
        rows = zip(found.view(-1, of.strides[2]), expected_entries.view(-1, plain.strides[2]))
        for x, y in rows:  # the words lie between what is there without them
            whole, count = y[:2].tolist()
            assert torch.equal(x[:2], y[:2]) and torch.equal(x[3 + room :][:whole], y[3:][:whole])
            last = count - whole
            assert torch.equal(x[len(x) - last :], y[len(y) - last :])
        tiles = -(-n_q // tile.BLOCK_M)
        counts = torch.full((B, H, tiles), 85, dtype=torch.int32)
        words = torch.full((B, H, tiles, warpgroups, T_pad // 32), 85, dtype=torch.int32)
        _tail_kernel[(tiles, H, B)](
            found, counts, words, *of.strides, n_kv, tile.BLOCK_M, tile.BLOCK_N, tail_block, H,
            T_pad // 32,
        )  # fmt: skip
        bits = (words[..., None] >> torch.arange(32) & 1).bool().flatten(4)
        for b, h, m in itertools.product(*map(range, counts.shape)):
            rows = [*range(m * tile.BLOCK_M, min(n_q, (m + 1) * tile.BLOCK_M), 64)]
            for wg, row in enumerate(rows):
                assert torch.equal(bits[b, h, m, wg], expected[b, h, row])
            some = expected[b, h, rows].any()
            of_all = triton.cdiv(triton.cdiv(n_kv, tail_block), tile.BLOCK_N)
            assert counts[b, h, m] == some * of_all


# Of the Hopper kernel's context what `walk` and `tail_of` read.
CONTEXT = collections.namedtuple(
    "CONTEXT", "LISTED List stride_lb stride_lh stride_lm N_kv BLOCK_M BLOCK_N TAIL_BLOCK"
)


@triton.jit
def _tail_kernel(
    List, Counts, Words, stride_lb, stride_lh, stride_lm, N_kv, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, TAIL_BLOCK: tl.constexpr, H, WORDS,
):  # fmt: skip
    """Grid: (tiles, H, B). Counts [B, H, tiles], Words [B, H, tiles, warpgroups, WORDS]"""
    m, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    ctx = CONTEXT(True, List, stride_lb, stride_lh, stride_lm, N_kv, BLOCK_M, BLOCK_N, TAIL_BLOCK)
    first, _, _ = tile_lists.walk(b, h, m * BLOCK_M, ctx)
    tile = (b * H + h) * tl.num_programs(0) + m
    for wg in range(0, BLOCK_M // 64):
        count, words = tile_lists.tail_of(first, wg, ctx)
        tl.store(Counts + tile, count)
        for i in range(0, WORDS):
            tl.store(Words + (tile * (BLOCK_M // 64) + wg) * WORDS + i, tl.load(words + i))
