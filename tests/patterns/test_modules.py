"""Modules that Dynamo leaves as one call: written around one attention, they compute what they did.

Every module is captured as Dynamo shows it, each Call found in it is replaced by SDPA, and the
graph's values and gradients are compared with eager's. Rounding differs by the order of sums: 1e-12
in float64 (1e-5 in float32). Update the golden graphs with EXPECTTEST_ACCEPT=1.
"""

import copy
import functools
import inspect
import operator
import re

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from pairs import chosen, pairs
from support import calls, placeholders, relative_l1, run_seen, valued, written
from torch import nn
from torch.utils._pytree import tree_leaves

from sage_inductor.choose.decide import rewrite
from sage_inductor.ops.visibility import CAUSAL, FULL
from sage_inductor.options import Settings
from sage_inductor.patterns import modules
from sage_inductor.patterns.graph import GraphIndex, op_name, value_of
from sage_inductor.patterns.modules import find

B, L, S, E, H = 3, 7, 5, 16, 4
DEAD = ("getitem", "multi_head_attention_forward", "_transformer_encoder_layer_fwd", "expand")
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, on masks of two dtypes


def with_sdpa(gm) -> list:
    """Replace what `find` finds by SDPA; the Calls. Refused ones leave the graph as it was."""
    found, index = [], GraphIndex(gm.graph)
    for node in list(gm.graph.nodes):
        before = written(gm.graph)
        call = find(node, index)
        if call is None:
            assert written(gm.graph) == before
            continue
        found.append(call)
        assert call.node is node
        if call.refused or call.dropout_p != 0:
            call.emit.undo()
            assert written(gm.graph) == before
            continue
        out = call.emit(
            F.scaled_dot_product_attention, call.q, call.k, call.v, call.attn_mask,
            is_causal=call.band == CAUSAL,
        )  # fmt: skip
        was, now = value_of(node), value_of(result := call.finish(out))
        assert now.shape == was.shape and now.dtype == was.dtype
        assert now.is_contiguous()  # as eager's; the fake of the fast path says src's strides
        assert call.out.shape == value_of(out).shape and call.out.dtype == value_of(out).dtype
        assert call.out.requires_grad == value_of(out).requires_grad
        assert call.out.transpose(1, 2).is_contiguous()
        node.replace_all_uses_with(result)
    for node in reversed(gm.graph.nodes):
        if op_name(node) in DEAD and not node.users:
            gm.graph.erase_node(node)
    gm.graph.lint()
    gm.recompile()
    return found


def capture(function, *inputs, **compile_options):
    """(what the compiled function returns, its Calls, its graphs)"""
    found, graphs = [], []

    def see(gm):
        for each in gm.modules():
            if isinstance(each, torch.fx.GraphModule):
                found.extend(with_sdpa(each))
        graphs.append(gm)

    return run_seen(function, *inputs, see=see, **compile_options), found, graphs


def check(module, *inputs, dtype=torch.float64, **kwargs):
    """The module's values and gradients, with SDPA inside, are eager's; its Calls."""

    @functools.cache  # one tensor stays one
    def cast(x):
        return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    def forward(module):
        return lambda *inputs: first(module(*inputs, **kwargs))

    module, inputs = module.to(dtype), [cast(x) for x in inputs]
    kwargs = {name: cast(x) for name, x in kwargs.items()}
    with torch.no_grad():
        for parameter in module.parameters():  # MHA starts with biases of 0
            parameter.copy_(torch.randn_like(parameter) / 4)
    other = copy.deepcopy(module)
    actual, found, _ = capture(forward(module), *inputs)
    expected = forward(other)(*inputs)
    tolerance = dict.fromkeys(("rtol", "atol"), 1e-12 if dtype == torch.float64 else 1e-5)
    torch.testing.assert_close(actual, expected, **tolerance)
    if expected.requires_grad:
        cotangent = torch.randn_like(expected)
        actual.backward(cotangent)
        expected.backward(cotangent)
        for ours, theirs in zip(module.parameters(), other.parameters()):
            torch.testing.assert_close(ours.grad, theirs.grad, **tolerance)
    return found


def first(result):
    return result[0] if isinstance(result, tuple) else result


def one(found, **fields):
    (call,) = found
    assert call.refused is None, call.refused
    for name, value in fields.items():
        assert getattr(call, name) == value, name
    return call


def attention(module, shape=(B, L), **kwargs):
    x = torch.randn(*shape, E)
    return check(module, x, x, x, **kwargs)


