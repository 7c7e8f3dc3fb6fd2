"""``sage::rowscaled``, the FP8 backward: attention that trains, whose backward multiplies in INT8
and FP8 and whose scales are known before its loops.

    k_mean, v_mean         = estimate(k, v)
    q', k'                 = rotate(q), rotate((k - k_mean) / 2)        quantize/rotate.py
    codes                  = quantize(q' a row, k' 64 rows, v - v_mean a row)         a scale each
    out, lse, m            = forward(q, k codes, v in 16 bits)
    dq, dk, dv             = backward(grad, out, lse, m, codes)

The forward is recipe "sage1-rotated": INT8 q k, 16-bit p v. hopper/backward_kernels.py has the
backward's formulas. What k and v are smoothed by takes nothing off a gradient: a row of dS sums to
0.

Strong channels of k cost scores accuracy if q and k are not rotated, and dQ if k is: so the scores
are of rotated codes, and dQ and dK of the same codes turned back, which no kept tensor is for
(hopper/prepare.py).

Saved for backward: the output (2 bytes) and codes of q, k and v (3 bytes; causal 4) per token and
channel, where 16-bit attention saves 8.

Causal, of as many queries as keys: means and beta would be of later rows, too, and so would the
scale of 64 rows of k to the rows among them. So no mean is taken off, k has codes by one scale a
row as well, which kernels read near the diagonal, and dQ's bounds are of what a row sees
(hopper/backward_kernels.py). o, lse and dQ of a row depend on rows up to it alone, bit for bit, and
dK and dV on no later row whose dO is 0.

Shapes: B batch, H_q and H_kv heads, N_q and N_kv sequence, D head_dim; M_pad, N_pad and D_pad as in
hopper/prepare.py.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from sage_inductor.ops.attention_call import as_stored, empty_outputs, empty_stored
from sage_inductor.ops.formats import TRAINING_BLOCK
from sage_inductor.ops.launch import run
from sage_inductor.ops.reference import rowscaled as reference
from sage_inductor.ops.reference.rowscaled import Kept
from sage_inductor.ops.training.gradients import check_trained, register_gradient
from sage_inductor.ops.training.kernels import empty_codes

Outputs = tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]  # out and Kept


@torch.library.custom_op("sage::rowscaled", mutates_args=())
def rowscaled(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, out_bnhd: bool
) -> Outputs:
    """softmax(scale * q k^T) v, to be differentiated.

    q [B, H_q, N_q, D], k and v [B, H_kv, N_kv, D] of one dtype (fp16, bf16; fp32 on CPU), any
    strides; D up to 128; H_q a multiple of H_kv; scale more than 0. is_causal: N_q = N_kv, and row
    i sees keys 0 to i. out_bnhd: out and dq are stored in [B, N, H, D] order, and dk and dv. On a
    GPU of compute capability 9.0, or emulated on CPU.

    Returns out [B, H_q, N_q, D] and, not differentiable, what the backward reads: `Kept`'s. Raises
    ValueError or TypeError saying what must hold and what was got.
    """
    _check(q, k, v, is_causal, scale)
    if q.device.type == "cpu":
        out, kept = reference.forward(q, k, v, is_causal, scale)
        return as_stored(out.to(q.dtype), out_bnhd), *kept
    return _launch(run, q.device, q, k, v, is_causal, scale, out_bnhd)


@torch.library.custom_op("sage::rowscaled_backward", mutates_args=())
def rowscaled_backward(
    grad: Tensor, out: Tensor, stats: Tensor, q: Tensor, q_scale: Tensor, k: Tensor,
    k_scale: Tensor, k_own: Tensor, k_own_scale: Tensor, v: Tensor, v_scale: Tensor, v_mean: Tensor,
    n_kv: int, scale: float, out_bnhd: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv of `rowscaled`, of out's dtype. grad [B, H_q, N_q, D]: of out, any strides;
    n_kv: keys without padding; the rest: what `rowscaled` was given and gave."""
    kept = Kept(stats, q, q_scale, k, k_scale, k_own, k_own_scale, v, v_scale, v_mean)
    if out.device.type == "cpu":
        found = reference.backward(grad, out, kept, n_kv, scale)
        return tuple(as_stored(x.to(out.dtype), out_bnhd) for x in found)
    return _launch_backward(run, out.device, grad, out, *kept, n_kv, scale, out_bnhd)


def _launch(run: Callable, gpu, *given) -> tuple[Tensor, ...]:
    from sage_inductor.ops.training.hopper import launches  # imports Gluon, which may be missing

    return launches.launch(run, gpu, *given)


def _launch_backward(run: Callable, _gpu, grad: Tensor, out: Tensor, *given) -> tuple[Tensor, ...]:
    from sage_inductor.ops.training.hopper import launches

    *kept, n_kv, scale, out_bnhd = given
    kept = Kept(*kept)
    gradients = _empty_gradients(out, kept.k, n_kv, out_bnhd)
    launches.launch_backward(grad, out, kept, scale, *gradients, run)
    return gradients


def _check(q, k, v, is_causal, scale) -> None:
    check_trained("rowscaled", q, k, v, scale)
    if is_causal and q.shape[2] != k.shape[2]:
        raise ValueError(
            "sage::rowscaled: causal, q and k must have as many rows, got "
            f"{q.shape[2]} and {k.shape[2]}"
        )
    if scale <= 0:
        raise ValueError(f"sage::rowscaled: scale must be more than 0, got {scale}")
    if q.device.type != "cpu" and q.dtype == torch.float32:
        raise TypeError(f"sage::rowscaled: on a GPU q must have 16 bits, got {q.dtype}")


def _empty_gradients(out, k, n_kv, out_bnhd) -> tuple[Tensor, Tensor, Tensor]:
    shapes = out.shape, *[(*k.shape[:2], n_kv, out.shape[3])] * 2
    return tuple(empty_stored(out, shape, out_bnhd) for shape in shapes)


@rowscaled.register_fake
def _(q, k, v, is_causal, scale, out_bnhd):
    _check(q, k, v, is_causal, scale)
    out, lse = empty_outputs(q, v.shape[3], out_bnhd)
    of_k = *empty_codes(k, TRAINING_BLOCK), *empty_codes(k, 1, exists=is_causal)
    of = *empty_codes(q, 1), *of_k, *empty_codes(v, 1)
    B, H_kv, _, D = v.shape
    v_mean = lse.new_empty((B, H_kv, 0 if is_causal else D))
    return out, *Kept(lse.new_empty((2, *lse.shape)), *of, v_mean)


@rowscaled_backward.register_fake
def _(grad, out, *given):
    *kept, n_kv, _, out_bnhd = given
    return _empty_gradients(out, Kept(*kept).k, n_kv, out_bnhd)


def _keep(q, k, v, is_causal, scale, out_bnhd):
    return (), (k.shape[2], scale, out_bnhd)


register_gradient("rowscaled", rowscaled, rowscaled_backward, _keep, _launch, _launch_backward)
