"""Under everything torch.compile does: shapes, modes, caches, threads, regions, process groups,
checkpoints, subclasses, custom passes, control flow and transforms, on CPU with the emulation.

Three kinds of comparison:

* `follows`: cosine > 0.999. The quantization's own error: 8-bit q, k and v cost 0.0005 on the
  outputs and 0.0006 on the gradients of this file's models, with one layer as with six (measured
  over seeds); attention that ignores its keys scores below 0.985
  (`test_the_models_of_this_file_depend_on_attention`).
* `assert_close(rtol=1e-4, atol=1e-4)`: what must be exact attention's, up to fp32's rounding in
  another order (measured: 1e-6): gradients to q, k and v, whatever the forward was.
* `torch.equal`: what must be the same computation.

Where torch itself has a limit, ``backend="inductor"`` is the control.
"""

import concurrent.futures
import contextlib
import functools
import math
import threading
from unittest import mock

import models
import pytest
import torch
import torch.nn.functional as F
from pairs import chosen, has_every_variant, pairs
from support import cos_sim, op_by_op, random_qkv, with_gaps
from torch._dynamo.utils import counters
from torch._higher_order_ops.map import map as hop_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.testing import assert_close
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import checkpoint

import sage_inductor
from sage_inductor.ops.reference import attention as reference

EMULATE = {"sage.emulate": True}
sdpa = F.scaled_dot_product_attention


# Without biases, so that next to no C++ is compiled.
Attention = functools.partial(models.Attention, bias=False)


class Stack(torch.nn.Sequential):
    def forward(self, x):  # (Dynamo does not begin a graph in torch.nn's own)
        for layer in self:
            x = layer(x)
        return x


def stack(layers=1):
    return Stack(*(Attention() for _ in range(layers)))


def compiled(model, backend="sage", options=EMULATE, fullgraph=True, **kwargs):
    options = options if backend == "sage" else None
    return torch.compile(model, backend=backend, options=options, fullgraph=fullgraph, **kwargs)


def follows(actual, expected) -> bool:
    return actual.shape == expected.shape and cos_sim(actual, expected) > 0.999


def gradients(model, *inputs, wrt=None):
    """Of `wrt` (without it: the inputs, a module's parameters) for one random cotangent."""
    if wrt is None:
        wrt = [x for x in inputs if x.requires_grad]
        wrt += list(model.parameters()) if isinstance(model, torch.nn.Module) else []
    out = model(*inputs)
    generator = torch.Generator().manual_seed(1)
    return torch.autograd.grad(out, wrt, torch.randn(out.shape, generator=generator).to(out))


def check_training(f, m, x):
    """`f` is `m` compiled, one Attention: the output and all gradients follow eager's; those that
    no later layer's input enters (of x and qkv) are exact attention's."""
    wrt = [x, *m.parameters()]
    actual, expected = gradients(f, x, wrt=wrt), gradients(m, x, wrt=wrt)
    assert follows(f(x), m(x))
    assert_close(actual[:2], expected[:2], rtol=1e-4, atol=1e-4)
    assert all(follows(a, e) for a, e in zip(actual, expected))


qkv = functools.partial(random_qkv, H=2, N=40, D=32)


def rewritten() -> int:
    report = sage_inductor.report()
    assert not report.refused, f"\n{report}"
    return len(report)


def graphs_of(function) -> int:
    """How many graphs Dynamo compiles while `function` runs."""
    before = counters["stats"]["unique_graphs"]
    function()
    return counters["stats"]["unique_graphs"] - before


def outcome(function):
    """What `function` returns, or the type of what it raises."""
    try:
        return function()
    except Exception as error:
        return type(error)


