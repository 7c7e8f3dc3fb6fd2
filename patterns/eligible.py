"""Whether ``sage::sdpa`` can stand for an attention call, and how the call's output is stored."""

import itertools
import math
from collections.abc import Callable

import torch
from torch.fx import Node

from sage_inductor.ops.attention import tiles
from sage_inductor.ops.formats import HEAD_DIMS, TRAINED_HEAD_DIM
from sage_inductor.patterns.call import Call, mask_text
from sage_inductor.patterns.graph import (
    VIEWS,
    arguments,
    guarded,
    op_name,
    shown,
    statically_true,
    value_of,
)

BHND, BNHD = [0, 1, 2, 3], [0, 2, 1, 3]  # orders in which an output is stored


def why_not(call: Call) -> str | None:
    """The reason sage::sdpa cannot stand for this call, whatever the length, or None if it can."""
    q, k, v, mask = (value_of(x) for x in (call.q, call.k, call.v, call.attn_mask))
    out = call.out
    if not all(isinstance(x, torch.Tensor) for x in (q, k, v, out)):
        return "the graph carries no shapes for this call"
    if call.emit.index.functorch_depth(call.node):
        return "inside a torch.func transform"
    if call.dropout_p != 0.0:
        return f"dropout_p must be 0, got {call.dropout_p}"
    scale = call.scale
    if not (scale is None or isinstance(scale, (int, float)) and math.isfinite(scale)):
        return f"scale must be a finite number known when compiling, got {scale}"
    lists = [value_of(x) for pair in call.blocks.lists for x in pair] if call.blocks.size else []
    tensors = [x for x in (q, k, v, mask, value_of(call.sink), *lists) if x is not None]
    for x in tensors:
        if type(x).__name__ != "FakeTensor" or x.layout != torch.strided:
            return f"tensor subclasses are not supported, got {type(x).__name__}"
    if not q.dim() == k.dim() == v.dim() == 4:
        return f"q, k and v must be [B, H, N, D], got {q.dim()}, {k.dim()} and {v.dim()} dimensions"
    if any(guarded(n < 1) for x in (q, k, v) for n in x.shape):
        return f"q, k or v is empty, got {shown(q)}, {shown(k)}, {shown(v)}"
    # A batch may depend on data: of 0 samples nothing is launched.
    if not all(guarded(n >= 1) for x in (q, k, v) for n in x.shape[1:]):
        return f"heads, lengths and head_dim depend on data, got {shown(q)}, {shown(k)}, {shown(v)}"
    if any(x.device != q.device for x in tensors) or q.device.type not in ("cpu", "cuda"):
        return f"the device must be cuda (or cpu, emulated), got {[str(x.device) for x in tensors]}"
    valid = (torch.float16, torch.bfloat16, torch.float32)
    if out.dtype not in valid:  # out's dtype is what autocast makes of the inputs'
        return f"dtype must be one of {[str(d)[6:] for d in valid]}, got {str(out.dtype)[6:]}"
    if not (guarded(k.shape[3] == q.shape[3]) and all(map(_has_kernel, (q, v)))):
        return (
            f"head_dim of q and k must be one number up to {HEAD_DIMS[-1]}, as v's, "
            f"got {q.shape[3]}, {k.shape[3]}, {v.shape[3]}"
        )
    pairs = zip((q.shape[0], *k.shape[:3]), (k.shape[0], *v.shape[:3]), strict=True)
    if not all(guarded(n == m) for n, m in pairs):
        return (
            f"batches, kv heads and lengths must be equal, got {shown(q)}, {shown(k)}, {shown(v)}"
        )
    heads_q, heads_kv = q.shape[1], k.shape[1]
    grouped = call.enable_gqa and guarded(heads_q % heads_kv == 0)
    if not grouped and not guarded(heads_q == heads_kv):
        return f"q has {heads_q} heads and k {heads_kv}, with enable_gqa={call.enable_gqa}"
    if mask is not None:
        if mask.dtype != torch.bool and mask.dtype not in valid:
            return f"attn_mask must be bool or floating, got {mask.dtype}"
        sizes = zip(reversed(mask.shape), (k.shape[2], *reversed(q.shape[:3])), strict=False)
        broadcasts = all(guarded(m == 1) or guarded(m == n) for m, n in sizes)
        if not 2 <= mask.dim() <= 4 or not broadcasts:
            return f"attn_mask must broadcast to [B, H_q, N_q, N_kv], got {shown(mask)}"
    if lists and (reason := _why_not_listed(call, lists)):
        return reason
    if call.sink is not None and out.requires_grad:
        return "training: a learned sink has no backward here"
    if stored(call) is None:
        return (
            "the output must be contiguous in some order of B, H, N, but for gaps between rows: "
            f"strides {out.stride()}"
        )
    return None


