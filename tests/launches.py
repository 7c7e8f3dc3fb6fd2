"""Calls of the ops of kernels, as their Python plans them and as fake_driver.h writes them down."""

import ctypes
import dataclasses
import json
import math
import random
import re
import subprocess
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from noted import H200

from sage_inductor.lowering.number import Facts
from sage_inductor.lowering.record import TensorArgument
from sage_inductor.ops.attention import tiles
from sage_inductor.ops.attention_call import AttentionCall
from sage_inductor.ops.compile import Compilation
from sage_inductor.ops.decode_call import MAX_QUERIES, DecodeCall
from sage_inductor.ops.formats import pad_head_dim
from sage_inductor.ops.recipe import NAMED
from sage_inductor.ops.register import LAUNCHES
from sage_inductor.ops.visibility import BlockLists

FP8, BITS16 = "sage2-8b-per-token", "sage1-per-token"
PROCESSORS = 132, 1, 78, 114  # of the fake driver's devices
KINDS = {torch.uint8: 0, torch.int8: 1, torch.int32: 3, torch.int64: 4, torch.float16: 5, torch.float32: 6,
         torch.bool: 11, torch.bfloat16: 15, torch.float8_e4m3fn: 24}  # fmt: skip
TMA = {
    "i8": (1, 0),
    "fp8e4nv": (1, 0),
    "bf16": (2, 9),
    "fp16": (2, 6),
    "fp32": (4, 7),
}  # bytes, CUtensorMapDataType
ALIGNED, SHARED = 1 << 44, 100_000  # an address; bytes of shared memory of every kernel

# -- C++ with the fake driver ----


def image_of(digest: str, compilation: Compilation) -> bytes:
    """What the fake driver reads of a kernel: the bytes of each parameter."""
    return " ".join(map(str, [digest, *compilation.parameters])).encode()


def descriptors_of(compilation: Compilation) -> list:
    """Of each: swizzle, bytes of an element, its CUtensorMapDataType, the box."""
    found = []
    for each in compilation.types:
        if of := re.match(r"tensordesc<(\w+)\[([\d, ]+)\]", each):
            found.append((3, *TMA[of[1]], [int(n) for n in of[2].split(",")]))
    return found


def build(source: Path, *flags: str) -> Path:
    """A shared library of C++ that includes fake_driver.h."""
    includes = [Path(__file__).parent / "lowering", Path(torch.__file__).parent / "include",
                Path(triton.__file__).parent / "backends/nvidia/include",
                Path(sysconfig.get_paths()["include"])]  # fmt: skip
    subprocess.run(
        ["g++", "-std=c++20", "-O0", "-Wall", "-Werror", "-Wno-unused-variable", "-shared", "-fPIC",
         "-Wl,-Bsymbolic", *(f"-I{x}" for x in includes), source, "-o", source.with_suffix(".so"),
         *flags],
        check=True,
    )  # fmt: skip
    return source.with_suffix(".so")


class Plan(NamedTuple):
    """What a call launches and gives. Tensors have their arguments' names, or made0 and so on."""

    launches: list  # (kernel, grid, arguments, options)
    outputs: list  # (tensor, shape, strides, dtype)
    made: dict  # elements and dtype of each
    views: dict = {}  # those that begin inside another: which, and from which byte


class Labels:
    """Names of tensors by their addresses; of those without a name, in the order of their use. A
    part of a tensor that does not begin where the tensor does has a name of its own."""

    def __init__(self, seen: dict):
        self.seen = seen

    def __call__(self, address) -> str:
        made = sum(x.startswith("made") for x in self.seen.values())
        return self.seen.setdefault(address, f"made{made}")


