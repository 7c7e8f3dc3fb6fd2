"""The calls between the two products of an attention that is written out by hand.

    o = softmax(c q k^T + M) v          c: scale, M: mask (additive, or -inf where a key is hidden)

A learned sink is one more column of scores, whose weights are dropped before the product with v.

`read` anchors on a softmax. Upwards it reads each call as a `Step` (a scale, a bias, a fill, a
cast) until the product q k^T, downwards until the product with v. A step that no attention has is
read too, with the reason why the call stays as it is. build.py makes a Call of the steps.
"""

import dataclasses
import math
from collections.abc import Iterator

import torch
from torch.fx import Node

from sage_inductor.patterns.graph import (
    VIEWS,
    arguments,
    broadcast,
    equal,
    may_write,
    op_name,
    storage_of,
    value_of,
)

SOFTMAX = ("softmax", "_softmax", "special_softmax")
PRODUCTS = ("matmul", "bmm", "baddbmm", "einsum")
SYNONYMS = {
    "truediv": "div", "true_divide": "div", "divide": "div", "multiply": "mul", "subtract": "sub",
    "iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "div", "concat": "cat",
    "concatenate": "cat",
}  # fmt: skip
CASTS = ("to", "_to_copy", "float", "double", "half", "bfloat16", "type", "type_as")
SAME = (*CASTS, "contiguous", "clone", "expand", "lift_fresh_copy")
# Seen through only to say why the call stays as it is.
FOREIGN = {
    "tanh": "softcap: the scores pass through tanh",
    "cat": "the scores are concatenated with other logits than a column behind them",
    **{
        name: f"`{name}` stands between the products"
        for name in (
            "abs", "add", "clamp", "clip", "exp", "getitem", "index", "max", "maximum", "min",
            "minimum", "nan_to_num", "narrow", "neg", "pad", "permute", "pow", "relu", "sigmoid",
            "slice", "softplus", "square", "sub", "transpose",
        )
    },
}  # fmt: skip
# Of FOREIGN.
RESHAPING = ("cat", "getitem", "index", "narrow", "pad", "permute", "slice", "transpose")
HIDDEN = -1e9  # a finite fill up to this is a mask: exp of it is 0 beside any score
MOST_STEPS = 64  # nodes looked at on each side of a softmax


@dataclasses.dataclass(frozen=True)
class Step:
    """What one call between the two products does to the scores, or to the weights."""

    node: Node
    scale: float | None = None
    bias: Node | None = None
    fill: tuple[Node, bool, float] | None = None  # where `cond` is that, the score is the number
    aside: tuple[Node, ...] = ()  # nodes beside it: of the row maximum that is subtracted
    sink: Node | None = None  # the column that is put behind the scores
    drops: bool = False  # the last column
    refused: str | None = None

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
        """The letters (batch, row, inner, col), or None if this is another kind of product."""
        left, right, out = set(self.left), set(self.right), set(self.out)
        row, inner, col = left - right, (left & right) - out, right - left
        distinct = all(len(set(x)) == len(x) for x in (self.left, self.right, self.out))
        if not (distinct and len(row) == len(inner) == len(col) == 1 and row | col <= out):
            return None
        batch = "".join(c for c in self.out if c in left & right)
        return batch, *row, *inner, *col


def read(node: Node) -> tuple[list[Step], list[Step]] | None:
    """(the steps from q k^T down to the softmax `node`, those from there to the product with v), or
    None where `node` is another softmax."""
    if op_name(node) not in SOFTMAX or not isinstance(value_of(node), torch.Tensor):
        return None
    above = _climb(arguments(node, "input")[0], node, set())
    below = _descend(node, set()) if above else None
    return (above, below) if below else None


# -- paths ----


