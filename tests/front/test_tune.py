"""Timing: what ``python -m sage_inductor tune`` measures, writes and reads back, and what
``mode="max-autotune"`` measures of a call."""

import contextlib
import dataclasses
import json
import logging
import re

import pytest
import torch

import sage_inductor
from sage_inductor import backend, tune
from sage_inductor.__main__ import main
from sage_inductor.decide import Choice, Trial
from sage_inductor.ops import tiles
from sage_inductor.patterns.call import FULL, Band

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


# -- mode="max-autotune" ----


def trial(mask=None, dtype=None, band=FULL, D_v=32, recipes=("sage2-8b-rows", "accurate")):
    """96 queries, 64 keys, two heads to each of k's."""
    cpu = torch.device("cpu")
    q, k, v = (2, 4, 96, 32), (2, 2, 64, 32), (2, 2, 64, D_v)
    return Trial(cpu, torch.bfloat16, q, k, v, band, mask, dtype, tuple(map(Choice, recipes)))


@pytest.fixture
def on_cpu(monkeypatch):
    """Trials run where no GPU is: SDPA's backends are CPU's one, and the runs are what is noted,
    as (name, output)."""
    runs = []

    def medians(calls):
        runs.extend((name, call()) for name, call in calls.items())
        return dict.fromkeys(calls, 1.0)

    monkeypatch.setattr(tune, "_medians", medians)
    monkeypatch.setattr(tune, "sdpa_kernel", lambda backend: lambda function: function)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    tune.race.cache_clear()
    yield runs
    tune.race.cache_clear()


@pytest.mark.parametrize(
    "asked, count",
    [
        (trial(), 2),
        (trial(band=Band(None, 0)), 2),
        (trial(band=Band(16, 0)), 3),
        (trial((2, 1, 1, 64), torch.bool), 3),
        (trial((96, 64), torch.bool, Band(None, 0)), 3),
        (trial((1, 4, 96, 64), torch.float16, Band(16, 3)), 3),
        (trial(D_v=16), 3),
    ],
)
def test_all_that_is_timed_is_the_same_attention(asked, count, on_cpu):
    assert set(tune.race(asked)) == {name for name, _ in on_cpu}
    exact = on_cpu[0][1].float()
    assert len(on_cpu) == count + 2 and exact.shape == (2, 4, 96, asked.v[3])
    seen = ~exact.isnan() & (exact != 0)  # a row that sees nothing is NaN or 0
    for _, out in on_cpu:
        error = (out.float() - exact)[seen].abs().sum() / exact[seen].abs().sum()
        assert error < 0.08


def test_a_trial_is_timed_once_and_leaves_the_users_random_numbers(on_cpu):
    torch.manual_seed(3)
    expected = torch.randn(4)
    torch.manual_seed(3)
    first = tune.race(trial())
    assert tune.race(trial()) is first and len(on_cpu) == 4
    assert torch.equal(torch.randn(4), expected)
    tune.race(trial(D_v=16))
    assert len(on_cpu) == 4 + 5


def test_each_tile_is_timed_as_such(on_cpu, monkeypatch):
    told = []

    def op(*args, **options):
        told.append(options)
        return tune.reference.attention(*args[:13], "per_row")

    monkeypatch.setattr(tune, "kernel", lambda *args, **kwargs: (op, 128))
    monkeypatch.setattr(tune, "attention_opaque", op)
    choices = tuple(Choice("sage2-8b-rows", n) for n in (0, 2, 3, None))
    found = tune.race(dataclasses.replace(trial(), choices=choices))
    assert tuple(found) == ("CUDNN_ATTENTION", "FLASH_ATTENTION", *choices)
    assert told == [{"warpgroups": n} for n in (0, 2, 3, None)]


def test_what_fails_has_its_error_instead_of_a_time(on_cpu, monkeypatch):
    medians, (rows, accurate) = tune._medians, trial().choices
    monkeypatch.setattr(
        tune, "_medians", lambda calls: medians(calls) | {accurate: OSError("a\nb")}
    )
    assert tune.race(trial()) == {
        "CUDNN_ATTENTION": 1.0, "FLASH_ATTENTION": 1.0, rows: 1.0, accurate: "OSError: a"
    }  # fmt: skip

    def no_memory(trial):
        raise torch.OutOfMemoryError("of 80 GiB")

    monkeypatch.setattr(tune, "_rivals", no_memory)
    found = tune.race(trial(D_v=16))
    assert found == dict.fromkeys((rows, accurate), "OutOfMemoryError: of 80 GiB")


