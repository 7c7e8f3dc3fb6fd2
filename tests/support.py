"""What tests of several rooms share: inputs in the layout that models give them, and measures."""

import re

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from sage_inductor.patterns.graph import op_name


def relative_l1(actual: Tensor, expected: Tensor) -> float:
    """sum |error| / sum |expected|, the papers' measure."""
    error = (actual.double() - expected.double()).abs().sum()
    return (error / expected.double().abs().sum()).item()


def relative_l2(actual: Tensor, expected: Tensor) -> float:
    """|error| / |expected|, in the Euclidean norm."""
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def cos_sim(actual: Tensor, expected: Tensor) -> float:
    return F.cosine_similarity(actual.double().flatten(), expected.double().flatten(), 0).item()


def heads(B: int, H: int, N: int, D: int, dtype=torch.float32, device="cpu") -> Tensor:
    """Random [B, H, N, D], stored as [B, N, H, D]: what a projection's output is viewed as."""
    return torch.randn(B, N, H, D, device=device).to(dtype).transpose(1, 2)


def qkv(B=2, H=4, H_kv=None, N=32, N_kv=None, D=64, dtype=torch.float32) -> tuple:
    """Random q [B, H, N, D], k and v [B, H_kv, N_kv, D]."""
    shape_kv = B, H_kv or H, N_kv or N, D
    return tuple(torch.randn(x, dtype=dtype) for x in ((B, H, N, D), shape_kv, shape_kv))


def band_mask(band, n_q: int, n_kv: int) -> Tensor:
    """What a patterns.call.Band lets queries see, [n_q, n_kv]."""
    distance = torch.arange(n_kv) - torch.arange(n_q)[:, None] - (n_kv - n_q) * band.bottom_right
    mask = torch.ones(n_q, n_kv, dtype=torch.bool)
    mask &= True if band.left is None else distance >= -band.left
    return mask & (True if band.right is None else distance <= band.right)


def run_seen(function, *inputs, see, kwargs=None, **options):
    """What `function` returns, compiled to the graphs that `see` was shown (and may have changed)."""

    def backend(gm, _):
        see(gm)
        return gm.forward

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True, **options)
    return compiled(*inputs, **(kwargs or {}))


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
