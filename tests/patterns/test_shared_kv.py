"""Batches that share k and v: which are stacked, that no bit changes, and which stay apart."""

import math
import random
import re

import models
import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from functorch.compile import make_boxed_func
from pairs import chosen
from support import calls, every, heads, relative_l1, run_seen
from torch._dynamo.backends.common import aot_autograd
from torch._guards import detect_fake_mode
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.testing import assert_close

import sage_inductor
from sage_inductor.choose.decide import rewrite
from sage_inductor.ops.formats import MAX_ROWS
from sage_inductor.ops.recipe import NAMED
from sage_inductor.options import Settings
from sage_inductor.patterns import shared_kv
from sage_inductor.patterns.graph import value_of

PER_TOKEN = Settings(emulate=True, recipe="sage2-8b-per-token")
EMULATE = {"sage.emulate": True, "sage.recipe": "sage2-8b-per-token"}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
STACKED = {name: r.sharing.q_span for name, r in NAMED.items() if not r.of_qk.smooths_q}


def capture(function, *inputs, settings=PER_TOKEN, **options):
    """What `function` returns, rewritten without Inductor, its nodes of sage.sdpa, the sites."""
    nodes, sites = [], []

    def see(gm):
        sites.extend(rewrite(gm, settings))
        gm.graph.lint()
        nodes.extend(gm.graph.find_nodes(op="call_function", target=torch.ops.sage.sdpa.default))

    return run_seen(function, *inputs, see=see, **options), nodes, sites


def batches(node) -> list[int]:
    return [value_of(x).shape[0] for x in node.args[:3]]


@pytest.fixture
def row_by_row(monkeypatch):
    """BLAS adds up a product in an order that depends on the number of rows. Kernels do not."""
    matmul = torch.Tensor.__matmul__

    def product(a, b):
        return torch.cat([matmul(row, b) for row in a.split(1, -2)], -2)

    monkeypatch.setattr(torch.Tensor, "__matmul__", product)


def without_stacking(monkeypatch):
    monkeypatch.setattr(shared_kv, "_is_one_batch", lambda *_: False)


def expanded(*xs, B=2):
    return tuple(x.expand(B, -1, -1, -1) for x in xs)


def inputs(B=2, N=40, N_kv=24, H=4, H_kv=2, D=32, dtype=torch.float32):
    """q of B batches and k, v of one."""
    k, v = (heads(1, H_kv, N_kv, D, dtype) for _ in range(2))
    return heads(B, H, N, D, dtype), k + 2, v + 1


def sdpa(q, k, v, *args, **kwargs):
    return F.scaled_dot_product_attention(q, k, v, *args, **kwargs, enable_gqa=True)


def any_batch(q, k, v, *args):
    return sdpa(q, *expanded(k, v, B=q.shape[0]), *args)


class TestGoldenGraphs(TestCase):
    def test_q_is_viewed_and_k_and_v_are_of_one_batch(self):
        _, (node,), _ = capture(SPELLED["expand"], *inputs())
        self.assertExpectedInline(
            calls(node.graph),
            """sdpa_default = sage.sdpa(transpose(unsqueeze(flatten(transpose(l_q_, 1, 2), 0, 1), 0), 1, 2), narrow(expand(l_k_, 2, -1, -1, -1), 0, 0, 1), narrow(expand(l_v_, 2, -1, -1, -1), 0, 0, 1), None, [], None, None, False, 0.1767766952966369, int8/per_token,fp8@VERSION, None, True, False)""",
        )

    def test_dynamic_sizes_are_nodes(self):
        _, (node,), _ = capture(any_batch, *inputs(), dynamic=True)
        found = re.sub(r"\bs\d+\b", "B", calls(node.graph))
        self.assertExpectedInline(
            found,
            """sdpa_default = sage.sdpa(transpose(unsqueeze(flatten(transpose(l_q_, 1, 2), 0, 1), 0), 1, 2), narrow(expand(l_k_, B, -1, -1, -1), 0, 0, 1), narrow(expand(l_v_, B, -1, -1, -1), 0, 0, 1), None, [], None, None, False, 0.1767766952966369, int8/per_token,fp8@VERSION, None, True, False)""",
        )
        back = next(node for node in node.graph.nodes if "unflatten" in node.name)
        self.assertExpectedInline(str(back.args[1:]), """(0, [sym_size_int, sym_size_int_1])""")


# -- which are stacked ----


