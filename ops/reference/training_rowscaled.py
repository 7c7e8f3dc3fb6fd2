"""The oracle of the row-scaled FP8 backward (ops/training/hopper/kernel.py, which has its formulas)
in plain PyTorch.

`quantize`, `forward`, `prepare` and `emulate` follow each other. The scores of all heads are in
memory at once, in float64: for tests and studies of the accuracy, not for speed.

Shapes: B batch, H_q and H_kv heads, N_q and N_kv sequence, D head_dim; Q_pad and K_pad are N_q and
N_kv rounded up to PAD_N, D_pad: formats.py. A group: the query heads that share a head of k and v.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_inductor.ops.formats import E4M3_MAX, K_BLOCK, LOG2E, NO_QUERY, TINY
from sage_inductor.ops.reference.quantize import pad
from sage_inductor.ops.reference.training import LARGEST, to_codes


class Codes(NamedTuple):
    """What is kept of q, k and v. Padding is 0."""

    q: Tensor  # [B, H_q, Q_pad, D_pad] INT8
    q_scale: Tensor  # [B, H_q, Q_pad] fp32, with softmax scale and log2 e
    k: Tensor  # [B, H_kv, K_pad, D_pad] INT8, of k less its mean
    k_scale: Tensor  # [B, H_kv, K_pad / K_BLOCK] fp32
    v: Tensor  # [B, H_kv, K_pad, D_pad] INT8, of v less its mean
    v_scale: Tensor  # [B, H_kv, K_pad] fp32
    v_mean: Tensor  # [B, H_kv, D] fp32


class Forward(NamedTuple):
    """What the forward on the codes leaves."""

    o: Tensor  # [B, H_q, N_q, D] in q's dtype
    m: Tensor  # [B, H_q, N_q] fp32: max_j x_ij
    l: Tensor  # [B, H_q, N_q] fp32: sum_j 2^(x_ij - m_i)


class Inputs(NamedTuple):
    """What the kernels read. Contiguous."""

    q: Tensor  # [B, H_q, Q_pad, D_pad] INT8
    g: Tensor  # the same, of dO
    k: Tensor  # [B, H_kv, K_pad, D_pad] INT8
    v: Tensor
    qt: Tensor  # [B, H_kv, D_pad, H_q / H_kv * Q_pad] E4M3, tokens permuted
    ot: Tensor
    kt: Tensor  # [B, H_kv, D_pad, K_pad] E4M3, tokens permuted
    vectors: Tensor  # [3, B, H_q, Q_pad] fp32: q_scale, m - log2 448, delta
    row_scale: Tensor  # [B, H_q, Q_pad] fp32
    k_scale: Tensor  # [B, H_kv, K_pad / K_BLOCK] fp32
    v_scale: Tensor  # [B, H_kv, K_pad] fp32
    qt_scale: Tensor  # [B, H_kv] fp32
    ot_scale: Tensor


def quantize(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Codes:
    """Of q [B, H_q, N_q, D], k and v [B, H_kv, N_kv, D]; scale: the softmax's, of any sign."""
    q, k, v = (x.float() for x in (q, k, v))
    v_mean = v.mean(2)
    q8, q_scale = _rows(-q if scale < 0 else q)
    v8, v_scale = _rows(v - v_mean[:, :, None])
    blocks = pad(k - k.mean(2, keepdim=True)).unflatten(2, (-1, K_BLOCK))
    k8, k_scale = to_codes(blocks, (3, 4))
    k8 = k8.flatten(2, 3).to(torch.int8)
    q_scale = q_scale * (abs(scale) * LOG2E)
    return Codes(q8, q_scale, k8, k_scale.flatten(2), v8, v_scale, v_mean)


def forward(codes: Codes, v: Tensor, N_q: int) -> Forward:
    """v [B, H_kv, N_kv, D] as it came; p v is exact."""
    B, H_kv, N_kv, D = v.shape
    x = _exponents(codes)[..., :N_q, :N_kv].float()  # [B, H_kv, group, N_q, N_kv]
    m = x.amax(4)
    p = torch.exp2(x - m[..., None])
    l = p.sum(4)
    o = p @ v.float()[:, :, None] / l[..., None]
    return Forward(*(each.flatten(1, 2) for each in (o.to(v.dtype), m, l)))


