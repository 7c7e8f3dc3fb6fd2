"""bench/sparse.py and bench/lists.py: what they measure, their rows, and their tables."""

import itertools
import json
import math
from types import SimpleNamespace
from unittest import mock

import pytest
import support
import torch
import torch.nn.functional as F

from bench import lists, pages, sparse, trained
from bench.capture import attending
from bench.trained import Size
from sage_inductor.ops.recipe import NAMED, decode
from sage_inductor.ops.reference.exact import how_often
from sage_inductor.ops.sdpa import SdpaCall


def subject():
    """Four steps with two calls each, of tokens that resemble their neighbours."""
    q, k, v = torch.randn(3, 1, 2, 700, 16).cumsum(3).div(4).unbind(0)

    def model(scale):
        return sum(F.scaled_dot_product_attention(scale * q, k, v) for _ in range(2))

    def score(out, exact):
        error = (out - exact).square().mean().item()
        return {"psnr": -10 * math.log10(error) if error else None, "frechet": error}

    return SimpleNamespace(
        model=model, run=lambda call: sum(call(1 / (1 + i)) for i in range(4)), score=score, calls=2
    )


@pytest.fixture(autouse=True)
def four_steps(monkeypatch):
    monkeypatch.setattr(sparse, "EULER", 4)
    monkeypatch.setattr(sparse, "EDGE", (1, 1))
    monkeypatch.setattr(sparse, "DENSE_STEPS", (0, 2))
    monkeypatch.setattr(sparse, "TOP_K", (1.0, 0.3))


def recorded(of, case, density=0.0):
    """The output, and per step the recipes and the parts of the keys that were asked for."""
    attention, called, op = sparse.Sparse(case, of.calls, density), [], torch.ops.sage.sdpa

    def record(*args):
        called.append((decode(args[9]), SdpaCall(*args).block_q))
        return op(*args)

    with mock.patch.object(torch.ops.sage, "sdpa", record), attending(attention):
        out = of.run(of.model)
    return out, called[::2], torch.stack(attention.densities)[::2].tolist()


def test_the_first_steps_are_dense_and_random_blocks_are_as_many():
    of, densities = subject(), {}
    exact = of.run(of.model)
    for keys in (sparse.selected, sparse.drawn):
        for steps in (0, 1, 4):
            out, _, found = recorded(of, sparse.Case("", 0.3, steps, keys, None))
            assert found[:steps] == [1] * steps and torch.equal(out, exact) == (steps == 4)
            densities[keys, steps] = found[steps:]
    assert densities[sparse.selected, 0] == densities[sparse.drawn, 0]
    assert 0.3 < densities[sparse.selected, 1][0] < 0.6


def test_recipes_at_the_edges_and_between_by_lists():
    case = sparse.Case("", 0.3, 2, sparse.selected, ("sage2-4b", "sage1-per-token"))
    out, called, densities = recorded(subject(), case)
    names = "sage1-per-token", "sage2-4b", "sage2-4b", "sage1-per-token"
    assert called == [(NAMED[x], y) for x, y in zip(names, (None, None, 128, 128))]
    assert densities[:2] == [1, 1] and max(densities[2:]) < 0.6 and out.isfinite().all()


@pytest.mark.parametrize("density", [0.2, 0.5, 0.8])
def test_pruned_keys_are_those_of_most_attention(density):
    q, k = torch.randn(2, 1, 2, 300, 16)
    kept = sparse.pruned(q, k, 0.0, density)
    assert kept.shape == (1, 2, 1, 300) and (kept.sum(3) == round(density * 300)).all()
    weight = (q @ k.mT / 4).softmax(-1).mean(2, keepdim=True)
    assert weight[kept].view(1, 2, -1).amin(2).ge(weight[~kept].view(1, 2, -1).amax(2)).all()


