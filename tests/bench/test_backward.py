"""bench/backward: the recipe against exact gradients and the laboratory's, and what ptxas makes of
the kernels. Their values are compared on a GPU (bench/backward/gate.py)."""

import pytest
import torch
import triton
from support import relative_l1
from torch.testing import assert_close
from triton.experimental.gluon import language as gl

from bench import gradients
from bench.backward import kernels, recipe
from bench.tritons import compile_kernel, stack_bytes

I8, F8, F32 = ("i8", gl.int8), ("fp8e4nv", gl.float8e4nv), ("fp32", gl.float32)


@pytest.mark.parametrize("N", [256, 200])
@pytest.mark.parametrize("kind", ["normal", "biased"])
def test_the_recipe_is_as_near_as_the_laboratorys(kind, N):
    case = recipe.draw(2, N, 128, kind)
    found, expected = recipe.emulate(recipe.prepare(*case)), recipe.exact(*case)
    of = (x[None].float() for x in case)
    simulated = gradients.gradients(*of, gradients.ENTRIES["G, dP INT8"])[1:]
    for x, y, z in zip(found, simulated, expected, strict=True):
        assert relative_l1(x, z) < max(0.05, 1.2 * relative_l1(y[0], z))
        assert relative_l1(x, z) > 1e-3


def test_the_exact_gradients_are_autograds():
    case = recipe.draw(2, 100, 64)
    expected = gradients.exact(*(x[None] for x in case))[1:]
    for x, y in zip(recipe.exact(*case), expected, strict=True):
        assert_close(x, y[0], rtol=1e-9, atol=1e-9)


def test_tokens_are_permuted_and_back():
    x = torch.arange(64.0).expand(2, 3, 64)
    there = recipe.permute_tokens(x)
    assert sorted(there[0, 0].tolist()) == x[0, 0].tolist() and not torch.equal(there, x)
    assert torch.equal(recipe.unpermute_tokens(there), x)


def descriptor(block, element):
    name, dtype = element
    return f"tensordesc<{name}{block},{gl.NVMMASharedLayout.get_default_for(block, dtype)!r}>"


def test_the_kernels_compile_without_spills():
    rows = descriptor([64, 128], I8)
    types = dict.fromkeys(("Q", "G", "K", "V"), rows)
    fp32 = {
        name: "*fp32" for name in (*kernels.dq_kernel.arg_names, *kernels.dkdv_kernel.arg_names)
    }
    sizes = dict.fromkeys(("N_q", "N_kv", "Q_pad", "K_pad"), "i32")
    of_dq = {"Kt": descriptor([128, 64], F8), "V_scale": descriptor([64], F32), "DQ": "*bf16"}
    given = dict(BLOCK_N=64, WARPGROUPS=3, STAGES=3, FLUSH=8, UNROLL=1, S_AHEAD=True)
    at_launch, consumer = kernels.REGISTERS[3]
    compiled = compile_kernel(
        kernels.dq_kernel, (9, 0), dict(D=128, REGISTERS=consumer, **given),
        fp32 | sizes | types | of_dq, num_warps=4, maxnreg=at_launch,
    )  # fmt: skip
    turned = descriptor([128, 64], F8)
    of_dkdv = {"Qt": turned, "Ot": turned, "Vectors": descriptor([64], F32)}
    of_dkdv |= {"DK": "*bf16", "DV": "*bf16"}
    both = compile_kernel(
        kernels.dkdv_kernel, (9, 0),
        dict(D=128, STAGES=3, FLUSH=8, UNROLL=2, FLUSH_DK=32, REGISTERS=240),
        fp32 | sizes | types | of_dkdv, num_warps=4, maxnreg=168,
    )  # fmt: skip
    for each in (compiled, both):
        ptx = each.asm["ptx"]
        assert "s32.s8.s8" in ptx and "f32.e4m3.e4m3" in ptx
        assert stack_bytes(each.asm["cubin"]) == 0, triton.__version__