def by_hand(q, k, v):
    k, v = (x.repeat_interleave(2, 1) for x in expanded(k, v))
    return (q @ k.transpose(-1, -2) / math.sqrt(32)).softmax(-1) @ v


def by_flex(q, k, v):
    return flex_attention(q, *expanded(k, v), enable_gqa=True)


SPELLED = {
    "expand": lambda q, k, v: sdpa(q, *expanded(k, v)),
    "expand in another order": lambda q, k, v: sdpa(
        q, *(x.transpose(1, 2).expand(2, -1, -1, -1).transpose(1, 2) for x in (k, v))),
    "expand of tokens": lambda q, k, v: sdpa(
        q, *(x.transpose(1, 2).flatten(2).expand(2, -1, -1).unflatten(2, (2, 32)).transpose(1, 2)
             for x in (k, v))),
    "expand, copied": lambda q, k, v: sdpa(q, *(x.contiguous() for x in expanded(k, v))),
    "repeat": lambda q, k, v: sdpa(q, *(x.repeat(2, 1, 1, 1) for x in (k, v))),
    "repeat, cloned": lambda q, k, v: sdpa(q, *(x.repeat(2, 1, 1, 1).clone() for x in (k, v))),
    "repeat_interleave": lambda q, k, v: sdpa(q, *(x.repeat_interleave(2, 0) for x in (k, v))),
    "one each way": lambda q, k, v: sdpa(q, k.expand(2, -1, -1, -1), v.repeat(2, 1, 1, 1)),
    "heads repeated, too": lambda q, k, v: F.scaled_dot_product_attention(
        q, *(x.repeat_interleave(2, 1) for x in expanded(k, v))),
    "k written before": lambda q, k, v: (k := k.clone(), k.add_(1), sdpa(q, *expanded(k, v)))[-1],
    "k written between": lambda q, k, v: (
        e := expanded(k := k.clone(), v), k.mul_(2), sdpa(q, *e))[-1],
    "attention": lambda q, k, v: sage_inductor.attention(q, *expanded(k, v), enable_gqa=True),
    "flex": by_flex,
    "keys": lambda q, k, v: sdpa(q, *expanded(k, v), torch.arange(24)[None] % 5 > 0),
    "keys of heads": lambda q, k, v: sdpa(
        q, *expanded(k, v), torch.arange(96).view(1, 4, 1, 24) % 5 > 0),
    "added": lambda q, k, v: sdpa(q, *expanded(k, v), torch.arange(24.0).sin()[None, None, None]),
    "no mask after all": lambda q, k, v: sdpa(
        q, *expanded(k, v), torch.ones(40, 24, dtype=torch.bool)),
}  # fmt: skip


def test_batches_that_share_k_and_v_are_stacked_and_no_bit_changes(monkeypatch, row_by_row):
    given, function = inputs(), every(SPELLED)
    stacked = capture(function, *given)
    without_stacking(monkeypatch)
    for case, out, node, site, expected, of_apart, apart, exact in zip(
        SPELLED, *stacked, *capture(function, *given), function(*given), strict=True
    ):
        assert batches(node) == [1, 1, 1] and value_of(node.args[0]).shape == (1, 4, 80, 32), case
        assert site.q == (2, 4, 40, 32) and site.k[0] == 2, case
        assert site.reason == "emulated; all batches share k and v, which are prepared once", case
        assert batches(of_apart) == [2, 2, 2] and apart.reason == "emulated", case
        assert torch.equal(out, expected) and out.stride() == expected.stride(), case
        assert out.stride() == exact.stride(), case
        assert 1e-4 < relative_l1(out, exact) < 0.1, case


