"""sage.training under torch.compile, on CPU with the emulation, and (gpu) with the kernels."""

import functools

import models
import pytest
import torch
import torch.nn.functional as F
from support import op_by_op, relative_l1, run_seen, swept
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.testing import assert_close
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import checkpoint

import sage_inductor
from sage_inductor import backend, config, functional
from sage_inductor.ops.attention import tiles
from sage_inductor.ops.reference import rowscaled
from sage_inductor.ops.reference import training as sagebwd
from sage_inductor.patterns import eligible
from sage_inductor.patterns.graph import op_name
from sage_inductor.policy import Policy, Rule

ASKED = {"sage.training": "sagebwd", "sage.emulate": True}
ASKED_FP8 = ASKED | {"sage.training": "fp8-backward"}
BY_INDUCTOR = (
    "test_a_compiled_model_trains_by_the_op_at_any_length_in_two_graphs",
    "test_a_cached_graph_of_other_sources_is_not_taken",
)
both = pytest.mark.parametrize("asked", [ASKED, ASKED_FP8], ids=["sagebwd", "fp8-backward"])
OPS = torch.ops.sage.sagebwd.default, torch.ops.sage.rowscaled.default


@pytest.fixture(autouse=True)
def graphs_run_op_by_op(request):
    """Forward and backward are split as Inductor splits them, which alone decides what is saved and
    computed again. That it compiles both is what the first test is for."""
    of_inductor = request.node.originalname in BY_INDUCTOR
    with op_by_op(not of_inductor and not request.node.get_closest_marker("gpu"), split=True):
        yield


class Attention(models.Attention):
    def __init__(self, dim=128, heads=2, is_causal=True):
        super().__init__(dim, heads, is_causal)


class ByOp(Attention):
    """The same, the op called by itself."""

    def attend(self, q, k, v):
        return self.op(q, k, v, self.is_causal, q.shape[3] ** -0.5, True)[0]


def pair(layers=1, dim=128, is_causal=True, op=None):
    """(the model with SDPA, with the op: by default sagebwd, or rowscaled where it is not causal)."""
    torch.manual_seed(0)
    model, by_op = (
        torch.nn.Sequential(*(kind(dim, is_causal=is_causal) for _ in range(layers)))
        for kind in (Attention, ByOp)
    )
    by_op.load_state_dict(model.state_dict())
    for block in by_op:
        block.op = OPS[not is_causal] if op is None else op
    return model, by_op


def gradients(f, x, cotangent, parameters):
    return torch.autograd.grad(f(x), [x, *parameters], cotangent)


def same(actual, expected, most=1e-3):
    return all(relative_l1(x, y) < most for x, y in zip(actual, expected, strict=True))


def compiled_by(asked, model, **given):
    given = {"fullgraph": True} | given
    return torch.compile(model, backend="sage", options=asked, **given)


def refused() -> str:
    """Why the only call stays."""
    (site,) = sage_inductor.report().refused
    return site.reason


def inputs(N=90, dim=128):
    return torch.randn(2, N, dim, requires_grad=True), torch.randn(2, N, dim)


def rewritten():
    return [site.recipe for site in sage_inductor.report().rewritten]


@pytest.mark.parametrize("asked", [swept(ASKED), ASKED_FP8], ids=["sagebwd", "fp8-backward"])
def test_a_compiled_model_trains_by_the_op_at_any_length_in_two_graphs(asked):
    """Causal. Of the FP8 backward without a mask: the tests below."""
    model, by_op = pair(2, op=OPS[asked is ASKED_FP8])
    compiled = compiled_by(asked, model)
    for N in (90, 64, 17, 2, 200):
        x, cotangent = inputs(N)
        found = gradients(compiled, x, cotangent, model.parameters())
        expected = gradients(by_op, x, cotangent, by_op.parameters())
        assert same(found, expected)
        exact = gradients(model, x, cotangent, model.parameters())
        assert 1e-4 < relative_l1(found[0], exact[0]) < 0.1
    graphs = {graph for graph, _ in sage_inductor.report()._sites}
    assert len(graphs) == 2 and set(rewritten()) == {asked["sage.training"]}


