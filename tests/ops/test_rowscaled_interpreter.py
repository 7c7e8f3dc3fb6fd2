"""What prepares ``sage::rowscaled``'s backward, in Triton's interpreter, against the emulation.

Its rounding to FP8 drops the carry and subnormals: codes are compared within a factor of 2 here.
test_rowscaled.py compares them on a GPU.
"""

import os

import pytest
import support
import torch
from torch.testing import assert_close

from sage_inductor.ops.formats import TINY
from sage_inductor.ops.launch import launch_traced
from sage_inductor.ops.quantize.smooth import launch_smooth
from sage_inductor.ops.reference import quantize, rowscaled
from sage_inductor.ops.reference import training as of_training
from sage_inductor.ops.training.hopper import prepare
from sage_inductor.ops.training.hopper.prepare import launch_prepare
from sage_inductor.ops.training.kernels import launch_quantize, launch_quantize_twice

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1",
        reason="needs TRITON_INTERPRET=1 (make test does)",
    ),
    pytest.mark.skipif(
        torch.__version__ < "2.13",
        reason="torch 2.11's wrap_triton takes no kernel of the interpreter's",
    ),
    pytest.mark.usefixtures("poisoned"),
]


def draw(B, H_q, H_kv, N_q, N_kv, D):
    """q, k, v and a gradient whose tokens differ in size."""
    q, k, v = support.qkv(B, H_q, H_kv, N_q, N_kv, D, torch.float16)
    size = torch.exp(1.5 * torch.randn(B, H_q, N_q, 1))
    return q, k, v, (size * torch.randn(B, N_q, H_q, D).transpose(1, 2)).half()


@pytest.mark.parametrize(
    "shape, is_causal",
    [((1, 1, 1, 256, 256, 64), False), ((2, 4, 2, 65, 70, 128), False),
     ((1, 2, 1, 1, 200, 80), False), ((1, 1, 1, 321, 1, 40), False),
     ((2, 2, 1, 100, 100, 72), True), ((1, 1, 1, 270, 270, 40), True)],
    ids=str,
)  # fmt: skip
def test_it_writes_what_the_emulation_does(shape, is_causal):
    q, k, v, grad = draw(*shape)
    if is_causal:  # the largest are seen late
        v[:, :, -1] *= 30
        k[:, :, -2] *= 30
    scale = 0.7 * shape[-1] ** -0.5
    out, kept = rowscaled.forward(q, k, v, is_causal, scale)
    found = launch_prepare(grad, out, kept, scale, launch_traced)
    expected = rowscaled.prepare(grad, out, kept, scale)
    support.same_operands(found, expected, e4m3_step=0.51)


@pytest.mark.parametrize("is_causal", [False, True])
def test_bounds_are_of_all_rounds(is_causal, monkeypatch):
    """Of the first to the last, as of sequences that are longer than one round of BOUNDS_ROWS."""
    monkeypatch.setattr(prepare, "BOUNDS_ROWS", 64 if is_causal else 2)
    for place in (0, -1):
        q, k, v, grad = draw(1, 2, 1, 130, 130, 64)
        for x in (q, k, v, grad):
            x[:, :, place] *= 8
        out, kept = rowscaled.forward(q, k, v, is_causal, 0.125)
        found = launch_prepare(grad, out, kept, 0.125, launch_traced)
        expected = rowscaled.prepare(grad, out, kept, 0.125)
        support.same_operands(found, expected, e4m3_step=0.51)


@pytest.mark.parametrize("shared", [1, 64])
@pytest.mark.parametrize("D", [64, 72])
def test_codes_of_rows(shared, D):
    _, x, _, _ = draw(2, 2, 2, 70, 70, D)
    mean = launch_smooth([x], None)[0][0]
    assert_close(mean, quantize.smooth([x])[0][0])
    codes, scale, _ = launch_quantize(x, mean, shared=shared, run=launch_traced)
    expected = of_training.quantize(x, mean, shared)
    assert codes.shape == expected.codes.shape and scale.shape == expected.scale.shape
    assert_close(scale, expected.scale, rtol=1e-6, atol=0)
    far = (codes.int() - expected.codes.int()).abs()
    assert far.max() <= 1 and (far > 0).float().mean() < 0.01


