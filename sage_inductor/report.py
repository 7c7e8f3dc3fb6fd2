"""What became of every attention call: the sites that the pass saw, also when a cache was warm.

Told without being asked: where all calls stay as they were, a warning says why and what to do
(`record`). Asked: `report`. While it happens: the log "sage_inductor", a line a call.
"""

import atexit
import collections
import datetime
import itertools
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Sequence

import torch

from sage_inductor import page
from sage_inductor.choose import tables
from sage_inductor.choose.families import versions
from sage_inductor.errors import SageRefused
from sage_inductor.ops.compat import CompileContext, counters
from sage_inductor.ops.notes import NOTES
from sage_inductor.patterns import Site
from sage_inductor.patterns.reasons import Cause, Reason
from sage_inductor.policy import Ruling, stages_of, unmatched
from sage_inductor.session import session
from sage_inductor.stages import unnamed

log = logging.getLogger("sage_inductor")

_warned_of: set[Cause] = set()  # that were warned of
_lock = threading.Lock()

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
        if isinstance(index, slice):
            return Report(self._sites[index])
        return self._sites[index][1]

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
                + (used or f"sage on {_device_name(self[0])}"), *stay]  # fmt: skip
        for stage, sites in by_stage.items():
            used, stay = _verdict(sites)
            rewritten = sum(site.rewritten for site in sites)
            use = f"{rewritten} {'uses' if rewritten == 1 else 'use'} {used}"
            text.append(f"in {stage} " + ", ".join([use] * bool(used) + stay))
        return "; ".join(text)

    def __str__(self):
        if not self:
            return "\n".join([self.verdict, *self._notes])
        columns, *rows = self._shown([row for row, _ in self._grouped()])
        rows = [tuple(map(_text, row)) for row in rows]
        advice = remedies(self.refused)
        lines = [self.verdict, "", table([columns, *rows]), *([""] if advice else []), *advice]
        lines += self._notes
        return "\n".join(lines)

    def __repr__(self):
        return f"<Report: {self.verdict}>"

    def _repr_html_(self):
        parts = [page.paragraph(self.verdict), self._table_of_groups() if self else ""]
        return "\n".join([*parts, *map(page.paragraph, [*remedies(self.refused), *self._notes])])

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
            {"graph": graph}
            | {name: getattr(site, name) for name in names}
            | {
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
        both = []
        if self:
            rows = [(graph, *_cells([site])[:-1], folded(site)) for graph, site in self._sites]
            columns, *rows = self._shown(rows, "count")
            every_call = page.folded("every call", page.table(columns, rows))
            both = [self._table_of_groups(), every_call]
        before = map(page.paragraph, [self.verdict, *remedies(self.refused)])
        after = map(page.paragraph, [*self._notes, made_with(self)])
        parts = *before, *both, *after
        text = page.page("sage_inductor: attention calls", *parts)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)

    def _table_of_groups(self) -> str:
        """HTML. A row's modules are folded, so that the filter finds each of them."""
        rows = []
        for (graph, where, *cells, _), group in self._grouped():
            modules = list(dict.fromkeys(_module(site) for _, site in group))
            module = where if len(modules) == 1 else page.Folded(where, ", ".join(modules))
            rows.append((graph, module, *cells, folded(group[0][1])))
        columns, *rows = self._shown(rows)
        return page.table(columns, rows)

    def _shown(self, rows: list[tuple], *without: str) -> list[tuple]:
        """Their columns' names, then the rows, without columns that say nothing: of one graph, of
        a k that is as q in every call, and those that are empty."""
        says_something = {
            "graph": len({graph for graph, _ in self._sites}) > 1,
            "k": any(site.q != site.k for site in self),
            **dict.fromkeys(without, False),
        }
        filled = [any(cell != "" for cell in column) for column in zip(*rows, strict=True)]
        kept = [i for i, name in enumerate(COLUMNS) if says_something.get(name, filled[i])]
        names = COLUMNS if says_something["k"] else ["q, k" if x == "q" else x for x in COLUMNS]
        return [tuple(row[i] for i in kept) for row in [names, *rows]]

    def _grouped(self) -> list[tuple[tuple[page.Cell, ...], list[tuple[str, Site]]]]:
        """(cells of a row, its calls with their graphs)."""
        groups = grouped(
            self._sites,
            path=lambda each: _module(each[1]),
            same=lambda each: [_of_any_layer(_text(cell)) for cell in _cells([each[1]])[2:]],
        )
        rows = []
        for where, group in groups:
            graphs = list(dict.fromkeys(graph for graph, _ in group))
            which = ", ".join(graphs) if len(graphs) <= 3 else f"{len(graphs)} graphs"
            _, *cells = _cells([site for _, site in group])
            rows.append(((which, where, *cells), group))
        return rows


