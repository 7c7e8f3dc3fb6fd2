"""What becomes of a call: quantized with a recipe, or as it was, and why.

A call is rewritten if `sage::sdpa` can stand for it (patterns/eligible.py) and is faster there,
unless the settings say otherwise. Which recipe it asks for is said by the first rule of the policy
that fits it, else by the call itself (``sage_inductor.attention(recipe=...)``), else by the
settings' recipe.

    call -> `_request`    what the policy, the call and the settings ask for
         -> recipes       those whose kernels compute it
         -> their times   measured now (timing.py), or predicted from earlier times (tables.py)
         -> the fastest   if it is faster than SDPA
"""

import dataclasses
import functools
import re
from typing import Any

import torch
import triton

from sage_inductor import patterns
from sage_inductor.choose import cost, families, tables, timing
from sage_inductor.choose.candidates import Candidate, auto_recipes, by_tiles
from sage_inductor.choose.cost import Prediction, Sizes
from sage_inductor.choose.families import Family
from sage_inductor.choose.timing import BenchmarkCase
from sage_inductor.names import AUTO, OFF, check_recipe
from sage_inductor.ops import compat
from sage_inductor.ops import recipe as recipes
from sage_inductor.ops.attention import tiles
from sage_inductor.ops.attention.select import tile_of
from sage_inductor.ops.call_shape import CallShape
from sage_inductor.ops.compile import travels
from sage_inductor.ops.decode_call import MAX_QUERIES
from sage_inductor.ops.formats import Q_BLOCK, pad_head_dim
from sage_inductor.ops.layout import placed
from sage_inductor.ops.sparse.selector import Selection
from sage_inductor.ops.symbols import as_int, guarded, hint, specialised
from sage_inductor.ops.training.gradients import FP8_BACKWARD
from sage_inductor.ops.visibility import CAUSAL, FULL
from sage_inductor.options import Settings
from sage_inductor.patterns import eligible, fastvideo, reasons, sla
from sage_inductor.patterns.call import Call, Decision, Site
from sage_inductor.patterns.graph import statically_true, value_of
from sage_inductor.patterns.module_path import module_path
from sage_inductor.patterns.reasons import Reason
from sage_inductor.patterns.shared_kv import stacks
from sage_inductor.policy import CallDescription, ask, kept, layer_of

# Queries and keys from which block lists beat compiled flex_attention, and SLA's Triton kernel at
# head_dim 128 by 1.4 to 3.6. The preparation of k and v weighs more in shorter ones, and more where
# fewer blocks are listed: 10 % in what was timed. Another mask was not timed with them. H200,
# 2026-11-23 and 11-30, torch 2.11: bench/lists.py, bench/sparse_peers.py.
LISTS_FROM = 16384
# The same for FastVideo's kernel for Hopper, whose sizes of blocks become a mask. It takes 1.3 to
# 1.8 times as long from 75,648 tokens on, and 1.1 to 1.4 with 32,768, if no block is cut.
FASTVIDEO_FROM = 65536
# Tokens of a packed document, on average, from which 8 bits beat FlashAttention 2's varlen kernel:
# by 1.2 to 3.2 from here on, by 1.13 to 1.26 with 1,024 tokens, not with 512. H200, 2026-11-29,
# torch 2.11: bench/packed.py.
DOCUMENTS_FROM = 2048
# The same for FlashAttention 3's kernel, at head_dim 128 where nothing is causal. It takes 1.06 to
# 1.28 times as long in nine packings, 1.00 to 1.15 in causal ones, 0.7 to 1.01 at other head_dims.
DOCUMENTS_FROM_FA3 = 6144


def rewrite(gm: torch.fx.GraphModule, settings: Settings) -> list[Site]:
    """The attention calls of `gm` rewritten, in place, as the settings ask for."""
    return patterns.rewrite(gm, functools.partial(decide, settings=settings), settings.portable)


