"""Every option, once: what it may be, where it may be given, and what it means.

    name       sage_inductor.config    environment              torch.compile(options=...)
    recipe     config.recipe           SAGE_INDUCTOR_RECIPE     "sage.recipe"

An option of `torch.compile` overrides the config, which overrides the environment. An option is a
row of `Table`: `Config`, the settings of the process, and `Settings`, those of a compilation, have
its fields.

The environment is read when sage_inductor is imported, by the program or by torch for
``backend="sage"``. So ``SAGE_INDUCTOR_REWRITE_INDUCTOR=1`` does nothing in a program that does
neither: it needs one line, ``import sage_inductor``.
"""

import contextlib
import dataclasses
import itertools
import os
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypedDict

import torch

from sage_inductor import names
from sage_inductor.names import RecipeOption, TrainingOption, unknown
from sage_inductor.ops import compat
from sage_inductor.policy import PolicyOption, Ruling, frozen, ruling

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from sage_inductor.choose.timing import BenchmarkCase

PREFIX = "sage."  # of options of torch.compile
CONFIG = "sage_inductor.config."  # before a setting
AUTOTUNED = ("max-autotune", "max-autotune-no-cudagraphs")  # modes that time every call


class Option(NamedTuple):
    name: str
    default: object
    check: Callable[[str, object], object]  # (its name, a value) -> what is kept; or an error
    doc: str
    only: str = ""  # "config": no option of torch.compile; "options": no setting

    @property
    def variable(self) -> str:
        return f"SAGE_INDUCTOR_{self.name.upper()}"

    def of_environment(self):
        """What the environment says, else the default."""
        value = os.environ.get(self.variable, "")
        if value == "":
            return self.default
        if not isinstance(self.default, bool):
            return self.check(f"{self.variable}: {self.name}", value)
        if value not in ("0", "1"):
            raise ValueError(f"{self.variable} must be 1 or 0, got {value!r}")
        return value == "1"


def _row(default, check: Callable[[str, object], object], doc: str, only: str = "") -> Any:
    return dataclasses.field(default=default, metadata=dict(check=check, doc=doc, only=only))


def flag(name: str, value):
    if not isinstance(value, bool):
        raise names.wrong(f"{name} must be True or False, got {value!r}")
    return value


# fmt: off
class Table:
    recipe: RecipeOption = _row(names.AUTO, names.check_recipe,
        'how attention calls are quantized: "auto" (by device), a recipe\'s name, or "off"')
    policy: PolicyOption = _row("", frozen,
        "which recipe which attention call gets: a file of rules, or what policy.py says")
    emulate: bool = _row(False, flag,
        "run the recipes' bit-faithful emulation where there is no kernel (CPU), at any length")
    force: bool = _row(False, flag,
        "rewrite all that the kernels can run, also what is slower and in training")
    calibrate: bool = _row(True, flag,
        "a kind of call of which no times are known on this GPU is measured when it first "
        "compiles, for some seconds, and the times are kept; False: it stays SDPA")
    training: TrainingOption = _row(names.OFF, names.check_training,
        'how calls that need gradients are computed: "off": exactly (SDPA, or what force does); '
        '"fp8-backward": by the FP8 backward (Hopper); "sagebwd": in INT8, forward and backward; '
        '"auto": by the FP8 backward if that is predicted to be faster than SDPA')
    strict: bool = _row(False, flag, "raise SageRefused when a call stays as it was")
    rewrite_inductor: bool = _row(False, flag,
        'rewrite graphs of backend="inductor" too, by a pass next to the user\'s own',
        only="config")
    mode: str | None = _row(None,
        lambda name, value: names.one_of(list(torch._inductor.list_mode_options()), name, value),
        "Inductor's mode, for use together with options, which torch.compile does not allow",
        only="options")
# fmt: on


# Not by a decorator: type checkers refuse an assignment to a field of what they know to be frozen,
# and config, which has these fields, is assigned to.
dataclasses.dataclass(frozen=True)(Table)
_ROWS = [Option(row.name, row.default, **row.metadata) for row in dataclasses.fields(Table)]
OPTIONS = {option.name: option for option in _ROWS if option.only != "config"}
SETTINGS = {option.name: option for option in _ROWS if option.only != "options"}


