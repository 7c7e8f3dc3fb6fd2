"""What a user is told: reports and their pages, warnings, and a remedy for every reason."""

import copy
import dataclasses
import functools
import html.parser
import inspect
import json
import logging
import math
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import support
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import sage_inductor
from sage_inductor import Report, config
from sage_inductor import report as asked_for  # the function: `report` is the module below
from sage_inductor.choose import tables
from sage_inductor.choose.decide import rewrite
from sage_inductor.ops.notes import NOTES, lost
from sage_inductor.options import Settings
from sage_inductor.patterns import Decision, Site, reasons
from sage_inductor.patterns.reasons import CAUSES
from sage_inductor.session import session
from sage_inductor.study import page

report = sys.modules["sage_inductor.study.report"]
ROOT = Path(__file__).parents[2]
EMULATE = {"sage.emulate": True}
sdpa = F.scaled_dot_product_attention

WHAT = "sage2-8b with head_dim 128, B*H=24"
SHORT = reasons.FROM_LENGTH(WHAT, 3072)
UNMEASURED = reasons.NEVER_TUNED(WHAT, "NVIDIA L40S")
OFF, RULE, DROPOUT = reasons.IS_OFF(), reasons.POLICY_OFF("rule 2"), reasons.DROPOUT(0.1)


def site(module="attn", reason=DROPOUT, recipe=None, n=64, device="cuda:0"):
    q = (1, 24, n, 128)
    decision = Decision(recipe, reason)
    return Site(module, "sdpa", "SDPA", q, q, "bfloat16", "none", decision, device)


def layers(count, name="blocks.{}.attn", **given):
    return [site(name.format(i), **given) for i in range(count)]


# -- a reason and its cause ----


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.text)
def test_every_cause_has_a_remedy_and_every_reason_its_fields(cause):
    assert len(cause.remedy) > 20 and cause.remedy[-1] != "."
    fields = len(re.findall(r"{[^}]*}", cause.text))
    given = range(max(fields, *(int(n) + 1 for n in re.findall(r"{(\d)}", cause.short or "")), 0))
    reason = cause(*given)
    assert reason.cause is cause and "{" not in reason.text + reason.short
    assert all(str(n) in reason.text for n in range(fields))
    if given:
        with pytest.raises(IndexError):
            cause(*given[1:])


def test_a_reason_keeps_its_cause_whatever_is_said_besides():
    longer = reasons.FROM_LENGTH("sage2-8b", 5120)
    both = reasons.joined([SHORT, longer]) + " (rule 1 of the policy)"
    assert str(both) == f"{SHORT}; {longer} (rule 1 of the policy)"
    for reason in (both, pickle.loads(pickle.dumps(both)), copy.deepcopy(both)):
        assert reason == both and reason.kind == SHORT.kind
        assert (reason.short, reason.cause) == ("N < 3072", reasons.FROM_LENGTH)
    whole = reasons.DROPOUT(0.1) + " (rule 1 of the policy)"
    assert whole.short == whole.text
    quoted = reasons.UNREADABLE("E", "dropout is active")
    assert quoted.cause is reasons.UNREADABLE


def test_two_causes_are_asked_for_and_one_has_nothing_to_mend():
    on_purpose = [reasons.IS_OFF, reasons.POLICY_OFF, reasons.UNREPEATED]
    assert [each for each in CAUSES if each.requested] == on_purpose


def test_a_call_that_stays_is_no_site_by_a_sentence_that_lost_its_cause():
    for text in (f"{DROPOUT}; more", f"sage: {DROPOUT}", str(DROPOUT)):
        with pytest.raises(TypeError, match="must have a Reason, got '.*dropout_p must be 0"):
            site(reason=text)
    with pytest.raises(TypeError):
        "more; " + DROPOUT
    given = json.loads(json.dumps(Report([("-", site(reason=DROPOUT + "; more"))]).to_dicts()))
    assert (given[0]["reason"], given[0]["remedy"]) == (f"{DROPOUT}; more", DROPOUT.cause.remedy)


# -- what a reset forgets ----


