"""What a graph is to the other files of this folder.

    a node     what it stands for (`value_of`), which operation it calls (`op_name`), its arguments,
               whether it may write to them (`may_write`)
    a graph    what one walk over it finds (`GraphIndex`)
    insertion  calls put before a node, and taken out again (`Emitter`)

Values are fake tensors, whose sizes may be symbols (ops/symbols.py).
"""

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from sage_inductor.ops import compat
from sage_inductor.ops.symbols import as_int, guard

HOMES = ("torch", "_operator", "builtins", "math")  # of functions whose names say what they do
AUTOCAST = ("_enter_autocast", "_exit_autocast")
NESTING = ("_increment_nesting", "_decrement_nesting")
# Operations that give a tensor another shape. (Those that move elements, such as transpose, are not
# among them; getitem is one where its index is made of None and full slices only.)
VIEWS = ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze")


# -- values and sizes ----


def value_of(x) -> Any:
    """The fake tensor a node stands for (Dynamo: ``example_value``, torch.export: ``val``)."""
    if not isinstance(x, Node):
        return x
    return x.meta["val"] if "val" in x.meta else x.meta.get("example_value")


def dims(x) -> tuple:
    """A tensor's shape, symbols as text."""
    sizes = [as_int(n) for n in getattr(x, "shape", ())]
    return tuple([n if isinstance(n, int) else str(n) for n in sizes])


def shown(x) -> str:
    """A tensor's shape for people: (2, s0, 64)."""
    return str(dims(x)).replace("'", "")


# Whether a condition holds for every size that the symbols in it can have. Adds no guard.
statically_true = compat.statically_known_true


def as_float(scale):
    """A scale computed from sizes (``q.shape[-1] ** -0.5``), as the number it is, which is a guard:
    attention takes a float."""
    value = value_of(scale)
    backed = isinstance(value, torch.SymFloat) and value.node.has_hint()
    return guard(float, value) if backed else scale


def storage_of(value: torch.Tensor) -> int:
    """The fake tensors of a graph share storages as the real ones do; vmap's wrap such a one."""
    while compat.functorch.is_functorch_wrapped_tensor(value):
        value = compat.functorch.get_unwrapped(value)
    return value.untyped_storage()._cdata if value.layout == torch.strided else id(value)


def storages(node: Node) -> dict:
    """The tensors a call takes and returns, by the storage they lie in."""
    return _by_storage([node, *node.all_input_nodes])


def _by_storage(nodes: Iterable[Node]) -> dict:
    values = map(value_of, nodes)
    return {storage_of(value): value for value in values if isinstance(value, torch.Tensor)}


# -- calls ----


def op_name(node) -> str:
    """``matmul`` of ``torch.matmul``, ``@``, ``Tensor.matmul`` and ``aten.matmul.default`` alike;
    "" for what is not a call; ``its_home::matmul`` for what is not torch's: it may be anything.
    """
    if not isinstance(node, Node) or node.op not in ("call_function", "call_method"):
        return ""
    if node.op == "call_method":
        return node.target
    target = node.target
    if isinstance(target, compat.OpOverload | compat.OpOverloadPacket):
        home, name = str(target).split(".")[:2]
        known = home in ("aten", "sage")
    else:
        home, name = getattr(target, "__module__", None) or "torch", getattr(target, "__name__", "")
        known = not name or home.split(".")[0] in HOMES
    return name if known else "::".join((home, name))


def arguments(node: Node, *names, **defaults) -> list:
    """The arguments called so, by position or by name; a tuple holds one argument's names. What
    Dynamo took for a symbol and specialised since (the `dim` of a softmax) is a number."""
    found = []
    for i, name in enumerate(names):
        first, *others = name if isinstance(name, tuple) else (name,)
        aliases = (first, *others, *(["self"] if i == 0 else []))
        default = next((node.kwargs[x] for x in aliases if x in node.kwargs), defaults.get(first))
        given = node.args[i] if i < len(node.args) else default
        known = as_int(value_of(given)) if isinstance(given, Node) else None
        found.append(known if isinstance(known, int) else given)
    return found


