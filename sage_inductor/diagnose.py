"""How far each recipe is from exact attention at each attention call of a model, and the policy
that follows.

    found = sage_inductor.diagnose(model, path="policy.json")(*example_inputs)  # print(found)
    torch.compile(model, backend="sage", options={"sage.policy": "policy.json"})

    with sage_inductor.diagnosing(pipe.transformer) as found:  # on a run's own inputs
        pipe(prompt)

The model runs op by op and as it was. Before each attention call that ``sage::sdpa`` can stand for,
a probe gets the call's own q, k, v and mask, and computes what exact attention gives and what each
recipe does: no recipe's error reaches the next call.

What is kept is numbers: a `Row` for each call, recipe and stage, and the errors of each step that a
Schedule counts. What is computed at one time is a part of the heads: see MAX_SCORES.

Shapes: B batch, H_q and H_kv heads, N_q and N_kv sequence, D head_dim (D_v of v).
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sage_inductor import page, stages
from sage_inductor.at_once import also_at_once
from sage_inductor.backend import UNLIMITED, op_by_op
from sage_inductor.choose import cost, families, tables
from sage_inductor.choose.cost import Prediction
from sage_inductor.choose.decide import autos, decide, predicted
from sage_inductor.names import AUTO, OFF, nearest
from sage_inductor.ops.recipe import BY_SPEED, NAMED, canonical
from sage_inductor.ops.reference.exact import attention_exact, masked
from sage_inductor.ops.visibility import as_4d
from sage_inductor.patterns import Decision, Site, reasons, rewrite
from sage_inductor.patterns.call import FULL, Band, Call
from sage_inductor.patterns.call_shape import CallShape
from sage_inductor.patterns.shared_kv import stacks
from sage_inductor.policy import Policy, Rule, layer_of
from sage_inductor.report import (
    counts,
    folded,
    grouped,
    made_with,
    number_of,
    path_of,
    remedies,
    table,
)
from sage_inductor.settings import Settings

# 8-bit q, k and v cost a relative L1 of 0.035 to 0.048 on normal inputs (docs/performance.md). A
# call above this tolerance has inputs that its recipe does not cope with.
TOLERANCE = 0.05
POLICY = "the policy"  # in the place of a recipe: the suggested one of each call
SDPA = "sdpa"  # in the place of a recipe: scaled_dot_product_attention in the model's own dtype
STUDY = Settings(emulate=True, force=True)
QUIET_S = 3.0  # before progress is shown
MOST_SHOWN = 20  # rows of the printed table
# Numbers of a tensor that is computed at one time, 128 MiB in float64: the scores of exact
# attention, the outputs that are compared with it and, on CPU, the scores of an emulation.
MAX_SCORES = 1 << 24


@dataclasses.dataclass(frozen=True)
class Row:
    """The error of one recipe at one attention call; where that ran several times, at its worst.
    Relative L1: sum |error| / sum |exact|."""

    site: Site  # with the sizes it ran with
    recipe: str  # or "sdpa": scaled_dot_product_attention in the model's own dtype
    cos_sim: float
    relative_l1: float
    rmse: float
    worst_head: tuple[int, float]  # head, its relative L1
    worst_row: tuple[int, int, int, float]  # batch, head, row, its relative L1
    predicted: Prediction | None = None  # its time and SDPA's, where such calls were timed

    @property
    def badness(self) -> float:
        """The relative L1, by which rows are compared."""
        return _badness(self.relative_l1)


class Total(NamedTuple):
    """All measured runs of all calls, by one recipe or by the policy."""

    relative_l1: float  # of the worst call
    # Predicted, of the calls that such times are known of; 0: of none.
    ms: float
    sdpa_ms: float


@dataclasses.dataclass(frozen=True, repr=False)
class Diagnosis:
    """What `diagnose` found, or `diagnosing` when its block has ended. `print` it for a verdict, a
    table (of calls that differ in the numbers in their module's path alone, the worst) and the
    policy; `details` has every number, `to_html` writes all of it and a heat map."""

    rows: tuple[Row, ...]  # worst relative L1 first
    unmeasured: tuple[Site, ...]  # attention calls without rows; `reason` says why
    suggested: dict[str, str]  # path of a module: the recipe of its calls, or "off"
    tolerance: float
    shown: tuple[str, ...]  # recipes that the table has a column for
    # The same of each stage in which something ran, or which is suggested (stages.py).
    by_stage: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    # Suggested: how many of the first and of the last steps should be in the stage "edge".
    edge: tuple[int, int] | None = None
    # Of all calls together, by recipe; "the policy": the suggested recipe of each call.
    totals: dict[str, Total] = dataclasses.field(default_factory=dict)

    @property
    def policy(self) -> Policy:
        """The suggested recipes, in few rules."""
        rules = [
            dataclasses.replace(rule, stage=stage)
            for stage, suggested in self.by_stage.items()
            if suggested != self.suggested
            for rule in _merged(suggested)
        ]
        return Policy((*rules, *_merged(self.suggested)))

    def save(self, path: str | os.PathLike) -> None:
        """Write the policy where ``sage.policy`` finds it, with what was measured as a note."""
        errors = collections.defaultdict(list)
        for row in self.rows:
            errors[_where(row.site, row.site.module)].append(f"{row.recipe} {row.relative_l1:.4g}")
        note = {
            "tolerance": self.tolerance,
            "versions": families.versions(),
            "relative L1": {module: ", ".join(each) for module, each in sorted(errors.items())},
        }
        self.policy.save(path, note)

    @property
    def verdict(self) -> str:
        """One line: "57 modules, relative L1 <= 0.05: auto (56), off (1)"."""
        if not (self.rows or self.unmeasured):
            return "nothing was measured: the block has not ended, or has failed before a call"
        text = f"{number_of(len(self._modules), 'module')}, relative L1 <= {self.tolerance}"
        if self.suggested:
            text += f": {counts(collections.Counter(self.suggested.values()))}"
        for stage, suggested in self.by_stage.items():
            text += f"; in {stage}: {counts(collections.Counter(suggested.values()))}"
        if self.unmeasured:
            text += f"; not measured: {number_of(len(self.unmeasured), 'call')}"
        return text

    def __repr__(self):
        return f"<Diagnosis: {self.verdict}>"

    def __str__(self):
        lines = [self.verdict]
        groups = self._groups()
        if groups:
            head = ("module", "count", "call", "q", "k", "dtype", "mask", "suggested", *self.shown)
            lines += ["", table([head, *groups[:MOST_SHOWN]])]
            if groups[MOST_SHOWN:]:
                lines.append(f"and {len(groups) - MOST_SHOWN} rows of smaller errors")
            lines.append("relative L1, the worst of each row's calls; more: print(found.details())")
            lines += [gain] if (gain := self._gain()) else []
        for where, sites in grouped(self.unmeasured, path_of, lambda x: (x.spelling, x.reason)):
            lines.append(f"{where} x{len(sites)} ({sites[0].spelling}): {sites[0].reason}")
        if self._modules:
            lines += ["", f"the fastest recipes with a relative L1 of at most {self.tolerance}:"]
            lines.append(self.policy.text().rstrip())
        if self.edge is not None:
            lines.append(f"with callback_on_step_end=sage_inductor.Schedule(edge={self.edge})")
        return "\n".join(lines)

    @property
    def _modules(self) -> list[str]:
        return list(dict.fromkeys(itertools.chain(self.suggested, *self.by_stage.values())))

    def _gain(self) -> str:
        """ "" if no times are known."""
        *_, ms, sdpa_ms = self.totals.get(POLICY, (0.0, 0.0))
        if not sdpa_ms:
            return ""
        gpu = tables.whose_times(torch.device(self.rows[0].site.device))
        return (
            f"attention takes {ms:.3g} ms with the policy and {sdpa_ms:.3g} ms with SDPA "
            f"(predicted from times of {gpu})"
        )

    def details(self) -> str:
        """A table of every measured call and recipe, the worst relative L1 first."""
        cells = (tuple(map(_text, _cells(row))) for row in self.rows)
        return table([COLUMNS, *cells])

    def heat_map(self) -> str:
        """An SVG of the relative L1, modules by recipes, with a legend: white at the tolerance,
        blue below it, red above. SDPA is what is compared with, and has no colour."""
        errors = {}
        for row in reversed(self.rows):  # of a module's calls the worst comes last
            errors[_where(row.site), row.recipe] = row.relative_l1
        order = self._modules
        in_order = sorted(self.rows, key=lambda row: order.index(row.site.module))
        modules = dict.fromkeys(_where(row.site) for row in in_order)
        recipes = [name for name in (SDPA, *NAMED) if any(name == r for _, r in errors)]
        return page.heat_map(list(modules), recipes, errors, self.tolerance, plain=(SDPA,))

    def to_html(self, path: str | os.PathLike) -> None:
        """Write one page that needs no other file: the error and the predicted time of each recipe
        and of the policy, the heat map, every row (they sort by any column and filter by module),
        the calls that were not measured with what to do, the policy, and the versions."""
        parts = [*self._summary(), page.table(COLUMNS, list(map(_cells, self.rows)))]
        if self.unmeasured:
            rows = [(path_of(site), site.spelling, folded(site)) for site in self.unmeasured]
            parts.append(page.table(UNMEASURED, rows))
            parts += map(page.paragraph, remedies(self.unmeasured))
        parts.append(
            page.paragraph(made_with([*(row.site for row in self.rows), *self.unmeasured]))
        )
        with open(path, "w", encoding="utf-8") as file:
            file.write(page.page("sage_inductor: accuracy of attention calls", *parts))

    def _repr_html_(self):
        return "\n".join(self._summary())

    def _summary(self) -> list[str]:
        names, gain = (SDPA, *NAMED, POLICY), self._gain()
        rows = [(name, *self._total(name)) for name in names if name in self.totals]
        return [
            page.paragraph(self.verdict),
            page.table(TOTALS, rows),
            page.paragraph(f"ms: {gain}. {OF_TIMES}" if gain else "ms: such calls were not timed."),
            self.heat_map(),
            page.listing(self.policy.text()),
        ]

    def _total(self, name: str) -> tuple[page.Cell, ...]:
        """Cells from TOTALS[1] on."""
        error, ms, sdpa_ms = self.totals[name]
        within = [row.badness <= self.tolerance for row in self.rows if row.recipe == name]
        calls = f"{sum(within)} of {len(within)}" if within else ""
        return error, calls, *((ms, sdpa_ms, sdpa_ms - ms) if sdpa_ms else ("", "", ""))

    def _groups(self) -> list[tuple[str, ...]]:
        """Cells of the printed table, the worst error of a shown recipe first."""

        def same(row: Row) -> tuple:
            module, of_stage = row.site.module, self.by_stage.get(row.site.stage, {})
            # What ran in no stage may have run in the steps alone that are suggested as one.
            every = of_stage, self.suggested, *self.by_stage.values()
            return *_cells(row)[1:6], next(each[module] for each in every if module in each)

        lines = []
        for where, rows in grouped(self.rows, lambda row: _where(row.site), same):
            worst = {row.recipe: row for row in reversed(rows)}  # self.rows: the worst comes first
            shown = [worst[name] for name in self.shown if name in worst]
            calls = calls_of(rows)
            errors = (f"{worst[x].relative_l1:.3g}" if x in worst else "-" for x in self.shown)
            cells = (where, f"x{calls}", *same(rows[0]), *errors)
            lines.append((max((row.badness for row in shown), default=0.0), cells))
        return [cells for _, cells in sorted(lines, key=lambda line: -line[0])]


COLUMNS = ("module", "call", "q", "k", "dtype", "mask", "recipe", "CosSim", "relative L1", "RMSE",
           "worst head", "relative L1 of that head", "worst batch, head, row",
           "relative L1 of that row", "ms", "SDPA's ms")  # fmt: skip
TOTALS = "recipe", "worst relative L1", "calls within the tolerance", "ms", "SDPA's ms", "ms gained"
OF_TIMES = (
    "They are of all measured runs together, without the rest of the model. The policy leaves a "
    "call to SDPA where no gain is predicted. A recipe without ms was not timed for such calls."
)
UNMEASURED = ("module", "call", "not measured")


def calls_of(rows: list) -> int:
    """How many calls these are, each in a row a recipe. Where graphs do not know their module's
    name, calls of several graphs have one name."""
    if rows[0].site.module:
        return len({(row.site.module, row.site.call) for row in rows})
    return max(collections.Counter(row.recipe for row in rows).values())


def _where(site: Site, path: str | None = None) -> str:
    path = path_of(site) if path is None else path
    return path if site.stage is None else f"{path} in {site.stage}"


def _cells(row: Row) -> tuple[page.Cell, ...]:
    site, (head, of_head), (*where, of_row) = row.site, row.worst_head, row.worst_row
    return (
        _where(site), site.spelling, str(list(site.q)), str(list(site.k)), site.dtype, site.mask,
        row.recipe, f"{row.cos_sim:.6f}", row.relative_l1, row.rmse, head, of_head,
        ", ".join(map(str, where)), of_row, *(row.predicted[1:3] if row.predicted else ("", "")),
    )  # fmt: skip


def _text(cell: page.Cell) -> str:
    return f"{cell:.6g}" if isinstance(cell, float) else str(cell)


@also_at_once
def diagnose(
    model,
    *,
    recipes: str | Sequence[str] | None = None,
    path: str | os.PathLike | None = None,
    tolerance: float = TOLERANCE,
) -> Callable[..., Diagnosis]:
    """``diagnose(model)(*args, **kwargs)`` runs ``model(*args, **kwargs)`` once and measures every
    recipe at every attention call.

    recipes: one name or several; without it all. Of these, the ones that run on the inputs' device
    are measured (on CPU every one, emulated). path: where to write the suggested policy. tolerance:
    the relative L1 up to which a recipe is suggested. A module gets the fastest recipe that is
    within the tolerance at each of its calls. That is "auto", if every recipe that "auto" may
    become there is within it (on CPU: may become on the GPU that was measured). Else it is a named
    one, and "off" if there is none.

    model may be a function, or a pipeline of diffusers. With
    ``callback_on_step_end=sage_inductor.Schedule()`` errors are given for each step. A stage "edge"
    of the first and last steps is suggested where it makes the other steps faster. With a Schedule
    that has stages, each stage gets its recipes.

    Gradients are off. The model's code, parameters and mode stay as they are, and what a forward
    pass changes it changes. Dynamo's caches are reset. After three seconds stderr shows how many
    calls are measured (by tqdm, where it is installed). Memory beside the model's own, for as many
    heads at a time as stay below 16M numbers, at least one of k: several times [H_q / H_kv, N_q,
    D_v] in float64 and, on CPU, ten times [H_q / H_kv, N_q, N_kv] in fp32.

    Raises ValueError for unknown recipes, a tolerance that is not a positive number, or a model
    that makes no attention call; OSError, before the model runs, if `path` cannot be written.
    """
    measuring = _measuring("diagnose", recipes, path, tolerance)

    def run(*args, **kwargs) -> Diagnosis:
        if isinstance(model, nn.Module):
            _check_alone("diagnose", model)
        with measuring() as (found, measure), torch.no_grad():
            measure(model, args, kwargs)
        return found

    return run


_open: list[nn.Module] = []  # the models of the blocks of `diagnosing` that have not ended


@contextlib.contextmanager
def diagnosing(
    model: nn.Module,
    *,
    recipes: str | Sequence[str] | None = None,
    path: str | os.PathLike | None = None,
    tolerance: float = TOLERANCE,
    every: int = 1,
) -> Iterator[Diagnosis]:
    """``with diagnosing(model) as found:`` measures the calls of `model` in the block as `diagnose`
    does, on the inputs that they get there. When the block has ended, `found` is the Diagnosis.

    model: a module that the block calls, such as ``pipe.transformer``. every: of so many calls of
    it the first is measured, the others run as they are. recipes, path, tolerance: see `diagnose`.
    With ``callback_on_step_end=sage_inductor.Schedule()`` errors are given for each step; a stage
    "edge" is suggested only if all steps are measured.

    In the block, nothing else is compiled: what is, runs in eager. Gradients are as the block has
    them. The memory is that of `diagnose`, however many calls there are: of a call that is measured
    again the worst errors are kept, and those of each step of a Schedule.

    An error inside the block is passed on, with `found` as far as it got, and no policy is written.
    Raises TypeError if model is no nn.Module; ValueError, beside those of `diagnose`, if the block
    does not call the model, or every is less than 1; RuntimeError in a block of the same model, of
    a part of it, or of a model around it.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            "diagnosing: model must be an nn.Module that the block calls, such as "
            f"pipe.transformer, got {type(model)}; what is none: diagnose(function)(*args)"
        )
    if not (isinstance(every, int) and every >= 1):
        raise ValueError(f"diagnosing: every must be a number of calls from 1 on, got {every!r}")
    model = getattr(model, "_orig_mod", model)  # torch.compile(model) calls it
    _check_alone("diagnosing", model)
    calls = 0

    def call(*args, **kwargs):
        nonlocal calls
        calls += 1
        if (calls - 1) % every:
            return model._call_impl(*args, **kwargs)
        model._compiled_call_impl = None
        try:
            return measure(model, args, kwargs)
        finally:
            model._compiled_call_impl = call

    with _measuring("diagnosing", recipes, path, tolerance)() as (found, measure):
        compiled = model._compiled_call_impl  # by model.compile()
        model._compiled_call_impl = call
        _open.append(model)
        try:
            yield found
        finally:
            _open.remove(model)
            del model._compiled_call_impl
            if compiled is not None:
                model._compiled_call_impl = compiled
        if not calls:
            raise ValueError(
                "diagnosing: the block must call the model, as model(...): no call of this "
                f"{type(model).__name__} was seen"
            )


