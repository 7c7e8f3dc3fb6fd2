"""Opaque ops in AOTInductor packages: a C++ function each, in the package's own wrapper.

Inductor would call an op that it does not look into by its name, which needs Python and this
library. In a package the call is a call of C++ that `record` writes of the op's own Python, with
the compiled kernels beside it: no other file, no Python, no compiler. launcher.h launches them.
"""

import concurrent.futures
import math
from pathlib import Path

import sympy
import torch
from triton import knobs

from sage_inductor.lowering.record import Facts, TensorArgument, kernel_source, record
from sage_inductor.ops.attention import tiles
from sage_inductor.ops.attention.arguments import AttentionCall
from sage_inductor.ops.attention.select import Problem, attention_opaque, run_opaque, select
from sage_inductor.ops.compat import (
    FallbackKernel,
    TensorBox,
    add_layout_constraint,
    constrain_to_fx_strides,
    register_lowering,
    virtualized,
)
from sage_inductor.ops.launch import HAS_PDL
from sage_inductor.ops.quantize.one_pass import launch_kv
from sage_inductor.ops.quantize.op import quantize_kv_opaque
from sage_inductor.ops.recipe import decode

HEADER = Path(__file__).with_name("launcher.h")
DIVISORS = (16, 8, 4, 2)  # elements that a stride may be a multiple of: 16 bytes of any dtype


def _attention(given: dict, run) -> tuple:
    a = AttentionCall(**given)
    problem = Problem(a.q.device.capability, a.decoded, a.head_dim, a.attn_mask is not None)
    return run_opaque(a, select(problem).tile, run)


def _quantize_kv(given: dict, run) -> list:
    given["recipe"] = decode(given["recipe"])
    return launch_kv(**given, run=run, pdl=HAS_PDL).tensors()


# op -> what it launches, as `record` calls it
LAUNCHES = {attention_opaque: _attention, quantize_kv_opaque: _quantize_kv}


class Packaged(FallbackKernel):
    """A call of an opaque op; in a package, of C++ that is spliced into its wrapper."""

    def codegen(self, wrapper) -> None:
        if not virtualized.graph.aot_mode:
            super().codegen(wrapper)
            return
        nodes, constants = self.unflatten_args(self.inputs, self.constant_args)
        names = [each.name for each in self.op_overload._schema.arguments]
        given = {
            each.name: each.default_value
            for each in self.op_overload._schema.arguments
            if each.has_default_value()
        }
        given |= dict(zip(names, nodes, strict=False)) | constants
        arguments = {name: _described(given[name]) for name in names}
        self.cpp_kernel_name = _function(wrapper, self.op_overload, arguments, self.get_device())
        tensors = [
            given[name].codegen_reference()
            for name, x in arguments.items()
            if isinstance(x, TensorArgument)
        ]
        numbers = [
            wrapper.val_to_arg_str(given[name])
            for name, x in arguments.items()
            if isinstance(x, Facts)
        ]
        self.codegen_comment(wrapper)
        wrapper.generate_c_shim_fallback_kernel(self, tensors + numbers)
        self.codegen_unbacked_symbol_defs(wrapper)


for _op in LAUNCHES:
    add_layout_constraint(_op, constrain_to_fx_strides)  # as of an op without a lowering

    @register_lowering(_op, type_promotion_kind=None)
    def _(*args, _op=_op, **kwargs):
        outputs = Packaged.create(_op, *args, **kwargs)  # a list, or a tuple
        return type(outputs)(map(TensorBox.create, outputs))


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
    x = sympy.sympify(x.node.expr if isinstance(x, torch.SymInt) else x)
    if x.is_Integer:
        return Facts(int(x), int(x), abs(int(x)))
    sizes = virtualized.graph.sizevars
    bounds = sizes.shape_env.bound_sympy(x)
    # torch's bounds begin at 2, whatever Dim(min=1) says, and packages run at 1 all the same.
    low, high = min(1, int(bounds.lower)), bounds.upper
    divisor = next((n for n in DIVISORS if sizes.statically_known_multiple_of(x, n)), 1)
    return Facts(max(0, low), int(high) if high.is_Integer else math.inf, divisor)


def _function(wrapper, op, arguments: dict, device: torch.device) -> str:
    """The name of the C++ function of such a call, which the wrapper has from now on."""
    functions = wrapper.__dict__.setdefault("sage_functions", {})
    key = op, *arguments.items()
    if key not in functions:
        if not functions:
            wrapper.header.splice(HEADER.read_text())
        # Of torch's, names that begin so are called as they are.
        functions[key] = f"aoti_torch_sage_{len(functions)}"
        kernels = wrapper.__dict__.setdefault("sage_kernels", {})
        gpu = tiles.Gpu(tiles.capability(device), processors=0)
        wrapper.header.splice(_source(functions[key], op, arguments, gpu, kernels))
    return functions[key]


def _source(name: str, op, arguments: dict, gpu: tiles.Gpu, kernels: dict[str, str]) -> str:
    """The C++ of one function, and of the kernels that are not among `kernels` yet."""
    recorded = record(LAUNCHES[op], arguments, gpu)
    new = {d: each for d, each in recorded.compilations.items() if d not in kernels}
    with knobs.compilation.scope(), concurrent.futures.ThreadPoolExecutor(4) as pool:
        knobs.compilation.disable_line_info = True  # 156 kB a cubin, not 538
        compiled = pool.map(lambda each: each.compile(gpu.capability), new.values())
        sources = []
        for (digest, each), found in zip(new.items(), compiled, strict=True):
            kernels[digest] = f"sage_kernel_{digest}"
            sources.append(kernel_source(kernels[digest], found, each))
    text = "".join(sources) + recorded.text(name, kernels)
    return f"namespace sage_inductor {{\nnamespace {{\n{text}}}\n}}\nusing sage_inductor::{name};\n"
