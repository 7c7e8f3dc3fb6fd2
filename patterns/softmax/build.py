"""A Call of scaled_dot_product_attention, from the steps that read.py has read.

    before:  s = torch.matmul(q, k.transpose(-1, -2)) / 8
             s = s.masked_fill(causal == 0, float("-inf"))
             o = F.dropout(F.softmax(s, dim=-1), 0.0) @ v
    after:   M = logical_not(causal == 0)
             o = <attention>(q, k, v, attn_mask=M, scale=0.125)

    before:  s = (q @ k.mT).view(B, W, H, N, N) + M[:, None]      M [W, N, N]
             o = v.mT @ s.view(B * W, H, N, N).softmax(-1).mT
    after:   o = <attention>(q, k, v, attn_mask=M expanded to [B, W, 1, N, N] and viewed).mT

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

from sage_inductor.ops.symbols import as_int, equal
from sage_inductor.patterns import graph, reasons
from sage_inductor.patterns.call import Call
from sage_inductor.patterns.graph import Emitter, GraphIndex, arguments, op_name, value_of
from sage_inductor.patterns.reasons import Reason
from sage_inductor.patterns.repeat_kv import broadcast_heads, kv_source
from sage_inductor.patterns.softmax.read import CASTS, Product, Step, product_of, read, unread

aten = torch.ops.aten
AND, OR = aten.logical_and.default, aten.logical_or.default

MODES = (*graph.AUTOCAST, "_set_grad_enabled")
ABSORBS = -1e30  # what is added to a hidden score: swallows it, and is finite after * log2(e)


def find(node: Node, index: GraphIndex) -> Call | None:
    """The attention `node` is the softmax of, or None where it is another softmax."""
    if steps := read(node):
        above, below = steps
        return _Attention(above, node, below).call(Emitter(below[-1].node, index))
    if (found := unread(node)) is None:
        return None
    product, between = found
    emit = Emitter(node, index)
    q, k = product.a, _in_rows(emit, product)
    names = "`, `".join(dict.fromkeys(between))
    reason = _in_a_transform(node, index) or reasons.UNREAD(names)
    return Call(node, "softmax", emit, q, k, node, value_of(node), refused=reason)


class _Attention:
    """The steps q k^T -> softmax -> p v, in the order they are computed.

    letters: of each node of the chain, the dimensions of the scores in the order that it has them;
    None where a view has other ones, which hold the scores in the order `base`, of `sizes`."""

    def __init__(self, above: list[Step], softmax: Node, below: list[Step]):
        self.above, self.softmax, (*self.below, end) = above, softmax, below
        self.node, self.refused = end.node, end.refused
        self.scores, self.output = product_of(above[0].node), product_of(self.node)
        self.weights = self.below[-1].node if self.below else softmax
        if self.output.a is not self.weights:
            x = self.output  # the weights are written second
            self.output = Product(x.b, x.a, x.right, x.left, x.out)
        steps = [*self.above, *self.below]
        nodes = [*(step.node for step in above), softmax, *(step.node for step in self.below)]
        self.chain = {*nodes, *(node for step in steps for node in step.aside)}
        self.letters, self.base = self._follow([*above, Step(softmax), *self.below])
        sizes = value_of(above[0].node).shape
        self.sizes = [sizes[self.scores.out.index(c)] for c in self.base]
        self.flat = len(self.base) == 3  # [B * H, N_q, N_k]
        self.heads = self._heads(nodes)  # [B, H], where some tensor has B * H; None: no H is known
        self.rank = len(self.base) + bool(self.flat and self.heads)  # of a mask for all scores

    def _follow(self, steps: list[Step]) -> tuple[dict[Node, str | None], str]:
        """(letters, the order in which views hold the scores); "" where there are several."""
        letters, before, base = {}, self.scores.out, None
        given = value_of(steps[0].node).shape
        for i, step in enumerate(steps):
            shape = value_of(step.node).shape
            if step.order:
                before = "".join(before[d] for d in step.order) if before else ""
            elif i and op_name(step.node) in (*graph.VIEWS, "getitem") and not step.drops:
                if before is None or not equal(shape, value_of(steps[i - 1].node).shape):
                    base = base or before
                    before = None if before in (None, base) else ""
            letters[step.node] = before
            if before is None:
                sizes = [given[self.scores.out.index(c)] for c in base]
                if equal(shape[:-1], sizes[:-1]) and _is_row(shape[-1], sizes):
                    letters[step.node] = before = base
        return letters, base or self.scores.out

    def _heads(self, nodes: list[Node]) -> list | None:
        for node in nodes:
            *batch, rows, n = value_of(node).shape
            is_split = self.letters[node] in (None, self.base) and len(batch) == 2
            if is_split and equal([rows], self.sizes[-2:-1]) and _is_row(n, self.sizes):
                B, H = map(as_int, batch)
                return [B if isinstance(B, int) else -1, H]
        return None

    def call(self, emit: Emitter) -> Call:
        q, k, v = self.scores.a, self.scores.b, self.output.b
        call = Call(self.node, "softmax", emit, q, k, v, value_of(self.node))
        call.refused = _in_a_transform(self.node, emit.index) or next(self._refusals(), None)
        if call.refused is None:
            return self._fill_in(call)
        call.k = _in_rows(emit, self.scores)
        return call

    def _refusals(self) -> Iterator[Reason]:
        """Why this is not softmax(c q k^T + M) v, or not of this alone."""
        q, k, v = self.scores.a, self.scores.b, self.output.b
        yield from (step.refused for step in (*self.above, *self.below) if step.refused)
        if self.refused:
            yield self.refused
        for node in (*sorted(self.chain), self.node):
            if node.kwargs.get("out") is not None:
                yield reasons.GIVEN_OUT(node.name)
        ranks = [value_of(x).dim() for x in (q, k, v)]
        if not all(n in (3, 4) for n in (*ranks, len(self.base), value_of(self.node).dim())):
            yield reasons.RANKS(ranks)
        yield from self._refused_these_dimensions()
        for node in sorted(self.chain):
            what = "weights" if node >= self.softmax else "scores"
            for user in node.users:
                if user not in self.chain | {self.node} and not graph.idle(user, node, self.chain):
                    yield reasons.ALSO_USED(what, node.name, user.name)
        conditions = [step.fill[0] for step in self.above if step.fill]
        added = [x for step in self.above for x in (step.bias, step.sink)]
        if self.chain & {q, k, v, *conditions, *added}:
            yield reasons.OF_THE_SCORES()
        yield from self._refused_at_the_end()
        dtypes = [value_of(x).dtype for x in (q, k, v)]
        if len({*dtypes[:2]}) > 1 or not all(_is_of(x, dtypes[2]) for x in (q, k)):
            yield reasons.DTYPES(dtypes)
        yield from self._refused_these_masks()
        yield from self._refused_this_sink()

    def _refused_these_dimensions(self) -> Iterator[Reason]:  # noqa: C901  (one after another)
        roles = self.scores.roles(), self.output.roles()
        if None in roles or not set(roles[1][0]) <= set(self.output.left):
            yield reasons.NO_PRODUCT()
            return
        dim, rank = arguments(self.softmax, "input", "dim")[1], value_of(self.softmax).dim()
        of_softmax, of_weights = self.letters[self.softmax], self.letters[self.weights]
        if "" in self.letters.values():
            yield reasons.TWO_ORDERS()
            return
        is_last = isinstance(dim, int) and dim % rank == rank - 1
        if not isinstance(dim, int) or of_softmax is None and not is_last:
            yield reasons.SOFTMAX_DIM(dim, rank)
            return
        batch, row, _, col = self.scores.roles()
        self.key = self.base[-1] if of_softmax is None else of_softmax[dim]
        self.query = row if self.key == col else col
        sizes = value_of(self.weights).shape
        if of_weights is None and not equal(sizes[-2:], self.sizes[-2:]):
            yield reasons.RESHAPED(graph.shown(value_of(self.weights)))
            return
        summed = self._summed()
        if self.key not in (row, col) or summed != self.query + self.key:
            yield reasons.NOT_IN_BOTH() if is_last else reasons.SOFTMAX_DIM(dim, rank)
            return
        for step in (*self.above, Step(self.softmax, of_rows=is_last), *self.below):
            letters, (*_, n) = self.letters[step.node], value_of(step.node).shape
            of_keys = _is_row(n, self.sizes) if letters is None else letters[-1] == self.key
            if step.of_rows and not of_keys:
                yield reasons.NOT_OVER_KEYS(op_name(step.node))
        joined = self.flat or len(sizes) == 3
        order = "".join(c for c in self.scores.out if c in batch) + self.query + self.key
        if self.heads and joined:
            if not (self.base == order and isinstance(self.heads[1], int)):
                yield reasons.SPLIT(self.heads)
        if of_weights is None and self.base != order:
            yield reasons.RESHAPED_TRANSPOSED(graph.shown(value_of(self.weights)))
        if of_weights is None and len(sizes) == 4:
            if not (self.heads and equal(sizes[1:2], self.heads[1:])):
                got = graph.dims(value_of(self.weights))[:2]
                yield reasons.SPLIT_TWICE(self.heads, got)
        for product in (self.scores, self.output):
            if not self._sizes_agree(product):
                operands = self.scores.a, self.scores.b, self.output.b
                yield reasons.BROADCASTS(*(graph.shown(value_of(x)) for x in operands))
        for step in self.above:
            added = step.bias or step.sink or step.fill and step.fill[0]
            letters = self.letters[step.node]
            if added and letters is None and self._regrouped(step, added) is None:
                yield reasons.RESHAPED_FOR(added.name)
            if added and letters not in (None, order) and self.heads and self.flat:
                yield reasons.TRANSPOSED_FOR(added.name)

    def _summed(self) -> str:
        """(query, key) as the product with v has them, in the letters of the scores."""
        _, row, inner, _ = self.output.roles()
        letters, left = self.letters[self.weights], self.output.left
        if letters is not None and len(letters) == len(left):
            return "".join(letters[left.index(c)] for c in (row, inner))
        return self.base[-2:] if left[-2:] == row + inner else ""

    def _sizes_agree(self, product: Product) -> bool:
        """Whether what the products share has equal sizes, or is broadcast as SDPA broadcasts."""
        a, b = value_of(product.a).shape, value_of(product.b).shape
        batch, _, inner, _ = product.roles()
        n, m = a[product.left.index(inner)], b[product.right.index(inner)]
        pairs = [
            (a[product.left.index(c)], b[product.right.index(c)])
            for c in batch
            if c in product.left and c in product.right
        ]
        wide = len(batch) == 2
        return equal([n], [m]) and all(
            equal([n], [m]) or wide and (equal([n], [1]) or equal([m], [1])) for n, m in pairs
        )

    def _refused_at_the_end(self) -> Iterator[Reason]:
        """The rewritten call runs where the second product was, so nothing in between may modify
        its inputs."""
        node = self.above[0].node
        while (node := node.next) is not self.node:
            if graph.may_write(node) and node not in self.chain and op_name(node) != "detach_":
                yield reasons.MAY_WRITE(node.name)
            if op_name(node) in MODES:
                yield reasons.MODE(node.name)

    def _refused_these_masks(self) -> Iterator[Reason]:
        masks = []
        for step in self.above:
            if step.bias is not None or step.fill:
                masks.append(step)
            elif step.scale is not None:
                hides = all(mask.fill and mask.fill[2] == -math.inf for mask in masks)
                if not hides or masks and step.scale < 0:
                    yield reasons.MASK_BEFORE_SCALE()
        values = {step.fill[2] for step in masks if step.fill}
        if len(values) > 1:
            yield reasons.DIFFERENT_FILLS(sorted(values))

    def _refused_this_sink(self) -> Iterator[Reason]:
        sinks = [i for i, step in enumerate(self.above) if step.sink is not None]
        drops = [step for step in self.below if step.drops]
        if any(step.drops for step in self.above) or len(sinks) > 1 or len(drops) != len(sinks):
            yield reasons.NO_SINK()
        elif sinks and not all(step.plain for step in self.above[sinks[0] + 1 :]):
            yield reasons.SINK_CHANGED()
        elif sinks and any(step.of_rows for step in self.above[: sinks[0]]):
            yield reasons.SINK_SHIFTED()

    def _fill_in(self, call: Call) -> Call:
        emit, product = call.emit, self.scores
        batch, row, inner, col = product.roles()
        batch = "".join(c for c in product.out if c in batch)
        q, k = (product.a, product.left), (product.b, product.right)
        if self.query == col:
            q, k = k, q
        call.q = self._arranged(emit, *q, batch + self.query + inner)
        call.k = self._arranged(emit, *k, batch + self.key + inner)
        dtype = value_of(self.output.b).dtype
        if value_of(call.q).dtype != dtype:  # scores in fp32, of q and k that v's dtype holds
            call.q, call.k = (emit(aten.to.dtype, x, dtype) for x in (call.q, call.k))
        self.order = batch + self.query + self.key
        call.attn_mask = self._attn_mask(emit)
        for step in self.above:
            if step.sink is not None:
                call.sink = self._aligned(emit, step, step.sink)
        call.scale = math.prod(
            (step.scale for step in self.above if step.scale is not None), start=1.0
        )

        product, letters = self.output, self.letters[self.weights]
        batch_v, row, inner, col = product.roles()
        batch_v = "".join(c for c in product.left if c in batch_v)
        if letters is not None and len(letters) == len(product.left):
            batch_v = "".join(product.left[letters.index(c)] for c in batch)
        order = batch_v + row + col
        call.v = self._arranged(emit, product.b, product.right, batch_v + inner + col)
        out = value_of(self.node).permute([product.out.index(c) for c in order])
        if out.dim() == 3:
            out = out.unflatten(0, self.heads) if self.heads else out.unsqueeze(0)
        call.out = out

        (k, G), (v, G_v) = kv_source(call.k, emit.index), kv_source(call.v, emit.index)
        if G == G_v > 1:
            call.k, call.v, call.enable_gqa = k, v, True
        broadcast_heads(call)

        def finish(out: Node) -> Node:
            if len(order) == 3:
                merge = (aten.flatten.using_ints, 0, 1) if self.heads else (aten.squeeze.dim, 0)
                out = emit(merge[0], out, *merge[1:])
            if product.out != order:
                out = emit(aten.permute.default, out, [order.index(c) for c in product.out])
            return out

        call.finish = finish
        call.dead = graph.left_over(self.chain, self.node)
        return call

    def _arranged(self, emit: Emitter, x: Node, letters: str, order: str) -> Node:
        """x with its dimensions in this order, [B, H, N, D]; those that it lacks are 1."""
        has = [c for c in order if c in letters]
        permutation = [letters.index(c) for c in has]
        *first, i, j = range(len(has))
        if permutation == [*first, j, i]:
            x = _untransposed(x) or emit(aten.transpose.int, x, -2, -1)
        elif permutation != [*first, i, j]:
            x = emit(aten.permute.default, x, permutation)
        for d, c in enumerate(order):
            if c not in letters:
                x = emit(aten.unsqueeze.default, x, d)
        if len(order) == 4:
            return x
        if self.heads:
            return emit(aten.unflatten.int, x, 0, self.heads)
        return emit(aten.unsqueeze.default, x, 0)

    def _attn_mask(self, emit: Emitter) -> Node | None:
        visible = hidden = bias = None
        for step in self.above:
            if step.bias is not None:
                bias, hidden = self._added(emit, bias, hidden), None
                mask = self._aligned(emit, step, step.bias)
                dtype = value_of(self.scores.a).dtype
                if value_of(mask).dtype not in (torch.float32, dtype):
                    mask = emit(aten.to.dtype, mask, dtype)
                if step.factor != 1:
                    mask = emit(aten.mul.Tensor, mask, step.factor)
                bias = mask if bias is None else emit(aten.add.Tensor, bias, mask)
            elif step.fill:
                cond, that, value = step.fill
                mask = self._aligned(emit, step, cond)
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

    def _aligned(self, emit: Emitter, step: Step, mask: Node) -> Node:
        """A mask that broadcasts to [B, H, N_q, N_k], of one that does to `step`'s scores."""
        letters = self.letters[step.node]
        if letters is None:
            how = self._regrouped(step, mask)
            for _ in range(value_of(step.node).dim() - value_of(mask).dim()):
                mask = emit(aten.unsqueeze.default, mask, 0)
            if isinstance(how, dict):
                if value_of(mask).dim() == self.rank and all(d == e for d, e in how.items()):
                    how = {d: d for d in range(self.rank)}  # as it is
                dropped = [d for d in range(value_of(mask).dim()) if d not in how.values()]
                mask = emit(aten.squeeze.dims, mask, dropped) if dropped else mask
                for d in range(self.rank):
                    mask = mask if d in how else emit(aten.unsqueeze.default, mask, d)
            else:
                mask = emit(aten.expand.default, mask, how[0])
                mask = emit(aten.reshape.default, mask, how[1])
            letters = self.base
            if self.heads and self.flat:
                return mask
        shape = value_of(mask).shape
        if self.heads and self.flat and len(shape) == 3 and not equal(shape[:1], [1]):
            return emit(aten.unflatten.int, mask, 0, self.heads)
        least = 2 if letters == self.order else len(letters)
        for _ in range(least - len(shape)):
            mask = emit(aten.unsqueeze.default, mask, 0)
        if letters == self.order:
            return mask
        return emit(aten.permute.default, mask, [letters.index(c) for c in self.order])

    def _regrouped(self, step: Step, mask: Node) -> dict[int, int] | tuple[list, list] | None:
        """How a mask for `step`'s scores becomes one for the product's: the dimensions of these
        that are dimensions of the mask, the others being 1; or (sizes to expand it to, the sizes
        to view that as). None where sizes would have to be known that are not."""
        given = [as_int(n) for n in value_of(step.node).shape]
        wanted = [as_int(n) for n in self.sizes]
        if self.heads and self.flat:
            wanted[:1] = self.heads
        if step.sink is not None:
            given[-1] = wanted[-1] = 1
        shape = [as_int(n) for n in value_of(mask).shape]
        shape = [1] * (len(given) - len(shape)) + shape
        expanded, viewed = [-1] * len(given), [1] * len(wanted)
        groups = _groups(given, wanted)
        wide = [any(not equal([shape[d]], [1]) for d in these) for these, _ in groups or ()]
        merged = [group for group, is_wide in zip(groups or (), wide, strict=True) if is_wide]
        if all(len(these) == len(those) == 1 for these, those in merged):
            kept = {those[0]: these[0] for these, those in merged}
            return None if groups is None else kept
        for these, those in merged:
            if len(these) == len(those) == 1:
                viewed[those[0]] = shape[these[0]]
                continue
            for d in these:
                expanded[d] = given[d]
            for d in those:
                viewed[d] = wanted[d]
        known = all(isinstance(n, int) for n in (*expanded, *viewed)) and viewed.count(-1) < 2
        return (expanded, viewed) if known else None


