"""The attention kernel of ../triton.py for Hopper, in Gluon: the same recipe, scheduled by hand.

One program runs on each SM: a producer warp fetches k and v by TMA into a ring of shared memory
(ring.py), and two or three warpgroups of 64 rows each compute. A program takes every
num_programs-th tile. Tiles that do not go round are split between the programs.

* The warpgroups take turns at the tensor cores (`order`). While one multiplies p v and then the
  next q k^T, the others are in their softmax.
* q is quantized here, with one scale a row: a thread of a wgmma accumulator holds whole rows. k has
  one scale per 64 rows. For causal training (OWN) k is quantized a second time, with one scale a
  row. That costs a multiplication per score, so only blocks at the diagonal use it (_first_own).
* A step of the loop is a block of BLOCK_N keys. By lists of smaller blocks it is READS blocks of
  READ_N: two of 64, side by side in a place of the ring.
* q of the next tile is loaded before o of this one is stored.
* Scores are scaled in the exponential, by an fma. So in FP8 the scores of a row with a large
  maximum are made smaller before, by its `flatness` (../large_scores.py): 8 instructions of a
  thread's 500 a block.
* One warpgroup (ALONE: short calls, windows) is a program that computes one tile and fetches k and
  v itself. Several share an SM and hide each other's beginnings and ends, so there are no turns.
* Strides arrive doubled (launch.py). The offset is halved instead: halved strides would be in
  registers through the loop, and 16-bit causal would spill 18 instead of 12.

Flags, and what each needs:

    LEFT, RIGHT, BOTTOM_RIGHT    the band; -1, -1, False: none
    CAUSAL     RIGHT is 0        SDPA's is_causal, unless BOUNDED
    BOUNDED    LISTED, or a band other than is_causal's: blocks have codes (tile_lists.py)
    LISTED     a tile reads the blocks of its list, of this many keys    anything but SPLIT
    MASK       scores are hidden by bits              LISTED, FP8
    SPLIT      some tiles are split                   no band, not LISTED, 2 or 3 warpgroups
    FP8        p and v are in FP8, else in 16 bits    without it BLOCK_DV <= 128
    OWN        k has a scale a row at the diagonal    CAUSAL, not BOUNDED
    TAIL_BLOCK keys that one of the tail stands for   LISTED, no band
    ROTATED, KEEPS_MAX                                anything
    Perm         q and o in another order: layout.py  LISTED, not KEEPS_MAX
    Documents    ... which has places without a token; lse is of places    Perm, FP8

    part     what the rows of a warpgroup see of its blocks       variants
    FULL     all                                                  all but a band without lists
    EDGE     some: the diagonal, the last keys                    not BOUNDED
    CODED    what a block's code says                             BOUNDED
    TAIL     keys of the tail that their list leaves out          TAIL_BLOCK

Calls for which this schedule is not worth it (tiles.py) use triton.py. So do all calls if the
installed Triton is none of compat.GLUON, because Gluon is experimental.
"""

# ruff: noqa: F841  (what `context` reads)
import collections

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sage_inductor.ops.attention.hopper.ring import context, make_ring
from sage_inductor.ops.attention.hopper.tile_lists import (
    block_of,
    entry_of,
    lists_of,
    tail_of,
    walk,
)
from sage_inductor.ops.attention.large_scores import flatness
from sage_inductor.ops.attention.visible_tiles import CODED, EDGE, FULL, TAIL
from sage_inductor.ops.compat import gluon_barrier, reinterpret, tma_load
from sage_inductor.ops.constants import INT8_MAX, LN2, LOG2_FP8_MAX, LOG2E, TINY
from sage_inductor.ops.layout import is_token, token_of
from sage_inductor.ops.quantize.rotate import butterflies, odd_of

_ROUND = gl.constexpr(12582912.0)  # 1.5 * 2^23
_LEAST = gl.constexpr(2.0**-46)  # of a scale: what it makes of codes is 0 beside 1


# A tile's batch, heads and first row; if BOUNDED, what `walk` says of the blocks that it reads.
# of_tail: blocks of the tail, where a program fetches them itself.
Tile = collections.namedtuple("Tile", "b h h_kv row first_block whole count of_tail")
# A warpgroup's turn at the tensor cores: its barrier and phase, the next warpgroup's barrier, and
# that of the place in the ring which is free then, if any is.
Turn = collections.namedtuple("Turn", "own phase next read any_read")
# A warpgroup's part of a tile: its first row; the tile's first block; how many blocks the ring held
# and turns it had before; its mask; k's scales; q's scales, one a row.
Rows = collections.namedtuple("Rows", "row0 begin fetched taken words k_scale q_scale")


