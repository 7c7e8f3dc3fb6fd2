"""Which keys a tile of queries reads, and what band and mask hide in them: for every kernel that
has masks; and by lists of blocks."""

import triton
import triton.language as tl

from sage_inductor.ops.constants import LOG2E

_LOWEST = tl.constexpr(-3.4028234663852886e38)  # of fp32


# The parts of a loop over tiles of keys: those that a window's left bound cuts; those in which
# nothing is hidden; the diagonal and the last keys, or all if there is a mask; those of the tail;
# and those of which a code says what is hidden (hopper/tile_lists.py).
LEFT_EDGE, FULL, EDGE, TAIL, CODED = (tl.constexpr(n) for n in range(5))


@triton.jit
def heads_of(head, H_q, H_kv):
    """b, h, h_kv, b * H_kv + h_kv and head of the head-th head of q, all int64: a product of one
    of them with a stride or a length reaches beyond 2^31."""
    b, h = head // H_q, head % H_q
    h_kv = (h // (H_q // H_kv)).to(tl.int64)
    b, h = b.to(tl.int64), h.to(tl.int64)
    return b, h, h_kv, b * H_kv + h_kv, head.to(tl.int64)


@triton.jit
def tiles_in_sight(
    Seen, row0, N_q, N_kv,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, MASK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """begin, end: which tiles of keys the BLOCK_M rows from row0 read; whole, whole_end: which of
    them without a mask; diagonal: the key at the first row's place. Seen points to its first key.
    """
    begin, end = 0, N_kv
    if MASK > 0:
        begin, end = N_kv, 0
        for start in range(0, N_kv, 1024):
            column = start + tl.arange(0, 1024)
            reached = tl.load(Seen + column, mask=column < N_kv, other=0) != 0
            begin = tl.minimum(begin, tl.min(tl.where(reached, column, N_kv)))
            end = tl.maximum(end, tl.max(tl.where(reached, column + 1, 0)))
    diagonal = row0
    if BOTTOM_RIGHT:
        diagonal += N_kv - N_q
    whole, whole_end = 0, N_kv // BLOCK_N
    if LEFT >= 0:
        begin = tl.maximum(begin, diagonal - LEFT)
        whole = tl.cdiv(tl.maximum(diagonal + BLOCK_M - 1 - LEFT, 0), BLOCK_N)
    if RIGHT >= 0:
        end = tl.minimum(end, diagonal + BLOCK_M + RIGHT)
        whole_end = tl.maximum(tl.minimum(N_kv, diagonal + 1 + RIGHT), 0) // BLOCK_N
    begin = begin // BLOCK_N
    end = tl.cdiv(tl.maximum(end, 0), BLOCK_N)
    return begin, end, whole, whole_end, diagonal


@triton.jit
def tiles_of(PART: tl.constexpr, begin, end, whole, whole_end, MASK: tl.constexpr):
    """First and last + 1 of the tiles of a part, by what `tiles_in_sight` says."""
    if PART == LEFT_EDGE:
        return begin, tl.minimum(whole, end)
    elif PART == FULL:
        return whole, whole_end
    else:
        return begin if MASK > 0 else tl.maximum(whole, whole_end), end


@triton.jit
def listed_tiles(
    Counts, Indices, row, width, BLOCK_KV: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Where the row-th list of blocks begins, and how many tiles it names. A count beyond the
    list's width counts as the width."""
    count = tl.maximum(tl.minimum(tl.load(Counts + row), width), 0)
    return Indices + row * width, count * (BLOCK_KV // BLOCK_N)


@triton.jit
def hide(
    x, mask_ptrs, rows, here, column, N_q, N_kv,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, MASK: tl.constexpr, ADDITIVE: tl.constexpr,
):  # fmt: skip
    """x, scores in log2 units of BLOCK_M rows and BLOCK_N columns in any shape, with what the mask
    adds, and -inf where band or mask hide the key. here [BLOCK_M]: the keys at the rows' places."""
    BLOCK_M: tl.constexpr = rows.shape[0]
    BLOCK_N: tl.constexpr = column.shape[0]
    keep = (column < N_kv)[None, :]
    if LEFT >= 0:
        keep = keep & (column[None, :] >= here[:, None] - LEFT)
    if RIGHT >= 0:
        keep = keep & (column[None, :] <= here[:, None] + RIGHT)
    if MASK > 0:
        inside = (column < N_kv)[None, :]
        if MASK == 2:
            inside = inside & (rows < N_q)[:, None]
        a = tl.load(mask_ptrs, mask=inside, other=0)
        if ADDITIVE:
            # The lowest number of bf16 or fp32 hides as one among others; alone in a row it does
            # not. So it has to stay finite in log2 units.
            if a.dtype == tl.float16:
                a = a.to(tl.float32) * LOG2E
            else:
                a = a.to(tl.float32)
                a = tl.where(a > -float("inf"), tl.maximum(a * LOG2E, _LOWEST), a)
            x = x + a.broadcast_to([BLOCK_M, BLOCK_N]).reshape(x.shape)
        else:
            keep = keep & (a != 0)
    keep = keep.broadcast_to([BLOCK_M, BLOCK_N])
    return tl.where(keep.reshape(x.shape), x, -float("inf"))


@triton.jit
def how_often(
    Counts, Indices, row, width, start, blocks, here, CHUNK: tl.constexpr, READ: tl.constexpr
):  # fmt: skip
    """How often the row-th list of the caller's names each of CHUNK blocks from start. An index
    beyond the keys names none. A count beyond the list's width is the width. here: there is such a
    row."""
    count = tl.minimum(tl.load(Counts + row, here, 0), width)
    found = tl.zeros([CHUNK], tl.int32)
    for first in range(0, count, READ):
        n = first + tl.arange(0, READ)
        block = tl.maximum(tl.load(Indices + row * width + n, n < count, blocks), 0)
        inside = (start <= block) & (block < tl.minimum(start + CHUNK, blocks))
        found += tl.histogram(tl.where(inside, block - start, 0), CHUNK, inside)
    return found
