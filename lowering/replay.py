"""Ops of kernels in Inductor's Python wrapper: what a call launched, C++ launches again.

What an op makes and launches follows from the sizes, strides and dtypes of its tensors and from its
numbers. So a call runs as in eager mode until one like it comes again. That one is noted, by the
op's own Python on tensors without memory, and from then on replay.cpp does what is noted. A tensor
at an address that is no multiple of 16 has other kernels, and stays with Python. So do all calls
while somebody hooks Triton's launches, as its profiler does.

replay.cpp is compiled once on a machine, by the compiler with which Triton builds its launchers,
while the first calls run. Where that fails all calls run in Python: slower, and the same.
"""

import array
import concurrent.futures
import ctypes
import functools
import hashlib
import itertools
import sysconfig
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs

from sage_inductor.lowering.package import HEADER, launched_as
from sage_inductor.ops import compat, gpus
from sage_inductor.ops.compat import OpOverload, handles_of, tensors_of
from sage_inductor.ops.compile import FP_FUSION, describe
from sage_inductor.ops.notes import lost
from sage_inductor.ops.register import LAUNCHES

SOURCE = Path(__file__).with_name("replay.cpp")
DEVICE = "cuda"
# 315 us instead of 59 on an H200's host.
BY_PYTHON = "Python submits calls, 5 times as slowly as C++ would"


class Replay:
    """``op`` in a graph, for calls that differ in tensors and numbers alone. It is called as the op
    is, by position."""

    def __init__(self, op: OpOverload):
        self.op = op
        self.library = None  # replay.cpp; False: calls run in Python
        self.positions: list[int] = []  # of tensors
        self.kernels: set = set()  # of Triton's, which are loaded as long as they live

    def __call__(self, *args):
        library = self.library or self._ready(args)
        hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        if not library or any(getattr(each, "calls", each) for each in hooks):
            return self.op(*args)
        tensors = [args[i] for i in self.positions]
        found = library.run(self.site, handles_of(tensors), args)
        if isinstance(found, list):  # empty of what writes
            return tensors_of(found)
        outputs = self.op(*args)
        if found is None and not torch.cuda.is_current_stream_capturing():
            self._note(library, args, tensors)
        return outputs

    def _ready(self, args: tuple):
        """replay.cpp, if it is compiled and can replay these calls."""
        if self.library is False:
            return False
        self.positions = [i for i, x in enumerate(args) if isinstance(x, Tensor)]
        if args[self.positions[0]].device.type != DEVICE:
            return False
        built = library()
        if not built.done():
            return False
        if built.exception():
            lost(BY_PYTHON, why_python(), warn=True)
            self.library = False
        else:
            self.site = built.result().site()
            self.library = built.result()
        return self.library

    def _note(self, library, args: tuple, tensors: list[Tensor]) -> None:
        gpu = gpus.Gpu.of(tensors[0].device)
        try:
            noted = note(LAUNCHES[self.op], args, gpu, _compiled)
            self.kernels.update(noted.kernels)
            library.note(self.site, handles_of(tensors), args, noted.plan, noted.names)
        except Exception as error:  # noqa: BLE001  (a kernel that is called in another way, say)
            lost(f"{BY_PYTHON}: {self.op}", error, warn=True)
            self.library = False


# -- what is noted ----


class Noted(NamedTuple):
    plan: bytes  # as replay.cpp's Plan reads it
    names: tuple[str, ...]  # of the kernels, in the order of their launches
    kernels: tuple


NUMBER, POINTER, DESCRIPTOR = range(3)


def note(launch: Callable, given: tuple, gpu: gpus.Gpu, compile: Callable) -> Noted:
    """What ``launch(run, gpu, *given)`` does, of one of LAUNCHES.

    given: in the order in which replay.cpp gets them; tensors at addresses that 16 divides.
    compile: of the arguments of a launch, Triton's CompiledKernel, loaded. Raises
    NotImplementedError for an output that is not the launches' own.
    """
    tensors, noted, launches, names, kernels = _Tensors(), [], [], [], []
    given = [tensors.given(x) if isinstance(x, Tensor) else x for x in given]

    def run(kernel, grid: tuple, of: tuple, numbers: tuple, **options):
        noted.append((kernel, grid, of, numbers, options))

    found = launch(run, gpu, *given) or ()  # all tensors are kept: no storage takes another's place
    outputs = [tensors.output(x) for x in found]
    for kernel, grid, of, numbers, options in noted:
        compilation = describe(kernel, (*of, *numbers), options)
        compiled = compile(kernel, grid, of, numbers, options)
        how = launched_as(compilation, compiled)
        descriptors, arguments = iter(how.descriptors), []
        for x, kind in zip((*of, *numbers), compilation.types, strict=True):
            if kind == "constexpr":
                continue
            if hasattr(x, "block_shape"):
                swizzle, size, element, box = next(descriptors)
                of_base = *tensors.pointer(x.base), swizzle, size, element
                lists = itertools.chain(*map(_many, (box, x.shape, x.strides)))
                arguments.append([DESCRIPTOR, *of_base, *lists])
            elif isinstance(x, Tensor):
                arguments.append([POINTER, *tensors.pointer(x)])
            else:
                arguments.append([NUMBER, x])
        kernels.append(compiled)
        names.append(compiled.metadata.name)
        launches.append(
            [compiled.function, how.threads, how.shared, how.overlaps, *_many((*grid, 1, 1)[:3]),
             *_all(arguments)]
        )  # fmt: skip
    major, minor = gpu.capability
    plan = [10 * major + minor, *_all(tensors.made()), *_all(launches), *_all(outputs)]
    return Noted(array.array("q", plan).tobytes(), tuple(names), tuple(kernels))


