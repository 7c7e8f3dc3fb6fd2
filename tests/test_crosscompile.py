"""Every kernel compiles, without a GPU, for every architecture its recipe runs on, to the matrix
instruction that was meant and without spills in the register file."""

import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sage_inductor.ops import recipe as recipes
from sage_inductor.ops import reference, tiles
from sage_inductor.ops.attention import _attention_kernel
from sage_inductor.ops.quantize import _quantize_k_kernel, _quantize_v_kernel
from sage_inductor.ops.smooth import _final_kernel, _partial_kernel

ARCHITECTURES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]


def compile_kernel(kernel, architecture, constexprs, types, **options):
    """Compile as the JIT would: strides and padded sizes divisible by 16, pointers aligned."""
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constexprs:
            signature[name], constants[(i,)] = "constexpr", constexprs[name]
        else:
            signature[name] = types.get(name, "i32")
            if signature[name][0] == "*" or name.startswith("stride") or name == "N_pad":
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    major, minor = architecture
    target = GPUTarget("cuda", 10 * major + minor, 32)
    return triton.compile(source, target=target, options=options)


def compile_attention(
    architecture, recipe, D=128, is_causal=True, tma=False, mask=0, additive=False, left=-1,
    **options,
):  # fmt: skip
    r = recipes.NAMED[recipe]
    tile = tiles.tile(architecture, r.pv, D, mask > 0)
    fp8, BLOCK_D = r.pv == "fp8", reference.pad_head_dim(D)
    types = dict(
        Q="*bf16", K="*i8", K_scale="*fp32", V="*fp8e4nv" if fp8 else "*bf16", V_scale="*fp32",
        V_mean="*fp32", Out="*bf16", Lse="*fp32", Mask="*bf16" if additive else "*i1", Seen="*u8",
    )  # fmt: skip
    if tma:
        types["K"] = f"tensordesc<i8[{tile.BLOCK_N}, {BLOCK_D}]>"
        if fp8:
            types["V"] = f"tensordesc<fp8e4nv[{BLOCK_D}, {tile.BLOCK_N}]>"
        options["maxnreg"] = tile.maxnreg
    constexprs = dict(
        D=D, D_V=D, SCALE=D**-0.5, LEFT=left, RIGHT=0 if is_causal else -1, BOTTOM_RIGHT=left >= 0,
        MASK=mask, ADDITIVE=additive, FP8=fp8, TMA=tma, BLOCK_DV=BLOCK_D, stride_mn=1,
        GROUPS=4 if r.granularity == "per_thread" else 1, BLOCK_M=tile.BLOCK_M,
        BLOCK_N=tile.BLOCK_N, BLOCK_D=BLOCK_D, NUM_STAGES=tile.num_stages,
        stride_qd=1, stride_vd=1,
    )  # fmt: skip
    return compile_kernel(
        _attention_kernel, architecture, constexprs, types,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **options,
    )  # fmt: skip


def runs_on(recipe, architecture):
    return recipe == "sage1" or architecture >= (8, 9)


CASES = [(a, r) for a in ARCHITECTURES for r in recipes.NAMED if runs_on(r, a)]


@pytest.mark.parametrize("D, is_causal", [(128, True), (64, False)], ids=["128-causal", "64-full"])
@pytest.mark.parametrize("architecture, recipe", CASES, ids=str)
def test_attention_compiles_to_the_matrix_instructions(architecture, recipe, D, is_causal):
    ptx = compile_attention(architecture, recipe, D, is_causal).asm["ptx"]
    fp8 = recipes.NAMED[recipe].pv == "fp8"
    if architecture == (9, 0):
        meant = ["wgmma.mma_async.sync.aligned.m64n", ".s32.s8.s8"]
        meant += [".f32.e4m3.e4m3" if fp8 else ".f32.bf16.bf16"]
    elif architecture == (10, 0):
        # INT8 q k^T is mma.sync there with Triton 3.7 (slow), tcgen05 kind::i8 with 3.9.
        meant = ["tcgen05.mma", "kind::f8f6f4" if fp8 else "kind::f16"]
    else:
        meant = ["mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32"]
        meant += ["f32.e4m3.e4m3.f32" if fp8 else "m16n8k16.row.col.f32.bf16.bf16.f32"]
    assert all(instruction in ptx for instruction in meant)


