"""The bit-faithful emulation of the attention kernels in plain PyTorch, on what they read.

The scores of all heads are in memory at once: for studies of the accuracy, not for speed.
"""

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_inductor.ops import formats
from sage_inductor.ops.attention_call import AttentionCall
from sage_inductor.ops.formats import K_BLOCK, LOG2_FP4_MAX, LOG2E, Q_BLOCK, pad_rows
from sage_inductor.ops.reference import quantize
from sage_inductor.ops.reference.exact import how_often, masked
from sage_inductor.ops.visibility import BlockLists, listed_keys

# What a call by lists has that another has not.
OF_LISTS = "attn_mask", "tile_summary", "perm", "perm_k", "spans", "documents", *BlockLists._fields


def attention(
    a: AttentionCall, block_n: int = 128, as_read: Callable | None = None
) -> tuple[Tensor, Tensor]:
    """The kernel that `a.recipe` names, reading `block_n` keys at a time: out [B, H_q, N_q, D_v] of
    q's dtype, lse [B, H_q, N_q] fp32, of the keys as they were quantized. as_read: in the place of
    `_as_listed`, for a kernel that reads blocks of keys in another order. With documents lse is of
    places: [B, H_q, P]."""
    if a.spans is not None:
        return _of_documents(a, block_n)
    if a.perm is not None:
        in_order = a._replace(q=a.q.index_select(2, a.perm), perm=None)
        (out, lse), back = attention(in_order, block_n, as_read), a.perm.argsort()
        return out.index_select(2, back), lse.index_select(2, back)
    if a.decoded.of_qk.block_scaled:
        return _block_scaled(a, block_n)
    q, k, v, n_kv, recipe, pv = a.q, a.k, a.v, a.n_kv, a.decoded, a.decoded.of_pv
    quantized, scale, offset = pv.dtype is not None, a.scale_of_codes, math.log2(pv.largest)
    heads, N_q = q.shape[1] // k.shape[1], q.shape[2]
    k = quantize.unpack(k) if recipe.of_qk.packed == 2 else k
    v = v.repeat_interleave(heads, 1)
    q_smooth = q
    if a.q_mean is not None:
        q_smooth = q.float() - a.q_mean.float().repeat_interleave(Q_BLOCK, 2)[:, :, :N_q]
    q_8bit, q_scale = quantize.quantize_q(q_smooth * math.copysign(1.0, scale), recipe)
    q_scale = q_scale * (abs(scale) * LOG2E)

    def scores(k: Tensor, k_scale: Tensor) -> Tensor:
        """[B, H_q, N_q, N_pad], in log2 units."""
        n, groups = torch.arange(k.shape[2], device=q.device), k_scale.shape[3]
        k, k_scale = (x.repeat_interleave(heads, 1) for x in (k, k_scale))
        of_block = n % K_BLOCK if groups == K_BLOCK else n % 8 // 2 % groups
        k_scale = k_scale.flatten(2)[:, :, n // K_BLOCK * groups + of_block]
        s = q_8bit.float() @ k[..., : q_8bit.shape[3]].float().mT  # INT8: exact
        return s * (q_scale * k_scale[:, :, None])

    x = scores(k, a.k_scale)
    if a.delta is not None:
        delta = a.delta.float() * (scale * LOG2E)
        x = x + delta.repeat_interleave(Q_BLOCK, 2)[:, :, :N_q]
    x = x[..., :n_kv]
    if as_read is None and a.blocks.size is None:
        keys, x = None, masked(x, a.attn_mask, *a.band, LOG2E)
        x = F.pad(x, (0, k.shape[2] - n_kv), value=-math.inf)
    else:
        x = masked(x, a.attn_mask, None, None, False, LOG2E)
        as_read = as_read or functools.partial(_as_listed, a.blocks)
        x, keys = as_read(x, masked(x, None, *a.band))
    listed, has_tail = x.shape[3], a.tail_block is not None
    if has_tail:
        bias = a.tail_bias.repeat_interleave(heads, 1)[:, :, None]
        of_tail = torch.where(_unlisted(a), scores(a.tail_k, a.tail_k_scale) + bias, -math.inf)
        x = torch.cat([x, of_tail], 3)
    n = torch.arange(x.shape[3], device=q.device)

    # The running maximum at the end of a tile decides how the tile's p is rounded; what later
    # tiles do to the accumulator is an exact rescaling. A row that has seen nothing has no maximum.
    biased = a.delta is not None or (a.attn_mask is not None and a.attn_mask.dtype != torch.bool)
    tile_end = (n // block_n * block_n + block_n - 1).clamp(max=n.shape[0] - 1)
    m = x.cummax(-1).values[..., tile_end]  # [B, H_q, N_q, N_pad]
    m = shift_of(m, offset) if biased else m
    m = torch.where(m == -math.inf, 0.0, m)
    flat = 1.0 if biased or not offset else flatness(m)
    p = torch.exp2(x * flat - (m * flat - (0.0 if biased else offset)))
    m_last = m[..., -1:]
    rescale = torch.where(p > 0, torch.exp2(m - m_last), 0.0)
    l = (p * rescale).sum(-1, keepdim=True)  # [B, H_q, N_q, 1]
    inverse = torch.where(l == 0, 0.0, quantize.divide(1.0, l))
    dtype = torch.bfloat16 if v.dtype == torch.float32 else v.dtype
    p = p.to(dtype).float() * rescale
    if has_tail:
        p, p_tail = p[..., :listed], p[..., listed:]
        v_tail = a.tail_v.float().repeat_interleave(heads, 1)
    if keys is not None:
        p = p.new_zeros(*p.shape[:3], k.shape[2]).scatter_add(3, keys, p)
    if quantized:
        o = quantize.interleave(p) @ v.float().mT
        o = o + quantize.interleave(p_tail) @ v_tail.mT if has_tail else o
        of_v = (a.v_scale, a.v_mean)
        v_scale, v_mean = (x.repeat_interleave(heads, 1)[:, :, None] for x in of_v)
        o = o[..., : v_mean.shape[3]] * inverse * v_scale + torch.where(l == 0, 0.0, v_mean)
    else:
        v = v.to(dtype).float()
        if a.tile_summary is not None:  # 0 * NaN
            v = torch.where((a.tile_summary > 0).any(2)[..., None], v, 0.0)
        if a.blocks.size is not None:
            v = torch.where(listed_keys(a.blocks, n_kv)[..., None] > 0, v, 0.0)
        o = p[..., :n_kv] @ v
        if has_tail:
            o = o + p_tail[..., : v_tail.shape[2]] @ v_tail[..., : v.shape[3]]
        o = o * inverse
    lse = (m_last - (0.0 if biased else offset) + l.log2())[..., 0] / LOG2E
    return o.to(q.dtype), lse


def _of_documents(a: AttentionCall, block_n: int) -> tuple[Tensor, Tensor]:
    """One document after another (documents.py), of which the last sees nothing."""
    out = torch.zeros_like(a.q[..., :1]).expand(-1, -1, -1, a.head_dim_v).contiguous()
    lse = out.new_full((*a.q.shape[:2], a.n_q), -math.inf, dtype=torch.float32)
    alone = a._replace(**dict.fromkeys(OF_LISTS))
    for s, (first, n_kv, of_q, n_q) in enumerate(a.spans[:-1].tolist()):
        if n_q and n_kv:
            places, end = slice(of_q, of_q + n_q), first + pad_rows(n_kv)
            tokens = a.perm[places]
            one = alone._replace(
                q=a.q[:, :, tokens], k=a.k[:, :, first:end], n_kv=n_kv, v=a.v[..., first:end],
                k_scale=a.k_scale[:, :, first // K_BLOCK : end // K_BLOCK], bottom_right=True,
                v_scale=a.v_scale[s : s + 1], v_mean=a.v_mean[s : s + 1],
            )  # fmt: skip
            out[:, :, tokens], lse[:, :, places] = attention(one, block_n)
    return out, lse


def flatness(m: Tensor) -> Tensor:
    """large_scores.py's."""
    bits = m.abs().clamp(min=formats.LARGE).view(torch.int32)
    return (formats.ONE_BITS - (bits - formats.LARGE_BITS)).view(torch.float32)


def shift_of(m: Tensor, offset: float) -> Tensor:
    """large_scores.py's."""
    of_large = formats.OFFSET_OF_LARGE if offset else 0.0
    of_large = torch.where(m.abs() < formats.LARGEST, of_large, 0.0)
    return m - torch.where(m.abs() < formats.LARGE, offset, of_large)


def _as_listed(blocks: BlockLists, x: Tensor, x_banded: Tensor) -> tuple[Tensor, Tensor]:
    """x [B, H_q, N_q, N_kv], or in partial blocks x_banded, in the order in which each query's
    lists name the keys, -inf where they name none, [B, H_q, N_q, all that they have room for]; and
    the keys, there 0."""
    n_q, n_kv = x.shape[2:]
    block, (block_q, block_kv) = torch.arange(n_q, device=x.device), blocks.size
    listed = []
    for (count, index), each in [*zip(blocks.lists, (x_banded, x), strict=False)][::-1]:
        j = torch.arange(index.shape[3] * block_kv, device=x.device)
        key = index.long()[:, :, block // block_q].clamp(0, -(-n_kv // block_kv))
        key = key[..., j // block_kv] * block_kv + j % block_kv
        names = (j // block_kv < count[:, :, block // block_q, None]) & (key < n_kv)
        key = torch.where(names, key, 0).expand(*x.shape[:3], -1)
        listed.append((each.gather(3, key).masked_fill(~names, -math.inf), key))
    return tuple(torch.cat(each, 3) for each in zip(*listed, strict=True))


def _unlisted(a: AttentionCall) -> Tensor:
    """bool [B or 1, H_q or 1, N_q, T_pad]: keys of the tail for blocks that a query's lists do not
    name."""
    first = torch.arange(a.tail_k.shape[2], device=a.q.device) * a.tail_block
    times = how_often(a.blocks, a.q.shape[2], a.n_kv, None, None, False)
    return (times[..., first.clamp(max=a.n_kv - 1)] == 0) & (first < a.n_kv)


def _block_scaled(a: AttentionCall, block_n: int) -> tuple[Tensor, Tensor]:
    """nvfp4.py's kernel."""
    q, n_kv = a.q, a.n_kv
    heads, unit = q.shape[1] // a.k.shape[1], a.scale * LOG2E
    k_hat, v_hat = (
        quantize.phi_inverse(torch.stack([x & 15, x >> 4], -1).flatten(-2), e4m3)
        for x, e4m3 in ((a.k, a.k_blocks), (a.v, a.v_blocks))
    )
    k_hat, v_hat = (x.repeat_interleave(heads, 1) for x in (k_hat, v_hat))
    block = torch.arange(q.shape[2], device=q.device) // Q_BLOCK
    q_smooth = q.float() - a.q_mean[:, :, block]
    inverse, q_scale = quantize.power_of_two(q_smooth.abs().amax(3, keepdim=True))
    codes = quantize.phi(quantize.pad(q_smooth * inverse))
    q_hat = quantize.phi_inverse(*codes)[:, :, : q.shape[2]]
    c = q_scale * (a.k_scale.repeat_interleave(heads, 1) * unit)[..., None, None]
    x = (q_hat @ k_hat.mT)[..., :n_kv] * c + (a.delta[..., :n_kv].float() * unit)[:, :, block]
    x = masked(x, a.attn_mask, *a.band, LOG2E)
    x = F.pad(x, (0, a.k.shape[2] - n_kv), value=-math.inf).unflatten(-1, (-1, block_n))

    m_tile = shift_of(x.amax(-1, keepdim=True), LOG2_FP4_MAX)  # [B, H_q, N_q, tiles, 1]
    p = torch.exp2(x - torch.where(m_tile == -math.inf, 0.0, m_tile))
    m = m_tile.amax(-2, keepdim=True)
    m = torch.where(m == -math.inf, 0.0, m)
    s1 = torch.exp2(m_tile - m)
    l = (p * s1).sum((-1, -2))[..., None]  # [B, H_q, N_q, 1]
    o = (quantize.phi_inverse(*quantize.phi(p)) * s1).flatten(-2) @ v_hat.mT
    v_scale, v_mean = (x.repeat_interleave(heads, 1)[:, :, None] for x in (a.v_scale, a.v_mean))
    o = o[..., : v_mean.shape[3]] * torch.where(l == 0, 0.0, quantize.divide(1.0, l)) * v_scale
    lse = (m[..., 0] + l.log2())[..., 0] / LOG2E
    return (o + torch.where(l == 0, 0.0, v_mean)).to(q.dtype), lse
