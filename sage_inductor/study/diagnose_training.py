"""Whether the error of attention that trains in 8 bits is hidden in the noise of the gradient.

    found = sage_inductor.diagnose_training(model, loss=lambda out: ...)(*batch)  # print(found)

The gradient of a batch stands for that of all examples there are. Its noise, which is how far off
it is, follows from how far the examples of the batch differ. With B examples, of which example b
adds c_b to the gradient G:

    G     = sum of c_b
    noise = sqrt(B / (B - 1) * sum of |c_b - G / B|^2)
    error = |G by a recipe - G|

The model runs once, op by op and as it was, and a probe keeps each attention call's q, k, v and
out. Then the gradient that reaches out is taken back to dq, dk and dv exactly and by each recipe,
and from there to the parameters of the module that makes the call. The norms are over those: no
recipe's error reaches another call.

Source: An Empirical Model of Large-Batch Training (arXiv:1812.06162).

Shapes: B batch, H_q and H_kv heads, N_q and N_kv sequence, D head_dim.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sage_inductor.backend import inputs_later, op_by_op
from sage_inductor.choose.decide import decide
from sage_inductor.names import some_of
from sage_inductor.ops.reference.exact import attention_exact
from sage_inductor.ops.training.gradients import OPS, training_op
from sage_inductor.patterns import Decision, Site, reasons, rewrite
from sage_inductor.patterns.call import Call
from sage_inductor.patterns.eligible import is_causal
from sage_inductor.patterns.graph import value_of
from sage_inductor.patterns.module_path import UNNAMED
from sage_inductor.patterns.replace import stand_in
from sage_inductor.study.findings import Finding, Findings, keep_worst, number_of
from sage_inductor.study.measure import MAX_SCORES, SDPA, STUDY, call_progress

# Each part of a batch is followed to the parameters by itself. A batch of windows may have
# thousands; 32 parts know the noise to 1 / sqrt(2 * 31), 13 %, and better over many parameters.
MOST_PARTS = 32
EXACT = "exact"  # in the place of a recipe
Gradients = tuple[Tensor, Tensor, Tensor]  # of q, k and v


@dataclasses.dataclass(frozen=True)
class GradientRow(Finding):
    """An error of the gradient. Norms are Euclidean, over all parameters of a module that the call
    reaches."""

    parameters: str  # path of the module whose parameters they are; "": the model
    error: float
    noise: float
    gradient: float  # more than 0

    @property
    def ratio(self) -> float:
        """|error| / noise; of examples that are all alike infinite."""
        return self.error / self.noise if self.noise else math.inf

    number = ratio

    @property
    def cells(self) -> tuple:
        """A row for TrainingDiagnosis.COLUMNS."""
        return (
            self.where, self.site.call, *self.sizes, self.parameters or "the model", self.recipe,
            self.ratio, self.error / self.gradient, self.noise / self.gradient,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True, repr=False)
class TrainingDiagnosis(Findings):
    """What `diagnose_training` found. `print` it for a verdict and a table (of calls that differ
    only in the numbers in their module's path, the worst); `details` has every number."""

    rows: tuple[GradientRow, ...]  # worst ratio first

    COLUMNS = ("module", "call", "q", "k", "dtype", "mask", "parameters of", "recipe",
               "|error| / noise", "|error| / |gradient|", "noise / |gradient|")  # fmt: skip
    HEAD = "q", "k", "dtype", "mask", "noise / |gradient|"
    NUMBERS = "|error| / noise", "ratios"
    shown = SDPA, *OPS

    @property
    def verdict(self) -> str:
        """One line: "8 calls, |error| / noise of the gradient at most: sdpa 0.01, sagebwd 0.09"."""
        worst = {row.recipe: row for row in reversed(self.rows)}
        each = [f"{name} {worst[name].ratio:.3g}" for name in self.shown if name in worst]
        text = number_of(len({(row.site.module, row.site.call) for row in self.rows}), "call")
        if each:
            text += f", |error| / noise of the gradient at most: {', '.join(each)}"
        return text + self._without_rows

    def __str__(self):
        return "\n".join([self.verdict, *self._table(), *self._not_measured()])

    def _cells(self, group: list[GradientRow]) -> tuple[str, ...]:
        noise = min(row.noise / row.gradient for row in group)
        return *group[0].sizes, f"{noise:.3g}"


@inputs_later
def diagnose_training(
    model: nn.Module, *, loss: Callable[..., Tensor], recipes: str | Sequence[str] | None = None
) -> Callable[..., TrainingDiagnosis]:
    """``diagnose_training(model, loss=loss)(*args, **kwargs)`` runs
    ``loss(model(*args, **kwargs))`` once, backward too, and measures at every attention call the
    error of the gradient by each recipe of ``sage.training``, and the gradient's noise.

    model: it runs in the mode that it is in; call ``model.train()`` before.
    loss: what is trained for, of the model's output: one number, a mean or a sum over examples.
    recipes: "fp8-backward", "sagebwd", or both, which is the default. Only those are measured that
    take the call, on the inputs' device (on CPU both, emulated).

    The examples are the batch dimension of q, k and v, 2 or more. The gradient is that of the
    parameters of the module that makes the call, as far as q, k and v depend on them, or where they
    depend on none, of the modules around it.

    The model's parameters, their ``grad``, its buffers, and the state of torch's random generators
    stay as they are. Hooks of parameters run, and what else a forward pass changes it changes.
    Dynamo's caches are reset. After three seconds stderr shows how many calls are measured. Memory:
    that of a training step without checkpoints, and what one call takes in float64, some rows at a
    time; on CPU also a dozen times [H_q / H_kv, N_q, N_kv] in float64.

    Returns a function of the model's arguments, which returns the TrainingDiagnosis.

    Raises TypeError if model is no nn.Module; ValueError for unknown recipes, a loss that is not
    one number with a gradient, a batch of 1, or a model that makes no attention call.
    """
    recipes = some_of(tuple(OPS), "diagnose_training", recipes)
    if not isinstance(model, nn.Module):
        raise TypeError(f"diagnose_training: model must be an nn.Module, got {type(model)}")

    def run(*args, **kwargs) -> TrainingDiagnosis:
        return _diagnosed(model, args, kwargs, loss, recipes)

    return run


def _diagnosed(
    model: nn.Module, args: tuple, kwargs: dict, loss: Callable, recipes: tuple[str, ...]
) -> TrainingDiagnosis:
    probes, refused = [], []

    def see(gm: torch.fx.GraphModule) -> None:
        calls = []
        take = functools.partial(_trainable, recipes=recipes)
        sites = rewrite(gm, take, put=lambda *each: calls.append(each))
        refused.extend(site for site in sites if not site.rewritten)
        # From the last to the first: what a call reads may be what an earlier one returns, which a
        # probe is put in the place of.
        probes.extend(_GradientProbe(*each, recipes) for each in reversed(calls))

    with _as_it_was(model), contextlib.closing(call_progress()) as progress, torch.enable_grad():
        with op_by_op(see, all_graphs=True) as run:
            out = run(model, args, kwargs)
        value = loss(out)
        if not (isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad):
            got = str(type(value))
            if isinstance(value, Tensor):
                got = f"shape {list(value.shape)}, requires_grad={value.requires_grad}"
            what = "loss must return one number that needs a gradient"
            raise ValueError(f"diagnose_training: {what}, got {got}")
        if not probes and not refused:
            raise ValueError("diagnose_training: the model must make an attention call")
        runs = [(probe, run) for probe in probes for run in probe.end()]
        if runs and all(run.q.shape[0] == 1 for _, run in runs):
            what = "the noise of a gradient is told by how far examples differ: "
            what += "the inputs must be a batch of 2 or more"
            raise ValueError(f"diagnose_training: {what}, got 1")
        outs, of = [run.out for _, run in runs], dict(retain_graph=True, allow_unused=True)
        grads = torch.autograd.grad(value, outs, **of) if outs else ()
        progress.total += len(runs)
        for (probe, run), grad in zip(runs, grads, strict=True):
            probe.measure(model, run, grad)
            progress.update()
    without = ((x.site, Decision(None, x.reason)) for x in probes if not x.rows)
    refused += [dataclasses.replace(site, decision=decision) for site, decision in without]
    rows = [row for probe in reversed(probes) for row in probe.rows.values()]
    return TrainingDiagnosis(tuple(sorted(rows, key=lambda row: -row.badness)), tuple(refused))


@contextlib.contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Buffers and random generators are put back afterwards."""
    tensors = (*model.parameters(), *model.buffers())
    owned = ((m, *each) for m in model.modules() for each in m.named_buffers(recurse=False))
    buffers = [(*each, each[-1].detach().clone()) for each in owned]
    with torch.random.fork_rng(sorted({x.get_device() for x in tensors if x.is_cuda})):
        try:
            yield
        finally:
            with torch.no_grad():
                for module, name, buffer, before in buffers:
                    setattr(module, name, buffer.copy_(before))


def _decided(call: Call, recipe: str) -> Decision:
    return decide(call, dataclasses.replace(STUDY, training=recipe))


def _trainable(call: Call, recipes: tuple[str, ...]) -> Decision:
    """The first recipe that takes the call, or why none does."""
    if isinstance(call.out, Tensor) and not call.out.requires_grad:
        return Decision(None, reasons.NO_GRADIENT())
    found = [_decided(call, recipe) for recipe in recipes]
    refused = Decision(None, reasons.joined([*dict.fromkeys(each.reason for each in found)]))
    return next((each for each in found if each.trained_by), refused)


class _KeptRun(NamedTuple):
    """A run of the model's own graph of gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor


class _GradientProbe:
    """Stands for an attention call: computes it as SDPA does, and keeps what it was given."""

    def __init__(self, call: Call, site: Site, recipes: tuple[str, ...]):
        self.recipes = [name for name in recipes if _decided(call, name).trained_by]
        self.site, self.is_causal, self.scale = site, is_causal(call), call.scale
        self.runs: list[_KeptRun] | None = []
        self.rows: dict[str, GradientRow] = {}  # by recipe
        self.reason = reasons.NOT_RUN()
        with torch.no_grad():
            out = call.emit(
                F.scaled_dot_product_attention, call.q, call.k, call.v,
                is_causal=self.is_causal, scale=call.scale, enable_gqa=call.enable_gqa,
            )  # fmt: skip
            kept = call.emit.insert(self.keep, (call.q, call.k, call.v, out), value_of(out))
            stand_in(call, kept)

    def keep(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
        """[B, H_q, N_q, D], [B, H_kv, N_kv, D] twice, [B, H_q, N_q, D], which it returns."""
        # A branch of cond is traced, by fake ones.
        if self.runs is not None and type(out) is Tensor:
            self.runs.append(_KeptRun(q, k, v, out))
        return out

    def end(self) -> list[_KeptRun]:
        """The runs so far. What a checkpoint runs again later is none."""
        runs, self.runs = self.runs, None
        return runs

    def measure(self, model: nn.Module, run: _KeptRun, grad: Tensor | None) -> None:
        """grad [B, H_q, N_q, D]: what reaches run.out."""
        if run.q.shape[0] == 1:
            self.reason = reasons.NO_EXAMPLES()
            return
        self.reason = reasons.ZERO_GRADIENT()
        if grad is None:
            return
        site = dataclasses.replace(self.site, q=tuple(run.q.shape), k=tuple(run.k.shape))
        scale = float(run.q.shape[3] ** -0.5 if self.scale is None else self.scale)
        q, k, v = (x.detach().to(run.out.dtype) for x in run[:3])  # as autocast gives them to SDPA
        # Backward, the emulation runs outside of its op, where autocast would reach it.
        with torch.autocast(q.device.type, enabled=False):
            exact = _gradients(EXACT, q, k, v, grad, self.is_causal, scale)
            path, parameters = _parameters_of(model, self.site.module, run, exact)
            gradient = _followed(run, exact, parameters)
            size = _norm(gradient)
            if not size:
                return
            noise = _noise(run, exact, parameters, gradient)
            for name in (SDPA, *self.recipes):
                found = _gradients(name, q, k, v, grad, self.is_causal, scale)
                errors = tuple(x - y for x, y in zip(found, exact, strict=True))
                error = _norm(_followed(run, errors, parameters))
                keep_worst(self.rows, name, GradientRow(site, name, path, error, noise, size))


# -- from the call to parameters ----


def _parameters_of(
    model: nn.Module, path: str, run: _KeptRun, gradients: Gradients
) -> tuple[str, list[nn.Parameter]]:
    """The module that makes the call, or if q, k and v depend on none of its parameters, the first
    around it of which they do; and those."""
    modules = {}
    for name, module in model.named_modules():
        name = ".".join(each for each in name.split(".") if each not in UNNAMED)
        modules.setdefault(name, module)
    while True:
        module = modules.get(path)
        trained = [p for p in module.parameters() if p.requires_grad] if module is not None else []
        found = _followed(run, gradients, trained)
        reached = [p for p, x in zip(trained, found, strict=True) if x is not None]
        if reached or not path:
            return path, reached
        path = path.rpartition(".")[0]


def _followed(run: _KeptRun, gradients: Gradients, parameters: list) -> list[Tensor | None]:
    """`gradients` at q, k and v, taken back to the parameters; None for one that is not reached."""
    if not parameters:
        return []
    pairs = zip(run[:3], gradients, strict=True)
    needed = [(x, gradient.to(x.dtype)) for x, gradient in pairs if x.requires_grad]
    inputs, given = zip(*needed, strict=True)
    found = torch.autograd.grad(inputs, parameters, given, retain_graph=True, allow_unused=True)
    return list(found)


def _noise(run: _KeptRun, exact: Gradients, parameters: list, gradient: list[Tensor]) -> float:
    """Standard deviation of the batch's gradient G, estimated from one batch. Its parts j have n_j
    examples and gradients c_j: E |c_j - (n_j / B) G|^2 = (n_j / B) (1 - n_j / B) noise^2."""
    B, found, degrees = run.q.shape[0], 0.0, 0.0
    for part in torch.arange(B).tensor_split(min(B, MOST_PARTS)):
        of_part = [torch.zeros_like(x) for x in exact]
        for x, y in zip(of_part, exact, strict=True):
            x[part] = y[part]
        share = len(part) / B
        added = _followed(run, of_part, parameters)
        found += _norm([c - share * g for c, g in zip(added, gradient, strict=True)]) ** 2
        degrees += share * (1 - share)
    return math.sqrt(found / degrees)


def _norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(x.double().square().sum().item() for x in tensors))


# -- from out to q, k and v ----


def _gradients(by: str, q, k, v, grad, causal: bool, scale: float) -> Gradients:
    """By SDPA or a recipe: on CPU one example and one head of k at a time, because the emulation
    holds all scores. EXACT: in float64, of these a part of the rows at a time."""

    def attend(q, k, v, first: int):
        if by == EXACT:
            return attention_exact(q, k, v, scale, right=first if causal else None)[0]
        if by == SDPA:
            given = dict(is_causal=causal, scale=scale, enable_gqa=True)
            return F.scaled_dot_product_attention(q, k, v, **given)
        return training_op(by)(q, k, v, causal, scale, False)[0]

    (B, H_kv, N_kv, _), (G, N_q), dtype = k.shape, (q.shape[1] // k.shape[1], q.shape[2]), q.dtype
    examples, heads, rows = B, H_kv, N_q
    if by == EXACT or q.device.type == "cpu":
        examples, heads = 1, 1
    if by == EXACT:
        rows, dtype = max(1, MAX_SCORES // (G * N_kv)), torch.float64
    found = tuple(torch.zeros_like(x, dtype=dtype) for x in (q, k, v))
    starts = range(0, B, examples), range(0, H_kv, heads), range(0, N_q, rows)
    for b, h, first in itertools.product(*starts):
        of_kv = slice(b, b + examples), slice(h, h + heads)
        of_q = of_kv[0], slice(h * G, (h + heads) * G), slice(first, first + rows)
        leaves = [x.to(dtype).requires_grad_() for x in (q[of_q], k[of_kv], v[of_kv])]
        each = torch.autograd.grad(attend(*leaves, first), leaves, grad[of_q].to(dtype))
        for whole, part, x in zip(found, (of_q, of_kv, of_kv), each, strict=True):
            whole[part] += x
    return found
