"""NVFP4 in Triton: 4-bit codes with a scale for each 16: k's and v's here, q's and p's in the
attention kernel.

    phi(x)   blocks of 1x16 along the dimension that is summed over: a scale of E4M3(amax / 6) each,
             and E2M1(x / scale), one of 0, .5, 1, 1.5, 2, 3, 4, 6 and a sign

* phi alone is good for blocks with an amax from 2^-4 to 2688. So k is first brought to it by a
  power of two for each head, v for each channel and q for each row (`power_of_two`): what phi
  rounds well alone it rounds the same, and nothing saturates or vanishes.
* Where tensor cores multiply such blocks (NATIVE: sm_100, sm_120) they do; elsewhere the same codes
  are decoded to fp16, which holds every product of E2M1 and E4M3, and multiplied as such: for
  studies of the accuracy. Rounding to E4M3, and there to E2M1, is integer arithmetic: no other
  device converts to them as well, and Triton's interpreter does neither rightly.

Source: SageAttention3 (arXiv:2505.11594). NATIVE was compiled for these devices and never run.
x_fp4: two E2M1 a byte along the last dimension, the first in the low half; x_e4m3: the bits of
blocks' scales. Both uint8.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from sage_inductor.ops.constants import FP4_BLOCK, INF_BITS, OF_HIDDEN, OF_HIDDEN_FP4
from sage_inductor.ops.formats import PAD_N, pad_head_dim, pad_rows
from sage_inductor.ops.launch import doubled
from sage_inductor.ops.quantize.codes import abs_bits, saturate

_NAN_E4M3 = tl.constexpr(0x7F)
ROWS = 64  # of k or v that one program quantizes


@triton.jit
def power_of_two(amax_bits):
    """(1 / scale, scale), a power of two: amax / scale is in [1024, 2048), for amax from 2^-100."""
    exponent = tl.maximum(amax_bits >> 23, 27)
    inverse = ((264 - exponent) << 23).to(tl.float32, bitcast=True)
    return inverse, ((exponent - 10) << 23).to(tl.float32, bitcast=True)


@triton.jit
def to_minifloat(x, MANTISSA: tl.constexpr, LEAST: tl.constexpr):
    """The code, in int32, of x >= 0 to nearest even in a format with MANTISSA bits of mantissa and
    normal numbers from 2^LEAST; x at most the largest of them."""
    SHIFT: tl.constexpr = 23 - MANTISSA
    MAGIC: tl.constexpr = 1.5 * 2.0 ** (23 + LEAST - MANTISSA)  # + x: rounded to subnormals
    MAGIC_BITS: tl.constexpr = (2 * (150 + LEAST - MANTISSA) + 1) << 22
    bits = x.to(tl.int32, bitcast=True)
    normal = (bits + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)) >> SHIFT
    subnormal = (x + MAGIC).to(tl.int32, bitcast=True) - MAGIC_BITS
    return tl.where(x < 2.0**LEAST, subnormal, normal - ((126 + LEAST) << MANTISSA))


@triton.jit
def from_e4m3(code):
    """The number, in fp16, of the code of an E4M3 that is not negative: its bits are fp16's, but
    for 8 less in the exponent's bias."""
    value = (code.to(tl.int32) << 7).to(tl.int16).to(tl.float16, bitcast=True) * 256.0
    return tl.where(code == _NAN_E4M3, float("nan"), value)


@triton.jit
def to_e2m1(x):
    """The code, in int32, of x to nearest even; beyond +-6 it saturates."""
    bits = x.to(tl.int32, bitcast=True)
    x = tl.abs(x)
    return to_minifloat(tl.where(x < 6.0, x, 6.0), 1, 0) | ((bits >> 28) & 8)