@chosen(
    lambda recipe, dtype: list(STACKED).index(recipe) % 3 == DTYPES.index(dtype),
    recipe=list(STACKED), dtype=DTYPES,
)  # fmt: skip
def test_of_random_calls_no_bit_changes(recipe, dtype, monkeypatch, row_by_row):
    random.seed(0)
    one_batch = shared_kv._is_one_batch
    for _ in range(6):
        B, group, H_kv = random.choice([2, 3, 5]), random.choice([1, 2]), random.choice([1, 2, 3])
        span = STACKED[recipe]
        N = random.choice([1, 2, 7, 65, 130] if span == 1 else [span, 2 * span, 3 * span])
        N_kv, D = random.choice([1, 5, 77, 129, 300]), random.choice([16, 64, 72, 128])
        q, k, v = inputs(B, N, N_kv, group * H_kv, H_kv, D, dtype)
        q = torch.cat([q.transpose(1, 2)] * 2, -1)[..., :D].transpose(1, 2)  # rows of 2 D
        bias = torch.randn(1, 1, 1, N_kv).to(dtype)
        mask = random.choice([None, torch.rand(N_kv)[None] < 0.8, bias])

        def function(q, k, v, mask):
            given = dict(scale=0.2, enable_gqa=True, return_lse=True)
            k, v = expanded(k, v, B=q.shape[0])
            out, lse = sage_inductor.attention(q, k, v, mask, **given)
            return out, lse.view(-1)  # as it is stored without

        results = []
        for replaced in (one_batch, lambda *_: False):
            monkeypatch.setattr(shared_kv, "_is_one_batch", replaced)
            settings = Settings(emulate=True, recipe=recipe)
            result, (node,), _ = capture(function, q, k, v, mask, settings=settings)
            assert batches(node)[0] == (B if results else 1), (N, N_kv)
            results.append(result)
        for a, b in zip(*results):
            assert torch.equal(a, b), (B, group, H_kv, N, N_kv, D)


def test_one_query_of_each_batch_is_a_view_in_any_order():
    q, (_, k, v) = torch.randn(2, 4, 1, 32), inputs()
    _, (node,), _ = capture(SPELLED["expand"], q, k, v)
    assert batches(node) == [1, 1, 1] and value_of(node.args[0]).shape[2] == 2


# -- which are not ----


def of_two_batches(q, k, v):
    return sdpa(q, *(torch.cat([x, x]) for x in (k, v)))


def of_lists(q, k, v):
    count = (q[:1, :1, :1, 0].abs() >= 0).int()
    lists = count, count[..., None] - 1
    blocks = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=64, seq_lengths=(40, 24))
    return flex_attention(q, *expanded(k, v), block_mask=blocks, enable_gqa=True)


def with_sink(q, k, v):
    """One head alone is stored as [B, N, H, D], too, where attention is by hand."""
    q, k, v = (x[:, :1] for x in (q, *expanded(k, v)))
    return torch.cat([q @ k.mT, q[..., :1]], -1).softmax(-1)[..., :-1] @ v


APART = {
    "causal": lambda q, k, v: sdpa(q, *expanded(k, v), is_causal=True),
    "a window": lambda q, k, v: sdpa(
        q, *expanded(k, v), (torch.arange(24) - torch.arange(40)[:, None]).abs() < 8),
    "a mask of queries": lambda q, k, v: sdpa(q, *expanded(k, v), q[0, 0, :, :24] > -2),
    "a mask of batches": lambda q, k, v: sdpa(q, *expanded(k, v), q[:, :1, :1, :24] > -2),
    "k alone": lambda q, k, v: sdpa(q, k.expand(2, -1, -1, -1), torch.cat([v, v + 1])),
    "v alone": lambda q, k, v: sdpa(q, torch.cat([k, k + 1]), v.expand(2, -1, -1, -1)),
    "of two batches": of_two_batches,
    "two batches repeated": lambda q, k, v: sdpa(
        torch.cat([q.transpose(1, 2)] * 2).transpose(1, 2),
        *(torch.cat([x, x + 1]).repeat(2, 1, 1, 1) for x in (k, v))),
    "a copy written to": lambda q, k, v: (
        k := k.repeat(2, 1, 1, 1), k[1].add_(1), sdpa(q, k, v.expand(2, -1, -1, -1)))[-1],
    "the copy of a copy written to": lambda q, k, v: (
        v := v.repeat(2, 1, 1, 1), v[1].add_(1), sdpa(q, k.expand(2, -1, -1, -1), v.clone()))[-1],
    "q in another order": lambda q, k, v: sdpa(
        q.contiguous(), *expanded(k, v)).transpose(1, 2).contiguous(),
    "q is not dense": lambda q, k, v: sdpa(
        torch.cat([q.transpose(1, 2)] * 2, 1)[:, :40].transpose(1, 2), *expanded(k, v)),
    "block lists": of_lists,
    "a sink of batches": with_sink,
    "by hand, which stores heads side by side": by_hand,
    "one batch": lambda q, k, v: sdpa(q[:1], *(x.repeat(1, 1, 1, 1) for x in (k, v))),
}  # fmt: skip


def test_other_calls_stay_as_they_were():
    given, function = inputs(), every(APART)
    found = zip(APART, *capture(function, *given), function(*given), strict=True)
    for case, out, node, site, exact in found:
        assert batches(node)[0] == batches(node)[1] == site.q[0], case
        assert "share" not in site.reason, case
        assert relative_l1(out, exact) < 0.1, case


