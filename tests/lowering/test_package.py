"""What a package launches, without a GPU: the C++ that `record` writes, compiled with a driver that
writes down what it is asked (fake_driver.h), against the Python that it was written of."""

import concurrent.futures
import ctypes
import dataclasses
import functools
import math
import random
import re
import shutil
import subprocess
import sys
import threading
import types
from pathlib import Path

import launches as calls
import pytest
import sympy
import torch
from launches import ATTENTION, PACKAGED, Tensor, arguments, call_of, launch_of
from noted import H200
from pairs import has_every_variant
from torch._inductor.package import package_aoti

from sage_inductor.lowering import package
from sage_inductor.lowering.number import Facts
from sage_inductor.lowering.record import Recorded, TensorArgument, record
from sage_inductor.ops.attention import decode
from sage_inductor.ops.attention_call import AttentionCall
from sage_inductor.ops.compile import Compilation, Unknown, describe
from sage_inductor.ops.quantize.smooth import _estimate_kernel as estimate_kernel

# -- C++ with the fake driver ----


def fake_kernel(digest: str, compilation) -> str:
    options = dict(compilation.options)
    return package.kernel_definition(
        digest, f"name_{digest}", calls.image_of(digest, compilation), 32 * options.get("num_warps", 4),
        calls.SHARED, options.get("launch_pdl", False), calls.descriptors_of(compilation),
    )  # fmt: skip


def library_of(folder: Path, functions: dict[str, Recorded]) -> Path:
    """A shared library of the functions and the fake driver."""
    compilations = {d: c for f in functions.values() for d, c in f.compilations.items()}
    text = '#include "fake_driver.h"\n' + package.HEADER.read_text()
    text += "namespace sage_inductor {\nnamespace {\n"
    text += "".join(fake_kernel(d, c) for d, c in compilations.items())
    text += "".join(f.source for f in functions.values()) + "}\n}\n"
    for name, f in functions.items():
        head = re.search(rf"{name}\((.*?)\) {{", f.source, re.DOTALL)[1]
        counts = [len(re.findall(kind, head)) for kind in (r"Handle \w", "int64_t", r"Handle\*")]
        given = [f"(AtenTensorHandle)tensors[{i}]" for i in range(counts[0])]
        given += [f"numbers[{i}]" for i in range(counts[1])]
        given += [f"(AtenTensorHandle*)&outputs[{i}]" for i in range(counts[2])]
        text += (
            f'extern "C" const char* call_{name}(void** tensors, const int64_t* numbers, void** outputs)'
            f" {{\n  return failure([&] {{ return sage_inductor::{name}({', '.join(given)}); }});\n}}\n"
        )
    (folder / "test.cpp").write_text(text)
    return calls.build(folder / "test.cpp")


class Library(calls.Cpp):
    """C++ functions, as Python calls them."""

    def __init__(self, path: Path, functions: dict[str, Recorded]):
        super().__init__(path)
        self.functions = functions
        for name, f in functions.items():
            self.compilations |= f.compilations
            getattr(self.cpp, f"call_{name}").restype = ctypes.c_char_p

    def call(self, name: str, given: dict, device: int = 0, moved: dict | None = None) -> list:
        """What was written down. Raises RuntimeError with its message."""
        taken = self.functions[name].source.split("{")[0]
        tensors = self.tensors(given, device, moved)
        numbers = [x for k, x in given.items() if f"int64_t {k}" in taken]
        outputs = (ctypes.c_void_p * 8)()
        self.set("current", device)
        error = getattr(self.cpp, f"call_{name}")(
            (ctypes.c_void_p * len(tensors))(*tensors), (ctypes.c_int64 * len(numbers))(*numbers),
            outputs,
        )  # fmt: skip
        for x in tensors:
            self.cpp.aoti_torch_delete_tensor_object(ctypes.c_void_p(x))
        if error:
            self.written()
            raise RuntimeError(error.decode())
        found = self.written([x for x in outputs if x is not None])
        assert self.cpp.live() == 0
        return found

    def plan(self, name: str, given: dict, device: int = 0) -> tuple[calls.Plan, set]:
        """And the digests of what was launched."""
        written = self.call(name, given, device)
        plan, _ = self.plan_of(given, written, device)
        return plan, {x["launch"] for x in written if "launch" in x}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    functions = {
        name: record(name, launch_of(name), arguments(name, B, N, N), H200)
        for name, (B, N, _) in PACKAGED.items()
    }
    return Library(library_of(tmp_path_factory.mktemp("library"), functions), functions)


