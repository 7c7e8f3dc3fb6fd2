"""The calls between the two products of an attention that is written out by hand.

    o = softmax(c q k^T + M) v          c: scale, M: mask (additive, or -inf where a key is hidden)

A learned sink is one more column of scores, whose weights are dropped before the product with v.

`read` anchors on a softmax. Upwards it reads each call as a `Step` (a scale, a bias, a fill, a
cast) until the product q k^T, downwards until the product with v. A step that no attention has is
read too, with the reason why the call stays as it is. build.py makes a Call of the steps. `unread`
finds the softmaxes between two products of which nothing is made.
"""

import dataclasses
import math
from collections.abc import Iterator

import torch
from torch.fx import Node

from sage_inductor.ops.symbols import equal, specialised
from sage_inductor.patterns import graph, reasons
from sage_inductor.patterns.graph import arguments, op_name, order_of, value_of
from sage_inductor.patterns.masks.index_analysis import evaluate
from sage_inductor.patterns.reasons import Reason

SOFTMAX = ("softmax", "_softmax", "special_softmax")
PRODUCTS = ("matmul", "mm", "bmm", "baddbmm", "einsum", "tensordot")
SYNONYMS = {
    "truediv": "div", "true_divide": "div", "divide": "div", "multiply": "mul", "subtract": "sub",
    "iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "div", "concat": "cat",
    "concatenate": "cat", "power": "pow", "negative": "neg",
}  # fmt: skip
CASTS = ("to", "_to_copy", "float", "double", "half", "bfloat16", "type", "type_as")
SAME = (*CASTS, "contiguous", "clone", "expand", "lift_fresh_copy")
# Seen through only to say why the call stays as it is.
FOREIGN = {x: reasons.STANDS_BETWEEN(x) for x in (
    "abs", "add", "clamp", "clip", "exp", "getitem", "index", "max", "maximum", "min", "minimum",
    "nan_to_num", "narrow", "pad", "permute", "pow", "relu", "sigmoid", "slice", "softplus",
    "square", "sub", "transpose",
)} | {"tanh": reasons.SOFTCAP(), "cat": reasons.OTHER_LOGITS()}  # fmt: skip
# Of FOREIGN.
RESHAPING = ("cat", "getitem", "index", "narrow", "pad", "permute", "slice", "transpose")
TRANSPOSING = ("transpose", "swapaxes", "swapdims", "permute", "mT", "getattr")
HIDDEN = -1e9  # a finite fill up to this is a mask: exp of it is 0 beside any score
MOST_STEPS = 64  # nodes looked at on each side of a softmax


@dataclasses.dataclass(frozen=True)
class Step:
    """What one call between the two products does to the scores, or to the weights."""

    node: Node
    scale: float | None = None
    bias: Node | None = None
    factor: float = 1  # of the bias
    fill: tuple[Node, bool, float] | None = None  # where `cond` is that, the score is the number
    aside: tuple[Node, ...] = ()  # nodes beside it: of the row maximum that is subtracted
    order: tuple[int, ...] | None = None  # of the dimensions, where it permutes them
    of_rows: bool = False  # what it does it does to each row, along the last dimension
    sink: Node | None = None  # the column that is put behind the scores
    drops: bool = False  # the last column
    refused: Reason | None = None

    @property
    def plain(self) -> bool:
        return self.scale is None and self.bias is None and self.fill is None and self.sink is None


@dataclasses.dataclass(frozen=True)
class Product:
    """``out = einsum("<left>,<right>-><out>")`` of the operands a, b: [*batch, row, inner] and
    [*batch, inner, col], in any order."""

    a: Node
    b: Node
    left: str
    right: str
    out: str

    def roles(self) -> tuple[str, str, str, str] | None:
        """The letters (batch, row, inner, col), or None if this is another kind of product. An
        operand may lack letters of the batch."""
        left, right, out = set(self.left), set(self.right), set(self.out)
        rows, cols = ([c for c in self.out if c not in x] for x in (right, left))
        inner = (left & right) - out
        distinct = all(len(set(x)) == len(x) for x in (self.left, self.right, self.out))
        if not (distinct and rows and cols and len(inner) == 1 and (left | right) - inner == out):
            return None
        batch = "".join(c for c in self.out if c not in (rows[-1], cols[-1]))
        return batch, rows[-1], *inner, cols[-1]


