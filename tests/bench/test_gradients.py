"""The laboratory of training: without rounding its formulas are autograd's, each rounding is where
and what it should be, and the orders that are told of it hold."""

import dataclasses
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from pairs import pairs
from support import relative_l1
from torch.testing import assert_close

from bench import gradients, laboratory
from bench.gradients import BF16, E5M2, ENTRIES, INT8, Rounding, Training
from bench.laboratory import DTYPES, MAX

NAMES = gradients.Gradients._fields
TILE = (64, 128)


def draw(family="real_like", kind="varied", N=300, D=32, seed=0, H=2):
    size = seed, H, N, D
    return [x.float() for x in (*laboratory.draw(family, *size), gradients.draw_do(kind, *size))]


def errors(entry, inputs, is_causal=False, mask=None) -> dict[str, float]:
    training = ENTRIES[entry] if isinstance(entry, str) else entry
    torch.manual_seed(0)
    found = gradients.gradients(*inputs, training, is_causal, mask)
    exact = gradients.exact(*inputs, is_causal, mask)
    names = found._fields
    return {name: relative_l1(x, y) for name, x, y in zip(names, found, exact, strict=True)}


# -- the formulas ----


def draw_masked(shape, N=70):
    """Inputs of two batches in float64, a mask that hides a third of the keys, not the first, and
    which those are."""
    inputs = [torch.cat([*pair]).double() for pair in zip(*(draw(N=N, seed=s) for s in (0, 1)))]
    generator = torch.Generator().manual_seed(0)
    mask = torch.randn(*shape, N, N, generator=generator, dtype=torch.float64)
    hidden = torch.rand(mask.shape, generator=generator) < 1 / 3
    hidden[..., 0] = False
    return inputs, mask.masked_fill(hidden, -math.inf), hidden


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", [None, (1, 1), (1, 2), (2, 1), (2, 2)], ids=str)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"smooth_k": True},
        {"smooth_v": True},
        {"smooth_dp": True},
        {"row_scaled": True},
        {"again": "exact"},
        {"again": "softmax"},
        {"smooth_k": True, "smooth_v": True, "smooth_dp": True, "row_scaled": True},
    ],
    ids=lambda changes: " ".join(f"{name}={x}" for name, x in changes.items()),
)
def test_without_rounding_gradients_are_autograds(changes, shape, is_causal):
    """The mask's too, of a shape, or without a mask."""
    inputs, mask, hidden = draw_masked(shape or (1, 1))
    mask = mask if shape else None
    found = gradients.gradients(*inputs, Training(**changes), is_causal, mask)
    expected = gradients.exact(*inputs, is_causal, mask)
    for name, x, y in zip(found._fields, found, expected, strict=True):
        assert relative_l1(x, y) < 1e-12, name
    if shape:
        assert found.dmask.shape == found.dmask_rounded.shape == mask.shape
        assert not found.dmask[hidden].any()


def test_the_oracle_has_sdpas_gradient_of_a_mask():
    """By torch's own autograd of SDPA, in float64."""
    (*inputs, do), mask, _ = draw_masked((1, 2))
    given = [x.clone().requires_grad_() for x in (*inputs, mask)]
    o = F.scaled_dot_product_attention(*given[:3], attn_mask=given[3])
    expected = torch.autograd.grad(o, given, do)
    for x, y in zip(gradients.exact(*inputs, do, False, mask)[1:5], expected, strict=True):
        assert relative_l1(x, y) < 1e-12


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_mask_of_zeros_changes_nothing_and_one_of_a_number_a_row_next_to_nothing(
    entry, is_causal
):
    inputs = draw(N=150)

    def of(*mask):
        torch.manual_seed(0)
        return gradients.gradients(*inputs, ENTRIES[entry], is_causal, *mask)

    zeros = torch.zeros(1, 2, 150, 150)
    without, with_it = of(), of(zeros)
    assert all(torch.equal(x, y) for x, y in zip(without, with_it[:4], strict=True))
    for x, y in zip(with_it, of(zeros + torch.randn(1, 2, 150, 1)), strict=True):
        assert relative_l1(y, x) < 0.05