def _check_alone(name: str, model: nn.Module) -> None:
    """Raise RuntimeError in a block that measures calls of the model already."""
    around = {part for each in _open for part in each.modules()}
    if model in around or not set(_open).isdisjoint(model.modules()):
        raise RuntimeError(
            f"{name}: a block of diagnosing is open that measures this {type(model).__name__}, a "
            "part of it or a model around it: that block must end first"
        )


def _measuring(
    name: str, recipes: str | Sequence[str] | None, path: str | os.PathLike | None, tolerance: float
) -> Callable[..., contextlib.AbstractContextManager]:
    """Gives a context of (a Diagnosis, ``measure(model, args, kwargs)``), after a check of what is
    given. The Diagnosis is filled when the context ends."""
    named = [recipes] if isinstance(recipes, str) else recipes
    named = tuple(map(canonical, NAMED if named is None else named))
    if not named or not set(named) <= NAMED.keys():
        near = [one for each in named if each not in NAMED and (one := nearest(each, NAMED))]
        meant = f": did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{name}: recipes must be of {tuple(NAMED)}, got {named}{meant}")
    if not 0 < tolerance < math.inf:
        raise ValueError(f"{name}: tolerance must be a positive number, got {tolerance}")
    if path is not None:
        tables.check_file(path)

    @contextlib.contextmanager
    def measuring() -> Iterator[tuple[Diagnosis, Callable]]:
        measured, found = _Measured(named), Diagnosis((), (), {}, tolerance, ())
        try:
            with op_by_op(measured.see) as run, torch.compiler.config.patch(UNLIMITED):
                yield found, functools.partial(measured.run, run)
        finally:
            vars(found).update(vars(measured.diagnosis(tolerance, recipes is None)))
        if not (found.rows or found.unmeasured):
            raise ValueError(f"{name}: the model must make an attention call, none was seen")
        if path is not None:
            found.save(path)

    return measuring


