"""Tensors described by their coordinates, without data: arange(N)[:, None] holds x_-2.

Abstract interpretation of a graph. Coordinates are counted from the last dimension (x_-1 is a
mask's key j, x_-2 its query i), so that broadcasting changes nothing:

    Affine   const + sum slope_x * x, an integer tensor; const may hold symbolic lengths
    Distance |Affine|
    Choice   `yes` where every bound (an Affine) is >= 0 and every tensor of `others` is True,
             `no` elsewhere. A constant has no bounds. A bool tensor about which nothing is known
             is Choice((), (itself,), True, False).

    arange(N)[:, None]                 x_-2
    arange(N) <= arange(N)[:, None]    Choice((x_-2 - x_-1,), (), True, False)
    zeros(N, N).masked_fill(~that, c)  Choice((x_-2 - x_-1,), (), 0.0, c)

A view says where a coordinate of its input lies (an Affine of its own coordinates), and describing
it is substitution. What torch makes of constants, torch is asked. A tensor that some node of the
graph writes to is described by nothing.
"""

import dataclasses
import inspect
import itertools
import math
import operator

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg

from sage_inductor.patterns.call import Survey, op_name, storage_of, value_of

LARGEST = 2**30  # of a constant or a slope: index arithmetic below it cannot overflow int64


@dataclasses.dataclass(frozen=True)
class Affine:
    const: int | torch.SymInt
    slopes: dict  # of coordinate: a dimension (-1, -2, ...) or the name of a free variable

    def __add__(self, other: "Affine") -> "Affine":
        slopes = dict(self.slopes)
        for x, slope in other.slopes.items():
            slopes[x] = slopes.get(x, 0) + slope
        return Affine(plain(self.const + other.const), {x: s for x, s in slopes.items() if s})

    def __mul__(self, factor: int) -> "Affine":
        slopes = {x: s * factor for x, s in self.slopes.items() if factor}
        return Affine(plain(self.const * factor), slopes)

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
    inside: Affine


@dataclasses.dataclass(frozen=True)
class Choice:
    bounds: tuple[Affine, ...]
    others: tuple[Node, ...]
    yes: bool | int | float
    no: bool | int | float

    @property
    def constant(self) -> bool:
        return not self.bounds and not self.others

    def key(self) -> tuple:
        """Equal keys: yes at the same places."""
        return frozenset(bound.key() for bound in self.bounds), frozenset(self.others)


def opposite(fact: Choice) -> Choice | None:
    """The same tensor with yes and no exchanged: of one bound e >= 0, the bound -e - 1 >= 0."""
    if fact.constant or fact.others or len(fact.bounds) != 1:
        return None
    return Choice((fact.bounds[0] * -1 + Affine(-1, {}),), (), fact.no, fact.yes)


# -- arithmetic of lengths ----


def known(condition) -> bool:
    return statically_known_true(condition)


def plain(n):
    """A symbolic integer that is a number after all, as that number."""
    if isinstance(n, torch.SymInt) and n.node.maybe_as_int() is not None:
        return n.node.maybe_as_int()
    return n


def least(affine: Affine, sizes: dict):
    """The smallest value over the box 0 <= x_d < sizes[d]."""
    falls = (slope * (sizes[x] - 1) for x, slope in affine.slopes.items() if slope < 0)
    return plain(affine.const + sum(falls))


# -- the interpreter ----

RULES = {}


def rule(*names: str):
    def register(function):
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


