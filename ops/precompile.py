"""The kernels of opaque ops compile while Inductor works on the graph around them: in its
processes (compile.py), as what is noted of the ops' own Python on tensors without memory."""

import functools
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from sage_inductor.ops import compat
from sage_inductor.ops.compile import compile_elsewhere
from sage_inductor.ops.gpus import Gpu
from sage_inductor.ops.launch import launch_cached, noted
from sage_inductor.ops.notes import lost


def when_traced(op: compat.OpOverload, launch: Callable) -> None:
    """Compile ahead what a call of `op` will launch where AOTAutograd traces it, unless it is for a
    package, which has its own kernels. launch: `register.Launches`'s."""
    names = [each.name for each in op._schema.arguments]

    @torch.library.register_torch_dispatch(op.name(), compat.FunctionalTensorMode)
    def traced(mode, op, types, args, kwargs):
        if compat.virtualized.aot_compilation is not True:
            precompile(launch, dict(zip(names, args, strict=False)) | kwargs)
        return mode.__torch_dispatch__(op, types, args, kwargs)


def precompile(launch: Callable, arguments: dict) -> None:
    """Start to compile what ``launch(arguments, run, gpu)`` launches, if its sizes are known.
    arguments: by name."""
    device = next(x.device for x in arguments.values() if isinstance(x, Tensor))
    if device.type == "cuda" and all(map(_is_known, arguments.values())):
        _start(device, launch, tuple(arguments), tuple(map(_described, arguments.values())))


def _is_known(x) -> bool:
    numbers = (*x.shape, *x.stride()) if isinstance(x, Tensor) else (x,)
    return not any(isinstance(n, torch.SymInt) for n in numbers)


def _described(x):
    """What a tensor's launches depend on; anything else as it is."""
    return (tuple(x.shape), tuple(x.stride()), x.dtype) if isinstance(x, Tensor) else x


@functools.cache  # started once
def _start(*of_call) -> None:
    """In a thread of its own, where no mode of torch is on: while a graph is traced even a meta
    tensor is a fake one, without an address. It takes milliseconds: kernels compile elsewhere."""
    thread = threading.Thread(target=_launch, args=of_call)
    thread.start()
    thread.join()


def _launch(device: torch.device, launch: Callable, names: tuple, values: tuple) -> None:
    given, gpu = dict(zip(names, values, strict=True)), Gpu.of(device)
    for name, x in given.items():
        if isinstance(x, tuple):
            shape, strides, dtype = x
            given[name] = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    with noted() as launches:
        try:
            launch(given, launch_cached, gpu)
        except Exception as error:  # noqa: BLE001  (operands that are copied; else the call says it)
            lost("what a call launches compiles then", error)
    compile_elsewhere(launches, gpu.capability)
