"""Exported programs and AOTInductor packages, run by processes that have never heard of us.

Shapes: B batch, N tokens (T of them text), C channels, H heads, D head_dim.
"""

import dataclasses
import functools
import inspect
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

import sage_inductor

EMULATE = {"sage.emulate": True}
FORCE = {"sage.force": True, "sage.recipe": "sage2-8b"}  # the recipe of packages
RUNNER = Path(__file__).with_name("aoti_runner.cpp")
LENGTHS = (64, 1, 5, 1000, 2048)


# -- the models: one layer of what matters to attention ----


def heads(x, D):
    return x.unflatten(-1, (-1, D)).transpose(1, 2)  # [B, N, H D] -> [B, H, N, D]


def rotate(x, positions):
    """x [B, H, N, D] rotated in its D/2 planes by angles that grow with positions [N]."""
    frequencies = 1e4 ** -torch.linspace(0, 1, x.shape[-1] // 2, device=x.device)
    angles = positions[:, None] * frequencies  # [N, D/2]
    a, b = x.float().chunk(2, -1)
    return torch.cat(
        (a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1
    ).to(x.dtype)


class Llama(nn.Module):
    """Tokens [B, N] -> logits [B, N, 100]. RMSNorm, rotary positions, two q heads to one of k and
    v, causal."""

    def __init__(self, C, D):
        super().__init__()
        self.D = D
        self.embed, self.head = nn.Embedding(100, C), nn.Linear(C, 100)
        self.norms = nn.ModuleList(nn.RMSNorm(C) for _ in range(3))
        self.q, self.kv, self.out = (nn.Linear(C, C, bias=False) for _ in range(3))
        self.gate, self.up, self.down = (
            nn.Linear(C, 2 * C),
            nn.Linear(C, 2 * C),
            nn.Linear(2 * C, C),
        )

    def forward(self, ids):
        x = self.embed(ids)
        h = self.norms[0](x)
        q, (k, v) = heads(self.q(h), self.D), (heads(y, self.D) for y in self.kv(h).chunk(2, -1))
        positions = torch.arange(ids.shape[1], device=ids.device)
        q, k = rotate(q, positions), rotate(k, positions)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(o.transpose(1, 2).flatten(2))
        h = self.norms[1](x)
        x = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return self.head(self.norms[2](x))


class ViT(nn.Module):
    """Patches [B, N, 48] -> a class [B, 10] and their features [B, N, C]. A class token beside
    them, attention written out by hand."""

    def __init__(self, C, D):
        super().__init__()
        self.D = D
        self.patches, self.first = nn.Linear(48, C), nn.Parameter(torch.randn(1, 1, C))
        self.norms = nn.ModuleList(nn.LayerNorm(C) for _ in range(3))
        self.qkv, self.out = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.mlp = nn.Sequential(nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C))
        self.head = nn.Linear(C, 10)

    def forward(self, patches):
        x = torch.cat((self.first.expand(patches.shape[0], -1, -1), self.patches(patches)), 1)
        q, k, v = (heads(y, self.D) for y in self.qkv(self.norms[0](x)).chunk(3, -1))
        o = (q @ k.mT * self.D**-0.5).softmax(-1) @ v
        x = x + self.out(o.transpose(1, 2).flatten(2))
        x = self.norms[2](x + self.mlp(self.norms[1](x)))
        return self.head(x[:, 0]), x[:, 1:]


class Flux(nn.Module):
    """Image [B, N, 16], text [B, T, 32] and times [B], by keyword -> the image's noise and the
    text. Joint attention over both, with RMSNorm on q and k, rotary positions, and modulation."""

    def __init__(self, C, D):
        super().__init__()
        self.D = D
        self.image, self.text, self.noise = nn.Linear(16, C), nn.Linear(32, C), nn.Linear(C, 16)
        self.modulation = nn.Sequential(nn.Linear(1, C), nn.SiLU(), nn.Linear(C, 3 * C))
        self.qkv, self.out = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.norm_q, self.norm_k = nn.RMSNorm(D), nn.RMSNorm(D)

    def forward(self, image, *, text, time):
        T, N = text.shape[1], image.shape[1]
        x = torch.cat((self.text(text), self.image(image)), 1)
        shift, scale, gate = self.modulation(time[:, None])[:, None].chunk(3, -1)
        normed = F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
        q, k, v = (heads(y, self.D) for y in self.qkv(normed).chunk(3, -1))
        positions = torch.cat((torch.zeros(T, device=x.device), torch.arange(N, device=x.device)))
        q, k = rotate(self.norm_q(q), positions), rotate(self.norm_k(k), positions)
        o = F.scaled_dot_product_attention(query=q, key=k, value=v)
        x = x + (1 + gate) * self.out(o.transpose(1, 2).flatten(2))
        return {"noise": self.noise(x[:, T:]), "text": x[:, :T]}


class Masked(nn.Module):
    """Features [B, N, C] -> the same. Grouped-query attention under a mask of the input's making,
    twice with the same k and v, and once by hand."""

    def __init__(self, C, D):
        super().__init__()
        self.D = D
        self.q, self.kv, self.out = (nn.Linear(C, C) for _ in range(3))

    def forward(self, x):
        q, (k, v) = heads(self.q(x), self.D), (heads(y, self.D) for y in self.kv(x).chunk(2, -1))
        i = torch.arange(x.shape[1], device=x.device)
        mask = (i <= i[:, None]) & (x[:, None, None, :, 0] > -1).logical_or(i == 0)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        o = o + F.scaled_dot_product_attention(-q, k, v, attn_mask=mask, enable_gqa=True)
        mask = mask | (x @ x.mT > 1e9)[:, None]  # the same, but nothing proves it
        s = (o @ q.mT / 6).masked_fill(~mask, -torch.inf)
        o = s.softmax(-1) @ q
        return self.out(o.transpose(1, 2).flatten(2))


def call(model, N, device="cpu", dtype=torch.float32):
    """(args, kwargs) of `model` with N tokens."""

    def randn(*shape):
        return torch.randn(shape).to(device, dtype)

    if isinstance(model, Llama):
        return (torch.randint(0, 100, (1, N)).to(device),), {}
    if isinstance(model, ViT):
        return (randn(1, N, 48),), {}
    if isinstance(model, Flux):
        return (randn(1, N, 16),), {"text": randn(1, 12, 32), "time": randn(1).abs()}
    return (randn(1, N, 128),), {}


def export(model, args, kwargs, strict=False):
    """`model` for 1 to 2048 tokens: the second dimension of the first argument."""
    first, *others = inspect.signature(model.forward).parameters
    N = torch.export.Dim("N", min=1, max=2048)
    shapes = {first: {1: N}, **dict.fromkeys(others)}
    return torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=strict)


