"""flex_attention calls that are attention under a band, or by block lists: which are found, and that
they are.

`found` replaces what was found by SDPA under the claimed band and compares with eager flex. That
does not read block lists (torch 2.13): rewritten calls by lists are compared with exact attention
and with what Inductor compiles.
"""

import functools
import gc
import weakref

import models
import pytest
import support
import torch
import torch.nn.functional as F
from pairs import chosen
from support import band_mask, run_seen
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import sage_inductor
from sage_inductor.choose import cost
from sage_inductor.choose.decide import rewrite
from sage_inductor.ops.reference.exact import attention_exact
from sage_inductor.ops.visibility import CAUSAL, FULL, Band, BlockLists
from sage_inductor.options import Settings
from sage_inductor.patterns import flex
from sage_inductor.patterns.flex import find
from sage_inductor.patterns.graph import GraphIndex


def causal(b, h, i, j):
    return i >= j


def window(b, h, i, j):
    return (j <= i) & (i - j < 100)


def around(b, h, i, j):
    return (i - j).abs() <= 70


def everything(b, h, i, j):
    return i >= 0


def find_all(graph) -> list:
    index = GraphIndex(graph)
    return [call for node in list(graph.nodes) if (call := find(node, index))]


def found(function, *inputs, **options):
    """(band, reason) of the only call, which is replaced where a band was found. By block lists:
    ((band, their size), None)."""
    (meaning,) = found_all(function, *inputs, **options)
    return meaning


def found_all(function, *inputs, also=lambda gm: None, **options):
    """Of each call; the graph is given to `also` before."""
    calls = []

    def see(gm):
        also(gm)
        calls[:] = find_all(gm.graph)
        for call in calls:
            replace(gm, call)

    def replace(gm, call):
        assert GraphIndex(gm.graph).functorch_depth(call.node) == 0
        assert tuple(call.out.shape) == tuple(call.node.meta["example_value"].shape)
        if call.refused or call.blocks.size:
            return

        def attention(q, k, v):
            mask = band_mask(call.band, q.shape[2], k.shape[2])
            given = dict(scale=call.scale, enable_gqa=call.enable_gqa)
            return F.scaled_dot_product_attention(q, k, v, mask, **given).nan_to_num(0)

        with gm.graph.inserting_before(call.node):
            new = gm.graph.call_function(attention, (call.q, call.k, call.v))
        call.node.replace_all_uses_with(call.finish(new))
        for node in (call.node, *call.dead):
            gm.graph.erase_node(node)
        gm.recompile()

    out = run_seen(function, *inputs, see=see, **options)
    torch.testing.assert_close(out, function(*inputs))
    return list(map(meaning, calls))


def meaning(call):
    visible = (call.band, call.blocks.size) if call.blocks.size else call.band
    return (None, str(call.refused)) if call.refused else (visible, None)


def random_qkv(N=300, N_kv=None, H=2, H_kv=2):
    return support.random_qkv(1, H, H_kv, N, N_kv)


def masked(mask_mod, **options):
    """flex_attention with a BlockMask that is made inside the compiled function."""

    def function(q, k, v):
        n, m = q.shape[2], k.shape[2]
        blocks = create_block_mask(mask_mod, None, None, n, m, device=q.device)
        return flex_attention(q, k, v, block_mask=blocks, **options)

    return function


@pytest.mark.parametrize("dynamic", [False, True])
def test_without_a_block_mask_it_is_full_attention(dynamic):
    """A logsumexp on which nothing depends is not used."""

    def with_lse(q, k, v):
        out, lse = flex_attention(q, k, v, return_lse=True)
        lse.exp().sum()
        return out

    for function in (flex_attention, with_lse):
        assert found(function, *random_qkv(), dynamic=dynamic) == (FULL, None)


@pytest.mark.parametrize(
    "mask_mod, N, N_kv, band",
    [
        (window, 5, 5, CAUSAL),  # the window is wider than the sequence
        (around, 300, 300, Band(70, 70)),
        (causal, 140, 300, CAUSAL),
        (lambda b, h, i, j: j <= i + 160, 140, 300, Band(None, 0, bottom_right=True)),
        (lambda b, h, i, j: j <= i + 5, 1, 300, Band(None, 5)),
    ],
)
def test_a_block_mask_made_inside_is_proven(mask_mod, N, N_kv, band):
    assert found(masked(mask_mod), *random_qkv(N, N_kv)) == (band, None)


