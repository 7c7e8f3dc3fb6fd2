"""The row-scaled FP8 backward: its oracle against exact gradients, and (gpu) the Hopper kernels
against the oracle. That they compile, and that no offset wraps: test_crosscompile.py, test_offsets.py.
"""

import pytest
import support
import torch
from support import relative_l1
from torch.testing import assert_close

from bench import gradients
from bench.backward import launch
from bench.laboratory import FAMILIES, draw
from sage_inductor.ops.formats import E4M3_MAX, NO_QUERY, pad_rows
from sage_inductor.ops.reference import training_rowscaled as reference

pytestmark = pytest.mark.usefixtures("poisoned")


def inputs(B, H_q, H_kv, N_q, N_kv, D, dtype=torch.bfloat16, device="cpu"):
    """q, k, v and dO, stored as [B, N, H, D]: k with a bias in each channel, v with a mean, rows of
    dO of different size."""
    q, k, v = support.qkv(B, H_q, H_kv, N_q, N_kv, D, dtype, device)
    do = support.heads(B, H_q, N_q, D, torch.float32, device)
    do = do * torch.randn(B, H_q, N_q, 1, device=device).exp()
    return 2 * q, k, v, do.to(dtype)


def prepare(q, k, v, do, scale):
    codes = reference.quantize(q, k, v, scale)
    return reference.prepare(codes, reference.forward(codes, v, q.shape[2]), do, scale)


def emulate(q, k, v, do, scale):
    x = prepare(q, k, v, do, scale)
    return reference.emulate(x, q.shape[2], k.shape[2], q.shape[3])


