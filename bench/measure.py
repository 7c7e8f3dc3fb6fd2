"""How it is measured: inputs, accuracy against float64, and time from replayed CUDA graphs."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from bench.cases import Case
from sage_inductor.ops.reference.exact import attention_exact

WRONG = 0.1  # relative L1 on normal inputs from which an output is wrong, not inaccurate
WINDOW = 1024  # keys that a query sees
SCORES = 2**27  # of exact attention at once: 1 GiB
PADDED = 160  # keys at the end that nobody sees: of 256 tokens of text

# Masks that are a rule: whether query i of batch b sees key j, of B batches and n keys. Of numbers
# and of index tensors alike: the mask, FlexAttention's mask_mod and what the pass proves are one.
SEES = {
    "causal": lambda B, n, b, i, j: j <= i,
    # 3/4 of the keys in batch 0, evenly more in each of the others, not all in the last
    "keys": lambda B, n, b, i, j: j * (4 * B) < n * (3 * B + b),
    "padding": lambda B, n, b, i, j: j < n - PADDED,
    "documents": lambda B, n, b, i, j: i * 4 // n == j * 4 // n,
    "window": lambda B, n, b, i, j: (j <= i) & (j > i - WINDOW),
}


# -- inputs ----


def draw(case: Case, kind: str, device) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, H_q, N, D], k and v [B, H_kv, N, D], bf16; of a shared case [1, H_kv, N, D], all stored
    as [B, N, H, D]. normal: N(0, 1). outlier: what smoothing is
    for: q + 2 N(0, 1) and k + 8 N(0, 1) per (head, channel), v + 8."""
    make = {"device": device, "dtype": torch.bfloat16}
    heads = (case.H_q, case.H_kv, case.H_kv)
    if case.shared:
        of = zip((case.B, 1, 1), heads, strict=True)
        q, k, v = (torch.randn(B, case.N, H, case.D, **make).transpose(1, 2) for B, H in of)
    else:
        q, k, v = (torch.randn(case.B, H, case.N, case.D, **make) for H in heads)
    if kind == "outlier":
        q += 2 * torch.randn(1, case.H_q, 1, case.D, device=device)
        k += 8 * torch.randn(1, case.H_kv, 1, case.D, device=device)
        v += 8
    return q, k, v


def draw_mask(case: Case, device) -> tuple[Tensor, ...]:
    """The attn_mask of a case, if it has one: keys bool [B, 1, 1, N], padding bool [1, 1, 1, N],
    the others [1, 1, N, N]: rows bool, half of it at random; documents (four, one after the other)
    and window bool; bias bf16."""
    match case.mask:
        case "":
            return ()
        case "rows" | "bias":
            bias = torch.randn(1, 1, case.N, case.N, device=device, dtype=torch.bfloat16)
            return (bias if case.mask == "bias" else bias > 0,)
    n = torch.arange(case.N, device=device)
    b = torch.arange(case.B, device=device)[:, None, None, None]
    mask = SEES[case.mask](case.B, case.N, b, n[:, None], n)
    return (mask[(None,) * (4 - mask.dim())],)


def draw_sets(case: Case, device, dynamic: bool) -> list[tuple[Tensor, ...]]:
    """(q, k, v) or (q, k, v, attn_mask): enough input sets that with their outputs they fill the L2
    cache twice over, so that when a set's turn comes again, the others have pushed it out. One mask
    for all sets, as for all layers of a model."""
    set_bytes = 2 * case.B * (2 * case.H_q + 2 * case.H_kv) * case.N * case.D
    l2_bytes = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
    count = min(64, max(1, math.ceil(2 * l2_bytes / set_bytes)))
    mask = draw_mask(case, device)
    sets = [(*draw(case, "normal", device), *mask) for _ in range(count)]
    if dynamic:
        mark_dynamic(sets)
    return sets


def mark_dynamic(sets: list[tuple[Tensor, ...]]) -> None:
    """N is symbolic wherever it is a dimension."""
    for q, k, v, *masks in sets:
        for x in (q, k, v):
            torch._dynamo.mark_dynamic(x, 2)
        for mask in masks:
            torch._dynamo.mark_dynamic(mask, [d for d in (2, 3) if mask.shape[d] > 1])


# -- accuracy ----


