"""Loss curves of small models, trained with attention by each of several recipes.

$ python bench/curves.py                       # tiny GPTs, on two CPU cores half a minute
$ python bench/curves.py --json                # on a GPU; and bench/results/GPU/DATE-curves.json
$ python bench/curves.py --model dit --json    # and bench/results/GPU/DATE-curves-dit.json
$ python bench/curves.py --recipes exact 'FP8 backward' --seeds 5 --no-qk-norm

The recipes are ``exact``, which is SDPA; those of bench/gradients.py, emulated: their forward and
their backward; and the ops that `sage.training` puts in the place of a call, as ``(kernel)``. The
FP8 backward's op is "FP8 backward, dP INT8", causal "FP8 backward, of earlier rows alone". The
models are those of bench/learners.py.
All recipes start from the same weights and see the same batches, which a seed determines. So the
gap of a recipe to exact attention is taken seed by seed. It is to be held beside the deviation
between the seeds of exact. The recipe ``bf16`` is a control: its gap is what another rounding of
the same mathematics does.

held_out: the loss on data that was held out, with the attention that the model was trained with.
held_out_exact: the same with exact attention.

The models of all seeds are trained side by side: each weight has a first dimension for them, and
each product of GPTs is a batched one. On a GPU a whole step is one CUDA graph, which reads its
batch, its learning rate and its place in the list of losses by a counter on the device.

Shapes: R runs side by side, B batch, N tokens, C channels, H heads, D head_dim.
"""

import argparse
import contextlib
import dataclasses
import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from bench import gradients, harness
from bench.gradients import ENTRIES, Training
from bench.learners import DTYPES, MODELS, SIZES, Layers, Task, drawn_places, tasks_of
from bench.measure import relative_l1
from bench.tables import markdown, show

# Without it cuBLAS is not deterministic, and torch refuses. It is read once, at the first product.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

KERNELS = {"SageBwd (kernel)": "sagebwd", "FP8 backward (kernel)": "rowscaled"}
RECIPES = ("exact", *ENTRIES, *KERNELS)
DEFAULT = {
    "gpt": ("exact", "SageBwd", "FP8 backward", "FP8 backward, of earlier rows alone"),
    "gpt-large": ("exact", "FP8 backward (kernel)", "SageBwd (kernel)"),
    "dit": ("exact", "FP8 backward (kernel)", "SageBwd (kernel)", "bf16"),
    "minilm": ("exact", "FP8 backward (kernel)", "SageBwd (kernel)", "bf16"),
}
PLANS = {model: "curves" if model == "gpt" else f"curves-{model}" for model in MODELS}
TITLES = {  # of each plan's models
    "curves": "GPTs from scratch",
    "curves-gpt-large": "GPTs from scratch, large steps",
    "curves-dit": "Diffusion transformers from scratch",
    "curves-minilm": "MiniLM fine-tuned",
}
LAST_RATE = 0.1  # as a part of the peak
WARM = 0.05  # the part of the steps before the peak
CLIP = 1.0  # the largest norm of a run's gradient
EAGER_STEPS = 3  # before the capture: AdamW makes its state in the first
# Relative L1 between a compiled recipe and the eager one. They differ by the order of sums and by
# rounding that tips over: 1e-6 on CPU. Were p's rounding to bf16 left out, it would be 2e-3.
AGREE = 4e-3  # codes that lie between two: 1.2e-3 of SageBwd on an H200, whose error is 6e-2
SAVE_S = 5  # between two saves of a training: each takes some ms, in which the GPU waits
END = 10  # of a curve its last 1 / END counts
_sdpa = F.scaled_dot_product_attention  # also where a model's calls are replaced


# -- attention ----


class Steps(NamedTuple):
    """Attention forward and backward, as functions of tensors.

    forward(q, k, v) -> o in their dtype, and the fields of `gradients.Forward`.
    backward(q, k, v, do, *those fields) -> dq, dk, dv in q's dtype.
    """

    forward: Callable
    backward: Callable


