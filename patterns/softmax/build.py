"""A Call of scaled_dot_product_attention, from the steps that read.py has read.

    before:  s = torch.matmul(q, k.transpose(-1, -2)) / 8
             s = s.masked_fill(causal == 0, float("-inf"))
             o = F.dropout(F.softmax(s, dim=-1), 0.0) @ v
    after:   M = logical_not(causal == 0)
             o = <attention>(q, k, v, attn_mask=M, scale=0.125)

    before:  s = torch.cat([q @ k.mT, sink], -1)
             o = s.softmax(-1)[..., :-1] @ v
    after:   o, lse = <attention>(q, k, v, scale=1.0)
             o = o * sigmoid(lse - sink)

`_Attention._refusals` lists what is attention but is not SDPA's. Each product is read as an einsum,
so that every order of dimensions is a permutation.
"""

import math
from collections.abc import Iterator

import torch
from torch.fx import Node

from sage_inductor.patterns.call import Call
from sage_inductor.patterns.graph import (
    Emitter,
    GraphIndex,
    arguments,
    beside,
    dims,
    equal,
    idle,
    may_write,
    op_name,
    value_of,
)
from sage_inductor.patterns.repeat_kv import kv_source
from sage_inductor.patterns.softmax.read import Product, Step, product_of, read, split_heads

aten = torch.ops.aten
AND, OR = aten.logical_and.default, aten.logical_or.default

MODES = ("_enter_autocast", "_exit_autocast", "_set_grad_enabled")
ABSORBS = -1e30  # what is added to a hidden score: swallows it, and is finite after * log2(e)


def find(node: Node, index: GraphIndex) -> Call | None:
    """The attention `node` is the softmax of, or None where it is another softmax."""
    steps = read(node)
    if steps is None:
        return None
    above, below = steps
    return _Attention(above, node, below).call(Emitter(below[-1].node, index))


