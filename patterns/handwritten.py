"""Softmax attention written out by hand, as the call of SDPA it equals.

    o = softmax(c q k^T + M) v          c: scale, M: mask (additive, or -inf where a key is hidden)

    before:  s = torch.matmul(q, k.transpose(-1, -2)) / 8
             s = s.masked_fill(causal == 0, float("-inf"))
             o = F.dropout(F.softmax(s, dim=-1), 0.0) @ v
    after:   M = logical_not(causal == 0)
             o = <attention>(q, k, v, attn_mask=M, scale=0.125)

`find` anchors on a softmax. Upwards it reads each call as a `Step` (a scale, a bias, a fill,
a cast) until the product q k^T, downwards until the product with v; `_why_not` lists what is
attention but is not SDPA's. Each product is read as an einsum, so that every order of dimensions
is a permutation.
"""

import dataclasses
import math
from collections.abc import Iterator

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from sage_inductor.patterns.call import Call, Emitter, Survey, op_name, value_of

aten = torch.ops.aten
AND, OR = aten.logical_and.default, aten.logical_or.default

SOFTMAX = ("softmax", "_softmax", "special_softmax")
PRODUCTS = ("matmul", "bmm", "baddbmm", "einsum")
SYNONYMS = {
    "truediv": "div", "true_divide": "div", "divide": "div", "multiply": "mul", "subtract": "sub",
    "iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "div",
}  # fmt: skip
CASTS = ("to", "_to_copy", "float", "double", "half", "bfloat16", "type", "type_as")
VIEWS = ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze")
SAME = (*CASTS, "contiguous", "clone", "expand", "lift_fresh_copy")
# Seen through only to say why the call stays as it is.
FOREIGN = {
    "tanh": "softcap: the scores pass through tanh",
    "cat": "a learned sink: the scores are concatenated with other logits",
    **{
        name: f"`{name}` stands between the products"
        for name in (
            "abs", "add", "clamp", "clip", "exp", "getitem", "index", "max", "maximum", "min",
            "minimum", "nan_to_num", "neg", "pad", "permute", "pow", "relu", "sigmoid", "slice",
            "softplus", "square", "sub", "transpose",
        )
    },
}  # fmt: skip
RESHAPING = ("cat", "getitem", "index", "pad", "permute", "slice", "transpose")  # of FOREIGN
# What is asked of a tensor here does not depend on what is in it.
QUERIES = ("size", "sym_size", "dim", "numel", "stride", "ndimension", "_assert_tensor_metadata")
LIKES = ("full_like", "zeros_like", "ones_like", "empty_like", "new_full", "new_zeros", "new_ones",
         "new_empty", "new_tensor")  # fmt: skip
MODES = ("_enter_autocast", "_exit_autocast", "_set_grad_enabled")
INPLACE = ("iadd", "isub", "imul", "itruediv", "ipow", "iand", "ior", "ixor", "setitem")
HIDDEN = -1e9  # a finite fill up to this is a mask: exp of it is 0 beside any score
MOST_STEPS = 64  # nodes looked at on each side of a softmax
ABSORBS = -1e30  # what is added to a hidden score: swallows it, and is finite after * log2(e)


@dataclasses.dataclass(frozen=True)
class Step:
    """What one call between the two products does to the scores, or to the weights."""

    node: Node
    scale: float | None = None
    bias: Node | None = None
    fill: tuple[Node, bool, float] | None = None  # where `cond` is that, the score is the number
    aside: tuple[Node, ...] = ()  # nodes of the row maximum that is subtracted
    refused: str | None = None

    @property
    def plain(self) -> bool:
        return self.scale is None and self.bias is None and self.fill is None


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


def find(node: Node, survey: Survey) -> Call | None:
    """The attention `node` is the softmax of, or None where it is another softmax."""
    if op_name(node) not in SOFTMAX or not isinstance(value_of(node), torch.Tensor):
        return None
    above = _climb(_args(node, "input")[0], node, set())
    below = _descend(node, set()) if above else None
    if not below:
        return None
    return _Attention(above, node, below).call(Emitter(below[-1].node, survey))


# -- reading a graph ----


def _climb(x: Node, before: Node, seen: set[Node]) -> list[Step] | None:
    """The steps from a product to `x` as `before` finds it."""
    if not isinstance(x, Node):
        return None
    # Dynamo lets `s.masked_fill_(m, v)` stand beside s, which is what the next call names.
    writes = [user for user in x.users if _writes(user) and user.args[:1] == (x,)]
    node = max((user for user in writes if user < before), default=x)
    if node in seen or len(seen) == MOST_STEPS:
        return None
    seen.add(node)
    if op_name(node) in PRODUCTS:
        product = _product(node)
        return _steps_of_product(node) if product and not _is_projection(product) else None
    above = ((_climb(operand, node, seen), step) for operand, step in _readings(node))
    return _best([path + [step] for path, step in above if path])


