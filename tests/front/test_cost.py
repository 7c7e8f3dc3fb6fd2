"""The model of times, held against dealing the tiles out one by one."""

import itertools
import math
import random

import pytest
import torch
from pairs import seeds
from support import band_mask

from sage_inductor.choose import cost
from sage_inductor.choose.cost import IN_ORDER, KEYS, LONGEST_FIRST, Features, Sizes, features
from sage_inductor.ops.attention.tiles import schedule
from sage_inductor.ops.visibility import Band

FLASH, LAST_SHARED, TILES = cost.FLASH, cost.LAST_SHARED, cost.TILES
NONE = Features(*[0.0] * len(Features._fields))


def tiles_of(sizes: Sizes, rows: int) -> list[int]:
    """Keys that each tile of a head computes: the blocks from the first that any row sees to the
    last."""
    seen = band_mask(Band(sizes.left, sizes.right), sizes.N_q, sizes.N_kv)
    found = [tile.any(0).nonzero() // KEYS for tile in seen.split(rows)]
    return [KEYS * int(keys[-1] - keys[0] + 1) if len(keys) else 0 for keys in found]


def busiest(tiles: list[int], processors: int) -> int:
    """Whoever is first done takes the next tile."""
    busy = [0] * processors
    for keys in tiles:
        busy[busy.index(min(busy))] += keys
    return max(busy)


def drawn(draw: random.Random, longest: int = 900, processors: int = 8):
    """Sizes, a tile's rows, its tiles in the order of time, and how they are dealt."""
    B, H_kv, group = draw.randint(1, 3), draw.randint(1, 3), draw.randint(1, 3)
    N_q, N_kv, rows = draw.randint(1, longest), draw.randint(1, longest), draw.choice(TILES)[0]
    left, right = draw.choice([None, 0, 100, 300]), draw.choice([None, 0, 7, 200])
    sizes = Sizes(B, H_kv * group, H_kv, N_q, N_kv, left, right)
    dealt = draw.choice((IN_ORDER, LONGEST_FIRST))
    tiles = tiles_of(sizes, rows) * (sizes.B * sizes.H_q)
    tiles = sorted(tiles, reverse=True) if dealt == LONGEST_FIRST else tiles
    return sizes, rows, dealt, tiles


@pytest.mark.parametrize("seed", range(60))
def test_what_a_time_is_made_of_is_what_is_dealt_out(seed):
    sizes, rows, dealt, tiles = drawn(random.Random(seed))
    at_once, processors = random.Random(seed).choice((1, 3, 4)), max(8, -(-len(tiles) // cost.ROUNDS))  # fmt: skip
    found = features(sizes, rows, dealt, processors, at_once=at_once)
    even, most = sum(tiles) / processors, busiest(tiles, processors)
    of_one = even if at_once == 1 else busiest(tiles, at_once * processors)
    ragged = sizes.left is sizes.right is None and sizes.N_kv % 128 != 0
    expected = Features(
        launches=1, keys=of_one, hot=even * even / cost.HEATS, busiest=most,
        tiles=len(tiles) / processors, prepared=sizes.B * sizes.H_kv * sizes.N_kv / processors,
        ragged=most * ragged, mask=0, pieces=0, queries=0,
        beyond=max(0, len(tiles) / processors - at_once) * (at_once > 1),
        heads=sizes.B * sizes.H_kv / processors,
    )  # fmt: skip
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(40))
def test_in_training_tiles_of_keys_are_dealt_out_too(seed):
    """A head's tile of 128 keys computes, for each head of q that reads it, the blocks of queries
    that see it."""
    sizes, rows, dealt, _ = drawn(random.Random(seed))
    seen = band_mask(Band(sizes.left, sizes.right), sizes.N_q, sizes.N_kv)
    found = [tile.any(0).nonzero() for tile in seen.mT.split(KEYS)]
    tiles = [KEYS * int(n[-1] // KEYS - n[0] // KEYS + 1) if len(n) else 0 for n in found]
    tiles = [n * sizes.H_q // sizes.H_kv for n in tiles] * (sizes.B * sizes.H_kv)
    tiles = sorted(tiles, reverse=True) if dealt == LONGEST_FIRST else tiles
    kind = next(kind for kind, of in cost.TRAINED.items() if (of == "causal") == (seed % 2 == 0))
    forward = features(sizes, rows, dealt, 8, cost.TRAINED[kind])
    found = features(sizes, rows, dealt, 8, kind)
    assert found == forward._replace(queries=busiest(tiles, 8))


@pytest.mark.parametrize("seed", range(20))
def test_of_many_rounds_the_last_is_told_from_how_tiles_are_dealt(seed):
    """Longest first, it hardly counts; else it takes up to the longest tile more."""
    draw = random.Random(seed)
    sizes = Sizes(4, 30, 30, 2000, 2000, None, 0)
    for dealt in (IN_ORDER, LONGEST_FIRST):
        tiles = tiles_of(sizes, 128) * 120
        draw.shuffle(tiles)
        tiles = sorted(tiles, reverse=True) if dealt == LONGEST_FIRST else tiles
        expected = busiest(tiles, 8)
        found = features(sizes, 128, dealt, 8).busiest
        assert abs(found - expected) <= (0.1 if dealt == LONGEST_FIRST else 0.6) * max(tiles)


@pytest.mark.parametrize("seed", range(40))
def test_the_last_tiles_are_shared_block_by_block_where_the_hopper_kernel_does(seed):
    draw = random.Random(seed)
    H, N_q, N_kv = draw.randint(1, 30), draw.randint(1, 2000), draw.randint(1, 9000)
    sizes, processors = Sizes(2, H, H, N_q, N_kv), draw.choice((20, 132))
    tiles = tiles_of(sizes, 192) * 2 * H
    in_order = features(sizes, 192, IN_ORDER, processors)
    found = features(sizes, 192, LAST_SHARED, processors)
    shares = schedule(len(tiles), tiles[0] // KEYS, processors)
    assert (found.pieces, in_order.pieces) == (shares is not None, 0)
    assert found[:3] == in_order[:3] and found[4:6] == in_order[4:6]
    if shares is None:
        assert found == in_order
        return
    programs, whole = shares
    blocks = (len(tiles) - whole) * tiles[0] // KEYS
    dealt = [1] * blocks + tiles[:whole]  # one by one to the programs, then tiles to all
    least = max(len(dealt[i:blocks:programs]) for i in range(programs)) * KEYS
    assert found.busiest == least + whole // processors * tiles[0] <= in_order.busiest


def pieces_of(tiles: int, N_kv: int, processors: int) -> int:
    """As flash_attn's num_splits_heuristic(tiles, 2 * processors, blocks, 128) counts them."""
    at_once, blocks, best, efficiency = 2 * processors, -(-N_kv // 128), 0.0, []
    if tiles >= 0.8 * at_once:
        return 1
    for n in range(1, min(128, at_once, blocks) + 1):
        if n > 1 and math.ceil(blocks / n) == math.ceil(blocks / (n - 1)):
            efficiency.append(0.0)
            continue
        waves = tiles * n / at_once
        efficiency.append(waves / math.ceil(waves))
        best = max(best, efficiency[-1])
    return next(n + 1 for n, each in enumerate(efficiency) if each >= 0.85 * best)


@seeds(60, always=6)
def test_flash_attention_cuts_tiles_where_they_are_few(seed):
    draw = random.Random(seed)
    H, N_q, N_kv = draw.randint(1, 6), draw.randint(1, 6000), draw.randint(1, 40000)
    causal = draw.random() < 0.5
    sizes = Sizes(1, H, 1, N_q, N_q if causal else N_kv, None, 0 if causal else None)
    tiles = tiles_of(sizes, 64)
    pieces = pieces_of(len(tiles) * H, sizes.N_kv, 132)
    found, rows = features(sizes, rows := draw.choice(TILES)[0], FLASH, 132), rows
    assert found.pieces == (pieces > 1)
    if pieces == 1:
        assert found == features(sizes, rows, IN_ORDER, 132)
        return
    long = math.ceil(sizes.N_kv / (128 * pieces)) * 128
    begins = range(0, pieces * long, long)
    cut = [min(long, max(0, keys - begin)) for keys in tiles for begin in begins]
    assert sum(cut) == sum(tiles)  # nothing is lost
    weight = 64 / rows  # keys of a tile of 64 rows, in those of the fit's
    even = weight * H * sum(cut) / 132
    # Two at a time share a processor, each at half its speed.
    expected = even, even * even / cost.HEATS, weight * 2 * busiest(cut * H, 2 * 132)
    assert (found.keys, found.hot, found.busiest) == pytest.approx(expected)
    assert found.tiles == pytest.approx(weight * H * len(cut) / 132)


def test_some_calls_are_cut_and_some_are_not():
    found = [features(Sizes(1, H, H, 3000, 3000), 128, FLASH, 132).pieces for H in range(1, 9)]
    assert found == [1, 1, 1, 1, 0, 0, 0, 0]
    assert features(Sizes(1, 8, 8, 40, 9000), 128, FLASH, 132).pieces == 1  # a part of a tile
    found = [features(Sizes(1, H, H, 1500, 4096), 192, LAST_SHARED, 132).pieces for H in range(40)]
    assert 0 < sum(found) < len(found)
    for tiles, N_kv in itertools.product(range(1, 220), (999, 9000, 65536)):
        assert cost._flash_pieces(tiles, N_kv, 132) == pieces_of(tiles, N_kv, 132)


def test_a_card_gets_no_hotter_than_hot():
    found = features(Sizes(8, 32, 32, 30000, 30000), 128, IN_ORDER, 132)
    assert found.keys > cost.HEATS and found.hot == found.keys


@pytest.mark.parametrize(
    "rows, at_once, dealt",
    [(*tile, dealt) for tile in TILES for dealt in cost.DEALT[: None if tile[1] == 1 else 2]],
)
def test_a_fit_finds_how_a_kernel_deals_its_tiles_out(rows, at_once, dealt):
    """Of times that the model made, the model. Which kernels cut tiles is known, and told."""
    lengths = 1000, 1100, 1500, 2300, 3000, 4100, 6000, 9000, 12345
    bands = dealt in (IN_ORDER, LONGEST_FIRST)
    told = None if bands else dealt
    sizes = [
        Sizes(1, H, H, N, N, left if bands else None, 0 if bands else None)
        for N in lengths for H, left in ((1, 90), (9, None), (40, 700))
    ]  # fmt: skip
    beyond = 3e-4 if at_once > 1 else 0.0
    coefficients = NONE._replace(
        launches=0.05, keys=2e-5, hot=2e-6, busiest=1e-5, tiles=1e-4, ragged=1e-6, pieces=0.01,
        beyond=beyond, heads=0.02,
    )  # fmt: skip

    def ms(each):
        parts = features(each, rows, dealt, 132, at_once=at_once)
        return sum(c * x for c, x in zip(coefficients, parts, strict=True))

    found = cost.fit({each: ms(each) for each in sizes[::2] + sizes[1::2]}, 132, dealt=told)
    assert (found.rows, found.at_once, found.dealt) == (rows, at_once, dealt)
    assert found.error < 1e-6
    other = Sizes(2, 12, 4, 5000, 5000, *((900, 0) if bands else ()))
    assert found.ms(other) == pytest.approx(ms(other), rel=1e-3)


@pytest.mark.parametrize("kind", cost.KINDS)
def test_which_keys_are_ragged(kind):
    """Under a mask with several rows, odd ones; without a mask, what is no multiple of 128. A mask
    with a row for each query is what a window is in SDPA."""
    for B, N_kv in itertools.product((1, 2), (1024, 1025, 1026, 1152)):
        sizes = Sizes(B, 2, 2, 512, N_kv)
        has_rows = kind in ("window", "mask", "bias")
        expected = N_kv % 2 == 1 and (has_rows or (kind == "keys" and B == 2))
        if cost.TRAINED.get(kind, kind) in ("full", "causal"):
            expected = N_kv in (1025, 1026)
        found = features(sizes, 128, IN_ORDER, 132, kind)
        assert found.ragged == expected * found.busiest
        assert found.mask == has_rows * 512 * N_kv / 132
        band = sizes._replace(left=9 if kind == "window" else None, right=0)
        if kind in ("causal", "window"):  # not all keys are seen, and ours has no mask
            found = features(band, 128, IN_ORDER, 132, kind)
            assert (found.ragged, found.mask, found.pieces, found.queries) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    "kind, B, more, divisor, lengths",
    [
        ("full", 1, 1.1, 128, (1024, 1500, 2048, 2500, 4096, 5000, 8192, 9000)),
        ("keys", 2, 1.8, 2, (1024, 1501, 2048, 2501, 4096, 5001, 8192, 9001)),
    ],
)
def test_a_fit_tells_ragged_keys_of_its_kind(kind, B, more, divisor, lengths):
    def ms(each):
        return B * -(-each.N_kv // KEYS) * (more if each.N_kv % divisor else 1.0)

    sizes = [Sizes(B, 8, 8, 2048, N) for N in (*lengths, 3072, 3073)]
    found = cost.fit({each: ms(each) for each in sizes[:-2]}, 132, kind)
    assert found.error < 1e-6
    for each in sizes[-2:]:
        assert found.ms(each) == pytest.approx(ms(each), rel=1e-3)
    if kind == "keys":  # of one batch's none are
        assert found.ms(Sizes(1, 8, 8, 2048, 3073)) == pytest.approx(25, rel=1e-3)


def test_of_what_no_size_has_a_fit_says_nothing():
    """No ragged keys, no mask, nothing that heats the card: a hot call takes as long as its keys."""
    lengths = itertools.product((512, 1408, 2048), (1024, 2048, 4096), (8, 20, 33))
    sizes = [Sizes(1, H, H, N_q, N_kv) for N_q, N_kv, H in lengths]
    times = {each: 1e-3 + 1e-6 * features(each, 128, IN_ORDER, 132).keys for each in sizes}
    found = cost.fit(times, 132)
    assert found.error < 1e-6 and found.coefficients._replace(launches=0, keys=0) == NONE
    for other in (Sizes(1, 8, 8, 2048, 3001), Sizes(8, 64, 64, 30000, 30080)):
        expected = 1e-3 + 1e-6 * features(other, 128, IN_ORDER, 132).keys
        assert found.ms(other) == pytest.approx(expected, rel=0.02)


def test_of_what_one_size_has_a_fit_says_nothing():
    """The one call that is cut takes 0.5 ms more, for a reason of its own."""
    sizes = [Sizes(1, 24, 24, N, N) for N in (1024, 2048, 2500, 4096, 5001, 8192)]
    cut = Sizes(1, 1, 1, 4096, 4096)
    assert [features(each, 128, FLASH, 132).pieces for each in (*sizes, cut)] == [0] * 6 + [1]
    times = {each: 1e-3 + 1e-5 * features(each, 128, FLASH, 132).busiest for each in (*sizes, cut)}
    times[cut] += 0.5
    assert cost.fit(times, 132, dealt=FLASH).coefficients.pieces == 0
    times[Sizes(1, 2, 2, 4096, 4096)] = times[cut]
    assert cost.fit(times, 132, dealt=FLASH).coefficients.pieces > 0.1


def test_a_fit_takes_what_is_known_of_the_preparation():
    """With as many rows of q as of k, the times are the same for tiles as for rows of k and v."""
    sizes = [Sizes(1, H, H, N, N, None, 0) for H in (8, 40) for N in (1024, 1500, 4096, 9000)]

    def ms(each):
        parts = features(each, 192, LONGEST_FIRST, 132)
        return 0.01 + 1e-5 * parts.busiest + 2e-3 * parts.tiles + 7e-5 * parts.prepared

    times = {each: ms(each) for each in sizes}
    found = cost.fit(times, 132, "causal", prepared=7e-5)
    assert found.coefficients.prepared == 7e-5
    assert found.coefficients.tiles == pytest.approx(2e-3, rel=0.01)
    grouped = Sizes(4, 32, 2, 3000, 3000, None, 0)
    assert found.ms(grouped) == pytest.approx(ms(grouped), rel=1e-3)
    without = cost.fit(times, 132, "causal", prepared=0.0)
    assert found.error < 1e-6 < abs(without.ms(grouped) - ms(grouped))


@pytest.mark.parametrize("kind", ["full", "window", "full-training"])
def test_another_head_dim_has_its_share_of_a_time(kind):
    """Of the terms that channels count in: not of launches, of a mask, or of what is added up."""
    sizes, coefficients = Sizes(2, 8, 4, 1000, 1001), Features(*(2.0**-n for n in range(12)))
    at_once = 1 if kind in cost.TRAINED else 3
    fit = cost.Fit(64, IN_ORDER, coefficients, 0.0, 8, kind, at_once)
    parts = features(sizes, 64, IN_ORDER, 8, kind, at_once)
    assert parts.ragged > 0 and (parts.mask > 0) == (kind == "window")
    assert (parts.queries > 0) == (kind == "full-training") and (parts.beyond > 0) == (at_once > 1)
    terms = Features(*(c * x for c, x in zip(coefficients, parts, strict=True)))
    assert fit.ms(sizes) == pytest.approx(sum(terms))
    found = fit.ms(sizes, computed=3, of_q=5, of_kv=7)
    of_keys = terms.keys + terms.hot + terms.busiest + terms.ragged + terms.queries
    more = 2 * of_keys + 4 * (terms.tiles + terms.beyond) + 6 * terms.prepared
    assert found == pytest.approx(sum(terms) + more)


def test_the_error_of_a_fit_to_few_sizes_is_that_of_others():
    """The residual standard error: two numbers are found, by six."""
    sizes = [Sizes(1, 1, 1, 128 * (i + 8), 1024) for i in range(6)]
    noisy = {each: 1 + 0.1 * (-1) ** i for i, each in enumerate(sizes)}
    found = cost.fit(noisy, 132)
    used = sum(c > 0 for c in found.coefficients)
    squares = sum((found.ms(each) / ms - 1) ** 2 for each, ms in noisy.items())
    assert used > 0 and found.error == pytest.approx((squares / (6 - used)) ** 0.5)


@pytest.mark.parametrize("seed", range(30))
def test_no_coefficient_is_negative_and_no_other_are_better(seed):
    """The conditions of Karush, Kuhn and Tucker."""
    generator = torch.Generator().manual_seed(seed)
    relative = torch.rand(12, 6, generator=generator, dtype=torch.float64)
    target = torch.rand(12, generator=generator, dtype=torch.float64) + 0.5
    x = cost._nonnegative(relative, target)
    gradient = relative.mT @ (relative @ x - target)
    assert (x >= 0).all() and (gradient > -1e-6).all()
    assert (gradient * x).abs().max() < 1e-6 and (seed or (x == 0).any())


@pytest.mark.parametrize(
    "ours, speedup, error, wins",
    [
        (100.0, 1.019, 0.0, False), (100.0, 1.021, 0.0, True), (100.0, 0.9, 0, False),
        (100.0, 1.049, 0.1, False), (100.0, 1.051, 0.1, True),  # half of the error
        (0.01, 1.021, 0.02, True), (0.01, 1.019, 0.02, False),  # of a call of 10 us, too
    ],
)  # fmt: skip
def test_what_is_faster_by_more_than_chance_wins(ours, speedup, error, wins):
    assert cost.Prediction("sage1", ours, ours * speedup, error).wins == wins


def test_the_first_length_is_that_from_which_on_all_win():
    first = cost.first_length
    assert 8000 <= first(lambda N: 2000 < N < 3000 or N >= 8000) < 8000 * 2 ** (1 / 8) + 128
    assert first(lambda N: True) == cost.SHORTEST and first(lambda N: N > 1024) == 1152
    assert first(lambda N: N < 12000) is None and first(lambda N: False) is None


def test_too_few_sizes_are_refused():
    times = {Sizes(1, 1, 1, 1024 * (i + 1), 1024): float(i + 1) for i in range(cost.ENOUGH)}
    assert math.isfinite(cost.fit(times, 132).error)
    times.popitem()
    with pytest.raises(ValueError, match="4 sizes were timed, a prediction needs 5"):
        cost.fit(times, 132)


def test_rotation_takes_its_time_for_each_row_of_each_batch():
    one, four = (cost.Sizes(B, 32, 8, 1024, 2048) for B in (1, 4))
    assert four.rotation(128) == pytest.approx(4 * one.rotation(128))
    assert one.rotation(72) == pytest.approx(cost.ROTATION * 128 * (32 * 1024 + 8 * 2048))
