"""Attention whose sequence is spread over several GPUs: times, bytes and scaling efficiency.

$ torchrun --nproc-per-node 2 bench/parallel.py          # any number of GPUs
$ torchrun --nproc-per-node 2 bench/parallel.py --json   # and bench/results/GPU/DATE-parallel.json
$ NCCL_P2P_DISABLE=1 torchrun ...                        # through the host's memory: parallel-host
$ NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 torchrun ...     # through sockets: parallel-sockets

Each of P ranks has N / P rows of q, k and v, and makes its rows of the output:

    rows, heads, codes   `sage_inductor.gather_attention` by each way of transport.py; the one that
                         it chooses is marked
    SDPA                 k and v are gathered as they are, and attention is SDPA's

All but SDPA compute by one recipe. A call is a CUDA graph; "eager" is without it. The efficiency is
the time of one GPU for the whole, over P times a way's. "rows, collectives" and "heads,
collectives" are the ways where GPUs do not map each other's memory. Beside the P of this run, other
P are computed ("~"): the time of one GPU for a rank's part, with a copy in place of what is sent,
and that by the bandwidths measured here. The computed time of this run's own P says how far to
trust that.

With --calls n random calls are timed on one GPU and on all, by the way that is chosen.

Shapes: B = 1, H heads, N tokens, head_dim D; bf16, stored as [B, N, H, D].
"""

import contextlib
import functools
import itertools
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from bench import harness
from bench.measure import WRONG, in_turns, relative_l1
from bench.tables import case_of, groups, markdown, show
from sage_inductor.ops import compat
from sage_inductor.ops.distributed import peers, transport
from sage_inductor.ops.recipe import NAMED
from sage_inductor.ops.sdpa import SdpaCall, compose

RECIPE = "sage2-8b-rotated"


class Case(NamedTuple):
    name: str
    N: int
    H: int
    D: int


CASES = (
    Case("Wan 14B, 720p", 75600, 40, 128),
    Case("CogVideoX", 17776, 48, 64),
    Case("Flux", 4608, 24, 128),
)
RANKS = 2, 4, 8
SIZES = 9, 14  # of a rank's rows in random calls, by powers of two
SHARDS = tuple(2**n for n in (14, 20, 22, 24, 26, 28, 30))  # bytes that a rank sends


def main(argv=None) -> int:
    parser = harness.parser(__doc__, rounds=6, target_ms=200.0)
    parser.add_argument("--calls", type=int, default=0, help="random calls, beside the cases")
    args = parser.parse_args(argv)
    with as_a_rank(args):
        return measure_all(args)


@contextlib.contextmanager
def as_a_rank(args) -> Iterator[None]:
    """Join the group, on the GPU of this rank. Only the first rank prints and saves."""
    on_gpus = args.device.type == "cuda"
    if on_gpus:
        args.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        harness.gpu(args)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if on_gpus else "gloo")
    if dist.get_rank():
        args.json = None
    with contextlib.redirect_stdout(None if dist.get_rank() else sys.stdout):
        yield


def measure_all(args) -> int:
    """Of every rank the same; the first prints and saves."""
    torch.set_grad_enabled(False)
    rank, world = dist.get_rank(), dist.get_world_size()
    clock = Clock(args.device, args.rounds, args.target_ms)
    method = (
        f"bf16, {RECIPE}, CUDA graphs; median of {args.rounds} rounds of {args.target_ms:g} ms, in "
        "turns, of the slowest rank"
    )
    memory = peers.of(dist.group.WORLD, args.device)
    bandwidth = bandwidths(clock, world, memory) if world > 1 else []
    result = harness.Result(plan(), method, args, world=world, bandwidth=bandwidth)
    for case in CASES:
        rows = measure(case, clock, world, rank, bandwidth, memory)
        result.add(rows)
        show(case_table(case, rows))
    if world > 1:
        result["rates"] = transport.rates_of(dist.group.WORLD, args.device)._asdict()
        result["calls"] = []
        for row in random_calls(args.calls, clock, world, rank):
            result["calls"].append(row)
            result.save()
        show(calls_table(result["calls"], world))
    return result.end()


def plan() -> str:
    """The result's name. It says what NCCL exchanges by, if its settings forbid what is faster."""
    peers_off, host_off = (os.environ.get(name) == "1" for name in harness.NCCL)
    if not peers_off:
        return "parallel"
    return "parallel-sockets" if host_off else "parallel-host"


