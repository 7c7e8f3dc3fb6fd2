"""Compiling a kernel for a GPU that need not be here, as the JIT would for such arguments; and many
kernels in other processes, before they are launched."""

import concurrent.futures
import dataclasses
import functools
import hashlib
import importlib
import os
import re
import types
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import triton
from triton import knobs
from triton.runtime import driver

from sage_inductor.ops import compat, gpus
from sage_inductor.ops.notes import lost

# Asked for at every launch: Triton 3.9 warns where nothing is said, and 3.10 will say no. Without
# it the Hopper kernel's loop grows from 496 to 637 instructions, and roundings change.
FP_FUSION = {"enable_fp_fusion": True}


class Launch(NamedTuple):
    kernel: triton.JITFunction
    grid: tuple
    arguments: tuple
    options: dict


TYPES = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv", torch.bool: "i1", torch.uint8: "u8",
    torch.int8: "i8", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
_BYTES = {"b8": 1, "u8": 1, "b32": 4, "u32": 4, "s32": 4, "f32": 4, "b64": 8, "u64": 8, "s64": 8}


@dataclasses.dataclass(frozen=True)
class Compilation:
    """What a kernel is compiled for."""

    kernel: triton.JITFunction
    types: tuple[str, ...]  # of each parameter, in Triton's signature; "constexpr"
    constants: tuple[tuple[int, object], ...]  # parameter -> value
    aligned: tuple[int, ...]  # parameters that are multiples of 16
    options: tuple[tuple[str, object], ...]  # num_warps, maxnreg, launch_pdl, by name

    @functools.cached_property
    def digest(self) -> str:
        of = (
            self.kernel.__module__, self.kernel.__name__, self.types, self.constants, self.aligned,
            self.options,
        )  # fmt: skip
        return hashlib.sha256(repr(of).encode()).hexdigest()[:12]

    def compile(self, capability: tuple[int, int]):
        """Triton's CompiledKernel, from its cache where it is there."""
        names = self.kernel.arg_names
        is_gluon = isinstance(self.kernel, compat.GluonJITFunction)
        source = (compat.GluonASTSource if is_gluon else compat.ASTSource)(
            self.kernel,
            dict(zip(names, self.types, strict=True)),
            {(i,): value for i, value in self.constants},
            {(i,): [["tt.divisibility", 16]] for i in self.aligned},
        )
        target = compat.GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
        return triton.compile(source, target=target, options=FP_FUSION | dict(self.options))

    @property
    def parameters(self) -> list[int]:
        """Bytes of each parameter of the compiled kernel, for a launcher that calls kernels as
        Triton 3.6 to 3.9 do."""
        found = []
        for each in self.types:
            if each.startswith("tensordesc"):  # the descriptor, its shape and its strides
                rank = each[each.index("[") : each.index("]")].count(",") + 1
                found += [128, *[4] * rank, *[8] * rank]
            elif each != "constexpr":
                found.append(4 if each == "i32" else 8)
        return [*found, 8, 8]  # two pointers to scratch memory


def parameters(ptx: str) -> list[int]:
    """Bytes of each parameter that a compiled kernel has."""
    entry = re.search(r"\.entry (.*?)\)", ptx, re.DOTALL).group(1)
    pattern = r"\.param\s+(?:\.align \d+\s+)?\.(\w+)[^\[,\n]*(?:\[(\d+)\])?"
    return [int(n) if n else _BYTES[t] for t, n in re.findall(pattern, entry)]


class Unknown(NamedTuple):
    """An argument: a whole number that is not known yet."""

    high: int | float  # it is at most that
    divisor: int


def describe(kernel: triton.JITFunction, arguments: Sequence, options: dict) -> Compilation:
    """arguments: tensors (of any kind that has a dtype), all aligned; host descriptors; numbers;
    `Unknown`; None. A number that is known is compiled for as the JIT does: 1 is compiled in. One
    that is not has 32 bits, but strides as many as they may need. Raises TypeError for a constexpr
    that is not known."""
    types, constants, aligned = [], [], []
    for i, (parameter, x) in enumerate(zip(kernel.params, arguments, strict=True)):
        unknown = isinstance(x, Unknown)
        if parameter.is_constexpr and unknown:
            raise TypeError(f"{kernel.__name__}: {parameter.name} must be known to compile it")
        if parameter.is_constexpr or x is None or type(x) is int and x == 1:
            types.append("constexpr")
            constants.append((i, x))
        elif unknown:
            wide = parameter.name.startswith("stride_") and x.high >= 2**31
            types.append("i64" if wide else "i32")
            aligned += [i] if x.divisor % 16 == 0 else []
        elif type(x) is int:
            types.append("i32" if -(2**31) <= x < 2**31 else "i64")
            aligned += [i] if x % 16 == 0 else []
        elif hasattr(x, "block_shape"):
            layout = f",{x.layout!r}" if hasattr(x, "layout") else ""
            types.append(f"tensordesc<{TYPES[x.base.dtype]}{list(x.block_shape)}{layout}>")
        else:
            types.append(f"*{TYPES[x.dtype]}")
            aligned.append(i)
    return Compilation(
        kernel, tuple(types), tuple(constants), tuple(aligned), tuple(sorted(options.items()))
    )


def travels() -> bool:
    """Whether packages can hold kernels: it was seen how the Triton that is here calls them."""
    version = tuple(map(int, triton.__version__.split(".")[:2]))
    names = compat.ASTSource, compat.GPUTarget, compat.GluonASTSource, compat.GluonJITFunction
    return compat.GLUON[0] <= version <= compat.GLUON[1] and None not in names