@both
def test_what_the_op_returns_may_be_written_to(asked):
    """Its backward reads it. That of a product by hand does not (residual pooling, as in MViT)."""

    def attend(q, k, v):
        out = (q @ k.mT * 0.25).softmax(-1) @ v
        out[:, :, 1:] += q[:, :, 1:]
        return out

    x, cotangent = torch.randn(3, 1, 2, 40, 16, requires_grad=True), torch.randn(1, 2, 40, 16)
    compiled = torch.compile(attend, backend="sage", options=asked)
    found, exact = (torch.autograd.grad(f(*x), x, cotangent)[0] for f in (compiled, attend))
    assert rewritten() == [asked["sage.training"]]
    assert 1e-4 < relative_l1(found, exact) < 0.1


@pytest.mark.parametrize("written", ["q", "k", "bias"])
def test_a_call_whose_input_is_written_to_after_it_is_not_trained(written):
    """The op's backward reads it. That of the products by hand does not, if v alone needs one."""

    def attend(v, **given):
        out = (given["q"] @ given["k"].mT * 0.25 + given["bias"]).softmax(-1) @ v
        given[written].zero_()
        return out

    q, k, v = torch.randn(3, 1, 2, 9, 16)
    given, v = {"q": q, "k": k, "bias": torch.randn(9, 9)}, v.requires_grad_()
    compiled = torch.compile(attend, backend="sage", options={"sage.emulate": True})
    found, exact = (
        torch.autograd.grad(f(v, **{name: x.clone() for name, x in given.items()}).sum(), v)[0]
        for f in (compiled, attend)
    )
    assert_close(found, exact)
    (site,) = sage_inductor.report()
    assert site.reason == "training: an input is written to after the call"


def test_inference_keeps_its_recipe_and_emulation_has_the_exact_backward_unless_asked():
    model, _ = pair()
    with torch.no_grad():
        compiled_by(ASKED, model)(inputs()[0])
    assert rewritten() == ["sage2-8b"]
    for given in ({}, {"sage.training": "auto"}):
        torch._dynamo.reset()
        compiled_by({"sage.emulate": True, **given}, model)(inputs()[0])
        assert rewritten() == ["sage2-8b"]  # whose backward is exact attention's
    torch._dynamo.reset()
    compiled_by({"sage.training": "sagebwd"}, model)(inputs()[0])
    assert "on CPU attention stays as it was" in refused()


WEIGHT, BIAS = torch.randn(32, 96), torch.randn(96)


def rotated(k):
    angles = torch.arange(k.shape[2])[:, None] * torch.rand(k.shape[3])
    return k * angles.cos() + torch.cat([-k[..., 8:], k[..., :8]], -1) * angles.sin()


def heads(x):
    return x.view(*x.shape[:2], 2, 16).transpose(1, 2)


def thirds(x):
    return [heads(each) for each in x.chunk(3, -1)]


def biased(x):
    return heads(F.linear(x, WEIGHT[:, :32].T, BIAS[:32]))


def in_part(k):
    return torch.cat([rotated(k), k], -1)[..., 8:24]


KEYS = {  # of x [B, N, 32]: k, and whether a bias is left in its channels
    "a linear": (biased, True),
    "one without a bias": (lambda x: heads(F.linear(x, WEIGHT[:, :32].T)), False),
    "one for q, k and v": (lambda x: thirds(F.linear(x, WEIGHT.T, BIAS))[1], True),
    "split": (lambda x: heads(F.linear(x, WEIGHT.T, BIAS).split(32, 2)[1]), True),
    "permuted": (lambda x: F.linear(x, WEIGHT.T, BIAS).view(2, 8, 3, 2, 16).permute(2, 0, 3, 1, 4)[1], True),
    "addmm": (lambda x: thirds(torch.addmm(BIAS, x.view(-1, 32), WEIGHT).view(2, 8, 96))[1], True),
    "added": (lambda x: heads(x @ WEIGHT[:, :32] + BIAS[:32]), True),
    "a residual": (lambda x: heads(x @ WEIGHT[:, :32] + x), False),
    "in another dtype": (lambda x: heads(F.linear(x, WEIGHT[:, :32].T, BIAS[:32]).float()), True),
    "normalized": (lambda x: F.rms_norm(biased(x), (16,)), False), "given": (heads, False),
    "rotated": (lambda x: rotated(biased(x)), False), "rotated in part": (lambda x: in_part(biased(x)), True),
}  # fmt: skip


