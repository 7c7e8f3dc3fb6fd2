"""``sage::decode``: attention of few queries to a cache, of 16 bits or of 8-bit codes.

    s = q k^T * k_scale * scale * log2 e
    p = exp2(s - m),  l = sum of p                m is the running row maximum of a split
    o = sum over tiles of (p v_scale / c) v * c   c is the running maximum of v's scales
    out = sum over splits of w o / l / sum of w   w = exp2(m + log2 l - the largest of a row)
    lse = (log2 sum of exp2(m + log2 l)) ln 2

* The time is that of reading the cache. So a program holds all queries of all heads of q that share
  a head of k, and splits of a sequence give every processor something to read.
* A product with codes is one of fp16, which holds them all. For it q is multiplied by the power of
  two that makes the largest absolute value of its row at least 2^7 and less than 2^8.
* v's scales differ from key to key, so p takes them before it is rounded to fp16, as their ratio to
  the largest so far. p is times 2^15 there: fp16 holds eleven bits of it for a key whose p times
  ratio is 2^-29, and something of it for 2^-39.
* Tiles beyond `end`, before `start` and before the window are not read; neither are parts of them.
* A split without keys says so by its lse, -inf, and stores no o.

Source: Flash-Decoding (https://pytorch.org/blog/flash-decoding/). Shapes: as in decode_call.py.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sage_inductor.ops import gpus
from sage_inductor.ops.attention.tiles import hopper_unavailable
from sage_inductor.ops.attention_call import as_stored, empty_outputs, schema_of
from sage_inductor.ops.compat import gdc_launch_dependents, gdc_wait
from sage_inductor.ops.constants import LN2, LOG2E, TINY
from sage_inductor.ops.decode_call import BLOCK_N, CODES, P_BITS, UP, DecodeCall
from sage_inductor.ops.formats import MAX_ROWS, pad_head_dim, rotation_scale
from sage_inductor.ops.launch import HAS_PDL, pdl_option
from sage_inductor.ops.quantize.rotate import rotate
from sage_inductor.ops.reference import decode as reference
from sage_inductor.ops.register import launched_by, opens

_UP, _P_BITS = tl.constexpr(UP), tl.constexpr(P_BITS)
# Programs a processor. H200, 2026-11-29: one fewer or more is up to 9 % slower from 32K keys on.
PROGRAMS = 2
MOST = 128  # splits. With one head of k at 32K keys, 264 took 17.6 us and 132 14.1
BLOCK_S = 64  # splits that are combined at once: 16 took 1.9 us more at 8K keys
# For hopper/decode.py: head_dims, keys of a warp in a tile and the fewest of a split; by the rows
# that share a head of k, stages of its rings, programs a processor and registers.
HEAD_DIMS_OF_WORDS, KEYS_OF_WARP, WARPS, FEWEST = (64, 128), 32, 4, 256
OF_WORDS = {8: (2, 3, 168), 16: (3, 2, 255)}


@triton.jit
def _decode_kernel(
    Q,  # [B, H_q, N_q, D] in, 16-bit
    K, V,  # [B, H_kv, N, D], [B, H_kv, N, D_V] in, 16-bit, INT8 or E4M3
    K_scale, V_scale,  # [B, H_kv, N] in, fp32; of codes
    Mask, Is_run,  # [B, N_q, N], [B] in, bool
    Start, End,  # [B] in, int32 or int64
    O, Lse,  # [B, H_q, N_q, S, D_V], [B, H_q, N_q, S] out, fp32; log2 units
    stride_qb, stride_qh, stride_qn, stride_qd,
    stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn,
    stride_ksb, stride_ksh, stride_ksn,
    stride_vsb, stride_vsh, stride_vsn,
    stride_mb, stride_mq, stride_mn, stride_run,
    stride_start, stride_end,
    H_q, H_kv, N_q, N, rows, S,  # rows: H_q / H_kv * N_q
    D: tl.constexpr, D_V: tl.constexpr, SCALE: tl.constexpr,
    LEFT: tl.constexpr, TURN: tl.constexpr,  # -1: no bound; 0: q is not rotated
    PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Grid: (B * H_kv * cdiv(rows, BLOCK_M), S): a split of the keys, for BLOCK_M of the rows that
    share a head of k: row g N_q + i is query i of the g-th head of the group."""
    tiles = tl.cdiv(rows, BLOCK_M)
    head, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    b, h_kv = (head // H_kv).to(tl.int64), (head % H_kv).to(tl.int64)
    split = tl.program_id(1).to(tl.int64)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    i = row % N_q
    h = h_kv * (H_q // H_kv) + row // N_q
    d, dv, n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV), tl.arange(0, BLOCK_N)

    # -- which keys ----
    start = tl.minimum(tl.maximum(tl.load(Start + b * stride_start), 0), N).to(tl.int32)
    end = tl.minimum(tl.maximum(tl.load(End + b * stride_end), 0), N).to(tl.int32)
    place = end - N_q + i  # the last key that a row sees
    if LEFT >= 0:
        start = tl.maximum(start, end - N_q - LEFT)
    keys = tl.cdiv(tl.cdiv(tl.maximum(end - start, 0), S), BLOCK_N) * BLOCK_N  # of a split
    begin = tl.minimum(start + split * keys, end).to(tl.int32)
    stop = begin + tl.minimum(keys, end - begin)

    if PDL:
        gdc_launch_dependents()
    q = Q + b * stride_qb + h * stride_qh + i.to(tl.int64) * stride_qn
    q = q[:, None] + d.to(tl.int64)[None, :] * stride_qd
    q = tl.load(q, mask=(row < rows)[:, None] & (d < D)[None, :], other=0.0)  # [BLOCK_M, BLOCK_D]
    if TURN > 0:  # of a power of two: 16 bits hold it as they held q
        q = (rotate(q, BLOCK_M, BLOCK_D) * TURN).to(q.dtype)
    down = tl.full([BLOCK_M], SCALE * LOG2E, tl.float32)
    if K_scale is not None:
        exponent = tl.max(tl.abs(q.to(tl.float32)), 1).to(tl.int32, bitcast=True) >> 23
        up = (tl.minimum(-exponent + _UP, 254) << 23).to(tl.float32, bitcast=True)
        q = (q * up[:, None]).to(tl.float16)
        down = down / up
    k_ptrs = K + b * stride_kb + h_kv * stride_kh + d[None, :]
    v_ptrs = V + b * stride_vb + h_kv * stride_vh + dv[None, :]
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    is_run = Mask is None
    if Is_run is not None:
        is_run = tl.load(Is_run + b * stride_run) != 0
    BITS: tl.constexpr = 0.0 if V_scale is None else _P_BITS
    c = tl.cast(1.0 if V_scale is None else TINY, tl.float32)

    for first in tl.range(begin, stop, BLOCK_N, num_stages=NUM_STAGES):
        key = first + n
        inside, at = key < stop, key.to(tl.int64)
        mask = inside[:, None] & (d < D)[None, :]
        k = tl.load(k_ptrs + at[:, None] * stride_kn, mask=mask, other=0.0)
        x = tl.dot(q, k.to(q.dtype).T) * down[:, None]  # [BLOCK_M, BLOCK_N]
        if K_scale is not None:
            k_scale = K_scale + b * stride_ksb + h_kv * stride_ksh + at * stride_ksn
            x = x * tl.load(k_scale, mask=inside, other=0.0)[None, :]
        seen = key[None, :] <= place[:, None]
        if Mask is not None:
            if not is_run:
                shown = Mask + b * stride_mb + i.to(tl.int64)[:, None] * stride_mq
                seen = tl.load(shown + at[None, :] * stride_mn, mask=inside[None, :], other=0) != 0
        if LEFT >= 0:
            seen = seen & (key[None, :] >= place[:, None] - LEFT)
        x = tl.where(seen, x, -float("inf"))
        m_new = tl.maximum(m, tl.max(x, 1))
        # A row that has seen nothing yet has no maximum: x - m would be NaN.
        shift = tl.where(m_new == -float("inf"), 0.0, m_new)
        p = tl.exp2(x - (shift - BITS)[:, None])
        alpha = tl.exp2(m - shift)
        l = l * alpha + tl.sum(p, 1)
        m = m_new

        mask = inside[:, None] & (dv < D_V)[None, :]  # 0 * NaN
        v = tl.load(v_ptrs + at[:, None] * stride_vn, mask=mask, other=0.0)
        if V_scale is not None:
            v_scale = V_scale + b * stride_vsb + h_kv * stride_vsh + at * stride_vsn
            v_scale = tl.load(v_scale, mask=inside, other=0.0)
            c_new = tl.maximum(tl.max(tl.abs(v_scale), 0), c)
            inverse = 1.0 / c_new
            p, alpha, c = p * (v_scale * inverse)[None, :], alpha * (c * inverse), c_new
            v = v.to(tl.float16)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])

    acc = acc * (tl.where(l == 0, 0.0, 1.0 / l) * c)[:, None]
    here = ((b * H_q + h) * N_q + i) * S + split  # [BLOCK_M]
    tl.store(Lse + here, m + tl.log2(l) - BITS, mask=row < rows)
    mask = ((row < rows) & (l != 0))[:, None] & (dv < D_V)[None, :]
    tl.store(O + here[:, None] * D_V + dv[None, :], acc, mask=mask)


