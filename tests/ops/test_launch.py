"""Launching without Triton's look-up, and compiling before the first launch."""

import concurrent.futures
import contextlib
import json
import os
import queue
import re
import site
import subprocess
import sys
import types

import noted
import pytest
import torch
import triton
from pairs import chosen
from support import arguments, attention_call
from torch._dynamo.source import ConstantSource
from torch._inductor.async_compile import AsyncCompile
from torch._subclasses import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils import _pytree as pytree
from triton import knobs
from triton.runtime import driver

import sage_inductor
from sage_inductor.ops import compat, gpus, launch, notes
from sage_inductor.ops import compile as compile_module
from sage_inductor.ops.attention import select
from sage_inductor.ops.compat import ptxas_version, virtualized
from sage_inductor.ops.compile import Compilation, compile_elsewhere, describe, travels
from sage_inductor.ops.quantize import smooth
from sage_inductor.ops.quantize.one_pass import launch_kv
from sage_inductor.ops.recipe import NAMED
from sage_inductor.ops.reference.rowscaled import Kept
from sage_inductor.ops.sdpa import SdpaCall
from sage_inductor.ops.training import rowscaled
from sage_inductor.ops.visibility import BlockLists

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
        launch.run(kernel, (5,), (x, y), (1, 2.0, True), num_warps=8)
    assert kernel.looked_up == [
        ((5,), (x, kernel.looked_up[0][1][1], 1, 2.0, True), {"num_warps": 8} | FP_FUSION)
    ]
    assert [grid for grid, _ in kernel.launched] == [(5, 1, 1)] * 2
    assert kernel.launched[-1][1][1] is y


def test_a_kernel_is_looked_up_again_for_all_that_changes_its_code(current):
    kernel, x = Kernel(), torch.zeros(64).as_subclass(OnGpu)
    launch.run(kernel, (5,), (x,), (1,), num_warps=8)
    launch.run(kernel, (5,), (x,), (2,), num_warps=8)
    launch.run(kernel, (5,), (x.half(),), (1,), num_warps=8)
    launch.run(kernel, (5,), (x,), (1,), num_warps=4)
    launch.run(Kernel(), (5,), (x,), (1,), num_warps=8)
    x.index = 1
    launch.run(kernel, (5,), (x,), (1,), num_warps=8)
    assert len(kernel.looked_up) == 5 and not kernel.launched
    # Not aligned to 16 bytes, the last, the first or both: Triton tells such arguments apart.
    for i, tensors in enumerate([(x[1:],), (x[2:],), (x[1:], x), (x, x[2:])]):
        for _ in range(2):
            launch.run(kernel, (5,), tensors, (1,), num_warps=8)
        assert len(kernel.looked_up) == 7 + 2 * i and not kernel.launched


def test_a_kernel_is_launched_on_the_device_of_its_tensors(current):
    x, where = torch.zeros(64).as_subclass(OnGpu), []
    x.index = 1

    class There(Kernel):
        def __getitem__(self, grid):
            where.append(tuple(current))
            return super().__getitem__(grid)

    launch.run(There(), (5,), (x,), (1,))
    assert where == [(1, 0)] and current == [0]


def test_what_is_noted_inside_of_another_note_is_the_inner_ones_alone(current):
    """And the outer goes on noting where the inner ends, also by an error."""
    kernel, x = Kernel(), torch.zeros(64).as_subclass(OnGpu)

    def run(number):
        launch.run(kernel, (5,), (x,), (number,))

    with launch.noted() as outer:
        run(1)
        with pytest.raises(KeyError), launch.noted() as inner:
            run(2)
            raise KeyError
        run(3)
    assert [[each.arguments[1] for each in found] for found in (outer, inner)] == [[1, 3], [2]]
    assert not kernel.looked_up
    run(4)
    assert [args[1] for _, args, _ in kernel.looked_up] == [4]


def test_a_kernel_of_a_package_rounds_as_a_launched_one(monkeypatch):
    told = []
    monkeypatch.setattr(triton, "compile", lambda *args, options, **_: told.append(options))
    kernel = smooth._final_kernel
    types = ("constexpr",) * len(kernel.arg_names)
    Compilation(kernel, types, (), (), (("num_warps", 8),)).compile((9, 0))
    assert told == [{"num_warps": 8} | FP_FUSION]