@pytest.mark.parametrize("of, expected", KEYS.values(), ids=KEYS.keys())
def test_a_bias_of_k_is_seen(of, expected):
    def attend(x):
        return F.scaled_dot_product_attention(heads(x), of(x), heads(x), is_causal=True)

    graphs = []
    run_seen(attend, torch.randn(2, 8, 32), see=lambda gm: graphs.append(gm.graph))
    (graph,) = graphs
    (node,) = (node for node in graph.nodes if op_name(node) == "scaled_dot_product_attention")
    assert eligible.is_biased(node.args[1]) is expected


def test_the_setting_and_the_eager_call():
    q = torch.randn(1, 2, 70, 64, requires_grad=True)
    with config.patch(training="sagebwd", emulate=True):
        out = sage_inductor.attention(q, q, q, is_causal=True)
    (found,) = torch.autograd.grad(out.sum(), q)
    by_op = torch.ops.sage.sagebwd(q, q, q, True, 0.125, False)[0]
    (expected,) = torch.autograd.grad(by_op.sum(), q)
    assert_close(found, expected, rtol=0, atol=0)
    message = "one of .'off', 'auto', 'sagebwd', 'fp8-backward'.*got 'fp8'"
    with pytest.raises(ValueError, match=message):
        config.training = "fp8"


def test_the_message_about_the_old_name_g_has_the_new_one():
    said = "got .*'g'.*: it is called 'fp8-backward' since 0.2"
    with pytest.raises(ValueError, match=f"config.training must be one of .*{said}"):
        config.training = "g"
    with pytest.raises(ValueError, match=f"rule 1: training must be one of .*{said}"):
        Policy((Rule("auto", training="g"),))
    with pytest.raises(ValueError, match=f"diagnose_training: recipes must be of .*{said}"):
        sage_inductor.diagnose_training(Attention(), loss=torch.mean, recipes=["sagebwd", "g"])


def test_a_short_eager_call_that_needs_a_gradient_is_decided_by_its_own_length():
    """Others of fewer than 256 rows stay SDPA whatever their length, and share a decision."""
    q = torch.randn(1, 2, 16, 64)
    for needs_grad in (False, True):
        given = (False, None, False, "auto", False)
        short = q.requires_grad_(needs_grad)[:, :, 1:]
        calls = (q, q, q), (short, q, q)
        keys = {functional._kind(functional._key(x, given), x) for x in calls}
        assert len(keys) == 1 + needs_grad


def test_a_policy_says_which_calls_train_how():
    model, _ = pair(4)
    rules = [
        {"module": "0", "recipe": "auto", "training": "off"}, {"module": "1", "recipe": "off"},
        {"module": "2", "recipe": "auto", "training": "fp8-backward"}, {"recipe": "auto"},
    ]  # fmt: skip
    model[2].is_causal = False
    compiled_by(ASKED | {"sage.policy": rules}, model)(inputs()[0])
    found = {site.module: site.recipe for site in sage_inductor.report()}
    assert found == {"0": "sage2-8b", "1": None, "2": "fp8-backward", "3": "sagebwd"}
    assert Policy([Rule("auto", training="sagebwd")]).text().count('"training": "sagebwd"') == 1
    with pytest.raises(ValueError, match="rule 1: training must be one of"):
        Policy([Rule("auto", training="fp8")])
    torch._dynamo.reset()
    given = {"sage.emulate": True, "sage.policy": [{"recipe": "auto", "training": "sagebwd"}]}
    compiled_by(given, model)(inputs()[0])
    assert rewritten() == ["sagebwd"] * 4


def test_a_frozen_call_behind_a_trained_one_is_trained():
    """Of frozen weights, what the first call returns alone says that the second needs a gradient."""
    layers = [torch.nn.MultiheadAttention(128, 2).requires_grad_(False) for _ in range(2)]

    def model(x):
        for layer in layers:
            x = layer(x, x, x, need_weights=False)[0]
        return x

    compiled_by(ASKED, model)(inputs()[0])
    assert rewritten() == ["sagebwd"] * 2


@pytest.mark.parametrize(
    "given, reason",
    [({"recipe": "off"}, "the recipe is 'off'"),
     ({"return_lse": True}, "sagebwd trains calls that return no logsumexp")],
)  # fmt: skip
def test_what_is_not_trained_says_why(given, reason):
    q = torch.randn(1, 2, 300, 64, requires_grad=True)
    with config.patch(training="sagebwd", emulate=True):
        sage_inductor.attention(q, q, q, **given)
    assert refused() == reason


