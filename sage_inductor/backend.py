"""The front door: ``torch.compile(model, backend="sage")``.

The pass runs on the graph Dynamo captured, before Inductor sees it: there an attention call is one
node with all its arguments, whatever the device, dtype and grad mode, and the rewritten graph is
what every cache is keyed on.
"""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import torch

from sage_inductor import lowering, patterns  # noqa: F401  (how Inductor takes our ops)
from sage_inductor.choose.decide import decide
from sage_inductor.errors import SageOptionError
from sage_inductor.inductor_pass import package_hash
from sage_inductor.ops import compat
from sage_inductor.ops.compat import CompileContext, InductorWrapper, inductor_config
from sage_inductor.ops.notes import NOTES
from sage_inductor.options import PREFIX, Options, Settings, resolve, split
from sage_inductor.patterns.call import Site
from sage_inductor.patterns.graph import copied, graph_modules, value_of
from sage_inductor.policy import stages_of
from sage_inductor.session import Seen, session
from sage_inductor.stages import by_stage
from sage_inductor.study import report
from sage_inductor.study.findings import Report

Function = TypeVar("Function", bound=Callable)
METADATA = "aot_inductor.metadata"


def sage_backend(gm: torch.fx.GraphModule, example_inputs, *, mode=None, options=None, **unknown):
    """Inductor, with the attention calls of `gm` rewritten where that pays.

    ``torch.compile(model, backend="sage", options={"sage.recipe": "sage1"})`` calls it.

    gm, example_inputs: what Dynamo gives a backend.
    mode: Inductor's; under ``max-autotune`` and ``max-autotune-no-cudagraphs`` a call's recipes and
    their tiles are timed with SDPA's backends while compiling.
    options: Inductor's, and those of docs/reference/options.md, which begin with ``sage.``.

    A policy that names stages (stages.py) gets a variant of the graph for each of them.

    Returns what Inductor returns: a function of the graph's inputs.

    Raises SageOptionError (a ValueError) for unknown arguments and for an unknown or ill-typed
    ``sage.`` option, and SageRefused under ``sage.strict``: before Inductor compiles the graph, and
    not for calls that the recipe or a rule of the policy switches off.
    """
    if unknown:
        names = ", ".join(sorted(unknown))
        raise SageOptionError(f'sage_backend takes mode and options, got {names}: see "sage.*"')
    ours, theirs = split(options or {})
    if options:
        _snapshot(options, ours.get("policy"))
    settings, graph_break = resolve({"mode": mode, **ours}), report.ends_in_graph_break(gm)
    compat.keep_out_of_precompile(gm)
    # While Inductor compiles, Dynamo may make a constant of a number that the caller passes (a
    # scale, say): it abandons the graph and traces it again.
    final = not any(isinstance(value_of(node), torch.SymFloat) for node in gm.graph.nodes)
    variants = _variants(gm, settings)
    sites = _sites_of_stages(variants)
    refused = settings.strict and report.not_requested(sites)
    compiled = None
    if not (refused and final):  # else Inductor's minutes would be for nothing
        inductor = InductorWrapper(settings.mode, _keyed_on_sources(theirs), None)
        compiled = _compile(variants, lambda: inductor(gm, example_inputs))
    report.record(sites, settings.policy, graph_break)  # after that: the graph was not abandoned
    if settings.strict:
        report.raise_if_refused(sites)
    return compiled


def _snapshot(options: dict, policy) -> None:
    """torch.compile holds the user's own dict, and takes a graph again where options are equal. So
    it gets a copy, which stays as it is when the user changes the dict. A relative path in it stays
    the file that it was."""
    name = PREFIX + "policy"
    if isinstance(policy, str) and policy:
        options[name] = policy
    given = options.get(name)
    own = options | {name: copy.deepcopy(given)} if isinstance(given, (dict, list)) else {**options}
    for each in compat.cached_backends.values():
        kwargs = getattr(each, "kwargs", {})
        if kwargs.get("options") is options:
            kwargs["options"] = own


class _Variant(NamedTuple):
    """What a graph becomes in a stage."""

    sites: list[Site]
    graphs: list[tuple[torch.fx.GraphModule, torch.fx.Graph]]  # it, and those nested in it

    @property
    def decisions(self) -> list[tuple]:
        """Variants with the same of these are the same graph."""
        return [(x.module, x.call, x.decision._replace(reason="", times=None)) for x in self.sites]

    def install(self) -> None:
        """Make the modules compute it."""
        for module, graph in self.graphs:
            if module.graph is not graph:
                module.graph = graph


def _variants(gm: torch.fx.GraphModule, settings: Settings) -> dict[str | None, _Variant]:
    """`gm` rewritten for no stage and for each that the policy names. Its modules keep what they
    hold, parameters too: only the graphs are several."""
    stages = (None, *stages_of(settings.policy))
    modules = graph_modules(gm)
    graphs, found = [each.graph for each in modules], {}
    for stage in stages:
        if len(stages) > 1:
            for module, graph in zip(modules, graphs, strict=True):
                module.graph = copied(graph)
        sites = patterns.rewrite(
            gm, functools.partial(decide, settings=dataclasses.replace(settings, stage=stage))
        )
        found[stage] = _Variant(sites, [(module, module.graph) for module in modules])
    return found


