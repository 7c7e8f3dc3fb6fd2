"""The bit-faithful emulation of ``sage::rowscaled`` (ops/training) in plain PyTorch: its forward,
what its backward reads (hopper/prepare.py), and the backward (hopper/kernel.py).

The scores of all heads are in memory at once: for studies of the accuracy, not for speed. Sums of
the backward are in fp64: the tensor cores' 13 bits, added up every few blocks, are not emulated.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_inductor.ops.attention.arguments import AttentionCall
from sage_inductor.ops.formats import (
    E4M3_MAX,
    K_BLOCK,
    LOG2E,
    NO_QUERY,
    TINY,
    TRAINING_BLOCK,
    Kept,
    Prepared,
)
from sage_inductor.ops.recipe import ROWSCALED_FORWARD
from sage_inductor.ops.reference.attention import attention
from sage_inductor.ops.reference.exact import masked
from sage_inductor.ops.reference.quantize import divide, pad, smooth
from sage_inductor.ops.reference.training import LARGEST, quantize
from sage_inductor.ops.training.hopper.prepare import Operands
from sage_inductor.ops.visibility import Visibility


def forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Kept]:
    """out [B, H_q, N_q, D] of q's dtype, contiguous, and what the backward reads."""
    B, H_kv, _, D = k.shape
    if is_causal:
        means, k_mean, v_mean = k.new_empty((0, B, H_kv, D), dtype=torch.float32), None, None
    else:
        k_mean, v_mean = means = smooth([k, v])[0]
    shared = 1 if is_causal else TRAINING_BLOCK
    (q8, q_scale), (k8, k_scale) = quantize(q, shared=1), quantize(k, k_mean, shared)
    prepared = Prepared(k8, k_scale.unflatten(2, (-1, K_BLOCK // shared)), None)
    visibility = Visibility(right=0 if is_causal else None)
    a = AttentionCall.of(q, prepared, v, visibility, scale, k.shape[2], ROWSCALED_FORWARD)
    out, lse = attention(a)
    x = _scores(q8, k8)[:, :, : q.shape[2], : k.shape[2]]
    x = x * (q_scale * (scale * LOG2E))[:, :, : q.shape[2], None]
    group = q.shape[1] // k.shape[1]
    x = x * _of_rows(k_scale, k8).repeat_interleave(group, 1)[:, :, None, : k.shape[2]]
    stats = torch.stack((lse, masked(x, None, *visibility.band).amax(3)))
    of_v = quantize(v, v_mean, shared=1)
    return out.contiguous(), Kept(stats, q8, q_scale, k8, k_scale, *of_v, means)


def backward(
    grad: Tensor, out: Tensor, kept: Kept, n_kv: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq [B, H_q, N_q, D], dk and dv [B, H_kv, N_kv, D] in fp64."""
    return gradients(kept, prepare(grad, out, kept, scale), out.shape[2], n_kv, out.shape[3])


def prepare(grad: Tensor, out: Tensor, kept: Kept, scale: float) -> Operands:
    """What the two kernels read, as hopper/prepare.py makes it."""
    (_, H_q, N_q, _), H_kv, M_pad = out.shape, kept.k.shape[1], kept.q.shape[2]
    group = H_q // H_kv

    def pad_places(x: Tensor, value: float = 0.0) -> Tensor:
        """[B, H_q, N_q] -> [B, H_q, M_pad]."""
        return F.pad(x, (0, M_pad - N_q), value=value)

    def of_head(x: Tensor) -> Tensor:
        """The largest of the heads of q that share k and v: [B, H_q, n] -> [B, H_kv]."""
        return x.unflatten(1, (H_kv, group)).amax((2, 3))

    def to_heads(x: Tensor) -> Tensor:
        """[B, H_kv] -> [B, H_q, 1]."""
        return x.repeat_interleave(group, 1)[:, :, None]

    def least(x: Tensor) -> Tensor:
        return torch.where(x < TINY, TINY, x)

    g8, a = quantize(grad, shared=1)
    g = pad(grad.float())
    g = g * divide(LARGEST, least(g.abs().amax(3)))[..., None]
    o = out.float()
    if not kept.is_causal:
        o = o - kept.means[1].repeat_interleave(group, 1)[:, :, None]
    o = pad(o)
    u, o_norm = g.square().sum(3).sqrt(), o.square().sum(3).sqrt()
    lse, m = kept.stats
    wa = pad_places(torch.exp2(m - lse * LOG2E)) * a
    v_norm = kept.v.float().square().sum(3).sqrt() * kept.v_scale
    largest, largest_q = least(of_head(wa)), least(of_head(wa * kept.q_scale))
    to_fp8, c = E4M3_MAX / LARGEST, LARGEST / E4M3_MAX**2
    of_keys = _of_rows(kept.k_scale, kept.k)
    delta = (g * o).sum(3)
    m = pad_places(m - math.log2(E4M3_MAX), NO_QUERY)
    if kept.is_causal:

        def so_far(x: Tensor) -> Tensor:
            """Of the keys that a query sees: [B, H_kv, N_pad] -> [B, H_q, M_pad]."""
            return x.cummax(2).values.repeat_interleave(group, 1)

        beta = least(of_head(u * so_far(v_norm) + u * o_norm))
        of_row = least(u * so_far(v_norm * of_keys) + u * o_norm * so_far(of_keys))
        row_scale = wa * (of_row * (scale / E4M3_MAX / to_fp8))
        kt_scale = torch.full_like(of_keys, to_fp8)
        of_dq = m + of_row.log2(), delta, kept.v_scale
    else:
        beta = least(of_head(u) * v_norm.amax(2) + of_head(u * o_norm))
        largest_k = kept.k_scale.amax(2)
        row_scale = wa * to_heads(beta * (scale / E4M3_MAX) * (largest_k / to_fp8))
        kt_scale = of_keys * (to_fp8 / largest_k)[:, :, None]
        of_dq = m, delta / to_heads(beta), kept.v_scale / beta[:, :, None]
    vectors = torch.stack(
        (
            pad_places(kept.q_scale[:, :, :N_q] * (scale * LOG2E)),
            m,
            delta / to_heads(beta),
        )
    )
    return Operands(
        g8,
        _turned(kept.q, wa * kept.q_scale * (to_fp8 / to_heads(largest_q)), group),
        _turned(g8, wa * (to_fp8 / to_heads(largest)), group),
        _turned(kept.k, kt_scale, 1),
        vectors,
        row_scale,
        kept.v_scale / beta[:, :, None],
        largest_q * (c * scale * beta),
        largest * c,
        *of_dq,
    )


def gradients(
    kept: Kept, x: Operands, n_q: int, n_kv: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What the two kernels compute."""
    H_kv = kept.k.shape[1]
    group = kept.q.shape[1] // H_kv

    def e4m3(y: Tensor) -> Tensor:
        return y.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).double()

    def to_queries(y: Tensor) -> Tensor:
        """[B, H_kv, N_pad] -> [B, H_q, 1, N_pad]."""
        return y.repeat_interleave(group, 1)[:, :, None]

    q_scale, m, delta = (y[..., None] for y in x.vectors)
    k_scale = to_queries(_of_rows(kept.k_scale, kept.k))
    scores = _scores(kept.q, kept.k) * (q_scale * k_scale)
    if kept.is_causal:
        scores = masked(scores, None, None, 0, False)
    dp = _scores(x.g, kept.v)
    p = torch.exp2(scores - m)
    ds = e4m3(p * (dp * to_queries(x.v_scale) - delta))
    ds_of_dq = ds
    if kept.is_causal:
        of_dq = torch.exp2(scores - x.m[..., None]) * k_scale
        ds_of_dq = e4m3(of_dq * (dp * to_queries(x.v_scale_of_dq) - x.delta[..., None]))
    p = e4m3(p)
    qt, ot, kt = (_unturned(y) for y in (x.qt, x.ot, x.kt))
    dq = ds_of_dq @ kt.repeat_interleave(group, 1) * x.row_scale.double()[..., None]
    of_q, of_o = (y.double()[..., None, None] for y in (x.qt_scale, x.ot_scale))
    ds, p = (y.unflatten(1, (H_kv, group)).flatten(2, 3) for y in (ds, p))  # one head of more rows
    dk, dv = ds.mT @ qt * of_q, p.mT @ ot * of_o
    return dq[:, :, :n_q, :head_dim], dk[:, :, :n_kv, :head_dim], dv[:, :, :n_kv, :head_dim]


def _scores(a: Tensor, b: Tensor) -> Tensor:
    """a b^T of codes [B, H, N, D_pad], b's heads shared; exact in fp32."""
    return a.float() @ b.float().repeat_interleave(a.shape[1] // b.shape[1], 1).mT


def _of_rows(k_scale: Tensor, k: Tensor) -> Tensor:
    """[B, H_kv, N_pad], of each row of k's codes."""
    return k_scale.repeat_interleave(k.shape[2] // k_scale.shape[2], 2)


def permute_tokens(x: Tensor) -> Tensor:
    """[..., N]: place 4t + 2h + e of 16 gets token 8h + 2t + e."""
    return x.unflatten(-1, (-1, 2, 4, 2)).transpose(-3, -2).flatten(-4)


def _turned(codes: Tensor, factor: Tensor, group: int) -> Tensor:
    """codes [B, H, N, D] times factor [B, H, N] -> [B, H / group, D, group N]."""
    x = (codes.float() * factor[..., None]).clamp(-E4M3_MAX, E4M3_MAX)
    x = x.unflatten(1, (-1, group)).flatten(2, 3).mT
    return permute_tokens(x).contiguous().to(torch.float8_e4m3fn)


def _unturned(x: Tensor) -> Tensor:
    return x.double().unflatten(-1, (-1, 4, 2, 2)).transpose(-3, -2).flatten(-4).mT
