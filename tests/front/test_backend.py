"""The front door on CPU: compiled results, options, settings, caches, the report."""

import asyncio
import concurrent.futures
import copy
import functools
import json
import logging
import os
import pydoc
import re
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import support
import torch
import torch.nn.functional as F
from models import Attention
from support import config_anew, cos_sim
from torch._dynamo.utils import counters
from torch._inductor import compile_fx
from torch._inductor.utils import fresh_cache
from torch.testing import assert_close

import sage_inductor
from sage_inductor import SageOptionError, SageRefused, config, inductor_pass, options
from sage_inductor.backend import sage_backend
from sage_inductor.ops import sources
from sage_inductor.options import Settings
from sage_inductor.policy import Rule

EMULATE = {"sage.emulate": True}


def model(layers=2):
    return torch.nn.Sequential(*(Attention(128, 4, is_causal=True) for _ in range(layers)))


def dropped(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)


def close(actual, expected):
    return cos_sim(actual, expected) > 0.999


# -- results ----


def test_training_for_50_steps_follows_inductor():
    x, make = torch.randn(2, 64, 128), functools.partial(model, 1)
    support.check_50_steps(make, x, 1e-3, EMULATE, fullgraph=True)
    assert len(sage_inductor.report().rewritten) == 1


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_autocast_around_and_inside_the_compiled_model(where):
    m, x = model(), torch.randn(2, 50, 128)

    def inside(x):
        with torch.autocast("cpu", torch.bfloat16):
            return m(x)

    f = inside if where == "inside" else m
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=where == "outside"):
        out = torch.compile(f, backend="sage", options=EMULATE, fullgraph=True)(x)
        assert out.dtype == f(x).dtype and close(out.float(), f(x).float())
    assert {s.dtype for s in sage_inductor.report().rewritten} == {"bfloat16"}


# -- options and settings ----


sdpa = F.scaled_dot_product_attention
STAYS = {
    "SDPA": lambda q, k, v, scale: sdpa(q, k, v),
    "scale of the sizes": lambda q, k, v, scale: sdpa(q, k, v, scale=q.shape[-1] ** -0.4),
    "scale that is given": lambda q, k, v, scale: sdpa(q, k, v, scale=scale),
    "few heads of k and v": lambda q, k, v, scale: sdpa(
        q, k[:, :2], v[:, :2], q.mean(-1)[..., None] > 0, enable_gqa=True),
    "by hand": lambda q, k, v, scale: (q @ k.mT * scale / q.shape[-1] ** 0.5).softmax(-1) @ v,
}  # fmt: skip


@pytest.mark.parametrize("name", STAYS)
def test_a_call_that_stays_costs_no_graph(name):
    """Three times random batches, heads, lengths and head_dims, with dynamic=True."""
    sizes = [[int(torch.randint(2, 40, ())) * n for n in (1, 2, 1, 4)] for _ in range(3)]

    def graphs(backend) -> int:
        seen = []

        def counted(gm, inputs):
            seen.append(gm)
            return backend(gm, inputs)

        torch._dynamo.reset()
        compiled = torch.compile(STAYS[name], backend=counted, dynamic=True)
        for shape in sizes:
            compiled(*(torch.randn(shape) for _ in range(3)), shape[3] ** -0.5)
        return len(seen)

    with support.op_by_op():
        ours = graphs(sage_backend)
    assert ours == graphs(lambda gm, _: gm.forward)
    assert not sage_inductor.report().rewritten


@pytest.mark.parametrize("options", [{}, {**EMULATE, "sage.recipe": "off"}])
def test_a_head_dim_may_be_marked_dynamic_where_the_call_stays(options):
    qkv = [torch.randn(1, 2, 8, 16) for _ in range(3)]
    for x in qkv:
        torch._dynamo.mark_dynamic(x, 3)
    with support.op_by_op():
        torch.compile(F.scaled_dot_product_attention, backend="sage", options=options)(*qkv)


