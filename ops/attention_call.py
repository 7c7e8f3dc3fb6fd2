"""What an attention kernel computes from: the arguments of ``sage::attention``, as one object.

Kernels take it whole, the ops' schemas follow its fields, and a new argument is a new field.
"""

import inspect
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sage_inductor.ops.call_shape import CallShape
from sage_inductor.ops.formats import MAX_ROWS, Prepared, rotation_scale
from sage_inductor.ops.gpus import Gpu
from sage_inductor.ops.recipe import Recipe, decode
from sage_inductor.ops.visibility import Band, BlockLists, num_tiles


class AttentionCall(NamedTuple):
    """Shapes: B batch, H_q and H_kv heads, N_q and N_kv sequence, D head_dim (D_v of v)."""

    q: Tensor  # [B, H_q, N_q, D], any strides
    k: Tensor  # codes, as Prepared.k, or as it comes: [B, H_kv, N_kv, D], any strides
    k_scale: Tensor | None  # None: the op prepares k and v
    v: Tensor  # codes, as Prepared.v, or as it comes: [B, H_kv, N_kv, D_v], any strides
    scale: float  # of the softmax
    n_kv: int  # keys without padding
    recipe: str  # Recipe.encode()
    out_bnhd: bool = False  # store out in [B, N, H, D] order
    attn_mask: Tensor | None = None  # Visibility's, as the next four
    tile_summary: Tensor | None = None
    left: int | None = None
    right: int | None = None
    bottom_right: bool = False
    v_scale: Tensor | None = None  # None where v is 16-bit, as the next
    v_mean: Tensor | None = None
    k_blocks: Tensor | None = None  # where the formats are block-scaled, as the next
    v_blocks: Tensor | None = None
    q_mean: Tensor | None = None  # [B, H_q, T, D] and delta [B, H_q, T, N_pad] of `smooth_q`, where
    delta: Tensor | None = None  # q is smoothed
    visible: Tensor | None = None  # Visibility.keys, where the op prepares k and v
    warpgroups: int | None = None  # a schedule: see select.py; it changes speed, not the result
    kv_num_blocks: Tensor | None = None  # BlockLists' seven, contiguous
    kv_indices: Tensor | None = None
    full_kv_num_blocks: Tensor | None = None
    full_kv_indices: Tensor | None = None
    block_q: int | None = None
    block_kv: int | None = None
    tail_block: int | None = None
    tail_k: Tensor | None = None  # Prepared's four
    tail_k_scale: Tensor | None = None
    tail_v: Tensor | None = None
    tail_bias: Tensor | None = None
    perm: Tensor | None = None  # SdpaCall's: how q is read, out and lse are stored, and what the op
    # prepares of k and v is read. All else comes in that order, v in 16 bits, too
    perm_k: Tensor | None = None  # SdpaCall's three. Then n_kv is the number of places, lse is of
    spans: Tensor | None = None  # places, and Prepared's k_mean, v_scale and v_mean are [S, H, D]
    documents: Tensor | None = None

    def with_prepared(self, p: Prepared) -> "AttentionCall":
        of_kernels = p._replace(v=self.v if p.v is None else p.v)._asdict()
        del of_kernels["k_mean"]
        return self._replace(**of_kernels)

    @property
    def decoded(self) -> Recipe:
        return decode(self.recipe)

    @property
    def band(self) -> Band:
        return Band(self.left, self.right, self.bottom_right)

    @property
    def keys_order(self) -> tuple:
        """perm of keys, spans and documents."""
        return self.perm if self.perm_k is None else self.perm_k, self.spans, self.documents

    @property
    def n_q(self):
        """Queries, or places of them."""
        return self.q.shape[2] if self.perm is None else self.perm.shape[0]

    def shape(self, device: torch.device | Gpu) -> CallShape:
        """What a kernel on this device is chosen by."""
        (B, H_q, _, D), H_kv, mask, N_q = self.q.shape, self.k.shape[1], self.attn_mask, self.n_q
        of_mask = (None, None) if mask is None else (mask.shape, mask.dtype)
        return CallShape(
            device, self.q.dtype, (B, H_q, N_q, int(D)), (B, H_kv, self.n_kv, int(D)),
            (B, H_kv, self.n_kv, self.head_dim_v), self.band, *of_mask, self.blocks.size,
            self.tail_block is not None, packed=self.documents is not None,
        )  # fmt: skip

    @property
    def blocks(self) -> BlockLists:
        at = self._fields.index(BlockLists._fields[0])
        return BlockLists(*self[at : at + len(BlockLists._fields)])

    @property
    def scale_of_codes(self) -> float:
        """What the scaled product of codes of q and k is multiplied by."""
        return self.scale * (rotation_scale(int(self.k.shape[3])) if self.decoded.rotated else 1.0)

    @property
    def head_dim_v(self) -> int:
        return int((self.v if self.v_mean is None else self.v_mean).shape[-1])

    @property
    def head_dim(self) -> int:
        """The wider of k's and v's."""
        return max(int(self.q.shape[3]), self.head_dim_v)

    def without_idle_bounds(self) -> "AttentionCall":
        """The same call without the bounds of its band that hide no key: a window as long as the
        sequence is causal, whose tiles the Hopper kernel deals out by their lengths. A length that
        is a symbol leaves its bound."""

        def hides(bound: int | None, n) -> bool:
            return bound is not None and not (isinstance(n, int) and bound >= n - 1)

        if self.left is None and self.right is None:
            return self
        n_q, n_kv = self.n_q, self.n_kv
        far_left, far_right = (n_kv, n_q) if self.bottom_right else (n_q, n_kv)
        return self._replace(
            left=self.left if hides(self.left, far_left) else None,
            right=self.right if hides(self.right, far_right) else None,
        )

    def empty_outputs(self) -> tuple[Tensor, Tensor]:
        out, lse = empty_outputs(self.q, self.head_dim_v, self.out_bnhd)
        return out, lse if self.spans is None else lse.new_empty((*lse.shape[:2], self.n_q))

    def fake(self) -> list[Tensor]:
        """What the op gives, without memory."""
        found = [*self.empty_outputs()]
        if self.k_scale is None:
            B, H, _, D = self.k.shape
            B = B if self.spans is None else self.spans.shape[0]
            found.append(self.k.new_empty((B, H, D), dtype=torch.float32))
        return found

    def mask_arguments(self, block_m: int) -> tuple:
        """(Mask, Seen), their strides, MASK and ADDITIVE, as kernels with tiles of block_m rows of
        q take them. Raises ValueError for a summary that was made for other tiles."""
        mask, summary = self.attn_mask, self.tile_summary
        if mask is None:
            return (self.q, self.q), (0,) * 7, 0, False  # neither is read
        rows = 1 if mask.shape[2] == 1 else num_tiles(mask.shape[2], block_m)
        if isinstance(rows, int) and summary.shape[2] != rows:
            raise ValueError(
                f"sage::attention: tile_summary must have {rows} rows for tiles of {block_m} "
                f"queries, got {summary.shape[2]}"
            )
        strides = [
            *broadcast_strides(mask.shape, mask.stride()),
            *broadcast_strides(mask.shape, summary.stride()[:3]),
        ]
        kind = 1 if mask.shape[2] == 1 else 2
        return (mask, summary), strides, kind, mask.dtype != torch.bool

    def list_arguments(self) -> tuple:
        """Kv_count, Kv_index, Full_count and Full_index, as kernels take them; the strides of a
        batch and a head of counts, and the widths of the two lists; BLOCK_Q, BLOCK_KV (0: there are
        no lists) and FULL."""
        if self.blocks.size is None:
            return (self.q,) * 4, (0,) * 4, (0, 0, False)  # none is read
        lists = self.blocks.lists
        (counts, indices), (full_counts, full_indices) = lists[0], lists[-1]
        B, H, M = counts.shape
        strides = (0 if B == 1 else H * M), (0 if H == 1 else M)
        widths = indices.shape[3], full_indices.shape[3]
        tensors = counts, indices, full_counts, full_indices
        return tensors, (*strides, *widths), (*self.blocks.size, len(lists) == 2)

    def band_arguments(self) -> tuple[int, int, bool]:
        """LEFT, RIGHT (-1: no bound) and BOTTOM_RIGHT. No sequence is longer than MAX_ROWS, and
        sums with a bound are 32-bit numbers."""
        bounds = (-1 if x is None else min(x, MAX_ROWS) for x in (self.left, self.right))
        return *bounds, self.bottom_right


