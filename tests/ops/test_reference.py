"""The oracle itself: against definitions written another way, and against exact attention."""

import functools
import math

import pytest
import support
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import pairs
from support import attention_call, exactly, relative_l1, sdpa
from torch.testing import assert_close

from bench.providers import as_walked
from sage_inductor.ops import formats
from sage_inductor.ops.quantize.smooth import smooth_q
from sage_inductor.ops.recipe import NAMED
from sage_inductor.ops.reference import attention as emulation
from sage_inductor.ops.reference import quantize as reference
from sage_inductor.ops.visibility import CAUSAL, Band, Visibility

qkv = functools.partial(support.qkv, B=1, H_q=2, H_kv=2, N_q=200, N_kv=300)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_exact_attention_is_sdpa_in_float64(is_causal):
    q, k, v = (x.double() for x in qkv(H_q=4))
    out, lse = exactly(q, k, v, is_causal, 0.1)
    expected = F.scaled_dot_product_attention(
        q, k, v, is_causal=is_causal, scale=0.1, enable_gqa=True
    )
    assert_close(out, expected)
    assert_close(lse.exp().amin() > 0, torch.tensor(True))


def test_q_groups_are_the_rows_that_one_thread_of_the_paper_holds():
    """Rows {i, i+8, i+16, i+24} of each 32 share the scale amax / 127 (SageAttention2, 3.2)."""
    q = torch.randn(1, 1, 70, 64)
    _, scale = reference.quantize_q(q, NAMED["sage2-8b"])
    for row in range(70):
        warp, i = divmod(row, 32)
        group = [r for r in range(32 * warp + i % 8, 32 * warp + 32, 8) if r < 70]
        assert_close(scale[0, 0, row, 0], q[0, 0, group].abs().max() / 127)


def test_k_groups_are_the_columns_that_one_thread_of_the_paper_holds():
    """Rows {2j, 2j+1} + 8*{0..7} of each 64 share a scale."""
    k = torch.randn(1, 1, 150, 64)
    k_int8, k_scale = reference.quantize_k(k, torch.zeros(1, 1, 64), NAMED["sage2-8b"])
    assert k_int8.shape == (1, 1, 256, 64) and k_scale.shape == (1, 1, 4, 4)
    for block in range(3):
        for j in range(4):
            rows = [64 * block + 8 * r + 2 * j + e for r in range(8) for e in (0, 1)]
            rows = [r for r in rows if r < 150]
            assert_close(k_scale[0, 0, block, j], k[0, 0, rows].abs().max() / 127)
            back = k_int8[0, 0, rows].float() * k_scale[0, 0, block, j]
            assert (back - k[0, 0, rows]).abs().max() <= k_scale[0, 0, block, j] * 0.501


