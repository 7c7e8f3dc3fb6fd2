"""What a decision about an attention call may depend on: its sizes, dtype and device, and what
hides keys. A `CallShape` is made of a `Call` while its graph is compiled, of a family of calls that
is timed beforehand (choose/families.py), or of an `AttentionCall` when a kernel is chosen.

Shapes: B batch, H_q and H_kv heads, N_q and N_kv sequence, D head_dim (D_v of v).
"""

import itertools
from typing import Any, NamedTuple

import torch

from sage_inductor.ops import gpus
from sage_inductor.ops.gpus import Gpu
from sage_inductor.ops.symbols import guarded, hint, specialised
from sage_inductor.ops.visibility import FULL, Band


class CallShape(NamedTuple):
    """Sizes are numbers, or symbols where the shape is dynamic."""

    device: torch.device | Gpu
    dtype: torch.dtype  # that attention returns
    q: tuple  # [B, H_q, N_q, D]
    k: tuple  # [B, H_kv, N_kv, D]; B may be 1, where all batches share k and v
    v: tuple  # [B, H_kv, N_kv, D_v], as k
    band: Band = FULL
    mask: tuple | None = None  # attn_mask's shape
    mask_dtype: torch.dtype | None = None
    block_size: tuple[int, int] | None = None  # of lists of blocks, of queries and of keys
    has_tail: bool = False  # means stand for the blocks that no list names
    is_flex: bool = False  # flex_attention computes it, which needs no mask for a window
    trains: bool = False  # forward and backward are timed together
    packed: bool = False  # q, k and v hold documents, and lists and mask say which (documents.py)

    @property
    def kind(self) -> str:
        """One of choose/cost.py's KINDS, or "blocks": lists of them."""
        if self.block_size is not None:
            return "blocks"
        if self.mask is None:
            is_flex = self.is_flex and self.band.kind == "window"
            kind = "flex window" if is_flex else self.band.kind
        elif guarded(self.mask[-2] == 1):
            kind = "keys"
        else:
            kind = "mask" if self.mask_dtype == torch.bool else "bias"
        return kind + "-training" * self.trains

    @property
    def head_dim(self) -> int:
        """The wider of k's and v's; a dynamic one is specialised."""
        return max(specialised(self.q[3]), specialised(self.v[3]))

    @property
    def lengths(self) -> tuple:
        """(N_q, N_kv)."""
        return self.q[2], self.k[2]

    @property
    def capability(self) -> Any:
        """tuple[int, int]; None: a CPU."""
        return None if self.device.type == "cpu" else gpus.capability(self.device)

    def hinted(self) -> "CallShape | None":
        """The same with the sizes that are compiled for, unguarded. None: one depends on data."""
        q, k, v, mask = (x and tuple(map(hint, x)) for x in (self.q, self.k, self.v, self.mask))
        if None in itertools.chain(q, k, v, mask or ()):
            return None
        return self._replace(q=q, k=k, v=v, mask=mask)
