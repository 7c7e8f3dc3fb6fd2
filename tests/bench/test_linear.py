"""bench/linear.py: the recurrence against one formula, chunks against the recurrence, each rounding
against its definition, and the counts."""

import pytest
import torch
from torch.testing import assert_close

from bench import linear
from bench.linear import Rounding

C, D, D_v = 32, 16, 24


def draw(N, family="normal"):
    """In float64, with D_v channels of v."""
    q, k, _, log_a = (x.double() for x in linear.draw(family, 0, 2, N, D))
    return q, k, torch.randn(1, 2, N, D_v).bfloat16().double(), log_a


def definition(q, k, v, log_a):
    """All scores at once: o_i = sum_(j <= i) exp(b_i - b_j) (q_i k_j) v_j / sqrt(D)."""
    b = log_a.cumsum(2)
    decay = (b[..., None] - b[..., None, :]).exp().tril()
    return (q @ k.mT * decay) @ v / D**0.5


def int8(x):
    """A scale a row."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return (x / scale).round() * scale


def e4m3(x):
    """A scale a row."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 448
    return (x / scale).to(torch.float8_e4m3fn).to(x) * scale


def bf16(x):
    return x.bfloat16().to(x)


def none(x):
    return x


def distance(x, y):
    return ((x - y).abs().sum() / y.abs().sum()).item()


@pytest.mark.parametrize("family", linear.FAMILIES)
def test_the_recurrence_is_its_definition(family):
    inputs = draw(100, family)
    assert_close(linear.exact(*inputs), definition(*inputs))


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("N", [C, 4 * C, 4 * C + 5])
def test_chunks_without_rounding_are_the_recurrence(N, smooth):
    for family in ("k_bias", "relu, no decay"):
        inputs = draw(N, family)
        out = linear.chunkwise(*inputs, Rounding(smooth=smooth), C)
        assert distance(out, linear.exact(*inputs)) < 3e-6


@pytest.mark.parametrize("fmt", [int8, e4m3, bf16])
@pytest.mark.parametrize("what", ["qk", "qk, smooth", "sv", "state"])
def test_each_product_rounds_its_own_operands(what, fmt):
    """Two chunks, in float64, written out. Of the rounding's own error one that is left out, or is
    another product's, is a large part; codes that fp32 rounds to the other side are a small one."""
    q, k, v, log_a = (1.01 * x for x in draw(2 * C, "k_bias"))  # bf16 rounds it
    name = fmt.__name__
    given = {"qk": {"qk": name}, "qk, smooth": {"qk": name, "smooth": True}}
    out = linear.chunkwise(q, k, v, log_a, Rounding(**given.get(what, {what: name})), C)
    of_qk, of_sv, of_state = (fmt if what[:2] == x[:2] else none for x in ("qk", "sv", "state"))
    mean = k.mean(2, keepdim=True) if what == "qk, smooth" else torch.zeros_like(k[:, :, :1])
    q, parts, S = q / D**0.5, [], 0 * k[:, :, 0, :, None] * v[:, :, 0, None]
    for first in (0, C):
        of = slice(first, first + C)
        b = log_a[:, :, of].cumsum(2)[..., None]
        s = of_qk(q[:, :, of]) @ of_qk(k[:, :, of] - mean).mT + q[:, :, of] @ mean.mT
        s = s * (b - b.mT).exp().tril()
        v_c = v[:, :, of]
        parts += [of_sv(s) @ of_sv(v_c.mT).mT + of_state(q[:, :, of] * b.exp()) @ of_state(S.mT).mT]
        left = k[:, :, of] * (b[:, :, -1:] - b).exp()
        S = b[:, :, -1:].exp() * S + of_state(left.mT) @ of_state(v_c.mT).mT
    expected, right = torch.cat(parts, 2), linear.exact(q * D**0.5, k, v, log_a)
    assert distance(out, expected) < 0.1 * distance(expected, right)


def test_the_counts():
    """Of one token and head of C=2, D=3, D_v=5: 4 D + 4 D_v bytes; q k^T and s v are 2 C (D + D_v)
    operations, the state's two products 4 D D_v."""
    found, tokens = linear.count(2, 3, 5), linear.TOKENS * linear.HEADS * 1e3
    assert found["bytes"] * linear.BANDWIDTH == pytest.approx(32 * tokens)
    assert found["bytes, q, k, v in 8 bits"] * linear.BANDWIDTH == pytest.approx(21 * tokens)
    assert found["within chunks"] == 32 / 92
    assert found["products"] * linear.BF16 == pytest.approx(92 * tokens)
    half = found["products, within chunks in 8 bits"] * linear.BF16
    assert half == pytest.approx((60 + 32 * linear.BF16 / linear.EIGHT_BITS) * tokens)


def test_the_table(monkeypatch, capsys):
    monkeypatch.setattr(linear, "SIZE", (1, 70, 16))
    assert linear.main(["--device", "cpu"]) == 0
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    lines = {line[0]: [each.strip() for each in line[1:] if each] for line in lines}
    assert len(lines["INT8 q kᵀ"]) == len(linear.FAMILIES)
    assert lines["128, 128, 256"] == ["0.34", "0.24", "43%", "1.27x", "1.00x", "1.50x"]