@gluon.jit
def _exp2(x):
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _to_fp8(x):
    """Four at a time, in place: Triton's own conversion adds a byte permutation for each."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1;"
        " cvt.rn.satfinite.e4m3x2.f32 b, $4, $3; mov.b32 $0, {a, b}; }",
        "=r,f,f,f,f", [x], dtype=gl.float8e4nv, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def _pin(l):
    """l [64, 4], two sums a thread, at least 0 or NaN. ptxas moves no later wait ahead of it.

    A wait for a barrier holds one of the six scoreboards of a warp. Moved up among exponentials, it
    may share one with them: then those that follow wait for the warpgroup's turn, too. Which
    variants that hits is luck. In 16 bits with head_dim 128 it hit one (rotated, split tiles: 10 %
    at Flux), and this slows down no other. FP8 and head_dim 64 it slows down by 0 to 6 %: a wait
    that shares no scoreboard is best begun early. Head_dim 256 was not timed. (H200, Triton 3.6,
    2026-11-28)"""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.f32 p, $3, 0f00000000; @p nanosleep.u32 0;"
        " mov.b32 $0, $2; mov.b32 $1, $3; }",
        "=r,=r,r,r", [l], dtype=gl.float32, is_pure=False, pack=2,
    )  # fmt: skip


@triton.jit
def _head_and_tile(t, num_m, heads, group):
    """Tile t -> its head, and which of the head's tiles by length it is. Heads of a group are
    scheduled together, because their k and v share L2: in one group from short tiles to long ones,
    in the next from long to short, as in the last. A single head has every other tile on the way
    up, the rest on the way down. So programs that stride by num_programs get equal work."""
    g = t // (group * num_m)
    r = t - g * group * num_m
    size = tl.minimum(group, heads - g * group)
    m = r // size
    head = g * group + r - m * size
    if ((heads - 1) // group - g) % 2 == 0:
        m = num_m - 1 - m
    if heads == 1:
        m = tl.minimum(2 * m, 2 * (num_m - m) - 1)
    return head, m


@gluon.jit
def _num_blocks(row_end, N_kv, ctx):
    """Blocks of keys that the rows before row_end see."""
    end = N_kv
    if ctx.CAUSAL:
        end = gl.minimum(end, row_end)
    return (end + ctx.BLOCK_N - 1) // ctx.BLOCK_N


@gluon.jit
def _first_own(row, BLOCK_N: gl.constexpr):
    """(OWN) The first block of keys that a tile reads from K_own. row: the tile's first. It is the
    same key for blocks of 128 and of 64."""
    return row // 128 * (128 // BLOCK_N)


@gluon.constexpr_function
def _rows_layout(width):
    """[64, width] of 16 bits for memory: 16 bytes a thread, and the rows of a thread are those it
    has of a wgmma accumulator, so that what belongs to a row needs no exchange."""
    columns = [[0, 2**i] for i in range(5, width.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], *columns, [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, width],
    )


@triton.jit
def _streamk_share(program, programs, blocks):
    """The first of the blocks that a program gets."""
    return (program.to(tl.int64) * blocks // programs).to(tl.int32)


@gluon.jit
def _work_items(num_tiles, blocks, ctx):
    """(whole tiles, pieces of tiles, first and last + 1 of the blocks they are) of this program.

    The first whole_tiles go round; all blocks of the others are dealt out in equal, consecutive
    shares, so that no program waits for one more round (Stream-K, arXiv:2301.03598)."""
    programs = gl.num_programs(0)
    count = gl.maximum((ctx.whole_tiles - gl.program_id(0) + programs - 1) // programs, 0)
    lo = _streamk_share(gl.program_id(0), programs, (num_tiles - ctx.whole_tiles) * blocks)
    hi = _streamk_share(gl.program_id(0) + 1, programs, (num_tiles - ctx.whole_tiles) * blocks)
    pieces = gl.where(hi > lo, (hi - 1) // blocks - lo // blocks + 1, 0)
    return count, pieces, lo, hi


@gluon.jit
def _work_item(k, count, lo, hi, blocks, ctx):
    """Item k of this program -> (tile, first block, last block + 1)."""
    t = gl.program_id(0) + k * gl.num_programs(0)
    begin, end = 0, blocks
    if k >= count:
        n = lo // blocks + k - count
        t = ctx.whole_tiles + n
        begin = gl.maximum(lo - n * blocks, 0)
        end = gl.minimum(hi - n * blocks, blocks)
    return t, begin, end


@gluon.jit
def _load_q(b, h, row0, ctx):
    L: gl.constexpr = _rows_layout(ctx.BLOCK_D)
    rows = row0 + gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    d = gl.arange(0, ctx.BLOCK_D, layout=gl.SliceLayout(0, L))
    q = ctx.Q + ((b.to(gl.int64) * ctx.stride_qb + h.to(gl.int64) * ctx.stride_qh) >> 1)
    token = token_of(ctx.Perm, rows, ctx.N_q)
    q = q + ((token.to(gl.int64) * ctx.stride_qn) >> 1)[:, None] + d[None, :]
    here = is_token(ctx.Perm, token, rows, ctx.N_q)
    return gl.load(q, mask=here[:, None] & (d < ctx.D)[None, :], other=0.0)


@gluon.jit
def _max_or_nan(a, b):
    return gl.maximum(a, b, tl.PropagateNan.ALL)


@gluon.jit
def _rotate(q, D: gl.constexpr):
    """quantize/rotate.py's `rotate` of q [64, D], within each thread and its matrix products: the
    layout of q is that of the result."""
    A: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    H: gl.constexpr = gl.DotOperandLayout(1, A, 2)
    # channel = 128 b + 32 i + 8 t + 4 j + 2 h + e; of the product 8 h + 2 t + e
    B: gl.constexpr = (D + 127) // 128
    I: gl.constexpr = D // B // 32
    x = q.reshape([64, B, I, 4, 2, 2, 2]).permute([2, 4, 1, 0, 5, 3, 6]).reshape([4 * D, 16])
    x = gl.convert_layout(x, gl.DotOperandLayout(0, A, 2), assert_trivial=True)
    k = gl.arange(0, 16, layout=gl.SliceLayout(1, H))
    n = gl.arange(0, 16, layout=gl.SliceLayout(0, H))
    odd = odd_of(gl.expand_dims(_as_in_rotate(k), 1), gl.expand_dims(_as_in_rotate(n), 0))
    h = (1.0 - 2.0 * odd.to(gl.float32)).to(q.dtype)
    y = mma_v2(x, h, gl.full([4 * D, 16], 0.0, gl.float32, A))
    y = butterflies(y.reshape([I // 2, 2, 2, 64 * B, 16]).permute([0, 3, 4, 1, 2]), I)
    y = y.reshape([I // 2, B, 64, 2, 4, 2, 2, 2]).permute([2, 1, 0, 6, 4, 7, 3, 5])
    y = y.reshape([64, D])
    return gl.convert_layout(y, q.type.layout, assert_trivial=True)


@gluon.jit
def _as_in_rotate(k):
    """8 h + 2 t + e -> 4 t + 2 h + e."""
    return (k & 6) << 1 | (k & 8) >> 2 | (k & 1)


@gluon.jit
def _quantize_q(q, q_smem, ctx):
    """q [64, BLOCK_D] -> INT8 in q_smem; returns scale [64] with SCALE * log2 e in it."""
    SCALE: gl.constexpr = ctx.SCALE
    x = _rotate(q, ctx.BLOCK_D) if ctx.ROTATED else q.to(gl.float32)
    amax = gl.reduce(gl.abs(x), 1, _max_or_nan)
    amax = gl.where(amax < TINY, TINY, amax)
    inverse = gl.div_rn(gl.full_like(amax, INT8_MAX), amax)
    # The sign of SCALE goes into q: the row maximum is taken before scaling.
    inverse = inverse if SCALE >= 0 else -inverse
    factor = gl.expand_dims(inverse, 1) + gl.zeros_like(x)
    # The low byte of the sum is the rounded product: no conversion, which runs at 1/8 speed. Bytes
    # are packed here, 16 of a row a thread: single ones ptxas gets wrong (codes.to_8bit).
    rounded = gl.fma(x, factor, gl.full_like(x, _ROUND))
    q_smem.store(rounded.to(gl.int32, bitcast=True).to(gl.int8))
    fence_async_shared()
    gluon_barrier()
    scale = amax * (1.0 / INT8_MAX) * ((SCALE if SCALE >= 0 else -SCALE) * LOG2E)
    return gl.where(amax < float("inf"), scale, float("nan"))


@gluon.jit
def _entry(n, tile, ctx):
    """The n-th entry of a tile's list. One beyond the last is nothing of block 0."""
    entry = entry_of(tile.first_block, n, tile.whole, ctx)
    if ctx.READS > 1:
        entry = gl.where(n < tile.count, entry, 0)
    return entry