def shifted(score, b, h, i, j):
    return score + i - j


def test_calls_by_one_block_mask(monkeypatch):
    """GQA and scale are kept. A score_mod is refused, unless it changes nothing, and so is a used
    logsumexp. What makes the mask is evaluated once, unless it is too large: then it is data."""
    evaluated, too_large = [], []
    evaluate = flex._evaluate
    monkeypatch.setattr(flex, "_evaluate", lambda *args: evaluated.append(0) or evaluate(*args))

    def function(q, k, v, four):
        blocks = create_block_mask(causal, None, None, 300, 300, device=q.device)
        attend = functools.partial(flex_attention, block_mask=blocks)
        out, lse = attend(q, k, v, return_lse=True)
        return (
            attend(q, k, v),
            attend(four, k, v, enable_gqa=True, scale=0.3),
            attend(q, k, v, score_mod=shifted),
            attend(q, k, v, score_mod=lambda score, b, h, i, j: score),
            out + lse[..., None],
        )

    def with_little_memory(gm):
        with monkeypatch.context() as patch:
            patch.setattr(flex, "MAX_EVALUATED", 1000)
            too_large.extend(map(meaning, find_all(gm.graph)))
        assert not evaluated

    q, k, v = random_qkv()
    lse, *others = found_all(function, q, k, v, random_qkv(H=4)[0], also=with_little_memory)
    assert lse == (None, "the logsumexp or the maxima are used") and len(evaluated) == 1
    refused = None, "score_mod changes the scores"
    assert others == [(CAUSAL, None), (CAUSAL, None), refused, (CAUSAL, None)]
    assert too_large == [lse, BY_LISTS, BY_LISTS, refused, BY_LISTS]


BY_LISTS = (CAUSAL, (128, 128)), None


def shuffled(q, k, v):
    index = torch.randperm(3, dtype=torch.int32).expand(1, 1, 3, 3)
    counts = torch.full((1, 1, 3), 3, dtype=torch.int32)
    lists = BlockLists(counts, index, None, None, 128, 128)
    return listed(lists, causal, (300, 300))(q, k, v)


def outside(**size):
    blocks = create_block_mask(causal, None, None, 300, 300, device="cpu", **size)
    return functools.partial(flex_attention, block_mask=blocks)


def test_a_block_mask_made_outside_of_dynamic_lengths_or_of_random_numbers_is_data():
    for function, dynamic in ((outside(), False), (masked(causal), True), (shuffled, False)):
        assert found(function, *random_qkv(), dynamic=dynamic) == BY_LISTS
    reason = "a BlockMask must have blocks of (64, 128, 192, 256), got (128, 32)"
    assert found(outside(BLOCK_SIZE=(128, 32)), *random_qkv()) == (None, reason)


def test_a_block_mask_that_cannot_be_run_here_is_data():
    def function(q, k, v):
        counts = torch.tensor([3, 3, 3]).sub(torch.linalg.cholesky(-torch.eye(3))[0, 0].int())
        index = torch.arange(3, dtype=torch.int32).expand(1, 1, 3, 3)
        lists = BlockLists(counts.int()[None, None], index, None, None, 128, 128)
        return listed(lists, causal, (300, 300))(q, k, v)

    calls = []
    with pytest.raises(torch.linalg.LinAlgError):
        run_seen(function, *random_qkv(), see=lambda gm: calls.extend(find_all(gm.graph)))
    assert [meaning(call) for call in calls] == [BY_LISTS]


def from_blocks(partial, full=None, mask_mod=causal):
    """flex_attention over the listed blocks of 128 keys, up to two for each block of queries."""

    def function(q, k, v):
        lists = []
        for rows in (partial, full):
            if rows is not None:
                counts = torch.tensor([[[len(row) for row in rows]]], dtype=torch.int32)
                index = torch.tensor([[[(row + [0, 0])[:2] for row in rows]]], dtype=torch.int32)
                lists += [counts, index]
        lists = BlockLists(*lists, *[None] * (4 - len(lists)), 128, 128)
        return listed(lists, mask_mod, (q.shape[2], k.shape[2]))(q, k, v)

    return function


def test_a_mask_of_full_blocks_alone_is_full():
    function = from_blocks([[], []], [[0, 1], [0, 1]], everything)
    assert found(function, *random_qkv(256)) == (FULL, None)


def blocks_of_64(b, h, i, j):
    return i // 64 == j // 64


