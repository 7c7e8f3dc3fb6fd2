"""Which keys a query sees: a band, and an attn_mask with what its tiles hide, told once.

Band (left, right, bottom_right): query i sees keys i - left .. i + right (None: no bound), with
i = 0 at the first key or (bottom_right) the last query at the last key. SDPA's is_causal is
(None, 0, False). A query sees a key that both band and mask show it.

    code[i, j] = 0   no weight: False, or -inf
                 1   additive, and the lowest number of its dtype or less: no weight beside others,
                     but a row of nothing else averages over them, so they cannot be left out
                 3   any other
    tile_summary[m, j] = max of code over the BLOCK_M rows i of a tile m of queries

A key counts in smoothing and scales if any row sees it with code 3: what padding holds does not
matter, be it NaN. A tile of queries reads the keys from its first to its last code above 0.
Plain PyTorch: one reduction for Inductor, which reads the mask once.

Shapes: B batch, H heads, N sequence.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

REACHED, COUNTS = 1, 3


class Visibility(NamedTuple):
    """The five arguments by which ops take it, in their order."""

    attn_mask: Tensor | None = None  # [B or 1, H_q or 1, N_q or 1, N_kv or 1], bool or additive
    tile_summary: Tensor | None = None  # [B or 1, H_q or 1, tiles and one more, or 1, N_kv] uint8
    left: int | None = None
    right: int | None = None
    bottom_right: bool = False

    @classmethod
    def of(cls, attn_mask: Tensor | None, band: tuple, n_kv: int, block_m: int) -> "Visibility":
        """attn_mask: two to four dimensions. block_m: rows of the kernel's tile of queries."""
        if attn_mask is None:
            return cls(None, None, *band)
        attn_mask = as_4d(attn_mask)
        return cls(attn_mask, summarize(attn_mask, n_kv, block_m), *band)

    @property
    def band(self) -> tuple[int | None, int | None, bool]:
        return self.left, self.right, self.bottom_right

    def keys(self, heads_kv: int) -> Tensor | None:
        """uint8 [B or 1, H_kv or 1, N_kv]: keys that count for any query of any head of their
        group; None: all do."""
        return None if self.tile_summary is None else visible_keys(self.tile_summary, heads_kv)


def as_4d(attn_mask: Tensor) -> Tensor:
    """[B or 1, H_q or 1, N_q or 1, N_kv or 1]: broadcasting aligns the last dimensions."""
    return attn_mask[(None,) * (4 - attn_mask.dim())]


def num_tiles(n_q: int, block_m: int):
    """Rows of a tile_summary. One tile more than there are: of a symbolic number that may be 1
    torch asks whether it is, and makes the graph, or the package, for short queries."""
    return (n_q + 2 * block_m - 1) // block_m


def summarize(attn_mask: Tensor, n_kv: int, block_m: int) -> Tensor:
    """attn_mask [B or 1, H_q or 1, N_q or 1, N_kv or 1], bool or floating ->
    tile_summary [B or 1, H_q or 1, num_tiles (or 1, if N_q is 1), N_kv], uint8."""
    if attn_mask.dtype == torch.bool:
        code = attn_mask.to(torch.uint8) * COUNTS
    else:
        lowest = torch.finfo(attn_mask.dtype).min
        code = (attn_mask != -math.inf).to(torch.uint8) * REACHED
        code = torch.where(attn_mask <= lowest, code, COUNTS)  # NaN counts, and is kept
    if attn_mask.shape[2] != 1:
        rows = num_tiles(attn_mask.shape[2], block_m) * block_m - attn_mask.shape[2]
        code = F.pad(code, (0, 0, 0, rows)).unflatten(2, (-1, block_m)).amax(3)
    return code.expand(-1, -1, -1, n_kv).clone(memory_format=torch.contiguous_format)


def visible_keys(tile_summary: Tensor, heads_kv: int) -> Tensor:
    """tile_summary [B or 1, H_q or 1, tiles, N_kv] -> `Visibility.keys`."""
    visible = tile_summary.amax(2)
    if visible.shape[1] != 1:
        visible = visible.unflatten(1, (heads_kv, -1)).amax(2)
    return (visible == COUNTS).to(torch.uint8)
