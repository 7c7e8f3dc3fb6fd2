"""What diagnose measures, against computations of its own; what it suggests; what it leaves alone."""

import dataclasses
import functools
import gc
import json
import math
import re
import sys
import time
from types import SimpleNamespace

import pytest
import support
import torch
import torch.nn.functional as F
import tqdm
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Transformer
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

import sage_inductor
from sage_inductor import Diagnosis, Policy, diagnose, diagnosing
from sage_inductor.choose import families, tables
from sage_inductor.choose.candidates import auto_recipes
from sage_inductor.choose.cost import Prediction, Sizes
from sage_inductor.choose.families import Family
from sage_inductor.ops.recipe import BY_SPEED, NAMED, TABLE
from sage_inductor.ops.visibility import FULL
from sage_inductor.patterns import Decision, Site, reasons
from sage_inductor.policy import Rule, kept
from sage_inductor.study import measure, suggest
from sage_inductor.study.diagnose import TOLERANCE
from sage_inductor.study.measure import Row

sdpa = F.scaled_dot_product_attention


def with_an_outlier_channel(q, k, v):
    """A channel of k that q does not look at, but that sets the scale of all others."""
    k, q = k.clone(), q.clone()
    k[..., 0], q[..., 0] = 3000 * k[..., 1], 0
    return sdpa(q, k, v)


def with_a_strong_channel(q, k, v):
    """A channel of k that q does look at."""
    k = k.clone()
    k[..., 5] *= 40
    return sdpa(q, k, v)


def with_values_that_cancel(q, k, v):
    """Keys looked at alike, of values +-10 that leave little: an 8-bit v does not."""
    signs = 1 - 2 * (torch.arange(v.shape[2]) % 2)
    return q / 100, k, v + 10 * signs[:, None]


class Called(nn.Module):
    def forward(self, q, k, v):
        return sdpa(q, k, v)


# -- what is suggested ----


@torch.no_grad()
def test_hostile_layers_are_found_and_get_what_copes(tmp_path):
    hostile = {1: with_an_outlier_channel, 3: lambda *x: sdpa(*with_values_that_cancel(*x))}
    model = Transformer(*(hostile.get(i, sdpa) for i in range(6)))
    x, path = torch.randn(2, 96, 64), tmp_path / "policy.json"
    found = diagnose(model, path=path)(x)

    worst = next(row for row in found.rows if row.recipe in BY_SPEED)
    assert worst.site.module == "layers.1" and worst.relative_l1 > 0.2
    errors = [row.relative_l1 for row in found.rows]
    assert errors == sorted(errors, reverse=True)
    expected = {f"layers.{i}": "auto" for i in range(6)}
    expected |= {"layers.1": "off", "layers.3": "sage1-per-token"}
    assert found.suggested == expected
    of = {(row.site.module, row.recipe): row.relative_l1 for row in found.rows}
    assert len(of) == len(found.rows) == 6 * (len(NAMED) + 1)
    for module, recipe in expected.items():
        tried = BY_SPEED[: BY_SPEED.index(recipe) + 1] if recipe in BY_SPEED else BY_SPEED
        within = [of[module, each] <= TOLERANCE for each in tried]
        assert within == [False] * (len(tried) - 1) + [recipe != "off"] or recipe == "auto"
        assert of[module, "sdpa"] < 1e-5

    policy = Policy.load(path)
    assert policy == found.policy and policy.rules[-1] == Rule("auto") and len(policy.rules) == 3
    note, error = json.loads(path.read_text())["note"], of["layers.3", "sage1-per-token"]
    assert note["tolerance"] == TOLERANCE
    assert f"sage1-per-token {error:.4g}" in note["relative L1"]["layers.3"]

    options = {"sage.emulate": True, "sage.policy": str(path)}
    report = sage_inductor.explain(model, options=options)(x)
    named = {"auto": "sage2-8b", "off": None}
    meant = {module: named.get(recipe, recipe) for module, recipe in expected.items()}
    assert {s.module: s.recipe for s in report} == meant


@torch.no_grad()
def test_calls_that_agree_get_one_rule_and_the_table_shows_it():
    found = diagnose(Transformer(sdpa, sdpa))(torch.randn(1, 50, 64))
    assert found.policy == Policy((Rule("auto"),))
    lines = str(found).splitlines()
    assert lines[0] == found.verdict == "2 modules, relative L1 <= 0.05: auto"
    assert repr(found) == f"<Diagnosis: {found.verdict}>"
    columns = ["module", "count", "call", "q", "k", "dtype", "mask", "suggested"]
    assert lines[2].split() == [*columns, *found.shown]
    assert lines[4].split()[:3] == ["layers.*", "x2", "SDPA"]
    assert lines[5].startswith("relative L1,")
    assert set(found.shown) == {"sdpa", *BY_SPEED, *auto_recipes(None, 32)}
    assert '{"recipe": "auto"}' in str(found) and not found.unmeasured
    assert found.details().count("\n") == 1 + 2 * (len(NAMED) + 1)
    strict = diagnose(Transformer(sdpa, sdpa), tolerance=0.02)(torch.randn(1, 50, 64))
    assert strict.policy == Policy((Rule("sage1-per-token"),))
    one = diagnose(Transformer(sdpa), recipes="sage3")(torch.randn(1, 50, 64))
    assert {row.recipe for row in one.rows} == set(one.shown) == {"sdpa", "sage3"}
    only = diagnose(Transformer(sdpa), recipes=["sage1", "sage2-8b"])(torch.randn(1, 50, 64))
    assert {row.recipe for row in only.rows} == {"sdpa", "sage1", "sage2-8b"}
    assert only.policy == Policy((Rule("sage2-8b"),))  # of "auto" not all was measured


def test_a_layer_with_strong_channels_of_k_gets_a_recipe_that_rotates():
    found = diagnose(with_a_strong_channel)(*(torch.randn(1, 2, 200, 64) for _ in range(3)))
    assert found.suggested == {"": "sage2-8b-rotated"}
    of = {row.recipe: row.relative_l1 for row in found.rows}
    for name in BY_SPEED:
        assert (of[name] <= TOLERANCE) == NAMED[name].rotated, (name, of[name])


AUTOS = "sage2-8b-per-token", "sage2-8b"  # of calls that are made up


def probe(module: str, **errors: float) -> SimpleNamespace:
    """Of one call with these errors."""
    errors = {name.replace("_", "-"): e for name, e in errors.items()}
    site = SimpleNamespace(module=module)
    return SimpleNamespace(site=site, errors={None: errors}, autos=AUTOS, heads={None: {}})


def test_no_two_recipes_have_one_rank():
    ranks = [row.speed_rank for row in TABLE.values() if row.speed_rank]
    assert sorted(ranks) == list(range(1, 1 + len(BY_SPEED))) and BY_SPEED[-1] == "sage1"


def test_auto_is_suggested_only_if_all_that_it_may_become_is_within_the_tolerance():
    def suggested(**errors):
        return suggest.suggested([probe("m", **errors)], 0.05, {})[0][None]["m"]

    assert suggested(sage2_8b_per_token=0.04, sage2_8b=0.05) == "auto"
    assert suggested(sage2_8b_per_token=0.04, sage2_8b=0.06) == "sage2-8b-per-token"
    assert suggested(sage2_8b_per_token=0.06, sage2_8b=0.04) == "sage2-8b"
    assert suggested(sage2_8b_per_token=0.06, sage1_per_token=0.06) == "off"


class Denoiser(nn.Module):
    """In the first steps it has values that 8 bits do not cope with."""

    def __init__(self, hard):
        super().__init__()
        self.hard = hard

    def forward(self, x, step):
        q, k, v = with_values_that_cancel(x, x, x)
        hard = step < self.hard
        return sdpa(torch.where(hard, q, x), k, torch.where(hard, v, x))