# -- measuring ----


def _studied(call: Call) -> Decision:
    if call.blocks.size is not None:
        return Decision(None, reasons.NO_EXACT("by block lists"))
    if call.sink is not None:
        return Decision(None, reasons.NO_EXACT("with a learned sink"))
    return decide(call, STUDY)


class _When(NamedTuple):
    """When a call ran."""

    stage: str | None
    step: int | None  # of the pipeline that a Schedule counts


class _Found:
    """What is kept of an attention call."""

    def __init__(self, site: Site, autos: tuple[str, ...]):
        self.site, self.autos = site, autos
        self.rows: dict[tuple[str | None, str], Row] = {}  # by stage and recipe
        self.errors: dict[_When, dict[str, float]] = {}  # by recipe, as Row.badness
        self.times: dict[_When, dict[str, Prediction]] = {}  # by recipe, of all runs together

    def add(self, when: _When, row: Row) -> None:
        key, errors = (when.stage, row.recipe), self.errors.setdefault(when, {})
        self.rows[key] = max(self.rows.get(key, row), row, key=lambda row: row.badness)
        errors[row.recipe] = max(errors.get(row.recipe, 0.0), row.badness)
        if (time := row.predicted) is not None:
            times = self.times.setdefault(when, {})
            known = times.get(row.recipe, time._replace(ours=0.0, sdpa=0.0))
            times[row.recipe] = known._replace(
                ours=known.ours + time.ours, sdpa=known.sdpa + time.sdpa
            )


