"""What diagnose_training measures, against gradients of one example at a time and of compiled
models; what it leaves alone."""

import importlib
import math
import re
import time

import pytest
import torch
import torch.nn.functional as F
from models import Studied as Attention
from models import Transformer
from support import op_by_op, random_qkv
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from sage_inductor import diagnose_training

NOISE = importlib.import_module("sage_inductor.study.diagnose_training")
sdpa = F.scaled_dot_product_attention


def causal(q, k, v):
    return sdpa(q, k, v, is_causal=True)


def against(*cotangent):
    """A loss that is linear in the output, a mean over examples."""
    return lambda out: (out * torch.stack(cotangent)).flatten(1).sum(1).mean()


def batch(B=5, N=70, C=64):
    return torch.randn(B, N, C), torch.randn(B, N, C)


def found_by(model, x, y, **given):
    return diagnose_training(model, loss=lambda out: (out - y).square().mean(), **given)(x)


def of(found) -> dict:
    return {(row.site.module, row.recipe): row for row in found.rows}


def joined(tensors):
    return torch.cat([x.flatten().double() for x in tensors])


# -- what is measured ----


@pytest.mark.parametrize("attend", [sdpa, causal])
def test_noise_is_that_of_the_gradients_of_one_example_at_a_time(attend):
    """Of each layer's own projection, on which nothing but its attention depends."""
    model, (x, y) = Transformer(attend, attend), batch()
    rows = of(found_by(model, x, y))
    for i, layer in enumerate(model.layers):
        each = torch.stack([
            joined(torch.autograd.grad((model(x[b : b + 1]) - y[b : b + 1]).square().mean(),
                                       layer.qkv.parameters()))
            for b in range(5)
        ])  # fmt: skip
        for recipe in ("sdpa", "sagebwd", "fp8-backward"):
            row = rows[f"layers.{i}", recipe]
            assert row.parameters == f"layers.{i}"
            assert row.gradient == pytest.approx(each.mean(0).norm().item(), rel=1e-4)
            noise = (each.var(0, correction=1).sum() / 5).sqrt().item()
            assert row.noise == pytest.approx(noise, rel=1e-4)


@pytest.mark.parametrize("attend", [sdpa, causal])
def test_errors_are_those_of_a_model_that_is_compiled_to_train_by_the_recipe(attend):
    """The loss is linear in out, so what reaches it does not depend on the forward's error."""
    model, (x, y) = Attention(attend), batch(3)
    loss = against(*y)
    parameters = list(model.qkv.parameters())
    exact = joined(torch.autograd.grad(loss(model.double()(x.double())), parameters))
    model.float()
    rows = {recipe: row for (_, recipe), row in of(diagnose_training(model, loss=loss)(x)).items()}
    assert rows.keys() == {"sdpa", "sagebwd", "fp8-backward"}
    assert rows.pop("sdpa").ratio < 1e-5
    for recipe, row in rows.items():
        torch._dynamo.reset()
        options = {"sage.training": recipe, "sage.emulate": True, "sage.strict": True}
        compiled = torch.compile(model, backend="sage", options=options)
        with op_by_op(split=True):
            gradient = joined(torch.autograd.grad(loss(compiled(x)), parameters))
        assert row.gradient == pytest.approx(exact.norm().item(), rel=1e-4)
        assert row.error == pytest.approx((gradient - exact).norm().item(), rel=1e-3)
        assert 1e-3 < row.error / row.gradient < 0.1
        assert row.ratio == row.error / row.noise


def test_no_recipes_error_reaches_another_call():
    """Layer 1's values cancel: 8 bits do not cope with them. Layer 0 trains before it."""

    def cancelling(q, k, v):
        return sdpa(q / 100, k, v + 10 * (1 - 2 * (torch.arange(v.shape[2]) % 2))[:, None])

    x, y = batch(4)
    good, hostile = Transformer(sdpa, sdpa), Transformer(sdpa, cancelling)
    hostile.load_state_dict(good.state_dict())
    with torch.no_grad():
        for model in (good, hostile):
            model.layers[1].out.weight.zero_()  # layer 0 gets the same gradient
    good, hostile = (of(found_by(m, x, y, recipes="sagebwd")) for m in (good, hostile))
    assert ("layers.1", "sagebwd") not in hostile
    assert hostile["layers.0", "sagebwd"] == good["layers.0", "sagebwd"]