class Cone:
    """Describes nodes of one graph, each once.

    facts: what is known beforehand; sizes: of the free variables in them."""

    def __init__(self, survey: Survey, facts: dict | None = None, sizes: dict | None = None):
        self.facts = dict(facts or {})
        self.free = dict(sizes or {})
        self.written = survey.written

    def is_written(self, node: Node) -> bool:
        value = value_of(node)
        return isinstance(value, torch.Tensor) and storage_of(value) in self.written

    def describe(self, x) -> Affine | Distance | Choice | None:
        """Of a node, a number or a symbolic integer; None: nothing is known."""
        if isinstance(x, (bool, int, float)):
            return Choice((), (), x, x)
        if isinstance(x, torch.SymInt):
            return Affine(plain(x), {})
        if not isinstance(x, Node):
            return None
        if x not in self.facts:
            self.facts[x] = self._describe(x)
        return self.facts[x]

    def _describe(self, node: Node):
        value = value_of(node)
        if not isinstance(value, torch.Tensor) or self.is_written(node):
            return None
        fact = self._apply(RULES.get(op_name(node)), node)
        sizes = self.sizes(node).items()
        fact = _at(fact, {x: Affine(0, {}) for x, size in sizes if known(size == 1)})
        if isinstance(fact, Affine) and not _is_exact(fact, value.dtype):
            fact = None
        opaque = fact is None or isinstance(fact, Choice) and fact.others and fact.no is True
        return self.opaque(node) if opaque else fact

    def opaque(self, node: Node) -> Choice | None:
        is_bool = value_of(node).dtype == torch.bool
        return Choice((), (node,), True, False) if is_bool else None

    def _apply(self, function, node: Node):
        """The rule's description; None where the call is not written as the rule expects."""
        if function is None:
            return None
        args, kwargs = map_arg((node.args, node.kwargs), _tensor_or_number)
        try:
            bound = inspect.signature(function).bind(self, node, *args, **kwargs)
        except TypeError:
            return None
        return function(*bound.args, **bound.kwargs)

    def sizes(self, node: Node) -> dict:
        shape = value_of(node).shape
        return {**self.free, **{d - len(shape): plain(n) for d, n in enumerate(shape)}}

    def decide(self, bounds, node: Node, yes, no) -> Choice:
        """`yes` where all bounds are >= 0; those that hold all over `node` are left out."""
        sizes, open_ = self.sizes(node), []
        for bound in bounds:
            if known(least(bound * -1, sizes) > 0):
                return Choice((), (), no, no)
            if not known(least(bound, sizes) >= 0):
                open_.append(bound)
        return Choice(tuple(open_), (), yes, no if open_ else yes)

    def moved(self, x, places: dict):
        """The description of x seen through a view. Opaque tensors do not move: the view is one."""
        fact = self.describe(x)
        return None if isinstance(fact, Choice) and fact.others else _at(fact, places)


def _at(fact, places: dict):
    if isinstance(fact, Affine):
        return fact.at(places)
    if isinstance(fact, Distance):
        return Distance(fact.inside.at(places))
    if isinstance(fact, Choice):
        bounds = tuple(bound.at(places) for bound in fact.bounds)
        return dataclasses.replace(fact, bounds=bounds)
    return None


def _tensor_or_number(node: Node):
    value = value_of(node)
    return value if isinstance(value, (int, float, torch.SymInt)) else node


def _is_exact(fact: Affine, dtype: torch.dtype) -> bool:
    """No overflow: lengths are far below 2**31, and so are sums of a few of them."""
    steepest = {torch.int64: LARGEST, torch.int32: 1}.get(dtype, 0)
    const = fact.const if isinstance(fact.const, int) else 0
    return (
        steepest > 0
        and abs(const) <= LARGEST
        and all(abs(slope) <= steepest for slope in fact.slopes.values())
    )


# -- constants and indices ----


@rule("arange")
def _arange(cone, node, start, end=None, step=1, **_):
    start = 0 if end is None else start
    if not isinstance(step, int) or not isinstance(start, (int, torch.SymInt)):
        return None
    return Affine(plain(start), {-1: step})


def _constant(cone, node, number):
    if isinstance(number, torch.SymInt):
        return Affine(plain(number), {})
    if not isinstance(number, (bool, int, float)):
        return None
    with unset_fake_temporarily():
        number = torch.tensor(number, dtype=value_of(node).dtype, device="cpu").item()
    return Choice((), (), number, number)


@rule("ones", "new_ones", "ones_like", "zeros", "new_zeros", "zeros_like")
def _ones_or_zeros(cone, node, *_, **__):
    return _constant(cone, node, int("ones" in op_name(node)))


@rule("full", "full_like")
def _full(cone, node, size, fill_value, **_):
    return _constant(cone, node, fill_value)


