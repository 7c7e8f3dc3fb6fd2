"""Which blocks of keys each block of queries computes, chosen from q and k alone, untrained. The
result is attention's only nearly: nobody gets it who does not ask for it.

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

Means, self-similarity and the choice of the largest scores are pool.py's, kernels on CUDA: q is
read once and k twice. The rest is plain PyTorch. AOTAutograd traces into the op, and nothing
waits for the device.

Shapes: B batch, H_q and H_kv heads, N sequence, D head_dim, M_q blocks of queries, M_kv of keys.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sage_inductor.ops.quantize.op import smooth
from sage_inductor.ops.register import opens
from sage_inductor.ops.sparse.pool import largest, pool_blocks
from sage_inductor.ops.symbols import fix_head_dims

# Queries and keys, SpargeAttn's: 128 queries share a scale in sage1, 64 keys do in every recipe.
BLOCK_SIZE = (128, 64)
PARTS = 10_000  # top_k is counted in these: a length times a float is no exact number


class Selection(NamedTuple):
    """What is kept of the blocks of keys, for each block of queries. Fractions are 0 to 1."""

    top_k: float = 0.0  # the fraction of the blocks that are not always kept
    top_p: float = 0.0  # and more, until the softmax over all blocks sums to this
    # Self-similarity below which a block's tokens are not alike; 1 / block for independent ones. At
    # equal work 0.1 is 3 to 12 dB above 0, and up to 0.7 of the blocks above 0.2 (bench/sparse.py).
    similarity: float = 0.1
    dense_first: int = 0  # tokens at the beginning that see all and that all see: text
    dense_last: int = 0  # and at the end
    tail: bool = False  # means of tail_block keys stand for the blocks that are not kept
    tail_block: int = 64  # of formats.TAIL_BLOCKS

    @property
    def arguments(self) -> tuple:
        """Those of ``sage::select_blocks``."""
        return self[:5]

    def given(self) -> float | dict:
        """As a policy says it: the fields that are not the defaults, or top_k alone."""
        fields = {name: x for name, x in self._asdict().items() if x != self._field_defaults[name]}
        return self.top_k if fields.keys() == {"top_k"} else fields


def compose_select(
    q: Tensor, k: Tensor, scale: float, top_k: float, top_p: float, similarity: float,
    dense_first: int, dense_last: int, block_q: int, block_kv: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``sage::select_blocks``: for self-attention without a mask, the blocks of keys that are kept.

    q [B, H_q, N, D], k [B, H_kv, N, D] of any floating dtypes and strides, scale of the softmax;
    then Selection's fields. Returns num_blocks [B, H_q, M_q] and indices [B, H_q, M_q, M_kv], int32
    and not differentiable, of which row m has the blocks indices[..., m, :num_blocks[..., m]], in
    ascending order, and then the others: BlockLists' first two.
    """
    with torch.autocast(q.device.type, enabled=False):
        shift = smooth(k)[0]
        (q_mean, q_always, first_q, _), (k_mean, k_always, first_kv, k_tokens) = (
            _pool(*x, similarity, dense_first, dense_last)
            for x in ((q, None, block_q), (k, shift, block_kv))
        )
        (B, H_q, M_q, _), (H_kv, M_kv) = q_mean.shape, k_mean.shape[1:3]
        group = q_mean.unflatten(1, (H_kv, -1)).flatten(2, 3)  # [B, H_kv, H_q / H_kv * M_q, D]
        scores = (scale * group @ k_mean.mT).view(B, H_q, M_q, M_kv)
        scores = scores + (k_tokens / block_kv).log()

        k_always = k_always.repeat_interleave(H_q // H_kv, 1)
        first_q = first_q.unsqueeze(1)
        diagonal = (first_q < first_kv + block_kv) & (first_kv < first_q + block_q)
        always = diagonal | q_always.unsqueeze(3) | k_always.unsqueeze(2)
        ranked = torch.where(always, torch.inf, scores)
        num_blocks = always.sum(-1)
        rest = (M_kv - num_blocks) * round(top_k * PARTS)
        num_blocks = num_blocks + (rest + PARTS - 1) // PARTS
        if top_p > 0:
            order = ranked.sort(stable=True, descending=True)[1]
            reached = scores.softmax(-1).gather(-1, order).cumsum(-1)
            enough = (reached < top_p).sum(-1) + 1
            num_blocks = torch.maximum(num_blocks, enough.clamp(max=M_kv))
        num_blocks = num_blocks.int()
        return num_blocks, largest(ranked, num_blocks)


def _pool(
    x: Tensor, shift: Tensor | None, block: int, similarity: float, dense_first: int,
    dense_last: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """For each block of x [B, H, N, D], less shift [B, H, D]: the mean of its tokens [B, H, M, D],
    whether it is always computed [B, H, M], bool, its first token and how many it has [M]."""
    mean, alike = pool_blocks(x, shift, block)
    N = x.shape[2]
    first = torch.arange(mean.shape[2], device=x.device) * block
    tokens = (N - first).clamp(max=block)
    dense = (first < dense_first) | (first + tokens > N - dense_last)
    return mean, dense | (alike < similarity), first, tokens


select_blocks = torch.library.custom_op("sage::select_blocks", compose_select, mutates_args=())


@select_blocks.register_fake
def _(q, k, scale, top_k, top_p, similarity, dense_first, dense_last, block_q, block_kv):
    fix_head_dims(q, k)
    N = q.shape[2]
    rows = *q.shape[:2], (N + block_q - 1) // block_q
    counts = q.new_empty(rows, dtype=torch.int32)
    return counts, q.new_empty((*rows, (N + block_kv - 1) // block_kv), dtype=torch.int32)


opens(select_blocks, compose_select)