def by_schema(node: Node, op: compat.OpOverload | compat.OpOverloadPacket) -> dict:
    """All arguments of a call of `op`, by the names in its schema."""
    schema = (op if isinstance(op, compat.OpOverload) else op.default)._schema
    defaults = {each.name: each.default_value for each in schema.arguments}
    return defaults | dict(zip(defaults, node.args, strict=False)) | node.kwargs


def written_by(node: Node) -> list[Node]:
    """What a call that `may_write` may write to: operators and methods to their first argument."""
    of_first = getattr(node.target, "__module__", None) == "_operator" or (
        node.op == "call_method" and node.target != "set_"  # which makes one of its arguments
    )
    return [node, *(node.args[:1] if of_first else node.all_input_nodes)]


def only_inserts_dims(node: Node) -> bool:
    """Given its shape, x[:, :, None] is x: no index picks or reorders."""
    if op_name(node) != "getitem":
        return op_name(node) in VIEWS
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return all(i is None or i is Ellipsis or i == slice(None) for i in index)


def order_of(node: Node) -> tuple[int, ...] | None:
    """The order of its input's dimensions, where a call permutes them and does nothing else."""
    name, value = op_name(node), value_of(node)
    n = value.dim() if isinstance(value, torch.Tensor) else 0
    if n < 2 or not isinstance(value_of(node.args[0] if node.args else None), torch.Tensor):
        return None
    order = list(range(n))
    if name == "mT" or name == "getattr" and node.args[1] == "mT":
        order[-2:] = order[:-3:-1]
    elif name in ("transpose", "swapaxes", "swapdims"):
        _, *swapped = arguments(node, "input", ("dim0", "axis0"), ("dim1", "axis1"))
        if not all(isinstance(d, int) for d in swapped):
            return None
        i, j = swapped
        order[i], order[j] = order[j], order[i]
    elif name == "permute":
        dims: Any = node.args[1:] or (node.kwargs.get("dims"),)
        dims = dims[0] if isinstance(dims[0], (list, tuple)) else dims
        if not all(isinstance(d, int) for d in dims):
            return None
        order = [d % n for d in dims]
    else:
        return None
    return tuple(order)


# Methods by which operators are called in a graph; the others (__ior__, __setitem__) may write.
READS = ("__and__", "__or__", "__xor__", "__invert__", "__eq__", "__ne__", "__abs__")


def may_write(node: Node) -> bool:
    """Whether a call may write to its arguments: yes, unless it is known not to.

    This is the only place that judges it. Every caller is safe with a "yes" that is untrue: it
    rewrites less."""
    target, name = node.target, op_name(node)
    if node.op not in ("call_function", "call_method"):
        return node.op == "call_module"
    if isinstance(target, compat.OpOverload):
        return target._schema.is_mutable
    if isinstance(target, compat.OpOverloadPacket):
        return any(getattr(target, o)._schema.is_mutable for o in target.overloads())
    if isinstance(target, compat.HigherOrderOperator):
        return name != "flex_attention"
    home = "" if node.op == "call_method" else getattr(target, "__module__", None) or "torch"
    if home == "_operator":
        reads = ("invert", "inv", "is_", "is_not")
        return name == "setitem" or name.startswith("i") and name not in reads
    foreign = home.split(".")[0] not in ("", *HOMES) or "_dynamo" in home
    if home == "torch._dynamo.utils" and name.startswith("wrapped_"):  # NumPy's, as Dynamo calls it
        # What writes returns nothing, or what it was given: out, or itself.
        value = value_of(node)
        is_new = isinstance(value, torch.Tensor) and storage_of(value) not in _by_storage(
            node.all_input_nodes
        )
        return not is_new and not isinstance(value, (int, float, torch.SymInt, torch.SymFloat))
    dunder = name.endswith("__") and name not in READS
    inplace = any(node.kwargs.get(name) not in (None, False) for name in ("out", "inplace"))
    positional = home == "torch.nn.functional" and any(arg is True for arg in node.args)
    named = name.endswith("_") and not name.endswith("__")
    return named or dunder or foreign or inplace or positional


