"""How keys travel between the ranks of ``sage::gather_sdpa``: the way of the least predicted time.

The bytes that a rank receives, copies and prepares are counted. The rates are measured when a group
first meets, which takes two H200s some 10 ms by count. The slowest rank's count on all ranks, so
every rank chooses the same way. If the ranks map each other's memory (peers.py), rows are written
there.

Shapes: gather.py's.
"""

import math
import time
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sage_inductor.ops import compat
from sage_inductor.ops.distributed import peers
from sage_inductor.ops.distributed.exchange import ALIGN, all_gather
from sage_inductor.ops.gpus import captures
from sage_inductor.ops.notes import NOTES
from sage_inductor.ops.recipe import Recipe

WAYS = {  # as reports say it
    "rows": "k and v in {bits} bits, gathered",
    "heads": "all rows of some heads, exchanged",
    "codes": "8-bit codes of k and v, gathered",
}
# Bytes that a rank sends and copies to measure its group: enough for full speed, and more than any
# L2. On a CPU kernels are emulated, and nobody waits for keys.
SENT = {"cuda": 2**26, "cpu": 2**16}
COPIED = {"cuda": 2**27, "cpu": 2**16}
REPEATS, IN_A_ROW = 2, 4
ROW = 128  # bytes that are written in one piece, as a head's are
# Two H100s and two H200s, torch 2.11 (bench/results/*/2026-11-28-parallel.json):
FLOPS = 0.95e15  # 8-bit attention's a second, of long calls
EXPONENTIAL = 200  # D + D_v of the products that take as long as the exponential of a pair
STRIDED = 2.0  # times as long as a copy of as many bytes: codes that are padded
SMALL = {"rows": 0.0, "heads": 2e-5, "codes": 9e-5}  # seconds of kernels on few bytes
WRITTEN = {"rows": 3.6e-5, "heads": 4.3e-5}  # of the same, if rows are written
HOST = {"rows": 1.6e-3, "heads": 2.2e-3, "codes": 4.2e-3}  # seconds of a call in eager