def test_fp8_q_and_k_use_the_whole_format_and_round_once_more_to_nearest_even():
    """Against E4M3 written another way: 4 significant bits, no exponent below -6, at most 448."""
    x = torch.randn(1, 2, 130, 64) * torch.logspace(-4, 4, 64)
    for (x_8bit, x_scale), rows in (
        (reference.quantize_q(x, NAMED["sage2-8b-fp8qk"]), 1),
        (reference.quantize_k(x, torch.zeros(1, 2, 64), NAMED["sage2-8b-fp8qk"]), 64),
    ):
        assert x_8bit.dtype == torch.float8_e4m3fn
        amax = F.pad(x, (0, 0, 0, 126)).abs().unflatten(2, (-1, rows)).amax((3, 4))
        amax = amax[:, :, : (130 + rows - 1) // rows]
        assert_close(x_scale.flatten(2)[:, :, : amax.shape[2]], amax / 448)
        inverse = torch.full_like(amax, 448.0) / amax
        product = x * inverse.repeat_interleave(rows, 2)[:, :, :130, None]  # rounded to fp32
        step = torch.exp2(product.double().abs().log2().floor().clamp(min=-6) - 3)
        expected = (product.double() / step).round() * step
        assert torch.equal(x_8bit[:, :, :130].double(), expected.clamp(-448, 448))
        assert x_8bit.float().abs().amax() == 448 and not x_8bit[:, :, 130:].float().any()


@pytest.mark.parametrize("D", [64, 128, 256])
def test_a_rotation_is_orthogonal_and_spreads_what_is_strong_or_alike(D):
    """One channel over all of its 128, equally; and what all channels have, or every other one, of
    a power of two, over more than a fifth of them."""
    n = min(D, formats.ROTATED)
    matrix = reference.rotate(torch.eye(D), torch.eye(D))
    assert_close(matrix @ matrix.mT, n * torch.eye(D), rtol=0, atol=0)
    assert matrix.abs().sum(1).eq(n).all() and matrix.abs().max() == 1
    alternating = 1.0 - 2.0 * (torch.arange(D) >> torch.arange(8)[:, None] & 1)
    assert reference.rotate(alternating, alternating).abs().max() <= n**0.5 * 2**0.5


@pytest.mark.parametrize(
    "D, dtype",
    [(128, torch.bfloat16), (64, torch.float16), (80, torch.float32), (200, torch.bfloat16)],
)
def test_rotation_takes_a_strong_channel_out_of_the_error(D, dtype):
    """In head_dims that fill the kernels' channels and that do not."""
    q, k, v = (x.to(dtype) for x in qkv(D=D))
    k[..., 5] *= 30
    exact, exact_lse = exactly(q.double(), k.double(), v.double(), False, D**-0.5)
    error = {}
    for recipe in ("sage1-per-token", "sage1-rotated"):
        out, lse = sdpa(q, k, v, False, D**-0.5, recipe)
        error[recipe] = relative_l1(out, exact), (lse - exact_lse).abs().mean().item()
    (plain, plain_lse), (rotated, rotated_lse) = error.values()
    assert 3 * rotated < plain and rotated_lse < plain_lse


def test_int4_is_packed_two_to_a_byte_and_fills_its_range():
    codes = torch.randint(-7, 8, (2, 3, 64)).to(torch.int8)
    packed = reference.pack(codes)
    assert packed.dtype == torch.uint8 and packed.shape == (2, 3, 32)
    low, high = packed.int() % 16, packed.int() // 16  # two's complement
    assert torch.equal(low, codes[..., ::2].int() % 16)
    assert torch.equal(high, codes[..., 1::2].int() % 16)
    assert torch.equal(reference.unpack(packed), codes)
    k = torch.randn(1, 2, 150, 80)
    k_int4, k_scale = reference.quantize_k(k, torch.zeros(1, 2, 80), NAMED["sage2-4b"])
    assert k_int4.shape == (1, 2, 256, 64) and k_int4.dtype == torch.uint8
    n = torch.arange(150)
    scale = k_scale.flatten(2)[:, :, n // 64 * 4 + n % 8 // 2, None]
    codes = reference.unpack(k_int4)
    assert codes.abs().max() == 7 and not codes[:, :, 150:].any() and not codes[..., 80:].any()
    back = codes[:, :, :150, :80] * scale
    assert ((back - k).abs() <= scale * 0.501).all()
    q_int4, q_scale = reference.quantize_q(k, NAMED["sage2-4b"])
    assert q_int4.abs().max() == 7 and ((q_int4 * q_scale - k).abs() <= q_scale * 0.501).all()


def test_smoothing_q_takes_off_each_blocks_mean_and_says_what_that_was_of_the_scores():
    q, k, _ = qkv(H_q=4, N_q=300, D=80)
    q = q + 5 * torch.randn(1, 4, 1, 80)
    k_mean = k.mean(2)
    q_mean, delta = smooth_q(q, k, k_mean, None)
    assert q_mean.shape == (1, 4, 4, 80) and delta.shape == (1, 4, 4, 384)  # one block more
    for t in range(3):
        mean = q[:, :, 128 * t : 128 * t + 128].mean(2)
        assert_close(q_mean[:, :, t].float(), mean, rtol=2**-8, atol=1e-6)
        k_smooth = (k - k_mean[:, :, None]).repeat_interleave(2, 1)
        expected = (k_smooth @ q_mean[:, :, t, :, None].float())[..., 0]
        assert relative_l1(delta[:, :, t, :300].float(), expected) < 2**-8
        q_smooth = q[:, :, 128 * t : 128 * t + 128] - q_mean[:, :, t, None].float()
        s = q_smooth @ k_smooth.mT + delta[:, :, t, None, :300].float()
        expected = q[:, :, 128 * t : 128 * t + 128] @ k_smooth.mT
        assert relative_l1(s, expected) < 2**-8
    assert not q_mean[:, :, 3].any() and not delta[..., 300:].any()

    visible = torch.ones(1, 1, 300, dtype=torch.uint8)
    visible[..., 7:10] = 0
    k[:, :, 7], k[:, :, 8], k[:, :, 9] = math.nan, math.inf, -1e38
    hidden = smooth_q(q, k, k_mean, visible)[1]
    assert torch.equal(hidden[..., :7], delta[..., :7])
    assert torch.equal(hidden[..., 10:], delta[..., 10:])
    assert hidden.abs().max() < 10 * delta.abs().max()  # saturated


def test_int4_is_worth_little_without_what_smoothing_q_adds():
    """q with a bias in each channel: with it, the error is that of q without one."""
    k, v = (torch.randn(1, 2, 512, 64) for _ in range(2))
    errors = []
    for bias in (0.0, 3.0):
        q = torch.randn(1, 2, 300, 64) + bias * torch.randn(1, 2, 1, 64)
        out, _ = sdpa(q, k, v, False, 0.125, "sage2-4b")
        exact, _ = exactly(q, k, v, False, 0.125)
        errors.append(relative_l1(out, exact))
    assert errors[1] < 1.2 * errors[0] and errors[0] < 0.25


def test_interleaved_v_holds_every_token_once():
    order = reference.interleave(torch.arange(32.0)).long().tolist()
    assert order[:16] == [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    assert sorted(order) == list(range(32))


def dequantized(v_fp8, v_scale, mean, N):
    """v [B, H, N, D] of what quantize_v gives, whose tokens are interleaved."""
    tokens = reference.interleave(torch.arange(float(v_fp8.shape[3]))).long()
    codes = torch.empty_like(v_fp8, dtype=torch.float32)
    codes[..., tokens] = v_fp8.float()
    D = v_scale.shape[2]
    return codes[:, :, :D, :N].mT * v_scale[:, :, None] + mean[:, :, None]


def test_a_sample_has_rows_from_everywhere_and_of_every_phase():
    for N in (1, 5, 127, 128, 1000, 4096, 75600, 2**24 + 1):
        rows = reference.sample_rows(N)
        assert rows[0] == 0 and rows.max() < N and (rows.diff() >= 0).all()
        assert rows.unique().numel() >= min(N, formats.SAMPLE) * 2 // 3
        assert rows.diff().max() <= 2 * N // formats.SAMPLE + 1
    assert (reference.sample_rows(4096) % 64).unique().numel() > 40  # of an image's 64 columns


def test_an_estimated_mean_is_the_mean_where_there_is_one_and_else_zero():
    x = torch.randn(1, 4, 2000, 64)
    mean, amax = reference.estimate(x)
    assert (mean == 0).float().mean() > 0.9 and mean.abs().max() < 0.5
    assert_close(amax, 4 * x[:, :, reference.sample_rows(2000)].sub(mean[:, :, None]).abs().amax(2))
    bias = 8 * torch.randn(1, 4, 1, 64)
    error = reference.estimate(x + bias)[0] - bias[:, :, 0]
    assert error[bias[:, :, 0].abs() > 1].abs().max() < 0.5
    row = reference.sample_rows(2000)[7]
    for garbage in (1e30, math.inf, math.nan):  # is no mean, and makes nothing else infinite
        spoilt = x + 8
        spoilt[:, :, row] = garbage
        mean, amax = reference.estimate(spoilt)
        assert not mean.any() and amax.isfinite().all()
        visible = torch.ones(1, 1, 2000, dtype=torch.uint8)
        visible[..., row] = 0
        assert ((reference.estimate(spoilt, visible)[0] - 8).abs() < 0.5).all()
    assert not any(found.any() for found in reference.estimate(x, torch.zeros(1, 1, 2000)))
    rows = x[:, :, reference.sample_rows(2000)]
    assert_close(reference.estimate(x, shrink=False)[0], rows.mean(2), rtol=1e-5, atol=1e-6)


def test_a_head_of_v_with_rows_beyond_the_estimate_is_scaled_by_all_its_rows():
    v = torch.randn(2, 2, 500, 64) + 5
    outside = next(n for n in range(500) if n not in reference.sample_rows(500))
    v[1, 0, outside] = 1000
    mean, amax = reference.estimate(v)
    v_fp8, v_scale = reference.quantize_v_checked(v, mean, amax, NAMED["sage2-8b-per-token"])
    expected = amax / 448
    expected[1, 0] = (v[1, 0] - mean[1, 0]).abs().amax(0) / 448
    assert_close(v_scale, expected)
    assert_close(v_scale[0], amax[0] * (1 / 448), rtol=0, atol=0)
    back = dequantized(v_fp8, v_scale, mean, 500)
    ulp = (v - mean[:, :, None]).abs() / 8 + v_scale[:, :, None] * 2**-8
    assert ((back - v).abs() <= ulp / 2).all()
    hidden = torch.ones(2, 2, 500, dtype=torch.uint8)
    hidden[1, 0, outside] = 0
    assert_close(
        reference.quantize_v_checked(v, mean, amax, NAMED["sage2-8b-per-token"], hidden)[1],
        amax / 448,
    )


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
E4M3 = torch.tensor(
    [(c % 8 / 8 + (c >= 8)) * 2.0 ** (max(c // 8, 1) - 7) for c in range(127)], dtype=torch.float64
)


def nearest(x, table):
    """The index of the nearest in a table; of two that are as near, the even one."""
    distance = (x.double()[..., None] - table).abs()
    is_nearest = distance == distance.amin(-1, keepdim=True)
    return (is_nearest * (2 - torch.arange(len(table)) % 2)).argmax(-1)


def decoded(code, e4m3):
    """What codes of E2M1 [.., C] and of E4M3 [.., C / 16] stand for, by the tables."""
    sign = 1 - 2 * (code // 8).double()
    return E2M1[(code % 8).long()] * sign * E4M3[e4m3.long()].repeat_interleave(16, -1)


def test_phi_is_the_nearest_of_the_tables_of_e2m1_and_e4m3():
    x = torch.randn(50, 160) * torch.logspace(-3, 3, 50)[:, None]
    ties = torch.cat([(E2M1[1:] + E2M1[:-1]) / 2, E2M1, torch.tensor([6.0])]).float()
    x[0, :16], x[1, :16] = ties, -448 * ties  # scales of 1 and 448
    x[2, :16] = 6 * (1 + 1 / 16)  # a scale between two of E4M3
    code, e4m3 = reference.phi(x)
    amax = x.unflatten(1, (-1, 16)).abs().amax(2)
    assert torch.equal(e4m3.long(), nearest((amax * (1 / 6)).clamp(max=448), E4M3))
    assert (e4m3 == 0).any() and (e4m3 == 126).any()
    scale = E4M3[e4m3.long()].float()
    inverse = torch.where(scale > 0, torch.ones_like(scale) / scale, 0.0).repeat_interleave(16, 1)
    assert torch.equal((code % 8).long(), nearest((x * inverse).abs().clamp(max=6), E2M1))
    assert torch.equal(code >= 8, x.signbit())
    back = reference.phi_inverse(code, e4m3)
    assert torch.equal(back.double(), decoded(code, e4m3))
    assert back[0, :16].unique().tolist() == E2M1.tolist() and back[1, :16].amin() == -448 * 6


def test_phi_keeps_what_is_not_finite_and_saturates_beyond_its_largest():
    x = torch.full((4, 32), 3.0)
    for row, value in enumerate((math.nan, math.inf, 1e5, 1e-5)):
        x[row, :16] = value
        x[row, 7] = -value
    back = reference.phi_inverse(*reference.phi(x))
    assert back[:2, :16].isnan().all() and torch.equal(back[:, 16:], x[:, 16:])
    assert torch.equal(back[2, :16], x[2, :16].sign() * 448 * 6) and not back[3, :16].any()


def test_a_power_of_two_before_phi_changes_nothing_and_keeps_small_and_large_numbers():
    amax = torch.tensor([0.0, 1e-38, 1e-28, 0.3, 1.0, 1024.0, 2688.0, 3e38])
    inverse, scale = reference.power_of_two(amax)
    assert torch.equal(inverse * scale, torch.ones(8)) and (scale.frexp()[0] == 0.5).all()
    assert (amax / scale < 2048).all() and (amax / scale)[2:].amin() >= 1024
    x = torch.randn(8, 64)
    alone = reference.phi_inverse(*reference.phi(x))
    for size in (1.0, 2.0**-40, 2.0**40):
        inverse, scale = reference.power_of_two((x * size).abs().amax())
        back = reference.phi_inverse(*reference.phi(x * size * inverse)) * scale
        assert torch.equal(back, alone * size)


@pytest.mark.parametrize("block_n", [64, 128])
def test_two_level_p_brings_each_row_of_a_tile_to_all_of_e4m3(block_n):
    """sage3 tile by tile, the first level of p taken off and put back. The second half of the keys
    gets next to nothing of p, but as many bits."""
    q, k, v = qkv(N_q=128, N_kv=256)
    q = q + 1
    k[:, :, 128:] -= 0.25
    a = attention_call(q, k, v, "sage3", scale=0.4)
    out, _ = emulation.attention(a, block_n)
    q_mean, delta, v_mean = a.q_mean[:, :, :1].float(), a.delta[:, :, :1].float(), a.v_mean

    def unpacked(x_fp4, e4m3):
        return decoded(torch.stack([x_fp4 % 16, x_fp4 // 16], -1).flatten(-2), e4m3)

    k_hat = unpacked(a.k, a.k_blocks)[:, :, :256] * a.k_scale[..., None, None]
    v_hat = unpacked(a.v, a.v_blocks)[..., :256].mT * a.v_scale[:, :, None]
    assert relative_l1(k_hat, k - k.mean(2, keepdim=True)) < 0.12
    assert relative_l1(v_hat, v - v_mean[:, :, None]) < 0.12
    q_hat = decoded(*reference.phi((q - q_mean) * 512)) / 512
    s = (q_hat @ k_hat.mT + delta) * 0.4
    p = (s - s.amax(-1, keepdim=True)).exp()
    assert p[..., 128:].amax(-1).median() < 2**-8
    o = torch.zeros_like(p @ v_hat)
    for tile in range(0, 256, block_n):
        keys = slice(tile, tile + block_n)
        s1 = p[..., keys].amax(-1, keepdim=True) / (448 * 6)
        o += s1 * (decoded(*reference.phi((p[..., keys] / s1).float())) @ v_hat[:, :, keys])
    assert relative_l1(out, o / p.sum(-1, keepdim=True) + v_mean[:, :, None]) < 1e-4


def test_a_walk_back_through_all_blocks_is_attention():
    """With the code of what the band shows a part of, to the keys' end within a block."""
    q, k, v = qkv(N_q=128, N_kv=150)
    a = attention_call(q, k, v, "sage2-8b", Visibility(band=Band(None, 40, False)))
    walk = torch.arange(4 * 2 + 1, 0, -4).expand(*q.shape[:2], 2, 3)
    as_read = functools.partial(as_walked, walk, 64)
    (out, lse), expected = emulation.attention(a, 64, as_read), emulation.attention(a, 64)
    assert relative_l1(out, expected[0]) < 0.01
    assert_close(lse, expected[1])


FAMILIES = {
    "normal": lambda q, k, v: None,
    "channel bias": lambda q, k, v: (k.add_(8 * torch.randn(1, 2, 1, 64)), v.add_(8)),
    "sink": lambda q, k, v: (k[:, :, 0].mul_(10), v[:, :, 0].mul_(0.05)),
    "outlier tokens": lambda q, k, v: [x[:, :, ::50].mul_(8) for x in (k, v)],
    "scaled channels": lambda q, k, v: v.mul_(torch.randn(1, 2, 1, 64).mul(1.5).exp()),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_estimated_costs_no_accuracy(family):
    """The shift and v's scales of a sample, beside those of all rows: the same error."""
    q, k, v = (torch.randn(1, 2, 1024, 64) for _ in range(3))
    FAMILIES[family](q, k, v)
    q, k, v = (x.bfloat16().float() for x in (q, k, v))
    exact, _ = exactly(q, k, v, False, 0.125)
    exact = exact.float()
    r = NAMED["sage2-8b-per-token"]
    k_mean, (v_mean, v_amax) = reference.smooth(k)[0], reference.smooth(v, keep=False)
    of_k, of_v = reference.quantize_k(k, k_mean, r), reference.quantize_v(v, v_mean, v_amax, r)
    exactly_prepared = (*of_k, k_mean, *of_v, v_mean)
    centre = v.mean(2, keepdim=True)
    errors = []
    for prepared in (reference.quantize_kv(k, v, None, r), exactly_prepared):
        a = attention_call(q, k, v, r, scale=0.125, prepared=prepared)
        out, _ = emulation.attention(a)
        errors.append(((out - exact).abs().sum() / (exact - centre).abs().sum()).item())
    assert errors[0] < 1.1 * errors[1] < 0.11, errors


@settings(max_examples=25, deadline=None)
@given(
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    n_q=st.integers(1, 150),
    n_kv=st.integers(1, 300),
    D=st.sampled_from([8, 32, 64, 80, 128]),
    is_causal=st.booleans(),
    scale=st.sampled_from([None, 0.0, -0.2]),
    recipe=st.sampled_from(list(NAMED)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_emulation_is_near_exact_attention(heads, n_q, n_kv, D, is_causal, scale, recipe, dtype):
    q, k, v = support.qkv(2, *heads, n_q, n_kv, D, dtype)
    scale = D**-0.5 if scale is None else scale
    out, lse = sdpa(q, k, v, is_causal, scale, recipe)
    exact, exact_lse = exactly(q, k, v, is_causal, scale)
    assert out.shape == exact.shape and out.dtype == dtype and lse.dtype == torch.float32
    # v's mean of 3 included; E4M3 has 3 mantissa bits, E2M1 1, INT4 a step of a seventh.
    few, far = {"sage2-4b": (0.15, 2.0), "sage3": (0.2, 1.0)}.get(recipe, (0.05, 0.3))
    assert relative_l1(out, exact) < few
    assert (lse - exact_lse).abs().max() < far


@pytest.mark.parametrize(
    "recipe, bound",
    [("sage2-8b", 0.055), ("sage2-8b-fp8qk", 0.075), ("sage1", 0.02), ("sage3", 0.3)],
)
def test_smoothing_takes_the_biases_out_of_the_error(recipe, bound):
    """Biased k (and v, where it is smoothed) costs no accuracy: the error relative to v's spread is
    that of normal inputs (.0366 and .0126 in a float64 simulation, relative L1; FP8 q and k 1.4
    times the first)."""
    errors = []
    for bias in (0.0, 8.0):
        q, k, v = (torch.randn(1, 2, 1024, 128) for _ in range(3))
        k = k + bias * torch.randn(1, 2, 1, 128)
        v_bias = bias if NAMED[recipe].pv != "16bit" else 0.0
        out, _ = sdpa(q, k, v + v_bias, False, 128**-0.5, recipe)
        exact, _ = exactly(q, k, v, False, 128**-0.5)
        errors.append(relative_l1(out - v_bias, exact))
    assert errors[1] < 1.2 * errors[0] + 0.005 and max(errors) < bound


def test_one_level_of_block_n_does_not_change_what_is_computed():
    q, k, v = qkv()
    a = attention_call(q, k, v, "sage1", Visibility(band=CAUSAL))
    for x, y in zip(emulation.attention(a, 64), emulation.attention(a, 128)):
        assert_close(x, y, rtol=2e-2, atol=2e-3)  # p rounded to bf16 beside another maximum


def test_lse_merges_two_halves_of_the_keys():
    """What ring attention does with it: lse must be exact about what smoothing took off."""
    q, k, v = qkv(N_kv=512)
    whole, whole_lse = exactly(q, k, v, False, 0.125)
    halves = [sdpa(q, k[:, :, s], v[:, :, s], False, 0.125, "sage1")
              for s in (slice(0, 256), slice(256, 512))]  # fmt: skip
    lse = torch.stack([h[1] for h in halves])
    weights = lse.softmax(0)[..., None]
    merged = sum(w * h[0] for w, h in zip(weights, halves))
    assert relative_l1(merged, whole) < 0.01
    assert (lse.logsumexp(0) - whole_lse).abs().max() < 0.1


@pairs(recipe=list(NAMED), which=[0, 1, 2], bad=[math.nan, math.inf, -math.inf])
def test_nan_and_inf_are_kept_and_stay_in_their_head(recipe, which, bad):
    inputs = list(qkv(B=2))
    clean, _ = sdpa(*inputs, True, 0.125, recipe)
    inputs[which] = inputs[which].clone()
    inputs[which][1, 0, 7, 3] = bad
    out, _ = sdpa(*inputs, True, 0.125, recipe)
    exact, _ = exactly(*inputs, True, 0.125)
    assert not (exact.isfinite() < out.isfinite()).any()
    assert torch.equal(out[0], clean[0]) and torch.equal(out[1, 1], clean[1, 1])


@pytest.mark.parametrize("recipe", list(NAMED))
def test_a_nan_in_v_that_is_seen_is_kept_under_a_mask(recipe):
    q, k, v = qkv(B=2)
    v = v.clone()
    v[1, 0, 7, 3] = math.nan
    seen = torch.ones(2, 1, 1, k.shape[2], dtype=torch.bool)
    seen[..., -5:] = False
    out, _ = sdpa(q, k, v, False, 0.125, recipe, attn_mask=seen)
    exact, _ = exactly(q, k, v, False, 0.125, seen)
    assert exact.isnan().any() and not (exact.isfinite() < out.isfinite()).any()


def test_extreme_but_finite_values_stay_finite():
    for dtype, size in ((torch.bfloat16, 6e4), (torch.bfloat16, 1e-30), (torch.float16, 6e-8)):
        q, k, v = qkv(dtype=dtype)
        for recipe in NAMED:
            out, lse = sdpa(q, k, (v.float() * size).to(dtype), False, 0.125, recipe)
            exact, _ = exactly(q, k, (v.float() * size).to(dtype), False, 0.125)
            assert out.isfinite().all() and lse.isfinite().all()
            assert relative_l1(out.double(), exact) < 0.05 or size == 6e-8, recipe  # denormals
    zeros = torch.zeros(1, 1, 64, 64)
    assert torch.equal(sdpa(zeros, zeros, zeros, False, 1.0, "sage2-8b")[0], zeros)


def large_scores(size: float, dtype=torch.float32, device="cpu") -> list[tuple]:
    """(q, k, v) whose scores reach about `size` at scale 1: rows that attend to one key."""
    k = torch.full((1, 1, 8, 16), -size / 160)
    k[:, :, 0] = size / 16
    one_key = torch.ones(1, 1, 8, 16), k, torch.randn(1, 1, 8, 16)
    q, k, v = torch.randn(3, 1, 2, 300, 64)
    root = (size / 40) ** 0.5
    return [[x.to(device, dtype) for x in each] for each in (one_key, (q * root, k * root, v))]


@pytest.mark.parametrize("recipe", NAMED)
def test_scores_of_any_size_cost_no_accuracy(recipe):
    """m - log2 448 is rounded: at 1e7 to halves. P may not exceed what its format holds."""

    def errors(size):
        torch.manual_seed(0)
        for q, k, v in large_scores(size):
            out, lse = sdpa(q, k, v, False, 1.0, recipe)
            exact, exact_lse = exactly(q, k, v, False, 1.0)
            assert relative_l1(lse, exact_lse) < {"sage2-4b": 0.1, "sage3": 0.1}.get(recipe, 0.02)
            yield relative_l1(out.double(), exact)

    usual = list(errors(1e3))
    for size in (1e5, 1e7, 1.2e8, 4e8, 1e20):
        for found, allowed in zip(errors(size), usual, strict=True):
            assert found < 1.15 * allowed + 0.01, (size, found, allowed)


@pytest.mark.parametrize("recipe", ["sage1", "sage2-8b", "sage2-4b", "sage3"])
def test_a_bias_of_any_size_that_all_keys_share_changes_little(recipe):
    """A row all of whose keys are masked with a number that is not the lowest sees them all."""
    q, k, v = qkv(D=32)
    exact, _ = exactly(q, k, v, False, 0.3)
    usual = relative_l1(sdpa(q, k, v, False, 0.3, recipe)[0].double(), exact)
    for bias in (-3e4, 1e5, -3e5):
        mask = torch.full((200, 300), bias)
        found, lse = sdpa(q, k, v, False, 0.3, recipe, attn_mask=mask)
        # Scores are rounded to 1/64 at 1.5e5, as in any fp32 attention.
        assert relative_l1(found.double(), exact) < 1.05 * usual + 0.01, bias
        assert ((lse - bias).abs() < 40).all()
    mask[:] = -1e9  # what the scores are is lost
    found, _ = sdpa(q, k, v, False, 0.3, recipe, attn_mask=mask)
    mean = v.double().mean(2, keepdim=True).expand_as(exact)
    assert relative_l1(found.double(), mean) < 0.25
