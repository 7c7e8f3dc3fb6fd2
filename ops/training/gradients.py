"""What the ops that train have in common: how they are called, which calls they compute, and what
their backward gives and refuses."""

import torch
from torch import Tensor

from sage_inductor.ops.formats import TRAINED_HEAD_DIM
from sage_inductor.ops.recipe import NAMED
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


def no_second_gradient(op: str):
    """For `register_autograd` of the op's backward."""

    def refuse(ctx, *_):
        raise NotImplementedError(
            f"sage::{op}: no gradient of the gradient: leave create_graph out, or set "
            'options={"sage.training": "off"}'
        )

    return refuse
