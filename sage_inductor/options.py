"""Every option, once: what it may be, where it may be given, and what it means.

    name       sage_inductor.config    environment              torch.compile(options=...)
    recipe     config.recipe           SAGE_INDUCTOR_RECIPE     "sage.recipe"

An option of `torch.compile` overrides the config, which overrides the environment. An option is a
row of `Table`: `config` and `Settings` have its fields.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict

import torch

from sage_inductor import names
from sage_inductor.names import RecipeOption, TrainingOption
from sage_inductor.policy import PolicyOption, frozen

PREFIX = "sage."


class Option(NamedTuple):
    name: str
    default: object
    check: Callable[[str, object], object]  # (its name, a value) -> what is kept; or an error
    doc: str
    only: str = ""  # "config": no option of torch.compile; "options": no setting

    @property
    def variable(self) -> str:
        return f"SAGE_INDUCTOR_{self.name.upper()}"


def _row(default, check: Callable[[str, object], object], doc: str, only: str = "") -> Any:
    return dataclasses.field(default=default, metadata=dict(check=check, doc=doc, only=only))


def flag(name: str, value):
    if not isinstance(value, bool):
        raise names.wrong(f"{name} must be True or False, got {value!r}")
    return value


def _mode(name: str, value):
    return names.one_of(list(torch._inductor.list_mode_options()), name, value)


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
    strict: bool = _row(False, flag,
        "raise SageRefused when a call stays as it was")
    rewrite_inductor: bool = _row(False, flag,
        'rewrite graphs of backend="inductor" too, by a pass next to the user\'s own',
        only="config")
    mode: str | None = _row(None, _mode,
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
