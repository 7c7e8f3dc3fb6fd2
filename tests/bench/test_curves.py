"""bench/curves.py: whose gradients a model is trained with, that runs can be compared, that they
stop in time, and what is said of them."""

import dataclasses
import json
import math
import statistics
import sysconfig
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from support import relative_l1
from torch.testing import assert_close

from bench import curves, gradients, plot
from bench.curves import GPTs, Size, Text, Trainer
from bench.gradients import ENTRIES, Training

SMALL = Size(layers=2, heads=2, N=32, tokens=64, steps=12, every=4, evaluated=256)


@pytest.fixture(scope="module")
def text():
    """A few words in any order."""
    generator = torch.Generator().manual_seed(0)
    words = [b"def ", b"return ", b"self.", b"import ", b"x = ", b"(0)\n", b"for i in "]

    def draw(count):
        order = torch.randint(len(words), (count,), generator=generator).tolist()
        text = bytearray(b"".join(words[i] for i in order))
        return torch.frombuffer(text, dtype=torch.uint8)

    return Text(draw(2000), draw(300))


def draw(*shape, count=4, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(count)]


def last(recipe="exact", qk_norm=True, seeds=(0, 1), size=SMALL, text=None, **options):
    """The rows that a training ends with."""
    yielded = list(curves.train(recipe, qk_norm, list(seeds), size, text, False, **options))
    return yielded[-1] if yielded else []


def trainer(text, seeds=(0, 1), qk_norm=True, attention=curves.exact, size=SMALL):
    model = GPTs(size, list(seeds), qk_norm, torch.float32).to(text.train.device)
    starts = [curves.drawn_starts(seed, size, len(text.train)) for seed in seeds]
    return Trainer(model, attention, curves.Layers(), torch.stack(starts, 1), text)


# -- attention ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["bf16", "SageBwd", "G", "G, of earlier rows alone"])
def test_gradients_in_training_are_those_of_the_laboratory(recipe, dtype):
    *inputs, do = draw(2, 2, 150, 64, dtype=dtype)
    for x in inputs:
        x.requires_grad_()
    o = curves.attention_of(recipe, False)(*inputs)
    found = o, *torch.autograd.grad(o, inputs, do)
    wide = (x.detach().float() for x in (*inputs, do))
    expected = gradients.gradients(*wide, ENTRIES[recipe], is_causal=True)
    for x, y in zip(found, expected):
        assert x.dtype == dtype and torch.equal(x, y.to(dtype))


def test_exact_attention_and_one_without_rounding_have_autograds_gradients():
    *inputs, do = draw(2, 2, 70, 64)
    expected = gradients.exact(*inputs, do, is_causal=True)
    for x in inputs:
        x.requires_grad_()
    plain = curves.steps_of(Training())
    for attention in (curves.exact, lambda *x: curves.Emulated.apply(*x, plain)):
        o = attention(*inputs)
        for x, y in zip((o, *torch.autograd.grad(o, inputs, do)), expected):
            assert relative_l1(x, y) < 1e-5


def test_a_compiled_recipe_that_differs_is_refused(monkeypatch):
    eager = curves.steps_of(ENTRIES["G"])
    for factor in (1.0, 1.01):
        steps = eager._replace(
            backward=lambda *x, by=factor: tuple(by * each for each in eager.backward(*x))
        )
        monkeypatch.setattr(curves, "compiled_steps", lambda recipe, steps=steps: steps)
        if factor == 1:
            assert curves.beside_eager("G", (2, 1, 64, 64), torch.device("cpu")) == 0
        else:
            with pytest.raises(RuntimeError, match=r"G differs from eager by 1\.0e-02.*no-compile"):
                curves.beside_eager("G", (2, 1, 64, 64), torch.device("cpu"))


# -- the model ----


