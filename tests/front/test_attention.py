"""``sage_inductor.attention``: SDPA's meaning, the decision of a rewritten call, and the same under
every compiler."""

import dataclasses
import math
import sys

import pytest
import torch
import torch.nn.functional as F
from models import Of
from pairs import pairs
from support import exactly, heads, on_gpu, relative_l1, sdpa
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

import sage_inductor
from sage_inductor import Rule, SageOptionError, SageRefused, attention, config, functional
from sage_inductor.choose import cost, families, tables
from sage_inductor.ops.recipe import NAMED
from sage_inductor.session import session

BACKENDS = ("eager", "aot_eager", "inductor", "sage")


def inputs(H_q=4, H_kv=4, N_q=40, N_kv=24, D=32, B=2, dtype=torch.float32):
    return tuple(heads(B, H, N, D, dtype) for H, N in ((H_q, N_q), (H_kv, N_kv), (H_kv, N_kv)))


def masks(N_q=40, N_kv=24, B=2, H=4):
    keys = torch.rand(B, 1, 1, N_kv) > 0.3
    keys[..., 0] = True
    return {"none": None, "keys": keys, "bias": torch.randn(H, N_q, N_kv)}


# -- what it computes ----


@pytest.mark.parametrize("mask", masks())
@pytest.mark.parametrize("given", [{}, {"is_causal": True}, {"scale": 0.5}])
def test_where_nothing_is_quantized_it_is_sdpa_to_the_bit(mask, given):
    q, k, v, attn_mask = *inputs(), masks()[mask]
    if attn_mask is not None and "is_causal" in given:
        given = {}  # SDPA takes one of the two
    exact = F.scaled_dot_product_attention(q, k, v, attn_mask, **given)
    assert torch.equal(attention(q, k, v, attn_mask, **given), exact)


@pytest.mark.parametrize("settings", [{}, {"recipe": "sage2-8b", "force": True}])
def test_on_meta_it_gives_sdpas_shapes_and_strides(settings):
    q, k, v = (x.to("meta", torch.bfloat16) for x in inputs(H_kv=2))
    with config.patch(**settings):
        out, lse = attention(q, k, v, is_causal=True, enable_gqa=True, return_lse=True)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert out.is_meta and (out.shape, out.stride()) == (expected.shape, expected.stride())
    assert lse.is_meta and lse.shape == out.shape[:3] and lse.dtype == torch.float32


@config.patch(emulate=True)
@pytest.mark.parametrize("recipe", NAMED)
def test_a_call_gives_the_same_bits_again_and_a_batch_those_of_its_parts(recipe):
    q, k, v = inputs(N_q=150, N_kv=150)
    given = {"is_causal": True, "recipe": recipe}
    out, again = (attention(q, k, v, **given) for _ in range(2))
    parts = [attention(q[i], k[i], v[i], **given) for i in (slice(1), slice(1, 2))]
    assert torch.equal(out, again)
    # Products of FP4 are no integers: the order in which they are summed depends on the batch.
    assert_close(out, torch.cat(parts), rtol=0, atol=1e-6 if recipe == "sage3" else 0)


@config.patch(emulate=True)
@pytest.mark.parametrize("recipe", ["sage1-rotated", "sage2-8b-rotated"])
def test_later_tokens_change_an_earlier_output_by_no_more_than_the_recipes_error(recipe):
    q, k, v = inputs(N_q=150, N_kv=150)
    exact, _ = exactly(q, k, v, True, 32**-0.5)
    out = attention(q, k, v, is_causal=True, recipe=recipe)[:, :, :-9]
    k[:, :, -9:] += 1
    v[:, :, -9:] *= 2
    changed = attention(q, k, v, is_causal=True, recipe=recipe)[:, :, :-9]
    assert 0 < relative_l1(changed, out) < 1.5 * relative_l1(out, exact[:, :, :-9])


