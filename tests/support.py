"""What tests of several rooms share: inputs in the layout that models give, calls, measures."""

import contextlib
import copy
import os
import re
import runpy
import subprocess
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager_decomp_partition
from torch._inductor import compile_fx
from torch.fx import Graph, GraphModule, Node

from sage_inductor import backend
from sage_inductor.choose import tables
from sage_inductor.ops import gpus, launch
from sage_inductor.ops.attention import nvfp4, triton
from sage_inductor.ops.attention_call import AttentionCall
from sage_inductor.ops.compat import InductorWrapper
from sage_inductor.ops.formats import NO_QUERY, Prepared
from sage_inductor.ops.quantize.op import launch_prepare
from sage_inductor.ops.recipe import NAMED
from sage_inductor.ops.reference import attention as reference
from sage_inductor.ops.reference import quantize as reference_of
from sage_inductor.ops.reference.exact import attention_exact
from sage_inductor.ops.sdpa import attention_call as composed
from sage_inductor.ops.sdpa import prepare
from sage_inductor.ops.visibility import NO_LISTS, BlockLists, Visibility
from sage_inductor.patterns.graph import op_name


def swept(*values, unless: bool = False):
    """A variant that the sweep alone runs."""
    return pytest.param(*values, marks=[pytest.mark.sweep] * (not unless))


everywhere = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])

# -- measures ----


def relative_l1(actual: Tensor, expected: Tensor) -> float:
    """sum |error| / sum |expected|, the papers' measure."""
    error = (actual.double() - expected.double()).abs().sum()
    return (error / expected.double().abs().sum()).item()


def relative_l2(actual: Tensor, expected: Tensor) -> float:
    """|error| / |expected|, in the Euclidean norm."""
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def cos_sim(actual: Tensor, expected: Tensor) -> float:
    return F.cosine_similarity(actual.double().flatten(), expected.double().flatten(), 0).item()


# -- programs ----


def config_anew(monkeypatch, **environment):
    """sage_inductor.config as another process would have it: beside the one that is in force."""
    for name, value in environment.items():
        monkeypatch.setenv(f"SAGE_INDUCTOR_{name}", value)
    found = runpy.run_path(Path(backend.__file__).with_name("options.py"))
    return SimpleNamespace(**vars(found["config"]))


def compile_cpp(source, program) -> str:
    """A C++ program that uses torch, by g++ alone. On a GPU with what CUDA graphs need (WITH_CUDA),
    unless that is missing: returns what is missing, else ""."""
    root = Path(torch.__file__).parent
    cuda, missing = [], "there is no GPU"
    if torch.cuda.is_available():
        homes = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))]
        homes[:0] = sorted((root.parent / "nvidia").glob("*"))  # pip's, of torch's own version
        headers = [home / "include" for home in homes if (home / "include/cuda_runtime.h").exists()]
        libraries = [path for home in homes for path in home.glob("lib*/libcudart.so*")]
        cuda = ["-ltorch_cuda", "-lc10_cuda"]
        missing = "CUDA graphs in C++ need cuda_runtime.h and libcudart.so of the CUDA toolkit"
        if headers and libraries:
            cuda += ["-DWITH_CUDA", *(f"-I{path}" for path in reversed(headers)), libraries[0]]
            cuda += [f"-Wl,-rpath,{libraries[0].parent}"]
            missing = ""
    subprocess.run(
        ["g++", "-std=c++20", "-O0", source, "-o", program, f"-I{root}/include",
         f"-I{root}/include/torch/csrc/api/include", f"-L{root}/lib", f"-Wl,-rpath,{root}/lib",
         f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", "-pthread",
         "-Wl,--no-as-needed", "-ltorch_cpu", *cuda, "-lc10", "-ltorch"],
        check=True,
    )  # fmt: skip
    return missing


# -- inputs ----


def heads(B: int, H: int, N: int, D: int, dtype=torch.float32, device="cpu") -> Tensor:
    """Random [B, H, N, D], stored as [B, N, H, D]: what a projection's output is viewed as."""
    return torch.randn(B, N, H, D, device=device).to(dtype).transpose(1, 2)


