"""A cache of keys and values in INT8: ``sage::append_kv`` writes tokens, ``sage::read_kv`` gives
the cache as numbers. ``sage::decode`` reads the codes as they are.

    k_codes = round((k - anchor) / k_scale)     v_codes = round(v / v_scale)
    scale = amax of a token in a head / 127

anchor is a mean of keys, frozen: any is exact, as attention does not change by what is taken off
every key. Where the cache is rotated, (k - anchor) / 2 is rounded to 16 bits and rotated before
(rotate.py).

Shapes: B batch, H heads of k and v, n new tokens, N tokens that the cache has room for, D head_dim
(D_v of v).
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from sage_inductor.ops import gpus
from sage_inductor.ops.constants import INT8_MAX
from sage_inductor.ops.decode_call import check_cache, check_tensors
from sage_inductor.ops.formats import HEAD_DIMS, pad_head_dim, rotation_scale
from sage_inductor.ops.quantize.codes import abs_bits, scale_of, to_8bit
from sage_inductor.ops.quantize.rotate import in_16_bits, rotate
from sage_inductor.ops.reference import quantize as reference
from sage_inductor.ops.register import launched_by, opens

ROWS = 16  # of a program: a product of fewer channels is none of rotate's


@triton.jit
def _append_rows(
    X, Anchor, Codes, Scale, row, place, inside, stride_n, stride_d,
    ROTATED: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rows of X to their places, those that are `inside`; all pointers are a head's first."""
    d = tl.arange(0, BLOCK_D)
    mask = inside[:, None] & (d < D)[None, :]
    x = X + row[:, None] * stride_n + d.to(tl.int64)[None, :] * stride_d
    x = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    if Anchor is not None:
        x = tl.where(mask, x - tl.load(Anchor + d, mask=d < D, other=0.0)[None, :], 0.0)
    if ROTATED:
        x = rotate(in_16_bits(0.5 * x, X), ROWS, BLOCK_D)
    inverse, scale = scale_of(tl.max(abs_bits(x), 1), INT8_MAX)
    tl.store(Scale + place, scale, mask=inside)
    codes = to_8bit(x, inverse[:, None], INT8_MAX)
    tl.store(Codes + place[:, None] * D + d[None, :], codes, mask=mask)


