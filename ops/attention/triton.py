"""Quantized flash attention: INT8, FP8 or INT4 q k^T, then FP8 or 16-bit p v, in portable Triton.

    s = q_8bit k_8bit^T * q_scale * k_scale        (log2 units: q_scale holds scale * log2 e)
    p = exp2(s - m) * 448,  l = sum of p           m is the running row maximum
    o = (sum over tiles of p_fp8 v_fp8) / l * v_scale + v_mean
    lse = (m + log2 l) ln 2                        of the smoothed keys: ops/sdpa.py corrects it

* FP8 q k^T is for sm_100: there Triton 3.7 compiles an INT8 product to mma.sync (IMMA), the way of
  older devices, and an FP8 one to tcgen05, as p v. On an H200 INT8 is as fast or faster, and
  1.4x as accurate: E4M3 has 4 significant bits. s comes in fp32 and is otherwise the same.
* INT4 q k^T is INT8's, no GPU from Hopper on having instructions for it: k is read packed and
  unpacked where it is used, to 16 times its codes, which takes no sign extension. q is smoothed:
  s gets what q_mean takes off it, delta, added before the softmax (quantize/smooth.py).
* q is rotated (if the recipe says so) and quantized here, in the prologue: it saves a pass over q,
  and its scales cost nothing.
* Two-level accumulation: FP8 tensor cores add up in 13 mantissa bits, so each tile's product is
  taken from zero and added to an fp32 accumulator. On v with a mean, one level is 28x worse at 8K
  keys and 85x at 32K; random normal v hides it.
* Query i sees keys i - LEFT .. i + RIGHT (-1: no bound), counted from the first query and the first
  key, or (BOTTOM_RIGHT) from the last of both; and what the mask shows it. Whole tiles out of sight
  are not read: `Seen` (Visibility.tile_summary) tells from where to where a tile of queries reads.
* Lists of blocks take the place of "from where to where": a tile of queries reads the tiles of keys
  that its block's two lists name, first the full blocks, which no band cuts, then the partial ones.
* A row that sees nothing is 0, its lse -inf. large_scores.py says what is taken off large scores.
* p's columns are reordered inside a thread (`reference.quantize.interleave`) instead of exchanged
  between threads; v_fp8 is stored in that order.

Source: SageAttention (arXiv:2410.02367), SageAttention2 (arXiv:2411.10958).
Shapes: B batch, H_q and H_kv heads, N_q and N_kv sequence, D head_dim.
"""

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from sage_inductor.ops.attention.large_scores import flatness, shift_of
from sage_inductor.ops.attention.tiles import Tile
from sage_inductor.ops.attention.visible_tiles import (
    EDGE,
    FULL,
    LEFT_EDGE,
    TAIL,
    heads_of,
    hide,
    how_often,
    listed_tiles,
    tiles_in_sight,
    tiles_of,
)
from sage_inductor.ops.attention_call import AttentionCall
from sage_inductor.ops.compat import TensorDescriptor
from sage_inductor.ops.constants import INT4_MAX, LN2, LOG2_FP8_MAX, LOG2E, Q_BLOCK
from sage_inductor.ops.formats import pad_head_dim
from sage_inductor.ops.launch import doubled
from sage_inductor.ops.layout import is_token, token_of
from sage_inductor.ops.quantize.codes import abs_bits, scale_of, to_8bit
from sage_inductor.ops.quantize.rotate import in_16_bits, rotate


