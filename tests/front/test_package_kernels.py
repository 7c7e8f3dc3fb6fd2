"""Packages and compiled models of single attention calls on a GPU: what the opaque ops launch from
C++ is what they launch from Python. tests/lowering/test_package.py and test_replay.py have the C++
without a GPU.

Shapes: qkv [B, N, H_q + 2 H_kv, D], of which q, k and v are views.
"""

import contextlib
import dataclasses
import re
import threading
import zipfile

import pytest
import torch
import torch.nn.functional as F
from support import relative_l1, relative_l2
from torch import nn

import sage_inductor
from sage_inductor.lowering import replay
from sage_inductor.ops.recipe import NAMED

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_libstdcxx")]
QUICK = {"aot_inductor.compile_wrapper_opt_level": "O0"}


@dataclasses.dataclass(frozen=True)
class Attention:
    """A kind of call. masked: what of [B, 1, N, N] it sees besides, made inside the graph."""

    H_q: int = 8
    H_kv: int = 8
    D: int = 128
    is_causal: bool = False
    mask: str = ""
    recipe: str = "auto"
    bnhd: bool = True
    shared: bool = False  # k and v are those of the first batch
    keep: float | None = None  # as in a policy; on tokens as random as these, blocks are listed all

    def module(self) -> nn.Module:
        return _Module(self)

    def draw(self, B: int, N: int) -> torch.Tensor:
        H = self.H_q + 2 * self.H_kv
        qkv = torch.randn(B, N, H, self.D, device="cuda")
        qkv[:, :, self.H_q : self.H_q + self.H_kv] += 3 * torch.randn(self.H_kv, self.D).cuda()
        qkv[:, :, self.H_q + self.H_kv :] += 2
        return qkv.bfloat16()


class _Module(nn.Module):
    def __init__(self, of: Attention):
        super().__init__()
        self.of = of

    def forward(self, qkv):
        of, N = self.of, qkv.shape[1]
        q, k, v = (x.transpose(1, 2) for x in qkv.split([of.H_q, of.H_kv, of.H_kv], 2))
        if of.shared:
            k, v = (x[:1].expand(qkv.shape[0], -1, -1, -1) for x in (k, v))
        i = torch.arange(N, device=qkv.device)
        mask = {
            "": lambda: None,
            "keys": lambda: (i < (N * 3 + 3) // 4)[None, None, None],
            "bool": lambda: ((i[:, None] - i).abs() % 3 < 2)[None, None],
            "bias": lambda: ((i[:, None] - i).abs() * -0.01)[None, None].to(qkv.dtype),
            "window": lambda: ((i[:, None] >= i) & (i[:, None] - i < 100))[None, None],
        }[of.mask]()
        out = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=of.is_causal, enable_gqa=of.H_q != of.H_kv
        )
        return out.transpose(1, 2) if of.bnhd else out.clone(memory_format=torch.contiguous_format)


CALLS = {
    "full": Attention(),
    "causal": Attention(is_causal=True),
    "grouped": Attention(16, 4, 128, is_causal=True, bnhd=False),
    "64": Attention(D=64),
    "causal-64": Attention(16, 8, 64, is_causal=True),
    "72": Attention(D=72),
    "40": Attention(D=40, is_causal=True),
    "256": Attention(4, 4, 256),
    "16-bit": Attention(recipe="sage1-per-token"),
    "16-bit-64": Attention(16, 4, 64, is_causal=True, recipe="sage1-per-token"),
    "rotated": Attention(16, 4, 72, recipe="sage2-8b-rotated"),
    "per-thread": Attention(recipe="sage2-8b"),
    "per-block": Attention(recipe="sage1"),
    "keys": Attention(mask="keys"),
    "bool": Attention(D=64, mask="bool"),
    "bias": Attention(mask="bias"),
    "window": Attention(16, 4, mask="window"),
    "one k and v": Attention(16, 4, shared=True),
    "one k and v, keys": Attention(mask="keys", shared=True),
    "block lists": Attention(16, 4, recipe="sage2-8b-per-token", keep=0.5),
    "block lists, 64": Attention(D=64, recipe="sage2-8b-per-token", keep=0.5),
}
SIZES = (2, 64), (1, 1), (3, 77), (1, 1535), (2, 1536), (1, 3071), (1, 4096), (5, 1000)


def exported(of: Attention) -> torch.export.ExportedProgram:
    Dim = torch.export.Dim
    shapes = ({0: Dim("B", min=1, max=8), 1: Dim("N", min=1, max=8192)},)
    example = of.draw(2, 64 if of.keep is None else 129)
    return torch.export.export(of.module(), (example,), dynamic_shapes=shapes)


