"""Abstract interpretation of a graph: which of its tensors are functions of their coordinates.

`IndexAnalysis.describe` gives a node's description (index_expr.py). A tensor that some node of the
graph writes to is described by nothing.
"""

import inspect

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from sage_inductor.ops.symbols import as_int, statically_true
from sage_inductor.patterns.graph import GraphIndex, op_name, value_of
from sage_inductor.patterns.index_expr import (
    Affine,
    Distance,
    TwoValued,
    is_exact,
    minimum,
    substitute,
)
from sage_inductor.patterns.index_rules import RULES


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
        fact = substitute(
            fact, {x: Affine(0, {}) for x, size in sizes if statically_true(size == 1)}
        )
        if isinstance(fact, Affine) and not is_exact(fact, value.dtype):
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
        return None if isinstance(fact, TwoValued) and fact.conjuncts else substitute(fact, places)


def _tensor_or_number(node: Node):
    value = value_of(node)
    return value if isinstance(value, (int, float, torch.SymInt)) else node
