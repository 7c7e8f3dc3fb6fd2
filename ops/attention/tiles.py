"""The tile that a kernel runs with, as a measured table.

Every row names the GPU and the day that measured it (`python bench/attention.py --json`);
`untimed` rows were chosen from cross-compiled resource reports (registers, spills) alone.
"""

import dataclasses
import functools
import itertools
import math
import sys
from typing import NamedTuple

import torch
import triton

from sage_inductor.ops import compat, gpus
from sage_inductor.ops.call_shape import CallShape
from sage_inductor.ops.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class Tile:
    """One program computes BLOCK_M rows of o, reading BLOCK_N keys at a time."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None  # registers a thread, where a cap is worth it
    warpgroups: int | None = None  # of the Hopper kernel: 64 rows each


# (compute capability from, pv, head_dim up to, with a mask; None: with and without) -> tile. pv
# "fp8 fp8" and "int4 fp8": what FP8 and INT4 q k^T ask for, where it is not what INT8 does.
TILES = [
    ((8, 0), "16bit", 128, None, Tile(128, 64, 8, 2)),  # untimed
    ((8, 0), "16bit", 256, None, Tile(128, 64, 8, 2)),  # untimed
    ((8, 6), "16bit", 256, True, Tile(128, 64, 16, 1)),  # untimed; 99 KiB of shared memory
    ((8, 9), "fp8", 128, False, Tile(64, 64, 4, 2)),  # untimed
    ((8, 9), "fp8", 128, True, Tile(128, 64, 8, 2)),  # untimed
    ((8, 9), "fp8", 256, None, Tile(64, 64, 8, 2)),  # untimed
    ((9, 0), "16bit", 128, False, Tile(128, 64, 8, 3, maxnreg=128)),  # H200, 2026-11-21
    ((9, 0), "fp8", 64, False, Tile(64, 128, 4, 2, maxnreg=128)),  # H200, 2026-11-21
    ((9, 0), "fp8", 64, True, Tile(64, 64, 4, 2, maxnreg=128)),  # H200, 2026-11-21
    ((9, 0), "fp8", 128, False, Tile(64, 128, 4, 2, maxnreg=168)),  # H200, 2026-11-21
    ((9, 0), "fp8", 128, True, Tile(64, 64, 4, 3, maxnreg=168)),  # H200, 2026-11-21
    ((9, 0), "fp8", 256, False, Tile(64, 64, 4, 2, maxnreg=255)),  # H200, 2026-11-21
    ((9, 0), "16bit", 256, True, Tile(128, 64, 8, 2)),  # untimed
    ((9, 0), "fp8", 256, True, Tile(64, 64, 4, 2, maxnreg=255)),  # untimed
    ((9, 0), "int4 fp8", 128, None, Tile(128, 64, 8, 2)),  # untimed
    ((9, 0), "int4 fp8", 256, None, Tile(64, 64, 8, 2)),  # untimed
    ((10, 0), "16bit", 128, False, Tile(128, 64, 8, 2)),  # untimed
    ((10, 0), "fp8", 128, False, Tile(128, 64, 8, 2)),  # untimed
    ((10, 0), "fp8 fp8", 128, False, Tile(128, 128, 8, 2)),  # untimed
    ((10, 0), "fp8", 128, True, Tile(64, 64, 4, 2)),  # untimed
    ((10, 0), "fp8", 256, None, Tile(64, 64, 8, 2)),  # untimed
    ((12, 0), "fp8", 128, None, Tile(128, 64, 8, 2)),  # untimed
    ((8, 0), "nvfp4", 256, None, Tile(64, 64, 8, 2)),  # untimed
    ((10, 0), "nvfp4", 128, None, Tile(128, 128, 8, 2)),  # untimed; tcgen05 asks for 128 rows
    ((10, 0), "nvfp4", 256, None, Tile(128, 64, 8, 2)),  # untimed
    ((12, 0), "nvfp4", 128, None, Tile(128, 64, 8, 2)),  # untimed
    ((12, 0), "nvfp4", 256, None, Tile(64, 64, 8, 2)),  # untimed
]


WARPGROUPS = (0, 1, 2, 3)  # what may be asked for; 0: not the Hopper kernel


class Load(NamedTuple):
    """What of a call's sizes its tile depends on; of a row of HOPPER, the least of each."""

    keys: int = 0  # that a query sees, on average
    pairs: int = 0  # of a query and a key that it sees
    even: int = 0  # with a mask: 100 * the busiest SM's rows by 64-row tiles / by 192-row tiles
    fill: int = 0  # without a mask: 100 * rows of all 64-row tiles / of all 192-row tiles
    ratio: int = 0  # without a mask or a band: rounds by 128 rows over those by 192, rounded down
    room: int = 0  # without a mask or a band: 1 up to two tiles of 64 rows a processor; 2 up to one
    unmasked: int = 0  # 1 without a mask

    @classmethod
    def of(cls, shape: CallShape) -> "Load":
        """In a window one key in IN_A_WINDOW counts: a wider tile computes more beyond its edges.
        `ratio` is 2 mostly if all 192-row tiles fit in one round and 128-row tiles need two. `even`
        below 100 means that 192-row tiles leave SMs idle."""
        (left, right, _), masked = shape.band, shape.mask is not None
        heads, (n_q, n_kv) = shape.q[0] * shape.q[1], shape.lengths
        bounds = (left is not None) + (right is not None)
        keys = n_kv // 2 if bounds == 1 else n_kv
        if bounds == 2:
            keys = torch.sym_min(n_kv, max(left + right + 1, 0)) // IN_A_WINDOW
        n, full = gpus.processors(shape.device), not (masked or bounds)
        # Not triton.cdiv, of which one takes 3 us: every call comes by here.
        tiles = [heads * ((n_q + rows - 1) // rows) for rows in (64, 128, 192)]
        by_64, by_128, by_192 = ((count + n - 1) // n for count in tiles)
        even = 100 * by_64 // torch.sym_max(3 * by_192, 1) if masked else 0
        fill = 0 if masked else 100 * tiles[0] // torch.sym_max(3 * tiles[2], 1)
        ratio = by_128 // torch.sym_max(by_192, 1) if full else 0
        room = 2 * n // torch.sym_max(tiles[0], 1) if full else 0
        return cls(
            keys=keys, pairs=heads * n_q * keys, even=even, fill=fill, ratio=ratio, room=room,
            unmasked=int(not masked),
        )  # fmt: skip

    def reaches(self, *rows: "Load") -> bool:
        """Whether it has all that one of the rows asks for. That is one question: where sizes are
        known when a package runs, its C++ branches at each, and asked number by number the rows of
        head_dim 128 made 3,790 branches, 13 MB a call. A product is 0 unless it has all that its
        row asks for; 64 bits hold it."""
        pairs = (zip(self, row, strict=True) for row in rows)
        return sum(math.prod(x // n for x, n in each if n) for each in pairs) >= 1


ANY = Load(*[sys.maxsize] * len(Load._fields))  # reaches every row
PAIRS = 132 << 20  # fewer, 2^20 for each processor of an H200, are few tiles: some are shared
IN_A_WINDOW = 16  # of 103 windows of up to 8,192 keys none is faster by 192 rows (2026-11-24)
# One warpgroup a program, of which an SM holds four, at head_dim 128 three: what a program does
# before and after its keys is hidden by the others. It is the fastest of all tiles for most short
# calls and for windows: of 602 calls with up to 8,192 keys (head_dim 128: 2,560) for 543, and in
# the median of all it takes 0.90 of the time of the best other one (H200, 2026-11-24).
ALONE_64 = Tile(64, 128, 4, 2, maxnreg=128, warpgroups=1)
ALONE_128 = Tile(64, 128, 4, 2, maxnreg=168, warpgroups=1)
# Two, where few tiles with many keys are shared.
TWO = Tile(128, 128, 4, 4, warpgroups=2)
# Three, which read k and v once for 192 rows, in long calls. With a mask, whose tiles are never
# shared, where they divide the work about as evenly as tiles of 64 rows do.
THREE = Tile(192, 128, 4, 3, warpgroups=3)
# `fill` below which three warpgroups lose by rows beyond the last what they gain by reading k and v
# once: with 78 to 95 they took 1.04 to 1.09 of the time in five calls (2026-11-25). At head_dim 128
# and many keys they gain more, so 90: with 92 they took 0.955.
FULL = 95
# One round in the place of two: 0.62 to 1.02 of the time, median of 13 calls 0.94 (2026-11-24).
AT_ONCE = Load(keys=5120, ratio=2)

# Tiles of the Hopper kernel: (pv, head_dim up to, is_causal, from which Load) -> tile, the last
# that holds. Those of one pv, head_dim and is_causal differ in their warpgroups, which name them.
# is_causal: bounded on the right at 0 alone. At head_dim 64 the other kernel computes short calls
# with a mask: no kernels make lists of it first.
# H200, torch 2.11, Triton 3.6: 720 calls of the built-in table by all tiles (2026-11-24), and 706
# that bench/regret.py drew, of which 11 run by a tile more than 3 % slower than another
# (2026-11-25). Few tiles are shared by three warpgroups where they fill theirs, else by two.
HOPPER = [
    ("fp8", 64, False, Load(unmasked=1), ALONE_64),
    ("fp8", 64, False, Load(keys=1024), ALONE_64),
    ("fp8", 64, False, Load(pairs=PAIRS // 4), ALONE_64),
    ("fp8", 64, False, Load(keys=6144, fill=FULL), THREE),
    ("fp8", 64, False, Load(keys=4608, room=1), THREE),
    ("fp8", 64, False, Load(keys=3000, room=4), THREE),
    ("fp8", 64, False, Load(keys=2560, even=94), THREE),
    ("fp8", 64, False, AT_ONCE, THREE),
    ("fp8", 64, True, Load(), ALONE_64),
    ("fp8", 64, True, Load(keys=7168, pairs=5 * PAIRS), THREE),
    ("fp8", 128, False, Load(), ALONE_128),
    ("fp8", 128, False, Load(keys=5632, fill=90, ratio=1), THREE),
    ("fp8", 128, False, Load(keys=3584, pairs=2 * PAIRS, fill=90), THREE),
    ("fp8", 128, False, Load(keys=2944, pairs=3 * PAIRS, fill=FULL, ratio=1), THREE),
    ("fp8", 128, False, Load(keys=448, pairs=11 * PAIRS, fill=FULL, ratio=1), THREE),
    ("fp8", 128, False, Load(keys=2048, room=4), TWO),
    ("fp8", 128, False, Load(keys=4096, room=1), TWO),
    ("fp8", 128, False, Load(pairs=7 * PAIRS // 8, fill=FULL, room=1), THREE),
    ("fp8", 128, False, Load(pairs=2 * PAIRS, room=1), THREE),
    ("fp8", 128, False, Load(keys=2560, even=89), THREE),
    ("fp8", 128, False, AT_ONCE, THREE),
    ("fp8", 128, True, Load(), ALONE_128),
    ("fp8", 128, True, Load(keys=2816, pairs=5 * PAIRS), THREE),
    ("fp8", 256, False, Load(), Tile(128, 128, 4, 2, warpgroups=2)),
    ("fp8", 256, True, Load(), Tile(128, 128, 4, 2, warpgroups=2)),
    ("16bit", 64, False, Load(), THREE),
    ("16bit", 64, True, Load(), THREE),
    ("16bit", 128, False, Load(), THREE),
    ("16bit", 128, True, Load(), THREE),
]


def hopper(
    capability: tuple[int, int], pv: str, head_dim: int, is_causal: bool, load: Load,
    warpgroups: int | None = None,
) -> Tile | None:  # fmt: skip
    """The Hopper kernel's tile for a call of this load that it may compute; None where it cannot
    run. warpgroups: take the tile with that number, if the call may have it (0: None)."""
    if warpgroups == 0:
        return None
    found = _hopper(capability, pv, head_dim, is_causal, triton.__version__)
    chosen = (tile for _, tile in found if tile.warpgroups == warpgroups)
    return next(chosen, None) or next((tile for rows, tile in found if load.reaches(*rows)), None)


def hopper_unavailable(capability: tuple[int, int]) -> str | None:
    """Why a GPU that the Hopper kernel is for does not get it, and what would bring it back: its
    Triton is none that the kernel was tested with. Said once in a process, as a warning."""
    return _unavailable(triton.__version__) if capability == (9, 0) else None


@functools.cache
def _unavailable(version: str) -> str | None:
    oldest, newest = compat.GLUON
    known = oldest <= tuple(map(int, version.split(".")[:2])) <= newest
    language = compat.gluon, compat.aggregate, compat.gluon_barrier, compat.reinterpret
    if known and None not in (*language, compat.tma_load, compat.GluonDescriptor):
        return None
    return (
        f"the Hopper kernel is tested with Triton {compat.GLUON_VERSIONS}, not {version}: calls run"
        " in the portable kernel, about as fast as cuDNN. Install one of those, or a"
        " sage_inductor that is tested with yours"
    )


def suits_hopper(shape: CallShape, recipe: Recipe) -> bool:
    """Whether the Hopper kernel computes such calls of a recipe, where it is there: by INT8 with a
    scale per token. Under a mask, which must be bool, 16-bit v could hold NaN where no query sees
    it."""
    read = shape.mask is None or (shape.mask_dtype == torch.bool and recipe.pv == "fp8")
    by_token = (recipe.qk, recipe.granularity) == ("int8", "per_token")
    has_rows = any(r[0] == recipe.pv and shape.head_dim <= r[1] for r in HOPPER)
    return read and by_token and has_rows


def rivals(
    capability: tuple[int, int], pv: str, head_dim: int, is_causal: bool
) -> tuple[int | None, ...]:
    """What may be the fastest for a call that the Hopper kernel may compute, as `hopper`'s
    warpgroups: the tiles of all its rows and, where no row may hold, the other kernel. (None,)
    where that is one thing or none."""
    found = _hopper(capability, pv, head_dim, is_causal, triton.__version__)
    groups = {tile.warpgroups for _, tile in found}
    groups |= {0 for rows, _ in found[-1:] if all(map(any, rows))}
    return tuple(sorted(groups)) if len(groups) > 1 else (None,)


@functools.cache
def _hopper(
    capability: tuple[int, int], pv: str, head_dim: int, is_causal: bool, version: str
) -> tuple[tuple[tuple[Load, ...], Tile], ...]:
    """(rows that ask for it, tile) of the smallest head_dim that holds this one, the last first.
    Rows that follow each other and ask for the same tile are one entry."""
    if capability != (9, 0) or _unavailable(version):
        return ()
    rows = [r for r in HOPPER if r[0] == pv and head_dim <= r[1] and r[2] == is_causal]
    widest = min((r[1] for r in rows), default=0)
    last_first = [r for r in reversed(rows) if r[1] == widest]
    groups = itertools.groupby(last_first, lambda row: row[4])
    return tuple((tuple(row[3] for row in group), tile) for tile, group in groups)


def tile(capability: tuple[int, int], qk: str, pv: str, head_dim: int, masked: bool) -> Tile:
    """The tile for a device (that of the newest row it reaches), or a ValueError if the recipe
    cannot run on it."""
    rows = [r for r in TILES if r[0] <= capability and head_dim <= r[2] and r[3] in (None, masked)]
    rows = [r for r in rows if r[1] in (pv, f"{qk} {pv}")]
    if not rows:
        raise ValueError(
            f"no kernel for pv={pv!r}, head_dim={head_dim} on compute capability {capability}"
        )
    return max(rows, key=lambda row: (row[0], row[1] != pv, -row[2]))[4]


def of_blocks(tile: Tile, block_q: int, block_kv: int) -> Tile:
    """`tile`, cut to what divides blocks of block_q queries and block_kv keys."""
    rows, keys = math.gcd(tile.BLOCK_M, block_q), math.gcd(tile.BLOCK_N, block_kv)
    num_warps = max(4, tile.num_warps * rows // tile.BLOCK_M)
    return dataclasses.replace(tile, BLOCK_M=rows, BLOCK_N=keys, num_warps=num_warps)


LISTED_KEYS = 2048  # from which the Hopper kernel reads lists of blocks at head_dim 64


def hopper_of_blocks(
    capability: tuple[int, int], pv: str, head_dim: int, n_kv: int, block_q: int, block_kv: int,
    packed: bool = False,
) -> Tile | None:  # fmt: skip
    """The tile with which the Hopper kernel computes a call by lists of blocks of these queries
    and keys, if it does: its warpgroups share a list. A warpgroup alone takes 0.53 of the time of
    three that read what any of their lists names (75,600 tokens, a tenth of blocks of 64 x 64; by
    NABLA's lists 0.64; H200, 2026-11-29). By lists of 128 queries it takes 0.95 to 1.07 of the time
    of two, but 0.73 to 1.06 where they are those of packed documents."""
    tile = hopper(capability, pv, head_dim, False, ANY)
    if tile is None or (pv == "fp8" and head_dim <= 64 and n_kv < LISTED_KEYS):
        return None
    if head_dim <= 128 and block_q % TWO.BLOCK_M == 0 and not packed:
        return TWO  # which reads two blocks of 64 at once, as a warpgroup alone does
    if head_dim <= 128 and block_q % THREE.BLOCK_M != 0 and pv == "fp8":
        return ALONE_64 if head_dim <= 64 else ALONE_128
    keys = math.gcd(tile.BLOCK_N, block_kv)
    if head_dim <= 128:
        tile = THREE
    stages = tile.num_stages * tile.BLOCK_N // keys
    return dataclasses.replace(tile, BLOCK_N=keys, num_stages=stages)


MIN_BLOCKS_SAVED = 8  # blocks of a tile; combining the pieces takes about as long as 4
MIN_BLOCKS_OF_A_PIECE = 4  # blocks that a program should have at least


def schedule(num_tiles: int, blocks: int, processors: int) -> tuple[int, int] | None:
    """How the Hopper kernel deals out tiles of equal length: (programs, tiles that are computed
    whole). The blocks of the other tiles are dealt out to all programs, where that saves each of
    them MIN_BLOCKS_SAVED blocks and 4 %. None: all tiles are whole."""
    if blocks <= MIN_BLOCKS_SAVED:  # as idle < processors; said, it is known while packaging
        return None
    idle = triton.cdiv(num_tiles, processors) * processors - num_tiles  # in the last round
    # Each program saves idle * blocks / processors blocks of num_tiles * blocks / processors.
    least = torch.sym_max(25 * MIN_BLOCKS_SAVED * processors, num_tiles * blocks)
    if 25 * idle * blocks < least:
        return None
    whole_tiles = torch.sym_max(num_tiles // processors - 1, 0) * processors
    # Where tiles are whole, there are more pieces than programs.
    pieces = num_tiles * blocks // MIN_BLOCKS_OF_A_PIECE
    return torch.sym_max(1, torch.sym_min(processors, pieces)), whole_tiles
