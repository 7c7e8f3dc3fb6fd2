"""A Python function that launches kernels, written down as a C++ function that launches the same.

`record(function, arguments)` calls ``function(*arguments, run)``, as the op itself would, with a
`Handle` for each tensor and a `Number` for each size that is not known yet. What the function
computes of them becomes C++, and so does each launch that reaches `run`. Where it asks a question
whose answer is not known (is N_q at least 1536?), it is called once for each answer, and the C++
function asks when it runs. So there is one plan, Python's, and one place where it is written.

What is known of a number (its bounds, what divides it) decides what can be decided now; the C++
function checks it of its arguments before it does anything.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from sage_inductor.ops.compile import Compilation, describe

CPP_DTYPES = {
    torch.float16: "aoti_torch_dtype_float16()",
    torch.bfloat16: "aoti_torch_dtype_bfloat16()",
    torch.float32: "aoti_torch_dtype_float32()",
    torch.float8_e4m3fn: "aoti_torch_dtype_float8_e4m3fn()",
    torch.int8: "aoti_torch_dtype_int8()",
    torch.int32: "aoti_torch_dtype_int32()",
    torch.uint8: "aoti_torch_dtype_uint8()",
    torch.bool: "aoti_torch_dtype_bool()",
}
LARGEST = 2**63 - 1


class Facts(NamedTuple):
    """What is known of a number while packaging."""

    low: int
    high: int | float  # math.inf: nothing
    divisor: int = 1

    @property
    def checked(self) -> str:
        high = "INT64_MAX" if self.high >= LARGEST else f"{int(self.high)}ll"
        return f"{self.low}ll, {high}, {self.divisor}ll"


class Number:
    """A whole number that is known when the C++ function runs. Sizes are not negative, so that C++
    divides as Python does; what would not be so raises."""

    __hash__ = None  # equal to what, is a question for the C++ function

    def __init__(self, recording: "_Recording", text: str, facts: Facts, is_stride: bool = False):
        self.recording, self.text, self.facts = recording, text, facts
        self.is_stride = is_stride  # may need 64 bits; sizes do not, which is checked

    def __add__(self, other):
        if type(other) is int and other == 0:
            return self
        a, b = self.facts, _facts(other)
        facts = Facts(a.low + b.low, a.high + b.high, math.gcd(a.divisor, b.divisor))
        return self._make(f"{self.text} + {_text(other)}", facts)

    def __sub__(self, other):
        if type(other) is int and other == 0:
            return self
        a, b = self.facts, _facts(other)
        facts = Facts(a.low - b.high, a.high - b.low, math.gcd(a.divisor, b.divisor))
        return self._make(f"{self.text} - {_text(other)}", facts)

    def __rsub__(self, other):
        a, b = _facts(other), self.facts
        facts = Facts(a.low - b.high, a.high - b.low, math.gcd(a.divisor, b.divisor))
        return self._make(f"{_text(other)} - {self.text}", facts)

    def __mul__(self, other):
        if type(other) is int and other == 1:
            return self
        a, b = self.facts, _facts(other)
        corners = [x * y if x and y else 0 for x in a[:2] for y in b[:2]]  # inf * 0
        facts = Facts(min(corners), max(corners), a.divisor * b.divisor)
        return self._make(f"{self.text} * {_text(other)}", facts)

    def __floordiv__(self, other):
        return _divided(self, other)

    def __rfloordiv__(self, other):
        return _divided(other, self)

    def __mod__(self, other):
        a, b = self.facts, _facts(other)
        _check_division(a, b)
        if isinstance(other, int) and a.divisor % other == 0:
            return 0
        return self._make(f"{self.text} % {_text(other)}", Facts(0, min(a.high, b.high - 1)))

    __radd__, __rmul__ = __add__, __mul__

    def __lt__(self, other):
        return _ask(self, "<", other)

    def __le__(self, other):
        return _ask(self, "<=", other)

    def __gt__(self, other):
        return not self <= other

    def __ge__(self, other):
        return not self < other

    def __eq__(self, other):
        if isinstance(other, Number) and other.text == self.text:
            return True
        a, b = self.facts, _facts(other)
        apart = a.low > b.high or a.high < b.low
        if apart or isinstance(other, int) and other % a.divisor:
            return False
        return self.recording.ask(f"{self.text} == {_text(other)}")

    def __ne__(self, other):
        return not self == other

    def __bool__(self):
        return self != 0

    def __index__(self):
        raise TypeError(f"a number that is known only when a package runs: {self.text}")

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        names = {torch.sym_max: "std::max", torch.sym_min: "std::min"}
        if function not in names:
            return NotImplemented
        pick = max if function is torch.sym_max else min
        a, b = map(_facts, args)
        number = next(x for x in args if isinstance(x, Number))
        facts = Facts(pick(a.low, b.low), pick(a.high, b.high), math.gcd(a.divisor, b.divisor))
        return number._make(f"{names[function]}<int64_t>({', '.join(map(_text, args))})", facts)

    def _make(self, text: str, facts: Facts):
        if facts.low == facts.high:
            return facts.low
        return Number(self.recording, self.recording.name(text), facts)


def _facts(x) -> Facts:
    return x.facts if isinstance(x, Number) else Facts(x, x, abs(x))


def _text(x) -> str:
    return x.text if isinstance(x, Number) else f"{int(x)}"


def _check_division(a: Facts, b: Facts) -> None:
    if a.low < 0 or b.low <= 0:
        raise ArithmeticError(f"C++ divides by zero or rounds otherwise: {a} by {b}")


def _divided(x, y):
    a, b = _facts(x), _facts(y)
    _check_division(a, b)
    number = x if isinstance(x, Number) else y
    exact = isinstance(y, int) and a.divisor % y == 0
    high = a.high if a.high == math.inf else a.high // b.low
    low = 0 if b.high == math.inf else a.low // b.high
    facts = Facts(low, high, a.divisor // y if exact else 1)
    return number._make(f"{_text(x)} / {_text(y)}", facts)


def _ask(x: Number, operator: str, y) -> bool:
    """x < y or x <= y."""
    a, b = x.facts, _facts(y)
    if operator == "<":
        always, never = a.high < b.low, a.low >= b.high
    else:
        always, never = a.high <= b.low, a.low > b.high
    return always or not never and x.recording.ask(f"{x.text} {operator} {_text(y)}")


# -- tensors ----


class Shape(tuple):
    def numel(self):
        return math.prod(self)

    def __getitem__(self, index):
        found = super().__getitem__(index)
        return Shape(found) if isinstance(index, slice) else found


class Handle:
    """A tensor of the C++ function, as what launches read of tensors: all at 16-byte addresses."""

    def __init__(
        self, recording, name: str, dtype: torch.dtype, device, shape, strides, was_made=False
    ):  # fmt: skip
        self.recording, self.name, self.dtype, self.device = recording, name, dtype, device
        self.shape, self.strides = Shape(shape), tuple(map(_as_stride, strides))
        self.was_made = was_made  # here, and so is contiguous

    def stride(self, dim: int | None = None):
        return self.strides if dim is None else self.strides[dim]

    def dim(self) -> int:
        return len(self.shape)

    def element_size(self) -> int:
        return self.dtype.itemsize

    def data_ptr(self) -> Number:
        return Number(self.recording, f"{self.name}.data", Facts(0, math.inf, 16))

    def new_empty(self, *shape, dtype: torch.dtype | None = None) -> "Handle":
        shape = shape[0] if isinstance(shape[0], tuple) else shape
        return self.recording.allocate(shape, dtype or self.dtype, self.device)

    def transpose(self, a: int, b: int) -> "Handle":
        order = list(range(self.dim()))
        order[a], order[b] = b, a
        return self._as([self.shape[i] for i in order], [self.strides[i] for i in order])

    def view(self, rows: int, columns) -> "Handle":
        """view(-1, shape[-1]) of a contiguous tensor."""
        if rows != -1 or columns != self.shape[-1]:
            raise NotImplementedError("views of a tensor as its rows alone")
        if not self.was_made:
            self.recording.steps.append(f"{self.name}.contiguous({self.dim()});")
        return self._as((self.shape[:-1].numel(), columns), (columns, 1))

    def expand(self, *shape) -> "Handle":
        strides = []
        for n, stride in zip(self.shape, self.strides, strict=True):
            if isinstance(n, Number):
                once = self.recording.name(f"{n.text} == 1 ? 0 : {_text(stride)}")
                facts = Facts(0, _facts(stride).high, _facts(stride).divisor)
                stride = Number(self.recording, once, facts)
            strides.append(0 if isinstance(n, int) and n == 1 else stride)
        return self._as(shape, strides)

    def _as(self, shape, strides) -> "Handle":
        return Handle(self.recording, self.name, self.dtype, self.device, shape, strides)


def _as_stride(x):
    return Number(x.recording, x.text, x.facts, is_stride=True) if isinstance(x, Number) else x


def _contiguous(shape) -> tuple:
    strides = [1]
    for n in reversed(shape[1:]):
        strides.insert(0, strides[0] * n)
    return tuple(strides)


# -- what is recorded ----


class Launch(NamedTuple):
    compilation: Compilation
    source: str  # C++ with the kernel's name for KERNEL


class Question(NamedTuple):
    text: str
    answer: bool


class _Recording:
    """One way through the function: C++ lines, launches, and questions with an answer each."""

    def __init__(self, answers: list[bool]):
        self.given, self.steps, self.known, self.names = answers, [], {}, {}

    def name(self, text: str) -> str:
        """The C++ name of a value, computed once."""
        if text not in self.names:
            self.names[text] = f"n{len(self.names)}"
            self.steps.append(f"const int64_t {self.names[text]} = {text};")
        return self.names[text]

    def ask(self, text: str) -> bool:
        if text not in self.known:
            at = len(self.known)
            self.known[text] = self.given[at] if at < len(self.given) else True
            self.steps.append(Question(text, self.known[text]))
        return self.known[text]

    def allocate(self, shape, dtype: torch.dtype, device) -> Handle:
        name = f"t{sum(isinstance(x, str) and x.startswith('Made ') for x in self.steps)}"
        sizes = ", ".join(map(_text, shape))
        self.steps.append(f"Made {name}({{{sizes}}}, {CPP_DTYPES[dtype]}, gpu);")
        return Handle(self, name, dtype, device, shape, _contiguous(shape), was_made=True)

    def launch(self, kernel, grid: tuple, tensors: tuple, numbers: tuple, **options) -> None:
        """As ops/launch.py's ways to launch."""
        arguments = [self._kind(x) for x in (*tensors, *numbers)]
        compilation = describe(kernel, arguments, options)
        lines, descriptors = ["Arguments a;"], 0
        for x, kind in zip((*tensors, *numbers), compilation.types, strict=True):
            if kind == "constexpr":
                continue
            if isinstance(x, Handle):
                lines.append(f"a.pointer({x.name}.data);")
            elif hasattr(x, "block_shape"):
                shape, strides, block = (
                    ", ".join(map(_text, each)) for each in (x.shape, x.strides, x.block_shape)
                )
                at = f"KERNEL.descriptors[{descriptors}], {x.base.name}.data"
                lines.append(f"a.descriptor({at}, {{{shape}}}, {{{strides}}}, {{{block}}});")
                descriptors += 1
            else:
                lines.append(f"a.{kind}({_text(x)});")
        x, y, z = (_text(n) for n in (*grid, 1, 1)[:3])
        lines.append(f"launch(KERNEL, gpu, {x}, {y}, {z}, a);")
        self.steps.append(Launch(compilation, "\n".join(lines)))

    @staticmethod
    def _kind(x):
        """An argument as `describe` takes it."""
        if isinstance(x, Number):
            wide = x.is_stride and x.facts.high >= 2**31
            return ("i64" if wide else "i32"), x.facts.divisor % 16 == 0
        return x

    def give(self, outputs) -> None:
        for i, x in enumerate(outputs):
            sizes, strides = (", ".join(map(_text, each)) for each in (x.shape, x.strides))
            view = "" if x.was_made else f"{{{sizes}}}, {{{strides}}}"
            self.steps.append(f"*out{i} = {x.name}.give({view});")


