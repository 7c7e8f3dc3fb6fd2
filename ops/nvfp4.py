"""SageAttention3: q, k, p and v in 4 bits (NVFP4), in Triton.

    phi(x)   blocks of 1x16 along the dimension that is summed over: a scale of E4M3(amax / 6) each,
             and E2M1(x / scale), one of 0, .5, 1, 1.5, 2, 3, 4, 6 and a sign
    s = (phi(q - q_mean) phi(k - k_mean)^T + delta) * scale * log2 e
    delta = q_mean (k - k_mean)^T               q_mean is that of each 128 rows: smooth.py
    p = exp2(s - m_tile) * 448 * 6                m_tile is the row's maximum in the tile
    o = (sum over tiles of exp2(m_tile - m) phi(p) phi(v - v_mean)) / l + v_mean
    l = sum over tiles of exp2(m_tile - m) p      lse as in attention.py

* Two-level p: a row of p in a tile is brought to the largest number that phi holds, so that its
  scales use all of E4M3.
* phi alone is good for blocks with an amax from 2^-4 to 2688. So k is first brought to it by a
  power of two for each head, v for each channel and q for each row (`power_of_two`): what phi
  rounds well alone it rounds the same, and nothing saturates or vanishes.
* Where tensor cores multiply such blocks (NATIVE: sm_100, sm_120) they do; elsewhere the same codes
  are decoded to fp16, which holds every product of E2M1 and E4M3, and multiplied as such: for
  studies of the accuracy. Rounding to E4M3, and there to E2M1, is integer arithmetic: no other
  device converts to them as well, and Triton's interpreter does neither rightly.
* Bands, masks and rows that see nothing: as in attention.py.

Source: SageAttention3 (arXiv:2505.11594). NATIVE was compiled for these devices and never run.
Shapes: B batch, H_q and H_kv heads, N_q and N_kv sequence, D head_dim. x_fp4: two E2M1 a byte along
the last dimension, the first in the low half; x_e4m3: the bits of blocks' scales. Both uint8.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from sage_inductor.ops import reference, tiles
from sage_inductor.ops.attention import (
    as_stored,
    empty_outputs,
    heads_of,
    hide,
    mask_arguments,
    tiles_in_sight,
)
from sage_inductor.ops.launch import traced
from sage_inductor.ops.quantize import abs_bits, saturate
from sage_inductor.ops.reference import FP4_BLOCK, LOG2_FP4_MAX, LOG2E, PAD_N, Q_BLOCK, pad_head_dim

_BLOCK = tl.constexpr(FP4_BLOCK)
_LOG2_FP4_MAX = tl.constexpr(LOG2_FP4_MAX)
_LOG2E = tl.constexpr(LOG2E)
_LN2 = tl.constexpr(1 / LOG2E)
_Q_BLOCK = tl.constexpr(Q_BLOCK)
_INF_BITS = tl.constexpr(0x7F800000)
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
    """The code, in int32, of x >= 0 to nearest even in a format with so many bits of mantissa and
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
def phi(x, NATIVE: tl.constexpr):
    """x [R, C] in fp32 -> x_fp4 [R, C / 2], x_e4m3 [R, C / 16]. A block with a NaN or an Inf has
    the scale NaN."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    x = x.reshape([R, C // _BLOCK, _BLOCK])
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
    return x_fp4, tl.where(bits < _INF_BITS, code, _NAN_E4M3).to(tl.uint8)


@triton.jit
def unpack(x_fp4, x_e4m3):
    """x_fp4 [R, C / 2], x_e4m3 [R, C / 16] -> what they stand for [R, C], exactly, in fp16."""
    R: tl.constexpr = x_fp4.shape[0]
    C: tl.constexpr = 2 * x_fp4.shape[1]
    x = x_fp4.to(tl.int32)
    x = tl.join(x & 15, x >> 4)  # [R, C / 2, 2]
    bits = ((x & 7) << 9) | ((x & 8) << 12)  # an fp16's, but for 14 less in the exponent's bias
    x = bits.to(tl.int16).to(tl.float16, bitcast=True) * 16384.0
    x = x.reshape([R, C // _BLOCK, _BLOCK]) * from_e4m3(x_e4m3)[:, :, None]
    return x.reshape([R, C])


@triton.jit
def product(a_fp4, a_e4m3, b_fp4, b_e4m3, zero, NATIVE: tl.constexpr):
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
        return tl.dot(unpack(a_fp4, a_e4m3), unpack(b_fp4, b_e4m3).T)


# -- k and v ----


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
    x = X + head // H * stride_b + head % H * stride_h
    x = x + n[:, None] * stride_n + d.to(tl.int64)[None, :] * stride_d
    x = tl.load(x, mask=mask, other=0.0)
    mean = tl.load(Mean + head * D + d, mask=d < D, other=0.0)
    amax = tl.load(Amax + head * D + d, mask=d < D, other=0.0)
    x = x.to(tl.float32) - mean[None, :]
    if SATURATE:
        x = saturate(x, amax[None, :])
    x = tl.where(mask, x, 0.0)
    if ALONG_N:
        inverse, scale = power_of_two(abs_bits(amax))
        x_fp4, x_e4m3 = phi((x * inverse[None, :]).T, False)
        tl.store(X_scale + head * D + d, scale, mask=(d < D) & (block == 0))
        first, rows, columns = head * BLOCK_D, d, blocks * BLOCK_N
        column = block * BLOCK_N
    else:
        inverse, scale = power_of_two(tl.max(abs_bits(amax), 0))
        x_fp4, x_e4m3 = phi(x * inverse, False)
        tl.store(X_scale + head, scale, mask=block == 0)
        first, rows, columns = (head * blocks + block) * BLOCK_N, i, BLOCK_D
        column = 0
    rows = (first + rows)[:, None] * columns + column
    tl.store(X_fp4 + rows // 2 + tl.arange(0, x_fp4.shape[1])[None, :], x_fp4)
    tl.store(X_e4m3 + rows // _BLOCK + tl.arange(0, x_e4m3.shape[1])[None, :], x_e4m3)


@triton_op("sage::quantize_nvfp4", mutates_args=())
def quantize_nvfp4(
    x: Tensor, mean: Tensor, amax: Tensor, along_n: bool, saturate: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """k or (along_n) v [B, H, N, D], any strides, with mean and amax [B, H, D] fp32 of `smooth` ->
    k: x_fp4 [B, H, N_pad, D_pad / 2], x_e4m3 [B, H, N_pad, D_pad / 16], x_scale [B, H] fp32
    v: x_fp4 [B, H, D_pad, N_pad / 2], x_e4m3 [B, H, D_pad, N_pad / 16], x_scale [B, H, D] fp32
    with x - mean = x_fp4 * x_e4m3 * x_scale. saturate: some rows had no part in mean and amax."""
    if x.device.type == "cpu":
        return reference.quantize_nvfp4(x, mean, amax, along_n, saturate)
    return launch_quantize(x, mean, amax, along_n, saturate)


def launch_quantize(
    x: Tensor, mean: Tensor, amax: Tensor, along_n: bool, saturate: bool
) -> tuple[Tensor, Tensor, Tensor]:
    B, H, N, D = x.shape
    D = int(D)  # a tile needs a number
    BLOCK_D, N_pad = pad_head_dim(D), triton.cdiv(N, PAD_N) * PAD_N
    R, C = (BLOCK_D, N_pad) if along_n else (N_pad, BLOCK_D)
    x_fp4 = x.new_empty((B, H, R, C // 2), dtype=torch.uint8)
    x_e4m3 = x.new_empty((B, H, R, C // FP4_BLOCK), dtype=torch.uint8)
    x_scale = x.new_empty((B, H, D) if along_n else (B, H), dtype=torch.float32)
    traced(
        _quantize_kernel,
        (B * H * (N_pad // ROWS),),
        (x, mean, amax, x_fp4, x_e4m3, x_scale),
        (*x.stride(),
         H, N,  # shape
         along_n, saturate,  # semantics
         D, PAD_N, ROWS, BLOCK_D),  # tile
    )  # fmt: skip
    return x_fp4, x_e4m3, x_scale


# -- attention ----


@triton.jit
def _attention_kernel(
    Q,  # [B, H_q, N_q, D] in
    K, K_e4m3, K_scale,  # [B, H_kv, N_pad, BLOCK_D / 2], [.., BLOCK_D / 16], [B, H_kv]
    V, V_e4m3,  # [B, H_kv, BLOCK_DV, N_pad / 2], [.., N_pad / 16]
    V_scale, V_mean,  # [B, H_kv, D_V]
    Q_mean, Delta,  # [B, H_q, T, D], [B, H_q, T, N_pad], bf16; T: blocks of 128 rows and one more
    Mask, Seen,  # as in attention.py
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
    FIRST_PART: tl.constexpr = 2 if MASK > 0 else (0 if LEFT >= 0 else 1)
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
    block = head * (tl.cdiv(N_q, _Q_BLOCK) + 1) + row0 // _Q_BLOCK
    q_mean = tl.load(Q_mean + block * D + d, mask=d < D, other=0.0).to(tl.float32)
    q = tl.where(mask_q, q - q_mean[None, :], 0.0)
    inverse, q_scale = power_of_two(tl.max(abs_bits(q), 1))
    q_fp4, q_e4m3 = phi(q * inverse[:, None], NATIVE)
    c = q_scale * (tl.load(K_scale + head_kv) * (SCALE * _LOG2E))  # [BLOCK_M]

    # -- where k and v are ----
    K += head_kv * N_pad * (BLOCK_D // 2)
    K_e4m3 += head_kv * N_pad * (BLOCK_D // _BLOCK)
    V += head_kv * BLOCK_DV * (N_pad // 2)
    V_e4m3 += head_kv * BLOCK_DV * (N_pad // _BLOCK)
    k_ptrs = K + n[:, None] * (BLOCK_D // 2) + tl.arange(0, BLOCK_D // 2)[None, :]
    k_e4m3_ptrs = n[:, None] * (BLOCK_D // _BLOCK) + tl.arange(0, BLOCK_D // _BLOCK)[None, :]
    k_e4m3_ptrs = K_e4m3 + k_e4m3_ptrs
    v_ptrs = V + dv.to(tl.int64)[:, None] * (N_pad // 2) + tl.arange(0, BLOCK_N // 2)[None, :]
    v_e4m3_ptrs = (
        dv.to(tl.int64)[:, None] * (N_pad // _BLOCK) + tl.arange(0, BLOCK_N // _BLOCK)[None, :]
    )
    v_e4m3_ptrs = V_e4m3 + v_e4m3_ptrs
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
    # Part 0: the tiles left of the whole ones, which need a mask; 1: the whole ones; 2: those right
    # of them (the diagonal, the tail), or all of them if there is a mask.
    for part in tl.static_range(FIRST_PART, 3):
        masked = part != 1
        if part == 0:
            lo, hi = begin, tl.minimum(whole, end)
        elif part == 1:
            lo, hi = whole, whole_end
        else:
            lo, hi = begin if MASK > 0 else tl.maximum(whole, whole_end), end
        for j in tl.range(lo, hi, num_stages=NUM_STAGES):
            column = j * BLOCK_N + n
            # -- s = q k^T ----
            k = tl.load(k_ptrs + tl.cast(j, tl.int64) * (BLOCK_N * BLOCK_D // 2))
            k_e4m3 = tl.load(k_e4m3_ptrs + tl.cast(j, tl.int64) * (BLOCK_N * BLOCK_D // _BLOCK))
            s = product(q_fp4, q_e4m3, k, k_e4m3, zero, NATIVE)  # [BLOCK_M, BLOCK_N]
            delta = tl.load(Delta + column).to(tl.float32) * (SCALE * _LOG2E)
            x = s * c[:, None] + delta[None, :]
            if masked:
                here = mask_ptrs + tl.cast(j, tl.int64) * BLOCK_N * stride_mn
                x = hide(
                    x, here, rows, rows - row0 + diagonal, column, N_q, N_kv, LEFT, RIGHT, MASK,
                    ADDITIVE,
                )  # fmt: skip

            # -- softmax: maximum of the tile, running maximum and sum ----
            m_tile = tl.max(x, 1)
            m_new = tl.maximum(m, m_tile)
            # A row that has seen nothing has no maximum: x - m would be NaN.
            shift_tile, shift = m_tile, m_new
            if masked:
                shift_tile = tl.where(m_tile == -float("inf"), 0.0, m_tile)
                if MAY_BE_EMPTY:
                    shift = tl.where(m_new == -float("inf"), 0.0, m_new)
            p = tl.exp2(x - (shift_tile - _LOG2_FP4_MAX)[:, None])
            s1 = tl.exp2(m_tile - shift)
            alpha = tl.exp2(m - shift)
            l = l * alpha + s1 * tl.sum(p, 1)
            m = m_new

            # -- o = p v ----
            p_fp4, p_e4m3 = phi(p, NATIVE)
            v = tl.load(v_ptrs + j * (BLOCK_N // 2))
            v_e4m3 = tl.load(v_e4m3_ptrs + j * (BLOCK_N // _BLOCK))
            o = product(p_fp4, p_e4m3, v, v_e4m3, zero, NATIVE)
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
    lse = (m - _LOG2_FP4_MAX + tl.log2(l)) * _LN2
    tl.store(Lse + head * N_q + rows, lse, mask=rows < N_q)


@triton_op("sage::attention_nvfp4", mutates_args=())
def attention_nvfp4(
    q: Tensor, k_fp4: Tensor, k_e4m3: Tensor, k_scale: Tensor, v_fp4: Tensor, v_e4m3: Tensor,
    v_scale: Tensor, v_mean: Tensor, attn_mask: Tensor | None, seen: Tensor | None,
    left: int | None, right: int | None, bottom_right: bool, scale: float, n_kv: int,
    granularity: str, out_bnhd: bool, q_mean: Tensor, delta: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention over k and v in 4 bits. Exportable.

    q [B, H_q, N_q, D], any strides; k and v from `quantize_nvfp4`, v_mean [B, H_kv, D_v] fp32;
    q_mean [B, H_q, T, D] and delta [B, H_q, T, N_pad] bf16 of `smooth_q`. The rest, and what it
    returns: as `attention`'s.
    """
    if q.device.type == "cpu":
        out, lse = reference.attention_nvfp4(
            q, k_fp4, k_e4m3, k_scale, v_fp4, v_e4m3, v_scale, v_mean, attn_mask, seen, left,
            right, bottom_right, scale, n_kv, granularity, 128, q_mean, delta,
        )  # fmt: skip
        return as_stored(out, out_bnhd), lse
    capability, head_dim = tiles.capability(q.device), max(int(q.shape[3]), int(v_mean.shape[2]))
    tile = tiles.tile(capability, "nvfp4", "nvfp4", head_dim, attn_mask is not None)
    return launch(
        q, k_fp4, k_e4m3, k_scale, v_fp4, v_e4m3, v_scale, v_mean, attn_mask, seen, left, right,
        bottom_right, scale, n_kv, out_bnhd, q_mean, delta, tile,
        tiles.multiplies_nvfp4(capability),
    )  # fmt: skip


