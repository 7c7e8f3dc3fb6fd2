"""What the kernels read, made on the GPU: recipe.py's `prepare` in Triton.

Of one head, beside the letters of ops/training/hopper/kernel.py: u_i = |dO_i| / a_i,
n_i = |o_i - v_mean|,

    beta_h = max_i u_i (max_j |v_j - v_mean| + n_i)

Scales of kT, qT and oT and the means need all rows of a head, so 16-bit rows are read twice:

    statistics   q, k, v, dO    -> of each channel and STATISTICS_ROWS rows: sums, extremes
    reduce                      -> of each channel: means, amax
    quantize     q, k, v, dO, o -> all codes, what is a number a row, without beta
    finish                      -> beta; delta, row_scale and v_scale with it; scales of qT and oT

qT's codes are those of w_i a_i q_i: beta and the softmax's scale are one for all rows and cancel.
Nothing is added in an order that changes: the same bits each time.

m_i, w_i and o come from the forward. Where they are of other codes of q and k than these, P is off.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from bench.backward.recipe import E4M3, Forward, Inputs
from sage_inductor.ops.formats import E4M3_MAX, LOG2E, NO_QUERY, TINY
from sage_inductor.ops.quantize.codes import to_8bit

STATISTICS_ROWS, ROWS, FINISH_ROWS = 128, 64, 1024
WARPS = 8  # 4 would leave _quantize_kernel 232 registers
_FP8_MAX = tl.constexpr(E4M3_MAX)
_LOG2_FP8_MAX = tl.constexpr(math.log2(E4M3_MAX))
_TINY = tl.constexpr(TINY)
_NO_QUERY = tl.constexpr(NO_QUERY)
# Planes of the partial results [6, H, blocks, D] and of the channels' [5, H, D].
_SUM_K, _MAX_K, _MIN_K, _SUM_V, _MAX_Q, _MAX_G = map(tl.constexpr, range(6))
_K_MEAN, _V_MEAN, _K_AMAX, _Q_AMAX, _G_AMAX = map(tl.constexpr, range(5))


@triton.jit
def _load(X, stride_h, stride_n, head, n, N, D: tl.constexpr):
    """Rows n of a head, in fp32; 0 where there are none."""
    d = tl.arange(0, D)
    x = X + head * stride_h + n.to(tl.int64)[:, None] * stride_n + d[None, :]
    return tl.load(x, mask=(n < N)[:, None], other=0.0).to(tl.float32)


@triton.jit
def _no_zero(amax):
    return tl.where(amax < _TINY, _TINY, amax)


@triton.jit
def _inverse(amax, LARGEST: tl.constexpr):
    return tl.div_rn(tl.full(amax.shape, LARGEST, tl.float32), amax)


@triton.jit(do_not_specialize=["N", "H", "blocks"])  # a 1 would be no tensor
def _statistics_kernel(
    Q, K, V, G,  # [H, N, D] in
    W,  # [H, N] in
    Part,  # [6, H, blocks, D] out
    stride_qh, stride_qn, stride_kh, stride_kn, stride_vh, stride_vn, stride_gh, stride_gn,
    N, H, blocks,
    D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid: (H * blocks * 2,). Keys and queries by turns."""
    pid = tl.program_id(0).to(tl.int64)
    head, block = pid // 2 // blocks, pid // 2 % blocks
    n = block.to(tl.int32) * ROWS + tl.arange(0, ROWS)
    there = (n < N)[:, None]
    out = Part + (head * blocks + block) * D + tl.arange(0, D)
    plane = H.to(tl.int64) * blocks * D
    if pid % 2 == 0:
        k = _load(K, stride_kh, stride_kn, head, n, N, D)
        tl.store(out + _SUM_K * plane, tl.sum(k, 0))
        tl.store(out + _MAX_K * plane, tl.max(tl.where(there, k, -float("inf")), 0))
        tl.store(out + _MIN_K * plane, tl.min(tl.where(there, k, float("inf")), 0))
        v = _load(V, stride_vh, stride_vn, head, n, N, D)
        tl.store(out + _SUM_V * plane, tl.sum(v, 0))
    else:
        w = tl.load(W + head * N + n, mask=n < N, other=0.0)
        g = tl.abs(_load(G, stride_gh, stride_gn, head, n, N, D))
        tl.store(out + _MAX_G * plane, tl.max(g * w[:, None], 0))
        wa = w * (_no_zero(tl.max(g, 1)) * (1.0 / 127))
        q = tl.abs(_load(Q, stride_qh, stride_qn, head, n, N, D))
        tl.store(out + _MAX_Q * plane, tl.max(q * wa[:, None], 0))