def _climb(x: Node, before: Node, seen: set[Node]) -> list[Step] | None:
    """The steps from a product to `x` as `before` finds it."""
    if not isinstance(x, Node):
        return None
    # Dynamo lets `s.masked_fill_(m, v)` stand beside s, which is what the next call names.
    writes = [user for user in x.users if may_write(user) and user.args[:1] == (x,)]
    node = max((user for user in writes if user < before), default=x)
    if node in seen or len(seen) == MOST_STEPS:
        return None
    seen.add(node)
    if op_name(node) in PRODUCTS:
        product = product_of(node)
        return _steps_of_product(node) if product and not _is_projection(product) else None
    above = ((_climb(operand, node, seen), step) for operand, step in _readings(node))
    return _best([path + [step] for path, step in above if path])


def _descend(weights: Node, seen: set[Node]) -> list[Step] | None:
    """The steps from `weights` to their product with the values."""
    paths = []
    for user in weights.users:
        product = product_of(user)
        if product and (product.a is weights or op_name(user) == "einsum"):
            added = any(not step.plain or step.refused for step in _steps_of_product(user))
            return [Step(user, refused="the output product adds or scales" if added else None)]
        for operand, step in _readings(user) if len(seen) < MOST_STEPS else ():
            if operand is weights and user not in seen:
                seen.add(user)
                below = _descend(user, seen)
                paths += [[step] + below] if below else []
    return _best(paths)


def _best(paths: list[list[Step]]) -> list[Step] | None:
    return min(paths, key=lambda path: any(step.refused for step in path), default=None)


def _readings(node: Node) -> Iterator[tuple[Node, Step]]:
    """Each operand of `node` that may be the scores, with what the call then does to them."""
    name = _name(node)
    operands = _reading_of(name, node) if isinstance(value_of(node), torch.Tensor) else ()
    for x, step in operands:
        if isinstance(value_of(x), torch.Tensor):
            reshaped = name in VIEWS and split_heads(x, node)
            if reshaped or name in RESHAPING or _same_shape(x, node):
                yield x, step


def _reading_of(name: str, node: Node) -> Iterator[tuple[Node, Step]]:
    x, other = arguments(node, "input", "other")
    if name == "getitem" and broadcast(node):
        yield broadcast(node), Step(node, aside=(x,))
    elif name in SAME or name in VIEWS:
        value = value_of(node)
        moved = not value.is_floating_point() or value.device != value_of(x).device
        moved |= name in VIEWS and value.dtype != value_of(x).dtype  # the bits, read anew
        yield x, Step(node, refused=f"the scores are moved by `{name}`" if moved else None)
    elif name == "dropout":
        _, p, training = arguments(node, "input", "p", ("training", "train"), p=0.5, training=True)
        active = "dropout is active" if training is not False and p != 0 else None
        yield x, Step(node, refused=active)
    elif name in ("mul", "div") and "rounding_mode" not in node.kwargs:
        yield from _scalings(name, node, x, other)
    elif name == "add" and _number(x) is None and _number(other) is None:
        alpha = node.kwargs.get("alpha", 1)
        refused = None if alpha == 1 else f"the mask is added with alpha={alpha}"
        for scores, bias in ((x, other), (other, x)):
            if isinstance(value_of(bias), torch.Tensor):
                yield scores, Step(node, bias=bias, refused=refused)
    elif name == "sub" and (aside := _row_maximum(other, x)):
        yield x, Step(node, aside=aside)
    elif name == "masked_fill":
        _, cond, value = arguments(node, "input", "mask", "value")
        yield x, _fill(node, cond, True, value)
    elif name == "where":
        yield from _wheres(node)
    elif name == "cat" and (pair := _scores_and_sink(node)):
        yield pair[0], Step(node, sink=pair[1])
    elif name in ("getitem", "slice", "narrow") and _drops_a_column(name, node):
        yield x, Step(node, drops=True)
    elif name in FOREIGN:
        for each in x if isinstance(x, (list, tuple)) else (x,):
            yield each, Step(node, refused=FOREIGN[name])


def _scores_and_sink(node: Node) -> tuple[Node, Node] | None:
    """Of a concatenation of scores and one column behind them."""
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


