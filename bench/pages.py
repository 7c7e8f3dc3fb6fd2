"""The tables in README.md and docs/, and the plots, from the newest results of each GPU.

$ python bench/pages.py            # rewrites every page between its markers, draws the plots
$ python bench/pages.py --check    # exits 1 if a page says something else than the results

A page says ``<!-- table:NAME -->`` and ``<!-- table:end -->`` where it wants a table of TABLES.
The tables of results are their benches': this module finds the results, and says below a table
where and how it was measured.
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
import typing
from collections.abc import Callable, Collection
from dataclasses import is_dataclass
from pathlib import Path

import sage_inductor
from bench import (
    accuracy,
    attention,
    comfyui,
    curves,
    decode,
    decoding,
    figures,
    fusion,
    harness,
    linear,
    lists,
    model,
    models,
    packages,
    packed,
    parallel,
    peers,
    preparation,
    ring,
    sparse,
    sparse_peers,
    training,
)  # fmt: skip
from bench.tables import again, groups, markdown, provenance, where_and_when, wrapped
from sage_inductor.choose import cost, tables
from sage_inductor.ops.training.gradients import FP8_BACKWARD
from sage_inductor.patterns.reasons import CAUSES

END = "<!-- table:end -->"
MARKED = re.compile(rf"(<!-- table:(\w+) -->\n).*?({END})", re.S)
SPEED = ("paper", "load", "models", "preparation", "fusion", "masks", "shared")
ACCURACY = ("accuracy", "shipped", "end-to-end")
PLANS = (
    *SPEED, *ACCURACY, *curves.TITLES, "model", "training", "training-mask", "backward", "memory",
    "packages", "packed", "parallel", "parallel-host", "parallel-sockets", "peers", "ring",
    "sageattention", "sparse", "sparse-gains", "sparse-trained", "linear", "lists", "selected",
    "whole", "beside", "decode", "decode-fp8", "decode-decoders", "decoding", "comfyui",
    "perplexity", "layout", "tail", "sparse-peers", "sparse-own", "sparse-cut", "sparse-whole",
    "corrections", "cubes",
)  # fmt: skip
METHODS = property, classmethod, types.FunctionType
HEADS = (8, 24, 128)  # B * H of the columns of `lengths`


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument(
        "--root", type=Path, default=harness.ROOT, help="holds README.md, docs/, bench/"
    )
    args = parser.parse_args(argv)
    results = args.root / "bench" / "results"
    gpus = {path.name: newest(path) for path in sorted(results.glob("*")) if path.is_dir()}
    gpus = {name: plans for name, plans in gpus.items() if plans}
    if not gpus:
        print(f"pages: no results under {results}: run bench/attention.py", file=sys.stderr)
        return 2

    stale = False
    for page in (args.root / "README.md", *sorted(args.root.glob("docs/**/*.md"))):
        old = page.read_text()
        marked = MARKED.findall(old)
        unknown = {name for _, name, _ in marked} - TABLES.keys()
        if unknown or old.count("<!-- table:") != 2 * len(marked):
            print(f"pages: {page} needs {END} after each marker of {[*TABLES]}", file=sys.stderr)
            return 2
        new = MARKED.sub(lambda found: f"{found[1]}{TABLES[found[2]](gpus)}{found[3]}", old)
        if new != old and args.check:
            print(f"pages: {page} is not what bench/pages.py writes", file=sys.stderr)
            stale = True
        elif new != old:
            page.write_text(new)
    if not args.check:
        for name, plans in gpus.items():
            figures.draw(plans, results / name)
    return int(stale)


def newest(folder: Path) -> dict[str, dict]:
    """Plan -> the newest result that holds rows of it, with those rows alone. A row that names no
    plan is of the plan that the file is named after, behind the date. Whole models stay with their
    recipes until either is measured again: each is trained to the same weights again."""
    found = {}
    for path, result in sorted(
        ((path, load(path)) for path in folder.glob("*.json")), key=lambda each: each[1]["date"]
    ):
        usual = path.stem.partition("-")[2][len("MM-DD-") :]
        plans = groups([{"plan": usual, **row} for row in result["rows"]], "plan")
        for plan in plans.keys() & set(PLANS):
            its = {**result, "rows": plans[plan]}
            if plan == "end-to-end" and plan in found:
                models = {**found[plan]["models"], **result["models"]}
                rows = found[plan]["rows"] + its["rows"]
                of = {(row["family"], row["entry"]): row for row in rows}
                its |= {"models": models, "rows": [*of.values()]}
            found[plan] = its
    return found


def load(path: Path) -> dict:
    result = json.loads(path.read_text())
    if "command" not in result:
        raise ValueError(f'{path} must say the "command" that makes it')
    return result


# -- tables of results ----


def sections(plans: Collection[str], section: Callable[[str, dict], str]):
    """A table: a section for each GPU that has results of some of the plans."""

    def table(gpus: dict[str, dict]) -> str:
        parts = []
        for name, found in gpus.items():
            its = {plan: found[plan] for plan in plans if plan in found}
            if its:
                gpu = next(iter(found.values()))["machine"]["gpu"]
                parts += [f"### {'CPU, emulated' if gpu == 'cpu' else gpu}\n", section(name, its)]
        return "\n".join(parts)

    return table


def of(plan: str, table: Callable[[list[dict]], str]):
    """A table of one plan's rows, with where and how below it."""

    def section(name: str, plans: dict[str, dict]) -> str:
        return f"{table(plans[plan]['rows'])}\n{provenance(plans[plan])}"

    return sections((plan,), section)