# What is asked of a tensor here does not depend on what is in it.
QUERIES = ("size", "sym_size", "dim", "numel", "stride", "ndimension", "_assert_tensor_metadata")
LIKES = ("full_like", "zeros_like", "ones_like", "empty_like", "rand_like", "randn_like",
         "new_full", "new_zeros", "new_ones", "new_empty", "new_tensor")  # fmt: skip
ATTRIBUTES = ("shape", "dtype", "device", "ndim")
# They take their second argument's shape, dtype or device.
AS_THE_OTHER = ("to", "type_as", "expand_as", "view_as", "reshape_as")


def idle(user: Node, node: Node, chain: set[Node] = frozenset()) -> bool:
    """Whether no visible result depends on the elements of `node` by way of `user`. chain: nodes
    whose users are looked at on their own."""
    name, first = op_name(user), arguments(user, "input")[0]
    if name in QUERIES or name in LIKES and first is node:
        return True
    if name == "getattr" and user.args[1] in ATTRIBUTES:
        return True
    if name in AS_THE_OTHER and first is not node:
        return True
    if name == "broadcast_tensors":
        items = [item for item in user.users if item not in chain and not dead(item)]
        return all(broadcast(item) not in (None, node) for item in items)
    if name == "getitem" and broadcast(user) not in (None, *chain):
        return True
    return dead(user)


def broadcast(item: Node) -> Node | None:
    """x where `item` is x as ``torch.broadcast_tensors(..., x, ...)`` returns it."""
    call, i = item.args if op_name(item) == "getitem" else (None, None)
    if op_name(call) != "broadcast_tensors":
        return None
    tensors = call.args[0] if isinstance(call.args[0], (tuple, list)) else call.args
    return tensors[i]


def dead(node: Node, depth: int = 8) -> bool:
    """Whether nothing visible becomes of a call."""
    effect = not op_name(node) or may_write(node) or node.is_impure()
    return not effect and depth > 0 and all(dead(user, depth - 1) for user in node.users)


def left_over(chain: set[Node], replaced: Node) -> list[Node]:
    """What nothing needs once another call stands for `replaced`, users first: the chain, its users
    and, of dead ones, also their users, and so on."""
    found, todo = set(), [user for node in chain for user in node.users if user not in chain]
    while todo:
        user = todo.pop()
        found.add(user)
        todo += user.users if dead(user) else ()
    return sorted((chain | found) - {replaced}, reverse=True)


# -- a graph ----


class GraphIndex:
    """What one walk over a graph finds that each of its calls is asked about: deep models have many
    calls, and a walk for each would take quadratic time.

    What the pass inserts or erases later changes none of it. An index keeps its graph alive, so it
    lives no longer than the pass."""

    def __init__(self, graph: torch.fx.Graph):
        self.graph = graph
        names = [(node, op_name(node)) for node in graph.nodes]
        self.autocasts = [node for node, name in names if name in AUTOCAST]
        self.nesting = [node for node, name in names if name.endswith(NESTING)]
        self.block_lists = {}  # what flex.py has evaluated
        self.requested = {}  # what sdpa.py has written as SDPA, and what it asks for
        self.unsettled = []  # Emitters whose calls may still be taken out

    @functools.cached_property
    def writers(self) -> list[Node]:
        return [node for node in self.graph.nodes if may_write(node)]

    @functools.cached_property
    def _writers_of(self) -> dict:
        """By storage: a tensor that keeps it alive (another may otherwise be given its address),
        and the nodes that may write to it."""
        found = {}
        for node in self.writers:
            for storage, value in _by_storage(written_by(node)).items():
                found.setdefault(storage, (value, []))[1].append(node)
        return found

    @functools.cached_property
    def given_repeated(self) -> set:
        """The storages of the graph's inputs that have a stride of 0. An exported program may get
        inputs with other strides later."""
        given = (node for node in self.graph.nodes if node.op in ("placeholder", "get_attr"))
        values = (x for x in map(value_of, given) if isinstance(x, torch.Tensor))
        values = (x for x in values if x.layout == torch.strided)
        return {storage_of(x) for x in values if any(statically_true(s == 0) for s in x.stride())}

    def writers_of(self, x: Node) -> list[Node]:
        """The nodes that may write to x, or to a tensor that shares its memory."""
        value = value_of(x)
        if not isinstance(value, torch.Tensor):
            return []
        return self._writers_of.get(storage_of(value), (value, []))[1]

    def written_after(self, x: Node, node: Node) -> bool:
        """Whether x may hold something else after `node` than at it."""
        return any(writer > node for writer in self.writers_of(x))

    def autocasts_around(self, node: Node) -> list[tuple]:
        """torch.autocast's arguments for each region of the graph that `node` is in, outermost
        first.

        A region that starts outside of the graph is not among them: the whole function's is on
        while the backend runs, that around a nested graph (checkpoint, cond) cannot be seen from
        within."""
        entered = []
        for each in itertools.takewhile(lambda each: each < node, self.autocasts):
            if op_name(each) == "_enter_autocast":
                entered.append(each)
            else:
                entered.remove(each.args[0])
        return [enter.args for enter in entered]

    def functorch_depth(self, node: Node) -> int:
        """How many torch.func transforms (vmap, grad) are open where `node` is."""
        before = itertools.takewhile(lambda each: each < node, self.nesting)
        return sum(1 if "_increment_" in op_name(each) else -1 for each in before)

    def settle(self) -> None:
        """What has been inserted so far stays."""
        self.unsettled.clear()

    def undo(self) -> None:
        """Take out what was inserted since `settle`, by whichever Emitter."""
        while self.unsettled:
            self.unsettled.pop().undo()