def test_the_mask_of_a_relative_position_is_of_the_distance_alone():
    mask = gradients.draw_mask("relative", 0, 2, 50)
    assert mask.shape == (1, 2, 50, 50) and mask.dtype == torch.bfloat16
    assert torch.equal(mask[..., 1:, 1:], mask[..., :-1, :-1])
    numbers = torch.cat([mask[0, 0, 0], mask[0, 0, 1:, 0], mask[0, 1, 0], mask[0, 1, 1:, 0]])
    assert numbers.unique().numel() > 150 and 0.8 < numbers.float().std() < 1.2
    assert gradients.draw_mask("none", 0, 2, 50) is None


@pytest.mark.parametrize("again", ["exact", "softmax"])
def test_whose_lse_the_backward_takes(again):
    """Of exact scores: with the forward's, rows of p do not sum to 1, and dV is not exact."""
    inputs = [x.double() for x in draw("token_outliers", N=200)]
    found = errors(Training(q=INT8(1), k=INT8(64), smooth_k=True, again=again), inputs)
    assert (found["dv"] < 1e-12) == (again == "softmax") and found["o"] > 1e-3


@pytest.mark.parametrize("entry", ["FP8 backward", "FP8 backward, of earlier rows alone"])
def test_what_later_keys_change_of_earlier_rows(entry):
    q, k, v, do = draw("normal", N=200)
    later = [torch.cat([x[:, :, :90], 3 * x[:, :, 90:].flip(2)], 2) for x in (k, v)]
    here, there = (gradients.gradients(q, *kv, do, ENTRIES[entry], True) for kv in ((k, v), later))
    same = [torch.equal(x[:, :, :90], y[:, :, :90]) for x, y in zip(here, there, strict=True)]
    assert same[:2] == [entry != "FP8 backward"] * 2
    assert not any(same[2:])  # dK, dV: of later queries
    assert relative_l1(here.dq, gradients.exact(q, k, v, do, True).dq) < 0.06


# -- the roundings ----


@pytest.mark.parametrize("share", [1, 7, 64, 1000, "head", "channel", "tile"])
def test_what_shares_a_scale(share):
    R, C = 150, 130
    x = torch.randn(2, 3, R, C)
    found = gradients.shared_amax(x, share, TILE)
    assert found.shape == x.shape
    rows, columns = {"head": (R, C), "channel": (R, 1), "tile": TILE}.get(share, (share, C))
    for r, c in itertools.product(range(0, R, rows), range(0, C, columns)):
        here = (slice(None), slice(None), slice(r, r + rows), slice(c, c + columns))
        expected = x[here].abs().amax((2, 3), keepdim=True)
        assert torch.equal(found[here], expected.expand_as(found[here]))


def test_what_is_stored_in_bf16_is_what_torch_stores():
    """Also ties, subnormal numbers, and what is not finite."""
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(0))
    bits = torch.cat([bits, bits & ~0xFFFF | 0x8000, torch.tensor([0x7FFFFFFF, 0x7F7FFFFF])])
    x = bits.to(torch.int32).view(torch.float32)
    found, expected = gradients.stored(x, torch.bfloat16), x.to(torch.bfloat16).float()
    assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("fmt", MAX)
def test_stochastic_rounding_is_right_on_average(fmt):
    torch.manual_seed(0)
    x = torch.cat([torch.linspace(-1, 1, 41), torch.tensor([1e-3, -3e-3])])
    drawn = torch.stack([gradients.stochastically(x, fmt, 1.0) for _ in range(4000)])
    codes = drawn * MAX[fmt]
    if fmt in DTYPES:
        assert_close(codes, codes.to(DTYPES[fmt]).float(), rtol=1e-6, atol=0)
        step = (x.abs() * torch.finfo(DTYPES[fmt]).eps).clamp(min=1e-3)
    else:
        assert_close(codes, codes.round())
        step = torch.full_like(x, 1 / MAX[fmt])
    assert ((drawn - x).abs() <= 1.01 * step).all()
    assert ((drawn.mean(0) - x).abs() <= 5 * step / math.sqrt(4000)).all()
    assert drawn[:, 7].unique().numel() == 2


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("power", [-23, -9, 13])
def test_gradients_are_as_large_as_what_they_are_of(entry, power):
    """dO * 2^power: from 1e-7 to 1e4."""
    q, k, v, do = draw()

    def of(do):
        torch.manual_seed(0)
        return gradients.gradients(q, k, v, do, ENTRIES[entry])

    for name, x, y in zip(NAMES[1:], of(do)[1:], of(do * 2.0**power)[1:], strict=True):
        assert x.abs().max() > 0 and torch.equal(x * 2.0**power, y), name


