"""Which blocks of keys each block of queries computes, chosen from q and k alone. The result is
attention's only nearly: nobody gets it who does not ask for it.

Ours ("pooled"), untrained:

    q_mean, k_mean = means of the tokens of each block          k's with its mean over N taken off
    scores         = scale * q_mean k_mean^T + log(tokens of the block of keys / block_kv)
    always         = the diagonal, blocks with dense tokens, blocks whose tokens are not alike
    kept           = always, the top_k of the rest by scores, and what top_p asks for

A mean stands for its block if the tokens are alike: a block's self-similarity is the mean cosine of
all pairs of its tokens, which is the squared norm of the mean of its tokens, each scaled to norm 1.
A block of queries below `similarity` computes all keys, a block of keys below it is computed by all
queries. What is kept is listed in ascending order.

From SpargeAttn (arXiv:2502.18137, section 3.3; self-similarity as its code computes it: its formula
divides by the largest product). The diagonal and dense tokens are from Sparse VideoGen
(arXiv:2502.01776), and the weight of a tail, which is shorter, is ours.

Those that checkpoints were trained with. M: the blocks of keys that are not always kept.

    "sla"    q_mean k_mean^T                the int(top_k M) or int((1 - sparsity) M) largest
    "vsa"    q_mean k_mean^T / sqrt(D)      the ceil((1 - sparsity) M) largest, one at least
    "sol"    scale q_mean k_mean^T          those above tau sqrt(scale^2 sum_d q_mean_d^2 var_d +
                                            (1e-3 / log2(e))^2), and neighbours of the diagonal
    "error"  scale q_mean k_mean^T + log(E |k|^2 - |k_mean|^2)      the int(top_k M) largest, or one

VSA's k_mean is as it is; Sol's is less its mean over the blocks, and var_d the mean of its squares.
SLA (arXiv:2509.24006) and VSA (arXiv:2505.13389) compute in q's dtype, and so does this: SLA's k
less its mean, the means, the product and the quotient are rounded to it. Many scores are equal
then; the first of them are kept. VSA with segments, Sol-Attn (arXiv:2607.24027) and PISA's order by
the error of a mean in the place of its tokens are in fp32. With segments M are the blocks behind
them; where these compete, as many blocks more as they have are kept of all.

Means, self-similarity and the choice of the largest scores are pool.py's, kernels on CUDA: q is
read once and k twice. The rest is plain PyTorch. AOTAutograd traces into the op, and nothing
waits for the device.

Shapes: B batch, H_q and H_kv heads, N sequence, D head_dim, M_q blocks of queries, M_kv of keys.
"""

import itertools
import json
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_inductor.ops.quantize.op import smooth
from sage_inductor.ops.register import autocast, opens
from sage_inductor.ops.sparse.pool import largest, pool_blocks
from sage_inductor.ops.symbols import fix_head_dims

# Queries and keys, SpargeAttn's: 128 queries share a scale in sage1, 64 keys do in every recipe.
BLOCK_SIZE = (128, 64)
PARTS = 10_000  # ours counts top_k in these: a length times a float is no exact number


class Rule(NamedTuple):
    """What a rule takes of Selection's fields, beside EACH, which each takes."""

    blocks: tuple[int, int]  # queries and keys of a block, where nothing else is asked for
    amounts: tuple[str, ...]  # how many are kept; one is given, of ours one or both
    others: tuple[str, ...] = ()


EACH = "dense", "blocks", "layout", "cube", "tail", "tail_block"
RULES = {
    "pooled": Rule(BLOCK_SIZE, ("top_k", "top_p"), ("similarity", "dense_first", "dense_last")),
    "sla": Rule(BLOCK_SIZE, ("top_k", "sparsity"), ("scores",)),
    "vsa": Rule((64, 64), ("sparsity",), ("scores", "segments", "mode")),
    "sol": Rule((64, 64), ("tau",)),
    "error": Rule((64, 64), ("top_k",)),
}