def written_out(model, run, batch, qk_norm):
    """The loss of one run, in float64, a row and a head at a time."""
    size, at, C = model.size, 0, 64 * model.size.heads
    matrices = []
    for shape in model.shapes:
        matrices.append(model.matrices[run, at : at + math.prod(shape)].view(shape).double())
        at += math.prod(shape)

    def norm(x):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    def turned(x):  # [N, 64]: pairs (i, i + 32), as complex numbers
        angles = torch.arange(size.N)[:, None] * 1e4 ** -torch.linspace(0, 1, 32)
        z = torch.complex(x[:, :32], x[:, 32:]) * torch.polar(torch.ones(()), angles)
        return torch.cat([z.real, z.imag], 1)

    losses = []
    for row in batch:
        x = matrices[0][row[:-1]]
        for i in range(size.layers):
            qkv, out, up, down = matrices[1 + 4 * i : 5 + 4 * i]
            every = (norm(x) @ qkv).split(C, 1)
            heads = []
            for h in range(size.heads):
                q, k, v = (each[:, 64 * h : 64 * h + 64] for each in every)
                if qk_norm:
                    q, k = (norm(y) * model.gains[run, i, j] for j, y in enumerate((q, k)))
                s = turned(q) @ turned(k).T / 8
                heads.append(
                    s.masked_fill(torch.ones_like(s).triu(1) > 0, -math.inf).softmax(1) @ v
                )
            x = x + torch.cat(heads, 1) @ out
            x = x + F.gelu(norm(x) @ up) @ down
        losses.append(F.cross_entropy(norm(x) @ matrices[-1], row[1:]))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("qk_norm", [True, False])
def test_models_side_by_side_are_gpts(qk_norm, text):
    model = GPTs(SMALL, [3, 5], qk_norm, torch.float32)
    with torch.no_grad():
        model.matrices.mul_(10)  # so that attention is far from even
        if qk_norm:
            model.gains.mul_(1 + torch.rand(model.gains.shape))
    batch = curves.windows(text.train, torch.tensor([[3, 900], [50, 700]]), SMALL.N)
    found = model(batch, curves.exact, curves.Layers())
    for run in (0, 1):
        expected = written_out(model, run, batch[run], qk_norm)
        assert found[run].item() == pytest.approx(expected.item(), rel=1e-5)


def test_weights_are_a_seeds_whatever_else_is_trained():
    models = [
        GPTs(SMALL, seeds, norm, torch.float32) for seeds, norm in (([0, 7], True), ([7], False))
    ]
    assert torch.equal(models[0].matrices[1], models[1].matrices[0])
    assert not torch.equal(*models[0].matrices)
    assert 10e6 < GPTs(curves.SIZES["cuda"], [0], False, torch.float32).matrices.numel() < 30e6


# -- training ----


