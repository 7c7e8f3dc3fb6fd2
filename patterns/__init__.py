"""Which attention calls become sage calls, and why the others do not: graph -> graph.

find     sdpa.py, modules.py, softmax/, ...        node -> Call, in SDPA's terms
prove    bands.py                                  what its mask says
judge    eligible.py                               can `sage::sdpa` stand for it
replace  replace.py, shared_kv.py                  and what calls or batches share, once

What a call becomes is said by the `decide` that the caller gives: Call -> Decision.
"""

import logging
from collections.abc import Callable

import torch

from sage_inductor.ops import compat
from sage_inductor.ops.notes import lost
from sage_inductor.ops.symbols import noting_guards
from sage_inductor.ops.visibility import FULL
from sage_inductor.patterns import flex, modules, packed, reasons, sdpa, sdpa_backends
from sage_inductor.patterns.call import Call, Decision, Site, gathered
from sage_inductor.patterns.graph import GraphIndex, graph_modules, value_of
from sage_inductor.patterns.masks.bands import prove
from sage_inductor.patterns.module_path import module_path
from sage_inductor.patterns.replace import replace, share
from sage_inductor.patterns.softmax import build as softmax

__all__ = ["Decision", "Site", "rewrite"]

FINDERS = (sdpa.find, sdpa_backends.find, softmax.find, modules.find, flex.find, packed.find)
_log = logging.getLogger("sage_inductor")


def rewrite(
    gm: torch.fx.GraphModule,
    decide: Callable[[Call], Decision],
    portable: bool = False,
    put: Callable[[Call, Site], None] | None = None,
) -> list[Site]:
    """Rewrite the attention calls of `gm` and of the graphs nested in it, in place; the sites, in
    the order of the graphs.

    decide: what becomes of a call. portable: only kernels that travel in an exported package. put:
    what is done to a call that gets a recipe, instead of replacing it.

    Never raises for a graph: a call that anything fails for stays as it was, and its site says so.
    Raises what `decide` says of the user's options (a ShortenTraceback).
    """

    def replaced(call: Call, site: Site) -> None:
        replace(call, site.decision, portable)

    sites = []
    for module in graph_modules(gm):
        requested = sdpa.written(module.graph)
        found = _rewrite_graph(module.graph, requested, decide, put or replaced)
        if requested or any(site.rewritten or site.decision.unrepeats for site in found):
            module.recompile()
        sites += found
    return sites


def _rewrite_graph(graph: torch.fx.Graph, requested: dict, decide, put) -> list[Site]:
    try:
        sites, index = [], GraphIndex(graph)
        index.requested = requested
    except Exception as error:  # noqa: BLE001  (a graph that nobody has seen must compile)
        _fault("a graph could not be read and stays as it was", error)
        return []
    for node in list(graph.nodes):
        if "sage" in node.meta:
            continue  # decided in an earlier pass over the graph
        try:
            site = _rewrite_call(node, index, decide, put)
        except compat.ShortenTraceback:  # of what the user asked for
            raise
        except Exception as error:  # noqa: BLE001  (as above)
            decision = Decision(None, reasons.UNREADABLE(type(error).__name__, error))
            site = Site(module_path(node), node.name, "?", (), (), "?", "?", decision)
            node.meta["sage"] = "kept"
        index.undo()
        sites += [site] if site else []
    if sum(site.rewritten for site in sites) > 1:
        try:
            share(index)
        except Exception as error:  # noqa: BLE001  (as above)
            _fault("calls do not share k and v: each prepares its own", error)
        index.undo()
    return sites


def _fault(what: str, error: Exception) -> None:
    """In the report, and in the log with its traceback."""
    what, error = f"{what}, which is a fault of ours", f"{type(error).__name__}: {error}"
    _log.exception("%s", lost(what, error))


def _rewrite_call(node: torch.fx.Node, index: GraphIndex, decide, put) -> Site | None:
    """The site of the call that `node` anchors, if it anchors one that was not decided before. What
    was inserted for a call that stays is left to the caller to take out."""
    if site := gathered(node):
        node.meta["sage"] = "kept"
        return site
    with noting_guards() as guards:
        call = next((call for find in FINDERS if (call := find(node, index))), None)
        if call is None or "sage" in call.node.meta:
            return None
        if call.refused is None and call.attn_mask is not None and call.band == FULL:
            q, k = (getattr(value_of(x), "shape", ()) for x in (call.q, call.k))
            if len(q) == len(k) == 4:
                call.band, rest = prove(call.attn_mask, q[2], k[2], index)
                if rest is not None and value_of(rest).dim() == 1:  # one bool for each key
                    rest = call.emit(torch.ops.aten.unsqueeze.default, rest, 0)
                call.attn_mask = rest
        decision = decide(call)
    if decision.name is not None:
        for guard in guards:
            guard()
    site = Site.of(call, decision)  # with the numbers that were guarded
    if site.rewritten:
        put(call, site)
        index.settle()
    else:
        if decision.unrepeats:
            sdpa.unrepeat(call)
            index.settle()  # an expand of one batch, say
        call.node.meta["sage"] = "kept"
    return site