@pytest.fixture
def h200(monkeypatch):
    """The tables and the schedule of an H200; what is to be compiled is written down."""
    compiled = []

    def compile_elsewhere(launches, capability):
        assert capability == (9, 0)
        compiled.extend(noted.written(launches))

    monkeypatch.setattr(launch, "compile_elsewhere", compile_elsewhere)
    launch._start.cache_clear()
    with noted.here((9, 0)):
        yield compiled


def qkv(N, device, D=64, heads=(8, 4, 4), dtype=torch.bfloat16):
    """Fake tensors, as while torch.compile traces."""
    with FakeTensorMode():
        shapes = [(2, N, h, D) for h in heads]
        q, k, v = (torch.empty(s, dtype=dtype, device=device) for s in shapes)
        return [x.transpose(1, 2) for x in (q, k, v)]


def trace(call: SdpaCall) -> None:
    """As AOTAutograd does."""
    with call.q.fake_mode, FunctionalTensorMode():
        torch.ops.sage.sdpa(
            *pytree.tree_map_only(torch.Tensor, FunctionalTensor.to_functional, call)
        )


BANDS = {"full": FULL, "causal": RIGHT_BELOW, "a long window": (5000, 0, False)}
MASKS = {  # on CPU, where torch can index them without a GPU
    "none": lambda N: None,
    "keys": lambda N: torch.empty(2, 1, 1, N, dtype=torch.bool),
    "rows": lambda N: torch.empty(N, N, dtype=torch.bool),
    "heads": lambda N: torch.empty(2, 8, 1, N, dtype=torch.bool).expand(2, 8, N, N),
    "bias": lambda N: torch.empty(1, 1, N, N, dtype=torch.bfloat16).mT,
}


SIZE = dict(block_q=128, block_kv=64)


def check_compiled_ahead(h200, N, dtype=torch.bfloat16, mask="none", lists=(), **given) -> list:
    """That it is what sage::sdpa launches, whose names are returned."""
    x = qkv(N, "cuda", dtype=dtype)
    with x[0].fake_mode:
        of = [torch.empty(n, dtype=torch.int32, device=x[0].device) for n in lists]
        of_lists = dict(zip(BlockLists._fields, of)) | (SIZE if lists else {})
        bounds = dict(attn_mask=MASKS[mask](N), **of_lists)
        call = SdpaCall(*arguments(*x, False, 0.1, **bounds, **given))
        for _ in range(2):  # as layers do
            trace(call)
    with launch.noted() as launched:
        noted.attend(SdpaCall(*map(launch._like, call)))
    if h200:
        each_once = {repr(x): x for x in noted.written(launched)}  # the two lists' kernels are one
        assert sorted(h200, key=repr) == sorted(each_once.values(), key=repr)
    return [kernel.__name__ for kernel, *_ in h200]


@chosen(
    # A short call's tile is another where it is masked: those of the recipe that has one, all.
    lambda recipe, mask, band, N, warpgroups: (
        (recipe == "sage2-8b-per-token" and N == 1000 and band != "a long window")
        or (list(MASKS).index(mask) + list(BANDS).index(band) + (warpgroups or 0)) % 5 == N % 3
    ),
    recipe=["sage2-8b-per-token", "sage1-per-token"],
    mask=list(MASKS),
    band=list(BANDS),
    N=[1000, 2048],
    warpgroups=[None, 0, 1, 2, 3],  # of 2 there is no tile here
)
def test_what_is_compiled_ahead_is_what_is_launched(recipe, mask, band, N, warpgroups, h200):
    left, right, _ = BANDS[band]
    given = dict(recipe=recipe, warpgroups=warpgroups, left=left, right=right)
    names = check_compiled_ahead(h200, N, mask=mask, **given)
    few = mask != "none" and band == "full" and N < 2048  # the long window is causal
    short = recipe == "sage2-8b-per-token" and few and warpgroups in (None, 2)
    in_16_bits = recipe == "sage1-per-token" and mask != "none"
    other = short or mask == "bias" or warpgroups == 0 or in_16_bits
    attend = "_attention_kernel" if other else "_hopper_kernel"
    assert len(names) >= 3 and attend in names
    assert ("_pack_mask_kernel" in names) == (mask != "none" and attend == "_hopper_kernel")


@pytest.mark.parametrize("recipe", ["sage1-per-token", "sage2-8b-per-token"])
def test_kernels_of_fp32_are_compiled_ahead_as_they_are_launched(recipe, h200):
    """v that is not quantized is computed in bf16."""
    assert check_compiled_ahead(h200, 1000, torch.float32, recipe=recipe, warpgroups=0)