def run(options, function=F.scaled_dot_product_attention, backend="sage", **kwargs):
    q, k, v = (torch.randn(1, 2, 16, 64) for _ in range(3))
    return torch.compile(function, backend=backend, options=options, **kwargs)(q, k, v)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"sage.recpie": "sage1"}, r"sage.recpie does not exist: did you mean sage.recipe\? \(got 'sage1'\)"),
        ({"sage.recipe": "sage2"}, r"sage.recipe must be one of .*'sage2-8b'.*, got 'sage2': did you mean 'sage2-8b'"),
        ({"sage.force": "yes"}, "sage.force must be True or False, got 'yes'"),
        ({"sage.emulate": 1}, "sage.emulate must be True or False, got 1"),
        ({"sage.recipe": "SAGE1"}, "did you mean 'sage1'"),
        ({"sage.mode": "max-autotun"}, r"got 'max-autotun': did you mean 'max-autotune'\?"),
        ({"sage.mode": "fast"}, r"sage.mode must be one of \[.*'reduce-overhead'.*\], got 'fast'"),
        ({"recipe": "sage1"}, r'option "recipe" does not exist: did you mean "sage.recipe"\? \(got \'sage1\''),
        ({"sage_force": True}, 'did you mean "sage.force"'),
        ({"epilogue_fusoin": True}, 'did you mean "epilogue_fusion"'),
        ({"sage.training": "fp8"}, "sage.training must be one of .*, got 'fp8': did you mean 'fp8-b"),
        # Nothing is spelled like it.
        ({"sage.recipe": "fast"}, r"got 'fast'\n"),
        ({"sage.recipe": 1}, r"got 1\n"),
        ({"sage.zzz": True}, "sage.zzz does not exist: there are calibrate, emulate, force, "),
        ({"zzz": True}, r'option "zzz" does not exist \(got True'),
    ],
)  # fmt: skip
def test_bad_options_are_value_errors_with_the_nearest_valid_name(options, message):
    with pytest.raises(SageOptionError, match=message) as refused:
        run(options)
    assert isinstance(refused.value, ValueError) and len(str(refused.value)) < 600


def test_unknown_arguments_of_the_backend_are_refused_by_name():
    backend = functools.partial(sage_inductor.sage_backend, recipe="sage1", force=True)
    with pytest.raises(SageOptionError, match="takes mode and options, got force, re"):
        run(None, backend=backend)


def test_a_row_of_the_table_is_an_option_a_setting_and_a_field(monkeypatch):
    monkeypatch.delenv("SAGE_INDUCTOR_CALIBRATE")
    defaults = config_anew(monkeypatch)
    for name, option in (options.OPTIONS | options.SETTINGS).items():
        assert len(option.doc) > 20 and getattr(Settings(), name) in (option.default, ())
        if name in options.SETTINGS:
            assert getattr(defaults, name) == option.default
            with config.patch(name, option.default):
                assert option.default == config.to_dict()[name] == getattr(config, name)
        if name in options.OPTIONS:
            given = "max-autotune-no-cudagraphs" if name == "mode" else option.default
            found = options.split({f"sage.{name}": given})[0]
            assert found == {name: given} and getattr(options.resolve(found), name) in (given, ())
    assert vars(defaults) == {name: x.default for name, x in options.SETTINGS.items()}
    assert {*options.OPTIONS} ^ {*options.SETTINGS} == {"mode", "rewrite_inductor"}


def test_inductor_options_and_modes_work_beside_ours(monkeypatch):
    seen = []
    original = compile_fx.compile_fx

    def spy(gm, inputs, *args, config_patches=None, **kwargs):
        if config_patches:  # not its call of itself
            seen.append(config_patches)
        return original(gm, inputs, *args, config_patches=config_patches, **kwargs)

    monkeypatch.setattr(compile_fx, "compile_fx", spy)
    run({**EMULATE, "epilogue_fusion": False, "sage.mode": "max-autotune-no-cudagraphs"})
    assert seen[0]["epilogue_fusion"] is False and seen[0]["max_autotune"] is True
    torch._dynamo.reset()
    run(None, mode="max-autotune-no-cudagraphs")
    assert seen[1]["max_autotune"] is True


def test_strict_raises_for_a_call_that_stays_sdpa_before_it_is_compiled(monkeypatch):
    strict, compiled = {**EMULATE, "sage.strict": True}, []
    inductor = sage_inductor.backend.InductorWrapper
    original = inductor.__call__
    monkeypatch.setattr(inductor, "__call__", lambda *x: compiled.append(x) or original(*x))
    with pytest.raises(SageRefused, match="1 attention call stays as it was: .*dropout"):
        run(strict, dropped)
    assert not compiled and len(sage_inductor.report().refused) == 1
    run(strict)
    assert compiled


