"""SageAttention3: q, k, p and v in 4 bits (NVFP4), in Triton.

    s = (phi(q - q_mean) phi(k - k_mean)^T + delta) * scale * log2 e
    delta = q_mean (k - k_mean)^T               q_mean is that of each 128 rows: quantize/smooth.py
    p = exp2(s - m_tile) * 448 * 6                m_tile is the row's maximum in the tile
    o = (sum over tiles of exp2(m_tile - m) phi(p) phi(v - v_mean)) / l + v_mean
    l = sum over tiles of exp2(m_tile - m) p      lse as in triton.py

* phi: quantize/nvfp4.py.
* Two-level p: a row of p in a tile is brought to the largest number that phi holds, so that its
  scales use all of E4M3.
* Bands, masks and rows that see nothing: as in triton.py.

Source: SageAttention3 (arXiv:2505.11594). NATIVE was compiled for sm_100 and sm_120, never run.
Shapes: B batch, H_q and H_kv heads, N_q and N_kv sequence, D head_dim.
"""

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from sage_inductor.ops.attention.large_scores import shift_of
from sage_inductor.ops.attention.tiles import Tile
from sage_inductor.ops.attention.visible_tiles import (
    EDGE,
    FULL,
    LEFT_EDGE,
    heads_of,
    hide,
    tiles_in_sight,
    tiles_of,
)
from sage_inductor.ops.attention_call import AttentionCall
from sage_inductor.ops.constants import FP4_BLOCK, LN2, LOG2_FP4_MAX, LOG2E, Q_BLOCK
from sage_inductor.ops.formats import pad_head_dim
from sage_inductor.ops.launch import doubled
from sage_inductor.ops.quantize.codes import abs_bits
from sage_inductor.ops.quantize.nvfp4 import block_scaled_dot, power_of_two, quantize_blocks

# Rows of k: the codes of one head are addressed by 32 bits. By 64 the loop spills a tenth more
# (sm_100, a window, head_dim 128: 376 bytes a thread, not 312).
MAX_KEYS = 2**24