def read(node: Node) -> tuple[list[Step], list[Step]] | None:
    """(the steps from q k^T down to the softmax `node`, those from there to the product with v), or
    None where `node` is another softmax."""
    if op_name(node) not in SOFTMAX or not isinstance(value_of(node), torch.Tensor):
        return None
    above = _climb(arguments(node, "input")[0], node, set())
    below = _descend(node, set(), _dim(node)) if above else None
    return (above, below) if below else None


ELSE = ("attention", "softmax", "embed", "loss", "lstm", "gru")  # another thing begins there


def unread(node: Node) -> tuple[Product, list[str]] | None:
    """(a product, what lies between it and the next product) of a softmax between two products that
    `read` makes nothing of. It is attention, whatever lies there, where the scores keep the rows
    and the columns of the first product, and the second sums over the softmax's dimension."""
    scores, dim = _softmax_of(node) or (None, None)
    if not isinstance(value_of(scores), torch.Tensor) or not value_of(scores).dim():
        return None
    start = {d: d for d in range(value_of(scores).dim())}
    above = _reach(scores, start, dim, upwards=True)
    below = _reach(node, start, dim, upwards=False) if above else None
    if not below:
        return None
    (*between, first), (_, *after, last) = above, below
    path = (*reversed(between), *after)
    names = [op_name(x) for x in path if all(step.refused for _, step in _readings(x))]
    names += [op_name(node)] if op_name(node) not in SOFTMAX else []
    writers = (user for each in (first, *between) for user in each.users if graph.may_write(user))
    names += [op_name(user) for user in writers if user < node]
    return product_of(first), names or [op_name(last)]


def _softmax_of(node: Node) -> tuple[Node, int] | None:
    """(scores, dimension) of a softmax, a logarithm of one, or what these are made of."""
    name = _name(node)
    if not isinstance(value_of(node), torch.Tensor):
        return None
    x, other = arguments(node, "input", "other")
    if name in SOFTMAX or name in ("log_softmax", "_log_softmax", "softmin"):
        return x, -1 if _dim(node) is None else _dim(node)
    if name == "exp" and _name(x) == "sub":  # exp(x - logsumexp(x))
        x, other = arguments(x, "input", "other")
    elif name != "div" or _name(x) != "exp":  # exp(x) / exp(x).sum()
        return None
    while _name(other) in ("add", "clamp", "clamp_min", "clip", *SAME, *graph.VIEWS):
        other = arguments(other, "input")[0]
    if _name(other) not in ("sum", "logsumexp") or arguments(other, "input")[0] is not x:
        return None
    dim = arguments(other, "input", "dim")[1]
    (dim,) = dim if isinstance(dim, (list, tuple)) and len(dim) == 1 else (dim,)
    return (x, dim) if isinstance(dim, int) else None