def exact(q, k, v, do, scale):
    """By autograd, in float64."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    out = support.attention_exact(q, k, v, scale)[0]
    return torch.autograd.grad(out, (q, k, v), do.double())


# -- the oracle ----


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", gradients.OUTPUTS)
def test_the_oracle_is_about_as_near_to_exact_gradients_as_the_laboratorys(family, kind):
    """There the operands have a scale a channel, and are made of q, k and dO in 16 bits."""
    q, k, v = draw(family, 0, 2, 512, 128)
    do = gradients.draw_do(kind, 0, 2, 512, 128)
    found = emulate(q, k, v, do, 128**-0.5)
    given = [x.float() for x in (q, k, v, do)]
    simulated = gradients.gradients(*given, gradients.ENTRIES["G, dP INT8"])[1:]
    expected = gradients.exact(*given)[1:]
    for x, y, z in zip(found, simulated, expected):
        here, there = relative_l1(x, z), relative_l1(y, z)
        assert 0.9 * there < here < 1.05 * there + 0.004, (here, there)


SHAPES = [
    (2, 4, 2, 200, 333, 64),
    (1, 6, 1, 63, 72, 72),
    (2, 3, 3, 300, 65, 128),
    (1, 2, 1, 1, 70, 40),
]


@pytest.mark.parametrize("scale", [0.1, -0.2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_of_any_shape_and_scale_are_near_exact_ones(shape, scale):
    case = inputs(*shape)
    for x, y in zip(emulate(*case, scale), exact(*case, scale)):
        assert x.shape == y.shape and relative_l1(x, y) < 0.07


@pytest.mark.parametrize("exponent", [-23, -5, 13])
def test_scaling_the_cotangent_by_a_power_of_two_scales_gradients_exactly(exponent):
    q, k, v, do = inputs(1, 4, 2, 130, 200, 64)
    here, there = (emulate(q, k, v, x, 0.1) for x in (do, do * 2.0**exponent))
    for x, y in zip(here, there):
        assert_close(x * 2.0**exponent, y, rtol=0, atol=0)


def test_rows_without_a_cotangent_get_no_gradient():
    q, k, v, do = inputs(1, 4, 2, 200, 150, 32)
    do[:, :, 64:190] = 0
    dq, dk, dv = emulate(q, k, v, do, 0.1)
    assert not dq[:, :, 64:190].any() and dq[:, :, :64].any() and dk.any() and dv.any()
    assert not any(x.any() for x in emulate(q, k, v, 0 * do, 0.1))


def test_of_one_key_no_gradient_reaches_q_and_k():
    q, k, v, do = inputs(1, 4, 2, 65, 1, 64)
    dq, dk, dv = emulate(q, k, v, do, 0.1)
    assert not dq.any() and not dk.any()
    assert relative_l1(dv, do.unflatten(1, (2, 2)).double().sum((2, 3))[:, :, None]) < 0.05


def test_without_a_softmax_scale_no_gradient_reaches_q_and_k():
    case = inputs(1, 2, 2, 70, 70, 64)
    dq, dk, dv = emulate(*case, 0.0)
    assert not dq.any() and not dk.any() and relative_l1(dv, exact(*case, 0.0)[2]) < 0.05


def test_what_the_kernels_read():
    """Padding, and that scales are used up: the largest codes are the largest there are."""
    q, k, v, do = inputs(2, 6, 2, 200, 65, 72)
    x = prepare(q, k, v, do, 0.1)
    Q_pad, K_pad, group = pad_rows(200), pad_rows(65), 3
    assert x.q.shape == x.g.shape == (2, 6, Q_pad, 128) and x.k.shape == x.v.shape == (
        2,
        2,
        K_pad,
        128,
    )
    for codes, N in ((x.q, 200), (x.g, 200), (x.k, 65), (x.v, 65)):
        assert codes[:, :, :N, :72].any(3).all() and codes.abs().max() == 127
        assert not codes[:, :, N:].any() and not codes[..., 72:].any()
    assert x.qt.shape == x.ot.shape == (2, 2, 128, group * Q_pad) and x.kt.shape == (
        2,
        2,
        128,
        K_pad,
    )
    for codes, N, heads in ((x.qt, 200, group), (x.ot, 200, group), (x.kt, 65, 1)):
        codes = reference.unpermute_tokens(codes.float()).unflatten(3, (heads, -1))
        assert (codes.abs().amax((2, 3, 4)) == E4M3_MAX).all()
        assert not codes[..., N:].any() and not codes[:, :, 72:].any()
        assert codes[..., :N].any(2).all()
    assert not x.vectors[::2, :, :, 200:].any() and (x.vectors[1, :, :, 200:] == NO_QUERY).all()
    assert not x.row_scale[:, :, 200:].any() and not x.v_scale[:, :, 65:].any()


def test_tokens_are_permuted_and_back():
    x = torch.arange(64.0).expand(2, 3, 64)
    there = reference.permute_tokens(x)
    assert there[0, 0, :16].tolist() == [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    assert torch.equal(reference.unpermute_tokens(there), x)


# -- the kernels ----


def outputs(q, k, bnhd: bool):
    """For dQ, dK and dV, and what each is a part of: NaN, with a head and channels more."""
    found = []
    for B, H, N, D in (q.shape, k.shape, k.shape):
        whole = q.new_full((B, N, H + 1, D + 8) if bnhd else (B, H + 1, N, D + 8), float("nan"))
        found.append(((whole.transpose(1, 2) if bnhd else whole)[:, :H, :, :D], whole))
    return found


def run(x, outs) -> list[torch.Tensor]:
    (dq, _), (dk, _), (dv, _) = outs
    launch.dq(x, dq)()
    launch.dkdv(x, dk, dv)()
    return [dq, dk, dv]


ON_A_GPU = [  # B, H_q, H_kv, N_q, N_kv, D
    (1, 2, 2, 1, 1, 128), (2, 4, 2, 63, 72, 64), (2, 6, 1, 72, 200, 72), (1, 2, 2, 200, 63, 128),
    (1, 4, 2, 1000, 4160, 128), (1, 6, 1, 4160, 1000, 64), (1, 1, 1, 1, 4160, 40), (1, 2, 2, 4160, 1, 128),
    (3, 4, 2, 128, 256, 128), (1, 2, 1, 4160, 4160, 128),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", ON_A_GPU, ids=str)
def test_the_kernels_are_their_emulation(shape, dtype):
    """Row by row. They add up FP8 products in 13 bits."""
    case = inputs(*shape, dtype, "cuda")
    scale = 0.1 if shape[5] == 128 else -0.2
    x = prepare(*case, scale)
    expected = reference.emulate(x, *shape[3:])
    outs = outputs(*case[:2], bnhd=True)
    for found, (_, whole), y in zip(run(x, outs), outs, expected):
        of_rows, error = y.norm(dim=3), (found.double() - y).norm(dim=3)
        assert (error <= 0.03 * of_rows + 0.01 * of_rows.amax(2, keepdim=True)).all()
        assert relative_l1(found, y) < 0.02 if y.any() else not found.any()
        assert found.isnan().sum() == 0 and whole.isnan().sum() == whole.numel() - found.numel()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ON_A_GPU, ids=str)
def test_strides_and_runs_change_no_bit(shape):
    case = inputs(*shape, device="cuda")
    x = prepare(*case, 0.1)
    first, again, other = (run(x, outputs(*case[:2], bnhd)) for bnhd in (False, False, True))
    for each, y, z in zip(first, again, other):
        assert torch.equal(each, y) and torch.equal(each, z)


@pytest.mark.gpu
def test_a_batch_is_computed_as_its_parts():
    """To the bit, where heads have their neighbours' rows beside them."""
    case = inputs(3, 4, 2, 200, 333, 64, device="cuda")
    codes = reference.quantize(*case[:3], 0.1)
    x = reference.prepare(codes, reference.forward(codes, case[2], 200), case[3], 0.1)
    whole = run(x, outputs(*case[:2], True))
    for b in range(3):
        part = reference.Inputs(
            *(t[:, b : b + 1].contiguous() if t is x.vectors else t[b : b + 1] for t in x)
        )
        found = run(part, outputs(*(t[b : b + 1] for t in case[:2]), True))
        for y, z in zip(whole, found):
            assert torch.equal(y[b], z[0])