def like_inductor(function, *inputs, **kwargs):
    """The outcomes under both backends, from one seed."""
    both = []
    for backend in ("inductor", "sage"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        f = compiled(function, backend, **kwargs)
        both.append(outcome(lambda f=f: f(*inputs)))
    return both


@pytest.fixture
def executions(monkeypatch):
    """Counts the attention kernel's runs: on CPU it is the reference."""
    counted = mock.Mock(wraps=reference.attention)
    monkeypatch.setattr(reference, "attention", counted)
    return counted


@pytest.mark.parametrize("layers, below", [(1, 0.6), (2, 0.985), (3, 0.985), (6, 0.985)])
def test_the_models_of_this_file_depend_on_attention(layers, below):
    """The next layer's average hides most of what a layer does: `follows` must see the rest."""
    m, x = stack(layers), torch.randn(2, 40, 64)
    expected = m(x)

    def uniform(query, *args, **kwargs):
        return sdpa(torch.zeros_like(query), *args, **kwargs)

    with mock.patch.object(F, "scaled_dot_product_attention", uniform):
        assert cos_sim(m(x), expected) < below


# -- shapes ----


@pytest.mark.parametrize(
    "is_causal", [False, pytest.param(True, marks=pytest.mark.sweep)], ids=["full", "causal"]
)
@torch.no_grad()
def test_lengths_1_to_4096_share_two_graphs_and_guard_on_no_tile(is_causal):
    m = Attention(32, 1, is_causal)
    tiles = range(16, 129, 16) if has_every_variant() else (16, 64, 128)
    near_tiles = (n + i for n in tiles for i in (-1, 0, 1))
    lengths = [100, 37, 2, 3, *near_tiles, 130, 255, 1023] + [4096] * (not is_causal)

    def run(f):
        for N in lengths:
            x = torch.randn(1, N, 32)
            assert follows(f(x), m(x)), N

    assert graphs_of(lambda: run(compiled(m))) == 2  # the first length, and every other
    assert rewritten() == 2
    # N = 1 is the one length that Dynamo itself keeps apart.
    lengths = [100, 37, 1]
    for backend in ("sage", "eager"):
        torch._dynamo.reset()
        with op_by_op():
            assert graphs_of(lambda: run(compiled(m, backend))) == 3  # noqa: B023


@pytest.mark.parametrize("recipe", ["sage1", "sage2-8b", "sage2-4b"])
@torch.no_grad()
def test_a_length_promised_to_be_dynamic_stays_dynamic(recipe):
    m = stack()
    f = compiled(m, options={**EMULATE, "sage.recipe": recipe})
    x = torch.randn(2, 50, 64)
    torch._dynamo.mark_dynamic(x, 1, min=2, max=4096)  # raises if anything specialises it
    f(x)
    with torch.compiler.set_stance("fail_on_recompile"):
        for N in (2, 63, 64, 65, 127, 128, 129):
            x = torch.randn(2, N, 64)
            assert cos_sim(f(x), m(x)) > (0.97 if recipe == "sage2-4b" else 0.999), N
    assert rewritten() == 1


@pytest.mark.parametrize("by", ["op_by_op", pytest.param("generated", marks=pytest.mark.sweep)])
def test_dynamic_training_over_batch_and_length(by, request):
    if by == "generated":
        request.getfixturevalue(by)
    m = Attention()
    f = compiled(m, dynamic=True)

    def run():
        for B, N in ((2, 50), (3, 33), (5, 128), (4, 2)):
            x = torch.randn(B, N, 64, requires_grad=True)
            check_training(f, m, x)

    assert graphs_of(run) == 1
    assert rewritten() == 1


@pairs(B=[1, 2], N=[1, 40], among=lambda B, N: B == N == 1)
def test_one_row_and_one_batch_train(B, N):
    m, x = Attention(), torch.randn(B, N, 64, requires_grad=True)
    f = compiled(m, dynamic=True)
    check_training(f, m, x)
    assert rewritten() == 1


# -- modes ----


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_modes_with_new_inputs_and_gradients(mode):
    m = Attention()
    f = compiled(m, options={**EMULATE, "sage.mode": mode})
    for _ in range(3):
        x = torch.randn(2, 40, 64, requires_grad=True)
        check_training(f, m, x)
    assert rewritten() == 1


def test_inference_mode_and_training_of_one_model():
    m, x = stack(), torch.randn(2, 40, 64)
    f = compiled(m)
    with torch.inference_mode():
        inference = f(x)
        assert follows(inference, m(x))
    assert inference.is_inference() and rewritten() == 1
    training = f(x)
    assert torch.equal(training, inference) and training.requires_grad


# -- caches and resets ----


@torch.no_grad()
def test_reset_forgets_and_the_next_call_starts_again():
    f, x, outs = compiled(stack()), torch.randn(2, 40, 64), []
    for _ in range(3):
        outs.append(f(x))
        assert rewritten() == 1
        torch._dynamo.reset()
        assert len(sage_inductor.report()) == 0
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


# -- threads ----


def in_threads(functions):
    """Run all at once; their results, or the first error."""
    together = threading.Barrier(len(functions))

    def work(function):
        together.wait()
        return function()

    with concurrent.futures.ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(work, functions))