def test_strict_does_not_judge_a_graph_that_dynamo_abandons():
    """A scale that changes is symbolic in a graph that Dynamo traces again, with a number."""

    def attend(q, k, v, scale):
        out = (q @ k.transpose(-1, -2) * scale).softmax(-1) @ v
        return out + F.scaled_dot_product_attention(q, k, v, scale=scale)

    q, k, v = (torch.randn(1, 2, 16, 64) for _ in range(3))
    f = torch.compile(attend, backend="sage", options={**EMULATE, "sage.strict": True})
    for scale in (0.1, 0.2, 0.5):
        f(q, k, v, scale)
    assert [site.rewritten for site in sage_inductor.report()] == [True] * 6


@pytest.mark.parametrize("off", ["recipe", "policy"])
def test_strict_accepts_what_the_user_switched_off(off, tmp_path):
    path = tmp_path / "policy.json"
    sage_inductor.Policy((Rule("off"),)).save(path)
    given = {"recipe": "off", "policy": str(path)}[off]
    run({**EMULATE, "sage.strict": True, f"sage.{off}": given})
    assert len(sage_inductor.report().refused) == 1
    with config.patch(rewrite_inductor=True, emulate=True, strict=True, policy=str(path)):
        torch._dynamo.reset()
        q = torch.randn(1, 2, 16, 64)
        torch.compile(F.scaled_dot_product_attention, backend="inductor")(q, q, q)
    assert len(sage_inductor.report().refused) == 1


def test_a_patch_of_a_bad_value_changes_nothing():
    with pytest.raises(ValueError, match="recipe must be one of"):
        with config.patch(emulate=True, recipe="bogus"):
            pass
    with pytest.raises(TypeError, match="patch takes"):
        config.patch({"emulate": True}, force=True)
    assert not config.emulate and not config.force


def test_config_is_what_options_override():
    with config.patch(emulate=True, recipe="sage1"):
        run({})
        run({"sage.recipe": "sage2-8b"})
    torch._dynamo.reset()
    run({})
    assert config.emulate is False and len(sage_inductor.report().refused) == 1


def test_tools_that_put_values_in_place_for_a_test_put_them_back():
    config.recipe = "sage1"
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(config, "recipe", "sage3")
        off = mock.patch.object(config, "recipe", "off")
        with mock.patch.object(config, "force", True), off:
            assert (config.recipe, config.force) == ("off", True)
        assert (config.recipe, config.force) == ("sage3", False)
    assert config.recipe == "sage1" == copy.deepcopy(config).recipe
    config.recipe = "auto"


def test_config_refuses_unknown_names_and_wrong_types():
    with pytest.raises(AttributeError, match="config.recpie does not exist: did you mean .*recipe"):
        config.recpie = "sage1"
    with pytest.raises(AttributeError, match="config.emulat does not exist: did you .*emulate"):
        config.patch(emulat=True)
    with pytest.raises(ValueError, match="config.force must be True or False, got 'yes'"):
        config.force = "yes"
    with pytest.raises(AttributeError, match="config.mode does not exist: there are calibrate, "):
        config.mode = "default"
    with pytest.raises(AttributeError, match="config.recip does not exist: did you mean .*recipe"):
        _ = config.recip


def test_what_users_type_can_be_listed_and_is_shown_in_few_words():
    listed = dir(config)
    assert {*options.SETTINGS, "patch"} <= {*listed} and not {"os", "Any"} & {*listed}
    assert all(hasattr(config, name) for name in listed)
    assert dir(sage_inductor) == sorted(sage_inductor.__all__)
    with config.patch(recipe="sage1"):
        shown = repr(config)
    assert "\n  recipe = 'sage1'  (default 'auto')\n" in shown and "\n  force = False\n" in shown
    assert repr(sage_inductor.Policy((Rule("off"),))) == "Policy([{'recipe': 'off'}])"
    with sage_inductor.stage(None):
        assert repr(sage_inductor.Schedule(edge=(5, 2))) == "Schedule(edge=(5, 2))"
    model = torch.nn.Linear(1, 1)
    for waiting, name in (
        (sage_inductor.explain(model), "explain(Linear)"),
        (sage_inductor.diagnose(model), "diagnose(Linear)"),
        (sage_inductor.diagnose_training(model, loss=torch.mean), "diagnose_training(Linear)"),
        (sage_inductor.explain(F.relu), "explain(relu)"),
    ):
        shown = f"<function {name}, to be called with the model's arguments"
        assert repr(waiting).startswith(shown)


