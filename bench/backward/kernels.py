"""The row-scaled FP8 backward of attention for Hopper, in Gluon: two kernels, no atomics.

Of one head, i a query, j a key, b(j) the key's group of 64, h its head, everything in units that
make the scores powers of 2 (sm = softmax scale * log2 e):

    S_ij  = q8_i . k8_j                            INT8, exact in int32
    x_ij  = S_ij qs_i ks_b(j)                      qs: q's scale a row, with sm in it; ks: k's
    P_ij  = 2^(x_ij - m_i) 448                     m_i = max_j x_ij; so P_ij in (0, 448]
    D_ij  = g8_i . v8_j                            INT8: g = dO a_i^-1 a row, v less its mean a row
    dS_ij = P_ij (D_ij vs_j - delta_i)             vs_j = v's scale / beta_h,
                                                   delta_i = dO_i . (o_i - v_mean) / (a_i beta_h)
    dQ_i  = r_i     c^k_d  sum_j e4m3(dS_ij) kT_dj r_i = softmax scale w_i a_i beta_h / 448
    dK_j  =         c^q_d  sum_i e4m3(dS_ij) qT_di qT = e4m3(r_i q_i / c^q)
    dV_j  =         c^o_d  sum_i e4m3(P_ij)  oT_di oT = e4m3(w_i dO_i / (448 c^o)), w_i = 1 / l_i

beta_h >= max_ij |dP_ij - delta_ij| / a_i is a bound known before the loop (Cauchy-Schwarz), so no
maximum is taken and nothing is rescaled in it; e4m3 of dS keeps its relative precision. One beta a
head, not a row: in the dK/dV kernel a row's would cost a multiplication a score.

The tensor cores accumulate FP8 products in 13 bits of mantissa: every FLUSH blocks the sums are
added to FP32 totals in shared memory, where a thread finds its own again without a bank conflict
(dK's, for which there is no room, every FLUSH_DK blocks to totals in global memory).

What of the next block is started before this one is done (S_AHEAD; in the dK/dV kernel S and D) is
bounded by ptxas 12.8, which serializes all wgmma of a kernel, with a warning that Triton does not
show (C7512, C7514; ptxas -v on the PTX does),
* where a product whose left operand is in registers is in flight over the end of a loop,
* where an accumulator is read while a later product, started before the loop's end, is in flight,
* where what is in flight leaves too few registers (3 warpgroups: 160).
So all is waited for at the end of a loop, and what crosses none is UNROLLed.

8-bit wgmma takes both operands K-major, so k, q and dO come transposed as well (kT, qT, oT), their
tokens permuted in groups of 16 such that P and dS go from accumulator to operand within a thread:
place 4t + 2h + e of a group holds token 8h + 2t + e.

Padding: keys have k8 = v8 = kT = 0 (k is smoothed, so m_i >= 0 up to rounding and P is finite);
queries have qT = oT = q8 = g8 = delta = 0 and m = PAD_M, so P = 0.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sage_inductor.ops.attention.hopper.kernel import _exp2, _to_fp8
from sage_inductor.ops.compat import tma_load

REGISTERS = {2: (168, 240), 3: (128, 160)}  # by warpgroups: at launch, then of a consumer


@gluon.jit
def _to_operand(x, WIDTH: gl.constexpr, A: gl.constexpr):
    """A wgmma accumulator of any shape with 64 WIDTH elements -> FP8, left operand of the next."""
    x = x.reshape([64, WIDTH // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([64, WIDTH])
    return _to_fp8(gl.convert_layout(x, A, assert_trivial=True))


@gluon.jit
def _by_thread(x):
    """[64, D] of an accumulator with a thread's numbers in a column each: pairs of them side by
    side, so that a warp writes 256 bytes in a row."""
    D: gl.constexpr = x.shape[1]
    x = x.reshape([4, 2, 8, D // 8, 4, 2]).permute([1, 3, 0, 2, 4, 5])
    return x.reshape([D // 4, 256])


@gluon.jit
def _halves(x):
    """The upper and the lower rows."""
    R: gl.constexpr = x.shape[0]
    return gl.split(x.reshape([2, R // 2, x.shape[1]]).permute([1, 2, 0]))


@gluon.jit
def _flush(total, acc, is_first):
    """total (in shared memory) + acc -> total. In quarters: registers are short."""
    upper, lower = _halves(_by_thread(acc))
    quarters = _halves(upper) + _halves(lower)
    R: gl.constexpr = acc.shape[1] // 16
    for n in gl.static_range(4):
        x = quarters[n]
        part = total.slice(n * R, R, dim=0)
        before = part.load(x.type.layout)
        part.store(gl.where(is_first, x, before + x))


@gluon.jit
def _from_thread(x, D: gl.constexpr, O: gl.constexpr):
    x = x.reshape([2, D // 8, 4, 8, 4, 2]).permute([2, 0, 3, 1, 4, 5])
    return gl.convert_layout(x.reshape([64, D]), O, assert_trivial=True)


@gluon.jit
def _total(total, D: gl.constexpr, O: gl.constexpr, like):
    return _from_thread(total.load(_by_thread(like).type.layout), D, O)


@gluon.jit
def _store(out, x, row0, head, N, channel_scale, row_scale, D: gl.constexpr, O: gl.constexpr):
    """x [64, D] * row_scale * channel_scale -> rows row0 .. of out [heads, N, D]."""
    d = gl.arange(0, D, layout=gl.SliceLayout(0, O))
    rows = row0 + gl.arange(0, 64, layout=gl.SliceLayout(1, O))
    scale = gl.load(channel_scale + head * D + d)
    x = x * gl.expand_dims(row_scale, 1) * gl.expand_dims(scale, 0)
    ptrs = out + (head.to(gl.int64) * N + rows)[:, None] * D + d[None, :]
    gl.store(ptrs, x.to(out.dtype.element_ty), mask=(rows < N)[:, None] & (d < D)[None, :])


@gluon.jit
def _score(a, b, stage, zero):
    """Starts a b^T of INT8; stage of b."""
    b = b.index(stage).permute((1, 0))
    return warpgroup_mma(a, b, zero, use_acc=False, is_async=True)


# -- dQ ----


@gluon.jit
def _dq_consumer(
    wg: gl.constexpr, shared, Q_scale, M, Delta, Row_scale, K_scale, Kt_scale, DQ,
    N_q, Q_pad, K_pad,
    D: gl.constexpr, BLOCK_N: gl.constexpr, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr,
    FLUSH: gl.constexpr, UNROLL: gl.constexpr, S_AHEAD: gl.constexpr,
):  # fmt: skip
    """Warpgroup wg: 64 queries. D runs beside the exponentials; S of the next block (S_AHEAD) is
    started with the product with kT of this one."""
    q_smem, g_smem, k_smem, v_smem, kt_smem, vectors, totals, loaded, full, empty = shared
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 32])
    A: gl.constexpr = gl.DotOperandLayout(0, O, 4)
    BLOCKS: gl.constexpr = BLOCK_N // 64
    zero = gl.full([64, BLOCK_N], 0, gl.int32, S)
    L: gl.constexpr = zero.reshape([64, BLOCKS, 64]).type.layout
    GROUP: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, L))  # [64]
    BLOCK: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, L))  # [BLOCKS]
    COLUMN: gl.constexpr = gl.SliceLayout(0, L)  # [BLOCKS, 64]

    num_m = (N_q + 64 * WARPGROUPS - 1) // (64 * WARPGROUPS)
    head = gl.program_id(0) // num_m
    row0 = (gl.program_id(0) % num_m) * (64 * WARPGROUPS) + wg * 64
    rows = row0 + gl.arange(0, 64, layout=GROUP)
    here = head.to(gl.int64) * Q_pad + rows
    q_scale = gl.load(Q_scale + here, mask=rows < Q_pad, other=0.0)
    m = gl.load(M + here, mask=rows < Q_pad, other=0.0)
    delta = gl.load(Delta + here, mask=rows < Q_pad, other=0.0)
    m = gl.expand_dims(gl.expand_dims(m, 1), 2)
    delta = gl.expand_dims(gl.expand_dims(delta, 1), 2)
    K_scale += head * (K_pad // 64)

    zero_o = gl.full([64, D], 0.0, gl.float32, O)
    q_tile, g_tile, total = q_smem.index(wg), g_smem.index(wg), totals.index(wg)
    blocks = K_pad // BLOCK_N
    mbarrier.wait(loaded, 0)
    block = gl.arange(0, BLOCKS, layout=BLOCK)
    k_scale = gl.load(K_scale + block)
    if S_AHEAD:
        mbarrier.wait(full.index(0), 0)
        s = warpgroup_mma_wait(0, [_score(q_tile, k_smem, 0, zero)])
    for first in range(0, blocks, FLUSH):
        dq = zero_o
        for j0 in range(first, gl.minimum(first + FLUSH, blocks), UNROLL):
            for u in gl.static_range(UNROLL):
                j = j0 + u
                stage, after = j % STAGES, (j + 1) % STAGES
                if not S_AHEAD:
                    mbarrier.wait(full.index(stage), (j // STAGES) & 1)
                    s = _score(q_tile, k_smem, stage, zero)
                d = _score(g_tile, v_smem, stage, zero)
                if u > 0:  # the last block's dQ is in flight as well, after S or before
                    s = warpgroup_mma_wait(2 if S_AHEAD else 1, [s])
                elif not S_AHEAD:
                    s = warpgroup_mma_wait(1, [s])
                c = gl.expand_dims(q_scale, 1) * gl.expand_dims(k_scale, 0)  # [64, BLOCKS]
                k_scale = gl.load(K_scale + gl.minimum(j + 1, blocks - 1) * BLOCKS + block)
                x = s.reshape([64, BLOCKS, 64]).to(gl.float32)
                p = _exp2(x * gl.expand_dims(c, 2) - m)
                if u > 0:
                    d, dq = warpgroup_mma_wait(0, [d, dq])
                    mbarrier.arrive(empty.index((j + STAGES - 1) % STAGES), count=1)
                else:
                    d = warpgroup_mma_wait(0, [d])
                v_scale = vectors.index(stage).load(gl.SliceLayout(0, S))
                v_scale = gl.convert_layout(
                    v_scale.reshape([BLOCKS, 64]), COLUMN, assert_trivial=True
                )
                d = d.reshape([64, BLOCKS, 64]).to(gl.float32)
                ds = p * (d * gl.expand_dims(v_scale, 0) - delta)
                ds = _to_operand(ds, BLOCK_N, A)
                if S_AHEAD:
                    mbarrier.wait(full.index(after), ((j + 1) // STAGES) & 1, pred=j + 1 < blocks)
                    s = _score(q_tile, k_smem, after, zero)  # of no block: not read
                dq = warpgroup_mma(ds, kt_smem.index(stage).permute((1, 0)), dq, is_async=True)
            if S_AHEAD:
                s, dq = warpgroup_mma_wait(0, [s, dq])
            else:
                dq = warpgroup_mma_wait(0, [dq])
            mbarrier.arrive(empty.index((j0 + UNROLL - 1) % STAGES), count=1)
        _flush(total, dq, first == 0)
    out_rows = row0 + gl.arange(0, 64, layout=gl.SliceLayout(1, O))
    row_scale = gl.load(
        Row_scale + head.to(gl.int64) * Q_pad + out_rows, mask=out_rows < Q_pad, other=0.0
    )
    _store(DQ, _total(total, D, O, zero_o), row0, head, N_q, Kt_scale, row_scale, D, O)


@gluon.jit
def _dq_producer(
    Q, G, K, V, Kt, V_scale, shared, N_q, Q_pad, K_pad,
    D: gl.constexpr, BLOCK_N: gl.constexpr, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    q_smem, g_smem, k_smem, v_smem, kt_smem, vectors, totals, loaded, full, empty = shared
    num_m = (N_q + 64 * WARPGROUPS - 1) // (64 * WARPGROUPS)
    head = gl.program_id(0) // num_m
    row0 = head * Q_pad + (gl.program_id(0) % num_m) * (64 * WARPGROUPS)
    mbarrier.expect(loaded, WARPGROUPS * 2 * 64 * D)
    for wg in gl.static_range(WARPGROUPS):
        tma_load(Q, [row0 + wg * 64, 0], loaded, q_smem.index(wg))
        tma_load(G, [row0 + wg * 64, 0], loaded, g_smem.index(wg))
    for j in range(0, K_pad // BLOCK_N):
        stage = j % STAGES
        mbarrier.wait(empty.index(stage), ((j // STAGES) & 1) ^ 1)
        bar = full.index(stage)
        mbarrier.expect(bar, 3 * BLOCK_N * D + BLOCK_N * 4)
        tma_load(V_scale, [head * K_pad + j * BLOCK_N], bar, vectors.index(stage))
        tma_load(K, [head * K_pad + j * BLOCK_N, 0], bar, k_smem.index(stage))
        tma_load(V, [head * K_pad + j * BLOCK_N, 0], bar, v_smem.index(stage))
        tma_load(Kt, [head * D, j * BLOCK_N], bar, kt_smem.index(stage))


@gluon.jit
def dq_kernel(
    Q, G,  # descriptors of [heads * Q_pad, D] INT8, blocks of 64 rows
    K, V,  # of [heads * K_pad, D] INT8, blocks of BLOCK_N rows
    Kt,  # of [heads * D, K_pad] FP8, blocks of D rows and BLOCK_N tokens
    V_scale,  # of [heads * K_pad] fp32, blocks of BLOCK_N
    Q_scale, M, Delta, Row_scale,  # [heads, Q_pad] fp32
    K_scale,  # [heads, K_pad / 64] fp32
    Kt_scale,  # [heads, D] fp32
    DQ,  # [heads, N_q, D] out
    N_q, Q_pad, K_pad,
    D: gl.constexpr, BLOCK_N: gl.constexpr, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr,
    FLUSH: gl.constexpr, UNROLL: gl.constexpr, S_AHEAD: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid: (heads * cdiv(N_q, 64 WARPGROUPS),). Softmax's log2 448 is taken off M."""
    QL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], gl.int8)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    q_smem = gl.allocate_shared_memory(gl.int8, [WARPGROUPS, 64, D], QL)
    g_smem = gl.allocate_shared_memory(gl.int8, [WARPGROUPS, 64, D], QL)
    k_smem = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_N, D], K.layout)
    v_smem = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_N, D], V.layout)
    kt_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, D, BLOCK_N], Kt.layout)
    vectors = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_N], V_scale.layout)
    totals = gl.allocate_shared_memory(gl.float32, [WARPGROUPS, D // 4, 256], PLAIN)
    loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(loaded, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=WARPGROUPS)
    shared = (q_smem, g_smem, k_smem, v_smem, kt_smem, vectors, totals, loaded, full, empty)
    # Written out, because what a local name holds is no constexpr any more.
    if WARPGROUPS == 2:
        gl.warp_specialize([
            (_dq_consumer, (0, shared, Q_scale, M, Delta, Row_scale, K_scale, Kt_scale,
                            DQ, N_q, Q_pad, K_pad, D, BLOCK_N, WARPGROUPS, STAGES, FLUSH, UNROLL,
                            S_AHEAD)),
            (_dq_consumer, (1, shared, Q_scale, M, Delta, Row_scale, K_scale, Kt_scale,
                            DQ, N_q, Q_pad, K_pad, D, BLOCK_N, WARPGROUPS, STAGES, FLUSH, UNROLL,
                            S_AHEAD)),
            (_dq_producer, (Q, G, K, V, Kt, V_scale, shared, N_q, Q_pad, K_pad, D, BLOCK_N,
                            WARPGROUPS, STAGES)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_dq_consumer, (0, shared, Q_scale, M, Delta, Row_scale, K_scale, Kt_scale,
                            DQ, N_q, Q_pad, K_pad, D, BLOCK_N, WARPGROUPS, STAGES, FLUSH, UNROLL,
                            S_AHEAD)),
            (_dq_consumer, (1, shared, Q_scale, M, Delta, Row_scale, K_scale, Kt_scale,
                            DQ, N_q, Q_pad, K_pad, D, BLOCK_N, WARPGROUPS, STAGES, FLUSH, UNROLL,
                            S_AHEAD)),
            (_dq_consumer, (2, shared, Q_scale, M, Delta, Row_scale, K_scale, Kt_scale,
                            DQ, N_q, Q_pad, K_pad, D, BLOCK_N, WARPGROUPS, STAGES, FLUSH, UNROLL,
                            S_AHEAD)),
            (_dq_producer, (Q, G, K, V, Kt, V_scale, shared, N_q, Q_pad, K_pad, D, BLOCK_N,
                            WARPGROUPS, STAGES)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip


# -- dK and dV ----


@gluon.jit
def _dkdv_consumer(
    wg: gl.constexpr, shared, K_scale, V_scale, Qt_scale, Ot_scale, Part, DK, DV,
    N_kv, Q_pad, K_pad,
    D: gl.constexpr, STAGES: gl.constexpr, FLUSH: gl.constexpr, UNROLL: gl.constexpr,
    FLUSH_DK: gl.constexpr,
):  # fmt: skip
    """Warpgroup wg: 64 keys. dV's product runs beside the arithmetic of dS, dK's beside S and D of
    the next block of 64 queries."""
    k_smem, v_smem, q_smem, g_smem, qt_smem, ot_smem, vectors, totals, loaded, full, empty = shared
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 32])
    A: gl.constexpr = gl.DotOperandLayout(0, O, 4)
    COLUMN: gl.constexpr = gl.SliceLayout(0, S)
    zero = gl.full([64, 64], 0, gl.int32, S)
    num_n = (N_kv + 127) // 128
    head = gl.program_id(0) // num_n
    row0 = (gl.program_id(0) % num_n) * 128 + wg * 64
    rows = row0 + gl.arange(0, 64, layout=gl.SliceLayout(1, S))
    v_scale = gl.expand_dims(gl.load(V_scale + head.to(gl.int64) * K_pad + rows), 1)
    k_scale = gl.load(K_scale + (head * K_pad + row0) // 64)
    zero_o = gl.full([64, D], 0.0, gl.float32, O)
    k_tile, v_tile = k_smem.index(wg), v_smem.index(wg)
    blocks = Q_pad // 64
    mbarrier.wait(loaded, 0)
    mbarrier.wait(full.index(0), 0)
    s = _score(k_tile, q_smem, 0, zero)
    d = _score(v_tile, g_smem, 0, zero)
    s, d = warpgroup_mma_wait(0, [s, d])
    L: gl.constexpr = _by_thread(zero_o).type.layout
    R: gl.constexpr = D // 4
    places = gl.arange(0, R, layout=gl.SliceLayout(1, L))[:, None] * 256
    places += gl.arange(0, 256, layout=gl.SliceLayout(0, L))[None, :]
    part = Part + (gl.program_id(0) * 2 + wg).to(gl.int64) * (64 * D) + places
    dk = zero_o
    for far in range(0, blocks, FLUSH_DK):
        dk = zero_o
        end = gl.minimum(far + FLUSH_DK, blocks)
        for first in range(far, end, FLUSH):
            dv = zero_o
            for j0 in range(first, gl.minimum(first + FLUSH, end), UNROLL):
                for u in gl.static_range(UNROLL):
                    j = j0 + u
                    stage, after = j % STAGES, (j + 1) % STAGES
                    if u > 0:  # in flight: the last block's dV, S, the last block's dK, D
                        s, dv = warpgroup_mma_wait(2, [s, dv])
                    q_scale = vectors.index(stage * 3).load(COLUMN) * k_scale
                    m = vectors.index(stage * 3 + 1).load(COLUMN)
                    p = _exp2(s.to(gl.float32) * gl.expand_dims(q_scale, 0) - gl.expand_dims(m, 0))
                    p8 = _to_operand(p, 64, A)
                    dv = warpgroup_mma(p8, ot_smem.index(stage).permute((1, 0)), dv, is_async=True)
                    if u > 0:
                        d, dk = warpgroup_mma_wait(1, [d, dk])
                        mbarrier.arrive(empty.index((j + STAGES - 1) % STAGES), count=1)
                    delta = vectors.index(stage * 3 + 2).load(COLUMN)
                    ds = p * (d.to(gl.float32) * v_scale - gl.expand_dims(delta, 0))
                    ds = _to_operand(ds, 64, A)
                    mbarrier.wait(full.index(after), ((j + 1) // STAGES) & 1, pred=j + 1 < blocks)
                    s = _score(k_tile, q_smem, after, zero)  # of no block: not read
                    dk = warpgroup_mma(ds, qt_smem.index(stage).permute((1, 0)), dk, is_async=True)
                    d = _score(v_tile, g_smem, after, zero)
                dv, s, dk, d = warpgroup_mma_wait(0, [dv, s, dk, d])
                mbarrier.arrive(empty.index((j0 + UNROLL - 1) % STAGES), count=1)
            _flush(totals.index(wg), dv, first == 0)
        if far > 0:
            dk += _from_thread(gl.load(part), D, O)
        if end < blocks:
            gl.store(part, _by_thread(dk))
    warpgroup_mma_wait(0, [s, d])
    dv = _total(totals.index(wg), D, O, zero_o)
    one = gl.full([64], 1.0, gl.float32, gl.SliceLayout(1, O))
    _store(DV, dv, row0, head, N_kv, Ot_scale, one, D, O)
    _store(DK, dk, row0, head, N_kv, Qt_scale, one, D, O)


@gluon.jit
def _dkdv_producer(
    K, V, Q, G, Qt, Ot, Vectors, shared, N_kv, Q_pad, K_pad,
    D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    k_smem, v_smem, q_smem, g_smem, qt_smem, ot_smem, vectors, totals, loaded, full, empty = shared
    num_n = (N_kv + 127) // 128
    head = gl.program_id(0) // num_n
    row0 = head * K_pad + (gl.program_id(0) % num_n) * 128
    all_rows = gl.num_programs(0) // num_n * Q_pad
    mbarrier.expect(loaded, 4 * 64 * D)
    for wg in gl.static_range(2):
        tma_load(K, [row0 + wg * 64, 0], loaded, k_smem.index(wg))
        tma_load(V, [row0 + wg * 64, 0], loaded, v_smem.index(wg))
    for j in range(0, Q_pad // 64):
        stage = j % STAGES
        mbarrier.wait(empty.index(stage), ((j // STAGES) & 1) ^ 1)
        bar = full.index(stage)
        mbarrier.expect(bar, 4 * 64 * D + 3 * 64 * 4)
        row = head * Q_pad + j * 64
        tma_load(Q, [row, 0], bar, q_smem.index(stage))
        for n in gl.static_range(3):
            tma_load(Vectors, [n * all_rows + row], bar, vectors.index(stage * 3 + n))
        tma_load(G, [row, 0], bar, g_smem.index(stage))
        tma_load(Ot, [head * D, j * 64], bar, ot_smem.index(stage))
        tma_load(Qt, [head * D, j * 64], bar, qt_smem.index(stage))


@gluon.jit
def dkdv_kernel(
    K, V,  # descriptors of [heads * K_pad, D] INT8, blocks of 64 rows
    Q, G,  # of [heads * Q_pad, D] INT8, blocks of 64 rows
    Qt, Ot,  # of [heads * D, Q_pad] FP8, blocks of D rows and 64 tokens
    Vectors,  # of [3 * heads * Q_pad] fp32, blocks of 64: Q_scale, M, Delta
    K_scale, V_scale,  # [heads, K_pad / 64], [heads, K_pad] fp32
    Qt_scale, Ot_scale,  # [heads, D] fp32
    Part,  # [programs, 2, 64 * D] fp32: totals of dK
    DK, DV,  # [heads, N_kv, D] out
    N_kv, Q_pad, K_pad,
    D: gl.constexpr, STAGES: gl.constexpr, FLUSH: gl.constexpr, UNROLL: gl.constexpr,
    FLUSH_DK: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid: (heads * cdiv(N_kv, 128),). Every FLUSH blocks dV is added to totals in shared memory,
    every FLUSH_DK dK to those in Part, where each thread adds to its own (there is no room in
    shared memory, and dS, unlike P, has both signs)."""
    L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], gl.int8)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    k_smem = gl.allocate_shared_memory(gl.int8, [2, 64, D], L)
    v_smem = gl.allocate_shared_memory(gl.int8, [2, 64, D], L)
    q_smem = gl.allocate_shared_memory(gl.int8, [STAGES, 64, D], L)
    g_smem = gl.allocate_shared_memory(gl.int8, [STAGES, 64, D], L)
    qt_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, D, 64], Qt.layout)
    ot_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, D, 64], Ot.layout)
    vectors = gl.allocate_shared_memory(gl.float32, [STAGES * 3, 64], Vectors.layout)
    totals = gl.allocate_shared_memory(gl.float32, [2, D // 4, 256], PLAIN)
    loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(loaded, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    shared = (
        k_smem,
        v_smem,
        q_smem,
        g_smem,
        qt_smem,
        ot_smem,
        vectors,
        totals,
        loaded,
        full,
        empty,
    )
    gl.warp_specialize([
        (_dkdv_consumer, (0, shared, K_scale, V_scale, Qt_scale, Ot_scale, Part, DK, DV, N_kv,
                          Q_pad, K_pad, D, STAGES, FLUSH, UNROLL, FLUSH_DK)),
        (_dkdv_consumer, (1, shared, K_scale, V_scale, Qt_scale, Ot_scale, Part, DK, DV, N_kv,
                          Q_pad, K_pad, D, STAGES, FLUSH, UNROLL, FLUSH_DK)),
        (_dkdv_producer, (K, V, Q, G, Qt, Ot, Vectors, shared, N_kv, Q_pad, K_pad, D, STAGES)),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip
