"""What becomes of a call: quantized with a recipe, or as it was, and why.

A call is rewritten if `sage::sdpa` can stand for it (patterns/eligible.py) and is faster there:
predicted from what was measured (measured.py), or timed here and now (Settings.benchmark), unless
the settings say otherwise. Which recipe it asks for is said by the first rule of the policy that it
fits, else by the call itself (``sage_inductor.attention(recipe=...)``), else by the settings'
recipe.
"""

import dataclasses
import functools
import itertools

import torch
import triton

from sage_inductor import cost, measured, options, patterns
from sage_inductor.autotune import BenchmarkCase, Candidate, rivals
from sage_inductor.cost import Prediction, Sizes
from sage_inductor.errors import SageOptionError
from sage_inductor.measured import Family
from sage_inductor.ops import recipe as recipes
from sage_inductor.ops.attention import tiles
from sage_inductor.ops.attention.select import Problem, select
from sage_inductor.ops.compat import statically_known_true
from sage_inductor.ops.compile import travels
from sage_inductor.ops.formats import Q_BLOCK, TRAINED_HEAD_DIM, pad_head_dim
from sage_inductor.ops.selector import Selection
from sage_inductor.options import AUTO, OFF, TRAINED_BY
from sage_inductor.patterns.call import Call, Decision, Site, module_path, value_of
from sage_inductor.patterns.eligible import (
    LISTS_IN_TRAINING,
    why_no_g,
    why_not,
    why_not_by_itself,
    why_not_selected,
    why_not_trained,
)
from sage_inductor.patterns.graph import as_int, guarded, specialised
from sage_inductor.patterns.shared_kv import stacks
from sage_inductor.policy import CallDescription, ask, layer_of
from sage_inductor.settings import Settings

# Queries and keys from which block lists beat compiled flex_attention. The preparation of k and v
# weighs more in shorter ones, and more where fewer blocks are listed. H200, 2026-11-23, torch 2.11:
# bench/lists.py, with 10 to 100 % of the blocks.
LISTS_FROM = 16384
ON_CPU = "on CPU attention stays as it was (sage.emulate=True studies the accuracy)"
FP32 = "q, k and v are fp32, which is quantized only by sage.force=True"
EXACT_BACKWARD = "the output requires a gradient, and sage.training is 'off'"


def rewrite(gm: torch.fx.GraphModule, settings: Settings) -> list[Site]:
    """The attention calls of `gm` rewritten, in place, as the settings ask for."""
    return patterns.rewrite(gm, functools.partial(decide, settings=settings), settings.portable)


def decide(call: Call, settings: Settings) -> Decision:
    """What becomes of `call`; nothing is changed yet."""
    if call.recipe is not None:
        check_asked(call.recipe)
    if settings.recipe == OFF and not settings.policy:
        return Decision(None, "the recipe is 'off'")
    reason = call.refused or why_not(call)
    if reason:
        # First what no change of the model lifts: else it would be the next reason.
        return Decision(None, "; ".join([ON_CPU] * _stays_on_cpu(call, settings) + [reason]))
    wanted, rule, selection, training = _ruled(call, settings)
    if training == AUTO and (settings.emulate or settings.force):
        training = OFF  # "auto" is about speed
    if training != OFF and call.out.requires_grad and not settings.portable:
        return _trained(call, settings, wanted, rule, selection, training)
    call = dataclasses.replace(call, selection=selection)
    candidate, reason = _choose(call, settings, wanted, rule)
    if candidate is None:
        return Decision(None, reason)
    if settings.portable and (refused := _of_one_block(call, candidate.recipe)):
        return Decision(None, refused)
    if _stacks(call, candidate.recipe):
        reason += "; all batches share k and v, which are prepared once"
    if settings.portable:
        reason += _left_behind(call, candidate.recipe)
    elif call.out.requires_grad:
        reason += "; its backward is exact attention's"
    return Decision(candidate.recipe, reason, candidate.warpgroups, selection)


