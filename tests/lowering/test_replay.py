"""What a compiled model launches from C++, without a GPU: replay.cpp, compiled with a driver that
writes down what it is asked (fake_driver.h), against the Python of which it was noted."""

import concurrent.futures
import ctypes
import functools
import math
import random
import re
import shutil
import sys
import sysconfig
import threading
import types
from pathlib import Path
from unittest import mock

import launches as calls
import pytest
import torch
from launches import KINDS, PROCESSORS, SHARED, Labels, Tensor, call_of, like
from noted import H200
from pairs import has_every_variant, pairs
from torch._inductor.utils import fresh_cache, run_and_get_code
from triton import knobs

import sage_inductor
from sage_inductor.lowering import replay
from sage_inductor.lowering.number import Facts
from sage_inductor.ops import compat, gpus, notes, register
from sage_inductor.ops.attention.select import attention
from sage_inductor.ops.attention_call import AttentionCall
from sage_inductor.ops.compile import describe
from sage_inductor.ops.formats import Prepared
from sage_inductor.ops.quantize.cache import append_kv
from sage_inductor.ops.quantize.op import empty_kv, quantize_kv
from sage_inductor.ops.recipe import NAMED
from sage_inductor.ops.reference.rowscaled import Kept
from sage_inductor.ops.register import LAUNCHES
from sage_inductor.ops.sdpa import unsmoothed_lse
from sage_inductor.ops.training import rowscaled

TRITONS = {9: 10}  # Triton's number of bf16, by the driver's
RECIPE = NAMED["sage2-8b-per-token"].encode()


class Module(calls.Cpp):
    """replay.cpp with the fake driver."""

    def __init__(self, folder, *flags: str):
        source = folder / "test.cpp"
        source.write_text(f'#include "fake_driver.h"\n#include "{replay.SOURCE}"\n')
        super().__init__(calls.build(source, *flags))
        self.python = compat.load_module("sage_replay", str(self.path))
        self.images = {}

    def compile(self, kernel, grid, tensors, numbers, options):
        """In the place of Triton."""
        compilation = describe(kernel, (*tensors, *numbers), options)
        digest = compilation.digest
        if digest not in self.compilations:
            self.compilations[digest] = compilation
            self.images[digest] = ctypes.create_string_buffer(calls.image_of(digest, compilation))
        descriptors = [
            dict(swizzle=swizzle, elem_size=size, elem_type=TRITONS.get(kind, kind), block_size=box)
            for swizzle, size, kind, box in calls.descriptors_of(compilation)
        ]
        kinds = {4: ".param .u32 x", 8: ".param .u64 x", 128: ".param .align 64 .b8 x[128]"}
        ptx = f".visible .entry k({', '.join(kinds[n] for n in compilation.parameters)})"
        metadata = types.SimpleNamespace(
            name=f"name_{digest}", num_warps=options.get("num_warps", 4), shared=SHARED, num_ctas=1,
            launch_cooperative_grid=False, global_scratch_size=0, profile_scratch_size=0,
            tensordesc_meta=descriptors,
        )  # fmt: skip
        image = ctypes.addressof(self.images[digest])
        return Compiled(function=image, metadata=metadata, asm={"ptx": ptx})


class Compiled(types.SimpleNamespace):
    __hash__ = object.__hash__


# -- each kind of call, of tensors that are too large to be ----


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    return Module(tmp_path_factory.mktemp("module"))


