"""A Python function that launches kernels, written down as a C++ function that launches the same.

`record` calls the function as the op itself would, but with a `Handle` for each tensor and a
`Number` for each size that is not known yet. What the function computes of them becomes C++, and so
does each launch. Where it asks a question whose answer is not known (is N_q at least 1536?), it is
called once for each answer, and the C++ function asks when it runs. So there is one plan, Python's,
and one place where it is written.

What is known of a number decides what can be decided now; the C++ function checks it of its
arguments before it does anything.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from sage_inductor.lowering.number import Facts, Number, text_of
from sage_inductor.ops.compile import Compilation, Unknown, describe
from sage_inductor.ops.gpus import Gpu

# Most rows of codes over all heads in a package. Larger inputs would need more than 384 GiB (of 64
# channels, with v and the codes), so kernels for them are not packaged.
MAX_ROWS_IN_ALL_HEADS = 2**30 - 1


@dataclasses.dataclass(frozen=True)
class TensorArgument:
    """A tensor that the C++ function is called with, as far as it is known."""

    dtype: torch.dtype
    shape: tuple[Facts, ...]
    strides: tuple[Facts, ...]


@dataclasses.dataclass(frozen=True)
class Recorded:
    source: str  # C++, which calls the kernel of a Compilation kernel_DIGEST
    compilations: dict[str, Compilation]  # by digest


def record(name: str, launch: Callable, arguments: dict, gpu: Gpu) -> Recorded:
    """The C++ function `name` of ``launch(run, gpu, *arguments)``, which returns tensors that it
    made; `run` is as ops/launch.py's. It takes the tensors and the numbers among arguments, in
    their order and tensors first, and where to put the handles of the outputs.

    arguments: by name, in launch's order: `TensorArgument` for tensors, `Facts` for numbers that
    are not known; any other value is compiled in. gpu: what the package is for; the number of its
    processors is asked when it runs.
    """
    todo, ways, compilations, outputs = [[]], [], {}, 0
    while todo:
        recording = _Recording(todo.pop())
        outputs = recording.call(launch, arguments, gpu)
        # For each question after the given ones, the answers that lead there and then differ.
        answers = list(recording.answers.values())
        todo += [answers[:i] + [False] for i in range(len(recording.given), len(answers))]
        ways.append(recording.steps)
        compilations |= recording.compilations
    tensors = [name for name, x in arguments.items() if isinstance(x, TensorArgument)]
    numbers = [name for name, x in arguments.items() if isinstance(x, Facts)]
    parameters = [
        *(f"AtenTensorHandle {each}_" for each in tensors),
        *(f"int64_t {each}" for each in numbers),
        *(f"AtenTensorHandle* out{i}" for i in range(outputs)),
    ]
    major, minor = gpu.capability
    body = [
        f"const Gpu gpu({tensors[0]}_, {10 * major + minor});",
        *(line for each, x in arguments.items() for line in _declared(each, x)),
        # All kernels now: loading one at a new length might fall into a CUDA graph's capture.
        *(f"kernel_{digest}.on(gpu.index);" for digest in compilations),
        *_joined(ways),
        "return AOTI_TORCH_SUCCESS;",
    ]
    head = f"AOTITorchError {name}(\n    {', '.join(parameters)}) {{\n"
    return Recorded(head + "\n".join(_indented(body)) + "\n}\n", compilations)


def _declared(name: str, x) -> list[str]:
    """An argument, and that it is what it was known to be."""
    if isinstance(x, Facts):
        return [f'expect("{name}", {name}, {_checked(x)});']
    if not isinstance(x, TensorArgument):
        return []
    return [
        f'const Given {name}("{name}", {name}_, {len(x.shape)}, {_dtype(x.dtype)});',
        *(f"{name}.size({i}, {_checked(facts)});" for i, facts in enumerate(x.shape)),
        *(f"{name}.stride({i}, {_checked(facts)});" for i, facts in enumerate(x.strides)),
    ]


def _checked(facts: Facts) -> str:
    high = "INT64_MAX" if facts.high > 2**63 - 1 else f"{facts.high}ll"
    return f"{facts.low}ll, {high}, {facts.divisor or 1}ll"


# -- one way through the function ----


class _Question(NamedTuple):
    text: str
    answer: bool


class _Recording:
    """C++ lines and, between them, questions with the answer of this way."""

    def __init__(self, answers: list[bool]):
        self.given = answers  # to the first questions; the answer to others is yes
        self.steps: list[str | _Question] = []
        self.answers: dict[str, bool] = {}  # by question
        self.names: dict[str, str] = {}  # by what is computed
        self.made = 0  # tensors
        self.compilations: dict[str, Compilation] = {}

    def call(self, launch: Callable, arguments: dict, gpu: Gpu) -> int:
        """Record all of it. Returns the number of outputs."""
        processors = Number(self, "gpu.processors", Facts(1, 2**15))
        values = (self._value(name, x) for name, x in arguments.items())
        outputs = launch(self.launch, gpu._replace(processors=processors), *values) or ()
        self.steps += [f"*out{i} = {x.given()};" for i, x in enumerate(outputs)]
        return len(outputs)

    def _value(self, name: str, x):
        if isinstance(x, Facts):
            return self._number(name, x)
        if not isinstance(x, TensorArgument):
            return x
        shape = (
            self._number(f"{name}.sizes[{i}]", facts, is_size=True)
            for i, facts in enumerate(x.shape)
        )
        strides = (self._number(f"{name}.strides[{i}]", facts) for i, facts in enumerate(x.strides))
        return Handle(self, name, x.dtype, tuple(shape), tuple(strides))

    def _number(self, text: str, facts: Facts, is_size: bool = False) -> int | Number:
        return facts.low if facts.low == facts.high else Number(self, text, facts, is_size)

    def name(self, text: str) -> str:
        """The C++ name of a value, which is computed once."""
        if text not in self.names:
            self.names[text] = f"n{len(self.names)}"
            self.steps.append(f"const int64_t {self.names[text]} = {text};")
        return self.names[text]

    def ask(self, text: str) -> bool:
        if text not in self.answers:
            at = len(self.answers)
            self.answers[text] = self.given[at] if at < len(self.given) else True
            self.steps.append(_Question(text, self.answers[text]))
        return self.answers[text]

    def expect(self, text: str) -> None:
        if f"expect({text});" not in self.steps:
            self.steps.append(f"expect({text});")

    def make(self, shape: tuple, dtype: torch.dtype) -> "Handle":
        name = f"t{self.made}"
        self.made += 1
        self.steps.append(f"Made {name}({_list(shape)}, {_dtype(dtype)}, gpu);")
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        return Handle(self, name, dtype, shape, tuple(strides), was_made=True)

    def launch(self, kernel, grid: tuple, tensors: tuple, numbers: tuple, **options) -> None:
        """As ops/launch.py's `run`."""
        arguments = *tensors, *numbers
        kinds = [
            Unknown(x.facts.high, x.facts.divisor) if isinstance(x, Number) else x
            for x in arguments
        ]
        compilation = describe(kernel, kinds, options)
        self.compilations[compilation.digest] = compilation
        name, lines, descriptors = f"kernel_{compilation.digest}", ["Arguments a;"], 0
        for x, kind in zip(arguments, compilation.types, strict=True):
            if kind == "constexpr":
                continue
            if isinstance(x, Handle):
                lines.append(f"a.pointer({x.name}.data);")
            elif hasattr(x, "block_shape"):
                of = f"{name}.descriptors[{descriptors}], {x.base.name}.data"
                lines.append(f"a.descriptor({of}, {_list(x.shape)}, {_list(x.strides)});")
                descriptors += 1
            else:
                lines.append(f"a.{kind}({text_of(x)});")
        x, y, z = map(text_of, (*grid, 1, 1)[:3])
        lines.append(f"launch({name}, gpu, {x}, {y}, {z}, a);")
        self.steps += ["{", *_indented(lines), "}"]