def test_a_reset_forgets_all_that_was_seen_and_all_notes(tmp_path, graphs_run_op_by_op):
    """Every field: a new one fails here until something is put into it."""

    def known() -> dict:
        here = {name: copy.copy(x) for name, x in vars(session()).items()}
        return here | {"seen": here["seen"].graphs, "notes": dict(NOTES)}

    path, x = tmp_path / "policy.json", torch.randn(1, 2, 40, 16)
    sage_inductor.Policy((sage_inductor.Rule("sage1"),)).save(path)
    fresh = known()
    torch.compile(sdpa, backend="sage", options=EMULATE | {"sage.policy": str(path)})(x, x, x)
    with sage_inductor.stage("edge"):
        sage_inductor.attention(x, x, x)
    lost("submitted by Python", "no compiler")
    assert [name for name, value in known().items() if value == fresh[name]] == []
    torch._dynamo.reset()
    assert known() == fresh


# -- the report ----


def twenty_three():
    sites = layers(12, reason="N >= 3072", recipe="sage2-8b", n=4096)
    sites += layers(8, reason=SHORT) + layers(2, "refiner.{}.cross2", reason=SHORT, n=77)
    return Report([("0/0", each) for each in sites] + [("1/0", site("blocks.9.attn", SHORT))])


def test_equal_calls_are_one_row_below_one_line_of_verdict():
    found = twenty_three()
    lines = str(found).splitlines()
    assert lines[0] == found.verdict == "12 of 23 attention calls use sage2-8b; 11 stay: N < 3072"
    rows = [re.split(r"  +", line)[:5] for line in lines[4:7]]
    assert rows == [
        ["0/0", "blocks.*.attn", "x12", "0-11", "SDPA"],
        ["0/0, 1/0", "blocks.*.attn", "x9", "0-7, 9", "SDPA"],
        ["0/0", "refiner.*.cross2", "x2", "0-1", "SDPA"],
    ]
    assert lines[7:] == ["", f"N < 3072: {SHORT.cause.remedy}"]
    assert (
        repr(found) == f"<Report: {found.verdict}>" and str(found[:1]).count("blocks.0.attn") == 1
    )


@pytest.mark.parametrize(
    "places, module, shown",
    [
        ([(0, 0), (0, 1)], "stages.0.blocks.*", "0-1"),
        ([(0, 0), (0, 10), (2, 2)], "stages.*.blocks.*", "0, 2; 0, 2, 10"),
        ([(7, i) for i in (9, 0, 46, 47, 10)], "stages.7.blocks.*", "0, 9-10, 46-47"),
        ([(7, 2 * i) for i in range(9)], "stages.7.blocks.*", "9 of 0-16"),
    ],
)
def test_a_row_says_which_numbers_its_stars_stand_for(places, module, shown):
    sites = [site("stages.{}.blocks.{}".format(*each)) for each in places]
    head, _, row = str(Report([("-", each) for each in sites])).splitlines()[2:5]
    cells = dict(zip(re.split("  +", head), re.split("  +", row)))
    found = cells["module"], cells["count"], cells["numbers"]
    assert found == (module, f"x{len(places)}", shown)


def test_times_that_were_compared_are_columns_of_tables_and_of_dicts(tmp_path):
    sites = layers(3, reason=SHORT)
    decision = sites[0].decision._replace(times=(0.51234, 0.25))
    sites[:2] = [dataclasses.replace(each, decision=decision) for each in sites[:2]]
    found = Report([("-", each) for each in sites])
    head, _, *rows = str(found).splitlines()[2:6]
    assert re.search("  recipe  ms     SDPA's ms  reason$", head)
    assert [re.sub(" +", " ", row).split(" - ")[1] for row in rows] == [
        f"0.512 0.25 {SHORT}", str(SHORT),
    ]  # fmt: skip
    given = [(each["ms"], each["sdpa_ms"]) for each in found.to_dicts()]
    assert given == [(0.51234, 0.25)] * 2 + [(None, None)]
    found.to_html(tmp_path / "report.html")
    parsed = Page((tmp_path / "report.html").read_text())
    times = [row[-3:-1] for row in parsed.rows]
    head, compared, none = ["ms", "SDPA's ms"], ["0.5123", "0.25"], ["", ""]
    assert times == [head, compared, none, head, compared, compared, none]