def broadcast_strides(shape, strides) -> list:
    """strides, of the first dimensions, with 0 where a tensor of this shape is repeated."""
    return [0 if n == 1 else stride for n, stride in zip(shape, strides, strict=False)]


def empty_outputs(q: Tensor, D_v: int, out_bnhd: bool) -> tuple[Tensor, Tensor]:
    """out [B, H_q, N_q, D_v] of q's dtype, contiguous in [B, N, H, D] or [B, H, N, D] order, and
    lse [B, H_q, N_q] fp32."""
    B, H, N, _ = q.shape
    return empty_stored(q, (B, H, N, D_v), out_bnhd), q.new_empty((B, H, N), dtype=torch.float32)


def empty_stored(like: Tensor, shape: tuple, bnhd: bool) -> Tensor:
    """[B, H, N, D] of like's dtype, contiguous, or (bnhd) in [B, N, H, D] order."""
    B, H, N, D = shape
    return like.new_empty((B, N, H, D)).transpose(1, 2) if bnhd else like.new_empty((B, H, N, D))


def as_stored(out: Tensor, out_bnhd: bool) -> Tensor:
    """out in the memory order of `empty_outputs`."""
    if out_bnhd:
        return out.transpose(1, 2).contiguous().transpose(1, 2)
    return out.contiguous()


def schema_of(arguments: type, returns, function: Callable) -> Callable:
    """``function(arguments(...))`` with the fields of a NamedTuple for a signature, of which torch
    makes an op's schema."""

    def call(*args, **kwargs):
        return function(arguments(*args, **kwargs))

    call.__signature__ = inspect.signature(arguments).replace(return_annotation=returns)
    call.__name__, call.__doc__ = function.__name__, function.__doc__
    return call
