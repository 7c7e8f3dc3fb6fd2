"""The ops that SDPA dispatches to, called by name: rewritten with the logsumexp that is read."""

import operator

import pytest
import torch
from support import calls, exactly, qkv, relative_l1, run_seen
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

from sage_inductor import patterns
from sage_inductor.choose.decide import Settings, rewrite
from sage_inductor.patterns.call import Decision
from sage_inductor.patterns.eligible import why_not

aten = torch.ops.aten
flash, efficient, cudnn, on_cpu = (
    getattr(aten, f"_scaled_dot_product_{name}")
    for name in (
        "flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu",
    )
)  # fmt: skip


def rewritten(function, N=64, N_kv=None, dtype=torch.bfloat16, H_kv=4, change=lambda graph: None):
    """The graph that `function` of q, k, v becomes, traced on a GPU that is not there, and sites."""
    graph, sites = [], []

    def see(gm):
        change(gm.graph)
        sites.extend(patterns.rewrite(gm, decide))
        gm.graph.lint()
        graph.append(gm)

    def decide(call):
        reason = call.refused or why_not(call)
        return Decision(None, reason) if reason else Decision("sage2-8b", "")

    with FakeTensorMode(allow_non_fake_inputs=True):
        shapes = (2, 4, N, 64), (2, H_kv, N_kv or N, 64), (2, H_kv, N_kv or N, 64)
        inputs = [torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes]
        run_seen(function, *inputs, see=see)
    return graph[0], sites


