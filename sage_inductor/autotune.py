"""``mode="max-autotune"``: while a call is compiled its recipes, by each of their tiles, and SDPA's
backends are timed.

`sage_inductor/decide.py` makes a `BenchmarkCase` of a call and compares the times that `benchmark`
measures of it.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import logging
import statistics
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from sage_inductor.ops.attention import tiles
from sage_inductor.ops.compat import default_store, disable_compiled_autograd
from sage_inductor.ops.compile import compile_elsewhere
from sage_inductor.ops.launch import noted
from sage_inductor.ops.recipe import NAMED
from sage_inductor.ops.reference.exact import masked
from sage_inductor.ops.sdpa import SdpaCall, attend
from sage_inductor.ops.training.gradients import trained_by
from sage_inductor.patterns.call import CAUSAL, FULL, Band

_log = logging.getLogger("sage_inductor")

# SDPA's backends, by their names in SDPBackend -> whether the user has them switched on.
BACKENDS = {
    "CUDNN_ATTENTION": torch.backends.cuda.cudnn_sdp_enabled,
    "FLASH_ATTENTION": torch.backends.cuda.flash_sdp_enabled,
    "EFFICIENT_ATTENTION": torch.backends.cuda.mem_efficient_sdp_enabled,
}
OF_SDPA = (*BACKENDS, "MATH")
ROUNDS = 3
GRAPH_MS = 5  # how long a CUDA graph of repeated calls runs; a median is over REPLAYS of it
ONE_ROUND_MS = 50  # a call as long as this gets one round: it heats the card by itself
REPLAYS = 6


class Candidate(NamedTuple):
    """What a call may become."""

    recipe: str  # a name in NAMED; of what trains, as `trained_by` has it
    warpgroups: int | None = None  # SdpaCall's

    @property
    def tile(self) -> str:
        """What a reason says of the tile, unless it is the table's."""
        if self.warpgroups is None:
            return ""
        names = {0: "the Triton kernel", 1: "1 warpgroup"}
        return f" with {names.get(self.warpgroups, f'{self.warpgroups} warpgroups')}"


@dataclasses.dataclass(frozen=True)
class BenchmarkCase:
    """What is timed in a call's place: random tensors of its sizes, as they are while compiling."""

    device: torch.device
    dtype: torch.dtype
    q: tuple[int, ...]  # [B, H_q, N_q, D]
    k: tuple[int, ...]  # [B, H_kv, N_kv, D], or [1, ...]: batches share it, ours are stacked
    v: tuple[int, ...]  # [B, H_kv, N_kv, D_v], as k
    band: Band  # not at the bottom right
    mask: tuple[int, ...] | None  # attn_mask's shape
    mask_dtype: torch.dtype | None
    candidates: tuple[Candidate, ...]
    rivals: tuple[str, ...] = tuple(BACKENDS)  # of SDPA
    flash_attention: str = ""  # what SDPA's flash backend runs: measured.flash_attention()
    trains: bool = False  # forward and backward are timed together


def rivals() -> tuple[str, ...]:
    """The backends that SDPA may run: those that are not switched off, globally or by `sdpa_kernel`
    around the call that compiles. MATH where all are."""
    return tuple(name for name, is_on in BACKENDS.items() if is_on()) or ("MATH",)


Times = dict[Candidate | str, float | str]  # ms, or the message of an error


@functools.cache
def benchmark(case: BenchmarkCase) -> Times:
    """ms of each of the case's candidates, with all preparation, and of SDPA's backends; an error's
    message for one that fails. Equal cases are measured once: in a process and, where
    torch.distributed is initialised, by one rank for all.

    Nothing is compiled (Dynamo is at work on the call itself), and the random numbers of the
    user's generators stay as they are.
    """
    # Not the index: each rank has another. GPUs of another kind measure for themselves.
    device = case.device.type
    if device == "cuda":
        device = torch.cuda.get_device_name(case.device)
    key = repr(dataclasses.replace(case, device=device))
    found = agreed(key, lambda: list(measure(case).items()))
    return {name if isinstance(name, str) else Candidate(*name): ms for name, ms in found}