@dataclasses.dataclass(frozen=True)
class TensorArgument:
    """A tensor that the op is called with, as far as it is known."""

    dtype: torch.dtype
    shape: tuple[Facts, ...]
    strides: tuple[Facts, ...]


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A C++ function. `source` has {name} for its own name and {kernel-DIGEST} for kernels'."""

    source: str
    compilations: dict[str, Compilation]  # by digest
    outputs: int

    def text(self, name: str, kernels: dict[str, str]) -> str:
        text = self.source.replace("{name}", name)
        for digest, kernel in kernels.items():
            text = text.replace(f"{{kernel-{digest}}}", kernel)
        return text


def record(function: Callable, arguments: dict, gpu) -> Recorded:
    """The C++ function of ``function(arguments, run)``, which returns tensors that it made.

    arguments: by name, `TensorArgument` for tensors, `Facts` for numbers that are not known; any
    other value is compiled in. gpu: tiles.Gpu, of what the package is for, but the number of its
    processors, which is asked when it runs.
    """
    todo, ways, outputs = [[]], [], 0
    while todo:
        given = todo.pop()
        recording = _Recording(given)
        here = gpu._replace(processors=Number(recording, "gpu.processors", Facts(1, 2**15)))
        values = {name: _value(recording, name, x, here) for name, x in arguments.items()}
        found = function(values, recording.launch)
        recording.give(found)
        outputs = len(found)
        answers = list(recording.known.values())
        todo += [answers[:i] + [False] for i in range(len(given), len(answers))]
        ways.append(recording.steps)
    compilations = {
        step.compilation.digest: step.compilation
        for way in ways
        for step in way
        if isinstance(step, Launch)
    }
    body = _declare(arguments, gpu) + _loads(compilations) + _join(ways)
    head = [f"AtenTensorHandle {name}_" for name, x in arguments.items() if _is_tensor(x)]
    head += [f"int64_t {name}" for name, x in arguments.items() if isinstance(x, Facts)]
    head += [f"AtenTensorHandle* out{i}" for i in range(outputs)]
    lines = "\n".join(f"  {line}" for line in body)
    source = f"AOTITorchError {{name}}(\n    {', '.join(head)}) {{\n{lines}\n"
    return Recorded(source + "  return AOTI_TORCH_SUCCESS;\n}\n", compilations, outputs)