class _Tensors:
    """Tensors without memory, and where replay.cpp has each: those given, the outputs, and one that
    all others share."""

    def __init__(self):
        self.places: dict[int, tuple[int, int]] = {}  # of a storage: which tensor, from which byte
        self.count = 0  # of those given and the outputs
        self.outputs: list[list[int]] = []  # what is made
        self.shared = 0  # bytes

    def given(self, x: Tensor) -> Tensor:
        like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        self._place(like, self.count)
        self.count += 1
        return like

    def output(self, x: Tensor) -> list[int]:
        """After the given ones, before any `pointer`."""
        if self._storage(x) in self.places or x.storage_offset():
            raise NotImplementedError("an output that is a view of another tensor")
        whole = x.stride() == x.new_empty(x.shape).stride()
        shape = x.shape if whole else (x.untyped_storage().nbytes() // x.element_size(),)
        self.outputs.append([_number_of(x.dtype), *_many(shape)])
        self._place(x, self.count)
        self.count += 1
        return [self.count - 1, whole, *_many(x.shape), *_many(x.stride())]

    def pointer(self, x: Tensor) -> tuple[int, int]:
        """From which byte, and of which tensor."""
        if self._storage(x) not in self.places:
            self._place(x, self.count, self.shared)
            self.shared += x.untyped_storage().nbytes() + 255 & ~255  # as torch aligns memory
        number, byte = self.places[self._storage(x)]
        return byte + x.storage_offset() * x.element_size(), number

    @staticmethod
    def _storage(x: Tensor) -> int:
        return x.untyped_storage()._cdata

    def _place(self, x: Tensor, number: int, byte: int = 0) -> None:
        self.places[self._storage(x)] = number, byte

    def made(self) -> list[list[int]]:
        shared = [_number_of(torch.uint8), 1, self.shared]
        return [*self.outputs, shared] if self.shared else self.outputs


def _many(numbers: Iterable[int]) -> list[int]:
    """As Reader::many of replay.cpp reads them."""
    return [len(found := list(numbers)), *found]


def _all(rows: list[list[int]]) -> list[int]:
    return [len(rows), *itertools.chain(*rows)]


@functools.cache
def _number_of(dtype: torch.dtype) -> int:
    """Torch's, in C++."""
    name = str(dtype).removeprefix("torch.")
    return getattr(ctypes.CDLL(compat.c_functions), f"aoti_torch_dtype_{name}")()


def _compiled(kernel, grid: tuple, tensors: tuple, numbers: tuple, options: dict):
    """As ops/launch.py launches it, of tensors at addresses that are multiples of 16."""
    kinds = (x.dtype if isinstance(x, Tensor) else x for x in tensors)
    compiled = kernel.warmup(*kinds, *numbers, grid=grid, **options, **FP_FUSION)
    compiled[(1, 1, 1)]  # loads it
    return compiled


# -- replay.cpp ----


@functools.cache
def library() -> concurrent.futures.Future:
    """replay.cpp as a module of Python, from Triton's cache where it is there. `why_python` says
    what the compiler or the loader raised."""
    # A program that ends before waits for it, once. In a forked child it never comes.
    return concurrent.futures.ThreadPoolExecutor(1, "sage-replay").submit(_load)


def why_python() -> str:
    """Why replay.cpp is not there; nothing where it is. Waits for its compilation."""
    if handles_of is None:
        return f"torch {torch.__version__} does not let C++ take tensors"
    error = library().exception()
    return f"replay.cpp did not compile, set CC to a C++ compiler ({error})" if error else ""


def _load():
    of = (SOURCE.read_text(), HEADER.read_text(), torch.__version__, triton.__version__)
    cache = compat.cache_manager(hashlib.sha256("\0".join(of).encode()).hexdigest())
    name = "sage_replay"
    file = name + sysconfig.get_config_var("EXT_SUFFIX")
    path = cache.get_file(file)
    if path is None:
        with tempfile.TemporaryDirectory() as folder:
            libraries = ["torch_cuda", "torch_cpu", "libcuda.so.1"]
            built = Path(build(folder, libraries, compat.cuda_library_dirs()))
            path = cache.put(built.read_bytes(), file, binary=True)
    return compat.load_module(name, path)


def build(folder: str, libraries: list[str], where: list[str]) -> str:
    """Compile replay.cpp. libraries: torch's C functions and the driver's."""
    of_torch, of_triton = Path(torch.__file__).parent, Path(triton.__file__).parent
    return compat.triton_build(
        "sage_replay", str(SOURCE), folder, [str(of_torch / "lib"), *where],
        [str(of_torch / "include"), str(of_triton / "backends/nvidia/include")],
        ["stdc++", *libraries], ["-std=c++17"],
    )  # fmt: skip