# The same for type checkers, which read no table: of `config.patch`, and of torch.compile.
Values = TypedDict("Values", {  # noqa: UP013
    "recipe": RecipeOption, "policy": PolicyOption, "emulate": bool, "force": bool,
    "calibrate": bool, "training": TrainingOption, "strict": bool, "rewrite_inductor": bool,
}, total=False)  # fmt: skip
Options = TypedDict("Options", {
    "sage.recipe": RecipeOption, "sage.policy": PolicyOption, "sage.emulate": bool,
    "sage.force": bool, "sage.calibrate": bool, "sage.training": TrainingOption,
    "sage.strict": bool, "sage.mode": str | None,
}, total=False)  # fmt: skip
Options.__doc__ = """What ``backend="sage"`` adds to Inductor's options, for type checkers: the
    settings of `config`, and ``sage.mode``. torch.compile itself is annotated to take a dict:
    ``options=typing.cast(dict, options)``."""


# -- of the process ----

if TYPE_CHECKING:
    _Settings = Table
else:  # with these methods a type checker would take any name for a setting's

    class _Settings:
        """Its dictionary is the process's."""

        def __getattribute__(self, name: str):
            patched, _ = _patched.get()
            return patched[name] if name in patched else super().__getattribute__(name)

        def __getattr__(self, name: str):
            raise AttributeError(unknown(name, SETTINGS, CONFIG))

        def __setattr__(self, name: str, value) -> None:
            changes, (patched, _) = _checked({name: value}), _patched.get()
            vars(self).update(changes)
            _of_all[0] = _number_of(vars(self))
            if name in patched:  # what is read after an assignment was assigned
                _patched.set(_numbered(patched | changes))
            _tell(changes, for_all=True)


class Config(_Settings):
    """The settings of the process. An assignment, such as ``config.recipe = "sage1"``, holds in all
    threads, because a server configures in one and compiles in another. `patch` holds in its thread
    or asyncio task only. Options of ``torch.compile`` come before both."""

    # name -> called with a value that was set, and whether it is the whole process's.
    followers: ClassVar[dict[str, Callable[[Any, bool], None]]] = {}

    def __dir__(self) -> list[str]:
        return sorted([*SETTINGS, "patch", "to_dict"])

    def __repr__(self) -> str:
        """Each setting, its value and, if it is another, its default."""
        rows = [CONFIG.removesuffix(".") + ":"]
        for name, value in self.to_dict().items():
            default = SETTINGS[name].default
            rows.append(f"  {name} = {value!r}" + f"  (default {default!r})" * (value != default))
        return "\n".join(rows)

    def to_dict(self) -> dict[str, Any]:
        """Each setting's value, here."""
        return vars(self) | _patched.get()[0]

    def patch(
        self, arg1: str | dict[str, Any] | None = None, arg2: Any = None, **kwargs: "Unpack[Values]"
    ) -> "contextlib._GeneratorContextManager[None]":
        """Other values within: a context manager and a decorator. Takes a name and its value, a
        dict or keywords, and checks all before any is set."""
        if arg1 and kwargs:
            raise TypeError(
                f"patch takes a name and its value, a dict or keywords, got {kwargs} too"
            )
        changes = arg1 if isinstance(arg1, dict) else {arg1: arg2} if arg1 else kwargs
        return _patch(_checked(changes))


_lines = (f"    * {x.name}: {x.doc} (default: {x.default!r})" for x in SETTINGS.values())
_lines = (textwrap.fill(line, 100, subsequent_indent=" " * 6) for line in _lines)
Config.__doc__ = "\n".join([f"{Config.__doc__}\n", *_lines])


@contextlib.contextmanager
def _patch(changes: dict[str, Any]) -> Iterator[None]:
    token = _patched.set(_numbered(_patched.get()[0] | changes))
    try:
        _tell(changes)
        yield
    finally:
        _patched.reset(token)
        _tell(changes)


def _tell(changes: dict[str, Any], for_all: bool = False) -> None:
    for name in config.followers.keys() & changes:
        config.followers[name](getattr(config, name), for_all)


