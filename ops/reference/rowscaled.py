"""The bit-faithful emulation of ``sage::rowscaled`` (ops/training) in plain PyTorch: its forward,
what its backward reads (hopper/prepare.py), and the backward (hopper/backward_kernels.py, whose
letters these are); and the tensors that op, kernels and emulation share.

The scores of all heads are in memory at once: for studies of the accuracy, not for speed. Sums of
the backward are in fp64: the tensor cores' 13 bits, added up every few blocks, are not emulated.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_inductor.ops import formats
from sage_inductor.ops.attention_call import AttentionCall
from sage_inductor.ops.formats import E4M3_MAX, LOG2E, OF_HALF, TINY
from sage_inductor.ops.recipe import ROWSCALED_FORWARD
from sage_inductor.ops.reference.attention import attention, flatness
from sage_inductor.ops.reference.exact import masked
from sage_inductor.ops.reference.quantize import divide, estimate, pad, rotate, turn_back
from sage_inductor.ops.reference.training import LARGEST, quantize
from sage_inductor.ops.visibility import FULL, Visibility


class Kept(NamedTuple):
    """What ``sage::rowscaled`` keeps for its backward, beside out. M_pad: pad_rows of N_q."""

    stats: Tensor  # [2, B, H_q, N_q] fp32: lse (natural log) and the largest score (log2 units)
    q: Tensor  # [B, H_q, M_pad, D_pad] INT8, rotated
    q_scale: Tensor  # [B, H_q, M_pad] fp32
    k: Tensor  # [B, H_kv, N_pad, D_pad] INT8, rotated, of k less its mean; causal: of k
    k_scale: Tensor  # [B, H_kv, N_pad / TRAINING_BLOCK] fp32
    k_own: Tensor  # causal: the same once more, by one scale a row; others: [.., 0, D_pad]
    k_own_scale: Tensor  # [B, H_kv, N_pad or 0] fp32
    v: Tensor  # [B, H_kv, N_pad, D_pad] INT8, of v less its mean; causal: of v
    v_scale: Tensor  # [B, H_kv, N_pad] fp32
    v_mean: Tensor  # [B, H_kv, D] fp32, estimated; causal, where none is taken off: [.., 0]

    @property
    def is_causal(self) -> bool:
        return self.k_own.shape[2] != 0


class Operands(NamedTuple):
    """What the kernels of the backward read beside Kept: training/hopper/prepare.py makes it."""

    g: Tensor  # [B, H_q, M_pad, BLOCK_D] INT8: dO
    qt: Tensor  # [B, H_kv, BLOCK_D, group M_pad] E4M3, tokens permuted; so the next two
    ot: Tensor
    kt: Tensor  # [B, H_kv, BLOCK_D, N_pad]
    kt_own: Tensor  # causal: of k_own; others: kt
    vectors: Tensor  # [3, B, H_q, M_pad] fp32: q's scale with the softmax's, m - log2 448, delta
    row_scale: Tensor  # [B, H_q, M_pad] fp32: r c^k
    v_scale: Tensor  # [B, H_kv, N_pad] fp32: vs / beta
    qt_scale: Tensor  # [B, H_kv] fp32: c^q
    ot_scale: Tensor  # c^o
    # What dQ's kernel reads for the last two of vectors, and for v_scale: causal, others.
    m: Tensor  # [B, H_q, M_pad] fp32: m - log2 448 + log2 beta_i
    delta: Tensor  # [B, H_q, M_pad] fp32: without beta
    v_scale_of_dq: Tensor  # [B, H_kv, N_pad] fp32: vs ks


def forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Kept]:
    """out [B, H_q, N_q, D] of q's dtype, contiguous, and what the backward reads."""
    smoothed = k.float()
    if is_causal:
        v_mean = k.new_empty((*k.shape[:2], 0), dtype=torch.float32)
    else:
        k_mean, v_mean = (estimate(x, shrink=False)[0] for x in (k, v))
        smoothed = smoothed - k_mean[:, :, None]
    of_k = rotate(0.5 * pad(smoothed), k)
    of_q = rotate(pad(q), q)
    of_own = quantize(of_k[:, :, : of_k.shape[2] if is_causal else 0], shared=1)
    of_v = quantize(v, None if is_causal else v_mean, shared=1)
    none = k.new_empty(0, dtype=torch.float32)
    kept = Kept(none, *quantize(of_q, shared=1), *quantize(of_k), *of_own, *of_v, v_mean)
    out, stats = attend(q, v, kept, scale)
    return out, kept._replace(stats=stats)


