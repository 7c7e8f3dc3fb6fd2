"""Families of calls, and what their times on one GPU predict.

A family is calls of one head_dim and kind. Its times are of the recipes that "auto" may take (what
may train them, where they train) and of SDPA's backends, at a few sizes. cost.py's model is fitted
to them.
"""

import collections
import dataclasses
import datetime
import functools
import statistics
from collections.abc import Iterable

import torch
import triton
from torch.nn.attention import current_flash_attention_impl

from sage_inductor.choose import cost
from sage_inductor.choose.cost import TRAINED, Fit, Prediction, Sizes
from sage_inductor.ops.attention.select import tile_of_hopper
from sage_inductor.ops.call_shape import CallShape
from sage_inductor.ops.formats import pad_head_dim
from sage_inductor.ops.gpus import Gpu
from sage_inductor.ops.recipe import NAMED, unrotated
from sage_inductor.ops.sources import source_tag
from sage_inductor.ops.visibility import Band

TORCHS_FLASH = "FA2"  # the built-in tables were measured against it, and against cuDNN

# SDPA's backends, by their names in SDPBackend -> whether the user has them switched on.
BACKENDS = {
    "CUDNN_ATTENTION": torch.backends.cuda.cudnn_sdp_enabled,
    "FLASH_ATTENTION": torch.backends.cuda.flash_sdp_enabled,
    "EFFICIENT_ATTENTION": torch.backends.cuda.mem_efficient_sdp_enabled,
}
OF_SDPA = (*BACKENDS, "MATH")


def rivals() -> tuple[str, ...]:
    """The backends that SDPA may run: those that are not switched off, globally or by `sdpa_kernel`
    around the call that compiles. MATH where all are."""
    return tuple(name for name, is_on in BACKENDS.items() if is_on()) or ("MATH",)


def flash_attention() -> str:
    """What SDPA's flash backend runs: torch's own, or what the user has activated in its place."""
    return current_flash_attention_impl() or TORCHS_FLASH


def versions() -> dict[str, str]:
    """What a measurement depends on: the kernels too, between releases."""
    return {
        "sage_inductor": source_tag(), "torch": torch.__version__, "triton": triton.__version__,
        "flash attention": flash_attention(),
    }  # fmt: skip


SEES_A_BAND = ("full", "causal")  # kinds in which SDPA is not given the band in a mask
# Keys that a query of a measured window sees: by turns, the first for up to 4,096 queries, and for
# up to 1,024 a quarter of them.
WINDOWS = 1024, 4096


@dataclasses.dataclass(frozen=True)
class Family:
    """Calls whose times one `Fit` a recipe describes."""

    head_dim: int  # of q and k
    head_dim_v: int
    kind: str  # one of cost.TIMED, or "flex window"

    def of_sdpa(self, sizes: Sizes) -> Sizes:
        """The sizes that SDPA computes: every key, where it gets the band in a mask. In training it
        computes dK and dV for each head of q and then adds them up."""
        if TRAINED.get(self.kind, self.kind) not in SEES_A_BAND:
            return sizes._replace(left=None, right=None)
        return sizes._replace(H_kv=sizes.H_q) if self.kind in TRAINED else sizes

    def shape(self, device: torch.device | Gpu, sizes: Sizes) -> CallShape:
        """A call of these sizes, in bf16."""
        B, H_q, H_kv, N_q, N_kv = sizes[:5]
        mask = {"keys": (B, 1, 1, N_kv), "mask": (1, 1, N_q, N_kv), "bias": (1, 1, N_q, N_kv)}
        dtype, of_mask = torch.bfloat16, mask.get(self.kind)
        return CallShape(
            device, dtype, (B, H_q, N_q, self.head_dim), (B, H_kv, N_kv, self.head_dim),
            (B, H_kv, N_kv, self.head_dim_v), Band(sizes.left, sizes.right), of_mask,
            of_mask and (dtype if self.kind == "bias" else torch.bool),
            trains=self.kind in TRAINED,
        )  # fmt: skip

    def sizes(self, shapes: Iterable[tuple[int, ...]]) -> list[Sizes]:
        """The (B, H_q, H_kv, N_q, N_kv) with the family's band. Where it has one, those of other
        keys than queries are left out: they are rare. So are lengths that are no longer than a
        window, which is causal there."""
        found, kind = [], TRAINED.get(self.kind, self.kind)
        for i, shape in enumerate(shapes):
            *_, N_q, N_kv = shape
            window = WINDOWS[i % 2 if N_q > WINDOWS[1] else 0] if N_q > WINDOWS[0] else N_q // 4
            left = window - 1 if kind == "window" else None
            right = 0 if kind in ("causal", "window") else None
            if right is None or N_q == N_kv and (left is None or N_q > window):
                found.append(Sizes(*shape, left, right))
        return found

    def stands_for(self, other: "Family") -> bool:
        """Whether times measured of this family are taken for the other's. Both run in the same
        kernels, this one's head_dim is as wide or less than twice as wide, and the rows of both are
        a multiple of 16 bytes apart, or those of neither."""
        one = self.head_dim == self.head_dim_v, other.head_dim == other.head_dim_v
        return self == other or (
            all(one)
            and self.kind == other.kind
            and other.head_dim <= self.head_dim < 2 * other.head_dim
            and pad_head_dim(self.head_dim) == pad_head_dim(other.head_dim)
            and (self.head_dim % 8 == 0) == (other.head_dim % 8 == 0)
        )

    def __str__(self):
        one = self.head_dim == self.head_dim_v
        dims = self.head_dim if one else (self.head_dim, self.head_dim_v)
        return f"head_dim {dims}" + f", {self.kind}" * (self.kind != "full")


