"""How long a call takes: a model of every recipe and of SDPA's backends, fitted to measurements.

Attention kernels deal row tiles to the GPU's processors; a tile takes as long as the keys it sees
are many. Of a call's sizes that gives eight numbers (`features`), and a time is their sum, each
times a coefficient of its own that is not negative. The coefficients are fitted to times measured
on that GPU (sage_inductor/measured.py has those), by least squares of the relative error.

One `Fit` is for one head_dim and kind of call: over batches, heads and lengths it interpolates.
"""

import functools
import heapq
import itertools
from typing import NamedTuple

import torch

MIN_SPEEDUP = 1.02  # faster by more than the spread of the medians
MIN_GAIN = 0.01  # ms: of calls of 0.02 to 0.06 ms the fits err by more (H200, 2026-11-23)

# Kinds of calls: without a mask ("full", "causal", "window": a band), with one row for all queries
# ("keys": padding), with a bool ("mask") or an additive ("bias") one. A window that flex_attention
# computes is not SDPA's with a mask, and nothing here times it.
TIMED = ("full", "causal", "window", "keys", "mask", "bias")
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

    @property
    def dense(self) -> "Sizes":
        """The same where the band is hidden in a mask: every key is computed."""
        return self._replace(left=None, right=None)

    @property
    def stacked(self) -> "Sizes":
        """The same where all batches share k and v, and the recipe computes them as one."""
        return self._replace(B=1, N_q=self.B * self.N_q)


ROWS = (64, 128, 192, 256)  # of a tile; two programs of 64 that share a processor are one of 128
HEATS = 2e5  # keys a processor, from which a call lasts long enough to slow the card's clock


def features(
    sizes: Sizes, rows: int, longest_first: bool, processors: int, kind: str = "full"
) -> tuple[float, ...]:
    """What a time is a sum of, for each processor: 1 (launches), keys that tiles see, evenly dealt;
    these once more, as the card heats; as tiles are dealt, one after the other; tiles (their q and
    o); rows of k and v (which are prepared); the evenly dealt keys once more where `_is_ragged`;
    elements of a mask with a row for each query, which SDPA reads and converts."""
    heads, seen = sizes.B * sizes.H_q, _seen(*sizes[3:], rows)
    even = heads * sum(seen) / processors
    return (
        1.0,
        even,
        even * min(1.0, even / HEATS),
        _busiest(seen, heads, longest_first, processors),
        heads * len(seen) / processors,
        sizes.B * sizes.H_kv * sizes.N_kv / processors,
        even * _is_ragged(sizes, kind),
        sizes.N_q * sizes.N_kv / processors * _has_rows(sizes, kind),
    )


def _has_rows(sizes: Sizes, kind: str) -> bool:
    """Whether there is a mask with a row for each query: a window's in SDPA (`Sizes.dense`)."""
    is_dense = sizes.left is None and sizes.right is None
    return kind in ("mask", "bias") or (kind == "window" and is_dense)


def _is_ragged(sizes: Sizes, kind: str) -> bool:
    """Whether cuDNN takes longer for the number of keys: 5 to 20 % where all are seen and they are
    no multiple of 128, 1.6 to 2 times as long under a mask with several rows, of odd lengths."""
    if kind in ("full", "causal"):
        return sizes.left is None and sizes.right is None and sizes.N_kv % 128 > 0
    several = sizes.B > 1 if kind == "keys" else _has_rows(sizes, kind)
    return several and sizes.N_kv % 2 > 0


