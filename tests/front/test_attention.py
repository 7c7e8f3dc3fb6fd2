"""``sage_inductor.attention``: SDPA's meaning, the decision of a rewritten call, and the same under
every compiler."""

import math

import pytest
import torch
import torch.nn.functional as F
from support import exactly, heads, relative_l1, sdpa
from torch.testing import assert_close

import sage_inductor
from sage_inductor import SageOptionError, SageRefused, attention, config

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
    q, k, v = inputs()
    attn_mask = masks()[mask]
    if attn_mask is not None and "is_causal" in given:
        given = {}  # SDPA takes one of the two
    assert torch.equal(
        attention(q, k, v, attn_mask, **given),
        F.scaled_dot_product_attention(q, k, v, attn_mask, **given),
    )


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


@pytest.mark.parametrize("recipe", ["sage1", "off"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_a_compiled_call_is_the_eager_one(backend, dynamic, recipe):
    q, k, v = inputs(N_kv=40)
    with config.patch(emulate=True):
        asked = {"is_causal": True, "recipe": recipe, "return_lse": True}
        compiled = torch.compile(
            lambda q, k, v: attention(q, k, v, **asked), backend=backend, fullgraph=True,
            dynamic=dynamic,
        )  # fmt: skip
        actual = compiled(q, k, v)
        (site,) = sage_inductor.report()
        assert (site.spelling, site.module) == ("sage_inductor.attention", "")
        assert site.recipe == (None if recipe == "off" else recipe), site
        for x, y in zip(actual, attention(q, k, v, **asked)):
            assert_close(x, y, atol=1e-6, rtol=0)
