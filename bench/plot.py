"""The tables in README.md and docs/, and the plots, from the newest results of each GPU.

$ python bench/plot.py            # rewrites every page between its markers, draws the plots
$ python bench/plot.py --check    # exits 1 if a page says something else than the results

A page says ``<!-- table:NAME -->`` and ``<!-- table:end -->`` where it wants a table of TABLES.
"""

import argparse
import ast
import collections
import inspect
import json
import re
import sys
import textwrap
import types
from collections.abc import Collection
from dataclasses import is_dataclass
from pathlib import Path

import sage_inductor
from bench.cases import Case
from sage_inductor.choose import cost, tables
from sage_inductor.names import TRAINED_BY
from sage_inductor.ops.recipe import ALIASES
from sage_inductor.patterns.reasons import CAUSES

ROOT = Path(__file__).parent.parent
END = "<!-- table:end -->"
MARKED = re.compile(rf"(<!-- table:(\w+) -->\n).*?({END})", re.S)
SPEED = ("paper", "load", "models", "model", "preparation", "fusion", "masks", "shared")
ACCURACY = ("accuracy", "defaults", "end-to-end")
CURVES = {  # plans of bench/curves.py, and what their models are
    "curves": "GPTs from scratch",
    "curves-gpt-large": "GPTs from scratch, large steps",
    "curves-dit": "Diffusion transformers from scratch",
    "curves-minilm": "MiniLM fine-tuned",
}
TRAINING = ("training", "training-mask", *CURVES, "backward", "memory")
PLANS = (
    *SPEED, *ACCURACY, *TRAINING, "packages", "parallel", "peers", "sparse", "lists", "selected",
)  # fmt: skip
PLOT, OVERVIEW = "attention.svg", "overview.svg"
ACCURACY_PLOT, MODELS_PLOT, PEERS_PLOT = "accuracy.svg", "end-to-end.svg", "peers.svg"
SPARSE_PLOT = "sparse.svg"
COLOURS = {"cuDNN": "slategray", "flash": "goldenrod", "flex": "tab:orange", "inductor": "tab:blue",
           "FA3": "tab:brown", "FA3-fp8": "tab:pink", "FA4": "tab:olive",
           "sageattention": "tab:cyan", "cuDNN-fp8": "teal"}  # fmt: skip
SDPA = ("cudnn", "flash")  # rivals of bench/training.py
WAYS = {  # providers of bench/parallel.py
    "gather 8 bits": "8 bits, with `lengths`",
    "lengths asked for": "8 bits, without",
    "gather bf16": "bf16, gathered",
    "Ulysses": "Ulysses",
}
KINDS_OF_PEERS = {"kernel": "The kernel alone", "op": "With all preparation"}
SAGE_COLOURS = ("tab:green", "tab:purple", "tab:red")  # one per recipe
METHODS = property, classmethod, types.FunctionType
HEADS = (8, 24, 128)  # B * H of the columns of `lengths`
BLOCKS = {
    "flux_double": "Flux, double block",
    "flux_single": "Flux, single block",
    "wan14b_480p": "Wan 14B, 480p",
    "wan14b_720p": "Wan 14B, 720p",
    "hunyuan": "HunyuanVideo",
    "cogvideox": "CogVideoX",
    "llama3_8k": "Llama 3 8B, prefill of 8K",
    "llama3_32k": "Llama 3 8B, prefill of 32K",
    "vit_l_1024px": "ViT-L, 1024 px",
    "sd3_1024px": "SD3, 1024 px",
    "sdxl_64x64": "SDXL UNet, 64 x 64",
    "sdxl_32x32": "SDXL UNet, 32 x 32",
    "hunyuan_padded": "HunyuanVideo, padded text",
    "whisper_large": "Whisper, encoder",
    "vit_h_224px": "ViT-H, 224 px",
    "vit_h_1024px": "ViT-H, 1024 px",
    "bert_large_512": "BERT, N=512",
    "llama3_2k": "Llama 3 8B, prefill of 2K",
    "qwen_vl_980px": "Qwen2.5-VL, vision",
    "padded": "batch of 4, padded",
}
# The rows of the README's table of accuracy, and what each is.
IN_SHORT = {
    "bf16 SDPA": "exact attention in bf16",
    "sage2-8b-per-token": "`sage2-8b-per-token`, the default on Hopper",
    "sage2-8b": "`sage2-8b`, the default on sm_89 and sm_12x",
    "sage1-per-token": "`sage1-per-token`, the most accurate",
}


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--root", type=Path, default=ROOT, help="holds README.md, docs/, bench/")
    args = parser.parse_args(argv)
    results = args.root / "bench" / "results"
    gpus = {path.name: newest(path) for path in sorted(results.glob("*")) if path.is_dir()}
    gpus = {name: plans for name, plans in gpus.items() if plans}
    if not gpus:
        print(f"plot: no results under {results}: run bench/attention.py", file=sys.stderr)
        return 2

    stale = False
    for page in (args.root / "README.md", *sorted(args.root.glob("docs/*.md"))):
        old = page.read_text()
        marked = MARKED.findall(old)
        unknown = {name for _, name, _ in marked} - TABLES.keys()
        if unknown or old.count("<!-- table:") != 2 * len(marked):
            print(f"plot: {page} needs {END} after each marker of {[*TABLES]}", file=sys.stderr)
            return 2
        new = MARKED.sub(lambda found: f"{found[1]}{TABLES[found[2]](gpus)}{found[3]}", old)
        if new != old and args.check:
            print(f"plot: {page} is not what bench/plot.py writes", file=sys.stderr)
            stale = True
        elif new != old:
            page.write_text(new)
    if args.check:
        return int(stale)
    for name, plans in gpus.items():
        for needed, drawn, file in (
            (("paper",), draw, PLOT), (("paper", "model"), draw_overview, OVERVIEW),
            (("accuracy",), draw_accuracy, ACCURACY_PLOT),
            (("end-to-end",), draw_models, MODELS_PLOT), (("peers",), draw_peers, PEERS_PLOT),
            (("sparse",), draw_sparse, SPARSE_PLOT),
            *(((plan,), draw_curves, f"{plan}.svg") for plan in CURVES),
        ):  # fmt: skip
            if plans.keys() >= set(needed):
                drawn(*(plans[plan] for plan in needed), results / name / file)
    return 0


