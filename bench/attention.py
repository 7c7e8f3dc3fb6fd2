"""Attention, forward: speed and accuracy of the sage recipes beside what torch offers.

$ python bench/attention.py --shapes paper --json          # bench/results/GPU/DATE-paper.json
$ python bench/attention.py --shapes load                  # the tiles that HOPPER chooses from
$ python bench/attention.py --shapes peers --json          # beside FA3, FA4 and SageAttention

Speed is reported behind two gates: the kernel must agree with its emulation before anything is
timed, and every output that is timed must be near exact attention.
"""

import argparse
import dataclasses
import datetime
import itertools
import json
import os
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import torch

import sage_inductor
from bench import machine, peers
from bench.cases import ALL, PLANS, Case, Plan
from bench.measure import WINDOW, WRONG, Exact, Runner, draw, draw_sets, interleave, summary
from bench.providers import GATE_TOLERANCE, build, gate
from sage_inductor.ops.recipe import NAMED

FIELDS = ("model", "B", "H_q", "H_kv", "N", "D", "is_causal", "mask", "kind", "family")  # of a case
RESULTS = Path(__file__).parent / "results"
BASELINE = "cuDNN"
MASKS_ARE = (
    "; one mask for all sets: keys bool [B, 1, 1, N], 3/4 of the keys in batch 0 and more in the "
    "others; all else [1, 1, N, N]: rows bool, half at random; documents bool, four; bias bf16, "
    f"N(0, 1); window bool, the last {WINDOW} keys, made in the graph for the op"
)
SHARED_ARE = "; one k and v: [1, H, N, D], expanded by the call, all stored as [B, N, H, D]"
SHAPES = {**{name: (name,) for name in PLANS}, "all": ("paper", "models")}


def main(argv=None) -> int:
    args = parse(argv)
    if not torch.cuda.is_available():
        print("bench/attention.py times GPU kernels: torch sees no CUDA device", file=sys.stderr)
        return 2
    started = time.perf_counter()
    device = torch.device("cuda", args.device.index or 0)
    torch.cuda.set_device(device)
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    sage_inductor.config.enabled = False  # it would rewrite the baseline

    result = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "shapes": args.shapes,
        "machine": machine.describe(device),
        "versions": machine.versions() | peers.versions(wanted(args)),
        "state": {"start": machine.state(device)},
        "method": method(args),
        "rows": [],
    }
    path = args.json or None
    if args.json == "":
        slug = result["machine"]["gpu"].lower().replace(" ", "-")
        path = RESULTS / slug / f"{result['date'][:10]}-{args.shapes}.json"
    print_header(result, peers.absent(wanted(args)))
    check_kernels(args, device)
    for name in SHAPES[args.shapes]:
        run(name, overridden(PLANS[name], args), args.recipes, device, result, path)
    result["state"]["end"] = machine.state(device)
    result["elapsed_s"] = round(time.perf_counter() - started, 1)
    save(result, path)
    print(f"\nstate at the end: {result['state']['end']}\nelapsed: {result['elapsed_s']} s")
    failed = [row for row in result["rows"] if row["error"]]
    for row in failed:
        print(f"failed: {row['provider']} at {row['table']}, {row['row']}: {row['error']}")
    return 1 if any(row["recipe"] for row in failed) else 0


def parse(argv) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", choices=SHAPES, default="quick")
    parser.add_argument("--recipes", nargs="+", choices=NAMED, default=["sage2-8b-per-token"])
    parser.add_argument(
        "--families", nargs="+", metavar="FAMILY", help='only these cases, like "D=64, causal"'
    )
    parser.add_argument("--providers", nargs="+", choices=ALL, help="default: the shapes' own")
    parser.add_argument("--rounds", type=int, help="default: the shapes' own")
    parser.add_argument("--target-ms", type=float, help="of one provider's turn in a round")
    parser.add_argument("--device", type=cuda_device, default="cuda", help="cuda, or cuda:INDEX")
    parser.add_argument(
        "--json", nargs="?", const="", metavar="FILE", help="default: bench/results/GPU/DATE-SHAPES"
    )
    args = parser.parse_args(argv)
    known = {c.family: None for name in SHAPES[args.shapes] for c in PLANS[name].cases}
    for family in args.families or ():
        if family not in known:
            parser.error(f"--families must be of {list(known)}, got {family!r}")
    for kind, why in peers.absent(args.providers or ()).items():
        parser.error(f"--providers {kind} is not installed: {why}")
    return args


def cuda_device(text: str) -> torch.device:
    if not text.startswith("cuda"):
        raise argparse.ArgumentTypeError(f"must be cuda or cuda:INDEX, got {text!r}")
    return torch.device(text)


def wanted(args) -> list[str]:
    """The kinds of providers, installed or not."""
    plans = [PLANS[name].providers for name in SHAPES[args.shapes]]
    return list(dict.fromkeys(args.providers or itertools.chain(*plans)))


