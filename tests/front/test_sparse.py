"""`keep` of a policy's rule: which calls compute selected blocks of keys, and that they do.

Shapes: B batch, H heads, N sequence, D head_dim.
"""

import functools
import json

import pytest
import support
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import sage_inductor
from sage_inductor import SageRefused, config, functional
from sage_inductor.choose.decide import rewrite
from sage_inductor.ops.visibility import BlockLists
from sage_inductor.options import Settings
from sage_inductor.policy import from_python

RECIPE = "sage2-8b-per-token"
KEEP = {"top_k": 0.3, "similarity": 0, "dense_first": 70}
TAIL = KEEP | {"tail": True}
CUBES = {**KEEP, "dense_last": 6, "layout": [4, 9, 12]}  # of 70 + 432 + 6 tokens
sdpa = F.scaled_dot_product_attention


def options(keep, recipe=RECIPE, **given) -> dict:
    return {"sage.emulate": True, "sage.policy": [{"recipe": recipe, "keep": keep}], **given}


def tokens(N, B=1, H=4, D=64):
    """[B, H, N, D], each much like the one before it."""
    return torch.randn(B, H, N, D).cumsum(2) / 4


def order_of(q, keep):
    """By the layout of such a rule."""
    (rule,) = from_python([{"recipe": RECIPE, "keep": keep}])
    if (size := rule.keep.layout) is not None:
        return torch.ops.sage.cube_order(q, size, rule.keep.cube, rule.keep.beside[0])


def by_selected(q, k, v, keep, recipe=RECIPE):
    """What such a rule asks for, by the two ops."""
    (rule,) = from_python([{"recipe": recipe, "keep": keep}])
    scale = q.shape[3] ** -0.5
    keep, perm = rule.keep, order_of(q, keep)
    found = torch.ops.sage.select_blocks(q, k, scale, *keep.arguments(perm))
    tail_block = keep.tail_block if keep.tail else None
    lists = BlockLists(*found, None, None, *keep.size, tail_block)
    given = {"perm": perm, **lists._asdict()}
    out, _ = support.sdpa(q, k, v, scale=scale, recipe=recipe, out_bnhd=False, **given)
    return out, lists


def rewritten(function, *inputs, keep, **given):
    """(what `function` returns, its rewritten graph, its sites), without Inductor."""
    asked = Settings(emulate=True, policy=from_python([{"recipe": RECIPE, "keep": keep}]))
    graphs, sites = [], []

    def see(gm):
        sites.extend(rewrite(gm, asked))
        gm.recompile()
        graphs.append(gm.graph)

    with torch.no_grad():
        out = support.run_seen(function, *inputs, see=see, **given)
    return out, graphs[0], sites


def test_a_call_computes_the_blocks_that_are_selected():
    q, k, v = tokens(700), tokens(700, H=2), tokens(700, H=2)
    out, graph, (site,) = rewritten(
        lambda q, k, v: sdpa(q, k, v, enable_gqa=True), q, k, v, keep=KEEP
    )
    expected, lists = by_selected(q, k, v, KEEP)
    assert torch.equal(out, expected)
    assert 0.3 < lists.kv_num_blocks.sum() / lists.kv_indices.numel() < 0.7
    assert support.relative_l1(out, sdpa(q, k, v, enable_gqa=True)) > 1e-2
    assert support.calls(graph).splitlines() == [
        "select_blocks_default = sage.select_blocks(l_q_, l_k_, 0.125, 0.3, 0.0, 0, 70, 0, 128, 64)",
        "sdpa_default = sage.sdpa(l_q_, l_k_, l_v_, None, [], None, None, False, 0.125, "
        "int8/per_token,fp8@VERSION, None, False, False, select_blocks_default[0], "
        "select_blocks_default[1], None, None, 128, 64)",
    ]
    assert site.reason == f"emulated; keep {KEEP} (rule 1 of the policy)"


# -- a fraction for each head --

BY_HEAD = [0.1, 0.5, 0.5, 0.9]