def _stays_on_cpu(call: Call, settings: Settings) -> bool:
    q = value_of(call.q)
    return isinstance(q, torch.Tensor) and q.device.type == "cpu" and not settings.emulate


def check_asked(recipe: str) -> None:
    """Raise SageOptionError unless it is one that sage_inductor.attention may be asked for."""
    try:
        options.check("recipe", recipe, "sage_inductor.attention: ")
    except ValueError as error:
        raise SageOptionError(str(error)) from None


def _choose(
    call: Call, settings: Settings, wanted: str | None, rule: str
) -> tuple[Candidate | None, str]:
    """(the recipe, why this one) or (None, why the call stays as it was). wanted and rule: what the
    policy says."""
    if wanted is None:
        named = settings.recipe != OFF and call.recipe not in (None, AUTO)
        return _asked(call, settings, call.recipe if named else settings.recipe)
    if wanted == OFF:
        return None, f"the policy says off ({rule})"
    reason = call.selection and why_not_selected(call)
    if reason:
        return None, f"{reason} ({rule} of the policy)"
    candidate, reason = _asked(call, settings, wanted)
    if call.selection is not None:
        reason += f"; keep {call.selection.given()}"
    return candidate, f"{reason} ({rule} of the policy)"


def _trained(
    call: Call, settings: Settings, wanted: str | None, rule: str, selection: Selection | None,
    training: str,
) -> Decision:  # fmt: skip
    """What becomes of a call that needs gradients, where it is said how they are computed."""
    if wanted == OFF:
        return Decision(None, f"the policy says off ({rule})")
    if wanted is None and OFF in (settings.recipe, call.recipe):
        return Decision(None, "the recipe is 'off'")
    q = value_of(call.q)
    if q.device.type == "cpu" and not settings.emulate:
        return Decision(None, ON_CPU)
    if call.out.dtype == torch.float32 and not (settings.emulate or settings.force):
        return Decision(None, FP32)
    capability = None if q.device.type == "cpu" else tiles.capability(q.device)
    by = TRAINED_BY if training == AUTO else training
    if selection:
        return Decision(None, LISTS_IN_TRAINING)
    reason = why_not_trained(call, by, capability)
    if training != AUTO:
        return Decision(None, reason) if reason else Decision(by, "asked for, forward and backward")
    reason = reason or why_not_by_itself(call)
    if reason:
        return Decision(None, reason)
    candidate, reason = _timed(call, settings, by, (by,))
    return Decision(candidate and candidate.recipe, reason)


def _ruled(call: Call, settings: Settings) -> tuple[str | None, str, Selection | None, str]:
    """(the recipe that the policy asks for, the rule that does, the blocks of keys to keep, how to
    train the call); (None, "", None, the settings' training) where no rule fits."""
    q, module = value_of(call.q), module_path(call.node)
    if not callable(settings.policy):
        D, reaches = as_int(q.shape[3]), lambda n: _at_least(q.shape[2], n, settings)
        rules = enumerate(settings.policy, 1)
        fits = (each for each in rules if each[1].fits(module, D, reaches, settings.stage))
        number, rule = next(fits, (0, None))
        if rule is None:
            return None, "", None, settings.training
        keeps_all = rule.keep is None or rule.keep.top_k == 1
        training = settings.training if rule.training is None else rule.training
        return rule.recipe, f"rule {number}", None if keeps_all else rule.keep, training
    lengths = (_length(value_of(x).shape[2], settings) for x in (call.q, call.k))
    described = CallDescription(
        module, layer_of(module), int(q.shape[3]), *lengths, _kind(call), call.out.dtype, q.device,
        settings.stage,
    )  # fmt: skip
    try:
        recipe = ask(settings.policy, described)
    except ValueError as error:
        raise SageOptionError(str(error)) from error.__cause__
    return recipe, "the function" if recipe else "", None, settings.training


