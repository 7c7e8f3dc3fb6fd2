"""What was measured, by the GPU that measured it: a table for each, of families of calls.

A family is calls of one head_dim and kind. Its times are of the recipes that "auto" may take (what
may train them, where they train) and of SDPA's backends, at a few sizes; `predict` fits cost.py's
model to them. There are three sources:

    sage_inductor/tables/*.json      built in: what `python -m sage_inductor tune` measured
    the user's cache                 what `tune` measured there; replaces what is built in
    the first call of a new family   is measured while it compiles, some seconds, and kept in the
                                     user's cache (sage_inductor.config.calibrate = False: never)

Two GPUs of one compute capability may differ, so a table is a GPU's own. Of two that were seen to
be alike one takes the other's (ALIKE).
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import datetime
import functools
import hashlib
import json
import logging
import os
import re
import statistics
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import triton
from filelock import FileLock  # torch itself asks for it
from torch.nn.attention import current_flash_attention_impl

from sage_inductor import autotune, cost
from sage_inductor.autotune import OF_SDPA, BenchmarkCase, Candidate
from sage_inductor.cost import KINDS, TRAINED, Fit, Prediction, Sizes
from sage_inductor.ops.attention import tiles
from sage_inductor.ops.attention.tiles import Gpu
from sage_inductor.ops.compile import LONGEST
from sage_inductor.ops.formats import HEAD_DIMS, pad_head_dim
from sage_inductor.ops.recipe import NAMED, source_tag
from sage_inductor.options import TRAINED_BY
from sage_inductor.patterns.call import Band

_log = logging.getLogger("sage_inductor")

H200 = "NVIDIA H200"
# GPU -> another, whose times it takes. What an H200's fits predict is 0.97 to 1.02 of what an H100
# took by SDPA's fastest backend (medians of 12 kinds of calls, 354 sizes), 0.98 to 1.01 by ours (80
# sizes whose tiles are those of then; 2026-11-24).
ALIKE = {"NVIDIA H100 80GB HBM3": H200}
MEASURED = (9, 0)  # the compute capability of the GPUs whose tables are built in
TORCHS_FLASH = "FA2"  # the built-in tables were measured against it, and against cuDNN


@dataclasses.dataclass(frozen=True)
class Family:
    """Calls whose times one `Fit` a recipe describes."""

    head_dim: int  # of q and k
    head_dim_v: int
    kind: str  # one of cost.KINDS

    def of_sdpa(self, sizes: Sizes) -> Sizes:
        """The sizes that SDPA computes: every key, where it gets the band in a mask. In training it
        computes dK and dV for each head of q and then adds them up."""
        sizes = sizes if TRAINED.get(self.kind, self.kind) in SEES_A_BAND else sizes.dense
        return sizes.ungrouped if self.kind in TRAINED else sizes

    def stands_for(self, other: "Family") -> bool:
        """Whether times measured of this family are taken for the other's. Both run in the same
        kernels, this one's head_dim is as wide or less than twice as wide, and the rows of both are
        a multiple of 16 bytes apart, or those of neither."""
        if self == other:
            return True
        one = self.head_dim == self.head_dim_v, other.head_dim == other.head_dim_v
        return (
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


SEES_A_BAND = ("full", "causal")  # kinds in which SDPA is not given the band in a mask
Times = dict[Sizes, dict[str, float]]  # ms, by a recipe's or an SDPA backend's name


@dataclasses.dataclass(eq=False)
class Table:
    """What was measured on one GPU."""

    gpu: str
    device: Gpu
    families: dict[Family, Times]

    def find(self, family: Family, recipe: str) -> Family | None:
        """The narrowest family that stands for this one and has enough times of the recipe and of a
        backend of SDPA's."""
        found = [
            each for each, times in self.families.items()
            if each.stands_for(family) and _are_enough(times, recipe)
        ]  # fmt: skip
        return min(found, key=lambda each: each.head_dim, default=None)

    def predict(
        self, family: Family, recipe: str, sizes: Sizes, stacked: bool = False
    ) -> Prediction | None:
        """None where no family that stands for this one was measured with the recipe. stacked: as
        Sizes has it."""
        found = self.find(family, recipe)
        if found is None:
            return None
        by_tile, rivals = fits(self, found, recipe)
        of_sdpa = family.of_sdpa(sizes)
        of_ours = sizes.stacked if stacked else sizes
        ours = by_tile.get(_warpgroups(self.device, family, recipe, of_ours), by_tile[None])
        # Ours computes as many channels for both, SDPA's kernels may have fewer. What is read in
        # single elements, as rows that are not 16 bytes apart, or padded by SDPA, is fewer, too;
        # ours prepares k and v in tiles as wide.
        D, wider = family.head_dim, found.head_dim
        read = D / wider if D % 8 else 1.0
        sdpa = {
            fit: fit.ms(of_sdpa, _channels(name, D) / _channels(name, wider), read, read)
            for name, fit in rivals.items()
        }
        fastest = min(sdpa, key=sdpa.get)
        error = (ours.error**2 + fastest.error**2) ** 0.5
        return Prediction(recipe, ours.ms(of_ours, of_q=read), sdpa[fastest], error)

    def error(self, family: Family, recipe: str) -> float:
        """Of the recipe's predictions: root mean square of predicted / measured - 1."""
        times = self.families[family].items()
        timed = ((sizes, ms[recipe]) for sizes, ms in times if recipe in ms)
        errors = [self.predict(family, recipe, sizes).ours / ms - 1 for sizes, ms in timed]
        return statistics.fmean(x * x for x in errors) ** 0.5

    def first_length(self, family: Family, recipe: str, heads: int) -> int | None:
        """The N of self-attention with so many heads from which on the recipe wins."""

        def wins(N: int) -> bool:
            sizes = sizes_of(family, [(1, heads, heads, N, N)])
            return any(self.predict(family, recipe, each).wins for each in sizes)

        return cost.first_length(wins)

    def with_families(self, more: dict[Family, Times]) -> "Table":
        """The same with these times beside or, of the same sizes and names, in the place of its."""
        families = dict(self.families)
        for family, times in more.items():
            old = families.get(family, {})
            sizes = dict.fromkeys((*old, *times))
            families[family] = {each: old.get(each, {}) | times.get(each, {}) for each in sizes}
        return dataclasses.replace(self, families=families)

    def to_json(self) -> dict:
        families = [
            {
                **dataclasses.asdict(family),
                "times": [[*sizes, ms] for sizes, ms in times.items()],
            }
            for family, times in self.families.items()
        ]
        return {"gpu": self.gpu, "capability": [*self.device.capability],
                "processors": self.device.processors, "versions": versions(),
                "date": datetime.date.today().isoformat(), "families": families}  # fmt: skip


