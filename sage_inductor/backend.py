"""The front door: ``torch.compile(model, backend="sage")``.

The pass runs on the graph Dynamo captured, before Inductor sees it: there an attention call is one
node with all its arguments, whatever the device, dtype and grad mode, and the rewritten graph is
what every cache is keyed on.
"""

import functools

import torch

from sage_inductor import (
    lowering,  # noqa: F401  (registers what the inserted op opens into)
    patterns,
    settings,
)
from sage_inductor.decide import decide, rewrite
from sage_inductor.errors import SageOptionError
from sage_inductor.ops.compat import CompileContext, InductorWrapper
from sage_inductor.patterns.graph import value_of
from sage_inductor.report import (
    Report,
    ends_in_graph_break,
    not_asked,
    raise_if_refused,
    record,
    whole,
)


def sage_backend(gm: torch.fx.GraphModule, example_inputs, *, mode=None, options=None, **unknown):
    """Inductor, with the attention calls of `gm` rewritten where that pays.

    mode: Inductor's; under ``max-autotune`` and ``max-autotune-no-cudagraphs`` a call's recipes and
    their tiles are timed beside SDPA's backends while compiling. options: Inductor's, beside
    ``sage.recipe``, ``sage.policy``, ``sage.emulate``, ``sage.force``, ``sage.strict``,
    ``sage.enabled`` and ``sage.mode`` (see sage_inductor/options.py).

    Raises SageOptionError (a ValueError) for unknown arguments and for an unknown or ill-typed
    ``sage.`` option, and SageRefused under ``sage.strict``: before Inductor compiles the graph, and
    not for calls that the recipe or a rule of the policy switches off.
    """
    if unknown:
        names = ", ".join(sorted(unknown))
        raise SageOptionError(f'sage_backend takes mode and options, got {names}: see "sage.*"')
    ours, theirs = settings.split(options or {})
    ours = {"mode": mode, **ours}
    asked, graph_break = settings.resolve(ours), ends_in_graph_break(gm)
    final = not _has_symbolic_floats(gm)
    sites = patterns.rewrite(gm, functools.partial(decide, settings=asked))
    refused = asked.strict and not_asked(sites)
    compiled = None
    if not (refused and final):  # else Inductor's minutes would be for nothing
        compiled = InductorWrapper(ours["mode"], theirs, None)(gm, example_inputs)
    # Recorded after compiling: until then Dynamo may abandon the graph, see _has_symbolic_floats.
    record(sites, asked.policy, graph_break)
    if asked.strict:
        raise_if_refused(sites)
    return compiled


def _has_symbolic_floats(gm: torch.fx.GraphModule) -> bool:
    """Whether Dynamo may abandon the graph while Inductor compiles it, and trace it again with a
    number that the caller passes (a scale, say) as a constant."""
    return any(isinstance(value_of(node), torch.SymFloat) for node in gm.graph.nodes)


# ``torch._dynamo.reset()`` calls it: what Inductor's own backend forgets (CUDA graph trees).
sage_backend.reset = InductorWrapper(None, None, None).reset


def explain(model, *args, options: dict | None = None, **kwargs) -> Report:
    """Run `model` once and say what ``backend="sage"`` would do with each attention call.

    Nothing is compiled. Like ``torch._dynamo.explain``, it resets Dynamo's caches.
    """
    sites, asked = [], settings.resolve(settings.split(options or {})[0])

    def see(gm: torch.fx.GraphModule) -> None:
        found = rewrite(gm, asked)
        sites.extend((str(CompileContext.current_compile_id()), site) for site in found)

    run_graphs(see, model, args, kwargs)
    return whole(sites, asked.policy)


def run_graphs(see, model, args: tuple, kwargs: dict) -> None:
    """Run `model` once, op by op, with ``see(gm)`` called for each graph before it runs."""

    def look(gm, example_inputs):
        see(gm)
        return gm.forward

    torch._dynamo.reset()
    try:
        torch.compile(model, backend=look)(*args, **kwargs)
    finally:
        torch._dynamo.reset()
