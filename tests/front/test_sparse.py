"""`keep` of a policy's rule: which calls compute selected blocks of keys, and that they do.

Shapes: B batch, H heads, N sequence, D head_dim.
"""

import pytest
import support
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import sage_inductor
from sage_inductor import SageRefused, config
from sage_inductor.choose.decide import rewrite
from sage_inductor.ops.sparse.selector import BLOCK_SIZE, Selection
from sage_inductor.ops.visibility import BlockLists
from sage_inductor.options import Settings
from sage_inductor.policy import from_python

RECIPE = "sage2-8b-per-token"
KEEP = {"top_k": 0.3, "similarity": 0, "dense_first": 70}
sdpa = F.scaled_dot_product_attention


def options(keep, recipe=RECIPE, **given) -> dict:
    return {"sage.emulate": True, "sage.policy": [{"recipe": recipe, "keep": keep}], **given}


def tokens(N, B=1, H=4, D=64):
    """[B, H, N, D], each much like the one before it."""
    return torch.randn(B, H, N, D).cumsum(2) / 4


def by_selected(q, k, v, keep, recipe=RECIPE):
    """What such a rule asks for, by the two ops."""
    (rule,) = from_python([{"recipe": recipe, "keep": keep}])
    scale = q.shape[3] ** -0.5
    found = torch.ops.sage.select_blocks(q, k, scale, *rule.keep.arguments, *BLOCK_SIZE)
    tail_block = rule.keep.tail_block if rule.keep.tail else None
    lists = BlockLists(*found, None, None, *BLOCK_SIZE, tail_block)
    out, _ = support.sdpa(q, k, v, scale=scale, recipe=recipe, out_bnhd=False, **lists._asdict())
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


@pytest.mark.parametrize("tail_block", [32, 64])
def test_the_blocks_that_are_not_selected_may_have_a_tail(tail_block):
    """Which brings the result nearer to attention. The report says so."""
    q, k, v = tokens(700), tokens(700, H=2), tokens(700, H=2)
    keep = KEEP | {"tail": True} | ({"tail_block": 32} if tail_block == 32 else {})
    out, graph, (site,) = rewritten(
        lambda q, k, v: sdpa(q, k, v, enable_gqa=True), q, k, v, keep=keep
    )
    assert torch.equal(out, by_selected(q, k, v, keep)[0])
    assert support.calls(graph).endswith(f"None, None, 128, 64, {tail_block})")
    assert site.reason == f"emulated; keep {keep} (rule 1 of the policy)"
    exact = sdpa(q, k, v, enable_gqa=True)
    dropped = by_selected(q, k, v, KEEP)[0]
    assert support.relative_l2(out, exact) < 0.9 * support.relative_l2(dropped, exact)


def test_a_recipe_without_a_tail_stays_and_says_why():
    keep, x = KEEP | {"tail": True}, tokens(300)
    policy = from_python([{"recipe": "sage2-4b", "keep": keep}])
    sites = []
    support.run_seen(
        sdpa,
        x,
        x,
        x,
        see=lambda gm: sites.extend(rewrite(gm, Settings(emulate=True, policy=policy))),
    )
    assert "no kernel for a tail with qk='int4'" in sites[0].reason and sites[0].recipe is None


def test_to_keep_all_is_the_dense_call():
    q, k, v = tokens(500), tokens(500), tokens(500)
    out, graph, (site,) = rewritten(sdpa, q, k, v, keep=1)
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


def test_lengths_that_may_differ_are_not_taken_for_one():
    """Two symbols, of one value today."""
    q, k, v = tokens(256), tokens(300), tokens(300)
    for x in (q, k, v):
        torch._dynamo.mark_dynamic(x, 2)
    _, _, (site,) = rewritten(sdpa, q, k, v, keep=0.3)
    assert site.reason.startswith("blocks are selected for self-attention, got s")


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


def by_hand(layer, x, recipe=RECIPE, keep=KEEP):
    return layer(x, lambda q, k, v: by_selected(q, k, v, keep, recipe)[0])


@pytest.mark.sweep
@torch.no_grad()
def test_inductor_compiles_it_once_for_every_length(generated):
    """test_export.py has a package built and run. The whole of it, by one graph for all lengths above a block of queries, tails among them."""
    layer = Layer().eval()
    compiled = torch.compile(
        layer, backend="sage", options=options(KEEP), fullgraph=True, dynamic=True
    )
    for N in (300, 512, 700, 129):
        x = tokens(N, 2, 1, 128)[:, 0]
        assert support.relative_l1(compiled(x), by_hand(layer, x)) < 1e-5
    (told,) = sage_inductor.report().to_dicts()
    assert (told["recipe"], told["keep"], told["mask"]) == (RECIPE, KEEP, "none")


def exported(layer, N: int, is_dynamic: bool = True) -> torch.export.ExportedProgram:
    shapes = {"x": {1: torch.export.Dim("N", min=2, max=2000)} if is_dynamic else None}
    return torch.export.export(layer, (tokens(N, 2, 1, 128)[:, 0],), dynamic_shapes=shapes)


@pytest.mark.parametrize("given", [options(KEEP), {"sage.recipe": "sage3", "sage.emulate": True}])
@torch.no_grad()
def test_a_package_is_not_made_by_an_example_of_one_block(given):
    """It would be for one block alone: its code is not that of two."""
    for N, is_dynamic, rewritten in ((128, True, False), (129, True, True), (128, False, True)):
        program = exported(Layer().eval(), N, is_dynamic)
        (site,) = sage_inductor.rewrite(program, options=given)
        assert site.rewritten == rewritten, site.reason
        assert rewritten or site.reason == (
            "the example of a package's dynamic length must be more than 128, got 128"
        )


@torch.no_grad()
@pytest.mark.parametrize(
    "recipe, tail",
    [(RECIPE, {}), (RECIPE, {"tail": True}), support.swept("sage2-8b-rotated", {"tail": True})],
)
def test_what_a_package_is_made_of_selects_as_the_model_does(recipe, tail):
    """test_export.py has one built and run."""
    layer, keep = Layer().eval(), KEEP | tail
    program = exported(layer, 129)
    (site,) = sage_inductor.rewrite(program, options=options(keep, recipe))
    assert site.decision.selection == Selection(**keep) and site.recipe == recipe
    run = support.opened(program)
    for N in (300, 2, 64, 65, 129):
        x = tokens(N, 2, 1, 128)[:, 0]
        assert support.relative_l1(run(x)[0], by_hand(layer, x, recipe, keep)) < 1e-3, N


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("tail", [{}, {"tail": True}], ids=["dropped", "tail"])
@torch.no_grad()
def test_a_gpu_selects_and_computes_what_its_ops_do_one_by_one(mode, tail):
    """With new data in one CUDA graph."""
    layer, keep = Layer(512, 128).cuda().bfloat16().eval(), KEEP | tail
    given = options(keep, **{"sage.emulate": False, "sage.force": True, "sage.mode": mode})
    compiled = torch.compile(layer, backend="sage", options=given, fullgraph=True)
    for _ in range(4):
        x = tokens(3000, 2, 1, 512)[:, 0].cuda().bfloat16()
        out = compiled(x).clone()
        expected, dense = by_hand(layer, x, keep=keep), layer(x)
        assert support.relative_l1(out, expected) < 0.2 * support.relative_l1(out, dense)
    assert sage_inductor.report()[0].recipe == RECIPE


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
