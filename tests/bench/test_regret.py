"""The regret of what `auto` decides, by a clock whose times are known, on a GPU that is not there."""

import concurrent.futures
import dataclasses
import json
import math
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from pairs import seeds
from torch._subclasses.fake_tensor import FakeTensorMode

from bench import regret
from sage_inductor import config
from sage_inductor.choose import cost, families, tables, timing
from sage_inductor.choose.candidates import Candidate
from sage_inductor.choose.timing import BenchmarkCase
from sage_inductor.ops import gpus
from sage_inductor.ops.call_shape import CallShape
from sage_inductor.ops.visibility import CAUSAL, FULL, Band

CUDA = torch.device("cuda", 0)
LONG = regret.Call(4, 32, 32, 16384, 16384, 128, "full", None, "bfloat16")
SHORT = regret.Call(1, 4, 2, 300, 300, 80, "causal", None, "float16")


@pytest.fixture
def h200(monkeypatch):
    monkeypatch.setattr(gpus, "capability", lambda device: (9, 0))
    monkeypatch.setattr(gpus, "processors", lambda device: 132)
    monkeypatch.setattr(tables, "gpu_name", lambda device: tables.H200)


@pytest.fixture
def compiling(monkeypatch):
    """The cases whose kernels compile: nothing does, at once."""
    cases = []
    monkeypatch.setattr(timing, "start_compiling", lambda given: cases.extend(given) or [])
    return cases


def test_a_seed_draws_the_same_calls_within_the_bounds():
    calls = regret.draw(7, 2000)
    assert calls == regret.draw(7, 2000) != regret.draw(8, 2000)
    assert calls[:10] == regret.draw(7, 10)
    for call in calls:
        assert 1 <= call.B * call.H_q <= 256 and call.H_q % call.H_kv == 0
        assert 33 <= call.D <= 256 and call.flops <= regret.MAX_FLOPS
        assert all(256 <= n <= 131072 for n in (call.N_q, call.N_kv))
        assert 4 * call.B * call.H_q * (call.N_q + call.N_kv) * call.D <= regret.MAX_BYTES
        assert (call.window is not None) == (call.kind == "window")
        if call.kind in ("causal", "window"):
            assert call.N_q == call.N_kv
        if call.window:
            assert call.N_q**2 <= regret.MAX_MASK
            assert call.window[0] >= 32 and call.window[1] in (0, call.window[0])


def test_calls_that_train_are_drawn_as_others_are(h200):
    calls = regret.draw(7, 500, regret.STEPS)
    assert {call.kind for call in calls} == {*regret.STEPS} <= {*cost.TRAINED}
    assert all(33 <= call.D <= 128 and call.flops <= regret.MAX_FLOPS for call in calls)
    B, H_q, _, N_q, N_kv, D = dataclasses.astuple(calls[0])[:6]
    assert calls[0].flops == 14 * B * H_q * N_q * N_kv * D
    assert 0.1 < sum(call.N_q != call.N_kv for call in calls) / 500 < 0.3
    assert all(call.N_q == call.N_kv for call in calls if call.kind == "causal-training")
    with regret.decisions_by("calibrated"):
        found = regret.kinds_of(calls[:40], CUDA)
    assert found and {family.kind for family in found} == {*regret.STEPS}
    assert {*found.values()} == {("fp8-backward",)}


@pytest.mark.parametrize("kind, N_kv", [("full", 400), ("causal", 300)])
def test_the_pass_decides_calls_that_train(kind, N_kv):
    """On CPU: autograd needs the device of what it records."""
    call = regret.Call(1, 4, 2, 300, N_kv, 64, f"{kind}-training", None, "bfloat16")
    cpu = torch.device("cpu")
    inference = dataclasses.replace(call, kind=kind)
    with config.patch(emulate=True):  # with which "auto" is not about training
        graphs = (regret.captured(each, cpu) for each in (call, inference))
        site, other = (regret.decided(graph, training="fp8-backward") for graph in graphs)
    assert (site.recipe, other.recipe) == ("fp8-backward", "sage2-8b")
    assert site.mask == other.mask == {"full": "none", "causal": "causal"}[kind]
    q, kv = (1, 4, 300, 64), (1, 2, N_kv, 64)
    shape = CallShape(cpu, torch.bfloat16, q, kv, kv, trains=True)
    case = BenchmarkCase(shape, (Candidate("fp8-backward"),))
    assert regret.taken(site, case) == Candidate("fp8-backward")


