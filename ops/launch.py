"""The way to launch a Triton kernel: ``run(kernel, grid, tensors, numbers, **options)`` is
``kernel[grid](*tensors, *numbers, **options)`` without Triton's look-up of what is compiled. What a
variant of a kernel does not read is None among its tensors.

Inside `noted` it launches nothing and writes down what it would; tensors may be on meta. compile.py
compiles that in other processes, and `run` waits for it. So kernels compile while Inductor works on
the graph around their ops (`precompile`).
"""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator

import torch
import triton
from torch import Tensor

from sage_inductor.ops import compat
from sage_inductor.ops.compile import FP_FUSION, Launch, await_compiled, compile_elsewhere
from sage_inductor.ops.gpus import Gpu
from sage_inductor.ops.notes import lost

HAS_PDL = compat.gdc_wait is not None


class _Noting(threading.local):
    launches: list[Launch] | None = None


_noting = _Noting()


@contextlib.contextmanager
def noted() -> Iterator[list[Launch]]:
    """Inside, this thread launches nothing: the list gets what it would launch. Outputs keep what
    was in memory. In a `noted` within another the inner list alone gets it."""
    before, _noting.launches = _noting.launches, []
    try:
        yield _noting.launches
    finally:
        _noting.launches = before


def _like(x):
    """On meta: what is noted keeps no memory, and can be pickled."""
    if isinstance(x, Tensor):
        return _on_meta(*_described(x))
    return dataclasses.replace(x, base=_like(x.base)) if hasattr(x, "block_shape") else x


def _described(x):
    """What a tensor's launches depend on; anything else as it is."""
    return (tuple(x.shape), tuple(x.stride()), x.dtype) if isinstance(x, Tensor) else x


def _on_meta(shape: tuple, strides: tuple, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def run(kernel: triton.JITFunction, grid: tuple, tensors: tuple, numbers: tuple, **options) -> None:
    """On the tensors' device. The block of a descriptor follows from numbers and dtypes.

    Triton's look-up takes 20 of the 36 us of a launch with 36 arguments (an H200's host, 3.6). It
    is done once for what differs in addresses alone, if all are aligned.
    """
    if _noting.launches is not None:
        arguments = tuple(map(_like, (*tensors, *numbers)))
        _noting.launches.append(Launch(kernel, grid, arguments, options | FP_FUSION))
        return
    addresses, dtypes = 0, []
    for given in tensors:
        if given is None:  # compiled in
            dtypes.append(None)
            continue
        x = given if isinstance(given, Tensor) else given.base  # of a descriptor
        addresses |= x.data_ptr()
        dtypes.append(x.dtype)
    device, found = x.device.index, None
    if addresses % 16 == 0:
        found = _compiled(kernel, device, numbers, *dtypes, *options.items())
        if not found:
            arguments = (*tensors, *numbers)
            await_compiled(Launch(kernel, grid, arguments, options | FP_FUSION), x.device)
    if device == torch.cuda.current_device():
        _launch(kernel, grid, tensors, numbers, options, found)
    else:
        with torch.cuda.device(device):
            _launch(kernel, grid, tensors, numbers, options, found)


def _launch(kernel, grid, tensors, numbers, options, found: list | None) -> None:
    if found:
        found[0][(*grid, 1, 1)[:3]](*tensors, *numbers)
        return
    compiled = kernel[grid](*tensors, *numbers, **options, **FP_FUSION)
    if found is not None:
        found.append(compiled)


@functools.lru_cache(maxsize=4096)
def _compiled(*_key) -> list:
    """Where `run` keeps the compiled kernel."""
    return []


def doubled(strides: tuple) -> tuple:
    """Strides as kernels take them: times two, but for the last, which may be 1. Triton knows of a
    number only whether 16 divides it. Heads of 72 channels are 8 * 9 elements apart, a multiple of
    16 bytes, which a thread reads at once where Triton knows that. 144 // 2 tells it."""
    return *(2 * stride for stride in strides[:-1]), strides[-1]


def visible_argument(visible: Tensor | None, shape: tuple, unread: Tensor) -> tuple:
    """uint8 [B or 1, H or 1, N] as kernels take it beside x [B, H, N, D]: a tensor, and its strides
    of a batch and a head. None, for all rows: `unread`."""
    if visible is None:
        return unread, (0, 0)
    visible = visible.expand(*shape[:3])
    return visible, visible.stride()[:2]


def pdl_option(pdl: bool) -> dict:
    """The option of programmatic dependent launch."""
    return {"launch_pdl": True} if pdl else {}


# -- before a call ----


def precompile(launch: Callable, arguments: tuple) -> None:
    """Start to compile what ``launch(run, gpu, *arguments)`` launches, if its sizes are known."""
    device = arguments[0].device
    sizes = ((*x.shape, *x.stride()) if isinstance(x, Tensor) else (x,) for x in arguments)
    known = not any(isinstance(n, torch.SymInt) for of_one in sizes for n in of_one)
    if device.type == "cuda" and known:
        _start(device, launch, *map(_described, arguments))


@functools.cache  # started once
def _start(*of_call) -> None:
    """In a thread of its own, where no mode of torch is on: while a graph is traced even a meta
    tensor is a fake one, without an address. It takes milliseconds: kernels compile elsewhere."""
    thread = threading.Thread(target=_note, args=of_call)
    thread.start()
    thread.join()


def _note(device: torch.device, launch: Callable, *values) -> None:
    gpu = Gpu.of(device)
    given = [_on_meta(*x) if isinstance(x, tuple) else x for x in values]
    with noted() as launches:
        try:
            launch(run, gpu, *given)
        except Exception as error:  # noqa: BLE001  (operands that are copied; else the call says it)
            lost("what a call launches compiles then", error)
    compile_elsewhere(launches, gpu.capability)