@config.patch(emulate=True)
@pytest.mark.parametrize("recipe", ["sage1", "sage2-8b"])
def test_a_recipe_computes_what_its_op_computes(recipe):
    q, k, v = inputs(H_kv=2)
    given = {"is_causal": True, "scale": 0.125}
    out, lse = attention(q, k, v, **given, enable_gqa=True, recipe=recipe, return_lse=True)
    expected = sdpa(q, k, v, **given, recipe=recipe)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    assert torch.equal(out, attention(q, k, v, **given, enable_gqa=True, recipe=recipe))
    assert 1e-4 < relative_l1(out, exactly(q, k, v, True, 0.125)[0]) < 0.1


@pytest.mark.parametrize("shape", ["[B, H, N, D]", "[H, N, D]", "one k and v"])
@pytest.mark.parametrize("emulate", [False, True])
def test_lse_is_that_of_exact_attention(shape, emulate):
    q, k, v = inputs()
    if shape == "[H, N, D]":
        q, k, v = q[0], k[0], v[0]
    if shape == "one k and v":
        k, v = k[:1, :1], v[:1, :1]
    with config.patch(emulate=emulate):
        out, lse = attention(q, k, v, scale=0.3, return_lse=True)
    expected = (q.double() @ k.double().mT * 0.3).logsumexp(-1)
    assert lse.shape == expected.shape == out.shape[:-1] and lse.dtype == torch.float32
    assert_close(lse.double(), expected, atol=0.05 if emulate else 1e-5, rtol=0)


def test_lse_of_masks_bands_groups_and_of_long_rows(monkeypatch):
    monkeypatch.setattr("sage_inductor.ops.lse.MAX_SCORES", 7 * 2 * 24)  # 7 rows at a time
    q, k, v = inputs(H_kv=2)
    hidden = torch.ones(40, 24, dtype=torch.bool)
    hidden[3] = False
    for given in ({"is_causal": True}, {"attn_mask": masks()["bias"]}, {"attn_mask": hidden}):
        _, lse = attention(q, k, v, **given, scale=0.2, enable_gqa=True, return_lse=True)
        given = {"is_causal": False, **given}
        assert_close(lse.double(), exactly(q, k, v, scale=0.2, **given)[1], atol=1e-5, rtol=0)
    assert (lse[:, :, 3] == -math.inf).all()


# -- under every compiler ----


@pairs(recipe=["sage1", "off"], dynamic=[False, True], backend=BACKENDS)
@torch.no_grad()
def test_a_compiled_call_is_the_eager_one(backend, dynamic, recipe):
    q, k, v = inputs(N_kv=40)
    with config.patch(emulate=True):
        asked = {"is_causal": True, "recipe": recipe, "return_lse": True}
        function, how = lambda q, k, v: attention(q, k, v, **asked), {"dynamic": dynamic}
        actual = torch.compile(function, backend=backend, fullgraph=True, **how)(q, k, v)
        (site,) = sage_inductor.report()
        assert (site.spelling, site.module) == ("sage_inductor.attention", "")
        assert site.recipe == (None if recipe == "off" else recipe), site
        for x, y in zip(actual, attention(q, k, v, **asked)):
            assert_close(x, y, atol=1e-6, rtol=0)


@pytest.mark.filterwarnings("error:Raw SymFloat")
@torch.no_grad()
def test_a_scale_that_changes_is_another_graph():
    q, k, v = inputs(N_kv=40)
    scaled = lambda scale: attention(q, k, v, scale=scale)  # noqa: E731
    compiled = torch.compile(scaled, backend="aot_eager", fullgraph=True)
    for scale in (0.1, 0.2, 0.3):
        assert_close(compiled(scale), F.scaled_dot_product_attention(q, k, v, scale=scale))


def attend(q, k, v):
    return attention(q, k, v, is_causal=True)


