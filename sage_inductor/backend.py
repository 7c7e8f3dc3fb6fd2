"""The front door: ``torch.compile(model, backend="sage")``.

The pass runs on the graph Dynamo captured, before Inductor sees it: there an attention call is one
node with all its arguments, whatever the device, dtype and grad mode, and the rewritten graph is
what every cache is keyed on. This is the one file that touches Inductor's options.
"""

import dataclasses

import torch
from torch._dynamo.exc import ShortenTraceback
from torch._guards import CompileContext
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.virtualized import V

from sage_inductor import (
    config,
    lowering,  # noqa: F401  (registers what the inserted op opens into)
    tune,
)
from sage_inductor import report as reports
from sage_inductor.decide import Settings, rewrite
from sage_inductor.ops.recipe import source_tag
from sage_inductor.patterns import Site
from sage_inductor.policy import Policy

PREFIX = "sage."
OPTIONS = ("recipe", "policy", "emulate", "force", "strict", "enabled", "mode")
AUTOTUNED = ("max-autotune", "max-autotune-no-cudagraphs")  # modes that time calls, not read tables


class _UserError(ShortenTraceback):
    """Dynamo re-raises a ShortenTraceback as it is, not wrapped in BackendCompilerFailed."""

    def __init__(self, message: str):
        super().__init__(message, first_useful_frame=None)


class SageOptionError(_UserError, ValueError):
    """An option of ``torch.compile(..., options=...)`` that cannot be."""


class SageRefused(_UserError):
    """``sage.strict``: an attention call stays as it was."""


def sage_backend(gm: torch.fx.GraphModule, example_inputs, *, mode=None, options=None, **kwargs):
    """Inductor, with the attention calls of `gm` rewritten where that pays.

    mode: Inductor's; under ``max-autotune`` and ``max-autotune-no-cudagraphs`` a call's recipes and
    their tiles are timed beside SDPA's backends while compiling. options: Inductor's, beside
    ``sage.recipe``, ``sage.policy``, ``sage.emulate``, ``sage.force``, ``sage.strict``,
    ``sage.enabled`` (see sage_inductor/config.py) and ``sage.mode`` (the mode, for use together
    with options, which torch.compile itself does not allow).

    Raises SageOptionError (a ValueError) for an unknown or ill-typed ``sage.`` option, and
    SageRefused under ``sage.strict``.
    """
    ours, theirs = split_options(options or {})
    ours = {"mode": mode, **ours}
    sites = rewrite(gm, settings(ours))
    inductor = torch._TorchCompileInductorWrapper(ours["mode"], theirs, None)
    compiled = inductor(gm, example_inputs)
    # Not before: Dynamo may have abandoned the graph meanwhile, to trace it again with a number
    # (a scale that the caller passes, say) as a constant.
    reports.record(sites)
    if ours.get("strict", config.strict):
        raise_if_refused(sites)
    return compiled


# ``torch._dynamo.reset()`` calls it: what Inductor's own backend forgets (CUDA graph trees).
sage_backend.reset = torch._TorchCompileInductorWrapper(None, None, None).reset


def settings(options: dict, **overrides) -> Settings:
    """The pass's settings: options (without their prefix), over the config."""
    names = ("recipe", "emulate", "force", "strict")
    values = {name: options.get(name, getattr(config, name)) for name in names}
    if not options.get("enabled", True):
        return Settings(**values | {"recipe": "off"}, **overrides)
    if options.get("mode") in AUTOTUNED:
        values["clock"] = tune.race
    path = options.get("policy", config.policy)
    try:
        rules = Policy.load(path).rules if path else ()
    except ValueError as error:  # the file has changed since it was checked
        raise SageOptionError(str(error)) from None
    return Settings(**values, policy=rules, **overrides)


