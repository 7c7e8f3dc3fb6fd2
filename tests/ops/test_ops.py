"""The ops as torch sees them: registration, fake outputs, errors, gradients, autocast."""

import math
import random
from pathlib import Path

import pytest
import support
import torch
import torch.nn.functional as F
from pairs import chosen, pairs, seeds
from support import arguments, attention_call, exactly, qkv, relative_l1, relative_l2, sdpa
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.testing import assert_close

from sage_inductor import lowering
from sage_inductor.ops import gpus, visibility
from sage_inductor.ops import recipe as recipes
from sage_inductor.ops.attention import tiles
from sage_inductor.ops.attention.select import attention, select
from sage_inductor.ops.attention_call import AttentionCall
from sage_inductor.ops.formats import MAX_ROWS, PV, Format, Prepared
from sage_inductor.ops.quantize.op import quantize_kv, smooth
from sage_inductor.ops.quantize.smooth import smooth_q
from sage_inductor.ops.recipe import NAMED, Recipe, decode
from sage_inductor.ops.reference import attention as emulation
from sage_inductor.ops.reference import quantize as reference
from sage_inductor.ops.reference.exact import masked
from sage_inductor.ops.sdpa import SdpaCall, attend, check, compose
from sage_inductor.ops.sdpa import attention_call as composed
from sage_inductor.ops.sparse.selector import Selection
from sage_inductor.ops.visibility import BlockLists, Visibility

RECIPES = list(NAMED)


@chosen(lambda recipe, N_kv: N_kv == 70 or recipe in ("sage1", "sage2-8b"), recipe=RECIPES,
        N_kv=[1, 70])  # fmt: skip
def test_opcheck_of_sdpa(recipe, N_kv):
    q, k, v = (x.requires_grad_() for x in qkv(N_kv=N_kv))
    torch.library.opcheck(torch.ops.sage.sdpa.default, arguments(q, k, v, recipe=recipe))


@chosen(
    lambda dtype, of_sink: dtype == torch.bfloat16 or of_sink == (4, 1, 1),
    dtype=[torch.float32, torch.bfloat16, torch.float16],
    of_sink=[(1,), (4, 1, 1), (2, 4, 65, 1)],
)
def test_with_sink_is_attention_with_one_score_more_in_each_row(dtype, of_sink):
    q, k, v = qkv()
    sink = torch.randn(of_sink) * 3
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    s = q @ k.mT
    exact = torch.cat([s, sink.expand(2, 4, 65, 1)], -1).softmax(-1)[..., :-1] @ v
    out, lse = (s.softmax(-1) @ v).to(dtype), s.logsumexp(-1)
    lse[0, 0, 0] = -math.inf  # sees nothing
    exact[0, 0, 0] = 0
    for stored in (out, out.transpose(1, 2).contiguous().transpose(1, 2)):
        given = stored, lse, sink.to(dtype)
        torch.library.opcheck(torch.ops.sage.with_sink.default, given)
        found = torch.ops.sage.with_sink(*given)
        assert found.dtype == dtype and found.stride() == stored.stride()
        assert_close(
            found, exact.to(dtype), rtol=2e-2, atol=1e-5 if dtype == torch.float32 else 1e-2
        )


def test_with_sink_has_no_backward():
    out, lse, sink = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3), torch.randn(2, 1, 1)
    for x in (out, sink):
        x.requires_grad_()
        with pytest.raises(NotImplementedError, match="a learned sink has no backward"):
            torch.ops.sage.with_sink(out, lse, sink).sum().backward()
        x.requires_grad_(False)


# The slow one of opcheck's utilities: it traces the emulation with sizes that are symbols.
DYNAMIC = "test_aot_dispatch_dynamic"
CHEAP = "test_schema", "test_autograd_registration", "test_faketensor"


def pieces(recipe, N_kv, rows, out_bnhd):
    """(op, arguments) of what makes and reads k and v, and what attention reads."""
    q, k, v = qkv(N_kv=N_kv)
    seen = Visibility.of(torch.rand(2, 1, 65, N_kv) > 0.7, (None, 0, False), N_kv, 128)
    visible = seen.keys(k)
    yield quantize_kv, (k, v, visible if rows else None, recipe.encode())
    yield attention, tuple(attention_call(q, k, v, recipe, seen, out_bnhd=out_bnhd))


@pytest.mark.parametrize("dynamic", [False, True])
def test_opcheck_of_smooth(dynamic):
    torch.library.opcheck(smooth, qkv()[1:2], test_utils=(DYNAMIC,) if dynamic else CHEAP)


@pairs(recipe=RECIPES, rows=[False, True], out_bnhd=[False, True])
def test_opcheck_of_the_pieces(recipe, rows, out_bnhd):
    recipe = NAMED[recipe]
    for op, args in pieces(recipe, 70, rows, out_bnhd):
        utilities = checks(recipe) if op is attention else CHEAP
        before = [x.clone() for x in args if isinstance(x, torch.Tensor)]
        torch.library.opcheck(op, args, test_utils=utilities)
        op(*args)
        assert same_bytes(before, [x for x in args if isinstance(x, torch.Tensor)])


def test_opcheck_of_one_pass_over_k_and_v_with_symbols():
    op, args = next(pieces(NAMED["sage2-8b-per-token"], 70, True, False))
    assert op is quantize_kv
    torch.library.opcheck(op, args, test_utils=DYNAMIC)


def same_bytes(xs, ys):
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(xs, ys))


def checks(recipe):
    """opcheck's schema test compares inputs by a subtraction that FP8 does not have on CPU: there
    the unchanged inputs are asserted by hand."""
    return CHEAP[1:] if recipe.pv == "fp8" else CHEAP


SEEN = torch.arange(70) < 60
MASKS = {
    "none": None,
    "bool": SEEN.expand(65, 70),
    "additive": torch.where(SEEN, torch.randn(4, 65, 70), torch.finfo().min),
}


def prepared(k, v, recipe, attn_mask=None):
    return torch.ops.sage.prepare(k, v, attn_mask, NAMED[recipe].encode(), False)


def prepared_always(N_kv, D_v, recipe, dynamic):
    """The slow utility once for each way to prepare: in 16 bits k is prepared as beside FP8."""
    slow = [(70, 64, "sage2-4b"), (128, 64, "sage3"), (128, 40, "sage2-8b-per-token")]
    return not dynamic or (N_kv, D_v, recipe) in slow


@chosen(prepared_always, N_kv=[1, 70, 128], D_v=[64, 40], recipe=RECIPES, dynamic=[False, True])
def test_opcheck_of_prepare_and_of_sdpa_with_what_it_gave(N_kv, D_v, recipe, dynamic):
    q, k, v = (x.requires_grad_() for x in qkv(N_kv=N_kv))
    v = v[..., :D_v].detach().requires_grad_()
    attn_mask = None if N_kv != 70 else MASKS["additive"].clone().requires_grad_()
    text = NAMED[recipe].encode()
    utilities = (DYNAMIC,) if dynamic else CHEAP
    args = k, v, attn_mask, text, False
    torch.library.opcheck(torch.ops.sage.prepare.default, args, test_utils=utilities)
    shared = prepared(k, v, recipe, attn_mask)
    assert not any(x.requires_grad or x._is_view() for x in shared)
    args = arguments(q, k, v, recipe=recipe, attn_mask=attn_mask, prepared=shared)
    before = [x.clone() for x in shared]
    utilities = (DYNAMIC,) if dynamic else checks(NAMED[recipe])
    torch.library.opcheck(torch.ops.sage.sdpa.default, args, test_utils=utilities)
    assert same_bytes(shared, before)


