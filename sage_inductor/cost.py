"""From which length a recipe is faster than SDPA: measured, by the GPU that measured it.

The rows of CROSSOVER are built in. `python -m sage_inductor tune` measures them again, on the GPU
that is there, and writes a table to the user's cache; its rows replace the built-in ones of the
same recipe, head_dim and kind of call. A GPU that neither knows has no row: two GPUs of one compute
capability (an H100 and an H200) differ in their lengths.
"""

import functools
import json
import logging
import math
import os
import re
from pathlib import Path

import torch
import triton
from torch.nn.attention import current_flash_attention_impl

from sage_inductor.ops.formats import HEAD_DIMS
from sage_inductor.ops.recipe import NAMED, source_tag

_log = logging.getLogger("sage_inductor")

MIN_SPEEDUP = 1.02  # faster by more than the spread of the medians
H200 = "NVIDIA H200"
MEASURED = (9, 0)  # the compute capability of the GPU that CROSSOVER was measured on

# Kinds of calls: without a mask ("full", "causal", "window": a band), with one row for all queries
# ("keys": padding), with a bool ("mask") or an additive ("bias") one. A window that flex_attention
# computes is not SDPA's with a mask: at (4, 32, 4096, D) flex took 0.78 (D=64) and 1.02 (D=128) of
# our time, and no more was measured.
KINDS = ("full", "causal", "window", "flex window", "keys", "mask", "bias")

# (GPU, recipe, head_dim, kind) -> (B * H_q at least, N of queries and of keys at least) from which
# the call, with its preparation, is faster than the best of SDPA's backends in a compiled graph by
# 2 %, there and at every longer N measured. GPU: as torch.cuda.get_device_name gives it. No row:
# the call stays as it was, either not measured or never faster (sage1, sage2-8b at head_dim 256).
# H200, 2026-11-21, `bench/attention.py --shapes crossover`, crossover_dims, crossover_256 and
# crossover_masks: windows of 1024 keys, SDPA with the same mask.
# Of sage2-8b-per-token, head_dims 72 to 112 and 256 were measured when two passes prepared k and
# v, and were slower; 64 and 128 with one pass, before its last step made it faster.
CROSSOVER = {
    (H200, "sage2-8b-per-token", 64, "full"): [(24, 3072), (8, 5120)],
    (H200, "sage2-8b-per-token", 64, "causal"): [(128, 5120), (8, 4096)],
    (H200, "sage2-8b-per-token", 64, "window"): [(8, 1024)],
    (H200, "sage2-8b-per-token", 64, "keys"): [(128, 2048), (8, 4096)],
    (H200, "sage2-8b-per-token", 72, "full"): [(128, 6144), (24, 8192)],
    (H200, "sage2-8b-per-token", 72, "causal"): [(128, 8192), (24, 6144)],
    (H200, "sage2-8b-per-token", 80, "full"): [(128, 4096), (24, 6144)],
    (H200, "sage2-8b-per-token", 96, "full"): [(128, 4096), (24, 6144)],
    (H200, "sage2-8b-per-token", 112, "full"): [(24, 6144)],
    (H200, "sage2-8b-per-token", 128, "full"): [(24, 3072), (8, 5120)],
    (H200, "sage2-8b-per-token", 128, "causal"): [(128, 5120), (8, 4096)],
    (H200, "sage2-8b-per-token", 128, "window"): [(8, 1024)],
    (H200, "sage2-8b-per-token", 128, "keys"): [(128, 2048), (24, 1024), (8, 4096)],
    (H200, "sage2-8b-per-token", 128, "mask"): [(24, 4096), (8, 8192)],
    (H200, "sage2-8b-per-token", 128, "bias"): [(128, 4096), (24, 16384)],
    (H200, "sage2-8b-per-token", 256, "full"): [(128, 4096)],
    (H200, "sage1-per-token", 64, "full"): [(128, 3072), (24, 5120)],
    (H200, "sage1-per-token", 64, "causal"): [(128, 8192)],  # of --shapes 16bit
    (H200, "sage2-8b", 64, "full"): [(24, 12288)],
    (H200, "sage2-8b", 64, "causal"): [(128, 12288), (24, 16384)],
    (H200, "sage2-8b", 64, "window"): [(24, 1024), (8, 2048)],
    (H200, "sage2-8b", 64, "keys"): [(128, 2048), (24, 4096), (8, 8192)],
    (H200, "sage2-8b", 72, "full"): [(24, 12288)],
    (H200, "sage2-8b", 72, "causal"): [(24, 16384)],
    (H200, "sage2-8b", 80, "full"): [(24, 6144)],
    (H200, "sage2-8b", 80, "causal"): [(24, 6144)],
    (H200, "sage2-8b", 96, "full"): [(128, 4096), (24, 8192)],
    (H200, "sage2-8b", 96, "causal"): [(24, 8192)],
    (H200, "sage2-8b", 112, "full"): [(128, 6144), (24, 8192)],
    (H200, "sage2-8b", 112, "causal"): [(128, 6144), (24, 8192)],
    (H200, "sage2-8b", 128, "full"): [(128, 5120), (24, 8192), (8, 12288)],
    (H200, "sage2-8b", 128, "causal"): [(128, 6144), (24, 8192), (8, 12288)],
    (H200, "sage2-8b", 128, "window"): [(24, 1024), (8, 2048)],
    (H200, "sage2-8b", 128, "keys"): [(128, 2048), (24, 4096), (8, 8192)],
    (H200, "sage2-8b", 128, "mask"): [(128, 4096), (8, 8192)],
    (H200, "sage2-8b", 128, "bias"): [(128, 8192), (24, 16384)],
}


