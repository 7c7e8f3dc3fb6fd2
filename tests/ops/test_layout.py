"""The order of tokens: which of them form a block, and that attention in that order is, to the bit,
attention of q, k and v that were permuted before, whose out and lse are permuted back.

Shapes: B batch, H heads, N sequence, D head_dim.
"""

import itertools
import math
import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
import support
import torch
from kernel_cases import GPU, INTERPRETER, Runner, in_interpreter, on_hopper
from pairs import seeds
from support import run
from torch import Tensor

from sage_inductor.ops.attention import select, tiles
from sage_inductor.ops.attention.tiles import Tile
from sage_inductor.ops.formats import Prepared
from sage_inductor.ops.gpus import Gpu
from sage_inductor.ops.layout import ordered
from sage_inductor.ops.quantize.op import launch_prepare
from sage_inductor.ops.quantize.smooth import launch_smooth
from sage_inductor.ops.recipe import NAMED
from sage_inductor.ops.sdpa import SdpaCall, attention_call, check
from sage_inductor.ops.sparse import pool
from sage_inductor.ops.sparse.selector import BLOCK_SIZE, Selection
from sage_inductor.ops.visibility import BlockLists, Visibility

pytestmark = pytest.mark.usefixtures("poisoned")

RECIPES = [name for name, r in NAMED.items() if not r.of_qk.block_scaled]
CUBES = [(4, 4, 4), (1, 8, 8), (2, 4, 8), (4, 8, 8)]


def order_of(N: int, size, cube=(4, 4, 4), before=0, device="cpu") -> Tensor:
    return torch.ops.sage.cube_order(torch.empty(1, 1, N, 1, device=device), size, cube, before)


# -- which tokens --


