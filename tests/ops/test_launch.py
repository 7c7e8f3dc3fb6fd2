"""Launching without Triton's look-up, and compiling before the first launch."""

import concurrent.futures
import contextlib
import logging
import os
import re
import threading
import time

import pytest
import support
import torch
import triton
from support import arguments, attention_call
from torch._inductor.async_compile import AsyncCompile
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from triton import knobs
from triton.runtime import driver

from sage_inductor.lowering import precompile
from sage_inductor.ops import compile as compile_module
from sage_inductor.ops import launch
from sage_inductor.ops.attention import tiles
from sage_inductor.ops.attention.select import Problem, run_opaque, select
from sage_inductor.ops.compat import ptxas_version
from sage_inductor.ops.compile import Compilation, compile_elsewhere
from sage_inductor.ops.formats import Kept
from sage_inductor.ops.quantize import smooth
from sage_inductor.ops.quantize.one_pass import launch_kv
from sage_inductor.ops.recipe import NAMED
from sage_inductor.ops.sdpa import SdpaCall
from sage_inductor.ops.training import rowscaled
from sage_inductor.ops.visibility import Visibility

RIGHT_BELOW = None, 0, False  # causal
FULL = None, None, False
FP_FUSION = {"enable_fp_fusion": True}  # what every launch asks for


class Kernel:
    """Stands for a Triton kernel: what it was asked to look up and what it launched."""

    def __init__(self):
        self.looked_up, self.launched = [], []

    def __getitem__(self, grid):
        def run(*args, **options):
            self.looked_up.append((grid, args, options))
            return Compiled(self)

        return run


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args: self.kernel.launched.append((grid, args))


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    index = 0

    @property
    def device(self):
        return torch.device("cuda", self.index)


@pytest.fixture
def current(monkeypatch):
    """The current device, and where it was while kernels were launched."""
    current = [0]

    @contextlib.contextmanager
    def device(index):
        current.insert(0, index)
        yield
        del current[0]

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    return current


def test_a_kernel_is_looked_up_once(current):
    kernel, x = Kernel(), torch.zeros(64).as_subclass(OnGpu)
    for _ in range(3):
        y = torch.zeros(64)
        launch.launch_cached(kernel, (5,), (x, y), (1, 2.0, True), num_warps=8)
    assert kernel.looked_up == [
        ((5,), (x, kernel.looked_up[0][1][1], 1, 2.0, True), {"num_warps": 8} | FP_FUSION)
    ]
    assert [grid for grid, _ in kernel.launched] == [(5, 1, 1)] * 2
    assert kernel.launched[-1][1][1] is y


def test_a_kernel_is_looked_up_again_for_all_that_changes_its_code(current):
    kernel, x = Kernel(), torch.zeros(64).as_subclass(OnGpu)
    launch.launch_cached(kernel, (5,), (x,), (1,), num_warps=8)
    launch.launch_cached(kernel, (5,), (x,), (2,), num_warps=8)
    launch.launch_cached(kernel, (5,), (x.half(),), (1,), num_warps=8)
    launch.launch_cached(kernel, (5,), (x,), (1,), num_warps=4)
    launch.launch_cached(Kernel(), (5,), (x,), (1,), num_warps=8)
    x.index = 1
    launch.launch_cached(kernel, (5,), (x,), (1,), num_warps=8)
    assert len(kernel.looked_up) == 5 and not kernel.launched
    # Not aligned to 16 bytes, the last, the first or both: Triton tells such arguments apart.
    for i, tensors in enumerate([(x[1:],), (x[2:],), (x[1:], x), (x, x[2:])]):
        for _ in range(2):
            launch.launch_cached(kernel, (5,), tensors, (1,), num_warps=8)
        assert len(kernel.looked_up) == 7 + 2 * i and not kernel.launched


