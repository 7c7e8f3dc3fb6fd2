"""Names of recipes and of ways to train, as options and rules of a policy are given them."""

import difflib
import functools
from collections.abc import Sequence
from typing import Literal

from sage_inductor.ops.recipe import NAMED, RecipeName
from sage_inductor.ops.training.gradients import FP8_BACKWARD, OPS

AUTO, OFF = "auto", "off"
TRAINING = (OFF, AUTO, *OPS)
# What an option, a rule and an argument may be, for type checkers.
RecipeOption = Literal["auto", "off", RecipeName]
TrainingOption = Literal["off", "auto", "sagebwd", "fp8-backward"]
# What each was called in 0.1, for the message about that name.
RENAMED = {"g": FP8_BACKWARD, "sage2-8b-rows": "sage2-8b-per-token", "accurate": "sage1-per-token"}


def one_of(valid: Sequence[str], name: str, value):
    """`value`, if it is one of those that the option `name` may be. Raises SageOptionError."""
    if value not in valid:
        raise wrong(f"{name} must be one of {valid}, got {value!r}{meant(value, valid)}")
    return value


def some_of(valid: Sequence[str], name: str, given: str | Sequence[str] | None) -> tuple[str, ...]:
    """The names that an argument gives: one, several, or with None all. Raises ValueError."""
    found = (given,) if isinstance(given, str) else tuple(valid if given is None else given)
    if not found or not set(found) <= set(valid):
        near = next(filter(None, (meant(x, valid) for x in found if x not in valid)), "")
        raise ValueError(f"{name}: recipes must be of {tuple(valid)}, got {found}{near}")
    return found


def meant(value, valid: Sequence[str]) -> str:
    """What ends the message about a value that is none of the valid ones; empty if none is near."""
    if not isinstance(value, str):
        return ""
    if (new := RENAMED.get(value)) in valid:
        return f": it is called {new!r} since 0.2"
    near = nearest(value, valid)
    return f": did you mean {near!r}?" if near else ""


# As `one_of` without its first argument: whether an option may be this recipe, or way to train.
def check_recipe(name: str, value):
    return one_of((AUTO, OFF, *NAMED), name, value)


check_training = functools.partial(one_of, TRAINING)


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


def is_integer(x, minimum: int, maximum: float = float("inf")) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and minimum <= x <= maximum
