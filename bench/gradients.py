"""The laboratory of training: attention, forward and backward, by 8-bit recipes of the papers and
of ours, on values that have been rounded to a format and scaled back where a kernel would do so.

    s  = scale q k^T + mask p  = exp(s - lse)       o  = p v
    dV = p^T dO             dP = dO v^T             delta = sum over D of dO o
    dS = p (dP - delta)     dQ = scale dS k         dK = scale dS^T q
    dmask = dS, summed over what the mask is broadcast over

Where `row_scaled`, what is rounded inside the loop is at most 1, by scales known before it, which
are multiplied into what is read beside it: no amax, no rescaling.

    m = max of s in a row   w = exp(m - lse)        r = w |dO| (max |v| + |o|) >= |dS|
    dV = (p / w)^T (w dO)   dQ = scale r (dS / r) k    dK = scale (dS / r)^T (r q)

It is for accuracy and says nothing of speed. bench/accuracy.py --training prints tables of it.

Sources: SageBwd (SageAttention3, arXiv:2505.11594, section 4), TransformerEngine's FP8 attention (a
scale a tensor, here a head; E5M2 for dO and dS).

Shapes: B batch, H heads, N sequence, D head_dim; q, k, v, dO [B, H, N, D], s [B, H, N, N]; mask,
a float one that is learned, or None: [B or 1, H or 1, N, N]. Of it each row sees a key.
"""

import dataclasses
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.laboratory import DTYPES, MAX, rounded
from sage_inductor.ops.formats import ROTATED, TINY
from sage_inductor.ops.reference.exact import attention_exact, masked
from sage_inductor.ops.reference.quantize import rotation


class Rounding(NamedTuple):
    """A format, and what shares a scale: so many rows (or rows and columns), a ``head``, a
    ``channel`` of a head, a ``tile`` of scores; ``one``: 1 is the largest code, ``code``: 1 is 1.
    none, bf16: no scale."""

    fmt: str = "none"
    share: int | tuple[int, int] | str = "one"


EXACT, BF16 = Rounding(), Rounding("bf16")


@dataclasses.dataclass(frozen=True)
class Training:
    """What is rounded, by product. The default is nothing."""

    # Forward: s, which the backward computes again of the same codes, and o.
    q: Rounding = EXACT
    k: Rounding = EXACT
    smooth_k: bool = False  # k less its mean over N, which takes nothing off any gradient
    rotated: bool = False  # q and k of s times one Hadamard matrix (ops/quantize/rotate.py)
    p: Rounding = EXACT  # relative to the row's maximum
    v: Rounding = EXACT
    smooth_v: bool = False  # v less its mean over N, which o gets back
    # p of the backward: ``codes``, of the same s; ``exact`` s, the forward's lse; ``softmax``.
    again: str = "codes"
    # Backward: dV = p^T dO, dP = dO v^T, delta of dO and o, dQ = dS k, dK = dS^T q.
    p_of_dv: Rounding = EXACT
    do_of_dv: Rounding = EXACT
    do_of_dp: Rounding = EXACT
    v_of_dp: Rounding = EXACT
    o_of_delta: Rounding = EXACT  # as it is stored
    smooth_dp: bool = False  # v and o less v's mean: dP and delta lose the same
    ds: Rounding = EXACT
    k_of_dq: Rounding = EXACT
    q_of_dk: Rounding = EXACT
    row_scaled: bool = False
    of_earlier: bool = False  # causal: max |v| of the keys that a row sees, not of all
    tile: tuple[int, int] = (64, 128)
    stochastic: bool = False  # rounding of dO and dS, and of k and q beside it


INT8, E4M3, E5M2 = (lambda share, fmt=fmt: Rounding(fmt, share) for fmt in ("int8", "e4m3", "e5m2"))

