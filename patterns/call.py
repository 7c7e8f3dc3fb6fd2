"""One attention call, whoever spells it, in the terms of scaled_dot_product_attention.

A finder (sdpa.py, handwritten.py, modules.py, flex.py) looks at one node of a graph and returns the
`Call` that it anchors, or None. What a replacement needs beside the graph's own nodes (a transpose,
a projection) the finder inserts before the anchor with an `Emitter`; a call that stays as it was
loses them again, and its graph is what it was.
"""

import contextlib
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import Node
from torch.fx.node import map_arg


@dataclasses.dataclass(frozen=True)
class Band:
    """Query i sees keys i - left .. i + right; None: no bound. bottom_right: the diagonal ends at
    the last query and the last key (i + N_kv - N_q) instead of starting at the first of both."""

    left: int | None = None
    right: int | None = None
    bottom_right: bool = False

    @property
    def kind(self) -> str:
        """What the crossover table calls it."""
        if self.left is None:
            return "full" if self.right is None else "causal"
        return "window"

    def __str__(self):
        bounds = {
            "full": "none",
            "causal": f"causal{f' + {self.right}' * bool(self.right)}",
            "window": f"window({self.left}, {self.right})",
        }
        return bounds[self.kind] + ", bottom right" * self.bottom_right


FULL, CAUSAL = Band(), Band(None, 0)
AUTOCAST = ("_enter_autocast", "_exit_autocast")
NESTING = ("_increment_nesting", "_decrement_nesting")


class Survey:
    """What one walk over a graph finds that each of its calls is asked about: deep models have many
    calls, and a walk for each would be a square.

    What the pass inserts or erases later changes none of it."""

    def __init__(self, graph: torch.fx.Graph):
        self.graph = graph
        names = [(node, op_name(node)) for node in graph.nodes]
        self.autocasts = [node for node, name in names if name in AUTOCAST]
        self.nesting = [node for node, name in names if name.endswith(NESTING)]

    @functools.cached_property
    def writers(self) -> list[Node]:
        return [node for node in self.graph.nodes if may_write(node)]

    @functools.cached_property
    def written(self) -> dict:
        """Storages that some node may write to, with a tensor that keeps each alive: another
        one may otherwise be given its address."""
        return {key: value for node in self.writers for key, value in storages(node).items()}

    def autocasts_around(self, node: Node) -> list[tuple]:
        """torch.autocast's arguments for each region of the graph that `node` is in, outermost
        first.

        A region that starts outside of the graph is not among them: the whole function's is on
        while the backend runs, that around a nested graph (checkpoint, cond) cannot be seen from
        within."""
        entered = []
        for each in itertools.takewhile(lambda each: each < node, self.autocasts):
            if op_name(each) == "_enter_autocast":
                entered.append(each)
            else:
                entered.remove(each.args[0])
        return [enter.args for enter in entered]

    def functorch_depth(self, node: Node) -> int:
        """How many torch.func transforms (vmap, grad) are open where `node` is."""
        before = itertools.takewhile(lambda each: each < node, self.nesting)
        return sum(1 if "_increment_" in op_name(each) else -1 for each in before)


class Emitter:
    """Inserts calls before `anchor`, with the values the graph carries for its own."""

    def __init__(self, anchor: Node, survey: Survey):
        self.anchor = anchor
        self.survey = survey
        self.nodes = []
        self.key = "val" if "val" in anchor.meta else "example_value"
        self.autocasts = survey.autocasts_around(anchor)
        modes = (getattr(value_of(x), "fake_mode", None) for x in anchor.all_input_nodes)
        self.fake_mode = next((mode for mode in modes if mode), contextlib.nullcontext())

    def __call__(self, target: Callable, *args, **kwargs) -> Node:
        """``target(*args, **kwargs)``; nodes stand for their values, under the graph's autocast."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.fake_mode)  # the target may make tensors of its own
            stack.enter_context(enable_python_dispatcher())  # as Dynamo: F.pad specialises without
            for arguments in self.autocasts:
                stack.enter_context(torch.autocast(*arguments))
            value = target(*map_arg(args, value_of), **map_arg(kwargs, value_of))
        return self.insert(target, args, value, kwargs)

    def insert(self, target: Callable, args: tuple, value, kwargs: dict | None = None) -> Node:
        """The same, where the value is known."""
        with self.anchor.graph.inserting_before(self.anchor):
            node = self.anchor.graph.call_function(target, args, kwargs)
        kept = ("nn_module_stack", "stack_trace", "source_fn_stack")
        node.meta = {name: self.anchor.meta[name] for name in kept if name in self.anchor.meta}
        node.meta[self.key] = value
        self.nodes.append(node)
        return node

    def undo(self) -> None:
        for node in reversed(self.nodes):
            node.graph.erase_node(node)
        self.nodes.clear()


@dataclasses.dataclass
class Call:
    """q [B, H_q, N_q, D], k [B, H_kv, N_kv, D], v [B, H_kv, N_kv, D_v]: nodes of the graph. A query
    sees the keys that both mask and band show it."""

    node: Node  # its uses become `finish(out)`
    spelling: str  # "SDPA", "softmax", "nn.MultiheadAttention", "flex_attention", ...
    emit: Emitter
    q: Node
    k: Node
    v: Node
    out: torch.Tensor  # the value attention returns: [B, H_q, N_q, D_v]
    attn_mask: Node | None = None
    dropout_p: float = 0.0
    band: Band = FULL
    scale: float | None = None
    enable_gqa: bool = False
    finish: Callable[[Node], Node] = lambda out: out  # from attention's output to `node`'s value
    refused: str | None = None  # why this call cannot be written as SDPA
    dead: list[Node] = dataclasses.field(default_factory=list)  # without uses once it is, in order


class Decision(NamedTuple):
    """What becomes of a call, and why."""

    recipe: str | None  # a name in recipe.NAMED; None: it stays as it was
    reason: str  # why it stays, or what chose the recipe
    warpgroups: int | None = None  # a schedule, where times were measured: SdpaCall's


@dataclasses.dataclass(frozen=True)
class Site:
    """One attention call in a user's graph, and what became of it."""

    module: str  # path of the module that makes the call
    call: str  # name of the node
    spelling: str  # "SDPA", "softmax", "nn.MultiheadAttention", ...
    q: tuple  # [B, H_q, N_q, D]; symbols where the shape is dynamic
    k: tuple  # [B, H_kv, N_kv, D]
    dtype: str
    mask: str  # "none", "causal", a window, the mask's dtype and shape; "+" where both
    decision: Decision

    @classmethod
    def of(cls, call: Call, decision: Decision) -> "Site":
        return cls(
            module=module_path(call.node),
            call=call.node.name,
            spelling=call.spelling,
            q=dims(value_of(call.q)),
            k=dims(value_of(call.k)),
            dtype=str(getattr(call.out, "dtype", "?")).removeprefix("torch."),
            mask=_mask(call),
            decision=decision,
        )

    @property
    def recipe(self) -> str | None:
        return self.decision.recipe

    @property
    def reason(self) -> str:
        return self.decision.reason

    @property
    def rewritten(self) -> bool:
        return self.recipe is not None


