"""Whether ``sage::sdpa`` can stand for an attention call, and how the call's output is stored."""

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from sage_inductor.ops import compat
from sage_inductor.ops.attention import tiles
from sage_inductor.ops.formats import HEAD_DIMS, TRAINED_HEAD_DIM
from sage_inductor.ops.symbols import guarded, hint, specialised
from sage_inductor.ops.training.gradients import FP8_BACKWARD
from sage_inductor.ops.visibility import FULL, Band
from sage_inductor.patterns import reasons
from sage_inductor.patterns.call import Call, mask_text
from sage_inductor.patterns.graph import VIEWS, arguments, op_name, shown, statically_true, value_of
from sage_inductor.patterns.reasons import Reason

BHND, BNHD = [0, 1, 2, 3], [0, 2, 1, 3]  # orders in which an output is stored
# All of them, those first that the op writes, and those last whose rows are not head_dim's.
ORDERS = sorted(
    map(list, itertools.permutations(range(4))),
    key=lambda order: (order != BNHD, order != BHND, order[3] != 3),
)


def why_not(call: Call) -> Reason | None:  # noqa: C901  (one condition after another)
    """The reason sage::sdpa cannot stand for this call, whatever the length, or None if it can."""
    q, k, v, mask = map(value_of, (call.q, call.k, call.v, call.attn_mask))
    out = call.out
    if not all(isinstance(x, torch.Tensor) for x in (q, k, v, out)):
        return reasons.NO_SHAPES()
    if call.emit.index.functorch_depth(call.node):
        return reasons.IN_A_TRANSFORM()
    if call.dropout_p != 0.0:
        return reasons.DROPOUT(call.dropout_p)
    scale = call.scale
    if not (scale is None or isinstance(scale, (int, float)) and math.isfinite(scale)):
        return reasons.SCALE(scale)
    lists = [value_of(x) for pair in call.blocks.lists for x in pair] if call.blocks.size else []
    tensors = [x for x in (q, k, v, mask, value_of(call.sink), *lists) if x is not None]
    for x in tensors:
        if type(x) is not compat.FakeTensor or x.layout != torch.strided:
            return reasons.SUBCLASS(type(x).__name__)
    if not q.dim() == k.dim() == v.dim() == 4:
        return reasons.DIMENSIONS(q.dim(), k.dim(), v.dim())
    sizes = [*q.shape[1:], *k.shape[1:], *v.shape[1:]]
    if any(map(guarded, [n < 1 for n in (q.shape[0], k.shape[0], v.shape[0], *sizes)])):
        return reasons.EMPTY(*map(shown, (q, k, v)))
    # A batch may depend on data: of 0 samples nothing is launched.
    if not all(map(guarded, [n >= 1 for n in sizes])):
        return reasons.OF_DATA(*map(shown, (q, k, v)))
    if {x.device for x in tensors} != {q.device} or q.device.type not in ("cpu", "cuda"):
        return reasons.DEVICE([str(x.device) for x in tensors])
    if q.device.type == "cuda" and torch.version.hip:  # ROCm's devices are "cuda", too
        return reasons.AMD(torch.version.hip)
    valid = (torch.float16, torch.bfloat16, torch.float32)
    if out.dtype not in valid:  # out's dtype is what autocast makes of the inputs'
        return reasons.DTYPE([str(d)[6:] for d in valid], str(out.dtype)[6:])
    widths = k.shape[3] == q.shape[3], *(x.shape[3] <= HEAD_DIMS[-1] for x in (q, v))
    if not all(map(guarded, widths)):
        return reasons.HEAD_DIM(HEAD_DIMS[-1], *(x.shape[3] for x in (q, k, v)))
    pairs = zip((q.shape[0], *k.shape[:3]), (k.shape[0], *v.shape[:3]), strict=True)
    if not all(map(guarded, [n == m for n, m in pairs])):
        return reasons.BATCHES(*map(shown, (q, k, v)))
    heads_q, heads_kv = q.shape[1], k.shape[1]
    grouped = call.enable_gqa and guarded(heads_q % heads_kv == 0)
    if not grouped and not guarded(heads_q == heads_kv):
        return reasons.HEADS(heads_q, heads_kv, call.enable_gqa)
    if mask is not None:
        if mask.dtype != torch.bool and mask.dtype not in valid:
            return reasons.MASK_DTYPE(mask.dtype)
        sizes = zip(reversed(mask.shape), (k.shape[2], *reversed(q.shape[:3])), strict=False)
        broadcasts = all(guarded(m == 1) or guarded(m == n) for m, n in sizes)
        if not 2 <= mask.dim() <= 4 or not broadcasts:
            return reasons.MASK_SHAPE(shown(mask))
    if lists and (reason := _why_not_listed(call, lists)):
        return reason
    if out.requires_grad:
        if call.sink is not None:
            return reasons.SINK_IN_TRAINING()
        read = [x for x in (call.q, call.k, call.v, call.attn_mask) if x is not None]
        if any(call.emit.index.written_after(x, call.node) for x in read):  # by the op's backward
            return reasons.WRITTEN_IN_TRAINING()
    if stored(call) is None:
        return reasons.STORED(out.stride())
    return None