@seeds(8, always=1)
def test_the_pass_decides_each_call_and_says_what_is_timed(seed, h200):
    for call in (x for kind in regret.KINDS for x in regret.draw(seed, 2, {kind: 1})):
        planned = regret.plan(call, CUDA)
        case, site = planned.case, planned.site
        assert site.spelling == "SDPA" and site.dtype == call.dtype == str(case.shape.dtype)[6:]
        assert case.shape.q == (call.B, call.H_q, call.N_q, call.D)
        assert case.shape.k == case.shape.v == (call.B, call.H_kv, call.N_kv, call.D)
        band = Band(*call.window) if call.window else CAUSAL if call.kind == "causal" else FULL
        keys = (call.B, 1, 1, call.N_kv) if call.kind == "keys" else None
        assert (case.shape.band, case.shape.mask) == (band, keys) and case.shape.device == CUDA
        assert {each.recipe for each in case.candidates} >= {"sage2-8b-rotated", "sage2-8b"}
        assert site.rewritten or site.reason.startswith("no known gain")
        assert regret.taken(site, case) in (None, *case.candidates)


def test_what_decides_may_measure(h200, monkeypatch):
    """Tensors that it makes are real ones."""
    rewrite, made = regret.rewrite, []
    monkeypatch.setattr(
        regret, "rewrite", lambda *args: made.append(torch.empty(1)) or rewrite(*args)
    )
    regret.plan(LONG, CUDA)
    assert [type(x) for x in made] == [torch.Tensor] * 2


@pytest.mark.parametrize("window", [(100, 0), (40, 30)])
def test_a_window_shows_what_it_says(window):
    call = regret.Call(1, 2, 1, 200, 200, 64, "window", window, "bfloat16")
    function, inputs = regret.graph_of(call, torch.device("cpu"))
    q, k, v = (torch.randn_like(x) for x in inputs)
    ones = torch.ones(200, 200).bool()
    mask = ones.tril(window[1]).triu(-window[0])
    expected = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    assert function(q, k, v).equal(expected)


def test_a_causal_call_and_one_with_padding_are_what_they_say():
    call = regret.Call(1, 2, 2, 64, 64, 64, "causal", None, "bfloat16")
    function, inputs = regret.graph_of(call, torch.device("cpu"))
    q, k, v = (torch.randn_like(x) for x in inputs)
    assert function(q, k, v).equal(F.scaled_dot_product_attention(q, k, v, is_causal=True))
    with FakeTensorMode():
        call = regret.Call(2, 2, 1, 64, 96, 64, "keys", None, "float16")
        *qkv, mask = regret.graph_of(call, torch.device("cpu"))[1]
    assert mask.dtype == torch.bool and mask.shape == (2, 1, 1, 96)
    assert [x.stride() for x in qkv] == [(8192, 64, 128, 1), (6144, 64, 64, 1), (6144, 64, 64, 1)]


TABLE, OTHER, TRITON = (
    Candidate("sage2-8b-rotated", 3), Candidate("sage2-8b-rotated", 2), Candidate("sage2-8b"),
)  # fmt: skip
ALONE, CUDNN = Candidate("sage2-8b-rotated", 1), "CUDNN_ATTENTION"
SDPA = {CUDNN: 2.0, "FLASH_ATTENTION": 3.0}


