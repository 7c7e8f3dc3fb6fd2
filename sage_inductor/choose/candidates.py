"""What a call may become: recipes, each by the tiles that may be the fastest."""

from typing import NamedTuple

from sage_inductor.choose import cost
from sage_inductor.choose.families import Family
from sage_inductor.choose.tables import MEASURED
from sage_inductor.ops.attention import tiles
from sage_inductor.ops.call_shape import CallShape
from sage_inductor.ops.formats import TRAINED_HEAD_DIM
from sage_inductor.ops.recipe import NAMED
from sage_inductor.ops.training.gradients import FP8_BACKWARD
from sage_inductor.patterns.eligible import why_no_fp8_backward


class Candidate(NamedTuple):
    recipe: str  # a name in NAMED; of a shape that trains, in OPS of ops/training/gradients.py
    warpgroups: int | None = None  # SdpaCall's

    @property
    def tile(self) -> str:
        """What a reason says of the tile, unless it is the table's."""
        names = {None: "", 0: " with the Triton kernel", 1: " with 1 warpgroup"}
        return names.get(self.warpgroups, f" with {self.warpgroups} warpgroups")


def auto_recipes(capability: tuple[int, int] | None, head_dim: int) -> tuple[str, ...]:
    """The recipes of "auto": the fastest of them, if it is faster than SDPA. The first mostly is
    the fastest: before it rotated, in 512 of 524 calls (H200, 2026-11-23: bench/regret.py). It
    rotates because k may have strong channels, which costs up to 3 % of the time from 4,096 tokens
    on (H100). On CPU (None) those of the GPUs that were measured."""
    capability = capability or MEASURED
    if capability < (8, 9):
        return ("sage1",)
    if tiles.hopper(capability, "fp8", head_dim, False, tiles.ANY):
        return "sage2-8b-rotated", "sage2-8b"
    if capability[0] == 10:  # INT8 is slow there: see ops/attention/triton.py
        return ("sage2-8b-fp8qk",)
    return ("sage2-8b",)


def recipes_of(capability: tuple[int, int], family: Family) -> tuple[str, ...]:
    """What "auto" may become for the calls of a family, the first mostly the fastest; of those that
    train, () where there is nothing but SDPA."""
    if family.kind not in cost.TRAINED:
        return auto_recipes(capability, max(family.head_dim, family.head_dim_v))
    one = family.head_dim == family.head_dim_v <= TRAINED_HEAD_DIM
    return (FP8_BACKWARD,) if one and why_no_fp8_backward(capability) is None else ()


def by_tiles(shape: CallShape, recipe: str) -> list[Candidate]:
    """`recipe` by each tile that may be the fastest. With a dynamic N_q only one length would be
    timed; there the tile is left to the table, which is read when the call runs."""
    is_fixed = isinstance(shape.q[2], int)
    if shape.trains or not (is_fixed and tiles.suits_hopper(shape, NAMED[recipe])):
        return [Candidate(recipe)]
    is_causal = shape.band.kind == "causal"
    rivals = tiles.rivals(shape.capability, NAMED[recipe].pv, shape.head_dim, is_causal)
    return [Candidate(recipe, warpgroups) for warpgroups in rivals]