def newest(folder: Path) -> dict[str, dict]:
    """Plan -> the newest result that holds rows of it, with those rows alone. A row that names no
    plan is of the plan that the file is named after, behind the date."""
    found = {}
    for path in sorted(folder.glob("*.json"), key=lambda path: date(load(path))):
        result, usual = load(path), path.stem.partition("-")[2][len("MM-DD-") :]
        plans = groups([{"plan": usual, **row} for row in result["rows"]], "plan")
        for plan in plans.keys() & set(PLANS):
            found[plan] = {**result, "rows": plans[plan]}
    return found


def load(path: Path) -> dict:
    """A result, with the names that recipes have today."""
    text = path.read_text()
    for old, new in ALIASES.items():
        text = text.replace(f'"{old}', f'"{new}')
    return json.loads(text)


def date(result: dict) -> str:
    return result["date"]


# -- the pages ----


def blocks_in_short(gpus: dict[str, dict]) -> str:
    """Whole transformer blocks: a line each where a call is rewritten, the others in one."""
    parts = []
    for plans in gpus.values():
        if "model" in plans:
            lines = [[
                "block", "B x H x N x D", '`"inductor"`', '`"sage"`', "faster", "attention",
                "relative L1",
            ]]  # fmt: skip
            gains, others = rewritten(plans["model"]["rows"])
            for row in gains:
                inductor, sage = (row["times"][name]["ms"] for name in ("inductor", "sage"))
                speed = row["speed"]["sage"]
                change = (
                    "no change"
                    if speed["x_min"] <= 1 <= speed["x_max"]
                    else f"**{speed['x']:.2f}x**"
                )
                lines.append([
                    BLOCKS[row["model"]], row["shape"], f"{inductor:#.4g} ms", f"{sage:#.4g} ms",
                    f"{change} ({speed['x_min']:.2f} to {speed['x_max']:.2f})",
                    f"{row['share']:.0%}", f"{row['accuracy']['sage']['rel_l1']:.2%}",
                ])  # fmt: skip
            parts += [markdown(lines), where_and_when(plans["model"])]
            if others:
                speeds = [row["speed"]["sage"][end] for row in others for end in ("x_min", "x_max")]
                names = "; ".join(BLOCKS[row["model"]] for row in others)
                parts += [
                    f"All calls stay SDPA ({min(speeds):.3f}x to {max(speeds):.3f}x) in: {names}.\n"
                ]
    return "\n".join(parts)


def rewritten(rows: list[dict]) -> tuple[list[dict], list[dict]]:
    """The blocks in which a call is rewritten for a user, and the others; none that failed."""
    found = [], []
    for row in (row for row in rows if not row["error"]):
        found[not any(site["recipe"] for site in row["sites"]["sage"])].append(row)
    return found