def per_head(b, h, i, j):
    return (j <= i) | (h > 0)


@pytest.mark.parametrize("mask_mod", [blocks_of_64, per_head])
def test_another_mask_is_refused(mask_mod):
    reason = "mask_mod is not full, causal or a sliding window"
    function = from_blocks([[0, 1], [0, 1]], None, mask_mod)
    assert found(function, *random_qkv(256)) == (None, reason)


def test_a_captured_tensor_is_refused():
    def function(q, k, v, ids):
        def document(b, h, i, j):
            return ids[i] == ids[j]

        return from_blocks([[0, 1], [0, 1]], None, document)(q, k, v)

    reason = "score_mod or mask_mod captures tensors or symbolic lengths"
    assert found(function, *random_qkv(256), torch.arange(256) // 100) == (None, reason)


@pytest.mark.parametrize(
    "partial, full, valid",
    [
        ([[0], [0, 1]], None, True),
        ([[0], [1]], [[], [0]], True),
        ([[0, 1], [0, 1]], None, True),  # more than is needed
        ([[0], [1]], None, False),  # a block is missing
        ([[0], [0]], [[], [1]], False),  # a block on the diagonal is called full
        ([[0], [0, 1]], [[], [0]], False),  # a block is seen twice
        ([[0], [0, 1], [1]], None, True),  # a row more than there are queries
        ([[0, 1]], None, False),  # a row less
        ([[0], [0, 1]], [[], [2]], False),  # a block beyond the keys
    ],
)
def test_listed_blocks_are_data_unless_they_are_those_of_the_band(partial, full, valid):
    calls, function = [], from_blocks(partial, full)
    run_seen(function, *random_qkv(256), see=lambda gm: calls.extend(find_all(gm.graph)))
    assert [meaning(call) for call in calls] == [(CAUSAL, None) if valid else BY_LISTS]


def test_one_listed_block_is_all_there_is_only_up_to_its_size():
    """What flex_attention makes of block_mask=None lists the first block, of 2**30 keys."""

    def function(q, k, v):
        counts = torch.ones(1, 1, 1, dtype=torch.int32)
        index = torch.zeros(1, 1, 1, 2, dtype=torch.int32)
        lists = BlockLists(counts, index, None, None, 128, 128)
        return listed(lists, everything, (128, k.shape[2]))(q, k, v)

    assert found(function, *random_qkv(128, 256)) == ((FULL, (128, 128)), None)


def test_exported_calls_are_found():
    graph = torch.export.export(models.Of(masked(causal)), random_qkv()).graph
    (call,) = find_all(graph)
    assert (call.band, call.refused) == (CAUSAL, None)


def test_a_graph_that_was_looked_at_is_not_kept_alive():
    graphs = []

    def see(gm):
        graphs.append(weakref.ref(gm.graph))
        assert find_all(gm.graph)[0].refused is None

    run_seen(from_blocks([[0], [0, 1]]), *random_qkv(256), see=see)
    torch._dynamo.reset()
    gc.collect()
    assert graphs[0]() is None


def test_a_window_that_flex_computes_is_not_measured_by_sdpas_mask():
    """flex was faster than ours at D=64 (bench: masks): where nothing was measured, it stays."""

    def see(gm):
        (call,) = find_all(gm.graph)
        assert call.refused is None and call.shape.kind == "flex window"

    run_seen(from_blocks([[0], [0, 1]], None, window), *random_qkv(256), see=see)
    assert "flex window" not in cost.TIMED


# -- rewritten calls by block lists ----


EMULATE = {"sage.emulate": True, "sage.recipe": "sage1-per-token"}


def rewritten(function, *inputs, **options):
    """What `function` returns with its only call rewritten."""
    torch._dynamo.reset()
    with torch.no_grad(), support.op_by_op():
        out = torch.compile(function, backend="sage", options=EMULATE, **options)(*inputs)
    (site,) = sage_inductor.report()
    assert (site.spelling, site.recipe) == ("flex_attention", "sage1-per-token"), site.reason
    return out, site


def listed(lists, mask_mod=None, lengths=None, **options):
    """flex_attention by BlockLists, made into a BlockMask outside."""
    given = dict(BLOCK_SIZE=lists.size, mask_mod=mask_mod, seq_lengths=lengths)
    blocks = BlockMask.from_kv_blocks(*lists[:4], **given)
    return lambda q, k, v: flex_attention(q, k, v, block_mask=blocks, **options)


def exact(q, k, v, lists, band=FULL):
    return attention_exact(q, k, v, q.shape[3] ** -0.5, None, *band, lists)[0]


MODS = {"none": (None, FULL), "causal": (causal, CAUSAL), "window": (window, Band(99, 0))}


@chosen(
    lambda name, size: name == "window" or size == (128, 128),
    name=list(MODS), size=[(128, 128), (64, 64), (192, 256)],
)  # fmt: skip
def test_lists_made_outside_are_operands(name, size):
    """Duplicates, empty rows, tails, a head of its own each; full blocks that the band cuts."""
    q, k, v = random_qkv(300, 400, 4)
    lists, (mask_mod, band) = support.block_lists(1, 4, 300, 400, *size, 0.5, unread=0), MODS[name]
    function = listed(lists, mask_mod, (300, 400), enable_gqa=True)
    out, site = rewritten(function, q, k, v)
    assert support.relative_l2(out, exact(q, k, v, lists, band)) < 2e-2
    assert f"blocks of {size[0]} x {size[1]}" in site.mask


def test_lists_made_inside_of_q_and_k_are_operands():
    """As NABLA: the blocks of the highest pooled scores, all of them full."""

    def function(q, k, v):
        pooled_q, pooled_k = (x.unflatten(2, (-1, 64)).mean(3) for x in (q, k))
        index = (pooled_q @ pooled_k.mT).argsort(-1, descending=True).int()
        counts = 1 + (torch.arange(6, device=q.device) % 3).expand(1, 2, 6).int()
        made.append(BlockLists(torch.zeros_like(counts), index, counts, index, 64, 64))
        return listed(made[-1])(q, k, v)

    made = []
    q, k, v = random_qkv(384)
    function(q, k, v)
    lists = made[0]
    out, _ = rewritten(lambda q, k, v: function(q, k, v), q, k, v)
    assert support.relative_l2(out, exact(q, k, v, lists)) < 2e-2


def by_new_lists(H: int, block_kv: int, **compiled_by):
    """What one graph computes by lists that it is given, and exact attention by them."""
    q, k, v = random_qkv(256)

    def function(q, k, v, *lists):
        return listed(BlockLists(*lists, 128, block_kv), None, (256, 256))(q, k, v)

    torch._dynamo.reset()
    compiled = torch.compile(function, **compiled_by)
    for density in (0.2, 0.5, 1):
        lists = support.block_lists(1, H, 256, 256, 128, block_kv, density, unread=0)
        with torch.no_grad():
            yield compiled(q, k, v, *lists[:4]), exact(q, k, v, lists)


def test_a_graph_takes_new_lists():
    for out, expected in by_new_lists(1, 64, backend="sage", options=EMULATE):
        assert support.relative_l2(out, expected) < 2e-2
    assert len(sage_inductor.report()) == 1


@pytest.mark.sweep  # on a GPU: ops/test_gpu.py
def test_what_inductor_compiles_reads_the_lists_as_we_do(vectorized):
    """It counts a block that is listed twice twice, and gives rows without blocks 0."""
    for out, expected in by_new_lists(2, 128, backend="inductor"):
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)