def why_not_selected(call: Call) -> str | None:
    """The reason that no blocks may be selected for a call that sage::sdpa can stand for."""
    n_q, n_kv = (value_of(x).shape[2] for x in (call.q, call.k))
    if call.out.requires_grad:
        return LISTS_IN_TRAINING
    if mask_text(call) != "none":
        return f"blocks are selected where there is no mask, got {mask_text(call)}"
    if not statically_true(n_q == n_kv):
        return f"blocks are selected for self-attention, got {n_q} queries and {n_kv} keys"
    if call.lse is not None:
        return "blocks are selected where no logsumexp is returned"
    return None


LISTS_IN_TRAINING = "training: block lists have no backward here"


def why_not_trained(call: Call, training: str, capability: tuple[int, int] | None) -> str | None:
    """The reason that ``sage.training``'s op of this name cannot stand for a call that sage::sdpa
    can stand for, on a GPU, or (None) on CPU."""
    q, k, v = (value_of(x) for x in (call.q, call.k, call.v))
    causal = is_causal(call)
    masked = call.attn_mask is not None or causal is None
    if masked:
        return f"{training} trains calls without a mask but the causal one, got {mask_text(call)}"
    if training == "g" and causal and not statically_true(q.shape[2] == k.shape[2]):
        return (
            f"g trains causal calls of as many queries as keys, got {q.shape[2]} and {k.shape[2]}"
        )
    if call.lse is not None:
        return f"{training} trains calls that return no logsumexp"
    if not (guarded(k.shape[3] == v.shape[3]) and guarded(q.shape[3] <= TRAINED_HEAD_DIM)):
        return (
            f"{training} trains head_dims up to {TRAINED_HEAD_DIM}, one of q, k and v, "
            f"got {q.shape[3]} and {v.shape[3]}"
        )
    if training == "g" and call.scale is not None and call.scale <= 0:
        return f"g trains calls whose scale is more than 0, got {call.scale}"
    if capability is None:
        return None
    if training == "g" and call.out.dtype == torch.float32:
        return "g trains in 16 bits on a GPU, got float32"
    if training == "g":
        return why_no_g(capability)
    if capability < (8, 0):
        return "sagebwd trains from compute capability 8.0 on, got {}.{}".format(*capability)
    return None


def why_not_by_itself(call: Call) -> str | None:
    """The reason that "auto" leaves to the user whether a call that "g" can train is trained so."""
    if is_causal(call) and _is_biased(call.k):
        return (
            "training: causal, and k's channels have a bias, which g rounds with k "
            "(sage.training='g' overrides)"
        )
    return None


# What leaves each number in its channel, and as it is.
_MOVES = (
    *VIEWS, "transpose", "permute", "movedim", "swapaxes", "contiguous", "clone", "expand", "chunk",
    "split", "split_with_sizes", "tensor_split", "unbind", "getitem", "select", "slice", "narrow",
    "to", "_to_copy", "type_as", "half", "bfloat16", "float",
)  # fmt: skip