def _is_row(n, sizes) -> bool:
    """Whether a dimension holds the scores of all keys, or with a sink's column."""
    return equal([n], sizes[-1:]) or equal([n], [sizes[-1] + 1])


def _groups(given: list, wanted: list) -> list[tuple[list[int], list[int]]] | None:
    """Dimensions of `given` and of `wanted` that hold the same numbers, in order, without those of
    one number: [B, W, H] and [B * W, H] are ([0, 1], [0]) and ([2], [1]). A size of -1 is the one
    that fits."""
    lefts, rights = (
        [d for d, n in enumerate(sizes) if not equal([n], [1])] for sizes in (given, wanted)
    )
    groups = []
    while lefts and rights:
        these, those = [lefts.pop(0)], [rights.pop(0)]
        n, m = given[these[0]], wanted[those[0]]
        while not (isinstance(m, int) and m == -1 or graph.statically_true(n == m)):
            if not (isinstance(n, int) and isinstance(m, int)):
                return None
            if n < m and lefts:
                these.append(lefts.pop(0))
                n = n * given[these[-1]]
            elif n > m and rights:
                those.append(rights.pop(0))
                m = m * wanted[those[-1]]
            else:
                return None
        groups.append((these, those))
    return None if lefts or rights else groups


def _in_a_transform(node: Node, index: GraphIndex) -> Reason | None:
    """What is inserted inside a torch.func transform has no value."""
    return reasons.IN_A_TRANSFORM() if index.functorch_depth(node) else None


