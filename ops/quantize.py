"""Quantization of k (INT8, FP8 or INT4) and v (FP8), in the layout the kernel reads.

    k_8bit = round((k - k_mean) / k_scale)      k_scale = amax of the group / 127, INT4: / 7
          or e4m3((k - k_mean) / k_scale)       k_scale = amax of the group / 448
    v_fp8  = e4m3((v - v_mean) / v_scale)       v_scale = amax of the channel / 448

k_mean, v_mean and v_amax are smooth.py's: of all rows, or estimated from a sample of them. Any
means are exact, but a scale that is too small is not: with an estimated v_amax, `quantize_kv` looks
for rows of v beyond it and does the heads again that have any, with the amax of all their rows.

q needs no pass of its own: the attention kernel quantizes it in its prologue.

Shapes and layouts are those of ops/reference.py, to which all are bit-equal, statistics given.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op
from triton.language.extra.cuda.gdc import gdc_wait

from sage_inductor.ops import reference
from sage_inductor.ops.launch import at_once, define_opaque, pdl_option, traced
from sage_inductor.ops.reference import (
    FP8_MAX,
    INT4_MAX,
    K_BLOCK,
    LARGEST,
    PAD_N,
    QK_DTYPES,
    TINY,
    pad_head_dim,
)
from sage_inductor.ops.smooth import launch_estimate

_INT4_MAX = tl.constexpr(INT4_MAX)
_FP8_MAX = tl.constexpr(FP8_MAX)
_TINY = tl.constexpr(TINY)
_ROUND = tl.constexpr(12582914.0)  # 1.5 * 2^23 + 2: what is added to it is rounded to an integer


@triton.jit
def abs_bits(x):
    """|x| as an integer of the same order, NaN above everything: a max that keeps NaN for free."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(amax_bits, QK_MAX: tl.constexpr):
    """What divides a group by its scale, and the scale; NaN for a group with a NaN."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    amax = tl.where(amax < _TINY, _TINY, amax)
    return tl.div_rn(tl.full(amax.shape, QK_MAX, tl.float32), amax), amax * (1.0 / QK_MAX)


@triton.jit
def to_8bit(x, inverse, QK_MAX: tl.constexpr):
    """x * inverse, to nearest even: to integers rounded once; to E4M3 from the product in fp32."""
    if QK_MAX == _FP8_MAX:
        return (x * inverse).to(tl.float8e4nv)
    else:
        # The low byte of the sum is the rounded product + 2: no conversion, which runs at 1/8
        # speed. The 2 is there to be taken off: of a sum whose own low byte is stored the ptxas of
        # CUDA 12.8 stores F2IP.U8, 255 for any number, where a thread has single bytes of a row.
        rounded = tl.fma(x, inverse.broadcast_to(x.shape), tl.full(x.shape, _ROUND, tl.float32))
        return (rounded.to(tl.int32, bitcast=True) - 2).to(tl.int8)


@triton.jit
def saturate(x, amax):
    """x within +-amax, where amax is a number; NaN becomes a number too."""
    saturated = tl.minimum(tl.maximum(x, -amax), amax)
    return tl.where(amax == amax, saturated, x)


@triton.jit
def _block_of_k(
    K, K_mean, visible, K_8bit, K_scale, stride_n, stride_d, head, block, blocks, N, channels,
    MASK: tl.constexpr, QK_MAX: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr,
    K_BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """K_BLOCK rows of a head, the block-th of `blocks`; K and visible point to its first row."""
    n = block * K_BLOCK + tl.arange(0, K_BLOCK)
    d = tl.arange(0, BLOCK_D)
    mask = (n < N)[:, None] & (d < channels)[None, :]
    x = K + n[:, None] * stride_n + d.to(tl.int64)[None, :] * stride_d
    x = tl.load(x, mask=mask, other=0.0)
    if PDL:
        gdc_wait()
    mean = tl.load(K_mean + head * channels + d, mask=d < channels, other=0.0)
    x = tl.where(mask, x.to(tl.float32) - mean[None, :], 0.0)

    amax = tl.max(abs_bits(x), 1)  # [K_BLOCK]
    if MASK:
        amax = tl.where(tl.load(visible + n, mask=n < N, other=0) != 0, amax, 0)
    group = head * blocks + block
    if GROUPS == 4:
        amax = tl.max(tl.max(amax.reshape([K_BLOCK // 8, 4, 2]), 2), 0)  # [4]
        inverse, scale = scale_of(amax, QK_MAX)
        tl.store(K_scale + group * 4 + tl.arange(0, 4), scale)
        amax = amax.expand_dims(1).expand_dims(0).broadcast_to([K_BLOCK // 8, 4, 2])
        amax = amax.reshape([K_BLOCK])
        inverse = inverse.expand_dims(1).expand_dims(0).broadcast_to([K_BLOCK // 8, 4, 2])
        inverse = inverse.reshape([K_BLOCK])
    else:
        amax = tl.max(amax, 0, keep_dims=True)  # [1]
        inverse, scale = scale_of(amax, QK_MAX)
        tl.store(K_scale + group + tl.arange(0, 1), scale)
    if MASK:
        amax = amax.to(tl.float32, bitcast=True)
        x = saturate(x, tl.where(amax < _TINY, _TINY, amax)[:, None])
    x_8bit = to_8bit(x, inverse[:, None], QK_MAX)
    rows = group * K_BLOCK + tl.arange(0, K_BLOCK)
    if QK_MAX == _INT4_MAX:  # reference.pack
        low, high = tl.split(x_8bit.to(tl.uint8, bitcast=True).reshape([K_BLOCK, BLOCK_D // 2, 2]))
        d = tl.arange(0, BLOCK_D // 2)
        tl.store(K_8bit + rows[:, None] * (BLOCK_D // 2) + d[None, :], low & 15 | high << 4)
    else:
        tl.store(K_8bit + rows[:, None] * BLOCK_D + d[None, :], x_8bit)


@triton.jit
def _load_v(
    V, stride_n, stride_d, block, N2, channels, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):
    """(v, its rows n, which of them and of its channels there are), interleaved."""
    column = tl.arange(0, BLOCK_N)
    # Column (quad, half, pair) of each 16 holds token (half, quad, pair): reference.interleave.
    token = (column & ~15) | (column & 2) << 2 | (column & 12) >> 1 | (column & 1)
    n = block * BLOCK_N + token
    d = tl.arange(0, BLOCK_D)
    mask = (2 * n < N2)[:, None] & (d < channels)[None, :]
    v = V + n.to(tl.int64)[:, None] * stride_n + d.to(tl.int64)[None, :] * stride_d
    return tl.load(v, mask=mask, other=0.0).to(tl.float32), n, mask


@triton.jit
def _store_v(
    x, amax, V_fp8, head, block, N_pad,
    SATURATE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """x [BLOCK_N, BLOCK_D], as _load_v gives it, by amax [BLOCK_D] -> V_fp8, transposed."""
    if SATURATE:
        x = saturate(x, amax[None, :])
    x = x * tl.div_rn(tl.full([BLOCK_D], _FP8_MAX, tl.float32), amax)[None, :]
    rows = head * BLOCK_D + tl.arange(0, BLOCK_D)
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    out = V_fp8 + rows[:, None] * N_pad + columns[None, :]
    tl.store(out, x.to(tl.float8e4nv).T)


@triton.jit
def _block_of_v(
    V, V_mean, V_amax, visible, Beyond, V_fp8, V_scale, stride_n, stride_d, head, block, blocks,
    N2, channels,
    MASK: tl.constexpr, SATURATE: tl.constexpr, CHECK: tl.constexpr, PDL: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """BLOCK_N rows of a head, the block-th of `blocks`; V and visible point to its first row. With
    CHECK, Beyond of the head becomes 1 where V_amax is too small for any of them."""
    d = tl.arange(0, BLOCK_D)
    x, n, mask = _load_v(V, stride_n, stride_d, block, N2, channels, BLOCK_N, BLOCK_D)
    if PDL:
        gdc_wait()
    amax = tl.load(V_amax + head * channels + d, mask=d < channels, other=1.0)
    amax = tl.where(amax < _TINY, _TINY, amax)
    mean = tl.load(V_mean + head * channels + d, mask=d < channels, other=0.0)
    x = x - mean[None, :]
    if CHECK:
        if MASK:
            mask = mask & (tl.load(visible + n, mask=2 * n < N2, other=0) != 0)[:, None]
        beyond = tl.max((mask & (tl.abs(x) > amax[None, :])).to(tl.int32))
        tl.store(Beyond + head, 1, mask=beyond != 0)
    _store_v(x, amax, V_fp8, head, block, blocks * BLOCK_N, SATURATE, BLOCK_N, BLOCK_D)
    if block == 0:
        tl.store(V_scale + head * channels + d, amax * (1.0 / _FP8_MAX), mask=d < channels)


@triton.jit
def _quantize_v_again_kernel(
    V, V_mean, Visible, Beyond, V_fp8, V_scale,  # as _quantize_kv_kernel's
    stride_b, stride_h, stride_n, stride_d,
    stride_visible_b, stride_visible_h,
    H, N2, D2,
    MASK: tl.constexpr, PDL: tl.constexpr,
    PAD_N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid: (B * H,). All rows of a head with rows beyond the estimated amax, by their own."""
    if PDL:
        gdc_wait()
    head = tl.program_id(0).to(tl.int64)
    channels = D2 // 2
    visible = Visible + head // H * stride_visible_b + head % H * stride_visible_h
    v = V + head // H * stride_b + head % H * stride_h
    N_pad = tl.cdiv(N2, 2 * PAD_N) * PAD_N
    d = tl.arange(0, BLOCK_D)
    if tl.load(Beyond + head) != 0:
        mean = tl.load(V_mean + head * channels + d, mask=d < channels, other=0.0)
        bits = tl.zeros([BLOCK_D], tl.int32)
        for i in tl.range(0, N_pad // BLOCK_N, num_stages=1):
            x, n, mask = _load_v(v, stride_n, stride_d, i, N2, channels, BLOCK_N, BLOCK_D)
            if MASK:
                mask = mask & (tl.load(visible + n, mask=2 * n < N2, other=0) != 0)[:, None]
            bits = tl.maximum(bits, tl.max(tl.where(mask, abs_bits(x - mean[None, :]), 0), 0))
        amax = bits.to(tl.float32, bitcast=True)
        amax = tl.where(amax < _TINY, _TINY, amax)
        tl.store(V_scale + head * channels + d, amax * (1.0 / _FP8_MAX), mask=d < channels)
        for i in tl.range(0, N_pad // BLOCK_N, num_stages=1):
            x, _, _ = _load_v(v, stride_n, stride_d, i, N2, channels, BLOCK_N, BLOCK_D)
            _store_v(x - mean[None, :], amax, V_fp8, head, i, N_pad, MASK, BLOCK_N, BLOCK_D)


@triton.jit
def _quantize_k_kernel(
    K,  # [B, H, N, D] in
    K_mean,  # [B, H, D] in, fp32
    Visible,  # [B or 1, H or 1, N] in, uint8: rows that have a part in the scales; if MASK
    K_8bit,  # [B, H, N_pad, BLOCK_D] out, INT4: BLOCK_D / 2
    K_scale,  # [B, H, N_pad / K_BLOCK, GROUPS] out, fp32
    stride_b, stride_h, stride_n, stride_d,
    stride_visible_b, stride_visible_h,
    H, N2, D2,  # N2: 2 N, D2: 2 D
    MASK: tl.constexpr, QK_MAX: tl.constexpr, PDL: tl.constexpr,
    D: tl.constexpr, GROUPS: tl.constexpr, K_BLOCK: tl.constexpr, PAD_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid: (B * H * num_blocks,). K_BLOCK rows of one head.

    N2: see _quantize_v_kernel; D2: of padded channels that are known when compiling, ptxas wrote
    garbage to FP8 where zeros belong (D = 8, sm_90).
    """
    N, channels = N2 // 2, D
    if QK_MAX == _FP8_MAX:
        channels = D2 // 2
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(N, PAD_N) * (PAD_N // K_BLOCK)
    head, block = pid // blocks, pid % blocks
    _block_of_k(
        K + head // H * stride_b + head % H * stride_h, K_mean,
        Visible + head // H * stride_visible_b + head % H * stride_visible_h, K_8bit, K_scale,
        stride_n, stride_d, head, block, blocks, N, channels, MASK, QK_MAX, GROUPS, PDL, K_BLOCK,
        BLOCK_D,
    )  # fmt: skip


@triton.jit
def _quantize_v_kernel(
    V,  # [B, H, N, D] in
    V_mean, V_amax,  # [B, H, D] in, fp32
    V_fp8,  # [B, H, BLOCK_D, N_pad] out
    V_scale,  # [B, H, D] out, fp32
    stride_b, stride_h, stride_n, stride_d,
    H, N2,  # N2: 2 N
    SATURATE: tl.constexpr,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid: (B * H * num_blocks,). Transposes and interleaves BLOCK_N rows of one head.

    The length comes doubled because Triton makes a constant of an argument that is 1. Then padded
    tokens are known to be equal, and the ptxas of CUDA 12.8 (Triton 3.6) emits for a pair of equal
    operands a conversion to FP8 that merges with an unrelated register.
    """
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(N2, 2 * BLOCK_N)
    head, block = pid // blocks, pid % blocks
    _block_of_v(
        V + head // H * stride_b + head % H * stride_h, V_mean, V_amax, V, V, V_fp8, V_scale,
        stride_n, stride_d, head, block, blocks, N2, D, False, SATURATE, False, False, BLOCK_N,
        BLOCK_D,
    )  # fmt: skip


@triton.jit
def _quantize_kv_kernel(
    K, V,  # [B, H, N, D], [B, H, N, D_V] in
    K_mean, V_mean, V_amax,  # [B, H, D], [B, H, D_V] twice in, fp32
    Visible,  # [B or 1, H or 1, N] in, uint8: rows that have a part in the scales; if MASK
    Beyond,  # [B, H] in, int32: zeros; out: 1 where a row of v is beyond V_amax
    K_8bit, K_scale,  # [B, H, N_pad, BLOCK_D], [B, H, N_pad / K_BLOCK] out
    V_fp8, V_scale,  # [B, H, BLOCK_DV, N_pad], [B, H, D_V] out
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_visible_b, stride_visible_h,
    H, N2, D2, D2_V,  # doubled, as above
    MASK: tl.constexpr, QK_MAX: tl.constexpr, PDL: tl.constexpr,
    K_BLOCK: tl.constexpr, PAD_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Grid: (B * H * num_blocks * 2,). K_BLOCK rows of one head, of k and of v in turn: 128 rows of
    v cost so many registers that half as many programs run at once."""
    N = N2 // 2
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(N, PAD_N) * (PAD_N // K_BLOCK)
    head, block = pid // 2 // blocks, pid // 2 % blocks
    visible = Visible + head // H * stride_visible_b + head % H * stride_visible_h
    if pid % 2 == 0:
        _block_of_k(
            K + head // H * stride_kb + head % H * stride_kh, K_mean, visible, K_8bit, K_scale,
            stride_kn, stride_kd, head, block, blocks, N, D2 // 2, MASK, QK_MAX, 1, PDL, K_BLOCK,
            BLOCK_D,
        )  # fmt: skip
    else:
        _block_of_v(
            V + head // H * stride_vb + head % H * stride_vh, V_mean, V_amax, visible, Beyond,
            V_fp8, V_scale, stride_vn, stride_vd, head, block, blocks, N2, D2_V // 2,
            MASK, MASK, True, PDL, K_BLOCK, BLOCK_DV,
        )  # fmt: skip


@triton_op("sage::quantize_kv", mutates_args=())
def quantize_kv(k: Tensor, v: Tensor | None, visible: Tensor | None, qk: str) -> list[Tensor]:
    """All of the preparation in one pass: k [B, H, N, D], for FP8 p v also v [B, H, N, D_v], any
    strides -> k_8bit, k_scale (as `quantize_k` per row), k_mean [B, H, D] and v_fp8, v_scale (as
    `quantize_v`), v_mean [B, H, D_v]. Statistics are estimated from a sample of rows. In a head
    where a row of v is beyond the estimated amax, v is scaled by the amax of all its rows.
    visible: as in `smooth`; the other rows have no part in statistics and scales and saturate."""
    if k.device.type == "cpu":
        return reference.quantize_kv(k, v, visible, qk)
    return launch_kv(k, v, visible, qk)


def _quantize_kv_opaque(
    k: Tensor, v: Tensor | None, visible: Tensor | None, qk: str
) -> list[Tensor]:
    """`quantize_kv`, opaque to Inductor, so it does not export. Nothing in these kernels could fuse
    with what is around them, and as one call of a graph they are traced and compiled in no time."""
    return launch_kv(k, v, visible, qk, at_once, pdl=True)


quantize_kv_opaque = define_opaque("quantize_kv_opaque", _quantize_kv_opaque)


@torch.library.register_fake("sage::quantize_kv_opaque")
def _(k, v, visible, qk):
    return empty_kv(k, v, qk, "per_row")


def empty_kv(k: Tensor, v: Tensor | None, qk: str, granularity: str) -> list[Tensor]:
    """Memory for k_8bit, k_scale, k_mean and, of v for FP8 p v, v_fp8, v_scale, v_mean."""
    B, H, N, D = k.shape
    N_pad, groups = (N + PAD_N - 1) // PAD_N * PAD_N, 4 if granularity == "per_thread" else 1
    k_scale = k.new_empty((B, H, N_pad // K_BLOCK, groups), dtype=torch.float32)
    outputs = [empty_k(k, qk), k_scale, k.new_empty((B, H, D), dtype=torch.float32)]
    if v is not None:
        D_v = v.shape[3]
        v_shape = (B, H, pad_head_dim(int(D_v)), N_pad)
        outputs.append(v.new_empty(v_shape, dtype=torch.float8_e4m3fn))
        outputs += [v.new_empty((B, H, D_v), dtype=torch.float32) for _ in range(2)]
    return outputs


def launch_kv(
    k: Tensor, v: Tensor | None, visible: Tensor | None, qk: str, run: Callable = traced,
    pdl: bool = False,
) -> list[Tensor]:  # fmt: skip
    """pdl: each kernel starts while the one before it ends (programmatic dependent launch, from
    sm_90 on), and the second reads its rows while the first estimates."""
    k_mean, _, *of_v, beyond = launch_estimate([k] if v is None else [k, v], visible, run, pdl)
    if v is None:
        return [*launch_k(k, k_mean, qk, "per_row", visible, run, pdl), k_mean]
    v_mean, v_amax = of_v
    B, H, N, D = k.shape
    D, D_v, blocks = int(D), int(v.shape[3]), triton.cdiv(N, PAD_N) * (PAD_N // K_BLOCK)
    BLOCK_D, BLOCK_DV = pad_head_dim(D), pad_head_dim(D_v)
    k_8bit = empty_k(k, qk)
    k_scale = k.new_empty((B, H, blocks, 1), dtype=torch.float32)
    v_fp8 = v.new_empty((B, H, BLOCK_DV, blocks * K_BLOCK), dtype=torch.float8_e4m3fn)
    v_scale = torch.empty_like(v_amax)
    if visible is not None:
        visible = visible.expand(B, H, N)
    rows = k_mean if visible is None else visible
    strides = (0, 0) if visible is None else visible.stride()[:2]
    run(
        _quantize_kv_kernel,
        (B * H * blocks * 2,),
        (k, v, k_mean, v_mean, v_amax, rows, beyond, k_8bit, k_scale, v_fp8, v_scale),
        (*k.stride(), *v.stride(), *strides,
         H, 2 * N, 2 * D, 2 * D_v,  # shape
         visible is not None, LARGEST[qk], pdl,  # semantics
         K_BLOCK, PAD_N, BLOCK_D, BLOCK_DV),  # tile
        num_warps=num_warps(BLOCK_DV), **pdl_option(pdl),
    )  # fmt: skip
    run(
        _quantize_v_again_kernel,
        (B * H,),
        (v, v_mean, rows, beyond, v_fp8, v_scale),
        (*v.stride(), *strides,
         H, 2 * N, 2 * D_v,  # shape
         visible is not None, pdl,  # semantics
         PAD_N, K_BLOCK, BLOCK_DV),  # tile
        num_warps=8, **pdl_option(pdl),
    )  # fmt: skip
    return [k_8bit, k_scale, k_mean, v_fp8, v_scale, v_mean]


def empty_k(k: Tensor, qk: str) -> Tensor:
    """Memory for k [B, H, N, D] in the format qk."""
    B, H, N, D = k.shape
    BLOCK_D = pad_head_dim(int(D))
    N_pad = (N + PAD_N - 1) // PAD_N * PAD_N
    return k.new_empty(
        (B, H, N_pad, BLOCK_D // 2 if qk == "int4" else BLOCK_D), dtype=QK_DTYPES[qk]
    )


def num_warps(block_dv: int) -> int:
    """Of a program of quantize_kv, which has 64 rows in its registers."""
    return 4 if block_dv <= 128 else 8


@triton_op("sage::quantize_k", mutates_args=())
def quantize_k(
    k: Tensor, k_mean: Tensor, qk: str, granularity: str, visible: Tensor | None
) -> tuple[Tensor, Tensor]:
    """k [B, H, N, D], any strides, k_mean [B, H, D] fp32 -> k_8bit [B, H, N_pad, D_pad] in the
    format qk (INT4: [B, H, N_pad, D_pad / 2], `reference.pack`ed), k_scale [B, H, N_pad / 64, 4
    (per_thread) or 1] fp32. visible: as in `smooth`; the other rows have no part in the scales and
    saturate."""
    if k.device.type == "cpu":
        return reference.quantize_k(k, k_mean, qk, granularity, visible)
    return launch_k(k, k_mean, qk, granularity, visible)


def launch_k(
    k: Tensor, k_mean: Tensor, qk: str, granularity: str, visible: Tensor | None,
    run: Callable = traced, pdl: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    B, H, N, D = k.shape
    D = int(D)  # a tile needs a number
    BLOCK_D, num_blocks = pad_head_dim(D), triton.cdiv(N, PAD_N) * (PAD_N // K_BLOCK)
    groups = 4 if granularity == "per_thread" else 1
    k_8bit = empty_k(k, qk)
    k_scale = k.new_empty((B, H, num_blocks, groups), dtype=torch.float32)
    if visible is not None:
        visible = visible.expand(B, H, N)
    run(
        _quantize_k_kernel,
        (B * H * num_blocks,),
        (k, k_mean, k_mean if visible is None else visible, k_8bit, k_scale),
        (*k.stride(), *((0, 0) if visible is None else visible.stride()[:2]),
         H, 2 * N, 2 * D,  # shape
         visible is not None, LARGEST[qk], pdl,  # semantics
         D, groups, K_BLOCK, PAD_N, BLOCK_D),  # tile
        **pdl_option(pdl),
    )  # fmt: skip
    return k_8bit, k_scale


@triton_op("sage::quantize_v", mutates_args=())
def quantize_v(v: Tensor, v_mean: Tensor, v_amax: Tensor, saturate: bool) -> tuple[Tensor, Tensor]:
    """v [B, H, N, D], any strides, v_mean and v_amax [B, H, D] fp32 ->
    v_fp8 [B, H, D_pad, N_pad] (tokens interleaved in sixteens), v_scale [B, H, D] fp32. saturate:
    some rows had no part in v_mean and v_amax."""
    if v.device.type == "cpu":
        return reference.quantize_v(v, v_mean, v_amax, saturate)
    return launch_v(v, v_mean, v_amax, saturate)


def launch_v(v: Tensor, v_mean: Tensor, v_amax: Tensor, saturate: bool) -> tuple[Tensor, Tensor]:
    B, H, N, D = v.shape
    D = int(D)
    BLOCK_D, num_blocks = pad_head_dim(D), triton.cdiv(N, PAD_N)
    v_fp8 = v.new_empty((B, H, BLOCK_D, num_blocks * PAD_N), dtype=torch.float8_e4m3fn)
    v_scale = torch.empty_like(v_amax)
    traced(
        _quantize_v_kernel,
        (B * H * num_blocks,),
        (v, v_mean, v_amax, v_fp8, v_scale),
        (*v.stride(),
         H, 2 * N,  # shape
         saturate,  # semantics
         D, PAD_N, BLOCK_D),  # tile
    )  # fmt: skip
    return v_fp8, v_scale