capsule = ctypes.pythonapi.PyCapsule_New
capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p] * 3
pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class Site:
    """A call in a graph, as `Replay` uses the module for it."""

    def __init__(self, module: Module, name: str, processors: int = 132):
        self.module, self.name, self.gpu = module, name, H200._replace(processors=processors)
        self.site = module.python.site()

    def _given(self, given: dict, device: int, moved=None) -> tuple[list, tuple]:
        handles = [capsule(x, None, None) for x in self.module.tensors(given, device, moved)]
        return handles, tuple(None if type(x) is Tensor else x for x in given.values())

    def run(self, given, device: int = 0, moved: dict | None = None, current: int | None = None):
        """Pointers to the outputs; else what the module says."""
        self.module.set("current", device if current is None else current)
        found = self.module.python.run(self.site, *self._given(given, device, moved))
        assert self.module.cpp.live() == (len(found) if found else 0)
        return [pointer_of(x, None) for x in found] if found else found

    def note(self, given: dict, device: int = 0) -> None:
        launched, given_like = calls.launch_of(self.name), like(given).values()
        found = replay.note(launched, given_like, self.gpu, self.module.compile)
        self.module.python.note(self.site, *self._given(given, device), found.plan, found.names)
        assert self.module.cpp.live() == 0

    def plan(self, given: dict, device: int = 0) -> calls.Plan:
        """What is launched, at the third call."""
        assert self.run(given, device) is False and self.run(given, device) is None
        assert not self.module.written()
        self.note(given, device)
        written = self.module.written(self.run(given, device))
        found, label = self.module.plan_of(given, written, device)
        self.made = [x for x in written if "made" in x]
        self.addresses = {each: address for address, each in label.seen.items()}
        return found._replace(made={})  # of one tensor these are parts


@pytest.mark.parametrize("name", calls.CALLS)
def test_cpp_launches_what_python_launched(name, module, monkeypatch):
    rng = random.Random(name)
    for _ in range(60 if has_every_variant() else 30):
        far = [Facts.of(16 * rng.randrange(1, 2**30)) for _ in range(3)]
        monkeypatch.setattr(calls, "APART", far)
        given, device = calls.drawn(name, rng)
        site = Site(module, name, PROCESSORS[device])
        plan = site.plan(given, device)
        expected = calls.planned(calls.launch_of(name), given, PROCESSORS[device])
        assert plan == expected._replace(made={}, views={})
        check_memory(site, expected)


def check_memory(site: Site, expected: calls.Plan) -> None:
    """Each tensor that Python makes has memory of its own; a view begins where it does in Python."""
    bytes_of = {number: dtype.itemsize for dtype, number in KINDS.items()}
    ends = {x["made"]: x["made"] + math.prod(x["sizes"]) * bytes_of[x["dtype"]] for x in site.made}
    taken = []
    for label, (count, dtype) in expected.made.items():
        start = site.addresses[label]
        taken.append((start, start + count * bytes_of[dtype]))
        (end,) = (end for begin, end in ends.items() if begin <= start < max(end, begin + 1))
        assert start % 256 == 0 and taken[-1][1] <= end
    taken.sort()
    assert all(a[1] <= b[0] for a, b in zip(taken, taken[1:]))
    for label, (whole, byte) in expected.views.items():
        assert site.addresses[label] - site.addresses[whole] == byte


def test_only_a_call_like_one_that_was_noted_is_replayed(module):
    given = call_of("full", 128)
    site = Site(module, "full")
    site.plan(given)
    for name in ("q", "v_mean"):
        assert site.run(given, moved={name: 8}) is False  # an address
    assert site.run(given, device=1, current=0) is False
    q = given["q"]
    for other in (
        call_of("full", 256), call_of("full", 128, B=3), given | {"n_kv": 127},
        given | {"q": q._replace(dtype=torch.float16)}, given | {"scale": 0.25},
        given | {"q": q._replace(strides=(*q.strides[:2], 2 * q.strides[2], 1))},
    ):  # fmt: skip
        assert site.run(other) is False and site.run(other) is None
    assert site.run(given, device=1) is False and site.run(given, device=1) is None
    assert not module.written()
    assert module.written(site.run(given))


def test_a_length_that_comes_once_is_not_noted_and_does_not_stay(module):
    given, site = call_of("full", 128), Site(module, "full")
    site.plan(given)
    for N in range(129, 129 + 127):
        assert site.run(call_of("full", N)) is False
    assert module.written(site.run(given))
    assert site.run(call_of("full", 300)) is False  # with it all are forgotten
    assert site.run(given) is False and site.run(given) is None


