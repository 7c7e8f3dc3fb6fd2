"""``sage::sagebwd`` and ``sage::rowscaled``: what both ops do, SageBwd's emulation against the
laboratory's, and (gpu) its kernels. test_rowscaled.py has the other's."""

import dataclasses
import functools
import math

import pytest
import support
import torch
from pairs import pairs
from support import relative_l1, relative_l2
from torch.testing import assert_close

from bench import gradients
from bench.laboratory import draw
from sage_inductor.ops import launch
from sage_inductor.ops.reference import quantize as of_inference
from sage_inductor.ops.reference import training as reference
from sage_inductor.ops.training.kernels import launch_quantize

pytestmark = pytest.mark.usefixtures("poisoned")

SAGEBWD = torch.ops.sage.sagebwd
BACKWARD = torch.ops.sage.sagebwd_backward
OPS = {"sagebwd": SAGEBWD, "rowscaled": torch.ops.sage.rowscaled}
both_ops = pytest.mark.parametrize("op", OPS)
INT8 = gradients.INT8
# The laboratory's SageBwd by the kernels' blocks: 64 rows, and a row's 64 numbers of p forward.
OF_64 = dataclasses.replace(
    gradients.SAGE_BWD, q=INT8(64), p=INT8((1, 64)), do_of_dv=INT8(64), q_of_dk=INT8(64),
    tile=(64, 64), o_of_delta=gradients.EXACT,
)  # fmt: skip


inputs = functools.partial(support.trained, of_tokens=0)


def run(op, q, k, v, is_causal=False, scale=0.125, out_bnhd=True):
    return OPS[op](q, k, v, is_causal, scale, out_bnhd)


def attend(q, k, v, grad, is_causal=False, scale=0.125, out_bnhd=True, op="sagebwd"):
    return support.gradients_of(OPS[op], q, k, v, grad, is_causal, scale, out_bnhd)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("family", ["normal", "token_outliers", "sinks", "real_like"])
@pytest.mark.parametrize("kind", gradients.OUTPUTS)
def test_the_emulation_is_the_laboratorys(family, kind, is_causal):
    """Written twice: there a number is rounded and scaled back, here codes are multiplied."""
    q, k, v = (x.float() for x in draw(family, 0, 2, 200, 64))
    grad = gradients.draw_do(kind, 0, 2, 200, 64).float()
    k_mean = of_inference.smooth(k)[0]
    of = reference.quantize(q), reference.quantize(k, k_mean), reference.quantize(v)
    out, lse = reference.forward(*of, (200, 200, 64), 64**-0.5, is_causal)
    found = reference.backward(*of[:2], v, grad, out, lse, 64**-0.5, is_causal)
    expected = gradients.gradients(q, k, v, grad, OF_64, is_causal)
    for x, y in zip((out, *found), expected, strict=True):
        assert relative_l2(x, y) < 3e-3  # a code differs where a number is between two


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_are_near_exact_ones(is_causal):
    q, k, v = draw("normal", 0, 2, 300, 64)
    grad = gradients.draw_do("varied", 0, 2, 300, 64)
    found = attend(q, k, v, grad, is_causal)
    exactly = gradients.exact(q, k, v, grad, is_causal)
    errors = [relative_l1(x, y) for x, y in zip(found, exactly, strict=True)]
    assert errors[0] < 0.03 and all(0.01 < error < 0.16 for error in errors[1:]), errors


@both_ops
@pytest.mark.parametrize("exponent", [-23, -5, 13])
def test_scaling_the_cotangent_by_a_power_of_two_scales_gradients_exactly(exponent, op):
    q, k, v, grad = inputs(1, 2, 1, 130, 200, 64)
    here, there = (attend(q, k, v, x, op=op)[1:] for x in (grad, grad * 2.0**exponent))
    for x, y in zip(here, there, strict=True):
        assert_close(x * 2.0**exponent, y, rtol=0, atol=0)


@both_ops
def test_rows_without_a_cotangent_get_no_gradient(op):
    q, k, v, grad = inputs(1, 2, 2, 200, 150, 32)
    grad[:, :, 64:190] = 0
    _, dq, dk, dv = attend(q, k, v, grad, op=op)
    assert not dq[:, :, 64:190].any() and dq[:, :, :64].any() and dk.any() and dv.any()
    assert not any(x.any() for x in attend(q, k, v, 0 * grad, op=op)[1:])