def overridden(plan: Plan, args) -> Plan:
    """Without the peers that are not installed."""
    providers = args.providers or plan.providers
    absent = peers.absent(providers)
    cases = [c for c in plan.cases if args.families is None or c.family in args.families]
    return dataclasses.replace(
        plan,
        cases=tuple(cases),
        providers=tuple(kind for kind in providers if kind not in absent),
        rounds=args.rounds or plan.rounds,
        target_ms=args.target_ms or plan.target_ms,
    )


# -- the header ----


def method(args) -> dict[str, str]:
    plans = {name: overridden(PLANS[name], args) for name in SHAPES[args.shapes]}
    turns = ", ".join(f"{name} {p.rounds} x {p.target_ms:g} ms" for name, p in plans.items())
    return {
        "units": "ms per call; TF/s: 4 B H_q N^2 D TFLOP per second, half of it for causal, all of "
        "it under a mask; "
        f"x: speed over {BASELINE} in the same row",
        "time": "median over rounds of CUDA graphs replayed between two events, after a third of "
        f"the turn untimed; providers take turns ({turns}); *: launched, it could or must not be "
        "captured",
        "inputs": "bf16, [B, H, N, D] contiguous, N(0, 1), one or more sets in turn: with their "
        "outputs twice the L2 cache"
        + MASKS_ARE * any(c.mask for p in plans.values() for c in p.cases)
        + SHARED_ARE * any(c.shared for p in plans.values() for c in p.cases),
        "memory": "peak_bytes: what one call has allocated at most, beside its inputs (for kernel: "
        "beside what was prepared)",
        "compiled": "once per shape, static; masks: once per table, N dynamic, flex static",
        "accuracy": "of the timed graph's output, poisoned with NaN before, against float64 on the "
        "first and last head of the last batch; outlier: q + 2 N(0, 1) and k + 8 N(0, 1) per "
        "(head, channel), v + 8; centred: v's mean over the sequence taken off both outputs",
    }


def print_header(result: dict, absent: dict[str, str]) -> None:
    gpu, versions = result["machine"], result["versions"]
    lines = {
        "machine": f"{gpu['gpu']}, {gpu['sms']} SMs, {gpu['memory_gib']} GiB, "
        f"{gpu['l2_mib']} MiB L2, driver {gpu['driver']}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "state": f"{result['state']['start']} (SM and memory clock, power of limit, Celsius)",
        **result["method"],
    }
    if absent:
        lines["left out"] = "; ".join(f"{kind}: {why}" for kind, why in absent.items())
    print(f"attention forward, {result['date']}")
    for name, line in lines.items():
        print(textwrap.fill(line, 100, initial_indent=f"  {name:9} ", subsequent_indent=" " * 12))


def check_kernels(args, device) -> None:
    """Exit unless every kernel that will be timed agrees with its emulation."""
    cases = [c for name in SHAPES[args.shapes] for c in overridden(PLANS[name], args).cases]
    families = {}
    for case in sorted(cases, key=lambda case: case.N):
        families.setdefault(case.family, []).append(case)
    ends = [case for family in families.values() for case in dict.fromkeys((family[0], family[-1]))]
    worst = 0.0
    for case, recipe in itertools.product(ends, args.recipes):
        error = gate(case, recipe, device)
        if not error < GATE_TOLERANCE:
            sys.exit(
                f"no speed is reported: the {recipe} kernel at {case.family} is "
                f"{error:.2e} from its emulation, allowed {GATE_TOLERANCE:.2e}"
            )
        worst = max(worst, error)
    print(f"  gate      kernels {worst:.1e} from their emulation, allowed {GATE_TOLERANCE:.1e}")


# -- the measurement ----


def run(name: str, plan: Plan, recipes, device, result: dict, path) -> None:
    """Measure a plan's cases; print and save each table as it is done."""
    torch._dynamo.config.recompile_limit = len(plan.cases)  # should "dynamic" mean a graph per N
    for table, cases in itertools.groupby(progress(plan.cases), key=lambda case: case.table):
        rows, providers = [], None
        for case in cases:
            if providers is None or not plan.dynamic:
                torch._dynamo.reset()
                providers = build(case, plan.providers, recipes)
            rows += [{"plan": name, **row} for row in measure(case, plan, providers, device)]
            torch.cuda.empty_cache()
        result["rows"] += rows
        print_table(f"{name}: {table}", rows)
        save(result, path)


def progress(cases):
    """tqdm where it is installed, else a line per case; on stderr."""
    try:
        from tqdm import tqdm
    except ImportError:
        for i, case in enumerate(cases, 1):
            print(f"[{i}/{len(cases)}] {case.table}, {case.row}", file=sys.stderr)
            yield case
    else:
        yield from tqdm(cases, unit="case", leave=False, disable=None)


