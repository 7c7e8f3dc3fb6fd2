"""The plots of results, as SVG: FIGURES. Drawn by bench/pages.py."""

from pathlib import Path

from bench import accuracy, curves, model, peers, sparse
from bench.cases import Case
from bench.tables import groups

COLOURS = {"cuDNN": "slategray", "flash": "goldenrod", "flex": "tab:orange", "inductor": "tab:blue",
           "FA3": "tab:brown", "FA3-fp8": "tab:pink", "FA4": "tab:olive",
           "cuDNN-fp8": "teal", "torchao-fp8": "tab:cyan", "torchao-fp8 hadamard": "tab:gray",
           "comfy-kitchen": "tab:orange"}  # fmt: skip
SAGE_COLOURS = ("tab:green", "tab:purple", "tab:red")  # one per recipe
CURVES = {"exact": "gold", "bf16": "tab:blue", "FP8 backward": "tab:green", "SageBwd": "tab:red"}
# Choices of keys that the plot has: those of the selector (a CPU's result names it by its
# threshold), and what it is to be compared with.
IN_SPARSE = (
    "exact",
    "similarity 0.0",
    "sage2-8b-per-token",
    "pruned keys",
    "skip-softmax",
    "random",
)
# Of text and axes: 4.5 times as bright or dark as a white page, 4.2 as a dark one (#0d1117).
GREY = "#767676"
INK = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")


