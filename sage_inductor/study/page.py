"""Tables, as text and as HTML, and one HTML page that needs no other file: its tables sort and
filter.

`write` makes a document, `Table.html` a part of one (a notebook shows it as it is: nothing in it
needs the script). Text is escaped here, and only here.
"""

import math
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple


class Folded(NamedTuple):
    """A cell that shows `short`, and `text` when it is opened."""

    short: str
    text: str
    plain: str  # what a table of text shows


Cell = str | int | float | Folded


class Table(NamedTuple):
    columns: Sequence[str]  # names
    rows: Sequence[Sequence[Cell]]  # each has a cell for every column

    def text(self, digits: int = 6) -> str:
        """Aligned columns, a line under the first row. digits: of a float."""
        rows = [tuple(plain(cell, digits) for cell in row) for row in self.rows]
        widths = [max(map(len, column)) for column in zip(self.columns, *rows, strict=True)]
        lines = [self.columns, ["-" * w for w in widths], *rows]
        lines = ["  ".join(c.ljust(w) for c, w in zip(x, widths, strict=True)) for x in lines]
        return "\n".join(line.rstrip() for line in lines)

    def html(self) -> str:
        """In a page it sorts by the column that is clicked, numbers as numbers (NaN above all), and
        one with a column "module" has a field that leaves the rows whose module holds what is
        typed; * stands for any text."""
        head = "".join(f'<th title="sort">{escape(name)}</th>' for name in self.columns)
        lines = ("".join(map(_cell, row)) for row in self.rows)
        body = "\n".join(f"<tr>{line}</tr>" for line in lines)
        return f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"


def write(path: str | os.PathLike, title: str, *parts: str) -> None:
    """A document of `parts`, which are HTML. Raises OSError if it cannot be written."""
    head = f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
    head += f"<style>{_STYLE}</style></head>\n<body><h1>{escape(title)}</h1>"
    end = f"<script>{_SCRIPT}</script></body></html>\n"
    Path(path).write_text("\n".join(["<!DOCTYPE html>", head, *parts, end]), encoding="utf-8")


def paragraph(text: str, tag: str = "p") -> str:
    """tag: "pre" for lines as they are."""
    return f"<{tag}>{escape(text)}</{tag}>"


def folded(short: str, part: str) -> str:
    """HTML that is seen when `short` is opened."""
    return f"<details><summary>{escape(short)}</summary>\n{part}</details>"


def plain(cell: Cell, digits: int) -> str:
    if isinstance(cell, float):
        return f"{cell:.{digits}g}"
    return cell.plain if isinstance(cell, Folded) else str(cell)


def _cell(cell: Cell) -> str:
    if isinstance(cell, Folded):
        short, text = escape(cell.short), escape(cell.text)
        return f"<td><details><summary>{short}</summary>{text}</details></td>"
    if isinstance(cell, str):
        return f"<td>{escape(cell)}</td>"
    return f'<td class="number">{cell:.4g}</td>'


def heat_map(
    rows: Sequence[str], columns: Sequence[str], values: dict[tuple[str, str], float],
    middle: float, plain: Sequence[str] = (),
) -> str:  # fmt: skip
    """An SVG of values[row, column] >= 0 and a legend: white at `middle`, blue to a tenth of it and
    below, red to ten times and above, black for NaN. What is missing stays empty. plain: columns
    without a colour."""
    wide, high, letter = 110, 20, 7  # of a cell, and of a character in its 12 px
    left = 10 + letter * max(map(len, rows), default=0)
    size = left + wide * max(len(columns), len(LEGEND)), high * (len(rows) + 3)
    # Text in the colour of the page's, so that it is seen on a dark one; cells have their own.
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]}" height="{size[1]}" '
        'style="display: block" fill="currentColor" font-family="monospace" font-size="12">'
    ]

    def text(x: int, y: int, words: str, style: str = "") -> str:
        return f'<text x="{x}" y="{y + 14}"{style}>{escape(words)}</text>'

    def cell(x: int, y: int, words: str, colours: tuple[str, str] | None) -> str:
        at, (fill, ink) = (left + wide * x, high * y), colours or ("", "currentColor")
        rect = (
            f'<rect x="{at[0]}" y="{at[1]}" width="{wide - 1}" height="{high - 1}" fill="{fill}"/>'
        ) * (colours is not None)
        style = f' text-anchor="middle" fill="{ink}"'
        return rect + text(at[0] + wide // 2, at[1], words, style)

    for x, column in enumerate(columns):
        style = ' text-anchor="middle" font-size="9"'
        parts.append(text(left + wide * x + wide // 2, 0, column, style))
    for y, row in enumerate(rows, 1):
        parts.append(text(4, high * y, row))
        for x, column in enumerate(columns):
            value = values.get((row, column))
            if value is not None:
                colours = None if column in plain else _colours(value / middle)
                title = escape(f"{row}, {column}: {value:.6g}")
                parts.append(f"<g><title>{title}</title>{cell(x, y, f'{value:.3g}', colours)}</g>")
    for x, (words, ratio) in enumerate(LEGEND.items()):
        parts.append(cell(x, len(rows) + 2, words.format(ratio * middle), _colours(ratio)))
    return "".join([*parts, "</svg>"])


LEGEND = {"{:.3g} or less": 0.1, "{:.3g}": 1.0, "{:.3g} or more": 10.0, "not a number": math.nan}


def _colours(ratio: float) -> tuple[str, str]:
    """(the colour of a cell, that of the number in it), of a contrast of at least 4.5."""
    if math.isnan(ratio):
        return "black", "white"
    t = max(-1.0, min(1.0, math.log10(max(ratio, 1e-9))))
    pale = round(255 * (1 - abs(t)) + LEAST * abs(t))
    return (f"rgb(255,{pale},{pale})" if t > 0 else f"rgb({pale},{pale},255)"), "black"


LEAST = 110  # black on rgb(110,110,255) has a contrast of 5.3


_STYLE = """
:root { color-scheme: light dark; font-family: sans-serif }
table { border-collapse: collapse; font-size: 13px }
th { text-align: left; cursor: pointer; border-bottom: 1px solid; padding: 3px 8px }
td { vertical-align: top; padding: 2px 8px; white-space: nowrap }
details { min-width: 24em; white-space: normal }
td.number { text-align: right }
tbody tr:nth-child(even) { background: #8881 }
input { display: block; margin: 8px 0; width: 24em }
"""

# Under each table's head; a row's cells are compared as numbers where the column has them.
_SCRIPT = r"""
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, i) => head.addEventListener("click", () => {
    const down = head.dataset.sorted === "up" ? -1 : 1;
    heads.forEach(other => delete other.dataset.sorted);
    head.dataset.sorted = down === 1 ? "up" : "down";
    const key = row => row.cells[i].textContent;
    const compare = (a, b) => isNaN(a) || isNaN(b) ? a.localeCompare(b, "en", {numeric: true})
                                                   : (+a > +b) - (+a < +b);
    body.append(...[...body.rows].sort((a, b) => down * compare(key(a), key(b))));
  }));
  const module = heads.findIndex(head => head.textContent === "module");
  if (module < 0) continue;
  const filter = document.createElement("input");
  filter.placeholder = "module: blocks.*.attn";
  filter.addEventListener("input", () => {
    const words = filter.value.trim().split("*").map(x => x.replace(/[.+?^${}()|[\]\\]/g, "\\$&"));
    const wanted = new RegExp(words.join(".*"), "i");
    for (const row of body.rows) row.hidden = !wanted.test(row.cells[module].textContent);
  });
  table.before(filter);
}
"""