@pytest.mark.parametrize("seed", range(24))
def test_the_first_blocks_are_whole_cubes_and_all_others_follow(seed):
    draw = random.Random(seed)
    size, cube = tuple(draw.randint(1, 19) for _ in range(3)), draw.choice(CUBES)
    before, after = draw.choice([0, 0, 7, 130]), draw.choice([0, 0, 1, 90])
    count = math.prod(size)
    order = order_of(before + count + after, size, cube, before)
    assert order.dtype == torch.int32 and order.is_contiguous()
    assert sorted(order.tolist()) == list(range(before + count + after))
    assert order[count:].tolist() == [*range(before), *range(before + count, len(order))]
    at = [(i // (size[1] * size[2]), i // size[2] % size[1], i % size[2])
          for i in (order[:count] - before).tolist()]  # fmt: skip
    steps = itertools.product(*map(range, (n // c for n, c in zip(size, cube, strict=True))))
    whole = math.prod(cube)
    for nth, first in enumerate(steps):
        corner = [c * i for c, i in zip(cube, first, strict=True)]
        expected = itertools.product(*(range(a, a + c) for a, c in zip(corner, cube, strict=True)))
        assert at[nth * whole : (nth + 1) * whole] == list(expected)


def test_a_video_of_wan_is_mostly_whole_cubes():
    order = order_of(75600, (21, 45, 80))
    t, h, w = order // 3600, order // 80 % 45, order % 80
    spread = [(x[:75584].view(-1, 64).amax(1) - x[:75584].view(-1, 64).amin(1)) for x in (t, h, w)]
    whole = (spread[0] == 3) & (spread[1] == 3) & (spread[2] == 3)
    assert whole[:1100].all() and not whole[1100:].any()
    assert spread[2].float().mean() < 5


def test_what_torch_asks_of_the_op():
    given = torch.randn(1, 2, 70, 8), [2, 5, 6], [4, 4, 4], 4
    torch.library.opcheck(torch.ops.sage.cube_order.default, given)


# -- calls --


class Case(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    perm: Tensor
    lists: BlockLists
    recipe: str

    def before(self) -> "Case":
        """Permuted: what is then called without an order."""
        tensors = (x.index_select(2, self.perm) for x in self[:3])
        return Case(*tensors, None, *self[4:])


def apart(x: Tensor, draw: random.Random) -> Tensor:
    """x [B, H, N, D] in a random order of memory, between NaN."""
    order = draw.sample(range(3), 3)
    width = x.shape[3] + draw.choice([0, 8, 24])
    shape = [x.shape[d] + draw.choice([0, 1]) for d in order]
    whole = torch.full((*shape, width), math.nan, dtype=x.dtype, device=x.device)
    there = whole[tuple(slice(x.shape[d]) for d in order)][..., : x.shape[3]]
    return there.permute(*(order.index(d) for d in range(3)), 3).copy_(x)


def drawn(seed: int, runner: Runner, dtype: torch.dtype, longest: int, recipes=RECIPES) -> Case:
    """N no multiple of a cube, strides, grouped heads, selected lists or lists of anything, mostly
    with a tail."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    recipe = recipes[seed % len(recipes)]
    B, H_kv, G = draw.choice([(1, 1, 2), (2, 2, 1), (1, 2, 3)])
    D, D_v = draw.choice([(64, 64), (128, 128), (32, 64), (80, 40)])
    size = draw.randint(1, 4), draw.randint(5, longest), draw.randint(9, longest + 4)
    before, after = draw.choice([0, 5, 66]), draw.choice([0, 9])
    N = before + math.prod(size) + after
    q, k, _ = runner.qkv(B, G * H_kv, H_kv, N, N, D, dtype=dtype)
    *_, v = runner.qkv(B, G * H_kv, H_kv, N, N, D_v, dtype=dtype)
    q, k, v = (apart(x, draw) for x in (q, k, v))
    perm = order_of(N, size, draw.choice(CUBES), before, runner.device)
    tail = None if NAMED[recipe].of_qk.smooths_q else draw.choice([None, 32, 64])
    if draw.random() < 0.5:
        fields = 0.3, 0, 0, before, after, *BLOCK_SIZE
        found = torch.ops.sage.select_blocks(q, k, 0.1, *fields, "{}", perm)
        return Case(q, k, v, perm, BlockLists(*found, None, None, *BLOCK_SIZE, tail), recipe)
    blocks = draw.choice([(128, 64), (128, 128), (256, 64)])
    lists = support.block_lists(B, G * H_kv, N, N, *blocks, 0.4, device=runner.device)
    return Case(q, k, v, perm, lists._replace(tail_block=tail), recipe)


def assert_as_permuted(call: Callable, case: Case) -> None:
    """out and lse, to the bit; NaN is none."""
    for found, expected in zip(call(case), call(case.before()), strict=True):
        assert not found.isnan().any()
        assert torch.equal(found.index_select(2, case.perm), expected), case.recipe
    assert not torch.equal(case.perm, case.perm.sort()[0])


def by_op(case: Case) -> tuple[Tensor, Tensor]:
    q, k, v, perm, lists, recipe = case
    return support.sdpa(q, k, v, False, 0.1, recipe, perm=perm, **lists._asdict())


def made(case: Case) -> Prepared:
    """What kernels prepare of k and v."""
    _, k, _, perm, lists, recipe = case
    given = Visibility(blocks=lists).keys(k), NAMED[recipe], lists.tail_block, perm
    return launch_prepare(run, Gpu((8, 9), 1), k, v_of(case), *given)


def v_of(case: Case) -> Tensor:
    """As ops get it: in 16 bits in that order."""
    return case.v if NAMED[case.recipe].of_pv.dtype else ordered(case.v, case.perm)


def by_kernels(case: Case) -> tuple[Tensor, Tensor]:
    """The portable kernel, of what kernels prepared."""
    q, k, _, perm, lists, recipe = case
    v = v_of(case)
    given = made(case), Visibility(blocks=lists), 0.1, NAMED[recipe]
    return support.launch_portable(attention_call(q, k, v, *given, perm=perm), Tile(128, 64, 4, 2))


@pytest.mark.parametrize("seed", range(4 * len(RECIPES)))
def test_in_that_order_it_is_attention_of_permuted_tensors(seed):
    dtype = (torch.float32, torch.float16, torch.bfloat16)[seed % 3]
    assert_as_permuted(by_op, drawn(seed, INTERPRETER, dtype, 9))


@in_interpreter
@seeds(4 * len(RECIPES), always=len(RECIPES))
def test_kernels_read_and_store_in_that_order(seed):
    case = drawn(seed, INTERPRETER, torch.float16, 6)
    before = case.before()
    for x, y in zip(made(case).tensors(), made(before).tensors(), strict=True):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8)), case.recipe
    assert_as_permuted(by_kernels, case)


@in_interpreter
@pytest.mark.parametrize("visible", [False, True])
def test_statistics_and_means_of_blocks_are_of_tokens_in_that_order(visible):
    """Of more rows than a program has: 256."""
    k = apart(torch.randn(2, 1, 300, 16).cumsum(2) + 3, random.Random(0))
    perm = order_of(300, (3, 9, 10), before=30)
    rows = (torch.rand(2, 1, 300) > 0.3).to(torch.uint8) if visible else None
    permuted, shift = k.index_select(2, perm), k[:, :, 0].contiguous()
    found = launch_smooth([k, k], rows, 1, run, perm)
    assert all(map(torch.equal, found, launch_smooth([permuted] * 2, rows, 1, run)))
    for block, squares in ((64, False), (128, False), (64, True)):
        given = shift, block, squares
        found = pool._launch_pool(run, None, k, *given, perm)
        expected = pool._launch_pool(run, None, permuted, *given)
        assert all(map(torch.equal, found, expected))
        assert not torch.equal(found[0], pool._launch_pool(run, None, k, *given)[0])


@pytest.mark.parametrize("runner", [INTERPRETER, pytest.param(GPU, marks=GPU.marks)], ids=str)
@pytest.mark.parametrize("before, after", [(0, 0), (70, 9)])
def test_blocks_are_selected_in_that_order(runner, before, after):
    """Tokens that are no video's come last, and are dense there."""
    N, H_kv = before + 5 * 11 * 12 + after, 2
    q, k, _ = (x.cumsum(2) for x in runner.qkv(2, 4, H_kv, N, N, 64, dtype=torch.float32))
    perm = order_of(N, (5, 11, 12), before=before, device=runner.device)
    found = torch.ops.sage.select_blocks(
        q, k, 0.1, 0.3, 0.2, 0.1, before, after, 128, 64, "{}", perm
    )
    permuted = (x.index_select(2, perm) for x in (q, k))
    dense = 0, before + after
    expected = torch.ops.sage.select_blocks(*permuted, 0.1, 0.3, 0.2, 0.1, *dense, 128, 64)
    assert all(map(torch.equal, found, expected))
    in_rows = torch.ops.sage.select_blocks(q, k, 0.1, 0.3, 0.2, 0.1, before, after, 128, 64)
    assert not torch.equal(found[1], in_rows[1])


RULED = {
    "pooled": Selection(0.3, 0.2, dense=((0, 70), (-9, None))),
    "blocks": Selection(0.3, dense_first=70, dense_last=9, blocks=(64, 128)),
    "sla": Selection(rule="sla", sparsity=0.7, dense=((0, 70), (-9, None))),
    "vsa": Selection(rule="vsa", sparsity=0.7, dense=((0, 70), (-9, None))),
    "sol": Selection(rule="sol", tau=0.8, dense=((0, 70), (-9, None))),
    "error": Selection(rule="error", top_k=0.2, dense=((-9, None), (0, 70))),
}


@pytest.mark.parametrize("rule", RULED)
def test_each_rule_selects_in_that_order(rule):
    asked = RULED[rule]._replace(layout=(5, 11, 12), cube=(4, 4, 4))
    assert asked.tokens == 70 + 5 * 11 * 12 + 9 and asked.beside == (70, 9)
    q, k = (torch.randn(2, H, asked.tokens, 64).cumsum(2).bfloat16() for H in (4, 2))
    perm = torch.ops.sage.cube_order(q, asked.layout, asked.cube, 70)
    found = torch.ops.sage.select_blocks(q, k, 0.1, *asked.arguments(perm))
    permuted = (x.index_select(2, perm) for x in (q, k))
    last = asked._replace(dense=((-79, None),), dense_first=0, dense_last=0)
    expected = torch.ops.sage.select_blocks(*permuted, 0.1, *last.arguments())
    assert all(map(torch.equal, found, expected))
    in_rows = torch.ops.sage.select_blocks(q, k, 0.1, *asked.arguments())
    assert not torch.equal(found[1], in_rows[1])


@pytest.mark.parametrize("mode", ["exempt", "compete"])
def test_a_prefix_of_segments_is_behind_the_cubes(mode):
    asked = Selection(rule="vsa", sparsity=0.7, segments=(128, 64), mode=mode, layout=(4, 8, 12))
    q, k = (torch.randn(2, H, asked.tokens, 32) for H in (4, 2))
    perm = torch.ops.sage.cube_order(q, asked.layout, asked.cube, 192)
    assert perm[-192:].tolist() == list(range(192))

    def kept(q, k, *order):
        counts, indices = torch.ops.sage.select_blocks(q, k, 0.1, *asked.arguments(*order))
        listed = torch.arange(indices.shape[3]) < counts.unsqueeze(3)
        return torch.zeros_like(listed).scatter_(3, indices.long(), listed)

    ahead = kept(*(x.index_select(2, perm.roll(192)) for x in (q, k)))
    found = kept(q, k, perm)
    assert torch.equal(found, ahead.roll((-3, -3), (2, 3)))
    assert 0.3 < found.float().mean() < 0.9


@pytest.mark.gpu
@seeds(64, always=24)
def test_a_gpu_computes_in_that_order(seed):
    assert_as_permuted(by_op, drawn(seed, GPU, (torch.bfloat16, torch.float16)[seed % 2], 20))


@on_hopper
@seeds(64, always=24)
def test_the_hopper_kernel_computes_in_that_order(seed, monkeypatch):
    monkeypatch.setattr(tiles, "LISTED_KEYS", 0)  # of short calls the other kernel is faster
    by_hopper = [x for x in RECIPES if (NAMED[x].sharing.q_span, NAMED[x].qk) == (1, "int8")]
    case, seen = drawn(seed, GPU, torch.bfloat16, 20, by_hopper), []
    launch = select._hopper().launch
    monkeypatch.setattr(select._hopper(), "launch", lambda *x: seen.append(x) or launch(*x))
    assert_as_permuted(by_op, case)
    assert len(seen) == 2 and seen[0][0].perm is not None


@pytest.mark.gpu
def test_a_cuda_graph_makes_the_order_and_follows_it():
    """New tokens; the order is made in the graph."""
    q, k, v = (x.cumsum(2) for x in GPU.qkv(1, 4, 2, 3000, 3000, 128, dtype=torch.float32))
    q, k, v = (x.bfloat16() for x in (q, k, v))

    def call(ordered: bool = True):
        perm = torch.ops.sage.cube_order(q, [3, 25, 40], [4, 4, 4], 0)
        given = (q, k, v, perm) if ordered else (*(x[:, :, perm.long()] for x in (q, k, v)), None)
        fields = 0.3, 0, 0, 0, 0, *BLOCK_SIZE
        found = torch.ops.sage.select_blocks(*given[:2], 0.1, *fields, "{}", given[3])
        case = Case(*given, BlockLists(*found, None, None, *BLOCK_SIZE), "sage2-8b-per-token")
        return perm, *by_op(case)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        perm, *found = call()
    for _ in range(3):
        q.copy_(torch.randn_like(q).cumsum(2)), k.copy_(torch.randn_like(k).cumsum(2))
        graph.replay()
        _, *expected = call(ordered=False)
        for x, y in zip(found, expected, strict=True):
            assert torch.equal(x.index_select(2, perm), y)


# -- what it is not for --

LISTS = dict(
    kv_num_blocks=torch.ones(1, 1, 1).int(), kv_indices=torch.zeros(1, 1, 1, 1).int(), block_q=128,
    block_kv=128,
)  # fmt: skip
ORDER = torch.arange(64).int()
REFUSED = {
    "perm goes with block lists, without attn_mask": dict(perm=ORDER),
    "block lists, without attn_mask, band": dict(perm=ORDER, right=0, **LISTS),
    "with perm q and k must have one length, got 64 and 63": dict(perm=ORDER, N_kv=63, **LISTS),
    "perm must be int32, got torch.int64": dict(perm=ORDER.long(), **LISTS),
    "perm must be contiguous .64., got .65. of strides .1.": dict(
        perm=torch.arange(65).int(), **LISTS
    ),
    "got .64. of strides .2.": dict(perm=torch.arange(128).int()[::2], **LISTS),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_has_no_order_is_refused(message):
    given = {"N_kv": 64, **REFUSED[message]}
    q, k, v = support.qkv(1, 2, 2, 64, given.pop("N_kv"), 16)
    call = SdpaCall.of(q, k, v, 0.1, NAMED["sage1"].encode())._replace(**given)
    with pytest.raises((ValueError, TypeError), match=message):
        check(call)


def test_what_torch_asks_of_ops_with_an_order():
    case = drawn(2, INTERPRETER, torch.float32, 6)
    args = support.arguments(
        *case[:3], False, 0.1, case.recipe, perm=case.perm, **case.lists._asdict()
    )
    utilities = "test_schema", "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(torch.ops.sage.sdpa.default, args, test_utils=utilities)
    fields = 0.3, 0, 0, 0, 0, *BLOCK_SIZE
    args = case.q, case.k, 0.1, *fields, "{}", case.perm
    torch.library.opcheck(torch.ops.sage.select_blocks.default, args, test_utils=utilities)