def _is_biased(x: Node) -> bool:
    """Whether x is a projection with a bias, and nothing was done to it since. A bias before a
    rotary embedding is none: it turns with the position."""
    name = op_name(x)
    if name == "linear":
        return arguments(x, "input", "weight", "bias")[2] is not None
    if name in ("cat", "concat"):
        return any(map(_is_biased, arguments(x, ("tensors", "tensor"))[0]))
    if name in ("add", "iadd", "add_"):
        return any(getattr(value_of(each), "ndim", 0) == 1 for each in x.all_input_nodes)
    return name == "addmm" or name in _MOVES and _is_biased(x.all_input_nodes[0])


def why_no_g(capability: tuple[int, int]) -> str | None:
    """The reason that no call trains by "g" on a GPU."""
    if capability != (9, 0):
        return "g trains on compute capability 9.0, got {}.{}".format(*capability)
    lost = tiles.hopper_is_lost(capability)
    return f"g trains with the Hopper kernel: {lost}" if lost else None


def is_causal(call: Call) -> bool | None:
    """Whether a call's band hides the keys after a query, and nothing else; None: other keys."""
    band, (n_q, n_kv) = call.band, (value_of(x).shape[2] for x in (call.q, call.k))
    if band.kind == "full":
        return False
    at_the_top = not band.bottom_right or statically_true(n_q == n_kv)
    return True if band.kind == "causal" and band.right == 0 and at_the_top else None


def _why_not_listed(call: Call, lists: list[torch.Tensor]) -> str | None:
    q, (counts, *_) = value_of(call.q), lists
    if call.out.requires_grad:
        return LISTS_IN_TRAINING
    if any(x.dtype != torch.int32 for x in lists):
        return f"block lists must be int32, got {[str(x.dtype)[6:] for x in lists]}"
    broadcast = all(
        guarded(m == 1) or guarded(m == n) for m, n in zip(counts.shape[:2], q.shape, strict=False)
    )
    alike = all(
        len(x.shape) == 3 + i % 2
        and all(guarded(m == n) for m, n in zip(x.shape, counts.shape, strict=False))
        for i, x in enumerate(lists)
    )
    if not alike or not broadcast:
        return f"block lists must have q's batch and heads, or 1, got {shown(counts)}, q {shown(q)}"
    if not guarded(counts.shape[2] * call.blocks.block_q >= q.shape[2]):
        return f"block lists must be for all queries, got {shown(counts)}, q {shown(q)}"
    return None


def _has_kernel(x: torch.Tensor) -> bool:
    return guarded(x.shape[3] <= HEAD_DIMS[-1])


def stored(call: Call) -> tuple[list[int], int] | None:
    """(the order of the output's dimensions in memory, outermost first; the elements from one row
    to the next). SDPA on CUDA leaves rows of D elements further apart where D is no multiple of 8:
    it computes with padded ones. What follows may view the output, so ours must be stored alike:
    the op writes BHND and BNHD without gaps, the rest is copied."""
    others = ([*outer, 3] for outer in itertools.permutations(range(3)))
    orders = BNHD, BHND, *others
    for holds in (statically_true, guarded):  # what heads and head_dim of a dynamic width need
        for order in orders:
            width = _row_stride(call.out, order, holds)
            if width is not None:
                return order, width
    return None


def _row_stride(out: torch.Tensor, order: list[int], holds: Callable) -> int | None:
    """The elements from one row to the next, if `out` is stored in this order, as far as `holds`
    knows."""
    rows = [d for d in order[:3] if not statically_true(out.shape[d] == 1)]
    width = inner = out.stride(rows[-1]) if rows else out.shape[3]
    fits = statically_true(out.stride(3) == 1) or statically_true(out.shape[3] == 1)
    for d in reversed(rows):
        fits = fits and holds(out.stride(d) == inner)
        inner = inner * out.shape[d]
    return width if fits and holds(width >= out.shape[3]) else None
