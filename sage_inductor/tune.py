"""``python -m sage_inductor tune``: from which lengths on "auto" is faster than SDPA on this GPU.

Self-attention is measured in bf16, unmasked and causal, over batches, heads and lengths; what comes
of it is a table for `cost.save`.
"""

import datetime
import functools
import itertools
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from sage_inductor import cost
from sage_inductor.autotune import time_calls
from sage_inductor.decide import auto_recipes
from sage_inductor.ops.attention import tiles

BATCHES = ((4, 32), (1, 24), (1, 8))  # B, H
HEAD_DIMS = (64, 128)
LENGTHS = (1024, 2048, 3072, 4096, 6144, 8192, 12288, 16384)


def tune(
    device: torch.device,
    head_dims: Iterable[int] = HEAD_DIMS,
    lengths: Iterable[int] = LENGTHS,
    time_case: Callable | None = None,
    progress: Callable = list,
    save: Callable[[dict], object] = lambda table: None,
) -> dict:
    """Measure unmasked and causal self-attention; the table, as `cost.save` takes it.

    time_case(B, H, N, D, is_causal, recipes) -> {name: ms} of the recipes and of SDPA's backends.
    save: is given the table as far as it goes, after each head_dim and kind of call.
    """
    capability = tiles.capability(device)
    time_case = time_case or (lambda *case: _time_case(device, *case))
    cases = [
        (D, kind, recipes, B, H, N)
        for D in head_dims
        for kind in ("full", "causal")
        if (recipes := auto_recipes(capability, D, kind))
        for B, H in BATCHES
        for N in sorted(lengths)
    ]
    table = {
        "gpu": cost.gpu_name(device) if device.type == "cuda" else device.type,
        "versions": cost.versions(),
        "date": datetime.date.today().isoformat(),
        "crossover": [],
    }
    for (D, kind, recipes), group in itertools.groupby(progress(cases), key=lambda case: case[:3]):
        ratios = {recipe: {} for recipe in recipes}  # B * H -> N -> how many times faster
        for *_, B, H, N in group:
            times = time_case(B, H, N, D, kind == "causal", recipes)
            best = min(ms for name, ms in times.items() if name not in recipes)
            for recipe in recipes:
                ratios[recipe].setdefault(B * H, {})[N] = best / times[recipe]
        for recipe, of_heads in ratios.items():
            each = [[heads, shortest(of_length)] for heads, of_length in of_heads.items()]
            table["crossover"].append([recipe, D, kind, [row for row in each if row[1]]])
        save(table)
    return table


def shortest(ratios: dict[int, float | None]) -> int | None:
    """The N from which on every ratio is at least MIN_SPEEDUP, or None: the longest N's is not."""
    found = None
    for N in sorted(ratios, reverse=True):
        if not ratios[N] or ratios[N] < cost.MIN_SPEEDUP:
            break
        found = N
    return found


def _time_case(device, B, H, N, D, is_causal, recipes) -> dict[str, float]:
    calls = _compiled(B, H, D, is_causal, tuple(recipes))
    shape = (B, N, H, D)
    q, k, v = (
        torch.randn(shape, device=device, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)
    )
    for x in (q, k, v):
        torch._dynamo.mark_dynamic(x, 2)
    with torch.no_grad(), torch.cuda.device(device):
        found = time_calls({name: functools.partial(call, q, k, v) for name, call in calls.items()})
    for recipe in recipes:
        if isinstance(found[recipe], Exception):
            raise found[recipe]
    # A backend that this device or shape does not have is left out.
    return {name: ms for name, ms in found.items() if not isinstance(ms, Exception)}


@functools.lru_cache(maxsize=1)
def _compiled(B, H, D, is_causal, recipes) -> dict[str, Callable]:
    """The recipes, each compiled once for all N, and SDPA's backends."""
    torch._dynamo.reset()

    def sdpa(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    backends = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
    calls = {backend.name: sdpa_kernel(backend)(sdpa) for backend in backends}
    for recipe in recipes:
        options = {"sage.recipe": recipe, "sage.force": True, "sage.strict": True}
        calls[recipe] = torch.compile(sdpa, backend="sage", options=options)
    return calls
