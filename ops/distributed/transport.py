"""How keys travel between the ranks of ``sage::gather_sdpa``: the way of the least predicted time.

The bytes that a rank receives, copies and prepares are counted. What they take is measured when a
group first meets, by what a call sends them by: two sizes say what a message takes that has no
bytes, and what a byte adds, whatever the number of ranks. Two H200s need some 25 ms by count. The
slowest rank's count on all ranks, so every rank chooses the same way. If the ranks map each other's
memory (peers.py), rows are written there.

Shapes: gather.py's.
"""

import math
import time
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sage_inductor.ops.distributed import peers
from sage_inductor.ops.distributed.exchange import ALIGN, Collectives, Peers, all_gather
from sage_inductor.ops.gpus import captures
from sage_inductor.ops.notes import NOTES
from sage_inductor.ops.recipe import Recipe

WAYS = {  # as reports say it
    "rows": "k and v in {bits} bits, gathered",
    "heads": "all rows of some heads, exchanged",
    "codes": "8-bit codes of k and v, gathered",
}
# Bytes that a rank sends to measure its group: a short call's, and a long one's. It copies twice as
# many, more than any L2. On a CPU kernels are emulated, and nobody waits for keys.
SENT = {"cuda": (2**20, 2**26), "cpu": (2**14, 2**16)}
REPEATS, IN_A_ROW = 3, 4
# Copies, 1.6 ms: more than a busy host takes to launch IN_A_ROW exchanges. With a third as many an
# exchange of 34 us was once measured as 84.
AHEAD = 24
# Two H100s and two H200s, torch 2.11 (bench/results/*/2026-11-28-parallel.json):
FLOPS = 0.95e15  # 8-bit attention's a second, of long calls
EXPONENTIAL = 200  # D + D_v of the products that take as long as the exponential of a pair
STRIDED = 2.0  # times as long as a copy of as many bytes: codes that are padded
KERNELS = 50, 3  # on few bytes, for codes: of a call, and of each rank (counted)
HOST = {"rows": 1.6e-3, "heads": 2.2e-3, "codes": 4.2e-3}  # seconds of a call in eager


class Line(NamedTuple):
    """Seconds of a message: start + bytes / rate."""

    start: float
    rate: float

    @classmethod
    def through(cls, sizes: Sequence[float], seconds: Sequence[float]) -> "Line":
        """sizes, seconds: of a small and of a large message. The start is at most half of the large
        one's time: if it seems longer, something held up the small one."""
        (small, large), (its, whole) = sizes, seconds
        start = min(max((large * its - small * whole) / (large - small), 0.0), whole / 2)
        return cls(start, large / (whole - start))


class Rates(NamedTuple):
    """What a group's slowest rank takes. A line counts the bytes that a rank receives."""

    gather: Line  # all rows
    exchange: Line  # all rows of some heads, by collectives, with the copies before them
    copy: float  # bytes a second that a rank reads and writes
    launch: float  # seconds, of a kernel on few bytes
    put: Line | None = None  # rows that others write to its memory; None: it is not mapped


class Transfer(NamedTuple):
    """The keys and values of one call, as all ranks know them."""

    lengths: tuple[int, ...]
    B: int
    H_q: int
    H_kv: int
    D: int
    D_v: int
    itemsize: int
    is_causal: bool
    square: bool  # every rank has as many queries as keys
    recipe: Recipe

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], is_causal: bool,
        recipe: Recipe,
    ) -> "Transfer":  # fmt: skip
        B, H_q, N_q, D = q.shape
        dims = B, H_q, k.shape[1], D, v.shape[3], q.dtype.itemsize
        return cls(tuple(lengths), *dims, is_causal, N_q == k.shape[2], recipe)

    def why_not(self, way: str) -> str | None:
        """The reason that keys cannot travel so, if there is one."""
        P = len(self.lengths)
        if way not in WAYS:
            return f"way must be one of {tuple(WAYS)}, got {way!r}"
        if way == "codes" and not self.recipe.sharing.one_pass:
            return f"granularity {self.recipe.granularity!r} asks for statistics of all rows"
        if way == "codes" and self.recipe.of_pv.dtype is None:
            return f"pv={self.recipe.pv!r} has no 8-bit codes of v"
        if way == "heads" and not self.square:
            return "heads are exchanged if there are as many queries as keys"
        if way == "heads" and (self.H_q % P or self.H_kv % P):
            return f"{P} ranks do not divide {self.H_q} heads of q and {self.H_kv} of k"
        return None

    def written(self, way: str) -> int:
        """Bytes in a rank's memory that hold what it is sent, if the ranks map it."""
        if way == "codes":
            return 0
        P, N = len(self.lengths), sum(self.lengths)
        size = N * self.H_kv * (self.D + self.D_v) * self.itemsize
        if way == "heads":  # of q, too, and of out and lse
            size = (size + N * self.H_q * self.D * self.itemsize) // P
            size += max(self.lengths) * self.H_q * (self.D_v * self.itemsize + 4)
        return self.B * size + 5 * ALIGN

    def seconds(self, way: str, rates: Rates) -> float:
        """The whole call's time without the host's part, on the rank that computes most."""
        P, n, N = len(self.lengths), max(self.lengths), sum(self.lengths)
        of_kv = self.B * self.H_kv * (self.D + self.D_v)  # numbers of a row of keys
        of_q = self.B * self.H_q * (self.D + self.D_v)  # and of a row of queries and outputs
        prepared = of_kv * (self.itemsize + 1)  # bytes read and written for a row of keys
        ends = rates.gather.start  # of what the ranks agree on
        if way == "codes":
            line, messages, received = rates.gather, 2, (P - 1) * n * of_kv
            copied = n * prepared + STRIDED * 2 * (n + N) * of_kv
            ends += (KERNELS[0] + KERNELS[1] * P) * rates.launch
        elif way == "rows":
            line, messages = (rates.put, 1) if rates.put else (rates.gather, 2)
            received, copied = (P - 1) * n * of_kv * self.itemsize, N * prepared
        else:  # to this rank, and back
            line, messages = (rates.put, 2) if rates.put else (rates.exchange, 5)
            received = (P - 1) / P * n * (of_kv + of_q) * self.itemsize
            copied = N * prepared / P + n * of_q * self.itemsize
        ends += messages * line.start + received / line.rate
        pairs = n * N
        if self.is_causal:  # the last rank's queries see most keys; by heads all ranks see as many
            pairs = n * N / 2 if way == "heads" else n * (N - n / 2)
        products = 2 * self.B * self.H_q * max(self.D + self.D_v, EXPONENTIAL) * pairs
        return ends + copied / rates.copy + products / FLOPS