def attend(q: Tensor, v: Tensor, kept: Kept, scale: float) -> tuple[Tensor, Tensor]:
    """out [B, H_q, N_q, D] and stats of q's and k's codes."""
    k, k_scale, n_kv = kept.k, kept.k_scale[..., None], v.shape[2]
    visibility, of_v = Visibility(), v
    if kept.is_causal:  # each key twice, of which a query sees one or none
        N_pad = kept.k.shape[2]
        near = _is_near(q.shape[2], N_pad, q.device)
        seen = torch.ones_like(near).tril()
        mask = torch.cat((seen & ~near, seen & near), 1)
        scales = torch.cat((_of_rows(kept.k_scale, k), kept.k_own_scale), 2)
        k, k_scale = torch.cat((k, kept.k_own), 2), scales.unflatten(2, (-1, formats.K_BLOCK))
        visibility, n_kv = Visibility.of(mask, FULL, 2 * N_pad, 64), 2 * N_pad
        of_v = pad(v, channels=False).repeat(1, 1, 2, 1)
    recipe = ROWSCALED_FORWARD.encode()
    a = AttentionCall(q, k, k_scale, of_v, scale, n_kv, recipe, False, *visibility[:2])
    out, lse = attention(a)
    x = _exponents(kept, kept.q_scale * (a.scale_of_codes * LOG2E), _is_near)
    return out.contiguous(), torch.stack((lse, x[:, :, : q.shape[2], : v.shape[2]].amax(3)))


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
        o = o - kept.v_mean.repeat_interleave(group, 1)[:, :, None]
    o = pad(o)
    u, o_norm = g.square().sum(3).sqrt(), o.square().sum(3).sqrt()
    lse, m = kept.stats
    wa = pad_places(torch.exp2(m - lse * LOG2E)) * a
    v_norm = kept.v.float().square().sum(3).sqrt() * kept.v_scale
    largest, largest_q = least(of_head(wa)), least(of_head(wa * kept.q_scale))
    to_fp8, c = E4M3_MAX / LARGEST, LARGEST / E4M3_MAX**2
    k_scale = _of_rows(kept.k_scale, kept.k)
    delta = (g * o).sum(3)
    flat = flatness(m)
    m = pad_places(m * flat - math.log2(E4M3_MAX), formats.NO_QUERY)
    if kept.is_causal:

        def so_far(x: Tensor) -> Tensor:
            """The largest x of the keys that a query sees: [B, H_kv, N_pad] -> [B, H_q, M_pad]."""
            return x.cummax(2).values.repeat_interleave(group, 1)

        beta = least(of_head(u * so_far(v_norm) + u * o_norm))
        largest_v = (v_norm * kept.k_own_scale).unflatten(2, (-1, formats.TRAINING_BLOCK))
        of_block = v_norm.unflatten(2, (-1, formats.TRAINING_BLOCK)).amax(3) * kept.k_scale
        largest_v[..., -1] = of_block  # its last row sees all of a block
        of_row = u * so_far(largest_v.flatten(2)) + u * o_norm * so_far(kept.k_own_scale)
        of_row = least(of_row)
        row_scale = wa * (of_row * (OF_HALF * scale / E4M3_MAX / to_fp8))
        kt = _turned(turn_back(kept.k), torch.full_like(k_scale, to_fp8), 1)
        kt_own = _turned(turn_back(kept.k_own), torch.full_like(k_scale, to_fp8), 1)
        of_dq = m + of_row.log2(), delta, kept.v_scale * k_scale
    else:
        u, un = (torch.where(x.isnan(), 0.0, x) for x in (u, u * o_norm))
        beta = least(of_head(u) * v_norm.amax(2) + of_head(un))
        largest_k = kept.k_scale.amax(2)
        row_scale = wa * to_heads(beta * (OF_HALF * scale / E4M3_MAX) * (largest_k / to_fp8))
        kt = kt_own = _turned(turn_back(kept.k), k_scale * (to_fp8 / largest_k)[:, :, None], 1)
        of_dq = None
    softmax_scale = scale * formats.rotation_scale(kept.q.shape[3]) * LOG2E
    of_x = kept.q_scale[:, :, :N_q] * softmax_scale * flat
    vectors = torch.stack((pad_places(of_x), m, delta / to_heads(beta)))
    qt = _turned(turn_back(kept.q), wa * kept.q_scale * (to_fp8 / to_heads(largest_q)), group)
    ot = _turned(g8, wa * (to_fp8 / to_heads(largest)), group)
    scales = kept.v_scale / beta[:, :, None], largest_q * (c * scale * beta), largest * c
    of_dq = of_dq or (*vectors[1:], scales[0])
    return Operands(g8, qt, ot, kt, kt_own, vectors, row_scale, *scales, *of_dq)


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

    m, delta = (y[..., None] for y in x.vectors[1:])
    dp = _scores(x.g, kept.v)
    p = torch.exp2(_exponents(kept, x.vectors[0], _is_of_the_same_tile) - m)
    ds = e4m3(p * (dp * to_queries(x.v_scale) - delta))
    qt, ot, kt, kt_own = (_unturned(y) for y in (x.qt, x.ot, x.kt, x.kt_own))
    kt, kt_own = (y.repeat_interleave(group, 1) for y in (kt, kt_own))
    if kept.is_causal:
        is_near, delta = _is_near(*p.shape[2:], p.device), x.delta[..., None]
        of_dq = torch.exp2(_exponents(kept, x.vectors[0], _is_near) - x.m[..., None])
        k_scale = to_queries(_of_rows(kept.k_scale, kept.k))
        far = e4m3(of_dq * (dp * to_queries(x.v_scale_of_dq) - delta * k_scale))
        of_dq = of_dq * to_queries(kept.k_own_scale)
        near = e4m3(of_dq * (dp * to_queries(kept.v_scale) - delta))
        seen = torch.ones_like(is_near).tril()  # of others nothing is computed, no NaN either
        far, near = (
            torch.where(x, y, 0.0) for x, y in ((seen & ~is_near, far), (seen & is_near, near))
        )
        dq = far @ kt + near @ kt_own
    else:
        dq = ds @ kt
    dq, p = dq * x.row_scale.double()[..., None], e4m3(p)
    of_q, of_o = (y.double()[..., None, None] for y in (x.qt_scale, x.ot_scale))
    ds, p = (y.unflatten(1, (H_kv, group)).flatten(2, 3) for y in (ds, p))  # one head of more rows
    dk, dv = ds.mT @ qt * of_q, p.mT @ ot * of_o
    return dq[:, :, :n_q, :head_dim], dk[:, :, :n_kv, :head_dim], dv[:, :, :n_kv, :head_dim]


