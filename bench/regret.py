"""Regret: how far what `auto` decides is from the best there is, on calls drawn at random.

$ python bench/regret.py --seed 1 --calls 300 --json       # bench/results/GPU/DATE-regret.json
$ python bench/regret.py --seed 2 --calls 300 --budget 120 # as many as two minutes allow
$ python bench/regret.py --seed 3 --data calibrated # as on a GPU that has no times built in
$ python bench/regret.py --seed 4 --data both --training # of calls that train, by "auto"

Each call is a function of its own that calls F.scaled_dot_product_attention. Dynamo captures it on
fake tensors, and the pass decides as for a user's `backend="sage"`. Then everything that the call
may run is timed: SDPA's backends and each recipe that `auto` may become, by each of its tiles, with
all preparation.

    decided   the time of what the pass took; the least of SDPA's, where the call stays
    best      the least of SDPA's and of the recipes', each by the tile that it runs with
    regret    decided / best - 1
    of tiles  the same, where the best is the least of all times: by any tile of any recipe
    x         the least of SDPA's / decided

A call that cannot be decided or timed is a row, too, and counts as failed. Kernels compile in
Inductor's processes meanwhile, which use no GPU.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import copy
import dataclasses
import itertools
import json
import math
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from bench import harness
from bench.measure import Provider, Runner, interleave
from sage_inductor import config, options
from sage_inductor.backend import op_by_op
from sage_inductor.choose import tables, timing
from sage_inductor.choose.candidates import Candidate, recipes_of
from sage_inductor.choose.cost import TRAINED
from sage_inductor.choose.decide import rewrite
from sage_inductor.choose.families import Family
from sage_inductor.choose.timing import BenchmarkCase
from sage_inductor.names import AUTO
from sage_inductor.ops import gpus
from sage_inductor.ops.attention.select import tile_of_hopper
from sage_inductor.ops.formats import TRAINED_HEAD_DIM
from sage_inductor.ops.recipe import NAMED
from sage_inductor.patterns.call import Site

COMMON_DIMS = (64, 128)
OTHER_DIMS = (40, 48, 72, 80, 96, 112, 160, 192, 256)
KINDS = {"full": 45, "causal": 25, "keys": 15, "window": 15}  # of choose/cost.py; in percent
STEPS = {"full-training": 50, "causal-training": 50}
MAX_FLOPS = 2.5e13  # 0.05 s of an H200, and under a mask less than 0.5 s
MAX_BYTES = 4 << 30  # q, k, v and out
MAX_MASK = 2**29  # elements of a window's mask, which SDPA is given

DATA = {
    "built-in": "the package's times alone; a kind of call that they lack stays SDPA",
    "calibrated": "what is measured when a kind of call is first met, as on any other GPU",
    "both": "the package's times and, of what they lack, what is measured when it is first met",
}

ROUNDS, TARGET_MS = 5, 4.0
LONG_MS, LONG_ROUNDS = 20.0, 3  # a call that long warms the card by itself
SAVE_EVERY = 10  # rows
AHEAD = 64  # calls whose kernels compile while one is timed
GRAPH_S = 3e-4  # how long a CUDA graph runs, about: of so many calls that gaps do not count


def main(argv=None) -> int:
    args = parse(argv)
    device = harness.gpu(args)
    torch.set_grad_enabled(False)
    method = {
        "calls": f"{args.calls} of seed {args.seed}; masks of padding hide half of the keys at"
        " random",
        "time": f"ms, median of {ROUNDS} rounds of {TARGET_MS:g} ms of CUDA graphs, in turns",
        "decided by": DATA[args.data],
    }
    kind = "regret" if args.data == "built-in" else f"regret-{args.data}"
    result = harness.Result(kind + "-training" * args.training, method, args)
    rows = result["rows"]
    with decisions_by(args.data):
        calls = draw(args.seed, args.calls, STEPS if args.training else KINDS)
        for row in measure(calls, device, AHEAD, args.budget):
            rows.append(row)
            if len(rows) % SAVE_EVERY == 0:
                result["summary"] = summary(rows, args.calls)
                result.save()
                print(f"{len(rows)} calls in {result['elapsed_s']:.0f} s", file=sys.stderr)
        if args.data != "built-in":  # what decided can be asked again
            for table in tables.known(result["machine"]["gpu"])[:1]:
                result["measured"] = table.to_json()
    result["summary"] = summary(rows, args.calls)
    print_summary(result["summary"], rows)
    result.end()
    return 0 if result["summary"]["measured"] else 1


def parse(argv) -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument(
        "--budget", type=float, default=math.inf, metavar="SECONDS", help="stop then"
    )
    parser.add_argument(
        "--data", choices=DATA, default="built-in",
        help="; ".join(f"{name}: {what}" for name, what in DATA.items()),
    )  # fmt: skip
    parser.add_argument("--training", action="store_true", help="of calls that train")
    return parser.parse_args(argv)


# -- the calls ----


@dataclasses.dataclass(frozen=True)
class Call:
    """q [B, H_q, N_q, D], k and v [B, H_kv, N_kv, D], in memory [B, N, H, D]."""

    B: int
    H_q: int
    H_kv: int
    N_q: int
    N_kv: int
    D: int
    kind: str  # one of KINDS, or of STEPS
    window: tuple[int, int] | None  # query i sees keys i - window[0] .. i + window[1]
    dtype: str

    @property
    def flops(self) -> float:
        """Two products of 2 N_q N_kv D a head, in training seven, whatever is hidden."""
        products = 7 if self.kind in TRAINED else 2
        return 2.0 * products * self.B * self.H_q * self.N_q * self.N_kv * self.D

    def __str__(self):
        heads = f"{self.H_q}" if self.H_q == self.H_kv else f"{self.H_q}/{self.H_kv}"
        lengths = f"{self.N_q}" if self.N_q == self.N_kv else f"{self.N_q}:{self.N_kv}"
        kind = self.kind if self.window is None else "window({}, {})".format(*self.window)
        return f"{self.B}x{heads}x{lengths}x{self.D} {kind} {self.dtype}"


def draw(seed: int, count: int, kinds: dict[str, int] = KINDS) -> list[Call]:
    """The same calls for the same seed and kinds. N and B * H are log-uniform, from 256 to 131072
    and from 1 to 256 or what MAX_FLOPS and MAX_BYTES leave."""
    dice = random.Random(seed)
    return [_draw(dice, kinds) for _ in range(count)]


def _draw(dice: random.Random, kinds: dict[str, int]) -> Call:
    D = dice.choice(
        dice.choices((COMMON_DIMS, OTHER_DIMS, range(33, 257)), weights=(45, 35, 20))[0]
    )
    N_q = N_kv = _length(dice)
    (kind,) = dice.choices(list(kinds), weights=kinds.values())
    if kind in TRAINED and D > TRAINED_HEAD_DIM:
        D //= 2
    if kind == "window" and N_q * N_kv > MAX_MASK:
        kind = "causal"
    if kind in ("full", "keys", "full-training") and dice.random() < 0.4:
        N_kv = _length(dice)
    of_one_head = Call(1, 1, 1, N_q, N_kv, D, kind, None, "").flops
    most = MAX_FLOPS / of_one_head, MAX_BYTES / (4 * (N_q + N_kv) * D), 256
    heads = int(2 ** dice.uniform(0, math.log2(max(1, min(most)))))
    H_q = dice.choice([n for n in range(1, heads + 1) if heads % n == 0])
    groups = [n for n in range(2, 9) if H_q % n == 0]
    H_kv = H_q // dice.choice(groups) if groups and dice.random() < 0.4 else H_q
    window = None
    if kind == "window":
        width = round(2 ** dice.uniform(6, math.log2(N_kv)))
        window = dice.choice(((width, 0), (width // 2, width // 2)))
    dtype = "float16" if dice.random() < 0.2 else "bfloat16"
    return Call(heads // H_q, H_q, H_kv, N_q, N_kv, D, kind, window, dtype)


def _length(dice: random.Random) -> int:
    """Half of them are multiples of 64, as many models' are."""
    N = 2 ** dice.uniform(8, 17)
    return max(256, round(N / 64) * 64) if dice.random() < 0.5 else round(N)


