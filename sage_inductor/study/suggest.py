"""The policy that follows from errors: the fastest recipes within a tolerance, in few rules."""

import collections
import dataclasses
import itertools
import operator
from collections.abc import Iterable
from typing import NamedTuple

from sage_inductor.choose.cost import fastest
from sage_inductor.names import AUTO, OFF
from sage_inductor.ops.recipe import BY_SPEED
from sage_inductor.policy import Rule, layer_of
from sage_inductor.study.measure import SDPA, Found

POLICY = "the policy"  # in the place of a recipe: the suggested one of each call


class Total(NamedTuple):
    """All measured runs of all calls, by one recipe or by the policy."""

    relative_l1: float  # of the worst call
    # Predicted, of the calls that such times are known of; 0: of none.
    ms: float
    sdpa_ms: float


def suggested(
    calls: list[Found], tolerance: float, keeps: Iterable[str] = ()
) -> dict[str | None, dict[str, str]]:
    """By stage: the recipe of each module that was measured in it, or the first of keeps."""
    modules = collections.defaultdict(lambda: collections.defaultdict(list))
    for call in calls:
        for stage, errors in call.errors.items():
            serving = {recipe for recipe, error in errors.items() if error <= tolerance}
            modules[stage][call.site.module].append((serving, call.autos))

    def recipe(found: list[tuple[set[str], tuple[str, ...]]]) -> str:
        of_all = set.intersection(*(serving for serving, _ in found))
        if kept := next((name for name in keeps if name in of_all), None):
            return kept
        if all(serving.issuperset(autos) for serving, autos in found):
            return AUTO
        return next((name for name in BY_SPEED if name in of_all), OFF)

    of_stages = modules.items()
    return {stage: {x: recipe(found) for x, found in of.items()} for stage, of in of_stages}


def totals(calls: list[Found], by_stage: dict[str | None, dict]) -> dict[str, Total]:
    """Diagnosis.totals. A policy takes a recipe only where that is predicted to be faster."""
    found = collections.defaultdict(lambda: Total(0.0, 0.0, 0.0))
    for call in calls:
        for stage, errors in call.errors.items():
            times = call.times.get(stage, {})
            sdpa_ms = next((each.sdpa for each in times.values()), 0.0)
            ms = {name: (each.ours, each.sdpa) for name, each in times.items()}
            ms[SDPA] = sdpa_ms, sdpa_ms
            recipe = by_stage[stage][call.site.module]
            names = {AUTO: call.autos, OFF: (SDPA,)}.get(recipe, (recipe,))
            known = [times[name] for name in names if name in times]
            best = fastest(known) if known else None
            taken = best.recipe if best is not None and best.wins else SDPA
            ms[POLICY], of_policy = ms[taken], max(errors[name] for name in names)
            for name, error in [*errors.items(), (POLICY, of_policy)]:
                (worst, *times), more = found[name], ms.get(name, (0.0, 0.0))
                found[name] = Total(max(worst, error), *map(operator.add, times, more))
    return dict(found)


def merged(suggested: dict[str, str], keeps: dict[str, Rule] | None = None) -> tuple[Rule, ...]:
    """Rules that give each module its recipe: what most get comes last, and before it the others,
    by their name where all calls of one name agree ("*.cross_attention", which also holds where
    blocks are compiled alone), else together where those of neighbouring layers do."""
    if not suggested:
        return ()
    usual = collections.Counter(suggested.values()).most_common(1)[0][0]

    def given(name: str, where: Rule) -> Rule:
        rule = (keeps or {}).get(name) or Rule(name)
        return dataclasses.replace(where, recipe=rule.recipe, keep=rule.keep)

    others = {module: recipe for module, recipe in suggested.items() if recipe != usual}
    leaves = (module.rpartition(".")[2] for module in others)
    names = dict.fromkeys(f"*.{leaf}" for leaf in leaves if leaf and not leaf.isdecimal())
    shapes = [Rule(OFF, module=name) for name in names]
    shapes += [shape for name in ("*", *names) for shape in _layers(suggested, name)]
    rules = []
    for shape in shapes:
        inside = [module for module in suggested if shape.fits_module(module)]
        recipes = {suggested[module] for module in inside}
        least = 1 if shape.layer == (None, None) else 2  # a name holds in blocks compiled alone too
        if len(recipes) == 1 and sum(module in others for module in inside) >= least:
            rules.append(given(recipes.pop(), shape))
            others = {module: r for module, r in others.items() if module not in inside}
    rules += [given(recipe, Rule(OFF, module=module)) for module, recipe in others.items()]
    return (*rules, given(usual, Rule(OFF)))


def _layers(suggested: dict[str, str], name: str) -> list[Rule]:
    """A rule for each run of layers whose calls of that name (a glob) agree."""
    layers = collections.defaultdict(set)
    for module, recipe in suggested.items():
        if layer_of(module) is not None and Rule(OFF, module=name).fits_module(module):
            layers[layer_of(module)].add(recipe)
    rules = []
    for recipes, run in itertools.groupby(sorted(layers), key=layers.get):
        run = list(run)
        if len(recipes) == 1:
            rules.append(Rule(OFF, module=name, layer=(run[0], run[-1])))
    return rules
