"""Heads of k and v that a model repeats for the heads of q, as they were before.

before:  k = k[:, :, None].expand(B, H, G, N, D).reshape(B, H * G, N, D)
found:   (k [B, H, N, D], G), which attention takes with enable_gqa
"""

import torch
from torch.fx import Node

from sage_inductor.ops.symbols import equal
from sage_inductor.patterns import graph
from sage_inductor.patterns.call import Call
from sage_inductor.patterns.graph import GraphIndex, arguments, op_name, statically_true, value_of


def kv_source(k: Node, index: GraphIndex) -> tuple[Node, int]:
    """(x, G) where k [B, H * G, N, D] repeats each head of x [B, H, N, D] G times in a row, as
    SDPA's enable_gqa does; (k, 1) where it does not, or where x or k is written to later."""
    name, x = op_name(k), arguments(k, "input")[0]
    if index.written_after(k, k):
        return k, 1
    if name in ("contiguous", "clone"):
        source, G = kv_source(x, index)
        return (source, G) if G > 1 else (k, 1)
    if name == "repeat_interleave":
        _, G, dim = arguments(k, "input", "repeats", "dim")
        taken = isinstance(G, int) and value_of(x).dim() == 4 and dim in (1, -3)
        return (x, G) if taken and not index.written_after(x, k) else (k, 1)
    # source [B, H, N, D] -> one [B, H, 1, N, D] -> x [B, H, G, N, D] -> k
    one = arguments(x, "input")[0] if name in graph.VIEWS and op_name(x) == "expand" else None
    if not graph.only_inserts_dims(one):
        return k, 1
    source = arguments(one, "input")[0]
    shapes = [value_of(node).shape for node in (source, one, x, k)]
    if [len(shape) for shape in shapes] != [4, 5, 5, 4] or not isinstance(shapes[2][2], int):
        return k, 1
    (B, H, N, D), G = shapes[0], shapes[2][2]
    expected = (B, H, N, D), (B, H, 1, N, D), (B, H, G, N, D), (B, H * G, N, D)
    repeats = all(map(equal, shapes, expected)) and not index.written_after(source, one)
    return (source, G) if repeats else (k, 1)


def broadcast_heads(call: Call) -> None:
    """SDPA broadcasts batches and heads. One head of k and v is shared by q's as a group; what else
    is broadcast is expanded, which copies nothing."""
    inputs = [call.q, call.k, call.v]
    shapes = [getattr(value_of(x), "shape", ()) for x in inputs]
    if any(len(shape) != 4 for shape in shapes):
        return
    is_one = [[statically_true(n == 1) for n in shape[:2]] for shape in shapes]
    call.enable_gqa = call.enable_gqa or (not is_one[0][1] and is_one[1][1] and is_one[2][1])
    for i, (x, ones) in enumerate(zip(inputs, is_one, strict=True)):
        sizes = [-1, -1, -1, -1]
        for d in range(1 if call.enable_gqa else 2):
            wide = [y for y, one in zip(inputs, is_one, strict=True) if not one[d]]
            if ones[d] and wide:
                sizes[d] = call.emit.size(wide[0], d)
        if sizes != [-1, -1, -1, -1]:
            inputs[i] = call.emit(torch.ops.aten.expand.default, x, sizes)
    call.q, call.k, call.v = inputs
