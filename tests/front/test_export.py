"""Exported programs and AOTInductor packages, run by processes that have never heard of us.

Shapes: B batch, N tokens (T of them text), C channels, H heads, D head_dim.
"""

import contextlib
import copy
import dataclasses
import functools
import inspect
import io
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import models
import pytest
import torch
import torch.nn.functional as F
from pairs import has_every_variant
from support import arguments, compile_cpp, op_by_op, opened, relative_l1
from torch import nn
from torch._inductor import compile_fx
from torch._inductor.package import load_package
from torch.utils._pytree import tree_leaves

import sage_inductor
from sage_inductor.export import _check_travels, _holds_its_own_libstdcxx
from sage_inductor.ops import recipe as recipes
from sage_inductor.ops.register import OPAQUE

EMULATE = {"sage.emulate": True}
FORCE = {"sage.force": True}
RUNNER = Path(__file__).with_name("aoti_runner.cpp")
LENGTHS = (64, 1, 5, 1000, 2048)
SHORT = (64, 1, 5, 300)  # what one process of a CPU computes soon: several blocks and a rest
# A CPU's package computes its longest call for seconds: what is compiled quickly is not optimized.
ON_CPU = LENGTHS if has_every_variant() else SHORT


# -- the models: one layer of what matters to attention ----


def heads(x, D):
    return x.unflatten(-1, (-1, D)).transpose(1, 2)  # [B, N, H D] -> [B, H, N, D]


