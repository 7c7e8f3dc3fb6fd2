"""``sage::sagebwd``: attention that trains by SageBwd's recipe, INT8 forward and backward.

    k_mean                 = smooth(k)
    q, k, v                = quantize(q), quantize(k - k_mean), quantize(v)
    out, lse               = forward(q, k, v)
    delta, grad            = sum of grad out over D, quantize(grad)
    dq, dk, dv             = backward(q, k, v in 16 bits, grad in 16 and 8 bits, lse, delta)

What k is smoothed by takes nothing off a gradient: a row of dS sums to 0. Kept for the backward
are the codes of q and k, v as it came, out and lse: 6 bytes for each channel and token, of which 2
are v's.

With causal attention k's mean and the scales of 64 rows depend on later rows, too: an output or a
gradient of an earlier row is not bit for bit the same where later ones change.

Shapes: B batch, H_q and H_kv heads, N_q and N_kv sequence, D head_dim.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from sage_inductor.ops.attention_call import as_stored, empty_outputs, empty_stored
from sage_inductor.ops.formats import TRAINING_BLOCK
from sage_inductor.ops.launch import run
from sage_inductor.ops.quantize.smooth import launch_smooth
from sage_inductor.ops.reference import quantize
from sage_inductor.ops.reference import training as reference
from sage_inductor.ops.training import kernels
from sage_inductor.ops.training.gradients import check_trained, register_gradient

Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op("sage::sagebwd", mutates_args=())
def sagebwd(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, out_bnhd: bool
) -> Saved:
    """softmax(scale * q k^T) v in INT8, to be differentiated.

    q [B, H_q, N_q, D], k and v [B, H_kv, N_kv, D] of one dtype (fp16, bf16, fp32), any strides; D
    up to 128; H_q a multiple of H_kv. is_causal: query i sees keys 0 to i. out_bnhd: out and dq are
    stored in [B, N, H, D] order, and dk and dv.

    Returns out [B, H_q, N_q, D] and, not differentiable, what the backward reads: lse [B, H_q, N_q]
    of the codes (log2, fp32), the codes [B, H, N_pad, D_pad] and scales [B, H, N_pad / 64] of q
    and of k. Raises ValueError or TypeError saying what must hold and what was got.
    """
    check_trained("sagebwd", q, k, v, scale)
    if q.device.type == "cpu":
        k_mean = quantize.smooth(k)[0]
        of_q, of_v = reference.quantize(q), reference.quantize(v)
        of_k = reference.quantize(k, k_mean)
        shape = q.shape[2], k.shape[2], q.shape[3]
        exactly, lse = reference.forward(of_q, of_k, of_v, shape, scale, is_causal)
        return as_stored(exactly.to(q.dtype), out_bnhd), lse, *of_q, *of_k
    return _launch(run, q.device, q, k, v, is_causal, scale, out_bnhd)


def _launch(run: Callable, gpu, q, k, v, is_causal: bool, scale: float, out_bnhd: bool) -> Saved:
    out, lse = empty_outputs(q, v.shape[3], out_bnhd)
    k_mean = launch_smooth([k], None, 1, run)[0]
    of_q = kernels.launch_quantize(q, run=run)[:2]
    of_k = kernels.launch_quantize(k, k_mean, run=run)[:2]
    of_v = kernels.launch_quantize(v, turned=True, run=run)[:2]
    of_qkv = *of_q, *of_k, *of_v
    kernels.launch_forward(*of_qkv, k.shape[2], scale, is_causal, out, lse, run, gpu)
    return out, lse, *of_q, *of_k


@torch.library.custom_op("sage::sagebwd_backward", mutates_args=())
def sagebwd_backward(
    grad: Tensor, v: Tensor, out: Tensor, lse: Tensor, q_codes: Tensor, q_scale: Tensor,
    k_codes: Tensor, k_scale: Tensor, is_causal: bool, scale: float, out_bnhd: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv of `sagebwd`, of v's dtype. grad [B, H_q, N_q, D]: of out, any strides; the
    rest: what `sagebwd` was given and gave."""
    given = out, lse, q_codes, q_scale, k_codes, k_scale, is_causal, scale, out_bnhd
    if v.device.type != "cpu":
        return _launch_backward(run, v.device, grad, v, *given)
    of_q, of_k = reference.Quantized(q_codes, q_scale), reference.Quantized(k_codes, k_scale)
    found = reference.backward(of_q, of_k, *_in_16_bits(v, grad), out, lse, scale, is_causal)
    return tuple(as_stored(x.to(v.dtype), out_bnhd) for x in found)


def _launch_backward(run: Callable, gpu, grad: Tensor, v: Tensor, out: Tensor, *given) -> tuple:
    lse, *of_qk, is_causal, scale, out_bnhd = given
    gradients = _empty_gradients(grad, v, out_bnhd)
    v, grad = _in_16_bits(v, grad)
    *of_grad, delta = kernels.launch_quantize(grad, out=out, turned=True, run=run)
    of = *of_qk, v, grad, *of_grad, lse, delta
    kernels.launch_backward(*of, scale, is_causal, *gradients, run, gpu)
    return gradients


def _in_16_bits(v: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """dP is of 16 bits."""
    return (v.bfloat16(), grad.bfloat16()) if v.dtype == torch.float32 else (v, grad)


def _empty_gradients(grad: Tensor, v: Tensor, out_bnhd: bool) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(empty_stored(v, x.shape, out_bnhd) for x in (grad, v, v))


@sagebwd.register_fake
def _(q, k, v, is_causal, scale, out_bnhd):
    check_trained("sagebwd", q, k, v, scale)
    of_qk = *kernels.empty_codes(q, TRAINING_BLOCK), *kernels.empty_codes(k, TRAINING_BLOCK)
    return *empty_outputs(q, v.shape[3], out_bnhd), *of_qk


@sagebwd_backward.register_fake
def _(grad, v, out, lse, q_codes, q_scale, k_codes, k_scale, is_causal, scale, out_bnhd):
    return _empty_gradients(grad, v, out_bnhd)


def _keep(q, k, v, *numbers):
    return (v,), numbers


register_gradient("sagebwd", sagebwd, sagebwd_backward, _keep, _launch, _launch_backward)
