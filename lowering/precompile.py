"""The kernels of opaque ops compile while Inductor works on the graph around them: in its
processes (ops/compile.py), as what is noted of the ops' own Python on tensors without memory."""

import functools
import itertools
import logging
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch

from sage_inductor.ops import gpus
from sage_inductor.ops.compile import compile_elsewhere
from sage_inductor.ops.launch import launch_cached, noted

_log = logging.getLogger("sage_inductor")


class _Like(NamedTuple):
    """A tensor without memory, as a key."""

    dtype: torch.dtype
    shape: tuple
    strides: tuple

    @classmethod
    def of(cls, x):
        """Of a tensor; anything else stays what it is."""
        is_tensor = isinstance(x, torch.Tensor)
        return cls(x.dtype, tuple(x.shape), tuple(x.stride())) if is_tensor else x

    def made(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


def _made(x):
    return x.made() if isinstance(x, _Like) else x


def _are_known(likes: tuple) -> bool:
    numbers = ((*x.shape, *x.strides) if isinstance(x, _Like) else (x,) for x in likes)
    return not any(isinstance(n, torch.SymInt) for n in itertools.chain(*numbers))


def precompile(launch: Callable, arguments: dict) -> None:
    """Start to compile what a call of an op that does ``launch(arguments, run, gpu)`` launches, if
    its sizes are known. arguments: by name."""
    device = next(x.device for x in arguments.values() if isinstance(x, torch.Tensor))
    likes = tuple(map(_Like.of, arguments.values()))
    if device.type == "cuda" and _are_known(likes):
        _start(device, launch, tuple(arguments), likes)


@functools.cache  # started once
def _start(*of_call) -> None:
    """In a thread of its own, where no mode of torch is on: while a graph is traced even a meta
    tensor is a fake one, without an address. It takes milliseconds: kernels compile elsewhere."""
    thread = threading.Thread(target=_launch, args=of_call)
    thread.start()
    thread.join()


def _launch(device: torch.device, launch: Callable, names: tuple, likes: tuple) -> None:
    given = dict(zip(names, map(_made, likes), strict=True))
    gpu = gpus.Gpu(gpus.capability(device), gpus.processors(device))
    with noted() as launches:
        try:
            launch(given, launch_cached, gpu)
        except Exception as error:  # of operands that are copied; of others the call says the same
            _log.debug("what the call launches is compiled then: %s", error)
    compile_elsewhere(launches, gpu.capability)
