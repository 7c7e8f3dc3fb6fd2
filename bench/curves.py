"""Loss curves of small GPTs, trained from scratch with attention by each of several recipes.

$ python bench/curves.py                       # tiny models, on two CPU cores half a minute
$ python bench/curves.py --json --budget 420   # on a GPU; and bench/results/GPU/DATE-curves.json
$ python bench/curves.py --recipes exact G --seeds 5 --tokens 8192 65536 --no-qk-norm

The recipes are ``exact``, which is SDPA, and those of bench/gradients.py, emulated: their forward
and their backward. The text is the sources of Python and of torch, as bytes. All recipes start from
the same weights and see the same batches, which a seed determines. So the gap of a recipe to exact
attention is taken seed by seed. It is to be held beside the deviation between the seeds of exact.
The recipe ``bf16`` is a control: its gap is what another rounding of the same mathematics does.

held_out: the loss on text that was held out, with the attention that the model was trained with.
held_out_exact: the same with exact attention.

The models of all seeds are trained side by side: each weight has a first dimension for them, and
each product is a batched one. On a GPU a whole step is one CUDA graph, which reads its batch, its
learning rate and its place in the list of losses by a counter on the device.

Prediction for an H200, of a step of 3 models (10.8 M parameters, 8,192 tokens of N=256 each):

    products of the model      6 * 10.8 M * 24,576 = 1.6 TFLOP at 300 TFLOP/s           5 ms
    the rest of the model      about 6 GB of activations, 1 GB of AdamW at 3.5 TB/s     2 ms
    emulated: products         6 a layer, 4.8 GFLOP each in fp32 at 35 TFLOP/s          5 ms
    emulated: scores           15 passes a layer over 151 MB, compiled, at 3.5 TB/s     4 ms

That is 8 ms with SDPA and 16 ms emulated; not compiled, the scores take some 60 passes more: 50 ms.
18 runs of 2,000 steps (2 times 8, 4 times 16 ms) take 160 s, and compilation about 60 s.

Shapes: R runs side by side, B batch, N tokens, C channels, H heads, D head_dim.
"""

import argparse
import contextlib
import dataclasses
import datetime
import functools
import hashlib
import math
import os
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from bench import gradients, machine
from bench.attention import RESULTS, save
from bench.gradients import ENTRIES, Training
from sage_inductor.cli.demo import rotate

# Without it cuBLAS is not deterministic, and torch refuses. It is read once, at the first product.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

RECIPES = ("exact", *ENTRIES)
DEFAULT = ("exact", "SageBwd", "G", "G, of earlier rows alone")
BYTES = 256  # the vocabulary
HEAD_DIM = 64
EPS = 1e-6  # of the norms
RATE, LAST_RATE = 1e-3, 0.1  # the peak, and the last as a part of it
WARM = 0.05  # the part of the steps before the peak
CLIP = 1.0  # the largest norm of a run's gradient
EAGER_STEPS = 3  # before the capture: AdamW makes its state in the first
# Relative L1 between a compiled recipe and the eager one. They differ by the order of sums and by
# rounding that tips over: 1e-6 on CPU. Were p's rounding to bf16 left out, it would be 2e-3.
AGREE = 4e-3  # codes that lie between two: 1.2e-3 of SageBwd on an H200, whose error is 6e-2
SAVE_S = 5  # between two saves of a training: each takes some ms, in which the GPU waits
END = 10  # of a curve its last 1 / END counts


@dataclasses.dataclass(frozen=True)
class Size:
    """A model and its training. tokens: of a step, in rows of N. every: steps of a point of the
    curve. evaluated: tokens that are held out."""

    layers: int
    heads: int
    N: int
    tokens: int
    steps: int
    every: int
    evaluated: int


SIZES = {
    "cpu": Size(2, 1, 64, 512, 60, 5, 4096),
    "cuda": Size(6, 6, 256, 8192, 2000, 20, 2**18),
}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}  # of products and of q, k and v