@pytest.mark.parametrize("density", [0.3, 0.6, 0.9])
def test_skip_softmax_leaves_out_the_steps_that_are_furthest_below_the_largest_so_far(density):
    q, k = torch.randn(2, 1, 2, 700, 16).cumsum(2).div(4)
    kept, scores = sparse.skipped(q, k, 0.0, density), q @ k.mT / 4
    assert kept.shape == (1, 2, 700, 700)
    found, steps = {True: [], False: []}, []
    for h, m, n in itertools.product(range(2), range(0, 700, 64), range(0, 700, 128)):
        here = kept[0, h, m : m + 64, n : n + 128]
        assert here.all() or not here.any()
        steps.append(here.all().item())
        of = scores[0, h, m : m + 64]
        if n == 0:
            assert here.all()
        else:
            above = of[:, n : n + 128].amax(1) - of[:, :n].amax(1)
            found[steps[-1]].append(above.max().item())
    assert sum(steps) == round(density * len(steps))
    assert min(found[True], default=math.inf) >= max(found[False]) - 1e-5


@pytest.mark.parametrize("density", [0.2, 0.5, 0.8])
def test_windows_hold_every_sth_block_and_the_diagonal(density):
    q = torch.randn(1, 2, 2000, 16)  # 16 blocks of queries, 32 of keys
    lists = sparse.windows(q, q, 0.0, density)
    assert abs(sparse.share(lists) - density) < 1 / 32
    seen = how_often(lists, 2000, 2000, None, None, False)
    assert seen.max() == 1 and seen.diagonal(dim1=2, dim2=3).all()
    every = torch.arange(2000) // 64 % round(2 / density) == 0
    assert seen[..., every].all() and 0 < seen[..., ~every].mean() < density


def test_a_row_for_each_case(capsys):
    rows = list(sparse.measure(subject()))
    found = [(row["choice"], row["dense_steps"], row["top_k"]) for row in rows]
    recipes = [(name, *x) for name in sparse.RECIPES for x in ((0, 1.0), (0, 0.3), (2, 0.3))]
    assert found == recipes + [(name, 0, 0.3) for name in sparse.OTHERS]
    every, some, later, *_, random = rows
    assert every["density"] == 1 and every["psnr"] is None and some["density"] < 0.7
    assert later["density"] == pytest.approx((1 + some["density"]) / 2)
    assert later["psnr"] > some["psnr"] > random["psnr"] + 3
    equal = [row for row in rows if row["choice"] in ("pruned keys", "random")]
    assert [row["density"] for row in equal] == pytest.approx([some["density"]] * 2, abs=0.01)
    assert capsys.readouterr().out.count("density") == len(rows)
    assert json.loads(json.dumps(rows)) == [{**row, "recipes": row["recipes"] and [
        *row["recipes"]]} for row in rows]  # fmt: skip


def test_a_case_that_fails_and_a_budget_cost_no_other_row(capsys, monkeypatch):
    def fails(*args):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(sparse, "RECIPES", {"exact": None})
    monkeypatch.setattr(sparse, "OTHERS", {"bad": fails, "random": sparse.drawn})
    assert [row["choice"] for row in sparse.measure(subject())] == ["exact"] * 3 + ["random"]
    assert "no kernel" in capsys.readouterr().out
    assert not list(sparse.measure(subject(), until=0.0))


@pytest.mark.parametrize("enough", [2, 3])
def test_the_whole_run_on_a_model_of_nothing(enough, tmp_path, monkeypatch):
    """Of two images. Of fewer than `enough` no Frechet distance is told."""
    monkeypatch.setattr(sparse, "ENOUGH", enough)
    size = Size(1, 1, 16, 256, 2, 2, 2)
    for name in ("EYES", "SIZES"):
        monkeypatch.setattr(sparse, name, {"cpu": size, "cuda": size})
    monkeypatch.setattr(sparse, "RECIPES", {"exact": None})
    monkeypatch.setattr(sparse, "OTHERS", {})
    sparse.main(["--json", str(tmp_path / "x.json")])
    result = pages.newest(tmp_path)["sparse"]
    rows, told = result["rows"], enough == 2
    assert len(rows) == 3 and ("Frechet" in result["method"]) == told
    assert all(row.get("frechet", 0) > 0 if told else "frechet" not in row for row in rows)