def _reach(start: Node, dims: dict, dim: int, upwards: bool) -> list[Node] | None:
    """The nodes on the shortest way to a product: of q and k, or with v. dims: those of `start`
    that a node on the way still has, and where."""
    dim %= len(dims)
    paths, seen = [([start], dims)], set()
    while paths and len(seen) < MOST_STEPS:
        path, dims = paths.pop(0)
        node = path[-1]
        if node in seen or not op_name(node):
            continue
        seen.add(node)
        if upwards:
            product = product_of(node)
            roles = product.roles() if product and not _is_projection(product) else None
            kept = {product.out[d] for d in dims.values()} if roles else ()
            if roles and kept >= {roles[1], roles[3]} and product.out[dims[dim]] in roles[1::2]:
                return path
            if any(word in op_name(node) for word in ELSE):
                continue
        for other in node.all_input_nodes if upwards else node.users:
            if not isinstance(value_of(other), torch.Tensor):
                continue
            user, x = (node, other) if upwards else (other, node)
            product = product_of(user)
            if not upwards and product and x in (product.a, product.b):
                letters = product.left if x is product.a else product.right
                if letters[dims[dim]] not in product.out and not _is_projection(product):
                    return [*path, user]
            origins = _origins(user, x)
            there = origins if upwards else {x: y for y, x in origins.items()}
            found = {d: there[at] for d, at in dims.items() if there.get(at) is not None}
            if dim in found and len(found) > 1:
                paths.append(([*path, other], found))
    return None


def _origins(node: Node, x: Node) -> dict[int, int]:
    """The dimensions of `node` that are dimensions of its operand `x`, and which of them."""
    name, product, order = op_name(node), product_of(node), order_of(node)
    sizes, given = value_of(node).shape, value_of(x).shape
    if order is not None:
        return dict(enumerate(order))
    if product and x in (product.a, product.b):
        letters = product.left if x is product.a else product.right
        return {i: letters.index(c) for i, c in enumerate(product.out) if c in letters}
    if (
        any(word in name for word in ELSE)
        or x is not node.all_input_nodes[0]
        and ("linear" in name or "conv" in name)
    ):
        return {}
    if len(sizes) == len(given) and name not in graph.VIEWS:
        mixed = {"linear": len(given) - 1, "conv": 1}
        lost = {d for word, d in mixed.items() if word in name}
        alike = (d for d in range(len(sizes)) if equal(sizes[d : d + 1], given[d : d + 1])
                 or not (equal(sizes[d : d + 1], [1]) or equal(given[d : d + 1], [1])))  # fmt: skip
        return {d: d for d in alike if d not in lost}
    inner = {i: math.prod(sizes[i + 1 :]) for i in range(len(sizes))}
    return {
        i: j
        for i, n in enumerate(sizes)
        for j, m in enumerate(given)
        if equal([n, inner[i]], [m, math.prod(given[j + 1 :])])
    }


# -- paths ----


def _climb(x: Node, before: Node, seen: set[Node]) -> list[Step] | None:
    """The steps from a product to `x` as `before` finds it."""
    if not isinstance(x, Node):
        return None
    # Dynamo lets `s.masked_fill_(m, v)` stand beside s, which is what the next call names.
    writes = [user for user in x.users if graph.may_write(user) and user.args[:1] == (x,)]
    node = max((user for user in writes if user < before), default=x)
    if node in seen or len(seen) == MOST_STEPS:
        return None
    seen.add(node)
    if op_name(node) in PRODUCTS:
        product = product_of(node)
        return _steps_of_product(node) if product and not _is_projection(product) else None
    above = ((_climb(operand, node, seen), step) for operand, step in _readings(node))
    return _best([path + [step] for path, step in above if path])


def _descend(weights: Node, seen: set[Node], key: int | None) -> list[Step] | None:
    """The steps from `weights` to their product with the values. key: the dimension of the weights
    that the product sums over, where it is known."""
    paths = []
    for user in weights.users:
        product = product_of(user)
        if product and weights in (product.a, product.b):
            added = any(not step.plain or step.refused for step in _steps_of_product(user))
            end = [Step(user, refused=reasons.OUTPUT_ADDS() if added else None)]
            letters = product.left if weights is product.a else product.right
            if key is None or letters[key] not in product.out or user in seen:
                return end
            seen.add(user)  # It mixes heads, if another product follows.
            further = _descend(user, seen, product.out.index(letters[key]))
            return [_of_weights(Step(user, scale=1.0)), *further] if further else end
        for operand, step in _readings(user) if len(seen) < MOST_STEPS else ():
            if operand is weights and user not in seen:
                seen.add(user)
                at = key if _same_shape(weights, user) else None
                at = step.order.index(key) if step.order and key is not None else at
                below = _descend(user, seen, at)
                paths += [[_of_weights(step)] + below] if below else []
    return _best(paths)


