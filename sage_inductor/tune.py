"""``python -m sage_inductor tune``: from which lengths on "auto" is faster than SDPA on this GPU.

The built-in table (CROSSOVER in ops/tiles.py) was measured on the GPUs that it names. This measures
it again, on yours, and writes what it finds where `tiles.crossover` reads it: the rows of a tuned
table replace the built-in ones of the same recipe, head_dim and kind of call.
"""

import datetime
import functools
import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel

from sage_inductor.ops import tiles
from sage_inductor.patterns.decide import candidates

WIN = 1.02  # faster by more than the spread of the medians
BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
BATCHES = ((4, 32), (1, 24), (1, 8))  # B, H
HEAD_DIMS = (64, 128)
LENGTHS = (1024, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
ROUNDS = 3
TURN = 5  # ms a CUDA graph; a median is over ten of its replays


def tune(
    device: torch.device,
    head_dims: Iterable[int] = HEAD_DIMS,
    lengths: Iterable[int] = LENGTHS,
    clock: Callable | None = None,
    progress: Callable = list,
) -> dict:
    """Measure unmasked and causal self-attention in bf16; the table, as `save` takes it.

    clock(B, H, N, D, is_causal, recipes) -> {name: ms} of the recipes and of SDPA's backends.
    """
    capability = tiles.capability(device)
    clock = clock or (lambda *case: _clock(device, *case))
    cases = [
        (D, kind, recipes, B, H, N)
        for D in head_dims
        for kind in ("full", "causal")
        if (recipes := candidates(capability, D, kind, portable=False))
        for B, H in BATCHES
        for N in sorted(lengths)
    ]
    found = {}  # (recipe, D, kind) -> B * H -> N -> how many times faster
    for D, kind, recipes, B, H, N in progress(cases):
        times = clock(B, H, N, D, kind == "causal", recipes)
        best = min(ms for name, ms in times.items() if name not in recipes)
        for recipe in recipes:
            ratios = found.setdefault((recipe, D, kind), {}).setdefault(B * H, {})
            ratios[N] = best / times[recipe]
    rows = []
    for (recipe, D, kind), of_heads in found.items():
        each = [(heads, shortest(ratios)) for heads, ratios in of_heads.items()]
        rows.append([recipe, D, kind, [list(row) for row in each if row[1]]])
    return {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "capability": list(capability),
        "versions": tiles.versions(),
        "date": datetime.date.today().isoformat(),
        "crossover": rows,
    }


def shortest(ratios: dict[int, float | None]) -> int | None:
    """The N from which on every ratio is at least WIN, or None if the longest N's is not."""
    found = None
    for N in sorted(ratios, reverse=True):
        if not ratios[N] or ratios[N] < WIN:
            break
        found = N
    return found


def save(table: dict) -> Path:
    """Write a table to where `tiles.crossover` of a later process reads it."""
    path = tiles.tuned_path(table["gpu"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=1) + "\n")
    return path


def _clock(device, B, H, N, D, is_causal, recipes) -> dict[str, float]:
    """Medians of ROUNDS rounds, in which the calls change places: power limits the card."""
    calls = _calls(B, H, D, is_causal, tuple(recipes))
    shape = (B, N, H, D)
    q, k, v = (
        torch.randn(shape, device=device, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)
    )
    for x in (q, k, v):
        torch._dynamo.mark_dynamic(x, 2)
    times, names = {}, list(calls)
    with torch.no_grad(), torch.cuda.device(device):
        for i in range(ROUNDS):
            for name in names[i:] + names[:i]:
                try:
                    ms = triton.testing.do_bench_cudagraph(
                        lambda call=calls[name]: call(q, k, v), rep=TURN, return_mode="median"
                    )
                except RuntimeError:
                    if name in recipes:
                        raise
                    continue  # a backend that this device or shape does not have
                times.setdefault(name, []).append(ms)
    return {name: statistics.median(ms) for name, ms in times.items()}


@functools.lru_cache(maxsize=1)
def _calls(B, H, D, is_causal, recipes) -> dict[str, Callable]:
    """The recipes, each compiled once for all N, and SDPA's backends."""
    torch._dynamo.reset()

    def sdpa(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    calls = {backend.name: sdpa_kernel(backend)(sdpa) for backend in BACKENDS}
    for recipe in recipes:
        options = {"sage.recipe": recipe, "sage.force": True, "sage.strict": True}
        calls[recipe] = torch.compile(sdpa, backend="sage", options=options)
    return calls