def launch(
    q, k_fp4, k_e4m3, k_scale, v_fp4, v_e4m3, v_scale, v_mean, attn_mask, seen, left, right,
    bottom_right, scale, n_kv, out_bnhd, q_mean, delta, tile, native: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    B, H_q, N_q, D = q.shape
    D, D_v = int(D), int(v_mean.shape[2])
    H_kv, N_pad = k_fp4.shape[1:3]
    out, lse = empty_outputs(q, D_v, out_bnhd)
    mask, seen, mask_strides, mask_kind, additive = mask_arguments(q, attn_mask, seen)
    traced(
        _attention_kernel,
        (B * H_q * triton.cdiv(N_q, tile.BLOCK_M),),
        (q, k_fp4, k_e4m3, k_scale, v_fp4, v_e4m3, v_scale, v_mean, q_mean, delta, mask, seen, out,
         lse),
        (*q.stride(), *mask_strides, *out.stride()[:3],
         H_q, H_kv, N_q, n_kv, N_pad,  # shape
         D, D_v, scale, *(-1 if x is None else x for x in (left, right)), bottom_right,
         mask_kind, additive, native,  # semantics
         tile.BLOCK_M, tile.BLOCK_N, pad_head_dim(D), pad_head_dim(D_v), tile.num_stages),  # tile
        num_warps=tile.num_warps,
    )  # fmt: skip
    return out, lse