class _Measured:
    """What is kept of all attention calls. A call is known again by its module, its node's name
    and, where modules have no name, by the order of its graphs in a run: a graph that Dynamo makes
    again, of other sizes, adds nothing."""

    def __init__(self, recipes: tuple[str, ...]):
        self.recipes = recipes
        self.calls: dict[tuple, _Found] = {}
        self.refused: dict[tuple, Site] = {}
        self.graphs = collections.Counter()  # of this run, by the call
        self.progress = None

    def run(self, run: Callable, model, args: tuple, kwargs: dict):
        """What `model` returns."""
        self.graphs.clear()
        with contextlib.closing(Progress(len(self.calls))) as self.progress:
            return run(model, args, kwargs)

    def see(self, gm: torch.fx.GraphModule) -> None:
        calls, known = [], len(self.calls)
        for site in rewrite(gm, _studied, put=lambda *each: calls.append(each)):
            if not site.rewritten:
                self.refused.setdefault(self._key(site), site)
        # Probes are inserted when all calls are found: to a proof of what a mask says a probe is a
        # call that may write to the mask.
        for call, site in calls:
            found = self.calls.setdefault(self._key(site), _Found(site, autos(call)))
            _Probe(call, found, self.recipes, lambda: self.progress.step())
        self.progress.expect(len(self.calls) - known)
        for module in gm.modules():
            if isinstance(module, torch.fx.GraphModule):
                module.recompile()

    def _key(self, site: Site) -> tuple:
        name = site.module, site.call
        self.graphs[name] += 1
        return *name, self.graphs[name]

    def diagnosis(self, tolerance: float, are_all: bool) -> Diagnosis:
        """are_all: the recipes are all there are."""
        calls, recipes, refused = list(self.calls.values()), self.recipes, [*self.refused.values()]
        for call in calls:
            if not call.rows:
                reason = reasons.NOT_RUN()
                refused.append(dataclasses.replace(call.site, decision=Decision(None, reason)))
        rows = [row for call in calls for row in call.rows.values()]
        rows = tuple(sorted(rows, key=lambda row: -row.badness))
        if are_all:  # of all that is measured, what a policy may come to
            recipes = [r for r in recipes if r in BY_SPEED or any(r in c.autos for c in calls)]
        seen = {row.recipe for row in rows}
        shown = tuple(name for name in (SDPA, *recipes) if name in seen)
        whens = list(dict.fromkeys(when for call in calls for when in call.errors))
        parts = {stage: (lambda when, stage=stage: when.stage == stage) for stage, _ in whens}
        edge = _edge(calls, tolerance) if set(parts) == {None} else None
        if edge is not None:
            in_edge = _in_edge(edge, whens)
            parts = {None: lambda when: not in_edge(when), "edge": in_edge}
        by_stage = {stage: _suggested(calls, tolerance, wanted) for stage, wanted in parts.items()}
        totals = _totals(calls, parts, by_stage)
        suggested = by_stage.pop(None, {})
        return Diagnosis(rows, tuple(refused), suggested, tolerance, shown, by_stage, edge, totals)