def accuracy_in_short(gpus: dict[str, dict]) -> str:
    """A line for each entry of IN_SHORT, by the GPU's measurements."""
    parts = []
    for plans in gpus.values():
        gpu = next(iter(plans.values()))["machine"]["gpu"]
        if gpu == "cpu" or not plans.keys() >= set(ACCURACY):
            continue
        figures = {
            (row["entry"], row["family"]): row["figures"] or {}
            for row in plans["end-to-end"]["rows"]
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
        parts += [markdown(lines), where_and_when(plans["accuracy"])]
    return "\n".join(parts)


def packages(gpus: dict[str, dict]) -> str:
    """A package beside the compiled model and beside the same package with SDPA: time, then what
    it gives, weighs and takes. Nothing where it was not measured."""
    parts = []
    for plans in gpus.values():
        rows = [row for row in plans.get("packages", {"rows": ()})["rows"] if not row["error"]]
        if rows:
            parts += [markdown(package_times(rows)), markdown(package_sizes(rows), "---")]
            parts += [provenance(plans["packages"])]
    return "\n".join(parts)


def package_times(rows: list[dict]) -> list[list[str]]:
    lines = [[
        "ms a call", "B x H x N x D", "package", "compiled", "package, SDPA", "faster",
        "launched: package", "compiled", "package, SDPA",
    ]]  # fmt: skip
    for row in rows:
        times, kind = row["times"], row["kind"]
        names = f"package {kind}", f"compiled {kind}", "package SDPA"
        replayed, launched = (
            [times[name][way]["ms"] for name in names] for way in ("replayed", "launched")
        )
        lines.append([
            package_name(row), row["shape"], *(f"{ms:#.4g}" for ms in replayed),
            f"**{replayed[2] / replayed[0]:.2f}x**", *(f"{ms:#.4g}" for ms in launched),
        ])  # fmt: skip
    return lines


def package_sizes(rows: list[dict]) -> list[list[str]]:
    lines = [["", "beside the compiled model", "code, MB (SDPA's)", "packaging, s (SDPA's)"]]
    for its in groups(rows, "model").values():
        kind = its[0]["kind"]
        ours, sdpa = its[0]["packages"][kind], its[0]["packages"]["SDPA"]
        found = its[0]["others"] | {str(row["N"]): row["equal"][kind] for row in its}
        equal = ", ".join(
            f"N={n}: {'bit-equal' if x['bit_equal'] else format(x['rel_l2'], '.1e')}"
            for n, x in sorted(found.items(), key=lambda each: int(each[0]))
        )
        lines.append([
            package_name(its[0]), equal,
            f"{ours['code_bytes'] / 1e6:.1f} ({sdpa['code_bytes'] / 1e6:.1f})",
            f"{ours['seconds']:.0f} ({sdpa['seconds']:.0f})",
        ])  # fmt: skip
    return lines


def package_name(row: dict) -> str:
    """The block; with what was asked for, where "auto" leaves it SDPA."""
    name = BLOCKS[row["model"]].partition(", prefill")[0]
    return name + ", `sage.force`" * (row["kind"] == "sage.force")


def parallel(gpus: dict[str, dict]) -> str:
    return sections(gpus, ("parallel",), lambda name, plans: parallel_section(plans["parallel"]))


def parallel_section(result: dict) -> str:
    """A line per case, of as many GPUs as were there: ms, and the efficiency."""
    rows = [{**row, "B": 1, "model": row["case"]} for row in result["rows"]]
    lines = [["B x H x N x D", "one GPU", *WAYS.values(), "MB received: 8 bits", "bf16"]]

    def shown(ms: float) -> str:
        return f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"

    for its in groups([row for row in rows if row["P"] == result["world"]], "case").values():
        found = {row["provider"]: row for row in its}
        cells = (f"{shown(found[x]['ms'])} ({found[x]['efficiency']:.2f})" for x in WAYS)
        sent = (found[x]["received_bytes"] for x in ("gather 8 bits", "gather bf16"))
        alone = shown(its[0]["one_device_ms"])
        lines.append([case_of(its[0]), alone, *cells, *(f"{x / 1e6:.0f}" for x in sent)])
    return f"{markdown(lines)}\n{provenance(result)}"


def peers(gpus: dict[str, dict]) -> str:
    """Other packages beside ours: kernels alone, then with all preparation; means and errors where
    the result has them. Bold: ahead of ours, or of a mean, behind it."""
    parts = []
    for gpu, plans in gpus.items():
        if "peers" in plans:
            result = plans["peers"]
            parts += [f"![TFLOP/s beside other packages](../bench/results/{gpu}/{PEERS_PLOT})\n"]
            versions = ", ".join(
                f"{name} {version}" for name, version in result["versions"].items()
            )
            method = ". ".join(
                f"{name.capitalize()}: {result['method'][name]}"
                for name in ("time", "columns", "accuracy")
                if name in result["method"]
            )
            for kind, title in KINDS_OF_PEERS.items():
                table = peers_table(of_kind(result["rows"], kind), f" {kind}")
                parts += [f"{title}: TFLOP/s (x cuDNN)\n", table]
            if "means" in result:
                parts += ["Ours over theirs, geometric means\n", means_table(result["means"])]
                parts += [
                    "Relative L1 in %: normal, k_bias, v_bias (centred)\n",
                    families_table(result["accuracy"]),
                ]
            where = f"One {result['machine']['gpu']}, {result['date'][:10]}, {versions}"
            parts += [wrapped(f"{where}. {method}.") + "\n"]
    return "\n".join(parts)


def of_kind(rows: list[dict], kind: str) -> list[dict]:
    """The rows of one kind of providers, and of those that have no kinds."""
    others = tuple(f" {other}" for other in KINDS_OF_PEERS if other != kind)
    return [row for row in rows if not row["provider"].endswith(others)]


def leading(rows: list[dict]) -> list[dict]:
    """Of the rows of one case those that are ahead of ours."""
    ours = max(row["tflops"] or 0 for row in rows if row["recipe"])
    return [row for row in rows if (row["tflops"] or 0) > ours]


def peers_table(rows: list[dict], kind: str) -> str:
    rows = [{**row, "case": f"{case_of(row)}{' causal' * row['is_causal']}"} for row in rows]
    providers = list(groups(rows, "provider"))
    lines = [["B x H x N x D", *(name.removesuffix(kind) for name in providers)]]
    for case, its in groups(rows, "case").items():
        ahead, cells = leading(its), {}
        for row in its:
            cell = with_speedup(row, f"{row['tflops']:.0f}") if row["tflops"] else "-"
            cells[row["provider"]] = f"**{cell}**" if row in ahead else cell
        lines.append([case, *(cells.get(name, "") for name in providers)])
    return markdown(lines)


def means_table(means: list[dict]) -> str:
    pairs = groups([{**row, "pair": f"{row['of']} / {row['over']}"} for row in means], "pair")
    lines = [["", *groups(means, "cases")]]
    for pair, its in pairs.items():
        ratios = (f"{row['speedup']:.2f}x" for row in its)
        marks = ("**" * (row["speedup"] < 1) for row in its)
        lines.append([pair, *(f"{m}{ratio}{m}" for ratio, m in zip(ratios, marks, strict=True))])
    return markdown(lines)


def families_table(accuracy: list[dict]) -> str:
    """In %, a line per provider: normal, k_bias and, with v's mean taken off, v_bias."""
    lines = [["", *groups(accuracy, "family")]]
    for provider, its in groups(accuracy, "provider").items():
        cells = ((row[kind] for kind in ("normal", "k_bias", "v_bias_centred")) for row in its)
        lines.append([provider, *(", ".join(f"{100 * x:.3g}" for x in each) for each in cells)])
    return markdown(lines)


def api(gpus: dict[str, dict]) -> str:
    """The public names, each with its signature and what its docstring says."""
    parts = []
    for name in sorted(sage_inductor.__all__):
        entry = getattr(sage_inductor, name)
        if inspect.isfunction(entry):
            parts += [f"## {name}\n\n```text\n{signature(entry)}\n```\n\n{described(entry)}\n"]
        elif inspect.isclass(entry):
            shown = f"```text\n{constructor(entry)}\n```\n\n" if is_dataclass(entry) else ""
            parts += [f"## {name}\n\n{shown}{described(entry)}\n"]
            methods = [
                f"* `{key}{'()' * (not isinstance(member, property))}`: {described(member)}"
                for key, member in vars(entry).items()
                if not key.startswith("_") and isinstance(member, METHODS) and described(member)
            ]
            parts += ["\n".join(methods) + "\n"] if methods else []
    return "\n".join(parts)


def signature(function) -> str:
    """As the source has it."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    returns = f" -> {ast.unparse(tree.returns)}" if tree.returns else ""
    text = f"{tree.name}({ast.unparse(tree.args).replace('=', ' = ')}){returns}"
    return textwrap.fill(text, 120, subsequent_indent=" " * (len(tree.name) + 1))


def constructor(entry: type) -> str:
    """A dataclass with its fields."""
    fields = ast.parse(textwrap.dedent(inspect.getsource(entry))).body[0].body
    given = [ast.unparse(x) for x in fields if isinstance(x, ast.AnnAssign)]
    text = f"{entry.__name__}({', '.join(given)})"
    return textwrap.fill(text, 120, subsequent_indent=" " * (len(entry.__name__) + 1))


def described(entry) -> str:
    """The docstring, as Markdown."""
    return (inspect.getdoc(entry) or "").replace("``", "`")


def remedies(gpus: dict[str, dict]) -> str:
    """What to do about each cause why a call stays, and what the report says of it."""
    lines = collections.defaultdict(list)
    for cause in CAUSES:
        text = re.sub(r"\{[^}]*\}(\.\{\})?", "...", cause.text)
        quoted = f"`` {text} ``" if "`" in text else f"`{text}`"
        lines[cause.remedy].append(f"  * {quoted}\n")
    return "".join(f"* {remedy}:\n{''.join(said)}" for remedy, said in lines.items())


def sparse(gpus: dict[str, dict]) -> str:
    return sections(gpus, ("sparse",), lambda name, plans: sparse_section(name, plans["sparse"]))


def sparse_section(name: str, result: dict) -> str:
    """A line per way to choose keys, a column per top_k."""
    columns = groups(result["rows"], "top_k")
    lines = [["keys", *(f"top_k {x:g}" for x in columns)]]
    for title, rows in by_choice(result["rows"]).items():
        cells = {row["top_k"]: sparse_cell(row) for row in rows}
        lines += [[title, *(cells.get(x, "") for x in columns)]]
    image = f"![Quality of samples against density](../bench/results/{name}/{SPARSE_PLOT})"
    distance = ", Frechet distance" * ("frechet" in result["rows"][0])
    what = f"The part of the keys that is computed: PSNR in dB{distance}."
    where = wrapped(f"{result['model']}.")
    return f"{image}\n\n{what}\n\n{markdown(lines)}\n{where}\n{provenance(result)}"


def by_choice(rows: list[dict]) -> dict[str, list[dict]]:
    """What a line of the table, and of the plot, is called -> its rows."""
    return groups([{**row, "title": choice_of(row)} for row in rows], "title")


def choice_of(row: dict) -> str:
    steps = row["dense_steps"]
    return row["choice"] + (f", first {steps} steps dense" if steps else "")


def sparse_cell(row: dict) -> str:
    figures = ["equal" if row["psnr"] is None else f"{row['psnr']:.1f}"]
    figures += [f"{row['frechet']:.2f}"] if "frechet" in row else []
    return f"{row['density']:.2f}: {', '.join(figures)}"


def training(gpus: dict[str, dict]) -> str:
    return training_sections(gpus, "training", ("dq", "dk", "dv"))


def training_mask(gpus: dict[str, dict]) -> str:
    return training_sections(gpus, "training-mask", ("dmask", "dmask_rounded"))


def training_sections(gpus: dict[str, dict], plan: str, names: tuple[str, ...]) -> str:
    return sections(gpus, (plan,), lambda _, plans: training_section(plans[plan], names))


def training_section(result: dict, names: tuple[str, ...]) -> str:
    """Of dO whose tokens differ in size: a line per recipe, a column per family."""
    parts = []
    rows = [row for row in result["rows"] if row["do"] == "varied"]
    for causal, its in groups(rows, "causal").items():
        lines = [["entry", *groups(its, "family")]]
        for entry, cells in groups(its, "entry").items():
            errors = ([row["rel_l1"][name] for name in names] for row in cells)
            lines.append([entry, *("/".join(f"{100 * x:.1f}" for x in each) for each in errors)])
        parts += [("Causal" if causal else "Not causal") + f":\n\n{markdown(lines)}"]
    return "\n".join([*parts, provenance(result)])


def curves(gpus: dict[str, dict]) -> str:
    def section(name: str, plans: dict[str, dict]) -> str:
        return "\n".join(curves_part(name, plans[plan]) for plan in CURVES if plan in plans)

    return sections(gpus, tuple(CURVES), section)


def curves_part(name: str, result: dict) -> str:
    """A line per recipe in each setting: the mean gaps to exact attention, beside deviations."""
    plan = result["rows"][0]["plan"]
    lines = [[
        "tokens", "QK-norm", "recipe", "seeds", "loss", "gap", "deviation", "of exact",
        "held out: loss", "gap", "deviation", "of exact",
    ]]  # fmt: skip
    for line in result["summary"]:
        marks = [f"{line[mark]} {mark}" for mark in ("diverged", "partial") if line[mark]]
        lines.append([
            str(line["tokens"]), "yes" if line["qk_norm"] else "no", line["recipe"],
            ", ".join([str(line["seeds"]), *marks]),
            *(loss_cell(line[of], key) for of in ("train", "held_out") for key in line[of]),
        ])  # fmt: skip
    image = f"![{CURVES[plan]}: loss curves by recipe](../bench/results/{name}/{plan}.svg)"
    where = wrapped(f"{result['model']}.")
    return f"{image}\n\n{markdown(lines)}\n{where}\n{provenance(result)}"


def loss_cell(figures: dict, key: str) -> str:
    """A loss in 4 decimals, differences in 5."""
    if figures[key] is None:
        return "-"
    return f"{figures[key]:{'.4f' if key == 'mean' else '+.5f' if key == 'gap' else '.5f'}}"


def backward(gpus: dict[str, dict]) -> str:
    return sections(gpus, ("backward",), lambda name, plans: backward_section(plans["backward"]))


def backward_section(result: dict) -> str:
    """A line per shape and way to train: ms, and beside ours how much faster than SDPA's best."""
    parts = ("forward", "backward", "step")
    lines = [["B x H x N x D", "", *parts, "kept", "dQ/dK/dV, %"]]
    for shape, rows in groups(result["rows"], "shape").items():
        best = {
            part: min(row["times"][part]["ms"] for row in rows if row["provider"] in SDPA)
            for part in parts
        }
        for row in rows:
            ms = {part: row["times"][part]["ms"] for part in parts}
            cells = [f"{ms[part]:#.4g}" for part in parts]
            if row["provider"] not in SDPA:
                cells = [
                    f"{cell} ({best[part] / ms[part]:.2f}x)"
                    for part, cell in zip(parts, cells, strict=True)
                ]
            error = row["rel_l1"]
            near = "/".join(f"{100 * x:.1f}" for x in error.values()) if error else "-"
            lines.append([shape, row["provider"], *cells, f"{row['kept']:.1f}", near])
    return f"{markdown(lines)}\n{provenance(result)}"


def memory(gpus: dict[str, dict]) -> str:
    return sections(gpus, ("memory",), lambda name, plans: memory_section(plans["memory"]))


def memory_section(result: dict) -> str:
    """A line per model and way to compile it, the others beside inductor."""
    lines = [["", "compiled by", "step, ms", "kept, GiB", "peak, GiB", "weights, GiB", "CosSim"]]
    for shape, rows in groups(result["rows"], "shape").items():
        first = rows[0]
        for row in rows:
            ms, inductors = (each["times"]["step"]["ms"] for each in (row, first))
            cells = [f"{ms:#.4g}" + (f" ({inductors / ms:.2f}x)" if row is not first else "")]
            for part in ("kept_bytes", "peak_bytes"):
                less = f" ({row[part] / first[part] - 1:+.1%})" if row is not first else ""
                cells.append(f"{row[part] / 2**30:.2f}{less}")
            weights = f"{row['weight_bytes'] / 2**30:.2f}"
            lines.append([shape, row["provider"], *cells, weights, f"{row['cos_sim']:.4f}"])
    return f"{markdown(lines)}\n{provenance(result)}"


def lists(gpus: dict[str, dict]) -> str:
    return sections(gpus, ("lists",), lambda name, plans: lists_section(plans["lists"]))


def lists_section(result: dict) -> str:
    """A line per kind of lists."""
    lines = [
        ["N", "head_dim", "blocks", "listed", "kernel, ms", "with preparation", "flex",
         "flex / ours", "dense kernel", "time by work"],
    ]  # fmt: skip
    for row in result["rows"]:
        ms = {name: each["ms"] for name, each in row["times"].items()}
        flex = (f"{ms['flex']:.3f}", f"{ms['flex'] / ms['op']:.2f}") if "flex" in ms else ("", "")
        lines.append([
            str(row["N"]), str(row["D"]), f"{row['block_q']} x {row['block_kv']}",
            f"{row['density']:.0%}", f"{ms['lists']:.3f}", f"{ms['op']:.3f}", *flex,
            f"{ms['dense']:.3f}", f"{row['per_work']:.2f}",
        ])  # fmt: skip
    return f"{markdown(lines)}\n{provenance(result)}"


def selected(gpus: dict[str, dict]) -> str:
    return sections(gpus, ("selected",), lambda name, plans: selected_section(plans["selected"]))


def selected_section(result: dict) -> str:
    """A line per block and way to compile it."""
    lines = [["B x H x N x D", "compiled by", "ms", "over inductor", "over sage", "peak, GiB"]]
    for row in result["rows"]:
        for name in () if row["error"] else row["sites"]:
            its, ms = row["times"][name], row["times"][name]["ms"]
            ratios = (row["times"][of]["ms"] / ms for of in ("inductor", "sage"))
            lines.append([
                row["shape"], name, f"{ms:#.4g}", *(f"{x:.2f}x" for x in ratios),
                f"{its['peak_bytes'] / 2**30:.2f}",
            ])  # fmt: skip
    return f"{markdown(lines)}\n{provenance(result)}"


def lengths(gpus: dict[str, dict]) -> str:
    return lengths_of(set(cost.KINDS) - cost.TRAINED.keys())


def training_lengths(gpus: dict[str, dict]) -> str:
    return lengths_of(cost.TRAINED)


def lengths_of(kinds: Collection[str]) -> str:
    """From which length "auto" rewrites self-attention, of the built-in tables."""
    lines = [["GPU", "head_dim", "kind of call", *(f"B·H ≥ {heads}" for heads in HEADS), "error"]]
    for gpu in sorted(tables.built_in().keys() - tables.ALIKE.keys()):
        table = tables.built_in()[gpu]
        families = {
            each: TRAINED_BY if each.kind in cost.TRAINED else "sage2-8b-per-token"
            for each in table.families
            if each.kind in kinds
        }
        for each in sorted(families, key=lambda each: (each.head_dim, cost.KINDS.index(each.kind))):
            recipe = families[each]
            if table.find(each, recipe) != each:
                continue
            cells = [str(table.first_length(each, recipe, heads) or "") for heads in HEADS]
            error = table.error(each, recipe)
            lines.append([gpu, str(each.head_dim), each.kind, *cells, f"{error:.1%}"])
    return markdown(lines)


def speed(gpus: dict[str, dict]) -> str:
    return sections(gpus, SPEED, speed_section)


def errors_of_recipes(gpus: dict[str, dict]) -> str:
    return sections(gpus, ACCURACY, accuracy_section)


TABLES = {
    "accuracy": errors_of_recipes,
    "api": api,
    "blocks": blocks_in_short,
    "lengths": lengths,
    "packages": packages,
    "parallel": parallel,
    "peers": peers,
    "remedies": remedies,
    "short": accuracy_in_short,
    "sparse": sparse,
    "training": training,
    "training_lengths": training_lengths,
    "training_mask": training_mask,
    "curves": curves,
    "backward": backward,
    "memory": memory,
    "lists": lists,
    "selected": selected,
    "speed": speed,
}


def sections(gpus: dict[str, dict], wanted: tuple[str, ...], section) -> str:
    """A section for each GPU that has results of the `wanted` plans."""
    parts = []
    for name, plans in gpus.items():
        if plans.keys() & set(wanted):
            gpu = next(iter(plans.values()))["machine"]["gpu"]
            parts += [f"### {'CPU, emulated' if gpu == 'cpu' else gpu}\n", section(name, plans)]
    return "\n".join(parts)


def speed_section(name: str, plans: dict[str, dict]) -> str:
    parts = []
    if "paper" in plans:
        parts += [provenance(plans["paper"])]
        parts += [f"![TFLOP/s against sequence length](../bench/results/{name}/{PLOT})\n"]
        for title, rows in groups(plans["paper"]["rows"], "table").items():
            parts += [f"{title}: TFLOP/s (x cuDNN)\n", speed_table(rows, tflops_cell)]
        parts += ["Accuracy, the worst of the rows above\n"]
        parts += [accuracy_table(plans["paper"]["rows"])]
    if "load" in plans:
        cases = [
            {
                **row,
                "row": row["row"] if row["model"] else f"{row['family']}, {row['N']}",
                "provider": row["provider"].rpartition(", ")[2],  # a tile's name alone
            }
            for row in plans["load"]["rows"]
        ]
        title = (
            "Under load, the kernel of `sage2-8b-per-token` by each of its tiles, 64 rows a"
            " warpgroup: TFLOP/s (x cuDNN)"
        )
        parts += [f"{title}\n", speed_table(cases, tflops_cell, "B=4 H=32 (D=256: 16)")]
        parts += [provenance(plans["load"])]
    if "models" in plans:
        parts += ["Attention of some models, B x H x N x D: ms (x cuDNN)\n"]
        parts += [speed_table(plans["models"]["rows"], ms_cell), provenance(plans["models"])]
    for plan, table in (
        ("preparation", preparation_table), ("fusion", fusion_table)
    ):  # fmt: skip
        if plan in plans:
            parts += [table(plans[plan]["rows"]), provenance(plans[plan])]
    if "masks" in plans:
        rows = [{**row, "row": f"{row['mask']} {row['N']}"} for row in plans["masks"]["rows"]]
        for D, its in groups(rows, "D").items():
            title = f"B={its[0]['B']} H={its[0]['H_q']} D={D}"
            parts += [f"Masks, {title}: ms (x cuDNN)\n", speed_table(its, ms_cell, "mask, N")]
        parts += [provenance(plans["masks"])]
    if "shared" in plans:
        rows = [{**row, "row": case_of(row)} for row in plans["shared"]["rows"]]
        title = 'Batches of one k and v; "apart": as many k and v as q: ms (x cuDNN)'
        parts += [f"{title}\n", speed_table(rows, ms_cell, "B x H x N x D")]
        parts += [provenance(plans["shared"])]
    return "\n".join(parts)


def accuracy_section(name: str, plans: dict[str, dict]) -> str:
    parts = []
    if "accuracy" in plans:
        parts += [recipes_table(plans["accuracy"])]
        parts += [f"![Relative L1 of each recipe](../bench/results/{name}/{ACCURACY_PLOT})\n"]
    if "defaults" in plans:
        parts += [defaults_table(plans["defaults"]["rows"])]
    if "end-to-end" in plans:
        parts += [models_table(plans["end-to-end"])]
        parts += [f"![Whole models by each recipe](../bench/results/{name}/{MODELS_PLOT})\n"]
    for plan in ACCURACY:
        if plan in plans:  # mostly of one run
            parts += [provenance(plans[plan])] * (provenance(plans[plan]) not in parts)
    return "\n".join(parts)


def where_and_when(result: dict) -> str:
    versions = ", ".join(f"{k} {result['versions'][k]}" for k in ("torch", "triton", "cudnn"))
    return f"One {result['machine']['gpu']}, {result['date'][:10]}, {versions}.\n"


def wrapped(text: str) -> str:
    """Lines of at most 120 columns."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def provenance(result: dict) -> str:
    versions = ", ".join(f"{k} {result['versions'][k]}" for k in ("torch", "triton", "cudnn"))
    driver = result["machine"].get("driver")
    method = result["method"]
    if isinstance(method, dict):
        shown = [
            name for name in ("time", "inputs", "blocks", "keep", "packages") if name in method
        ]
        method = ". ".join(f"{name.capitalize()}: {method[name]}" for name in shown)
    when = f"{result['date'][:10]}, {f'driver {driver}, ' if driver else ''}{versions}"
    return wrapped(f"{when}. {method}.") + "\n"


def groups(rows: list[dict], key: str) -> dict[str, list[dict]]:
    found = {}
    for row in rows:
        found.setdefault(row[key], []).append(row)
    return found


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


def with_speedup(row: dict, value: str) -> str:
    mark = "" if row["captured"] else "*"
    if row["provider"] == "cuDNN" or not row["speedup"]:
        return value + mark
    return f"{value} ({row['speedup']:.2f}x){mark}"


def errors(cells: list[dict]) -> str:
    found = {row["provider"]: row["accuracy"]["normal"]["rel_l1"] for row in cells if row["ms"]}
    recipes = {row["provider"]: row["recipe"] for row in cells if row["ms"] and row.get("recipe")}
    shown = [p for p in recipes if p.endswith(" op")] or list(recipes)[:1]
    ours = " / ".join(f"{found[p]:.1%}" for p in shown)
    return f"{ours or '-'} ({found['cuDNN']:.1%})" if "cuDNN" in found else ours


def preparation_table(rows: list[dict]) -> str:
    lines = [["B x H x N x D", "ms", "x the floor of one pass", "of two"]]
    for row in rows:
        if row["step"] == "prepare":
            two = row["ratio"] * 6 / 10
            lines.append([case_of(row), f"{row['ms']:#.3g}", f"{row['ratio']:.2f}", f"{two:.2f}"])
    title = "Preparation of k and v, beside what a copy takes for 6 (one pass) and 10 bytes (two)"
    return f"{wrapped(title)}\n\n{markdown(lines)}"


def fusion_table(rows: list[dict]) -> str:
    graphs = list(groups(rows, "graph"))
    lines = [["B x H x N x D", *graphs]]
    for its in groups([{**row, "case": case_of(row)} for row in rows], "case").values():
        found = {row["graph"]: row for row in its}
        cells = (f"{found[g]['added_ms']:#.3g} ({found[g]['ratio']:.2f}x)" for g in graphs)
        lines.append([its[0]["case"], *cells])
    title = (
        "What it adds to a graph of RMSNorm and RoPE, by how RoPE is written: ms (x the floor of "
        "two passes)"
    )
    return f"{wrapped(title)}\n\n{markdown(lines)}"


def case_of(row: dict) -> str:
    heads = row.get("H") or Case(*(row[key] for key in ("B", "H_q", "H_kv", "N", "D"))).heads
    return f"{row['model']} {row['B']}x{heads}x{row['N']}x{row['D']}".strip()


def accuracy_table(rows: list[dict]) -> str:
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


def recipes(rows: list[dict]) -> list[dict]:
    return [row for row in rows if row["table"] == "recipes"]


def recipes_table(result: dict) -> str:
    """A line per recipe, a column per family; then a column per model."""
    title = (
        "Relative L1 of attention, average (worst) over layers, on families of random inputs (of "
        "which each seed is a layer) and on q, k, v of models. All emulated, not rounded to bf16; "
        "capitals: the papers' recipes; bf16 SDPA: what rounding costs"
    )
    parts = [wrapped(title), ""]
    rows = recipes(result["rows"])
    for of_model in (False, True):
        its = [row for row in rows if (row["family"] in result["models"]) == of_model]
        if its:
            lines = [["", *groups(its, "family")]]
            for entry, cells in groups(its, "entry").items():
                pairs = ((row["average"]["rel_l1"], row["worst"]["rel_l1"]) for row in cells)
                lines.append([entry, *(f"{average:.2%} ({worst:.2%})" for average, worst in pairs)])
            parts += [markdown(lines)]
    return "\n".join(parts)


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


def models_table(result: dict) -> str:
    rows = result["rows"]
    columns = figures_of(rows)
    lines = [["", *(f"{model}: {name.replace('_', ' ')}" for model, name in columns)]]
    for entry, its in groups(rows, "entry").items():
        found = {row["family"]: row["figures"] or {} for row in its}
        values = (found.get(model, {}).get(name) for model, name in columns)
        lines.append([entry, *("-" if x is None else f"{x:.5g}" for x in values)])
    notes = "; ".join(f"{model}: {note}" for model, note in result["models"].items())
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


def markdown(lines: list[list[str]], align: str = "--:") -> str:
    rule = ["---"] + [align] * (len(lines[0]) - 1)
    return "".join(f"| {' | '.join(line)} |\n" for line in (lines[0], rule, *lines[1:]))


# -- the plots ----


# Of text and axes: 4.5 times as bright or dark as a white page, 4.2 as a dark one (#0d1117).
GREY = "#767676"
INK = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")


def subplots(path: Path, rows: int, columns: int, **options):
    """matplotlib's, for a file that the same results give again."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {
        "svg.hashsalt": path.name,
        "savefig.transparent": True,
        "legend.frameon": False,
        **dict.fromkeys(INK, GREY),
    }
    from matplotlib import pyplot as plt

    return plt.subplots(rows, columns, squeeze=False, **options)