def options(of: Attention) -> dict:
    rule = {"recipe": of.recipe} | ({} if of.keep is None else {"keep": of.keep})
    return {"sage.force": True, "sage.policy": [rule]}


@torch.no_grad()
def packaged(of: Attention, folder, **configs) -> str:
    torch._dynamo.reset()
    path = sage_inductor.aoti_compile_and_package(
        exported(of),
        package_path=str(folder / "model.pt2"),
        inductor_configs={**QUICK, **configs},
        options=options(of),
    )
    (site,) = sage_inductor.report()
    assert site.rewritten, site.reason
    return path


def load(path: str, device: int = -1):
    return torch._inductor.aoti_load_package(path, run_single_threaded=True, device_index=device)


def source_of(path: str) -> str:
    with zipfile.ZipFile(path) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".wrapper.cpp"))
        return archive.read(name).decode()


def compiled(of: Attention):
    return torch.compile(of.module(), backend="sage", options=options(of), dynamic=True)


@pytest.mark.parametrize("name", CALLS)
@torch.no_grad()
def test_a_package_computes_what_the_compiled_model_does(name, tmp_path, poisoned):
    """At every batch and length of its range; a CUDA graph of it with other inputs, too."""
    of = CALLS[name]
    run, expected, equal = load(packaged(of, tmp_path)), compiled(of), []
    for B, N in SIZES:
        qkv = of.draw(B, N)
        out, same = run(qkv), expected(qkv)
        assert out.shape == same.shape and out.stride() == same.stride()
        assert relative_l2(out, same) < 2e-3, (B, N)
        assert relative_l1(out, of.module()(qkv)) < 0.15, (B, N)
        equal.append(torch.equal(out, same))
    print(f"{name}: bit-equal at {sum(equal)} of {len(SIZES)}")

    graph, qkv = torch.cuda.CUDAGraph(), of.draw(2, 1536)
    with torch.cuda.graph(graph):
        out = run(qkv)
    qkv.copy_(of.draw(2, 1536))
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, run(qkv))


@torch.no_grad()
def test_a_package_holds_the_hopper_kernel_and_overlaps_its_preparation(tmp_path):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no other GPU has the Hopper kernel")
    source = source_of(packaged(CALLS["causal"], tmp_path))
    kernels = re.findall(r'^Kernel \w+ = \{"(\w+)".*, (true|false), \{', source, re.M)
    assert {name for name, _ in kernels} == {
        "_estimate_kernel", "_quantize_kv_kernel", "quantize_v_again_kernel", "_hopper_kernel"
    }  # fmt: skip
    overlaps = {name for name, pdl in kernels if pdl == "true"}
    assert overlaps == {name for name, _ in kernels} - {"_hopper_kernel"}


