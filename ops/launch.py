"""Three ways to launch a Triton kernel, each ``run(kernel, grid, tensors, numbers, **options)`` for
``kernel[grid](*tensors, *numbers, **options)``.

traced   seen by torch, where it traces a triton_op: Inductor compiles and launches the kernel.
at_once  from an op that is opaque to torch, without Triton's look-up of what it has compiled.
ahead    compiles what `at_once` would launch. Tensors may be on meta.

The first launch of an opaque op compiles its kernel while the GPU waits: of hopper.py's, 4 to 6 s
on an H200's host. ``in_background(compile)`` does it while Inductor compiles the graph around it.
"""

import concurrent.futures
import functools
from collections.abc import Callable

import torch
import triton
from torch import Tensor
from torch.library import wrap_triton

OPAQUE = set()  # Python computes them: no package can hold one


def define_opaque(name: str, function: Callable):
    """The op ``sage::name``, which Inductor does not look into and `function` computes on CUDA; its
    schema is the function's. Not by custom_op, whose wrappers cost 43 us a call on an H200's host,
    more than a launch."""
    schema = torch.library.infer_schema(function, mutates_args=())
    torch.library.define(f"sage::{name}", schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(f"sage::{name}", "cuda", function)
    op = getattr(torch.ops.sage, name).default
    OPAQUE.add(op)
    return op


def traced(kernel: triton.JITFunction, grid: tuple, tensors: tuple, numbers: tuple, **options):
    wrap_triton(kernel)[grid](*tensors, *numbers, **options)


def at_once(kernel: triton.JITFunction, grid: tuple, tensors: tuple, numbers: tuple, **options):
    """On the current device. The block of a descriptor follows from numbers and dtypes.

    Triton's look-up takes 20 of the 36 us of a launch with 36 arguments (an H200's host, 3.6). It
    is done once for what differs in addresses alone, if all are aligned.
    """
    addresses, dtypes = 0, []
    for x in tensors:
        x = x if isinstance(x, Tensor) else x.base  # of a descriptor
        addresses |= x.data_ptr()
        dtypes.append(x.dtype)
    found = None
    if addresses % 16 == 0:
        device = torch.cuda.current_device()
        found = _compiled(kernel, device, numbers, *dtypes, *options.items())
        if found:
            found[0][(*grid, 1, 1)[:3]](*tensors, *numbers)
            return
    concurrent.futures.wait(tuple(_running))
    compiled = kernel[grid](*tensors, *numbers, **options)
    if found is not None:
        found.append(compiled)


@functools.lru_cache(maxsize=4096)
def _compiled(*_key) -> list:
    """Where `at_once` keeps the compiled kernel."""
    return []


def ahead(kernel: triton.JITFunction, grid: tuple, tensors: tuple, numbers: tuple, **options):
    kinds = (x.dtype if isinstance(x, Tensor) else x for x in tensors)
    kernel.warmup(*kinds, *numbers, grid=grid, **options)


def pdl_option(pdl: bool) -> dict:
    """The option of programmatic dependent launch, which Inductor cannot pass on."""
    return {"launch_pdl": True} if pdl else {}


_running: list[concurrent.futures.Future] = []


@functools.cache
def _thread() -> concurrent.futures.Executor:
    return concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="sage-compile")


def in_background(compile: Callable, *args) -> None:
    """Call ``compile(*args)`` in a thread that `at_once` waits for. An error there is none here:
    the launch that it was for meets it again."""
    _running[:] = [future for future in _running if not future.done()]
    _running.append(_thread().submit(compile, *args))
