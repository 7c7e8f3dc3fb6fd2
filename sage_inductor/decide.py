"""What becomes of a call: quantized with a recipe, or as it was, and why.

A call is rewritten if `sage::sdpa` can stand for it (patterns/eligible.py) and is measured to be
faster there, by the table (tiles.crossover) or here and now (Settings.clock), unless the settings
say otherwise. Which recipe it asks for is said by the first rule of the policy that it fits, else
by the settings' recipe.
"""

import dataclasses
import fnmatch
import functools
import itertools
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch

from sage_inductor import patterns
from sage_inductor.ops import recipe as recipes
from sage_inductor.ops import tiles
from sage_inductor.ops.sdpa import kernel
from sage_inductor.patterns.call import (
    CAUSAL,
    FULL,
    Band,
    Call,
    Decision,
    Site,
    module_path,
    value_of,
)
from sage_inductor.patterns.eligible import why_not
from sage_inductor.patterns.graph import guarded

AUTO = "auto"
OFF = "off"
MEASURED = (9, 0)  # the compute capability that tiles.CROSSOVER was measured on
WIN = 1.02  # faster by more than the spread of the medians


@dataclasses.dataclass(frozen=True)
class Rule:
    """The recipe of the calls that fit every field; see sage_inductor/policy.py. Ranges are
    inclusive, None: open."""

    recipe: str  # a name in NAMED, AUTO or OFF
    module: str = "*"  # a glob, of Site.module
    layer: tuple[int | None, int | None] = (None, None)  # the first number in Site.module
    head_dim: tuple[int, ...] = ()  # q's; none: any
    length: tuple[int | None, int | None] = (None, None)  # N_q


class Choice(NamedTuple):
    """What a call may become."""

    recipe: str  # a name in NAMED
    warpgroups: int | None = None  # Recipe's

    @property
    def full(self) -> recipes.Recipe:
        return Decision(self.recipe, "", self.warpgroups).full

    @property
    def tile(self) -> str:
        """What a reason says of the tile, unless it is the table's."""
        of = "the Triton kernel" if self.warpgroups == 0 else f"{self.warpgroups} warpgroups"
        return "" if self.warpgroups is None else f" with {of}"


@dataclasses.dataclass(frozen=True)
class Trial:
    """What is timed in a call's place: random tensors of its sizes, as they are while compiling."""

    device: torch.device
    dtype: torch.dtype
    q: tuple[int, ...]  # [B, H_q, N_q, D]
    k: tuple[int, ...]  # [B, H_kv, N_kv, D]
    v: tuple[int, ...]  # [B, H_kv, N_kv, D_v]
    band: Band  # not at the bottom right
    mask: tuple[int, ...] | None  # attn_mask's shape
    mask_dtype: torch.dtype | None
    choices: tuple[Choice, ...]


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the user asked for; see sage_inductor/config.py for each field's meaning."""

    recipe: str = AUTO
    emulate: bool = False
    force: bool = False
    strict: bool = False
    policy: tuple[Rule, ...] = ()
    portable: bool = False  # exporting: no guards on lengths, only kernels that travel
    # Instead of the table: ms of a trial's choices and of SDPA's backends, these by name; an
    # error's message for one that failed.
    clock: Callable[[Trial], dict[Choice | str, float | str]] | None = None


def rewrite(gm: torch.fx.GraphModule, settings: Settings) -> list[Site]:
    """The attention calls of `gm` rewritten, in place, as the settings ask for."""
    return patterns.rewrite(gm, functools.partial(decide, settings=settings), settings.portable)


def decide(call: Call, settings: Settings) -> Decision:
    """What becomes of `call`; nothing is changed yet."""
    choice, reason = _choose(call, settings)
    if choice is None:
        return Decision(None, reason)
    if settings.portable:
        reason += _left_behind(call, choice.recipe)
    return Decision(choice.recipe, reason, choice.warpgroups)


def _choose(call: Call, settings: Settings) -> tuple[Choice | None, str]:
    """(the recipe, why this one) or (None, why the call stays as it was)."""
    if settings.recipe == OFF and not settings.policy:
        return None, "the recipe is 'off'"
    reason = call.refused or why_not(call)
    if reason:
        return None, reason
    rules = enumerate(settings.policy, 1)
    number = next((i for i, rule in rules if _fits(call, rule, settings)), None)
    if number is None:
        return _asked(call, settings, settings.recipe)
    wanted = settings.policy[number - 1].recipe
    if wanted == OFF:
        return None, f"the policy says off (rule {number})"
    choice, reason = _asked(call, settings, wanted)
    return choice, f"{reason} (rule {number} of the policy)"