@rule("new_full")
def _new_full(cone, node, like, size, fill_value, **_):
    return _constant(cone, node, fill_value)


@rule("tensor", "scalar_tensor")
def _tensor(cone, node, data, **_):
    return _constant(cone, node, data)


@rule("cumsum")
def _cumsum(cone, node, x, dim, **_):
    """Of a constant c: c * (x_dim + 1)."""
    fact, rank = cone.describe(x), value_of(node).dim()
    if not isinstance(fact, Choice) or not fact.constant or value_of(node).dtype != torch.int64:
        return None
    return Affine(1, {_from_last(dim, rank): 1}) * int(fact.yes)


@rule("diff")
def _diff(cone, node, x, n=1, dim=-1, prepend=None, append=None):
    """Of an Affine: its slope, where what is prepended lies on the same line."""
    fact, before = cone.describe(x), cone.describe(prepend)
    if not isinstance(fact, Affine) or not isinstance(before, Affine) or n != 1 or append:
        return None
    dim = _from_last(dim, value_of(node).dim())
    slope = Affine(fact.slopes.get(dim, 0), {})
    start = before + slope - fact.at({dim: Affine(0, {})})
    one = known(value_of(prepend).shape[dim] == 1)
    return slope if one and not start.slopes and known(start.const == 0) else None


# -- views: where a coordinate of the input lies ----


def _axis(d: int) -> Affine:
    return Affine(0, {d: 1})


def _from_last(dim: int, rank: int) -> int:
    return dim if dim < 0 else dim - rank


@rule("expand", "expand_as", "broadcast_to", "repeat", "tile")
def _broadcast(cone, node, x, *_, **__):
    """Right-aligned: coordinates stay. (A repeated dimension has another size, and is not 1.)"""
    before, after = value_of(x).shape, value_of(node).shape
    pairs = zip(reversed(before), reversed(after), strict=False)
    return cone.describe(x) if all(known(m == 1) or known(m == n) for m, n in pairs) else None


@rule("unsqueeze", "squeeze", "view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as")
def _reshape(cone, node, x, *_, **__):
    """Dimensions of size 1 come and go; the others stay in order."""
    before, after = (
        [(d - len(shape), n) for d, n in enumerate(shape) if not known(n == 1)]
        for shape in (value_of(x).shape, value_of(node).shape)
    )
    pairs = list(zip(before, after, strict=False))
    if value_of(x).dtype != value_of(node).dtype:  # view(dtype)
        return None
    if len(before) != len(after) or not all(known(m == n) for (_, m), (_, n) in pairs):
        return None
    return cone.moved(x, {d: _axis(e) for (d, _), (e, _) in pairs})


@rule("transpose", "swapaxes")
def _transpose(cone, node, x, dim0, dim1):
    a, b = (_from_last(dim, value_of(x).dim()) for dim in (dim0, dim1))
    return cone.moved(x, {a: _axis(b), b: _axis(a)})


@rule("t")
def _t(cone, node, x):
    return _transpose(cone, node, x, 0, 1) if value_of(x).dim() == 2 else None


@rule("getattr")
def _getattr(cone, node, x, name):
    is_transpose = name == "mT" or name == "T" and value_of(x).dim() == 2
    return _transpose(cone, node, x, -2, -1) if is_transpose else None


@rule("permute")
def _permute(cone, node, x, *dims):
    dims = dims[0] if isinstance(dims[0], (tuple, list)) else dims
    rank = len(dims)
    places = {_from_last(d, rank): _axis(o - rank) for o, d in enumerate(dims)}
    return cone.moved(x, places)


@rule("slice")
def _slice(cone, node, x, dim=0, start=None, end=None, step=1):
    rank = value_of(x).dim()
    index = [slice(None)] * rank
    index[_from_last(dim, rank)] = slice(start, end, step)
    return _getitem(cone, node, x, tuple(index))


@rule("select")
def _select(cone, node, x, dim, index):
    rank = value_of(x).dim()
    return _getitem(cone, node, x, (*[slice(None)] * (_from_last(dim, rank) + rank), index))