AS_FLASH = Training(p=BF16, v=BF16, p_of_dv=BF16, o_of_delta=BF16, ds=BF16)
SAGE_BWD = Training(
    q=INT8(128), k=INT8(64), smooth_k=True, p=INT8("one"), v=INT8(64), tile=(128, 64),
    p_of_dv=INT8("tile"), do_of_dv=INT8(128), o_of_delta=BF16, ds=INT8("tile"), k_of_dq=INT8(64),
    q_of_dk=INT8(128),
)  # fmt: skip
PER_HEAD = Training(
    q=E4M3("head"), k=E4M3("head"), p=E4M3("one"), v=E4M3("head"), p_of_dv=E4M3("one"),
    do_of_dv=E5M2("head"), do_of_dp=E5M2("head"), v_of_dp=E4M3("head"), o_of_delta=BF16,
    ds=E5M2("head"), k_of_dq=E4M3("head"), q_of_dk=E4M3("head"),
)  # fmt: skip
SCORES = Training(q=INT8(1), k=INT8(64), smooth_k=True, p=BF16, v=BF16, o_of_delta=BF16)
PER_TILE = dataclasses.replace(
    SCORES, p_of_dv=E4M3("one"), do_of_dv=E4M3(64), ds=E4M3("tile"), k_of_dq=E4M3(64),
    q_of_dk=E4M3(64),
)  # fmt: skip
FP8_BACKWARD = dataclasses.replace(
    SCORES, rotated=True, row_scaled=True, p_of_dv=E4M3("one"), do_of_dv=E4M3("channel"),
    ds=E4M3("one"), k_of_dq=E4M3("channel"), q_of_dk=E4M3("channel"),
)  # fmt: skip
FP8_BACKWARD_INT8 = dataclasses.replace(
    FP8_BACKWARD, do_of_dp=INT8(1), v_of_dp=INT8(1), smooth_dp=True
)
# For causal training: o and dQ of a row depend on rows up to it alone, bit for bit.
FP8_BACKWARD_CAUSAL = dataclasses.replace(
    FP8_BACKWARD, k=INT8(1), smooth_k=False, k_of_dq=E4M3("code"), of_earlier=True
)
FORWARD = dataclasses.replace(
    SCORES, p=E4M3("one"), v=E4M3("channel"), smooth_v=True, again="exact", p_of_dv=BF16, ds=BF16
)

ENTRIES = {
    "bf16": AS_FLASH,
    "SageBwd": SAGE_BWD,
    "SageBwd, k not smoothed": dataclasses.replace(SAGE_BWD, smooth_k=False),
    "FP8, a scale a head": PER_HEAD,
    "FP8, dS by tile": PER_TILE,
    "FP8 backward": FP8_BACKWARD,
    "FP8 backward, dP INT8": FP8_BACKWARD_INT8,
    "FP8 backward, dP INT8, v not smoothed": dataclasses.replace(
        FP8_BACKWARD_INT8, smooth_dp=False
    ),
    "FP8 backward, dP INT8, not rotated": dataclasses.replace(FP8_BACKWARD_INT8, rotated=False),
    "FP8 backward, of earlier rows alone": FP8_BACKWARD_CAUSAL,
    "FP8 backward, dS E5M2": dataclasses.replace(FP8_BACKWARD, ds=E5M2("one")),
    "FP8 backward, stochastic": dataclasses.replace(FP8_BACKWARD, stochastic=True),
    "FP8 backward, dV in bf16": dataclasses.replace(FP8_BACKWARD, p_of_dv=BF16, do_of_dv=BF16),
    "only q k^T in INT8": dataclasses.replace(SCORES, p_of_dv=BF16, ds=BF16),
    "8-bit forward, its lse": FORWARD,
    "8-bit forward, exact lse": dataclasses.replace(FORWARD, again="softmax"),
}


class Gradients(NamedTuple):
    o: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


class MaskGradients(NamedTuple):
    """`Gradients` of a call with a mask.

    dmask: of dS before it is rounded. A kernel would store that: it has it in fp32 registers, and
    nothing is to be scaled back. dmask_rounded: of dS as dQ and dK read it, for comparison.
    """

    o: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dmask: Tensor
    dmask_rounded: Tensor


class Forward(NamedTuple):
    """o [B, H, N, D], and what else the backward takes: s [B, H, N, N], m and lse [B, H, N, 1]."""

    o: Tensor
    s: Tensor
    m: Tensor
    lse: Tensor


@torch.no_grad()
def gradients(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, t: Training, is_causal: bool = False,
    mask: Tensor | None = None,
) -> Gradients | MaskGradients:  # fmt: skip
    """Attention and its gradients, for dO, in the inputs' dtype."""
    found = forward(q, k, v, t, is_causal, mask)
    its = backward(q, k, v, do, found, t, is_causal, mask)
    return (Gradients if mask is None else MaskGradients)(found.o, *its)