def test_help_begins_with_what_is_public_and_what_each_setting_means():
    shown = " ".join(pydoc.plain(pydoc.render_doc(sage_inductor)).split())
    public = shown[: shown.index("PACKAGE CONTENTS")]
    names = [name for name in dir(sage_inductor) if name[0] != "_"]
    assert all(re.search(rf"[:,] {name}\b", public) for name in names)
    shown = " ".join(pydoc.plain(pydoc.render_doc(config)).replace("|", " ").split())
    methods = shown.index("Method resolution order")
    places = [shown.index(f" {x.name}: {x.doc} (default: ") for x in options.SETTINGS.values()]
    assert shown.index("class Config") < places[0] and places == sorted(places)
    assert places[-1] < methods


# -- backend="inductor" with the pass ----


class CountingPass(torch._inductor.custom_graph_pass.CustomGraphPass):
    count = 0

    def __call__(self, graph):
        CountingPass.count += 1

    def uuid(self):
        return "counting"


def test_the_pass_rewrites_under_inductor_beside_the_users_pass():
    q, k, v = (torch.randn(1, 2, 16, 64) for _ in range(3))
    f = torch.compile(F.scaled_dot_product_attention, backend="inductor")
    CountingPass.count = 0
    with torch._inductor.config.patch(pre_grad_custom_pass=CountingPass()):
        mine = torch._inductor.config.pre_grad_custom_pass
        with config.patch(rewrite_inductor=True, emulate=True):
            first = f(q, k, v)
            torch._dynamo.reset()
            assert torch.equal(f(q, k, v), first)  # warm cache: the report is filled all the same
            assert len(sage_inductor.report().rewritten) == 1
        assert CountingPass.count >= 2
        assert torch._inductor.config.pre_grad_custom_pass is mine
        torch._dynamo.reset()
        exact = f(q, k, v)
        assert len(sage_inductor.report()) == 0 and not torch.equal(exact, first)
    assert_close(exact, F.scaled_dot_product_attention(q, k, v))


def test_the_pass_puts_inductors_timing_back():
    inductor = torch._inductor.config
    if not hasattr(inductor, "pre_grad_pass_timing"):
        pytest.skip("torch 2.11 has no pre_grad_pass_timing")
    with inductor.patch(pre_grad_pass_timing="late"):
        with config.patch(rewrite_inductor=True), config.patch(rewrite_inductor=True):
            assert inductor.pre_grad_pass_timing == "early"
        assert inductor.pre_grad_pass_timing == "late"
    assert inductor.pre_grad_custom_pass is None


def test_the_pass_with_other_settings_is_not_served_from_the_cache():
    q, k, v = (torch.randn(1, 2, 64, 64) for _ in range(3))
    f = torch.compile(F.scaled_dot_product_attention, backend="inductor")
    outs = {}
    for recipe in ("sage1", "sage2-8b", "sage1"):
        torch._dynamo.reset()
        with config.patch(rewrite_inductor=True, emulate=True, recipe=recipe):
            out = f(q, k, v)
        assert torch.equal(outs.setdefault(recipe, out), out)
    assert not torch.equal(outs["sage1"], outs["sage2-8b"])


def test_sage_backend_beside_the_pass_decides_each_call_once():
    with config.patch(rewrite_inductor=True, emulate=True):
        run({"sage.recipe": "off"})
        assert [s.rewritten for s in sage_inductor.report()] == [False]
        run({})
        assert [s.rewritten for s in sage_inductor.report()] == [False, True]


