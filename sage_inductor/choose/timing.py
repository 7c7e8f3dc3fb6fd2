"""Timing what a call may become, and SDPA's backends, while it compiles.

benchmark   ``mode="max-autotune"``: the call itself, on random tensors of its sizes
calibrate   a family of calls that no table has: a few sizes, once for a user's GPU
tune        ``python -m sage_inductor tune``: the families that most models have, more sizes
"""

import concurrent.futures
import contextlib
import functools
import json
import logging
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from sage_inductor.choose import cost, families, tables
from sage_inductor.choose.candidates import Candidate, recipes_of
from sage_inductor.choose.cost import TRAINED, Sizes
from sage_inductor.choose.families import BACKENDS, OF_SDPA, Family, Table, are_enough
from sage_inductor.ops import gpus
from sage_inductor.ops.call_shape import CallShape
from sage_inductor.ops.compat import default_store, disable_compiled_autograd
from sage_inductor.ops.compile import LONGEST, compile_elsewhere
from sage_inductor.ops.launch import noted
from sage_inductor.ops.recipe import NAMED
from sage_inductor.ops.reference.exact import masked
from sage_inductor.ops.sdpa import SdpaCall, attend
from sage_inductor.ops.training.gradients import training_op
from sage_inductor.ops.visibility import CAUSAL, FULL

_log = logging.getLogger("sage_inductor")

ROUNDS = 3
GRAPH_MS = 5  # how long a CUDA graph of repeated calls runs; a median is over REPLAYS of it
ONE_ROUND_MS = 50  # a call as long as this gets one round: it heats the card by itself
REPLAYS = 6


class BenchmarkCase(NamedTuple):
    """What is timed in a call's place: random tensors of its sizes, as they are while compiling."""

    shape: CallShape  # of numbers, its band not at the bottom right
    candidates: tuple[Candidate, ...]
    rivals: tuple[str, ...] = tuple(BACKENDS)  # of SDPA
    flash_attention: str = ""  # what SDPA's flash backend runs: families.flash_attention()


Timed = dict[Candidate | str, float | str]  # ms, or the message of an error


@functools.cache
def benchmark(case: BenchmarkCase) -> Timed:
    """ms of each of the case's candidates, with all preparation, and of SDPA's backends; an error's
    message for one that fails. Equal cases are measured once: in a process and, where
    torch.distributed is initialised, by one rank for all.

    Nothing is compiled (Dynamo is at work on the call itself), and the random numbers of the
    user's generators stay as they are.
    """
    # Not the index: each rank has another. GPUs of another kind measure for themselves.
    device = case.shape.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    key = repr(case._replace(shape=case.shape._replace(device=name)))
    found = agreed(key, lambda: list(measure(case).items()))
    return {name if isinstance(name, str) else Candidate(*name): ms for name, ms in found}


def agreed(key: str, measure: Callable, store=None):
    """What `measure` finds, which JSON can say. Where torch.distributed is initialised, all ranks
    have what the first of them to ask for the key finds: with times of their own, they would choose
    different recipes. store: None, the job's. A collective would hang where the ranks compile
    different graphs (stages of a pipeline) or one of them compiles again."""
    if store is None:
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return measure()
        store = default_store()
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
def measure(case: BenchmarkCase, rounds: int = ROUNDS) -> Timed:
    """As `benchmark`, here and now. Where no backend computes the call (with a mask none has rows
    of, say, 63 channels), SDPA's "math" is timed as well, which it falls back to."""
    device, quiet, found = case.shape.device, warnings.catch_warnings(), {}
    apart = torch.cuda.device(device), torch.cuda.stream(_stream(device))
    with _one_at_a_time, torch.no_grad(), apart[0], apart[1], quiet:
        warnings.simplefilter("ignore", UserWarning)  # why a backend has no such calls
        for each in (case, case._replace(rivals=("MATH",), candidates=())):
            try:
                times = time_calls(calls_of(each), rounds)
            except RuntimeError as error:  # out of memory for the inputs, say
                times = dict.fromkeys(each.candidates, error)
            for name, ms in times.items():
                failed = isinstance(ms, Exception)
                found[name] = f"{type(ms).__name__}: {ms}".split("\n")[0] if failed else ms
            of_sdpa = [found[name] for name in case.rivals if name in found]
            if not of_sdpa or not all(isinstance(ms, str) for ms in of_sdpa):
                break
    return found


