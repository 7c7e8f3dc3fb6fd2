"""Timing on this GPU: ``python -m sage_inductor tune``, from which lengths on "auto" is faster than
SDPA, and ``mode="max-autotune"``, whether one call is.

The built-in table (CROSSOVER in ops/tiles.py) was measured on the GPUs that it names. This measures
it again, on yours, and writes what it finds where `tiles.crossover` reads it: the rows of a tuned
table replace the built-in ones of the same recipe, head_dim and kind of call. `race` reads no
table: it times a call that is being compiled.
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

from sage_inductor.decide import WIN, Choice, Trial, candidates
from sage_inductor.ops import mask as masks
from sage_inductor.ops import reference, tiles
from sage_inductor.ops.attention import attention_opaque
from sage_inductor.ops.sdpa import kernel, of_q, operands, prepare
from sage_inductor.patterns.call import CAUSAL, FULL

BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
BATCHES = ((4, 32), (1, 24), (1, 8))  # B, H
HEAD_DIMS = (64, 128)
LENGTHS = (1024, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
ROUNDS = 3
TURN = 5  # ms a CUDA graph; a median is over ten of its replays
LONG = 50  # ms of a call from which one round is enough: it heats the card by itself


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
    with torch.no_grad(), torch.cuda.device(device):
        found = _medians({name: functools.partial(call, q, k, v) for name, call in calls.items()})
    for recipe in recipes:
        if isinstance(found[recipe], Exception):
            raise found[recipe]
    # A backend that this device or shape does not have is left out.
    return {name: ms for name, ms in found.items() if not isinstance(ms, Exception)}


def _medians(calls: dict) -> dict:
    """ms of each, the median of ROUNDS rounds, in which they change places: power limits the card.
    Of what fails, the error."""
    times, failed, names = {name: [] for name in calls}, {}, list(calls)
    for i in range(ROUNDS):
        for name in names[i:] + names[:i]:
            if name in failed or max(times[name], default=0) > LONG:
                continue
            try:
                ms = triton.testing.do_bench_cudagraph(calls[name], rep=TURN, return_mode="median")
            except Exception as error:  # of Triton, of the driver, out of memory, ...
                failed[name] = error
            else:
                times[name].append(ms)
    return {name: failed.get(name) or statistics.median(times[name]) for name in calls}


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


# -- one call, while it is compiled ----


@functools.cache
def race(trial: Trial) -> dict[Choice | str, float | str]:
    """ms of each of the trial's choices, with all preparation, and of SDPA's backends; an error's
    message for one that fails. Once a process for equal trials.

    Nothing is compiled (Dynamo is at work on the call itself), and the random numbers of the
    user's generators stay as they are.
    """
    off = torch.autocast(trial.device.type, enabled=False)  # the trial has what autocast makes
    with torch.no_grad(), torch.cuda.device(trial.device), off:
        try:
            found = _medians(_rivals(trial))
        except Exception as error:  # out of memory for the inputs, say
            found = dict.fromkeys(trial.choices, error)
    return {
        name: f"{type(ms).__name__}: {ms}".split("\n")[0] if isinstance(ms, Exception) else ms
        for name, ms in found.items()
    }


def _rivals(trial: Trial) -> dict[Choice | str, Callable]:
    """Choice or backend -> a call without arguments, each on the same inputs."""
    generator = torch.Generator(trial.device).manual_seed(0)
    make = {"generator": generator, "device": trial.device}
    q, k, v = (
        torch.randn(B, N, H, D, dtype=trial.dtype, **make).transpose(1, 2)
        for B, H, N, D in (trial.q, trial.k, trial.v)
    )
    attn_mask = None
    if trial.mask_dtype == torch.bool:
        attn_mask = torch.rand(trial.mask, **make) < 0.5
    elif trial.mask_dtype is not None:
        attn_mask = torch.randn(trial.mask, dtype=trial.mask_dtype, **make)

    backends, band = BACKENDS, (trial.band.left, trial.band.right, False)
    is_causal, sdpa_mask = attn_mask is None and trial.band == CAUSAL, attn_mask
    if trial.band != FULL and not is_causal:  # SDPA is given the band in its mask
        zeros = torch.zeros(q.shape[2], k.shape[2], device=q.device, dtype=q.dtype)
        sdpa_mask = reference.masked(zeros, attn_mask, *band)
        if attn_mask is None or attn_mask.dtype == torch.bool:
            sdpa_mask = sdpa_mask == 0
    if sdpa_mask is not None or q.shape[3] != v.shape[3]:
        backends = (*BACKENDS, SDPBackend.EFFICIENT_ATTENTION)

    def sdpa():
        return F.scaled_dot_product_attention(
            q, k, v, sdpa_mask, is_causal=is_causal, enable_gqa=q.shape[1] != k.shape[1]
        )

    def sage(choice):
        r, head_dim = choice.full, max(q.shape[3], v.shape[3])
        op, block_m = kernel(q.device, r, head_dim, attn_mask is not None, portable=False)
        mask = seen = None
        if attn_mask is not None:
            mask = masks.as_4d(attn_mask)
            seen = masks.summarize(mask, k.shape[2], block_m)
        quantized, k_mean = operands(v, prepare(k, v, seen, r))
        # Without the correction of lse: nobody reads it in a rewritten call.
        return op(
            q, *quantized, mask, seen, *band, q.shape[3] ** -0.5, k.shape[2], r.granularity, False,
            *of_q(q, k, k_mean, seen, r),
            **({"warpgroups": r.warpgroups} if op is attention_opaque else {}),
        )[0]  # fmt: skip

    return {
        **{backend.name: sdpa_kernel(backend)(sdpa) for backend in backends},
        **{choice: functools.partial(sage, choice) for choice in trial.choices},
    }