class Rates(NamedTuple):
    """Rates of a group's slowest rank."""

    gather: float  # bytes a second that a rank receives in an all_gather
    exchange: float  # in an all_to_all
    copy: float  # bytes a second that a rank reads and writes
    start: float  # seconds, a collective of few bytes
    put: float = 0.0  # bytes a second that a rank writes to the others; 0: it does not map them


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
        P, N, most = len(self.lengths), sum(self.lengths), max(self.lengths)
        if way == "rows":
            sizes = [N * self.H_kv * D * self.itemsize for D in (self.D, self.D_v)]
        elif way == "heads":
            q, k, v = ((self.H_q, self.D), (self.H_kv, self.D), (self.H_kv, self.D_v))
            sizes = [N * H // P * D * self.itemsize for H, D in (q, k, v)]
            sizes += [most * self.H_q * self.D_v * self.itemsize, most * self.H_q * 4]  # out, lse
        else:
            sizes = []
        return sum(self.B * size + ALIGN for size in sizes)

    def seconds(self, way: str, rates: Rates) -> float:
        """The whole call's time without the host's part, on the rank that computes most."""
        P, n, N = len(self.lengths), max(self.lengths), sum(self.lengths)
        of_kv = self.B * self.H_kv * (self.D + self.D_v)  # numbers of a row of keys
        of_q = self.B * self.H_q * (self.D + self.D_v)  # and of a row of queries and outputs
        prepared = of_kv * (self.itemsize + 1)  # bytes read and written for a row of keys
        by_peers = rates.put > 0 and way in WRITTEN
        if way == "codes":
            received, starts, rate = (P - 1) * n * of_kv, 3, rates.gather
            copied = n * prepared + STRIDED * 2 * (n + N) * of_kv
        elif way == "rows":
            sent = n * of_kv * self.itemsize
            received, starts, rate = (P - 1) * sent, 3, rates.gather
            copied = N * prepared + 2 * sent * by_peers
        else:
            sent, of_out = n * (of_kv + of_q) * self.itemsize, of_q * n * self.itemsize
            received, starts, rate = (P - 1) / P * sent, 6, rates.exchange
            copied = N * prepared / P + (2 * sent / P + of_out if by_peers else 2 * sent)
        if by_peers:
            starts, rate = 1, rates.put
        ends = starts * rates.start + received / rate
        pairs = n * N
        if self.is_causal:  # the last rank's queries see most keys; by heads all ranks see as many
            pairs = n * N / 2 if way == "heads" else n * (N - n / 2)
        products = 2 * self.B * self.H_q * max(self.D + self.D_v, EXPONENTIAL) * pairs
        small = (WRITTEN if by_peers else SMALL)[way]
        return ends + small + copied / rates.copy + products / FLOPS


def choose(transfer: Transfer, group, device: torch.device) -> str:
    """The way of the least predicted time, on every rank the same. Every rank has to ask."""
    if group.size() == 1:
        return "rows"
    memory, rates = peers.of(group, device), rates_of(group, device)
    host = {} if captures(device) else HOST
    times, by_peers = {}, {}
    for way in WAYS:
        if transfer.why_not(way) is None:
            size = transfer.written(way)
            by_peers[way] = memory is not None and way in WRITTEN and memory.fits(size)
            its = rates if by_peers[way] else rates._replace(put=0.0)
            times[way] = max(host.get(way, 0), transfer.seconds(way, its))
    best = min(times, key=times.__getitem__)
    by_peers[best] = by_peers[best] and memory.reserve(transfer.written(best))
    how = "written to the GPUs' memory" if by_peers[best] else "by collectives"
    # By call but for its lengths.
    NOTES[(len(transfer.lengths), *transfer[1:])] = _line(transfer, best, how, times)
    return best


def _line(transfer: Transfer, best: str, how: str, times: dict[str, float]) -> str:
    others = ", ".join(f"{way} {seconds * 1e3:.3g}" for way, seconds in times.items())
    what = WAYS[best].format(bits=transfer.itemsize * 8)
    return (
        f"gather_attention of {len(transfer.lengths)} ranks, {sum(transfer.lengths)} keys, "
        f"{transfer.H_q} heads of {transfer.D}: {what}, {how} (predicted ms: {others})"
    )


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
    P, sent, copied = group.size(), SENT[device.type], COPIED[device.type]
    mine = torch.zeros(sent - sent % (P * ROW), dtype=torch.uint8, device=device)
    everyones, other = mine.new_empty(P * mine.numel()), torch.empty_like(mine)
    large = torch.zeros(copied, dtype=torch.uint8, device=device)
    to = torch.empty_like(large)
    few, of_few = mine[:64], everyones[: 64 * P]
    each = [mine.numel() // P] * P
    calls = [
        lambda: compat.all_gather_single(everyones, mine, group=group),
        lambda: compat.all_to_all_single(other, mine, each, each, group=group),
        lambda: to.copy_(large),
        lambda: compat.all_gather_single(of_few, few, group=group),
    ]
    memory = peers.of(group, device)
    if memory is not None and memory.reserve(mine.numel()):
        calls.append(lambda: _put(mine, memory))
    ours = [_clock(call, device) for call in calls]
    ours = torch.tensor(ours, dtype=torch.float64, device=device).view(torch.uint8)
    theirs = all_gather(ours, group).view(torch.float64)  # [P, calls]
    gather, exchange, copy, start, *put = theirs.amax(0).tolist()
    received = (P - 1) * mine.numel()
    rates = Rates(received / gather, received / P / exchange, 2 * copied / copy, start)
    if put and put[0] > exchange:  # some GPUs reach each other slowly over PCIe
        memory.give_up()
    elif put:
        rates = rates._replace(put=received / P / put[0])
    return rates


def _put(mine: Tensor, memory: peers.PeerMemory) -> None:
    """A part to each other rank."""
    for rank, part in enumerate(mine.view(torch.int64).view(-1, memory.P, ROW // 8).unbind(1)):
        if rank != memory.rank:
            at = memory.rank * part.nbytes
            memory.array(rank, part.shape, part.dtype, at).copy_(part)
    memory.arrive()


def _clock(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one of several in a row, the least of several times."""
    best = math.inf
    for _ in range(REPEATS):
        _synchronize(device)
        start = time.perf_counter()
        for _ in range(IN_A_ROW):
            call()
        _synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best / IN_A_ROW


def _synchronize(device: torch.device) -> None:
    """Not with other streams, where another group's sends and receives may wait for this rank."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