def heads_alone(q, k, v, keep):
    """Each head of q by a call of its own, by its fraction alone."""
    name = "sparsity" if "sparsity" in keep else "top_k"
    of_k = q.shape[1] // k.shape[1]
    return torch.cat(
        [
            by_selected(
                q[:, h : h + 1], *(x[:, h // of_k : h // of_k + 1] for x in (k, v)),
                {**keep, name: keep[name][h]},
            )[0]
            for h in range(q.shape[1])
        ],
        1,
    )  # fmt: skip


def test_each_head_computes_the_blocks_that_its_fraction_selects():
    q, k, v = tokens(700), tokens(700, H=2), tokens(700, H=2)
    out, graph, (site,) = rewritten(
        lambda q, k, v: sdpa(q, k, v, enable_gqa=True), q, k, v, keep=BY_HEAD
    )
    expected, lists = by_selected(q, k, v, BY_HEAD)
    assert torch.equal(out, expected)
    counts = lists.kv_num_blocks.sum((0, 2)).tolist()
    assert counts[0] < min(counts[1:3]) and max(counts[1:3]) < counts[3]
    assert support.calls(graph).splitlines()[0] == (
        "select_blocks_default = sage.select_blocks(l_q_, l_k_, 0.125, 0.0, 0.0, 0.1, 0, 0, 128, "
        '64, {"top_k": [0.1, 0.5, 0.5, 0.9]})'
    )
    assert site.reason == "emulated; keep (0.1, 0.5, 0.5, 0.9) (rule 1 of the policy)"
    assert json.loads(json.dumps(site.decision.selection.given())) == BY_HEAD


KEEPS_BY_HEAD = {
    "top_k": {"top_k": [0.1, 0.5, 0.5, 0.9], "similarity": 0, "dense_first": 70},
    "tail": {"top_k": [0.1, 0.5, 0.01, 1], "similarity": 0, "tail": True},
    "cubes": {**CUBES, "top_k": [0.9, 0.1, 0.1, 0.2]},
    "sla": {"rule": "sla", "sparsity": [0.9, 0.5, 0.2, 0]},
    "vsa": {"rule": "vsa", "sparsity": [0.9, 0.5, 0.5, 0.9]},
    "error": {"top_k": [0.1, 0.5, 0.6, 1], "rule": "error"},
}


@pytest.mark.parametrize("case", KEEPS_BY_HEAD)
def test_a_call_is_to_the_bit_those_of_its_heads(case):
    keep = KEEPS_BY_HEAD[case]
    q, k, v = (tokens(508, 2, 4) for _ in range(3))
    out, _, (site,) = rewritten(sdpa, q, k, v, keep=keep)
    assert site.rewritten
    assert torch.equal(out, heads_alone(q, k, v, keep))


@pytest.mark.parametrize("keep", [[0.1, 0.5], {"rule": "sla", "sparsity": [0.5] * 2}])
def test_a_call_of_another_number_of_heads_stays_with_the_reason(keep):
    """One for each head of k is not enough."""
    q, k, v = tokens(256), tokens(256, H=2), tokens(256, H=2)
    attend = functools.partial(sdpa, enable_gqa=True)
    _, _, (site,) = rewritten(attend, q, k, v, keep=keep)
    assert not site.rewritten and site.reason == (
        "keep must have a fraction for each of q's 4 heads, or one for all, got 2 "
        "(rule 1 of the policy)"
    )
    assert "where ranks divide the heads, each rank those of its own" in site.why.cause.remedy


def test_the_heads_of_a_module_and_a_stage_have_fractions_of_their_own():
    """The first rule that fits is asked for."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Attend(), Attend()

        def forward(self, x):
            return self.a(x), self.b(x)

    class Attend(torch.nn.Module):
        def forward(self, x):
            return sdpa(x, x, x)

    rules = [
        {"stage": "late", "keep": [0.9, 0.8, 0.7, 0.6]},
        {"module": "*.a", "keep": [0.1, 0.2, 0.3, 0.4]},
        {"keep": [0.5, 0.1, 0.5, 0.1]},
    ]
    given = {"sage.policy": [{"recipe": RECIPE, **each} for each in rules], "sage.emulate": True}
    x = tokens(508)
    late, of_a, of_b = (by_selected(x, x, x, each["keep"])[0] for each in rules)
    with torch.no_grad(), support.op_by_op():
        model = torch.compile(Model(), backend="sage", options=given, fullgraph=True)
        assert all(map(torch.equal, model(x), (of_a, of_b)))
        with sage_inductor.stage("late"):
            assert all(map(torch.equal, model(x), (late, late)))


def test_another_number_of_heads_than_a_graph_has_is_compiled_anew():
    """The number of heads is dynamic, and one graph's fractions are for 4 of them."""
    counters.clear()
    with torch.no_grad(), support.op_by_op(split=True):
        given = options(BY_HEAD)
        run = torch.compile(sdpa, backend="sage", options=given, fullgraph=True, dynamic=True)
        for H, N in ((4, 300), (4, 700), (6, 300), (4, 300)):
            q, k, v = (tokens(N, H=H) for _ in range(3))
            exact = sdpa(q, k, v)
            expected = by_selected(q, k, v, BY_HEAD)[0] if H == 4 else exact
            assert support.relative_l1(run(q, k, v), expected) < 1e-5, (H, N)
    assert counters["stats"]["unique_graphs"] == 2


@torch.no_grad()
def test_a_package_is_made_of_a_number_of_heads_that_is_known():
    """A package checks no guard."""
    module = torch.nn.Module()
    module.forward = lambda x: sdpa(x, x, x)
    for heads, reason in (
        (torch.export.Dim("H", min=2, max=64), "q's s"),
        (None, "emulated; keep ("),
    ):
        shapes = ({1: heads, 2: torch.export.Dim("N", min=129, max=4000)},)
        program = torch.export.export(module, (tokens(300),), dynamic_shapes=shapes)
        (site,) = sage_inductor.rewrite(program, options=options(BY_HEAD))
        assert site.rewritten == (heads is None) and reason in site.reason


SLA = {"rule": "sla", "sparsity": 0.85, "dense": [[0, 70], [-9, None]], "blocks": [64, 64]}
TRAINED = {
    "sla": SLA,
    "sla, as a LoRA is served": {"rule": "sla", "sparsity": 0.85, "dense": [[0, 512]]},
    "vsa": {"rule": "vsa", "sparsity": 0.9},
    "vsa, exempt": {"rule": "vsa", "sparsity": 0.9, "segments": [100, 28]},
    "vsa, compete": {"rule": "vsa", "sparsity": 0.9, "segments": [128, 64], "mode": "compete"},
    "sol": {"rule": "sol", "tau": 1.3, "dense": [[0, 64]]},
    "error": {"top_k": 0.2, "rule": "error"},
    "error, a tail": {"top_k": 0.2, "rule": "error", "tail": True, "tail_block": 32},
}


@pytest.mark.parametrize("case", TRAINED)
def test_a_call_computes_the_blocks_that_a_trained_rule_selects(case):
    keep = TRAINED[case]
    q, k, v = (tokens(1100, H=H).bfloat16() for H in (4, 2, 2))
    out, graph, (site,) = rewritten(
        lambda q, k, v: sdpa(q, k, v, enable_gqa=True), q, k, v, keep=keep
    )
    expected, lists = by_selected(q, k, v, keep)
    assert torch.equal(out, expected)
    assert lists.kv_num_blocks.float().mean() < 0.8 * lists.kv_indices.shape[-1]
    assert support.calls(graph).count("sage.select_blocks(") == 1
    asked = site.decision.selection.given()
    assert json.loads(json.dumps(asked)) == keep
    assert site.reason == f"emulated; keep {asked} (rule 1 of the policy)"


def test_the_graph_and_the_report_say_the_rule():
    x = tokens(200)
    _, graph, (site,) = rewritten(sdpa, x, x, x, keep=SLA)
    said = '{"rule": "sla", "sparsity": 0.85, "dense": [[0, 70], [-9, null]]}'
    assert f"0.125, 0.0, 0.0, 0.1, 0, 0, 64, 64, {said})" in support.calls(graph)
    assert site.reason == (
        "emulated; keep {'rule': 'sla', 'sparsity': 0.85, 'dense': ((0, 70), (-9, None)), "
        "'blocks': (64, 64)} (rule 1 of the policy)"
    )


def test_blocks_of_64_queries_are_not_for_a_recipe_whose_scales_are_of_128():
    inputs = tokens(256), tokens(256), tokens(256)
    with torch.no_grad():
        (site,) = sage_inductor.explain(sdpa, options=options(SLA, "sage1"))(*inputs)
    assert not site.rewritten and "lists of 64 queries where 128 share a scale" in site.reason


@pytest.mark.parametrize("tail_block", [32, 64])
def test_the_blocks_that_are_not_selected_may_have_a_tail(tail_block):
    """Which brings the result nearer to attention. The report says so."""
    q, k, v = tokens(700), tokens(700, H=2), tokens(700, H=2)
    keep = TAIL | ({"tail_block": 32} if tail_block == 32 else {})
    out, graph, (site,) = rewritten(
        lambda q, k, v: sdpa(q, k, v, enable_gqa=True), q, k, v, keep=keep
    )
    assert torch.equal(out, by_selected(q, k, v, keep)[0])
    select, call = support.calls(graph).splitlines()
    assert select.endswith("0.125, 0.3, 0.0, 0, 70, 0, 128, 64)")  # as without a tail
    assert call.endswith(f"None, None, 128, 64, {tail_block})")
    assert site.reason == f"emulated; keep {keep} (rule 1 of the policy)"
    exact = sdpa(q, k, v, enable_gqa=True)
    dropped = by_selected(q, k, v, KEEP)[0]
    assert support.relative_l2(out, exact) < 0.9 * support.relative_l2(dropped, exact)


def test_a_recipe_without_a_tail_stays_and_says_why():
    x = tokens(300)
    policy = from_python([{"recipe": "sage2-4b", "keep": TAIL}])
    sites = []
    given = Settings(emulate=True, policy=policy)
    support.run_seen(sdpa, x, x, x, see=lambda gm: sites.extend(rewrite(gm, given)))
    assert "no kernel for a tail with qk='int4'" in sites[0].reason and sites[0].recipe is None


@pytest.mark.parametrize("keep", [1, {"rule": "sla", "top_k": 1}, {"rule": "sla", "sparsity": 0}])
def test_to_keep_all_is_the_dense_call(keep):
    q, k, v = tokens(500), tokens(500), tokens(500)
    out, graph, (site,) = rewritten(sdpa, q, k, v, keep=keep)
    assert torch.equal(out, support.sdpa(q, k, v, recipe=RECIPE, out_bnhd=False)[0])
    assert "select_blocks" not in support.calls(graph)
    assert site.decision.selection is None and site.reason == "emulated (rule 1 of the policy)"


def test_calls_that_share_k_and_v_select_for_themselves():
    q, r, k, v = (tokens(300) for _ in range(4))
    (a, b), graph, sites = rewritten(
        lambda q, r, k, v: (sdpa(q, k, v), sdpa(r, k, v)), q, r, k, v, keep=KEEP
    )
    assert torch.equal(a, by_selected(q, k, v, KEEP)[0])
    assert torch.equal(b, by_selected(r, k, v, KEEP)[0])
    text = support.calls(graph)
    assert text.count("sage.select_blocks(") == 2
    assert "sage.prepare" not in text  # each leaves out the keys that its own lists do not name


def test_an_eager_call_follows_the_policy():
    q, k, v = tokens(400), tokens(400), tokens(400)
    policy = [{"recipe": RECIPE, "keep": KEEP}]
    with torch.no_grad(), config.patch(emulate=True, policy=policy):
        out = sage_inductor.attention(q, k, v)
    assert torch.equal(out, by_selected(q, k, v, KEEP)[0])


# -- in cubes --


def test_a_layout_selects_and_computes_in_cubes():
    q, k, v = tokens(508), tokens(508, H=2), tokens(508, H=2)
    out, graph, (site,) = rewritten(
        lambda q, k, v: sdpa(q, k, v, enable_gqa=True), q, k, v, keep=CUBES
    )
    assert torch.equal(out, by_selected(q, k, v, CUBES)[0])
    assert not torch.equal(out, by_selected(q, k, v, {**KEEP, "dense_last": 6})[0])
    order, select, call = support.calls(graph).splitlines()
    assert order == "cube_order_default = sage.cube_order(l_q_, [4, 9, 12], [4, 4, 4], 70)"
    assert select.endswith("0, 70, 6, 128, 64, {}, cube_order_default)")
    assert call.endswith("None, None, 128, 64, None, cube_order_default)")
    given = {**CUBES, "layout": (4, 9, 12)}
    assert site.reason == (
        f"emulated; keep {given}; in cubes, for which its kernels copy nothing (rule 1 of the policy)"
    )


IN_CUBES = [
    {"rule": "sla", "sparsity": 0.85, "dense": [[0, 70], [-6, None]], "layout": [4, 9, 12]},
    {"rule": "vsa", "sparsity": 0.7, "segments": [100, 28], "layout": [4, 8, 12]},
    {"rule": "sol", "tau": 1.3, "layout": [4, 9, 12]},
    {"rule": "sol", "tau": 1.3, "layout": [4, 9, 12], "tail": True},
    {"top_k": 0.2, "rule": "error", "dense": [[-6, None]], "layout": [4, 9, 12]},
]


@pytest.mark.parametrize("keep", IN_CUBES, ids=lambda keep: keep["rule"])
def test_a_trained_rule_selects_in_cubes(keep):
    (rule,) = from_python([{"recipe": RECIPE, "keep": keep}])
    q, k, v = (tokens(rule.keep.tokens, H=H).bfloat16() for H in (4, 2, 2))
    out, graph, (site,) = rewritten(
        lambda q, k, v: sdpa(q, k, v, enable_gqa=True), q, k, v, keep=keep
    )
    assert site.rewritten and "; in cubes, for which" in site.reason
    assert torch.equal(out, by_selected(q, k, v, keep)[0])
    in_rows = {name: x for name, x in keep.items() if name != "layout"}
    assert not torch.equal(out, by_selected(q, k, v, in_rows)[0])
    _, _, (site,) = rewritten(sdpa, *(tokens(rule.keep.tokens + 1) for _ in range(3)), keep=keep)
    assert not site.rewritten and "with dense ones around it, got" in site.reason


@pytest.mark.parametrize(
    "recipe, copied", [("sage1-rotated", "v"), ("sage2-4b", "q and k"), ("sage2-8b", "nothing")]
)
def test_the_report_says_what_a_recipe_copies_for_a_layout(recipe, copied):
    inputs = tokens(508), tokens(508), tokens(508)
    with torch.no_grad():
        (site,) = sage_inductor.explain(sdpa, options=options(CUBES, recipe))(*inputs)
    assert f"; in cubes, for which its kernels copy {copied} (rule" in site.reason


def test_calls_share_the_order_of_a_layout_and_no_other():
    """Of another layout, of other tokens beside it, and of another length it is another one."""
    keeps = [
        CUBES, {**CUBES, "dense_last": 7}, {"top_k": 0.3, "layout": [4, 12, 9]},
        {"top_k": 0.3, "layout": [4, 12, 9], "cube": [1, 8, 8]},
    ]  # fmt: skip
    sizes = (508, 64), (509, 64), (432, 64), (432, 32)
    policy = [
        {"recipe": RECIPE, "length": [N, N], "head_dim": D, "keep": keep}
        for (N, D), keep in zip(sizes, keeps, strict=True)
    ]
    inputs = [tokens(N, D=D) for N, D in sizes]
    given, graphs = Settings(emulate=True, policy=from_python(policy)), []

    def function(*xs):
        return [sdpa(x, x, x) for x in (*xs, *xs)]

    def see(gm):
        rewrite(gm, given)
        gm.recompile()
        graphs.append(gm.graph)

    with torch.no_grad():
        found = support.run_seen(function, *inputs, see=see)
    orders = [line for line in support.calls(graphs[0]).splitlines() if "sage.cube_order(" in line]
    assert len(orders) == 4
    for out, x, keep in zip(found, inputs * 2, keeps * 2, strict=True):
        assert torch.equal(out, by_selected(x, x, x, keep)[0])


@pytest.mark.parametrize("N", [507, 509, 432])
def test_a_call_of_other_tokens_than_a_layout_has_stays(N):
    _, _, (site,) = rewritten(sdpa, *(tokens(N) for _ in range(3)), keep=CUBES)
    assert not site.rewritten and site.reason == (
        "layout [4, 9, 12] must be of 508 tokens, with dense ones around it, got "
        f"{N} (rule 1 of the policy)"
    )


def test_a_layout_is_for_one_length():
    """A rule's `length` makes one of a dynamic length."""
    x = tokens(508)
    torch._dynamo.mark_dynamic(x, 2)
    _, _, (site,) = rewritten(lambda x: sdpa(x, x, x), x, keep=CUBES)
    reason = "layout [4, 9, 12] must be of 508 tokens, with dense ones around it, got s"
    assert site.reason.startswith(reason)
    policy = [{"recipe": RECIPE, "keep": CUBES, "length": [508, 508]}, {"recipe": "off"}]
    given = {"sage.policy": policy, "sage.emulate": True}
    compiled = torch.compile(sdpa, backend="sage", options=given, dynamic=True)
    with torch.no_grad():
        for N in (508, 509, 508):
            q, k, v = tokens(N), tokens(N), tokens(N)
            expected = by_selected(q, k, v, CUBES)[0] if N == 508 else sdpa(q, k, v)
            assert support.relative_l1(compiled(q, k, v), expected) < 1e-5


WRONG = {
    "layout must be .frames, rows, columns., got .4, 9.": {"layout": [4, 9]},
    "layout must be .frames, rows, columns., got .4, 9, 0.": {"layout": [4, 9, 0]},
    "layout must be .frames, rows, columns., got 432": {"layout": 432},
    "cube must be .* a multiple of 64 tokens, got .4, 4, 2.": {
        "layout": [4, 9, 12], "cube": [4, 4, 2],
    },
    "cube needs a layout": {"cube": [4, 4, 4]},
    "layouts does not exist: did you mean layout": {"layouts": [4, 9, 12]},
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_a_layout_that_is_none_is_an_error_of_the_policy(message):
    with pytest.raises(ValueError, match=message):
        from_python([{"recipe": RECIPE, "keep": {"top_k": 0.3, **WRONG[message]}}])


def test_a_policy_with_a_layout_is_read_as_it_was_written(tmp_path):
    keep = {"top_k": 0.3, "layout": [21, 45, 80], "cube": [4, 8, 8]}
    policy = sage_inductor.Policy(from_python([{"recipe": RECIPE, "keep": keep}]))
    policy.save(tmp_path / "policy.json")
    assert sage_inductor.Policy.load(tmp_path / "policy.json") == policy
    assert policy.rules[0].keep.given() == {**keep, "layout": (21, 45, 80), "cube": (4, 8, 8)}


@pytest.mark.parametrize("keep", [SLA, BY_HEAD], ids=["sla", "by head"])
@pytest.mark.parametrize("way", ["eager", "backend", "in a compiled function", "Inductor"])
def test_an_attention_call_takes_what_a_policy_says(way, keep):
    q, k, v = tokens(400), tokens(400), tokens(400)

    def attend(q, k, v):
        return sage_inductor.attention(q, k, v, recipe=RECIPE, keep=keep)

    given = {"backend": "sage"} if way == "backend" else {"backend": "inductor"}
    run = attend if way == "eager" else torch.compile(attend, fullgraph=True, **given)
    if way == "in a compiled function":
        run = torch.compile(sage_inductor.attention, backend="aot_eager")
        run = functools.partial(run, recipe=RECIPE, keep=keep)
    with torch.no_grad(), config.patch(emulate=True):
        out = run(q, k, v)
        dense = sage_inductor.attention(q, k, v, recipe=RECIPE)
    expected = by_selected(q, k, v, keep)[0]
    assert support.relative_l1(out, expected) < 1e-6
    assert support.relative_l1(out, dense) > 1e-2
    told = "(0.1, 0.5, 0.5, 0.9)" if keep is BY_HEAD else "{'rule': 'sla'"
    assert f"keep {told}" in sage_inductor.report()[0].reason


def test_a_rule_that_fits_comes_before_the_calls_own_keep():
    q, k, v = tokens(400), tokens(400), tokens(400)
    with torch.no_grad(), config.patch(emulate=True, policy=[{"recipe": RECIPE, "keep": KEEP}]):
        out = sage_inductor.attention(q, k, v, recipe="sage1", keep=SLA)
    assert torch.equal(out, by_selected(q, k, v, KEEP)[0])


def test_an_attention_call_refuses_what_a_policy_does():
    x = tokens(400)
    what = "sage_inductor.attention: beside keep, recipe must be the name of one, got 'auto'"
    with pytest.raises(ValueError, match=what):
        sage_inductor.attention(x, x, x, keep=0.3)
    what = r"sage_inductor.attention: rule sla takes .*, got tau"
    with pytest.raises(ValueError, match=what):
        sage_inductor.attention(x, x, x, recipe=RECIPE, keep={"rule": "sla", "tau": 1})


# -- with the branches that models are trained with --


def of_sla(q, k, v, proj):
    """In float64, a row of q at a time."""
    q, k, v = (
        q.double(),
        *(x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v)),
    )
    weights = torch.einsum("bhid,bhjd->bhij", q.softmax(-1), k.softmax(-1))
    return proj((weights @ v / (1e-5 + weights.sum(-1, keepdim=True))).float()).double()


def of_vsa(q, k, v, gate, block=64):
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    q_mean, k_mean, v_mean = (
        torch.stack([each.double().mean(2) for each in x.split(block, 2)], 2) for x in (q, k, v)
    )
    out = (q_mean @ k_mean.mT * q.shape[3] ** -0.5).softmax(-1) @ v_mean
    rows = [out[:, :, i // block] for i in range(q.shape[2])]
    return gate.double() * torch.stack(rows, 2)


@pytest.mark.parametrize("way", ["eager", "backend"])
@pytest.mark.parametrize("name", ["sparse_linear_attention", "video_sparse_attention"])
def test_the_branches_of_trained_models_are_added(name, way):
    q, k, v = (tokens(330, H=H) for H in (4, 2, 2))
    proj, gate = torch.nn.Linear(64, 64), torch.randn_like(q)
    keep = SLA if name == "sparse_linear_attention" else TRAINED["vsa"]
    branch = proj if keep is SLA else gate

    def attend(q, k, v):
        return getattr(functional, name)(q, k, v, branch, keep, recipe=RECIPE)

    run = torch.compile(attend, backend="sage", fullgraph=True) if way == "backend" else attend
    with torch.no_grad(), config.patch(emulate=True):
        out = run(q, k, v)
        added = of_sla(q, k, v, proj) if keep is SLA else of_vsa(q, k, v, gate)
        expected = by_selected(q, k, v, keep)[0].double() + added
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
    assert "keep {'rule'" in sage_inductor.report()[0].reason


def test_the_coarse_branch_is_of_the_cubes_of_a_layout():
    keep = {**IN_CUBES[1], "layout": [4, 8, 12]}
    q, k, v = (tokens(512, H=H) for H in (4, 2, 2))
    gate = torch.randn_like(q)
    with torch.no_grad(), config.patch(emulate=True):
        out = functional.video_sparse_attention(q, k, v, gate, keep, recipe=RECIPE)
        selected, perm = by_selected(q, k, v, keep)[0].double(), order_of(q, keep)
        added = of_vsa(*(x.index_select(2, perm) for x in (q, k, v, gate)))
        with pytest.raises(ValueError, match="layout must be of q's 511 tokens, got 512"):
            short = (x[:, :, 1:] for x in (q, k, v, gate))
            functional.video_sparse_attention(*short, keep, recipe=RECIPE)
    found = (out.double() - selected).index_select(2, perm)
    torch.testing.assert_close(found, added, rtol=1e-4, atol=1e-4)


def test_the_projection_of_16_bits_is_in_the_models_precision():
    """Its weights are fp32; autocast computes it in bf16, as where it was trained."""
    q, k, v = (tokens(330, H=H).bfloat16() for H in (2, 2, 2))
    proj = torch.nn.Linear(64, 64)
    with torch.no_grad(), config.patch(emulate=True):
        out = functional.sparse_linear_attention(q, k, v, proj, SLA, recipe=RECIPE)
        expected = by_selected(q, k, v, SLA)[0].double() + of_sla(q, k, v, proj)
    assert out.dtype == torch.bfloat16 and support.relative_l1(out, expected) < 1e-2


# -- whichever way it is run --


def plainly(q, k, v, keep):
    """Attention by the lists that such a rule selects, and by its tail, in float64."""
    _, lists = by_selected(q, k, v, keep)
    perm, (block_q, block), N = order_of(q, keep), lists.size, q.shape[2]
    places = torch.arange(N) if perm is None else perm.argsort()
    k, v = (
        x.double().repeat_interleave(q.shape[1] // x.shape[1], 1)[:, :, places.argsort()]
        for x in (k, v)
    )
    M = lists.kv_indices.shape[3]
    named = torch.arange(M) < lists.kv_num_blocks[..., None]
    named = torch.zeros_like(named).scatter(3, lists.kv_indices.long(), named)
    named = named[:, :, places // block_q]  # [B, H, N, M]
    keys, values, added, seen = k, v, torch.zeros(N), named.repeat_interleave(block, 3)[..., :N]
    if (tail := lists.tail_block) is not None:
        (k_means, v_means) = (torch.stack([y.mean(2) for y in x.split(tail, 2)], 2) for x in (k, v))
        keys, values = torch.cat([k, k_means], 2), torch.cat([v, v_means], 2)
        counts = [len(x) for x in torch.arange(N).split(tail)]
        added = torch.cat([added, torch.tensor(counts).log()])
        others = ~named.repeat_interleave(block // tail, 3)[..., : len(counts)]
        seen = torch.cat([seen, others], 3)
    scores = q.double() @ keys.mT * q.shape[3] ** -0.5 + added
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values


EACH_WAY = {name: TRAINED[name] for name in ("sla", "vsa, compete", "sol", "error, a tail")}
EACH_WAY |= {
    "vsa": {"rule": "vsa", "sparsity": 0.7},
    "tail": TAIL,
    "cubes, a tail": {**CUBES, "tail": True},
    "by head": KEEPS_BY_HEAD["sla"],
    "by head, a tail": KEEPS_BY_HEAD["tail"],
}


def of_heads(x):
    """q of 4 heads, k and v of 2, of x [B, 8, N, D]."""
    return x.split([4, 2, 2], 1)


def attends(x):
    return sdpa(*of_heads(x), enable_gqa=True)


def by_stages(x):
    """One trace for all stages."""
    policy = [{"stage": name, "recipe": RECIPE, "keep": keep} for name, keep in EACH_WAY.items()]
    given = {"sage.policy": policy, "sage.emulate": True}
    with support.op_by_op():
        compiled = torch.compile(attends, backend="sage", options=given, fullgraph=True)
        for name in EACH_WAY:
            with sage_inductor.stage(name):
                yield name, x, compiled(x)


def each_of(names):
    """A function of one call for each of these."""
    return lambda x: [
        sage_inductor.attention(*of_heads(x), enable_gqa=True, recipe=RECIPE, keep=EACH_WAY[name])
        for name in names
    ]


def at_lengths(run, names, lengths):
    for N in lengths:
        x = tokens(N, 1, 8).bfloat16()
        torch._dynamo.mark_dynamic(x, 2)
        yield from ((name, x, out) for name, out in zip(names, run(x), strict=True))


def by_one_graph(x):
    """Through AOTAutograd, where what selects blocks opens."""
    names = ["error, a tail", "by head", "by head, a tail"]
    counters.clear()
    with config.patch(emulate=True), support.op_by_op(split=True):
        run = torch.compile(each_of(names), backend="sage", fullgraph=True)
        yield from at_lengths(run, names, (300, 700, 129))
    assert counters["stats"]["unique_graphs"] == 1


def of_any_length(names):
    """A program for all lengths of more than one block: torch takes no guard on their number."""
    module = torch.nn.Module()
    module.forward = each_of(names)
    shapes = ({2: torch.export.Dim("N", min=129, max=4000)},)
    with config.patch(emulate=True):
        return torch.export.export(module, (tokens(300, 1, 8).bfloat16(),), dynamic_shapes=shapes)


def exported_once(x):
    names = ["sla", "vsa, compete", "tail", "by head"]
    yield from at_lengths(of_any_length(names).module(), names, (513,))


def under_autocast(x):
    """A rule that rounds to q's dtype rounds to autocast's."""
    x = tokens(1500, 1, 8) + 4
    run = torch.compile(attends, backend="sage", options=options(EACH_WAY["vsa"]))
    with support.op_by_op(), torch.autocast("cpu", torch.bfloat16):
        yield "vsa", x.bfloat16(), run(x)


@pytest.mark.parametrize("way", [by_stages, by_one_graph, exported_once, under_autocast])
@torch.no_grad()
def test_whichever_way_it_is_run_it_is_attention_by_the_lists_that_are_selected(way):
    for name, x, out in way(tokens(508, 1, 8).bfloat16()):
        inputs = *of_heads(x), EACH_WAY[name]
        assert torch.equal(out, by_selected(*inputs)[0]), name
        assert support.relative_l1(out, plainly(*inputs)) < 0.03, name


@pytest.mark.sweep
@torch.no_grad()
def test_a_package_holds_for_other_lengths_than_its_examples(generated, tmp_path):
    """It checks no guard: each block of 300 keys has two means, the last one of 513 has one."""
    names, path = ["error, a tail", "by head"], str(tmp_path / "model.pt2")
    with config.patch(emulate=True):
        torch._inductor.aoti_compile_and_package(of_any_length(names), package_path=path)
    for name, x, out in at_lengths(torch._inductor.aoti_load_package(path), names, (513, 129)):
        assert support.relative_l1(out, by_selected(*of_heads(x), EACH_WAY[name])[0]) < 1e-2


# -- calls that it is not for --


def in_blocks(q, k, v):
    counts = torch.ones(1, 1, 2, dtype=torch.int32)
    indices = torch.zeros(1, 1, 2, 2, dtype=torch.int32)
    blocks = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=128, seq_lengths=(256, 256))
    return flex_attention(q, k, v, block_mask=blocks)


REFUSED = {
    "causal": (
        lambda q, k, v: sdpa(q, k, v, is_causal=True),
        "blocks are selected where there is no mask, got causal",
    ),
    "mask": (
        lambda q, k, v: sdpa(q, k, v, attn_mask=q[:1, :1, :1, :1] > -9),
        "blocks are selected where there is no mask, got bool[1, 1, 1, 1]",
    ),
    "lists": (in_blocks, "blocks are selected where there is no mask, got blocks of 128 x 128"),
    "cross": (
        lambda q, k, v: sdpa(q, k[:, :, 1:], v[:, :, 1:]),
        "blocks are selected for self-attention, got 256 queries and 255 keys",
    ),
    "sink": (
        lambda q, k, v: torch.cat([q @ k.mT, q[..., :1]], -1).softmax(-1)[..., :-1] @ v,
        "blocks are selected where there is no mask, got a sink",
    ),
    "lse": (
        lambda q, k, v: sage_inductor.attention(q, k, v, return_lse=True)[1],
        "blocks are selected where no logsumexp is returned",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_call_that_it_is_not_for_stays_with_the_reason(case):
    function, reason = REFUSED[case]
    _, _, (site,) = rewritten(function, *(tokens(256) for _ in range(3)), keep=0.3)
    assert not site.rewritten and site.reason == f"{reason} (rule 1 of the policy)"
    assert 'without "keep"' in site.why.cause.remedy


def test_a_trained_rule_is_for_positive_scales():
    _, _, (site,) = rewritten(
        lambda q, k, v: sdpa(q, k, v, scale=-0.5), *(tokens(256) for _ in range(3)), keep=SLA
    )
    assert site.reason == (
        "rule sla selects blocks where scale is above 0, got -0.5 (rule 1 of the policy)"
    )


def test_training_stays_with_the_reason():
    q, k, v = (tokens(256).requires_grad_() for _ in range(3))
    found = sage_inductor.explain(sdpa, options=options(0.3, **{"sage.force": True}))(q, k, v)
    reason = "training: block lists have no backward here (rule 1 of the policy)"
    assert [site.reason for site in found] == [reason]
    with pytest.raises(SageRefused, match="block lists have no backward"):
        given = options(0.3, **{"sage.force": True, "sage.strict": True})
        torch.compile(sdpa, backend="sage", options=given)(q, k, v)


def test_a_recipe_without_a_kernel_for_lists_stays_with_the_reason():
    inputs = tokens(256), tokens(256), tokens(256)
    with torch.no_grad():
        (site,) = sage_inductor.explain(sdpa, options=options(0.3, "sage3"))(*inputs)
    assert site.reason.startswith("no kernel for block lists with qk='nvfp4'; keep 0.3")


def test_lengths_that_may_differ_have_a_graph_for_those_that_are_one():
    """Two symbols, which automatic dynamic shapes give to q and k of one length, too."""
    counters.clear()
    run = torch.compile(sdpa, backend="sage", options=options(KEEP), fullgraph=True)
    with torch.no_grad(), support.op_by_op(split=True):
        for n_q, n_kv in ((256, 300), (300, 300), (700, 700), (200, 300)):
            q, k, v = tokens(n_q), tokens(n_kv), tokens(n_kv)
            for x in (q, k, v):
                torch._dynamo.mark_dynamic(x, 2)
            expected = by_selected(q, k, v, KEEP)[0] if n_q == n_kv else sdpa(q, k, v)
            assert support.relative_l1(run(q, k, v), expected) < 1e-5, (n_q, n_kv)
    assert counters["stats"]["unique_graphs"] == 2
    reason = "blocks are selected for self-attention, got s"
    assert sage_inductor.report()[0].reason.startswith(reason)


# -- compiled --


class Layer(torch.nn.Module):
    """Joint attention of N tokens [B, N, C]."""

    def __init__(self, C=128, D=64):
        super().__init__()
        self.D = D
        self.qkv, self.out = torch.nn.Linear(C, 3 * C), torch.nn.Linear(C, C)

    def heads(self, x):
        return (y.unflatten(-1, (-1, self.D)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))

    def forward(self, x, attend=sdpa):
        return x + self.out(attend(*self.heads(x)).transpose(1, 2).flatten(2))


OF_TWO_HEADS = {
    "pooled": {"top_k": [0.1, 0.6], "similarity": 0},
    "sla": {"rule": "sla", "sparsity": [0.9, 0.3]},
}


def by_hand(layer, x, recipe=RECIPE, keep=KEEP):
    return layer(x, lambda q, k, v: by_selected(q, k, v, keep, recipe)[0])


@pytest.mark.sweep
@pytest.mark.parametrize("keep", [KEEP, *TRAINED.values(), *OF_TWO_HEADS.values()])
@torch.no_grad()
def test_inductor_compiles_it_once_for_every_length(generated, keep):
    """test_export.py has a package built and run. The whole of it, by one graph for all lengths above a block of queries, tails among them."""
    layer = Layer().eval()
    compiled = torch.compile(
        layer, backend="sage", options=options(keep), fullgraph=True, dynamic=True
    )
    for N in (300, 512, 700, 129):
        x = tokens(N, 2, 1, 128)[:, 0]
        assert support.relative_l1(compiled(x), by_hand(layer, x, keep=keep)) < 1e-5
    (told,) = sage_inductor.report().to_dicts()
    assert (told["recipe"], told["mask"]) == (RECIPE, "none")
    assert json.loads(json.dumps(told["keep"])) == keep


def exported(layer, N: int, is_dynamic: bool = True) -> torch.export.ExportedProgram:
    shapes = {"x": {1: torch.export.Dim("N", min=2, max=2000)} if is_dynamic else None}
    return torch.export.export(layer, (tokens(N, 2, 1, 128)[:, 0],), dynamic_shapes=shapes)


@pytest.mark.parametrize("given", [options(KEEP), {"sage.recipe": "sage3", "sage.emulate": True}])
@torch.no_grad()
def test_a_package_is_not_made_by_an_example_of_one_block(given):
    """It would be for one block alone: its code is not that of two."""
    for N, is_dynamic, rewritten in (
        (99, True, False),
        (128, True, False),
        (129, True, True),
        (128, False, True),
    ):
        program = exported(Layer().eval(), N, is_dynamic)
        (site,) = sage_inductor.rewrite(program, options=given)
        assert site.rewritten == rewritten, site.reason
        assert rewritten or site.reason == (
            f"the example of a package's dynamic length must be more than 128, got {N}"
        )


@torch.no_grad()
@pytest.mark.parametrize("built", [False, pytest.param(True, marks=pytest.mark.sweep)])
def test_a_package_of_a_layout_computes_in_cubes(built, generated, tmp_path):
    """Inductor (torch 2.13) computes `x.index_copy(2, i, x)` in place, and reads rows that it has
    written: built, the emulation must not say so."""
    layer = Layer().eval()
    program = exported(layer, 508, is_dynamic=False)
    (site,) = sage_inductor.rewrite(program, options=options(CUBES))
    assert site.rewritten and site.decision.selection.layout == (4, 9, 12)
    run = support.opened(program)
    if built:
        path = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "model.pt2")
        )
        package = torch._inductor.aoti_load_package(path)
        run = lambda x: (package(x),)  # noqa: E731
    x = tokens(508, 2, 1, 128)[:, 0]
    expected = layer(x, lambda q, k, v: by_selected(q, k, v, CUBES)[0])
    assert support.relative_l1(run(x)[0], expected) < 1e-3


@torch.no_grad()
@pytest.mark.parametrize(
    "recipe, keep",
    [
        (RECIPE, OF_TWO_HEADS["sla"]), (RECIPE, TRAINED["sol"]), (RECIPE, TAIL),
        *(support.swept(RECIPE, keep) for keep in (OF_TWO_HEADS["pooled"], KEEP, SLA)),
        *(support.swept(RECIPE, TRAINED[name]) for name in ("vsa, compete", "error")),
        support.swept("sage2-8b-rotated", KEEP), support.swept("sage2-8b-rotated", TAIL),
    ],
)  # fmt: skip
def test_what_a_package_is_made_of_selects_as_the_model_does(recipe, keep):
    """test_export.py has one built and run. Most of the time attention is opened, as for each rule:
    test_rules.py has one graph for all lengths of each rule."""
    layer = Layer().eval()
    program = exported(layer, 129)
    (site,) = sage_inductor.rewrite(program, options=options(keep, recipe))
    assert json.loads(json.dumps(site.decision.selection.given())) == keep
    assert site.recipe == recipe
    run = support.opened(program)
    for N in (300, 2, 64, 65, 129):
        x = tokens(N, 2, 1, 128)[:, 0]
        assert support.relative_l1(run(x)[0], by_hand(layer, x, recipe, keep)) < 1e-3, N


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize(
    "keep", [KEEP, TAIL, [0.1, 0.3, 0.3, 0.2]], ids=["dropped", "tail", "by head"]
)
@torch.no_grad()
def test_a_gpu_selects_and_computes_what_its_ops_do_one_by_one(mode, keep):
    """With new data in one CUDA graph."""
    layer = Layer(512, 128).cuda().bfloat16().eval()
    given = options(keep, **{"sage.emulate": False, "sage.force": True, "sage.mode": mode})
    compiled = torch.compile(layer, backend="sage", options=given, fullgraph=True)
    for _ in range(4):
        x = tokens(3000, 2, 1, 512)[:, 0].cuda().bfloat16()
        out = compiled(x).clone()
        expected, dense = by_hand(layer, x, keep=keep), layer(x)
        assert support.relative_l1(out, expected) < 0.2 * support.relative_l1(out, dense)
    assert sage_inductor.report()[0].recipe == RECIPE


@pytest.mark.gpu
@torch.no_grad()
def test_a_package_on_a_gpu_selects_at_other_lengths(tmp_path, one_libstdcxx):
    """The lists are new with each."""
    layer = Layer(512, 128).cuda().bfloat16().eval()

    def given(N):
        return tokens(N, 2, 1, 512)[:, 0].cuda().bfloat16()

    program = torch.export.export(
        layer, (given(3000),), dynamic_shapes=({1: torch.export.Dim("N", min=2, max=8192)},)
    )
    of_gpu = options(TAIL, **{"sage.emulate": False, "sage.force": True})
    path = sage_inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "model.pt2"), options=of_gpu
    )
    assert sage_inductor.report()[0].recipe == RECIPE
    package = torch._inductor.aoti_load_package(path)
    for N in (3000, 640, 2049):
        x = given(N)
        out, expected, dense = package(x), by_hand(layer, x, keep=TAIL), layer(x)
        assert support.relative_l1(out, expected) < 0.2 * support.relative_l1(out, dense)


def test_batches_that_share_k_and_v_select_blocks_each_for_itself():
    """They are not stacked: the selector compares queries and keys of one length."""
    q, k, v = torch.randn(3, 2, 320, 2, 32).transpose(2, 3)
    k, v = k[:1], v[:1]

    def attend(q, k, v):
        k, v = (x.expand(q.shape[0], -1, -1, -1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous()

    compiled = torch.compile(attend, backend="sage", options=options(0.3))
    found, expected = compiled(q, k, v), compiled(q, *(x.repeat(2, 1, 1, 1) for x in (k, v)))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not any("share k and v" in site.reason for site in sage_inductor.report())