def decide(call: Call, settings: Settings) -> Decision:
    """What becomes of `call`; nothing is changed yet."""
    if call.recipe is not None:
        check_recipe("sage_inductor.attention: recipe", call.recipe)
    if settings.recipe == OFF and not settings.policy:
        return Decision(None, reasons.IS_OFF())
    reason = call.refused or eligible.why_not(call)
    if reason:
        if reason.cause is reasons.DROPOUT and call.out.requires_grad and settings.training == OFF:
            reason = reasons.DROPOUT_IN_TRAINING(call.dropout_p)  # else it would be the next reason
        # First what no change of the model lifts, for the same cause.
        device = getattr(value_of(call.q), "device", None)
        stays = device is not None and device.type == "cpu" and not settings.emulate
        return Decision(None, reasons.joined([reasons.ON_CPU()] * stays + [reason]))
    shape = call.shape
    wanted, training, selection, rule = _request(call, shape, settings)
    if wanted == OFF:
        return Decision(None, reasons.POLICY_OFF(rule) if rule else reasons.IS_OFF())
    call = dataclasses.replace(call, selection=selection)
    if training != OFF and call.out.requires_grad and not settings.portable:
        return _trained(call, shape._replace(trains=True), settings, training)
    if selection is not None:
        shape = shape._replace(block_size=call.block_size, has_tail=selection.tail)
    unselected = selection and eligible.why_not_selected(call, settings.portable)
    found = Decision(None, unselected) if unselected else _recipe(call, shape, settings, wanted)
    kept = f"; keep {selection.given()}" if selection is not None and not unselected else ""
    if found.recipe and selection is not None and selection.layout is not None:
        kept += f"; {placed(recipes.NAMED[found.recipe])}"
    reason = found.reason + kept + (f" ({rule} of the policy)" if rule else "")
    found = found._replace(reason=reason)
    if found.recipe is None:
        return found if found.decodes else _stays(call, shape, settings, found, wanted)
    recipe = found.recipe
    if settings.portable and (refused := _unportable(call, shape, recipe)):
        return Decision(None, refused)
    if stacks(call, recipes.NAMED[recipe]):
        reason += "; all batches share k and v, which are prepared once"
    if call.out.requires_grad and not settings.portable:
        reason += "; its backward is exact attention's"
    return found._replace(reason=reason, selection=selection)


def _stays(
    call: Call, shape: CallShape, settings: Settings, found: Decision, wanted: str
) -> Decision:
    """A call that no recipe computes: what makes it slow, and what else may compute it."""
    unrepeats, reason = _gains_unrepeated(call, shape), found.reason
    if unrepeats:
        reason = reasons.UNREPEATED(shape.k[1], shape.q[1], reason)
    slow = eligible.decoded(call.k)
    if not (slow or unrepeats) and call.repeated > 1 and statically_true(shape.q[2] <= 16):
        slow = reasons.REPEATED(shape.k[1], shape.q[1], shape.q[2])  # as by a static cache
    if slow and isinstance(reason, Reason):
        # The first is what to change first, such as the device.
        last = reason.cause in (reasons.TOO_SHORT, reasons.UNREPEATED)
        reason = reasons.joined([slow, reason] if last else [reason, slow])
    untimed = shape.capability not in (None, TIMED_DECODE)
    if wanted == AUTO and untimed and _decodes(call, shape, settings):
        reason = reasons.joined([reason, reasons.DECODE_UNTIMED(shape.q[2])])
    return found._replace(reason=reason, unrepeats=unrepeats)


def _decodes(call: Call, shape: CallShape, settings: Settings) -> bool:
    """Whether ``sage::decode`` computes a call. A dynamic number of queries is guarded where that
    decides: the graph of a prompt would serve a step, too. A package checks no guard."""
    capability, n_q = shape.capability, shape.q[2]
    if not eligible.suits_decode(call):
        return False
    oldest = (8, 9) if _is_fp8(call.k) or _is_fp8(call.v) else (8, 0)
    if capability is not None and capability < oldest:
        return False
    decides = settings.emulate or settings.force or capability == TIMED_DECODE
    if settings.portable or not decides:
        return statically_true(n_q <= MAX_QUERIES)
    return _at_least(-n_q, -MAX_QUERIES, settings)


