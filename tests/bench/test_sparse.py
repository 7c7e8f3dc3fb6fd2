"""bench/sparse.py and bench/lists.py: what they measure, their rows, and their tables."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from bench import lists, plot, sparse
from bench.capture import attending
from sage_inductor.ops.selector import Selection


def subject():
    """Two steps with two calls each, of tokens that resemble their neighbours."""
    q, k, v = torch.randn(3, 1, 2, 700, 16).cumsum(3).div(4).unbind(0)

    def model(scale):
        return sum(F.scaled_dot_product_attention(scale * q, k, v) for _ in range(2))

    def score(out, exact):
        error = (out - exact).square().mean().item()
        return {"psnr": -10 * math.log10(error) if error else None}

    return SimpleNamespace(
        model=model, run=lambda call: call(1.0) + call(0.5), score=score, calls=2, example=(q,)
    )


def test_the_first_steps_are_exact_and_random_blocks_are_as_many():
    of, densities = subject(), {}
    exact = of.run(of.model)
    for at_random in (False, True):
        for first_step, calls in ((0, 4), (1, 2), (2, 0)):
            selected = sparse.Selected(of, Selection(0.3), first_step, at_random)
            with attending(selected):
                out = of.run(of.model)
            assert len(selected.densities) == calls and torch.equal(out, exact) == (calls == 0)
            densities[at_random, first_step] = selected.densities
    assert densities[False, 0] == densities[True, 0]
    assert 0.3 < densities[False, 0][0] < 0.6


def test_a_row_for_each_choice_and_the_table_of_them(capsys, monkeypatch):
    monkeypatch.setattr(sparse, "TOP_K", (1.0, 0.3))
    monkeypatch.setattr(sparse, "EXACT_STEPS", (0, 1))
    rows = sparse.measure(subject())
    names = [f"similarity {x}" for x in sparse.SIMILARITIES] + ["random"]
    assert [row["choice"] for row in rows] == [name for name in names for _ in range(2)]
    for every, some in zip(rows[::2], rows[1::2]):
        assert every["density"] == 1 and some["density"] < 0.7
        assert (every["psnr_from_0"] or 999) > 80 > some["psnr_from_1"] > some["psnr_from_0"]
    assert rows[1]["psnr_from_0"] > rows[-1]["psnr_from_0"] + 3  # than blocks at random
    assert capsys.readouterr().out.count("density") == len(rows)
    result = dict(rows=rows, date="2026-01-01", versions=dict(torch="2", triton="3", cudnn="none"),
                  machine={"gpu": "cpu"}, model="a model", method="a method")  # fmt: skip
    table = plot.sparse({"cpu": {"sparse": {**result, "rows": [
        {**row, "psnr_from_0": 8.0, "psnr_from_3": 9.0} for row in rows]}}})  # fmt: skip
    assert table.count("\n| similarity") == 4 and table.count(": 8.0, 9.0 |") == 10


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


@pytest.mark.parametrize("wrong", [False, True])
def test_the_error_of_attention_by_lists(wrong):
    setup = lists.Setup(300, 128, 64, 0.4, False, 16)
    q, k, v = torch.randn(3, 1, lists.H, 300, 16)
    blocks = lists.named(setup, "cpu")
    mask = blocks.repeat_interleave(128, 2)[:, :, :300].repeat_interleave(64, 3)[..., :300]
    out = F.scaled_dot_product_attention(q, k, v, mask ^ wrong)
    assert (lists.error(out, q, k, v, blocks, (128, 64)) < 1e-5) != wrong


def test_the_table_of_lists():
    times = {name: {"ms": ms} for name, ms in dict(lists=1.5, dense=4, op=2, flex=3).items()}
    row = dict(N=1024, D=64, block_q=128, block_kv=64, density=0.3, per_work=0.8, times=times)
    result = dict(rows=[row, row | dict(times={**times, "flex": times["op"]})], date="2026-01-01",
                  versions=dict(torch="2", triton="3", cudnn="1"), machine={"gpu": "A"}, method="m")  # fmt: skip
    table = plot.lists({"a": {"lists": result}})
    cells = "| 1024 | 64 | 128 x 64 | 30% | 1.500 | 2.000 | 3.000 | 1.50 | 4.000 | 0.80 |"
    assert cells in table and "| 2.000 | 1.00 |" in table