class Exact:
    """Exact attention in float64 over the first and the last head of the last batch."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, mask=None, *, is_causal: bool):
        self.heads = sorted({0, q.shape[1] - 1})
        heads_kv = [h * k.shape[1] // q.shape[1] for h in self.heads]
        q, k, v = q[-1, self.heads].double(), k[-1, heads_kv].double(), v[-1, heads_kv].double()
        mask = None if mask is None else mask[-1, 0]  # [N or 1, N]
        self.out = attention(q, k, v, is_causal, mask)  # [heads, N, D]
        self.v_mean = v.mean(1, keepdim=True)

    def compare(self, out: Tensor) -> dict[str, float]:
        """`errors` of out [B, H_q, N, D]."""
        return errors(out[-1, self.heads].double(), self.out, self.v_mean)


def relative_l1(out: Tensor, exact: Tensor) -> float:
    return ((out - exact).abs().sum() / exact.abs().sum()).item()


def errors(out: Tensor, exact: Tensor, v_mean: Tensor) -> dict[str, float]:
    """CosSim, relative L1 and RMSE of out [..., N, D]; centred: with v's mean over the sequence
    [..., 1, D], which hides what attention adds to it, taken off both. All in float64."""
    error = out - exact
    return {
        "cos_sim": (out * exact).sum().div(out.norm() * exact.norm()).item(),
        "rel_l1": relative_l1(out, exact),
        "rmse": error.square().mean().sqrt().item(),
        "centred_rel_l1": error.abs().sum().div((exact - v_mean).abs().sum()).item(),
    }


def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, mask=None) -> Tensor:
    """`attention_exact` of q [H, N_q, D], k and v [H, N, D] in blocks of rows that fit in memory.
    is_causal: row i sees keys 0 .. i. mask: [N_q or 1, N], bool or additive."""
    (H, N_q, D), N = q.shape, k.shape[1]
    rows = max(1, SCORES // (H * N))
    out = torch.full_like(q, math.nan)
    for start in range(0, N_q, rows):
        block = slice(start, min(start + rows, N_q))
        some = mask if mask is None or len(mask) == 1 else mask[block]
        right = start if is_causal else None  # of the block's first row
        given = (x[None] for x in (q[:, block], k, v))
        out[:, block] = attention_exact(*given, D**-0.5, some, right=right)[0][0]
    return out


# -- time ----


@dataclasses.dataclass(frozen=True)
class Provider:
    name: str
    call: Callable  # what is timed: (*prepared) -> out [B, H_q, N, D]
    prepare: Callable = lambda *inputs: inputs  # done before the clock starts
    recipe: str | None = None
    captures: bool = True  # False: a CUDA graph of it would be wrong


class Runner:
    """One provider over all input sets, as a CUDA graph: each call once, one after the other. If it
    cannot or must not be captured, `captured` is False and `run` launches the calls."""

    def __init__(self, provider: Provider, sets):
        self.provider = provider
        self.args = [provider.prepare(*each) for each in sets]
        self.out = None
        self._launch()  # compiles
        self._launch()
        torch.cuda.synchronize()
        self.run, self.captured = self._launch, False
        if not provider.captures:
            return
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._launch()
            self.run, self.captured = graph.replay, True
        except RuntimeError:
            self._launch()

    def _launch(self) -> None:
        for args in self.args:
            self.out = self.provider.call(*args)

    def peak_bytes(self) -> int:
        """What one call has allocated at most, beside its inputs: its output too. Launched, because
        graphs keep what they allocate."""
        before = torch.cuda.memory_allocated()
        return peak_bytes(lambda: self.provider.call(*self.args[-1])) - before

    def output(self) -> Tensor:
        """What the timed code makes of the last set; NaN where it writes nothing."""
        self.out.fill_(math.nan)
        self.run()
        return self.out

    def load(self, *inputs: Tensor) -> None:
        """Put new inputs where the last set is read."""
        for old, new in zip(self.args[-1], self.provider.prepare(*inputs), strict=True):
            if isinstance(old, Tensor):
                old.copy_(new)


def peak_bytes(call: Callable) -> int:
    """What the process has allocated at most meanwhile."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def interleave(runners: dict[str, Runner], rounds: int, target_ms: float) -> dict[str, list[float]]:
    """ms per call of each runner in each round."""
    times = in_turns({name: r.run for name, r in runners.items()}, rounds, target_ms, burst)
    return {name: [ms / len(runners[name].args) for ms in each] for name, each in times.items()}


def in_turns(
    calls: dict[str, Callable], rounds: int, target_ms: float, clock: Callable, least: int = 1
) -> dict[str, list[float]]:
    """What clock(call, repeats) says, ms, of each call in each round. A card at its power limit
    slows down as it warms, so calls take turns, in `order`, and run a third of a turn before their
    clock starts. least: repeats of the shortest turn."""
    repeats = {
        name: max(least, round(target_ms / clock(call, least))) for name, call in calls.items()
    }
    times = {name: [] for name in calls}
    for turn in range(rounds):
        for name in order(list(calls), turn):
            clock(calls[name], max(1, repeats[name] // 3))
            times[name].append(clock(calls[name], repeats[name]))
    return times


def order(names: list[str], turn: int) -> list[str]:
    """The order of one round: over as many rounds as there are names (an even number of them),
    each runs once right after each other one (a Williams square). What runs after a provider that
    draws much power finds a slower card: up to 8 % on an H200."""
    n = len(names)
    zigzag = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(n)]  # 0, 1, -1, 2, -2, ...
    return [names[(place + turn) % n] for place in zigzag]


def burst(run, repeats: int) -> float:
    """ms per run, between two events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def wall(synchronize: Callable, call: Callable, repeats: int) -> float:
    """Wall-clock ms per call, the host's share included."""
    synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize()
    return (time.perf_counter() - begin) / repeats * 1e3


def summary(times: list[float]) -> dict[str, float]:
    return {"ms": statistics.median(times), "ms_min": min(times), "ms_max": max(times)}