def qkv(B=2, H_q=4, H_kv=2, N_q=65, N_kv=70, D=64, dtype=torch.float32, device="cpu"):
    """q, k with a bias in each channel, v with a mean: random normal inputs hide wrong smoothing
    and one-level accumulation."""
    k_bias = 4 * torch.randn(H_kv, 1, D, device=device).to(dtype)
    q, k, v = (
        heads(B, H, N, D, dtype, device) for H, N in ((H_q, N_q), (H_kv, N_kv), (H_kv, N_kv))
    )
    return q, k + k_bias, v + 3


def block_lists(
    B, H, n_q, n_kv, block_q, block_kv, density, full=True, device="cpu", unread=2**30
) -> BlockLists:  # fmt: skip
    """Random lists of blocks in random order, for B or 1 batches and H or 1 heads of q: a block is
    named with probability `density` in each of the two lists. One row of eight names none, one of
    four names a block twice. What lies beyond a list's count is `unread`."""

    def lists():
        M, blocks = -(-n_q // block_q), -(-n_kv // block_kv)
        named = torch.rand(B, H, M, blocks) < density * (torch.rand(B, H, M, 1) > 1 / 8)
        order = torch.where(named, torch.rand(named.shape), 2).argsort(-1)
        count = named.sum(-1)
        twice = (torch.rand(B, H, M) < 1 / 4) & (count > 0)
        index = torch.cat([order, order[..., :1]], -1)
        index = torch.where(twice[..., None], index.roll(1, -1), index)
        count = count + twice
        index = torch.where(torch.arange(blocks + 1) < count[..., None], index, unread)
        return count.int().to(device), index.int().to(device)

    return BlockLists(*lists(), *(lists() if full else (None, None)), block_q, block_kv)


def with_gaps(x: Tensor, order=(0, 1, 2, 3), gap=3) -> Tensor:
    """x [B, H, N, D], stored in this order with so many elements between its rows: SDPA's output on
    CUDA, where D is no multiple of 8."""
    rows = F.pad(x.permute(order), (0, gap))[..., : x.shape[3]]
    return rows.permute([order.index(d) for d in range(4)])


# -- calls ----


def arguments(q, k, v, is_causal=False, scale=0.125, recipe="sage2-8b", **given) -> tuple:
    """The arguments of ``torch.ops.sage.sdpa`` in its schema's order, the rest as SDPA has it.
    recipe: a name, a Recipe or its string."""
    recipe = NAMED.get(recipe, recipe)
    recipe = recipe if isinstance(recipe, str) else recipe.encode()
    schema = torch.ops.sage.sdpa.default._schema.arguments
    values = {x.name: x.default_value for x in schema} | dict(
        q=q, k=k, v=v, prepared=[], right=0 if is_causal else None,
        bottom_right=False, scale=scale, recipe=recipe, out_bnhd=True, portable=False,
    )  # fmt: skip
    assert given.keys() <= values.keys(), given.keys()
    return tuple((values | given)[x.name] for x in schema)


def sdpa(*args, **kwargs) -> tuple[Tensor, Tensor]:
    return torch.ops.sage.sdpa(*arguments(*args, **kwargs))


def exactly(q, k, v, is_causal, scale, attn_mask=None, **band) -> tuple[Tensor, Tensor]:
    band = {"right": 0 if is_causal else None, **band}
    return attention_exact(q, k, v, scale, attn_mask, **band)


def check_gradients(
    q, k, v, attn_mask=None, scale=0.125, recipe="sage2-8b", tolerance=1e-4, **band
) -> None:  # fmt: skip
    """Those of sage::sdpa are exact attention's. tolerance: in fp32."""
    out, lse = sdpa(q, k, v, False, scale, recipe, attn_mask=attn_mask, **band)
    exact, _ = exactly(q, k, v, False, scale, attn_mask, **band)
    assert not lse.requires_grad
    inputs = [x for x in (q, k, v, attn_mask) if x is not None and x.requires_grad]
    cotangent = torch.randn_like(out) * (exact != 0)  # rows that see nothing have no gradient
    found, expected = (torch.autograd.grad(x, inputs, cotangent.to(x)) for x in (out, exact))
    for a, e in zip(found, expected, strict=True):
        most = tolerance if a.dtype == q.dtype == torch.float32 else 3e-2
        assert a.isfinite().all()
        torch.testing.assert_close(a, e.nan_to_num(0).to(a.dtype), rtol=most, atol=most)


# -- what the attention ops read ----


def attention_call(
    q, k, v, recipe, visibility=None, scale=0.1, out_bnhd=True, prepared=None, **given
) -> AttentionCall:
    """What the attention op of a recipe (or its name) takes: of what `prepared` holds, or the
    device's kernels (on CPU the reference) make of k and v."""
    r = NAMED[recipe] if isinstance(recipe, str) else recipe
    visibility = visibility or Visibility()
    if prepared is None:
        prepared = prepared_of(k, v, visibility, r)
    prepared = Prepared(*prepared)
    return composed(q, k, v, prepared, visibility, scale, r, out_bnhd, **given)


def prepared_of(k: Tensor, v: Tensor, visibility: Visibility, r) -> Prepared:
    """With a tail, if there is one: no op of its own makes that."""
    if (block := visibility.blocks.tail_block) is None:
        return prepare(k, v, visibility, r)
    if k.is_cuda:
        return launch_prepare(launch.run, k.device, k, v, visibility.keys(k), r, block)
    return reference_of.quantize_kv(k, v, visibility.keys(k), r, block)


def run(kernel, grid, tensors, numbers, **options) -> None:
    """As ops/launch.py's, on CPU by Triton's interpreter."""
    if tensors[0].device.type == "cpu":
        kernel[grid](*tensors, *numbers, **options)
    else:
        launch.run(kernel, grid, tensors, numbers, **options)


def launch_portable(a: AttentionCall, tile, tma=False) -> tuple[Tensor, Tensor]:
    """out and lse of the portable kernel of the call's recipe."""
    if a.decoded.of_qk.block_scaled:
        return nvfp4.launch(a, tile, run, native=False)
    return triton.launch(a, tile, run, tma=tma)


def run_portable(
    q, k, v, recipe, tile, scale=0.1, attn_mask=None, band=(None, None, False), blocks=NO_LISTS
):  # fmt: skip
    """(out, lse) of the portable kernel of a recipe, and those of its emulation: of the same
    quantized k and v, lse that of the smoothed keys."""
    visibility = Visibility.of(attn_mask, band, k.shape[2], tile.BLOCK_M, blocks)
    a = attention_call(q, k, v, recipe, visibility, scale)
    return launch_portable(a, tile), reference.attention(a, tile.BLOCK_N)


# -- graphs ----


def random_qkv(
    B=2, H=4, H_kv=None, N=32, N_kv=None, D=64, dtype=torch.float32, requires_grad=False
) -> tuple:  # fmt: skip
    """Random q [B, H, N, D], k and v [B, H_kv, N_kv, D]."""
    shape_kv = B, H_kv or H, N_kv or N, D
    given = dict(dtype=dtype, requires_grad=requires_grad)
    return tuple(torch.randn(x, **given) for x in ((B, H, N, D), shape_kv, shape_kv))


def band_mask(band, n_q: int, n_kv: int) -> Tensor:
    """What a patterns.call.Band lets queries see, [n_q, n_kv]."""
    distance = torch.arange(n_kv) - torch.arange(n_q)[:, None] - (n_kv - n_q) * band.bottom_right
    mask = torch.ones(n_q, n_kv, dtype=torch.bool)
    mask &= True if band.left is None else distance >= -band.left
    return mask & (True if band.right is None else distance <= band.right)


@contextlib.contextmanager
def on_gpu(capability=(9, 0), name="NVIDIA Test"):
    """Calls are decided as on this GPU, which is not there."""
    with (
        mock.patch.object(gpus, "capability", lambda device: capability),
        mock.patch.object(tables, "gpu_name", lambda device: name),
    ):
        yield


def placeholders(graph: Graph, values, key="example_value") -> list[Node]:
    """Inputs of a graph that is made by hand: of a list, or by their names. key: Dynamo's, or "val",
    an export's."""
    named = values if isinstance(values, dict) else {f"x{i}": x for i, x in enumerate(values)}
    return [valued(graph.placeholder(name), x, key) for name, x in named.items()]


def valued(node: Node, value, key="example_value") -> Node:
    node.meta[key] = value
    return node


def every(functions: dict):
    """All in one graph: to trace and to export each by itself takes most of the time."""
    return lambda q, k, v: [function(q, k, v) for function in functions.values()]


def run_seen(function, *inputs, see, kwargs=None, **options):
    """What `function` returns, compiled to the graphs that `see` was shown (and may have changed)."""

    def backend(gm, _):
        see(gm)
        return gm.forward

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True, **options)
    return compiled(*inputs, **(kwargs or {}))


