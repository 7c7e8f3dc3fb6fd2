"""Which keys a query sees: a band, an attn_mask with what its tiles hide, told once, and lists of
blocks.

Band (left, right, bottom_right): query i sees keys i - left .. i + right (None: no bound), with
i = 0 at the first key or (bottom_right) the last query at the last key. SDPA's is_causal is
(None, 0, False). A query sees a key that both band and mask show it.

    code[i, j] = 0   no weight: False, or -inf
                 1   additive, and the lowest number of its dtype or less: no weight beside others,
                     but a row of nothing else averages over them, so they cannot be left out
                 3   any other
    tile_summary[m, j] = max of code over the BLOCK_M rows i of a tile m of queries

Block lists, as FlexAttention's BlockMask has them: a block of block_q queries sees the blocks of
block_kv keys that its lists name, and no other. The band holds for what kv_indices names (partial
blocks, which flex_attention gives to mask_mod), not for what full_kv_indices names; attn_mask holds
for both. A block that is named twice counts twice, as in flex_attention.

A key counts in smoothing and scales if any row sees it with code 3: what padding holds does not
matter, be it NaN. Where no key has code 3, those of code 1 count, over which all rows average. If
only some rows do, v of the other keys saturates at formats.OF_HIDDEN times the range of those that
count. Keys that the band hides from every query do not count (`SdpaCall.of_seen_keys`), nor do
those of blocks that no list names. A tile of queries reads the keys from its first to its last code
above 0.
Plain PyTorch: one reduction for Inductor, which reads the mask once.

Shapes: B batch, H heads, N sequence, M blocks of a sequence.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_inductor.ops import compat
from sage_inductor.ops.sparse.listed import listed_blocks

REACHED, COUNTS = 1, 3

BLOCK_SIZES = (64, 128, 192, 256)


class Band(NamedTuple):
    """Query i sees keys i - left .. i + right; None: no bound. bottom_right: i + N_kv - N_q in the
    place of i."""

    left: int | None = None
    right: int | None = None
    bottom_right: bool = False

    @property
    def kind(self) -> str:
        """What hides keys: "full" (nothing does), "causal" (the later ones) or "window"."""
        if self.left is None:
            return "full" if self.right is None else "causal"
        return "window"

    def from_the_top(self, N_q: int, N_kv: int) -> tuple[int | None, int | None]:
        """(left, right) of the same band where the diagonal starts at the first of both."""
        shift = (N_kv - N_q) * self.bottom_right
        left = None if self.left is None else self.left - shift
        return left, None if self.right is None else self.right + shift

    def __str__(self):
        bounds = {
            "full": "none",
            "causal": f"causal{f' + {self.right}' * bool(self.right)}",
            "window": f"window({self.left}, {self.right})",
        }
        return bounds[self.kind] + ", bottom right" * self.bottom_right


FULL, CAUSAL = Band(), Band(None, 0)


class BlockLists(NamedTuple):
    """The seven arguments by which ops take it, in their order; all None: there are no lists.

    Row m names the blocks indices[..., m, :num_blocks[..., m]]. An index beyond the keys names no
    key. The number of rows may exceed what N_q takes, and the full lists may be missing.
    tail_block: each tail_block keys of blocks that a row does not name are to its queries one key
    and one value, the means of those that count, with log(how many) added to the score.
    """

    kv_num_blocks: Tensor | None = None  # [B or 1, H_q or 1, M_q], int32
    kv_indices: Tensor | None = None  # [B or 1, H_q or 1, M_q, any width], int32
    full_kv_num_blocks: Tensor | None = None  # as the first two, with a width of their own
    full_kv_indices: Tensor | None = None
    block_q: int | None = None  # of BLOCK_SIZES, as the next
    block_kv: int | None = None
    tail_block: int | None = None  # of TAIL_BLOCKS; None: those keys are left out

    @property
    def size(self) -> tuple[int, int] | None:
        """(block_q, block_kv); None: there are no lists."""
        return None if self.kv_num_blocks is None else (self.block_q, self.block_kv)

    @property
    def lists(self) -> list[tuple[Tensor, Tensor]]:
        """(counts, indices) of the partial blocks and, if there are any, of the full ones."""
        found = [(self.kv_num_blocks, self.kv_indices)]
        if self.full_kv_num_blocks is not None:
            found.append((self.full_kv_num_blocks, self.full_kv_indices))
        return found

    def for_kernels(self) -> "BlockLists":
        """Contiguous, and a list that has room for no block has room for one."""

        def ready(x):
            if not isinstance(x, Tensor):
                return x
            return F.pad(x, (0, 1)) if x.dim() == 4 and x.shape[3] == 0 else x.contiguous()

        return BlockLists(*map(ready, self))


NO_LISTS = BlockLists()


class Visibility(NamedTuple):
    """What ops take, in their order, of which band and blocks are arguments of their own."""

    attn_mask: Tensor | None = None  # [B or 1, H_q or 1, N_q or 1, N_kv or 1], bool or additive
    tile_summary: Tensor | None = None  # [B or 1, H_q or 1, tiles and one more, or 1, N_kv] uint8
    band: Band = FULL
    blocks: BlockLists = NO_LISTS

    @classmethod
    def of(
        cls, attn_mask: Tensor | None, band: Band, n_kv: int, block_m: int,
        blocks: BlockLists = NO_LISTS,
    ) -> "Visibility":  # fmt: skip
        """attn_mask: two to four dimensions. block_m: rows of the kernel's tile of queries."""
        blocks = blocks.for_kernels()
        if attn_mask is None:
            return cls(None, None, band, blocks)
        attn_mask = as_4d(attn_mask)
        return cls(attn_mask, summarize(attn_mask, n_kv, block_m), band, blocks)

    def keys(self, k: Tensor) -> Tensor | None:
        """uint8 [B or 1, H_kv or 1, N_kv] of k [B, H_kv, N_kv, D]: keys that count for any query of
        any head of their group; None: all do."""
        code = None if self.tile_summary is None else self.tile_summary.amax(2)
        if self.blocks.size is not None:
            named = k.new_ones((1, 1, k.shape[2]), dtype=torch.uint8)
            if self.blocks.tail_block is None:
                named = listed_keys(self.blocks, k.shape[2])
            code = named * (COUNTS if code is None else code)
        if code is None:
            return None
        if code.shape[1] != 1:
            code = code.unflatten(1, (k.shape[1], -1)).amax(2)
        most = code.amax(-1, keepdim=True).clamp(min=REACHED)
        return (code == most).to(torch.uint8)