def test_an_error_of_the_driver_or_of_torch_says_where(module):
    given, site = call_of("full", 128), Site(module, "full")
    site.plan(given)
    for failing, message in (
        ("launch_fails", r"name_\w+: launch failed \(the driver is for CUDA 12\.8\)"),
        ("torch_fails", "torch failed at a tensor"),
    ):
        module.set(failing, 1)
        with pytest.raises(RuntimeError, match=f"^sage_inductor: {message}$"):
            site.run(given)
        module.set(failing, 0)
        module.written()
        assert module.cpp.live() == 0
    assert module.written(site.run(given))
    with pytest.raises(RuntimeError, match="a tensor must be on one of 64 GPUs"):
        site.run(given, device=64)
    assert module.cpp.live() == 0


def test_a_plan_that_is_not_read_to_its_end_is_refused(module):
    given, site = call_of("full", 128), Site(module, "full")
    found = replay.note(calls.launch_of("full"), like(given).values(), H200, module.compile)
    for plan in (found.plan[:-8], found.plan + bytes(8)):
        with pytest.raises(RuntimeError, match="a plan (ends early|goes on)"):
            module.python.note(site.site, *site._given(given, 0), plan, found.names)
    assert module.cpp.live() == 0


def test_another_launchs_output_cannot_be_noted():
    for launch, *given in (
        (lambda run, gpu, x: (x, x.new_empty(3)), torch.empty(3)),
        (lambda *_: 2 * [torch.empty(3, device="meta")],),
    ):
        with pytest.raises(NotImplementedError, match="a view of another tensor"):
            replay.note(launch, tuple(given), H200, None)


# -- compiled models, with torch's tensors ----


@pytest.fixture(scope="module")
def with_torch(tmp_path_factory):
    lib = Path(torch.__file__).parent / "lib"
    folder = tmp_path_factory.mktemp("with_torch")
    return Module(folder, "-DWITH_TORCH", f"-L{lib}", "-ltorch_cpu")


@pytest.fixture
def on_cpu(with_torch, monkeypatch):
    """Opaque ops on CPU, as if it were an H200. What is computed of them is nothing; `asked` has
    the calls that ran in Python."""
    asked = []

    def quantize(*args):
        asked.append("quantize_kv")
        k, v, _, recipe = args
        return empty_kv(k, v, recipe).tensors()

    def attend(*args):
        asked.append("attention")
        return AttentionCall(*args).empty_outputs()

    def correct(lse, *_):
        asked.append("unsmoothed_lse")
        return [torch.empty_like(lse)]

    def append(*_):
        asked.append("append_kv")

    built = concurrent.futures.Future()
    built.set_result(with_torch.python)
    monkeypatch.setattr(replay, "library", lambda: built)
    monkeypatch.setattr(replay, "DEVICE", "cpu")
    monkeypatch.setattr(replay, "_compiled", with_torch.compile)
    whole = gpus.capability, gpus.processors
    for name, of_cpu, of_gpu in zip(("capability", "processors"), ((9, 0), 132), whole):
        of = lambda x, of_cpu=of_cpu, of_gpu=of_gpu: of_gpu(x) if type(x) is gpus.Gpu else of_cpu  # noqa: E731
        monkeypatch.setattr(gpus, name, of)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with_torch.set("current", 0)
    monkeypatch.setattr(register, "emulated", lambda x: False)
    ops = dict(quantize_kv=quantize, attention=attend, unsmoothed_lse=correct, append_kv=append)
    with torch.library._scoped_library("sage", "IMPL") as lib:
        for name, of_cpu in ops.items():
            lib.impl(name, of_cpu, "CPU", allow_override=True)
        yield asked
    with_torch.written()


def layer(q, k, v, left=None, right=0, out_bnhd=False):
    p = Prepared(*quantize_kv(k, v, None, RECIPE))
    call = AttentionCall(
        q, p.k, p.k_scale, p.v, q.shape[3] ** -0.5, k.shape[2], RECIPE, v_scale=p.v_scale,
        v_mean=p.v_mean, left=left, right=right, out_bnhd=out_bnhd,
    )  # fmt: skip
    return attention(*call)


def layers(q, k, v):
    """Two that are equal but for what they read."""
    out, lse = layer(q, k, v)
    return *layer(out, k, v), lse