# -- equal ----


@pytest.mark.parametrize("name", PACKAGED)
def test_cpp_launches_what_python_launches(name, library, monkeypatch):
    rng, reached = random.Random(name), set()
    # A bound that hides nothing is dropped where the lengths are known: in C++ they are not.
    monkeypatch.setattr(AttentionCall, "without_idle_bounds", lambda call: call)
    # Nor are strides, which a kernel for codes compiles in.
    monkeypatch.setattr(decode, "reads_words", lambda *of_call: False)
    for _ in range(200 if has_every_variant() else 100):
        far = [Facts.of(16 * rng.randrange(1, 2**30)) for _ in range(3)]
        monkeypatch.setattr(calls, "APART", far)
        given, device = calls.drawn(name, rng)
        plan, digests = library.plan(name, given, device)
        assert plan == calls.planned(launch_of(name), given, calls.PROCESSORS[device])
        reached |= digests
    assert reached == library.functions[name].compilations.keys()


def test_recorded_functions_are_short_and_have_every_kernel_of_their_ops(library):
    """Ways through a function multiply with each question: a tile's rules once made 3,790 of them."""
    kernels = set()
    for name, function in library.functions.items():
        assert function.source.count("if (") <= 15, name
        kernels |= {each.kernel.__name__ for each in function.compilations.values()}
    assert kernels == {
        "_hopper_kernel", "_attention_kernel", "_combine_kernel", "_pack_mask_kernel",
        "_list_tiles_kernel", "_rank_tiles_kernel", "_estimate_kernel", "_quantize_k_kernel",
        "_quantize_kv_kernel", "quantize_v_again_kernel", "_partial_kernel", "_final_kernel",
        "_quantize_v_kernel", "_quantize_kernel", "_pool_kernel", "_largest_kernel", "_listed_kernel",
        "_unsmooth_kernel", "_decode_kernel", "_combine_splits_kernel", "_append_kv_kernel",
        "_mean_kernel", "_quantize_tail_kernel",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["keys", "rows", "bias"])
def test_a_mask_of_one_query_is_read_as_that_of_many(name, library):
    """As the graph around was traced, which makes a summary of many queries."""
    B = ATTENTION[name][0].low
    given = call_of(name, 1, B)
    ((of_one, *_), *_), _ = library.plan(name, given)
    ((of_many, *_), *_), _ = library.plan(name, call_of(name, 2, B))
    of_one, of_many = (dict(zip(kernel.arg_names, x)) for kernel, _, x, _ in (of_one, of_many))
    kind, row = ("MASK", 2), given["attn_mask"].strides[2]
    if name == "keys":  # which is packed for the Hopper kernel
        kind, row = ("ROWS", 1), 0
    assert kind in of_one.items() and kind in of_many.items()
    assert (of_one["stride_mm"], of_one["stride_mn"]) == (row, 1)


# -- failures ----


@pytest.fixture
def unloaded(library, tmp_path):
    """The library again, with no kernel loaded and no device known."""
    return Library(shutil.copy(library.path, tmp_path), library.functions)


def changed(given: dict, name: str, at: int | None = None, **fields) -> dict:
    """Another dtype, shape or strides of a tensor; at: in one dimension."""
    x = given[name]
    for field, value in fields.items():
        if at is not None:
            value = (*getattr(x, field)[:at], value, *getattr(x, field)[at + 1 :])
        x = x._replace(**{field: value})
    return given | {name: x}


def test_another_gpu_is_refused(unloaded):
    library = unloaded
    library.set("capability", 100)
    given = call_of("full", 128)
    with pytest.raises(RuntimeError, match=r"sage_inductor: this package holds kernels for compute "
                       r"capability 9\.0, got a GPU of 10\.0: package the model again on such a GPU"):  # fmt: skip
        library.call("full", given)
    library.set("capability", 90)
    library.call("full", given)
    with pytest.raises(RuntimeError, match="a tensor must be on one of 64 GPUs"):
        library.call("full", given, device=64)


