"""Blocks of tokens: what each has in common, and which of them are the largest by a score.

    mean  = of the tokens x of a block
    alike = squared norm of the mean of the tokens, each scaled to norm 1: the mean cosine of all
            pairs, 1 / block for independent ones

On CPU each op is plain PyTorch; the kernels are held to it.

Shapes: B batch, H heads, N sequence, D head_dim, M blocks of a sequence, or of a row of scores.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from sage_inductor.ops.launch import doubled
from sage_inductor.ops.layout import ordered, token_of
from sage_inductor.ops.register import launched_by

CHUNK = 512  # scores in the registers of one warp
_SIGN, _ALL = tl.constexpr(1 << 31), tl.constexpr((1 << 32) - 1)


@triton.jit
def _pool_kernel(
    X,  # [B, H, N, D] in
    Shift,  # [B, H, D] in, fp32 or X's dtype; if SHIFT
    Perm,  # int32 [N] in or None: layout.py
    Mean, Alike,  # [B, H, M, D], [B, H, M] out, fp32; if SQUARES the mean of squared norms
    stride_b, stride_h, stride_n, stride_d,
    H, N,
    SHIFT: tl.constexpr, SQUARES: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid: (B * H * M,). One block of one head, ROWS tokens at a time."""
    pid = tl.program_id(0).to(tl.int64)
    M = tl.cdiv(N, BLOCK)
    head, first = pid // M, pid % M * BLOCK
    tokens = tl.minimum(N - first, BLOCK)
    i, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    if Perm is None:
        x = X + ((head // H * stride_b + head % H * stride_h + first * stride_n) >> 1)
        x = x + ((i.to(tl.int64) * stride_n) >> 1)[:, None] + d.to(tl.int64)[None, :] * stride_d
    else:
        x = X + ((head // H * stride_b + head % H * stride_h) >> 1)
        x = x + d.to(tl.int64)[None, :] * stride_d
    if SHIFT:
        shift = tl.load(Shift + head * D + d, mask=d < D, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, BLOCK_D], tl.float32)
    units = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for start in tl.static_range(0, BLOCK, ROWS):
        mask = (start + i < tokens)[:, None] & (d < D)[None, :]
        if Perm is None:
            at = x + ((tl.cast(start, tl.int64) * stride_n) >> 1)
        else:
            at = x + ((token_of(Perm, first + start + i, N) * stride_n) >> 1)[:, None]
        rows = tl.load(at, mask=mask, other=0.0)
        rows = rows.to(tl.float32)
        if SHIFT:
            rows = (rows - shift[None, :]).to(Shift.dtype.element_ty).to(tl.float32)
            rows = tl.where(mask, rows, 0.0)
        total += rows
        if SQUARES:
            units += rows * rows
        else:
            norm = tl.sqrt(tl.sum(rows * rows, 1))
            units += rows * (1.0 / tl.maximum(norm, 1e-12))[:, None]
    units = tl.sum(units, 0) / tokens
    tl.store(Mean + pid * D + d, tl.sum(total, 0) / tokens, mask=d < D)
    tl.store(Alike + pid, tl.sum(units if SQUARES else units * units, 0))


def _launch_pool(
    run: Callable, _gpu, x: Tensor, shift: Tensor | None, block: int, squares: bool = False,
    perm: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    B, H, N, D = x.shape
    D = int(D)  # a tile needs a number
    M, BLOCK_D = triton.cdiv(N, block), triton.next_power_of_2(D)
    mean = x.new_empty((B, H, M, D), dtype=torch.float32)
    alike = x.new_empty((B, H, M), dtype=torch.float32)
    run(
        _pool_kernel,
        (B * H * M,),
        (x, x if shift is None else shift, perm, mean, alike),
        (*doubled(x.stride()),
         H, N,  # shape
         shift is not None, squares,  # semantics
         D, block, min(16, 2048 // BLOCK_D), BLOCK_D),  # tile; rows in the registers of pool_warps
        num_warps=pool_warps(BLOCK_D),
    )  # fmt: skip
    return mean, alike


def pool_warps(block_d: int) -> int:
    """Two, as long as their registers hold it. H200, 2026-11-23, (1, 24, 75600, 128), blocks of 64
    to 192: 153 to 172 us; four warps: 176 to 323."""
    return max(2, block_d // 64)


@launched_by(_launch_pool)
def pool_blocks(
    x: Tensor, shift: Tensor | None, block: int, squares: bool = False, perm: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x [B, H, N, D], any dtype and strides, of which shift [B, H, D] is taken off, in fp32 or, if
    it has x's dtype, in that -> of each `block` tokens mean [B, H, M, D] and alike [B, H, M] or,
    if `squares`, the mean of their squared norms, in fp32. perm: their order (layout.py)."""
    x, N = ordered(x, perm), x.shape[2]
    M = (N + block - 1) // block
    tokens = (N - torch.arange(M, device=x.device) * block).clamp(max=block)
    x = (x if shift is None else x - shift.unsqueeze(2)).float()

    def mean(x: Tensor) -> Tensor:
        blocks = F.pad(x, (0, 0, 0, M * block - N)).unflatten(2, (M, block))
        return blocks.sum(3) / tokens.unsqueeze(1)

    alike = mean(x.square()) if squares else mean(F.normalize(x, dim=3)).square()
    return mean(x), alike.sum(3)


@triton.jit
def _float_at(place):
    """The number at a place of the order of all floats, uint32; beyond the infinities NaN."""
    return (place ^ tl.where(place >= _SIGN, _SIGN, _ALL)).to(tl.float32, bitcast=True)


@triton.jit
def _largest_kernel(
    Scores,  # [rows, M] in, fp32 or 16 bits
    Counts,  # [rows] in, int32
    Indices,  # [rows, M] out, int32
    M,
    CHUNK: tl.constexpr,
):
    """Grid: (rows,). The least score that is kept is found bit by bit, by counting; no sort."""
    row = tl.program_id(0).to(tl.int64)
    scores, indices = Scores + row * M, Indices + row * M
    count = tl.load(Counts + row)
    i = tl.arange(0, CHUNK)

    # Invariant: at least `count` scores are at `place` or above it. `above` scores, fewer than
    # `count`, are at a higher place or above that: in the end at the next one. Each round fixes one
    # bit of `place`. The search ends early if exactly `count` scores are at it or above it.
    place, bit, above = tl.cast(0, tl.uint32), tl.cast(_SIGN, tl.uint32), tl.cast(0, tl.int32)
    while bit != 0:
        x = _float_at(place | bit)
        reached = tl.zeros([CHUNK], tl.int32)
        for start in range(0, M, CHUNK):
            chunk = tl.load(scores + start + i, mask=start + i < M, other=float("nan"))
            chunk = chunk.to(tl.float32)
            reached += (chunk >= x).to(tl.int32)
        found = tl.sum(reached, 0)
        place = tl.where(found >= count, place | bit, place)
        above = tl.where(found >= count, above, found)
        bit = tl.where(found == count, 0, bit >> 1)

    least = tl.full([CHUNK], _float_at(place), tl.float32)
    any_score = least != least  # fewer than `count` are numbers, or `count` is 0
    kept, equal = tl.cast(0, tl.int32), tl.cast(0, tl.int32)  # so far
    for start in range(0, M, CHUNK):
        j = start + i
        chunk = tl.load(scores + j, mask=j < M, other=float("nan"))
        chunk = chunk.to(tl.float32)
        is_equal = (chunk == least) | any_score
        nth = equal + tl.cumsum(is_equal.to(tl.int32), 0)
        is_kept = (chunk > least) | (is_equal & (nth <= count - above))
        before = kept + tl.cumsum(is_kept.to(tl.int32), 0)
        at = tl.where(is_kept, before - 1, count + j - before)
        tl.store(indices + at, j, mask=j < M)
        equal, kept = tl.max(nth, 0), tl.max(before, 0)


def _launch_largest(run: Callable, _gpu, scores: Tensor, counts: Tensor) -> list[Tensor]:
    indices = scores.new_empty(scores.shape, dtype=torch.int32)
    tensors, numbers = (scores, counts, indices), (scores.shape[-1], CHUNK)
    rows = math.prod(counts.shape)  # counts.shape.numel() would fix lengths that are symbols
    run(_largest_kernel, (rows,), tensors, numbers, num_warps=1)
    return [indices]


@launched_by(_launch_largest)
def _largest(scores: Tensor, counts: Tensor) -> list[Tensor]:
    M = scores.shape[-1]
    order = scores.sort(stable=True, descending=True)[1]
    rest = torch.arange(M, device=scores.device) >= counts.unsqueeze(-1)
    return [((order + M * rest).sort()[0] % M).int()]


def largest(scores: Tensor, counts: Tensor) -> Tensor:
    """scores [..., M], floating, counts [...] int32, 0 to M -> indices [..., M], int32.

    A row has the indices of its counts[...] largest scores, and then those of the rest, both in
    ascending order. The first of equal scores are taken. In a row with NaN or -infinity as many
    indices are taken, but any."""
    return _largest(scores.contiguous(), counts.contiguous())[0]