@pytest.mark.parametrize("full", [False, True])
def test_the_kernels_of_block_lists_are_compiled_ahead(full, h200):
    lists = ((1, 8, 16), (1, 8, 16, 33)) * (1 + full)
    names = check_compiled_ahead(h200, 2048, lists=lists, recipe="sage2-8b-per-token")
    assert {"_list_tiles_kernel", "_rank_tiles_kernel", "_hopper_kernel"} <= {*names}


def test_kernels_are_compiled_ahead_for_the_keys_that_a_band_shows(h200):
    (q, *_), (_, *of_kv) = qkv(300, "cuda"), qkv(1000, "cuda")
    given = dict(recipe="sage2-8b-per-token", bottom_right=True, left=99)
    seen = []
    for first in (0, 1000 - 300 - 99, 1000 - 300 - 99 + 1):
        with q.fake_mode:
            fewer = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
                     .narrow(2, first, 1000 - first) for x in of_kv]  # fmt: skip
            trace(SdpaCall(*arguments(q, *fewer, True, 0.1, **given)))
        seen.append(list(h200))
    assert seen[0] and seen[0] == seen[1] != seen[2]  # nothing is compiled twice


@pytest.mark.parametrize("warpgroups", [0, 2])
def test_strides_are_launched_as_multiples_of_16_where_rows_are_of_16_bytes(warpgroups):
    given = dict(D=72, dtype=torch.float16, warpgroups=warpgroups)
    launched = noted.launches(noted.sdpa, (9, 0), "sage2-8b-per-token", **given)
    strides = [
        n
        for each in launched
        for name, n in zip(each.kernel.arg_names, each.arguments, strict=True)
        if re.fullmatch("stride_[qkvo01]?[bhn]", name)
    ]
    assert 72 % 16 and len(strides) >= 20 and all(n % 16 == 0 for n in strides)


@pytest.mark.parametrize("what", ["for a package", "on CPU", "unknown"])
def test_nothing_is_compiled_ahead_for_a_package_or_that_is_not_known(what, h200):
    device = "cpu" if what == "on CPU" else "cuda"
    args = list(arguments(*qkv(1000, device), False, 0.1, "sage2-8b-per-token", portable=False))
    if what == "unknown":
        mode = args[0].fake_mode
        mode.shape_env, mode.static_shapes = ShapeEnv(), False
        with mode:
            symbol = mode.shape_env.create_unbacked_symint()
            args[0] = torch.empty(2, 8, symbol, 64, dtype=torch.bfloat16, device="cuda")
    with virtualized.set_aot_compilation(what == "for a package"):
        trace(SdpaCall(*args))
    assert not h200


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
    return {
        rowscaled._launch: [*forward.values()],
        rowscaled._launch_backward: [*backward.values()],
    }


def test_what_trains_is_compiled_ahead(h200, monkeypatch):
    expected, asked = [], []
    monkeypatch.setattr(gpus, "_capability", lambda device: asked.append(device) or (9, 0))
    for launched, given in training_calls("cuda:1", N=2000).items():  # more tiles than processors
        for _ in range(2):  # as layers do
            launch.precompile(launched, given)
        with launch.noted() as found:
            launched(launch.run, noted.H200, *map(launch._like, given))
        expected += noted.written(found)
    names = [kernel.__name__ for kernel, *_ in expected]
    assert names == [
        "_estimate_kernel", *["_quantize_kernel"] * 3, "_hopper_kernel", "_combine_kernel",
        "_rows_kernel", "_bounds_kernel", "_turn_kernel", "dq_kernel", "dkdv_kernel",
    ]  # fmt: skip
    assert h200 == expected and asked.count(torch.device("cuda", 1)) == 2


def test_what_trains_is_left_to_its_launch_where_it_is_not_known(h200):
    for launched, given in training_calls("cpu").items():
        launch.precompile(launched, given)
    for launched, given in training_calls("cuda").items():
        with FakeTensorMode(shape_env=ShapeEnv()) as mode:
            symbol = mode.shape_env.create_unbacked_symint()
            of_some = torch.empty(symbol, 8, 300, 64, dtype=torch.bfloat16, device="cuda")
            of_strides = torch.empty_strided((2, 8, 300, 64), (symbol, 64, 512, 1), device="cuda")
        for unknown in (of_some, of_strides):
            launch.precompile(launched, [unknown, *given[1:]])
        launch.precompile(launched, [*given[:-1], symbol])
    assert not h200
    given = training_calls("cuda", D=74)[rowscaled._launch]  # v's rows are none that TMA reads
    launch.precompile(rowscaled._launch, given)
    (line,) = notes.NOTES.values()
    assert "compiles then: q or v is copied" in line
    assert "_hopper_kernel" not in {kernel.__name__ for kernel, *_ in h200}