def _asked(call: Call, settings: Settings, wanted: str) -> tuple[Candidate | None, str]:
    """As `_choose`, for the recipe that the settings or a rule ask for."""
    wanted = recipes.canonical(wanted)
    if wanted == OFF:
        return None, "the recipe is 'off'"
    q = value_of(call.q)
    if q.device.type == "cpu":
        if not settings.emulate:
            return None, ON_CPU
        recipe = "sage2-8b" if wanted == AUTO else wanted
        try:
            select(_problem(call, recipe, None))
        except ValueError as error:
            return None, str(error)
        return Candidate(recipe), "emulated"

    names = autos(call) if wanted == AUTO else (wanted,)
    refused = {}  # each reason once, in order
    suits = _suits_hopper(call, "sage2-8b-per-token" if wanted == AUTO else wanted)
    lost = tiles.hopper_is_lost(tiles.capability(q.device)) if suits else None
    lost = [lost] if lost else []
    for recipe in names:
        taken, reason = _on_gpu(call, settings, recipe, names)
        if taken is not None:
            return taken, "; ".join([reason, *lost])
        if reason:
            refused[reason] = None
    return None, "; ".join([*refused, *lost])


def _of_one_block(call: Call, recipe: str) -> str | None:
    """Why a package cannot be made by its example. Where aten works on blocks of queries, one block
    is a dimension of 1, which torch takes for one that stays 1; and a package checks no guard."""
    n_q = _hint(value_of(call.q).shape[2])
    by_blocks = call.selection is not None or recipes.NAMED[recipe].of_qk.block_scaled
    is_dynamic = isinstance(value_of(call.q).shape[2], torch.SymInt)
    if not by_blocks or not is_dynamic or n_q is None or n_q > Q_BLOCK:
        return None
    return f"the example of a package's dynamic length must be more than {Q_BLOCK}, got {n_q}"


def _left_behind(call: Call, recipe: str) -> str:
    """What a package's reason adds where a faster kernel exists that cannot travel: its Triton
    may call kernels in another way than lowering/launcher.h."""
    device = value_of(call.q).device
    if device.type == "cpu" or travels():
        return ""
    capability = tiles.capability(device)
    if select(_problem(call, recipe, capability)).kernel.traced:
        return ""
    sm, version = "sm_{}{}".format(*capability), triton.__version__
    return f"; with Triton {version} the faster kernel of {sm} cannot travel in a package"


def _problem(call: Call, recipe: str, capability: tuple[int, int] | None) -> Problem:
    masked, size = call.attn_mask is not None, call.block_size
    return Problem(capability, recipes.NAMED[recipe], _head_dim(call), masked, block_size=size)


def autos(call: Call) -> tuple[str, ...]:
    """What "auto" may become for `call`; on CPU, what it may on the GPUs that were measured."""
    device = value_of(call.q).device
    capability = tiles.capability(device) if device.type == "cuda" else measured.MEASURED
    return auto_recipes(capability, _head_dim(call))


def recipes_of(capability: tuple[int, int], family: Family) -> tuple[str, ...]:
    """What "auto" may become for the calls of a family, the first mostly the fastest; of those that
    train, () where there is nothing but SDPA."""
    if family.kind not in cost.TRAINED:
        return auto_recipes(capability, max(family.head_dim, family.head_dim_v))
    one = family.head_dim == family.head_dim_v <= TRAINED_HEAD_DIM
    return (TRAINED_BY,) if one and why_no_g(capability) is None else ()


def auto_recipes(capability: tuple[int, int], head_dim: int) -> tuple[str, ...]:
    """The recipes of "auto": the fastest of them, if it is faster than SDPA. The first mostly is:
    sage2-8b-per-token in 512 of 524 calls (H200, 2026-11-23: bench/regret.py)."""
    if capability < (8, 9):
        return ("sage1",)
    if tiles.hopper(capability, "fp8", head_dim, False, tiles.ANY):
        return "sage2-8b-per-token", "sage2-8b"
    if capability[0] == 10:  # INT8 is slow there: see ops/attention/triton.py
        return ("sage2-8b-fp8qk",)
    return ("sage2-8b",)