def _scalings(name: str, node: Node, x, other) -> Iterator[tuple[Node, Step]]:
    for scores, factor in ((x, other), (other, x))[: 2 if name == "mul" else 1]:
        c = _number(factor)
        if c is None:
            kind = "a tensor" if isinstance(value_of(factor), torch.Tensor) else "a dynamic number"
            yield scores, Step(node, refused=f"the scores are scaled by {kind}")
        elif c == 0 or not math.isfinite(c):
            yield scores, Step(node, refused=f"the scores are scaled by {c}")
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
        refused = "masked scores are replaced by a tensor"
    elif not value <= max(HIDDEN, torch.finfo(dtype).min):
        refused = f"masked scores are replaced by {value}, which does not hide them"
    elif getattr(value_of(cond), "dtype", None) != torch.bool:
        refused = "the condition of a mask is not bool"
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
    alpha = Step(node, scale=float(alpha)) if _number(alpha) else Step(node, refused=f"{alpha=}")
    alpha = Step(node) if alpha.scale == 1 else alpha
    if beta == 0:
        return [alpha]
    return [alpha, Step(node, bias=bias, refused=None if beta == 1 else f"{beta=} of baddbmm")]


def _baddbmm(node: Node) -> list:
    return arguments(node, "input", "batch1", "batch2", "beta", "alpha", beta=1, alpha=1)


def product_of(node: Node) -> Product | None:
    name = op_name(node)
    if name == "einsum":
        equation, *operands = node.args
        if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
            operands = operands[0]
        if not isinstance(equation, str) or "." in equation or len(operands) != 2:
            return None
        inputs, arrow, out = equation.replace(" ", "").partition("->")
        letters = inputs.split(",")
        if not arrow:
            return None
        return Product(*operands, *letters, out)
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


def _is_projection(product: Product) -> bool:
    return len(product.right) == 2 < len(product.left)


def _number(x) -> float | None:
    """The number that `x` is, or that fills a tensor made in the graph."""
    if isinstance(x, (int, float)):
        return float(x)
    if not isinstance(x, Node) or not isinstance(value := value_of(x), torch.Tensor):
        return None
    if _is_written(x):
        return None
    name = _name(x)
    if name in ("full", "full_like", "new_full"):
        number = _number(arguments(x, "size", "fill_value")[1])
    elif name in ("tensor", "scalar_tensor") or name in SAME:
        number = _number(arguments(x, ("data", "s"))[0])
    elif name == "sqrt" and (number := _number(arguments(x, "input")[0]) or 0) > 0:
        number = math.sqrt(number)
    else:
        return None
    if number is None or not (math.isfinite(number) or value.is_floating_point()):
        return None
    return float(torch.tensor(number, dtype=value.dtype))  # rounded, or without its fraction


def _is_written(x: Node) -> bool:
    """To it, or to a view of it."""
    memory = storage_of(value_of(x))
    for user in x.users:
        if may_write(user) and op_name(user) != "detach_":
            return True
        value = value_of(user)
        if isinstance(value, torch.Tensor) and storage_of(value) == memory and _is_written(user):
            return True
    return False


def _name(node: Node) -> str:
    """`mul` of imul, mul_ and multiply."""
    name = op_name(node)
    name = name if name in CASTS or name.startswith("_") else name.removesuffix("_")
    return SYNONYMS.get(name, name)


def split_heads(x: Node, node: Node) -> tuple | None:
    """(B, H) where one of the two is [B * H, N, M] and the other the same as [B, H, N, M]."""
    a, b = sorted((value_of(x).shape, value_of(node).shape), key=len)
    if (len(a), len(b)) != (3, 4) or not equal(a, (b[0] * b[1], b[2], b[3])):
        return None
    return b[0], b[1]


def _same_shape(x: Node, node: Node) -> bool:
    return equal(value_of(x).shape, value_of(node).shape)