@pytest.mark.parametrize(
    "call, times, decided, best, of_tiles, regrets, x",
    [
        (LONG, {TABLE: 1.0, OTHER: 1.1, TRITON: 1.5}, TABLE, TABLE, TABLE, (0.0, 0.0), 2.0),
        (LONG, {TABLE: 1.25, OTHER: 1.0, TRITON: 1.5}, TABLE, TABLE, OTHER, (0.0, 0.25), 1.6),
        (LONG, {TABLE: 1.5, OTHER: 1.0, TRITON: 1.2}, TABLE, TRITON, OTHER, (0.25, 0.5), 4 / 3),
        (LONG, {TABLE: 4.0, OTHER: 5.0, TRITON: 6.0}, TABLE, CUDNN, CUDNN, (1.0, 1.0), 0.5),
        (LONG, {TABLE: "E: 1", OTHER: 1.0, TRITON: 1.5}, TABLE, TRITON, OTHER, (None, None), None),
        (LONG, {TABLE: 1.0, CUDNN: "E"}, TABLE, TABLE, TABLE, (0.0, 0.0), 3.0),
        (LONG, {TABLE: 1.0, **dict.fromkeys(SDPA, "E")}, TABLE, TABLE, TABLE, (None, None), None),
        (SHORT, {ALONE: 1.6, OTHER: 1.0, TRITON: 2.5}, "SDPA", ALONE, OTHER, (0.25, 1.0), 1.0),
        (SHORT, {ALONE: 2.1, OTHER: 2.2, TRITON: 2.5}, "SDPA", CUDNN, CUDNN, (0.0, 0.0), 1.0),
        (SHORT, {ALONE: "E", **dict.fromkeys(SDPA, "E")}, "SDPA", None, None, (None, None), None),
    ],
)
def test_a_row_says_how_far_the_decision_is_from_the_best(
    call, times, decided, best, of_tiles, regrets, x, h200
):
    row = regret.judge(regret.plan(call, CUDA), SDPA | times)
    labels = [each and regret.label(each) for each in (decided, best, of_tiles)]
    assert [row["decided"], row["best"], row["best_of_tiles"]] == labels
    assert (row["regret"], row["regret_of_tiles"]) == pytest.approx(regrets)
    assert row["x"] == pytest.approx(x)
    assert set(row["ms"]) | set(row["errors"]) == {regret.label(each) for each in SDPA | times}
    assert set(row["errors"].values()) <= {"E", "E: 1"} and row["reason"]
    assert json.loads(json.dumps(row))["name"] == str(call)


def test_calls_are_timed_in_order_while_the_next_ones_compile(h200, compiling, monkeypatch):
    calls, timed = regret.draw(3, 7), []

    def time_case(case, flops):
        timed.append((case, flops, len(compiling)))
        return {**SDPA, **dict.fromkeys(case.candidates, 1.0)}

    monkeypatch.setattr(regret, "time_case", time_case)
    with regret.decisions_by("built-in"):
        rows = list(regret.measure(calls, CUDA, 3))
    assert [row["name"] for row in rows] == [str(call) for call in calls]
    assert [case for case, *_ in timed] == compiling
    assert [flops for _, flops, _ in timed] == [call.flops for call in calls]
    assert [ahead for *_, ahead in timed] == [3, 4, 5, 6, 7, 7, 7]


def test_what_kinds_are_measured_by_compiles_first_and_once(h200, monkeypatch):
    """Those that nothing is known of and that no other measured kind stands for."""
    order = []

    def start_compiling(cases):
        order.append(
            [(each.shape.q[3], each.shape.mask is not None, len(each.candidates)) for each in cases]
        )
        return []

    monkeypatch.setattr(timing, "start_compiling", start_compiling)
    monkeypatch.setattr(regret, "plan", lambda *given: 1 / 0)
    wide = regret.Call(1, 8, 8, 2048, 2048, 128, "full", None, "bfloat16")
    padded = regret.Call(2, 8, 8, 2048, 2048, 40, "keys", None, "bfloat16")
    dims = [dict(D=120), dict(D=64), dict(B=9), dict(D=63)]
    calls = [wide, *(regret.dataclasses.replace(wide, **each) for each in dims), padded]
    new = [(128, False), (64, False), (63, False), (40, True)]
    for data, kinds in (("calibrated", new), ("built-in", []), ("both", [])):
        order.clear()
        with regret.decisions_by(data):
            rows = list(regret.measure(calls, CUDA, 3))
        assert [row["reason"] for row in rows] == 6 * ["ZeroDivisionError: division by zero"]
        assert order == [[(*kind, 1)] * len(timing.FEW) for kind in kinds]
    monkeypatch.setattr(tables, "gpu_name", lambda device: "NVIDIA Test")  # no times are built in
    for data, kinds in (("both", new), ("built-in", [])):
        order.clear()
        with regret.decisions_by(data):
            list(regret.measure(calls, CUDA, 3))
        assert len(order) == len(kinds)