# -- data that every machine has ----


class Text(NamedTuple):
    """Bytes [M], uint8."""

    train: Tensor
    held_out: Tensor


def sources() -> Text:
    """The sources of Python's library and of torch. Every tenth file is held out."""
    folders = Path(sysconfig.get_path("stdlib")), Path(torch.__file__).parent
    files = [
        file
        for folder in folders
        for file in sorted(folder.rglob("*.py"))
        if not {"site-packages", "dist-packages"}.intersection(file.relative_to(folder).parts)
    ]
    texts = [file.read_bytes() for file in files]
    train = b"".join(text for i, text in enumerate(texts) if i % 10 != 9)
    held_out = b"".join(texts[9::10])
    return Text(*(torch.frombuffer(bytearray(x), dtype=torch.uint8) for x in (train, held_out)))


def digest(text: Text) -> str:
    """Names the text: it differs with the versions of Python and torch."""
    return hashlib.sha256(b"".join(part.cpu().numpy() for part in text)).hexdigest()[:12]


def drawn_starts(seed: int, size: Size, length: int) -> Tensor:
    """Where each row of each step begins [steps, B], in a text of that length."""
    generator = torch.Generator().manual_seed(seed)
    shape = size.steps, size.tokens // size.N
    return torch.randint(length - size.N, shape, generator=generator)


def windows(text: Tensor, starts: Tensor, N: int) -> Tensor:
    """The N + 1 bytes from each start: starts [...] -> int64 [..., N + 1]."""
    return text[starts[..., None] + torch.arange(N + 1, device=text.device)].long()


# -- attention ----


class Steps(NamedTuple):
    """Attention forward and backward, as functions of tensors.

    forward(q, k, v) -> o in their dtype, and the fields of `gradients.Forward`.
    backward(q, k, v, do, *those fields) -> dq, dk, dv in q's dtype.
    """

    forward: Callable
    backward: Callable


def steps_of(t: Training) -> Steps:
    """In fp32 inside."""

    def forward(q, k, v):
        found = gradients.forward(q.float(), k.float(), v.float(), t, True)
        return found.o.to(q.dtype), *found

    def backward(q, k, v, do, *found):
        inputs = (x.float() for x in (q, k, v, do))
        its = gradients.backward(*inputs, gradients.Forward(*found), t, True)
        return tuple(x.to(q.dtype) for x in its)

    return Steps(forward, backward)