def _on_gpu(
    call: Call, settings: Settings, recipe: str, names: tuple[str, ...]
) -> tuple[Candidate | None, str]:
    capability = tiles.capability(value_of(call.q).device)
    try:
        select(_problem(call, recipe, capability))
    except ValueError as error:
        return None, str(error)
    if settings.emulate or settings.force:
        return Candidate(recipe), "forced"
    if call.out.dtype == torch.float32:
        return None, FP32
    if call.out.requires_grad:
        return None, EXACT_BACKWARD
    return _timed(call, settings, recipe, names)


def _timed(
    call: Call, settings: Settings, recipe: str, names: tuple[str, ...]
) -> tuple[Candidate | None, str]:
    """The recipe, where it is the fastest of `names` and faster than SDPA, as timed here and now or
    as predicted."""
    case = _case(call, names) if settings.benchmark and not settings.portable else None
    if case is not None:
        return _autotuned(call, settings.benchmark(case), recipe, case.candidates)
    return _never_slower(call, settings, recipe, names)


def _case(call: Call, names: tuple[str, ...]) -> BenchmarkCase | None:
    """What is timed in the call's place. None where times are predicted: for a size that depends on
    data, and for calls that none of SDPA's backends computes (flex_attention's windows and block
    lists, bands at the bottom right)."""
    q, k, v, mask = (value_of(x) for x in (call.q, call.k, call.v, call.attn_mask))
    shapes = [tuple(_hint(n) for n in x.shape) for x in (q, k, v, mask) if x is not None]
    shifted = call.band.bottom_right and shapes[0][2] != shapes[1][2]
    if None in itertools.chain(*shapes) or shifted or _kind(call) in ("flex window", "blocks"):
        return None
    of_mask = (None, None) if mask is None else (shapes.pop(), mask.dtype)
    if all(_stacks(call, name) for name in names):
        shapes[1:] = ((1, *shape[1:]) for shape in shapes[1:])
    band = dataclasses.replace(call.band, bottom_right=False)
    candidates = tuple(each for name in names for each in _tiles(call, name))
    return BenchmarkCase(
        q.device,
        call.out.dtype,
        *shapes,
        band,
        *of_mask,
        candidates,
        rivals(),
        measured.flash_attention(),
        names == (TRAINED_BY,),
    )


def _tiles(call: Call, recipe: str) -> list[Candidate]:
    """`recipe` by each tile that may be the fastest. With a dynamic N_q only one length would be
    timed; there the tile is left to the table, which is read when the call runs."""
    is_fixed = isinstance(value_of(call.q).shape[2], int)
    if recipe == TRAINED_BY or not (is_fixed and _suits_hopper(call, recipe)):
        return [Candidate(recipe)]
    capability, pv = tiles.capability(value_of(call.q).device), recipes.NAMED[recipe].pv
    rivals = tiles.rivals(capability, pv, _head_dim(call), call.band.kind == "causal")
    return [Candidate(recipe, warpgroups) for warpgroups in rivals]


def _suits_hopper(call: Call, recipe: str) -> bool:
    """Whether the Hopper kernel computes such calls, where it is there."""
    mask = None if call.attn_mask is None else value_of(call.attn_mask).dtype
    return tiles.suits_hopper(recipes.NAMED[recipe], _head_dim(call), mask)


