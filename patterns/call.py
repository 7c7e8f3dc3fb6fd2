"""One attention call, whoever spells it, in the terms of scaled_dot_product_attention.

A finder (sdpa.py, softmax/, modules.py, flex.py) looks at one node of a graph and returns the
`Call` that it anchors, or None. What a replacement needs beside the graph's own nodes (a transpose,
a projection) the finder inserts before the anchor with an `Emitter`. If the call stays as it was,
these nodes are taken out again.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from sage_inductor.ops.call_shape import CallShape
from sage_inductor.ops.documents import BLOCK
from sage_inductor.ops.recipe import NAMED, decode
from sage_inductor.ops.sparse.selector import Selection
from sage_inductor.ops.visibility import FULL, NO_LISTS, Band, BlockLists
from sage_inductor.patterns import reasons
from sage_inductor.patterns.graph import Emitter, by_schema, dims, value_of
from sage_inductor.patterns.module_path import module_path
from sage_inductor.patterns.reasons import Reason


@dataclasses.dataclass
class Call:
    """q [B, H_q, N_q, D], k [B, H_kv, N_kv, D], v [B, H_kv, N_kv, D_v]: nodes of the graph. A query
    sees the keys that mask, band and block lists show it (ops/visibility.py)."""

    node: Node  # its uses become `finish(out)`
    spelling: str  # "SDPA", "softmax", "nn.MultiheadAttention", "flex_attention", ...
    emit: Emitter
    q: Node
    k: Node
    v: Node
    out: torch.Tensor  # the value attention returns: [B, H_q, N_q, D_v]
    attn_mask: Node | None = None
    dropout_p: float = 0.0
    band: Band = FULL
    blocks: BlockLists = NO_LISTS  # of nodes; the band holds for the partial ones alone
    scale: float | None = None
    enable_gqa: bool = False
    finish: Callable[[Node], Node] = lambda out: out  # from attention's output to `node`'s value
    refused: Reason | None = None  # why this call cannot be written as SDPA
    dead: list[Node] = dataclasses.field(default_factory=list)  # without uses once it is, in order
    recipe: str | None = None  # the argument of sage_inductor.attention, as the next
    keep: Selection | dict[str, Any] | list[float] | float | None = None
    # cu_q, and cu_k and seqused_k or None, where q, k and v hold documents: ops/documents.py. The
    # band is then that of each, at its bottom right.
    documents: tuple[Node, Node | None, Node | None] | None = None
    sink: Node | None = None  # [B, H_q, N_q, 1]: a score more in each row, of a value of 0
    lse: Node | None = None  # the exact one [B, H_q, N_q], fp32, where the call returns it
    selection: Selection | None = None  # which blocks of keys are kept, where that is asked for
    repeated: int = 1  # k and v are nodes whose heads the graph repeats so often for SDPA

    @property
    def shape(self) -> CallShape:
        q, k, v, mask = map(value_of, (self.q, self.k, self.v, self.attn_mask))
        of_mask = (None, None) if mask is None else (tuple(mask.shape), mask.dtype)
        shapes = tuple(q.shape), tuple(k.shape), tuple(v.shape)
        is_flex = self.spelling == "flex_attention"
        has_tail = self.selection is not None and self.selection.tail
        if self.documents is not None:
            of_mask = (1, 1, 1, k.shape[2]), torch.bool
        packed = self.documents is not None
        of_call = self.band, *of_mask, self.block_size, has_tail, is_flex, False, packed
        return CallShape(q.device, self.out.dtype, *shapes, *of_call)

    @property
    def block_size(self) -> tuple[int, int] | None:
        """Queries and keys of a block, where lists say which blocks are computed."""
        if self.documents is not None:
            return BLOCK, BLOCK
        return self.blocks.size if self.selection is None else self.selection.size


DECODE = "decode"  # in a recipe's place


class Decision(NamedTuple):
    """What becomes of a call, and why."""

    recipe: str | None  # a name in recipe.NAMED, with which sage::sdpa computes it
    reason: Reason | str  # why the call stays as it was or, a str, what chose the recipe
    warpgroups: int | None = None  # a schedule, where times were measured: SdpaCall's
    selection: Selection | None = None  # the blocks of keys that are kept; None: all
    trained_by: str | None = None  # what computes forward and backward together: a name in OPS
    times: tuple[float, float] | None = None  # ms of the fastest recipe and of SDPA, if compared
    decodes: bool = False  # ``sage::decode`` computes it, exactly
    unrepeats: bool = False  # stays SDPA, which takes the heads of k and v before their repeats

    @property
    def name(self) -> str | None:
        """What computes the call: DECODE, `trained_by` or `recipe`. None: it stays as it was."""
        return DECODE if self.decodes else self.trained_by or self.recipe


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
    decision: Decision
    device: str = "?"  # of q: "cpu", "cuda:0"
    stage: str | None = None  # in which this becomes of it; None: in all that have no site

    def __post_init__(self):
        if not (self.rewritten or isinstance(self.decision.reason, Reason)):
            raise TypeError(f"a call that stays must have a Reason, got {self.decision.reason!r}")

    @classmethod
    def of(cls, call: Call, decision: Decision) -> "Site":
        q, k = value_of(call.q), value_of(call.k)
        dtype = str(getattr(call.out, "dtype", "?")).removeprefix("torch.")
        return cls(
            module_path(call.node), call.node.name, call.spelling, dims(q), dims(k), dtype,
            mask_text(call), decision, str(getattr(q, "device", "?")),
        )  # fmt: skip

    @property
    def recipe(self) -> str | None:
        """What computes the call, as people read it: a recipe's name, or that of what trains
        ("fp8-backward", "sagebwd"), or DECODE. None: the call stays as it was."""
        return self.decision.name

    @property
    def reason(self) -> str:
        return str(self.decision.reason)

    @property
    def why(self) -> Reason:
        """The reason, with its cause, for which a call stays."""
        return self.decision.reason

    @property
    def rewritten(self) -> bool:
        return self.recipe is not None


def other_dtype(call: Call, dtype: torch.dtype) -> Reason | None:
    """The reason that a call stays whose tensors are not all of this dtype. Autocast casts what
    sage::sdpa takes, but nothing of the op that is called."""
    tensors, regions = [value_of(x) for x in (call.q, call.k, call.v)], call.emit.autocasts
    device = tensors[0].device.type
    found = [x.dtype for x in (*tensors, call.out)] + [region[1] for region in regions]
    found += [torch.get_autocast_dtype(device)] * torch.is_autocast_enabled(device)
    wrong = [str(x)[6:] for x in found if x != dtype]
    return reasons.DTYPE([str(dtype)[6:]], wrong[0]) if wrong else None


def gathered(node: Node) -> Site | None:
    """The site of a call of ``sage_inductor.gather_attention``, which stays what it is."""
    if node.op != "call_function" or node.target not in GATHERS:
        return None
    given = by_schema(node, node.target)
    q, k, recipe = value_of(given["q"]), value_of(given["k"]), decode(given["recipe"])
    name = next(name for name, each in NAMED.items() if each == recipe)
    how = "asked for, of all keys; how they travel between ranks is chosen when it runs"
    decision = Decision(name, how)
    return Site(
        module_path(node), node.name, "sage_inductor.gather_attention", dims(q), dims(k),
        str(q.dtype).removeprefix("torch."), "causal" if given["is_causal"] else "none", decision,
        str(q.device),
    )  # fmt: skip


GATHERS = (torch.ops.sage.gather_sdpa, torch.ops.sage.gather_sdpa.default)


def mask_text(call: Call) -> str:
    """What hides keys or takes weight from them, for people: "causal + bool[1, 1, 64, 64]"."""
    parts = [] if call.band.kind == "full" else [str(call.band)]
    if call.documents is not None:
        parts.append("packed documents")
    if call.blocks.size is not None:
        parts.append("blocks of {} x {}".format(*call.blocks.size))
    if call.attn_mask is not None:
        mask = value_of(call.attn_mask)
        dtype = str(getattr(mask, "dtype", "?")).removeprefix("torch.")
        parts.append(f"{dtype}{list(dims(mask))}")
    if call.sink is not None:
        parts.append("a sink")
    return " + ".join(parts) or "none"