class Emulated(torch.autograd.Function):
    """Causal attention of q, k and v [B, H, N, D] by `Steps`."""

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


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def attention_of(recipe: str, compiled: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """attention(q, k, v) -> o, with the recipe's gradients."""
    if recipe == "exact":
        return exact
    steps = compiled_steps(recipe) if compiled else steps_of(ENTRIES[recipe])
    return lambda q, k, v: Emulated.apply(q, k, v, steps)


@functools.cache
def compiled_steps(recipe: str) -> Steps:
    return Steps(*map(compile_it, steps_of(ENTRIES[recipe])))


@functools.cache
def compiled_layers() -> "Layers":
    return Layers(*map(compile_it, Layers()))


def compile_it(function: Callable) -> Callable:
    torch._dynamo.config.recompile_limit = 64  # all recipes share one code object
    return torch.compile(function, dynamic=False, fullgraph=True)


@torch.no_grad()
def beside_eager(recipe: str, shape: tuple[int, ...], device: torch.device) -> float:
    """The largest relative L1 of o, dq, dk and dv between the compiled recipe and the eager one, on
    normal inputs [B, H, N, D]. Raises RuntimeError where it is over AGREE."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = DTYPES[device.type]
    *inputs, do = (
        torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(4)
    )
    results = []
    for steps in (compiled_steps(recipe), steps_of(ENTRIES[recipe])):
        o, *found = steps.forward(*inputs)
        results.append([found[0], *steps.backward(*inputs, do, *found)])
    most = max(
        ((a - b).abs().sum() / b.abs().sum()).item() for a, b in zip(*results, strict=True)
    )  # fmt: skip
    if not most <= AGREE:
        raise RuntimeError(
            f"curves: compiled, {recipe} differs from eager by {most:.1e}, more than {AGREE:.0e}: "
            "run with --no-compile"
        )
    return most


# -- the model ----


def normed(x: Tensor) -> Tensor:
    """RMSNorm without a gain: the product that follows has it."""
    return F.rms_norm(x, x.shape[-1:], eps=EPS)


def heads_of(x: Tensor, qkv: Tensor, gains: Tensor | None, angles: Tensor) -> tuple[Tensor, ...]:
    """q, k and v [R B, H, N, D] in qkv's dtype. x [R, B, N, C], qkv [R, C, 3 C]; gains [R, 2, D] of
    the norms of q and k, None: no norm; angles [N, D / 2]."""
    each = torch.bmm(normed(x).to(qkv.dtype).flatten(1, 2), qkv)
    each = each.view(*x.shape[:3], 3, -1, 2 * angles.shape[1])
    q, k, v = each.unbind(3)  # [R, B, N, H, D]
    if gains is not None:
        q, k = (normed(y.float()) * gains[:, None, None, i, None] for i, y in enumerate((q, k)))
    q, k = rotate(q, angles), rotate(k, angles)
    return tuple(y.to(qkv.dtype).flatten(0, 1).transpose(1, 2).contiguous() for y in (q, k, v))


def rest_of(x: Tensor, o: Tensor, out: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The layer after attention's o [R B, H, N, D]."""
    o = o.transpose(1, 2).reshape(len(x), -1, x.shape[3])  # [R, B N, C]
    x = x + torch.bmm(o, out).view_as(x)
    hidden = F.gelu(torch.bmm(normed(x).to(up.dtype).flatten(1, 2), up))
    return x + torch.bmm(hidden, down).view_as(x)


def losses_of(x: Tensor, head: Tensor, following: Tensor) -> Tensor:
    """[R], of the following bytes [R, B, N]."""
    logits = torch.bmm(normed(x).to(head.dtype).flatten(1, 2), head).float()
    each = F.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="none")
    return each.view(len(x), -1).mean(1)


class Layers(NamedTuple):
    """The functions that a model is made of, as they are or compiled."""

    heads_of: Callable = heads_of
    rest_of: Callable = rest_of
    losses_of: Callable = losses_of