def targets(program):
    return [node.target for node in program.graph.nodes]


def tensors(result):
    return [x.cpu() for x in tree_leaves(result)]


def flat(calls):
    """What the C++ loader takes: every call's tensors, in the order of the exported call."""
    return [tensors(each) for each in calls]


def check(actual, expected, tolerance=1e-2):
    """An INT8 code that rounds the other way moves what follows: 1 % of the norm."""
    assert len(actual) == len(expected)
    for xs, ys in zip(actual, expected, strict=True):
        assert len(xs) == len(ys)
        for x, y in zip(xs, ys, strict=True):
            assert x.shape == y.shape and x.dtype == y.dtype and x.isfinite().all()
            assert (x - y).double().norm() < tolerance * y.double().norm()


# -- packages, each built once ----


@dataclasses.dataclass
class Package:
    path: str
    model: nn.Module
    program: torch.export.ExportedProgram  # as exported: with the model's own attention
    report: sage_inductor.Report
    options: dict
    calls: list  # one of each of LENGTHS

    @functools.cached_property
    @torch.no_grad()
    def expected(self):
        """What the compiled model gives for the calls."""
        run = torch.compile(self.model, backend="sage", options=self.options, dynamic=True)
        return [tensors(run(*args, **kwargs)) for args, kwargs in self.calls]


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """(model class, device, C, D) -> its Package."""
    folder, built = tmp_path_factory.mktemp("packages"), {}

    @torch.no_grad()
    def package(make, device, C=128, D=32) -> Package:
        key = f"{make.__name__}-{device}-{C}-{D}"
        if key not in built:
            dtype = torch.float32 if device == "cpu" else torch.bfloat16
            options = EMULATE if device == "cpu" else FORCE
            model = make(C, D).to(device, dtype).eval()
            program = export(model, *call(model, 64, device, dtype))
            path = sage_inductor.aoti_compile_and_package(
                program, package_path=str(folder / f"{key}.pt2"), options=options
            )
            calls = [call(model, N, device, dtype) for N in LENGTHS]
            report = sage_inductor.report()
            built[key] = Package(path, model, program, report, options, calls)
        return built[key]

    return package