@pytest.mark.parametrize("recipe", NAMED)
def test_queries_of_two_batches_share_no_scale_and_no_mean(recipe):
    for N in (32, 64, 128, 130):
        settings = Settings(emulate=True, recipe=recipe)
        _, (node,), _ = capture(SPELLED["expand"], *inputs(N=N), settings=settings)
        expected = recipe in STACKED and N % STACKED[recipe] == 0
        assert batches(node) == ([1, 1, 1] if expected else [2, 2, 2]), N


def test_an_output_that_is_stored_otherwise_or_has_too_many_rows_is_not_stacked(monkeypatch):
    """SDPA of a batch of 1 of k and v is not stored as its q is."""
    given = inputs()
    assert sdpa(*given).is_contiguous()
    _, (node,), _ = capture(sdpa, *given)
    assert batches(node) == [2, 2, 2]
    for most, expected in ((80, 1), (79, 2)):
        monkeypatch.setattr(shared_kv, "MAX_ROWS", most)
        _, (node,), _ = capture(SPELLED["expand"], *given)
        assert batches(node)[0] == expected


def test_a_batch_that_depends_on_data_may_be_empty():
    def function(q, k, v, keep):
        return any_batch(q[keep].transpose(1, 2), k, v)

    nodes, (q, k, v) = [], inputs(B=4)

    def backend(gm, _):
        rewrite(gm, PER_TOKEN)
        nodes.extend(gm.graph.find_nodes(op="call_function", target=torch.ops.sage.sdpa.default))
        return gm.forward

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        for keep in ([True, False, True, True], [False] * 4):
            given = q.transpose(1, 2).contiguous(), k, v, torch.tensor(keep)
            assert compiled(*given).shape == (sum(keep), 4, 40, 32)
    (node,) = nodes
    assert batches(node)[0] == batches(node)[1]


def test_what_a_graph_is_given_may_have_other_strides_next_time():
    """torch.export guards no strides."""
    attention, (q, k, v) = models.Of(lambda q, k, v: sdpa(q, k.mT.mT, v)), inputs()
    program = torch.export.export(attention, (q, *expanded(k, v)))
    sage_inductor.rewrite(program, options=EMULATE)
    k, v = (torch.cat([x, x + torch.randn_like(x)]) for x in (k, v))
    assert relative_l1(program.module()(q, k, v), sdpa(q, k, v)) < 0.1


# -- what a stacked call is to the rest ----


def test_stacked_calls_of_the_same_k_and_v_prepare_them_once():
    def function(q, k, v):
        e = expanded(k, v)
        others = [torch.narrow(x, dim=0, start=n, length=1) for n in (0, 1) for x in e]
        return (
            sdpa(q, *e), sdpa(q + 1, *e), sdpa(q, *e, is_causal=True),
            sdpa(q[:1], *others[:2]), sdpa(q[:1], *others[2:]),
        )  # fmt: skip

    _, nodes, _ = capture(function, *inputs())
    find = nodes[0].graph.find_nodes
    (prepare,) = find(op="call_function", target=torch.ops.sage.prepare.default)
    assert [bool(node.args[4]) for node in nodes] == [True, True, False, False, False]
    assert value_of(prepare.args[0]).shape[0] == 1


def through_autograd(gm, example_inputs):
    rewrite(gm, PER_TOKEN)
    return aot_autograd(fw_compiler=lambda fx, _: make_boxed_func(fx))(gm, example_inputs)


def test_one_graph_serves_every_size_and_its_guards_are_the_ones_before(monkeypatch):
    def guards() -> set:
        found = []

        def backend(gm, example_inputs):
            found.append(detect_fake_mode([value_of(n) for n in gm.graph.nodes]).shape_env)
            return through_autograd(gm, example_inputs)

        torch._dynamo.reset()
        compiled = torch.compile(any_batch, backend=backend, dynamic=True, fullgraph=True)
        for B, N, N_kv in ((3, 40, 24), (5, 33, 24), (6, 8, 300)):
            given = inputs(B, N, N_kv)
            out, exact = compiled(*given), any_batch(*given)
            assert relative_l1(out, exact) < 0.1
        (shape_env,) = found
        return {str(guard.expr) for guard in shape_env.guards}

    stacked = guards()
    without_stacking(monkeypatch)
    apart = guards()
    (of_one,), (of_all,) = apart - stacked, stacked - apart
    rows, bound = of_one.split(" ", 1)
    assert bound == f"<= {MAX_ROWS}" and of_all.endswith(bound)
    assert rows in of_all.split()[0].split("*")


