"""Batches that share k and v, stacked: one attention of all their queries, which prepares k and v
once.

    before:  k, v = k.expand(B, -1, -1, -1), v.expand(B, -1, -1, -1)  # of one batch
             out = attention(q, k, v)  # q [B, H_q, N_q, D]
    after:   q = q.transpose(1, 2).flatten(0, 1)[None].transpose(1, 2)  # [1, H_q, B * N_q, D]
             out = attention(q, k[:1], v[:1])
             out = out.transpose(1, 2)[0].unflatten(0, (B, N_q)).transpose(1, 2)

Both are views of q and out in [B, N, H, D] order. In another order they would be copies, and the
call stays as it is.

A row of attention depends on its own query, k and v alone, so its bits stay, if every query sees
the same keys and no scale or mean is shared by queries of two batches.
"""

import torch
from torch.fx import Node

from sage_inductor.ops.formats import MAX_ROWS
from sage_inductor.ops.recipe import Recipe
from sage_inductor.ops.symbols import guarded
from sage_inductor.ops.visibility import FULL
from sage_inductor.patterns import graph
from sage_inductor.patterns.call import Call
from sage_inductor.patterns.eligible import BNHD, stored
from sage_inductor.patterns.graph import GraphIndex, arguments, op_name, statically_true, value_of

aten = torch.ops.aten


def stacks(call: Call, recipe: Recipe) -> bool:
    """Whether `stack` may be asked for a call that sage::sdpa can stand for. It holds for every
    size; a dynamic B * N_q is guarded alone as the op itself would."""
    q = value_of(call.q)
    B, _, N, _ = q.shape
    by_row = not recipe.of_qk.smooths_q and statically_true(N % recipe.sharing.q_span == 0)
    is_view = statically_true(N == 1) or statically_true(q.stride(0) == N * q.stride(2))
    return (
        by_row
        and is_view
        and statically_true(B >= 1)  # of no batch nothing is computed
        and not statically_true(B == 1)
        and stored(call)[0] == BNHD
        and _see_the_same(call)
        and all(_is_one_batch(x, call.emit.index) for x in (call.k, call.v))
        and guarded(B * N <= MAX_ROWS)
    )


def _see_the_same(call: Call) -> bool:
    """Whether what a query sees depends neither on its position nor on its batch."""
    if call.band != FULL or call.block_size is not None or call.sink is not None:
        return False
    if call.attn_mask is None:
        return True
    shape = value_of(call.attn_mask).shape
    return all(statically_true(n == 1) for n in (shape[-2], *shape[:-3]))


def _is_one_batch(x: Node, index: GraphIndex) -> bool:
    """Whether the graph makes x [B, H, N, D] of one batch: B views of it, or copies that nothing
    writes to."""
    value = value_of(x)
    if statically_true(value.stride(0) == 0):
        return graph.storage_of(value) not in index.given_repeated
    source, name, one = arguments(x, "input")[0], op_name(x), False
    if name in ("contiguous", "clone"):
        one = _is_one_batch(source, index)
    elif name in ("repeat", "repeat_interleave"):  # by whatever number: x has q's batches
        one = statically_true(value_of(source).shape[0] == 1)
    return one and not index.written_after(x, x)


def stack(call: Call) -> None:
    """Make `call` that of all its queries in one batch."""
    emit, finish = call.emit, call.finish
    sizes = [emit.size(call.q, d) for d in (0, 2)]

    def by_row(x: Node) -> Node:
        return emit(aten.transpose.int, x, 1, 2)

    def unstacked(x: Node) -> Node:
        """x: out [1, H_q, B * N_q, D_v], or lse without D_v."""
        x = emit(aten.squeeze.dim, by_row(x), 0)
        x = by_row(emit(aten.unflatten.int, x, 0, sizes))
        is_lse = value_of(x).dim() == 3
        return finish(emit(aten.contiguous.default, x) if is_lse else x)

    rows = emit(aten.flatten.using_ints, by_row(call.q), 0, 1)
    call.q = by_row(emit(aten.unsqueeze.default, rows, 0))
    call.k, call.v = (emit(aten.narrow.default, x, 0, 0, 1) for x in (call.k, call.v))
    call.out = call.out.transpose(1, 2).flatten(0, 1).unsqueeze(0).transpose(1, 2)
    call.finish = unstacked
