"""The tables of results, and the pages that hold them: bench/tables.py, each bench's `table`, and
bench/pages.py."""

import dataclasses
import json

import pytest

from bench import (
    accuracy,
    attention,
    curves,
    figures,
    fusion,
    lists,
    model,
    packages,
    pages,
    parallel,
    peers,
    preparation,
    tables,
    training,
)
from bench.cases import Case

WHERE = {
    "date": "2026-01-01T12", "machine": {"gpu": "A", "driver": "9"}, "method": {"time": "medians"},
    "versions": dict(torch="2", triton="3", cudnn="1"), "command": "python bench/x.py --json",
}  # fmt: skip


def ms(**times):
    return {name: {"ms": x} for name, x in times.items()}


# -- rows ----

TIMED = {"captured": True, "accuracy": {"normal": {"rel_l1": 0.04}}, "recipe": None}


def timed(case, provider, ms, **more):
    of = dataclasses.asdict(case) | TIMED | {"family": case.family, "table": case.table}
    of |= {"provider": provider, "ms": ms, "row": case.row, "model": case.model}
    return of | {"tflops": ms and 100 / ms, "speedup": ms and 2 / ms} | more


def masks():
    """flex is measured at one N alone."""
    found = [(1024, "cuDNN"), (1024, "op"), (4096, "cuDNN"), (4096, "flex"), (4096, "op")]
    times = {"cuDNN": 2.0, "op": 1.0, "flex": 123.4}
    return [timed(Case(4, 2, 2, N, 64, mask="keys"), name, times[name]) for N, name in found]


def shared():
    case = Case(2, 24, 24, 4096, 64, shared=True)
    return [
        timed(case, "cuDNN", 2.0),
        timed(case, "sage1 apart", 1.0, recipe="sage1"),
        timed(case, "sage1 op", 0.5, recipe="sage1", captured=False),
    ]


def paper():
    worst = {"cos_sim": 0.9, "rel_l1": 0.05, "rmse": 1e-3, "centred_rel_l1": 0.5}
    found = {"normal": worst | {"cos_sim": 0.8, "rel_l1": 0.0}, "outlier": worst}
    case = Case(4, 2, 2, 1024, 64)
    return [
        timed(case, "cuDNN", 2.0, accuracy=found),
        timed(case, "a kernel", None, accuracy={}, recipe="a"),
        timed(case, "a op", 1.0, accuracy=found | {"normal": worst}, recipe="a"),
    ]


def beside_peers():
    """Each table has ours of its own kind, beside those that have no kinds."""
    figures = [("cuDNN", 50), ("FA3", 70), ("FA3-fp8 kernel", 99), ("FA3-fp8 op", 59), ("FA4", None),
               ("sage2-8b kernel", 80), ("sage2-8b op", 60)]  # fmt: skip
    case = Case(1, 4, 2, 9, 8, is_causal=True)
    return [
        timed(
            case, name, 1.0, tflops=x, speedup=x and x / 50, recipe=name.startswith("sage") or None
        )
        for name, x in figures
    ]


def prepared():
    return [preparation.row(Case(1, 2, 2, 300, 80), {"ms": 1.0}, {"ms": 3.0})]


def fused():
    case = fusion.CASES[1]
    times = {"ms": 3.0}, {"ms": 3.5}
    return [fusion.row(case, rope, False, 0.1, *times) for rope in ("halves", "interleaved")]


def blocks():
    def row(name, *recipes, x):
        speed = dict(zip(("x", "x_min", "x_max"), x))
        sites = {"sage": [{"recipe": recipe} for recipe in recipes]}
        of = dict(model=name, shape="s", error=None, sites=sites, share=0.5, speed={"sage": speed})
        return of | dict(accuracy={"sage": {"rel_l1": 0.001}}, times=ms(inductor=x[0], sage=1.0))

    return [
        row("wan14b_480p", None, "sage2-8b", x=(1.25, 1.24, 1.26)),
        row("flux_double", "sage2-8b", x=(1.02, 0.999, 1.03)),
        row("bert_large_512", None, x=(0.99, 0.9876, 1.0)),
        row("llama3_2k", None, None, x=(1.0, 0.99, 1.0049)),
        {"model": "hunyuan", "error": "x", "sites": {}},
    ]