def test_a_row_of_many_graphs_counts_them_and_nodes_in_reasons_do_not_part_calls():
    used = [reasons.ALSO_USED("weights", f"softmax_{i}", f"mul_{i}") for i in range(5)]
    found = Report([(f"{i}/0", site(f"h.{i}", reason)) for i, reason in enumerate(used)])
    assert re.search(r"^5 graphs  h\.\*     x5 ", str(found), re.M), f"\n{found}"
    assert found.verdict.endswith("; 5 stay: the weights are also used")


def test_verdicts(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        tables, "gpu_name", lambda device: f"NVIDIA {device.type.upper()}{device.index}"
    )
    both = [site(recipe="sage1", reason="forced"), *layers(2, recipe="sage2-8b", reason="forced")]

    def verdict(sites):
        return Report([("-", each) for each in sites]).verdict

    assert verdict(both[:1]) == "1 of 1 attention calls use sage1"
    assert verdict(both) == "3 of 3 attention calls use sage2-8b (2), sage1 (1)"
    short = layers(2, reason=SHORT)
    stay = "0 of 2 attention calls use sage on NVIDIA CUDA0; 2 stay: N < 3072"
    assert verdict(short) == stay
    assert "stay: N < 3072 (2), dropout_p must be 0, got 0.1 (1)" in verdict([*short, site()])
    whole = reasons.SCALED_BY("a tensor")
    assert verdict([site(reason=whole)]).endswith(f"1 stays: {whole}")
    between = [site(reason=reasons.STANDS_BETWEEN(name)) for name in ("clamp", "abs")]
    assert verdict(between).endswith("2 stay: `clamp` stands between the products")
    assert verdict([]).startswith("no attention call was seen")
    off = str(Report([("-", site(reason=RULE))]))
    assert "1 stays: the policy says off" in off and RULE.cause.remedy not in off


def no_attention(x):
    return x + 1


def breaks(x):
    torch._dynamo.graph_break()
    return x + 1


inner = torch.nn.Sequential(torch.compile(torch.nn.ReLU(), backend="sage"), torch.nn.ReLU())


WITHOUT = {
    "nothing was compiled": None,
    "none of 1 compiled graphs has one": (no_attention, "sage"),
    "a graph break leaves what it is about to eager": (breaks, "sage"),
    "1 graphs were compiled, none by sage (an outer torch.compile": (inner, "eager"),
}


@pytest.mark.parametrize("why", WITHOUT)
def test_a_report_without_calls_says_why(why):
    asked_for()
    torch._dynamo.reset()
    with support.op_by_op():
        if WITHOUT[why]:
            function, backend = WITHOUT[why]
            torch.compile(function, backend=backend)(torch.ones(3))
    said = asked_for().verdict
    assert said.startswith("no attention call was seen: ") and why in said
    assert [text for text in WITHOUT if text in said][-1] == why
    if WITHOUT[why] and function is not inner:
        assert why in sage_inductor.explain(function)(torch.ones(3)).verdict


def jagged():
    values, offsets = torch.randn(64, 32), torch.tensor([0, 40, 64])
    return torch.nested.nested_tensor_from_jagged(values, offsets).unflatten(-1, (2, 16))


def of_nested(x):
    q = x.transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q).to_padded_tensor(0.0)


def nested_before_dense(x, dense):
    return of_nested(x), sdpa(dense, dense, dense)


def nested_behind_dense(x, dense):
    out = sdpa(dense, dense, dense)
    return of_nested(x), out


