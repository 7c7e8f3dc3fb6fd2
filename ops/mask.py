"""What an attn_mask hides, told once: which keys count for statistics, which tiles can be skipped.

    code[i, j] = 0   no weight: False, or -inf
                 1   additive, and the lowest number of its dtype or less: no weight beside others,
                     but a row of nothing else averages over them, so they cannot be left out
                 3   any other
    seen[m, j] = max of code over the BLOCK_M rows i of a tile m of queries

A key counts in smoothing and scales if any row sees it with code 3: what padding holds does not
matter, be it NaN. A tile of queries reads the keys from its first to its last code above 0.
Plain PyTorch: one reduction for Inductor, which reads the mask once.

Shapes: B batch, H heads, N sequence.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

REACHED, COUNTS = 1, 3


def as_4d(attn_mask: Tensor) -> Tensor:
    """[B or 1, H_q or 1, N_q or 1, N_kv or 1]: broadcasting aligns the last dimensions."""
    return attn_mask[(None,) * (4 - attn_mask.dim())]


def summarize(attn_mask: Tensor, n_kv: int, block_m: int) -> Tensor:
    """attn_mask [B or 1, H_q or 1, N_q or 1, N_kv or 1], bool or floating ->
    seen [B or 1, H_q or 1, tiles of queries and one more (or just 1, if N_q is 1), N_kv], uint8."""
    if attn_mask.dtype == torch.bool:
        code = attn_mask.to(torch.uint8) * COUNTS
    else:
        lowest = torch.finfo(attn_mask.dtype).min
        code = (attn_mask != -math.inf).to(torch.uint8) * REACHED
        code = torch.where(attn_mask <= lowest, code, COUNTS)  # NaN counts, and is kept
    if attn_mask.shape[2] != 1:
        # One tile more than there are: of a symbolic number that may be 1 torch asks whether it is,
        # and makes the graph, or the package, for short queries.
        rows = (attn_mask.shape[2] + 2 * block_m - 1) // block_m * block_m - attn_mask.shape[2]
        code = F.pad(code, (0, 0, 0, rows)).unflatten(2, (-1, block_m)).amax(3)
    return code.expand(-1, -1, -1, n_kv).clone(memory_format=torch.contiguous_format)


def visible_keys(seen: Tensor, heads_kv: int) -> Tensor:
    """seen [B or 1, H_q or 1, tiles, N_kv] -> uint8 [B or 1, H_kv or 1, N_kv]: keys that count for
    any query of any head of their group."""
    visible = seen.amax(2)
    if visible.shape[1] != 1:
        visible = visible.unflatten(1, (heads_kv, -1)).amax(2)
    return (visible == COUNTS).to(torch.uint8)
