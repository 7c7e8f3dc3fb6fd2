"""SageBwd's kernels, in portable Triton: INT8 in all products but one, forward and backward.

    s  = q_int8 k_int8^T * q_scale * k_scale * scale * log2 e           log2 units; k is smoothed
    forward, by tiles of keys: t = max of s in the tile, m the running maximum
    p  = exp2(s - t)                 codes of p = round(127 p)          a scale of 1 / 127 a row
    o  = (sum over tiles of p_int8 v_int8 * v_scale / 127 * exp2(t - m)) / l
    backward, by the same tiles:
    p  = exp2(s - lse)               dV += p_int8^T dO_int8 * p_scale * dO_scale
    dP = dO v^T                      in 16 bits
    dS = p (dP - delta)              dQ += dS_int8 k_int8 * dS_scale * k_scale
                                     dK += dS_int8^T q_int8 * dS_scale * q_scale

BLOCK rows of q, k, v and dO share a scale, and BLOCK x BLOCK numbers of p and dS in the backward.
That is three kernels, each of which adds up in one order: no atomics, and the same bits every time.
It computes s of the forward's codes: of others its p would not sum to 1.

Tensor cores take 8-bit operands with the dimension that is summed over last. So v, dO, q and k are
needed transposed, too: [.., D, N].

Source: SageAttention3 (arXiv:2505.11594, section 4, algorithms 2 and 3), SageBwd
(arXiv:2603.02170).
Shapes: B batch, H_q and H_kv heads, N_q and N_kv sequence, D head_dim; N_pad and BLOCK_D are
formats.py's pad_rows of N and pad_head_dim of D.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from sage_inductor.ops.attention.large_scores import flatness
from sage_inductor.ops.attention.visible_tiles import heads_of
from sage_inductor.ops.constants import INT8_MAX, LOG2E
from sage_inductor.ops.formats import PAD_N, pad_head_dim, pad_rows
from sage_inductor.ops.formats import TRAINING_BLOCK as BLOCK
from sage_inductor.ops.gpus import Gpu, capability
from sage_inductor.ops.launch import doubled
from sage_inductor.ops.quantize.codes import abs_bits, scale_of, to_8bit
from sage_inductor.ops.quantize.rotate import in_16_bits, rotate

# A program's. With 64 rows and 4 warps dQ and dK take 1.4 times as long (H200, 2026-11-23).
ROWS, NUM_WARPS = 128, 8
_BLOCK = tl.constexpr(BLOCK)


def num_stages(device: torch.device | Gpu) -> int:
    """Stages of loads that fit a program's shared memory, 99 KiB if not known to be more. Two are
    up to 1.2x as slow as three (H200, 2026-11-23)."""
    roomy = device.type == "cuda" and capability(device) in ((8, 0), (9, 0), (10, 0))
    return 3 if roomy else 2


@triton.jit
def _to_codes(x, SHARED: tl.constexpr):
    """Codes of x [M, C], of which each SHARED rows share a scale, and the scales [M]."""
    M: tl.constexpr = x.shape[0]
    amax = tl.max(abs_bits(x), 1)
    if SHARED > 1:
        amax = tl.max(amax.reshape([M // SHARED, SHARED]), 1, keep_dims=True)
        amax = amax.broadcast_to([M // SHARED, SHARED]).reshape([M])
    inverse, scale = scale_of(amax, INT8_MAX)
    return to_8bit(x, inverse[:, None], INT8_MAX), scale


@triton.jit
def _quantize_kernel(
    X,  # [B, H, N, D] in, 16 bits or fp32
    Mean,  # [B, H, D] in, fp32: taken off X; if SMOOTH
    Out,  # [B, H, N, D] in; if DELTA
    Codes,  # [B, H, N_pad, BLOCK_D] out, TURNED: [B, H, BLOCK_D, N_pad]
    Scale,  # [B, H, N_pad / SHARED] out, fp32
    Own, Own_scale,  # [B, H, N_pad, BLOCK_D], [B, H, N_pad] out: codes by one scale a row; if TWICE
    Delta,  # [B, H, N] out, fp32: the sum of X Out over D; if DELTA
    stride_b, stride_h, stride_n, stride_d,
    stride_ob, stride_oh, stride_on, stride_od,
    H, N,
    SMOOTH: tl.constexpr, DELTA: tl.constexpr, TURNED: tl.constexpr, TWICE: tl.constexpr,
    ROTATED: tl.constexpr, SHARED: tl.constexpr,
    D: tl.constexpr, PAD_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid: (B * H * N_pad / BLOCK,). BLOCK rows of one head: SHARED is how many share a scale, all
    BLOCK or 1. Unless ROTATED is 0, x times that is rounded to 16 bits and rotated."""
    stride_b, stride_h, stride_n = stride_b // 2, stride_h // 2, stride_n // 2
    stride_ob, stride_oh, stride_on = stride_ob // 2, stride_oh // 2, stride_on // 2
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(N, PAD_N) * (PAD_N // _BLOCK)
    head, block = pid // blocks, pid % blocks
    b, h = head // H, head % H
    i = tl.arange(0, _BLOCK)
    n = i + block * _BLOCK
    d = tl.arange(0, BLOCK_D)
    inside = (n < N)[:, None] & (d < D)[None, :]
    x = X + b * stride_b + h * stride_h + n[:, None] * stride_n
    x = tl.load(x + d.to(tl.int64)[None, :] * stride_d, mask=inside, other=0.0).to(tl.float32)
    if DELTA:
        out = Out + b * stride_ob + h * stride_oh + n[:, None] * stride_on
        out = tl.load(out + d.to(tl.int64)[None, :] * stride_od, mask=inside, other=0.0)
        tl.store(Delta + head * N + n, tl.sum(x * out.to(tl.float32), 1), mask=n < N)
    if SMOOTH:
        mean = tl.load(Mean + head * D + d, mask=d < D, other=0.0)
        x = tl.where(inside, x - mean[None, :], 0.0)
    if ROTATED != 0:
        x = rotate(in_16_bits(x * ROTATED, X), _BLOCK, BLOCK_D)
    codes, scale = _to_codes(x, SHARED)
    at = pid * _BLOCK + i if SHARED == 1 else pid + i
    tl.store(Scale + at, scale, mask=(i == 0) | (SHARED == 1))
    N_pad = blocks * _BLOCK
    if TURNED:
        tl.store(Codes + (head * BLOCK_D + d)[:, None] * N_pad + n[None, :], codes.T)
    else:
        tl.store(Codes + (head * N_pad + n)[:, None] * BLOCK_D + d[None, :], codes)
    if TWICE:
        codes, scale = _to_codes(x, 1)
        tl.store(Own + (head * N_pad + n)[:, None] * BLOCK_D + d[None, :], codes)
        tl.store(Own_scale + pid * _BLOCK + i, scale)


@triton.jit
def _turn_kernel(Codes, Turned, N_pad, BLOCK_D: tl.constexpr):
    """Grid: (B * H * N_pad / BLOCK,). [B, H, N_pad, BLOCK_D] -> [B, H, BLOCK_D, N_pad]."""
    pid = tl.program_id(0).to(tl.int64)
    head, block = pid // (N_pad // _BLOCK), pid % (N_pad // _BLOCK)
    n, d = tl.arange(0, _BLOCK), tl.arange(0, BLOCK_D)
    codes = tl.load(Codes + (pid * _BLOCK + n)[:, None] * BLOCK_D + d[None, :])
    turned = Turned + (head * BLOCK_D + d)[:, None] * N_pad + (n + block * _BLOCK)[None, :]
    tl.store(turned, codes.T)


@triton.jit
def _scores(a, b, scale, rows, keys, N_kv, IS_CAUSAL: tl.constexpr, MASKED: tl.constexpr):
    """s of the codes of q and k, in either order, which rows and keys say as they broadcast; -inf
    where a key is not there or, of causal attention, comes after the row."""
    s = tl.dot(a, b.T).to(tl.float32) * scale
    if MASKED:
        seen = keys < N_kv
        if IS_CAUSAL:
            seen = seen & (keys <= rows)
        s = tl.where(seen, s, -float("inf"))
    return s


@triton.jit
def _tiles_of_keys(row0, N_kv, IS_CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr):
    """How many tiles of BLOCK keys the BLOCK_M rows from row0 see whole, and how many at
    all."""
    whole, end = N_kv // _BLOCK, tl.cdiv(N_kv, _BLOCK)
    if IS_CAUSAL:
        whole = tl.minimum(whole, row0 // _BLOCK)
        end = tl.minimum(end, row0 // _BLOCK + BLOCK_M // _BLOCK)
    return whole, end


@triton.jit
def _forward_kernel(
    Q, Q_scale,  # [B, H_q, M_pad, BLOCK_D] INT8, [B, H_q, M_pad / BLOCK]; M_pad: N_pad of q
    K, K_scale,  # [B, H_kv, N_pad, BLOCK_D] INT8, [B, H_kv, N_pad / BLOCK]
    V, V_scale,  # [B, H_kv, BLOCK_D, N_pad] INT8, as K_scale
    Out, Lse,  # [B, H_q, N_q, D], [B, H_q, N_q] fp32: out
    stride_ob, stride_oh, stride_on,
    H_q, H_kv, N_q, N_kv, M_pad, N_pad,
    D: tl.constexpr, SCALE: tl.constexpr, IS_CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Grid: (B * H_q * cdiv(N_q, BLOCK_M),). BLOCK_M rows of one head, the last rows first: causal
    ones see the most. Lse: m + log2 l."""
    stride_ob, stride_oh, stride_on = stride_ob // 2, stride_oh // 2, stride_on // 2
    tiles = tl.cdiv(N_q, BLOCK_M)
    row0 = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_M
    b, h, _, head_kv, head = heads_of(tl.program_id(0) // tiles, H_q, H_kv)
    rows = row0 + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, _BLOCK)
    q = tl.load(Q + (head * M_pad + rows)[:, None] * BLOCK_D + d[None, :])
    q_scale = tl.load(Q_scale + (head * M_pad + rows) // _BLOCK)
    k_ptrs = K + head_kv * N_pad * BLOCK_D + n[:, None] * BLOCK_D + d[None, :]
    v_ptrs = V + (head_kv * BLOCK_D + d)[:, None] * N_pad + n[None, :]
    K_scale += head_kv * (N_pad // _BLOCK)
    V_scale += head_kv * (N_pad // _BLOCK)

    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    whole, end = _tiles_of_keys(row0, N_kv, IS_CAUSAL, BLOCK_M)
    for part in tl.static_range(2):
        for j in tl.range(whole if part else 0, end if part else whole, num_stages=NUM_STAGES):
            k = tl.load(k_ptrs + tl.cast(j, tl.int64) * (_BLOCK * BLOCK_D))
            scale = q_scale * tl.load(K_scale + j) * (SCALE * LOG2E)
            keys = (n + j * _BLOCK)[None, :]
            s = _scores(q, k, scale[:, None], rows[:, None], keys, N_kv, IS_CAUSAL, part == 1)
            t = tl.max(s, 1)
            # A tile that a row does not see has no maximum: s - t would be NaN.
            shift = tl.where(t == -float("inf"), 0.0, t)
            flat = flatness(shift)
            p = tl.exp2(s * flat[:, None] - (shift * flat)[:, None])
            m_new = tl.maximum(m, t)  # finite: each row sees the first key
            alpha, beta = tl.exp2(m - m_new), tl.exp2(t - m_new)
            l = l * alpha + tl.sum(p, 1) * beta
            v = tl.load(v_ptrs + j * _BLOCK)
            beta = beta * (tl.load(V_scale + j) * (1.0 / INT8_MAX))
            product = tl.dot(to_8bit(p, tl.full([1, 1], INT8_MAX, tl.float32), INT8_MAX), v.T)
            acc = acc * alpha[:, None] + product.to(tl.float32) * beta[:, None]
            m = m_new
    out = Out + b * stride_ob + h * stride_oh + rows.to(tl.int64)[:, None] * stride_on + d[None, :]
    inside = (rows < N_q)[:, None] & (d < D)[None, :]
    tl.store(out, (acc / l[:, None]).to(Out.dtype.element_ty), mask=inside)
    tl.store(Lse + head * N_q + rows, m + tl.log2(l), mask=rows < N_q)


@triton.jit
def _dq_kernel(
    Q, Q_scale, K, K_scale,  # as _forward_kernel's
    K_turned,  # [B, H_kv, BLOCK_D, N_pad] INT8
    V, Grad,  # [B, H_kv, N_kv, D], [B, H_q, N_q, D] in, 16 bits
    Lse, Delta,  # [B, H_q, N_q] in, fp32
    Dq,  # [B, H_q, N_q, D] out
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_gb, stride_gh, stride_gn, stride_gd,
    stride_ob, stride_oh, stride_on,
    H_q, H_kv, N_q, N_kv, M_pad, N_pad,
    D: tl.constexpr, SCALE: tl.constexpr, IS_CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Grid: as _forward_kernel's. BLOCK_M rows of dQ."""
    stride_vb, stride_vh, stride_vn = stride_vb // 2, stride_vh // 2, stride_vn // 2
    stride_gb, stride_gh, stride_gn = stride_gb // 2, stride_gh // 2, stride_gn // 2
    stride_ob, stride_oh, stride_on = stride_ob // 2, stride_oh // 2, stride_on // 2
    tiles = tl.cdiv(N_q, BLOCK_M)
    row0 = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_M
    b, h, h_kv, head_kv, head = heads_of(tl.program_id(0) // tiles, H_q, H_kv)
    rows = row0 + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, _BLOCK)
    inside = (rows < N_q)[:, None] & (d < D)[None, :]
    q = tl.load(Q + (head * M_pad + rows)[:, None] * BLOCK_D + d[None, :])
    q_scale = tl.load(Q_scale + (head * M_pad + rows) // _BLOCK)
    grad = Grad + b * stride_gb + h * stride_gh + rows.to(tl.int64)[:, None] * stride_gn
    grad = tl.load(grad + d.to(tl.int64)[None, :] * stride_gd, mask=inside, other=0.0)
    # A row that is not there has p = 0.
    lse = tl.load(Lse + head * N_q + rows, mask=rows < N_q, other=float("inf"))
    delta = tl.load(Delta + head * N_q + rows, mask=rows < N_q, other=0.0)
    k_ptrs = K + head_kv * N_pad * BLOCK_D + n[:, None] * BLOCK_D + d[None, :]
    turned_ptrs = K_turned + (head_kv * BLOCK_D + d)[:, None] * N_pad + n[None, :]
    v_ptrs = V + b * stride_vb + h_kv * stride_vh + d.to(tl.int64)[None, :] * stride_vd
    K_scale += head_kv * (N_pad // _BLOCK)

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    whole, end = _tiles_of_keys(row0, N_kv, IS_CAUSAL, BLOCK_M)
    for part in tl.static_range(2):
        for j in tl.range(whole if part else 0, end if part else whole, num_stages=NUM_STAGES):
            k = tl.load(k_ptrs + tl.cast(j, tl.int64) * (_BLOCK * BLOCK_D))
            k_scale = tl.load(K_scale + j)
            keys = n + j * _BLOCK
            scale = (q_scale * k_scale * (SCALE * LOG2E))[:, None]
            s = _scores(q, k, scale, rows[:, None], keys[None, :], N_kv, IS_CAUSAL, part == 1)
            p = tl.exp2(s - lse[:, None])
            there = (d < D)[None, :]
            if part == 1:
                there = there & (keys < N_kv)[:, None]
            v = tl.load(v_ptrs + keys.to(tl.int64)[:, None] * stride_vn, mask=there, other=0.0)
            ds, ds_scale = _to_codes(p * (tl.dot(grad, v.T) - delta[:, None]), _BLOCK)
            turned = tl.load(turned_ptrs + j * _BLOCK)
            acc += tl.dot(ds, turned.T).to(tl.float32) * (ds_scale * k_scale)[:, None]
    out = Dq + b * stride_ob + h * stride_oh + rows.to(tl.int64)[:, None] * stride_on + d[None, :]
    tl.store(out, (acc * SCALE).to(Dq.dtype.element_ty), mask=inside)


@triton.jit
def _over_rows_kernel(
    Q, Q_scale, K, K_scale,  # as _forward_kernel's
    Turned, Turned_scale,  # [B, H_q, BLOCK_D, M_pad] INT8, [B, H_q, M_pad / BLOCK]: q; OF_V: dO
    V, Grad, Lse, Delta,  # as _dq_kernel's; V, Grad and Delta are not read if OF_V
    Dx,  # [B, H_kv, N_kv, D] out: dK; OF_V: dV
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_gb, stride_gh, stride_gn, stride_gd,
    stride_ob, stride_oh, stride_on,
    H_q, H_kv, N_q, N_kv, M_pad, N_pad,
    D: tl.constexpr, SCALE: tl.constexpr, IS_CAUSAL: tl.constexpr, OF_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Grid: (B * H_kv * cdiv(N_kv, BLOCK_M),). BLOCK_M rows of dK or dV of one head of k, from all
    heads of q that it has. Tiles are the transposed ones of _dq_kernel: the same numbers share a
    scale. Each alone, though both need s: together they spill up to 1400 bytes a thread (sm_90)."""
    stride_vb, stride_vh, stride_vn = stride_vb // 2, stride_vh // 2, stride_vn // 2
    stride_gb, stride_gh, stride_gn = stride_gb // 2, stride_gh // 2, stride_gn // 2
    stride_ob, stride_oh, stride_on = stride_ob // 2, stride_oh // 2, stride_on // 2
    blocks = tl.cdiv(N_kv, BLOCK_M)
    head_kv, key0 = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * BLOCK_M
    b, h_kv = head_kv // H_kv, head_kv % H_kv
    keys = key0 + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    r = tl.arange(0, _BLOCK)
    inside = (keys < N_kv)[:, None] & (d < D)[None, :]
    k = tl.load(K + (head_kv * N_pad + keys)[:, None] * BLOCK_D + d[None, :])
    k_scale = tl.load(K_scale + (head_kv * N_pad + keys) // _BLOCK)
    v = V + b * stride_vb + h_kv * stride_vh + keys.to(tl.int64)[:, None] * stride_vn
    if not OF_V:
        v = tl.load(v + d.to(tl.int64)[None, :] * stride_vd, mask=inside, other=0.0)

    tiles = tl.cdiv(N_q, _BLOCK)  # of rows; those before `begin` see none of these keys
    begin = 0
    if IS_CAUSAL:
        begin = tl.minimum(key0 // _BLOCK, tiles)
    count = tiles - begin
    group = H_q // H_kv
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    steps = group * count  # one loop: of two, one within the other, up to 350 bytes are spilled
    for step in tl.range(0, steps, num_stages=NUM_STAGES):
        head = b * H_q + h_kv * group + step // count
        i = tiles - 1 - step % count
        rows = r + i * _BLOCK
        block = head * (M_pad // _BLOCK) + i
        q = tl.load(Q + (head * M_pad + rows)[:, None] * BLOCK_D + d[None, :])
        scale = (tl.load(Q_scale + block) * k_scale * (SCALE * LOG2E))[:, None]
        s = _scores(k, q, scale, rows[None, :], keys[:, None], N_kv, IS_CAUSAL, True)
        # A row that is not there has p = 0.
        lse = tl.load(Lse + head * N_q + rows, mask=rows < N_q, other=float("inf"))
        x = tl.exp2(s - lse[None, :])
        if not OF_V:
            grad = Grad + b * stride_gb + (head - b * H_q) * stride_gh
            grad = grad + rows.to(tl.int64)[:, None] * stride_gn
            there = (rows < N_q)[:, None] & (d < D)[None, :]
            grad = tl.load(grad + d.to(tl.int64)[None, :] * stride_gd, mask=there, other=0.0)
            delta = tl.load(Delta + head * N_q + rows, mask=rows < N_q, other=0.0)
            x = x * (tl.dot(v, grad.T) - delta[None, :])
        codes, x_scale = _to_codes(x, _BLOCK)
        turned = Turned + (head * BLOCK_D + d)[:, None] * M_pad + rows[None, :]
        product = tl.dot(codes, tl.load(turned).T).to(tl.float32)
        acc += product * (x_scale * tl.load(Turned_scale + block))[:, None]
    at = b * stride_ob + h_kv * stride_oh + keys.to(tl.int64)[:, None] * stride_on + d[None, :]
    tl.store(Dx + at, (acc * (1.0 if OF_V else SCALE)).to(Dx.dtype.element_ty), mask=inside)


def launch_quantize(
    x: Tensor, mean: Tensor | None = None, out: Tensor | None = None, turned: bool = False,
    rotated: float = 0.0, shared: int = BLOCK, own: tuple[Tensor, Tensor] | None = None, *,
    run: Callable,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """x [B, H, N, D], any strides, less mean [B, H, D] fp32, in INT8: codes [B, H, N_pad, BLOCK_D]
    (turned: transposed) and scales [B, H, N_pad / shared] fp32; and, where out is given, the sum
    over D of x out [B, H, N] (else the scales again). rotated: unless it is 0, x times this is
    rotated (quantize/rotate.py). shared: BLOCK or 1 row. own: codes and scales by one scale a row,
    which are written too."""
    B, H, N, D = x.shape
    codes, scale = empty_codes(x, shared, turned)
    delta = scale if out is None else x.new_empty((B, H, N), dtype=torch.float32)
    other = x if out is None else out
    run(
        _quantize_kernel,
        (B * H * (pad_rows(N) // BLOCK),),
        (x, scale if mean is None else mean, other, codes, scale, *(own or (codes, scale)), delta),
        (*doubled(x.stride()), *doubled(other.stride()),
         H, N,  # shape
         mean is not None, out is not None, turned, own is not None, rotated, shared,  # semantics
         D, PAD_N, pad_head_dim(D)),  # tile
    )  # fmt: skip
    return codes, scale, delta


def empty_codes(
    x: Tensor, shared: int, turned: bool = False, exists: bool = True
) -> tuple[Tensor, Tensor]:
    """Memory for what `launch_quantize` gives first, or unless it exists, for no row of that."""
    B, H, N, D = x.shape
    N_pad, BLOCK_D = pad_rows(N) if exists else 0, pad_head_dim(int(D))
    shape = (BLOCK_D, N_pad) if turned else (N_pad, BLOCK_D)
    codes = x.new_empty((B, H, *shape), dtype=torch.int8)
    return codes, x.new_empty((B, H, N_pad // shared), dtype=torch.float32)


def _turned(codes: Tensor, run: Callable) -> Tensor:
    """codes.mT, contiguous. torch's own copy takes 8 times as long (H200, 2026-11-23)."""
    turned = torch.empty_like(codes.mT, memory_format=torch.contiguous_format)
    run(_turn_kernel, (codes[..., 0].numel() // BLOCK,), (codes, turned), codes.shape[2:])
    return turned


def launch_forward(
    q: Tensor, q_scale: Tensor, k: Tensor, k_scale: Tensor, v: Tensor, v_scale: Tensor,
    N_kv: int, scale: float, is_causal: bool, out: Tensor, lse: Tensor, run: Callable, gpu,
) -> None:  # fmt: skip
    """Codes and scales of q, k and (transposed) v -> out [B, H_q, N_q, D] and lse [B, H_q, N_q]."""
    B, H_q, N_q, D = out.shape
    run(
        _forward_kernel,
        (B * H_q * triton.cdiv(N_q, ROWS),),
        (q, q_scale, k, k_scale, v, v_scale, out, lse),
        (*doubled(out.stride())[:3],
         H_q, k.shape[1], N_q, N_kv, q.shape[2], k.shape[2],  # shape
         D, scale, is_causal,  # semantics
         ROWS, k.shape[3], num_stages(gpu)),  # tile
        num_warps=NUM_WARPS,
    )  # fmt: skip


def launch_backward(
    q: Tensor, q_scale: Tensor, k: Tensor, k_scale: Tensor, v: Tensor, grad: Tensor,
    grad_turned: Tensor, grad_scale: Tensor, lse: Tensor, delta: Tensor,
    scale: float, is_causal: bool, dq: Tensor, dk: Tensor, dv: Tensor, run: Callable, gpu,
) -> None:  # fmt: skip
    """Codes and scales of q and k, v and dO in 16 bits, and dO's codes transposed -> dq, dk, dv."""
    (B, H_q, N_q, D), (H_kv, N_kv), BLOCK_D = dq.shape, dk.shape[1:3], k.shape[3]
    shape = (H_q, H_kv, N_q, N_kv, q.shape[2], k.shape[2])
    semantics = (D, scale, is_causal)
    tile = (ROWS, BLOCK_D, num_stages(gpu))
    read = (*doubled(v.stride()), *doubled(grad.stride()))
    run(
        _dq_kernel,
        (B * H_q * triton.cdiv(N_q, ROWS),),
        (q, q_scale, k, k_scale, _turned(k, run), v, grad, lse, delta, dq),
        (*read, *doubled(dq.stride())[:3], *shape, *semantics, *tile),
        num_warps=NUM_WARPS,
    )
    for of_v, turned, turned_scale, dx in (
        (False, _turned(q, run), q_scale, dk), (True, grad_turned, grad_scale, dv)
    ):  # fmt: skip
        run(
            _over_rows_kernel,
            (B * H_kv * triton.cdiv(N_kv, ROWS),),
            (q, q_scale, k, k_scale, turned, turned_scale, v, grad, lse, delta, dx),
            (*read, *doubled(dx.stride())[:3], *shape, *semantics, of_v, *tile),
            num_warps=NUM_WARPS,
        )