def pipeline(model, steps, callback, later=(0,)):
    """A denoiser's, which it calls once in a step, or for each of `later` as so much later."""
    pipe, x = SimpleNamespace(num_timesteps=steps), torch.randn(1, 2, 40, 32)
    for step in range(steps):
        for more in later:
            model(x, torch.tensor(step + more))
            torch._dynamo.graph_break()
        callback(pipe, step, None, {})


@pytest.mark.parametrize("order", [(0, 9), (9, 0)])
def test_of_a_call_that_runs_twice_in_a_stage_the_worse_counts(order, tmp_path):
    """With guidance: hard in the first two steps of one of them, whichever is first."""
    guided, path = functools.partial(pipeline, later=order), tmp_path / "policy.json"
    with sage_inductor.stage(None):
        found = diagnose(guided, path=path)(Denoiser(2), 6, sage_inductor.Schedule(edge=(2, 0)))
    assert found.suggested == {"": "auto"} and set(found.by_stage) == {"edge"}
    edge = found.by_stage["edge"][""]
    assert edge in ("sage1", "sage1-per-token", "off")
    assert found.policy.rules == (Rule(edge, stage="edge"), Rule("auto"))
    assert Policy.load(path) == found.policy
    assert found.verdict == f"1 module, relative L1 <= 0.05: auto; in edge: {edge}"


def test_errors_and_suggestions_are_by_stage(tmp_path):
    with sage_inductor.stage(None):
        found = diagnose(pipeline)(Denoiser(2), 4, sage_inductor.Schedule(first=(1, 0)))
    assert set(found.by_stage) == {"first"}
    worst = {(r.site.stage, r.recipe): r.relative_l1 for r in found.rows}
    assert {stage for stage, _ in worst} == {None, "first"}
    assert worst[None, "sage2-8b"] > 0.05 < worst["first", "sage2-8b"]  # step 1 is in none
    assert found.suggested == {"": found.by_stage["first"][""]} and len(found.policy.rules) == 1
    for text in (str(found), found.details(), found.heat_map()):
        assert " in first" in text
    found.to_html(tmp_path / "page.html")
    with sage_inductor.stage("only"):
        model, inputs = Denoiser(0), (torch.randn(1, 2, 40, 32), torch.tensor(0))
        found = diagnose(model)(*inputs)
    assert not found.suggested and found.policy.rules == (Rule("auto", stage="only"),)
    assert found.verdict.startswith("1 module,") and "sdpa in only" not in str(found)
    assert found.heat_map() and found.details()