def agreed(key: str, measure: Callable):
    """What `measure` finds, which JSON can say. Where torch.distributed is initialised, all ranks
    have what the first of them to ask for the key finds: with times of their own, they would choose
    different recipes."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return _agreed(key, measure, default_store())
    return measure()


def _agreed(key: str, measure: Callable, store):
    """Through the job's key-value store and not by a collective, which would hang where the ranks
    compile different graphs (stages of a pipeline) or one of them compiles again."""
    key = f"sage_inductor/{key}"
    if store.add(f"{key}/ranks", 1) <= 1:  # 0: the store of a fake process group
        found = None
        try:
            found = measure()
        finally:
            store.set(key, json.dumps(found))
        return found
    try:
        found = json.loads(store.get(key))  # waits
    except RuntimeError as error:  # the rank that came first has died, or measures for too long
        _log.warning("no rank has timed %s: %s; this rank does it for itself", key, error)
        found = None
    return measure() if found is None else found


_one_at_a_time = threading.Lock()  # threads that compile would time each other's work


def _apart(function: Callable) -> Callable:
    """The same in a thread of its own: the caller's autocast and inference mode, and a checkpoint's
    dispatch modes and hooks on what autograd saves, are not for what is timed here."""

    @functools.wraps(function)
    def run(*args):
        with concurrent.futures.ThreadPoolExecutor(1) as apart:
            return apart.submit(function, *args).result()

    return run


@_apart
def measure(case: BenchmarkCase, rounds: int = ROUNDS) -> Times:
    """As `benchmark`, here and now. Where no backend computes the call (with a mask none has rows
    of, say, 63 channels), SDPA's "math" is timed as well, which it falls back to."""
    quiet = warnings.catch_warnings()
    with _one_at_a_time, torch.no_grad(), torch.cuda.device(case.device), quiet:
        warnings.simplefilter("ignore", UserWarning)  # why a backend has no such calls
        found = _measured(case, rounds)
        of_sdpa = [found[name] for name in case.rivals if name in found]
        if of_sdpa and all(isinstance(ms, str) for ms in of_sdpa):
            case = dataclasses.replace(case, rivals=("MATH",), candidates=())
            found |= _measured(case, rounds)
    return found


def _measured(case: BenchmarkCase, rounds: int) -> Times:
    try:
        found = time_calls(calls_of(case), rounds)
    except Exception as error:  # out of memory for the inputs, say
        found = dict.fromkeys(case.candidates, error)
    return {
        name: f"{type(ms).__name__}: {ms}".split("\n")[0] if isinstance(ms, Exception) else ms
        for name, ms in found.items()
    }


def calls_of(case: BenchmarkCase) -> dict[Candidate | str, Callable]:
    """Candidate or backend -> a call without arguments, each on the same inputs, which are random
    and take the case's memory. Raises what allocating them does."""
    generator = torch.Generator(case.device).manual_seed(0)
    make = {"generator": generator, "device": case.device}

    def random(shape):
        B, H, N, D = shape
        return torch.randn(B, N, H, D, dtype=case.dtype, **make).transpose(1, 2)

    q, k, v = map(random, (case.q, case.k, case.v))
    q_stacked, k_of_q, v_of_q = q, k, v
    if k.shape[0] != q.shape[0]:
        k_of_q, v_of_q = (x.expand(q.shape[0], -1, -1, -1) for x in (k, v))
        q_stacked = q.transpose(1, 2).flatten(0, 1)[None].transpose(1, 2)
    attn_mask = None
    if case.mask_dtype == torch.bool:
        attn_mask = torch.rand(case.mask, **make) < 0.5
    elif case.mask_dtype is not None:
        attn_mask = torch.randn(case.mask, dtype=case.mask_dtype, **make)

    band = (case.band.left, case.band.right, False)
    is_causal, sdpa_mask = attn_mask is None and case.band == CAUSAL, attn_mask
    if case.band != FULL and not is_causal:  # SDPA is given the band in its mask
        zeros = torch.zeros(q.shape[2], k.shape[2], device=q.device, dtype=q.dtype)
        sdpa_mask = masked(zeros, attn_mask, *band)
        if attn_mask is None or attn_mask.dtype == torch.bool:
            sdpa_mask = sdpa_mask == 0
    names = case.rivals
    if sdpa_mask is None and q.shape[3] == v.shape[3]:  # it is the slowest of three there
        names = tuple(n for n in names if n != "EFFICIENT_ATTENTION") or names
    enable_gqa, scale = q.shape[1] != k.shape[1], q.shape[3] ** -0.5

    def sdpa():
        return F.scaled_dot_product_attention(
            q, k_of_q, v_of_q, sdpa_mask, is_causal=is_causal, enable_gqa=enable_gqa
        )

    def sage(candidate):
        if case.trains:
            return trained_by(candidate.recipe)(q, k, v, is_causal, scale, True)[0]
        # Without the correction of lse: nobody reads it in a rewritten call.
        return attend(
            SdpaCall(
                q_stacked, k, v, attn_mask, [], *band, scale, NAMED[candidate.recipe].encode(),
                candidate.warpgroups, out_bnhd=False, portable=False,
            )
        )[0]  # fmt: skip

    calls = {
        **{name: sdpa_kernel(SDPBackend.__members__[name])(sdpa) for name in names},
        **{each: functools.partial(sage, each) for each in case.candidates},
    }
    if not case.trains:
        return calls
    grad = random((*case.q[:3], case.v[3]))
    return {name: _step(call, (q, k, v), grad) for name, call in calls.items()}


