"""``sage::lse``: the row logsumexp of exact attention. SDPA computes it too, but returns it in no
public way. ``sage::with_sink``: what a learned sink makes of attention, by the logsumexp.

Shapes: B batch, H_q and H_kv heads, N_q and N_kv sequence, D head_dim (D_v of v).
"""

import itertools

import torch
from torch import Tensor

from sage_inductor.ops.reference.exact import masked
from sage_inductor.ops.register import OPAQUE, opens

MAX_SCORES = 1 << 24  # held at once, in fp32: 64 MiB


@torch.library.custom_op("sage::lse", mutates_args=())
def exact_lse(
    q: Tensor, k: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    """log sum exp of scale * q k^T + mask, a part of the rows of one head at a time.

    q [B, H_q, N_q, D], k [B, H_kv, N_kv, D], or both without B; H_q a multiple of H_kv; a B or H_kv
    of 1 is broadcast. attn_mask, is_causal and scale as SDPA's. Returns [B, H_q, N_q] (without B if
    q is), fp32, natural log, not differentiable; -inf for a row that sees no key.
    """
    if q.dim() == 3 == k.dim():
        return exact_lse(q[None], k[None], attn_mask, is_causal, scale)[0]
    if not q.dim() == k.dim() == 4:
        raise ValueError(
            f"sage::lse: q and k must have 3 or 4 dimensions, got {q.dim()}, {k.dim()}"
        )
    B = torch.broadcast_shapes(q.shape[:1], k.shape[:1])[0]
    (H, N_q, D), N_kv = q.shape[1:], k.shape[2]
    scale, group = D**-0.5 if scale is None else scale, H // k.shape[1]
    q, k = q.expand(B, -1, -1, -1), k.expand(B, -1, -1, -1)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(B, H, N_q, N_kv)
    lse = q.new_empty((B, H, N_q), dtype=torch.float32)
    rows = max(1, MAX_SCORES // max(1, B * N_kv))
    for h, first in itertools.product(range(H), range(0, N_q, rows)):
        part = slice(None), slice(h, h + 1), slice(first, first + rows)
        scores = q[part].float() @ k[:, h // group, None].float().mT * scale  # [B, 1, rows, N_kv]
        mask = None if attn_mask is None else attn_mask[part]
        scores = masked(scores, mask, None, first if is_causal else None, False)
        lse[part] = scores.logsumexp(-1)
    return lse


@exact_lse.register_fake
def _(q, k, attn_mask, is_causal, scale):
    batch = torch.broadcast_shapes(q.shape[:1], k.shape[:1]) if q.dim() == 4 else ()
    shape = *batch, *q.shape[-3:-1]
    return q.new_empty(shape, dtype=torch.float32)


exact_lse.register_autograd(
    lambda ctx, _grad: (None,) * 5,  # of no use: the output has no gradient
    setup_context=lambda ctx, inputs, output: ctx.mark_non_differentiable(output),
)
OPAQUE.add(torch.ops.sage.lse.default)


def compose_with_sink(out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """``sage::with_sink``, as calls of aten."""
    return (out * torch.sigmoid(lse[..., None] - sink)).to(out.dtype)


@torch.library.custom_op("sage::with_sink", mutates_args=())
def with_sink(out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Attention each of whose rows has one score more, of a value of 0: a learned sink.

    out [B, H_q, N_q, D_v] and lse [B, H_q, N_q] (fp32, natural log): of attention without it. sink:
    any shape that broadcasts to [B, H_q, N_q, 1]. All weights become sum_j e^s_j / (sum_j e^s_j +
    e^sink) of what they were, so this is out * sigmoid(lse - sink), of out's dtype. A backward
    raises NotImplementedError: lse has no gradient.
    """
    return compose_with_sink(out, lse, sink)


with_sink.register_fake(compose_with_sink)
opens(with_sink, compose_with_sink)


def _no_backward(ctx, _grad):
    raise NotImplementedError("sage::with_sink: attention with a learned sink has no backward")


with_sink.register_autograd(_no_backward)
