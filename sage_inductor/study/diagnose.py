"""How far each recipe is from exact attention at each attention call of a model, and the policy
that follows.

    found = sage_inductor.diagnose(model, path="policy.json")(*example_inputs)  # print(found)
    torch.compile(model, backend="sage", options={"sage.policy": "policy.json"})

    with sage_inductor.diagnosing(pipe.transformer) as found:  # on a run's own inputs
        pipe(prompt)

The model runs op by op and as it was. measure.py has what is measured meanwhile, suggest.py the
policy that follows.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from sage_inductor.backend import inputs_later, op_by_op
from sage_inductor.choose import families, tables
from sage_inductor.names import AUTO, some_of
from sage_inductor.ops.compat import called_instead
from sage_inductor.ops.recipe import BY_SPEED, NAMED, RecipeName
from sage_inductor.policy import KeepOption, Policy, Rule, kept
from sage_inductor.study import page
from sage_inductor.study.findings import Findings, counts, number_of
from sage_inductor.study.measure import SDPA, Measured, Row
from sage_inductor.study.suggest import POLICY, Total, merged, suggested, totals

# 8-bit q, k and v cost a relative L1 of 0.035 to 0.048 on normal inputs
# (docs/measurements/attention.md). A call above this tolerance has inputs that its recipe does not
# cope with.
TOLERANCE = 0.05


@dataclasses.dataclass(frozen=True, repr=False)
class Diagnosis(Findings):
    """What `diagnose` found, or `diagnosing` when its block has ended. `print` it for a verdict, a
    table (of calls that differ only in the numbers in their module's path, the worst) and the
    policy; `details` has every number, `to_html` writes all of it and a heat map."""

    rows: tuple[Row, ...]  # worst relative L1 first
    suggested: dict[str, str]  # path of a module: the recipe of its calls, or "off"
    tolerance: float
    shown: tuple[str, ...]  # recipes that the table has a column for, if they have rows
    # The same of each stage in which something ran (stages.py).
    by_stage: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    # All calls together, by recipe; "the policy": the suggested recipe of each call.
    totals: dict[str, Total] = dataclasses.field(default_factory=dict)
    keeps: dict[str, Rule] = dataclasses.field(default_factory=dict)  # what is called so above

    COLUMNS = ("module", "call", "q", "k", "dtype", "mask", "recipe", "CosSim", "relative L1",
               "RMSE", "worst head", "relative L1 of that head", "worst batch, head, row",
               "relative L1 of that row", "ms", "SDPA's ms")  # fmt: skip
    HEAD = "call", "q", "k", "dtype", "mask", "suggested"
    NUMBERS = "relative L1", "errors"

    @property
    def policy(self) -> Policy:
        """The suggested recipes, in few rules."""
        others = {x: of for x, of in self.by_stage.items() if of != self.suggested}
        rules = ((rule, stage) for stage, of in others.items() for rule in merged(of, self.keeps))
        rules = (dataclasses.replace(rule, stage=stage) for rule, stage in rules)
        return Policy((*rules, *merged(self.suggested, self.keeps)))

    def save(self, path: str | os.PathLike) -> None:
        """Write the policy where ``sage.policy`` finds it, with what was measured as a note."""
        errors = collections.defaultdict(list)
        for row in self.rows:
            stage = "" if row.site.stage is None else f" in {row.site.stage}"
            errors[row.site.module + stage].append(f"{row.recipe} {row.relative_l1:.4g}")
        said = {module: ", ".join(each) for module, each in sorted(errors.items())}
        note = {"tolerance": self.tolerance, "versions": families.versions(), "relative L1": said}
        self.policy.save(path, note)

    @property
    def verdict(self) -> str:
        """One line: "57 modules, relative L1 <= 0.05: auto (56), off (1)"."""
        if not (self.rows or self.unmeasured):
            return "nothing was measured: the block has not ended, or has failed before a call"
        text = f"{number_of(len(self._modules), 'module')}, relative L1 <= {self.tolerance}"
        if self.suggested:
            text += f": {counts(collections.Counter(map(self._said, self.suggested.values())))}"
        for stage, recipes in self.by_stage.items():
            of_stage = collections.Counter(map(self._said, recipes.values()))
            text += f"; in {stage}: {counts(of_stage)}"
        return text + self._without_rows

    def _said(self, recipe: str) -> str:
        """The policy has the numbers of a list that was found."""
        return "keep by head" if recipe in self.keeps and recipe not in self.shown else recipe

    def _same(self, row: Row) -> tuple[str, ...]:
        recipes = self.by_stage.get(row.site.stage, self.suggested)
        return row.site.spelling, *row.sizes, self._said(recipes[row.site.module])

    def __str__(self):
        gain = filter(None, [self._gain()])
        lines = [self.verdict, *self._table(), *gain, *self._not_measured()]
        if self._modules:
            lines += ["", f"the fastest recipes with a relative L1 of at most {self.tolerance}:"]
            lines.append(self.policy.text().rstrip())
        return "\n".join(lines)

    @property
    def _modules(self) -> list[str]:
        return list(dict.fromkeys(itertools.chain(self.suggested, *self.by_stage.values())))

    def _gain(self) -> str:
        """Empty if no times are known."""
        *_, ms, sdpa_ms = self.totals.get(POLICY, (0.0, 0.0))
        if not sdpa_ms:
            return ""
        gpu = tables.whose_times(torch.device(self.rows[0].site.device))
        text = f"attention takes {ms:.3g} ms with the policy and {sdpa_ms:.3g} ms with SDPA"
        return f"{text} (predicted from times of {gpu})"

    def heat_map(self) -> str:
        """An SVG of the relative L1, modules by recipes, with a legend: white at the tolerance,
        blue below it, red above. SDPA is what is compared with, and has no colour."""
        # The worst of a module's calls comes last.
        errors = {(row.where, row.recipe): row.relative_l1 for row in reversed(self.rows)}
        order, measured = self._modules, {row.recipe for row in self.rows}
        in_order = sorted(self.rows, key=lambda row: order.index(row.site.module))
        modules = list(dict.fromkeys(row.where for row in in_order))
        recipes = [name for name in (SDPA, *NAMED, *self.keeps) if name in measured]
        return page.heat_map(modules, recipes, errors, self.tolerance, plain=(SDPA,))

    def to_html(self, path: str | os.PathLike) -> None:
        """Write one page that needs no other file: the error and the predicted time of each recipe
        and of the policy, the heat map, every row (they sort by any column and filter by module),
        the calls that were not measured with what to do, the policy, and the versions."""
        parts = *self._summary(), self._every_row().html(), *self._foot()
        page.write(path, "sage_inductor: accuracy of attention calls", *parts)

    def _repr_html_(self):
        return "\n".join(self._summary())

    def _summary(self) -> list[str]:
        names, gain = (SDPA, *NAMED, *self.keeps, POLICY), self._gain()
        rows = [(name, *self._total(name)) for name in names if name in self.totals]
        return [
            page.paragraph(self.verdict),
            page.Table(TOTALS, rows).html(),
            page.paragraph(f"ms: {gain}. {OF_TIMES}" if gain else "ms: such calls were not timed."),
            self.heat_map(),
            page.paragraph(self.policy.text(), "pre"),
        ]

    def _total(self, name: str) -> tuple[page.Cell, ...]:
        """Cells from TOTALS[1] on."""
        error, ms, sdpa_ms = self.totals[name]
        within = [row.badness <= self.tolerance for row in self.rows if row.recipe == name]
        calls = f"{sum(within)} of {len(within)}" if within else ""
        return error, calls, *((ms, sdpa_ms, sdpa_ms - ms) if sdpa_ms else ("", "", ""))


TOTALS = "recipe", "worst relative L1", "calls within the tolerance", "ms", "SDPA's ms", "ms gained"
OF_TIMES = (
    "They are of all measured runs together, without the rest of the model. The policy leaves a "
    "call to SDPA where no gain is predicted. A recipe without ms was not timed for such calls."
)


@inputs_later
def diagnose(
    model, *, recipes: RecipeName | Sequence[RecipeName] | None = None,
    path: str | os.PathLike | None = None, tolerance: float = TOLERANCE,
    keep: Sequence[KeepOption] = (),
) -> Callable[..., Diagnosis]:  # fmt: skip
    """``diagnose(model)(*args, **kwargs)`` runs ``model(*args, **kwargs)`` once and measures every
    recipe at every attention call.

    model: a module, a function, or a pipeline of diffusers. With
    ``callback_on_step_end=sage_inductor.Schedule(edge=(5, 2))`` each stage gets its errors and
    recipes.
    recipes: one name or several; without it all. Those that run on the inputs' device
    are measured (on CPU every one, emulated).
    path: where to write the suggested policy.
    tolerance: the relative L1, the sum of |out - exact| over that of |exact|, up to which a recipe
    is suggested. A module gets the fastest recipe that is within the tolerance at each of its
    calls. That is "auto", if every recipe that "auto" may become there is within it (on CPU: may
    become on the GPU that was measured). Else it is a named one, and "off" if there is none.
    keep: what a rule's `keep` may be, from the least on; recipes must be one name then. A module
    gets the first of them that is within the tolerance at each of its calls, in each stage. If
    there is none, it gets what it would get without keep. Each of its heads gets the first of those
    that differ in `top_k` or `sparsity` alone, if each is within the tolerance by one of them and
    the mean of what they keep is less than 0.9 times as much.

    Gradients are off. The model's code, parameters and mode stay as they are, and what a forward
    pass changes it changes. Dynamo's caches are reset. After three seconds stderr shows how many
    calls are measured (by tqdm, where it is installed). Some heads are measured at a time: one of
    k, or more while a tensor has at most 16M numbers. Additional memory: several times
    [H_q / H_kv, N_q, D_v] in float64 and, on CPU, ten times [H_q / H_kv, N_q, N_kv] in fp32.

    Returns a function of the model's arguments, which returns the Diagnosis.

    Raises ValueError for unknown recipes, a tolerance that is not between 0 and 1, a keep that a
    policy may not have, or a model that makes no attention call; TypeError for inputs beside the
    model; OSError, before the model runs, if `path` cannot be written.
    """
    measuring = _measuring("diagnose", recipes, path, tolerance, keep)

    def run(*args, **kwargs) -> Diagnosis:
        if isinstance(model, nn.Module):
            _check_alone("diagnose", model)
        with measuring() as (found, measured), torch.no_grad():
            measured(model, args, kwargs)
        return found

    return run


_open: list[nn.Module] = []  # the models of the blocks of `diagnosing` that have not ended


@contextlib.contextmanager
def diagnosing(
    model: nn.Module, *, recipes: RecipeName | Sequence[RecipeName] | None = None,
    path: str | os.PathLike | None = None, tolerance: float = TOLERANCE, every: int = 1,
    keep: Sequence[KeepOption] = (),
) -> Iterator[Diagnosis]:  # fmt: skip
    """``with diagnosing(model) as found:`` measures the calls of `model` in the block as `diagnose`
    does, on the inputs that they get there. When the block has ended, `found` is the Diagnosis.

    model: a module that the block calls, such as ``pipe.transformer``.
    recipes, path, tolerance, keep: see `diagnose`.
    every: with 10, each tenth call is measured, from the first on.

    All else in the block runs in eager, also what is compiled. Gradients are as the block has them.
    The memory is that of `diagnose`, however many calls there are: the worst errors of each
    attention call are kept.

    If the block raises, `found` has what was measured before, and no policy is written.
    Raises TypeError if model is no nn.Module; ValueError, beside those of `diagnose`, if the block
    does not call the model, or every is less than 1; RuntimeError in a block of the same model, of
    a part of it, or of a model around it.
    """
    if not isinstance(model, nn.Module):
        what = "model must be an nn.Module that the block calls, such as pipe.transformer"
        hint = "a function takes diagnose(function)(*args)"
        raise TypeError(f"diagnosing: {what}, got {type(model)}; {hint}")
    if not (isinstance(every, int) and every >= 1):
        raise ValueError(f"diagnosing: every must be a number of calls from 1 on, got {every!r}")
    model = getattr(model, "_orig_mod", model)  # torch.compile(model) calls it
    _check_alone("diagnosing", model)
    calls = 0

    def call(*args, **kwargs):
        nonlocal calls
        calls += 1
        with called_instead(model, None) as itself:
            if (calls - 1) % every:
                return itself(*args, **kwargs)
            return measured(model, args, kwargs)

    with _measuring("diagnosing", recipes, path, tolerance, keep)() as (found, measured):
        _open.append(model)
        try:
            with called_instead(model, call):
                yield found
        finally:
            _open.remove(model)
        if not calls:
            missing = f"no call of this {type(model).__name__} was seen"
            raise ValueError(f"diagnosing: the block must call the model, as model(...): {missing}")


def _check_alone(name: str, model: nn.Module) -> None:
    """Raise RuntimeError in a block that measures calls of the model already."""
    around = {part for each in _open for part in each.modules()}
    if model in around or not set(_open).isdisjoint(model.modules()):
        what = f"this {type(model).__name__}, a part of it or a model around it"
        opened = f"{name}: a block of diagnosing is open that measures {what}"
        raise RuntimeError(f"{opened}: that block must end first")


def _measuring(
    name: str, recipes: str | Sequence[str] | None, path: str | os.PathLike | None,
    tolerance: float, keep: Sequence[KeepOption],
) -> Callable[..., contextlib.AbstractContextManager]:  # fmt: skip
    """Gives a context of (a Diagnosis, what runs a model and measures it), after a check of what is
    given. The Diagnosis is filled when the context ends."""
    named: tuple = some_of(tuple(NAMED), name, recipes)
    recipe = named[0] if len(named) == 1 else AUTO
    if not isinstance(keep, (list, tuple)):
        what = "keep must be a list of what a rule's keep may be, from the least on"
        raise ValueError(f"{name}: {what}, got {keep!r}")
    selections = [kept(each, recipe, f"{name}: ") for each in keep]
    keeps = {f"keep {each.given()}": Rule(recipe, keep=each) for each in selections}
    if not (isinstance(tolerance, int | float) and 0 < tolerance < 1):
        what = "tolerance must be a fraction, as 0.05 for 5 %"
        raise ValueError(f"{name}: {what}, got {tolerance!r}")
    if path is not None:
        try:
            tables.check_file(path)
        except OSError as error:
            text = f"{name}: path cannot be written: {error.strerror}"
            raise type(error)(error.errno, text, os.fspath(path)) from None

    @contextlib.contextmanager
    def measuring() -> Iterator[tuple[Diagnosis, Callable]]:
        measured, found = Measured(named, keeps), Diagnosis((), (), {}, tolerance, ())
        try:
            with op_by_op(measured.see, all_graphs=True) as run:
                yield found, functools.partial(measured.run, run)
        finally:
            calls, shown = list(measured.calls.values()), (SDPA, *named, *keeps)
            rows = [x for call in calls for of in call.rows.values() for x in of.values()]
            rows = tuple(sorted(rows, key=lambda row: -row.badness))
            if recipes is None:  # of all that is measured, what a policy may come to
                by_auto = {name for call in calls for name in call.autos}
                shown = tuple(name for name in shown if name in {SDPA, *BY_SPEED, *by_auto})
            by_stage, lists, of_heads = suggested(calls, tolerance, keeps)
            refused, called = tuple(measured.refusals()), keeps | lists
            of_all, usual = totals(calls, by_stage, of_heads), by_stage.pop(None, {})
            filled = Diagnosis(rows, refused, usual, tolerance, shown, by_stage, of_all, called)
            vars(found).update(vars(filled))
        if not (found.rows or found.unmeasured):
            raise ValueError(f"{name}: the model must make an attention call, none was seen")
        if path is not None:
            found.save(path)

    return measuring