@pytest.mark.parametrize(
    "given, reason",
    [({"recipe": "off", "policy": [{"module": "other", "recipe": "auto"}]}, "the recipe is 'off'"),
     ({"policy": [{"recipe": "sage2-8b-per-token", "keep": 0.5}]}, "training: block lists have no backward here")],
)  # fmt: skip
def test_recipe_off_and_block_lists_are_not_trained(given, reason):
    options = ASKED | {f"sage.{name}": x for name, x in given.items()}
    compiled_by(options, pair()[0])(inputs()[0])
    assert refused() == reason


def test_a_causal_call_that_ends_at_the_last_key_is_trained_exactly():
    """SageBwd's kernels know the other corner alone."""
    q = torch.randn(1, 2, 30, 64, requires_grad=True)
    k = torch.randn(1, 2, 40, 64)

    def attend(q):
        seen = torch.ones(30, 40, dtype=torch.bool).tril(10)
        return F.scaled_dot_product_attention(q, k, k, attn_mask=seen)

    with op_by_op():
        found = torch.compile(attend, backend="sage", options=ASKED)(q)
    assert refused().startswith("sagebwd trains calls without a mask but the causal one, got ")
    assert torch.equal(found, attend(q))


@pytest.mark.parametrize("options", [ASKED, {"sage.force": True, "sage.emulate": True}])
def test_a_learned_sink_is_not_trained(options):
    sinks = torch.randn(2, 1, 1, requires_grad=True)

    def attend(q):
        s = torch.cat([q @ q.mT, sinks.expand(1, 2, 300, 1)], -1)
        return s.softmax(-1)[..., :-1] @ q

    q = torch.randn(1, 2, 300, 64)
    torch.compile(attend, backend="sage", options=options)(q).sum().backward()
    assert refused() == "training: a learned sink has no backward here"
    assert (found := sinks.grad) is not None
    sinks.grad = None
    attend(q).sum().backward()
    torch.testing.assert_close(found, sinks.grad)


def reason_of(scale=None, is_causal=False, dim=64, training="fp8-backward", n_kv=300):
    q = torch.randn(1, 2, 300, dim, requires_grad=True)
    k = torch.randn(1, 2, n_kv, dim)
    torch._dynamo.reset()
    with config.patch(training=training, emulate=True):
        sage_inductor.attention(q, k, k, scale=scale, is_causal=is_causal)
    return [site.reason for site in sage_inductor.report().refused]


def test_what_the_fp8_backward_does_not_train_says_why():
    assert reason_of() == reason_of(is_causal=True) == []
    trains = "the FP8 backward trains "
    (reason,) = reason_of(is_causal=True, n_kv=400)
    assert reason == f"{trains}causal calls of as many queries as keys, got 300 and 400"
    assert reason_of(scale=-0.1) == [f"{trains}calls whose scale is more than 0, got -0.1"]
    (reason,) = reason_of(dim=160)
    assert reason.startswith(f"{trains}head_dims up to 128, one of q, k and v, got 160")


def test_a_causal_call_of_one_length_by_two_symbols_is_trained():
    """Automatic dynamic shapes give q and k one each."""
    attend = functools.partial(F.scaled_dot_product_attention, is_causal=True)
    run = torch.compile(attend, backend="sage", options=ASKED_FP8)
    for N in (100, 140, 180):
        run(*(torch.randn(1, 2, N, 64, requires_grad=True) for _ in range(3))).sum().backward()
    assert [site.recipe for site in sage_inductor.report()] == ["fp8-backward"] * 2


def test_g_on_a_gpu_needs_hopper_and_16_bits(monkeypatch):
    class OfOneCall:
        attn_mask = lse = scale = None
        q = k = v = torch.empty(1, 2, 300, 64)
        out = torch.empty(1, 2, 300, 64, dtype=torch.bfloat16)

    monkeypatch.setattr(eligible, "value_of", lambda x: x)
    monkeypatch.setattr(eligible, "is_causal", lambda call: False)
    why_not = functools.partial(eligible.why_not_trained, OfOneCall, "fp8-backward")
    assert why_not((9, 0)) is None
    for other in (8, 9), (10, 0):
        reason = "the FP8 backward trains on compute capability 9.0, got {}.{}"
        assert str(why_not(other)) == reason.format(*other)
    monkeypatch.setattr(tiles, "hopper_unavailable", lambda capability: "no Gluon")
    assert str(why_not((9, 0))) == "the FP8 backward trains with the Hopper kernel: no Gluon"
    OfOneCall.out = OfOneCall.q
    assert str(why_not((9, 0))) == "the FP8 backward trains in 16 bits on a GPU, got float32"


