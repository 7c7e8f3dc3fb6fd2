"""Packed documents: q, k and v hold the tokens of several, one after another, and a query sees keys
of its own document.

    cu_q, cu_k [S + 1]    document s is queries cu_q[s] .. cu_q[s + 1] - 1 and keys cu_k[s] ..

They are attended by lists of blocks, in places (`perm`, layout.py) of which each document has whole
blocks. A place between two documents holds no token: perm is -1 there. So a block has tokens of one
document, a band counts within it, and k and v have means and scales of each document: what one
gives does not depend on its neighbours. The last query of a document has the place of its last key:
a band is that of the bottom right, as in flash-attn.

    130 queries and keys    places 0 .. 129; none is in 130 .. 255
    3 queries, 130 keys     queries 127 .. 129; keys 0 .. 129
    130 queries, 3 keys     queries 1 .. 130; keys 128 .. 130, as keys begin with a block

How long documents are is data: P, the number of places, is the most that S documents of T tokens
can take, and a graph with other lengths is the same.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_inductor.ops.formats import K_BLOCK
from sage_inductor.ops.register import opens

BLOCK = 128  # places of a block of queries or keys


def _blocks(n):
    """The places of as many blocks as n tokens take."""
    return (n + BLOCK - 1) // BLOCK * BLOCK


def num_places(S: int, T_q: int, T_k: int | None) -> int:
    """P. T_k: None where queries are where keys are."""
    return _blocks(T_q) + BLOCK * S + (0 if T_k is None else _blocks(T_k) + BLOCK * S)


def compose_documents(
    cu_q: Tensor, T_q: int, cu_k: Tensor | None = None, T_k: int | None = None,
    seqused_k: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """``sage::documents``. cu_q, cu_k: int32 or int64 [S + 1], ascending from 0 to at most T_q and
    T_k; without cu_k and T_k keys are where queries are. seqused_k [S]: the number of keys of each
    that count. Returns, int32 but for the last:

    perm [P], perm_k [P]             the query and the key of each place; -1: none
    spans [S + 1, 4]                 each document's first place and number of keys, and of queries;
                                     the last is of queries beyond cu_q[S], which see nothing
    documents [P / K_BLOCK]          whose places those are
    counts [1, 1, P / BLOCK]         lists of blocks of keys for each block of queries, that have
    indices [1, 1, P / BLOCK, P / BLOCK]  room for all
    shown [1, 1, 1, P]               bool: places of keys
    """
    S, device = cu_q.shape[0] - 1, cu_q.device
    for name, x, n in (("cu_q", cu_q, S + 1), ("cu_k", cu_k, S + 1), ("seqused_k", seqused_k, S)):
        if x is not None and (x.dim() != 1 or x.shape[0] != n or x.is_floating_point()):
            raise ValueError(
                f"sage::documents: {name} must be [{n}] of integers, got {[*x.shape]} of {x.dtype}"
            )
    P = num_places(S, T_q, T_k)
    cu_q = torch.cat([cu_q, cu_q.new_full((1,), T_q)]).long()
    cu_k = cu_q if cu_k is None else torch.cat([cu_k, cu_k.narrow(0, S, 1)]).long()
    n_q, n_k = cu_q.diff(), cu_k.diff()
    if seqused_k is not None:
        n_k = torch.minimum(n_k, F.pad(seqused_k.long(), (0, 1)))
    of_k = _blocks((n_q - n_k).clamp(min=0))  # places before a document's first key
    slot = _blocks(of_k + n_k)
    begin = slot.cumsum(0) - slot
    first_k, first_q = begin + of_k, begin + of_k + n_k - n_q
    places = torch.arange(P, device=device)
    # Where some begin at one place, all but the last have no token.
    document = torch.bucketize(places, begin, right=True) - 1

    # Methods, because an index of fake tensors asks for their GPU, which may not be there.
    def tokens(cu: Tensor, first: Tensor, n: Tensor) -> Tensor:
        row = places - first.index_select(0, document)
        here = (row >= 0) & (row < n.index_select(0, document))
        return torch.where(here, cu.index_select(0, document) + row, -1)

    perm, perm_k = tokens(cu_q, first_q, n_q), tokens(cu_k, first_k, n_k)
    of_block = document.view(-1, BLOCK).select(1, 0)
    listed = torch.where(of_block < S, _blocks(n_k).index_select(0, of_block) // BLOCK, 0)
    begins = first_k.index_select(0, of_block).unsqueeze(1) // BLOCK
    indices = begins + torch.arange(P // BLOCK, device=device)
    found = (
        perm, perm_k, torch.stack([first_k, n_k, first_q, n_q], 1),
        document.view(-1, K_BLOCK).select(1, 0), listed.view(1, 1, -1),
        indices.view(1, 1, *indices.shape),
    )  # fmt: skip
    found = [x.to(torch.int32, copy=True, memory_format=torch.contiguous_format) for x in found]
    return [*found, (perm_k >= 0).view(1, 1, 1, -1)]


documents = torch.library.custom_op("sage::documents", compose_documents, mutates_args=())


@documents.register_fake
def _(cu_q, T_q, cu_k=None, T_k=None, seqused_k=None):
    P = num_places(cu_q.shape[0] - 1, T_q, T_k)
    M, of_documents = P // BLOCK, (cu_q.shape[0], 4)
    shapes = (P,), (P,), of_documents, (P // K_BLOCK,), (1, 1, M), (1, 1, M, M)
    found = [cu_q.new_empty(shape, dtype=torch.int32) for shape in shapes]
    return [*found, cu_q.new_empty((1, 1, 1, P), dtype=torch.bool)]


opens(documents, compose_documents)


def places_of(perm: Tensor, T: int) -> Tensor:
    """The place of each of T queries, int64 [T]."""
    places = torch.arange(perm.shape[0], device=perm.device)
    found = places.new_zeros(T + 1)  # the last: of places without one
    found = found.scatter(0, torch.where(perm < 0, T, perm).long(), places)
    return found.narrow(0, 0, T)