@pytest.mark.parametrize("N_q, N_kv", [(70, 300), (300, 70), (1, 1), (128, 128)])
def test_causal_attention_sees_the_first_keys(N_q, N_kv):
    q, k, v, grad = inputs(1, 2, 2, N_q, N_kv, 64)
    out, dq, dk, dv = attend(q, k, v, grad, True)
    expected = gradients.exact(q, k, v, grad, True)
    assert relative_l1(out, support.exactly(q, k, v, True, 0.125)[0]) < 0.05
    assert not dk[:, :, N_q:].any() and not dv[:, :, N_q:].any()
    if N_q > 1:
        for x, y in zip((dq, dk, dv), expected[1:], strict=True):
            assert relative_l1(x, y) < 0.2
    else:  # of one key p is 1, and dS what o was rounded by
        assert_close(dv, grad, rtol=0.01, atol=0.02)
        assert not dq.any() and dk.abs().max() < 0.5


@both_ops
def test_a_constant_in_all_keys_changes_nothing(op):
    """Of numbers that bf16 adds exactly."""
    q, k, v, grad = inputs(1, 2, 2, 100, 128, 64)
    k = k.clamp(-8, 8).mul(8).round().div(8)
    here, there = attend(q, k, v, grad, op=op), attend(q, k + 4, v, grad, op=op)
    assert_close(k + 4 - 4, k, rtol=0, atol=0)
    for x, y in zip(here, there, strict=True):
        assert relative_l2(x, y) < 2e-3


@both_ops
@pytest.mark.parametrize("is_causal", [False, True])
def test_heads_of_q_that_share_a_head_of_k(op, is_causal):
    """Rowscaled: dS and dO are rounded by a scale of one head or of three."""
    q, k, v, grad = inputs(2, 6, 2, 150, 150, 64, torch.float32)
    out, dq, dk, dv = attend(q, k, v, grad, is_causal, op=op)
    repeated = [x.repeat_interleave(3, 1) for x in (k, v)]
    expected = attend(q, *repeated, grad, is_causal, op=op)
    of_groups = (x.unflatten(1, (2, 3)).sum(2) for x in expected[2:])
    assert_close(out, expected[0], rtol=1e-4, atol=1e-4)
    for x, y in zip((dq, dk, dv), (expected[1], *of_groups), strict=True):
        assert relative_l2(x, y) < (1e-4 if op == "sagebwd" else 0.05)


@pairs(
    # opcheck's slow utility traces with sizes that are symbols.
    op=list(OPS),
    dtype=[torch.float16, torch.bfloat16, torch.float32],
    is_causal=[False, True],
    out_bnhd=[False, True],
    sizes=[((70, 130), 48), ((128, 256), 64)],
    dynamic=[False, True],
)
def test_opcheck(op, dtype, is_causal, out_bnhd, sizes, dynamic):
    """Of lengths that are padded, and that are not: strides too."""
    (N_q, N_kv), D = sizes
    N_q = N_kv if op == "rowscaled" and is_causal else N_q
    q, k, v, grad = inputs(3, 4, 2, N_q, N_kv, D, dtype)
    cheap = "test_schema", "test_autograd_registration", "test_faketensor"
    utilities = ("test_aot_dispatch_dynamic",) if dynamic else cheap
    args = *(x.clone().requires_grad_() for x in (q, k, v)), is_causal, 0.1, out_bnhd
    torch.library.opcheck(OPS[op].default, args, test_utils=utilities)
    saved = run(op, q, k, v, is_causal, 0.1, out_bnhd)
    if op == "sagebwd":
        backward, args = BACKWARD, (grad, v, *saved, is_causal, 0.1, out_bnhd)
    else:
        backward, args = torch.ops.sage.rowscaled_backward, (grad, *saved, N_kv, 0.1, out_bnhd)
    # It has no gradient.
    torch.library.opcheck(backward.default, args, test_utils=("test_schema", "test_faketensor"))
    for x, y in zip(backward(*args), (q, k, v), strict=True):
        assert x.shape == y.shape and x.dtype == dtype
        assert (x.transpose(1, 2) if out_bnhd else x).is_contiguous()