def test_a_damaged_kernel_is_refused(library, tmp_path):
    """One bit of an image, in the library's file."""
    digest = next(iter(library.functions["full"].compilations))
    damaged = library.path.read_bytes().replace(f"{digest} 8".encode(), f"{digest} 9".encode())
    (tmp_path / "test.so").write_bytes(damaged)
    library = Library(tmp_path / "test.so", library.functions)
    with pytest.raises(RuntimeError, match=f"the kernel name_{digest} in this package is damaged"):
        library.call("full", call_of("full", 128))


def test_an_error_of_the_driver_or_of_torch_says_where(unloaded):
    library, given = unloaded, call_of("full", 128)
    for failing, message in (
        ("load", r"loading the kernel name_\w+: no kernel image \(the driver is for CUDA 12\.8\)$"),
        ("launch", r"name_\w+: launch failed \(the driver"),
        ("torch", "sage_inductor: torch failed at q$"),
    ):
        library.set(f"{failing}_fails", 1)
        with pytest.raises(RuntimeError, match=message):
            library.call("full", given)
        library.set(f"{failing}_fails", 0)
    assert library.call("full", given)
    assert library.cpp.live() == 0


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(name="q", dtype=torch.float16), "q must have the dtype that it had when the package was made"),
        (dict(name="q", shape=(2, 16, 128), strides=(16, 1, 1)), "q: its rank must be 4, as when the package was made, got 3"),
        (dict(name="q", at=1, shape=8), "q: its size in dimension 1 must be 16, as when the package was made, got 8"),
        (dict(name="k", at=2, shape=130), "k: its size in dimension 2 must be 128 to 32768 and a multiple of 16, as .* got 130"),
        (dict(name="q", at=0, shape=65), "q: its size in dimension 0 must be 1 to 64, as .* got 65"),
        (dict(name="q", at=3, strides=2), "q: its stride in dimension 3 must be 1, .* got 2"),
        (dict(name="q", at=0, strides=2048 * 128 + 8), "q: its stride in dimension 0 must be .* a multiple of 16, .* got 262152"),
        (dict(name="k", at=2, strides=256), "k: its stride in dimension 2 must be 128, .* got 256"),
        (dict(name="k", at=1, strides=128 * 256), "k: its stride in dimension 1 must be 16384, .* got 32768"),
        (dict(name="v_mean", at=2, shape=64), "v_mean: its size in dimension 2 must be 128, .* got 64"),
    ],
)  # fmt: skip
def test_what_is_not_as_when_the_package_was_made_is_refused(change, message, library):
    name = "portable" if "stride in dimension 1" in message else "full"
    given = changed(call_of(name, 128), **change)
    with pytest.raises(RuntimeError, match=f"^sage_inductor: {message}$"):
        library.call(name, given)


def test_numbers_that_are_not_as_when_the_package_was_made_are_refused(tmp_path):
    given = arguments("full", Facts.of(2), Facts(1, 512), Facts(16, 512, 16))
    functions = {"f": record("f", launch_of("full"), given, H200)}
    library = Library(library_of(tmp_path, functions), functions)
    for n in (0, 513, 17):
        with pytest.raises(RuntimeError, match="n_kv must be 16 to 512 and a multiple of 16, as when "
                           f"the package was made, got {n}"):  # fmt: skip
            library.call("f", call_of("full", 128) | {"n_kv": n})
    library.call("f", call_of("full", 128) | {"n_kv": 112})


def test_the_stride_of_one_row_is_not_looked_at(library):
    given = changed(call_of("full", 128, B=1), "q", at=0, strides=3)
    assert library.call("full", given)


def test_numbers_beyond_32_bits_are_refused(library):
    given = call_of("causal", 1)
    given = changed(given, "q", at=2, shape=2**31)
    with pytest.raises(RuntimeError, match="a size must fit in 32 bits, got 4294967296"):
        library.call("causal", given)
    given = changed(call_of("causal", 128), "k", at=2, shape=2**30)
    with pytest.raises(RuntimeError, match=f"must be .* to {2**30 - 1}"):
        library.call("causal", given)
    with pytest.raises(RuntimeError, match="a grid is too large"):
        library.call("kv_far", call_of("kv_far", 2**30 - 128, B=64))


