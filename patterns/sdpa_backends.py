"""Calls of the ops that scaled_dot_product_attention dispatches to, by name: code that merges parts
of attention reads their logsumexp, which SDPA does not return.

    before:  both = aten._scaled_dot_product_flash_attention(q, k, v)
             out = both[0]
             lse = both[1]
    after:   sdpa = sage.sdpa(q, k, v, None, [], None, None, False, 0.125, "int8/...@...", ...)
             out = sdpa[0]
             lse = sdpa[1]

Everything else that they return (the state of dropout) is for their own backward.
"""

import operator
import re
from collections.abc import Iterator

import torch
from torch.fx import Node

from sage_inductor.ops.symbols import equal, guarded
from sage_inductor.ops.visibility import CAUSAL, FULL
from sage_inductor.patterns import reasons
from sage_inductor.patterns.call import Call
from sage_inductor.patterns.graph import Emitter, GraphIndex, by_schema, op_name, value_of

aten = torch.ops.aten
PACKETS = (
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
    aten._scaled_dot_product_flash_attention_for_cpu,
)
TARGETS = {op for packet in PACKETS for op in (packet, packet.default)}
OUT, LSE = 0, 1


def find(node: Node, index: GraphIndex) -> Call | None:
    if node.op != "call_function" or node.target not in TARGETS:
        return None
    items = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    if OUT not in items:
        return None
    given = by_schema(node, node.target)
    call = Call(
        items[OUT], str(node.target).removesuffix(".default").replace("._", "."),
        Emitter(node, index), given["query"], given["key"], given["value"],
        value_of(items[OUT]), attn_mask=given.get("attn_bias", given.get("attn_mask")),
        dropout_p=given["dropout_p"], scale=given["scale"],
        band=CAUSAL if given["is_causal"] else FULL, enable_gqa=True, dead=[node],
        lse=items.get(LSE),
    )  # fmt: skip
    if more := _more(call, node, items, given):
        call.refused = reasons.MORE_THAN_ATTENTION(more)
    elif call.lse is not None:
        call.finish = lambda x: x if value_of(x).dim() == 4 else _as_stored(call, x)
    return call


def _as_stored(call: Call, lse: Node) -> Node:
    """A logsumexp as the call's own is: cuDNN's [B, H, N_q, 1], CPU's stored [B, N_q, H]."""
    wanted = value_of(call.lse)
    if wanted.dim() == 4:
        return call.emit(aten.unsqueeze.default, lse, 3)
    if equal(wanted.stride(), value_of(lse).stride()):
        return lse
    by_rows = call.emit(aten.transpose.int, lse, 1, 2)
    by_rows = call.emit(aten.clone.default, by_rows, memory_format=torch.contiguous_format)
    return call.emit(aten.transpose.int, by_rows, 1, 2)


def _more(call: Call, node: Node, items: dict[int, Node], given: dict) -> str | None:
    """What sage::sdpa does not give, if there is anything."""
    if len(items) < len(node.users) or items.keys() - {OUT, LSE}:
        return "more than one out and one logsumexp are read"
    readers = {op_name(user) for item in items.values() for user in _readers(item)}
    if any(re.fullmatch("_scaled_dot_product_.*_backward", name) for name in readers):
        return "its own backward reads what it returns"
    q, k = value_of(call.q), value_of(call.k)
    if given["is_causal"] and not guarded(q.shape[2] == k.shape[2]):
        return f"is_causal with {q.shape[2]} queries and {k.shape[2]} keys"
    autocasts = call.emit.autocasts or torch.is_autocast_enabled(q.device.type)
    if autocasts and q.dtype == torch.float32:
        return "fp32 under autocast, which casts no op of a backend"
    if call.lse is not None:
        lse, out = value_of(call.lse), call.out
        if not (
            equal(lse.shape[:3], out.shape[:3]) and equal(lse.shape[3:], (1,) * (lse.dim() - 3))
        ):
            return f"a logsumexp {list(lse.shape)} of {out.shape[2]} queries is read"
    return None


def _readers(node: Node) -> Iterator[Node]:
    """Who reads it, also by another name."""
    for user in node.users:
        yield user
        if op_name(user) in ("detach", "alias"):
            yield from _readers(user)
