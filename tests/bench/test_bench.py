"""The bench's own parts that need no GPU: masks, and the exact reference."""

import collections
import dataclasses
import functools
import itertools
import json
import math
import os
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from instead import InThisProcess
from torch._inductor import compile_fx
from torch.nn.attention import SDPBackend

from bench import attention as bench
from bench import (
    blocks,
    compile_time,
    fusion,
    harness,
    measure,
    preparation,
    providers,
)  # fmt: skip
from bench import model as whole
from bench.cases import MASKS, PLANS, Case
from sage_inductor import report
from sage_inductor.ops import gpus
from sage_inductor.ops.attention import tiles
from sage_inductor.ops.attention.select import select
from sage_inductor.ops.recipe import NAMED
from sage_inductor.ops.visibility import Visibility

CPU = torch.device("cpu")


@pytest.fixture
def narrow(monkeypatch):
    monkeypatch.setattr(measure, "WINDOW", 16)
    monkeypatch.setattr(providers, "WINDOW", 16)


def inputs(case):
    return *measure.draw(case, "normal", CPU), *measure.draw_mask(case, CPU)


def test_masks_hide_what_they_say(narrow):
    masks = {mask: measure.draw_mask(Case(4, 2, 2, 64, 8, mask=mask), CPU)[0] for mask in MASKS}
    assert {mask: tuple(x.shape) for mask, x in masks.items()} == {
        **dict.fromkeys(MASKS, (1, 1, 64, 64)), "keys": (4, 1, 1, 64)
    }  # fmt: skip
    assert masks["keys"].sum(-1).flatten().tolist() == [48, 52, 56, 60]
    assert masks["documents"][0, 0].equal(torch.block_diag(*[torch.ones(16, 16)] * 4).bool())
    assert masks["window"][0, 0].equal(torch.ones(64, 64).tril().triu(-15).bool())
    assert 0.4 < masks["rows"].float().mean() < 0.6
    assert masks["bias"].dtype == torch.bfloat16
    padding = Case(4, 2, 2, 200, 8, mask="padding")
    (mask,) = measure.draw_mask(padding, CPU)
    assert mask.shape == (1, 1, 1, 200) and mask.flatten().tolist() == [True] * 40 + [False] * 160
    kinds = {
        "keys": "keys",
        "rows": "mask",
        "documents": "mask",
        "window": "window",
        "bias": "bias",
    }
    assert {m: dataclasses.replace(padding, mask=m).kind for m in kinds} == kinds
    assert padding.kind == "keys" and padding.masked


@pytest.mark.parametrize("mask", ["", *MASKS])
def test_the_exact_reference_knows_the_mask(mask, narrow, monkeypatch):
    monkeypatch.setattr(measure, "SCORES", 24 * 2 * 64)  # of 24 rows
    case = Case(2, 4, 2, 64, 16, mask=mask)
    q, k, v, *masks = inputs(case)
    exact = measure.Exact(q, k, v, *masks, is_causal=False)
    out = F.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), *(m if m.dtype == torch.bool else m.double() for m in masks),
        enable_gqa=True,
    )  # fmt: skip
    assert exact.compare(out)["rel_l1"] < 1e-12
    if mask:
        plain = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        assert exact.compare(plain)["rel_l1"] > measure.WRONG


def test_rows_that_see_nothing_are_zero():
    q = torch.randn(1, 8, 4).double()
    for mask in (
        torch.ones(8, 8).bool().triu(1),
        torch.zeros(8, 8).masked_fill_(torch.eye(8) == 1, -math.inf),
    ):
        out = measure.attention(q, q, q, False, mask)
        assert out.isfinite().all()
    none = torch.zeros(1, 8, dtype=torch.bool)
    assert (measure.attention(q, q, q, False, none) == 0).all()


@pytest.mark.parametrize("mask", ["", *MASKS])
def test_the_kernel_provider_is_attention_under_the_mask(mask, narrow):
    case = Case(2, 4, 2, 96, 64, mask=mask)
    provider = providers._kernel(case, "sage2-8b")
    each = inputs(case)
    out = provider.call(*provider.prepare(*each))
    assert measure.Exact(*each, is_causal=False).compare(out)["rel_l1"] < measure.WRONG