def _is_fp8(x: Any) -> bool:
    codes = value_of(eligible.codes_of(x))
    return codes is not None and codes.dtype == torch.float8_e4m3fn


# Where ``sage::decode`` was timed, against SDPA with the mask and heads that are not repeated
# (bench/decode.py): from how many keys on it is faster, and for one query in 16 bits up to how many
# heads of k and v. With 256 heads of 1,024 keys it is 3 % slower, with 1,024 of 512 keys 12 %.
TIMED_DECODE, DECODES_FROM, DECODED_HEADS = (9, 0), 256, 128
# Also up to how many keys of all heads at head_dim 64: 2^18 of a full cache take 0.94 of SDPA's
# time, 2^19 1.12 (2.8 and 3.1 TB/s; H200, 2026-11-29).
DECODED_KEYS_64 = 2**18
# Codes of k in E4M3, from which number on reading them is faster than decoding them before SDPA,
# the new token appended in both. H200, 2026-11-30: 1.28 to 1.65 times as fast from 2^24 on, .94 to
# 1.47 of 2^23, .79 to 1.11 of fewer.
DECODED_CODES = 2**24


def _decoded(call: Call, shape: CallShape, settings: Settings) -> str:
    """Why ``sage::decode`` computes a call; nothing if it does not."""
    if not _decodes(call, shape, settings):
        return ""
    if settings.emulate or settings.force:
        return f"{'emulated' if shape.capability is None else 'forced'}, exact"
    if shape.capability != TIMED_DECODE:
        return ""
    heads, keys = shape.q[0] * shape.k[1], shape.k[2]
    if eligible.codes_of(call.k) is not None:
        gains = not _is_fp8(call.k) or (
            _at_least(keys, DECODES_FROM, settings)
            and _at_least(heads * keys * shape.head_dim, DECODED_CODES, settings)
        )
        return "exact: k and v are read as codes" if gains else ""
    gains = statically_true(shape.q[2] > 1) or (
        _at_least(-heads, -DECODED_HEADS, settings)
        and (shape.head_dim > 64 or _at_least(-heads * keys, -DECODED_KEYS_64, settings))
    )
    gains = gains and _at_least(keys, DECODES_FROM, settings)
    return f"exact, faster than SDPA from {DECODES_FROM} keys on" if gains else ""


# From this version on cuDNN's kernel for one query takes a mask and heads that are not repeated,
# and torch prefers it on Hopper. Elsewhere SDPA's math computes a mask with enable_gqa.
CUDNN = 91501


def _gains_unrepeated(call: Call, shape: CallShape) -> bool:
    """Whether SDPA is faster by heads of k and v that are not repeated: for one query on Hopper, as
    a static cache is read. Two queries are computed by SDPA's math."""
    return (
        call.repeated > 1
        and not call.out.requires_grad
        and statically_true(shape.q[2] == 1)
        and shape.capability == (9, 0)
        and shape.dtype in (torch.float16, torch.bfloat16)
        and max(shape.q[3], shape.v[3]) <= 128
        and torch.backends.cuda.cudnn_sdp_enabled()
        and (torch.backends.cudnn.version() or 0) >= CUDNN
    )


