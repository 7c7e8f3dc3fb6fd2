"""The papers' accuracy tables, again, on inputs that anybody can draw.

$ python bench/accuracy.py                   # all tables and families, N=1024, on CPU or the GPU
$ python bench/accuracy.py --tables recipes --families real_like --N 8192 --layers 1
$ python bench/accuracy.py --json            # bench/results/cpu or GPU/DATE-accuracy.json

CosSim, relative L1 and RMSE against float64, average and worst over "layers", each a seed; centred:
relative L1 with v's mean taken off both. Inputs hold bf16 values; outputs are compared as they are
before they are rounded to it, but for SDPA's, the floor that rounding sets. What each technique is:
bench/laboratory.py. Where the source has a table, pairs that come in another order here (by average
relative L1, by more than 2 %) are named below ours. Its figures are of CogVideoX's layers: only the
order can be compared.
"""

import argparse
import dataclasses
import datetime
import sys
import time

import laboratory
import machine
import torch
import torch.nn.functional as F
from attention import RESULTS, save
from laboratory import FAMILIES, PRESETS, SAGE2_4B, Technique, attend
from measure import attention, errors

TIE = 0.02  # relative difference of two relative L1 below which they have no order
ROWS = 128  # queries of the tables over N

# SageAttention2's main experiments: FP8 p v as it is, summed in fp32, v not smoothed.
INT4 = Technique("int4", "per_thread", pv="e4m3", v_scale="per_channel")
SMOOTH_QK = dataclasses.replace(INT4, smooth_q=True, smooth_k="mean")
GRANULARITIES = ("per_token", "per_thread", "per_warp", "per_block", "per_tensor")


@dataclasses.dataclass(frozen=True)
class Table:
    """Techniques side by side. paper: relative L1 of those that the source has."""

    title: str
    entries: dict  # name -> Technique, Recipe, or None: SDPA in bf16
    paper: dict[str, float] = dataclasses.field(default_factory=dict)
    over_n: bool = False


def variants(base: Technique, **changes: dict) -> dict[str, Technique]:
    return {name: dataclasses.replace(base, **change) for name, change in changes.items()}


def granularities(qk: str) -> dict[str, Technique]:
    base = dataclasses.replace(SMOOTH_QK, qk=qk, pv="fp16", v_scale=None)
    return variants(base, **{name: {"granularity": name} for name in GRANULARITIES})


def tables(D: int) -> dict[str, Table]:
    """All of them, for a head_dim."""
    return {
        "smoothing": Table(
            "Smoothing q and k, INT4, FP8 p v (SageAttention2, tables 4 and 17)",
            {
                "none": INT4,
                "HadmdAttn": dataclasses.replace(INT4, rotation=D),
                **variants(
                    INT4,
                    SmoothAttn={"balance": True},
                    k={"smooth_k": "mean"},
                    q={"smooth_q": True},
                ),
                "q+k": SMOOTH_QK,
            },
            {
                "none": 0.3906,
                "HadmdAttn": 0.3782,
                "SmoothAttn": 0.3383,
                "k": 0.1493,
                "q": 0.1250,
                "q+k": 0.0648,
            },
        ),
        "smoothing-qk": Table(
            "Smoothing q and k, p v in full precision (what table 5 does to whole models)",
            {
                f"{qk} {name}": Technique(qk, "per_thread", **smoothing)
                for qk in ("int4", "int8")
                for name, smoothing in {
                    "none": {},
                    "k": {"smooth_k": "mean"},
                    "q+k": {"smooth_q": True, "smooth_k": "mean"},
                }.items()
            },
        ),
        "granularity": Table(
            "Granularity of q and k, INT4, smooth q and k (tables 6 and 15)",
            granularities("int4"),
            {"per_token": 0.0649, "per_thread": 0.0622, "per_block": 0.1492, "per_tensor": 0.18},
        ),
        "granularity-int8": Table("The same, INT8", granularities("int8")),
        "pv": Table(
            "Format of p and v, INT4 smooth q and k (tables 7 and 16; nvfp4: SageAttention3)",
            {
                **variants(SMOOTH_QK, int8={"pv": "int8"}, e5m2={"pv": "e5m2"}, e4m3={}),
                **variants(
                    dataclasses.replace(SMOOTH_QK, pv="fp16", v_scale=None),
                    **{
                        "fp16": {},
                        "nvfp4": {"pv": "nvfp4"},
                        "nvfp4 two-level": {"pv": "nvfp4", "two_level_p": True},
                    },
                ),
            },
            {"int8": 0.5618, "e5m2": 0.0905, "e4m3": 0.0683, "fp16": 0.0649},
        ),
        "smooth-v": Table(
            "Smoothing v (table 10), SAGE2_4B, two levels and one",
            variants(
                SAGE2_4B,
                off={"smooth_v": False},
                on={},
                **{
                    "off, one level": {"smooth_v": False, "interval": None},
                    "on, one level": {"interval": None},
                },
            ),
            {"off": 0.1980, "on": 0.0406},
        ),
        "accumulator": Table(
            f"Accumulator of FP8 p v alone (section 3.4), the first {ROWS} queries",
            variants(
                Technique(pv="e4m3", v_scale="per_channel", accumulator="fp22"),
                **{
                    "fp32": {"accumulator": "fp32"},
                    "two levels, 64": {"interval": 64},
                    "two levels, 128": {"interval": 128},
                    "one level": {},
                },
            ),
            over_n=True,
        ),
        "recipes": Table(
            "Recipes (capitals: the papers'; the others: ours)", {"bf16 SDPA": None, **PRESETS}
        ),
    }