CAUSAL_MASK = torch.ones(L, L, dtype=torch.bool).triu(1)
PADDED = torch.arange(L) >= torch.tensor([L, 4, 1])[:, None]  # [B, L]
PER_HEAD = torch.rand(B * H, L, L) > 0.6
PER_HEAD[:, :, 0] = False  # every row sees something
FLOAT, FLOAT_PADDING, FLOAT_PER_HEAD = map(torch.randn, ((L, L), (B, L), (B * H, L, L)))
MASKS = {
    "none": (None, None, None),
    "bool": (CAUSAL_MASK, None, (torch.bool, (1, 1, L, L))),
    "float": (FLOAT, None, (torch.float64, (1, 1, L, L))),
    "bool per head": (PER_HEAD, None, (torch.bool, (B, H, L, L))),
    "float per head": (FLOAT_PER_HEAD, None, (torch.float64, (B, H, L, L))),
    "padding": (None, PADDED, (torch.bool, (B, 1, 1, L))),
    "float padding": (None, FLOAT_PADDING, (torch.float64, (B, 1, 1, L))),
    "bool, padding": (CAUSAL_MASK, PADDED, (torch.bool, (B, 1, L, L))),
    "bool per head, padding": (PER_HEAD, PADDED, (torch.bool, (B, H, L, L))),
    "float, padding": (FLOAT, PADDED, (torch.float64, (B, 1, L, L))),
    "bool, float padding": (CAUSAL_MASK, FLOAT_PADDING, (torch.float64, (B, 1, L, L))),
    "float, float padding": (FLOAT, FLOAT_PADDING, (torch.float64, (B, 1, L, L))),
}


# nn.MultiheadAttention and the encoder layer warn about masks of two dtypes, which ends the graph.
ONE_DTYPE = [name for name in MASKS if name not in ("float, padding", "bool, float padding")]

# The fast path hides where a float mask is not 0.
HIDDEN, HIDDEN_PADDING = FLOAT.relu() * CAUSAL_MASK, FLOAT_PADDING.relu() * PADDED
FAST_PATH_MASKS = {
    name: MASKS[name]
    for name in ONE_DTYPE if "float" not in name
} | {
    "float": (HIDDEN, None, (torch.bool, (1, 1, L, L))),
    "-inf": (torch.zeros(L, L).masked_fill(CAUSAL_MASK, -torch.inf), None, (torch.bool, (1, 1, L, L))),
    "float per head": (PER_HEAD.float() / 2, None, (torch.bool, (B, H, L, L))),
    "float padding": (None, HIDDEN_PADDING, (torch.bool, (B, 1, 1, L))),
    "float, float padding": (HIDDEN, HIDDEN_PADDING, (torch.bool, (B, H, L, L))),
}  # fmt: skip


def mask_of(call):
    mask = value_of(call.attn_mask)
    return None if mask is None else (mask.dtype, tuple(mask.shape))


# -- nn.MultiheadAttention ----------------------------------------------------------------------


class Direct(nn.MultiheadAttention):
    """Whoever calls F.multi_head_attention_forward hands it bool masks as they are."""

    def forward(self, x, key, value, attn_mask=None, key_padding_mask=None, need_weights=True):
        return F.multi_head_attention_forward(
            query=x, key=key, value=value, embed_dim_to_check=E, num_heads=H,
            in_proj_weight=self.in_proj_weight, in_proj_bias=self.in_proj_bias,
            bias_k=self.bias_k, bias_v=self.bias_v, add_zero_attn=self.add_zero_attn,
            dropout_p=0.5, training=False, need_weights=need_weights,
            out_proj_weight=self.out_proj.weight, out_proj_bias=self.out_proj.bias,
            attn_mask=attn_mask, key_padding_mask=key_padding_mask,
        )  # fmt: skip


@pairs(
    lambda module, masks: module is Direct or masks in ONE_DTYPE,
    module=[Direct, nn.MultiheadAttention], masks=list(MASKS), need_weights=[True, False],
    dtype=[torch.float32, torch.float64],
)  # fmt: skip
def test_every_mask_becomes_sdpas(module, masks, need_weights, dtype):
    attn_mask, key_padding_mask, expected = MASKS[masks]
    given = dict(need_weights=need_weights, attn_mask=attn_mask, key_padding_mask=key_padding_mask)
    found = attention(module(E, H), (L, B), dtype=dtype, **given)
    call = one(found, band=FULL, dropout_p=0.0, spelling="nn.MultiheadAttention")
    if expected:
        expected = expected[0] if expected[0] == torch.bool else dtype, expected[1]
    assert mask_of(call) == expected