def test_calls_of_one_shape_do_not_see_each_others_tensors(h200):
    """What such calls share is kept. Two threads may be in it: here one call is made in the midst
    of the other, after what the first reads was put together and before it is launched."""
    given = []

    def call(run):
        q, v = (torch.empty(1, 2, N, 64, dtype=torch.bfloat16) for N in (300, 5000))
        v = v.as_strided(v.shape, (7, *v.stride()[1:]))  # of one batch: may be anything
        prepared = launch_kv(v, None, None, NAMED["sage1-per-token"], lambda *args, **options: None)
        a = attention_call(q, v, v, "sage1-per-token", prepared=prepared)
        select.launch(run, torch.device("cuda", 0), a)
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
    monkeypatch.setattr(gpus, "capability", lambda device: (9, 0))
    monkeypatch.setattr(gpus, "processors", lambda device: 132)
    with launch.noted() as launches:
        for n in (1600, 1664):
            noted.sdpa("sage2-8b-per-token", D=64, lengths=(n, n))
    assert launch._noting.launches is None
    return launches


@pytest.fixture
def other_ptxas(monkeypatch, tmp_path):
    """Not the one that Inductor's processes take by themselves."""
    AsyncCompile.wait_pool_ready()
    ptxas = tmp_path / "ptxas"
    text = "#!/bin/sh\n[ $1 = --version ] && echo 'release 12.8 of ours' && exit\n"
    ptxas.write_text(f'{text}exec {knobs.nvidia.ptxas.path} "$@"\n')
    ptxas.chmod(0o755)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(ptxas))
    ptxas_version.cache_clear()
    yield
    ptxas_version.cache_clear()


def test_what_another_process_compiled_is_found_by_its_launch(
    launches, other_ptxas, monkeypatch, tmp_path
):
    """Once each, under the key by which the JIT looks it up, and where it looks then. Here is no
    GPU: the JIT is told one."""
    hits = []
    monkeypatch.setattr(compile_module, "PATIENCE", 3600.0)  # it compiles on a busy machine, too
    assert len(launches) == 8 and len({each.kernel for each in launches}) == 4
    monkeypatch.setattr(driver, "_active", compile_module.elsewhere((9, 0)))
    with knobs.cache.scope(), knobs.compilation.scope():
        knobs.cache.dir = str(tmp_path / "while compiling")
        jobs = compile_elsewhere(launches, (9, 0))
        assert len(jobs) == 4 and compile_elsewhere(launches, (9, 0)) == jobs  # not once more
        # As what Inductor compiles in this process may do.
        knobs.cache.dir = str(tmp_path / "while launching")
        monkeypatch.delenv("TRITON_PTXAS_PATH")
        knobs.compilation.listener = lambda *_, cache_hit, **__: hits.append(cache_hit)
        for each in launches:
            compile_module.await_compiled(each, torch.device("cuda", 0))
            kinds = [x.dtype if isinstance(x, torch.Tensor) else x for x in each.arguments]
            each.kernel.warmup(*kinds, grid=each.grid, **each.options)
        names = [path.stem for path in tmp_path.rglob("*.cubin")]
        assert sorted(names) == sorted({each.kernel.__name__ for each in launches}), names
        knobs.cache.dir = str(tmp_path / "of another compilation")
        again = compile_elsewhere(launches[:1], (9, 0))
        assert len(again) == 1 and not set(again) & set(jobs)
        concurrent.futures.wait(again)
    assert len(hits) >= 4 and all(hits)


@pytest.fixture
def asked(launches, monkeypatch):
    """The first of the launches, as if another process compiled it."""
    job = concurrent.futures.Future()
    key = describe(launches[0].kernel, launches[0].arguments, launches[0].options).digest
    monkeypatch.setattr(compile_module, "_jobs", {(key, (9, 0)): ("place", job)})
    monkeypatch.setattr(AsyncCompile, "use_process_pool", lambda: True)
    monkeypatch.setattr(compile_module, "PATIENCE", 600.0)
    return launches[0], job


def launched(one) -> None:
    compile_module.await_compiled(one, torch.device("cuda", 0))


