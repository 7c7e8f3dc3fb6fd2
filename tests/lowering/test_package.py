"""What a package launches, without a GPU: the C++ that `record` writes, compiled with a driver that
writes down what it is asked (fake_driver.h), against the Python that it was written of."""

import ctypes
import dataclasses
import functools
import json
import math
import random
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import triton

from sage_inductor.lowering import package
from sage_inductor.lowering.number import Facts, Number
from sage_inductor.lowering.record import Recorded, TensorArgument, record
from sage_inductor.ops.attention import tiles
from sage_inductor.ops.attention.arguments import AttentionCall
from sage_inductor.ops.formats import pad_head_dim
from sage_inductor.ops.recipe import NAMED
from sage_inductor.ops.visibility import num_tiles

H200 = tiles.Gpu((9, 0), 132)
PROCESSORS = 132, 1, 78, 114  # of the fake driver's devices
KINDS = {torch.uint8: 0, torch.int8: 1, torch.int32: 3, torch.float16: 5, torch.float32: 6,
         torch.bool: 11, torch.bfloat16: 15, torch.float8_e4m3fn: 24}  # fmt: skip
TMA = {
    "i8": (1, 0),
    "fp8e4nv": (1, 0),
    "bf16": (2, 9),
    "fp16": (2, 6),
}  # bytes, CUtensorMapDataType
ALIGNED, SHARED = 1 << 44, 100_000  # an address; bytes of shared memory of every kernel


# -- C++ with the fake driver ----


def fake_kernel(digest: str, compilation) -> str:
    descriptors = []
    for each in compilation.types:
        if found := re.match(r"tensordesc<(\w+)\[([\d, ]+)\]", each):
            size, kind = TMA[found[1]]
            descriptors.append((3, size, kind, [int(n) for n in found[2].split(",")]))
    options = dict(compilation.options)
    image = " ".join(map(str, [digest, *compilation.parameters])).encode()
    return package.kernel_definition(
        digest, f"name_{digest}", image, 32 * options.get("num_warps", 4), SHARED,
        options.get("launch_pdl", False), descriptors,
    )  # fmt: skip