def devices(*models):
    """The models on CPU and, on a GPU, there."""
    cpu = [pytest.param(make, "cpu", id=f"{make.__name__}-cpu") for make in models]
    cuda = [
        pytest.param(make, "cuda", id=f"{make.__name__}-cuda", marks=pytest.mark.gpu)
        for make in models
    ]
    return pytest.mark.parametrize("make, device", cpu + cuda)


# -- processes that load them ----

LOAD = """
import sys, torch
class Blocked:
    def find_spec(self, name, *rest):
        if name.split(".")[0] == "sage_inductor":
            raise ImportError("sage_inductor is not installed here")
sys.meta_path.insert(0, Blocked())
from torch._inductor.package import load_package
package, model, inputs, outputs = sys.argv[1:]
run = load_package(package, model)
results = [run(*args, **kwargs) for args, kwargs in torch.load(inputs)]
torch.save([torch.utils._pytree.tree_leaves(each) for each in results], outputs)
assert "sage_inductor" not in sys.modules
"""


def run_in_python(package, calls, folder, model="model"):
    torch.save(calls, folder / "calls.pt")
    subprocess.run(
        [sys.executable, "-c", LOAD, package, model, folder / "calls.pt", folder / "outputs.pt"],
        check=True, cwd=folder, timeout=300,
    )  # fmt: skip
    return torch.load(folder / "outputs.pt")


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    """mode, package, model, device, calls -> (the outputs, what it printed). No Python inside."""
    folder, root = tmp_path_factory.mktemp("runner"), Path(torch.__file__).parent
    cuda = ["-ltorch_cuda", "-lc10_cuda"] * torch.cuda.is_available()
    subprocess.run(
        ["g++", "-std=c++20", "-O0", RUNNER, "-o", folder / "runner", f"-I{root}/include",
         f"-I{root}/include/torch/csrc/api/include", f"-L{root}/lib", f"-Wl,-rpath,{root}/lib",
         f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", "-pthread",
         "-Wl,--no-as-needed", "-ltorch_cpu", *cuda, "-lc10", "-ltorch"],
        check=True,
    )  # fmt: skip

    def run(mode, package, calls, device, model="model"):
        torch.save(flat(calls), folder / "calls.pt")
        done = subprocess.run(
            [folder / "runner", mode, package, model, device, folder / "calls.pt",
             folder / "outputs.pt"],
            timeout=300, text=True, capture_output=True,
            env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return torch.load(folder / "outputs.pt"), done.stdout

    return run


# -- packages run without us ----


@devices(Llama, ViT, Flux, Masked)
def test_a_package_runs_without_python_at_any_length(make, device, build, runner):
    package = build(make, device)
    assert package.report.rewritten and not package.report.refused, f"\n{package.report}"
    assert not any("sage" in str(t) for t in targets(package.program))  # the caller's own
    check(runner("run", package.path, package.calls, device)[0], package.expected)


@pytest.mark.parametrize("make", [Llama, ViT, Flux, Masked])
def test_a_cpu_package_runs_in_python_without_us_at_any_length(make, build, tmp_path):
    """CUDA packages do not load in Python with torch 2.11, plain nn.Linear's neither."""
    package = build(make, "cpu")
    check(run_in_python(package.path, package.calls, tmp_path), package.expected)


@pytest.mark.parametrize("mode", ["twice", "threads"])
@devices(Llama)
def test_a_package_opens_twice_and_runs_in_two_threads(make, device, mode, build, runner):
    package = build(make, device)
    outputs, _ = runner(mode, package.path, package.calls, device)
    check(outputs[: len(LENGTHS)], package.expected)
    check(outputs[len(LENGTHS) :], package.expected)


@pytest.mark.gpu
@pytest.mark.skipif("torch.cuda.device_count() < 2")
@pytest.mark.parametrize("make", [Llama, Flux])
def test_a_package_runs_on_another_gpu_than_it_was_made_on(make, build, runner):
    package = build(make, "cuda")
    check(runner("run", package.path, package.calls, "cuda:1")[0], package.expected)


@pytest.mark.gpu
@pytest.mark.parametrize("make", [Llama, ViT, Flux])
@torch.no_grad()
def test_a_package_is_as_fast_as_the_compiled_model(make, build, runner):
    """Of the same kernels, with CUDA graphs off. Turns of each, the median of medians."""
    package = build(make, "cuda", 2048, 128)
    calls = [call(package.model, N, "cuda", torch.bfloat16) for N in (1024, 2048)]
    sage_inductor.rewrite(package.program, options=FORCE)
    portable = torch.compile(package.program.module(), dynamic=True)
    fastest = torch.compile(
        package.model, backend="sage", options={"sage.force": True}, dynamic=True
    )

    def milliseconds(run, args, kwargs):
        rounds = []
        for _ in range(12):  # as the runner: the first is not counted
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(20):
                run(*args, **kwargs)
            torch.cuda.synchronize()
            rounds.append((time.perf_counter() - start) / 20 * 1e3)
        return sorted(rounds[1:])[5]

    turns = []
    for _ in range(3):
        _, printed = runner("time", package.path, calls, "cuda")
        turns.append(
            [[float(x) for x in printed.split()]]
            + [[milliseconds(run, *each) for each in calls] for run in (portable, fastest)]
        )
    medians = torch.tensor(turns).median(0).values
    for (args, _), (ours, same, best) in zip(calls, medians.T.tolist()):
        print(
            f"{make.__name__} N={args[0].shape[1]}: package {ours:.4f} ms, compiled with its "
            f"kernels {same:.4f} ms ({ours / same:.3f}x), with the fastest {best:.4f} ms"
        )
    assert (medians[0] <= 1.02 * medians[1]).all()


# -- rewritten programs ----


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("make", [Llama, ViT, Flux, Masked])
@torch.no_grad()
def test_rewrite_replaces_the_calls_of_a_program_in_place(make, strict):
    model = make(128, 32)
    program = export(model, *call(model, 64), strict)
    report = sage_inductor.rewrite(program, options=EMULATE)
    assert {s.recipe for s in report} == {"sage2-8b"} and "s" in str(report[0].q[2])
    assert [s.spelling for s in report] == {
        ViT: ["softmax"],
        Masked: ["SDPA", "SDPA", "softmax"],
    }.get(make, ["SDPA"])
    assert report[0].mask.startswith("causal") == (make in (Llama, Masked))
    functions = [t for t in targets(program) if callable(t)]
    assert all(
        isinstance(t, torch._ops.OpOverload) or t.__module__ == "_operator" for t in functions
    )
    assert torch.ops.sage.sdpa.default in targets(program)
    for N in (64, 1, 300):
        args, kwargs = call(model, N)
        actual, expected = program.module()(*args, **kwargs), model(*args, **kwargs)
        check([tensors(actual)], [tensors(expected)], 0.05)  # what quantization costs


def test_rewritten_programs_can_be_saved(tmp_path):
    model = Masked(128, 32)
    args, _ = call(model, 64)
    program = export(model, args, {})
    sage_inductor.rewrite(program, options=EMULATE)
    assert targets(program).count(torch.ops.sage.prepare.default) == 1
    torch.export.save(program, tmp_path / "program.pt2")
    again = torch.export.load(tmp_path / "program.pt2")
    assert torch.equal(again.module()(*args), program.module()(*args))


def test_rewrite_refuses_what_is_not_its_option():
    model = Masked(128, 32)
    program = export(model, *call(model, 64))
    with pytest.raises(ValueError, match="rewrite takes sage.* options, got .*max_autotune"):
        sage_inductor.rewrite(program, options={"max_autotune": True})
    with pytest.raises(sage_inductor.SageRefused, match="on CPU attention stays as it was"):
        sage_inductor.rewrite(program, options={"sage.strict": True})