def _in_rows(emit: Emitter, scores: Product) -> Node:
    """k [..., N_k, D], as a report shows it."""
    k = scores.b
    if emit.index.functorch_depth(emit.anchor) or not scores.roles():
        return k
    if scores.right[-2:] != "".join(scores.roles()[2:]):
        return k
    return _untransposed(k) or emit(aten.transpose.int, k, -2, -1)


def _negated(x: Node, index: GraphIndex) -> Node | None:
    """y where x is ~y, and y is not written to later."""
    if op_name(x) not in ("bitwise_not", "logical_not", "invert", "__invert__"):
        return None
    y = x.args[0]
    return y if value_of(y).dtype == torch.bool and not index.written_after(y, x) else None


def _is_of(x: Node, dtype: torch.dtype) -> bool:
    """Whether x is of this dtype, or was cast from it to a wider one."""
    if value_of(x).dtype == dtype:
        return True
    while graph.order_of(x) is not None:
        x = arguments(x, "input")[0]
    source = arguments(x, "input")[0] if op_name(x) in CASTS else None
    is_wider = torch.promote_types(dtype, value_of(x).dtype) == value_of(x).dtype
    return is_wider and isinstance(source, Node) and value_of(source).dtype == dtype


def _untransposed(x: Node) -> Node | None:
    """y where x is y with its last two dimensions swapped."""
    order = graph.order_of(x)
    swapped = order is not None and order[-2:] == (len(order) - 1, len(order) - 2)
    return x.args[0] if swapped and order[:-2] == tuple(range(len(order) - 2)) else None
