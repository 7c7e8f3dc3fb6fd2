"""What is said of a graph before any attention is looked for: which calls may write, and to what."""

import operator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support import run_seen

from sage_inductor.patterns.graph import GraphIndex, arguments, may_write, op_name, written_by

aten = torch.ops.aten


def foreign(x):  # nobody knows what another library's function does
    return x


CALLS = [  # target, args (True: the tensor), kwargs, whether it may write
    (torch.add, (), {}, False),
    (torch.add, (), {"out": "x"}, True),
    (operator.iadd, (), {}, True),
    (operator.setitem, (), {}, True),
    (operator.invert, (), {}, False),
    (operator.is_not, (), {}, False),
    (operator.getitem, (), {}, False),
    ("mul", (), {}, False),
    ("mul_", (), {}, True),
    ("__ior__", (), {}, True),
    ("__or__", (), {}, False),
    ("__eq__", (), {}, False),
    ("__abs__", (), {}, False),
    (F.relu, (), {"inplace": True}, True),
    (F.relu, (), {"inplace": False}, False),
    (F.relu, (True,), {}, True),
    (F.relu, (False,), {}, False),
    (foreign, (), {}, True),
    (aten.add.Tensor, (), {}, False),
    (aten.add_.Tensor, (), {}, True),
    (aten.add.out, (), {}, True),
    (aten.add_, (), {}, True),
    (aten.add, (), {}, True),  # one of its overloads takes out
    (torch.ops.higher_order.flex_attention, (), {}, False),
    (torch.ops.higher_order.auto_functionalized, (), {}, True),
]


def test_only_torchs_own_calls_have_a_bare_name():
    library = torch.library.Library("sage_test_names", "FRAGMENT")
    library.define("matmul(Tensor x) -> Tensor")
    ours = torch.ops.sage_test_names.matmul
    graph, found = torch.fx.Graph(), []
    x = graph.placeholder("x")
    targets = torch.matmul, operator.matmul, aten.matmul, aten.matmul.default, ours, ours.default
    for target in (*targets, foreign):
        found.append(op_name(graph.call_function(target, (x,))))
    assert found[:4] == ["matmul"] * 4 and found[4:6] == ["sage_test_names::matmul"] * 2
    assert found[6].endswith("::foreign")


@pytest.mark.parametrize(
    "target, args, kwargs, writes", CALLS, ids=lambda x: getattr(x, "__name__", str(x))
)
def test_a_call_may_write_unless_it_is_known_not_to(target, args, kwargs, writes):
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    kwargs = {name: x if value == "x" else value for name, value in kwargs.items()}
    make = graph.call_method if isinstance(target, str) else graph.call_function
    assert may_write(make(target, (x, *args), kwargs)) == writes
    assert not may_write(x) and may_write(graph.call_module("any", (x,)))


def test_a_write_through_any_view_is_a_write():
    def function(x, y):
        a = x.sin()
        b = a.view(-1)
        c = b.cos()
        b[2:].mul_(c[2:])
        d, e = y.exp(), y.tan()
        d[0] = e[1]  # returns nothing
        return a, c, e, d

    def see(gm):
        index = GraphIndex(gm.graph)
        by_name = {op_name(node): node for node in gm.graph.nodes}
        sin, cos, mul, tan = (by_name[name] for name in ("sin", "cos", "mul_", "tan"))
        assert index.writers_of(sin) == [mul] and not index.writers_of(cos)
        assert index.writers_of(by_name["exp"]) == [by_name["setitem"]]
        assert index.written_after(sin, cos) and index.written_after(by_name["view"], cos)
        assert not index.written_after(sin, mul) and not index.writers_of(tan)

    run_seen(function, torch.randn(3, 4), torch.randn(3), see=see)


def test_a_call_of_numpys_writes_if_it_makes_nothing_new():
    def function(x):
        root = np.sqrt(x.numpy())
        np.add(root, 1, root)
        np.exp(root, out=root)
        root -= 3
        root.fill(2)
        return torch.from_numpy(1 / root), float(np.float64(8) * 3)

    def see(gm):
        found = {op_name(node).split("_")[-1]: may_write(node) for node in gm.graph.nodes}
        new = {"sqrt": False, "truediv": False, "mul": False, "item": False}
        writing = {"add": True, "exp": True, "isub": True, "fill": True}
        assert new | writing == {name: found[name] for name in new | writing}, found

    run_seen(function, torch.rand(4), see=see)


def test_an_operator_and_a_method_write_to_their_first_argument():
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    for node in (graph.call_function(operator.iadd, (x, y)), graph.call_method("add_", (x, y))):
        assert written_by(node) == [node, x]
    for node in (
        graph.call_method("set_", (x, y)), graph.call_function(torch.add, (x, x), {"out": y}),
        graph.call_function(torch.ops.aten.add_.Tensor, (x, y)),
    ):  # fmt: skip
        assert written_by(node) == [node, x, y]


def test_arguments_are_found_by_position_and_by_each_of_their_names():
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    names = ("input", ("other", "mat2"), "beta")
    for args, kwargs in (((x, y), {}), ((x,), {"mat2": y}), ((), {"self": x, "other": y})):
        assert arguments(graph.call_function(torch.mm, args, kwargs), *names, beta=1) == [x, y, 1]