def _is_tensor(x) -> bool:
    return isinstance(x, TensorArgument)


def _value(recording: _Recording, name: str, x, gpu):
    if isinstance(x, Facts):
        return Number(recording, name, x)
    if not _is_tensor(x):
        return x

    def numbers(what: str, facts: tuple[Facts, ...]) -> list:
        return [
            f.low if f.low == f.high
            else Number(recording, f"{name}.{what}[{i}]", f)
            for i, f in enumerate(facts)
        ]  # fmt: skip

    shape, strides = numbers("sizes", x.shape), numbers("strides", x.strides)
    return Handle(recording, name, x.dtype, gpu, shape, strides)


def _declare(arguments: dict, gpu) -> list[str]:
    """Arguments, and that they are what they were known to be."""
    first = next(name for name, x in arguments.items() if _is_tensor(x))
    major, minor = gpu.capability
    lines = [f"const Gpu gpu({first}_, {10 * major + minor});"]
    for name, x in arguments.items():
        if isinstance(x, Facts):
            low, high, _ = x.checked.split(", ")
            lines.append(f'expect("{name}", {name}, {low}, {high});')
        elif _is_tensor(x):
            lines.append(f'const Given {name}("{name}", {name}_);')
            for what, facts in (("size", x.shape), ("stride", x.strides)):
                lines += [f"{name}.{what}({i}, {f.checked});" for i, f in enumerate(facts)]
    return lines