def test_a_tensor_at_an_odd_address_is_copied(library):
    given = call_of("full", 128)
    written = library.call("full", given, moved={"k_scale": 4})
    (clone,) = (x for x in written if "clone" in x)
    at = (list(x for x in given if type(given[x]) is Tensor).index("k_scale") + 1) * calls.ALIGNED
    assert clone["of"] == at + 4
    (launch,) = (x["arguments"] for x in written if "launch" in x)
    assert clone["clone"] in launch and at + 4 not in launch
    assert not [x for x in library.call("full", given) if "clone" in x]


# -- loading ----


def test_all_kernels_are_loaded_at_the_first_call_on_a_device(unloaded):
    library = unloaded
    of = library.functions["full"].compilations
    for device in (0, 1):
        written = library.call("full", call_of("full", 128), device)
        loads = [(x["load"], x["on"]) for x in written if "load" in x]
        assert sorted(loads) == sorted((digest, device) for digest in of)
        shared = [x["shared_of"] for x in written if "shared_of" in x]
        assert sorted(shared) == sorted(of)
        first = next(i for i, x in enumerate(written) if "made" in x or "launch" in x)
        assert not any("load" in x for x in written[first:])
    for N in calls.LENGTHS:
        for device in (0, 1):
            assert not [x for x in library.call("full", call_of("full", N), device) if "load" in x]


def test_threads_load_a_kernel_once(unloaded):
    library, given = unloaded, call_of("full", 128)
    library.set("loading_ms", 20)
    tensors = library.tensors(given)
    start, call = threading.Barrier(4), library.cpp.call_full

    def run(_):
        arrays = (ctypes.c_void_p * len(tensors))(*tensors), (ctypes.c_int64 * 1)(128)
        start.wait()
        return call(*arrays, (ctypes.c_void_p * 8)())

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        errors = list(pool.map(run, range(4)))
    written = library.written()
    assert errors == [b""] * 4 and sum("launch" in x for x in written) == 4
    loads = [x["load"] for x in written if "load" in x]
    assert sorted(loads) == sorted(library.functions["full"].compilations)


def test_a_constexpr_must_be_known():
    """head_dim, of which a tile is made; and in general, of any kernel."""
    given = arguments("full", Facts.of(2), Facts.of(128), Facts.of(128))
    q = given["q"]
    unknown = dataclasses.replace(q, shape=(*q.shape[:3], Facts(1, 128)))
    with pytest.raises(TypeError, match="known only when a package runs: q.sizes\\[3\\]"):
        record("f", launch_of("full"), given | {"q": unknown}, H200)
    ((kernel, _, values, _), *_), *_ = calls.planned(launch_of("full"), calls.known(given), 132)
    (at,) = (i for i, each in enumerate(kernel.params) if each.name == "D")
    values = [torch.empty(1) if isinstance(x, (str, tuple)) else x for x in values]
    with pytest.raises(TypeError, match="_hopper_kernel: D must be known to compile it"):
        describe(kernel, [*values[:at], Unknown(math.inf, 1), *values[at + 1 :]], {})


# -- in Inductor: a package of ops whose C++ is in its own wrapper, on CPU ----


def _scale(x, bias, by, n, *, negate=False, sign="+"):
    """A tuple of outputs; an optional tensor, numbers known and not, defaults."""
    n = n if sign == "+" else -n
    return (-by if negate else by) * x + n, x + (0 if bias is None else bias)


def _pair(x):
    """A list of outputs."""
    return [x / 2, x * 2]


_TEST_OPS = torch.library.Library("sage_test", "DEF")
for _function, _schema in (
    (_scale, "scale(Tensor x, Tensor? bias, float by, SymInt n, *, bool negate=False, str sign='+') -> (Tensor, Tensor)"),
    (_pair, "pair(Tensor x) -> Tensor[]"),
):  # fmt: skip
    _TEST_OPS.define(_schema)
    _TEST_OPS.impl(_function.__name__[1:], _function, "CPU")
    torch.library.register_fake(f"sage_test::{_function.__name__[1:]}", _function, lib=_TEST_OPS)
SCALE, PAIR = torch.ops.sage_test.scale.default, torch.ops.sage_test.pair.default
for _op in (SCALE, PAIR):
    package.register(_op)

