"""How the Hopper kernel is launched: which calls it computes, and the plan of one.

A plan is made once for all calls with the same shapes and strides: descriptors, grid, how many
tiles are computed whole, and the launch that adds up the pieces of the others.
"""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl

from sage_inductor.ops import gpus
from sage_inductor.ops.attention import tiles
from sage_inductor.ops.attention.hopper import tile_lists
from sage_inductor.ops.attention.hopper.kernel import _combine_kernel, _hopper_kernel
from sage_inductor.ops.attention.tiles import Tile
from sage_inductor.ops.attention_call import AttentionCall, broadcast_strides
from sage_inductor.ops.compat import GluonDescriptor
from sage_inductor.ops.formats import pad_head_dim, pad_rows
from sage_inductor.ops.launch import doubled

# By warpgroups: at launch, then of a consumer. One that is alone keeps its tile's maxnreg.
REGISTERS = {2: (168, 240), 3: (128, 160)}
# Rows of k in all heads: TMA counts them in 32 bits. The kernel counts heads times 256 channels in
# 32 bits, and a head has at least 128 rows of k.
MAX_K_ROWS = 2**30
# Bytes of k and v that concurrently running causal tiles may share in L2. Doubled if that gives
# exactly two groups of heads, which the programs share evenly. Gain: 1.15x (3 heads, N=61,427),
# 1.16x (6 heads, N=40,000). More groups gain nothing: 0.97x (64 heads, N=16,384; H200, 2026-11-25).
L2_BYTES = 24 << 20


def reads(a: AttentionCall) -> bool:
    """Whether this kernel can read the tensors of a call that it computes (tiles.suits_hopper):
    16-bit q with its channels side by side, fewer than MAX_K_ROWS rows of k in all heads, and
    16-bit v in 16-byte rows at 16-byte addresses."""
    q = a.q
    return (
        q.dtype in (torch.float16, torch.bfloat16)
        and q.stride(3) == 1
        and a.k.shape[:3].numel() < MAX_K_ROWS
        and (a.decoded.pv != "16bit" or _fits_tma(a.v))
    )


def registers(tile: Tile) -> tuple[int, int]:
    """A thread's: at launch, then of a consumer."""
    return REGISTERS.get(tile.warpgroups, (tile.maxnreg,) * 2)


def _fits_tma(x: Tensor) -> bool:
    strides = [s for n, s in zip(x.shape[:3], x.stride(), strict=False) if n > 1]
    aligned = all(s > 0 and s * x.element_size() % 16 == 0 for s in strides)
    return aligned and x.stride(3) == 1 and x.data_ptr() % 16 == 0


