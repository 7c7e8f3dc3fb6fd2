"""The papers' accuracy tables, again, on inputs that anybody can draw and in models that anybody
can train; and what the default promises.

$ python bench/accuracy.py                   # all of it, on CPU or the GPU
$ python bench/accuracy.py --tables recipes --families real_like --models --N 8192 --layers 1
$ python bench/accuracy.py --json            # bench/results/cpu or GPU/DATE-accuracy.json
$ python bench/accuracy.py --training --N 2048 --json    # DATE-training.json

Tables: CosSim, relative L1 and RMSE against float64, average and worst over layers (of a family
each is a seed); centred: relative L1 with v's mean taken off both. Inputs hold bf16 values; outputs
are compared as they are before they are rounded to it, but for SDPA's, the floor that rounding
sets. What each technique is: bench/laboratory.py; the models: bench/trained.py. Where the source
has a table, pairs that come in another order here (by average relative L1, by more than 2 %) are
named below ours. Its figures are of CogVideoX's layers: only the order can be compared.

defaults: outputs in bf16, as a user gets them; shipped recipes run their kernels where there is a
GPU. end-to-end: whole models in bf16; shipped recipes by backend="sage", the others emulated.

--training: gradients by the recipes of bench/gradients.py instead, of families, causal and not,
with a mask that is learned (its own, too) and without (--masks).
"""

import argparse
import dataclasses
import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import gradients, harness, laboratory, trained
from bench.capture import Call, capture, end_to_end
from bench.laboratory import FA3_FP8, FAMILIES, PRESETS, SAGE2_4B, Technique, attend
from bench.measure import attention, errors
from bench.tables import groups, markdown, show, wrapped
from bench.trained import Subject
from sage_inductor.ops.recipe import NAMED, Recipe
from sage_inductor.ops.sdpa import SdpaCall

TIE = 0.02  # relative difference of two relative L1 below which they have no order
ROWS = 128  # queries of the tables over N, and of the emulated defaults
LENGTHS = (1024, 2048, 4096, 8192)  # of the defaults

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
    fp16 = dataclasses.replace(SMOOTH_QK, pv="fp16", v_scale=None)
    smoothings = {"none": {}, "k": {"smooth_k": "mean"},
                  "q+k": {"smooth_q": True, "smooth_k": "mean"}}  # fmt: skip
    return {
        "smoothing": Table(
            "Smoothing q and k, INT4, FP8 p v (SageAttention2, tables 4 and 17)",
            {
                "none": INT4,
                "HadmdAttn": dataclasses.replace(INT4, rotation=D),
                **variants(INT4, SmoothAttn={"balance": True}, k={"smooth_k": "mean"},
                           q={"smooth_q": True}),
                "q+k": SMOOTH_QK,
            },
            {"none": 0.3906, "HadmdAttn": 0.3782, "SmoothAttn": 0.3383, "k": 0.1493, "q": 0.1250,
             "q+k": 0.0648},
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
            {"per_token": 0.0649, "per_thread": 0.0622, "per_block": 0.1492, "per_tensor": 0.18},
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
            {"int8": 0.5618, "e5m2": 0.0905, "e4m3": 0.0683, "fp16": 0.0649},
        ),
        "smooth-v": Table(
            "Smoothing v (table 10), SAGE2_4B, two levels and one",
            variants(SAGE2_4B, **{
                "off": {"smooth_v": False},
                "on": {},
                "off, one level": {"smooth_v": False, "interval": None},
                "on, one level": {"interval": None},
            }),
            {"off": 0.1980, "on": 0.0406},
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
            "Recipes (capitals: the papers'; the others: ours)", {"bf16 SDPA": None, **PRESETS}
        ),
    }  # fmt: skip