def without_grad(f, x):
    with torch.no_grad():  # grad mode is a thread's own
        return f(x)


def test_four_threads_call_one_compiled_model_with_their_own_inputs():
    m = stack()
    f = compiled(m, dynamic=True)
    xs = [torch.randn(2, N, 64) for N in (40, 70, 100, 130)]
    expected = [without_grad(f, x) for x in xs]
    for _ in range(5):
        actual = in_threads([functools.partial(without_grad, f, x) for x in xs])
        assert all(map(torch.equal, actual, expected))
    assert rewritten() == 1


def test_four_threads_compile_four_recipes_of_one_model():
    m, x = stack(), torch.randn(2, 40, 64)
    recipes = ["sage1", "sage2-8b", "off", "auto"]
    fs = [compiled(m, options={**EMULATE, "sage.recipe": r}) for r in recipes]
    sage1, sage2, off, auto = in_threads([functools.partial(without_grad, f, x) for f in fs])
    assert follows(sage1, off) and follows(sage2, off)
    assert not torch.equal(sage1, sage2) and not torch.equal(sage2, off)
    assert torch.equal(sage2, auto)
    assert_close(off, without_grad(m, x))
    sites = sorted(str(site.recipe) for site in sage_inductor.report())
    assert sites == sorted(["sage1", "sage2-8b", "None", "sage2-8b"])


# -- regions ----


def test_repeated_blocks_compile_once(executions):
    m, x = stack(6), torch.randn(2, 40, 64, requires_grad=True)
    expected, expected_grads = m(x), gradients(m, x)
    for block in m:
        block.compile(backend="sage", options=EMULATE, fullgraph=True)
    assert graphs_of(lambda: m(x)) == 1
    assert rewritten() == 1 and executions.call_count == 6
    assert follows(m(x), expected)
    assert all(follows(a, e) for a, e in zip(gradients(m, x), expected_grads))


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_a_nested_compile_region_is_rewritten_in_its_own_graph(train, executions):
    block = Attention()

    @torch.compiler.nested_compile_region
    def region(x):
        return block(x)

    def model(x):
        return region(region(x))

    x = torch.randn(2, 40, 64, requires_grad=train)
    with torch.set_grad_enabled(train):
        expected = block(block(x))
        actual = compiled(model)(x)
    assert rewritten() >= 1 and executions.call_count == 2
    assert follows(actual, expected)
    if train:
        wrt = [x, *block.parameters()]
        pairs = zip(gradients(compiled(model), x, wrt=wrt), gradients(model, x, wrt=wrt))
        assert all(follows(a, e) for a, e in pairs)


def test_graph_breaks_leave_every_piece_rewritten():
    a, b = Attention(), Attention()

    def broken(x):
        x = a(x)
        torch._dynamo.graph_break()
        return b(x)

    x = torch.randn(2, 40, 64)
    f = compiled(broken, fullgraph=False)
    assert follows(f(x), b(a(x))) and rewritten() == 2


def test_a_disabled_module_and_a_forced_eager_run_are_exact(executions):
    a, b = Attention(), Attention()
    x = torch.randn(2, 40, 64)
    disabled = torch.compiler.disable(b)
    f = compiled(lambda x: disabled(a(x)), fullgraph=False)
    out = f(x)
    assert follows(out, b(a(x))) and executions.call_count == 1
    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(f(x), b(a(x)))
    assert executions.call_count == 1 and rewritten() == 1


def test_eager_attention_is_never_touched(executions):
    x = qkv()
    before = sdpa(*x)
    compiled(sdpa)(*x)
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention
    assert torch.equal(F.scaled_dot_product_attention(*x), before)
    assert executions.call_count == 1


# -- process groups ----


