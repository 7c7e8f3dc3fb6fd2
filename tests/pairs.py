"""Which variants of a test always run: enough that each pair of values occurs.

Most bugs need one value, or two together, to be seen. So a test of many axes runs a few variants
that have every pair, and each run draws some of the others by a seed. ``make sweep`` runs them all.
(allpairspy leaves pairs out where values exclude each other: 24 of 169 in the table of attention
kernels.)
"""

import hashlib
import inspect
import itertools
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence

import pytest

PRODUCT = 20_000  # from here on, rows are sampled
DRAWN = 0.005  # of the variants that do not always run, a run draws this share


def has_every_variant() -> bool:
    """`make sweep`, or a variant that is named on the command line."""
    return "EVERY_VARIANT" in os.environ


def drawn(variant: str) -> bool:
    """Whether this run has a variant that does not always run: by SEED, or because it has all."""
    if has_every_variant():
        return True
    digest = hashlib.sha256(f"{os.environ['SEED']} {variant}".encode()).digest()
    return int.from_bytes(digest[:4]) < DRAWN * 2**32


def rows(
    axes: Mapping[str, Sequence], where: Callable[..., bool] | None = None, most: int = PRODUCT
) -> list[tuple]:
    """Every combination of a value of each axis that `where` allows; a product of more than `most`
    is sampled. where: takes axes by their names, as many as it asks for."""
    names, size = list(axes), 1
    for values in axes.values():
        size *= len(values)
    asked = [names.index(name) for name in inspect.signature(where).parameters] if where else []
    if size <= most:
        found: Iterable[tuple] = itertools.product(*axes.values())
    else:
        draw = random.Random(0)
        found = (tuple(map(draw.choice, axes.values())) for _ in range(most))
    if where:
        found = (row for row in found if where(*(row[i] for i in asked)))
    return list(found)


def covering(candidates: Sequence[tuple], each: Sequence[Iterable] = ()) -> list[int]:
    """Indices of few of the rows that have every pair of values that some row has, by greed.
    each: of each row, what must occur, too."""
    indexed = [list(map(_Values(), column)) for column in zip(*candidates, strict=True)]
    of_row = [_pairs(row) for row in zip(*indexed, strict=True)]
    beside = _Values()
    for found, others in zip(of_row, each):
        found += [((-1, beside(x)),) for x in others]
    with_pair: dict[tuple, list[int]] = {}
    for i, found in enumerate(of_row):
        for pair in found:
            with_pair.setdefault(pair, []).append(i)
    left, chosen = dict.fromkeys(sorted(with_pair)), []
    while left:
        rivals = with_pair[next(iter(left))]
        best = max(rivals[:200], key=lambda i: sum(pair in left for pair in of_row[i]))
        chosen.append(best)
        for pair in of_row[best]:
            left.pop(pair, None)
    return sorted(chosen)


class _Values:
    """The place of a value in the order of their first appearances; values need no hash."""

    def __init__(self):
        self.seen: list = []

    def __call__(self, value) -> int:
        for i, other in enumerate(self.seen):
            if other is value or (type(other) is type(value) and other == value):
                return i
        self.seen.append(value)
        return len(self.seen) - 1


def _pairs(row: Sequence[int]) -> list[tuple]:
    if len(row) == 1:
        return [((0, row[0]),)]
    return list(itertools.combinations(enumerate(row), 2))


def pairs(
    where: Callable[..., bool] | None = None, marks: Callable | None = None,
    alike: Mapping[str, Callable] | None = None, each: Callable[..., Iterable] | None = None,
    among: Callable[..., bool] | None = None, most: int = PRODUCT, **axes,
):  # fmt: skip
    """Parametrizes a test by the product of the axes, or by `most` rows of it. A covering set always
    runs.

    marks: gives a row's marks, of the covering set alone. alike: of an axis, what its values
    count as in a pair; each value occurs, too. each: gives what else of a row must occur. among: as
    `where`, the rows of which the covering set is chosen."""
    found, alike = rows(axes, where, most), alike or {}
    asked = (
        [list(axes).index(name) for name in inspect.signature(among).parameters] if among else []
    )
    few = [i for i, row in enumerate(found) if not among or among(*(row[x] for x in asked))]
    kinds = [alike.get(name, lambda value: value) for name in axes]
    candidates = [tuple(kind(x) for kind, x in zip(kinds, found[i])) for i in few]
    wanted = [
        [(name, x) for name, x in zip(axes, found[i]) if name in alike]
        + list(each(*found[i]) if each else ())
        for i in few
    ]
    always = {few[i] for i in covering(candidates, wanted)}
    return parametrize(axes, found, always, marks)


def chosen(always: Callable[..., bool], **axes):
    """Parametrizes a test by the product of the axes. always: takes all axes, by their names."""
    found = rows(axes)
    return parametrize(axes, found, {i for i, row in enumerate(found) if always(*row)})


def seeds(count: int, always: int):
    """Parametrizes a test by `seed`, of which the first few always run."""
    return parametrize(["seed"], [(i,) for i in range(count)], set(range(always)))


def parametrize(
    axes: Iterable[str], found: list[tuple], always: set[int], marks: Callable | None = None
):
    """By these rows, of which those at the indices `always` run in every run. marks: gives their
    marks. What does not run is no variant at all: to collect 14,000 takes 10 s in each process."""
    name = ", ".join(axes)
    parameters = [
        pytest.param(*row, marks=tuple(marks(*row)) if marks and i in always else ())
        for i, row in enumerate(found)
        if i in always or drawn(f"{name} {len(found)} {i}")
    ]
    return pytest.mark.parametrize(name, parameters, ids=_text)


def _text(value) -> str | None:
    """As in an id; None: pytest's own."""
    return (
        str(value)
        if isinstance(value, (tuple, list)) or type(value).__module__ == "torch"
        else None
    )