def _of_weights(step: Step) -> Step:
    """A step after the softmax. Nothing there is the scale, the mask or the cap of scores."""
    if step.plain and not step.refused or _name(step.node) == "dropout":
        return step
    return Step(step.node, refused=reasons.WEIGHTS_CHANGED(op_name(step.node)))


def _dim(softmax: Node) -> int | None:
    dim = arguments(softmax, "input", "dim")[1]
    rank = value_of(softmax).dim()
    return dim % rank if rank and isinstance(dim, int) else None


def _best(paths: list[list[Step]]) -> list[Step] | None:
    return min(paths, key=lambda path: any(step.refused for step in path), default=None)


def _readings(node: Node) -> Iterator[tuple[Node, Step]]:
    """Each operand of `node` that may be the scores, with what the call then does to them."""
    name = _name(node)
    operands = _reading_of(name, node) if isinstance(value_of(node), torch.Tensor) else ()
    for x, step in operands:
        if isinstance(value_of(x), torch.Tensor):
            if name in (*graph.VIEWS, *RESHAPING) or step.order or _same_shape(x, node):
                yield x, step


def _reading_of(name: str, node: Node) -> Iterator[tuple[Node, Step]]:  # noqa: C901  (a table)
    x, other = arguments(node, "input", "other")
    if name == "getitem" and graph.broadcast(node):
        yield graph.broadcast(node), Step(node, aside=(x,))
    elif name in TRANSPOSING and (order := order_of(node)):
        yield x, Step(node, order=order)
    elif name == "getitem" and graph.only_inserts_dims(node):
        yield x, Step(node)
    elif name in SAME or name in graph.VIEWS:
        value = value_of(node)
        moved = not value.is_floating_point() or value.device != value_of(x).device
        moved |= name in graph.VIEWS and value.dtype != value_of(x).dtype  # the bits, read anew
        yield x, Step(node, refused=reasons.MOVED(name) if moved else None)
    elif name == "dropout":
        _, p, training = arguments(node, "input", "p", ("training", "train"), p=0.5, training=True)
        active = reasons.DROPS_WEIGHTS() if training is not False and p != 0 else None
        yield x, Step(node, refused=active)
    elif name in ("mul", "div") and "rounding_mode" not in node.kwargs:
        yield from _scalings(name, node, x, other)
    elif name == "neg":
        yield x, Step(node, scale=-1.0)
    elif name == "sub" and (aside := _row_maximum(other, x)):
        yield x, Step(node, aside=aside, of_rows=True)
    elif name in ("add", "sub") and 0 in (_number(other), _number(x) if name == "add" else None):
        yield x if _number(other) == 0 else other, Step(node)
    elif name in ("add", "sub") and _number(x) is None and _number(other) is None:
        yield from _biases(name, node, x, other)
    elif name == "masked_fill":
        _, cond, value = arguments(node, "input", "mask", "value")
        yield x, _fill(node, cond, True, value)
    elif name == "where":
        yield from _wheres(node)
    elif name == "cat" and (pair := _scores_and_sink(node)):
        yield pair[0], Step(node, sink=pair[1], of_rows=True)
    elif name in ("getitem", "slice", "narrow") and _drops_a_column(name, node):
        yield x, Step(node, drops=True, of_rows=True)
    elif name in FOREIGN:
        for each in x if isinstance(x, (list, tuple)) else (x,):
            yield each, Step(node, refused=FOREIGN[name])


