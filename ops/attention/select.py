"""Which kernel computes an attention call, and with which tile, asked in one place; and the op that
asks, ``sage::attention``.

The tile that the op's arguments are made for is decided by what is known while compiling
(`select`). Which kernel runs also depends on strides and addresses (`launch`).
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from sage_inductor.ops import gpus
from sage_inductor.ops.attention import nvfp4, tiles, triton
from sage_inductor.ops.attention.tiles import Tile
from sage_inductor.ops.attention_call import AttentionCall, as_stored, schema_of
from sage_inductor.ops.call_shape import CallShape
from sage_inductor.ops.notes import warn_once
from sage_inductor.ops.quantize.op import launch_prepare
from sage_inductor.ops.recipe import Recipe
from sage_inductor.ops.reference import attention as reference
from sage_inductor.ops.reference import quantize
from sage_inductor.ops.register import launched_by
from sage_inductor.ops.visibility import CAUSAL


@functools.cache
def select(
    capability: tuple[int, int] | None, recipe: Recipe, head_dim: int, masked: bool,
    block_size: tuple[int, int] | None = None, has_tail: bool = False, packed: bool = False,
) -> Tile:  # fmt: skip
    """The tile of the emulation (capability None) or of the kernel that computes every such call.
    head_dim: the wider of k's and v's. block_size, has_tail, packed: CallShape's. Raises ValueError
    where there is none for the recipe."""
    tile = Tile(128, 128, 1, 1)  # of the emulation
    if block_size is not None:
        reason = why_not_listed(recipe, block_size[0], has_tail, packed)
        if reason:
            raise ValueError(reason)
    if capability is not None:
        tile = tiles.tile(capability, recipe.qk, recipe.pv, head_dim, masked)
    return tile if block_size is None else tiles.of_blocks(tile, *block_size)


def why_not_listed(
    recipe: Recipe, block_q: int, has_tail: bool = False, packed: bool = False
) -> str | None:
    """The reason that no kernel of a recipe takes lists of blocks of this many queries, if there
    is one."""
    if packed and not (recipe.sharing.one_pass and recipe.of_pv.dtype is not None):
        return "no kernel for packed documents but those that prepare an 8-bit v in one pass"
    if recipe.of_qk.block_scaled:
        return f"no kernel for block lists with qk={recipe.qk!r}"
    if has_tail and recipe.of_qk.smooths_q:
        return f"no kernel for a tail with qk={recipe.qk!r}"
    span = recipe.sharing.q_span
    if block_q % span:
        return f"no kernel for block lists of {block_q} queries where {span} share a scale"
    return None


def tile_of(shape: CallShape, recipe: Recipe) -> Tile:
    """`select`, of a call."""
    masked = shape.mask is not None
    lists = shape.block_size, shape.has_tail, shape.packed
    return select(shape.capability, recipe, shape.head_dim, masked, *lists)


def tile_of_hopper(shape: CallShape, recipe: Recipe, warpgroups: int | None = None) -> Tile | None:
    """The Hopper kernel's tile for a call; None where another kernel computes it, whatever its
    strides. warpgroups asks for the tile with that number (0: none); where this call has no such
    tile, the table's is taken."""
    if not tiles.suits_hopper(shape, recipe):
        return None
    kernel = gpus.capability(shape.device), recipe.pv, shape.head_dim
    if shape.block_size is None:
        is_causal = shape.band[:2] == CAUSAL[:2]
        return tiles.hopper(*kernel, is_causal, tiles.Load.of(shape), warpgroups)
    if warpgroups == 0:
        return None
    return tiles.hopper_of_blocks(*kernel, shape.k[2], *shape.block_size, shape.packed)


def launch(run: Callable, gpu: torch.device | gpus.Gpu, a: AttentionCall) -> list[Tensor]:
    """``sage::attention``."""
    if a.k_scale is not None:
        return [*_attend(run, gpu, a)]
    prepared = launch_prepare(run, gpu, a.k, a.v, a.visible, a.decoded, a.tail_block, *a.keys_order)
    return [*_attend(run, gpu, a.with_prepared(prepared)), prepared.k_mean]


def _attend(run: Callable, gpu: torch.device | gpus.Gpu, a: AttentionCall) -> tuple[Tensor, Tensor]:
    """The Hopper kernel where it computes the call, nvfp4.py's for block-scaled recipes, else
    triton.py's. A register cap is worth 1.2x on an H200, with descriptors: at 168 registers three
    programs share an SM instead of two, and at most 8 bytes a thread spill. Without a cap they are
    no faster than pointers (620 and 661 TFLOP/s)."""
    a, recipe = a.without_idle_bounds(), a.decoded
    capability = gpus.capability(gpu)
    tile = select(capability, recipe, a.head_dim, a.attn_mask is not None, a.blocks.size)
    if recipe.of_qk.block_scaled:
        # Native where tensor cores multiply E2M1 with E4M3 scales: tl.dot_scaled compiles to it.
        return nvfp4.launch(a, tile, run, capability[0] in (10, 12))
    of_hopper = hopper_tile(a, gpu)
    if of_hopper is not None:
        return _hopper().launch(a, of_hopper, run, gpu)
    lost = tiles.hopper_unavailable(capability)
    if lost and tiles.suits_hopper(a.shape(gpu), recipe):
        warn_once(lost)
    capped = {} if tile.maxnreg is None else {"tma": True, "maxnreg": tile.maxnreg}
    return triton.launch(a, tile, run, **capped)


def hopper_tile(a: AttentionCall, device: torch.device | gpus.Gpu | None = None) -> Tile | None:
    """`tile_of_hopper`; None as well where the kernel cannot read the call's tensors. device: q's,
    if that is on meta."""
    tile = tile_of_hopper(a.shape(device or a.q.device), a.decoded, a.warpgroups)
    return tile if tile is not None and _hopper().reads(a) else None


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
        prepared = quantize.quantize_kv(a.k, a.v, a.visible, a.decoded, a.tail_block, *a.keys_order)
        a, more = a.with_prepared(prepared), [prepared.k_mean]
    a = a.without_idle_bounds()
    tile = select(None, a.decoded, a.head_dim, a.attn_mask is not None, a.blocks.size)
    out, lse = reference.attention(a, tile.BLOCK_N)
    return [as_stored(out, a.out_bnhd), lse, *more]


attention = launched_by(
    lambda run, gpu, *args: launch(run, gpu, AttentionCall(*args)),
    schema_of(AttentionCall, list[Tensor], AttentionCall.fake),
)(schema_of(AttentionCall, list[Tensor], _attention))
