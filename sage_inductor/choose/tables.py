"""What was measured on each GPU: where its table is from, and where it is kept.

There are three sources:

    sage_inductor/tables/*.json      built in: what `python -m sage_inductor tune` measured
    the user's cache                 what `tune` measured there; replaces what is built in
    the first call of a new family   is measured while it compiles (measure.py), some seconds, and
                                     kept in the user's cache; never with config.calibrate = False

Two GPUs of one compute capability may differ, so a table is a GPU's own. Of two that were seen to
be alike one takes the other's (ALIKE).
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import re
import threading
from pathlib import Path

import torch
from filelock import FileLock  # torch itself asks for it

from sage_inductor.choose.cost import KINDS, Prediction, Sizes
from sage_inductor.choose.families import (
    OF_SDPA,
    TORCHS_FLASH,
    Family,
    Table,
    Times,
    flash_attention,
    versions,
)
from sage_inductor.ops.attention import tiles
from sage_inductor.ops.formats import HEAD_DIMS
from sage_inductor.ops.gpus import Gpu
from sage_inductor.ops.recipe import NAMED
from sage_inductor.ops.training.gradients import FP8_BACKWARD

_log = logging.getLogger("sage_inductor")

H200 = "NVIDIA H200"
# GPU -> another, whose times it takes. What an H200's fits predict is 0.97 to 1.02 of what an H100
# took by SDPA's fastest backend (medians of 12 kinds of calls, 354 sizes), 0.98 to 1.01 by ours (80
# sizes whose tiles are those of then; 2026-11-24).
ALIKE = {"NVIDIA H100 80GB HBM3": H200}
MEASURED = (9, 0)  # the compute capability of the GPUs whose tables are built in


def gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


def whose_times(device: torch.device) -> str:
    """The GPU by whose times a call on the device is predicted."""
    return H200 if device.type == "cpu" else gpu_name(device)


# -- what is known ----


# Measured in this process, or by another rank for it: by the GPU's name and SDPA's flash attention.
_of_this_process: dict[tuple[str, str], Table] = {}


def add(table: Table) -> None:
    """For this process."""
    place = table.gpu, flash_attention()
    before = _of_this_process.get(place)
    _of_this_process[place] = before.with_families(table.families) if before else table


def known(gpu: str) -> tuple[Table, ...]:
    """Of this GPU: what was measured in this process, the user's table, the built-in one."""
    flash = flash_attention()
    ours = built_in().get(gpu) if flash == TORCHS_FLASH else None
    if ours is not None and tiles.hopper_unavailable(MEASURED):
        ours = None  # another kernel would compute the calls
    found = _of_this_process.get((gpu, flash)), _users(gpu, flash), ours
    return tuple(table for table in found if table is not None)


def in_force() -> tuple:
    """What decides besides the settings, for keys of caches: SDPA's flash attention, and the users'
    tables of the GPUs that are here."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = dict.fromkeys(torch.cuda.get_device_name(i) for i in range(count))
    ours = built_in()
    found = (table for gpu in gpus for table in known(gpu) if table is not ours.get(gpu))
    return flash_attention(), *(repr(table.families) for table in found)


def predict(
    gpu: str, family: Family, recipe: str, sizes: Sizes, stacked: bool = False
) -> Prediction | None:
    """As Table.predict; None where no family that stands for this one was measured with it."""
    found = (table.predict(family, recipe, sizes, stacked) for table in known(gpu))
    return next((each for each in found if each is not None), None)


def with_times(gpu: str, family: Family, recipe: str) -> Table | None:
    """The table that has times of the recipe."""
    return next((each for each in known(gpu) if each.find(family, recipe)), None)


# -- tables in files ----

BUILT_IN = Path(__file__).parents[1] / "tables"


@functools.cache
def built_in() -> dict[str, Table]:
    """By the GPU's name."""
    read = [table_of(json.loads(path.read_text())) for path in sorted(BUILT_IN.glob("*.json"))]
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
    """Add the families to the user's table, which `known` of this and later processes reads; after
    another process that is about to."""
    with locked(table.gpu):
        return save_locked(table)


def save_locked(table: Table) -> Path:
    """As `save`, inside `locked`."""
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


PATIENCE = 60.0  # seconds that a process waits for another that measures


@contextlib.contextmanager
def locked(gpu: str):
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
        return table_of(json.loads(path.read_text()), gpu)
    except FileNotFoundError:
        _tell_of_others(gpu, path)
        return None
    except (OSError, ValueError, RuntimeError) as error:
        _log.warning("%s is ignored: %s (python -m sage_inductor tune writes it anew)", path, error)
        return None


def forget() -> None:
    """The user's tables are read again."""
    _users.cache_clear()


def table_of(given, gpu: str | None = None) -> Table:
    """The table that a file holds. gpu: of the user's table, which must be of these versions.
    Raises ValueError unless all of it is valid."""
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
        and set(ms) <= {*NAMED, FP8_BACKWARD, *OF_SDPA}
        and all(isinstance(x, float) and 0 < x < float("inf") for x in ms.values())
    )


def _is_positive(x) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x > 0
