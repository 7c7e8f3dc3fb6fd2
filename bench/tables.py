"""Markdown of results: what the tables of several benches have in common.

A bench has `table(rows)`. Its terminal output is that table by `show`, and a page has the same one,
with `provenance` below it: bench/pages.py.
"""

import itertools
import re
import statistics
import textwrap

from bench.cases import Case


def markdown(lines: list[list[str]], align: str = "--:") -> str:
    rule = ["---"] + [align] * (len(lines[0]) - 1)
    return "".join(f"| {' | '.join(line)} |\n" for line in (lines[0], rule, *lines[1:]))


def speed_of(times: list[float], others: list[float]) -> dict[str, float]:
    """How much faster one was than another in the same rounds."""
    x = [b / a for a, b in zip(times, others, strict=True)]
    return {"x": statistics.median(x), "x_min": min(x), "x_max": max(x)}


def gain(speed: dict[str, float], mark: str = "") -> str:
    """mark: around a ratio, as "**"."""
    same = speed["x_min"] <= 1 <= speed["x_max"]
    change = "no change" if same else f"{mark}{speed['x']:.2f}x{mark}"
    return f"{change} ({speed['x_min']:.2f} to {speed['x_max']:.2f})"


def show(text: str) -> None:
    """Print Markdown, with the columns of its tables aligned."""
    for in_table, lines in itertools.groupby(text.splitlines(), lambda line: line[:1] == "|"):
        if in_table:
            cells = [line[2:-2].split(" | ") for line in lines]
            widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
            lines = [
                "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
                for i, line in enumerate(cells)
                if i != 1  # the rule
            ]
        print("\n".join(lines))


def wrapped(text: str) -> str:
    """Lines of at most 120 columns."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def groups(rows: list[dict], key: str) -> dict[str, list[dict]]:
    found = {}
    for row in rows:
        found.setdefault(row[key], []).append(row)
    return found


def case_of(row: dict) -> str:
    heads = row.get("H") or Case(*(row[key] for key in ("B", "H_q", "H_kv", "N", "D"))).heads
    return f"{row['model']} {row['B']}x{heads}x{row['N']}x{row['D']}".strip()


def with_speedup(row: dict, value: str) -> str:
    """Beside cuDNN's; "*": launched, not captured."""
    mark = "" if row["captured"] else "*"
    if row["provider"] == "cuDNN" or not row["speedup"]:
        return value + mark
    return f"{value} ({row['speedup']:.2f}x){mark}"


def versions_of(result: dict) -> str:
    return ", ".join(f"{k} {result['versions'][k]}" for k in ("torch", "triton", "cudnn"))


def where_and_when(result: dict) -> str:
    """In a line where there is room: pages have at most 160 columns. Rows of another commit, which
    the method names, are named too."""
    where = f"One {result['machine']['gpu']}, {result['date'][:10]}, {versions_of(result)}."
    others = re.findall(r"[^.]+ at commit \w+\.", str(result["method"]))
    said = f"{where} {again(result)}{''.join(others)}"
    return textwrap.fill(said, 160, break_on_hyphens=False) + "\n"


def again(result: dict) -> str:
    """The command that makes a result; the commit, where the result knows it."""
    commit = f" (commit {result['commit']})" if result.get("commit") else ""
    return f"To repeat it: `{result['command']}`{commit}."


def provenance(result: dict) -> str:
    driver = result["machine"].get("driver")
    method = result["method"]
    if isinstance(method, dict):
        shown = [
            name for name in ("time", "inputs", "blocks", "keep", "packages") if name in method
        ]
        method = ". ".join(f"{name.capitalize()}: {method[name]}" for name in shown)
    when = f"{result['date'][:10]}, {f'driver {driver}, ' if driver else ''}{versions_of(result)}"
    return f"{wrapped(f'{when}. {method}.')}\n{wrapped(again(result))}\n"
