"""The plots of results, as SVG: FIGURES. Drawn by bench/pages.py."""

import statistics
from pathlib import Path

from bench import accuracy, curves, models, peers, sparse
from bench.cases import Case
from bench.tables import groups

COLOURS = {"cuDNN": "slategray", "flash": "goldenrod", "flex": "tab:orange", "inductor": "tab:blue",
           "FA3": "tab:brown", "FA3-fp8": "tab:pink", "FA4": "tab:olive",
           "cuDNN-fp8": "teal", "torchao-fp8": "tab:cyan", "torchao-fp8 hadamard": "tab:gray",
           "comfy-kitchen": "tab:orange"}  # fmt: skip
SAGE_COLOURS = ("tab:green", "tab:purple", "tab:red")  # one per recipe
CURVES = {"exact": "gold", "bf16": "tab:blue", "FP8 backward": "tab:green", "SageBwd": "tab:red"}
# Of the README's plot: the family of shapes, and each line's name.
OVERVIEW = "D=128"
IN_OVERVIEW = {
    "sage2-8b-rotated op": "ours, the default",
    "sage1-rotated op": "ours, sage1-rotated",
    "FA3": "FA3, bf16",
    "cuDNN": "cuDNN, bf16",
    "FA3-fp8 op": "FA3, FP8",
    "comfy-kitchen op": "comfy-kitchen's INT8",
}
LESS = ("perplexity", "frechet")  # of figures of models: is better
# What a panel shows at least, of exact attention's figure: so that a difference of one image in
# 1,024, or of 0.04 % in perplexity, does not fill it.
LEAST = {"perplexity": (0.995, 1.005), "agreement": (0.99, 1)}
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
    figure.suptitle(f"{title}\n{', '.join(filter(None, where))}", fontsize=9)
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


def draw_overview(whole: dict, its: dict, path: Path) -> None:
    """For the top of the README: how fast whole models are, over "inductor" and over eager; and the
    speed of attention by IN_OVERVIEW, each line with its name at its end."""
    figure, axes = subplots(path, 1, 2, figsize=(9, 3.6), width_ratios=(1, 1.05))
    dots, lines = axes[0]
    rows = [row for row in whole["rows"] if not row["error"]]
    rows.sort(key=lambda row: min(speed["x"] for speed in row["speed"].values()))
    for i, (base, fill) in enumerate((("inductor", "full"), ("eager", "none"))):
        x = [row["speed"][base]["x"] for row in rows]
        style = {"color": SAGE_COLOURS[0], "fillstyle": fill, "markersize": 8 - i}
        dots.plot(x, range(len(rows)), "o", label=f"over {base}", **style)
    names = (f"{models.MODELS[row['model']].title}, {row['tokens'] / 1000:.0f}K" for row in rows)
    dots.set_yticks(range(len(rows)), names)
    dots.axvline(1, color=GREY, linewidth=1)
    dots.set_xlabel("x as fast")
    dots.set_title('Whole models by backend="sage", tokens', fontsize=11)
    dots.set_ylim(-0.5, len(rows) + 0.1)  # with room for the legend
    dots.legend(loc="upper right", ncol=2)
    rows = [
        row for row in peers.of_kind(its["rows"], "op")
        if row["family"] == OVERVIEW and not row["model"] and row["B"] == 4 and row["tflops"]
    ]  # fmt: skip
    base = {row["N"]: row["tflops"] for row in rows if row["provider"] == "cuDNN"}
    for provider, column in groups(rows, "provider").items():
        if name := IN_OVERVIEW.get(provider):
            points = [(row["N"], row["tflops"] / base[row["N"]]) for row in column]
            style = line_style(provider, rows)
            lines.plot(*zip(*points, strict=True), **style)
            lines.annotate(
                name, points[-1], (7, 0), textcoords="offset points", va="center",
                color=style["color"], fontsize=9,
            )  # fmt: skip
    against_n(lines, rows, "Attention, head_dim 128: x cuDNN's speed", fontsize=11)
    lines.set_xlabel("tokens")
    lines.spines[["right", "top"]].set_visible(False)
    lines.set_xlim(right=max(base) * 8)  # of the names
    dots.grid(alpha=0.3)
    days = [result["date"][:10] for result in (whole, its)]
    title = "bf16 inference. Models: {}, attention: {}".format(*days)
    keep(figure, title, {**whole, "date": ""}, path)


def draw_accuracy(result: dict, path: Path) -> None:
    """Relative L1 of each recipe, on families and on models: average, and a line to the worst."""
    from matplotlib import ticker

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
            shift = 0.08 * (i - (len(families) - 1) / 2)
            height = [entries.index(row["entry"]) + shift for row in its]
            average, worst = (
                [100 * row[of]["rel_l1"] for row in its] for of in ("average", "worst")
            )
            axis.hlines(height, average, worst, color=f"C{i}", linewidth=1)
            axis.plot(average, height, ".", color=f"C{i}", label=family)
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("")
        axis.tick_params(axis="x", labelsize=8)
        axis.set_xlabel("relative L1, %: less is better")
        axis.set_title(title, fontsize=10)
        if len(families) > 1:
            below = -0.55 / (0.4 * len(entries))  # inches of the label, over those of the panel
            axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, below), ncol=4)
        else:
            axis.set_title(f"{title}: {families[0][0]}", fontsize=10)
    list_entries(axes, entries)
    keep(figure, "Attention by each recipe", result, path)