def suits_decode(call: Call) -> bool:
    """Whether ``sage::decode`` computes a call that sage::sdpa can stand for, in 16 bits and
    without gradients, if its queries are few. A bool mask shows them keys of a cache; or the cache
    has codes and no mask, and they stand at its end."""
    q, k, v, mask = (value_of(x) for x in (call.q, call.k, call.v, call.attn_mask))
    if mask is None:
        is_one = call.band == FULL and statically_true(q.shape[2] == 1)
        at_the_end = is_one or call.band == Band(right=0, bottom_right=True)
        if not at_the_end or codes_of(call.k) is None:
            return False
    elif mask.dtype != torch.bool or mask.dim() != 4 or call.band != FULL:
        return False
    elif not all(map(statically_true, (mask.shape[1] == 1, mask.shape[3] == k.shape[2]))):
        return False
    dims = specialised(q.shape[3]), specialised(v.shape[3])
    return (
        all(x.dtype == call.out.dtype in (torch.float16, torch.bfloat16) for x in (q, k, v))
        and all(D % 16 == 0 for D in dims)
        and k.stride(3) == v.stride(3) == 1
        and not (call.out.requires_grad or call.block_size or call.sink or call.lse)
    )


def why_not_selected(call: Call, portable: bool) -> Reason | None:
    """The reason that no blocks may be selected for a call that sage::sdpa can stand for, in a
    package or not."""
    n_q, n_kv = (value_of(x).shape[2] for x in (call.q, call.k))
    if call.out.requires_grad:
        return reasons.LISTS_IN_TRAINING()
    if mask_text(call) != "none":
        return reasons.KEEP_UNMASKED(mask_text(call))
    if call.lse is not None:
        return reasons.KEEP_WITHOUT_LSE()
    heads, asked = value_of(call.q).shape[1], call.selection
    # A bool is a guard: by automatic dynamic shapes q and k have two symbols for one length.
    is_free = portable or None in map(hint, (n_q, n_kv, heads))
    holds = statically_true if is_free else bool
    if not holds(n_q == n_kv):
        return reasons.KEEP_SELF(n_q, n_kv)
    if asked is None:
        return None
    if asked.rule != "pooled" and call.scale is not None and call.scale <= 0:
        return reasons.KEEP_SCALE(asked.rule, call.scale)
    if asked.heads is not None and not holds(heads == asked.heads):
        return reasons.KEEP_HEADS(heads, asked.heads)
    if asked.layout is not None and not statically_true(n_q == asked.tokens):
        return reasons.LAYOUT(list(asked.layout), asked.tokens, n_q)
    return None


