"""The bit-faithful emulation of SageBwd's kernels (ops/training/kernels.py) in plain PyTorch.

The scores of all heads are in memory at once: for studies of the accuracy, not for speed.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_inductor.ops.formats import LOG2E, TINY, pad_rows
from sage_inductor.ops.formats import TRAINING_BLOCK as BLOCK
from sage_inductor.ops.reference.attention import flatness
from sage_inductor.ops.reference.exact import masked
from sage_inductor.ops.reference.quantize import divide, pad

LARGEST = 127.0


class Quantized(NamedTuple):
    codes: Tensor  # [B, H, N_pad, D_pad] INT8
    scale: Tensor  # [B, H, N_pad / shared] fp32


def quantize(x: Tensor, mean: Tensor | None = None, shared: int = BLOCK) -> Quantized:
    """x [B, H, N, D] less mean [B, H, D]; `shared` rows share a scale."""
    x = pad(x.float() if mean is None else x.float() - mean[:, :, None])
    blocks = x.unflatten(2, (-1, shared))
    codes, scale = _to_codes(blocks, (3, 4))
    return Quantized(codes.flatten(2, 3).to(torch.int8).contiguous(), scale.flatten(2).contiguous())


def _to_codes(x: Tensor, shared: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """(integers in fp32, scales, broadcast) of x: all along the dimensions `shared` have one. An
    integer is the exact product rounded once, as by the kernels' fma."""
    amax = x.abs().amax(shared, keepdim=True)
    amax = torch.where(amax < TINY, TINY, amax)
    codes = (x.double() * divide(LARGEST, amax).double()).round().float()
    return codes, torch.where(amax.isinf(), torch.nan, amax * (1 / LARGEST))


def forward(
    q: Quantized, k: Quantized, v: Quantized, shape: tuple[int, int, int], scale: float,
    is_causal: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out [B, H_q, N_q, D] in fp32 and lse [B, H_q, N_q], in log2 units. shape: N_q, N_kv, D."""
    _, N_kv, D = shape
    s = _scores(q, k, shape, scale, is_causal)
    s = F.pad(s, (0, k.codes.shape[2] - N_kv), value=-math.inf).unflatten(3, (-1, BLOCK))
    t = s.amax(4, keepdim=True)  # [B, H_q, N_q, tiles, 1]
    m = t.amax(3, keepdim=True)
    shift = torch.where(t == -math.inf, 0.0, t)
    flat = flatness(shift)
    p = torch.exp2(s * flat - shift * flat)
    weight = torch.exp2(t - m)
    l = (p.sum(4, keepdim=True) * weight).sum((3, 4))[..., None]  # [B, H_q, N_q, 1]
    codes = (p.double() * LARGEST).round().float()
    group = q.codes.shape[1] // v.codes.shape[1]
    v_scale = v.scale.repeat_interleave(group, 1)[:, :, None, :, None] * (1 / LARGEST)
    v = v.codes.float()[..., :D].repeat_interleave(group, 1).unflatten(2, (-1, BLOCK))
    o = (torch.einsum("bhntk,bhtkd->bhntd", codes, v) * (weight * v_scale)).sum(3)
    return o / l, (m.flatten(3) + l.log2())[..., 0]


def backward(
    q: Quantized, k: Quantized, v: Tensor, grad: Tensor, out: Tensor, lse: Tensor, scale: float,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq [B, H_q, N_q, D], dk and dv [B, H_kv, N_kv, D] in fp32. v and grad, in 16 bits."""
    (_, H_kv, N_kv, D), N_q = v.shape, grad.shape[2]
    group = grad.shape[1] // H_kv
    shape = N_q, N_kv, D
    p = torch.exp2(_scores(q, k, shape, scale, is_causal) - lse[..., None])
    grad, v = grad.float(), v.float().repeat_interleave(group, 1)
    delta = (grad * out.float()).sum(3, keepdim=True)
    ds = p * (grad @ v.mT - delta)
    p, ds = (_by_tiles(x) for x in (p, ds))
    of_grad = _dequantized(quantize(grad))[:, :, :N_q, :D]
    of_q = _dequantized(q)[:, :, :N_q, :D]
    of_k = _dequantized(k)[:, :, :N_kv, :D].repeat_interleave(group, 1)
    dv, dk = ((x.mT @ y).unflatten(1, (H_kv, group)).sum(2) for x, y in ((p, of_grad), (ds, of_q)))
    return scale * (ds @ of_k), scale * dk, dv


def _dequantized(x: Quantized) -> Tensor:
    return x.codes.float() * x.scale.repeat_interleave(BLOCK, 2)[..., None]


def _scores(
    q: Quantized, k: Quantized, shape: tuple[int, int, int], scale: float, is_causal: bool
) -> Tensor:
    """[B, H_q, N_q, N_kv] in log2 units, -inf where a row does not see a key."""
    N_q, N_kv, _ = shape
    group = q.codes.shape[1] // k.codes.shape[1]
    codes, k_scale = (x.repeat_interleave(group, 1) for x in k)
    s = q.codes[:, :, :N_q].float() @ codes[:, :, :N_kv].float().mT  # exact
    q_scale = q.scale.repeat_interleave(BLOCK, 2)[:, :, :N_q, None]
    k_scale = k_scale.repeat_interleave(BLOCK, 2)[:, :, None, :N_kv]
    s = s * (q_scale * k_scale * (scale * LOG2E))
    return masked(s, None, None, 0 if is_causal else None, False)


def _by_tiles(x: Tensor) -> Tensor:
    """x [B, H, N_q, N_kv] rounded: BLOCK x BLOCK numbers have a scale."""
    N_q, N_kv = x.shape[2:]
    x = F.pad(x, (0, pad_rows(N_kv) - N_kv, 0, pad_rows(N_q) - N_q))
    codes, scale = _to_codes(x.unflatten(3, (-1, BLOCK)).unflatten(2, (-1, BLOCK)), (3, 5))
    return (codes * scale).flatten(4, 5).flatten(2, 3)[:, :, :N_q, :N_kv]