@gluon.jit
def _fetch(n, end, i, head_kv, tile, ctx):
    """The n-th block of k and v that a tile reads, or READS of its list, unless that is its end,
    into the ring's place for the i-th."""
    stage, reads = i % ctx.STAGES, n < end
    bar = ctx.ring.full.index(stage)
    of_scales: gl.constexpr = 4 * ctx.BLOCK_N if ctx.OWN else 0
    of_kv: gl.constexpr = ctx.READS * (ctx.K.block_type.nbytes + ctx.V.block_type.nbytes)
    mbarrier.expect(bar, of_kv + of_scales, pred=reads)
    for nth in gl.static_range(ctx.READS):
        j = n
        if ctx.BOUNDED:
            entry = 0
            if ctx.LISTED:
                last = gl.maximum(end - 1, 0)
                entry = _entry(gl.minimum(n, last) * ctx.READS + nth, tile, ctx)
            j, _ = block_of(tile.first_block, n, entry, 0, tile.row, ctx)
        row_k, k = head_kv * ctx.N_pad + j * ctx.READ_N, _place(ctx.k_smem, stage, nth, ctx)
        if ctx.OWN:
            own = j >= _first_own(tile.row, ctx.BLOCK_N)
            tma_load(ctx.K, [row_k, 0], bar, k, pred=reads & (own == 0))
            tma_load(ctx.K_own, [row_k, 0], bar, k, pred=reads & own)
            tma_load(ctx.K_own_scale, [row_k], bar, ctx.scale_smem.index(stage), pred=reads)
        else:
            tma_load(ctx.K, [row_k, 0], bar, k, pred=reads)
        _fetch_v(ctx.V, j, stage, nth, head_kv, tile, reads, ctx)


@gluon.jit
def _fetch_next(n, end, i, head_kv, tile, ctx):
    """(ALONE) `_fetch`, and after the end the blocks of the tail."""
    _fetch(n, end, i, head_kv, tile, ctx)
    if ctx.TAIL_BLOCK:
        if (n >= end) & (n < end + tile.of_tail):
            _fetch_tail(n - end, i, head_kv, tile, ctx)


@gluon.jit
def _place(smem, stage, nth: gl.constexpr, ctx):
    """Where the nth of READS blocks is in a stage of k or v."""
    return smem.index(stage * ctx.READS + nth)


@gluon.jit
def _fetch_v(V, j, stage, nth: gl.constexpr, head_kv, tile, reads, ctx):
    bar, v = ctx.ring.full.index(stage), _place(ctx.v_smem, stage, nth, ctx)
    if ctx.FP8:
        tma_load(V, [head_kv * ctx.BLOCK_DV, j * ctx.READ_N], bar, v, pred=reads)
    else:
        v = reinterpret(v, V.dtype, V.block_type.shape, V.layout)
        tma_load(V, [tile.b, tile.h_kv, j * ctx.READ_N, 0], bar, v, pred=reads)


@gluon.jit
def _padded_tail(ctx):
    """Keys of a head's tail and its padding."""
    return gl.cdiv(ctx.N_kv, ctx.TAIL_BLOCK * 128) * 128


@gluon.jit
def _fetch_tail(j, i, head_kv, tile, ctx):
    """As `_fetch`, the j-th block of the tail."""
    stage = i % ctx.STAGES
    bar = ctx.ring.full.index(stage)
    of_kv: gl.constexpr = ctx.READS * (ctx.K.block_type.nbytes + ctx.V.block_type.nbytes)
    mbarrier.expect(bar, of_kv + 4 * ctx.BLOCK_N)
    row_k = head_kv * _padded_tail(ctx)
    tma_load(ctx.Bias, [row_k + j * ctx.BLOCK_N], bar, ctx.bias_smem.index(stage))
    for nth in gl.static_range(ctx.READS):
        part = j * ctx.READS + nth
        k = _place(ctx.k_smem, stage, nth, ctx)
        tma_load(ctx.K_tail, [row_k + part * ctx.READ_N, 0], bar, k)
        _fetch_v(ctx.V_tail, part, stage, nth, head_kv, tile, True, ctx)


@gluon.jit
def _columns_below(limit, L5: gl.constexpr, BLOCKS: gl.constexpr):
    """limit [64] -> [64, blocks, 8, 4, 2]: column < limit. Constants of a register on the left, of
    a thread on the right: one comparison each."""
    E: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L5))))
    Q: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, L5))))
    C: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, gl.SliceLayout(4, L5))))
    B: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, L5))))
    even_odd = gl.arange(0, 2, layout=E)[None, None, None, None, :]
    quad = gl.arange(0, 4, layout=Q)[None, None, None, :, None]
    core = gl.arange(0, 8, layout=C)[None, None, :, None, None]
    block = gl.arange(0, BLOCKS, layout=B)[None, :, None, None, None]
    limit = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(limit, 1), 2), 3), 2)
    return block * 64 + core * 8 + even_odd < limit - quad * 2