def corrected(q, k, v):
    """lse of the keys before they were smoothed."""
    out, lse = layer(q, k, v)
    return out, *unsmoothed_lse(lse, q, k.float().mean(2), 0.125)


def of_python(model, *inputs) -> calls.Plan:
    """What it launches."""

    def launch(run, gpu, *given):
        mine = sys.modules[__name__]
        ops = {each: vars(mine)[each] for each in ("quantize_kv", "attention", "unsmoothed_lse")}
        of_gpu = {name: functools.partial(LAUNCHES[op], run, gpu) for name, op in ops.items()}
        with mock.patch.multiple(mine, **of_gpu):
            return model(*given)

    return planned(launch, inputs)


def planned(launch, inputs) -> calls.Plan:
    like = {f"x{i}": Tensor(x.dtype, x.shape, x.stride()) for i, x in enumerate(inputs)}
    return calls.planned(launch, like, 132)


def draw(B: int, N: int, H: int = 2, D: int = 64) -> list[torch.Tensor]:
    return [torch.randn(B, N, H, D, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)]


def check_launches(module: Module, inputs, expected: calls.Plan) -> None:
    """That they were those. What is freed before may be where another tensor is."""
    label = Labels({x.data_ptr(): f"x{i}" for i, x in enumerate(inputs)})
    found = module.launches_of(module.written(), label)
    places = {f"x{i}": f"x{i}" for i in range(len(inputs))}

    def same(a, b) -> bool:
        if isinstance(b, (list, tuple)):
            return len(a) == len(b) and all(map(same, a, b))
        return places.setdefault(b, a) == a if isinstance(b, str) else a == b

    assert len(found) == len(expected.launches)
    for a, b in zip(found, expected.launches):
        assert a[:2] == b[:2] and a[3] == b[3] and same(a[2], b[2]), (a, b)


@pairs(
    among=lambda model, dynamic: dynamic == (model is layer),
    model=[layer, layers, corrected], dynamic=[False, True],
)  # fmt: skip
def test_a_compiled_model_replays_what_it_launched(model, dynamic, with_torch, on_cpu):
    run = torch.compile(model, dynamic=dynamic, fullgraph=True)
    sizes = [(3, 100), (4, 640), (5, 1600)] if dynamic else [(2, 100)]
    inputs = [draw(*size) for size in sizes]
    _, (code,) = run_and_get_code(run, *inputs[0])
    replays = re.findall(r"^sage_\d+ = Replay\(torch\.ops\.sage\.\w+\.default\)$", code, re.M)
    assert len(replays) == 2 + (model is corrected)
    torch._dynamo.reset()
    on_cpu.clear()
    # Equal layers share what is noted: the second layer's first call is the second of its kind.
    for turn in range(4):
        for given in inputs:
            on_cpu.clear()
            outputs = run(*given)
            if turn < 2:
                with_torch.written()
                continue
            assert not on_cpu
            expected = of_python(model, *given)
            check_launches(with_torch, given, expected)
            for x, (_, shape, strides, dtype) in zip(outputs, expected.outputs):
                assert (list(x.shape), list(x.stride()), KINDS[x.dtype]) == (shape, strides, dtype)