class _Probe:
    """Measures an attention call whenever the graph is about to make it."""

    def __init__(
        self, call: Call, found: _Found, recipes: tuple[str, ...], done: Callable[[], None]
    ):
        each = {name: dataclasses.replace(STUDY, recipe=name) for name in recipes}
        self.recipes = [name for name in recipes if decide(call, each[name]).recipe is not None]
        self.stacked = {name for name in self.recipes if stacks(call, NAMED[name])}
        self.site, self.shape, self.scale = found.site, CallShape.of(call), call.scale
        self.found, self.done = found, done
        call.emit.insert(self.measure, (call.q, call.k, call.v, call.attn_mask), None)

    @torch.no_grad()
    def measure(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None) -> None:
        scale = float(q.shape[3] ** -0.5 if self.scale is None else self.scale)
        when = _When(stages.current(), stages.step())
        sizes = {name: tuple(x.shape) for name, x in zip("qkv", (q, k, v), strict=True)}
        site = dataclasses.replace(self.site, q=sizes["q"], k=sizes["k"], stage=when.stage)
        mask = None if attn_mask is None else tuple(attn_mask.shape)
        shape = self.shape._replace(**sizes, mask=mask)
        errors = _errors(q, k, v, attn_mask, self.shape.band, scale, (SDPA, *self.recipes))
        for name, error in errors.items():
            time = None if name == SDPA else predicted(shape, name, name in self.stacked)
            self.found.add(when, Row(site, name, *error, time))
        self.done()