@pytest.mark.parametrize("parts", [9, 5], ids=["each alone", "of two and one"])
def test_of_many_examples_parts_know_the_noise(parts, monkeypatch):
    """4,000 parameters that each example adds noise of deviation 3 to."""
    monkeypatch.setattr(NOISE, "MOST_PARTS", parts)
    B, D, found = 9, 4000, []
    for _ in range(4):
        w = nn.Parameter(torch.ones(D))
        ones = [torch.ones(B, 1, 1, D) for _ in range(2)]
        run = NOISE._KeptRun(w.expand(B, 1, 1, D), *ones, None)
        exact = 5 + 3 * torch.randn(B, 1, 1, D), *ones
        gradient = NOISE._followed(run, exact, [w])
        found.append(NOISE._noise(run, exact, [w], gradient))
        if parts == B:
            assert found[-1] == pytest.approx((B * exact[0].var(0).sum()).sqrt().item(), rel=1e-5)
    assert sum(found) / 4 == pytest.approx(3 * math.sqrt(B * D), rel=0.02)


@pytest.mark.parametrize("at_once", [1 << 24, 300], ids=["whole", "in parts"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_exact_gradients_are_autograds_in_float64(is_causal, at_once, monkeypatch):
    monkeypatch.setattr(NOISE, "MAX_SCORES", at_once)
    q, k, v = random_qkv(2, 4, H_kv=2, N=33, N_kv=41, D=16)
    grad = torch.randn_like(q)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out = sdpa(*leaves, is_causal=is_causal, scale=0.3, enable_gqa=True)
    expected = torch.autograd.grad(out, leaves, grad.double())
    found = NOISE._gradients(NOISE.EXACT, q, k, v, grad, is_causal, 0.3)
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == torch.float64
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("recipe", ["sdpa", "fp8-backward", "sagebwd"])
def test_a_head_and_an_example_at_a_time_are_all_of_them(recipe, is_causal):
    q, k, v = random_qkv(2, 4, H_kv=2, N=70, D=32)
    grad = torch.randn_like(q)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    if recipe == "sdpa":
        out = sdpa(*leaves, is_causal=is_causal, scale=0.3, enable_gqa=True)
    else:
        op = {"fp8-backward": torch.ops.sage.rowscaled, "sagebwd": torch.ops.sage.sagebwd}[recipe]
        out = op(*leaves, is_causal, 0.3, False)[0]
    expected = torch.autograd.grad(out, leaves, grad)
    found = NOISE._gradients(recipe, q, k, v, grad, is_causal, 0.3)
    torch.testing.assert_close(found, expected)
    assert not any(x.requires_grad for x in (q, k, v))


def chained(q, k, v):
    return sdpa(sdpa(q, k, v), k, v)


def in_place(q, k, v):
    out = sdpa(q, k, v)
    out *= 3
    return out


@pytest.mark.parametrize(
    "attend, in_eager",
    [
        (lambda q, k, v: (q @ k.mT * 32**-0.5).softmax(-1) @ v, None),
        (lambda q, k, v: sdpa(q, k[:, :1], v[:, :1], enable_gqa=True), None),
        (lambda q, k, v: sdpa(q, k, v, scale=0.3), None),
        (in_place, lambda q, k, v: sdpa(q, k, v) * 3),  # SDPA's own backward refuses it
    ],
    ids=["by hand", "grouped", "scaled", "in place"],
)
def test_every_spelling_is_measured_as_the_model_computes_it(attend, in_eager):
    """The gradient of the projection is the model's own."""
    model, (x, y) = Attention(attend), batch(4)
    found = found_by(model, x, y)
    model.by = in_eager or attend
    exact = torch.autograd.grad((model(x) - y).square().mean(), model.qkv.parameters())
    assert not found.unmeasured and len(found.rows) == 3
    for row in found.rows:
        assert row.gradient == pytest.approx(joined(exact).norm().item(), rel=1e-4)


def test_of_a_chain_the_second_call_has_its_own_part_of_the_gradient():
    """The second call's k and v, and its q through the first: G of both adds up where it should."""
    model, (x, y) = Attention(chained), batch(3)
    rows = [row for row in found_by(model, x, y).rows if row.recipe == "sdpa"]
    q, k, v = model.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    q, v = 4 * q, v / 2  # as models.Studied
    first = sdpa(q, k, v)
    second = sdpa(first, k, v)
    value = (model.out(second.transpose(1, 2).flatten(2)) - y).square().mean()
    of_first = torch.autograd.grad(value, first, retain_graph=True)
    direct = torch.autograd.grad(first, model.qkv.parameters(), of_first, retain_graph=True)
    whole = torch.autograd.grad(value, model.qkv.parameters())  # q by the first call, k, v by both
    norms = sorted(joined(each).norm().item() for each in (direct, whole))
    assert sorted(row.gradient for row in rows) == pytest.approx(norms, rel=1e-4)


class Cast(Attention):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def in_16_bits(q, k, v):
    return sdpa(*(x.bfloat16() for x in (q, k, v)))


def from_32_bits(q, k, v):
    return sdpa(q.float(), k.float(), v)  # which autocast makes 16


def test_under_autocast_calls_have_its_dtype():
    """Around the model alone, around all of it, and by the model itself."""
    x, y = batch(4)
    models = Cast(from_32_bits), Attention(from_32_bits), Cast(in_16_bits)
    found = []
    for model in models:
        model.load_state_dict(models[0].state_dict())
        with torch.autocast("cpu", torch.bfloat16, enabled=type(model) is Attention):
            found.append(of(diagnose_training(model, loss=against(*y))(x)))
    first, *others = found
    assert {row.site.dtype for row in first.values()} == {"bfloat16"}
    assert 1e-4 < first["", "sdpa"].ratio < first["", "fp8-backward"].ratio < 0.2
    for key, row in first.items():
        for other in others:
            assert other[key].error == pytest.approx(row.error, rel=0.01)
            assert other[key].noise == pytest.approx(row.noise, rel=0.01)


class Checkpointed(Transformer):
    def forward(self, x):
        for layer in self.layers:
            x = x + checkpoint(layer, F.layer_norm(x, x.shape[-1:]), use_reentrant=False)
        return x


def test_checkpoints_change_nothing(monkeypatch):
    probes, end = [], NOISE._GradientProbe.end
    ended = lambda probe: probes.append(probe) or end(probe)  # noqa: E731
    monkeypatch.setattr(NOISE._GradientProbe, "end", ended)
    x, y = batch(4)
    model, same = Transformer(sdpa, sdpa), Checkpointed(sdpa, sdpa)
    same.load_state_dict(model.state_dict())
    expected, found = (of(found_by(each, x, y)) for each in (model, same))
    assert expected.keys() == found.keys()
    for key, row in expected.items():
        for name in ("error", "noise", "gradient"):
            same = pytest.approx(getattr(row, name), rel=1e-4, abs=1e-9)
            assert getattr(found[key], name) == same
    assert len(probes) == 4 and not any(probe.runs for probe in probes), "what ran again is kept"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.attn = nn.Linear(64, 64), Attention()

    def forward(self, x):
        return self.attn(self.mix(x))


def test_in_a_wrapper_a_module_is_found_by_the_path_that_the_report_shows():
    x, y = batch(3)
    model = nn.Sequential(checkpoint_wrapper(Block()))
    found = found_by(model, x, y)
    paths = {(row.site.module, row.parameters) for row in found.rows}
    assert paths == {("0.attn", "0.attn")} and len(found.rows) == 3


def test_a_call_that_the_loss_does_not_depend_on_is_listed():
    class Two(Transformer):
        def forward(self, x):
            return self.layers[0](x), self.layers[1](x)

    x, y = batch(3)
    found = diagnose_training(Two(sdpa, sdpa), loss=lambda out: (out[1] - y).square().mean())(x)
    assert {row.site.module for row in found.rows} == {"layers.1"}
    (site,) = found.unmeasured
    assert (site.module, site.reason) == ("layers.0", "was not measured: its gradient is 0")


def test_frozen_weights_leave_the_parameters_around_the_call():
    x, y = batch(4)
    model = Transformer(sdpa, sdpa)
    model.layers.requires_grad_(False)
    model.layers[0].out.weight.requires_grad_(True)
    found = found_by(model, x, y)
    assert [(row.site.module, row.parameters) for row in found.rows] == [("layers.1", "layers")] * 3
    assert [site.reason for site in found.unmeasured] == ["was not measured: it needs no gradient"]
    exact = torch.autograd.grad((model(x) - y).square().mean(), model.layers[0].out.weight)
    assert found.rows[0].gradient < joined(exact).norm().item()  # not by the residual
    model.requires_grad_(False)
    found = found_by(model, x.requires_grad_(), y)  # gradients, but of no parameter
    reasons = {site.reason for site in found.unmeasured}
    assert not found.rows and reasons == {"was not measured: its gradient is 0"}
    assert found.verdict == "0 calls; not measured: 2 calls" and str(found) and found.details()
    assert repr(found) == f"<TrainingDiagnosis: {found.verdict}>"


def test_a_call_that_runs_several_times_is_shown_at_its_worst(monkeypatch):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Attention()

        @torch._dynamo.disable(recursive=False)
        def forward(self, x, gains):
            for gain in gains:
                x = self.layer(x * gain)
            return x

    made, row = [], NOISE.GradientRow
    monkeypatch.setattr(NOISE, "GradientRow", lambda *a: made.append(row(*a)) or made[-1])
    model, (x, y) = Twice(), batch(3)
    x.requires_grad_()  # as what the later runs are given: else they have a graph of their own
    gains = torch.tensor([[1.0], [3.0], [0.2]])
    rows = of(diagnose_training(model, loss=against(*y))(x, gains))
    assert len(made) == 3 * len(rows) == 9
    for (_, recipe), worst in rows.items():
        ratios = [each.ratio for each in made if each.recipe == recipe]
        assert worst.ratio == max(ratios) > min(ratios)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["fp8-backward", "sagebwd"])
def test_on_a_gpu_its_kernels_are_measured(recipe):
    model, (x, y) = Attention(dim=256).bfloat16(), (z.bfloat16() for z in batch(4, 300, 256))
    emulated = of(found_by(model, x, y, recipes=recipe))
    found = of(found_by(model.cuda(), x.cuda(), y.cuda(), recipes=recipe))
    assert found.keys() == emulated.keys()
    for key, row in found.items():
        assert row.noise == pytest.approx(emulated[key].noise, rel=0.02)
        assert row.ratio == pytest.approx(emulated[key].ratio, rel=0.2)


# -- what is not ----


def masked(q, k, v):
    return sdpa(q, k, v, torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu())


@pytest.mark.parametrize(
    "attend, reason",
    [
        (masked, "sagebwd trains calls without a mask but .*; the FP8 backward trains calls with"),
        (lambda *qkv: sdpa(*qkv, dropout_p=0.5), "dropout_p must be 0, got 0.5$"),
        (torch.no_grad()(lambda *qkv: sdpa(*qkv)), "was not measured: it needs no gradient"),
        (torch.no_grad()(masked), "was not measured: it needs no gradient"),
        (lambda *qkv: sdpa(*qkv) * 0, "was not measured: its gradient is 0"),
        (
            lambda *qkv: torch.cond(qkv[0].sum() > 1e9, lambda *x: sdpa(*x), lambda *x: x[0] + 0, qkv),
            "was not run with these inputs",
        ),
        (
            lambda q, *kv: q + sdpa(*(x.flatten(0, 1)[None] for x in (q, *kv)))[0][:2],
            "was not measured: a batch of 1 has no gradient noise",
        ),
    ],
    ids=[
        "masked", "dropout", "no grad", "no grad, masked", "unused", "another branch", "one example"
    ],
)  # fmt: skip
def test_calls_that_are_not_measured_are_listed_with_the_reason(attend, reason):
    x, y = batch(4)
    found = found_by(Transformer(sdpa, attend), x, y)
    (site,) = found.unmeasured
    assert site.module == "layers.1" and re.match(reason, site.reason), site.reason
    assert {row.site.module for row in found.rows} == {"layers.0"} and site.reason in str(found)
    assert found.verdict.endswith("; not measured: 1 call")


def test_a_recipe_that_does_not_take_a_call_has_no_row():
    x, y = batch(4)
    found = found_by(Transformer(sdpa, lambda q, k, v: sdpa(q, k, v, scale=-0.3)), x, y)
    both = {(f"layers.{i}", recipe) for i in range(2) for recipe in ("sdpa", "sagebwd")}
    assert of(found).keys() == both | {("layers.0", "fp8-backward")} and not found.unmeasured
    only = found_by(Transformer(sdpa), x, y, recipes="sagebwd")
    assert {row.recipe for row in only.rows} == {"sdpa", "sagebwd"}


def test_mistakes_are_refused():
    model, (x, y) = Transformer(sdpa), batch(2)
    message = r"recipes must be of \('sagebwd', 'fp8-backward'\), got"
    for wrong in ("sage1", [], ["fp8-backward", "off"]):
        with pytest.raises(ValueError, match=message):
            found_by(model, x, y, recipes=wrong)
    for wrong in (lambda out: out, lambda out: out.sum().item(), lambda out: out.detach().sum()):
        with pytest.raises(ValueError, match="loss must return one number that needs a gradient"):
            diagnose_training(model, loss=wrong)(x)
    with pytest.raises(ValueError, match="must be a batch of 2 or more, got 1"):
        found_by(model, x[:1], y[:1])
    with pytest.raises(ValueError, match="must make an attention call"):
        diagnose_training(nn.Linear(64, 64), loss=torch.mean)(x)
    with pytest.raises(TypeError, match="must be an nn.Module, got"):
        diagnose_training(lambda x: model(x), loss=torch.mean)(x)


class Normed(nn.Module):
    """All that a training step changes: batch statistics, random numbers, gradients."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.BatchNorm1d(70), Attention()

    def forward(self, x):
        return F.dropout(self.attention(self.norm(x)), 0.5, self.training)


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_and_what_is_around_it_are_left_as_they_were(fails):
    model, (x, y) = Normed(), batch(3)
    model(x).sum().backward()
    model.attention.out.eval()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    buffers = {name: x.data_ptr() for name, x in model.named_buffers()}
    grads = [p.grad.clone() for p in model.parameters()]
    kept, modes = [p.grad for p in model.parameters()], [m.training for m in model.modules()]
    state = torch.get_rng_state()

    def loss(out):
        if fails:
            raise RuntimeError("in the loss")
        return (out - y).square().mean()

    with torch.no_grad():  # it turns gradients on for itself
        if fails:
            with pytest.raises(RuntimeError, match="in the loss"):
                diagnose_training(model, loss=loss)(x)
        else:
            assert len(diagnose_training(model, loss=loss)(x).rows) == 3
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
    assert buffers == {name: x.data_ptr() for name, x in model.named_buffers()}
    assert all(p.grad is x for p, x in zip(model.parameters(), kept, strict=True))
    assert all(torch.equal(p.grad, x) for p, x in zip(model.parameters(), grads, strict=True))
    assert [m.training for m in model.modules()] == modes
    compiled = torch.compile(model.eval(), backend="eager")  # no probe is left
    assert torch.equal(compiled(x), model(x))


# -- what is printed ----


def test_equal_layers_are_one_row_and_examples_that_are_alike_have_no_noise():
    x, y = batch(4)
    model = Transformer(sdpa, sdpa, causal)
    found = found_by(model, x, y)
    lines = str(found).splitlines()
    worst = {
        name: max(r.ratio for r in found.rows if r.recipe == name)
        for name in ("sdpa", "fp8-backward")
    }
    first = f"3 calls, |error| / noise of the gradient at most: sdpa {worst['sdpa']:.3g}, "
    assert lines[0] == found.verdict and lines[0].startswith(first)
    assert lines[0].endswith(f"fp8-backward {worst['fp8-backward']:.3g}")
    rows = {cells[0]: cells for cells in (re.split("  +", line) for line in lines[4:6])}
    assert rows["layers.*"][1] == "x2" and rows["layers.2"][5] == "causal"
    least = min(r.noise / r.gradient for r in found.rows if r.site.module != "layers.2")
    assert rows["layers.*"][6] == f"{least:.3g}"
    ratios = [row.ratio for row in found.rows]
    assert ratios == sorted(ratios, reverse=True)
    assert len(found.details().splitlines()) == 2 + len(ratios)
    same = found_by(model, x[:1].expand(3, -1, -1), y[:1].expand(3, -1, -1))
    assert all(row.ratio > 50 for row in same.rows if row.recipe != "sdpa")


def test_progress_is_shown_as_diagnoses_is(capfd, monkeypatch):
    monkeypatch.setattr("sage_inductor.study.measure.QUIET_S", 0.01)
    noise = NOISE._noise
    monkeypatch.setattr(NOISE, "_noise", lambda *args: time.sleep(0.15) or noise(*args))
    x, y = batch(2)
    found_by(Transformer(sdpa, sdpa), x, y)
    assert "| 2/2 [" in capfd.readouterr().err
