"""``python -m sage_inductor tune``: what "auto" decides by, measured on this GPU.

It is what a call of a new family is measured by while it compiles (measured.py), at more sizes and
with more rounds, for the families that most models have.
"""

from collections.abc import Callable, Iterable

import torch

from sage_inductor import measured
from sage_inductor.cost import TRAINED
from sage_inductor.decide import recipes_of
from sage_inductor.measured import MANY, Family, Table
from sage_inductor.ops.attention import tiles

HEAD_DIMS = (64, 96, 128, 256)
KINDS = ("full", "causal", "window", "keys", *TRAINED)
ROUNDS = 2  # of a size's timing


def tune(
    device: torch.device,
    head_dims: Iterable[int] = HEAD_DIMS,
    kinds: Iterable[str] = KINDS,
    progress: Callable = list,
    save: Callable[[Table], object] = lambda table: None,
) -> Table:
    """Measure families in bf16, those of each head_dim and kind of call.

    progress: is given the families, and yields them. save: is given the table as far as it goes,
    after each of them.
    """
    table = Table(measured.gpu_name(device), measured.gpu_of(device), {})
    asked = {}
    for family in (Family(D, D, kind) for D in head_dims for kind in kinds):
        recipes = recipes_of(tiles.capability(device), family)
        if not recipes:
            continue
        asked[family] = device, family, recipes, measured.sizes_of(family, MANY)
        measured.start_compiling(*asked[family])
    for family in progress(list(asked)):
        times = measured.measure(*asked[family], rounds=ROUNDS)
        table = table.with_families({family: times})
        save(table)
    return table