@torch.no_grad()
def test_weights_outside_the_package_are_given_where_it_is_loaded(tmp_path):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(512, 3 * 512)

        def forward(self, x):
            q, k, v = (y.unflatten(-1, (4, 128)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    model, x = Model().cuda().bfloat16(), torch.randn(2, 600, 512).cuda().bfloat16()
    paths = []
    for inside in (True, False):
        paths.append(
            sage_inductor.aoti_compile_and_package(
                torch.export.export(model, (x,)),
                package_path=str(tmp_path / f"{inside}.pt2"),
                inductor_configs={**QUICK, "aot_inductor.package_constants_in_so": inside},
                options={"sage.force": True},
            )
        )
    expected, run = load(paths[0])(x), load(paths[1])
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    run.load_constants(weights, check_full_update=True, user_managed=True)
    assert torch.equal(run(x), expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@torch.no_grad()
def test_a_package_runs_on_each_gpu_at_once(tmp_path):
    of = CALLS["full"]
    path = packaged(of, tmp_path)
    qkv = of.draw(2, 2000)
    expected = load(path)(qkv)
    for i in range(torch.cuda.device_count()):
        assert torch.equal(load(path, i)(qkv.to(f"cuda:{i}")).to("cuda:0"), expected)


# -- failures ----


def refused(run, *inputs, capfd) -> str:
    capfd.readouterr()
    with pytest.raises(RuntimeError):
        run(*inputs)
        torch.cuda.synchronize()
    return capfd.readouterr().err  # where torch prints what the package threw


@torch.no_grad()
def test_inputs_other_than_the_exported_ones(tmp_path, capfd):
    """A view of an input that Inductor makes has the exported strides, whatever the input has; what
    is passed on as it came is looked at."""
    q, k, v = CALLS["full"].draw(2, 300).split(8, 2)
    given = [x.transpose(1, 2).contiguous() for x in (q, k, v)]

    class Model(nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v)

    N = torch.export.Dim("N", min=1, max=8192)
    program = torch.export.export(Model(), tuple(given), dynamic_shapes=({2: N},) * 3)
    path = sage_inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "model.pt2"), inductor_configs=QUICK,
        options={"sage.force": True},
    )  # fmt: skip
    run = load(path)
    expected = run(*given)
    for i, name in enumerate("qkv"):
        strided = list(given)
        strided[i] = given[i].transpose(1, 2).contiguous().transpose(1, 2)
        error = refused(run, *strided, capfd=capfd)
        message = rf"sage_inductor: {name}: its stride in dimension \d must be .*, got \d+"
        assert re.search(message, error), error
        shifted = list(given)
        memory = torch.empty(given[i].numel() + 1, dtype=given[i].dtype, device="cuda")
        shifted[i] = memory[1:].view_as(given[i]).copy_(given[i])
        assert shifted[i].data_ptr() % 16 and torch.equal(run(*shifted), expected)


@torch.no_grad()
def test_a_damaged_kernel_is_refused_by_name(tmp_path, capfd):
    of = CALLS["causal"]
    path, broken, changed = packaged(of, tmp_path), tmp_path / "broken.pt2", 0
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(broken, "w") as new:
        for name in old.namelist():
            data = bytearray(old.read(name))
            if name.endswith(".so"):
                for found in re.finditer(b"\x7fELF", bytes(data)):
                    at = found.start()
                    is_cuda = int.from_bytes(data[at + 18 : at + 20], "little") == 190
                    if is_cuda and b"_hopper_kernel" in data[at : at + 0x2000]:
                        data[at + 0x3000] ^= 0xFF
                        changed += 1
            new.writestr(name, bytes(data))
    if not changed:
        pytest.skip("no other GPU has the Hopper kernel")
    error = refused(load(str(broken)), of.draw(1, 100), capfd=capfd)
    assert "the kernel _hopper_kernel in this package is damaged" in error, error


# -- C++ wrappers of compiled models ----


@pytest.mark.parametrize("name", ["full", "causal-64", "keys", "16-bit"])
@torch.no_grad()
def test_a_compiled_models_cpp_wrapper_launches_them_itself(name, poisoned):
    of = CALLS[name]
    expected = compiled(of)
    with_cpp = {**options(of), "cpp_wrapper": True}
    for dynamic in (False, True):
        torch._dynamo.reset()
        run = torch.compile(of.module(), backend="sage", options=with_cpp, dynamic=dynamic)
        for B, N in (2, 100), (2, 1600):
            qkv = of.draw(B, N)
            out = run(qkv)
            assert relative_l2(out, expected(qkv)) < 2e-3, (dynamic, N)


# -- replayed calls of compiled models ----


@pytest.fixture
def replayed(monkeypatch):
    """Of each call that C++ has replayed, how many outputs it had."""
    found, tensors_of = [], replay.tensors_of
    assert replay.library().result()

    def spy(handles):
        outputs = tensors_of(handles)
        found.append(len(outputs))
        return outputs

    monkeypatch.setattr(replay, "tensors_of", spy)
    return found


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CALLS)
@torch.no_grad()
def test_what_is_replayed_is_what_python_computed(name, dynamic, replayed, poisoned):
    """Bit by bit, at lengths that take turns."""
    of = CALLS[name]
    run = torch.compile(of.module(), backend="sage", options=options(of), dynamic=dynamic)
    sizes = [(B, N) for B, N in SIZES if N > 1] if dynamic else SIZES[:1]
    inputs = [of.draw(*size) for size in sizes]
    expected = [run(x).clone() for x in inputs]
    assert not replayed
    for _ in range(2):  # a size may be the first that a graph is compiled for; then it is noted
        for x, y in zip(inputs, expected, strict=True):
            assert torch.equal(run(x), y)
    for x, y in zip(inputs, expected, strict=True):
        seen = len(replayed)
        out = run(x)
        assert torch.equal(out, y) and out.stride() == y.stride()
        assert len(replayed) > seen
    for again in inputs, inputs[::-1]:  # other contents
        for x in again:
            x.copy_(x.roll(1, 1))
            seen, out = len(replayed), run(x)
            assert len(replayed) > seen
            with without_replays():
                assert torch.equal(run(x), out)