def seen_keys(band: Band, n_q, n_kv) -> tuple | None:
    """The first key that a band shows to any of n_q queries, and the one after the last; None: it
    is known to be all keys. Numbers or symbols. Among these keys alone the band is the same."""
    left, right, bottom_right = band
    if bottom_right:
        first, last = 0 if left is None else torch.sym_max(n_kv - n_q - left, 0), n_kv
    else:
        first, last = 0, n_kv if right is None else torch.sym_min(n_q + right, n_kv)
    return None if compat.statically_known_true(last - first == n_kv) else (first, last)


def as_4d(attn_mask: Tensor) -> Tensor:
    """[B or 1, H_q or 1, N_q or 1, N_kv or 1]: broadcasting aligns the last dimensions."""
    return attn_mask[(None,) * (4 - attn_mask.dim())]


def num_tiles(n_q: int, block_m: int):
    """Rows of a tile_summary: one more than there are tiles. If a symbolic number may be 1, torch
    would ask whether it is, and make the graph, or the package, for short queries alone."""
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


def listed_keys(blocks: BlockLists, n_kv: int) -> Tensor:
    """uint8 [B or 1, H_q or 1, N_kv]: 1 for keys of blocks that any list names, else 0."""
    num_blocks = (n_kv + blocks.block_kv - 1) // blocks.block_kv
    found = [listed_blocks(*each, num_blocks) for each in blocks.lists]
    flags = found[0] if len(found) == 1 else torch.maximum(*found)
    # By methods: an index of fake tensors asks for their GPU, which may not be there.
    flags = flags.unsqueeze(3).expand(-1, -1, -1, blocks.block_kv)
    return flags.flatten(2).narrow(2, 0, n_kv)
