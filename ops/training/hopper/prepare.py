"""What the FP8 backward (backward_kernels.py) reads, in three Triton kernels.

Letters as in backward_kernels.py: of a row i of q's side, a_i is dO's scale, qs_i q's scale,
w_i = 2^(m_i - lse_i); of a row j of k's side ks_j and vs_j are k's and v's scales;
u_i = |dO_i| / a_i, n_i = |o_i - v_mean|. q8 and k8 are of rotated rows, k's halved; turned back by
R (quantize/rotate.py) they are q^_i = q8_i R^T / n and k^_j = k8_j R^T / n, at most 127, of which
q_i = qs_i q^_i and k_j = 2 ks_j k^_j. A head of k and v, with the heads of q that share it, has

    beta = max_i u_i max_j |v_j| + max_i (u_i n_i)       >= |dP_ij - delta_ij| / a_i,
           of numbers: a NaN in one head of q or dO stays out of the other heads' dQ
    c^o  = max_i (w_i a_i) 127 / 448^2                   of oT = e4m3(w_i a_i g8_i / (448 c^o))
    c^q  = scale beta max_i (w_i a_i qs_i) 127 / 448^2   of qT = e4m3(r_i qs_i q^_i / c^q)
    c^k  = 2 max_j ks_j 127 / 448                        of kT = e4m3(2 ks_j k^_j / c^k)

(qs here without the softmax's scale.)

    rows     dO and o, 16 bits: g8, what is a number a row, maxima of each block of rows
    bounds   of each head: beta, and what the scales of qT, oT and kT are made of
    turn     q8, g8 and k8, 8 bits: qT, oT and kT, and what beta goes into

CAUSAL (backward_kernels.py), with maxima over the keys j <= i that a row sees:

    beta   = max_i (u_i max_j |v_j| + u_i n_i)
    beta_i = u_i max_j (|v_j| ks_j) + u_i n_i max_j ks_j     of dQ, in m and in row_scale
    c^k    = 2 127 / 448

where ks_j is k's scale of the row or, for the rows that see all of its block, of the block.

    bounds   what dQ's kernel reads of beta_i, too; a program for each BOUNDS_ROWS rows

kT and qT are turned back before E4M3 rounds them, because it rounds a channel by its own size: of
rotated ones a strong channel of k would round all of dQ by its size.

No channel has a scale of its own: E4M3 has 15 octaves of normal numbers, and on seven families of
inputs gradients are as near with one scale a head (relative L1 within .0024). So rows of 16 bits
are read once. Nothing is added in an order that changes: the same bits each time.

Shapes: B batch, H_q and H_kv heads, N_q and N_kv sequence, D head_dim; M_pad, N_pad and BLOCK_D are
formats.py's pad_rows of N_q and N_kv and pad_head_dim of D.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from sage_inductor.ops.attention.large_scores import flatness
from sage_inductor.ops.constants import FP8_MAX, LOG2_FP8_MAX, LOG2E, TINY
from sage_inductor.ops.formats import E4M3_MAX, NO_QUERY, OF_HALF, rotation_scale
from sage_inductor.ops.formats import TRAINING_BLOCK as BLOCK
from sage_inductor.ops.launch import doubled
from sage_inductor.ops.quantize.codes import abs_bits, scale_of, to_8bit
from sage_inductor.ops.quantize.rotate import odd_of_rotation
from sage_inductor.ops.reference.rowscaled import Kept, Operands

NUM_WARPS = 4
BOUNDS_ROWS = 1024
# Of _turn_kernel's programs, which make their matrices once: 4, 8, 16 take 98, 91, 88 us at
# (1, 32, 8192, 128), 8 and 16 take 43 and 48 at (1, 24, 4608, 128) (H200, 2026-11-28).
TURNS = 8
_BLOCK = tl.constexpr(BLOCK)
_TO_FP8 = tl.constexpr(E4M3_MAX / 127)  # the largest INT8 code becomes the largest E4M3 number
_OF_FP8 = tl.constexpr(127 / E4M3_MAX)
_OF_HALF = tl.constexpr(OF_HALF)
_NO_QUERY = tl.constexpr(NO_QUERY)
# A block of rows has: the largest w a, w a qs, u and u n.
MAXIMA = 4
_WA, _WAQ, _U, _UN = map(tl.constexpr, range(MAXIMA))
OF_HEAD = 3  # numbers of a head of k and v: these first two, the largest ks
_K = tl.constexpr(2)
_BETAS = tl.constexpr(128)  # that are loaded at once


@triton.jit
def _largest(x):
    """The largest of numbers that are not negative, NaN above all."""
    return tl.max(abs_bits(x), 0).to(tl.float32, bitcast=True)


@triton.jit
def _rows_kernel(
    Grad, Out,  # [B, H_q, N_q, D] in, 16 bits
    Stats,  # Kept's
    Q_scale, V, V_scale,  # Kept's
    V_mean,  # [B, H_kv, D] in: unread if CAUSAL
    G,  # [B, H_q, M_pad, BLOCK_D] INT8 out
    Vectors,  # [3, B, H_q, M_pad] out: Operands'; the last is Delta's
    Delta,  # [B, H_q, M_pad] out: delta times beta; the last of Vectors, or CAUSAL another
    Wa,  # [B, H_q, M_pad] out: w a
    Of_rows, V_norm,  # [2, B, H_q, M_pad], [B, H_kv, N_pad] out: u and u n, |v|; if CAUSAL
    Part, Part_v,  # [MAXIMA, B, H_q, M_pad / BLOCK], [B, H_kv, N_pad / BLOCK] out
    # CAUSAL: two of MAXIMA alone
    stride_gb, stride_gh, stride_gn, stride_gd,
    stride_ob, stride_oh, stride_on, stride_od,
    q_blocks, heads, H_q, H_kv, N_q, M_pad,  # heads: B * H_q
    SCALE_OF_CODES: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid: ((B H_q M_pad + B H_kv N_pad) / BLOCK,). BLOCK rows of dO and o, then of v."""
    stride_gb, stride_gh, stride_gn = stride_gb // 2, stride_gh // 2, stride_gn // 2
    stride_ob, stride_oh, stride_on = stride_ob // 2, stride_oh // 2, stride_on // 2
    pid, blocks = tl.program_id(0), M_pad // _BLOCK
    i, d = tl.arange(0, _BLOCK), tl.arange(0, BLOCK_D)
    if pid >= q_blocks:
        block_v = (pid - q_blocks).to(tl.int64)
        rows = block_v * _BLOCK + i
        v = tl.load(V + rows[:, None] * BLOCK_D + d[None, :]).to(tl.float32)
        norm = tl.sqrt(tl.sum(v * v, 1)) * tl.load(V_scale + rows)
        tl.store(Part_v + block_v, _largest(norm))
        if CAUSAL:
            tl.store(V_norm + rows, norm)
    else:
        head, block = (pid // blocks).to(tl.int64), pid % blocks
        b, h = head // H_q, head % H_q
        n = block * _BLOCK + i
        there = n < N_q
        inside = there[:, None] & (d < D)[None, :]
        grad = Grad + b * stride_gb + h * stride_gh + n.to(tl.int64)[:, None] * stride_gn
        grad = tl.load(grad + d.to(tl.int64)[None, :] * stride_gd, mask=inside, other=0.0)
        grad = grad.to(tl.float32)
        inverse, a = scale_of(tl.max(abs_bits(grad), 1), 127.0)
        here = head * M_pad + n
        tl.store(G + here[:, None] * BLOCK_D + d[None, :], to_8bit(grad, inverse[:, None], 127.0))

        out = Out + b * stride_ob + h * stride_oh + n.to(tl.int64)[:, None] * stride_on
        out = tl.load(out + d.to(tl.int64)[None, :] * stride_od, mask=inside, other=0.0)
        out = out.to(tl.float32)
        if not CAUSAL:
            mean = V_mean + (b * H_kv + h // (H_q // H_kv)) * D + d
            mean = tl.load(mean, mask=d < D, other=0.0)
            out = tl.where(inside, out - mean[None, :], 0.0)
        grad = grad * inverse[:, None]  # in units of a: its square cannot underflow
        u = tl.sqrt(tl.sum(grad * grad, 1))

        stats = Stats + head * N_q + n
        lse = tl.load(stats, mask=there, other=float("inf"))
        m = tl.load(stats + tl.cast(N_q, tl.int64) * heads, mask=there, other=0.0)
        wa = tl.exp2(m - lse * LOG2E) * a
        q_scale = tl.load(Q_scale + here)
        plane = M_pad.to(tl.int64) * heads
        flat = flatness(m)
        of_codes = q_scale * (SCALE_OF_CODES * LOG2E) * flat
        tl.store(Vectors + here, tl.where(there, of_codes, 0.0))
        tl.store(Vectors + plane + here, tl.where(there, m * flat - LOG2_FP8_MAX, _NO_QUERY))
        tl.store(Delta + here, tl.sum(grad * out, 1))
        tl.store(Wa + here, wa)
        un = u * tl.sqrt(tl.sum(out * out, 1))
        if CAUSAL:
            tl.store(Of_rows + here, u)
            tl.store(Of_rows + plane + here, un)
        part = Part + head * blocks + block
        plane = blocks.to(tl.int64) * heads
        tl.store(part + _WA * plane, _largest(wa))
        tl.store(part + _WAQ * plane, _largest(wa * q_scale))
        if not CAUSAL:
            tl.store(part + _U * plane, _largest(tl.where(u == u, u, 0.0)))
            tl.store(part + _UN * plane, _largest(tl.where(un == un, un, 0.0)))


@triton.jit
def _at_least_tiny(x):
    return tl.where(x < TINY, TINY, x)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _largest_so_far(x, before):
    """[ROWS], the largest number so far: none is negative, NaN is above all. before: the largest
    before them."""
    bits = tl.maximum(tl.associative_scan(abs_bits(x), 0, _larger), abs_bits(before))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _largest_part(Part, count, ROWS: tl.constexpr):
    """The largest of numbers that are not negative, NaN above all."""
    bits = tl.zeros([ROWS], tl.int32)
    for first in range(0, count, ROWS):
        at = first + tl.arange(0, ROWS)
        bits = tl.maximum(bits, abs_bits(tl.load(Part + at, mask=at < count, other=0.0)))
    return tl.max(bits, 0).to(tl.float32, bitcast=True)


@triton.jit
def _largest_products(A, B, count, ROWS: tl.constexpr):
    """As _largest_part, of A, of B, and of their products."""
    a_bits, b_bits = tl.zeros([ROWS], tl.int32), tl.zeros([ROWS], tl.int32)
    bits = tl.zeros([ROWS], tl.int32)
    for first in range(0, count, ROWS):
        at = first + tl.arange(0, ROWS)
        a = tl.load(A + at, mask=at < count, other=0.0)
        b = tl.load(B + at, mask=at < count, other=0.0)
        a_bits, b_bits = tl.maximum(a_bits, abs_bits(a)), tl.maximum(b_bits, abs_bits(b))
        bits = tl.maximum(bits, abs_bits(a * b))
    return (
        tl.max(a_bits, 0).to(tl.float32, bitcast=True),
        tl.max(b_bits, 0).to(tl.float32, bitcast=True),
        tl.max(bits, 0).to(tl.float32, bitcast=True),
    )


@triton.jit
def _bounds_kernel(
    K_scale, K_own_scale,  # Kept's
    Part, Part_v, Of_rows, V_norm, Vectors, Wa,  # _rows_kernel's
    Of_head,  # [OF_HEAD, B, H_kv] out: the largest w a and w a qs; but CAUSAL, the largest ks
    Beta,  # [B, H_kv, rounds] out: the largest is beta
    M, Row_scale,  # Operands', out if CAUSAL
    heads, H_q, H_kv, M_pad, N_pad,  # heads: B * H_q
    SCALE: tl.constexpr, CAUSAL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid: (B * H_kv, 1), CAUSAL (B * H_kv, rounds of ROWS rows). What divides is at least TINY:
    k's scales are more than 0 as they are."""
    head_kv, group = tl.program_id(0).to(tl.int64), H_q // H_kv
    head = (head_kv // H_kv) * H_q + head_kv % H_kv * group
    blocks, kv_blocks = M_pad // _BLOCK, N_pad // _BLOCK
    part, plane = Part + head * blocks, blocks.to(tl.int64) * heads
    of_head, heads_kv = Of_head + head_kv, tl.num_programs(0).to(tl.int64)
    part_v, k_scales = Part_v + head_kv * kv_blocks, K_scale + head_kv * kv_blocks
    parts = group * blocks
    turn = tl.program_id(1)
    beta_of_turn = Beta + head_kv * tl.num_programs(1) + turn
    if turn == 0:
        wa = _largest_part(part + _WA * plane, parts, ROWS)
        waq = _largest_part(part + _WAQ * plane, parts, ROWS)
        tl.store(of_head + _WA * heads_kv, _at_least_tiny(wa))
        tl.store(of_head + _WAQ * heads_kv, _at_least_tiny(waq))
    if not CAUSAL:
        u = _largest_part(part + _U * plane, parts, ROWS)
        un = _largest_part(part + _UN * plane, parts, ROWS)
        v, k, _ = _largest_products(part_v, k_scales, kv_blocks, ROWS)
        tl.store(beta_of_turn, _at_least_tiny(u * v + un))
        tl.store(of_head + _K * heads_kv, k)
    else:
        plane = M_pad.to(tl.int64) * heads
        rows = turn * ROWS + tl.arange(0, ROWS)
        there, block = rows < N_pad, rows // _BLOCK
        v, k, vk = _largest_products(part_v, k_scales, turn * (ROWS // _BLOCK), ROWS)
        norm = tl.load(V_norm + head_kv * N_pad + rows, mask=there, other=0.0)
        k_scale = tl.load(K_own_scale + head_kv * N_pad + rows, mask=there, other=0.0)
        # A block's last row has seen the whole block, so its bound uses the block's scale.
        last = there & (rows % _BLOCK == _BLOCK - 1)
        of_block = tl.load(part_v + block, mask=last, other=0.0)
        of_block *= tl.load(k_scales + block, mask=last, other=0.0)
        vk = _largest_so_far(tl.where(last, of_block, norm * k_scale), vk)
        v, k = _largest_so_far(norm, v), _largest_so_far(k_scale, k)
        beta = tl.zeros([ROWS], tl.float32)
        for g in range(group):
            here = (head + g) * M_pad + rows
            u = tl.load(Of_rows + here, mask=there, other=0.0)
            un = tl.load(Of_rows + plane + here, mask=there, other=0.0)
            m = tl.load(Vectors + plane + here, mask=there, other=0.0)
            wa_of_row = tl.load(Wa + here, mask=there, other=0.0)
            beta = tl.maximum(beta, u * v + un, tl.PropagateNan.ALL)
            of_row = _at_least_tiny(u * vk + un * k)
            tl.store(M + here, m + tl.log2(of_row), mask=there)
            scale = of_row * (_OF_HALF * SCALE / FP8_MAX * _OF_FP8)
            tl.store(Row_scale + here, wa_of_row * scale, mask=there)
        tl.store(beta_of_turn, _at_least_tiny(_largest(beta)))


@triton.jit
def _matrix(BLOCK_D: tl.constexpr, ROTATED: tl.constexpr):
    """[BLOCK_D, BLOCK_D] INT8, channels by those of codes: R (quantize/rotate.py) or 1."""
    c, r = tl.arange(0, BLOCK_D)[:, None], tl.arange(0, BLOCK_D)[None, :]
    if ROTATED:
        return (1 - 2 * odd_of_rotation(c, r)).to(tl.int8)
    else:
        return tl.where(c == r, 1, 0).to(tl.int8)


@triton.jit
def _store_turned(Codes, row0, matrix, factor, Turned, head, column, N, BLOCK_D: tl.constexpr):
    """BLOCK rows of Codes from row0 on, times matrix and a factor for each row -> a head's columns
    from `column` on, of [.., BLOCK_D, N] in E4M3.

    The product transposes, exactly, as it turns. A group of 16 columns holds its 16 tokens in
    another order: place 4t + 2h + e is token 8h + 2t + e, so that P and dS go from accumulator to
    operand within a thread. It is the order of this product's accumulator, too."""
    i, d = tl.arange(0, _BLOCK), tl.arange(0, BLOCK_D)
    codes = tl.load(Codes + (row0 + i)[:, None] * BLOCK_D + d[None, :])
    x = tl.dot(matrix, codes.T).to(tl.float32) * factor[None, :]
    x = x.reshape([BLOCK_D, _BLOCK // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4])
    x = x.reshape([BLOCK_D, _BLOCK]).to(tl.float8e4nv)
    tl.store(Turned + (head * BLOCK_D + d)[:, None] * N + (column + i)[None, :], x)


@triton.jit
def _turn_kernel(
    Q, Q_scale, K, K_scale, K_own, V_scale,  # Kept's
    G, Wa,  # _rows_kernel's
    Of_head, Beta,  # _bounds_kernel's
    Qt, Ot, Kt, Kt_own,  # Operands', out
    Delta, Vectors,  # _rows_kernel's, in; out: delta
    Row_scale, V_scaled, V_of_dq, Qt_scale, Ot_scale,  # Operands', out
    q_programs, heads, heads_kv, H_q, H_kv, M_pad, N_pad, rounds,  # heads_kv: B * H_kv
    SCALE: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_D: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Grid: (q_programs + of k,). Up to TURNS BLOCKs of a head's rows, of q and dO, then of k and
    v."""
    pid = tl.program_id(0)
    is_key = pid >= q_programs
    blocks = tl.where(is_key, N_pad, M_pad) // _BLOCK
    N = blocks * _BLOCK  # of which Triton knows that 16 divides it
    program, turns = tl.where(is_key, pid - q_programs, pid), tl.cdiv(blocks, TURNS)
    head, turn0 = (program // turns).to(tl.int64), program % turns * TURNS
    end = tl.minimum(turn0 + TURNS, blocks)
    group = H_q // H_kv
    b, h = head // H_q, head % H_q
    head_kv = tl.where(is_key, head, b * H_kv + h // group)
    of_head = Of_head + head_kv
    largest_wa = tl.load(of_head + _WA * heads_kv)
    largest_waq = tl.load(of_head + _WAQ * heads_kv)
    beta = _largest_part(Beta + head_kv * rounds, rounds, _BETAS)
    if not CAUSAL:
        largest_k = tl.load(of_head + _K * heads_kv)

    turned = _matrix(BLOCK_D, True)
    i = tl.arange(0, _BLOCK)
    if is_key:
        for block in range(turn0, end):
            first = block * _BLOCK
            row0 = head * N + first
            here = row0 + i
            factor = tl.full([_BLOCK], _TO_FP8 / BLOCK_D, tl.float32)
            if not CAUSAL:
                factor = tl.load(K_scale + here // _BLOCK) * (_TO_FP8 / BLOCK_D / largest_k)
            _store_turned(K, row0, turned, factor, Kt, head, first, N, BLOCK_D)
            v_scale = tl.load(V_scale + here)
            tl.store(V_scaled + here, v_scale / beta)
            if CAUSAL:
                _store_turned(K_own, row0, turned, factor, Kt_own, head, first, N, BLOCK_D)
                tl.store(V_of_dq + here, v_scale * tl.load(K_scale + here // _BLOCK))
        if turn0 == 0:
            c = _OF_FP8 / FP8_MAX
            tl.store(Qt_scale + head_kv, largest_waq * ((c * SCALE) * beta))
            tl.store(Ot_scale + head_kv, largest_wa * c)
    else:
        unturned = _matrix(BLOCK_D, False)
        for block in range(turn0, end):
            first = block * _BLOCK
            row0 = head * N + first
            here = row0 + i
            column = h % group * N + first  # of those of the group's heads
            rows = N.to(tl.int64) * group
            wa = tl.load(Wa + here)
            factor = wa * (_TO_FP8 / largest_wa)
            _store_turned(G, row0, unturned, factor, Ot, head_kv, column, rows, BLOCK_D)
            factor = wa * tl.load(Q_scale + here) * (_TO_FP8 / BLOCK_D / largest_waq)
            _store_turned(Q, row0, turned, factor, Qt, head_kv, column, rows, BLOCK_D)
            if not CAUSAL:
                scale = beta * (_OF_HALF * SCALE / FP8_MAX) * (largest_k * _OF_FP8)
                tl.store(Row_scale + here, wa * scale)
            plane = M_pad.to(tl.int64) * heads
            tl.store(Vectors + 2 * plane + here, tl.load(Delta + here) / beta)


def launch_prepare(grad: Tensor, out: Tensor, kept: Kept, scale: float, run: Callable) -> Operands:
    """grad, of out, and out [B, H_q, N_q, D] in 16 bits, any strides. scale: of the softmax, more
    than 0."""
    (B, H_q, N_q, D), (H_kv, N_pad, BLOCK_D), M_pad = out.shape, kept.k.shape[1:], kept.q.shape[2]
    causal = kept.is_causal

    def fp8(rows: int) -> Tensor:
        return kept.k.new_empty((B, H_kv, BLOCK_D, rows), dtype=torch.float8_e4m3fn)

    def fp32(*shape) -> Tensor:
        return kept.stats.new_empty(shape)

    vectors, v_scale = fp32(3, B, H_q, M_pad), fp32(B, H_kv, N_pad)
    kt = fp8(N_pad)
    kt_own, of_dq = kt, (vectors[1], vectors[2], v_scale)
    if causal:
        kt_own = fp8(N_pad)
        of_dq = (fp32(B, H_q, M_pad), fp32(B, H_q, M_pad), torch.empty_like(v_scale))
    operands = Operands(
        torch.empty_like(kept.q), *(fp8(H_q // H_kv * M_pad) for _ in "qo"), kt, kt_own,
        vectors, fp32(B, H_q, M_pad), v_scale, *(fp32(B, H_kv) for _ in "qo"), *of_dq,
    )  # fmt: skip
    wa, part = fp32(B, H_q, M_pad), fp32(2 if causal else MAXIMA, B, H_q, M_pad // BLOCK)
    part_v = fp32(B, H_kv, N_pad // BLOCK)
    of_rows = v_norm = own = own_scale = None
    if causal:
        of_rows, v_norm = fp32(2, B, H_q, M_pad), fp32(B, H_kv, N_pad)
        own, own_scale = kept.k_own, kept.k_own_scale
    rounds = triton.cdiv(N_pad, BOUNDS_ROWS) if causal else 1
    q_blocks, kv_blocks = B * H_q * M_pad // BLOCK, B * H_kv * N_pad // BLOCK
    run(
        _rows_kernel,
        (q_blocks + kv_blocks,),
        (grad, out, kept.stats, kept.q_scale, kept.v, kept.v_scale, kept.v_mean,
         operands.g, vectors, operands.delta, wa, of_rows, v_norm, part, part_v),
        (*doubled(grad.stride()), *doubled(out.stride()),
         q_blocks, B * H_q, H_q, H_kv, N_q, M_pad,  # shape
         scale * rotation_scale(BLOCK_D), causal, D, BLOCK_D),
        num_warps=NUM_WARPS,
    )  # fmt: skip
    of_head, beta = fp32(OF_HEAD, B, H_kv), fp32(B, H_kv, rounds)
    run(
        _bounds_kernel,
        (B * H_kv, rounds),
        (kept.k_scale, own_scale, part, part_v, of_rows, v_norm, vectors, wa, of_head, beta,
         operands.m, operands.row_scale),
        (B * H_q, H_q, H_kv, M_pad, N_pad,  # shape
         scale, causal, BOUNDS_ROWS),
        num_warps=NUM_WARPS,
    )  # fmt: skip
    q_programs = B * H_q * triton.cdiv(M_pad, BLOCK * TURNS)
    kv_programs = B * H_kv * triton.cdiv(N_pad, BLOCK * TURNS)
    run(
        _turn_kernel,
        (q_programs + kv_programs,),
        (kept.q, kept.q_scale, kept.k, kept.k_scale, own, kept.v_scale, operands.g, wa, of_head,
         beta, operands.qt, operands.ot, kt, kt_own, operands.delta, vectors, operands.row_scale,
         v_scale, operands.v_scale_of_dq, operands.qt_scale, operands.ot_scale),
        (q_programs, B * H_q, B * H_kv, H_q, H_kv, M_pad, N_pad, rounds,  # shape
         scale, causal, BLOCK_D, TURNS),
        num_warps=NUM_WARPS,
    )  # fmt: skip
    return operands
