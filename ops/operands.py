"""Tensors of ``sage::rowscaled`` that its op, its kernels and its emulation share.

Letters as in training/hopper/backward_kernels.py.
"""

from typing import NamedTuple

from torch import Tensor


class Kept(NamedTuple):
    """What ``sage::rowscaled`` keeps for its backward, beside out. M_pad: pad_rows of N_q."""

    stats: Tensor  # [2, B, H_q, N_q] fp32: lse (natural log) and the largest score (log2 units)
    q: Tensor  # [B, H_q, M_pad, D_pad] INT8, rotated
    q_scale: Tensor  # [B, H_q, M_pad] fp32
    k: Tensor  # [B, H_kv, N_pad, D_pad] INT8, rotated, of k less its mean; causal: of k
    k_scale: Tensor  # [B, H_kv, N_pad / TRAINING_BLOCK] fp32
    k_own: Tensor  # causal: the same once more, by one scale a row; others: [.., 0, D_pad]
    k_own_scale: Tensor  # [B, H_kv, N_pad or 0] fp32
    v: Tensor  # [B, H_kv, N_pad, D_pad] INT8, of v less its mean; causal: of v
    v_scale: Tensor  # [B, H_kv, N_pad] fp32
    v_mean: Tensor  # [B, H_kv, D] fp32, estimated; causal, where none is taken off: [.., 0]

    @property
    def is_causal(self) -> bool:
        return self.k_own.shape[2] != 0


class Operands(NamedTuple):
    """What the kernels of the backward read beside Kept: training/hopper/prepare.py makes it."""

    g: Tensor  # [B, H_q, M_pad, BLOCK_D] INT8: dO
    qt: Tensor  # [B, H_kv, BLOCK_D, group M_pad] E4M3, tokens permuted; so the next two
    ot: Tensor
    kt: Tensor  # [B, H_kv, BLOCK_D, N_pad]
    kt_own: Tensor  # causal: of k_own; others: kt
    vectors: Tensor  # [3, B, H_q, M_pad] fp32: q's scale with the softmax's, m - log2 448, delta
    row_scale: Tensor  # [B, H_q, M_pad] fp32: r c^k
    v_scale: Tensor  # [B, H_kv, N_pad] fp32: vs / beta
    qt_scale: Tensor  # [B, H_kv] fp32: c^q
    ot_scale: Tensor  # c^o
    # What dQ's kernel reads for the last two of vectors, and for v_scale: causal, others.
    m: Tensor  # [B, H_q, M_pad] fp32: m - log2 448 + log2 beta_i
    delta: Tensor  # [B, H_q, M_pad] fp32: without beta
    v_scale_of_dq: Tensor  # [B, H_kv, N_pad] fp32: vs ks