DEFAULT = ("sage2-8b", "sage2-8b-per-token")  # from sm_89 on; on Hopper
PROMISED = {
    "bf16 SDPA": None,
    "FA3_FP8": FA3_FP8,
    **{name: NAMED[name] for name in (*DEFAULT, "sage1-per-token")},
}
# (family, entry) -> what `figure` is to be at most.
AIMS = {
    **{(family, entry): 0.038 for family in ("normal", "k_bias") for entry in DEFAULT},
    **{("biased_v", entry): 1.05 for entry in DEFAULT},
    ("normal", "sage1-per-token"): 0.013,
}
BESIDE = ("defaults", "end-to-end")  # the tables
# The rows of the README's table, and what each is.
IN_SHORT = {
    "bf16 SDPA": "exact attention in bf16",
    "sage2-8b-per-token": "`sage2-8b-per-token`, the default on Hopper",
    "sage2-8b": "`sage2-8b`, the default on sm_89 and sm_12x",
    "sage1-per-token": "`sage1-per-token`, the most accurate",
}


def main(argv=None) -> int:
    args = parse(argv)
    device = harness.current(args)
    if args.training:
        result = harness.Result("training", TRAINING_METHOD.format(**vars(args)), args)
        for mask, causal, family, kind in itertools.product(
            args.masks, (False, True), args.families, gradients.OUTPUTS
        ):
            rows = measure_training(family, kind, causal, mask, args, device)
            result.add(rows)
            print_training(rows)
        return 0
    cuda = device.type == "cuda"
    size = args.size or ("full" if cuda else "small")
    method = (
        f"Families: {args.layers} seeds from 0 of laboratory.draw, bf16, "
        f"[1, {args.heads}, N, {args.D}]{', causal' * args.causal}; errors against float64 before "
        f"rounding to bf16; defaults: {'all' if cuda else ROWS} queries. Models: {size}, of "
        "bench/trained.py, in bf16"
    )
    result = harness.Result("accuracy", method, args, models={})
    names = [name for name in args.tables if name not in BESIDE]
    for family in args.families:
        for name, table in tables(args.D).items():
            # Causal, the first queries see next to nothing of N.
            lengths = (args.N, 2 * args.N, 4 * args.N) if table.over_n else (args.N,)
            for N in lengths if name in names else ():
                rows = measure(name, table, family, draw(table, family, N, args, device))
                result.add(rows)
                print_table(table, rows)
    if "defaults" in args.tables:
        rows = [row for N in LENGTHS for row in measure_defaults(N, args, device)]
        result.add(rows)
        show(f"\n{defaults_table(rows)}")
    for subject in trained.subjects(args.models, trained.SIZES[size], device):
        result["models"][subject.name] = subject.note
        calls = capture(subject)
        for name, table in tables(calls[0].q.shape[3]).items():
            if name in names:
                rows = measure(name, table, subject.name, calls)
                result.add(rows)
                print_table(table, rows)
        if "end-to-end" in args.tables:
            result.add(measure_end_to_end(subject))
    result.end()
    return 0


def parse(argv) -> argparse.Namespace:
    parser = harness.parser(__doc__)
    known = {
        "tables": (*tables(64), *BESIDE), "families": FAMILIES, "models": trained.MODELS,
        "masks": gradients.MASKS,
    }  # fmt: skip
    for name, choices in known.items():
        parser.add_argument(f"--{name}", nargs="*", choices=choices, default=list(choices))
    parser.add_argument("--N", type=harness.positive, default=1024)
    parser.add_argument("--D", type=int, choices=(64, 128, 256), default=128)
    parser.add_argument("--heads", type=harness.positive, default=2)
    parser.add_argument("--layers", type=harness.positive, default=3, help="of a family: seeds")
    parser.add_argument("--causal", action="store_true", help="families")
    parser.add_argument("--training", action="store_true", help="gradients, of families alone")
    parser.add_argument(
        "--size", choices=trained.SIZES, help="of the models; default: full on a GPU, else small"
    )
    return parser.parse_args(argv)


# -- tables ----


def draw(table: Table, family: str, N: int, args, device) -> list[Call]:
    """The "layers" of a family."""
    calls = []
    for seed in range(args.layers):
        q, k, v = (x.to(device) for x in laboratory.draw(family, seed, args.heads, N, args.D))
        rows = ROWS if table.over_n else N
        calls.append(Call(q[:, :, :rows], k, v, args.causal and not table.over_n))
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
            "paper_rel_l1": table.paper.get(entry),
        }
        for entry, its in found.items()
    ]


