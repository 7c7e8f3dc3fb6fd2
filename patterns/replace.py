"""What stands in the place of a call that is rewritten: one ``sage::sdpa``, in training what is
asked for, ``sage::sagebwd`` or ``sage::rowscaled``, for a few queries of a cache ``sage::decode``.
Calls of ``sage::sdpa`` that share k and v share what is made of them too.

    before:  out = scaled_dot_product_attention(q, k, v, is_causal=True)
    after:   sdpa = sage.sdpa(q, k, v, None, [], None, 0, False, 0.125, "int8/...@...", ...)
             out = sdpa[0]

Where blocks of keys are selected, ``sage.select_blocks(q, k, ...)`` gives it their lists, and by a
layout ``sage.cube_order(q, ...)`` both the order of tokens, one for all calls of a graph. Where
there is a learned sink, ``sage.with_sink(sdpa[0], sdpa[1], sink)`` takes its weight off the output.
"""

import operator
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from sage_inductor.ops.decode_call import DecodeCall
from sage_inductor.ops.documents import BLOCK
from sage_inductor.ops.formats import MAX_ROWS
from sage_inductor.ops.recipe import NAMED
from sage_inductor.ops.sdpa import SdpaCall
from sage_inductor.ops.sparse.selector import Selection
from sage_inductor.ops.symbols import equal
from sage_inductor.ops.training.gradients import training_op
from sage_inductor.ops.visibility import BlockLists, seen_keys
from sage_inductor.patterns import graph
from sage_inductor.patterns.call import Call, Decision
from sage_inductor.patterns.eligible import BHND, BNHD, is_causal, scaled_codes, stored
from sage_inductor.patterns.graph import Emitter, GraphIndex, op_name, statically_true, value_of
from sage_inductor.patterns.shared_kv import stack, stacks

aten = torch.ops.aten


def replace(call: Call, decision: Decision, portable: bool) -> None:
    """Put ``sage.sdpa(...)[0]`` in the place of `call`, stored as its output is."""
    shares = decision.recipe is not None and decision.selection is None
    if shares and stacks(call, NAMED[decision.recipe]):
        stack(call)
    emit, out, (order, width) = call.emit, call.out, stored(call)
    gap = int(width - out.shape[order[3]])
    is_copied = gap > 0 or order not in (BHND, BNHD)

    def put(first: Node) -> None:
        _finish(call, _copied(emit, first, order, gap) if is_copied else first)

    q, k, v, attn_mask = call.q, call.k, call.v, call.attn_mask
    scale = float(call.scale if call.scale is not None else value_of(q).shape[3] ** -0.5)
    if decision.decodes:
        mask = is_run = None
        if attn_mask is None:  # queries see the keys up to their own places
            new = partial(emit, aten.new_full.default, q, [1], dtype=torch.int32)
            start, end = new(0), new(MAX_ROWS)
        else:
            mask = emit(aten.squeeze.dim, attn_mask, 1)  # [B or 1, N_q or 1, N]
            seen = emit(torch.ops.sage.seen_range.default, mask)
            start, end, is_run = (emit(operator.getitem, seen, i) for i in range(3))
            if not statically_true(value_of(mask).shape[1] == value_of(q).shape[2]):
                is_run = None  # one row for all is no run of each
        (k, k_scale, rotated), (v, v_scale, _) = _codes(k, emit), _codes(v, emit, True)
        args = DecodeCall(
            q, k, v, start, end, scale, k_scale, v_scale, mask, is_run, rotated=rotated,
            out_bnhd=order != BHND,
        )  # fmt: skip
        new = emit(torch.ops.sage.decode.default, *args)
        return put(emit(operator.getitem, new, 0))
    if decision.trained_by is not None:
        op = training_op(decision.trained_by)
        # What autograd saved here would be counted by a checkpoint around the compiled model.
        with torch.no_grad():
            new = emit(op, q, k, v, is_causal(call), scale, order != BHND)
            first = emit(operator.getitem, new, 0)
        first.meta[emit.key].requires_grad_(out.requires_grad)
        if emit.index.written_after(call.node, call.node):  # the op's backward reads what it gave
            first = emit(aten.clone.default, first)
        return put(first)
    blocks, perm = call.blocks, ()
    if decision.selection is not None:
        select, asked = torch.ops.sage.select_blocks.default, decision.selection
        perm = _order(call, asked)
        selected = emit(select, q, k, scale, *asked.arguments(*perm))
        lists = (emit(operator.getitem, selected, i) for i in range(2))
        tail_block = asked.tail_block if asked.tail else None
        blocks = BlockLists(*lists, None, None, *asked.size, tail_block)
    if call.documents is not None:
        perm, attn_mask, blocks = _documents(call)
    args = [*SdpaCall(
        q, k, v, attn_mask, [], *call.band,
        scale, NAMED[decision.recipe].encode(), decision.warpgroups, order != BHND, portable,
        *blocks, *perm,
    )]  # fmt: skip
    while args[-1] is None:  # a default
        args.pop()
    if is_copied:
        written = BHND if order == BHND else BNHD
        out = out.new_empty([out.shape[d] for d in written]).permute(written)
    lse = out.new_empty(out.shape[:3], dtype=torch.float32)
    new = emit.insert(torch.ops.sage.sdpa.default, tuple(args), (out, lse))
    first = emit.insert(operator.getitem, (new, 0), out)
    if call.lse is not None:
        second = emit.insert(operator.getitem, (new, 1), lse)
        call.lse.replace_all_uses_with(call.finish(second))
        call.dead.insert(0, call.lse)
    if call.sink is not None:
        lse = emit.insert(operator.getitem, (new, 1), lse)
        first = emit(torch.ops.sage.with_sink.default, first, lse, call.sink)
    put(first)