def test_calls_take_turns_and_one_that_fails_is_left_out(monkeypatch):
    turns = []

    def bench(call, rep, return_mode):
        turns.append(call)
        if call == "b" and len(turns) > 3:
            raise ValueError("b")
        return {"a": 3.0, "b": 1.0, "c": tune.LONG + 1.0}[call]

    monkeypatch.setattr(tune.triton.testing, "do_bench_cudagraph", bench)
    found = tune._medians({name: name for name in "abc"})
    assert "".join(turns) == "abc" + "ba" + "a"  # c is long
    assert (found["a"], found["c"]) == (3.0, tune.LONG + 1.0) and str(found["b"]) == "b"


def test_calls_are_timed_while_dynamo_compiles(on_cpu):
    """With real tensors, whatever the compilation has for its own."""

    def compiler(gm, example_inputs):
        tune.race(trial())
        return gm.forward

    with torch.autocast("cpu", torch.float16):
        torch.compile(lambda x: x @ x, backend=compiler, dynamic=True)(torch.randn(4, 4))
    assert len(on_cpu) == 4 and all(type(out) is torch.Tensor for _, out in on_cpu)
    assert {out.dtype for _, out in on_cpu} == {torch.bfloat16}


@pytest.mark.parametrize(
    "mode, clock",
    [
        ("max-autotune", tune.race),
        ("max-autotune-no-cudagraphs", tune.race),
        ("reduce-overhead", None),
        ("default", None),
        (None, None),
    ],
)
def test_the_mode_says_whether_a_clock_decides(mode, clock, monkeypatch):
    seen = []
    monkeypatch.setattr(backend, "rewrite", lambda gm, settings: seen.append(settings) or [])
    options = {} if mode is None else {"sage.mode": mode}
    x = torch.randn(4)
    torch.compile(torch.sin, backend="sage", mode=mode)(x)
    torch._dynamo.reset()
    torch.compile(torch.sin, backend="sage", options=options)(x)
    torch._dynamo.reset()
    sage_inductor.explain(torch.sin, x, options=options)
    assert [settings.clock for settings in seen] == [clock] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("N", [256, 16384])
def test_a_call_is_timed_on_the_gpu(N):
    q, k, v = (torch.randn(1, 8, N, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for _ in range(2):  # the second time from memory
        misses = tune.race.cache_info().misses
        compiled = torch.compile(sdpa, backend="sage", mode="max-autotune-no-cudagraphs")
        out = compiled(q, k, v)
        (site,) = sage_inductor.report()
        assert re.match(r"autotuned: (\d\.\d\dx the fastest of SDPA|SDPA is)", site.reason), (
            site.reason
        )
        assert (
            torch.nn.functional.cosine_similarity(
                out.flatten().float(), sdpa(q, k, v).flatten().float(), dim=0
            )
            > 0.99
        )
        torch._dynamo.reset()
    assert tune.race.cache_info().misses == misses


@pytest.mark.gpu
@pytest.mark.parametrize("D, is_causal", [(64, True), (128, False)])
def test_the_fastest_tile_on_the_gpu_is_taken_and_each_is_right(D, is_causal, monkeypatch):
    q, k, v = (torch.randn(1, 8, 2048, D, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    clock, found = tune.race, {}

    def race(trial):
        """Ours alone, so that one of them wins."""
        found.update(clock(trial))
        return {each: ms if isinstance(each, Choice) else 1e3 for each, ms in found.items()}

    def sdpa(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    monkeypatch.setattr(tune, "race", race)
    torch._dynamo.reset()
    outs = [torch.compile(sdpa, backend="sage", mode="max-autotune-no-cudagraphs")(q, k, v)]
    (site,) = sage_inductor.report()
    times = {each: ms for each, ms in found.items() if isinstance(each, Choice)}
    assert (site.recipe, site.warpgroups) == min(times, key=times.get), (site.reason, times)
    rivals = tiles.rivals(tiles.capability(q.device), "fp8", D, is_causal)
    assert {n for name, n in times if name == "sage2-8b-rows"} in (set(rivals), set())
    band = None, 0 if is_causal else None, False
    for choice in times:
        text = choice.full.encode()
        outs += torch.ops.sage.sdpa(q, k, v, None, [], *band, D**-0.5, text, False, False)[:1]
    exact = sdpa(q, k, v).flatten().float()
    for out in outs:
        cosine = torch.nn.functional.cosine_similarity(out.flatten().float(), exact, dim=0)
        assert cosine > 0.99


@pytest.mark.gpu
def test_the_clock_times_every_way(monkeypatch, tmp_path):
    times = tune._clock(torch.device("cuda", 0), 1, 8, 1024, 64, False, ("sage2-8b",))
    assert set(times) >= {"sage2-8b", "FLASH_ATTENTION"} and min(times.values()) > 0