def _step(attend: Callable, inputs: tuple[torch.Tensor, ...], grad: torch.Tensor) -> Callable:
    """A call without arguments: `attend` and its backward, launched by this thread, as `noted` and
    the capture of a graph are a thread's own. It is not compiled: Dynamo, at work in another
    thread, holds its lock."""
    for x in inputs:
        x.requires_grad_()

    def step():
        one_thread = torch.autograd.set_multithreading_enabled(False)
        with torch.enable_grad(), one_thread, disable_compiled_autograd():
            return torch.autograd.grad(attend(), inputs, grad)

    return step


@_apart
def start_compiling(cases: Sequence[BenchmarkCase]) -> list[concurrent.futures.Future]:
    """What the candidates will launch, in several processes at once. To compile them where they are
    first timed took most of a minute for ten sizes."""
    launches = []
    for case in cases:
        with _one_at_a_time, torch.no_grad(), torch.cuda.device(case.device):
            with contextlib.suppress(Exception), noted() as found:  # `measure` says what fails
                calls = calls_of(case)
                for each in case.candidates:
                    with contextlib.suppress(Exception):
                        calls[each]()
            launches += found
    return compile_elsewhere(launches, tiles.capability(cases[0].device)) if launches else []


# -- the clock ----


def time_calls(calls: dict, rounds: int = ROUNDS) -> dict:
    """ms of each, the median of so many rounds, in which they change places: power limits the card.
    Of what fails, the error."""
    times, failed, names = {name: [] for name in calls}, {}, list(calls)
    for i in range(rounds):
        for name in names[i:] + names[:i]:
            if name in failed or max(times[name], default=0) > ONE_ROUND_MS:
                continue
            try:
                ms = time_call(calls[name])
            except Exception as error:  # of Triton, of the driver, out of memory, ...
                failed[name] = error
            else:
                times[name].append(ms)
    return {name: failed.get(name) or statistics.median(times[name]) for name in calls}


def time_call(call: Callable) -> float:
    """ms of one call on the GPU alone: the median over replays of a CUDA graph of GRAPH_MS.

    As triton.testing.do_bench_cudagraph, but for how it captures: another thread of the user's that
    allocates meanwhile (cudaMalloc) breaks a capture in CUDA's "global" mode, and may itself fail.
    """
    with torch.cuda.stream(torch.cuda.Stream()):
        call()  # compiles
        ms = _elapsed(lambda: [call() for _ in range(5)]) / 5
        repeats = max(1, int(GRAPH_MS / ms)) if ms else 1000
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(repeats):
                call()
        torch.cuda.synchronize()
        return statistics.median(_elapsed(graph.replay) / repeats for _ in range(REPLAYS))


def _elapsed(run: Callable) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)
