"""What is found of attention calls, for people: a row for calls that are equal but for the numbers
in their module's path, errors by recipe, and what to do about calls that stay."""

import collections
import dataclasses
import datetime
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

import torch

from sage_inductor.choose import tables
from sage_inductor.choose.families import versions
from sage_inductor.patterns import Site
from sage_inductor.patterns.reasons import Reason
from sage_inductor.study import page

MOST_SHOWN = 20  # rows of a printed table of errors
MOST_RANGES = 4
COLUMNS = ("graph", "module", "count", "numbers", "call", "q", "k", "dtype", "mask", "stage",
           "recipe", "ms", "SDPA's ms", "reason")  # fmt: skip


class Report(Sequence):
    """The sites of some graphs, in the order they were compiled. `print` it for a verdict and a
    table, in which calls that are equal but for the numbers in their module's path are one row.
    Its column "numbers" says which numbers these are. Where a recipe's time was compared with
    SDPA's, "ms" is that of the recipe that the reason is about, with its preparation."""

    def __init__(
        self, sites: Sequence[tuple[str, Site]], notes: Sequence[str] = (), without: str = ""
    ):
        self._sites = tuple(sites)
        self._notes = tuple(notes)  # lines at the foot of the table
        self._without = without  # why there are no sites

    def __len__(self):
        return len(self._sites)

    def __getitem__(self, index):
        found = self._sites[index]
        return Report(found) if isinstance(index, slice) else found[1]

    @property
    def rewritten(self) -> list[Site]:
        """The calls that a recipe computes."""
        return [site for site in self if site.rewritten]

    @property
    def refused(self) -> list[Site]:
        """The calls that stay as they were."""
        return [site for site in self if not site.rewritten]

    @property
    def verdict(self) -> str:
        """One line: "114 of 171 attention calls use sage1; 57 stay: N < 3072", and what is
        different in stages: "in edge 171 stay: the policy says off"."""
        if not self:
            return f"no attention call was seen: {self._without or 'no graph has one'}"
        by_stage = collections.defaultdict(list)
        for site in self:
            by_stage[site.stage].append(site)
        usual = by_stage.pop(None, [])
        used, stay = _verdict(usual)
        text = [f"{sum(x.rewritten for x in usual)} of {len(usual)} attention calls use "
                + (used or f"sage on {device_name(self[0])}"), *stay]  # fmt: skip
        for stage, sites in by_stage.items():
            used, stay = _verdict(sites)
            rewritten = sum(site.rewritten for site in sites)
            use = f"{rewritten} {'uses' if rewritten == 1 else 'use'} {used}"
            text.append(f"in {stage} " + ", ".join([use] * bool(used) + stay))
        return "; ".join(text)

    def __str__(self):
        lines = ["", self._of_groups().text(3)] if self else []
        lines += ["", *advice] if (advice := remedies(self.refused)) else []
        return "\n".join([self.verdict, *lines, *self._notes])

    def __repr__(self):
        return f"<Report: {self.verdict}>"

    def _repr_html_(self):
        after = map(page.paragraph, [*remedies(self.refused), *self._notes])
        table = self._of_groups().html() if self else ""
        return "\n".join([page.paragraph(self.verdict), table, *after])

    def to_dicts(self) -> list[dict]:
        """A dict for each call, which JSON can hold: graph, module, call (the node's name),
        spelling, q, k, dtype, mask, device, stage, recipe, keep, ms, sdpa_ms, reason
        and remedy. q and k are lists of numbers, with text where a size is dynamic. recipe is None
        where the call stays SDPA, remedy where it is rewritten, keep where no block of keys is left
        out, and stage in the entry of all stages that have none of their own. ms and sdpa_ms are
        the times that were compared, predicted or measured: of the recipe that the reason is about,
        with its preparation, and of SDPA. They are None where no times decided."""
        names = "module call spelling q k dtype mask device stage recipe".split()
        return [
            {
                "graph": graph,
                **{name: getattr(site, name) for name in names},
                "q": list(site.q),
                "k": list(site.k),
                "keep": site.decision.selection and site.decision.selection.given(),
                **dict(zip(("ms", "sdpa_ms"), site.decision.times or (None, None), strict=True)),
                "reason": site.reason,
                "remedy": None if site.rewritten else site.why.cause.remedy,
            }
            for graph, site in self._sites
        ]

    def to_html(self, path: str | os.PathLike) -> None:
        """Write one page that needs no other file: the table of equal calls that `print` shows and,
        folded, a row for each call. Both sort by any column and filter by module. Reasons and
        remedies are folded, and the remedies stand once more before them. The versions come last.
        Raises OSError if the file cannot be written."""
        parts = [*map(page.paragraph, [self.verdict, *remedies(self.refused)])]
        if self:
            every = self._table([[call] for call in self._sites], "count").html()
            parts += [self._of_groups().html(), page.folded("every call", every)]
        parts += [*map(page.paragraph, self._notes), made_with(self)]
        page.write(path, "sage_inductor: attention calls", *parts)

    def _of_groups(self) -> page.Table:
        """A row for calls that are equal but for the numbers in their module's path."""

        def same(call: tuple[str, Site]) -> list[str]:
            return [of_any_layer(page.plain(cell, 3)) for cell in _cells([call])[4:]]

        groups = grouped(self._sites, lambda call: _cells([call])[1], same)
        return self._table([calls for _, calls in groups])

    def _table(self, groups: list[list[tuple[str, Site]]], *without: str) -> page.Table:
        """Without columns that say nothing: of one graph, of a k that is as q in every call, and
        those that are empty."""
        k_is_q = all(site.q == site.k for site in self)
        of_one_graph = len({graph for graph, _ in self._sites}) == 1
        without = {*without, *["k"] * k_is_q, *["graph"] * of_one_graph}
        names = ["q, k" if name == "q" and k_is_q else name for name in COLUMNS]
        columns = zip(names, *map(_cells, groups), strict=True)
        kept = [x for x in columns if x[0] not in without and any(cell != "" for cell in x[1:])]
        names, *rows = zip(*kept, strict=True)
        return page.Table(names, rows)