def _order(call: Call, keep: Selection) -> tuple:
    """(the order of a layout's tokens,), which all calls of a graph with that layout share; () for
    tokens that stay as they come."""
    if keep.layout is None:
        return ()
    emit, op, q = call.emit, torch.ops.sage.cube_order.default, value_of(call.q)
    args = list(keep.layout), list(keep.cube), keep.beside[0]
    for node in emit.anchor.graph.find_nodes(op="call_function", target=op):
        first = value_of(node.args[0])
        alike = first.device == q.device and equal(first.shape[2:3], q.shape[2:3])
        if node.args[1:] == args and alike and node < emit.anchor:
            return (node,)
    return (emit(op, call.q, *args),)


def _documents(call: Call) -> tuple[tuple, Node, BlockLists]:
    """(perm, perm_k, spans, documents), the mask and the lists of blocks by which documents are
    attended, which the calls of a graph that have the same share."""
    emit, op, (cu_q, cu_k, used) = call.emit, torch.ops.sage.documents.default, call.documents
    args = [cu_q, emit.size(call.q, 2), cu_k, cu_k and emit.size(call.k, 2), used]
    cus, sizes = (args[::2], tuple(map(value_of, args[1::2])))
    found = emit.anchor.graph.find_nodes(op="call_function", target=op)
    for node in found if not any(map(emit.index.writers_of, filter(None, cus))) else ():
        given = (*node.args, None, None, None)[:5]
        alike = equal(tuple(map(value_of, given[1::2])), sizes)
        if alike and all(map(operator.is_, given[::2], cus)) and node < emit.anchor:
            break
    else:
        node = emit(op, *(args if cu_k else args[:2]))
    *order, counts, indices, shown = (emit(operator.getitem, node, i) for i in range(7))
    return tuple(order), shown, BlockLists(counts, indices, None, None, BLOCK, BLOCK)