@triton.jit
def _attention_kernel(
    Q,  # [B, H_q, N_q, D] in, 16-bit
    Q_mean, Delta,  # INT4: [B, H_q, T, D], [B, H_q, T, N_pad] as smooth_q has them
    K, K_scale,  # [B, H_kv, N_pad, BLOCK_D] INT8 or E4M3, [B, H_kv, N_pad / 64, GROUPS]
    # INT4: K [B, H_kv, N_pad, BLOCK_D / 2], packed
    V, V_scale, V_mean,  # FP8: [B, H_kv, BLOCK_DV, N_pad], [B, H_kv, D_V] twice
    # 16-bit: V [B, H_kv, N_kv, D_V] without the other two. TMA: K and FP8 V are 2-D descriptors
    Mask,  # [B or 1, H_q or 1, N_q or 1, N_kv] bool or floating (additive)
    Seen,  # [B or 1, H_q or 1, tiles or 1, N_kv] uint8: mask.summarize
    Kv_count, Kv_index,  # int32 [B or 1, H_q or 1, M_q], [B or 1, H_q or 1, M_q, kv_width]
    Full_count, Full_index,  # with full_width; contiguous: BlockLists
    K_tail, K_tail_scale, V_tail, Bias,  # Prepared's, as K, K_scale and V are; if TAIL_BLOCK
    Perm,  # int32 [N_q] or None: the order of q's blocks in the lists, and that of k and v
    Documents,  # int32 [N_q / 64] or None: whose rows (documents.py). Then V_scale, V_mean are of
    # each, and lse is of places
    Out, Lse,  # [B, H_q, N_q, D_V], [B, H_q, N_q] fp32
    stride_qb, stride_qh, stride_qn, stride_qd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_mb, stride_mh, stride_mm, stride_mn,
    stride_sb, stride_sh, stride_sm,
    stride_lb, stride_lh, kv_width, full_width,  # of counts, in rows; of a row of indices
    stride_ob, stride_oh, stride_on,
    H_q, H_kv, N2_q, N2_kv, N_pad,  # N2: 2 N
    D: tl.constexpr, D_V: tl.constexpr, SCALE: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
    MASK: tl.constexpr, ADDITIVE: tl.constexpr,  # MASK: 0 none, 1 one row for all, 2 a row each
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, FULL_LISTS: tl.constexpr,  # 0: no lists
    TAIL_BLOCK: tl.constexpr,  # keys that one of the tail stands for; 0: there is none
    QK_MAX: tl.constexpr,  # of q and k: their format's largest number, which tells it
    ROTATED: tl.constexpr,  # q and k
    FP8: tl.constexpr,  # p and v
    Q_ROWS: tl.constexpr, GROUPS: tl.constexpr,  # Q_ROWS share a scale
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Grid: (B * H_q * cdiv(N_q, BLOCK_M),): BLOCK_M rows of one head. Heads one after the other,
    so that k and v stay in L2; within a causal head the longest rows go first.

    Lengths come doubled: see _quantize_v_kernel. A length that is known to be 1 makes pairs of p
    that are known to be equal. Strides of q, v and o come doubled, too: see `doubled`.
    """
    N_q, N_kv = N2_q // 2, N2_kv // 2
    stride_qb, stride_qh, stride_qn = stride_qb // 2, stride_qh // 2, stride_qn // 2
    stride_vb, stride_vh, stride_vn = stride_vb // 2, stride_vh // 2, stride_vn // 2
    stride_ob, stride_oh, stride_on = stride_ob // 2, stride_oh // 2, stride_on // 2
    INT4: tl.constexpr = QK_MAX == INT4_MAX
    LISTED: tl.constexpr = BLOCK_KV > 0
    BIASED: tl.constexpr = INT4 or (MASK > 0 and ADDITIVE)  # large_scores.py
    # Rows that see no key:
    MAY_BE_EMPTY: tl.constexpr = MASK > 0 or LEFT >= 0 or BOTTOM_RIGHT or LISTED
    OF_ALL: tl.constexpr = EDGE if MASK > 0 else (LEFT_EDGE if LEFT >= 0 else FULL)
    FIRST_PART: tl.constexpr = (FULL if FULL_LISTS else EDGE) if LISTED else OF_ALL
    LAST_PART: tl.constexpr = TAIL if TAIL_BLOCK else EDGE
    num_tiles = tl.cdiv(N_q, BLOCK_M)
    head, tile = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles
    if RIGHT >= 0:
        tile = num_tiles - 1 - tile
    b, h, h_kv, head_kv, head = heads_of(head, H_q, H_kv)
    row0 = tile * BLOCK_M
    rows = row0 + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    n = tl.arange(0, BLOCK_N)

    # -- q: load and quantize ----
    token = token_of(Perm, rows, N_q)
    mask_q = is_token(Perm, token, rows, N_q)[:, None] & (d < D)[None, :]
    q = Q + b * stride_qb + h * stride_qh
    q = q + token.to(tl.int64)[:, None] * stride_qn + d.to(tl.int64)[None, :] * stride_qd
    q = tl.load(q, mask=mask_q, other=0.0)  # [BLOCK_M, BLOCK_D]
    if ROTATED:
        q = rotate(in_16_bits(q, Q), BLOCK_M, BLOCK_D)
    q = q.to(tl.float32)
    if INT4:
        block_q = head * ((N_q + 2 * Q_BLOCK - 1) // Q_BLOCK) + row0 // Q_BLOCK
        q_mean = tl.load(Q_mean + block_q * D + d, mask=d < D, other=0.0).to(tl.float32)
        q = tl.where(mask_q, q - q_mean[None, :], 0.0)
        Delta += block_q * N_pad
    amax = tl.max(abs_bits(q), 1)
    if Q_ROWS == 4:  # per_thread: rows i, i+8, i+16, i+24 of 32
        amax = tl.max(amax.reshape([BLOCK_M // 32, 4, 8]), 1, keep_dims=True)
        amax = amax.broadcast_to([BLOCK_M // 32, 4, 8]).reshape([BLOCK_M])
    elif Q_ROWS == 128:  # per_block
        amax = tl.max(amax.reshape([BLOCK_M // 128, 128]), 1, keep_dims=True)
        amax = amax.broadcast_to([BLOCK_M // 128, 128]).reshape([BLOCK_M])
    inverse, q_scale = scale_of(amax, QK_MAX)
    # The sign of scale goes into q_8bit, so that q_scale * k_scale >= 0 and the row maximum can
    # be taken before scaling.
    q_8bit = to_8bit(q, (inverse if SCALE >= 0 else -inverse)[:, None], QK_MAX)
    q_scale = q_scale * ((SCALE if SCALE >= 0 else -SCALE) * LOG2E)
    if INT4:
        q_scale = q_scale * 0.0625  # k is unpacked to 16 times its codes

    # -- where k and v are ----
    if TMA:
        k_row = (head_kv * N_pad).to(tl.int32)
        v_row = (head_kv * BLOCK_DV).to(tl.int32)
    else:
        width: tl.constexpr = BLOCK_D // 2 if INT4 else BLOCK_D  # bytes of a row of k
        k_ptrs = K + head_kv * N_pad * width + n[:, None] * width + tl.arange(0, width)[None, :]
        if FP8:
            v_ptrs = V + (head_kv * BLOCK_DV + dv[:, None]) * N_pad + n[None, :]
    if not FP8:
        v_ptrs = V + b * stride_vb + h_kv * stride_vh + dv.to(tl.int64)[None, :] * stride_vd
    K_scale += head_kv * (N_pad // 64) * GROUPS
    if TAIL_BLOCK:
        T = tl.cdiv(N_kv, TAIL_BLOCK)
        T_pad = tl.cdiv(T, 128) * 128
        tail_row = head_kv * T_pad
        K_tail_scale += tail_row // 64 * GROUPS
        if TMA:
            tail_row_k = tail_row.to(tl.int32)
        else:
            k_tail = K_tail + (tail_row + n[:, None]) * BLOCK_D + d[None, :]
            if FP8:
                v_tail = V_tail + (head_kv * BLOCK_DV + dv[:, None]) * T_pad + n[None, :]
        if not FP8:
            v_tail = V_tail + head_kv * T * BLOCK_DV + dv[None, :]

    # -- which tiles, and where the mask is ----
    Seen += b * stride_sb + h * stride_sh + tile.to(tl.int64) * stride_sm
    begin, end, whole, whole_end, diagonal = tiles_in_sight(
        Seen, row0, N_q, N_kv, LEFT, RIGHT, BOTTOM_RIGHT, 0 if LISTED else MASK, BLOCK_M, BLOCK_N
    )
    if LISTED:
        list_row = b * stride_lb + h * stride_lh + row0 // BLOCK_Q
    mask_ptrs = Mask + b * stride_mb + h * stride_mh + n[None, :].to(tl.int64) * stride_mn
    if MASK == 2:
        mask_ptrs = mask_ptrs + rows.to(tl.int64)[:, None] * stride_mm

    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    offset: tl.constexpr = LOG2_FP8_MAX if FP8 else 0.0

    # This loop runs once. As its argument q_8bit stays in shared memory; an operand that Triton
    # sees computed in registers stays there, 16 a thread, and at the cap they are spilled (H200,
    # 8K keys: 823 against 773 TFLOP/s).
    for _ in tl.range(0, tl.minimum(N_kv, 1), num_stages=1):
        # By lists FULL is the full blocks, EDGE the partial ones. Both may name the last block.
        for part in tl.static_range(FIRST_PART, LAST_PART + 1):
            if LISTED:
                masked = MASK > 0 or (part == EDGE and (LEFT >= 0 or RIGHT >= 0))
                lo = 0
                if part == TAIL:
                    hi = T_pad // BLOCK_N
                elif part == FULL:
                    Listed, hi = listed_tiles(
                        Full_count, Full_index, list_row, full_width, BLOCK_KV, BLOCK_N
                    )
                else:
                    Listed, hi = listed_tiles(
                        Kv_count, Kv_index, list_row, kv_width, BLOCK_KV, BLOCK_N
                    )
            else:
                masked = part != FULL
                lo, hi = tiles_of(part, begin, end, whole, whole_end, MASK)
            for i in tl.range(lo, hi, num_stages=NUM_STAGES):
                j = i
                at = j  # a tile that is there
                if LISTED and part != TAIL:
                    TILES: tl.constexpr = BLOCK_KV // BLOCK_N
                    block = tl.load(Listed + i // TILES)  # beyond the keys: the first of no key
                    block = tl.maximum(tl.minimum(block, tl.cdiv(N_kv, BLOCK_KV)), 0)
                    j = block * TILES + i % TILES
                    at = tl.minimum(j, N_pad // BLOCK_N - 1)
                # -- s = q k^T, with its scales ----
                if part == TAIL:
                    if TMA:
                        k = K_tail.load([tail_row_k + at * BLOCK_N, 0])
                    else:
                        k = tl.load(k_tail + at * (BLOCK_N * BLOCK_D))
                elif TMA:
                    k = K.load([k_row + at * BLOCK_N, 0])
                else:
                    k = tl.load(k_ptrs + tl.cast(at, tl.int64) * (BLOCK_N * width))
                if INT4:
                    delta = tl.load(Delta + at * BLOCK_N + n)  # arrives during the product
                    k = tl.join(k << 4, k & 0xF0).reshape([BLOCK_N, BLOCK_D])
                    k = k.to(tl.int8, bitcast=True)
                s = tl.dot(q_8bit, k.T)  # [BLOCK_M, BLOCK_N] int32 or fp32
                # [BLOCK_M, blocks of 64, 8, 4, 2]: a thread holds one quad, so one scale a block
                s = s.reshape([BLOCK_M, BLOCK_N // 64, 8, 4, 2])
                block = tl.arange(0, BLOCK_N // 64)
                if GROUPS == 4:
                    group = at * (BLOCK_N // 16) + block[:, None] * 4 + tl.arange(0, 4)[None, :]
                else:
                    group = at * (BLOCK_N // 64) + block[:, None]
                scales = K_tail_scale if part == TAIL else K_scale
                k_scale = tl.load(scales + group)  # [BLOCK_N / 64, GROUPS]
                c = q_scale[:, None, None] * k_scale[None, :, :]  # [BLOCK_M, BLOCK_N / 64, GROUPS]
                c5 = c[:, :, None, :, None]
                if INT4:
                    delta = delta.to(tl.float32) * (SCALE * LOG2E)
                    delta = delta[None, :].broadcast_to([BLOCK_M, BLOCK_N]).reshape(s.shape)

                # -- softmax: running maximum and sum ----
                x = s.to(tl.float32) * c5
                if INT4:
                    x += delta
                if part == TAIL:
                    t = at * BLOCK_N + n
                    first = at * BLOCK_N * TAIL_BLOCK // BLOCK_KV
                    named = how_often(
                        Kv_count, Kv_index, list_row, kv_width, first, tl.cdiv(N_kv, BLOCK_KV),
                        True, BLOCK_N, 256,
                    )  # fmt: skip
                    if FULL_LISTS:
                        named += how_often(
                            Full_count, Full_index, list_row, full_width, first,
                            tl.cdiv(N_kv, BLOCK_KV), True, BLOCK_N, 256,
                        )  # fmt: skip
                    free = (t < T) & (tl.gather(named, t * TAIL_BLOCK // BLOCK_KV - first, 0) == 0)
                    free = free[None, :].broadcast_to([BLOCK_M, BLOCK_N]).reshape(x.shape)
                    bias = tl.load(Bias + tail_row + t)[None, :].broadcast_to([BLOCK_M, BLOCK_N])
                    x = tl.where(free, x + bias.reshape(x.shape), -float("inf"))
                    highest = tl.max(tl.max(tl.max(tl.max(x, 4), 2), 2), 1)
                elif masked:
                    here = mask_ptrs + tl.cast(j, tl.int64) * BLOCK_N * stride_mn
                    x = hide(
                        x, here, rows, rows - row0 + diagonal, j * BLOCK_N + n, N_q, N_kv,
                        -1 if part == FULL else LEFT, -1 if part == FULL else RIGHT, MASK, ADDITIVE,
                    )  # fmt: skip
                    highest = tl.max(tl.max(tl.max(tl.max(x, 4), 2), 2), 1)
                else:
                    if INT4:
                        highest = tl.max(tl.max(x, 4), 2)
                    elif GROUPS == 4:
                        highest = tl.max(tl.max(s, 4), 2).to(tl.float32) * c
                    else:
                        highest = (
                            tl.max(tl.max(tl.max(s, 4), 2), 2, keep_dims=True).to(tl.float32) * c
                        )
                    highest = tl.max(tl.max(highest, 2), 1)
                    if LISTED:
                        if (j + 1) * BLOCK_N > N_kv:  # the tail
                            x = hide(
                                x, mask_ptrs, rows, rows, j * BLOCK_N + n, N_q, N_kv, -1, -1, 0,
                                False,
                            )  # fmt: skip
                            highest = tl.max(tl.max(tl.max(tl.max(x, 4), 2), 2), 1)
                m_new = tl.maximum(m, shift_of(highest, offset) if BIASED else highest)
                # A row that has seen nothing yet has no maximum: x - m would be NaN.
                shift = m_new
                if (masked or LISTED) and MAY_BE_EMPTY:
                    shift = tl.where(m_new == -float("inf"), 0.0, m_new)
                if BIASED or not FP8:
                    p = tl.exp2(x - shift[:, None, None, None, None])
                else:
                    flat = flatness(shift)
                    below = (shift * flat - offset)[:, None, None, None, None]
                    if masked or LISTED:
                        p = tl.exp2(x * flat[:, None, None, None, None] - below)
                    else:  # by an fma
                        c5 = (c * flat[:, None, None])[:, :, None, :, None]
                        p = tl.exp2(s.to(tl.float32) * c5 - below)
                p = p.reshape([BLOCK_M, BLOCK_N])
                alpha = tl.exp2(m - shift)
                l = l * alpha + tl.sum(p, 1)
                m = m_new

                # -- o = p v ----
                if FP8:
                    p = p.reshape([BLOCK_M, BLOCK_N // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4])
                    p = p.reshape([BLOCK_M, BLOCK_N]).to(tl.float8e4nv)
                    if part == TAIL:
                        if TMA:
                            v = V_tail.load([v_row, at * BLOCK_N])
                        else:
                            v = tl.load(v_tail + at * BLOCK_N)
                    elif TMA:
                        v = V.load([v_row, at * BLOCK_N])
                    else:
                        v = tl.load(v_ptrs + at * BLOCK_N)
                    # An fma, because Triton folds `acc * alpha + dot` into the dot's accumulator on
                    # sm_89 and sm_120: one level again.
                    acc = tl.fma(acc, alpha[:, None].broadcast_to(acc.shape), tl.dot(p, v.T))
                else:
                    row = (j * BLOCK_N + n).to(tl.int64)[:, None]
                    if part == TAIL:
                        v = tl.load(v_tail + row * BLOCK_DV, mask=row < T, other=0.0)
                    elif masked or LISTED:
                        present = j * BLOCK_N + n < N_kv
                        if MASK > 0:  # 0 * NaN
                            present = tl.load(Seen + j * BLOCK_N + n, mask=present, other=0) != 0
                        v = tl.load(
                            v_ptrs + row * stride_vn,
                            mask=present[:, None] & (dv < D_V)[None, :],
                            other=0.0,
                        )
                    else:
                        v = tl.load(v_ptrs + row * stride_vn, mask=(dv < D_V)[None, :], other=0.0)
                    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
        q_8bit = tl.zeros([BLOCK_M, BLOCK_D], q_8bit.dtype)

    # -- epilogue ----
    inverse = 1.0 / l
    if MAY_BE_EMPTY:
        inverse = tl.where(l == 0, 0.0, inverse)
    o = acc * inverse[:, None]
    if FP8:
        of_v = head_kv
        if Documents is not None:
            of_v = tl.load(Documents + row0 // 64).to(tl.int64) * H_kv + h_kv
        v_scale = tl.load(V_scale + of_v * D_V + dv, mask=dv < D_V, other=0.0)
        v_mean = tl.load(V_mean + of_v * D_V + dv, mask=dv < D_V, other=0.0)[None, :]
        if MAY_BE_EMPTY:
            v_mean = tl.where((l == 0)[:, None], 0.0, v_mean)
        o = o * v_scale[None, :] + v_mean
        if Documents is not None:  # 0 * NaN, of what is in no document
            o = tl.where((l == 0)[:, None], 0.0, o)
    out = Out + b * stride_ob + h * stride_oh
    token = token_of(Perm, rows, N_q)  # once more: it would take a register through the loop
    out = out + token.to(tl.int64)[:, None] * stride_on + dv[None, :]
    here = is_token(Perm, token, rows, N_q)[:, None] & (dv < D_V)[None, :]
    tl.store(out, o.to(Out.dtype.element_ty), mask=here)
    lse = ((m if BIASED else m - offset) + tl.log2(l)) * LN2
    if Documents is not None:
        token = rows
    tl.store(Lse + head * N_q + token, lse, mask=rows < N_q)


def _rows(x: Tensor | None, *box: int) -> TensorDescriptor | None:
    """x [B, H, rows, columns], for TMA by such boxes of its rows."""
    return None if x is None else TensorDescriptor.from_tensor(x.view(-1, x.shape[3]), [*box])


def launch(
    a: AttentionCall, tile: Tile, run: Callable, tma: bool = False, **options
) -> tuple[Tensor, Tensor]:
    """out [B, H_q, N_q, D_v] of q's dtype and lse [B, H_q, N_q] fp32. tma: descriptors read k and
    8-bit v, if they can count their rows."""
    (B, H_q, _, D), N_q, recipe, D_v = a.q.shape, a.n_q, a.decoded, a.head_dim_v
    D = int(D)  # a tile needs a number
    H_kv, N_pad, width = a.k.shape[1:]
    fp8, qk, sharing = recipe.of_pv.dtype is not None, recipe.of_qk, recipe.sharing
    if (a.q_mean is None) == qk.smooths_q:
        raise ValueError(
            f"sage::attention: q_mean and delta go with INT4 k, and only that: k is {recipe.qk}"
        )
    k, v, k_tail, v_tail = a.k, a.v, a.tail_k, a.tail_v
    tma = tma and k.shape[:3].numel() < 2**31  # a descriptor's rows are 32-bit numbers
    if tma:
        k, k_tail = (_rows(x, tile.BLOCK_N, width) for x in (k, k_tail))
        if fp8:
            v, v_tail = (_rows(x, pad_head_dim(D_v), tile.BLOCK_N) for x in (v, v_tail))
    out, lse = a.empty_outputs()
    mask, mask_strides, mask_kind, additive = a.mask_arguments(tile.BLOCK_M)
    lists, list_strides, list_sizes = a.list_arguments()
    run(
        _attention_kernel,
        (B * H_q * triton.cdiv(N_q, tile.BLOCK_M),),
        (a.q, a.q_mean, a.delta, k, a.k_scale, v, a.v_scale, a.v_mean, *mask, *lists, k_tail,
         a.tail_k_scale, v_tail, a.tail_bias, a.perm, a.documents, out, lse),
        (*doubled(a.q.stride()), *doubled(a.v.stride()), *mask_strides, *list_strides,
         *doubled(out.stride())[:3],
         H_q, H_kv, 2 * N_q, 2 * a.n_kv, N_pad,  # shape
         D, D_v, a.scale_of_codes, *a.band_arguments(), mask_kind, additive, *list_sizes,
         a.tail_block or 0, qk.largest, recipe.rotated, fp8,  # semantics
         sharing.q_span // sharing.q_groups, sharing.k_groups, tma,
         tile.BLOCK_M, tile.BLOCK_N, pad_head_dim(D), pad_head_dim(D_v), tile.num_stages),  # tile
        num_warps=tile.num_warps, **options,
    )  # fmt: skip
    return out, lse
