"""No offset of a kernel is a 32-bit number that can wrap: from the IR of each, by interval arithmetic.

A tensor may have more than 2^31 elements, its strides anything that 32 bits hold and its sequence up
to MAX_ROWS rows (`sage::sdpa` refuses more). Every 32-bit sum, difference or product that reaches an
`addptr` has to stay within 32 bits for all such arguments.
"""

import dataclasses
import functools
import re

import pytest
import test_crosscompile as kernels
import triton
from triton._C.libtriton import ir
from triton.compiler import make_backend

from sage_inductor.ops.attention import tiles
from sage_inductor.ops.attention.hopper import kernel as hopper
from sage_inductor.ops.attention.nvfp4 import MAX_KEYS
from sage_inductor.ops.formats import MAX_ROWS

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


@pytest.fixture(autouse=True)
def ir_alone(monkeypatch):
    """`compile_*` of test_crosscompile.py give the IR, as it is before layouts (Gluon: with)."""

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

    def anything(kernel, architecture, constexprs, types, *rest, **options):
        strides = [name for name in constexprs if name.startswith("stride")]
        kept = {name: x for name, x in constexprs.items() if name not in strides}
        return compile_kernel(kernel, architecture, kept, types, *rest, **options)

    compile_kernel = kernels.compile_kernel
    monkeypatch.setattr(triton, "compile", lower)
    monkeypatch.setattr(kernels, "compile_kernel", anything)


