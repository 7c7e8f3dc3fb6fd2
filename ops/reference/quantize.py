"""The oracle of the preparation in plain PyTorch: smoothing, estimates and every format's rounding.

It quantizes, rounds and rescales exactly where the kernels do. It is also what the ops run on CPU
(``sage.emulate``), and what a CPU package holds: no loop over the sequence and next to no
arithmetic on lengths, so that it traces with symbolic ones in reasonable time.

Shapes: B batch, H heads (H_q of q, H_kv of k and v), N sequence, D head_dim; N_pad and D_pad:
formats.py. Padding is 0.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_inductor.ops import formats
from sage_inductor.ops.formats import NO_SHIFT, OF_HIDDEN, SAMPLE, TINY, Prepared, pad_rows
from sage_inductor.ops.recipe import Recipe


def smooth(x: Tensor, visible: Tensor | None = None, keep: bool = True) -> tuple[Tensor, Tensor]:
    """x [B, H, N, D] -> mean over N, and max |x - mean|, each [B, H, D] in fp32, of the rows that
    are `visible` [B or 1, H or 1, N] (none: 0). Unless `keep`, a mean that is within 3 standard
    errors of 0, the deviation taken for a quarter of that max, is 0: see NO_SHIFT."""
    if visible is None:
        count = x.shape[2]
        mean = x.mean(2, dtype=torch.float32)
        high, low = x.amax(2).float(), x.amin(2).float()
    else:
        shown, x = visible.bool()[..., None], x.float()
        count = shown.sum(2)  # [B or 1, H or 1, 1]
        mean = torch.where(shown, x, 0.0).sum(2) / count.clamp(min=1)
        high = torch.where(shown, x, -math.inf).amax(2)
        low = torch.where(shown, x, math.inf).amin(2)
    if not keep:
        deviation = torch.maximum(high - mean, mean - low) * 0.25
        noise = mean * mean * count <= deviation * deviation * NO_SHIFT
        mean = torch.where(noise, 0.0, mean)
    amax = torch.maximum(high - mean, mean - low)
    return mean, amax if visible is None else torch.where(count > 0, amax * OF_HIDDEN, 0.0)


def quantize_k(
    k: Tensor, k_mean: Tensor, recipe: Recipe, visible: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """k [B, H, N, D], k_mean [B, H, D] -> codes [B, H, N_pad, D_pad] (packed: [.., D_pad / 2]) and
    k_scale [B, H, N_pad / K_BLOCK, k_groups] in fp32. Rows that are not `visible` [B or 1, H or 1,
    N] have no part in the scales and saturate."""
    qk, groups = recipe.of_qk, recipe.sharing.k_groups
    x = pad(less_mean(k, k_mean, recipe.rotated))
    n = torch.arange(x.shape[2], device=k.device)
    # per_thread: columns {2j, 2j+1} + 8*{0..7} of 64
    group = n // formats.K_BLOCK * groups + n % 8 // 2 % groups
    if visible is not None:
        visible = F.pad(visible.bool(), (0, x.shape[2] - visible.shape[2]), value=True)
    codes, k_scale = _to_codes(x, qk, group, x.shape[2] // formats.K_BLOCK * groups, visible)
    return pack(codes) if qk.packed == 2 else codes, k_scale.unflatten(2, (-1, groups))


def less_mean(k: Tensor, k_mean: Tensor, rotated: bool) -> Tensor:
    """k [B, H, N, D] - k_mean [B, H, D] in fp32; rotated: of its half, [B, H, N, D_pad]."""
    x = k.float() - k_mean[:, :, None]
    return rotate(0.5 * pad(x, rows=False), k) if rotated else x


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [B, H, N, D] in fp32 -> codes of INT8, and a scale of each row [B, H, N] in fp32."""
    return _to_codes(x, formats.QK["int8"], torch.arange(x.shape[2], device=x.device), x.shape[2])


