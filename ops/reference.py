"""Oracles in plain PyTorch: exact attention, and the bit-faithful emulation of every op.

The emulation quantizes, rounds and rescales exactly where the kernels do. It is also what the
ops run on CPU (``sage.emulate``), and what a CPU package holds: no loop over the sequence and
next to no arithmetic on lengths, so that it traces with symbolic ones in reasonable time.

Shapes: B batch, H heads (H_q of q, H_kv of k and v), N sequence, D head_dim.
``x_pad``: N rounded up to a multiple of PAD_N, D to HEAD_DIMS' next entry; padding is 0.
A band (left, right, bottom_right): query i sees keys i - left .. i + right; None is no bound;
bottom_right counts i so that the last query is at the last key, else both start at 0.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

PAD_N = 128  # rows of k and v the kernels read in one tile, at most
MAX_ROWS = 2**30 - 256  # of a sequence: twice that, rounded up to a tile, is a 32-bit number
K_BLOCK = 64  # rows of k that four scales (per_thread) or one (otherwise) cover
HEAD_DIMS = (64, 128, 256)  # what the kernels compute; smaller head_dims are padded in their loads
Q_BLOCK = 128  # rows of q that share a mean, where q is smoothed
INT8_MAX, FP8_MAX, INT4_MAX = 127.0, 448.0, 7.0
LOG2_FP8_MAX = math.log2(FP8_MAX)
# Of k, by Recipe.qk; no two alike, so that a dtype tells the format. INT4: two in a byte.
QK_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.uint8}
LARGEST = {"int8": INT8_MAX, "fp8": FP8_MAX, "int4": INT4_MAX}  # of q and k; also tells the format
FP4_BLOCK, FP4_MAX = 16, 6.0  # E2M1: numbers that share a scale in E4M3, the largest
LOG2_FP4_MAX = math.log2(FP8_MAX * FP4_MAX)  # of the largest that the two make
TINY = 1e-30  # amax of an all-zero group: 448 / TINY is still finite in fp32
LOG2E = 1.4426950408889634
SAMPLE = 128  # rows that statistics are estimated from, where one pass prepares k and v
NO_SHIFT = 9.0  # (3 standard errors)^2: a sample's mean this small is noise, and no shift is better
HEADROOM = 4.0  # of v's scale over the sample's amax: 2 of the 15 octaves of E4M3's normal numbers


def attention_exact(
    q, k, v, scale: float, attn_mask=None, left=None, right=None, bottom_right=False
) -> tuple[Tensor, Tensor]:
    """Exact attention in float64: out [B, H_q, N_q, D_v], lse [B, H_q, N_q].
    A row that sees no key is 0, its lse -inf."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    s = q @ k.mT * scale  # [B, H_q, N_q, N_kv]
    s = masked(s, attn_mask, left, right, bottom_right)
    empty = (s == -math.inf).all(-1, keepdim=True)
    return (s.softmax(-1) @ v).masked_fill(empty, 0.0), s.logsumexp(-1)


def masked(s: Tensor, attn_mask, left, right, bottom_right: bool, unit: float = 1.0) -> Tensor:
    """s [..., N_q, N_kv] with -inf where mask or band hide a key, plus an additive mask * unit."""
    n_q, n_kv = s.shape[-2:]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        s = s.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        s = s + attn_mask.to(s.dtype) * unit
    if left is None and right is None:
        return s
    i = torch.arange(n_q, device=s.device)[:, None] + (n_kv - n_q if bottom_right else 0)
    j = torch.arange(n_kv, device=s.device)
    if left is not None:
        s = s.masked_fill(j < i - left, -math.inf)
    if right is not None:
        s = s.masked_fill(j > i + right, -math.inf)
    return s


def smooth(xs: list[Tensor], visible: Tensor | None = None, keep: int = 1) -> tuple[Tensor, Tensor]:
    """Each x [B, H, N, D] -> mean over N, and max |x - mean|, each [len(xs), B, H, D] in fp32, of
    the rows that are `visible` [B or 1, H or 1, N] (none: 0). But for the first `keep` of xs, a
    mean that is within 3 standard errors of 0, the deviation taken for a quarter of that max, is 0:
    see NO_SHIFT."""
    if visible is None:
        count = xs[0].shape[2]
        mean = torch.stack([x.mean(2, dtype=torch.float32) for x in xs])
        high = torch.stack([x.amax(2).float() for x in xs])
        low = torch.stack([x.amin(2).float() for x in xs])
    else:
        shown = visible.bool()[..., None]
        count = shown.sum(2)  # [B or 1, H or 1, 1]
        xs = torch.stack([x.float() for x in xs])
        mean = torch.where(shown, xs, 0.0).sum(3) / count.clamp(min=1)
        high = torch.where(shown, xs, -math.inf).amax(3)
        low = torch.where(shown, xs, math.inf).amin(3)
    deviation = torch.maximum(high - mean, mean - low) * 0.25
    noise = mean * mean * count <= deviation * deviation * NO_SHIFT
    noise[:keep] = False
    mean = torch.where(noise, 0.0, mean)
    amax = torch.maximum(high - mean, mean - low)
    return mean, amax if visible is None else torch.where(count > 0, amax, 0.0)