# -- time ----


class Clock:
    """ms, of the slowest rank. Every rank has to ask for the same."""

    def __init__(self, device: torch.device, rounds: int, target_ms: float):
        self.device, self.rounds, self.target_ms = device, rounds, target_ms

    def __call__(self, calls: dict[str, Callable]) -> dict[str, float]:
        """The median of each, on GPUs as a CUDA graph."""
        for call in calls.values():
            call()  # compiles
        if self.device.type == "cuda":
            calls = {name: self.captured(call) for name, call in calls.items()}
        return self.eager(calls)

    def eager(self, calls: dict[str, Callable]) -> dict[str, float]:
        times = in_turns(calls, self.rounds, self.target_ms, self.burst)
        return {name: statistics.median(each) for name, each in times.items()}

    def captured(self, call: Callable) -> Callable:
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            call()
        return graph.replay

    def burst(self, call: Callable, repeats: int) -> float:
        dist.barrier()
        self.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        self.synchronize()
        ms = torch.tensor((time.perf_counter() - start) / repeats * 1e3, device=self.device)
        dist.all_reduce(ms, dist.ReduceOp.MAX)
        return ms.item()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


# -- what is sent ----


class Link:
    """What the providers send, counted. Without a group P ranks send what this one sends.

    memory: of the group's GPUs, if they map each other's."""

    def __init__(self, P: int, group=None, memory: peers.PeerMemory | None = None):
        self.P, self.group = P, group
        self.memory = memory and Counted(self, memory)
        self.sent: list[tuple[str, int]] = []  # name, and bytes of this rank

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        """out [P, *x.shape] of every rank's x."""
        self.sent.append(("all_gather", x.nbytes))
        if self.group is None:
            out.view(self.P, -1).copy_(x.view(1, -1))
        else:
            dist.all_gather_into_tensor(_bytes(out), _bytes(x), group=self.group)

    def all_to_all(self, out: Tensor, x: Tensor) -> None:
        """out: of every rank's x, in P parts, the one for this rank."""
        self.sent.append(("all_to_all", x.nbytes))
        if self.group is None:
            out.copy_(x)
        else:
            dist.all_to_all_single(_bytes(out), _bytes(x), group=self.group)

    @contextlib.contextmanager
    def in_the_library(self):
        """`sage::gather_sdpa` sends by this."""
        group = (
            SimpleNamespace(size=lambda: self.P, rank=lambda: 0)
            if self.group is None
            else self.group
        )
        instead = {
            "all_gather_single": lambda out, x, group: self.all_gather(out, x),
            "all_to_all_single": lambda out, x, *_, group: self.all_to_all(out, x),
            "process_group": lambda name: group,
        }
        with (
            mock.patch.multiple(compat, **instead),
            mock.patch.object(peers, "of", lambda *_: self.memory),
        ):
            yield


