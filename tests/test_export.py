"""Exported programs and AOTInductor packages, run by processes that have never heard of us."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import sage_inductor

EMULATE = {"sage.emulate": True}
RUNNER = Path(__file__).with_name("aoti_runner.cpp")


class Attention(torch.nn.Module):
    """Grouped-query causal attention between two projections."""

    def __init__(self, dim=128):
        super().__init__()
        self.q, self.kv, self.out = (torch.nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x):
        B, N, C = x.shape
        q = self.q(x).view(B, N, -1, 32).transpose(1, 2)
        k, v = self.kv(x).view(B, N, 2, -1, 32).permute(2, 0, 3, 1, 4)
        o = self.attend(q, k, v)
        return self.out(o.transpose(1, 2).reshape(B, N, C))

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class SharingAttention(Attention):
    """Two calls with the same k and v, and one with another v."""

    def attend(self, q, k, v):
        o = super().attend(q, k, v) + super().attend(q, k, v.sin())
        return o + F.scaled_dot_product_attention(-q, k, v, enable_gqa=True)


class Masked(Attention):
    """The same under a mask of the input's making, and written out by hand."""

    def forward(self, x):
        B, N, C = x.shape
        q = self.q(x).view(B, N, -1, 32).transpose(1, 2)
        k, v = self.kv(x).view(B, N, 2, -1, 32).permute(2, 0, 3, 1, 4)
        i = torch.arange(N, device=x.device)
        mask = (i <= i[:, None]) & (x[:, None, None, :, 0] > -1).logical_or(i == 0)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        mask = mask | (x @ x.mT > 1e9)[:, None]  # the same, but nothing proves it
        s = (o @ q.transpose(-2, -1) / 6).masked_fill(~mask, -torch.inf)
        o = torch.softmax(s, dim=-1) @ q
        return self.out(o.transpose(1, 2).reshape(B, N, C))


def exported(model, x, strict=False):
    N = torch.export.Dim("N", min=2, max=4096)
    return torch.export.export(model, (x,), dynamic_shapes=({1: N},), strict=strict)


def targets(program):
    return [node.target for node in program.graph.nodes]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("make", [Attention, Masked])
def test_rewrite_replaces_the_calls_of_a_program_in_place(make, strict):
    model, x = make(), torch.randn(1, 64, 128)
    program = exported(model, x, strict)
    report = sage_inductor.rewrite(program, options=EMULATE)
    assert {s.recipe for s in report} == {"sage2-8b"} and "s" in str(report[0].q[2])
    assert report[0].mask.startswith("causal")
    assert [s.spelling for s in report] == ["SDPA", "softmax"][: 2 if make is Masked else 1]
    functions = [t for t in targets(program) if callable(t)]
    assert all(
        isinstance(t, torch._ops.OpOverload) or t.__module__ == "_operator" for t in functions
    )
    assert torch.ops.sage.sdpa.default in targets(program)
    for N in (64, 5, 300):
        x = torch.randn(1, N, 128)
        actual, expected = program.module()(x), model(x)
        assert F.cosine_similarity(actual.flatten(), expected.flatten(), dim=0) > 0.999


def test_rewritten_programs_can_be_saved(tmp_path):
    model, x = SharingAttention(), torch.randn(1, 64, 128)
    program = exported(model, x)
    sage_inductor.rewrite(program, options=EMULATE)
    assert targets(program).count(torch.ops.sage.prepare.default) == 1
    torch.export.save(program, tmp_path / "program.pt2")
    again = torch.export.load(tmp_path / "program.pt2")
    assert torch.equal(again.module()(x), program.module()(x))


def test_rewrite_refuses_what_is_not_its_option():
    program = exported(Attention(), torch.randn(1, 64, 128))
    with pytest.raises(ValueError, match="rewrite takes sage.* options, got .*max_autotune"):
        sage_inductor.rewrite(program, options={"max_autotune": True})
    with pytest.raises(sage_inductor.SageRefused, match="on CPU attention stays as it was"):
        sage_inductor.rewrite(program, options={"sage.strict": True})