class Selection(NamedTuple):
    """What is kept of the blocks of keys, for each block of queries. Fractions are 0 to 1; of top_k
    or sparsity each head of q may have one."""

    top_k: float | tuple[float, ...] = 0.0  # the fraction of the blocks that are not always kept
    top_p: float = 0.0  # and more, until the softmax over all blocks sums to this
    # Self-similarity below which a block's tokens are not alike; 1 / block for independent ones. At
    # equal work 0.1 was 3 to 12 dB above 0 on an image model, and is 6 dB below it on a video model
    # (bench/NOTES.md).
    similarity: float = 0.1
    dense_first: int = 0  # tokens at the beginning that see all and that all see: text
    dense_last: int = 0  # and at the end
    rule: str = "pooled"  # a name in RULES
    # 1 - top_k, but counted as where the model was trained.
    sparsity: float | tuple[float, ...] | None = None
    # Ranges of tokens that see all and that all see; below 0: from the end on, None: the end.
    dense: tuple[tuple[int, int | None], ...] = ()
    tau: float | None = None  # keeps scores this many deviations above their mean
    # Tokens of the parts of a prefix that sees all; all see it ("exempt"), or it competes.
    segments: tuple[int, ...] = ()
    mode: str = "exempt"  # or "compete"
    scores: str = "as_trained"  # or "fp32", where the rule was trained with scores of q's dtype
    blocks: tuple[int, int] | None = None  # queries and keys of a block; None: the rule's
    layout: tuple[int, int, int] | None = None  # T, H, W of the video between dense tokens
    cube: tuple[int, int, int] = (4, 4, 4)  # of tokens that follow each other then (ops/layout.py)
    tail: bool = False  # means of tail_block keys stand for the blocks that are not kept
    tail_block: int = 64  # of formats.TAIL_BLOCKS

    def given(self) -> float | tuple[float, ...] | dict:
        """As a policy says it: the fields that are not the defaults, or top_k alone."""
        fields = self._changed()
        return self.top_k if fields.keys() == {"top_k"} else fields

    def _changed(self) -> dict:
        return {name: x for name, x in self._asdict().items() if x != self._field_defaults[name]}

    @property
    def heads(self) -> int | None:
        """How many heads of q have a fraction each; None: one is for all."""
        fraction = self.top_k if self.sparsity is None else self.sparsity
        return len(fraction) if isinstance(fraction, (tuple, list)) else None

    def of(self, heads: slice) -> "Selection":
        """What is kept of some of q's heads."""
        both = {"top_k": self.top_k, "sparsity": self.sparsity}
        return self._replace(**{x: y[heads] for x, y in both.items() if isinstance(y, tuple)})

    @property
    def size(self) -> tuple[int, int]:
        """Queries and keys of a block."""
        return self.blocks or RULES[self.rule].blocks

    @property
    def keeps_all(self) -> bool:
        return self.top_k == 1 or self.sparsity == 0

    def ranges(self, N: int, of_keys: bool) -> list[tuple[int, int]]:
        """The tokens of N that are dense as keys, or as queries: [from, to) each."""
        prefix = 0 if of_keys and self.mode == "compete" else sum(self.segments)
        given = [
            (start if start >= 0 else N + start, N if end is None else end if end >= 0 else N + end)
            for start, end in self.dense
        ]
        return [(0, self.dense_first), (N - self.dense_last, N), (0, prefix), *given]

    @property
    def beside(self) -> tuple[int, int]:
        """How many tokens stand before a layout's video and behind it, all of them dense."""
        before = [end or 0 for start, end in self.dense if start == 0]
        behind = [-start for start, _ in self.dense if start < 0]
        first = max(self.dense_first, sum(self.segments), *before)
        return first, max(self.dense_last, 0, *behind)

    @property
    def tokens(self) -> int | None:
        """How many a layout's video and the tokens around it are."""
        return None if self.layout is None else math.prod(self.layout) + sum(self.beside)

    def arguments(self, *perm) -> tuple:
        """What ``sage::select_blocks`` takes after scale, with the order by layout and cube where
        there is one; ours are as they were in old programs."""
        by_head, ours = isinstance(self.top_k, tuple), Selection._fields[:5]
        here = *ours[by_head:], *EACH[1:]
        others = {name: x for name, x in self._changed().items() if name not in here}
        first = 0.0 if by_head else self.top_k, *self[1:5], *self.size
        return *first, *([json.dumps(others)] if others or perm else []), *perm