def run_copies(function, *inputs, sees, **options) -> list:
    """What the graph of `function` returns after each of `sees` has changed a copy of it: it is
    traced once."""
    found = []

    def backend(gm, _):
        copies = [GraphModule(gm, copy.deepcopy(gm.graph)) for _ in sees]
        for see, each in zip(sees, copies, strict=True):
            see(each)

        def run(*given):
            for each in copies:
                found.append(each(*(x.clone() if isinstance(x, Tensor) else x for x in given)))
            return gm(*given)

        return run

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True, **options)(*inputs)
    return found


def op_by_op(here: bool = True, split: bool = False):
    """Where backend="sage" runs the graphs that it rewrote op by op: Inductor compiles nothing.
    split: into forward and backward, which save for each other what they do under Inductor."""
    if here:
        return mock.patch.object(backend, "InductorWrapper", _Split if split else _OpByOp)
    return contextlib.nullcontext()


class _OpByOp(InductorWrapper):
    def __call__(self, gm, example_inputs):
        return _as_it_is_now(gm).forward


class _Split(InductorWrapper):
    def __call__(self, gm, example_inputs):
        return aot_eager_decomp_partition(gm, example_inputs)


def _as_it_is_now(gm: GraphModule) -> GraphModule:
    """gm becomes another stage's graph later."""
    found = GraphModule(gm, gm.graph)
    for name, child in gm.named_children():
        if isinstance(child, GraphModule) and hasattr(found, name):
            setattr(found, name, _as_it_is_now(child))
    return found