def _descend(weights: Node, seen: set[Node]) -> list[Step] | None:
    """The steps from `weights` to their product with the values."""
    paths = []
    for user in weights.users:
        product = _product(user)
        if product and (product.a is weights or op_name(user) == "einsum"):
            return [Step(user)]
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
            reshaped = name in VIEWS and _heads(x, node)
            if reshaped or name in RESHAPING or _same_shape(x, node):
                yield x, step


def _reading_of(name: str, node: Node) -> Iterator[tuple[Node, Step]]:
    x, other = _args(node, "input", "other")
    if name in SAME or name in VIEWS:
        value = value_of(node)
        moved = not value.is_floating_point() or value.device != value_of(x).device
        yield x, Step(node, refused=f"the scores are moved by `{name}`" if moved else None)
    elif name == "dropout":
        _, p, training = _args(node, "input", "p", ("training", "train"), p=0.5, training=True)
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
        _, cond, value = _args(node, "input", "mask", "value")
        yield x, _fill(node, cond, True, value)
    elif name == "where":
        yield from _wheres(node)
    elif name in FOREIGN:
        first = x[0] if isinstance(x, (list, tuple)) else x
        yield first, Step(node, refused=FOREIGN[name])


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
    cond, chosen, other = _args(node, "condition", "input", "other")
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
        source, *rest = _args(x, "input", "dim", "keepdim")
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
    if beta == 0:
        return [alpha]
    return [alpha, Step(node, bias=bias, refused=None if beta == 1 else f"{beta=} of baddbmm")]


def _baddbmm(node: Node) -> list:
    return _args(node, "input", "batch1", "batch2", "beta", "alpha", beta=1, alpha=1)


def _product(node: Node) -> Product | None:
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
        a, b = _args(node, "input", ("other", "mat2"))
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
    shared = value.dim() > 0 and len(x.users) > 1  # another use may be a view that is written to
    if shared or any(_writes(user) and op_name(user) != "detach_" for user in x.users):
        return None
    name = _name(x)
    if name in ("full", "full_like", "new_full"):
        number = _number(_args(x, "size", "fill_value")[1])
    elif name in ("tensor", "scalar_tensor") or name in SAME:
        number = _number(_args(x, ("data", "s"))[0])
    elif name == "sqrt" and (number := _number(_args(x, "input")[0]) or 0) > 0:
        number = math.sqrt(number)
    else:
        return None
    rounds = number is not None and value.is_floating_point()
    return torch.tensor(number, dtype=value.dtype).item() if rounds else number


def kv_source(k: Node) -> tuple[Node, int]:
    """(x, G) where k [B, H * G, N, D] repeats each head of x [B, H, N, D] G times in a row, as
    SDPA's enable_gqa does; (k, 1) where it does not."""
    name, x = op_name(k), _args(k, "input")[0]
    if name in ("contiguous", "clone"):
        source, G = kv_source(x)
        return (source, G) if G > 1 else (k, 1)
    if name == "repeat_interleave":
        _, G, dim = _args(k, "input", "repeats", "dim")
        taken = isinstance(G, int) and value_of(x).dim() == 4 and dim in (1, -3)
        return (x, G) if taken and not _written_after(x, k) else (k, 1)
    # source [B, H, N, D] -> one [B, H, 1, N, D] -> x [B, H, G, N, D] -> k
    one = _args(x, "input")[0] if name in VIEWS and op_name(x) == "expand" else None
    if not _only_inserts_dims(one):
        return k, 1
    source = _args(one, "input")[0]
    shapes = [value_of(node).shape for node in (source, one, x, k)]
    if [len(shape) for shape in shapes] != [4, 5, 5, 4] or not isinstance(shapes[2][2], int):
        return k, 1
    (B, H, N, D), G = shapes[0], shapes[2][2]
    expected = (B, H, N, D), (B, H, 1, N, D), (B, H, G, N, D), (B, H * G, N, D)
    repeats = all(map(_equal, shapes, expected)) and not _written_after(source, one)
    return (source, G) if repeats else (k, 1)


def _written_after(x: Node, node: Node) -> bool:
    return any(_writes(user) and user > node for user in x.users)