@torch.no_grad()
def test_the_options_of_the_compilation_decide_and_not_the_config():
    """The call is decided once: what the backend leaves as SDPA is not asked about again."""
    q, k, v = inputs(N_kv=40)
    exact = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    with config.patch(emulate=True, strict=True):
        options = {"sage.recipe": "off", "sage.strict": False}
        out = torch.compile(attend, backend="sage", options=options)(q, k, v)
        assert [s.reason for s in sage_inductor.report()] == ["the recipe is 'off'"]
    assert_close(out, exact, atol=1e-6, rtol=0)
    torch._dynamo.reset()
    options = {"sage.emulate": True, "sage.recipe": "sage1", "sage.strict": True}
    torch.compile(attend, backend="sage", options=options)(q, k, v)
    assert [s.recipe for s in sage_inductor.report()] == ["sage1"]


@torch.no_grad()
def test_the_pass_of_backend_inductor_finds_it_once():
    q, k, v = inputs(N_kv=40)
    with config.patch(rewrite_inductor=True, emulate=True):
        out = torch.compile(attend, backend="inductor", fullgraph=True)(q, k, v)
        assert [s.recipe for s in sage_inductor.report()] == ["sage2-8b"]
        assert_close(out, attend(q, k, v), atol=1e-6, rtol=0)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q = torch.nn.Linear(32, 32)

    def forward(self, x, return_lse=False):
        q = self.q(x)
        return attention(q, q, x, return_lse=return_lse)


@torch.no_grad()
def test_under_backend_sage_it_has_its_modules_path_and_shares_k_and_v():
    model = torch.nn.Sequential(Layer(), Layer())
    x = torch.randn(1, 2, 24, 32)
    report = sage_inductor.explain(model, options={"sage.emulate": True})(x)
    assert [s.module for s in report] == ["0", "1"]
    found = sage_inductor.diagnose(model, recipes=["sage1"])(x)
    assert {row.site.module for row in found.rows} == {"0", "1"}


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "sage"])
def test_gradients_are_sdpas(backend):
    q, k, v = (x.requires_grad_() for x in inputs(N_kv=40))
    cotangent = torch.randn(2, 4, 40, 32)

    def gradients(function):
        (function(q, k, v) * cotangent).sum().backward()
        return [x.grad.clone() for x in (q, k, v) if (x.grad is not None)]

    expected = gradients(lambda *x: F.scaled_dot_product_attention(*x, is_causal=True))
    with config.patch(emulate=True):
        for x in (q, k, v):
            x.grad = None
        with_lse = lambda *x: attention(*x, is_causal=True, return_lse=True)[0]  # noqa: E731
        compiled = torch.compile(with_lse, backend=backend)
        for found, exact in zip(gradients(compiled), expected, strict=True):
            assert_close(found, exact, atol=1e-5, rtol=1e-4)
        assert sage_inductor.report().rewritten


@torch.no_grad()
def test_each_side_of_a_length_is_a_graph_under_another_backend():
    rules = [{"length": [64, None], "recipe": "off"}, {"recipe": "sage1"}]
    with config.patch(emulate=True, policy=rules):
        compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
        for N in (33, 40, 64, 500, 63):
            q, k, v = inputs(N_q=N, N_kv=N)
            exact = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            assert torch.allclose(compiled(q, k, v), exact, atol=1e-5) == (N >= 64), N
        assert [s.recipe for s in sage_inductor.report()] == ["sage1", None]


@pytest.mark.parametrize("strict", [False, True])
@torch.no_grad()
def test_an_exported_call_is_decided_by_the_example_and_travels(strict):
    q, k, v = inputs(N_kv=40)
    N = torch.export.Dim("N", min=2, max=100)
    shapes = {name: {2: N} for name in "qkv"}
    rules = [{"length": [40, None], "recipe": "sage1"}, {"recipe": "off"}]
    with config.patch(emulate=True, policy=rules):
        program = torch.export.export(Of(attend), (q, k, v), dynamic_shapes=shapes, strict=strict)
        (call,) = (n for n in program.graph.nodes if n.target is torch.ops.sage.sdpa.default)
        assert call.args[-1] and [s.recipe for s in sage_inductor.report()] == ["sage1"]
    with config.patch(emulate=True):
        short = tuple(x[:, :, :7] for x in (q, k, v))
        expected = attention(*short, is_causal=True, recipe="sage1")
        assert torch.equal(program.module()(*short), expected)