def test_a_kernel_is_launched_on_the_device_of_its_tensors(current):
    x, where = torch.zeros(64).as_subclass(OnGpu), []
    x.index = 1

    class There(Kernel):
        def __getitem__(self, grid):
            where.append(tuple(current))
            return super().__getitem__(grid)

    launch.launch_cached(There(), (5,), (x,), (1,))
    assert where == [(1, 0)] and current == [0]


def test_a_kernel_that_torch_sees_is_launched_on_the_device_of_its_tensors(current, monkeypatch):
    x, where, told = torch.zeros(64).as_subclass(OnGpu), [], []
    x.index = 1

    def kernel(*args, **options):
        told.append(options)
        where.append(tuple(current))

    kernel = {(5,): kernel}
    monkeypatch.setattr(launch, "wrap_triton", lambda kernel: kernel)
    monkeypatch.setattr(torch.cuda, "device_of", lambda x: torch.cuda.device(x.device.index))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(launch, "launch_options", None)  # a torch that cannot pass options on
    launch.launch_traced(kernel, (5,), (x,), (1,))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)  # fake tensors
    monkeypatch.setattr(launch, "launch_options", object())
    launch.launch_traced(kernel, (5,), (x,), (1,))
    assert where == [(1, 0), (0,)] and told == [{}, FP_FUSION]


def test_a_kernel_of_a_package_rounds_as_a_launched_one(monkeypatch):
    told = []
    monkeypatch.setattr(triton, "compile", lambda *args, options, **_: told.append(options))
    kernel = smooth._final_kernel
    types = ("constexpr",) * len(kernel.arg_names)
    Compilation(kernel, types, (), (), (("num_warps", 8),)).compile((9, 0))
    assert told == [{"num_warps": 8} | FP_FUSION]


