"""How ``sage::rowscaled`` is launched on Hopper: the forward by the attention kernel there, the
backward by three kernels that prepare and two that multiply."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from sage_inductor.ops import gpus
from sage_inductor.ops.attention.hopper import plan
from sage_inductor.ops.attention.hopper.plan import REGISTERS
from sage_inductor.ops.attention.select import hopper_tile
from sage_inductor.ops.attention_call import AttentionCall
from sage_inductor.ops.compat import GluonDescriptor
from sage_inductor.ops.launch import HAS_PDL, doubled, pdl_option
from sage_inductor.ops.quantize.smooth import launch_estimate
from sage_inductor.ops.recipe import ROWSCALED_FORWARD
from sage_inductor.ops.reference.rowscaled import Kept, Operands
from sage_inductor.ops.training.hopper.backward_kernels import dkdv_kernel, dq_kernel
from sage_inductor.ops.training.hopper.prepare import launch_prepare
from sage_inductor.ops.training.kernels import empty_codes, launch_quantize

STAGES, FLUSH = 3, 8  # of loads; blocks of 64 whose sums the tensor cores add up
UNROLL, FLUSH_DK = 2, 32
# Causal, this number of tiles comes last, the longest first and not head after head: two for each
# processor of an H200. Else one processor would still have a long one when the others are done.
LAST_TILES = 2 * 132
MAX_ROWS = 2**29  # of q, and of k, in all heads: TMA counts them in 32 bits


def launch(
    run: Callable, device: torch.device | gpus.Gpu, q: Tensor, k: Tensor, v: Tensor,
    is_causal: bool, scale: float, out_bnhd: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """``sage::rowscaled``. device: q's, or if that is on meta, what it is for."""
    B, H_kv = k.shape[:2]
    if is_causal:
        k_mean, v_mean = None, k.new_empty((B, H_kv, 0), dtype=torch.float32)
    else:
        k_mean, _, v_mean, _, _ = launch_estimate([k, v], None, run, shrink=False)
    of_q = launch_quantize(q, rotated=1.0, shared=1, run=run)[:2]
    by_row = empty_codes(k, 1, exists=is_causal)
    own = by_row if is_causal else None
    of_k = *launch_quantize(k, k_mean, rotated=0.5, own=own, run=run)[:2], *by_row
    of_v = launch_quantize(v, None if is_causal else v_mean, shared=1, run=run)[:2]
    out, stats = launch_forward(q, *of_k, v, is_causal, scale, out_bnhd, run, device)
    return out, *Kept(stats, *of_q, *of_k, *of_v, v_mean)


