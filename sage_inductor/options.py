"""Every setting, once: what it may be, where it may be given, and what it means.

    name       sage_inductor.config    environment              torch.compile(options=...)
    recipe     config.recipe           SAGE_INDUCTOR_RECIPE     "sage.recipe"

An option of `torch.compile` overrides the config, which overrides the environment.
"""

import difflib
import warnings
from typing import NamedTuple

import torch

from sage_inductor.ops.recipe import ALIASES, NAMED

PREFIX = "sage."
AUTO, OFF = "auto", "off"
TRAINED_BY = "g"  # what "auto" may become in training
TRAINING = (OFF, AUTO, "sagebwd", TRAINED_BY)


class Option(NamedTuple):
    name: str
    default: object
    type: type
    doc: str
    is_setting: bool = True  # of sage_inductor.config, with an environment variable

    @property
    def variable(self) -> str:
        return f"SAGE_INDUCTOR_{self.name.upper()}"


_TABLE = (
    Option("recipe", AUTO, str,
           'how attention calls are quantized: "auto" (by device), a recipe\'s name, or "off"'),
    Option("policy", "", object,
           "which recipe which attention call gets: a file of rules, or what policy.py says"),
    Option("emulate", False, bool,
           "run the recipes' bit-faithful emulation where there is no kernel (CPU), at any length"),
    Option("force", False, bool,
           "rewrite all that the kernels can run, also what is slower and in training"),
    Option("calibrate", True, bool,
           "a kind of call of which no times are known on this GPU is measured when it first "
           "compiles, for some seconds, and the times are kept; False: it stays SDPA"),
    Option("training", OFF, str,
           'how calls that need gradients are computed: "off": exactly (SDPA, or what force does); '
           '"auto": by "g" where forward and backward are predicted to be faster than SDPA\'s; '
           '"g": by a row-scaled FP8 backward (Hopper); "sagebwd": in INT8, forward and backward'),
    Option("strict", False, bool, "raise SageRefused when a call stays as it was"),
    Option("enabled", False, bool,
           'setting: rewrite graphs of backend="inductor" too, by a pass beside the user\'s own; '
           "option: False leaves one graph as it was"),
    Option("mode", None, str,
           "Inductor's mode, for use together with options, which torch.compile does not allow",
           is_setting=False),
)  # fmt: skip
OPTIONS = {option.name: option for option in _TABLE}
SETTINGS = {name: option for name, option in OPTIONS.items() if option.is_setting}


def check(name: str, value, prefix: str) -> None:
    """Raise ValueError unless `value` may be given to the option `name`. Of policies
    sage_inductor/policy.py judges."""
    if name == "mode":
        modes = list(torch._inductor.list_mode_options())
        if value not in modes:
            raise ValueError(f"{prefix}mode must be one of {modes}, got {value!r}")
    elif name == "recipe":
        valid = (AUTO, OFF, *NAMED)
        if not isinstance(value, str) or value not in (*valid, *ALIASES):
            raise ValueError(_not_one_of(prefix + name, valid, value))
        if value in ALIASES:
            warnings.warn(
                f"{prefix}{name}: {value!r} is called {ALIASES[value]!r} now, and the old name "
                "will be refused", FutureWarning, stacklevel=2,
            )  # fmt: skip
    elif name == "training":
        if value not in TRAINING:
            raise ValueError(_not_one_of(prefix + name, TRAINING, value))
    elif name != "policy" and not isinstance(value, bool):
        raise ValueError(f"{prefix}{name} must be True or False, got {value!r}")


def _not_one_of(name: str, valid: tuple[str, ...], value) -> str:
    near = nearest(value, valid) if isinstance(value, str) else None
    meant = f": did you mean {near!r}?" if near else ""
    return f"{name} must be one of {valid}, got {value!r}{meant}"


def unknown(name: str, valid, prefix: str) -> str:
    """The message for a name that does not exist, with one that does and is spelled like it, or all
    that do."""
    near = nearest(name, valid)
    meant = f"did you mean {prefix}{near}?" if near else f"there are {', '.join(sorted(valid))}"
    return f"{prefix}{name} does not exist: {meant}"


def nearest(text: str, valid) -> str | None:
    """What `text` is the beginning of, else what is spelled like it; case does not matter."""
    text, of_lower = text.lower(), {each.lower(): each for each in valid}
    begun = [each for each in of_lower if text and each.startswith(text)]
    near = begun or difflib.get_close_matches(text, of_lower, n=1)
    return of_lower[near[0]] if near else None
