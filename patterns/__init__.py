"""Which attention calls become sage calls, and why the others do not: graph -> graph.

find     sdpa.py, handwritten.py, modules.py, flex.py     node -> Call, in SDPA's terms
prove    masks.py                                         what its mask says
judge    eligible.py                                      can `sage::sdpa` stand for it
replace  replace.py                                       and what calls share, once

What a call becomes is said by the `decide` that the caller gives: Call -> Decision.
"""

from collections.abc import Callable

import torch

from sage_inductor.patterns import flex, handwritten, modules, sdpa
from sage_inductor.patterns.call import FULL, Call, Decision, Site, Survey, unreadable, value_of
from sage_inductor.patterns.masks import prove
from sage_inductor.patterns.replace import replace, share

__all__ = ["Decision", "Site", "rewrite"]

FINDERS = (sdpa.find, handwritten.find, modules.find, flex.find)


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
    """

    def replaced(call: Call, site: Site) -> None:
        replace(call, site.decision, portable)

    sites = []
    for module in gm.modules():
        if isinstance(module, torch.fx.GraphModule):
            found = _rewrite_graph(module.graph, decide, put or replaced)
            if any(site.rewritten for site in found):
                module.recompile()
            sites += found
    return sites


def _rewrite_graph(graph: torch.fx.Graph, decide: Callable, put: Callable) -> list[Site]:
    sites, survey = [], Survey(graph)
    for node in list(graph.nodes):
        try:
            call = _find(node, survey)
            site = Site.of(call, decide(call)) if call else None
        except Exception as error:  # a graph that nobody has seen yet must not stop a compilation
            sites.append(unreadable(node, error))
            continue
        if site is None:
            continue
        if site.rewritten:
            put(call, site)
        else:
            call.emit.undo()
            call.node.meta["sage"] = "kept"  # decided: a second pass over the graph leaves it alone
        sites.append(site)
    if sum(site.rewritten for site in sites) > 1:
        share(graph)
    return sites


def _find(node: torch.fx.Node, survey: Survey) -> Call | None:
    """The call that `node` anchors, unless it was decided before, with what its mask says."""
    call = next((call for find in FINDERS if (call := find(node, survey))), None)
    if call is None:
        return None
    if "sage" in call.node.meta:
        call.emit.undo()
        return None
    q, k = (getattr(value_of(x), "shape", ()) for x in (call.q, call.k))
    if call.refused is None and call.attn_mask is not None and len(q) == len(k) == 4:
        if call.band == FULL:
            call.band, call.attn_mask = prove(call.attn_mask, q[2], k[2], survey)
    return call