def keep(figure, title: str, result: dict, path: Path) -> None:
    """Write the figure under a title that says where and when."""
    from matplotlib import pyplot as plt

    shown = ("torch", "triton", "FA3", "SageAttention")
    versions = [f"{k} {result['versions'][k]}" for k in shown if k in result["versions"]]
    where = result["machine"]["gpu"], *versions, result["date"][:10]
    figure.suptitle(f"{title}, {', '.join(where)}", fontsize=11)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def draw(result: dict, path: Path) -> None:
    """TFLOP/s against N, a panel per table."""
    tables = groups(result["rows"], "table")
    height = (len(tables) + 1) // 2
    figure, axes = subplots(path, height, 2, figsize=(10, 3.4 * height), sharex=True)
    for axis, (title, rows) in zip(axes.flat, tables.items(), strict=False):
        for provider, column in groups(rows, "provider").items():
            points = [(row["N"], row["tflops"]) for row in column if row["ms"]]
            axis.plot(*zip(*points, strict=True), label=provider, **line_style(provider, rows))
        ticks = sorted({row["N"] for row in rows})
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [f"{n // 1024}K" if n % 1024 == 0 else str(n) for n in ticks])
        axis.set_ylim(bottom=0)
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.3)
    for axis in axes[:, 0]:
        axis.set_ylabel("TFLOP/s")
    for axis in axes[-1]:
        axis.set_xlabel("N")
    lines, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="lower center", ncol=len(labels))
    keep(figure, "Attention forward, bf16", result, path)