TORCHS_FLASH = "FA2"  # CROSSOVER was measured against it, and against cuDNN
Row = list[tuple[int, int]]  # (B * H_q at least, N at least), the shortest N first


def gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


def flash_attention() -> str:
    """What SDPA's flash backend runs: torch's own, or what the user has activated in its place."""
    return current_flash_attention_impl() or TORCHS_FLASH


def crossover(gpu: str, recipe: str, head_dim: int, kind: str) -> Row:
    """The row of this GPU's tuned table, or of CROSSOVER."""
    ours = CROSSOVER if flash_attention() == TORCHS_FLASH else {}
    row = ours.get((gpu, recipe, head_dim, kind), [])
    return tuned(gpu).get((recipe, head_dim, kind), row)


def shortest(gpu: str) -> float:
    """The shortest length in any row of the GPU: no recipe is known to win below it."""
    built_in = (row for (name, *_), row in CROSSOVER.items() if name == gpu)
    rows = (*tuned(gpu).values(), *built_in)
    return min((N for row in rows for _, N in row), default=math.inf)


def is_measured(gpu: str) -> bool:
    """Whether there is any row for the GPU, against the flash attention that SDPA runs."""
    built_in = flash_attention() == TORCHS_FLASH and any(name == gpu for name, *_ in CROSSOVER)
    return built_in or bool(tuned(gpu))


def in_force() -> tuple:
    """What decides besides the settings, for keys of caches: SDPA's flash attention, and the rows
    of the tuned tables of the GPUs that are here."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = dict.fromkeys(torch.cuda.get_device_name(i) for i in range(count))
    rows = ((gpu, *sorted(map(str, tuned(gpu).items()))) for gpu in gpus)
    return flash_attention(), *rows


def versions() -> dict[str, str]:
    """What a measurement depends on: the kernels too, between releases."""
    return {
        "sage_inductor": source_tag(), "torch": torch.__version__, "triton": triton.__version__,
        "flash attention": flash_attention(),
    }  # fmt: skip


# -- tuned tables ----


def tuned_path(gpu: str) -> Path:
    """Where the table of a GPU is: under $SAGE_INDUCTOR_TABLES, or the user's cache. Raises
    RuntimeError if the user has no home."""
    folder = os.environ.get("SAGE_INDUCTOR_TABLES")
    if not folder:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(cache) / "sage_inductor"
    return Path(folder) / f"{re.sub(r'[^a-z0-9]+', '-', gpu.lower())}.json"


def check_writable(gpu: str) -> None:
    """Raise OSError or RuntimeError unless `save` can write the GPU's table: known before minutes
    of measuring."""
    path = tuned_path(gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    check_file(path)


def check_file(path: str | os.PathLike) -> None:
    """Raise OSError unless a file can be written there."""
    existed = Path(path).exists()
    Path(path).open("a").close()
    if not existed:
        Path(path).unlink()


def save(table: dict) -> Path:
    """Write a table of `tune` to where `tuned` of this and later processes reads it."""
    path = tuned_path(table["gpu"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=1) + "\n")
    forget()
    return path


def tuned(gpu: str) -> dict[tuple, Row]:
    """(recipe, head_dim, kind) -> row, of the GPU's table. One that holds anything else than valid
    rows of these versions is ignored as a whole, with a warning."""
    return _tuned(gpu, flash_attention())


@functools.cache
def _tuned(gpu: str, _flash_attention: str) -> dict[tuple, Row]:
    path = f"the tuned table of {gpu}"
    try:
        path = tuned_path(gpu)
        return _rows(json.loads(path.read_text()), gpu)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RuntimeError) as error:
        _log.warning("%s is ignored: %s (python -m sage_inductor tune writes it anew)", path, error)
        return {}


forget = _tuned.cache_clear  # the tables are read again


def _rows(table, gpu: str) -> dict[tuple, Row]:
    """The rows of a table. Raises ValueError unless all are valid."""
    if not isinstance(table, dict) or not isinstance(table.get("crossover"), list):
        raise ValueError('must be {"gpu": ..., "versions": ..., "crossover": [...]}')
    if table.get("gpu") != gpu:
        raise ValueError(f"measured on {table.get('gpu')}, this is {gpu}")
    if table.get("versions") != versions():
        raise ValueError(f"measured with {table.get('versions')}, this is {versions()}")
    rows = {}
    for each in table["crossover"]:
        if not _is_row(each):
            raise ValueError(f"must hold [recipe, head_dim, kind, [[B * H, N], ...]], got {each}")
        recipe, head_dim, kind, row = each
        rows[recipe, head_dim, kind] = [(heads, N) for heads, N in row]
    return rows


def _is_row(row) -> bool:
    return (
        isinstance(row, list)
        and len(row) == 4
        and row[0] in tuple(NAMED)
        and _is_positive(row[1])
        and row[1] <= HEAD_DIMS[-1]
        and row[2] in KINDS
        and isinstance(row[3], list)
        and all(isinstance(x, list) and len(x) == 2 and all(map(_is_positive, x)) for x in row[3])
    )


def _is_positive(x) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x > 0