@pytest.mark.parametrize("model", [nested_before_dense, nested_behind_dense])
def test_attention_that_a_graph_break_leaves_to_eager_is_beside_the_other_calls(model):
    """SDPA of nested tensors, at which a graph breaks on a CPU. Where it does not, the call is a
    row: see the next test."""
    inputs = jagged(), torch.randn(1, 2, 32, 16)
    number = inspect.getsourcelines(of_nested)[1] + 2
    told = f"{__file__}:{number} stays in eager: a graph breaks there (Data dependent operator)"
    asked_for()
    torch._dynamo.reset()
    with torch.no_grad(), support.op_by_op():
        out = torch.compile(model, backend="sage", options=EMULATE)(*inputs)
        found = [asked_for(), sage_inductor.explain(model, options=EMULATE)(*inputs)]
    for each in found:
        assert len(each) == len(each.rewritten) == 1
        assert str(each).splitlines()[-1] == f"attention at {told}"
    torch.testing.assert_close(out[0], model(*inputs)[0])
    torch._dynamo.reset()
    assert "eager" not in str(asked_for())


def test_a_graph_break_at_something_else_leaves_no_attention_to_eager():
    torch.compile(sdpa, backend="sage", options=EMULATE)(*torch.randn(3, 1, 2, 16, 64))
    counters["graph_break"]["repr() on nested function with non-constructible closure"] += 1
    assert len(asked_for().rewritten) == 1 and "eager" not in str(asked_for())


def test_nested_tensors_in_a_graph_are_a_row_beside_the_other_calls():
    """As Dynamo captures SDPA of them on a GPU, where no graph breaks."""
    graph = torch.fx.Graph()
    q, dense = graph.placeholder("q"), graph.placeholder("dense")
    for x in (q, dense):
        graph.call_function(sdpa, (x, x, x))
    graph.output(tuple(graph.nodes)[2:])
    with FakeTensorMode(shape_env=ShapeEnv()):
        values = [jagged().transpose(1, 2), torch.empty(1, 2, 32, 16)]
    for node, value in zip(graph.nodes, values * 2, strict=False):
        node.meta["example_value"] = value
    nested, plain = rewrite(torch.fx.GraphModule({}, graph), Settings(emulate=True))
    assert nested.reason == "tensor subclasses are not supported, got NestedTensor"
    assert "to_padded_tensor()" in nested.why.cause.remedy and plain.rewritten


def test_dicts_hold_every_call_and_are_json():
    two = sage_inductor.explain(
        lambda q: sdpa(q, q, q) + sdpa(q, q, q, dropout_p=0.5), options=EMULATE
    )
    found = two(torch.randn(1, 2, 16, 64))
    one, two = json.loads(json.dumps(found.to_dicts()))
    assert one == {
        "graph": "0/0", "module": "", "call": "scaled_dot_product_attention", "spelling": "SDPA",
        "q": [1, 2, 16, 64], "k": [1, 2, 16, 64], "dtype": "float32", "mask": "none", "device": "cpu", "stage": None,
        "recipe": "sage2-8b", "keep": None, "ms": None, "sdpa_ms": None, "reason": "emulated", "remedy": None,
    }  # fmt: skip
    assert two["recipe"] is None and two["remedy"] == reasons.DROPOUT.remedy
    assert [each["graph"] for each in twenty_three().to_dicts()] == ["0/0"] * 22 + ["1/0"]


# -- pages ----


