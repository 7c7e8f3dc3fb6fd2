"""How far each recipe is from exact attention at each attention call of a model, and the policy
that follows.

    found = sage_inductor.diagnose(model, path="policy.json")(*example_inputs)  # print(found)
    torch.compile(model, backend="sage", options={"sage.policy": "policy.json"})

The model runs once, op by op and as it was. Before each attention call that ``sage::sdpa`` can
stand for, a probe gets the call's own q, k, v and mask, and computes what exact attention gives
and what each recipe does: no recipe's error reaches the next call.

Shapes: B batch, H_q and H_kv heads, N_q and N_kv sequence, D head_dim (D_v of v).
"""

import collections
import contextlib
import dataclasses
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_inductor import page, stages
from sage_inductor.at_once import also_at_once
from sage_inductor.backend import run_graphs
from sage_inductor.choose import families, tables
from sage_inductor.choose.decide import autos, decide
from sage_inductor.names import AUTO, OFF, nearest
from sage_inductor.ops.recipe import BY_SPEED, NAMED, canonical
from sage_inductor.ops.reference.exact import attention_exact, masked
from sage_inductor.ops.visibility import as_4d
from sage_inductor.patterns import Decision, Site, reasons, rewrite
from sage_inductor.patterns.call import FULL, Band, Call
from sage_inductor.policy import Policy, Rule, layer_of
from sage_inductor.report import counts, folded, grouped, number_of, path_of, table
from sage_inductor.settings import Settings

# 8-bit q, k and v cost a relative L1 of 0.035 to 0.048 on normal inputs (docs/performance.md). A
# call above this tolerance has inputs that its recipe does not cope with.
TOLERANCE = 0.05
SDPA = "sdpa"  # in the place of a recipe: scaled_dot_product_attention in the model's own dtype
STUDY = Settings(emulate=True, force=True)
QUIET_S = 3.0  # before progress is shown
MOST_SHOWN = 20  # rows of the printed table
MAX_SCORES = 1 << 24  # of exact attention, computed together: 128 MiB


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

    @property
    def badness(self) -> float:
        """The relative L1, by which rows are compared: nothing is worse than NaN."""
        return math.inf if math.isnan(self.relative_l1) else self.relative_l1


