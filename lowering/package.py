"""Ops of kernels in the wrapper code that Inductor writes.

By itself Inductor would call such an op by its name, which needs Python and this library. In a
package we replace that call by a call of C++, which `record` writes from the op's own Python. The
compiled kernels are beside it, and launcher.h launches them: no other file, no Python, no compiler.
In a wrapper in Python we replace it by a call of a `Replay`, which has launcher.h launch what
Python did before.
"""

import math
from pathlib import Path
from typing import NamedTuple

import sympy
import torch
from triton import knobs

from sage_inductor.lowering.number import Facts
from sage_inductor.lowering.record import TensorArgument, record
from sage_inductor.ops import compat, gpus
from sage_inductor.ops.compat import OpOverload, TensorBox, virtualized
from sage_inductor.ops.compile import Compilation, parameters
from sage_inductor.ops.register import LAUNCHES, OPAQUE

HEADER = Path(__file__).with_name("launcher.h")


def register(op: OpOverload) -> None:
    """From now on Inductor makes a `Launched` of a call."""
    compat.add_layout_constraint(op, _stored)

    @compat.register_lowering(op, type_promotion_kind=None)
    def lower(*args, **kwargs):
        outputs = Launched.create(op, *args, **kwargs)  # a list, or a tuple; None of what writes
        return outputs and type(outputs)(map(TensorBox.create, outputs))


def _stored(node: torch.fx.Node, *args, **kwargs) -> tuple:
    """What a call reads is stored, once: of what is not stored yet, say a RoPE's k, each op would
    get a copy of its own, from one kernel that writes the same numbers two or three times. The
    strides are those of the graph: Inductor pads those of what it stores itself, and kernels take
    q_mean, delta and lists for contiguous."""
    for x in (*args, *kwargs.values()):
        if isinstance(x, TensorBox):
            x.realize()
    fakes = torch.fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    return compat.constrain_to_fake_tensors(args, kwargs, *fakes)


class Launched(compat.FallbackKernel):
    """A call of an op of kernels. Where the wrapper is Python, it becomes a call of a `Replay`;
    where it is C++, a call of C++ that is spliced into it."""

    def codegen(self, wrapper) -> None:
        given, by_name = self.unflatten_args(self.inputs, self.constant_args)
        if not virtualized.graph.cpp_wrapper or self.op_overload in OPAQUE:
            if not virtualized.graph.cpp_wrapper and compat.handles_of is not None and not by_name:
                self.python_kernel_name = _replay(wrapper, self.op_overload, given)
            super().codegen(wrapper)
            return
        schema = self.op_overload._schema.arguments
        values = {each.name: each.default_value for each in schema if each.has_default_value()}
        values |= {each.name: x for each, x in zip(schema, given, strict=False)} | by_name
        arguments = {each.name: _described(values[each.name]) for each in schema}
        self.cpp_kernel_name = _function(wrapper, self.op_overload, arguments, self.get_device())
        tensors, numbers = (
            [values[name] for name, x in arguments.items() if isinstance(x, kind)]
            for kind in (TensorArgument, Facts)
        )
        passed = [x.codegen_reference() for x in tensors]
        passed += map(wrapper.val_to_arg_str, numbers)
        self.codegen_comment(wrapper)
        wrapper.generate_c_shim_fallback_kernel(self, passed)
        self.codegen_unbacked_symbol_defs(wrapper)


for _op in LAUNCHES:
    register(_op)


def _replay(wrapper, op: OpOverload, given: list) -> str:
    """The name of the `Replay` for such a call, which the wrapper has from now on. Calls of equal
    constants share it, and what is noted of one."""
    replays = wrapper.__dict__.setdefault("sage_replays", {})
    key = op, *("tensor" if hasattr(x, "get_stride") else repr(x) for x in given)
    if key not in replays:
        replays[key] = f"sage_{wrapper.next_kernel_suffix()}"
        wrapper.add_import_once("from sage_inductor.lowering.replay import Replay")
        wrapper.define_kernel(replays[key], f"Replay(torch.ops.{op})", gpu=False)
    return replays[key]


def _described(x):
    """An argument of the call, for `record`: what Inductor knows of it now."""
    if hasattr(x, "get_stride"):
        shape, strides = (tuple(map(_facts, each)) for each in (x.get_size(), x.get_stride()))
        return TensorArgument(x.get_dtype(), shape, strides)
    if isinstance(x, (torch.SymInt, sympy.Expr)):
        facts = _facts(x)
        return facts.low if facts.low == facts.high else facts
    return x