def test_the_gate_looks_at_a_small_case():
    plain, causal = Case(4, 32, 32, 8192, 64), Case(4, 32, 32, 8192, 128, True)
    assert providers.small(plain) == Case(1, 4, 2, 300, 64)
    assert providers.small(causal) == Case(1, 4, 2, 300, 128, True)
    for mask in MASKS:
        N = 304 + (measure.WINDOW if mask == "window" else 0)
        timed = dataclasses.replace(plain, mask=mask)
        assert providers.small(timed) == Case(2, 32, 16, N, 64, mask=mask)


@pytest.mark.parametrize("mask", ["", *MASKS])
def test_the_gate_emulates_what_the_kernel_is_given(mask, narrow, monkeypatch):
    """On CPU the kernel is its emulation: nothing is between them, by however few heads."""
    small = providers.small
    few = functools.partial(dataclasses.replace, H_q=4, H_kv=2)
    monkeypatch.setattr(providers, "small", lambda case: few(small(case)))
    for recipe in ("sage2-8b", "sage3"):
        assert providers.gate(Case(4, 32, 32, 1024, 64, mask=mask), recipe, CPU) == 0


def test_the_gates_tile_is_that_of_the_length_that_is_timed(monkeypatch):
    """At head_dim 64 three warpgroups compute from N=6144 on; the gate's own case has N=300."""
    case, selected = (
        Case(1, 2, 2, 300, 64),
        select((9, 0), NAMED["sage2-8b-per-token"], 64, False),
    )
    a = providers._kernel(case, "sage2-8b-per-token").prepare(*inputs(case))
    monkeypatch.setattr(gpus, "capability", lambda device: (9, 0))
    monkeypatch.setattr(gpus, "processors", lambda device: 132)
    assert providers.tile_of(a, Case(1, 2, 2, 8192, 64), selected).warpgroups == 3
    assert providers.tile_of(a, Case(1, 2, 2, 1024, 64), selected).warpgroups == 1
    a = a._replace(left=100, right=0)
    assert providers.tile_of(a, Case(1, 2, 2, 8192, 64), selected).warpgroups == 1
    a = a._replace(warpgroups=0)
    assert providers.tile_of(a, Case(1, 2, 2, 8192, 64), selected) == selected


@pytest.mark.parametrize(
    "D, is_causal, warpgroups",
    [(40, False, (1, 3)), (64, True, (1, 3)), (128, False, (1, 2, 3)), (192, True, (2,))],
)
def test_every_tile_of_a_call_is_timed_by_a_name_of_its_own(D, is_causal, warpgroups, monkeypatch):
    from sage_inductor.ops.attention.hopper import plan

    monkeypatch.setattr(plan, "launch", lambda a, tile, run: (tile,))
    recipe, case = "sage2-8b-per-token", Case(1, 2, 2, 300, D, is_causal)
    found = providers.build(case, ("tiles",), [recipe])
    plural = {n: "s" * (n > 1) for n in warpgroups}
    assert [p.name for p in found] == [f"{recipe}, {n} warpgroup{plural[n]}" for n in warpgroups]
    a = found[0].prepare(*inputs(case))
    for provider, n in zip(found, warpgroups, strict=True):
        load = tiles.Load(unmasked=1)
        assert provider.call(*a) == tiles.hopper((9, 0), "fp8", D, is_causal, load, n)


@pytest.mark.parametrize("mask", ["", *MASKS])
def test_compiled_providers_take_masks_with_a_symbolic_length(mask, monkeypatch, narrow, op_by_op):
    """One graph for all N; ours are rewritten, and a window has become a band."""
    monkeypatch.setattr(providers, "SAGE_OPTIONS", {**providers.SAGE_OPTIONS, "sage.emulate": True})
    sets = []
    for N in (128, 256):
        case = Case(2, 4, 4, N, 64, mask=mask)
        sets.append(inputs(case))
    measure.mark_dynamic(sets)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    compiled = providers.build(case, ("inductor", "op"), ["sage2-8b"])
    with torch.no_grad():
        for each, provider in itertools.product(sets, compiled):
            found = measure.Exact(*each, is_causal=False).compare(provider.call(*each))
            assert found["rel_l1"] < measure.WRONG
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs + len(compiled)
    sites = report()
    kinds = {"": "none", "window": "window(15, 0)"}
    assert len(sites) == 1
    assert all(site.rewritten and kinds.get(mask, site.mask) == site.mask for site in sites)


