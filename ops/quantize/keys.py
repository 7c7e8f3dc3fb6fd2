"""Quantization of k, in the layout the attention kernels read.

    codes = round((k - k_mean) / k_scale)      k_scale = amax of the group / 127, INT4: / 7
         or e4m3((k - k_mean) / k_scale)       k_scale = amax of the group / 448

Where the recipe rotates, (k - k_mean) / 2 is rounded to 16 bits and rotated before (rotate.py).

k_mean is smooth.py's: of all rows, or estimated from a sample of them; any is exact.
Rows that do not count saturate. Where a group has no other they have a scale of their own: a row of
nothing but fp16's lowest number sees them, and fp32 holds their scores beside it.
Shapes and layouts are those of ops/reference/quantize.py, to which all is bit-equal.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from sage_inductor.ops.compat import gdc_wait
from sage_inductor.ops.constants import FP8_MAX, INF_BITS, INT4_MAX, TINY
from sage_inductor.ops.formats import K_BLOCK, PAD_N, pad_head_dim, pad_rows
from sage_inductor.ops.launch import doubled, pdl_option, visible_argument
from sage_inductor.ops.layout import is_token, token_of
from sage_inductor.ops.quantize.codes import abs_bits, saturate, scale_of, store_means, to_8bit
from sage_inductor.ops.quantize.rotate import in_16_bits, rotate
from sage_inductor.ops.recipe import Recipe


@triton.jit
def _of_groups(amax, GROUPS: tl.constexpr):
    """amax [K_BLOCK] of rows -> [GROUPS]."""
    if GROUPS == 4:
        return tl.max(tl.max(amax.reshape([amax.shape[0] // 8, 4, 2]), 2), 0)
    else:
        return tl.max(amax, 0, keep_dims=True)


@triton.jit
def quantize_k_block(
    K, K_mean, visible, Perm, K_8bit, K_scale, stride_n, stride_d, head, block, blocks, N, channels,
    MASK: tl.constexpr, QK_MAX: tl.constexpr, ROTATED: tl.constexpr, GROUPS: tl.constexpr,
    PDL: tl.constexpr, K_BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    Mean=None, Count=None, T=0, T_pad=0, TAIL: tl.constexpr = 0, of_mean=None,
):  # fmt: skip
    """K_BLOCK rows of a head, the block-th of `blocks`; K and visible point to its first row. With
    TAIL `store_means` of them, too. of_mean: the head's in K_mean, where that is another."""
    n = block * K_BLOCK + tl.arange(0, K_BLOCK)
    d = tl.arange(0, BLOCK_D)
    token = token_of(Perm, n, N)
    mask = is_token(Perm, token, n, N)[:, None] & (d < channels)[None, :]
    x = K + token[:, None] * stride_n + d.to(tl.int64)[None, :] * stride_d
    x = tl.load(x, mask=mask, other=0.0)
    if PDL:
        gdc_wait()
    if TAIL:
        counts = tl.load(visible + n, mask=n < N, other=0) != 0
        store_means(x, counts, Mean, Count, head, block, T, T_pad, TAIL, BLOCK_D)
    of_head = head
    if of_mean is not None:
        of_head = of_mean
    mean = tl.load(K_mean + of_head * channels + d, mask=d < channels, other=0.0)
    x = tl.where(mask, x.to(tl.float32) - mean[None, :], 0.0)
    if ROTATED:
        x = rotate(in_16_bits(0.5 * x, K), K_BLOCK, BLOCK_D)

    of_row = tl.max(abs_bits(x), 1)  # [K_BLOCK]
    amax = _of_groups(of_row, GROUPS)
    if MASK:
        shown = tl.load(visible + n, mask=n < N, other=0) != 0
        of_hidden = _of_groups(tl.where(of_row < INF_BITS, of_row, 0), GROUPS)
        amax = _of_groups(tl.where(shown, of_row, 0), GROUPS)
        amax = tl.where(amax == 0, of_hidden, amax)
    group = head * blocks + block
    inverse, scale = scale_of(amax, QK_MAX)
    tl.store(K_scale + group * GROUPS + tl.arange(0, GROUPS), scale)
    if GROUPS == 4:
        amax = amax.expand_dims(1).expand_dims(0).broadcast_to([K_BLOCK // 8, 4, 2])
        amax = amax.reshape([K_BLOCK])
        inverse = inverse.expand_dims(1).expand_dims(0).broadcast_to([K_BLOCK // 8, 4, 2])
        inverse = inverse.reshape([K_BLOCK])
    if MASK:
        amax = amax.to(tl.float32, bitcast=True)
        x = saturate(x, tl.where(amax < TINY, TINY, amax)[:, None])
    x_8bit = to_8bit(x, inverse[:, None], QK_MAX)
    rows = group * K_BLOCK + tl.arange(0, K_BLOCK)
    if QK_MAX == INT4_MAX:  # reference.pack
        low, high = tl.split(x_8bit.to(tl.uint8, bitcast=True).reshape([K_BLOCK, BLOCK_D // 2, 2]))
        d = tl.arange(0, BLOCK_D // 2)
        tl.store(K_8bit + rows[:, None] * (BLOCK_D // 2) + d[None, :], low & 15 | high << 4)
    else:
        tl.store(K_8bit + rows[:, None] * BLOCK_D + d[None, :], x_8bit)


@triton.jit
def _quantize_k_kernel(
    K,  # [B, H, N, D] in
    K_mean,  # [B, H, D] in, fp32
    Visible,  # [B or 1, H or 1, N] in, uint8: rows that have a part in the scales; if MASK
    Perm,  # int32 [N] in or None: layout.py
    K_8bit,  # [B, H, N_pad, BLOCK_D] out, INT4: BLOCK_D / 2
    K_scale,  # [B, H, N_pad / K_BLOCK, GROUPS] out, fp32
    stride_b, stride_h, stride_n, stride_d,
    stride_visible_b, stride_visible_h,
    H, N2, D2,  # N2: 2 N, D2: 2 D
    MASK: tl.constexpr, QK_MAX: tl.constexpr, ROTATED: tl.constexpr, PDL: tl.constexpr,
    D: tl.constexpr, GROUPS: tl.constexpr, K_BLOCK: tl.constexpr, PAD_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid: (B * H * num_blocks,). K_BLOCK rows of one head.

    N2: see _quantize_v_kernel; D2: of padded channels that are known when compiling, ptxas wrote
    garbage to FP8 where zeros belong (D = 8, sm_90).
    """
    N, channels = N2 // 2, D
    if QK_MAX == FP8_MAX:
        channels = D2 // 2
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(N, PAD_N) * (PAD_N // K_BLOCK)
    head, block = pid // blocks, pid % blocks
    quantize_k_block(
        K + head // H * (stride_b // 2) + head % H * (stride_h // 2), K_mean,
        Visible + head // H * stride_visible_b + head % H * stride_visible_h, Perm, K_8bit,
        K_scale, stride_n // 2, stride_d, head, block, blocks, N, channels, MASK, QK_MAX, ROTATED,
        GROUPS, PDL, K_BLOCK, BLOCK_D,
    )  # fmt: skip


def empty_k(k: Tensor, recipe: Recipe, perm: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Memory for the codes and scales of k [B, H, N, D], or as many rows as perm has."""
    B, H, N, D = k.shape
    N = N if perm is None else perm.shape[0]
    qk, N_pad = recipe.of_qk, pad_rows(N)
    codes = k.new_empty((B, H, N_pad, pad_head_dim(int(D)) // qk.packed), dtype=qk.dtype)
    groups = recipe.sharing.k_groups
    return codes, k.new_empty((B, H, N_pad // K_BLOCK, groups), dtype=torch.float32)


def launch_k(
    k: Tensor, k_mean: Tensor, recipe: Recipe, visible: Tensor | None, run: Callable,
    pdl: bool = False, perm: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """k [B, H, N, D], any strides, k_mean [B, H, D] fp32 -> codes, k_scale: Prepared's. visible,
    perm: as in op.py's launch_prepare."""
    B, H, N, D = k.shape
    D = int(D)  # a tile needs a number
    codes, k_scale = empty_k(k, recipe)
    rows, row_strides = visible_argument(visible, k.shape, k_mean)
    run(
        _quantize_k_kernel,
        (B * H * k_scale.shape[2],),
        (k, k_mean, rows, perm, codes, k_scale),
        (*doubled(k.stride()), *row_strides,
         H, 2 * N, 2 * D,  # shape
         visible is not None, recipe.of_qk.largest, recipe.rotated, pdl,  # semantics
         D, recipe.sharing.k_groups, K_BLOCK, PAD_N, pad_head_dim(D)),  # tile
        **pdl_option(pdl),
    )  # fmt: skip
    return codes, k_scale