def accumulated(f, x, wrt) -> list:
    """Gradients as the hooks of a wrapper leave them; the cotangent is that of `gradients`."""
    for each in wrt:
        each.grad = None
    out = f(x)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)))
    return [each.grad.clone() for each in wrt]


def test_a_layer_of_torch_is_rewritten_in_ddp_if_it_was_compiled_before(gloo):
    """Dynamo skips torch.nn's own frames behind the graph break in DDP's forward: docs/faq.md."""
    m, x = torch.nn.TransformerEncoderLayer(64, 2, batch_first=True).eval(), torch.randn(2, 40, 64)
    given = {"backend": "sage", "options": {"sage.emulate": True}}
    with op_by_op(), torch.no_grad():
        DDP(torch.compile(m, **given))(x)
        assert rewritten() == 1
        torch._dynamo.reset()
        torch.compile(DDP(m), **given)(x)
    assert not sage_inductor.report()


def test_ddp_splits_the_graph_and_keeps_the_gradients(gloo):
    m, x = stack(2), torch.randn(2, 40, 64, requires_grad=True)
    wrt = [x, *m.parameters()]

    # 16 KiB buckets: a block has 64 KiB of parameters.
    with mock.patch.object(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 2**14):
        eager = accumulated(DDP(m, bucket_cap_mb=2**-6), x, wrt)
        parts = counters["aot_autograd"]["total"]
        f = compiled(DDP(m, bucket_cap_mb=2**-6), fullgraph=False)
        actual = accumulated(f, x, wrt)
    assert counters["aot_autograd"]["total"] - parts >= 2, "DDPOptimizer did not split the graph"
    assert rewritten() == 2
    assert all(follows(a, e) for a, e in zip(actual, eager))
    torch._dynamo.reset()
    assert_close(actual, list(gradients(compiled(m), x, wrt=wrt)), rtol=1e-4, atol=1e-4)


def test_fsdp2_with_compiled_blocks(gloo):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    m, x = stack(2), torch.randn(2, 40, 64, requires_grad=True)
    expected = gradients(m, x)
    mesh = init_device_mesh("cpu", (1,))
    for block in m:
        block.compile(backend="sage", options=EMULATE)
        fully_shard(block, mesh=mesh)
    fully_shard(m, mesh=mesh)
    for _ in range(2):
        of_x, *others = accumulated(m, x, [x, *m.parameters()])
        actual = [of_x, *(grad.full_tensor() for grad in others)]
        assert all(follows(a, e) for a, e in zip(actual, expected))
    assert rewritten() >= 1


# -- training ----


def test_compiled_autograd():
    m, x = Attention(), torch.randn(2, 40, 64, requires_grad=True)
    cotangent = torch.randn(2, 40, 64)
    expected = torch.autograd.grad(m(x), [x, *m.parameters()], cotangent)
    # Static: of a graph that Dynamo has learned elsewhere to make dynamic and that AOTAutograd's
    # cache has, torch 2.11 cannot read the backward here ("aten::full() Expected ... List[int]").
    compiler = functools.partial(compiled, fullgraph=False, dynamic=False)
    f = compiled(m, dynamic=False)

    captures = counters["compiled_autograd"]["captures"]
    with torch._dynamo.compiled_autograd._enable(compiler):
        f(x).backward(cotangent)
    assert counters["compiled_autograd"]["captures"] == captures + 1
    assert len(sage_inductor.report().rewritten) == 1
    actual = [x.grad, *(p.grad for p in m.parameters())]
    assert_close(actual[:2], list(expected[:2]), rtol=1e-4, atol=1e-4)
    assert all(follows(a, e) for a, e in zip(actual, expected))


@pytest.mark.parametrize("how", ["checkpoint", pytest.param("budget", marks=pytest.mark.sweep)])
def test_what_recomputes_a_layer_changes_no_gradient(how, executions):
    m, x = stack(2), torch.randn(2, 40, 64, requires_grad=True)
    wrt = [x, *m.parameters()]

    def checkpointed(x):
        for layer in m:
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    plain = gradients(compiled(m), x, wrt=wrt)
    assert executions.call_count == 2
    torch._dynamo.reset()
    budget = torch._functorch.config.patch(activation_memory_budget=0.5)
    with budget if how == "budget" else contextlib.nullcontext():
        f = compiled(m if how == "budget" else checkpointed)
        actual = gradients(f, x, wrt=wrt)
    assert rewritten() == 2
    if how == "checkpoint":
        assert executions.call_count == 2 + 4  # every forward twice
    assert_close(actual, plain, rtol=1e-4, atol=1e-4)
    assert all(follows(a, e) for a, e in zip(actual, gradients(m, x)))