class GPTs(nn.Module):
    """A GPT for each seed: causal, pre-norm, RoPE. Weights in fp32 are cast to `dtype`."""

    def __init__(self, size: Size, seeds: list[int], qk_norm: bool, dtype: torch.dtype):
        super().__init__()
        C = size.heads * HEAD_DIM
        layer = [(C, 3 * C), (C, C), (C, 4 * C), (4 * C, C)]
        self.shapes = [(BYTES, C), *layer * size.layers, (C, BYTES)]
        self.size, self.dtype = size, dtype
        # One tensor for all: to cast it, to clip it and to update it takes one kernel each.
        self.matrices = nn.Parameter(torch.stack([self._drawn(seed) for seed in seeds]))
        self.gains = None
        if qk_norm:
            self.gains = nn.Parameter(torch.ones(len(seeds), size.layers, 2, HEAD_DIM))
        turns = 1e4 ** -torch.linspace(0, 1, HEAD_DIM // 2)
        self.register_buffer("angles", torch.outer(torch.arange(size.N), turns))
        self.register_buffer("bytes", torch.arange(BYTES))

    def _drawn(self, seed: int) -> Tensor:
        """All matrices [P] as GPT-2 draws them: what adds to the residual stream is smaller."""
        generator = torch.Generator().manual_seed(10_000 + seed)  # not the batches' numbers again
        parts = []
        for i, shape in enumerate(self.shapes):
            adds = 0 < i < len(self.shapes) - 1 and i % 2 == 0
            std = 0.02 / math.sqrt(2 * self.size.layers) if adds else 0.02
            parts.append(std * torch.randn(shape, generator=generator).flatten())
        return torch.cat(parts)

    def forward(self, batch: Tensor, attention: Callable, layers: Layers) -> Tensor:
        """Losses [R] of a batch of bytes [R, B, N + 1]."""
        parts = self.matrices.to(self.dtype).split([math.prod(each) for each in self.shapes], 1)
        matrices = [part.unflatten(1, each) for part, each in zip(parts, self.shapes, strict=True)]
        tokens, following = batch[..., :-1], batch[..., 1:]
        # A product, not a look-up: the gradient of that is a sort, or atomics in any order.
        one_hot = (tokens.flatten(1)[..., None] == self.bytes).to(self.dtype)
        x = torch.bmm(one_hot, matrices[0]).float().view(*tokens.shape, -1)
        for i in range(self.size.layers):
            qkv, *others = matrices[1 + 4 * i : 5 + 4 * i]
            gains = None if self.gains is None else self.gains[:, i]
            o = attention(*layers.heads_of(x, qkv, gains, self.angles))
            x = layers.rest_of(x, o, *others)
        return layers.losses_of(x, matrices[-1], following.contiguous())


# -- training ----


def rates(steps: int) -> Tensor:
    """The learning rate of each step: up in a line, down by a cosine."""
    i = torch.arange(steps, dtype=torch.float64)
    cosine = (1 + torch.cos(torch.pi * i / steps)) / 2
    warm = ((i + 1) / max(1, WARM * steps)).clamp(max=1)
    return (RATE * warm * (LAST_RATE + (1 - LAST_RATE) * cosine)).float()


class Trainer:
    """Runs of one recipe and several seeds side by side. losses [steps, R]: 0 of steps to come."""

    def __init__(
        self, model: GPTs, attention: Callable, layers: Layers, starts: Tensor, text: Text
    ):
        """starts [steps, R, B]."""
        device = text.train.device
        self.model, self.attention, self.layers = model, attention, layers
        self.starts, self.text = starts.to(device), text
        self.losses = torch.zeros(starts.shape[:2], device=device)
        self.done, self.at = 0, torch.zeros(1, dtype=torch.int64, device=device)
        self.places = torch.arange(len(starts), device=device)[:, None]
        self.rates = rates(len(starts)).to(device)
        kinds = [(model.matrices, 0.1)] + [(model.gains, 0.0)] * (model.gains is not None)
        self.optimizer = torch.optim.AdamW(
            [{"params": [x], "weight_decay": decay} for x, decay in kinds],
            lr=torch.zeros((), device=device), betas=(0.9, 0.95), fused=True,
            capturable=device.type == "cuda",
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
        if not self.text.train.is_cuda:
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
        starts = self.starts.index_select(0, self.at)[0]
        batch = windows(self.text.train, starts, self.model.size.N)
        losses = self.model(batch, self.attention, self.layers)  # [R]
        parameters = list(self.model.parameters())
        found = torch.autograd.grad(losses.sum(), parameters)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in found]).norm(dim=0)
        factor = (CLIP / norms).clamp(max=1)
        for x, g in zip(parameters, found, strict=True):
            x.grad = g * factor.view(-1, *[1] * (g.ndim - 1))
        for group in self.optimizer.param_groups:
            group["lr"].copy_(self.rates.index_select(0, self.at)[0])
        self.optimizer.step()
        self.optimizer.zero_grad()
        here = self.places == self.at
        self.losses.copy_(torch.where(here, losses.detach(), self.losses))
        self.at.add_(1)

    def held_out(self, attention: Callable) -> list[float]:
        """The mean loss of each run, on windows all over the text."""
        size, text = self.model.size, self.text.held_out
        B, R = self.starts.shape[2], self.starts.shape[1]
        count = max(1, size.evaluated // size.tokens) * B
        starts = torch.linspace(0, len(text) - size.N - 1, count, device=text.device).long()
        total = 0.0
        # Gradients stay enabled: without, all that is compiled would be compiled again.
        for some in starts.split(B):
            batch = windows(text, some, size.N).expand(R, -1, -1)
            total = total + self.model(batch, attention, self.layers).detach()
        return (total * B / count).tolist()


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
    recipe: str, qk_norm: bool, seeds: list[int], size: Size, text: Text, compiled: bool,
    until: float = math.inf,
) -> Iterator[list[dict]]:  # fmt: skip
    """Yields a row for each seed, again and again while they train, last with the held-out losses.
    Stops at the first point of the curve that is after `until` of time.perf_counter()."""
    device = text.train.device
    layers, attention = Layers(), attention_of(recipe, compiled)
    agreement = None
    if compiled:
        layers = compiled_layers()
        shape = len(seeds) * (size.tokens // size.N), size.heads, size.N, HEAD_DIM
        agreement = None if recipe == "exact" else beside_eager(recipe, shape, device)
    model = GPTs(size, seeds, qk_norm, DTYPES[device.type]).to(device)
    starts = torch.stack([drawn_starts(seed, size, len(text.train)) for seed in seeds], 1)
    trainer = Trainer(model, attention, layers, starts, text)
    rows = [
        {
            "plan": "curves", "recipe": recipe, "qk_norm": qk_norm, "tokens": size.tokens,
            "seed": seed, "parameters": model.matrices.shape[1], "of_steps": size.steps, "steps": 0,
            "every": size.every, "curve": [], "diverged": None, "held_out": None,
            "held_out_exact": None, "beside_eager": agreement, "ms": None,
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
            if time.perf_counter() > until:
                break
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
    deviation of exact's loss between seeds. None where there are too few runs."""
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
            for name in FIGURES:
                losses = [figure(row, name, len(row["curve"])) for row in its]
                exacts = [figure(row, name, len(row["curve"])) for row in beside.values()]
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


def print_summary(lines: list[dict]) -> None:
    print(f"\n{'':28} {'loss':>22} {'gap to exact, deviation':>26} {'exact between seeds':>20}")
    for line in lines:
        print(f"{line['tokens']} tokens, {'' if line['qk_norm'] else 'no '}QK-norm, {told(line)}")
        for name in FIGURES:
            its = {key: "-" if x is None else f"{x:+.5f}" for key, x in line[name].items()}
            print(
                f"  {name:26} {its['mean']:>22} {its['gap']:>15} {its['gap_deviation']:>10} "
                f"{its['exact_deviation']:>20}"
            )
    print(flush=True)


def told(line: dict) -> str:
    """What a line of the summary is of."""
    marks = [f"{line[mark]} {mark}" for mark in ("diverged", "partial") if line[mark]]
    return ", ".join([f"{line['recipe']}: {line['seeds']} seeds", *marks])


def positive(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be positive, got {text}")
    return value


def parse(argv, cuda: bool) -> argparse.Namespace:
    size = SIZES["cuda" if cuda else "cpu"]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=DEFAULT, metavar="RECIPE",
                        help=f"of {', '.join(map(repr, RECIPES))}")  # fmt: skip
    parser.add_argument("--seeds", type=positive, default=3, help="how many, from 0")
    parser.add_argument("--steps", type=positive, default=size.steps)
    parser.add_argument("--tokens", type=positive, nargs="+", default=[size.tokens],
                        help=f"of a step, multiples of {size.N}")  # fmt: skip
    parser.add_argument("--qk-norm", action=argparse.BooleanOptionalAction, help="default: both")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=cuda,
                        help="by Inductor; default: on a GPU")  # fmt: skip
    parser.add_argument("--budget", type=float, default=math.inf, help="stop after so many seconds")
    parser.add_argument("--json", nargs="?", const="", help="write the results, here or to a file")
    args = parser.parse_args(argv)
    if any(tokens % size.N for tokens in args.tokens):
        parser.error(f"--tokens must be multiples of {size.N}, got {args.tokens}")
    return args


def main(argv=None) -> int:
    started = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args = parse(argv, device.type == "cuda")
    size = dataclasses.replace(SIZES[device.type], steps=args.steps)
    text = sources()
    result = {
        "date": datetime.datetime.now().isoformat(timespec="seconds"),
        "machine": machine.describe(device) if device.type == "cuda" else {"gpu": "cpu"},
        "versions": machine.versions(),
        "model": f"GPT, causal, {size.layers} layers, {size.heads} heads of {HEAD_DIM}, RoPE, N="
        f"{size.N}, of bytes; AdamW, {size.steps} steps, peak rate {RATE:g}",
        "text": {"train": len(text.train), "held_out": len(text.held_out), "sha256": digest(text)},
        "method": f"{args.seeds} seeds, with which all recipes have the same weights at first and "
        f"the same batches; recipes but exact (SDPA) emulated; products in "
        f"{DTYPES[device.type]}; train: the mean over the last {1 / END:.0%} of the steps",
        "rows": [],
        "summary": [],
    }
    path = args.json
    if path == "":
        folder = Path(RESULTS) / result["machine"]["gpu"].lower().replace(" ", "-")
        path = folder / f"{result['date'][:10]}-curves.json"
    print(f"{result['machine']['gpu']}, {result['versions']}")
    print(f"{result['model']}\n{result['method']}")
    print(f"text: {result['text']}, read in {time.perf_counter() - started:.1f} s", flush=True)
    text = Text(*(part.to(device) for part in text))
    with deterministic():
        measure(args, size, text, result, path, started)
    print_summary(result["summary"])
    print(f"elapsed: {result.get('elapsed_s', 0)} s")
    return 0


def measure(
    args: argparse.Namespace, size: Size, text: Text, result: dict, path, started: float
) -> None:
    """Train what `args` ask for, and keep it in the result, which is saved as it goes."""
    until = started + args.budget
    for tokens in args.tokens:
        for qk_norm in (True, False) if args.qk_norm is None else (args.qk_norm,):
            for recipe in args.recipes:
                if time.perf_counter() > until:
                    print("the budget is spent: the other runs are left out", flush=True)
                    return
                began = saved = time.perf_counter()
                before, rows = result["rows"], []
                its = dataclasses.replace(size, tokens=tokens)
                seeds = list(range(args.seeds))
                for rows in train(recipe, qk_norm, seeds, its, text, args.compile, until):
                    if time.perf_counter() > saved + SAVE_S:
                        keep(result, [*before, *rows], path, started)
                        saved = time.perf_counter()
                keep(result, [*before, *rows], path, started)
                print_rows(rows, time.perf_counter() - began)


def keep(result: dict, rows: list[dict], path, started: float) -> None:
    result["rows"], result["summary"] = rows, summarize(rows)
    result["elapsed_s"] = round(time.perf_counter() - started, 1)
    save(result, path)


def print_rows(rows: list[dict], seconds: float) -> None:
    for row in rows:
        shown = {name: figure(row, name, len(row["curve"])) for name in FIGURES}
        losses = ", ".join(f"{name} {x:.4f}" for name, x in shown.items() if x is not None)
        if row["diverged"] is not None:
            losses = f"diverged at step {row['diverged']}"
        partial = f" of {row['of_steps']}: partial" * (row["steps"] < row["of_steps"])
        print(
            f"  {row['recipe']:26} {'QK-norm' if row['qk_norm'] else 'none':8} {row['tokens']} "
            f"tokens, seed {row['seed']}: {row['steps']} steps{partial}; {losses}"
        )
    for row in rows[:1]:
        agreement = row["beside_eager"]
        beside = "" if agreement is None else f", compiled beside eager {agreement:.1e}"
        print(f"    {row['ms']} ms a step of all seeds, {seconds:.1f} s in all{beside}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