def _are_enough(times: Times, recipe: str) -> bool:
    counts = collections.Counter(name for ms in times.values() for name in ms)
    of_sdpa = (counts[name] for name in OF_SDPA)
    return min(counts[recipe], max(of_sdpa)) >= cost.ENOUGH


def gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


def gpu_of(device: torch.device) -> Gpu:
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return Gpu(tiles.capability(device), processors)


def flash_attention() -> str:
    """What SDPA's flash backend runs: torch's own, or what the user has activated in its place."""
    return current_flash_attention_impl() or TORCHS_FLASH


def versions() -> dict[str, str]:
    """What a measurement depends on: the kernels too, between releases."""
    return {
        "sage_inductor": source_tag(), "torch": torch.__version__, "triton": triton.__version__,
        "flash attention": flash_attention(),
    }  # fmt: skip


# -- what is known ----


_here: dict[tuple[str, str], Table] = {}  # measured in this process, or by another rank for it


def tables(gpu: str) -> tuple[Table, ...]:
    """Of this GPU: what was measured in this process, the user's table, the built-in one."""
    flash = flash_attention()
    ours = built_in().get(gpu) if flash == TORCHS_FLASH else None
    if ours is not None and tiles.hopper_is_lost(MEASURED):
        ours = None  # another kernel would compute the calls
    found = _here.get((gpu, flash)), _users(gpu, flash), ours
    return tuple(table for table in found if table is not None)


