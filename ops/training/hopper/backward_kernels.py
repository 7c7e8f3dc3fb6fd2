"""The FP8 backward of attention for Hopper, in Gluon: two kernels, no atomics.

Of one query head and its head of k and v, i a query, j a key, b(j) the key's block of 64, in units
that make scores exponents of 2. q8 and k8 are codes of rotated rows, k's halved; q^ and k^ are the
same codes turned back (prepare.py):

    S_ij  = q8_i . k8_j                            INT8, exact in int32
    x_ij  = S_ij qs_i ks_b(j)                      with the scales of softmax and rotation and
                                                   log2 e in qs
    P_ij  = 2^(x_ij - m_i) 448                     m_i = max_j x_ij; so P_ij in (0, 448]
    D_ij  = g8_i . v8_j                            INT8: g = dO / a_i, v less its mean
    dS_ij = P_ij (D_ij vs_j - delta_i)             vs_j = v's scale / beta,
                                                   delta_i = dO_i . (o_i - v_mean) / (a_i beta)
    dQ_i  = r_i c^k sum_j e4m3(dS_ij) kT_j         kT_j = e4m3(2 k^_j ks_b(j) / c^k)
    dK_j  = c^q     sum_i e4m3(dS_ij) qT_i         qT_i = e4m3(t_i q^_i / c^q)
    dV_j  = c^o     sum_i e4m3(P_ij)  oT_i         oT_i = e4m3(w_i a_i g8_i / (448 c^o))

    w_i = 1 / sum_j 2^(x_ij - m_i)                 r_i = softmax scale * w_i a_i beta / 448
                                                   t_i = r_i times q's scale

One number of each there is for

    qs, m, delta, a, w, r, t    a row of a query head
    ks                          64 rows of a head of k
    vs                          a row of a head of v
    beta, c^k, c^q, c^o         a head of k and v, and so all query heads that share it: a group

A scale a head is enough for kT, qT and oT: e4m3 has 15 octaves of normal numbers. It may be 2^4 too
large, but not 2^8. beta >= max |dP_ij - delta_ij| / a_i of all rows of the group is a bound known
before the loop (Cauchy-Schwarz), so no maximum is taken in it and nothing rescaled, and e4m3 of dS
keeps its relative precision. A beta a row would cost the dK/dV kernel a multiplication a score.

To the dK/dV kernel the query heads of a group are one head of so many more rows.

CAUSAL, of as many queries as keys: nothing of an earlier row may tell of later ones. So k and v are
not less their means, and dQ has bounds of its own, by what a row sees:

    dS_ij = ks_j P_ij (D_ij vs_j - delta_i)        P_ij = 2^(x_ij - m_i) 448 / beta_i, vs_j and
                                                   delta_i here without beta
    dQ_i  = r_i sum_j e4m3(dS_ij) kT_j             kT_j = e4m3(k^_j 448 / 127); r_i with c^k

    beta_i >= max ks_j |dP_ij - delta_ij| / a_i over j <= i

A scale of 64 keys tells queries that see all of them nothing of later rows, and goes into vs and
delta. Near the diagonal k8 and ks are others (k_own), by a scale a row, and cost a multiplication a
score: in dQ's kernel and the forward from key 128 floor(first row of the tile / 128) on, in dK's
and dV's where i and j are of the same 128 rows. (So the forward uses k_own in slightly more blocks
than the dK/dV kernel. In those, one of a key's N / 64 blocks of queries, P comes from codes other
than those of lse and m.)
What a head has one of, beta, c^q and c^o, is then of rows whose dO is not 0, and of the v that they
see: dK_j and dV_j tell of no row without a gradient.

The tensor cores accumulate FP8 products in 13 bits of mantissa: every FLUSH blocks the sums are
added to FP32 totals in shared memory, where a thread finds its own again without a bank conflict
(dK's, for which there is no room, every FLUSH_DK blocks to totals in global memory).

What of the next block is started before this one is done (S; in the dK/dV kernel S and D) is
bounded by ptxas 12.8, which serializes all wgmma of a kernel, with a warning that Triton does not
show (C7512, C7514; ptxas -v on the PTX does),
* where a product whose left operand is in registers is in flight over the end of a loop,
* where an accumulator is read while a later product, started before the loop's end, is in flight,
* where what is in flight leaves too few registers (3 warpgroups: 160).
So all is waited for at the end of a loop, and what crosses none is UNROLLed.

8-bit wgmma takes both operands K-major, so k, q and dO come transposed as well (kT, qT, oT), their
tokens permuted in groups of 16 such that P and dS go from accumulator to operand within a thread:
place 4t + 2h + e of a group holds token 8h + 2t + e.

Padding, of rows to Q_pad and K_pad (multiples of 128) and of channels to BLOCK_D: codes are 0. Of
queries qs and delta are 0 and m is NO_QUERY, so that P is 0. Of keys P is 2^-m_i 448, which is
finite because k is less the mean of a sample of keys: m_i, their largest score's at least, is then
not below 0 but for rounding. CAUSAL, no query sees them.

TMA counts in 32 bits: the rows of q in all heads must be fewer than 2^29, of k too, and those of
transposed codes (BLOCK_D a head) fewer than 2^31.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sage_inductor.ops.attention.hopper.kernel import _exp2, _first_own, _to_fp8
from sage_inductor.ops.compat import gdc_launch_dependents, gdc_wait, tma_load

# -- both ----


@gluon.jit
def _to_operand(x, A: gl.constexpr):
    """A wgmma accumulator [64, 64] -> FP8, left operand of the next."""
    x = x.reshape([64, 4, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([64, 64])
    return _to_fp8(gl.convert_layout(x, A, assert_trivial=True))


@gluon.jit
def _by_thread(x):
    """[64, BLOCK_D] of an accumulator with a thread's numbers in a column each: pairs of them side
    by side, so that a warp writes 256 bytes in a row."""
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
def _add_part(acc, part, is_more, is_less, O: gl.constexpr):
    """acc, with what is in part if is_more; which it is stored to if is_less than all."""
    if is_more:
        acc += _from_thread(gl.load(part), O)
    if is_less:
        gl.store(part, _by_thread(acc))
    return acc


@gluon.jit
def _from_thread(x, O: gl.constexpr):
    D: gl.constexpr = x.shape[0] * 4
    x = x.reshape([2, D // 8, 4, 8, 4, 2]).permute([2, 0, 3, 1, 4, 5])
    return gl.convert_layout(x.reshape([64, D]), O, assert_trivial=True)


@gluon.jit
def _store(x, Out, row0, head, H, N, strides, D: gl.constexpr, O: gl.constexpr):
    """x [64, BLOCK_D] -> rows row0 .. of a head of Out [B, H, N, D], strides doubled."""
    stride_b, stride_h, stride_n = strides
    b = head // H
    h = head - b * H
    d = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, O))
    rows = row0 + gl.arange(0, 64, layout=gl.SliceLayout(1, O))
    out = Out + ((b.to(gl.int64) * stride_b + h.to(gl.int64) * stride_h) >> 1)
    out = out + ((rows.to(gl.int64) * stride_n) >> 1)[:, None] + d[None, :]
    gl.store(out, x.to(Out.dtype.element_ty), mask=(rows < N)[:, None] & (d < D)[None, :])


@gluon.jit
def _score(a, b, stage, zero):
    """Starts a b^T of INT8; stage of b."""
    b = b.index(stage).permute((1, 0))
    return warpgroup_mma(a, b, zero, use_acc=False, is_async=True)


@gluon.jit
def _tile(n, programs, N, last, ROWS: gl.constexpr, DOWN: gl.constexpr):
    """Program n -> (head, first row of its tile). Tiles of a head follow each other, DOWN: the last
    rows first, and so do heads that share k and v, which stay in L2. But those of the `last` heads
    are in turn, a tile of each."""
    tiles = (N + ROWS - 1) // ROWS
    head = n // tiles
    alone = programs // tiles - last
    r = n - alone * tiles
    m = gl.where(r < 0, n - head * tiles, r // last)
    head = gl.where(r < 0, head, alone + r - m * last)
    if DOWN:
        m = tiles - 1 - m
    row0 = m * ROWS
    return head, row0


@gluon.jit
def _above(S: gl.constexpr):
    """[64, 64]: the column is the row's or a later one."""
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, S))
    return rows[:, None] <= gl.arange(0, 64, layout=gl.SliceLayout(0, S))[None, :]