# -- what is decided, and how often ----


def test_a_kind_of_call_is_decided_once_and_reported_once(monkeypatch):
    asked = []
    decided = functional.decide
    monkeypatch.setattr(functional, "decide", lambda *x: asked.append(x) or decided(*x))
    q, k, v = inputs()
    for _ in range(3):
        attention(q, k, v)
        attention(q.clone(), k, v, is_causal=True)
    assert len(asked) == 2
    sites = [(s.module, s.spelling, s.mask) for s in sage_inductor.report()]
    assert sites == [("", "sage_inductor.attention", mask) for mask in ("none", "causal")]
    torch._dynamo.reset()
    assert not sage_inductor.report()
    attention(q, k, v)
    assert len(sage_inductor.report()) == 1


def test_the_lengths_of_decoding_are_decided_once(monkeypatch):
    """Where a length is below every row of the GPU's table; on CPU each is."""
    q, k, v = inputs(N_q=1)
    for N in (1, 3, 4, 24):
        keys = torch.ones(2, 1, 1, N, dtype=torch.bool)
        given = q, k[:, :, :N], v[:, :, :N], keys
        assert torch.equal(attention(*given), F.scaled_dot_product_attention(*given))
    assert len(sage_inductor.report()) == 1

    def is_one_kind():
        calls = (q, k, v), (q, k[:, :, 1:], v[:, :, 1:])
        return len({functional._kind(kept(*call), call) for call in calls}) == 1

    for shortest, one in ((1, False), (2, True)):
        monkeypatch.setattr(cost, "SHORTEST", shortest)
        assert is_one_kind() == one
    for setting in ("emulate", "force"):
        with config.patch(setting, True):
            assert not is_one_kind()
    q.requires_grad_()
    assert not is_one_kind()


def kept(*tensors, given=(False, None, False, "auto", False), module=""):
    return functional._key(tensors, given, module)


def test_the_key_of_a_kept_decision_holds_all_that_decides(monkeypatch):
    q, k, v = inputs()
    mask = torch.ones(2, 4, 40, 24)
    few = dict(given=(True, None, False, "auto", False))
    others = [
        lambda: kept(q[..., :16], k[..., :16], v),
        lambda: kept(q, k, v[..., :16]),
        lambda: kept(q[:1], k[:1], v[:1]),
        lambda: kept(q[:, :2], k, v),
        lambda: kept(q, k, v[:, :, 1:]),  # refused
        lambda: kept(q.double(), k.double(), v.double()),
        lambda: kept(q, k, v, mask),
        lambda: kept(q, k, v, mask.bool()),
        lambda: kept(q, k, v, mask[:, :1]),
        lambda: kept(q, k, v, mask[..., 1:]),  # refused
        lambda: kept(q, k, v, mask[:, :, 1:]),  # refused
        lambda: kept(q.clone().requires_grad_(), k, v),
        lambda: kept(q.to_sparse(), k, v),
        lambda: kept(q, k, v, **few),
        *(lambda i=i, x=x: kept(q, k, v, given=(*few["given"][:i], x, *few["given"][i + 1 :]))
          for i, x in enumerate((True, 0.5, True, "sage1", True)) if i),
        lambda: kept(q, k, v, module="a"),
        lambda: torch.no_grad()(kept)(q, k, v),
        lambda: torch.autocast("cpu", torch.bfloat16)(kept)(q, k, v),
        lambda: torch.autocast("cpu", torch.float16)(kept)(q, k, v),
        lambda: config.patch(recipe="sage1")(kept)(q, k, v),
        lambda: config.patch(policy=[Rule("off")])(kept)(q, k, v),
        lambda: config.patch(policy=lambda call: None)(kept)(q, k, v),
        lambda: config.patch(strict=True)(kept)(q, k, v),
        lambda: sage_inductor.stage("edge")(kept)(q, k, v),
    ]  # fmt: skip
    for _ in range(2):
        keys = [kept(q, k, v), *(other() for other in others)]
        assert None not in keys and len(set(keys)) == len(keys)
        assert kept(*(x.clone() for x in (q, k, v))) == keys[0]
        torch.func.vmap(lambda x, keys=keys: keys.append(kept(x, k, v)) or x)(q[None])
        assert keys.pop() not in keys
        config.recipe = "sage1"  # for all
        assert kept(q, k, v) not in keys
        config.recipe = "auto"
        assert kept(q, k, v) == keys[0]
    of_q = (kept(x, k, v) for x in (q.contiguous(), q[:, :, 1:], q.to_sparse(), q.to("meta")))
    different = *of_q, kept(q, k[:, :, 1:], v[:, :, 1:])
    assert len({kept(q, k, v), *different}) == 6
    for x in (torch.nested.nested_tensor([torch.randn(2, 8, 4)]), q.as_subclass(Tagged)):
        assert kept(x, k, v) is None
    exact = functional._key
    monkeypatch.setattr(functional, "_key", lambda x, *to: functional._kind(exact(x, *to), x))
    kinds = {kept(q, k, v), *(other() for other in others)}
    assert len(kinds) == len(others) - 2  # three differ from another by lengths alone


