"""What became of every attention call: the sites that the pass saw, also when a cache was warm.

Told without being asked: where all calls stay as they were, a warning says why and what to do
(`record`). Asked: `report`. While it happens: the log "sage_inductor", a line a call.
"""

import atexit
import collections
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Sequence

import torch

from sage_inductor.errors import SageRefused
from sage_inductor.ops.compat import CompileContext, counters
from sage_inductor.ops.notes import NOTES
from sage_inductor.patterns import Site
from sage_inductor.policy import Ruling, stages_of, unmatched
from sage_inductor.session import session
from sage_inductor.stages import unnamed
from sage_inductor.study import findings
from sage_inductor.study.findings import Report, number_of, of_any_layer, path_of

log = logging.getLogger("sage_inductor")

_warned_of: set[tuple[str, str]] = set()  # what a cause says, and its remedy
_lock = threading.Lock()


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
        cause = site.why.cause
        causes[cause.short or cause.text, cause.remedy].append(site)
    for cause, sites in causes.items():
        with _lock:
            if cause in _warned_of:
                continue
            _warned_of.add(cause)
        some = "" if len(sites) == len(found) else f" ({number_of(len(sites), 'call')})"
        log.warning(
            "sage_inductor: 0 of %d attention calls use sage on %s: %s%s; %s", len(found),
            findings.device_name(sites[0]), sites[0].why.short, some, cause[1],
        )  # fmt: skip


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
    if refused := not_requested(sites):
        groups = findings.grouped(refused, path_of, lambda site: [of_any_layer(site.reason)])
        lines = (f"{x}{f' x{len(of)}' * (len(of) > 1)}: {of[0].reason}" for x, of in groups)
        were = "stays as it was" if len(refused) == 1 else "stay as they were"
        total = number_of(len(refused), "attention call")
        raise SageRefused(f"sage.strict: {total} {were}: {'; '.join(lines)}")