class Tokens(nn.Module):
    """Attention of tokens much like the one before (a), of random ones (b) and to others (c)."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (Called() for _ in range(3))

    def forward(self, x, noise):
        return self.a(x, x, x), self.b(noise, noise, noise), self.c(x, *[x[:, :, 1:]] * 2)


@torch.no_grad()
def test_the_least_that_may_be_kept_is_suggested_by_module_and_stage(tmp_path):
    of_all = {"similarity": 0, "layout": [8, 8, 8], "tail": True}
    keep = [{"top_k": share, **of_all} for share in (0.1, 0.5)]
    noise = torch.randn(1, 2, 512, 32)
    model, x = Tokens(), noise.cumsum(2) / 4
    path = tmp_path / "policy.json"
    with diagnosing(model, recipes="sage1-rotated", keep=keep, tolerance=0.065, path=path) as found:
        model(x, noise)
        with sage_inductor.stage("late"):
            model(noise, noise)
    names = list(found.keeps)
    errors = {(r.site.module, r.site.stage, r.recipe): r.relative_l1 for r in found.rows}
    assert errors["a", None, names[1]] < errors["a", None, names[0]] < 0.065
    assert errors["b", None, names[1]] > 0.065 > errors["b", None, "sage1-rotated"]
    assert not [key for key in errors if key[0] == "c" and key[2] in names]  # no self-attention
    dense = dict.fromkeys("abc", "sage1-rotated")
    assert found.suggested == {**dense, "a": names[0]} and found.by_stage == {"late": dense}
    assert names[0] in str(found) and names[0] in found.details() and found.heat_map()
    policy = Policy.load(path)
    assert policy == found.policy and policy.rules[0] == Rule(dense["a"], stage="late")
    (rule,) = (rule for rule in policy.rules if rule.keep)
    assert (rule.module, rule.recipe, rule.keep.top_k) == ("*.a", "sage1-rotated", 0.1)
    selected = functools.partial(sage_inductor.attention, recipe=rule.recipe, keep=rule.keep)
    with sage_inductor.config.patch(emulate=True):
        measured = support.relative_l1(selected(x, x, x), sdpa(*[x.double()] * 3))
    assert measured == pytest.approx(errors["a", None, names[0]], rel=1e-4)
    found = diagnose(model, recipes="sage1-rotated", keep=keep)(x, x)
    assert found.suggested == {**dense, "a": names[1], "b": names[1]}
    assert [rule.keep and rule.keep.top_k for rule in found.policy.rules] == [None, 0.5]
    with pytest.raises(ValueError, match="beside keep, recipe must be the name of one, got 'auto'"):
        diagnose(model, keep=[0.3])
    with pytest.raises(ValueError, match="diagnose: top_k must be a fraction"):
        diagnose(model, recipes="sage1", keep=[3])


@pytest.mark.parametrize("at_once", [1 << 24, 1])
def test_a_fraction_for_each_head_is_measured_a_part_of_the_heads_at_a_time(at_once, monkeypatch):
    """Where k and v of 2 heads serve 4: what is kept least comes first, in the policy too."""
    monkeypatch.setattr(measure, "MAX_SCORES", at_once)
    noise = torch.randn(1, 8, 512, 32)
    q, k, v = (noise.cumsum(2) / 4).split([4, 2, 2], 1)
    keep = [{"top_k": share, "similarity": 0} for share in ([0.1, 0.6, 0.3, 1], 0.9)]
    attend = functools.partial(sdpa, enable_gqa=True)
    found = diagnose(attend, recipes="sage1-rotated", keep=keep, tolerance=0.9)(q, k, v)
    errors = {row.recipe: row for row in found.rows}
    by_head, of_all = (errors[name] for name in found.keeps)
    assert found.suggested == {"": by_head.recipe} and by_head.worst_head[0] == 0
    with sage_inductor.config.patch(emulate=True):
        out = sage_inductor.attention(
            q, k, v, enable_gqa=True, recipe="sage1-rotated", keep=keep[0]
        )
    exact = attend(*(x.double() for x in (q, k, v)))
    assert support.relative_l1(out, exact) == pytest.approx(by_head.relative_l1, rel=1e-4)
    assert of_all.relative_l1 < by_head.relative_l1
    assert found.policy.rules[0].keep.given() == {"top_k": (0.1, 0.6, 0.3, 1), "similarity": 0}


@pytest.mark.parametrize("H_kv", [4, 2])
@torch.no_grad()
def test_heads_that_differ_get_a_fraction_each_and_the_policy_reaches_the_tolerance(H_kv, tmp_path):
    """Of tokens much like the one before a few blocks are enough, of random ones they are not."""
    noise, tolerance, path = torch.randn(1, 12, 512, 32), 0.065, tmp_path / "policy.json"
    local, is_local = noise.cumsum(2) / 4, torch.tensor([True, True, False, False])[:, None, None]
    q, k, v = torch.where(is_local.repeat(3, 1, 1), local, noise).split(4, 1)
    v = torch.where(is_local, v, 20 * v)  # so that all outputs are about as large
    k, v = (x[:, :: 4 // H_kv] for x in (k, v))  # head 0's and head 2's, if two are shared
    of_all, shares = {"similarity": 0, "tail": True}, (0.1, 0.3, 0.5, 0.9)
    keep = [{"top_k": share, **of_all} for share in shares]
    model, exact = Grouped(), sdpa(*(x.double() for x in (q, k, v)), enable_gqa=True)

    def errors(out) -> list[float]:
        return [support.relative_l1(out[:, h], exact[:, h]) for h in range(4)]

    with sage_inductor.config.patch(emulate=True):
        outs = {
            each["top_k"]: sage_inductor.attention(
                q, k, v, enable_gqa=True, recipe="sage1-rotated", keep=each
            )
            for each in keep
        }
    needed = [next(x for x in shares if errors(outs[x])[h] <= tolerance) for h in range(4)]
    one = next(x for x in shares if support.relative_l1(outs[x], exact) <= tolerance)
    assert len(set(needed)) > 1 and sum(needed) / 4 < 0.9 * one

    study = diagnose(model, recipes="sage1-rotated", keep=keep, tolerance=tolerance, path=path)
    found = study(q, k, v)
    (rule,) = Policy.load(path).rules
    assert rule.keep.given() == {"top_k": tuple(needed), **of_all} and found.policy.rules == (rule,)
    assert found.suggested == {"": f"keep {rule.keep.given()}"}
    assert found.verdict == "1 module, relative L1 <= 0.065: keep by head"
    line = str(found).splitlines()[4]
    assert "keep by head" in line and "(" not in line and found.heat_map() and found.details()
    found.to_html(tmp_path / "page.html")

    torch._dynamo.reset()
    options = {"sage.policy": str(path), "sage.emulate": True}
    out = torch.compile(model, backend="sage", options=options)(q, k, v)
    assert sage_inductor.report()[-1].decision.selection == rule.keep
    of_heads = errors(out)
    assert max(of_heads) <= tolerance and support.relative_l1(out, exact) <= tolerance
    assert found.totals["the policy"].relative_l1 == pytest.approx(max(of_heads), rel=1e-4)


class Grouped(nn.Module):
    def forward(self, q, k, v):
        return sdpa(q, k, v, enable_gqa=True)


TOP_K = [{"top_k": x} for x in (0.1, 0.3, 0.5)]
SPARSITY = [{"rule": "sla", "sparsity": x} for x in (0.9, 0.7, 0.5)]
CLOSE = [{"top_k": x} for x in (0.1, 0.46, 0.5)]
CUBES = [{"top_k": x, "layout": [4, 8, 8]} for x in (0.1, 0.3, 1)]
WITH_TOP_P = [{"top_k": x, "top_p": p} for x, p in [(0.1, 0), (0.3, 0.5), (0.5, 0)]]
OF_LISTS = [{"top_k": x} for x in ([0.1, 0.3, 0.3, 0.3], 0.3, 0.5)]
# Errors of the heads in percent, by each keep. All together have their mean, and 5 is tolerated.
LAST = "1 2 1 30 | 1 1 1 30 | 1 1 1 3"


@pytest.mark.parametrize(
    "keep, calls, found, worst",
    [
        (TOP_K, [LAST], (0.1, 0.1, 0.1, 0.5), 3),
        (SPARSITY, [LAST], (0.9, 0.9, 0.9, 0.5), 3),
        (TOP_K, ["1 9 9 9 | 1 4 9 9 | 1 1 5 1"], (0.1, 0.3, 0.5, 0.5), 5),
        (TOP_K, ["9 9 9 9 | 4 4 4 4 | 1 1 1 1"], 0.3, None),  # heads agree
        (CLOSE, ["9 9 9 9 | 1 1 1 30 | 1 1 1 1"], 0.5, None),  # the list would keep 0.47
        (TOP_K, ["4 4 1 9 | 3 3 1 4 | 2 2 1 2"], 0.1, None),  # all together need less
        (TOP_K, ["1 1 1 30 | 1 1 1 30 | 1 1 1 9"], 0.5, None),  # of a head none is tolerated
        (TOP_K, ["1 1 1 nan | 1 1 1 2 | 1 1 1 1"], (0.1, 0.1, 0.1, 0.3), 2),
        (TOP_K, ["1 1 1 1 | 1 1 1 1 | 1 1 1 nan", LAST], "sage1", None),
        (TOP_K, ["1 1 1 30 | 1 1 1 1 | 1 1 1 1", "30 4 1 1 | 2 1 1 1 | 1 1 1 1"],
         (0.3, 0.1, 0.1, 0.3), 4),  # each head's worst call
        (TOP_K, [LAST, "1 1 | 1 1 | 1 1"], 0.5, None),  # calls of different numbers of heads
        (TOP_K, [LAST, "- | - | 1 1 1 1"], 0.5, None),  # the other keeps do not serve a call
        (CUBES, [LAST], 1, None),  # keeping all is no fraction there
        (CUBES, ["1 1 1 30 | 1 1 1 1 | 1 1 1 1"], (0.1, 0.1, 0.1, 0.3), 1),
        (WITH_TOP_P, ["1 1 1 30 | 1 1 1 1 | 1 1 1 1"], 0.3, None),  # one of its kind
        (WITH_TOP_P, [LAST], (0.1, 0.1, 0.1, 0.5), 3),
        (OF_LISTS, ["4 4 30 30 | 4 4 30 30 | 4 4 1 1"], (0.1, 0.3, 0.5, 0.5), 4),
    ],
)  # fmt: skip
def test_each_head_gets_the_first_keep_that_it_tolerates_if_that_is_a_tenth_less(
    keep, calls, found, worst
):
    selections = [kept(each, "sage1") for each in keep]
    keeps = {f"keep {each.given()}": Rule("sage1", keep=each) for each in selections}
    probes = []
    for call in calls:
        numbers = [[float(x) / 100 for x in each.split() if x != "-"] for each in call.split("|")]
        heads = {x: torch.tensor(each) for x, each in zip(keeps, numbers, strict=True) if each}
        errors = {x: sum(each.tolist()) / len(each) for x, each in heads.items()}
        probes.append(probe("m", sage1=0.01, sdpa=0.0))
        probes[-1].errors["late"] = probes[-1].errors[None] | errors
        probes[-1].heads["late"] = heads
    by_stage, lists, of_heads = suggest.suggested(probes, 0.0501, keeps)
    (rule,) = suggest.merged(by_stage["late"], keeps | lists)
    (rule,) = Policy([rule]).rules  # which raises for what a file may not say
    fraction = rule.keep and (rule.keep.sparsity or rule.keep.top_k)
    assert (fraction or rule.recipe) == found and by_stage[None] == {"m": "sage1"}
    assert list(lists) == list(of_heads) == [by_stage["late"]["m"]] * (worst is not None)
    assert not lists or list(of_heads.values()) == pytest.approx([worst / 100])


def test_of_several_runs_each_heads_worst_counts(tmp_path):
    """Heads take turns at being random. Then a run has fewer of them."""
    noise, path = torch.randn(1, 9, 512, 32), tmp_path / "policy.json"
    runs = []
    for h in (0, 2):
        is_random = (torch.arange(9) % 3 == h)[:, None, None]
        q, k, v = torch.where(is_random, noise, noise.cumsum(2) / 4).split(3, 1)
        runs.append((q, k, torch.where(is_random[:3], 1000 * v, v)))
    keep = [{"top_k": share, "similarity": 0, "tail": True} for share in (0.1, 0.9)]
    options = {"recipes": "sage1-rotated", "keep": keep, "tolerance": 0.5}
    model, alone = Called(), []
    for run in runs:
        (rule,) = diagnose(model, **options)(*run).policy.rules
        alone.append(rule.keep.top_k)
    assert alone == [(0.9, 0.1, 0.1), (0.1, 0.1, 0.9)]
    with diagnosing(model, path=path, **options) as found:
        for run in runs:
            model(*run)
    (rule,) = Policy.load(path).rules
    assert rule.keep.top_k == (0.9, 0.1, 0.9) and found.policy.rules == (rule,)
    with sage_inductor.config.patch(emulate=True):
        of_heads = [
            support.relative_l1(out[:, h], sdpa(*(x[:, h].double() for x in run)))
            for run in runs
            for out in [sage_inductor.attention(*run, recipe=rule.recipe, keep=rule.keep)]
            for h in range(3)
        ]
    assert found.totals["the policy"].relative_l1 == pytest.approx(max(of_heads), rel=1e-4)
    with diagnosing(model, **options) as found:
        for run in (*runs, [x[:, :2] for x in runs[0]]):
            model(*run)
    assert found.policy.rules[0].keep.top_k == 0.9


def test_a_nan_is_worse_than_any_error():
    q, k, v = (torch.randn(1, 2, 40, 16) for _ in range(3))
    v[0, 1, 3, 5] = math.nan
    found = diagnose(sdpa)(q, k, v)
    assert math.isnan(found.rows[0].relative_l1) and found.rows[0].worst_head[0] == 1
    assert found.policy == Policy((Rule("off"),))


PATHS = [f"{stack}.{i}.{name}" for stack in ("encoder", "decoder") for i in range(4)
         for name in ("attn", "cross")] + ["pool", "", "encoder.pool"]  # fmt: skip
PATHS += [f"down.{i}.blocks.{j}.attn" for i in range(2) for j in range(3)]
recipes = st.sampled_from(["auto", "off", "sage1-per-token"])


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(suggested=st.dictionaries(st.sampled_from(PATHS), recipes, min_size=1))
def test_merged_rules_say_of_each_module_what_was_suggested(suggested):
    rules = suggest.merged(suggested)
    for module, recipe in suggested.items():
        assert next(r.recipe for r in rules if r.fits_module(module)) == recipe, rules
    usual = max(map(list(suggested.values()).count, suggested.values()))
    assert len(rules) <= 1 + len(suggested) - usual


def test_neighbouring_layers_and_calls_of_one_name_share_a_rule():
    of = {f"layers.{i}.attn": "off" if i in (0, 1, 2, 6) else "auto" for i in range(12)}
    layers = Rule("off", layer=(0, 2)), Rule("off", module="layers.6.attn"), Rule("auto")
    assert suggest.merged(of) == layers
    of |= {f"layers.{i}.cross": "sage1-per-token" for i in range(12)}
    assert suggest.merged(of) == (
        Rule("off", module="*.attn", layer=(0, 2)),
        Rule("auto", module="*.attn", layer=(3, 5)),
        Rule("auto", module="*.attn", layer=(7, 11)),
        Rule("off", module="layers.6.attn"),
        Rule("sage1-per-token"),
    )
    of |= {f"layers.{i}.attn": "auto" for i in range(12)} | {"pool": "auto"}
    assert suggest.merged(of) == (Rule("sage1-per-token", module="*.cross"), Rule("auto"))


def test_one_module_is_named_so_that_its_block_may_be_compiled_alone():
    of = {"mid.attn1": "off", "mid.attn2": "auto", "pool": "sage1", "last.0": "sage3"}
    named = {"*.attn2": "auto", "*.pool": "sage1", "last.0": "sage3"}
    rules = [Rule(recipe, module=name) for name, recipe in named.items()]
    assert suggest.merged(of) == (*rules, Rule("off"))


def row(module, recipe, error, call="sdpa"):
    shape = (1, 2, 64, 64)
    site = Site(module, call, "SDPA", shape, shape, "bfloat16", "none", Decision("sdpa", ""))
    return Row(site, recipe, 0.99, error, 0.1, (0, error), (0, 0, 3, error))


def of_57_layers():
    """Layer 7 cannot take sage1; of layer 9 one call of two is NaN; errors grow with the layer."""
    rows = [row(f"blocks.{i}.attn", "sage1", 0.001 * i) for i in range(57) if i not in (7, 9)]
    rows += [row("blocks.7.attn", "sage1", 3.0), row("blocks.9.attn", "sage1", math.nan)]
    rows += [row("blocks.9.attn", "sage1", 0.5, call="sdpa_1")]
    rows += [row(f"blocks.{i}.attn", "sdpa", 1e-7) for i in range(57)]
    suggested = {f"blocks.{i}.attn": "off" if i in (7, 9) else "sage1" for i in range(57)}
    rows = tuple(sorted(rows, key=lambda row: -row.badness))
    decision = Decision(None, reasons.DROPS_WEIGHTS())
    sites = (row(f"x.{i}", "", 0).site for i in range(3))
    left = tuple(dataclasses.replace(site, decision=decision) for site in sites)
    return Diagnosis(rows, left, suggested, 0.05, ("sdpa", "sage1"))


def test_equal_layers_are_one_row_the_worst_first():
    text = str(of_57_layers())
    rows = [re.split(r"  +", line) for line in text.splitlines()[4:6]]
    assert {r[0] for r in rows} == {"blocks.*.attn"}
    cells = ["x3", "off", "1e-07", "nan"], ["x55", "sage1", "1e-07", "0.056"]
    assert tuple([r[1], *r[-3:]] for r in rows) == cells
    verdict = "57 modules, relative L1 <= 0.05: sage1 (55), off (2); not measured: 3 calls"
    assert text.startswith(f"{verdict}\n")
    assert "\nx.* x3 (SDPA): dropout is active\n" in text and len(text.splitlines()) < 25
    many = [row(f"{chr(97 + i)}.attn", "sage1", 0.001 * i) for i in range(26)]
    suggested = {r.site.module: "sage1" for r in many}
    found = Diagnosis(tuple(many[::-1]), (), suggested, 0.05, ("sage1",))
    assert "\nand 6 rows of smaller errors\n" in str(found) and "g.attn" in str(found)
    assert "f.attn" not in str(found).partition("version")[0] and "f.attn" in found.details()


def test_the_page_has_a_heat_map_of_layers_and_every_number(tmp_path):
    found = of_57_layers()
    found.to_html(tmp_path / "found.html")
    text = (tmp_path / "found.html").read_text(encoding="utf-8")
    cells = re.findall(r"<g><title>(.*?)</title>(<rect|<text)", text)
    of_9 = [each for each in cells if "blocks.9.attn" in each[0]]
    assert len(cells) == 57 * 2 and dict(of_9) == {
        "blocks.9.attn, sage1: nan": "<rect",
        "blocks.9.attn, sdpa: 1e-07": "<text",  # it is what is compared with, and has no colour
    }
    labels = re.findall(r">([^<]+)</text>", text)
    assert [x for x in labels if "attn" in x] == [f"blocks.{i}.attn" for i in range(57)]
    assert "0.05" in labels and "0.5 or more" in labels  # of the tolerance
    assert text.count("<tr>") == 1 + 1 + len(found.rows) + 1 + 3
    assert "<p>dropout is active: call model.eval()" in text  # and folded in each row
    for name, version in families.versions().items():
        assert f"{name} {version}" in text
    assert "&quot;recipe&quot;: &quot;off&quot;" in text and found._repr_html_().count("<svg") == 1


# -- what is measured ----


def exact_attention(q, k, v, hidden=None, added=None, scale=None):
    """Float64, one query at a time."""
    B, H, N, D = q.shape
    out = torch.zeros(B, H, N, v.shape[3], dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            g = h // (H // k.shape[1])
            for n in range(N):
                s = (k[b, g].double() @ q[b, h, n].double()) * (D**-0.5 if scale is None else scale)
                s = s if added is None else s + added[b, h, n].double()
                s = s if hidden is None else s.masked_fill(hidden[b, h, n], -math.inf)
                out[b, h, n] = s.softmax(0) @ v[b, g].double()
    return out


@pytest.mark.parametrize("at_once", [1 << 24, 1], ids=["whole", "in parts"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_metrics_are_what_they_say(dtype, at_once, monkeypatch):
    monkeypatch.setattr(measure, "MAX_SCORES", at_once)
    q, k, v = (torch.randn(2, H, 30, 24).to(dtype) for H in (4, 2, 2))
    found = diagnose(lambda *qkv: sdpa(*qkv, enable_gqa=True), recipes=["sage1"])(q, k, v)
    exact = exact_attention(q, k, v)
    outs = {
        "sage1": support.sdpa(q, k, v, scale=24**-0.5, recipe="sage1")[0].double(),
        "sdpa": sdpa(q, k, v, enable_gqa=True).double(),
    }
    assert [row.recipe for row in found.rows] == ["sage1", "sdpa"]
    for row in found.rows:
        out = outs[row.recipe]
        error = out - exact
        close = {"rel": 1e-6, "abs": 1e-12}
        assert row.cos_sim == pytest.approx(support.cos_sim(out, exact), **close)
        assert row.relative_l1 == pytest.approx(support.relative_l1(out, exact), **close)
        assert row.rmse == pytest.approx((error**2).mean().sqrt().item(), **close)
        heads = [(error[:, h].abs().sum() / exact[:, h].abs().sum()).item() for h in range(4)]
        assert row.worst_head == (heads.index(max(heads)), pytest.approx(max(heads), **close))
        rows = {
            (b, h, n): (error[b, h, n].abs().sum() / exact[b, h, n].abs().sum()).item()
            for b in range(2) for h in range(4) for n in range(30)
        }  # fmt: skip
        where = max(rows, key=rows.get)
        assert row.worst_row == (*where, pytest.approx(rows[where], **close))


def padding(N_q, N_kv):
    keep = torch.arange(N_kv) < torch.tensor([N_kv, N_kv // 2])[:, None]
    return keep[:, None, None].expand(2, 1, 1, N_kv)


def window(q, k, v):
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    return sdpa(q, k, v, attn_mask=(j <= i) & (j > i - 5))


def by_hand(q, k, v):
    scores = torch.einsum("bhnd,bhmd->bhnm", q, k) * 0.3
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -math.inf).softmax(-1) @ v


def lower_right(q, k, v):
    return sdpa(q, k, v, causal_lower_right(q.shape[2], k.shape[2]))


def rows_that_see_nothing(q, k, v):
    return sdpa(q, k, v, attn_mask=torch.arange(q.shape[2])[:, None] > 3)


BIAS = torch.randn(4, 33, 33)
SITES = {  # function, (H_kv, N_kv, D_v), the mask that must be seen
    "full": (sdpa, (4, 33, 16), "none"),
    "cross": (sdpa, (4, 9, 24), "none"),
    "scale": (lambda q, k, v: sdpa(q, k, v, scale=0.7), (4, 33, 16), "none"),
    "gqa": (lambda q, k, v: sdpa(q, k, v, is_causal=True, enable_gqa=True), (2, 33, 16), "causal"),
    "repeated": (lambda q, k, v: sdpa(q, *(x.repeat_interleave(4, 1) for x in (k, v))), (1, 33, 16), "none"),
    "causal": (lambda q, k, v: sdpa(q, k, v, is_causal=True), (4, 50, 16), "causal"),
    "lower right": (lower_right, (4, 50, 16), "causal, bottom right"),
    "window": (window, (4, 33, 16), "window(4, 0)"),
    "keys": (lambda q, k, v: sdpa(q, k, v, padding(33, 20)), (4, 20, 16), "bool[2, 1, 1, 20]"),
    "bias": (lambda q, k, v: sdpa(q, k, v, BIAS.to(q.dtype)), (4, 33, 16), "float32[4, 33, 33]"),
    "gqa bias": (lambda q, k, v: sdpa(q, k, v, BIAS.to(q.dtype), enable_gqa=True), (2, 33, 16), "float32[4, 33, 33]"),
    "nothing": (rows_that_see_nothing, (4, 33, 16), "bool[33, 1]"),
    "by hand": (by_hand, (4, 33, 16), "causal"),
}  # fmt: skip


def bound(recipe):
    """Of the relative L1 on normal inputs of short sites; 4 bits have some 0.2 on long ones."""
    if recipe == "sdpa":
        return 1e-5
    return 0.5 if NAMED[recipe].of_qk.smooths_q else 0.1


@pytest.mark.parametrize("at_once", [1 << 24, 300], ids=["whole", "in parts"])
@pytest.mark.parametrize("case", SITES)
def test_every_kind_of_site_is_compared_with_what_it_computes(case, at_once, monkeypatch):
    """In float64 the model itself is exact."""
    function, (H_kv, N_kv, D_v), mask = SITES[case]
    q, k, v = torch.randn(2, 4, 33, 16), *(torch.randn(2, H_kv, N_kv, D) for D in (16, D_v))
    expected = function(q.double(), k.double(), v.double())
    compared, add = torch.full_like(expected, math.nan), measure.Error.add

    def spy(error, out, exact, b, h):
        assert exact.dtype == torch.float64 and out.shape == exact.shape
        compared[b : b + len(exact), h : h + exact.shape[1]] = exact
        assert len(exact) == (2 if at_once > 300 else 1)
        add(error, out, exact, b, h)

    monkeypatch.setattr(measure.Error, "add", spy)
    monkeypatch.setattr(measure, "MAX_SCORES", at_once)
    found = diagnose(function)(q, k, v)
    torch.testing.assert_close(compared, expected, rtol=1e-9, atol=1e-9)
    assert not found.unmeasured and {row.site.mask for row in found.rows} == {mask}
    for row in found.rows:
        assert row.relative_l1 < bound(row.recipe)
        assert row.worst_row[-1] < max(1, 4 * bound(row.recipe)), "rows of nothing are 0, and right"


def test_masks_are_recognised_as_the_pass_recognises_them():
    """In every layer: a probe in one layer's graph is nothing to another's proof."""

    def model(q, k, v):
        mask = torch.ones(33, 33, dtype=torch.bool).tril() & padding(33, 33)
        return sdpa(sdpa(q, k, v, mask), k, v, mask)

    inputs = [torch.randn(2, 4, 33, 16) for _ in range(3)]
    masks = [site.mask for site in sage_inductor.explain(model)(*inputs)]
    assert masks == ["causal + bool[2, 1, 1, 33]"] * 2
    found = diagnose(model, recipes=["sage1"])(*inputs)
    assert {row.site.mask for row in found.rows} == set(masks)
    assert len({row.site.call for row in found.rows}) == 2


def test_modules_of_torch_are_measured():
    """Which would take a path of their own without gradients."""
    x = torch.randn(2, 20, 32)
    encoder = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True).eval()
    with torch.no_grad(), diagnosing(encoder) as found:
        encoder(x)
    assert {row.site.spelling for row in found.rows} == {"nn.TransformerEncoderLayer"}
    assert {row.site.q for row in found.rows} == {(2, 2, 20, 16)}
    assert all(row.relative_l1 < max(0.1, bound(row.recipe)) for row in found.rows)


def test_under_autocast_sdpas_row_has_its_dtypes_error():
    with torch.autocast("cpu", torch.bfloat16):
        found = diagnose(Transformer(sdpa))(torch.randn(1, 40, 64))
    assert {row.site.dtype for row in found.rows} == {"bfloat16"}
    (floor,) = (row for row in found.rows if row.recipe == "sdpa")
    assert 1e-4 < floor.relative_l1 < 0.01


def test_a_call_that_runs_several_times_is_shown_at_its_worst():
    layer, x = Called(), torch.randn(1, 2, 40, 16)

    def model(order):
        for gain in order:
            torch._dynamo.graph_break()
            layer(x, torch.tensor(gain) * x, x)

    found = {gain: diagnose(layer)(x, gain * x, x).rows for gain in (0.1, 4.0)}
    alone = {gain: {r.recipe: r.relative_l1 for r in rows} for gain, rows in found.items()}
    for order in ((0.1, 4.0), (4.0, 0.1)):
        for row in diagnose(model)(order).rows:
            assert row.relative_l1 == max(alone[g][row.recipe] for g in order)
    for order in ((math.nan, 4.0), (4.0, math.nan)):
        assert all(math.isnan(row.relative_l1) for row in diagnose(model)(order).rows)


class Numbered(nn.Module):
    """A layer that knows its number, by which Dynamo compiles it anew."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def forward(self, x):
        return sdpa(x, (1 + self.number) * x, x)


