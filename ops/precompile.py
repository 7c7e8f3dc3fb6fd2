"""Kernels compile while Inductor works on the graph around their ops: in its processes
(compile.py), as what is noted of the ops' own Python on tensors without memory."""

import functools
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from sage_inductor.ops.compile import compile_elsewhere
from sage_inductor.ops.gpus import Gpu
from sage_inductor.ops.launch import noted, run
from sage_inductor.ops.notes import lost


def precompile(launch: Callable, arguments: tuple) -> None:
    """Start to compile what ``launch(run, gpu, *arguments)`` launches, if its sizes are known."""
    device = arguments[0].device
    if device.type == "cuda" and all(map(_is_known, arguments)):
        _start(device, launch, *map(_described, arguments))


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


def _like(shape: tuple, strides: tuple, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def _launch(device: torch.device, launch: Callable, *values) -> None:
    gpu = Gpu.of(device)
    given = [_like(*x) if isinstance(x, tuple) else x for x in values]
    with noted() as launches:
        try:
            launch(run, gpu, *given)
        except Exception as error:  # noqa: BLE001  (operands that are copied; else the call says it)
            lost("what a call launches compiles then", error)
    compile_elsewhere(launches, gpu.capability)
