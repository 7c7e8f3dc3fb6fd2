"""Which variants of a test run."""

import itertools

import pairs as pairs_module
import pytest
from pairs import chosen, covering, drawn, pairs, rows, seeds

AXES = {"gpu": [80, 89, 90, 100], "recipe": ["16-bit", "fp8", "fp4"], "D": [64, 128, 256],
        "mask": [None, "rows", "bias", [1, 2]]}  # fmt: skip


def can_run(recipe, gpu):
    return recipe == "16-bit" or gpu >= 89


def pairs_of(found) -> set:
    return {pair for row in found for pair in itertools.combinations(enumerate(map(str, row)), 2)}


def test_few_rows_have_every_pair_that_may_be():
    every = rows(AXES, can_run)
    assert len(every) == 36 * 3 + 12 and all(can_run(row[1], row[0]) for row in every)
    chosen = [every[i] for i in covering(every)]
    assert pairs_of(chosen) == pairs_of(every)
    assert len(chosen) <= 20


def test_of_one_axis_every_value_is_chosen():
    assert covering(rows({"D": [64, 128, 128]})) == [0, 1]


@pytest.fixture
def none_drawn(monkeypatch):
    monkeypatch.delenv("EVERY_VARIANT", raising=False)
    monkeypatch.setattr(pairs_module, "DRAWN", 0)


def variants(mark) -> list[tuple]:
    return [each.values for each in mark.args[1]]


def test_variants_that_always_run_are_chosen_among_those_asked_for(none_drawn):
    always = variants(pairs(can_run, among=lambda D: D > 64, **AXES))
    assert len(always) <= 20
    assert pairs_of(always) == pairs_of(row for row in rows(AXES, can_run) if row[2] > 64)


def test_values_that_are_alike_share_their_pairs(none_drawn):
    def generation(gpu):
        return "new" if gpu >= 89 else "old"

    few = variants(pairs(can_run, alike={"gpu": generation}, **AXES))
    assert len(few) < len(variants(pairs(can_run, **AXES)))
    assert {row[0] for row in few} == {*AXES["gpu"]}
    alike = [(generation(gpu), *rest) for gpu, *rest in few]
    every = [(generation(gpu), *rest) for gpu, *rest in rows(AXES, can_run)]
    assert pairs_of(alike) == pairs_of(every)


def test_what_must_occur_beside_the_pairs_does(none_drawn):
    every = {row[:3] for row in rows(AXES, can_run)}
    for triples in (False, True):
        each = (lambda *row: [row[:3]]) if triples else None
        found = variants(pairs(can_run, each=each, **AXES))
        assert ({row[:3] for row in found} == every) == triples


def test_a_run_has_what_it_draws_or_every_variant(none_drawn, monkeypatch):
    def found():
        by_hand = chosen(lambda N, D: N == D or D == 2, N=[1, 2], D=[1, 2, 3])
        marked = pairs(can_run, marks=lambda *row: [pytest.mark.gpu], **AXES)
        assert sum(bool(x.marks) for x in marked.args[1]) == few
        return variants(by_hand), len(variants(seeds(300, always=3))), len(variants(marked))

    few = len(variants(pairs(can_run, **AXES)))
    assert found() == ([(1, 1), (1, 2), (2, 2)], 3, few)
    monkeypatch.setattr(pairs_module, "DRAWN", 0.5)
    by_hand, number, of_pairs = found()
    assert {(1, 1), (1, 2), (2, 2)} <= {*by_hand} and 100 < number < 200
    assert few < of_pairs < len(rows(AXES, can_run))
    monkeypatch.setenv("EVERY_VARIANT", "1")
    by_hand, number, of_pairs = found()
    assert (len(by_hand), number, of_pairs) == (6, 300, len(rows(AXES, can_run)))


def test_a_product_that_is_too_large_is_sampled():
    axes = {str(i): list(range(8)) for i in range(8)}
    every = rows(axes)
    assert len(every) == 20_000 and every == rows(axes)
    assert pairs_of(every[i] for i in covering(every)) == pairs_of(every)
    assert len(rows(axes, most=100)) == 100


def test_a_seed_draws_a_share_and_the_same_again(monkeypatch):
    monkeypatch.delenv("EVERY_VARIANT", raising=False)
    names = [f"test.py::test[{i}]" for i in range(20_000)]
    found = {}
    for seed in ("1", "2", "1 "):
        monkeypatch.setenv("SEED", seed.strip())
        found[seed] = {name for name in names if drawn(name)}
        assert len(found[seed]) == pytest.approx(20_000 * pairs_module.DRAWN, rel=0.2)
    assert found["1"] == found["1 "] and len(found["1"] & found["2"]) < 40
