"""What was measured on each GPU: where its table is from, and where it is kept.

There are three sources:

    sage_inductor/tables/*.json      built in: what `python -m sage_inductor tune` measured
    the user's cache                 what `tune` measured there; replaces what is built in
    the first call of a new family   is measured while it compiles (timing.py), some seconds, and
                                     kept in the user's cache; never with config.calibrate = False

Two GPUs of one compute capability may differ, so a table is a GPU's own (but see ALIKE).
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock  # torch itself asks for it

from sage_inductor.choose.cost import Sizes
from sage_inductor.choose.families import TORCHS_FLASH, Family, Table, flash_attention, versions
from sage_inductor.ops.attention import tiles
from sage_inductor.ops.gpus import Gpu

_log = logging.getLogger("sage_inductor")

H200 = "NVIDIA H200"
# GPU -> another, whose times it takes. What an H200's fits predict is 0.97 to 1.02 of what an H100
# took by SDPA's fastest backend (medians of 12 kinds of calls, 354 sizes), 0.98 to 1.01 by ours (80
# sizes whose tiles are those of then; 2026-11-24).
ALIKE = {"NVIDIA H100 80GB HBM3": H200}
MEASURED = (9, 0)  # the compute capability of the GPUs whose tables are built in


def gpu_name(device: Any) -> str:
    return torch.cuda.get_device_name(device)


def whose_times(device: Any) -> str:
    """The GPU by whose times a call on the device is predicted."""
    return H200 if device.type == "cpu" else gpu_name(device)


# Measured in this process, or by another rank for it: by the GPU's name and SDPA's flash attention.
_of_this_process: dict[tuple[str, str], Table] = {}


def add(table: Table) -> None:
    """For this process."""
    place = table.gpu, flash_attention()
    before = _of_this_process.get(place)
    _of_this_process[place] = before.with_families(table.families) if before else table


def known(gpu: str) -> tuple[Table, ...]:
    """This GPU's tables: measured in this process, the user's, the built-in one."""
    flash = flash_attention()
    found = [_of_this_process.get((gpu, flash)), _users(gpu, flash)]
    # Another kernel would compute the calls where the Hopper kernel is not available.
    if flash == TORCHS_FLASH and not tiles.hopper_unavailable(MEASURED):
        found.append(built_in().get(gpu))
    return tuple(table for table in found if table is not None)


def in_force() -> tuple:
    """What decides beyond the settings, for keys of caches: SDPA's flash attention, and the users'
    tables of the GPUs that are here."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = dict.fromkeys(torch.cuda.get_device_name(i) for i in range(count))
    found = (table for gpu in gpus for table in known(gpu) if table is not built_in().get(gpu))
    return flash_attention(), *(repr(table.families) for table in found)


def with_times(gpu: str, family: Family, recipe: str) -> Table | None:
    """The table that has times of the recipe."""
    return next((each for each in known(gpu) if each.find(family, recipe)), None)


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
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower())
    return Path(folder) / f"{slug}-{environment[:8]}.json"


def place_of(gpu: str) -> Path:
    """As `path_of`, in a folder that is there."""
    path = path_of(gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


@functools.cache
def _tell_of_others(gpu: str, mine: Path) -> None:
    """Once for each environment, that has no table of a GPU: others' are not used."""
    others = sorted(mine.parent.glob(f"{mine.stem[:-8]}{'[0-9a-f]' * 8}.json"))
    if others:
        _log.warning(
            "%s was measured with other versions than %s, which are not used: %s"
            " (python -m sage_inductor tune measures with these)",
            gpu, versions(), ", ".join(map(str, others)),
        )  # fmt: skip


def check_file(path: str | os.PathLike) -> None:
    """Raise OSError unless a file can be written there."""
    existed = Path(path).exists()
    Path(path).open("a").close()
    if not existed:
        Path(path).unlink()


PATIENCE = 60.0  # seconds that a process waits for another that measures


@contextlib.contextmanager
def locked(gpu: str):
    """While one process of the user measures, the others wait for what it finds. Where nothing can
    be written, or the one that measures hangs, each measures for itself."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(FileLock(f"{place_of(gpu)}.lock", timeout=PATIENCE))
        except (OSError, RuntimeError) as error:  # a timeout is an OSError, too
            _log.debug("nothing is locked: %s", error)
        yield


def save(table: Table, lock: Callable = locked) -> Path:
    """Add the families to the user's table, which `known` of this and later processes reads; after
    another process that is about to. lock: contextlib.nullcontext, inside of `locked`."""
    path = place_of(table.gpu)
    with lock(table.gpu):
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
    """The user's table. One that is not written as these versions write it is ignored as a whole,
    with a warning; where there is none, but other versions have theirs, that is said."""
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


def table_of(given: dict, gpu: str | None = None) -> Table:
    """The table that a file holds, as `Table.to_json` writes it. gpu: of the user's table, which
    must be of these versions. Raises ValueError where it is not so written."""
    try:
        for name, is_said in (("gpu", gpu), ("versions", versions())):
            if gpu is not None and given[name] != is_said:
                raise ValueError(f"measured with {name} {given[name]}, this is {is_said}")
        major, minor = given["capability"]
        families = {}
        for x in given["families"]:
            family = Family(x["head_dim"], x["head_dim_v"], x["kind"])
            families[family] = {Sizes(*sizes): dict(ms) for *sizes, ms in x["times"]}
        return Table(given["gpu"], Gpu((major, minor), given["processors"]), families)
    except (KeyError, TypeError) as error:
        raise ValueError(f"it holds no times: {type(error).__name__}: {error}") from error
