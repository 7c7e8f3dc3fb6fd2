"""The kernel of ../decode.py for caches of 8-bit codes on Hopper, in Gluon: the same recipe.

In Triton a cache of codes took as long to read as one of 16 bits: codes are converted one by one,
and go through shared memory to be laid out for a product. (H200, Triton 3.6, 16 sequences of 32K:
INT8 448 us, E4M3 496, SDPA in bf16 477. This kernel: 257 for both, 4.3 TB/s.)

* A row of a cache is read as W words of four codes: word w has the channels 4 w to 4 w + 3. Byte j
  of all words is plane j. k's planes are multiplied by q's, the channels 4 w + j of q, and v's
  planes give the channels 4 w + j of o. So codes are converted in the register in which a product
  takes them. Two become two numbers of fp16 by three instructions in INT8, by two in E4M3.
* Keys, and v's channels, are the rows of mma.sync, and the rows of q its columns: 8 at least. With
  q in the rows, which are 16, a call of 4 queries and heads took twice the products.
* A warp has keys of its own, a way, and its own maximum and sums, which are added up at the end.
  Where warps shared keys, nine barriers a tile instead of three made it 367 us.
* Copies to shared memory run STAGES - 1 tiles ahead.

Shapes: as in ../decode.py; WAYS warps, R rows that share a head of k, W = D / 4, W_V = D_V / 4.
"""

# ruff: noqa: F841  (what `context` reads)
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from sage_inductor.ops.attention.hopper.ring import context
from sage_inductor.ops.compat import gdc_launch_dependents, gluon_barrier
from sage_inductor.ops.constants import LOG2E, TINY
from sage_inductor.ops.decode_call import P_BITS, UP
from sage_inductor.ops.quantize.rotate import odd_of_rotation

_UP, _P_BITS = gl.constexpr(UP), gl.constexpr(P_BITS)


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
        f"{{ .reg .b32 t; .reg .b16 a, b; {pick} mov.b32 {{a, b}}, t; cvt.rn.f16x2.e4m3x2 $0, a; }}"
    )


@gluon.jit
def _plane(words, J: gl.constexpr, IS_INT8: gl.constexpr):
    """Byte J of each word, as fp16."""
    return gl.inline_asm_elementwise(
        _to_half2(J, IS_INT8), "=r,r,r", [words], dtype=gl.float16, is_pure=True, pack=2
    )