@rule("index")
def _index(cone, node, x, indices):
    return _gather(cone, node, x, tuple(indices))


@rule("getitem")
def _getitem(cone, node, x, index):
    index = index if isinstance(index, tuple) else (index,)
    if any(isinstance(part, Node) for part in index):
        return _gather(cone, node, x, index)
    shape, rank = value_of(x).shape, value_of(node).dim()
    named = sum(part is not None and part is not Ellipsis for part in index)
    rest = [slice(None)] * (len(shape) - named)
    if Ellipsis in index:
        at = index.index(Ellipsis)
        index = (*index[:at], *rest, *index[at + 1 :])
    else:
        index = (*index, *rest)
    places, d, o = {}, -len(shape), -rank
    for part in index:
        if part is None:
            o += 1
            continue
        places[d] = _place(part, o, shape[d])
        if places[d] is None:
            return None
        d, o = d + 1, o + isinstance(part, slice)
    return cone.moved(x, places)


def _place(part, o: int, size) -> Affine | None:
    """Where `part` of an index reads a dimension of `size`, by the coordinate o it leaves."""
    start = part.start if isinstance(part, slice) else part
    step = part.step if isinstance(part, slice) else 0
    start, step = 0 if start is None else start, 1 if step is None else step
    if not isinstance(start, (int, torch.SymInt)) or isinstance(start, bool) or step not in (0, 1):
        return None
    start = start + size if known(start < 0) else start
    inside = known(start >= 0) and known(start <= size)  # else it wraps around or is clamped
    return Affine(plain(start), {o: 1} if step else {}) if inside else None


def _gather(cone, node, x, index):
    """x[a, b, ...] of index tensors for all dimensions: the coordinates are what they hold."""
    shape, places = value_of(x).shape, {}
    if len(index) != len(shape):
        return None
    for d, part in enumerate(index, -len(shape)):
        place = cone.describe(part)
        if isinstance(place, Choice) and place.constant and type(place.yes) is int:
            place = Affine(place.yes, {})
        if not isinstance(place, Affine) or not known(least(place, cone.sizes(node)) >= 0):
            return None  # a negative index would count from the end
        places[d] = place
    return cone.moved(x, places)


# -- element by element ----

COMPARE = {
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "eq": operator.eq, "ne": operator.ne,
}  # fmt: skip
ARITHMETIC = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "neg": operator.neg,
    "rsub": lambda a, b: b - a,
}  # fmt: skip
LOGIC = {
    "and_": operator.and_, "__and__": operator.and_, "bitwise_and": operator.and_,
    "or_": operator.or_, "__or__": operator.or_, "bitwise_or": operator.or_,
    "invert": operator.invert, "__invert__": operator.invert, "bitwise_not": operator.invert,
    "logical_and": torch.logical_and, "logical_or": torch.logical_or,
    "logical_not": torch.logical_not, "where": torch.where, "masked_fill": torch.masked_fill,
    "log": torch.log,
}  # fmt: skip
POINTWISE = COMPARE | ARITHMETIC | LOGIC


@rule(*POINTWISE)
def _pointwise(cone, node, *args):
    facts, name = [cone.describe(arg) for arg in args], op_name(node)
    if None in facts:
        return None
    if all(isinstance(fact, Choice) for fact in facts):
        values, dtype = [value_of(arg) for arg in args], value_of(node).dtype
        return _combine(lambda *ns: _evaluate(POINTWISE[name], ns, values, dtype), facts)
    facts = [_as_index(fact) for fact in facts]
    if None in facts or name in LOGIC:
        return None
    return _compare(cone, node, name, *facts) if name in COMPARE else _calculate(name, facts)


def _evaluate(function, numbers, values, dtype):
    """What torch itself makes of numbers that stand for `values`; None if not of that dtype."""
    with unset_fake_temporarily():
        tensors = [
            torch.full((1,) * bool(value.dim()), number, dtype=value.dtype, device="cpu")
            if isinstance(value, torch.Tensor)
            else number
            for number, value in zip(numbers, values, strict=True)
        ]
        out = function(*tensors)
    return out.item() if out.dtype == dtype else None