def test_what_writes_to_a_cache_is_replayed_once_and_on_the_cache_itself(with_torch, on_cpu):
    def step(*given):
        append_kv(*given, True)
        return given[1] + 1

    given = [
        *[torch.zeros(2, 2, 64, 64, dtype=torch.int8), torch.zeros(2, 2, 64)] * 2, *draw(2, 3)[:2],
        torch.zeros(2, 2, 64), torch.tensor(0),
    ]  # fmt: skip
    given[2:4] = (x.clone() for x in given[2:4])
    run = torch.compile(step, fullgraph=True)
    with fresh_cache():
        for _ in range(3):
            on_cpu.clear()
            with_torch.written()
            run(*given)
    expected = planned(lambda *x: LAUNCHES[append_kv](*x, True), given)
    assert not on_cpu and len(expected.launches) == 1
    check_launches(with_torch, given, expected)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_training_step_replays_what_it_launched(dynamic, with_torch, on_cpu):
    q, k, v = (x.requires_grad_() for x in draw(2, 200))
    grad = torch.randn(q.shape, dtype=q.dtype)  # as out is: others torch 2.11 copies

    def attend(q, k, v):
        return torch.ops.sage.rowscaled(q, k, v, False, 0.125, False)[0]

    run = torch.compile(attend, fullgraph=True, dynamic=dynamic)
    with fresh_cache():
        for _ in range(3):
            with_torch.written()
            out = run(q, k, v)
            gradients = torch.autograd.grad(out, (q, k, v), grad)
    for x, y in zip((out, *gradients), (q, q, k, v)):
        assert x.shape == y.shape and x.is_contiguous() and x.dtype == q.dtype

    def launch(run, gpu, q, k, v, grad):
        found = rowscaled._launch(run, gpu, q, k, v, False, 0.125, False)
        return rowscaled._launch_backward(run, gpu, grad, *found, 200, 0.125, False)

    given = q, k, v, grad
    expected = planned(launch, given)
    assert [each[0].__name__ for each in expected.launches] == [
        "_estimate_kernel", *["_quantize_kernel"] * 3, "_hopper_kernel",
        "_rows_kernel", "_bounds_kernel", "_turn_kernel", "dq_kernel", "dkdv_kernel",
    ]  # fmt: skip
    check_launches(with_torch, given, expected)


def test_what_trains_is_compiled_while_its_graph_is_traced(on_cpu, monkeypatch):
    asked = []
    monkeypatch.setattr(register, "precompile", lambda *given: asked.append(given))
    q, k, v = (x.requires_grad_() for x in draw(2, 200))

    def attend(q, k, v):
        return torch.ops.sage.rowscaled(q, k, v, is_causal=True, scale=0.125, out_bnhd=False)[0]

    with fresh_cache():
        torch.compile(attend, fullgraph=True)(q, k, v).sum().backward()
    (forward, given), (backward, of_backward) = dict(asked).items()  # traced more than once
    assert (forward, backward) == (rowscaled._launch, rowscaled._launch_backward)
    for x, y in zip(given, (q, k, v)):
        assert x.shape == y.shape and x.stride() == y.stride()
    assert given[3:] == (True, 0.125, False) and of_backward[-3:] == (200, 0.125, False)
    assert Kept(*of_backward[2:-3]).v_mean.shape == (2, 2, 0)


def test_an_op_is_given_the_strides_of_eager_mode(monkeypatch, generated):
    """By which it decides what it launches, and whether it copies. Of a sum of tensors of two
    layouts Inductor chooses another, if it may."""
    given, call = [], replay.Replay.__call__

    def see(self, *args):
        given.append([x.stride() for x in args[:3]])
        return call(self, *args)

    def operands(q, k, v, other):
        return q + other, other * k, -v

    def attend(*given):
        return torch.ops.sage.rowscaled(*operands(*given), False, 0.125, True)[0]

    monkeypatch.setattr(replay.Replay, "__call__", see)
    inputs = *draw(2, 100), torch.randn(2, 2, 100, 64).bfloat16()
    with torch._inductor.config.patch(force_disable_caches=True):
        torch.compile(attend)(*inputs)
    strides = [x.stride() for x in operands(*inputs)]
    assert given == [strides] and strides[0] == inputs[0].stride() != inputs[3].stride()


def test_in_a_cpp_wrapper_what_trains_is_called():
    def attend(q, k, v):
        return torch.ops.sage.rowscaled(q, k, v, False, 0.125, True)[0]

    given = draw(2, 100)
    # Precompiled headers of one file are not worth it.
    quick = {"aot_inductor.compile_wrapper_opt_level": "O0", "cpp_cache_precompile_headers": False}
    with fresh_cache():
        out = torch.compile(attend, options={"cpp_wrapper": True, **quick})(*given)
    assert torch.equal(out, attend(*given))


def test_a_torch_without_handles_calls_the_ops(on_cpu, monkeypatch):
    monkeypatch.setattr(compat, "handles_of", None)
    with fresh_cache():
        _, (code,) = run_and_get_code(torch.compile(layer), *draw(2, 100))
    assert "torch.ops.sage.attention.default(" in code and "Replay" not in code