BACKENDS = "flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention"
ATEN_SDPA = [getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default for name in BACKENDS]


@pytest.mark.parametrize(
    "saved, runs", [(ATEN_SDPA, 2), ([torch.ops.sage.sdpa.default], 1)],
    ids=["a policy that names SDPA's ops", "a policy that names sage::sdpa"],
)  # fmt: skip
def test_selective_checkpointing_saves_the_op_that_the_policy_names(saved, runs, executions):
    """The attention op of a rewritten graph is ``torch.ops.sage.sdpa.default``: a policy that
    names only SDPA's own ops does not see it, and recomputes it. Gradients are right either way."""

    def policy(ctx, op, *args, **kwargs):
        return checkpoints.CheckpointPolicy[f"MUST_{'SAVE' if op in saved else 'RECOMPUTE'}"]

    m, x = Attention(), torch.randn(2, 40, 64, requires_grad=True)

    def checkpointed(x):
        context = functools.partial(checkpoints.create_selective_checkpoint_contexts, policy)
        return checkpoint(m, x, use_reentrant=False, context_fn=context)

    wrt = [x, *m.parameters()]
    actual, expected = gradients(compiled(checkpointed), x, wrt=wrt), gradients(m, x)
    assert rewritten() == 1 and executions.call_count == runs
    assert_close(actual[:2], expected[:2], rtol=1e-4, atol=1e-4)  # x and qkv; out sees the forward
    assert all(follows(a, e) for a, e in zip(actual, expected))


@pytest.mark.parametrize("needs", ["q", "k", "v", "qk", "qv", "kv"])
def test_gradients_for_some_of_the_inputs(needs):
    inputs = qkv()
    for name, x in zip("qkv", inputs):
        x.requires_grad_(name in needs)
    actual = gradients(compiled(sdpa), *inputs)
    assert len(actual) == len(needs) and rewritten() == 1
    assert_close(actual, gradients(sdpa, *inputs), rtol=1e-4, atol=1e-4)


def test_double_backward_is_what_inductor_makes_of_it():
    def penalty(backend):
        torch._dynamo.reset()
        inputs = qkv(requires_grad=True)
        out = compiled(sdpa, backend)(*inputs)
        (grad,) = torch.autograd.grad(out.sum(), inputs[0], create_graph=True)
        return torch.autograd.grad(grad.square().sum(), inputs[1])

    assert outcome(lambda: penalty("sage")) is outcome(lambda: penalty("inductor")) is RuntimeError


# -- subclasses, passes, transforms, control flow ----


def test_tensor_subclasses_stay_sdpa_with_a_reason():
    from torch.testing._internal.two_tensor import TwoTensor

    inputs = [TwoTensor(x, x + 1) for x in qkv()]
    out, expected = compiled(sdpa)(*inputs), sdpa(*inputs)
    (site,) = sage_inductor.report()
    assert site.reason == "tensor subclasses are not supported, got TwoTensor"
    assert type(out) is TwoTensor
    assert_close(out.a, expected.a)
    assert_close(out.b, expected.b)


class Seen(CustomGraphPass):
    """A user's pass: notes the graphs it is given."""

    def __init__(self):
        self.targets = []

    def __call__(self, graph):
        self.targets += [str(node.target) for node in graph.nodes]

    def uuid(self):
        return None  # not cached: it must run


HOOKS = "joint_custom_pre_pass", "joint_custom_post_pass", "post_grad_custom_pre_pass"


@pytest.mark.parametrize("how", ["config", "options"])
@pytest.mark.parametrize("hook", ["pre_grad_custom_pass", *HOOKS, "post_grad_custom_post_pass"])
def test_the_users_own_passes_run_on_the_rewritten_graph(hook, how):
    mine, options = Seen(), EMULATE
    with contextlib.ExitStack() as patched:
        if how == "config":
            patched.enter_context(torch._inductor.config.patch({hook: mine}))
        else:
            options = {**EMULATE, hook: mine}
        before = getattr(torch._inductor.config, hook)
        inputs = qkv(requires_grad=True)
        compiled(sdpa, options=options)(*inputs)
        assert getattr(torch._inductor.config, hook) is before
    assert any("sage.sdpa" in target for target in mine.targets), mine.targets
    assert rewritten() == 1