def why_not_trained(call: Call, training: str, capability: tuple[int, int] | None) -> Reason | None:
    """The reason that ``sage.training``'s op of this name cannot stand for a call that sage::sdpa
    can stand for, on a GPU, or (None) on CPU."""
    q, k, v = (value_of(x) for x in (call.q, call.k, call.v))
    causal = is_causal(call)
    masked = call.attn_mask is not None or causal is None
    name = "the FP8 backward" if training == FP8_BACKWARD else training
    if masked:
        return reasons.TRAINS_UNMASKED(name, mask_text(call))
    if training == FP8_BACKWARD and causal and not guarded(q.shape[2] == k.shape[2]):
        return reasons.TRAINS_SQUARE(q.shape[2], k.shape[2])
    if call.lse is not None:
        return reasons.TRAINS_WITHOUT_LSE(name)
    if not (guarded(k.shape[3] == v.shape[3]) and guarded(q.shape[3] <= TRAINED_HEAD_DIM)):
        return reasons.TRAINS_HEAD_DIMS(name, TRAINED_HEAD_DIM, q.shape[3], v.shape[3])
    if training == FP8_BACKWARD and call.scale is not None and call.scale <= 0:
        return reasons.TRAINS_POSITIVE_SCALE(call.scale)
    if capability is None:
        return None
    if training == FP8_BACKWARD and call.out.dtype == torch.float32:
        return reasons.TRAINS_16_BITS()
    if training == FP8_BACKWARD:
        return why_no_fp8_backward(capability)
    if capability < (8, 0):
        return reasons.TRAINS_FROM_8_0(*capability)
    return None


# What leaves each number in its channel, and as it is.
_MOVES = (
    *VIEWS, "transpose", "permute", "movedim", "swapaxes", "contiguous", "clone", "expand", "chunk",
    "split", "split_with_sizes", "tensor_split", "unbind", "getitem", "select", "slice", "narrow",
    "to", "_to_copy", "type_as", "half", "bfloat16", "float",
)  # fmt: skip


def is_biased(x: Node) -> bool:
    """Whether x is a projection with a bias, and nothing was done to it since. A bias before a
    rotary embedding is none: it turns with the position."""
    name = op_name(x)
    if name == "linear":
        return arguments(x, "input", "weight", "bias")[2] is not None
    if name in ("cat", "concat"):
        return any(map(is_biased, arguments(x, ("tensors", "tensor"))[0]))
    if name in ("add", "iadd", "add_"):
        return any(getattr(value_of(each), "ndim", 0) == 1 for each in x.all_input_nodes)
    return name == "addmm" or name in _MOVES and is_biased(x.all_input_nodes[0])


_CASTS = ("to", "float", "_to_copy")
_SCALES = re.compile(r"i?mul|i?sub|truediv|div|.*dequant.*")


def codes_of(x: Any) -> Node | None:
    """The codes of a cache of which k or v is all, or some tokens."""
    while op_name(x) == "getitem" and isinstance(x.args[1], tuple):
        x = x.args[0]
    if op_name(x) == "read_kv":
        return x.args[0]
    codes, _ = scaled_codes(x)
    return codes


def scaled_codes(x: Any) -> tuple[Node, Node] | tuple[None, None]:
    """(codes, scale) where x is (codes.float() * scale).to(dtype), E4M3 of one scale for all, as in
    transformers' FP8 cache."""
    if op_name(x) not in _CASTS or op_name(product := x.args[0]) != "mul":
        return None, None
    floats, scale = product.args
    codes = floats.args[0] if op_name(floats) in _CASTS else None
    of_codes, of_scale = value_of(codes), value_of(scale)
    found = (
        getattr(of_codes, "dtype", None) == torch.float8_e4m3fn
        and isinstance(of_scale, torch.Tensor)
        and of_scale.dim() == 0
        and of_scale.dtype == value_of(floats).dtype == torch.float32
        and of_codes.device == of_scale.device == value_of(x).device
        and of_codes.stride()[-1:] == (1,)
    )
    return (codes, scale) if found else (None, None)


