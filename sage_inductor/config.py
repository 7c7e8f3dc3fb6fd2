"""The settings of the process: ``sage_inductor.config``.

    sage_inductor.config.recipe = "sage1"
    with sage_inductor.config.patch(emulate=True): ...
    SAGE_INDUCTOR_FORCE=1 python train.py
    torch.compile(model, backend="sage", options={"sage.strict": True})     # one model

What each one means: sage_inductor/options.py. The environment is read when sage_inductor is
imported, by the program or by torch for ``backend="sage"``. So ``SAGE_INDUCTOR_REWRITE_INDUCTOR=1``
does nothing in a program that does neither: it needs one line, ``import sage_inductor``. (torch
could import us with itself, by an entry point of its group "torch.backends". But then `import
torch` fails wherever our installation is broken or was moved, even in programs that never ask for
us.)
"""

import contextlib
import itertools
import os
import textwrap
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from sage_inductor.names import unknown
from sage_inductor.options import SETTINGS, Option

_PREFIX = f"{__name__}."
if TYPE_CHECKING:
    from typing_extensions import Unpack

    from sage_inductor.options import Table as _Settings
    from sage_inductor.options import Values
else:  # with these methods a type checker would take any name for a setting's

    class _Settings:
        """Its dictionary is the process's."""

        def __getattribute__(self, name: str):
            patched = _patched.get()
            return patched[name] if name in patched else super().__getattribute__(name)

        def __getattr__(self, name: str):
            raise AttributeError(unknown(name, SETTINGS, _PREFIX))

        def __setattr__(self, name: str, value) -> None:
            changes = _checked({name: value})
            vars(self).update(changes)
            _of_all[0] = _number_of(vars(self))
            if changes.keys() & _patched.get():  # what is read after an assignment was assigned
                _patched.set(_Changes(_patched.get() | changes))
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
        rows = [f"{__name__}:"]
        for name, value in self.to_dict().items():
            default = SETTINGS[name].default
            rows.append(f"  {name} = {value!r}" + f"  (default {default!r})" * (value != default))
        return "\n".join(rows)

    def to_dict(self) -> dict[str, Any]:
        """Each setting's value, here."""
        return vars(self) | _patched.get()

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
    token = _patched.set(_Changes(_patched.get() | changes))
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
    kept = {}
    for name, value in changes.items():
        if name not in SETTINGS:
            raise AttributeError(unknown(name, SETTINGS, _PREFIX))
        kept[name] = SETTINGS[name].check(_PREFIX + name, value)
    return kept


def _of_environment(option: Option):
    """What the environment says, else the default."""
    value = os.environ.get(option.variable, "")
    if value == "":
        return option.default
    if not isinstance(option.default, bool):
        return option.check(f"{option.variable}: {option.name}", value)
    if value not in ("0", "1"):
        raise ValueError(f"{option.variable} must be 1 or 0, got {value!r}")
    return value == "1"


def _warn_of_variables() -> None:
    """Of those that begin as ours and that nothing reads: they may be misspelled."""
    prefix = "SAGE_INDUCTOR_"
    known = {name.upper() for name in SETTINGS} | {"TABLES"}  # choose/tables.py reads that one
    given = {name.removeprefix(prefix) for name in os.environ if name.startswith(prefix)}
    for name in sorted(given - known):
        warnings.warn(unknown(name, known, prefix), stacklevel=2)


class _Same(NamedTuple):
    """A function of the user's, which need not be hashable, in a key that keeps it alive."""

    function: Callable

    def __hash__(self) -> int:
        return id(self.function)

    def __eq__(self, other) -> bool:
        return type(other) is _Same and self.function is other.function


def _number_of(values: dict[str, Any]) -> int:
    """The same for the same values, and no other's."""
    key = tuple((x, _Same(y) if y.__hash__ is None else y) for x, y in values.items())
    if len(_numbers) >= 4096:
        _numbers.clear()
    return _numbers.setdefault(key, next(_unused))


class _Changes(dict):
    """What a patch changes, never changed itself."""

    def __init__(self, changes: dict[str, Any]):
        super().__init__(changes)
        self.number = _number_of(changes)


def settings_in_force() -> tuple[int, int]:
    """Two numbers that are the same where all settings are, here."""
    return _of_all[0], _patched.get().number


_numbers: dict[tuple, int] = {}
_unused = itertools.count()
_patched: ContextVar[_Changes] = ContextVar(_PREFIX, default=_Changes({}))  # noqa: B039
config = Config()
try:
    vars(config).update({name: _of_environment(option) for name, option in SETTINGS.items()})
except ValueError as error:
    raise ValueError(str(error)) from None  # without the frames of how it was read
_of_all = [_number_of(vars(config))]
_warn_of_variables()
