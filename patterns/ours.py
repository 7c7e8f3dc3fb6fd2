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
            out, lse = _written(node, **given.arguments)
            node.graph.erase_node(node)
            requested[out] = given.arguments["recipe"], given.arguments["keep"], lse
    return requested


def _written(  # noqa: PLR0913  (attention's arguments)
    node: Node, q, k, v, attn_mask, is_causal, scale, enable_gqa, recipe, return_lse, dropout_p,
    keep,
) -> tuple[Node, Node | None]:  # fmt: skip
    key = "val" if "val" in node.meta else "example_value"
    values = value_of(node) if return_lse else (value_of(node), None)

    def insert(target, args, value) -> Node:
        new = node.graph.call_function(target, args)
        new.meta = {**node.meta, key: value}
        return new

    with node.graph.inserting_before(node):
        sdpa = (q, k, v, attn_mask, dropout_p, is_causal)
        out = insert(F.scaled_dot_product_attention, sdpa, values[0])
        out.kwargs = {"scale": scale, "enable_gqa": enable_gqa}
        if not return_lse:
            node.replace_all_uses_with(out)
            return out, None
        lse = insert(torch.ops.sage.lse.default, (q, k, attn_mask, is_causal, scale), values[1])
    for item in list(node.users):  # Dynamo takes a tuple apart, so each is a getitem
        item.replace_all_uses_with((out, lse)[item.args[1]])
        node.graph.erase_node(item)
    return out, lse
