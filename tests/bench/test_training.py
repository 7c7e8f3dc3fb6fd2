"""bench/training.py without a GPU: what is counted and compared."""

import dataclasses
import functools

import pytest
import torch
import torch.nn.functional as F
from instead import op_by_op
from torch._dynamo.utils import counters

import sage_inductor
from bench import training
from bench.cases import Case
from sage_inductor import SageRefused


def leaves(B=1, H_q=4, H_kv=2, N=256, D=64):
    return [
        torch.randn(B, H, N, D, dtype=torch.bfloat16, requires_grad=True) for H in (H_q, H_kv, H_kv)
    ]


def test_what_is_kept_is_counted_once():
    q, k, v = leaves()
    of_q, of_kv = 4 * 256, 2 * 256  # rows
    codes = 64 * (of_q + 2 * of_kv)
    scales = 4 * (of_q + of_kv // 64 + of_kv)
    stats, v_mean = 4 * 2 * of_q, 4 * 2 * 64
    found = training.kept_bytes(training.by_op("fp8-backward"), (q, k, v))
    assert found == 2 * q.numel() + codes + scales + stats + v_mean
    square = training.kept_bytes(lambda q, k, v: q * q, (q, k, v))
    assert square == 2 * q.numel()


@pytest.mark.parametrize("H_kv", [1, 4])
def test_errors_are_of_the_gradients(H_kv):
    shape = Case(2, 4, H_kv, 300, 64)
    of_op = training.errors(training.by_op("fp8-backward"), shape, "cpu")
    assert list(of_op) == ["dq", "dk", "dv"] and all(0.02 < x < 0.06 for x in of_op.values())
    exact = training.errors(
        lambda q, k, v: F.scaled_dot_product_attention(
            *(x.double() for x in (q, k, v)), enable_gqa=True
        ).bfloat16(),
        shape, "cpu",
    )  # fmt: skip
    assert exact["dv"] < 0.01
    assert (
        training.errors(None, dataclasses.replace(shape, N=training.MAX_EXACT + 1), "cpu") is None
    )


@pytest.mark.parametrize("is_causal", [False, True])
def test_what_is_compiled_is_the_op(is_causal):
    q, k, v = leaves()
    attend, op = (
        functools.partial(each, is_causal=is_causal)
        for each in (training.ATTENTION["fp8-backward, compiled"], training.by_op("fp8-backward"))
    )
    with sage_inductor.config.patch(emulate=True):
        out = attend(q, k, v)
        assert torch.equal(out, op(q, k, v))
        assert training.kept_bytes(attend, (q, k, v)) == training.kept_bytes(op, (q, k, v))


# -- a step of a whole transformer ----


def test_what_is_kept_does_not_count_what_is_there_anyway():
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    assert training.kept_bytes(lambda x: x @ weight, [x], beside=[weight]) == 4 * 4 * 8
    assert training.kept_bytes(lambda x: x @ weight[:4].T, [x], beside=[x, weight]) == 0


@pytest.fixture(scope="module")
def two_layers():
    """(the model, its rows on CPU, by the emulation; the graphs that were compiled)."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    model = training.Model(2, 1, 2, 256, 64)
    options = training.COMPILED["fp8-backward"]["options"] | {"sage.emulate": True}
    compiled = training.COMPILED | {"fp8-backward": {"backend": "sage", "options": options}}
    with op_by_op(partitioned=True):
        rows = training.measure_steps(model, torch.device("cpu"), compiled)
    return model, rows, counters["stats"]["unique_graphs"], sage_inductor.report()


def test_a_step_keeps_codes_in_the_place_of_16_bits(two_layers):
    model, (inductor, g), _, _ = two_layers
    assert [row["provider"] for row in (inductor, g)] == ["inductor", "fp8-backward"]
    layers, B, H, N, D = model
    heads, rows = B * H, B * H * N
    of_16_bits = 3 * 2 * rows * D + 4 * rows  # q, k, v and lse
    of_8_bits = 3 * rows * D + 4 * (rows + rows // 64 + rows) + 8 * rows + 4 * heads * D
    saved = layers * (of_16_bits - of_8_bits)
    assert inductor["kept_bytes"] - g["kept_bytes"] == pytest.approx(saved, rel=0.02)
    activations = layers * 2 * rows * D
    assert 10 * activations < inductor["kept_bytes"] < 25 * activations
    weights = 2 * layers * (12 * (H * D) ** 2 + 7 * H * D + 2 * D)
    assert inductor["weight_bytes"] == g["weight_bytes"] == weights
    assert "times" not in g and g["plan"] == "memory" and g["shape"] == "2 layers, 1x2x256x64"


def test_all_layers_are_one_graph_for_each_way_to_compile(two_layers):
    _, _, graphs, report = two_layers
    assert graphs == 2 and [site.recipe for site in report] == ["fp8-backward"]


def test_gradients_are_near_inductors(two_layers):
    _, (inductor, g), _, _ = two_layers
    assert inductor["cos_sim"] == pytest.approx(1) and 0.99 < g["cos_sim"] < 0.99999


def test_a_layer_has_qk_norm_and_rope():
    layer, x = training.Layer(128, 64), torch.randn(1, 30, 128)
    tables, order = training.blocks.pairs(30, 64), torch.randperm(30)
    out = layer(x, *tables)
    ahead = layer(x[:, order], *(table[order] for table in tables))
    torch.testing.assert_close(ahead, out[:, order], rtol=1e-4, atol=1e-5)
    assert (layer(x[:, order], *tables) - out[:, order]).abs().max() > 0.01, "places matter"
    with torch.no_grad():
        layer.to_q.weight *= 3
        layer.to_k.weight *= 0.5
    torch.testing.assert_close(layer(x, *tables), out, rtol=1e-3, atol=1e-4)


def test_a_call_that_stays_is_an_error():
    with op_by_op(), pytest.raises(SageRefused, match="on CPU attention stays as it was"):
        training.measure_steps(training.Model(1, 1, 2, 64, 64), torch.device("cpu"))
