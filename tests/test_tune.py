"""``python -m sage_inductor tune``: what is measured, written and read back."""

import json
import logging

import pytest
import torch

from sage_inductor import tune
from sage_inductor.__main__ import main
from sage_inductor.ops import tiles

GPU = "NVIDIA Test 9000"


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A Hopper GPU that is not there, its tables in a folder of the test's."""
    monkeypatch.setenv("SAGE_INDUCTOR_TABLES", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: GPU)
    monkeypatch.setattr(tiles, "capability", lambda device: (9, 0))
    tiles.tuned.cache_clear()
    yield torch.device("cuda", 0)
    tiles.tuned.cache_clear()


def clock(B, H, N, D, is_causal, recipes):
    """SDPA takes N^2, a recipe a fixed time more and half of that; causal ones never win."""
    ms = {"CUDNN_ATTENTION": N**2, "FLASH_ATTENTION": 2 * N**2}
    extra = 4096**2 / 2 / B if not is_causal else N**2
    return ms | {recipe: N**2 / 2 + extra for recipe in recipes}


def test_a_table_is_measured_written_and_read(gpu):
    table = tune.tune(gpu, (64, 80), (2048, 8192, 4096), clock)
    rows = {tuple(row[:3]): row[3] for row in table["crossover"]}
    assert rows["sage2-8b-rows", 64, "full"] == [[128, 4096], [24, 8192], [8, 8192]]
    assert rows["sage2-8b", 80, "causal"] == []

    assert tiles.crossover((9, 0), "sage2-8b-rows", 64, "full") != [(128, 4096)]
    path = tune.save(table)
    assert json.loads(path.read_text()) == table
    tiles.tuned.cache_clear()
    assert tiles.crossover((9, 0), "sage2-8b-rows", 64, "full") == [
        (128, 4096),
        (24, 8192),
        (8, 8192),
    ]
    assert tiles.crossover((9, 0), "sage2-8b", 80, "causal") == []  # measured: no longer built in
    built_in = tiles.CROSSOVER[(9, 0), "sage2-8b", 128, "window"]
    assert tiles.crossover((9, 0), "sage2-8b", 128, "window") == built_in


@pytest.mark.parametrize(
    "change",
    [{"versions": {"triton": "3.0.0"}}, {"crossover": [["sage1", 64]]}, {"capability": None}],
    ids=["other versions", "a short row", "no capability"],
)
def test_a_table_that_does_not_hold_here_is_ignored_with_a_warning(gpu, change, caplog):
    path = tune.save({**tune.tune(gpu, (64,), (2048,), clock), **change})
    with caplog.at_level(logging.WARNING, "sage_inductor"):
        row = tiles.crossover((9, 0), "sage2-8b-rows", 64, "full")
    assert row == tiles.CROSSOVER[(9, 0), "sage2-8b-rows", 64, "full"]
    assert f"{path} is ignored" in caplog.text and "tune writes it anew" in caplog.text


def test_an_unreadable_table_is_ignored_with_a_warning(gpu, caplog):
    path = tiles.tuned_path(GPU)
    path.write_text("{")
    assert tiles.crossover((9, 0), "sage2-8b-rows", 64, "full")
    assert f"{path} is ignored" in caplog.text


@pytest.mark.parametrize(
    "ratios, N",
    [
        ({1: 2.0, 2: 1.0, 4: 1.02, 8: 2.0}, 4),
        ({1: 2.0, 2: 2.0}, 1),
        ({1: 2.0, 2: None}, None),
        ({1: 2.0, 2: 1.01}, None),
        ({}, None),
    ],
)
def test_the_shortest_length_is_that_from_which_on_all_win(ratios, N):
    assert tune.shortest(ratios) == N


def test_the_command_writes_every_gpus_table(gpu, monkeypatch, capsys):
    monkeypatch.setattr(tune, "_clock", lambda device, *case: clock(*case))
    assert main(["tune", "--head-dims", "64", "--lengths", "2048", "4096"]) == 0
    printed = capsys.readouterr().out
    assert f"{GPU}: head_dim 64, full: sage2-8b-rows from N=4096 with B*H >= 128" in printed
    assert f"{GPU}: head_dim 64, causal: sage2-8b from never" in printed
    assert tiles.tuned_path(GPU).exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is said without a GPU")
def test_without_a_gpu_nothing_is_measured(capsys):
    assert main(["tune"]) == 2
    assert "torch sees no CUDA device" in capsys.readouterr().err


@pytest.mark.gpu
def test_the_clock_times_every_way(monkeypatch, tmp_path):
    times = tune._clock(torch.device("cuda", 0), 1, 8, 1024, 64, False, ("sage2-8b",))
    assert set(times) >= {"sage2-8b", "FLASH_ATTENTION"} and min(times.values()) > 0
