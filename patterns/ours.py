"""Calls of ``sage_inductor.attention``, which Dynamo leaves as one call. They are written as SDPA
first, whatever becomes of them: sdpa.py finds them then, with what they ask for in
`index.requested`.

    before:  both = attention(q, k, v, is_causal=True, recipe="sage1", return_lse=True)
             out = both[0]
             lse = both[1]
    after:   out = scaled_dot_product_attention(q, k, v, is_causal=True)
             lse = sage.lse(q, k, None, True, None)

Where the call gets a recipe, replace.py takes ``sage.sdpa(...)[1]`` instead of the second.
"""

import inspect
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from sage_inductor.patterns.graph import value_of

# The functions so called: that layer is above this one, and enters its own.
ENTRIES: set = set()


def as_sdpa(graph: Graph) -> dict[Node, tuple]:
    """Write every call of an entry as SDPA, in place. Returns for each: the recipe and the blocks
    that are asked for, and the logsumexp, where it is."""
    requested = {}
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in ENTRIES:
            given = inspect.signature(node.target).bind(*node.args, **node.kwargs)
            given.apply_defaults()
            asked = SimpleNamespace(**given.arguments)
            out, lse = _written(node, asked)
            node.graph.erase_node(node)
            requested[out] = asked.recipe, asked.keep, lse
    return requested


def _written(node: Node, asked: SimpleNamespace) -> tuple[Node, Node | None]:
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