@pytest.mark.parametrize("seconds", [math.inf, 1e-9])
def test_training_that_has_no_time_leaves_out_steps(seconds):
    model, steps = torch.nn.Linear(4, 1), []

    def loss_of():
        steps.append(1)
        return model(torch.ones(2, 4)).square().mean()

    size = Size(1, 1, 16, 16, 2, 50, 2, seconds)
    note = trained.train("a", model, loss_of, size, torch.device("cpu"))
    assert len(steps) == (50 if seconds == math.inf else 1) and f" {len(steps)} steps" in note


@pytest.mark.parametrize(
    "setup", [lists.Setup(1000, 192, 128, 0.3, False), lists.Setup(1000, 64, 64, 0.1, False)]
)
def test_lists_name_the_drawn_blocks(setup):
    size = setup.block_q, setup.block_kv
    blocks = lists.named(setup, "cpu")
    assert blocks.shape == (1, lists.H, *(-(-1000 // n) for n in size))
    rows = torch.arange(blocks.shape[2]) * size[0] // size[1]
    assert blocks[:, :, torch.arange(len(rows)), rows].all()
    assert abs(blocks.float().mean() - setup.density) < 0.15
    of = lists.lists_of(blocks, *size)
    listed = torch.zeros_like(blocks)
    for row in itertools.product(*map(range, blocks.shape[:3])):
        listed[row][of.full_kv_indices[row][: of.full_kv_num_blocks[row]].long()] = True
    assert torch.equal(listed, blocks) and not of.kv_num_blocks.any()


def test_near_blocks_of_a_video():
    near = lists.near("cpu")
    assert near.shape == (960, 960) and near.diagonal().all() and torch.equal(near, near.T)
    assert near[0].sum() == 2 * 3 * 4 and near[240 + 6 * 20 + 10].sum() == 3 * 5 * 7


@pytest.mark.parametrize("tail_block", [32, 64])
def test_the_error_of_attention_with_a_tail(tail_block):
    setup = lists.Setup(300, 128, 64, 0.4, False, 64)
    q, k, v = torch.randn(3, 1, lists.H, 300, 64)
    blocks = lists.named(setup, "cpu")
    of = lists.lists_of(blocks, 128, 64)._asdict()
    given = dict(scale=64**-0.5, recipe="sage1-per-token")
    outs = [support.sdpa(q, k, v, **given, **of | {"tail_block": n})[0] for n in (None, tail_block)]
    found = [lists.error(out, q, k, v, blocks, (128, 64), tail_block) for out in outs]
    assert found[1] < 0.03 and found[0] > 0.1


def test_a_row_of_what_a_tail_costs():
    names = "SDPA", "dense", "lists", "tail 32", "tail 64", "prepared", "prepared 32", "prepared 64"
    times = {name: {"ms": n + 1.0} for n, name in enumerate(names)}
    (row,) = lists.table_of_tails([{"N": 300, "density": 0.31, "times": times}]).splitlines()[2:]
    assert [x.strip() for x in row.strip("|").split("|")] == [
        "300", "31%", "1.000", "2.000", "3.000", "4.000", "5.000", "50.00%", "100.00%", "6.000",
        "7.000", "8.000",
    ]  # fmt: skip


@pytest.mark.parametrize("wrong", [False, True])
def test_the_error_of_attention_by_lists(wrong):
    setup = lists.Setup(300, 128, 64, 0.4, False, 16)
    q, k, v = torch.randn(3, 1, lists.H, 300, 16)
    blocks = lists.named(setup, "cpu")
    mask = blocks.repeat_interleave(128, 2)[:, :, :300].repeat_interleave(64, 3)[..., :300]
    out = F.scaled_dot_product_attention(q, k, v, mask ^ wrong)
    assert (lists.error(out, q, k, v, blocks, (128, 64)) < 1e-5) != wrong