def unreadable(node, error: Exception) -> Site:
    """The site of a call that looking at raised for: it stays as it was."""
    reason = f"could not be read, which is a fault of ours: {type(error).__name__}: {error}"
    return Site(module_path(node), node.name, "?", (), (), "?", "?", Decision(None, reason))


def module_path(node) -> str:
    """``layers.0.attn``, of Dynamo's ``L['self'].layers[0].attn`` or (under a module's own
    __getattr__) ``L['self'].__dict__['_modules']['layers'][0].attn``: the innermost one entered."""
    stack = node.meta.get("nn_module_stack") or {"": ("", None)}
    names = re.findall(r"\w+", list(stack.values())[-1][0])
    if names[:2] in (["L", "self"], ["L", "fn"]):
        names = names[2:]
    return ".".join(name for name in names if name not in ("__dict__", "_modules"))


def _mask(call: Call) -> str:
    parts = [] if call.band.kind == "full" else [str(call.band)]
    if call.attn_mask is not None:
        mask = value_of(call.attn_mask)
        dtype = str(getattr(mask, "dtype", "?")).removeprefix("torch.")
        parts.append(f"{dtype}{list(dims(mask))}")
    return " + ".join(parts) or "none"


def dims(x) -> tuple:
    return tuple(n if isinstance(n, int) else str(n) for n in getattr(x, "shape", ()))


def value_of(x):
    """The fake tensor a node stands for (Dynamo: ``example_value``, torch.export: ``val``)."""
    if not isinstance(x, Node):
        return x
    return x.meta["val"] if "val" in x.meta else x.meta.get("example_value")


def op_name(node) -> str:
    """``matmul`` of ``torch.matmul``, ``@``, ``Tensor.matmul`` and ``aten.matmul.default`` alike;
    "" for what is not a call."""
    if not isinstance(node, Node) or node.op not in ("call_function", "call_method"):
        return ""
    if node.op == "call_method":
        return node.target
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.split("::")[1]
    return getattr(node.target, "__name__", "")


def may_write(node: Node) -> bool:
    """Whether a call may write to its arguments: yes, unless it is known not to."""
    target, name = node.target, op_name(node)
    if node.op not in ("call_function", "call_method"):
        return node.op == "call_module"
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    if isinstance(target, torch._ops.OpOverloadPacket):
        return any(getattr(target, o)._schema.is_mutable for o in target.overloads())
    if isinstance(target, torch._ops.HigherOrderOperator):
        return name != "flex_attention"
    home = "" if node.op == "call_method" else getattr(target, "__module__", None) or "torch"
    if home == "_operator":
        return (
            name == "setitem" or name[0] == "i" and name not in ("invert", "inv", "is_", "is_not")
        )
    foreign = home.split(".")[0] not in ("", "torch", "builtins", "math") or "_dynamo" in home
    dunder = name.endswith("__") and name not in ("__and__", "__or__", "__xor__", "__invert__")
    inplace = any(node.kwargs.get(name) not in (None, False) for name in ("out", "inplace"))
    positional = home == "torch.nn.functional" and any(arg is True for arg in node.args)
    return (
        name.endswith("_") and not name.endswith("__") or dunder or foreign or inplace or positional
    )


def storages(node: Node) -> dict:
    """The tensors a call takes and returns, by the storage they lie in."""
    values = (value_of(x) for x in (node, *node.all_input_nodes))
    return {storage_of(value): value for value in values if isinstance(value, torch.Tensor)}


def storage_of(value: torch.Tensor) -> int:
    """The fake tensors of a graph share storages as the real ones do; vmap's wrap such a one."""
    while torch._C._functorch.is_functorch_wrapped_tensor(value):
        value = torch._C._functorch.get_unwrapped(value)
    return value.untyped_storage()._cdata if value.layout == torch.strided else id(value)
