"""The pages and plots of results: bench/tables.py, bench/pages.py, bench/figures.py. Each bench's
table of the committed results is tested by tests/front/test_docs.py."""

import json
import re

import pytest

from bench import figures, harness, pages, tables

WHERE = {
    "date": "2026-01-01T12", "machine": {"gpu": "A", "driver": "9"}, "method": {"time": "medians"},
    "versions": dict(torch="2", triton="3", cudnn="1"), "command": "python bench/x.py --json",
}  # fmt: skip
LISTED = [
    {"N": 1024, "D": 64, "block_q": 128, "block_kv": 64, "density": 0.3, "per_work": 0.8,
     "times": {name: {"ms": 2} for name in ("lists", "dense", "op", "flex")}}
] * 2  # fmt: skip


def test_the_terminal_shows_a_table_with_aligned_columns(capsys):
    lines = [["case", "ms", "x"], ["a", "1.0", ""], ["longer", "12.5", "2.00x"]]
    tables.show(f"A title\n\n{tables.markdown(lines)}\nbelow")
    assert capsys.readouterr().out.splitlines() == [
        "A title", "", "case      ms      x", "a        1.0       ", "longer  12.5  2.00x", "", "below",
    ]  # fmt: skip


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
        (tmp_path / name).write_text(json.dumps(WHERE | {"date": date, "rows": rows}))

    keep("2026-11-24-parallel.json", "2026-11-24", LISTED)
    keep("2026-11-24-regret-calibrated.json", "2026-11-24", LISTED)  # of no page's plan
    keep("new.json", "2026-11-26", [{"plan": "lists", **LISTED[0]}])
    both = [{"plan": plan, **LISTED[0]} for plan in ("lists", "lists", "memory")]
    keep("old.json", "2026-11-25T23", both)
    found = pages.newest(tmp_path)
    assert {plan: len(result["rows"]) for plan, result in found.items()} == {
        "parallel": 2, "lists": 1, "memory": 1
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
    (results / "2026-01-01-lists.json").write_text(json.dumps(WHERE | {"rows": LISTED}))
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


def test_plots_are_what_the_results_say(tmp_path):
    """Texts, and lines where it is matplotlib's version that drew the committed ones."""
    matplotlib = pytest.importorskip("matplotlib")
    for name in ("nvidia-h200", "cpu"):
        folder = harness.ROOT / "bench" / "results" / name
        figures.draw(pages.newest(folder), tmp_path)
        for path in folder.glob("*.svg"):
            kept, again = path.read_text(), (tmp_path / path.name).read_text()
            same = f"Matplotlib v{matplotlib.__version__}," in kept
            for part in (r">([^<>\n]+)</text>", r' d="([^"]*)"')[: 1 + same]:
                assert re.findall(part, again) == re.findall(part, kept), path
