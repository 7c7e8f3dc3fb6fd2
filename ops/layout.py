"""The order in which the tokens of a video are attended: blocks of 64 are cubes of neighbours in
time, height and width, which resemble each other more than 64 tokens of a row of the picture do.

    as they come    token (t H + h) W + w of T x H x W is at t, h, w; others stand before and behind
    as attended     whole cubes, what is left at the borders by smaller ones, then all other tokens

The tokens of a cube, and the cubes, follow each other as in the video. Nothing is padded. In a
video of [21, 45, 80] 93 % of the tokens are in whole cubes of 4 x 4 x 4. The rest are in cubes of
4 x 1 x 4, 1 x 4 x 4 and 1 x 1 x 4, of which a block has several.

`perm` is that order: the i-th to be attended is token perm[i]. Kernels read rows of q, k and v, and
store rows of out and lse, where `token_of` says. So it takes no pass over any of them, but for v in
16 bits, which TMA reads by whole blocks, and the means of q that 4 bits take off.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from sage_inductor.ops.recipe import Recipe
from sage_inductor.ops.register import opens


def compose_order(x: Tensor, size: list[int], cube: list[int], before: int) -> Tensor:
    """``sage::cube_order``: `perm` for the N tokens of x [B, H, N, D], int32 [N] on its device.

    size: T, H, W of the video. cube: its tokens of a cube. before: other tokens ahead of the video.
    """
    tokens, count = torch.arange(x.shape[2], device=x.device, dtype=torch.int32), math.prod(size)
    boxes = [tokens[before : before + count].view(*size)]
    for d, width in enumerate(cube):
        whole = size[d] // width * width
        boxes = [part for box in boxes for part in box.tensor_split((whole,), d) if part.numel()]
    rows = []
    for box in boxes:  # each of whole cubes of one size
        for d, width in enumerate(cube):
            box = box.unflatten(2 * d, (-1, min(width, box.shape[2 * d])))
        rows.append(box.permute(0, 2, 4, 1, 3, 5).flatten())
    return torch.cat([*rows, tokens[:before], tokens[before + count :]])


cube_order = torch.library.custom_op("sage::cube_order", compose_order, mutates_args=())


@cube_order.register_fake
def _(x, size, cube, before):
    return x.new_empty(x.shape[2], dtype=torch.int32)


opens(cube_order, compose_order)


@triton.jit
def token_of(Perm, n, N):
    """The tokens that are attended as the n-th of N; -1: none. Perm: int32 [N]; None: as they
    come."""
    if Perm is None:
        return n
    else:
        return tl.load(Perm + n, mask=n < N, other=0).to(n.dtype)


@triton.jit
def is_token(Perm, token, n, N):
    """Whether there is an n-th of N, `token_of` them."""
    if Perm is None:
        return n < N
    else:
        return (n < N) & (token >= 0)


@triton.jit
def span_of(Spans, document):
    """(first place, number) of a document's keys: documents.py."""
    return tl.load(Spans + 4 * document), tl.load(Spans + 4 * document + 1)


def ordered(x: Tensor, perm: Tensor | None) -> Tensor:
    """x [B, H, N, ...] as it is attended: a copy, unless perm is None."""
    return x if perm is None else x.index_select(2, perm)


def placed(recipe: Recipe) -> str:
    """How a recipe's kernels follow `perm`, as the report says it."""
    copied = ["q", "k"] * recipe.of_qk.smooths_q + ["v"] * (recipe.of_pv.dtype is None)
    return f"in cubes, for which its kernels copy {' and '.join(copied) or 'nothing'}"