def _autotuned(call, found, recipe, candidates) -> tuple[Candidate | None, str]:
    """The fastest of `candidates` by the times `found`, if it beats SDPA and is of `recipe`: each
    recipe of "auto" is asked in turn."""
    dims = [*value_of(call.q).shape, *value_of(call.k).shape]
    hints = f" at {[_hint(n) for n in dims[:4]]}" * any(isinstance(n, torch.SymInt) for n in dims)
    failed = [(each, found[each]) for each in candidates if isinstance(found[each], str)]
    times = {each: ms for each, ms in found.items() if not isinstance(ms, str)}
    ours = {each: times.pop(each) for each in candidates if each in times}
    what = f"autotuned{hints}"
    why = "".join(f"; {each.recipe}{each.tile} failed: {error}" for each, error in failed)
    if not ours or not times:
        missing = "no recipe" if times else "no backend of SDPA"
        return None, f"{what}: {missing} could be timed{why}"
    ratio = min(times.values()) / min(ours.values())
    if ratio < cost.MIN_SPEEDUP:
        return None, f"{what}: SDPA is {'faster' if ratio < 1 else 'as fast'} ({ratio:.2f}x){why}"
    fastest = min(ours, key=ours.get)
    reason = f"{what}: {ratio:.2f}x the fastest of SDPA{fastest.tile and ','}{fastest.tile}{why}"
    if measured.flash_attention() != measured.TORCHS_FLASH:
        reason += f"; SDPA's flash attention is {measured.flash_attention()}"
    return fastest if fastest.recipe == recipe else None, reason


def _never_slower(
    call: Call, settings: Settings, recipe: str, names: tuple[str, ...]
) -> tuple[Candidate | None, str]:
    """The recipe, where measured.py predicts it to be the fastest of `names` and faster than SDPA.
    A dynamic length is guarded, with the length from which the recipe wins. A recipe that was not
    measured, where another of `names` was, has no reason to report."""
    if _kind(call) == "blocks":
        return _by_lists(call, settings, recipe)
    q, k, v = (value_of(x) for x in (call.q, call.k, call.v))
    kind = _kind(call) + "-training" * (recipe == TRAINED_BY)
    family = Family(specialised(q.shape[3]), specialised(v.shape[3]), kind)
    gpu = measured.gpu_name(q.device)
    what = f"{recipe} with {family}, B*H={q.shape[0] * q.shape[1]}"
    if settings.portable and (behind := _left_behind(call, recipe)):
        return None, f"never slower: {what} in a package was not measured{behind}"
    lengths = q.shape[2], k.shape[2]
    fixed = all(isinstance(n, int) or settings.portable and _hint(n) for n in lengths)
    known = any(measured.knows(gpu, family, (name,)) for name in names)
    if (fixed or not known) and not all(_at_least(n, cost.SHORTEST, settings) for n in lengths):
        return None, f"never slower: a call with fewer than {cost.SHORTEST} queries or keys"
    if not known:
        error = _calibrate(q.device, family, names, settings)
        if error:
            return None, f"never slower: {what} was not measured on {gpu}: {error}"
    if not measured.knows(gpu, family, (recipe,)):
        return None, ""

    heads = tuple(_floor(n, settings) for n in (q.shape[0], q.shape[1], k.shape[1]))
    stacked = {name: _stacks(call, name) for name in names}

    def predict(name: str, N: int | None = None) -> Prediction | None:
        """With the lengths that are not fixed all of N."""
        N_q, N_kv = (N if N and isinstance(n, torch.SymInt) else _hint(n) for n in lengths)
        shift = N_kv - N_q if call.band.bottom_right else 0
        left = None if call.band.left is None else call.band.left - shift
        right = None if call.band.right is None else call.band.right + shift
        sizes = Sizes(*heads, N_q, N_kv, left, right)
        return measured.predict(gpu, family, name, sizes, stacked[name])

    def at_most(found: Prediction) -> float:
        """ms; of the first, which mostly is the fastest, as predicted."""
        return found.ours * (1 + found.error * (found.recipe != names[0]))

    if fixed:
        found = {name: each for name in names if (each := predict(name))}
        if not found[recipe].wins:
            return None, f"never slower: {what} is {found[recipe]}"
        fastest = min(found.values(), key=at_most)
        if fastest.recipe != recipe:
            return None, ""  # that one is asked, too
        return Candidate(recipe), str(fastest)
    first = cost.first_length(lambda N: predict(recipe, N).wins)
    if first is None:
        return None, f"never slower: {what} wins at no length (sage.force=True overrides)"
    least = (cost.SHORTEST if isinstance(n, int) else first for n in lengths)
    if not all(_at_least(n, at, settings) for n, at in zip(lengths, least, strict=True)):
        return None, f"never slower: {what} wins from N={first} (sage.force=True overrides)"
    hint = _hint(lengths[0])
    now = "" if None in map(_hint, lengths) else f", {predict(recipe)} at N={hint}"
    return Candidate(recipe), f"N >= {first}{now}"


