"""Which kernel computes an attention call, and with which tile: one table, asked in one place. And
the two ops that ask it, ``sage::attention`` and ``sage::attention_opaque``.

The op that a graph calls is decided by what is known while compiling (`select`, of a `Problem`);
which of the kernels behind the opaque op runs also depends on strides and addresses (`run_opaque`).
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
from sage_inductor.ops.compile import travels
from sage_inductor.ops.launch import launch_cached, launch_traced
from sage_inductor.ops.notes import warn_once
from sage_inductor.ops.recipe import Recipe
from sage_inductor.ops.reference import attention as reference
from sage_inductor.ops.register import opaque, triton_op


class Problem(NamedTuple):
    """What is known of a call while compiling."""

    capability: tuple[int, int] | None  # None: CPU
    recipe: Recipe
    head_dim: int  # the wider of k's and v's
    masked: bool
    traced: bool = False  # only kernels that Inductor sees
    block_size: tuple[int, int] | None = None  # of lists of blocks, of queries and of keys

    @classmethod
    def of(
        cls, k: Tensor, v: Tensor, recipe: Recipe, masked: bool, portable: bool,
        block_size: tuple[int, int] | None = None,
    ) -> "Problem":  # fmt: skip
        """portable: only what travels in a package."""
        capability = None if k.device.type == "cpu" else gpus.capability(k.device)
        head_dim = max(int(k.shape[3]), int(v.shape[3]))
        return cls(capability, recipe, head_dim, masked, portable and not travels(), block_size)


class Kernel(NamedTuple):
    """A row of KERNELS. The first that nothing speaks against computes a call."""

    name: str
    why_not: Callable[[Problem], str | None]
    traced: bool  # Inductor sees and launches it; lowering/package.py brings the other to packages
    launch: Callable[[AttentionCall, Tile], tuple[Tensor, Tensor]]


class Selected(NamedTuple):
    kernel: Kernel
    tile: Tile


def _emulate(a: AttentionCall, tile: Tile) -> tuple[Tensor, Tensor]:
    out, lse = reference.attention(a, tile.BLOCK_N)
    return as_stored(out, a.out_bnhd), lse


def _tile(problem: Problem) -> Tile:
    """The table's; a ValueError if the recipe cannot run on the device."""
    r, size, tile = problem.recipe, problem.block_size, Tile(128, 128, 1, 1)  # of the emulation
    if problem.capability is not None:
        tile = tiles.tile(problem.capability, r.qk, r.pv, problem.head_dim, problem.masked)
    return tile if size is None else tiles.of_blocks(tile, *size)


def _on_a_gpu(problem: Problem) -> str | None:
    return None if problem.capability is None else "GPUs have kernels"


def _not_block_scaled(problem: Problem) -> str | None:
    return "the recipe is block-scaled" if problem.recipe.of_qk.block_scaled else None


def _no_cap(problem: Problem) -> str | None:
    if problem.traced:
        return "only kernels that Inductor sees are asked for"
    uncapped = _tile(problem).maxnreg is None
    return _not_block_scaled(problem) or ("the tile has no register cap" if uncapped else None)


