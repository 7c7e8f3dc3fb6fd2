"""What a Triton kernel of ours reads and writes, found once a variant.

Whenever a graph that calls a Triton kernel is traced, torch compiles the kernel to Triton's IR and
walks it, 16 times for each call of ``sage::sdpa``. The answer depends on the arguments alone. Of 24
layers of a transformer Inductor's graph took 26 s with that and takes 14 (9 with no attention at
all; torch 2.13, without the kernels' own compilation).

A private function of torch is replaced by itself with a memory, for our kernels only. Where it has
another name, nothing is remembered.
"""

import copy
import functools

import torch
from torch._higher_order_ops import triton_kernel_wrap

NAMES = ("identify_accessed_tensors", "identify_mutated_tensors")  # torch 2.13, 2.11


def _remember(identify):
    found = {}

    @functools.wraps(identify)
    def remembered(kernel, kwargs, tma_descriptor_metadata):
        # A kernel's function, or the kernel in an Autotuner, which torch makes anew of num_warps.
        if not getattr(kernel.fn, "__module__", "").startswith("sage_inductor."):
            return identify(kernel, kwargs, tma_descriptor_metadata)
        arguments = tuple((name, _describe(x)) for name, x in sorted(kwargs.items()))
        configs = tuple(map(str, getattr(kernel, "configs", ())))
        key = kernel.fn, configs, arguments, str(tma_descriptor_metadata)
        if key not in found:
            found[key] = identify(kernel, kwargs, tma_descriptor_metadata)
        return copy.deepcopy(found[key])

    return remembered


def _describe(x) -> tuple:
    """All of an argument that an answer may depend on: a tensor, fake or of Inductor's IR, by what
    a pointer to it is compiled for."""
    if isinstance(x, torch.Tensor):
        return "tensor", x.dtype
    if hasattr(x, "get_dtype"):  # TensorBox: torch tells tensors from it by type alone
        return type(x).__name__, x.get_dtype()
    return type(x).__name__, str(x)


for _name in NAMES:
    if hasattr(triton_kernel_wrap, _name):
        setattr(triton_kernel_wrap, _name, _remember(getattr(triton_kernel_wrap, _name)))