def test_a_training_step_whose_operands_are_copied_stays_with_python():
    for layout, D in (("every_other", 64), ("bnhd", 74)):
        sizes = map(Facts.of, (2, 200, 200))
        given = like(calls.known(calls.train(*sizes, D, layout=layout)))
        with pytest.raises(NotImplementedError, match="q or v is copied"):
            replay.note(rowscaled._launch, given.values(), H200, None)


def two(first, second):
    """Layers, with these arguments, of which the first one's output is where its q is."""
    return lambda q, k, v: layer(layer(q, k, v, **first)[0], k, v, **second)


OTHER = NAMED["sage2-8b"].encode()
PAIRS = {  # of calls that differ in the places of equal numbers, in a bool, in a string alone
    "bands": two(dict(left=5, right=None, out_bnhd=True), dict(left=None, right=5, out_bnhd=True)),
    "flags": two(dict(out_bnhd=True), dict(out_bnhd=False)),
    "recipes": lambda q, k, v: [*quantize_kv(k, v, None, RECIPE), *quantize_kv(k, v, None, OTHER)],
}


@pytest.mark.parametrize("model", PAIRS.values(), ids=PAIRS.keys())
def test_calls_of_other_constants_are_not_mixed_up(model, with_torch, on_cpu):
    run, given = torch.compile(model, fullgraph=True), draw(2, 100)
    for _ in range(3):
        with_torch.written()
        outputs = run(*given)
    expected = of_python(model, *given)
    check_launches(with_torch, given, expected)
    strides = [list(x.stride()) for x in outputs]
    assert strides == [strides for _, _, strides, _ in expected.outputs]


def test_a_cached_graph_replays_too(with_torch, on_cpu):
    """Its code is of another process; here, of before the reset."""
    given = draw(2, 100)
    with fresh_cache(), torch._inductor.config.patch(fx_graph_cache=True):
        for turn in range(2):
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            run = torch.compile(layer)
            for _ in range(3):
                run(*given)
            assert torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"] == turn
            check_launches(with_torch, given, of_python(layer, *given))


def test_nothing_keeps_a_tensor(with_torch, on_cpu):
    given, run = draw(2, 100), replay.Replay(quantize_kv)
    k, v = given[1:]
    args = k, v, None, RECIPE

    def uses():
        references = [sys.getrefcount(x) for x in args]
        return references, torch._C._storage_Use_Count(k.untyped_storage()._cdata)

    for _ in range(3):
        outputs = run(*args)
    before = uses()
    for _ in range(5):
        outputs = run(*args)
    assert not on_cpu[2:] and uses() == before
    assert [torch._C._storage_Use_Count(x.untyped_storage()._cdata) for x in outputs] == [2] * 6


LIBRARY = replay.library.__wrapped__  # fixtures put another in its place


def slower(caplog) -> list[str]:
    """The report's lines that say so; the warnings say the same, each once."""
    found = [line for line in str(sage_inductor.report()).splitlines() if replay.BY_PYTHON in line]
    assert sorted(r.message for r in caplog.records if r.levelname == "WARNING") == sorted(found)
    return found


def test_without_a_compiler_python_submits_and_says_so(on_cpu, with_torch, monkeypatch, caplog):
    monkeypatch.setattr(replay, "_load", lambda: 1 / 0)
    built = LIBRARY()
    concurrent.futures.wait([built])
    monkeypatch.setattr(replay, "library", lambda: built)
    given = draw(2, 100)
    notes.warn_once.cache_clear()
    for _ in range(2):
        torch._dynamo.reset()
        run = torch.compile(layer)
        for _ in range(2):
            run(*given)
        why = "replay.cpp did not compile, set CC to a C++ compiler (division by zero)"
        assert slower(caplog) == [f"{replay.BY_PYTHON}: {why}"]
    assert on_cpu == 4 * ["quantize_kv", "attention"] and not with_torch.written()
    monkeypatch.setattr(replay, "handles_of", None)
    assert replay.why_python() == f"torch {torch.__version__} does not let C++ take tensors"