class Page(html.parser.HTMLParser):
    """The texts of a page's cells, in rows, and every tag and attribute."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.tags, self.open = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "rect"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


HOSTILE = 'blocks.0.<script>document.title = "run"</script>&amp;'


def alone(parsed):
    """That a page asks nothing of another file or server."""
    names = {name for _, attributes in parsed.tags for name in attributes}
    assert not names & {"src", "href", "srcset", "data", "action", "onclick"}
    return {tag for tag, _ in parsed.tags}


def test_a_page_shows_every_call_escaped_and_needs_no_other_file(tmp_path):
    quoted = reasons.UNREADABLE("E", 'said "<b>" & dropout is active')
    found = Report([*twenty_three()._sites, ("2/0", site(HOSTILE, reason=quoted))])
    found.to_html(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    parsed = Page(text)
    assert not parsed.open and [tag for tag, _ in parsed.tags].count("script") == 1
    head, *groups = parsed.rows[:5]
    of_call = ["call", "q, k", "dtype", "mask", "recipe", "reason"]
    assert head == ["graph", "module", "count", "numbers", *of_call]
    modules = ", ".join(f"blocks.{i}.attn" for i in range(12))
    assert groups[0][:4] == ["0/0", f"blocks.*.attn{modules}", "x12", "0-11"]
    assert groups[-1][1] == HOSTILE and SHORT.cause.remedy in groups[1][-1]
    head, *rows = parsed.rows[5:]
    assert head == ["graph", "module", *of_call]
    assert len(rows) == 24 and rows[0][:3] == ["0/0", "blocks.0.attn", "SDPA"]
    assert rows[0][-2:] == ["sage2-8b", "N >= 3072"]
    assert rows[-1][1] == HOSTILE and 'said "<b>" & dropout' in rows[-1][-1]
    assert {"details", "summary"} <= alone(parsed) and "http" not in text and "@import" not in text
    assert rows[-2][-1].startswith(f"{SHORT.short}{SHORT}")
    assert SHORT.cause.remedy in rows[-2][-1] and found.verdict in html.unescape(text)


def test_a_page_without_calls_says_why(tmp_path):
    Report([], without="nothing was compiled").to_html(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert "no attention call was seen: nothing was compiled" in text and "<table" not in text


def test_columns_that_say_nothing_are_left_out():
    def columns(*sites, **given):
        graphs = given.get("graphs", ["0/0"] * len(sites))
        return re.split("  +", str(Report(list(zip(graphs, sites)))).splitlines()[2])

    always = ["module", "count", "call", "q, k", "dtype", "mask", "recipe", "reason"]
    one, other = site("a"), site("b")
    assert columns(one, other) == always
    assert columns(one, other, graphs=["0/0", "1/0"]) == ["graph", *always]
    of_other_keys = dataclasses.replace(other, k=(1, 2, 77, 64))
    assert columns(one, of_other_keys) == [*always[:3], "q", "k", *always[4:]]
    staged = dataclasses.replace(other, stage="edge")
    assert columns(one, staged) == [*always[:6], "stage", *always[6:]]


def test_a_notebook_shows_groups_without_a_script():
    parsed = Page(twenty_three()._repr_html_())
    assert [row[2:4] for row in parsed.rows[1:]] == [
        ["x12", "0-11"],
        ["x9", "0-7, 9"],
        ["x2", "0-1"],
    ]
    assert parsed.rows[3][1] == "refiner.*.cross2refiner.0.cross2, refiner.1.cross2"
    assert not parsed.open and "script" not in alone(parsed)
    assert "no attention call was seen" in Report([])._repr_html_()


def luminance(colour: str) -> float:
    """Of WCAG 2, which asks for a contrast of 4.5."""
    named = {"black": [0, 0, 0], "white": [255, 255, 255]}
    parts = named.get(colour) or map(int, re.findall(r"\d+", colour))
    linear = (
        x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4
        for x in (p / 255 for p in parts)
    )
    return sum(weight * x for weight, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def test_a_heat_map_is_white_at_the_middle_red_above_and_black_for_nan():
    """What is on no cell of its own has the page's colours, which may be dark."""
    values = {("a<", "x"): 0.05, ("a<", "y"): 0.5, ("b", "x"): 0.005, ("b", "y"): float("nan")}
    values |= {("a<", "z"): 0.5}
    svg = page.heat_map(["a<", "b", "c"], ["x", "y", "z"], values, 0.05, plain=["z"])
    parsed = Page(svg)
    fills = [attributes["fill"] for tag, attributes in parsed.tags if tag == "rect"]
    legend = ["rgb(110,110,255)", "rgb(255,255,255)", "rgb(255,110,110)", "black"]
    assert fills == [*(legend[i] for i in (1, 2, 0, 3)), *legend]
    assert "<title>a&lt;, x: 0.05</title>" in svg and not parsed.open
    texts = re.findall(r'(?:fill="(\w+)")?>([^<]+)</text>', svg)
    assert texts[:5] == [("", "x"), ("", "y"), ("", "z"), ("", "a&lt;"), ("black", "0.05")]
    assert texts[6] == ("currentColor", "0.5") and 'fill="currentColor" font-family' in svg
    told = ["0.005 or less", "0.05", "0.5 or more", "not a number"]
    assert texts[-4:] == list(zip(["black", "black", "black", "white"], told))
    assert contrast("rgb(64,64,255)", "black") < 4.5 < contrast("white", "black")
    for ratio in (1e-9, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, math.inf, math.nan):
        assert contrast(*page._colours(ratio)) > 4.5