class Cpp:
    """A library with the fake driver. The tensors of a call are at ALIGNED, 2 * ALIGNED and so on."""

    def __init__(self, path: Path):
        self.path, self.cpp = path, ctypes.CDLL(str(path))
        self.cpp.new_tensor.restype = ctypes.c_void_p
        self.cpp.taken.restype = ctypes.c_char_p
        self.compilations: dict[str, Compilation] = {}  # by their digests

    def set(self, name: str, value: int) -> None:
        ctypes.c_int.in_dll(self.cpp, name).value = value

    def tensors(self, given: dict, device: int = 0, moved: dict | None = None) -> list[int]:
        """moved: bytes that a tensor begins later."""
        found = []
        for i, (name, x) in enumerate((k, x) for k, x in given.items() if type(x) is Tensor):
            many = ctypes.c_int64 * len(x.shape)
            address = (i + 1) * ALIGNED + (moved or {}).get(name, 0)
            found.append(self.cpp.new_tensor(
                ctypes.c_int64(address), ctypes.c_int64(len(x.shape)), many(*x.shape),
                many(*x.strides), KINDS[x.dtype], device,
            ))  # fmt: skip
        return found

    def written(self, outputs: Sequence[int] = ()) -> list[dict]:
        """What the driver was asked since. The outputs are written down and freed."""
        text = self.cpp.taken((ctypes.c_void_p * 16)(*outputs), len(outputs)).decode()
        return [json.loads(line) for line in text.splitlines()]

    def launches_of(self, written: list[dict], label: "Labels", device: int = 0) -> list[tuple]:
        """Plan.launches."""
        found = []
        for line in (x for x in written if "launch" in x):
            compilation = self.compilations[line["launch"]]
            options = dict(compilation.options)
            assert line["block"] == [32 * options.get("num_warps", 4), 1, 1]
            assert line["overlaps"] == options.get("launch_pdl", False)
            assert (line["shared"], line["stream"]) == (SHARED, 7000 + device)
            values = read_arguments(compilation, line["arguments"], label)
            found.append((compilation.kernel, tuple(line["grid"]), values, options))
        return found

    def plan_of(self, given: dict, written: list[dict], device: int) -> tuple["Plan", "Labels"]:
        assert self.cpp.live() == 0
        assert all(x["device"] == device for x in written if "made" in x)
        inputs = (k for k, x in given.items() if type(x) is Tensor)
        label = Labels({(i + 1) * ALIGNED: each for i, each in enumerate(inputs)})
        launches = self.launches_of(written, label, device)
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
        return Plan(launches, outputs, made), label


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


def like(given: dict) -> dict:
    """The same with torch's tensors, without memory."""
    return {
        k: torch.empty_strided(x.shape, x.strides, dtype=x.dtype, device="meta")
        if type(x) is Tensor
        else x
        for k, x in given.items()
    }