def draw_peers(result: dict, path: Path) -> None:
    """TFLOP/s against N beside other packages: a row of panels for kernels alone and one with all
    preparation, a column for each family of shapes. A ring: ahead of ours."""
    rows = [{**row, "family": family_of(row)} for row in result["rows"] if not row["model"]]
    families = {
        name: its for name, its in groups(rows, "family").items() if len(groups(its, "N")) > 1
    }
    size = (3.4 * len(families), 6.6)
    figure, axes = subplots(path, 2, len(families), figsize=size, sharex=True, sharey="col")
    for i, (kind, title) in enumerate(KINDS_OF_PEERS.items()):
        for axis, (family, its) in zip(axes[i], families.items(), strict=True):
            its = of_kind(its, kind)
            for provider, column in groups(its, "provider").items():
                points = [(row["N"], row["tflops"]) for row in column if row["tflops"]]
                style = line_style(provider, its) | {
                    "linestyle": ":" if "thread" in provider else "-"
                }
                axis.plot(
                    *zip(*points, strict=True), label=provider.removesuffix(f" {kind}"), **style
                )
            ahead = [row for each in groups(its, "N").values() for row in leading(each)]
            axis.plot(
                [row["N"] for row in ahead], [row["tflops"] for row in ahead], "o", color="tab:red",
                fillstyle="none", markersize=9, label="ahead of ours",
            )  # fmt: skip
            ticks = sorted(groups(its, "N"))
            axis.set_xscale("log", base=2)
            axis.set_xticks(ticks, [f"{n // 1024}K" for n in ticks])
            axis.set_ylim(bottom=0)
            axis.set_title(f"{title}: {family}", fontsize=9)
            axis.grid(alpha=0.3)
        axes[i, 0].set_ylabel("TFLOP/s")
    for axis in axes[-1]:
        axis.set_xlabel("N")
    lines, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="lower center", ncol=len(labels))
    keep(figure, "Attention forward, bf16 in and out", result, path)