@pairs(recipe=RECIPES, name=list(MASKS), autocast=[False, True])
def test_what_prepare_gives_changes_no_bit_and_no_gradient(autocast, name, recipe):
    q, k, v = (x.requires_grad_() for x in qkv())
    attn_mask, cotangent, results = MASKS[name], torch.randn(2, 4, 65, 64), []
    for share in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            shared = prepared(k, v, recipe, attn_mask) if share else ()
            kwargs = {"recipe": recipe, "attn_mask": attn_mask, "prepared": shared}
            causal = {"is_causal": True, "bottom_right": True}  # it hides no key from all queries
            outs = [sdpa(q, k, v, **kwargs), sdpa(q * 2, k, v, **causal, **kwargs)]
        assert outs[0][0].dtype == (torch.bfloat16 if autocast else torch.float32)
        total = sum((out * cotangent).sum() for out, _ in outs)
        results.append([*outs[0], *outs[1], *torch.autograd.grad(total, (q, k, v))])
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("D_v", [64, 40])
def test_a_mean_of_v_that_is_noise_stays(D_v):
    k, v = torch.randn(2, 2, 2, 300, 64)
    _, _, k_mean, _, _, v_mean = prepared(k, v[..., :D_v], "sage2-8b")
    assert (v_mean == 0).float().mean() > 0.9 and k_mean.all()


@pytest.mark.parametrize("out_bnhd", [False, True])
def test_output_is_stored_in_the_order_asked_for(out_bnhd):
    out, lse = sdpa(*qkv(), out_bnhd=out_bnhd)
    assert (out.transpose(1, 2) if out_bnhd else out).is_contiguous()
    assert out.shape == (2, 4, 65, 64) and lse.shape == (2, 4, 65)


@pytest.mark.parametrize("kind", ["none", "bool", "additive"])
@pytest.mark.parametrize(
    "band",
    [(None, None, False), (None, 0, False), (None, 0, True), (9, 3, False), (9, 0, True)],
    ids=str,
)
def test_gradient_under_a_mask_and_a_band_is_exact_attentions(band, kind):
    inputs = [x.requires_grad_() for x in qkv()]
    attn_mask = (
        (torch.rand(4, 65, 70) > 0.5)
        | torch.eye(65, 70).bool()
        | torch.eye(65, 70).roll(5, 1).bool()
    )
    if kind == "additive":
        attn_mask = torch.randn(4, 65, 70).masked_fill(~attn_mask, -torch.inf).requires_grad_()
    attn_mask = None if kind == "none" else attn_mask
    support.check_gradients(
        *inputs, attn_mask, **dict(zip(("left", "right", "bottom_right"), band))
    )


@pytest.mark.parametrize(
    "of_q, of_mask", [("float32", "bfloat16"), ("bfloat16", "float16"), ("bfloat16", "float32")]
)
def test_gradient_under_a_mask_of_another_dtype(of_q, of_mask):
    """A row of the lowest fp32 is the mean of all values. In bf16 that number is -inf."""
    of_q, of_mask = (getattr(torch, each) for each in (of_q, of_mask))
    q, k, v = (x.to(of_q).requires_grad_() for x in qkv())
    attn_mask = torch.randn(4, 65, 70).to(of_mask)
    if of_mask == torch.float32:
        attn_mask[:, 3] = torch.finfo(torch.float32).min
    support.check_gradients(q, k, v, attn_mask.requires_grad_())


def test_bounds_beyond_every_sequence_are_32_bit_numbers():
    a = attention_call(*qkv(), "sage1")._replace(left=2**31 - 1, right=2**40)
    assert a.band_arguments() == (MAX_ROWS, MAX_ROWS, False)


@pytest.mark.parametrize("scale", [-0.125, 0.0])
def test_gradient_with_a_scale_that_is_not_positive(scale):
    support.check_gradients(*(x.requires_grad_() for x in qkv()), scale=scale, right=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_decides_the_dtype_and_gradients_keep_theirs(dtype):
    inputs = [x.requires_grad_() for x in qkv()]
    with torch.autocast("cpu", dtype):
        out, _ = sdpa(*inputs)
        assert out.dtype == F.scaled_dot_product_attention(*inputs, enable_gqa=True).dtype == dtype
    grads = torch.autograd.grad(out, inputs, torch.randn_like(out))
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in grads)


