"""scaled_dot_product_attention -> sage::sdpa, where that is faster and accurate enough.

    before:  out = scaled_dot_product_attention(q, k, v, is_causal=True)
    after:   out, lse = sage.sdpa(q, k, v, True, 0.125, "int8/per_thread,fp8@...", False, False)

A call that stays SDPA is recorded with the reason (`_why_not`). The walk is a loop, not a
`PatternMatcherPass`: SDPA is one node here, its arguments come positionally and by keyword in any
mixture, and a loop over nodes needs no private API.
"""

import dataclasses
import math
import operator
import re

import torch
import torch.nn.functional as F
from torch.fx.experimental.symbolic_shapes import statically_known_true

from sage_inductor import lowering  # noqa: F401  (registers what the inserted op opens into)
from sage_inductor.ops import recipe as recipes
from sage_inductor.ops import tiles
from sage_inductor.ops.reference import HEAD_DIMS

TARGETS = (F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default)
AUTO = "auto"
OFF = "off"


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the user asked for; see sage_inductor/config.py for each field's meaning."""

    recipe: str = AUTO
    emulate: bool = False
    force: bool = False
    strict: bool = False
    portable: bool = False  # exporting: no guards on lengths, only kernels that travel


@dataclasses.dataclass(frozen=True)
class Site:
    """One attention call in a user's graph, and what became of it."""

    module: str  # path of the module that makes the call
    call: str  # name of the node
    q: tuple  # [B, H_q, N_q, D]; symbols where the shape is dynamic
    k: tuple  # [B, H_kv, N_kv, D]
    dtype: str
    mask: str  # "none", "causal", or the mask's dtype and shape
    recipe: str | None  # None: stays SDPA
    reason: str  # why it stays SDPA, or what chose the recipe

    @property
    def rewritten(self) -> bool:
        return self.recipe is not None


def rewrite(graph: torch.fx.Graph, settings: Settings) -> list[Site]:
    """Rewrite the SDPA calls of one graph in place; the sites, in graph order."""
    sites = []
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in TARGETS or "sage" in node.meta:
            continue
        call = _arguments(*node.args, **node.kwargs)
        recipe, reason = _decide(node, call, settings)
        sites.append(_site(node, call, recipe, reason))
        if recipe is None:
            node.meta["sage"] = "kept"  # decided: a second pass over the graph leaves it alone
        else:
            _replace(node, call, recipes.NAMED[recipe], settings.portable)
    return sites


def _arguments(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
) -> dict:
    """SDPA's own signature: gives a node's arguments their names."""
    return locals()


def _decide(node, call: dict, settings: Settings) -> tuple[str | None, str]:
    """(name of the recipe, why this one) or (None, why the call stays SDPA)."""
    if settings.recipe == OFF:
        return None, "the recipe is 'off'"
    reason = _why_not(node, call)
    if reason:
        return None, reason
    q, k, out = _value(call["query"]), _value(call["key"]), _value(node)
    if q.device.type == "cpu":
        if not settings.emulate:
            return None, "on CPU attention stays SDPA (sage.emulate=True studies the accuracy)"
        return _named(settings, "sage2-8b"), "emulated"

    capability = tiles.capability(q.device)
    recipe = _named(settings, "sage2-8b" if capability >= (8, 9) else "sage1")
    pv = recipes.NAMED[recipe].pv
    try:
        tiles.tile(capability, pv, q.shape[3])
    except ValueError as error:
        return None, str(error)
    if settings.emulate or settings.force:
        return recipe, "forced"
    if out.requires_grad:
        return None, "training: the backward recomputes exact attention (sage.force=True overrides)"
    D, is_causal = int(q.shape[3]), call["is_causal"]  # a dynamic head_dim is specialised
    heads = q.shape[0] * q.shape[1]
    rows = tiles.crossover(capability, pv, D, is_causal)
    shortest = next((N for B_H, N in rows if _at_least(heads, B_H, settings)), None)
    sm = "sm_{}{}".format(*capability)
    what = f"{recipe} with head_dim {D}{', causal' * is_causal} on {sm}"
    if shortest is None:
        return None, f"never slower: no length was measured from which {what}, B*H={heads} wins"
    if not all(_at_least(x.shape[2], shortest, settings) for x in (q, k)):
        return None, f"never slower: {what} wins from N={shortest} (sage.force=True overrides)"
    return recipe, f"N >= {shortest}"


def _named(settings: Settings, default: str) -> str:
    return default if settings.recipe == AUTO else settings.recipe


def _at_least(n, least: int, settings: Settings) -> bool:
    """n >= least. A dynamic n is guarded: each side of the crossover gets its own graph. An
    exported program has one graph for all, chosen by the example's sizes."""
    if settings.portable and isinstance(n, torch.SymInt):
        n = n.node.hint
    return bool(n >= least)