LOOP = """
AOTITorchError NAME(PARAMETERS) {
  int64_t *sizes, *strides;
  aoti_torch_get_sizes(x, &sizes);
  aoti_torch_get_strides(x, &strides);
  float *from, *to0, *to1, *added = nullptr;
  int64_t* steps = nullptr;
  aoti_torch_get_data_ptr(x, (void**)&from);
  BIAS
  aoti_torch_empty_strided(2, sizes, strides, aoti_torch_dtype_float32(), aoti_torch_device_type_cpu(), 0, out0);
  aoti_torch_empty_strided(2, sizes, strides, aoti_torch_dtype_float32(), aoti_torch_device_type_cpu(), 0, out1);
  aoti_torch_get_data_ptr(*out0, (void**)&to0);
  aoti_torch_get_data_ptr(*out1, (void**)&to1);
  for (int64_t i = 0; i < sizes[0]; ++i) {
    for (int64_t j = 0; j < sizes[1]; ++j) {
      const int64_t at = i * strides[0] + j * strides[1];
      to0[at] = FIRST;
      to1[at] = SECOND;
    }
  }
  return AOTI_TORCH_SUCCESS;
}
"""


@pytest.fixture
def sources(monkeypatch):
    """What C++ was asked for, of the test's ops."""
    asked = []

    def source(name, op, arguments, device, kernels):
        asked.append((name, op, arguments))
        kernels.add(name)
        tensors = [k for k, x in arguments.items() if isinstance(x, TensorArgument)]
        numbers = [k for k, x in arguments.items() if isinstance(x, Facts)]
        parameters = [f"AtenTensorHandle {k}" for k in tensors] + [f"int64_t {k}" for k in numbers]
        first, second, bias = "from[at] / 2", "from[at] * 2", ""
        if op is SCALE:
            n = "n" if "n" in numbers else arguments["n"]
            by = -arguments["by"] if arguments["negate"] else arguments["by"]
            first, second = f"{by}f * from[at] {arguments['sign']} {n}", "from[at]"
        if "bias" in tensors:
            bias = "aoti_torch_get_data_ptr(bias, (void**)&added); aoti_torch_get_strides(bias, &steps);"
            second += " + added[i * steps[0]]"
        parameters += ["AtenTensorHandle* out0", "AtenTensorHandle* out1"]
        text = LOOP.replace("NAME", name).replace("PARAMETERS", ", ".join(parameters))
        return text.replace("BIAS", bias).replace("FIRST", first).replace("SECOND", second)

    monkeypatch.setattr(package, "_source", source)
    return asked


class Scales(torch.nn.Module):
    def forward(self, x, bias):
        a, b = SCALE(x, None, 2.5, x.shape[0])
        c, d = SCALE(a, None, 2.5, x.shape[0])  # the same function
        e, f = SCALE((b + d).t(), bias[:, 1:], 0.5, n=3, negate=True)  # begins inside
        g, _ = SCALE(x, None, 2.0, 1, sign="-")
        return a, c, d, e, f, *PAIR(f), g


class Pairs(torch.nn.Module):
    def forward(self, x):
        (a, b), (c, _) = PAIR(x), SCALE(x, None, 2.0, 1)
        return a, b, c


O0 = {"aot_inductor.compile_wrapper_opt_level": "O0"}


@pytest.mark.sweep
def test_a_package_calls_cpp_of_its_own(sources, tmp_path):
    """Each model has its functions, from 0 on: of the second one the C++ is only written. torch has
    no op to call in another process."""
    x, bias, model = torch.randn(3, 8), torch.randn(8, 2), Scales()
    batch = {0: torch.export.Dim("batch", max=100)}
    programs = (
        torch.export.export(model, (x, bias), dynamic_shapes=(batch, None)),
        torch.export.export(Pairs(), (x,), dynamic_shapes=(batch,)),
    )
    files, _ = (
        torch._inductor.aot_compile(
            each.module(), each.example_inputs[0],
            options={"aot_inductor.package": True, "aot_inductor.package_cpp_only": text, **O0},
        )
        for each, text in zip(programs, (False, True))
    )  # fmt: skip
    path = package_aoti(str(tmp_path / "test.pt2"), {"scales": files})
    first, second, *_ = sources
    assert [(name, op) for name, op, _ in sources] == [
        *((f"aoti_torch_sage_{i}", SCALE) for i in (0, 1, 2)), ("aoti_torch_sage_3", PAIR),
        ("aoti_torch_sage_0", PAIR), ("aoti_torch_sage_1", SCALE),
    ]  # fmt: skip
    eight, one, batch = Facts.of(8), Facts.of(1), Facts(1, math.inf)
    given = first[2]
    assert given["x"] == TensorArgument(torch.float32, (batch, eight), (eight, one))
    constants = {"by": 2.5, "negate": False, "sign": "+"}
    assert given == {"x": given["x"], "bias": None, "n": batch, **constants}
    given = second[2]
    assert given["bias"].strides == (Facts.of(2), one) and given["negate"] and given["n"] == 3
    assert given["x"].shape == (eight, batch) and given["x"].strides == (one, eight)
    code = """
import sys, torch
path, inputs = sys.argv[1:]
# What load_package loads, which imports all of Inductor for it.
model = torch._C._aoti.AOTIModelPackageLoader(path, "scales", False, 1, -1)
torch.save([model.run([*given]) for given in torch.load(inputs)], inputs)
"""
    inputs = [(torch.randn(n, 8), bias) for n in (3, 1, 2, 17)]
    torch.save(inputs, tmp_path / "inputs")
    subprocess.run([sys.executable, "-c", code, path, tmp_path / "inputs"], check=True, cwd="/")
    for given, found in zip(inputs, torch.load(tmp_path / "inputs"), strict=True):
        for y, expected in zip(found, model(*given), strict=True):
            torch.testing.assert_close(y, expected)


