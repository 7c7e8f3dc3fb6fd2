"""How the ops that a user calls are sharded where their tensors are DTensors: along the batch, the
heads or, where nothing counts them, the queries, which then need all keys.

    op                            batch, heads   queries
    sdpa, lse                     yes            without a band or block lists
    prepare, select_blocks,       yes            no: keys are read across all queries
    cube_order
    sagebwd, rowscaled            yes            no: gradients of k and v add up over all queries

DTensor redistributes what is sharded otherwise, also in the backwards, which are ops of their own.
Heads of q stay with the heads of k that they read: where q has more of them, the heads are sharded
if the mesh divides k's. One head of k is whole on each device, but in training, where its gradient
adds up over all heads. A fraction for each head selects blocks where all heads are.

By batch and heads the bits are those of one device. By queries they need not be: a shard may cut a
block of queries that shares a scale, and which keys count in k's and v's statistics is told by the
rows of a mask that are there.
"""

import json
import math

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import local_map

from sage_inductor.ops import compat
from sage_inductor.ops.formats import Prepared
from sage_inductor.ops.recipe import decode
from sage_inductor.ops.sdpa import SdpaCall, prepare_kv

BATCH, HEADS, QUERIES = range(3)

sage = torch.ops.sage
Ways = list[tuple[list, list]]  # placements of the outputs, of the tensors among the arguments


def _register(op):
    """register_sharding. DTensor remembers the sharding of a call, with the strides of its outputs,
    and is told to tell calls apart by all arguments: by itself it does so from the first int on."""

    def register(ways):
        compat.register_sharding(op)(ways)
        if (compat.sharding_schemas or {}).get(op) is not None:
            compat.sharding_schemas[op].static_argnum = 0
        return ways

    return register


@_register(sage.sdpa.default)
def _sdpa(*args) -> Ways:
    call = SdpaCall(*args)
    lists = [x for each in call.blocks.lists for x in each] if call.blocks.size else []
    queries = call.left is None and call.right is None and not lists
    masks = [] if call.attn_mask is None else [_mask(call.attn_mask)]
    tell = [] if call.tail_block else lists[:1]  # beside a tail all keys count
    keys = _keys(call.k, [*masks, *map(_broadcast, tell)])
    inputs = [Shard, keys, keys, *masks, *[keys] * len(call.prepared), *map(_broadcast, lists)]
    inputs += [_whole for x in call[-4:] if x is not None]
    return _ways(call.q, call.k, [Shard] * 2, inputs, queries)


@_register(sage.select_blocks.default)
def _select_blocks(q, k, *others) -> Ways:
    inputs = [Shard, Shard, *[_whole for perm in others[9:] if perm is not None]]
    asked = json.loads(others[8]) if others[8:] else {}
    by_head = any(isinstance(asked.get(name), list) for name in ("top_k", "sparsity"))
    return _ways(q, k, [Shard] * 2, inputs)[: 2 if by_head else None]  # by heads is the third


@_register(sage.lse.default)
def _lse(q, k, attn_mask, is_causal: bool, scale: float | None) -> Ways:
    inputs = [Shard, _keys(k), *([] if attn_mask is None else [_mask(attn_mask)])]
    if q.ndim != 4:  # [H, N, D]: its dimensions are others
        return [([Replicate()], [Replicate()] * len(inputs))]
    return _ways(q, k, [Shard], inputs, queries=not is_causal)


def _by_batch_and_heads(op, outputs: list, inputs: list, q: int = 0, k: int = 1) -> None:
    """Register an op whose arguments number q and k have the heads of q and of k."""
    _register(op)(lambda *args: _ways(args[q], args[k], outputs, inputs))


@prepare_kv.register_torch_dispatch(DTensor)  # register_sharding has no lists of outputs
@torch.no_grad()
def _prepare(cls, op, types, args, kwargs):
    """Sharded as k is, along the batch and the heads."""
    k, _, attn_mask, recipe, _ = args
    placements = [
        each if type(each) is Shard and each.dim <= HEADS and _divides(k, each) else Replicate()
        for each in k.placements
    ]
    of_mask = None
    if attn_mask is not None:
        of_mask = [_mask(attn_mask)(x.dim) if type(x) is Shard else x for x in placements]
    count = Prepared.count(decode(recipe).of_pv)
    return local_map(
        op, (placements,) * count, (placements, placements, of_mask, None, None),
        redistribute_inputs=True,
    )(*args)  # fmt: skip


def _divides(x: DTensor, placement: Shard) -> bool:
    """local_map takes all shards to be alike."""
    pairs = zip(x.device_mesh.shape, x.placements, strict=True)
    return x.shape[placement.dim] % math.prod(n for n, each in pairs if each == placement) == 0


def _ways(q, k, outputs: list, inputs: list, queries: bool = False) -> Ways:
    """The ways to shard an op. outputs and inputs: for each tensor a function from the dimension of
    q that is sharded to the tensor's placement."""
    dims = [BATCH, HEADS, QUERIES] if queries else [BATCH, HEADS]
    if not _keeps_groups(q, k):
        dims.remove(HEADS)
    sharded = [([of(dim) for of in outputs], [of(dim) for of in inputs]) for dim in dims]
    return [([Replicate()] * len(outputs), [Replicate()] * len(inputs)), *sharded]


def _keeps_groups(q, k) -> bool:
    """Whether any way to shard the heads leaves those of q with theirs of k. DTensor calls a
    dimension that is long enough shardable: 3 heads on 2 devices would be 2 and 1."""
    parts = {1}
    for n in k.mesh.shape:
        parts |= {n * each for each in parts}
    H_q, H_kv = q.shape[HEADS], k.shape[HEADS]
    return H_q == H_kv or all(H_kv % n == 0 for n in parts if n <= H_kv)


def _keys(k, masks=()):
    """The placement of what heads of k have. One head is whole, unless masks or lists say for each
    head of q which keys count in its statistics: then no way to shard them is left."""

    def of(dim: int):
        shared = k.shape[dim] == 1 and all(mask(dim) == Replicate() for mask in masks)
        return Replicate() if dim == QUERIES or shared else Shard(dim)

    return of


def _mask(x):
    return lambda dim: _broadcast(x)(dim + x.ndim - 4)


def _broadcast(x):
    """The placement of a tensor whose dimension may be missing, or 1 for all."""
    return lambda dim: Shard(dim) if dim >= 0 and x.shape[dim] != 1 else Replicate()


def _whole(dim: int) -> Replicate:
    """The placement of an order of tokens: one for all heads."""
    return Replicate()


_KEPT = [lambda dim: Shard(dim + 1), *[Shard] * 9]  # of sage::rowscaled; the first [2, B, H, N]
_by_batch_and_heads(sage.cube_order.default, [_whole], [Shard], k=0)
_by_batch_and_heads(sage.sagebwd.default, [Shard] * 6, [Shard] * 3)
_by_batch_and_heads(sage.sagebwd_backward.default, [Shard] * 3, [Shard] * 8)
_by_batch_and_heads(sage.rowscaled.default, [Shard, *_KEPT], [Shard] * 3)
_by_batch_and_heads(sage.rowscaled_backward.default, [Shard] * 3, [Shard, Shard, *_KEPT], q=3, k=5)
