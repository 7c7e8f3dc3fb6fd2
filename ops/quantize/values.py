"""Quantization of v to FP8, transposed, in the layout the attention kernels read.

    v_fp8 = e4m3((v - v_mean) / v_scale)       v_scale = amax of the channel / 448

v_mean and v_amax are smooth.py's: of all rows, or estimated from a sample of them. Any mean is
exact, but a scale that is too small is not: with an estimated v_amax, blocks look for rows beyond
it, and `quantize_v_again_kernel` does the heads that have any again, with the amax of all rows.
Rows that do not count saturate, at OF_HIDDEN times the amax of those that do: a power of two, by
which no significant bit of these is lost.
Shapes and layouts are those of ops/reference/quantize.py, to which all is bit-equal.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from sage_inductor.ops.compat import gdc_wait
from sage_inductor.ops.constants import FP8_MAX, OF_HIDDEN, TINY
from sage_inductor.ops.formats import PAD_N, Format, pad_head_dim, pad_rows
from sage_inductor.ops.launch import doubled
from sage_inductor.ops.layout import is_token, span_of, token_of
from sage_inductor.ops.quantize.codes import abs_bits, saturate, store_means
from sage_inductor.ops.recipe import Recipe


@triton.jit
def _load_v(
    V, Perm, stride_n, stride_d, block, N2, channels,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """(v, its rows n, which of them and of its channels there are), interleaved."""
    column = tl.arange(0, BLOCK_N)
    # Column (quad, half, pair) of each 16 holds token (half, quad, pair): reference.interleave.
    token = (column & ~15) | (column & 2) << 2 | (column & 12) >> 1 | (column & 1)
    n = block * BLOCK_N + token
    d = tl.arange(0, BLOCK_D)
    row = token_of(Perm, n, N2 // 2)
    mask = is_token(Perm, row, 2 * n, N2)[:, None] & (d < channels)[None, :]
    row = row.to(tl.int64)
    v = V + row[:, None] * stride_n + d.to(tl.int64)[None, :] * stride_d
    return tl.load(v, mask=mask, other=0.0).to(tl.float32), n, mask


@triton.jit
def _store_v(
    x, amax, V_fp8, head, block, N_pad,
    SATURATE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """x [BLOCK_N, BLOCK_D], as _load_v gives it, by amax [BLOCK_D] -> V_fp8, transposed."""
    if SATURATE:
        x = saturate(x, amax[None, :])
    x = x * tl.div_rn(tl.full([BLOCK_D], FP8_MAX, tl.float32), amax)[None, :]
    rows = head * BLOCK_D + tl.arange(0, BLOCK_D)
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    out = V_fp8 + rows[:, None] * N_pad + columns[None, :]
    tl.store(out, x.to(tl.float8e4nv).T)


@triton.jit
def quantize_v_block(
    V, V_mean, V_amax, visible, Perm, Beyond, V_fp8, V_scale, stride_n, stride_d, head, block,
    blocks, N2, channels,
    MASK: tl.constexpr, SATURATE: tl.constexpr, CHECK: tl.constexpr, PDL: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    Mean=None, Count=None, T=0, T_pad=0, TAIL: tl.constexpr = 0, of_mean=None, first=0,
):  # fmt: skip
    """BLOCK_N rows of a head, the block-th of `blocks`; V and visible point to its first row. With
    TAIL `store_means` of them, too. With CHECK, Beyond of the head becomes 1 where V_amax is too
    small for any of them. of_mean: the head's place in V_mean, V_amax, Beyond and V_scale, where
    that is another, and first: which block stores V_scale."""
    of_head = head
    if of_mean is not None:
        of_head = of_mean
    d = tl.arange(0, BLOCK_D)
    x, n, mask = _load_v(V, Perm, stride_n, stride_d, block, N2, channels, BLOCK_N, BLOCK_D)
    if PDL:
        gdc_wait()
    if TAIL:  # rows in another order, but within sixteens
        counts = tl.load(visible + n, mask=2 * n < N2, other=0) != 0
        store_means(x, counts, Mean, Count, head, block, T, T_pad, TAIL, BLOCK_D)
    amax = tl.load(V_amax + of_head * channels + d, mask=d < channels, other=1.0)
    amax = tl.where(amax < TINY, TINY, amax)
    mean = tl.load(V_mean + of_head * channels + d, mask=d < channels, other=0.0)
    x = x - mean[None, :]
    if CHECK:
        if MASK:
            mask = mask & (tl.load(visible + n, mask=2 * n < N2, other=0) != 0)[:, None]
        beyond = tl.max((mask & ~(tl.abs(x) <= amax[None, :])).to(tl.int32))  # so is NaN
        tl.store(Beyond + of_head, 1, mask=beyond != 0)
    _store_v(x, amax, V_fp8, head, block, blocks * BLOCK_N, SATURATE, BLOCK_N, BLOCK_D)
    if block == first:
        tl.store(V_scale + of_head * channels + d, amax * (1.0 / FP8_MAX), mask=d < channels)


@triton.jit
def quantize_v_again_kernel(
    V, V_mean, Visible, Perm, Spans, Beyond, V_fp8, V_scale,  # as _quantize_kv_kernel's
    stride_b, stride_h, stride_n, stride_d,
    stride_visible_b, stride_visible_h,
    H, N2, D2,
    MASK: tl.constexpr, PDL: tl.constexpr,
    PAD_N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid: (B * H,), or of all documents. All rows of a head with rows beyond the estimated amax,
    by their own."""
    if PDL:
        gdc_wait()
    of_head = tl.program_id(0).to(tl.int64)
    head = of_head
    if Spans is not None:
        head = of_head % H
    channels = D2 // 2
    visible = Visible + head // H * stride_visible_b + head % H * stride_visible_h
    v = V + head // H * (stride_b // 2) + head % H * (stride_h // 2)
    stride_n = stride_n // 2
    N_pad = tl.cdiv(N2, 2 * PAD_N) * PAD_N
    d = tl.arange(0, BLOCK_D)
    if tl.load(Beyond + of_head) != 0:
        first, end = 0, N_pad // BLOCK_N
        if Spans is not None:
            place, length = span_of(Spans, of_head // H)
            first = place // BLOCK_N
            end = first + tl.cdiv(length, PAD_N) * (PAD_N // BLOCK_N)
        mean = tl.load(V_mean + of_head * channels + d, mask=d < channels, other=0.0)
        bits = tl.zeros([BLOCK_D], tl.int32)
        for i in tl.range(first, end, num_stages=1):
            x, n, mask = _load_v(v, Perm, stride_n, stride_d, i, N2, channels, BLOCK_N, BLOCK_D)
            if MASK:
                mask = mask & (tl.load(visible + n, mask=2 * n < N2, other=0) != 0)[:, None]
            bits = tl.maximum(bits, tl.max(tl.where(mask, abs_bits(x - mean[None, :]), 0), 0))
        amax = bits.to(tl.float32, bitcast=True) * (OF_HIDDEN if MASK else 1.0)
        amax = tl.where(amax < TINY, TINY, amax)
        tl.store(V_scale + of_head * channels + d, amax * (1.0 / FP8_MAX), mask=d < channels)
        for i in tl.range(first, end, num_stages=1):
            x, _, _ = _load_v(v, Perm, stride_n, stride_d, i, N2, channels, BLOCK_N, BLOCK_D)
            _store_v(x - mean[None, :], amax, V_fp8, head, i, N_pad, MASK, BLOCK_N, BLOCK_D)


@triton.jit
def _quantize_v_kernel(
    V,  # [B, H, N, D] in
    V_mean, V_amax,  # [B, H, D] in, fp32
    Perm,  # int32 [N] in or None: layout.py
    V_fp8,  # [B, H, BLOCK_D, N_pad] out
    V_scale,  # [B, H, D] out, fp32
    stride_b, stride_h, stride_n, stride_d,
    H, N2,  # N2: 2 N
    SATURATE: tl.constexpr,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid: (B * H * num_blocks,). Transposes and interleaves BLOCK_N rows of one head.

    The length comes doubled because Triton makes a constant of an argument that is 1. Then padded
    tokens are known to be equal, and the ptxas of CUDA 12.8 (Triton 3.6) emits for a pair of equal
    operands a conversion to FP8 that merges with an unrelated register.
    """
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(N2, 2 * BLOCK_N)
    head, block = pid // blocks, pid % blocks
    quantize_v_block(
        V + head // H * (stride_b // 2) + head % H * (stride_h // 2), V_mean, V_amax, V, Perm, V,
        V_fp8, V_scale, stride_n // 2, stride_d, head, block, blocks, N2, D, False, SATURATE, False,
        False, BLOCK_N, BLOCK_D,
    )  # fmt: skip


def empty_v(
    v: Tensor, pv: Format, perm: Tensor | None = None, spans: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Memory for the codes of v [B, H, N, D], or of perm's rows, and for the scales, of all rows or
    of each document."""
    B, H, N, D = v.shape
    N = pad_rows(N if perm is None else perm.shape[0])
    codes = v.new_empty((B, H, pad_head_dim(int(D)), N), dtype=pv.dtype)
    return codes, v.new_empty((B if spans is None else spans.shape[0], H, D), dtype=torch.float32)


def launch_v(
    v: Tensor, v_mean: Tensor, v_amax: Tensor, recipe: Recipe, saturate: bool, run: Callable,
    perm: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """v [B, H, N, D], any strides, v_mean and v_amax [B, H, D] fp32 -> codes (tokens interleaved in
    sixteens), v_scale: Prepared's. saturate: some rows had no part in v_mean and v_amax. perm: as
    in op.py's launch_prepare."""
    B, H, N, D = v.shape
    D = int(D)
    codes, v_scale = empty_v(v, recipe.of_pv)
    run(
        _quantize_v_kernel,
        (B * H * triton.cdiv(N, PAD_N),),
        (v, v_mean, v_amax, perm, codes, v_scale),
        (*doubled(v.stride()),
         H, 2 * N,  # shape
         saturate,  # semantics
         D, PAD_N, pad_head_dim(D)),  # tile
    )  # fmt: skip
    return codes, v_scale
