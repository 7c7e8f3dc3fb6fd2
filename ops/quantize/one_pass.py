"""All of the preparation of k and v in one pass over them, for the granularities that estimate.

Three launches: what k and v are shifted by and v's amax, from a sample of rows (smooth.py); all
blocks of k and v; and the heads of v again that have rows beyond the estimated amax.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sage_inductor.ops import gpus
from sage_inductor.ops.formats import K_BLOCK, PAD_N, Prepared, pad_head_dim
from sage_inductor.ops.launch import HAS_PDL, doubled, pdl_option, visible_argument
from sage_inductor.ops.layout import span_of
from sage_inductor.ops.quantize.keys import empty_k, launch_k, quantize_k_block
from sage_inductor.ops.quantize.smooth import launch_estimate
from sage_inductor.ops.quantize.values import empty_v, quantize_v_again_kernel, quantize_v_block
from sage_inductor.ops.recipe import Recipe


class Means(NamedTuple):
    """What a tail is made of (tail.py). T: N in blocks of as many rows; T_pad: its pad_rows."""

    k: Tensor  # [B, H, T, D_pad] fp32
    v: Tensor  # [B, H, T, D_pad] fp32; 16-bit: in 16 bits
    count: Tensor  # [B, H, T_pad] fp32: log2 of how many
    block: int  # rows of each


@triton.jit
def _quantize_kv_kernel(
    K, V,  # [B, H, N, D], [B, H, N, D_V] in
    K_mean, V_mean, V_amax,  # [B, H, D], [B, H, D_V] twice in, fp32
    Visible,  # [B or 1, H or 1, N] in, uint8: rows that have a part in the scales; if MASK
    Perm,  # int32 [N] in or None: layout.py
    Spans, Documents,  # int32 [S, 4], [N / K_BLOCK] in or None: documents.py. Then B is S below
    Beyond,  # [B, H] in, int32: zeros; out: 1 where a row of v is beyond V_amax
    K_8bit, K_scale,  # [B, H, N_pad, BLOCK_D], [B, H, N_pad / K_BLOCK] out
    V_fp8, V_scale,  # [B, H, BLOCK_DV, N_pad], [B, H, D_V] out
    K_tail, V_tail, Count,  # as codes.store_means has them; if TAIL
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_visible_b, stride_visible_h,
    H, N2, D2, D2_V,  # doubled, as above
    MASK: tl.constexpr, QK_MAX: tl.constexpr, ROTATED: tl.constexpr, PDL: tl.constexpr,
    K_BLOCK: tl.constexpr, PAD_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    TAIL: tl.constexpr,
):  # fmt: skip
    """Grid: (B * H * num_blocks * 2,). K_BLOCK rows of one head, of k and of v in turn: 128 rows of
    v take the registers of another program."""
    N = N2 // 2
    stride_kb, stride_kh, stride_kn = stride_kb // 2, stride_kh // 2, stride_kn // 2
    stride_vb, stride_vh, stride_vn = stride_vb // 2, stride_vh // 2, stride_vn // 2
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(N, PAD_N) * (PAD_N // K_BLOCK)
    head, block = pid // 2 // blocks, pid // 2 % blocks
    visible = Visible + head // H * stride_visible_b + head % H * stride_visible_h
    of_mean, first = None, 0
    if Documents is not None:
        document = tl.load(Documents + block).to(tl.int64)
        place, _ = span_of(Spans, document)
        of_mean, first = document * H + head, place // K_BLOCK
    T, T_pad = 0, 0
    if TAIL:
        T = tl.cdiv(N, TAIL)
        T_pad = tl.cdiv(T, PAD_N) * PAD_N
    if pid % 2 == 0:
        quantize_k_block(
            K + head // H * stride_kb + head % H * stride_kh, K_mean, visible, Perm, K_8bit,
            K_scale, stride_kn, stride_kd, head, block, blocks, N, D2 // 2, MASK, QK_MAX, ROTATED,
            1, PDL, K_BLOCK, BLOCK_D, K_tail, Count, T, T_pad, TAIL, of_mean,
        )  # fmt: skip
    else:
        quantize_v_block(
            V + head // H * stride_vb + head % H * stride_vh, V_mean, V_amax, visible, Perm,
            Beyond, V_fp8, V_scale, stride_vn, stride_vd, head, block, blocks, N2, D2_V // 2,
            MASK, MASK, True, PDL, K_BLOCK, BLOCK_DV, V_tail, Count, T, T_pad, TAIL, of_mean, first,
        )  # fmt: skip


def overlaps(gpu: torch.device | gpus.Gpu) -> bool:
    """Whether these kernels start before the one ahead ends. Later GPUs have never run them so."""
    return HAS_PDL and gpus.capability(gpu) == (9, 0)


def launch_kv(
    k: Tensor, v: Tensor | None, visible: Tensor | None, recipe: Recipe, run: Callable,
    pdl: bool = False, means: Means | None = None, perm: Tensor | None = None,
    documents: tuple[Tensor, Tensor] | tuple[None, None] = (None, None),
) -> Prepared:  # fmt: skip
    """k [B, H, N, D] and, unless it is None, v [B, H, N, D_v], any strides. visible, perm and the
    two of documents: as in op.py's launch_prepare.

    means: where those of k and v go, if visible is given.
    pdl: each kernel starts while the one before it ends (programmatic dependent launch, from sm_90
    on), and the second reads its rows while the first estimates."""
    k_mean, _, *of_v, beyond = launch_estimate(
        [k] if v is None else [k, v], visible, run, pdl, perm=perm, spans=documents[0]
    )
    if v is None:
        return Prepared(*launch_k(k, k_mean, recipe, visible, run, pdl, perm), k_mean)
    v_mean, v_amax = of_v
    B, H, N, D = k.shape
    N = N if perm is None else perm.shape[0]
    D, D_v = int(D), int(v.shape[3])
    BLOCK_DV, (spans, _) = pad_head_dim(D_v), documents
    k_codes, k_scale = empty_k(k, recipe, perm)
    v_codes, v_scale = empty_v(v, recipe.of_pv, perm, spans)
    rows, row_strides = visible_argument(visible, k.shape, k_mean)
    # Four programs on an SM, as without means: 32 bytes are spilled with blocks of 32. It takes 771
    # us, without means 448 (24 heads, 75,600 tokens in an order; H200, 2026-11-29).
    capped = {"maxnreg": 128} if means else {}
    run(
        _quantize_kv_kernel,
        (B * H * k_scale.shape[2] * 2,),
        (k, v, k_mean, v_mean, v_amax, rows, perm, *documents, beyond, k_codes, k_scale, v_codes,
         v_scale, *(means or [None] * 4)[:3]),
        (*doubled(k.stride()), *doubled(v.stride()), *row_strides,
         H, 2 * N, 2 * D, 2 * D_v,  # shape
         visible is not None, recipe.of_qk.largest, recipe.rotated, pdl,  # semantics
         K_BLOCK, PAD_N, pad_head_dim(D), BLOCK_DV, means.block if means else 0),  # tile
        num_warps=4 if BLOCK_DV <= 128 else 8,  # a program has 64 rows in its registers
        **capped, **pdl_option(pdl),
    )  # fmt: skip
    run(
        quantize_v_again_kernel,
        (v_scale.shape[0] * H,),
        (v, v_mean, rows, perm, spans, beyond, v_codes, v_scale),
        (*doubled(v.stride()), *row_strides,
         H, 2 * N, 2 * D_v,  # shape
         visible is not None, pdl,  # semantics
         PAD_N, K_BLOCK, BLOCK_DV),  # tile
        num_warps=8, **pdl_option(pdl),
    )  # fmt: skip
    return Prepared(k_codes, k_scale, k_mean, v_codes, v_scale, v_mean)