def _fits(call: Call, rule: Rule, settings: Settings) -> bool:
    """Whether `rule` is about `call`. A dynamic length is asked for last: the answer is a guard."""
    q, (first, last) = value_of(call.q), rule.length
    return (
        fits_module(module_path(call.node), rule)
        and (not rule.head_dim or int(q.shape[3]) in rule.head_dim)
        and (first is None or _at_least(q.shape[2], first, settings))
        and (last is None or not _at_least(q.shape[2], last + 1, settings))
    )


def fits_module(module: str, rule: Rule) -> bool:
    """Whether `rule` is about calls that `module` makes."""
    layer, (first, last) = layer_of(module), rule.layer
    if layer is None and rule.layer != (None, None):
        return False
    return (
        fnmatch.fnmatchcase(module, rule.module)
        and (first is None or layer >= first)
        and (last is None or layer <= last)
    )


def layer_of(module: str) -> int | None:
    """The first number in a path: 3 of ``decoder.layers.3.attn``."""
    return next((int(name) for name in module.split(".") if name.isdecimal()), None)


def _asked(call: Call, settings: Settings, wanted: str) -> tuple[Choice | None, str]:
    """`_choose`, where a recipe is asked for."""
    if wanted == OFF:
        return None, "the recipe is 'off'"
    q = value_of(call.q)
    if q.device.type == "cpu":
        if not settings.emulate:
            return None, "on CPU attention stays as it was (sage.emulate=True studies the accuracy)"
        return Choice("sage2-8b" if wanted == AUTO else wanted), "emulated"

    names = autos(call, settings.portable) if wanted == AUTO else (wanted,)
    refused = {}  # each reason once, in order
    for recipe in names:
        taken, reason = _on_gpu(call, settings, recipe, names)
        if taken is not None:
            return taken, reason
        refused[reason] = None
    return None, "; ".join(refused)


def _left_behind(call: Call, recipe: str) -> str:
    """What the reason says of a package's call that a kernel which does not travel runs faster."""
    device, masked = value_of(call.q).device, call.attn_mask is not None
    args = device, recipes.NAMED[recipe], _head_dim(call), masked
    if kernel(*args, portable=False) == kernel(*args, portable=True):
        return ""
    sm = "sm_{}{}".format(*tiles.capability(device))
    return f"; by the portable kernel: {sm}'s faster one cannot travel in a package"


def autos(call: Call, portable: bool) -> tuple[str, ...]:
    """What "auto" may become for `call`; on CPU, what it may on the GPU that was measured."""
    device = value_of(call.q).device
    capability = tiles.capability(device) if device.type == "cuda" else MEASURED
    return candidates(capability, _head_dim(call), _kind(call), portable)


def candidates(
    capability: tuple[int, int], head_dim: int, kind: str, portable: bool
) -> tuple[str, ...]:
    """The recipes of "auto": the first that is measured to be faster."""
    if capability < (8, 9):
        return ("sage1",)
    if capability == (9, 0) and not portable:
        masked = kind not in ("full", "causal")  # which the portable kernel computes
        if masked or tiles.hopper(capability, "fp8", head_dim, kind == "causal", sys.maxsize):
            return "sage2-8b-rows", "sage2-8b"
    if capability[0] == 10:  # INT8 is slow there: see ops/attention.py
        return ("sage2-8b-fp8qk",)
    return ("sage2-8b",)


def _on_gpu(
    call: Call, settings: Settings, recipe: str, names: tuple[str, ...]
) -> tuple[Choice | None, str]:
    capability, head_dim = tiles.capability(value_of(call.q).device), _head_dim(call)
    try:
        r = recipes.NAMED[recipe]
        tiles.tile(capability, r.qk, r.pv, head_dim, call.attn_mask is not None)
    except ValueError as error:
        return None, str(error)
    if settings.emulate or settings.force:
        return Choice(recipe), "forced"
    if call.out.dtype == torch.float32:
        return None, "fp32 is asked for (sage.force=True overrides; autocast decides otherwise)"
    if call.out.requires_grad:
        return None, "training: the backward recomputes exact attention (sage.force=True overrides)"
    trial = _trial(call, names) if settings.clock and not settings.portable else None
    if trial is not None:
        return _autotuned(call, settings.clock(trial), recipe, trial.choices)
    return _never_slower(call, settings, recipe, capability, head_dim)


def _trial(call: Call, names: tuple[str, ...]) -> Trial | None:
    """None where the table decides: a size that nothing is known of; and what none of SDPA's
    backends is the rival of, flex_attention's windows and bands at the bottom right."""
    q, k, v, mask = (value_of(x) for x in (call.q, call.k, call.v, call.attn_mask))
    shapes = [tuple(_hint(n) for n in x.shape) for x in (q, k, v, mask) if x is not None]
    shifted = call.band.bottom_right and shapes[0][2] != shapes[1][2]
    if None in itertools.chain(*shapes) or shifted or _kind(call) == "flex window":
        return None
    of_mask = (None, None) if mask is None else (shapes.pop(), mask.dtype)
    band = dataclasses.replace(call.band, bottom_right=False)
    choices = tuple(each for name in names for each in _choices(call, name))
    return Trial(q.device, call.out.dtype, *shapes, band, *of_mask, choices)