@dataclasses.dataclass(frozen=True, repr=False)
class Diagnosis:
    """What `diagnose` found. `print` it for a verdict, a table (of calls that differ in the numbers
    in their module's path alone, the worst) and the policy; `details` has every number, `to_html`
    writes all of it and a heat map."""

    rows: tuple[Row, ...]  # worst relative L1 first
    unmeasured: tuple[Site, ...]  # attention calls without rows; `reason` says why
    suggested: dict[str, str]  # path of a module: the recipe of its calls, or "off"
    tolerance: float
    shown: tuple[str, ...]  # recipes that the table has a column for
    # The same of each stage in which something ran, or which is suggested (stages.py).
    by_stage: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    # Suggested: how many of the first and of the last steps should be in the stage "edge".
    edge: tuple[int, int] | None = None

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

    def details(self) -> str:
        """A table of every measured call and recipe, the worst relative L1 first."""
        cells = (tuple(map(_text, _cells(row))) for row in self.rows)
        return table([COLUMNS, *cells])

    def heat_map(self) -> str:
        """An SVG of the relative L1, modules by recipes: white at the tolerance, blue below it, red
        above."""
        errors = {}
        for row in reversed(self.rows):  # of a module's calls the worst comes last
            errors[_where(row.site), row.recipe] = row.relative_l1
        order = self._modules
        in_order = sorted(self.rows, key=lambda row: order.index(row.site.module))
        modules = dict.fromkeys(_where(row.site) for row in in_order)
        recipes = [name for name in (SDPA, *NAMED) if any(name == r for _, r in errors)]
        return page.heat_map(list(modules), recipes, errors, self.tolerance)

    def to_html(self, path: str | os.PathLike) -> None:
        """Write one page that needs no other file: the heat map, every row (they sort by any column
        and filter by module), the calls that were not measured, and the policy."""
        parts = [
            page.paragraph(self.verdict),
            self.heat_map(),
            page.table(COLUMNS, list(map(_cells, self.rows))),
        ]
        if self.unmeasured:
            rows = [(path_of(site), site.spelling, folded(site)) for site in self.unmeasured]
            parts.append(page.table(UNMEASURED, rows))
        parts.append(page.listing(self.policy.text()))
        with open(path, "w", encoding="utf-8") as file:
            file.write(page.page("sage_inductor: accuracy of attention calls", *parts))

    def _repr_html_(self):
        parts = page.paragraph(self.verdict), self.heat_map(), page.listing(self.policy.text())
        return "\n".join(parts)

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
           "worst head", "its relative L1", "worst row", "its relative L1")  # fmt: skip
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
        row.recipe, row.cos_sim, row.relative_l1, row.rmse, head, of_head, str(where), of_row,
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

    model may be a pipeline of diffusers. With ``callback_on_step_end=sage_inductor.Schedule()``
    errors are given for each step. A stage "edge" of the first and last steps is suggested where it
    makes the other steps faster. With a Schedule that has stages, each stage gets its recipes.

    Gradients are off. The model's code, parameters and mode stay as they are, and what a forward
    pass changes it changes. Dynamo's caches are reset. After three seconds stderr shows how many
    calls are measured (by tqdm, where it is installed). Memory beside the model's own: several
    times [B, H_q, N_q, D_v] in float64 and, on CPU, ten times [B, H_q / H_kv, N_q, N_kv] in fp32.

    Raises ValueError for unknown recipes, a tolerance that is not a positive number, or a model
    that makes no attention call; OSError, before the model runs, if `path` cannot be written.
    """
    named = [recipes] if isinstance(recipes, str) else recipes
    named = tuple(map(canonical, NAMED if named is None else named))
    if not named or not set(named) <= NAMED.keys():
        near = [name for each in named if each not in NAMED and (name := nearest(each, NAMED))]
        meant = f": did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"diagnose: recipes must be of {tuple(NAMED)}, got {named}{meant}")
    if not 0 < tolerance < math.inf:
        raise ValueError(f"diagnose: tolerance must be a positive number, got {tolerance}")
    if path is not None:
        tables.check_file(path)

    def run(*args, **kwargs) -> Diagnosis:
        found = _diagnosed(model, args, kwargs, named, tolerance, recipes is None)
        if path is not None:
            found.save(path)
        return found

    return run


def _diagnosed(
    model, args: tuple, kwargs: dict, recipes: tuple[str, ...], tolerance: float, are_all: bool
) -> Diagnosis:
    probes, refused = [], []
    progress = Progress()

    def see(gm: torch.fx.GraphModule) -> None:
        calls = []
        sites = rewrite(gm, _studied, put=lambda *each: calls.append(each))
        refused.extend(site for site in sites if not site.rewritten)
        # Probes are inserted when all calls are found: to a proof of what a mask says a probe is a
        # call that may write to the mask.
        probes.extend(_Probe(*each, recipes, progress.step) for each in calls)
        progress.expect(len(calls))
        for module in gm.modules():
            if isinstance(module, torch.fx.GraphModule):
                module.recompile()

    with torch.no_grad(), contextlib.closing(progress):
        run_graphs(see, model, args, kwargs)
    if not probes and not refused:
        raise ValueError("diagnose: the model must make an attention call, none was seen")
    for probe in probes:
        if not probe.rows:
            reason = reasons.NOT_RUN()
            refused.append(dataclasses.replace(probe.site, decision=Decision(None, reason)))
    rows = [row for probe in probes for row in probe.rows.values()]
    rows = tuple(sorted(rows, key=lambda row: -row.badness))
    if are_all:  # of all that is measured, what a policy may come to
        recipes = [r for r in recipes if r in BY_SPEED or any(r in p.autos for p in probes)]
    seen = {name for probe in probes for _, name in probe.rows}
    shown = tuple(name for name in (SDPA, *recipes) if name in seen)
    times = list(dict.fromkeys(when for probe in probes for when in probe.errors))
    parts = {stage: (lambda when, stage=stage: when.stage == stage) for stage, _ in times}
    edge = _edge(probes, tolerance) if set(parts) == {None} else None
    if edge is not None:
        in_edge = _in_edge(edge, times)
        parts = {None: lambda when: not in_edge(when), "edge": in_edge}
    by_stage = {stage: _suggested(probes, tolerance, wanted) for stage, wanted in parts.items()}
    suggested = by_stage.pop(None, {})
    return Diagnosis(rows, tuple(refused), suggested, tolerance, shown, by_stage, edge)


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


class _Probe:
    """Measures an attention call whenever the graph is about to make it."""

    def __init__(self, call: Call, site: Site, recipes: tuple[str, ...], done: Callable[[], None]):
        each = {name: dataclasses.replace(STUDY, recipe=name) for name in recipes}
        self.recipes = [name for name in recipes if decide(call, each[name]).recipe is not None]
        self.autos = autos(call)
        self.site, self.band, self.scale = site, call.band, call.scale
        self.rows: dict[tuple[str | None, str], Row] = {}  # by stage and recipe
        self.errors: dict[_When, dict[str, float]] = {}  # by recipe, as Row.badness
        self.done = done
        call.emit.insert(self.measure, (call.q, call.k, call.v, call.attn_mask), None)

    @torch.no_grad()
    def measure(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None) -> None:
        scale = float(q.shape[3] ** -0.5 if self.scale is None else self.scale)
        inputs = q, k, v, attn_mask, self.band, scale
        when = _When(stages.current(), stages.step())
        errors = self.errors.setdefault(when, {})
        site = dataclasses.replace(
            self.site, q=tuple(q.shape), k=tuple(k.shape), stage=when.stage
        )  # fmt: skip
        exact = _exact(*inputs)
        for name in (SDPA, *self.recipes):
            out = _sdpa(*inputs) if name == SDPA else _quantized(*inputs, NAMED[name].encode())
            error = compare(out, exact)
            row = Row(
                site, name, error["CosSim"], error["relative L1"], error["RMSE"],
                *_worst(out, exact),
            )  # fmt: skip
            key = when.stage, name
            self.rows[key] = max(self.rows.get(key, row), row, key=lambda row: row.badness)
            errors[name] = max(errors.get(name, 0.0), row.badness)
        self.done()


class Progress:
    """How many calls are measured, on stderr; nothing is shown in the first seconds."""

    def __init__(self):
        try:
            from tqdm import tqdm
        except ImportError:
            self.bar = None
        else:
            self.bar = tqdm(desc="diagnose", unit=" calls", total=0, delay=QUIET_S, leave=False)
        self.measured = self.expected = 0
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


def _exact(q, k, v, attn_mask, band: Band, scale: float) -> Tensor:
    """Exact attention in float64, a part of the rows of one head at a time."""
    (B, H, N_q, _), N_kv = q.shape, k.shape[2]
    if attn_mask is not None:
        attn_mask = as_4d(attn_mask).expand(B, H, N_q, N_kv)
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


def _quantized(q, k, v, attn_mask, band: Band, scale: float, recipe: str) -> Tensor:
    """``sage::sdpa``. The emulation holds all scores, so on CPU it gets one head of k at a time."""
    H_kv, G = k.shape[1], q.shape[1] // k.shape[1]
    step = 1 if q.device.type == "cpu" else H_kv
    outs = []
    for h in range(0, H_kv, step):
        heads, heads_kv = slice(h * G, (h + step) * G), slice(h, h + step)
        mask = attn_mask
        if mask is not None and as_4d(mask).shape[1] != 1:
            mask = as_4d(mask)[:, heads]
        out, _ = torch.ops.sage.sdpa(
            q[:, heads], k[:, heads_kv], v[:, heads_kv], mask, [], *dataclasses.astuple(band),
            scale, recipe, None, False, False,
        )  # fmt: skip
        outs.append(out)
    return torch.cat(outs, 1)


def _sdpa(q, k, v, attn_mask, band: Band, scale: float) -> Tensor:
    if band != FULL:
        none = q.new_zeros(q.shape[2], k.shape[2])
        attn_mask = masked(none, attn_mask, *dataclasses.astuple(band))
    return F.scaled_dot_product_attention(q, k, v, attn_mask, scale=scale, enable_gqa=True)


def compare(actual: Tensor, exact: Tensor) -> dict[str, float]:
    """CosSim, relative L1 (sum |error| / sum |exact|) and RMSE."""
    actual, exact = actual.double(), exact.double()
    error = actual - exact
    return {
        "CosSim": ((actual * exact).sum() / (actual.norm() * exact.norm())).item(),
        "relative L1": _ratio(error.abs().sum(), exact.abs().sum()).item(),
        "RMSE": error.square().mean().sqrt().item(),
    }


def _worst(actual: Tensor, exact: Tensor) -> tuple[tuple, tuple]:
    """The head and the row with the largest relative L1: (head, it), (batch, head, row, it)."""
    error, size = (actual - exact).abs(), exact.abs()  # [B, H_q, N_q, D_v]
    heads = _ratio(error.sum((0, 2, 3)), size.sum((0, 2, 3)))
    rows = _ratio(error.sum(3), size.sum(3))
    head = int(heads.argmax())
    where = [int(i) for i in torch.unravel_index(rows.argmax(), rows.shape)]
    return (head, heads[head].item()), (*where, rows[tuple(where)].item())


def _ratio(error: Tensor, size: Tensor) -> Tensor:
    return torch.where(error == 0, 0.0, error / size)  # a row that sees nothing is 0, and right


# -- suggesting ----


def _suggested(
    probes: list[_Probe], tolerance: float, wanted: Callable[[_When], bool]
) -> dict[str, str]:
    """The recipe of each module measured at the times that are wanted."""
    modules = collections.defaultdict(list)
    for probe in probes:
        errors = collections.defaultdict(float)
        for when, found in probe.errors.items():
            for recipe, error in found.items() if wanted(when) else ():
                errors[recipe] = max(errors[recipe], error)
        if errors:
            modules[probe.site.module].append((errors, probe.autos))

    def serves(recipe: str, errors: dict[str, float]) -> bool:
        return recipe in errors and errors[recipe] <= tolerance

    suggested = {}
    for module, calls in modules.items():
        if all(serves(recipe, errors) for errors, autos in calls for recipe in autos):
            suggested[module] = AUTO
        else:
            serving = (r for r in BY_SPEED if all(serves(r, errors) for errors, _ in calls))
            suggested[module] = next(serving, OFF)
    return suggested


def _in_edge(edge: tuple[int, int], times: Iterable[_When]) -> Callable[[_When], bool]:
    """Whether a step is among the first or the last of all that ran."""
    (first, last), steps = edge, {when.step for when in times} - {None}
    inside = {*range(first), *range(len(steps) - last, len(steps))}
    return lambda when: when.step in inside


def _edge(probes: list[_Probe], tolerance: float) -> tuple[int, int] | None:
    """(first steps, last steps) of a pipeline: the split by which the calls of all steps come to
    the fastest recipes, in their order, where edges and middle have one each for a module. None:
    no split is better than none, or no steps were counted."""
    steps = {when.step for probe in probes for when in probe.errors} - {None}
    n, order = len(steps), (AUTO, *BY_SPEED, OFF)
    if not steps or steps != set(range(n)):
        return None
    modules = {probe.site.module: i for i, probe in enumerate(probes) if probe.errors}
    beyond = torch.zeros(len(probes), len(order), n + 1)  # calls up to a step
    for probe in probes:
        for when, errors in probe.errors.items():
            for i, recipe in enumerate(order[:-1] if when.step is not None else ()):
                names = probe.autos if recipe == AUTO else (recipe,)
                if not all(errors.get(name, math.inf) <= tolerance for name in names):
                    beyond[modules[probe.site.module], i, when.step + 1] += 1
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