Times = dict[Sizes, dict[str, float]]  # ms, by the name of a recipe or of a backend of SDPA


@dataclasses.dataclass(eq=False)
class Table:
    """What was measured on one GPU."""

    gpu: str
    device: Gpu
    families: dict[Family, Times]

    @functools.cache  # noqa: B019  (as `fits`: there is one table for a GPU)
    def find(self, family: Family, recipe: str) -> Family | None:
        """The narrowest family that stands for this one and has enough times of the recipe and of a
        backend of SDPA's."""
        standing = ((x, times) for x, times in self.families.items() if x.stands_for(family))
        found = (each for each, times in standing if timed_as(times, recipe))
        return min(found, key=lambda each: each.head_dim, default=None)

    def predict(
        self, family: Family, recipe: str, sizes: Sizes, stacked: bool = False
    ) -> Prediction | None:
        """None where no family that stands for this one was measured with the recipe. stacked: all
        batches share k and v, and the recipe computes them as one."""
        found = self.find(family, recipe)
        if found is None:
            return None
        timed = timed_as(self.families[found], recipe)
        by_tile, rivals = fits(self, found, timed)
        of_sdpa = family.of_sdpa(sizes)
        of_ours = sizes._replace(B=1, N_q=sizes.B * sizes.N_q) if stacked else sizes
        ours = by_tile.get(_warpgroups(self.device, family, recipe, of_ours), by_tile[None])
        # Our kernel computes the same padded head_dim for both families. SDPA's may compute fewer
        # channels. If rows are not 16-byte aligned, the time to read them scales with head_dim,
        # except in our preparation.
        D, wider = family.head_dim, found.head_dim
        read = D / wider if D % 8 else 1.0
        sdpa = {
            fit: fit.ms(of_sdpa, _channels(name, D) / _channels(name, wider), read, read)
            for name, fit in rivals.items()
        }
        fastest = min(sdpa, key=sdpa.get)
        error = (ours.error**2 + fastest.error**2) ** 0.5
        rotation = 0.0 if timed == recipe else of_ours.rotation(D)
        return Prediction(recipe, ours.ms(of_ours, of_q=read) + rotation, sdpa[fastest], error)

    def error(self, family: Family, recipe: str) -> float:
        """The error of the recipe's predictions: root mean square of predicted / measured - 1."""
        times = self.families[family]
        name = timed_as(times, recipe)
        timed = ((sizes, ms[name]) for sizes, ms in times.items() if name in ms)
        errors = (self.predict(family, name, sizes).ours / ms - 1 for sizes, ms in timed)
        return statistics.fmean(x * x for x in errors) ** 0.5

    def first_length(self, family: Family, recipe: str, heads: int) -> int | None:
        """The N of self-attention with these heads from which on the recipe wins."""

        def wins(N: int) -> bool:
            sizes = family.sizes([(1, heads, heads, N, N)])
            return any(self.predict(family, recipe, each).wins for each in sizes)

        return cost.first_length(wins)

    def with_families(self, more: dict[Family, Times]) -> "Table":
        """The same with these times beside or, of the same sizes and names, in the place of its."""
        families = dict(self.families)
        for family, times in more.items():
            old = families.get(family, {})
            families[family] = {x: old.get(x, {}) | times.get(x, {}) for x in old | times}
        return dataclasses.replace(self, families=families)

    def to_json(self) -> dict:
        families = [
            {**dataclasses.asdict(family), "times": [[*sizes, ms] for sizes, ms in times.items()]}
            for family, times in self.families.items()
        ]
        return {"gpu": self.gpu, "capability": [*self.device.capability],
                "processors": self.device.processors, "versions": versions(),
                "date": datetime.date.today().isoformat(), "families": families}  # fmt: skip


