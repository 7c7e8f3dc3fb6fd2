"""How ``sage::sdpa`` is sharded where its tensors are DTensors: along the batch, the heads, or the
queries, which then need all keys.

DTensor redistributes what is sharded otherwise. A dimension that the mesh does not divide, be it
heads of k alone, stays whole. A band counts from the first query, so it goes with all of them.
"""

import torch
from torch.distributed.tensor import Replicate, Shard

from sage_inductor.ops import compat
from sage_inductor.ops.sdpa import SdpaCall

BATCH, HEADS, QUERIES = range(3)


@compat.register_sharding(torch.ops.sage.sdpa.default)
def sdpa_shardings(*args) -> list[tuple[list, list]]:
    """(placements of out and lse, placements of the tensors among the arguments) of each way."""
    call = SdpaCall(*args)
    lists = [x for each in call.blocks.lists for x in each] if call.blocks.size else []
    dims = [BATCH, HEADS]
    if call.left is None and call.right is None and not lists:
        dims.append(QUERIES)
    tensors = 3 + (call.attn_mask is not None) + len(call.prepared) + len(lists)
    ways = [([Replicate()] * 2, [Replicate()] * tensors)]
    for dim in dims:
        of_keys = Replicate() if dim == QUERIES else Shard(dim)
        placements = [Shard(dim), of_keys, of_keys]
        if call.attn_mask is not None:
            placements.append(_of_broadcast(call.attn_mask, dim + call.attn_mask.ndim - 4))
        placements += [of_keys] * len(call.prepared)
        placements += [_of_broadcast(x, dim) for x in lists]
        ways.append(([Shard(dim)] * 2, placements))
    return ways


def _of_broadcast(x, dim: int):
    """Of a tensor whose dimension may be missing, or 1 for all."""
    return Shard(dim) if dim >= 0 and x.shape[dim] != 1 else Replicate()