def test_shared_k_and_v_are_stacked_by_the_op_and_repeated_for_what_it_is_compared_with(
    monkeypatch, op_by_op
):
    monkeypatch.setattr(providers, "SAGE_OPTIONS", {**providers.SAGE_OPTIONS, "sage.emulate": True})
    case = Case(2, 4, 4, 256, 64, shared=True)
    each = inputs(case)
    assert [x.shape[0] for x in each] == [2, 1, 1] and case.table == "B=2 H=4 D=64, one k and v"
    built = providers.build(case, ("inductor", "apart", "op"), ["sage2-8b-per-token"])
    assert len(built) == 3 and providers.build(Case(2, 4, 4, 256, 64), ("apart",), ["sage1"]) == []
    with torch.no_grad():
        given = [provider.prepare(*each) for provider in built]
        _, apart, op = (p.call(*x) for p, x in zip(built, given, strict=True))
    assert [x[1].shape[0] for x in given] == [1, 2, 1]
    assert torch.equal(apart, op)
    assert measure.Exact(*each, is_causal=False).compare(op)["rel_l1"] < measure.WRONG
    assert ["share" in site.reason for site in report()] == [False, True]


def test_the_peak_is_of_one_call_beside_its_inputs(monkeypatch):
    """Of an allocator in which something else had its peak before."""
    allocated, peak = [1000], [9000]

    def allocate(n):
        allocated[0] += n
        peak[0] = max(peak[0], allocated[0])

    def call(x):
        allocate(50)
        allocate(-20)
        allocate(40)
        allocate(-70)
        return x + 1

    for name, function in {
        "synchronize": lambda: None,
        "memory_allocated": lambda: allocated[0],
        "max_memory_allocated": lambda: peak[0],
        "reset_peak_memory_stats": lambda: peak.__setitem__(0, allocated[0]),
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    provider = measure.Provider("p", call, lambda x: allocate(700) or (x,), captures=False)
    runner = measure.Runner(provider, [(torch.ones(2),)] * 3)
    assert runner.peak_bytes() == 70


def test_each_runs_right_after_each_other_one_once():
    rounds = [measure.order(["a", "b", "c", "d"], turn) for turn in range(4)]
    follows = collections.Counter(pair for names in rounds for pair in itertools.pairwise(names))
    assert len(follows) == 12 and set(follows.values()) == {1}


def test_turns_are_as_long_as_asked_and_begin_untimed():
    ms, log = {"a": 1.0, "b": 4.0, "long": 99.0}, []

    def clock(call, repeats):
        log.append((call, repeats))
        return ms[call] / len(log)

    found = measure.in_turns({name: name for name in ms}, 1, 12.0, clock, least=2)
    assert log[:3] == [("a", 2), ("b", 2), ("long", 2)]
    assert log[3:] == [("a", 4), ("a", 12), ("b", 2), ("b", 6), ("long", 1), ("long", 2)]
    assert found == {"a": [1 / 5], "b": [4 / 7], "long": [99 / 9]}


def test_rows_have_times_and_peaks_of_those_that_run(monkeypatch, capsys):
    monkeypatch.setattr(bench, "Runner", OnCPU)
    monkeypatch.setattr(
        bench, "interleave", lambda runners, *_: {name: [2.0, 4.0, 3.0] for name in runners}
    )
    case = Case(1, 2, 2, 64, 64)
    monkeypatch.setattr(bench, "draw_sets", lambda *_: [inputs(case)])
    given = [
        measure.Provider("cuDNN", F.scaled_dot_product_attention),
        measure.Provider("wrong", lambda q, k, v: q),
        measure.Provider("failing", lambda q, k, v: [][0]),
    ]
    monkeypatch.setattr(bench, "build", lambda *_: given)
    plan, rows = dataclasses.replace(PLANS["quick"], cases=(case,)), []
    bench.run("quick", plan, [], CPU, SimpleNamespace(add=rows.extend))
    assert "D=64: TFLOP/s (x cuDNN)" in capsys.readouterr().out
    found = {row["provider"]: row for row in rows}
    assert {name: (row["ms"], row["peak_bytes"]) for name, row in found.items()} == {
        "cuDNN": (3.0, 12), "wrong": (None, 12), "failing": (None, None)
    }  # fmt: skip
    assert found["failing"]["error"].startswith("IndexError")
    assert found["wrong"]["error"].startswith("wrong on normal inputs")
    assert "peak_bytes" in bench.method(bench.parse([]))["memory"]


def test_flex_is_asked_what_a_block_mask_can_say(narrow):
    case = Case(2, 4, 4, 256, 64, is_causal=True)
    assert len(providers.build(case, ("flex",), [])) == 1
    for mask in MASKS:
        case = Case(2, 4, 4, 256, 64, mask=mask)
        assert len(providers.build(case, ("flex",), [])) == (mask in measure.SEES)


@pytest.mark.parametrize("mask", sorted(measure.SEES))
def test_flex_sees_what_the_mask_shows(mask, narrow, op_by_op):
    case = Case(2, 4, 4, 256, 64, mask=mask) if mask != "causal" else Case(2, 4, 4, 256, 64, True)
    each = inputs(case)
    measure.mark_dynamic([each])
    (flex,) = providers.build(case, ("flex",), [])
    with torch.no_grad():
        out = flex.call(*flex.prepare(*each))
    found = measure.Exact(*each, is_causal=case.is_causal).compare(out)
    assert found["rel_l1"] < 0.01


def test_no_preparation_is_timed_that_is_not_the_references(monkeypatch):
    """On CPU it is the reference, to which `check` compares it."""
    _, k, v = inputs(Case(1, 2, 2, 300, 80))
    preparation.check(CPU)
    right = preparation.prepare(k, v, Visibility(), preparation.RECIPE)
    assert preparation.prepared(k, v).equal(right.k) and right.k.dtype == torch.int8
    answers = [right, right._replace(k=right.k.roll(1, 2))]
    monkeypatch.setattr(preparation, "prepare", lambda *_: answers.pop())
    with pytest.raises(SystemExit, match="no speed is reported"):
        preparation.check(CPU)


# -- whole blocks, and what preparation adds to a graph ----


def tiny(name):
    m = blocks.MODELS[name]
    heads = {"H_q": 4, "H_kv": 4 * m.H_kv // m.H_q}
    return dataclasses.replace(m, B=1, **heads, N=192, D=64, mlp=256, text=m.text and 32)


BLOCKS = {type_: name for name, type_ in ((m.name, m.block) for m in blocks.MODELS.values())}


def drawn(name):
    m = tiny(name)
    try:
        return m, *blocks.draw(m, CPU)
    except ImportError as error:  # of the package that has the block
        pytest.skip(str(error))


# A block alone, one whose attention is in a model beside others, masks, causal heads in groups.
SOON = "flux_double", "sdxl_32x32", "hunyuan_padded", "llama3_2k"
each_block = pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[pytest.mark.sweep] * (x not in SOON)) for x in BLOCKS.values()],
)


