"""Smoothing: per-channel statistics over the sequence (SageAttention2, arXiv:2411.10958, 3.1, 3.3).

    mean[b, h, d] = mean over n of x[b, h, n, d]
    amax[b, h, d] = max over n of |x[b, h, n, d] - mean[b, h, d]|

v's mean counts as 0 if it is within 3 standard errors of 0 (the deviation taken for amax / 4): bf16
numbers less a tiny one are rounded to E4M3 to one side (v of N(0, 1), N = 64K: 5.2 % relative L1 of
the output with it, 3.9 without). k's mean is always subtracted: short sequences gain by it.

Rows that a mask hides from every query do not count: padding may hold anything, NaN included.

`estimate` puts numbers from a sample of rows in their place, for what cannot wait for a pass over
all of them.

Softmax is invariant to any vector subtracted from every row of k, and the rows of p sum to 1, so
a vector subtracted from v is added back to o. Both are exact; what they buy is range.

4 bits ask for a smooth q too: each Q_BLOCK rows less their mean. Softmax is not invariant to that;

    delta[b, h, t, n] = q_mean[b, h, t] (k[b, h, n] - k_mean[b, h])

is added to the scores of the rows of block t.

Shapes: B batch, H heads of k and v (H_q of q), N sequence (N_q of q), D head_dim.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from sage_inductor.ops.compat import gdc_launch_dependents, gdc_wait
from sage_inductor.ops.formats import HEADROOM, NO_SHIFT, OF_HIDDEN, Q_BLOCK, SAMPLE, pad_rows
from sage_inductor.ops.launch import doubled, pdl_option, visible_argument
from sage_inductor.ops.layout import span_of, token_of

_SAMPLE = tl.constexpr(SAMPLE)
_NO_SHIFT = tl.constexpr(NO_SHIFT)
_HEADROOM = tl.constexpr(HEADROOM)
_OF_HIDDEN = tl.constexpr(OF_HIDDEN)
CHUNK, BLOCK_N, NUM_WARPS = 256, 8, 2  # H200, 2026-11-21: 1.3x of the bytes' floor at 8K
BLOCK_C, CHANNELS = 64, 32  # of the chunks: few heads are many programs, few rounds of loads


@triton.jit
def _partial_kernel(
    X0, X1,  # [B, H, N, D] in, two tensors (the same one twice if there is one)
    Visible,  # [B or 1, H or 1, N] in, uint8: rows that count; unread unless MASK
    Perm,  # int32 [N] in or None: layout.py
    Partial,  # [tensors, B*H, num_chunks, 3, D] out, fp32: sum, max, min
    Count,  # [B*H, num_chunks] out, int32: rows that count; if MASK
    stride_0b, stride_0h, stride_0n, stride_0d,
    stride_1b, stride_1h, stride_1n, stride_1d,
    stride_visible_b, stride_visible_h,
    H, N,
    MASK: tl.constexpr,
    D: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid: (B * H * num_chunks, tensors). Sum, max and min of CHUNK rows of one head."""
    pid = tl.program_id(0).to(tl.int64)
    num_chunks = tl.cdiv(N, CHUNK)
    chunk = pid % num_chunks
    b, h = pid // num_chunks // H, pid // num_chunks % H
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    if tl.program_id(1) == 0:
        x = X0 + b * (stride_0b // 2) + h * (stride_0h // 2) + d.to(tl.int64)[None, :] * stride_0d
        stride_n = stride_0n // 2
    else:
        x = X1 + b * (stride_1b // 2) + h * (stride_1h // 2) + d.to(tl.int64)[None, :] * stride_1d
        stride_n = stride_1n // 2

    columns = (d < D)[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    high = tl.full([BLOCK_N, BLOCK_D], -float("inf"), tl.float32)
    low = tl.full([BLOCK_N, BLOCK_D], float("inf"), tl.float32)
    count = tl.zeros([BLOCK_N], tl.int32)
    # No row to mask: half the arithmetic, which is the limit here.
    if not MASK and (chunk + 1) * CHUNK <= N:
        for start in range(0, CHUNK, BLOCK_N):
            rows = token_of(Perm, chunk * CHUNK + start + n, N)
            tile = tl.load(x + rows[:, None] * stride_n, mask=columns, other=0.0).to(tl.float32)
            total += tile
            high = tl.maximum(high, tile)
            low = tl.minimum(low, tile)
    else:
        for start in range(0, CHUNK, BLOCK_N):
            rows = chunk * CHUNK + start + n
            keep = rows < N
            if MASK:
                visible = Visible + b * stride_visible_b + h * stride_visible_h
                keep = tl.load(visible + rows, mask=keep, other=0) != 0
                count += keep.to(tl.int32)
            mask = keep[:, None] & columns
            rows = token_of(Perm, rows, N)
            tile = tl.load(x + rows[:, None] * stride_n, mask=mask, other=0.0).to(tl.float32)
            total += tile
            high = tl.maximum(high, tl.where(mask, tile, -float("inf")))
            low = tl.minimum(low, tl.where(mask, tile, float("inf")))

    out = Partial + (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + pid) * 3 * D + d
    tl.store(out, tl.sum(total, 0), mask=d < D)
    tl.store(out + D, tl.max(high, 0), mask=d < D)
    tl.store(out + 2 * D, tl.min(low, 0), mask=d < D)
    if MASK:
        tl.store(Count + pid, tl.sum(count, 0))  # the two tensors' programs store one number


@triton.jit
def _final_kernel(
    Partial,  # [tensors, B*H, num_chunks, 3, D] in, fp32
    Count,  # [B*H, num_chunks] in, int32: rows that count; unread unless MASK
    Mean0, Amax0, Mean1, Amax1,  # [B*H, D] out, fp32, of one tensor and the other
    heads, N,
    MASK: tl.constexpr, KEEP: tl.constexpr,
    D: tl.constexpr, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid: (tensors * B * H, D / BLOCK_D). Reduce the chunks of BLOCK_D channels of one head."""
    head = tl.program_id(0).to(tl.int64)
    num_chunks = tl.cdiv(N, CHUNK)
    c = tl.arange(0, BLOCK_C)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_C, BLOCK_D], tl.float32)
    high = tl.full([BLOCK_C, BLOCK_D], -float("inf"), tl.float32)
    low = tl.full([BLOCK_C, BLOCK_D], float("inf"), tl.float32)
    counts = tl.zeros([BLOCK_C], tl.int32)
    for start in range(0, num_chunks, BLOCK_C):
        if MASK:
            of_chunks = Count + head % heads * num_chunks + start + c
            counts += tl.load(of_chunks, mask=start + c < num_chunks, other=0)
        mask = (start + c < num_chunks)[:, None] & (d < D)[None, :]
        x = Partial + (head * num_chunks + start + c)[:, None] * 3 * D + d[None, :]
        total += tl.load(x, mask=mask, other=0.0)
        high = tl.maximum(high, tl.load(x + D, mask=mask, other=-float("inf")))
        low = tl.minimum(low, tl.load(x + 2 * D, mask=mask, other=float("inf")))
    # A NaN or Inf of x makes the mean non-finite, and through it everything made from the head.
    count = N
    if MASK:
        count = tl.sum(counts, 0)
    mean = tl.sum(total, 0) / tl.maximum(count, 1)
    top, bottom = tl.max(high, 0), tl.min(low, 0)
    deviation = tl.maximum(top - mean, mean - bottom, tl.PropagateNan.ALL) * 0.25
    noise = mean * mean * count <= deviation * deviation * _NO_SHIFT
    mean = tl.where(noise & (head // heads >= KEEP), 0.0, mean)
    amax = tl.maximum(top - mean, mean - bottom, tl.PropagateNan.ALL)
    if MASK:
        amax = tl.where(count > 0, amax * _OF_HIDDEN, 0.0)
    mean_out, amax_out = Mean0, Amax0
    if head >= heads:
        mean_out, amax_out = Mean1, Amax1
    tl.store(mean_out + head % heads * D + d, mean, mask=d < D)
    tl.store(amax_out + head % heads * D + d, amax, mask=d < D)


def launch_smooth(
    xs: list[Tensor], visible: Tensor | None, keep: int, run: Callable,
    perm: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """One or two x [B, H, N, D] of one shape, any strides -> for each its mean and amax [B, H, D]
    in fp32, of the rows that are visible: uint8 [B or 1, H or 1, N], or None for all. With
    `visible`, amax is OF_HIDDEN times theirs. The first `keep` keep a mean that is noise. perm: the
    order of visible, and in which rows are added up (layout.py)."""
    x0, x1, count = xs[0], xs[-1], len(xs)
    B, H, N, D = x0.shape
    D = int(D)  # a tile needs a number
    num_chunks = triton.cdiv(N, CHUNK)
    BLOCK_D = triton.next_power_of_2(D)
    partial = x0.new_empty(count * B * H * num_chunks * 3 * D, dtype=torch.float32)
    out = [x0.new_empty((B, H, D), dtype=torch.float32) for _ in range(2 * count)]
    rows, row_strides = visible_argument(visible, x0.shape, partial)
    counts = partial  # not touched
    if visible is not None:
        counts = x0.new_empty((B * H, num_chunks), dtype=torch.int32)
    run(
        _partial_kernel,
        (B * H * num_chunks, count),
        (x0, x1, rows, perm, partial, counts),
        (*doubled(x0.stride()), *doubled(x1.stride()), *row_strides,
         H, N,  # shape
         visible is not None,  # semantics
         D, CHUNK, BLOCK_N, BLOCK_D),  # tile
        num_warps=NUM_WARPS,
    )  # fmt: skip
    run(
        _final_kernel,
        (count * B * H, triton.cdiv(D, CHANNELS)),
        (partial, counts, *out[:2], *out[-2:]),
        (B * H, N,  # shape
         visible is not None, keep,  # semantics
         D, CHUNK, BLOCK_C, CHANNELS),  # tile
    )  # fmt: skip
    return out


@triton.jit
def _estimate_kernel(
    X0, X1,  # [B, H, N, D], [B, H, N, D_1] in
    Visible, Perm,  # as above
    Spans,  # int32 [S, 4] in or None: documents.py. Then B is S below, and 1 of X0 and X1
    Mean0, Amax0, Mean1, Amax1,  # [B, H, D] twice, [B, H, D_1] twice out, fp32; if TWO
    Beyond,  # [B, H] out, int32: zeros
    stride_0b, stride_0h, stride_0n, stride_0d,
    stride_1b, stride_1h, stride_1n, stride_1d,
    stride_visible_b, stride_visible_h,
    H, N,
    MASK: tl.constexpr, TWO: tl.constexpr, SHRINK: tl.constexpr, PDL: tl.constexpr,
    D: tl.constexpr, D_1: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid: (B * H, tensors). reference.quantize.estimate of one head."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # of what it then reads, only the results here are not there yet
    head = tl.program_id(0).to(tl.int64)
    b, h = head // H, head % H
    first, length = 0, N
    if Spans is not None:
        first, length = span_of(Spans, b)
        b = b * 0
    d = tl.arange(0, BLOCK_D)
    x = X0 + b * (stride_0b // 2) + h * (stride_0h // 2)
    stride_n, stride_d = stride_0n // 2, stride_0d
    mean_out, amax_out, channels = Mean0, Amax0, D
    if TWO:
        if tl.program_id(1) == 1:
            x = X1 + b * (stride_1b // 2) + h * (stride_1h // 2)
            stride_n, stride_d = stride_1n // 2, stride_1d
            mean_out, amax_out, channels = Mean1, Amax1, D_1
    i = tl.arange(0, _SAMPLE).to(tl.int64)
    rows = (i * 65536 + (i * 40503 & 65535)) * length // (65536 * _SAMPLE)
    keep = rows < length
    if Spans is not None:
        rows += first
    if MASK:
        keep = tl.load(Visible + b * stride_visible_b + h * stride_visible_h + rows) != 0
    mask = keep[:, None] & (d < channels)[None, :]
    rows = token_of(Perm, rows, N)
    x = x + rows[:, None] * stride_n + d.to(tl.int64)[None, :] * stride_d
    x = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    count = tl.sum(keep.to(tl.float32), 0)
    mean, square = tl.sum(x, 0) / count, tl.sum(x * x, 0) / count
    if SHRINK:
        kept = 1.0 - _NO_SHIFT / count * (square / (mean * mean) - 1.0)
        mean = tl.where(kept > 0, mean * tl.minimum(kept, 1.0), 0.0)
    away = tl.abs(x - mean[None, :])
    away = tl.where(mask & (away < float("inf")), away, 0.0)
    tl.store(mean_out + head * channels + d, mean, mask=d < channels)
    amax = tl.max(away, 0) * (_OF_HIDDEN if MASK else _HEADROOM)
    tl.store(amax_out + head * channels + d, amax, mask=d < channels)
    if tl.program_id(1) == 0:
        tl.store(Beyond + head, 0)


def launch_estimate(
    xs: list[Tensor], visible: Tensor | None, run: Callable, pdl: bool = False, shrink: bool = True,
    perm: Tensor | None = None, spans: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """One or two x [B, H, N, D], the two of one B, H and N, any strides -> for each its mean and
    amax [B, H, D] in fp32, estimated from SAMPLE rows of those that are visible (as `smooth` has
    them). shrink: the mean towards 0, as reference.quantize.estimate says. Last a zeroed int32 flag
    [B, H], to be set where a row exceeds amax. perm: the order of visible and of the rows of which
    some are read (layout.py). spans: of each document by itself, and B of what is returned is how
    many there are (documents.py)."""
    x0, x1 = xs[0], xs[-1]
    B, H, N, D = x0.shape
    N = N if perm is None else perm.shape[0]
    B = B if spans is None else spans.shape[0]
    D, D_1 = int(D), int(x1.shape[3])
    BLOCK_D = triton.next_power_of_2(max(D, D_1))
    out = [x.new_empty((B, H, x.shape[3]), dtype=torch.float32) for x in xs for _ in range(2)]
    beyond = x0.new_empty((B, H), dtype=torch.int32)
    rows, row_strides = visible_argument(visible, x0.shape, out[0])
    run(
        _estimate_kernel,
        (B * H, len(xs)),
        (x0, x1, rows, perm, spans, *out[:2], *out[-2:], beyond),
        (*doubled(x0.stride()), *doubled(x1.stride()), *row_strides,
         H, N,  # shape
         visible is not None, len(xs) == 2, shrink, pdl,  # semantics
         D, D_1, BLOCK_D),  # tile
        num_warps=4 if BLOCK_D <= 128 else 8,  # a program has the whole sample in its registers
        **pdl_option(pdl),
    )  # fmt: skip
    return [*out, beyond]


def smooth_q(q: Tensor, k: Tensor, k_mean: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
    """q [B, H_q, N_q, D], k [B, H, N, D], any strides, k_mean [B, H, D] -> q_mean
    [B, H_q, T, D] over each Q_BLOCK rows and delta [B, H_q, T, N_pad], both bf16, contiguous.
    T: blocks of q and one more, whose mean is 0 (visibility.num_tiles says why). Rows of k that are
    not `visible`, as in `smooth`, saturate: an additive mask does not hide NaN.

    q_mean is what delta was made with and what the kernel subtracts: that it is rounded costs
    nothing. k - k_mean and delta, of 8 significant bits, cost less than INT4's noise by far: on the
    families of bench/laboratory.py relative L1 is that of fp32 within 0.4 %. At N = 32K delta takes
    16 MiB for each head of q, twice as much as q of head_dim 128 itself; fp32 would take 32.
    Plain PyTorch: one reduction, one elementwise pass over k and one batched matmul for Inductor.
    """
    B, H_q, N_q, D = q.shape
    H, N = k.shape[1:3]
    count = (N_q + 2 * Q_BLOCK - 1) // Q_BLOCK
    blocks = F.pad(q, (0, 0, 0, count * Q_BLOCK - N_q)).unflatten(2, (-1, Q_BLOCK))
    first = torch.arange(count, device=q.device) * Q_BLOCK
    rows = (N_q - first).clamp(1, Q_BLOCK)[:, None]
    q_mean = (blocks.sum(3, dtype=torch.float32) / rows).bfloat16()
    k = k.float() - k_mean[:, :, None]
    if visible is not None:
        shown = visible.bool()[..., None]
        amax = torch.where(shown, k.abs(), 0.0).amax(2, keepdim=True)
        k = torch.where(shown, k, k.nan_to_num(0.0).clamp(-amax, amax))
    k = F.pad(k.bfloat16(), (0, 0, 0, pad_rows(N) - N))
    delta = torch.bmm(q_mean.view(B * H, -1, D), k.flatten(0, 1).mT)
    return q_mean, delta.view(B, H_q, count, -1)


@triton.jit
def _unsmooth_kernel(
    Lse,  # [B, H_q, N] in, fp32
    Q,  # [B, H_q, N, D] in
    K_mean,  # [B, H_kv, D] in, fp32
    Out,  # [B, H_q, N] out, fp32
    stride_b, stride_h, stride_n, stride_d,
    H_q, H_kv, N,
    SCALE: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid: (B * H_q * N / BLOCK_N,)."""
    blocks = tl.cdiv(N, BLOCK_N)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    n = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    b, h = head // H_q, head % H_q
    mean = K_mean + (b * H_kv + h // (H_q // H_kv)) * D + d
    mean = tl.load(mean, mask=d < D, other=0.0) * SCALE
    q = Q + b * (stride_b // 2) + h * (stride_h // 2) + n.to(tl.int64)[:, None] * (stride_n // 2)
    q = q + d.to(tl.int64)[None, :] * stride_d
    q = tl.load(q, mask=(n < N)[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    lse = tl.load(Lse + head * N + n, mask=n < N, other=0.0)
    tl.store(Out + head * N + n, lse + tl.sum(q * mean[None, :], 1), mask=n < N)


def launch_unsmooth(lse: Tensor, q: Tensor, k_mean: Tensor, scale: float, run: Callable) -> Tensor:
    """lse [B, H_q, N] of keys less k_mean [B, H_kv, D], q [B, H_q, N, D] -> lse of the keys, in
    fp32. lse and k_mean are contiguous."""
    (B, H_q, N, D), out = q.shape, lse.new_empty(lse.shape)
    BLOCK_D = triton.next_power_of_2(D)
    BLOCK_N = 8192 // BLOCK_D
    run(
        _unsmooth_kernel,
        (B * H_q * triton.cdiv(N, BLOCK_N),),
        (lse, q, k_mean, out),
        (*doubled(q.stride()), H_q, k_mean.shape[1], N,  # shape
         scale,  # semantics
         D, BLOCK_N, BLOCK_D),  # tile
    )  # fmt: skip
    return out