@torch._dynamo.config.patch(recompile_limit=2)
def test_layers_beyond_dynamos_limit_of_graphs_are_measured():
    """Graph breaks between layers make each of them a graph of one function."""
    layers = [Numbered(number) for number in range(5)]

    def model(x):
        for layer in layers:
            torch._dynamo.graph_break()
            x = layer(x)
        return x

    x = torch.randn(1, 2, 40, 16)
    found = diagnose(model, recipes="sage1")(x)
    assert len(found.rows) == 2 * len(layers) and " x5 " in str(found)
    assert torch._dynamo.config.recompile_limit == 2
    # A compiled model leaves the others to eager.
    explained = sage_inductor.explain(model, options={"sage.emulate": True})(x)
    assert len(explained.rewritten) == 2


@pytest.mark.gpu
def test_on_a_gpu_its_kernels_are_measured():
    qkv = [torch.randn(1, 4, 300, 64).bfloat16() for _ in range(3)]
    emulated = {row.recipe: row.relative_l1 for row in diagnose(sdpa)(*qkv).rows}
    found = diagnose(sdpa)(*(x.cuda() for x in qkv))
    assert len(found.rows) > 2 and not found.unmeasured
    for row in found.rows:
        assert row.relative_l1 == pytest.approx(emulated[row.recipe], rel=0.1)