@each_block
def test_a_blocks_scores_are_sharp(name, monkeypatch):
    """SD3's modulation, of random channels, widens what it normalizes."""
    exact, found = F.scaled_dot_product_attention, []

    def see(query, key, *args, **kwargs):
        scale = kwargs.get("scale") or query.shape[3] ** -0.5  # Whisper scales q itself
        found.append((query[:, 0].float() @ key[:, 0].float().mT * scale).std().item())
        return exact(query, key, *args, **kwargs)

    m, block, given = drawn(name)
    monkeypatch.setattr(F, "scaled_dot_product_attention", see)
    with torch.no_grad():
        block(*given)
    assert all(0.8 * blocks.SHARP < each < 1.8 * blocks.SHARP for each in found) and found


@each_block
def test_a_block_is_rewritten_and_near_eager(name, monkeypatch, op_by_op):
    """And whose attention is not its own, is not near: the bound sees what the rewrite can break."""
    m, block, given = drawn(name)
    options = {"sage.emulate": True, "sage.recipe": "sage2-8b-per-token"}
    asked = {"backend": "sage", "options": options}
    with torch.no_grad():
        eager = block(*given)
        eager = eager[0] if isinstance(eager, tuple) else eager
        out = whole.compiled(block, asked, [SDPBackend.MATH])(*given)
        found = whole.check({"inductor": eager, "sage": out})
        exact = F.scaled_dot_product_attention
        monkeypatch.setattr(
            F,
            "scaled_dot_product_attention",
            lambda query, *args, **kwargs: exact(0 * query, *args, **kwargs),
        )
        uniform = block(*given)
        uniform = uniform[0] if isinstance(uniform, tuple) else uniform
    assert found["sage"]["rel_l1"] < 0.03
    with pytest.raises(whole.Wrong, match="uniform is not near inductor"):
        whole.check({"inductor": eager, "uniform": uniform})
    sites = whole.sites(report())
    assert len(sites) == (2 if m.block in blocks.BESIDE else 1)
    assert whole.kernel_recipe(m, {"sage": sites}) == "sage2-8b-per-token"
    assert out.shape == (1, m.N - m.text * (m.block not in blocks.BESIDE), m.C)