def in_chromium(path, script):
    """What `script`, run at the end of a page, puts into `told`."""
    chromium = shutil.which("chromium")
    assert chromium, "needs chromium: without it, pytest -m 'not browser'"
    told = 'document.body.textContent = "TOLD" + JSON.stringify(told) + "TOLD"'
    script = f"<script>const told = {{}};{script};{told}</script></body>"
    tried = path.with_suffix(".tried.html")
    tried.write_text(path.read_text().replace("</body>", script))
    result = subprocess.run(
        [chromium, "--headless", "--no-sandbox", "--disable-gpu",
         f"--user-data-dir={path.parent}", "--virtual-time-budget=2000", "--dump-dom", tried.as_uri()],
        capture_output=True, text=True, timeout=600, check=True,
    )  # fmt: skip
    return json.loads(html.unescape(result.stdout.split("TOLD")[1]))


SORT_AND_FILTER = """
const [graph, module, error] = document.querySelectorAll("th"), fold = document.querySelector("details");
const rows = document.querySelector("tbody").rows, filter = document.querySelector("input");
const shown = () => [...rows].filter(row => row.checkVisibility()).map(row => row.cells[1].textContent);
error.click(); told.up = shown(); error.click(); told.down = shown(); module.click(); told.byname = shown();
for (const text of ["layers.*.cross", "LAYERS.1", "a+b", ""]) {
  filter.value = text; filter.dispatchEvent(new Event("input")); told[text] = shown();
}
told.folded = fold.innerText; fold.open = true; told.opened = fold.innerText
"""


@pytest.mark.browser
def test_in_a_browser_a_page_sorts_filters_and_unfolds(tmp_path):
    names = ["layers.10.attn", "layers.2.cross", "layers.1.cross", "a+b", "last"]
    errors = [1e-7, float("nan"), 0.5, 12.0, 0.02]
    fold = page.Folded("in short", "at <length>", "in short: at <length>")
    rows = [(f"{i}/0", *each, fold) for i, each in enumerate(zip(names, errors))]
    path = tmp_path / "page.html"
    table = page.Table(("graph", "module", "error", "reason"), rows)
    page.write(path, "t", table.html())
    told = in_chromium(path, SORT_AND_FILTER)
    up = ["layers.10.attn", "last", "layers.1.cross", "a+b", "layers.2.cross"]
    assert told.pop("up") == up and told.pop("down") == up[::-1]
    byname = ["a+b", "last", "layers.1.cross", "layers.2.cross", "layers.10.attn"]
    assert told.pop("byname") == byname == told.pop("")
    assert told.pop("folded").strip() == "in short" and "at <length>" in told.pop("opened")
    assert told == {
        "layers.*.cross": ["layers.1.cross", "layers.2.cross"],
        "LAYERS.1": ["layers.1.cross", "layers.10.attn"],
        "a+b": ["a+b"],
    }


LOOK = """
told.title = document.title; told.rows = document.querySelectorAll("tbody tr").length;
told.scripts = document.scripts.length; told.last = [...document.querySelectorAll("tbody tr")].at(-1).cells[1].textContent;
told.map = document.querySelector("svg")?.getBoundingClientRect().height ?? 0;
const lines = cell => { const all = new Range(); all.selectNodeContents(cell); return all.getClientRects().length };
told.lines = Math.max(...[...document.querySelectorAll("td:not(:has(details))")].map(lines))
"""


