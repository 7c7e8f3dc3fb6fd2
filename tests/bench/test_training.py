"""bench/training.py without a GPU: what is counted and compared."""

import pytest
import torch
import torch.nn.functional as F

from bench import training


def leaves(B=1, H_q=4, H_kv=2, N=256, D=64):
    return [
        torch.randn(B, H, N, D, dtype=torch.bfloat16, requires_grad=True) for H in (H_q, H_kv, H_kv)
    ]


def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert training.main([]) == 2
    assert "torch sees no CUDA device" in capsys.readouterr().err


def test_what_is_kept_is_counted_once():
    q, k, v = leaves()
    of_q, of_kv = 4 * 256, 2 * 256  # rows
    codes = 64 * (of_q + 2 * of_kv)
    scales = 4 * (of_q + of_kv // 64 + of_kv)
    stats, means = 4 * 2 * of_q, 4 * 2 * 64
    found = training.kept_bytes(training.by_op("g"), (q, k, v))
    assert found == 2 * q.numel() + codes + scales + stats + means
    square = training.kept_bytes(lambda q, k, v: q * q, (q, k, v))
    assert square == 2 * q.numel()


@pytest.mark.parametrize("H_kv", [1, 4])
def test_errors_are_of_the_gradients(H_kv):
    shape = training.Shape(2, 4, H_kv, 300, 64)
    of_op = training.errors(training.by_op("g"), shape, "cpu")
    assert list(of_op) == ["dq", "dk", "dv"] and all(0.02 < x < 0.06 for x in of_op.values())
    exact = training.errors(
        lambda q, k, v: F.scaled_dot_product_attention(
            *(x.double() for x in (q, k, v)), enable_gqa=True
        ).bfloat16(),
        shape, "cpu",
    )  # fmt: skip
    assert exact["dv"] < 0.01
    assert training.errors(None, shape._replace(N=training.MAX_EXACT + 1), "cpu") is None


def test_ratios_are_to_the_faster_rival():
    times = {("cudnn", "step"): [4.0, 2.0, 3.0], ("flash", "step"): [9.0], ("g", "step"): [1.5]}
    assert training.over(times, "g", "step") == " (2.00x)"
    assert training.over(times, "cudnn", "step").strip() == ""
    assert training.over({("g", "step"): [1.0]}, "g", "step").strip() == ""


def test_shapes_are_named_by_their_heads():
    assert str(training.Shape(1, 32, 8, 8192, 128)) == "1x32/8x8192x128"
    assert str(training.Shape(8, 16, 16, 4096, 64)) == "8x16x4096x64"
