"""Rotation of q and k: a Hadamard matrix over their channels spreads a strong channel over all.

    R = diag(signs) H,  H[c, r] = (-1)^popcount(c & r),  R R^T = n I
    q k^T = (q R) (k R)^T / n

H is over blocks of n channels, 128 or D_pad if that is less. Padded channels take part: they are 0
before it. The signs, (-1)^(c0 c1 + c2 c5 + c3 c4) by the bits of the channel c, keep what is the
same in all channels, or alternates with a bit of c, from falling into one: the Walsh spectrum of
that quadratic form is flat in six bits.

Its input has 16 bits, so that a product with +-1 is exact; sums are in fp32. Dividing by n is left
to q's scale. k is halved, so that fp16 holds the difference of any number and a mean.

A matrix product mixes 16 channels, those of bits 0, 1, 3 and 4 of c; butterflies do the rest. On
Hopper a thread of the attention kernel holds the channels of bits 2, 5 and 6. So rotating a tile of
q takes 288 instructions of a warpgroup; butterflies alone take 565, for 32 channels.

The FP8 backward turns codes back by a product with all of R, in INT8: x R R^T = n x.

Source: QuaRot (arXiv:2404.00456), for the rotation of keys; here k is smoothed before.
"""

import triton
import triton.language as tl


@triton.jit
def odd_of(k, n):
    """Where the 16 x 16 product has -1: of input k and output n, by the bits of both."""
    odd = k & n
    odd = odd ^ (odd >> 2)
    return (odd ^ (odd >> 1) ^ (k & (k >> 1)) ^ ((k >> 2) & (k >> 3))) & 1


@triton.jit
def odd_of_rotation(c, r):
    """1 where R[c, r] is -1, else 0; of at most 128 channels."""
    odd = c & r
    odd = odd ^ (odd >> 4)
    odd = odd ^ (odd >> 2)
    odd = odd ^ (odd >> 1)
    return (odd ^ (c & (c >> 1)) ^ ((c >> 2) & (c >> 5)) ^ ((c >> 3) & (c >> 4))) & 1


@triton.jit
def in_16_bits(x, Like):
    """x in the dtype that Like points to; in bf16, if that is fp32."""
    return x.to(tl.bfloat16 if Like.dtype.element_ty == tl.float32 else Like.dtype.element_ty)


@triton.jit
def rotate(x, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """x [ROWS, BLOCK_D] of 16 bits -> x R [ROWS, BLOCK_D] in fp32."""
    # channel = 128 b + 32 i + 8 t + 4 j + w; of the product k = 4 t + w. b stands beside the rows,
    # so that of eight warps each has all of i and j.
    B: tl.constexpr = (BLOCK_D + 127) // 128
    I: tl.constexpr = BLOCK_D // B // 32
    x = x.reshape([ROWS, B, I, 4, 2, 4]).permute([2, 4, 1, 0, 3, 5])
    k = tl.arange(0, 16)
    h = (1.0 - 2.0 * odd_of(k[:, None], k[None, :]).to(tl.float32)).to(x.dtype)
    # A product with 16 rows is mma.sync on every GPU. With x's rows it is tcgen05 on sm_100, which
    # fails to compile at head_dim 256 (Triton 3.6, 3.7), and wgmma on sm_90, where preparing k for
    # the 16-bit recipe took 2 to 4 % longer (H200).
    y = tl.dot(h.trans(), x.reshape([ROWS * BLOCK_D // 16, 16]).trans()).trans()
    y = butterflies(y.reshape([I // 2, 2, 2, B * ROWS, 16]).permute([0, 3, 4, 1, 2]), I)
    y = y.reshape([I // 2, B, ROWS, 4, 4, 2, 2]).permute([2, 1, 0, 5, 3, 6, 4])
    return y.reshape([ROWS, BLOCK_D])


@triton.jit
def butterflies(y, I: tl.constexpr):
    """The rest of R: y [I / 2, n, 16, 2, 2], the first bit 6 of the channel, the last 5 and 2."""
    a, b = y.split()
    a0, a1 = a.split()
    b0, b1 = b.split()
    p0, p1 = a0 + b0, a0 - b0
    q0, q1 = a1 - b1, a1 + b1  # the sign of bits 2 and 5
    y = tl.join(tl.join(p0 + q0, p0 - q0), tl.join(p1 + q1, p1 - q1))
    if I == 4:
        a, b = y.permute([1, 2, 3, 4, 0]).split()
        y = tl.join(a + b, a - b).permute([4, 0, 1, 2, 3])
    return y