@triton.jit(do_not_specialize=["N", "H", "blocks"])  # a 1 would be no tensor
def _reduce_kernel(
    Part,  # [6, H, blocks, D] in
    Channels,  # [5, H, D] out
    N, H, blocks,
    D: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid: (H, D / BLOCK_D)."""
    head = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    plane = H.to(tl.int64) * blocks * D
    sum_k, sum_v = tl.zeros([BLOCK_D], tl.float32), tl.zeros([BLOCK_D], tl.float32)
    max_q, max_g = tl.zeros([BLOCK_D], tl.float32), tl.zeros([BLOCK_D], tl.float32)
    max_k = tl.full([BLOCK_D], -float("inf"), tl.float32)
    min_k = tl.full([BLOCK_D], float("inf"), tl.float32)
    for first in range(0, blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        part = Part + (head * blocks + block)[:, None] * D + d[None, :]
        here = (block < blocks)[:, None]
        sum_k += tl.sum(tl.load(part + _SUM_K * plane, mask=here, other=0.0), 0)
        sum_v += tl.sum(tl.load(part + _SUM_V * plane, mask=here, other=0.0), 0)
        more = tl.load(part + _MAX_K * plane, mask=here, other=-float("inf"))
        max_k = tl.maximum(max_k, tl.max(more, 0))
        less = tl.load(part + _MIN_K * plane, mask=here, other=float("inf"))
        min_k = tl.minimum(min_k, tl.min(less, 0))
        more = tl.load(part + _MAX_Q * plane, mask=here, other=0.0)
        max_q = tl.maximum(max_q, tl.max(more, 0))
        more = tl.load(part + _MAX_G * plane, mask=here, other=0.0)
        max_g = tl.maximum(max_g, tl.max(more, 0))
    mean = sum_k / N
    amax = _no_zero(tl.maximum(max_k - mean, mean - min_k))
    out, plane = Channels + head * D + d, H.to(tl.int64) * D
    tl.store(out + _K_MEAN * plane, mean)
    tl.store(out + _V_MEAN * plane, sum_v / N)
    tl.store(out + _K_AMAX * plane, amax)
    tl.store(out + _Q_AMAX * plane, max_q)
    tl.store(out + _G_AMAX * plane, max_g)


@triton.jit
def _store_turned(x, amax, Out, head, column, N_pad, D: tl.constexpr):
    """x [ROWS, D], tokens permuted, by the largest of amax [D] -> [H, D, N_pad] e4m3."""
    amax = _no_zero(tl.max(amax, 0, keep_dims=True))
    x = (x * _inverse(amax, _FP8_MAX)[None, :]).to(tl.float8e4nv)
    rows = head * D + tl.arange(0, D)
    tl.store(Out + rows[:, None] * N_pad + column[None, :], x.T)


@triton.jit(do_not_specialize=["N", "H"])  # a 1 would be no tensor
def _quantize_kernel(
    Q, K, V, G, O,  # [H, N, D] in
    M, W,  # [H, N] in
    Channels,  # [5, H, D] in
    Q8, G8, K8, V8,  # [H, N_pad, D] out
    Qt, Ot, Kt,  # [H, D, N_pad] out
    Vectors,  # [3, H, N_pad] out: q_scale, m - log2 448, delta beta
    Wa,  # [H, N_pad] out: w a
    K_scale, V_scale,  # [H, N_pad / 64], [H, N_pad] out
    Norms,  # [2, H, N_pad] out: u, n
    V_norm,  # [H, N_pad / ROWS] out: the largest |v - v_mean|, squared
    stride_qh, stride_qn, stride_kh, stride_kn, stride_vh, stride_vn, stride_gh, stride_gn,
    stride_oh, stride_on,
    N, H, N_pad, Q_SCALE,
    D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid: (H * N_pad / ROWS * 2,). Keys and queries by turns; rows in kT's order of tokens."""
    pid = tl.program_id(0).to(tl.int64)
    blocks = N_pad // ROWS
    head, block = pid // 2 // blocks, pid // 2 % blocks
    column = block.to(tl.int32) * ROWS + tl.arange(0, ROWS)
    n = (column & ~15) | (column & 2) << 2 | (column & 12) >> 1 | (column & 1)
    there = (n < N)[:, None]
    d = tl.arange(0, D)
    here = head * N_pad + n  # of a row
    codes = here[:, None] * D + d[None, :]
    plane = H.to(tl.int64) * D
    channels = Channels + head * D + d
    v_mean = tl.load(channels + _V_MEAN * plane)
    if pid % 2 == 0:
        mean = tl.load(channels + _K_MEAN * plane)
        x = _load(K, stride_kh, stride_kn, head, n, N, D)
        x = tl.where(there, x - mean[None, :], 0.0)
        _store_turned(x, tl.load(channels + _K_AMAX * plane), Kt, head, column, N_pad, D)
        GROUPS: tl.constexpr = ROWS // 64
        amax = tl.max(tl.max(tl.abs(x), 1).reshape([GROUPS, 64]), 1)
        amax = _no_zero(amax)
        group = block * GROUPS + tl.arange(0, GROUPS)
        tl.store(K_scale + head * (N_pad // 64) + group, amax * (1.0 / 127))
        inverse = _inverse(amax, 127.0)[:, None].broadcast_to([GROUPS, 64]).reshape([ROWS])
        tl.store(K8 + codes, to_8bit(x, inverse[:, None], 127.0))

        x = _load(V, stride_vh, stride_vn, head, n, N, D)
        x = tl.where(there, x - v_mean[None, :], 0.0)
        amax = _no_zero(tl.max(tl.abs(x), 1))
        tl.store(V_scale + here, tl.where(n < N, amax * (1.0 / 127), 0.0))
        tl.store(V8 + codes, to_8bit(x, _inverse(amax, 127.0)[:, None], 127.0))
        tl.store(V_norm + head * blocks + block, tl.max(tl.sum(x * x, 1)))
    else:
        plane_n = H.to(tl.int64) * N_pad
        w = tl.load(W + head * N + n, mask=n < N, other=0.0)
        m = tl.load(M + head * N + n, mask=n < N, other=0.0)
        tl.store(Vectors + plane_n + here, tl.where(n < N, m - _LOG2_FP8_MAX, _NO_QUERY))
        x = _load(G, stride_gh, stride_gn, head, n, N, D)
        amax = _no_zero(tl.max(tl.abs(x), 1))
        inverse = _inverse(amax, 127.0)
        tl.store(G8 + codes, to_8bit(x, inverse[:, None], 127.0))
        _store_turned(
            x * w[:, None], tl.load(channels + _G_AMAX * plane), Ot, head, column, N_pad, D
        )
        wa = w * (amax * (1.0 / 127))
        tl.store(Wa + here, wa)
        x = x * inverse[:, None]
        o = _load(O, stride_oh, stride_on, head, n, N, D)
        o = tl.where(there, o - v_mean[None, :], 0.0)
        tl.store(Vectors + 2 * plane_n + here, tl.sum(x * o, 1))
        tl.store(Norms + here, tl.sqrt(tl.sum(x * x, 1)))
        tl.store(Norms + plane_n + here, tl.sqrt(tl.sum(o * o, 1)))

        x = _load(Q, stride_qh, stride_qn, head, n, N, D)
        amax = _no_zero(tl.max(tl.abs(x), 1))
        q_scale = amax * (1.0 / 127) * Q_SCALE
        tl.store(Vectors + here, tl.where(n < N, q_scale, 0.0))
        tl.store(Q8 + codes, to_8bit(x, _inverse(amax, 127.0)[:, None], 127.0))
        _store_turned(
            x * wa[:, None], tl.load(channels + _Q_AMAX * plane), Qt, head, column, N_pad, D
        )


@triton.jit(do_not_specialize=["H"])  # a 1 would be no tensor
def _finish_kernel(
    Norms, V_norm, Channels,  # in
    Vectors, Row_scale, V_scale,  # in and out
    Qt_scale, Ot_scale,  # [H] out
    H, N_pad, v_blocks, SOFTMAX_SCALE,
    D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid: (H, cdiv(N_pad, ROWS)). Each program computes its head's beta."""
    head = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, ROWS)
    plane = H.to(tl.int64) * N_pad
    largest = tl.zeros([ROWS], tl.float32)
    for first in range(0, v_blocks, ROWS):
        more = tl.load(V_norm + head * v_blocks + first + i, mask=first + i < v_blocks, other=0.0)
        largest = tl.maximum(largest, more)
    v_norm = tl.sqrt(tl.max(largest, 0))
    largest = tl.zeros([ROWS], tl.float32)
    for first in range(0, N_pad, ROWS):
        norms = Norms + head * N_pad + first + i
        u = tl.load(norms, mask=first + i < N_pad, other=0.0)
        o_norm = tl.load(norms + plane, mask=first + i < N_pad, other=0.0)
        largest = tl.maximum(largest, u * (v_norm + o_norm))
    beta = _no_zero(tl.max(largest, 0))
    n = tl.program_id(1) * ROWS + i
    here = head * N_pad + n
    delta = tl.load(Vectors + 2 * plane + here, mask=n < N_pad)
    tl.store(Vectors + 2 * plane + here, delta / beta, mask=n < N_pad)
    v_scale = tl.load(V_scale + here, mask=n < N_pad)
    tl.store(V_scale + here, v_scale / beta, mask=n < N_pad)
    beta *= SOFTMAX_SCALE * (1.0 / _FP8_MAX)
    channels = Channels + head * D + tl.arange(0, D)
    plane = H.to(tl.int64) * D
    kt_scale = _no_zero(tl.max(tl.load(channels + _K_AMAX * plane), 0)) * (1.0 / _FP8_MAX)
    row_scale = tl.load(Row_scale + here, mask=n < N_pad)
    tl.store(Row_scale + here, row_scale * beta * kt_scale, mask=n < N_pad)
    if tl.program_id(1) == 0:
        amax = tl.max(tl.load(channels + _Q_AMAX * plane), 0)
        tl.store(Qt_scale + head, _no_zero(amax * beta) * (1.0 / _FP8_MAX))
        amax = tl.max(tl.load(channels + _G_AMAX * plane), 0)
        tl.store(Ot_scale + head, _no_zero(amax * (1.0 / _FP8_MAX)) * (1.0 / _FP8_MAX))


def empty(H: int, N: int, D: int, device) -> Inputs:
    pad = -(-N // 256) * 256

    def fp32(*shape):
        return torch.empty(shape, device=device)

    def codes(*shape, dtype=torch.int8):
        return torch.empty(shape, device=device, dtype=dtype)

    return Inputs(
        N, pad, *(codes(H, pad, D) for _ in range(4)),
        *(codes(H, D, pad, dtype=E4M3) for _ in range(3)),
        fp32(3, H, pad), fp32(H, pad), fp32(H, pad // 64), fp32(H, pad),
        fp32(H), fp32(H),
    )  # fmt: skip


def prepare(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, forward: Forward, softmax_scale=None
) -> Inputs:
    """recipe.prepare's, of 16-bit [H, N, D] with rows of any strides. D: a power of 2."""
    H, N, D = q.shape
    sm = D**-0.5 if softmax_scale is None else softmax_scale
    if any(t.stride(2) != 1 for t in (q, k, v, do, forward.o)):
        raise ValueError("the channels of a row must be neighbours")
    if sm <= 0:
        raise ValueError(f"softmax_scale must be positive, got {sm}")
    m, w = forward.m.contiguous(), forward.w.contiguous()
    x = empty(H, N, D, q.device)
    blocks, v_blocks = -(-N // STATISTICS_ROWS), x.pad // ROWS
    part = torch.empty((6, H, blocks, D), device=q.device)
    channels = torch.empty((5, H, D), device=q.device)
    norms = torch.empty((2, H, x.pad), device=q.device)
    v_norm = torch.empty((H, v_blocks), device=q.device)
    strides = [each for t in (q, k, v, do, forward.o) for each in t.stride()[:2]]
    _statistics_kernel[(H * blocks * 2,)](
        q, k, v, do, w, part,
        *strides[:8], N, H, blocks,
        D=D, ROWS=STATISTICS_ROWS, num_warps=WARPS,
    )  # fmt: skip
    _reduce_kernel[(H, D // 32)](
        part, channels,
        N, H, blocks,
        D=D, BLOCKS=64, BLOCK_D=32, num_warps=4,
    )  # fmt: skip
    _quantize_kernel[(H * v_blocks * 2,)](
        q, k, v, do, forward.o, m, w, channels,
        x.q8, x.g8, x.k8, x.v8, x.qt, x.ot, x.kt,
        x.vectors, x.row_scale, x.k_scale, x.v_scale, norms, v_norm,
        *strides, N, H, x.pad, sm * LOG2E,
        D=D, ROWS=ROWS, num_warps=WARPS,
    )  # fmt: skip
    _finish_kernel[(H, -(-x.pad // FINISH_ROWS))](
        norms, v_norm, channels, x.vectors, x.row_scale, x.v_scale, x.qt_scale, x.ot_scale,
        H, x.pad, v_blocks, sm,
        D=D, ROWS=FINISH_ROWS, num_warps=4,
    )  # fmt: skip
    return x