def image(alt: str, gpu: str, file: str) -> str:
    """The path is that from a page in docs/measurements/."""
    return f"![{alt}](../../bench/results/{gpu}/{file})\n"


def speed_section(name: str, plans: dict[str, dict]) -> str:
    parts = []
    for plan, result in plans.items():
        if plan == "paper":
            parts += [provenance(result)]
            parts += [image("TFLOP/s against sequence length", name, "attention.svg")]
        alone = {"preparation": preparation.table, "fusion": fusion.table}.get(plan)
        rows = result["rows"]
        parts += [alone(rows) if alone else attention.table(plan, rows)]
        parts += [provenance(result)] * (plan != "paper")
    return "\n".join(parts)


def accuracy_section(name: str, plans: dict[str, dict]) -> str:
    parts = []
    for plan, result in plans.items():
        rows = result["rows"]
        if plan == "accuracy":
            parts += [accuracy.recipes_table(rows, result["models"])]
            parts += [image("Relative L1 of each recipe", name, "accuracy.svg")]
        elif plan == "shipped":
            parts += [accuracy.shipped_table(rows)]
        else:
            parts += [accuracy.models_table(rows, result["models"])]
            parts += [image("Whole models by each recipe", name, "end-to-end.svg")]
    return "\n".join([*parts, *dict.fromkeys(map(provenance, plans.values()))])


def trained_section(name: str, plans: dict[str, dict]) -> str:
    """A plot, a table, and the model."""
    parts = []
    for plan, result in plans.items():
        alt = {"sparse": "Quality of samples against density"}.get(plan)
        parts += [
            image(alt or f"{curves.TITLES[plan]}: loss curves by recipe", name, f"{plan}.svg")
        ]
        parts += [
            curves.table(result["summary"]) if plan != "sparse" else sparse.table(result["rows"])
        ]
        parts += [f"{wrapped(result['model'] + '.')}\n{provenance(result)}"]
    return "\n".join(parts)


def perplexity_section(name: str, plans: dict[str, dict]) -> str:
    result = plans["perplexity"]
    table = decode.perplexity_table(result["rows"])
    return f"{table}\n{wrapped(result['model'] + '.')}\n{provenance(result)}"


