"""Which blocks of keys a tile of queries reads, where it reads less than all.

A code for block j and the 64 rows of a warpgroup says what the rows see of it,

    0   nothing: the warpgroup passes its turn on
    1   a part: it computes with band and mask
    2   a part, whatever the band says: it computes with the mask, up to the last key
    3   all

Producer and warpgroups walk the same blocks. With a band alone these are the blocks from the first
to the last that any row of the tile sees. With a mask, or with the caller's lists of blocks, each
tile has a list of the blocks that its warpgroups see, which kernels here make before. They also
pack the mask into bits (a thread of a wgmma accumulator reads a word for 8 of its scores), and rank
the tiles by the lengths of their lists, so that programs get equal work.

    List[head, m] = whole, count, tile, 64 j + 4^wg codes of each of count blocks j

With a tail (BlockLists.tail_block) there are words between tile and the entries: for each warpgroup
in turn, of the keys of the tail that its rows see, as the mask's words are; then whether any does.

The first `whole` blocks are those of which all warpgroups see all. They are at the row's beginning,
the others at its end, in reverse order. tile: the index of the tile with the m-th shortest list in
this head; unrelated to the tile of this row.
"""

import triton
import triton.language as tl

from sage_inductor.ops.attention.visible_tiles import how_often, tiles_in_sight

BEFORE_ENTRIES = tl.constexpr(3)  # numbers of a row of List


@triton.jit
def lists_of(b, h, ctx):
    """A head's List."""
    return ctx.List + b.to(tl.int64) * ctx.stride_lb + h.to(tl.int64) * ctx.stride_lh