@pairs(
    kind=["self", "memory", "keys", "value", "kdim, vdim"], bias=[True, False],
    batch_first=[True, False], training=[True, False],
)  # fmt: skip
def test_every_projection(kind, bias, batch_first, training):
    sizes = {"kdim": 10, "vdim": 6} if kind == "kdim, vdim" else {}
    module = nn.MultiheadAttention(E, H, bias=bias, batch_first=batch_first, **sizes)
    shape, memory = ((B, L), (B, S)) if batch_first else ((L, B), (S, B))
    query = torch.randn(*shape, E)
    key = query if kind in ("self", "value") else torch.randn(*memory, sizes.get("kdim", E))
    value = torch.randn(*key.shape[:2], sizes.get("vdim", E))
    value = key if kind in ("self", "memory") else value
    found = check(module.train(training), query, key, value, average_attn_weights=False)
    call = one(found, dropout_p=0.0, attn_mask=None)
    assert value_of(call.q).shape == (B, H, L, E // H)
    linears = {"self": 1, "memory": 2}.get(kind, 3)
    assert sum(node.target is F.linear for node in call.emit.nodes) == linears + 1
    bases = {value_of(x)._base is not None for x in (call.q, call.k, call.v)}
    assert bases == {True}, "q, k and v are views, not copies"


@pytest.mark.parametrize("masks", ["none", "bool", "float per head", "padding", "float, padding"])
@pytest.mark.parametrize("appended", [{"add_bias_kv": True}, {"add_zero_attn": True}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str)  # fmt: skip
def test_what_is_appended_to_the_keys_is_seen_through_every_mask(appended, masks):
    attn_mask, key_padding_mask, _ = MASKS[masks]
    module = Direct(E, H, **appended)
    call = one(attention(module, (L, B), attn_mask=attn_mask, key_padding_mask=key_padding_mask))
    assert value_of(call.k).shape == (B, H, L + len(appended), E // H)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    "attn_mask, key_padding_mask", [(CAUSAL_MASK, None), (FLOAT, None), (FLOAT, FLOAT_PADDING)]
)
def test_the_causal_hint_counts_where_eager_follows_it(attn_mask, key_padding_mask, need_weights):
    given = dict(need_weights=need_weights, attn_mask=attn_mask, key_padding_mask=key_padding_mask)
    # Which FLOAT is not: the mask or the hint, the values tell which one counts.
    found = attention(nn.MultiheadAttention(E, H), (L, B), is_causal=True, **given)
    hinted = key_padding_mask is None and not need_weights
    call = one(found, band=CAUSAL if hinted else FULL)
    assert (call.attn_mask is None) == hinted


def test_a_padded_out_sample_attends_to_nothing():
    """eager: 0 with need_weights=False (as SDPA), NaN with need_weights=True."""
    everything = torch.tensor([False, False, True])[:, None].expand(B, L)
    module = nn.MultiheadAttention(E, H, batch_first=True)
    one(attention(module, key_padding_mask=everything, need_weights=False))
    x = torch.randn(B, L, E, dtype=torch.float64)
    (out, _), _, _ = capture(lambda x: (module(x, x, x, everything)[0], 0), x)
    assert module(x, x, x, everything)[0][2].isnan().all()
    torch.testing.assert_close(out[2], module.out_proj.bias.expand(L, E))


def test_attention_pooling_with_sizes_that_are_symbols():
    """As in CLIP's image encoder: one query, weights of three linears, the width read off x."""
    q, k, v, c = (nn.Linear(E, n) for n in (E, E, E, 10))

    def pool(x):
        return F.multi_head_attention_forward(
            query=x[:1], key=x, value=x, embed_dim_to_check=x.shape[-1], num_heads=H,
            in_proj_weight=None, in_proj_bias=torch.cat([q.bias, k.bias, v.bias]), bias_k=None,
            bias_v=None, add_zero_attn=False, dropout_p=0.0, out_proj_weight=c.weight,
            out_proj_bias=c.bias, use_separate_proj_weight=True, q_proj_weight=q.weight,
            k_proj_weight=k.weight, v_proj_weight=v.weight, need_weights=False,
        )[0]  # fmt: skip

    x = torch.randn(L, B, E)
    out, found, _ = capture(pool, x, dynamic=True)
    one(found)
    torch.testing.assert_close(out, pool(x))


@pytest.mark.parametrize("sum_of", [lambda m: m - 1 + 1, lambda m: torch.add(m, m, alpha=2)])
def test_a_mask_that_is_another_sum_than_merge_masks(sum_of):
    layer, x = encoder_layer().eval(), torch.randn(B, L, E)
    with torch.no_grad():
        out, found, _ = capture(lambda x, m: layer(x, None, sum_of(m)), x, PADDED.float())
        one(found)
        torch.testing.assert_close(out, layer(x, None, sum_of(PADDED.float())))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_float_mask_written_before_or_after_it_was_bool_stays_float(when):
    class Written(nn.MultiheadAttention):
        def forward(self, x, hidden):
            mask = torch.zeros_like(hidden, dtype=x.dtype)
            if when == "before":
                mask[:, 0] = 2 * x[0, 0, 0]
            mask = mask.masked_fill_(hidden, -torch.inf)
            if when == "after":
                mask[0] = 2 * x[0, 0, 0]
            return super().forward(x, x, x, attn_mask=mask)

    call = one(check(Written(E, H), torch.randn(L, B, E), CAUSAL_MASK))
    assert value_of(call.attn_mask).dtype == torch.float64


@pytest.mark.parametrize("kind", ["attention", "fast path"])
def test_a_bool_mask_that_is_used_again_is_read_as_it_was(kind):
    """Each module makes a float mask of it; the bool one changes before the attention."""

    fast = kind == "fast path"
    layer = (encoder_layer() if fast else nn.MultiheadAttention(E, H)).eval()
    x = torch.randn(B, L, E) if fast else torch.randn(L, B, E)

    def reused(x, hidden):
        mask = torch.zeros_like(hidden, dtype=x.dtype).masked_fill_(hidden, -torch.inf)
        hidden[:, 1:] = True  # through a view
        return layer(x, mask) if fast else layer(x, x, x, attn_mask=mask)[0]

    with torch.no_grad():
        out, (call,), _ = capture(reused, x, CAUSAL_MASK.clone())
        torch.testing.assert_close(out, reused(x, CAUSAL_MASK.clone()), rtol=1e-5, atol=1e-5)


UNREAD = {
    "averaged": lambda w: w.mean(),
    "detached": lambda w: w.detach(),
    "indexed": lambda w: w[:, None].expand(B, H, L, L).sum(-1),
    "its shape": lambda w: torch.zeros_like(w),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", UNREAD)
def test_weights_on_which_nothing_depends_are_not_used(name, dynamic):
    module, x = nn.MultiheadAttention(E, H).double(), torch.randn(L, B, E).double()

    def attend(x):
        out, weights = module(x, x, x, need_weights=True)
        UNREAD[name](weights)
        return out

    out, (call,), _ = capture(attend, x, dynamic=dynamic)
    assert call.refused is None, call.refused
    assert [op_name(node) for node in call.dead][-1:] == ["multi_head_attention_forward"]
    torch.testing.assert_close(out, attend(x))


# -- what is refused -----------------------------------------------------------------------------


def used_weights(module, x):
    out, weights = module(x, x, x)
    return out.sum() + weights.sum()


def only_weights(module, x):
    return module(x, x, x)[1]


def static_keys(module, x, N=S, **given):
    given = given or {"static_k": torch.zeros(B * H, N, E // H)}
    return F.multi_head_attention_forward(
        x, x, x, E, H, module.in_proj_weight, module.in_proj_bias, None, None, False, 0.0,
        module.out_proj.weight, module.out_proj.bias, static_v=torch.zeros(B * H, N, E // H),
        need_weights=False, **given,
    )[0]  # fmt: skip


def static_values(module, x):
    return static_keys(module, x, L, static_k=None)


def per_sample(module, x):
    return torch.func.vmap(lambda x: module(x, x, x)[0])(x[None])


def unbatched(module, x):
    return module(*[x[:, 0]] * 3)[0]


REFUSED = {
    unbatched: "^the input must have a batch, got 2 dimensions$",
    used_weights: "the attention weights are used",
    only_weights: "the output is not used",
    static_keys: "static_k and static_v are not supported",
    static_values: "static_k and static_v are not supported",
    per_sample: "inside a torch.func transform",
}


@pytest.mark.parametrize("function", REFUSED, ids=lambda f: f.__name__)
def test_what_is_refused_stays_as_it_was_and_says_why(function):
    module, x = nn.MultiheadAttention(E, H), torch.randn(L, B, E)
    out, (call,), _ = capture(lambda x: function(module, x), x)
    assert re.search(REFUSED[function], str(call.refused))
    torch.testing.assert_close(out, function(module, x))


def graph_of_mha(heads_given: bool) -> torch.fx.Node:
    graph, mode = torch.fx.Graph(), torch._subclasses.fake_tensor.FakeTensorMode()
    with mode:
        out, module = torch.empty(L, B, E), nn.MultiheadAttention(E, H)
    weights = map(mode.from_tensor, (module.in_proj_weight, module.out_proj.weight))
    values = dict(zip(("x", "w", "w_out", "heads"), (out, *weights, H)))
    x, w, w_out, heads = placeholders(graph, values)
    heads = heads if heads_given else H
    given = x, x, x, E, heads, w, None, None, None, False, 0.0, w_out, None
    return valued(graph.call_function(F.multi_head_attention_forward, given), (out, None))


@pytest.mark.parametrize(
    "reads_out, heads_given, reason",
    [(False, False, "the output is not used, or as one with the attention weights"),
     (True, False, "(out, weights) is used as a tuple, by output"),
     (True, True, "num_heads must be known when compiling, got heads")],
)  # fmt: skip
def test_a_tuple_that_is_passed_on_and_heads_that_are_given_are_refused(
    reads_out, heads_given, reason
):
    out = mha = graph_of_mha(heads_given)
    graph = mha.graph
    if reads_out:
        out = graph.call_function(operator.getitem, (mha, 0))
        valued(out, mha.meta["example_value"][0])
    graph.output((out, mha))
    before, index = str(graph), GraphIndex(graph)
    assert str(find(out, index).refused) == reason
    index.undo()
    assert str(graph) == before


def test_dropout_is_handed_on_in_training_only():
    module, x = nn.MultiheadAttention(E, H, dropout=0.1), torch.randn(L, B, E)
    _, (call,), _ = capture(lambda x: module(x, x, x)[0], x)
    assert call.dropout_p == 0.1 and call.refused is None
    one(attention(module.eval(), (L, B)), dropout_p=0.0)


# -- autocast, dynamic shapes --------------------------------------------------------------------


@pytest.mark.parametrize("add_bias_kv", [False, True])
def test_autocast_around_the_function_and_inside_the_graph(add_bias_kv):
    module, x = nn.MultiheadAttention(E, H, add_bias_kv=add_bias_kv), torch.randn(L, B, E)

    def inside(x):
        with torch.autocast("cpu", torch.bfloat16):
            with torch.autocast("cpu", enabled=False):
                exact = module(x, x, x)[0]
            return module(x, x, x, attn_mask=CAUSAL_MASK)[0], exact

    (out, exact), found, _ = capture(inside, x)
    assert [call.out.dtype for call in found] == [torch.float32, torch.bfloat16]
    expected = inside(x)
    torch.testing.assert_close(out, expected[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(exact, expected[1], rtol=1e-5, atol=1e-5)

    with torch.autocast("cpu", torch.bfloat16):
        out, (call,), _ = capture(lambda x: module(x, x, x)[0], x)
        assert call.out.dtype == out.dtype == torch.bfloat16
        torch.testing.assert_close(out, module(x, x, x)[0], rtol=2e-2, atol=2e-2)


def test_where_the_graph_turns_gradients_off_a_call_needs_none():
    module, x = nn.MultiheadAttention(E, H), torch.randn(L, B, E)

    def forward(x):
        with torch.no_grad():
            return module(x, x, x)[0]

    def see(gm):
        index = GraphIndex(gm.graph)
        found.extend(filter(None, [find(node, index) for node in list(gm.graph.nodes)]))
        found[0].emit.undo()

    found = []
    run_seen(forward, x, see=see)
    assert [call.out.requires_grad for call in found] == [False]


def test_autocast_around_a_nested_graph_is_refused():
    module, x = nn.MultiheadAttention(E, H), torch.randn(L, B, E)

    def forward(x):
        with torch.autocast("cpu", torch.bfloat16):
            return torch.utils.checkpoint.checkpoint(
                lambda x: module(x, x, x)[0], x, use_reentrant=False
            )

    _, (call,), _ = capture(forward, x)
    assert call.refused.text.startswith("autocast: the graph has torch.bfloat16")


def test_autocast_regions_nest_and_end():
    def forward(x):
        a = x.sin()
        with torch.autocast("cpu", torch.bfloat16):
            b = x.cos()
            with torch.autocast("cpu", enabled=False):
                c = x.tan()
            d = x.exp()
        return a + b + c + d + x.log()

    _, _, (gm,) = capture(forward, torch.rand(3))
    enabled = {
        node.target: [arguments[2] for arguments in GraphIndex(gm.graph).autocasts_around(node)]
        for node in gm.graph.nodes
        if node.op == "call_method"
    }
    assert enabled == {"sin": [], "cos": [True], "tan": [True, False], "exp": [True], "log": []}


FAST_PATH = pytest.param("fast path", marks=pytest.mark.xfail(
    torch.__version__ < "2.13", raises=torch._dynamo.exc.Unsupported, strict=True,
    reason="torch 2.11: aten::_transformer_encoder_layer_fwd has no fake impl or Meta kernel",
))  # fmt: skip


@pytest.mark.parametrize("kind", ["attention", FAST_PATH])
def test_dynamic_lengths_make_one_graph(kind):
    if kind == "attention":
        module = nn.MultiheadAttention(E, H, batch_first=True, add_bias_kv=True)
    else:
        module = nn.TransformerEncoderLayer(E, H, 32, batch_first=True).eval()
    graphs, found = [], []

    def forward(x, attn_mask, key_padding_mask):
        if kind == "attention":
            return module(x, x, x, attn_mask=attn_mask, key_padding_mask=key_padding_mask)[0]
        return module(x, attn_mask, key_padding_mask)

    def backend(gm, example_inputs):
        found.extend(with_sdpa(gm))
        graphs.append(gm)
        return gm.forward

    compiled = torch.compile(forward, backend=backend, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for b, n in ((3, 7), (2, 9), (5, 33), (4, 128)):
            hidden = torch.rand(b * H, n, n) > 0.6
            hidden[:, :, 0] = False
            inputs = torch.randn(b, n, E), hidden, torch.arange(n) >= torch.full((b, 1), n - 2)
            torch.testing.assert_close(compiled(*inputs), forward(*inputs), rtol=1e-4, atol=1e-5)
    assert len(graphs) == 1 and [call.refused for call in found] == [None]
    assert all(isinstance(value_of(found[0].q).shape[i], torch.SymInt) for i in (0, 2))
    for node in graphs[0].graph.nodes:
        assert not any(isinstance(x, torch.SymInt) for x in tree_leaves((node.args, node.kwargs)))


# -- nn.TransformerEncoderLayer and what is made of it -------------------------------------------


def encoder_layer(**kwargs):
    return nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True, **kwargs)


@chosen(
    # Each mask once, each of the layer's kinds with several and with none.
    lambda activation, norm_first, masks: (
        (list(FAST_PATH_MASKS).index(masks) + norm_first + 2 * (activation == "gelu")) % 4 == 0
        or masks == "none"
    ),
    activation=["relu", "gelu"], norm_first=[True, False], masks=list(FAST_PATH_MASKS),
)  # fmt: skip
def test_encoder_layers_fast_path(activation, norm_first, masks):
    src_mask, padding, expected = FAST_PATH_MASKS[masks]
    layer = encoder_layer(activation=activation, norm_first=norm_first).eval()
    with torch.no_grad():
        found = check(layer, torch.randn(B, L, E), src_mask=src_mask, src_key_padding_mask=padding)
    call = one(found, spelling="nn.TransformerEncoderLayer", band=FULL)
    assert mask_of(call) == expected


@pairs(
    masks=["none", "bool, padding", "float, float padding"], norm_first=[True, False],
    activation=["relu", "gelu"],
)  # fmt: skip
def test_encoder_layers_slow_path(activation, norm_first, masks):
    src_mask, padding, expected = MASKS[masks]
    layer = encoder_layer(activation=activation, norm_first=norm_first)
    found = check(layer, torch.randn(B, L, E), src_mask=src_mask, src_key_padding_mask=padding)
    call = one(found, spelling="nn.MultiheadAttention")
    assert mask_of(call) == expected and call.out.requires_grad


@torch.no_grad()
def test_the_fast_path_is_contiguous_whatever_its_input_and_follows_eager_into_exact_gelu():
    layer, x = encoder_layer(norm_first=True).eval(), torch.randn(L, B, E).transpose(0, 1)
    out, found, _ = capture(layer, x)
    one(found)
    assert out.stride() == layer(x).stride()
    one(check(encoder_layer(activation=nn.GELU("tanh")).eval(), torch.randn(B, L, E)))


def test_the_fast_path_under_autocast_is_refused():
    layer, x = encoder_layer().eval(), torch.randn(B, L, E)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out, (call,), _ = capture(layer, x)
        assert out.dtype == layer(x).dtype
    assert call.spelling == "nn.TransformerEncoderLayer"
    assert call.refused.text.startswith("autocast")


@pytest.mark.parametrize("training", [True, False])
def test_encoders(training):
    """Not as nested tensors: Dynamo does not take that way, in which eager returns 0 as padding."""
    for mask, padding, is_causal in ((CAUSAL_MASK, PADDED, False), (CAUSAL_MASK, None, True)):
        encoder = nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=False)
        given = dict(mask=mask, src_key_padding_mask=padding, is_causal=is_causal)
        with torch.set_grad_enabled(training):
            found = check(encoder.train(training), torch.randn(B, L, E), **given)
        assert [call.refused for call in found] == [None, None]


def test_an_encoder_that_looks_whether_its_mask_is_causal():
    encoder = nn.TransformerEncoder(encoder_layer(), 2).eval()
    with torch.no_grad():  # Dynamo cannot capture it in training
        found = check(encoder, torch.randn(B, L, E), CAUSAL_MASK)
    assert [mask_of(call) for call in found] == [(torch.bool, (1, 1, L, L))] * 2


def test_nested_tensors_do_not_reach_the_graph():
    encoder = nn.TransformerEncoder(encoder_layer(), 1, mask_check=False).eval()
    with torch.no_grad(), pytest.raises(torch._dynamo.exc.Unsupported, match="_nested_tensor"):
        capture(lambda x: encoder(x, src_key_padding_mask=PADDED), torch.randn(B, L, E))


@pairs(training=[True, False], norm_first=[True, False], batch_first=[True, False])
def test_transformers(training, norm_first, batch_first):
    """Two layers attend to themselves, one of them to the memory, too."""
    module = nn.Transformer(
        E, H, 1, 1, 32, dropout=0.0, batch_first=batch_first, norm_first=norm_first
    )
    shapes = ((B, S), (B, L)) if batch_first else ((S, B), (L, B))
    with torch.set_grad_enabled(training):
        found = check(
            module.train(training), *(torch.randn(*shape, E) for shape in shapes),
            tgt_mask=CAUSAL_MASK, tgt_is_causal=True, memory_key_padding_mask=PADDED[:, :S],
        )  # fmt: skip
    assert [call.refused for call in found] == [None] * 3
    assert [call.band for call in found] == [FULL, CAUSAL, FULL]
    assert mask_of(found[2]) == (torch.bool, (B, 1, 1, S))


# -- every option --------------------------------------------------------------------------------

MHA = nn.MultiheadAttention
# Of __init__ and of forward, at values that are not their defaults.
OPTIONS = {
    MHA: {
        "dropout": [0.3], "bias": [False], "add_bias_kv": [True], "add_zero_attn": [True],
        "kdim": [12], "vdim": [20], "batch_first": [True], "device": ["cpu"],
        "dtype": [torch.bfloat16], "key_padding_mask": [PADDED], "need_weights": [False],
        "attn_mask": [CAUSAL_MASK, FLOAT], "average_attn_weights": [False], "is_causal": [True],
    },
    nn.TransformerEncoderLayer: {
        "dim_feedforward": [48], "dropout": [0.3], "activation": ["gelu", torch.tanh],
        "layer_norm_eps": [0.5], "batch_first": [True], "norm_first": [True], "bias": [False],
        "device": ["cpu"], "dtype": [torch.bfloat16], "src_mask": [CAUSAL_MASK, FLOAT > 0],
        "src_key_padding_mask": [PADDED], "is_causal": [True],
    },
}  # fmt: skip
# Of what Dynamo leaves as one call: what modules.py may pass over.
PASSED_OVER = {
    "embed_dim_to_check",  # is checked in eager, and no more
    "average_attn_weights",  # of the weights: a call that reads them is refused
}


def test_every_option_of_torch_has_a_case():
    for module, cases in OPTIONS.items():
        signatures = map(inspect.signature, (module, module.forward))
        options = {name: x.default for each in signatures for name, x in each.parameters.items()}
        required = {name for name, default in options.items() if default is inspect.Parameter.empty}
        assert cases.keys() == options.keys() - required, module
        same = [name for name, values in cases.items() if any(options[name] is x for x in values)]
        assert not same, module
    read = set(re.findall(r"args\.(\w+)", inspect.getsource(modules)))
    schema = torch.ops.aten._transformer_encoder_layer_fwd.default._schema.arguments
    given = {*inspect.signature(F.multi_head_attention_forward).parameters}
    assert (given | {x.name for x in schema}) - read == PASSED_OVER


@pytest.mark.parametrize(
    "module, name, value, is_fast",
    [
        pytest.param(module, name, value, is_fast, id=f"{module.__name__}-{name}-{i}-{is_fast}")
        for module, options in OPTIONS.items()
        for name, values in options.items()
        for i, value in enumerate(values)
        for is_fast in (False, True)[: 1 + (module is nn.TransformerEncoderLayer)]
    ],
)
def test_a_module_with_an_option_is_as_eager_says(module, name, value, is_fast):
    """Exactly with SDPA in float64, and up to a recipe's error in the module's own dtype. is_fast:
    without gradients, batch first, which the encoder layer's fast path asks for."""
    if is_fast and torch.__version__ < "2.13":
        pytest.skip("aten::_transformer_encoder_layer_fwd has no Meta kernel")
    takes = inspect.signature(module).parameters
    is_encoder = module is nn.TransformerEncoderLayer
    options = {"batch_first": True} if is_fast else {}
    options |= {"dim_feedforward": 32} if is_encoder else {}
    options |= {name: value} if name in takes else {}
    given = {} if name in takes else {name: value}
    if name == "is_causal":  # a hint about the mask
        given["src_mask" if is_encoder else "attn_mask"] = CAUSAL_MASK
    made = module(E, H, **options).eval()
    shape = (B, L) if options.get("batch_first") else (L, B)
    widths = [E] if is_encoder else [E, options.get("kdim", E), options.get("vdim", E)]
    inputs = [torch.randn(*shape, width) for width in widths]
    with torch.set_grad_enabled(not is_fast):
        call = one(check(copy.deepcopy(made), *inputs, **given))
    by_eager = name == "bias" or value is torch.tanh  # which takes its slow path for these
    assert call.spelling == f"nn.{(module if is_fast and not by_eager else MHA).__name__}"
    dtype = next(made.parameters()).dtype
    given = {key: x.to(dtype) if key == "attn_mask" and x is FLOAT else x for key, x in given.items()}  # fmt: skip
    inputs, sites = [x.to(dtype) for x in inputs], []
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter) / 4)
        run = lambda *inputs: first(made(*inputs, **given))  # noqa: E731
        see = lambda gm: sites.extend(rewrite(gm, Settings(emulate=True)))  # noqa: E731
        out = run_seen(run, *inputs, see=see)
        assert [site.rewritten for site in sites] == [True], sites
        assert 0 < relative_l1(out, run(*inputs)) < 0.06


# -- golden graphs -------------------------------------------------------------------------------


def golden(graph) -> str:
    return re.sub(r"[lg]_(\w+_)?(modules|parameters)_", "", calls(graph))


class TestGoldenGraphs(TestCase):
    def test_self_attention(self):
        module, x = nn.MultiheadAttention(E, H, batch_first=True), torch.randn(B, L, E)
        _, _, (gm,) = capture(lambda x: module(x, x, x, PADDED)[0], x)
        self.assertExpectedInline(
            golden(gm.graph),
            """\
unbind = unbind(permute(unflatten(linear(l_x_, in_proj_weight_, in_proj_bias_), -1, [3, 4, -1]), [2, 0, 3, 1, 4]))
scaled_dot_product_attention = scaled_dot_product_attention(unbind[0], unbind[1], unbind[2], logical_not(unsqueeze(unsqueeze(g_padded_, 1), 1)), is_causal=False)""",
        )

    def test_encoder_layer(self):
        with torch.no_grad():
            _, _, (gm,) = capture(encoder_layer().eval(), torch.randn(B, L, E), CAUSAL_MASK, PADDED)
        self.assertExpectedInline(
            golden(gm.graph),
            """\
unbind = unbind(permute(unflatten(linear(l_args_0_, in_proj_weight_, in_proj_bias_), -1, [3, 4, -1]), [2, 0, 3, 1, 4]))
scaled_dot_product_attention = scaled_dot_product_attention(unbind[0], unbind[1], unbind[2], logical_not(logical_or(view(l_args_1_, [1, 1, 7, 7]), view(l_args_2_, [3, 1, 1, 7]))), is_causal=False)""",
        )