def choose(transfer: Transfer, group, device: torch.device) -> str:
    """The way of the least predicted time, on every rank the same. Every rank has to ask."""
    if group.size() == 1:
        return "rows"
    memory, rates = peers.of(group, device), rates_of(group, device)
    host = {} if captures(device) else HOST
    times, mapped = {}, {}
    for way in WAYS:
        if transfer.why_not(way) is None:
            size = transfer.written(way)
            mapped[way] = memory is not None and size > 0 and memory.fits(size)
            its = rates if mapped[way] else rates._replace(put=None)
            times[way] = max(host.get(way, 0), transfer.seconds(way, its))
    best = min(times, key=times.__getitem__)
    mapped[best] = mapped[best] and memory.reserve(transfer.written(best))
    how = "written to the GPUs' memory" if mapped[best] else "by collectives"
    what = WAYS[best].format(bits=transfer.itemsize * 8)
    predicted = ", ".join(f"{way} {seconds * 1e3:.3g}" for way, seconds in times.items())
    # By call but for its lengths.
    NOTES[(len(transfer.lengths), *transfer[1:])] = (
        f"gather_attention of {len(transfer.lengths)} ranks, {sum(transfer.lengths)} keys, "
        f"{transfer.H_q} heads of {transfer.D}: {what}, {how} (predicted ms: {predicted})"
    )
    return best


# -- the rates of a group ----

_measured: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()


def rates_of(group, device: torch.device) -> Rates:
    """Measured where the group first meets. Every rank has to ask, as often as the others."""
    if group not in _measured:
        if captures(device):
            raise RuntimeError(
                "sage_inductor.gather_attention measures a group when it first meets: call it once "
                "before a CUDA graph is captured"
            )
        _measured[group] = _measure(group, device)
    return _measured[group]


def _measure(group, device: torch.device) -> Rates:
    P, memory, sent = group.size(), peers.of(group, device), SENT[device.type]
    large = torch.zeros(2 * sent[-1], dtype=torch.uint8, device=device)
    to, few = torch.empty_like(large), large[:64]
    xs = [  # as a projection stores N_r rows of P heads of 128 bytes
        torch.zeros(size // 128 // P, 1, P, 64, dtype=torch.half, device=device).permute(1, 2, 0, 3)
        for size in sent
    ]
    moves = (lambda n: Collectives(group, n).rows, lambda n: Collectives(group, n).heads)
    if memory is not None and memory.reserve(xs[-1].nbytes):
        moves += (lambda n: Peers(memory, n).heads,)
    calls = [lambda: to.copy_(large), lambda: few.fill_(0)]
    calls += [lambda x=x, by=by: by((x.shape[2],) * P)((x,)) for by in moves for x in xs]

    def ahead() -> None:
        all_gather(few, group)  # the ranks begin together
        for _ in range(AHEAD):
            to.copy_(large)

    ours = torch.tensor([_clock(call, ahead, device) for call in calls], dtype=torch.float64)
    theirs = all_gather(ours.view(torch.uint8).to(device), group).view(torch.float64)  # [P, calls]
    (copy, launch), *times = theirs.amax(0).view(-1, 2).tolist()
    if len(times) == 3 and times[2][1] > times[1][1]:  # some GPUs reach each other slowly over PCIe
        memory.give_up()
        times.pop()
    gather, exchange, *put = (
        Line.through([each * (P - 1) / P * x.nbytes for x in xs], its)
        for each, its in zip((P, 1, 1), times, strict=False)
    )
    return Rates(gather, exchange, 2 * large.nbytes / copy, launch, *put)


def _clock(call: Callable[[], object], ahead: Callable[[], None], device: torch.device) -> float:
    """Seconds of one of several in a row, the least of several times. A GPU is kept busy before, so
    that it waits for the host no more than in a CUDA graph. Nobody waits for other streams, where
    another group's sends and receives may wait for this rank."""
    best = math.inf
    for _ in range(REPEATS):
        ahead()
        start = _now(device)
        for _ in range(IN_A_ROW):
            call()
        best = min(best, _since(start, device))
    return best / IN_A_ROW


def _now(device: torch.device):
    if device.type != "cuda":
        return time.perf_counter()
    return torch.cuda.current_stream(device).record_event(torch.cuda.Event(enable_timing=True))


def _since(start, device: torch.device) -> float:
    end = _now(device)
    if device.type != "cuda":
        return end - start
    torch.cuda.current_stream(device).synchronize()
    return start.elapsed_time(end) / 1e3