def timed_as(times: Times, recipe: str) -> str | None:
    """The recipe whose times tell this one's: it, or the same without rotation. None: neither has
    enough."""
    return next((each for each in (recipe, unrotated(recipe)) if are_enough(times, each)), None)


def are_enough(times: Times, recipe: str) -> bool:
    """Whether they are of enough sizes for a fit of the recipe and of a backend of SDPA's."""
    counts = collections.Counter(name for ms in times.values() for name in ms)
    of_sdpa = (counts[name] for name in OF_SDPA)
    return min(counts[recipe], max(of_sdpa)) >= cost.ENOUGH


@functools.cache
def fits(table: Table, family: Family, recipe: str) -> tuple[dict[int | None, Fit], dict[str, Fit]]:
    """(the recipe's fits, the fits of SDPA's backends) for a measured family. The recipe has a fit
    for each tile that enough sizes ran with (by its name of `_warpgroups`), and one of all sizes
    (None)."""

    def fit(of_name: dict[Sizes, float], *known) -> Fit:
        return cost.fit(of_name, table.device.processors, family.kind, *known)

    times = table.families[family]
    ours = {sizes: ms[recipe] for sizes, ms in times.items() if recipe in ms}
    of_tiles = collections.defaultdict(dict)
    for sizes, ms in ours.items():
        of_tiles[_warpgroups(table.device, family, recipe, sizes)][sizes] = ms
    shares = cost.LAST_SHARED if family.kind == "full" else None  # of two and three warpgroups
    of_all = fit(ours)
    by_tile = {}
    for n, x in of_tiles.items():
        # Preparing k and v takes the same time for every tile. If H_q N_q = H_kv N_kv for all
        # sizes, it cannot be separated from the time per tile: the fit of all tiles has it.
        alike = all(each.H_q * each.N_q == each.H_kv * each.N_kv for each in x)
        prepared = of_all.coefficients.prepared if alike else None
        if len(x) >= ENOUGH_OF_A_TILE:
            by_tile[n] = fit(x, shares if n > 1 else None, prepared)
    rivals = {}
    for name in OF_SDPA:
        of_name = {family.of_sdpa(sizes): ms[name] for sizes, ms in times.items() if name in ms}
        is_torchs = name == "FLASH_ATTENTION" and flash_attention() == TORCHS_FLASH
        cuts = is_torchs and family.kind not in TRAINED  # its backward cuts none
        if len(of_name) >= cost.ENOUGH:  # a backend may run out of memory
            rivals[name] = fit(of_name, cost.FLASH if cuts else None)
    return by_tile | {None: of_all}, rivals


ENOUGH_OF_A_TILE = 7  # sizes; with fewer, one fit for all tiles errs less


# Channels that FlashAttention 2 has kernels for, and how many times as long one takes that is not
# filled: with 40 of 64 1.20 and 1.15 (causal), 72 of 96 1.13 and 1.11, 112 of 128 1.10 and 1.08,
# 160 of 192 1.11 and 1.11 (medians of 25 to 32 sizes of the H200's table).
FLASH_CHANNELS = 32, 64, 96, 128, 192, 256
UNEVEN = 1.1


def _channels(backend: str, head_dim: int) -> float:
    """The channels that a backend of SDPA's computes for a head_dim; 1 for a backend that has no
    kernels of its own for certain head_dims."""
    if backend == "CUDNN_ATTENTION":
        return -(-head_dim // 64) * 64
    if backend == "FLASH_ATTENTION":
        padded = -(-head_dim // 8) * 8  # by SDPA
        channels = next(each for each in FLASH_CHANNELS if each >= padded)
        return channels * (UNEVEN if padded < channels else 1.0)
    return 1


def _warpgroups(device: Gpu, family: Family, recipe: str, sizes: Sizes) -> int:
    """The warpgroups of the tile that a call runs with, which name the tile; 0: the portable
    kernel's. All calls that train have one name: kernels of one tile take most of their time."""
    if family.kind in TRAINED:
        return 0
    tile = tile_of_hopper(family.shape(device, sizes), NAMED[recipe])
    return tile.warpgroups if tile else 0