def test_a_launch_waits_for_its_own_kernel_and_no_other(asked, launches, monkeypatch):
    """Nor for one of another device, nor for processes that have yet to start."""
    waited, (one, job) = [], asked
    monkeypatch.setattr(job, "result", waited.append)
    launched(one)
    assert waited == [600.0]
    for of, name, other in (
        (gpus, "capability", lambda device: (8, 9)),
        (AsyncCompile, "use_process_pool", lambda: False),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(of, name, other)
            launched(one)
    launched(one._replace(options=one.options | {"num_warps": 2}))
    launched(launches[1])
    assert waited == [600.0]
    monkeypatch.undo()


def test_a_launch_whose_kernel_failed_elsewhere_goes_on_and_the_report_says_why(asked):
    one, job = asked
    job.set_exception(RuntimeError("no such instruction"))
    launched(one)
    (line,) = notes.NOTES.values()
    assert line.endswith(" compiles where it is launched: no such instruction")


def test_a_launch_waits_so_long_and_the_next_no_more(asked, monkeypatch):
    monkeypatch.setattr(compile_module, "PATIENCE", 0.1)
    launched(asked[0])
    (line,) = notes.NOTES.values()
    assert line.endswith(" compiles where it is launched: not in 0.1 s")
    monkeypatch.setattr(asked[1], "result", None)  # nobody asks
    launched(asked[0])
    assert [*notes.NOTES.values()] == [line]


@pytest.mark.parametrize("found", [("no key", {}), ("00", {"a.cubin": "/nowhere"}), None, "pool"])
def test_a_launch_does_not_fail_for_what_was_compiled(asked, monkeypatch, found):
    one, job = asked
    if found == "pool":
        monkeypatch.setattr(AsyncCompile, "use_process_pool", lambda: 1 / 0)
    else:
        job.set_result(found)
    compile_module.await_compiled(one, torch.device("cuda", 0))


def test_a_kernel_is_awaited_before_its_first_launch_alone(current, monkeypatch):
    """With what tells it apart from others. Of tensors that are not aligned none is compiled."""
    awaited, kernel, x = [], Kernel(), torch.zeros(64).as_subclass(OnGpu)
    monkeypatch.setattr(launch, "await_compiled", lambda *given: awaited.append((given, order())))

    def order():
        return len(kernel.looked_up)

    for _ in range(2):
        launch.run(kernel, (5,), (x,), (1, 2.0), num_warps=8)
        launch.run(kernel, (5,), (x[1:],), (1, 2.0), num_warps=8)
    (((of, device), before),) = awaited
    assert of == launch.Launch(kernel, (5,), (x, 1, 2.0), {"num_warps": 8} | FP_FUSION)
    assert of.arguments[0] is x and device == torch.device("cuda", 0) and before == 0


def test_a_forked_child_waits_for_nothing_that_its_parent_asked_for(monkeypatch):
    monkeypatch.setitem(compile_module._jobs, "key", ("place", concurrent.futures.Future()))
    child = os.fork()
    if child == 0:
        os._exit(len(compile_module._jobs))
    assert os.waitpid(child, 0)[1] == 0 and "key" in compile_module._jobs


def test_kernels_are_asked_for_before_the_processes_have_started(launches, monkeypatch, tmp_path):
    submitted, job = [], concurrent.futures.Future()
    pool = types.SimpleNamespace(submit=lambda *given: submitted.append(given) or job)
    ready = concurrent.futures.Future()
    monkeypatch.setattr(AsyncCompile, "_ready_future", ready)
    monkeypatch.setattr(AsyncCompile, "process_pool", lambda: pool)
    monkeypatch.setattr(compile_module, "_jobs", {})
    assert compile_elsewhere(launches, (9, 0)) == [job] * 4 and len(submitted) == 4
    ready.set_exception(RuntimeError("the processes died"))
    monkeypatch.setattr(compile_module, "_jobs", {})
    assert compile_elsewhere(launches, (9, 0)) == [] and len(submitted) == 4


def test_kernels_that_fail_elsewhere_are_left_to_their_launch(
    launches, monkeypatch, tmp_path
):  # fmt: skip
    said = queue.Queue()
    with knobs.cache.scope(), monkeypatch.context() as patch:
        patch.setattr(compile_module, "lost", lambda what, error: said.put(what))
        knobs.cache.dir = str(tmp_path)
        broken = [each._replace(options=each.options | {"num_warps": 3}) for each in launches[:2]]
        jobs = compile_elsewhere(broken, (9, 0))
        concurrent.futures.wait(jobs)
        assert len(jobs) == 2 and not list(tmp_path.rglob("*.cubin"))
        for _ in jobs:  # what is called at a future's end may come after its waiters
            assert said.get(timeout=600).endswith(" compiles where it is launched")
    for place in (AsyncCompile, "use_process_pool", lambda: False), (compat, "AsyncCompile", None):
        with monkeypatch.context() as patch:
            patch.setattr(*place)
            assert compile_elsewhere(launches, (9, 0)) == [] and not notes.NOTES
    monkeypatch.setattr(AsyncCompile, "use_process_pool", lambda: 1 / 0)
    assert compile_elsewhere(launches, (9, 0)) == []
    why = "kernels compile where they are launched: division by zero"
    assert why in str(sage_inductor.report()).splitlines()


COLD = """
import json
import torch
from torch._inductor.async_compile import AsyncCompile
from triton import knobs
import sage_inductor

compiled = {}

def listener(*, src, cache_hit, **_):
    if not src.name.startswith("triton_"):  # Inductor's own
        compiled[src.name] = not cache_hit

knobs.compilation.listener = listener
AsyncCompile.wait_pool_ready()
x = torch.randn(1, 4, 2048, 88, device="cuda", dtype=torch.bfloat16)
attend = torch.nn.functional.scaled_dot_product_attention
options = {"sage.force": True, "sage.recipe": "sage2-8b-per-token"}
model = torch.compile(lambda x: attend(x.sin(), x, x.cos()).tanh(), backend="sage", options=options)
model(x)
print(json.dumps(compiled))
"""


@pytest.mark.gpu
def test_a_cold_compile_leaves_no_kernel_to_this_process(tmp_path):
    """With the folders of caches that users have, where they are empty."""
    kept = {k: v for k, v in os.environ.items() if "CACHE" not in k and k != "TRITON_HOME"}
    kept |= {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PYTHONUSERBASE": site.getuserbase(),
    }
    env = kept | {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    found = subprocess.run(
        [sys.executable, "-c", COLD], env=env, stdout=subprocess.PIPE, text=True, check=True
    )
    compiled = json.loads(found.stdout.splitlines()[-1])
    assert {"_hopper_kernel", "_quantize_kv_kernel"} <= compiled.keys(), compiled
    assert not any(compiled.values()), compiled


@pytest.mark.parametrize("version, names, expected", [
    ("3.6.0", True, True), ("3.9.1", True, True), ("3.5.1", True, False), ("3.10.0", True, False),
    ("3.6.0", False, False),
])  # fmt: skip
def test_what_travels_is_compiled_by_a_triton_that_was_seen(monkeypatch, version, names, expected):
    monkeypatch.setattr(triton, "__version__", version)
    if not names:
        monkeypatch.setattr(compat, "GluonASTSource", None)
    assert travels() is expected


def test_no_op_of_kernels_fixes_a_batch_or_a_length():
    """A size that is a symbol stays one: a package of batch 2 gave 2 rows for a batch of 1."""
    ops = torch.ops.sage
    dynamic, static = DimDynamic.DYNAMIC, DimDynamic.STATIC
    context = StatelessSymbolicContext([dynamic, dynamic, static, static])
    mode, example = FakeTensorMode(shape_env=ShapeEnv()), torch.empty(2, 300, 8, 64, device="meta")
    sizes = mode.from_tensor(example, symbolic_context=context, source=ConstantSource("x")).shape
    with mode:
        x = torch.empty(sizes, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
        B, H, N, D = x.shape
        mean, lse = (x.new_empty(s, dtype=torch.float32) for s in ((B, H, D), (B, H, N)))
        codes = (*ops.smooth(x), *ops.pool_blocks(x, None, 64))
        for name in ("sage2-8b", "sage2-8b-per-token", "sage3"):
            codes += tuple(ops.quantize_kv(x, x, None, NAMED[name].encode()))
        scores = x.new_empty((B, H, N, N), dtype=torch.float32)
        codes += tuple(ops.largest(scores, scores.new_empty((B, H, N), dtype=torch.int32)))
        codes += tuple(ops.unsmoothed_lse(lse, x, mean, 0.1))
    assert not mode.shape_env.replacements
    assert all(isinstance(each.shape[0] * each.shape[1], torch.SymInt) for each in codes)


def test_a_note_is_the_first_line_of_its_error_or_the_errors_name():
    for error, said in ((AssertionError(), "AssertionError"), (ValueError("one\ntwo"), "one")):
        assert notes.lost("it is slow", error).endswith(f"it is slow: {said}")
        assert notes.NOTES["it is slow"].endswith(f": {said}")
