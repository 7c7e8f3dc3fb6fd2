"""Abstract interpretation of a graph: which of its tensors are functions of their coordinates.

`IndexAnalysis.describe` gives a node's description (index_expr.py), by a rule for its operation. A
tensor that some node of the graph writes to is described by nothing.

A view says where a coordinate of its input lies (an Affine of its own coordinates), and describing
it is substitution. What torch makes of constants, torch is asked.
"""

import inspect
import math
import operator

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from sage_inductor.ops.compat import unset_fake_temporarily
from sage_inductor.ops.symbols import as_int
from sage_inductor.patterns.graph import GraphIndex, op_name, order_of, statically_true, value_of
from sage_inductor.patterns.masks import index_expr
from sage_inductor.patterns.masks.index_expr import Affine, Distance, TwoValued, combine, minimum


class IndexAnalysis:
    """Describes nodes of one graph, each once.

    facts: descriptions known beforehand. sizes: those of the free variables in them."""

    def __init__(self, index: GraphIndex, facts: dict | None = None, sizes: dict | None = None):
        self.facts = dict(facts or {})
        self.free = dict(sizes or {})
        self.index = index

    def describe(self, x) -> Affine | Distance | TwoValued | None:
        """What is known of a node, a number or a symbolic integer; None: nothing."""
        if isinstance(x, (bool, int, float)):
            return TwoValued((), (), x, x)
        if isinstance(x, torch.SymInt):
            return Affine(as_int(x), {})
        if not isinstance(x, Node):
            return None
        if x not in self.facts:
            self.facts[x] = self._describe(x)
        return self.facts[x]

    def _describe(self, node: Node):
        value = value_of(node)
        if not isinstance(value, torch.Tensor) or self.index.writers_of(node):
            return None
        fact = self._apply(RULES.get(op_name(node)), node)
        sizes = self.sizes(node).items()
        fact = index_expr.substitute(
            fact, {x: Affine(0, {}) for x, size in sizes if statically_true(size == 1)}
        )
        if isinstance(fact, Affine) and not index_expr.is_exact(fact, value.dtype):
            fact = None
        if fact is None or isinstance(fact, TwoValued) and fact.conjuncts and fact.no is True:
            return TwoValued((), (node,), True, False) if value.dtype == torch.bool else None
        return fact

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
        return {**self.free, **{d - len(shape): as_int(n) for d, n in enumerate(shape)}}

    def decide(self, bounds, node: Node, yes, no) -> TwoValued:
        """`yes` where all bounds are >= 0. Those that hold all over `node` are left out."""
        sizes, open_ = self.sizes(node), []
        for bound in bounds:
            if statically_true(minimum(bound * -1, sizes) > 0):
                return TwoValued((), (), no, no)
            if not statically_true(minimum(bound, sizes) >= 0):
                open_.append(bound)
        return TwoValued(tuple(open_), (), yes, no if open_ else yes)

    def moved(self, x, places: dict):
        """The description of x seen through a view; None where it holds conjuncts, which have the
        shape that they have: the view is then a conjunct itself."""
        fact = self.describe(x)
        is_conjunct = isinstance(fact, TwoValued) and fact.conjuncts
        return None if is_conjunct else index_expr.substitute(fact, places)


def _tensor_or_number(node: Node):
    value = value_of(node)
    return value if isinstance(value, (int, float, torch.SymInt)) else node


# -- rules ----

RULES = {}


def rule(*names: str):
    """A rule is called as rule(analysis, node, *args, **kwargs) with the node's own arguments,
    which its signature names, and returns a description or None."""

    def register(function):
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


# -- constants and indices ----


@rule("arange")
def _arange(analysis, node, start, end=None, step=1, **_):
    start = 0 if end is None else start
    if not isinstance(step, int) or not isinstance(start, (int, torch.SymInt)):
        return None
    return Affine(as_int(start), {-1: step})


def _constant(node, number):
    if isinstance(number, torch.SymInt):
        return Affine(as_int(number), {})
    if not isinstance(number, (bool, int, float)):
        return None
    with unset_fake_temporarily():
        number = torch.tensor(number, dtype=value_of(node).dtype, device="cpu").item()
    return TwoValued((), (), number, number)


@rule("ones", "new_ones", "ones_like", "zeros", "new_zeros", "zeros_like")
def _ones_or_zeros(analysis, node, *_, **__):
    return _constant(node, int("ones" in op_name(node)))


@rule("full", "full_like", "new_full", "tensor", "scalar_tensor")
def _filled(analysis, node, *given, **by_name):
    *_, number = (*given, *(by_name[x] for x in ("data", "fill_value") if x in by_name))
    return _constant(node, number)


