"""What an attn_mask says, proven from the graph alone.

    before:  row, col = arange(N)[:, None], arange(N)
             out = scaled_dot_product_attention(q, k, v, (col <= row) & padding[:, None, None])
    proven:  Band(None, 0) and the node padding[:, None, None]; no N x N mask is read

A mask is yes (True or 0) where some Affines of its coordinates are >= 0 (coordinates.py), and

    i - j + c >= 0  is  j <= i + c:  right = c
    j - i + c >= 0  is  j >= i - c:  left = c
"""

import dataclasses
import math

import torch
from torch.fx import Node

from sage_inductor.patterns.call import Band, Survey, value_of
from sage_inductor.patterns.coordinates import Choice, Cone, known, least, opposite, plain


def prove(mask: Node, n_q, n_kv, survey: Survey) -> tuple[Band, Node | None]:
    """What an attn_mask says, proven from the graph alone: a band, and the node of what is left of
    the mask (None: the band says it all; bool, and broadcastable like an attn_mask, also where the
    mask is a float). Never looks at data."""
    nothing = Band(None, None), mask
    cone = Cone(survey)
    meaning = seen(cone.describe(mask), value_of(mask))
    if meaning is None or len(meaning.others) > 1 or any(map(cone.is_written, meaning.others)):
        return nothing
    band = read_band(meaning.bounds, {**cone.sizes(mask), -2: n_q, -1: n_kv})
    if band is None:
        return nothing
    if meaning.no > -math.inf and not meaning.constant:
        # the lowest finite number: a query that sees no key would average over them all
        if meaning.others or not _every_query_sees_a_key(band, n_q, n_kv):
            return nothing
    if not meaning.others:
        return band, None
    last = value_of(meaning.others[0]).shape[-1:]
    return (band, meaning.others[0]) if last and known(last[0] == n_kv) else nothing


def read_band(bounds, sizes: dict, i=-2, j=-1) -> Band | None:
    """The band that `bounds` are together, for the coordinates i of queries and j of keys."""
    lefts, rights = [], []
    for bound in bounds:
        if known(least(bound, sizes) >= 0):
            continue
        if bound.slopes == {i: -1, j: 1}:
            lefts.append(bound.const)
        elif bound.slopes == {i: 1, j: -1}:
            rights.append(bound.const)
        else:
            return None
    bands = []
    for bottom_right, diagonal in ((False, 0), (True, sizes[j] - sizes[i])):
        left = [plain(const + diagonal) for const in lefts]
        right = [plain(const - diagonal) for const in rights]
        if all(isinstance(n, int) and n >= 0 for n in left + right):
            bands.append(Band(min(left, default=None), min(right, default=None), bottom_right))
    # with known lengths both may be true: causal is the one with no offset
    return min(bands, key=lambda band: (band.left or 0) + (band.right or 0), default=None)


def seen(fact, value) -> Choice | None:
    """A mask's description as an additive mask: yes is 0, no is -inf or the lowest number."""
    if not isinstance(fact, Choice) or not isinstance(value, torch.Tensor):
        return None
    if value.dtype == torch.bool:
        fact = fact if fact.yes else opposite(fact)
        is_mask = fact is not None and fact.yes and (fact.constant or not fact.no)
        return dataclasses.replace(fact, yes=0, no=-math.inf) if is_mask else None
    if not value.dtype.is_floating_point:
        return None
    fact = fact if fact.yes == 0 else opposite(fact)
    is_mask = fact is not None and fact.yes == 0
    return fact if is_mask and (fact.constant or _hides(fact.no, value.dtype)) else None


def _hides(number: float, dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and number <= torch.finfo(dtype).min


def _every_query_sees_a_key(band: Band, n_q, n_kv) -> bool:
    """Top left, the last query is the one that may look beyond the last key, and `left` reaches
    back; bottom right, the first may lie before the first key, and `right` reaches forward."""
    reach = band.right if band.bottom_right else band.left
    return reach is None or known(n_q - reach <= n_kv)
