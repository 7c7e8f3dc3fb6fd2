"""Calls of FastVideo's ops that attend by lists of blocks (VSA), by the names in their schemas.

    before:  both = fastvideo_kernel.block_sparse_attn_sm90(q, k, v, q2k_idx, q2k_num, sizes)
             out = both[0]
    found:   Call(q, k, v, attn_mask=arange(64) < sizes[:, None],
                  blocks=BlockLists(q2k_num, q2k_idx, None, None, 64, 64))

q, k and v are blocks of 64 rows. The first sizes[j] rows of block j are tokens, the others padding.
The kernels compute in bf16, with a scale of head_dim ** -0.5, and as many heads of k as of q. What
they return beside out is for their own backward: a logsumexp to the base 2, but in sm90, whose
sources do not say it.
"""

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from sage_inductor.ops import compat
from sage_inductor.ops.symbols import guarded
from sage_inductor.ops.visibility import BlockLists
from sage_inductor.patterns import graph, reasons
from sage_inductor.patterns.call import Call, other_dtype
from sage_inductor.patterns.graph import value_of

aten = torch.ops.aten
PACKAGE = "fastvideo_kernel."  # of the ops that are rewritten
NAME = "block_sparse_attn"  # begins that of each of the ops
NAMED = re.compile(rf"\.{NAME}(?!\w*backward)\w*$")
LISTS = {"q2k_idx", "q2k_num", "variable_block_sizes"}
BLOCK = 64


def find(node: Node, index: graph.GraphIndex) -> Call | None:
    """The call whose output `node` is: an op's only one, or its first."""
    op: Any = node.args[0] if graph.op_name(node) == "getitem" and node.args[1] == 0 else node
    target = getattr(op, "target", None)
    name, out = str(target).removesuffix(".default"), value_of(node)
    is_op = isinstance(target, (compat.OpOverload, compat.OpOverloadPacket))
    if not is_op or not NAMED.search(name) or not isinstance(out, torch.Tensor):
        return None
    given: dict[str, Any] = graph.by_schema(op, target)
    given = {x.removesuffix("_padded"): value for x, value in given.items()}
    if not all(isinstance(value_of(given.get(x)), torch.Tensor) for x in "qkv"):
        return None  # another op of that name
    call = Call(node, name, graph.Emitter(op, index), given["q"], given["k"], given["v"], out)
    others = []
    if op is not node:
        others, call.dead = op.users.keys() - {node}, graph.left_over({op}, node)
    call.refused = _why_not(call, given, others)
    if call.refused is None:
        sizes, lists = given["variable_block_sizes"], (given["q2k_num"], given["q2k_idx"])
        call.blocks = BlockLists(*lists, None, None, BLOCK, BLOCK)
        row = call.emit(aten.arange.default, BLOCK, device=value_of(sizes).device)
        is_token = call.emit(aten.lt.Tensor, row, call.emit(aten.unsqueeze.default, sizes, 1))
        call.attn_mask = call.emit(aten.view.default, is_token, [1, 1, 1, -1])
    return call


def _why_not(call: Call, given: dict, others: Iterable[Node]) -> reasons.Reason | None:
    """others: what is read beside the output."""
    k, sizes = value_of(call.k), value_of(given.get("variable_block_sizes"))
    known = call.spelling.startswith(PACKAGE) and given.keys() >= LISTS
    known = known and k.dim() == 4 and sizes.dim() == 1  # sm100a also takes blocks of 128
    if not known or not guarded(k.shape[2] == BLOCK * sizes.shape[0]):
        return reasons.ANOTHERS_LISTS(call.spelling)
    items = (
        graph.op_name(x) == "getitem" and all(graph.idle(y, x) for y in x.users) for x in others
    )
    if not all(items):
        return reasons.LSE_USED()
    return other_dtype(call, torch.bfloat16)