class _Opened(Exception):
    pass


def opened(program):
    """What AOTInductor makes C++ of, as a function of the inputs one after the other: the sage ops
    of a rewritten program are opened there, and aten's INT8 matmul is not among what they become:
    torch 2.11 aborted in a package with it."""
    whole = compile_fx._unlift_graph

    def stop(*given):
        raise _Opened(whole(*given))

    with mock.patch.object(compile_fx, "_unlift_graph", stop), pytest.raises(_Opened) as found:
        torch._inductor.aot_compile(
            program.module(check_guards=False),
            *program.example_inputs,
            options={"aot_inductor.package": True},
        )
    (gm,) = found.value.args
    called = [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]
    assert called and not [x for x in called if re.search("sage|int_mm|triton", x)]
    gm.graph.set_codegen(torch.fx.graph.CodeGen())  # as Inductor reads it
    gm.recompile()
    return gm


def written(graph: Graph) -> list[tuple]:
    """What compares equal while the graph stays as it was; its text is long, and takes as long."""
    return [(node, node.target, node.args, node.kwargs) for node in graph.nodes]


def calls(graph: Graph, known=()) -> str:
    """The attention calls and sage ops of a graph, one a line, and what several inputs are made of.
    Other inputs are written out, down to placeholders and nodes of `known`; versions are left out."""
    known = {*known, *(node for node in graph.nodes if not op_name(node))}
    named = [node for node in graph.nodes if re.search("sage\\.|scaled_dot", str(node.target))]
    seen, todo = set(), list(named)
    while todo:
        node = todo.pop()
        seen.add(node)
        todo += [x for x in node.all_input_nodes if x not in seen and x not in known]
    shared = {x for x in seen if len(x.users) > 1 and op_name(x) != "getitem"} - known
    named = shared.union(named)

    def text(x) -> str:
        if isinstance(x, (list, tuple)):
            return f"[{', '.join(map(text, x))}]"
        return expression(x) if isinstance(x, Node) and x not in known | named else str(x)

    def expression(node) -> str:
        if op_name(node) == "getitem":
            return f"{text(node.args[0])}[{text(node.args[1])}]"
        ours = str(node.target).startswith("sage.")
        arguments = [*map(text, node.args), *(f"{k}={text(v)}" for k, v in node.kwargs.items())]
        return f"{'sage.' * ours}{op_name(node)}({', '.join(arguments)})"

    lines = [f"{node.name} = {expression(node)}" for node in graph.nodes if node in named]
    return re.sub(r"@[0-9.]+\+[0-9a-f]{8}", "@VERSION", "\n".join(lines))


