"""The FP8 backward of attention for Hopper, in Gluon: two kernels, no atomics.

For one query head and its head of k and v, i a query, j a key, b(j) the key's block of 64, in units
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

To the dK/dV kernel the query heads of a group are one head with the rows of all.

CAUSAL (N_q = N_kv): earlier rows must not depend on later ones. So no mean over the sequence is
subtracted from k and v, and dQ has a bound for each row, by what the row sees:

    dS_ij = ks_j P_ij (D_ij vs_j - delta_i)        P_ij = 2^(x_ij - m_i) 448 / beta_i, vs_j and
                                                   delta_i here without beta
    dQ_i  = r_i sum_j e4m3(dS_ij) kT_j             kT_j = e4m3(k^_j 448 / 127); r_i with c^k

    beta_i >= max ks_j |dP_ij - delta_ij| / a_i over j <= i

A query that sees all 64 keys of a scale learns nothing of later rows from it: that scale goes into
vs and delta. Near the diagonal the kernels read k_own, with a scale a row, which costs a
multiplication per score. dQ's kernel and the forward read it from key 128 floor(first row of the
tile / 128) on, dK's and dV's kernel where i and j are in the same 128 rows. (So the forward uses
k_own in slightly more blocks than the dK/dV kernel. In those, one of a key's N / 64 blocks of
queries, P comes from codes other than those of lse and m.)
beta, c^q and c^o, one a head, then count only rows whose dO is not 0 and the v that these rows see:
dK_j and dV_j depend on no row without a gradient.

The tensor cores accumulate FP8 products in 13 bits of mantissa: every FLUSH blocks the sums are
added to FP32 totals in shared memory, where a thread finds its own again without a bank conflict
(dK's, for which there is no room, every FLUSH_DK blocks to totals in global memory).

Only S of the next block (in the dK/dV kernel S and D) is started before this one is done. With more
ptxas 12.8 serializes every wgmma of a kernel (C7512, C7514; only ptxas -v says so). It does so
* if a product whose left operand is in registers is in flight over the end of a loop,
* if an accumulator is read while a later product, started before the loop's end, is in flight,
* if what is in flight leaves too few registers (3 warpgroups: 160).
So a loop ends with a wait for all products, and products that overlap are in one UNROLLed body.

8-bit wgmma takes both operands K-major, so k, q and dO come transposed as well (kT, qT, oT), their
tokens permuted in groups of 16 such that P and dS go from accumulator to operand within a thread:
place 4t + 2h + e of a group holds token 8h + 2t + e.

Padding, of rows to Q_pad and K_pad (multiples of 128) and of channels to BLOCK_D: codes are 0. For
queries qs and delta are 0 and m is NO_QUERY, so that P is 0. For keys P is 2^-m_i 448, which is
finite because k is less the mean of a sample of keys: m_i, their largest score's at least, is then
not below 0 but for rounding. CAUSAL, no query sees them.

TMA counts in 32 bits: the rows of q in all heads must be fewer than 2^29, of k too, and those of
transposed codes (BLOCK_D a head) fewer than 2^31.
"""

# ruff: noqa: F841  (what `context` reads)
import collections

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sage_inductor.ops.attention.hopper.kernel import _exp2, _first_own, _to_fp8
from sage_inductor.ops.attention.hopper.ring import context, make_ring
from sage_inductor.ops.compat import gdc_launch_dependents, gdc_wait, tma_load

# -- both ----

