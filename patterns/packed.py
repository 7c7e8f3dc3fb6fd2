"""Packed documents, and calls of other libraries' attention ops, which stay what they are: a row
each (fastvideo.py's and sla.py's, of which some are rewritten, are found from here). Arguments are
read by the names in the ops' schemas, because flash-attn's differ from release to release.

    torch_attn._varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, ...)
    flash_attn._flash_attn_varlen_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, ...)
    flash_attn._flash_attn_forward(q, k, v, dropout_p, softmax_scale, causal, ...)

Packed: q [T, H, D] holds documents one after another. cu [S + 1] says where each begins.

    before:  both = torch_attn._varlen_attn(q, k, v, cu, cu, 17, 17, True); out = both[0]
    found:   Call(q, k, v [1, H, T, D], band=CAUSAL, documents=(cu, None, None))
"""

import operator
import re
from typing import Any

import torch
from torch.fx import Node

from sage_inductor.ops import compat
from sage_inductor.ops.symbols import guarded, specialised
from sage_inductor.ops.visibility import Band
from sage_inductor.patterns import fastvideo, graph, reasons, sla
from sage_inductor.patterns.call import Call, other_dtype
from sage_inductor.patterns.graph import Emitter, GraphIndex, as_float, by_schema, value_of

aten = torch.ops.aten
# In the kernels of Hugging Face's hub the namespace says it: vllm_flash_attn3_<hash>.fwd.
NAMED = re.compile(r"(varlen_attn|flash_attn\w*[._](varlen_)?(forward|fwd))(_out)?$")
PAGES = "block_table", "page_table"
# What a call may give whatever it is: lengths, which are not read, and how it is computed.
READ = {
    *("query", "q", "key", "k", "value", "v", "is_causal", "causal", "scale", "softmax_scale"),
    *("window_size", "window_size_left", "window_size_right", "enable_gqa", "seqused_k"),
    *("cu_seq_q", "cu_seqlens_q", "cu_seq_k", "cu_seqlens_k", "max_q", "max_k", "max_seqlen_q"),
    *("max_seqlen_k", "num_splits", "deterministic", "pack_gqa", "sm_margin", "backend"),
}


def find(node: Node, index: GraphIndex) -> Call | None:
    # Not a finder beside this one, which costs every graph a file and ten calls of Python.
    target: Any = node.target
    op: Any = node.args[0] if target is operator.getitem else node
    target = getattr(op, "target", None)
    name = str(target).removesuffix(".default")
    if fastvideo.NAME in name:
        return fastvideo.find(node, index)
    if name == sla.LAUNCH:
        return sla.find(node, index)
    is_op = isinstance(target, (compat.OpOverload, compat.OpOverloadPacket))
    if not is_op or not NAMED.search(name) or not _is_output(node, op):
        return None
    given = by_schema(op, target)
    q, k, v = (given.get(x, given.get(x[0])) for x in ("query", "key", "value"))
    if not all(isinstance(value_of(x), torch.Tensor) for x in (q, k, v)):
        return None  # another op of that name
    call = Call(node, name.replace("._", "."), Emitter(op, index), q, k, v, value_of(node))
    cu = [next((given[x] for x in names if x in given), None) for names in CU]
    call.refused = _why(name, given, cu[0])
    if call.refused is None:
        _unpack(call, op, given, cu)
    return call


CU = ("cu_seq_q", "cu_seqlens_q"), ("cu_seq_k", "cu_seqlens_k")


def _is_output(node: Node, op: Node) -> bool:
    """Whether `node` is what the op gives, or the first of what it gives, where that is read."""
    if not isinstance(value_of(op), (list, tuple)):
        return node is op
    firsts = [x for x in op.users if graph.op_name(x) == "getitem" and x.args[1] == 0]
    return node is firsts[0] if firsts else node is op


def _why(name: str, given: dict, cu: Any) -> reasons.Reason | None:
    if any(given.get(pages) is not None for pages in PAGES):
        return reasons.PAGES()
    if cu is None:
        return reasons.ANOTHER_KERNEL(name)
    neutral = (x for x in given.items() if x[0] not in READ and x[0] not in PAGES)
    other = next(
        (x for x, y in neutral if isinstance(y, Node) or y not in (None, False, 0, 0.0)), None
    )
    return reasons.PACKED_WITH(other) if other else None


def _unpack(call: Call, op: Node, given: dict, cu: list) -> None:
    """The call as one of [1, H, T, D], or why it is none."""
    emit, (q, k, v) = call.emit, map(value_of, (call.q, call.k, call.v))
    others, counts = op.users.keys() - {call.node}, [value_of(x).shape[0] for x in cu if x]
    if call.node is op or not all(graph.dead(x) for x in others):
        call.refused = reasons.LSE_USED()
    elif call.out.requires_grad:
        call.refused = reasons.PACKED_TRAINING()
    elif not (q.dim() == k.dim() == v.dim() == 3 and guarded(counts[0] == counts[-1])):
        call.refused = reasons.ANOTHER_KERNEL(str(op.target).removesuffix(".default"))
    else:
        call.refused = other_dtype(call, q.dtype)
    if call.refused is not None:
        return
    left, right = given.get("window_size") or (
        given.get("window_size_left", -1), given.get("window_size_right", -1)
    )  # fmt: skip
    causal = given.get("is_causal", given.get("causal", False))
    left, right, causal = (  # a number that changes from call to call is a node
        x if x is None else specialised(value_of(x)) for x in (left, right, causal)
    )
    left, right = (None if x is None or x < 0 else x for x in (left, right))
    call.band = Band(left, 0 if causal else right)
    call.scale = as_float(given.get("scale", given.get("softmax_scale")))
    call.enable_gqa = True
    cu_q, cu_k = cu
    same = cu_k in (None, cu_q) and graph.statically_true(q.shape[0] == k.shape[0])
    used = given.get("seqused_k")
    call.documents = cu_q, None if same and used is None else cu_k or cu_q, used
    call.dead = graph.left_over({op}, call.node)

    def batched(x: Any) -> Node:
        return emit(aten.unsqueeze.default, emit(aten.transpose.int, x, 0, 1), 0)

    call.q, call.k, call.v = map(batched, (call.q, call.k, call.v))
    call.out = call.out.transpose(0, 1).unsqueeze(0)
    call.finish = lambda out: emit(aten.transpose.int, emit(aten.squeeze.dim, out, 0), 0, 1)