@gluon.jit
def _below(ahead, S: gl.constexpr):
    """[64, 64], rows so many ahead of the columns: the column is the row's or an earlier one."""
    rows = ahead + gl.arange(0, 64, layout=gl.SliceLayout(1, S))
    return rows[:, None] >= gl.arange(0, 64, layout=gl.SliceLayout(0, S))[None, :]


# -- dQ ----


@gluon.jit
def _blocks_of_keys(row_end, K_pad, CAUSAL: gl.constexpr):
    """That the rows before row_end see."""
    end = K_pad
    if CAUSAL:
        end = gl.minimum(end, row_end)
    return end // 64


@gluon.jit
def _keys(
    shared, q_tile, g_tile, s, dq, j, blocks, row0, q_scale, of_block, of_blocks, m, delta,
    CAUSAL: gl.constexpr, OWN: gl.constexpr, STAGES: gl.constexpr, S: gl.constexpr,
    A: gl.constexpr,
):  # fmt: skip
    """s and of_block, k's scale, of block j + 1; dq after block j. OWN: k has a scale a row, and
    later keys are hidden."""
    q_smem, g_smem, k_smem, v_smem, kt_smem, vectors, totals, loaded, full, empty = shared
    COLUMN: gl.constexpr = gl.SliceLayout(0, S)
    zero = gl.full([64, 64], 0, gl.int32, S)
    stage, after = j % STAGES, (j + 1) % STAGES
    d = _score(g_tile, v_smem, stage, zero)
    q_scale = gl.expand_dims(q_scale, 1)
    if OWN:
        of_key = gl.expand_dims(vectors.index(STAGES + stage).load(COLUMN), 0)
        p = _exp2(s.to(gl.float32) * of_key * q_scale - m)
        p = gl.where(_below(row0 - j * 64, S), p * of_key, 0.0)
    else:
        p = _exp2(s.to(gl.float32) * (q_scale * of_block) - m)
        if CAUSAL:
            delta = delta * of_block
        of_block = gl.load(of_blocks + gl.minimum(j + 1, blocks - 1))
    d = warpgroup_mma_wait(0, [d])
    v_scale = gl.expand_dims(vectors.index(stage).load(COLUMN), 0)
    ds = _to_operand(p * (d.to(gl.float32) * v_scale - delta), A)
    mbarrier.wait(full.index(after), ((j + 1) // STAGES) & 1, pred=j + 1 < blocks)
    s = _score(q_tile, k_smem, after, zero)  # of no block: not read
    dq = warpgroup_mma(ds, kt_smem.index(stage).permute((1, 0)), dq, is_async=True)
    s, dq = warpgroup_mma_wait(0, [s, dq])
    mbarrier.arrive(empty.index(stage), count=1)
    return s, dq, of_block


@gluon.jit
def _dq_consumer(
    wg: gl.constexpr, shared, tensors, strides, shape,
    CAUSAL: gl.constexpr, D: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    FLUSH: gl.constexpr,
):  # fmt: skip
    """Warpgroup wg: 64 queries. D runs beside the exponentials; S of the next block is started
    before the product with kT of this one."""
    q_smem, g_smem, k_smem, v_smem, kt_smem, vectors, totals, loaded, full, empty = shared
    Q_scale, M, Delta, Row_scale, K_scale, DQ = tensors
    H_q, group, N_q, Q_pad, K_pad = shape
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 32])
    A: gl.constexpr = gl.DotOperandLayout(0, O, 4)
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    OROW: gl.constexpr = gl.SliceLayout(1, O)
    zero = gl.full([64, 64], 0, gl.int32, S)
    zero_o = gl.full([64, BLOCK_D], 0.0, gl.float32, O)

    head, row0 = _tile(gl.program_id(0), gl.num_programs(0), N_q, 1, 192, CAUSAL)
    fetched = _blocks_of_keys(row0 + 192, K_pad, CAUSAL)
    own = _first_own(row0, 64)
    row0 += wg * 64
    blocks = _blocks_of_keys(row0 + 64, K_pad, CAUSAL)
    rows = row0 + gl.arange(0, 64, layout=ROW)
    here = head.to(gl.int64) * Q_pad + rows
    q_scale = gl.load(Q_scale + here, mask=rows < Q_pad, other=0.0)
    m = gl.expand_dims(gl.load(M + here, mask=rows < Q_pad, other=0.0), 1)
    delta = gl.expand_dims(gl.load(Delta + here, mask=rows < Q_pad, other=0.0), 1)
    of_blocks = K_scale + (head // group).to(gl.int64) * (K_pad // 64)

    q_tile, g_tile, total = q_smem.index(wg), g_smem.index(wg), totals.index(wg)
    mbarrier.wait(loaded, 0)
    of_block = gl.load(of_blocks)
    mbarrier.wait(full.index(0), 0)
    s = warpgroup_mma_wait(0, [_score(q_tile, k_smem, 0, zero)])
    whole = own if CAUSAL else blocks
    for first in range(0, whole, FLUSH):
        dq = zero_o
        for j in range(first, gl.minimum(first + FLUSH, whole)):
            s, dq, of_block = _keys(
                shared, q_tile, g_tile, s, dq, j, blocks, row0, q_scale, of_block, of_blocks, m,
                delta, CAUSAL, False, STAGES, S, A,
            )  # fmt: skip
        _flush(total, dq, first == 0)
    if CAUSAL:
        dq = zero_o
        for j in range(own, blocks):
            s, dq, of_block = _keys(
                shared, q_tile, g_tile, s, dq, j, blocks, row0, q_scale, of_block, of_blocks, m,
                delta, True, True, STAGES, S, A,
            )  # fmt: skip
        _flush(total, dq, own == 0)
    for j in range(blocks, fetched):  # what these rows do not see
        mbarrier.wait(full.index(j % STAGES), (j // STAGES) & 1)
        mbarrier.arrive(empty.index(j % STAGES), count=1)
    rows = row0 + gl.arange(0, 64, layout=OROW)
    here = head.to(gl.int64) * Q_pad + rows
    scale = gl.expand_dims(gl.load(Row_scale + here, mask=rows < Q_pad, other=0.0), 1)
    dq = _from_thread(total.load(_by_thread(zero_o).type.layout), O)
    _store(dq * scale, DQ, row0, head, H_q, N_q, strides, D, O)


@gluon.jit
def _fetch_keys(
    j, K, V, Kt, K_own_scale, V_scale, shared, head_kv, K_pad,
    CAUSAL: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Block j of keys into the ring, when its place is free. CAUSAL: scales of each key, too."""
    q_smem, g_smem, k_smem, v_smem, kt_smem, vectors, totals, loaded, full, empty = shared
    stage = j % STAGES
    mbarrier.wait(empty.index(stage), ((j // STAGES) & 1) ^ 1)
    bar = full.index(stage)
    mbarrier.expect(bar, 3 * 64 * BLOCK_D + 64 * 4 * (2 if CAUSAL else 1))
    row = head_kv * K_pad + j * 64
    if CAUSAL:
        tma_load(K_own_scale, [row], bar, vectors.index(STAGES + stage))
    tma_load(V_scale, [row], bar, vectors.index(stage))
    tma_load(K, [row, 0], bar, k_smem.index(stage))
    tma_load(V, [row, 0], bar, v_smem.index(stage))
    tma_load(Kt, [head_kv * BLOCK_D, j * 64], bar, kt_smem.index(stage))


@gluon.jit
def _dq_producer(
    Q, G, K, K_own, V, Kt, Kt_own, K_own_scale, V_scale, V_scale_own, shared, shape,
    CAUSAL: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    q_smem, g_smem, k_smem, v_smem, kt_smem, vectors, totals, loaded, full, empty = shared
    H_q, group, N_q, Q_pad, K_pad = shape
    head, row0 = _tile(gl.program_id(0), gl.num_programs(0), N_q, 1, 192, CAUSAL)
    blocks = _blocks_of_keys(row0 + 192, K_pad, CAUSAL)
    whole = _first_own(row0, 64) if CAUSAL else blocks
    head_kv = head // group
    row0 += head * Q_pad
    mbarrier.expect(loaded, 3 * 2 * 64 * BLOCK_D)
    for wg in gl.static_range(3):
        tma_load(Q, [row0 + wg * 64, 0], loaded, q_smem.index(wg))
        tma_load(G, [row0 + wg * 64, 0], loaded, g_smem.index(wg))
    for j in range(0, whole):
        _fetch_keys(
            j, K, V, Kt, K_own_scale, V_scale, shared, head_kv, K_pad, CAUSAL, BLOCK_D, STAGES
        )  # fmt: skip
    if CAUSAL:
        for j in range(whole, blocks):
            _fetch_keys(
                j, K_own, V, Kt_own, K_own_scale, V_scale_own, shared, head_kv, K_pad,
                CAUSAL, BLOCK_D, STAGES,
            )  # fmt: skip


@gluon.jit
def dq_kernel(
    Q, G,  # descriptors of [B * H_q * Q_pad, BLOCK_D] INT8, blocks of 64 rows
    K, K_own, V,  # of [B * H_kv * K_pad, BLOCK_D] INT8, blocks of 64 rows
    Kt, Kt_own,  # of [B * H_kv * BLOCK_D, K_pad] FP8, blocks of BLOCK_D rows and 64 tokens
    K_own_scale, V_scale, V_scale_own,  # of [B * H_kv * K_pad] fp32, blocks of 64
    # CAUSAL: V_scale is vs ks, V_scale_own vs; without it those named own are any, and not read
    Q_scale, M, Delta, Row_scale,  # [B, H_q, Q_pad] fp32: qs; m - log2 448; delta; r c^k
    # CAUSAL: the second m - log2 448 + log2 beta_i, the last r
    K_scale,  # [B, H_kv, K_pad / 64] fp32
    DQ,  # [B, H_q, N_q, D] out, fp16 or bf16, its last stride 1
    stride_b, stride_h, stride_n,  # of DQ, doubled
    H_q, H_kv, N2_q, Q_pad, K_pad,  # N2_q: 2 N_q
    CAUSAL: gl.constexpr, D: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    FLUSH: gl.constexpr, PDL: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid: (B * H_q * cdiv(N_q, 192),). PDL: dkdv_kernel, which needs nothing of this one, may
    begin where processors have no program of this one left."""
    if PDL:
        gdc_launch_dependents()
    L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_D], gl.int8)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    q_smem = gl.allocate_shared_memory(gl.int8, [3, 64, BLOCK_D], L)
    g_smem = gl.allocate_shared_memory(gl.int8, [3, 64, BLOCK_D], L)
    k_smem = gl.allocate_shared_memory(gl.int8, [STAGES, 64, BLOCK_D], L)
    v_smem = gl.allocate_shared_memory(gl.int8, [STAGES, 64, BLOCK_D], L)
    kt_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_D, 64], Kt.layout)
    VECTORS: gl.constexpr = STAGES * (2 if CAUSAL else 1)  # of v, then of k
    vectors = gl.allocate_shared_memory(gl.float32, [VECTORS, 64], V_scale.layout)
    totals = gl.allocate_shared_memory(gl.float32, [3, BLOCK_D // 4, 256], PLAIN)
    loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(loaded, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=3)
    shared = (q_smem, g_smem, k_smem, v_smem, kt_smem, vectors, totals, loaded, full, empty)
    tensors = (Q_scale, M, Delta, Row_scale, K_scale, DQ)
    strides = (stride_b, stride_h, stride_n)
    shape = (H_q, H_q // H_kv, N2_q // 2, Q_pad, K_pad)
    gl.warp_specialize([
        (_dq_consumer, (0, shared, tensors, strides, shape, CAUSAL, D, BLOCK_D, STAGES, FLUSH)),
        (_dq_consumer, (1, shared, tensors, strides, shape, CAUSAL, D, BLOCK_D, STAGES, FLUSH)),
        (_dq_consumer, (2, shared, tensors, strides, shape, CAUSAL, D, BLOCK_D, STAGES, FLUSH)),
        (_dq_producer, (Q, G, K, K_own, V, Kt, Kt_own, K_own_scale, V_scale, V_scale_own, shared,
                        shape, CAUSAL, BLOCK_D, STAGES)),
    ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip


# -- dK and dV ----


@gluon.jit
def _blocks_of_queries(row0, Q_rows, K_pad, CAUSAL: gl.constexpr):
    """That see the keys from row0: of a query head, and of the group."""
    per_head = Q_rows // 64
    blocks = per_head
    if CAUSAL:
        per_head = (K_pad - row0) // 64
        blocks = Q_rows // K_pad * per_head
    return per_head, blocks


@gluon.jit
def _queries(
    shared, k_tile, v_tile, s, d, dv, dk, j0, blocks, k_scale, v_scale,
    STAGES: gl.constexpr, UNROLL: gl.constexpr, S: gl.constexpr, A: gl.constexpr,
):  # fmt: skip
    """s and d of block j0 + UNROLL, dv and dk after UNROLL blocks."""
    k_smem, v_smem, q_smem, g_smem, qt_smem, ot_smem, vectors, totals, loaded, full, empty = shared
    COLUMN: gl.constexpr = gl.SliceLayout(0, S)
    zero = gl.full([64, 64], 0, gl.int32, S)
    for u in gl.static_range(UNROLL):
        j = j0 + u
        stage, after = j % STAGES, (j + 1) % STAGES
        if u > 0:  # in flight: the last block's dV, S, the last block's dK, D
            s, dv = warpgroup_mma_wait(2, [s, dv])
        q_scale = vectors.index(stage * 3).load(COLUMN)
        m = vectors.index(stage * 3 + 1).load(COLUMN)
        p = _exp2(s.to(gl.float32) * gl.expand_dims(q_scale * k_scale, 0) - gl.expand_dims(m, 0))
        p8 = _to_operand(p, A)
        dv = warpgroup_mma(p8, ot_smem.index(stage).permute((1, 0)), dv, is_async=True)
        if u > 0:
            d, dk = warpgroup_mma_wait(1, [d, dk])
            mbarrier.arrive(empty.index((j + STAGES - 1) % STAGES), count=1)
        delta = vectors.index(stage * 3 + 2).load(COLUMN)
        ds = p * (d.to(gl.float32) * v_scale - gl.expand_dims(delta, 0))
        ds = _to_operand(ds, A)
        mbarrier.wait(full.index(after), ((j + 1) // STAGES) & 1, pred=j + 1 < blocks)
        s = _score(k_tile, q_smem, after, zero)  # of no block: not read
        dk = warpgroup_mma(ds, qt_smem.index(stage).permute((1, 0)), dk, is_async=True)
        d = _score(v_tile, g_smem, after, zero)
    dv, s, dk, d = warpgroup_mma_wait(0, [dv, s, dk, d])
    mbarrier.arrive(empty.index((j0 + UNROLL - 1) % STAGES), count=1)
    return s, d, dv, dk


@gluon.jit
def _own_queries(
    wg: gl.constexpr, shared, k_own, k_tile, v_tile, zero_o, j0, blocks, k_scale, v_scale,
    STAGES: gl.constexpr, S: gl.constexpr, A: gl.constexpr,
):  # fmt: skip
    """(CAUSAL) `_queries` of the two blocks of the tile's own rows, by k_own, none of which sees a
    later one: dv and dk of them alone, s and d of the block after them. Nothing is in flight over
    the end of a block: with a mask in `_queries` registers do not suffice."""
    k_smem, v_smem, q_smem, g_smem, qt_smem, ot_smem, vectors, totals, loaded, full, empty = shared
    COLUMN: gl.constexpr = gl.SliceLayout(0, S)
    zero = gl.full([64, 64], 0, gl.int32, S)
    dv, dk = zero_o, zero_o
    s = _score(k_own, q_smem, j0 % STAGES, zero)
    d = _score(v_tile, g_smem, j0 % STAGES, zero)
    s, d = warpgroup_mma_wait(0, [s, d])
    for u in gl.static_range(2):
        j = j0 + u
        stage, after = j % STAGES, (j + 1) % STAGES
        if u >= wg:  # no product of a p of zeros: its dv was wrong, dk was not (Triton 3.6)
            q_scale = gl.expand_dims(vectors.index(stage * 3).load(COLUMN), 0)
            m = gl.expand_dims(vectors.index(stage * 3 + 1).load(COLUMN), 0)
            p = _exp2(s.to(gl.float32) * k_scale * q_scale - m)
            if u == wg:
                p = gl.where(_above(S), p, 0.0)
            dv = warpgroup_mma(
                _to_operand(p, A), ot_smem.index(stage).permute((1, 0)), dv, is_async=True
            )
            delta = gl.expand_dims(vectors.index(stage * 3 + 2).load(COLUMN), 0)
            ds = _to_operand(p * (d.to(gl.float32) * v_scale - delta), A)
        mbarrier.wait(full.index(after), ((j + 1) // STAGES) & 1, pred=j + 1 < blocks)
        s = _score(k_own if u == 0 else k_tile, q_smem, after, zero)  # of no block: not read
        if u >= wg:
            dk = warpgroup_mma(ds, qt_smem.index(stage).permute((1, 0)), dk, is_async=True)
        d = _score(v_tile, g_smem, after, zero)
        dv, s, dk, d = warpgroup_mma_wait(0, [dv, s, dk, d])
        mbarrier.arrive(empty.index(stage), count=1)
    return s, d, dv, dk


@gluon.jit
def _dkdv_consumer(
    wg: gl.constexpr, shared, tensors, strides_k, strides_v, shape,
    CAUSAL: gl.constexpr, D: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    FLUSH: gl.constexpr, UNROLL: gl.constexpr, FLUSH_DK: gl.constexpr,
):  # fmt: skip
    """Warpgroup wg: 64 keys. dV's product runs beside the arithmetic of dS, dK's beside S and D of
    the next block of 64 queries."""
    k_smem, v_smem, q_smem, g_smem, qt_smem, ot_smem, vectors, totals, loaded, full, empty = shared
    K_scale, K_own_scale, V_scale, Qt_scale, Ot_scale, Part, DK, DV = tensors
    H_kv, N_kv, Q_rows, K_pad, last = shape
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 32])
    A: gl.constexpr = gl.DotOperandLayout(0, O, 4)
    zero = gl.full([64, 64], 0, gl.int32, S)
    zero_o = gl.full([64, BLOCK_D], 0.0, gl.float32, O)
    L: gl.constexpr = _by_thread(zero_o).type.layout

    head, row0 = _tile(gl.program_id(0), gl.num_programs(0), N_kv, last, 128, False)
    per_head, blocks = _blocks_of_queries(row0, Q_rows, K_pad, CAUSAL)
    row0 += wg * 64
    here = head.to(gl.int64) * K_pad + row0
    v_scale = gl.load(V_scale + here + gl.arange(0, 64, layout=gl.SliceLayout(1, S)))
    v_scale = gl.expand_dims(v_scale, 1)
    k_scale = gl.load(K_scale + here // 64)
    if CAUSAL:
        own_scale = gl.load(K_own_scale + here + gl.arange(0, 64, layout=gl.SliceLayout(1, S)))
        own_scale = gl.expand_dims(own_scale, 1)
    places = gl.arange(0, BLOCK_D // 4, layout=gl.SliceLayout(1, L))[:, None] * 256
    places += gl.arange(0, 256, layout=gl.SliceLayout(0, L))[None, :]
    part = Part + (gl.program_id(0).to(gl.int64) * 2 + wg) * (64 * BLOCK_D) + places

    k_tile, v_tile, total = k_smem.index(wg), v_smem.index(wg), totals.index(wg)
    mbarrier.wait(loaded, 0)
    mbarrier.wait(full.index(0), 0)
    s, d = zero, zero  # CAUSAL: set by _own_queries
    if not CAUSAL:
        s = _score(k_tile, q_smem, 0, zero)
        d = _score(v_tile, g_smem, 0, zero)
        s, d = warpgroup_mma_wait(0, [s, d])
    dk = zero_o
    for first_block in range(0, blocks, per_head):  # of a query head; not CAUSAL: of all as one
        begin = first_block
        end = first_block + per_head
        if CAUSAL:
            k_own = k_smem.index(2 + wg)
            s, d, dv, dk = _own_queries(
                wg, shared, k_own, k_tile, v_tile, zero_o, begin, blocks, own_scale, v_scale,
                STAGES, S, A,
            )  # fmt: skip
            _flush(total, dv, begin == 0)
            dk = _add_part(dk, part, begin > 0, begin + 2 < blocks, O)
            begin += 2
        for far in range(begin, end, FLUSH_DK):
            dk = zero_o
            far_end = gl.minimum(far + FLUSH_DK, end)
            for first in range(far, far_end, FLUSH):
                dv = zero_o
                for j in range(first, gl.minimum(first + FLUSH, far_end), UNROLL):
                    s, d, dv, dk = _queries(
                        shared, k_tile, v_tile, s, d, dv, dk, j, blocks, k_scale, v_scale,
                        STAGES, UNROLL, S, A,
                    )  # fmt: skip
                _flush(total, dv, first == 0)
            dk = _add_part(dk, part, far > 0, far_end < blocks, O)
    warpgroup_mma_wait(0, [s, d])
    dv = _from_thread(total.load(L), O) * gl.load(Ot_scale + head)
    _store(dv, DV, row0, head, H_kv, N_kv, strides_v, D, O)
    _store(dk * gl.load(Qt_scale + head), DK, row0, head, H_kv, N_kv, strides_k, D, O)


@gluon.jit
def _dkdv_producer(
    K, K_own, V, Q, G, Qt, Ot, Vectors, shared, shape,
    CAUSAL: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    k_smem, v_smem, q_smem, g_smem, qt_smem, ot_smem, vectors, totals, loaded, full, empty = shared
    H_kv, N_kv, Q_rows, K_pad, last = shape
    head, first = _tile(gl.program_id(0), gl.num_programs(0), N_kv, last, 128, False)
    per_head, blocks = _blocks_of_queries(first, Q_rows, K_pad, CAUSAL)
    row0 = head * K_pad + first
    plane = gl.num_programs(0) // ((N_kv + 127) // 128) * Q_rows  # rows of q in all heads
    mbarrier.expect(loaded, (6 if CAUSAL else 4) * 64 * BLOCK_D)
    for wg in gl.static_range(2):
        tma_load(K, [row0 + wg * 64, 0], loaded, k_smem.index(wg))
        if CAUSAL:
            tma_load(K_own, [row0 + wg * 64, 0], loaded, k_smem.index(2 + wg))
        tma_load(V, [row0 + wg * 64, 0], loaded, v_smem.index(wg))
    for j in range(0, blocks):
        stage = j % STAGES
        mbarrier.wait(empty.index(stage), ((j // STAGES) & 1) ^ 1)
        bar = full.index(stage)
        mbarrier.expect(bar, 4 * 64 * BLOCK_D + 3 * 64 * 4)
        column = j * 64
        if CAUSAL:
            column = j // per_head * K_pad + first + j % per_head * 64
        row = head * Q_rows + column
        tma_load(Q, [row, 0], bar, q_smem.index(stage))
        for n in gl.static_range(3):
            tma_load(Vectors, [n * plane + row], bar, vectors.index(stage * 3 + n))
        tma_load(G, [row, 0], bar, g_smem.index(stage))
        tma_load(Ot, [head * BLOCK_D, column], bar, ot_smem.index(stage))
        tma_load(Qt, [head * BLOCK_D, column], bar, qt_smem.index(stage))
    if PDL:  # what follows this kernel reads dQ, too
        gdc_wait()


@gluon.jit
def dkdv_kernel(
    K, K_own, V,  # descriptors of [B * H_kv * K_pad, BLOCK_D] INT8, blocks of 64 rows
    Q, G,  # of [B * H_kv * Q_rows, BLOCK_D] INT8, blocks of 64 rows; Q_rows: H_q / H_kv * Q_pad
    Qt, Ot,  # of [B * H_kv * BLOCK_D, Q_rows] FP8, blocks of BLOCK_D rows and 64 tokens
    Vectors,  # of [3 * B * H_kv * Q_rows] fp32, blocks of 64: Q_scale, M, Delta as dq_kernel's
    K_scale, K_own_scale, V_scale,  # [B, H_kv, K_pad / 64], [B, H_kv, K_pad] twice, fp32
    # without CAUSAL those named own are any, and not read
    Qt_scale, Ot_scale,  # [B, H_kv] fp32: c^q, c^o
    Part,  # [programs, 2, 64 * BLOCK_D] fp32: totals of dK
    DK, DV,  # [B, H_kv, N_kv, D] out, fp16 or bf16, their last stride 1
    stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,  # of DK and DV, doubled
    H_kv, N2_kv, Q_rows, K_pad,  # N2_kv: 2 N_kv
    last,  # heads: _tile
    CAUSAL: gl.constexpr, D: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    FLUSH: gl.constexpr, UNROLL: gl.constexpr, FLUSH_DK: gl.constexpr, PDL: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Grid: (B * H_kv * cdiv(N_kv, 128),). Every FLUSH blocks dV is added to totals in shared
    memory, every FLUSH_DK dK to those in Part, where each thread adds to its own (there is no room
    in shared memory, and dS, unlike P, has both signs)."""
    gl.static_assert(FLUSH % UNROLL == 0 and FLUSH_DK % FLUSH == 0 and UNROLL <= 2)
    gl.static_assert(UNROLL == 2 or not CAUSAL, "the tile's own queries are two blocks")
    L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_D], gl.int8)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    TILES: gl.constexpr = 4 if CAUSAL else 2  # of k: then K_own's
    k_smem = gl.allocate_shared_memory(gl.int8, [TILES, 64, BLOCK_D], L)
    v_smem = gl.allocate_shared_memory(gl.int8, [2, 64, BLOCK_D], L)
    q_smem = gl.allocate_shared_memory(gl.int8, [STAGES, 64, BLOCK_D], L)
    g_smem = gl.allocate_shared_memory(gl.int8, [STAGES, 64, BLOCK_D], L)
    qt_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_D, 64], Qt.layout)
    ot_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_D, 64], Ot.layout)
    vectors = gl.allocate_shared_memory(gl.float32, [STAGES * 3, 64], Vectors.layout)
    totals = gl.allocate_shared_memory(gl.float32, [2, BLOCK_D // 4, 256], PLAIN)
    loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(loaded, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    shared = (
        k_smem, v_smem, q_smem, g_smem, qt_smem, ot_smem, vectors, totals, loaded, full, empty
    )  # fmt: skip
    tensors = (K_scale, K_own_scale, V_scale, Qt_scale, Ot_scale, Part, DK, DV)
    strides_k, strides_v = (stride_kb, stride_kh, stride_kn), (stride_vb, stride_vh, stride_vn)
    shape = (H_kv, N2_kv // 2, Q_rows, K_pad, last)
    gl.warp_specialize([
        (_dkdv_consumer, (0, shared, tensors, strides_k, strides_v, shape, CAUSAL, D, BLOCK_D,
                          STAGES, FLUSH, UNROLL, FLUSH_DK)),
        (_dkdv_consumer, (1, shared, tensors, strides_k, strides_v, shape, CAUSAL, D, BLOCK_D,
                          STAGES, FLUSH, UNROLL, FLUSH_DK)),
        (_dkdv_producer, (K, K_own, V, Q, G, Qt, Ot, Vectors, shared, shape, CAUSAL, BLOCK_D,
                          STAGES, PDL)),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip
