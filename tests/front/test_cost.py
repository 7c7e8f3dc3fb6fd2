"""The model of times, held against dealing the tiles out one by one."""

import itertools
import math
import random

import pytest
import torch
from support import band_mask

from sage_inductor import cost
from sage_inductor.cost import ENOUGH, ROUNDS, ROWS, Prediction, Sizes, features
from sage_inductor.patterns.call import Band


def tiles_of(sizes: Sizes, rows: int) -> list[int]:
    """Keys that each tile of a head sees: from the first that any row sees to the last."""
    seen = band_mask(Band(sizes.left, sizes.right), sizes.N_q, sizes.N_kv)
    found = [tile.any(0).nonzero() for tile in seen.split(rows)]
    return [int(keys[-1] - keys[0]) + 1 if len(keys) else 0 for keys in found]


def busiest(tiles: list[int], processors: int) -> int:
    """Whoever is first done takes the next tile."""
    busy = [0] * processors
    for keys in tiles:
        busy[busy.index(min(busy))] += keys
    return max(busy)


def drawn(draw: random.Random, longest: int = 900, processors: int = 8):
    """Sizes, a tile's rows, its tiles in the order of time, and how they are dealt."""
    B, H_kv, group = draw.randint(1, 3), draw.randint(1, 3), draw.randint(1, 3)
    N_q, N_kv, rows = draw.randint(1, longest), draw.randint(1, longest), draw.choice(ROWS)
    left, right = draw.choice([None, 0, 100, 300]), draw.choice([None, 0, 7, 200])
    sizes = Sizes(B, H_kv * group, H_kv, N_q, N_kv, left, right)
    longest_first = draw.random() < 0.5
    tiles = tiles_of(sizes, rows) * (sizes.B * sizes.H_q)
    tiles = sorted(tiles, reverse=True) if longest_first else tiles
    return sizes, rows, longest_first, tiles