def _request(
    call: Call, shape: CallShape, settings: Settings
) -> tuple[str, str, Selection | None, str]:
    """(a recipe's name, "auto" or "off"; one of names.TRAINING; the blocks of keys to keep; the
    rule of the policy that says so: "rule 3", "the function", or "")."""
    training, module = settings.training, module_path(call.node)
    if callable(settings.policy):
        # An N that depends on data is 1. Comparing a dynamic one is a guard, but in exported
        # programs it is the example's, as in `_at_least`.
        lengths = (1 if hint(n) is None else _by_example(n, settings) for n in shape.lengths)
        described = CallDescription(
            module, layer_of(module), int(shape.q[3]), *lengths, shape.kind, shape.dtype,
            shape.device, settings.stage,
        )  # fmt: skip
        wanted, rule, selection = ask(settings.policy, described), "the function", None
    else:
        given = module, as_int(shape.q[3]), lambda n: _at_least(shape.q[2], n, settings)
        rules = enumerate(settings.policy, 1)
        fitting = (each for each in rules if each[1].fits(*given, settings.stage))
        number, found = next(fitting, (0, None))
        wanted, rule, selection = found and found.recipe, f"rule {number}", found and found.keep
        training = found and found.training or training
    if training == AUTO and (settings.emulate or settings.force):
        training = OFF  # "auto" is about speed
    if wanted is None:
        named = settings.recipe != OFF and call.recipe not in (None, AUTO)
        wanted, selection, rule = call.recipe if named else settings.recipe, None, ""
        if named and call.keep is not None:
            selection = kept(call.keep, call.recipe or OFF, "sage_inductor.attention: ")
    if selection is not None and selection.keeps_all:
        selection = None
    return wanted, training, selection, rule


def _trained(call: Call, shape: CallShape, settings: Settings, training: str) -> Decision:
    """What becomes of a call that needs gradients, where it is said how they are computed."""
    if shape.capability is None and not settings.emulate:
        return Decision(None, reasons.ON_CPU())
    if shape.dtype == torch.float32 and not (settings.emulate or settings.force):
        return Decision(None, reasons.FP32())
    if call.selection:
        return Decision(None, reasons.LISTS_IN_TRAINING())
    is_auto = training == AUTO
    by = FP8_BACKWARD if is_auto else training
    reason = eligible.why_not_trained(call, by, shape.capability)
    if reason is None and is_auto and eligible.is_causal(call) and eligible.is_biased(call.k):
        reason = reasons.BIASED_K()  # left to the user
    if reason:
        return Decision(None, reason)
    if not is_auto:
        return Decision(None, "asked for, forward and backward", trained_by=by)
    found = _fastest(call, shape, settings, (by,))
    return found._replace(recipe=None, trained_by=found.recipe)


def _recipe(call: Call, shape: CallShape, settings: Settings, wanted: str) -> Decision:
    """The recipe that is asked for, or the best of "auto", where a kernel computes the call and
    speed does not speak against it."""
    is_cpu = shape.capability is None
    if is_cpu and not settings.emulate:
        return Decision(None, reasons.ON_CPU())
    if settings.portable and not is_cpu and not travels():
        return Decision(None, reasons.NOT_IN_A_PACKAGE(triton.__version__))
    if wanted == AUTO and (why := _decoded(call, shape, settings)):
        return Decision(None, why, decodes=True)
    runnable, refused = [], {}  # the reasons once each, in order
    for name in _names(shape, wanted):
        try:
            tile_of(shape, recipes.NAMED[name])
        except ValueError as error:
            refused[reasons.NO_KERNEL.worded(str(error))] = None
        else:
            runnable.append(name)
    if not runnable:
        found = Decision(None, reasons.joined([*refused]))
    elif settings.emulate or settings.force:
        found = Decision(runnable[0], "emulated" if is_cpu else "forced")
    elif shape.dtype == torch.float32 or call.out.requires_grad:
        exact = reasons.FP32() if shape.dtype == torch.float32 else reasons.EXACT_BACKWARD()
        found = Decision(None, reasons.joined([exact, *refused]))
    else:
        found = _fastest(call, shape, settings, tuple(runnable))
        if found.recipe is None:
            found = found._replace(reason=reasons.joined([found.reason, *refused]))
    if not is_cpu and (lost := tiles.hopper_unavailable(shape.capability)):
        name = "sage2-8b-rotated" if wanted == AUTO else wanted
        if tiles.suits_hopper(shape, recipes.NAMED[name]):
            reason = f"{found.reason}; {lost}"
            return found._replace(reason=reasons.HOPPER_LOST.worded(reason, compat.GLUON_VERSIONS))
    return found