def _cells(calls: list[tuple[str, Site]]) -> tuple[page.Cell, ...]:
    """The row of equal calls. Its modules are folded: a page's filter finds each of them."""
    graphs = dict.fromkeys(graph for graph, _ in calls)
    modules = [site.module or '""' for _, site in calls]  # as a policy says it
    module, each, site = glob(modules), ", ".join(dict.fromkeys(modules)), calls[0][1]
    q, k = (str(list(x)).replace("'", "") for x in (site.q, site.k))
    return (
        ", ".join(graphs) if len(graphs) <= 3 else f"{len(graphs)} graphs",
        module if module == each else page.Folded(module, each, module), f"x{len(calls)}",
        numbers(modules), site.spelling, q, k, site.dtype, site.mask, site.stage or "",
        site.recipe or "-", *(site.decision.times or ("", "")), reason_of(site),
    )  # fmt: skip


def _verdict(sites: list[Site]) -> tuple[str, list[str]]:
    """Recipes, and what stays and why, if anything does."""
    recipes = collections.Counter(site.recipe for site in sites if site.rewritten)
    refused = kinds(site for site in sites if not site.rewritten)
    causes = collections.Counter({reason.short: n for reason, n in refused})
    n = causes.total()
    stay = [f"{n} {'stays' if n == 1 else 'stay'}: {counts(causes)}"] if causes else []
    return counts(recipes) if recipes else "", stay


def of_any_layer(text: str) -> str:
    """A reason may name nodes of its layer: the scores `softmax_3`."""
    return re.sub(r"_\d+`", "`", text)


