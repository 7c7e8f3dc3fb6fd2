"""Stages of a run, which the rules of a policy may name: the first and last steps of a diffusion.

    {"rules": [{"stage": "edge", "recipe": "off"}, {"recipe": "sage2-4b"}]}

    with sage_inductor.stage("edge"):
        model(x)

A graph that is compiled with such a policy is decided for each stage of it and for none, and
compiled once for each that comes out different: all of them at once, from one trace, so that going
from stage to stage compiles nothing. Which one runs is looked up when the graph is called.
"""

import contextlib
import contextvars
import functools
import json
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator

from sage_inductor.names import nearest
from sage_inductor.session import session

_log = logging.getLogger("sage_inductor")

# A name, or what a Schedule has begun, which ends with it: a reference to it, the name, what was in
# force before.
_current: contextvars.ContextVar = contextvars.ContextVar("stage", default=None)


def current() -> str | None:
    """The stage in force in this thread (or task); None: none was named."""
    found = _current.get()
    while isinstance(found, tuple):
        schedule, name, found = found
        if schedule() is not None:
            return name
    return found


def check(name: str | None) -> str | None:
    """`name`, if a stage may be called so. Raises ValueError."""
    if name is not None and not (isinstance(name, str) and name):
        raise ValueError(f"a stage must have a name that is a string, or be None, got {name!r}")
    return name


def _begin(what: str | tuple | None) -> contextvars.Token:
    token = _current.set(what)
    if (name := current()) is not None:
        session().stages.add(name)
    return token


def unnamed(stage: str, named: Iterable[str]) -> str:
    """What to say of a stage that no rule names."""
    near = nearest(stage, named)
    meant = f": did you mean {json.dumps(near)}?" if near else ""
    return f"stage {json.dumps(stage)} is named by no rule of a policy{meant}"


@functools.cache
def warn_if_misspelled(stage: str | None, named: tuple[str, ...]) -> None:
    """Warn, once, of a stage that is spelled almost as one that a policy names."""
    if stage is not None and stage not in named and nearest(stage, named):
        _log.warning("%s", unnamed(stage, named))


@contextlib.contextmanager
def stage(name: str | None) -> Iterator[None]:
    """Calls inside the ``with`` block run in this stage, in this thread or task; None: in no stage.
    Afterwards the stage is what it was before. A policy that names no such stage ignores it.

    name: what rules of a policy call the stage.

    Raises ValueError for a name that is no string, or empty.
    """
    check(name)
    token = _begin(name)
    try:
        yield
    finally:
        _current.reset(token)


def by_stage(variants: dict[str | None, Callable]) -> Callable:
    """A function that calls the variant of the stage in force, or that of None."""
    default, named = variants[None], tuple(filter(None, variants))

    def run(*args):
        stage = current()
        if stage not in variants:
            warn_if_misspelled(stage, named)
        return variants.get(stage, default)(*args)

    return run


class Schedule:
    """Stages by the step of a diffusers pipeline, which calls it at the end of each.

        pipe(prompt, callback_on_step_end=sage_inductor.Schedule(edge=(5, 2)))

    edge=(5, 2): the first 5 steps and the last 2 are in the stage "edge", the others in none. With
    several stages, the first that claims a step has it.

    A callback comes after its step, so the stage of the first step begins when the Schedule is
    made, in the thread that makes it. After the last step the stage is the first step's again, for
    the next call. Its stages end with the Schedule. Where it is kept, or was made in another
    thread, ``with schedule: pipe(prompt, callback_on_step_end=schedule)`` begins and ends them.

    Raises ValueError for anything else than two numbers of steps.
    """

    def __init__(self, **stages: tuple[int, int]):
        for name, ends in stages.items():
            is_pair = isinstance(ends, (tuple, list)) and len(ends) == 2
            if not (is_pair and all(map(_is_count, ends))):
                what = "must be (first steps, last steps), two numbers from 0 on"
                raise ValueError(f"Schedule: {name} {what}, got {ends!r}")
        self.stages = stages
        self.__enter__()

    def __enter__(self) -> "Schedule":
        # Without the number of steps it is not known whether the first is among the last.
        self._begin(self.of(0, 1 + sum(last for _, last in self.stages.values())))
        return self

    def __exit__(self, *error) -> None:
        _current.set(self._before())

    def _begin(self, name: str | None) -> None:
        _begin((weakref.ref(self), name, self._before()))

    def _before(self) -> str | tuple | None:
        """What was in force before this Schedule was."""
        found = _current.get()
        return found[2] if isinstance(found, tuple) and found[0]() is self else found

    def __repr__(self):
        return f"Schedule({', '.join(f'{name}={ends}' for name, ends in self.stages.items())})"

    def of(self, step: int, steps: int) -> str | None:
        """The stage of a step among all steps."""
        ends = self.stages.items()
        claims = (name for name, (first, last) in ends if step < first or step >= steps - last)
        return next(claims, None)

    def __call__(self, pipe, step: int, timestep, callback_kwargs: dict) -> dict:
        """As ``callback_on_step_end``: the stage of the next step begins."""
        steps = getattr(pipe, "num_timesteps", None)
        if not _is_count(steps):
            what = f"{type(pipe).__name__}.num_timesteps must be the number of steps"
            raise ValueError(f"Schedule: {what}, got {steps!r}")
        was, expected = current(), self.of(step, steps)
        if was != expected:
            _log.warning(
                "Schedule: step %d of %d ran in stage %r, not in %r: call the pipeline in "
                "`with schedule:`", step, steps, was, expected,
            )  # fmt: skip
        self._begin(self.of(step + 1 if step + 1 < steps else 0, steps))
        return callback_kwargs


def _is_count(x) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= 0
