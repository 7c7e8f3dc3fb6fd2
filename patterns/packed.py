"""Calls of other libraries' attention ops, which stay what they are: a row each (fastvideo.py's, of
which some are rewritten, are found from here). Arguments are read by the names in the ops' schemas,
because flash-attn's differ from release to release.

    torch_attn._varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, ...)
    flash_attn._flash_attn_varlen_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, ...)
    flash_attn._flash_attn_forward(q, k, v, dropout_p, softmax_scale, causal, ...)

Packed: q [T, H, D] holds documents one after another. cu [S + 1] says where each begins.
"""

import operator
import re
from typing import Any

import torch
from torch.fx import Node

from sage_inductor.ops import compat
from sage_inductor.patterns import fastvideo, reasons
from sage_inductor.patterns.call import Call
from sage_inductor.patterns.graph import Emitter, GraphIndex, by_schema, value_of

# In the kernels of Hugging Face's hub the namespace says it: vllm_flash_attn3_<hash>.fwd.
NAMED = re.compile(r"(varlen_attn|flash_attn\w*[._](varlen_)?(forward|fwd))(_out)?$")
PAGES = "block_table", "page_table"


def find(node: Node, index: GraphIndex) -> Call | None:
    # Not a finder beside this one, which costs every graph a file and ten calls of Python.
    target: Any = node.target
    anchor: Any = node.args[0] if target is operator.getitem else node
    if fastvideo.NAME in str(getattr(anchor, "target", "")):
        return fastvideo.find(node, index)
    is_op = isinstance(node.target, (compat.OpOverload, compat.OpOverloadPacket))
    name = str(node.target).removesuffix(".default")
    if not is_op or not NAMED.search(name):
        return None
    given = by_schema(node, node.target)
    q, k, v = (given.get(x, given.get(x[0])) for x in ("query", "key", "value"))
    values = value_of(node)
    out = values[0] if isinstance(values, (list, tuple)) else values
    if not all(isinstance(value_of(x), torch.Tensor) for x in (q, k, v)):
        return None  # another op of that name
    call = Call(node, name.replace("._", "."), Emitter(node, index), q, k, v, out)
    call.refused = _why(name, given, value_of(q))
    return call


def _why(name: str, given: dict, q: torch.Tensor) -> reasons.Reason:
    if any(given.get(pages) is not None for pages in PAGES):
        return reasons.PAGES()
    cu = next((value_of(given[x]) for x in ("cu_seq_q", "cu_seqlens_q") if x in given), None)
    if cu is None:
        return reasons.ANOTHER_KERNEL(name)
    return reasons.PACKED(q.shape[0], cu.shape[0] - 1)
