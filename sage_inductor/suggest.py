"""The policy that follows from errors: the fastest recipes within a tolerance, in few rules."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from sage_inductor.choose.cost import fastest
from sage_inductor.measure import SDPA, Found, When
from sage_inductor.names import AUTO, OFF
from sage_inductor.ops.recipe import BY_SPEED
from sage_inductor.policy import Rule, layer_of

POLICY = "the policy"  # in the place of a recipe: the suggested one of each call


class Total(NamedTuple):
    """All measured runs of all calls, by one recipe or by the policy."""

    relative_l1: float  # of the worst call
    # Predicted, of the calls that such times are known of; 0: of none.
    ms: float
    sdpa_ms: float


def suggestion(
    calls: list[Found], tolerance: float, steps: int
) -> tuple[dict, tuple[int, int] | None, dict]:
    """Diagnosis.by_stage, with the recipes of no stage as those of None; Diagnosis.edge and
    totals. steps: of the pipeline, measured or not."""
    whens = list(dict.fromkeys(when for call in calls for when in call.errors))
    parts = {stage: (lambda when, stage=stage: when.stage == stage) for stage, _ in whens}
    edge = edge_of(calls, tolerance, steps) if set(parts) == {None} else None
    if edge is not None:
        inside = {*range(edge[0]), *range(steps - edge[1], steps)}
        parts = {
            None: lambda when: when.step not in inside, "edge": lambda when: when.step in inside
        }  # fmt: skip
    by_stage = {stage: suggested(calls, tolerance, wanted) for stage, wanted in parts.items()}
    return by_stage, edge, totals(calls, parts, by_stage)


def suggested(
    calls: list[Found], tolerance: float, wanted: Callable[[When], bool]
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


def edge_of(calls: list[Found], tolerance: float, steps: int) -> tuple[int, int] | None:
    """(first steps, last steps) of a pipeline of so many: the split by which the calls of all
    measured steps come to the fastest recipes, in their order, where edges and middle have one each
    for a module. None: no split is better than none, or no steps were counted."""
    measured = sorted({when.step for call in calls for when in call.errors} - {None})
    n, order, at = len(measured), (AUTO, *BY_SPEED, OFF), {s: i for i, s in enumerate(measured)}
    modules = {call.site.module: i for i, call in enumerate(calls) if call.errors}
    beyond = torch.zeros(len(calls), len(order), n + 1)  # calls up to a step
    for call in calls:
        for when, errors in call.errors.items():
            for i, recipe in enumerate(order[:-1] if when.step is not None else ()):
                names = call.autos if recipe == AUTO else (recipe,)
                if not all(errors.get(name, math.inf) <= tolerance for name in names):
                    beyond[modules[call.site.module], i, at[when.step] + 1] += 1
    beyond = beyond.cumsum(2)

    def places(first: int, last: int) -> list[int]:
        """In that order, of the edges' recipes and of the middle's."""
        middle = beyond[:, :, n - last] - beyond[:, :, first]
        edges = beyond[:, :, n] - middle
        return [(calls == 0).int().argmax(1).sum().item() for calls in (edges, middle)]

    def cost(split: tuple[int, int]) -> tuple[int, int]:
        (edges, middle), inside = places(*split), sum(split)
        return edges * inside + middle * (n - inside), inside

    splits = [(first, last) for first in range(n) for last in range(n - first)]
    first, last = min(splits, key=cost, default=(0, 0))
    if first == last == 0:
        return None
    # Steps between the last that was measured of one part and the first of the other are of the
    # slower part.
    edges, middle = places(first, last)
    slow_edges = edges >= middle
    begin = measured[first] if slow_edges else measured[first - 1] + 1
    end = measured[n - 1 - last] + 1 if slow_edges else [*measured, steps][n - last]
    return first and begin, last and steps - end


def totals(
    calls: list[Found], parts: dict[str | None, Callable], by_stage: dict[str | None, dict]
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
            best = fastest(known) if known else None
            taken = best.recipe if best is not None and best.wins else SDPA
            add(POLICY, max(errors[name] for name in names), *ms[taken])
    return dict(found)


def merged(suggested: dict[str, str]) -> tuple[Rule, ...]:
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
