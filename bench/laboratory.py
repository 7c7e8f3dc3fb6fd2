"""The laboratory: quantized attention with every technique of the papers on or off, and the inputs.

`attend` computes in fp32 on values that have been rounded to a format and scaled back, at the
places where a kernel would round them. It reads TILE keys at a time, as the kernels of this
library do: p is relative to the running maximum at the end of its tile. It is for accuracy and
says nothing of speed. bench/accuracy.py prints tables of it.

Sources: SageAttention (arXiv:2410.02367), SageAttention2 (arXiv:2411.10958) and its tables,
SageAttention3 (FP4 microscaling), FlashAttention-3 (arXiv:2407.08608).

Shapes: B batch, H heads, N sequence (N_q, N_kv where they may differ), D head_dim.
"""

import dataclasses
import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_inductor.ops.formats import (
    E4M3_MAX,
    FP4_BLOCK,
    FP4_MAX,
    K_BLOCK,
    LOG2E,
    Q_BLOCK,
    QK,
    TINY,
    Prepared,
)
from sage_inductor.ops.recipe import NAMED, Recipe
from sage_inductor.ops.reference import attention as emulation
from sage_inductor.ops.reference.exact import masked
from sage_inductor.ops.sdpa import attention_call
from sage_inductor.ops.sdpa import prepare as prepare_kv
from sage_inductor.ops.visibility import Band, Visibility

TILE = 128  # keys of one step of the online softmax
MMA_K = 32  # keys of one FP8 tensor core instruction
MAX = {  # formats that need a scale
    **{name: QK[name].largest for name in ("int8", "int4")},
    **{"e4m3": E4M3_MAX, "e5m2": torch.finfo(torch.float8_e5m2).max},
}
DTYPES = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
# (rows, groups of them, neighbours in a group) that share a scale; rows None: all of a head's.
Q_GROUPS = {
    "per_tensor": (None, 1, 1),
    "per_block": (128, 1, 1),
    "per_warp": (32, 1, 1),
    "per_thread": (32, 8, 1),  # {i, i+8, i+16, i+24} of 32
    "per_token": (1, 1, 1),
}
K_GROUPS = Q_GROUPS | {
    "per_block": (K_BLOCK, 1, 1),
    "per_warp": (K_BLOCK, 1, 1),  # the warps of a block share its keys
    "per_thread": (K_BLOCK, 4, 2),  # {2j, 2j+1} + 8*{0..7} of 64
}