def _only_inserts_dims(node: Node) -> bool:
    """Given its shape, x[:, :, None] is x: no index picks or reorders."""
    if op_name(node) != "getitem":
        return op_name(node) in VIEWS
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return all(i is None or i is Ellipsis or i == slice(None) for i in index)


# -- from what was read to a Call ----


class _Attention:
    """The steps q k^T -> softmax -> p v, in the order they are computed."""

    def __init__(self, above: list[Step], softmax: Node, below: list[Step]):
        self.above, self.softmax, self.below = above, softmax, below[:-1]
        self.node = below[-1].node
        self.scores, self.output = _product(above[0].node), _product(self.node)
        if self.output.a is not (self.below[-1].node if self.below else softmax):
            x = self.output  # an einsum with the weights written second
            self.output = Product(x.b, x.a, x.right, x.left, x.out)
        steps = [*self.above, *self.below]
        nodes = [*(step.node for step in above), softmax, *(step.node for step in self.below)]
        self.chain = {*nodes, *(node for step in steps for node in step.aside)}
        heads = [_heads(x, y) for x, y in zip(nodes, nodes[1:], strict=False)]
        self.splits = [list(pair) for pair in heads if pair]  # [B, H] of B * H
        self.heads = self.splits[0] if self.splits else None

    def call(self, emit: Emitter) -> Call:
        q, k, v = self.scores.a, self.scores.b, self.output.b
        call = Call(self.node, "softmax", emit, q, k, v, value_of(self.node))
        call.refused = next(self._why_not(), None)
        return call if call.refused else self._fill_in(call)

    def _why_not(self) -> Iterator[str]:
        """Why this is not softmax(c q k^T + M) v, or not of this alone."""
        q, k, v = self.scores.a, self.scores.b, self.output.b
        yield from (step.refused for step in (*self.above, *self.below) if step.refused)
        after = (step for step in self.below if not step.plain)
        yield from (f"the weights pass through `{op_name(step.node)}`" for step in after)
        dim, rank = _args(self.softmax, "input", "dim")[1], value_of(self.softmax).dim()
        if dim not in (-1, rank - 1):
            yield f"softmax is over dimension {dim} of {rank}"
        dims = [value_of(x).dim() for x in (q, k, v)]
        if not all(n in (3, 4) for n in dims):
            yield f"q, k and v must have 3 or 4 dimensions, got {dims}"
        if not (self._sizes_agree(self.scores) and self._sizes_agree(self.output)):
            yield f"a product broadcasts: q {_dims(q)}, k {_dims(k)}, v {_dims(v)}"
        yield from self._why_not_these_dimensions()
        for node in sorted(self.chain):
            what = "weights" if node >= self.softmax else "scores"
            for user in node.users:
                if user not in self.chain | {self.node} and not _idle(user, node):
                    yield f"the {what} `{node.name}` are also used by `{user.name}`"
        conditions = [step.fill[0] for step in self.above if step.fill]
        if self.chain & {q, k, v, *conditions, *(step.bias for step in self.above)}:
            yield "an operand is computed from the scores"
        yield from self._why_not_at_the_end()
        dtypes = [value_of(x).dtype for x in (q, k, v)]
        if len(set(dtypes)) > 1:
            yield f"q, k and v must have one dtype, got {dtypes}"
        yield from self._why_not_these_masks()

    @staticmethod
    def _sizes_agree(product: Product) -> bool:
        a, b = value_of(product.a).shape, value_of(product.b).shape
        shared = set(product.left) & set(product.right)
        sizes = [(a[product.left.index(c)], b[product.right.index(c)]) for c in shared]
        return len(product.left) == len(product.right) and all(_equal([n], [m]) for n, m in sizes)

    def _why_not_these_dimensions(self) -> Iterator[str]:
        scores, output = self.scores.roles(), self.output.roles()
        if not scores or not output:
            yield "a product is not [*batch, N, D] by [*batch, D, M]"
            return
        # What the softmax runs over, and the queries' place, counted from the end.
        last = self.scores.out[-1] == scores[3] and self.output.left[-1] == output[2]
        rows = [
            letters.index(row) - len(letters)
            for letters, row in ((self.scores.out, scores[1]), (self.output.left, output[1]))
        ]
        if not last or rows[0] != rows[1] or self.heads and rows[0] != -2:
            yield "the weights are not [..., N_q, N_k] in both products"
        if not all(isinstance(n, int) for split in self.splits for n in split):
            yield f"batch and heads are split, and dynamic: {self.heads}"
        elif any(split != self.heads for split in self.splits):
            yield f"batch and heads are split in two ways: {self.splits}"

    def _why_not_at_the_end(self) -> Iterator[str]:
        """Attention moves to where its end was: what it reads must still be what it was."""
        node = self.above[0].node
        while (node := node.next) is not self.node:
            if _writes(node) and node not in self.chain and op_name(node) != "detach_":
                yield f"`{node.name}` writes in place between the products"
            if op_name(node) in MODES:
                yield f"`{node.name}` changes a mode between the products"

    def _why_not_these_masks(self) -> Iterator[str]:
        masks = []
        for step in self.above:
            if step.bias is not None or step.fill:
                masks.append(step)
            elif step.scale is not None:
                hides = all(mask.fill and mask.fill[2] == -math.inf for mask in masks)
                if not hides or masks and step.scale < 0:
                    yield "a mask is applied before the scale"
        values = {step.fill[2] for step in masks if step.fill}
        if len(values) > 1:
            yield f"masks hide with different values, {sorted(values)}"

    def _fill_in(self, call: Call) -> Call:
        emit, product = call.emit, self.scores
        batch, row, inner, col = product.roles()
        call.q = self._arranged(emit, product.a, product.left, batch + row + inner)
        call.k = self._arranged(emit, product.b, product.right, batch + col + inner)
        call.attn_mask = self._attn_mask(emit, product.out, batch + row + col)
        call.scale = math.prod(
            (step.scale for step in self.above if step.scale is not None), start=1.0
        )

        product = self.output
        batch, row, inner, col = product.roles()
        batch = "".join(c for c in product.left if c in batch)
        order = batch + row + col
        call.v = self._arranged(emit, product.b, product.right, batch + inner + col)
        out = value_of(self.node).permute([product.out.index(c) for c in order])
        if out.dim() == 3:
            out = out.unflatten(0, self.heads) if self.heads else out.unsqueeze(0)
        call.out = out

        (k, G), (v, G_v) = kv_source(call.k), kv_source(call.v)
        if G == G_v > 1:
            call.k, call.v, call.enable_gqa = k, v, True

        def finish(out: Node) -> Node:
            if len(order) == 3:
                merge = (aten.flatten.using_ints, 0, 1) if self.heads else (aten.squeeze.dim, 0)
                out = emit(merge[0], out, *merge[1:])
            if product.out != order:
                out = emit(aten.permute.default, out, [order.index(c) for c in product.out])
            return out

        call.finish = finish
        call.dead = sorted((self.chain | _beside(self.chain)) - {self.node}, reverse=True)
        return call

    def _arranged(self, emit: Emitter, x: Node, letters: str, order: str) -> Node:
        """x with its dimensions in this order, [B, H, N, D]."""
        permutation = [letters.index(c) for c in order]
        *first, i, j = range(len(order))
        if permutation == [*first, j, i]:
            x = _untransposed(x) or emit(aten.transpose.int, x, -2, -1)
        elif permutation != [*first, i, j]:
            x = emit(aten.permute.default, x, permutation)
        if len(order) == 4:
            return x
        if self.heads:
            return emit(aten.unflatten.int, x, 0, self.heads)
        return emit(aten.unsqueeze.default, x, 0)

    def _attn_mask(self, emit: Emitter, letters: str, order: str) -> Node | None:
        visible = hidden = bias = None
        for step in self.above:
            if step.bias is not None:
                mask = self._aligned(emit, step, step.bias, letters, order)
                dtype = value_of(self.scores.a).dtype
                if value_of(mask).dtype not in (torch.float32, dtype):
                    mask = emit(aten.to.dtype, mask, dtype)
                bias = mask if bias is None else emit(aten.add.Tensor, bias, mask)
            elif step.fill:
                cond, that, value = step.fill
                mask = self._aligned(emit, step, cond, letters, order)
                if that is (value == -math.inf):  # seen where it is not, hidden where it is
                    mask = _negated(mask) or emit(aten.logical_not.default, mask)
                if value == -math.inf:
                    visible = mask if visible is None else emit(AND, visible, mask)
                else:
                    hidden = mask if hidden is None else emit(OR, hidden, mask)
        if hidden is not None:
            # A row that is hidden all over still is the mean of all values, as it was.
            dtype = value_of(self.softmax.args[0]).dtype
            dtype = torch.float32 if dtype == torch.float16 else dtype
            zeros = emit(aten.zeros_like.default, hidden, dtype=dtype)
            mask = emit(aten.masked_fill.Scalar, zeros, hidden, ABSORBS)
            bias = mask if bias is None else emit(aten.add.Tensor, bias, mask)
        if visible is not None and bias is not None:
            return emit(aten.where.ScalarOther, visible, bias, -math.inf)
        return bias if visible is None else visible

    def _aligned(self, emit: Emitter, step: Step, mask: Node, letters: str, order: str) -> Node:
        """A mask that broadcasts to [B, H, N_q, N_k], of one that does to `step`'s scores."""
        rank, shape = value_of(step.node).dim(), value_of(mask).shape
        if self.heads and rank == len(shape) == 3 and not _equal(shape[:1], [1]):
            return emit(aten.unflatten.int, mask, 0, self.heads)
        least = 2 if letters == order else rank
        for _ in range(least - len(shape)):
            mask = emit(aten.unsqueeze.default, mask, 0)
        if letters == order:
            return mask
        return emit(aten.permute.default, mask, [letters.index(c) for c in order])


