"""Sizes that may be symbols. What is said of them must hold for every size (`statically_true`,
`equal`), unless a guard is worth its recompilation (`guarded`). A call that stays as it was has no
guard: until it is rewritten, guards are only noted (`noting_guards`)."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from sage_inductor.ops import compat

# Whether a condition holds for every size that the symbols in it can have. Adds no guard.
statically_true = compat.statically_known_true


_noted = contextvars.ContextVar("noted", default=None)


@contextlib.contextmanager
def noting_guards() -> Iterator[list[Callable]]:
    """Within, `guarded`, `specialised` and `as_float` add no guard. Each of the list adds one."""
    token = _noted.set([])
    try:
        yield _noted.get()
    finally:
        _noted.reset(token)


def guard(number: type, symbol):
    """``number(symbol)``, which is a guard, now or when it is asked for."""
    if _noted.get() is None:
        return number(symbol)
    _noted.get().append(functools.partial(number, symbol))
    return number(symbol.node.hint)


def guarded(condition) -> bool:
    """Whether `condition` holds for the sizes that are compiled for, which is a guard. Where they
    depend on data there is nothing to guard on: whether it holds for every size."""
    if not isinstance(condition, torch.SymBool):
        return bool(condition)
    if not condition.node.has_hint():
        return statically_true(condition)
    return statically_true(condition) or guard(bool, condition)


def specialised(n) -> int:
    """A size as the number that is compiled for, which is a guard."""
    n = as_int(n)
    return n if isinstance(n, int) or not n.node.has_hint() else guard(int, n)


def equal(a, b) -> bool:
    """Whether two shapes are equal, for every size."""
    return len(a) == len(b) and all(statically_true(n == m) for n, m in zip(a, b, strict=True))


def as_int(n):
    """A symbolic integer that is a number after all, as that number."""
    if isinstance(n, torch.SymInt) and n.node.maybe_as_int() is not None:
        return n.node.maybe_as_int()
    return n


def hint(n) -> int | None:
    """A size while compiling, unguarded; None if it depends on data."""
    if isinstance(n, torch.SymInt):
        return n.node.hint if n.node.has_hint() else None
    return n


def fix_head_dims(*tensors: Tensor) -> None:
    """Guard on the last dimensions, in the fake function of an op that opens into others
    (register.py). Kernels need head_dim as a constant. A guard that is added when the op opens is
    lost in AOTAutograd's cache: a graph compiled for 72 channels was then used for 128."""
    for x in tensors:
        int(x.shape[-1])