class _Attention:
    """The steps q k^T -> softmax -> p v, in the order they are computed."""

    def __init__(self, above: list[Step], softmax: Node, below: list[Step]):
        self.above, self.softmax, (*self.below, end) = above, softmax, below
        self.node, self.refused = end.node, end.refused
        self.scores, self.output = product_of(above[0].node), product_of(self.node)
        if self.output.a is not (self.below[-1].node if self.below else softmax):
            x = self.output  # an einsum with the weights written second
            self.output = Product(x.b, x.a, x.right, x.left, x.out)
        steps = [*self.above, *self.below]
        nodes = [*(step.node for step in above), softmax, *(step.node for step in self.below)]
        self.chain = {*nodes, *(node for step in steps for node in step.aside)}
        heads = [split_heads(x, y) for x, y in zip(nodes, nodes[1:], strict=False)]
        self.splits = [list(pair) for pair in heads if pair]  # [B, H] of B * H
        self.heads = self.splits[0] if self.splits else None

    def call(self, emit: Emitter) -> Call:
        q, k, v = self.scores.a, self.scores.b, self.output.b
        call = Call(self.node, "softmax", emit, q, k, v, value_of(self.node))
        call.refused = next(self._refusals(), None)
        return call if call.refused else self._fill_in(call)

    def _refusals(self) -> Iterator[str]:
        """Why this is not softmax(c q k^T + M) v, or not of this alone."""
        q, k, v = self.scores.a, self.scores.b, self.output.b
        yield from (step.refused for step in (*self.above, *self.below) if step.refused)
        if self.refused:
            yield self.refused
        for node in (*sorted(self.chain), self.node):
            if node.kwargs.get("out") is not None:
                yield f"`{node.name}` is given out="
        after = (step for step in self.below if not step.plain)
        yield from (f"the weights pass through `{op_name(step.node)}`" for step in after)
        dim, rank = arguments(self.softmax, "input", "dim")[1], value_of(self.softmax).dim()
        if dim not in (-1, rank - 1):
            yield f"softmax is over dimension {dim} of {rank}"
        ranks = [value_of(x).dim() for x in (q, k, v)]
        if not all(n in (3, 4) for n in ranks):
            yield f"q, k and v must have 3 or 4 dimensions, got {ranks}"
        if not (self._sizes_agree(self.scores) and self._sizes_agree(self.output)):
            shapes = [dims(value_of(x)) for x in (q, k, v)]
            yield "a product broadcasts: q {}, k {}, v {}".format(*shapes)
        yield from self._refused_these_dimensions()
        for node in sorted(self.chain):
            what = "weights" if node >= self.softmax else "scores"
            for user in node.users:
                if user not in self.chain | {self.node} and not idle(user, node, self.chain):
                    yield f"the {what} `{node.name}` are also used by `{user.name}`"
        conditions = [step.fill[0] for step in self.above if step.fill]
        added = [x for step in self.above for x in (step.bias, step.sink)]
        if self.chain & {q, k, v, *conditions, *added}:
            yield "an operand is computed from the scores"
        yield from self._refused_at_the_end()
        dtypes = [value_of(x).dtype for x in (q, k, v)]
        if len(set(dtypes)) > 1:
            yield f"q, k and v must have one dtype, got {dtypes}"
        yield from self._refused_these_masks()
        yield from self._refused_this_sink()

    @staticmethod
    def _sizes_agree(product: Product) -> bool:
        a, b = value_of(product.a).shape, value_of(product.b).shape
        shared = set(product.left) & set(product.right)
        sizes = [(a[product.left.index(c)], b[product.right.index(c)]) for c in shared]
        return len(product.left) == len(product.right) and all(equal([n], [m]) for n, m in sizes)

    def _refused_these_dimensions(self) -> Iterator[str]:
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

    def _refused_at_the_end(self) -> Iterator[str]:
        """The rewritten call runs where the second product was, so nothing in between may modify
        its inputs."""
        node = self.above[0].node
        while (node := node.next) is not self.node:
            if may_write(node) and node not in self.chain and op_name(node) != "detach_":
                yield f"`{node.name}` writes in place between the products"
            if op_name(node) in MODES:
                yield f"`{node.name}` changes a mode between the products"

    def _refused_these_masks(self) -> Iterator[str]:
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

    def _refused_this_sink(self) -> Iterator[str]:
        sinks = [i for i, step in enumerate(self.above) if step.sink is not None]
        drops = [step for step in self.below if step.drops]
        if any(step.drops for step in self.above) or len(sinks) > 1 or len(drops) != len(sinks):
            yield "a column of scores is added or dropped, which is no learned sink"
        elif sinks and not all(step.plain for step in self.above[sinks[0] + 1 :]):
            yield "a learned sink is scaled or masked with the scores"

    def _fill_in(self, call: Call) -> Call:
        emit, product = call.emit, self.scores
        batch, row, inner, col = product.roles()
        call.q = self._arranged(emit, product.a, product.left, batch + row + inner)
        call.k = self._arranged(emit, product.b, product.right, batch + col + inner)
        call.attn_mask = self._attn_mask(emit, product.out, batch + row + col)
        for step in self.above:
            if step.sink is not None:
                call.sink = self._aligned(emit, step, step.sink, product.out, batch + row + col)
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

        (k, G), (v, G_v) = kv_source(call.k, emit.index), kv_source(call.v, emit.index)
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
        call.dead = sorted((self.chain | beside(self.chain)) - {self.node}, reverse=True)
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
                bias, hidden = self._added(emit, bias, hidden), None
                mask = self._aligned(emit, step, step.bias, letters, order)
                dtype = value_of(self.scores.a).dtype
                if value_of(mask).dtype not in (torch.float32, dtype):
                    mask = emit(aten.to.dtype, mask, dtype)
                bias = mask if bias is None else emit(aten.add.Tensor, bias, mask)
            elif step.fill:
                cond, that, value = step.fill
                mask = self._aligned(emit, step, cond, letters, order)
                if that is (value == -math.inf):  # seen where it is not, hidden where it is
                    mask = _negated(mask, emit.index) or emit(aten.logical_not.default, mask)
                if value == -math.inf:
                    visible = mask if visible is None else emit(AND, visible, mask)
                elif bias is None:
                    hidden = mask if hidden is None else emit(OR, hidden, mask)
                else:  # whatever was added before, -inf too, is replaced
                    if value_of(bias).dtype == torch.float16:
                        bias = emit(aten.to.dtype, bias, torch.float32)
                    bias = emit(aten.masked_fill.Scalar, bias, mask, ABSORBS)
        bias = self._added(emit, bias, hidden)
        if visible is not None and bias is not None:
            return emit(aten.where.ScalarOther, visible, bias, -math.inf)
        return bias if visible is None else visible

    def _added(self, emit: Emitter, bias: Node | None, hidden: Node | None) -> Node | None:
        """bias, and what hides. A row that is hidden all over still is the mean of all values."""
        if hidden is None:
            return bias
        dtype = value_of(self.softmax.args[0]).dtype
        dtype = torch.float32 if dtype == torch.float16 else dtype
        zeros = emit(aten.zeros_like.default, hidden, dtype=dtype)
        mask = emit(aten.masked_fill.Scalar, zeros, hidden, ABSORBS)
        return mask if bias is None else emit(aten.add.Tensor, bias, mask)

    def _aligned(self, emit: Emitter, step: Step, mask: Node, letters: str, order: str) -> Node:
        """A mask that broadcasts to [B, H, N_q, N_k], of one that does to `step`'s scores."""
        rank, shape = value_of(step.node).dim(), value_of(mask).shape
        if self.heads and rank == len(shape) == 3 and not equal(shape[:1], [1]):
            return emit(aten.unflatten.int, mask, 0, self.heads)
        least = 2 if letters == order else rank
        for _ in range(least - len(shape)):
            mask = emit(aten.unsqueeze.default, mask, 0)
        if letters == order:
            return mask
        return emit(aten.permute.default, mask, [letters.index(c) for c in order])


def _negated(x: Node, index: GraphIndex) -> Node | None:
    """y where x is ~y, and y is not written to later."""
    if op_name(x) not in ("bitwise_not", "logical_not", "invert", "__invert__"):
        return None
    y = x.args[0]
    return y if value_of(y).dtype == torch.bool and not index.written_after(y, x) else None


def _untransposed(x: Node) -> Node | None:
    """y where x is y with its last two dimensions swapped."""
    name, n = op_name(x), value_of(x).dim()
    if name == "mT" or name == "getattr" and x.args[1] == "mT":
        return x.args[0]
    if name in ("transpose", "swapaxes", "swapdims"):
        y, *swapped = arguments(x, "input", ("dim0", "axis0"), ("dim1", "axis1"))
        return y if {d % n for d in swapped} == {n - 2, n - 1} else None
    if name == "permute":
        y, order = x.args[0], x.args[1:] or x.kwargs.get("dims")
        order = order[0] if isinstance(order[0], (list, tuple)) else order
        return y if [d % n for d in order] == [*range(n - 2), n - 1, n - 2] else None
    return None