def split_options(options: dict) -> tuple[dict, dict]:
    """({name: value} of the ``sage.`` options, Inductor's options)."""
    ours = {k.removeprefix(PREFIX): v for k, v in options.items() if k.startswith(PREFIX)}
    theirs = {k: v for k, v in options.items() if not k.startswith(PREFIX)}
    for name, value in ours.items():
        if name not in OPTIONS:
            raise SageOptionError(f"{config.unknown(name, OPTIONS, PREFIX)} (got {value!r})")
        if name == "mode":
            modes = list(torch._inductor.list_mode_options())
            if value not in modes:
                raise SageOptionError(f"{PREFIX}mode must be one of {modes}, got {value!r}")
        else:
            try:
                config.check(name, value, PREFIX)
            except ValueError as error:
                raise SageOptionError(str(error)) from None
    return ours, theirs


def raise_if_refused(sites: list[Site]) -> None:
    refused = [f"{s.module or s.call}: {s.reason}" for s in sites if not s.rewritten]
    if refused:
        calls = "; ".join(refused)
        raise SageRefused(f"sage.strict: {len(refused)} attention calls stay as they were: {calls}")


def explain(model, *args, options: dict | None = None, **kwargs) -> reports.Report:
    """Run `model` once and say what ``backend="sage"`` would do with each attention call.

    Nothing is compiled. Like ``torch._dynamo.explain``, it resets Dynamo's caches.
    """
    sites = []

    def see(gm: torch.fx.GraphModule) -> None:
        found = rewrite(gm, settings(split_options(options or {})[0]))
        sites.extend((str(CompileContext.current_compile_id()), site) for site in found)

    run_graphs(see, model, args, kwargs)
    return reports.Report(sites)


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


class SagePass(CustomGraphPass):
    """The same rewrite as Inductor's ``pre_grad_custom_pass``, for ``backend="inductor"``.

    Installed while ``sage_inductor.config.enabled`` is set; reads the config when it runs.
    timing_before: what ``pre_grad_pass_timing`` was before, to be put back."""

    def __init__(self, timing_before: str | None = None):
        self.timing_before = timing_before

    def __call__(self, graph: torch.fx.Graph) -> None:
        gm = graph.owning_module
        found = self._settings()
        # Inductor applies a pre-grad pass to nested graphs too; a site is decided once.
        sites = rewrite(gm, found)
        reports.record(sites)
        if found.strict:
            raise_if_refused(sites)

    def uuid(self):
        return (source_tag(), dataclasses.astuple(self._settings()))

    @staticmethod
    def _settings() -> Settings:
        # AOTInductor runs the pass too: what it compiles becomes a package.
        return settings({}, portable=V.aot_compilation is True)


class PassList(CustomGraphPass):
    """Several passes in Inductor's one place for them (torch 2.11 takes no list)."""

    def __init__(self, passes: list):
        self.passes = passes

    def __call__(self, graph: torch.fx.Graph) -> None:
        for each in self.passes:
            each(graph)

    def uuid(self):
        ids = [each.uuid() if isinstance(each, CustomGraphPass) else None for each in self.passes]
        return None if None in ids else tuple(ids)  # None: not cached, as for the pass alone


def install_pass(on: bool) -> None:
    """Put SagePass beside the passes in ``torch._inductor.config.pre_grad_custom_pass``, or take
    it out. torch 2.13 would run it after the cache lookup (and a warm cache would leave the report
    empty): it is asked to run before."""
    current = inductor_config.pre_grad_custom_pass
    if current is None:
        passes = []
    elif isinstance(current, PassList):
        passes = current.passes
    else:
        passes = list(current) if isinstance(current, (list, tuple)) else [current]
    installed = [each for each in passes if isinstance(each, SagePass)]
    timing = getattr(inductor_config, "pre_grad_pass_timing", None)  # not in torch 2.11
    ours = installed[0] if installed else SagePass(timing)
    passes = [each for each in passes if each is not ours] + [ours] * on
    inductor_config.pre_grad_custom_pass = (
        PassList(passes) if len(passes) > 1 else passes[0] if passes else None
    )
    if timing is not None:
        inductor_config.pre_grad_pass_timing = "early" if on else ours.timing_before


if config.enabled:  # SAGE_INDUCTOR_ENABLED
    install_pass(True)