@triton.jit
def _combine_splits_kernel(
    O, Lse_of_splits,  # [B, H_q, N_q, S, D_V], [B, H_q, N_q, S] in, fp32; log2 units
    Out, Lse,  # [B, H_q, N_q, D_V], [B, H_q, N_q] out, fp32 the second
    stride_ob, stride_oh, stride_on,
    H_q, N_q, S,
    PDL: tl.constexpr, D_V: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Grid: (B * H_q * N_q,): a row, BLOCK_S splits at a time."""
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    b, h, i = row // N_q // H_q, row // N_q % H_q, row % N_q
    s, dv = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_DV)
    m, l = tl.cast(-float("inf"), tl.float32), tl.cast(0.0, tl.float32)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for first in range(0, S, BLOCK_S):
        here = row * S + first + s
        lse = tl.load(Lse_of_splits + here, mask=first + s < S, other=-float("inf"))
        m_new = tl.maximum(m, tl.max(lse, 0))
        shift = tl.where(m_new == -float("inf"), 0.0, m_new)
        weight, alpha = tl.exp2(lse - shift), tl.exp2(m - shift)
        # A split without keys stored no o.
        mask = (weight != 0)[:, None] & (dv < D_V)[None, :]
        o = tl.load(O + here[:, None] * D_V + dv[None, :], mask=mask, other=0.0)
        acc = acc * alpha + tl.sum(o * weight[:, None], 0)
        l = l * alpha + tl.sum(weight, 0)
        m = m_new
    acc = acc * tl.where(l == 0, 0.0, 1.0 / l)
    out = Out + b * stride_ob + h * stride_oh + i * stride_on + dv
    tl.store(out, acc.to(Out.dtype.element_ty), mask=dv < D_V)
    tl.store(Lse + row, (m + tl.log2(l)) * LN2)


class Plan(NamedTuple):
    BLOCK_M: int
    splits: int
    stages: int
    warps: int
    maxnreg: int | None  # of hopper/decode.py; None: this file's kernel


def plan(a: DecodeCall, gpu: torch.device | gpus.Gpu) -> Plan:
    """On sm_80 to sm_120 this file's kernel spills at most 8 bytes, and the least shared memory, 99
    KiB, holds it. Four warps spill from 64 rows of 128 channels on, eight with 64 rows of 256."""
    (B, H_q, N_q, D), (_, H_kv, N, D_v) = a.q.shape, a.v.shape
    rows, width = H_q // H_kv * N_q, pad_head_dim(max(int(D), int(D_v)))
    block_m = 16 if rows <= 16 else 32 if rows <= 32 or width == 256 else 64
    of_keys = BLOCK_N * width * (a.k.element_size() + a.v.element_size())  # bytes of a tile
    stages, warps = 3 if of_keys <= 32 << 10 else 2, 4 if block_m * width <= 4096 else 8
    programs, fewest, maxnreg = PROGRAMS, BLOCK_N, None
    if reads_words(a, gpu):
        block_m, warps, fewest = 8 if rows <= 8 else 16, WARPS, FEWEST
        stages, programs, maxnreg = OF_WORDS[block_m]
    splits = programs * gpus.processors(gpu) // (B * H_kv * triton.cdiv(rows, block_m))
    most = torch.sym_min(triton.cdiv(N, fewest), MOST)
    return Plan(block_m, torch.sym_max(torch.sym_min(splits, most), 1), stages, warps, maxnreg)


def reads_words(a: DecodeCall, gpu: torch.device | gpus.Gpu) -> bool:
    """Whether hopper/decode.py computes a call: codes that lie in words of four, and 16-bit q of
    which four lie in one of 8 bytes, for at most 16 rows. Its strides are compiled in, so packages,
    which do not know them, have this file's kernel."""
    (_, H_q, N_q, D), H_kv = a.q.shape, a.k.shape[1]

    def in_fours(x: Tensor) -> bool:
        known = all(isinstance(n, int) and n % 4 == 0 for n in x.stride()[:3])
        return known and x.data_ptr() % (4 * x.element_size()) == 0

    return (
        a.k.dtype in CODES
        and a.v.dtype in CODES
        and int(D) in HEAD_DIMS_OF_WORDS
        and int(a.v.shape[3]) in HEAD_DIMS_OF_WORDS
        and gpus.capability(gpu) == (9, 0)
        and H_q // H_kv * N_q <= 16
        and a.q.stride(3) == 1
        and all(map(in_fours, a[:3]))
        and hopper_unavailable((9, 0)) is None
    )


def launch(run: Callable, gpu: torch.device | gpus.Gpu, a: DecodeCall) -> tuple[Tensor, Tensor]:
    """``sage::decode``. A call that was traced was checked then."""
    if isinstance(gpu, torch.device):
        a.check()
    if torch.float8_e4m3fn in (a.k.dtype, a.v.dtype) and gpus.capability(gpu) < (8, 9):
        raise ValueError("sage::decode: E4M3 codes need a GPU of capability 8.9 or more")
    (B, H_q, N_q, D), (_, H_kv, N, D_v) = a.q.shape, a.v.shape
    D, D_v, rows = int(D), int(D_v), H_q // H_kv * N_q
    block_m, S, num_stages, num_warps, maxnreg = plan(a, gpu)
    pdl = HAS_PDL and gpus.capability(gpu) == (9, 0)
    k_strides, v_strides, mask_strides = (
        (0, 0, 0) if x is None else x.expand(B, n, N).stride()
        for x, n in ((a.k_scale, H_kv), (a.v_scale, H_kv), (a.mask, N_q))
    )
    run_stride = (0,) if a.is_run is None else a.is_run.expand(B).stride()
    of_splits = a.q.new_empty((B, H_q, N_q, S, D_v), dtype=torch.float32)
    lse_of_splits = a.q.new_empty((B, H_q, N_q, S), dtype=torch.float32)
    if maxnreg is None:
        kernel, option = _decode_kernel, {}
        tile = block_m, BLOCK_N, pad_head_dim(D), pad_head_dim(D_v), num_stages
    else:
        from sage_inductor.ops.attention.hopper.decode import decode_codes_kernel as kernel

        tile, option = (block_m, KEYS_OF_WARP, num_stages), {"maxnreg": maxnreg}
    run(
        kernel,
        (B * H_kv * triton.cdiv(rows, block_m), S),
        (a.q, a.k, a.v, a.k_scale, a.v_scale, a.mask, a.is_run, a.start, a.end, of_splits,
         lse_of_splits),
        (*a.q.stride(), *a.k.stride()[:3], *a.v.stride()[:3], *k_strides, *v_strides,
         *mask_strides, *run_stride, *a.start.expand(B).stride(), *a.end.expand(B).stride(),
         H_q, H_kv, N_q, N, rows, S,  # shape
         D, D_v, a.scale, -1 if a.left is None else min(a.left, MAX_ROWS),
         rotation_scale(D) if a.rotated else 0.0, pdl,  # semantics
         *tile),
        num_warps=num_warps, **option,
    )  # fmt: skip
    out, lse = empty_outputs(a.q, D_v, a.out_bnhd)
    run(
        _combine_splits_kernel,
        (B * H_q * N_q,),
        (of_splits, lse_of_splits, out, lse),
        (*out.stride()[:3],
         H_q, N_q, S,  # shape
         pdl, D_v, pad_head_dim(D_v), BLOCK_S),  # tile
        num_warps=4, **pdl_option(pdl),
    )  # fmt: skip
    return out, lse


def _decode(a: DecodeCall) -> tuple[Tensor, Tensor]:
    """softmax(scale * q k^T) v of 1 to 16 queries at the end of a cache.

    Arguments: DecodeCall's. Returns out [B, H_q, N_q, D_v] of q's dtype and lse [B, H_q, N_q]
    (natural log, fp32), neither differentiable. lse is of k as it is given: ``unsmoothed_lse``
    adds what was taken off every key. A row that sees no key is 0, its lse -inf. What keys hold
    before start and from end on does not matter, be it NaN. Raises ValueError or TypeError saying
    what must hold and what was got.
    """
    a.check()
    out, lse = reference.decode(a)
    return as_stored(out, a.out_bnhd), lse


def _seen_range(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """mask [B or 1, N_q, N] bool -> start and end [B or 1] for `decode`, int64: the first key that
    any query sees and the one after the last. Where none sees any they are N and 0. And is_run."""
    seen, (N_q, N) = mask.any(1), mask.shape[1:]
    key = torch.arange(N, device=mask.device)
    start, end = torch.where(seen, key, N).amin(1), torch.where(seen, key + 1, 0).amax(1)
    place = end[:, None] - N_q + torch.arange(N_q, device=mask.device)
    run = (key >= start[:, None, None]) & (key <= place[..., None])
    return start, end, (mask == run).flatten(1).all(1)


seen_range = torch.library.custom_op("sage::seen_range", _seen_range, mutates_args=())
seen_range.register_fake(
    lambda mask: tuple(
        mask.new_empty(mask.shape[:1], dtype=dtype)
        for dtype in (torch.int64, torch.int64, torch.bool)
    )
)
opens(seen_range, _seen_range)  # Inductor makes it once for all layers
decode = launched_by(
    lambda run, gpu, *args: launch(run, gpu, DecodeCall(*args)),
    schema_of(DecodeCall, tuple[Tensor, Tensor], DecodeCall.fake),
)(schema_of(DecodeCall, tuple[Tensor, Tensor], _decode))