def decoded(k: Node) -> Reason | None:
    """The reason that a call which stays is slow, where k is decoded from 8-bit codes before it, as
    quantized caches do."""
    op, found = "to", [k]
    for node in found:  # which grows
        dtype, name = getattr(value_of(node), "dtype", torch.bool), op_name(node)
        if dtype.itemsize == 1 and dtype != torch.bool:
            return reasons.CODES(str(dtype)[6:], op)
        scales = _SCALES.fullmatch(name)
        if scales and op == "to":
            op = name
        if scales or name in (*_MOVES, "cat", "repeat_interleave"):
            found += [x for x in node.all_input_nodes if x not in found]
    return None


def why_no_fp8_backward(capability: tuple[int, int]) -> Reason | None:
    """The reason that the FP8 backward trains no call on a GPU."""
    if capability != (9, 0):
        return reasons.TRAINS_ON_HOPPER(*capability)
    lost = tiles.hopper_unavailable(capability)
    return reasons.TRAINS_BY_HOPPER_KERNEL(lost, compat.GLUON_VERSIONS) if lost else None


def is_causal(call: Call) -> bool | None:
    """Whether a call's band hides the keys after a query, and nothing else; None: other keys."""
    band, (n_q, n_kv) = call.band, (value_of(x).shape[2] for x in (call.q, call.k))
    if band.kind == "full":
        return False
    at_the_top = not band.bottom_right or statically_true(n_q == n_kv)
    return True if band.kind == "causal" and band.right == 0 and at_the_top else None


def _why_not_listed(call: Call, lists: list[torch.Tensor]) -> Reason | None:
    q, (counts, *_) = value_of(call.q), lists
    if call.out.requires_grad:
        return reasons.LISTS_IN_TRAINING()
    if any(x.dtype != torch.int32 for x in lists):
        return reasons.LISTS_DTYPE([str(x.dtype)[6:] for x in lists])
    broadcast = all(
        guarded(m == 1) or guarded(m == n) for m, n in zip(counts.shape[:2], q.shape, strict=False)
    )
    alike = all(
        len(x.shape) == 3 + i % 2
        and all(guarded(m == n) for m, n in zip(x.shape, counts.shape, strict=False))
        for i, x in enumerate(lists)
    )
    if not alike or not broadcast:
        return reasons.LISTS_SHAPE(shown(counts), shown(q))
    if not guarded(counts.shape[2] * call.blocks.block_q >= q.shape[2]):
        return reasons.LISTS_OF_ALL(shown(counts), shown(q))
    return None


def stored(call: Call) -> tuple[list[int], int] | None:
    """(the order of the output's dimensions in memory, outermost first; the elements from one row
    to the next). The last is head_dim, or N where v's channels come first in a product by hand.
    SDPA on CUDA leaves rows of D elements further apart where D is no multiple of 8: it computes
    with padded ones. What follows may view the output, so ours must be stored alike: the op writes
    BHND and BNHD without gaps, the rest is copied."""
    for holds in (statically_true, guarded):  # what heads and head_dim of a dynamic width need
        for order in ORDERS:
            width = _row_stride(call.out, order, holds)
            if width is not None:
                return order, width
    return None


def _row_stride(out: torch.Tensor, order: list[int], holds: Callable) -> int | None:
    """The elements from one row to the next, if `out` is stored in this order, as far as `holds`
    knows."""
    rows = [d for d in order[:3] if not statically_true(out.shape[d] == 1)]
    last = order[3]
    width = inner = out.stride(rows[-1]) if rows else out.shape[last]
    fits = statically_true(out.stride(last) == 1) or statically_true(out.shape[last] == 1)
    for d in reversed(rows):
        fits = fits and holds(out.stride(d) == inner)
        inner = inner * out.shape[d]
    return width if fits and holds(width >= out.shape[last]) else None
