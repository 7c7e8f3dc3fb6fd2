"""Number formats and granularities as data: what a recipe's words mean, to kernels and oracle.

A new format of q and k, or of p and v, is a row of QK or PV; a new way to share scales is a row of
GRANULARITIES. Kernels read the fields; none asks for a name. What they all agree on beside that
(padding, blocks, constants of the quantization) is at the end.

Shapes: N_pad is N rounded up to a multiple of PAD_N, D_pad head_dim up to the next of HEAD_DIMS.
"""

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Format:
    """How numbers are stored and multiplied."""

    dtype: torch.dtype | None  # of the codes; None: the tensor stays as it arrives
    largest: float = 1.0  # what the largest number of a group becomes
    packed: int = 1  # codes in one element
    smooths_q: bool = False  # 4 bits ask for it
    block_scaled: bool = False  # each FP4_BLOCK numbers have a scale in E4M3, too
    rotates: bool = False  # q and k of this format may be rotated
    granularities: tuple[str, ...] = ()  # that q and k of this format may have
    beside: tuple[str, ...] = ()  # formats of q and k that go with p and v of this one

    @property
    def is_integer(self) -> bool:
        return self.dtype is not None and not self.dtype.is_floating_point


class Granularity(NamedTuple):
    """Which rows share a scale."""

    q_span: int  # in q_span rows of q, rows r, r + q_groups, r + 2 q_groups, .. share a scale
    q_groups: int
    k_groups: int  # scales of each K_BLOCK rows of k
    one_pass: bool = False  # k's and v's shifts, and v's scales, are estimated from some rows


E4M3_MAX = 448.0
FP4_BLOCK, FP4_MAX = 16, 6.0  # E2M1: numbers that share a scale, the largest of them
_SHARED = ("per_block", "per_thread", "per_token")

QK = {
    "int8": Format(torch.int8, 127.0, rotates=True, granularities=_SHARED),
    "fp8": Format(torch.float8_e4m3fn, E4M3_MAX, granularities=_SHARED),
    "int4": Format(torch.uint8, 7.0, packed=2, smooths_q=True, granularities=("per_thread",)),
    "nvfp4": Format(
        torch.uint8, E4M3_MAX * FP4_MAX, packed=2, smooths_q=True, block_scaled=True,
        granularities=("per_16",),
    ),
}  # fmt: skip
PV = {
    "16bit": Format(None, beside=("int8",)),
    "fp8": Format(torch.float8_e4m3fn, E4M3_MAX, beside=("int8", "fp8", "int4")),
    "nvfp4": Format(
        torch.uint8, E4M3_MAX * FP4_MAX, packed=2, block_scaled=True, beside=("nvfp4",)
    ),
}  # fmt: skip
GRANULARITIES = {
    "per_block": Granularity(q_span=128, q_groups=1, k_groups=1),
    # What one thread of an mma tile holds: rows {i, i+8, i+16, i+24} of 32 rows of q, and rows
    # {2j, 2j+1} + 8*{0..7} of 64 rows of k.
    "per_thread": Granularity(q_span=32, q_groups=8, k_groups=4),
    "per_token": Granularity(q_span=1, q_groups=1, k_groups=1, one_pass=True),
    "per_16": Granularity(q_span=1, q_groups=1, k_groups=1),
}


class Prepared(NamedTuple):
    """What is made of k and v before a kernel looks at q. Contiguous."""

    k: Tensor  # codes [B, H, N_pad, D_pad / packed]
    # [B, H, N_pad / K_BLOCK, k_groups] fp32; K_BLOCK of them: a row each; block-scaled: [B, H]
    k_scale: Tensor
    k_mean: Tensor  # [B, H, D] fp32: the shift, by which lse is corrected
    v: Tensor | None = None  # codes [B, H, D_pad, N_pad / packed]; None: v is read as it is
    v_scale: Tensor | None = None  # [B, H, D_v] fp32
    v_mean: Tensor | None = None  # [B, H, D_v] fp32
    k_blocks: Tensor | None = None  # scales of blocks [B, H, N_pad, D_pad / FP4_BLOCK], E4M3's bits
    v_blocks: Tensor | None = None  # [B, H, D_pad, N_pad / FP4_BLOCK]
    # With a tail_block a key for each tail_block keys, the mean of those that count. T: N in such
    # blocks, T_pad its pad_rows.
    tail_k: Tensor | None = None  # codes [B, H, T_pad, D_pad], as k's
    tail_k_scale: Tensor | None = None  # [B, H, T_pad / K_BLOCK, k_groups] fp32
    tail_v: Tensor | None = None  # codes [B, H, D_pad, T_pad] as v's; 16-bit: [B, H, T, D_pad]
    # [B, H, T_pad] fp32: log2 of how many keys it stands for; -inf for none; any from T on
    tail_bias: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """``Prepared(*p.tensors())`` is p."""
        return [x for x in self if x is not None]

    @staticmethod
    def count(pv: Format) -> int:
        return 3 if pv.dtype is None else 8 if pv.block_scaled else 6


# -- what kernels and oracle agree on ----

PAD_N = 128  # rows of k and v the kernels read in one tile, at most
MAX_ROWS = 2**30 - 256  # of a sequence: twice that, rounded up to a tile, is a 32-bit number
K_BLOCK = 64  # rows of k that a Granularity's k_groups scales cover
TAIL_BLOCKS = (32, 64)  # keys that one key of a tail stands for
HEAD_DIMS = (64, 128, 256)  # what the kernels compute; smaller head_dims are padded in their loads
ROTATED = 128  # channels that a rotation mixes, at most
OF_HALF = 2.0  # k of its half, which is what is rotated (quantize/rotate.py)
Q_BLOCK = 128  # rows of q that share a mean, where q is smoothed
TRAINING_BLOCK = 64  # rows that share a scale in ops/training
TRAINED_HEAD_DIM = 128  # the largest there
NO_QUERY = 1e30  # the largest score of a row of queries that only pads, in ops/training: its p is 0
TINY = 1e-30  # amax of an all-zero group: 448 / TINY is still finite in fp32
LOG2E = 1.4426950408889634
SAMPLE = 128  # rows that statistics are estimated from, where one pass prepares k and v
NO_SHIFT = 9.0  # (3 standard errors)^2: a sample's mean this small is noise, and no shift is better
HEADROOM = 4.0  # of v's scale over the sample's amax: 2 of the 15 octaves of E4M3's normal numbers
# The same over the amax of the keys that count, where there are others: a row that sees those alone
# under a mask's lowest number averages over their v. In FP4 16 numbers of both share a scale.
OF_HIDDEN, OF_HIDDEN_FP4 = 32.0, 4.0
# Scores in log2 units, of attention/large_scores.py: what is large; the offset from there on, an
# integer, as numbers near m are; and from where on they are 8 apart or more, and the offset is 0.
LARGE, OFFSET_OF_LARGE, LARGEST = 2.0**15, 8.0, 2.0**26
LARGE_BITS, ONE_BITS = (15 + 127) << 23, 127 << 23  # of LARGE and 1 in fp32
LOG2_FP4_MAX = math.log2(E4M3_MAX * FP4_MAX)  # of the largest number that the two make


def pad_head_dim(head_dim: int) -> int:
    return next(d for d in HEAD_DIMS if head_dim <= d)


def rotation_scale(D_pad: int) -> float:
    """What the product of rotated q and halved, rotated k is multiplied by: a power of two."""
    return OF_HALF / min(D_pad, ROTATED)


def pad_rows(N):
    """N_pad; N may be symbolic."""
    return (N + PAD_N - 1) // PAD_N * PAD_N