def rotate(x, positions):
    """x [B, H, N, D] rotated in its D/2 planes by angles that grow with positions [N]."""
    frequencies = 1e4 ** -torch.linspace(0, 1, x.shape[-1] // 2, device=x.device)
    angles = positions[:, None] * frequencies  # [N, D/2]
    (a, b), cos, sin = x.float().chunk(2, -1), angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Llama(nn.Module):
    """Tokens [B, N] -> logits [B, N, 100]. RMSNorm, rotary positions, two q heads to one of k and
    v, causal."""

    def __init__(self, C, D):
        super().__init__()
        self.D = D
        self.embed, self.head = nn.Embedding(100, C), nn.Linear(C, 100)
        self.norms = nn.ModuleList(nn.RMSNorm(C) for _ in range(3))
        self.q, self.kv, self.out = (nn.Linear(C, C, bias=False) for _ in range(3))
        self.gate, self.up, self.down = nn.Linear(C, 2 * C), nn.Linear(C, 2 * C), nn.Linear(2 * C, C)  # fmt: skip

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
    """Features [B, N, C] -> the same, of one more. Grouped-query attention under a mask of the
    input's making, twice with the same k and v, and once by hand."""

    def __init__(self, C, D):
        super().__init__()
        self.D = D
        self.q, self.kv, self.out = (nn.Linear(C, C) for _ in range(3))

    def forward(self, x):
        x = F.pad(x, (0, 0, 1, 0), value=0.5)
        q, (k, v) = heads(self.q(x), self.D), (heads(y, self.D) for y in self.kv(x).chunk(2, -1))
        i = torch.arange(x.shape[1], device=x.device)
        mask = (i <= i[:, None]) & (x[:, None, None, :, 0] > -1).logical_or(i == 0)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        o = o + F.scaled_dot_product_attention(-q, k, v, attn_mask=mask, enable_gqa=True)
        mask = mask | (x @ x.mT > 1e9)[:, None]  # the same, but nothing proves it
        s = (o @ q.mT / 6).masked_fill(~mask, -torch.inf)
        o = s.softmax(-1) @ q
        return self.out(o.transpose(1, 2).flatten(2))


def cached(q, k, v):
    """New queries [1, 2, N, 32] and the keys and values of a longer cache [1, 2, M, 32]: a window
    that ends with the last key, and causal attention from the first key on."""
    N, M = q.shape[2], k.shape[2]
    i, j = torch.arange(N)[:, None] + (M - N), torch.arange(M)
    window = F.scaled_dot_product_attention(q, k, v, attn_mask=(j <= i) & (j > i - 40))
    return torch.stack((window, F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class Sink(nn.Module):
    """Queries, keys and values [1, 2, N, 32]; attention with a key that has no value."""

    def __init__(self):
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(2, 1, 1) + 3)

    def forward(self, q, k, v):
        s = q @ k.mT * q.shape[3] ** -0.5
        s = torch.cat([s, self.sinks.expand(*s.shape[:3], 1)], -1)
        return s.softmax(-1)[..., :-1] @ v


class Alone(nn.Module):
    """Features [B, N, C] -> attention of them by themselves."""

    def __init__(self, C, D):
        super().__init__()
        self.D = D

    def forward(self, x):
        x = heads(x, self.D)
        return F.scaled_dot_product_attention(x, x, x)


def call(model, N, device="cpu", dtype=torch.float32):
    """(args, kwargs) of `model` with N tokens."""

    def randn(*shape):
        return torch.randn(shape).to(device, dtype)

    if isinstance(model, Llama):
        return (torch.randint(0, 100, (1, N)).to(device),), {}
    if isinstance(model, Flux):
        return (randn(1, N, 16),), {"text": randn(1, 12, 32), "time": randn(1).abs()}
    return (randn(1, N, 128),), {}


def export(model, args, kwargs, strict=False):
    """`model` for 1 to 2048 tokens: the second dimension of the first argument."""
    first, *others = inspect.signature(model.forward).parameters
    N = torch.export.Dim("N", min=1, max=2048)
    shapes = {first: {1: N}, **dict.fromkeys(others)}
    return torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=strict)


def reloaded(program):
    torch.export.save(program, saved := io.BytesIO())
    saved.seek(0)
    return torch.export.load(saved)


def targets(program):
    return [node.target for node in program.graph.nodes]


def tensors(result):
    return [x.cpu() for x in tree_leaves(result)]


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
    program: torch.export.ExportedProgram
    report: sage_inductor.Report
    options: dict
    calls: list  # one of each of the lengths asked for

    @functools.cached_property
    @torch.no_grad()
    def expected(self):
        """What the compiled model gives for the calls; on CPU its rewritten graphs, op by op."""
        torch._dynamo.reset()
        run = torch.compile(self.model, backend="sage", options=self.options, dynamic=True)
        on_cpu = "sage.emulate" in self.options
        with op_by_op() if on_cpu else contextlib.nullcontext():
            return [tensors(run(*args, **kwargs)) for args, kwargs in self.calls]


QUICK = {"aot_inductor.compile_wrapper_opt_level": "O0"}  # compiles in two thirds of the time


@torch.no_grad()
def exported(make, device, C=128, D=32, lengths=None, example=64, policy=None) -> Package:
    """What is to be packaged, with the inputs it will get."""
    torch.manual_seed(0)
    lengths = lengths or (ON_CPU if device == "cpu" else LENGTHS)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = make(C, D).to(device, dtype).eval()
    program = export(model, *call(model, example, device, dtype))
    calls = [call(model, N, device, dtype) for N in lengths]
    options = EMULATE if device == "cpu" else FORCE
    if policy:
        options = {**options, "sage.policy": policy}
    return Package("", model, program, None, options, calls)


@torch.no_grad()
def package_alone(make, device, folder, size=(128, 32), configs=QUICK, **given) -> Package:
    package = exported(make, device, *size, **given)
    torch._dynamo.reset()  # empties the report
    package.path = sage_inductor.aoti_compile_and_package(
        package.program, package_path=str(folder / f"{make.__name__}-{device}.pt2"),
        inductor_configs=dict(configs), options=package.options,
    )  # fmt: skip
    package.report = sage_inductor.report()
    return package


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """(model class, device) -> its Package, built once."""
    folder = tmp_path_factory.mktemp("packages")
    return functools.cache(lambda make, device: package_alone(make, device, folder))


EVERY = Llama, Flux, Masked
SWEPT = pytest.mark.sweep  # on CPU, where a package takes half a minute: see `opened`


def devices(*makes):
    """The models on CPU, in the sweep, and on a GPU. Each run packages the layer of
    docs/guide/packages.md, which runs in Python and, without it, in C++."""
    return pytest.mark.parametrize("make, device", [
        pytest.param(make, device, id=f"{make.__name__}-{device}", marks=marks)
        for device, marks in (("cpu", SWEPT), ("cuda", pytest.mark.gpu)) for make in makes
    ])  # fmt: skip


# -- processes that load them ----

LOAD = """
import sys, torch
class Blocked:
    def find_spec(self, name, *rest):
        if name.split(".")[0] == "sage_inductor":
            raise ImportError("sage_inductor is not installed here")
sys.meta_path.insert(0, Blocked())
from torch._inductor import compile_fx
from torch._inductor.package import load_package
outputs = []
for path, calls in torch.load("calls.pt"):
    run = load_package(path)
    results = (run(*args, **kwargs) for args, kwargs in calls)
    outputs.append([[x.cpu() for x in torch.utils._pytree.tree_leaves(each)] for each in results])
torch.save(outputs, "outputs.pt")
assert "sage_inductor" not in sys.modules
"""


def python(code, *args, cwd):
    return subprocess.run(
        [sys.executable, "-c", code, *args], cwd=cwd, timeout=900, text=True, capture_output=True
    )


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    """mode, package, device -> outputs of its calls, with no Python in the process. Raises
    RuntimeError with what the loader threw."""
    folder = tmp_path_factory.mktemp("runner")
    compile_cpp(RUNNER, folder / "runner")

    def run(mode, package, device):
        torch.save([tensors(each) for each in package.calls], folder / "calls.pt")
        done = subprocess.run(
            ["./runner", mode, package.path, "model", device, "calls.pt", "outputs.pt"],
            cwd=folder, timeout=900, text=True, capture_output=True,
        )  # fmt: skip
        if done.returncode == 1:
            raise RuntimeError(done.stderr)
        assert done.returncode == 0, f"crashed with {done.returncode}: {done.stderr}"
        return torch.load(folder / "outputs.pt")

    return run


# -- packages run without us ----


@devices(*EVERY)
def test_a_package_runs_without_python_at_any_length(make, device, build, runner):
    package = build(make, device)
    assert package.report.rewritten and not package.report.refused, f"\n{package.report}"
    check(runner("run", package, device), package.expected)


@pytest.mark.parametrize("make", [pytest.param(Flux, marks=SWEPT), Masked])
@torch.no_grad()
def test_what_a_package_is_made_of_computes_it_at_any_length(make):
    """Masked has what the others have: a length that is a sum, and attention by hand."""
    package = exported(make, "cpu", lengths=SHORT)
    report = sage_inductor.rewrite(package.program, options=EMULATE)
    assert report.rewritten and not report.refused, f"\n{report}"
    run = opened(package.program)
    check([tensors(run(*tensors(each))) for each in package.calls], package.expected)


@pytest.mark.parametrize(
    "makes, device",
    [
        pytest.param(EVERY, "cpu", id="cpu", marks=SWEPT),
        pytest.param(EVERY, "cuda", id="cuda", marks=pytest.mark.gpu),
    ],
)
def test_packages_run_in_python_without_us_at_any_length(makes, device, build, tmp_path):
    packages = [build(make, device) for make in makes]
    torch.save([(each.path, each.calls) for each in packages], tmp_path / "calls.pt")
    # Those on the H200's host hold their own libstdc++.
    done = python(f"{REMEDY}\n{LOAD}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    outputs = torch.load(tmp_path / "outputs.pt")
    for package, actual in zip(packages, outputs, strict=True):
        assert package.report.rewritten and not package.report.refused, f"\n{package.report}"
        check(actual, package.expected)


def packaged_or_opened(program, packaged: bool, folder):
    """A program without sage ops, as a function of its inputs."""
    options = {**EMULATE, "sage.recipe": "sage2-8b"}
    torch._dynamo.reset()
    if packaged:
        path = sage_inductor.aoti_compile_and_package(
            program, package_path=str(folder / "model.pt2"), inductor_configs=QUICK, options=options
        )
        return torch._inductor.aoti_load_package(path)
    program = copy.deepcopy(program)
    sage_inductor.rewrite(program, options=options)
    run = opened(program)
    return lambda *inputs: run(*inputs)[0]


either = pytest.mark.parametrize("packaged", [False, pytest.param(True, marks=SWEPT)])


@either
@torch.no_grad()
def test_a_package_reads_only_the_keys_that_a_band_shows(packaged, tmp_path):
    def call(N, M):
        return [torch.randn(1, 2, n, 32) for n in (N, M, M)]

    N, M = (torch.export.Dim(name, min=2, max=4096) for name in "NM")
    shapes = {2: N}, {2: M}, {2: M}
    program = torch.export.export(models.Of(cached), tuple(call(64, 300)), dynamic_shapes=shapes)
    run = packaged_or_opened(program, packaged, tmp_path)
    masks = [site.mask for site in sage_inductor.report()]
    assert masks == ["window(39, 0), bottom right", "causal"]
    for N, M in ((64, 300), (64, 64), (2, 300), (100, 101), (130, 400)):
        q, k, v = call(N, M)
        exact, found = cached(q, k, v), run(q, k, v)
        assert relative_l1(found, exact) < 0.05
        for x in (k, v):
            x[:, :, N : max(N, M - N - 39)] = torch.nan  # what neither shows to any query
        assert torch.equal(run(q, k, v), found)


@either
def test_a_package_of_attention_with_a_learned_sink(packaged, tmp_path):
    model, options = Sink(), {**EMULATE, "sage.recipe": "sage2-8b"}
    N = torch.export.Dim("N", min=2, max=4096)

    def exported():
        given = [torch.randn(1, 2, 70, 32) for _ in range(3)]
        return torch.export.export(model, tuple(given), dynamic_shapes=({2: N},) * 3)

    program = exported()
    (site,) = sage_inductor.rewrite(program, options=options)
    assert site.mask == "a sink"
    with pytest.raises(NotImplementedError, match="a learned sink has no backward"):
        program.module()(*[torch.randn(1, 2, 70, 32) for _ in range(3)]).sum().backward()
    run = packaged_or_opened(exported(), packaged, tmp_path)
    for n in (2, 70, 333):
        q, k, v = (torch.randn(1, 2, n, 32) for _ in range(3))
        with torch.no_grad():
            found, same = run(q, k, v), program.module()(q, k, v)
            assert 1e-4 < relative_l1(found, model(q, k, v)) < 0.05
            torch.testing.assert_close(found, same, rtol=1e-3, atol=1e-3)


def package_of_sources(device, folder):
    configs = QUICK | {
        "aot_inductor.package_cpp_only": True,
        "aot_inductor.precompile_headers": False,  # which nothing that is compiled here includes
    }
    if device == "cuda":
        return package_alone(Llama, device, folder, configs=configs)
    keep = [{"recipe": "sage2-8b-per-token", "keep": {"top_k": 0.3, "similarity": 0}}]
    if torch.__version__ < "2.12":  # whose Inductor writes C++ of this with an undeclared name
        keep = None
    given = dict(configs=configs, lengths=SHORT, example=129, policy=keep)
    return package_alone(Alone, device, folder, **given)


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=SWEPT), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_a_package_of_sources_is_built_where_it_is_loaded(device, tmp_path, monkeypatch):
    """By torch's loader, with the g++ that it finds: one that does not optimize. On CPU attention is
    by blocks that it selects."""
    package = package_of_sources(device, tmp_path)
    assert package.report.rewritten and not package.report.refused, f"\n{package.report}"
    names = {Path(name).name.split(".", 1)[-1] for name in zipfile.ZipFile(package.path).namelist()}
    assert {"wrapper.cpp", "txt"} <= names and "wrapper.so" not in names, names
    torch.save([(package.path, package.calls)], tmp_path / "calls.pt")
    compiler = tmp_path / "g++"
    compiler.write_text(f'#!/bin/bash\nexec {shutil.which("g++")} "${{@/#-O3/-O0}}"')
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    if device == "cpu":  # in this process; others without us run Llama's
        run = load_package(package.path)
        check([tensors(run(*args, **kwargs)) for args, kwargs in package.calls], package.expected)
        return
    done = python(f"{REMEDY}\n{LOAD}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    check(torch.load(tmp_path / "outputs.pt")[0], package.expected)


def has_cmake(*least: int) -> bool:
    if shutil.which("cmake") is None:
        return False
    said = subprocess.run(["cmake", "--version"], capture_output=True, text=True).stdout
    return tuple(map(int, re.search(r"(\d+)\.(\d+)", said).groups())) >= least


@pytest.mark.skipif(not has_cmake(3, 27), reason="torch writes a CMakeLists.txt for CMake 3.27")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_package_of_sources_is_built_by_its_cmakelists(device, tmp_path):
    package = package_of_sources(device, tmp_path)
    with zipfile.ZipFile(package.path) as archive:
        archive.extractall(tmp_path / "sources")
    (project,) = (tmp_path / "sources").rglob("CMakeLists.txt")
    torch_is = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    for step in (["-S", project.parent, "-B", "build", torch_is], ["--build", "build"]):
        done = subprocess.run(["cmake", *step], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    library = str(tmp_path / "build" / "libaoti_model.so")
    torch.save([(library, package.calls)], tmp_path / "calls.pt")
    load = LOAD.replace("load_package(path)", f"torch._export.aot_load(path, {device!r})")
    done = python(f"{REMEDY}\n{load}" if device == "cuda" else load, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    check(torch.load(tmp_path / "outputs.pt")[0], package.expected)


@pytest.mark.parametrize("mode", ["twice", "threads"])
@devices(Llama)
def test_a_package_opens_twice_and_runs_in_two_threads(make, device, mode, build, runner):
    package = build(make, device)
    n = 4 if device == "cpu" else len(package.calls)
    outputs = runner(mode, dataclasses.replace(package, calls=package.calls[:n]), device)
    check(outputs[:n], package.expected[:n])
    check(outputs[n:], package.expected[:n])


# test_package_kernels.py has packages on each of several GPUs and in CUDA graphs, test_docs.py a C++
# program that replays one.


# -- what a package calls, and what it does not ----


@devices(Alone, *EVERY)
def test_a_package_calls_nothing_that_needs_python(make, device, build):
    """What Inductor has no C function for it asks the dispatcher, by the names in a list."""
    package, called = build(make, device), []
    with zipfile.ZipFile(package.path) as archive:
        names = archive.namelist()
        for name in names:
            if name.endswith(".wrapper.json"):
                nodes = json.loads(archive.read(name))["nodes"]
                called += [node["node"]["target"] for node in nodes]
        (source,) = (archive.read(name) for name in names if name.endswith(".wrapper.cpp"))
        kernels = sum(name.endswith(".cubin") for name in names)  # Inductor's
    assert not [name for name in called if not re.match(r"(torch\.ops\.)?aten\b", name)], called
    assert b"int_mm" not in source  # torch 2.11 aborted in a package with aten's INT8 matmul
    kernels += source.count(b"\nKernel kernel_")  # ours: of attention alone there are no others
    assert (kernels > 0) == (device == "cuda")


@pytest.mark.parametrize("lists", [False, True], ids=["dense", "lists"])
def test_a_sage_op_that_needs_python_is_refused(lists):
    def opaque(x):
        one = x.new_ones(1, 1, 1, dtype=torch.int32)
        given = dict(kv_num_blocks=one, kv_indices=one[..., None], block_q=128, block_kv=128)
        args = arguments(x, x, x, recipe="sage1", is_causal=True, **(given if lists else {}))
        return torch.ops.sage.sdpa(*args)[0]

    program = torch.export.export(models.Of(opaque), (torch.randn(1, 2, 64, 64),))
    with pytest.raises(ValueError, match="every sage op must be portable .* got `sdpa`, a call of"):
        sage_inductor.aoti_compile_and_package(program)


def test_every_opaque_op_is_refused():
    assert len(OPAQUE) >= 3
    for op in OPAQUE:
        graph = torch.fx.Graph()
        graph.output(graph.call_function(op, (graph.placeholder("q"),)))
        with pytest.raises(ValueError, match=f"must be portable .*{op}"):
            _check_travels(torch.fx.GraphModule({}, graph))


def test_the_pass_of_backend_inductor_inserts_portable_calls_into_packages(monkeypatch):
    inserted = []

    class Stop(Exception):
        """Before compiling, which takes half a minute."""

    def look(gm, *args, **kwargs):
        inserted.extend(n for n in gm.graph.nodes if n.target is torch.ops.sage.sdpa.default)
        raise Stop

    monkeypatch.setattr(compile_fx, "aot_export_module", look)
    with sage_inductor.config.patch(rewrite_inductor=True, emulate=True), pytest.raises(Stop):
        torch._inductor.aoti_compile_and_package(exported(Llama, "cpu").program)
    assert [node.args[-1] for node in inserted] == [True]


# -- packages that hold a library ----


REMEDY = "import ctypes; ctypes.CDLL('libstdc++.so.6', ctypes.RTLD_GLOBAL)"


def test_the_library_that_code_needs_is_found_wherever_it_is_named(tmp_path):
    for before, holds in ((0, False), ((1 << 20) - 9, False), (None, True)):
        code = b"" if before is None else bytes(before) + b"libstdc++.so.6"
        with zipfile.ZipFile(tmp_path / "package.pt2", "w") as archive:
            archive.writestr("model/code.so", code + bytes(3 << 20))
        assert _holds_its_own_libstdcxx(tmp_path / "package.pt2") == holds


@pytest.mark.skipif(sys.platform != "linux", reason="about linkers on Linux")
@pytest.mark.parametrize("holds", [False, True])
def test_who_packages_is_warned_of_a_library_held_twice(holds, tmp_path, monkeypatch, caplog):
    def made(program, package_path, inductor_configs):
        with zipfile.ZipFile(package_path, "w") as archive:
            archive.writestr("model/code.so", b"" if holds else b"libstdc++.so.6")
        return package_path

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", made)
    program = torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),))
    sage_inductor.aoti_compile_and_package(program, package_path=tmp_path / "model.pt2")
    warned = holds and torch.__version__ < "2.15"
    assert ("linked libstdc++ into the package" in caplog.text) == warned
    assert (REMEDY[15:] in caplog.text) == warned


# -- rewritten programs ----


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("make", EVERY)
@torch.no_grad()
def test_rewrite_replaces_the_calls_of_a_program_in_place(make, strict):
    model = make(128, 32)
    program = export(model, *call(model, 64), strict)
    report = sage_inductor.rewrite(program, options=EMULATE)
    assert {s.recipe for s in report} == {"sage2-8b"} and "s" in str(report[0].q[2])
    assert [s.spelling for s in report] == ["SDPA"] + ["SDPA", "softmax"] * (make is Masked)
    assert report[0].mask.startswith("causal") == (make in (Llama, Masked))
    others = [t for t in targets(program) if callable(t) and not isinstance(t, torch._ops.OpOverload)]  # fmt: skip
    assert all(t.__module__ == "_operator" for t in others)
    assert torch.ops.sage.sdpa.default in targets(program)
    for N in (64, 1, 300):
        args, kwargs = call(model, N)
        actual, expected = program.module()(*args, **kwargs), model(*args, **kwargs)
        check([tensors(actual)], [tensors(expected)], 0.05)  # what quantization costs


def test_what_one_rewrite_left_another_may_take():
    model = Masked(128, 32)
    program = export(model, call(model, 64)[0], {})
    assert not any(site.rewritten for site in sage_inductor.rewrite(program))
    assert all(site.rewritten for site in sage_inductor.rewrite(program, options=EMULATE))


def branches(q):
    def attend(q):
        return F.scaled_dot_product_attention(q, q, q)

    return torch.cond(q.mean() > 0, attend, torch.sin, (q,))


def test_in_a_nested_graph_too():
    program = torch.export.export(models.Of(branches), (torch.randn(1, 2, 40, 32),))
    for options, recipe in ((None, None), (EMULATE, "sage2-8b")):
        assert [s.recipe for s in sage_inductor.rewrite(program, options=options)] == [recipe]


def test_rewritten_programs_can_be_saved(tmp_path):
    model = Masked(128, 32)
    args, _ = call(model, 64)
    program = export(model, args, {})
    sage_inductor.rewrite(program, options=EMULATE)
    assert targets(program).count(torch.ops.sage.prepare.default) == 1
    torch.export.save(program, tmp_path / "program.pt2")
    again = torch.export.load(tmp_path / "program.pt2")
    assert torch.equal(again.module()(*args), program.module()(*args))

    # Where sage_inductor is not imported, torch says which op is missing and what to do.
    done = python("import torch; torch.export.load('program.pt2')", cwd=tmp_path)
    assert done.returncode == 1 and "failed to resolve torch.ops.sage" in done.stderr, done.stderr
    assert "Please import the custom op to register it before deserializing" in done.stderr


def test_a_call_that_is_an_output_keeps_its_place_in_the_signature():
    def model(q, k):
        one = F.scaled_dot_product_attention(q, k, k)
        return {"a": one, "b": 3, "c": [q + 1, one]}, F.scaled_dot_product_attention(k, q, q)

    q, k = torch.randn(2, 1, 2, 64, 32)
    program = torch.export.export(models.Of(model), (q, k))
    assert len(sage_inductor.rewrite(program, options=EMULATE).rewritten) == 2
    expected, found = program.module()(q, k), reloaded(program).module()(q, k)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(found, model(q, k), rtol=0, atol=0.1)


class Attention(nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


class Softmax(nn.Module):
    def forward(self, q, k):
        return (q @ k.mT / q.shape[3] ** 0.5).softmax(-1)


class ByModules(nn.Module):
    """Attention is what one module returns and another takes, then is written out over two."""

    def __init__(self):
        super().__init__()
        self.attention, self.linear, self.softmax = Attention(), nn.Linear(32, 32), Softmax()

    def forward(self, q, k):
        x = self.linear(self.attention(q, k, k))
        return self.softmax(x, k) @ k


@pytest.mark.parametrize("strict", [False, True])
@torch.no_grad()
def test_a_program_is_decided_by_the_stage_in_force_and_keeps_that(strict):
    """A call of SDPA by `rewrite`, one of sage_inductor.attention by torch.export."""
    q, k, v = torch.randn(3, 1, 2, 64, 32)
    rules = [{"stage": "edge", "recipe": "off"}, {"recipe": "sage1"}]
    for stage, recipe in (("edge", None), (None, "sage1"), ("of no rule", "sage1")):
        for model in (Attention(), models.Of(lambda q, k, v: sage_inductor.attention(q, k, v))):
            torch._dynamo.reset()
            with sage_inductor.config.patch(emulate=True, policy=rules):
                with sage_inductor.stage(stage):
                    program = torch.export.export(model, (q, k, v), strict=strict)
                    if type(model) is Attention:
                        sage_inductor.rewrite(program)
                assert [site.recipe for site in sage_inductor.report()] == [recipe]
                with sage_inductor.stage(None if stage else "edge"):
                    error = relative_l1(program.module()(q, k, v), Attention()(q, k, v))
            assert (error < 1e-6) == (recipe is None) and error < 0.05
            assert (torch.ops.sage.sdpa.default in targets(program)) == (recipe is not None)


def test_modules_whose_signature_is_preserved_keep_it():
    q, k = torch.randn(2, 1, 2, 64, 32)
    model, preserved = ByModules(), ("attention", "linear", "softmax")
    program = torch.export.export(model, (q, k), preserve_module_call_signature=preserved)
    report = sage_inductor.rewrite(program, options=EMULATE)
    assert len(report.rewritten) == 1  # of the other the scores' softmax is asked for
    expected = program.module()(q, k)
    for each in program, reloaded(program):
        module = torch.export.unflatten(each)
        assert torch.equal(module(q, k), expected)
        out = module.attention(q, k, k)
        torch.testing.assert_close(out, Attention()(q, k, k), rtol=0, atol=0.1)
        assert torch.equal(module.softmax(module.linear(out), k) @ k, expected)
    plain = torch.export.export(model, (q, k))
    assert len(sage_inductor.rewrite(plain, options=EMULATE).rewritten) == 2
    # A pass of somebody else's left a signature behind: the program runs as before.
    stale = torch.export.export(model, (q, k), preserve_module_call_signature=preserved)
    (entry,) = (each for each in stale.module_call_graph if each.fqn == "attention")
    entry.signature.outputs[0].name = "of_no_node"
    assert len(sage_inductor.rewrite(stale, options=EMULATE).rewritten) == 1
    assert torch.equal(stale.module()(q, k), expected)


def test_a_saved_program_outlives_the_sources_that_made_it(monkeypatch):
    model = Masked(128, 32)
    args, _ = call(model, 64)
    program = export(model, args, {})
    sage_inductor.rewrite(program, options=EMULATE)
    expected = program.module()(*args)
    monkeypatch.setattr(recipes, "source_tag", lambda: "0.2.0+11111111")
    recipes.decode.cache_clear()
    again = reloaded(program)
    with pytest.raises(ValueError, match=r"call sage_inductor.rewrite\(program\) on the loaded"):
        again.module()(*args)
    assert not sage_inductor.rewrite(again)  # nothing is decided anew
    assert torch.equal(again.module()(*args), expected)
    monkeypatch.setattr(recipes, "MEANING", recipes.MEANING + 1)
    recipes.decode.cache_clear()
    for run in (again.module(), lambda *_: sage_inductor.rewrite(again)):
        with pytest.raises(ValueError, match="export the original model again"):
            run(*args)


def test_rewrite_refuses_what_is_not_its_option():
    model = Masked(128, 32)
    program = export(model, *call(model, 64))
    message = r"torch.export.export\(model, inputs\) returns, got Masked"
    with pytest.raises(TypeError, match=message):
        sage_inductor.rewrite(model)
    with pytest.raises(ValueError, match="rewrite takes sage.* options, got .*max_autotune"):
        sage_inductor.rewrite(program, options={"max_autotune": True})
    with pytest.raises(sage_inductor.SageRefused, match="on CPU attention stays as it was"):
        sage_inductor.rewrite(program, options={"sage.strict": True})
