"""What becomes of a call: quantized with a recipe, or as it was, and why.

A call is rewritten if `sage::sdpa` can stand for it (`_why_not`) and is measured to be faster
there, by the table (tiles.crossover) or here and now (Settings.clock), unless the settings say
otherwise. Which recipe it asks for is said by the first rule of the policy that it fits, else by
the settings' recipe.
"""

import dataclasses
import fnmatch
import itertools
import math
import operator
import re
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from sage_inductor import lowering  # noqa: F401  (registers what the inserted op opens into)
from sage_inductor.ops import recipe as recipes
from sage_inductor.ops import tiles
from sage_inductor.ops.reference import HEAD_DIMS
from sage_inductor.ops.sdpa import kernel
from sage_inductor.patterns.call import (
    CAUSAL,
    FULL,
    Band,
    Call,
    Emitter,
    Survey,
    may_write,
    value_of,
)

BHND, BNHD = [0, 1, 2, 3], [0, 2, 1, 3]  # orders in which an output is stored
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
        return dataclasses.replace(recipes.NAMED[self.recipe], warpgroups=self.warpgroups)

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


@dataclasses.dataclass(frozen=True)
class Site:
    """One attention call in a user's graph, and what became of it."""

    module: str  # path of the module that makes the call
    call: str  # name of the node
    spelling: str  # "SDPA", "softmax", "nn.MultiheadAttention", ...
    q: tuple  # [B, H_q, N_q, D]; symbols where the shape is dynamic
    k: tuple  # [B, H_kv, N_kv, D]
    dtype: str
    mask: str  # "none", "causal", a window, the mask's dtype and shape; "+" where both
    recipe: str | None  # None: stays as it was
    reason: str  # why it stays, or what chose the recipe
    warpgroups: int | None = None  # Recipe's, where a clock chose

    @property
    def rewritten(self) -> bool:
        return self.recipe is not None


def decide(call: Call, settings: Settings) -> Site:
    """What becomes of `call`; nothing is changed yet."""
    choice, reason = _choose(call, settings)
    q, k = value_of(call.q), value_of(call.k)
    if choice and settings.portable:
        reason += _left_behind(call, choice.recipe)
    return Site(
        module=_module(call.node),
        call=call.node.name,
        spelling=call.spelling,
        q=_dims(q),
        k=_dims(k),
        dtype=str(getattr(call.out, "dtype", "?")).removeprefix("torch."),
        mask=_mask(call),
        recipe=choice and choice.recipe,
        reason=reason,
        warpgroups=choice and choice.warpgroups,
    )


def unreadable(node, error: Exception) -> Site:
    """The site of a call that looking at raised for: it stays as it was."""
    reason = f"could not be read, which is a fault of ours: {type(error).__name__}: {error}"
    return Site(_module(node), node.name, "?", (), (), "?", "?", None, reason)


def replace(call: Call, site: Site, settings: Settings) -> None:
    """Put ``sage.sdpa(...)[0]`` in the place of `call`, stored as its output is."""
    recipe = Choice(site.recipe, site.warpgroups).full.encode()
    emit, out, order = call.emit, call.out, _stored(call)
    q, k, v, attn_mask = call.q, call.k, call.v, call.attn_mask
    scale = call.scale if call.scale is not None else value_of(q).shape[3] ** -0.5
    args = (
        q, k, v, attn_mask, [], call.band.left, call.band.right, call.band.bottom_right,
        float(scale), recipe, order != BHND, settings.portable,
    )  # fmt: skip
    if order not in (BHND, BNHD):
        out = out.new_empty([out.shape[d] for d in BNHD]).permute(BNHD)
    lse = out.new_empty(out.shape[:3], dtype=torch.float32)
    new = emit.insert(torch.ops.sage.sdpa.default, args, (out, lse))
    first = emit.insert(operator.getitem, (new, 0), out)
    if order not in (BHND, BNHD):
        first = emit(torch.ops.aten.permute.default, first, order)
        first = emit(torch.ops.aten.clone.default, first, memory_format=torch.contiguous_format)
        back = [order.index(d) for d in BHND]
        first = emit(torch.ops.aten.permute.default, first, back)
    call.node.replace_all_uses_with(call.finish(first))
    for dead in (call.node, *call.dead, *reversed(emit.nodes)):
        if not dead.users:
            dead.graph.erase_node(dead)


def share(graph: torch.fx.Graph) -> None:
    """Prepare k and v once for the calls that have the same ones, and the same mask, recipe (with
    whichever tile) and autocast, as long as nothing between them may write (to what k, v or the
    mask are views of)."""
    survey, groups, writes = Survey(graph), {}, 0
    for node in graph.nodes:
        writes += may_write(node)
        if node.target is torch.ops.sage.sdpa.default and not node.args[4]:
            emit = Emitter(node, survey)
            _, k, v, attn_mask, *_, recipe, _, portable = node.args
            recipe = recipes.decode(recipe).preparation.encode()
            key = (k, v, attn_mask, recipe, portable), writes, tuple(emit.autocasts)
            groups.setdefault(key, []).append((node, emit))
    for (args, *_), calls in groups.items():
        if len(calls) > 1:
            emit = calls[0][1]
            prepare = emit(torch.ops.sage.prepare.default, *args)
            count = range(len(value_of(prepare)))
            prepared = [emit(operator.getitem, prepare, i) for i in count]
            for node, _ in calls:
                node.update_arg(4, prepared)