def test_of_fp32_inputs_the_backward_reads_16_bits():
    q, k, v, grad = inputs(1, 2, 2, 70, 130, 64, torch.float32)
    given = *SAGEBWD(q, k, v, False, 0.125, False), False, 0.125, False
    rounded = (x.bfloat16().float() for x in (grad, v))
    for x, y in zip(BACKWARD(grad, v, *given), BACKWARD(*rounded, *given), strict=True):
        assert x.dtype == torch.float32
        assert_close(x, y, rtol=0, atol=0)


@pytest.mark.parametrize(
    "op, device", [("sagebwd", "cpu"), ("rowscaled", "cpu"),
                   pytest.param("sagebwd", "cuda", marks=pytest.mark.gpu)],
)  # fmt: skip
@pytest.mark.parametrize("stride", ["expanded", "transposed", "step"])
def test_cotangents_of_any_strides(stride, op, device):
    q, k, v, _ = inputs(1, 2, 2, 90, 90, 64, device=device)
    grad = {
        "expanded": torch.ones((), dtype=q.dtype, device=device).expand(
            q.shape
        ),  # what sum() gives
        "transposed": torch.randn(1, 2, 64, 90).to(q).mT,
        "step": torch.randn(1, 2, 90, 128).to(q)[..., ::2],
    }[stride]
    found, expected = (attend(q, k, v, x, op=op) for x in (grad, grad.contiguous()))
    for x, y in zip(found, expected, strict=True):
        assert_close(x, y, rtol=0, atol=0)


@both_ops
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_cotangent_that_is_no_number_reaches_all_gradients_of_its_head(op, value):
    """So a GradScaler skips the step."""
    q, k, v, grad = inputs(1, 2, 2, 100, 70, 64)
    grad[0, 1, 5, 3] = value
    for x in attend(q, k, v, grad, op=op)[1:]:
        assert x[0, 0].isfinite().all() and not x[0, 1].isfinite().all()


@both_ops
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_in_q_reaches_what_it_touches(op, value):
    """An Inf too: by INT8 codes of it alone a row could become zeros."""
    q, k, v, grad = inputs(1, 1, 1, 128, 128, 64)
    q[:, :, 3, 5] = value
    out, dq, dk, dv = attend(q, k, v, grad, op=op)
    assert out[:, :, 3].isnan().all() and out[:, :, 64:].isfinite().all()
    assert dq[:, :, 3].isnan().all() and dk.isnan().any() and dv.isnan().any()
    if op == "sagebwd":  # by the FP8 backward a head has one bound
        assert dq[:, :, 64:].isfinite().all()


@both_ops
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_in_k_reaches_all_that_see_it(op, value, is_causal):
    q, k, v, grad = inputs(1, 1, 1, 500, 500, 64)
    k[:, :, 300, 5] = value
    out, *gradients = attend(q, k, v, grad, is_causal, op=op)
    assert out[:, :, 300:].isnan().all()
    assert all(x.isnan().any() for x in gradients)
    if is_causal and op == "rowscaled":  # nothing leaks
        assert out[:, :, :300].isfinite().all() and gradients[0][:, :, :300].isfinite().all()


@both_ops
def test_what_is_refused(op):
    q, k, v, _ = inputs(1, 2, 2, 10, 10, 64)
    with pytest.raises(
        ValueError, match=f"{op}: head_dim must be one number up to 128, got 64, 32"
    ):
        run(op, q, k, v[..., :32])
    wide = torch.randn(1, 2, 10, 160)
    with pytest.raises(ValueError, match="up to 128, got 160"):
        run(op, wide, wide, wide)
    with pytest.raises(ValueError, match="q's batch and head_dim"):
        run(op, q, k[..., :32], v)
    with pytest.raises(TypeError, match="dtype must be one of"):
        run(op, q.double(), k.double(), v.double())
    q = q.requires_grad_()
    (dq,) = torch.autograd.grad(run(op, q, k, v)[0].sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=f"{op}: no gradient of the gradient"):
        dq.sum().backward()


@both_ops
def test_only_the_output_has_a_gradient(op):
    q, k, v, _ = inputs(1, 2, 2, 10, 10, 64)
    out, *others = run(op, q.requires_grad_(), k, v)
    assert out.requires_grad and not any(x.requires_grad for x in others)