def calls_of(case: BenchmarkCase) -> dict[Candidate | str, Callable]:
    """Candidate or backend -> a call without arguments, each on the same inputs, which are random
    and take the case's memory. Raises what allocating them does."""
    shape = case.shape
    make = {"generator": torch.Generator(shape.device).manual_seed(0), "device": shape.device}

    def random(B, H, N, D):
        return torch.randn(B, N, H, D, dtype=shape.dtype, **make).transpose(1, 2)

    q, k, v = (random(*dims) for dims in (shape.q, shape.k, shape.v))
    q_stacked, k_of_q, v_of_q = q, k, v
    if k.shape[0] != q.shape[0]:
        k_of_q, v_of_q = (x.expand(q.shape[0], -1, -1, -1) for x in (k, v))
        q_stacked = q.transpose(1, 2).flatten(0, 1)[None].transpose(1, 2)
    attn_mask = None
    if shape.mask_dtype == torch.bool:
        attn_mask = torch.rand(shape.mask, **make) < 0.5
    elif shape.mask_dtype is not None:
        attn_mask = torch.randn(shape.mask, dtype=shape.mask_dtype, **make)

    band = shape.band
    is_causal, sdpa_mask = attn_mask is None and shape.band == CAUSAL, attn_mask
    if shape.band != FULL and not is_causal:  # SDPA is given the band in its mask
        zeros = torch.zeros(q.shape[2], k.shape[2], device=q.device, dtype=q.dtype)
        sdpa_mask = masked(zeros, attn_mask, *band)
        if attn_mask is None or attn_mask.dtype == torch.bool:
            sdpa_mask = sdpa_mask == 0
    names = case.rivals
    if sdpa_mask is None and q.shape[3] == v.shape[3]:  # it is the slowest of three there
        names = tuple(n for n in names if n != "EFFICIENT_ATTENTION") or names
    given = dict(is_causal=is_causal, enable_gqa=q.shape[1] != k.shape[1])
    sdpa = functools.partial(F.scaled_dot_product_attention, q, k_of_q, v_of_q, sdpa_mask, **given)
    scale = q.shape[3] ** -0.5

    def sage(candidate):
        if shape.trains:
            return training_op(candidate.recipe)(q, k, v, is_causal, scale, True)[0]
        recipe, warpgroups = NAMED[candidate.recipe].encode(), candidate.warpgroups
        call = SdpaCall.of(q_stacked, k, v, scale, recipe, attn_mask, band, warpgroups=warpgroups)
        return attend(call)[0]  # without the correction of lse, which nobody reads

    calls = {
        **{name: sdpa_kernel(SDPBackend.__members__[name])(sdpa) for name in names},
        **{each: functools.partial(sage, each) for each in case.candidates},
    }
    if not shape.trains:
        return calls
    grad = random(*shape.q[:3], shape.v[3])
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
        with _one_at_a_time, torch.no_grad(), torch.cuda.device(case.shape.device):
            with contextlib.suppress(Exception), noted() as found:  # `measure` says what fails
                calls = calls_of(case)
                for each in case.candidates:
                    with contextlib.suppress(Exception):
                        calls[each]()
            launches += found
    return compile_elsewhere(launches, cases[0].shape.capability) if launches else []


# A rank that waits for the whole device waits for other streams' sends and receives, too. Another
# rank may wait in `agreed` for this one's times before it joins them. So what is timed has a stream
# of its own, and the host waits for events of that stream alone.