def sdpa(call: Call) -> Tensor:
    return F.scaled_dot_product_attention(call.q, call.k, call.v, is_causal=call.is_causal)


def against(call: Call) -> Callable[[Tensor], dict[str, float]]:
    """The `errors` of an output [B, H, N_q, D] of this call."""
    q, k, v = (x.flatten(0, 1).double() for x in (call.q, call.k, call.v))
    exact = attention(q, k, v, call.is_causal)
    return lambda out: errors(out.flatten(0, 1).double(), exact, v.mean(1, keepdim=True))


def summary(its: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    return {
        "average": {key: sum(each[key] for each in its) / len(its) for key in its[0]},
        "worst": {
            key: (min if key == "cos_sim" else max)(each[key] for each in its) for key in its[0]
        },
    }


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


def print_table(table: Table, rows: list[dict]) -> None:
    print("\n{}: {family}, N={N}, D={D}, layers: {layers}".format(table.title, **rows[0]))
    formats = {"cos_sim": ".5f", "rel_l1": ".4f", "rmse": ".1e", "centred_rel_l1": ".4f"}
    heads = ["CosSim", "rel. L1", "RMSE", "centred"]
    lines = [["", *heads, *(f"worst: {head}" for head in heads), "paper L1"]]
    for row in rows:
        its = (f"{row[of][key]:{x}}" for of in ("average", "worst") for key, x in formats.items())
        paper = row["paper_rel_l1"]
        lines.append([row["entry"], *its, "" if paper is None else f"{paper:.4f}"])
    show(markdown(lines))
    for pair in disorder(rows):
        print(f"not the paper's order: {pair}")


# -- what the default promises ----


@torch.no_grad()
def measure_defaults(N: int, args, device) -> list[dict]:
    """A row for each family that AIMS names and each of DEFAULTS, with its aim if it has one."""
    rows = []
    for family in dict.fromkeys(family for family, _ in AIMS):
        found = {}
        for seed in range(args.layers):
            q, k, v = (x.to(device) for x in laboratory.draw(family, seed, args.heads, N, args.D))
            call = Call(q if device.type == "cuda" else q[:, :, :ROWS], k, v, False)
            compare = against(call)
            for entry, technique in PROMISED.items():
                found.setdefault(entry, []).append(compare(as_shipped(call, technique)))
        found = {entry: summary(its) for entry, its in found.items()}
        for entry, its in found.items():
            value, at_most = figure(family, found, entry), AIMS.get((family, entry))
            rows.append({
                **dict(plan="defaults", family=family, N=N, D=args.D, layers=args.layers),
                **dict(entry=entry, **its),
                **dict(figure=value, at_most=at_most, met=at_most and value <= at_most),
            })  # fmt: skip
    return rows


def figure(family: str, found: dict[str, dict], entry: str) -> float:
    """Average relative L1; of biased_v the centred one, beside that of SDPA in bf16."""
    key = "centred_rel_l1" if family == "biased_v" else "rel_l1"
    beside = found["bf16 SDPA"]["average"][key] if family == "biased_v" else 1.0
    return found[entry]["average"][key] / beside


def as_shipped(call: Call, technique: Technique | Recipe | None) -> Tensor:
    """Attention, not causal, in the call's own dtype; of a recipe on a GPU by its kernels."""
    q, k, v = call.q, call.k, call.v
    if technique is None:
        return sdpa(call)
    if isinstance(technique, Technique) or q.device.type == "cpu":
        return attend(q, k, v, technique)
    band, scale, recipe = (None, None, False), q.shape[3] ** -0.5, technique.encode()
    full = SdpaCall(q, k, v, None, [], *band, scale, recipe, None, out_bnhd=False, portable=False)
    return torch.ops.sage.sdpa(*full)[0]


def defaults_table(rows: list[dict]) -> str:
    lines = [["", "N", *groups(rows, "family")]]
    for entry, its in groups(rows, "entry").items():
        for N, cells in groups(its, "N").items():
            lines.append([entry, str(N), *map(default_cell, cells)])
    title = (
        "The defaults (sage2-8b-per-token on Hopper, sage2-8b on sm_89 and sm_12x) and "
        "sage1-per-token, on a GPU "
        "by their kernels, beside bf16 attention and FlashAttention-3's FP8 (emulated); outputs in "
        "bf16. Relative L1; of biased_v (v + 8) centred, x bf16's. In brackets: what it is to be "
        "at most"
    )
    return f"{wrapped(title)}\n\n{markdown(lines)}"


def default_cell(row: dict) -> str:
    of_bf16 = row["family"] == "biased_v"
    value, aim = (
        "" if x is None else f"{x:.3f}x" if of_bf16 else f"{x:.2%}"
        for x in (row["figure"], row["at_most"])
    )  # fmt: skip
    return value + (aim and f" ({aim}: {'met' if row['met'] else 'not met'})")


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
            errors = [(x - y).abs().sum() / y.abs().sum() for x, y in zip(its, exact, strict=True)]
            found.setdefault(entry, []).append(torch.stack(errors).cpu())
    of = dict(
        plan="training" if masks == "none" else "training-mask",
        family=family, do=kind, N=args.N, D=args.D, causal=causal, mask=masks, layers=args.layers,
    )  # fmt: skip
    return [
        {**of, "entry": entry, "rel_l1": dict(zip(exact._fields, mean, strict=True))}
        for entry, its in found.items()
        for mean in [torch.stack(its).mean(0).tolist()]
    ]


def print_training(rows: list[dict]) -> None:
    title = "\nGradients: {family}, dO {do}, mask {mask}, N={N}, D={D}{c}, layers: {layers}"
    print(title.format(c=", causal" * rows[0]["causal"], **rows[0]))
    lines = [["", *rows[0]["rel_l1"]]]
    lines += [[row["entry"], *(f"{x:.4f}" for x in row["rel_l1"].values())] for row in rows]
    show(markdown(lines))


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


def measure_end_to_end(subject: Subject) -> list[dict]:
    """A row for each recipe, printed as it comes; "exact" is attention in fp32, and what the others
    are compared with."""
    print(f"\nEnd to end: {subject.name}, {subject.note}")
    rows = []
    techniques = {"exact": Technique(), "bf16 SDPA": None, **PRESETS}
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
    """A line for each entry of IN_SHORT, by the results of all three plans."""
    figures = {
        (row["entry"], row["family"]): row["figures"] or {} for row in plans["end-to-end"]["rows"]
    }
    lines = [[
        "", "random inputs, N=1024", "N=8192", "q, k, v of models", "GPT: perplexity",
        "ViT: accuracy", "DiT: PSNR to exact", "MiniLM: worst cosine",
    ]]  # fmt: skip
    for entry, name in IN_SHORT.items():
        normal = {
            row["N"]: row["figure"]
            for row in plans["defaults"]["rows"]
            if (row["entry"], row["family"]) == (entry, "normal")
        }
        of_models = [
            row["average"]["rel_l1"]
            for row in recipes(plans["accuracy"]["rows"])
            if row["entry"] == entry and row["family"] in plans["accuracy"]["models"]
        ]
        lines.append([
            name, f"{normal[1024]:.2%}", f"{normal[8192]:.2%}",
            " to ".join(dict.fromkeys(f"{f(of_models):.2%}" for f in (min, max))),
            f"{figures[entry, 'gpt']['perplexity']:.4f}",
            f"{figures[entry, 'vit']['accuracy']:.1%}",
            f"{figures[entry, 'dit']['psnr']:.1f} dB",
            f"{figures[entry, 'minilm']['worst_cosine']:.5f}",
        ])  # fmt: skip
    return markdown(lines)


if __name__ == "__main__":
    harness.run(main)