@pytest.fixture
def h200(monkeypatch):
    """The tables and the schedule of an H200; what is compiled is written down."""
    compiled = []

    def warmup(self, *args, grid, **options):
        kinds = [x.block_shape if hasattr(x, "block_shape") else x for x in args]
        compiled.append((self.fn.__name__, grid, kinds, options))

    monkeypatch.setattr(tiles, "capability", lambda device: (9, 0))
    monkeypatch.setattr(tiles, "processors", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(launch, "_compiling", launch._Compiling())
    monkeypatch.setattr(triton.JITFunction, "warmup", warmup)
    return compiled


def qkv(N, device, D=64, heads=(8, 4, 4)):
    """Fake tensors, as while torch.compile traces."""
    with FakeTensorMode():
        shapes = [(2, N, h, D) for h in heads]
        q, k, v = (torch.empty(s, dtype=torch.bfloat16, device=device) for s in shapes)
        return [x.transpose(1, 2) for x in (q, k, v)]


def finished():
    """What was compiled in the background has been."""
    running = [f for each in list(launch._compiling.futures.values()) for f in list(each)]
    assert not concurrent.futures.wait(running, 60).not_done


BANDS = {"full": FULL, "causal": RIGHT_BELOW, "a long window": (5000, 0, False)}
MASKS = {
    "none": lambda N: None,
    "keys": lambda N: torch.empty(2, 1, 1, N, dtype=torch.bool),
    "rows": lambda N: torch.empty(N, N, dtype=torch.bool),
    "heads": lambda N: torch.empty(2, 8, 1, N, dtype=torch.bool).expand(2, 8, N, N),
    "bias": lambda N: torch.empty(1, 1, N, N, dtype=torch.bfloat16).mT,
}


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("recipe", ["sage2-8b-per-token", "sage1-per-token"])
@pytest.mark.parametrize("warpgroups", [None, 0, 2, 3], ids=str)
@pytest.mark.parametrize("N", [1000, 2048])
def test_what_is_compiled_ahead_is_what_is_launched(recipe, mask, band, N, warpgroups, h200):
    precompile._start.cache_clear()
    r, given, band = NAMED[recipe], dict(recipe=recipe, warpgroups=warpgroups), BANDS[band]
    for _ in range(2):  # as layers do
        left, right, _ = band
        with FakeTensorMode():
            bounds = dict(attn_mask=MASKS[mask](N), left=left, right=right)
            precompile.precompile(
                SdpaCall(*arguments(*qkv(N, "cuda"), False, 0.1, **given, **bounds))
            )
    finished()
    kernel, tile = select(Problem((9, 0), r, 64, masked=mask != "none"))
    if kernel.traced:  # Inductor compiles it: 16-bit v with a mask
        assert not h200 and r.pv == "16bit" and mask != "none"
        return
    launched = []

    def run(kernel, grid, tensors, numbers, **options):
        kinds = [x.dtype if isinstance(x, torch.Tensor) else x.block_shape for x in tensors]
        options |= FP_FUSION
        launched.append((kernel.fn.__name__, grid, [*kinds, *numbers], options))

    q, k, v = (torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in qkv(N, "cpu"))
    visibility = Visibility.of(MASKS[mask](N), band, N, tile.BLOCK_M)
    visible = visibility.keys(k.shape[1])
    prepared = launch_kv(k, v if r.pv == "fp8" else None, visible, r, run, True)
    a = attention_call(q, k, v, recipe, visibility, prepared=prepared, warpgroups=warpgroups)
    run_opaque(a.without_idle_bounds(), tile, run, torch.device("cuda", 0))
    names = [name for name, *_ in launched]
    few = N < 1536 or band != FULL  # no tile here has 2
    short = recipe == "sage2-8b-per-token" and few and warpgroups != 3
    other = short or mask == "bias" or warpgroups == 0
    attend = "_attention_kernel" if other else "_hopper_kernel"
    assert len(names) >= 3 and attend in names
    assert ("_pack_mask_kernel" in names) == (mask != "none" and attend == "_hopper_kernel")
    assert sorted(h200, key=repr) == sorted(launched, key=repr)


@pytest.mark.parametrize("warpgroups", [0, 2])
def test_strides_are_launched_as_multiples_of_16_where_rows_are_of_16_bytes(warpgroups, h200):
    launched = []

    def run(kernel, grid, tensors, numbers, **options):
        launched.append((kernel.arg_names[len(tensors) :], numbers))

    q, k, v = (torch.empty(2, 300, 3, 72, dtype=torch.float16).transpose(1, 2) for _ in range(3))
    r, full = NAMED["sage2-8b-per-token"], Visibility.of(None, (None, None, False), 300, 128)
    prepared = launch_kv(k, v, None, r, run, True)
    a = attention_call(
        q, k, v, "sage2-8b-per-token", full, prepared=prepared, warpgroups=warpgroups
    )
    run_opaque(a, select(Problem((9, 0), r, 72, masked=False))[1], run, torch.device("cuda", 0))
    strides = [
        n
        for names, numbers in launched
        for name, n in zip(names, numbers, strict=True)
        if re.fullmatch("stride_[qkvo01]?[bhn]", name)
    ]
    assert 72 % 16 and len(strides) >= 20 and all(n % 16 == 0 for n in strides)


@pytest.mark.parametrize("full", [False, True])
def test_the_kernels_of_block_lists_are_compiled_ahead(full, h200):
    precompile._start.cache_clear()
    N, recipe = 2048, "sage2-8b-per-token"
    lists = support.block_lists(1, 8, N, N, 128, 64, 0.5, full)
    with FakeTensorMode():
        fake = [
            x if x is None else torch.empty(x.shape, dtype=x.dtype, device="cuda")
            for x in lists[:4]
        ]
        of_lists = dict(zip(lists._fields, (*fake, 128, 64), strict=True))
        call = SdpaCall(*arguments(*qkv(N, "cuda"), False, 0.1, recipe=recipe, **of_lists))
        precompile.precompile(call)
    finished()
    launched = []

    def run(kernel, grid, tensors, numbers, **options):
        kinds = [x.dtype if isinstance(x, torch.Tensor) else x.block_shape for x in tensors]
        launched.append((kernel.fn.__name__, grid, [*kinds, *numbers], options | FP_FUSION))

    q, k, v = (torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in qkv(N, "cpu"))
    prepared = launch_kv(k, v, None, NAMED[recipe], run, True)
    a = attention_call(q, k, v, recipe, Visibility(blocks=lists), prepared=prepared)
    run_opaque(a, tiles.Tile(128, 64, 4, 2), run, torch.device("cuda", 0))
    names = {"_list_tiles_kernel", "_rank_tiles_kernel", "_hopper_kernel"}
    assert names <= {name for name, *_ in launched}
    assert sorted(h200, key=repr) == sorted(launched, key=repr)


@pytest.mark.parametrize("what", ["portable", "prepared by per_thread", "on CPU", "unknown"])
def test_nothing_is_compiled_ahead_that_inductor_compiles_or_that_is_not_known(what, h200):
    precompile._start.cache_clear()
    recipe = "sage2-8b" if what == "prepared by per_thread" else "sage2-8b-per-token"
    x = qkv(1000, "cpu" if what == "on CPU" else "cuda")
    args = list(arguments(*x, False, 0.1, recipe, portable=what == "portable"))
    if what == "unknown":
        with FakeTensorMode(shape_env=ShapeEnv()) as mode:
            symbol = mode.shape_env.create_unbacked_symint()
            args[0] = torch.empty(2, 8, symbol, 64, dtype=torch.bfloat16, device="cuda")
    precompile.precompile(SdpaCall(*args))
    assert not launch._compiling.futures and not h200


def training_calls(device, N=300, D=64) -> dict:
    """The arguments of sage::rowscaled and of its backward, fake."""
    q, k, v = qkv(N, device, D)
    with FakeTensorMode():
        q, k, v = (torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
                   for x in (q, k, v))  # fmt: skip
        last = dict(scale=0.1, out_bnhd=True)
        forward = dict(q=q, k=k, v=v, is_causal=False, **last)
        out, *kept = torch.ops.sage.rowscaled(*forward.values())
        names = Kept._fields
        backward = dict(grad=out, out=out, **dict(zip(names, kept, strict=True)), n_kv=N, **last)
    return {rowscaled.launched: forward, rowscaled.launched_backward: backward}


def test_what_trains_is_compiled_ahead(h200, monkeypatch):
    expected, entered = [], []

    def run(kernel, grid, tensors, numbers, **options):
        kinds = [x.dtype if isinstance(x, torch.Tensor) else x.block_shape for x in tensors]
        name = kernel.fn.__name__
        expected.append((name, grid, [*kinds, *numbers], options | FP_FUSION))

    def device(which):
        entered.append(which)
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.cuda, "device", device)
    precompile._start.cache_clear()
    for launched, given in training_calls("cuda:1", N=2000).items():  # more tiles than processors
        for _ in range(2):  # as layers do
            precompile.precompile_op(launched, given)
        like = {
            name: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            if isinstance(x, torch.Tensor) else x
            for name, x in given.items()
        }  # fmt: skip
        launched(like, run, tiles.Gpu((9, 0), 132))
    finished()
    names = [name for name, *_ in expected]
    assert names == [
        "_partial_kernel", "_final_kernel", *["_quantize_kernel"] * 3, "_hopper_kernel",
        "_combine_kernel", "_rows_kernel", "_bounds_kernel", "_turn_kernel", "dq_kernel",
        "dkdv_kernel",
    ]  # fmt: skip
    assert h200 == expected and entered.count(torch.device("cuda", 1)) == 2


