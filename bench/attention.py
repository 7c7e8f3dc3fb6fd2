"""Attention, forward: speed and accuracy of the sage recipes beside what torch offers.

$ python bench/attention.py --shapes paper --json          # bench/results/GPU/DATE-paper.json
$ python bench/attention.py --shapes load                  # the tiles that HOPPER chooses from
$ python bench/attention.py --shapes peers --json          # beside FA3, FA4 and SageAttention

Speed is reported behind two gates: the kernel must agree with its emulation before anything is
timed, and every output that is timed must be near exact attention.
"""

import argparse
import dataclasses
import itertools
import sys

import torch
from tqdm import tqdm

import sage_inductor
from bench import harness, peers
from bench.cases import ALL, PLANS, Case, Plan
from bench.measure import WINDOW, WRONG, Exact, Runner, draw, draw_sets, interleave, summary
from bench.providers import GATE_TOLERANCE, build, gate
from bench.tables import case_of, groups, markdown, show, with_speedup
from sage_inductor.ops.recipe import NAMED

FIELDS = ("model", "B", "H_q", "H_kv", "N", "D", "is_causal", "mask", "kind", "family")  # of a case
BASELINE = "cuDNN"
MASKS_ARE = (
    "; one mask for all sets: keys bool [B, 1, 1, N], 3/4 of the keys in batch 0 and more in the "
    "others; all else [1, 1, N, N]: rows bool, half at random; documents bool, four; bias bf16, "
    f"N(0, 1); window bool, the last {WINDOW} keys, made in the graph for the op"
)
SHARED_ARE = "; one k and v: [1, H, N, D], expanded by the call, all stored as [B, N, H, D]"


def main(argv=None) -> int:
    args = parse(argv)
    device = harness.gpu(args)
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    sage_inductor.config.rewrite_inductor = False  # it would rewrite the baseline

    versions = harness.installed() | peers.versions(wanted(args))
    result = harness.Result(args.shapes, method(args), args, versions, shapes=args.shapes)
    for kind, why in peers.absent(wanted(args)).items():
        harness.show(**{"left out": f"{kind}: {why}"})
    plan = overridden(PLANS[args.shapes], args)
    check_kernels(plan, args.recipes, device)
    # Dynamo may make a graph for each N, although N is dynamic.
    with torch._dynamo.config.patch(recompile_limit=len(plan.cases)):
        run(args.shapes, plan, args.recipes, device, result)
    result.end("provider", "table", "row")
    return int(any(row["error"] and row["recipe"] for row in result["rows"]))


def parse(argv) -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument("--shapes", choices=PLANS, default="quick")
    parser.add_argument("--recipes", nargs="+", choices=NAMED, default=["sage2-8b-per-token"])
    parser.add_argument("--providers", nargs="+", choices=ALL, help="default: the shapes' own")
    parser.add_argument("--rounds", type=harness.positive, help="default: the shapes' own")
    parser.add_argument("--target-ms", type=float, help="of one provider's turn in a round")
    args = parser.parse_args(argv)
    for kind, why in peers.absent(args.providers or ()).items():
        parser.error(f"--providers {kind} is not installed: {why}")
    return args


def wanted(args) -> list[str]:
    """The kinds of providers, installed or not."""
    return list(args.providers or PLANS[args.shapes].providers)


def overridden(plan: Plan, args) -> Plan:
    """Without the peers that are not installed."""
    absent = peers.absent(wanted(args))
    return dataclasses.replace(
        plan,
        providers=tuple(kind for kind in wanted(args) if kind not in absent),
        rounds=args.rounds or plan.rounds,
        target_ms=args.target_ms or plan.target_ms,
    )


def method(args) -> dict[str, str]:
    plan = overridden(PLANS[args.shapes], args)
    turns = f"{args.shapes} {plan.rounds} x {plan.target_ms:g} ms"
    return {
        "units": "ms per call; TF/s: 4 B H_q N^2 D TFLOP per second, half of it for causal, all of "
        "it under a mask; "
        f"x: speed over {BASELINE} in the same row",
        "time": "median over rounds of CUDA graphs replayed between two events, after a third of "
        f"the turn untimed; providers take turns ({turns}); *: launched, it could or must not be "
        "captured",
        "inputs": "bf16, [B, H, N, D] contiguous, N(0, 1), one or more sets in turn: with their "
        "outputs twice the L2 cache"
        + MASKS_ARE * any(c.mask for c in plan.cases)
        + SHARED_ARE * any(c.shared for c in plan.cases),
        "memory": "peak_bytes: what one call has allocated at most, beside its inputs (for kernel: "
        "beside what was prepared)",
        "compiled": "once per shape, static; masks: once per table, N dynamic, flex static",
        "accuracy": "of the timed graph's output, poisoned with NaN before, against float64 on the "
        "first and last head of the last batch; outlier: q + 2 N(0, 1) and k + 8 N(0, 1) per "
        "(head, channel), v + 8; centred: v's mean over the sequence taken off both outputs",
    }


def check_kernels(plan: Plan, recipes: list[str], device) -> None:
    """Exit unless every kernel that will be timed agrees with its emulation."""
    families = {}
    for case in sorted(plan.cases, key=lambda case: case.N):
        families.setdefault(case.family, []).append(case)
    ends = [case for family in families.values() for case in dict.fromkeys((family[0], family[-1]))]
    worst = 0.0
    for case, recipe in itertools.product(ends, recipes):
        error = gate(case, recipe, device)
        if not error < GATE_TOLERANCE:
            sys.exit(
                f"no speed is reported: the {recipe} kernel at {case.family} is "
                f"{error:.2e} from its emulation, allowed {GATE_TOLERANCE:.2e}"
            )
        worst = max(worst, error)
    print(f"  gate      kernels {worst:.1e} from their emulation, allowed {GATE_TOLERANCE:.1e}")


