"""What the ops that train have in common: how they are called, which calls they compute, and what
their backward gives and refuses."""

from collections.abc import Callable

import torch
from torch import Tensor

from sage_inductor.ops.formats import TRAINED_HEAD_DIM
from sage_inductor.ops.recipe import NAMED
from sage_inductor.ops.register import OPAQUE, autocast, launches
from sage_inductor.ops.sdpa import SdpaCall, check

_CHECKED_AS = NAMED["sage1"].encode()


def check_trained(op: str, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
    """Raise ValueError or TypeError unless attention of this kind trains."""
    check(SdpaCall.of(q, k, v, scale, _CHECKED_AS))
    D, D_v = q.shape[3], v.shape[3]
    if D != D_v or D > TRAINED_HEAD_DIM:
        raise ValueError(
            f"sage::{op}: head_dim must be one number up to {TRAINED_HEAD_DIM}, got {D}, {D_v}"
        )


FP8_BACKWARD = "fp8-backward"
OPS = {"sagebwd": "sagebwd", FP8_BACKWARD: "rowscaled"}  # of each ``sage.training``


def training_op(training: str):
    """The op of a ``sage.training``: op(q, k, v, is_causal, scale, out_bnhd), out first of what it
    returns."""
    return getattr(torch.ops.sage, OPS[training]).default


def register_gradient(
    name: str, op, backward, keep: Callable[..., tuple[tuple, tuple]], *launched: Callable
) -> None:
    """Make `backward` the gradient of `op`, whose first output alone has one. It is called with the
    gradient of that output, tensors among op's arguments, all of op's outputs and numbers:
    keep(*arguments) gives these tensors and numbers. launched: what op and backward launch."""
    for of, launch in zip((name, f"{name}_backward"), launched, strict=True):
        overload = getattr(torch.ops.sage, of).default
        launches(overload, launch)
        OPAQUE.add(overload)

    def save(ctx, inputs, output) -> None:
        tensors, ctx.numbers = keep(*inputs)
        ctx.save_for_backward(*tensors, *output)
        ctx.mark_non_differentiable(*output[1:])
        # No zeros for all codes: 39 us of 4.2 ms (rowscaled, H100, 2026-11-24).
        ctx.set_materialize_grads(False)

    def gradient(ctx, grad, *_):
        return *backward(grad, *ctx.saved_tensors, *ctx.numbers), None, None, None

    def refuse(ctx, *_):
        raise NotImplementedError(
            f"sage::{name}: no gradient of the gradient: leave create_graph out, or set "
            'options={"sage.training": "off"}'
        )

    op.register_autograd(gradient, setup_context=save)
    backward.register_autograd(refuse)
    autocast(name)