def compose_select(
    q: Tensor, k: Tensor, scale: float, top_k: float, top_p: float, similarity: float,
    dense_first: int, dense_last: int, block_q: int, block_kv: int, others: str = "{}",
    perm: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``sage::select_blocks``: for self-attention without a mask, the blocks of keys that are kept.

    q [B, H_q, N, D], k [B, H_kv, N, D] of any floating dtypes and strides, scale of the softmax;
    then Selection's fields, the last ones as JSON. perm: in which order tokens form blocks
    (ops/layout.py). Returns num_blocks [B, H_q, M_q] and indices [B, H_q, M_q, M_kv], int32 and not
    differentiable, of which row m has the blocks indices[..., m, :num_blocks[..., m]], in ascending
    order, and then the others: BlockLists' first two.
    """
    ours, blocks = (top_k, top_p, similarity, dense_first, dense_last), (block_q, block_kv)
    asked = Selection(*ours, blocks=blocks)._replace(**json.loads(others))
    rule, N = asked.rule, q.shape[2]
    if asked.heads not in (None, q.shape[1]):
        what = f"fractions must be one for each of q's {q.shape[1]} heads"
        raise ValueError(f"select_blocks: {what}, got {asked.heads}")
    # Inductor takes out a conversion to 16 bits and back. So nothing is converted back: products
    # and `largest` read what was rounded.
    is_rounded = "scores" in RULES[rule].others and not asked.segments
    dtype = q.dtype if is_rounded and asked.scores == "as_trained" else torch.float32
    with torch.autocast(q.device.type, enabled=False):
        shift = None if rule in ("vsa", "sol") else smooth(k, perm)[0].to(dtype)
        q_mean, q_alike = pool_blocks(q, None, block_q, perm=perm)
        k_mean, k_alike = pool_blocks(k, shift, block_kv, rule == "error", perm)
        if rule == "sol":
            k_mean = k_mean - k_mean.mean(2, keepdim=True)
        (B, H_q, M_q, _), (H_kv, M_kv) = q_mean.shape, k_mean.shape[1:3]
        first_q, _, q_dense = _blocks_of(q_mean, N, block_q, asked.ranges(N, of_keys=False), perm)
        first_kv, k_tokens, k_dense = _blocks_of(
            k_mean, N, block_kv, asked.ranges(N, of_keys=True), perm
        )
        group = q_mean.unflatten(1, (H_kv, -1)).flatten(2, 3)  # [B, H_kv, H_q / H_kv * M_q, D]
        factor = 1.0 if rule in ("sla", "vsa") else scale
        scores = (factor * group.to(dtype) @ k_mean.to(dtype).mT).view(B, H_q, M_q, M_kv)

        first_q = first_q.unsqueeze(1)
        always = q_dense.unsqueeze(1) | k_dense
        if rule in ("pooled", "sol"):  # the diagonal
            margin = block_kv if rule == "sol" else 0
            end_q, end_kv = first_q + block_q + margin, first_kv + block_kv + margin
            always = always | (first_q < end_kv) & (first_kv < end_q)
        if rule == "pooled":
            scores = scores + (k_tokens / block_kv).log()
            k_odd = (k_alike < similarity).repeat_interleave(H_q // H_kv, 1)
            always = always | (q_alike < similarity).unsqueeze(3) | k_odd.unsqueeze(2)
        elif rule == "vsa":
            scores = scores / int(q.shape[3]) ** 0.5
        elif rule == "error":
            spread = (k_alike - k_mean.square().sum(3)).clamp(min=torch.finfo(dtype).tiny)
            scores = scores + spread.log().repeat_interleave(H_q // H_kv, 1).unsqueeze(2)
        elif asked.tau is not None:
            variance = scale**2 * group.square() @ k_mean.square().mean(2).unsqueeze(3)
            bound = asked.tau * (variance + (1e-3 / math.log2(math.e)) ** 2).sqrt()
            always = always | (scores > bound.view(B, H_q, M_q, 1))
        ranked = torch.where(always, torch.inf, scores)
        num_blocks = always.sum(-1)
        num_blocks = num_blocks + _count(M_kv - num_blocks, asked)
        if top_p > 0:
            order = ranked.sort(stable=True, descending=True)[1]
            reached = scores.softmax(-1).gather(-1, order).cumsum(-1)
            enough = (reached < top_p).sum(-1) + 1
            num_blocks = torch.maximum(num_blocks, enough.clamp(max=M_kv))
        num_blocks = num_blocks.clamp(min=1).int().expand(B, H_q, M_q).contiguous()
        return num_blocks, largest(ranked, num_blocks)


def _blocks_of(
    mean: Tensor, N: int, block: int, ranges: list[tuple[int, int]], perm: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """For each block of N tokens, whose means are [B, H, M, D]: its first token, how many it has
    and whether one of them is in one of the ranges, bool. Each [M]."""
    first = torch.arange(mean.shape[2], device=mean.device) * block
    tokens = (N - first).clamp(max=block)
    start, end = (first, first + tokens) if perm is None else (perm, perm + 1)
    dense = torch.zeros_like(start, dtype=torch.bool)
    for low, high in ranges:
        dense = dense | (start.clamp(min=low) < end.clamp(max=high))
    if perm is not None:
        dense = F.pad(dense, (0, mean.shape[2] * block - N)).unflatten(0, (-1, block)).any(1)
    return first, tokens, dense


def _count(rest: Tensor, asked: Selection) -> Tensor:
    """How many are kept of the `rest`, the number of blocks that are not always kept [..., M_q]: by
    the rule's own expression in doubles, for int((1 - 0.8) * 590) is 117 and int(0.2 * 590) is 118.
    On the device, where a symbolic length is no guard."""
    if asked.rule == "pooled":
        return (rest * _each(asked.top_k, lambda x: round(x * PARTS), rest) + PARTS - 1) // PARTS
    if asked.rule == "sol":
        return torch.zeros_like(rest)
    competing = sum(asked.segments) // asked.size[1] if asked.mode == "compete" else 0
    left = (rest - competing).double()
    if asked.sparsity is None:
        kept = _each(asked.top_k, float, left) * left
    else:
        kept = _each(asked.sparsity, lambda x: 1 - x, left) * left
    kept = (kept.ceil() if asked.rule == "vsa" else kept).long()
    if asked.rule != "sla":
        kept = kept.clamp(min=1)
    return torch.minimum(kept + competing, rest)


def _each(fraction: float | tuple[float, ...], of: Callable, like: Tensor) -> float | Tensor:
    """of(fraction) or, where each head has one, the tensor [H, 1] of them in like's dtype. By
    comparisons: a copy of numbers of the host would wait, and a package would hold a constant."""
    if not isinstance(fraction, (tuple, list)):
        return of(fraction)
    head = torch.arange(len(fraction), device=like.device).unsqueeze(1)
    found = torch.full_like(head, of(fraction[0]), dtype=like.dtype)
    for h, (before, x) in enumerate(itertools.pairwise(fraction), 1):
        if x != before:
            found = torch.where(head >= h, of(x), found)
    return found


select_blocks = torch.library.custom_op("sage::select_blocks", compose_select, mutates_args=())


@select_blocks.register_fake
def _(q, k, *given):
    (block_q, block_kv), N = given[6:8], q.shape[2]
    fix_head_dims(q, k)
    rows = *q.shape[:2], (N + block_q - 1) // block_q
    counts = q.new_empty(rows, dtype=torch.int32)
    return counts, q.new_empty((*rows, (N + block_kv - 1) // block_kv), dtype=torch.int32)


def selected(q: Tensor, k: Tensor, scale: float, asked: Selection) -> dict:
    """What ``sage::sdpa`` takes of a call whose blocks are selected, by its arguments' names."""
    (block_q, block_kv), perm = asked.size, None
    if asked.layout is not None:
        perm = torch.ops.sage.cube_order(q, asked.layout, asked.cube, asked.beside[0])
    counts, indices = select_blocks(q, k, scale, *asked.arguments(perm))
    return dict(
        kv_num_blocks=counts, kv_indices=indices, block_q=block_q, block_kv=block_kv, perm=perm,
        tail_block=asked.tail_block if asked.tail else None,
    )  # fmt: skip


autocast("select_blocks")
opens(select_blocks, compose_select)
