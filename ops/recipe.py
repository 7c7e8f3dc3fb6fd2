"""How one attention call is quantized, as data.

A recipe travels through a graph as the string argument of ``sage::sdpa``. The string names every
semantic choice and the sources it was made by, so that any cache keyed on the graph is right by
construction: change a recipe or the library, and the key changes.
"""

import dataclasses
import functools
import hashlib
import re
from pathlib import Path

VERSION = "0.1.0"


@functools.cache
def source_tag() -> str:
    """``version+hash`` of the sources that decide what a recipe means."""
    ops = Path(__file__).parent
    files = sorted([*ops.rglob("*.py"), *(ops.parent / "lowering").rglob("*.py")])
    digest = hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()
    return f"{VERSION}+{digest[:8]}"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One way of quantizing attention (SageAttention2, arXiv:2411.10958, section 3).

    granularity: groups that share a scale of q and k.
        ``per_block``: 128 rows of q, 64 rows of k (SageAttention 1).
        ``per_thread``: rows {i, i+8, i+16, i+24} of 32 rows of q, and rows {2j, 2j+1} + 8*{0..7}
        of 64 rows of k: what one thread of an ``mma`` tile holds (SageAttention2, 3.2).
        ``per_row``: each row of q, 64 rows of k. A thread of a ``wgmma`` accumulator holds whole
        rows, so on Hopper this costs what per_thread does there and needs no k scale per column.
        Nothing is asked of the whole sequence: what k and v are shifted by, and v's scales, are
        estimated from a sample of rows (`reference.estimate`), and one pass prepares both.
        ``per_16``: 16 neighbours in the dimension that is summed over; nvfp4's, of p and v too.
    qk: number format of q and k. ``int8``, or ``fp8``: E4M3, for devices that multiply INT8 slowly
        (sm_100); only beside FP8 p v. ``int4``: in [-7, 7], k packed, q smoothed too, per block of
        128 rows (SageAttention2, 3.1); only per_thread and beside FP8 p v. ``nvfp4``: E2M1 with
        scales in E4M3, q smoothed as well (SageAttention3, arXiv:2505.11594).
    pv: number format of p and v. ``fp8``: E4M3, v smoothed and scaled per channel, two-level
        accumulation; ``16bit``: v as it arrives, fp32 accumulation; ``nvfp4``: as q and k, v
        smoothed, only beside them.
    warpgroups: which tile computes int8 per_row on Hopper: that of hopper.py's kernel with so many;
        0: attention.py's kernel. None: the table's (tiles.HOPPER). It changes speed, not what is
        computed, so a call without such a tile is no error but the table's too: a graph that was
        timed on one GPU runs on every one.

    k is smoothed in every recipe.
    """

    granularity: str
    pv: str
    qk: str = "int8"
    warpgroups: int | None = None

    def __post_init__(self):
        _one_of("pv", self.pv, ("16bit", "fp8", "nvfp4"))
        formats = {"16bit": ("int8",), "fp8": ("int8", "fp8", "int4"), "nvfp4": ("nvfp4",)}
        _one_of("qk", self.qk, formats[self.pv], f"pv={self.pv!r}")
        valid = {"int4": ("per_thread",), "nvfp4": ("per_16",)}
        valid = valid.get(self.qk, ("per_block", "per_thread", "per_row"))
        _one_of("granularity", self.granularity, valid, f"qk={self.qk!r}")
        rows = (self.qk, self.granularity) == ("int8", "per_row")
        valid = (None, 0, 2, 3) if rows else (None,)
        beside = f"qk={self.qk!r}, granularity={self.granularity!r}"
        _one_of("warpgroups", self.warpgroups, valid, beside)

    @property
    def smooths_q(self) -> bool:
        """4 bits ask for it."""
        return self.qk in ("int4", "nvfp4")

    def encode(self) -> str:
        """The canonical string: ``int8/per_thread,fp8@0.1.0+1a2b3c4d``, with three warpgroups
        ``int8/per_row,fp8,3@0.1.0+1a2b3c4d``."""
        chosen = "" if self.warpgroups is None else f",{self.warpgroups}"
        return f"{self.qk}/{self.granularity},{self.pv}{chosen}@{source_tag()}"

    @property
    def preparation(self) -> "Recipe":
        """The same recipe to all that prepares k and v."""
        return dataclasses.replace(self, warpgroups=None)


@functools.cache
def decode(text: str) -> Recipe:
    """The inverse of ``Recipe.encode``. A string of other sources is refused, not reinterpreted."""
    fields, _, tag = text.partition("@")
    if tag != source_tag():
        raise ValueError(
            f"recipe: {text!r} was made by sage_inductor {tag or '(no version)'}, "
            f"this is {source_tag()}: rewrite the model again"
        )
    qk, granularity, pv, *warpgroups = re.split("[/,]", fields)
    return Recipe(granularity, pv, qk, *map(int, warpgroups))


def _one_of(field: str, value, valid: tuple, beside: str = "") -> None:
    if value not in valid:
        beside = beside and f" with {beside}"
        raise ValueError(f"recipe: {field} must be one of {valid}{beside}, got {value!r}")


NAMED = {
    "sage1": Recipe("per_block", "16bit"),
    "sage2-8b": Recipe("per_thread", "fp8"),
    "sage2-8b-rows": Recipe("per_row", "fp8"),
    "sage2-8b-fp8qk": Recipe("per_row", "fp8", qk="fp8"),
    "sage2-4b": Recipe("per_thread", "fp8", qk="int4"),
    "accurate": Recipe("per_row", "16bit"),
    "sage3": Recipe("per_16", "nvfp4", qk="nvfp4"),
}