def _cells(sites: list[Site]) -> tuple[page.Cell, ...]:
    """What a row says of equal calls, from "module" on."""
    site = sites[0]
    q, k = (str(list(x)).replace("'", "") for x in (site.q, site.k))
    recipe = site.recipe or "-"
    return (
        _module(site), f"x{len(sites)}", _numbers([_module(site) for site in sites]), site.spelling,
        q, k, site.dtype, site.mask, site.stage or "", recipe, *(site.decision.times or ("", "")),
        site.reason,
    )  # fmt: skip


def _text(cell: page.Cell) -> str:
    return f"{cell:.3g}" if isinstance(cell, float) else str(cell)


def _kinds(sites: Iterable[Site]) -> list[tuple[Reason, int]]:
    """Of calls that stay: the first reason of each kind, and how many calls it has."""
    kinds = collections.defaultdict(list)
    for site in sites:
        kinds[site.why.kind].append(site.why)
    return [(each[0], len(each)) for each in kinds.values()]


def _verdict(sites: list[Site]) -> tuple[str, list[str]]:
    """Recipes, and what stays and why, if anything does."""
    recipes = collections.Counter(site.recipe for site in sites if site.rewritten)
    kinds = _kinds(site for site in sites if not site.rewritten)
    causes = collections.Counter({reason.short: n for reason, n in kinds})
    n = causes.total()
    stay = [f"{n} {'stays' if n == 1 else 'stay'}: {counts(causes)}"] if causes else []
    return counts(recipes) if recipes else "", stay


def _of_any_layer(text: str) -> str:
    """A reason may name nodes of its layer: the scores `softmax_3`."""
    return re.sub(r"_\d+`", "`", text)


def _module(site: Site) -> str:
    """As a policy says it."""
    return site.module or '""'


def folded(site: Site) -> page.Cell:
    if site.rewritten:
        return site.reason
    return page.Folded(site.why.short, f"{site.why}. What to do: {site.why.cause.remedy}.")


def remedies(sites: Iterable[Site]) -> list[str]:
    """Of calls that stay: a line for each kind of reason."""
    kinds = (reason for reason, _ in _kinds(sites) if not reason.cause.requested)
    return [f"{reason.short}: {reason.cause.remedy}" for reason in kinds]


def made_with(sites: Sequence[Site]) -> str:
    """One line of versions, the device and the date."""
    each = [f"{name} {version}" for name, version in versions().items()]
    devices = dict.fromkeys(map(_device_name, sites))
    return ", ".join([*each, *devices, datetime.date.today().isoformat()])


def counts(counter: collections.Counter) -> str:
    """Such as "sage1", or "sage1 (2), sage2-8b (1)", the most frequent first."""
    if len(counter) == 1:
        return next(iter(counter))
    return ", ".join(f"{name} ({n})" for name, n in counter.most_common())


def number_of(n: int, what: str) -> str:
    """Such as "1 call", or "2 calls"."""
    return f"{n} {what}{'s' * (n != 1)}"


def path_of(site: Site) -> str:
    """What a row calls the place of a call: its module or, where no module makes it, its node."""
    return site.module or site.call


def sizes(site: Site) -> tuple[str, ...]:
    """Cells of q, k, dtype and mask, of a call that ran."""
    return str(list(site.q)), str(list(site.k)), site.dtype, site.mask


