"""Tensors described by their coordinates, without data: arange(N)[:, None] holds x_-2.

Coordinates are counted from the last dimension (x_-1 is a mask's key j, x_-2 its query i), so that
broadcasting changes nothing. Three kinds of description:

    Affine    const + sum slope_x * x, an integer tensor; const may hold symbolic lengths
    Distance  |Affine|
    TwoValued `yes` where every bound (an Affine) is >= 0 and every tensor of `conjuncts` is True,
              `no` elsewhere. A constant has no bounds. A bool tensor about which nothing is known
              is TwoValued((), (itself,), True, False).

    arange(N)[:, None]                 x_-2
    arange(N) <= arange(N)[:, None]    TwoValued((x_-2 - x_-1,), (), True, False)
    zeros(N, N).masked_fill(~that, c)  TwoValued((x_-2 - x_-1,), (), 0.0, c)

index_analysis.py finds the description of a node.
"""

import dataclasses
import itertools
from collections.abc import Callable

import torch
from torch.fx import Node

from sage_inductor.ops.symbols import as_int

MAX_EXACT = 2**30  # a constant or a slope up to this cannot make index arithmetic overflow int64


@dataclasses.dataclass(frozen=True)
class Affine:
    """const + sum slope_x * x"""

    const: int | torch.SymInt
    slopes: dict  # of coordinate: a dimension (-1, -2, ...) or the name of a free variable

    def __add__(self, other: "Affine") -> "Affine":
        slopes = dict(self.slopes)
        for x, slope in other.slopes.items():
            slopes[x] = slopes.get(x, 0) + slope
        return Affine(as_int(self.const + other.const), {x: s for x, s in slopes.items() if s})

    def __mul__(self, factor: int) -> "Affine":
        slopes = {x: s * factor for x, s in self.slopes.items() if factor}
        return Affine(as_int(self.const * factor), slopes)

    def __sub__(self, other: "Affine") -> "Affine":
        return self + other * -1

    def at(self, places: dict) -> "Affine":
        """With `places[x]` for each coordinate x; a free variable stays."""
        moved = Affine(self.const, {})
        for x, slope in self.slopes.items():
            moved += places.get(x, Affine(0, {x: 1})) * slope
        return moved

    def key(self) -> tuple:
        const = self.const.node.expr if isinstance(self.const, torch.SymInt) else self.const
        return const, tuple(sorted(self.slopes.items(), key=str))


@dataclasses.dataclass(frozen=True)
class Distance:
    """|inside|"""

    inside: Affine


@dataclasses.dataclass(frozen=True)
class TwoValued:
    """`yes` where all bounds are >= 0 and all conjuncts are True, else `no`."""

    bounds: tuple[Affine, ...]
    conjuncts: tuple[Node, ...]
    yes: bool | int | float
    no: bool | int | float

    @property
    def constant(self) -> bool:
        return not self.bounds and not self.conjuncts

    def key(self) -> tuple:
        """Equal keys: yes at the same places."""
        return frozenset(bound.key() for bound in self.bounds), frozenset(self.conjuncts)


def opposite(fact: TwoValued) -> TwoValued | None:
    """The same tensor with yes and no exchanged: not e >= 0 is -e - 1 >= 0. None where it has no
    such form."""
    if fact.constant or fact.conjuncts or len(fact.bounds) != 1:
        return None
    return TwoValued((fact.bounds[0] * -1 + Affine(-1, {}),), (), fact.no, fact.yes)


def minimum(affine: Affine, sizes: dict):
    """The smallest value over the box 0 <= x_d < sizes[d]."""
    falls = (slope * (sizes[x] - 1) for x, slope in affine.slopes.items() if slope < 0)
    return as_int(affine.const + sum(falls))


def substitute(fact, places: dict):
    """The description with `places[x]` for each coordinate x."""
    if isinstance(fact, Affine):
        return fact.at(places)
    if isinstance(fact, Distance):
        return Distance(fact.inside.at(places))
    if isinstance(fact, TwoValued):
        bounds = tuple(bound.at(places) for bound in fact.bounds)
        return dataclasses.replace(fact, bounds=bounds)
    return None


def is_exact(fact: Affine, dtype: torch.dtype) -> bool:
    """Whether torch computes the integers without overflow. Lengths are far below 2**31, and so are
    sums of a few of them."""
    steepest = {torch.int64: MAX_EXACT, torch.int32: 1}.get(dtype, 0)
    const = fact.const if isinstance(fact.const, int) else 0
    return (
        steepest > 0
        and abs(const) <= MAX_EXACT
        and all(abs(slope) <= steepest for slope in fact.slopes.values())
    )


def combine(function: Callable, facts) -> TwoValued | None:
    """function(*numbers) at each place, where the facts depend on at most two conditions t and u.
    All but one of the regions t & u, t & ~u, ~t & u and ~t & ~u must have the same value."""
    conditions = {fact.key(): fact for fact in facts if not fact.constant}
    if len(conditions) > 2:
        return None
    values = {}
    for region in itertools.product((True, False), repeat=len(conditions)):
        holds = dict(zip(conditions, region, strict=True))
        values[region] = function(*(f.yes if holds.get(f.key(), True) else f.no for f in facts))
    for odd, yes in values.items():
        rest = [value for region, value in values.items() if region != odd] or [yes]
        parts = [
            t if held else opposite(t) for t, held in zip(conditions.values(), odd, strict=True)
        ]
        if None in values.values() or None in parts or any(value != rest[0] for value in rest):
            continue
        if yes == rest[0]:
            return TwoValued((), (), yes, yes)
        bounds = tuple(bound for part in parts for bound in part.bounds)
        conjuncts = dict.fromkeys(each for part in parts for each in part.conjuncts)
        return TwoValued(bounds, tuple(conjuncts), yes, rest[0])
    return None