class Library:
    """C++ functions, as Python calls them."""

    def __init__(self, folder: Path, functions: dict[str, Recorded], edit=lambda text: text):
        self.functions = functions
        self.compilations = {d: c for f in functions.values() for d, c in f.compilations.items()}
        text = '#include "fake_driver.h"\n' + package.HEADER.read_text()
        text += "namespace sage_inductor {\nnamespace {\n"
        text += "".join(fake_kernel(d, c) for d, c in self.compilations.items())
        text += "".join(f.source for f in functions.values()) + "}\n}\n"
        for name, f in functions.items():
            head = re.search(rf"{name}\((.*?)\) {{", f.source, re.DOTALL)[1]
            counts = [
                len(re.findall(kind, head)) for kind in (r"Handle \w", "int64_t", r"Handle\*")
            ]
            of = (
                [f"(AtenTensorHandle)tensors[{i}]" for i in range(counts[0])]
                + [f"numbers[{i}]" for i in range(counts[1])]
                + [f"(AtenTensorHandle*)&outputs[{i}]" for i in range(counts[2])]
            )
            text += f'extern "C" const char* call_{name}(void** tensors, const int64_t* numbers, void** outputs) {{\n'
            text += (
                f"  return failure([&] {{ return sage_inductor::{name}({', '.join(of)}); }});\n}}\n"
            )
        (folder / "test.cpp").write_text(edit(text))
        includes = [Path(__file__).parent, Path(torch.__file__).parent / "include",
                    Path(triton.__file__).parent / "backends/nvidia/include"]  # fmt: skip
        subprocess.run(
            ["g++", "-std=c++20", "-O0", "-Wall", "-Werror", "-Wno-unused-variable", "-shared", "-fPIC",
             "-Wl,-Bsymbolic", *(f"-I{x}" for x in includes), "test.cpp", "-o", "test.so"],
            check=True, cwd=folder,
        )  # fmt: skip
        self.cpp = ctypes.CDLL(str(folder / "test.so"))
        self.cpp.new_tensor.restype = ctypes.c_void_p
        self.cpp.taken.restype = ctypes.c_char_p
        for name in functions:
            getattr(self.cpp, f"call_{name}").restype = ctypes.c_char_p

    def set(self, name: str, value: int) -> None:
        ctypes.c_int.in_dll(self.cpp, name).value = value

    def tensor(self, x: "Tensor", address: int, device: int = 0) -> ctypes.c_void_p:
        many = ctypes.c_int64 * len(x.shape)
        return ctypes.c_void_p(
            self.cpp.new_tensor(
                ctypes.c_int64(address), ctypes.c_int64(len(x.shape)), many(*x.shape),
                many(*x.strides), KINDS[x.dtype], device,
            )
        )  # fmt: skip

    def call(self, name: str, arguments: dict, device: int = 0, moved: dict | None = None) -> list:
        """What was written down. Raises RuntimeError with its message. The tensors, in their
        order, are at ALIGNED, 2 * ALIGNED and so on; moved: bytes that one begins later."""
        taken = self.functions[name].source.split("{")[0]
        tensors = [
            self.tensor(x, (i + 1) * ALIGNED + (moved or {}).get(each, 0), device)
            for i, (each, x) in enumerate((k, x) for k, x in arguments.items() if type(x) is Tensor)
        ]
        numbers = [x for k, x in arguments.items() if f"int64_t {k}" in taken]
        outputs = (ctypes.c_void_p * 8)()
        self.set("current", device)
        error = getattr(self.cpp, f"call_{name}")(
            (ctypes.c_void_p * len(tensors))(*tensors), (ctypes.c_int64 * len(numbers))(*numbers),
            outputs,
        )  # fmt: skip
        for x in tensors:
            self.cpp.aoti_torch_delete_tensor_object(x)
        if error:
            self.cpp.taken(None, 0)
            raise RuntimeError(error.decode())
        text = self.cpp.taken(outputs, sum(x is not None for x in outputs)).decode()
        assert self.cpp.live() == 0
        return [json.loads(line) for line in text.splitlines()]

    def plan(self, name: str, arguments: dict, device: int = 0) -> tuple["Plan", set]:
        """And the digests of what was launched."""
        written = self.call(name, arguments, device)
        inputs = (k for k, x in arguments.items() if type(x) is Tensor)
        label = Labels({(i + 1) * ALIGNED: each for i, each in enumerate(inputs)})
        launches = []
        for line in (x for x in written if "launch" in x):
            compilation = self.compilations[line["launch"]]
            options = dict(compilation.options)
            assert line["block"] == [32 * options.get("num_warps", 4), 1, 1]
            assert line["overlaps"] == options.get("launch_pdl", False)
            assert (line["shared"], line["stream"]) == (SHARED, 7000 + device)
            values = read_arguments(compilation, line["arguments"], label)
            launches.append((compilation.kernel, tuple(line["grid"]), values, options))
        outputs = [
            (label(x["address"]), x["sizes"], x["strides"], x["dtype"])
            for x in written
            if "output" in x
        ]
        made = {
            label(x["made"]): (math.prod(x["sizes"]), x["dtype"])
            for x in written
            if x.get("made") in label.seen
        }
        assert all(x["device"] == device for x in written if "made" in x)
        return Plan(launches, outputs, made), {x["launch"] for x in written if "launch" in x}


class Plan(NamedTuple):
    """What a call launches and gives. Tensors have their arguments' names, or made0 and so on."""

    launches: list  # (kernel, grid, arguments, options)
    outputs: list  # (tensor, shape, strides, dtype)
    made: dict  # elements and dtype of each


class Labels:
    """Names of tensors by their addresses; of those without a name, in the order of their use."""

    def __init__(self, seen: dict):
        self.seen = seen

    def __call__(self, address) -> str:
        made = sum(x.startswith("made") for x in self.seen.values())
        return self.seen.setdefault(address, f"made{made}")