def selected():
    its = {"inductor": 4.0, "sage": 2.0, "keep 0.3": 1.0}
    times = {name: {"ms": x, "peak_bytes": 2**30} for name, x in its.items()}
    row = {"shape": "1x2x700x32", "error": None, "sites": its, "times": times}
    return [row, row | {"error": "x"}]


def packaged(name, N, times, error=None):
    """times: of the package, the compiled model and the package with SDPA."""
    names = "package sage", "compiled sage", "package SDPA"
    return {
        "model": name, "shape": f"1x2x{N}x64", "N": N, "error": error,
        "times": {name: {"replayed": {"ms": x}, "launched": {"ms": 2 * x}}
                  for name, x in zip(names, times)},
        "equal": {"sage": {"bit_equal": True, "rel_l2": 0.0}},
        "others": {"1": {"bit_equal": False, "rel_l2": 1.2e-5}},
        "packages": {name: {"code_bytes": b, "seconds": s}
                     for name, b, s in (("sage", 3.21e6, 70.4), ("SDPA", 2e6, 50))},
    }  # fmt: skip


def all_packaged():
    return [
        packaged("llama3_8k", 8192, (1.0, 1.01, 1.5)),
        packaged("llama3_8k", 16384, (3.0, 3.0, 6.0)),
        packaged("padded", 4096, (1.0, 1.0, 1.0), "Wrong: x"),
    ]


def spread():
    """By two GPUs, and for four computed."""
    rows = [(name, 2, 7 + i, 0.5) for i, name in enumerate(parallel.PROVIDERS)]
    return [
        {"case": "Small", "N": 9, "H": 2, "D": 8, "P": P, "provider": name, "ms": x, "efficiency": e,
         "eager_ms": 20.51, "chosen": name == "heads", "one_device_ms": 12.34}
        for name, P, x, e in (*rows, ("heads", 4, None, 0.1))
    ]  # fmt: skip


def listed():
    row = dict(N=1024, D=64, block_q=128, block_kv=64, density=0.3, per_work=0.8)
    times = ms(lists=1.5, dense=4, op=2, flex=3)
    without = {name: times[name] for name in ("lists", "op")}
    return [row | dict(times=times), row | dict(times=without, per_work=None)]


def stepped():
    def row(name, x, kept, peak):
        return {
            "provider": name, "shape": "2 layers", "times": ms(step=x), "cos_sim": 0.9987,
            "kept_bytes": kept * 2**30, "peak_bytes": peak * 2**30, "weight_bytes": 2**30,
        }  # fmt: skip

    return [row("inductor", 200.0, 16, 20), row("fp8-backward", 160.0, 14, 19)]


def trained():
    """The faster rival is another one in each part."""

    def row(name, forward, backward, error, shape="1x2x9x8"):
        times = ms(forward=forward, backward=backward, step=forward + backward)
        return {"provider": name, "shape": shape, "times": times, "kept": 6.04, "rel_l1": error}

    error = {"dq": 0.02, "dk": 0.031, "dv": 0.0449}
    return [
        row("cudnn", 2.0, 8.0, error), row("flash", 4.0, 4.0, None), row("fp8-backward", 1.0, 2.0, error),
        row("fp8-backward", 1.0, 2.0, error, "alone"),
    ]  # fmt: skip


def shipped():
    """Rows of before 2026-11-27 have no worst row."""

    def row(family, N, entry, error, worst=None, **more):
        average = {"rel_l1": error, "centred_rel_l1": 10 * error}
        of = dict(family=family, N=N, D=128, entry=entry, average=average, worst=worst or {})
        return of | more

    exact = dict(ms=4.0, speedup=1.0, captured=True)
    ours = dict(ms=2.0, speedup=2.0, captured=False)
    failed = {"family": "normal", "N": 9, "D": 128, "entry": "sage3", "error": "x"}
    return [
        row("normal", 8, "bf16 SDPA", 0.002, **exact), row("normal", 8, "sage2-8b", 0.04, {"row": 0.5}, **ours),
        row("normal", 8, "sage3", 0.2),
        row("normal", 9, "bf16 SDPA", 0.001), row("normal", 9, "sage2-8b", 0.03, {"row": 0.6}), failed,
        row("biased_v", 9, "bf16 SDPA", 0.01), row("biased_v", 9, "sage2-8b", 0.0101, {"row": 0.6}),
        failed | {"family": "biased_v"},
    ]  # fmt: skip