def in_force() -> tuple:
    """What decides besides the settings, for keys of caches: SDPA's flash attention, and the users'
    tables of the GPUs that are here."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = dict.fromkeys(torch.cuda.get_device_name(i) for i in range(count))
    ours = built_in()
    found = (table for gpu in gpus for table in tables(gpu) if table is not ours.get(gpu))
    return flash_attention(), *(repr(table.families) for table in found)


def predict(
    gpu: str, family: Family, recipe: str, sizes: Sizes, stacked: bool = False
) -> Prediction | None:
    """As Table.predict; None where no family that stands for this one was measured with it."""
    found = (table.predict(family, recipe, sizes, stacked) for table in tables(gpu))
    return next((each for each in found if each is not None), None)


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
        # k and v are prepared alike whatever the tile. By sizes that have as many rows of q as of k
        # it cannot be told from what takes time for each tile.
        alike = all(each.H_q * each.N_q == each.H_kv * each.N_kv for each in x)
        prepared = of_all.coefficients.prepared if alike else None
        if len(x) >= ENOUGH_OF_A_TILE:
            by_tile[n] = fit(x, shares if n > 1 else None, prepared)
    rivals = {}
    for name in dict.fromkeys(name for ms in times.values() for name in ms if name in OF_SDPA):
        of_name = {family.of_sdpa(sizes): ms[name] for sizes, ms in times.items() if name in ms}
        cuts = name == "FLASH_ATTENTION" and flash_attention() == TORCHS_FLASH
        cuts = cuts and family.kind not in TRAINED  # its backward cuts none
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
    mask = {"keys": torch.bool, "mask": torch.bool, "bias": torch.bfloat16}.get(family.kind)
    head_dim, band = max(family.head_dim, family.head_dim_v), (sizes.left, sizes.right)
    r, heads = NAMED[recipe], sizes.B * sizes.H_q
    if not tiles.suits_hopper(r, head_dim, mask):
        return 0
    load = tiles.Load.of(heads, sizes.N_q, sizes.N_kv, band, mask is not None, device)
    tile = tiles.hopper(device.capability, r.pv, head_dim, band == (None, 0), load)
    return tile.warpgroups if tile else 0


# -- tables in files ----

BUILT_IN = Path(__file__).parent / "tables"


@functools.cache
def built_in() -> dict[str, Table]:
    """By the GPU's name."""
    read = [_table(json.loads(path.read_text())) for path in sorted(BUILT_IN.glob("*.json"))]
    found = {table.gpu: table for table in read}
    alike = {gpu: dataclasses.replace(found[other], gpu=gpu) for gpu, other in ALIKE.items()}
    return found | alike


def path_of(gpu: str) -> Path:
    """Where the user's table of a GPU is: under $SAGE_INDUCTOR_TABLES, or the user's cache; each
    environment's by a name of its own. Raises RuntimeError if the user has no home."""
    folder = os.environ.get("SAGE_INDUCTOR_TABLES")
    if not folder:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(cache) / "sage_inductor"
    environment = hashlib.sha256(json.dumps(versions(), sort_keys=True).encode()).hexdigest()
    return Path(folder) / f"{_slug(gpu)}-{environment[:_DIGITS]}.json"


_DIGITS = 8  # of the environment's name


def _slug(gpu: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower())


@functools.cache
def _tell_of_others(gpu: str, mine: Path) -> None:
    """Once for each environment, that has no table of a GPU: others' are not used."""
    others = sorted(mine.parent.glob(f"{_slug(gpu)}-{'[0-9a-f]' * _DIGITS}.json"))
    if others:
        _log.warning(
            "%s was measured with other versions than %s, which are not used: %s"
            " (python -m sage_inductor tune measures with these)",
            gpu, versions(), ", ".join(map(str, others)),
        )  # fmt: skip