def read_arguments(compilation, given: list, label: Labels) -> list:
    """A kernel's arguments, of what the driver was given and what is compiled in."""
    given, constants, found = iter(given), dict(compilation.constants), []
    for i, kind in enumerate(compilation.types):
        if kind == "constexpr":
            found.append(constants[i])
        elif kind.startswith("tensordesc"):
            block = [int(n) for n in re.search(r"\[([\d, ]+)\]", kind)[1].split(",")]
            map, rank, (size, number) = next(given), len(block), TMA[re.search(r"<(\w+)", kind)[1]]
            shape, strides = ([next(given) for _ in block] for _ in range(2))
            assert map["sizes"] == shape[::-1] and map["box"] == block[::-1]
            assert map["steps"] == [size * n for n in strides[-2::-1]]
            assert (map["type"], map["swizzle"], map["others"]) == (number, 3, [0, 2, 0])
            assert map["element_steps"] == [1] * rank
            assert all(n % 16 == 0 for n in (map["address"], *map["steps"]))
            found.append((label(map["address"]), shape, strides, block))
        else:
            x = next(given)
            assert x % 16 == 0 or i not in compilation.aligned
            found.append(label(x) if kind.startswith("*") else x)
    assert list(given) == [0, 0]  # scratch memory
    return found


# -- the same in Python ----


class Tensor(NamedTuple):
    dtype: torch.dtype
    shape: tuple
    strides: tuple


def planned(launch, arguments: dict, processors: int) -> Plan:
    """The plan of an op's launch function, on tensors without memory."""
    kept, launches, sizes = [], [], {}

    def run(kernel, grid, tensors, numbers, **options):
        values = [describe(x) for x in (*tensors, *numbers)]
        launches.append((kernel, (*grid, 1, 1)[:3], values, options))

    def describe(x):
        if hasattr(x, "block_shape"):
            return describe(x.base), list(x.shape), list(x.strides), list(x.block_shape)
        if not isinstance(x, torch.Tensor):
            return x
        storage = x.untyped_storage()
        kept.append(storage)
        name = label(storage._cdata)
        sizes[name] = storage.nbytes() // x.element_size(), KINDS[x.dtype]
        return name

    given = {
        k: torch.empty_strided(x.shape, x.strides, dtype=x.dtype, device="meta")
        if type(x) is Tensor
        else x
        for k, x in arguments.items()
    }
    label = Labels(
        {x.untyped_storage()._cdata: k for k, x in given.items() if isinstance(x, torch.Tensor)}
    )
    found = launch(given, run, H200._replace(processors=processors))
    outputs = [(describe(x), list(x.shape), list(x.stride()), KINDS[x.dtype]) for x in found]
    made = {name: size for name, size in sizes.items() if name.startswith("made")}
    return Plan(launches, outputs, made)


# -- calls: known sizes are Facts of one number, the others are drawn ----


def tensor(dtype: torch.dtype, shape: tuple, strides: tuple) -> TensorArgument:
    """As far as Inductor would know it."""
    shape, strides = (
        tuple(
            x if x.low == x.high else dataclasses.replace(x, divisor=math.gcd(x.divisor, 16))
            for x in each
        )
        for each in (shape, strides)
    )
    return TensorArgument(dtype, shape, strides)


def known(arguments: dict) -> dict:
    """Arguments of which all is known."""

    def of(x):
        if isinstance(x, TensorArgument):
            return Tensor(x.dtype, *(tuple(n.low for n in each) for each in (x.shape, x.strides)))
        return x.low if isinstance(x, Facts) else x

    return {name: of(x) for name, x in arguments.items()}


def strides(layout: str, shape: tuple) -> tuple:
    """Of [B, H, N, D]."""
    _, H, N, D = shape
    one, two, three = map(Facts.of, (1, 2, 3))
    if layout == "apart":
        return (*APART, one)
    return {
        "bhnd": (H * N * D, N * D, D, one),
        "bnhd": (N * H * D, D, H * D, one),
        "chunked": (N * three * H * D, D, three * H * D, one),  # of x[:, :, i] of [B, N, 3, H, D]
        "unaligned": (N * H * D + one, D, H * D, one),
        "every_other": (N * H * D * two, D * two, H * D * two, two),  # of 2 D channels
    }[layout]