@contextlib.contextmanager
def without_replays():
    call = replay.Replay.__call__
    replay.Replay.__call__ = lambda self, *args: self.op(*args)
    try:
        yield
    finally:
        replay.Replay.__call__ = call


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("N, D", [(300, 128), (1000, 72)])
def test_a_replayed_training_step_gives_the_bits_of_python(N, D, is_causal, replayed, poisoned):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the FP8 backward trains on Hopper")
    n_kv = N if is_causal else N + 77
    shapes = ((N, 6), (n_kv, 2), (n_kv, 2), (N, 6))
    *given, grad = (
        torch.empty(2, rows, H, D, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for rows, H in shapes
    )
    for x in given:
        x.requires_grad_()

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)

    run = torch.compile(
        attend, backend="sage", options={"sage.training": "fp8-backward"}, fullgraph=True
    )

    def step():
        out = run(*given)
        return out.detach(), *torch.autograd.grad(out, given, grad)

    for turn in range(5):
        with torch.no_grad():
            for x in (*given, grad):
                x.normal_()
        replayed.clear()
        found = step()
        assert replayed == ([11, 3] if turn > 1 else [])
        with without_replays():
            for x, y in zip(found, step(), strict=True):
                assert torch.equal(x, y) and x.stride() == y.stride()


@torch.no_grad()
def test_tensors_at_odd_addresses_stay_with_python(replayed):
    q, k, v = (x.transpose(1, 2).contiguous() for x in CALLS["full"].draw(2, 300).split(8, 2))
    quantize = torch.ops.sage.quantize_kv.default
    recipe = NAMED["sage2-8b-per-token"].encode()
    memory = torch.empty(k.numel() + 1, dtype=k.dtype, device="cuda")
    moved = memory[1:].view_as(k).copy_(k)
    assert moved.data_ptr() % 16
    run = replay.Replay(quantize)
    expected = {x.data_ptr(): quantize(x, v, None, recipe) for x in (k, moved)}  # not bit for bit
    for given in k, moved, k, moved, k, moved, k:
        for x, y in zip(run(given, v, None, recipe), expected[given.data_ptr()], strict=True):
            assert torch.equal(x.float(), y.float())
    assert len(replayed) == 2  # the third and the fourth k


@pytest.mark.parametrize("name", ["full", "keys", "16-bit"])
@torch.no_grad()
def test_cuda_graphs_capture_replayed_calls(name, replayed):
    of = CALLS[name]
    expected = compiled(of)
    torch._dynamo.reset()
    calls = {"options": options(of), "dynamic": False, "backend": "sage"}
    run = torch.compile(of.module(), **calls)
    qkv = of.draw(2, 1000)
    for _ in range(3):
        run(qkv)
    assert replayed
    seen, graph = len(replayed), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(qkv)
    assert len(replayed) > seen
    for _ in range(2):
        qkv.copy_(of.draw(2, 1000))
        graph.replay()
        assert relative_l2(out, expected(qkv)) < 2e-3

    torch._dynamo.reset()  # Inductor's own
    trees = {**options(of), "sage.mode": "reduce-overhead"}
    run = torch.compile(of.module(), backend="sage", options=trees)
    for _ in range(5):
        assert relative_l2(run(qkv).clone(), expected(qkv)) < 2e-3


@torch.no_grad()
def test_threads_replay_on_streams_of_their_own(replayed):
    """Two, one of which takes the calls in reverse. test_export.py has packages in threads."""
    of, wrong = CALLS["causal"], []
    run = compiled(of)
    calls = [of.draw(1, N) for N in (100, 1000, 2000, 4000)]
    expected = [run(x).clone() for x in calls]
    torch.cuda.synchronize()

    def work(mine):
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for i in mine * 20:
                out = run(calls[i])
                torch.cuda.current_stream().synchronize()
                if not torch.equal(out, expected[i]):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in ([0, 1, 2, 3], [3, 2, 1, 0])]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong and len(replayed) > 100


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@torch.no_grad()
def test_each_gpu_has_plans_of_its_own(replayed):
    of, outputs = CALLS["full"], []
    run, qkv = compiled(of), of.draw(2, 500)
    for device in 0, 1, 0, 1, 0, 1:
        outputs.append(run(qkv.to(f"cuda:{device}")).cpu())
    assert all(torch.equal(x, outputs[0]) for x in outputs)