def in_a_thread(function):
    """What `function` returns in a thread of its own."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_an_assignment_is_every_threads_and_a_patch_is_its_own():
    """torch 2.13 keeps the values of configs for the thread that assigned them."""
    q, k, v = (torch.randn(1, 2, 16, 64) for _ in range(3))
    f = torch.compile(F.scaled_dot_product_attention, backend="inductor")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        try:
            config.rewrite_inductor, config.emulate = True, True
            pool.submit(f, q, k, v).result()
            assert len(sage_inductor.report().rewritten) == 1
        finally:
            config.rewrite_inductor, config.emulate = False, False
        torch._dynamo.reset()
        pool.submit(f, q, k, v).result()  # the thread has met our pass
        assert len(sage_inductor.report()) == 0
    assert torch._inductor.config.pre_grad_custom_pass is None
    assert in_a_thread(lambda: torch._inductor.config.pre_grad_custom_pass) is None


def test_a_patch_is_its_threads_and_its_tasks_and_leaves_nothing_behind():
    @config.patch(recipe="sage2-4b")
    def patched(start):
        start.wait()  # until two threads are in it, by one decorator
        return config.recipe

    async def task(recipe):
        with config.patch(recipe=recipe):
            await asyncio.sleep(0)
            return config.recipe

    async def tasks():
        return await asyncio.gather(task("sage1"), task("sage3"))

    start = threading.Barrier(2)
    with concurrent.futures.ThreadPoolExecutor(2) as pool, config.patch(recipe="sage1"):
        assert [*pool.map(patched, [start, start])] == ["sage2-4b"] * 2
        assert config.recipe == "sage1" and pool.submit(lambda: config.recipe).result() == "auto"
        assert asyncio.run(tasks()) == ["sage1", "sage3"]
        try:
            in_a_thread(lambda: setattr(config, "recipe", "sage3"))
            assert config.recipe == "sage1"
            assert {*pool.map(lambda _: config.recipe, range(9))} == {"sage3"}
            config.recipe = "sage2-8b"  # within the patch: read here, and everybody's from now on
            assert config.recipe == "sage2-8b" == in_a_thread(lambda: config.recipe)
        finally:
            config.recipe = "auto"
    assert config.recipe == "auto"
    with pytest.raises(KeyError), config.patch("recipe", "sage1"):
        raise KeyError
    assert config.recipe == "auto"


def test_the_users_list_of_passes_stays_what_it_is_while_we_are_off():
    mine = [CountingPass(), CountingPass()]
    with torch._inductor.config.patch(pre_grad_custom_pass=mine):
        inductor_pass.install_pass(False)
        assert torch._inductor.config.pre_grad_custom_pass is mine


def test_passes_side_by_side_are_cached_only_if_each_can_be():
    ours, seen = inductor_pass.SagePass(), []
    both = inductor_pass.PassList([CountingPass(), ours])
    assert both.uuid() == ("counting", ours.uuid())
    assert inductor_pass.PassList([seen.append, ours]).uuid() is None
    inductor_pass.PassList([seen.append, seen.append])("graph")
    assert seen == ["graph", "graph"]


def test_the_passes_key_is_of_what_decides_and_of_tuned_tables(tmp_path, monkeypatch):
    """An edit of what only tells what became of calls (doctor) leaves every cache warm."""
    ours = inductor_pass.SagePass()
    own = tmp_path / "sage_inductor" / "inductor_pass.py"
    ours_decide = ["choose/decide.py", "policy.py", "tables/h200.json", "of_tomorrow.py"]
    decides = ["lowering/record.py", "lowering/launcher.h", "ops/training/op.py", "patterns/sdpa.py"]  # fmt: skip
    decides += [f"sage_inductor/{name}" for name in ours_decide]
    tells = [f"sage_inductor/{x}" for x in ("cli/doctor.py", "study/report.py", "__main__.py")]
    for name in decides + tells:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("before")

    def key_after(name: str):
        (tmp_path / name).write_text(f"after {name}")
        inductor_pass.package_hash.cache_clear()
        return ours.uuid()

    monkeypatch.setattr(inductor_pass, "__file__", str(own))
    for room in ("lowering", "ops", "patterns"):
        init = SimpleNamespace(__file__=str(tmp_path / room / "__init__.py"))
        monkeypatch.setattr(inductor_pass, room, init)
    keys = {key_after(name) for name in tells}
    assert len(keys) == 1
    keys |= {key_after(name) for name in decides}
    monkeypatch.setattr(inductor_pass.tables, "in_force", lambda: ("tuned",))
    keys.add(ours.uuid())
    assert len(keys) == 1 + len(decides) + 1
    with config.patch(rewrite_inductor=True):
        assert ours.uuid() not in keys
    monkeypatch.undo()
    inductor_pass.package_hash.cache_clear()


# -- report ----


def test_report_counters_and_log_tell_what_happened(caplog):
    counters.clear()
    with caplog.at_level(logging.INFO, logger="sage_inductor"):
        run(EMULATE, lambda q, k, v: F.scaled_dot_product_attention(q, k, v) + dropped(q, k, v))
    assert counters["sage"] == {"rewritten": 1, "refused": 1}
    report = sage_inductor.report()
    assert len(report) == 2 and len(report.rewritten) == len(report.refused) == 1
    told = "1 of 2 attention calls use sage2-8b; 1 stays: dropout_p must be 0, got 0.5\n"
    assert str(report).startswith(told)
    stays = "scaled_dot_product_attention_1 stays as it was: dropout_p"
    assert any(r.message.startswith(stays) for r in caplog.records)
    one, two = report
    assert isinstance(report[:1], type(report)) and list(report[:1]) == [one]
    assert list(report[::-1]) == [two, one] == list(reversed(report)) and report[-1] is two
    assert report[5:] is not None and len(report[5:]) == 0 and report.index(two) == 1
    assert str(report[:1]).startswith(f"{len(report[:1].rewritten)} of 1 attention calls use ")
    torch._dynamo.reset()
    assert "no attention call was seen" in str(sage_inductor.report())


def test_explain_runs_the_model_and_compiles_nothing():
    compiled_before = counters["inductor"].copy()
    report = sage_inductor.explain(model(), options=EMULATE)(torch.randn(2, 20, 128))
    assert [(s.module, s.recipe) for s in report] == [("0", "sage2-8b"), ("1", "sage2-8b")]
    assert counters["inductor"] == compiled_before and len(sage_inductor.report()) == 0
    with pytest.raises(ValueError, match="sage.recpie does not exist"):
        sage_inductor.explain(model(), options={"sage.recpie": 1})


@pytest.mark.parametrize("compiled_by", ["its method", "torch.compile"])
def test_explain_sees_a_model_that_is_compiled_already(compiled_by):
    compiled = model()
    if compiled_by == "its method":
        compiled.compile(backend="sage")
    else:
        compiled.forward = torch.compile(compiled.forward, backend="sage")
    report = sage_inductor.explain(compiled, options=EMULATE)(torch.randn(2, 20, 128))
    assert [s.recipe for s in report] == ["sage2-8b", "sage2-8b"]


# -- caches, in processes of their own ----

PROGRAM = """
import os, torch, torch.nn.functional as F
from torch._dynamo.utils import counters
import sage_inductor, settings
for calls in {processes}:
    child = os.fork()  # a process of its own, but for what is imported
    if child:
        assert os.waitpid(child, 0)[1] == 0
        continue
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 64, 64) for _ in range(3))
    for options in calls:
        text = options.pop("text", "") if options else ""
        if text:
            open(options["sage.policy"], "w").write(text)
        torch._dynamo.reset()
        counters.clear()
        f = torch.compile(F.scaled_dot_product_attention, backend="sage", options=options)
        out = f(q, k, v)
        exact = F.scaled_dot_product_attention(q, k, v)
        print("hit" if counters["aot_autograd"]["autograd_cache_hit"] else "miss",
              len(sage_inductor.report().rewritten), f"{{(out - exact).abs().max().item():.6f}}",
              flush=True)
    os._exit(0)
