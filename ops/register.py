"""What torch is told of an op besides what it computes: that Inductor does not look into it, what
it launches, what it opens into, and autocast's rule.

    attention_opaque = opaque("attention_opaque", function, fake, launched)
    opens(sdpa, compose, stored=(1, 2))
    autocast("sdpa")

An op opens when AOTAutograd traces a graph. Inductor then sees what there is to see: on CUDA the
Triton kernels themselves (they are ``triton_op``) or, where it cannot launch the fastest ones,
calls of opaque ops, whose kernels start to compile then; in a CPU package the aten operations of
the emulation. Nothing named ``sage`` is left for a package to look up.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sage_inductor.ops import compat
from sage_inductor.ops.precompile import when_traced
from sage_inductor.ops.realize import stored as stored_once


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


def triton_op(function: Callable):
    """The op of the function's name and schema, which Inductor sees as the Triton kernels that it
    wraps. torch.library's own imports Inductor, to look for these kernels in the function's source:
    their text becomes part of a cache's key. Our recipes already name the sources."""

    def untraced(*args):
        with compat.set_wrap_triton_enabled(False):
            return function(*args)

    schema = torch.library.infer_schema(function, mutates_args=())
    name = f"sage::{function.__name__.strip('_')}"
    op = torch.library.custom_op(name, untraced, mutates_args=(), schema=schema)
    op.register_fake(function)
    opens(op, function)
    return op


def launches(
    op: compat.OpOverload, launch: Callable, in_packages: bool = True, ahead: bool = True
) -> None:
    """launch, in_packages: `Launches`'s. ahead: its kernels compile where a call is traced."""
    LAUNCHES[op] = Launches(launch, in_packages)
    if ahead:
        when_traced(op, launch)


def opens(
    custom_op, into: Callable, stored: tuple[int, ...] = (), portable: int | None = None
) -> None:
    """A call of `custom_op` becomes ``into(*arguments)`` where AOTAutograd traces it.

    stored: numbers of the arguments that several kernels read, which Inductor stores once.
    portable: the number of the argument of that name. Without it the op opens on CPU too.

    Three cases stay whole:

    * while ``torch.export`` traces, like every ``triton_op``: an exported program keeps what the
      model means and opens when it is compiled;
    * attention on CPU, unless it is for a package: the emulation is for studies, and as one opaque
      call it compiles in no time (opened, a dynamic length cost 100 s);
    * tensor subclasses: DTensor shards the op (sharding.py) and calls it on local tensors, and that
      call opens. What the op is made of has no sharding.
    """

    @custom_op.register_torch_dispatch(compat.FunctionalTensorMode)
    def open_(mode, op, types, args, kwargs):
        first = args[0][0] if isinstance(args[0], list) else args[0]
        on_cpu = first.device.type == "cpu"
        is_subclass = any(hasattr(each, "__tensor_flatten__") for each in types)
        stays = on_cpu and portable is not None and not args[portable]
        if is_subclass or compat.exporting() or stays:
            return mode.__torch_dispatch__(op, types, args, kwargs)
        with mode:
            args = list(args)
            for i in () if on_cpu else stored:  # there the emulation's operations fuse as they may
                args[i] = stored_once(args[i])
            return into(*args, **kwargs)


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