def test_calls_of_other_constants_have_a_function_of_their_own(sources):
    wrapper = types.SimpleNamespace(header=types.SimpleNamespace(splice=len))
    x = TensorArgument(torch.float32, (Facts.of(3),) * 2, (Facts.of(3), Facts.of(1)))
    given = {"x": x, "bias": None, "by": 2.5, "n": 3, "negate": False, "sign": "+"}
    others = {}, {"by": 2.0}, {"x": dataclasses.replace(x, dtype=torch.float16)}, {}, {"bias": x}
    names = [package._function(wrapper, SCALE, given | each, "cpu") for each in others]
    assert names == [f"aoti_torch_sage_{i}" for i in (0, 1, 2, 0, 3)]
    assert wrapper.sage_kernels == {*names}


def test_of_a_size_no_more_is_known_than_each_of_its_terms_says():
    s, t = sympy.symbols("s t", integer=True, positive=True)
    divisors = {16 * s + 77: 1, 16 * s + 8: 8, 12 * s * t + 18 * s: 6, 16 * s: 16, 4 * (s + 3): 4}
    for size, divisor in divisors.items():
        assert package._facts(size) == Facts(1, math.inf, divisor), size
    assert package._facts(24) == Facts.of(24)


def test_a_compiled_model_calls_the_op_itself(sources):
    """Where the wrapper is Python there is no C++ to add to."""
    x, bias = torch.randn(3, 8), torch.randn(8, 2)
    with torch._inductor.config.patch(force_disable_caches=True):
        outputs = torch.compile(Scales())(x, bias)
    for y, expected in zip(outputs, Scales()(x, bias), strict=True):
        torch.testing.assert_close(y, expected)
    assert not sources


# -- real kernels, for a GPU that is not here ----


KERNEL = re.compile(
    r'image_(\w+)\[\] =\n([^;]*);\nKernel kernel_\1 = {"(\w+)", image_\1, (\d+)u, (\d+)ull, '
    r"(\d+)u, (\d+)u, (\w+), {(.*)}};"
)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_kernels_of_every_gpu_travel(capability):
    """They are called as the launcher of packages calls them: `launched_as` looks."""
    names = {"smooth": 2, "k_block": 3, "pool": 1, "lse": 1, "kv_thread": 4}
    for name, count in list(names.items())[: 5 if capability > (8, 0) else 4]:
        B, N, _ = calls.CALLS[name]
        gpu = H200._replace(capability=capability)
        source = package._source(name, calls.op_of(name), arguments(name, B, N, N), gpu, set())
        assert source.count("Kernel kernel_") == count
        assert f"_, {10 * capability[0] + capability[1]});" in source  # of such a GPU alone


