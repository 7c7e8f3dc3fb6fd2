"""What the kernels read, in plain torch, and what they compute, in float64.

Tensors are [H, N, D] (heads of one batch). See ops/training/hopper/kernel.py for the formulas."""

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor

from sage_inductor.ops.formats import E4M3_MAX as FP8_MAX
from sage_inductor.ops.formats import LOG2E, NO_QUERY, TINY
from sage_inductor.ops.reference import training_rowscaled as reference
from sage_inductor.ops.reference.training_rowscaled import permute_tokens, unpermute_tokens

E4M3 = torch.float8_e4m3fn


@dataclasses.dataclass
class Inputs:
    N: int
    pad: int  # rows of q, k and their kin, per head
    q8: Tensor  # [H, pad, D] int8
    g8: Tensor
    k8: Tensor
    v8: Tensor
    kt: Tensor  # [H, D, pad] e4m3, tokens permuted
    qt: Tensor
    ot: Tensor
    vectors: Tensor  # [3, H, pad] fp32: q_scale, m - log2 448, delta
    row_scale: Tensor  # [H, pad], with kt's scale in it
    k_scale: Tensor  # [H, pad / 64]
    v_scale: Tensor  # [H, pad]
    qt_scale: Tensor  # [H]
    ot_scale: Tensor

    def batched(self) -> reference.Inputs:
        """As the kernels take them: [1, H, ...]."""
        plain = (self.q8, self.g8, self.k8, self.v8, self.qt, self.ot, self.kt)
        rows = (self.row_scale, self.k_scale, self.v_scale, self.qt_scale, self.ot_scale)
        batched = [x[None] for x in (*plain, *rows)]
        return reference.Inputs(*batched[:7], self.vectors[:, None], *batched[7:])


class Forward(NamedTuple):
    """What the forward on the codes leaves."""

    o: Tensor  # [H, N, D] 16-bit
    m: Tensor  # [H, N] fp32: max_j x_ij
    w: Tensor  # [H, N] fp32: 1 / sum_j 2^(x_ij - m_i)


def _pad(x: Tensor, pad: int, value=0.0) -> Tensor:
    """Rows of [H, N, D], places of [H, N]."""
    new = x.new_full((x.shape[0], pad, *x.shape[2:]), value)
    new[:, : x.shape[1]] = x
    return new


def _int8(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).round().clamp(-127, 127).to(torch.int8)


def _transposed(x: Tensor, pad: int) -> tuple[Tensor, Tensor]:
    """[H, N, D] -> e4m3 [H, D, pad], tokens permuted, and a scale a head."""
    scale = x.abs().amax((1, 2)).clamp(min=TINY) / FP8_MAX
    codes = (_pad(x, pad) / scale[:, None, None]).clamp(-FP8_MAX, FP8_MAX).mT
    return permute_tokens(codes).contiguous().to(E4M3), scale