@triton.jit
def _attention_kernel(
    Q,  # [B, H_q, N_q, D] in
    K, K_e4m3, K_scale,  # [B, H_kv, N_pad, BLOCK_D / 2], [.., BLOCK_D / 16], [B, H_kv]
    V, V_e4m3,  # [B, H_kv, BLOCK_DV, N_pad / 2], [.., N_pad / 16]
    V_scale, V_mean,  # [B, H_kv, D_V]
    Q_mean, Delta,  # [B, H_q, T, D], [B, H_q, T, N_pad], bf16; T: blocks of 128 rows and one more
    Mask, Seen,  # as in triton.py
    Out, Lse,  # [B, H_q, N_q, D_V], [B, H_q, N_q] fp32
    stride_qb, stride_qh, stride_qn, stride_qd,
    stride_mb, stride_mh, stride_mm, stride_mn,
    stride_sb, stride_sh, stride_sm,
    stride_ob, stride_oh, stride_on,
    H_q, H_kv, N_q, N_kv, N_pad,
    D: tl.constexpr, D_V: tl.constexpr, SCALE: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
    MASK: tl.constexpr, ADDITIVE: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Grid: (B * H_q * cdiv(N_q, BLOCK_M),): BLOCK_M rows of one head, BLOCK_M a divisor of 128."""
    MAY_BE_EMPTY: tl.constexpr = MASK > 0 or LEFT >= 0 or BOTTOM_RIGHT  # rows that see no key
    FIRST_PART: tl.constexpr = EDGE if MASK > 0 else (LEFT_EDGE if LEFT >= 0 else FULL)
    stride_qb, stride_qh, stride_qn = stride_qb // 2, stride_qh // 2, stride_qn // 2
    stride_ob, stride_oh, stride_on = stride_ob // 2, stride_oh // 2, stride_on // 2
    num_tiles = tl.cdiv(N_q, BLOCK_M)
    head, tile = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles
    if RIGHT >= 0:
        tile = num_tiles - 1 - tile
    b, h, _, head_kv, head = heads_of(head, H_q, H_kv)
    row0 = tile * BLOCK_M
    rows = row0 + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    n = tl.arange(0, BLOCK_N)

    # -- q: load, smooth and quantize ----
    mask_q = (rows < N_q)[:, None] & (d < D)[None, :]
    q = Q + b * stride_qb + h * stride_qh
    q = q + rows.to(tl.int64)[:, None] * stride_qn + d.to(tl.int64)[None, :] * stride_qd
    q = tl.load(q, mask=mask_q, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_D]
    block = head * (tl.cdiv(N_q, Q_BLOCK) + 1) + row0 // Q_BLOCK
    q_mean = tl.load(Q_mean + block * D + d, mask=d < D, other=0.0).to(tl.float32)
    q = tl.where(mask_q, q - q_mean[None, :], 0.0)
    inverse, q_scale = power_of_two(tl.max(abs_bits(q), 1))
    q_fp4, q_e4m3 = quantize_blocks(q * inverse[:, None], NATIVE)
    c = q_scale * (tl.load(K_scale + head_kv) * (SCALE * LOG2E))  # [BLOCK_M]

    # -- where k and v are ----
    K += head_kv * N_pad * (BLOCK_D // 2)
    K_e4m3 += head_kv * N_pad * (BLOCK_D // FP4_BLOCK)
    V += head_kv * BLOCK_DV * (N_pad // 2)
    V_e4m3 += head_kv * BLOCK_DV * (N_pad // FP4_BLOCK)
    k_ptrs = K + n[:, None] * (BLOCK_D // 2) + tl.arange(0, BLOCK_D // 2)[None, :]
    k_e4m3_ptrs = n[:, None] * (BLOCK_D // FP4_BLOCK) + tl.arange(0, BLOCK_D // FP4_BLOCK)[None, :]
    k_e4m3_ptrs = K_e4m3 + k_e4m3_ptrs
    v_ptrs = V + dv.to(tl.int64)[:, None] * (N_pad // 2) + tl.arange(0, BLOCK_N // 2)[None, :]
    n_e4m3 = tl.arange(0, BLOCK_N // FP4_BLOCK)[None, :]
    v_e4m3_ptrs = V_e4m3 + (dv.to(tl.int64)[:, None] * (N_pad // FP4_BLOCK) + n_e4m3)
    Delta += block * N_pad
    mask_ptrs = Mask + b * stride_mb + h * stride_mh + n[None, :].to(tl.int64) * stride_mn
    if MASK == 2:
        mask_ptrs = mask_ptrs + rows.to(tl.int64)[:, None] * stride_mm
    Seen += b * stride_sb + h * stride_sh + tile.to(tl.int64) * stride_sm

    begin, end, whole, whole_end, diagonal = tiles_in_sight(
        Seen, row0, N_q, N_kv, LEFT, RIGHT, BOTTOM_RIGHT, MASK, BLOCK_M, BLOCK_N
    )
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    zero = tl.where(N_kv < 0, 1.0, 0.0)
    for part in tl.static_range(FIRST_PART, EDGE + 1):
        masked = part != FULL
        lo, hi = tiles_of(part, begin, end, whole, whole_end, MASK)
        for j in tl.range(lo, hi, num_stages=NUM_STAGES):
            column = j * BLOCK_N + n
            # -- s = q k^T ----
            k = tl.load(k_ptrs + j * (BLOCK_N * BLOCK_D // 2))
            k_e4m3 = tl.load(k_e4m3_ptrs + j * (BLOCK_N * BLOCK_D // FP4_BLOCK))
            s = block_scaled_dot(q_fp4, q_e4m3, k, k_e4m3, zero, NATIVE)  # [BLOCK_M, BLOCK_N]
            delta = tl.load(Delta + column).to(tl.float32) * (SCALE * LOG2E)
            x = s * c[:, None] + delta[None, :]
            if masked:
                here = mask_ptrs + tl.cast(j, tl.int64) * BLOCK_N * stride_mn
                x = hide(
                    x, here, rows, rows - row0 + diagonal, column, N_q, N_kv, LEFT, RIGHT, MASK,
                    ADDITIVE,
                )  # fmt: skip

            # -- softmax: maximum of the tile, running maximum and sum ----
            m_tile = shift_of(tl.max(x, 1), LOG2_FP4_MAX)
            m_new = tl.maximum(m, m_tile)
            # A row that has seen nothing has no maximum: x - m would be NaN.
            shift_tile, shift = m_tile, m_new
            if masked:
                shift_tile = tl.where(m_tile == -float("inf"), 0.0, m_tile)
                if MAY_BE_EMPTY:
                    shift = tl.where(m_new == -float("inf"), 0.0, m_new)
            p = tl.exp2(x - shift_tile[:, None])
            s1 = tl.exp2(m_tile - shift)
            alpha = tl.exp2(m - shift)
            l = l * alpha + s1 * tl.sum(p, 1)
            m = m_new

            # -- o = p v ----
            p_fp4, p_e4m3 = quantize_blocks(p, NATIVE)
            v = tl.load(v_ptrs + j * (BLOCK_N // 2))
            v_e4m3 = tl.load(v_e4m3_ptrs + j * (BLOCK_N // FP4_BLOCK))
            o = block_scaled_dot(p_fp4, p_e4m3, v, v_e4m3, zero, NATIVE)
            acc = acc * alpha[:, None] + o * s1[:, None]

    # -- epilogue ----
    inverse = 1.0 / l
    v_scale = tl.load(V_scale + head_kv * D_V + dv, mask=dv < D_V, other=0.0)[None, :]
    v_mean = tl.load(V_mean + head_kv * D_V + dv, mask=dv < D_V, other=0.0)[None, :]
    if MAY_BE_EMPTY:
        inverse = tl.where(l == 0, 0.0, inverse)
        v_mean = tl.where((l == 0)[:, None], 0.0, v_mean)
    o = acc * inverse[:, None] * v_scale + v_mean
    out = Out + b * stride_ob + h * stride_oh
    out = out + rows.to(tl.int64)[:, None] * stride_on + dv[None, :]
    tl.store(out, o.to(Out.dtype.element_ty), mask=(rows < N_q)[:, None] & (dv < D_V)[None, :])
    lse = (m + tl.log2(l)) * LN2
    tl.store(Lse + head * N_q + rows, lse, mask=rows < N_q)


def launch(a: AttentionCall, tile: Tile, run: Callable, native: bool) -> tuple[Tensor, Tensor]:
    """out [B, H_q, N_q, D_v] of q's dtype and lse [B, H_q, N_q] fp32. native: tensor cores multiply
    NVFP4."""
    (B, H_q, N_q, D), D_v = a.q.shape, a.head_dim_v
    D = int(D)  # a tile needs a number
    H_kv, N_pad = a.k.shape[1:3]
    if isinstance(N_pad, int) and N_pad >= MAX_KEYS:
        raise ValueError(f"sage::attention: NVFP4 takes fewer than {MAX_KEYS} keys, got {N_pad}")
    out, lse = a.empty_outputs()
    mask, mask_strides, mask_kind, additive = a.mask_arguments(tile.BLOCK_M)
    run(
        _attention_kernel,
        (B * H_q * triton.cdiv(N_q, tile.BLOCK_M),),
        (a.q, a.k, a.k_blocks, a.k_scale, a.v, a.v_blocks, a.v_scale, a.v_mean, a.q_mean, a.delta,
         *mask, out, lse),
        (*doubled(a.q.stride()), *mask_strides, *doubled(out.stride())[:3],
         H_q, H_kv, N_q, a.n_kv, N_pad,  # shape
         D, D_v, a.scale, *a.band_arguments(), mask_kind, additive, native,  # semantics
         tile.BLOCK_M, tile.BLOCK_N, pad_head_dim(D), pad_head_dim(D_v), tile.num_stages),  # tile
        num_warps=tile.num_warps,
    )  # fmt: skip
    return out, lse