def steps_of(t: Training, is_causal: bool) -> Steps:
    """In fp32 inside."""

    def forward(q, k, v):
        found = gradients.forward(q.float(), k.float(), v.float(), t, is_causal)
        return found.o.to(q.dtype), *found

    def backward(q, k, v, do, *found):
        inputs = (x.float() for x in (q, k, v, do))
        its = gradients.backward(*inputs, gradients.Forward(*found), t, is_causal)
        return tuple(x.to(q.dtype) for x in its)

    return Steps(forward, backward)


class Emulated(torch.autograd.Function):
    """Attention of q, k and v [B, H, N, D] by `Steps`."""

    @staticmethod
    def forward(ctx, q, k, v, steps: Steps):
        inputs = [x.detach() for x in (q, k, v)]
        o, *found = steps.forward(*inputs)
        ctx.save_for_backward(*inputs, *found)
        ctx.steps = steps
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, *found = ctx.saved_tensors
        return *ctx.steps.backward(q, k, v, do.contiguous(), *found), None


def attention_of(
    recipe: str, is_causal: bool, compiled: bool
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """attention(q, k, v) -> o, with the recipe's gradients."""
    if recipe == "exact":
        return functools.partial(_sdpa, is_causal=is_causal)
    if recipe in KERNELS:
        return functools.partial(by_kernel, recipe, is_causal)
    steps = (compiled_steps if compiled else emulated_steps)(recipe, is_causal)
    return lambda q, k, v: Emulated.apply(q, k, v, steps)


def by_kernel(recipe: str, is_causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    op = getattr(torch.ops.sage, KERNELS[recipe])
    return op(q, k, v, is_causal, q.shape[3] ** -0.5, False)[0]


def emulated_steps(recipe: str, is_causal: bool) -> Steps:
    return steps_of(ENTRIES[recipe], is_causal)


@functools.cache
def compiled_steps(recipe: str, is_causal: bool) -> Steps:
    return Steps(*map(compile_it, emulated_steps(recipe, is_causal)))


@functools.cache
def compiled_layers() -> Layers:
    return Layers(*map(compile_it, Layers()))


def compile_it(function: Callable) -> Callable:
    torch._dynamo.config.recompile_limit = 64  # all recipes share one code object
    return torch.compile(function, dynamic=False, fullgraph=True)


@torch.no_grad()
def beside_eager(
    recipe: str, is_causal: bool, shape: tuple[int, ...], device: torch.device
) -> float:
    """The largest relative L1 of o, dq, dk and dv between the compiled recipe and the eager one, on
    normal inputs [B, H, N, D]. Raises RuntimeError where it is over AGREE."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = DTYPES[device.type]
    *inputs, do = (
        torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(4)
    )
    results = []
    for steps in (compiled_steps(recipe, is_causal), emulated_steps(recipe, is_causal)):
        o, *found = steps.forward(*inputs)
        results.append([found[0], *steps.backward(*inputs, do, *found)])
    most = max(map(relative_l1, *results))
    if not most <= AGREE:
        raise RuntimeError(
            f"curves: compiled, {recipe} differs from eager by {most:.1e}, more than {AGREE:.0e}: "
            "run with --no-compile"
        )
    return most


# -- training ----


def rates(steps: int, peak: float) -> Tensor:
    """The learning rate of each step: up in a line, down by a cosine."""
    i = torch.arange(steps, dtype=torch.float64)
    cosine = (1 + torch.cos(torch.pi * i / steps)) / 2
    warm = ((i + 1) / max(1, WARM * steps)).clamp(max=1)
    return (peak * warm * (LAST_RATE + (1 - LAST_RATE) * cosine)).float()


class Trainer:
    """Runs of one recipe and several seeds side by side. losses [steps, R]: 0 of steps to come."""

    def __init__(self, task: Task, seeds: list[int], attention: Callable, layers: Layers):
        size, count = task.size, task.places(task.train)
        drawn = [drawn_places(seed, size.steps, task.rows, count) for seed in seeds]
        self.places = torch.stack(drawn, 1).to(task.device)  # [steps, R, B]
        self.task, self.model = task, task.models(seeds)
        self.attention, self.layers = attention, layers
        self.losses = torch.zeros(self.places.shape[:2], device=task.device)
        self.done, self.at = 0, torch.zeros(1, dtype=torch.int64, device=task.device)
        self.steps = torch.arange(size.steps, device=task.device)[:, None]
        self.rates = rates(size.steps, size.rate).to(task.device)
        self.weights, decays = zip(*self.model.decays(), strict=True)
        self.optimizer = torch.optim.AdamW(
            [{"params": [x for x, its in zip(self.weights, decays, strict=True) if its == decay],
              "weight_decay": decay} for decay in sorted(set(decays), reverse=True)],
            lr=torch.zeros((), device=task.device), betas=(0.9, 0.95), fused=True,
            capturable=task.device.type == "cuda",
        )  # fmt: skip
        self.graph = None

    def advance(self, steps: int) -> None:
        """So many steps more."""
        for _ in range(steps):
            if self.graph is not None:
                self.graph.replay()
            else:
                self._eager_or_capture()
            self.done += 1

    def _eager_or_capture(self) -> None:
        if self.task.device.type != "cuda":
            self._step()
        elif self.done < EAGER_STEPS:
            self._on_stream(self._step)
        else:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self._stream):
                self._step()
            self.graph = graph
            graph.replay()  # a capture computes nothing

    @functools.cached_property
    def _stream(self) -> "torch.cuda.Stream":
        return torch.cuda.Stream()

    def _on_stream(self, function: Callable) -> None:
        """On the stream of the capture to come."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            function()
        torch.cuda.current_stream().wait_stream(self._stream)

    def _step(self) -> None:
        """Nothing here may read a tensor's value: a replay does what the capture did."""
        places = self.places.index_select(0, self.at)[0]
        batch = self.task.read(self.task.train, places)
        losses = self.model(batch, self.attention, self.layers)  # [R]
        found = torch.autograd.grad(losses.sum(), self.weights)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in found]).norm(dim=0)
        factor = (CLIP / norms).clamp(max=1)
        for x, g in zip(self.weights, found, strict=True):
            x.grad = g * factor.view(-1, *[1] * (g.ndim - 1))
        for group in self.optimizer.param_groups:
            group["lr"].copy_(self.rates.index_select(0, self.at)[0])
        self.optimizer.step()
        self.optimizer.zero_grad()
        here = self.steps == self.at
        self.losses.copy_(torch.where(here, losses.detach(), self.losses))
        self.at.add_(1)

    def held_out(self, attention: Callable) -> list[float]:
        """The mean loss of each run, at places all over what is held out."""
        task, R = self.task, self.places.shape[1]
        count = max(1, task.size.evaluated // task.size.batch) * task.rows
        last = task.places(task.held_out) - 1
        places = torch.linspace(0, last, count, device=task.device).long()
        total = 0.0
        # Gradients stay enabled: without, all that is compiled would be compiled again.
        for some in places.split(task.rows):
            batch = task.read(task.held_out, some.expand(R, -1))
            total = total + self.model(batch, attention, self.layers).detach()
        return (total * task.rows / count).tolist()


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """One kind of device and torch give one result."""
    before = torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a kernel for each allocation
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = filled


def finite(x: float) -> float | None:
    """None where JSON has no number."""
    return x if math.isfinite(x) else None


def train(
    model: str, recipe: str, task: Task, seeds: list[int], compiled: bool
) -> Iterator[list[dict]]:
    """Yields a row for each seed, again and again while they train, last with held-out losses."""
    size, agreement = task.size, None
    attention = attention_of(recipe, task.is_causal, compiled)
    if compiled and recipe in ENTRIES:
        shape = size.batch, size.heads, size.N, size.head_dim
        shape = (shape[0] * (len(seeds) if task.together else 1), *shape[1:])
        agreement = beside_eager(recipe, task.is_causal, shape, task.device)
    trainer = Trainer(task, seeds, attention, compiled_layers() if compiled else Layers())
    rows = [
        {
            "plan": PLANS[model], "recipe": recipe, "qk_norm": task.qk_norm, "tokens": size.tokens,
            "seed": seed, "parameters": sum(x[0].numel() for x in trainer.weights),
            "of_steps": size.steps, "steps": 0, "every": size.every, "curve": [], "diverged": None,
            "held_out": None, "held_out_exact": None, "beside_eager": agreement, "ms": None,
        }
        for seed in seeds
    ]  # fmt: skip
    took = []
    with tqdm(total=size.steps, desc=recipe, leave=False, disable=None) as bar:
        while trainer.done < size.steps:
            started, first = time.perf_counter(), trainer.done
            trainer.advance(min(size.every, size.steps - first))
            losses = trainer.losses[first : trainer.done].T.tolist()  # waits for them
            took.append((time.perf_counter() - started) * 1e3 / (trainer.done - first))
            bar.update(trainer.done - first)
            for row, its in zip(rows, losses, strict=True):
                wrong = [first + i for i, loss in enumerate(its) if not math.isfinite(loss)]
                if wrong and row["diverged"] is None:
                    row["diverged"] = wrong[0]
                row["curve"].append(finite(statistics.fmean(its)))
                row["steps"] = trainer.done
                row["ms"] = round(statistics.median(took), 3)
            yield rows
    exact = attention_of("exact", task.is_causal, compiled)
    ways = {"held_out": attention, "held_out_exact": exact}
    for name, way in ways.items():
        for row, loss in zip(rows, trainer.held_out(way), strict=True):
            row[name] = finite(loss)
    yield rows


# -- what comes of it ----

FIGURES = ("train", "held_out", "held_out_exact")


def figure(row: dict, name: str, points: int) -> float | None:
    """A row's loss. train: the mean over the end of the curve, of its first so many points. None
    where it diverged, or has none."""
    if row["diverged"] is not None:
        return None
    if name != "train":
        return row[name]
    curve = row["curve"][:points]
    return statistics.fmean(curve[-max(1, len(curve) // END) :]) if curve else None


def gap(row: dict, beside: dict, name: str) -> float | None:
    """A row's loss less that of exact attention after as many steps, from the same seed."""
    if name != "train" and row["steps"] != beside["steps"]:
        return None
    points = min(len(row["curve"]), len(beside["curve"]))
    ours, its = (figure(each, name, points) for each in (row, beside))
    return None if ours is None or its is None else ours - its


def summarize(rows: list[dict]) -> list[dict]:
    """A line for each recipe, number of tokens, and with or without QK-norm. Of each figure it has
    the mean loss over seeds, the mean gap to exact, the deviation of the gap between seeds, and the
    deviation of exact's loss between seeds, in training after as many steps. None where there are
    too few runs."""
    lines = []
    settings = dict.fromkeys((row["tokens"], row["qk_norm"]) for row in rows)
    for setting in settings:
        here = [row for row in rows if (row["tokens"], row["qk_norm"]) == setting]
        beside = {row["seed"]: row for row in here if row["recipe"] == "exact"}
        for recipe in dict.fromkeys(row["recipe"] for row in here):
            its = [row for row in here if row["recipe"] == recipe]
            line = {
                "tokens": setting[0], "qk_norm": setting[1], "recipe": recipe, "seeds": len(its),
                "diverged": sum(row["diverged"] is not None for row in its),
                "partial": sum(row["steps"] < row["of_steps"] for row in its),
            }  # fmt: skip
            points = max(len(row["curve"]) for row in its)
            for name in FIGURES:
                losses = [figure(row, name, len(row["curve"])) for row in its]
                exacts = [figure(row, name, points) for row in beside.values()]
                gaps = [gap(row, beside[row["seed"]], name) for row in its if row["seed"] in beside]
                line[name] = {
                    "mean": over(statistics.fmean, losses),
                    "gap": over(statistics.fmean, gaps),
                    "gap_deviation": over(statistics.stdev, gaps),
                    "exact_deviation": over(statistics.stdev, exacts),
                }
            lines.append(line)
    return lines


def over(function: Callable, values: list[float | None]) -> float | None:
    """function of those that are numbers; None if they are too few."""
    values = [x for x in values if x is not None]
    return function(values) if len(values) > (function is statistics.stdev) else None


def table(lines: list[dict], names: tuple[str, ...] = FIGURES[:2]) -> str:
    """Of a summary, a line per recipe in each setting: the mean gaps to exact attention, beside
    deviations."""
    titles = {"train": "loss", "held_out": "held out: loss", "held_out_exact": "by exact: loss"}
    cells = [["tokens", "QK-norm", "recipe", "seeds"]]
    for name in names:
        cells[0] += [titles[name], "gap", "deviation", "of exact"]
    for line in lines:
        marks = [f"{line[mark]} {mark}" for mark in ("diverged", "partial") if line[mark]]
        cells.append([
            str(line["tokens"]), "yes" if line["qk_norm"] else "no", line["recipe"],
            ", ".join([str(line["seeds"]), *marks]),
            *(loss_cell(line[name], key) for name in names for key in line[name]),
        ])  # fmt: skip
    return markdown(cells)


def loss_cell(figures: dict, key: str) -> str:
    """A loss in 4 decimals, differences in 5."""
    if figures[key] is None:
        return "-"
    return f"{figures[key]:{'.4f' if key == 'mean' else '+.5f' if key == 'gap' else '.5f'}}"


def parse(argv) -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, metavar="RECIPE",
                        help=f"of {', '.join(map(repr, RECIPES))}")  # fmt: skip
    parser.add_argument("--seeds", type=harness.positive, default=3, help="how many, from 0")
    parser.add_argument("--steps", type=harness.positive, help="default: the model's")
    parser.add_argument("--qk-norm", action=argparse.BooleanOptionalAction,
                        help="of gpt and gpt-large; default: both of gpt")  # fmt: skip
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction,
                        help="by Inductor; default: on a GPU")  # fmt: skip
    args = parser.parse_args(argv)
    args.recipes = args.recipes or DEFAULT[args.model]
    args.steps = args.steps or SIZES[args.device.type][args.model].steps
    args.compile = args.device.type == "cuda" if args.compile is None else args.compile
    if not args.model.startswith("gpt") and args.qk_norm is not None:
        parser.error(f"--qk-norm is of gpt and gpt-large, got {args.model}")
    return args


def main(argv=None) -> int:
    args = parse(argv)
    device = harness.current(args)
    size = dataclasses.replace(SIZES[device.type][args.model], steps=args.steps)
    method = (
        f"{args.seeds} seeds, with which all recipes have the same weights at first and "
        f"the same batches; recipes but exact (SDPA) and those of a kernel emulated; products in "
        f"{DTYPES[device.type]}; train: the mean over the last {1 / END:.0%} of the steps"
    )
    result = harness.Result(PLANS[args.model], method, args, model="", summary=[])
    with deterministic():
        for task in tasks_of(args.model, size, args.qk_norm, device):
            result["model"] = f"{task.about}; AdamW, {size.steps} steps, peak rate {size.rate:g}"
            read = time.perf_counter() - result.started
            print(f"{result['model']}; read {read:.1f} s", flush=True)
            measure(args, task, result)
    show(f"\n{table(result['summary'], FIGURES)}")
    return result.end()


def measure(args: argparse.Namespace, task: Task, result: harness.Result) -> None:
    """Train what `args` ask for, and keep it in the result, which is saved as it goes."""
    for recipe in args.recipes:
        began = saved = time.perf_counter()
        before, rows = result["rows"], []
        seeds = list(range(args.seeds))
        for rows in train(args.model, recipe, task, seeds, args.compile):
            if time.perf_counter() > saved + SAVE_S:
                keep(result, [*before, *rows])
                saved = time.perf_counter()
        keep(result, [*before, *rows])
        ms, agreement = rows[0]["ms"], rows[0]["beside_eager"]
        beside = "" if agreement is None else f", compiled beside eager {agreement:.1e}"
        spent = time.perf_counter() - began
        print(f"  {recipe}: {ms} ms a step of all seeds, {spent:.1f} s in all{beside}", flush=True)


def keep(result: harness.Result, rows: list[dict]) -> None:
    result["rows"], result["summary"] = rows, summarize(rows)
    result.save()


if __name__ == "__main__":
    harness.run(main)