@both
def test_autocast_and_a_grad_scaler(asked):
    model, _ = pair(is_causal=asked is ASKED)
    x, cotangent = inputs()
    compiled = compiled_by(asked, model)

    def found(factor):
        with torch.autocast("cpu", torch.bfloat16):
            out = compiled(x)
        return torch.autograd.grad(out, [x], factor * cotangent)[0]

    assert_close(found(2.0**12), found(1.0) * 2.0**12, rtol=0.02, atol=1.0)
    assert {site.dtype for site in sage_inductor.report().rewritten} == {"bfloat16"}
    assert rewritten() == [asked["sage.training"]]


@both
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_checkpointing(where, asked):
    model, by_op = pair(2, is_causal=asked is ASKED)
    x, cotangent = inputs()
    expected = gradients(by_op, x, cotangent, by_op.parameters())
    of = model if where == "inside" else compiled_by(asked, model)
    f = lambda x: checkpoint(of, x, use_reentrant=False)  # noqa: E731
    f = compiled_by(asked, f) if where == "inside" else f
    assert same(gradients(f, x, cotangent, model.parameters()), expected)


def calls_of(monkeypatch, asked):
    """How often the op runs."""
    its = sagebwd if asked is ASKED else rowscaled
    seen, forward = [], its.forward

    def count(*args):
        seen.append(args)
        return forward(*args)

    monkeypatch.setattr(its, "forward", count)
    return seen


def saves_the_op(ctx, op, *args, **kwargs):
    return checkpoints.CheckpointPolicy["MUST_SAVE" if op in OPS else "PREFER_RECOMPUTE"]


@both
def test_a_selective_policy_saves_what_the_op_returns(monkeypatch, asked):
    model, by_op = pair(is_causal=asked is ASKED)
    x, cotangent = inputs()
    context = functools.partial(checkpoints.create_selective_checkpoint_contexts, saves_the_op)

    def f(x):
        return checkpoint(model, x, use_reentrant=False, context_fn=context)

    seen = calls_of(monkeypatch, asked)
    found = gradients(compiled_by(asked, f), x, cotangent, model.parameters())
    assert len(seen) == 1
    assert same(found, gradients(by_op, x, cotangent, by_op.parameters()))


@both
@pytest.mark.parametrize("budget, times", [(1.0, 1), (0.1, 2)])
def test_the_activation_memory_budget(budget, times, monkeypatch, asked):
    model, by_op = pair(is_causal=asked is ASKED)
    x, cotangent = inputs()
    seen = calls_of(monkeypatch, asked)
    with torch._functorch.config.patch(activation_memory_budget=budget):
        found = gradients(compiled_by(asked, model), x, cotangent, model.parameters())
    assert len(seen) == times
    assert same(found, gradients(by_op, x, cotangent, by_op.parameters()))


@both
def test_what_is_saved_is_in_8_bits(asked):
    """Of q and k their codes alone, and by the FP8 backward of v; of SDPA all, in 16 bits."""
    model, _ = pair(is_causal=asked is ASKED)
    model, x = model.bfloat16(), torch.randn(2, 128, 128, dtype=torch.bfloat16, requires_grad=True)
    saved = {}
    for name, options in (("ours", asked), ("sdpa", {"sage.recipe": "off"})):
        torch._dynamo.reset()
        kept = saved[name] = []
        compiled = compiled_by(options, model)
        compiled(x)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, kept=kept: (kept.append(t.detach().clone()), t)[1], lambda t: t
        ):
            compiled(x)
    codes = [t for t in saved["ours"] if t.dtype == torch.int8 and t.numel()]
    assert [t.shape for t in codes] == [(2, 2, 128, 64)] * (2 if asked is ASKED else 3)
    heads = {"ours": 0, "sdpa": 0}
    for name, kept in saved.items():
        heads[name] = sum(t.numel() for t in kept if t.dtype == torch.bfloat16 and t.dim() == 4)
    assert heads["ours"] < heads["sdpa"]
    if asked is ASKED_FP8:  # out alone
        assert heads["ours"] == x.numel()


