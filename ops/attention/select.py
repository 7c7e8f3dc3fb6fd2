"""Which kernel computes an attention call, and with which tile, asked in one place; and the op that
asks, ``sage::attention``.

The tile that the op's arguments are made for is decided by what is known while compiling (`select`,
of a `Problem`). Which kernel runs also depends on strides and addresses (`launch`).
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sage_inductor.ops import gpus
from sage_inductor.ops.attention import nvfp4, tiles, triton
from sage_inductor.ops.attention.tiles import Tile
from sage_inductor.ops.attention_call import AttentionCall, as_stored, schema_of
from sage_inductor.ops.notes import warn_once
from sage_inductor.ops.quantize.op import launch_prepare
from sage_inductor.ops.recipe import Recipe
from sage_inductor.ops.reference import attention as reference
from sage_inductor.ops.reference import quantize
from sage_inductor.ops.register import launched_by


class Problem(NamedTuple):
    """What is known of a call while compiling."""

    capability: tuple[int, int] | None  # None: CPU
    recipe: Recipe
    head_dim: int  # the wider of k's and v's
    masked: bool
    block_size: tuple[int, int] | None = None  # of lists of blocks, of queries and of keys

    @classmethod
    def of(
        cls, k: Tensor, v: Tensor, recipe: Recipe, masked: bool,
        block_size: tuple[int, int] | None = None,
    ) -> "Problem":  # fmt: skip
        capability = None if k.device.type == "cpu" else gpus.capability(k.device)
        head_dim = max(int(k.shape[3]), int(v.shape[3]))
        return cls(capability, recipe, head_dim, masked, block_size)


@functools.cache
def select(problem: Problem) -> Tile:
    """The tile of a call, of the emulation or of the kernel that computes every such call. Raises
    ValueError where there is none for the recipe."""
    r, size, tile = problem.recipe, problem.block_size, Tile(128, 128, 1, 1)  # of the emulation
    if size is not None and (reason := why_not_listed(problem)):
        raise ValueError(reason)
    if problem.capability is not None:
        tile = tiles.tile(problem.capability, r.qk, r.pv, problem.head_dim, problem.masked)
    return tile if size is None else tiles.of_blocks(tile, *size)


def why_not_listed(problem: Problem) -> str | None:
    """The reason that no kernel of a recipe takes lists of blocks of this size, if there is one."""
    block_q, _ = problem.block_size
    if problem.recipe.of_qk.block_scaled:
        return f"no kernel for block lists with qk={problem.recipe.qk!r}"
    span = problem.recipe.sharing.q_span
    if block_q % span:
        return f"no kernel for block lists of {block_q} queries where {span} share a scale"
    return None


def launch(run: Callable, gpu: torch.device | gpus.Gpu, a: AttentionCall) -> list[Tensor]:
    """``sage::attention``."""
    if a.k_scale is not None:
        return [*_attend(run, gpu, a)]
    prepared = launch_prepare(run, gpu, a.k, a.v, a.visible, a.decoded)
    return [*_attend(run, gpu, a.with_prepared(prepared)), prepared.k_mean]


def _attend(run: Callable, gpu: torch.device | gpus.Gpu, a: AttentionCall) -> tuple[Tensor, Tensor]:
    """The Hopper kernel where it computes the call, nvfp4.py's for block-scaled recipes, else
    triton.py's. A register cap is worth 1.2x on an H200, with descriptors: at 168 registers three
    programs share an SM instead of two, and at most 8 bytes a thread spill. Without a cap they are
    no faster than pointers (620 and 661 TFLOP/s)."""
    capability, a = gpus.capability(gpu), a.without_idle_bounds()
    tile = _tile(a, capability)
    if a.decoded.of_qk.block_scaled:
        return nvfp4.launch(a, tile, run, tiles.multiplies_nvfp4(capability))
    of_hopper = hopper_tile(a, gpu)
    if of_hopper is not None:
        return _hopper().launch(a, of_hopper, run, gpu)
    mask = None if a.attn_mask is None else a.attn_mask.dtype
    lost = tiles.hopper_unavailable(capability)
    if lost and tiles.suits_hopper(a.decoded, a.head_dim, mask):
        warn_once(lost)
    capped = {} if tile.maxnreg is None else {"tma": True, "maxnreg": tile.maxnreg}
    return triton.launch(a, tile, run, **capped)


def _tile(a: AttentionCall, capability: tuple[int, int] | None) -> Tile:
    masked = a.attn_mask is not None
    return select(Problem(capability, a.decoded, a.head_dim, masked, a.blocks.size))


def hopper_tile(a: AttentionCall, device: torch.device | None = None) -> Tile | None:
    """The Hopper kernel's tile for a call; None where it does not compute it, or is slower.
    a.warpgroups asks for the tile with that number (0: none); where this call has no such tile, the
    table's is taken."""
    device, band, (B, H_q, N_q, _) = device or a.q.device, a.band[:2], a.q.shape
    kernel = gpus.capability(device), a.decoded.pv, a.head_dim
    if a.blocks.size is None:
        load = tiles.Load.of(B * H_q, N_q, a.n_kv, band, a.attn_mask is not None, device)
        tile = tiles.hopper(*kernel, band == (None, 0), load, a.warpgroups)
    elif a.warpgroups != 0:
        tile = tiles.hopper_of_blocks(*kernel, a.n_kv, *a.blocks.size)
    else:
        tile = None
    return None if tile is None or _hopper().why_not(a) is not None else tile


@functools.cache
def _hopper():
    from sage_inductor.ops.attention.hopper import plan  # imports Gluon, which may be missing

    return plan


# -- the op ----


def _attention(a: AttentionCall) -> list[Tensor]:
    """Attention over quantized k, with v quantized or as it is (16-bit).

    Arguments: AttentionCall's. The tile_summary is `Visibility.of`'s for this device's BLOCK_M.
    Returns out [B, H_q, N_q, D_v] of q's dtype, lse [B, H_q, N_q] fp32: natural log, over the keys
    as they were quantized, and where it prepares them Prepared's k_mean, which was taken off them.
    """
    more = []
    if a.k_scale is None:
        prepared = quantize.quantize_kv(a.k, a.v, a.visible, a.decoded)
        a, more = a.with_prepared(prepared), [prepared.k_mean]
    a = a.without_idle_bounds()
    out, lse = reference.attention(a, _tile(a, None).BLOCK_N)
    return [as_stored(out, a.out_bnhd), lse, *more]


attention = launched_by(
    lambda run, gpu, *args: launch(run, gpu, AttentionCall(*args)),
    schema_of(AttentionCall, list[Tensor], AttentionCall.fake),
)(schema_of(AttentionCall, list[Tensor], _attention))
