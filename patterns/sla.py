"""Launches of SLA's Triton kernel, which attends by lists of blocks, by the names of the kernel and
its arguments: thu-ml's SLA and TurboDiffusion, LightX2V and FastVideo have it.

    before:  o_s, lse = torch.empty_like(v), torch.empty(...)
             triton_kernel_wrapper_mutation(Q=q, K=k, V=v, LUT=lut, LSE=lse, OS=o_s)
    found:   Call(q, k, v, scale=qk_scale,
                  blocks=BlockLists(full(topk), lut.int(), None, None, BLOCK_M, BLOCK_N))

The numbers stand in a table of torch's. q, k, v and o_s [B, H, N, D] and lut [B, H, M, topk] are
contiguous. What is around the kernel stays what it is: the choice of blocks, the linear branch and
its projection. For training Dynamo puts the kernel into a graph of its own, beside its backward.
"""

from operator import eq
from typing import Any

import torch
from torch.fx import Node

from sage_inductor.ops import compat
from sage_inductor.ops.symbols import guarded
from sage_inductor.ops.visibility import BLOCK_SIZES, BlockLists
from sage_inductor.patterns import graph, reasons
from sage_inductor.patterns.call import Call, other_dtype
from sage_inductor.patterns.graph import value_of

aten = torch.ops.aten
LAUNCH = "triton_kernel_wrapper_mutation"
NAME = "_attn_fwd"  # that of Triton's tutorial, too, which has no LUT
TENSORS = ["Q", "K", "V", "OS", "LUT", "LSE"]
NUMBERS = ["qk_scale", "topk", "L", "M_BLOCKS", "D", "BLOCK_M", "BLOCK_N"]


def find(launch: Node, index: graph.GraphIndex) -> Call | None:
    """The call whose output `launch` writes to OS, which is the Call's node."""
    kwargs: Any = launch.kwargs
    table, given = compat.kernel_side_table, kwargs["kwargs"]
    kernel = table.get_kernel(kwargs["kernel_idx"])
    function = getattr(kernel, "base_fn", getattr(kernel, "fn", None))  # of an Autotuner, a kernel
    names = set(getattr(kernel, "arg_names", ()))
    is_named = getattr(function, "__name__", None) == NAME and "LUT" in names
    if not is_named or not all(isinstance(given.get(x), Node) for x in TENSORS[:4]):
        return None
    numbers = table.get_constant_args(kwargs["constant_args_idx"])
    q, k, v, out = (given[x] for x in TENSORS[:4])
    spelling, emit = f"{function.__module__}.{NAME}", graph.Emitter(launch, index)
    call = Call(out, spelling, emit, q, k, v, value_of(out), dead=[launch])
    if names == {*TENSORS, *NUMBERS} and _is_attention(launch, kwargs, numbers):
        call.refused = _why_not(call, launch, given["LSE"])
    else:
        call.refused = reasons.ANOTHERS_LISTS(spelling)
    if call.refused is None:
        lut = emit(aten._to_copy.default, given["LUT"], dtype=torch.int32)
        count = emit(aten.full_like.default, emit(aten.select.int, lut, 3, 0), numbers["topk"])
        call.blocks = BlockLists(count, lut, None, None, numbers["BLOCK_M"], numbers["BLOCK_N"])
        call.scale = numbers["qk_scale"]
    return call


def _is_attention(launch: Node, kwargs: dict, numbers: dict) -> bool:
    """Whether all rows of attention are computed, and written to a tensor that nothing has used."""
    given: dict = kwargs["kwargs"]
    tensors = [value_of(given.get(x)) for x in TENSORS]
    known = all(isinstance(numbers.get(x), (int, float)) for x in NUMBERS)
    if not known or not all(isinstance(x, torch.Tensor) for x in tensors) or tensors[0].dim() != 4:
        return False
    (B, H, N, D), (_, topk, *sizes, block_q, block_kv) = tensors[0].shape, map(numbers.get, NUMBERS)
    M = -(-sizes[0] // block_q)
    shapes = [(x.shape, (B, H, N, D)) for x in tensors[:4]]
    shapes += [(map(value_of, grid), (M, B * H, 1)) for grid in kwargs["grid"]]
    shapes += [(tensors[4].shape, (B, H, M, topk)), (sizes, (N, M, D))]
    pairs = ((tuple(a), b) for a, b in shapes)
    alike = all(len(a) == len(b) and all(map(guarded, map(eq, a, b))) for a, b in pairs)
    is_new = graph.op_name(given["OS"]) in ("empty_like", "empty") and all(
        user is launch or user > launch for user in given["OS"].users
    )
    stored = all(x.is_contiguous() for x in tensors[:5])
    return alike and is_new and stored and topk > 0 and {block_q, block_kv} <= {*BLOCK_SIZES}


def _why_not(call: Call, launch: Node, lse: Node) -> reasons.Reason | None:
    q, k, v = map(value_of, (call.q, call.k, call.v))
    if any(x.requires_grad for x in (q, k, v)):
        return reasons.LISTS_IN_TRAINING()
    if not all(user is launch or graph.idle(user, lse) for user in lse.users):
        return reasons.LSE_USED()
    return other_dtype(call, q.dtype)