class Counted:
    """A group's memory, of whose arrays each rank writes an equal part. Without a group this rank's
    is in place of all."""

    def __init__(self, link: Link, memory: peers.PeerMemory):
        self.link, self.memory = link, memory
        self.rank = memory.rank if link.group else 0

    def reserve(self, size: int) -> bool:
        return self.memory.reserve(size)

    def array(self, rank: int, shape, dtype: torch.dtype, at: int) -> Tensor:
        if rank != self.rank:
            self.link.sent.append(("put", math.prod(shape) * dtype.itemsize // self.link.P))
        return self.memory.array(rank if self.link.group else self.memory.rank, shape, dtype, at)

    def arrive(self) -> None:
        if self.link.group:
            self.memory.arrive()

    def in_order(self):
        return self.memory.in_order()


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


def received(name: str, sent: int, P: int) -> float:
    """Bytes that a rank receives of P, of which each sends as many."""
    return {"all_gather": sent * (P - 1), "all_to_all": sent * (P - 1) / P, "put": sent}[name]


def bandwidths(clock: Clock, world: int, memory: peers.PeerMemory | None) -> list[dict]:
    rows = []
    for shard in SHARDS:
        x = torch.zeros(shard, dtype=torch.uint8, device=clock.device)
        link, out = Link(world, dist.group.WORLD), x.new_empty(world, shard)
        parts = x[: shard - shard % world]
        calls = {
            "all_gather": lambda link=link, out=out, x=x: link.all_gather(out, x),
            "all_to_all": lambda link=link, out=out, x=parts: link.all_to_all(
                out.view(-1)[: len(x)], x
            ),
        }  # fmt: skip
        if memory is not None and memory.reserve(shard):
            calls["put"] = functools.partial(put, memory, x)
        ms = clock(calls)
        for name, each in ms.items():
            GBs = received(name, shard, world) / each / 1e6
            rows.append({"collective": name, "shard": shard, "ms": each, "GBs": GBs})
    return rows


def put(memory: peers.PeerMemory, x: Tensor) -> None:
    """x to the next rank, in pieces of 128 bytes, as heads are."""
    pieces = x.view(torch.int64).view(-1, 2, 16).transpose(0, 1)
    to = memory.array((memory.rank + 1) % memory.P, pieces.shape, pieces.dtype, 0)
    to.copy_(pieces)
    memory.arrive()


def communication(sent: list[tuple[str, int]], P: int, bandwidth: list[dict]) -> float:
    """ms of collectives of P ranks, by the measured ones: as many bytes a second are received at a
    shard's size, and no collective is shorter than the shortest measured."""
    ms = 0.0
    for name, shard in sent:
        rows = [row for row in bandwidth if row["collective"] == name]
        if rows:
            GBs = interpolated(shard, [row["shard"] for row in rows], [row["GBs"] for row in rows])
            least = min(row["ms"] for row in rows)
            ms += max(least, received(name, shard, P) / GBs / 1e6)
    return ms


def interpolated(x: float, xs: list, ys: list) -> float:
    """y at x, linear in log x between those that are known; beyond them the nearest."""
    if x <= xs[0]:
        return ys[0]
    for x0, x1, y0, y1 in zip(xs, xs[1:], ys, ys[1:], strict=False):
        if x <= x1:
            return y0 + (y1 - y0) * math.log(x / x0) / math.log(x1 / x0)
    return ys[-1]


# -- attention ----


def one_device(q: Tensor, k: Tensor, v: Tensor, right: int | None = None) -> Tensor:
    """out [1, H, N, D] of q [1, H, N_q, D] and k, v [1, H, N, D]."""
    recipe = NAMED[RECIPE].encode()
    call = SdpaCall(
        q, k, v, None, [], None, right, False, q.shape[3] ** -0.5, recipe, None,
        out_bnhd=True, portable=False,
    )  # fmt: skip
    return compose(call)[0]


def together(way: str, link: Link, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    asked = q.shape[3] ** -0.5, NAMED[RECIPE].encode(), None, way
    with link.in_the_library():
        return torch.ops.sage.gather_sdpa(q, k, v, "", False, *asked)[0]


def by_sdpa(link: Link, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    everyones = []
    for x in (k, v):
        rows = x.transpose(1, 2).flatten(0, 1)  # [N_r, H, D], contiguous
        out = rows.new_empty(link.P, *rows.shape)
        link.all_gather(out, rows)
        everyones.append(out.flatten(0, 1)[None].transpose(1, 2))
    return F.scaled_dot_product_attention(q, *everyones)


def by_collectives(way: str, link: Link, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with mock.patch.object(link, "memory", None):
        return together(way, link, q, k, v)


PROVIDERS = {
    **{way: functools.partial(together, way) for way in transport.WAYS},
    "SDPA": by_sdpa,
}
WRITTEN = {  # if the GPUs map each other's memory
    f"{way}, collectives": functools.partial(by_collectives, way) for way in ("rows", "heads")
}


def measure(
    case: Case, clock: Clock, world: int, rank: int, bandwidth: list[dict],
    memory: peers.PeerMemory | None = None,
) -> list[dict]:  # fmt: skip
    """A row for each provider and number of ranks."""
    torch.manual_seed(0)
    shape = 1, case.N, case.H, case.D
    qkv = [torch.randn(shape, device=clock.device).bfloat16().transpose(1, 2) for _ in range(3)]
    expected = one_device(*qkv)
    alone = {  # among the others: a GPU at its limit of power slows down as it warms
        ("sage", "alone"): lambda: one_device(*qkv),
        ("SDPA", "alone"): lambda: F.scaled_dot_product_attention(*qkv),
    }
    rows, providers = [], PROVIDERS | (WRITTEN if memory else {})
    for P in sorted({*RANKS, world} - {1}):
        if case.N % P or case.H % P:
            continue
        links = {"local": Link(P, None, memory)}
        if P == world:
            links["together"] = Link(P, dist.group.WORLD, memory)
        which = rank if P == world else 0
        part = [x.chunk(P, 2)[which] for x in qkv]
        calls = {
            (name, how): functools.partial(call, link, *part)
            for name, call in providers.items()
            for how, link in links.items()
        }
        transfer = transport.Transfer.of(*part, (case.N // P,) * P, False, NAMED[RECIPE])
        chosen = fastest(transfer, clock.device) if world > 1 else None
        checked, sent = {}, {}
        for (name, how), call in calls.items():
            links[how].sent.clear()
            error = relative_l1(call().float(), expected.chunk(P, 2)[which].float())
            checked[name, how], sent[name, how] = error, list(links[how].sent)
            if how == "together" and not error < WRONG:
                sys.exit(f"{name} of {case} on {P} ranks is wrong: relative L1 {error}")
        ms = clock(calls | alone)
        of_one = ms["sage", "alone"]
        eager = clock.eager({name: call for (name, how), call in calls.items() if how != "local"})
        for name in providers:
            local, each = ms[name, "local"], sent[name, "local"]
            between = communication(each, P, bandwidth)
            measured = ms.get((name, "together"))
            rows.append({
                "case": case.name, "N": case.N, "H": case.H, "D": case.D, "P": P, "provider": name,
                "chosen": name == chosen,
                "ms": measured, "eager_ms": eager.get(name), "computed_ms": local + between,
                "local_ms": local, "collectives_ms": between,
                "received_bytes": sum(received(*x, P) for x in each),
                "one_device_ms": of_one, "sdpa_ms": ms["SDPA", "alone"],
                "efficiency": of_one / P / (measured or local + between),
                "rel_l1": checked.get((name, "together")),
            })  # fmt: skip
    return rows


def fastest(transfer: transport.Transfer, device: torch.device) -> str:
    """What is chosen for a CUDA graph."""
    with mock.patch.object(transport, "HOST", {}):
        return transport.choose(transfer, dist.group.WORLD, device)


# -- tables ----


def table(rows: list[dict]) -> str:
    """A line per case, of as many GPUs as were there: ms, and the efficiency."""
    rows = [{**row, "B": 1, "model": row["case"]} for row in rows if row["ms"] is not None]
    cases = groups(rows, "case").values()
    lines = [["B x H x N x D", "one GPU", *(row["provider"] for row in next(iter(cases)))]]
    for its in cases:
        cells = [_cell(row) for row in its]
        lines.append([case_of(its[0]), _ms(its[0]["one_device_ms"]), *cells])
    return markdown(lines)


def _ms(ms: float) -> str:
    return f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def _cell(row: dict) -> str:
    text = f"{_ms(row['ms'])} ({row['efficiency']:.2f})"
    text = f"**{text}**" if row["chosen"] else text
    return f"{text}, eager {_ms(row['eager_ms'])}"


def case_table(case: Case, rows: list[dict]) -> str:
    """A line for each number of ranks: ms, efficiency, MB received; "~": computed."""
    if not rows:
        return f"{case.name}: no number of ranks divides it"
    alone = "one device {one_device_ms:.3f} ms (SDPA {sdpa_ms:.3f} ms)".format(**rows[0])
    lines = [["P", *dict.fromkeys(row["provider"] for row in rows)]]
    for P, its in groups(rows, "P").items():
        cells = []
        for row in its:
            computed = f"~{row['computed_ms']:.3f}"
            ms = computed if row["ms"] is None else f"{row['ms']:.3f} ({computed})"
            text = f"{ms} ms, {row['efficiency']:.3f}, {row['received_bytes'] / 1e6:.0f} MB"
            cells.append(text + ", chosen" * row["chosen"])
        lines.append([str(P), *cells])
    return f"{case.name}, 1x{case.H}x{case.N}x{case.D}: {alone}\n{markdown(lines)}"


# -- slower links ----

COPY, START, WRITE = 2.6e12, 2e-5, 6e-6  # bytes and seconds, of two H100s; H200s' of a write
LAUNCH = 2e-6
# What joins them, GPUs, bytes a second that one receives, and those written to its memory.
LINKS = (
    ("NVLink", 8, 226e9, 317e9), ("PCIe", 2, 25e9, 0.0), ("PCIe", 8, 25e9, 0.0),
    ("two nodes", 2, 45e9, 0.0), ("two nodes", 8, 45e9, 0.0), ("two nodes", 16, 45e9, 0.0),
)  # fmt: skip


def links_table() -> str:
    """ms of Wan's attention, computed by `Transfer.seconds`. "heads in 8 bits": q, k and v would be
    exchanged as codes of a byte, prepared before instead of after."""
    lines = [["", "GPUs", *transport.WAYS, "heads in 8 bits"]]
    _, N, H, D = CASES[0]
    for link, P, speed, put in LINKS:
        n = N // P
        copied = 2 * P / (P - 1) / COPY  # seconds, for a byte that is received
        gather, exchange = (transport.Line(START, 1 / (1 / speed + x)) for x in (0, copied))
        write = transport.Line(WRITE, put) if put else None
        rates = transport.Rates(gather, exchange, COPY, LAUNCH, write)
        call = transport.Transfer((n,) * P, 1, H, H, D, D, 2, False, True, NAMED[RECIPE])
        ms = {
            way: call.seconds(way, rates) * 1e3
            for way in transport.WAYS
            if call.why_not(way) is None
        }
        if "heads" in ms:
            ms["8 bits"] = ms["heads"] - (P - 1) / P * 3 * n * H * D / (put or speed) * 1e3
        cells = (f"{ms[way]:.1f}" if way in ms else "-" for way in (*transport.WAYS, "8 bits"))
        lines.append([link, str(P), *cells])
    return markdown(lines)


# -- random calls ----


def drawn(world: int) -> Iterator[tuple]:
    """H, H_kv, N, D and is_causal of one call after the other."""
    draw = random.Random(2)  # those of 0 and 1 were looked at when transport.py was written
    while True:
        D, groups_of = draw.choice((64, 128)), draw.choice((1, 1, 4))
        H_kv = draw.choice((4, 8, 16))
        N = world * int(2 ** draw.uniform(*SIZES))
        yield H_kv * groups_of, H_kv, N, D, draw.random() < 0.3


def random_calls(count: int, clock: Clock, world: int, rank: int) -> Iterator[dict]:
    """By the way that is chosen, and on one GPU."""
    rates = transport.rates_of(dist.group.WORLD, clock.device)
    for H, H_kv, N, D, is_causal in itertools.islice(drawn(world), count):
        q, k, v = (
            torch.randn(1, N, h, D, device=clock.device, dtype=torch.bfloat16).transpose(1, 2)
            for h in (H, H_kv, H_kv)
        )
        whole = [q, k, v]
        part = [x.chunk(world, 2)[rank] for x in whole]
        transfer = transport.Transfer.of(*part, (N // world,) * world, is_causal, NAMED[RECIPE])
        way = fastest(transfer, clock.device)
        asked = is_causal, D**-0.5, NAMED[RECIPE].encode()
        name = dist.group.WORLD.group_name
        calls = {"one": functools.partial(one_device, *whole, right=0 if is_causal else None)}
        for each in transport.WAYS:
            if transfer.why_not(each) is None:
                calls[each] = functools.partial(
                    torch.ops.sage.gather_sdpa, *part, name, *asked, None, each
                )
        ms = clock(calls)
        of_one = calls["one"]().chunk(world, 2)[rank]
        error = relative_l1(calls[way]()[0].float(), of_one.float())
        if not error < WRONG:
            sys.exit(f"{way} of {transfer} is wrong: relative L1 {error}")
        yield {
            "H": H, "H_kv": H_kv, "N": N, "D": D, "is_causal": is_causal, "way": way, "ms": ms,
            "predicted": {x: transfer.seconds(x, rates) * 1e3 for x in ms if x != "one"},
            "rel_l1": error,
        }  # fmt: skip


def calls_table(rows: list[dict], world: int) -> str:
    if not rows:
        return ""
    gains = [row["ms"]["one"] / row["ms"][row["way"]] for row in rows]
    best = [min(x for name, x in row["ms"].items() if name != "one") for row in rows]
    near = sum(row["ms"][row["way"]] < 1.03 * x for row, x in zip(rows, best, strict=True))
    slower = sum(x < 1 for x in gains)
    return (
        f"{len(rows)} random calls on {world} GPUs: {min(gains):.2f} to {max(gains):.2f}x the "
        f"speed of one GPU, median {statistics.median(gains):.2f}; {slower} slower; "
        f"the way is within 3 % of the fastest in {near}"
    )


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