def test_a_step_is_that_of_torch(text):
    """Clipping, the learning rate, AdamW; and no run feels another."""
    size = dataclasses.replace(SMALL, steps=8)
    ours = trainer(text, (2, 4), size=size)
    ours.advance(size.steps)
    for run, seed in enumerate((2, 4)):
        model = GPTs(size, [seed], True, torch.float32)
        groups = [
            {"params": [model.matrices], "weight_decay": 0.1},
            {"params": [model.gains], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
        starts = curves.drawn_starts(seed, size, len(text.train))
        for i in range(size.steps):
            batch = curves.windows(text.train, starts[i][None], size.N)
            loss = model(batch, curves.exact, curves.Layers()).sum()
            assert_close(ours.losses[i, run], loss.detach())
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            assert i or norm > 1
            for group in optimizer.param_groups:
                group["lr"] = curves.rates(size.steps)[i].item()
            optimizer.step()
            optimizer.zero_grad()
        assert_close(ours.model.matrices[run], model.matrices[0], atol=1e-5, rtol=1e-3)
        assert_close(ours.model.gains[run], model.gains[0], atol=1e-5, rtol=1e-3)


def test_the_learning_rate_rises_and_falls():
    found = curves.rates(1000).tolist()
    peak = found.index(max(found))
    assert peak in (48, 49) and found[peak] == pytest.approx(1e-3, rel=0.02)
    assert found[0] == pytest.approx(1e-3 / 50) and found[-1] == pytest.approx(1e-4, rel=0.02)
    assert found[:peak] == sorted(found[:peak]) and found[peak:] == sorted(found[peak:])[::-1]


@pytest.mark.parametrize("recipe", ["exact", "SageBwd", "G"])
def test_one_seed_is_one_run(recipe, text):
    first, again = (last(recipe, text=text) for _ in range(2))
    assert [row["curve"] for row in first] == [row["curve"] for row in again]
    assert first[0]["curve"] != first[1]["curve"]
    for row in first:
        assert len(row["curve"]) == 3 and row["curve"][0] - row["curve"][-1] > 0.1
        assert row["steps"] == row["of_steps"] == 12 and row["diverged"] is None
    assert len({row["held_out"] for row in first}) == 2


def test_all_recipes_see_the_same_batches(text, monkeypatch):
    windows, seen, first = curves.windows, {}, {}
    for recipe in ("exact", "SageBwd", "G"):
        for qk_norm in (True, False):
            its = seen[recipe, qk_norm] = []

            def record(*args, its=its):
                its.append(windows(*args))
                return its[-1]

            monkeypatch.setattr(curves, "windows", record)
            first[recipe, qk_norm] = last(recipe, qk_norm, text=text)[0]["curve"][0]
    batches = seen["exact", True]
    data = bytes(text.train.tolist())
    for row in batches[5].flatten(0, 1):
        assert bytes(row.tolist()) in data and len(row) == SMALL.N + 1
    assert not torch.equal(*batches[0])  # of the two seeds
    for its in seen.values():
        assert len(its) == len(batches) and all(map(torch.equal, its, batches))
    assert len({tuple(batch.flatten().tolist()) for batch in batches[: SMALL.steps]}) == SMALL.steps
    assert len(set(first.values())) == len(first)  # the recipes are not all one


def test_the_loss_that_is_held_out(text):
    """Of all windows that there is room for, by the attention that is asked for."""
    ours = trainer(text)
    asked = []

    def attention(*inputs):
        asked.append(len(inputs[0]))
        return curves.exact(*inputs)

    found = ours.held_out(attention)
    starts = torch.linspace(0, len(text.held_out) - SMALL.N - 1, 8).long()
    batch = curves.windows(text.held_out, starts, SMALL.N)
    assert torch.equal(batch[-1], text.held_out[-SMALL.N - 1 :].long())
    assert found == pytest.approx(
        ours.model(batch.expand(2, -1, -1), curves.exact, curves.Layers()).tolist(), rel=1e-5
    )
    assert asked == [4] * 4 * SMALL.layers


def test_both_losses_that_are_held_out(text, monkeypatch):
    monkeypatch.setitem(ENTRIES, "zero", Training())
    monkeypatch.setattr(
        curves, "steps_of", lambda t: curves.Steps(
            lambda q, k, v: (0 * q,), lambda q, k, v, do: (0 * q, 0 * k, 0 * v))
    )  # fmt: skip
    row = last("zero", text=text)[0]
    assert abs(row["held_out"] - row["held_out_exact"]) > 1e-5
    row = last("exact", text=text)[0]
    assert row["held_out"] == row["held_out_exact"]


def test_sources_are_what_python_and_torch_have(tmp_path, monkeypatch):
    for i in range(12):
        (tmp_path / "lib" / "package").mkdir(parents=True, exist_ok=True)
        (tmp_path / "lib" / "package" / f"{i:02}.py").write_text(f"python {i}\n")
    others = tmp_path / "lib" / "site-packages" / "other"
    torchs = tmp_path / "lib" / "site-packages" / "torch"
    for folder in (others, torchs):
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(folder.name)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "lib"))
    monkeypatch.setattr(torch, "__file__", str(torchs / "__init__.py"))
    found = curves.sources()
    train, held_out = (bytes(part.tolist()).decode() for part in found)
    assert held_out == "python 9\n" and train.startswith("python 0\n") and train.endswith("torch")
    assert "other" not in train and train.count("python") == 11
    assert curves.digest(found) != curves.digest(found[::-1])


# -- what stops, and what fails ----