@gluon.jit
def _hide_by_words(x, j, rows, PART: gl.constexpr, ctx):
    """`_hide` by the mask; in the TAIL by a row of words for all rows. A thread's constants of a
    register are on the right, as in `_columns_below`: a score takes one test of a bit."""
    L5: gl.constexpr = x.type.layout
    WORDS: gl.constexpr = 2 * x.shape[1]
    x = x.reshape([64, WORDS, 4, 4, 2])
    L: gl.constexpr = x.type.layout
    E: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    Q: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, L))))
    C: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, gl.SliceLayout(4, L))))
    W: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, L)))  # [64, words]
    even_odd = gl.arange(0, 2, layout=E)[None, None, None, None, :]
    quad = gl.arange(0, 4, layout=Q)[None, None, None, :, None]
    core = gl.arange(0, 4, layout=C)[None, None, :, None, None]
    row = rows.row0 + gl.arange(0, 64, layout=gl.SliceLayout(1, W))
    word = j * WORDS + gl.arange(0, WORDS, layout=gl.SliceLayout(0, W))
    if PART == TAIL:
        found = gl.expand_dims(gl.load(rows.words + word), 0)
    else:
        found = gl.load(rows.words + (row.to(gl.int64) * ctx.stride_wm)[:, None] + word[None, :])
    found = gl.expand_dims(gl.expand_dims(gl.expand_dims(found, 2), 3), 4) >> (quad * 2)
    x = gl.where((found & (1 << (core * 8 + even_odd))) != 0, x, -float("inf"))
    return gl.convert_layout(x.reshape([64, WORDS // 2, 8, 4, 2]), L5, assert_trivial=True)


@gluon.jit
def _hide(x, j, code, rows, ctx):
    """x [64, blocks, 8, 4, 2] fp32, of block j, with -inf where band (unless its code is 2) or mask
    hide a key."""
    L5: gl.constexpr = x.type.layout
    ROW: gl.constexpr = gl.SliceLayout(
        1, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(2, L5)))
    )
    BLOCKS: gl.constexpr = x.shape[1]
    if ctx.MASK:
        x = _hide_by_words(x, j, rows, CODED, ctx)
    limit = gl.full([64], ctx.N_kv, gl.int32, ROW)
    here = rows.row0 + gl.arange(0, 64, layout=ROW)
    if ctx.BOTTOM_RIGHT:
        here += ctx.N_kv - ctx.N_q
    if ctx.RIGHT >= 0:
        right = gl.minimum(limit, here + (ctx.RIGHT + 1))
        limit = gl.where(code == 2, limit, right) if ctx.LISTED else right
    if ctx.RIGHT >= 0 or not ctx.MASK:  # no bit shows a key beyond N_kv
        x = gl.where(_columns_below(limit - j * (64 * BLOCKS), L5, BLOCKS), x, -float("inf"))
    if ctx.LEFT >= 0:
        left = here - ctx.LEFT - j * (64 * BLOCKS)
        if ctx.LISTED:
            left = gl.where(code == 2, 0, left)
        x = gl.where(_columns_below(left, L5, BLOCKS), -float("inf"), x)
    return x


@gluon.jit
def _hide_each(x, blocks, codes, rows, ctx):
    """`_hide`, of READS blocks side by side, and all of one whose code is 0."""
    if ctx.READS == 1:
        x = _hide(x, blocks[0], codes[0], rows, ctx)
    else:
        L5: gl.constexpr = x.type.layout
        S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
        H5: gl.constexpr = gl.full([64, 64], 0, gl.int32, S).reshape([64, 1, 8, 4, 2]).type.layout
        parts, hidden = gl.split(x.permute([0, 2, 3, 4, 1])), ()
        for nth in gl.static_range(2):
            part = parts[nth].reshape([64, 1, 8, 4, 2])
            part = gl.convert_layout(part, H5, assert_trivial=True)
            part = _hide(part, blocks[nth], codes[nth], rows, ctx)
            part = gl.where(codes[nth] == 0, -float("inf"), part)
            hidden = hidden + (part.reshape([64, 8, 4, 2]),)
        x = gl.join(hidden[0], hidden[1]).permute([0, 4, 1, 2, 3])
        x = gl.convert_layout(x, L5, assert_trivial=True)
    return x


@gluon.jit
def _add_bias(x, bias):
    """x [64, blocks, 8, 4, 2] + bias [64 * blocks]."""
    S: gl.constexpr = bias.type.layout.parent
    flat = gl.convert_layout(x.reshape([64, bias.shape[0]]), S, assert_trivial=True)
    flat = (flat + bias[None, :]).reshape(x.shape)
    return gl.convert_layout(flat, x.type.layout, assert_trivial=True)


@gluon.jit
def _row_maximum(s):
    """[64, blocks, 8, 4, 2] -> [64, blocks, 4], of a thread."""
    return gl.max(gl.max(s, axis=2), axis=3)


@gluon.jit
def _softmax(x, c, highest, m, l, PART: gl.constexpr, FP8: gl.constexpr):
    """x [64, blocks, 8, 4, 2], c [64, blocks, 1], by which x of an EDGE or the TAIL is scaled
    already, the scores' maxima of a thread [64, blocks, 4], m [64], l [64, 4], a sum a thread -> p,
    m, l, alpha."""
    SCALED: gl.constexpr = PART == EDGE or PART == TAIL
    OFFSET: gl.constexpr = LOG2_FP8_MAX if FP8 else 0.0
    highest = gl.max(gl.max(highest, axis=1), axis=1)
    m_new = gl.maximum(m, gl.convert_layout(highest, m.type.layout, assert_trivial=True))
    shift = m_new
    # A row that has seen nothing yet has no maximum: m - m_new would be NaN.
    if PART == CODED or PART == TAIL:
        shift = gl.where(m_new == -float("inf"), 0.0, m_new)
    alpha = _exp2(m - shift)
    if FP8:
        flat = flatness(shift)
        shift = shift * flat - OFFSET
        c = flat[:, None, None] if SCALED else c * flat[:, None, None]
    if FP8 or not SCALED:
        x = x * gl.expand_dims(gl.expand_dims(c, 3), 2)
    shift = gl.expand_dims(gl.expand_dims(shift[:, None, None], 3), 2)
    p = _exp2(x - shift)  # an fma each
    total = gl.convert_layout(
        gl.sum(gl.sum(gl.sum(p, axis=2), axis=3), axis=1), l.type.layout, assert_trivial=True
    )
    l_alpha: gl.constexpr = gl.SliceLayout(1, l.type.layout)
    l = l * gl.expand_dims(gl.convert_layout(alpha, l_alpha, assert_trivial=True), 1) + total
    return p, m_new, l, alpha


@gluon.jit
def _add_pv(p, v, nth: gl.constexpr, o, alpha, ctx):
    """o * alpha + p v in FP8, in two levels: the tensor cores add up in 13 mantissa bits, so each
    product starts from zero. In 16 bits o + p v: o is scaled before the warpgroup's turn. p, v:
    each of READS blocks, which are products of their own; v's nth CHUNK of channels."""
    product = o
    for i in gl.static_range(ctx.READS):
        part = v[i].slice(nth * ctx.CHUNK, ctx.CHUNK, dim=1)
        product = warpgroup_mma(p[i], part, product, use_acc=i > 0 or not ctx.FP8, is_async=True)
    product = warpgroup_mma_wait(0, [product])
    return o * alpha + product if ctx.FP8 else product


@gluon.jit
def _operands(p, P: gl.constexpr, ctx):
    """p [64, BLOCK_N], in registers for the tensor cores, of READS blocks of keys."""
    if ctx.READS == 1:
        found = (gl.convert_layout(p, P, assert_trivial=True),)
    else:
        first, second = gl.split(p.reshape([64, 2, 64]).permute([0, 2, 1]))
        found = (
            gl.convert_layout(first, P, assert_trivial=True),
            gl.convert_layout(second, P, assert_trivial=True),
        )
    return found


@gluon.jit
def _turn_after(j, wg: gl.constexpr, rows, ctx):
    """The turn of warpgroup wg after the one in which it begins with the tile's j-th block."""
    free, order = ctx.ring.free, ctx.order
    read = free.index((rows.fetched + j + ctx.STAGES - 1) % ctx.STAGES)
    next, any_read = order.index((wg + 1) % ctx.WARPGROUPS), j > rows.begin
    return Turn(order.index(wg), (rows.taken + j + 1) & 1, next, read, any_read)


@gluon.jit
def _pass_on(turn):
    """The turn; the last block, too, has been read."""
    mbarrier.arrive(turn.next, count=1)
    mbarrier.arrive(turn.read, count=1, pred=turn.any_read)


@gluon.jit
def _attend(
    PART: gl.constexpr, stage, block, code, k_scale, m, l, o, turn, wg: gl.constexpr, rows, ctx,
):  # fmt: skip
    """m, l and o after the j-th block of k and v that the tile reads, in two turns at the tensor
    cores: the one that this warpgroup has, which it passes on, and the next, which it keeps (ALONE:
    there are no turns). k_scale: of each 64 keys; if the codes are OWN, in shared memory, of each
    key."""
    BLOCK_N: gl.constexpr = ctx.BLOCK_N
    BLOCKS: gl.constexpr = BLOCK_N // 64
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    OROW: gl.constexpr = gl.SliceLayout(1, o[0].type.layout)
    P: gl.constexpr = gl.DotOperandLayout(0, o[0].type.layout, 4 if ctx.FP8 else 2)
    zero = gl.full([64, BLOCK_N], 0, gl.int32, S)
    k = ctx.k_smem
    if ctx.READS > 1:
        k = reinterpret(k, gl.int8, [ctx.STAGES, BLOCK_N, ctx.BLOCK_D], ctx.K.layout)
    k = k.index(stage).permute((1, 0))
    s = warpgroup_mma(ctx.q_smem.index(wg), k, zero, use_acc=False, is_async=True)
    if not ctx.ALONE:  # side by side: around each of them Triton lets the warpgroup wait for itself
        _pass_on(turn)
    s = warpgroup_mma_wait(0, [s])
    c = rows.q_scale[:, None, None]
    if ctx.OWN and PART == EDGE:
        s = s.to(gl.float32) * k_scale.load(gl.SliceLayout(0, S))[None, :]
    else:
        c = c * k_scale[None, :, None]
    s = s.reshape([64, BLOCKS, 8, 4, 2])
    if PART == CODED:  # -inf * 0
        c = gl.where(c < _LEAST, _LEAST, c)
    x = s.to(gl.float32)
    if PART == EDGE or PART == TAIL:  # scaled first: the other way takes more registers
        c5 = gl.expand_dims(gl.expand_dims(c, 3), 2)  # [64, blocks, 1, 1, 1]
        if PART == EDGE:
            x = _hide(x * c5, block[0], 1, rows, ctx)
        else:
            x = _add_bias(x * c5, ctx.bias_smem.index(stage).load(gl.SliceLayout(0, S)))
            x = _hide_by_words(x, block[0], rows, PART, ctx)
        highest = _row_maximum(x)
    else:  # scaled in the exponential, by an fma
        if PART == CODED:
            if (gl.minimum(code[0], code[1]) if ctx.READS > 1 else code[0]) < 3:
                x = _hide_each(x, block, code, rows, ctx)
            highest = _row_maximum(x)  # where s stays, up to 100 registers are spilled
        else:
            highest = _row_maximum(s).to(gl.float32)  # of integers it takes half the instructions
        highest = highest * c
    p, m, l, alpha = _softmax(x, c, highest, m, l, PART, ctx.FP8)
    alpha = gl.expand_dims(gl.convert_layout(alpha, OROW, assert_trivial=True), 1)
    v = ()
    for nth in gl.static_range(ctx.READS):
        part = _place(ctx.v_smem, stage, nth, ctx)
        v = v + (part.permute((1, 0)) if ctx.FP8 else part,)
    if ctx.FP8:
        p = p.reshape([64, BLOCK_N // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4])
        p = _operands(p.reshape([64, BLOCK_N]), P, ctx)
        p = (_to_fp8(p[0]), _to_fp8(p[1])) if ctx.READS > 1 else (_to_fp8(p[0]),)
    else:
        p = _operands(p.reshape([64, BLOCK_N]).to(ctx.v_smem.dtype), P, ctx)
        o = (o[0] * alpha,)
    if not ctx.ALONE:
        if ctx.BLOCK_DV > 64 and not ctx.FP8:
            l = _pin(l)
        mbarrier.wait(turn.own, turn.phase)
    sums = ()
    for n in gl.static_range(ctx.BLOCK_DV // ctx.CHUNK):
        sums = sums + (_add_pv(p, v, n, o[n], alpha, ctx),)
    return m, l, sums


@gluon.jit
def _entries(j, tile, ctx):
    """The list's entries of the j-th step."""
    first = _entry(j * ctx.READS, tile, ctx)
    return (first, _entry(j * ctx.READS + 1, tile, ctx)) if ctx.READS > 1 else (first,)


@gluon.jit
def _attend_blocks(
    PART: gl.constexpr, lo, hi, end, entry, m, l, o, wg: gl.constexpr, rows, tile, ctx
):  # fmt: skip
    """m, l and o after the blocks from the lo-th to before the hi-th that the tile reads, and the
    list's entries of the hi-th. end: of all but the tail. LISTED: a step is READS of its list's
    blocks."""
    for j in range(lo, hi):
        i = rows.fetched + j
        stage = i % ctx.STAGES
        turn = _turn_after(j, wg, rows, ctx)
        block, code, some = (j,), (0,), 0
        if PART == TAIL:
            block = (j - end,)
        elif ctx.BOUNDED:
            block, code = (), ()
            for nth in gl.static_range(ctx.READS):
                found = block_of(tile.first_block, j, entry[nth], wg, rows.row0, ctx)
                block, code, some = block + (found[0],), code + (found[1],), some | found[1]
        if ctx.LISTED and PART != TAIL:  # of the next ones, which arrive meanwhile
            entry = _entries(j + 1, tile, ctx)
        if ctx.OWN and PART == EDGE:
            k_scale = ctx.scale_smem.index(stage)
        elif ctx.READS > 1 and PART != TAIL:
            second = gl.arange(0, 2, layout=rows.k_scale.type.layout) == 1
            k_scale = gl.load(rows.k_scale + gl.where(second, block[1] - 1, block[0]))
        else:
            k_scale = gl.load(rows.k_scale + block[0] * (ctx.BLOCK_N // 64))
        ctx.ring.wait_full(i)
        if PART != CODED or ctx.ALONE or some > 0:
            m, l, o = _attend(PART, stage, block, code, k_scale, m, l, o, turn, wg, rows, ctx)
        else:
            _pass_on(turn)
            mbarrier.wait(turn.own, turn.phase)
        if ctx.ALONE:
            head_kv = tile.b * ctx.H_kv + tile.h_kv
            gluon_barrier()  # all its warps have read the stage
            _fetch_next(j + ctx.STAGES, end, i, head_kv, tile, ctx)
    return entry, m, l, o


@gluon.jit
def _store(chunks, m, total, row0, tile, ctx):
    """chunks of o, each [64, CHUNK], m, total [64] -> Out, Lse."""
    O: gl.constexpr = chunks[0].type.layout
    LO: gl.constexpr = _rows_layout(ctx.CHUNK)
    of_row = gl.convert_layout(total, gl.SliceLayout(1, O), assert_trivial=True)
    inverse = 1.0 / of_row
    if ctx.BOUNDED:  # a row that sees nothing is 0
        inverse = gl.where(of_row == 0, 0.0, inverse)
    rows = row0 + gl.arange(0, 64, layout=gl.SliceLayout(1, LO))
    out = ctx.Out + (
        (tile.b.to(gl.int64) * ctx.stride_ob + tile.h.to(gl.int64) * ctx.stride_oh) >> 1
    )
    token = token_of(ctx.Perm, rows, ctx.N_q)
    out = out + gl.expand_dims((token.to(gl.int64) * ctx.stride_on) >> 1, 1)
    of_v = tile.b
    if ctx.Documents is not None:
        of_v = gl.load(ctx.Documents + row0 // 64, mask=row0 < ctx.N_q, other=0)
    for chunk in gl.static_range(ctx.BLOCK_DV // ctx.CHUNK):
        o = chunks[chunk] * gl.expand_dims(inverse, 1)
        if ctx.FP8:
            dv = chunk * ctx.CHUNK + gl.arange(0, ctx.CHUNK, layout=gl.SliceLayout(0, O))
            channel = (of_v * ctx.H_kv + tile.h_kv) * ctx.D_V
            v_scale = gl.load(ctx.V_scale + channel + dv, mask=dv < ctx.D_V, other=0.0)
            v_mean = gl.load(ctx.V_mean + channel + dv, mask=dv < ctx.D_V, other=0.0)
            o = o * gl.expand_dims(v_scale, 0) + gl.expand_dims(v_mean, 0)
            if ctx.BOUNDED:
                o = gl.where(gl.expand_dims(of_row == 0, 1), 0.0, o)
        o = gl.convert_layout(o.to(ctx.Out.dtype.element_ty), LO)
        dv = chunk * ctx.CHUNK + gl.arange(0, ctx.CHUNK, layout=gl.SliceLayout(0, LO))
        here = is_token(ctx.Perm, token, rows, ctx.N_q)
        keep = gl.expand_dims(here, 1) & gl.expand_dims(dv < ctx.D_V, 0)
        gl.store(out + gl.expand_dims(dv, 0), o, mask=keep)
    OFFSET: gl.constexpr = LOG2_FP8_MAX if ctx.FP8 else 0.0
    total = gl.convert_layout(total, m.type.layout, assert_trivial=True)
    lse = (m - OFFSET + gl.log2(total)) * LN2
    rows = row0 + gl.arange(0, 64, layout=m.type.layout)
    head = tile.b * ctx.H_q + tile.h
    token = rows
    if ctx.Documents is None:
        token = token_of(ctx.Perm, rows, ctx.N_q)
    gl.store(ctx.Lse + head.to(gl.int64) * ctx.N_q + token, lse, mask=rows < ctx.N_q)
    if ctx.KEEPS_MAX:
        gl.store(ctx.Lse + (ctx.heads + head).to(gl.int64) * ctx.N_q + rows, m, mask=rows < ctx.N_q)


@gluon.jit
def _store_part(chunks, m, total, slot, row0, ctx):
    """chunks of o, each [64, CHUNK], m, total [64] of a piece of a tile -> rows row0 .. of slot."""
    O: gl.constexpr = chunks[0].type.layout
    rows = slot.to(gl.int64) * ctx.BLOCK_M + row0 + gl.arange(0, 64, layout=gl.SliceLayout(1, O))
    for chunk in gl.static_range(ctx.BLOCK_DV // ctx.CHUNK):
        dv = chunk * ctx.CHUNK + gl.arange(0, ctx.CHUNK, layout=gl.SliceLayout(0, O))
        ptrs = ctx.Part + gl.expand_dims(rows * ctx.BLOCK_DV, 1) + gl.expand_dims(dv, 0)
        gl.store(ptrs, chunks[chunk])
    rows = slot * 2 * ctx.BLOCK_M + row0 + gl.arange(0, 64, layout=m.type.layout)
    gl.store(ctx.Part_ml + rows, m)
    total = gl.convert_layout(total, m.type.layout, assert_trivial=True)
    gl.store(ctx.Part_ml + ctx.BLOCK_M + rows, total)


@gluon.jit
def _place_of(t, ctx):
    """Tile t -> b, h, h_kv, first row."""
    head, m = _head_and_tile(t, ctx.num_m, ctx.heads, ctx.group)
    b = head // ctx.H_q
    h = head - b * ctx.H_q
    h_kv = h // (ctx.H_q // ctx.H_kv)
    if ctx.LISTED:
        m = gl.load(lists_of(b, h, ctx) + m.to(gl.int64) * ctx.stride_lm + 2)
    return b, h, h_kv, m * ctx.BLOCK_M


@gluon.jit
def _begin_tile(t, wg: gl.constexpr, ctx):
    """Tile t -> b, h, h_kv, first row, q [64, BLOCK_D] of this warpgroup, and (BOUNDED) what `walk`
    says of the tile's blocks."""
    b, h, h_kv, row = _place_of(t, ctx)
    q = _load_q(b, h, row + wg * 64, ctx)
    walked = (0, 0, 0)
    if ctx.BOUNDED:
        walked = walk(b, h, row, ctx)
    return b, h, h_kv, row, q, walked


@gluon.jit
def _in_sight(row, row0, ctx):
    """(not BOUNDED) For the 64 rows from row0 on, in a tile that begins at row: how many blocks of
    keys all of them see whole, and how many some of them see."""
    seen = ctx.N_kv
    if ctx.WARPGROUPS == 3:  # a third of a tile may be beyond N_q; ptxas spills for it at D=256
        seen = gl.where(row0 < ctx.N_q, ctx.N_kv, 0)
    mine = _num_blocks(row0 + 64, seen, ctx)
    whole = seen // ctx.BLOCK_N
    if ctx.CAUSAL:
        whole = gl.minimum(whole, (row0 + 1) // ctx.BLOCK_N)
    if ctx.OWN:
        whole = gl.minimum(whole, _first_own(row, ctx.BLOCK_N))
    return whole, mine


@gluon.jit
def _pass_turns(wg: gl.constexpr, mine, end, rows, ctx):
    """After its last block of a tile (mine - 1) a warpgroup passes its turn on, and those of the
    blocks, up to `end`, that its rows do not see and others of the tile do."""
    turn = _turn_after(mine, wg, rows, ctx)
    _pass_on(turn)
    for j in range(mine, end):  # (not BOUNDED)
        ctx.ring.wait_full(rows.fetched + j)
        mbarrier.wait(turn.own, (rows.taken + j + 1) & 1)
        mbarrier.arrive(turn.next, count=1)
        ctx.ring.release(rows.fetched + j)


@gluon.jit
def _consumer(wg: gl.constexpr, ctx):
    """Warpgroup `wg`: rows 64 wg .. of each of the program's tiles. Alone it has one tile, and
    fetches k and v itself."""
    BLOCKS: gl.constexpr = ctx.BLOCK_N // 64
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ctx.BLOCK_N, 32])
    O: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, ctx.CHUNK, 32 if ctx.FP8 else 16]
    )
    zero = gl.full([64, ctx.BLOCK_N], 0, gl.int32, S)
    L5: gl.constexpr = zero.reshape([64, BLOCKS, 8, 4, 2]).type.layout
    M3: gl.constexpr = gl.SliceLayout(3, gl.SliceLayout(2, L5))  # [64, blocks, 4]
    QUAD: gl.constexpr = gl.SliceLayout(1, M3)  # [64, 4]
    ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, M3))  # [64]
    BLOCK: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, M3))  # [blocks]
    gl.static_assert(
        ctx.FP8 or ctx.BLOCK_DV == ctx.CHUNK, "16-bit p v takes v of head_dim up to 128"
    )

    q_tile = ctx.q_smem.index(wg)  # a constant on purpose: at run time, ptxas (CUDA 12.8) read
    # its descriptor uninitialised where the loop over whole blocks ran zero times
    num_tiles = ctx.num_m * ctx.heads
    blocks = (ctx.N_kv + ctx.BLOCK_N - 1) // ctx.BLOCK_N
    t, begin, end, items = gl.program_id(0), 0, blocks, 1
    if not ctx.ALONE:
        count, pieces, first, last = _work_items(num_tiles, blocks, ctx)
        t, begin, end = _work_item(0, count, first, last, blocks, ctx)
        items = count + pieces
    b, h, h_kv, row, q, walked = _begin_tile(t, wg, ctx)
    first_block, read_whole, read_all = walked
    taken = 0  # turns at the tensor cores so far: one a block, one a tile
    fetched = 0  # blocks of k and v so far
    for item in range(items):
        of_tail = 0
        if ctx.TAIL_BLOCK:  # arrives during the blocks before
            of_tail, unnamed = tail_of(first_block, wg, ctx)
        tile = Tile(b, h, h_kv, row, first_block, read_whole, read_all, of_tail)
        row0 = row + wg * 64
        head_kv = b * ctx.H_kv + h_kv
        entry = (0,)
        if ctx.LISTED:
            entry = _entries(0, tile, ctx)
        m = gl.full([64], -float("inf"), gl.float32, ROW)
        l = gl.full([64, 4], 0.0, gl.float32, QUAD)
        zeros = gl.full([64, ctx.CHUNK], 0.0, gl.float32, O)
        o = (zeros, zeros, zeros, zeros) if ctx.BLOCK_DV > ctx.CHUNK else (zeros,)
        scale_row = head_kv * (ctx.N_pad // 64)
        k_scale = ctx.K_scale + scale_row + gl.arange(0, BLOCKS, layout=BLOCK)
        words = ctx.Words
        if ctx.BOUNDED:
            begin = 0
            if ctx.MASK:
                words = ctx.Words + b.to(gl.int64) * ctx.stride_wb + h.to(gl.int64) * ctx.stride_wh
            whole, mine = read_whole // ctx.READS, (read_all + ctx.READS - 1) // ctx.READS
            end = mine
        else:
            if not ctx.SPLIT:
                begin = 0
                end = _num_blocks(row + ctx.BLOCK_M, ctx.N_kv, ctx)
            whole, mine = _in_sight(row, row0, ctx)
            if ctx.SPLIT:
                mine = gl.minimum(gl.maximum(mine, begin), end)
                whole = gl.minimum(gl.maximum(whole, begin), mine)
                fetched -= begin  # block j is the ring's fetched + j
                taken -= begin
        if ctx.ALONE:
            for n in gl.static_range(ctx.STAGES):
                _fetch_next(n, end, n, head_kv, tile, ctx)
        q_scale = _quantize_q(q, q_tile, ctx)
        q_scale = gl.convert_layout(q_scale, ROW, assert_trivial=True)
        rows = Rows(row0, begin, fetched, taken, words, k_scale, q_scale)

        if not ctx.ALONE:
            mbarrier.wait(ctx.order.index(wg), (taken + begin) & 1)
        if ctx.LISTED or not ctx.BOUNDED:
            entry, m, l, o = _attend_blocks(
                FULL, begin, whole, end, entry, m, l, o, wg, rows, tile, ctx
            )
        entry, m, l, o = _attend_blocks(
            CODED if ctx.BOUNDED else EDGE, whole, mine, end, entry, m, l, o, wg, rows, tile, ctx
        )
        if ctx.TAIL_BLOCK:
            scale_row = head_kv * (_padded_tail(ctx) // 64)
            k_scale = ctx.K_tail_scale + scale_row + gl.arange(0, BLOCKS, layout=BLOCK)
            rows = Rows(row0, begin, fetched, taken, unnamed, k_scale, q_scale)
            mine = end + of_tail
            _, m, l, o = _attend_blocks(TAIL, end, mine, end, entry, m, l, o, wg, rows, tile, ctx)
            end = mine
        if not ctx.ALONE:
            _pass_turns(wg, mine, end, rows, ctx)
            taken += end + 1
            fetched += end
            # q of the next tile; of the last one once more
            next_item = gl.minimum(item + 1, count + pieces - 1)
            next_t, next_begin, next_end = _work_item(next_item, count, first, last, blocks, ctx)
            next_b, next_h, next_h_kv, next_row, q, next_walked = _begin_tile(next_t, wg, ctx)
            if ctx.BOUNDED:
                first_block, read_whole, read_all = next_walked

        # -- epilogue ----
        total = gl.sum(l, axis=1)
        if ctx.SPLIT and (begin > 0 or end < blocks):
            # A program's first item may start in the middle of a tile, its last may stop early.
            slot = gl.program_id(0) * 2 + (begin == 0).to(gl.int32)
            _store_part(o, m, total, slot, wg * 64, ctx)
        else:
            _store(o, m, total, row0, tile, ctx)
        if not ctx.ALONE:
            begin, end = next_begin, next_end
            b, h, h_kv, row = next_b, next_h, next_h_kv, next_row


@gluon.jit
def _producer(ctx):
    """One warp: k and v of each of the program's tiles, block by block."""
    fetched = 0
    blocks = (ctx.N_kv + ctx.BLOCK_N - 1) // ctx.BLOCK_N
    count, pieces, first, last = _work_items(ctx.num_m * ctx.heads, blocks, ctx)
    for item in range(count + pieces):
        t, begin, end = _work_item(item, count, first, last, blocks, ctx)
        b, h, h_kv, row = _place_of(t, ctx)
        first_block, whole, read_all = 0, 0, 0
        if ctx.BOUNDED:
            first_block, whole, read_all = walk(b, h, row, ctx)
            begin, end = 0, (read_all + ctx.READS - 1) // ctx.READS
        elif not ctx.SPLIT:
            end = _num_blocks(row + ctx.BLOCK_M, ctx.N_kv, ctx)
        tile, head_kv = Tile(b, h, h_kv, row, first_block, whole, read_all, 0), b * ctx.H_kv + h_kv
        for n in range(begin, end):
            i = fetched + n - begin
            ctx.ring.wait_free(i)
            _fetch(n, end, i, head_kv, tile, ctx)
        fetched += end - begin
        if ctx.TAIL_BLOCK:
            of_tail, _ = tail_of(first_block, 0, ctx)
            for j in range(of_tail):
                ctx.ring.wait_free(fetched + j)
                _fetch_tail(j, fetched + j, head_kv, tile, ctx)
            fetched += of_tail


@gluon.jit
def _hopper_kernel(
    Q,  # [B, H_q, N_q, D] in, 16-bit, its last stride 1
    K, K_scale,  # descriptor of [B * H_kv * N_pad, BLOCK_D] int8; [B, H_kv, N_pad / 64] fp32
    K_own, K_own_scale,  # if OWN: as K, and descriptor of [B * H_kv * N_pad] fp32
    K_tail, K_tail_scale, V_tail, Bias,  # if TAIL_BLOCK: Prepared's, as K, K_scale and V are,
    # and a descriptor of [B * H_kv * T_pad] fp32
    V, V_scale, V_mean,  # descriptor of [B * H_kv * BLOCK_DV, N_pad] FP8; [B, H_kv, D_V] twice
    # 16-bit: descriptor of [B, H_kv, N_kv, D_V]; without the other two
    Words, List,  # tile_lists.py; if MASK, if LISTED
    Perm,  # int32 [N_q], if LISTED, or None: the order of q's tiles, and that of k and v
    Documents,  # int32 [N_q / 64] or None: whose rows (documents.py). V_scale, V_mean: of each
    Out, Lse,  # [B, H_q, N_q, D_V], [B, H_q, N_q] fp32; KEEPS_MAX: [2, ...], m is the second
    Part, Part_ml,  # [2 * programs, BLOCK_M, BLOCK_DV], [2 * programs, 2, BLOCK_M] fp32: o; m, l
    # if SPLIT
    stride_qb, stride_qh, stride_qn, stride_ob, stride_oh, stride_on,
    stride_wb, stride_wh, stride_wm, stride_lb, stride_lh, stride_lm,
    heads, H_q, H_kv, N2_q, N2_kv, N_pad, group, whole_tiles,  # heads: B * H_q. N2: 2 N
    D: gl.constexpr, D_V: gl.constexpr, SCALE: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, BOTTOM_RIGHT: gl.constexpr,
    LISTED: gl.constexpr, MASK: gl.constexpr, SPLIT: gl.constexpr, ROTATED: gl.constexpr,
    FP8: gl.constexpr, KEEPS_MAX: gl.constexpr, OWN: gl.constexpr, TAIL_BLOCK: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    WARPGROUPS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid: (programs,), as many as run at once; of one warpgroup, as many as there are tiles.
    Strides of q and o come doubled: see `doubled`."""
    N_q, N_kv = N2_q // 2, N2_kv // 2
    ALONE: gl.constexpr = WARPGROUPS == 1
    CAUSAL: gl.constexpr = RIGHT == 0  # SDPA's, unless BOUNDED
    BOUNDED: gl.constexpr = LISTED or LEFT >= 0 or RIGHT > 0 or (RIGHT == 0 and BOTTOM_RIGHT)
    BLOCK_M: gl.constexpr = 64 * WARPGROUPS
    # Channels of o in one product. At 256, four of 64: with two of 128 the ptxas of CUDA 13.4
    # (Triton 3.9) spills 44 registers a loop: 1.44x the time of Triton 3.6's, which four make 1.11x
    # (H200, 2026-11-22). Triton 3.6's own takes 1.016x with four, 1.000x causal.
    CHUNK: gl.constexpr = 64 if BLOCK_DV == 256 else BLOCK_DV
    READ_N: gl.constexpr = LISTED or BLOCK_N  # keys that are read at once
    READS: gl.constexpr = BLOCK_N // READ_N
    num_m = (N_q + BLOCK_M - 1) // BLOCK_M
    L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_D], gl.int8)
    gl.static_assert(READS == 1 or (READ_N == 64 and READS == 2 and BLOCK_D <= 128))
    VS: gl.constexpr = [BLOCK_DV, READ_N] if FP8 else [READ_N, BLOCK_DV]
    VL: gl.constexpr = gl.NVMMASharedLayout.get_default_for(VS, V.dtype)
    q_smem = gl.allocate_shared_memory(gl.int8, [WARPGROUPS, 64, BLOCK_D], L)
    k_smem = gl.allocate_shared_memory(gl.int8, [STAGES * READS, READ_N, BLOCK_D], K.layout)
    v_smem = gl.allocate_shared_memory(V.dtype, [STAGES * READS, VS[0], VS[1]], VL)
    scale_smem = None
    if OWN:
        scale_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_N], K_own_scale.layout)
    bias_smem = None
    if TAIL_BLOCK:
        bias_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_N], Bias.layout)
    ring = make_ring(STAGES)
    order = gl.allocate_shared_memory(gl.int64, [WARPGROUPS, 1], mbarrier.MBarrierLayout())
    ring.begin(WARPGROUPS)
    for i in gl.static_range(WARPGROUPS):
        mbarrier.init(order.index(i), count=1)
    mbarrier.arrive(order.index(0), count=1)
    ctx = context()
    if WARPGROUPS == 1:
        fence_async_shared()
        gluon_barrier()
        _consumer(0, ctx)
    elif WARPGROUPS == 2:
        gl.warp_specialize([
            (_consumer, (0, ctx)),
            (_consumer, (1, ctx)),
            (_producer, (ctx,)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consumer, (0, ctx)),
            (_consumer, (1, ctx)),
            (_consumer, (2, ctx)),
            (_producer, (ctx,)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip


@triton.jit
def _combine_kernel(
    Part, Part_ml,  # as above, in
    V_scale, V_mean,  # [B, H_kv, D_V] in, fp32; if FP8
    Out, Lse,  # [B, H_q, N_q, D_V], [B, H_q, N_q] fp32 out; KEEPS_MAX: as above
    stride_ob, stride_oh, stride_on,
    heads, H_q, H_kv, N_q, num_m, whole_tiles, blocks, programs,
    D_V: tl.constexpr, FP8: tl.constexpr, KEEPS_MAX: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles that were dealt out, BLOCK_M / ROWS). Adds up the pieces of a tile."""
    n = tl.program_id(0)
    total = (num_m * heads - whole_tiles) * blocks
    # Block x is of the last program whose share begins at or before x.
    first = (((n * blocks + 1).to(tl.int64) * programs - 1) // total).to(tl.int32)
    last = ((((n + 1) * blocks).to(tl.int64) * programs - 1) // total).to(tl.int32)
    if first == last:  # in one piece: it is stored
        return
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    dv = tl.arange(0, BLOCK_DV)
    m = tl.full([ROWS], -float("inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    for program in range(first, last + 1):
        begin = _streamk_share(program, programs, total) - n * blocks
        slot = (program * 2 + (begin <= 0)).to(tl.int64)
        m_part = tl.load(Part_ml + slot * 2 * BLOCK_M + r)
        l_part = tl.load(Part_ml + slot * 2 * BLOCK_M + BLOCK_M + r)
        part = tl.load(Part + (slot * BLOCK_M + r)[:, None] * BLOCK_DV + dv[None, :])
        m_new = tl.maximum(m, m_part)
        alpha, beta = tl.exp2(m - m_new), tl.exp2(m_part - m_new)
        acc = acc * alpha[:, None] + part * beta[:, None]
        l = l * alpha + l_part * beta
        m = m_new

    head, m_tile = _head_and_tile(whole_tiles + n, num_m, heads, 1)
    b = head // H_q
    h = head - b * H_q
    h_kv = h // (H_q // H_kv)
    rows = m_tile * BLOCK_M + r
    o = acc * (1.0 / l)[:, None]
    if FP8:
        channel = (b * H_kv + h_kv) * D_V
        v_scale = tl.load(V_scale + channel + dv, mask=dv < D_V, other=0.0)
        v_mean = tl.load(V_mean + channel + dv, mask=dv < D_V, other=0.0)
        o = o * v_scale[None, :] + v_mean[None, :]
    out = Out + ((b.to(tl.int64) * stride_ob + h.to(tl.int64) * stride_oh) >> 1)
    out = out + ((rows.to(tl.int64) * stride_on) >> 1)[:, None] + dv[None, :]
    tl.store(out, o.to(Out.dtype.element_ty), mask=(rows < N_q)[:, None] & (dv < D_V)[None, :])
    offset: tl.constexpr = LOG2_FP8_MAX if FP8 else 0.0
    lse = (m - offset + tl.log2(l)) * LN2
    tl.store(Lse + head.to(tl.int64) * N_q + rows, lse, mask=rows < N_q)
    if KEEPS_MAX:
        tl.store(Lse + (heads + head).to(tl.int64) * N_q + rows, m, mask=rows < N_q)