def pack(x: Tensor) -> Tensor:
    """x [..., D] of INT4 in int8 -> uint8 [..., D / 2]: channels 2i and 2i + 1 in a byte, the first
    in its low half."""
    low, high = x.view(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return low & 15 | high << 4


def unpack(x: Tensor) -> Tensor:
    """The inverse of `pack`."""
    return torch.stack([x << 4, x], -1).flatten(-2).view(torch.int8) >> 4


def quantize_v(
    v: Tensor, v_mean: Tensor, v_amax: Tensor, recipe: Recipe, saturate: bool = False
) -> tuple[Tensor, Tensor]:
    """v [B, H, N, D], v_mean and v_amax [B, H, D] -> codes [B, H, D_pad, N_pad] with the tokens of
    each 16 in `interleave` order, v_scale [B, H, D] in fp32. saturate: some rows had no part in
    v_mean and v_amax. Padding of the sequence is -v_mean: no p reads it."""
    pv = recipe.of_pv
    amax = torch.where(v_amax < TINY, TINY, v_amax)
    x = pad(v.float(), channels=False) - v_mean[:, :, None]
    if saturate:
        x = _saturate(x, amax[:, :, None])
    x = x * divide(pv.largest, amax)[:, :, None]
    x = F.pad(x, (0, formats.pad_head_dim(x.shape[3]) - x.shape[3])).clamp(-pv.largest, pv.largest)
    return interleave(x.mT).to(pv.dtype), amax * (1 / pv.largest)


def sample_rows(N: int, device=None) -> Tensor:
    """SAMPLE rows of N, one from each of SAMPLE equal parts. Its place within the part moves by the
    golden ratio, so that a period in the rows (the width of an image) does not fall in step."""
    i = torch.arange(SAMPLE, device=device)
    return (i * 65536 + (i * 40503 & 65535)) * N // (65536 * SAMPLE)


def estimate(
    x: Tensor, visible: Tensor | None = None, shrink: bool = True
) -> tuple[Tensor, Tensor]:
    """x [B, H, N, D] -> what stands for `smooth`'s mean and amax, of a sample of its rows, each
    [B, H, D] in fp32. Rows that are not `visible` [B or 1, H or 1, N] have no part in it.

    The mean of the sample, if `shrink` shrunk towards 0 the less it exceeds its standard error, by
    positive-part James-Stein: where there is no common part to take off, the sample's noise would
    only add to x. It is 0 then where the sample is not finite or nothing of it is visible. Any
    shift is exact.
    The amax of the sample less that shift, times HEADROOM: `quantize_v_checked` sees to the rest.
    """
    rows = sample_rows(x.shape[2], x.device)
    x, keep = x[:, :, rows].float(), torch.ones(1, 1, SAMPLE, 1, dtype=torch.bool, device=x.device)
    if visible is not None:
        keep = visible.bool()[:, :, rows, None]
    count = keep.sum(2)
    x = torch.where(keep, x, 0.0)
    mean, square = x.sum(2) / count, x.square().sum(2) / count
    if shrink:
        kept = 1.0 - NO_SHIFT / count * (square / mean.square() - 1.0)
        mean = torch.where(kept > 0, mean * kept.clamp(max=1.0), 0.0)
    away = (x - mean[:, :, None]).abs()
    away = torch.where(keep & (away < math.inf), away, 0.0)
    return mean, away.amax(2) * (formats.HEADROOM if visible is None else OF_HIDDEN)


def quantize_v_checked(
    v: Tensor, v_mean: Tensor, v_amax: Tensor, recipe: Recipe, visible: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`quantize_v` with an estimated v_amax. In a head where a visible row is beyond it, amax is
    taken of all visible rows."""
    away = (v.float() - v_mean[:, :, None]).abs()
    if visible is not None:
        away = torch.where(visible.bool()[..., None], away, 0.0)
    amax = torch.where(v_amax < TINY, TINY, v_amax)
    beyond = ~(away <= amax[:, :, None])  # so is NaN
    beyond = beyond.flatten(2).any(2)[..., None]  # [B, H, 1]
    found = away.amax(2) * (1.0 if visible is None else OF_HIDDEN)
    amax = torch.where(beyond, found, amax)
    return quantize_v(v, v_mean, amax, recipe, visible is not None)


def quantize_kv(
    k: Tensor, v: Tensor, visible: Tensor | None, recipe: Recipe, tail_block: int | None = None,
    perm: Tensor | None = None, spans: Tensor | None = None, documents: Tensor | None = None,
) -> Prepared:  # fmt: skip
    """As ../quantize/op.py's launch_prepare: k and, where the recipe quantizes it, v, by statistics
    of all rows or, in one pass, of a sample."""
    if spans is not None:
        return _of_documents(k, v, recipe, perm, spans)
    if perm is not None:
        k = k.index_select(2, perm)
        v = v if recipe.of_pv.dtype is None else v.index_select(2, perm)
    if tail_block is not None:
        prepared = quantize_kv(k, v, visible, recipe)
        return prepared._replace(**_tail(k, v, prepared, visible, recipe, tail_block))
    one_pass, saturate = recipe.sharing.one_pass, visible is not None
    if recipe.of_pv.block_scaled:
        (k_mean, k_amax), (v_mean, v_amax) = smooth(k, visible), smooth(v, visible)
        k_codes, k_blocks, k_scale = quantize_nvfp4(k, k_mean, k_amax, False, saturate)
        v_codes, v_blocks, v_scale = quantize_nvfp4(v, v_mean, v_amax, True, saturate)
        return Prepared(k_codes, k_scale, k_mean, v_codes, v_scale, v_mean, k_blocks, v_blocks)
    k_mean, _ = estimate(k, visible) if one_pass else smooth(k, visible)
    of_k = *quantize_k(k, k_mean, recipe, visible), k_mean
    if recipe.of_pv.dtype is None:
        return Prepared(*of_k)
    if one_pass:
        v_mean, v_amax = estimate(v, visible)
        return Prepared(*of_k, *quantize_v_checked(v, v_mean, v_amax, recipe, visible), v_mean)
    v_mean, v_amax = smooth(v, visible, keep=False)
    return Prepared(*of_k, *quantize_v(v, v_mean, v_amax, recipe, saturate), v_mean)


def _of_documents(k, v, recipe: Recipe, perm: Tensor, spans: Tensor) -> Prepared:
    """`quantize_kv` of one document after another. Places of no document are 0."""
    (_, H, _, D), D_v, P, S = k.shape, v.shape[3], perm.shape[0], spans.shape[0]
    of_k, of_v = (k.new_zeros((S, H, n), dtype=torch.float32) for n in (D, D_v))
    codes = k.new_zeros((1, H, P, formats.pad_head_dim(D)), dtype=recipe.of_qk.dtype)
    scale = of_k.new_zeros((1, H, P // formats.K_BLOCK, recipe.sharing.k_groups))
    v_codes = v.new_zeros((1, H, formats.pad_head_dim(D_v), P), dtype=recipe.of_pv.dtype)
    found = Prepared(codes, scale, of_k, v_codes, of_v, of_v.clone())
    for s, (first, length, *_) in enumerate(spans.tolist()):
        if length:
            tokens, end = perm[first : first + length], first + formats.pad_rows(length)
            one = quantize_kv(k[:, :, tokens], v[:, :, tokens], None, recipe)
            found.k[:, :, first:end], found.v[..., first:end] = one.k, one.v
            found.k_scale[:, :, first // formats.K_BLOCK : end // formats.K_BLOCK] = one.k_scale
            for all_of, x in zip((of_k, *found[4:6]), (one.k_mean, *one[4:6]), strict=True):
                all_of[s] = x[0]
    return found


def _tail(k, v, prepared: Prepared, visible, recipe: Recipe, block: int) -> dict[str, Tensor]:
    (B, H, N, _), T = k.shape, (k.shape[2] + block - 1) // block
    shown = F.pad(visible.float(), (0, T * block - N)).unflatten(2, (T, block))
    count = shown.sum(3)

    def mean(x: Tensor) -> Tensor:
        x = F.pad(x.float(), (0, 0, 0, T * block - N)).unflatten(2, (T, block))
        return torch.where(shown[..., None] > 0, x, 0.0).sum(3) / count[..., None].clamp(min=1)

    codes, scale = quantize_k(mean(k), prepared.k_mean, recipe)
    of_v = pad(mean(v), rows=False).to(of_16_bits(v))
    if prepared.v is not None:
        by = prepared.v_mean, prepared.v_scale * recipe.of_pv.largest, recipe
        of_v = quantize_v(mean(v), *by)[0]
    bias = F.pad(count.log2(), (0, pad_rows(T) - T), value=-math.inf).expand(B, H, -1)
    return dict(tail_k=codes, tail_k_scale=scale, tail_v=of_v, tail_bias=bias.contiguous())


def interleave(x: Tensor) -> Tensor:
    """Reorder each 16 columns from (half, quad, pair) = (2, 4, 2) to (quad, half, pair).

    It is the order in which a thread of an ``mma`` accumulator holds the columns of p, so that p
    becomes the 8-bit A operand of the next product without moving between threads. v's tokens
    are stored in the same order; a sum over tokens does not depend on it.
    """
    c = torch.arange(x.shape[-1], device=x.device)
    return x[..., c // 16 * 16 + c // 2 % 2 * 8 + c // 4 % 4 * 2 + c % 2].contiguous()


def quantize_q(q: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """q [B, H, N, D] -> codes [B, H, N, D] (unpacked; rotated [.., D_pad]), q_scale [B, H, N, 1] in
    fp32, one value per group."""
    if recipe.rotated:
        q = rotate(pad(q, rows=False), q)
    n, (span, groups) = torch.arange(q.shape[2], device=q.device), recipe.sharing[:2]
    group = n // span * groups + n % groups
    count = (q.shape[2] + span - 1) // span * groups
    codes, scale = _to_codes(q.float(), recipe.of_qk, group, count)
    return codes, scale[:, :, group, None]


def rotate(x: Tensor, like: Tensor) -> Tensor:
    """x [.., D_pad], rounded to like's 16 bits -> x R in fp32: ../quantize/rotate.py."""
    # The product of a transposed x is traced as a view that x of other lengths does not have.
    x = x.to(of_16_bits(like)).double().clone(memory_format=torch.contiguous_format)
    return (x @ rotation(x.shape[-1], x.device)).float()


def turn_back(x: Tensor) -> Tensor:
    """x R^T / n in fp32, the inverse of `rotate`, of codes [.., D_pad]."""
    back = rotation(x.shape[-1], x.device).mT / min(x.shape[-1], formats.ROTATED)
    return (x.double() @ back).float()


def rotation(D_pad: int, device: torch.device) -> Tensor:
    """R [D_pad, D_pad] in fp64: ../quantize/rotate.py."""
    c = torch.arange(D_pad, device=device)
    bit = [c >> i & 1 for i in range(7)]
    odd = bit[0] * bit[1] + bit[2] * bit[5] + bit[3] * bit[4]
    odd = odd[:, None] + sum(b[:, None] * b for b in bit)
    blocks = c // formats.ROTATED
    return torch.where(blocks[:, None] == blocks, 1.0 - 2.0 * (odd & 1), 0.0).double()


def of_16_bits(x: Tensor) -> torch.dtype:
    return torch.bfloat16 if x.dtype == torch.float32 else x.dtype


def power_of_two(amax: Tensor) -> tuple[Tensor, Tensor]:
    """(1 / scale, scale) of amax >= 0 in fp32: amax / scale is in [1024, 2048), from 2^-100 on."""
    exponent = (amax.view(torch.int32) >> 23).clamp(min=27)
    inverse = ((264 - exponent) << 23).view(torch.float32)
    return inverse, ((exponent - 10) << 23).view(torch.float32)


def phi(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [.., C] in fp32 -> codes of E2M1 [.., C], uint8, and of E4M3 scales [.., C / 16], uint8: of
    each 16. A block with a NaN or an Inf has the scale NaN."""
    x = x.unflatten(-1, (-1, formats.FP4_BLOCK))
    amax = x.abs().amax(-1)
    scale = amax * (1 / formats.FP4_MAX)
    e4m3 = torch.where(scale < formats.E4M3_MAX, scale, formats.E4M3_MAX).to(torch.float8_e4m3fn)
    scale = e4m3.float()
    x = x * torch.where(scale > 0, divide(1.0, scale), 0.0)[..., None]
    a = torch.where(x.abs() < formats.FP4_MAX, x.abs(), formats.FP4_MAX)
    above = (a >= 2).to(torch.uint8) + (a >= 4).to(torch.uint8)  # steps of 1/2, 1 and 2
    code = (a * torch.exp2(1.0 - above)).round().to(torch.uint8) + 2 * above
    code = code + 8 * x.signbit().to(torch.uint8)
    return code.flatten(-2), torch.where(amax < math.inf, e4m3.view(torch.uint8), 0x7F)


def phi_inverse(code: Tensor, scale: Tensor) -> Tensor:
    """What `phi`'s codes stand for, in fp32: exactly."""
    c = code & 7
    exponent = (c >> 1).clamp(min=1)
    value = torch.where(c < 2, c, 2 + (c & 1)) * torch.exp2(exponent.float() - 2)
    value = torch.where(code < 8, value, -value).unflatten(-1, (-1, formats.FP4_BLOCK))
    return (value * scale.view(torch.float8_e4m3fn).float()[..., None]).flatten(-2)


def quantize_nvfp4(
    x: Tensor, mean: Tensor, amax: Tensor, along_n: bool, saturate: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """x [B, H, N, D], mean and amax [B, H, D] -> x_fp4 [B, H, R, C / 2], two codes of E2M1 a byte,
    x_e4m3 [B, H, R, C / 16], both uint8, and x_scale [B, H, (D)] in fp32: of k, R, C are N_pad and
    D_pad and D is left out; of v (along_n) D_pad and N_pad. saturate: some rows had no part in
    mean and amax."""
    x = x.float() - mean[:, :, None]
    if saturate:
        x = _saturate(x, amax[:, :, None] * (formats.OF_HIDDEN_FP4 / OF_HIDDEN))
    inverse, scale = power_of_two(amax if along_n else amax.amax(2))
    x = pad(x * (inverse[:, :, None] if along_n else inverse[:, :, None, None]))
    code, e4m3 = phi(x.mT.contiguous() if along_n else x)
    return code[..., ::2] | code[..., 1::2] << 4, e4m3, scale


def _to_codes(
    x: Tensor, qk: formats.Format, group: Tensor, num_groups: int, visible: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x [B, H, N, D], group [N], the group of each row -> codes (integers in int8), scale
    [B, H, num_groups]."""
    amax = x.abs().amax(3)  # [B, H, N]

    def of_groups(amax: Tensor) -> Tensor:
        zeros = amax.new_zeros(*x.shape[:2], num_groups)
        return zeros.scatter_reduce(2, group.expand_as(amax), amax, "amax")

    if visible is None:
        amax = of_groups(amax)
    else:  # where a group has no visible row, by its own
        of_visible = of_groups(torch.where(visible, amax, 0.0))
        of_hidden = of_groups(torch.where(amax < math.inf, amax, 0.0))
        amax = torch.where(of_visible == 0, of_hidden, of_visible)
    amax = torch.where(amax < TINY, TINY, amax)  # keeps NaN: a group with a NaN has a NaN scale
    if visible is not None:
        x = _saturate(x, amax[:, :, group, None])
    inverse = divide(qk.largest, amax)[:, :, group, None]
    if not qk.is_integer:
        x = (x * inverse).clamp(-qk.largest, qk.largest)
    else:  # in float64 the product is exact: it is rounded once, as the kernels' fma does
        x = (x.double() * inverse.double()).round()
    # An Inf makes the scale NaN: of Inf, rows of zeros and -Inf would hide it.
    scale = torch.where(amax.isinf(), torch.nan, amax * (1 / qk.largest))
    return x.to(torch.int8 if qk.is_integer else qk.dtype), scale


def _saturate(x: Tensor, amax: Tensor) -> Tensor:
    """x within +-amax, where amax is a number; NaN becomes a number too."""
    saturated = torch.where(x.isnan(), -amax, torch.minimum(torch.maximum(x, -amax), amax))
    return torch.where(amax.isnan(), x, saturated)


def divide(x: float, y: Tensor) -> Tensor:
    """x / y rounded once. PyTorch computes number / tensor as number * reciprocal."""
    return torch.full_like(y, x) / y


def pad(x: Tensor, channels: bool = True, rows: bool = True) -> Tensor:
    rows = pad_rows(x.shape[2]) - x.shape[2] if rows else 0
    return F.pad(x, (0, formats.pad_head_dim(x.shape[3]) - x.shape[3] if channels else 0, 0, rows))