# -- the measurement ----


def run(name: str, plan: Plan, recipes, device, result: harness.Result) -> None:
    """Measure a plan's cases; print and save each table as it is done."""
    every = tqdm(plan.cases, leave=False, disable=None)
    for title, cases in itertools.groupby(every, key=lambda case: case.table):
        rows, providers = [], None
        for case in cases:
            if providers is None or not plan.dynamic:
                torch._dynamo.reset()
                providers = build(case, plan.providers, recipes)
            rows += [{"plan": name, **row} for row in measure(case, plan, providers, device)]
            torch.cuda.empty_cache()
        result.add(rows)
        print(f"\n{name}: {title}")
        show(table(name, rows))


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
            rows[provider.name]["error"] = harness.in_a_line(error)

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


# -- the tables ----


def table(plan: str, rows: list[dict]) -> str:
    """Of a plan's rows."""
    match plan:
        case "peers":
            return peers.table(rows)
        case "load":
            title = (
                "Under load, the kernel of `sage2-8b-per-token` by each of its tiles, 64 rows a"
                " warpgroup: TFLOP/s (x cuDNN)"
            )
            rows = [
                {
                    **row,
                    "row": row["row"] if row["model"] else f"{row['family']}, {row['N']}",
                    "provider": row["provider"].rpartition(", ")[2],  # a tile's name alone
                }
                for row in rows
            ]
            return f"{title}\n\n" + speed_table(rows, tflops_cell, "B=4 H=32 (D=256: 16)")
        case "models":
            title = "Attention of some models, B x H x N x D: ms (x cuDNN)"
            return f"{title}\n\n{speed_table(rows, ms_cell)}"
        case "shared":
            title = 'Batches of one k and v; "apart": as many k and v as q: ms (x cuDNN)'
            rows = [{**row, "row": case_of(row)} for row in rows]
            return f"{title}\n\n" + speed_table(rows, ms_cell, "B x H x N x D")
        case "masks":
            parts = []
            for D, its in groups(rows, "D").items():
                title = f"Masks, B={its[0]['B']} H={its[0]['H_q']} D={D}: ms (x cuDNN)"
                its = [{**row, "row": f"{row['mask']} {row['N']}"} for row in its]
                parts += [f"{title}\n", speed_table(its, ms_cell, "mask, N")]
            return "\n".join(parts)
    parts = []
    for title, its in groups(rows, "table").items():
        parts += [f"{title}: TFLOP/s (x cuDNN)\n", speed_table(its, tflops_cell)]
    return "\n".join([*parts, "Accuracy, the worst of the rows above\n", accuracy_table(rows)])


def speed_table(rows: list[dict], cell, first: str = "") -> str:
    """A line per case, a column per provider; last, how far from exact the sage op is, or where
    there is none the kernel."""
    providers = list(groups(rows, "provider"))
    first = first or ("model" if rows[0]["model"] else "N")
    lines = [[first, *providers, "rel. L1 of sage (cuDNN)"]]
    for name, its in groups(rows, "row").items():
        found = {row["provider"]: row for row in its}
        cells = (cell(found[p]) if p in found else "" for p in providers)
        lines.append([name, *cells, errors(its)])
    return markdown(lines)


def tflops_cell(row: dict) -> str:
    return with_speedup(row, f"{row['tflops']:.0f}") if row["ms"] else "-"


def ms_cell(row: dict) -> str:
    if not row["ms"]:
        return "-"
    return with_speedup(row, f"{row['ms']:.0f}" if row["ms"] >= 100 else f"{row['ms']:#.3g}")


def errors(cells: list[dict]) -> str:
    found = {row["provider"]: row["accuracy"]["normal"]["rel_l1"] for row in cells if row["ms"]}
    recipes = {row["provider"]: row["recipe"] for row in cells if row["ms"] and row.get("recipe")}
    shown = [p for p in recipes if p.endswith(" op")] or list(recipes)[:1]
    ours = " / ".join(f"{found[p]:.1%}" for p in shown)
    return f"{ours or '-'} ({found['cuDNN']:.1%})" if "cuDNN" in found else ours


def accuracy_table(rows: list[dict]) -> str:
    """The worst of each provider's rows."""
    lines = [
        ["", "CosSim", "rel. L1", "RMSE", "outlier: CosSim", "rel. L1", "RMSE", "rel. L1, centred"]
    ]
    for provider, column in groups(rows, "provider").items():
        line = [provider]
        for kind in ("normal", "outlier"):
            found = [row["accuracy"][kind] for row in column if row["ms"]]
            if not found:
                break
            worst = {key: max(each[key] for each in found) for key in found[0]}
            line += [f"{min(each['cos_sim'] for each in found):.5f}"]
            line += [f"{worst['rel_l1']:.4f}", f"{worst['rmse']:.1e}"]
        else:
            line += [f"{worst['centred_rel_l1']:.3f}"]
            lines.append(line)
    return markdown(lines)


if __name__ == "__main__":
    harness.run(main, fresh=harness.CACHES[:1])