def _negated(x: Node) -> Node | None:
    """y where x is ~y."""
    if op_name(x) not in ("bitwise_not", "logical_not", "invert", "__invert__"):
        return None
    y = x.args[0]
    return y if value_of(y).dtype == torch.bool else None


def _untransposed(x: Node) -> Node | None:
    """y where x is y with its last two dimensions swapped."""
    name, n = op_name(x), value_of(x).dim()
    if name == "mT" or name == "getattr" and x.args[1] == "mT":
        return x.args[0]
    if name in ("transpose", "swapaxes", "swapdims"):
        y, *dims = _args(x, "input", ("dim0", "axis0"), ("dim1", "axis1"))
        return y if {d % n for d in dims} == {n - 2, n - 1} else None
    if name == "permute":
        y, dims = x.args[0], x.args[1:] or x.kwargs.get("dims")
        dims = dims[0] if isinstance(dims[0], (list, tuple)) else dims
        return y if [d % n for d in dims] == [*range(n - 2), n - 1, n - 2] else None
    return None


def _writes(node: Node) -> bool:
    name = op_name(node)
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    named = name in INPLACE or name.endswith("_") and not name.endswith("__")
    return named or node.kwargs.get("inplace") is True or "out" in node.kwargs


def _idle(user: Node, node: Node) -> bool:
    """Does nothing that is seen depend, through `user`, on the elements of `node`?"""
    name = op_name(user)
    if name in QUERIES or name in LIKES and user.args[:1] == (node,):
        return True
    if name == "getattr" and user.args[1] in ("shape", "dtype", "device", "ndim"):
        return True
    if name in ("to", "type_as") and user.args[0] is not node:
        return True
    return _dead(user)