def _is_near(n_q: int, n_kv: int, device) -> Tensor:
    """[n_q, n_kv], causal: whether the forward and dQ's kernel, with tiles of 192 rows, read k_own
    of a key that a row sees."""
    first = torch.arange(n_q, device=device)[:, None] // 192 * 192
    return torch.arange(n_kv, device=device) >= first // 128 * 128


def _is_of_the_same_tile(n_q: int, n_kv: int, device) -> Tensor:
    """As `_is_near`, of dK's and dV's kernel, whose tiles have 128."""
    i, j = (torch.arange(n, device=device) // 128 for n in (n_q, n_kv))
    return i[:, None] == j


def _exponents(kept: Kept, q_scale: Tensor, is_near: Callable) -> Tensor:
    """[B, H_q, M_pad, N_pad] of q_scale [B, H_q, M_pad], which has the softmax's; causal, -inf
    where a row does not see a key."""
    group = kept.q.shape[1] // kept.k.shape[1]

    def of(codes: Tensor, scale: Tensor) -> Tensor:
        return _scores(kept.q, codes) * (
            q_scale[..., None] * scale.repeat_interleave(group, 1)[:, :, None]
        )

    x = of(kept.k, _of_rows(kept.k_scale, kept.k))
    if not kept.is_causal:
        return x
    x = torch.where(is_near(*x.shape[2:], x.device), of(kept.k_own, kept.k_own_scale), x)
    return masked(x, None, None, 0, False)


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
