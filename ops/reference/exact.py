"""Exact attention in float64, the oracle of every recipe's error, and what a mask hides.

Shapes: B batch, H heads (H_q of q, H_kv of k and v), N sequence, D head_dim. Bands: visibility.py.
"""

import math

import torch
from torch import Tensor

from sage_inductor.ops.visibility import NO_LISTS, BlockLists


def attention_exact(
    q, k, v, scale: float, attn_mask=None, left=None, right=None, bottom_right=False,
    blocks: BlockLists = NO_LISTS,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Exact attention in float64: out [B, H_q, N_q, D_v], lse [B, H_q, N_q].
    A row that sees no key is 0, its lse -inf."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    s = q @ k.mT * scale  # [B, H_q, N_q, N_kv]
    if blocks.size is None:
        s = masked(s, attn_mask, left, right, bottom_right)
    else:
        times = how_often(blocks, *s.shape[2:], left, right, bottom_right)
        s = masked(s, attn_mask, None, None, False) + times.log()  # weights times how often
    empty = (s == -math.inf).all(-1, keepdim=True)
    return (s.softmax(-1) @ v).masked_fill(empty, 0.0), s.logsumexp(-1)


def how_often(blocks: BlockLists, n_q: int, n_kv: int, left, right, bottom_right) -> Tensor:
    """[B or 1, H_q or 1, N_q, N_kv]: how often each query sees each key, by lists of blocks and a
    band."""
    times, num_blocks, device = 0, -(-n_kv // blocks.block_kv), blocks.kv_indices.device
    band = masked(torch.zeros(n_q, n_kv, device=device), None, left, right, bottom_right).exp()
    for (count, index), seen in zip(blocks.lists, (band, torch.ones_like(band)), strict=False):
        listed = torch.arange(index.shape[3], device=device) < count[..., None]
        index = index.long().clamp(0, num_blocks)  # the last: of no key
        named = band.new_zeros(*index.shape[:3], num_blocks + 1)
        named = named.scatter_add(3, index, listed.float())
        named = named[..., :-1].repeat_interleave(blocks.block_q, 2)[:, :, :n_q]
        times = times + named.repeat_interleave(blocks.block_kv, 3)[..., :n_kv] * seen
    return times


def masked(s: Tensor, attn_mask, left, right, bottom_right: bool, unit: float = 1.0) -> Tensor:
    """s [..., N_q, N_kv] with -inf where mask or band hide a key, plus an additive mask * unit."""
    n_q, n_kv = s.shape[-2:]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        s = s.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        # The lowest number of bf16 or fp32 hides as one among others; alone in a row it does not.
        # So it has to stay finite when the unit is not 1.
        added = attn_mask.to(s.dtype)
        lowest = torch.finfo(s.dtype).min
        s = s + torch.where(added > -math.inf, (added * unit).clamp(min=lowest), added)
    if left is None and right is None:
        return s
    i = torch.arange(n_q, device=s.device)[:, None] + (n_kv - n_q if bottom_right else 0)
    j = torch.arange(n_kv, device=s.device)
    if left is not None:
        s = s.masked_fill(j < i - left, -math.inf)
    if right is not None:
        s = s.masked_fill(j > i + right, -math.inf)
    return s
