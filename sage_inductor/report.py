"""What became of every attention call: the sites that the pass saw, also when a cache was warm."""

import logging
import threading
from collections.abc import Sequence

from sage_inductor.errors import SageRefused
from sage_inductor.ops.compat import CompileContext, cached_backends, counters
from sage_inductor.patterns import Site
from sage_inductor.policy import Rule, Ruling, unmatched

log = logging.getLogger("sage_inductor")

_sites: list[tuple[str, Site]] = []  # (graph, site)
_modules: dict[tuple[Rule, ...], set[str]] = {}  # that make attention calls, by the policy's rules
_lock = threading.Lock()


class Report(Sequence):
    """The sites of some graphs, in the order they were compiled. `print` it for a table."""

    def __init__(self, sites: Sequence[tuple[str, Site]], notes: Sequence[str] = ()):
        self._sites = tuple(sites)
        self._notes = tuple(notes)  # lines at the foot of the table

    def __len__(self):
        return len(self._sites)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return Report(self._sites[index])
        return self._sites[index][1]

    @property
    def rewritten(self) -> list[Site]:
        return [site for site in self if site.rewritten]

    @property
    def refused(self) -> list[Site]:
        return [site for site in self if not site.rewritten]

    def __str__(self):
        if not self:
            return "no attention call was seen: nothing was compiled, or no graph has one"
        rows = [("graph", "module", "call", "q", "k", "dtype", "mask", "recipe", "reason")]
        for graph, site in self._sites:
            q, k = (str(list(x)).replace("'", "") for x in (site.q, site.k))
            recipe = site.recipe or "-"
            where = site.module or '""'
            rows.append(
                (graph, where, site.spelling, q, k, site.dtype, site.mask, recipe, site.reason)
            )
        count = f"{len(self.rewritten)} of {len(self)} attention calls rewritten"
        return "\n".join((table(rows), count, *self._notes))

    def __repr__(self):
        return f"<Report: {len(self.rewritten)} of {len(self)} attention calls rewritten>"


def table(rows: list[tuple[str, ...]]) -> str:
    """Aligned columns, a line under the first row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [rows[0], tuple("-" * w for w in widths), *rows[1:]]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in lines]
    return "\n".join(line.rstrip() for line in lines)


def report() -> Report:
    """Every attention call compiled so far in this process (since `torch._dynamo.reset()`)."""
    with _lock:
        notes = [line for rules, modules in _modules.items() for line in unmatched(rules, modules)]
        return Report(_sites, notes)


def record(sites: list[Site], policy: Ruling = ()) -> None:
    """Add the sites of the graph that is being compiled, by `policy`: report, counters, log."""
    # torch._dynamo.reset() resets the backends listed here, and empties the list.
    cached_backends.setdefault(id(clear), _ClearOnReset)
    compile_id = CompileContext.current_compile_id()
    graph = str(compile_id) if compile_id is not None else "-"
    with _lock:
        _sites.extend((graph, site) for site in sites)
        if sites and isinstance(policy, tuple):
            _modules.setdefault(policy, set()).update(site.module for site in sites)
    for site in sites:
        counters["sage"]["rewritten" if site.rewritten else "refused"] += 1
        what = f"becomes {site.recipe}" if site.rewritten else "stays as it was"
        log.info("[%s] %s %s: %s", graph, site.module or site.call, what, site.reason)


def whole(sites: list[tuple[str, Site]], policy: Ruling) -> Report:
    """The report of a model of which nothing more is to be compiled: a rule that fits none of its
    calls is warned of at once."""
    modules = [site.module for _, site in sites]
    notes = unmatched(policy, modules) if isinstance(policy, tuple) else []
    for line in notes:
        log.warning("%s", line)
    return Report(sites, notes)


def raise_if_refused(sites: list[Site]) -> None:
    refused = [f"{s.module or s.call}: {s.reason}" for s in sites if not s.rewritten]
    if refused:
        calls = "; ".join(refused)
        raise SageRefused(f"sage.strict: {len(refused)} attention calls stay as they were: {calls}")


def clear() -> None:
    with _lock:
        _sites.clear()
        _modules.clear()


class _ClearOnReset:
    reset = staticmethod(clear)
