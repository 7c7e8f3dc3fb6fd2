"""Rounding to the formats' codes, as the kernels of the preparation and of attention do it."""

import triton
import triton.language as tl

from sage_inductor.ops.constants import FP8_MAX, TINY

_ROUND = tl.constexpr(12582914.0)  # 1.5 * 2^23 + 2: what is added to it is rounded to an integer


@triton.jit
def abs_bits(x):
    """|x| as an integer of the same order, NaN above everything: a max that keeps NaN for free."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(amax_bits, QK_MAX: tl.constexpr):
    """What divides a group by its scale, and the scale; NaN for a group with a NaN or an Inf."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    amax = tl.where(amax < TINY, TINY, amax)
    scale = tl.where(amax < float("inf"), amax * (1.0 / QK_MAX), float("nan"))
    return tl.div_rn(tl.full(amax.shape, QK_MAX, tl.float32), amax), scale


@triton.jit
def to_8bit(x, inverse, QK_MAX: tl.constexpr):
    """x * inverse, to nearest even: to integers rounded once; to E4M3 from the product in fp32."""
    if QK_MAX == FP8_MAX:
        return (x * inverse).to(tl.float8e4nv)
    else:
        # The low byte of the sum is the rounded product + 2: no conversion, which runs at 1/8
        # speed. The 2 is there to be taken off: of a sum whose own low byte is stored the ptxas of
        # CUDA 12.8 stores F2IP.U8, 255 for any number, where a thread has single bytes of a row.
        rounded = tl.fma(x, inverse.broadcast_to(x.shape), tl.full(x.shape, _ROUND, tl.float32))
        return (rounded.to(tl.int32, bitcast=True) - 2).to(tl.int8)


@triton.jit
def saturate(x, amax):
    """x within +-amax, where amax is a number; NaN becomes a number too."""
    saturated = tl.minimum(tl.maximum(x, -amax), amax)
    return tl.where(amax == amax, saturated, x)


@triton.jit
def store_means(
    x, shown, Mean, Count, head, block, T, T_pad, TAIL: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """x [rows, BLOCK_D], the block-th such rows of a head -> of each TAIL of them the mean of those
    that are `shown` [rows], Mean [B, H, T, BLOCK_D], and log2 of how many, Count [B, H, T_pad]."""
    PARTS: tl.constexpr = x.shape[0] // TAIL
    x = tl.where(shown[:, None], x.to(tl.float32), 0.0).reshape([PARTS, TAIL, BLOCK_D])
    count = tl.sum(shown.to(tl.int32).reshape([PARTS, TAIL]), 1).to(tl.float32)
    mean = tl.sum(x, 1) / tl.maximum(count, 1.0)[:, None]
    t, d = block * PARTS + tl.arange(0, PARTS), tl.arange(0, BLOCK_D)
    out = Mean + (head * T + t)[:, None] * BLOCK_D + d[None, :]
    tl.store(out, mean.to(Mean.dtype.element_ty), mask=(t < T)[:, None])
    tl.store(Count + head * T_pad + t, tl.log2(count), mask=t < T)