def measure(case: Case, plan: Plan, providers, device) -> list[dict]:
    """A row per provider. One that fails or is wrong has an error instead of a time."""
    providers = [p for p in providers if case.N in plan.only_at.get(p.name, (case.N,))]
    rows = {p.name: blank_row(case, p) for p in providers}
    sets = draw_sets(case, device, plan.dynamic)
    runners = {}
    for provider in providers:
        try:
            runners[provider.name] = Runner(provider, sets)
            rows[provider.name]["peak_bytes"] = runners[provider.name].peak_bytes()
        except Exception as error:
            rows[provider.name]["error"] = f"{type(error).__name__}: {error}".split("\n")[0]

    check(runners, rows, "normal", Exact(*sets[-1], is_causal=case.is_causal))
    for name, times in interleave(runners, plan.rounds, plan.target_ms).items():
        rows[name].update(summary(times), captured=runners[name].captured, sets=len(sets))
        rows[name]["tflops"] = case.flops / rows[name]["ms"] / 1e9
    inputs = (*draw(case, "outlier", device), *sets[-1][3:])
    for runner in runners.values():
        runner.load(*inputs)
    check(runners, rows, "outlier", Exact(*inputs, is_causal=case.is_causal))

    baseline = rows.get(BASELINE, {}).get("ms")
    for row in rows.values():
        row["speedup"] = baseline / row["ms"] if baseline and row["ms"] else None
    return list(rows.values())


def blank_row(case: Case, provider) -> dict:
    return {
        "table": case.table,
        "row": case.row,
        **{f: getattr(case, f) for f in FIELDS},
        "provider": provider.name,
        "recipe": provider.recipe,
        "ms": None,
        "tflops": None,
        "peak_bytes": None,
        "accuracy": {},
        "error": None,
    }


def check(runners: dict, rows: dict, kind: str, exact: Exact) -> None:
    """Note each output's accuracy; whoever is wrong is out, and loses the time it had."""
    for name, runner in list(runners.items()):
        found = rows[name]["accuracy"][kind] = exact.compare(runner.output())
        if not found["rel_l1"] < WRONG:
            rows[name].update(ms=None, tflops=None, error=f"wrong on {kind} inputs: {found}")
            del runners[name]


def save(result: dict, path) -> None:
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(result, indent=1) + "\n")


# -- the tables ----


def print_table(title: str, rows: list[dict]) -> None:
    """ms, TFLOP/s and x per provider, a line per case; then each provider's worst accuracy."""
    by_case, by_provider = {}, {}
    for row in rows:
        by_case.setdefault(row["row"], {})[row["provider"]] = row
        by_provider.setdefault(row["provider"], []).append(row)
    label = max(8, *map(len, by_case))
    print(f"\n{title}")
    columns = {name: max(19, len(name)) for name in by_provider}
    heads = f"{'ms':>7}{'TF/s':>5}{'x':>6} "
    print(" " * label + "".join(f" |{name:^{n}}" for name, n in columns.items()))
    print("N".rjust(label) + "".join(f" |{heads:>{n}}" for n in columns.values()))
    for name, cells in by_case.items():
        row = (f" |{cell(cells.get(p)):>{n}}" for p, n in columns.items())
        print(name.rjust(label) + "".join(row))
    width = max(map(len, by_provider))
    print("  accuracy, the worst of each column".ljust(width + 34) + "outlier")
    heads = ("CosSim", "rel. L1", "RMSE") * 2
    print("  " + " " * width + "".join(f"{head:>10}" for head in heads) + "   centred rel. L1")
    for name, column in by_provider.items():
        print(f"  {name:{width}}{accuracy_cells(column)}")


def cell(row: dict | None) -> str:
    if row is None:
        return " " * 19
    if row["ms"] is None:
        return f"{'failed':>19}"
    speedup = f"{row['speedup']:.2f}" if row["speedup"] else "-"
    mark = " " if row["captured"] else "*"
    return f"{row['ms']:#7.4g}{row['tflops']:5.0f}{speedup:>6}{mark}"


def accuracy_cells(rows: list[dict]) -> str:
    cells = []
    for kind in ("normal", "outlier"):
        found = [row["accuracy"][kind] for row in rows if kind in row["accuracy"]]
        if not found:
            return "".join(cells) + f"{'-':>10}"
        worst = {key: max(each[key] for each in found) for key in found[0]}
        worst["cos_sim"] = min(each["cos_sim"] for each in found)
        cells.append("{cos_sim:10.5f}{rel_l1:10.4f}{rmse:10.1e}".format(**worst))
    return "".join(cells) + f"{worst['centred_rel_l1']:18.3f}"


if __name__ == "__main__":
    # Compile from scratch: a warm cache may hold SDPA's graph under other backend flags.
    sys.stdout.reconfigure(line_buffering=True)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        sys.exit(main())
