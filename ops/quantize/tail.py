"""What stands for the keys that no block list names (SdpaCall.tail_block): of each TAIL keys, which
count, one key and one value, their means, in the codes of k and v; and how many they are.

    k_tail = codes of mean(k) - k_mean     as keys.py's, but each group of 64 has a scale of its own
    v_tail = e4m3((mean(v) - v_mean) / v_scale), or mean(v) in 16 bits
    bias   = log2(how many count), which a score is added to: softmax then weighs them all

Two launches: the means of k and v; then their codes, which the first is read through L2 for.
Shapes and layouts are formats.Tail's. All is within rounding of ops/reference/quantize.py.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from sage_inductor.ops.formats import (
    E4M3_MAX,
    K_BLOCK,
    PAD_N,
    Prepared,
    Tail,
    pad_head_dim,
    pad_rows,
)
from sage_inductor.ops.launch import doubled, visible_argument
from sage_inductor.ops.quantize.keys import quantize_k_block
from sage_inductor.ops.quantize.values import _load_v, _store_v
from sage_inductor.ops.recipe import Recipe
from sage_inductor.ops.reference.quantize import of_16_bits

_FP8_MAX = tl.constexpr(E4M3_MAX)


@triton.jit
def _pool_tail_kernel(
    X,  # [B, H, N, D] in
    Visible,  # [B or 1, H or 1, N] in, uint8: rows that count; if MASK
    Mean,  # [B, H, T, BLOCK_D] out, its pads 0
    Bias,  # Tail's, out
    stride_b, stride_h, stride_n, stride_d,
    stride_visible_b, stride_visible_h,
    H, N2, T_pad,  # N2: 2 N
    MASK: tl.constexpr, D: tl.constexpr, TAIL: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid: (B * H * T,). TAIL rows of one head."""
    N = N2 // 2
    pid, T = tl.program_id(0).to(tl.int64), tl.cdiv(N, TAIL)
    head, t = pid // T, pid % T
    n, d = t * TAIL + tl.arange(0, TAIL), tl.arange(0, BLOCK_D)
    shown = n < N
    if MASK:
        visible = Visible + head // H * stride_visible_b + head % H * stride_visible_h
        shown = shown & (tl.load(visible + n, mask=shown, other=0) != 0)
    x = X + head // H * (stride_b // 2) + head % H * (stride_h // 2)
    x = x + (n * (stride_n // 2))[:, None] + d.to(tl.int64)[None, :] * stride_d
    x = tl.load(x, mask=shown[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    count = tl.sum(shown.to(tl.int32), 0).to(tl.float32)
    mean = tl.sum(x, 0) / tl.maximum(count, 1.0)
    tl.store(Mean + pid * BLOCK_D + d, mean.to(Mean.dtype.element_ty))
    tl.store(Bias + head * T_pad + t, tl.log2(count))


@triton.jit
def _quantize_tail_kernel(
    K, V,  # [B, H, T, BLOCK_D], [B, H, T, BLOCK_DV] in, fp32: means; FP8: both
    K_mean, V_scale, V_mean,  # Prepared's, in
    K_8bit, K_scale, V_fp8,  # Tail's, out
    T2, D2, D2_V,  # doubled, as in _quantize_kv_kernel
    FP8: tl.constexpr, QK_MAX: tl.constexpr, ROTATED: tl.constexpr, GROUPS: tl.constexpr,
    K_BLOCK: tl.constexpr, PAD_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Grid: (B * H * num_blocks * 2,), without FP8 half of it. K_BLOCK rows of one head, of k and
    of v in turn."""
    pid, T = tl.program_id(0).to(tl.int64), T2 // 2
    kinds: tl.constexpr = 2 if FP8 else 1
    blocks = tl.cdiv(T, PAD_N) * (PAD_N // K_BLOCK)
    head, block = pid // kinds // blocks, pid // kinds % blocks
    if pid % kinds == 0:
        quantize_k_block(
            K + head * T * BLOCK_D, K_mean, K, K_8bit, K_scale, BLOCK_D, 1, head, block, blocks,
            T, D2 // 2, False, QK_MAX, ROTATED, GROUPS, False, K_BLOCK, BLOCK_D,
        )  # fmt: skip
    elif FP8:
        channels, d = D2_V // 2, tl.arange(0, BLOCK_DV)
        of_head = head * channels + d
        x, _, _ = _load_v(
            V + head * T * BLOCK_DV, BLOCK_DV, 1, block, T2, channels, K_BLOCK, BLOCK_DV
        )
        amax = tl.load(V_scale + of_head, mask=d < channels, other=1.0) * _FP8_MAX
        x = x - tl.load(V_mean + of_head, mask=d < channels, other=0.0)[None, :]
        _store_v(x, amax, V_fp8, head, block, blocks * K_BLOCK, False, K_BLOCK, BLOCK_DV)


def empty_tail(k: Tensor, v: Tensor, recipe: Recipe, block: int) -> Tail:
    """Memory for what stands for each `block` keys of k and v [B, H, N, D]."""
    (B, H, N, D), qk, D_v = k.shape, recipe.of_qk, pad_head_dim(int(v.shape[3]))
    T = triton.cdiv(N, block)
    T_pad, groups = pad_rows(T), recipe.sharing.k_groups
    of_v = (T, D_v), of_16_bits(v)
    if recipe.of_pv.dtype is not None:
        of_v = (D_v, T_pad), recipe.of_pv.dtype
    return Tail(
        k.new_empty((B, H, T_pad, pad_head_dim(int(D))), dtype=qk.dtype),
        k.new_empty((B, H, T_pad // K_BLOCK, groups), dtype=torch.float32),
        v.new_empty((B, H, *of_v[0]), dtype=of_v[1]),
        k.new_empty((B, H, T_pad), dtype=torch.float32),
    )


def launch_tail(
    k: Tensor, v: Tensor, prepared: Prepared, visible: Tensor | None, recipe: Recipe, block: int,
    run: Callable,
) -> Tail:  # fmt: skip
    """k and v [B, H, N, D], any strides, of which `prepared` was made. Rows that are not `visible`,
    as in launch_prepare, have no part in it and may hold anything."""
    tail, fp8 = empty_tail(k, v, recipe, block), recipe.of_pv.dtype is not None
    (B, H, N, _), (T_pad, BLOCK_D) = k.shape, tail.k.shape[2:]
    T, BLOCK_DV = triton.cdiv(N, block), pad_head_dim(int(v.shape[3]))
    k_means = k.new_empty((B, H, T, BLOCK_D), dtype=torch.float32)
    v_means = k.new_empty((B, H, T, BLOCK_DV), dtype=torch.float32) if fp8 else tail.v
    rows, row_strides = visible_argument(visible, k.shape, prepared.k_mean)
    for x, means in ((k, k_means), (v, v_means)):
        run(
            _pool_tail_kernel,
            (B * H * T,),
            (x, rows, means, tail.bias),
            (*doubled(x.stride()), *row_strides,
             H, 2 * N, T_pad,  # shape
             visible is not None,  # semantics
             int(x.shape[3]), block, pad_head_dim(int(x.shape[3]))),  # tile
        )  # fmt: skip
    run(
        _quantize_tail_kernel,
        (B * H * (T_pad // K_BLOCK) * (1 + fp8),),
        (k_means, v_means, prepared.k_mean, prepared.v_scale, prepared.v_mean, tail.k,
         tail.k_scale, tail.v),
        (2 * T, 2 * int(k.shape[3]), 2 * int(v.shape[3]),  # shape
         fp8, recipe.of_qk.largest, recipe.rotated, recipe.sharing.k_groups,  # semantics
         K_BLOCK, PAD_N, BLOCK_D, BLOCK_DV),  # tile
    )  # fmt: skip
    return tail