@dataclasses.dataclass(frozen=True)
class Technique:
    """What is done to attention. The default is nothing: attention in fp32.

    qk: format of q and k. ``none``: as they arrive; ``int8``, ``int4`` ([-7, 7]), ``e4m3``;
        ``nvfp4``: E2M1 with an E4M3 scale for each 16 channels.
    granularity: rows of one head that share a scale of q and k, a key of Q_GROUPS. Only, and
        always, with int8, int4 and e4m3.
    smooth_q: q less its mean over each Q_BLOCK rows; what that takes off the scores is added
        before the softmax, from the mean as it is (SageAttention2, 3.1).
    smooth_k: k less its mean over N.
    smooth_v: v less its mean over N, which is added to the output.
    balance: q / f and k * f with f = sqrt(max |q| / max |k|) per channel (the paper's SmoothAttn,
        SmoothQuant with alpha 0.5).
    rotation: q and k times a normalized Hadamard matrix with random signs, on each so many
        channels, a power of two from 16 that divides D (the paper's HadmdAttn, with D). 0: not.
    pv: format of p and v. ``none``; ``fp16``, ``bf16``; ``e4m3``, ``e5m2``, ``int8``: p, at most 1,
        with the static scale 1 / MAX; ``nvfp4``: scales along N.
    v_scale: ``per_channel`` or ``per_tensor`` (one a head). Only, and always, with e4m3, e5m2 and
        int8.
    two_level_p: with nvfp4: each row of p in a tile is brought to the largest value that E2M1 with
        an E4M3 scale holds, so that the scales use all of E4M3 (SageAttention3). With int8: to the
        largest code, so that a tile far below the row's maximum has codes too.
    accumulator: of p v. ``fp32``, or ``fp22``: 13 mantissa bits, what FP8 instructions keep on Ada
        and Hopper (SageAttention2, 3.4). Only with e4m3 and e5m2. Emulated: MMA_K products are
        summed in fp32, added to the accumulator, and the sum is cut to 13 bits towards zero. That
        hardware aligns and cuts each product is not emulated, nor FP22 in q k^T.
    interval: with fp22: after so many keys the accumulator is added to another in fp32 and starts
        at 0 (two levels); 32, 64 or 128. None: one level, which the softmax rescales in place.

    Raises ValueError where a field is none of these or does not go with another.
    """

    qk: str = "none"
    granularity: str | None = None
    smooth_q: bool = False
    smooth_k: bool = False
    smooth_v: bool = False
    balance: bool = False
    rotation: int = 0
    pv: str = "none"
    v_scale: str | None = None
    two_level_p: bool = False
    accumulator: str = "fp32"
    interval: int | None = None

    def __post_init__(self):
        scaled = self.qk in ("int8", "int4", "e4m3")
        v_scaled = self.pv in ("e4m3", "e5m2", "int8")
        self._one_of("qk", ("none", "int8", "int4", "e4m3", "nvfp4"))
        self._one_of("granularity", tuple(Q_GROUPS) if scaled else (None,), f"qk={self.qk!r}")
        self._one_of("pv", ("none", "fp16", "bf16", "e4m3", "e5m2", "int8", "nvfp4"))
        scales = ("per_channel", "per_tensor") if v_scaled else (None,)
        self._one_of("v_scale", scales, f"pv={self.pv!r}")
        fp8 = self.pv in ("e4m3", "e5m2")
        self._one_of("accumulator", ("fp32", "fp22") if fp8 else ("fp32",), f"pv={self.pv!r}")
        intervals = (None, 32, 64, 128) if self.accumulator == "fp22" else (None,)
        self._one_of("interval", intervals, f"accumulator={self.accumulator!r}")
        for name in ("smooth_q", "smooth_k", "smooth_v", "balance"):
            self._one_of(name, (False, True))
        self._one_of("two_level_p", (False, True) if self.pv in ("nvfp4", "int8") else (False,))
        self._one_of("rotation", (0, *(2**i for i in range(4, 9))))

    def _one_of(self, field: str, valid: tuple, beside: str = "") -> None:
        value = getattr(self, field)
        if not any(value is each or type(value) is type(each) and value == each for each in valid):
            beside = beside and f" with {beside}"
            raise ValueError(f"technique: {field} must be one of {valid}{beside}, got {value!r}")


INT8_PER_THREAD = Technique("int8", "per_thread", smooth_k=True)
FP8_PV = dict(pv="e4m3", v_scale="per_channel", accumulator="fp22", interval=K_BLOCK)

SAGE1 = Technique("int8", "per_block", smooth_k=True, pv="fp16")
SAGE2_8B = dataclasses.replace(INT8_PER_THREAD, smooth_v=True, **FP8_PV)
SAGE2_4B = dataclasses.replace(SAGE2_8B, qk="int4", smooth_q=True)
SAGE3 = Technique("nvfp4", smooth_q=True, smooth_k=True, pv="nvfp4", two_level_p=True)
# One accumulator for the whole row, as its first version has; its block quantization is left out.
FA3_FP8 = Technique("e4m3", "per_tensor", pv="e4m3", v_scale="per_tensor", accumulator="fp22")
PRESETS = {
    "SAGE1": SAGE1,
    "SAGE2_8B": SAGE2_8B,
    "SAGE2_4B": SAGE2_4B,
    "SAGE3": SAGE3,
    "FA3_FP8": FA3_FP8,
    **NAMED,
}