SM90 = (9, 0)
OF_ATTENTION = [  # mask, additive, left, is_causal, tma
    (0, False, -1, True, False), (2, True, -1, False, False), (2, False, 9, True, False),
    (1, False, -1, False, False), (0, False, -1, False, True),
]  # fmt: skip
KERNELS = {
    **{
        f"{recipe} {variant}": lambda r=recipe, v=variant: kernels.compile_attention(
            SM90, r, mask=v[0], additive=v[1], left=v[2], is_causal=v[3], tma=v[4]
        )
        for recipe, variants in (
            ("sage2-8b", OF_ATTENTION), ("sage1", OF_ATTENTION[1::3]), ("sage2-4b", OF_ATTENTION[2:4])
        )
        for variant in variants
    },
    **{
        f"{recipe} by lists of {blocks}": lambda r=recipe, b=blocks: kernels.compile_attention(
            SM90, r, mask=1, blocks=b
        )
        for recipe, blocks in (("sage2-8b", (64, 64)), ("sage1", (128, 256)), ("sage2-4b", (64, 192)))
    },
    **{
        f"nvfp4 {v}": lambda v=v: kernels.compile_nvfp4(SM90, 128, v[3], *v[:3])
        for v in ((0, False, -1, True), (2, True, 9, False))
    },
    "quantize_nvfp4 k": lambda: kernels.compile_preparation_nvfp4(SM90, 128, False),
    "quantize_nvfp4 v": lambda: kernels.compile_preparation_nvfp4(SM90, 128, True),
    "quantize_k": lambda: kernels.compile_quantize_k(SM90, 80, True, 4, "i8"),
    "quantize_k of 4 bits": lambda: kernels.compile_quantize_k(SM90, 80, True, 4, "u8"),
    "quantize_v": lambda: kernels.compile_quantize_v(SM90, 80, True),
    "quantize_kv": lambda: kernels.compile_quantize_kv(80, True, "i8"),
    "quantize_v_again": lambda: kernels.compile_quantize_v_again(80, True),
    "estimate": lambda: kernels.compile_estimate(80, True),
    "unsmooth": lambda: kernels.compile_unsmooth(SM90, 80),
    "pool": lambda: kernels.compile_pool(SM90, 80, 192, True),
    "largest": lambda: kernels.compile_largest(SM90),
    "smooth": lambda: kernels.compile_smooth(SM90, 80, True, False),
    "smooth's end": lambda: kernels.compile_smooth(SM90, 80, True, True),
    "quantize for training": kernels.compile_quantize_for_training,
    "quantize rows for training": lambda: kernels.compile_quantize_for_training(False, 1),
    "quantize twice for training": lambda: kernels.compile_quantize_for_training(False, 64, True),
    "turn": kernels.compile_turn,
    "rows of rowscaled": kernels.compile_rows_of_rowscaled,
    "turn of rowscaled": kernels.compile_turn_of_rowscaled,
    "rows of causal of rowscaled": lambda: kernels.compile_rows_of_rowscaled(True),
    "bounds of rowscaled": kernels.compile_bounds_of_rowscaled,
    "bounds of causal of rowscaled": lambda: kernels.compile_bounds_of_rowscaled(True),
    "turn of causal of rowscaled": lambda: kernels.compile_turn_of_rowscaled(True),
    **{
        f"training {name}": lambda name=name: kernels.compile_training(SM90, name)
        for name in kernels.TRAINING
    },
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_no_offset_wraps(name):
    fewer = (128, MAX_KEYS)  # rows of k that nvfp4.launch takes
    bounds = {"N_pad": fewer, "N_kv": fewer} if name.startswith("nvfp4") else {}
    if name == "largest":  # what is counted is of a row's blocks
        bounds = dict.fromkeys(("M", "count", "kept", "before"), (0, MAX_ROWS // 64))
    if name in ("training dk", "training dv"):  # a row of codes has 64 bytes: no 2^36 are in memory
        bounds = {"count": (1, 2**24), "steps": (0, 2**30)}
    if name.endswith("of rowscaled"):  # fewer than MAX_ROWS rows in all heads, 128 or more in each
        bounds = dict.fromkeys(("heads", "heads_kv", "q_blocks", "parts"), (0, 2**23))
        bounds["rounds"] = (1, 2**19)  # of 1,024 rows
    function = Function(KERNELS[name](), bounds).run()
    assert function.offsets > 3 and not function.unproved, "\n".join(function.unproved)


@pytest.mark.parametrize(
    "pv, warpgroups, given",
    [("fp8", 2, {}), ("fp8", 2, dict(split=True)), ("fp8", 2, dict(band=kernels.BANDS["both"])),
     ("16bit", 3, dict(keeps_max=True, own=True)), ("16bit", 3, dict(listed=True)),
     ("fp8", 2, dict(band=kernels.BANDS["causal"], mask=True)),
     pytest.param("16bit", 3, dict(split=True), marks=pytest.mark.sweep)],
    ids=["fp8", "fp8 split", "band", "own", "lists", "mask", "16bit split"],
)  # fmt: skip
def test_no_offset_of_the_hopper_kernel_wraps(pv, warpgroups, given):
    tile = tiles.hopper(SM90, pv, 128, False, tiles.ANY, warpgroups)
    text = kernels.compile_hopper.__wrapped__(pv, 128, False, tile, **given)
    facts = OF_HOPPER
    if "keeps_max" in given:  # of training: fewer than 2^29 rows of q, at least 64 in a head
        facts = OF_HOPPER | dict.fromkeys(("head", "heads"), (0, 2**23))
    function = Function(text, facts).run()
    assert function.offsets > 20 and not function.unproved, "\n".join(function.unproved)


@pytest.mark.parametrize(
    "compile",
    [kernels.compile_pack_mask, kernels.compile_list_tiles, kernels.compile_rank_tiles,
     functools.partial(kernels.compile_list_tiles, False, (64, 192))],
)  # fmt: skip
def test_no_offset_of_what_is_made_of_mask_and_lists_wraps(compile):
    """Of at most MAX_ROWS queries and keys; what is counted and where it goes are of the blocks."""
    bounds = {
        "row_tiles": (1, 2**24), "blocks": (1, 2**23), "words": (4, 2**25), "num_m": (1, 2**23),
        "count": (0, 2**25), "wholes": (0, 2**28), "parts": (0, 2**28), "found": (0, 2**25),
        "place": (-1, 2**30), "m": (0, 2**23), "rank": (0, 2**23), "width": (4, 2**28),
    }  # fmt: skip
    function = Function(compile(), bounds).run()
    assert function.offsets > 2 and not function.unproved, "\n".join(function.unproved)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["dq", "dkdv"])
def test_no_offset_of_the_row_scaled_backward_wraps(name, causal):
    """Of fewer than 2^29 rows in all heads, of which each has at least 128: so of 2^22 tiles at most.
    r counts them from some tile on, m in a head."""
    rows, head = (128, 2**29), (0, 2**22)
    facts = {"Q_pad": rows, "K_pad": rows, "Q_rows": rows, "row0": (0, 2**29 + 192)}
    facts |= dict.fromkeys(("head", "b", "h"), head) | {"N2_q": (2, 2**30), "N2_kv": (2, 2**30)}
    facts |= dict.fromkeys(("r", "m"), (-(2**22), 2**22))
    function = Function(kernels.compile_rowscaled(name, causal=causal), facts).run()
    assert function.offsets > 6 and not function.unproved, "\n".join(function.unproved)


def test_no_offset_of_the_pieces_sum_wraps():
    pointers = ("Part", "Part_ml", "V_scale", "V_mean", "Lse")
    types = {**dict.fromkeys(pointers, "*fp32"), "Out": "*bf16"}
    constexprs = dict(D_V=128, FP8=True, KEEPS_MAX=False, BLOCK_M=192, BLOCK_DV=128, ROWS=16)
    text = kernels.compile_kernel(hopper._combine_kernel, SM90, constexprs, types)
    facts = OF_HOPPER | {"program": (0, 2**16), "slot": (0, 2**16)}
    function = Function(text, facts).run()
    assert function.offsets > 8 and not function.unproved, "\n".join(function.unproved)