class Progress:
    """How many calls are measured, on stderr; nothing is shown in the first seconds."""

    def __init__(self, expected: int = 0):
        try:
            from tqdm import tqdm
        except ImportError:
            self.bar = None
        else:
            self.bar = tqdm(
                desc="diagnose", unit=" calls", total=expected, delay=QUIET_S, leave=False
            )
        self.measured, self.expected = 0, expected
        self.said = time.monotonic()

    def expect(self, calls: int) -> None:
        self.expected += calls
        if self.bar is not None:
            self.bar.total = self.expected

    def step(self) -> None:
        self.measured += 1
        if self.bar is not None:
            self.bar.update()
        elif time.monotonic() - self.said > QUIET_S:
            self.said = time.monotonic()
            sys.stderr.write(f"diagnose: {self.measured} of {self.expected} calls measured\n")

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


class _Error:
    """How far an output is from the exact one, which are given a part at a time."""

    def __init__(self, heads: int):
        self.sums = torch.zeros(6, dtype=torch.float64)
        self.heads = torch.zeros(2, heads, dtype=torch.float64)  # sums of |error| and |exact|
        self.numbers, self.worst_row = 0, (-1.0, (0, 0, 0))

    def add(self, actual: Tensor, exact: Tensor, b: int = 0, h: int = 0) -> None:
        """[B', H', N_q, D_v], the part of the output that begins at (b, h)."""
        actual, exact = actual.double(), exact.double()
        error = actual - exact
        error, size, squares = error.abs(), exact.abs(), (error, actual, exact)
        self.sums += torch.stack([
            error.sum(), size.sum(), (actual * exact).sum(), *(x.square().sum() for x in squares)
        ]).cpu()  # fmt: skip
        self.numbers += exact.numel()
        of_heads = torch.stack([error.sum((0, 2, 3)), size.sum((0, 2, 3))]).cpu()
        self.heads[:, h : h + exact.shape[1]] += of_heads
        rows = _ratio(error.sum(3), size.sum(3))
        at = rows.argmax()  # of a NaN, if there is one
        i, j, row = (int(n) for n in torch.unravel_index(at, rows.shape))
        found = rows[i, j, row].item(), (b + i, h + j, row)
        self.worst_row = max(self.worst_row, found, key=lambda each: _badness(each[0]))

    @property
    def numbers_of_row(self) -> tuple:
        """Row's fields, from cos_sim on."""
        error, size, product, squares, of_actual, of_exact = self.sums
        heads = _ratio(*self.heads)
        head, (of_row, where) = int(heads.argmax()), self.worst_row
        return (
            (product / (of_actual.sqrt() * of_exact.sqrt())).item(), _ratio(error, size).item(),
            (squares / self.numbers).sqrt().item(), (head, heads[head].item()), (*where, of_row),
        )  # fmt: skip


def compare(actual: Tensor, exact: Tensor) -> dict[str, float]:
    """CosSim, relative L1 (sum |error| / sum |exact|) and RMSE of [B, H, N, D]."""
    error = _Error(exact.shape[1])
    error.add(actual, exact)
    return dict(zip(("CosSim", "relative L1", "RMSE"), error.numbers_of_row[:3], strict=True))


def _ratio(error: Tensor, size: Tensor) -> Tensor:
    return torch.where(error == 0, 0.0, error / size)  # a row that sees nothing is 0, and right


def _badness(error: float) -> float:
    """Errors in order: nothing is worse than NaN."""
    return math.inf if math.isnan(error) else error