def ring(q, k, v, op=on_cpu, P=3, **given):
    """Attention of each part of the keys, merged by their logsumexp."""
    out = lse = None
    for k_r, v_r in zip(k.chunk(P, 2), v.chunk(P, 2)):
        new, new_lse = op(q, k_r, v_r, **given)[:2]
        if out is None:
            out, lse = new, new_lse
            continue
        both = torch.logaddexp(lse, new_lse)
        out = out * (lse - both).exp()[..., None] + new * (new_lse - both).exp()[..., None]
        lse = both
    return out, lse


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.sweep), True])
def test_parts_that_are_merged_are_attention(dynamic):
    q, k, v = qkv(H_kv=4, N_q=70, N_kv=192)
    options = {"sage.emulate": True, "sage.strict": True}
    compiled = torch.compile(ring, backend="sage", fullgraph=True, options=options, dynamic=dynamic)
    out, lse = compiled(q, k, v, scale=0.1)
    exact, exact_lse = exactly(q, k, v, False, 0.1)
    assert 1e-4 < relative_l1(out, exact) < 0.05
    assert_close(lse.double(), exact_lse, atol=0.2, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_logsumexp_is_stored_as_it_was(dynamic):
    """CPU's is [B, H, N_q] stored by rows: a view that its strides allow."""

    def function(q, k, v):
        out, lse = on_cpu(q, k, v)
        return out, lse, lse.transpose(1, 2).view(q.shape[0], -1)

    inputs = qkv(H_kv=4, N_q=70, N_kv=70)
    options = {"sage.emulate": True, "sage.strict": True}
    compiled = torch.compile(function, backend="sage", options=options, dynamic=dynamic)
    found, expected = compiled(*inputs), function(*inputs)
    assert 1e-4 < relative_l1(found[0], expected[0]) < 0.05
    for lse, exact in zip(found[1:], expected[1:]):
        assert lse.stride() == exact.stride()
        assert_close(lse, exact, atol=0.2, rtol=0)


@torch.no_grad()
def test_causal_and_a_mask():
    q, k, v = qkv(H_kv=4, N_q=70, N_kv=70)
    bias = torch.randn(70, 70)

    def function(q, k, v):
        return on_cpu(q, k, v, 0.0, True), on_cpu(q, k, v, attn_mask=bias)

    found = torch.compile(function, backend="sage", options={"sage.emulate": True})(q, k, v)
    for (out, lse), (expected, expected_lse) in zip(found, function(q, k, v)):
        assert 1e-4 < relative_l1(out, expected) < 0.05
        assert_close(lse, expected_lse, atol=0.2, rtol=0)


@pytest.mark.parametrize(
    "op, given",
    [(flash, {}), (flash.default, {}), (cudnn, {"attn_bias": None, "compute_log_sumexp": True}),
     (efficient, {"attn_bias": None, "compute_log_sumexp": True})],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("reads", [(0,), (0, 1)])
def test_ops_of_gpus(op, given, reads):
    shapes = []

    def function(q, k, v):
        found = op(q, k, v, is_causal=True, scale=0.5, **given)
        shapes.append([found[i].shape for i in reads])
        return [2 * found[i] for i in reads]

    gm, (site,) = rewritten(function)
    expected = "sage.sdpa(l_q_, l_k_, l_v_, None, [], None, 0, False, 0.5, int8/per_thread,fp8"
    assert expected in calls(gm.graph)
    assert "_scaled_dot_product" not in str(gm.graph)
    assert site.spelling == str(op).removesuffix(".default").replace("._", ".")
    assert (site.mask, site.dtype, site.recipe) == ("causal", "bfloat16", "sage2-8b")
    products = [node for node in gm.graph.nodes if "mul" in node.name]
    factors = [next(x for x in node.all_input_nodes) for node in products]
    assert [x.meta["example_value"].shape for x in factors] == shapes[0]


def test_heads_of_k_may_be_fewer():
    gm, (site,) = rewritten(lambda q, k, v: flash(q, k, v)[0], H_kv=2)
    assert site.rewritten and site.k == (2, 2, 64, 64)


def recomputed(q, k, v):
    """The gradient of v, as a backward that computes attention again has it."""
    out, lse = on_cpu(q, k, v)
    lse = aten.detach.default(aten.alias.default(lse))
    return (
        aten._scaled_dot_product_flash_attention_for_cpu_backward(
            q, q, k, v, torch.zeros_like(q), lse, 0.0, False
        )[2]
        + 0 * out
    )


REFUSED = {
    "its own backward reads what it returns": (recomputed, {}),
    "more than one out and one logsumexp are read": (lambda q, k, v: flash(q, k, v)[:7:6], {}),
    "is_causal with 64 queries and 32 keys": (
        lambda q, k, v: flash(q, k, v, is_causal=True)[0], {"N_kv": 32},
    ),
    "a logsumexp [2, 4, 96] of 70 queries is read": (
        lambda q, k, v: efficient(q, k, v, None, True)[:2], {"N": 70},
    ),
    "a logsumexp [2, 4, 0] of 64 queries is read": (
        lambda q, k, v: efficient(q, k, v, None, False)[:2], {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_attention_does_not_give_is_refused(what):
    function, given = REFUSED[what]
    gm, (site,) = rewritten(function, **given)
    assert site.reason == f"an op of SDPA's backends is used for more than attention: {what}"
    assert "sage.sdpa" not in calls(gm.graph)


def test_a_graph_may_read_an_output_twice():
    def read_twice(graph):
        (both,) = (node for node in graph.nodes if node.target is flash)
        (out,) = both.users
        with graph.inserting_after(out):
            again = graph.call_function(operator.getitem, (both, 0))
        again.meta = {**out.meta}
        out.replace_all_uses_with(again, lambda user: user.op == "output")

    gm, (site,) = rewritten(lambda q, k, v: (out := flash(q, k, v)[0], 2 * out), change=read_twice)
    assert site.reason.endswith("more than one out and one logsumexp are read")


@torch.no_grad()
@pytest.mark.parametrize("inside", [True, False])
def test_autocast_casts_no_op_of_a_backend(inside):
    q, k, v = qkv(H_kv=4)
    sites = []

    def function(q, k, v):
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            return on_cpu(q, k, v)[0]

    def plain(q, k, v):
        return on_cpu(q, k, v)[0]

    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        out = run_seen(
            function if inside else plain, q, k, v,
            see=lambda gm: sites.extend(rewrite(gm, Settings(emulate=True))),
        )  # fmt: skip
    assert sites[0].reason.endswith("fp32 under autocast, which casts no op of a backend")
    assert torch.equal(out, plain(q, k, v))


def test_a_call_whose_output_nobody_reads_is_none():
    gm, sites = rewritten(lambda q, k, v: flash(q, k, v)[1])
    assert not sites and "_scaled_dot_product_flash_attention" in str(gm.graph)