@torch.no_grad()
def attend(
    q: Tensor, k: Tensor, v: Tensor, technique: Technique | Recipe, is_causal: bool = False
) -> Tensor:
    """softmax(q k^T / sqrt(D)) v by a technique, or by the emulation of a recipe that is shipped.

    q [B, H, N_q, D], k and v [B, H, N_kv, D], floating, on one device. Returns out [B, H, N_q, D]
    in q's dtype. is_causal: query i sees keys 0 .. i. Memory: Q_BLOCK * N_kv scores a head, some
    ten times. Raises ValueError for other shapes, or a D that the technique does not divide.
    """
    check(q, k, v, technique)
    blocks = range(0, q.shape[2], Q_BLOCK)
    if isinstance(technique, Recipe):
        prepared = prepare_emulated(k, v, technique)
        out = [emulate(q, start, k, v, prepared, technique, is_causal) for start in blocks]
    else:
        prepared = prepare(q, k, v, technique)
        out = [block(*prepared, start, k.shape[2], technique, is_causal) for start in blocks]
    return torch.cat(out, 2).to(q.dtype)


def check(q: Tensor, k: Tensor, v: Tensor, technique: Technique | Recipe) -> None:
    """Raise unless `attend` is defined for these arguments."""
    if not isinstance(technique, Technique | Recipe):
        raise ValueError(f"attend: technique must be a Technique or a Recipe, got {technique!r}")
    shapes = [list(x.shape) for x in (q, k, v)]
    if any(len(each) != 4 or 0 in each for each in shapes):
        raise ValueError(f"attend: q, k and v must be [B, H, N, D] and not empty, got {shapes}")
    B, H, _, D = shapes[0]
    if shapes[1] != shapes[2] or [B, H, D] != [*shapes[1][:2], shapes[1][3]]:
        raise ValueError(f"attend: all must have one B, H and D, k and v one N, got {shapes}")
    if isinstance(technique, Recipe):
        return
    for field, size in (("rotation", technique.rotation), ("qk", FP4_BLOCK)):
        if size and D % size and (field == "rotation" or technique.qk == "nvfp4"):
            raise ValueError(f"attend: D must be a multiple of {size} for this {field}, got {D}")


# -- before the loop over q ----


def prepare(q: Tensor, k: Tensor, v: Tensor, t: Technique) -> tuple[Tensor | None, ...]:
    """q_hat [B, H, N_q, D], k_hat [B, H, N_kv, D], v_hat [B, H, N_pad, D], v_mean [B, H, 1, D],
    and delta [B, H, N_q / Q_BLOCK, N_kv], what smoothing q took off the scores, or None. In fp32;
    N_pad is N_kv rounded up to TILE, padding is 0."""
    q, k, v = q.float(), k.float(), v.float()
    if t.smooth_k:
        k = k - k.mean(2, keepdim=True)
    delta = None
    if t.smooth_q:
        q_mean = torch.stack([rows.mean(2) for rows in q.split(Q_BLOCK, 2)], 2)
        q = q - q_mean.repeat_interleave(Q_BLOCK, 2)[:, :, : q.shape[2]]
        delta = q_mean @ k.mT
    if t.balance:
        f = (q.abs().amax(2, keepdim=True) / k.abs().amax(2, keepdim=True).clamp(min=TINY)).sqrt()
        f = f.clamp(min=TINY)
        q, k = q / f, k * f
    if t.rotation:
        q, k = rotate(q, t.rotation), rotate(k, t.rotation)
    q_hat = quantize_rows(q, t.qk, Q_GROUPS.get(t.granularity))
    k_hat = quantize_rows(k, t.qk, K_GROUPS.get(t.granularity))

    v_mean = v.mean(2, keepdim=True) if t.smooth_v else torch.zeros_like(v[:, :, :1])
    v = F.pad(v - v_mean, (0, 0, 0, -v.shape[2] % TILE))
    return q_hat, k_hat, quantize_v(v, t.pv, t.v_scale), v_mean, delta


