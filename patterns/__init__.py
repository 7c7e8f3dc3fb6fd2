"""Which attention calls become sage calls, and why the others do not: graph -> graph."""

import torch

from sage_inductor.patterns.sdpa import Settings, Site
from sage_inductor.patterns.sdpa import rewrite as _rewrite_sdpa

__all__ = ["Settings", "Site", "rewrite"]


def rewrite(gm: torch.fx.GraphModule, settings: Settings) -> list[Site]:
    """Rewrite every SDPA call of `gm` and of the graphs nested in it, in place."""
    sites = []
    for module in gm.modules():
        if isinstance(module, torch.fx.GraphModule):
            found = _rewrite_sdpa(module.graph, settings)
            if any(site.rewritten for site in found):
                module.recompile()
            sites += found
    return sites