def graph_modules(gm: torch.fx.GraphModule) -> list[torch.fx.GraphModule]:
    """It, and those nested in it."""
    return [module for module in gm.modules() if isinstance(module, torch.fx.GraphModule)]


def copied(graph: torch.fx.Graph) -> torch.fx.Graph:
    """A deep copy that keeps what Dynamo wrote at the nodes: where inputs come from, without which
    AOTAutograd takes none of them for parameters."""
    found = copy.deepcopy(graph)
    for old, new in zip(graph.nodes, found.nodes, strict=True):
        vars(new).update({name: x for name, x in vars(old).items() if name not in vars(new)})
    return found


# -- insertion ----


class Emitter:
    """Inserts calls before `anchor`, with the values the graph carries for its own."""

    def __init__(self, anchor: Node, index: GraphIndex):
        self.anchor = anchor
        self.index = index
        self.nodes = []
        self.key = "val" if "val" in anchor.meta else "example_value"
        self.autocasts = index.autocasts_around(anchor)
        modes = (getattr(value_of(x), "fake_mode", None) for x in anchor.all_input_nodes)
        self.fake_mode = next((mode for mode in modes if mode), contextlib.nullcontext())
        index.unsettled.append(self)

    def __call__(self, target: Callable, *args, **kwargs) -> Node:
        """``target(*args, **kwargs)``; nodes stand for their values, under the graph's autocast."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.fake_mode)  # the target may make tensors of its own
            stack.enter_context(compat.enable_python_dispatcher())  # else F.pad specialises sizes
            for autocast in self.autocasts:
                stack.enter_context(torch.autocast(*autocast))
            value = target(*map_arg(args, value_of), **map_arg(kwargs, value_of))
        return self.insert(target, args, value, kwargs)

    def insert(self, target: Callable, args: tuple, value, kwargs: dict | None = None) -> Node:
        """The same, where the value is known."""
        with self.anchor.graph.inserting_before(self.anchor):
            node = self.anchor.graph.call_function(target, args, kwargs)
        kept = ("nn_module_stack", "stack_trace", "source_fn_stack")
        node.meta = {name: self.anchor.meta[name] for name in kept if name in self.anchor.meta}
        node.meta[self.key] = value
        self.nodes.append(node)
        return node

    def size(self, x: Node, d: int):
        """A dynamic one needs a node of its own: Dynamo's graphs hold no symbols as arguments."""
        n = value_of(x).shape[d]
        return n if isinstance(n, int) else self(torch.ops.aten.sym_size.int, x, d)

    def undo(self) -> None:
        while self.nodes:
            node = self.nodes.pop()
            node.graph.erase_node(node)
