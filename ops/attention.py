"""Quantized flash attention: INT8 q k^T, then FP8 or 16-bit p v, in portable Triton.

    s = q_int8 k_int8^T * q_scale * k_scale        (log2 units: q_scale holds scale * log2 e)
    p = exp2(s - m) * 448,  l = sum of p           m is the running row maximum
    o = (sum over tiles of p_fp8 v_fp8) / l * v_scale + v_mean
    lse = (m + log2 l) ln 2                        of the smoothed keys: sdpa.py corrects it

* q is quantized here, in the prologue: it saves a pass over q, and its scales cost nothing.
* Two-level accumulation: FP8 tensor cores add up in 13 mantissa bits, so each tile's product is
  taken from zero and added to an fp32 accumulator. On v with a mean, one level is 28x worse at 8K
  keys and 85x at 32K; random normal v hides it.
* p's columns are reordered inside a thread (`reference.interleave`) instead of exchanged between
  threads; v_fp8 is stored in that order.

Source: SageAttention (arXiv:2410.02367), SageAttention2 (arXiv:2411.10958).
Shapes: B batch, H_q and H_kv heads, N_q and N_kv sequence, D head_dim.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton
from triton.tools.tensor_descriptor import TensorDescriptor

from sage_inductor.ops import reference, tiles
from sage_inductor.ops.quantize import abs_bits, int8_scale, to_int8
from sage_inductor.ops.reference import LOG2E

_LOG2E = tl.constexpr(LOG2E)
_LN2 = tl.constexpr(1 / LOG2E)
_LOG2_FP8_MAX = tl.constexpr(8.807354922057604)  # p uses all of E4M3: exp2(x - m) * 448


@triton.jit
def _attention_kernel(
    Q,  # [B, H_q, N_q, D] in, 16-bit
    K, K_scale,  # [B, H_kv, N_pad, BLOCK_D] int8, [B, H_kv, N_pad / 64, GROUPS]
    V, V_scale, V_mean,  # FP8: [B, H_kv, BLOCK_D, N_pad], [B, H_kv, D] twice
    # 16-bit: V [B, H_kv, N_kv, D], the other two unread. TMA: K and FP8 V are 2-D descriptors
    Out, Lse,  # [B, H_q, N_q, D], [B, H_q, N_q] fp32
    stride_qb, stride_qh, stride_qn, stride_qd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_ob, stride_oh, stride_on,
    H_q, H_kv, N_q, N_kv, N_pad,
    D: tl.constexpr, SCALE: tl.constexpr, IS_CAUSAL: tl.constexpr,
    FP8: tl.constexpr, GROUPS: tl.constexpr, TMA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Grid: (B * H_q * cdiv(N_q, BLOCK_M),): BLOCK_M rows of one head. Heads one after the other,
    so that k and v stay in L2; within a causal head the longest rows go first."""
    num_tiles = tl.cdiv(N_q, BLOCK_M)
    head = tl.program_id(0) // num_tiles
    tile = tl.program_id(0) - head * num_tiles
    if IS_CAUSAL:
        tile = num_tiles - 1 - tile
    b, h = head // H_q, head % H_q
    h_kv = h // (H_q // H_kv)
    b, head = b.to(tl.int64), head.to(tl.int64)
    head_kv = b * H_kv + h_kv
    row0 = tile * BLOCK_M
    rows = row0 + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)

    # -- q: load and quantize ----
    mask_q = (rows < N_q)[:, None] & (d < D)[None, :]
    q = Q + b * stride_qb + h * stride_qh
    q = q + rows.to(tl.int64)[:, None] * stride_qn + d[None, :] * stride_qd
    q = tl.load(q, mask=mask_q, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_D]
    amax = tl.max(abs_bits(q), 1)
    if GROUPS == 4:  # per_thread: rows i, i+8, i+16, i+24 of 32
        amax = tl.max(amax.reshape([BLOCK_M // 32, 4, 8]), 1, keep_dims=True)
        amax = amax.broadcast_to([BLOCK_M // 32, 4, 8]).reshape([BLOCK_M])
    else:  # per_block: 128 rows
        amax = tl.max(amax.reshape([BLOCK_M // 128, 128]), 1, keep_dims=True)
        amax = amax.broadcast_to([BLOCK_M // 128, 128]).reshape([BLOCK_M])
    inverse, q_scale = int8_scale(amax)
    # The sign of scale goes into q_int8, so that q_scale * k_scale >= 0 and the row maximum can
    # be taken before scaling.
    q_int8 = to_int8(q, (inverse if SCALE >= 0 else -inverse)[:, None])
    q_scale = q_scale * ((SCALE if SCALE >= 0 else -SCALE) * _LOG2E)

    # -- where k and v are ----
    if TMA:
        k_row = (head_kv * N_pad).to(tl.int32)
        v_row = (head_kv * BLOCK_D).to(tl.int32)
    else:
        k_ptrs = K + head_kv * N_pad * BLOCK_D + n[:, None] * BLOCK_D + d[None, :]
        if FP8:
            v_ptrs = V + head_kv * BLOCK_D * N_pad + d[:, None] * N_pad + n[None, :]
    if not FP8:
        v_ptrs = V + b * stride_vb + h_kv * stride_vh + d[None, :] * stride_vd
    K_scale += head_kv * (N_pad // 64) * GROUPS

    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    offset: tl.constexpr = _LOG2_FP8_MAX if FP8 else 0.0

    # This loop runs once. As its argument q_int8 stays in shared memory; an operand that Triton
    # sees computed in registers stays there, 16 a thread, and at the cap they are spilled (H200,
    # 8K keys: 823 against 773 TFLOP/s).
    for _ in tl.range(0, tl.minimum(N_kv, 1), num_stages=1):
        # Tiles that every row sees whole, then those that need a mask (the diagonal, the tail).
        visible = tl.minimum(N_kv, row0 + BLOCK_M) if IS_CAUSAL else N_kv
        num_full = (tl.minimum(N_kv, row0 + 1) if IS_CAUSAL else N_kv) // BLOCK_N
        for masked in tl.static_range(2):
            lo = num_full if masked else 0
            hi = tl.cdiv(visible, BLOCK_N) if masked else num_full
            for j in tl.range(lo, hi, num_stages=NUM_STAGES):
                # -- s = q k^T, with its scales ----
                if TMA:
                    k = K.load([k_row + j * BLOCK_N, 0])
                else:
                    k = tl.load(k_ptrs + j * BLOCK_N * BLOCK_D)
                s = tl.dot(q_int8, k.T)  # [BLOCK_M, BLOCK_N] int32
                # [BLOCK_M, blocks of 64, 8, 4, 2]: a thread holds one quad, so one scale a block
                s = s.reshape([BLOCK_M, BLOCK_N // 64, 8, 4, 2])
                block = tl.arange(0, BLOCK_N // 64)
                if GROUPS == 4:
                    group = j * (BLOCK_N // 16) + block[:, None] * 4 + tl.arange(0, 4)[None, :]
                else:
                    group = j * (BLOCK_N // 64) + block[:, None]
                k_scale = tl.load(K_scale + group)  # [BLOCK_N / 64, GROUPS]
                c = q_scale[:, None, None] * k_scale[None, :, :]  # [BLOCK_M, BLOCK_N / 64, GROUPS]
                c5 = c[:, :, None, :, None]

                # -- softmax: running maximum and sum ----
                if masked:
                    column = j * BLOCK_N + n
                    keep = (column < N_kv)[None, :]
                    if IS_CAUSAL:
                        keep = keep & (column[None, :] <= rows[:, None])
                    keep = keep.broadcast_to([BLOCK_M, BLOCK_N])
                    x = tl.where(keep.reshape(s.shape), s.to(tl.float32) * c5, -float("inf"))
                    m_new = tl.maximum(m, tl.max(tl.max(tl.max(tl.max(x, 4), 2), 2), 1))
                else:
                    x = s.to(tl.float32) * c5
                    if GROUPS == 4:
                        highest = tl.max(tl.max(s, 4), 2).to(tl.float32) * c
                    else:
                        highest = (
                            tl.max(tl.max(tl.max(s, 4), 2), 2, keep_dims=True).to(tl.float32) * c
                        )
                    m_new = tl.maximum(m, tl.max(tl.max(highest, 2), 1))
                p = tl.exp2(x - (m_new - offset)[:, None, None, None, None])
                p = p.reshape([BLOCK_M, BLOCK_N])
                alpha = tl.exp2(m - m_new)
                l = l * alpha + tl.sum(p, 1)
                m = m_new

                # -- o = p v ----
                if FP8:
                    p = p.reshape([BLOCK_M, BLOCK_N // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4])
                    p = p.reshape([BLOCK_M, BLOCK_N]).to(tl.float8e4nv)
                    if TMA:
                        v = V.load([v_row, j * BLOCK_N])
                    else:
                        v = tl.load(v_ptrs + j * BLOCK_N)
                    # An fma, because Triton folds `acc * alpha + dot` into the dot's accumulator on
                    # sm_89 and sm_120: one level again.
                    acc = tl.fma(acc, alpha[:, None].broadcast_to(acc.shape), tl.dot(p, v.T))
                else:
                    row = (j * BLOCK_N + n).to(tl.int64)[:, None]
                    if masked:
                        v = tl.load(
                            v_ptrs + row * stride_vn,
                            mask=(row < N_kv) & (d < D)[None, :],
                            other=0.0,
                        )
                    else:
                        v = tl.load(v_ptrs + row * stride_vn, mask=(d < D)[None, :], other=0.0)
                    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
        q_int8 = tl.zeros([BLOCK_M, BLOCK_D], tl.int8)

    # -- epilogue ----
    o = acc * (1.0 / l)[:, None]
    if FP8:
        v_scale = tl.load(V_scale + head_kv * D + d, mask=d < D, other=0.0)
        v_mean = tl.load(V_mean + head_kv * D + d, mask=d < D, other=0.0)
        o = o * v_scale[None, :] + v_mean[None, :]
    out = Out + b * stride_ob + h * stride_oh
    out = out + rows.to(tl.int64)[:, None] * stride_on + d[None, :]
    tl.store(out, o.to(Out.dtype.element_ty), mask=mask_q)
    lse = (m - offset + tl.log2(l)) * _LN2
    tl.store(Lse + head * N_q + rows, lse, mask=rows < N_q)


def _launch(kernel, q, k_int8, k_scale, v, v_scale, v_mean, is_causal, scale, n_kv, out_bnhd, tile,
            tma: bool, **options) -> tuple[Tensor, Tensor]:  # fmt: skip
    B, H_q, N_q, D = q.shape
    D = int(D)  # a tile needs a number
    H_kv, N_pad, BLOCK_D = k_int8.shape[1:]
    fp8 = v.dtype == torch.float8_e4m3fn
    out, lse = empty_outputs(q, out_bnhd)
    k, v_arg = k_int8, v
    if tma:
        k = TensorDescriptor.from_tensor(k_int8.view(-1, BLOCK_D), [tile.BLOCK_N, BLOCK_D])
        if fp8:
            v_arg = TensorDescriptor.from_tensor(v.view(-1, N_pad), [BLOCK_D, tile.BLOCK_N])
    kernel[(B * H_q * triton.cdiv(N_q, tile.BLOCK_M),)](
        q, k, k_scale, v_arg, v_scale, v_mean, out, lse,  # tensors
        *q.stride(), *v.stride(), *out.stride()[:3],
        H_q, H_kv, N_q, n_kv, N_pad,  # shape
        D, scale, is_causal, fp8, k_scale.shape[3],  # semantics
        tma, tile.BLOCK_M, tile.BLOCK_N, BLOCK_D, tile.num_stages,  # tile
        num_warps=tile.num_warps, **options,
    )  # fmt: skip
    return out, lse


@triton_op("sage::attention", mutates_args=())
def attention(
    q: Tensor, k_int8: Tensor, k_scale: Tensor, v: Tensor, v_scale: Tensor, v_mean: Tensor,
    is_causal: bool, scale: float, n_kv: int, granularity: str, out_bnhd: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention over quantized k, with v quantized (FP8) or as it is (16-bit). Exportable.

    q [B, H_q, N_q, D] fp16 or bf16, any strides; k_int8, k_scale from `quantize_k`; v, v_scale
    from `quantize_v` and v_mean [B, H_kv, D] fp32, or v [B, H_kv, N_kv, D] of q's dtype, any
    strides, with v_scale and v_mean unread. n_kv: number of keys, without padding. out_bnhd:
    store out in [B, N, H, D] order.

    Returns out [B, H_q, N_q, D] of q's dtype, lse [B, H_q, N_q] fp32: natural log, over the keys
    as they were quantized (the caller knows what smoothing took off).
    """
    if q.device.type == "cpu":
        out, lse = reference.attention(
            q, k_int8, k_scale, v, v_scale, v_mean, is_causal, scale, n_kv, granularity
        )
        return _as_stored(out, out_bnhd), lse
    tile = tiles.tile(tiles.capability(q.device), _pv(v), q.shape[3])
    # Descriptors made in the kernel are silently wrong in packages of torch 2.11, and without a
    # register cap, which Inductor cannot pass on, no faster than pointers (620 and 661 TFLOP/s).
    return _launch(
        wrap_triton(_attention_kernel), q, k_int8, k_scale, v, v_scale, v_mean, is_causal, scale,
        n_kv, out_bnhd, tile, tma=False,
    )  # fmt: skip


@torch.library.custom_op("sage::attention_capped", mutates_args=(), device_types="cuda")
def attention_capped(
    q: Tensor, k_int8: Tensor, k_scale: Tensor, v: Tensor, v_scale: Tensor, v_mean: Tensor,
    is_causal: bool, scale: float, n_kv: int, granularity: str, out_bnhd: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`attention` with descriptors and a register cap, for the devices whose tile asks for one.

    Opaque to Inductor, so it does not export. Worth 1.2x on an H200: at 168 registers three
    programs share an SM instead of two, and at most 8 bytes a thread spill.
    """
    tile = tiles.tile(tiles.capability(q.device), _pv(v), q.shape[3])
    return _launch(
        _attention_kernel, q, k_int8, k_scale, v, v_scale, v_mean, is_causal, scale,
        n_kv, out_bnhd, tile, tma=True, maxnreg=tile.maxnreg,
    )  # fmt: skip


@attention_capped.register_fake
def _(q, k_int8, k_scale, v, v_scale, v_mean, is_causal, scale, n_kv, granularity, out_bnhd):
    return empty_outputs(q, out_bnhd)


def _pv(v: Tensor) -> str:
    return "fp8" if v.dtype == torch.float8_e4m3fn else "16bit"


def empty_outputs(q: Tensor, out_bnhd: bool) -> tuple[Tensor, Tensor]:
    """out like q, contiguous in [B, N, H, D] or [B, H, N, D] order, and lse."""
    B, H, N, D = q.shape
    out = q.new_empty((B, N, H, D)).transpose(1, 2) if out_bnhd else q.new_empty((B, H, N, D))
    return out, q.new_empty((B, H, N), dtype=torch.float32)


def _as_stored(out: Tensor, out_bnhd: bool) -> Tensor:
    if out_bnhd:
        return out.transpose(1, 2).contiguous().transpose(1, 2)
    return out.contiguous()