@pytest.mark.parametrize(
    "budget, expected", [(6.0, [6.0, 2.0, 0.0]), (math.inf, [threading.TIMEOUT_MAX] * 3)]
)
def test_kernels_are_waited_for_as_long_as_the_budget_is(
    budget, expected, h200, compiling, monkeypatch
):
    now, waited = SimpleNamespace(seconds=100.0), []
    monkeypatch.setattr(regret.time, "monotonic", lambda: now.seconds)

    def time_case(case, flops):
        now.seconds += 4.0
        return {**SDPA, **dict.fromkeys(case.candidates, 1.0)}

    monkeypatch.setattr(regret, "time_case", time_case)
    monkeypatch.setattr(concurrent.futures, "wait", lambda futures, s: waited.append(s))
    with regret.decisions_by("built-in"):
        rows = list(regret.measure([LONG] * 3, CUDA, 2, budget))
    assert waited == expected and len(rows) == (2 if budget == 6.0 else 3)


def test_no_call_is_planned_when_the_budget_is_spent(h200, compiling, monkeypatch):
    """To plan a call of a new kind may be to measure it for seconds."""
    now, plan = SimpleNamespace(seconds=0.0), regret.plan

    def slowly(*given):
        now.seconds += 5.0
        return plan(*given)

    monkeypatch.setattr(regret.time, "monotonic", lambda: now.seconds)
    monkeypatch.setattr(regret, "plan", slowly)
    with regret.decisions_by("built-in"):
        assert list(regret.measure(regret.draw(3, 9), CUDA, 8, budget=11.0)) == []
    assert len(compiling) == 3


def test_a_call_that_cannot_be_planned_is_a_failed_row_in_its_place(
    h200, compiling, monkeypatch, capsys
):
    times = {**SDPA, TABLE: 1.0}
    monkeypatch.setattr(regret, "time_case", lambda case, flops: times)
    wide = regret.Call(1, 1, 1, 512, 512, 264, "full", None, "bfloat16")
    rows = list(regret.measure([LONG, wide, wide, LONG], CUDA, 2))
    assert [row["name"] for row in rows] == [str(call) for call in (LONG, wide, wide, LONG)]
    assert len(compiling) == 2 and rows[0] == rows[3] and rows[0].keys() == rows[1].keys()
    assert "cannot be timed: head_dim of q and k" in rows[1]["reason"]
    assert [rows[1][name] for name in ("decided", "best", "regret", "x")] == [None] * 4
    found = regret.summary(rows, 4)
    assert [found[x] for x in ("measured", "failed", "rewritten")] == [2, 2, 2]
    regret.print_summary(found, rows)
    assert capsys.readouterr().out.count(f"failed: {wide}: ValueError: {wide} cannot be") == 2


@pytest.mark.parametrize("data", regret.DATA)
def test_what_decides_is_as_asked_and_never_what_the_user_has_measured(
    data, h200, monkeypatch, tmp_path
):
    monkeypatch.setenv("SAGE_INDUCTOR_TABLES", str(tmp_path))
    built_in = tables.built_in()[tables.H200]
    tables.save(built_in)
    assert len(tables.known(tables.H200)) == 2
    with regret.decisions_by(data):
        found = tables.known(tables.H200)
        assert found == (() if data == "calibrated" else (built_in,))
        assert regret.options.resolve({}).calibrate == (data != "built-in")
        site = regret.decided(regret.captured(LONG, CUDA))
        assert site.rewritten == (data != "calibrated"), site.reason
        assert not list(tables.path_of(tables.H200).parent.iterdir())
    assert len(tables.known(tables.H200)) == 2
    tables.forget()


def case_of(rivals=tuple(families.BACKENDS), **given):
    qkv = dict.fromkeys("qkv", (1, 2, 64, 64))
    shape = CallShape(CUDA, torch.bfloat16, **qkv | given)
    return BenchmarkCase(shape, (TABLE, OTHER), rivals)


