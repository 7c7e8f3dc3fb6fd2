"""The kernel of ../decode.py for caches of 8-bit codes on Hopper, in Gluon: the same recipe, with
every byte of k and v read from global memory into the register in which it is used.

In Triton a cache of codes is no faster to read than one of 16 bits: codes are converted one by one,
and go through shared memory to be laid out for a product (H200, 16 sequences of 32K, 3.6: 448 us
for INT8 and 496 for E4M3, SDPA 477 in bf16). Here nothing is laid out anew:

* A tile is read as words of four codes, channels 4 w to 4 w + 3, in the layout of an operand of
  mma.sync whose elements are words. Byte j of each word is plane j. k's planes are multiplied by
  q's, the channels 4 w + j of q, and v's planes give the channels 4 w + j of o. So a product needs
  no order of channels but the one that is read.
* Two codes become two numbers of fp16 by three instructions in INT8, and by two in E4M3.
* The next tile is read before this one is computed.

All rows that share a head of k are one tile of 16 rows: at most 16 of them.

Shapes: as in ../decode.py; W words of a row, D / 4.
"""

# ruff: noqa: F841  (what `context` reads)
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from sage_inductor.ops.attention.hopper.ring import context
from sage_inductor.ops.decode_call import UP
from sage_inductor.ops.formats import LOG2E, TINY
from sage_inductor.ops.quantize.rotate import odd_of_rotation

_LOG2E, _TINY, _UP = gl.constexpr(LOG2E), gl.constexpr(TINY), gl.constexpr(UP)


@gluon.constexpr_function
def _to_half2(plane, is_int8):
    """Byte `plane` of $1 and of $2 -> two numbers of fp16. A code c of INT8 is the last byte of
    1152 + c, less 128 and modulo 256."""
    pick = f"prmt.b32 t, $1, $2, {0x4400 + 0x1111 * plane:#x};"
    if is_int8:
        return (
            f"{{ .reg .b32 t, c; mov.b32 c, 0x64806480; {pick}"
            " lop3.b32 t, t, 0x00ff00ff, c, 0x6a; sub.rn.f16x2 $0, t, c; }"
        )
    pick = f"prmt.b32 t, $1, $2, {0x40 + 0x11 * plane:#x};"
    return (
        f"{{ .reg .b32 t; .reg .b16 a, b; {pick} mov.b32 {{a, b}}, t;"
        " cvt.rn.f16x2.e4m3x2 $0, a; }"
    )


@gluon.jit
def _plane(words, J: gl.constexpr, IS_INT8: gl.constexpr):
    """Byte J of each word, as fp16."""
    return gl.inline_asm_elementwise(
        _to_half2(J, IS_INT8), "=r,r,r", [words], dtype=gl.float16, is_pure=True, pack=2
    )