# -- what becomes of a call ----


class Planned(NamedTuple):
    call: Call
    site: Site  # what the pass says
    case: BenchmarkCase  # what is timed


@contextlib.contextmanager
def decisions_by(data: str) -> Iterator[None]:
    """What `auto` knows is what DATA says, and nothing that the user has measured before."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(mock.patch.dict(os.environ, SAGE_INDUCTOR_TABLES=folder))
        stack.enter_context(config.patch(calibrate=data != "built-in"))
        if data == "calibrated":
            stack.enter_context(mock.patch.object(tables, "built_in", dict))
        tables.forget()
        stack.callback(tables.forget)
        yield


def plan(call: Call, device: torch.device) -> Planned:
    """The call decided by the pass as a user's would be. What it may become is what
    max-autotune would time of it."""
    graph, cases = captured(call, device), []
    site = decided(copy.deepcopy(graph))

    def record(case: BenchmarkCase) -> dict:
        cases.append(case)
        return dict.fromkeys((*case.candidates, *case.rivals), 1.0)

    decided(graph, benchmark=record)
    if not cases:
        raise ValueError(f"{call} cannot be timed: {site.reason}")
    return Planned(call, site, cases[0])


def captured(call: Call, device: torch.device) -> torch.fx.GraphModule:
    """What Dynamo makes of the call."""
    graphs = []
    trains = torch.enable_grad() if call.kind in TRAINED else contextlib.nullcontext()
    with FakeTensorMode(), trains, op_by_op(graphs.append) as run:
        run(*graph_of(call, device), {})
    (graph,) = graphs
    return graph


def decided(graph: torch.fx.GraphModule, training: str = AUTO, **overrides) -> Site:
    # Where tensors are real: what nobody has measured yet may be measured now (--data).
    (site,) = rewrite(graph, options.resolve({"training": training}, **overrides))
    return site


def graph_of(call: Call, device: torch.device) -> tuple[Callable, tuple]:
    """The function that makes the call, and its arguments; to be called where tensors are fake."""

    is_causal = TRAINED.get(call.kind, call.kind) == "causal"

    def function(q, k, v, attn_mask=None):
        if call.window is not None:
            i = torch.arange(call.N_q, device=device).unsqueeze(1)
            j = torch.arange(call.N_kv, device=device)
            attn_mask = (j >= i - call.window[0]) & (j <= i + call.window[1])
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask, is_causal=is_causal, enable_gqa=call.H_q != call.H_kv
        )

    dtype = getattr(torch, call.dtype)
    shapes = (call.N_q, call.H_q), (call.N_kv, call.H_kv), (call.N_kv, call.H_kv)
    inputs = [
        torch.empty(call.B, N, H, call.D, device=device, dtype=dtype).transpose(1, 2)
        for N, H in shapes
    ]
    for x in inputs if call.kind in TRAINED else ():
        x.requires_grad_()
    if call.kind == "keys":
        inputs.append(torch.empty(call.B, 1, 1, call.N_kv, device=device, dtype=torch.bool))
    return function, tuple(inputs)


def taken(site: Site, case: BenchmarkCase) -> Candidate | None:
    """Which of the case's candidates runs; None: SDPA."""
    if not site.rewritten:
        return None
    found = Candidate(site.recipe, site.decision.warpgroups)
    return found if found in case.candidates else by_rule(site.recipe, case)


