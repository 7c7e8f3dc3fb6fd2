"""How long a call takes: a model of every recipe and of SDPA's backends, fitted to measurements.

Attention kernels deal row tiles to the GPU's processors; a tile takes as long as the keys it sees
are many. A call's sizes give twelve numbers (`Features`), and a time is their sum, each
times a coefficient of its own that is not negative. The coefficients are fitted to times measured
on that GPU (families.py has those), by least squares of the relative error.

One `Fit` is for one head_dim and kind of call: over batches, heads and lengths it interpolates.
"""

import functools
import heapq
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from sage_inductor.ops.attention.tiles import schedule
from sage_inductor.ops.formats import pad_head_dim

MIN_SPEEDUP = 1.02  # faster by more than the spread of the medians

# Kinds of calls: without a mask ("full", "causal", "window": a band), with one row for all queries
# ("keys": padding), with a bool ("mask") or an additive ("bias") one. A window that flex_attention
# computes is not SDPA's with a mask, and nothing here times it.
# If they train, forward and backward are one time: kind -> that of the attention.
TRAINED = {f"{kind}-training": kind for kind in ("full", "causal")}
TIMED = ("full", "causal", "window", "keys", "mask", "bias", *TRAINED)
KINDS = (*TIMED, "flex window")

# Queries or keys, whichever are fewer: bench/regret.py draws no shorter call.
SHORTEST = 256


class Sizes(NamedTuple):
    """What of a call a time depends on, beside head_dim and the kind. A query i sees the keys that
    i - left .. i + right are, None: no bound."""

    B: int
    H_q: int
    H_kv: int
    N_q: int
    N_kv: int
    left: int | None = None
    right: int | None = None

    def rotation(self, head_dim: int) -> float:
        """ms that rotating q and k of this head_dim takes."""
        rows = self.B * (self.H_q * self.N_q + self.H_kv * self.N_kv)
        return ROTATION * pad_head_dim(head_dim) * rows


# Rows of a tile, and how many programs share a processor. Those that share one begin and end apart.
TILES = ((64, 1), (128, 1), (192, 1), (256, 1), (64, 3), (64, 4))
KEYS = 128  # that a kernel reads at a time: all of a block are computed, also those beyond the end
HEATS = 2e5  # keys a processor, from which a call lasts long enough to slow the card's clock

# What rotation adds to the time of a call, ms a channel of a row of q or k: its kernels' times with
# and without it differed by .0097 ms at (1, 24, 4608, 128), .0038 at (1, 16, 4096, 64), .0085 at
# (4, 32, 1024, 128) (H100, 2026-11-27).
ROTATION = 3.3e-10

# How tiles are dealt. The last two cut tiles into pieces of keys, added up in one launch more: in
# the Hopper kernel tiles that do not go round (its `schedule`), in FlashAttention 2 all, where they
# are too few (`_flash_pieces`).
IN_ORDER, LONGEST_FIRST, LAST_SHARED, FLASH = DEALT = (
    "in order", "longest first", "last shared", "flash"
)  # fmt: skip


class Features(NamedTuple):
    """The terms whose weighted sum is a time, or in a `Fit` their weights, in ms. All are per
    processor, except `launches` and `pieces`."""

    launches: float  # 1
    keys: float  # that tiles see, evenly dealt; where programs share a processor, one's, as dealt
    hot: float  # all of them, as the card heats
    busiest: float  # keys that the busiest processor computes, as tiles are dealt
    tiles: float  # their q and o
    prepared: float  # rows of k and v
    ragged: float  # `busiest` once more, where `_is_ragged`
    mask: float  # elements of one with a row for each query, which SDPA reads and converts
    pieces: float  # 1 where pieces of tiles are added up
    queries: float  # training: that tiles of keys see, of which dK and dV are computed, as dealt
    beyond: float  # where programs share a processor: tiles beyond those that it begins with
    heads: float  # of k and v: each has means and scales of its own


def features(
    sizes: Sizes, rows: int, dealt: str, processors: int, kind: str = "full", at_once: int = 1
) -> Features:
    """The terms of a call by tiles of `rows` rows, of which a processor computes `at_once` at a
    time."""
    heads, seen, weight, is_cut = sizes.B * sizes.H_q, _seen(*sizes[3:], rows), 1.0, False
    if dealt == FLASH:
        tiles = heads * -(-sizes.N_q // FLASH_ROWS)
        pieces = _flash_pieces(tiles, sizes.N_kv, processors)
        if is_cut := pieces > 1:
            seen, weight = _cut(*sizes[3:], pieces), FLASH_ROWS / rows
    shared = dealt == LAST_SHARED
    busiest = _last_shared(heads * len(seen), seen[0], processors) if shared else None
    is_cut = is_cut or busiest is not None
    if busiest is None:
        # FlashAttention runs two pieces on each SM, in order: an idle SM does not get the longest
        # that is left. One causal head of 8,192, cut in two, takes as long as four of 4,096.
        pieces_at_once = 2 if is_cut and dealt == FLASH else 1
        busiest = _busiest(seen, heads, dealt == LONGEST_FIRST, pieces_at_once * processors)
        busiest *= weight * pieces_at_once
    even = weight * heads * seen.sum / processors
    by_keys, of_one, of_kv = 0.0, even, sizes.B * sizes.H_kv
    if kind in TRAINED:
        seen_by = _seen(sizes.N_kv, sizes.N_q, sizes.right, sizes.left, KEYS)
        by_keys = _busiest(seen_by, of_kv, dealt == LONGEST_FIRST, processors)
        by_keys *= sizes.H_q / sizes.H_kv
    if at_once > 1:
        of_one = _busiest(seen, heads, dealt == LONGEST_FIRST, at_once * processors)
    tiles = weight * heads * len(seen) / processors
    return Features(
        launches=1.0, keys=of_one, hot=even * min(1.0, even / HEATS), busiest=busiest, tiles=tiles,
        prepared=of_kv * sizes.N_kv / processors, ragged=busiest * _is_ragged(sizes, kind),
        mask=sizes.N_q * sizes.N_kv / processors * _has_rows(sizes, kind), pieces=float(is_cut),
        queries=by_keys, beyond=max(0.0, tiles - at_once) if at_once > 1 else 0.0,
        heads=of_kv / processors,
    )  # fmt: skip


def _has_rows(sizes: Sizes, kind: str) -> bool:
    """Whether there is a mask with a row for each query: a window's in SDPA."""
    is_dense = sizes.left is None and sizes.right is None
    return kind in ("mask", "bias") or (kind == "window" and is_dense)


def _is_ragged(sizes: Sizes, kind: str) -> bool:
    """Whether cuDNN takes longer for the number of keys: 5 to 20 % where all are seen and they are
    no multiple of 128, 1.6 to 2 times as long under a mask with several rows, of odd lengths."""
    if TRAINED.get(kind, kind) in ("full", "causal"):
        return sizes.left is None and sizes.right is None and sizes.N_kv % 128 > 0
    several = sizes.B > 1 if kind == "keys" else _has_rows(sizes, kind)
    return several and sizes.N_kv % 2 > 0


class _Seen(tuple):
    """The keys that each tile of one head computes. It is hashed and compared as an object, because
    a million queries have thousands of tiles."""

    __hash__, __eq__ = object.__hash__, object.__eq__

    @functools.cached_property
    def sum(self) -> int:
        return sum(self)


@functools.lru_cache(maxsize=4096)
def _seen(N_q: int, N_kv: int, left: int | None, right: int | None, rows: int) -> _Seen:
    """rows: of a tile. Keys are counted in whole blocks."""
    if left is None and right is None:
        return _Seen((-(-N_kv // KEYS) * KEYS,) * -(-N_q // rows))
    seen = []
    for row in range(0, N_q, rows):
        begin = 0 if left is None else max(0, row - left)
        end = N_kv if right is None else min(N_kv, min(row + rows, N_q) + right)
        seen.append((-(-end // KEYS) - begin // KEYS) * KEYS if end > begin else 0)
    return _Seen(seen)


def _last_shared(tiles: int, keys: int, processors: int) -> int | None:
    """Keys that the busiest processor computes where each tile has `keys`. None: none is cut."""
    found = schedule(tiles, keys // KEYS, processors)
    if found is None:
        return None
    programs, whole = found
    blocks = -(-(tiles - whole) * keys // (KEYS * programs))
    return whole // processors * keys + blocks * KEYS


FLASH_ROWS = 64  # of a tile that is cut; two at a time share a processor


@functools.lru_cache(maxsize=4096)
def _flash_pieces(tiles: int, N_kv: int, processors: int) -> int:
    """Into how many pieces of keys FlashAttention 2 cuts each tile. Where tiles are too few, it is
    the least number that keeps processors 85 % as busy as the best number would
    (num_splits_heuristic)."""
    at_once, blocks = 2 * processors, -(-N_kv // KEYS)
    if tiles >= 0.8 * at_once:
        return 1

    def busy(pieces: int) -> float:
        rounds = tiles * pieces / at_once
        return rounds / math.ceil(rounds)

    # The least of the numbers with which the longest piece has as many blocks.
    counts = range(1, min(128, at_once, blocks) + 1)
    counts = [n for n in counts if n == 1 or -(-blocks // n) < -(-blocks // (n - 1))]
    enough = 0.85 * max(map(busy, counts))
    return next(n for n in counts if busy(n) >= enough)


@functools.lru_cache(maxsize=4096)
def _cut(N_q: int, N_kv: int, left: int | None, right: int | None, pieces: int) -> _Seen:
    """The keys of each piece of each tile of one head: the n-th has the n-th part of all keys."""
    long = -(-N_kv // (KEYS * pieces)) * KEYS
    seen = _seen(N_q, N_kv, left, right, FLASH_ROWS)
    return _Seen(min(long, max(0, keys - n * long)) for keys in seen for n in range(pieces))


ROUNDS = 16  # of tiles; where a processor gets more, the last one hardly counts


@functools.lru_cache(maxsize=4096)
def _busiest(seen: _Seen, heads: int, longest_first: bool, processors: int) -> float:
    """Keys that the busiest processor computes: whoever is first done takes the next tile."""
    count = heads * len(seen)
    if min(seen) == max(seen):
        return -(-count // processors) * seen[0]
    if count > ROUNDS * processors:
        return heads * seen.sum / processors + (0 if longest_first else max(seen) / 2)
    tiles = itertools.chain(*(seen,) * heads)
    busy = [0] * processors
    for keys in sorted(tiles, reverse=True) if longest_first else tiles:
        heapq.heapreplace(busy, busy[0] + keys)
    return max(busy)


class Fit(NamedTuple):
    """A time as a function of sizes."""

    rows: int  # of a tile, out of TILES
    dealt: str  # how, one of DEALT
    coefficients: Features
    error: float  # of predicted / measured - 1, the residual standard error
    processors: int  # of the GPU that was measured
    kind: str  # of the calls: one of KINDS
    at_once: int = 1  # programs that share a processor, out of TILES

    def ms(
        self, sizes: Sizes, computed: float = 1.0, of_q: float = 1.0, of_kv: float = 1.0
    ) -> float:
        """computed, of_q, of_kv: factors for a head_dim other than the measured calls'. They scale
        the work on the channels that the kernel computes, the time of reading a tile's q (and
        writing its o), and the time of reading a row of k and v."""
        parts = features(sizes, self.rows, self.dealt, self.processors, self.kind, self.at_once)
        of_channels = Features(
            launches=1, keys=computed, hot=computed, busiest=computed, tiles=of_q, prepared=of_kv,
            ragged=computed, mask=1, pieces=1, queries=computed, beyond=of_q, heads=1,
        )  # fmt: skip
        terms = zip(self.coefficients, parts, of_channels, strict=True)
        return sum(c * x * channels for c, x, channels in terms)


ENOUGH = 5  # sizes that a fit needs


def fit(
    measured: dict[Sizes, float], processors: int, kind: str = "full", dealt: str | None = None,
    prepared: float | None = None,
) -> Fit:  # fmt: skip
    """The best of the fits by each of TILES. measured: ms. dealt: one of DEALT; None: in order or,
    where calls have a band, perhaps longest first. prepared: the coefficient of rows of k and v,
    where it is known. Raises ValueError if fewer than ENOUGH sizes were measured."""
    if len(measured) < ENOUGH:
        raise ValueError(f"{len(measured)} sizes were timed, a prediction needs {ENOUGH}")
    bands = any(sizes.right is not None for sizes in measured)
    ways = (dealt,) if dealt else (IN_ORDER, LONGEST_FIRST)[: 1 + bands]
    ms, fits = torch.tensor(list(measured.values()), dtype=torch.float64), []
    for (rows, at_once), how in itertools.product(TILES, ways):
        if at_once > 1 and how not in (IN_ORDER, LONGEST_FIRST):
            continue
        terms = [features(sizes, rows, how, processors, kind, at_once) for sizes in measured]
        parts = torch.tensor(terms, dtype=torch.float64)
        columns = Features(*parts.unbind(1))  # views of parts
        # Where none heats the card it would be a term of any curvature.
        if columns.keys.max() < HEATS / 10:
            columns.hot.zero_()
        rest = 1 - (prepared or 0.0) * columns.prepared / ms
        if prepared is not None:
            columns.prepared.zero_()
        # A term that is 0 for all sizes but one gets no coefficient: it would absorb the residual
        # of that size.
        known_terms = (parts != 0).sum(0) > 1
        relative = parts[:, known_terms] / ms[:, None]
        scale = relative.mean(0)
        relative /= scale  # times the coefficients, it should be the rest
        found = _nonnegative(relative, rest)
        # A fit to few sizes errs more elsewhere.
        free = max(1, len(measured) - int((found > 0).sum()))
        error = ((relative @ found - rest).square().sum() / free).sqrt().item()
        coefficients = torch.zeros(len(known_terms), dtype=torch.float64)
        coefficients[known_terms] = found / scale
        if prepared is not None:
            coefficients[Features._fields.index("prepared")] = prepared
        of_each = Features(*coefficients.tolist())
        fits.append(Fit(rows, how, of_each, error, processors, kind, at_once))
    return min(fits, key=lambda fit: fit.error)


@functools.cache
def _subsets(width: int) -> torch.Tensor:
    """All but the empty one, a row each: 1 where a column is in it."""
    return torch.tensor(list(itertools.product((0.0, 1.0), repeat=width)))[1:].double()


def _nonnegative(relative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """x >= 0 that minimises |relative x - target|: the best least-squares solution of any subset of
    the columns that has no negative number. Ten columns have 1,023 subsets, solved at once."""
    subsets = _subsets(relative.shape[1])
    square = relative.mT @ relative * subsets[:, :, None] * subsets[:, None, :]
    x = torch.linalg.pinv(square, hermitian=True) @ ((target @ relative) * subsets)[:, :, None]
    x = x[:, :, 0] * subsets
    error = (x @ relative.mT - target).square().sum(1)
    error[(x < 0).any(1)] = torch.inf
    return x[error.argmin()]


class Prediction(NamedTuple):
    """One call's ms by a recipe, with its preparation, and by the fastest of SDPA's backends."""

    recipe: str
    ours: float
    sdpa: float
    error: float  # of the two fits together, relative; 0 where both were measured
    warpgroups: int | None = None  # Candidate's

    @property
    def speedup(self) -> float:
        return self.sdpa / self.ours

    @property
    def wins(self) -> bool:
        """Whether the recipe is faster by more than chance: by the spread of the medians, or by
        half the fit's error where that is more. A margin of the whole error was worse: 1 % fewer of
        491 calls came within 3 % of the best, and as many fell below 0.97x."""
        return self.sdpa >= self.ours * max(MIN_SPEEDUP, 1 + self.error / 2)

    def __str__(self):
        times = f"{self.ours:.3g} and {self.sdpa:.3g} ms"
        return f"{self.speedup:.2f}x SDPA by the cost model ({times})"


def fastest(predictions: Sequence[Prediction]) -> Prediction:
    """The first, which mostly is the fastest, unless another one is faster by more than its
    error."""
    first = predictions[0]
    return min(predictions, key=lambda each: each.ours * (1 + each.error * (each is not first)))


def first_length(wins) -> int | None:
    """The N from which on `wins(N)` holds, up to 2^20, on a grid of eight lengths an octave; None:
    not even there."""
    grid, N = [], SHORTEST
    while N <= 2**20:
        grid.insert(0, N)
        N = max(N + 128, round(N * 2 ** (1 / 8) / 128) * 128)
    return min(itertools.takewhile(wins, grid), default=None)