def prepare(codes: Codes, found: Forward, do: Tensor, scale: float) -> Inputs:
    """Of dO [B, H_q, N_q, D]; scale: the softmax's."""
    o, m, l = found
    group, do, w = do.shape[1] // codes.k.shape[1], do.float(), 1 / l
    v_mean = codes.v_mean.repeat_interleave(group, 1)[:, :, None]
    v = codes.v.float() * codes.v_scale[..., None]
    g, a = _rows(do)
    a = a[..., : do.shape[2]]
    delta = (do * (o.float() - v_mean)).sum(3) / a
    # One bound of |dP - delta| / a a group.
    most = v.norm(dim=3).amax(2, keepdim=True).repeat_interleave(group, 1)
    bound = do.norm(dim=3) / a * (most + (o.float() - v_mean).norm(dim=3))
    beta = _of_group(bound, group)  # [B, H_kv]
    beta_q = beta.repeat_interleave(group, 1)[..., None]

    k_rows = codes.k_scale.repeat_interleave(K_BLOCK, 2)
    kt, kt_scale = _transposed(codes.k, k_rows, 1)
    qt, qt_scale = _transposed(codes.q, _pad_rows(w * a) * codes.q_scale, group)
    ot, ot_scale = _transposed(g, _pad_rows(w * a), group)
    of_k = kt_scale.repeat_interleave(group, 1)[..., None]
    vectors = codes.q_scale, _pad_rows(m - math.log2(E4M3_MAX), NO_QUERY), _pad_rows(delta / beta_q)
    return Inputs(
        codes.q, g, codes.k, codes.v, qt, ot, kt,
        torch.stack(vectors),
        _pad_rows(w * a * (beta_q * (scale / E4M3_MAX)) * of_k),
        codes.k_scale,
        codes.v_scale / beta[..., None],
        qt_scale * (beta * (1 / (LOG2E * E4M3_MAX))),
        ot_scale * (1 / E4M3_MAX),
    )  # fmt: skip


def emulate(x: Inputs, N_q: int, N_kv: int, D: int) -> tuple[Tensor, Tensor, Tensor]:
    """dQ [B, H_q, N_q, D], dK and dV [B, H_kv, N_kv, D] by the kernels' rounding, in float64."""
    H_kv = x.k.shape[1]

    def by_group(t: Tensor) -> Tensor:
        return t.unflatten(1, (H_kv, -1)).double()

    def f8(t: Tensor) -> Tensor:
        return t.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).double()

    m, delta = (by_group(t)[..., None] for t in x.vectors[1:])
    codes = Codes(x.q, x.vectors[0], x.k, x.k_scale, x.v, x.v_scale, x.v_scale)
    p = torch.exp2((_exponents(codes) - m).float())  # [B, H_kv, group, Q_pad, K_pad]
    d = by_group(x.g) @ x.v.double()[:, :, None].mT
    ds = p * (d * x.v_scale.double()[:, :, None, None] - delta).float()
    p, ds = f8(p), f8(ds)
    kt, qt, ot = (unpermute_tokens(t.double()).mT for t in (x.kt, x.qt, x.ot))
    dq = (ds @ kt[:, :, None] * by_group(x.row_scale)[..., None]).flatten(1, 2)
    dk = ds.flatten(2, 3).mT @ qt * x.qt_scale.double()[..., None, None]
    dv = p.flatten(2, 3).mT @ ot * x.ot_scale.double()[..., None, None]
    return dq[:, :, :N_q, :D], dk[:, :, :N_kv, :D], dv[:, :, :N_kv, :D]


def permute_tokens(x: Tensor) -> Tensor:
    """[..., N]: place 4t + 2h + e of 16 gets token 8h + 2t + e."""
    return x.unflatten(-1, (-1, 2, 4, 2)).transpose(-3, -2).flatten(-4)


def unpermute_tokens(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, 4, 2, 2)).transpose(-3, -2).flatten(-4)


def _exponents(x: Codes) -> Tensor:
    """x_ij [B, H_kv, group, Q_pad, K_pad] in float64: integers times the scales' fp32 product."""
    H_kv = x.k.shape[1]
    scale = x.q_scale.unflatten(1, (H_kv, -1))[..., None]
    scale = scale * x.k_scale.repeat_interleave(K_BLOCK, 2)[:, :, None, None]
    s = x.q.unflatten(1, (H_kv, -1)).double() @ x.k.double()[:, :, None].mT
    return s * scale.double()


def _rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [B, H, N, D] -> INT8 codes [B, H, N_pad, D_pad], and a scale a row [B, H, N_pad], 0 of rows
    that are not there."""
    codes, scale = to_codes(x, (3,))
    return pad(codes).to(torch.int8), _pad_rows(scale[..., 0])


def _pad_rows(x: Tensor, value: float = 0.0) -> Tensor:
    """[B, H, N] -> [B, H, N_pad]."""
    rows = pad(x[..., None], channels=False).shape[2] - x.shape[2]
    return F.pad(x, (0, rows), value=value)


def _of_group(x: Tensor, group: int) -> Tensor:
    """The largest of rows of the heads of a group: [B, H_q, N] -> [B, H_kv]."""
    return x.unflatten(1, (-1, group)).amax((2, 3)).clamp(min=TINY)


def _transposed(codes: Tensor, scale: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """INT8 codes [B, H, N_pad, D_pad] times scale [B, H, N_pad] -> E4M3 codes [B, H / group, D_pad,
    group * N_pad], tokens permuted, and their scale [B, H / group]."""
    amax = _of_group(scale, group)
    factor = scale.unflatten(1, (-1, group)) / amax[..., None, None] * (E4M3_MAX / LARGEST)
    x = codes.unflatten(1, (-1, group)).float() * factor[..., None]
    x = permute_tokens(x.flatten(2, 3).mT).contiguous()
    return x.to(torch.float8_e4m3fn), amax * (LARGEST / E4M3_MAX)