@pytest.mark.parametrize("transform", ["vmap", "grad", "vjp", "jvp"])
@pytest.mark.parametrize("where", ["inside", "around"])
def test_torch_func_does_what_it_does_under_inductor(transform, where):
    inputs = [x[None].expand(3, *x.shape).contiguous() for x in qkv()]

    def transformed(f):
        def loss(*x):
            return f(*x).square().sum()

        if transform == "vmap":
            return torch.func.vmap(f)(*inputs)
        if transform == "grad":
            return torch.func.grad(loss)(*(x[0] for x in inputs))
        if transform == "vjp":
            out, vjp = torch.func.vjp(f, *(x[0] for x in inputs))
            return vjp(torch.ones_like(out))[0]
        primals = tuple(x[0] for x in inputs)
        return torch.func.jvp(f, primals, tuple(map(torch.ones_like, primals)))[1]

    def run(backend):
        torch._dynamo.reset()
        if where == "inside":
            return compiled(lambda: transformed(sdpa), backend)()
        return transformed(compiled(sdpa, backend, fullgraph=False))

    expected, actual = outcome(lambda: run("inductor")), outcome(lambda: run("sage"))
    refused = sage_inductor.report().refused
    assert all(site.reason == "inside a torch.func transform" for site in refused)
    if isinstance(expected, type):
        assert actual is expected
    else:
        assert torch.equal(actual, expected) if refused else follows(actual, expected)


def conditional(q, k, v):
    def causal(q, k, v):
        return sdpa(q, k, v, is_causal=True)

    return torch.cond(q.sum() > 0, lambda q, k, v: sdpa(q, k, v), causal, (q, k, v))


def scanned(q, k, v):
    def body(carry, kv):
        carry = sdpa(carry, *kv)
        return carry, carry.clone()

    return scan(body, q, tuple(torch.stack([x, x.flip(2), 2 * x]) for x in (k, v)))[1]


def scanned_in_eager(q, k, v):
    found = []
    for kv in zip((k, k.flip(2), 2 * k), (v, v.flip(2), 2 * v)):
        found.append(q := sdpa(q, *kv))
    return torch.stack(found)


def repeated(q, k, v):
    def body(i, q, k, v):
        return i + 1, sdpa(q, k, v), k.clone(), v.clone()

    return while_loop(lambda i, *_: i < 3, body, (torch.tensor(0), q, k, v))[1]


def mapped(q, k, v):
    q = torch.stack([q, q.flip(1), 2 * q])
    return hop_map(lambda x, k, v: sdpa(x, k, v), q, k, v)


CONTROL_FLOW = {  # and what it is in eager mode, how often attention runs, how many calls there are
    conditional: (lambda q, k, v: sdpa(q, k, v, is_causal=bool(q.sum() <= 0)), 1, {2}),
    scanned: (scanned_in_eager, 3, {1, 2}),
    repeated: (lambda q, k, v: sdpa(sdpa(sdpa(q, k, v), k, v), k, v), 3, {1}),
    mapped: (lambda q, k, v: torch.stack([sdpa(x, k, v) for x in (q, q.flip(1), 2 * q)]), 3, {1, 2}),
}  # fmt: skip


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("function", CONTROL_FLOW, ids=lambda f: f.__name__)
@torch.no_grad()
def test_what_control_flow_calls_is_rewritten(function, sign, executions):
    in_eager, runs, numbers = CONTROL_FLOW[function]
    q, k, v = qkv()
    q = q.abs() * sign
    assert follows(compiled(function)(q, k, v), in_eager(q, k, v))
    assert rewritten() in numbers and executions.call_count == runs


# -- recipe "off" ----