@pytest.mark.parametrize(
    "flops, repeats, rounds", [(1e9, 30, 5), (7e10, 2, 5), (6e12, 1, 5), (2e13, 1, 3)]
)
def test_the_time_is_the_median_of_interleaved_rounds(flops, repeats, rounds, monkeypatch):
    calls = {"CUDNN_ATTENTION": "a", "FLASH_ATTENTION": "b", TABLE: "c", OTHER: "d"}
    built = []

    def runner(provider, sets):
        if provider.call == "b":
            raise RuntimeError("No available kernel\nsecond line")
        assert sets == [()] * len(sets)
        built.append((provider.call, len(sets)))
        return provider.call

    def interleave(runners, n, target_ms):
        assert (n, target_ms) == (rounds, regret.TARGET_MS)
        return {name: [9.0, float(i), 0.5] for i, name in enumerate(runners, 1)}

    monkeypatch.setattr(timing, "calls_of", lambda case: calls)
    monkeypatch.setattr(regret, "Runner", runner)
    monkeypatch.setattr(regret, "interleave", interleave)
    assert regret.time_case(case_of(), flops) == {
        "CUDNN_ATTENTION": 1.0, TABLE: 2.0, OTHER: 3.0,
        "FLASH_ATTENTION": "RuntimeError: No available kernel",
    }  # fmt: skip
    assert built == [(name, repeats) for name in "acd"]


def test_where_no_backend_computes_a_call_sdpas_math_is_its_rival(monkeypatch):
    def runner(provider, sets):
        if provider.name in ("CUDNN_ATTENTION", "FLASH_ATTENTION"):
            raise RuntimeError("No available kernel")
        return provider.name

    def calls_of(case):
        return dict.fromkeys((*case.rivals, *case.candidates))

    monkeypatch.setattr(timing, "calls_of", calls_of)
    monkeypatch.setattr(regret, "Runner", runner)
    monkeypatch.setattr(regret, "interleave", lambda found, n, ms: {name: [2.0] for name in found})
    rivals = "CUDNN_ATTENTION", "FLASH_ATTENTION"
    found = regret.time_case(case_of(rivals=rivals), 1.0)
    assert found == dict.fromkeys(rivals, "RuntimeError: No available kernel") | dict.fromkeys(
        ("MATH", TABLE, OTHER), 2.0
    )
    assert "MATH" not in regret.time_case(case_of(rivals=(*rivals, "EFFICIENT_ATTENTION")), 1.0)


def test_without_memory_for_the_inputs_nothing_has_a_time(monkeypatch):
    def full(case):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(timing, "calls_of", full)
    found = regret.time_case(case_of(rivals=("CUDNN_ATTENTION",)), 1.0)
    assert found == dict.fromkeys(
        ("CUDNN_ATTENTION", TABLE, OTHER, "MATH"), "OutOfMemoryError: full"
    )


def test_the_summary_counts(capsys):
    figures = [
        (0.0, 0.0, 2.0), (0.03, 0.04, 1.0), (0.031, 0.06, 0.97), (0.05, 0.07, 0.9699),
        (0.5, 0.75, 0.5), (None, None, None),
    ]  # fmt: skip
    rows = [
        {"name": f"call {i}", "regret": regret_, "regret_of_tiles": of_tiles, "x": x,
         "decided": "SDPA" if i < 2 else "sage1", "best": "sage1", "best_of_tiles": "sage2-8b",
         "reason": f"because {i}", "ms": {"sage1": 1 / 3}, "errors": {}}
        for i, (regret_, of_tiles, x) in enumerate(figures)
    ]  # fmt: skip
    found = regret.summary(rows, 9)
    assert found == {
        "calls": 9, "measured": 5, "failed": 1, "rewritten": 4, "within_3_percent": 0.4,
        "within_5_percent": 0.8, "mean_regret": pytest.approx(0.1222),
        "within_3_percent_of_tiles": 0.2, "within_5_percent_of_tiles": 0.4,
        "mean_regret_of_tiles": pytest.approx(0.184), "below_0_97x": 2,
    }  # fmt: skip
    regret.print_summary(found, rows)
    assert capsys.readouterr().out.endswith("failed: call 5: because 5 {}\n")
    assert regret.summary([], 3)["measured"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("kinds", [regret.KINDS, regret.STEPS], ids=["inference", "training"])
def test_on_a_gpu_calls_are_measured(kinds):
    """The candidates run by kernels that another process has compiled."""
    calls = [call for call in regret.draw(5, 60, kinds) if call.flops < 1e11][:3]
    with torch.no_grad():
        rows = list(regret.measure(calls, CUDA, 3))
    assert len(rows) == 3
    for row in rows:
        assert row["regret"] >= 0 and row["x"] > 0 and len(row["ms"]) >= 2, row
        assert {*row["errors"]} <= {*families.OF_SDPA}, row["errors"]
