"""Policies: which rule fits which attention call, what a file may say, where its path comes from, and
that no cache outlives a change of the file."""

import functools
import json
import os
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from support import config_anew, run_seen

import sage_inductor
from sage_inductor import Policy, SageOptionError, config, patterns
from sage_inductor.choose.decide import decide, rewrite
from sage_inductor.inductor_pass import SagePass
from sage_inductor.ops.recipe import NAMED
from sage_inductor.ops.sparse.selector import Selection
from sage_inductor.options import Settings
from sage_inductor.policy import Rule, layer_of, unmatched

EMULATE = {"sage.emulate": True}


pytestmark = pytest.mark.usefixtures("graphs_run_op_by_op")


class Attend(torch.nn.Module):
    def forward(self, q, k):
        return F.scaled_dot_product_attention(q, k, k)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.cross = Attend(), Attend()

    def forward(self, x, context):
        return self.cross(self.attn(x, x), context)


class Model(torch.nn.Module):
    """Attention calls by layers.0.attn, layers.0.cross, ..., pool, and one that no module makes."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(3))
        self.pool = Attend()

    def forward(self, x, context):
        for layer in self.layers:
            x = layer(x, context)
        narrow = x[..., :16]
        x = torch.cat([narrow, self.pool(x[:, :, :1], x).expand_as(x)], -1)
        return F.scaled_dot_product_attention(x, x, x)


INPUTS = torch.randn(1, 2, 40, 32), torch.randn(1, 2, 7, 32)
MODULES = [f"layers.{i}.{name}" for i in range(3) for name in ("attn", "cross")] + ["pool", ""]
SITES = [(m, 32, 40) for m in MODULES[:6]] + [("pool", 32, 1), ("", 48, 40)]  # and head_dim, N_q


def written(tmp_path, *rules, text=None):
    path = tmp_path / "policy.json"
    path.write_text(text or json.dumps({"version": 1, "rules": rules}))
    return str(path)


def explain(path=None, **options):
    options = EMULATE | {f"sage.{name}": value for name, value in options.items()}
    if path is not None:
        options["sage.policy"] = path
    return sage_inductor.explain(Model(), options=options)(*INPUTS)


def compiled(policy, make=Attend, **given):
    options = EMULATE | {"sage.policy": policy}
    return torch.compile(make(), backend="sage", options=options, **given)


# -- matching ----


@pytest.fixture(scope="module")
def graph():
    graphs = []
    run_seen(Model(), *INPUTS, see=graphs.append)
    return graphs[0]


def fits(rule: Rule, module: str, head_dim: int, length: int) -> bool:
    """What sage_inductor/policy.py says, said again."""
    parts = re.split(r"([*?])", rule.module)
    glob = "".join({"*": ".*", "?": "."}.get(part, re.escape(part)) for part in parts)
    glob = re.sub(r"^\.\*\\\.", r"(.*\\.)?", glob)
    numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", module)
    layers, lengths = (
        range(first or 0, 10**6 if last is None else last + 1)
        for first, last in (rule.layer, rule.length)
    )
    return (
        re.fullmatch(glob, module) is not None
        and (rule.layer == (None, None) or (numbers != [] and int(numbers[0]) in layers))
        and (rule.head_dim == () or head_dim in rule.head_dim)
        and length in lengths
    )


def ranges(*values):
    """Whose ends are of those, or open."""
    bound = st.none() | st.sampled_from(values)
    pairs = st.tuples(bound, bound)
    return pairs.filter(lambda r: None in r or r[0] <= r[1])


rules = st.builds(
    Rule,
    recipe=st.sampled_from(["auto", "off", *NAMED]),
    module=st.sampled_from(["*", *MODULES, "layers.*", "*.cross", "layers.?.attn", "p*l", "*1*", "q"]),
    layer=ranges(0, 1, 2, 3),
    head_dim=st.sampled_from([(), (32,), (48,), (16, 64), (48, 32)]),
    length=ranges(1, 2, 39, 40, 41),
    stage=st.sampled_from([None, "edge", "warm"]),
)  # fmt: skip


@seed(int(os.environ["SEED"]))
@settings(max_examples=60, deadline=None, database=None)
@given(
    policy=st.lists(rules, max_size=4),
    recipe=st.sampled_from(["auto", "off", "sage1"]),
    stage=st.sampled_from([None, "edge"]),
)
def test_the_first_rule_that_fits_decides_and_the_recipe_where_none_does(
    graph, policy, recipe, stage
):
    wanted = Settings(emulate=True, recipe=recipe, policy=tuple(policy), stage=stage)
    asked = functools.partial(decide, settings=wanted)
    sites = patterns.rewrite(graph, asked, put=lambda call, site: None)
    for node in graph.graph.nodes:  # decided, but not for the next example
        node.meta.pop("sage", None)
    assert [(s.module, s.q[3], s.q[2]) for s in sites] == SITES
    for site, where in zip(sites, SITES):
        in_force = [i for i, rule in enumerate(policy, 1) if rule.stage in (None, stage)]
        number = next((i for i in in_force if fits(policy[i - 1], *where)), None)
        asked = recipe if number is None else policy[number - 1].recipe
        assert site.recipe == {"auto": "sage2-8b", "off": None}.get(asked, asked), site
        assert re.findall(r"rule \d+", site.reason) == ([f"rule {number}"] if number else []), site


fraction, tokens = st.sampled_from([0, 0.0, 0.05, 0.1, 0.3, 1, 1.0]), st.integers(0, 300)
size, dense = st.sampled_from([64, 128]), st.tuples(st.integers(-99, -1), st.none())
sizes = st.tuples(*[st.integers(1, 99)] * 3)
cubes = st.sampled_from([(4, 4, 4), (1, 8, 8), (4, 8, 8)])
boxes = st.just({}) | st.fixed_dictionaries({"layout": sizes, "cube": cubes})
tails = st.just({}) | st.fixed_dictionaries(
    {"tail": st.just(True)}, optional={"tail_block": st.sampled_from([32, 64])}
)
of_each = dict(blocks=st.none() | st.tuples(size, size), dense=st.lists(dense).map(tuple))
scores = st.sampled_from(["as_trained", "fp32"])
by_head = st.tuples(*[fraction] * 3)
selections = st.builds(
    lambda of_rule, of_each, box, tail: Selection(**of_rule, **of_each, **box, **tail),
    st.fixed_dictionaries({
        "top_k": fraction | by_head, "top_p": fraction, "similarity": fraction,
        "dense_first": tokens, "dense_last": tokens,
    }).filter(lambda keep: keep["top_k"] not in (0, (0,) * 3) or keep["top_p"])
    | st.fixed_dictionaries(
        {"rule": st.just("sla"), "sparsity": fraction | by_head, "scores": scores}
    )
    | st.fixed_dictionaries({"rule": st.just("sol"), "tau": st.floats(-2, 2) | st.integers(0, 2)})
    | st.fixed_dictionaries({"rule": st.just("error"), "top_k": st.floats(0.01, 1)}),
    st.fixed_dictionaries(of_each), boxes, tails,
) | st.builds(
    lambda mode, prefix, scores, layout, tail: Selection(
        rule="vsa", sparsity=0.9, segments=prefix, mode=mode if prefix else "exempt", scores=scores,
        layout=layout, **tail,
    ),
    st.sampled_from(["exempt", "compete"]), st.sampled_from([(), (128, 0, 256)]), scores,
    st.sampled_from([None, (4, 8, 12)]), tails,
)  # fmt: skip
keeping = st.builds(
    Rule, recipe=st.sampled_from([*NAMED]), layer=ranges(0, 2, 3), keep=st.none() | selections
)


@given(policy=st.lists(rules | keeping, max_size=4), note=st.none() | st.just({"a": ["b\n", 1.5]}))
@seed(int(os.environ["SEED"]))
@settings(max_examples=50, deadline=None, database=None)
def test_what_is_saved_is_loaded(tmp_path_factory, policy, note):
    path = tmp_path_factory.mktemp("saved") / "policy.json"
    Policy(tuple(policy)).save(path, note)
    assert Policy.load(path) == Policy(tuple(policy))
    assert json.loads(path.read_text()).get("note") == note


def test_the_documented_format_is_read(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "guide" / "policy.md").read_text()
    text = re.search(r"```json\n(.*?)```", page, re.S)
    assert Policy.load(written(tmp_path, text=text[1])).rules == (
        Rule("off", module="*.cross_attention"),
        Rule("sage1-per-token", layer=(0, 3), head_dim=(64, 128), length=(4096, None)),
        Rule("sage2-8b", layer=(5, 5), head_dim=(256,)),
        Rule("auto"),
    )


def test_a_policy_does_not_make_a_call_what_it_cannot_be(tmp_path):
    path = written(tmp_path, {"recipe": "sage1"})
    q = torch.randn(1, 2, 8, 16)

    def dropped(q):
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)

    (site,) = sage_inductor.explain(dropped, options={**EMULATE, "sage.policy": path})(q)
    assert not site.rewritten and site.reason == "dropout_p must be 0, got 0.5"
    report = explain(path, emulate=False)
    assert not report.rewritten and "sage.emulate=True" in report[0].reason


@torch.no_grad()
def test_each_side_of_a_length_gets_its_own_graph(tmp_path):
    path = written(tmp_path, {"length": [64, 127], "recipe": "off"}, {"recipe": "sage1"})
    run = compiled(path, dynamic=True)
    for N in (32, 40, 63, 64, 100, 127, 128, 500):
        x = torch.randn(1, 2, N, 16)
        exact = F.scaled_dot_product_attention(x, x, x)
        assert ((run(x, x) - exact).abs().max() < 1e-5) == (64 <= N < 128), N
    assert [s.recipe for s in sage_inductor.report()] == ["sage1", None, "sage1"]


# -- the path of a module ----


class Pipeline:
    """Not a module: it holds one."""

    def __init__(self, model):
        self.parts = {"transformer": model}

    def run(self, *inputs):
        return self.parts["transformer"](*inputs)


class Watching(Model):
    """Its modules are found by a __getattr__ of its own."""

    def __getattr__(self, name):
        return super().__getattr__(name)


WAYS = {
    "itself": lambda model: model,
    "with a __getattr__": lambda model: Watching(),
    "by its forward": lambda model: model.forward,
    "by a function": lambda model: functools.partial(lambda model, *x: model(*x), model),
    "in a closure": lambda model: lambda *inputs: model(*inputs),
    "by an object's method": lambda model: Pipeline(model).run,
    "from a list": lambda model: functools.partial(lambda models, *x: models[0](*x), [model]),
    "within a compiled one": lambda model: torch.compile(model, backend="eager"),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_path_of_a_module_is_the_same_however_it_is_reached(way):
    report = sage_inductor.explain(WAYS[way](Model()))(*INPUTS)
    assert [s.module for s in report] == MODULES


class Hyphens(torch.nn.Module):
    """Names that are no identifiers, in one another and as keys."""

    def __init__(self):
        super().__init__()
        self.add_module("the-layers", torch.nn.Module())
        of_all = getattr(self, "the-layers")
        of_all.add_module("self-attn", Attend())
        of_all.by_name = torch.nn.ModuleDict({"cross attn": Attend(), "0": Attend()})

    def forward(self, x):
        of_all = getattr(self, "the-layers")
        x = getattr(of_all, "self-attn")(x, x)
        return of_all.by_name["0"](of_all.by_name["cross attn"](x, x), x)


def test_a_name_that_is_no_identifier_stays_whole(tmp_path):
    x = torch.randn(1, 2, 80, 16)
    paths = [f"the-layers.{each}" for each in ("self-attn", "by_name.cross attn", "by_name.0")]
    assert set(paths) < {name for name, _ in Hyphens().named_modules()}
    assert [s.module for s in sage_inductor.explain(Hyphens())(x)] == paths
    program = torch.export.export(Hyphens(), (x,))
    policy = written(tmp_path, {"module": "*.self-attn", "recipe": "off"}, {"recipe": "sage1"})
    sage_inductor.rewrite(program, options=EMULATE | {"sage.policy": policy})
    found = {s.module: s.recipe for s in sage_inductor.report()}
    assert found == dict(zip(paths, (None, "sage1", "sage1")))


def test_a_layers_path_is_within_the_model_that_a_function_takes_it_from():
    def second(model, *inputs):
        return model.layers[1](*inputs)

    report = sage_inductor.explain(second)(Model(), *INPUTS)
    assert [s.module for s in report] == ["layers.1.attn", "layers.1.cross"]


def test_one_rule_holds_for_the_whole_model_and_for_layers_compiled_alone():
    policy = [Rule("off", module="*.cross"), Rule("sage1", module="*.attn")]
    options = EMULATE | {"sage.policy": policy}
    whole, regional = Model(), Model()
    torch.compile(whole, backend="sage", options=options)(*INPUTS)
    expected = {s.module: s.recipe for s in sage_inductor.report()}
    assert expected["layers.1.cross"] is None and expected["layers.1.attn"] == "sage1"
    torch._dynamo.reset()
    for layer in regional.layers:
        layer.compile(backend="sage", options=options)
    regional(*INPUTS)
    found = {s.module: s.recipe for s in sage_inductor.report()}
    assert found == {"attn": "sage1", "cross": None}


def test_a_root_call_is_reported_by_what_a_policy_must_say():
    (line,) = [line for line in str(explain()).splitlines() if "48]" in line]
    assert line.split()[0] == '""'
    report = explain([{"module": "", "recipe": "off"}])
    assert [s.module for s in report.refused] == [""]


def warnings(caplog) -> list[str]:
    ours = (r for r in caplog.records if r.name == "sage_inductor")
    return [r.message for r in ours if r.levelname == "WARNING"]


def test_a_rule_that_fits_no_module_is_told_of(caplog):
    policy = [Rule("off", module="L.*.attn"), Rule("off", layer=7), Rule("auto", head_dim=9)]
    line = 'rule 1 of the policy fits no module so far: {"module": "L.*.attn"}; attention is called by '
    report = explain(policy)
    assert f'{line}"", "layers.0.attn", "layers.0.cross", "layers.1.attn", ...' in str(report)
    assert [line.split()[1] for line in warnings(caplog)] == ["1", "2"]
    caplog.clear()
    report = explain([Rule("off", module="*.attn"), Rule("off", module="pool")])
    assert "fits no module" not in str(report) and not warnings(caplog)


def test_rules_for_two_graphs_are_no_misses(caplog):
    """Neither graph has a call that the other's rule names. They come one by one: nobody is warned
    before the report is asked for."""
    policy = [Rule("off", module="layers.0.*"), Rule("sage1", module="pool")]
    model, options = Model(), EMULATE | {"sage.policy": policy}
    torch.compile(lambda x, c: model.layers[0](x, c), backend="sage", options=options)(*INPUTS)
    missing = 'rule 2 of the policy fits no module so far: {"module": "pool"}'
    assert missing in str(sage_inductor.report())
    torch.compile(lambda x, c: model.pool(c, x), backend="sage", options=options)(*INPUTS)
    report = sage_inductor.report()
    assert [s.recipe for s in report] == [None, None, "sage1"]
    assert "fits no module" not in str(report) and not warnings(caplog)


def test_graphs_without_a_path_are_told_of_where_a_rule_names_modules(caplog):
    model = Model()

    def function(x, context):
        x = F.scaled_dot_product_attention(x, x, x)  # by no module
        torch._dynamo.graph_break()
        x = model.layers[0](x, context)
        return F.scaled_dot_product_attention(x, x, x)  # beside calls that have a path

    def told(*rules):
        caplog.clear()
        options = EMULATE | {"sage.policy": [*rules]}
        report = sage_inductor.explain(function, options=options)(*INPUTS)
        assert [site.module for site in report] == ["", "layers.0.attn", "layers.0.cross", ""]
        torch._dynamo.reset()
        torch.compile(function, backend="sage", options=options)(*INPUTS)
        by_report = [line for line in str(sage_inductor.report()).splitlines() if " path" in line]
        assert by_report == [line for line in str(report).splitlines() if " path" in line]
        assert by_report == warnings(caplog)
        return by_report

    (line,) = told(Rule("off", module="*.attn"), Rule("auto", head_dim=9))
    assert line.startswith("no call of graph 0/0 has a module's path: rules that name modules or ")
    assert told(Rule("off", layer=0)) == [line]
    assert told(Rule("off", head_dim=9), Rule("off", module="*")) == []
    many = unmatched((Rule("off", layer=0),), [(f"{i}/0", "") for i in range(6)])
    assert " graph 0/0, 1/0, 2/0, 3/0, ... has " in many[-1]


def test_of_several_numbers_in_a_path_the_first_is_the_layer():
    paths = "blocks.2.1", "blocks.12.attn.0", "h2.attn", ""
    assert [layer_of(path) for path in paths] == [2, 12, None, None]
    assert Rule("off", layer=(2, None)).fits_module("blocks.2.1")
    assert not Rule("off", layer=(None, 1)).fits_module("blocks.2.1")


# -- policies in Python ----


def test_what_is_kept_is_said_in_python_as_in_a_file(tmp_path):
    of_sla = {"rule": "sla", "sparsity": [0.9, 0, 0.85]}
    said = [
        0.3,
        {"top_p": 0.9, "dense_first": 226},
        {"top_k": 0.3, "similarity": 0},
        [0.3, 1],
        of_sla,
    ]
    of_keys = Selection(top_p=0.9, dense_first=226)
    meant = [
        Selection(0.3, similarity=0.1), of_keys, Selection(0.3, 0, 0), Selection((0.3, 1)),
        Selection(rule="sla", sparsity=(0.9, 0, 0.85)),
    ]  # fmt: skip
    rules = [{"recipe": "sage1", "keep": keep} for keep in said]
    for each in said, meant:
        assert [x.keep for x in Policy([Rule("sage1", keep=x) for x in each]).rules] == meant
    assert Policy.load(written(tmp_path, *rules)) == Policy([Rule("sage1", keep=x) for x in meant])
    assert '{"keep": 0.3, "recipe": "sage1"}' in Policy([Rule("sage1", keep=meant[0])]).text()
    with pytest.raises(ValueError, match="beside keep, recipe must be the name of one, got 'auto'"):
        Policy([Rule("auto", keep=0.3)])


RULES_IN_PYTHON = [{"module": "*.cross", "recipe": "off"}, {"layer": 1, "recipe": "sage1"}]
FORMS = {
    "a Policy": Policy([Rule("off", module="*.cross"), Rule("sage1", layer=1)]),
    "rules": [Rule("off", module="*.cross"), Rule("sage1", layer=(1, 1))],
    "a dict": {"version": 1, "rules": RULES_IN_PYTHON, "note": "why"},
    "a list of dicts": RULES_IN_PYTHON,
    "a function": lambda call: (
        "off" if call.module.endswith(".cross") else "sage1" if call.layer == 1 else None
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_policy_is_what_python_says(form):
    expected = ["sage2-8b", None, "sage1", None, "sage2-8b", None, "sage2-8b", "sage2-8b"]
    report = explain(FORMS[form])
    assert [s.recipe for s in report] == expected
    who = "the function" if form == "a function" else "rule 2"
    assert report[2].reason == f"emulated ({who} of the policy)"
    with config.patch(policy=FORMS[form]):
        assert [s.recipe for s in explain()] == expected
    x = torch.randn(1, 2, 8, 16)
    assert not torch.equal(compiled(FORMS[form])(x, x), F.scaled_dot_product_attention(x, x, x))


def test_a_function_is_told_what_a_call_is():
    seen = []
    explain(lambda call: seen.append(call))
    assert [(call.module, call.head_dim, call.length) for call in seen] == SITES
    assert [call.layer for call in seen] == [0, 0, 1, 1, 2, 2, None, None]
    assert [call.length_kv for call in seen[:2]] == [40, 7]
    kinds = {(call.kind, call.dtype, call.device.type) for call in seen}
    assert kinds == {("full", torch.float32, "cpu")}


@torch.no_grad()
def test_what_a_function_asks_of_a_dynamic_length_is_a_guard():
    asked = Settings(emulate=True, policy=lambda call: "off" if call.length >= 64 else "sage1")
    recipes = []

    def backend(gm, _):  # without Inductor, whose warm cache brings back the guards of last time
        recipes.extend(site.recipe for site in rewrite(gm, asked))
        return gm.forward

    run = torch.compile(Attend(), backend=backend, dynamic=True)
    for N in (32, 40, 64, 500, 63):
        x = torch.randn(1, 2, N, 16)
        exact = F.scaled_dot_product_attention(x, x, x)
        assert torch.allclose(run(x, x), exact, atol=1e-5) == (N >= 64), N
    assert recipes == ["sage1", None]


def raises(call):
    raise KeyError(call.module)


@pytest.mark.parametrize(
    "policy, message",
    [
        (Policy, "sage.policy: must be a path, a Policy, a dict, .* got <class"),
        ([{"recipe": "sage4"}], "sage.policy: rule 1: recipe must be one of .* got 'sage4'"),
        ([{"recipe": "off"}, Rule("off", layer=(3, 1))], "rule 2: layer must not be an empty range"),
        ({"rules": []}, "sage.policy: version is missing"),
        ([{"recipe": {1}}], "sage.policy: rule 1: recipe must be one of .* got [{]1}"),
        ([{"recipe": "off", "layer": {1}}], r"rule 1: layer must be .* got \"[{]1}\""),
        (({"recipe": "off", 3: 4},), "sage.policy: rule 1: 3 does not exist"),
        (lambda call: "sage4", "must return None, .* for CallDescription.module='layers.0.* got 'sage4'"),
        (raises, "the function raised KeyError: 'layers.0.attn', for CallDescription"),
    ],
)  # fmt: skip
def test_a_policy_in_python_that_cannot_be_is_refused(policy, message):
    with pytest.raises(SageOptionError, match=message):
        compiled(policy, Model)(*INPUTS)
    with pytest.raises(ValueError, match="Policy: rule 1: must be a Rule, got 3"):
        Policy([3])
    with pytest.raises(ValueError, match="recipe must be one of .* got 'sage4'"):
        Policy([Rule("sage4")])


def test_under_inductor_a_functions_answers_are_asked_for_anew():
    """What it answered last time is no part of any key, so nothing is cached."""
    answers = {"recipe": "sage1"}
    x, outs = torch.randn(1, 2, 64, 64), []
    for recipe in ("sage1", "sage2-8b"):
        answers["recipe"] = recipe
        torch._dynamo.reset()
        answer = lambda call: answers["recipe"]  # noqa: E731
        with config.patch(rewrite_inductor=True, emulate=True, policy=answer):
            assert SagePass().uuid() is None
            outs.append(torch.compile(Attend(), backend="inductor")(x, x))
        assert [s.recipe for s in sage_inductor.report()] == [recipe]
    assert not torch.equal(*outs)


# -- where the path comes from ----


def test_options_before_the_config_before_none(tmp_path):
    off, sage1 = (tmp_path / f"{name}.json" for name in ("off", "sage1"))
    Policy((Rule("off"),)).save(off)
    Policy((Rule("sage1"),)).save(sage1)
    assert {s.recipe for s in explain()} == {"sage2-8b"}
    with config.patch(policy=str(off)):
        assert {s.recipe for s in explain()} == {None}
        assert {s.recipe for s in explain(sage1)} == {"sage1"}
        assert {s.recipe for s in explain("")} == {"sage2-8b"}
        assert {s.recipe for s in explain(policy=None)} == {"sage2-8b"}
    assert config.policy == ""


def test_one_rule_is_a_policy_and_keeps_one_layer_as_a_range_and_one_head_dim_as_a_tuple():
    rule = Rule("off", module="*.cross")
    with config.patch(policy=rule):
        assert [s.recipe for s in explain()] == [s.recipe for s in explain(rule)]
        assert explain()[1].reason == "the policy says off (rule 1)"
    with pytest.raises(ValueError, match="config.policy: .*rule 1: length must be"):
        config.policy = Rule("off", length=5)
    rule = Rule("off", layer=1, head_dim=64)
    assert rule == Rule("off", layer=(1, 1), head_dim=(64,))
    assert rule.fits("a.1.b", 64, lambda n: True) and not rule.fits("a.2.b", 64, lambda n: True)


@pytest.mark.parametrize("recipe", ["sage9", 1, None, ["sage1"]])
def test_a_rule_of_a_recipe_that_does_not_exist_is_refused_where_it_is_made(recipe):
    with pytest.raises(ValueError, match="^Rule: recipe must be one of "):
        Rule(recipe)


def test_a_rule_comes_before_the_recipe_off_and_no_policy_does_not():
    found = explain(Rule("sage1", module="*.cross"), recipe="off")
    assert {s.recipe for s in found} == {"sage1", None}
    with config.patch(policy=Rule("sage1")):
        assert {s.reason for s in explain("", recipe="off")} == {"the recipe is 'off'"}


def test_the_environment_sets_the_policy(tmp_path, monkeypatch):
    path = written(tmp_path, {"recipe": "sage1-per-token"})
    found = config_anew(monkeypatch, POLICY=path)
    with config.patch(policy=found.policy):
        assert found.policy == path and explain()[0].recipe == "sage1-per-token"
        assert explain("")[0].recipe == "sage2-8b"
    (tmp_path / "new").mkdir()  # of a file that was read before, what it said would hold
    path = written(tmp_path / "new", {"recipe": "acurate"})
    with pytest.raises(ValueError, match=re.escape(f"{path}:1: rule 1: recipe must be one of")):
        config_anew(monkeypatch, POLICY=path)


@torch.no_grad()
def test_exported_programs_are_decided_by_their_examples(tmp_path):
    rules = {"layer": 1, "recipe": "off"}, {"length": [40, 40], "recipe": "sage1"}
    path = written(tmp_path, *rules, {"recipe": "sage1-per-token"})
    N = torch.export.Dim("N", min=2, max=100)
    shapes = {"x": {2: N}, "context": None}
    program = torch.export.export(Model(), INPUTS, dynamic_shapes=shapes)
    report = sage_inductor.rewrite(program, options={**EMULATE, "sage.policy": path})
    assert [s.module for s in report] == MODULES
    expected = ["sage1", "sage1", None, None, "sage1", "sage1", "sage1-per-token", "sage1"]
    assert [s.recipe for s in report] == expected
    x = torch.randn(1, 2, 33, 32)  # not a length that the rule names: the graph stays general
    assert program.module()(x, INPUTS[1]).shape == (1, 2, 33, 48)


# -- what a file may say ----

INVALID = {  # text, line, reason
    "nothing": ("", 1, "not JSON: Expecting value"),
    "syntax": ('{"version": 1,\n "rules": [\n  {"recipe": "off",}\n]}', 3, "not JSON: "),
    "not an object": ("\n[]", 2, 'a policy must be {"version": 1, "rules": [...]}'),
    "no version": ('\n{"rules": []}', 2, "version is missing"),
    "version": ('{\n"version": 2, "rules": []}', 2, "version must be 1, got 2"),
    "version's type": ('{"version": true, "rules": []}', 1, "version must be 1, got true"),
    "no rules": ('{"version": 1}', 1, "rules is missing"),
    "rules' type": ('{"version": 1,\n\n"rules": {}}', 3, "rules must be a list, got {}"),
    "key": ('{"version": 1,\n"rule": []}', 2, "rule does not exist: did you mean rules?"),
    "twice": ('{"version": 1, "rules": [],\n"rules": []}', 2, "rules is given 2 times"),
}
ONE = "{} must be a fraction, 0 to 1"
FRACTION = f"{ONE}, or a list of one for each head of q"
AMOUNT = "rule pooled must be given at least one of top_k, top_p, above 0"
RANGES = (
    "dense must be a list of ranges [from, to] of tokens, none of them empty: numbers, below 0 "
    "from the end on, and to may be null"
)


def got(key: str, reason: str, *values: str) -> dict:
    return {f'"{key}": {x}': f"{reason}, got {x}" for x in values}


def kept(key: str, reason: str, *values: str, beside='"top_k": 0.3, ') -> dict:
    return {f'"keep": {{{beside}"{key}": {x}}}': f"{reason}, got {x}" for x in values}


RULES = {  # the rule's second line, reason
    '"modul": "*"': "modul does not exist: did you mean module?",
    '"recipe": "sage1"': "recipe is given 2 times",
    '"module": 3': "module must be a string, got 3",
    **got("layer", "layer must be a number or [from, to], numbers from 0 on or null", '"3"', "-1", "true", "[1, 2, 3]"),
    **got("layer", "layer must not be an empty range", "[4, 3]"),
    **got("head_dim", "head_dim must be a number of 1 to 256, or a list of such", "0", "[]", "[64, 1.5]"),
    **got("length", "length must be [from, to], numbers from 1 on or null", "64", "[0, 64]"),
    **got("length", "length must not be an empty range", "[128, 64]"),
    '"length": [128,\n  64]': "length must not be an empty range, got [128, 64]",
    '"stage": ""': "a stage must have a name that is a string, or be None, got ''",
    **got("keep", AMOUNT, "0", "[0, 0.0]", "{}", '{"similarity": 0.3}'),
    **got("keep", FRACTION.format("top_k"), "1.5", "NaN", "true", "[]", "[0.3, 1.5]", "[[0.3]]"),
    **kept("top_p", ONE.format("top_p"), "-0.1", "[0.1, 0.2]"),
    **kept("dense_first", "dense_first must be a number of tokens", "0.5"),
    **kept("dense_last", "dense_last must be a number of tokens", "-1"),
    **kept("rule", "rule must be one of pooled, sla, vsa, sol, error", '"sea"', '["sla"]', beside=""),
    **got("keep", "rule sla must be given one of top_k, sparsity, above 0", '{"rule": "sla"}',
          '{"rule": "sla", "top_k": 0}', '{"rule": "sla", "top_k": [0, 0]}',
          '{"rule": "sla", "top_k": [0.1, 0], "sparsity": [0, 0]}', '{"rule": "sla", "top_k": 0.1, "sparsity": 0.9}'),
    '"keep": {"rule": "sla", "top_p": 0.9}':
        "rule sla takes top_k, sparsity, scores, dense, blocks, layout, cube, tail, tail_block, got top_p",
    '"keep": {"top_k": 0.3, "scores": "fp32"}':
        "rule pooled takes top_k, top_p, similarity, dense_first, dense_last, dense, blocks, layout, cube, tail, tail_block, got scores",
    **kept("sparsity", FRACTION.format("sparsity"), "1.5", beside='"rule": "sla", '),
    **kept("scores", "scores must be as_trained or fp32", '"bf16"', beside='"rule": "sla", "top_k": 1, '),
    **kept("blocks", "blocks must be [queries, keys], each 64 or 128", "[64, 32]", "64"),
    **kept("dense", RANGES, "[0, 5]", "[[5, 5]]", "[[null, 5]]", "[[-5, -9]]"),
    '"keep": {"rule": "vsa"}': 'rule vsa must be given sparsity, got {"rule": "vsa"}',
    '"keep": {"rule": "vsa", "top_k": 0.1}':
        "rule vsa takes sparsity, scores, segments, mode, dense, blocks, layout, cube, tail, tail_block, got top_k",
    '"keep": {"rule": "sol", "tau": 1, "top_k": 0.1}': "rule sol takes tau, dense, blocks, layout, cube, tail, tail_block, got top_k",
    **kept("tau", "tau must be a number", "NaN", beside='"rule": "sol", '),
    **kept("tail", "tail must be true or false", "1"),
    **kept("tail_block", "tail_block must be of (32, 64)", "16", beside='"top_k": 0.3, "tail": true, '),
    '"keep": {"top_k": 0.3, "tail_block": 32}':
        'tail_block needs a tail, got {"top_k": 0.3, "tail_block": 32}',
    '"keep": {"rule": "vsa", "sparsity": 0.9, "layout": [4, 6, 4]}': "rule vsa must be given a "
        "layout of whole cubes, and of blocks of 64 tokens, as blocks are not padded, got [4, 6, 4]",
    '"keep": {"rule": "vsa", "sparsity": 0.9, "layout": [4, 4, 4], "blocks": [128, 64]}':
        "rule vsa must be given a layout of whole cubes, and of blocks of 128 tokens, as blocks are "
        "not padded, got [4, 4, 4]",
    '"keep": {"rule": "sla", "top_k": 0.1, "layout": [4, 6, 4], "dense": [[0, 9], [3, 5]]}':
        "with a layout dense must be [0, n] and [-n, null], the tokens around the video, got "
        "[[0, 9], [3, 5]]",
    '"keep": {"rule": "vsa", "sparsity": 0.9, "segments": [-1]}':
        "segments must be a list of numbers of tokens, got [-1]",
    '"keep": {"rule": "vsa", "sparsity": 0.9, "segments": [512, 0, 400]}':
        "segments must be multiples of 64 together, as blocks are not padded, got [512, 0, 400]",
    '"keep": {"rule": "vsa", "sparsity": 0.9, "segments": [32, 32], "mode": "compete"}':
        "segments must be multiples of 64, as blocks are not padded, got [32, 32]",
    '"keep": {"rule": "vsa", "sparsity": 0.9, "mode": "compete"}':
        'mode compete is about segments, got {"rule": "vsa", "sparsity": 0.9, "mode": "compete"}',
    '"keep": {"rule": "vsa", "sparsity": 0.9, "segments": [64], "dense": [[0, 9]]}':
        "segments and dense must not both be given, got {",
    '"keep": {"rule": "sla", "topk": 0.3}': "topk does not exist: did you mean top_k?",
    '"keep": {"topk": 0.3}': "topk does not exist: did you mean top_k?",
    '"keep": {"top_k": 0.3, "top_k": 0.4}': "top_k is given 2 times",
}  # fmt: skip
BEFORE = '{"version": 1, "rules": [\n{"recipe": "off", "note": "\\n}]{"},\n{"recipe": "off",\n'
INVALID |= {own: (f"{BEFORE}{own}}}]}}", 4, f"rule 2: {reason}") for own, reason in RULES.items()}
INVALID |= {
    "no recipe": ('{"version": 1, "rules": [\n{"layer": 1}]}', 2, "rule 1: recipe is missing"),
    "a rule's type": ('{"version": 1, "rules": [\n"off"]}', 2, 'rule 1: must be {"recipe": ..., ...}, got "off"'),
    "recipe": ('{"version": 1, "rules": [\n{\n"recipe":\n"sage4"}]}', 4,
               "rule 1: recipe must be one of ('auto', 'off', 'sage1', "),
    "keep with auto": ('{"version": 1, "rules": [{"keep": 0.3,\n"recipe": "auto"}]}', 2,
                       "rule 1: beside keep, recipe must be the name of one, got 'auto'"),
    "recipe's type": ('{"version": 1, "rules": [{"recipe": ["off"]}]}', 1, "rule 1: recipe must be one of"),
}  # fmt: skip


@pytest.mark.parametrize("case", INVALID)
def test_an_invalid_file_is_refused_with_line_and_reason(case, tmp_path):
    text, line, reason = INVALID[case]
    path = tmp_path / "policy.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="^" + re.escape(f"{path}:{line}: {reason}")):
        Policy.load(path)


def test_what_cannot_be_read_is_refused(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(ValueError, match=re.escape(f"{path}: cannot be read: ")):
            Policy.load(path)
    path = tmp_path / "latin1.json"
    path.write_bytes(b'{"version": 1,\n"rules": [], "note": "\xe9t\xe9"}')
    with pytest.raises(ValueError, match=re.escape(f"{path}:2: must be UTF-8")):
        Policy.load(path)


def test_every_way_in_refuses_an_invalid_file(tmp_path):
    path = written(tmp_path, {"recipe": "sage1", "heads": 3})
    message = re.escape(f"{path}:1: rule 1: heads does not exist: did you mean head_dim?")
    q = torch.randn(1, 2, 8, 16)
    with pytest.raises(SageOptionError, match=message):
        torch.compile(Attend(), backend="sage", options={"sage.policy": path})(q, q)
    with pytest.raises(SageOptionError, match=message):
        explain(path)
    with pytest.raises(ValueError, match=message):
        config.policy = path
    with pytest.raises(SageOptionError, match="sage.policy: must be a path, a Policy, .*, got 3"):
        explain(3)
    assert config.policy == ""


@torch.no_grad()
def test_a_running_service_keeps_its_policy(tmp_path, monkeypatch, caplog):
    """Whatever becomes of the file and of the folder that the process is in."""
    path = written(tmp_path, {"recipe": "sage1"})
    (tmp_path / "elsewhere").mkdir()
    written(tmp_path / "elsewhere", {"recipe": "off"})
    monkeypatch.chdir(tmp_path)
    with config.patch(policy="policy.json", emulate=True):
        by_option = compiled("policy.json", dynamic=False)
        by_config = torch.compile(Attend(), backend="sage", dynamic=False)
        for i, change in enumerate((None, "{", None, "gone")):
            if change is not None:
                monkeypatch.chdir(tmp_path / "elsewhere")
                Path(path).unlink() if change == "gone" else Path(path).write_text(change)
                torch._dynamo.reset()
            for N in (8 + i, 28 + i):
                x = torch.randn(1, 2, N, 16)
                by_option(x, x), by_config(x, x)
            recipes = [s.recipe for s in sage_inductor.report()]
            assert recipes and set(recipes) == {"sage1"}
    for reason in (f"{path}:1: not JSON", f"{path}: cannot be read"):
        assert sum(reason in r.message for r in caplog.records) == 1, caplog.text
    assert "stays what this file said before" in caplog.text


@torch.no_grad()
@pytest.mark.parametrize("change", [{"recipe": "sage2-8b"}, None])
def test_graphs_of_a_model_have_one_policy_whatever_becomes_of_the_file(change, tmp_path, caplog):
    path = written(tmp_path, {"recipe": "sage1"})
    with config.patch(policy=path, emulate=True):
        by_option = compiled(path, dynamic=False)
        by_config = torch.compile(Attend(), backend="sage", dynamic=False)
        for N in (8, 9, 10):
            x = torch.randn(1, 2, N, 16)
            by_option(x, x), by_config(x, x)
            written(tmp_path, change) if change else Path(path).unlink(missing_ok=True)
    assert [s.recipe for s in sage_inductor.report()] == ["sage1"] * 6
    (warning,) = warnings(caplog)
    assert warning.startswith(f"{path} has changed: graphs have what it said before")


# -- caches ----


@torch.no_grad()
@pytest.mark.parametrize("same", ["options", "rules"])
def test_options_that_change_are_others_also_in_the_same_dict_or_list(same):
    """Dynamo takes a graph of equal options."""
    x, options, rule = torch.randn(1, 2, 8, 16), {"sage.emulate": True}, {}
    rules = [rule]
    for recipe in ("sage1", "sage2-8b", "sage1"):
        rule["recipe"] = recipe
        options["sage.policy"] = rules if same == "rules" else [dict(rule)]
        given = options if same == "options" else dict(options)
        torch.compile(Attend(), backend="sage", options=given)(x, x)
    assert [site.recipe for site in sage_inductor.report()] == ["sage1", "sage2-8b"]


def test_a_changed_file_is_read_anew_after_a_reset(tmp_path, by_inductor):
    x, outs = torch.randn(1, 2, 64, 64), {}
    f = compiled(written(tmp_path, {"recipe": "sage1"}))
    for recipe in ("sage1", "sage2-8b", "sage1"):
        written(tmp_path, {"recipe": recipe})
        torch._dynamo.reset()
        out = f(x, x)
        assert sage_inductor.report()[0].recipe == recipe
        assert torch.equal(outs.setdefault(recipe, out), out)
    assert not torch.equal(outs["sage1"], outs["sage2-8b"])


def test_under_inductor_the_files_content_is_in_the_key(tmp_path):
    path, ids = written(tmp_path, {"recipe": "sage1"}), []
    for recipe in ("sage1", "sage2-8b", "sage1"):
        written(tmp_path, {"recipe": recipe})
        with config.patch(rewrite_inductor=True, emulate=True, policy=path):
            ids.append(SagePass().uuid())
    assert ids[0] == ids[2] != ids[1]