class Tagged(torch.Tensor):
    pass


@pytest.mark.parametrize("emulate", [False, True])
@torch.no_grad()
def test_the_function_itself_can_be_compiled(emulate):
    """Dynamo traces it then, instead of leaving it as one call."""
    q, k, v = inputs()
    with config.patch(emulate=emulate):
        for given in ({}, {"is_causal": True, "scale": 0.3, "return_lse": True}):
            torch._dynamo.reset()
            compiled = torch.compile(attention, backend="sage", fullgraph=True)(q, k, v, **given)
            (site,) = sage_inductor.report()
            assert site.rewritten == emulate
            torch.testing.assert_close(compiled, attention(q, k, v, **given))


def test_an_eager_call_that_stays_takes_few_calls_of_python():
    """SDPA takes 6 us on a CPU, and this twice as much. Deciding took 60 calls of Python."""
    q, k, v = inputs()
    attention(q, k, v)
    names = []
    sys.setprofile(lambda frame, event, _: event == "call" and names.append(frame.f_code.co_name))
    try:
        attention(q, k, v)
    finally:
        sys.setprofile(None)
    assert len(names) <= 8, names


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.vjp])
def test_it_can_be_differentiated_where_sdpa_can(transform):
    q, k, v = inputs()
    k.requires_grad_()  # not by this transform

    def result(call):
        def loss(q):
            return call(q, k, v).pow(2).sum()

        if transform is torch.func.vjp:
            return transform(loss, q)[1](torch.tensor(1.0))[0]
        return transform(loss)(q)

    message = "return_lse must be False inside a torch.func transform"
    with config.patch(emulate=True):
        assert torch.equal(result(attention), result(F.scaled_dot_product_attention))
        with pytest.raises(ValueError, match=message):
            torch.func.grad(lambda x: attention(x, k, v, return_lse=True)[0].sum())(q)
        attention(q, k, v, return_lse=True)
    reasons = [site.reason for site in sage_inductor.report()]
    assert reasons[0] == "inside a torch.func transform" and len(reasons) == 2