@gluon.jit
def _up(x0, x1, x2, x3):
    """What the rows of q are multiplied by [WAYS, R], of q's planes [WAYS, W, R]."""
    a, b = gl.maximum(gl.abs(x0), gl.abs(x1)), gl.maximum(gl.abs(x2), gl.abs(x3))
    exponent = gl.max(gl.maximum(a, b).to(gl.float32), 1).to(gl.int32, bitcast=True) >> 23
    return (gl.minimum(_UP - exponent, 254) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _operand(x, up, L: gl.constexpr):
    return gl.convert_layout((x.to(gl.float32) * gl.expand_dims(up, 1)).to(gl.float16), L)


@gluon.jit
def _rotated(ctx, x0, x1, x2, x3):
    """Planes of x [WAYS, W, R] of 16 bits -> those of R^T x in fp32: quantize/rotate.py. A product
    over words, then the two bits of a plane."""
    L: gl.constexpr = gl.DotOperandLayout(0, ctx.L, 2)
    way = gl.arange(0, ctx.WAYS, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    r = gl.arange(0, ctx.W, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    c = gl.arange(0, ctx.W, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    odd = c & r & 31
    odd = odd ^ (odd >> 4)
    odd = odd ^ (odd >> 2)
    odd = (odd ^ (odd >> 1)) & 1
    h = gl.where(((c ^ r) < 32) & (way >= 0), 1 - 2 * odd, 0).to(x0.dtype)
    y0, y1 = _signed(ctx, h, x0, 0), _signed(ctx, h, x1, 1)
    y2, y3 = _signed(ctx, h, x2, 2), _signed(ctx, h, x3, 3)
    a0, a1, b0, b1 = y0 + y1, y0 - y1, y2 + y3, y2 - y3
    return a0 + b0, a1 + b1, a0 - b0, a1 - b1


@gluon.jit
def _signed(ctx, h, x, J: gl.constexpr):
    """h [WAYS, W, W] times plane J of x with the signs of its channels."""
    L: gl.constexpr = gl.DotOperandLayout(1, ctx.L, 2)
    c = 4 * gl.arange(0, ctx.W, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None] + J
    sign = (1 - 2 * odd_of_rotation(c, 0)).to(x.dtype)
    y = gl.zeros([ctx.WAYS, ctx.W, ctx.R], gl.float32, ctx.L)
    return mma_v2(h, x * sign, y)


@gluon.jit
def decode_codes_kernel(
    Q,  # [B, H_q, N_q, D] in, 16-bit
    K, V,  # [B, H_kv, N, D], [B, H_kv, N, D_V] in, INT8 or E4M3
    K_scale, V_scale,  # [B, H_kv, N] in, fp32
    Mask, Is_run,  # [B, N_q, N], [B] in, bool
    Start, End,  # [B] in, int32 or int64
    O, Lse,  # [B, H_q, N_q, S, D_V], [B, H_q, N_q, S] out, fp32; log2 units
    stride_qb, stride_qh, stride_qn, stride_qd,  # the last is 1
    stride_kb, stride_kh, STRIDE_K: gl.constexpr,
    stride_vb, stride_vh, STRIDE_V: gl.constexpr,
    stride_ksb, stride_ksh, stride_ksn,
    stride_vsb, stride_vsh, stride_vsn,
    stride_mb, stride_mq, stride_mn, stride_run,
    stride_start, stride_end,
    H_q, H_kv, N_q, N, rows, S,  # rows: H_q / H_kv * N_q
    D: gl.constexpr, D_V: gl.constexpr, SCALE: gl.constexpr,
    LEFT: gl.constexpr, TURN: gl.constexpr,  # -1: no bound; 0: q is not rotated
    PDL: gl.constexpr, R: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Grid: (B * H_kv, S): a split of the keys, for all rows that share a head of k. BLOCK_N: keys
    of a way in a tile."""
    WAYS: gl.constexpr = gl.num_warps()
    L: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WAYS, 1, 1], [1, 16, 8])
    ROWS: gl.constexpr = gl.SliceLayout(1, L)  # [WAYS, R]
    KEYS: gl.constexpr = gl.SliceLayout(2, L)  # [WAYS, BLOCK_N]
    W: gl.constexpr = D // 4
    W_V: gl.constexpr = D_V // 4
    K_WIDTH: gl.constexpr = 4 if W >= 32 else 2  # words that a thread reads at once
    K_L: gl.constexpr = gl.DotOperandLayout(0, L, K_WIDTH)
    Q_L: gl.constexpr = gl.DotOperandLayout(1, L, K_WIDTH)
    OF_Q: gl.constexpr = gl.DotOperandLayout(1, L, 2 if TURN > 0 else K_WIDTH)  # as it is read
    V_L: gl.constexpr = gl.DotOperandLayout(0, L, 2)
    P_L: gl.constexpr = gl.DotOperandLayout(1, L, 2)
    K_INT8: gl.constexpr = K.dtype.element_ty == gl.int8
    V_INT8: gl.constexpr = V.dtype.element_ty == gl.int8
    STEP: gl.constexpr = WAYS * BLOCK_N
    head = gl.program_id(0)
    b, h_kv = (head // H_kv).to(gl.int64), (head % H_kv).to(gl.int64)
    split = gl.program_id(1).to(gl.int64)
    way = gl.arange(0, WAYS, gl.SliceLayout(1, ROWS))[:, None]
    row = gl.arange(0, R, gl.SliceLayout(0, ROWS))[None, :] + 0 * way  # [WAYS, R]
    n = BLOCK_N * gl.arange(0, WAYS, gl.SliceLayout(1, KEYS))[:, None]
    n += gl.arange(0, BLOCK_N, gl.SliceLayout(0, KEYS))[None, :]  # [WAYS, BLOCK_N]
    i = row % N_q

    # -- which keys ----
    start = gl.minimum(gl.maximum(gl.load(Start + b * stride_start), 0), N).to(gl.int32)
    end = gl.minimum(gl.maximum(gl.load(End + b * stride_end), 0), N).to(gl.int32)
    place = end - N_q + i
    if LEFT >= 0:
        start = gl.maximum(start, end - N_q - LEFT)
    keys = tl.cdiv(tl.cdiv(gl.maximum(end - start, 0), S), STEP) * STEP  # of a split
    begin = gl.minimum(start + split * keys, end).to(gl.int32)
    stop = begin + gl.minimum(keys, end - begin).to(gl.int32)

    # What a warp reads at once lies in banks of its own.
    WIDE: gl.constexpr = W >= 32
    K_S: gl.constexpr = gl.SwizzledSharedLayout(16 if WIDE else 8, 1 if WIDE else 2, 2, [2, 1, 0])
    V_S: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4 if W_V >= 32 else 2, [2, 1, 0])
    k_ring = gl.allocate_shared_memory(gl.int32, [STAGES, WAYS, BLOCK_N, W], K_S)
    v_ring = gl.allocate_shared_memory(gl.int32, [STAGES, WAYS, BLOCK_N, W_V], V_S)
    k_base = K + b * stride_kb + h_kv * stride_kh
    v_base = V + b * stride_vb + h_kv * stride_vh
    k_scales = K_scale + b * stride_ksb + h_kv * stride_ksh
    v_scales = V_scale + b * stride_vsb + h_kv * stride_vsh

    ctx = context()
    for stage in gl.static_range(STAGES - 1):
        _fetch(ctx, begin + stage * STEP, stage)
    k_scale = _scales(ctx, k_scales, begin, stride_ksn)
    v_scale = _scales(ctx, v_scales, begin, stride_vsn)
    if PDL:
        gdc_launch_dependents()

    # -- q ----
    words = _read_q(ctx)
    x0, x1 = _of_q(words, 0, Q.dtype.element_ty), _of_q(words, 1, Q.dtype.element_ty)
    x2, x3 = _of_q(words, 2, Q.dtype.element_ty), _of_q(words, 3, Q.dtype.element_ty)
    if TURN > 0:  # rounded as q was
        y0, y1, y2, y3 = _rotated(ctx, x0, x1, x2, x3)
        x0, x1 = (y0 * TURN).to(x0.dtype), (y1 * TURN).to(x0.dtype)
        x2, x3 = (y2 * TURN).to(x2.dtype), (y3 * TURN).to(x2.dtype)
    up = _up(x0, x1, x2, x3)
    q0, q1, q2, q3 = (
        _operand(x0, up, Q_L), _operand(x1, up, Q_L), _operand(x2, up, Q_L), _operand(x3, up, Q_L)
    )  # fmt: skip
    down = gl.expand_dims(SCALE * LOG2E / gl.convert_layout(up, ROWS), 1)

    m = gl.full([WAYS, R], -float("inf"), gl.float32, ROWS)
    l = gl.zeros([WAYS, R], gl.float32, ROWS)
    c = gl.full([WAYS], TINY, gl.float32, gl.SliceLayout(1, KEYS))
    o0 = gl.zeros([WAYS, W_V, R], gl.float32, L)
    o1, o2, o3 = o0, o0, o0

    is_run = Mask is None
    if Is_run is not None:
        is_run = gl.load(Is_run + b * stride_run) != 0
    stage = 0
    for first in range(begin, stop, STEP):
        async_copy.wait_group(STAGES - 2)
        gluon_barrier()  # what `_fetch` overwrites was read by all
        k = k_ring.index(stage).load(K_L)
        x = gl.zeros([WAYS, BLOCK_N, R], gl.float32, L)
        x = mma_v2(_plane(k, 0, K_INT8), q0, x)
        x = mma_v2(_plane(k, 1, K_INT8), q1, x)
        x = mma_v2(_plane(k, 2, K_INT8), q2, x)
        x = mma_v2(_plane(k, 3, K_INT8), q3, x)
        x = x * down * gl.expand_dims(k_scale, 2)
        k_scale = _scales(ctx, k_scales, first + STEP, stride_ksn)
        _fetch(ctx, first + (STAGES - 1) * STEP, (stage + STAGES - 1) % STAGES)
        key = gl.expand_dims(first + n, 2)  # [WAYS, BLOCK_N, 1]
        seen = key <= gl.expand_dims(place, 1)
        if Mask is not None:
            if not is_run:
                at = Mask + b * stride_mb + gl.expand_dims(i.to(gl.int64), 1) * stride_mq
                at = at + key.to(gl.int64) * stride_mn
                there = (key < stop) & gl.expand_dims(row < rows, 1)
                seen = gl.load(at, mask=there, other=0) != 0
        seen = seen & (key < stop)
        if LEFT >= 0:
            seen = seen & (key >= gl.expand_dims(place - LEFT, 1))
        x = gl.where(seen, x, -float("inf"))
        m_new = gl.maximum(m, gl.max(x, 1))
        # A row that has seen nothing yet has no maximum: x - m would be NaN.
        shift = gl.where(m_new == -float("inf"), 0.0, m_new)
        p = gl.exp2(x - gl.expand_dims(shift - _P_BITS, 1))
        alpha = gl.exp2(m - shift)
        m = m_new
        l = l * alpha + gl.sum(p, 1)
        c_new = gl.maximum(c, gl.max(gl.abs(v_scale), 1))
        inverse = 1.0 / c_new
        p = p * gl.expand_dims(v_scale * gl.expand_dims(inverse, 1), 2)
        ratio = gl.convert_layout(c * inverse, gl.SliceLayout(1, ROWS))
        alpha = gl.expand_dims(alpha * gl.expand_dims(ratio, 1), 1)
        c = c_new
        p = gl.convert_layout(p.to(gl.float16), P_L)
        v_scale = _scales(ctx, v_scales, first + STEP, stride_vsn)
        v = v_ring.index(stage).permute([0, 2, 1]).load(V_L)
        o0 = mma_v2(_plane(v, 0, V_INT8), p, o0 * alpha)
        o1 = mma_v2(_plane(v, 1, V_INT8), p, o1 * alpha)
        o2 = mma_v2(_plane(v, 2, V_INT8), p, o2 * alpha)
        o3 = mma_v2(_plane(v, 3, V_INT8), p, o3 * alpha)
        stage = (stage + 1) % STAGES

    # -- all ways ----
    async_copy.wait_group(0)
    m_all = gl.max(m, 0)
    shift = gl.where(m_all == -float("inf"), 0.0, m_all)
    weight = gl.exp2(m - gl.expand_dims(shift, 0))
    l = gl.sum(l * weight, 0)
    of_c = gl.convert_layout(c, gl.SliceLayout(1, ROWS))
    weight = weight * gl.expand_dims(of_c, 1) * gl.expand_dims(gl.where(l == 0, 0.0, 1.0 / l), 0)
    weight = gl.expand_dims(weight, 1)
    # A thread adds up what is its own: Triton's reduction over warps has a shuffle for each number.
    SUM: gl.constexpr = gl.BlockedLayout([WAYS, 1, 2], [1, 8, 4], [1, WAYS, 1], [2, 1, 0])
    OUT: gl.constexpr = gl.SliceLayout(0, SUM)  # [W_V, R]
    row = gl.arange(0, R, gl.SliceLayout(0, OUT))
    word = gl.arange(0, W_V, gl.SliceLayout(1, OUT))
    here = ((b * H_q + h_kv * (H_q // H_kv) + row // N_q) * N_q + row % N_q) * S + split
    l = gl.convert_layout(l, gl.SliceLayout(0, OUT))
    lse = gl.convert_layout(m_all, gl.SliceLayout(0, OUT)) + gl.log2(l) - _P_BITS
    gl.store(Lse + here, lse, mask=row < rows)
    at = O + gl.expand_dims(here * D_V, 0) + gl.expand_dims(4 * word, 1)
    mask = gl.expand_dims((row < rows) & (l != 0), 0) & gl.expand_dims(word >= 0, 1)
    gl.store(at, gl.sum(gl.convert_layout(o0 * weight, SUM), 0), mask=mask)
    gl.store(at + 1, gl.sum(gl.convert_layout(o1 * weight, SUM), 0), mask=mask)
    gl.store(at + 2, gl.sum(gl.convert_layout(o2 * weight, SUM), 0), mask=mask)
    gl.store(at + 3, gl.sum(gl.convert_layout(o3 * weight, SUM), 0), mask=mask)


@gluon.jit
def _read_q(ctx):
    """Four channels of q as one number [WAYS, W, R], the same for all ways."""
    way = gl.arange(0, ctx.WAYS, gl.SliceLayout(1, gl.SliceLayout(2, ctx.OF_Q)))[:, None, None]
    word = gl.arange(0, ctx.W, gl.SliceLayout(0, gl.SliceLayout(2, ctx.OF_Q)))[None, :, None]
    row = gl.arange(0, ctx.R, gl.SliceLayout(0, gl.SliceLayout(1, ctx.OF_Q)))[None, None, :]
    h = ctx.h_kv * (ctx.H_q // ctx.H_kv) + row // ctx.N_q
    at = ctx.b * (ctx.stride_qb // 4) + h * (ctx.stride_qh // 4)
    at = at + (row % ctx.N_q).to(gl.int64) * (ctx.stride_qn // 4) + word
    at = ctx.Q.to(gl.pointer_type(gl.int64)) + at
    return gl.load(at, mask=(row < ctx.rows) & (word >= 0) & (way >= 0), other=0)


@gluon.jit
def _of_q(words, J: gl.constexpr, dtype: gl.constexpr):
    return (words >> 16 * J).to(gl.int16).to(dtype, bitcast=True)


@gluon.jit
def _scales(ctx, X, first, stride):
    """Scales [WAYS, BLOCK_N] of the tile that begins at key `first`; 0 from `stop` on."""
    at = X + (first + ctx.n).to(gl.int64) * stride
    return gl.load(at, mask=ctx.n < ctx.stop - first, other=0.0)


@gluon.jit
def _fetch(ctx, first, stage):
    """Copies k's and v's words of that tile to a place of the rings. From `stop` on they are 0."""
    _copy(ctx, ctx.k_ring.index(stage), ctx.k_base, first, ctx.W, ctx.STRIDE_K)
    _copy(ctx, ctx.v_ring.index(stage), ctx.v_base, first, ctx.W_V, ctx.STRIDE_V)
    async_copy.commit_group()


@gluon.jit
def _copy(ctx, place, X, first, W: gl.constexpr, STRIDE: gl.constexpr):
    LANES: gl.constexpr = 128 // W  # rows that a warp copies at once
    L: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, LANES, W // 4], [ctx.WAYS, 1, 1], [2, 1, 0])
    way = gl.arange(0, ctx.WAYS, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    key = gl.arange(0, ctx.BLOCK_N, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    word = gl.arange(0, W, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    # What differs between a thread's keys is a constant, so it is in the instruction.
    of_thread = ctx.BLOCK_N * way + (key & LANES - 1)
    at = X.to(gl.pointer_type(gl.int32)) + first.to(gl.int64) * (STRIDE // 4)
    at = at + (of_thread.to(gl.int64) * (STRIDE // 4) + word)
    at = at + (key & ~(LANES - 1)).to(gl.int64) * (STRIDE // 4)
    inside = ctx.BLOCK_N * way + key < ctx.stop - first
    async_copy.async_copy_global_to_shared(place, at, mask=inside & (word >= 0))