@triton.jit
def walk(b, h, row, ctx):
    """The first block that the tile of BLOCK_M rows from `row` reads, as `block_of` takes it
    (LISTED: where the head's lists have it), how many it reads whole (LISTED; else 0) and how many
    in all."""
    if ctx.LISTED:
        here = lists_of(b, h, ctx) + (row // ctx.BLOCK_M).to(tl.int64) * ctx.stride_lm
        first = here + BEFORE_ENTRIES
        if ctx.TAIL_BLOCK:
            first += tail_words(ctx.N_kv, ctx.TAIL_BLOCK) * (ctx.BLOCK_M // 64) + 1
        return first, tl.load(here), tl.load(here + 1)
    else:
        begin, end, _, _, _ = tiles_in_sight(
            row, row, ctx.N_q, ctx.N_kv, ctx.LEFT, ctx.RIGHT, ctx.BOTTOM_RIGHT, 0, ctx.BLOCK_M,
            ctx.BLOCK_N,
        )  # fmt: skip
        read_all = tl.maximum(end - begin, 0)
        return begin, 0, read_all


@triton.jit
def tail_words(N_kv, TAIL_BLOCK: tl.constexpr):
    """Words of a warpgroup: of whole tiles of 128 keys of the tail."""
    return tl.cdiv(N_kv, TAIL_BLOCK * 128) * 4


@triton.jit
def tail_of(first, wg, ctx):
    """(TAIL_BLOCK) How many blocks of the tail a tile reads that walks from `first`, and where a
    warpgroup's words are."""
    words = tail_words(ctx.N_kv, ctx.TAIL_BLOCK)
    of_all = tl.cdiv(tl.cdiv(ctx.N_kv, ctx.TAIL_BLOCK), ctx.BLOCK_N)
    here = first - 1 - words * (ctx.BLOCK_M // 64 - wg)
    return tl.where(tl.load(first - 1) != 0, of_all, 0), here


@triton.jit
def band_code(
    j, row, N_q, N_kv,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The code of block j (or of each of them) for the 64 rows from `row`, by the band alone."""
    begin, end, whole, whole_end, _ = tiles_in_sight(
        row, row, N_q, N_kv, LEFT, RIGHT, BOTTOM_RIGHT, 0, 64, BLOCK_N
    )
    some = (begin <= j) & (j < end) & (row < N_q)
    return tl.where(some, tl.where((whole <= j) & (j < whole_end), 3, 1), 0)


@triton.jit
def entry_of(first, n, whole, ctx):
    """The n-th entry of a list; any number if n is beyond the last, by as many as a step reads."""
    place = ctx.stride_lm - (BEFORE_ENTRIES + 1) - (n - whole)
    if ctx.TAIL_BLOCK:
        place -= tail_words(ctx.N_kv, ctx.TAIL_BLOCK) * (ctx.BLOCK_M // 64) + 1
    place = tl.where(n < whole, n, place)
    return tl.load(first + place)


@triton.jit
def block_of(first, n, entry, wg, row, ctx):
    """The n-th block of a walk from `first`, and its code for warpgroup wg, whose rows are those
    from `row`. entry: what a list has there."""
    if ctx.LISTED:
        return entry >> 6, (entry >> (2 * wg)) & 3
    else:
        return first + n, band_code(
            first + n, row, ctx.N_q, ctx.N_kv, ctx.LEFT, ctx.RIGHT, ctx.BOTTOM_RIGHT, ctx.BLOCK_N
        )


# -- what mask and lists show, once before the kernel ----


@triton.jit
def _pack_mask_kernel(
    Mask,  # [B or 1, H_q or 1, N_q or 1, N_kv] bool in
    Words,  # [heads, 64 * row_tiles or 1, words] int32 out: bit c of word w shows key 32 w + c
    Codes,  # [heads, row_tiles, blocks] uint8 out
    stride_mb, stride_mh, stride_mm, stride_mn,
    H, N2_q, N2_kv, row_tiles, blocks, words,  # H: of the mask. N2: 2 N
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid: (heads * row_tiles * blocks,), heads of the mask: ROWS (64, or one row for all) queries
    and BLOCK_N keys each."""
    N_q, N_kv = N2_q // 2, N2_kv // 2
    j = tl.program_id(0) % blocks
    tile = (tl.program_id(0) // blocks % row_tiles).to(tl.int64)
    head = (tl.program_id(0) // blocks // row_tiles).to(tl.int64)
    row = tile * ROWS + tl.arange(0, ROWS)
    column = j * BLOCK_N + tl.arange(0, BLOCK_N)
    here = row[:, None] < (N_q if ROWS > 1 else 1)
    mask = Mask + head // H * stride_mb + head % H * stride_mh + row[:, None] * stride_mm
    shown = tl.load(
        mask + column[None, :].to(tl.int64) * stride_mn, mask=here & (column < N_kv)[None, :],
        other=0,
    )  # fmt: skip
    bits = (shown != 0).to(tl.int32).reshape([ROWS, BLOCK_N // 32, 32]) << tl.arange(0, 32)
    found = tl.sum(bits, 2)  # [ROWS, BLOCK_N / 32]
    word = j * (BLOCK_N // 32) + tl.arange(0, BLOCK_N // 32)
    rows = (head * row_tiles * ROWS + row) * words
    tl.store(Words + rows[:, None] + word[None, :], found)
    some = tl.max(tl.max((found != 0).to(tl.int32), 1), 0)
    every = tl.min(tl.min(((found == -1) | (row[:, None] >= N_q)).to(tl.int32), 1), 0)
    tl.store(
        Codes + (head * row_tiles + tile) * blocks + j, (some + 2 * (some & every)).to(tl.uint8)
    )


@triton.jit
def _store_unnamed(
    named, words, start, N_kv, BLOCK_KV: tl.constexpr, TAIL_BLOCK: tl.constexpr
):  # fmt: skip
    """The words of the tail from the start-th of the caller's blocks on, of which some are `named`
    [CHUNK]. Whether it has a key."""
    CHUNK: tl.constexpr = named.shape[0]
    PARTS: tl.constexpr = BLOCK_KV // TAIL_BLOCK
    some = 0
    for nth in tl.static_range(PARTS):
        t = nth * CHUNK + tl.arange(0, CHUNK)
        here = start * PARTS + t < tl.cdiv(N_kv, TAIL_BLOCK)
        free = (here & (tl.gather(named, t // PARTS, 0) == 0)).to(tl.int32)
        word = (start * PARTS + nth * CHUNK) // 32 + tl.arange(0, CHUNK // 32)
        bits = tl.sum(free.reshape([CHUNK // 32, 32]) << tl.arange(0, 32), 1)
        tl.store(words + word, bits, word < tail_words(N_kv, TAIL_BLOCK))
        some = tl.maximum(some, tl.max(free, 0))
    return some


@triton.jit
def _list_tiles_kernel(
    Codes,  # as above, in; if MASK
    Kv_count, Kv_index, Full_count, Full_index,  # the caller's, as ../triton.py has them
    List,  # [B or 1, H or 1, num_m, width] int32 out, but for the tiles by length
    stride_cb, stride_ch, stride_kb, stride_kh, kv_width, full_width,
    H, N2_q, N2_kv, num_m, row_tiles, blocks, width,  # H: of List. blocks: of BLOCK_N keys
    LEFT: tl.constexpr, RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, MASK: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, FULL: tl.constexpr,  # 0: there are no lists
    TAIL_BLOCK: tl.constexpr,  # 0: there is no tail
    WARPGROUPS: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid: (heads of List * num_m,). The blocks of which a tile sees something. One that a list
    names twice is there twice."""
    N_q, N_kv = N2_q // 2, N2_kv // 2
    PARTS: tl.constexpr = BLOCK_KV // BLOCK_N if BLOCK_KV else 1  # of a block of the caller's
    head, m = (tl.program_id(0) // num_m).to(tl.int64), tl.program_id(0) % num_m
    b, h = head // H, head % H
    if MASK:
        Codes += b * stride_cb + h * stride_ch
    here = List + tl.program_id(0).to(tl.int64) * width
    EVERY: tl.constexpr = 4**WARPGROUPS - 1  # all codes are 3
    wholes, parts = 0, 0  # entries so far
    room, some = 0, 0
    if TAIL_BLOCK:
        room = tail_words(N_kv, TAIL_BLOCK) * WARPGROUPS + 1
    for start in range(0, tl.cdiv(blocks, PARTS), CHUNK):
        k, most = 0, 1
        while k < most:  # the k-th time that a list names a block
            for nth in tl.static_range(PARTS):
                j = (start + tl.arange(0, CHUNK)) * PARTS + nth
                codes = tl.zeros([CHUNK], tl.int32)
                for wg in tl.static_range(WARPGROUPS):
                    row = (m * WARPGROUPS + wg) * 64
                    code = band_code(j, row, N_q, N_kv, LEFT, RIGHT, BOTTOM_RIGHT, BLOCK_N)
                    if MASK:
                        row_tile = tl.minimum(m * WARPGROUPS + wg, row_tiles - 1)
                        shown = tl.load(Codes + row_tile.to(tl.int64) * blocks + j, j < blocks, 0)
                        shown = shown.to(tl.int32)
                        code &= shown
                    if BLOCK_Q:
                        if wg == 0 or BLOCK_Q % (64 * WARPGROUPS) != 0:  # else they share a list
                            listed = b * stride_kb + h * stride_kh + row // BLOCK_Q
                            of_all = tl.cdiv(blocks, PARTS)
                            partial = how_often(
                                Kv_count, Kv_index, listed, kv_width, start, of_all, row < N_q,
                                CHUNK, 256,
                            )  # fmt: skip
                            full = tl.zeros([CHUNK], tl.int32)
                            if FULL:
                                full = how_often(
                                    Full_count, Full_index, listed, full_width, start, of_all,
                                    row < N_q, CHUNK, 256,
                                )  # fmt: skip
                            most = tl.maximum(most, tl.max(full + partial, 0))
                        if TAIL_BLOCK and nth == 0:
                            words = here + BEFORE_ENTRIES + wg * tail_words(N_kv, TAIL_BLOCK)
                            left = _store_unnamed(
                                full + partial, words, start, N_kv, BLOCK_KV, TAIL_BLOCK
                            )
                            some = tl.where(row < N_q, tl.maximum(some, left), some)
                        of_full = band_code(j, row, N_q, N_kv, -1, -1, False, BLOCK_N)
                        if MASK:
                            of_full &= shown
                        of_full = tl.where(of_full == 1, 2, of_full)
                        code = tl.where(k < full + partial, code, 0)
                        code = tl.where(k < full, of_full, code)
                    codes |= code << (2 * wg)
                entry, whole = j * 64 + codes, (codes == EVERY).to(tl.int32)
                place = BEFORE_ENTRIES - 1 + room + wholes + tl.cumsum(whole, 0)
                tl.store(here + place, entry, whole != 0)
                wholes += tl.sum(whole, 0)
                part = ((codes != EVERY) & (codes != 0)).to(tl.int32)
                place = width - parts - tl.cumsum(part, 0)
                tl.store(here + place, entry, part != 0)
                parts += tl.sum(part, 0)
            k += 1
    if TAIL_BLOCK:
        tl.store(here + BEFORE_ENTRIES - 1 + room, some)
    tl.store(here, wholes)
    tl.store(here + 1, wholes + parts)


@triton.jit
def _rank_tiles_kernel(
    List,  # as above, in; the tiles by length out
    num_m, width,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid: (heads of List, cdiv(num_m, CHUNK))."""
    lists = List + tl.program_id(0).to(tl.int64) * num_m * width
    m = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    count = tl.load(lists + m.to(tl.int64) * width + 1, m < num_m, 0)
    rank = tl.zeros([CHUNK], tl.int32)
    for start in range(0, num_m, CHUNK):
        n = start + tl.arange(0, CHUNK)
        other = tl.load(lists + n.to(tl.int64) * width + 1, n < num_m, 0x7FFFFFFF)
        first = (other[None, :] == count[:, None]) & (n[None, :] < m[:, None])
        rank += tl.sum(((other[None, :] < count[:, None]) | first).to(tl.int32), 1)
    tl.store(lists + rank.to(tl.int64) * width + 2, m, m < num_m)