def by_rule(recipe: str, case: BenchmarkCase) -> Candidate:
    """The recipe by the tile that it runs with where no decision names one."""
    found = Candidate(recipe)
    if found in case.candidates:
        return found
    tile = tile_of_hopper(case.shape, NAMED[recipe])
    return Candidate(recipe, tile.warpgroups if tile else 0)


# -- the measurement ----


def measure(
    calls: list[Call], device: torch.device, ahead: int, budget: float = math.inf
) -> Iterator[dict]:
    """A row for each call, in order, until the budget of seconds is spent. The kernels of the next
    calls, so many as `ahead`, compile meanwhile; first those that kinds of call are measured by."""
    end, waiting = time.monotonic() + budget, collections.deque()
    for family, names in kinds_of(calls, device).items():
        sizes = family.sizes(timing.FEW)
        cases = timing.cases_of(device, family, names, sizes)
        timing.start_compiling(tuple(cases.values()))
    calls = iter(calls)
    while True:
        for call in itertools.islice(calls, ahead - len(waiting)):
            try:
                planned = plan(call, device)
            except Exception as error:  # in one of some hundred calls
                waiting.append((unplanned(call, error), None))
            else:
                waiting.append((planned, timing.start_compiling([planned.case])))
            if time.monotonic() >= end:  # to plan may be to measure
                break
        if not waiting:
            return
        planned, compiling = waiting.popleft()
        if compiling is not None:
            left = max(0.0, end - time.monotonic())
            concurrent.futures.wait(compiling, min(left, threading.TIMEOUT_MAX))
        if time.monotonic() >= end:
            return
        if compiling is None:
            yield planned  # the row itself
        else:
            yield judge(planned, time_case(planned.case, planned.call.flops))


def kinds_of(calls: list[Call], device: torch.device) -> dict[Family, tuple[str, ...]]:
    """The kinds of call that will be measured, and by which recipes; in order."""
    found = {}
    for call in calls if config.calibrate else ():
        family = Family(call.D, call.D, call.kind)
        names = recipes_of(gpus.capability(device), family)[:1]
        known = names and tables.with_times(tables.gpu_name(device), family, *names)
        if names and not (known or any(each.stands_for(family) for each in found)):
            found[family] = names
    return found