# -- a block in which the model runs ----


class Wrapped(nn.Module):
    """A part of a pipeline, with the denoiser in it."""

    def __init__(self, hard=0):
        super().__init__()
        self.block = Denoiser(hard)

    def forward(self, x, step):
        return self.block(x, step) + 1


def errors_of(found) -> dict:
    return {(r.site.module, r.site.stage, r.recipe): r.relative_l1 for r in found.rows}


@torch.no_grad()
def test_a_block_measures_what_its_calls_are_given_and_changes_nothing():
    model, x = Wrapped(hard=1), torch.randn(1, 2, 40, 32)
    steps = [torch.tensor(i) for i in (3, 0, 2)]
    expected = [model(x, step) for step in steps]
    alone = [errors_of(diagnose(model)(x, step)) for step in steps]
    before = dict(vars(model))
    with diagnosing(model) as found:
        assert repr(found).startswith("<Diagnosis: nothing was measured: the block has not ended")
        outs = [model(x, step) for step in steps]
    assert vars(model) == before
    torch.testing.assert_close(outs, expected, rtol=0, atol=0)
    assert errors_of(found) == {key: max(each[key] for each in alone) for key in alone[0]}
    assert {key[0] for key in alone[0]} == {"block"} and found.policy != Policy((Rule("auto"),))
    assert str(found).splitlines()[4].split()[:2] == ["block", "x1"]


