"""What an attn_mask says, proven from the graph alone.

    before:  row, col = arange(N)[:, None], arange(N)
             out = scaled_dot_product_attention(q, k, v, (col <= row) & padding[:, None, None])
    proven:  Band(None, 0) and the node padding[:, None, None]; no N x N mask is read

A mask shows a key where some Affines of its coordinates are >= 0 (index_expr.py), and

    i - j + c >= 0  is  j <= i + c:  right = c
    j - i + c >= 0  is  j >= i - c:  left = c
"""

import dataclasses
import math

import torch
from torch.fx import Node

from sage_inductor.ops.symbols import as_int, statically_true
from sage_inductor.ops.visibility import Band
from sage_inductor.patterns.graph import GraphIndex, value_of
from sage_inductor.patterns.index_analysis import IndexAnalysis
from sage_inductor.patterns.index_expr import TwoValued, minimum, opposite


def prove(mask: Node, n_q, n_kv, index: GraphIndex) -> tuple[Band, Node | None]:
    """(a band, what is left of the mask), which together say what the mask says. No data is read.

    What is left is a node: the mask itself where no band was found, else one bool tensor, also
    where the mask is a float. It broadcasts to the mask, so it may be [N_kv], which no attn_mask
    may be. None: the band says it all."""
    nothing = Band(None, None), mask
    analysis = IndexAnalysis(index)
    meaning = as_additive(analysis.describe(mask), value_of(mask))
    if meaning is None or len(meaning.conjuncts) > 1:
        return nothing
    band = read_band(meaning.bounds, {**analysis.sizes(mask), -2: n_q, -1: n_kv})
    if band is None:
        return nothing
    if meaning.no > -math.inf and not meaning.constant:
        # The lowest finite number hides no key of a query that sees none: that one averages all.
        if meaning.conjuncts or not _every_query_sees_a_key(band, n_q, n_kv):
            return nothing
    if not meaning.conjuncts:
        return band, None
    last = value_of(meaning.conjuncts[0]).shape[-1:]
    return (band, meaning.conjuncts[0]) if last and statically_true(last[0] == n_kv) else nothing


def read_band(bounds, sizes: dict, i=-2, j=-1) -> Band | None:
    """The band that all `bounds` together are, i being the coordinate of queries and j of keys."""
    lefts, rights = [], []
    of_i = {} if statically_true(sizes[i] == 1) else {i: 1}  # of one query i is 0
    for bound in bounds:
        if statically_true(minimum(bound, sizes) >= 0):
            continue
        if bound.slopes == {x: -1 for x in of_i} | {j: 1}:
            lefts.append(bound.const)
        elif bound.slopes == of_i | {j: -1}:
            rights.append(bound.const)
        else:
            return None
    bands = []
    for bottom_right, diagonal in ((False, 0), (True, sizes[j] - sizes[i])):
        left = [as_int(const + diagonal) for const in lefts]
        right = [as_int(const - diagonal) for const in rights]
        if all(isinstance(n, int) and n >= 0 for n in left + right):
            bands.append(Band(min(left, default=None), min(right, default=None), bottom_right))
    # With known lengths both may hold. The one with the smaller offset is the simpler to read.
    return min(bands, key=lambda band: (band.left or 0) + (band.right or 0), default=None)


def as_additive(fact, value) -> TwoValued | None:
    """A mask's description as that of an additive mask: `yes` is 0, `no` is -inf or the lowest
    number of its dtype. None where it is not such a mask."""
    if not isinstance(fact, TwoValued) or not isinstance(value, torch.Tensor):
        return None
    if value.dtype == torch.bool:
        fact = fact if fact.yes else opposite(fact)
        is_mask = fact is not None and fact.yes and (fact.constant or not fact.no)
        return dataclasses.replace(fact, yes=0, no=-math.inf) if is_mask else None
    if not value.dtype.is_floating_point:
        return None
    fact = fact if fact.yes == 0 else opposite(fact)
    is_mask = fact is not None and fact.yes == 0
    hides = is_mask and (fact.constant or fact.no <= torch.finfo(value.dtype).min)
    return fact if hides else None


def _every_query_sees_a_key(band: Band, n_q, n_kv) -> bool:
    """At the top left the last query may lie beyond the last key, and `left` reaches back to it.
    At the bottom right the first may lie before the first key, and `right` reaches forward."""
    reach = band.right if band.bottom_right else band.left
    return reach is None or statically_true(n_q - reach <= n_kv)