OFF = {
    "no mask": {}, "bool mask": {"attn_mask": torch.ones(40, 40, dtype=torch.bool).tril(3)},
    "float mask": {"attn_mask": torch.linspace(-1, 1, 1600).view(40, 40)}, "scale": {"scale": 0.3},
    "causal": {"is_causal": True}, "GQA": {"enable_gqa": True}, "dropout": {"dropout_p": 0.3},
}  # fmt: skip


@pairs(case=list(OFF), among=lambda case: case in ("bool mask", "GQA", "dropout"))
def test_recipe_off_is_inductor_bit_for_bit(case):
    arguments = dict(OFF[case])
    inputs = [*qkv(H=4, H_kv=2 if case == "GQA" else 4, requires_grad=True)]
    if case == "float mask":  # its gradient too
        inputs.append(arguments.pop("attn_mask").clone().requires_grad_())

    def attend(q, k, v, attn_mask=None):
        return F.scaled_dot_product_attention(q, k, v, **{"attn_mask": attn_mask, **arguments})

    results = []
    for backend in ("inductor", "sage"):
        torch._dynamo.reset()
        f = compiled(attend, backend, options={**EMULATE, "sage.recipe": "off"})
        torch.manual_seed(0)
        out = f(*inputs)
        torch.manual_seed(0)
        results.append([out, *gradients(f, *inputs)])
    assert len(results[0]) == 1 + len(inputs) and all(map(torch.equal, *results))
    assert [site.reason for site in sage_inductor.report()] == ["the recipe is 'off'"]


# -- what users of other integrations suffered from ----


@pytest.mark.parametrize("argument", ["scale", "dropout_p"])
@torch.no_grad()
def test_a_number_that_the_caller_passes_and_changes(argument):
    """Dynamo makes a float that changes symbolic, meets SDPA, and starts again with a constant: the
    graph it abandoned is in no report, and no reason to refuse under ``sage.strict``."""
    inputs = qkv()

    def attend(q, k, v, number):
        return F.scaled_dot_product_attention(q, k, v, **{argument: number})

    strict = argument == "scale"
    f = compiled(attend, options={**EMULATE, "sage.strict": strict})
    # AOTAutograd is what sends Dynamo back. The sage op needs no C++ of Inductor's, dropout much.
    with contextlib.nullcontext() if strict else op_by_op(split=True):
        for number in (0.1, 0.2, 0.5):
            torch.manual_seed(0)
            out = f(*inputs, number)
            if strict:
                assert follows(out, sdpa(*inputs, scale=number))
    assert [site.rewritten for site in sage_inductor.report()] == [strict] * 3


@pytest.mark.parametrize(
    "scale", [lambda q: q.shape[-1] ** -0.5, lambda q: 1 / math.sqrt(q.size(-1))],
    ids=["power", "math.sqrt"],
)  # fmt: skip
@torch.no_grad()
def test_a_scale_computed_from_a_dynamic_head_dim(scale):
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, scale=scale(q))

    f = compiled(attend, dynamic=True)

    def run():
        for N in (40, 50, 130):
            inputs = qkv(N=N)
            assert follows(f(*inputs), sdpa(*inputs))

    assert graphs_of(run) == 1 and rewritten() == 1


@torch.no_grad()
def test_keys_and_values_of_two_lengths_do_what_they_do_under_inductor():
    q, k, v = qkv()
    expected, actual = like_inductor(sdpa, q, k[:, :, :20], v)  # CPU computes it, CUDA raises
    assert torch.equal(actual, expected)


def test_dropout_is_drawn_as_under_inductor():
    inputs = qkv(requires_grad=True)

    dropped = functools.partial(F.scaled_dot_product_attention, dropout_p=0.5)
    expected, actual = like_inductor(dropped, *inputs)
    assert torch.equal(actual, expected) and not follows(actual, sdpa(*inputs))


@chosen(
    lambda is_causal, recipe, train: (is_causal, train) == (recipe == "sage1",) * 2,
    is_causal=[False, True], recipe=["sage1", "sage2-8b"], train=[False, True],
)  # fmt: skip
def test_inputs_are_never_written_to(is_causal, recipe, train, generated):
    inputs = qkv(N=70, requires_grad=train)
    before = [x.detach().clone() for x in inputs]
    attend = functools.partial(F.scaled_dot_product_attention, is_causal=is_causal)
    f = compiled(attend, options={**EMULATE, "sage.recipe": recipe})
    first = f(*inputs)
    assert torch.equal(f(*inputs), first)  # nor is anything kept between calls
    if train:
        gradients(f, *inputs)
    assert rewritten() == 1 and all(map(torch.equal, inputs, before))