@dataclasses.dataclass(frozen=True)
class Finding:
    """The error of one recipe at one attention call; where that ran several times, at its worst."""

    site: Site  # with the sizes it ran with
    recipe: str  # or "sdpa": scaled_dot_product_attention in the model's own dtype

    @property
    def badness(self) -> float:
        """`number`, what a table shows of the recipe, by which rows are compared."""
        return badness(self.number)

    @property
    def where(self) -> str:
        stage = self.site.stage
        return path_of(self.site) if stage is None else f"{path_of(self.site)} in {stage}"

    @property
    def sizes(self) -> tuple[str, ...]:
        """Cells of q, k, dtype and mask."""
        site = self.site
        return str(list(site.q)), str(list(site.k)), site.dtype, site.mask


def badness(error: float) -> float:
    """Errors in order: nothing is worse than NaN."""
    return math.inf if math.isnan(error) else error


def keep_worst(rows: dict, key, row: Finding) -> None:
    rows[key] = max(rows.get(key, row), row, key=lambda row: row.badness)


@dataclasses.dataclass(frozen=True, repr=False)
class Findings:
    """The errors of recipes at the attention calls of a model."""

    rows: tuple[Finding, ...]  # the worst first
    unmeasured: tuple[Site, ...]  # attention calls without rows; `reason` says why

    COLUMNS: ClassVar[tuple[str, ...]]  # of `details`: a row's `cells`
    HEAD: ClassVar[tuple[str, ...]]  # of the printed table: `_cells`, then a column for each recipe
    NUMBERS: ClassVar[tuple[str, str]]  # what that has of a recipe, and several of it

    def __repr__(self):
        return f"<{type(self).__name__}: {self.verdict}>"

    def details(self) -> str:
        """A table of every measured call and recipe, the worst first."""
        return self._every_row().text()

    def _every_row(self) -> page.Table:
        return page.Table(self.COLUMNS, [row.cells for row in self.rows])

    def _same(self, row: Finding) -> tuple[str, ...]:
        """Cells that are the same in a group of calls, and part the groups."""
        return row.sizes

    def _cells(self, group: list[Finding]) -> tuple[str, ...]:
        return self._same(group[0])

    def _table(self) -> list[str]:
        """Lines, none without rows. A group's number is that of its worst call."""
        shown, lines = [x for x in self.shown if any(x == row.recipe for row in self.rows)], []
        for path, group in grouped(self.rows, lambda row: row.where, self._same):
            worst = {row.recipe: row for row in reversed(group)}
            found = (f"{worst[x].number:.3g}" if x in worst else "-" for x in shown)
            cells = (path, f"x{_calls_of(group)}", *self._cells(group), *found)
            lines.append((max((worst[x].badness for x in shown if x in worst), default=0.0), cells))
        rows = [cells for _, cells in sorted(lines, key=lambda line: -line[0])]
        (number, several), left = self.NUMBERS, len(rows) - MOST_SHOWN
        table = page.Table(("module", "count", *self.HEAD, *shown), rows[:MOST_SHOWN]).text()
        others = [f"and {left} rows of smaller {several}"] * (left > 0)
        told = f"{number}, the worst of each row's calls; more: print(found.details())"
        return ["", table, *others, told] if rows else []

    def _not_measured(self) -> list[str]:
        groups = grouped(self.unmeasured, path_of, lambda site: (site.spelling, site.reason))
        return [f"{where} x{len(of)} ({of[0].spelling}): {of[0].reason}" for where, of in groups]

    def _foot(self) -> list[str]:
        """The end of a page."""
        rows = [(path_of(site), site.spelling, reason_of(site)) for site in self.unmeasured]
        table = page.Table(("module", "call", "not measured"), rows)
        told = [table.html(), *map(page.paragraph, remedies(self.unmeasured))] if rows else []
        return [*told, made_with([*(row.site for row in self.rows), *self.unmeasured])]

    @property
    def _without_rows(self) -> str:
        """The end of the verdict."""
        n = len(self.unmeasured)
        return f"; not measured: {number_of(n, 'call')}" * (n > 0)