def _names(shape: CallShape, wanted: str) -> tuple[str, ...]:
    """The recipes that a call may get."""
    if wanted != AUTO:
        return (wanted,)
    if shape.packed:  # whose kernels prepare k and v in one pass
        return ("sage2-8b-rotated",)
    is_cpu = shape.capability is None
    return ("sage2-8b",) if is_cpu else auto_recipes(shape.capability, shape.head_dim)


def _unportable(call: Call, shape: CallShape, recipe: str) -> Reason | None:
    """Why a package cannot be made by its example. Where aten works on blocks of queries, one block
    is a dimension of 1, which torch takes for one that stays 1; and a package checks no guard."""
    if shape.packed and shape.capability is None:  # whose emulation asks how long documents are
        return reasons.NO_KERNEL("packed documents in a package for a CPU")
    n_q = value_of(call.q).shape[2]
    by_blocks = call.selection is not None or recipes.NAMED[recipe].of_qk.block_scaled
    is_short = isinstance(n_q, torch.SymInt) and (hint(n_q) or Q_BLOCK + 1) <= Q_BLOCK
    return reasons.SHORT_EXAMPLE(Q_BLOCK, hint(n_q)) if by_blocks and is_short else None


def _fastest(call: Call, shape: CallShape, settings: Settings, names: tuple[str, ...]) -> Decision:
    """The fastest of the recipes, of which the first mostly is, if it is faster than SDPA: as timed
    here and now, or as predicted."""
    case = _case(call, shape, names) if settings.benchmark and not settings.portable else None
    if case is not None:
        return _timed(shape, case, settings.benchmark(case))
    if shape.packed:
        return _by_documents(call, shape, settings, names[0])
    if shape.kind == "blocks":
        return _by_lists(call, shape, settings, names[0])
    return _predicted(call, shape, settings, names)


def _case(call: Call, shape: CallShape, names: tuple[str, ...]) -> BenchmarkCase | None:
    """What is timed in the call's place. None where times are predicted: for a size that depends on
    data, and for calls that none of SDPA's backends computes (flex_attention's windows and block
    lists, bands at the bottom right)."""
    timed, band = shape.hinted(), shape.band._replace(bottom_right=False)
    shifted = timed and shape.band.bottom_right and timed.q[2] != timed.k[2]
    if timed is None or shifted or shape.kind in ("flex window", "blocks"):
        return None
    if not shape.trains and all(stacks(call, recipes.NAMED[name]) for name in names):
        timed = timed._replace(k=(1, *timed.k[1:]), v=(1, *timed.v[1:]))
    candidates = tuple(each for name in names for each in by_tiles(shape, name))
    timed = timed._replace(band=band, is_flex=False)
    return BenchmarkCase(timed, candidates, families.rivals(), families.flash_attention())


def _ranked(best: Prediction, reason: Reason | str) -> Decision:
    """The fastest of the recipes, if it beats SDPA."""
    name, tile = (best.recipe, best.warpgroups) if best.wins else (None, None)
    return Decision(name, reason, tile, times=best[1:3])