def grouped(items: Iterable, path: Callable, same: Callable) -> list[tuple[str, list]]:
    """`items` that are equal but for the numbers in their path, together and in order:
    ("blocks.*.attn2", [...]), with stars where the numbers differ. path(item): its path;
    same(item): what is compared beside it."""
    groups = collections.defaultdict(list)
    for item in items:
        groups[(re.sub(r"\d+", "*", path(item)), *same(item))].append(item)
    return [(_glob([path(item) for item in group]), group) for group in groups.values()]


def _pieces(paths: list[str]) -> list[tuple[str, ...]]:
    """What each path has, number by number and between them."""
    return list(zip(*(re.split(r"(\d+)", path) for path in paths), strict=True))


def _glob(paths: list[str]) -> str:
    return "".join(piece[0] if len(set(piece)) == 1 else "*" for piece in _pieces(paths))


def _numbers(paths: list[str]) -> str:
    """What the stars of their glob stand for: "0-11", "0, 46-47", and of two stars "0-1; 0-5"."""
    return "; ".join(_ranges(set(map(int, p))) for p in _pieces(paths) if len(set(p)) > 1)


MOST_RANGES = 4


def _ranges(numbers: set[int]) -> str:
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    if len(runs) > MOST_RANGES:
        return f"{len(numbers)} of {runs[0][0]}-{runs[-1][1]}"
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def table(rows: list[tuple[str, ...]]) -> str:
    """Aligned columns, a line under the first row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [rows[0], tuple("-" * w for w in widths), *rows[1:]]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in lines]
    return "\n".join(line.rstrip() for line in lines)


MOST_SHOWN = 20  # rows of a printed table of errors


def table_of_errors(
    rows: Sequence, head: tuple[str, ...], recipes: Sequence[str], where: Callable, same: Callable,
    number: Callable, names: tuple[str, str], more: Callable = lambda rows: (),
) -> list[str]:  # fmt: skip
    """Lines, none without rows. rows: of a call and a recipe each, the worst first. head: "module",
    "count", and what `same` and `more` give cells of; behind them come those of the recipes that
    have rows. number(row): what is shown of a recipe, the worst of each row's calls; names: what
    that is, and several of it. more(rows): cells of one row of the table."""
    shown, lines = [name for name in recipes if any(name == row.recipe for row in rows)], []
    for path, group in grouped(rows, where, same):
        worst = {row.recipe: row for row in reversed(group)}
        numbers = (f"{number(worst[x]):.3g}" if x in worst else "-" for x in shown)
        cells = (path, f"x{_calls_of(group)}", *same(group[0]), *more(group), *numbers)
        lines.append((max((worst[x].badness for x in shown if x in worst), default=0.0), cells))
    cells = [cells for _, cells in sorted(lines, key=lambda line: -line[0])]
    rest = len(cells) - MOST_SHOWN
    told = f"{names[0]}, the worst of each row's calls; more: print(found.details())"
    others = [f"and {rest} rows of smaller {names[1]}"] * (rest > 0)
    return ["", table([(*head, *shown), *cells[:MOST_SHOWN]]), *others, told] if cells else []


def _calls_of(rows: list) -> int:
    """How many calls these are, each in a row a recipe. Where graphs do not know their module's
    name, calls of several graphs have one name."""
    if rows[0].site.module:
        return len({(row.site.module, row.site.call) for row in rows})
    return max(collections.Counter(row.recipe for row in rows).values())


def not_measured(sites: Sequence[Site]) -> list[str]:
    """Lines."""
    return [
        f"{where} x{len(group)} ({group[0].spelling}): {group[0].reason}"
        for where, group in grouped(sites, path_of, lambda x: (x.spelling, x.reason))
    ]


def report() -> Report:
    """Every attention call compiled so far in this process (since `torch._dynamo.reset()`).

    The same as a log, a line for each call while it is compiled, begins with the graph's number:

        TORCH_LOGS="sage_inductor" python program.py
        torch._logging.set_logs(modules={"sage_inductor": logging.INFO})

    Where Python's own logging is set up, the logger "sage_inductor" at level INFO has it.

    Returns a Report of what was compiled until now: it does not grow afterwards.
    """
    now = session()
    with _lock:
        notes = [line for each in now.calls.items() for line in unmatched(*each)]
        known = set(itertools.chain(*map(stages_of, now.policies)))
        unknown = sorted(now.stages - known) if now.sites else []
        notes += [unnamed(name, known) for name in unknown]
        notes += [note for each in more_notes for note in each()]
        notes += NOTES.values()
        return Report(now.sites, [*notes, *now.seen.left_to_eager()], now.seen.why_without())


more_notes: list[Callable[[], list[str]]] = []  # lines for the report's foot, of other modules


def ends_in_graph_break(gm: torch.fx.GraphModule) -> bool:
    """Whether the function that Dynamo captured `gm` from goes on after it."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return reason is not None and reason.graph_break