@triton.jit
def _append_kv_kernel(
    K, V,  # [B, H, n, D], [B, H, n, D_V] in, 16-bit or fp32
    Anchor,  # [B, H, D] in, fp32
    Length,  # [] in, int32 or int64
    K_codes, V_codes,  # [B, H, N, D], [B, H, N, D_V] out, INT8
    K_scale, V_scale,  # [B, H, N] out, fp32
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    H, n, N,
    ROTATED: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Grid: (B * H * cdiv(n, ROWS), 2): ROWS tokens of a head of k, then of v."""
    tiles = tl.cdiv(n, ROWS)
    head, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    b, h = head // H, head % H
    row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    length = tl.load(Length).to(tl.int64)
    # As torch's index_copy_, by which transformers writes to a static cache.
    tl.device_assert(length + n <= N, "sage::append_kv: the cache has no room for these tokens")
    place = length + row
    inside = (row < n) & (place < N)
    if tl.program_id(1) == 0:
        _append_rows(
            K + b * stride_kb + h * stride_kh, Anchor + head * D, K_codes + head * N * D,
            K_scale + head * N, row, place, inside, stride_kn, stride_kd, ROTATED, D, ROWS, BLOCK_D,
        )  # fmt: skip
    else:
        _append_rows(
            V + b * stride_vb + h * stride_vh, None, V_codes + head * N * D_V, V_scale + head * N,
            row, place, inside, stride_vn, stride_vd, False, D_V, ROWS, BLOCK_DV,
        )  # fmt: skip


def _check(k_codes, k_scale, v_codes, v_scale, k, v, anchor, length, rotated) -> None:
    """Raise ValueError or TypeError unless the op is defined for these: its fake, too."""
    if dims := [x.dim() for x in (k_codes, v_codes, k, v) if x.dim() != 4]:
        raise ValueError(f"sage::append_kv: k, v and codes must have 4 dimensions, got {dims[0]}")
    (B, H, n, D), N, D_v = k.shape, k_codes.shape[2], v.shape[3]
    floats, fp32 = (torch.float16, torch.bfloat16, torch.float32), (torch.float32,)
    cache = (
        ("k_codes", k_codes, (B, H, N, D), (torch.int8,)), ("k_scale", k_scale, (B, H, N), fp32),
        ("v_codes", v_codes, (B, H, N, D_v), (torch.int8,)), ("v_scale", v_scale, (B, H, N), fp32),
        ("anchor", anchor, (B, H, D), fp32),
    )  # fmt: skip
    check_tensors(
        "sage::append_kv", (), *cache, ("k", k, (B, H, n, D), floats),
        ("v", v, (B, H, n, D_v), floats), ("length", length, (), (torch.int32, torch.int64)),
    )  # fmt: skip
    check_cache("sage::append_kv", k_codes, v_codes, rotated)
    if far := [name for name, x, *_ in cache if not x.is_contiguous()]:
        raise ValueError(f"sage::append_kv: the cache must be contiguous, {', '.join(far)} is not")
    if not 1 <= n <= N:
        raise ValueError(f"sage::append_kv: k must have 1 to {N} rows, as the cache has, got {n}")


def launch(
    run: Callable, gpu: torch.device | gpus.Gpu, k_codes: Tensor, k_scale: Tensor, v_codes: Tensor,
    v_scale: Tensor, k: Tensor, v: Tensor, anchor: Tensor, length: Tensor, rotated: bool,
) -> None:  # fmt: skip
    """``sage::append_kv``. A call that was traced was checked then."""
    if isinstance(gpu, torch.device):
        _check(k_codes, k_scale, v_codes, v_scale, k, v, anchor, length, rotated)
    (B, H, n, D), N, D_v = k.shape, k_codes.shape[2], int(v.shape[3])
    D = int(D)
    run(
        _append_kv_kernel,
        (B * H * triton.cdiv(n, ROWS), 2),
        (k, v, anchor, length, k_codes, v_codes, k_scale, v_scale),
        (*k.stride(), *v.stride(),
         H, n, N,  # shape
         rotated,  # semantics
         D, D_v, ROWS, pad_head_dim(D), pad_head_dim(D_v)),  # tile
        num_warps=4, debug=True, sanitize_overflow=False,  # else there is no device_assert
    )  # fmt: skip


@launched_by(launch, _check, mutates=("k_codes", "k_scale", "v_codes", "v_scale"))
def append_kv(
    k_codes: Tensor, k_scale: Tensor, v_codes: Tensor, v_scale: Tensor, k: Tensor, v: Tensor,
    anchor: Tensor, length: Tensor, rotated: bool,
) -> None:  # fmt: skip
    """Write the codes and scales of new tokens at `length` into a cache.

    k_codes and v_codes [B, H, N, D] and [.., D_v] int8, k_scale and v_scale [B, H, N] and anchor
    [B, H, D] fp32: the cache, contiguous. k, v [B, H, n, D] and [.., D_v] fp16, bf16 or fp32, any
    strides. length [], int32 or int64: where the first goes. rotated: k is of its half, rotated,
    which takes a D of HEAD_DIMS. A row with a NaN or an Inf has the scale NaN. Raises ValueError or
    TypeError saying what must hold and what was got. Tokens beyond N are not written: on CPU that
    raises IndexError, on a GPU it fails an assertion there, as transformers' static cache does.
    """
    _check(k_codes, k_scale, v_codes, v_scale, k, v, anchor, length, rotated)
    place = length + torch.arange(k.shape[2], device=k.device)
    less_anchor = reference.less_mean(k, anchor, rotated)
    for codes, scale, x in ((k_codes, k_scale, less_anchor), (v_codes, v_scale, v.float())):
        new_codes, new_scale = reference.quantize_tokens(x)
        codes.index_copy_(2, place, new_codes)
        scale.index_copy_(2, place, new_scale)


def _read_kv(
    codes: Tensor, scale: Tensor, anchor: Tensor | None, rotated: bool, dtype: torch.dtype
) -> Tensor:
    """k or v [B, H, N, D] of dtype that codes [B, H, N, D] int8 and scale [B, H, N] fp32 stand for.
    anchor and rotated: as `append_kv` was given them. Raises ValueError for a rotated D that is
    none of HEAD_DIMS."""
    x, D = codes.float(), codes.shape[3]
    if rotated:
        if D not in HEAD_DIMS:
            raise ValueError(f"sage::read_kv: head_dim must be one of {HEAD_DIMS}, got {D}")
        # fp32 holds sums of 128 codes. By bf16 the output's error is 2.3 %, not 1.7, where two
        # channels of k are 12 times as large as others.
        x = x @ reference.rotation(D, x.device).mT.float()
        scale = scale * rotation_scale(D)
    x = x.float() * scale[..., None]
    return (x if anchor is None else x + anchor[:, :, None]).to(dtype)


read_kv = torch.library.custom_op("sage::read_kv", _read_kv, mutates_args=())
read_kv.register_fake(_read_kv)
opens(read_kv, _read_kv)