LOSS = {"mean": 2.0, "gap": 1.0, "gap_deviation": None, "exact_deviation": 0.5}
LINE = {"tokens": 64, "qk_norm": False, "recipe": "FP8 backward", "seeds": 2, "diverged": 1, "partial": 0,
        **dict.fromkeys(curves.FIGURES, LOSS)}  # fmt: skip

# -- their tables ----

TABLES = {
    "a provider that is measured at some N only leaves its other cells empty": (
        lambda: attention.table("masks", masks()), """
| mask, N | cuDNN | op | flex | rel. L1 of sage (cuDNN) |
| keys 1024 | 2.00 | 1.00 (2.00x) |  | - (4.0%) |
| keys 4096 | 2.00 | 1.00 (2.00x) | 123 (0.02x) | - (4.0%) |"""),
    "what is launched has a star": (
        lambda: attention.table("shared", shared()), """
| B x H x N x D | cuDNN | sage1 apart | sage1 op | rel. L1 of sage (cuDNN) |
| 2x24x4096x64 | 2.00 | 1.00 (2.00x) | 0.500 (4.00x)* | 4.0% (4.0%) |"""),
    "the worst of all rows is below them": (
        lambda: attention.table("paper", paper()), """
| N | cuDNN | a kernel | a op | rel. L1 of sage (cuDNN) |
| 1024 | 50 | - | 100 (2.00x) | 5.0% (0.0%) |
|  | CosSim | rel. L1 | RMSE | outlier: CosSim | rel. L1 | RMSE | rel. L1, centred |
| cuDNN | 0.80000 | 0.0000 | 1.0e-03 | 0.90000 | 0.0500 | 1.0e-03 | 0.500 |
| a op | 0.90000 | 0.0500 | 1.0e-03 | 0.90000 | 0.0500 | 1.0e-03 | 0.500 |"""),
    "a tile is named by its warpgroups": (
        lambda: attention.table("load", [
            timed(Case(4, 32, 32, 1024, 64), "cuDNN", 2.0),
            timed(Case(4, 32, 32, 1024, 64), "a, 3 warpgroups", 1.0, recipe="a"),
            timed(Case(1, 2, 2, 9, 64, model="flux"), "cuDNN", 2.0),
        ]), """
| B=4 H=32 (D=256: 16) | cuDNN | 3 warpgroups | rel. L1 of sage (cuDNN) |
| D=64, 1024 | 50 | 100 (2.00x) | 4.0% (4.0%) |
| flux 1x2x9x64 | 50 |  | - (4.0%) |"""),
    "cells where a peer leads are bold": (
        lambda: peers.table(beside_peers()), """
| B x H x N x D | cuDNN | FA3 | FA3-fp8 | FA4 | sage2-8b |
| 1x4/2x9x8 causal | 50 | 70 (1.40x) | **99 (1.98x)** | - | 80 (1.60x) |
| B x H x N x D | cuDNN | FA3 | FA3-fp8 | FA4 | sage2-8b |
| 1x4/2x9x8 causal | 50 | **70 (1.40x)** | 59 (1.18x) | - | 60 (1.20x) |"""),
    "nobody is ahead of ours where it was not asked for": (
        lambda: peers.table(beside_peers()[:2]), """
| B x H x N x D | cuDNN | FA3 |
| 1x4/2x9x8 causal | 50 | 70 (1.40x) |
| B x H x N x D | cuDNN | FA3 |
| 1x4/2x9x8 causal | 50 | 70 (1.40x) |"""),
    "means are of cases of one column": (
        lambda: peers.means_table([
            {**row, "N": N, "D": D, "tflops": row["tflops"] and row["tflops"] * more}
            for N, D, ours in ((9, 64, 1), (10, 64, 4), (9, 80, 1))
            for row in beside_peers() for more in (ours if row["recipe"] else 1,)
        ]), """
|  | D=64 causal | other shapes |
| sage2-8b kernel / FA3-fp8 kernel | 1.62x | **0.81x** |
| sage2-8b op / cuDNN | 2.40x | 1.20x |
| sage2-8b op / FA3 | 1.71x | **0.86x** |
| sage2-8b op / FA3-fp8 op | 2.03x | 1.02x |"""),
    "errors are a family's worst, of what has its preparation": (
        lambda: peers.families_table([
            timed(Case(1, 2, 2, N, D), name, 1.0, accuracy={
                "normal": {"rel_l1": N * D * factor}, "outlier": {"rel_l1": factor / N},
            })
            for D in (64, 128) for N in (100, 200)
            for name, factor in (("FA3-fp8 kernel", 9), ("FA3-fp8 op", 1e-6), ("sage1 op", 2e-6))
            if D == 64 or name != "sage1 op"
        ]), """
|  | D=64 | D=128 |
| FA3-fp8 op | 1.28, 1e-06 | 2.56, 1e-06 |
| sage1 op | 2.56, 2e-06 |  |"""),
    "preparation beside two floors": (
        lambda: preparation.table(prepared()), """
| B x H x N x D | ms | x the floor of one pass | of two |
| 1x2x300x80 | 3.00 | 2.00 | 1.20 |"""),
    "what preparation adds": (
        lambda: fusion.table(fused()), """
| B x H x N x D | halves | interleaved |
| flux 1x24x4608x128 | 0.500 (2.00x) | 0.500 (2.00x) |"""),
    "a block that is not faster for certain is not said to be": (
        lambda: model.table(blocks()), """
| block | B x H x N x D | `"inductor"` | `"sage"` | faster | attention | relative L1 |
| Wan 14B, 480p | s | 1.250 ms | 1.000 ms | **1.25x** (1.24 to 1.26) | 50% | 0.10% |
| Flux, double block | s | 1.020 ms | 1.000 ms | no change (1.00 to 1.03) | 50% | 0.10% |"""),
    "blocks of which keys are left out": (
        lambda: model.selected_table(selected()), """
| B x H x N x D | compiled by | ms | over inductor | over sage | peak, GiB |
| 1x2x700x32 | inductor | 4.000 | 1.00x | 0.50x | 1.00 |
| 1x2x700x32 | sage | 2.000 | 2.00x | 1.00x | 1.00 |
| 1x2x700x32 | keep 0.3 | 1.000 | 4.00x | 2.00x | 1.00 |"""),
    "a package that failed is left out": (
        lambda: packages.table(all_packaged()), """
| ms a call | B x H x N x D | package | compiled | package, SDPA | faster | launched: package | compiled | package, SDPA |
| Llama 3 8B | 1x2x8192x64 | 1.000 | 1.010 | 1.500 | **1.50x** | 2.000 | 2.020 | 3.000 |
| Llama 3 8B | 1x2x16384x64 | 3.000 | 3.000 | 6.000 | **2.00x** | 6.000 | 6.000 | 12.00 |
|  | beside the compiled model | code, MB (SDPA's) | packaging, s (SDPA's) |
| Llama 3 8B | N=1: 1.2e-05, N=8192: bit-equal, N=16384: bit-equal | 3.2 (2.0) | 70 (50) |"""),
    "ranks that were there": (
        lambda: parallel.table(spread()), """
| B x H x N x D | one GPU | rows | heads | codes | SDPA |
| Small 1x2x9x8 | 12.3 | 7.00 (0.50), eager 20.5 | **8.00 (0.50)**, eager 20.5 | 9.00 (0.50), eager 20.5 | 10.0 (0.50), eager 20.5 |"""),
    "lists with flex, and on a GPU that has no tile for them": (
        lambda: lists.table(listed()), """
| N | head_dim | blocks | listed | kernel, ms | with preparation | flex | flex / ours | dense kernel | time by work |
| 1024 | 64 | 128 x 64 | 30% | 1.500 | 2.000 | 3.000 | 1.50 | 4.000 | 0.80 |
| 1024 | 64 | 128 x 64 | 30% | 1.500 | 2.000 |  |  |  |  |"""),
    "a training step": (
        lambda: training.memory_table(stepped()), """
|  | compiled by | step, ms | kept, GiB | peak, GiB | weights, GiB | CosSim |
| 2 layers | inductor | 200.0 | 16.00 | 20.00 | 1.00 | 0.9987 |
| 2 layers | fp8-backward | 160.0 (1.25x) | 14.00 (-12.5%) | 19.00 (-5.0%) | 1.00 | 0.9987 |"""),
    "each part beside the faster rival": (
        lambda: training.table(trained()), """
| B x H x N x D |  | forward | backward | step | kept | dQ/dK/dV, % |
| 1x2x9x8 | cudnn | 2.000 | 8.000 | 10.00 | 6.0 | 2.0/3.1/4.5 |
| 1x2x9x8 | flash | 4.000 | 4.000 | 8.000 | 6.0 | - |
| 1x2x9x8 | fp8-backward | 1.000 (2.00x) | 2.000 (2.00x) | 3.000 (2.67x) | 6.0 | 2.0/3.1/4.5 |
| alone | fp8-backward | 1.000 | 2.000 | 3.000 | 6.0 | 2.0/3.1/4.5 |"""),
    "families at the length of the largest error, speed, and what is above a limit": (
        lambda: accuracy.shipped_table(shipped()), """
| head_dim 128 | bf16 SDPA | sage2-8b | sage3 |
| normal | 0.20% | 4.00% (60%) | 20.00% |
| biased_v | 1.000x | 1.010x | - |
| speed, N=8 | 1.00x | 2.00x* | - |
| limits; bold: above | at most | N=8 | N=9 |
| sage2-8b, normal, head_dim 128 | 3.80% | **4.00%** | 3.00% |
| sage2-8b, biased_v, head_dim 128 | 1.050x |  | 1.010x |"""),
    "losses and gaps": (
        lambda: curves.table([LINE]), """
| tokens | QK-norm | recipe | seeds | loss | gap | deviation | of exact | held out: loss | gap | deviation | of exact |
| 64 | no | FP8 backward | 2, 1 diverged | 2.0000 | +1.00000 | - | 0.50000 | 2.0000 | +1.00000 | - | 0.50000 |"""),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_a_table(name):
    table, expected = TABLES[name]
    lines = [x for x in table().splitlines() if x.startswith("|") and not x.startswith("| ---")]
    assert lines == expected.splitlines()[1:]


def test_blocks_that_stay_are_named_in_a_line():
    line = "All calls stay SDPA (0.988x to 1.005x) in: BERT, N=512; Llama 3 8B, prefill of 2K.\n"
    assert model.others(blocks()) == line and model.others(blocks()[:1]) == ""
    assert all(each.title for each in model.MODELS.values())


def test_the_terminal_shows_a_table_with_aligned_columns(capsys):
    lines = [["case", "ms", "x"], ["a", "1.0", ""], ["longer", "12.5", "2.00x"]]
    tables.show(f"A title\n\n{tables.markdown(lines)}\nbelow")
    assert capsys.readouterr().out.splitlines() == [
        "A title", "", "case      ms      x", "a        1.0       ", "longer  12.5  2.00x", "", "below",
    ]  # fmt: skip


# -- the pages ----


def test_below_a_table_is_where_and_how_it_was_measured():
    where = tables.provenance(WHERE | {"method": {"time": "t", "units": "ms", "inputs": "i"}})
    again = "To repeat it: `python bench/x.py --json`"
    assert where == (
        f"2026-01-01, driver 9, torch 2, triton 3, cudnn 1. Time: t. Inputs: i.\n{again}.\n"
    )
    alone = WHERE | {"machine": {"gpu": "cpu"}, "method": "m", "commit": "0a1b"}
    assert tables.provenance(alone) == (
        f"2026-01-01, torch 2, triton 3, cudnn 1. m.\n{again} (commit 0a1b).\n"
    )
    method = "Medians. What is shipped: a run of its own, at commit 312aae5. Then others"
    both = tables.where_and_when(WHERE | {"commit": "0a1b", "method": method})
    assert both.replace("\n", " ").endswith(
        "(commit 0a1b). What is shipped: a run of its own, at commit 312aae5. "
    )
    assert tables.where_and_when(WHERE | {"commit": None}) == (
        f"One A, 2026-01-01, torch 2, triton 3, cudnn 1. {again}.\n"
    )


def test_a_page_has_the_newest_result_of_each_plan(tmp_path):
    """A result whose rows name no plan is of the plan that its file is named after."""

    def keep(name, date, rows):
        (tmp_path / name).write_text(json.dumps(WHERE | {"date": date, "rows": rows, "world": 2}))

    keep("2026-11-24-parallel.json", "2026-11-24", spread())
    keep("2026-11-24-regret-calibrated.json", "2026-11-24", spread())  # of no page's plan
    keep("new.json", "2026-11-26", [{"plan": "lists", **listed()[0]}])
    both = [{"plan": "lists", **row} for row in listed()] + [{"plan": "memory", **stepped()[0]}]
    keep("old.json", "2026-11-25T23", both)
    found = pages.newest(tmp_path)
    assert {plan: len(result["rows"]) for plan, result in found.items()} == {
        "parallel": 5, "lists": 1, "memory": 1
    }  # fmt: skip
    text = pages.TABLES["lists"](
        {"a": found, "cpu": {"lists": found["lists"] | {"machine": {"gpu": "cpu"}}}}
    )
    assert text.count("| 1024 | 64 |") == 2 and text.count("Time: medians.") == 2
    assert text.startswith("### A\n") and "### CPU, emulated\n" in text
    assert pages.TABLES["backward"]({"a": found}) == ""
    (tmp_path / "old.json").write_text(json.dumps({"date": "2026-01-01", "rows": []}))
    with pytest.raises(ValueError, match='old.json must say the "command"'):
        pages.newest(tmp_path)


def test_a_page_is_written_between_its_markers_and_checked(tmp_path, capsys):
    page, results = tmp_path / "docs" / "page.md", tmp_path / "bench" / "results" / "a"
    where = ["--root", str(tmp_path)]
    for folder in (page.parent, results):
        folder.mkdir(parents=True)
    (tmp_path / "README.md").write_text("no table here\n")
    assert pages.main(where) == 2 and "no results" in capsys.readouterr().err
    (results / "2026-01-01-lists.json").write_text(json.dumps(WHERE | {"rows": listed()}))
    for wrong in ("<!-- table:listss -->\n<!-- table:end -->", "<!-- table:lists -->\n"):
        page.write_text(wrong)
        assert pages.main(where) == 2 and page.read_text() == wrong
        assert "page.md needs" in capsys.readouterr().err
    page.write_text("a\n<!-- table:lists -->\nold<!-- table:end -->\nb")
    assert pages.main([*where, "--check"]) == 1 and "old" in page.read_text()
    assert pages.main(where) == 0 == pages.main([*where, "--check"])
    shown = page.read_text()
    assert shown.startswith("a\n<!-- table:lists -->\n### A\n") and shown.endswith("\nb")
    assert "| 1024 | 64 |" in shown and "old" not in shown


def test_every_plan_of_a_figure_is_one_of_a_page():
    assert {plan for needed, _ in figures.FIGURES.values() for plan in needed} <= set(pages.PLANS)


def test_the_overview_sorts_models_and_names_each_line_at_its_end(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")

    def model(name, eager, inductor, error=None):
        speed = {"eager": {"x": eager}, "inductor": {"x": inductor}}
        return {"model": name, "tokens": 75_600, "error": error, "speed": speed}

    rows = [model("hunyuan", 2.2, 2), model("flux", 1.4, 1.05), model("llama_16k", 1.3, 2.5)]
    whole = WHERE | {"rows": [*rows, model("wan_14b", 1, 1, "OOM")]}
    drawn = [
        {"family": family, "model": model, "B": 4, "N": N, "provider": provider,
         "recipe": provider.removesuffix(" op") if "sage" in provider else None, "tflops": tflops}
        for family, model, N in (("D=128", "", 1024), ("D=128", "", 8192), ("D=128", "flux", 4608),
                                 ("D=64", "", 2048))
        for provider, tflops in (("cuDNN", 400), ("FA3-fp8 op", 600 if N == 1024 else None),
                                 ("sage1-rotated op", 800), ("FA4", 1000))
    ]  # fmt: skip
    figures_of, keep = [], figures.keep
    monkeypatch.setattr(figures, "keep", lambda *its: figures_of.append(its[0]) or keep(*its))
    figures.draw_overview(whole, WHERE | {"rows": drawn}, tmp_path / "a.svg")
    dots, lines = figures_of[0].axes
    shown = [label.get_text() for label in dots.get_yticklabels()]
    assert [name.partition(",")[0] for name in shown] == ["Flux", "Llama 3.2 1B", "HunyuanVideo"]
    assert shown[0].endswith(", 76K")
    over = {line.get_label(): list(line.get_xdata()) for line in dots.lines}
    assert over["over inductor"] == [1.05, 2.5, 2] and over["over eager"] == [1.4, 1.3, 2.2]
    ends = {text.get_text(): text.xy for text in lines.texts}
    assert ends == {
        "cuDNN, bf16": (8192, 1), "FA3, FP8": (1024, 1.5), "ours, sage1-rotated": (8192, 2),
    }  # fmt: skip
    assert ">1K<" in (tmp_path / "a.svg").read_text()


def test_a_plot_of_models_says_what_is_missing_and_does_not_enlarge_noise(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")

    def row(family, entry, **figures):
        return {"family": family, "entry": entry, "figures": figures}

    rows = [
        row("gpt", "exact", perplexity=2.4), row("gpt", "SAGE1", perplexity=2.4001),
        row("gpt", "sage1", perplexity=2.5), row("vit", "exact", accuracy=0.5, agreement=1.0),
        row("vit", "sage1", accuracy=0.6, agreement=0.999),
        row("vit", "sage2-8b-rotated", accuracy=0.4, agreement=1.0),
    ]  # fmt: skip
    figures_of, keep = [], figures.keep
    monkeypatch.setattr(figures, "keep", lambda *its: figures_of.append(its) or keep(*its))
    figures.draw_models(WHERE | {"rows": rows}, tmp_path / "a.svg")
    figure, title, *_ = figures_of[0]
    gpt, vit = figure.axes
    assert "capitals: the papers'" in title
    names = [label.get_text() for label in gpt.get_yticklabels()]
    assert names == ["exact", "sage2-8b-rotated", "sage1", "SAGE1"]  # the default, ours, papers'
    assert gpt.get_title() == "gpt: perplexity, less is better"
    assert vit.get_title() == "vit: agreement, more is better"
    assert [(x.get_text(), x.get_position()[1]) for x in gpt.texts] == [("not measured", 1)]
    assert [x.get_position()[1] for x in vit.texts] == [3]
    assert gpt.get_xlim()[0] <= 2.388 and vit.get_xlim()[0] <= 0.99


def test_a_plot_of_errors_has_plain_percents_and_no_legend_of_one(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    both = {"average": {"rel_l1": 0.004}, "worst": {"rel_l1": 0.04}}
    of = [("normal", "sage1"), ("gpt", "sage1"), ("vit", "sage1")]
    rows = [{"table": "recipes", "family": family, "entry": entry} | both for family, entry in of]
    figures_of, keep = [], figures.keep
    monkeypatch.setattr(figures, "keep", lambda *its: figures_of.append(its[0]) or keep(*its))
    result = WHERE | {"rows": rows, "models": {"gpt": "", "vit": ""}}
    figures.draw_accuracy(result, tmp_path / "a.svg")
    random, models = figures_of[0].axes
    assert random.get_title() == "random inputs: normal" and not random.get_legend()
    assert [text.get_text() for text in models.get_legend().texts] == ["gpt", "vit"]
    least, most = random.get_xlim()
    shown = {x.get_text() for x in random.get_xticklabels() if least < x.get_position()[0] < most}
    assert shown == {"0.5", "1", "2"}