@pytest.mark.parametrize("D", [64, 72])
def test_codes_by_two_kinds_of_scales(D):
    _, k, _, _ = draw(2, 2, 2, 70, 70, D)
    codes, scale, own, own_scale = launch_quantize_twice(k, launch_traced)
    for found, of, shared in ((codes, scale, 64), (own, own_scale, 1)):
        expected = of_training.quantize(k, shared=shared)
        assert found.shape == expected.codes.shape
        assert_close(of, expected.scale, rtol=1e-6, atol=0)
        assert (found.int() - expected.codes.int()).abs().max() <= 1


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_gradient_in_other_units_changes_scales_alone(is_causal):
    q, k, v, grad = draw(1, 2, 1, 130, 130, 64)
    out, kept = rowscaled.forward(q, k, v, is_causal, 0.3)
    grad = grad.float()
    plain, small = (launch_prepare(x, out, kept, 0.3, launch_traced) for x in (grad, grad * 2**-40))
    for name in ("g", "vectors", "v_scale"):
        assert torch.equal(getattr(plain, name), getattr(small, name)), name
    for name in ("qt", "ot", "kt", "kt_own"):
        assert torch.equal(getattr(plain, name).float(), getattr(small, name).float()), name
    for name in ("row_scale", "qt_scale", "ot_scale"):
        assert torch.equal(getattr(plain, name) * 2**-40, getattr(small, name)), name


@pytest.mark.parametrize("factor", [0, 1])
@pytest.mark.parametrize("is_causal", [False, True])
def test_no_gradient_gives_zeros(is_causal, factor):
    """Of q and k that are zeros, too, and of p that are as small as those of 5e8 keys."""
    q, k, v, grad = draw(1, 1, 1, 100, 100, 64)
    out, kept = rowscaled.forward(factor * q, factor * k, v, is_causal, 0.125)
    kept.stats[0] += 20

    def run(kernel, grid, tensors, numbers, **options):
        launch_traced(kernel, grid, tensors, numbers, **options)
        if kernel is prepare._bounds_kernel:  # FP8 that is no number would be lost here
            of_head, beta = (tensors[kernel.arg_names.index(x)] for x in ("Of_head", "Beta"))
            assert (of_head[:2] >= TINY).all() and (beta >= TINY).all()

    x = launch_prepare(0 * grad, out, kept, 0.125, run)
    assert not x.g.any() and not x.ot.float().any() and not x.vectors[2].any()
    for each in rowscaled.gradients(kept, x, 100, 100, 64):
        assert_close(each, torch.zeros_like(each))


@pytest.mark.parametrize("is_causal", [False, True])
def test_what_is_no_number_reaches_all_gradients(is_causal):
    """So a GradScaler skips the step."""
    q, k, v, grad = draw(1, 2, 2, 100, 100, 64)
    out, kept = rowscaled.forward(q, k, v, is_causal, 0.125)
    of_grad, of_out = torch.zeros(2, *grad.shape, dtype=grad.dtype)
    of_grad[0, 1, 5, 3], of_out[0, 1, 5, 3] = torch.inf, torch.nan
    of_grad, of_out = (of_out, of_grad) if is_causal else (of_grad, of_out)
    x, y = (
        launch_prepare(*given, kept, 0.125, launch_traced)
        for given in ((grad + of_grad, out), (grad, out + of_out))
    )
    assert not x.row_scale[0, 1, 5].isfinite() and not y.row_scale[0, 1, 5].isfinite()
    for scale in (x.qt_scale, x.ot_scale, y.qt_scale):
        assert not scale[0, 1].isfinite() and scale[0, 0].isfinite()