def _scores_and_sink(node: Node) -> tuple[Node, Node] | None:
    """Scores and the one column that is concatenated behind them."""
    tensors, dim = arguments(node, ("tensors", "tensor"), ("dim", "axis"), dim=0)
    values = [value_of(x) for x in tensors] if isinstance(tensors, (list, tuple)) else []
    if len(values) != 2 or not all(isinstance(x, torch.Tensor) for x in values):
        return None
    scores, sink = values
    last = dim in (-1, scores.dim() - 1) and equal(sink.shape, (*scores.shape[:-1], 1))
    return tuple(tensors) if last else None


def _drops_a_column(name: str, node: Node) -> bool:
    """Whether `node` is all of a tensor but the last number of each row."""
    if node.kwargs or len(node.args) < (2 if name == "getitem" else 3):
        return False
    x, *rest = node.args
    value, kept = value_of(x), value_of(node)
    if not isinstance(value, torch.Tensor):
        return False
    if name == "getitem":  # x[..., :-1], x[:, :, :, :N]
        index = rest[0] if isinstance(rest[0], tuple) else (rest[0],)
        begins = all(
            each is Ellipsis
            or isinstance(each, slice)
            and each.start in (None, 0)
            and each.step in (None, 1)
            for each in index
        )
    else:
        dim, start, *end = rest
        begins = dim in (-1, value.dim() - 1) and start in (None, 0) and end[1:] in ([], [1])
    return begins and equal(kept.shape, (*value.shape[:-1], value.shape[-1] - 1))


def _biases(name: str, node: Node, x, other) -> Iterator[tuple[Node, Step]]:
    alpha = _number(node.kwargs.get("alpha", 1))
    for scores, bias in ((x, other), (other, x))[: 2 if name == "add" else 1]:
        if isinstance(value_of(bias), torch.Tensor):
            if alpha is None or not math.isfinite(alpha) or bias is x and alpha != 1:
                yield scores, Step(node, refused=reasons.MASK_ALPHA(alpha))
            else:
                yield scores, Step(node, bias=bias, factor=alpha if name == "add" else -alpha)


def _scalings(name: str, node: Node, x, other) -> Iterator[tuple[Node, Step]]:
    for scores, factor in ((x, other), (other, x))[: 2 if name == "mul" else 1]:
        c = _number(factor)
        if c is None:
            kind = "a tensor" if isinstance(value_of(factor), torch.Tensor) else "a number of data"
            yield scores, Step(node, refused=reasons.SCALED_BY(kind))
        elif c == 0 or not math.isfinite(c):
            yield scores, Step(node, refused=reasons.SCALED_BY(c))
        else:
            yield scores, Step(node, scale=c if name == "mul" else 1 / c)


def _wheres(node: Node) -> Iterator[tuple[Node, Step]]:
    cond, chosen, other = arguments(node, "condition", "input", "other")
    if node.op == "call_method":  # scores.where(condition, other)
        cond, chosen = chosen, cond
    if _number(chosen) is None:
        yield chosen, _fill(node, cond, False, other)
    if _number(other) is None:
        yield other, _fill(node, cond, True, chosen)


def _fill(node: Node, cond: Node, that: bool, value) -> Step:
    value = _number(value)
    dtype = value_of(node).dtype
    if value is None:
        refused = reasons.FILLED_BY_TENSOR()
    elif not value <= max(HIDDEN, torch.finfo(dtype).min):
        refused = reasons.FILLED_BY(value)
    elif getattr(value_of(cond), "dtype", None) != torch.bool:
        refused = reasons.NOT_BOOL()
    else:
        return Step(node, fill=(cond, that, value))
    return Step(node, refused=refused)


