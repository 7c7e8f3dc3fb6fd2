"""Functions that run a model are called twice: with what is theirs, then with what is the model's.

explain(model, options={"sage.recipe": "sage1"})(x, options="the model's own")
"""

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def also_at_once(function: Callable[P, Callable[..., R]]) -> Callable[P, Callable[..., R]]:
    """`function(model, **ours)` returns what runs the model. It takes the model's arguments beside
    ours, too, as it did before there were two calls, and warns: a name of ours can be no name of
    the model's there."""
    ours = inspect.signature(function).parameters.keys() - {"model"}

    @functools.wraps(function)
    def call(model, *args, **kwargs):
        run = function(model, **{name: kwargs.pop(name) for name in ours & kwargs.keys()})
        if not (args or kwargs):
            return run
        name = function.__name__
        warnings.warn(
            f"{name}(model, *args, **kwargs) will be refused: call {name}(model, ...)"
            "(*args, **kwargs), where the model's arguments may have any name",
            FutureWarning, stacklevel=2,
        )  # fmt: skip
        return run(*args, **kwargs)

    return call
