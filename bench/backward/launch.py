"""Launches the kernels on what ops/reference/training_rowscaled.py's `prepare` makes."""

from collections.abc import Callable

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sage_inductor.ops.launch import FP_FUSION, doubled
from sage_inductor.ops.reference.training_rowscaled import Inputs
from sage_inductor.ops.training.hopper import kernel

_DTYPES = {
    torch.int8: gl.int8,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float32: gl.float32,
}


def dq(x: Inputs, out: Tensor, STAGES: int = 3, FLUSH: int = 8) -> Callable[[], object]:
    """A call that writes dQ to out [B, H_q, N_q, D]."""
    B, H_q, N_q, D = out.shape
    H_kv, K_pad, BLOCK_D = x.k.shape[1:]
    args = (
        _rows(x.q), _rows(x.g), _rows(x.k), _rows(x.v), _turned(x.kt), _vector(x.v_scale),
        *x.vectors, x.row_scale, x.k_scale,
        out, *doubled(out.stride())[:3], H_q, H_kv, 2 * N_q, x.q.shape[2], K_pad,
        D, BLOCK_D, STAGES, FLUSH, 160,
    )  # fmt: skip
    grid = (B * H_q * -(-N_q // 192),)
    return lambda: kernel.dq_kernel[grid](*args, num_warps=4, maxnreg=128, **FP_FUSION)


def dkdv(
    x: Inputs, dk: Tensor, dv: Tensor, STAGES: int = 3, FLUSH: int = 8, UNROLL: int = 2,
    FLUSH_DK: int = 32,
) -> Callable[[], object]:  # fmt: skip
    """A call that writes dK and dV to dk and dv [B, H_kv, N_kv, D]."""
    B, H_kv, N_kv, D = dk.shape
    K_pad, BLOCK_D = x.k.shape[2:]
    grid = (B * H_kv * -(-N_kv // 128),)
    part = torch.empty(grid[0] * 128 * BLOCK_D, device=dk.device)
    args = (
        _rows(x.k), _rows(x.v), _rows(x.q), _rows(x.g), _turned(x.qt), _turned(x.ot),
        _vector(x.vectors), x.k_scale, x.v_scale, x.qt_scale, x.ot_scale,
        part, dk, dv, *doubled(dk.stride())[:3], *doubled(dv.stride())[:3],
        H_kv, 2 * N_kv, x.qt.shape[3], K_pad,
        D, BLOCK_D, STAGES, FLUSH, UNROLL, FLUSH_DK, 240,
    )  # fmt: skip
    return lambda: kernel.dkdv_kernel[grid](*args, num_warps=4, maxnreg=168, **FP_FUSION)


def _descriptor(x: Tensor, block: list[int]) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(block, _DTYPES[x.dtype])
    return TensorDescriptor.from_tensor(x, block, layout)


def _rows(x: Tensor) -> TensorDescriptor:
    return _descriptor(x.view(-1, x.shape[3]), [64, x.shape[3]])


def _turned(x: Tensor) -> TensorDescriptor:
    return _descriptor(x.view(-1, x.shape[3]), [x.shape[2], 64])


def _vector(x: Tensor) -> TensorDescriptor:
    return _descriptor(x.view(-1), [64])
