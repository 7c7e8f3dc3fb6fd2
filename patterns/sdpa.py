"""scaled_dot_product_attention calls.

    before:  out = scaled_dot_product_attention(q, k, v, is_causal=True)
    after:   sdpa = sage.sdpa(q, k, v, None, [], None, 0, False, 0.125, "int8/...@...", ...)
             out = sdpa[0]

Heads of k and v that the model repeats for q's are taken as they were before (repeat_kv.py). What
SDPA broadcasts is expanded.

Calls of ``sage_inductor.attention``, which Dynamo leaves as one call, are written as SDPA first,
whatever becomes of them (`written`):

    before:  both = attention(q, k, v, is_causal=True, recipe="sage1", return_lse=True)
             out = both[0]
             lse = both[1]
    after:   out = scaled_dot_product_attention(q, k, v, is_causal=True)
             lse = sage.lse(q, k, None, True, None)

Where the call gets a recipe, replace.py takes ``sage.sdpa(...)[1]`` instead of the second.

The walk is a loop, not a `PatternMatcherPass`: SDPA is one node here, its arguments come
positionally and by keyword in any mixture, and a loop over nodes needs no private API.
"""

import inspect
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from sage_inductor.ops.symbols import equal
from sage_inductor.ops.visibility import CAUSAL, FULL
from sage_inductor.patterns import reasons
from sage_inductor.patterns.call import Call
from sage_inductor.patterns.graph import Emitter, GraphIndex, as_float, value_of
from sage_inductor.patterns.repeat_kv import broadcast_heads, kv_source

TARGETS = (
    F.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
)


def find(node: Node, index: GraphIndex) -> Call | None:
    if node.op != "call_function" or node.target not in TARGETS:
        return None
    args = _arguments(*node.args, **node.kwargs)
    is_causal = args["is_causal"]
    call = Call(
        node, "SDPA", Emitter(node, index), args["query"], args["key"], args["value"],
        value_of(node), attn_mask=args["attn_mask"], dropout_p=args["dropout_p"],
        scale=as_float(args["scale"]), band=CAUSAL if is_causal is True else FULL,
        enable_gqa=args["enable_gqa"],
    )  # fmt: skip
    if node in index.requested:
        call.spelling = "sage_inductor.attention"
        call.recipe, call.keep, call.lse = index.requested[node]
    if not isinstance(is_causal, bool):
        call.refused = reasons.IS_CAUSAL(is_causal)
    if index.functorch_depth(node):  # what is inserted there has no value
        call.refused = reasons.IN_A_TRANSFORM()
        return call
    (k, G), (v, G_v) = kv_source(call.k, index), kv_source(call.v, index)
    of_q, of_k = (getattr(value_of(x), "shape", ())[-3:-2] for x in (call.q, call.k))
    if G == G_v > 1 and not call.enable_gqa and equal(of_q, of_k):  # else q's are broadcast
        call.k, call.v, call.enable_gqa, call.repeated = k, v, True, G
    if getattr(call.out, "dim", int)() == 3:  # [H, N, D]
        unsqueeze, squeeze = torch.ops.aten.unsqueeze.default, torch.ops.aten.squeeze.dim
        call.q, call.k, call.v = (call.emit(unsqueeze, x, 0) for x in (call.q, call.k, call.v))
        call.out = call.out.unsqueeze(0)
        call.finish = lambda out: call.emit(squeeze, out, 0)
    broadcast_heads(call)
    return call


def unrepeat(call: Call) -> None:
    """SDPA without the repeats of k's and v's heads, which its enable_gqa makes up for.

    before:  k = keys[:, :, None].expand(B, H, G, N, D).reshape(B, H * G, N, D); v alike
             out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    after:   out = scaled_dot_product_attention(q, keys, values, mask, 0.0, False, scale=None,
                                                enable_gqa=True)
    """
    given = _arguments(*call.node.args, **call.node.kwargs)
    given |= {"key": call.k, "value": call.v, "enable_gqa": True}
    *args, scale, enable_gqa = given.values()
    call.node.args = tuple(args)
    call.node.kwargs = {"scale": scale, "enable_gqa": enable_gqa}


def _arguments(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
) -> dict:
    """SDPA's own signature: gives a node's arguments their names."""
    return locals()


# -- sage_inductor.attention ----

# ``sage_inductor.attention``: that layer is above this one, and enters its own.
ENTRIES: set = set()


def written(graph: Graph) -> dict[Node, tuple]:
    """Write every call of an entry as SDPA, in place. Returns for each: the recipe and the blocks
    that are asked for, and the logsumexp, where it is."""
    requested = {}
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in ENTRIES:
            given = inspect.signature(node.target).bind(*node.args, **node.kwargs)
            given.apply_defaults()
            asked = SimpleNamespace(**given.arguments)
            out, lse = _write(node, asked)
            node.graph.erase_node(node)
            requested[out] = asked.recipe, asked.keep, lse
    return requested


def _write(node: Node, asked: SimpleNamespace) -> tuple[Node, Node | None]:
    key = "val" if "val" in node.meta else "example_value"
    values = value_of(node) if asked.return_lse else (value_of(node), None)
    q, k, v, attn_mask = asked.q, asked.k, asked.v, asked.attn_mask

    def insert(target, args, value) -> Node:
        new = node.graph.call_function(target, args)
        new.meta = {**node.meta, key: value}
        return new

    with node.graph.inserting_before(node):
        sdpa = q, k, v, attn_mask, asked.dropout_p, asked.is_causal
        out = insert(F.scaled_dot_product_attention, sdpa, values[0])
        out.kwargs = {"scale": asked.scale, "enable_gqa": asked.enable_gqa}
        if not asked.return_lse:
            node.replace_all_uses_with(out)
            return out, None
        of_lse = q, k, attn_mask, asked.is_causal, asked.scale
        lse = insert(torch.ops.sage.lse.default, of_lse, values[1])
    for item in list(node.users):  # Dynamo takes a tuple apart, so each is a getitem
        item.replace_all_uses_with((out, lse)[item.args[1]])
        node.graph.erase_node(item)
    return out, lse