def draw_models(result: dict, path: Path) -> None:
    """A panel per figure, a dot per recipe; the line is exact attention's. The defaults of Hopper
    come first, and the papers' recipes, in capitals, last. Accuracy is left out: it differs by a
    few images, of which as many become right as wrong. A panel is no narrower than LEAST says."""
    columns = [each for each in accuracy.figures_of(result["rows"]) if each[1] != "accuracy"]
    entries = sorted(
        groups(result["rows"], "entry"),
        key=lambda entry: (entry.isupper(), "sage" in entry and "rotated" not in entry),
    )
    height = 1 + (len(columns) > 4)
    size = (13, height * (0.25 * len(entries) + 1.2))
    figure, axes = subplots(path, height, -(-len(columns) // height), figsize=size, sharey=True)
    for axis, (family, name) in zip(axes.flat, columns, strict=False):
        its = [row for row in result["rows"] if row["family"] == family and row["figures"]]
        found = {row["entry"]: row["figures"][name] for row in its}
        points = [(x, entries.index(entry)) for entry, x in found.items() if x is not None]
        axis.plot(*zip(*points, strict=True), "o", color="tab:green", markersize=4)
        if (exact := found.get("exact")) is not None:
            axis.axvline(exact, color=GREY, linewidth=1)
            axis.update_datalim([(part * exact, 0) for part in LEAST.get(name, ())])
        for i, entry in enumerate(entries):
            if entry not in found:
                where = {"transform": axis.get_yaxis_transform(), "va": "center", "fontsize": 7}
                axis.text(0.03, i, "not measured", **where)
        better = "less" if name in LESS else "more"
        axis.set_title(f"{family}: {name.replace('_', ' ')}, {better} is better", fontsize=10)
        axis.ticklabel_format(axis="x", useOffset=False)
        axis.locator_params(axis="x", nbins=4)
        axis.tick_params(axis="x", labelsize=8)
    for axis in axes.flat[len(columns) :]:
        axis.set_axis_off()
    list_entries(axes, entries)
    papers = "; capitals: the papers' recipes, emulated" if any(map(str.isupper, entries)) else ""
    keep(figure, f"Whole models by each recipe{papers}", result, path)


def draw_sparse(result: dict, path: Path) -> None:
    """Against density, without dense steps: PSNR by each way in both orders of tokens, PSNR by the
    curves in cubes, and the Frechet distance, where there is one."""
    rows = [row for row in result["rows"] if not row["dense_steps"]]
    built, curves_of = (
        [row for row in rows if row["way"] in each] for each in (sparse.WAYS, sparse.CURVES)
    )
    beside = [row for row in built if (row["order"], row["way"]) in (sparse.ROW, ("cubes", "drop"))]
    panels = {"PSNR to the dense model's samples, dB": ("psnr", built),
              "PSNR, cubes: what else was tried": ("psnr", beside + curves_of)}  # fmt: skip
    if "frechet" in rows[0]:
        panels["Frechet distance"] = "frechet", built
    figure, axes = subplots(path, 1, len(panels), figsize=(5 * len(panels), 4.8))
    for axis, (name, (figure_of, its)) in zip(axes[0], panels.items(), strict=True):
        ways = list(groups(its, "way"))
        for title, line in sparse.by_title(its).items():
            points = sorted((row["density"], row[figure_of]) for row in line)
            axis.plot(
                *zip(*points, strict=True), label=title, marker=".",
                color=f"C{ways.index(line[0]['way'])}",
                linestyle="--" if line[0]["order"] == "raster" else "-",
            )  # fmt: skip
        axis.set_xlabel("part of the keys that is computed")
        axis.set_title(name, fontsize=10)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    keep(figure, "A small video diffusion transformer", result, path)


def draw_curves(result: dict, path: Path) -> None:
    """A row of panels per setting. Left: the loss, a line per run. Right: the gap to exact
    attention, its median over seeds, which one seed's spike does not move; grey: up to the
    deviation of exact's loss between seeds, at the end."""
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
            style = {"color": colours[recipe], "linewidth": 0.9, "linestyle": line, "alpha": 0.7}
            for i, run in enumerate(runs):
                points = numbers(enumerate(run["curve"], 1), run["every"])
                losses.plot(*points, label="" if i else recipe, **style)
            pairs = [
                [apart(*pair) for pair in zip(run["curve"], exact, strict=False)]
                for run in runs
                if (exact := beside.get(run["seed"])) and recipe != "exact"
            ]
            medians = [
                None if None in each else statistics.median(each)
                for each in zip(*pairs, strict=False)
            ]
            gaps.plot(*numbers(enumerate(medians, 1), runs[0]["every"]), **style)
        gaps.axhline(0, color=GREY, linewidth=0.8)
        gaps.set_ylim(gaps.get_ylim())  # of the gaps, however far the seeds are apart
        if deviation := exact_deviation.get(setting):
            gaps.axhspan(-deviation, deviation, color=GREY, alpha=0.25, zorder=0)
        losses.set_yscale("log")
        losses.set_ylabel("loss")
        losses.set_title(setting, fontsize=10)
        gaps.set_ylabel("gap to exact, median of seeds")
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
    "overview.svg": (("whole", "peers"), draw_overview),
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