def test_what_trains_is_left_to_its_launch_where_it_is_not_known(h200, caplog):
    precompile._start.cache_clear()
    for launched, given in training_calls("cpu").items():
        precompile.precompile_op(launched, given)
    for launched, given in training_calls("cuda").items():
        with FakeTensorMode(shape_env=ShapeEnv()) as mode:
            symbol = mode.shape_env.create_unbacked_symint()
            of_some = torch.empty(symbol, 8, 300, 64, dtype=torch.bfloat16, device="cuda")
            of_strides = torch.empty_strided((2, 8, 300, 64), (symbol, 64, 512, 1), device="cuda")
        for unknown in (of_some, of_strides):
            precompile.precompile_op(launched, given | {next(iter(given)): unknown})
        precompile.precompile_op(launched, given | {"scale": symbol})
    assert not h200
    caplog.set_level(logging.DEBUG, "sage_inductor")
    given = training_calls("cuda", D=74)[rowscaled.launched]  # v's rows are none that TMA reads
    precompile.precompile_op(rowscaled.launched, given)
    finished()
    assert "compiled then: q or v is copied" in caplog.text
    assert "_hopper_kernel" not in {name for name, *_ in h200}


def test_a_launch_waits_for_its_own_kernel_and_no_other(h200, caplog):
    compiling, gate, order = launch._compiling, threading.Event(), []
    mine, other = Kernel(), Kernel()
    mine.__name__ = "mine"

    def fail():
        order.append("mine")
        raise RuntimeError("no such instruction")

    caplog.set_level(logging.DEBUG, "sage_inductor")
    compiling.start(mine, fail)
    compiling.start(other, gate.wait)  # which a launch of `mine` would wait for, for ever
    launch.launch_cached(mine, (1,), (torch.zeros(4).as_subclass(OnGpu),), ())
    assert order == ["mine"] and len(mine.looked_up) == 1
    gate.set()
    finished()
    assert "compiling mine ahead failed: no such instruction" in caplog.text