def rotate(x: Tensor, size: int) -> Tensor:
    """Each `size` channels of x [..., D] times one orthogonal matrix: signs, drawn once for all,
    and the Hadamard matrix / sqrt(size). The signs keep a bias of one sign from staying in one
    channel."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    signs = torch.randint(2, (size, 1), generator=torch.Generator().manual_seed(0)) * 2 - 1
    matrix = (signs * matrix / math.sqrt(size)).to(x)
    return (x.unflatten(-1, (-1, size)) @ matrix).flatten(-2)


def quantize_rows(x: Tensor, fmt: str, groups: tuple | None) -> Tensor:
    """x [B, H, N, D] rounded to the format and scaled back; groups: a value of Q_GROUPS."""
    if groups is None:
        return x if fmt == "none" else nvfp4(x)
    n = torch.arange(x.shape[2], device=x.device)
    rows, parts, neighbours = groups
    group = n // (rows or x.shape[2]) * parts + n // neighbours % parts
    amax = x.abs().amax(3)  # [B, H, N]
    index = group.expand_as(amax)
    amax = torch.zeros_like(amax[..., :1]).repeat(1, 1, int(group[-1]) + parts).scatter_reduce(
        2, index, amax, "amax"
    )  # fmt: skip
    return rounded(x, fmt, amax[:, :, group, None])


def quantize_v(v: Tensor, fmt: str, v_scale: str | None) -> Tensor:
    """v [B, H, N_pad, D] rounded to the format and scaled back."""
    if fmt == "nvfp4":
        return nvfp4(v.mT).mT
    if v_scale is None:
        return v.to(DTYPES.get(fmt, v.dtype)).float()
    return rounded(v, fmt, v.abs().amax(2 if v_scale == "per_channel" else (2, 3), keepdim=True))


def rounded(x: Tensor, fmt: str, amax: Tensor | float) -> Tensor:
    """x to the nearest value of a format of MAX (ties to even) whose largest stands for amax."""
    amax = torch.as_tensor(amax, dtype=x.dtype, device=x.device).clamp(min=TINY)
    inverse = torch.full_like(amax, MAX[fmt]) / amax  # number / tensor is rounded twice
    if fmt.startswith("int"):  # in float64, so that it is rounded once, as the kernels do
        code = (x.double() * inverse.double()).round().float()
    else:
        code = (x * inverse).clamp(-MAX[fmt], MAX[fmt]).to(DTYPES[fmt]).float()
    return code * (amax / MAX[fmt])


def nvfp4(x: Tensor) -> Tensor:
    """x [..., M], M a multiple of 16, to E2M1 with an E4M3 scale for each 16, scaled back."""
    code, scale = nvfp4_parts(x)
    return (code * scale).flatten(-2)


def nvfp4_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., M] -> values of E2M1 [..., M / 16, 16], scales of E4M3 [..., M / 16, 1], in fp32. A
    block below half of E4M3's smallest scale, 2^-9, becomes 0; one above 448 * 6 saturates."""
    x = x.unflatten(-1, (-1, FP4_BLOCK))
    scale = (x.abs().amax(-1, keepdim=True) / FP4_MAX).clamp(max=MAX["e4m3"])
    scale = scale.to(DTYPES["e4m3"]).float()
    x = torch.where(scale > 0, x / scale, 0.0).clamp(-FP4_MAX, FP4_MAX)
    step = torch.where(x.abs() < 2, 0.5, torch.where(x.abs() < 4, 1.0, 2.0))
    return (x / step).round() * step, scale


# -- the loop over q ----