def _rows(q, k, sm):
    """INT8 codes and scales of q and of k, whose mean is off."""
    q_scale = q.abs().amax(2).clamp(min=TINY) / 127
    k_scale = _pad(k, -(-k.shape[1] // 256) * 256).unflatten(1, (-1, 64)).abs().amax((2, 3))
    k_scale = k_scale.clamp(min=TINY) / 127
    k8 = _int8(_pad(k, k_scale.shape[1] * 64), k_scale.repeat_interleave(64, 1)[..., None])
    return _int8(q, q_scale[..., None]), q_scale * (sm * LOG2E), k8, k_scale


def forward(q, k, v, softmax_scale=None, chunk=4096) -> Forward:
    H, N, D = q.shape
    sm = D**-0.5 if softmax_scale is None else softmax_scale
    q, k, v = (x.float() for x in (q, k, v))
    q8, q_scale, k8, k_scale = _rows(q, k - k.mean(1, keepdim=True), sm)
    m, w, o = (torch.empty_like(t) for t in (q_scale, q_scale, q))
    columns = k_scale.repeat_interleave(64, 1)[:, None, :N]
    for h in range(H):
        for i in range(0, N, chunk):
            rows = slice(i, min(i + chunk, N))
            s = scores(q8[h, rows], k8[h, :N])
            x = s * (q_scale[h, rows, None] * columns[h])
            m[h, rows] = x.amax(1)
            p = torch.exp2(x - m[h, rows, None])
            total = p.sum(1)
            w[h, rows] = 1 / total
            o[h, rows] = (p @ v[h]) / total[:, None]
    return Forward(o.to(torch.bfloat16), m, w)


def prepare(q, k, v, do, of_forward: Forward | None = None, softmax_scale=None) -> Inputs:
    H, N, D = q.shape
    pad = -(-N // 256) * 256
    sm = D**-0.5 if softmax_scale is None else softmax_scale
    o, m, w = of_forward or forward(q, k, v, sm)
    q, k, v, do, o = (x.float() for x in (q, k, v, do, o))
    k = k - k.mean(1, keepdim=True)
    q8, q_scale, k8, k_scale = _rows(q, k, sm)
    v_mean = v.mean(1, keepdim=True)
    vs = v - v_mean
    v_scale = vs.abs().amax(2).clamp(min=TINY) / 127
    v8 = _int8(vs, v_scale[..., None])
    a = do.abs().amax(2).clamp(min=TINY) / 127
    g8 = _int8(do, a[..., None])
    delta = (do * (o - v_mean)).sum(2) / a
    bound = vs.norm(dim=2).amax(1)[:, None] + (o - v_mean).norm(dim=2)
    beta = (do.norm(dim=2) * bound / a).amax(1)[:, None].clamp(min=TINY)  # one a head
    row_scale = sm * w * a * beta / FP8_MAX
    kt, kt_scale = _transposed(k, pad)
    qt, qt_scale = _transposed(q * row_scale[..., None], pad)
    ot, ot_scale = _transposed(do * (w / FP8_MAX)[..., None], pad)
    vectors = torch.stack(
        (_pad(q_scale, pad), _pad(m - math.log2(FP8_MAX), pad, NO_QUERY), _pad(delta / beta, pad))
    )
    return Inputs(
        N, pad, _pad(q8, pad), _pad(g8, pad), k8, _pad(v8, pad), kt, qt, ot, vectors,
        _pad(row_scale * kt_scale[:, None], pad), k_scale, _pad(v_scale / beta, pad),
        qt_scale, ot_scale,
    )  # fmt: skip


def scores(a8: Tensor, b8: Tensor) -> Tensor:
    """a8 b8^T, exact, in fp32 (below 2^24)."""
    if a8.is_cuda and a8.shape[0] > 16 and b8.shape[0] % 8 == 0:
        return torch._int_mm(a8, b8.mT).float()
    return (a8.double() @ b8.double().mT).float()


def emulate(x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV with the kernels' rounding, sums in float64."""

    def f8(y):
        return y.clamp(-FP8_MAX, FP8_MAX).to(E4M3).double()

    dq, dk, dv = [], [], []
    for h in range(x.q8.shape[0]):
        q_scale, m, delta = (y[h, :, None].double() for y in x.vectors)
        c = (x.vectors[0, h, :, None] * x.k_scale[h].repeat_interleave(64)[None]).double()
        s = x.q8[h].double() @ x.k8[h].double().mT
        p = torch.exp2((s * c - m).float()).double()
        d = x.g8[h].double() @ x.v8[h].double().mT
        ds = (p * (d * x.v_scale[h][None].double() - delta).float().double()).float()
        ds, p = f8(ds), f8(p.float())
        kt, qt, ot = (unpermute_tokens(y[h].double()).mT for y in (x.kt, x.qt, x.ot))
        dq.append((ds @ kt) * x.row_scale[h].double()[:, None])
        dk.append(ds.mT @ qt * x.qt_scale[h].double())
        dv.append(p.mT @ ot * x.ot_scale[h].double())
    return tuple(torch.stack(y)[:, : x.N] for y in (dq, dk, dv))


def exact(q, k, v, do) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, do = (x.double() for x in (q, k, v, do))
    scale = q.shape[-1] ** -0.5
    p = torch.softmax(scale * (q @ k.mT), -1)
    dp = do @ v.mT
    ds = p * (dp - (p * dp).sum(-1, keepdim=True))
    return scale * ds @ k, scale * ds.mT @ q, p.mT @ do


def l1(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b).abs().sum() / b.abs().sum()).item()


def draw(H, N, D, kind="normal", device="cpu", seed=0):
    g = torch.Generator(device=device).manual_seed(seed)

    def randn(*s):
        return torch.randn(*s, generator=g, device=device)

    q, k, v, do = (randn(H, N, D) for _ in range(4))
    if kind == "biased":  # channel biases of q, k and v, gradients that vary by token
        q, k, v = (x + n * randn(H, 1, D) for x, n in ((q, 0.5), (k, 2), (v, 2)))
        do = do * torch.exp(1.5 * randn(H, N, 1)) + randn(H, 1, D)
    return tuple(x.to(torch.bfloat16) for x in (q, k, v, do))