@rule("cumsum")
def _cumsum(analysis, node, x, dim, **_):
    """A constant c becomes c * (x_dim + 1)."""
    fact, rank = analysis.describe(x), value_of(node).dim()
    if not isinstance(fact, TwoValued) or not fact.constant or value_of(node).dtype != torch.int64:
        return None
    return Affine(1, {_from_last(dim, rank): 1}) * int(fact.yes)


@rule("diff")
def _diff(analysis, node, x, n=1, dim=-1, prepend=None, append=None):
    """An Affine's slope, where what is prepended lies on the same line."""
    fact, before = analysis.describe(x), analysis.describe(prepend)
    if not isinstance(fact, Affine) or not isinstance(before, Affine) or n != 1 or append:
        return None
    dim = _from_last(dim, value_of(node).dim())
    slope = Affine(fact.slopes.get(dim, 0), {})
    start = before + slope - fact.at({dim: Affine(0, {})})
    one = statically_true(value_of(prepend).shape[dim] == 1)
    return slope if one and not start.slopes and statically_true(start.const == 0) else None


# -- views: where a coordinate of the input lies ----


def _axis(d: int) -> Affine:
    return Affine(0, {d: 1})


def _from_last(dim: int, rank: int) -> int:
    return dim if dim < 0 else dim - rank


@rule("expand", "expand_as", "broadcast_to", "repeat", "tile")
def _broadcast(analysis, node, x, *_, **__):
    """Shapes are aligned at the right, so coordinates stay. A dimension that is repeated, and was
    not 1, has another size."""
    before, after = value_of(x).shape, value_of(node).shape
    for m, n in zip(reversed(before), reversed(after), strict=False):
        if not statically_true(m == 1) and not statically_true(m == n):
            return None
    return analysis.describe(x)


@rule("unsqueeze", "squeeze", "view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as")
def _reshape(analysis, node, x, *_, **__):
    """Dimensions of size 1 come and go; the others stay in order."""
    before, after = (
        [(d - len(shape), n) for d, n in enumerate(shape) if not statically_true(n == 1)]
        for shape in (value_of(x).shape, value_of(node).shape)
    )
    pairs = list(zip(before, after, strict=False))
    if value_of(x).dtype != value_of(node).dtype:  # view(dtype)
        return None
    if len(before) != len(after) or not all(statically_true(m == n) for (_, m), (_, n) in pairs):
        return None
    return analysis.moved(x, {d: _axis(e) for (d, _), (e, _) in pairs})


@rule("transpose", "swapaxes", "permute", "mT", "getattr", "t", "numpy_T")
def _permute(analysis, node, x, *names, **_):
    is_matrix = names == ("T",) or op_name(node) in ("t", "numpy_T")  # x.T from torch 2.15 on
    order = (1, 0) if is_matrix and value_of(x).dim() == 2 else order_of(node) or ()
    rank = len(order)
    places = {d - rank: _axis(o - rank) for o, d in enumerate(order)}
    return analysis.moved(x, places) if places else None


@rule("slice")
def _slice(analysis, node, x, dim=0, start=None, end=None, step=1):
    rank = value_of(x).dim()
    index = [slice(None)] * rank
    index[_from_last(dim, rank)] = slice(start, end, step)
    return _getitem(analysis, node, x, tuple(index))


@rule("select")
def _select(analysis, node, x, dim, index):
    rank = value_of(x).dim()
    return _getitem(analysis, node, x, (*[slice(None)] * (_from_last(dim, rank) + rank), index))


@rule("getitem")
def _getitem(analysis, node, x, index):
    if not isinstance(value_of(x), torch.Tensor):
        return None  # one of several outputs
    index = index if isinstance(index, tuple) else (index,)
    if any(isinstance(part, Node) for part in index):
        return _gather(analysis, node, x, index)
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
    return analysis.moved(x, places)


def _place(part, o: int, size) -> Affine | None:
    """Where `part` of an index reads a dimension of `size`, as a function of the coordinate o that
    it leaves."""
    start = part.start if isinstance(part, slice) else part
    step = part.step if isinstance(part, slice) else 0
    start, step = 0 if start is None else start, 1 if step is None else step
    if not isinstance(start, (int, torch.SymInt)) or isinstance(start, bool) or step not in (0, 1):
        return None
    start = start + size if statically_true(start < 0) else start
    # else it wraps around or is clamped
    inside = statically_true(start >= 0) and statically_true(start <= size)
    return Affine(as_int(start), {o: 1} if step else {}) if inside else None