def test_whatever_a_decision_depends_on_is_asked_about_anew(monkeypatch):
    q, k, v = inputs()
    sites = []

    def call(*x, **given):
        attention(*x, **given)
        sites.append(sage_inductor.report()[-1])
        return len(sage_inductor.report())

    assert call(q, k, v) == 1
    assert call(q[..., :16], k[..., :16], v) == 2
    with torch.autocast("cpu", torch.bfloat16):
        assert call(q, k, v) == 3 and sites[-1].dtype == "bfloat16"
    with config.patch(emulate=True):
        assert call(q, k, v) == 4 and sites[-1].recipe == "sage2-8b"
        assert call(q, k, v, recipe="sage1") == 5 and sites[-1].recipe == "sage1"
        with config.patch(recipe="sage1-per-token"):
            assert call(q, k, v) == 6 and sites[-1].recipe == "sage1-per-token"
        with config.patch(policy=[Rule("sage1", length=(None, 9)), Rule("off", head_dim=32)]):
            assert call(q, k, v, recipe="sage1") == 7 and sites[-1].recipe is None
            assert "rule 2" in sites[-1].reason
        with config.patch(recipe="off"):
            assert call(q, k, v, recipe="sage1") == 8 and sites[-1].recipe is None
        with config.patch(recipe="off", policy=[Rule("sage1", head_dim=8)]):  # fits no call here
            out = attention(q, k, v, recipe="sage1")
            assert torch.equal(out, F.scaled_dot_product_attention(q, k, v))
    assert call(q, k, v) == 8
    kinds = len(session().runs)
    monkeypatch.setattr(families, "flash_attention", lambda: "FA3")
    assert call(q, k, v) == 8 and len(session().runs) > kinds


def test_strict_refuses_a_call_that_stays():
    q, k, v = inputs()
    with config.patch(strict=True):
        for _ in range(2):
            with pytest.raises(SageRefused, match="on CPU attention stays as it was"):
                attention(q, k, v)
        with config.patch(emulate=True):
            attention(q, k, v)


def test_an_unknown_recipe_is_refused():
    message = r"sage_inductor.attention: recipe must be one of .* did you mean 'sage2-8b'\?"

    def call(q, k, v):
        return attention(q, k, v, recipe="sage2")

    for run in call, torch.compile(call, backend="sage"):
        with pytest.raises(SageOptionError, match=message):
            run(*inputs())


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused(layout):
    parts = [torch.randn(n, 2, 64) for n in (300, 400)]
    x = torch.nested.nested_tensor(parts, layout=layout).transpose(1, 2).contiguous()
    for call in (attention, torch.compile(lambda q, k, v: attention(q, k, v), backend="sage")):
        with pytest.raises(Exception, match="attn_mask must not be nested tensors"):
            call(x, x, x)
    with pytest.raises(TypeError, match="nested"):
        attention(*inputs()[:2], x)


def test_a_policy_that_cannot_be_hashed_decides_too():
    @dataclasses.dataclass
    class Policy:
        recipe: str

        def __call__(self, described):
            return self.recipe

    q, k, v = inputs()
    found = []
    for recipe in ("sage1", "off"):
        with config.patch(emulate=True, policy=Policy(recipe)):
            found += [attention(q, k, v) for _ in range(2)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[2], found[3])
    assert torch.equal(found[3], F.scaled_dot_product_attention(q, k, v))
    assert not torch.equal(found[0], found[2])


def test_what_no_recipe_computes_stays_sdpa():
    q, k, v = inputs()
    with config.patch(emulate=True):
        out = torch.func.vmap(attention)(*(x[:, None] for x in (q, k, v)))
        assert_close(out[:, 0], F.scaled_dot_product_attention(q, k, v))

        out = attention(q.as_subclass(Tagged), k, v)
        assert type(out) is Tagged and torch.equal(out, F.scaled_dot_product_attention(q, k, v))
        wide = torch.randn(1, 2, 8, 300)
        attention(wide, wide, wide)
    assert [s.reason for s in sage_inductor.report()] == [
        "inside a torch.func transform",
        "tensor subclasses are not supported, got Tagged",
        "head_dim of q and k must be one number up to 256, as v's, got 300, 300, 300",
    ]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda q, k, v: ((q, k[..., :8], v), {}), "q and k must have one head_dim, got .* and 8"),
        (lambda q, k, v: ((q, k, v[:, :, 1:]), {}), "k and v must have one length, got"),
        (lambda q, k, v: ((q, k.double(), v), {}), "must have one floating dtype, got .*float64"),
        (lambda q, k, v: ([x.long() for x in (q, k, v)], {}), "one floating dtype, got .*int64"),
        (lambda q, k, v: ((q.repeat(1, 3, 1, 1), k, v), {}), "q has .* heads and k .*enable_gqa=True"),
        (lambda q, k, v: ((q, k, v), {"dropout_p": 0.1}), "dropout_p must be 0, got 0.1: for dropout call F"),
    ],
    ids=["head_dim", "length", "dtype", "integers", "heads", "dropout"],
)  # fmt: skip
def test_what_sdpa_would_refuse_in_other_words_is_said(change, message):
    q, k, v = inputs()
    k, v = k[:, :2], v[:, :2]
    args, given = change(q[:, :2], k, v)
    with pytest.raises(ValueError, match=message):
        attention(*args, **given)