@functools.cache
def _stream(device: torch.device) -> "torch.cuda.Stream | None":
    """One for all calls: torch keeps what a stream has freed for that stream."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def time_calls(calls: dict, rounds: int = ROUNDS) -> dict:
    """ms of each, the median of the rounds, in which they change places: power limits the card.
    An error for what fails; if it lacks memory, after it failed again with all that
    torch had cached."""
    times, failed, names = {name: [] for name in calls}, {}, list(calls)
    graphs = []
    for i in range(rounds):
        for name in names[i:] + names[:i]:
            if name in failed or max(times[name], default=0) > ONE_ROUND_MS:
                continue
            try:
                try:
                    ms = time_call(calls[name], graphs)
                except torch.OutOfMemoryError:  # torch frees nothing of its cache in a capture
                    graphs.clear()
                    torch.cuda.empty_cache()  # waits for the whole device
                    ms = time_call(calls[name], graphs)
            except Exception as error:  # noqa: BLE001  (Triton's, the driver's: reports say it)
                failed[name] = error
            else:
                times[name].append(ms)
    return {name: failed.get(name) or statistics.median(times[name]) for name in calls}


def time_call(call: Callable, graphs: list) -> float:
    """ms of one call on the GPU alone: the median over replays of a CUDA graph of GRAPH_MS. The
    current stream must not be the default one. graphs: holds the graph whose memory this one takes,
    if there is one, and then this one.

    As triton.testing.do_bench_cudagraph, but for how it captures: another thread of the user's that
    allocates meanwhile (cudaMalloc) breaks a capture in CUDA's "global" mode, and may itself fail.
    And torch.cuda.graph waits for the whole device.
    """
    call()  # compiles
    ms = _elapsed(lambda: [call() for _ in range(5)]) / 5
    repeats = max(1, int(GRAPH_MS / ms)) if ms else 1000
    graph, pool = torch.cuda.CUDAGraph(), [each.pool() for each in graphs]
    graph.capture_begin(*pool, capture_error_mode="thread_local")
    try:
        for _ in range(repeats):
            call()
    finally:
        graph.capture_end()
    graphs[:] = [graph]
    return statistics.median(_elapsed(graph.replay) / repeats for _ in range(REPLAYS))


def _elapsed(run: Callable) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


# B, H_q, H_kv, N_q, N_kv. Few and many tiles, short and long, several heads to one of k and v,
# fewer keys than queries, an odd length: what the coefficients of `cost.Features` can be told apart
# by. In a table with nothing else they predict the other sizes of MANY best (by a search that adds
# one after the other); one of few short heads says what a call takes at least. A measurement that
# runs out of time has the first.
FEW = (
    (1, 24, 24, 4096, 4096), (4, 32, 32, 2048, 2048), (1, 24, 24, 1024, 1024),
    (2, 8, 8, 3071, 3071), (1, 4, 4, 512, 512), (1, 2, 2, 16384, 16384), (1, 2, 2, 1024, 65536),
    (1, 8, 8, 2048, 2048), (2, 32, 8, 4096, 4096), (1, 28, 28, 384, 384), (1, 24, 24, 6144, 1024),
    (2, 4, 4, 32768, 1280),
)  # fmt: skip
MANY = (
    *FEW,
    (1, 24, 24, 12288, 12288), (1, 8, 8, 8192, 8192), (4, 32, 32, 1024, 1024),
    (4, 32, 32, 8192, 8192), (1, 1, 1, 8192, 8192), (1, 4, 4, 4096, 4096), (1, 16, 16, 3072, 3072),
    (1, 12, 12, 20000, 20000), (8, 32, 32, 1024, 1024), (1, 40, 40, 6000, 6000),
    (1, 32, 4, 10000, 10000), (2, 24, 24, 1024, 8192), (1, 4, 4, 40000, 40000), (2, 8, 8, 512, 512),
    (1, 64, 64, 512, 512), (4, 8, 8, 8192, 512), (3, 2, 2, 9001, 9001), (2, 16, 16, 1023, 1023),
    (1, 8, 8, 5121, 5121), (2, 32, 32, 1792, 1792), (1, 40, 40, 1536, 1536),
    # Tiles of 192 rows run all at once, those of 128 do not. And tiles of one warpgroup with fewer
    # heads of k than of q, by which the time of k's rows is told apart from that of tiles.
    (1, 3, 3, 6400, 6400), (1, 24, 6, 700, 700), (4, 32, 4, 1024, 1024),
)  # fmt: skip
SECONDS = 10.0  # after which no more sizes than are needed are begun: a compilation waits


def measure_family(
    device: torch.device, family: Family, recipes: tuple[str, ...], sizes: Iterable[Sizes],
    rounds: int = ROUNDS, seconds: float = float("inf"),
) -> families.Times:  # fmt: skip
    """ms of the recipes and of SDPA's backends; what could not be timed is left out. seconds: no
    size is begun after them, once there are enough for a fit. Raises RuntimeError where there
    never are, with an error."""
    cases = cases_of(device, family, recipes, sizes)
    concurrent.futures.wait(start_compiling(tuple(cases.values())), LONGEST)
    began, found, errors = time.monotonic(), {}, []

    def is_enough() -> bool:
        return any(are_enough(found, recipe) for recipe in recipes)

    for each, case in cases.items():
        if is_enough() and time.monotonic() - began > seconds:
            break
        times = {getattr(x, "recipe", x): ms for x, ms in measure(case, rounds).items()}
        errors += [ms for ms in times.values() if isinstance(ms, str)]
        timed = {name: ms for name, ms in times.items() if not isinstance(ms, str)}
        if len({name in OF_SDPA for name in timed}) == 2:
            found[each] = timed
    if not is_enough():
        why = next(iter(errors), "no more were given")
        raise RuntimeError(f"{len(found)} sizes were timed, {cost.ENOUGH} are needed: {why}")
    return found


def cases_of(
    device: torch.device, family: Family, recipes: tuple[str, ...], sizes: Iterable[Sizes]
) -> dict[Sizes, BenchmarkCase]:
    candidates = tuple(map(Candidate, recipes))
    return {each: BenchmarkCase(family.shape(device, each), candidates) for each in sizes}


_unmeasurable: dict[tuple, str] = {}  # what could not be measured in this process, and why


def calibrate(device: torch.device, family: Family, recipe: str) -> str | None:
    """Measure a family that nothing is known of, and keep it: once for all processes of the user,
    and by one rank for all. None, or why there is nothing to predict by."""
    gpu, key = tables.gpu_name(device), (device, family, recipe)
    if key in _unmeasurable or tables.with_times(gpu, family, recipe):
        return _unmeasurable.get(key)
    try:
        table = tables.table_of(agreed(f"{gpu} {family} {recipe}", lambda: _calibrated(*key)))
        if not tables.with_times(gpu, family, recipe):
            # By a rank of another host. The next job of these hosts is to decide alike, too.
            with contextlib.suppress(OSError, RuntimeError):
                tables.save(table)
        tables.add(table)
    except (RuntimeError, ValueError) as error:  # of CUDA, out of memory, of the other rank
        _unmeasurable[key] = f"{type(error).__name__}: {error}".split("\n")[0]
    return _unmeasurable.get(key)


def _calibrated(device: torch.device, family: Family, recipe: str) -> dict:
    """As `Table.to_json`, of this one family."""
    gpu = tables.gpu_name(device)
    with tables.locked(gpu):
        tables.forget()  # another process may have measured it meanwhile
        if table := tables.with_times(gpu, family, recipe):
            found = table.find(family, recipe)
            return Table(gpu, table.device, {found: table.families[found]}).to_json()
        _log.warning(
            "attention with %s is measured on %s, once, for about %g s"
            " (sage_inductor.config.calibrate = False: never)", family, gpu, SECONDS,
        )  # fmt: skip
        began = time.monotonic()
        times = measure_family(device, family, (recipe,), family.sizes(FEW), 1, SECONDS)
        _log.warning("measured %d sizes in %.1f s", len(times), time.monotonic() - began)
        table = Table(gpu, gpus.Gpu.of(device), {family: times})
        try:
            tables.save(table, contextlib.nullcontext)
        except (OSError, RuntimeError) as error:
            _log.warning("what was measured is kept for this process alone: %s", error)
        return table.to_json()


TUNED_HEAD_DIMS = (64, 96, 128, 256)
TUNED_KINDS = ("full", "causal", "window", "keys", *TRAINED)
TUNED_ROUNDS = 2  # of a size's timing


def tune(
    device: torch.device, head_dims: Iterable[int], kinds: Iterable[str],
    progress: Callable = list, save: Callable[[Table], object] = lambda table: None,
) -> Table:  # fmt: skip
    """Measure families in bf16, those of each head_dim and kind of call.

    progress: is given the families, and yields them. save: is given the table as far as it goes,
    after each of them.
    """
    table = Table(tables.gpu_name(device), gpus.Gpu.of(device), {})
    given = {}
    for family in (Family(D, D, kind) for D in head_dims for kind in kinds):
        if recipes := recipes_of(gpus.capability(device), family):
            given[family] = device, family, recipes, family.sizes(MANY)
            # The kernels of all families share the processes that compile.
            start_compiling(tuple(cases_of(*given[family]).values()))
    for family in progress(list(given)):
        table = table.with_families({family: measure_family(*given[family], rounds=TUNED_ROUNDS)})
        save(table)
    return table