def time_case(case: BenchmarkCase, flops: float) -> dict[Candidate | str, float | str]:
    """ms of each of the case's candidates and of SDPA's backends, or the message of an error."""
    found, runners = {}, {}
    repeats = max(1, min(32, round(GRAPH_S / max(1e-5, flops / 5e14))))

    def add(case: BenchmarkCase) -> None:
        try:
            calls = timing.calls_of(case)
        except Exception as error:  # out of memory for the inputs
            found.update(dict.fromkeys((*case.rivals, *case.candidates), harness.in_a_line(error)))
            return
        for name, call in calls.items():
            try:
                runners[name] = Runner(Provider(str(name), call), [()] * repeats)
            except Exception as error:  # a backend that does not have such calls, ...
                found[name] = harness.in_a_line(error)

    add(case)
    if runners.keys().isdisjoint(case.rivals):  # SDPA falls back to it
        add(case._replace(rivals=("MATH",), candidates=()))
    rounds = LONG_ROUNDS if flops / 5e11 > LONG_MS else ROUNDS
    times = interleave(runners, rounds, TARGET_MS) if runners else {}
    found |= {name: statistics.median(each) for name, each in times.items()}
    runners.clear()
    torch.cuda.empty_cache()
    return found


def judge(planned: Planned, times: dict[Candidate | str, float | str]) -> dict:
    """A row. Its regrets and x are None where SDPA, or what was decided, has no time."""
    call, site, case = planned
    ms = {name: each for name, each in times.items() if not isinstance(each, str)}
    sdpa = min((x for name, x in ms.items() if isinstance(name, str)), default=None)
    candidate = taken(site, case)
    ours = sdpa if candidate is None else ms.get(candidate)
    run = {candidate, *(by_rule(each.recipe, case) for each in case.candidates)}
    as_run = {name: x for name, x in ms.items() if isinstance(name, str) or name in run}
    best, of_tiles = (min(each, key=each.get, default=None) for each in (as_run, ms))
    known = sdpa is not None and ours is not None
    return {
        "name": str(call),
        **dataclasses.asdict(call),
        "decided": "SDPA" if candidate is None else label(candidate),
        "reason": site.reason,
        "best": best and label(best),
        "best_of_tiles": of_tiles and label(of_tiles),
        "ms": {label(name): each for name, each in ms.items()},
        "errors": {label(name): each for name, each in times.items() if name not in ms},
        "regret": ours / ms[best] - 1 if known else None,
        "regret_of_tiles": ours / ms[of_tiles] - 1 if known else None,
        "x": sdpa / ours if known else None,
    }


def unplanned(call: Call, error: Exception) -> dict:
    """The row of a call that is not timed."""
    unknown = dict.fromkeys(("decided", "best", "best_of_tiles", "regret", "regret_of_tiles", "x"))
    row = {"name": str(call), **dataclasses.asdict(call), "reason": harness.in_a_line(error)}
    return row | unknown | {"ms": {}, "errors": {}}


def label(name: Candidate | str) -> str:
    return name if isinstance(name, str) else f"{name.recipe}{name.tile}"


# -- the summary ----


def summary(rows: list[dict], wanted: int) -> dict:
    known = [row for row in rows if row["regret"] is not None]
    n = max(1, len(known))

    def within(bound: float, name: str = "regret") -> float:
        return sum(row[name] <= bound for row in known) / n

    return {
        "calls": wanted,
        "measured": len(known),
        "failed": len(rows) - len(known),
        "rewritten": sum(row["decided"] not in (None, "SDPA") for row in rows),
        "within_3_percent": within(0.03),
        "within_5_percent": within(0.05),
        "within_3_percent_of_tiles": within(0.03, "regret_of_tiles"),
        "within_5_percent_of_tiles": within(0.05, "regret_of_tiles"),
        "mean_regret": sum(row["regret"] for row in known) / n,
        "mean_regret_of_tiles": sum(row["regret_of_tiles"] for row in known) / n,
        "below_0_97x": sum(row["x"] is not None and row["x"] < 0.97 for row in rows),
    }


def print_summary(found: dict, rows: list[dict]) -> None:
    for name, x in found.items():
        print(f"  {name:26}{x:.2%}" if isinstance(x, float) else f"  {name:26}{x}")
    known = [row for row in rows if row["regret"] is not None]
    for title, key, order in (
        ("regret", "regret", -1), ("regret of tiles", "regret_of_tiles", -1), ("x of SDPA", "x", 1)
    ):  # fmt: skip
        print(f"the worst by {title}")
        for row in sorted(known, key=lambda row: order * row[key])[:10]:
            print("  {regret:7.1%} {x:6.2f}x  {name}: {decided}".format(**row), end=", ")
            print("best {best}, of tiles {best_of_tiles}".format(**row))
            print(f"{'':18}{row['reason']}\n{'':18}{json.dumps(_rounded(row['ms']))}")
    for row in rows:
        if row["regret"] is None:
            print(f"failed: {row['name']}: {row['reason']} {json.dumps(row['errors'])}")


def _rounded(ms: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{each:.4g}") for name, each in ms.items()}


if __name__ == "__main__":
    harness.run(main)
