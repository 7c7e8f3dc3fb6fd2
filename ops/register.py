"""What torch learns of an op beyond what it computes: that Inductor does not look into it, what
it launches, what it opens into, and autocast's rule.

    @launched_by(launch)
    def quantize_k(k: Tensor, ...) -> tuple[Tensor, Tensor]: ...   # on CPU
    opens(sdpa, compose)
    autocast("sdpa")

``sage::sdpa`` and its like open when AOTAutograd traces a graph. On CUDA they become calls of the
ops of kernels, which Inductor does not look into: nothing in their kernels could fuse with what is
around them. One way to launch serves them all (launch.py). Their kernels start to compile then, and
lowering/ replays them or puts them into a package. In a CPU package all of it becomes the aten
operations of the emulation.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from sage_inductor.ops import compat
from sage_inductor.ops.launch import precompile, run

OPAQUE: set = set()  # ops that C++ cannot compute: no exported program may call one
LAUNCHES: dict[compat.OpOverload, Callable] = {}  # `launched_by`'s launch, of every op that has one
_library = torch.library.Library("sage", "FRAGMENT")


def launched_by(
    launch: Callable, fake: Callable | None = None, ahead: bool = True, mutates: tuple = ()
) -> Callable:
    """Makes the op of a function's name and schema, of kernels on CUDA. The function computes it on
    CPU, in plain PyTorch, which is what Inductor compiles there.

    launch: launch(run, gpu, *arguments) launches by `run`, launch.py's or one that writes down what
    is launched, for that device or Gpu, and returns the outputs: a list or a tuple. Its tensors may
    be without memory. fake: gives the outputs without memory; None: `launch` does. ahead: kernels
    compile where a call is traced.

    Not by custom_op, whose wrappers cost 43 us a call on an H200's host, more than a launch."""

    def define(function: Callable) -> compat.OpOverload:
        name = function.__name__.strip("_")
        schema = torch.library.infer_schema(function, mutates_args=mutates)
        _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, function, "CPU")
        _library.impl(name, lambda *args: launch(run, args[0].device, *args), "CUDA")
        fake_of = fake or functools.partial(launch, _nothing, None)
        torch.library.register_fake(f"sage::{name}", fake_of, lib=_library)
        op = getattr(torch.ops.sage, name).default
        launches(op, launch, ahead, function)
        return op

    return define


def emulated(x: Tensor) -> bool:
    return x.device.type == "cpu"


def _nothing(*_, **__) -> None:
    """A `run` that launches nothing."""


def launches(
    op: compat.OpOverload, launch: Callable, ahead: bool = True, on_cpu: Callable | None = None
) -> None:
    """Say what an op launches. on_cpu: what it becomes where AOTAutograd traces a call on CPU."""
    LAUNCHES[op] = launch

    @torch.library.register_torch_dispatch(op.name(), compat.FunctionalTensorMode)
    def traced(mode, op, types, args, kwargs):
        if on_cpu is not None and emulated(args[0]) and not compat.exporting():
            with mode:
                return on_cpu(*args)
        # A package has its own kernels.
        if ahead and compat.virtualized.aot_compilation is not True:
            precompile(launch, args)
        return mode.__torch_dispatch__(op, types, args, kwargs)


def opens(custom_op, into: Callable, portable: int | None = None) -> None:
    """A call of `custom_op` becomes ``into(*arguments)`` where AOTAutograd traces it.

    portable: the number of the argument of that name. Without it the op opens on CPU too.

    Three cases stay whole:

    * while ``torch.export`` traces: an exported program keeps what the model means and opens when
      it is compiled;
    * attention on CPU, unless it is for a package: the emulation is for studies, and as one opaque
      call it compiles in no time (opened, a dynamic length cost 100 s);
    * tensor subclasses: DTensor shards the op (sharding.py) and calls it on local tensors, and that
      call opens. What the op is made of has no sharding.
    """

    @custom_op.register_torch_dispatch(compat.FunctionalTensorMode)
    def open_(mode, op, types, args, kwargs):
        stays = portable is not None and emulated(args[0]) and not args[portable]
        is_subclass = any(hasattr(each, "__tensor_flatten__") for each in types)
        if is_subclass or compat.exporting() or stays:
            return mode.__torch_dispatch__(op, types, args, kwargs)
        with mode:
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