def _timed(shape: CallShape, case: BenchmarkCase, found: timing.Timed) -> Decision:
    """As `_fastest`, by the times `found` of the case."""
    is_dynamic = any(isinstance(n, torch.SymInt) for n in (*shape.q, *shape.k))
    what = "autotuned" + f" at {[*case.shape.q]}" * is_dynamic
    times = {each: ms for each, ms in found.items() if not isinstance(ms, str)}
    ours = {each: times.pop(each) for each in case.candidates if each in times}
    failed = (each for each in case.candidates if each not in ours)
    why = "".join(f"; {each.recipe}{each.tile} failed: {found[each]}" for each in failed)
    if not ours or not times:
        missing = "no recipe" if times else "no backend of SDPA"
        return Decision(None, reasons.UNTIMED(what, missing, why))
    sdpa = min(times.values())
    best = cost.fastest([Prediction(x.recipe, ours[x], sdpa, 0.0, x.warpgroups) for x in ours])
    if not best.wins:
        how = "faster" if best.speedup < 1 else "as fast"
        return _ranked(best, reasons.TIMED_SLOWER(what, how, best.speedup, why))
    tile = Candidate(best.recipe, best.warpgroups).tile
    is_torchs = case.flash_attention == families.TORCHS_FLASH
    flash = "" if is_torchs else f"; SDPA's flash attention is {case.flash_attention}"
    won = f"{what}: {best.speedup:.2f}x the fastest of SDPA{tile and ','}{tile}{why}{flash}"
    return _ranked(best, won)


def predicted(shape: CallShape, recipe: str, stacked: bool) -> Prediction | None:
    """How long a call of these sizes, which are numbers, takes on its device or, on CPU, on the GPU
    whose times are built in. None where no such calls were timed. stacked: as Table.predict's."""
    gpu, family = tables.whose_times(shape.device), Family(shape.q[3], shape.v[3], shape.kind)
    band = shape.band.from_the_top(*shape.lengths)
    sizes = Sizes(*shape.q[:2], shape.k[1], *shape.lengths, *band)
    table = tables.with_times(gpu, family, recipe)
    return table and table.predict(family, recipe, sizes, stacked)


def _predicted(
    call: Call, shape: CallShape, settings: Settings, names: tuple[str, ...]
) -> Decision:
    """As `_fastest`, by the times that are known of this GPU. A dynamic length is guarded, with the
    length from which a recipe wins."""
    D, D_v, lengths = specialised(shape.q[3]), specialised(shape.v[3]), shape.lengths
    gpu, family = tables.gpu_name(shape.device), Family(D, D_v, shape.kind)
    of = f" with {family}, B*H={shape.q[0] * shape.q[1]}"

    def timed() -> list[str]:
        return [name for name in names if tables.with_times(gpu, family, name)]

    fixed, known = [isinstance(_by_example(n, settings), int) for n in lengths], timed()
    checked = (n for n, is_fixed in zip(lengths, fixed, strict=True) if is_fixed or not known)
    if not all(_at_least(n, cost.SHORTEST, settings) for n in checked):
        return Decision(None, reasons.TOO_SHORT(cost.SHORTEST))
    if not known:
        what = names[0] + of, gpu
        if family.kind == "flex window":
            return Decision(None, reasons.FLEX_WINDOW(*what))
        cannot = not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing()
        if cannot or not settings.calibrate:
            return Decision(None, reasons.NEVER_TUNED(*what))
        # The first mostly is the fastest.
        if error := timing.calibrate(shape.device, family, names[0]):
            return Decision(None, reasons.NOT_MEASURABLE(*what, error))
        known = timed()
    B, H_q, H_kv = (_floor(n, settings) for n in (*shape.q[:2], shape.k[1]))
    stacked = {x: not shape.trains and stacks(call, recipes.NAMED[x]) for x in known}

    def at(name: str, N: int | None = None) -> Prediction:
        """With the lengths that are not fixed all of N."""
        N_q, N_kv = (N if N and isinstance(n, torch.SymInt) else hint(n) for n in lengths)
        sized = shape._replace(q=(B, H_q, N_q, D), k=(B, H_kv, N_kv, D), v=(B, H_kv, N_kv, D_v))
        return predicted(sized, name, stacked[name])

    if all(fixed):
        best = cost.fastest([at(name) for name in known])
        lost = None if best.wins else reasons.NO_SPEEDUP(best.recipe + of, best)
        return _ranked(best, lost or str(best))
    refused = []
    for name in known:
        first = cost.first_length(lambda N, name=name: at(name, N).wins)
        if first is None:
            refused.append(reasons.AT_NO_LENGTH(name + of))
        elif not all(_at_least(n, first, settings) for n in lengths if not isinstance(n, int)):
            refused.append(reasons.FROM_LENGTH(name + of, first))
        elif None in map(hint, lengths):
            return Decision(name, f"N >= {first}")
        else:
            now = at(name)
            reason = f"N >= {first}, {now} at N={hint(lengths[0])}"
            return Decision(name, reason, times=now[1:3])
    return Decision(None, refused[0])