def test_kernels_travel_as_the_jit_compiles_them(monkeypatch, tmp_path):
    """In the sweep, of head_dim 256: a row of k is read in two boxes."""
    names = ["d64_causal", "kv", *["d256"] * has_every_variant(), "portable"]
    kernels, texts, compiled, ways = set(), [], {}, set()
    whole = Compilation.compile

    def compile(self, capability):
        assert capability == (9, 0)
        compiled[self.digest] = self, whole(self, capability)
        return compiled[self.digest][1]

    monkeypatch.setattr(Compilation, "compile", compile)
    for name in names:
        B, N, _ = (ATTENTION | calls.QUANTIZE)[name]
        texts.append(
            package._source(name, calls.op_of(name), arguments(name, B, N, N), H200, kernels)
        )
    again = arguments("kv", *(calls.QUANTIZE["kv"][i] for i in (0, 1, 1)))
    texts.append(package._source("again", calls.op_of("kv"), again, H200, kernels))
    text = "".join(texts)
    assert text.count(package.HEADER.read_text()) == 1 and texts[0].startswith("// Launches")
    found = {each[1]: each for each in KERNEL.finditer(text)}
    assert found.keys() == compiled.keys() == kernels and not KERNEL.search(texts[-1])
    for digest, (compilation, kernel) in compiled.items():
        _, image, _, size, checksum, threads, shared, overlaps, descriptors = found[digest].groups()
        image = bytes(int(n, 8) for n in re.findall(r"\\(\d{3})", image))
        assert image == kernel.asm["cubin"] and len(image) == int(size)
        assert int(checksum) == functools.reduce(
            lambda x, byte: (x ^ byte) * 0x100000001B3 % 2**64, image, 1469598103934665603
        )
        m, ptx, options = kernel.metadata, kernel.asm["ptx"], dict(compilation.options)
        assert f".reqntid {threads}\n" in ptx and int(shared) == m.shared
        assert m.enable_fp_fusion and not re.search(r"\.loc\s", ptx)
        assert f".maxnreg {options.get('maxnreg')}\n" in ptx or "maxnreg" not in options
        assert overlaps == ("true" if "griddepcontrol.wait" in ptx else "false")
        found_in = re.findall(r"{(\d), 1, 0, {(\d+), (\d+)}}", descriptors)
        boxes = [[int(rows), int(row)] for _, rows, row in found_in]
        assert all(16 << int(swizzle) == int(row) for swizzle, _, row in found_in)
        assert len(boxes) == sum(each.startswith("tensordesc") for each in compilation.types)
        if m.name == "_hopper_kernel":
            wide = "fp8e4nv[256, 128]" in str(compilation.types)
            assert boxes == ([[128, 128], [256, 128]] if wide else [[128, 64], [64, 128]])
            ways.add("setmaxnreg" in ptx)
    hoppers = 3 if "d256" in names else 2
    names = sorted(kernel.metadata.name for _, kernel in compiled.values())
    assert names == ["_attention_kernel", "_estimate_kernel", *["_hopper_kernel"] * hoppers,
                     "_quantize_kv_kernel", "quantize_v_again_kernel"]  # fmt: skip
    assert ways == {False, True}  # by one warpgroup, and by several
    for compilation, kernel in compiled.values():
        options = dict(compilation.options)
        assert ("launch_pdl" in options) == ("quantize" in kernel.metadata.name or "estimate" in kernel.metadata.name)  # fmt: skip


@pytest.mark.parametrize(
    "what",
    [dict(num_ctas=2), dict(global_scratch_size=16), dict(profile_scratch_size=8),
     dict(launch_cooperative_grid=True), dict(ptx="(.param .u64 a, .param .u32 b)")],
)  # fmt: skip
def test_a_kernel_that_is_called_in_another_way_is_refused(what):
    compilation = Compilation(estimate_kernel, ("*fp32", "constexpr"), (), (), ())
    assert compilation.parameters == [8, 8, 8]

    def compiled(ptx=".param .u64 .ptr .global .align 16 a, .param .u64 b, .param .u64 c", **given):
        usual = dict(name="k", num_warps=4, shared=0, num_ctas=1, launch_cooperative_grid=False,
                     global_scratch_size=0, profile_scratch_size=0)  # fmt: skip
        asm = {"ptx": f".visible .entry k(\n{ptx}\n)\n", "cubin": b"ELF"}
        return types.SimpleNamespace(metadata=types.SimpleNamespace(**usual | given), asm=asm)

    assert "Kernel kernel_" in package.kernel_source(compilation, compiled())
    with pytest.raises(RuntimeError, match="^k: the parameters of the compiled kernel must be "
                       r"\[8, 8, 8\] bytes.* this Triton calls kernels in another way"):  # fmt: skip
        package.kernel_source(compilation, compiled(**what))