"""


def process(program, cache=None, **environment):
    """With what tests/settings.py sets: what is cached is the same without C++ of Inductor's own."""
    of_cache = {"TORCHINDUCTOR_CACHE_DIR": str(cache)} if cache else {}
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, **of_cache, "PYTHONPATH": path, **environment}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout.split()


def test_warm_caches_hit_with_the_same_settings_and_miss_with_others(tmp_path):
    """Of options, and of a policy's file, whatever its note says."""
    file = tmp_path / "policy.json"

    def by_policy(recipe, note):
        """The file says so from then on."""
        rules = [{"recipe": recipe, "note": note}]
        return {"sage.policy": str(file), "text": json.dumps({"version": 1, "rules": rules})}

    sage1 = {"sage.recipe": "sage1"}
    noted, changed = by_policy("sage1-per-token", "says the same"), by_policy("sage2-4b", "")
    processes = [sage1, by_policy("sage1-per-token", "")], [noted, sage1, changed]
    asked = [[{**EMULATE, **each} for each in calls] for calls in processes]
    words = process(PROGRAM.format(processes=asked), tmp_path / "cache")
    *cold, by_file, by_option, new = (words[i : i + 3] for i in range(0, len(words), 3))
    assert [each[:2] for each in cold] == [["miss", "1"]] * 2
    errors = {error for *_, error in cold}
    assert len(errors) == 2
    assert [by_option, by_file] == [["hit", *each[1:]] for each in cold]
    assert new[:2] == ["miss", "1"] and new[2] not in errors