def planned(launch: Callable, arguments: dict, processors: int) -> Plan:
    """The plan of an op's launch function, on tensors without memory."""
    kept, launches, sizes, views = [], [], {}, {}

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
        if offset := x.storage_offset():
            name = label((storage._cdata, offset))
            views[name] = storage._cdata, offset * x.element_size()
            return name
        name = label(storage._cdata)
        sizes[name] = storage.nbytes() // x.element_size(), KINDS[x.dtype]
        return name

    given = like(arguments)
    label = Labels(
        {x.untyped_storage()._cdata: k for k, x in given.items() if isinstance(x, torch.Tensor)}
    )
    found = launch(run, H200._replace(processors=processors), *given.values())
    outputs = [(describe(x), list(x.shape), list(x.stride()), KINDS[x.dtype]) for x in found or ()]
    made = {name: size for name, size in sizes.items() if name.startswith("made")}
    views = {name: (label.seen.get(of), byte) for name, (of, byte) in views.items()}
    return Plan(launches, outputs, made, views)


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
        "repeated": (Facts.of(0), D, H * D, one),  # for each of a batch
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
    dtype=torch.bfloat16, q="bnhd", v="bnhd", mask: str | None = None,
    lists: tuple = (), prepared: bool = True, ordered: bool = False, packed: bool = False, **given,
) -> dict:  # fmt: skip
    """The arguments of attention. lists: of blocks of 128, for each head or for all. prepared: k and
    v are. ordered: with an order of tokens."""
    r, f, (T_q, T_kv) = NAMED[recipe], Facts.of, (N_q, N_kv)
    if packed:
        N_q = N_kv = (T_q + f(127)) // f(128) * f(128) + f(512)
    H_q, H_kv = map(f, heads)
    D_v = D_v or D
    N_pad = (N_kv + f(127)) // f(128) * f(128)
    shape = B, H_q, N_q, f(D)
    groups = f(r.sharing.k_groups)
    width = f(pad_head_dim(D))
    k = contiguous(r.of_qk.dtype, B, H_kv, N_pad, width // f(r.of_qk.packed))
    k_scale = contiguous(torch.float32, B, H_kv, N_pad // f(64), groups)
    v_scale = v_mean = attn_mask = tile_summary = None
    if r.of_qk.smooths_q:
        count = (N_q + f(255)) // f(128)
        for name, n in ("q_mean", f(D)), ("delta", N_pad):
            given[name] = contiguous(torch.bfloat16, B, H_q, count, n)
    if r.pv == "nvfp4":
        k_scale = contiguous(torch.float32, B, H_kv)
        of_v = f(pad_head_dim(D_v))
        codes = contiguous(torch.uint8, B, H_kv, of_v, N_pad // f(2))
        given["k_blocks"] = contiguous(torch.uint8, B, H_kv, N_pad, width // f(16))
        given["v_blocks"] = contiguous(torch.uint8, B, H_kv, of_v, N_pad // f(16))
        v_scale = v_mean = contiguous(torch.float32, B, H_kv, f(D_v))
    elif r.pv == "fp8":
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
    if lists:
        one, rows, columns = f(1), (N_q + f(127)) // f(128), (N_kv + f(127)) // f(128)
        of = {"heads": (B, H_q), "one": (one, one)}
        tensors = [
            contiguous(torch.int32, *of[each], rows, *width)
            for each in lists
            for width in ((), (columns,))
        ]
        names = BlockLists(*tensors, *[None] * (4 - len(tensors)), 128, 128)
        given |= names._asdict() | {"tail_block": given.get("tail_block")}
    if prepared and (block := given.get("tail_block")):
        T = (N_kv + f(block - 1)) // f(block)
        T_pad = (T + f(127)) // f(128) * f(128)
        of_v = (r.of_pv.dtype, f(pad_head_dim(D_v)), T_pad)
        if r.pv == "16bit":
            of_v = (dtype, T, f(pad_head_dim(D_v)))
        given |= {
            "tail_k": contiguous(r.of_qk.dtype, B, H_kv, T_pad, width),
            "tail_k_scale": contiguous(torch.float32, B, H_kv, T_pad // f(64), groups),
            "tail_v": contiguous(of_v[0], B, H_kv, *of_v[1:]),
            "tail_bias": contiguous(torch.float32, B, H_kv, T_pad),
        }
    if not prepared:
        k, codes = (
            tensor(dtype, x, strides(v, x))
            for x in ((B, H_kv, T_kv if packed else N_kv, f(n)) for n in (D, D_v))
        )
        k_scale = v_scale = v_mean = None
        shown = (mask or lists) and not packed
        given["visible"] = contiguous(torch.uint8, B, f(1), N_kv) if shown else None
    if ordered or packed:
        given["perm"] = contiguous(torch.int32, N_q)
    if packed:
        given["perm_k"] = contiguous(torch.int32, N_q)
        given["spans"] = contiguous(torch.int32, f(5), f(4))
        given["documents"] = contiguous(torch.int32, N_q // f(64))
        shape = B, H_q, T_q, f(D)
    call = AttentionCall(
        tensor(dtype, shape, strides(q, shape)), k, k_scale, codes, D**-0.5,
        N_kv, r.encode(), v_scale=v_scale, v_mean=v_mean,
        attn_mask=attn_mask, tile_summary=tile_summary, **given,
    )  # fmt: skip
    return call._asdict()


def quantize(
    B: Facts, N_q: Facts, N_kv: Facts, D: int, D_v: int | None = None, heads: int = 16,
    layout: str = "bnhd", visible: str | None = None, dtype=torch.bfloat16, recipe: str = FP8,
    ordered: bool = False,
) -> dict:  # fmt: skip
    """The arguments of quantize_kv."""
    f, one = Facts.of, Facts.of(1)
    k, v = ((B, f(heads), N_kv, f(n)) for n in (D, D if D_v is None else D_v))
    shown = {"batch": (B, one, N_kv), "one": (one, one, N_kv), "all": (B, f(heads), N_kv)}
    return {
        "k": tensor(dtype, k, strides(layout, k)),
        "v": tensor(dtype, v, strides(layout, v)),
        "visible": contiguous(torch.uint8, *shown[visible]) if visible else None,
        "recipe": NAMED[recipe].encode(),
        "perm": contiguous(torch.int32, N_kv) if ordered else None,
    }


def train(
    B: Facts, N_q: Facts, N_kv: Facts, D: int, heads=(16, 16), is_causal: bool = False,
    layout: str = "bnhd", backward: bool = False, dtype=torch.bfloat16, out_bnhd: bool = True,
) -> dict:  # fmt: skip
    """The arguments of rowscaled, or of its backward, whose grad has the layout."""
    f = Facts.of
    H_q, H_kv = map(f, heads)
    N_kv = N_q if is_causal else N_kv
    of_q, of_kv = (B, H_q, N_q, f(D)), (B, H_kv, N_kv, f(D))
    grad, k = (tensor(dtype, shape, strides(layout, shape)) for shape in (of_q, of_kv))
    last = {"scale": D**-0.5, "out_bnhd": out_bnhd}
    if not backward:
        return {"q": grad, "k": k, "v": k, "is_causal": is_causal, **last}
    out = tensor(dtype, of_q, strides("bnhd" if out_bnhd else "bhnd", of_q))
    found = {"grad": grad, "out": out, "stats": contiguous(torch.float32, f(2), *of_q[:3])}
    own = N_kv if is_causal else f(0)
    for name, H, N in (("q", H_q, N_q), ("k", H_kv, N_kv), ("k_own", H_kv, own), ("v", H_kv, N_kv)):
        rows = (N + f(127)) // f(128) * f(128)
        found[name] = contiguous(torch.int8, B, H, rows, f(pad_head_dim(D)))
        if name == "k":
            rows = rows // f(64)
        found[f"{name}_scale"] = contiguous(torch.float32, B, H, rows)
    v_mean = contiguous(torch.float32, B, H_kv, f(0 if is_causal else D))
    return found | {"v_mean": v_mean, "n_kv": N_kv} | last


def decode(
    B: Facts, N_q: Facts, N_kv: Facts, D: int, heads=(32, 8), codes: torch.dtype | None = None,
    scales: str = "token", layout: str = "bnhd", dtype=torch.bfloat16, masked: bool = False, **given,
) -> dict:  # fmt: skip
    """The arguments of decode. scales: one of a token and head, or one for all."""
    H_q, H_kv, one = *map(Facts.of, heads), Facts.of(1)
    of_q, of_kv = (B, H_q, N_q, Facts.of(D)), (B, H_kv, N_kv, Facts.of(D))
    k = tensor(codes or dtype, of_kv, strides(layout, of_kv))
    shape = of_kv[:3] if scales == "token" else (one,) * 3
    scale = contiguous(torch.float32, *shape) if codes else None
    border = contiguous(torch.int64, B if scales == "token" else one)
    q = tensor(dtype, of_q, strides("bnhd", of_q))
    mask = contiguous(torch.bool, B, N_q, N_kv) if masked else None
    call = DecodeCall(q, k, k, border, border, D**-0.5, scale, scale, mask, **given)
    return call._asdict()


def append(
    B: Facts, n: Facts, N: Facts, D: int, D_v: int | None = None, heads: int = 8,
    layout: str = "bnhd", dtype=torch.bfloat16, rotated: bool = True,
) -> dict:  # fmt: skip
    """The arguments of append_kv."""
    H, found = Facts.of(heads), {}
    widths = {"k": Facts.of(D), "v": Facts.of(D_v or D)}
    for name, width in widths.items():
        found[f"{name}_codes"] = contiguous(torch.int8, B, H, N, width)
        found[f"{name}_scale"] = contiguous(torch.float32, B, H, N)
    for name, width in widths.items():
        found[name] = tensor(dtype, (B, H, n, width), strides(layout, (B, H, n, width)))
    of_anchor = contiguous(torch.float32, B, H, Facts.of(D))
    return found | {"anchor": of_anchor, "length": tensor(torch.int64, (), ()), "rotated": rotated}


def correct(
    B: Facts, N_q: Facts, N_kv: Facts, D: int, heads=(16, 16), layout: str = "bnhd"
) -> dict:
    """The arguments of unsmoothed_lse."""
    f = Facts.of
    H_q, H_kv = map(f, heads)
    q = B, H_q, N_q, f(D)
    lse, k_mean = (contiguous(torch.float32, *shape) for shape in (q[:3], (B, H_kv, f(D))))
    q = tensor(torch.bfloat16, q, strides(layout, q))
    return {"lse": lse, "q": q, "k_mean": k_mean, "scale": -(D**-0.5)}


def prepare(
    B: Facts, N_q: Facts, N_kv: Facts, D: int, op: str, heads: int = 16, layout: str = "bnhd",
    two: bool = False, ordered: bool = False,
) -> dict:  # fmt: skip
    """The arguments of an op that selects blocks of 128 keys."""
    f = Facts.of
    of = B, f(heads), N_kv, f(D)
    x = tensor(torch.bfloat16, of, strides(layout, of))
    mean = contiguous(torch.float32, B, f(heads), f(D))
    blocks = (N_kv + f(127)) // f(128)
    of_rows = B, f(heads), N_q
    scores = contiguous(torch.float32, *of_rows, blocks)
    perm = contiguous(torch.int32, N_kv) if ordered else None
    return {
        "smooth": {"x": x, "perm": perm},
        "pool_blocks": {"x": x, "shift": mean if two else None, "block": 128, "squares": False, "perm": perm},
        "largest": {"scores": scores, "counts": contiguous(torch.int32, *of_rows)},
        "listed_blocks": {
            "counts": contiguous(torch.int32, *of_rows),
            "indices": contiguous(torch.int32, *of_rows, blocks), "num_blocks": blocks,
        },
    }[op]  # fmt: skip


ANY, SHORT = Facts(1, math.inf), Facts(1, 32768)
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
    "repeated": (Facts(1, 64), SHORT, dict(recipe=FP8, D=128, q="repeated", **CAUSAL)),
    "two_groups": (Facts(1, 64), SHORT, dict(recipe=FP8, D=128, warpgroups=2)),
    "portable": (Facts(1, 64), SHORT, dict(recipe=FP8, D=128, warpgroups=0, out_bnhd=True)),
    "b16": (Facts(1, 64), SHORT, dict(recipe=BITS16, D=128, v="chunked", out_bnhd=True)),
    "b16_causal": (Facts(1, 64), SHORT, dict(recipe=BITS16, D=64, heads=(32, 8), v="apart", **CAUSAL)),
    "b16_unaligned": (Facts(1, 64), SHORT, dict(recipe=BITS16, D=64, v="unaligned")),
    "rotated": (Facts(1, 64), SHORT, dict(recipe="sage2-8b-rotated", D=80, heads=(32, 8), **CAUSAL)),
    "b16_72": (Facts(1, 64), SHORT, dict(recipe=BITS16, D=72, heads=(5, 5), dtype=torch.float16)),
    "keys": (Facts(1, 64), SHORT, dict(recipe=FP8, D=128, mask="keys", out_bnhd=True)),
    "rows": (Facts.of(2), SHORT, dict(recipe=FP8, D=64, mask="rows")),
    "keys_256": (Facts(1, 64), SHORT, dict(recipe=FP8, D=256, heads=(8, 4), mask="keys", right=0)),
    "bias": (Facts(1, 64), SHORT, dict(recipe=FP8, D=128, mask="bias", q="chunked")),
    "window": (Facts(1, 64), SHORT, dict(recipe=FP8, D=128, left=1024, right=0, out_bnhd=True)),
    "bottom_right": (Facts(1, 64), ANY, dict(recipe=FP8, D=128, heads=(32, 8), right=0, bottom_right=True)),
    "lists": (Facts(1, 64), SHORT, dict(recipe=FP8, D=128, lists=("heads", "heads"))),
    "lists_of_one": (Facts(1, 64), SHORT, dict(recipe=FP8, D=64, lists=("one",), **CAUSAL)),
    "ordered": (Facts(1, 64), SHORT, dict(recipe=FP8, D=128, lists=("heads",), prepared=False, ordered=True)),
    "packed": (
        Facts.of(1), SHORT,
        dict(recipe=FP8, D=128, lists=("one",), mask="keys", prepared=False, packed=True, q="chunked", right=0),
    ),
    "portable_ordered": (Facts(1, 64), SHORT, dict(recipe="sage2-8b", D=64, lists=("one",), ordered=True)),
    "tail": (Facts(1, 64), SHORT, dict(recipe=FP8, D=128, lists=("heads",), tail_block=64)),
    "tail_b16": (
        Facts(1, 64), SHORT,
        dict(recipe=BITS16, D=72, heads=(10, 5), lists=("one", "one"), tail_block=32),
    ),
    "tail_portable": (
        Facts(1, 64), SHORT, dict(recipe="sage2-8b", D=64, lists=("one",), tail_block=64, mask="keys"),
    ),
    "band": (Facts(1, 64), SHORT, dict(recipe="sage2-8b", D=64, left=5, right=7, bottom_right=True)),
    "all": (Facts(1, 64), SHORT, dict(recipe=FP8, D=128, prepared=False, v="chunked")),
    "all_72": (Facts(1, 64), SHORT, dict(recipe=FP8, D=72, heads=(10, 5), prepared=False, mask="keys")),
    "all_b16": (
        Facts(1, 64), SHORT, dict(recipe="sage1-rotated", D=64, prepared=False, out_bnhd=True, **CAUSAL),
    ),
    "all_tail": (
        Facts(1, 64), SHORT,
        dict(recipe=FP8, D=128, lists=("heads",), tail_block=64, prepared=False, v="chunked"),
    ),
    "all_tail_72": (
        Facts(1, 64), SHORT,
        dict(recipe="sage2-8b", D=72, D_v=64, lists=("one",), tail_block=32, prepared=False),
    ),
    "all_tail_b16": (
        Facts(1, 64), SHORT,
        dict(recipe=BITS16, D=64, lists=("one",), tail_block=64, prepared=False),
    ),
    "int4": (Facts(1, 64), SHORT, dict(recipe="sage2-4b", D=128, q="chunked", **CAUSAL)),
    "fp4": (Facts(1, 64), SHORT, dict(recipe="sage3", D=72, heads=(10, 5), mask="rows")),
}  # fmt: skip
QUANTIZE = {
    "kv": (Facts(1, 64), SHORT, dict(D=128)),
    "kv_far": (Facts(1, 64), ANY, dict(D=128, layout="apart")),
    "kv_72": (Facts(1, 64), SHORT, dict(D=72, D_v=64, heads=5, layout="chunked")),
    "kv_256": (Facts.of(1), ANY, dict(D=256, layout="bhnd", dtype=torch.float16)),
    "k": (Facts(1, 64), SHORT, dict(D=64, recipe="sage1-per-token")),
    "kv_batch": (Facts(1, 64), SHORT, dict(D=128, visible="batch")),
    "kv_one": (Facts(1, 64), SHORT, dict(D=128, visible="one", layout="every_other")),
    "kv_all": (Facts.of(2), SHORT, dict(D=64, visible="all")),
    "kv_rotated": (Facts(1, 64), SHORT, dict(D=72, heads=5, recipe="sage2-8b-rotated")),
    "k_batch": (Facts(1, 64), SHORT, dict(D=128, recipe="sage1-per-token", visible="batch")),
    "k_block": (Facts(1, 64), ANY, dict(D=128, recipe="sage1", layout="chunked")),
    "kv_thread": (Facts(1, 64), SHORT, dict(D=72, recipe="sage2-8b", heads=5, layout="apart")),
    "kv_thread_one": (Facts(1, 64), SHORT, dict(D=128, recipe="sage2-8b", visible="one")),
    "kv_ordered": (Facts(1, 64), SHORT, dict(D=128, visible="all", ordered=True)),
    "kv_thread_ordered": (
        Facts(1, 64),
        SHORT,
        dict(D=72, recipe="sage2-8b", heads=5, ordered=True),
    ),
    "kv_int4": (Facts(1, 64), SHORT, dict(D=80, D_v=64, recipe="sage2-4b", visible="batch")),
    "kv_fp4": (Facts(1, 64), SHORT, dict(D=128, recipe="sage3")),
    "kv_fp4_72": (Facts.of(2), ANY, dict(D=72, recipe="sage3", visible="all")),
}
TRAINED = {
    "rowscaled": (Facts(1, 64), SHORT, dict(D=128)),
    "rowscaled_causal": (Facts(1, 64), SHORT, dict(D=128, heads=(32, 8), is_causal=True, layout="chunked")),
    "rowscaled_72": (Facts(1, 64), SHORT, dict(D=72, heads=(5, 5), dtype=torch.float16, out_bnhd=False)),
    "rowscaled_far": (Facts(1, 64), SHORT, dict(D=64, layout="apart")),
    "rowscaled_backward": (Facts(1, 64), SHORT, dict(D=128, backward=True)),
    "rowscaled_backward_causal": (
        Facts(1, 64), SHORT,
        dict(D=64, heads=(9, 3), is_causal=True, layout="every_other", backward=True),
    ),
    "rowscaled_backward_72": (
        Facts(1, 64), SHORT,
        dict(D=72, heads=(5, 5), layout="unaligned", backward=True, out_bnhd=False),
    ),
}  # fmt: skip
DECODED = {
    "decode": (Facts(1, 64), SHORT, dict(D=128)),
    "decode_masked": (Facts(1, 64), ANY, dict(D=80, heads=(12, 3), masked=True)),
    "decode_one": (Facts.of(1), ANY, dict(D=64, heads=(8, 2), codes=torch.int8, scales="one", left=511)),
    "decode_int8": (Facts(1, 64), ANY, dict(D=128, codes=torch.int8, layout="apart", rotated=True)),
    "decode_fp8": (
        Facts(1, 64), SHORT, dict(D=256, heads=(4, 1), codes=torch.float8_e4m3fn, layout="bhnd", out_bnhd=True),
    ),
}  # fmt: skip
APPENDED = {
    "append": (Facts(1, 64), SHORT, dict(D=128)),
    "append_one": (Facts.of(1), ANY, dict(D=64, heads=2, layout="apart")),
    "append_80": (
        Facts(1, 64),
        SHORT,
        dict(D=80, D_v=48, layout="chunked", dtype=torch.float16, rotated=False),
    ),
}
CORRECTED = {
    "lse": (Facts(1, 64), SHORT, dict(D=128, heads=(32, 8))),
    "lse_72": (Facts(1, 64), SHORT, dict(D=72, heads=(5, 5), layout="every_other")),
}
PREPARED = {
    "smooth": (Facts(1, 64), ANY, dict(op="smooth", D=128)),
    "pool": (Facts(1, 64), SHORT, dict(op="pool_blocks", D=128, layout="every_other")),
    "pool_less": (Facts(1, 64), ANY, dict(op="pool_blocks", D=64, two=True)),
    "smooth_ordered": (Facts(1, 64), SHORT, dict(op="smooth", D=128, ordered=True)),
    "pool_ordered": (Facts(1, 64), SHORT, dict(op="pool_blocks", D=64, two=True, ordered=True)),
    "largest": (Facts(1, 64), SHORT, dict(op="largest", D=64)),
    "listed": (Facts(1, 64), SHORT, dict(op="listed_blocks", D=64)),
}
PACKAGED = ATTENTION | QUANTIZE | DECODED | APPENDED | CORRECTED | PREPARED
CALLS = PACKAGED | TRAINED
LENGTHS = 1, 2, 5, 77, 128, 1000, 2047, 2048, 3584, 6143, 6144, 16000


def arguments(name: str, *sizes: Facts) -> dict:
    ofs = (
        (ATTENTION, attention), (QUANTIZE, quantize), (TRAINED, train), (DECODED, decode),
        (APPENDED, append), (CORRECTED, correct), (PREPARED, prepare),
    )  # fmt: skip
    of = next(of for names, of in ofs if name in names)
    return of(*sizes, **CALLS[name][2])


def call_of(name: str, N: int, B: int = 2) -> dict:
    """Arguments of which all is known."""
    return known(arguments(name, *map(Facts.of, (B, N, N))))


def op_of(name: str):
    of_training = "rowscaled_backward" if "backward" in name else "rowscaled"
    ofs = (
        (ATTENTION, "attention"), (QUANTIZE, "quantize_kv"), (TRAINED, of_training),
        (DECODED, "decode"), (APPENDED, "append_kv"), (CORRECTED, "unsmoothed_lse"),
    )  # fmt: skip
    op = PREPARED[name][2]["op"] if name in PREPARED else next(op for x, op in ofs if name in x)
    return getattr(torch.ops.sage, op).default


def launch_of(name: str):
    return LAUNCHES[op_of(name)]


def drawn(name: str, rng: random.Random) -> tuple[dict, int]:
    """Arguments, and a device."""
    B, _, options = CALLS[name]
    # Of 1, Python's masks and lists have other strides: see below.
    least = 2 if "mask" in options or "lists" in options else 1
    lengths = LENGTHS[least - 1 :]
    device = rng.randrange(len(PROCESSORS))
    N_q = rng.choice(lengths) if rng.random() < 0.8 else rng.randint(2, 9000)
    N_kv = N_q if rng.random() < 0.6 else rng.choice(lengths)
    low, high = B.low, B.high
    B = low if low == high else rng.choice((1, 2, 3, 17)[least - 1 :])
    if name in DECODED:
        N_q = rng.randint(1, MAX_QUERIES)
    if name in ATTENTION and rng.random() < 0.1:  # a tile of 128 rows a processor, many keys
        B, heads = max(low, min(least, high)), options.get("heads", (16, 16))[0]
        N_q, N_kv = 128 * max(1, PROCESSORS[device] // (B * heads)), rng.choice(lengths[-3:])
    return known(arguments(name, *map(Facts.of, (B, N_q, N_kv)))), device