def family_of(row: dict) -> str:
    case = Case(*(row[key] for key in ("B", "H_q", "H_kv", "N", "D", "is_causal")))
    return f"B={case.B} H={case.heads} {case.family}"


def draw_overview(paper: dict, blocks: dict, path: Path) -> None:
    """For the top of the README: attention at head_dim 128 against N, and blocks' speed."""
    figure, axes = subplots(path, 1, 2, figsize=(10, 3.2), width_ratios=(1, 1.1))
    lines, bars = axes[0]
    title, rows = next(
        (title, rows)
        for title, rows in groups(paper["rows"], "table").items()
        if rows[0]["D"] == 128 and "causal" not in title
    )
    for provider, column in groups(rows, "provider").items():
        if not provider.endswith(" kernel"):
            points = [(row["N"], row["tflops"]) for row in column if row["ms"]]
            label = provider.replace(" op", ", with its preparation")
            lines.plot(*zip(*points, strict=True), label=label, **line_style(provider, rows))
    ticks = sorted({row["N"] for row in rows})
    lines.set_xscale("log", base=2)
    lines.set_xticks(ticks, [f"{n // 1024}K" for n in ticks])
    lines.set_ylim(bottom=0)
    lines.set_title(f"Attention, {title}: TFLOP/s against N", fontsize=10)
    lines.legend(fontsize=7, loc="lower right", ncol=2)
    lines.grid(alpha=0.3)
    gains, _ = rewritten(blocks["rows"])
    faster = [row["speed"]["sage"]["x"] for row in gains]
    names = [BLOCKS[row["model"]] for row in gains]
    drawn = bars.barh(names, faster, color=SAGE_COLOURS[0], height=0.65)
    bars.bar_label(drawn, [f"{x:.2f}x" for x in faster], padding=3, fontsize=8)
    bars.axvline(1, color=GREY, linewidth=1)
    bars.set_xlim(0, max(faster) + 0.2)
    bars.invert_yaxis()
    bars.tick_params(axis="y", labelsize=8)
    bars.set_title('Whole blocks: backend="sage" over "inductor"', fontsize=10)
    keep(figure, "bf16 inference", blocks, path)