def test_a_budget_stops_between_two_points(text, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(curves.time, "perf_counter", lambda: clock.now)
    advance = Trainer.advance

    def slow(self, steps):
        clock.now += 10
        advance(self, steps)

    monkeypatch.setattr(Trainer, "advance", slow)
    whole, part = last(text=text), last("G", text=text, until=clock.now + 15)
    assert [row["steps"] for row in part] == [8, 8] and all(row["held_out"] for row in part)
    assert [len(row["curve"]) for row in part] == [2, 2] and part[0]["ms"] == 2500
    assert last(text=text, until=clock.now)[0]["steps"] == 4  # what is begun has a point
    line = curves.summarize(whole + part)[1]
    assert line["partial"] == 2 and "2 partial" in curves.told(line)
    gaps = [ours["curve"][1] - its["curve"][1] for ours, its in zip(part, whole)]
    assert line["train"]["gap"] == pytest.approx(statistics.fmean(gaps))
    assert line["held_out"]["gap"] is None and line["held_out"]["mean"] is not None


def test_a_run_that_diverges_is_said_and_the_other_is_as_it_was(text, capsys):
    """Its row is not counted, and JSON holds no NaN."""
    calls = SimpleNamespace(count=0)

    def failing(q, k, v):
        calls.count += 1
        o = curves.exact(q, k, v)
        factor = torch.ones(4, 1, 1, 1)
        factor[2:] = math.nan if calls.count > SMALL.layers * 6 else 1
        return o * factor

    def rows(attention):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(curves, "attention_of", lambda *_: attention)
            return last("exact", text=text)

    found, healthy = rows(failing), rows(curves.exact)
    assert found[0] == healthy[0] | {"ms": found[0]["ms"]}
    assert [row["diverged"] for row in found] == [None, 6]
    assert found[1]["curve"][1:] == [None, None] and found[1]["held_out"] is None
    json.dumps(found, allow_nan=False)
    (line,) = curves.summarize(found)
    assert line["diverged"] == 1 and line["train"]["mean"] == found[0]["curve"][-1]
    curves.print_rows(found, 1.0)
    curves.print_summary([line])
    printed = capsys.readouterr().out
    assert "seed 1: 12 steps; diverged at step 6" in printed and "2 seeds, 1 diverged" in printed


# -- what comes of it ----


def made_up(recipe, seed, curve, held_out=1.0, steps=40, **more):
    return {
        "plan": "curves", "recipe": recipe, "qk_norm": True, "tokens": 64, "seed": seed,
        "of_steps": 40, "steps": steps, "every": 2, "curve": curve, "diverged": None,
        "held_out": held_out, "held_out_exact": held_out, "ms": 1.0, "beside_eager": None, **more,
    }  # fmt: skip


def test_the_summary_by_hand():
    """The last tenth of 20 points: two."""
    head = [9.0] * 18
    rows = [
        made_up("exact", 0, [*head, 2.0, 1.0], 1.0),
        made_up("exact", 1, [*head, 3.0, 2.0], 2.0),
        made_up("G", 0, [*head, 2.5, 1.5], 1.25),
        made_up("G", 1, [*head, 3.0, 2.2], 2.75),
        made_up("SageBwd", 0, [*head, 4.0, 4.0], 8.0, diverged=30),
        made_up("SageBwd", 1, [9.0, 8.0, 7.0], 7.0, steps=6),
        made_up("G", 0, [5.0], 1.0, qk_norm=False),
    ]
    exact, g, sage, alone = curves.summarize(rows)
    assert [line["recipe"] for line in (exact, g, sage, alone)] == ["exact", "G", "SageBwd", "G"]
    deviation = math.sqrt(0.5)  # of 1.5 and 2.5, and of 1 and 2
    assert exact["train"] == pytest.approx(
        {"mean": 2.0, "gap": 0.0, "gap_deviation": 0.0, "exact_deviation": deviation}
    )
    assert g["train"] == pytest.approx({
        "mean": 2.3, "gap": 0.3, "gap_deviation": 0.2 * deviation * 2, "exact_deviation": deviation,
    })  # gaps .5 and .1  # fmt: skip
    assert g["held_out"] == pytest.approx({
        "mean": 2.0, "gap": 0.5, "gap_deviation": 0.5 * deviation, "exact_deviation": deviation,
    })  # gaps .25 and .75  # fmt: skip
    assert (g["seeds"], g["diverged"], g["partial"]) == (2, 0, 0)
    # One run diverged. Of the other's three points the last counts, beside exact's third.
    assert (sage["seeds"], sage["diverged"], sage["partial"]) == (2, 1, 1)
    assert sage["train"] == pytest.approx(
        {"mean": 7.0, "gap": -2.0, "gap_deviation": None, "exact_deviation": deviation}
    )
    assert sage["held_out"]["gap"] is None and not alone["qk_norm"]
    assert alone["train"] == {
        "mean": 5.0, "gap": None, "gap_deviation": None, "exact_deviation": None
    }  # fmt: skip


def test_all_of_it(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(curves.SIZES, "cpu", SMALL)
    monkeypatch.setattr(curves, "SAVE_S", 0)
    monkeypatch.setattr(curves, "sources", lambda: text)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    saves = []
    save = curves.save
    monkeypatch.setattr(curves, "save", lambda result, path: (saves.append(1), save(result, path)))
    path = tmp_path / "bench" / "results" / "cpu" / "2026-01-01-curves.json"
    asked = ["--recipes", "exact", "G", "--seeds", "2", "--steps", "8", "--json", str(path)]
    assert curves.main([*asked, "--tokens", "64", "128", "--no-qk-norm"]) == 0
    result = json.loads(path.read_text())
    found = [(row["tokens"], row["qk_norm"], row["recipe"], row["seed"]) for row in result["rows"]]
    assert found == [(n, False, x, i) for n in (64, 128) for x in ("exact", "G") for i in (0, 1)]
    assert len(saves) == 4 * 4 and len(result["summary"]) == 4  # two points, held out, the end
    assert result["summary"] == curves.summarize(result["rows"])
    assert not torch.are_deterministic_algorithms_enabled()
    printed = capsys.readouterr().out
    assert "64 tokens, no QK-norm, G: 2 seeds" in printed and "partial" not in printed

    for page in (tmp_path / "README.md", tmp_path / "docs" / "accuracy.md"):
        page.parent.mkdir(exist_ok=True)
        page.write_text("<!-- table:curves -->\n<!-- table:end -->\n")
    assert plot.main(["--root", str(tmp_path)]) == 0
    assert (tmp_path / "docs" / "accuracy.md").read_text().count("| 128 | no | G | 2 |") == 1
    assert path.with_name(plot.CURVES_PLOT).read_text().count("tokens a step") >= 4

    assert curves.main([*asked, "--budget", "0"]) == 0
    assert "the budget is spent" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        curves.main(["--tokens", "65"])


def test_the_plot_and_the_table_of_runs_that_failed(tmp_path, monkeypatch):
    """Points that are there are drawn: one seed diverged, one stopped, one has no exact beside it."""
    rows = [
        made_up("exact", 0, [3.0, 2.0, 1.0]),
        made_up("exact", 1, [3.0, 2.0, 2.0]),
        made_up("G", 0, [3.0, 2.5, 2.0]),
        made_up("G", 1, [3.0, None, None], None, diverged=3),
        made_up("SageBwd", 0, [4.0, 2.25], steps=4),
        made_up("SageBwd", 2, [4.0, 3.0]),
    ]
    result = {
        "date": "2026-01-01", "machine": {"gpu": "cpu"}, "model": "gpt", "method": "m",
        "versions": {"torch": "2", "triton": "3", "cudnn": "none"}, "rows": rows,
        "summary": curves.summarize(rows),
    }  # fmt: skip
    seen = []
    monkeypatch.setattr(plot, "keep", lambda figure, title, result, path: seen.append(figure))
    plot.draw_curves(result, tmp_path / "curves.svg")
    losses, gaps = seen[0].axes
    drawn = [[list(map(float, line.get_data()[i])) for i in (0, 1)] for line in losses.lines]
    assert drawn[3] == [[2.0], [3.0]] and drawn[0] == [[2.0, 4.0, 6.0], [3.0, 2.0, 1.0]]
    drawn = [[list(map(float, line.get_data()[i])) for i in (0, 1)] for line in gaps.lines]
    assert drawn[:3] == [[[], []], [[2.0], [0.0]], [[2.0, 4.0], [1.0, 0.25]]]
    table = plot.curves({"cpu": {"curves": result}})
    assert "| 64 | yes | G | 2, 1 diverged | 2.0000 | +1.00000 | - | 0.70711 |" in table
    assert "| SageBwd | 2, 1 partial |" in table


@pytest.mark.gpu
def test_a_captured_step_is_the_step():
    """Bit for bit, and compiled nearly so."""
    words = torch.randint(256, (50_000,), generator=torch.Generator().manual_seed(0)) // 4
    text = Text(*(words.to(torch.uint8).cuda() for _ in range(2)))
    size = dataclasses.replace(SMALL, N=256, tokens=1024)
    with curves.deterministic():
        for recipe in ("exact", "SageBwd", "G"):
            attention = curves.attention_of(recipe, False)
            captured, eager = (trainer(text, attention=attention, size=size) for _ in range(2))
            captured.advance(size.steps)
            for _ in range(size.steps):
                eager._step()
            assert captured.graph is not None and torch.equal(captured.losses, eager.losses)
            assert captured.losses.gt(0).all()
            if recipe != "exact":
                shape = 4, size.heads, size.N, 64
                assert curves.beside_eager(recipe, shape, torch.device("cuda")) < curves.AGREE