LOAD = """
import sys, torch
class Blocked:
    def find_spec(self, name, *rest):
        if name.split(".")[0] == "sage_inductor":
            raise ImportError("sage_inductor is not installed here")
sys.meta_path.insert(0, Blocked())
run = torch._inductor.aoti_load_package(sys.argv[1])
outputs = [run(x.to(sys.argv[4])).cpu() for x in torch.load(sys.argv[2])]
torch.save(outputs, sys.argv[3])
assert "sage_inductor" not in sys.modules
"""


def run_in_python(package, inputs, device, folder):
    torch.save(inputs, folder / "inputs.pt")
    command = [sys.executable, "-c", textwrap.dedent(LOAD), package]
    subprocess.run(
        [*command, folder / "inputs.pt", folder / "outputs.pt", device],
        check=True, cwd=folder, timeout=300,
    )  # fmt: skip
    return torch.load(folder / "outputs.pt")


def build_runner(folder, cuda):
    root = Path(torch.__file__).parent
    libraries = [
        "-ltorch_cpu",
        *(["-ltorch_cuda", "-lc10_cuda"] if cuda else []),
        "-lc10",
        "-ltorch",
    ]
    subprocess.run(
        ["g++", "-std=c++20", "-O0", RUNNER, "-o", folder / "runner", f"-I{root}/include",
         f"-I{root}/include/torch/csrc/api/include", f"-L{root}/lib", f"-Wl,-rpath,{root}/lib",
         f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
         "-Wl,--no-as-needed", *libraries],
        check=True,
    )  # fmt: skip
    return folder / "runner"


def run_in_cpp(runner, package, x, device, folder):
    torch.save([x], folder / "inputs.pt")
    subprocess.run(
        [runner, package, folder / "inputs.pt", folder / "outputs.pt", device],
        check=True, timeout=300, env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )  # fmt: skip
    return torch.load(folder / "outputs.pt")


@pytest.mark.parametrize("make", [SharingAttention, Masked])
def test_a_cpu_package_runs_without_us_at_any_length(make, tmp_path):
    model, x = make(), torch.randn(1, 64, 128)
    program = exported(model, x)
    package = sage_inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "model.pt2"), options=EMULATE
    )
    assert sage_inductor.report().rewritten and not sage_inductor.report().refused
    assert torch.ops.sage.sdpa.default not in targets(program)  # the caller's program is untouched
    sage_inductor.rewrite(program, options=EMULATE)
    inputs = [torch.randn(1, N, 128) for N in (64, 5, 300)]
    for x, actual in zip(inputs, run_in_python(package, inputs, "cpu", tmp_path)):
        check(actual, program.module()(x))
    runner = build_runner(tmp_path, cuda=False)
    for x in inputs[:2]:
        check(run_in_cpp(runner, package, x, "cpu", tmp_path), program.module()(x))


def check(actual, expected):
    """An INT8 code that rounds the other way moves what follows: 1 % of the norm."""
    assert (actual - expected).norm() < 1e-2 * expected.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("make", [Attention, Masked])
def test_a_cuda_package_runs_without_python_at_any_length(make, tmp_path):
    """In C++: loading any CUDA package from Python crashed with torch 2.11 (nn.Linear's too)."""
    model, x = make().cuda().bfloat16(), torch.randn(1, 64, 128).cuda().bfloat16()
    package = sage_inductor.aoti_compile_and_package(
        exported(model, x), package_path=str(tmp_path / "model.pt2"), options={"sage.force": True}
    )
    assert sage_inductor.report().rewritten and not sage_inductor.report().refused
    runner = build_runner(tmp_path, cuda=True)
    compiled = torch.compile(model, backend="sage", options={"sage.force": True})
    for N in (64, 5, 1008, 2000):
        x = torch.randn(1, N, 128).bfloat16()
        actual = run_in_cpp(runner, package, x, "cuda", tmp_path)
        with torch.no_grad():
            expected = compiled(x.cuda()).cpu()
        assert actual.isfinite().all()
        error = (actual - expected).double().norm() / expected.double().norm()
        assert error < 1e-2  # bf16
