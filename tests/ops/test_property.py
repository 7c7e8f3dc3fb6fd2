"""SDPA's whole signature, drawn at random: a call is rewritten and near float64 SDPA, or it is left,
says why, and is bit-equal to what it was.

``SAGE_TEST_DRAWS=5000 pytest tests/ops/test_property.py`` draws more, and anew each time.
"""

import dataclasses
import os

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, seed, settings
from hypothesis import strategies as st

import sage_inductor
from sage_inductor.choose.decide import Settings, rewrite
from sage_inductor.ops import recipe as recipes
from sage_inductor.ops.reference.exact import attention_exact

DRAWS = int(os.environ.get("SAGE_TEST_DRAWS", 0))


@dataclasses.dataclass(frozen=True)
class Signature:
    """One way to call SDPA."""

    B: int
    H_q: int
    H_kv: int
    N_q: int
    N_kv: int
    D: int
    D_v: int
    dtype: torch.dtype
    dims: int
    bnhd: bool
    mask: str
    is_causal: bool
    dropout_p: float
    scale: float | None
    enable_gqa: bool
    recipe: str

    def inputs(self):
        def make(H, N, D):
            x = torch.randn(self.B, N, H, D).transpose(1, 2)
            x = (x if self.bnhd else x.contiguous()).to(self.dtype)
            return x[..., 0, :, :] if self.dims == 3 else x

        q, k = make(self.H_q, self.N_q, self.D), make(self.H_kv, self.N_kv, self.D) + 1
        return q, k, make(self.H_kv, self.N_kv, self.D_v) + 3

    def attn_mask(self):
        shape = {"rows": (self.N_q, self.N_kv), "keys": (self.B, 1, 1, self.N_kv)}
        match self.mask.split():
            case ["none"]:
                return None
            case ["bool", kind]:
                return torch.rand(shape.get(kind, (self.B, self.H_q, self.N_q, self.N_kv))) > 0.3
            case ["expanded", _]:
                return (torch.rand(self.N_kv) > 0.3).expand(self.N_q, self.N_kv)
            case ["transposed", _]:
                return torch.randn(self.N_kv, self.N_q).to(self.dtype).mT
            case ["float", kind]:
                full = (self.B, self.H_q, self.N_q, self.N_kv)
                return torch.randn(shape.get(kind, full)).to(self.dtype)
        raise AssertionError(self.mask)

    def call(self, q, k, v, attn_mask):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, dropout_p=self.dropout_p, is_causal=self.is_causal,
            scale=self.scale, enable_gqa=self.enable_gqa,
        )  # fmt: skip


signatures = st.builds(
    Signature,
    B=st.integers(1, 2),
    H_q=st.sampled_from([1, 2, 4]),
    H_kv=st.sampled_from([1, 2, 4]),
    N_q=st.sampled_from([1, 2, 17, 64, 130]),
    N_kv=st.sampled_from([1, 3, 64, 65, 200]),
    D=st.sampled_from([1, 8, 40, 64, 128, 160, 256, 257]),
    D_v=st.sampled_from([None, 16, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    dims=st.sampled_from([4, 4, 4, 3]),
    bnhd=st.booleans(),
    mask=st.sampled_from(
        ["none", "none", "bool rows", "bool keys", "bool full", "expanded bool", "transposed float",
         "float rows", "float keys", "float full"]
    ),
    is_causal=st.booleans(),
    dropout_p=st.sampled_from([0.0, 0.0, 0.0, 0.0, 0.2]),
    scale=st.sampled_from([None, None, 0.0, -0.3, 0.5]),
    enable_gqa=st.booleans(),
    recipe=st.sampled_from(list(recipes.NAMED)),
)  # fmt: skip


def draws(ci: int):
    """`ci` draws by SEED, or as many new ones as were asked for."""

    def decorated(test):
        test = settings(
            max_examples=DRAWS or ci, deadline=None, database=None,
            suppress_health_check=list(HealthCheck),
        )(given(signature=signatures)(test))  # fmt: skip
        return test if DRAWS else seed(int(os.environ["SEED"]))(test)

    return decorated


def prepared(signature):
    """The signature with what depends on other fields, or none if SDPA itself refuses it."""
    signature = dataclasses.replace(signature, D_v=signature.D_v or signature.D)
    assume(not (signature.mask != "none" and signature.is_causal))
    if signature.dims == 3:
        signature = dataclasses.replace(signature, H_q=1, H_kv=1, enable_gqa=False)
        assume(signature.mask.split()[-1] not in ("keys", "full"))
    assume(signature.H_q == signature.H_kv or signature.enable_gqa)
    assume(signature.H_q % signature.H_kv == 0)
    inputs = (*signature.inputs(), signature.attn_mask())
    try:
        torch.manual_seed(0)
        return signature, inputs, signature.call(*inputs)
    except RuntimeError:  # not a call of SDPA
        assume(False)


def check_rewritten(signature, inputs, actual):
    q, k, v, attn_mask = inputs
    if signature.dims == 3:
        q, k, v, actual = (x[None] for x in (q, k, v, actual))
    scale = signature.D**-0.5 if signature.scale is None else signature.scale
    exact, _ = attention_exact(q, k, v, scale, attn_mask, right=0 if signature.is_causal else None)
    assert actual.shape == exact.shape and actual.dtype == signature.dtype
    assert actual.isfinite().all()
    # v is 3 +- 1: half an ulp of E4M3 is 6 % of a deviation, INT8 logits cost as much again, those
    # of 4 bits some 30 %.
    bound = 0.15 if recipes.NAMED[signature.recipe].of_qk.smooths_q else 0.05
    assert (actual - exact).abs().sum() <= bound * exact.abs().sum()


@draws(ci=50)
def test_a_call_is_rewritten_and_near_exact_or_left_as_it_was(signature):
    signature, inputs, expected = prepared(signature)
    sites, before, after = [], [], []

    def backend(gm, example_inputs):
        before.append(gm.code)
        sites.extend(rewrite(gm, Settings(emulate=True, recipe=signature.recipe)))
        after.append(gm.code)
        return gm.forward

    torch._dynamo.reset()
    clones = [x if x is None else x.clone() for x in inputs]
    torch.manual_seed(0)
    actual = torch.compile(signature.call, backend=backend, fullgraph=True)(*inputs)
    assert all(x is None or torch.equal(x, y) for x, y in zip(inputs, clones))
    (site,) = sites
    if site.rewritten:
        check_rewritten(signature, inputs, actual)
    else:
        assert site.reason and after == before
        assert torch.equal(actual.nan_to_num(7), expected.nan_to_num(7))
    refusable = signature.dropout_p or signature.D > 256 or signature.dtype == torch.float64
    assert site.rewritten == (not refusable), site.reason


@draws(ci=3)
def test_the_same_through_inductor(signature):
    signature, inputs, _ = prepared(signature)
    options = {"sage.emulate": True, "sage.recipe": signature.recipe}
    outs = []
    for backend in ("sage", "inductor"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        compiled = torch.compile(
            signature.call, backend=backend, options=options if backend == "sage" else None
        )
        outs.append(compiled(*inputs))
        if backend == "sage":
            (site,) = sage_inductor.report()
    strides = [[s for n, s in zip(o.shape, o.stride()) if n > 1] for o in outs]
    assert strides[0] == strides[1]
    if site.rewritten:
        check_rewritten(signature, inputs, outs[0])
    else:
        assert torch.equal(outs[0].nan_to_num(7), outs[1].nan_to_num(7))