def _row_maximum(x, scores: Node) -> tuple[Node, ...]:
    """The nodes of ``scores.amax(-1, keepdim=True)``, or of ``scores.max(-1, True)[0]``."""
    nodes = []
    while op_name(x) in ("amax", "max", "getitem", "detach"):
        nodes.append(x)
        source, *rest = arguments(x, "input", "dim", "keepdim")
        if source is scores:
            dim, keepdim = rest
            dim = dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim
            last = dim in (-1, value_of(scores).dim() - 1)
            return tuple(nodes) if last and keepdim is True else ()
        if op_name(x) == "getitem" and rest[0] != 0:
            return ()
        x = source
    return ()


def _steps_of_product(node: Node) -> list[Step]:
    """baddbmm: beta * bias + alpha * (a @ b)."""
    if op_name(node) != "baddbmm":
        return [Step(node)]
    bias, beta, alpha = (_baddbmm(node)[i] for i in (0, 3, 4))
    refused = None if _number(alpha) else reasons.ALPHA(alpha)
    scale = None if refused or alpha == 1 else float(alpha)
    scaled = Step(node, scale=scale, refused=refused)
    if beta == 0:
        return [scaled]
    return [scaled, Step(node, bias=bias, refused=None if beta == 1 else reasons.BETA(beta))]


def _baddbmm(node: Node) -> list:
    return arguments(node, "input", "batch1", "batch2", "beta", "alpha", beta=1, alpha=1)


def product_of(node: Node) -> Product | None:
    name = op_name(node)
    if name == "einsum":
        return _einsum(node)
    if name == "tensordot":
        return _tensordot(node)
    if name not in PRODUCTS:
        return None
    if name == "baddbmm":
        a, b = _baddbmm(node)[1:3]
    else:
        a, b = arguments(node, "input", ("other", "mat2"))
    if not all(isinstance(value_of(x), torch.Tensor) for x in (a, b, node)):
        return None
    left, right, out = ("ABCDEFGH"[10 - value_of(x).dim() :] for x in (a, b, node))
    return Product(a, b, left + "ij", right + "jk", out + "ik")


def _einsum(node: Node) -> Product | None:
    """By an equation with or without an arrow, or by sublists; `...` becomes letters."""
    first, *operands = node.args
    if isinstance(first, str):
        if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
            operands = operands[0]
        inputs, arrow, out = first.replace(" ", "").replace("...", ".").partition("->")
        terms = inputs.split(",")
    else:  # einsum(q, [0, 1, 2], k, [0, 3, 2], [0, 1, 3])
        operands, terms = node.args[0:4:2], node.args[1:4:2]
        arrow, out = len(node.args) == 5, node.args[4] if len(node.args) == 5 else ""
        if not all(isinstance(x, (list, tuple)) for x in (*terms, out or [])):
            return None
        *terms, out = ("".join("." if i is ... else LETTERS[i] for i in x) for x in (*terms, out))
    if len(operands) != 2 or len(terms) != 2:
        return None
    if not all(isinstance(value_of(x), torch.Tensor) for x in (*operands, node)):
        return None
    if not arrow:
        once = (c for c in "".join(terms) if "".join(terms).count(c) == 1 and c != ".")
        out = "." * ("." in "".join(terms)) + "".join(sorted(once))
    unused = [c for c in LETTERS if c not in "".join(terms)]
    ranks = [
        value_of(x).dim() - len(term.replace(".", ""))
        for x, term in zip(operands, terms, strict=True)
    ]
    dots = unused[: max(ranks)]
    left, right = (
        term.replace(".", "".join(dots[len(dots) - rank :]))
        for term, rank in zip(terms, ranks, strict=True)
    )
    return Product(*operands, left, right, out.replace(".", "".join(dots)))


def _tensordot(node: Node) -> Product | None:
    """It sums over the last dimensions of a and the first of b, or over pairs."""
    a, b, dims = arguments(node, "a", "b", "dims", dims=2)
    if not all(isinstance(value_of(x), torch.Tensor) for x in (a, b)) or isinstance(dims, Node):
        return None
    n, m = value_of(a).dim(), value_of(b).dim()
    over = (range(-dims, 0), range(dims)) if isinstance(dims, int) else dims
    left, right = list(LETTERS[:n]), list(LETTERS[n : n + m])
    for i, j in zip(*over, strict=True):
        right[j] = left[i]
    out = (c for c in left + right if (c in left) != (c in right))
    return Product(a, b, "".join(left), "".join(right), "".join(out))


LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def _is_projection(product: Product) -> bool:
    """Whether one operand is a matrix that all of the other is multiplied by."""
    a, b = (len(letters) for letters in (product.left, product.right))
    return b == 2 < a or a == 2 < b or a == b == 2 and any(map(_is_trained, (product.a, product.b)))


def _is_trained(x: Node) -> bool:
    while op_name(x) in SAME or order_of(x) is not None:
        x = arguments(x, "input")[0]
    return isinstance(value_of(x), torch.nn.Parameter)


def _number(x) -> float | None:
    """The number that `x` is, or that fills a tensor made in the graph. A dynamic number is that
    which is compiled for."""
    value = graph.as_float(x) if isinstance(x, Node) else x
    if isinstance(value_of(value), torch.SymInt):
        value = specialised(value_of(value)) if value_of(value).node.has_hint() else None
    if isinstance(value, (int, float)):
        return float(value)
    if not isinstance(x, Node) or not isinstance(value := value_of(x), torch.Tensor):
        known = value_of(x) if isinstance(x, Node) else None
        return float(known) if isinstance(known, (int, float)) else None
    if _is_written(x):
        return None
    name = _name(x).removeprefix(OF_NUMPY)
    name = SYNONYMS.get(name, name)
    if name in ("full", "full_like", "new_full"):
        number = _number(arguments(x, "size", "fill_value")[1])
    elif name in MADE_OF_DATA or name in SAME or name in NUMPY_CASTS:
        (data,) = arguments(x, ("data", "s"))
        while isinstance(data, (list, tuple)) and len(data) == 1:
            (data,) = data
        number = _number(data)
    elif name in OF_NUMBERS:
        number = _calculated(name, x)
    else:
        return None
    if number is None or not (math.isfinite(number) or value.is_floating_point()):
        return None
    return float(torch.tensor(number, dtype=value.dtype))  # rounded, or without its fraction


MADE_OF_DATA = ("tensor", "scalar_tensor", "as_tensor", "Tensor", "FloatTensor")
OF_NUMPY = "wrapped_"  # Dynamo's name for NumPy's sqrt is wrapped_sqrt
NUMPY_CASTS = ("float16", "float32", "float64", "asarray", "array", "astype")
OF_NUMBERS = {x: getattr(torch, x) for x in (
    "sqrt", "rsqrt", "pow", "reciprocal", "square", "neg", "mul", "div", "add", "sub", "exp", "log",
)}  # fmt: skip


def _calculated(name: str, x: Node) -> float | None:
    numbers, made = [_number(each) for each in x.args], value_of(x)
    if x.kwargs or None in numbers:
        return None
    is_numpys = _name(x).startswith(OF_NUMPY)
    values = [made if is_numpys else value_of(each) for each in x.args]
    return evaluate(OF_NUMBERS[name], numbers, values, made.dtype)


def _is_written(x: Node) -> bool:
    """To it, or to a view of it."""
    memory = graph.storage_of(value_of(x))
    for user in x.users:
        if graph.may_write(user) and op_name(user) != "detach_":
            return True
        value = value_of(user)
        is_view = isinstance(value, torch.Tensor) and graph.storage_of(value) == memory
        if is_view and _is_written(user):
            return True
    return False


def _name(node: Node) -> str:
    """`mul` of imul, mul_ and multiply."""
    name = op_name(node)
    name = name if name in CASTS or name.startswith("_") else name.removesuffix("_")
    return SYNONYMS.get(name, name)


def _same_shape(x: Node, node: Node) -> bool:
    return equal(value_of(x).shape, value_of(node).shape)