@triton.jit
def quantize_blocks(x, NATIVE: tl.constexpr):
    """phi: x [R, C] in fp32 -> x_fp4 [R, C / 2], x_e4m3 [R, C / 16]. A block with a NaN or an Inf
    has the scale NaN."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    x = x.reshape([R, C // FP4_BLOCK, FP4_BLOCK])
    bits = tl.max(abs_bits(x), 2)
    scale = bits.to(tl.float32, bitcast=True) * (1.0 / 6.0)
    code = to_minifloat(tl.where(scale < 448.0, scale, 448.0), 3, -6)
    scale = from_e4m3(code).to(tl.float32)
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), tl.where(code == 0, 1.0, scale))
    x = x * tl.where(code == 0, 0.0, inverse)[:, :, None]
    lo, hi = tl.split(x.reshape([R, C // 2, 2]))
    if NATIVE:
        x_fp4 = tl.inline_asm_elementwise(
            "{ .reg .b8 a, b, c, d;"
            " cvt.rn.satfinite.e2m1x2.f32 a, $5, $1; cvt.rn.satfinite.e2m1x2.f32 b, $6, $2;"
            " cvt.rn.satfinite.e2m1x2.f32 c, $7, $3; cvt.rn.satfinite.e2m1x2.f32 d, $8, $4;"
            " mov.b32 $0, {a, b, c, d}; }",
            "=r,f,f,f,f,f,f,f,f", [lo, hi], dtype=tl.uint8, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        x_fp4 = (to_e2m1(lo) | (to_e2m1(hi) << 4)).to(tl.uint8)
    return x_fp4, tl.where(bits < INF_BITS, code, _NAN_E4M3).to(tl.uint8)


@triton.jit
def decode_nvfp4(x_fp4, x_e4m3):
    """x_fp4 [R, C / 2], x_e4m3 [R, C / 16] -> what they stand for [R, C], exactly, in fp16."""
    R: tl.constexpr = x_fp4.shape[0]
    C: tl.constexpr = 2 * x_fp4.shape[1]
    x = x_fp4.to(tl.int32)
    x = tl.join(x & 15, x >> 4)  # [R, C / 2, 2]
    bits = ((x & 7) << 9) | ((x & 8) << 12)  # an fp16's, but for 14 less in the exponent's bias
    x = bits.to(tl.int16).to(tl.float16, bitcast=True) * 16384.0
    x = x.reshape([R, C // FP4_BLOCK, FP4_BLOCK]) * from_e4m3(x_e4m3)[:, :, None]
    return x.reshape([R, C])


@triton.jit
def block_scaled_dot(a_fp4, a_e4m3, b_fp4, b_e4m3, zero, NATIVE: tl.constexpr):
    """a b^T [M, N] in fp32, of what a [M, K] and b [N, K] stand for. zero: 0.0 that Triton does not
    know to be it. Where a product on sm_100 starts from a known 0, its OptimizeAccumulatorInit
    (3.7.1) leaves out writing not only that but the scales."""
    if NATIVE:
        return tl.dot_scaled(
            a_fp4, a_e4m3.to(tl.float8e4nv, bitcast=True), "e2m1",
            b_fp4.T, b_e4m3.to(tl.float8e4nv, bitcast=True), "e2m1",
            acc=tl.full([a_fp4.shape[0], b_fp4.shape[0]], zero, tl.float32),
        )  # fmt: skip
    else:
        return tl.dot(decode_nvfp4(a_fp4, a_e4m3), decode_nvfp4(b_fp4, b_e4m3).T)


@triton.jit
def _quantize_kernel(
    X,  # [B, H, N, D] in
    Mean, Amax,  # [B, H, D] in, fp32
    X_fp4, X_e4m3,  # [B, H, R, C / 2], [B, H, R, C / 16] out: R, C are N_pad, BLOCK_D or (ALONG_N)
    X_scale,  # BLOCK_D, N_pad; [B, H] or (ALONG_N) [B, H, D] out, fp32
    stride_b, stride_h, stride_n, stride_d,
    H, N,
    ALONG_N: tl.constexpr, SATURATE: tl.constexpr,
    D: tl.constexpr, PAD_N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid: (B * H * N_pad / BLOCK_N,). BLOCK_N rows of one head."""
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(N, PAD_N) * (PAD_N // BLOCK_N)
    head, block = pid // blocks, pid % blocks
    i, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    n = block * BLOCK_N + i
    mask = (n < N)[:, None] & (d < D)[None, :]
    x = X + head // H * (stride_b // 2) + head % H * (stride_h // 2)
    x = x + n[:, None] * (stride_n // 2) + d.to(tl.int64)[None, :] * stride_d
    x = tl.load(x, mask=mask, other=0.0)
    mean = tl.load(Mean + head * D + d, mask=d < D, other=0.0)
    amax = tl.load(Amax + head * D + d, mask=d < D, other=0.0)
    x = x.to(tl.float32) - mean[None, :]
    if SATURATE:
        # amax is OF_HIDDEN times that of the rows that count.
        x = saturate(x, amax[None, :] * (OF_HIDDEN_FP4 / OF_HIDDEN))
    x = tl.where(mask, x, 0.0)
    if ALONG_N:
        inverse, scale = power_of_two(abs_bits(amax))
        x_fp4, x_e4m3 = quantize_blocks((x * inverse[None, :]).T, False)
        # Not "& (block == 0)": Triton 3.9's interpreter takes no mask that a scalar is part of.
        tl.store(X_scale + head * D + d, scale, mask=d < tl.where(block == 0, D, 0))
        first, rows, columns = head * BLOCK_D, d, blocks * BLOCK_N
        column = block * BLOCK_N
    else:
        inverse, scale = power_of_two(tl.max(abs_bits(amax), 0))
        x_fp4, x_e4m3 = quantize_blocks(x * inverse, False)
        tl.store(X_scale + head, scale, mask=block == 0)
        first, rows, columns = (head * blocks + block) * BLOCK_N, i, BLOCK_D
        column = 0
    rows = (first + rows)[:, None] * columns + column
    tl.store(X_fp4 + rows // 2 + tl.arange(0, x_fp4.shape[1])[None, :], x_fp4)
    tl.store(X_e4m3 + rows // FP4_BLOCK + tl.arange(0, x_e4m3.shape[1])[None, :], x_e4m3)


def empty_nvfp4(x: Tensor, along_n: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for what `launch_nvfp4` gives."""
    B, H, N, D = x.shape
    shape = pad_rows(N), pad_head_dim(int(D))
    R, C = reversed(shape) if along_n else shape
    x_fp4 = x.new_empty((B, H, R, C // 2), dtype=torch.uint8)
    x_e4m3 = x.new_empty((B, H, R, C // FP4_BLOCK.value), dtype=torch.uint8)
    return x_fp4, x_e4m3, x.new_empty((B, H, D) if along_n else (B, H), dtype=torch.float32)


def launch_nvfp4(
    x: Tensor, mean: Tensor, amax: Tensor, along_n: bool, saturate: bool, run: Callable
) -> tuple[Tensor, Tensor, Tensor]:
    """k or (along_n) v [B, H, N, D], any strides, with mean and amax [B, H, D] fp32 of `smooth` ->
    k: x_fp4 [B, H, N_pad, D_pad / 2], x_e4m3 [B, H, N_pad, D_pad / 16], x_scale [B, H] fp32
    v: x_fp4 [B, H, D_pad, N_pad / 2], x_e4m3 [B, H, D_pad, N_pad / 16], x_scale [B, H, D] fp32
    with x - mean = x_fp4 * x_e4m3 * x_scale. saturate: some rows had no part in mean and amax."""
    B, H, N, D = x.shape
    D = int(D)  # a tile needs a number
    found = empty_nvfp4(x, along_n)
    run(
        _quantize_kernel,
        (B * H * (pad_rows(N) // ROWS),),
        (x, mean, amax, *found),
        (*doubled(x.stride()),
         H, N,  # shape
         along_n, saturate,  # semantics
         D, PAD_N, ROWS, pad_head_dim(D)),  # tile
    )  # fmt: skip
    return found