def test_rope_keeps_what_it_rotates_and_each_writing_is_one():
    """The interleaved one, on channels put in its order, is the two others."""
    x = torch.randn(2, 3, 16, 8)
    cos, sin = blocks.angles(16, 8)
    order = torch.arange(8).view(2, 4).T.flatten()  # 0, 4, 1, 5, ...
    expected = fusion.halves(x, cos, sin)
    torch.testing.assert_close(expected.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(fusion.rotated_half(x, cos, sin), expected)
    found = blocks.interleaved(x[..., order], *blocks.pairs(16, 8))
    torch.testing.assert_close(found, expected[..., order])


def test_a_block_that_is_not_rewritten_gives_no_recipe_and_nan_is_not_near():
    m = tiny("wan14b_480p")
    cross = {"q": [1, 4, 192, 64], "k": [1, 4, 32, 64], "recipe": "sage1", "reason": ""}
    own = {**cross, "k": [1, 4, 192, 64], "recipe": None}
    with pytest.raises(whole.Wrong, match="no column rewrites the self-attention"):
        whole.kernel_recipe(m, {"sage": [own, cross]})
    with pytest.raises(whole.Wrong, match="sage is not near inductor"):
        whole.check({"inductor": torch.ones(4), "sage": torch.full((4,), math.nan)})
    with pytest.raises(whole.Wrong, match="keep 0.3 is not near inductor"):
        whole.check({"inductor": torch.ones(4), "keep 0.3": torch.full((4,), math.nan)})


class OnCPU:
    """A measure.Runner that launches."""

    captured = False

    def __init__(self, provider, sets):
        self.provider, self.args = provider, [provider.prepare(*each) for each in sets]
        self.run()

    def run(self):
        self.out = self.provider.call(*self.args[-1])

    def output(self):
        return self.out

    def peak_bytes(self):
        return 12

    def load(self, *inputs):
        self.args[-1] = self.provider.prepare(*inputs)
        self.run()


@pytest.fixture
def timed(monkeypatch):
    """Benches of compiled graphs where no GPU is: in the order of the names, 1 ms and more."""
    for bench_ in (whole, fusion):
        monkeypatch.setattr(bench_, "Runner", OnCPU)
        monkeypatch.setattr(
            bench_,
            "interleave",
            lambda runners, *_: {name: [i] for i, name in enumerate(runners, 1)},
        )
    monkeypatch.setattr(whole, "draw_sets", lambda case, device, dynamic: [inputs(case)])
    monkeypatch.setattr(whole, "build", lambda case, kinds, recipes: (
        [providers.Provider(kind, F.scaled_dot_product_attention) for kind in kinds]
    ))  # fmt: skip
    monkeypatch.setattr(whole, "gate", lambda *_: 0.0)
    return harness.parser("", rounds=3, target_ms=20.0).parse_args([])


def test_a_model_is_measured(timed, monkeypatch, op_by_op):
    with torch.no_grad():
        row = whole.measure(tiny("vit_l_1024px"), "model", timed, CPU)
        assert row["error"] is None  # nor a gate where nothing is rewritten
        assert [site["recipe"] for site in row["sites"]["sage"]] == [None]
        assert list(row["times"]) == ["inductor", "sage"] == list(row["sites"])
        assert (row["attention"], row["share"]) == ("cuDNN", 1.0)
        assert row["speed"] == {"sage": {"x": 0.5, "x_min": 0.5, "x_max": 0.5}}
        emulated = {"backend": "sage", "options": {"sage.emulate": True}}
        monkeypatch.setitem(whole.COLUMNS, "sage", emulated)
        row = whole.measure(tiny("vit_l_1024px"), "model", timed, CPU)
        assert row["error"] is None and row["sites"]["sage"][0]["recipe"] == "sage2-8b"
        monkeypatch.setattr(whole, "gate", lambda *_: math.nan)
        row = whole.measure(tiny("vit_l_1024px"), "model", timed, CPU)
        assert "sage2-8b kernel is nan from its emulation" in row["error"] and "times" not in row
    assert json.dumps(row)


def test_what_preparation_adds_is_measured(timed, monkeypatch, op_by_op):
    monkeypatch.setattr(fusion, "GRAPHS", fusion.GRAPHS[-1:])
    with torch.no_grad():
        (row,) = fusion.measure(Case(1, 2, 2, 100, 64), timed, CPU)
    assert (row["added_ms"], row["floor_ms"]) == (1, 2.5) and json.dumps(row)


@pytest.mark.parametrize("rope, projected", fusion.GRAPHS)
def test_our_graph_prepares_what_inductors_gives(rope, projected, op_by_op):
    case = Case(1, 2, 2, 100, 64)
    qkv = [torch.randn(1, 100, 2, 64, dtype=torch.bfloat16) for _ in range(3)]
    given = fusion.inputs(case, rope, projected, qkv, CPU)
    with torch.no_grad():
        right, ours = (
            torch.compile(functools.partial(f, rope), fullgraph=True)(*given)
            for f in (fusion.graph, fusion.prepared)
        )
        fusion.check(ours, right)
        with pytest.raises(fusion.Wrong, match="from what prepare gives"):
            fusion.check(ours, (right[0], right[1] + 1, right[2]))
    assert [tuple(x.shape) for x in right] == [(1, 2, 100, 64)] * 3


@pytest.fixture
def process(monkeypatch, op_by_op):
    """A process that compiles no code, and whose graphs torch's cache has once they were compiled
    with the same folder: as many as there are compilations."""
    monkeypatch.setattr(compile_time, "subprocess", InThisProcess())
    compile_graph, compiled = compile_fx.compile_fx, collections.Counter()

    def compile_or_load(*args, **kwargs):
        folders = tuple(os.environ[f"{name}_CACHE_DIR"] for name in ("TORCHINDUCTOR", "TRITON"))
        now = len(torch._dynamo.utils.counters["compiled"])
        torch._dynamo.utils.counters["compiled"][now] += 1
        if now < compiled[folders]:
            torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"] += 1
        compiled[folders] = max(compiled[folders], now + 1)
        return compile_graph(*args, **kwargs)

    # Not by monkeypatch, which is undone after op_by_op: compile_fx would stay what that made of it.
    with mock.patch.object(compile_fx, "compile_fx", compile_or_load):
        yield compiled


@pytest.mark.parametrize("backend", compile_time.BACKENDS)
def test_compile_time_is_of_cold_and_warm_processes(backend, process, tmp_path):
    """What `check` wants: the warm process is served by torch's cache, with every call rewritten."""
    args = compile_time.parse("--layers 2 --hidden 128 --heads 2 --length 32".split())
    found = check_starts(backend, args, tmp_path)
    folders = tuple(str(tmp_path / f"{x}_CACHE_DIR") for x in ("TORCHINDUCTOR", "TRITON"))
    assert process == {folders: 2 if backend == "stages" else 1}
    assert found["rewritten"] == (0 if backend == "inductor" else 2)
    if backend != "inductor":
        with pytest.raises(SystemExit, match=f"{backend}, warm must be .*'rewritten': 1"):
            compile_time.check(backend, "warm", found, layers=1)


@pytest.mark.sweep
@pytest.mark.parametrize("backend", ["sage", "stages"])
def test_torchs_cache_serves_the_warm_process(backend, tmp_path):
    sizes = "--layers 2 --hidden 64 --heads 1 --length 32".split()
    check_starts(backend, compile_time.parse(sizes), tmp_path)
    assert {"fxgraph", "triton"} & {
        path.name for path in (tmp_path / "TORCHINDUCTOR_CACHE_DIR").iterdir()
    }


def check_starts(backend, args, tmp_path):
    for start in ("cold", "warm"):
        found = compile_time.in_a_process(backend, args, str(tmp_path))
        compile_time.check(backend, start, found, args.layers)
        assert 0 < found["phases"]["_compile.compile_inner"] < found["seconds"] + 0.01  # rounded
    with pytest.raises(
        SystemExit, match=f"no time is reported: {backend}, cold must be .*'hits': 0"
    ):
        compile_time.check(backend, "cold", found, args.layers)
    return found


def test_compile_times_are_compared_by_their_medians():
    seconds = {"inductor": (2, 2, 8), "sage": (3, 9, 4), "stages": (6, 5, 7)}
    rows = [
        {"backend": name, "start": "cold", "seconds": s}
        for name, all_ in seconds.items()
        for s in all_
    ]
    rows += [row | {"start": "warm", "seconds": 1} for row in rows[:6]]
    found = compile_time.summary(rows)
    assert found["cold"] == {
        "seconds": {"inductor": [2, 2, 8], "sage": [4, 3, 9], "stages": [6, 5, 7]},
        "ratios": {"sage/inductor": 2.0, "stages/sage": 1.5},
    }
    assert found["warm"]["ratios"] == {"sage/inductor": 1.0}  # whose stages were not measured