@pytest.mark.browser
def test_in_a_browser_reports_and_diagnoses_are_whole_and_run_nothing_of_a_models(tmp_path):
    Report([*twenty_three()._sites, ("2/0", site(HOSTILE))]).to_html(tmp_path / "report.html")
    told = in_chromium(tmp_path / "report.html", LOOK)
    numbers = {"rows": 4 + 24, "scripts": 2, "map": 0, "lines": 1}
    assert told == {"title": "sage_inductor: attention calls", "last": HOSTILE, **numbers}
    study = sage_inductor.diagnose(lambda q: sdpa(q, q, q), recipes="sage1")
    found = study(torch.randn(1, 1, 8, 16))
    found.to_html(tmp_path / "found.html")
    told = in_chromium(tmp_path / "found.html", LOOK)
    assert told["rows"] == 2 + 3 and told["map"] == 80 and "accuracy" in told["title"]


# -- warnings ----


@pytest.fixture
def warnings(caplog, monkeypatch):
    """What a process that nothing was told yet warns of."""
    monkeypatch.setattr(report, "_warned_of", set())
    caplog.set_level(logging.WARNING, logger="sage_inductor")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "sage_inductor"]


def test_calls_that_all_stay_are_warned_of_once_for_each_cause(warnings, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tables, "gpu_name", lambda device: "NVIDIA L40S")
    report.record(layers(57, reason=UNMEASURED))
    assert warnings() == [
        "sage_inductor: 0 of 57 attention calls use sage on NVIDIA L40S: nothing was measured there; "
        "run `python -m sage_inductor tune`, leave sage.calibrate on, or set options={'sage.force': True}"
    ]
    report.record(layers(3, reason=reasons.NEVER_TUNED("sage1", "NVIDIA L40S")))
    torch._dynamo.reset()
    report.record(layers(3, reason=UNMEASURED))
    assert len(warnings()) == 1
    report.record([site()])
    assert warnings()[1:] == [
        "sage_inductor: 0 of 4 attention calls use sage on NVIDIA L40S: dropout_p must be 0, got 0.1 (1 call); "
        "call model.eval(), or set its dropout to 0"
    ]
    torch._dynamo.reset()
    alike = reasons.KEEP_SELF(8, 9), reasons.KEEP_UNMASKED("causal")  # what to do is the same
    report.record([site(reason=reason) for reason in alike])
    assert len(warnings()) == 3 and "NVIDIA L40S: keep is not for this call; give" in warnings()[2]


def test_what_the_user_asked_for_and_a_process_with_rewritten_calls_are_not_warned_of(warnings):
    report.record([site(reason=OFF), site(reason=RULE)])
    report.record([site(recipe="sage1", reason="forced"), site()])
    report.record([site(reason=UNMEASURED)])
    assert warnings() == []


def test_a_graph_that_breaks_off_is_judged_with_what_follows(warnings):
    def model(q, dropout_p):
        q = sdpa(q, q, q, dropout_p=0.5)
        torch._dynamo.graph_break()
        return sdpa(q, q, q, dropout_p=dropout_p)

    q = torch.randn(1, 2, 16, 64)
    for backend, enabled in (("sage", False), ("inductor", True)):
        with config.patch(rewrite_inductor=enabled, emulate=True):
            for dropout_p, expected in ((0.0, 0), (0.5, 1)):
                torch._dynamo.reset()
                report._warned_of.clear()
                before = len(warnings())
                torch.compile(functools.partial(model, dropout_p=dropout_p), backend=backend)(q)
                assert len(asked_for()) == 2 and len(warnings()) - before == expected
    assert all("0 of 2 attention calls" in text for text in warnings())


