"""The policy that follows from errors: the fastest recipes within a tolerance, in few rules."""

import collections
import dataclasses
import itertools
import operator
from typing import NamedTuple

import torch
from torch import Tensor

from sage_inductor.choose.cost import fastest
from sage_inductor.names import AUTO, OFF
from sage_inductor.ops.recipe import BY_SPEED
from sage_inductor.ops.sparse.selector import Selection
from sage_inductor.policy import Rule, layer_of
from sage_inductor.study.measure import SDPA, Found

POLICY = "the policy"  # in the place of a recipe: the suggested one of each call
MOST = 0.9  # a list by head keeps at most this part of what one fraction for all heads keeps


class Total(NamedTuple):
    """All measured runs of all calls, by one recipe or by the policy."""

    relative_l1: float  # of the worst call; where there is a list by head, of the worst head
    # Predicted, of the calls that such times are known of; 0: of none.
    ms: float
    sdpa_ms: float


def suggested(
    calls: list[Found], tolerance: float, keeps: dict[str, Rule]
) -> tuple[dict[str | None, dict[str, str]], dict[str, Rule], dict[str, float]]:
    """By stage: the recipe of each module that was measured in it, or the first of keeps, or a list
    by head. Then what these lists are, and the error of the worst head by each."""
    modules = collections.defaultdict(lambda: collections.defaultdict(list))
    lists, worst = {}, {}
    asked = {name: x.keep for name, x in keeps.items() if isinstance(x.keep, Selection)}
    for call in calls:
        for stage, errors in call.errors.items():
            serving = {recipe for recipe, error in errors.items() if error <= tolerance}
            modules[stage][call.site.module].append((serving, call.autos, call.heads[stage]))

    def recipe(found: list[tuple[set[str], tuple[str, ...], dict[str, Tensor]]]) -> str:
        of_all = set.intersection(*(serving for serving, *_ in found))
        if kept := next((name for name in keeps if name in of_all), None):
            keep, error = _by_head(asked[kept], [heads for *_, heads in found], tolerance, asked)
            if keep is asked[kept]:
                return kept
            name = f"keep {keep.given()}"
            lists[name] = dataclasses.replace(keeps[kept], keep=keep)
            worst[name] = max(error, worst.get(name, 0.0))
            return name
        if all(serving.issuperset(autos) for serving, autos, _ in found):
            return AUTO
        return next((name for name in BY_SPEED if name in of_all), OFF)

    of_stages = modules.items()
    by_stage = {stage: {x: recipe(found) for x, found in of.items()} for stage, of in of_stages}
    return by_stage, lists, worst


def _by_head(
    one: Selection, heads: list[dict[str, Tensor]], tolerance: float, asked: dict[str, Selection]
) -> tuple[Selection, float]:
    """The given one, or one with a fraction for each head, the first of those asked for by which it
    is within the tolerance at all calls; and the worst error of a head. No head depends on what
    others keep. If each is within the tolerance so are all: their error is a weighted mean."""
    field = "top_k" if one.sparsity is None else "sparsity"
    # In cubes what keeps all is none of them: without lists, tokens have another order.
    like = {name: torch.tensor(getattr(x, field), dtype=torch.float64)
            for name, x in asked.items() if all(name in each for each in heads)
            and x._replace(**{field: 0}) == one._replace(**{field: 0})
            and not (one.layout and x.keeps_all)}  # fmt: skip
    if len({each[name].shape for each in heads for name in like}) != 1:
        return one, 0.0
    errors = torch.stack([torch.stack([each[x] for each in heads]).amax(0) for x in like])
    first = (errors <= tolerance).int().argmax(0, keepdim=True)  # errors: [like, H]
    worst = errors.gather(0, first).max().item()
    given = torch.stack([x.expand_as(errors[0]) for x in like.values()]).gather(0, first)[0]
    of_all = torch.tensor(getattr(one, field), dtype=torch.float64)
    less, kept = ((x if field == "top_k" else 1 - x).mean() for x in (given, of_all))
    if worst <= tolerance and less < MOST * kept:
        one = one._replace(**{field: tuple(given.tolist())})
    return one, worst


def totals(
    calls: list[Found], by_stage: dict[str | None, dict], worst_heads: dict[str, float]
) -> dict[str, Total]:
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
            of_policy = max((errors | worst_heads)[name] for name in names)
            ms[POLICY] = ms[taken]
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