def check_writable(gpu: str) -> None:
    """Raise OSError or RuntimeError unless `save` can write the GPU's table: known before minutes
    of measuring."""
    path = path_of(gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    check_file(path)


def check_file(path: str | os.PathLike) -> None:
    """Raise OSError unless a file can be written there."""
    existed = Path(path).exists()
    Path(path).open("a").close()
    if not existed:
        Path(path).unlink()


def save(table: Table) -> Path:
    """Add the families to the user's table, which `tables` of this and later processes reads; after
    another process that is about to."""
    with _locked(table.gpu):
        return _save(table)


def _save(table: Table) -> Path:
    path = path_of(table.gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    forget()
    before = _users(table.gpu, flash_attention())
    if before is not None:
        table = before.with_families(table.families)
    # Put in place at once: others may be reading, and writing.
    whole = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
    whole.write_text(to_text(table))
    whole.replace(path)
    forget()
    return path


def to_text(table: Table) -> str:
    """The table's file: a line for each size."""
    given = table.to_json()
    families = given.pop("families")
    lines = []
    for family in families:
        times = ",\n  ".join(map(json.dumps, family.pop("times")))
        lines.append(f'{json.dumps(family)[:-1]}, "times": [\n  {times}]}}')
    return f'{json.dumps(given)[:-1]}, "families": [\n ' + ",\n ".join(lines) + "]}\n"


@functools.cache
def _users(gpu: str, _flash_attention: str) -> Table | None:
    """The user's table. One that holds anything else than times of these versions is ignored as a
    whole, with a warning; where there is none, but other versions have theirs, that is said."""
    path = f"the table of {gpu}"
    try:
        path = path_of(gpu)
        return _table(json.loads(path.read_text()), gpu)
    except FileNotFoundError:
        _tell_of_others(gpu, path)
        return None
    except (OSError, ValueError, RuntimeError) as error:
        _log.warning("%s is ignored: %s (python -m sage_inductor tune writes it anew)", path, error)
        return None


def forget() -> None:
    """The user's tables are read again."""
    _users.cache_clear()


def _table(given, gpu: str | None = None) -> Table:
    """gpu: of the user's table, which must be of these versions. Raises ValueError unless all of it
    is valid."""
    if not isinstance(given, dict) or not isinstance(given.get("families"), list):
        raise ValueError('must be {"gpu": ..., "versions": ..., "families": [...]}')
    if gpu is not None and given.get("gpu") != gpu:
        raise ValueError(f"measured on {given.get('gpu')}, this is {gpu}")
    if gpu is not None and given.get("versions") != versions():
        raise ValueError(f"measured with {given.get('versions')}, this is {versions()}")
    capability, processors = given.get("capability"), given.get("processors")
    if not _is_positive(processors):
        raise ValueError(f"processors must be a positive number, got {processors}")
    if not (
        isinstance(capability, list) and len(capability) == 2 and isinstance(capability[0], int)
    ):
        raise ValueError(f"capability must be [major, minor], got {capability}")
    families = dict(map(_family, given["families"]))
    return Table(given["gpu"], Gpu(tuple(capability), processors), families)


def _family(given) -> tuple[Family, Times]:
    what = 'must hold {"head_dim": ..., "head_dim_v": ..., "kind": ..., "times": [...]}'
    names = {field.name for field in dataclasses.fields(Family)} | {"times"}
    if not isinstance(given, dict) or set(given) != names:
        raise ValueError(f"{what}, got {given}")
    times = given.pop("times")
    family = Family(**given)
    dims = family.head_dim, family.head_dim_v
    if not all(_is_positive(D) and D <= HEAD_DIMS[-1] for D in dims) or family.kind not in KINDS:
        raise ValueError(f"{what}, got {family}")
    if not isinstance(times, list) or not times or not all(map(_is_row, times)):
        raise ValueError(f"times of {family} must be [[{', '.join(Sizes._fields)}, {{name: ms}}]]")
    return family, {Sizes(*sizes): ms for *sizes, ms in times}


def _is_row(row) -> bool:
    if not isinstance(row, list) or len(row) != len(Sizes._fields) + 1:
        return False
    *sizes, left, right, ms = row
    return (
        all(map(_is_positive, sizes))
        and all(x is None or isinstance(x, int) for x in (left, right))
        and isinstance(ms, dict)
        and set(ms) <= {*NAMED, TRAINED_BY, *OF_SDPA}
        and all(isinstance(x, float) and 0 < x < float("inf") for x in ms.values())
    )


def _is_positive(x) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x > 0


# -- measuring ----

# B, H_q, H_kv, N_q, N_kv. Few and many tiles, short and long, several heads to one of k and v,
# fewer keys than queries, an odd length: what the coefficients of `cost.Features` can be told apart
# by. In a table with nothing else they predict the other sizes of MANY best (by a search that adds
# one after the other); one of few short heads says what a call takes at least. A measurement that
# runs out of time has the first.
FEW = (
    (1, 24, 24, 4096, 4096),
    (4, 32, 32, 2048, 2048),
    (1, 24, 24, 1024, 1024),
    (2, 8, 8, 3071, 3071),
    (1, 4, 4, 512, 512),
    (1, 2, 2, 16384, 16384),
    (1, 2, 2, 1024, 65536),
    (1, 8, 8, 2048, 2048),
    (2, 32, 8, 4096, 4096),
    (1, 28, 28, 384, 384),
    (1, 24, 24, 6144, 1024),
    (2, 4, 4, 32768, 1280),
)
MANY = (
    *FEW,
    (1, 24, 24, 12288, 12288),
    (1, 8, 8, 8192, 8192),
    (4, 32, 32, 1024, 1024),
    (4, 32, 32, 8192, 8192),
    (1, 1, 1, 8192, 8192),
    (1, 4, 4, 4096, 4096),
    (1, 16, 16, 3072, 3072),
    (1, 12, 12, 20000, 20000),
    (8, 32, 32, 1024, 1024),
    (1, 40, 40, 6000, 6000),
    (1, 32, 4, 10000, 10000),
    (2, 24, 24, 1024, 8192),
    (1, 4, 4, 40000, 40000),
    (2, 8, 8, 512, 512),
    (1, 64, 64, 512, 512),
    (4, 8, 8, 8192, 512),
    (3, 2, 2, 9001, 9001),
    (2, 16, 16, 1023, 1023),
    (1, 8, 8, 5121, 5121),
    (2, 32, 32, 1792, 1792),
    (1, 40, 40, 1536, 1536),
    # Tiles of 192 rows run all at once, those of 128 do not. And tiles of one warpgroup with fewer
    # heads of k than of q, by which the time of k's rows is told apart from that of tiles.
    (1, 3, 3, 6400, 6400),
    (1, 24, 6, 700, 700),
    (4, 32, 4, 1024, 1024),
)
SECONDS = 10.0  # after which no more sizes than are needed are begun: a compilation waits
PATIENCE = 60.0  # seconds that a process waits for another that measures
# Keys that a query of a measured window sees: by turns, the first for up to 4,096 queries, and for
# up to 1,024 a quarter of them.
WINDOWS = 1024, 4096


def sizes_of(family: Family, shapes: Iterable[tuple[int, ...]]) -> list[Sizes]:
    """The shapes with the family's band. Where it has one, those of other keys than queries are
    left out: they are rare. So are lengths that are no longer than a window: it is causal there."""
    found, kind = [], TRAINED.get(family.kind, family.kind)
    for i, shape in enumerate(shapes):
        *_, N_q, N_kv = shape
        window = WINDOWS[i % 2 if N_q > WINDOWS[1] else 0] if N_q > WINDOWS[0] else N_q // 4
        left = window - 1 if kind == "window" else None
        right = 0 if kind in ("causal", "window") else None
        if right is None or N_q == N_kv and (left is None or N_q > window):
            found.append(Sizes(*shape, left, right))
    return found


def measure(
    device: torch.device, family: Family, recipes: tuple[str, ...], sizes: Iterable[Sizes],
    rounds: int = autotune.ROUNDS, seconds: float = float("inf"),
) -> Times:  # fmt: skip
    """ms of the recipes and of SDPA's backends; what could not be timed is left out. seconds: no
    size is begun after so many, once there are enough for a fit. Raises RuntimeError where there
    never are, with an error."""
    sizes = tuple(sizes)
    concurrent.futures.wait(start_compiling(device, family, recipes, sizes), LONGEST)
    cases = {each: _case(device, family, recipes, each) for each in sizes}
    began, found, errors = time.monotonic(), {}, []
    for each, case in cases.items():
        enough = any(_are_enough(found, recipe) for recipe in recipes)
        if enough and time.monotonic() - began > seconds:
            break
        times = autotune.measure(case, rounds)
        named = {getattr(name, "recipe", name): ms for name, ms in times.items()}
        errors += [ms for ms in named.values() if isinstance(ms, str)]
        timed = {name: ms for name, ms in named.items() if not isinstance(ms, str)}
        if len({name in OF_SDPA for name in timed}) == 2:
            found[each] = timed
    if not any(_are_enough(found, recipe) for recipe in recipes):
        why = next(iter(errors), "no more were given")
        raise RuntimeError(f"{len(found)} sizes were timed, {cost.ENOUGH} are needed: {why}")
    return found


def start_compiling(
    device: torch.device, family: Family, recipes: tuple[str, ...], sizes: Iterable[Sizes]
) -> list[concurrent.futures.Future]:
    """Start to compile what `measure` launches. If this is called for several families first, their
    kernels share the processes that compile, and the next family's compile while one is timed."""
    return autotune.start_compiling([_case(device, family, recipes, each) for each in sizes])


def _case(device, family: Family, recipes, sizes: Sizes) -> BenchmarkCase:
    B, H_q, H_kv, N_q, N_kv = sizes[:5]
    mask = {"keys": (B, 1, 1, N_kv), "mask": (1, 1, N_q, N_kv), "bias": (1, 1, N_q, N_kv)}
    dtype = torch.bfloat16
    return BenchmarkCase(
        device,
        dtype,
        (B, H_q, N_q, family.head_dim),
        (B, H_kv, N_kv, family.head_dim),
        (B, H_kv, N_kv, family.head_dim_v),
        Band(sizes.left, sizes.right),
        mask.get(family.kind),
        (dtype if family.kind == "bias" else torch.bool) if family.kind in mask else None,
        tuple(map(Candidate, recipes)),
        trains=family.kind in TRAINED,
    )


_failed: dict[tuple, str] = {}  # what could not be measured in this process, and why


def calibrate(device: torch.device, family: Family, recipes: tuple[str, ...]) -> str | None:
    """Measure a family that nothing is known of, and keep it: once for all processes of the user,
    and by one rank for all. None, or why there is nothing to predict by."""
    gpu, key = gpu_name(device), (device, family, recipes)
    if key not in _failed:
        if any(knows(gpu, family, (recipe,)) for recipe in recipes):
            return None
        try:
            given = autotune.agreed(
                f"{gpu} {family} {recipes}", lambda: _calibrated(device, family, recipes)
            )
            table, place = _table(given), (gpu, flash_attention())
            if not any(knows(gpu, family, (recipe,)) for recipe in recipes):
                # By a rank of another host. The next job of these hosts is to decide alike, too.
                with contextlib.suppress(OSError, RuntimeError):
                    save(table)
            before = _here.get(place)
            _here[place] = before.with_families(table.families) if before else table
            return None
        except (RuntimeError, ValueError) as error:  # of CUDA, out of memory, of the other rank
            _failed[key] = f"{type(error).__name__}: {error}".split("\n")[0]
    return _failed[key]


def knows(gpu: str, family: Family, recipes: tuple[str, ...]) -> Table | None:
    """The table that has times of all the recipes."""
    known = (t for t in tables(gpu) if all(t.find(family, recipe) for recipe in recipes))
    return next(known, None)


def _calibrated(device: torch.device, family: Family, recipes: tuple[str, ...]) -> dict:
    """As `Table.to_json`, of this one family."""
    gpu = gpu_name(device)
    with _locked(gpu):
        forget()  # another process may have measured it meanwhile
        table = knows(gpu, family, recipes)
        if table is not None:
            found = {each: table.families[each] for r in recipes if (each := table.find(family, r))}
            return dataclasses.replace(table, families=found).to_json()
        _log.warning(
            "attention with %s is measured on %s, once, for about %g s"
            " (sage_inductor.config.calibrate = False: never)", family, gpu, SECONDS,
        )  # fmt: skip
        began = time.monotonic()
        times = measure(device, family, recipes, sizes_of(family, FEW), 1, SECONDS)
        _log.warning("measured %d sizes in %.1f s", len(times), time.monotonic() - began)
        table = Table(gpu, gpu_of(device), {family: times})
        try:
            _save(table)
        except (OSError, RuntimeError) as error:
            _log.warning("what was measured is kept for this process alone: %s", error)
        return table.to_json()


@contextlib.contextmanager
def _locked(gpu: str):
    """While one process of the user measures, the others wait for what it finds. Where nothing can
    be written, or the one that measures hangs, each measures for itself."""
    with contextlib.ExitStack() as stack:
        try:
            path = path_of(gpu)
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(f"{path}.lock", timeout=PATIENCE))
        except (OSError, RuntimeError) as error:  # a timeout is an OSError, too
            _log.debug("nothing is locked: %s", error)
        yield