def _checked(changes: dict[str, Any]) -> dict[str, Any]:
    """What is kept of new values."""
    for name in changes:
        if name not in SETTINGS:
            raise AttributeError(unknown(name, SETTINGS, CONFIG))
    return {x: SETTINGS[x].check(CONFIG + x, value) for x, value in changes.items()}


def _number_of(values: dict[str, Any]) -> int:
    """The same for the same values, and no other's."""
    # A function of the user's need not be hashable. What is kept with the number keeps its id.
    key = tuple((x, id(y) if callable(y) else y) for x, y in values.items())
    if len(_numbers) >= 4096:
        _numbers.clear()
    return _numbers.setdefault(key, (next(_unused), [*values.values()]))[0]


def _numbered(changes: dict[str, Any]) -> tuple[dict[str, Any], int]:
    return changes, _number_of(changes)


def settings_in_force() -> tuple[int, int]:
    """Two numbers that are the same where all settings are, here."""
    return _of_all[0], _patched.get()[1]


_numbers: dict[tuple, tuple[int, list]] = {}
_unused = itertools.count()
# What patches change, which is never changed itself, and its number.
_patched: ContextVar[tuple[dict[str, Any], int]] = ContextVar(CONFIG, default=_numbered({}))  # noqa: B039
config = Config()
try:
    vars(config).update({name: option.of_environment() for name, option in SETTINGS.items()})
except ValueError as error:
    raise ValueError(str(error)) from None  # without the frames of how it was read
_of_all = [_number_of(vars(config))]
# Variables that begin as ours and that nothing reads may be misspelled.
_known = {name.upper() for name in SETTINGS} | {"TABLES"}  # choose/tables.py reads that one
_given = {x.removeprefix("SAGE_INDUCTOR_") for x in os.environ if x.startswith("SAGE_INDUCTOR_")}
for _name in sorted(_given - _known):
    warnings.warn(unknown(_name, _known, "SAGE_INDUCTOR_"), stacklevel=2)


# -- of a compilation ----


@dataclasses.dataclass(frozen=True)
class Settings(Table):
    """What the user asked for: the options, over `config`."""

    policy: Ruling = ()  # what the option says, read
    stage: str | None = None  # that rules of the policy may name; None: of none
    portable: bool = False  # exporting: no guards on lengths, only kernels that travel
    # Instead of predictions: ms of a case's candidates and of SDPA's backends, these by name; an
    # error's message for one that failed.
    benchmark: "Callable[[BenchmarkCase], dict] | None" = None


def resolve(given: dict, **overrides) -> Settings:
    """The settings of a compilation with the options `given` (without their prefix)."""
    values = config.to_dict() | given
    if values.get("mode") in AUTOTUNED:
        from sage_inductor.choose import timing  # which imports torch's compiler

        values["benchmark"] = timing.benchmark
    values["policy"] = ruling(values["policy"])  # it was checked where it was given
    return Settings(**values | overrides)


def split(given: dict) -> tuple[dict, dict]:
    """({name: value} of the ``sage.`` options, Inductor's options). Raises SageOptionError for an
    option that neither has. Inductor's own message lists its 600 options in 20,000 characters, and
    none of ours."""
    ours = {k.removeprefix(PREFIX): v for k, v in given.items() if k.startswith(PREFIX)}
    theirs = {k: v for k, v in given.items() if not k.startswith(PREFIX)}
    for name, value in ours.items():
        if name not in OPTIONS:
            raise names.wrong(f"{unknown(name, OPTIONS, PREFIX)} (got {value!r})")
        ours[name] = OPTIONS[name].check(PREFIX + name, value)
    known = compat.inductor_config.get_config_copy() if theirs else {}
    valid = {name: PREFIX + name for name in OPTIONS} | {name: name for name in known}
    for name, value in theirs.items():
        if name.replace("-", "_") not in known:
            near = names.nearest(re.sub("^sage[-_]", "", name), valid)
            meant = f': did you mean "{valid[near]}"?' if near else ""
            raise names.wrong(
                f'option "{name}" does not exist{meant} (got {value!r}; '
                f'"{PREFIX}" begins options of sage, all others are Inductor\'s)'
            )
    return ours, theirs