@both_ops
def test_under_autocast_the_op_computes_in_its_dtype(op):
    q, k, v, grad = inputs(1, 2, 2, 70, 70, 64, torch.float32)
    given = [x.requires_grad_() for x in (q, k, v)]
    with torch.autocast("cpu", torch.bfloat16):
        out = run(op, *given)[0]
    assert out.dtype == torch.bfloat16
    found = torch.autograd.grad(out, given, grad.bfloat16())
    rounded = [x.detach().bfloat16() for x in given]
    expected = attend(*rounded, grad.bfloat16(), op=op)
    for x, y in zip(found, expected[1:], strict=True):
        assert x.dtype == torch.float32
        assert_close(x, y.float(), rtol=0, atol=0)


# -- the kernels ----

SHAPES = [  # B, H_q, H_kv, N_q, N_kv, D
    (2, 4, 2, 150, 130, 64), (1, 6, 2, 1000, 777, 128), (2, 2, 1, 300, 1100, 72),
    (1, 1, 1, 1, 1, 32), (1, 2, 2, 130, 70, 128), (1, 4, 4, 2048, 2048, 128),
]  # fmt: skip


@pytest.mark.gpu
@pairs(
    shape=SHAPES, is_causal=[False, True], scale=[0.1, -0.2],
    dtype=[torch.float16, torch.bfloat16, torch.float32],
)  # fmt: skip
def test_the_kernels_are_their_emulation(shape, is_causal, scale, dtype):
    q, k, v, grad = inputs(*shape, dtype, "cuda")
    k_mean = of_inference.smooth(k)[0]
    saved = SAGEBWD(q, k, v, is_causal, scale, True)
    of = reference.quantize(q), reference.quantize(k, k_mean), reference.quantize(v)
    for codes, scales, expected in zip(
        (saved[2], saved[4], launch_quantize(v, run=launch.run)[0]), (saved[3], saved[5], launch_quantize(v, run=launch.run)[1]), of,
        strict=True,
    ):  # fmt: skip
        assert_close(scales, expected.scale, rtol=1e-5, atol=0)  # k's mean: in another order
        assert (codes.int() - expected.codes.int()).abs().max() <= 1
        assert (codes != expected.codes).float().mean() < 1e-3
    of = reference.Quantized(*saved[2:4]), reference.Quantized(*saved[4:]), of[2]
    out, lse = reference.forward(*of, (shape[3], shape[4], shape[5]), scale, is_causal)
    found = BACKWARD(grad, v, *saved, is_causal, scale, True)
    rounded = [x.bfloat16() if dtype == torch.float32 else x for x in (v, grad)]
    expected = reference.backward(*of[:2], *rounded, *saved[:2], scale, is_causal)
    assert_close(saved[1], lse, rtol=1e-5, atol=1e-4)
    for x, y in zip((saved[0], *found), (out, *expected), strict=True):
        if y.norm() == 0:
            assert not x.any()
        else:  # rounded to the output's dtype, and codes that lie between two
            assert relative_l2(x, y) < {torch.float16: 1e-3}.get(dtype, 3e-3)
    again = BACKWARD(grad, v, *saved, is_causal, scale, True)
    assert all(torch.equal(x, y) for x, y in zip(found, again, strict=True))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("is_causal", [False, True])
@both_ops
def test_rows_that_attend_to_one_key_train_at_scores_of_any_size(op, is_causal, device):
    """Codes of p may not exceed their format, INT8's would wrap around. From 1e7 on lse, in fp32, does
    not say what a row's sum is; so v's gradient is compared below that."""
    errors = {}
    for size in (1e3, 1e5, 1e7, 4e8):
        torch.manual_seed(0)
        q, k, v, grad = inputs(1, 2, 2, 256, 256, 64, device=device)
        q, k = ((size / 5) ** 0.5 * x for x in (q, k))
        given = q, k, v, grad, is_causal
        found, exact = attend(*given, op=op), gradients.exact(*given)
        errors[size] = [relative_l1(found[i], exact[i]) for i in (0, 3)[: 1 + (size < 1e7)]]
    for found in errors.values():
        for error, usual in zip(found, errors[1e3]):
            assert error < 1.2 * usual + 0.02, errors


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@both_ops
def test_on_another_device_than_the_current_one(op):
    given = inputs(1, 4, 2, 300, 300, 64, device="cuda")
    found = attend(*(x.to("cuda:1") for x in given), op=op)
    for x, y in zip(found, attend(*given, op=op), strict=True):
        assert x.device.index == 1 and torch.equal(x.to(y.device), y)
