"""The graphs: what the pass makes of Dynamo's, what sage::sdpa opens into, and what stays SDPA.

Update the golden graphs with EXPECTTEST_ACCEPT=1.
"""

import functools
import itertools
import math
import operator
import re
import sys

import pytest
import support
import torch
import torch.nn.functional as F
from expecttest import TestCase
from pairs import chosen
from support import arguments, calls, random_qkv, relative_l1, run_copies, run_seen, with_gaps
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import sage_inductor
from sage_inductor import patterns
from sage_inductor.choose.decide import Settings, _at_least, rewrite
from sage_inductor.choose.decide import decide as decide_call
from sage_inductor.ops import recipe as recipes
from sage_inductor.ops.sdpa import SdpaCall, compose
from sage_inductor.ops.symbols import guarded
from sage_inductor.patterns import Decision, reasons, share
from sage_inductor.patterns import sdpa as sdpa_pattern
from sage_inductor.patterns.graph import Emitter, GraphIndex, value_of

EMULATE = Settings(emulate=True)


def capture(function, *inputs, settings=EMULATE, **compile_options):
    """Run `function` once; the rewritten graphs (no Inductor) and the sites."""
    graphs, sites = [], []

    def see(gm):
        sites.extend(rewrite(gm, settings))
        graphs.append(gm)

    run_seen(function, *inputs, see=see, **compile_options)
    return graphs, sites


def run(function, *inputs, settings=EMULATE, **compile_options):
    """The sites of `function`, and what its rewritten graph returns."""
    sites, given = [], compile_options
    return sites, run_seen(
        function, *inputs, see=lambda gm: sites.extend(rewrite(gm, settings)), **given
    )


def run_opened(function, *inputs, settings):
    """The rewritten graph after AOTAutograd, and what it returns."""
    graphs = []

    def backend(gm, example_inputs):
        rewrite(gm, settings)
        return aot_autograd(fw_compiler=lambda fx, _: graphs.append(fx) or fx)(gm, example_inputs)

    torch._dynamo.reset()
    result = torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    (fx,) = graphs
    return fx.graph, result


class TestGoldenGraphs(TestCase):
    maxDiff = None

    def golden(self, graphs: dict, expected):
        found = [f"# {name}\n{calls(graph)}" for name, graph in graphs.items()]
        self.assertExpectedInline("\n".join(found), expected, skip=1)

    def test_calls_become_the_op(self):
        attend = F.scaled_dot_product_attention
        given = dict(is_causal=True, scale=0.5, enable_gqa=True)
        functions = {  # and the heads of k
            "positional": (lambda q, k, v: attend(q, k, v), 4),
            "keywords, GQA and scale": (
                lambda q, k, v: attend(query=q, key=k, value=v, **given),
                2,
            ),
            "between others": (lambda q, k, v: attend(q + 1, k, v, None, 0.0, True).relu(), 4),
            "two that share k and v": (two_calls(), 4),
        }
        graphs = {
            name: capture(function, *random_qkv(H_kv=heads))[0][0].graph
            for name, (function, heads) in functions.items()
        }
        self.golden(
            graphs,
            expected="""\
# positional
sdpa_default = sage.sdpa(l_q_, l_k_, l_v_, None, [], None, None, False, 0.125, int8/per_thread,fp8@VERSION, None, False, False)
# keywords, GQA and scale
sdpa_default = sage.sdpa(l_q_, l_k_, l_v_, None, [], None, 0, False, 0.5, int8/per_thread,fp8@VERSION, None, False, False)
# between others
sdpa_default = sage.sdpa(add(l_q_, 1), l_k_, l_v_, None, [], None, 0, False, 0.125, int8/per_thread,fp8@VERSION, None, False, False)
# two that share k and v
prepare_default = sage.prepare(l_k_, l_v_, None, int8/per_thread,fp8@VERSION, False)
sdpa_default = sage.sdpa(l_q_, l_k_, l_v_, None, [prepare_default[0], prepare_default[1], prepare_default[2], prepare_default[3], prepare_default[4], prepare_default[5]], None, None, False, 0.125, int8/per_thread,fp8@VERSION, None, False, False)
sdpa_default_1 = sage.sdpa(add(l_q_, 1), l_k_, l_v_, None, [prepare_default[0], prepare_default[1], prepare_default[2], prepare_default[3], prepare_default[4], prepare_default[5]], None, 0, False, 0.125, int8/per_thread,fp8@VERSION, None, False, False)""",
        )

    def test_recipes_open_into_their_pieces(self):
        """No smoothed k or v in 16 bits stands between what the model makes and the kernels: one op
        prepares k and v and attends."""
        self.golden(
            {name: opened(name) for name in ("sage2-8b", "sage1")},
            expected="""\
# sage2-8b
attention = sage.attention(q_1, k_1, None, v_1, 0.125, 32, int8/per_thread,fp8@VERSION, True)
# sage1
attention = sage.attention(q_1, k_1, None, v_1, 0.125, 32, int8/per_block,16bit@VERSION, True)""",
        )


