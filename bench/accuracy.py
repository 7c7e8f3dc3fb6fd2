"""The papers' accuracy tables, again, on inputs that anybody can draw and in models that anybody
can train; what the default promises; and what is shipped beside its peers.

$ python bench/accuracy.py                   # all of it, on CPU or the GPU
$ python bench/accuracy.py --tables recipes --families real_like --models --N 8192 --layers 1
$ python bench/accuracy.py --json            # bench/results/cpu or GPU/DATE-accuracy.json
$ python bench/accuracy.py --tables shipped --models --layers 1 --heads 4 --json
$ python bench/accuracy.py --tables shipped --models --families k4x6 --lengths 4096
$ python bench/accuracy.py --training --N 2048 --json    # DATE-training.json

Tables: CosSim, relative L1 and RMSE against float64, average and worst over layers (of a family
each is a seed); centred: relative L1 with v's mean taken off both. Inputs hold bf16 values; outputs
are compared as they are before they are rounded to it, but for SDPA's, the floor that rounding
sets. What each technique is: bench/laboratory.py; the models: bench/trained.py.

shipped: outputs in bf16, as a user gets them, of every family of bench/laboratory.py, at --lengths
and --head-dims; of the last 128 queries. On a GPU recipes run their kernels, beside those of
bench/peers.py that are installed, and all are timed. On a CPU recipes are emulated.
end-to-end: whole models in bf16; shipped recipes by backend="sage", the others emulated.

--training: gradients by the recipes of bench/gradients.py instead, of families, causal and not,
with a mask that is learned (its own, too) and without (--masks).
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from bench import gradients, harness, laboratory, peers, providers, trained
from bench.capture import Call, capture, end_to_end
from bench.cases import PEERS, Case
from bench.laboratory import FA3_FP8, FAMILIES, PRESETS, SAGE2_4B, USUAL, Technique, attend
from bench.measure import Provider, Runner, attention, draw_sets, errors, interleave, relative_l1
from bench.tables import groups, markdown, show, wrapped
from bench.trained import Subject
from sage_inductor.ops.compile import LONGEST, compile_elsewhere
from sage_inductor.ops.gpus import capability
from sage_inductor.ops.launch import noted
from sage_inductor.ops.recipe import NAMED, Recipe
from sage_inductor.ops.sdpa import SdpaCall

ROWS = 128  # queries of the tables over N: the first; and of what is shipped: the last

# SageAttention2's main experiments: FP8 p v as it is, summed in fp32, v not smoothed.
INT4 = Technique("int4", "per_thread", pv="e4m3", v_scale="per_channel")
SMOOTH_QK = dataclasses.replace(INT4, smooth_q=True, smooth_k=True)
GRANULARITIES = ("per_token", "per_thread", "per_warp", "per_block", "per_tensor")


@dataclasses.dataclass(frozen=True)
class Table:
    """Techniques side by side."""

    title: str
    entries: dict  # name -> Technique, Recipe, or None: SDPA in bf16
    over_n: bool = False


def variants(base: Technique, **changes: dict) -> dict[str, Technique]:
    return {name: dataclasses.replace(base, **change) for name, change in changes.items()}


def granularities(qk: str) -> dict[str, Technique]:
    base = dataclasses.replace(SMOOTH_QK, qk=qk, pv="fp16", v_scale=None)
    return variants(base, **{name: {"granularity": name} for name in GRANULARITIES})


def tables(D: int, recipes: Sequence[str] = ()) -> dict[str, Table]:
    """All of them, for a head_dim; that of recipes with these names of PRESETS, or all."""
    fp16 = dataclasses.replace(SMOOTH_QK, pv="fp16", v_scale=None)
    smoothings = {"none": {}, "k": {"smooth_k": True},
                  "q+k": {"smooth_q": True, "smooth_k": True}}  # fmt: skip
    return {
        "smoothing": Table(
            "Smoothing q and k, INT4, FP8 p v (SageAttention2, tables 4 and 17)",
            {
                "none": INT4,
                "HadmdAttn": dataclasses.replace(INT4, rotation=D),
                **variants(INT4, SmoothAttn={"balance": True}, k={"smooth_k": True},
                           q={"smooth_q": True}),
                "q+k": SMOOTH_QK,
            },
        ),
        "smoothing-qk": Table(
            "Smoothing q and k, p v in full precision (what table 5 does to whole models)",
            {
                f"{qk} {name}": Technique(qk, "per_thread", **smoothing)
                for qk in ("int4", "int8")
                for name, smoothing in smoothings.items()
            },
        ),
        "granularity": Table(
            "Granularity of q and k, INT4, smooth q and k (tables 6 and 15)",
            granularities("int4"),
        ),
        "granularity-int8": Table("The same, INT8", granularities("int8")),
        "pv": Table(
            "Format of p and v, INT4 smooth q and k (tables 7 and 16; nvfp4: SageAttention3)",
            {
                **variants(SMOOTH_QK, int8={"pv": "int8"}, e5m2={"pv": "e5m2"}, e4m3={}),
                "int8 two-level": dataclasses.replace(SMOOTH_QK, pv="int8", two_level_p=True),
                **variants(fp16, fp16={}, nvfp4={"pv": "nvfp4"}),
                "nvfp4 two-level": dataclasses.replace(fp16, pv="nvfp4", two_level_p=True),
            },
        ),
        "smooth-v": Table(
            "Smoothing v (table 10), SAGE2_4B, two levels and one",
            variants(SAGE2_4B, **{
                "off": {"smooth_v": False},
                "on": {},
                "off, one level": {"smooth_v": False, "interval": None},
                "on, one level": {"interval": None},
            }),
        ),
        "accumulator": Table(
            f"Accumulator of FP8 p v alone (section 3.4), of families the first {ROWS} queries",
            variants(Technique(pv="e4m3", v_scale="per_channel", accumulator="fp22"), **{
                "fp32": {"accumulator": "fp32"},
                "two levels, 64": {"interval": 64},
                "two levels, 128": {"interval": 128},
                "one level": {},
            }),
            over_n=True,
        ),
        "recipes": Table(
            "Recipes (capitals: the papers'; the others: ours)",
            {"bf16 SDPA": None, **{name: PRESETS[name] for name in recipes or PRESETS}},
        ),
    }  # fmt: skip


LENGTHS = tuple(2**i for i in range(10, 16))  # of what is shipped
TIMED = 32768, 32  # tokens, in sequences of N, and heads of the calls that are timed
TURNS = 5, 20.0  # rounds of so many ms
KEPT = ("rel_l1", "centred_rel_l1", "row")  # errors of what is shipped: there are many rows
DEFAULT = ("sage2-8b", "sage2-8b-rotated")  # from sm_89 on; on Hopper
# (family, recipe) -> its error at most: `figure`.
LIMITS = {
    **{(family, recipe): 0.038 for family in ("normal", "k_bias") for recipe in DEFAULT},
    **{("biased_v", recipe): 1.05 for recipe in DEFAULT},
    ("normal", "sage1-rotated"): 0.013,
}
BESIDE = ("shipped", "end-to-end")  # the tables
COLUMNS = 6  # entries beside each other, of what is shipped
# The rows of the README's table, and what each is.
IN_SHORT = {
    "bf16 SDPA": "exact attention in bf16 (cuDNN)",
    "FA3": "exact attention in bf16, by FlashAttention-3",
    "sage2-8b-rotated": "`sage2-8b-rotated`, the default on Hopper",
    "sage2-8b-per-token": "`sage2-8b-per-token`, the same without rotation",
    "sage1-rotated": "`sage1-rotated`, the most accurate",
    "comfy-kitchen op": "comfy-kitchen's INT8, rotated too",
    "FA3-fp8 op": "FlashAttention-3's FP8",
    "torchao-fp8 op": "torchao's FP8, by FlashAttention-3",
}
SHORT = 8192, 128  # N and head_dim of its columns, and the families
FAMILIES_IN_SHORT = {
    "normal": "error: random inputs", "k2x12": "error: two strong channels of k",
}  # fmt: skip


def main(argv=None) -> int:
    args = parse(argv)
    device = harness.current(args)
    if args.training:
        result = harness.Result("training", TRAINING_METHOD.format(**vars(args)), args)
        for mask in args.masks:
            kinds = itertools.product((False, True), args.families or USUAL, gradients.OUTPUTS)
            first = len(result["rows"])
            for causal, family, kind in tqdm([*kinds], leave=False, disable=None):
                result.add(measure_training(family, kind, causal, mask, args, device))
            show(f"\n{training_table(result['rows'][first:])}")
        return 0
    cuda = device.type == "cuda"
    size = "full" if cuda else "small"
    method = (
        f"Families: {args.layers} seeds from 0 of laboratory.draw, bf16, "
        f"[1, {args.heads}, N, {args.D}]; errors against float64 before "
        f"rounding to bf16. Shipped: each head_dim, in bf16, the last {ROWS} queries"
        + (timing() if cuda else "")
        + f". Models: {size}, of bench/trained.py, in bf16" * bool(args.models)
    )
    result = harness.Result("accuracy", method, args, models={})
    names = [name for name in args.tables if name not in BESIDE]
    for family in args.families or USUAL:
        for name, table in tables(args.D, args.recipes).items():
            lengths = (args.N, 2 * args.N, 4 * args.N) if table.over_n else (args.N,)
            for N in lengths if name in names else ():
                rows = measure(name, table, family, draw(table, family, N, args, device))
                result.add(rows)
                print_table(table, rows)
    if "shipped" in args.tables:
        lengths = args.lengths or LENGTHS[: None if cuda else -2]
        cases = [Case(1, args.heads, args.heads, N, D) for D in args.head_dims for N in lengths]
        if cuda:
            for kind, why in peers.absent(PEERS).items():
                harness.show(**{"left out": f"{kind}: {why}"})
            compile_kernels([*cases, *map(timed, cases)], device)
        for case in tqdm(cases, leave=False, disable=None):
            times = time_shipped(timed(case), device) if cuda else {}
            families = args.families or FAMILIES
            result.add(measure_shipped(case, families, args.layers, device, times))
        rows = groups(result["rows"], "plan")["shipped"]
        show(f"\n{shipped_table(rows)}")
    for subject in trained.subjects(args.models, trained.SIZES[size], device):
        result["models"][subject.name] = subject.note
        calls = capture(subject.model, subject.example)
        for name, table in tables(calls[0].q.shape[3], args.recipes).items():
            if name in names:
                rows = measure(name, table, subject.name, calls)
                result.add(rows)
                print_table(table, rows)
        if "end-to-end" in args.tables:
            result.add(measure_end_to_end(subject, args.recipes))
    result.end("entry")
    return 0  # one that fails costs the others nothing


def parse(argv) -> argparse.Namespace:
    parser = harness.parser(__doc__)
    known = {
        "tables": (*tables(64), *BESIDE), "models": trained.MODELS, "masks": gradients.MASKS,
    }  # fmt: skip
    for name, choices in known.items():
        parser.add_argument(f"--{name}", nargs="*", choices=choices, default=list(choices))
    parser.add_argument(
        "--families", nargs="+", choices=FAMILIES,
        help="default: all of what is shipped, else those of the papers' tables",
    )  # fmt: skip
    parser.add_argument(
        "--recipes", nargs="+", choices=PRESETS, default=list(PRESETS),
        help="of the tables recipes and end-to-end; default: all",
    )  # fmt: skip
    parser.add_argument("--N", type=harness.positive, default=1024)
    parser.add_argument("--D", type=int, choices=(64, 128, 256), default=128)
    parser.add_argument("--heads", type=harness.positive, default=2)
    parser.add_argument("--layers", type=harness.positive, default=3, help="of a family: seeds")
    parser.add_argument(
        "--lengths", nargs="+", type=harness.positive,
        help=f"of what is shipped; default: {LENGTHS}, on a CPU without the last two",
    )  # fmt: skip
    parser.add_argument(
        "--head-dims", nargs="+", type=int, choices=(64, 128, 256), default=(128, 64),
        help="of what is shipped; default: 128 64",
    )  # fmt: skip
    parser.add_argument("--training", action="store_true", help="gradients, of families alone")
    return parser.parse_args(argv)


# -- tables ----


def draw(table: Table, family: str, N: int, args, device) -> list[Call]:
    """The "layers" of a family."""
    calls = []
    for seed in range(args.layers):
        q, k, v = (x.to(device) for x in laboratory.draw(family, seed, args.heads, N, args.D))
        rows = ROWS if table.over_n else N
        calls.append(Call(q[:, :, :rows], k, v, False))
    return calls


@torch.no_grad()
def measure(name: str, table: Table, family: str, calls: list[Call]) -> list[dict]:
    """A row for each entry of the table: average and worst errors over the layers."""
    found = {}
    for call in calls:
        compare = against(call)
        q, k, v = (x.float() for x in (call.q, call.k, call.v))
        for entry, technique in table.entries.items():
            out = sdpa(call) if technique is None else attend(q, k, v, technique, call.is_causal)
            found.setdefault(entry, []).append(compare(out))
    return [
        {
            **dict(plan="accuracy", table=name),
            **dict(family=family, N=call.k.shape[2], D=call.k.shape[3], layers=len(calls)),
            **dict(entry=entry, **summary(its)),
        }
        for entry, its in found.items()
    ]


def sdpa(call: Call) -> Tensor:
    return F.scaled_dot_product_attention(call.q, call.k, call.v, is_causal=call.is_causal)


def against(call: Call) -> Callable[[Tensor], dict[str, float]]:
    """The `errors` of an output [B, H, N_q, D] of this call, and relative L1 of its worst row."""
    q, k, v = (x.flatten(0, 1).double() for x in (call.q, call.k, call.v))
    exact, v_mean = attention(q, k, v, call.is_causal), v.mean(1, keepdim=True)
    size = exact.abs().sum(-1)

    def compare(out):
        out = out.flatten(0, 1).double()
        row = (out - exact).abs().sum(-1).div(size).max().item()
        return errors(out, exact, v_mean) | {"row": row}

    return compare


def summary(its: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    return {
        "average": {key: sum(each[key] for each in its) / len(its) for key in its[0]},
        "worst": {
            key: (min if key == "cos_sim" else max)(each[key] for each in its) for key in its[0]
        },
    }


def print_table(table: Table, rows: list[dict]) -> None:
    print("\n{}: {family}, N={N}, D={D}, layers: {layers}".format(table.title, **rows[0]))
    formats = {"cos_sim": ".5f", "rel_l1": ".4f", "rmse": ".1e", "centred_rel_l1": ".4f"}
    heads = ["CosSim", "rel. L1", "RMSE", "centred"]
    lines = [["", *heads, *(f"worst: {head}" for head in heads)]]
    for row in rows:
        its = (f"{row[of][key]:{x}}" for of in ("average", "worst") for key, x in formats.items())
        lines.append([row["entry"], *its])
    show(markdown(lines))


# -- what is shipped ----


def timing() -> str:
    """What is timed, in words."""
    of_peers = [f"{name} {version}" for name, version in peers.versions(PEERS).items()]
    said = "speed: {} tokens, {} heads, medians of {} turns of {:g} ms".format(*TIMED, *TURNS)
    return "; ".join(["", said, *of_peers])


@torch.compiler.set_stance("force_eager")  # no time is taken: FA3-fp8's quantizer need not compile
@torch.no_grad()
def measure_shipped(case: Case, families, layers: int, device, times: dict) -> list[dict]:
    """A row for each family and each of `shipped`: errors of the last ROWS queries in bf16, average
    and worst over layers, and what `time_shipped` found, which is the same for all families."""
    entries, rows = shipped(case, device), []
    for family in families:
        found, failed = {each.name: [] for each in entries}, {}
        for seed in range(layers):
            drawn = laboratory.draw(family, seed, case.H_q, case.N, case.D)
            q, k, v = (x.to(device) for x in drawn)
            last = q[:, :, -ROWS:]
            compare = against(Call(last, k, v, False))
            for each in entries:
                try:
                    out = each.call(last if device.type == "cpu" else q, k, v)
                    errors_of = compare(out[:, :, -ROWS:])
                    found[each.name].append({key: errors_of[key] for key in KEPT})
                except Exception as error:  # one that fails must not cost the others
                    failed[each.name] = {"error": harness.in_a_line(error)}
        of = dict(plan="shipped", family=family, N=case.N, D=case.D, layers=layers)
        for entry, its in found.items():
            found_here = failed.get(entry) or summary(its)
            rows.append({**of, "entry": entry, **times.get(entry, {}), **found_here})
    return rows


def shipped(case: Case, device) -> list[Provider]:
    """Attention, not causal, by SDPA (on a GPU cuDNN's), each recipe, and others': on a GPU those
    of bench/peers.py, with all preparation, on a CPU FlashAttention-3's FP8, emulated."""
    recipes = [
        Provider(name, partial(as_shipped, recipe=recipe), recipe=name)
        for name, recipe in NAMED.items()
    ]
    if device.type == "cpu":
        others = [Provider("FA3_FP8", partial(attend, technique=FA3_FP8))]
        return [Provider("bf16 SDPA", F.scaled_dot_product_attention), *recipes, *others]
    installed = [kind for kind in PEERS if kind not in peers.absent([kind])]
    cudnn, *others = providers.build(case, ["cuDNN", *installed], [])
    others = [each for each in others if not each.name.endswith(" kernel")]
    return [dataclasses.replace(cudnn, name="bf16 SDPA"), *recipes, *others]


def as_shipped(q: Tensor, k: Tensor, v: Tensor, recipe: Recipe) -> Tensor:
    """By the recipe's kernels; on a CPU by their emulation, in blocks."""
    if q.device.type == "cpu":
        return attend(q, k, v, recipe)
    band, scale, encoded = (None, None, False), q.shape[3] ** -0.5, recipe.encode()
    full = SdpaCall(q, k, v, None, [], *band, scale, encoded, None, out_bnhd=False, portable=False)
    return torch.ops.sage.sdpa(*full)[0]


def timed(case: Case) -> Case:
    """Of as many tokens at any N, so that a GPU is full."""
    tokens, heads = TIMED
    return dataclasses.replace(case, B=max(1, tokens // case.N), H_q=heads, H_kv=heads)


@torch.no_grad()
def time_shipped(case: Case, device) -> dict[str, dict]:
    """ms of each of `shipped` on normal inputs, or its error; speedup: over SDPA."""
    torch._dynamo.reset()  # FA3-fp8's quantizer is compiled for each case
    sets = draw_sets(case, device, dynamic=False)
    runners, found = {}, {}
    for each in shipped(case, device):
        try:
            runners[each.name] = Runner(each, sets)
        except Exception as error:
            found[each.name] = {"error": harness.in_a_line(error)}
    ms = {name: statistics.median(x) for name, x in interleave(runners, *TURNS).items()}
    exact = ms.get("bf16 SDPA", math.nan)
    return found | {
        name: {"ms": x, "speedup": exact / x, "captured": runners[name].captured}
        for name, x in ms.items()
    }


@torch.no_grad()
def compile_kernels(cases: list[Case], device) -> None:
    """What the recipes will launch, in several processes at once: one after the other takes
    minutes."""
    with noted() as launches:
        for case in cases:
            q = torch.empty(case.B, case.H_q, case.N, case.D, dtype=torch.bfloat16, device=device)
            for recipe in NAMED.values():
                with contextlib.suppress(Exception):  # `measure_shipped` says what fails
                    as_shipped(q, q, q, recipe)
    concurrent.futures.wait(compile_elsewhere(launches, capability(device)), LONGEST)


def shipped_table(rows: list[dict]) -> str:
    """For each head_dim a line a family, and below it speed; then the limits of the defaults."""
    title = (
        "Recipes and others' attention, outputs in bf16: on a GPU by their kernels, on a CPU "
        "emulated (FA3_FP8: FlashAttention-3's). Relative L1, the largest of all N; in brackets "
        "the worst row. Of biased_v (v + 8) centred, x bf16 SDPA's. Speed: with all preparation, "
        "x bf16 SDPA's; *: launched, not a CUDA graph"
    )
    found, parts = figures(rows), [f"{wrapped(title)}\n"]
    for D, its in groups(rows, "D").items():
        lines = [[f"head_dim {D}", *groups(its, "entry")]]
        for family, of_family in groups(its, "family").items():
            cells = groups(of_family, "entry").values()
            lines.append([family, *(error_cell(each, found) for each in cells)])
        for N, of_length in groups([row for row in its if row.get("ms")], "N").items():
            cells = {row["entry"]: f"{row['speedup']:.2f}x" + "*" * (not row["captured"])
                     for row in of_length}  # fmt: skip
            lines.append([f"speed, N={N}", *(cells.get(entry, "-") for entry in lines[0][1:])])
        for first in range(1, len(lines[0]), COLUMNS):
            parts += [markdown([[line[0], *line[first : first + COLUMNS]] for line in lines])]
    return "\n".join([*parts, limits_table(found)])


def figures(rows: list[dict]) -> dict[tuple, float]:
    """(D, family, entry, N) -> average relative L1. Of biased_v, whose mean hides what attention
    adds to it, the centred one, over bf16 SDPA's."""
    found = {}
    for row in rows:
        if "average" in row:
            key = "centred_rel_l1" if row["family"] == "biased_v" else "rel_l1"
            found[row["D"], row["family"], row["entry"], row["N"]] = row["average"][key]
    return {
        (D, family, entry, N): x / found[D, family, "bf16 SDPA", N] if family == "biased_v" else x
        for (D, family, entry, N), x in found.items()
    }


def form(family: str) -> str:
    return "{:.3f}x" if family == "biased_v" else "{:.2%}"


def error_cell(rows: list[dict], found: dict[tuple, float]) -> str:
    """Of one family and entry. Results from before 2026-11-27 have no worst row."""
    rows = [row for row in rows if "average" in row]
    if not rows:
        return "-"
    family = rows[0]["family"]
    worst = max(row["worst"].get("row", 0.0) for row in rows)
    shown = f" ({worst:.0%})" if worst and family != "biased_v" else ""
    figure = max(found[row["D"], family, row["entry"], row["N"]] for row in rows)
    return form(family).format(figure) + shown


def limits_table(found: dict[tuple, float]) -> str:
    """The figures that LIMITS names. Bold: above the limit."""
    dims, lengths = (list(dict.fromkeys(key[i] for key in found)) for i in (0, 3))
    lines = [["limits; bold: above", "at most", *(f"N={N}" for N in lengths)]]
    for D, ((family, recipe), limit) in itertools.product(dims, LIMITS.items()):
        cells = []
        for N in lengths:
            figure = found.get((D, family, recipe, N), math.nan)
            mark = "**" * (figure > limit)
            cells.append("" if math.isnan(figure) else mark + form(family).format(figure) + mark)
        if any(cells):
            name = f"{recipe}, {family}, head_dim {D}"
            lines.append([name, form(family).format(limit), *cells])
    return markdown(lines)


# -- gradients ----

TRAINING_METHOD = (
    "{layers} seeds from 0 of laboratory.draw, gradients.draw_do and draw_mask, bf16, "
    "[1, {heads}, {N}, {D}]; relative L1 to autograd in float64, the mean over seeds"
)


def measure_training(family: str, kind: str, causal: bool, masks: str, args, device) -> list[dict]:
    """A row for each of gradients.ENTRIES."""
    found = {}
    for seed in range(args.layers):
        size = seed, args.heads, args.N, args.D
        inputs = *laboratory.draw(family, *size), gradients.draw_do(kind, *size)
        inputs = [x.to(device).float() for x in inputs]
        mask = gradients.draw_mask(masks, *size[:3])
        mask = None if mask is None else mask.to(device).float()
        exact = gradients.exact(*inputs, causal, mask)
        torch.manual_seed(seed)  # of stochastic rounding
        for entry, training in gradients.ENTRIES.items():
            its = gradients.gradients(*inputs, training, causal, mask)
            found.setdefault(entry, []).append(list(map(relative_l1, its, exact)))
    of = dict(
        plan="training" if masks == "none" else "training-mask",
        family=family, do=kind, N=args.N, D=args.D, causal=causal, mask=masks, layers=args.layers,
    )  # fmt: skip
    return [
        {**of, "entry": entry, "rel_l1": dict(zip(exact._fields, mean, strict=True))}
        for entry, its in found.items()
        for mean in [map(statistics.fmean, zip(*its, strict=True))]
    ]


def training_table(rows: list[dict]) -> str:
    """Of dO whose tokens differ in size: a line per recipe, a column per family. Of a mask that is
    learned its gradients, else those of q, k and v."""
    with_mask = "dmask" in rows[0]["rel_l1"]
    names = ("dmask", "dmask_rounded") if with_mask else ("dq", "dk", "dv")
    parts = []
    for causal, its in groups([row for row in rows if row["do"] == "varied"], "causal").items():
        lines = [["entry", *groups(its, "family")]]
        for entry, cells in groups(its, "entry").items():
            errors = ([row["rel_l1"][name] for name in names] for row in cells)
            lines.append([entry, *("/".join(f"{100 * x:.1f}" for x in each) for each in errors)])
        parts += [("Causal" if causal else "Not causal") + f":\n\n{markdown(lines)}"]
    return "\n".join(parts)


# -- whole models ----


def measure_end_to_end(subject: Subject, names: Sequence[str]) -> list[dict]:
    """A row for each of these names, printed as it comes; "exact" is attention in fp32, and what
    the others are compared with."""
    print(f"\nEnd to end: {subject.name}, {subject.note}")
    rows = []
    techniques = {"exact": Technique(), "bf16 SDPA": None} | {x: PRESETS[x] for x in names}
    for entry, figures, error in end_to_end(subject, techniques):
        row = dict(family=subject.name, entry=entry, figures=figures, error=error)
        rows.append({"plan": "end-to-end", **row})
        shown = error or "  ".join(
            f"{name} {'-' if value is None else f'{value:.5g}'}" for name, value in figures.items()
        )
        print(f"  {entry:16}{shown}", flush=True)
    return rows


# -- the pages' tables ----


def recipes(rows: list[dict]) -> list[dict]:
    return [row for row in rows if row["table"] == "recipes"]


def recipes_table(rows: list[dict], models: dict[str, str]) -> str:
    """A line per recipe, a column per family; then a column per model."""
    title = (
        "Relative L1 of attention, average (worst) over layers, on families of random inputs (of "
        "which each seed is a layer) and on q, k, v of models. All emulated, not rounded to bf16; "
        "capitals: the papers' recipes; bf16 SDPA: what rounding costs"
    )
    parts = [wrapped(title), ""]
    for of_model in (False, True):
        its = [row for row in recipes(rows) if (row["family"] in models) == of_model]
        if its:
            lines = [["", *groups(its, "family")]]
            for entry, cells in groups(its, "entry").items():
                pairs = ((row["average"]["rel_l1"], row["worst"]["rel_l1"]) for row in cells)
                lines.append([entry, *(f"{average:.2%} ({worst:.2%})" for average, worst in pairs)])
            parts += [markdown(lines)]
    return "\n".join(parts)


def models_table(rows: list[dict], models: dict[str, str]) -> str:
    columns = figures_of(rows)
    lines = [["", *(f"{model}: {name.replace('_', ' ')}" for model, name in columns)]]
    for entry, its in groups(rows, "entry").items():
        found = {row["family"]: row["figures"] or {} for row in its}
        values = (found.get(model, {}).get(name) for model, name in columns)
        lines.append([entry, *("-" if x is None else f"{x:.5g}" for x in values)])
    notes = "; ".join(f"{model}: {note}" for model, note in models.items())
    title = (
        'Whole models, shipped recipes by backend="sage", the papers\' emulated. Agreement: with '
        "the classes, psnr (dB): with the samples, cosine: with the embeddings that exact "
        f"attention gives; frechet: of samples to images. {notes}"
    )
    return f"{wrapped(title)}\n\n{markdown(lines)}"


def figures_of(rows: list[dict]) -> list[tuple[str, str]]:
    """(model, name) of every figure."""
    pairs = ((row["family"], name) for row in rows for name in row["figures"] or ())
    return list(dict.fromkeys(pairs))


def in_short(plans: dict[str, dict]) -> str:
    """A line for each entry of IN_SHORT; "" if the results of what is shipped lack one."""
    N, D = SHORT
    rows = [row for row in plans["shipped"]["rows"] if (row["N"], row["D"]) == SHORT]
    shown = {(row["entry"], row["family"]): row for row in rows if "average" in row}
    if any((entry, "k2x12") not in shown for entry in IN_SHORT):
        return ""
    figures = {
        (row["entry"], row["family"]): row["figures"] or {} for row in plans["end-to-end"]["rows"]
    }
    lines = [[f"N={N:,}, head_dim {D}", "speed", *FAMILIES_IN_SHORT.values(), "GPT: perplexity"]]
    for entry, name in IN_SHORT.items():
        gpt = figures.get((entry, "gpt"), {})
        lines.append([
            name, f"{shown[entry, 'normal']['speedup']:.2f}x",
            *(f"{shown[entry, family]['average']['rel_l1']:.2%}" for family in FAMILIES_IN_SHORT),
            f"{gpt['perplexity']:.4f}" if gpt else "",
        ])  # fmt: skip
    return markdown(lines)


if __name__ == "__main__":
    harness.run(main)
