"""Measured tables: which tile a kernel runs with, and from which length it is worth running.

Every row names the GPU and the day that measured it (`python bench/attention.py --json`);
`untimed` rows were chosen from cross-compiled resource reports (registers, spills) alone.
"""

import dataclasses
import functools

import torch


@dataclasses.dataclass(frozen=True)
class Tile:
    """One program computes BLOCK_M rows of o, reading BLOCK_N keys at a time."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None  # registers a thread, where `sage::attention_capped` is worth it


# (compute capability from, pv, head_dim up to, with a mask) -> tile.
TILES = [
    ((8, 0), "16bit", 128, False, Tile(128, 64, 8, 2)),  # untimed
    ((8, 0), "16bit", 128, True, Tile(128, 64, 8, 2)),  # untimed
    ((8, 0), "16bit", 256, False, Tile(128, 64, 8, 2)),  # untimed
    ((8, 0), "16bit", 256, True, Tile(128, 64, 8, 2)),  # untimed
    ((8, 9), "fp8", 128, False, Tile(64, 64, 4, 2)),  # untimed
    ((8, 9), "fp8", 128, True, Tile(64, 64, 4, 2)),  # untimed
    ((8, 9), "fp8", 256, False, Tile(64, 64, 4, 2)),  # untimed
    ((8, 9), "fp8", 256, True, Tile(64, 64, 4, 2)),  # untimed
    ((9, 0), "16bit", 128, False, Tile(128, 64, 8, 3, maxnreg=128)),  # H200, 2026-11-21
    ((9, 0), "fp8", 64, False, Tile(64, 128, 4, 2, maxnreg=128)),  # H200, 2026-11-21
    ((9, 0), "fp8", 64, True, Tile(64, 64, 4, 2, maxnreg=128)),  # H200, 2026-11-21
    ((9, 0), "fp8", 128, False, Tile(64, 128, 4, 2, maxnreg=168)),  # H200, 2026-11-21
    ((9, 0), "fp8", 128, True, Tile(64, 64, 4, 3, maxnreg=168)),  # H200, 2026-11-21
    ((9, 0), "fp8", 256, False, Tile(64, 64, 4, 2, maxnreg=255)),  # H200, 2026-11-21
    ((10, 0), "16bit", 128, False, Tile(128, 64, 8, 2)),  # untimed
    ((10, 0), "fp8", 128, False, Tile(64, 128, 4, 2)),  # untimed
    ((10, 0), "fp8", 128, True, Tile(64, 64, 4, 2)),  # untimed
    ((10, 0), "fp8", 256, False, Tile(64, 64, 4, 2)),  # untimed
]


def tile(capability: tuple[int, int], pv: str, head_dim: int, masked: bool) -> Tile:
    """The tile for a device (that of the newest row it reaches), or a ValueError if the recipe
    cannot run on it."""
    rows = [r for r in TILES if r[0] <= capability and r[1] == pv and head_dim <= r[2]]
    rows = [r for r in rows if r[3] == masked]
    if not rows:
        raise ValueError(
            f"no kernel for pv={pv!r}, head_dim={head_dim} on compute capability {capability}"
        )
    return max(rows, key=lambda row: (row[0], -row[2]))[4]


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


# (compute capability, pv, head_dim, kind) -> (B * H_q at least, N of queries and of keys at
# least) from which the call, with its preparation, is faster than the best of SDPA's backends in a
# compiled graph by 2 %, there and at every longer N measured. No row: stays SDPA. H200, 2026-11-21,
# `bench/attention.py --shapes crossover`; the 16-bit kernel alone is slower than cuDNN there.
# kind: "full", "causal", "window", or "mask" (any attn_mask).
CROSSOVER = {
    ((9, 0), "fp8", 64, "full"): [(24, 12288)],
    ((9, 0), "fp8", 64, "causal"): [(128, 12288), (24, 16384)],
    ((9, 0), "fp8", 128, "full"): [(128, 5120), (24, 8192), (8, 12288)],
    ((9, 0), "fp8", 128, "causal"): [(128, 6144), (24, 8192), (8, 12288)],
}


def crossover(
    capability: tuple[int, int], pv: str, head_dim: int, kind: str
) -> list[tuple[int, int]]:
    return CROSSOVER.get((capability, pv, head_dim, kind), [])