APART = [Facts(16, math.inf, 16)] * 3  # while recording; then multiples of 16 beyond 2^31, too


def contiguous(dtype: torch.dtype, *shape: Facts):
    found = [Facts.of(1)]
    for n in shape[:0:-1]:
        found.insert(0, found[0] * n)
    return tensor(dtype, shape, tuple(found))


def attention(
    B: Facts, N_q: Facts, N_kv: Facts, recipe: str, D: int, heads=(16, 16), D_v: int | None = None,
    dtype=torch.bfloat16, q="bnhd", v="bnhd", mask: str | None = None, **given,
) -> dict:  # fmt: skip
    """The arguments of attention_opaque."""
    r, f = NAMED[recipe], Facts.of
    H_q, H_kv = map(f, heads)
    D_v = D_v or D
    N_pad = (N_kv + f(127)) // f(128) * f(128)
    shape = B, H_q, N_q, f(D)
    groups = f(r.sharing.k_groups)
    k = contiguous(torch.int8, B, H_kv, N_pad, f(pad_head_dim(D)))
    k_scale = contiguous(torch.float32, B, H_kv, N_pad // f(64), groups)
    v_scale = v_mean = attn_mask = tile_summary = None
    if r.pv == "fp8":
        codes = contiguous(torch.float8_e4m3fn, B, H_kv, f(pad_head_dim(D_v)), N_pad)
        v_scale = v_mean = contiguous(torch.float32, B, H_kv, f(D_v))
    else:
        of_v = B, H_kv, N_kv, f(D_v)
        codes = tensor(dtype, of_v, strides(v, of_v))
    if mask:
        block_m = f(tiles.tile((9, 0), r.qk, r.pv, max(D, D_v), True).BLOCK_M)
        rows = (N_q + f(2) * block_m - f(1)) // block_m
        one = f(1)
        of, dtype_of, seen = {
            "keys": ((B, one, one, N_kv), torch.bool, (B, one, one, N_kv)),
            "rows": ((one, one, N_q, N_kv), torch.bool, (one, one, rows, N_kv)),
            "bias": ((B, H_q, N_q, N_kv), dtype, (B, H_q, rows, N_kv)),
        }[mask]
        attn_mask = contiguous(dtype_of, *of)
        tile_summary = contiguous(torch.uint8, *seen)
    call = AttentionCall(
        tensor(dtype, shape, strides(q, shape)), k, k_scale, codes, D**-0.5,
        N_kv, r.encode(), v_scale=v_scale, v_mean=v_mean,
        attn_mask=attn_mask, tile_summary=tile_summary, **given,
    )  # fmt: skip
    return call._asdict()


def quantize(
    B: Facts, N_q: Facts, N_kv: Facts, D: int, D_v: int | None = None, heads: int = 16,
    layout: str = "bnhd", visible: str | None = None, dtype=torch.bfloat16,
) -> dict:  # fmt: skip
    """The arguments of quantize_kv_opaque. D_v 0: k alone."""
    f, one = Facts.of, Facts.of(1)
    k, v = ((B, f(heads), N_kv, f(n)) for n in (D, D if D_v is None else D_v))
    shown = {"batch": (B, one, N_kv), "one": (one, one, N_kv), "all": (B, f(heads), N_kv)}
    return {
        "k": tensor(dtype, k, strides(layout, k)),
        "v": None if D_v == 0 else tensor(dtype, v, strides(layout, v)),
        "visible": contiguous(torch.uint8, *shown[visible]) if visible else None,
        "recipe": NAMED["sage2-8b-per-token"].encode(),
    }


ANY, SHORT = Facts(1, math.inf), Facts(1, 32768)
FP8, BITS16 = "sage2-8b-per-token", "sage1-per-token"
CAUSAL = {"right": 0}
ATTENTION = {  # name -> B, N, the others of `attention`
    "full": (Facts(1, 64), SHORT, dict(recipe=FP8, D=128, out_bnhd=True)),
    "one_batch": (Facts.of(1), SHORT, dict(recipe=FP8, D=128, q="bhnd")),
    "causal": (Facts(1, 64), ANY, dict(recipe=FP8, D=128, heads=(32, 8), q="chunked", **CAUSAL)),
    "far": (Facts(1, 64), ANY, dict(recipe=FP8, D=128, q="apart", out_bnhd=True, dtype=torch.float16)),
    "d64": (Facts.of(2), SHORT, dict(recipe=FP8, D=64, q="chunked", out_bnhd=True)),
    "d64_causal": (Facts(1, 64), SHORT, dict(recipe=FP8, D=64, heads=(9, 3), **CAUSAL)),
    "d72": (Facts(1, 64), SHORT, dict(recipe=FP8, D=72, heads=(5, 5), out_bnhd=True)),
    "d256": (Facts.of(1), ANY, dict(recipe=FP8, D=256, heads=(8, 4), **CAUSAL)),
    "d256_full": (Facts(1, 64), SHORT, dict(recipe=FP8, D=256, heads=(4, 4), out_bnhd=True)),
    "d_v": (Facts(1, 64), SHORT, dict(recipe=FP8, D=128, D_v=64)),
    "every_other": (Facts(1, 64), SHORT, dict(recipe=FP8, D=128, q="every_other")),
    "two_groups": (Facts(1, 64), SHORT, dict(recipe=FP8, D=128, warpgroups=2)),
    "portable": (Facts(1, 64), SHORT, dict(recipe=FP8, D=128, warpgroups=0, out_bnhd=True)),
    "b16": (Facts(1, 64), SHORT, dict(recipe=BITS16, D=128, v="chunked", out_bnhd=True)),
    "b16_causal": (Facts(1, 64), SHORT, dict(recipe=BITS16, D=64, heads=(32, 8), v="apart", **CAUSAL)),
    "b16_unaligned": (Facts(1, 64), SHORT, dict(recipe=BITS16, D=64, v="unaligned")),
    "b16_72": (Facts(1, 64), SHORT, dict(recipe=BITS16, D=72, heads=(5, 5), dtype=torch.float16)),
    "keys": (Facts(1, 64), SHORT, dict(recipe=FP8, D=128, mask="keys", out_bnhd=True)),
    "rows": (Facts.of(2), SHORT, dict(recipe=FP8, D=64, mask="rows")),
    "bias": (Facts(1, 64), SHORT, dict(recipe=FP8, D=128, mask="bias", q="chunked")),
    "window": (Facts(1, 64), SHORT, dict(recipe=FP8, D=128, left=1024, right=0, out_bnhd=True)),
    "band": (Facts(1, 64), SHORT, dict(recipe="sage2-8b", D=64, left=5, right=7, bottom_right=True)),
}  # fmt: skip
QUANTIZE = {
    "kv": (Facts(1, 64), SHORT, dict(D=128)),
    "kv_far": (Facts(1, 64), ANY, dict(D=128, layout="apart")),
    "kv_72": (Facts(1, 64), SHORT, dict(D=72, D_v=64, heads=5, layout="chunked")),
    "kv_256": (Facts.of(1), ANY, dict(D=256, layout="bhnd", dtype=torch.float16)),
    "k": (Facts(1, 64), SHORT, dict(D=64, D_v=0)),
    "kv_batch": (Facts(1, 64), SHORT, dict(D=128, visible="batch")),
    "kv_one": (Facts(1, 64), SHORT, dict(D=128, visible="one", layout="every_other")),
    "kv_all": (Facts.of(2), SHORT, dict(D=64, visible="all")),
    "k_batch": (Facts(1, 64), SHORT, dict(D=128, D_v=0, visible="batch")),
}
_HOPPER, _PORTABLE, _SPLIT = "_hopper_kernel", "_attention_kernel", "_combine_kernel"
KERNELS = {
    **dict.fromkeys(["causal", "d256", "b16_causal"], {_HOPPER}),
    **dict.fromkeys(
        ["every_other", "portable", "keys", "rows", "bias", "window", "band"], {_PORTABLE}
    ),
    "d64_causal": {_HOPPER, _PORTABLE},
    **dict.fromkeys(["d64", "b16_unaligned"], {_HOPPER, _PORTABLE, _SPLIT}),
    **dict.fromkeys(
        ["full", "one_batch", "far", "d72", "d256_full", "d_v", "two_groups", "b16", "b16_72"],
        {_HOPPER, _SPLIT},
    ),
    **dict.fromkeys(["k", "k_batch"], {"_estimate_kernel", "_quantize_k_kernel"}),
    **dict.fromkeys(
        ["kv", "kv_far", "kv_72", "kv_256", "kv_batch", "kv_one", "kv_all"],
        {"_estimate_kernel", "_quantize_kv_kernel", "quantize_v_again_kernel"},
    ),
}
LENGTHS = 1, 2, 5, 77, 128, 1000, 1535, 1536, 3071, 3072, 4096, 12345


def arguments(name: str, *sizes: Facts) -> dict:
    of = attention if name in ATTENTION else quantize
    return of(*sizes, **(ATTENTION | QUANTIZE)[name][2])


def launch_of(name: str):
    return package.attention if name in ATTENTION else package.quantize_kv


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    functions = {
        name: record(name, launch_of(name), arguments(name, B, N, N), H200)
        for name, (B, N, _) in (ATTENTION | QUANTIZE).items()
    }
    return Library(tmp_path_factory.mktemp("library"), functions)


def drawn(name: str, rng: random.Random) -> tuple[dict, int]:
    """Arguments, and a device."""
    B, _, options = (ATTENTION | QUANTIZE)[name]
    least = 2 if "mask" in options else 1  # of 1, Python's mask has other strides: see below
    lengths = LENGTHS[least - 1 :]
    N_q = rng.choice(lengths) if rng.random() < 0.8 else rng.randint(2, 9000)
    N_kv = N_q if rng.random() < 0.6 else rng.choice(lengths)
    B = B.low if B.low == B.high else rng.choice((1, 2, 3, 17)[least - 1 :])
    return known(arguments(name, *map(Facts.of, (B, N_q, N_kv)))), rng.randrange(len(PROCESSORS))


# -- equal ----


@pytest.mark.parametrize("name", [*ATTENTION, *QUANTIZE])
def test_cpp_launches_what_python_launches(name, library, monkeypatch):
    rng, reached = random.Random(name), set()
    for _ in range(200):
        far = [Facts.of(16 * rng.randrange(1, 2**30)) for _ in range(3)]
        monkeypatch.setattr(sys.modules[__name__], "APART", far)
        given, device = drawn(name, rng)
        plan, digests = library.plan(name, given, device)
        assert plan == planned(launch_of(name), given, PROCESSORS[device])
        reached |= digests
    of = library.functions[name].compilations
    assert reached == of.keys()
    assert {of[digest].kernel.__name__ for digest in reached} == KERNELS[name]


@pytest.mark.parametrize("name", ["keys", "rows", "bias"])
def test_a_mask_of_one_query_is_read_as_that_of_many(name, library):
    """As the graph around was traced, which makes a summary of many queries."""
    B = ATTENTION[name][0].low
    given = known(arguments(name, *map(Facts.of, (B, 1, 1))))
    (of_one,), _, _ = library.plan(name, given)[0]
    many = known(arguments(name, *map(Facts.of, (B, 2, 2))))
    (of_many,), _, _ = library.plan(name, many)[0]
    names = of_one[0].arg_names
    of_one, of_many = (dict(zip(names, each[2])) for each in (of_one, of_many))
    assert of_one["MASK"] == of_many["MASK"] == (1 if name == "keys" else 2)
    strides = given["attn_mask"].strides
    assert [of_one[f"stride_m{n}"] for n in "bhmn"][-2:] == [0 if name == "keys" else strides[2], 1]