def _choose(call: Call, settings: Settings) -> tuple[Choice | None, str]:
    """(the recipe, why this one) or (None, why the call stays as it was)."""
    if settings.recipe == OFF and not settings.policy:
        return None, "the recipe is 'off'"
    reason = call.refused or _why_not(call)
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
        fits_module(_module(call.node), rule)
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
    if mask.shape[-2] == 1:
        return "keys"
    return "mask" if mask.dtype == torch.bool else "bias"


def _at_least(n, least: int, settings: Settings) -> bool:
    """n >= least. A dynamic n is guarded: each side of the crossover gets its own graph. An
    exported program has one graph for all, chosen by the example's sizes."""
    return bool((_hint(n) if settings.portable else n) >= least)


def _hint(n) -> int | None:
    """A size while compiling, unguarded; None if it depends on data."""
    return n.node.hint if isinstance(n, torch.SymInt) else n


def _why_not(call: Call) -> str | None:
    """The reason sage::sdpa cannot stand for this call, whatever the length, or None if it can."""
    q, k, v, mask = (value_of(x) for x in (call.q, call.k, call.v, call.attn_mask))
    out = call.out
    if not all(isinstance(x, torch.Tensor) for x in (q, k, v, out)):
        return "the graph carries no shapes for this call"
    if call.emit.survey.functorch_depth(call.node):
        return "inside a torch.func transform"
    if call.dropout_p != 0.0:
        return f"dropout_p must be 0, got {call.dropout_p}"
    scale = call.scale
    if not (scale is None or isinstance(scale, (int, float)) and math.isfinite(scale)):
        return f"scale must be a finite number known when compiling, got {scale}"
    tensors = [x for x in (q, k, v, mask) if x is not None]
    for x in tensors:
        if type(x).__name__ != "FakeTensor" or x.layout != torch.strided:
            return f"tensor subclasses are not supported, got {type(x).__name__}"
    if not q.dim() == k.dim() == v.dim() == 4:
        return f"q, k and v must be [B, H, N, D], got {q.dim()}, {k.dim()} and {v.dim()} dimensions"
    if any(n < 1 for x in (q, k, v) for n in x.shape):
        return f"q, k or v is empty, got {_dims(q)}, {_dims(k)}, {_dims(v)}"
    if any(x.device != q.device for x in tensors) or q.device.type not in ("cpu", "cuda"):
        return f"the device must be cuda (or cpu, emulated), got {[str(x.device) for x in tensors]}"
    valid = (torch.float16, torch.bfloat16, torch.float32)
    if out.dtype not in valid:  # out's dtype is what autocast makes of the inputs'
        return f"dtype must be one of {[str(d)[6:] for d in valid]}, got {str(out.dtype)[6:]}"
    if k.shape[3] != q.shape[3] or not all(x.shape[3] <= HEAD_DIMS[-1] for x in (q, v)):
        return (
            f"head_dim of q and k must be one number up to {HEAD_DIMS[-1]}, as v's, "
            f"got {q.shape[3]}, {k.shape[3]}, {v.shape[3]}"
        )
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3]:
        return (
            f"batches, kv heads and lengths must be equal, got {_dims(q)}, {_dims(k)}, {_dims(v)}"
        )
    heads_q, heads_kv = q.shape[1], k.shape[1]
    if heads_q != heads_kv and not (call.enable_gqa and heads_q % heads_kv == 0):
        return f"q has {heads_q} heads and k {heads_kv}, with enable_gqa={call.enable_gqa}"
    if mask is not None:
        if mask.dtype != torch.bool and mask.dtype not in valid:
            return f"attn_mask must be bool or floating, got {mask.dtype}"
        sizes = zip(reversed(mask.shape), (k.shape[2], *reversed(q.shape[:3])), strict=False)
        if not 2 <= mask.dim() <= 4 or not all(m == 1 or m == n for m, n in sizes):
            return f"attn_mask must broadcast to [B, H_q, N_q, N_kv], got {_dims(mask)}"
    if _stored(call) is None:
        return f"the output must be contiguous in some order of B, H, N: strides {out.stride()}"
    return None


def _stored(call: Call) -> list[int] | None:
    """The order in which the output is stored, outermost dimension first. What follows may view it,
    so ours must be stored alike: the op writes BHND and BNHD, the rest is copied."""
    out = call.out
    others = ([*outer, 3] for outer in itertools.permutations(range(3)))
    for order in (BNHD, BHND, *others):
        inner = 1
        for d in reversed(order):
            fits = statically_known_true(out.stride(d) == inner)
            if not fits and not statically_known_true(out.shape[d] == 1):
                break
            inner = inner * out.shape[d]
        else:
            return order
    return None


def _module(node) -> str:
    """``layers.0.attn``, of Dynamo's ``L['self'].layers[0].attn`` or (under a module's own
    __getattr__) ``L['self'].__dict__['_modules']['layers'][0].attn``: the innermost one entered."""
    stack = node.meta.get("nn_module_stack") or {"": ("", None)}
    names = re.findall(r"\w+", list(stack.values())[-1][0])
    if names[:2] in (["L", "self"], ["L", "fn"]):
        names = names[2:]
    return ".".join(name for name in names if name not in ("__dict__", "_modules"))


def _mask(call: Call) -> str:
    parts = [] if call.band.kind == "full" else [str(call.band)]
    if call.attn_mask is not None:
        mask = value_of(call.attn_mask)
        dtype = str(getattr(mask, "dtype", "?")).removeprefix("torch.")
        parts.append(f"{dtype}{list(_dims(mask))}")
    return " + ".join(parts) or "none"


def _dims(x) -> tuple:
    return tuple(n if isinstance(n, int) else str(n) for n in getattr(x, "shape", ()))
