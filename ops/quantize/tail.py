"""What stands for the keys that no block list names (BlockLists.tail_block): of each TAIL keys, of
which some count, one key and one value, their means; and how many they are.

    tail_k    = codes of mean(k) - k_mean     as keys.py's; 64 means share a scale
    tail_v    = e4m3((mean(v) - v_mean) / v_scale), or mean(v) in 16 bits
    tail_bias = log2(how many count)

The kernel that quantizes k and v in one pass makes the means; elsewhere one of their own does.
All is within rounding of ops/reference/quantize.py.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from sage_inductor.ops.constants import FP8_MAX
from sage_inductor.ops.formats import K_BLOCK, PAD_N, Prepared, pad_head_dim, pad_rows
from sage_inductor.ops.launch import doubled, visible_argument
from sage_inductor.ops.layout import ordered
from sage_inductor.ops.quantize.codes import store_means
from sage_inductor.ops.quantize.keys import quantize_k_block
from sage_inductor.ops.quantize.one_pass import Means
from sage_inductor.ops.quantize.values import _load_v, _store_v
from sage_inductor.ops.recipe import Recipe
from sage_inductor.ops.reference.quantize import of_16_bits


@triton.jit
def _mean_kernel(
    X,  # [B, H, N, D] in
    Visible,  # [B or 1, H or 1, N] in, uint8: rows that count
    Mean, Count,  # as codes.store_means has them, out
    stride_b, stride_h, stride_n, stride_d,
    stride_visible_b, stride_visible_h,
    H, N2, T_pad,  # N2: 2 N
    D: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid: (B * H * cdiv(N, ROWS),). ROWS rows of one head."""
    N = N2 // 2
    pid, blocks = tl.program_id(0).to(tl.int64), tl.cdiv(N, ROWS)
    head, block = pid // blocks, pid % blocks
    n, d = block * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    visible = Visible + head // H * stride_visible_b + head % H * stride_visible_h
    shown = tl.load(visible + n, mask=n < N, other=0) != 0
    x = X + head // H * (stride_b // 2) + head % H * (stride_h // 2)
    x = x + (n * (stride_n // 2))[:, None] + d.to(tl.int64)[None, :] * stride_d
    x = tl.load(x, mask=shown[:, None] & (d < D)[None, :], other=0.0)
    store_means(x, shown, Mean, Count, head, block, tl.cdiv(N, TAIL), T_pad, TAIL, BLOCK_D)


@triton.jit
def _quantize_tail_kernel(
    K, V,  # [B, H, T, BLOCK_D], [B, H, T, BLOCK_DV] in, fp32: means; FP8: both
    K_mean, V_scale, V_mean,  # Prepared's, in
    K_8bit, K_scale, V_fp8,  # its tail's, out
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
            K + head * T * BLOCK_D, K_mean, K, None, K_8bit, K_scale, BLOCK_D, 1, head, block,
            blocks, T, D2 // 2, False, QK_MAX, ROTATED, GROUPS, False, K_BLOCK, BLOCK_D,
        )  # fmt: skip
    elif FP8:
        channels, d = D2_V // 2, tl.arange(0, BLOCK_DV)
        of_head = head * channels + d
        x, _, _ = _load_v(
            V + head * T * BLOCK_DV, None, BLOCK_DV, 1, block, T2, channels, K_BLOCK, BLOCK_DV
        )
        amax = tl.load(V_scale + of_head, mask=d < channels, other=1.0) * FP8_MAX
        x = x - tl.load(V_mean + of_head, mask=d < channels, other=0.0)[None, :]
        _store_v(x, amax, V_fp8, head, block, blocks * K_BLOCK, False, K_BLOCK, BLOCK_DV)


def launch_means(
    k: Tensor, v: Tensor, visible: Tensor, recipe: Recipe, block: int, run: Callable,
    perm: Tensor | None = None,
) -> Means:  # fmt: skip
    """Those of each `block` rows of k and v [B, H, N, D], any strides; of the `visible` ones, as in
    launch_prepare, as the others may hold anything. Memory for them where one pass makes them.
    perm: as in launch_prepare."""
    (B, H, N, D), quantizes_v = k.shape, recipe.of_pv.dtype is not None
    T, rows, D_v = (N + block - 1) // block, visible_argument(visible, k.shape, k), int(v.shape[3])
    of_k, of_v = (B, H, T, pad_head_dim(int(D))), (B, H, T, pad_head_dim(D_v))
    means = Means(
        k.new_empty(of_k, dtype=torch.float32),
        v.new_empty(of_v, dtype=torch.float32 if quantizes_v else of_16_bits(v)),
        k.new_empty((B, H, pad_rows(T)), dtype=torch.float32), block,
    )  # fmt: skip
    for x, mean in ((k, means.k), (v, means.v)):
        if not (quantizes_v and recipe.sharing.one_pass):
            x = ordered(x, perm) if quantizes_v or mean is means.k else x
            run(
                _mean_kernel,
                (B * H * ((N + K_BLOCK - 1) // K_BLOCK),),
                (x, rows[0], mean, means.count),
                (*doubled(x.stride()), *rows[1], H, 2 * N, pad_rows(T),  # shape
                 int(x.shape[3]), block, K_BLOCK, int(mean.shape[3])),  # tile
            )  # fmt: skip
    return means


def launch_tail(prepared: Prepared, means: Means, recipe: Recipe, run: Callable) -> Prepared:
    """prepared, of the same k and v as means, with a tail."""
    (B, H, T, BLOCK_D), BLOCK_DV = means.k.shape, means.v.shape[3]
    T_pad, groups, fp8 = pad_rows(T), recipe.sharing.k_groups, prepared.v is not None
    k = means.k.new_empty((B, H, T_pad, BLOCK_D), dtype=recipe.of_qk.dtype)
    k_scale = means.k.new_empty((B, H, T_pad // K_BLOCK, groups), dtype=torch.float32)
    v, D_v = means.v, 0
    if fp8:
        v = v.new_empty((B, H, BLOCK_DV, T_pad), dtype=recipe.of_pv.dtype)
        D_v = int(prepared.v_mean.shape[2])
    run(
        _quantize_tail_kernel,
        (B * H * (T_pad // K_BLOCK) * (1 + fp8),),
        (means.k, means.v, prepared.k_mean, prepared.v_scale, prepared.v_mean, k, k_scale, v),
        (2 * T, 2 * int(prepared.k_mean.shape[2]), 2 * D_v,  # shape
         fp8, recipe.of_qk.largest, recipe.rotated, groups,  # semantics
         K_BLOCK, PAD_N, int(BLOCK_D), int(BLOCK_DV)),  # tile
    )  # fmt: skip
    return prepared._replace(tail_k=k, tail_k_scale=k_scale, tail_v=v, tail_bias=means.count)
