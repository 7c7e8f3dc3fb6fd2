"""What is taken off the scores of a row that are so large that fp32 has few numbers near them.

    p = exp2(x - (m - offset))      offset: log2 of p's largest number, m: the row's maximum

From |m| = LARGE on `m - offset` is rounded ever more, and so is m where an fma takes the product in
x exactly: p exceeds the largest number of its format, where the sum of the row does not stop.
A step of 8-bit q or k is by then many units of x. So `flatness` shrinks the scores of such a row to
|m| of about LARGE: p is right to 0.4 %, and only scores are confused that quantization confuses.
Scores that hold a bias beside a product of codes have a meaning at any size. They were rounded as
m was, so `shift_of` takes off them a number near m - offset with which the difference is exact.
All this is done once a row and tile. Below LARGE a flatness is 1, and the shift m - offset.

p in 16 bits has no offset, and room above 1: fp16 holds it while fp32 numbers near m in log2 units
are less than 32 apart, at scores of up to 1.8e8. Beyond, the fma makes it wrong. A flatness costs 2
to 5 % there (H200, 2026-11-28), FP8 0 to 1.9 %, and nothing at Flux's size.
"""

import triton
import triton.language as tl

from sage_inductor.ops.formats import LARGE, LARGE_BITS, LARGEST, OFFSET_OF_LARGE, ONE_BITS

_LARGE = tl.constexpr(LARGE)
_OFFSET_OF_LARGE = tl.constexpr(OFFSET_OF_LARGE)
_LARGEST = tl.constexpr(LARGEST)
_LARGE_BITS, _ONE_BITS = tl.constexpr(LARGE_BITS), tl.constexpr(ONE_BITS)


@triton.jit
def flatness(m):
    """m, fp32 of any shape -> 1, or from LARGE on LARGE / |m| to 13 %: minus its bits, a
    reciprocal, to which scores and m need not be nearer."""
    bits = tl.maximum(tl.abs(m), _LARGE).to(tl.int32, bitcast=True)
    return (-(bits - _LARGE_BITS) + _ONE_BITS).to(tl.float32, bitcast=True)


@triton.jit
def shift_of(m, OFFSET: tl.constexpr):
    """m, fp32 of any shape -> what to take off scores of at most m, for p of at most 2^OFFSET."""
    if OFFSET == 0:
        return m
    size = tl.abs(m)
    offset = tl.where(size < _LARGEST, _OFFSET_OF_LARGE, 0.0)
    return m - tl.where(size < _LARGE, OFFSET, offset)