def subplots(path: Path, rows: int, columns: int, **options):
    """matplotlib's, for a file that the same results give again."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {
        "svg.hashsalt": path.name,
        "svg.fonttype": "none",  # text stays text: it can be searched and read aloud
        "savefig.transparent": True,
        "legend.frameon": False,
        **dict.fromkeys(INK, GREY),
    }
    from matplotlib import pyplot as plt

    return plt.subplots(rows, columns, squeeze=False, **options)


def keep(figure, title: str, result: dict, path: Path, legend: float = 0.04) -> None:
    """Write the figure under a title that says where and when. legend: the part of its height that
    is kept free for one at the foot."""
    from matplotlib import pyplot as plt

    shown = ("torch", "triton", "FA3", "SageAttention")
    versions = [f"{k} {result['versions'][k]}" for k in shown if k in result["versions"]]
    where = result["machine"]["gpu"], *versions, result["date"][:10]
    figure.suptitle(f"{title}\n{', '.join(where)}", fontsize=9)
    figure.tight_layout(rect=(0, legend, 1, 1))
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def keep_with_legend(figure, axes, title: str, result: dict, path: Path) -> None:
    """One legend for all panels, below them, in at most two lines."""
    lines, labels = axes[0, 0].get_legend_handles_labels()
    height = 1 + (len(labels) > 8)
    figure.legend(lines, labels, loc="lower center", ncol=-(-len(labels) // height))
    keep(figure, title, result, path, 0.1 * height - 0.06)


def against_n(axis, rows: list[dict], title: str, fontsize: int = 10) -> None:
    """TFLOP/s of `rows`, which are drawn already."""
    ticks = sorted({row["N"] for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [f"{n // 1024}K" for n in ticks])
    axis.set_ylim(bottom=0)
    axis.set_title(title, fontsize=fontsize)
    axis.grid(alpha=0.3)


def label_panels(axes, what: str = "TFLOP/s") -> None:
    for axis in axes[:, 0]:
        axis.set_ylabel(f"{what}: more is better")
    for axis in axes[-1]:
        axis.set_xlabel("tokens")


def draw_speed(result: dict, path: Path) -> None:
    """TFLOP/s against N, a panel per table."""
    tables = groups(result["rows"], "table")
    height = (len(tables) + 1) // 2
    figure, axes = subplots(path, height, 2, figsize=(10, 3.4 * height), sharex=True)
    for axis, (title, rows) in zip(axes.flat, tables.items(), strict=False):
        for provider, column in groups(rows, "provider").items():
            points = [(row["N"], row["tflops"]) for row in column if row["ms"]]
            axis.plot(*zip(*points, strict=True), label=provider, **line_style(provider, rows))
        against_n(axis, rows, title)
    label_panels(axes)
    keep_with_legend(figure, axes, "Attention forward, bf16", result, path)


def draw_peers(result: dict, path: Path) -> None:
    """Speed over cuDNN's in bf16 against N, with all preparation: a panel for each family of
    shapes. A line is the median of the rounds, its band the slowest and the fastest. A ring: ahead
    of ours."""
    rows = [{**row, "family": family_of(row)} for row in result["rows"] if not row["model"]]
    families = {
        name: its for name, its in groups(rows, "family").items() if len(groups(its, "N")) > 1
    }
    size = (3 * len(families), 3.8)
    figure, axes = subplots(path, 1, len(families), figsize=size, sharex=True, sharey=True)
    for axis, (family, its) in zip(axes.flat, families.items(), strict=True):
        its = [row for row in peers.of_kind(its, "op") if row["tflops"]]
        base = {row["N"]: row["tflops"] for row in its if row["provider"] == "cuDNN"}
        for provider, column in groups(its, "provider").items():
            style, lengths = line_style(provider, its), [row["N"] for row in column]
            ratios, *band = (
                [row["tflops"] / base[row["N"]] * row["ms"] / row[time] for row in column]
                for time in ("ms", "ms_max", "ms_min")
            )
            axis.plot(lengths, ratios, label=provider.removesuffix(" op"), **style)
            axis.fill_between(lengths, *band, color=style["color"], alpha=0.2, linewidth=0)
        ahead = [row for each in groups(its, "N").values() for row in peers.leading(each)]
        axis.plot(
            [row["N"] for row in ahead], [row["tflops"] / base[row["N"]] for row in ahead],
            "o", color="tab:red", fillstyle="none", markersize=7, label="ahead of ours",
        )  # fmt: skip
        against_n(axis, its, family, fontsize=9)
    label_panels(axes, "x cuDNN's speed")
    title = "Attention forward, bf16 in and out, with all preparation"
    keep_with_legend(figure, axes, title, result, path)


def family_of(row: dict) -> str:
    case = Case(*(row[key] for key in ("B", "H_q", "H_kv", "N", "D", "is_causal")))
    return f"B={case.B} H={case.heads} {case.family}"


def draw_overview(shipped: dict, blocks: dict, path: Path) -> None:
    """For the top of the README: the time that blocks save, a line from the least to the most of
    all rounds, grey where there is no gain; and the speed of attention beside other packages."""
    figure, axes = subplots(path, 1, 2, figsize=(11, 3.3), width_ratios=(1.3, 1))
    dots, lines = axes[0]
    faster, others = model.rewritten(blocks["rows"])
    rows = sorted([*faster, *others], key=lambda row: row["speed"]["sage"]["x"])
    for i, row in enumerate(rows):
        speed = row["speed"]["sage"]
        least, median, most = (saved(speed[key]) for key in ("x_min", "x", "x_max"))
        gains = row in faster and speed["x_min"] > 1
        colour = SAGE_COLOURS[0] if gains else GREY
        dots.hlines(i, least, most, color=colour, linewidth=4, alpha=0.5)
        dots.plot(median, i, "o", color=colour, markersize=5)
    dots.set_yticks(range(len(rows)), map(model.title_of, rows), fontsize=8)
    dots.set_xlim(left=min(0, *dots.get_xlim()))
    dots.set_xlabel("time saved, %")
    dots.set_title('Whole blocks: backend="sage" instead of "inductor"', fontsize=10)
    its = [row for row in shipped["rows"] if row["D"] == accuracy.SHORT[1]]
    ticks = sorted({row["N"] for row in its})
    for entry, label in accuracy.IN_SHORT.items():
        points = {row["N"]: row["speedup"] for row in its if row["entry"] == entry}
        short = entry if entry in COLOURS else label.partition(",")[0].replace("`", "")
        width = 2.2 if entry.startswith("sage") else 1.2
        lines.plot(ticks, list(map(points.get, ticks)), label=short, marker=".", linewidth=width)
    lines.set_xscale("log", base=2)
    lines.set_xticks(ticks, [f"{n // 1024}K" for n in ticks])
    lines.set_ylim(bottom=0)
    lines.set_xlabel("tokens")
    lines.set_title("Attention, head_dim 128: x cuDNN's speed", fontsize=10)
    lines.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    keep(figure, "bf16 inference", blocks, path)


def saved(speed: float) -> float:
    """Percent of the time."""
    return 100 * (1 - 1 / speed)


def draw_accuracy(result: dict, path: Path) -> None:
    """Relative L1 of each recipe, on families and on models: average, and a line to the worst."""
    rows = accuracy.recipes(result["rows"])
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
    entries, columns = list(groups(result["rows"], "entry")), accuracy.figures_of(result["rows"])
    height = 1 + (len(columns) > 4)
    size = (13, height * (0.25 * len(entries) + 1.2))
    figure, axes = subplots(path, height, -(-len(columns) // height), figsize=size, sharey=True)
    for axis, (family, name) in zip(axes.flat, columns, strict=False):
        its = [row for row in result["rows"] if row["family"] == family and row["figures"]]
        found = {row["entry"]: row["figures"][name] for row in its}
        points = [(x, entries.index(entry)) for entry, x in found.items() if x is not None]
        axis.plot(*zip(*points, strict=True), "o", color="tab:green", markersize=4)
        if found.get("exact") is not None:
            axis.axvline(found["exact"], color=GREY, linewidth=1)
        axis.set_title(f"{family}: {name.replace('_', ' ')}", fontsize=10)
        axis.ticklabel_format(axis="x", useOffset=False)
        axis.locator_params(axis="x", nbins=4)
        axis.tick_params(axis="x", labelsize=8)
    for axis in axes.flat[len(columns) :]:
        axis.set_axis_off()
    list_entries(axes, entries)
    keep(figure, "Whole models by each recipe", result, path)


def draw_sparse(result: dict, path: Path) -> None:
    """A panel per figure against density, a line for each choice of IN_SPARSE, and dashed for the
    first of them with its first steps dense. The table has all. A figure that is equal at density
    1 is left out."""
    titles = {"psnr": "PSNR to samples of exact attention, dB", "frechet": "Frechet distance"}
    shown = [name for name in titles if any(row.get(name) for row in result["rows"])]
    figure, axes = subplots(path, 1, len(shown), figsize=(5.5 * len(shown), 4.4))
    choices = groups(result["rows"], "choice")
    choices = [name for name in IN_SPARSE if name in choices]
    rows = [
        row for row in result["rows"]
        if row["choice"] in choices[: 1 if row["dense_steps"] else None]
    ]  # fmt: skip
    for axis, name in zip(axes[0], shown, strict=True):
        for title, its in sparse.by_choice(rows).items():
            points = sorted((row["density"], row[name]) for row in its if row[name] is not None)
            axis.plot(
                *zip(*points, strict=True), label=title, marker=".",
                color=f"C{choices.index(its[0]['choice'])}",
                linestyle="--" if its[0]["dense_steps"] else "-",
            )  # fmt: skip
        axis.set_xlabel("part of the keys that is computed")
        axis.set_title(titles[name], fontsize=10)
        axis.grid(alpha=0.3)
    lines, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="lower center", ncol=3, fontsize=9)
    keep(figure, "A small diffusion transformer", result, path, legend=0.1)


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
    colours = {
        name: CURVES.get(name.removesuffix(" (kernel)").partition(",")[0], f"C{i}")
        for i, name in enumerate(groups(rows, "recipe"), len(CURVES))
    }
    size = (11, 3.4 * len(settings) + 0.5)
    figure, axes = subplots(path, len(settings), 2, figsize=size, sharex="row")
    for (losses, gaps), (setting, its) in zip(axes, settings.items(), strict=True):
        recipes = groups(its, "recipe")
        beside = {row["seed"]: row["curve"] for row in recipes.get("exact", ())}
        for recipe, runs in recipes.items():
            line = "--" if "," in recipe else "-"  # a variant, of the same colour
            style = {"color": colours[recipe], "linewidth": 0.9, "linestyle": line}
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
        losses.set_ylabel("loss")
        losses.set_title(setting, fontsize=10)
        gaps.set_ylabel("gap to exact, mean over seeds")
        gaps.set_title(setting, fontsize=10)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    title = f"{curves.TITLES[rows[0]['plan']]} by each recipe"
    keep_with_legend(figure, axes, title, result, path)


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
    name = provider.removesuffix(" op").removesuffix(" kernel")
    if colour := COLOURS.get(name, COLOURS.get(name.partition(" ")[0])):  # of "flash (FA3)" too
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


# file -> the plans it shows, and who draws it from their results
FIGURES = {
    "attention.svg": (("paper",), draw_speed),
    "overview.svg": (("shipped", "model"), draw_overview),
    "accuracy.svg": (("accuracy",), draw_accuracy),
    "end-to-end.svg": (("end-to-end",), draw_models),
    "peers.svg": (("peers",), draw_peers),
    "sparse.svg": (("sparse",), draw_sparse),
    **{f"{plan}.svg": ((plan,), draw_curves) for plan in curves.TITLES},
}


def draw(plans: dict[str, dict], folder: Path) -> None:
    """What a GPU's results can show."""
    for file, (needed, drawn) in FIGURES.items():
        if plans.keys() >= set(needed):
            drawn(*(plans[plan] for plan in needed), folder / file)
