"""Chunkwise linear attention with a scalar decay (mLSTM with sigmoid gates, as TFLA computes it,
simple GLA, SSD) in 8 bits: its error, emulated, and what it could gain, counted.

$ python bench/linear.py --json          # bench/results/cpu or GPU/DATE-linear.json

    S_t = a_t S_(t-1) + k_t v_t^T,   o_t = q_t S_t / sqrt(D)

Kernels compute chunks of C tokens. With b_i the sum of log a up to token i of the chunk, and S the
state before it:

    o_i = (exp(b_i) q_i S + sum_(j <= i) s_ij v_j) / sqrt(D),   s_ij = exp(b_i - b_j) q_i k_j
    S  <- exp(b_C) S + sum_j exp(b_C - b_j) k_j v_j^T

There is no softmax: what smoothing takes off k must be added to q k^T again, before the decay.

Shapes: B batch, H heads, N sequence, D head_dim of q and k, D_v of v; q, k [B, H, N, D],
v [B, H, N, D_v], log_a [B, H, N].
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import harness, laboratory
from bench.laboratory import DTYPES, MAX, rounded
from bench.measure import relative_l1
from bench.tables import groups, markdown, show, wrapped


@dataclasses.dataclass(frozen=True)
class Rounding:
    """The formats of the operands of each product: ``none``, ``bf16``, ``e4m3`` or ``int8``. The
    8-bit ones have a scale for each vector that a product sums over, of a chunk. Products, S and
    what is added to it are fp32.

    qk: of q and k in q k^T. smooth: of k less its mean over N; q times the mean is added in fp32.
    sv: of s and v in s v.
    state: of exp(b_i) q_i and S, and of exp(b_C - b_j) k_j and v_j, in the products with the state.
    """

    qk: str = "none"
    smooth: bool = False
    sv: str = "none"
    state: str = "none"


SIZE, CHUNK = (2, 2048, 128), 64  # heads, N and D of what is measured; tokens
ROUNDINGS = {
    "bf16": Rounding("bf16", sv="bf16", state="bf16"),
    "INT8 q kᵀ": Rounding("int8", sv="bf16", state="bf16"),
    "INT8 q kᵀ, smooth k": Rounding("int8", True, sv="bf16", state="bf16"),
    "E4M3 q kᵀ": Rounding("e4m3", sv="bf16", state="bf16"),
    "INT8 q kᵀ, E4M3 s v": Rounding("int8", sv="e4m3", state="bf16"),
    "INT8 q kᵀ, E4M3 s v and state": Rounding("int8", sv="e4m3", state="e4m3"),
}


# -- the recurrence, and its emulation in chunks ----


def exact(q: Tensor, k: Tensor, v: Tensor, log_a: Tensor) -> Tensor:
    """The recurrence in float64 -> [B, H, N, D_v]."""
    q, k, v, a = q.double(), k.double(), v.double(), log_a.double().exp()
    S, out = torch.zeros_like(k[:, :, 0, :, None] * v[:, :, 0, None]), []
    for t in range(q.shape[2]):
        S = a[:, :, t, None, None] * S + k[:, :, t, :, None] * v[:, :, t, None]
        out.append((q[:, :, t, None] @ S)[:, :, 0])
    return torch.stack(out, 2) * q.shape[3] ** -0.5


def chunkwise(
    q: Tensor, k: Tensor, v: Tensor, log_a: Tensor, r: Rounding, chunk: int = CHUNK
) -> Tensor:
    """The same in chunks, fp32 but for what is rounded. The last chunk may be shorter."""
    q, k, v = q.float() * q.shape[3] ** -0.5, k.float(), v.float()
    mean = k.mean(2, keepdim=True) if r.smooth else torch.zeros_like(k[:, :, :1])
    S, out = torch.zeros_like(k[:, :, 0, :, None] * v[:, :, 0, None]), []
    for q_c, k_c, v_c, log_c in zip(*(x.split(chunk, 2) for x in (q, k, v, log_a)), strict=True):
        b = log_c.float().cumsum(2)[..., None]  # [B, H, C, 1]
        s = rounded_to(r.qk, q_c, 3) @ rounded_to(r.qk, k_c - mean, 3).mT + q_c @ mean.mT
        s = s * (b - b.mT).tril().exp().tril()
        intra = rounded_to(r.sv, s, 3) @ rounded_to(r.sv, v_c, 2)
        out.append(intra + rounded_to(r.state, b.exp() * q_c, 3) @ rounded_to(r.state, S, 2))
        k_c = (b[:, :, -1:] - b).exp() * k_c
        added = rounded_to(r.state, k_c, 2).mT @ rounded_to(r.state, v_c, 2)
        S = b[:, :, -1:].exp() * S + added
    return torch.cat(out, 2)


def rounded_to(fmt: str, x: Tensor, summed: int) -> Tensor:
    """x rounded to a format and scaled back. summed: the dimension that a product sums over."""
    if fmt in MAX:
        return rounded(x, fmt, x.abs().amax(summed, keepdim=True))
    return x if fmt == "none" else x.to(DTYPES[fmt]).float()


# -- inputs ----

FAMILIES = ("normal", "k_bias", "token_outliers", "relu, no decay")


def draw(family: str, seed: int, H: int, N: int, D: int) -> tuple[Tensor, ...]:
    """q, k, v in bf16, as laboratory.draw has them, and log a = log sigmoid(4 + N(0, 1)): half of
    a state is left after some 24 tokens."""
    if family == "relu, no decay":
        q, k, v = laboratory.draw("normal", seed, H, N, D)
        return q.relu(), k.relu(), v, torch.zeros(1, H, N)
    generator = torch.Generator().manual_seed(1000 + seed)  # not laboratory.draw's numbers again
    gate = torch.randn(1, H, N, generator=generator)
    return *laboratory.draw(family, seed, H, N, D), F.logsigmoid(4 + gate)


# -- what it could gain ----

# An H200's, nominal: bytes and operations a second.
BANDWIDTH, BF16, EIGHT_BITS = 4.8e12, 0.989e15, 1.979e15
TOKENS, HEADS = 65536, 16
SHAPES = ((64, 128, 128), (64, 128, 256), (128, 128, 256), (256, 128, 256))  # C, D, D_v


def count(C: int, D: int, D_v: int) -> dict[str, float]:
    """ms of one forward pass: bytes (each of q, k, v and the output once), with q, k and v arriving
    in 8 bits, and products, all of a chunk, those within chunks in 16 and in 8 bits."""
    of = 1e3 * TOKENS * HEADS
    intra, state = 2 * C * (D + D_v), 4 * D * D_v
    return {
        "bytes": of * (4 * D + 4 * D_v) / BANDWIDTH,
        "bytes, q, k, v in 8 bits": of * (2 * D + 3 * D_v) / BANDWIDTH,
        "within chunks": intra / (intra + state),
        "products": of * (intra + state) / BF16,
        "products, within chunks in 8 bits": of * (intra / EIGHT_BITS + state / BF16),
    }


# -- the bench ----


def main(argv=None) -> int:
    args = harness.parser(__doc__).parse_args(argv)
    device = harness.current(args)
    method = (
        f"One seed of linear.draw, bf16, {[1, *SIZE]}, chunks of {CHUNK}, emulated; relative L1 to "
        "the recurrence in float64, before rounding to bf16"
    )
    result = harness.Result("linear", method, args)
    for family in FAMILIES:
        result.add(measure(family, [x.to(device) for x in draw(family, 0, *SIZE)]))
    show(f"\n{table(result['rows'])}")
    return result.end()


def measure(family: str, inputs: list[Tensor]) -> list[dict]:
    """A row for each of ROUNDINGS."""
    right, rows = exact(*inputs), []
    for name, rounding in ROUNDINGS.items():
        error = relative_l1(chunkwise(*inputs, rounding), right)
        rows.append({"plan": "linear", "family": family, "rounding": name, "rel_l1": error})
    return rows


def table(rows: list[dict]) -> str:
    """A line per rounding, a column per family; then the counts."""
    lines = [["relative L1", *groups(rows, "family")]]
    for name, its in groups(rows, "rounding").items():
        lines.append([name, *(f"{row['rel_l1']:.2%}" for row in its)])
    title = (
        f"Counted: {TOKENS} tokens, {HEADS} heads, ms at an H200's nominal rates; what 8 bits "
        "within chunks gain if only products take time, if bytes and products overlap, and if "
        "q, k and v arrive in 8 bits as well"
    )
    head = ["chunk, D, D_v", "bytes", "products", "within chunks", "products alone", "overlapped"]
    gains = [[*head, "q, k, v in 8 bits"]]
    for shape in SHAPES:
        of = count(*shape)
        few, fast = of["bytes, q, k, v in 8 bits"], of["products, within chunks in 8 bits"]
        now = max(of["bytes"], of["products"])
        x = of["products"] / fast, now / max(of["bytes"], fast), now / max(few, fast)
        line = f"{of['bytes']:.2f}", f"{of['products']:.2f}", f"{of['within chunks']:.0%}"
        gains.append([", ".join(map(str, shape)), *line, *(f"{each:.2f}x" for each in x)])
    return f"{markdown(lines)}\n{wrapped(title)}\n\n{markdown(gains)}"


if __name__ == "__main__":
    harness.run(main)