@pytest.mark.parametrize(
    "after",
    [pytest.param("", id="at once", marks=pytest.mark.sweep),
     pytest.param("; torch._dynamo.graph_break()", id="at exit")],
)  # fmt: skip
def test_with_no_logging_set_up_a_warning_is_seen(after):
    """An attention after which nothing is compiled is warned of when the process ends."""
    code = f"""
import torch, torch.nn.functional as F
from sage_inductor.ops.compat import InductorWrapper
InductorWrapper.__call__ = lambda self, gm, _: gm.forward  # compiles no C++
def model(q):
    out = F.scaled_dot_product_attention(q, q, q, dropout_p=0.5){after}
    return out
torch.compile(model, backend="sage", options={{"sage.emulate": True}})(torch.randn(1, 2, 16, 64))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    # A torch built for CUDA has a word of its own where there is none (2.15).
    lines = [x for x in result.stderr.splitlines() if "No CUDA runtime is found" not in x]
    assert result.returncode == 0 and len(lines) == 1, result.stderr
    assert lines[0].startswith("sage_inductor: 0 of 1 attention calls use sage on CPU: dropout_p")


def test_torch_logs_of_our_name_say_each_call_and_its_graph_once():
    code = "import torch; f = torch.nn.functional.scaled_dot_product_attention; q = torch.randn(1, 2, 16, 64); "
    code += "from sage_inductor.ops.compat import InductorWrapper as W; W.__call__ = lambda self, gm, _: gm.forward; "
    code += "torch.compile(f, backend='sage', options={'sage.recipe': 'off'})(q, q, q)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True,
        env={**os.environ, "TORCH_LOGS": "sage_inductor"},
    )  # fmt: skip
    (line,) = (line for line in result.stderr.splitlines() if "stays as it was" in line)
    assert line.count("[0/0]") == 1
    assert line.endswith(
        "] [0/0] scaled_dot_product_attention stays as it was: the recipe is 'off'"
    )


class Named(torch.nn.Module):
    """A model whose arguments have names of ours."""

    def forward(self, q, options=None, recipes=None, path=None, tolerance=None, loss=None):
        assert [options, recipes, path, tolerance, loss] == [1, 2, 3, 4, 5]
        return sdpa(q, q, q)


THEIRS = {"options": 1, "recipes": 2, "path": 3, "tolerance": 4, "loss": 5}


def test_a_model_may_have_arguments_with_names_of_ours(tmp_path):
    q = torch.randn(2, 1, 8, 16)
    (site,) = sage_inductor.explain(Named(), options=EMULATE)(q, **THEIRS)
    assert site.rewritten
    found = sage_inductor.diagnose(Named(), recipes="sage1", path=tmp_path / "p.json")(q, **THEIRS)
    assert {row.recipe for row in found.rows} == {"sdpa", "sage1"}
    assert (tmp_path / "p.json").exists()
    step = sage_inductor.diagnose_training(Named(), loss=torch.mean, recipes="fp8-backward")
    q.requires_grad_()
    assert len(step(q, **THEIRS).unmeasured) == 1  # nothing before the call has parameters


def test_what_is_ours_is_refused_before_the_model_is_given_its_arguments():
    with pytest.raises(sage_inductor.SageOptionError):
        sage_inductor.explain(sdpa, options={"sage.recpie": 1})


def with_dropout(q):
    return sdpa(q, q, q, dropout_p=0.5)


def test_the_device_is_the_first_reason_and_what_else_is_wrong_comes_behind_it():
    q = torch.randn(1, 1, 8, 16)
    found = sage_inductor.explain(with_dropout)(q)
    assert re.fullmatch(r"on CPU .*; dropout_p must be 0, got 0.5", found[0].reason)
    assert found.verdict.endswith("1 stays: no kernel runs on a CPU")
    (site,) = sage_inductor.explain(with_dropout, options=EMULATE)(q)
    assert site.reason == "dropout_p must be 0, got 0.5"


def test_strict_names_calls_with_one_reason_together():
    message = (
        r"3 attention calls stay as they were: blocks\.\*\.attn x3: dropout_p must be 0, got 0.1$"
    )
    with pytest.raises(sage_inductor.SageRefused, match=message):
        report.raise_if_refused(layers(3))


def test_a_pass_that_took_the_place_of_ours_is_named():
    inductor = torch._inductor.config
    with inductor.patch(pre_grad_custom_pass=None), config.patch(rewrite_inductor=True):
        assert asked_for()._notes == ()
        inductor.pre_grad_custom_pass = lambda graph: None
        (note,) = asked_for()._notes
        assert "pre_grad_custom_pass was set after" in note and note in str(asked_for())
        with config.patch(rewrite_inductor=True):
            assert asked_for()._notes == ()
    assert asked_for()._notes == ()