_S = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]))  # scores [64, 64]
_ROW = gl.constexpr(gl.SliceLayout(1, _S.value))
_COLUMN = gl.constexpr(gl.SliceLayout(0, _S.value))
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.constexpr_function
def _products(BLOCK_D):
    """Layout of an accumulator [64, BLOCK_D]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 32])


@gluon.jit
def _to_operand(x, O: gl.constexpr):
    """A wgmma accumulator [64, 64] -> FP8, left operand of a product of layout O."""
    A: gl.constexpr = gl.DotOperandLayout(0, O, 4)
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
def _add_part(acc, part, is_more, is_less):
    """acc, with what is in part if is_more; which it is stored to if is_less than all."""
    O: gl.constexpr = acc.type.layout
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
def _store(x, Out, row0, head, H, N, strides, D: gl.constexpr):
    """x [64, BLOCK_D] -> rows row0 .. of a head of Out [B, H, N, D], strides doubled."""
    O: gl.constexpr = x.type.layout
    stride_b, stride_h, stride_n = strides
    b = head // H
    h = head - b * H
    d = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, O))
    rows = row0 + gl.arange(0, 64, layout=gl.SliceLayout(1, O))
    out = Out + ((b.to(gl.int64) * stride_b + h.to(gl.int64) * stride_h) >> 1)
    out = out + ((rows.to(gl.int64) * stride_n) >> 1)[:, None] + d[None, :]
    gl.store(out, x.to(Out.dtype.element_ty), mask=(rows < N)[:, None] & (d < D)[None, :])


@gluon.jit
def _score(a, b, stage):
    """Starts a b^T of INT8; stage of b."""
    zero = gl.full([64, 64], 0, gl.int32, _S)
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


# -- dQ ----


# 64 queries of a warpgroup: codes of q and dO in shared memory, the first row, how many blocks of
# keys they see, numbers of each row, and k's scales by blocks.
Queries = collections.namedtuple("Queries", "q_tile g_tile row0 blocks q_scale m delta k_scale")


@gluon.jit
def _blocks_of_keys(row_end, ctx):
    """That the rows before row_end see."""
    end = ctx.K_pad
    if ctx.CAUSAL:
        end = gl.minimum(end, row_end)
    return end // 64


@gluon.jit
def _keys(j, s, dq, k_scale, OWN: gl.constexpr, at, ctx):
    """s and k_scale of block j + 1; dq after block j. OWN: k has a scale a row, and later keys are
    hidden."""
    O: gl.constexpr = dq.type.layout
    stage, after = j % ctx.STAGES, (j + 1) % ctx.STAGES
    d = _score(at.g_tile, ctx.v_smem, stage)
    q_scale = gl.expand_dims(at.q_scale, 1)
    delta = at.delta
    if OWN:
        of_key = gl.expand_dims(ctx.vectors.index(ctx.STAGES + stage).load(_COLUMN), 0)
        p = _exp2(s.to(gl.float32) * of_key * q_scale - at.m)
        rows = at.row0 - j * 64 + gl.arange(0, 64, layout=_ROW)
        seen = rows[:, None] >= gl.arange(0, 64, layout=_COLUMN)[None, :]
        p = gl.where(seen, p * of_key, 0.0)
    else:
        p = _exp2(s.to(gl.float32) * (q_scale * k_scale) - at.m)
        if ctx.CAUSAL:
            delta = delta * k_scale
        k_scale = gl.load(at.k_scale + gl.minimum(j + 1, at.blocks - 1))
    d = warpgroup_mma_wait(0, [d])
    v_scale = gl.expand_dims(ctx.vectors.index(stage).load(_COLUMN), 0)
    ds = _to_operand(p * (d.to(gl.float32) * v_scale - delta), O)
    ctx.ring.wait_full(j + 1, j + 1 < at.blocks)
    s = _score(at.q_tile, ctx.k_smem, after)  # of no block: not read
    dq = warpgroup_mma(ds, ctx.kt_smem.index(stage).permute((1, 0)), dq, is_async=True)
    s, dq = warpgroup_mma_wait(0, [s, dq])
    ctx.ring.release(j)
    return s, dq, k_scale


@gluon.jit
def _dq_consumer(wg: gl.constexpr, ctx):
    """Warpgroup wg: 64 queries. D runs beside the exponentials; S of the next block is started
    before the product with kT of this one."""
    O: gl.constexpr = _products(ctx.BLOCK_D)
    zero = gl.full([64, ctx.BLOCK_D], 0.0, gl.float32, O)

    head, row0 = _tile(gl.program_id(0), gl.num_programs(0), ctx.N_q, 1, 192, ctx.CAUSAL)
    fetched = _blocks_of_keys(row0 + 192, ctx)
    own = _first_own(row0, 64)
    row0 += wg * 64
    blocks = _blocks_of_keys(row0 + 64, ctx)
    rows = row0 + gl.arange(0, 64, layout=_ROW)
    here = head.to(gl.int64) * ctx.Q_pad + rows
    q_scale = gl.load(ctx.Q_scale + here, mask=rows < ctx.Q_pad, other=0.0)
    m = gl.expand_dims(gl.load(ctx.M + here, mask=rows < ctx.Q_pad, other=0.0), 1)
    delta = gl.expand_dims(gl.load(ctx.Delta + here, mask=rows < ctx.Q_pad, other=0.0), 1)
    of_blocks = ctx.K_scale + (head // ctx.group).to(gl.int64) * (ctx.K_pad // 64)
    at = Queries(
        ctx.q_smem.index(wg), ctx.g_smem.index(wg), row0, blocks, q_scale, m, delta, of_blocks
    )

    total = ctx.totals.index(wg)
    mbarrier.wait(ctx.loaded, 0)
    k_scale = gl.load(of_blocks)
    ctx.ring.wait_full(0)
    s = warpgroup_mma_wait(0, [_score(at.q_tile, ctx.k_smem, 0)])
    whole = own if ctx.CAUSAL else blocks
    for first in range(0, whole, ctx.FLUSH):
        dq = zero
        for j in range(first, gl.minimum(first + ctx.FLUSH, whole)):
            s, dq, k_scale = _keys(j, s, dq, k_scale, False, at, ctx)
        _flush(total, dq, first == 0)
    if ctx.CAUSAL:
        dq = zero
        for j in range(own, blocks):
            s, dq, k_scale = _keys(j, s, dq, k_scale, True, at, ctx)
        _flush(total, dq, own == 0)
    for j in range(blocks, fetched):  # what these rows do not see
        ctx.ring.wait_full(j)
        ctx.ring.release(j)
    rows = row0 + gl.arange(0, 64, layout=gl.SliceLayout(1, O))
    here = head.to(gl.int64) * ctx.Q_pad + rows
    scale = gl.expand_dims(gl.load(ctx.Row_scale + here, mask=rows < ctx.Q_pad, other=0.0), 1)
    dq = _from_thread(total.load(_by_thread(zero).type.layout), O)
    strides = (ctx.stride_b, ctx.stride_h, ctx.stride_n)
    _store(dq * scale, ctx.DQ, row0, head, ctx.H_q, ctx.N_q, strides, ctx.D)


@gluon.jit
def _fetch_keys(j, head_kv, K, Kt, V_scale, ctx):
    """Block j of keys into the ring, when its place is free. CAUSAL: scales of each key, too."""
    stage = j % ctx.STAGES
    ctx.ring.wait_free(j)
    bar = ctx.ring.full.index(stage)
    mbarrier.expect(bar, 3 * 64 * ctx.BLOCK_D + 64 * 4 * (2 if ctx.CAUSAL else 1))
    row = head_kv * ctx.K_pad + j * 64
    if ctx.CAUSAL:
        tma_load(ctx.K_own_scale, [row], bar, ctx.vectors.index(ctx.STAGES + stage))
    tma_load(V_scale, [row], bar, ctx.vectors.index(stage))
    tma_load(K, [row, 0], bar, ctx.k_smem.index(stage))
    tma_load(ctx.V, [row, 0], bar, ctx.v_smem.index(stage))
    tma_load(Kt, [head_kv * ctx.BLOCK_D, j * 64], bar, ctx.kt_smem.index(stage))


@gluon.jit
def _dq_producer(ctx):
    head, row0 = _tile(gl.program_id(0), gl.num_programs(0), ctx.N_q, 1, 192, ctx.CAUSAL)
    blocks = _blocks_of_keys(row0 + 192, ctx)
    whole = _first_own(row0, 64) if ctx.CAUSAL else blocks
    head_kv = head // ctx.group
    row0 += head * ctx.Q_pad
    mbarrier.expect(ctx.loaded, 3 * 2 * 64 * ctx.BLOCK_D)
    for wg in gl.static_range(3):
        tma_load(ctx.Q, [row0 + wg * 64, 0], ctx.loaded, ctx.q_smem.index(wg))
        tma_load(ctx.G, [row0 + wg * 64, 0], ctx.loaded, ctx.g_smem.index(wg))
    for j in range(0, whole):
        _fetch_keys(j, head_kv, ctx.K, ctx.Kt, ctx.V_scale, ctx)
    if ctx.CAUSAL:
        for j in range(whole, blocks):
            _fetch_keys(j, head_kv, ctx.K_own, ctx.Kt_own, ctx.V_scale_own, ctx)


@gluon.jit
def dq_kernel(
    Q, G,  # descriptors of [B * H_q * Q_pad, BLOCK_D] INT8, blocks of 64 rows
    K, K_own, V,  # of [B * H_kv * K_pad, BLOCK_D] INT8, blocks of 64 rows
    Kt, Kt_own,  # of [B * H_kv * BLOCK_D, K_pad] FP8, blocks of BLOCK_D rows and 64 tokens
    K_own_scale, V_scale, V_scale_own,  # of [B * H_kv * K_pad] fp32, blocks of 64
    # CAUSAL: V_scale is vs ks, V_scale_own vs; else there are none named own
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
    q_smem = gl.allocate_shared_memory(gl.int8, [3, 64, BLOCK_D], L)
    g_smem = gl.allocate_shared_memory(gl.int8, [3, 64, BLOCK_D], L)
    k_smem = gl.allocate_shared_memory(gl.int8, [STAGES, 64, BLOCK_D], L)
    v_smem = gl.allocate_shared_memory(gl.int8, [STAGES, 64, BLOCK_D], L)
    kt_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_D, 64], Kt.layout)
    VECTORS: gl.constexpr = STAGES * (2 if CAUSAL else 1)  # of v, then of k
    vectors = gl.allocate_shared_memory(gl.float32, [VECTORS, 64], V_scale.layout)
    totals = gl.allocate_shared_memory(gl.float32, [3, BLOCK_D // 4, 256], _PLAIN)
    loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ring = make_ring(STAGES)
    mbarrier.init(loaded, count=1)
    ring.begin(3)
    group, N_q = H_q // H_kv, N2_q // 2
    ctx = context()
    gl.warp_specialize([
        (_dq_consumer, (0, ctx)), (_dq_consumer, (1, ctx)), (_dq_consumer, (2, ctx)),
        (_dq_producer, (ctx,)),
    ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip


# -- dK and dV ----


# 64 keys of a warpgroup: codes of k and v in shared memory, k's scale, v's scale of each row, and
# how many blocks of queries see them.
Keys = collections.namedtuple("Keys", "k_tile v_tile k_scale v_scale blocks")


@gluon.jit
def _blocks_of_queries(row0, ctx):
    """That see the keys from row0: of a query head, and of the group."""
    per_head = ctx.Q_rows // 64
    blocks = per_head
    if ctx.CAUSAL:
        per_head = (ctx.K_pad - row0) // 64
        blocks = ctx.Q_rows // ctx.K_pad * per_head
    return per_head, blocks


@gluon.jit
def _queries(j0, s, d, dv, dk, at, ctx):
    """s and d of block j0 + UNROLL, dv and dk after UNROLL blocks."""
    O: gl.constexpr = dv.type.layout
    for u in gl.static_range(ctx.UNROLL):
        j = j0 + u
        stage, after = j % ctx.STAGES, (j + 1) % ctx.STAGES
        if u > 0:  # in flight: the last block's dV, S, the last block's dK, D
            s, dv = warpgroup_mma_wait(2, [s, dv])
        q_scale = ctx.vectors.index(stage * 3).load(_COLUMN)
        m = ctx.vectors.index(stage * 3 + 1).load(_COLUMN)
        x = s.to(gl.float32) * gl.expand_dims(q_scale * at.k_scale, 0)
        p = _exp2(x - gl.expand_dims(m, 0))
        p8 = _to_operand(p, O)
        dv = warpgroup_mma(p8, ctx.ot_smem.index(stage).permute((1, 0)), dv, is_async=True)
        if u > 0:
            d, dk = warpgroup_mma_wait(1, [d, dk])
            ctx.ring.release(j + ctx.STAGES - 1)
        delta = ctx.vectors.index(stage * 3 + 2).load(_COLUMN)
        ds = p * (d.to(gl.float32) * at.v_scale - gl.expand_dims(delta, 0))
        ds = _to_operand(ds, O)
        ctx.ring.wait_full(j + 1, j + 1 < at.blocks)
        s = _score(at.k_tile, ctx.q_smem, after)  # of no block: not read
        dk = warpgroup_mma(ds, ctx.qt_smem.index(stage).permute((1, 0)), dk, is_async=True)
        d = _score(at.v_tile, ctx.g_smem, after)
    dv, s, dk, d = warpgroup_mma_wait(0, [dv, s, dk, d])
    ctx.ring.release(j0 + ctx.UNROLL - 1)
    return s, d, dv, dk


@gluon.jit
def _own_queries(j0, k_own, k_scale, wg: gl.constexpr, at, ctx):
    """(CAUSAL) `_queries` of the two blocks of the tile's own rows, by k_own, none of which sees a
    later one: dv and dk of them alone, s and d of the block after them. Nothing is in flight over
    the end of a block: with a mask in `_queries` registers do not suffice."""
    O: gl.constexpr = _products(ctx.BLOCK_D)
    dv = gl.full([64, ctx.BLOCK_D], 0.0, gl.float32, O)
    dk = gl.full([64, ctx.BLOCK_D], 0.0, gl.float32, O)
    s = _score(k_own, ctx.q_smem, j0 % ctx.STAGES)
    d = _score(at.v_tile, ctx.g_smem, j0 % ctx.STAGES)
    s, d = warpgroup_mma_wait(0, [s, d])
    for u in gl.static_range(2):
        j = j0 + u
        stage, after = j % ctx.STAGES, (j + 1) % ctx.STAGES
        if u >= wg:  # no product of a p of zeros: its dv was wrong, dk was not (Triton 3.6)
            q_scale = gl.expand_dims(ctx.vectors.index(stage * 3).load(_COLUMN), 0)
            m = gl.expand_dims(ctx.vectors.index(stage * 3 + 1).load(_COLUMN), 0)
            p = _exp2(s.to(gl.float32) * k_scale * q_scale - m)
            if u == wg:
                keys = gl.arange(0, 64, layout=_ROW)[:, None]
                p = gl.where(keys <= gl.arange(0, 64, layout=_COLUMN)[None, :], p, 0.0)
            dv = warpgroup_mma(
                _to_operand(p, O), ctx.ot_smem.index(stage).permute((1, 0)), dv, is_async=True
            )
            delta = gl.expand_dims(ctx.vectors.index(stage * 3 + 2).load(_COLUMN), 0)
            ds = _to_operand(p * (d.to(gl.float32) * at.v_scale - delta), O)
        ctx.ring.wait_full(j + 1, j + 1 < at.blocks)
        s = _score(k_own if u == 0 else at.k_tile, ctx.q_smem, after)  # of no block: not read
        if u >= wg:
            dk = warpgroup_mma(ds, ctx.qt_smem.index(stage).permute((1, 0)), dk, is_async=True)
        d = _score(at.v_tile, ctx.g_smem, after)
        dv, s, dk, d = warpgroup_mma_wait(0, [dv, s, dk, d])
        ctx.ring.release(j)
    return s, d, dv, dk


@gluon.jit
def _dkdv_consumer(wg: gl.constexpr, ctx):
    """Warpgroup wg: 64 keys. dV's product runs beside the arithmetic of dS, dK's beside S and D of
    the next block of 64 queries."""
    O: gl.constexpr = _products(ctx.BLOCK_D)
    zero = gl.full([64, ctx.BLOCK_D], 0.0, gl.float32, O)
    L: gl.constexpr = _by_thread(zero).type.layout

    head, row0 = _tile(gl.program_id(0), gl.num_programs(0), ctx.N_kv, ctx.last, 128, False)
    per_head, blocks = _blocks_of_queries(row0, ctx)
    row0 += wg * 64
    here = head.to(gl.int64) * ctx.K_pad + row0
    v_scale = gl.load(ctx.V_scale + here + gl.arange(0, 64, layout=_ROW))
    v_scale = gl.expand_dims(v_scale, 1)
    k_scale = gl.load(ctx.K_scale + here // 64)
    if ctx.CAUSAL:
        own_scale = gl.load(ctx.K_own_scale + here + gl.arange(0, 64, layout=_ROW))
        own_scale = gl.expand_dims(own_scale, 1)
    places = gl.arange(0, ctx.BLOCK_D // 4, layout=gl.SliceLayout(1, L))[:, None] * 256
    places += gl.arange(0, 256, layout=gl.SliceLayout(0, L))[None, :]
    part = ctx.Part + (gl.program_id(0).to(gl.int64) * 2 + wg) * (64 * ctx.BLOCK_D) + places

    at = Keys(ctx.k_smem.index(wg), ctx.v_smem.index(wg), k_scale, v_scale, blocks)
    total = ctx.totals.index(wg)
    mbarrier.wait(ctx.loaded, 0)
    ctx.ring.wait_full(0)
    s = gl.full([64, 64], 0, gl.int32, _S)  # CAUSAL: set by _own_queries
    d = s
    if not ctx.CAUSAL:
        s = _score(at.k_tile, ctx.q_smem, 0)
        d = _score(at.v_tile, ctx.g_smem, 0)
        s, d = warpgroup_mma_wait(0, [s, d])
    dk = zero
    for first_block in range(0, blocks, per_head):  # of a query head; not CAUSAL: of all as one
        begin = first_block
        end = first_block + per_head
        if ctx.CAUSAL:
            k_own = ctx.k_smem.index(2 + wg)
            s, d, dv, dk = _own_queries(begin, k_own, own_scale, wg, at, ctx)
            _flush(total, dv, begin == 0)
            dk = _add_part(dk, part, begin > 0, begin + 2 < blocks)
            begin += 2
        for far in range(begin, end, ctx.FLUSH_DK):
            dk = zero
            far_end = gl.minimum(far + ctx.FLUSH_DK, end)
            for first in range(far, far_end, ctx.FLUSH):
                dv = zero
                for j in range(first, gl.minimum(first + ctx.FLUSH, far_end), ctx.UNROLL):
                    s, d, dv, dk = _queries(j, s, d, dv, dk, at, ctx)
                _flush(total, dv, first == 0)
            dk = _add_part(dk, part, far > 0, far_end < blocks)
    warpgroup_mma_wait(0, [s, d])
    dv = _from_thread(total.load(L), O) * gl.load(ctx.Ot_scale + head)
    strides_v = (ctx.stride_vb, ctx.stride_vh, ctx.stride_vn)
    _store(dv, ctx.DV, row0, head, ctx.H_kv, ctx.N_kv, strides_v, ctx.D)
    dk *= gl.load(ctx.Qt_scale + head)
    strides_k = (ctx.stride_kb, ctx.stride_kh, ctx.stride_kn)
    _store(dk, ctx.DK, row0, head, ctx.H_kv, ctx.N_kv, strides_k, ctx.D)


@gluon.jit
def _dkdv_producer(ctx):
    head, first = _tile(gl.program_id(0), gl.num_programs(0), ctx.N_kv, ctx.last, 128, False)
    per_head, blocks = _blocks_of_queries(first, ctx)
    row0 = head * ctx.K_pad + first
    # Rows of q in all heads.
    plane = gl.num_programs(0) // ((ctx.N_kv + 127) // 128) * ctx.Q_rows
    mbarrier.expect(ctx.loaded, (6 if ctx.CAUSAL else 4) * 64 * ctx.BLOCK_D)
    for wg in gl.static_range(2):
        tma_load(ctx.K, [row0 + wg * 64, 0], ctx.loaded, ctx.k_smem.index(wg))
        if ctx.CAUSAL:
            tma_load(ctx.K_own, [row0 + wg * 64, 0], ctx.loaded, ctx.k_smem.index(2 + wg))
        tma_load(ctx.V, [row0 + wg * 64, 0], ctx.loaded, ctx.v_smem.index(wg))
    for j in range(0, blocks):
        stage = j % ctx.STAGES
        ctx.ring.wait_free(j)
        bar = ctx.ring.full.index(stage)
        mbarrier.expect(bar, 4 * 64 * ctx.BLOCK_D + 3 * 64 * 4)
        column = j * 64
        if ctx.CAUSAL:
            column = j // per_head * ctx.K_pad + first + j % per_head * 64
        row = head * ctx.Q_rows + column
        tma_load(ctx.Q, [row, 0], bar, ctx.q_smem.index(stage))
        for n in gl.static_range(3):
            tma_load(ctx.Vectors, [n * plane + row], bar, ctx.vectors.index(stage * 3 + n))
        tma_load(ctx.G, [row, 0], bar, ctx.g_smem.index(stage))
        tma_load(ctx.Ot, [head * ctx.BLOCK_D, column], bar, ctx.ot_smem.index(stage))
        tma_load(ctx.Qt, [head * ctx.BLOCK_D, column], bar, ctx.qt_smem.index(stage))
    if ctx.PDL:  # what follows this kernel reads dQ, too
        gdc_wait()


@gluon.jit
def dkdv_kernel(
    K, K_own, V,  # descriptors of [B * H_kv * K_pad, BLOCK_D] INT8, blocks of 64 rows
    Q, G,  # of [B * H_kv * Q_rows, BLOCK_D] INT8, blocks of 64 rows; Q_rows: H_q / H_kv * Q_pad
    Qt, Ot,  # of [B * H_kv * BLOCK_D, Q_rows] FP8, blocks of BLOCK_D rows and 64 tokens
    Vectors,  # of [3 * B * H_kv * Q_rows] fp32, blocks of 64: Q_scale, M, Delta as dq_kernel's
    K_scale, K_own_scale, V_scale,  # [B, H_kv, K_pad / 64], [B, H_kv, K_pad] twice, fp32
    # those named own: if CAUSAL
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
    TILES: gl.constexpr = 4 if CAUSAL else 2  # of k: then K_own's
    k_smem = gl.allocate_shared_memory(gl.int8, [TILES, 64, BLOCK_D], L)
    v_smem = gl.allocate_shared_memory(gl.int8, [2, 64, BLOCK_D], L)
    q_smem = gl.allocate_shared_memory(gl.int8, [STAGES, 64, BLOCK_D], L)
    g_smem = gl.allocate_shared_memory(gl.int8, [STAGES, 64, BLOCK_D], L)
    qt_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_D, 64], Qt.layout)
    ot_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_D, 64], Ot.layout)
    vectors = gl.allocate_shared_memory(gl.float32, [STAGES * 3, 64], Vectors.layout)
    totals = gl.allocate_shared_memory(gl.float32, [2, BLOCK_D // 4, 256], _PLAIN)
    loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ring = make_ring(STAGES)
    mbarrier.init(loaded, count=1)
    ring.begin(2)
    N_kv = N2_kv // 2
    ctx = context()
    gl.warp_specialize(
        [(_dkdv_consumer, (0, ctx)), (_dkdv_consumer, (1, ctx)), (_dkdv_producer, (ctx,))],
        [4, 1], [REGISTERS, 24],
    )  # fmt: skip