@functools.lru_cache(maxsize=4096)
def _seen(N_q: int, N_kv: int, left: int | None, right: int | None, rows: int) -> tuple[int, ...]:
    """The keys that each tile of one head sees."""
    if left is None and right is None:
        return (N_kv,) * -(-N_q // rows)
    seen = []
    for row in range(0, N_q, rows):
        begin = 0 if left is None else max(0, row - left)
        end = N_kv if right is None else min(N_kv, min(row + rows, N_q) + right)
        seen.append(max(0, end - begin))
    return tuple(seen)


ROUNDS = 16  # of tiles; where a processor gets more, the last one hardly counts


@functools.lru_cache(maxsize=4096)
def _busiest(seen: tuple[int, ...], heads: int, longest_first: bool, processors: int) -> float:
    """Keys that the busiest processor computes: whoever is first done takes the next tile."""
    count = heads * len(seen)
    if min(seen) == max(seen):
        return -(-count // processors) * seen[0]
    if count > ROUNDS * processors:
        return heads * sum(seen) / processors + (0 if longest_first else max(seen) / 2)
    tiles = itertools.chain(*(seen,) * heads)
    busy = [0] * processors
    for keys in sorted(tiles, reverse=True) if longest_first else tiles:
        heapq.heapreplace(busy, busy[0] + keys)
    return max(busy)


# -- the fit ----


class Fit(NamedTuple):
    """A time as a function of sizes."""

    rows: int  # of a tile, out of ROWS
    longest_first: bool  # how tiles are dealt
    coefficients: tuple[float, ...]  # ms, of `features`
    error: float  # root mean square of predicted / measured - 1
    processors: int  # of the GPU that was measured
    kind: str  # of the calls: one of KINDS

    def ms(self, sizes: Sizes) -> float:
        parts = features(sizes, self.rows, self.longest_first, self.processors, self.kind)
        return sum(c * x for c, x in zip(self.coefficients, parts, strict=True))


ENOUGH = 5  # sizes that a fit needs


def fit(measured: dict[Sizes, float], processors: int, kind: str = "full") -> Fit:
    """The best of those with another tile. measured: ms. Raises ValueError if there are fewer than
    ENOUGH."""
    if len(measured) < ENOUGH:
        raise ValueError(f"{len(measured)} sizes were timed, a prediction needs {ENOUGH}")
    bands = any(sizes.right is not None for sizes in measured)
    ways = itertools.product(ROWS, (False, True) if bands else (False,))
    fits = (_fit(measured, *dealt, processors, kind) for dealt in ways)
    return min(fits, key=lambda fit: fit.error)


def _fit(
    measured: dict[Sizes, float], rows: int, longest_first: bool, processors: int, kind: str
) -> Fit:
    parts = torch.tensor(
        [features(sizes, rows, longest_first, processors, kind) for sizes in measured],
        dtype=torch.float64,
    )
    if parts[:, 1].max() < HEATS / 10:  # none heats the card: it would be a term of any curvature
        parts[:, 2] = 0
    ms = torch.tensor(list(measured.values()), dtype=torch.float64)
    known = parts.any(0)  # of what is in none of them nothing is: 0
    relative = parts[:, known] / ms[:, None]
    scale = relative.mean(0)
    relative /= scale  # times the coefficients, it should be 1
    found = _nonnegative(relative)
    error = (relative @ found - 1).square().mean().sqrt().item()
    coefficients = torch.zeros(len(known), dtype=torch.float64)
    coefficients[known] = found / scale
    return Fit(rows, longest_first, tuple(coefficients.tolist()), error, processors, kind)


def _nonnegative(relative: torch.Tensor) -> torch.Tensor:
    """x >= 0 that minimises |relative x - 1|: the best least-squares solution of any subset of the
    columns that has no negative number. Of eight columns those are 255, solved at once."""
    width = relative.shape[1]
    subsets = torch.tensor(list(itertools.product((0.0, 1.0), repeat=width)))[1:].double()
    square = relative.mT @ relative * subsets[:, :, None] * subsets[:, None, :]
    x = torch.linalg.pinv(square, hermitian=True) @ (relative.sum(0) * subsets)[:, :, None]
    x = x[:, :, 0] * subsets
    error = (x @ relative.mT - 1).square().sum(1)
    error[(x < 0).any(1)] = torch.inf
    return x[error.argmin()]


# -- what is decided by it ----


class Prediction(NamedTuple):
    """Of one call: ms of a recipe, with its preparation, and of the fastest of SDPA's backends."""

    recipe: str
    ours: float
    sdpa: float
    error: float  # of the two fits together, relative

    @property
    def speedup(self) -> float:
        return self.sdpa / self.ours

    @property
    def wins(self) -> bool:
        """Whether the recipe is faster by more than chance: by the spread of the medians, or where
        the fit is worse than that, by half its error; and by MIN_GAIN more. By all of its error,
        1 % fewer of 491 calls were within 3 % of the best, and no fewer below 0.97x."""
        return self.sdpa >= self.ours * max(MIN_SPEEDUP, 1 + self.error / 2) + MIN_GAIN

    def __str__(self):
        return f"{self.speedup:.2f}x SDPA by the fit ({self.ours:.3g} and {self.sdpa:.3g} ms)"


def first_length(wins, limit: int = 2**20) -> int | None:
    """The N from which on `wins(N)` holds, up to `limit`, on a grid of eight lengths an octave;
    None: not even at the limit."""
    grid, N = [], SHORTEST
    while N <= limit:
        grid.append(N)
        N = max(N + 128, round(N * 2 ** (1 / 8) / 128) * 128)
    found = None
    for N in reversed(grid):
        if not wins(N):
            break
        found = N
    return found