def launch(
    a: AttentionCall, tile: Tile, run: Callable, device: torch.device | None = None,
    keeps_max: bool = False, own: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out [B, H_q, N_q, D_v] of q's dtype and lse [B, H_q, N_q] fp32, of a call that it
    can read (`reads`). device: q's, if that is on meta. Sizes may be known only later
    (lowering/record.py): no plan is kept for those. keeps_max: lse is [2, B, H_q, N_q], and the
    second is the largest score of each row, in log2 units. own: k's codes by one scale a row, and
    those scales [B, H_kv, N_pad] fp32, for the keys near the diagonal (kernel.py: OWN)."""
    q, k, v = a.q, a.k, a.v
    out, lse = a.empty_outputs()
    if keeps_max:
        lse = lse.new_empty((2, *lse.shape))
    lists, *list_numbers = a.list_arguments()
    list_numbers = sum(map(tuple, list_numbers), ())
    plan_of = _plan if isinstance(q, Tensor) else _plan.__wrapped__
    plan = plan_of(
        device or q.device, (*q.shape[:2], a.n_q, q.shape[3]), q.stride(), k.shape, v.dtype,
        v.shape, v.stride(), out.shape[3], out.stride(), a.band_arguments(), a.scale_of_codes,
        a.n_kv, tile,
        None if a.attn_mask is None else (a.attn_mask.shape, a.attn_mask.stride()),
        None if a.blocks.size is None else (a.blocks.kv_num_blocks.shape[:2], list_numbers),
        a.decoded.rotated, keeps_max, own is not None, a.tail_block or 0,
    )  # fmt: skip
    of_tail = zip(plan.tail or [None] * 3, (a.tail_k, a.tail_v, a.tail_bias), strict=True)
    k_tail, v_tail, bias = (each and _at(each, x) for each, x in of_tail)
    part = part_ml = k_own = k_own_scale = words = codes = list_ = None
    if plan.parts:
        part, part_ml = (lse.new_empty(n) for n in plan.parts)
    k, v = _at(plan.k, k), _at(plan.v, v)
    if own is not None:
        k_own, k_own_scale = _at(plan.k, own[0]), _at(plan.k_own_scale, own[1])
    if plan.mask:
        words, codes = (lse.new_empty(n, dtype=dtype) for n, dtype in plan.mask.made)
        plan.mask.pack.by(run, a.attn_mask, words, codes)
    if plan.lists:
        list_ = lse.new_empty(plan.lists.made, dtype=torch.int32)
        plan.lists.make.by(run, codes, *lists, list_)
        plan.lists.rank.by(run, list_)
    of_v = v, a.v_scale, a.v_mean
    plan.attend.by(
        run, q, k, a.k_scale, k_own, k_own_scale, k_tail, a.tail_k_scale, v_tail, bias, *of_v,
        words, list_, a.perm, a.documents, out, lse, part, part_ml,
    )  # fmt: skip
    if plan.combine:
        plan.combine.by(run, part, part_ml, a.v_scale, a.v_mean, out, lse)
    return out, lse


class _Launch(NamedTuple):
    """A launch without its tensors."""

    kernel: triton.JITFunction
    grid: tuple[int, int, int]
    numbers: tuple
    options: dict = {}

    def by(self, run: Callable, *tensors) -> None:
        run(self.kernel, self.grid, tensors, self.numbers, **self.options)


class _Mask(NamedTuple):
    """What is made of a mask before: tile_lists.py."""

    made: tuple  # (elements, dtype) of Words and Codes
    strides: tuple  # of Words, as the kernel takes them
    heads: tuple  # of the mask: B or 1, H_q or 1
    of_codes: tuple  # their strides of a batch and a head, and how many row_tiles
    pack: _Launch


class _Lists(NamedTuple):
    """What is made of a mask, or of the caller's lists, or of both: tile_lists.py."""

    made: int  # elements of List
    strides: tuple  # as the kernel takes them
    make: _Launch
    rank: _Launch


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What `launch` does for all calls with the same shapes and strides."""

    k: GluonDescriptor  # of no tensor yet
    k_own_scale: GluonDescriptor | None
    v: GluonDescriptor
    tail: tuple[GluonDescriptor, ...]  # its k, v and bias
    mask: _Mask | None
    lists: _Lists | None
    attend: _Launch
    parts: tuple[int, int] | None  # elements of Part and of Part_ml, if tiles are split
    combine: _Launch | None


@functools.lru_cache(maxsize=4096)
def _plan(
    device, q_shape, q_stride, k_shape, v_dtype, v_shape, v_stride, D_v, out_stride,
    band, scale, n_kv, tile, of_mask, of_lists, rotated, keeps_max, has_own,
    tail_block,
) -> _Plan:  # fmt: skip
    B, H_q, N_q, D = q_shape
    H_kv, N_pad, BLOCK_D = k_shape[1:]
    fp8, BLOCK_DV = v_dtype == torch.float8_e4m3fn, pad_head_dim(D_v)
    # Keys of a block in List: the most that divide a step and the caller's blocks; 0: no List.
    of_list = math.gcd(tile.BLOCK_N, of_lists[1][-2]) if of_lists else tile.BLOCK_N * bool(of_mask)
    heads, keys, tail = B * H_kv, of_list or tile.BLOCK_N, ()

    def of_k(rows) -> GluonDescriptor:
        return _descriptor(torch.int8, (heads * rows, BLOCK_D), (BLOCK_D, 1), [keys, BLOCK_D])

    def of_keys(rows) -> GluonDescriptor:
        return _descriptor(torch.float32, (heads * rows,), (1,), [tile.BLOCK_N])

    def of_v(rows, shape, strides) -> GluonDescriptor:
        if not fp8:
            return _descriptor(v_dtype, shape, strides, [1, 1, keys, BLOCK_DV])
        return _descriptor(v_dtype, (heads * BLOCK_DV, rows), (rows, 1), [BLOCK_DV, keys])

    if tail_block:
        T = triton.cdiv(n_kv, tail_block)
        shape, strides = (B, H_kv, T, BLOCK_DV), (H_kv * T * BLOCK_DV, T * BLOCK_DV, BLOCK_DV, 1)
        tail = of_k(pad_rows(T)), of_v(pad_rows(T), shape, strides), of_keys(pad_rows(T))
    k, v = of_k(N_pad), of_v(N_pad, v_shape, v_stride)
    k_own_scale = of_keys(N_pad) if has_own else None
    num_m, blocks = triton.cdiv(N_q, tile.BLOCK_M), triton.cdiv(n_kv, tile.BLOCK_N)
    num_tiles, processors, group = B * H_q * num_m, gpus.processors(device), 1
    mask = None if of_mask is None else _mask(*of_mask, N_q, n_kv, of_list)
    lists = None
    if of_list:
        lists = _lists(mask, of_lists, (B, H_q), N_q, n_kv, band, tile, of_list, tail_block)
    shares, (left, right, _) = None, band
    if lists or left < 0 <= right:  # rows of other lengths; an even number of groups: _tile_coords
        of_kv = n_kv * (BLOCK_D + BLOCK_DV * v_dtype.itemsize)
        most = triton.cdiv(processors, num_m) if lists else None  # a tile for each program
        group = _heads_of_a_group(B * H_q, H_q // H_kv, of_kv, most)
    elif left < 0 and tile.warpgroups > 1:
        shares = tiles.schedule(num_tiles, blocks, processors)
    split = shares is not None
    at_once = num_tiles if tile.warpgroups == 1 else torch.sym_min(num_tiles, processors)
    programs, whole_tiles = shares or (at_once, num_tiles)
    at_launch, consumer = registers(tile)
    attend = _Launch(
        _hopper_kernel,
        (programs, 1, 1),
        (*doubled(q_stride)[:3], *doubled(out_stride)[:3], *(mask.strides if mask else (0,) * 3),
         *(lists.strides if lists else (0,) * 3),
         B * H_q, H_q, H_kv, 2 * N_q, 2 * n_kv, N_pad, group, whole_tiles,  # shape
         D, D_v, scale, *band, of_list, mask is not None, split, rotated, fp8,
         keeps_max, has_own, tail_block,
         tile.BLOCK_N, BLOCK_D, BLOCK_DV, tile.warpgroups, tile.num_stages, consumer),  # tile
        dict(num_warps=tile.num_warps, maxnreg=at_launch),
    )  # fmt: skip
    if not split:
        return _Plan(k, k_own_scale, v, tail, mask, lists, attend, None, None)
    rows = 2048 // BLOCK_DV
    combine = _Launch(
        _combine_kernel,
        (num_tiles - whole_tiles, tile.BLOCK_M // rows, 1),
        (*doubled(out_stride)[:3],
         B * H_q, H_q, H_kv, N_q, num_m, whole_tiles, blocks, programs,  # shape
         D_v, fp8, keeps_max,  # semantics
         tile.BLOCK_M, BLOCK_DV, rows),  # tile
    )  # fmt: skip
    slots = 2 * programs * tile.BLOCK_M
    parts = slots * BLOCK_DV, slots * 2
    return _Plan(k, k_own_scale, v, (), None, None, attend, parts, combine)


def _heads_of_a_group(heads, of_one_kv, kv_bytes, most) -> int:
    """Heads of q whose tiles follow each other by length (kernel.py's _tile_coords), in an even
    number of groups. of_one_kv: that share k and v, which have kv_bytes. most: or None."""
    fit = L2_BYTES // kv_bytes * of_one_kv
    if most is None:
        half = triton.cdiv(heads, 2)
        fit = torch.sym_max(fit, half * torch.sym_min(1, 2 * fit // torch.sym_max(1, half)))
    else:
        fit = torch.sym_min(fit, most)
    groups = triton.cdiv(heads, torch.sym_max(1, fit))
    return triton.cdiv(heads, torch.sym_max(1, groups + groups % 2))


def _mask(shape, strides, N_q, n_kv, keys) -> _Mask:
    """By attn_mask's shape and strides. keys: of a block in List."""
    (B, H), a_row_each = shape[:2], shape[2] != 1
    row_tiles = triton.cdiv(N_q, 64) if a_row_each else 1
    rows = 64 if a_row_each else 1  # of each of them
    blocks = triton.cdiv(n_kv, keys)
    words = triton.cdiv(blocks * keys, 512) * 16  # of a row: whole vectors
    pack = _Launch(
        tile_lists._pack_mask_kernel,
        (B * H * row_tiles * blocks, 1, 1),
        (*broadcast_strides(shape, strides), H, 2 * N_q, 2 * n_kv, row_tiles, blocks, words,
         rows, keys),
    )  # fmt: skip
    made = (
        (B * H * row_tiles * rows * words, torch.int32),
        (B * H * row_tiles * blocks, torch.uint8),
    )
    of_words = *_strides_of_heads((B, H), row_tiles * rows * words), words if a_row_each else 0
    of_codes = *_strides_of_heads((B, H), row_tiles * blocks), row_tiles
    return _Mask(made, of_words, (B, H), of_codes, pack)


def _lists(
    mask: _Mask | None, of_lists, heads, N_q, n_kv, band, tile, keys, tail_block: int = 0
) -> _Lists:
    """of_lists: the caller's lists' heads (B or 1, H_q or 1) and `AttentionCall.list_arguments`'s
    numbers, or None. heads: B, H_q. keys: of a block in List."""
    blocks, num_m = triton.cdiv(n_kv, keys), triton.cdiv(N_q, tile.BLOCK_M)
    of_caller, numbers = of_lists or ((1, 1), (0,) * 6 + (False,))
    *list_strides, kv_width, full_width, block_q, block_kv, full = numbers
    of_mask = mask.heads if mask else (1, 1)
    B, H = (n if any(x != 1 for x in found) else 1
            for n, *found in zip(heads, of_caller, of_mask, strict=True))  # fmt: skip
    entries = blocks
    if of_lists:
        apart = 1 if block_q % tile.BLOCK_M == 0 else tile.warpgroups if block_q == 64 else 2
        entries = apart * (kv_width + full * full_width) * (block_kv // keys)
    width = tile_lists.BEFORE_ENTRIES.value + entries
    width += room_for_tail(tile, n_kv, tail_block)
    make = _Launch(
        tile_lists._list_tiles_kernel,
        (B * H * num_m, 1, 1),
        (*(mask.of_codes[:2] if mask else (0, 0)), *list_strides, kv_width, full_width,
         H, 2 * N_q, 2 * n_kv, num_m, mask.of_codes[2] if mask else 1, blocks, width,
         *band, mask is not None, block_q, block_kv, full, tail_block,
         tile.warpgroups, keys, 512),
    )  # fmt: skip
    rank = _Launch(
        tile_lists._rank_tiles_kernel, (B * H, triton.cdiv(num_m, 64), 1), (num_m, width, 64)
    )
    strides = *_strides_of_heads((B, H), num_m * width), width
    return _Lists(B * H * num_m * width, strides, make, rank)


def room_for_tail(tile: Tile, n_kv, tail_block: int | None):
    """Numbers of a row of List between tile and the entries: tile_lists.tail_words, and one."""
    return tile.warpgroups * (triton.cdiv(n_kv, tail_block * 128) * 4) + 1 if tail_block else 0


def _strides_of_heads(heads, of_one) -> tuple:
    """The strides of a batch and a head of `of_one` elements: 0 where there is one for all."""
    B, H = heads
    return 0 if B == 1 else H * of_one, 0 if H == 1 else of_one


def described(x: Tensor, block: tuple[int, ...]) -> GluonDescriptor:
    """x, for TMA by blocks. Checked once for tensors of the same shape, strides and dtype: that
    takes 10 us (an H200's host, 2026-11-24)."""
    return _at(_described(x.dtype, x.shape, x.stride(), block), x)


@functools.lru_cache(maxsize=4096)
def _described(dtype: torch.dtype, shape, strides, block: tuple[int, ...]) -> GluonDescriptor:
    return _descriptor(dtype, shape, strides, list(block))


def _descriptor(dtype: torch.dtype, shape, strides, block: list[int]) -> GluonDescriptor:
    """Checked, but of no tensor: `_at` says of which."""
    layout = gl.NVMMASharedLayout.get_default_for(block, _DTYPES[dtype])
    strides = [s if n > 1 else 16 for n, s in zip(shape[:-1], strides, strict=False)]
    nothing = torch.empty(0, dtype=dtype, device="meta")
    return GluonDescriptor(nothing, list(shape), [*strides, 1], block, layout)


def _at(descriptor: GluonDescriptor, x: Tensor) -> GluonDescriptor:
    descriptor = copy.copy(descriptor)  # two threads may launch it
    descriptor.base = x
    return descriptor


_DTYPES = {
    torch.int8: gl.int8, torch.float8_e4m3fn: gl.float8e4nv,
    torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32,
}  # fmt: skip