@pytest.mark.parametrize("entry", ENTRIES)
def test_rows_without_a_gradient_have_none(entry):
    q, k, v, do = draw(N=256)  # whole tiles: a tile without gradients too
    do[:, :, 64:192] = 0
    found = gradients.gradients(q, k, v, do, ENTRIES[entry])
    assert not found.dq[:, :, 64:192].any() and found.dq[:, :, :64].any()
    assert all(x.isfinite().all() for x in found)
    nothing = gradients.gradients(q, k, v, torch.zeros_like(do), ENTRIES[entry])
    assert not any(x.any() for x in nothing[1:])


@pytest.mark.parametrize("entry", ["SageBwd", "FP8 backward", "FP8 backward, dP INT8"])
def test_what_all_keys_have_in_common_changes_nothing_but_rounding(entry):
    q, k, v, do = draw("normal")
    there, here = (gradients.gradients(q, x, v, do, ENTRIES[entry]) for x in (k, k + 4))
    for x, y in zip(there, here, strict=True):
        assert relative_l1(y, x) < 0.02


FIELDS = [field.name for field in dataclasses.fields(Training) if field.type is Rounding]
WITH_MASK = gradients.MaskGradients._fields
OF_DS = ("dq", "dk", "dmask", "dmask_rounded")
CHANGES = {  # field -> what it alone changes
    "q": WITH_MASK, "k": WITH_MASK, "p": ("o", *OF_DS), "v": ("o", *OF_DS), "p_of_dv": ("dv",),
    "do_of_dv": ("dv",), "do_of_dp": OF_DS, "v_of_dp": OF_DS, "o_of_delta": OF_DS,
    "ds": ("dq", "dk", "dmask_rounded"), "k_of_dq": ("dq",), "q_of_dk": ("dk",),
}  # fmt: skip


@pytest.mark.parametrize("how", [BF16, INT8(16), E5M2("head")], ids=str)
@pytest.mark.parametrize("field", CHANGES)
def test_each_operand_is_rounded_in_its_product_alone(field, how):
    assert list(CHANGES) == FIELDS
    inputs = [x.double() + torch.rand_like(x.double()) / 1000 for x in draw(N=128)]
    base, mask = Training(), gradients.draw_mask("relative", 0, 2, 128).double()
    before = gradients.gradients(*inputs, base, False, mask)
    after = gradients.gradients(*inputs, dataclasses.replace(base, **{field: how}), False, mask)
    changed = [
        name for name, x, y in zip(WITH_MASK, before, after, strict=True) if not torch.equal(x, y)
    ]
    assert changed == list(CHANGES[field])
    for name in changed:
        assert relative_l1(getattr(after, name), getattr(before, name)) < 0.4


# -- the orders ----


@pairs(
    family=["normal", "channel_bias", "token_outliers", "sinks"],
    kind=list(gradients.OUTPUTS),
    is_causal=[False, True],
)
def test_the_fp8_backward_is_nearer_than_sage_bwd(family, kind, is_causal):
    inputs = draw(family, kind, 512, 64)
    ours, theirs = (errors(entry, inputs, is_causal) for entry in ("FP8 backward", "SageBwd"))
    assert all(ours[name] < theirs[name] for name in NAMES), (ours, theirs)
    assert max(ours.values()) < 0.15


@pytest.mark.parametrize(
    "family, kind, worse, better, factor",
    [
        ("channel_bias", "plain", "SageBwd, k not smoothed", "SageBwd", 3),
        (
            "biased_v",
            "varied",
            "FP8 backward, dP INT8, v not smoothed",
            "FP8 backward, dP INT8",
            1.5,
        ),
        ("biased_v", "varied", "FP8, a scale a head", "FP8 backward", 5),
    ],
)
def test_what_a_technique_is_worth(family, kind, worse, better, factor):
    """Of dQ: smoothing k, smoothing v, and more than one scale a head for tokens that differ."""
    inputs = draw(family, kind, 512, 64)
    assert errors(worse, inputs)["dq"] > factor * errors(better, inputs)["dq"]


def test_the_kinds_of_do():
    plain, biased, varied = (gradients.draw_do(kind, 0, 2, 4096, 8) for kind in gradients.OUTPUTS)
    assert plain.dtype == torch.bfloat16 and plain.shape == (1, 2, 4096, 8)
    assert plain.float().mean(2).abs().max() < 0.1 < biased.float().mean(2).abs().max()
    sizes = varied.float().norm(dim=3).log()
    assert 1.3 < sizes.std() < 1.7