def _codes(x: Any, emit: Emitter, of_v: bool = False) -> tuple[Any, Any, bool]:
    """(codes, scales, whether they are rotated) of the cache of which k or v is read, whole or some
    of its tokens; (x, None, False) where it is none. What was taken off every key does not matter.

    before:  k = sage.read_kv(codes, scale, anchor, True, torch.bfloat16)[:, :, :N]
    after:   codes[:, :, :N], scale[:, :, :N]

    before:  k = (codes.float() * scale).to(torch.bfloat16)
    after:   codes, scale.reshape(1, 1, 1)
    """
    name, args = op_name(x), x.args
    if name == "getitem" and isinstance(args[1], tuple) and len(args[1]) <= 3:
        codes, scale, rotated = _codes(args[0], emit, of_v)
        if scale is not None and all(isinstance(each, slice) for each in args[1]):
            codes = emit(operator.getitem, codes, args[1])
            is_one = value_of(scale).shape == (1, 1, 1)  # for all of them
            return codes, scale if is_one else emit(operator.getitem, scale, args[1]), rotated
    if name == "read_kv" and not any(emit.index.written_after(y, x) for y in args[:2]):
        codes, scale, anchor, rotated, _ = args
        if not of_v or (anchor is None and not rotated):
            return codes, scale, rotated
    codes, scale = scaled_codes(x)
    if codes is not None and not any(emit.index.written_after(y, x) for y in (codes, scale)):
        return codes, emit(torch.reshape, scale, (1, 1, 1)), False
    return x, None, False


def stand_in(call: Call, out: Node) -> None:
    """Put a copy of `out` [B, H_q, N_q, D_v], whichever way it is stored, in the place of `call`:
    stored as its output is, and what writes into it leaves `out` alone."""
    order, width = stored(call)
    _finish(call, _copied(call.emit, out, order, int(width - call.out.shape[order[3]])))


def _finish(call: Call, first: Node) -> None:
    """`first` [B, H_q, N_q, D_v] for what attention returned, and stored as that was."""
    call.node.replace_all_uses_with(call.finish(first))
    for dead in (call.node, *call.dead, *reversed(call.emit.nodes)):
        if not dead.users:
            dead.graph.erase_node(dead)


def _copied(emit: Emitter, x: Node, order: list[int], gap: int) -> Node:
    """x [B, H, N, D], stored in this order, with `gap` elements between what is then its rows."""
    x = emit(aten.permute.default, x, order)
    if gap:
        x = emit(aten.constant_pad_nd.default, x, [0, gap])
        x = emit(aten.slice.Tensor, x, 3, 0, -gap)
    else:
        x = emit(aten.clone.default, x, memory_format=torch.contiguous_format)
    return emit(aten.permute.default, x, [order.index(d) for d in BHND])


def share(index: GraphIndex) -> None:
    """Prepare k and v once for the calls that have the same ones, and the same mask, recipe and
    autocast, and leave no key out: no band hides one from every query, and there are no lists of
    blocks. Nothing may write between such calls: k, v and the mask may be views of what it writes
    to."""
    groups, writes = {}, 0
    for node in index.graph.nodes:
        writes += graph.may_write(node)
        if node.target is torch.ops.sage.sdpa.default and not node.args[4]:
            emit = Emitter(node, index)
            call = SdpaCall(*node.args)
            keys = seen_keys(call.band, *(value_of(x).shape[2] for x in (call.q, call.k)))
            if keys is not None or call.blocks.size is not None:
                continue  # the op leaves keys out
            args = call.k, call.v, call.attn_mask, call.recipe, call.portable
            key = tuple(map(_view, args)), writes, tuple(emit.autocasts)
            groups.setdefault(key, []).append((node, emit, args))
    prepared = []
    for calls in groups.values():
        if len(calls) > 1:
            _, emit, args = calls[0]
            prepare = emit(torch.ops.sage.prepare.default, *args)
            parts = [emit(operator.getitem, prepare, i) for i in range(len(value_of(prepare)))]
            prepared += [(node, parts) for node, *_ in calls]
    index.settle()
    for node, parts in prepared:
        node.update_arg(4, parts)


def _view(x):
    """A key by which equal views are equal. Each stacked call has a `narrow` of its own, and those
    of one k are the same view."""
    return (x.target, x.args, *x.kwargs.items()) if op_name(x) == "narrow" else x