def draw_accuracy(result: dict, path: Path) -> None:
    """Relative L1 of each recipe, on families and on models: average, and a line to the worst."""
    rows = recipes(result["rows"])
    entries = list(groups(rows, "entry"))
    panels = {"random inputs": [], "q, k, v of models": []}
    for family, its in groups(rows, "family").items():
        panels["q, k, v of models" if family in result["models"] else "random inputs"] += [
            (family, its)
        ]
    figure, axes = subplots(path, 1, 2, figsize=(11, 0.4 * len(entries) + 1.6), sharey=True)
    for axis, (title, families) in zip(axes[0], panels.items(), strict=True):
        for i, (family, its) in enumerate(families):
            height = [entries.index(row["entry"]) + 0.08 * (i - len(families) / 2) for row in its]
            average, worst = ([row[of]["rel_l1"] for row in its] for of in ("average", "worst"))
            axis.hlines(height, average, worst, color=f"C{i}", linewidth=1)
            axis.plot(average, height, ".", color=f"C{i}", label=family)
        axis.set_xscale("log")
        axis.set_xlabel("relative L1")
        axis.set_title(title, fontsize=10)
        axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncol=4)
    list_entries(axes, entries)
    keep(figure, "Attention by each recipe", result, path)


def draw_models(result: dict, path: Path) -> None:
    """A panel per figure, a dot per recipe; the line is exact attention's."""
    entries, columns = list(groups(result["rows"], "entry")), figures_of(result["rows"])
    height = 1 + (len(columns) > 4)
    size = (13, height * (0.25 * len(entries) + 1.2))
    figure, axes = subplots(path, height, -(-len(columns) // height), figsize=size, sharey=True)
    for axis, (model, name) in zip(axes.flat, columns, strict=False):
        its = [row for row in result["rows"] if row["family"] == model and row["figures"]]
        found = {row["entry"]: row["figures"][name] for row in its}
        points = [(x, entries.index(entry)) for entry, x in found.items() if x is not None]
        axis.plot(*zip(*points, strict=True), "o", color="tab:green", markersize=4)
        if found.get("exact") is not None:
            axis.axvline(found["exact"], color=GREY, linewidth=1)
        axis.set_title(f"{model}: {name.replace('_', ' ')}", fontsize=10)
        axis.ticklabel_format(axis="x", useOffset=False)
        axis.locator_params(axis="x", nbins=4)
        axis.tick_params(axis="x", labelsize=8)
    for axis in axes.flat[len(columns) :]:
        axis.set_axis_off()
    list_entries(axes, entries)
    keep(figure, "Whole models by each recipe", result, path)


def draw_sparse(result: dict, path: Path) -> None:
    """A panel per figure against density, a line per choice; dashed: the first steps dense. A
    figure that is equal at density 1 is left out."""
    titles = {"psnr": "PSNR to samples of exact attention, dB", "frechet": "Frechet distance"}
    shown = [name for name in titles if any(row.get(name) for row in result["rows"])]
    figure, axes = subplots(path, 1, len(shown), figsize=(7 * len(shown), 5.5))
    choices = list(groups(result["rows"], "choice"))
    for axis, name in zip(axes[0], shown, strict=True):
        for title, rows in by_choice(result["rows"]).items():
            points = sorted((row["density"], row[name]) for row in rows if row[name] is not None)
            axis.plot(
                *zip(*points, strict=True), label=title, marker=".",
                color=f"C{choices.index(rows[0]['choice'])}",
                linestyle="--" if rows[0]["dense_steps"] else "-",
            )  # fmt: skip
        axis.set_xlabel("part of the keys that is computed")
        axis.set_title(titles[name], fontsize=10)
        axis.grid(alpha=0.3)
    lines, labels = axes[0, 0].get_legend_handles_labels()
    axes[0, 0].legend(lines, labels, fontsize=7)
    keep(figure, "A small diffusion transformer", result, path)


def draw_curves(result: dict, path: Path) -> None:
    """A row of panels per setting. Left: the loss, a line per run. Right: the mean gap to exact
    attention over seeds; grey: up to the deviation of exact's loss between seeds, at the end."""
    rows = [{**row, "setting": setting_of(row)} for row in result["rows"]]
    exact_deviation = {
        setting_of(line): line["train"]["exact_deviation"]
        for line in result["summary"]
        if line["recipe"] == "exact"  # of the others' lines one may be of fewer steps
    }
    settings = groups(rows, "setting")
    colours = {name: f"C{i}" for i, name in enumerate(groups(rows, "recipe"))}
    size = (11, 3.4 * len(settings) + 0.5)
    figure, axes = subplots(path, len(settings), 2, figsize=size, sharex="row")
    for (losses, gaps), (setting, its) in zip(axes, settings.items(), strict=True):
        recipes = groups(its, "recipe")
        beside = {row["seed"]: row["curve"] for row in recipes.get("exact", ())}
        for recipe, runs in recipes.items():
            style = {"color": colours[recipe], "linewidth": 0.9}
            for i, run in enumerate(runs):
                points = numbers(enumerate(run["curve"], 1), run["every"])
                losses.plot(*points, label="" if i else recipe, **style)
            pairs = [
                [apart(*pair) for pair in zip(run["curve"], exact, strict=False)]
                for run in runs
                if (exact := beside.get(run["seed"])) and recipe != "exact"
            ]
            means = [
                None if None in each else sum(each) / len(each)
                for each in zip(*pairs, strict=False)
            ]
            gaps.plot(*numbers(enumerate(means, 1), runs[0]["every"]), **style)
        gaps.axhline(0, color=GREY, linewidth=0.8)
        gaps.set_ylim(gaps.get_ylim())  # of the gaps, however far the seeds are apart
        if deviation := exact_deviation.get(setting):
            gaps.axhspan(-deviation, deviation, color=GREY, alpha=0.25, zorder=0)
        losses.set_yscale("log")
        losses.set_title(f"loss, {setting}", fontsize=10)
        gaps.set_title(f"gap to exact, mean over seeds, {setting}", fontsize=10)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    lines, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="lower center", ncol=len(labels))
    keep(figure, f"{CURVES[rows[0]['plan']]} by each recipe", result, path)


def setting_of(row: dict) -> str:
    return f"{row['tokens']} tokens a step, {'' if row['qk_norm'] else 'no '}QK-norm"


def apart(a: float | None, b: float | None) -> float | None:
    return None if None in (a, b) else a - b


def numbers(points, every: int) -> tuple[list[int], list[float]]:
    """Steps and values of points (i, value), of those that have a value."""
    found = [(i * every, value) for i, value in points if value is not None]
    return [step for step, _ in found], [value for _, value in found]


def list_entries(axes, entries: list[str]) -> None:
    """One below the other."""
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    axes[0, 0].set_yticks(range(len(entries)), entries)
    axes[0, 0].invert_yaxis()  # shared by all


def line_style(provider: str, rows: list[dict]) -> dict:
    if colour := COLOURS.get(provider.partition(" ")[0]):  # of "flash (FA3)" and "FA3-fp8 op" too
        return {"color": colour, "marker": ".", "linewidth": 1.2}
    recipes = list(dict.fromkeys(row["recipe"] for row in rows if row["recipe"]))
    recipe, kind = provider.rsplit(" ", 1)
    return {
        "color": SAGE_COLOURS[recipes.index(recipe) % len(SAGE_COLOURS)],
        "marker": "o",
        "markersize": 4,
        "linestyle": "-" if kind == "op" else "--",
        "linewidth": 2.2 if kind == "op" else 1.4,
    }


if __name__ == "__main__":
    sys.exit(main())