@pytest.mark.parametrize("every, measured", [(1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (5, [0])])
def test_of_so_many_calls_one_is_measured(every, measured):
    model, x = Wrapped(), torch.randn(1, 2, 40, 32)
    with diagnosing(model, recipes="sage1", every=every) as found:
        for i in range(5):
            with sage_inductor.stage(f"call {i}"):
                model(x, torch.tensor(i))
    assert [f"call {i}" for i in measured] == list(found.by_stage)


def test_a_block_tells_stages_and_steps_as_a_pipeline_that_is_run_whole():
    for schedule in ({}, {"first": (1, 0)}):
        with sage_inductor.stage(None):
            torch.manual_seed(1)
            whole = diagnose(pipeline)(Denoiser(2), 6, sage_inductor.Schedule(**schedule))
        with sage_inductor.stage(None):
            torch.manual_seed(1)
            model = Denoiser(2)
            with diagnosing(model) as found:  # nothing of the pipeline is compiled
                pipeline(model, 6, sage_inductor.Schedule(**schedule))
        assert found.policy == whole.policy and found.by_stage.keys() == whole.by_stage.keys()
        assert errors_of(found) == errors_of(whole)


def fails_to_compile(gm, example_inputs):
    raise AssertionError("this was to run in eager")


def test_what_is_compiled_already_is_seen_and_the_rest_of_the_block_runs_in_eager():
    x, step = torch.randn(1, 2, 40, 32), torch.tensor(0)
    expected = errors_of(diagnose(Wrapped(), recipes="sage1")(x, step))
    other = torch.compile(nn.Linear(32, 32), backend=fails_to_compile)

    made = [Wrapped() for _ in range(5)]
    in_place, wrapped, held, called, in_parts = made
    in_place.compile(backend=fails_to_compile)
    in_parts.block.compile(backend=fails_to_compile)
    wrapped = torch.compile(wrapped, backend=fails_to_compile)
    holder = torch.compile(held, backend=fails_to_compile)
    by_a_function = torch.compile(lambda *args: called(*args), backend=fails_to_compile)
    for model, run in (
        (in_place, in_place), (wrapped, wrapped), (held, holder), (called, by_a_function),
        (in_parts, in_parts),
    ):  # fmt: skip
        with diagnosing(model, recipes="sage1", every=2) as found:
            for _ in range(3):
                run(other(x), step)
                run(x, step)
        assert errors_of(found).keys() == expected.keys(), made.index(model)
        with pytest.raises(Exception, match="this was to run in eager"):
            run(x, step)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_gradients_are_as_the_block_has_them(mode):
    model, x = Transformer(sdpa), torch.randn(2, 30, 64)
    alone = errors_of(diagnose(model)(x))
    expected = [each.clone() for each in torch.autograd.grad(model(x).sum(), model.parameters())]
    with diagnosing(model) as found, mode():
        out = model(x)
    assert out.requires_grad == (mode is torch.enable_grad)
    assert out.is_inference() == (mode is torch.inference_mode) and errors_of(found) == alone
    if out.requires_grad:
        found = torch.autograd.grad(out.sum(), model.parameters())
        torch.testing.assert_close(list(found), expected)


def tensors_alive() -> int:
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


def test_calls_of_any_number_and_size_are_kept_as_numbers_of_one():
    model, alive = Wrapped(), []
    with torch.no_grad(), diagnosing(model, recipes="sage1") as found:
        for more in ((40, 24, 56), (32, 48, 24, 40)):  # the first two make a graph each
            for N in more:
                model(torch.randn(1, 2, N, 32), torch.tensor(9))
            alive.append(tensors_alive())
    assert alive[1] <= alive[0]
    assert len(found.rows) == 2 and " x1 " in str(found) and not found.unmeasured


class Largest(TorchDispatchMode):
    """Of the tensors that are made, the number of elements."""

    elements = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not op.is_view:
            self.elements = max(self.elements, out.numel())
        return out


def test_heads_and_batches_take_no_more_memory(monkeypatch):
    monkeypatch.setattr(measure, "MAX_SCORES", 64 * 64)  # the scores of one head
    largest = []
    for B, H in ((1, 2), (2, 8)):
        q, k, v = (torch.randn(B, H, 64, 32) for _ in range(3))
        mask = torch.ones(B, H, 64, 64, dtype=torch.bool).tril()
        with Largest() as mode:
            decisions = {x: Decision(x, "") for x in ("sage1", "sage2-8b")}
            measure.errors_of(q, k, v, mask, FULL, 1.0, {"sdpa": None, **decisions})
        largest.append(mode.elements)
    assert largest[0] == largest[1] == 64 * 64


def test_an_error_in_the_block_is_passed_on_with_what_was_found(tmp_path):
    model, x, path = Wrapped(), torch.randn(1, 2, 40, 32), tmp_path / "policy.json"
    with pytest.raises(KeyError, match="of the pipeline"):
        with diagnosing(model, recipes="sage1", path=path) as found:
            model(x, torch.tensor(0))
            raise KeyError("of the pipeline")
    assert len(found.rows) == 2 and not path.exists() and "_compiled_call_impl" not in vars(model)
    with pytest.raises(KeyError, match="of the pipeline"):
        with diagnosing(model) as found:
            raise KeyError("of the pipeline")
    assert "has failed before a call" in str(found)
    assert not torch._dynamo.eval_frame.cached_backends
    assert torch._dynamo.eval_frame._stance.stance == "default"
    with diagnosing(model, recipes="sage1", path=path):
        model(x, torch.tensor(0))
    assert Policy.load(path).rules


def test_mistakes_around_a_block_are_told():
    model, x = Wrapped(), torch.randn(1, 2, 40, 32)
    args = x, torch.tensor(0)
    with pytest.raises(ValueError, match="diagnosing: the block must call the model, .*Wrapped"):
        with diagnosing(model):
            model.forward(*args)
    with pytest.raises(ValueError, match="diagnosing: the model must make an attention call, none"):
        with diagnosing(linear := nn.Linear(32, 32)):
            linear(x)
    is_open = ": a block of diagnosing is open that measures"
    for inner in (model, model.block, nn.Sequential(model), torch.compile(model)):
        with diagnosing(model, recipes="sage1") as found:
            with pytest.raises(RuntimeError, match=f"diagnosing{is_open}"):
                diagnosing(inner).__enter__()
            with pytest.raises(RuntimeError, match=f"diagnose{is_open}"):
                diagnose(inner)(*args)
            model(*args)
        assert len(found.rows) == 2
    must = "diagnosing: model must be an nn.Module that the block"
    for wrong in (sdpa, SimpleNamespace(transformer=model), None):
        with pytest.raises(TypeError, match=must):
            diagnosing(wrong).__enter__()
    for wrong in (0, -1, 1.5, "2", None):
        with pytest.raises(ValueError, match="diagnosing: every must be a number of calls from 1"):
            diagnosing(model, every=wrong).__enter__()
    with pytest.raises(ValueError, match="diagnosing: recipes must be of .*did you mean 'sage1'"):
        diagnosing(model, recipes="sage1x").__enter__()


def test_two_models_of_a_pipeline_are_measured_in_one_block():
    one, two, x = Wrapped(), Wrapped(hard=9), torch.randn(1, 2, 40, 32)
    with diagnosing(one) as first, diagnosing(two) as second:
        for i in range(2):
            one(x, torch.tensor(i))
            two(x, torch.tensor(i))
    assert first.suggested == {"block": "auto"} != second.suggested
    assert len(first.rows) == len(second.rows) == len(NAMED) + 1


# -- what time it takes ----


def of_one_batch(q, k, v):
    """All batches share k and v, and q is in [B, N, H, D] order."""
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    return sdpa(q, *(x[:1].expand(q.shape[0], -1, -1, -1) for x in (k, v)))


TIMED = {  # function, sizes of k and v, what is asked of the table
    "full": (sdpa, (4, 256, 64), [("full", (2, 4, 4, 300, 256, None, None))]),
    "gqa": (lambda q, k, v: sdpa(q, k, v, enable_gqa=True), (2, 300, 64), [("full", (2, 4, 2, 300, 300, None, None))]),
    "causal": (lambda q, k, v: sdpa(q, k, v, is_causal=True), (4, 300, 64), [("causal", (2, 4, 4, 300, 300, None, 0))]),
    "lower right": (lower_right, (4, 310, 64), [("causal", (2, 4, 4, 300, 310, None, 10))]),
    "keys": (lambda q, k, v: sdpa(q, k, v, padding(300, 300)), (4, 300, 64), [("keys", (2, 4, 4, 300, 300, None, None))]),
    "mask": (rows_that_see_nothing, (4, 300, 64), [("mask", (2, 4, 4, 300, 300, None, None))]),
    "shared": (of_one_batch, (4, 300, 64), [("full", (2, 4, 4, 300, 300, None, None), True)]),
    "short": (sdpa, (4, 255, 64), []),
}  # fmt: skip


@pytest.mark.parametrize("case", TIMED)
def test_times_are_predicted_for_each_kind_of_call(case, monkeypatch):
    function, (H_kv, N_kv, D_v), expected = TIMED[case]
    asked, error = [], measure.Error(4)
    error.add(*torch.ones(2, 2, 4, 300, 64))
    found = dict.fromkeys(("sdpa", "sage2-8b-per-token"), error)

    def with_times(gpu, *_):
        return SimpleNamespace(predict=lambda *given: asked.append((gpu, *given)))

    monkeypatch.setattr(tables, "with_times", with_times)
    monkeypatch.setattr(measure, "errors_of", lambda *given: found)
    q, k, v = torch.randn(2, 4, 300, 64), *(torch.randn(2, H_kv, N_kv, D) for D in (64, D_v))
    diagnose(function, recipes="sage2-8b-per-token")(q, k, v)
    assert asked == [
        ("NVIDIA H200", Family(64, 64, kind), "sage2-8b-per-token", Sizes(*sizes), any(stacked))
        for kind, sizes, *stacked in expected
    ]


def test_times_of_all_runs_are_predicted_by_the_table_and_told(tmp_path):
    """A row has those of one run."""
    q, k, v = (torch.randn(1, 4, 320, 64) for _ in range(3))
    model, names = Called(), [*auto_recipes(None, 64), "sage1"]
    with diagnosing(model, recipes=names) as found:
        for _ in range(3):
            model(q, k, v)
    family, sizes = Family(64, 64, "full"), Sizes(1, 4, 4, 320, 320)
    of = {name: tables.with_times(tables.H200, family, name) for name in names}
    one = {name: table and table.predict(family, name, sizes) for name, table in of.items()}
    assert one["sage1"] is None  # no table has it
    assert {row.recipe: row.predicted for row in found.rows} == one | {"sdpa": None}
    worst = {row.recipe: row.relative_l1 for row in found.rows}
    for name in names[:2]:
        of_name = worst[name], 3 * one[name].ours, 3 * one[name].sdpa
        assert found.totals[name] == pytest.approx(of_name)
    assert found.totals["sage1"] == (worst["sage1"], 0, 0)
    assert found.suggested == {"": "auto"}
    ms = 3 * one[names[0]].sdpa  # not faster, so that the policy leaves the call as it is
    assert not one[names[0]].wins and found.totals["sdpa"] == pytest.approx((worst["sdpa"], ms, ms))
    error = max(worst[name] for name in names[:2])
    assert found.totals["the policy"] == pytest.approx((error, ms, ms))
    told = f"{ms:.3g} ms with the policy and {ms:.3g} ms with SDPA (predicted from times of NVIDIA H200)"
    assert told in str(found)
    found.to_html(tmp_path / "found.html")
    text = (tmp_path / "found.html").read_text(encoding="utf-8")
    assert told in text and told in found._repr_html_()
    (line,) = re.findall("<tr><td>sage2-8b</td>.*?</tr>", text)
    error, ours, sdpas = (f"{x:.4g}" for x in found.totals["sage2-8b"])
    cells = re.findall("<td.*?>(.*?)</td>", line)
    assert cells[:5] == ["sage2-8b", error, "1 of 1", ours, sdpas] and float(cells[5]) < 0
    row = '<tr><td>sage1</td>.*"number">.*?</td><td>1 of 1</td>(<td></td>){3}</tr>'
    assert re.search(row, text)


def test_a_policy_takes_the_time_of_what_it_takes():
    """Of four calls: auto's first is the fastest; sage1 is no faster; of sage3 no time is known; the
    last is off. A fifth has no times at all."""

    def call(module, times):
        times = {name: Prediction(name, *ms, 0.0) for name, ms in times.items()}
        errors = {"sdpa": 0.001, first: 0.02, second: 0.03, "sage1": 0.01, "sage3": 0.2}
        return SimpleNamespace(
            site=SimpleNamespace(module=module), autos=AUTOS,
            times=dict.fromkeys(stages, times) if times else {},
            errors=dict.fromkeys(stages, errors),
        )  # fmt: skip

    (first, second), stages = AUTOS, (None, "edge")
    times = {first: (2.0, 10.0), second: (3.0, 10.0), "sage1": (10.0, 10.0)}
    calls = [call(name, times) for name in ("fast", "slow", "unknown", "off")] + [call("none", {})]
    usual = {"fast": "auto", "slow": "sage1", "unknown": "sage3", "off": "off", "none": "auto"}
    found = suggest.totals(calls, {None: usual, "edge": usual | {"off": second}}, {})
    assert found["the policy"] == (0.2, 2 + 10 + 10 + 10 + 2 + 10 + 10 + 3, 80.0)
    found = suggest.totals(calls[:2], {None: usual, "edge": usual | {"slow": "off"}}, {})
    assert found["the policy"] == (0.03, 2 + 10 + 2 + 10, 40.0)
    assert found[first] == (0.02, 8.0, 40.0) and found["sage1"] == (0.01, 40.0, 40.0)
    assert found["sdpa"] == (0.001, 40.0, 40.0) and found["sage3"] == (0.2, 0.0, 0.0)


# -- what is not ----


def test_a_path_that_cannot_be_written_is_found_before_the_model_runs(tmp_path):
    ran, q = [], torch.randn(1, 2, 8, 16)

    def model(q):
        ran.append(1)
        return sdpa(q, q, q)

    for wrong in (tmp_path / "missing" / "policy.json", tmp_path):
        with pytest.raises(OSError, match=re.escape(str(wrong))):
            diagnose(model, path=wrong)(q)
    assert not ran
    with pytest.raises(ValueError, match="must make an attention call"):
        diagnose(nn.Linear(16, 16), path=tmp_path / "policy.json")(q)
    assert not list(tmp_path.iterdir()), "no empty policy is left"


@pytest.mark.parametrize("has_tqdm", [True, False], ids=["tqdm", "plain"])
def test_a_measurement_that_takes_long_shows_where_it_is(has_tqdm, capfd, monkeypatch):
    if not has_tqdm:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    model, x = Transformer(sdpa, sdpa), torch.randn(1, 20, 64)
    monkeypatch.setattr(measure, "QUIET_S", 600.0)
    diagnose(model, recipes="sage1")(x)
    assert capfd.readouterr().err == ""
    errors = measure.errors_of
    monkeypatch.setattr(measure, "errors_of", lambda *args: time.sleep(0.1) or errors(*args))
    monkeypatch.setattr(measure, "QUIET_S", 0.01)
    diagnose(model, recipes="sage1")(x)
    err = capfd.readouterr().err
    assert ("| 2/2 [" if has_tqdm else "diagnose: 2 of 2 calls measured\n") in err, err


def test_when_the_model_raises_the_bar_is_closed_and_dynamo_is_reset(monkeypatch):
    bars = []

    class Bar(tqdm.tqdm):
        def __init__(self, **given):
            super().__init__(**given)
            bars.append(self)

    def model(q, fails):
        q = sdpa(q, q, q)
        torch._dynamo.graph_break()
        if fails:
            raise RuntimeError("in the model")
        return q

    monkeypatch.setattr(tqdm, "tqdm", Bar)
    q = torch.randn(1, 2, 8, 16)
    diagnose(model)(q, False)
    with pytest.raises(RuntimeError, match="in the model"):
        diagnose(model)(q, True)
    assert [bar.disable for bar in bars] == [True, True]  # what closing does
    assert torch.is_grad_enabled() and not torch._dynamo.eval_frame.cached_backends


def test_mistakes_are_refused():
    for wrong in (["sage4"], [], ["sage1", "auto"], "sage4"):  # before the model is given anything
        with pytest.raises(ValueError, match="recipes must be of .*'sage2-8b'.*got"):
            diagnose(sdpa, recipes=wrong)
    for wrong in (0, -1, 1, math.nan, math.inf):
        with pytest.raises(ValueError, match="tolerance must be a fraction, as 0.05 for 5 %, got"):
            diagnose(sdpa, tolerance=wrong)
    for wrong in (0.3, {"top_k": 0.3}, "0.3"):
        with pytest.raises(ValueError, match="keep must be a list of what .*, got .*0.3"):
            diagnose(sdpa, recipes="sage2-8b", keep=wrong)


def test_the_model_and_dynamo_are_left_as_they_were():
    model, x = Transformer(sdpa, with_an_outlier_channel), torch.randn(1, 30, 64)
    called = []
    model.layers[0].register_forward_hook(lambda *args: called.append(torch.is_grad_enabled()))
    model.layers[1].eval()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    hooks, modes = len(model.layers[0]._forward_hooks), [m.training for m in model.modules()]
    expected = model(x)
    called.clear()
    found = diagnose(model)(x)
    assert called == [False], "one run, without gradients"
    assert len(found.rows) == 2 * (len(NAMED) + 1) and torch.is_grad_enabled()
    assert [m.training for m in model.modules()] == modes
    assert len(model.layers[0]._forward_hooks) == hooks
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert torch.equal(model(x), expected) and len(sage_inductor.report()) == 0
    compiled = torch.compile(model, backend="eager")  # no probe is left in what Dynamo remembers
    assert torch.equal(compiled(x), expected)


def by_lists(q, k, v):
    lists = support.block_lists(1, 1, 256, 256, 64, 64, 0.5, unread=0)
    blocks = BlockMask.from_kv_blocks(*lists[:4], BLOCK_SIZE=64, seq_lengths=(256, 256))
    return flex_attention(q, k, v, block_mask=blocks)


def with_a_sink(q, k, v):
    return torch.cat([q @ k.mT, q[..., :1]], -1).softmax(-1)[..., :-1] @ v


def with_dropout(q, k, v):
    return sdpa(q, k, v) + sdpa(q, k, v, dropout_p=0.5)


def in_a_branch(q, k, v):
    return torch.cond(q.sum() > 1e9, lambda q: sdpa(q, q, q), lambda q: q + 0, (q,))


NO_EXACT = "was not run: diagnose knows no exact attention"


@pytest.mark.parametrize(
    "attend, rows, reason",
    [(by_lists, 0, f"{NO_EXACT} by block lists"), (with_a_sink, 0, f"{NO_EXACT} with a learned sink"),
     (with_dropout, 2, "dropout_p must be 0, got 0.5"), (in_a_branch, 0, "was not run with these inputs")],
)  # fmt: skip
def test_calls_that_cannot_be_measured_are_listed_with_the_reason(attend, rows, reason):
    found = diagnose(attend, recipes="sage2-8b")(*support.random_qkv(1, 2, N=256))
    assert [site.reason for site in found.unmeasured] == [reason]
    assert len(found.rows) == rows and reason in str(found)
    assert rows or (found.policy == Policy() and not found.suggested)
