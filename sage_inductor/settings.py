"""What one compilation is asked for: its options, over sage_inductor.config."""

import dataclasses
import re
from collections.abc import Callable

from sage_inductor.choose import timing
from sage_inductor.config import config
from sage_inductor.errors import SageOptionError
from sage_inductor.names import nearest, unknown
from sage_inductor.ops.compat import inductor_config
from sage_inductor.options import OPTIONS, PREFIX, Table
from sage_inductor.policy import Ruling, ruling

AUTOTUNED = ("max-autotune", "max-autotune-no-cudagraphs")  # modes that time every call


@dataclasses.dataclass(frozen=True)
class Settings(Table):
    """What the user asked for; see sage_inductor/options.py for what the other fields mean."""

    policy: Ruling = ()  # what the option says, read
    stage: str | None = None  # that rules of the policy may name; None: of none
    portable: bool = False  # exporting: no guards on lengths, only kernels that travel
    # Instead of predictions: ms of a case's candidates and of SDPA's backends, these by name; an
    # error's message for one that failed.
    benchmark: Callable[[timing.BenchmarkCase], dict] | None = None


def resolve(given: dict, **overrides) -> Settings:
    """The settings of a compilation with the options `given` (without their prefix)."""
    values = config.to_dict() | given
    if values.get("mode") in AUTOTUNED:
        values["benchmark"] = timing.benchmark
    values["policy"] = ruling(values["policy"])  # it was checked where it was given
    return Settings(**values | overrides)


def split(given: dict) -> tuple[dict, dict]:
    """({name: value} of the ``sage.`` options, Inductor's options)."""
    ours = {k.removeprefix(PREFIX): v for k, v in given.items() if k.startswith(PREFIX)}
    theirs = {k: v for k, v in given.items() if not k.startswith(PREFIX)}
    for name, value in ours.items():
        if name not in OPTIONS:
            raise SageOptionError(f"{unknown(name, OPTIONS, PREFIX)} (got {value!r})")
        ours[name] = OPTIONS[name].check(PREFIX + name, value)
    _check_inductors(theirs)
    return ours, theirs


def _check_inductors(given: dict) -> None:
    """Raise SageOptionError for an option that Inductor does not have. Inductor's own message lists
    its 600 options in 20,000 characters, and none of ours."""
    known = inductor_config.get_config_copy()
    names = {name: PREFIX + name for name in OPTIONS} | {name: name for name in known}
    for name, value in given.items():
        if name.replace("-", "_") not in known:
            near = nearest(re.sub("^sage[-_]", "", name), names)
            meant = f': did you mean "{names[near]}"?' if near else ""
            raise SageOptionError(
                f'option "{name}" does not exist{meant} (got {value!r}; '
                f'"{PREFIX}" begins options of sage, all others are Inductor\'s)'
            )