@pytest.mark.parametrize("mask", [None, torch.arange(24)[None] % 5 > 0])
def test_gradients_are_those_of_the_batches_apart(mask, monkeypatch):
    given, cotangent = [x.detach().requires_grad_() for x in inputs()], heads(2, 4, 40, 32)
    results = []
    for replaced in (shared_kv._is_one_batch, lambda *_: False):
        monkeypatch.setattr(shared_kv, "_is_one_batch", replaced)
        torch._dynamo.reset()
        out = torch.compile(any_batch, backend=through_autograd, fullgraph=True)(*given, mask)
        results.append(torch.autograd.grad(out, given, cotangent))
    exact = torch.autograd.grad(any_batch(*given, mask), given, cotangent)
    assert results[0][1].shape == (1, 2, 24, 32)
    assert not torch.equal(results[0][1], results[1][1])  # summed in another order
    for a, b, c in zip(*results, exact):
        assert_close(a, b, atol=1e-5, rtol=1e-5)
        assert_close(a, c, atol=1e-5, rtol=1e-5)


def test_an_exported_program_runs_at_other_sizes():
    def attend(q, k, v):
        return any_batch(q.unflatten(2, (4, 32)).transpose(1, 2), k, v)

    def given(B, N, N_kv):
        q, k, v = inputs(B, N, N_kv)
        return q.transpose(1, 2).flatten(2), k, v

    auto = torch.export.Dim.AUTO
    dims = ({0: auto, 1: auto}, {2: auto}, {2: auto})
    program = torch.export.export(models.Of(attend), given(2, 40, 24), dynamic_shapes=dims)
    (site,) = sage_inductor.rewrite(program, options=EMULATE)
    assert "share" in site.reason and isinstance(site.q[0], str)
    for sizes in ((2, 40, 24), (3, 33, 100)):
        x = given(*sizes)
        assert relative_l1(program.module()(*x), attend(*x)) < 0.1


def test_diagnose_measures_the_batches_as_they_are():
    found = sage_inductor.diagnose(any_batch, recipes="sage2-8b-per-token")(*inputs(B=3))
    (row,) = (row for row in found.rows if row.recipe == "sage2-8b-per-token")
    assert row.site.q == (3, 4, 40, 32) and row.site.k == (3, 2, 24, 32)
    assert 1e-3 < row.relative_l1 < 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(3, 512, 700, 128), (2, 1664, 1000, 64)], ids=str)
@pytest.mark.parametrize("recipe", STACKED)
@torch.no_grad()
def test_kernels_give_the_same_bits(recipe, sizes):
    """Where tiles are computed whole: a few keys, and a length from which one kernel serves."""
    B, N, N_kv, D = sizes
    q, k, v = (x.cuda() for x in inputs(B, N, N_kv, D=D, dtype=torch.bfloat16))
    options = {"sage.force": True, "sage.strict": True, "sage.recipe": recipe}
    stacked, apart = (
        torch.compile(function, backend="sage", fullgraph=True, options=options)
        for function in (any_batch, sdpa)
    )
    repeated = [x.transpose(1, 2).repeat(B, 1, 1, 1).transpose(1, 2) for x in (k, v)]
    peaks, results = [], []
    for compiled, given in ((stacked, (q, k, v)), (apart, (q, *repeated))):
        compiled(*given)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results.append(compiled(*given))
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert ["share" in site.reason for site in sage_inductor.report()] == [True, False]
    assert torch.equal(*results) and results[0].stride() == results[1].stride()
    assert peaks[0] < peaks[1]  # no copy of q or out, and k and v of one batch
    exact = sdpa(q, *repeated)
    assert relative_l1(results[0], exact) < 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@torch.no_grad()
def test_a_long_stacked_call_is_near_exact_attention(mode):
    """Where the Hopper kernel deals out pieces of tiles, sums are in another order."""
    options = {"sage.force": True, "sage.strict": True, "sage.mode": mode}
    compiled = torch.compile(any_batch, backend="sage", fullgraph=True, options=options)
    for _ in range(3):  # as new data in the same graph
        q, k, v = (x.cuda() for x in inputs(4, 4096, 4096, 6, 3, 128, torch.bfloat16))
        exact = any_batch(q, k, v)
        out = compiled(q, k, v)
        assert relative_l1(out, exact) < 0.1