def test_autocast_gives_inputs_of_several_dtypes_one():
    q, k, v = inputs()
    with torch.autocast("cpu", torch.bfloat16), config.patch(emulate=True):
        out = attention(q, k.bfloat16(), v)
        assert out.dtype == torch.bfloat16
        exact = F.scaled_dot_product_attention(q, k.bfloat16(), v)
    assert relative_l1(out.double(), exact.double()) < 0.1


def test_a_dropout_of_zero_is_taken_and_no_other():
    """By its name: SDPA's fifth argument is dropout_p, here 0.0 would be is_causal, as False."""

    def zero(*x):
        return attention(*x, dropout_p=0.0)

    q, k, v = inputs()
    with config.patch(emulate=True):
        assert torch.equal(zero(q, k, v), attention(q, k, v))
        torch.compile(zero, backend="sage")(q, k, v)
    assert all(site.rewritten for site in sage_inductor.report())
    with pytest.raises(Exception, match="dropout_p must be 0, got 0.1"):
        torch.compile(lambda *x: attention(*x, dropout_p=0.1), backend="aot_eager")(q, k, v)
    attention(q, k, v, None, False)
    with pytest.raises(TypeError, match="is_causal must be True or False, got 0.0"):
        attention(q, k, v, None, 0.0)


@torch.no_grad()
def test_on_a_gpu_it_is_decided_by_the_table():
    """Of tensors that are not there: an export of fake ones."""
    model, rotated = Of(lambda q: attention(q, q, q)), "sage2-8b-rotated"
    for N, force, expected in ((16384, False, rotated), (1024, False, None), (1024, True, rotated)):
        torch._dynamo.reset()
        with config.patch(force=force), FakeTensorMode(), on_gpu(name=tables.H200):
            q = torch.empty(4, N, 32, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
            torch.export.export(model, (q,))
        (site,) = sage_inductor.report()
        assert site.recipe == expected, site


@pytest.mark.gpu
@pytest.mark.parametrize("given", [{}, {"is_causal": True}, {"enable_gqa": True}])
@torch.no_grad()
def test_on_a_gpu_eager_computes_what_backend_sage_does(given):
    H_kv = 2 if given.get("enable_gqa") else 8
    q, k, v = (heads(1, H, 512, 128, torch.bfloat16, "cuda") for H in (8, H_kv, H_kv))
    exact = exactly(q, k, v, given.get("is_causal", False), 128**-0.5)
    for force in (False, True):
        torch._dynamo.reset()
        with config.patch(force=force):
            out, lse = attention(q, k, v, **given, return_lse=True)
            assert bool(sage_inductor.report().rewritten) == force
            compiled = torch.compile(attention, backend="sage")(q, k, v, **given, return_lse=True)
        assert_close(lse.double(), exact[1], atol=0.05 if force else 1e-3, rtol=0)
        assert relative_l1(out, exact[0]) < 0.06
        assert torch.equal(out, compiled[0])
        assert_close(lse, compiled[1], atol=1e-3, rtol=0)