# -- before they are launched ----

# Inductor does not see what our ops launch, so their first launch would compile it: 4 to 6 s for
# the Hopper kernel on an H200's host, with the GPU waiting. In a thread of this process that takes
# 2.4 to 2.8 s of the interpreter, for which Inductor waits.
LONGEST = 120.0  # seconds to wait for many; what is not compiled then compiles where it is launched
PATIENCE = 20.0  # seconds that a launch waits
_jobs: dict[tuple, tuple[tuple, concurrent.futures.Future]] = {}
if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=_jobs.clear)  # nobody would tell the child what is done


def compile_elsewhere(
    launches: Iterable[Launch], capability: tuple[int, int]
) -> list[concurrent.futures.Future]:
    """Start to compile the kernels of the launches, in the processes that Inductor compiles in, if
    there are any: each once for this process, in the order in which they are asked for. What fails
    there compiles, and fails, where it is launched."""
    jobs = {}
    try:
        if (pool := _pool()) is None:
            return []
        version = compat.ptxas_version(10 * capability[0] + capability[1])
        place = knobs.cache.dir, knobs.nvidia.ptxas.path, version
        for each in launches:
            key = describe(each.kernel, each.arguments, each.options).digest, capability
            if _jobs.get(key, (None, None))[0] != place:
                job = pool.submit(
                    _warm_up, each.kernel.__module__, each.kernel.__name__, each.kernel.cache_key,
                    each.grid, each.arguments, each.options, capability, *place,
                )  # fmt: skip
                _jobs[key] = place, job
                job.add_done_callback(functools.partial(_say_why, each.kernel.__name__))
            jobs[key] = _jobs[key][1]
    except Exception as error:  # noqa: BLE001  (a dtype not known, a process that died, a daemon)
        lost("kernels compile where they are launched", error)
    return list(jobs.values())


def _pool():
    """Inductor's processes, which may be about to start; None where it is to have none, or where
    this torch does not name them."""
    if compat.AsyncCompile is None:
        return None
    try:
        compat.AsyncCompile.wait_pool_ready(0)
    except concurrent.futures.TimeoutError:
        return compat.AsyncCompile.process_pool()
    is_used = compat.AsyncCompile.use_process_pool()  # not where one thread was asked for
    return compat.AsyncCompile.process_pool() if is_used else None


def _say_why(name: str, job: concurrent.futures.Future) -> None:
    if not job.cancelled() and (error := job.exception()):
        lost(f"{name} compiles where it is launched", error)


def await_compiled(launch: Launch, device: torch.device) -> None:
    """Wait until a kernel that another process compiles is where Triton would look for it now: the
    folder of its cache may have changed since (Inductor sets TRITON_CACHE_DIR when it first loads a
    kernel; with `force_disable_caches` it has a folder for each compilation).

    The launch compiles the kernel itself where that failed, where the processes have yet to start,
    and after PATIENCE; then no launch waits again for what was asked for before."""
    if not _jobs:
        return
    try:
        key = describe(launch.kernel, launch.arguments, launch.options).digest
        _, job = _jobs.get((key, gpus.capability(device)), (None, None))
        if job is None or not (job.done() or compat.AsyncCompile.use_process_pool()):
            return
        of_key, files = job.result(PATIENCE)
        cache, group = compat.cache_manager(of_key), next(x for x in files if x.endswith(".json"))
        if not cache.get_group(group):
            cache.put_group(group, files)
    except concurrent.futures.TimeoutError:
        lost(f"{launch.kernel.__name__} compiles where it is launched", f"not in {PATIENCE:g} s")
        _jobs.clear()
    except Exception as error:  # noqa: BLE001  (what the other process, or its cache, failed by)
        lost(f"{launch.kernel.__name__} compiles where it is launched", error)


def elsewhere(capability: tuple[int, int]) -> types.SimpleNamespace:
    """A driver of Triton's for a GPU of which only the capability is known."""
    target = compat.GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    return types.SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: target,  # a key
        get_current_stream=lambda device: 0,
    )


def _warm_up(
    module, name, key, grid, arguments, options, capability, folder, ptxas, version
) -> tuple[str, dict[str, str]]:
    """In another process, which may have no GPU in use: the key in Triton's cache, and the files.

    `Compilation.compile` would give another key. Triton's key depends on what the JIT of this
    version specialises by. It depends on ptxas: torch 2.11 gives its workers a ptxas of its own,
    and a process keeps the version that it first saw. And it depends on the kernel's own key, which
    depends on whether the functions that it calls had theirs before (Triton 3.7,
    DependenciesFinder._update_hash)."""
    kernel = getattr(importlib.import_module(module), name)
    if kernel.cache_key != key:  # to ask sets more than that
        kernel.hash = key
    try:
        before = driver.active
    except RuntimeError:  # there is no GPU
        before = None
    with knobs.cache.scope(), knobs.nvidia.scope():
        knobs.cache.dir = folder
        knobs.nvidia.ptxas, knobs.nvidia.mock_ptx_version = ptxas, version
        compat.ptxas_version.cache_clear()
        driver.set_active(elsewhere(capability))
        try:
            kinds = (x.dtype if isinstance(x, torch.Tensor) else x for x in arguments)
            compiled = kernel.warmup(*kinds, grid=grid, **options)
        finally:
            driver.set_active(before)
            compat.ptxas_version.cache_clear()
    return compiled.hash, compiled.metadata_group