@rule("index")
def _gather(analysis, node, x, index):
    """x[a, b, ...] with an index tensor for each dimension. The coordinates are what they hold."""
    shape, places = value_of(x).shape, {}
    if len(index) != len(shape):
        return None
    for d, part in enumerate(index, -len(shape)):
        place = analysis.describe(part)
        if isinstance(place, TwoValued) and place.constant and type(place.yes) is int:
            place = Affine(place.yes, {})
        if not isinstance(place, Affine):
            return None
        if not statically_true(minimum(place, analysis.sizes(node)) >= 0):
            return None  # a negative index counts from the end
        places[d] = place
    return analysis.moved(x, places)


# -- element by element ----

# The last two are methods with torch 2.11.
COMPARE = {x: getattr(operator, x) for x in "lt le gt ge eq ne __eq__ __ne__".split()}
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
def _pointwise(analysis, node, *args):
    name = op_name(node)
    if name == "where" and node.op == "call_method":  # x.where(condition, other)
        args = args[1], args[0], *args[2:]
    facts = [analysis.describe(arg) for arg in args]
    if None in facts:
        return None
    if all(isinstance(fact, TwoValued) for fact in facts):
        values, dtype = [value_of(arg) for arg in args], value_of(node).dtype
        return combine(lambda *ns: evaluate(POINTWISE[name], ns, values, dtype), facts)
    facts = [_as_index(fact) for fact in facts]
    if None in facts or name in LOGIC:
        return None
    return _compare(analysis, node, name, *facts) if name in COMPARE else _calculate(name, facts)


def evaluate(function, numbers, values, dtype):
    """What torch makes of numbers that stand for `values`; None if the result is not `dtype`."""
    with unset_fake_temporarily():
        tensors = [
            torch.full((1,) * bool(value.dim()), number, dtype=value.dtype, device="cpu")
            if isinstance(value, torch.Tensor)
            else type(value)(number)
            for number, value in zip(numbers, values, strict=True)
        ]
        out = function(*tensors)
    return out.item() if out.dtype == dtype else None


def _as_index(fact) -> Affine | Distance | None:
    if not isinstance(fact, TwoValued):
        return fact
    return Affine(fact.yes, {}) if fact.constant and type(fact.yes) is int else None


def _calculate(name: str, facts) -> Affine | None:
    if any(isinstance(fact, Distance) for fact in facts):
        return None
    if name == "mul":
        a, b = sorted(facts, key=lambda fact: len(fact.slopes))
        return b * a.const if not a.slopes and isinstance(a.const, int) else None
    return facts[0] * -1 if name == "neg" else ARITHMETIC[name](*facts)


def _compare(analysis, node, name: str, a, b) -> TwoValued | None:
    if name in ("gt", "ge"):
        name, a, b = {"gt": "lt", "ge": "le"}[name], b, a
    distances = isinstance(a, Distance) + isinstance(b, Distance)
    if name.strip("_") in ("eq", "ne"):
        yes = name.strip("_") == "eq"
        return None if distances else analysis.decide((b - a, a - b), node, yes, not yes)
    strict = Affine(-1 if name == "lt" else 0, {})
    if distances == 2:
        return None
    if isinstance(b, Distance):  # a <= |e|: not |e| <= a - 1
        strict = Affine(-1, {}) - strict
        return analysis.decide((a - b.inside + strict, a + b.inside + strict), node, False, True)
    if isinstance(a, Distance):
        return analysis.decide((b - a.inside + strict, b + a.inside + strict), node, True, False)
    return analysis.decide((b - a + strict,), node, True, False)


@rule("abs", "absolute", "__abs__")
def _abs(analysis, node, x):
    fact = analysis.describe(x)
    return Distance(fact) if isinstance(fact, Affine) else None


@rule("tril", "triu")
def _triangle(analysis, node, x, diagonal=0):
    fact, lower = analysis.describe(x), _axis(-2) - _axis(-1) + Affine(as_int(diagonal), {})
    if not isinstance(fact, TwoValued):
        return None
    bound = lower if op_name(node) == "tril" else lower * -1
    kept = analysis.decide((bound,), node, True, False)
    return combine(lambda keep, number: number if keep else type(number)(0), (kept, fact))


@rule(
    "to", "_to_copy", "type", "type_as", "bool", "int", "long", "float", "double", "half",
    "bfloat16", "contiguous", "clone", "detach", "alias", "cpu", "cuda",
)  # fmt: skip
def _copy(analysis, node, x, *_, **__):
    fact, before, after = analysis.describe(x), value_of(x), value_of(node)
    if not isinstance(fact, TwoValued):
        return fact if isinstance(fact, Affine) or before.dtype == after.dtype else None
    finite = all(map(math.isfinite, (fact.yes, fact.no)))
    if fact.conjuncts and before.device != after.device:
        return None
    if not finite and not after.dtype.is_floating_point and after.dtype != torch.bool:
        return None
    return combine(
        lambda number: evaluate(lambda t: t.to(after.dtype), [number], [before], after.dtype),
        [fact],
    )