def _by_lists(call: Call, shape: CallShape, settings: Settings, recipe: str) -> Decision:
    """The recipe, where it was measured to be faster by block lists than what computes them."""
    lost = tiles.hopper_unavailable(shape.capability)
    suits = tiles.suits_hopper(shape, recipes.NAMED[recipe])
    known = tables.gpu_name(shape.device) == tables.H200 and suits and not lost
    is_fastvideos = call.spelling.startswith(fastvideo.PACKAGE)
    known = known and (shape.mask is None or is_fastvideos)
    timed = (128,) if is_fastvideos or call.spelling.endswith(sla.NAME) else (64, 128)
    if not known or pad_head_dim(shape.head_dim) not in timed:
        return Decision(None, reasons.LISTS_UNMEASURED(recipe))
    least = FASTVIDEO_FROM if is_fastvideos else LISTS_FROM
    if not all(_at_least(n, least, settings) for n in shape.lengths):
        return Decision(None, reasons.LISTS_FROM_LENGTH(recipe, least))
    return Decision(recipe, f"by block lists, N >= {least}")


def _by_documents(call: Call, shape: CallShape, settings: Settings, recipe: str) -> Decision:
    """As `_by_lists`, of packed documents. Each may have another length, so by their mean."""
    S, is_torchs = value_of(call.documents[0]).shape[0] - 1, call.spelling.startswith("torch_attn")
    rival = families.flash_attention() if is_torchs else call.spelling
    suits = tiles.suits_hopper(shape, recipes.NAMED[recipe])
    known = tables.gpu_name(shape.device) == tables.H200 and suits
    known = known and not tiles.hopper_unavailable(shape.capability)
    known = known and pad_head_dim(shape.head_dim) in (64, 128)
    least: int | None = DOCUMENTS_FROM
    if newer := re.search(r"(FA|attn_?)[34]", rival):
        wins = newer[0].endswith("3") and shape.head_dim == 128 and shape.band.kind == "full"
        least = DOCUMENTS_FROM_FA3 if wins else None
    why = ""
    if not known or shape.band[:2] not in (FULL[:2], CAUSAL[:2]):
        why = "were measured on an H200 alone, up to head_dim 128, without a window"
    elif least is None:
        why = f"are computed about as fast by {rival}"
    elif not all(_at_least(n, least * S, settings) for n in shape.lengths):
        why = f"win from a mean of {least} tokens on"
    if why:
        return Decision(None, reasons.PACKED(why, *shape.lengths[:1], S))
    return Decision(recipe, f"packed documents, mean N >= {least}")


def _by_example(n, settings: Settings):
    """n, or in an exported program, which has one graph for all sizes, the example's."""
    return n if not settings.portable or hint(n) is None else hint(n)


def _floor(n, settings: Settings) -> int:
    """n, or of a dynamic one the power of 2 below it, guarded: more heads are no slower."""
    n = _by_example(n, settings)
    if isinstance(n, int):
        return n
    power = 1 << (hint(n) or 1).bit_length() - 1
    return power if guarded(n >= power) else 1


def _at_least(n, minimum: int, settings: Settings) -> bool:
    """n >= minimum. A dynamic n is guarded: each side of it gets its own graph. An n that depends
    on data cannot be guarded: the answer is yes only if it holds for every n."""
    if hint(n) is None:
        return statically_true(n >= minimum)
    return bool(_by_example(n, settings) >= minimum)