@pytest.mark.parametrize("which", ["launch_enter_hook", "launch_exit_hook"])
def test_while_a_profiler_hooks_launches_python_submits(which, on_cpu, with_torch):
    """Its hooks are called where Triton launches."""
    given, run = draw(2, 100), torch.compile(layer)
    for _ in range(3):
        run(*given)
    assert len(on_cpu) == 4 and with_torch.written()
    with knobs.runtime.scope():
        hook = getattr(knobs.runtime, which)
        hook.add(print)
        run(*given)
        hook.remove(print)
        assert len(on_cpu) == 6 and not with_torch.written()
        setattr(knobs.runtime, which, None)  # by which older code takes a hook away
        run(*given)
    run(*given)
    assert len(on_cpu) == 6 and with_torch.written()


def test_calls_run_in_python_until_it_is_compiled(on_cpu, with_torch, monkeypatch):
    built = concurrent.futures.Future()
    monkeypatch.setattr(replay, "library", lambda: built)
    given, run = draw(2, 100), torch.compile(layer)
    for _ in range(4):
        run(*given)
    built.set_result(with_torch.python)
    for _ in range(2):
        run(*given)
    assert len(on_cpu) == 12 and not with_torch.written()
    run(*given)
    assert len(on_cpu) == 12
    check_launches(with_torch, given, of_python(layer, *given))


def test_nothing_is_noted_while_a_graph_is_captured(on_cpu, with_torch, monkeypatch):
    """To load a kernel would end the capture."""
    noted, note = [], replay.note
    monkeypatch.setattr(replay, "note", lambda *args: noted.append(args) or note(*args))
    given, run = draw(2, 100), torch.compile(layer)
    for is_capturing, count in (True, 0), (True, 0), (False, 2), (True, 2):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda x=is_capturing: x)
        run(*given)
        assert len(noted) == count
    assert len(on_cpu) == 6
    check_launches(with_torch, given, of_python(layer, *given))


def test_what_cannot_be_noted_stays_with_python(on_cpu, with_torch, monkeypatch, caplog):
    """A Triton that calls kernels in another way."""
    compile = with_torch.compile

    def other(*args):
        compiled = compile(*args)
        compiled.metadata.num_ctas = 2
        return compiled

    monkeypatch.setattr(replay, "_compiled", other)
    given, run = draw(2, 100), torch.compile(layer)
    notes.warn_once.cache_clear()
    for _ in range(5):
        run(*given)
    assert len(on_cpu) == 10 and not with_torch.written()
    ops = ("sage.quantize_kv", "sage.attention")
    for line, op in zip(slower(caplog), ops, strict=True):
        assert line.startswith(f"{replay.BY_PYTHON}: {op}.default: ")
        assert "this Triton calls kernels in another way" in line


# -- the module itself ----


def test_it_is_compiled_once_a_machine(with_torch, monkeypatch, tmp_path):
    built = []

    def build(folder, libraries, where):
        built.append(libraries)
        return shutil.copy(with_torch.path, folder)

    monkeypatch.setattr(replay, "build", build)
    monkeypatch.setattr(compat, "cuda_library_dirs", lambda: [])
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        assert replay._load().run and replay._load().site()
        assert built == [["torch_cuda", "torch_cpu", "libcuda.so.1"]]
        other = tmp_path / "launcher.h"
        other.write_text("// another")
        monkeypatch.setattr(replay, "HEADER", other)
        replay._load()
        assert len(built) == 2


def test_tritons_compiler_takes_it(tmp_path):
    """But for the driver's library, which is not here."""
    path = replay.build(str(tmp_path), [], [])
    assert path.endswith(sysconfig.get_config_var("EXT_SUFFIX")) and Path(path).exists()


def test_its_compilation_is_waited_for_by_none(monkeypatch):
    started, go = threading.Event(), threading.Event()

    def load():
        started.set()
        go.wait()
        return "a module"

    monkeypatch.setattr(replay, "_load", load)
    library = functools.cache(LIBRARY)
    future = library()
    assert started.wait(600)
    waits = not future.done() and library() is future
    go.set()
    assert waits and future.result(600) == "a module"