@pytest.mark.parametrize("seed", range(60))
def test_what_a_time_is_made_of_is_what_is_dealt_out(seed):
    sizes, rows, longest_first, tiles = drawn(random.Random(seed))
    processors = max(8, -(-len(tiles) // ROUNDS))
    found = features(sizes, rows, longest_first, processors)
    even = sum(tiles) / processors
    ragged = sizes.left is sizes.right is None and sizes.N_kv % 128 != 0
    expected = (
        1, even, even * even / cost.HEATS, busiest(tiles, processors), len(tiles) / processors,
        sizes.B * sizes.H_kv * sizes.N_kv / processors, even * ragged, 0,
    )  # fmt: skip
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(20))
def test_of_many_rounds_the_last_is_told_from_how_tiles_are_dealt(seed):
    """Longest first, it hardly counts; else it takes up to the longest tile more."""
    draw = random.Random(seed)
    sizes = Sizes(4, 30, 30, 2000, 2000, None, 0)
    for longest_first in (False, True):
        tiles = tiles_of(sizes, 128) * 120
        draw.shuffle(tiles)
        tiles = sorted(tiles, reverse=True) if longest_first else tiles
        expected = busiest(tiles, 8)
        found = features(sizes, 128, longest_first, 8)[3]
        assert abs(found - expected) <= (0.1 if longest_first else 0.6) * max(tiles)


def test_a_card_gets_no_hotter_than_hot():
    _, even, hot, *_ = features(Sizes(8, 32, 32, 30000, 30000), 128, False, 132)
    assert even > cost.HEATS and hot == even


def test_of_a_band_in_a_mask_every_key_is_computed():
    assert Sizes(1, 2, 2, 9, 9, 4, 3).dense == Sizes(1, 2, 2, 9, 9, None, None)


@pytest.mark.parametrize("longest_first", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_a_fit_finds_how_a_kernel_deals_its_tiles_out(rows, longest_first):
    """Of times that the model made, the model."""
    lengths = 1000, 1100, 1500, 2300, 3000, 4100, 6000, 9000, 12345
    sizes = [Sizes(1, H, H, N, N, left, 0) for N in lengths for H, left in ((9, None), (40, 700))]
    coefficients = 0.05, 0.0, 2e-6, 1e-5, 1e-4, 0.0, 1e-6, 0.0

    def ms(each):
        parts = features(each, rows, longest_first, 132)
        return sum(c * x for c, x in zip(coefficients, parts))

    found = cost.fit({each: ms(each) for each in sizes[::2] + sizes[1::2]}, 132)
    assert (found.rows, found.longest_first) == (rows, longest_first) and found.error < 1e-6
    other = Sizes(2, 12, 4, 5000, 5000, 900, 0)
    assert found.ms(other) == pytest.approx(ms(other), rel=1e-3)


@pytest.mark.parametrize("kind", cost.KINDS)
def test_which_keys_are_ragged(kind):
    """Under a mask with several rows, odd ones; without a mask, what is no multiple of 128. A mask
    with a row for each query is what a window is in SDPA."""
    for B, N_kv in itertools.product((1, 2), (1024, 1025, 1026, 1152)):
        sizes = Sizes(B, 2, 2, 512, N_kv)
        has_rows = kind in ("window", "mask", "bias")
        expected = N_kv % 2 == 1 and (has_rows or (kind == "keys" and B == 2))
        if kind in ("full", "causal"):
            expected = N_kv in (1025, 1026)
        even, *_, ragged, mask = features(sizes, 128, False, 132, kind)[1:]
        assert ragged == expected * even and mask == has_rows * 512 * N_kv / 132
        band = sizes._replace(left=9 if kind == "window" else None, right=0)
        if kind in ("causal", "window"):  # not all keys are seen, and ours has no mask
            assert features(band, 128, False, 132, kind)[-2:] == (0, 0)


def test_a_fit_knows_its_kind():
    sizes = [Sizes(2, 8, 8, 2048, N) for N in (1024, 1501, 2048, 2501, 4096, 5001, 8192, 9001)]
    times = {each: 1e-3 * each.N_kv * (1.8 if each.N_kv % 2 else 1.0) for each in sizes}
    found = cost.fit(times, 132, "keys")
    assert found.error < 1e-6
    assert found.ms(Sizes(2, 8, 8, 2048, 3073)) == pytest.approx(1.8 * 3.073, rel=1e-3)
    assert found.ms(Sizes(1, 8, 8, 2048, 3073)) == pytest.approx(3.073 / 2, rel=1e-3)


def test_a_fit_tells_ragged_keys():
    sizes = [Sizes(1, 8, 8, 2048, N) for N in (1024, 1500, 2048, 2500, 4096, 5000, 8192, 9000)]
    times = {each: 1e-3 * each.N_kv * (1.1 if each.N_kv % 128 else 1.0) for each in sizes}
    found = cost.fit(times, 132)
    assert found.error < 1e-6
    for N, expected in ((3072, 3.072), (3073, 1.1 * 3.073)):
        assert found.ms(Sizes(1, 8, 8, 2048, N)) == pytest.approx(expected, rel=1e-3)


def test_of_what_no_size_has_a_fit_says_nothing():
    """No ragged keys, no mask, nothing that heats the card: a hot call takes as long as its keys."""
    lengths = itertools.product((512, 1408, 2048), (1024, 2048, 4096), (8, 20, 33))
    sizes = [Sizes(1, H, H, N_q, N_kv) for N_q, N_kv, H in lengths]
    times = {each: 1e-3 + 1e-6 * features(each, 128, False, 132)[1] for each in sizes}
    found = cost.fit(times, 132)
    assert found.error < 1e-6 and [found.coefficients[i] for i in (2, 6, 7)] == [0, 0, 0]
    for other in (Sizes(1, 8, 8, 2048, 3001), Sizes(8, 64, 64, 30000, 30080)):
        expected = 1e-3 + 1e-6 * features(other, 128, False, 132)[1]
        assert found.ms(other) == pytest.approx(expected, rel=0.02)


def test_the_error_of_a_fit_is_the_root_mean_square():
    noisy = {Sizes(1, 1, 1, 128 * (i + 8), 1000): 1 + 0.1 * (-1) ** i for i in range(40)}
    assert cost.fit(noisy, 132).error == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("seed", range(30))
def test_no_coefficient_is_negative_and_no_other_are_better(seed):
    """The conditions of Karush, Kuhn and Tucker."""
    generator = torch.Generator().manual_seed(seed)
    relative = torch.rand(12, 6, generator=generator, dtype=torch.float64)
    x = cost._nonnegative(relative)
    gradient = relative.mT @ (relative @ x - 1)
    assert (x >= 0).all() and (gradient > -1e-6).all()
    assert (gradient * x).abs().max() < 1e-6 and (seed or (x == 0).any())


@pytest.mark.parametrize(
    "ours, speedup, error, wins",
    [
        (100.0, 1.019, 0.0, False),
        (100.0, 1.021, 0.0, True),
        (100.0, 1.049, 0.1, False),  # half of the error
        (100.0, 1.051, 0.1, True),
        (100.0, 0.9, 0, False),
        (0.05, 1.2, 0.02, False),  # some microseconds
        (0.05, 1.25, 0.02, True),
        (0.05, 1.24, 0.1, False),
    ],
)
def test_what_is_faster_by_more_than_chance_wins(ours, speedup, error, wins):
    assert Prediction("sage1", ours, ours * speedup, error).wins == wins


def test_the_first_length_is_that_from_which_on_all_win():
    def first(wins):
        return cost.first_length(wins, 2**14)

    assert 8000 <= first(lambda N: 2000 < N < 3000 or N >= 8000) < 8000 * 2 ** (1 / 8) + 128
    assert first(lambda N: True) == cost.SHORTEST and first(lambda N: N > 1024) == 1152
    assert first(lambda N: N < 12000) is None and first(lambda N: False) is None


def test_too_few_sizes_are_refused():
    times = {Sizes(1, 1, 1, 1024 * (i + 1), 1024): float(i + 1) for i in range(ENOUGH)}
    assert math.isfinite(cost.fit(times, 132).error)
    times.popitem()
    with pytest.raises(ValueError, match="4 sizes were timed, a prediction needs 5"):
        cost.fit(times, 132)