def _dead(node: Node, depth: int = 8) -> bool:
    effect = not op_name(node) or _writes(node) or node.is_impure()
    return not effect and depth > 0 and all(_dead(user, depth - 1) for user in node.users)


def _beside(chain: set[Node]) -> set[Node]:
    """The idle users of a chain, and what uses the dead ones."""
    found, todo = set(), [user for node in chain for user in node.users if user not in chain]
    while todo:
        user = todo.pop()
        found.add(user)
        todo += user.users if _dead(user) else ()
    return found


def _name(node: Node) -> str:
    """`mul` of imul, mul_ and multiply."""
    name = op_name(node)
    name = name if name in CASTS or name.startswith("_") else name.removesuffix("_")
    return SYNONYMS.get(name, name)


def _args(node: Node, *names, **defaults) -> list:
    """The arguments called so, by position or by name; a tuple holds one argument's names."""
    found = []
    for i, name in enumerate(names):
        first, *others = name if isinstance(name, tuple) else (name,)
        aliases = (first, *others, *(["self"] if i == 0 else []))
        default = next((node.kwargs[x] for x in aliases if x in node.kwargs), defaults.get(first))
        found.append(node.args[i] if i < len(node.args) else default)
    return found


def _heads(x: Node, node: Node) -> tuple | None:
    """(B, H) where one of the two is [B * H, N, M] and the other the same as [B, H, N, M]."""
    a, b = sorted((value_of(x).shape, value_of(node).shape), key=len)
    if (len(a), len(b)) != (3, 4) or not _equal(a, (b[0] * b[1], b[2], b[3])):
        return None
    return b[0], b[1]


def _equal(a, b) -> bool:
    return len(a) == len(b) and all(
        statically_known_true(n == m) for n, m in zip(a, b, strict=True)
    )


def _same_shape(x: Node, node: Node) -> bool:
    return _equal(value_of(x).shape, value_of(node).shape)


def _dims(x: Node) -> list:
    return [n if isinstance(n, int) else str(n) for n in value_of(x).shape]
