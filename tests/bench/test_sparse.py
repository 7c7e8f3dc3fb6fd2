"""bench/sparse.py: the attention that it measures, its rows, and their table."""

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from bench import plot, sparse
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
