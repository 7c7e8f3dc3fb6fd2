"""Which blocks of keys a tile of queries reads, where a band shows it less than all.

Of block j and the 64 rows of a warpgroup a code says what is in sight,

    0   nothing: the warpgroup passes its turn on
    1   a part: it computes with a mask
    3   all

so that the code of two things that both must show a key is that of one `and` that of the other.
Producer and warpgroups walk the same blocks: by a band alone those from the first to the last in
sight of any row of the tile; by a mask those of a list, which two kernels make of it before. They
also pack the mask into bits: a thread of a wgmma accumulator reads a word for 8 of its scores.
"""

import triton
import triton.language as tl

from sage_inductor.ops.attention.visible_tiles import tiles_in_sight


@triton.jit
def walk(
    List, row, blocks, N_q, N_kv,
    BAND: tl.constexpr, MASK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The first block that the tile of BLOCK_M rows from `row` reads, as `block_of` takes it (MASK:
    where the head's List has it), and how many it reads."""
    if MASK:
        here = List + (row // BLOCK_M).to(tl.int64) * (blocks + 1)
        return here + 1, tl.load(here)
    else:
        begin, end, _, _, _ = tiles_in_sight(
            row, row, N_q, N_kv, BAND[0], BAND[1], BAND[2], 0, BLOCK_M, BLOCK_N
        )
        return begin, tl.maximum(end - begin, 0)


@triton.jit
def band_code(j, row, N_q, N_kv, BAND: tl.constexpr, BLOCK_N: tl.constexpr):
    """The code of block j (or of each of them) for the 64 rows from `row`, by the band alone."""
    begin, end, whole, whole_end, _ = tiles_in_sight(
        row, row, N_q, N_kv, BAND[0], BAND[1], BAND[2], 0, 64, BLOCK_N
    )
    some = (begin <= j) & (j < end) & (row < N_q)
    return tl.where(some, tl.where((whole <= j) & (j < whole_end), 3, 1), 0)


@triton.jit
def block_of(
    first, n, wg, row, N_q, N_kv,
    BAND: tl.constexpr, MASK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The n-th block of a walk from `first`, and its code for warpgroup wg, whose rows are those
    from `row`."""
    if MASK:
        entry = tl.load(first + n)
        return entry >> 6, (entry >> (2 * wg)) & 3
    else:
        return first + n, band_code(first + n, row, N_q, N_kv, BAND, BLOCK_N)


# -- what a mask shows, once before the kernel ----


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
def _list_blocks_kernel(
    Codes,  # as above, in
    List,  # [heads, num_m, blocks + 1] int32 out: how many, then 64 j + 4^wg codes of each block j
    N2_q, N2_kv, num_m, row_tiles, blocks,
    BAND: tl.constexpr, WARPGROUPS: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid: (heads * num_m,). The blocks of which a tile sees something, in their order."""
    N_q, N_kv = N2_q // 2, N2_kv // 2
    head, m = (tl.program_id(0) // num_m).to(tl.int64), tl.program_id(0) % num_m
    here = List + tl.program_id(0).to(tl.int64) * (blocks + 1)
    count = 0
    for start in range(0, blocks, CHUNK):
        j = start + tl.arange(0, CHUNK)
        codes = tl.zeros([CHUNK], tl.int32)
        for wg in tl.static_range(WARPGROUPS):
            row_tile = tl.minimum(m * WARPGROUPS + wg, row_tiles - 1)
            code = tl.load(Codes + (head * row_tiles + row_tile) * blocks + j, j < blocks, 0)
            row = (m * WARPGROUPS + wg) * 64
            code = code.to(tl.int32) & band_code(j, row, N_q, N_kv, BAND, BLOCK_N)
            codes |= code << (2 * wg)
        found = (codes != 0).to(tl.int32)
        place = 1 + count + tl.cumsum(found, 0) - found
        tl.store(here + place, j * 64 + codes, found != 0)
        count += tl.sum(found, 0)
    tl.store(here, count)