class Handle:
    """A tensor of the C++ function, as what launches read of tensors: all at 16-byte addresses."""

    def __init__(
        self, recording: _Recording, name: str, dtype: torch.dtype, shape: tuple, strides: tuple,
        was_made: bool = False,
    ):  # fmt: skip
        self.recording, self.name, self.dtype = recording, name, dtype
        self.shape, self.strides = Shape(shape), strides
        self.was_made = was_made  # by the C++ function, and is not a view: contiguous

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
        return self.recording.make(shape, dtype or self.dtype)

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
        for n, wanted, stride in zip(self.shape, shape, self.strides, strict=True):
            if text_of(n) != text_of(wanted):
                text = f"{text_of(n)} == {text_of(wanted)} ? {text_of(stride)} : 0"
                facts = Facts(0, Facts.of(stride).high, Facts.of(stride).divisor)
                stride = Number(self.recording, self.recording.name(text), facts)
            strides.append(stride)
        return self._as(shape, strides)

    def _as(self, shape, strides) -> "Handle":
        return Handle(self.recording, self.name, self.dtype, tuple(shape), tuple(strides))

    def given(self) -> str:
        """C++ that gives it away, as an output."""
        view = "" if self.was_made else f"{_list(self.shape)}, {_list(self.strides)}"
        return f"{self.name}.give({view})"


class Shape(tuple):
    def numel(self):
        n = math.prod(self)
        return n.at_most(MAX_ROWS_IN_ALL_HEADS) if isinstance(n, Number) else n

    def __getitem__(self, index):
        found = super().__getitem__(index)
        return Shape(found) if isinstance(index, slice) else found


# -- C++ ----


def _joined(ways: list[list]) -> list[str]:
    """The C++ of all ways, which are the same up to each question."""
    for i, step in enumerate(ways[0]):
        if isinstance(step, _Question):
            yes, no = (
                _indented(_joined([way[i + 1 :] for way in ways if way[i].answer == answer]))
                for answer in (True, False)
            )
            return [*ways[0][:i], f"if ({step.text}) {{", *yes, "} else {", *no, "}"]
    return ways[0]


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _list(numbers) -> str:
    return f"{{{', '.join(map(text_of, numbers))}}}"


def _dtype(dtype: torch.dtype) -> str:
    return f"aoti_torch_dtype_{str(dtype).removeprefix('torch.')}()"