def peers_table(gpus: dict[str, dict], plan: str) -> str:
    """With a plot, and errors, where the result has them."""
    parts = []
    for name, plans in gpus.items():
        if result := plans.get(plan):
            has_errors = "accuracy" in result["rows"][0]
            if has_errors:
                parts += [image("Speed beside other packages", name, f"{plan}.svg")]
            parts += [peers.table(result["rows"])]
            parts += ["Ours over theirs, geometric means\n", peers.means_table(result["rows"])]
            if has_errors:
                parts += ["Relative L1 in %: normal inputs, those with outliers\n"]
                parts += [peers.families_table(result["rows"])]
            versions = ", ".join(f"{key} {x}" for key, x in result["versions"].items())
            where = f"One {result['machine']['gpu']}, {result['date'][:10]}, {versions}"
            method = ". ".join(
                f"{key.capitalize()}: {result['method'][key]}"
                for key in ("time", "columns", "accuracy")
                if key in result["method"]
            )
            parts += [f"{wrapped(f'{where}. {method}.')}\n{again(result)}\n"]
    return "\n".join(parts)


def blocks_in_short(gpus: dict[str, dict]) -> str:
    """Whole transformer blocks: a line each where a call is rewritten, the others in one."""
    parts = []
    for plans in gpus.values():
        if result := plans.get("model"):
            parts += [model.table(result["rows"]), where_and_when(result)]
            parts += filter(None, [model.others(result["rows"])])
    return "\n".join(parts)


def accuracy_in_short(gpus: dict[str, dict]) -> str:
    """By a GPU's measurements."""
    parts = []
    for plans in gpus.values():
        if plans.keys() >= set(ACCURACY) and (found := accuracy.in_short(plans)):
            parts += [found, where_and_when(plans["accuracy"])]
    return "\n".join(parts)


# -- tables of the library ----


# What each is for, and its public names.
TASKS = {
    task: names.split(", ")
    for task, names in re.findall(r"^    (.+): (.+)$", sage_inductor.__doc__, re.M)
}


def api(gpus: dict[str, dict]) -> str:
    """The public names by task, each with its signature and what its docstring says."""
    parts = []
    for task, names in TASKS.items():
        parts += [f"## {task}\n", *(part for name in names for part in entry_of(name))]
    return "\n".join(parts)


def entry_of(name: str) -> list[str]:
    entry = getattr(sage_inductor, name)
    if isinstance(entry, tuple) or typing.get_origin(entry):
        value = textwrap.fill(repr(entry).removeprefix("typing."), 100)
        return [f"### {name}\n\n```text\n{value}\n```\n"]
    if inspect.isfunction(entry):
        return [f"### {name}\n\n```text\n{signature(entry)}\n```\n\n{described(entry)}\n"]
    entry = entry if isinstance(entry, type) else type(entry)
    shown = f"```text\n{constructor(entry)}\n```\n\n" if is_dataclass(entry) else ""
    methods = [
        f"* `{key}{'()' * (not isinstance(member, property))}`: {described(member)}"
        for each in ours(entry)
        for key, member in vars(each).items()
        if not key.startswith("_") and isinstance(member, METHODS) and described(member)
    ]
    parts = [f"### {name}\n\n{shown}{described(entry)}\n"]
    return parts + (["\n".join(methods) + "\n"] if methods else [])


def ours(entry: type) -> list[type]:
    """It, and the classes of ours that it is made from."""
    return [each for each in entry.__mro__ if each.__module__.startswith("sage_inductor")]