def block(
    q: Tensor, k: Tensor, v: Tensor, v_mean: Tensor, delta: Tensor | None, start: int, n_kv: int,
    t: Technique, is_causal: bool,
) -> Tensor:  # fmt: skip
    """The output of Q_BLOCK rows from `start` on [B, H, R, D]. The others: `prepare`'s."""
    s = q[:, :, start : start + Q_BLOCK] @ k.mT
    if delta is not None:
        s = s + delta[:, :, start // Q_BLOCK, None]
    s = masked(s, None, None, start if is_causal else None, False)
    x = F.pad(s * (LOG2E / math.sqrt(q.shape[3])), (0, v.shape[2] - n_kv), value=-math.inf)
    x = x.unflatten(-1, (-1, TILE))  # [B, H, R, T, TILE]
    m = x.amax(-1).cummax(-1).values[..., None]  # every row sees key 0
    p = torch.exp2(x - m)
    rescale = torch.exp2(m - m[..., -1:, :])  # [B, H, R, T, 1]
    l = (p * rescale).sum((3, 4))[..., None]
    p = quantize_p(p, t)
    if t.accumulator == "fp32":
        o = (p * rescale).flatten(3) @ v
    else:
        o = accumulate(p, v, m, t.interval)
    return o / l + v_mean


def quantize_p(p: Tensor, t: Technique) -> Tensor:
    """p [..., TILE] in [0, 1], rounded to the format and scaled back."""
    if t.pv in MAX:
        return rounded(p, t.pv, p.amax(-1, keepdim=True) if t.two_level_p else 1.0)
    if t.pv != "nvfp4":
        return p.to(DTYPES.get(t.pv, p.dtype)).float()
    if not t.two_level_p:
        return nvfp4(p)
    s1 = p.amax(-1, keepdim=True).clamp(min=TINY) / (MAX["e4m3"] * FP4_MAX)
    return nvfp4(p / s1) * s1


def accumulate(p: Tensor, v: Tensor, m: Tensor, interval: int | None) -> Tensor:
    """p v with 13 mantissa bits: p [B, H, R, T, TILE], v [B, H, T * TILE, D], m [B, H, R, T, 1] the
    base-2 maximum that each tile's p is relative to -> [B, H, R, D], relative to the last."""
    o = inner = v.new_zeros(*p.shape[:3], v.shape[3])
    for tile in range(p.shape[3]):
        rescale = torch.exp2(m[..., max(tile - 1, 0), :] - m[..., tile, :])
        o, inner = o * rescale, inner * rescale
        for n in range(0, TILE, MMA_K):
            keys = slice(tile * TILE + n, tile * TILE + n + MMA_K)
            inner = truncated(inner + p[..., tile, n : n + MMA_K] @ v[:, :, keys])
            if interval and (n + MMA_K) % interval == 0:
                o, inner = o + inner, torch.zeros_like(inner)
    return o + inner


def truncated(x: Tensor) -> Tensor:
    """x in fp32, cut to 13 explicit mantissa bits of 23, towards zero."""
    return (x.view(torch.int32) & -(1 << 10)).view(torch.float32)


# -- recipes that are shipped ----


def prepare_emulated(k: Tensor, v: Tensor, recipe: Recipe) -> Prepared:
    """What the oracles make of k and v: they are what runs on CPU."""
    prepared = prepare_kv(k.cpu(), v.cpu(), Visibility(), recipe)
    return Prepared(*(x.to(k.device) for x in prepared.tensors()))


def emulate(
    q: Tensor, start: int, k: Tensor, v: Tensor, prepared: Prepared, recipe: Recipe,
    is_causal: bool,
) -> Tensor:  # fmt: skip
    """The output of Q_BLOCK rows from `start` on, by the emulation of the recipe."""
    band = Visibility(band=Band(None, start if is_causal else None))
    part, scale = q[:, :, start : start + Q_BLOCK], 1 / math.sqrt(q.shape[3])
    a = attention_call(part, k, v, prepared, band, scale, recipe)
    return emulation.attention(a, TILE)[0]


# -- inputs ----


def draw(family: str, seed: int, H: int, N: int, D: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of a family [1, H, N, D] in bf16, the same on any machine: drawn on CPU in fp32."""
    if family not in FAMILIES:
        raise ValueError(f"draw: family must be one of {tuple(FAMILIES)}, got {family!r}")
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(1, H, *shape, generator=generator)

    return tuple(x.to(torch.bfloat16) for x in FAMILIES[family](randn, N, D))


def normal(randn, N, D):
    """N(0, 1)."""
    return randn(N, D), randn(N, D), randn(N, D)


def channel_bias(randn, N, D):
    """Channels with outliers, as k's and q's in every model: 2 N(0, 1) added to each channel of q,
    8 N(0, 1) to each of k."""
    return randn(N, D) + 2 * randn(1, D), randn(N, D) + 8 * randn(1, D), randn(N, D)


def k_bias(randn, N, D):
    """8 N(0, 1) added to each channel of k alone."""
    return randn(N, D), randn(N, D) + 8 * randn(1, D), randn(N, D)


def biased_v(randn, N, D):
    """v + 8, where the paper sees CogVideoX's v."""
    return randn(N, D), randn(N, D), randn(N, D) + 8


def token_outliers(randn, N, D):
    """Some 2 % of the rows of q and of k are 11 times larger."""
    q, k, v = normal(randn, N, D)
    return *(x * (1 + 10 * (randn(N, 1) > 2.054)) for x in (q, k)), v


def sinks(randn, N, D, spread=False):
    """Four keys, 3 long along what all queries have in common, take most of a row's attention;
    their v is small. They are the first, or (spread) others in each head."""
    q, k, v = normal(randn, N, D)
    common = randn(1, D)
    at = largest(randn(N, 1), 4) if spread else torch.arange(N)[:, None] < 4
    k = torch.where(at, 0.5 * k + 3 * common, k)
    v = torch.where(at, 0.05 * v, v)
    return q + 0.25 * common * math.sqrt(64 / D), k, v


def real_like(randn, N, D):
    """Neighbours alike, AR(1) with 0.9 along the sequence, N(0, 1) each; a bias per channel, of q
    and k before RoPE."""

    def walk():
        x = randn(N, D)
        for n in range(1, N):
            x[:, :, n] = 0.9 * x[:, :, n - 1] + math.sqrt(1 - 0.9**2) * x[:, :, n]
        return x

    q, k, v = (walk() + size * randn(1, D) for size in (1, 3, 0.5))
    return rope(q), rope(k), v


def strong_channels(randn, N, D, count, factor, of_q=False, before_rope=False):
    """N(0, 1), but `count` channels of k are `factor` times larger, others in each head; of_q: the
    same channels of q too. before_rope: RoPE follows, and mixes them with others."""
    q, k, v = normal(randn, N, D)
    size = torch.where(largest(randn(1, D), count), factor, 1.0)
    q, k = q * size if of_q else q, k * size
    return (rope(q), rope(k), v) if before_rope else (q, k, v)


def strong_tokens(randn, N, D, of, count, factor):
    """N(0, 1), but `count` rows of k or of v are `factor` times larger, others in each head."""
    q, k, v = normal(randn, N, D)
    size = torch.where(largest(randn(N, 1), count), factor, 1.0)
    return (q, k * size, v) if of == "k" else (q, k, v * size)


def largest(x: Tensor, count: int) -> Tensor:
    """Which elements of a head's x [1, H, M, 1] or [1, H, 1, M] are the `count` largest."""
    return x >= x.flatten(2).topk(count).values[..., -1, None, None]


def rope(x: Tensor) -> Tensor:
    """Channels i and i + D / 2 of x [..., N, D] turned by the angle N / 10000^(2 i / D)."""
    N, D = x.shape[-2:]
    angle = torch.arange(N)[:, None] * 10000 ** (-torch.arange(0, D, 2) / D)  # [N, D / 2]
    cos, sin = angle.cos(), angle.sin()
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


# Of the papers' tables.
USUAL = {
    "normal": normal,
    "channel_bias": channel_bias,
    "k_bias": k_bias,
    "biased_v": biased_v,
    "token_outliers": token_outliers,
    "sinks": sinks,
    "real_like": real_like,
}
# What garbles text in models whose k has few strong channels, and what only rotation or only p v in
# INT8 is sensitive to: COUNTxFACTOR.
CHANNELS = {
    "k4x6": partial(strong_channels, count=4, factor=6.0),
    "k2x12": partial(strong_channels, count=2, factor=12.0),
    "k1x60": partial(strong_channels, count=1, factor=60.0),
    "qk4x4": partial(strong_channels, count=4, factor=4.0, of_q=True),
}
FAMILIES = {
    **USUAL,
    **CHANNELS,
    **{f"{name}_rope": partial(family, before_rope=True) for name, family in CHANNELS.items()},
    "key1x6": partial(strong_tokens, of="k", count=1, factor=6.0),
    "v4x15": partial(strong_tokens, of="v", count=4, factor=15.0),
    "sinks_spread": partial(sinks, spread=True),
}
