"""Names of recipes and of ways to train, as options and rules of a policy are given them."""

import difflib
import warnings
from collections.abc import Sequence
from typing import Literal

from sage_inductor.ops.recipe import ALIASES, NAMED, RecipeName
from sage_inductor.ops.training.gradients import FP8_BACKWARD, OPS

AUTO, OFF = "auto", "off"
TRAINING = (OFF, AUTO, *OPS)
# What an option, a rule and an argument may be, for type checkers.
RecipeOption = Literal["auto", "off", RecipeName]
TrainingOption = Literal["off", "auto", "sagebwd", "fp8-backward"]
OLD_TRAINING = {"g": FP8_BACKWARD}  # for one version more


def check_recipe(name: str, value):
    """`value`, if the option `name` may be this recipe. Raises SageOptionError."""
    if not isinstance(value, str) or value not in ALIASES:
        return one_of((AUTO, OFF, *NAMED), name, value)
    _warn(name, value, ALIASES[value])
    return value


def check_training(name: str, value):
    """`value` by its name of today, if the option `name` may be it. Raises SageOptionError."""
    return one_of(TRAINING, name, todays_training(name, value))


def todays_training(name: str, value):
    """`value`, or the name of today that it stands for, with a warning."""
    if not isinstance(value, str) or value not in OLD_TRAINING:
        return value
    _warn(name, value, OLD_TRAINING[value])
    return OLD_TRAINING[value]


def _warn(name: str, old: str, new: str) -> None:
    text = f"{name}: {old!r} is called {new!r} now, and the old name will be refused"
    warnings.warn(text, FutureWarning, stacklevel=4)


def one_of(valid: Sequence[str], name: str, value):
    """`value`, if it is one of those that the option `name` may be. Raises SageOptionError."""
    if value not in valid:
        near = nearest(value, valid) if isinstance(value, str) else None
        meant = f": did you mean {near!r}?" if near else ""
        raise wrong(f"{name} must be one of {valid}, got {value!r}{meant}")
    return value


def wrong(message: str) -> ValueError:
    """A SageOptionError, which is imported when it is needed: torch's compiler comes with it."""
    from sage_inductor.errors import SageOptionError

    return SageOptionError(message)


def unknown(name: str, valid, prefix: str) -> str:
    """The message for a name that does not exist, with one that does and is spelled like it, or all
    that do."""
    near = nearest(name, valid)
    meant = f"did you mean {prefix}{near}?" if near else f"there are {', '.join(sorted(valid))}"
    return f"{prefix}{name} does not exist: {meant}"


def nearest(text: str, valid) -> str | None:
    """The shortest that `text` is the beginning of, else what is spelled like it; case does not
    matter."""
    text, of_lower = text.lower(), {each.lower(): each for each in valid}
    begun = [each for each in of_lower if text and each.startswith(text)]
    near = sorted(begun, key=len) or difflib.get_close_matches(text, of_lower, n=1)
    return of_lower[near[0]] if near else None
