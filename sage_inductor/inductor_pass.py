"""The same rewrite for ``backend="inductor"``: a pass of Inductor's, there while
``sage_inductor.config.rewrite_inductor`` is set. This is the only file that writes Inductor's
options.
"""

import dataclasses
import functools
from pathlib import Path

import torch

from sage_inductor import lowering, ops, patterns
from sage_inductor.choose import tables
from sage_inductor.choose.decide import rewrite
from sage_inductor.ops.compat import CustomGraphPass, inductor_config, virtualized
from sage_inductor.ops.notes import warn_once
from sage_inductor.ops.sources import hash_of
from sage_inductor.options import Settings, config, resolve
from sage_inductor.policy import stages_of
from sage_inductor.study.report import ends_in_graph_break, more_notes, raise_if_refused, record


class SagePass(CustomGraphPass):
    """Inductor's ``pre_grad_custom_pass``. It reads the config when it runs, and does nothing
    if `rewrite_inductor` is not set there.

    timing_before: what ``pre_grad_pass_timing`` was before, to be put back."""

    def __init__(self, timing_before: str | None = None):
        self.timing_before = timing_before

    def __call__(self, graph: torch.fx.Graph) -> None:
        if not config.rewrite_inductor:
            return
        settings = self._settings()
        if stages_of(settings.policy):
            # A pass turns a graph into one other graph, not into one for each stage.
            warn_once('rules of a policy that name a stage need backend="sage": they are left out')
        # Inductor applies a pre-grad pass to nested graphs too; a site is decided once.
        sites = rewrite(graph.owning_module, settings)
        record(sites, settings.policy, ends_in_graph_break(graph.owning_module))
        if settings.strict:
            raise_if_refused(sites)

    def uuid(self):
        settings = self._settings()
        if callable(settings.policy):  # nothing says whether its answers are those of last time
            return None
        return package_hash(), tables.in_force(), dataclasses.astuple(settings)

    @staticmethod
    def _settings() -> Settings:
        # AOTInductor runs the pass too: what it compiles becomes a package.
        return resolve({}, portable=virtualized.aot_compilation is True)


# Files and folders in this one's folder that no graph depends on: they report what became of calls,
# or call the rest. All others are hashed. So a new file is, until somebody lists it here.
DECIDES_NOTHING = ("__main__.py", "cli", "integrations", "study")


@functools.cache
def package_hash() -> str:
    """A hash of every source that generated code may depend on: of what finds calls, what decides
    and the tables it decides by, too."""
    rooms = (Path(x.__file__).parent for x in (ops, lowering, patterns))
    own = (x for x in Path(__file__).parent.iterdir() if x.name not in DECIDES_NOTHING)
    return hash_of((*own, *rooms))


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


PASS, TIMING = "pre_grad_custom_pass", "pre_grad_pass_timing"


def install_pass(on: bool, for_all: bool = False) -> None:
    """Put SagePass next to the passes in ``torch._inductor.config.pre_grad_custom_pass``, or take
    it out: in this thread and, `for_all`, where a thread has no pass of its own. torch 2.13 would
    run it after the cache lookup (and a warm cache would leave the report empty): it is asked to
    run before."""
    if for_all:
        _install_for_all(on)
    passes = _passes()
    installed = [each for each in passes if isinstance(each, SagePass)]
    if not on and not installed:
        return
    timing = getattr(inductor_config, TIMING, None)  # not in torch 2.11
    ours = installed[0] if installed else SagePass(timing)
    passes = [each for each in passes if each is not ours] + [ours] * on
    one = passes[0] if passes else None
    setattr(inductor_config, PASS, PassList(passes) if len(passes) > 1 else one)
    if timing is not None:
        setattr(inductor_config, TIMING, "early" if on else ours.timing_before)


def _passes() -> list:
    """The passes in ``torch._inductor.config.pre_grad_custom_pass``."""
    current = getattr(inductor_config, PASS)
    if isinstance(current, PassList):
        return current.passes
    if isinstance(current, (list, tuple)):
        return list(current)
    return [] if current is None else [current]


def _displaced() -> list[str]:
    """For the report: `config.rewrite_inductor` is set, and somebody has put another pass in the
    place of this one since."""
    if not config.rewrite_inductor or any(isinstance(each, SagePass) for each in _passes()):
        return []
    return [
        f'backend="inductor" is not rewritten: torch._inductor.config.{PASS} was set after '
        "sage_inductor.config.rewrite_inductor: set it again, which keeps both"
    ]


more_notes.append(_displaced)


def _install_for_all(on: bool) -> None:
    """By the defaults of Inductor's options: from torch 2.13 on, what is assigned to a config is
    seen by the assigning thread alone."""
    for name, value in ((PASS, SagePass(_DEFAULTS.get(TIMING))), (TIMING, "early")):
        if name in _DEFAULTS:
            inductor_config._config[name].default = value if on else _DEFAULTS[name]


_DEFAULTS = {
    name: inductor_config._config[name].default
    for name in (PASS, TIMING)
    if name in inductor_config._config
}
