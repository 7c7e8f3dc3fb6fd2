"""The bit-faithful emulation of ``sage::decode``'s kernels in plain PyTorch. Nothing in it depends
on what start and end hold, so it can be traced.

Shapes: as in decode_call.py; S splits, T tiles of each, M = G N_q rows that share a head of k.
"""

import math

import torch
from torch import Tensor

from sage_inductor.ops.decode_call import BLOCK_N, P_BITS, UP, DecodeCall
from sage_inductor.ops.formats import LOG2E, TINY, rotation_scale
from sage_inductor.ops.reference.quantize import divide, rotate


def decode(
    a: DecodeCall, splits: int = 1, ways: int = 1, block: int = BLOCK_N
) -> tuple[Tensor, Tensor]:
    """out [B, H_q, N_q, D_v] of q's dtype and lse [B, H_q, N_q] fp32, natural log. A split's tiles
    have ways * block keys: each way has its own block, and its own maximum."""
    (B, _, N_q, D), (_, H_kv, N, _), device = a.q.shape, a.k.shape, a.q.device

    # -- where splits and tiles are ----
    start, end = (x.clamp(0, N).long().expand(B)[:, None] for x in (a.start, a.end))
    first = start if a.left is None else torch.maximum(start, end - N_q - a.left)  # [B, 1]
    most = _up(_up(N, splits) // splits, ways * block)  # keys of a split
    keys = _up(_up((end - first).clamp(min=0), splits) // splits, ways * block)
    at = torch.arange(splits * most, device=device).view(splits, -1, ways, block)
    at, splits = at.transpose(1, 2).flatten(), splits * ways
    key = first + at // most * keys + at % most  # [B, S most]
    inside = (at % most < keys) & (key < end)

    def read(x: Tensor) -> Tensor:
        """x [B, H_kv, N, ..] -> [B, H_kv, S most, ..], 0 where there is no key."""
        index, here = (
            y[:, None, :, None].expand(-1, H_kv, -1, x.shape[3]) for y in (key * inside, inside)
        )
        return torch.where(here, x.gather(2, index), 0.0)

    def read_scale(scale: Tensor) -> Tensor:
        return read(scale.expand(B, H_kv, N)[..., None]).mT  # [B, H_kv, 1, S most]

    def tiled(x: Tensor) -> Tensor:
        return x.unflatten(-1, (splits, -1, block))

    # -- scores, in log2 units ----
    q = (rotate(a.q, a.q) * rotation_scale(D)).to(a.q.dtype) if a.rotated else a.q
    q = q.float().unflatten(1, (H_kv, -1)).flatten(2, 3)  # [B, H_kv, M, D]
    if a.k_scale is None:
        x = q @ read(a.k.float()).mT * (a.scale * LOG2E)
    else:
        exponent = q.abs().amax(-1, keepdim=True).view(torch.int32) >> 23
        up = ((UP - exponent).clamp(max=254) << 23).view(torch.float32)
        x = (q * up).half().float() @ read(a.k.float()).mT
        x = x * divide(a.scale * LOG2E, up) * read_scale(a.k_scale)
    i = torch.arange(q.shape[2], device=device) % N_q
    place = end - N_q + i  # [B, M]
    if a.mask is None:
        seen = key[:, None] <= place[..., None]
    else:
        seen = a.mask.expand(B, N_q, N)[:, i].gather(
            2, (key * inside)[:, None].expand(-1, q.shape[2], -1)
        )
    seen = inside[:, None] & seen
    if a.left is not None:
        seen = seen & (key[:, None] >= place[..., None] - a.left)
    x = tiled(x.masked_fill(~seen[:, None], -math.inf))  # [B, H_kv, M, S, T, block]

    # -- each split by itself: the maximum so far decides how a tile's p is rounded ----
    m = x.amax(-1, keepdim=True).cummax(-2).values
    bits = 0.0 if a.v_scale is None else P_BITS
    p = torch.exp2(x - (torch.where(m == -math.inf, 0.0, m) - bits))
    m_last = m[..., -1:, :]
    rescale = torch.where(m == -math.inf, 0.0, torch.exp2(m - m_last))
    l = (p * rescale).sum((-2, -1))  # [B, H_kv, M, S]
    if a.v_scale is not None:
        v_scale = tiled(read_scale(a.v_scale))
        largest = v_scale.abs().amax(-1, keepdim=True).clamp(min=TINY).cummax(-2).values
        p, rescale = p * (v_scale * divide(1.0, largest)), rescale * largest
    dtype = a.q.dtype if a.v_scale is None else torch.float16
    p = (p.to(dtype).float() * rescale).flatten(-2).transpose(2, 3)  # [B, H_kv, S, M, most]
    o = p @ read(a.v.float()).unflatten(2, (splits, -1))  # [B, H_kv, S, M, D_v]
    o = o.transpose(2, 3) * _inverse(l)
    lse = m_last[..., 0, 0] + l.log2() - bits

    # -- all splits ----
    m = lse.amax(-1, keepdim=True)
    weight = torch.exp2(lse - torch.where(m == -math.inf, 0.0, m))
    total = weight.sum(-1)  # [B, H_kv, M]
    out = (o * weight[..., None]).sum(-2) * _inverse(total)
    lse = (m[..., 0] + total.log2()) / LOG2E
    out, lse = (y.unflatten(2, (-1, N_q)).flatten(1, 2) for y in (out, lse))
    return out.to(a.q.dtype), lse


def _up(n, step: int):
    """n up to the next multiple."""
    return (n + step - 1) // step * step


def _inverse(l: Tensor) -> Tensor:
    return torch.where(l == 0, 0.0, divide(1.0, l))[..., None]
