"""The attention calls by which kernels are held to their emulation, in Triton's interpreter
(test_interpreter.py) and, with longer ones, on a GPU (test_gpu.py).

Lengths are a number of blocks and what lies beyond: -1, 0 or 1 rows, the ends of every tile.
"""

import math

import torch
from torch import Tensor

from sage_inductor.ops.recipe import NAMED
from sage_inductor.ops.visibility import Visibility

BANDS = {  # left, right, bottom_right
    "full": (None, None, False),
    "causal": (None, 0, False),
    "bottom right": (None, 0, True),
    "window": (100, 0, False),
    "wide": (300, 60, False),  # with blocks that all rows of a tile see whole
    "narrow": (3, 2, True),
    "left": (300, None, False),
}


def rand(*shape, device="cpu"):
    return torch.rand(*shape, device=device)


def documents(N, device="cpu"):
    """Four documents one after the other."""
    return torch.arange(N, device=device) * 4 // N


def blocks(B, H, N_q, N_kv, device="cpu"):
    """Each 64 queries see of each 128 keys nothing, a part or all."""
    seen = 3 * rand(B, H, -(-N_q // 64), -(-N_kv // 128), device=device) - 1
    seen = seen.repeat_interleave(64, 2).repeat_interleave(128, 3)[:, :, :N_q, :N_kv]
    return rand(B, H, N_q, N_kv, device=device) < seen


def some(B, H, N_q, N_kv, device="cpu"):
    """Each query of each head sees keys of its own, and none of some keys of the head."""
    kept = rand(B, H, N_q, N_kv, device=device) > 0.7
    return kept & (rand(B, H, 1, N_kv, device=device) > 0.2)


MASKS = {  # B, H, N_q, N_kv, device
    "none": None,
    "keys": lambda B, H, N_q, N_kv, x: rand(B, 1, 1, N_kv, device=x) > 0.5,
    "left padding": lambda B, H, N_q, N_kv, x: rand(B, 1, 1, N_kv, device=x).sort().values > 0.5,
    "rows": some,
    "2-D": lambda B, H, N_q, N_kv, x: rand(N_q, N_kv, device=x) > 0.7,
    "transposed": lambda B, H, N_q, N_kv, x: (rand(H, N_kv, N_q, device=x) > 0.7).mT,
    "broadcast keys": lambda B, H, N_q, N_kv, x: rand(1, 1, N_q, 1, device=x) > 0.5,
    "documents": lambda B, H, N_q, N_kv, x: documents(N_q, x)[:, None] == documents(N_kv, x),
    "blocks": blocks,
    "fp32": lambda B, H, N_q, N_kv, x: torch.randn(1, H, N_q, N_kv, device=x),
    "fp16": lambda B, H, N_q, N_kv, x: torch.randn(B, 1, N_q, N_kv, device=x).half(),
    "bf16, expanded": lambda B, H, N_q, N_kv, x: (
        rand(B, 1, 1, N_kv, device=x).bfloat16().expand(B, H, N_q, N_kv)
    ),
    "lowest": lambda B, H, N_q, N_kv, x: torch.where(
        rand(B, 1, 1, N_kv, device=x) > 0.5, 0.0, -65504.0
    ).half(),
    "-inf": lambda B, H, N_q, N_kv, x: torch.where(
        rand(1, 1, N_q, N_kv, device=x) > 0.5, 0.0, -math.inf
    ),
    "nothing": lambda B, H, N_q, N_kv, x: torch.zeros(N_q, N_kv, dtype=torch.bool, device=x),
}
BOOL = "keys", "left padding", "rows", "2-D", "transposed", "documents", "blocks", "nothing"


def mask_of(name: str, B: int, H: int, N_q: int, N_kv: int, device="cpu") -> Tensor | None:
    return MASKS[name] and MASKS[name](B, H, N_q, N_kv, device)


def hide(k: Tensor, v: Tensor, visibility: Visibility, H_q: int, of_v=math.nan) -> None:
    """Writes Inf and `of_v` where the mask hides keys from every query of a head's group."""
    B, H_kv, N_kv, _ = k.shape
    seen = visibility.tile_summary.amax(2) == 0
    hidden = seen.expand(B, H_q, N_kv).unflatten(1, (H_kv, -1)).all(2)
    k[hidden], v[hidden] = math.inf, of_v


def length(blocks: int, block: int, beyond: int) -> int:
    """Of so many blocks, and one row less or more; of no block 1 to 3."""
    return max(blocks * block + beyond, beyond + 2)


def check(found, expected, few: float, rtol: float, atol: float) -> None:
    """out and lse of a kernel and of its emulation. few: of |out|, what rounding may cost; in a
    small one that a single element is an ulp off costs more."""
    (out, lse), (out_ref, lse_ref) = found, expected
    empty = lse_ref == -math.inf
    assert out.isfinite().all() and (out[empty] == 0).all() and (lse[empty] == -math.inf).all()
    exact = out_ref.double()
    ulp = torch.finfo(out.dtype).eps * exact.abs().max()
    assert (out.double() - exact).norm() <= few * exact.norm() + ulp
    torch.testing.assert_close(lse, lse_ref, rtol=rtol, atol=atol)


def tile_fits(recipe: str, BLOCK_M: int) -> bool:
    return BLOCK_M % NAMED[recipe].sharing.q_span == 0