def signature(function) -> str:
    """As the source has it."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    tree.args.kwarg = None  # what is refused
    returns = f" -> {ast.unparse(tree.returns)}" if tree.returns else ""
    text = f"{tree.name}({ast.unparse(tree.args).replace('=', ' = ')}){returns}"
    return textwrap.fill(text, 120, subsequent_indent=" " * (len(tree.name) + 1))


def constructor(entry: type) -> str:
    """A dataclass with its fields."""
    given = {}
    for each in reversed(ours(entry)):
        body = ast.parse(textwrap.dedent(inspect.getsource(each))).body[0].body
        given |= {x.target.id: ast.unparse(x) for x in body if isinstance(x, ast.AnnAssign)}
    given = [text for name, text in given.items() if name in entry.__dataclass_fields__]
    given = [text for text in given if "ClassVar" not in text]
    text = f"{entry.__name__}({', '.join(given)})"
    return textwrap.fill(text, 120, subsequent_indent=" " * (len(entry.__name__) + 1))


def described(entry) -> str:
    """The docstring, as Markdown: what begins with the names of parameters is an item of a list."""
    text = (inspect.getdoc(entry) or "").replace("``", "`")
    if not inspect.isfunction(entry) and not is_dataclass(entry):
        return text
    names = "|".join(inspect.signature(entry).parameters)
    return re.sub(rf"^((?:{names})(?:, (?:{names}))*): ", r"* `\1`: ", text, flags=re.M)


def remedies(gpus: dict[str, dict]) -> str:
    """What to do about each cause why a call stays, and what the report says of it."""
    lines = collections.defaultdict(list)
    for cause in CAUSES:
        text = re.sub(r"\{[^}]*\}(\.\{\})?", "...", cause.text)
        quoted = f"`` {text} ``" if "`" in text else f"`{text}`"
        lines[cause.remedy].append(f"  * {quoted}\n")
    return "".join(f"* {remedy}:\n{''.join(said)}" for remedy, said in lines.items())


def lengths_of(kinds: Collection[str]) -> str:
    """From which length "auto" rewrites self-attention, of the built-in tables."""
    lines = [["GPU", "head_dim", "type of call", *(f"B·H ≥ {heads}" for heads in HEADS), "error"]]
    for gpu in sorted(tables.built_in().keys() - tables.ALIKE.keys()):
        table = tables.built_in()[gpu]
        families = {
            each: FP8_BACKWARD if each.kind in cost.TRAINED else "sage2-8b-rotated"
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


TABLES = {
    "accuracy": sections(ACCURACY, accuracy_section),
    "api": api,
    "backward": of("backward", training.table),
    "beside": of("beside", models.beside_table),
    "blocks": blocks_in_short,
    "corrections": of("corrections", sparse.corrections_table),
    "cubes": of("cubes", model.selected_table),
    "curves": sections(curves.TITLES, trained_section),
    "comfyui": of("comfyui", comfyui.table),
    "decode": of("decode", decode.table),
    "decoding": of("decoding", decoding.table),
    "fp8_cache": of("decode-fp8", decode.table),
    "fp8_decoders": of("decode-decoders", decode.table),
    "host": of("parallel-host", parallel.table),
    "lengths": lambda _: lengths_of(set(cost.KINDS) - cost.TRAINED.keys()),
    "linear": of("linear", linear.table),
    "layout": of("layout", lists.table_of_layout),
    "links": lambda gpus: parallel.links_table(),
    "lists": of("lists", lists.table),
    "memory": of("memory", training.memory_table),
    "packages": of("packages", packages.table),
    "packed": of("packed", packed.in_short),
    "parallel": of("parallel", parallel.table),
    "peers": lambda gpus: peers_table(gpus, "peers"),
    "perplexity": sections(("perplexity",), perplexity_section),
    "remedies": remedies,
    "ring": of("ring", ring.table),
    "sageattention": lambda gpus: peers_table(gpus, "sageattention"),
    "selected": of("selected", model.selected_table),
    "short": accuracy_in_short,
    "sockets": of("parallel-sockets", parallel.table),
    "sparse": sections(("sparse",), trained_section),
    "sparse_gains": of("sparse-gains", sparse.gains_table),
    "sparse_peers": of("sparse-peers", sparse_peers.in_short),
    "sparse_trained": of("sparse-trained", sparse.trained_table),
    "sparse_cut": of("sparse-cut", sparse_peers.of_own),
    "sparse_own": of("sparse-own", sparse_peers.of_own),
    "sparse_whole": of("sparse-whole", sparse_peers.of_whole),
    "speed": sections(SPEED, speed_section),
    "tail": of("tail", lists.table_of_tails),
    "training": of("training", accuracy.training_table),
    "training_lengths": lambda _: lengths_of(cost.TRAINED),
    "training_mask": of("training-mask", accuracy.training_table),
    "whole": of("whole", models.table),
}


if __name__ == "__main__":
    sys.exit(main())