def _compile(variants: dict[str | None, _Variant], inductor: Callable) -> Callable:
    """Compile all variants now, each once: one that is compiled later would lack the guards on
    lengths."""
    done, of_stage = [], {}
    for stage, variant in variants.items():
        known = (run for decisions, run in done if decisions == variant.decisions)
        run = next(known, None)
        if run is None:
            variant.install()
            # A tracing context for each further variant. AOTAutograd writes into it, for example
            # which tensors a backward may overwrite, and a backward is compiled later, when it
            # first runs. In a shared context one took the last variant's tensors for its own, and
            # wrote into the user's gradient. There it also keeps what nested_compile_region names.
            own = copy.copy(compat.TracingContext.try_get())
            if own is not None:
                compat.forget_regions(own)
            with compat.tracing(own) if done else contextlib.nullcontext():
                run = inductor()
            done.append((variant.decisions, run))
        of_stage[stage] = run
    return done[0][1] if len(done) == 1 else by_stage(of_stage)


def _keyed_on_sources(options: dict) -> dict:
    """Inductor's options with a hash of our sources, so that torch's caches miss after a change. An
    op without a recipe's string says nothing of the sources: a cached forward was taken although
    the new one keeps other tensors. The hash is put into the metadata of packages, because no
    package is made here, and because a backward, which is compiled when it first runs, has the same
    options."""
    metadata = options.get(METADATA, inductor_config.aot_inductor.metadata)
    return options | {METADATA: metadata | {"sage_inductor": package_hash()}}


def _sites_of_stages(variants: dict[str | None, _Variant]) -> list[Site]:
    """The sites of no stage, and of each stage those that become something else there."""
    usual = variants[None].sites
    known = {(site.module, site.call): site.decision for site in usual}
    return usual + [
        dataclasses.replace(site, stage=stage)
        for stage, variant in variants.items()
        for site in variant.sites
        if stage is not None and known.get((site.module, site.call)) != site.decision
    ]


# ``torch._dynamo.reset()`` calls it: what Inductor's own backend forgets (CUDA graph trees).
sage_backend.reset = InductorWrapper(None, None, None).reset


def inputs_later(function: Function) -> Function:
    """Raises TypeError where inputs are given beside the model: what it returns takes them, and its
    repr says so."""
    name = function.__name__

    @functools.wraps(function)
    def checked(model, *inputs, **options):
        if inputs:
            raise TypeError(
                f"{name}(model)(*inputs): give the inputs to what {name}(model) returns"
            )
        run, what = function(model, **options), getattr(model, "__name__", type(model).__name__)
        run.__qualname__ = f"{name}({what}), to be called with the model's arguments,"
        return run

    return checked


@inputs_later
def explain(model, *, options: Options | dict | None = None) -> Callable[..., Report]:
    """``explain(model)(*args, **kwargs)`` runs `model` once on these arguments, and says what
    ``backend="sage"`` would do with each attention call.

    model: a module or a function. A module that is in eval mode runs under ``torch.no_grad()``, as
    in inference, unless an argument requires a gradient. All else runs with gradients as the caller
    has them.
    options: as of ``torch.compile``. Nothing is compiled. Like ``torch._dynamo.explain``, it resets
    Dynamo's caches.

    Returns a function of the model's arguments, which returns the Report.

    Raises SageOptionError for an unknown or ill-typed option, and TypeError for inputs beside the
    model, before the model runs, and then what the model raises.
    """
    settings = resolve(split(options or {})[0])

    def run(*args, **kwargs) -> Report:
        sites, seen = [], Seen()

        def see(gm: torch.fx.GraphModule) -> None:
            seen.graphs += 1
            variants = _variants(gm, settings)
            variants[None].install()
            graph = str(CompileContext.current_compile_id())
            sites.extend((graph, site) for site in _sites_of_stages(variants))

        needs_grad = any(getattr(x, "requires_grad", False) for x in (*args, *kwargs.values()))
        infers = not getattr(model, "training", True) and not needs_grad
        with op_by_op(see) as run_once, torch.no_grad() if infers else contextlib.nullcontext():
            run_once(model, args, kwargs)
            notes = [*NOTES.values(), *seen.left_to_eager()]
        return report.whole(sites, settings.policy, seen.why_without(), notes)

    return run


@contextlib.contextmanager
def op_by_op(see: Callable, all_graphs: bool = False) -> Iterator[Callable]:
    """Gives ``run(model, args, kwargs)``, which returns what `model` does. Its graphs run op by op,
    and ``see(gm)`` is called for each before its first run. All else in the block runs in eager.
    Dynamo's caches are empty before and after.

    all_graphs: also those of a function beyond the eight that Dynamo compiles if nobody says more;
    it leaves the rest to eager."""
    names = ("recompile_limit", "accumulated_recompile_limit") if all_graphs else ()
    limits = torch.compiler.config.patch(dict.fromkeys(names, 1 << 20))

    def look(gm, example_inputs):
        see(gm)
        for module in graph_modules(gm):
            module.recompile()
        return gm.forward

    def run(model, args: tuple, kwargs: dict):
        # What is compiled already, the model or a part of it, has a backend of its own.
        with torch.compiler.set_stance(force_backend=look):
            return torch.compile(model, backend=look)(*args, **kwargs)

    torch._dynamo.reset()
    session()  # the next reset forgets that these graphs were compiled
    try:
        with torch.compiler.set_stance("force_eager"), limits:
            yield run
    finally:
        torch._dynamo.reset()