def test_block_lists_that_the_op_does_not_take_are_refused_with_a_reason():
    def reason(lists, **options):
        sites = []

        def see(gm):
            sites.extend(rewrite(gm, Settings(**{"emulate": True, "force": True} | options)))

        run_seen(listed(lists, None, (256, 256)), *random_qkv(256), see=see)
        (site,) = sites
        assert not site.rewritten
        return site.reason

    lists = support.block_lists(1, 1, 256, 256, 64, 64, 0.5, unread=0)
    long = lists._replace(kv_indices=lists.kv_indices.long())
    assert reason(long).startswith("block lists must be int32, got ['int32', 'int64'")
    few = support.block_lists(1, 1, 128, 256, 64, 64, 0.5, unread=0)
    assert reason(few).startswith(
        "block lists must be for all queries, got (1, 1, 2), q (1, 2, 256,"
    )
    unlike = lists._replace(
        full_kv_num_blocks=few.full_kv_num_blocks, full_kv_indices=few.full_kv_indices
    )
    assert reason(unlike).startswith(
        "block lists must have q's batch and heads, or 1, got (1, 1, 4)"
    )
    assert "no kernel for block lists with qk=" in reason(lists, recipe="sage3")
    assert "of 64 queries where 128 share a scale" in reason(lists, recipe="sage1")