def quantize_k(
    k: Tensor, k_mean: Tensor, qk: str, granularity: str, visible: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """k [B, H, N, D], k_mean [B, H, D] -> k_8bit [B, H, N_pad, D_pad] of QK_DTYPES[qk] (INT4:
    [B, H, N_pad, D_pad / 2], `pack`ed), k_scale [B, H, N_pad / K_BLOCK, 4 (per_thread) or 1] in
    fp32. Rows that are not `visible` [B or 1, H or 1, N] have no part in the scales and saturate.
    """
    x = _pad(k.float() - k_mean[:, :, None])
    n = torch.arange(x.shape[2], device=k.device)
    groups = 4 if granularity == "per_thread" else 1
    group = n // K_BLOCK * groups + n % 8 // 2 % groups  # columns {2j, 2j+1} + 8*{0..7} of 64
    if visible is not None:
        visible = F.pad(visible.bool(), (0, x.shape[2] - visible.shape[2]), value=True)
    k_8bit, k_scale = _to_8bit(x, qk, group, x.shape[2] // K_BLOCK * groups, visible)
    return pack(k_8bit) if qk == "int4" else k_8bit, k_scale.unflatten(2, (-1, groups))


def pack(x: Tensor) -> Tensor:
    """x [..., D] of INT4 in int8 -> uint8 [..., D / 2]: channels 2i and 2i + 1 in a byte, the first
    in its low half."""
    low, high = x.view(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return low & 15 | high << 4


def unpack(x: Tensor) -> Tensor:
    """The inverse of `pack`."""
    return torch.stack([x << 4, x], -1).flatten(-2).view(torch.int8) >> 4


def quantize_v(
    v: Tensor, v_mean: Tensor, v_amax: Tensor, saturate: bool = False
) -> tuple[Tensor, Tensor]:
    """v [B, H, N, D], v_mean and v_amax [B, H, D] -> v_fp8 [B, H, D_pad, N_pad] with the tokens of
    each 16 in `interleave` order, v_scale [B, H, D] in fp32. saturate: some rows had no part in
    v_mean and v_amax. Padding of the sequence is -v_mean: no p reads it."""
    amax = torch.where(v_amax < TINY, TINY, v_amax)
    x = _pad(v.float(), channels=False) - v_mean[:, :, None]
    if saturate:
        x = _saturate(x, amax[:, :, None])
    x = x * _divide(FP8_MAX, amax)[:, :, None]
    x = F.pad(x, (0, pad_head_dim(x.shape[3]) - x.shape[3])).clamp(-FP8_MAX, FP8_MAX)
    return interleave(x.mT).to(torch.float8_e4m3fn), amax * (1 / FP8_MAX)


def sample_rows(N: int, device=None) -> Tensor:
    """SAMPLE rows of N, one of each SAMPLE-th; where in it changes by the golden ratio, so that a
    period in the rows (the width of an image) is not met again and again."""
    i = torch.arange(SAMPLE, device=device)
    return (i * 65536 + (i * 40503 & 65535)) * N // (65536 * SAMPLE)


def estimate(x: Tensor, visible: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [B, H, N, D] -> what stands for `smooth`'s mean and amax, of a sample of its rows, each
    [B, H, D] in fp32. Of rows that are not `visible` [B or 1, H or 1, N] nothing is taken.

    The mean of the sample, shrunk towards 0 the less it exceeds its standard error, positive-part
    James-Stein's way: where there is no common part to take off, the sample's noise would only add
    to x. 0 where the sample is not finite or nothing of it is visible. Any shift is exact.
    The amax of the sample less that shift, times HEADROOM: `quantize_v_checked` sees to the rest.
    """
    rows = sample_rows(x.shape[2], x.device)
    x, keep = x[:, :, rows].float(), torch.ones(1, 1, SAMPLE, 1, dtype=torch.bool, device=x.device)
    if visible is not None:
        keep = visible.bool()[:, :, rows, None]
    count = keep.sum(2)
    x = torch.where(keep, x, 0.0)
    mean, square = x.sum(2) / count, x.square().sum(2) / count
    kept = 1.0 - NO_SHIFT / count * (square / mean.square() - 1.0)
    mean = torch.where(kept > 0, mean * kept.clamp(max=1.0), 0.0)
    away = (x - mean[:, :, None]).abs()
    away = torch.where(keep & (away < math.inf), away, 0.0)
    return mean, away.amax(2) * HEADROOM


def quantize_v_checked(
    v: Tensor, v_mean: Tensor, v_amax: Tensor, visible: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`quantize_v` with an estimated v_amax. In a head where a visible row is beyond it, amax is
    taken of all visible rows."""
    away = (v.float() - v_mean[:, :, None]).abs()
    if visible is not None:
        away = torch.where(visible.bool()[..., None], away, 0.0)
    amax = torch.where(v_amax < TINY, TINY, v_amax)
    beyond = (away > amax[:, :, None]).flatten(2).any(2)[..., None]  # [B, H, 1]
    return quantize_v(v, v_mean, torch.where(beyond, away.amax(2), amax), visible is not None)


def quantize_kv(k: Tensor, v: Tensor | None, visible: Tensor | None, qk: str) -> list[Tensor]:
    """[k_8bit, k_scale, k_mean] and, of a v, [v_fp8, v_scale, v_mean], by estimated statistics."""
    k_mean = estimate(k, visible)[0]
    out = [*quantize_k(k, k_mean, qk, "per_row", visible), k_mean]
    if v is not None:
        v_mean, v_amax = estimate(v, visible)
        out += [*quantize_v_checked(v, v_mean, v_amax, visible), v_mean]
    return out


def interleave(x: Tensor) -> Tensor:
    """Reorder each 16 columns from (half, quad, pair) = (2, 4, 2) to (quad, half, pair).

    It is the order in which a thread of an ``mma`` accumulator holds the columns of p, so that p
    becomes the 8-bit A operand of the next product without moving between threads. v's tokens
    are stored in the same order; a sum over tokens does not depend on it.
    """
    c = torch.arange(x.shape[-1], device=x.device)
    return x[..., c // 16 * 16 + c // 2 % 2 * 8 + c // 4 % 4 * 2 + c % 2].contiguous()


def quantize_q(q: Tensor, qk: str, granularity: str) -> tuple[Tensor, Tensor]:
    """q [B, H, N, D] -> q_8bit [B, H, N, D] (INT4 in int8), q_scale [B, H, N, 1] in fp32, one value
    per group."""
    n = torch.arange(q.shape[2], device=q.device)
    rows, groups = {"per_block": (128, 1), "per_thread": (32, 8), "per_row": (1, 1)}[granularity]
    group = n // rows * groups + n % groups  # rows {i, i+8, i+16, i+24} of 32
    q_8bit, scale = _to_8bit(q.float(), qk, group, (q.shape[2] + rows - 1) // rows * groups)
    return q_8bit, scale[:, :, group, None]


def attention(
    q, k_8bit, k_scale, v, v_scale, v_mean, attn_mask, seen, left, right, bottom_right,
    scale: float, n_kv: int, granularity: str, block_n: int = 128, q_mean=None, delta=None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The quantized kernel, reading `block_n` keys at a time; v is v_fp8, or 16-bit v itself."""
    fp8, qk = v.dtype == torch.float8_e4m3fn, qk_of(k_8bit)
    D, heads, N_q = q.shape[3], q.shape[1] // k_8bit.shape[1], q.shape[2]
    k_8bit = unpack(k_8bit) if qk == "int4" else k_8bit
    k_8bit, k_scale, v = (x.repeat_interleave(heads, 1) for x in (k_8bit, k_scale, v))
    q_smooth = q
    if q_mean is not None:
        q_smooth = q.float() - q_mean.float().repeat_interleave(Q_BLOCK, 2)[:, :, :N_q]
    q_8bit, q_scale = quantize_q(q_smooth * math.copysign(1.0, scale), qk, granularity)
    q_scale = q_scale * (abs(scale) * LOG2E)

    n = torch.arange(k_8bit.shape[2], device=q.device)
    groups = k_scale.shape[3]
    k_scale = k_scale.flatten(2)[:, :, n // K_BLOCK * groups + n % 8 // 2 % groups]
    s = q_8bit.float() @ k_8bit[..., :D].float().mT  # [B, H_q, N_q, N_pad]; INT8: exact
    x = s * (q_scale * k_scale[:, :, None])
    if delta is not None:
        delta = delta.float() * (scale * LOG2E)
        x = x + delta.repeat_interleave(Q_BLOCK, 2)[:, :, :N_q]
    x = masked(x[..., :n_kv], attn_mask, left, right, bottom_right, LOG2E)
    x = F.pad(x, (0, n.shape[0] - n_kv), value=-math.inf)

    # The running maximum at the end of a tile decides how the tile's p is rounded; what later
    # tiles do to the accumulator is an exact rescaling. A row that has seen nothing has no maximum.
    tile_end = (n // block_n * block_n + block_n - 1).clamp(max=n.shape[0] - 1)
    m = x.cummax(-1).values[..., tile_end]  # [B, H_q, N_q, N_pad]
    m = torch.where(m == -math.inf, 0.0, m)
    p = torch.exp2(x - (m - (LOG2_FP8_MAX if fp8 else 0.0)))
    m_last = m[..., -1:]
    rescale = torch.where(p > 0, torch.exp2(m - m_last), 0.0)
    l = (p * rescale).sum(-1, keepdim=True)  # [B, H_q, N_q, 1]
    inverse = torch.where(l == 0, 0.0, _divide(1.0, l))
    if fp8:
        o = (interleave(p).to(v.dtype).float() * interleave(rescale)) @ v.float().mT
        v_scale, v_mean = (x.repeat_interleave(heads, 1)[:, :, None] for x in (v_scale, v_mean))
        o = o[..., : v_mean.shape[3]] * inverse * v_scale + torch.where(l == 0, 0.0, v_mean)
    else:
        dtype = v.dtype if v.dtype != torch.float32 else torch.bfloat16
        p = p.to(dtype).float() * rescale
        v = v.to(dtype).float()
        if seen is not None:  # 0 * NaN
            v = torch.where((seen > 0).any(2)[..., None], v, 0.0)
        o = p[..., :n_kv] @ v * inverse
    lse = (m_last + l.log2())[..., 0] / LOG2E - (math.log(FP8_MAX) if fp8 else 0.0)
    return o.to(q.dtype), lse


def power_of_two(amax: Tensor) -> tuple[Tensor, Tensor]:
    """(1 / scale, scale) of amax >= 0 in fp32: amax / scale is in [1024, 2048), from 2^-100 on."""
    exponent = (amax.view(torch.int32) >> 23).clamp(min=27)
    inverse = ((264 - exponent) << 23).view(torch.float32)
    return inverse, ((exponent - 10) << 23).view(torch.float32)


def phi(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [.., C] in fp32 -> codes of E2M1 [.., C], uint8, and of E4M3 scales [.., C / 16], uint8: of
    each 16. A block with a NaN or an Inf has the scale NaN."""
    x = x.unflatten(-1, (-1, FP4_BLOCK))
    amax = x.abs().amax(-1)
    scale = amax * (1 / FP4_MAX)
    e4m3 = torch.where(scale < FP8_MAX, scale, FP8_MAX).to(torch.float8_e4m3fn)
    scale = e4m3.float()
    x = x * torch.where(scale > 0, _divide(1.0, scale), 0.0)[..., None]
    a = torch.where(x.abs() < FP4_MAX, x.abs(), FP4_MAX)
    above = (a >= 2).to(torch.uint8) + (a >= 4).to(torch.uint8)  # steps of 1/2, 1 and 2
    code = (a * torch.exp2(1.0 - above)).round().to(torch.uint8) + 2 * above
    code = code + 8 * x.signbit().to(torch.uint8)
    return code.flatten(-2), torch.where(amax < math.inf, e4m3.view(torch.uint8), 0x7F)


def phi_inverse(code: Tensor, scale: Tensor) -> Tensor:
    """What `phi`'s codes stand for, in fp32: exactly."""
    c = code & 7
    exponent = (c >> 1).clamp(min=1)
    value = torch.where(c < 2, c, 2 + (c & 1)) * torch.exp2(exponent.float() - 2)
    value = torch.where(code < 8, value, -value).unflatten(-1, (-1, FP4_BLOCK))
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
        x = _saturate(x, amax[:, :, None])
    inverse, scale = power_of_two(amax if along_n else amax.amax(2))
    x = _pad(x * (inverse[:, :, None] if along_n else inverse[:, :, None, None]))
    code, e4m3 = phi(x.mT.contiguous() if along_n else x)
    return code[..., ::2] | code[..., 1::2] << 4, e4m3, scale


def attention_nvfp4(
    q, k_fp4, k_e4m3, k_scale, v_fp4, v_e4m3, v_scale, v_mean, attn_mask, seen, left, right,
    bottom_right, scale: float, n_kv: int, granularity: str, block_n: int, q_mean, delta,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """nvfp4.py's kernel, reading `block_n` keys at a time."""
    heads, unit = q.shape[1] // k_fp4.shape[1], scale * LOG2E
    k_hat, v_hat = (
        phi_inverse(torch.stack([x & 15, x >> 4], -1).flatten(-2), e4m3).repeat_interleave(heads, 1)
        for x, e4m3 in ((k_fp4, k_e4m3), (v_fp4, v_e4m3))
    )
    block = torch.arange(q.shape[2], device=q.device) // Q_BLOCK
    q_smooth = q.float() - q_mean[:, :, block]
    inverse, q_scale = power_of_two(q_smooth.abs().amax(3, keepdim=True))
    q_hat = phi_inverse(*phi(_pad(q_smooth * inverse)))[:, :, : q.shape[2]]
    c = q_scale * (k_scale.repeat_interleave(heads, 1) * unit)[..., None, None]
    x = (q_hat @ k_hat.mT)[..., :n_kv] * c + (delta[..., :n_kv].float() * unit)[:, :, block]
    x = masked(x, attn_mask, left, right, bottom_right, LOG2E)
    x = F.pad(x, (0, k_fp4.shape[2] - n_kv), value=-math.inf).unflatten(-1, (-1, block_n))

    m_tile = x.amax(-1, keepdim=True)  # [B, H_q, N_q, tiles, 1]
    p = torch.exp2(x - (torch.where(m_tile == -math.inf, 0.0, m_tile) - LOG2_FP4_MAX))
    m = m_tile.amax(-2, keepdim=True)
    m = torch.where(m == -math.inf, 0.0, m)
    s1 = torch.exp2(m_tile - m)
    l = (p * s1).sum((-1, -2))[..., None]  # [B, H_q, N_q, 1]
    o = (phi_inverse(*phi(p)) * s1).flatten(-2) @ v_hat.mT
    v_scale, v_mean = (x.repeat_interleave(heads, 1)[:, :, None] for x in (v_scale, v_mean))
    o = o[..., : v_mean.shape[3]] * torch.where(l == 0, 0.0, _divide(1.0, l)) * v_scale
    lse = (m[..., 0] + l.log2() - LOG2_FP4_MAX)[..., 0] / LOG2E
    return (o + torch.where(l == 0, 0.0, v_mean)).to(q.dtype), lse


def qk_of(k_8bit: Tensor) -> str:
    """The format of q and k, which k's dtype tells."""
    return next(qk for qk, dtype in QK_DTYPES.items() if dtype == k_8bit.dtype)


def _to_8bit(
    x: Tensor, qk: str, group: Tensor, num_groups: int, visible: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x [B, H, N, D], group [N], the group of each row -> x_8bit (INT4 in int8), x_scale
    [B, H, num_groups]."""
    amax = x.abs().amax(3)  # [B, H, N]
    if visible is not None:
        amax = torch.where(visible, amax, 0.0)
    amax = amax.new_zeros(*x.shape[:2], num_groups).scatter_reduce(
        2, group.expand_as(amax), amax, "amax"
    )
    amax = torch.where(amax < TINY, TINY, amax)  # keeps NaN: a group with a NaN has a NaN scale
    if visible is not None:
        x = _saturate(x, amax[:, :, group, None])
    inverse = _divide(LARGEST[qk], amax)[:, :, group, None]
    if qk == "fp8":
        x = (x * inverse).clamp(-FP8_MAX, FP8_MAX)
    else:  # in float64 the product is exact: it is rounded once, as the kernels' fma does
        x = (x.double() * inverse.double()).round()
    x_8bit = x.to(torch.float8_e4m3fn if qk == "fp8" else torch.int8)
    return x_8bit, amax * (1 / LARGEST[qk])


def _saturate(x: Tensor, amax: Tensor) -> Tensor:
    """x within +-amax, where amax is a number; NaN becomes a number too."""
    saturated = torch.where(x.isnan(), -amax, torch.minimum(torch.maximum(x, -amax), amax))
    return torch.where(amax.isnan(), x, saturated)


def _divide(x: float, y: Tensor) -> Tensor:
    """x / y rounded once. PyTorch computes number / tensor as number * reciprocal."""
    return torch.full_like(y, x) / y


def _pad(x: Tensor, channels: bool = True) -> Tensor:
    rows = (x.shape[2] + PAD_N - 1) // PAD_N * PAD_N - x.shape[2]
    return F.pad(x, (0, pad_head_dim(x.shape[3]) - x.shape[3] if channels else 0, 0, rows))


def pad_head_dim(head_dim: int) -> int:
    return next(d for d in HEAD_DIMS if head_dim <= d)