def launch_forward(
    q: Tensor, k: Tensor, k_scale: Tensor, k_own: Tensor, k_own_scale: Tensor, v: Tensor,
    is_causal: bool, scale: float, out_bnhd: bool, run: Callable, device: torch.device | gpus.Gpu,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q [B, H_q, N_q, D] and v [B, H_kv, N_kv, D] in 16 bits, any strides, and k's codes and scales
    (Kept's) -> out [B, H_q, N_q, D] and Kept.stats. On a Gpu, which need not be here, nothing can
    be copied: NotImplementedError is raised where q or v must be."""
    a = AttentionCall(
        q, k, k_scale[..., None], v, scale, v.shape[2], ROWSCALED_FORWARD.encode(), out_bnhd,
        right=0 if is_causal else None,
    )  # fmt: skip
    if not plan.reads(a):  # q's channels are apart, or v's rows are none that TMA reads
        if isinstance(device, gpus.Gpu):
            raise NotImplementedError("q or v is copied")
        v_padded = F.pad(v, (0, -v.shape[3] % 8)).contiguous()  # of no padding v's strides
        a = a._replace(q=q.contiguous(), v=v_padded[..., : v.shape[3]])
    tile = hopper_tile(a, device)
    if tile is None:
        major, minor = gpus.capability(device)
        raise ValueError(
            "sage::rowscaled: on a GPU it needs compute capability 9.0 and a Triton that the "
            f"Hopper kernel is tested with, got {major}.{minor} and Triton {triton.__version__}"
        )
    own = (k_own, k_own_scale) if is_causal else None
    return plan.launch(a, tile, run, device, keeps_max=True, own=own)


def launch_backward(
    grad: Tensor, out: Tensor, kept: Kept, scale: float, dq: Tensor, dk: Tensor, dv: Tensor,
    run: Callable,
) -> None:  # fmt: skip
    """grad, of out, and out [B, H_q, N_q, D], any strides -> dq as out, dk and dv [B, H_kv, N_kv,
    D], channels side by side."""
    rows = max(x[..., 0].numel() for x in (kept.q, kept.k))
    if rows >= MAX_ROWS:
        raise ValueError(
            f"sage::rowscaled: q and k must have fewer than {MAX_ROWS} rows in all heads, with "
            f"those that pad a head to a multiple of 128, got {rows}"
        )
    operands = launch_prepare(grad, out, kept, scale, run)
    _launch_dq(kept, operands, dq, run)
    _launch_dkdv(kept, operands, dk, dv, run)


def _launch_dq(kept: Kept, x: Operands, dq: Tensor, run: Callable) -> None:
    B, H_q, N_q, D = dq.shape
    H_kv, K_pad, BLOCK_D = kept.k.shape[1:]
    at_launch, consumer = REGISTERS[3]
    k_own = k_own_scale = kt_own = v_scale_own = None
    if kept.is_causal:
        k_own, k_own_scale = _rows(kept.k_own), _numbers(kept.k_own_scale)
        kt_own, v_scale_own = _turned(x.kt_own), _numbers(kept.v_scale)
    run(
        dq_kernel,
        (B * H_q * triton.cdiv(N_q, 192),),
        (_rows(kept.q), _rows(x.g), _rows(kept.k), k_own, _rows(kept.v), _turned(x.kt), kt_own,
         k_own_scale, _numbers(x.v_scale_of_dq), v_scale_own, x.vectors[0], x.m, x.delta,
         x.row_scale, kept.k_scale, dq),
        (*doubled(dq.stride())[:3],
         H_q, H_kv, 2 * N_q, kept.q.shape[2], K_pad,  # shape
         kept.is_causal, D, BLOCK_D, STAGES, FLUSH, HAS_PDL, consumer),
        num_warps=4, maxnreg=at_launch,
    )  # fmt: skip


def _launch_dkdv(kept: Kept, x: Operands, dk: Tensor, dv: Tensor, run: Callable) -> None:
    """Right after `_launch_dq`: it waits for that kernel's end, so that what follows need not."""
    B, H_kv, N_kv, D = dk.shape
    K_pad, BLOCK_D = kept.k.shape[2:]
    at_launch, consumer = REGISTERS[2]
    k_own = k_own_scale = None
    if kept.is_causal:
        k_own, k_own_scale = _rows(kept.k_own), kept.k_own_scale
    tiles = triton.cdiv(N_kv, 128)
    programs = B * H_kv * tiles
    last = min(B * H_kv, triton.cdiv(LAST_TILES, tiles)) if kept.is_causal else 1
    part = x.row_scale.new_empty(programs * 128 * BLOCK_D)
    run(
        dkdv_kernel,
        (programs,),
        (_rows(kept.k), k_own, _rows(kept.v), _rows(kept.q), _rows(x.g), _turned(x.qt),
         _turned(x.ot), _numbers(x.vectors), kept.k_scale, k_own_scale, x.v_scale, x.qt_scale,
         x.ot_scale, part, dk, dv),
        (*doubled(dk.stride())[:3], *doubled(dv.stride())[:3],
         H_kv, 2 * N_kv, x.qt.shape[3], K_pad, last,  # shape
         kept.is_causal, D, BLOCK_D, STAGES, FLUSH, UNROLL, FLUSH_DK, HAS_PDL, consumer),
        num_warps=4, maxnreg=at_launch, **pdl_option(HAS_PDL),
    )  # fmt: skip


def _rows(codes: Tensor) -> GluonDescriptor:
    return plan.described(codes.flatten(0, 2), (64, codes.shape[3]))


def _turned(codes: Tensor) -> GluonDescriptor:
    return plan.described(codes.flatten(0, 2), (codes.shape[2], 64))


def _numbers(x: Tensor) -> GluonDescriptor:
    return plan.described(x.flatten(), (64,))