def test_a_forked_child_compiles_anew(h200):
    """It has none of its parent's threads, and would wait for them for ever."""
    gate, kernel = threading.Event(), object()
    launch._compiling.start(kernel, gate.wait)
    child = os.fork()
    if child == 0:
        launch._compiling.wait_for(kernel)
        os._exit(len(launch._compiling.futures))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    gate.set()
    finished()


def test_calls_of_one_shape_do_not_see_each_others_tensors(h200):
    """What such calls share is kept. Two threads may be in it: here one call is made in the midst
    of the other, after what the first reads was put together and before it is launched."""
    given = []

    def call(run):
        q, v = (torch.empty(1, 2, N, 64, dtype=torch.bfloat16) for N in (300, 5000))
        v = v.as_strided(v.shape, (7, *v.stride()[1:]))  # of one batch: may be anything
        prepared = launch_kv(v, None, None, NAMED["sage1-per-token"], lambda *args, **options: None)
        a = attention_call(q, v, v, "sage1-per-token", prepared=prepared)
        run_opaque(a, tiles.Tile(128, 64, 8, 3), run, torch.device("cuda", 0))
        return prepared.k, v

    def record(kernel, grid, tensors, numbers, **options):
        given.append(dict(zip(kernel.arg_names, (*tensors, *numbers)), programs=grid[0]))

    def first(*args, **options):
        if not given:
            call(record)
        record(*args, **options)

    k, v = call(first)
    second_of_two, _, first_of_two, combine = given
    assert first_of_two["K"].base is k and first_of_two["V"].base is v
    assert second_of_two["K"].base is not k and second_of_two["V"].base is not v
    numbers = {"N2_q": 600, "N2_kv": 10000, "N_pad": 5120, "H_q": 2, "SPLIT": True}
    assert numbers == {name: first_of_two[name] for name in numbers}
    rows = 2 * first_of_two["programs"] * 64 * first_of_two["WARPGROUPS"]
    assert combine["Part"].numel() == rows * 64 and combine["Part_ml"].numel() == rows * 2