def test_a_graph_that_torch_knows_by_its_source_alone_is_not_taken():
    """It would be that of an earlier process's options, and missing in the report."""

    def attend(x):
        return F.scaled_dot_product_attention(x, x, x)

    patch = torch._dynamo.config.patch(caching_precompile=True)
    with fresh_cache(), patch, torch.no_grad():
        for _process in range(2):
            torch._dynamo.reset()
            torch.compile(attend, backend="sage", options={"sage.recipe": "off"})(torch.ones(3, 4))
            torch.compiler.save_cache_artifacts()
            assert len(sage_inductor.report()) == 1


def test_a_recipes_tag_is_of_every_source_that_says_what_it_means(tmp_path, monkeypatch):
    here, tags = tmp_path / "ops" / "sources.py", set()
    files = "ops/a.py", "ops/nested/b.py", "lowering/c.py", "lowering/nested/d.py", "lowering/e.h"
    for changed in (None, *files):
        if changed:
            (tmp_path / changed).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / changed).write_text(f"# {changed}")
        monkeypatch.setattr(sources, "__file__", str(here))
        tags.add(sources.source_tag.__wrapped__())
    (tmp_path / "patterns").mkdir()
    (tmp_path / "patterns" / "e.py").write_text("# of what is found, not of what it means")
    tags.add(sources.source_tag.__wrapped__())
    assert len(tags) == 6 and all(tag.startswith(sources.__version__ + "+") for tag in tags)


def test_environment_sets_the_config(monkeypatch):
    for recipe, force, expected in (("sage1", "1", ("sage1", True)), ("", "", ("auto", False))):
        again = config_anew(monkeypatch, RECIPE=recipe, FORCE=force)
        assert (again.recipe, again.force) == expected and again.emulate is False
    assert (config.recipe, config.force, config.emulate) == ("auto", False, False)


@pytest.mark.parametrize(
    "variable, value, message",
    [("RECIPE", "sage9", "SAGE_INDUCTOR_RECIPE: recipe must be one of"),
     ("FORCE", "True", "SAGE_INDUCTOR_FORCE must be 1 or 0, got 'True'")],
)  # fmt: skip
def test_what_the_environment_cannot_mean_is_an_error(monkeypatch, variable, value, message):
    with pytest.raises(ValueError, match=message):
        config_anew(monkeypatch, **{variable: value})


def test_a_misspelled_variable_is_warned_of(monkeypatch):
    with pytest.warns(UserWarning) as warned:
        config_anew(monkeypatch, RECIPIE="off", TABLES="/nowhere", STRICT="0")
    (one,) = [str(each.message) for each in warned if "SAGE" in str(each.message)]
    assert one == "SAGE_INDUCTOR_RECIPIE does not exist: did you mean SAGE_INDUCTOR_RECIPE?"


@pytest.mark.sweep
def test_the_environment_rewrites_inductors_graphs_in_every_thread():
    program = PROGRAM.format(processes=[[None]]).replace('backend="sage"', 'backend="inductor"')
    program += "print(sage_inductor.config.recipe, sage_inductor.config.force)"
    call = "thread = threading.Thread(target=lambda: outs.append(f(q, k, v))); thread.start(); "
    call = "import threading; outs = []; " + call + "thread.join(); out = outs[0]"
    program = program.replace("out = f(q, k, v)", call)
    given = dict(REWRITE_INDUCTOR="1", EMULATE="1", RECIPE="sage1", FORCE="")
    out = process(program, **{f"SAGE_INDUCTOR_{name}": value for name, value in given.items()})
    assert out[1] == "1" and float(out[2]) > 1e-4 and out[3:] == ["sage1", "False"]
