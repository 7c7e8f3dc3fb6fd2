"""Launches the kernels on recipe.py's inputs."""

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from bench.backward import kernels


def _descriptor(x, block):
    dtype = {torch.int8: gl.int8, torch.float8_e4m3fn: gl.float8e4nv, torch.float32: gl.float32}
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype[x.dtype])
    return TensorDescriptor.from_tensor(x, block, layout)


def dq(x, out, BLOCK_N, WARPGROUPS, STAGES, FLUSH, UNROLL, S_AHEAD, **more):
    """A call that launches the kernel."""
    heads, D = x.q8.shape[0], x.q8.shape[2]
    at_launch, consumer = kernels.REGISTERS[WARPGROUPS]

    def rows(t, n):
        return _descriptor(t.view(-1, D), [n, D])

    args = (
        rows(x.q8, 64), rows(x.g8, 64), rows(x.k8, BLOCK_N), rows(x.v8, BLOCK_N),
        _descriptor(x.kt.view(-1, x.pad), [D, BLOCK_N]), _descriptor(x.v_scale.view(-1), [BLOCK_N]),
        x.vectors[0], x.vectors[1], x.vectors[2], x.row_scale, x.k_scale, x.kt_scale,
        out, x.N, x.pad, x.pad,
    )  # fmt: skip
    grid = (heads * -(-x.N // (64 * WARPGROUPS)),)
    constants = dict(D=D, BLOCK_N=BLOCK_N, WARPGROUPS=WARPGROUPS, STAGES=STAGES, FLUSH=FLUSH,
                     UNROLL=UNROLL, S_AHEAD=bool(S_AHEAD), REGISTERS=consumer, **more)  # fmt: skip
    return lambda: kernels.dq_kernel[grid](*args, **constants, num_warps=4, maxnreg=at_launch)


def dkdv(x, dk, dv, STAGES, FLUSH, UNROLL, FLUSH_DK, **more):
    heads, D = x.q8.shape[0], x.q8.shape[2]

    def rows(t):
        return _descriptor(t.view(-1, D), [64, D])

    grid = (heads * -(-x.N // 128),)
    part = torch.empty(grid[0] * 128 * D, device=x.q8.device)
    args = (
        rows(x.k8), rows(x.v8), rows(x.q8), rows(x.g8),
        _descriptor(x.qt.view(-1, x.pad), [D, 64]), _descriptor(x.ot.view(-1, x.pad), [D, 64]),
        _descriptor(x.vectors.view(-1), [64]), x.k_scale, x.v_scale, x.qt_scale, x.ot_scale,
        part, dk, dv, x.N, x.pad, x.pad,
    )  # fmt: skip
    constants = dict(
        D=D, STAGES=STAGES, FLUSH=FLUSH, UNROLL=UNROLL, FLUSH_DK=FLUSH_DK, REGISTERS=240, **more
    )
    return lambda: kernels.dkdv_kernel[grid](*args, **constants, num_warps=4, maxnreg=168)