def main(argv=None) -> int:
    args = parse(argv)
    device = torch.device(args.device)
    result = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine.describe(device) if device.type == "cuda" else {"gpu": "cpu"},
        "versions": machine.versions(),
        "method": f"{args.layers} seeds from 0 of laboratory.draw, bf16, [1, {args.heads}, N, "
        f"{args.D}]{', causal' * args.causal}; errors against float64 before rounding to bf16",
        "rows": [],
    }
    path = args.json
    if path == "":
        slug = result["machine"]["gpu"].lower().replace(" ", "-")
        path = RESULTS / slug / f"{result['date'][:10]}-accuracy.json"
    print(f"{result['machine']['gpu']}, {result['versions']}\n{result['method']}")
    started = time.perf_counter()
    known = tables(args.D)
    for family in args.families:
        for name in args.tables:
            table = known[name]
            # Causal, the first queries see next to nothing of N.
            lengths = (args.N, 2 * args.N, 4 * args.N) if table.over_n else (args.N,)
            for N in lengths:
                rows = measure(table, family, N, args, device)
                result["rows"] += [{"plan": "accuracy", "table": name, **row} for row in rows]
                print_table(table, family, rows)
                save(result, path)
    result["elapsed_s"] = round(time.perf_counter() - started, 1)
    save(result, path)
    print(f"\nelapsed: {result['elapsed_s']} s")
    return 0


def parse(argv) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, known in (("tables", tables(64)), ("families", FAMILIES)):
        parser.add_argument(f"--{name}", nargs="+", choices=known, default=list(known))
    parser.add_argument("--N", type=positive, default=1024)
    parser.add_argument("--D", type=int, choices=(64, 128, 256), default=128)
    parser.add_argument("--heads", type=positive, default=2)
    parser.add_argument("--layers", type=positive, default=3, help="seeds")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--json", nargs="?", const="", metavar="FILE", help="default: bench/results/cpu or GPU/..."
    )
    return parser.parse_args(argv)


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


@torch.no_grad()
def measure(table: Table, family: str, N: int, args, device) -> list[dict]:
    """A row for each entry of the table: average and worst errors over the layers."""
    found = {}
    is_causal = args.causal and not table.over_n
    for layer in range(args.layers):
        q, k, v = (x.to(device) for x in laboratory.draw(family, layer, args.heads, N, args.D))
        exact = attention(q[0].double(), k[0].double(), v[0].double(), is_causal)
        if table.over_n:
            q, exact = q[:, :, :ROWS], exact[:, :ROWS]
        v_mean = v[0].double().mean(1, keepdim=True)
        for entry, technique in table.entries.items():
            if technique is None:
                out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
            else:
                out = attend(q.float(), k.float(), v.float(), technique, is_causal)
            found.setdefault(entry, []).append(errors(out[0].double(), exact, v_mean))
    return [
        {
            **dict(family=family, N=N, entry=entry),
            "average": {key: sum(each[key] for each in its) / len(its) for key in its[0]},
            "worst": {
                key: (min if key == "cos_sim" else max)(each[key] for each in its) for key in its[0]
            },
            "paper_rel_l1": table.paper.get(entry),
        }
        for entry, its in found.items()
    ]


def disorder(rows: list[dict]) -> list[str]:
    """Pairs of entries that the paper has in one order, and these rows in the other."""
    known = [(r["entry"], r["paper_rel_l1"], r["average"]["rel_l1"]) for r in rows]
    known = [each for each in known if each[1] is not None]
    return [
        f"{better} ({here:.4f}) no better than {worse} ({there:.4f})"
        for better, paper, here in known
        for worse, other, there in known
        if paper * (1 + TIE) < other and here > there * (1 + TIE)
    ]


def print_table(table: Table, family: str, rows: list[dict]) -> None:
    print(f"\n{table.title}: {family}, N={rows[0]['N']}")
    print(
        f"  {'':16}{'CosSim':>9}{'rel. L1':>9}{'RMSE':>9}{'centred':>9}   worst:"
        f"{'CosSim':>9}{'rel. L1':>9}{'RMSE':>9}{'centred':>9}{'paper L1':>12}"
    )
    for row in rows:
        average, worst = (
            f"{each['cos_sim']:9.5f}{each['rel_l1']:9.4f}{each['rmse']:9.1e}"
            f"{each['centred_rel_l1']:9.4f}"
            for each in (row["average"], row["worst"])
        )
        paper = "" if row["paper_rel_l1"] is None else f"{row['paper_rel_l1']:12.4f}"
        print(f"  {row['entry']:16}{average}         {worst}{paper}")
    for pair in disorder(rows):
        print(f"  not the paper's order: {pair}")


if __name__ == "__main__":
    sys.exit(main())