def _by_lists(call: Call, settings: Settings, recipe: str) -> tuple[Candidate | None, str]:
    """The recipe, where it was measured to be faster by block lists than flex_attention is."""
    device = value_of(call.q).device
    behind = _left_behind(call, recipe) if settings.portable else ""
    lost = behind or tiles.hopper_is_lost(tiles.capability(device))
    known = measured.gpu_name(device) == measured.H200 and _suits_hopper(call, recipe) and not lost
    if not known or pad_head_dim(_head_dim(call)) not in (64, 128):
        return None, f"never slower: {recipe} by block lists was not measured{behind}"
    lengths = value_of(call.q).shape[2], value_of(call.k).shape[2]
    if not all(_at_least(n, LISTS_FROM, settings) for n in lengths):
        return None, f"never slower: {recipe} by block lists wins from N={LISTS_FROM}"
    return Candidate(recipe), f"by block lists, N >= {LISTS_FROM}"


def _calibrate(device: torch.device, family: Family, names: tuple[str, ...], settings) -> str:
    """Measure the family, or say why not."""
    if family.kind == "flex window":
        return "flex_attention computes such a window itself"
    cannot = not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing()
    if cannot or not settings.calibrate:
        return "run `python -m sage_inductor tune` there"
    return measured.calibrate(device, family, names[:1]) or ""  # the first mostly is the fastest


def _stacks(call: Call, recipe: str) -> bool:
    return recipe in recipes.NAMED and stacks(call, recipes.NAMED[recipe])


def _floor(n, settings: Settings) -> int:
    """n, or of a dynamic one the power of 2 below it, guarded: more heads are no slower."""
    hint = _hint(n)
    if isinstance(n, int) or settings.portable and hint:
        return hint
    power = 1 << (hint or 1).bit_length() - 1
    return power if guarded(n >= power) else 1


def _head_dim(call: Call) -> int:
    """The wider of k's and v's; a dynamic one is specialised."""
    return max(specialised(value_of(x).shape[3]) for x in (call.q, call.v))


def _kind(call: Call) -> str:
    """One of cost.KINDS, or "blocks": lists of them."""
    if call.block_size is not None:
        return "blocks"
    if call.attn_mask is None:
        flex = call.spelling == "flex_attention" and call.band.kind == "window"
        return "flex window" if flex else call.band.kind
    mask = value_of(call.attn_mask)
    if guarded(mask.shape[-2] == 1):
        return "keys"
    return "mask" if mask.dtype == torch.bool else "bias"


def _at_least(n, minimum: int, settings: Settings) -> bool:
    """n >= minimum. A dynamic n is guarded: each side of it gets its own graph. An exported program
    has one graph for all, chosen by the example's sizes. An n that depends on data cannot be
    guarded: the answer is yes only if it holds for every n."""
    hint = _hint(n)
    if hint is None:
        return statically_known_true(n >= minimum)
    return bool((hint if settings.portable else n) >= minimum)


def _length(n, settings: Settings):
    """The length that a policy function gets. Comparing a dynamic one is a guard, but in exported
    programs it is the example's, as in `_at_least`. One that depends on data is 1."""
    hint = _hint(n)
    return 1 if hint is None else hint if settings.portable else n


def _hint(n) -> int | None:
    """A size while compiling, unguarded; None if it depends on data."""
    if isinstance(n, torch.SymInt):
        return n.node.hint if n.node.has_hint() else None
    return n