@both
def test_gradients_accumulate_and_repeat_bit_for_bit(asked):
    model, _ = pair(is_causal=asked is ASKED)
    compiled, (x, cotangent) = compiled_by(asked, model), inputs()
    once = gradients(compiled, x, cotangent, model.parameters())
    for _ in range(2):
        compiled(x).backward(cotangent)
    for parameter, gradient in zip((x, *model.parameters()), once, strict=True):
        assert_close(parameter.grad, 2 * gradient, rtol=0, atol=0)


@both
def test_fsdp2_with_compiled_blocks(gloo, asked):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, by_op = pair(2, is_causal=asked is ASKED)
    x, cotangent = inputs()
    expected = gradients(by_op, x, cotangent, by_op.parameters())
    mesh = init_device_mesh("cpu", (1,))
    for block in model:
        block.compile(backend="sage", options=asked)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(x).backward(cotangent)
    found = [x.grad, *(p.grad.full_tensor() for p in model.parameters())]
    assert same(found, expected) and set(rewritten()) == {asked["sage.training"]}


@both
def test_compiled_autograd(asked):
    model, by_op = pair(is_causal=asked is ASKED)
    x, cotangent = inputs()
    compiled = compiled_by(asked, model, fullgraph=False, dynamic=False)
    captures = counters["compiled_autograd"]["captures"]
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", dynamic=False)):
        compiled(x).backward(cotangent)
    assert counters["compiled_autograd"]["captures"] > captures
    found = [x.grad, *(p.grad for p in model.parameters())]
    assert same(found, gradients(by_op, x, cotangent, by_op.parameters()))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize(
    "training, is_causal", [("sagebwd", True), ("fp8-backward", False), ("fp8-backward", True)]
)
def test_a_model_trains_on_a_gpu(training, is_causal, mode):
    pairs = pair(2, is_causal=is_causal, op=OPS[training == "fp8-backward"])
    model, by_op = (each.to("cuda", torch.bfloat16) for each in pairs)
    given = {"sage.training": training} | ({"sage.mode": mode} if mode else {})
    compiled = compiled_by(given, model)
    for _ in range(4):
        x = torch.randn(2, 300, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        cotangent = torch.randn_like(x)
        model.zero_grad()
        compiled(x).backward(cotangent)
        found = [x.grad, *(p.grad for p in model.parameters())]
        expected = gradients(by_op, x, cotangent, by_op.parameters())
        assert same(found, expected, 0.02)
    assert rewritten() == [training] * 2


def test_a_cached_graph_of_other_sources_is_not_taken(monkeypatch):
    """Its op may have given other tensors to keep. So it is of a backward."""
    model, _ = pair()
    x, cotangent = inputs()
    before = dict(torch._inductor.config.aot_inductor.metadata)  # packages add to it

    def hits(**options) -> int:
        torch._dynamo.reset()
        counters.clear()
        run = torch.compile(model, backend="sage", options=ASKED | options)
        run(x).backward(cotangent)
        whole = counters["aot_autograd"]["autograd_cache_hit"]
        return whole + counters["inductor"]["fxgraph_cache_hit"]

    with fresh_cache(), torch._inductor.config.patch(fx_graph_cache=True):
        assert hits() == 0 and hits() > 0
        monkeypatch.setattr(backend, "package_hash", lambda: "others")
        assert hits() == 0 and hits() > 0
        monkeypatch.undo()
        assert hits() > 0
        assert hits(**{backend.METADATA: {"of": "the user"}}) == 0
        with torch._inductor.config.patch({backend.METADATA: {"of": "others"}}):
            assert hits() == 0
    assert torch._inductor.config.aot_inductor.metadata == before


@pytest.mark.gpu
def test_a_model_trains_by_itself_where_that_is_faster():
    torch.manual_seed(0)
    for is_causal, expected in ((False, ["fp8-backward"]), (True, [])):  # qkv has a bias
        torch._dynamo.reset()
        model = Attention(1024, 8, is_causal).to("cuda", torch.bfloat16)
        x = torch.randn(2, 16384, 1024, device="cuda", dtype=torch.bfloat16)
        run = torch.compile(model, backend="sage", options={"sage.training": "auto"})
        run(x).sum().backward()
        assert rewritten() == expected
    assert refused().startswith("training: causal, and k's channels have a bias")