def _combine(function, facts) -> Choice | None:
    """function(*numbers) at each place, for Choices that differ in at most two truths t and u. Of
    the regions t & u, t & ~u, ~t & u and ~t & ~u, all but one must have the same value."""
    truths = {fact.key(): fact for fact in facts if not fact.constant}
    if len(truths) > 2:
        return None
    values = {}
    for region in itertools.product((True, False), repeat=len(truths)):
        holds = dict(zip(truths, region, strict=True))
        values[region] = function(*(f.yes if holds.get(f.key(), True) else f.no for f in facts))
    for odd, yes in values.items():
        rest = [value for region, value in values.items() if region != odd] or [yes]
        parts = [t if held else opposite(t) for t, held in zip(truths.values(), odd, strict=True)]
        if None in values.values() or None in parts or any(value != rest[0] for value in rest):
            continue
        if yes == rest[0]:
            return Choice((), (), yes, yes)
        bounds = tuple(bound for part in parts for bound in part.bounds)
        others = dict.fromkeys(other for part in parts for other in part.others)
        return Choice(bounds, tuple(others), yes, rest[0])
    return None


def _as_index(fact) -> Affine | Distance | None:
    if not isinstance(fact, Choice):
        return fact
    return Affine(fact.yes, {}) if fact.constant and type(fact.yes) is int else None


def _calculate(name: str, facts) -> Affine | None:
    if any(isinstance(fact, Distance) for fact in facts):
        return None
    if name == "mul":
        a, b = sorted(facts, key=lambda fact: len(fact.slopes))
        return b * a.const if not a.slopes and isinstance(a.const, int) else None
    return facts[0] * -1 if name == "neg" else ARITHMETIC[name](*facts)


def _compare(cone, node, name: str, a, b) -> Choice | None:
    if name in ("gt", "ge"):
        name, a, b = {"gt": "lt", "ge": "le"}[name], b, a
    distances = isinstance(a, Distance) + isinstance(b, Distance)
    if name in ("eq", "ne"):
        yes = name == "eq"
        return None if distances else cone.decide((b - a, a - b), node, yes, not yes)
    strict = Affine(-1 if name == "lt" else 0, {})
    if distances == 2:
        return None
    if isinstance(b, Distance):  # a <= |e|: not |e| <= a - 1
        strict = Affine(-1, {}) - strict
        return cone.decide((a - b.inside + strict, a + b.inside + strict), node, False, True)
    if isinstance(a, Distance):
        return cone.decide((b - a.inside + strict, b + a.inside + strict), node, True, False)
    return cone.decide((b - a + strict,), node, True, False)


@rule("abs", "absolute", "__abs__")
def _abs(cone, node, x):
    fact = cone.describe(x)
    return Distance(fact) if isinstance(fact, Affine) else None


@rule("tril", "triu")
def _triangle(cone, node, x, diagonal=0):
    fact, lower = cone.describe(x), _axis(-2) - _axis(-1) + Affine(plain(diagonal), {})
    if not isinstance(fact, Choice):
        return None
    bound = lower if op_name(node) == "tril" else lower * -1
    kept = cone.decide((bound,), node, True, False)
    return _combine(lambda keep, number: number if keep else type(number)(0), (kept, fact))


@rule(
    "to", "_to_copy", "type", "type_as", "bool", "int", "long", "float", "double", "half",
    "bfloat16", "contiguous", "clone", "detach", "alias", "cpu", "cuda",
)  # fmt: skip
def _copy(cone, node, x, *_, **__):
    fact, before, after = cone.describe(x), value_of(x), value_of(node)
    if not isinstance(fact, Choice):
        return fact if isinstance(fact, Affine) or before.dtype == after.dtype else None
    finite = all(map(math.isfinite, (fact.yes, fact.no)))
    if fact.others and before.device != after.device:
        return None
    if not finite and not after.dtype.is_floating_point and after.dtype != torch.bool:
        return None
    return _combine(
        lambda number: _evaluate(lambda t: t.to(after.dtype), [number], [before], after.dtype),
        [fact],
    )