def _loads(compilations: dict) -> list[str]:
    """All kernels now: loading one at a new length might fall into the capture of a CUDA graph."""
    return [f"{{kernel-{digest}}}.on(gpu.index);" for digest in compilations]


def _join(ways: list[list]) -> list[str]:
    """The C++ of all ways, which are the same up to each question."""
    lines = []
    for i, step in enumerate(ways[0]):
        if isinstance(step, Question):
            yes, no = (
                [way[i + 1 :] for way in ways if way[i].answer == answer]
                for answer in (True, False)
            )
            inside = [_indented(_join(each)) for each in (yes, no)]
            return [*lines, f"if ({step.text}) {{", *inside[0], "} else {", *inside[1], "}"]
        if isinstance(step, Launch):
            text = step.source.replace("KERNEL", f"{{kernel-{step.compilation.digest}}}")
            lines += ["{", *_indented(text.splitlines()), "}"]
        else:
            lines.append(step)
    return lines


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]


# -- cubins ----


def kernel_source(name: str, compiled, compilation: Compilation) -> str:
    """C++ that holds a compiled kernel. Raises RuntimeError if its parameters are not those that
    launcher.h passes: a Triton that calls kernels otherwise."""
    m, image = compiled.metadata, compiled.asm["cubin"]
    found, expected = compilation.parameters(compiled.asm["ptx"])
    scratch = (m.global_scratch_size, getattr(m, "profile_scratch_size", 0) or 0)
    if found != expected or scratch != (0, 0) or m.num_ctas != 1 or m.launch_cooperative_grid:
        raise RuntimeError(
            f"{m.name}: the parameters of the compiled kernel must be {expected} bytes, one program"
            f" a block and no scratch memory, got {found}, {m.num_ctas}, {scratch}: this Triton"
            " calls kernels in another way than the launcher of packages"
        )
    descriptors = ", ".join(
        f"{{{d['swizzle']}, {d['elem_size']}, {_TMA_ELEMENT.get(d['elem_type'], d['elem_type'])}}}"
        for d in getattr(m, "tensordesc_meta", None) or ()
    )
    digest, overlaps = _fnv(image), str(bool(dict(compilation.options).get("launch_pdl"))).lower()
    return (
        f"alignas(16) const char {name}_image[] =\n{_literal(image)};\n"
        f'Kernel {name} = {{"{m.name}", {name}_image, {len(image)}u, {digest}ull, '
        f"{32 * m.num_warps}u, {m.shared}u, {overlaps}, {{{descriptors}}}}};\n"
    )


# Triton's numbers of element types, where they are not CUtensorMapDataType's: it has the signed
# and small types among them.
_TMA_ELEMENT = {8: 10, 9: 8, 10: 9}


def _literal(data: bytes) -> str:
    text = [f"\\{byte:03o}" for byte in data]
    return "\n".join(f'"{"".join(text[i : i + 120])}"' for i in range(0, len(text), 120))


def _fnv(data: bytes) -> int:
    found = 1469598103934665603
    for byte in data:
        found = (found ^ byte) * 1099511628211 & (1 << 64) - 1
    return found
