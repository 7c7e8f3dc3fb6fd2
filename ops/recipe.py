"""How one attention call is quantized, as data.

A recipe travels through a graph as a string argument of the ops. The string names every semantic
choice and the sources it was made by, so that any cache keyed on the graph is right by
construction: change a recipe or the library, and the key changes.

A program that was exported and saved outlives the sources. What its strings mean is declared in
MEANING: where that is still the same, `renewed` gives the string of today's sources, and the graph
is again what today's library would have made.
"""

import dataclasses
import functools
import re
from typing import Literal, NamedTuple, get_args

from sage_inductor.ops.formats import GRANULARITIES, PV, QK, Format, Granularity
from sage_inductor.ops.sources import source_tag

# Goes up by one when a string, or an argument of sage::sdpa and sage::prepare, comes to mean
# something else: numbers, formats, what is prepared. tests/ops/test_ops.py holds what they say.
MEANING = 2


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One way of quantizing attention (SageAttention2, arXiv:2411.10958, section 3).

    granularity: which rows of q and k share a scale; a name in formats.GRANULARITIES.
        ``per_block``: 128 rows of q, 64 rows of k (SageAttention 1).
        ``per_thread``: rows {i, i+8, i+16, i+24} of 32 rows of q, and rows {2j, 2j+1} + 8*{0..7}
        of 64 rows of k: what one thread of an ``mma`` tile holds (SageAttention2, 3.2).
        ``per_token``: each row of q, 64 rows of k. A thread of a ``wgmma`` accumulator holds whole
        rows, so on Hopper this costs what per_thread does there and needs no k scale per column.
        Nothing is asked of the whole sequence: what k and v are shifted by, and v's scales, are
        estimated from a sample of rows, and one pass prepares both.
        ``per_16``: 16 neighbours in the dimension that is summed over; nvfp4's, of p and v too.
    pv: number format of p and v, a name in formats.PV. ``fp8``: E4M3, v smoothed and scaled per
        channel, two-level accumulation; ``16bit``: v as it arrives, fp32 accumulation; ``nvfp4``:
        as q and k, v smoothed, only beside them.
    qk: number format of q and k, a name in formats.QK. ``int8``, or ``fp8``: E4M3, for devices that
        multiply INT8 slowly (sm_100). ``int4``: in [-7, 7], k packed, q smoothed too, per block of
        128 rows (SageAttention2, 3.1). ``nvfp4``: E2M1 with scales in E4M3, q smoothed as well
        (SageAttention3, arXiv:2505.11594).

    rotated: q and, after its smoothing, k times one Hadamard matrix over head_dim
        (quantize/rotate.py). A few strong channels then cost no accuracy. Scores are the same.

    k is smoothed in every recipe.
    """

    granularity: str
    pv: str
    qk: str = "int8"
    rotated: bool = False

    def __post_init__(self):
        _one_of("pv", self.pv, tuple(PV))
        _one_of("qk", self.qk, PV[self.pv].beside, f"pv={self.pv!r}")
        _one_of("granularity", self.granularity, QK[self.qk].granularities, f"qk={self.qk!r}")
        rotations = (False, True) if self.of_qk.rotates else (False,)
        _one_of("rotated", self.rotated, rotations, f"qk={self.qk!r}")

    @property
    def of_qk(self) -> Format:
        return QK[self.qk]

    @property
    def of_pv(self) -> Format:
        return PV[self.pv]

    @property
    def sharing(self) -> Granularity:
        return GRANULARITIES[self.granularity]

    def encode(self) -> str:
        """The canonical string: ``int8/per_thread,fp8@2+1a2b3c4d`` (``int8/per_token/rotated,..``):
        MEANING, and the sources."""
        rotated = "/rotated" * self.rotated
        return f"{self.qk}/{self.granularity}{rotated},{self.pv}@{_tag()}"


@functools.cache
def decode(text: str) -> Recipe:
    """The inverse of ``Recipe.encode``. A string of other sources is refused, not reinterpreted."""
    if text != renewed(text):
        raise ValueError(
            f"recipe: {text!r} was made by other sources of sage_inductor, these are {_tag()}: "
            "call sage_inductor.rewrite(program) on the loaded program, which brings it up to them"
        )
    qk, granularity, *rotated, pv = re.split("[/,]", text.partition("@")[0])
    return Recipe(granularity, pv, qk, bool(rotated))


def renewed(text: str) -> str:
    """The same recipe's string by these sources. Raises ValueError where it would mean something
    else than by those that made it."""
    fields, _, tag = text.partition("@")
    if tag.partition("+")[0] != str(MEANING):
        raise ValueError(
            f"recipe: {text!r} was made by a sage_inductor in which it means something else than "
            f"in this one ({_tag()}): export the original model again"
        )
    return f"{fields}@{_tag()}"


def _tag() -> str:
    return f"{MEANING}+{source_tag().rpartition('+')[2]}"


def _one_of(field: str, value, valid: tuple, beside: str = "") -> None:
    if value not in valid:
        beside = beside and f" with {beside}"
        raise ValueError(f"recipe: {field} must be one of {valid}{beside}, got {value!r}")


class Row(NamedTuple):
    """A recipe with a name, and what is known of it."""

    recipe: Recipe
    # Relative L1 error on normal inputs from which its kernel is wrong, not inaccurate. 8-bit p and
    # v cost 0.04, 4 bits 0.2; a wrong scale or a missed tile costs several times this bound.
    wrong_from: float
    speed_rank: int | None = None  # 1: the fastest, where measured. None: never suggested


TABLE = {
    "sage1": Row(Recipe("per_block", "16bit"), 0.1, 6),
    "sage2-8b": Row(Recipe("per_thread", "fp8"), 0.1, 3),
    "sage2-8b-per-token": Row(Recipe("per_token", "fp8"), 0.1, 1),
    # Rotation costs up to 3 %, so each ranks behind the same recipe without it.
    "sage2-8b-rotated": Row(Recipe("per_token", "fp8", rotated=True), 0.1, 2),
    # No rank: "auto" takes it on devices where INT8 is slow.
    "sage2-8b-fp8qk": Row(Recipe("per_token", "fp8", qk="fp8"), 0.1),
    # No rank: it saves no arithmetic on any device.
    "sage2-4b": Row(Recipe("per_thread", "fp8", qk="int4"), 0.5),
    "sage1-per-token": Row(Recipe("per_token", "16bit"), 0.1, 4),
    "sage1-rotated": Row(Recipe("per_token", "16bit", rotated=True), 0.1, 5),
    # No rank: it was timed on no device.
    "sage3": Row(Recipe("per_16", "nvfp4", qk="nvfp4"), 0.4),
}
# The names in TABLE, for type checkers.
RecipeName = Literal[
    "sage1", "sage2-8b", "sage2-8b-per-token", "sage2-8b-rotated", "sage2-8b-fp8qk", "sage2-4b",
    "sage1-per-token", "sage1-rotated", "sage3",
]  # fmt: skip
RECIPES: tuple[RecipeName, ...] = get_args(RecipeName)
NAMED = {name: row.recipe for name, row in TABLE.items()}
BY_SPEED = tuple(
    sorted((x for x, row in TABLE.items() if row.speed_rank), key=lambda x: TABLE[x].speed_rank)
)
ROWSCALED_FORWARD = NAMED["sage1-rotated"]  # of sage::rowscaled: INT8 q k, 16-bit p v


def unrotated(name: str) -> str:
    """The name in NAMED of the same recipe without rotation; of any other name the name."""
    recipe = NAMED.get(name)
    if recipe is None or not recipe.rotated:
        return name
    plain = dataclasses.replace(recipe, rotated=False)
    return next(other for other, each in NAMED.items() if each == plain)