@torch.no_grad()
def test_attention_reads_its_inputs_before_the_model_changes_them():
    def overwritten(q, k, v):
        o = F.scaled_dot_product_attention(q, k, v)
        for x in (q, k, v):
            x.zero_()
        return o

    inputs = qkv()
    expected = sdpa(*inputs)
    assert follows(compiled(overwritten)(*inputs), expected) and rewritten() == 1
    assert not any(x.any() for x in inputs)


LAYOUTS = {
    "[B, N, H, D]": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "[B, H, D, N]": lambda x: x.mT.contiguous().mT,
    "every other row": lambda x: x.repeat_interleave(2, 2)[:, :, ::2],
    "one head expanded": lambda x: x[:, :1].expand_as(x),
    "inside a larger tensor": lambda x: F.pad(x, (1, 3, 5, 7))[:, :, 5:-7, 1:-3],
}


@pairs(layout=list(LAYOUTS), among=lambda layout: layout == "one head expanded")
def test_any_strides_inference_and_training(layout, generated):
    inputs = [LAYOUTS[layout](x) for x in qkv()]
    leaves = [x.detach().requires_grad_() for x in inputs]
    f = compiled(sdpa)
    assert follows(f(*leaves), sdpa(*leaves)) and rewritten() == 1
    assert f(*leaves).stride() == sdpa(*leaves).stride()
    assert_close(gradients(f, *leaves), gradients(sdpa, *leaves), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("view", [pytest.param("itself", marks=pytest.mark.sweep), "heads joined"])
def test_gaps_between_the_rows_of_sdpas_output_stay(view, generated):
    """Of those that SDPA has on CUDA, here the fake tensors alone know."""

    def backend(gm, inputs):
        (node,) = gm.graph.find_nodes(op="call_function", target=sdpa)
        node.meta["example_value"] = with_gaps(node.meta["example_value"])
        return sage_inductor.sage_backend(gm, inputs, options=EMULATE)

    def model(q, k, v):
        out = sdpa(q, k, v)
        return out if view == "itself" else out.transpose(1, 2).flatten(2)

    inputs = qkv(D=37, requires_grad=True)
    f, expected = compiled(model, backend), model(*inputs)
    assert follows(f(*inputs), expected) and rewritten() == 1
    strides = (3200, 1600, 40, 1) if view == "itself" else (2960, 74, 1)
    assert f(*inputs).stride() == strides
    assert_close(gradients(f, *inputs), gradients(model, *inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ["head_dim", "batch", "dtype", "own"])
def test_errors_of_the_model_are_those_of_inductor(case):
    q, k, v = qkv()
    wrong = {
        "head_dim": (q, k[..., :16], v), "batch": (q, k[:, :, :20], v[:1].repeat(3, 1, 1, 1)),
        "dtype": (q, k.double(), v), "own": (q, k, v),
    }[case]  # fmt: skip

    def model(q, k, v):
        if case == "own":
            raise KeyError("the user's")
        return F.scaled_dot_product_attention(q, k, v)

    expected, actual = like_inductor(model, *wrong, fullgraph=False)
    assert isinstance(expected, type) and actual is expected
    # The next model is not affected.
    torch._dynamo.reset()
    assert follows(compiled(sdpa)(q, k, v), sdpa(q, k, v))


def test_what_several_ops_read_is_stored_once(generated):
    """Otherwise Inductor writes a copy of k + 1 for each of them, in one kernel."""

    def layers(q, k, v):
        k = k + 1
        return [torch.ops.sage.rowscaled(q, k, v, False, scale, False)[0] for scale in (0.1, 0.2)]

    given = [torch.randn(1, 2, 64, 64) for _ in range(3)]
    torch._inductor.metrics.reset()
    with torch._inductor.config.patch(fx_graph_cache=False):
        found = torch.compile(layers, backend="inductor")(*given)
    assert all(map(torch.equal, found, layers(*given)))
    assert torch._inductor.metrics.ir_nodes_pre_fusion == 5