def _facts(x) -> Facts:
    """What is known of a size or stride, by its form alone: Inductor narrows a symbol's range by
    the example's choices, which a package does not check (N < 128 of Dim(max=2048) was seen)."""
    x = sympy.sympify(x.node.expr if isinstance(x, torch.SymInt) else x)
    if x.is_Integer:
        return Facts.of(x)
    terms = sympy.Add.make_args(sympy.expand(x))
    return Facts(1, math.inf, math.gcd(*(int(term.as_coeff_Mul()[0]) for term in terms)))


def _function(wrapper, op, arguments: dict, device: torch.device) -> str:
    """The name of the C++ function of such a call, which the wrapper has from now on."""
    functions = wrapper.__dict__.setdefault("sage_functions", {})
    kernels = wrapper.__dict__.setdefault("sage_kernels", set())
    key = op, *arguments.items()
    if key not in functions:
        # torch calls functions whose names begin so as they are.
        functions[key] = f"aoti_torch_sage_{len(functions)}"
        wrapper.header.splice(_source(functions[key], op, arguments, device, kernels))
    return functions[key]


def _source(
    name: str, op, arguments: dict, device: torch.device | gpus.Gpu, kernels: set[str]
) -> str:
    """The C++ of one function, and of what it needs that the wrapper does not have yet. kernels:
    the digests of those that it has; the function's own are added."""
    gpu = gpus.Gpu(gpus.capability(device), processors=0)
    recorded = record(name, LAUNCHES[op], arguments, gpu)
    new = [each for digest, each in recorded.compilations.items() if digest not in kernels]
    # One after the other: in four threads CPython 3.11's parser, which Triton calls, failed.
    with knobs.compilation.scope():
        knobs.compilation.disable_line_info = True  # 156 kB a cubin, not 538
        compiled = [each.compile(gpu.capability) for each in new]
    text = "" if kernels else HEADER.read_text()
    text += "namespace sage_inductor {\nnamespace {\n"
    text += "".join(map(kernel_source, new, compiled))
    kernels.update(recorded.compilations)
    return f"{text}{recorded.source}}}\n}}\nusing sage_inductor::{name};\n"


# -- cubins ----


class LaunchedAs(NamedTuple):
    """What launcher.h launches a kernel with, beside its arguments."""

    threads: int
    shared: int  # bytes
    overlaps: bool  # programmatic dependent launch
    descriptors: list  # of each: swizzle, bytes of an element, its CUtensorMapDataType, the box


def launched_as(compilation: Compilation, compiled) -> LaunchedAs:
    """Raises RuntimeError if the parameters of a compiled kernel are not those that launcher.h
    passes: a Triton that calls kernels otherwise."""
    m = compiled.metadata
    found, expected = parameters(compiled.asm["ptx"]), compilation.parameters
    scratch = (m.global_scratch_size, getattr(m, "profile_scratch_size", 0) or 0)
    if found != expected or scratch != (0, 0) or m.num_ctas != 1 or m.launch_cooperative_grid:
        raise RuntimeError(
            f"{m.name}: the parameters of the compiled kernel must be {expected} bytes, one program"
            f" a block and no scratch memory, got {found}, {m.num_ctas}, {scratch}: this Triton"
            " calls kernels in another way than the launcher of packages"
        )
    descriptors = [
        (d["swizzle"], d["elem_size"], _TMA_ELEMENT.get(d["elem_type"], d["elem_type"]),
         d["block_size"])
        for d in getattr(m, "tensordesc_meta", None) or ()
    ]  # fmt: skip
    overlaps = bool(dict(compilation.options).get("launch_pdl"))
    return LaunchedAs(32 * m.num_warps, m.shared, overlaps, descriptors)


def kernel_source(compilation: Compilation, compiled) -> str:
    """C++ that holds a compiled kernel. Raises what `launched_as` raises."""
    image, name = compiled.asm["cubin"], compiled.metadata.name
    return kernel_definition(compilation.digest, name, image, *launched_as(compilation, compiled))


def kernel_definition(
    digest: str, name: str, image: bytes, threads: int, shared: int, overlaps: bool, descriptors
) -> str:
    """launcher.h's Kernel, as `record` calls it."""
    text = ", ".join(
        f"{{{swizzle}, {size}, {kind}, {{{', '.join(map(str, box))}}}}}"
        for swizzle, size, kind, box in descriptors
    )
    return (
        f"alignas(16) const char image_{digest}[] =\n{_literal(image)};\n"
        f'Kernel kernel_{digest} = {{"{name}", image_{digest}, {len(image)}u, {_fnv(image)}ull, '
        f"{threads}u, {shared}u, {str(overlaps).lower()}, {{{text}}}}};\n"
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