def _calls_of(rows: list[Finding]) -> int:
    """How many calls these are, each in a row a recipe. Where graphs do not know their module's
    name, calls of several graphs have one name."""
    if rows[0].site.module:
        return len({(row.site.module, row.site.call) for row in rows})
    return max(collections.Counter(row.recipe for row in rows).values())


def number_of(n: int, what: str) -> str:
    """Such as "1 call", or "2 calls"."""
    return f"{n} {what}{'s' * (n != 1)}"


def counts(counter: collections.Counter) -> str:
    """Such as "sage1", or "sage1 (2), sage2-8b (1)", the most frequent first."""
    if len(counter) == 1:
        return next(iter(counter))
    return ", ".join(f"{name} ({n})" for name, n in counter.most_common())


def path_of(site: Site) -> str:
    """What a row calls the place of a call: its module or, where no module makes it, its node."""
    return site.module or site.call


def device_name(site: Site) -> str:
    if site.device.startswith("cuda") and torch.cuda.is_available():
        return tables.gpu_name(torch.device(site.device))
    return site.device.upper()


def made_with(sites: Iterable[Site]) -> str:
    """A paragraph of versions, the devices and the date."""
    each = [f"{name} {version}" for name, version in versions().items()]
    devices = dict.fromkeys(map(device_name, sites))
    return page.paragraph(", ".join([*each, *devices, datetime.date.today().isoformat()]))


def kinds(sites: Iterable[Site]) -> list[tuple[Reason, int]]:
    """The first reason of each kind, and how many calls it has."""
    found = collections.defaultdict(list)
    for site in sites:
        found[site.why.kind].append(site.why)
    return [(each[0], len(each)) for each in found.values()]


def remedies(sites: Iterable[Site]) -> list[str]:
    """A line for each kind of reason."""
    found = (reason for reason, _ in kinds(sites) if not reason.cause.requested)
    return [f"{reason.short}: {reason.cause.remedy}" for reason in found]


def reason_of(site: Site) -> page.Cell:
    if site.rewritten:
        return site.reason
    text = f"{site.why}. What to do: {site.why.cause.remedy}."
    return page.Folded(site.why.short, text, site.reason)


def grouped(items: Iterable, path: Callable, same: Callable) -> list[tuple[str, list]]:
    """`items` that are equal but for the numbers in their path, together and in order:
    ("blocks.*.attn2", [...]), with stars where the numbers differ. path(item): its path;
    same(item): what is compared beside it."""
    groups = collections.defaultdict(list)
    for item in items:
        groups[(re.sub(r"\d+", "*", path(item)), *same(item))].append(item)
    return [(glob([path(item) for item in group]), group) for group in groups.values()]


def _pieces(paths: list[str]) -> list[tuple[str, ...]]:
    """What each path has, number by number and between them."""
    return list(zip(*(re.split(r"(\d+)", path) for path in paths), strict=True))


def glob(paths: list[str]) -> str:
    return "".join(piece[0] if len(set(piece)) == 1 else "*" for piece in _pieces(paths))


def numbers(paths: list[str]) -> str:
    """What the stars of their glob stand for: "0-11", "0, 46-47", and of two stars "0-1; 0-5"."""
    return "; ".join(_ranges(set(map(int, p))) for p in _pieces(paths) if len(set(p)) > 1)


def _ranges(numbers: set[int]) -> str:
    firsts = sorted(n for n in numbers if n - 1 not in numbers)
    if len(firsts) > MOST_RANGES:
        return f"{len(numbers)} of {min(numbers)}-{max(numbers)}"
    lasts = sorted(n for n in numbers if n + 1 not in numbers)
    runs = zip(firsts, lasts, strict=True)
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