def _errors(q, k, v, attn_mask, band: Band, scale: float, names: Sequence[str]) -> dict[str, tuple]:
    """By SDPA or a recipe: Row's fields, from cos_sim on. Recipes share nothing between heads, so a
    part of them is computed at a time, with the heads of q that they serve."""
    (B, H_q, N_q, _), (H_kv, N_kv) = q.shape, k.shape[1:3]
    G = H_q // H_kv
    columns = max(
        v.shape[3], N_kv if q.device.type == "cpu" else 0
    )  # the emulation holds all scores
    pairs = max(1, MAX_SCORES // max(1, G * N_q * columns))  # of a batch and a head of k
    heads, batches = min(H_kv, pairs), max(1, min(B, pairs // H_kv))
    found = {name: _Error(H_q) for name in names}
    for b, h in itertools.product(range(0, B, batches), range(0, H_kv, heads)):
        of_b, of_q, of_kv = (
            slice(b, b + batches),
            slice(h * G, (h + heads) * G),
            slice(h, h + heads),
        )
        mask = None if attn_mask is None else _part(_part(as_4d(attn_mask), 0, of_b), 1, of_q)
        inputs = q[of_b, of_q], k[of_b, of_kv], v[of_b, of_kv], mask, band, scale
        exact = _exact(*inputs)
        for name, error in found.items():
            error.add(_computed(name, *inputs), exact, b, h * G)
    return {name: error.numbers_of_row for name, error in found.items()}


def _part(x: Tensor, dim: int, part: slice) -> Tensor:
    """The part of a dimension that is not broadcast."""
    return (
        x
        if x.shape[dim] == 1
        else x.narrow(dim, part.start, min(part.stop, x.shape[dim]) - part.start)
    )


def _exact(q, k, v, attn_mask, band: Band, scale: float) -> Tensor:
    """Exact attention in float64, a part of the rows of one head at a time."""
    (B, H, N_q, _), N_kv = q.shape, k.shape[2]
    if attn_mask is not None:
        attn_mask = attn_mask.expand(B, H, N_q, N_kv)
    left, right, bottom_right = dataclasses.astuple(band)
    rows = max(1, MAX_SCORES // (B * N_kv))
    out = torch.empty(*q.shape[:3], v.shape[3], dtype=torch.float64, device=q.device)
    for h, first in itertools.product(range(H), range(0, N_q, rows)):
        part = slice(None), slice(h, h + 1), slice(first, first + rows)
        kv = slice(None), slice(h // (H // k.shape[1]), h // (H // k.shape[1]) + 1)
        at = first + (N_kv - N_q if bottom_right else 0)  # where row 0 of this part is
        with torch.autocast(q.device.type, enabled=False):
            out[part], _ = attention_exact(
                q[part], k[kv], v[kv], scale, None if attn_mask is None else attn_mask[part],
                None if left is None else left - at, None if right is None else right + at,
            )  # fmt: skip
    return out


def _computed(name: str, q, k, v, attn_mask, band: Band, scale: float) -> Tensor:
    """By SDPA or a recipe."""
    if name != SDPA:
        return torch.ops.sage.sdpa(
            q, k, v, attn_mask, [], *dataclasses.astuple(band), scale, NAMED[name].encode(), None,
            False, False,
        )[0]  # fmt: skip
    if band != FULL:
        none = q.new_zeros(q.shape[2], k.shape[2])
        attn_mask = masked(none, attn_mask, *dataclasses.astuple(band))
    return F.scaled_dot_product_attention(q, k, v, attn_mask, scale=scale, enable_gqa=True)


# -- suggesting ----


def _suggested(
    calls: list[_Found], tolerance: float, wanted: Callable[[_When], bool]
) -> dict[str, str]:
    """The recipe of each module measured at the times that are wanted."""
    modules = collections.defaultdict(list)
    for call in calls:
        errors = collections.defaultdict(float)
        for when, found in call.errors.items():
            for recipe, error in found.items() if wanted(when) else ():
                errors[recipe] = max(errors[recipe], error)
        if errors:
            modules[call.site.module].append((errors, call.autos))

    def serves(recipe: str, errors: dict[str, float]) -> bool:
        return recipe in errors and errors[recipe] <= tolerance

    suggested = {}
    for module, found in modules.items():
        if all(serves(recipe, errors) for errors, autos in found for recipe in autos):
            suggested[module] = AUTO
        else:
            serving = (r for r in BY_SPEED if all(serves(r, errors) for errors, _ in found))
            suggested[module] = next(serving, OFF)
    return suggested


def _in_edge(edge: tuple[int, int], times: Iterable[_When]) -> Callable[[_When], bool]:
    """Whether a step is among the first or the last of all that ran."""
    (first, last), steps = edge, {when.step for when in times} - {None}
    inside = {*range(first), *range(len(steps) - last, len(steps))}
    return lambda when: when.step in inside


def _edge(calls: list[_Found], tolerance: float) -> tuple[int, int] | None:
    """(first steps, last steps) of a pipeline: the split by which the calls of all steps come to
    the fastest recipes, in their order, where edges and middle have one each for a module. None:
    no split is better than none, or no steps were counted."""
    steps = {when.step for call in calls for when in call.errors} - {None}
    n, order = len(steps), (AUTO, *BY_SPEED, OFF)
    if not steps or steps != set(range(n)):
        return None
    modules = {call.site.module: i for i, call in enumerate(calls) if call.errors}
    beyond = torch.zeros(len(calls), len(order), n + 1)  # calls up to a step
    for call in calls:
        for when, errors in call.errors.items():
            for i, recipe in enumerate(order[:-1] if when.step is not None else ()):
                names = call.autos if recipe == AUTO else (recipe,)
                if not all(errors.get(name, math.inf) <= tolerance for name in names):
                    beyond[modules[call.site.module], i, when.step + 1] += 1
    beyond = beyond.cumsum(2)

    def cost(split: tuple[int, int]) -> tuple[int, int]:
        first, last = split
        middle = beyond[:, :, n - last] - beyond[:, :, first]
        edges = beyond[:, :, n] - middle
        places = [(calls == 0).int().argmax(1).sum().item() for calls in (edges, middle)]
        return places[0] * (first + last) + places[1] * (n - first - last), first + last

    splits = [(first, last) for first in range(n) for last in range(n - first)]
    best = min(splits, key=cost, default=(0, 0))
    return best if best != (0, 0) else None


def _totals(
    calls: list[_Found], parts: dict[str | None, Callable], by_stage: dict[str | None, dict]
) -> dict[str, Total]:
    """Diagnosis.totals. A policy takes a recipe only where that is predicted to be faster."""
    found = collections.defaultdict(lambda: Total(0.0, 0.0, 0.0))

    def add(name: str, error: float, ms: float, sdpa_ms: float) -> None:
        worst, *times = found[name]
        found[name] = Total(max(worst, error), times[0] + ms, times[1] + sdpa_ms)

    for call in calls:
        for when, errors in call.errors.items():
            times = call.times.get(when, {})
            sdpa_ms = next((each.sdpa for each in times.values()), 0.0)
            ms = {name: (each.ours, each.sdpa) for name, each in times.items()}
            ms[SDPA] = sdpa_ms, sdpa_ms
            for name, error in errors.items():
                add(name, error, *ms.get(name, (0.0, 0.0)))
            stage = next(stage for stage, wanted in parts.items() if wanted(when))
            recipe = by_stage[stage][call.site.module]
            names = {AUTO: call.autos, OFF: (SDPA,)}.get(recipe, (recipe,))
            known = [times[name] for name in names if name in times]
            best = cost.fastest(known) if known else None
            taken = best.recipe if best is not None and best.wins else SDPA
            add(POLICY, max(errors[name] for name in names), *ms[taken])
    return dict(found)


def _merged(suggested: dict[str, str]) -> tuple[Rule, ...]:
    """Rules that give each module its recipe: what most get comes last, and before it the others,
    by their name where all calls of one name agree ("*.cross_attention", which also holds where
    blocks are compiled alone), else together where those of neighbouring layers do."""
    if not suggested:
        return ()
    usual = collections.Counter(suggested.values()).most_common(1)[0][0]
    others = {module: recipe for module, recipe in suggested.items() if recipe != usual}
    leaves = (module.rpartition(".")[2] for module in others)
    names = dict.fromkeys(f"*.{leaf}" for leaf in leaves if leaf and not leaf.isdecimal())
    shapes = [Rule(usual, module=name) for name in names]
    shapes += [shape for name in ("*", *names) for shape in _layers(suggested, name)]
    rules = []
    for shape in shapes:
        inside = [module for module in suggested if shape.fits_module(module)]
        recipes = {suggested[module] for module in inside}
        least = 1 if shape.layer == (None, None) else 2  # a name holds in blocks compiled alone too
        if len(recipes) == 1 and sum(module in others for module in inside) >= least:
            rules.append(dataclasses.replace(shape, recipe=recipes.pop()))
            others = {module: r for module, r in others.items() if module not in inside}
    rules += [Rule(recipe, module=module) for module, recipe in others.items()]
    return (*rules, Rule(usual))


def _layers(suggested: dict[str, str], name: str) -> list[Rule]:
    """A rule for each run of layers whose calls of that name (a glob) agree."""
    layers = collections.defaultdict(set)
    for module, recipe in suggested.items():
        if layer_of(module) is not None and Rule(recipe, module=name).fits_module(module):
            layers[layer_of(module)].add(recipe)
    rules = []
    for recipes, run in itertools.groupby(sorted(layers), key=layers.get):
        run = list(run)
        if len(recipes) == 1:
            rules.append(Rule(*recipes, module=name, layer=(run[0], run[-1])))
    return rules