q, k, v = qkv()
BAD = {
    "3 dimensions": ((q[0], k, v), {}, ValueError, r"q must be \[B, H, N, D\], got 3 dimensions"),
    "dtypes": ((q, k.half(), v), {}, ValueError, "k must have q's dtype torch.float32, got torch.float16"),
    "devices": ((q, k, v.to("meta")), {}, ValueError, "v must be on q's device cpu, got meta"),
    "float64": ([x.double() for x in (q, k, v)], {}, TypeError, "dtype must be one of .* got torch.float64"),
    "head_dim": ((q, k[..., :32], v[..., :32]), {}, ValueError, "k must have q's batch and head_dim"),
    "large head_dim": ([F.pad(x, (0, 200)) for x in (q, k, v)], {}, ValueError, "head_dim must be 1..256, got 264"),
    "heads": ((q[:, :3], k, v), {}, ValueError, "heads of q must be a multiple of k's, got 3 and 2"),
    "k and v": ((q, k, v[:, :, :-1]), {}, ValueError, "k and v must have one batch, heads and length"),
    "empty": ((q, k[:, :, :0], v[:, :, :0]), {}, ValueError, "k must have 1 to 1073741568 rows, got N=0"),
    "mask's shape": ((q, k, v), {"attn_mask": torch.ones(65, 71).bool()}, ValueError, r"broadcast to \[2, 4, 65, 70\], got \[65, 71\]"),
    "mask's dimensions": ((q, k, v), {"attn_mask": torch.ones(70).bool()}, ValueError, "attn_mask must broadcast to"),
    "mask's device": ((q, k, v), {"attn_mask": torch.ones(65, 70, device="meta")}, ValueError, "attn_mask must be on q's device cpu, got meta"),
    "mask's dtype": ((q, k, v), {"attn_mask": torch.ones(65, 70).int()}, TypeError, "attn_mask must be bool or .* got torch.int32"),
    "bound": ((q, k, v), {"left": -1}, ValueError, "left must be None or at least 0, got -1"),
    "prepared": ((q, k, v), {"prepared": [k] * 3}, ValueError, "prepared must be empty or 6 tensors, got 3"),
    "scale": ((q, k, v), {"scale": float("nan")}, ValueError, "scale must be finite, got nan"),
    "warpgroups": ((q, k, v), {"recipe": "sage2-8b-per-token", "warpgroups": 4}, ValueError, r"warpgroups must be one of \(None, 0, 1, 2, 3\), got 4"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_what_must_hold_and_what_was_got(case):
    inputs, kwargs, error, message = BAD[case]
    with pytest.raises(error, match=f"sage::sdpa: .*{message}|{message}"):
        sdpa(*inputs, **kwargs)


def without_memory(N_q=65, N_kv=70, D=64, **others) -> SdpaCall:
    q, k = (torch.empty(1).expand(1, 2, N, D) for N in (N_q, N_kv))
    return SdpaCall.of(q, k, k, 0.125, NAMED["sage1"].encode(), **others)


TWO_ROWS = dict(kv_num_blocks=torch.ones(1, 1, 2).int(), kv_indices=torch.zeros(1, 1, 2, 1).int())
ENDS = {  # of a number: what makes a call, what is taken, what is beyond that
    "queries": (lambda n: without_memory(N_q=n), [1, MAX_ROWS], [0, MAX_ROWS + 1]),
    "keys": (lambda n: without_memory(N_kv=n), [1, MAX_ROWS], [0, MAX_ROWS + 1]),
    "head_dim": (lambda n: without_memory(D=n), [1, 256], [0, 257]),
    "left": (lambda n: without_memory(band=(n, None, False)), [0], [-1]),
    "right": (lambda n: without_memory(band=(None, n, False)), [0], [-1]),
    "warpgroups": (lambda n: without_memory(warpgroups=n), [None, 0, 1, 2, 3], [-1, 4]),
    "dimensions of a mask": (
        lambda n: without_memory(attn_mask=torch.ones((1,) * n).bool()), [2, 3, 4], [0, 1, 5]),
    "tensors of `prepare`": (lambda n: without_memory(prepared=[q] * n), [0, 3], [1, 2, 4]),
    "queries of lists": (
        lambda n: without_memory(n, block_q=64, block_kv=64, **TWO_ROWS), [1, 127, 128], [129]),
}  # fmt: skip


@pytest.mark.parametrize("what", ENDS)
def test_both_ends_of_what_is_taken_are_taken_and_nothing_beyond(what):
    call_of, taken, beyond = ENDS[what]
    for n in taken:
        check(call_of(n))
    for n in beyond:
        with pytest.raises(ValueError, match="^sage::sdpa: .*got "):
            check(call_of(n))


def test_prepare_refuses_what_sdpa_refuses():
    with pytest.raises(ValueError, match="k and v must have one batch, heads and length"):
        prepared(k, v[:, :, :-1], "sage1")


def test_a_recipe_of_other_sources_is_refused():
    with pytest.raises(ValueError, match="means something else .* export the original model again"):
        sdpa(q, k, v, recipe="int8/per_thread,fp8@0.1.0+00000000")
    other = f"int8/per_thread,fp8@{recipes.MEANING}+00000000"
    with pytest.raises(ValueError, match=r"by other sources .* sage_inductor.rewrite\(program\)"):
        sdpa(q, k, v, recipe=other)
    assert recipes.renewed(other) == NAMED["sage2-8b"].encode()


def test_a_recipe_is_tagged_by_every_source_that_decides_what_it_means(monkeypatch):
    folder = Path(recipes.__file__).parents[1]
    read, read_bytes = set(), Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda f: read.add(f.name) or read_bytes(f))
    recipes.source_tag.__wrapped__()
    rooms = [folder / "ops", Path(lowering.__file__).parent]
    assert read >= {f.name for room in rooms for f in room.rglob("*.py")} and len(read) > 12


def waves(H: int, N: int, phase: float) -> torch.Tensor:
    """[1, H, N, 64], the same with every torch."""
    i = torch.arange(H * N * 64, dtype=torch.float64)
    x = (1.7 * i + phase).sin() + (0.31 * i * (1 + phase)).cos()
    return x.float().view(1, H, N, 64)


# What is prepared of v in FP8: by smooth and quantize_v, and in one pass over k and v.
V_IN_TWO_PASSES = [
    ("float8_e4m3fn", [1, 2, 64, 256], 210.1),
    ("float32", [1, 2, 64], 0.004237),
    ("float32", [1, 2, 64], 1.0),
]
V_IN_ONE_PASS = [
    ("float8_e4m3fn", [1, 2, 64, 256], 49.65),
    ("float32", [1, 2, 64], 0.01759),
    ("float32", [1, 2, 64], 0.9294),
]
# recipes.MEANING -> of each recipe: the error at some elements, and what is prepared of k and v, with
# its mean magnitude.
MEANINGS = {
    2: {
        "sage1": ([-0.0014, -0.0061, 0.0046, 0.0001, 0.0048, -0.0016], [
            ("int8", [1, 2, 256, 64], 30.06),
            ("float32", [1, 2, 4, 1], 0.01185),
            ("float32", [1, 2, 64], 0.9999),
        ]),
        "sage2-8b": ([0.0231, 0.0006, -0.0084, -0.0079, -0.0203, -0.0021], [
            ("int8", [1, 2, 256, 64], 30.12),
            ("float32", [1, 2, 4, 4], 0.01181),
            ("float32", [1, 2, 64], 0.9999),
            *V_IN_TWO_PASSES,
        ]),
        "sage2-8b-per-token": ([0.0081, -0.0028, 0.0289, 0.0196, -0.0189, 0.0068], [
            ("int8", [1, 2, 256, 64], 27.36),
            ("float32", [1, 2, 4, 1], 0.01321),
            ("float32", [1, 2, 64], 0.9288),
            *V_IN_ONE_PASS,
        ]),
        "sage2-8b-fp8qk": ([0.0037, 0.0221, 0.0086, 0.0253, -0.0275, 0.0062], [
            ("float8_e4m3fn", [1, 2, 256, 64], 96.52),
            ("float32", [1, 2, 4, 1], 0.003746),
            ("float32", [1, 2, 64], 0.9288),
            *V_IN_ONE_PASS,
        ]),
        "sage2-4b": ([0.0196, -0.0314, 0.0405, -0.0207, -0.0067, 0.0], [
            ("uint8", [1, 2, 256, 32], 68.33),
            ("float32", [1, 2, 4, 4], 0.2143),
            ("float32", [1, 2, 64], 0.9999),
            *V_IN_TWO_PASSES,
        ]),
        "sage1-per-token": ([-0.0014, -0.0063, 0.0045, -0.0003, 0.004, -0.0006], [
            ("int8", [1, 2, 256, 64], 27.36),
            ("float32", [1, 2, 4, 1], 0.01321),
            ("float32", [1, 2, 64], 0.9288),
        ]),
        "sage2-8b-rotated": ([0.0053, 0.0012, 0.0302, 0.0188, -0.0176, 0.0065], [
            ("int8", [1, 2, 256, 64], 19.8),
            ("float32", [1, 2, 4, 1], 0.07129),
            ("float32", [1, 2, 64], 0.9288),
            *V_IN_ONE_PASS,
        ]),
        "sage1-rotated": ([-0.0026, -0.0079, 0.0104, -0.0007, 0.0034, 0.0], [
            ("int8", [1, 2, 256, 64], 19.8),
            ("float32", [1, 2, 4, 1], 0.07129),
            ("float32", [1, 2, 64], 0.9288),
        ]),
        "sage3": ([0.0479, 0.1126, 0.02, 0.0859, 0.1267, -0.0118], [
            ("uint8", [1, 2, 256, 32], 78.75),
            ("float32", [1, 2], 0.001953),
            ("float32", [1, 2, 64], 0.9999),
            ("uint8", [1, 2, 64, 128], 79.67),
            ("float32", [1, 2, 64], 0.001038),
            ("float32", [1, 2, 64], 1.0),
            ("uint8", [1, 2, 256, 4], 66.78),
            ("uint8", [1, 2, 64, 16], 75.72),
        ]),
    },
}  # fmt: skip


@pytest.mark.parametrize("recipe", NAMED)
def test_what_a_recipe_means_is_what_was_declared(recipe):
    """Where this fails, programs that were saved mean something else now: add one to
    recipes.MEANING, and its row here. (The kernels are held to this emulation.)"""
    q, k, v = waves(4, 70, 0.1), waves(2, 150, 0.2) + 1, waves(2, 150, 0.3) + 1
    errors, prepared = MEANINGS[recipes.MEANING][recipe]
    error = sdpa(q, k, v, True, 0.125, recipe)[0] - exactly(q, k, v, True, 0.125)[0]
    assert_close(
        error[0, 1, 5::13, 7::20].flatten()[:6], torch.tensor(errors).double(), atol=3e-4, rtol=0
    )
    found = torch.ops.sage.prepare(k, v, None, NAMED[recipe].encode(), False)
    assert [(str(x.dtype)[6:], list(x.shape)) for x in found] == [(d, s) for d, s, _ in prepared]
    for x, (_, _, size) in zip(found, prepared):
        assert x.double().abs().mean().item() == pytest.approx(size, rel=1e-3)


def test_the_arguments_of_saved_programs_are_what_was_declared():
    """Where this fails: as above."""
    names = {
        op: [a.name for a in getattr(torch.ops.sage, op).default._schema.arguments]
        for op in ("sdpa", "prepare", "cube_order", "documents", "select_blocks", "with_sink")
    }
    assert (recipes.MEANING, names) == (2, {
        "sdpa": ["q", "k", "v", "attn_mask", "prepared", "left", "right", "bottom_right", "scale",
                 "recipe", "warpgroups", "out_bnhd", "portable", *BlockLists._fields, "perm",
                 "perm_k", "spans", "documents"],
        "prepare": ["k", "v", "attn_mask", "recipe", "portable"],
        "cube_order": ["x", "size", "cube", "before"],
        "documents": ["cu_q", "T_q", "cu_k", "T_k", "seqused_k"],
        "select_blocks": ["q", "k", "scale", *Selection._fields[:5], "block_q", "block_kv", "others",
                          "perm"],
        "with_sink": ["out", "lse", "sink"],
    })  # fmt: skip


def test_recipes_encode_to_what_decodes_to_them():
    for recipe in NAMED.values():
        assert decode(recipe.encode()) == recipe
    with pytest.raises(ValueError, match="granularity must be one of .* got 'per_column'"):
        Recipe("per_column", "fp8")
    for qk in ("fp8", "int4"):
        with pytest.raises(ValueError, match=f"qk must be one of .*with pv='16bit', got '{qk}'"):
            Recipe("per_thread", "16bit", qk=qk)
    for granularity in ("per_token", "per_block"):
        message = (
            rf"granularity must be one of \('per_thread',\) with qk='int4', got '{granularity}'"
        )
        with pytest.raises(ValueError, match=message):
            Recipe(granularity, "fp8", qk="int4")
    for wrong, field in (
        (("per_token", "fp8", "fp8", True), "rotated"),
        (("per_thread", "fp8", "int4", True), "rotated"),
        (("per_token", "nvfp4", "nvfp4"), "granularity"),
        (("per_16", "fp8", "int8"), "granularity"),
        (("per_16", "nvfp4", "int8"), "qk"),
        (("per_token", "fp8", "nvfp4"), "qk"),
    ):
        with pytest.raises(ValueError, match=f"{field} must be one of"):
            Recipe(*wrong)


@pytest.mark.parametrize("recipe", ["sage2-8b", "sage2-4b"])
def test_sdpa_is_its_pieces(recipe):
    """What golden graphs show and eager runs: smooth, quantize, attention, and lse's correction. With
    INT4 q is smoothed too: in the graph, and by means that the kernel subtracts as they are."""
    q, r, of_q = qkv(N_q=300)[0] + 3, NAMED[recipe], (None, None)
    out, lse = sdpa(q, k, v, recipe=recipe)
    (k_mean, _), (v_mean, v_amax) = reference.smooth(k), reference.smooth(v, keep=False)
    of_k = reference.quantize_k(k, k_mean, r)
    of_v = reference.quantize_v(v, v_mean, v_amax, r)
    if recipe == "sage2-4b":
        assert of_k[0].dtype == torch.uint8 and of_k[0].shape == (2, 2, 128, 32)
        of_q = smooth_q(q, k, k_mean, None)
    pieces = Prepared(*of_k, k_mean, *of_v, v_mean)
    a = AttentionCall(q, k, None, v, 0.125, 70, r.encode(), q_mean=of_q[0], delta=of_q[1])
    a = a.with_prepared(pieces)
    expected, raw_lse = emulation.attention(a)
    assert_close(out, expected)
    correction = 0.125 * torch.einsum("bhnd,bhd->bhn", q, k_mean.repeat_interleave(2, 1))
    assert_close(lse, raw_lse + correction)


def test_the_tile_of_a_recipe_reaches_the_op_of_kernels(monkeypatch):
    monkeypatch.setattr(gpus, "capability", lambda device: (9, 0))
    with FakeTensorMode():
        inputs = [torch.empty(x.shape, device="cuda", dtype=torch.bfloat16) for x in (q, k, v)]

    def told(warpgroups):
        call = SdpaCall(*arguments(*inputs, recipe="sage2-8b-per-token", warpgroups=warpgroups))

        def run(q, k, v):
            return compose(call._replace(q=q, k=k, v=v))

        op = torch.ops.sage.attention.default
        (node,) = make_fx(run)(*inputs).graph.find_nodes(op="call_function", target=op)
        return AttentionCall(*node.args).warpgroups

    assert [told(n) for n in (0, 2, 3, None)] == [0, 2, 3, None]


def test_a_call_is_one_op_of_kernels_unless_k_and_v_are_prepared_apart(monkeypatch):
    """For other calls, or once for all, where Inductor folds constants."""
    monkeypatch.setattr(gpus, "capability", lambda device: (9, 0))
    inputs = [x.to("meta", torch.bfloat16) for x in (q, k, v)]

    def ops(recipe, freezing=False, shared=False) -> list[str]:
        def run(q, k, v):
            parts = torch.ops.sage.prepare(k, v, None, given.recipe, False) if shared else []
            return attend(given._replace(q=q, k=k, v=v, prepared=parts))[0]

        given = SdpaCall(*arguments(*inputs, recipe=recipe))
        with torch._inductor.config.patch(freezing=freezing):
            graph = make_fx(run)(*inputs).graph
        names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
        return [name.split(".")[1] for name in names if name.startswith("sage.")]

    for recipe in RECIPES:
        pieces = ["quantize_kv"] * NAMED[recipe].of_qk.smooths_q + ["attention"]
        assert ops(recipe) == pieces
    assert ops("sage2-8b-per-token", freezing=True) == ["quantize_kv", "attention"]
    assert ops("sage2-8b-per-token", shared=True) == ["prepare", "attention"]


@pytest.mark.parametrize("recipe", [r for r in RECIPES if not NAMED[r].of_qk.smooths_q])
@pytest.mark.parametrize("masked", [False, True])
def test_what_one_op_prepares_is_what_two_prepare(recipe, masked):
    attn_mask = torch.rand(2, 1, 65, 70) > 0.5 if masked else None
    found = sdpa(q, k, v, recipe=recipe, attn_mask=attn_mask)
    parts = torch.ops.sage.prepare(k, v, attn_mask, NAMED[recipe].encode(), False)
    apart = sdpa(q, k, v, recipe=recipe, attn_mask=attn_mask, prepared=parts)
    assert all(map(torch.equal, found, apart))
    seen = Visibility.of(attn_mask, (None, None, False), 70, 128)
    a = composed(q, k, v, None, seen, 0.1, NAMED[recipe], True)
    torch.library.opcheck(attention, tuple(a), test_utils=CHEAP)


@pytest.mark.parametrize("portable", [False, True])
def test_on_a_gpu_one_op_corrects_lse_and_none_where_it_has_to_travel(portable, monkeypatch):
    monkeypatch.setattr(gpus, "capability", lambda device: (9, 0))
    inputs = [x.to("meta", torch.bfloat16) for x in (q, k, v)]
    call = SdpaCall(*arguments(*inputs, recipe="sage2-8b-per-token", portable=portable))
    graph = make_fx(lambda q, k, v: compose(call._replace(q=q, k=k, v=v)))(*inputs).graph
    op = torch.ops.sage.unsmoothed_lse.default
    found = graph.find_nodes(op="call_function", target=op)
    sums = graph.find_nodes(op="call_function", target=torch.ops.aten.sum.dim_IntList)
    assert (len(found), len(sums)) == ((0, 1) if portable else (1, 0))


def test_a_tile_changes_nothing_where_it_is_not():
    given = dict(recipe="sage2-8b-per-token", prepared=prepared(k, v, "sage2-8b-per-token"))
    found = sdpa(q, k, v, warpgroups=3, **given)
    for out, other in zip(found, sdpa(q, k, v, recipe="sage2-8b-per-token")):
        assert torch.equal(out, other)


# -- masks ----


@pytest.mark.parametrize("recipe", ["sage1", "sage2-8b", "sage2-4b", "sage2-8b-per-token", "sage3"])
def test_what_a_mask_a_head_hides_from_a_group_may_be_anything(recipe):
    q, k, v = qkv()
    attn_mask = torch.ones(1, 4, 1, 70, dtype=torch.bool)
    attn_mask[:, :2, :, 60:], attn_mask[:, 2:, :, :10] = False, False
    for keys, x in ((slice(60, 70), 0), (slice(0, 10), 1)):
        k[:, x, keys], v[:, x, keys] = torch.inf, torch.nan
    out, lse = sdpa(q, k, v, recipe=recipe, attn_mask=attn_mask)
    for i, keys in ((0, slice(0, 60)), (1, slice(10, 70))):
        group = q[:, 2 * i : 2 * i + 2], k[:, i : i + 1, keys], v[:, i : i + 1, keys]
        assert relative_l1(out[:, 2 * i : 2 * i + 2], exactly(*group, False, 0.125)[0]) < 0.1


def test_a_key_that_one_head_of_a_group_sees_counts():
    k, attn_mask = torch.ones(1, 2, 9, 8), torch.zeros(1, 4, 1, 9, dtype=torch.bool)
    for head, keys in enumerate((slice(0, 3), slice(2, 5), slice(4, 7), slice(8, 9))):
        attn_mask[:, head, :, keys] = True
    counts = Visibility.of(attn_mask, (None, None, False), 9, 64).keys(k)
    assert counts.tolist() == [[[1, 1, 1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1, 0, 1]]]


@pairs(recipe=RECIPES, of_each=["key", "query and key", "query and key, added"], D_v=[40, 72])
def test_a_mask_where_v_has_a_head_dim_of_its_own(recipe, of_each, D_v):
    """What it hides from all queries may be no number."""
    q, k, v = qkv(N_kv=200)
    v = torch.cat([v, v], -1)[..., :D_v]
    seen = torch.rand(1 if of_each == "key" else 65, 200) > 0.3
    seen[:, 150:] = False
    attn_mask = torch.randn(65, 200).masked_fill(~seen, -torch.inf) if "added" in of_each else seen
    k[:, :, 150:], v[:, :, 150:] = torch.nan, torch.inf
    out, lse = sdpa(q, k, v, recipe=recipe, attn_mask=attn_mask)
    of_seen = k[:, :, :150], v[:, :, :150]
    exact, exact_lse = exactly(q, *of_seen, False, 0.125, attn_mask[..., :150])
    of_4_bits = NAMED[recipe].of_qk.smooths_q
    assert out.shape == exact.shape == (2, 4, 65, D_v)
    assert relative_l1(out - 3, exact - 3) < (0.6 if of_4_bits else 0.12)
    assert (lse - exact_lse).abs().max() < (1.5 if of_4_bits else 0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_the_lowest_number_hides_costs_no_accuracy(recipe, dtype):
    """The padding of transformers: `finfo.min`, on keys that hold large numbers."""
    q, k, v = qkv(dtype=dtype)
    hidden = torch.arange(70) >= 60
    attn_mask = torch.zeros(2, 1, 1, 70, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)
    clean, _ = sdpa(q, k[:, :, :60], v[:, :, :60], recipe=recipe)
    exact, _ = exactly(q, k[:, :, :60], v[:, :, :60], False, 0.125)
    k[:, :, 60:], v[:, :, 60:] = 1000 * k[:, :, 60:], 1000 * v[:, :, 60:]
    k[:, :, 65] = torch.nan
    if NAMED[recipe].pv != "16bit":  # which takes v as it is: 0 * NaN, as in SDPA
        v[:, :, 65] = torch.nan
    out, _ = sdpa(q, k, v, recipe=recipe, attn_mask=attn_mask)
    error = relative_l1(out, exact)
    assert error < 1.3 * relative_l1(clean, exact) + 0.005, error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_row_that_sees_nothing_but_the_lowest_number_averages_over_all_keys(recipe, dtype):
    """As softmax by hand does: rows of a causal mask before the left padding's end."""
    q, k, v = qkv(N_q=70, dtype=dtype)
    hidden = torch.ones(70, 70).triu(1).bool() | (torch.arange(70) < 9)
    attn_mask = torch.zeros(1, 1, 70, 70, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)
    out, _ = sdpa(q, k, v, recipe=recipe, attn_mask=attn_mask)
    mean = v.double().mean(2, keepdim=True).repeat_interleave(2, 1)
    assert relative_l1(out[:, :, :9], mean.expand(-1, -1, 9, -1)) < 0.05


@pytest.mark.parametrize("heads", [1, 4], ids=["one mask", "a mask per head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_only_rows_of_the_lowest_number_see_is_in_the_range_of_v(recipe, dtype, heads):
    """Two left-padded sequences whose padding holds larger numbers. Beside fp16's lowest number
    fp32 keeps the scores, so these rows are attention to all keys."""
    lowest, start, N = torch.finfo(dtype).min, torch.tensor([60, 130]), 200
    q, k, v = qkv(N_q=N, N_kv=N, dtype=dtype)
    attn_mask = torch.zeros(2, heads, N, N, dtype=dtype)
    attn_mask.masked_fill_(torch.ones(N, N).triu(1).bool(), lowest)
    attn_mask.masked_fill_((torch.arange(N) < start[:, None])[:, None, None], lowest)
    pads = torch.arange(N) < start[:, None]
    v = torch.where(pads[:, None, :, None], 4 * v, v)

    out, _ = sdpa(q, k, v, recipe=recipe, attn_mask=attn_mask)
    exact, _ = exactly(q, k, v, False, 0.125, attn_mask)
    of_pads, of_others = (
        relative_l1(*(x.double().transpose(1, 2)[rows] for x in (out, exact)))
        for rows in (pads, ~pads)
    )
    assert of_pads < {"sage3": 0.3, "sage2-4b": 0.35}.get(recipe, 0.07), of_pads
    assert of_others < {"sage3": 0.3, "sage2-4b": 0.3}.get(recipe, 0.05), of_others


@pytest.mark.parametrize("recipe", RECIPES)
def test_where_the_lowest_number_hides_all_of_a_batch_element_it_averages_over_its_keys(recipe):
    """What pads a batch of fewer sequences. The other element's padding still does not matter."""
    q, k, v = qkv()
    attn_mask = torch.zeros(2, 1, 1, 70)
    attn_mask[0], attn_mask[1, ..., 60:] = (torch.finfo(torch.float32).min,) * 2
    k[1, :, 60:] *= 1000
    out, _ = sdpa(q, k, v, recipe=recipe, attn_mask=attn_mask)
    mean = v[:1].double().mean(2, keepdim=True).repeat_interleave(2, 1)
    assert relative_l1(out[:1], mean.expand(-1, -1, 65, -1)) < 0.05
    exact, _ = exactly(q[1:], k[1:, :, :60], v[1:, :, :60], False, 0.125)
    assert relative_l1(out[1:], exact) < 0.1


# -- a format is a row ----


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_recipe_of_another_format_is_a_row_of_the_table(compiled, monkeypatch):
    """INT8 q k^T beside E5M2 p v, through the whole chain. No kernel multiplies it: on a GPU such a
    call stays as it was."""
    monkeypatch.setitem(PV, "e5m2", Format(torch.float8_e5m2, 57344.0, beside=("int8",)))
    monkeypatch.setitem(NAMED, "sage2-e5m2", Recipe("per_thread", "e5m2"))
    q, k, v = qkv()
    exact = exactly(q, k, v, False, 0.125)[0]
    if compiled:
        options = {"sage.recipe": "sage2-e5m2", "sage.emulate": True, "sage.strict": True}
        call = torch.compile(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.125, enable_gqa=True),
            backend="sage", options=options,
        )  # fmt: skip
        out = call(q, k, v)
    else:
        out, _ = sdpa(q, k, v, recipe="sage2-e5m2")
        assert prepared(k, v, "sage2-e5m2")[3].dtype == torch.float8_e5m2
    e4m3 = relative_l1(sdpa(q, k, v)[0], exact)
    assert 1.3 * e4m3 < relative_l1(out, exact) < 3 * e4m3  # a bit of mantissa less
    with pytest.raises(ValueError, match="no kernel for pv='e5m2'"):
        tiles.tile((9, 0), "int8", "e5m2", 64, False)


def test_a_summary_for_other_tiles_is_refused():
    """The tiles of the kernel that reads it skip by it."""
    attn_mask = torch.rand(2, 1, 200, 70) > 0.5
    a = attention_call(*qkv(N_q=200), "sage1", Visibility.of(attn_mask, (None, 0, False), 70, 64))
    (mask, seen), strides, kind, additive = a.mask_arguments(64)
    assert mask is a.attn_mask and seen.shape[2] == 5 and (kind, additive) == (2, False)
    assert strides == [200 * 70, 0, 70, 1, 5 * 70, 0, 70]
    with pytest.raises(ValueError, match="must have 3 rows for tiles of 128 queries, got 5"):
        a.mask_arguments(128)


# -- bands ----


@pytest.mark.parametrize("seed", range(200))
def test_a_bound_of_a_band_is_left_out_where_it_hides_no_key_and_only_there(seed):
    draw = random.Random(seed)
    n_q, n_kv = draw.randint(1, 9), draw.randint(1, 9)
    near = [n + shift for n in (n_q, n_kv) for shift in (-2, -1, 0, 1)]
    bounds = [None, *(n for n in near if n >= 0)]
    band = draw.choice(bounds), draw.choice(bounds), draw.random() < 0.5

    def seen(left, right, bottom_right):
        return masked(torch.zeros(n_q, n_kv), None, left, right, bottom_right)

    q = torch.empty(1, 1, n_q, 8)
    a = AttentionCall(q, None, None, None, 1.0, n_kv, "", False, None, None, *band)
    found = a.without_idle_bounds()
    left, right, bottom_right = found[10:13]
    assert torch.equal(seen(left, right, bottom_right), seen(*band))
    assert found[:10] == a[:10] and found[12:] == a[12:]
    for bound in (left, None, False), (None, right, False):
        idle = (seen(*bound[:2], bottom_right) == 0).all()
        assert idle == (bound == (None, None, False))


@pytest.mark.parametrize("recipe", ["sage2-8b-per-token", "sage1"])
@pytest.mark.parametrize(
    "N_q, N_kv, bottom_right", [(70, 70, False), (33, 70, True), (70, 33, False)]
)
def test_a_window_about_as_long_as_the_sequence(N_q, N_kv, bottom_right, recipe):
    """From N - 1 on it is causal, to the bit."""
    q, k, v = qkv(N_q=N_q, N_kv=N_kv)
    given = dict(recipe=recipe, bottom_right=bottom_right)
    causal = sdpa(q, k, v, True, **given)
    last = (N_kv if bottom_right else N_q) - 1
    for left in range(last - 2, last + 3):
        out, lse = sdpa(q, k, v, True, left=left, **given)
        exact, exact_lse = exactly(q, k, v, True, 0.125, left=left, bottom_right=bottom_right)
        assert relative_l1(out - 3, exact - 3) < 0.1 and (lse - exact_lse).abs().max() < 0.05
        same = torch.equal(out, causal[0]) and torch.equal(lse, causal[1])
        assert same == (left >= last)


@pytest.mark.parametrize("seed", range(100))
def test_the_keys_that_a_band_shows_to_any_query(seed):
    draw = random.Random(seed)
    n_q, n_kv = draw.randint(1, 9), draw.randint(1, 9)
    left, right = (draw.choice([None, *range(10)]) for _ in range(2))
    band = left, right, draw.random() < 0.5
    shown = (masked(torch.zeros(n_q, n_kv), None, *band) == 0).any(0)
    keys = visibility.seen_keys(band, n_q, n_kv)
    first, last = shown.nonzero().flatten()[[0, -1]].tolist()
    assert (keys or (0, n_kv)) == (first, last + 1)
    assert shown[first : last + 1].all() and (keys is None) == bool(shown.all())


@pairs(
    recipe=RECIPES, mask=["none", "one for all keys", "bool", "additive"], bottom_right=[False, True]
)  # fmt: skip
def test_keys_that_a_band_hides_from_every_query_may_hold_anything(recipe, mask, bottom_right):
    """They change no bit, and what a kernel reads of k and v is what it reads where they are not
    there."""
    q, k, v = qkv(N_q=65, N_kv=200)
    seen = slice(115, 200) if bottom_right else slice(0, 78)
    attn_mask = {
        "none": None,
        "one for all keys": torch.rand(65, 1) > 0.1,
        "bool": torch.rand(65, 200) > 0.1,
        "additive": torch.randn(2, 1, 1, 200),
    }[mask]
    band = dict(left=20, right=13, bottom_right=bottom_right, recipe=recipe)
    out, lse = sdpa(q, k, v, attn_mask=attn_mask, **band)
    hidden = torch.ones(200, dtype=torch.bool)
    hidden[seen] = False
    k[:, :, hidden], v[:, :, hidden] = torch.nan, torch.inf
    found = sdpa(q, k, v, attn_mask=attn_mask, **band)
    if mask in ("bool", "additive"):
        attn_mask = attn_mask[..., seen]
    without = sdpa(q, k[:, :, seen], v[:, :, seen], attn_mask=attn_mask, **band)
    for a, b, c in zip((out, lse), found, without, strict=True):
        assert not a.isnan().any() and torch.equal(a, b) and torch.equal(a, c)


def test_what_a_band_hides_stays_where_lists_or_other_calls_may_need_it():
    q, k, v = qkv(N_q=65, N_kv=200)
    lists = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    listed = BlockLists(*lists, *lists, 128, 64)._asdict()
    for given in ({}, {"prepared": prepared(k, v, "sage1")}, listed):
        call = SdpaCall(*arguments(q, k, v, True, recipe="sage1", **given))
        assert call.of_seen_keys().k.shape[2] == (200 if given else 65)


def test_a_kernel_is_told_of_no_bound_that_hides_no_key(monkeypatch):
    told, attention = [], emulation.attention
    monkeypatch.setattr(
        emulation, "attention", lambda a, *args: told.append(a) or attention(a, *args)
    )
    x = torch.randn(1, 2, 70, 16)
    for left in (68, 69, 4095):
        sdpa(x, x, x, True, left=left)
    assert [(a.left, a.right) for a in told] == [(68, 0), (None, 0), (None, 0)]


def test_a_band_of_lengths_that_are_not_known_stays_without_a_guard():
    shape_env, source = ShapeEnv(), ConstantSource("N")
    symbol = shape_env.create_symbol(16, source, DimDynamic.DYNAMIC)
    N = shape_env.create_symintnode(symbol, hint=16, source=source)
    with FakeTensorMode(shape_env=shape_env):
        q = torch.empty(1, 1, N, 8)
    a = AttentionCall(q, None, None, None, 1.0, N, "", left=4095, right=0)
    assert a.without_idle_bounds() == a and not shape_env.guards


# -- block lists ----


@seeds(16, always=6)
def test_attention_by_block_lists_is_exact_attention_of_what_they_name(seed):
    """A block that is named twice counts twice; the band holds for the partial blocks alone."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    size = [draw.choice(visibility.BLOCK_SIZES) for _ in range(2)]
    N_q, N_kv = (draw.randint(1, 600) for _ in range(2))
    B, H, density, full = (draw.choice(x) for x in ((1, 2), (1, 4), (0.1, 0.5, 1), (False, True)))
    lists = support.block_lists(B, H, N_q, N_kv, *size, density, full)
    bands = (None, None, False), (None, 0, False), (None, 0, True), (70, 0, False), (30, 20, True)
    left, right, bottom_right = draw.choice(bands)
    band = dict(left=left, right=right, bottom_right=bottom_right)
    attn_mask = draw.choice([None, torch.rand(2, 1, 1, N_kv) > 0.3])
    q, k, v = qkv(2, 4, 2, N_q, N_kv, 64)
    for recipe in ("sage2-8b", "sage2-8b-per-token", "sage1-per-token", "sage2-4b"):
        given = dict(attn_mask=attn_mask, **band)
        out, lse = sdpa(q, k, v, recipe=recipe, **given, **lists._asdict())
        expected, expected_lse = exactly(q, k, v, False, 0.125, **given, blocks=lists)
        empty = expected_lse == -math.inf
        assert torch.equal(lse == -math.inf, empty) and (out[empty] == 0).all()
        if not empty.all():
            assert relative_l2(out, expected) < (0.05 if recipe == "sage2-4b" else 0.01)
            atol = 1 if recipe == "sage2-4b" else 0.1
            assert_close(lse[~empty].double(), expected_lse[~empty], rtol=0, atol=atol)


@pytest.mark.parametrize(
    "recipe", ["sage2-8b", "sage2-8b-rotated", "sage1-per-token", "sage2-4b", "sage2-8b-fp8qk"]
)
@pytest.mark.parametrize("masked", [False, True])
def test_keys_that_no_list_names_may_hold_anything(recipe, masked):
    """As in what Inductor compiles for flex_attention. A head of k counts what any head of q names,
    in its partial blocks or in its full ones."""
    q, k, v = qkv(1, 4, 2, 200, 400, 64)
    partial = torch.tensor([[[0, 9], [9, 9]], [[1, 9], [0, 1]], [[5, 5], [9, 9]], [[9, 9], [5, 9]]])
    full = torch.tensor([[[1], [9]], [[1], [9]], [[9], [6]], [[9], [9]]])  # beyond the keys: none
    of = [([[x.shape[2]] * 2] * 4, x) for x in (partial, full)]
    of = (
        torch.tensor(y).int()[None] if isinstance(y, list) else y.int()[None] for x in of for y in x
    )
    lists = BlockLists(*of, 128, 64)
    hidden = torch.ones(2, 400, dtype=torch.bool)
    hidden[0, :128] = hidden[1, 320:] = False
    shown = torch.ones(1, 1, 1, 400, dtype=torch.bool)
    if masked:
        shown[..., 60:70] = False
        hidden |= ~shown[0, 0]
    given = lists._asdict() | {"attn_mask": shown if masked else None}
    out = sdpa(q, k, v, recipe=recipe, **given)
    for bad in (torch.nan, torch.inf, 1e4):
        bad_k, bad_v = (x.masked_fill(hidden[None, ..., None], bad) for x in (k, v))
        found = sdpa(q, bad_k, bad_v, recipe=recipe, **given)
        assert all(torch.equal(x, y) for x, y in zip(found, out, strict=True))
    expected, _ = exactly(q, k, v, False, 0.125, given["attn_mask"], blocks=lists)
    assert relative_l2(out[0], expected) < (0.05 if recipe == "sage2-4b" else 0.02)


def test_a_key_counts_where_a_list_names_its_block():
    """Not where a count ends before it, nor where the index is of no block."""
    index = torch.tensor([[[[3, 0, 2], [4, 1, 1]]]], dtype=torch.int32)
    count = torch.tensor([[[1, 9]]], dtype=torch.int32)
    for full, named in (((None, None), {1, 3}), ((count, index), {1, 3})):
        keys = visibility.listed_keys(BlockLists(count, index, *full, 64, 64), 200)
        assert keys.shape == (1, 1, 200)
        assert keys[0, 0].tolist() == [int(j // 64 in named) for j in range(200)]
    none = BlockLists(count, index[..., :1], count - 9, index, 64, 256)
    assert not visibility.listed_keys(none, 200).any()


@pytest.mark.parametrize("recipe", ["sage2-8b", "sage2-8b-per-token", "sage1-per-token"])
def test_a_list_that_has_room_for_no_block_names_none(recipe):
    q, k, v = qkv(N_q=70, N_kv=200)
    count, some = torch.zeros(1, 1, 1).int(), torch.zeros(1, 1, 1, 1).int()
    for full in ((None, None), (count + 1, some)):
        found, expected = (
            sdpa(q, k, v, recipe=recipe, **BlockLists(*of)._asdict())
            for of in ((count, some[..., :0], *full, 128, 64), (count, some, *full, 128, 64))
        )
        for x, y in zip(found, expected, strict=True):
            assert torch.equal(x, y)
        assert found[0].any() == (full[0] is not None)
    with pytest.raises(ValueError, match="block lists must be"):
        sdpa(q, k, v, recipe=recipe, kv_num_blocks=count, kv_indices=some[0, ..., :0],
             block_q=128, block_kv=64)  # fmt: skip


def test_block_lists_without_duplicates_are_flex_attentions_mask():
    """In eager mode flex reads no lists: it gets a mask_mod that says the same."""
    q, k, v = qkv(1, 4, 2, 300, 400, 64)
    named = torch.rand(1, 4, 5, 7) < 0.5
    named[:, :, :, 0] = True
    count, index = named.sum(-1).int(), named.int().argsort(-1, descending=True).int()
    out, _ = sdpa(
        q, k, v, recipe="sage1-per-token", kv_num_blocks=count, kv_indices=index, block_q=64,
        block_kv=64, right=0,
    )  # fmt: skip

    def mask_mod(b, h, i, j):
        return named[b, h, i // 64, j // 64] & (j <= i)

    mask = create_block_mask(mask_mod, 1, 4, 300, 400, device="cpu")
    expected = flex_attention(q, k, v, block_mask=mask, scale=0.125, enable_gqa=True)
    assert relative_l2(out, expected) < 5e-3


@pytest.mark.parametrize(
    "given, message",
    [
        (dict(block_q=32), r"block_q and block_kv must be of \(64, .* got \(32, 128\)"),
        (dict(kv_indices=torch.zeros(1, 1, 1, 2).long()), "block lists must be int32, got .*int64"),
        (dict(kv_num_blocks=torch.ones(1, 1, 1).long()), "must be int32, got .*int64 and .*int32"),
        (
            dict(kv_indices=torch.zeros(1, 1, 1, 2, dtype=torch.int32, device="meta")),
            "block lists must be on q's device cpu, got cpu, meta",
        ),
        (dict(kv_num_blocks=torch.zeros(3, 1, 1).int()), "block lists must be .B or 1, H_q or 1"),
        (dict(kv_indices=torch.zeros(1, 1, 2, 2).int()), "block lists must be .B or 1, H_q or 1"),
        (
            dict(full_kv_num_blocks=torch.zeros(1, 1, 2).int(),
                 full_kv_indices=torch.zeros(1, 1, 2, 1).int()),
            "block lists must be .B or 1, H_q or 1",
        ),
        (dict(q=qkv(N_q=129)[0]), "block lists must be for 129 queries, got 128"),
        (dict(recipe="sage3"), "no kernel for block lists with qk="),
        (dict(recipe="sage1", block_q=64), "of 64 queries where 128 share a scale"),
    ],
)  # fmt: skip
def test_block_lists_are_checked(given, message):
    q, k, v = qkv(N_q=64 if given.get("block_q") == 64 else 65)
    lists = dict(kv_num_blocks=torch.ones(1, 1, 1).int(), kv_indices=torch.zeros(1, 1, 1, 2).int())
    call = dict(q=q, k=k, v=v, block_q=128, block_kv=128) | lists | given
    with pytest.raises((ValueError, TypeError), match=message):
        sdpa(call.pop("q"), call.pop("k"), call.pop("v"), **call)


def test_there_is_no_gradient_through_block_lists():
    q, k, v = (x.requires_grad_() for x in qkv())
    lists = support.block_lists(1, 1, 65, 70, 128, 128, 1)
    out, _ = sdpa(q, k, v, **lists._asdict())
    with pytest.raises(NotImplementedError, match="block lists has no backward"):
        out.sum().backward()


@pytest.mark.parametrize(
    "op",
    [
        lambda q, k, v: sdpa(q, k, v),
        lambda q, k, v: torch.ops.sage.prepare(k, v, None, NAMED["sage2-8b"].encode(), False),
        lambda q, k, v: torch.ops.sage.select_blocks(q, k, 0.1, 0.5, 0, 0.1, 0, 0, 128, 128),
    ],
    ids=["sdpa", "prepare", "select_blocks"],
)
def test_a_graph_is_of_one_head_dim(op):
    """A tile needs a number. What guards on it must be there before AOTAutograd's cache is asked:
    on a GPU a graph of 72 channels was taken from it for 128."""
    dims = []

    def backend(graph, inputs):
        dims.append({x.shape[-1] for x in inputs if isinstance(x, torch.Tensor) and x.dim()})
        return graph

    torch._dynamo.reset()
    run = torch.compile(op, backend=backend, dynamic=True)
    for D in (72, 128, 72):
        run(*(torch.randn(2, 2, N, D) for N in (150, 150, 150)))
    assert dims == [{72}, {128}]


@pytest.mark.parametrize("block_q", [64, 192])
def test_lists_are_of_whole_groups_of_rows_that_share_a_scale(block_q):
    with pytest.raises(ValueError, match=f"lists of {block_q} queries where 128 share a scale"):
        select((9, 0), NAMED["sage1"], 128, False, (block_q, 64))