@gluon.jit
def _up(x0, x1, x2, x3):
    """What the rows of q are multiplied by [16], of q's planes [16, W]."""
    a, b = gl.maximum(gl.abs(x0), gl.abs(x1)), gl.maximum(gl.abs(x2), gl.abs(x3))
    exponent = gl.max(gl.maximum(a, b).to(gl.float32), 1).to(gl.int32, bitcast=True) >> 23
    return (gl.minimum(_UP - exponent, 254) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _operand(x, up, L: gl.constexpr):
    return gl.convert_layout((x.to(gl.float32) * gl.expand_dims(up, 1)).to(gl.float16), L)


@gluon.jit
def _rotated(x0, x1, x2, x3, W: gl.constexpr, S_L: gl.constexpr):
    """Planes of x [16, W] of 16 bits -> those of x R in fp32: quantize/rotate.py. A product over
    words, then the two bits of a plane."""
    B_L: gl.constexpr = gl.DotOperandLayout(1, S_L, 2)
    c = gl.arange(0, W, gl.SliceLayout(1, B_L))[:, None]
    r = gl.arange(0, W, gl.SliceLayout(0, B_L))[None, :]
    # What odd_of_rotation says of plane 0, without the signs of channels, of which some go with j.
    odd = c & r & 31
    odd = odd ^ (odd >> 4)
    odd = odd ^ (odd >> 2)
    odd = (odd ^ (odd >> 1)) & 1
    h = gl.where((c ^ r) < 32, 1 - 2 * odd, 0).to(x0.dtype)
    y0, y1 = _signed(x0, h, 0, W, S_L), _signed(x1, h, 1, W, S_L)
    y2, y3 = _signed(x2, h, 2, W, S_L), _signed(x3, h, 3, W, S_L)
    a0, a1, b0, b1 = y0 + y1, y0 - y1, y2 + y3, y2 - y3
    return a0 + b0, a1 + b1, a0 - b0, a1 - b1


@gluon.jit
def _signed(x, h, J: gl.constexpr, W: gl.constexpr, S_L: gl.constexpr):
    """Plane J of x, with the signs of its channels, times h [W, W]."""
    A_L: gl.constexpr = gl.DotOperandLayout(0, S_L, 2)
    c = 4 * gl.arange(0, W, gl.SliceLayout(0, A_L)) + J
    sign = (1 - 2 * odd_of_rotation(c, 0)).to(x.dtype)
    y = gl.zeros([16, W], gl.float32, S_L)
    return mma_v2(gl.convert_layout(x, A_L) * sign[None, :], h, y)


@gluon.jit
def decode_codes_kernel(
    Q,  # [B, H_q, N_q, D] in, 16-bit
    K, V,  # [B, H_kv, N, D], [B, H_kv, N, D_V] in, INT8 or E4M3
    K_scale, V_scale,  # [B, H_kv, N] in, fp32
    Mask,  # [B, N_q, N] in, bool
    Start, End,  # [B] in, int32 or int64
    O, Lse,  # [B, H_q, N_q, S, D_V], [B, H_q, N_q, S] out, fp32; log2 units
    stride_qb, stride_qh, stride_qn, stride_qd,
    stride_kb, stride_kh, STRIDE_K: gl.constexpr,
    stride_vb, stride_vh, STRIDE_V: gl.constexpr,
    stride_ksb, stride_ksh, stride_ksn,
    stride_vsb, stride_vsh, stride_vsn,
    stride_mb, stride_mq, stride_mn,
    stride_start, stride_end,
    H_q, H_kv, N_q, N, rows, S,  # rows: H_q / H_kv * N_q
    D: gl.constexpr, D_V: gl.constexpr, SCALE: gl.constexpr,
    LEFT: gl.constexpr, TURN: gl.constexpr,  # -1: no bound; 0: q is not rotated
    BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Grid: (B * H_kv, S): a split of the keys."""
    S_L: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, gl.num_warps()], [16, 8])
    W: gl.constexpr = D // 4
    K_WIDTH: gl.constexpr = 4 if W >= 32 else 2  # words that a thread reads at once
    Q_L: gl.constexpr = gl.DotOperandLayout(0, S_L, K_WIDTH)
    K_L: gl.constexpr = gl.DotOperandLayout(1, S_L, K_WIDTH)
    P_L: gl.constexpr = gl.DotOperandLayout(0, S_L, 2)
    V_L: gl.constexpr = gl.DotOperandLayout(1, S_L, 2)
    K_INT8: gl.constexpr = K.dtype.element_ty == gl.int8
    V_INT8: gl.constexpr = V.dtype.element_ty == gl.int8
    head = gl.program_id(0)
    b, h_kv = (head // H_kv).to(gl.int64), (head % H_kv).to(gl.int64)
    split = gl.program_id(1).to(gl.int64)
    row = gl.arange(0, 16, gl.SliceLayout(1, S_L))
    n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_L))
    i = row % N_q
    h = h_kv * (H_q // H_kv) + row // N_q

    # -- which keys ----
    start = gl.minimum(gl.maximum(gl.load(Start + b * stride_start), 0), N).to(gl.int32)
    end = gl.minimum(gl.maximum(gl.load(End + b * stride_end), 0), N).to(gl.int32)
    place = end - N_q + i
    if LEFT >= 0:
        start = gl.maximum(start, end - N_q - LEFT)
    keys = tl.cdiv(tl.cdiv(gl.maximum(end - start, 0), S), BLOCK_N) * BLOCK_N  # of a split
    begin = gl.minimum(start + split * keys, end).to(gl.int32)
    stop = begin + gl.minimum(keys, end - begin).to(gl.int32)

    ctx = context()
    k, k_scale = _read_k(ctx, begin)
    v, v_scale = _read_v(ctx, begin)

    # -- q ----
    x0, x1, x2, x3 = _read_q(ctx, 0), _read_q(ctx, 1), _read_q(ctx, 2), _read_q(ctx, 3)
    if TURN > 0:  # rounded as q was
        y0, y1, y2, y3 = _rotated(x0, x1, x2, x3, W, S_L)
        x0, x1 = (y0 * TURN).to(x0.dtype), (y1 * TURN).to(x0.dtype)
        x2, x3 = (y2 * TURN).to(x2.dtype), (y3 * TURN).to(x2.dtype)
    up = _up(x0, x1, x2, x3)
    q0, q1, q2, q3 = (
        _operand(x0, up, Q_L), _operand(x1, up, Q_L), _operand(x2, up, Q_L), _operand(x3, up, Q_L)
    )  # fmt: skip
    down = gl.expand_dims(SCALE * _LOG2E / up, 1)

    m = gl.full([16], -float("inf"), gl.float32, gl.SliceLayout(1, S_L))
    l = gl.zeros([16, BLOCK_N], gl.float32, S_L)  # of each place in a tile
    o0 = gl.zeros([16, D_V // 4], gl.float32, S_L)
    o1, o2, o3 = o0, o0, o0

    for first in range(begin, stop, BLOCK_N):
        x = gl.zeros([16, BLOCK_N], gl.float32, S_L)
        x = mma_v2(q0, _plane(k, 0, K_INT8), x)
        x = mma_v2(q1, _plane(k, 1, K_INT8), x)
        x = mma_v2(q2, _plane(k, 2, K_INT8), x)
        x = mma_v2(q3, _plane(k, 3, K_INT8), x)
        x = x * down * gl.expand_dims(k_scale, 0)
        k, k_scale = _read_k(ctx, first + BLOCK_N)
        key = first + n
        seen = gl.expand_dims(key, 0) <= gl.expand_dims(place, 1)
        if Mask is not None:
            at = gl.expand_dims(i.to(gl.int64), 1) * stride_mq
            at = Mask + b * stride_mb + at + gl.expand_dims(key.to(gl.int64), 0) * stride_mn
            inside = gl.expand_dims(key, 0) + gl.zeros([16, BLOCK_N], gl.int32, S_L) < stop
            seen = gl.load(at, mask=inside, other=0) != 0
        seen = seen & (gl.expand_dims(key, 0) < stop)
        if LEFT >= 0:
            seen = seen & (gl.expand_dims(key, 0) >= gl.expand_dims(place - LEFT, 1))
        x = gl.where(seen, x, -float("inf"))
        m_new = gl.maximum(m, gl.max(x, 1))
        # A row that has seen nothing yet has no maximum: x - m would be NaN.
        shift = gl.where(m_new == -float("inf"), 0.0, m_new)
        p = gl.exp2(x - gl.expand_dims(shift, 1))
        alpha = gl.expand_dims(gl.exp2(m - shift), 1)
        m = m_new
        l = l * alpha + p

        largest = gl.maximum(gl.max(v_scale, 0), _TINY)
        p = p * gl.expand_dims(v_scale * (1.0 / largest), 0)
        p = gl.convert_layout(p.to(gl.float16), P_L)
        zeros = gl.zeros([16, D_V // 4], gl.float32, S_L)
        o0 = o0 * alpha + mma_v2(p, _plane(v, 0, V_INT8), zeros) * largest
        o1 = o1 * alpha + mma_v2(p, _plane(v, 1, V_INT8), zeros) * largest
        o2 = o2 * alpha + mma_v2(p, _plane(v, 2, V_INT8), zeros) * largest
        o3 = o3 * alpha + mma_v2(p, _plane(v, 3, V_INT8), zeros) * largest
        v, v_scale = _read_v(ctx, first + BLOCK_N)

    l = gl.sum(l, 1)
    here = ((b * H_q + h) * N_q + i) * S + split  # [16]
    gl.store(Lse + here, m + gl.log2(l), mask=row < rows)
    inverse = gl.expand_dims(gl.where(l == 0, 0.0, 1.0 / l), 1)
    word = gl.arange(0, D_V // 4, gl.SliceLayout(0, S_L))
    at = O + gl.expand_dims(here * D_V, 1) + gl.expand_dims(4 * word, 0)
    mask = gl.expand_dims((row < rows) & (l != 0), 1) & gl.expand_dims(word >= 0, 0)
    gl.store(at, o0 * inverse, mask=mask)
    gl.store(at + 1, o1 * inverse, mask=mask)
    gl.store(at + 2, o2 * inverse, mask=mask)
    gl.store(at + 3, o3 * inverse, mask=mask)


@gluon.jit
def _read_q(ctx, J: gl.constexpr):
    """Channels 4 w + J of q [16, W]."""
    word = gl.arange(0, ctx.W, gl.SliceLayout(0, ctx.S_L))
    q = ctx.Q + ctx.b * ctx.stride_qb + ctx.h * ctx.stride_qh + ctx.i.to(gl.int64) * ctx.stride_qn
    at = gl.expand_dims(q, 1) + gl.expand_dims((4 * word + J).to(gl.int64) * ctx.stride_qd, 0)
    mask = gl.expand_dims(ctx.row < ctx.rows, 1) & gl.expand_dims(word >= 0, 0)
    return gl.load(at, mask=mask, other=0.0)


@gluon.jit
def _tile(ctx, X, Scale, stride_s, first, key, word, STRIDE: gl.constexpr, OF_LANES: gl.constexpr):
    """Words of the tile of a cache [N, 4 W] that begins at key `first`, where key and word
    broadcast, and its scales [BLOCK_N]. Keys from `stop` on are 0. Most tiles have none, and need
    no mask: its instructions, and registers of zeros, took a tenth of the time."""
    at = X.to(gl.pointer_type(gl.int32)) + first.to(gl.int64) * (STRIDE // 4)
    at = at + ((key & OF_LANES).to(gl.int64) * (STRIDE // 4) + word)
    at = at + (key & ~OF_LANES).to(gl.int64) * (STRIDE // 4)
    at_scale = Scale + first.to(gl.int64) * stride_s + ctx.n * stride_s
    if first + ctx.BLOCK_N <= ctx.stop:
        words, scale = gl.load(at), gl.load(at_scale)
    else:
        words = gl.load(at, mask=(key < ctx.stop - first) & (word >= 0), other=0)
        scale = gl.load(at_scale, mask=ctx.n < ctx.stop - first, other=0.0)
    return words, scale


@gluon.jit
def _read_k(ctx, first):
    """k's words [W, BLOCK_N] and scales [BLOCK_N] of the tile that begins at key `first`."""
    key = gl.arange(0, ctx.BLOCK_N, gl.SliceLayout(0, ctx.K_L))[None, :]
    word = gl.arange(0, ctx.W, gl.SliceLayout(1, ctx.K_L))[:, None]
    k = ctx.K + ctx.b * ctx.stride_kb + ctx.h_kv * ctx.stride_kh
    scale = ctx.K_scale + ctx.b * ctx.stride_ksb + ctx.h_kv * ctx.stride_ksh
    return _tile(ctx, k, scale, ctx.stride_ksn, first, key, word, ctx.STRIDE_K, 8 * gl.num_warps() - 1)


@gluon.jit
def _read_v(ctx, first):
    """v's words [BLOCK_N, D_V / 4] and scales [BLOCK_N]."""
    key = gl.arange(0, ctx.BLOCK_N, gl.SliceLayout(1, ctx.V_L))[:, None]
    word = gl.arange(0, ctx.D_V // 4, gl.SliceLayout(0, ctx.V_L))[None, :]
    v = ctx.V + ctx.b * ctx.stride_vb + ctx.h_kv * ctx.stride_vh
    scale = ctx.V_scale + ctx.b * ctx.stride_vsb + ctx.h_kv * ctx.stride_vsh
    return _tile(ctx, v, scale, ctx.stride_vsn, first, key, word, ctx.STRIDE_V, 6)