@torch.no_grad()
def forward(
    q: Tensor, k: Tensor, v: Tensor, t: Training, is_causal: bool = False,
    mask: Tensor | None = None,
) -> Forward:  # fmt: skip
    """Attention, in the inputs' dtype."""
    k = smoothed(k, t)
    if t.rotated:
        q, k = rotated(q), rotated(k)
    s = scores(apply(q, t.q, t), apply(k, t.k, t), is_causal, mask)
    m = s.amax(3, keepdim=True)
    e = (s - m).exp()
    l = e.sum(3, keepdim=True)
    shift = v.mean(2, keepdim=True) if t.smooth_v else 0.0
    o = apply(e, t.p, t) @ apply(v - shift, t.v, t) / l + shift
    return Forward(o, s, m, m + l.log())


@torch.no_grad()
def backward(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, found: Forward, t: Training, is_causal: bool,
    mask: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """dq, dk and dv, and with a mask both of its gradients, for dO, in the inputs' dtype. found: of
    the same q, k, v and mask."""
    scale = q.shape[3] ** -0.5
    k = smoothed(k, t)
    o, s, m, lse = found
    if t.again != "codes":
        s = scores(q, k, is_causal, mask)
        m = s.amax(3, keepdim=True)
        lse = s.logsumexp(3, keepdim=True) if t.again == "softmax" else lse
    p = (s - lse).exp()
    shift = v.mean(2, keepdim=True) if t.smooth_dp else 0.0
    v_shifted, o_shifted = v - shift, apply(o, t.o_of_delta, t) - shift
    dp = apply(do, t.do_of_dp, t) @ apply(v_shifted, t.v_of_dp, t).mT
    ds = p * (dp - (do * o_shifted).sum(3, keepdim=True))

    w = r = torch.ones_like(m)
    if t.row_scaled:
        w = (m - lse).exp()
        of_v = v_shifted.norm(dim=3, keepdim=True).cummax(2).values
        of_v = of_v if t.of_earlier and is_causal else of_v[:, :, -1:]
        most = of_v + o_shifted.norm(dim=3, keepdim=True)
        r = w * do.norm(dim=3, keepdim=True) * most
        r = torch.where(r > 0, r, 1.0)
    noisy = t.stochastic
    dv = apply(p / w, t.p_of_dv, t).mT @ apply(w * do, t.do_of_dv, t, noisy)
    ds_rounded = apply(ds / r, t.ds, t, noisy)
    dq = scale * r * (ds_rounded @ apply(k, t.k_of_dq, t, noisy))
    dk = scale * (ds_rounded.mT @ apply(r * q, t.q_of_dk, t, noisy))
    of_mask = () if mask is None else (ds, r * ds_rounded)
    return dq, dk, dv, *(x.sum_to_size(mask.shape) for x in of_mask)


def scores(q: Tensor, k: Tensor, is_causal: bool, mask: Tensor | None) -> Tensor:
    s = q.shape[3] ** -0.5 * (q @ k.mT)
    return masked(s, mask, None, 0 if is_causal else None, False)


def smoothed(k: Tensor, t: Training) -> Tensor:
    return k - k.mean(2, keepdim=True) if t.smooth_k else k


def rotated(x: Tensor) -> Tensor:
    matrix = rotation(x.shape[3], x.device) / min(x.shape[3], ROTATED) ** 0.5
    return x @ matrix.to(x.dtype)


def apply(x: Tensor, how: Rounding, t: Training, stochastic: bool = False) -> Tensor:
    """x [B, H, R, C] rounded to the format and scaled back."""
    if how.fmt not in MAX:
        return x if how.fmt == "none" else stored(x, DTYPES[how.fmt])
    if how.share in ("one", "code"):
        # Made on the device: a copy from the host cannot be captured into a CUDA graph.
        amax = x.new_full((), 1.0 if how.share == "one" else MAX[how.fmt])
    else:
        amax = shared_amax(x, how.share, t.tile)
    return (stochastically if stochastic else rounded)(x, how.fmt, amax)


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x rounded to a 16-bit dtype and back. Of fp32 to bf16 in integers: Inductor leaves out a mere
    conversion there and back."""
    if (x.dtype, dtype) != (torch.float32, torch.bfloat16):
        return x.to(dtype).to(x.dtype)
    bits = x.view(torch.int32)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & -0x10000  # to the nearest, ties to even
    return torch.where(x.isfinite(), bits.view(torch.float32), x)


def shared_amax(x: Tensor, share: int | tuple[int, int] | str, tile: tuple[int, int]) -> Tensor:
    """The largest |x| of those that share a scale, for each of x [B, H, R, C]."""
    R, C = x.shape[2:]
    window = {"head": (R, C), "channel": (R, 1), "tile": tile}.get(share, share)
    window = window if isinstance(window, tuple) else (window, C)
    rows, columns = (min(a, b) for a, b in zip(window, (R, C), strict=True))
    parts = F.pad(x.abs(), (0, -C % columns, 0, -R % rows))
    parts = parts.unflatten(3, (-1, columns)).unflatten(2, (-1, rows))
    amax = parts.amax((3, 5), keepdim=True).expand_as(parts)
    return amax.flatten(4).flatten(2, 3)[:, :, :R, :C]


def stochastically(x: Tensor, fmt: str, amax: Tensor | float) -> Tensor:
    """As `rounded`, but up or down at random, right on average."""
    amax = torch.as_tensor(amax, dtype=x.dtype, device=x.device).clamp(min=TINY)
    x, step = x * (MAX[fmt] / amax), torch.ones((), dtype=x.dtype, device=x.device)
    if fmt in DTYPES:
        info = torch.finfo(DTYPES[fmt])
        _, exponent = torch.frexp(x.abs().clamp(min=info.smallest_normal))
        step = torch.ldexp(torch.full_like(x, info.eps), exponent - 1)
    x = ((x / step + torch.rand_like(x)).floor() * step).clamp(-MAX[fmt], MAX[fmt])
    return x * (amax / MAX[fmt])


def exact(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, is_causal: bool = False,
    mask: Tensor | None = None,
) -> Gradients | MaskGradients:  # fmt: skip
    """By autograd, in float64."""
    given = (q, k, v) if mask is None else (q, k, v, mask)
    q, k, v, *mask = given = [x.detach().double().requires_grad_() for x in given]
    o, _ = attention_exact(q, k, v, q.shape[3] ** -0.5, *mask, right=0 if is_causal else None)
    its = torch.autograd.grad(o, given, do.double())
    return MaskGradients(o.detach(), *its, its[3]) if mask else Gradients(o.detach(), *its)


# -- inputs: laboratory's, dO, and a mask ----


def plain(randn, N: int, D: int) -> Tensor:
    """N(0, 1)."""
    return randn(N, D)


def biased(randn, N: int, D: int) -> Tensor:
    """2 N(0, 1) added to each channel."""
    return randn(N, D) + 2 * randn(1, D)


def varied(randn, N: int, D: int) -> Tensor:
    """Tokens of different size, by e^(1.5 N(0, 1)): as the gradients of a loss by token are."""
    return randn(N, D) * (1.5 * randn(N, 1)).exp()


OUTPUTS = {"plain": plain, "biased": biased, "varied": varied}


def draw_do(kind: str, seed: int, H: int, N: int, D: int) -> Tensor:
    """dO of a kind [1, H, N, D] in bf16, the same on any machine."""
    generator = torch.Generator().manual_seed(1000 + seed)  # not laboratory.draw's numbers again

    def randn(*shape):
        return torch.randn(1, H, *shape, generator=generator)

    return OUTPUTS[kind](randn, N, D).to(torch.bfloat16)


MASKS = ("none", "relative")


def draw_mask(kind: str, seed: int, H: int, N: int) -> Tensor | None:
    """A mask of a kind in bf16, the same on any machine. relative: a relative position bias
    [1, H, N, N], N(0, 1) for each head and distance of key and query."""
    generator = torch.Generator().manual_seed(2000 + seed)
    bias = torch.randn(1, H, 2 * N - 1, generator=generator).to(torch.bfloat16)
    return bias.unfold(2, N, 1).flip(2) if kind == "relative" else None