def opened(recipe) -> torch.fx.Graph:
    with FakeTensorMode():
        inputs = [x.bfloat16() for x in random_qkv()]

    def sdpa(q, k, v):
        text = recipes.NAMED[recipe].encode()
        return compose(
            SdpaCall(q, k, v, None, [], None, None, False, 0.125, text, None, True, True)
        )

    return make_fx(sdpa)(*inputs).graph


def two_calls(between=lambda q, k, v: None, first=None, second=None):
    """Two attentions over k and v, the second of them causal unless `second` says otherwise, and
    what happens between them."""

    def function(q, k, v):
        one = F.scaled_dot_product_attention(q, k, v, **(first or {}))
        between(q, k, v)
        return one, F.scaled_dot_product_attention(q + 1, k, v, **(second or {"is_causal": True}))

    return function


def sdpa(**kwargs):
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **kwargs)


BOOL_MASK = torch.ones(32, 32, dtype=torch.bool).tril()
q, k, v = random_qkv()
REFUSED = {
    "dropout": (sdpa(dropout_p=0.1), (q, k, v), "dropout_p must be 0, got 0.1"),
    "5 dimensions": (sdpa(), (q[None], k[None], v[None]), r"must be \[B, H, N, D\], got 5, 5 and 5"),
    "2 dimensions": (sdpa(), (q[0, 0], k[0, 0], v[0, 0]), r"must be \[B, H, N, D\], got 2, 2 and 2"),
    "float64": (sdpa(), (q.double(), k.double(), v.double()), "dtype must be one of .*, got float64"),
    "large head_dim": (sdpa(), random_qkv(D=264), "one number up to 256, as v's, got 264, 264, 264"),
    "empty sequence": (sdpa(), (q, k[:, :, :0], v[:, :, :0]), "q, k or v is empty"),
    "scale": (sdpa(scale=math.inf), (q, k, v), "^scale must be a finite number known when .*, got inf$"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_stays_sdpa_and_says_why(case):
    function, inputs, reason = REFUSED[case]
    (gm,), (site,) = capture(function, *inputs)
    assert not site.rewritten and re.search(reason, site.reason), site.reason
    targets = [node.target for node in gm.graph.nodes]
    assert F.scaled_dot_product_attention in targets
    assert torch.ops.sage.sdpa.default not in targets


def test_a_call_without_shapes_stays_as_it_was():
    """Of a graph that nobody has traced."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    call = graph.call_function(F.scaled_dot_product_attention, (x, x, x))
    given = x, x, x, 16, 4, x, None, None, None, False, 0.0, x, None
    both = graph.call_function(F.multi_head_attention_forward, given)
    graph.output((call, graph.call_function(operator.getitem, (both, 0))))
    before = str(graph)
    sites = rewrite(torch.fx.GraphModule({}, graph), EMULATE)
    assert [site.reason for site in sites] == ["the graph carries no shapes for this call"] * 2
    assert str(graph) == before


def test_named_recipes_reach_the_op():
    for name, recipe in recipes.NAMED.items():
        (gm,), (site,) = capture(sdpa(), q, k, v, settings=Settings(recipe=name, emulate=True))
        (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.sage.sdpa.default)
        assert site.recipe == name and recipe.encode() in node.args


def as_on_cuda(order=(0, 1, 2, 3), gap=3):
    """Rewrites a call whose output has as many elements between rows, in this order: as SDPA's on
    CUDA, if head_dim is no multiple of 8."""

    def see(gm):
        (node,) = gm.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
        node.meta["example_value"] = with_gaps(value_of(node), order, gap)
        (site,) = rewrite(gm, EMULATE)
        assert site.rewritten, site.reason
        gm.graph.lint()

    return see


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("sizes", [(2, 3, 32, 37), (1, 1, 9, 37), (2, 1, 5, 7), (3, 4, 1, 1)])
def test_an_output_has_the_gaps_of_sdpas(sizes, dynamic):
    B, H, N, D = sizes
    orders = itertools.permutations(range(3))
    layouts = [((*order, 3), gap) for order, gap in itertools.product(orders, (0, 3, 500))]
    sees = [lambda gm: rewrite(gm, EMULATE), *itertools.starmap(as_on_cuda, layouts)]
    given = random_qkv(B, H, N=N, D=D)
    (plain,), *outputs = run_copies(sdpa(), *given, sees=sees, dynamic=dynamic)
    for layout, (out,) in zip(layouts, outputs, strict=True):
        strides = zip(sizes, out.stride(), with_gaps(plain, *layout).stride(), strict=True)
        assert out.equal(plain) and all(n == 1 or a == b for n, a, b in strides), layout


def test_what_looks_at_the_gaps_finds_them():
    """A reshape is a copy there, as it is of SDPA's, and a stride that Dynamo has read holds."""

    def overwrites_a_copy(q, k, v):
        out = F.scaled_dot_product_attention(q, k, v)
        out.flatten(1).zero_()
        return out

    def reads_memory(q, k, v):
        out = F.scaled_dot_product_attention(q, k, v)
        return out.as_strided(out.shape, (4 * 32 * 40, 32 * 40, 40, 1))

    given = random_qkv(D=37)
    plain = run_seen(sdpa(), *given, see=lambda gm: rewrite(gm, EMULATE))
    for function in (overwrites_a_copy, reads_memory):
        assert run_seen(function, *given, see=as_on_cuda()).equal(plain) and plain.any()


def test_an_output_that_overlaps_or_has_other_gaps_stays_sdpas():
    given = random_qkv(D=37)
    shape = given[0].shape
    for strides in ((4736, 1184, 37, 2), (4608, 1152, 36, 1), (4737, 1184, 37, 1)):

        def see(gm, strides=strides):
            (node,) = gm.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
            node.meta["example_value"] = value_of(node).new_empty_strided(shape, strides)
            (site,) = rewrite(gm, EMULATE)
            assert site.reason.endswith(f"but for gaps between rows: strides {strides}")

        run_seen(sdpa(), *given, see=see)


def with_sink(q, k, v, sink, is_causal):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = torch.einsum("bihd,bhjd->bhij", q.transpose(1, 2), k) * 0.125
    if is_causal:
        s = s + torch.full(s.shape[2:], -math.inf, dtype=s.dtype, device=s.device).triu(1)
    p = torch.cat([s, sink.expand(*s.shape[:3], 1)], -1)
    p = (p - p.amax(-1, keepdim=True)).softmax(-1)[..., :-1]
    return torch.einsum("bhij,bhjd->bihd", p, v)


@pytest.mark.parametrize("of_each", ["head", "query"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("is_causal, name", [(True, "sage2-8b"), (False, "sage1")])
def test_a_sink_takes_its_weight_by_the_ops_logsumexp(is_causal, name, dtype, of_each):
    q, k, v = random_qkv(H_kv=2, N=200, dtype=dtype)
    sink = torch.randn((2, 4, 200, 1) if of_each == "query" else (4, 1, 1), dtype=dtype) + 4
    sink.view(-1)[:2] = torch.tensor([-math.inf, 1000.0])  # takes none, takes all
    function = functools.partial(with_sink, is_causal=is_causal)
    given = q, k, v, sink
    (site,), actual = run(function, *given, settings=Settings(recipe=name, emulate=True))
    exact = function(*given)
    assert site.recipe == name and site.mask == ("causal + a sink" if is_causal else "a sink")
    args = arguments(q, k, v, is_causal, recipe=recipes.NAMED[name])
    out, lse = torch.ops.sage.sdpa(*args)
    weight = 1 / (1 + torch.exp(sink.float() - lse[..., None]))
    expected = (out * weight).to(dtype).transpose(1, 2)
    torch.testing.assert_close(actual, expected)
    assert actual.dtype == dtype and actual.stride() == exact.stride()
    assert 1e-4 < relative_l1(actual, exact) < 0.05 and actual.isfinite().all()
    if of_each == "head":
        assert not actual[:, :, 1].any() and torch.equal(actual[:, :, 0], out[:, 0])


def test_a_second_pass_changes_nothing():
    (gm,), sites = capture(lambda q, k, v: sdpa()(q, k, v) + sdpa(dropout_p=0.5)(q, k, v), q, k, v)
    assert len(sites) == 2
    before = str(gm.graph)
    assert rewrite(gm, EMULATE) == [] and str(gm.graph) == before


def fails(*_):
    raise KeyError("unforeseen")


def fails_after_inserting(node, index):
    return sdpa_pattern.find(node, index) and fails()


def fails_between_insertions(call, *_):
    fails(call.emit(torch.neg, call.emit(torch.neg, call.q)))


@pytest.mark.parametrize("put", [None, lambda call, site: None])  # as rewrite, explain; diagnose
@pytest.mark.parametrize("fault", ["finder", "decide", "replace"])
def test_a_fault_of_ours_is_reported_and_leaves_the_graph_as_it_was(fault, put, monkeypatch):
    """With 3 dimensions, the finder inserts nodes before anything can fail."""
    decide = functools.partial(decide_call, settings=EMULATE)
    if fault == "finder":
        monkeypatch.setattr(patterns, "FINDERS", (fails_after_inserting,))
    elif fault == "decide":
        decide = fails
    elif put is None:
        monkeypatch.setattr(patterns, "replace", fails_between_insertions)
    else:
        put = fails_between_insertions

    def see(gm):
        before = str(gm.graph)
        (site,) = patterns.rewrite(gm, decide, put=put)
        assert not site.rewritten and "a fault of ours: KeyError: 'unforeseen'" in site.reason
        assert str(gm.graph) == before
        assert patterns.rewrite(gm, decide, put=put) == []  # it is spoken of once

    run_seen(sdpa(), q[0], k[0], v[0], see=see)


def test_a_graph_that_cannot_be_read_stays_as_it_was_and_the_report_says_why(monkeypatch, caplog):
    monkeypatch.setattr(patterns, "GraphIndex", fails)
    inputs = random_qkv()
    line = "a graph could not be read and stays as it was, which is a fault of "
    explained = sage_inductor.explain(sdpa())(*inputs)
    torch._dynamo.reset()
    out = torch.compile(sdpa(), backend="sage")(*inputs)
    torch.testing.assert_close(out, sdpa()(*inputs))
    for report in (explained, sage_inductor.report()):
        assert str(report).endswith(f"\n{line}ours: KeyError: 'unforeseen'")
    assert line in caplog.text and "Traceback" in caplog.text


def test_a_fault_in_sharing_costs_the_sharing_alone(monkeypatch, caplog):
    def inserts_and_fails(index):
        call, *_ = index.graph.find_nodes(op="call_function", target=torch.ops.sage.sdpa.default)
        fails(Emitter(call, index)(torch.neg, call.args[0]))

    monkeypatch.setattr(patterns, "share", inserts_and_fails)
    (gm,), sites = capture(two_calls(), *random_qkv())
    assert all(site.rewritten for site in sites) and preparations(gm.graph) == 0
    line = "calls do not share k and v: each prepares its own, which is a fault of ours: KeyError: 'unforeseen'"
    assert str(sage_inductor.report()).endswith(f"\n{line}") and line in caplog.text
    assert not gm.graph.find_nodes(op="call_function", target=torch.neg)


BROADCAST = [  # batch and heads of q, of k, of v (repeated to 4); k's heads in the call
    ((2, 4), (2, 1), (2, 1), 1),  # as Falcon's
    ((2, 4), (1, 4), (1, 4), 4), ((2, 4), (1, 1), (1, 1), 1), ((2, 4), (2, 1), (2, 4), 4),
    ((2, 4), (1, 4), (2, 1), 4), ((1, 4), (2, 1), (2, 1), 1), ((2, 1), (2, 4), (2, 4), 4),
    ((4,), (1,), (1,), 1), ((2, 1), (2, 2), (2, 2), 4),
    ((2, 4), (2, 2), (2, 4), 4),  # k's alone are repeated
]  # fmt: skip


@chosen(
    lambda row, dynamic: not dynamic or row in (1, 3, 4, 7),
    row=range(len(BROADCAST)), dynamic=[False, True],
)  # fmt: skip
def test_what_sdpa_broadcasts_is_broadcast(row, dynamic):
    q, k, v, heads = BROADCAST[row]
    inputs = [torch.randn(*shape, 32, 64) for shape in (q, k, v)]
    found = []

    def attend(q, *kv):
        kv = [x.repeat_interleave(2, 1) if x.shape[-3] == 2 else x for x in kv]
        return F.scaled_dot_product_attention(q, *kv, is_causal=True)

    def see(gm):
        (site,) = rewrite(gm, EMULATE)
        (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.sage.sdpa.default)
        found.append([value_of(x).shape[1] for x in node.args[1:3]])

    actual, expected = run_seen(attend, *inputs, see=see, dynamic=dynamic), attend(*inputs)
    assert found == [[heads, heads]]
    assert actual.shape == expected.shape and relative_l1(actual, expected) < 0.05


VISIBLE = {
    "causal": lambda i, valid: torch.ones(len(i), len(i), dtype=torch.bool).tril() & valid,
    "a window": lambda i, valid: valid & ((i[:, None] - i).abs() < 9),
    "a cache": lambda i, valid: (i <= i[:, None]) & (i < valid.sum()),
    "a row alone": lambda i, valid: valid.expand(len(i), len(i)),
    "float": lambda i, valid: torch.where((i <= i[:, None]) & valid, 0.0, -math.inf),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", VISIBLE)
def test_a_row_of_keys_beside_a_band_is_a_mask(name, dynamic):
    """What is left of the mask has one dimension, which SDPA's attn_mask may not have."""

    def attend(q, k, v, valid):
        mask = VISIBLE[name](torch.arange(q.shape[2]), valid)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    inputs = (*random_qkv(N=40), torch.arange(40) < 30)
    (site,), found = run(attend, *inputs, dynamic=dynamic)
    assert site.rewritten, site.reason
    assert relative_l1(found, attend(*inputs)) < 0.05


def test_heads_split_off_a_dynamic_width_are_rewritten():
    """The order of the output in memory is known by a guard alone."""

    def attend(x):
        x = x.unflatten(-1, (-1, 32)).transpose(1, 2)
        return F.scaled_dot_product_attention(x, x, x)

    x = torch.randn(1, 40, 128)
    sites, out = run(attend, x, dynamic=True)
    assert [site.recipe for site in sites] == ["sage2-8b"]
    assert 1e-4 < relative_l1(out, attend(x)) < 0.05


@pytest.mark.parametrize(
    "recipe, by, graphs", [("sage2-8b", None, 2), (None, "sagebwd", 2), (None, None, 1)]
)
def test_what_is_asked_of_a_size_is_a_guard_if_the_call_is_rewritten(recipe, by, graphs):
    found = []

    def asking(call):
        found.append(guarded(value_of(call.q).shape[2] < 100))
        return Decision(recipe, reasons.IS_OFF(), trained_by=by)

    def backend(gm, _):
        patterns.rewrite(gm, asking)
        return gm

    attend = torch.compile(sdpa(), backend=backend, dynamic=True)
    for N in (50, 200):
        attend(*[torch.randn(1, 2, N, 64, requires_grad=by is not None)] * 3)
    assert found == [True, False][:graphs]


@pytest.mark.parametrize("at", ["before", "after"])
def test_heads_that_were_repeated_before_a_write_stay_repeated(at):
    def repeated(q, k, v):
        k, v = k + 1, v + 1
        wide = [x.repeat_interleave(2, 1) for x in (k, v)]
        out = F.scaled_dot_product_attention(q, *wide) if at == "before" else 0
        k.mul_(-2), v.mul_(-2)
        return out + F.scaled_dot_product_attention(q, *wide), k, v

    inputs = random_qkv(H_kv=2)
    sites, (out, k, v) = run(repeated, *inputs)
    heads = [site.k[1] for site in sites if site.rewritten]
    expected, written_k, _ = repeated(*inputs)
    assert heads == ([4, 4] if at == "before" else [4])
    assert torch.equal(k, written_k) and relative_l1(out, expected) < 0.05


def test_causality_that_is_not_known_is_refused():
    graph = torch.fx.Graph()
    with FakeTensorMode():
        value = torch.empty(2, 4, 32, 64)
    (q,), causal = support.placeholders(graph, {"q": value}, "val"), graph.placeholder("causal")
    call = graph.call_function(F.scaled_dot_product_attention, (q,) * 3, {"is_causal": causal})
    support.valued(call, value, "val")
    (site,) = rewrite(torch.fx.GraphModule({}, graph), EMULATE)
    assert site.reason == "is_causal must be known when compiling, got causal"


class FakeTensor(torch.Tensor):
    """Not torch's, of the same name."""


def by_sdpa(x, w):
    return F.scaled_dot_product_attention, (x.unflatten(2, (2, 8)).transpose(1, 2),) * 3


def by_mha(x, w):
    given = x, x, x, 16, 2, w, *[None] * 3, False, 0.0, w[:16], None
    return F.multi_head_attention_forward, given


@pytest.mark.parametrize("attend", [by_sdpa, by_mha])
@pytest.mark.parametrize("kind", [None, FakeTensor, torch.nn.Parameter])
def test_subclasses_of_tensor_are_refused_whatever_their_name_and_torchs_fake_one_is_not(
    attend, kind
):
    """A graph of each class, made by hand: Dynamo makes its own stand-ins."""
    graph, nodes = torch.fx.Graph(), {}
    with FakeTensorMode():
        function, args = attend(torch.empty(3, 5, 16), torch.empty(48, 16))
        out = function(*args)
    for x in args:
        if isinstance(x, torch.Tensor) and x not in nodes:
            value = x if kind is None else torch.empty(x.shape).as_subclass(kind)
            nodes[x] = support.valued(graph.placeholder(f"x{len(nodes)}"), value, "val")
    given = (nodes[x] if isinstance(x, torch.Tensor) else x for x in args)
    call = support.valued(graph.call_function(function, tuple(given)), out, "val")
    if isinstance(out, tuple):
        call = support.valued(graph.call_function(operator.getitem, (call, 0)), out[0], "val")
    graph.output(call)
    (site,) = rewrite(torch.fx.GraphModule({}, graph), EMULATE)
    assert site.rewritten == (kind is None), site.reason
    if kind is not None:
        assert site.reason == f"tensor subclasses are not supported, got {kind.__name__}"


SAMPLES = {
    "SDPA of [H, N, D]": lambda q: F.scaled_dot_product_attention(q, q, q),
    "by hand": lambda q: torch.einsum(
        "hij,hjd->hid", torch.einsum("hid,hjd->hij", q, q).softmax(-1), q
    ),
    "by hand, not read": lambda q: torch.einsum("hid,hjd->hij", q, q).exp().log1p().softmax(-1) @ q,
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_of_vmap_stays_as_it_was_and_says_why(name):
    """No value can be made of its inputs: they escape from the vmap."""
    sites, _ = run(lambda q: torch.func.vmap(SAMPLES[name])(q), torch.randn(2, 2, 9, 16))
    assert [site.reason for site in sites] == ["inside a torch.func transform"]


@pytest.fixture
def sizes_of_data():
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("attend", ["sdpa", "handwritten", "masked"])
def test_a_batch_that_depends_on_data_is_attended_to(attend, portable, sizes_of_data):
    def function(q, k, v, keep):
        q, k, v = q[keep], k[keep], v[keep]
        if attend == "handwritten":
            return handwritten(q, k, v, BOOL_MASK)
        return F.scaled_dot_product_attention(q, k, v, BOOL_MASK if attend == "masked" else None)

    sites, settings = [], Settings(emulate=True, portable=portable)
    compiled = torch.compile(
        function, fullgraph=True,
        backend=lambda gm, _: sites.extend(rewrite(gm, settings)) or gm.forward,
    )  # fmt: skip
    inputs = random_qkv(B=4)
    for keep in ([True, False, True, True], [False] * 4, [False, True, False, False]):
        keep = torch.tensor(keep)
        out = compiled(*inputs, keep)
        assert out.shape[0] == keep.sum()
        assert not keep.any() or relative_l1(out, function(*inputs, keep)) < 0.05
    assert [(site.reason, site.q[0]) for site in sites] == [("emulated", "u0")]


def test_a_length_that_depends_on_data_is_refused_with_a_true_reason(sizes_of_data):
    def function(q, k, v, keep):
        return handwritten(q, k[:, :, keep], v[:, :, keep], torch.ones(1, 1, dtype=torch.bool))

    _, (site,) = capture(function, *random_qkv(), BOOL_MASK[3])
    assert site.reason.startswith("heads, lengths and head_dim depend on data, got (2, 4, 32, 64)")


@pytest.mark.parametrize("portable", [False, True])
def test_a_size_that_depends_on_data_is_long_enough_only_if_it_always_is(portable):
    env, settings = ShapeEnv(), Settings(portable=portable)
    u = env.create_unbacked_symint()
    torch._check(u >= 7)
    assert [_at_least(u, n, settings) for n in (7, 8)] == [True, False] and not env.guards


# -- what calls share ----


def preparations(graph) -> int:
    return len(graph.find_nodes(op="call_function", target=torch.ops.sage.prepare.default))


def without_sharing(monkeypatch):
    monkeypatch.setattr("sage_inductor.patterns.share", lambda graph: None)


SHARED = {
    "bands": (two_calls(), 1),
    "one mask": (two_calls(first={"attn_mask": BOOL_MASK}, second={"attn_mask": BOOL_MASK}), 1),
    "a mask and none": (two_calls(first={"attn_mask": BOOL_MASK}), 0),
    "masks": (two_calls(first={"attn_mask": BOOL_MASK}, second={"attn_mask": BOOL_MASK | True}), 0),
    "mask written": (
        lambda q, k, v: two_calls(lambda *_: v.mul_(2), *[{"attn_mask": v[..., :32].mT}] * 2)(q, k, k), 0),
    "scales": (two_calls(second={"scale": 0.5}), 1),
    "a band that hides keys": (
        lambda q, k, v: two_calls(first={"is_causal": True}, second={"is_causal": True})(q[:, :, :9], k, v), 0),
    "bands, one of which hides keys": (
        lambda q, k, v: (two_calls()(q, k, v), sdpa(is_causal=True)(q[:, :, :9], k, v)), 1),
    "kv repeated": (lambda q, k, v: two_calls()(q, *(x[:, :2].repeat_interleave(2, 1) for x in (k, v))), 1),
    "repeated apart": (
        lambda q, k, v: [F.scaled_dot_product_attention(q, *(x.repeat_interleave(2, 1) for x in (k, v)))
                         for k, v in [(k[:, :2], v[:, :2])] for _ in range(3)], 1),
    "k alone": (lambda q, k, v: sdpa()(q, k, v) + sdpa()(q, k, v + 1), 0),
    "k written": (two_calls(lambda q, k, v: k.add_(1)), 0),
    "v written": (two_calls(lambda q, k, v: v.__setitem__(0, 1)), 0),
    "a view of k written": (two_calls(lambda q, k, v: k[0].mT.mul_(2)), 0),
    "k is an out=": (two_calls(lambda q, k, v: torch.mul(q, 2, out=k)), 0),
    "out of place": (two_calls(lambda q, k, v: F.relu(k, inplace=False)), 1),
    "autocast": (
        lambda q, k, v: (sdpa()(q, k, v), torch.autocast("cpu", torch.bfloat16)(sdpa())(q, k, v)), 0),
    "autocast of both": (lambda q, k, v: torch.autocast("cpu", torch.bfloat16)(two_calls())(q, k, v), 1),
    "no_grad": (lambda q, k, v: (torch.no_grad()(sdpa())(q, k, v), sdpa()(q, k, v)), 1),
}  # fmt: skip


def shared_always(case, recipe, dynamic):
    """What is shared depends on the case, what that is on the recipe and on the mask: every recipe
    with and without one, the other cases once, by turns with lengths that are symbols."""
    place = list(SHARED).index(case)
    i = list(recipes.NAMED).index(recipe) + place
    every = case in ("bands", "one mask")
    return i % 2 == dynamic if every else (i % len(recipes.NAMED), place % 2) == (0, dynamic)


@chosen(shared_always, case=SHARED, recipe=list(recipes.NAMED), dynamic=[False, True])
def test_what_calls_share_is_prepared_once_and_changes_no_bit(case, recipe, dynamic, monkeypatch):
    function, expected = SHARED[case]
    settings = Settings(emulate=True, recipe=recipe)

    def as_ever(gm, expected=expected):
        sites = rewrite(gm, settings)
        gm.graph.lint()
        assert all(site.rewritten for site in sites) and len(sites) >= 2
        assert preparations(gm.graph) == expected, calls(gm.graph)

    def apart(gm):
        with monkeypatch.context() as patch:
            without_sharing(patch)
            as_ever(gm, expected=0)

    shared, apart = run_copies(function, *random_qkv(), sees=(as_ever, apart), dynamic=dynamic)
    assert shared and all(torch.equal(a, b) for a, b in zip(shared, apart, strict=True))


def test_sharing_changes_no_gradient(monkeypatch):
    """Through AOTAutograd: what prepare gives has no gradient, k and v have both calls'."""
    inputs, cotangents, results = [x.requires_grad_() for x in random_qkv()], random_qkv()[:2], []
    for _ in range(2):
        torch._dynamo.reset()
        options = {"sage.emulate": True}
        outs = torch.compile(two_calls(), backend="sage", options=options)(*inputs)
        results.append((*outs, *torch.autograd.grad(outs, inputs, cotangents)))
        without_sharing(monkeypatch)
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)


def test_recipes_are_not_shared():
    """Two backends never meet in a graph; two calls of the op with recipes of their own may."""
    (gm,), _ = capture(two_calls(), *random_qkv(), settings=EMULATE)
    nodes = gm.graph.find_nodes(op="call_function", target=torch.ops.sage.sdpa.default)
    for node, recipe in zip(nodes, recipes.NAMED.values()):
        node.update_arg(4, [])
        node.update_arg(9, recipe.encode())
    gm.graph.eliminate_dead_code()
    share(GraphIndex(gm.graph))
    assert preparations(gm.graph) == 0


@pytest.mark.parametrize("case, expected", [("bands", 1), ("k written", 2)])
def test_k_is_quantized_once_where_the_ops_open(case, expected):
    function, inputs = SHARED[case][0], random_qkv()
    settings = Settings(emulate=True, portable=True)
    graph, actual = run_opened(function, *map(torch.clone, inputs), settings=settings)
    assert not calls(graph)  # opened, down to the emulation
    int8 = [n for n in graph.nodes if n.kwargs.get("dtype") == torch.int8]
    assert len(int8) == 2 + expected  # two are q's
    torch._dynamo.reset()
    whole = torch.compile(function, backend="sage", options={"sage.emulate": True})
    for a, b in zip(actual, whole(*inputs)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sage2-8b", "sage1"])
@torch.no_grad()
def test_a_gpu_computes_attention_with_a_sink(name):
    q, k, v = (x.cuda() for x in random_qkv(1, 8, 2, 3000, dtype=torch.bfloat16))
    sink = torch.randn(8, 1, 1, device="cuda", dtype=torch.bfloat16) + 4
    options = {"sage.force": True, "sage.strict": True, "sage.recipe": name}
    compiled = torch.compile(with_sink, backend="sage", fullgraph=True, options=options)
    actual = compiled(q, k, v, sink, True)
    (site,) = sage_inductor.report()
    assert site.recipe == name and site.mask == "causal + a sink"
    exact = with_sink(*(x.double() for x in (q, k, v, sink)), True)
    assert 1e-4 < relative_l1(actual, exact) < 0.05 and actual.dtype == torch.bfloat16


@pytest.mark.parametrize("portable", [False, True])
def test_what_a_sink_takes_opens_where_it_is_compiled(portable):
    given, settings = (*random_qkv(), torch.randn(4, 1, 1), True), Settings(emulate=True, portable=portable)  # fmt: skip
    graph, actual = run_opened(with_sink, *given, settings=settings)
    assert not graph.find_nodes(op="call_function", target=torch.ops.sage.with_sink.default)
    assert len(graph.find_nodes(op="call_function", target=torch.ops.aten.sigmoid.default)) == 1
    assert relative_l1(actual, with_sink(*given)) < 0.05


def bool_mask():
    i = torch.arange(32)
    return i <= i[:, None]


def block_mask():
    return create_block_mask(lambda b, h, i, j: j <= i, None, None, 32, 32, device="cpu")


def handwritten(q, k, v, mask):
    scores = (q @ k.transpose(-1, -2) / 8).masked_fill(~mask, -math.inf)
    return scores.softmax(-1) @ v


def flex(q, k, v, mask):
    return flex_attention(q, k, v, block_mask=mask)


def in_autocast(q, k, v, mask):
    with torch.autocast("cpu", torch.bfloat16):
        return F.scaled_dot_product_attention(q, k, v, mask)


def python_calls(function) -> int:
    """How many functions run, in Python and in C."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    "attention, make_mask",
    [(F.scaled_dot_product_attention, bool_mask), (in_autocast, bool_mask),
     (handwritten, bool_mask), support.swept(flex, block_mask)],
)  # fmt: skip
def test_the_pass_costs_the_same_for_each_layer(attention, make_mask):
    """What walks the graph for every call makes it a square: once 1.7 s for 96 masked layers."""

    def model(q, k, v, layers):
        mask = make_mask()
        for _ in range(layers):
            q = attention(q.sin() * q.cos(), k.sin(), v.sin(), mask).float().tanh().neg()
        return q

    counts, sites = [], []

    def backend(gm, _):
        counts.append(python_calls(lambda: sites.extend(rewrite(gm, EMULATE))))
        return gm.forward

    for layers in (2, 8, 16):  # what is found once a process, the first finds
        torch._dynamo.reset()
        torch.compile(model, backend=backend, fullgraph=True)(*random_qkv(), layers)
    assert len(sites) == 26 and all(site.rewritten for site in sites), sites[0]
    assert counts[2] <= 2.2 * counts[1], counts