@pytest.mark.parametrize("D", [64, 128])
def test_the_register_cap_keeps_spills_small(D):
    """At most 8 bytes a thread when this was timed."""
    compiled = compile_attention((9, 0), "sage2-8b", D, tma=True)
    assert "cp.async.bulk.tensor.2d" in compiled.asm["ptx"]
    assert stack_bytes(compiled) <= 64


@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a >= (8, 9)], ids=str)
def test_fp8_products_are_accumulated_in_two_levels(architecture):
    """Each product starts from zero. Triton folds a plain addition into the accumulator on sm_89
    and sm_120, where it keeps 13 mantissa bits."""
    ir = compile_attention(architecture, "sage2-8b").asm["ttgir"]
    products = [line for line in ir.splitlines() if "f8E4M3FN" in line and " = tt.dot " in line]
    products += [line for line in ir.splitlines() if "f8E4M3FN" in line and "group_dot " in line]
    fresh = r"dot %\w+, %\w+, %cst"
    if architecture == (10, 0):
        products = [line for line in ir.splitlines() if "f8E4M3FN" in line and "gen5_mma " in line]
        fresh = r"gen5_mma %\w+, %\w+, [^,]+, %false,"
    assert products and all(re.search(fresh, line) for line in products), products


def stack_bytes(compiled) -> int:
    """What ptxas spilled, from the resource report of the cubin."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True)
    return int(re.search(r"STACK:(\d+)", report.stdout).group(1))


def test_fp8_recipes_are_refused_before_sm_89():
    for architecture in ((8, 0), (8, 6)):
        with pytest.raises(ValueError, match="no kernel for pv='fp8'"):
            tiles.tile(architecture, "fp8", 128, False)


# mask, additive, left: a row of keys for all queries, a row each, numbers, a window.
VARIANTS = [(1, False, -1), (2, False, -1), (2, True, -1), (0, False, 500)]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("architecture, recipe", CASES, ids=str)
def test_masked_attention_compiles_everywhere(architecture, recipe, variant):
    mask, additive, left = variant
    D = 256 if additive else 128
    compile_attention(architecture, recipe, D, mask=mask, additive=additive, left=left)


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("D", [64, 80, 128, 256])
def test_preparation_compiles(architecture, D, masked):
    BLOCK_D = reference.pad_head_dim(D)
    x = dict(
        X0="*bf16", X1="*bf16", Visible="*u8", Partial="*fp32", Count="*i32", Mean="*fp32",
        Amax="*fp32",
    )  # fmt: skip
    tile = dict(D=D, MASK=masked, CHUNK=256, BLOCK_D=BLOCK_D)
    compile_kernel(
        _partial_kernel, architecture, dict(tile, BLOCK_N=8, stride_0d=1, stride_1d=1), x
    )
    compile_kernel(_final_kernel, architecture, dict(tile, BLOCK_C=16), x)
    k = dict(K="*bf16", K_mean="*fp32", Visible="*u8", K_int8="*i8", K_scale="*fp32")
    tile = dict(D=D, BLOCK_D=BLOCK_D, stride_d=1)
    for groups in (1, 4):
        constexprs = dict(tile, MASK=masked, GROUPS=groups, K_BLOCK=64, PAD_N=128)
        compile_kernel(_quantize_k_kernel, architecture, constexprs, k)
    if architecture >= (8, 9):
        v = dict(V="*bf16", V_mean="*fp32", V_amax="*fp32", V_fp8="*fp8e4nv", V_scale="*fp32")
        constexprs = dict(tile, SATURATE=masked, BLOCK_N=128)
        compile_kernel(_quantize_v_kernel, architecture, constexprs, v)
