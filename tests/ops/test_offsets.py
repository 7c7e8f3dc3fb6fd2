"""No offset of a kernel is a 32-bit number that can wrap: from the IR of each, by interval arithmetic.

A tensor may have more than 2^31 elements, its strides anything that 32 bits hold and its sequence up
to MAX_ROWS rows (`sage::sdpa` refuses more). Every 32-bit sum, difference or product that reaches an
`addptr` has to stay within 32 bits for all such arguments.
"""

import dataclasses
import functools
import importlib
import pkgutil
import re
from unittest import mock

import noted
import pytest
import torch
import triton
from triton import JITFunction
from triton._C.libtriton import ir
from triton.compiler import make_backend

from sage_inductor import ops
from sage_inductor.ops.attention import tiles
from sage_inductor.ops.attention.nvfp4 import MAX_KEYS
from sage_inductor.ops.compile import Launch
from sage_inductor.ops.formats import MAX_ROWS

SM90 = (9, 0)
INT32 = (-(2**31), 2**31 - 1)
HEADS, ROWS = (1, 2**31 - 1), (1, MAX_ROWS)
DOUBLED = (2, 2 * MAX_ROWS)
ARGUMENTS = {  # what the launchers pass; the rest (strides) may be any 32-bit number
    "H": HEADS, "H_q": HEADS, "H_kv": HEADS, "heads": HEADS, "N": ROWS, "N_q": ROWS, "N_kv": ROWS,
    "N2": DOUBLED, "N2_q": DOUBLED, "N2_kv": DOUBLED, "N_pad": (128, MAX_ROWS + 127), "M_pad": (128, MAX_ROWS + 127),
    "D2": (2, 512), "D2_V": (2, 512), "kv_width": (1, MAX_ROWS // 64), "full_width": (1, MAX_ROWS // 64),
}  # fmt: skip
# The Hopper kernel's loops carry a tile's place from one tile to the next, which intervals cannot
# follow. Its row is at most a tile beyond N_q, its blocks of keys at most MAX_ROWS / 128, and a head of q one of
# fewer than 2^31. `plan.why_not` sees to MAX_K_ROWS rows of k in all heads, of which each has at least
# 128: so there are fewer than 2^23 such heads, of 256 channels at most, and 2^24 scales.
PLACE, BLOCKS = (0, 2**31 - 1), (0, 2**23)
OF_HOPPER = {
    "row": (0, 2**30 + 192), "b": PLACE, "h": PLACE, "h_kv": PLACE, "head": PLACE,
    "head_kv": (0, 2**23), "channel": (0, 2**31 - 257), "scale_row": (0, 2**24),
    "slot": (0, 2**16), "begin": BLOCKS, "end": BLOCKS, "m": BLOCKS,
    "place": (-1, 2**28), "first_block": BLOCKS, "read_all": BLOCKS, "read_whole": BLOCKS,
    "of_tail": BLOCKS, "block": BLOCKS,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Value:
    """What an integer of the IR may be, and what was computed for it that may wrap."""

    low: int
    high: int
    wraps: frozenset = frozenset()


ANYTHING = Value(*INT32)


def corners(f, a, b):
    found = [f(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    return min(found), max(found)


def divide(a, b):
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def evaluate(op, values) -> tuple[int, int]:
    a, b = (*values, ANYTHING, ANYTHING)[:2]
    if op == "muli":
        return corners(lambda x, y: x * y, a, b)
    if op == "addi":
        return a.low + b.low, a.high + b.high
    if op == "subi":
        return a.low - b.high, a.high - b.low
    if op == "divsi" and b.low > 0:
        return corners(divide, a, b)
    if op == "remsi" and b.low > 0:
        return (0 if a.low >= 0 else 1 - b.high), min(b.high - 1, max(a.high, 0))
    if op == "minsi":
        return min(a.low, b.low), min(a.high, b.high)
    if op == "maxsi":
        return max(a.low, b.low), max(a.high, b.high)
    if op == "andi" and (a.low >= 0 or b.low >= 0):
        return 0, min(x.high for x in (a, b) if x.low >= 0)
    if op == "shli":
        return corners(lambda x, y: x << y, a, b) if 0 <= b.low <= b.high < 32 else INT32
    if op == "shrsi":
        return corners(lambda x, y: x >> y, a, b) if 0 <= b.low <= b.high < 32 else INT32
    if op == "ori" and a.low >= 0 and b.low >= 0:
        return 0, a.high + b.high
    return INT32


class Function:
    """The intervals of a kernel's integers, line by line; `unproved` in the end."""

    def __init__(self, text: str, bounds: dict):
        location = r" loc\((?:[^()]|\([^()]*\))*\)"
        self.lines = [re.sub(location, "", line).strip() for line in text.splitlines()]
        self.bounds, self.unproved, self.offsets, self.captured = bounds, set(), 0, []
        names = re.findall(r"%(\w+): i(?:32|64)\b", text[text.index("tt.func public") :])
        known = ARGUMENTS | bounds
        self.values = {name: Value(*known.get(name, INT32)) for name in names}

    def run(self):
        first = next(i for i, line in enumerate(self.lines) if line.startswith("tt.func public"))
        self.block(first + 1)
        return self

    def block(self, i) -> tuple[int, list]:
        """Run the lines from i to the end of their region; where that is, and what it yields."""
        yielded = []
        while not self.lines[i].startswith("}"):
            line = self.lines[i]
            if line.startswith(
                ("scf.yield", "scf.condition", "tt.reduce.return", "tt.scan.return", "ttg.warp_yield",
                 "ttg.warp_return")
            ):  # fmt: skip
                yielded = self.operands(line)
            elif "scf.for" in line:
                i = self.loop(i)
                continue
            elif "scf.while" in line:
                i = self.while_loop(i)
                continue
            elif "scf.if" in line:
                i, found = self.block(i + 1)
                if self.lines[i].startswith("} else"):
                    i, other = self.block(i + 1)
                    found = [self.union(*pair) for pair in zip(found, other)]
                self.results(line, found)
            elif "tt.reduce" in line or "tt.scan" in line:
                end, _ = self.block(i + 1)
                source = self.operands(re.search(r"\((%\w+.*?)\) <", line).group(1))
                self.results(line, source)
                i = end
            elif "ttg.warp_specialize(" in line:
                self.captured = self.operands(re.search(r"\((.*?)\)", line).group(1))
                i, _ = self.block(i + 1)
                continue
            elif partition := re.match(r"partition\d+\((.*)", line):
                names = re.findall(r"%(\w+):", partition.group(1))
                for name, value in zip(names, self.captured):
                    self.values[name] = value
                i, _ = self.block(i + 1)
            else:
                self.step(line)
            i += 1
        return i, yielded

    def loop(self, i):
        line = self.lines[i]
        name, low, high = re.search(r"scf.for (%\S+) = (%\S+) to (%\S+) step", line).groups()
        (low,), (high,) = self.operands(low), self.operands(high)
        index = Value(low.low, max(high.high - 1, low.low), low.wraps | high.wraps)
        carried = (
            re.findall(r"%(\w+) = (%[\w#]+)", line[line.find("iter_args") :])
            if "iter_args" in line
            else []
        )

        def body():
            self.bind(name[1:], index)
            return self.block(i + 1)

        return self.repeated(line, carried, body)

    def while_loop(self, i):
        carried = re.findall(r"%(\w+) = (%[\w#]+)", self.lines[i].split("scf.while")[1])

        def body():
            end, (_, *passed) = self.block(i + 1)
            names = re.findall(r"%(\w+):", self.lines[end + 1])
            for name, value in zip(names, passed):
                self.bind(name, value)
            return self.block(end + 2)

        return self.repeated(self.lines[i], carried, body)

    def repeated(self, line, carried, body):
        """Run a loop's body until what it carries stays; the line after it."""
        state = [self.operands(start)[0] for _, start in carried]
        for turn in range(4):
            if turn == 3:
                state = [Value(*INT32, each.wraps) for each in state]
            for (each, _), value in zip(carried, state):
                self.bind(each, value)
            end, found = body()
            new = [self.union(*pair) for pair in zip(state, found)]
            if new == state:
                break
            state = new if turn < 3 else state
        self.results(line, state)
        return end + 1

    def step(self, line):
        if "tt.addptr" in line:
            _, offset = self.operands(line.split("tt.addptr")[1].split(" : ")[0])
            self.unproved |= offset.wraps
            self.offsets += 1
            return
        if not (match := re.match(r"%([\w:]+) = (\w+)\.(\w+) ?(.*)", line)):
            return
        name, dialect, op, rest = match.groups()
        body, _, kind = rest.rpartition(" : ")
        wide = kind.endswith(("i64", "i64>")) or "xi64" in kind.split("->")[-1].split(" to ")[-1]
        if op == "constant":
            number = re.match(r"(?:dense<)?(-?\d+)>? :", rest)
            value = Value(*[int(number.group(1))] * 2) if number else ANYTHING
        elif op == "make_range":
            start, end = (int(re.search(rf"{x} = (\d+)", rest).group(1)) for x in ("start", "end"))
            value = Value(start, end - 1)
        elif op in ("get_program_id", "get_num_programs"):
            value = Value(0, 2**31 - 1) if rest.startswith("x") else Value(0, 65535)
        elif op in (
            "splat",
            "expand_dims",
            "broadcast",
            "reshape",
            "convert_layout",
            "extsi",
            "trans",
            "extui",
        ):
            value = self.operands(rest)[0]
        elif op == "select":
            value = self.union(*self.operands(body)[1:])
        elif op == "trunci":
            source = self.operands(rest)[0]
            value = (
                source
                if INT32[0] <= source.low <= source.high <= INT32[1]
                else Value(*INT32, source.wraps | {line})
            )
        elif dialect == "arith" and op[-1] == "i" and "i1>" not in kind and op != "cmpi":
            values = self.operands(body)
            low, high = evaluate(op, values)
            wraps = frozenset().union(*(each.wraps for each in values))
            if not wide and not INT32[0] <= low <= high <= INT32[1]:
                low, high, wraps = *INT32, wraps | {line}
            value = Value(low, high, wraps)
        else:
            value = ANYTHING
        self.bind(name.split(":")[0], value)

    def bind(self, name, value):
        base = re.sub(r"_\d+$", "", name)
        self.values[name] = Value(*self.bounds[base]) if base in self.bounds else value

    def results(self, line, found):
        if match := re.match(r"%(\w+)(:\d+)? =", line):
            if match.group(2) is None:
                self.bind(match.group(1), found[0])
            for k, value in enumerate(found):
                self.values[f"{match.group(1)}#{k}"] = value

    def operands(self, text):
        return [self.values.get(name, ANYTHING) for name in re.findall(r"%([\w#]+)", text)]

    @staticmethod
    def union(a, b):
        return Value(min(a.low, b.low), max(a.high, b.high), a.wraps | b.wraps)


def ir_of(launch: Launch) -> str:
    """The kernel's IR as it is before layouts (Gluon: with), for any strides."""
    found = noted.compilation_of(launch)
    of_strides = {i for i, x in enumerate(launch.kernel.arg_names) if x.startswith("stride")}
    found = dataclasses.replace(
        found, types=tuple("i32" if i in of_strides else x for i, x in enumerate(found.types)),
        constants=tuple(x for x in found.constants if x[0] not in of_strides),
    )  # fmt: skip

    def lower(source, target, options):
        backend = make_backend(target)
        parsed = backend.parse_options(dict(options))
        context, stages = ir.context(), {}
        ir.load_dialects(context)
        backend.load_dialects(context)
        functions = backend.get_codegen_implementation(parsed)
        module = source.make_ir(target, parsed, functions, backend.get_module_map(), context)
        backend.add_stages(stages, parsed, source.language)
        return str(stages["ttir" if "ttir" in stages else "ttgir"](module, {}))

    with mock.patch.object(triton, "compile", lower):
        return found.compile(SM90)


# -- calls ----


def hopper(warpgroups: int, pv: str = "fp8", **given) -> tuple:
    tile = tiles.hopper(SM90, pv, 128, False, tiles.ANY, warpgroups)
    return noted.hopper, dict(tile=tile, pv=pv, **given)


WINDOW, BOTH = dict(left=9, right=0), dict(left=300, right=200, bottom_right=True)
CALLS = {
    "causal": (noted.sdpa, dict(recipe="sage2-8b", pointers=True, right=0)),
    "bias": (noted.sdpa, dict(recipe="sage2-8b", pointers=True, mask="bias")),
    "rows": (noted.sdpa, dict(recipe="sage2-8b", pointers=True, mask="rows", **WINDOW)),
    "keys": (noted.sdpa, dict(recipe="sage2-8b", pointers=True, mask="keys", D=80)),
    "TMA": (noted.sdpa, dict(recipe="sage2-8b")),
    "16 bits": (noted.sdpa, dict(recipe="sage1", mask="bias")),
    "16 bits, TMA": (noted.sdpa, dict(recipe="sage1-per-token", warpgroups=0)),
    "4 bits": (noted.sdpa, dict(recipe="sage2-4b", mask="rows", **WINDOW)),
    "4 bits, keys": (noted.sdpa, dict(recipe="sage2-4b", pointers=True, mask="keys", D=80)),
    **{
        f"{recipe} by lists of {size}": (noted.sdpa, dict(recipe=recipe, pointers=True, size=size, mask="keys", right=0))
        for recipe, size in (("sage2-8b", (64, 64)), ("sage1", (128, 256)), ("sage2-4b", (64, 192)))
    },
    "NVFP4, causal": (noted.sdpa, dict(recipe="sage3", right=0)),
    "NVFP4, bias": (noted.sdpa, dict(recipe="sage3", mask="bias", left=9, bottom_right=True)),
    "one pass": (noted.sdpa, dict(recipe="sage2-8b-per-token", D=80, mask="keys", warpgroups=0)),
    "decode": (noted.decode, dict(codes=torch.int8, N_q=16, left=9, rotated=True)),
    "decode, masked": (noted.decode, dict(N_q=3, masked=True)),
    "decode, words": (noted.decode, dict(codes=torch.int8, N_q=2, masked=True, rotated=True)),
    "decode, few words": (noted.decode, dict(codes=torch.float8_e4m3fn, D=64, left=9)),
    "append": (noted.append, dict(n=20)),
    "unsmooth": (noted.unsmooth, dict(D=80)),
    "pool": (noted.pool, dict(D=80, block=192, shifted=True)),
    "largest": (noted.largest, {}),
    "listed": (noted.listed, {}),
    "sagebwd": (noted.sagebwd, dict(is_causal=True)),
    "rowscaled": (noted.rowscaled, {}),
    "causal rowscaled": (noted.rowscaled, dict(is_causal=True)),
    "Hopper": hopper(2), "Hopper, split": hopper(2, lengths=noted.SPLIT),
    "Hopper, band": hopper(2, **BOTH), "Hopper, mask": hopper(2, mask="transposed", right=0),
    "Hopper, lists": (noted.sdpa, dict(recipe="sage1-per-token", size=(128, 128))),
    "Hopper, in an order": (noted.sdpa, dict(recipe="sage2-8b-per-token", **noted.in_order())),
    **{
        f"{recipe} in an order": (noted.sdpa, dict(recipe=recipe, pointers=pointers, **noted.in_order()))
        for recipe, pointers in (("sage2-8b", True), ("sage1-per-token", False), ("sage2-4b", False))
    },
    "Hopper, documents": (noted.sdpa, dict(recipe="sage2-8b-rotated", **noted.in_documents(0))),
    "documents": (noted.sdpa, dict(recipe="sage2-8b-per-token", pointers=True, **noted.in_documents())),
    "pool in an order": (noted.pool, dict(D=80, block=192, shifted=True, ordered=True)),
    "Hopper, lists and mask": (noted.sdpa, dict(recipe="sage2-8b-per-token", size=(64, 192), mask="keys", **BOTH)),
    "Hopper, tail": (noted.sdpa, dict(recipe="sage2-8b-per-token", size=(64, 192), mask="keys", tail_block=32)),
    "tail": (noted.sdpa, dict(recipe="sage1", pointers=True, size=(128, 64), mask="keys", tail_block=64)),
    "Hopper, split, 16 bits": hopper(3, "16bit", lengths=noted.SPLIT),
}  # fmt: skip
# What is known of a kernel's numbers.
HEAD = (0, 2**23)
OF_PREPARATION = dict.fromkeys(("heads", "heads_kv", "q_blocks", "q_programs", "parts"), HEAD)
OF_PREPARATION["rounds"] = (1, 2**19)  # of 1,024 rows
# Of at most MAX_ROWS queries and keys; what is counted and where it goes are of the blocks.
OF_LISTS = {
    "row_tiles": (1, 2**24), "blocks": (1, 2**23), "words": (4, 2**25), "num_m": (1, 2**23),
    "count": (0, 2**25), "wholes": (0, 2**28), "parts": (0, 2**28), "found": (0, 2**25),
    "place": (-1, 2**30), "m": (0, 2**23), "rank": (0, 2**23), "width": (4, 2**28),
}  # fmt: skip
# Of fewer than 2^29 rows in all heads, of which each has at least 128: so of 2^22 tiles at most. r
# counts them from some tile on, m in a head.
OF_BACKWARD = dict.fromkeys(("Q_pad", "K_pad", "Q_rows"), (128, 2**29))
OF_BACKWARD |= {"row0": (0, 2**29 + 192), "N2_q": (2, 2**30), "N2_kv": (2, 2**30)}
OF_BACKWARD |= dict.fromkeys(("head", "b", "h"), (0, 2**22))
OF_BACKWARD |= dict.fromkeys(("r", "m"), (-(2**22), 2**22))
FACTS = {
    "nvfp4._attention_kernel": dict.fromkeys(("N_pad", "N_kv"), (128, MAX_KEYS)),
    # What is counted is of a row's blocks.
    "pool._largest_kernel": dict.fromkeys(("M", "count", "kept", "before"), (0, MAX_ROWS // 64)),
    "listed._listed_kernel": dict.fromkeys(
        ("rows", "width", "blocks", "count"), (0, MAX_ROWS // 64)
    ),
    # Of a document, whose rows are among N.
    "values.quantize_v_again_kernel": {
        "place": (0, MAX_ROWS), "length": (0, MAX_ROWS), "end": (0, MAX_ROWS // 64 + 2),
    },
    # A row of codes has 64 bytes: no 2^36 are in memory.
    "kernels._over_rows_kernel": {"count": (1, 2**24), "steps": (0, 2**30)},
    # Rows that share a head of k: 2^30 of q would take 32 GiB, of 16 channels. Splits: two a processor.
    **dict.fromkeys(
        ("decode._decode_kernel", "decode._combine_splits_kernel"),
        {"N_q": (1, 16), "rows": (1, 2**30), "S": (1, 65535)},
    ),
    "decode.decode_codes_kernel": {"N_q": (1, 16), "rows": (1, 16), "S": (1, 65535)},
    "cache._append_kv_kernel": {"n": (1, MAX_ROWS)},
    # Fewer than MAX_ROWS rows in all heads, 128 or more in each.
    **{f"prepare.{x}": OF_PREPARATION for x in ("_rows_kernel", "_bounds_kernel", "_turn_kernel")},
    "kernel._hopper_kernel": OF_HOPPER,
    "kernel._combine_kernel": OF_HOPPER | {"program": (0, 2**16)},
    **{f"tile_lists.{x}": OF_LISTS for x in (
        "_pack_mask_kernel", "_list_tiles_kernel", "_rank_tiles_kernel")},
    **{f"backward_kernels.{x}": OF_BACKWARD for x in ("dq_kernel", "dkdv_kernel")},
}  # fmt: skip
# So many offsets, at least, are seen in a kernel; elsewhere 4.
OFFSETS = {"_hopper_kernel": 21, "_combine_kernel": 9, "dq_kernel": 7, "dkdv_kernel": 7}
OFFSETS |= dict.fromkeys(("_pack_mask_kernel", "_list_tiles_kernel", "_rank_tiles_kernel"), 3)
OFFSETS["_listed_kernel"] = 2  # of what clears the flags


@functools.cache
def launches(name: str) -> dict[str, Launch]:
    """By the digests of what is compiled."""
    call, given = CALLS[name]
    found = noted.launches(call, SM90, **given)
    return {noted.compilation_of(x).digest: x for x in found}


proved = set()


# What these compute of addresses the causal one, or one with lists and a mask, does too.
SLOW = "Hopper, split, 16 bits", "rowscaled", "Hopper, band", "Hopper, mask"


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.sweep] * (x in SLOW)) for x in CALLS]
)
def test_no_offset_wraps(name):
    """Of what the call launches; what several calls launch is looked at once."""
    unproved = []
    for digest, launch in launches(name).items():
        if digest in proved:
            continue
        proved.add(digest)
        kernel = launch.kernel.__name__
        bounds = FACTS.get(f"{launch.kernel.__module__.rpartition('.')[2]}.{kernel}", {})
        if kernel == "_hopper_kernel" and "rowscaled" in name:
            # Fewer than 2^29 rows of q, at least 64 in a head.
            bounds = bounds | dict.fromkeys(("head", "heads"), HEAD)
        function = Function(ir_of(launch), bounds).run()
        unproved += [f"{kernel}: {line}" for line in function.unproved]
        assert function.offsets >= OFFSETS.get(kernel, 4), (kernel, function.offsets)
    assert not unproved, "\n".join(unproved)


def test_these_calls_launch_every_kernel():
    """All that is written in a file of ops/."""
    known = set()
    for module in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}."):
        for kernel in vars(importlib.import_module(module.name)).values():
            if isinstance(kernel, JITFunction) and "Grid: " in (kernel.fn.__doc__ or ""):
                known.add((kernel.__module__, kernel.__name__))
    launched = {
        (x.kernel.__module__, x.kernel.__name__) for name in CALLS for x in launches(name).values()
    }
    assert launched == known and len(known) > 20