def _why_not(node, call: dict) -> str | None:
    """The reason sage::sdpa cannot stand for this call, whatever the length, or None if it can."""
    q, k, v, out = (_value(x) for x in (call["query"], call["key"], call["value"], node))
    if not all(isinstance(x, torch.Tensor) for x in (q, k, v, out)):
        return "the graph carries no shapes for this call"
    names = (getattr(n.target, "__name__", "") for n in node.graph.nodes)
    if any(name.endswith("_increment_nesting") for name in names):
        return "inside a torch.func transform"
    if call["attn_mask"] is not None:
        return f"attn_mask is not supported yet, got {_mask(call)}"
    if call["dropout_p"] != 0.0:
        return f"dropout_p must be 0, got {call['dropout_p']}"
    if not isinstance(call["is_causal"], bool):
        return f"is_causal must be known when compiling, got {call['is_causal']}"
    scale = call["scale"]
    if not (scale is None or isinstance(scale, (int, float)) and math.isfinite(scale)):
        return f"scale must be a finite number known when compiling, got {scale}"
    if any(type(x).__name__ != "FakeTensor" or x.layout != torch.strided for x in (q, k, v)):
        return f"tensor subclasses are not supported, got {type(q).__name__}"
    if not q.dim() == k.dim() == v.dim() == 4:
        return f"q, k and v must be [B, H, N, D], got {q.dim()}, {k.dim()} and {v.dim()} dimensions"
    if not q.device == k.device == v.device or q.device.type not in ("cpu", "cuda"):
        return f"the device must be cuda (or cpu, emulated), got {q.device}"
    valid = (torch.float16, torch.bfloat16) + ((torch.float32,) if q.device.type == "cpu" else ())
    if out.dtype not in valid:  # out's dtype is what autocast makes of the inputs'
        return f"dtype must be one of {[str(d)[6:] for d in valid]}, got {str(out.dtype)[6:]}"
    D = q.shape[3]
    if k.shape[3] != D or v.shape[3] != D or not D <= HEAD_DIMS[-1]:
        return (
            f"head_dim of q, k and v must be one number up to {HEAD_DIMS[-1]}, "
            f"got {D}, {k.shape[3]}, {v.shape[3]}"
        )
    if q.shape[0] != k.shape[0] or k.shape[:2] != v.shape[:2]:
        return f"batches and kv heads must be equal, got {_dims(q)}, {_dims(k)}, {_dims(v)}"
    heads_q, heads_kv = q.shape[1], k.shape[1]
    if heads_q != heads_kv and not (call["enable_gqa"] and heads_q % heads_kv == 0):
        return f"q has {heads_q} heads and k {heads_kv}, with enable_gqa={call['enable_gqa']}"
    if q.shape[2] < 1 or k.shape[2] < 1:
        return "a sequence is empty"
    if _stored_bnhd(out) is None:
        return f"SDPA's output is neither [B, H, N, D] nor [B, N, H, D]: strides {out.stride()}"
    return None


def _stored_bnhd(out) -> bool | None:
    """Is SDPA's output stored in [B, N, H, D] order? What follows may view it, so ours must be
    stored alike. None: in neither order."""
    B, H, N, D = out.shape
    for bnhd, strides in ((True, (N * H * D, D, H * D, 1)), (False, (H * N * D, N * D, D, 1))):
        matches = (
            statically_known_true(s == t) or statically_known_true(n == 1)
            for n, s, t in zip(out.shape, out.stride(), strides, strict=True)
        )
        if all(matches):
            return bnhd
    return None


def _replace(node, call: dict, recipe: recipes.Recipe, portable: bool) -> None:
    out = _value(node)
    scale = call["scale"] if call["scale"] is not None else out.shape[3] ** -0.5
    args = (
        call["query"], call["key"], call["value"], call["is_causal"], float(scale),
        recipe.encode(), _stored_bnhd(out), portable,
    )  # fmt: skip
    key = "val" if "val" in node.meta else "example_value"
    with node.graph.inserting_before(node):
        new = node.graph.call_function(torch.ops.sage.sdpa.default, args)
        first = node.graph.call_function(operator.getitem, (new, 0))
    lse = out.new_empty(out.shape[:3], dtype=torch.float32)
    new.meta = {**node.meta, key: (out, lse)}
    first.meta = dict(node.meta)
    node.replace_all_uses_with(first)
    node.graph.erase_node(node)


def _site(node, call: dict, recipe: str | None, reason: str) -> Site:
    q, k, out = _value(call["query"]), _value(call["key"]), _value(node)
    return Site(
        module=_module(node),
        call=node.name,
        q=_dims(q),
        k=_dims(k),
        dtype=str(getattr(out, "dtype", "?")).removeprefix("torch."),
        mask=_mask(call),
        recipe=recipe,
        reason=reason,
    )


def _module(node) -> str:
    """``layers.0.attn``, of Dynamo's ``L['self'].layers[0].attn`` or (under a module's own
    __getattr__) ``L['self'].__dict__['_modules']['layers'][0].attn``: the innermost one entered."""
    stack = node.meta.get("nn_module_stack") or {"": ("", None)}
    names = re.findall(r"\w+", list(stack.values())[-1][0])
    if names[:2] in (["L", "self"], ["L", "fn"]):
        names = names[2:]
    return ".".join(name for name in names if name not in ("__dict__", "_modules"))


def _mask(call: dict) -> str:
    if call["attn_mask"] is None:
        return "causal" if call["is_causal"] is True else "none"
    mask = _value(call["attn_mask"])
    return f"{str(getattr(mask, 'dtype', '?')).removeprefix('torch.')}{list(_dims(mask))}"


def _dims(x) -> tuple:
    return tuple(n if isinstance(n, int) else str(n) for n in getattr(x, "shape", ()))


def _value(x):
    """The fake tensor a node stands for (Dynamo: ``example_value``, torch.export: ``val``)."""
    if not isinstance(x, torch.fx.Node):
        return x
    return x.meta["val"] if "val" in x.meta else x.meta.get("example_value")
