"""What torch is told of an op besides what it computes: that Inductor does not look into it, what
it launches, and autocast's rule.

    attention_opaque = opaque("attention_opaque", function, fake, launched)
    autocast("sdpa")
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sage_inductor.ops import compat
from sage_inductor.ops.precompile import when_traced


class Launches(NamedTuple):
    """What a call of an op launches, for those who compile it ahead, replay it or package it."""

    launch: Callable  # launch(arguments by name, run, gpu): the outputs, of tensors on meta
    in_packages: bool


OPAQUE: set = set()  # ops that Inductor does not look into: no exported program may call one
LAUNCHES: dict[compat.OpOverload, Launches] = {}
_library = torch.library.Library("sage", "FRAGMENT")


def opaque(
    name: str, function: Callable, fake: Callable, launch: Callable, **how: bool
) -> compat.OpOverload:
    """The op ``sage::name``, which Inductor does not look into and `function` computes on CUDA; its
    schema is the function's. launch, how: as `launches` takes them. Not by custom_op, whose
    wrappers cost 43 us a call on an H200's host, more than a launch."""
    schema = torch.library.infer_schema(function, mutates_args=())
    torch.library.define(f"sage::{name}", schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(f"sage::{name}", "cuda", function)
    torch.library.register_fake(f"sage::{name}", fake)
    op = getattr(torch.ops.sage, name).default
    OPAQUE.add(op)
    launches(op, launch, **how)
    return op


def launches(
    op: compat.OpOverload, launch: Callable, in_packages: bool = True, ahead: bool = True
) -> None:
    """launch, in_packages: `Launches`'s. ahead: its kernels compile where a call is traced."""
    LAUNCHES[op] = Launches(launch, in_packages)
    if ahead:
        when_traced(op, launch)


def autocast(op: str) -> None:
    """SDPA's autocast rule for an op: compute in autocast's dtype, whatever the inputs have."""
    for device_type in ("cuda", "cpu"):
        key = f"Autocast{device_type.upper()}"
        _library.impl(op, _cast(op, device_type, getattr(compat.DispatchKey, key)), key)


def _cast(op: str, device_type: str, key):
    def cast(*args):
        dtype = torch.get_autocast_dtype(device_type)
        floating = (isinstance(x, Tensor) and x.is_floating_point() for x in args)
        args = [x.to(dtype) if f else x for x, f in zip(args, floating, strict=True)]
        with compat.ExcludeDispatchKeyGuard(compat.DispatchKeySet(key)):
            return getattr(torch.ops.sage, op)(*args)

    return cast
