"""``python -m sage_inductor tune``: measure every GPU, print the table and write it where later
processes read it."""

import argparse
import functools
import itertools
import sys

import torch

from sage_inductor.choose import tables, timing
from sage_inductor.choose.cost import TIMED
from sage_inductor.choose.families import Table
from sage_inductor.cli import positive
from sage_inductor.cli.progress import track
from sage_inductor.ops.recipe import NAMED
from sage_inductor.ops.training.gradients import FP8_BACKWARD


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measure attention with all preparation against SDPA's backends on every GPU, and write "
        "the times by which 'auto' predicts a call's to where later processes read them. Some "
        "minutes a GPU; nothing else should run on it."
    )
    parser.add_argument(
        "--head-dims", type=positive, nargs="+", default=timing.TUNED_HEAD_DIMS, metavar="D",
        help=f"default: {_listed(timing.TUNED_HEAD_DIMS)}",
    )  # fmt: skip
    parser.add_argument(
        "--kinds", choices=TIMED, nargs="+", default=timing.TUNED_KINDS, metavar="KIND",
        help=f"types of calls, of {_listed(TIMED)}; default: {_listed(timing.TUNED_KINDS)}",
    )  # fmt: skip


def _listed(names) -> str:
    return ", ".join(map(str, names))


def tune(head_dims: list[int], kinds: list[str]) -> int:
    if not torch.cuda.is_available():
        print("tune measures GPUs: torch sees no CUDA device", file=sys.stderr)
        return 2
    of_name = {torch.cuda.get_device_name(i): i for i in range(torch.cuda.device_count())}
    try:
        for name in of_name:
            tables.check_file(tables.place_of(name))
    except (OSError, RuntimeError) as error:
        message = f"the table cannot be written: {error} ($SAGE_INDUCTOR_TABLES names its folder)"
        print(message, file=sys.stderr)
        return 2
    progress = functools.partial(track, describe=str)
    for name, i in of_name.items():
        table = timing.tune(torch.device("cuda", i), head_dims, kinds, progress, tables.save)
        for line in lines(table):
            print(f"{name}: {line}")
        print(f"written to {tables.path_of(name)}")
    return 0


HEADS = 128, 24, 8  # B*H


def lines(table: Table) -> list[str]:
    """From where each recipe is predicted to be faster than SDPA, a line for each of a family."""
    found = []
    for each in itertools.product(table.families, (*NAMED, FP8_BACKWARD)):
        if table.find(*each) == each[0]:
            first = {heads: table.first_length(*each, heads) for heads in HEADS}
            where = ", ".join(f"N={N} with B*H >= {heads}" for heads, N in first.items() if N)
            text = "{}: {} from {} (+-{:.1%})"
            found.append(text.format(*each, where or "no length", table.error(*each)))
    return found