@pytest.fixture
def launches(monkeypatch):
    """Of one attention call, prepared, that is not launched; twice, of two lengths."""
    monkeypatch.setattr(tiles, "capability", lambda device: (9, 0))
    monkeypatch.setattr(tiles, "processors", lambda device: 132)
    with launch.noted() as launches:
        for n in (1600, 1664):
            q, v = (torch.empty(1, 2, n, 64, dtype=torch.bfloat16, device="meta") for _ in "qv")
            prepared = launch_kv(v, v, None, NAMED["sage2-8b-per-token"], launch.launch_cached)
            a = attention_call(q, v, v, "sage2-8b-per-token", prepared=prepared)
            run_opaque(a, tiles.Tile(128, 64, 8, 3), launch.launch_cached, torch.device("cuda", 0))
    assert not hasattr(launch._noting, "launches")
    return launches


def test_what_would_be_launched_compiles_in_other_processes(launches, monkeypatch, tmp_path):
    """Once each, under the key by which the JIT looks it up. Here is no GPU: the JIT is told one."""
    hits, ptxas = [], tmp_path / "ptxas"
    text = "#!/bin/sh\n[ $1 = --version ] && echo 'release 12.8 of ours' && exit\n"
    ptxas.write_text(f'{text}exec {knobs.nvidia.ptxas.path} "$@"\n')
    ptxas.chmod(0o755)
    AsyncCompile.wait_pool_ready()  # with another ptxas
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(ptxas))
    ptxas_version.cache_clear()
    assert len(launches) == 8 and len({each.kernel for each in launches}) == 4
    with knobs.cache.scope(), knobs.compilation.scope():
        knobs.cache.dir = str(tmp_path / "cache")
        jobs = compile_elsewhere(launches, (9, 0))
        assert len(jobs) == 4 and compile_elsewhere(launches, (9, 0)) == jobs  # not once more
        concurrent.futures.wait(jobs)
        names = [path.stem for path in tmp_path.rglob("*.cubin")]
        assert sorted(names) == sorted({each.kernel.__name__ for each in launches}), names
        knobs.compilation.listener = lambda *_, cache_hit, **__: hits.append(cache_hit)
        monkeypatch.setattr(driver, "_active", compile_module._Elsewhere((9, 0)))
        for each in launches:
            kinds = [x.dtype if isinstance(x, torch.Tensor) else x for x in each.arguments]
            each.kernel.warmup(*kinds, grid=each.grid, **each.options)
    assert len(hits) >= 4 and all(hits)
    ptxas_version.cache_clear()


def test_a_forked_child_waits_for_nothing_that_its_parent_asked_for(monkeypatch):
    monkeypatch.setitem(compile_module._started, "key", concurrent.futures.Future())
    child = os.fork()
    if child == 0:
        os._exit(len(compile_module._started))
    assert os.waitpid(child, 0)[1] == 0 and "key" in compile_module._started


def test_kernels_that_fail_elsewhere_are_left_to_their_launch(
    launches, monkeypatch, tmp_path, caplog
):  # fmt: skip
    with caplog.at_level(logging.DEBUG, "sage_inductor"), knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        broken = [each._replace(options=each.options | {"num_warps": 3}) for each in launches]
        jobs = compile_elsewhere(broken, (9, 0))
        concurrent.futures.wait(jobs)
        assert len(jobs) == 4 and not list(tmp_path.rglob("*.cubin"))
        end = time.monotonic() + 10  # what is called at a future's end may come after its waiters
        while caplog.text.count("is left to its launch: ") < 4 and time.monotonic() < end:
            time.sleep(0.01)
        assert caplog.text.count("is left to its launch: ") == 4
        monkeypatch.setattr(AsyncCompile, "use_process_pool", lambda: False)
        assert compile_elsewhere(launches, (9, 0)) == []
        monkeypatch.setattr(AsyncCompile, "use_process_pool", lambda: 1 / 0)
        assert compile_elsewhere(launches, (9, 0)) == []
    assert "one after the other: division by zero" in caplog.text