def _choices(call: Call, recipe: str) -> list[Choice]:
    """`recipe` by each tile that may be the fastest. Of a dynamic N_q, of which one length would be
    timed, by the table's alone: it is read when the call runs."""
    r, n_q = recipes.NAMED[recipe], value_of(call.q).shape[2]
    plain = call.attn_mask is None and call.band in (FULL, CAUSAL) and isinstance(n_q, int)
    if not plain or (r.qk, r.granularity) != ("int8", "per_row"):
        return [Choice(recipe)]
    capability = tiles.capability(value_of(call.q).device)
    rivals = tiles.rivals(capability, r.pv, _head_dim(call), call.band == CAUSAL)
    return [Choice(recipe, warpgroups) for warpgroups in rivals]


def _autotuned(call, found, recipe, choices) -> tuple[Choice | None, str]:
    """The fastest of `choices`, if that is one of `recipe` and faster than SDPA, by what the clock
    `found`."""
    dims = [*value_of(call.q).shape, *value_of(call.k).shape]
    hints = f" at {[_hint(n) for n in dims[:4]]}" * any(isinstance(n, torch.SymInt) for n in dims)
    failed = [(each, found[each]) for each in choices if isinstance(found[each], str)]
    times = {each: ms for each, ms in found.items() if not isinstance(ms, str)}
    ours = {each: times.pop(each) for each in choices if each in times}
    what = f"autotuned{hints}"
    why = "".join(f"; {each.recipe}{each.tile} failed: {error}" for each, error in failed)
    if not ours or not times:
        missing = "no recipe" if times else "no backend of SDPA"
        return None, f"{what}: {missing} could be timed{why}"
    ratio = min(times.values()) / min(ours.values())
    if ratio < WIN:
        return None, f"{what}: SDPA is {'faster' if ratio < 1 else 'as fast'} ({ratio:.2f}x){why}"
    fastest = min(ours, key=ours.get)
    reason = f"{what}: {ratio:.2f}x the fastest of SDPA{fastest.tile and ','}{fastest.tile}{why}"
    return fastest if fastest.recipe == recipe else None, reason


def _never_slower(call, settings, recipe, capability, head_dim) -> tuple[Choice | None, str]:
    q, k = value_of(call.q), value_of(call.k)
    heads = q.shape[0] * q.shape[1]
    kind = _kind(call)
    key = capability, recipe, head_dim, kind
    packaged = settings.portable and _left_behind(call, recipe) != ""
    one = q.shape[3] == call.out.shape[3]  # v of another head_dim was not measured
    rows = (tiles.PACKAGED.get(key, []) if packaged else tiles.crossover(*key)) if one else []
    shortest = next((N for B_H, N in rows if _at_least(heads, B_H, settings)), None)
    sm = "sm_{}{}".format(*capability)
    what = f"{recipe} with head_dim {head_dim if one else (q.shape[3], call.out.shape[3])}"
    what += f"{f', {kind}' * (kind != 'full')}{' in a package' * packaged} on {sm}"
    if shortest is None:
        return None, f"never slower: no length was measured from which {what}, B*H={heads} wins"
    if not all(_at_least(x.shape[2], shortest, settings) for x in (q, k)):
        return None, f"never slower: {what} wins from N={shortest} (sage.force=True overrides)"
    return Choice(recipe), f"N >= {shortest}"


def _head_dim(call: Call) -> int:
    """The wider of k's and v's; a dynamic one is specialised."""
    return max(int(value_of(call.q).shape[3]), int(value_of(call.v).shape[3]))


def _kind(call: Call) -> str:
    """One of tiles.KINDS."""
    if call.attn_mask is None:
        flex = call.spelling == "flex_attention" and call.band.kind == "window"
        return "flex window" if flex else call.band.kind
    mask = value_of(call.attn_mask)
    if guarded(mask.shape[-2] == 1):
        return "keys"
    return "mask" if mask.dtype == torch.bool else "bias"


def _at_least(n, least: int, settings: Settings) -> bool:
    """n >= least. A dynamic n is guarded: each side of the crossover gets its own graph. An
    exported program has one graph for all, chosen by the example's sizes. Of an n that depends on
    data: whether every n is."""
    return guarded((n if not settings.portable or _hint(n) is None else _hint(n)) >= least)


def _hint(n) -> int | None:
    """A size while compiling, unguarded; None if it depends on data."""
    return n.node.hint if isinstance(n, torch.SymInt) else n