def run_opaque(
    a: AttentionCall, tile: Tile, run: Callable = launch_cached,
    device: torch.device | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The Hopper kernel where it computes the call. Else triton.py's with descriptors and a
    register cap, worth 1.2x on an H200: at 168 registers three programs share an SM instead of two,
    and at most 8 bytes a thread spill. device: q's, if that is on meta."""
    of_hopper = hopper_tile(a, device)
    if of_hopper is not None:
        return _hopper().launch(a, of_hopper, run, device)
    mask = None if a.attn_mask is None else a.attn_mask.dtype
    lost = tiles.hopper_unavailable(gpus.capability(device or a.q.device))
    if lost and tiles.suits_hopper(a.decoded, a.head_dim, mask):
        warn_once(lost)
    return triton.launch(a, tile, run, tma=True, maxnreg=tile.maxnreg)


def hopper_tile(a: AttentionCall, device: torch.device | None = None) -> Tile | None:
    """The Hopper kernel's tile for a call; None where it does not compute it, or is slower.
    a.warpgroups asks for the tile of so many (0: none); where this call has no such tile, the
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


def _run_triton(a: AttentionCall, tile: Tile) -> tuple[Tensor, Tensor]:
    # Descriptors made in the kernel are silently wrong in packages of torch 2.11, and without a
    # register cap, which Inductor cannot pass on, no faster than pointers (620 and 661 TFLOP/s).
    return triton.launch(a, tile, launch_traced)


def _run_nvfp4(a: AttentionCall, tile: Tile) -> tuple[Tensor, Tensor]:
    native = tiles.multiplies_nvfp4(gpus.capability(a.q.device))
    return nvfp4.launch(a, tile, launch_traced, native)


KERNELS = (
    Kernel("emulation", _on_a_gpu, traced=True, launch=_emulate),
    Kernel("opaque", _no_cap, traced=False, launch=run_opaque),
    Kernel("triton", _not_block_scaled, traced=True, launch=_run_triton),
    Kernel("nvfp4", lambda problem: None, traced=True, launch=_run_nvfp4),
)


@functools.cache
def select(problem: Problem) -> Selected:
    """The kernel and tile of a call. Raises ValueError where there is none for the recipe."""
    if problem.block_size is not None and (reason := why_not_listed(problem)):
        raise ValueError(reason)
    kernel = next(each for each in KERNELS if each.why_not(problem) is None)
    return Selected(kernel, _tile(problem))


def why_not_listed(problem: Problem) -> str | None:
    """The reason that no kernel of a recipe takes lists of blocks of this size, if there is one."""
    block_q, _ = problem.block_size
    if problem.recipe.of_qk.block_scaled:
        return f"no kernel for block lists with qk={problem.recipe.qk!r}"
    span = problem.recipe.sharing.q_span
    if block_q % span:
        return f"no kernel for block lists of {block_q} queries where {span} share a scale"
    return None


# -- the ops ----


def problem_of(a: AttentionCall, capability: tuple[int, int] | None, traced=False) -> Problem:
    masked = a.attn_mask is not None
    return Problem(capability, a.decoded, a.head_dim, masked, traced, a.blocks.size)


def _run(a: AttentionCall, traced: bool) -> tuple[Tensor, Tensor]:
    capability = None if a.q.device.type == "cpu" else gpus.capability(a.q.device)
    kernel, tile = select(problem_of(a, capability, traced))
    return kernel.launch(a.without_idle_bounds(), tile)


def _attention(a: AttentionCall) -> tuple[Tensor, Tensor]:
    """Attention over quantized k, with v quantized or as it is (16-bit). Exportable.

    Arguments: AttentionCall's. The tile_summary is `Visibility.of`'s for this device's BLOCK_M.
    Returns out [B, H_q, N_q, D_v] of q's dtype, lse [B, H_q, N_q] fp32: natural log, over the keys
    as they were quantized (the caller knows what smoothing took off).
    """
    return _run(a, traced=True)


def _attention_opaque(a: AttentionCall) -> tuple[Tensor, Tensor]:
    """`attention` by the fastest kernel of a device whose tiles ask for what Inductor cannot pass
    on. Opaque to Inductor; a package launches it by C++ of ours (lowering/package.py)."""
    return _run(a, traced=False)


def launched(given: dict, run: Callable, gpu: gpus.Gpu) -> tuple[Tensor, Tensor]:
    """What `attention_opaque` launches on such a GPU, of tensors on meta, by `run`."""
    a = AttentionCall(**given).without_idle_bounds()
    return run_opaque(a, select(problem_of(a, gpu.capability)).tile, run, gpu)


OUTPUTS = tuple[Tensor, Tensor]
attention = triton_op(schema_of(AttentionCall, OUTPUTS, _attention))
attention_opaque = opaque(
    "attention_opaque",
    schema_of(AttentionCall, OUTPUTS, _attention_opaque),
    schema_of(AttentionCall, OUTPUTS, AttentionCall.empty_outputs),
    launched,
)