# -- training ----


def check_50_steps(make, x, lr, options, **compile_options) -> None:
    """The losses of a model of `make` under backend="sage" are those under Inductor."""
    losses = {}
    target = torch.randn_like(x)
    for backend_of, given in (("inductor", None), ("sage", options)):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = make()
        compiled = torch.compile(model, backend=backend_of, options=given, **compile_options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        losses[backend_of] = []
        for _ in range(50):
            loss = F.mse_loss(compiled(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[backend_of].append(loss.item())
    actual, expected = (torch.tensor(losses[name]) for name in ("sage", "inductor"))
    assert actual.isfinite().all() and expected[-1] < 0.9 * expected[0]
    assert (actual - expected).abs().max() < 0.02 * expected[0]


def trained(
    B, H_q, H_kv, N_q, N_kv, D, dtype=torch.bfloat16, device="cpu", of_tokens=1.5
) -> tuple:  # fmt: skip
    """q, k, v and dO, stored as [B, N, H, D], k with a bias in each channel, dO's tokens of different
    size. of_tokens: the deviation of its logarithm."""
    q, k, v = qkv(B, H_q, H_kv, N_q, N_kv, D, dtype, device)
    size = torch.exp(of_tokens * torch.randn(B, H_q, N_q, 1, device=device))
    return 2 * q, k, v, heads(B, H_q, N_q, D, dtype, device).mul(size).to(dtype)


def gradients_of(op, q, k, v, grad, *given) -> tuple:
    """out of what `op` gives first, and the gradients of q, k and v."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = op(q, k, v, *given)[0]
    return out.detach(), *torch.autograd.grad(out, (q, k, v), grad)


def same_operands(found, expected, e4m3_step: float = 1 / 8) -> None:
    """What prepares ``sage::rowscaled``'s backward, found, is expected within rounding: a step in
    at most 1 % of the INT8 codes and 2 % of E4M3's, and 1e-5 of the largest scale and the like.
    e4m3_step: relative to the larger code; more than 1/8 for the interpreter, which may round all
    of them otherwise."""
    for name, a, b in zip(found._fields, found, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and a.is_contiguous(), name
        if a.dtype == torch.int8:
            far = (a.int() - b.int()).abs()
            assert far.max() <= 1 and (far > 0).float().mean() <= 0.01, name
        elif a.dtype == torch.float8_e4m3fn:
            a, b = a.float(), b.float()
            far = (a - b).abs() > e4m3_step * torch.maximum(a.abs(), b.abs()) + 2**-6
            assert a.isfinite().all() and not far.any(), name
            assert e4m3_step > 1 / 8 or (a != b).float().mean() <= 0.02, name
        else:
            assert torch.equal(a > NO_QUERY / 2, b > NO_QUERY / 2), name
            a, b = (torch.where(x > NO_QUERY / 2, 0.0, x).flatten(0, -2) for x in (a, b))
            far = (a - b).abs() > 1e-5 * b.abs().amax(-1, keepdim=True) + 1e-5 * b.abs()
            assert not far.any(), name
