"""Numbers of formats.py as kernels read them."""

import math

import triton.language as tl

from sage_inductor.ops import formats

TINY, Q_BLOCK = tl.constexpr(formats.TINY), tl.constexpr(formats.Q_BLOCK)
LOG2E, LN2 = tl.constexpr(formats.LOG2E), tl.constexpr(1 / formats.LOG2E)
INT8_MAX, INT4_MAX = (tl.constexpr(formats.QK[x].largest) for x in ("int8", "int4"))
FP8_MAX, LOG2_FP8_MAX = tl.constexpr(formats.E4M3_MAX), tl.constexpr(math.log2(formats.E4M3_MAX))
LOG2_FP4_MAX, OF_HIDDEN = tl.constexpr(formats.LOG2_FP4_MAX), tl.constexpr(formats.OF_HIDDEN)
INF_BITS = tl.constexpr(0x7F800000)  # of fp32
FP4_BLOCK = tl.constexpr(formats.FP4_BLOCK)
OF_HIDDEN_FP4 = tl.constexpr(formats.OF_HIDDEN_FP4)