def record(sites: list[Site], policy: Ruling = (), graph_break: bool = False) -> None:
    """Add the sites of the graph that is being compiled, by `policy`: report, counters, log.

    Where every call of the report stays as it was, this warns: once in a process for each cause
    (a row of patterns/reasons.py), and not where the user asked for it. A warning says why the
    calls stay, on which device, and what to do. After a `graph_break` the same function's next
    graph may have the calls that are rewritten, so the warning waits for its last graph; where that
    has no operation and is never compiled, for the process's end.
    """
    now = session()
    compile_id = CompileContext.current_compile_id()
    graph = str(compile_id) if compile_id is not None else "-"
    with _lock:
        now.seen.graphs += 1
        now.sites.extend((graph, site) for site in sites)
        if sites and policy not in now.policies:
            now.policies.append(policy)
        if sites and isinstance(policy, tuple):
            now.calls.setdefault(policy, set()).update((graph, site.module) for site in sites)
    for site in sites:
        counters["sage"]["rewritten" if site.rewritten else "refused"] += 1
        what = f"becomes {site.recipe}" if site.rewritten else "stays as it was"
        log.info("%s %s: %s", path_of(site), what, site.reason)
    if not graph_break:
        _warn_if_all_stay()


@atexit.register
def _warn_if_all_stay() -> None:
    found = report()
    if found.rewritten:
        return
    causes = collections.defaultdict(list)
    for site in not_requested(found):
        causes[site.why.cause].append(site)
    for cause, sites in causes.items():
        with _lock:
            known = cause in _warned_of
            _warned_of.add(cause)
        if not known:
            log.warning("%s", _warning(sites, len(found)))


def _warning(sites: list[Site], total: int) -> str:
    reason = sites[0].why
    some = "" if len(sites) == total else f" ({number_of(len(sites), 'call')})"
    return (
        f"sage_inductor: 0 of {total} attention calls use sage on {_device_name(sites[0])}: "
        f"{reason.short}{some}; {reason.cause.remedy}"
    )


def _device_name(site: Site) -> str:
    if site.device.startswith("cuda") and torch.cuda.is_available():
        return tables.gpu_name(torch.device(site.device))
    return site.device.upper()


def not_requested(sites: Iterable[Site]) -> list[Site]:
    """The calls that stay as they were, but for those that the user himself switched off."""
    return [s for s in sites if not s.rewritten and not s.why.cause.requested]


def whole(
    sites: list[tuple[str, Site]], policy: Ruling, without: str = "", notes: Sequence[str] = ()
) -> Report:
    """The complete report of a model, whose graphs were all seen: it warns at once of a rule that
    fits no call, and of calls without a path that a rule names. without: why there are no sites."""
    calls = [(graph, site.module) for graph, site in sites]
    unused = unmatched(policy, calls) if isinstance(policy, tuple) else []
    for line in unused:
        log.warning("%s", line)
    return Report(sites, [*unused, *notes], without)


def raise_if_refused(sites: list[Site]) -> None:
    refused = not_requested(sites)
    if refused:
        groups = grouped(refused, path_of, lambda site: [_of_any_layer(site.reason)])
        calls = "; ".join(
            f"{where}{f' x{len(of)}' if len(of) > 1 else ''}: {of[0].reason}"
            for where, of in groups
        )
        were = "stays as it was" if len(refused) == 1 else "stay as they were"
        total = number_of(len(refused), "attention call")
        raise SageRefused(f"sage.strict: {total} {were}: {calls}")
