"""SLA's kernel, which attends by lists of blocks: a stand-in of its name and arguments, in a layer
as SLA's. On a CPU PyTorch computes what the kernel does, in float64."""

import math
import operator
from unittest import mock

import pytest
import support
import torch
import triton.language as tl
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

import sage_inductor
from sage_inductor import patterns
from sage_inductor.choose import tables
from sage_inductor.choose.decide import rewrite
from sage_inductor.ops import compat, gpus
from sage_inductor.ops.reference.exact import attention_exact
from sage_inductor.ops.visibility import BlockLists
from sage_inductor.options import Settings
from sage_inductor.patterns import sla


def _attn_fwd(
    Q, K, V, qk_scale: tl.constexpr, topk: tl.constexpr, LUT, LSE, OS,
    L: tl.constexpr, M_BLOCKS: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid: (M_BLOCKS, batches * heads). The tests' scores are small: no maximum is taken off."""
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows, cols = block * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, D)
    at = head * L * D + cols[None, :]
    q = tl.load(Q + at + rows[:, None] * D, mask=rows[:, None] < L, other=0.0)
    total, out = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, D], tl.float32)
    for i in range(topk):
        first = tl.load(LUT + (head * M_BLOCKS + block) * topk + i) * BLOCK_N
        keys = first + tl.arange(0, BLOCK_N)
        k = tl.load(K + at + keys[:, None] * D, mask=keys[:, None] < L, other=0.0)
        v = tl.load(V + at + keys[:, None] * D, mask=keys[:, None] < L, other=0.0)
        p = tl.where(keys[None, :] < L, tl.exp(tl.dot(q, tl.trans(k)) * qk_scale), 0.0)
        total += tl.sum(p, 1)
        out += tl.dot(p, v.to(tl.float32), input_precision="ieee")
    out = out / total[:, None]
    tl.store(OS + at + rows[:, None] * D, out.to(OS.dtype.element_ty), mask=rows[:, None] < L)
    tl.store(LSE + head * L + rows, tl.log2(total), mask=rows < L)


KERNEL = JITFunction(_attn_fwd)


def listed(lut, block_q, block_kv) -> BlockLists:
    count = torch.full(lut.shape[:3], lut.shape[3], dtype=torch.int32, device=lut.device)
    return BlockLists(count, lut.int(), None, None, block_q, block_kv)


def launched(kernel, *args, grid, **kwargs):
    """What a launch of the kernel writes, by PyTorch."""
    x = dict(zip(KERNEL.arg_names, args, strict=False)) | kwargs
    lists = listed(x["LUT"], x["BLOCK_M"], x["BLOCK_N"])
    out, lse = attention_exact(x["Q"], x["K"], x["V"], x["qk_scale"], blocks=lists)
    x["OS"].copy_(out)
    x["LSE"].copy_(lse / math.log(2))


@pytest.fixture(autouse=True)
def without_a_gpu(request, monkeypatch):
    """Dynamo captures kernels of Triton's where it finds a GPU for them."""
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr("torch.utils._triton.has_triton", lambda *_: True)
        monkeypatch.setattr(JITFunction, "run", launched)
        monkeypatch.setattr(Autotuner, "run", launched)


class Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, lut, scale, block_q, block_kv):
        (B, H, N, D), (*_, M, topk) = q.shape, lut.shape
        out, lse = torch.empty_like(v), q.new_empty(B, H, N, dtype=torch.float32)
        KERNEL[M, B * H](
            q, k, v, scale, topk, lut, lse, out, N, M, D, block_q, block_kv,
            num_warps=4, num_stages=3,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, lut, lse, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, *_ = ctx.saved_tensors
        return grad * q, grad * k, grad * v, None, None, None, None


def chosen(q, k, topk, block_q, block_kv):
    """The blocks of keys whose means fit those of the queries best, in any order."""

    def means(x, block):
        N = x.shape[2]
        x = torch.nn.functional.pad(x, (0, 0, 0, -N % block)).unflatten(2, (-1, block))
        first = torch.arange(x.shape[2], device=x.device)[:, None] * block
        return x.float().sum(3) / (N - first).clamp(max=block)

    scores = means(q, block_q) @ means(k - k.mean(2, keepdim=True), block_kv).mT
    return torch.topk(scores, topk, dim=-1, sorted=False).indices


class Layer(torch.nn.Module):
    """As SLA's: a sparse branch, and a linear one with a projection."""

    def __init__(self, D=64, topk=2, blocks=(64, 64), scale=0.3, dtype=torch.bfloat16):
        super().__init__()
        self.topk, self.blocks, self.scale = topk, blocks, scale
        self.proj_l = torch.nn.Linear(D, D, dtype=dtype)

    def forward(self, q, k, v):
        q, k, v = (x.contiguous() for x in (q, k, v))
        lut = chosen(q, k, self.topk, *self.blocks)
        out = Attend.apply(q, k, v, lut, self.scale, *self.blocks)
        of_q, of_k = q.softmax(-1), k.softmax(-1)
        total = 1e-5 + (of_q * of_k.sum(2, keepdim=True)).sum(-1, keepdim=True)
        return out + self.proj_l(of_q @ (of_k.mT @ v) / total)


def inputs(B=2, H=3, N=300, D=64, dtype=torch.bfloat16):
    """Of which k has a mean, and v is stored by tokens."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, B, H, N, D).to(dtype)
    return q, k + 1, v.transpose(1, 2).contiguous().transpose(1, 2)


OPTIONS = {"sage.emulate": True, "sage.recipe": "sage2-8b-per-token"}
SPELLED = f"{__name__}._attn_fwd"


def compiled(function, *args, dynamic=None, grad=False):
    """What `function` returns, and the only site."""
    torch._dynamo.reset()
    with torch.set_grad_enabled(grad), support.op_by_op():
        run = torch.compile(
            function, backend="sage", fullgraph=True, dynamic=dynamic, options=OPTIONS
        )
        out = run(*args)
    (site,) = sage_inductor.report()
    return out, site


def sparse(q, k, v, lut, scale=0.3, blocks=(64, 64)):
    """The sparse branch, whose result something else reads."""
    return Attend.apply(q, k, v, lut, scale, *blocks) + 0


NEAR = 0.05  # of 8 bits; the planted bugs' are above 0.3


def error(blocks=(64, 64), topk=2, **given):
    """That of the emulation, by the lists that the kernel is given."""
    q, k, v = (x.contiguous() for x in inputs(**given))
    lut = chosen(q, k, topk, *blocks)
    out, site = compiled(sparse, q, k, v, lut, 0.3, blocks)
    assert site.rewritten, site.reason
    want, _ = attention_exact(q, k, v, 0.3, blocks=listed(lut, *blocks))
    return support.relative_l2(out, want)


@pytest.mark.parametrize("blocks", [(64, 64), (128, 64), (64, 128), (128, 128)], ids=str)
def test_a_layers_kernel_is_rewritten_and_the_rest_stays(blocks):
    layer, qkv = Layer(blocks=blocks), inputs()
    with torch.no_grad():
        want = layer(*qkv)
    out, site = compiled(layer, *qkv)
    assert (site.spelling, site.recipe) == (SPELLED, "sage2-8b-per-token"), site.reason
    assert site.mask == "blocks of {} x {}".format(*blocks)
    assert out.dtype == want.dtype and 0 < support.relative_l2(out, want) < NEAR
    assert out.stride() == want.stride()


@pytest.mark.parametrize(
    "given",
    [
        dict(topk=1),
        dict(topk=5),  # all
        dict(B=1, H=1, N=129),
        dict(D=128, N=256),
        dict(blocks=(128, 64), dtype=torch.float16),
    ],
    ids=str,
)
def test_the_result_is_that_of_the_lists(given):
    assert error(**given) < NEAR


def test_the_result_is_the_ops_by_the_same_lists():
    q, k, v = (x.contiguous() for x in inputs())
    lut = chosen(q, k, 2, 128, 64)
    out, _ = compiled(sparse, q, k, v, lut, 0.3, (128, 64))
    own = support.arguments(
        q, k, v, recipe="sage2-8b-per-token", scale=0.3, out_bnhd=False,
        **{x: y for x, y in listed(lut, 128, 64)._asdict().items() if y is not None},
    )  # fmt: skip
    assert torch.equal(out, torch.ops.sage.sdpa(*own)[0])


def test_a_graph_takes_new_lists_batches_and_heads():
    """Another length has a graph of its own: the kernel takes it as a constant."""
    torch._dynamo.reset()
    counters.clear()
    run = torch.compile(sparse, backend="sage", fullgraph=True, dynamic=True, options=OPTIONS)
    for B, H, N in ((3, 4, 300), (6, 3, 300), (3, 2, 200)):
        q, k, v = (x.clone(memory_format=torch.contiguous_format) for x in inputs(B, H, N))
        for lut in (chosen(q, k, 2, 64, 64), chosen(q.flip(2), k, 2, 64, 64)):
            with torch.no_grad(), support.op_by_op():
                out = run(q, k, v, lut)
            want, _ = attention_exact(q, k, v, 0.3, blocks=listed(lut, 64, 64))
            assert support.relative_l2(out, want) < NEAR
    assert counters["stats"]["unique_graphs"] == 2
    assert all(site.rewritten for site in sage_inductor.report())


def planted(change):
    def find(node, index):
        call = sla.find(node, index) if str(node.target) == sla.LAUNCH else None
        if call and call.blocks.size:
            change(call)
        return call

    find.__name__ = change.__name__
    return find


@planted
def lists_of_other_queries(call):
    flipped = call.emit(torch.ops.aten.flip.default, call.blocks.kv_indices, [2])
    call.blocks = call.blocks._replace(kv_indices=flipped)


@planted
def one_block_less(call):
    less = call.emit(torch.ops.aten.sub.Scalar, call.blocks.kv_num_blocks, 1)
    call.blocks = call.blocks._replace(kv_num_blocks=less)


@planted
def without_scale(call):
    call.scale = None


@pytest.mark.parametrize("bug", [lists_of_other_queries, one_block_less, without_scale])
def test_a_planted_bug_is_an_error_that_the_tests_see(monkeypatch, bug):
    monkeypatch.setattr(patterns, "FINDERS", [bug, *patterns.FINDERS])
    assert error() > 6 * NEAR


def test_what_is_written_to_the_result_later_is_seen():
    def function(q, k, v, lut):
        return Attend.apply(q, k, v, lut, 0.3, 64, 64).mul_(2)

    q, k, v = (x.contiguous() for x in inputs())
    lut = chosen(q, k, 2, 64, 64)
    out, site = compiled(function, q, k, v, lut)
    assert site.rewritten
    assert torch.equal(out, 2 * compiled(sparse, q, k, v, lut)[0])


def test_a_strict_export_has_it_too():
    layer, qkv = Layer(), inputs()
    with torch.no_grad():
        program = torch.export.export(layer, qkv, strict=True)
        (site,) = sage_inductor.rewrite(program, options=OPTIONS)
        assert site.recipe == "sage2-8b-per-token", site.reason
        assert 0 < support.relative_l2(program.module()(*qkv), layer(*qkv)) < NEAR


# -- calls that stay ----


def launch(q, k, v, lut, out, lse):
    (B, H, N, D), (*_, M, topk) = q.shape, lut.shape
    KERNEL[M, B * H](q, k, v, 0.3, topk, lut, lse, out, N, M, D, 64, 64, num_warps=4)


def whole(q, k, v, lut):
    """The first part of a tensor is the kernel's."""
    both = torch.zeros(2, *q.shape, dtype=q.dtype)
    launch(q, k, v, lut, both[0], q.new_empty(q.shape[:3], dtype=torch.float32))
    return both


def used_before(q, k, v, lut):
    out = torch.empty_like(v)
    view = out.flatten(2)
    launch(q, k, v, lut, out, q.new_empty(q.shape[:3], dtype=torch.float32))
    return view + 0


def with_lse(q, k, v, lut):
    out, lse = torch.empty_like(v), q.new_empty(q.shape[:3], dtype=torch.float32)
    launch(q, k, v, lut, out, lse)
    return out, lse


def under_autocast(q, k, v, lut):
    with torch.autocast("cpu", torch.float16):
        return sparse(q, k, v, lut)


ANOTHERS = f"`{SPELLED}` is another library's kernel for lists of blocks"


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (whole, ANOTHERS),
        (used_before, ANOTHERS),
        (with_lse, "the logsumexp or the maxima are used"),
        (under_autocast, "dtype must be one of ['bfloat16'], got float16"),
    ],
)
def test_a_call_that_stays_does_what_it_did(function, reason):
    q, k, v = (x.contiguous() for x in inputs())
    args = q, k, v, chosen(q, k, 2, 64, 64)
    want = function(*args)
    out, site = compiled(function, *args)
    assert not site.rewritten and site.reason == reason
    torch.testing.assert_close(out, want, rtol=0, atol=0)


def test_a_lse_of_which_the_shape_is_used_keeps_nothing():
    def function(*args):
        out, lse = with_lse(*args)
        return out * lse.shape[2]

    q, k, v = (x.contiguous() for x in inputs())
    assert compiled(function, q, k, v, chosen(q, k, 2, 64, 64))[1].rewritten


def test_training_stays_exact_with_its_own_backward():
    layer, (q, k, v) = Layer(), inputs()
    q.requires_grad_()
    out, site = compiled(layer, q, k, v, grad=True)
    assert site.reason == "training: block lists have no backward here" and not site.rewritten
    assert "torch.no_grad()" in site.why.cause.remedy
    want = layer(q, k, v)
    assert torch.equal(out, want)
    grads = [torch.autograd.grad(x.float().square().sum(), q)[0] for x in (out, want)]
    torch.testing.assert_close(*grads)


class Foreign:
    """A kernel as a graph knows it."""

    def __init__(self, name="_attn_fwd", **renamed):
        self.fn = type(name, (), {"__name__": name, "__module__": "somewhere"})
        self.arg_names = [renamed.get(x, x) for x in KERNEL.arg_names]
        self.renamed = renamed


def on_a_gpu(N=75648, H=24, kernel=KERNEL, settings=(), blocks=(128, 64), dim=128, **changed):
    """The sites of a launch in a graph on an H200, which is not here. changed: its tensors, numbers
    or grid."""
    graph, (block_q, block_kv) = torch.fx.Graph(), blocks
    M = -(-N // block_q)
    shape, lut = (1, H, N, dim), (1, H, M, 59)
    with FakeTensorMode(), torch.device("cuda"):
        values = {x: torch.empty(changed.get(x, shape), dtype=torch.bfloat16) for x in "QKV"}
        values["LUT"] = torch.empty(changed.get("LUT", lut), dtype=torch.int64)
        values["LSE"] = torch.empty(1, H, N)
        values |= {x: torch.empty_strided(*y) for x, y in changed.get("strided", {}).items()}
        nodes = {x: graph.placeholder(x) for x in values}
        nodes["OS"] = graph.call_function(torch.empty_like, (nodes["V"],))
        for name, value in (values | {"OS": torch.empty_like(values["V"])}).items():
            nodes[name].meta["val"] = value
    numbers = dict(qk_scale=0.1, topk=59, L=N, M_BLOCKS=M, D=dim, BLOCK_M=block_q, BLOCK_N=block_kv)
    numbers |= {x: y for x, y in changed.items() if x in numbers}
    table = compat.kernel_side_table
    graph.call_function(
        torch.ops.higher_order.triton_kernel_wrapper_mutation,
        kwargs=dict(
            kernel_idx=table.add_kernel(kernel), tma_descriptor_metadata={},
            constant_args_idx=table.add_constant_args(numbers),
            grid=changed.get("grid", [(M, H, 1)]),
            kwargs={getattr(kernel, "renamed", {}).get(x, x): y for x, y in nodes.items()},
        ),
    )  # fmt: skip
    graph.output(graph.call_function(operator.neg, (nodes["OS"],)))
    before = str(graph)
    with (
        mock.patch.object(gpus, "capability", lambda device: (9, 0)),
        mock.patch.object(tables, "gpu_name", lambda device: tables.H200),
    ):
        sites = rewrite(torch.fx.GraphModule({}, graph), Settings(**dict(settings)))
    assert any(site.rewritten for site in sites) == (str(graph) != before)
    return sites


@pytest.mark.parametrize(
    "given, recipe, reason",
    [
        (dict(N=16384), "sage2-8b-rotated", "by block lists, N >= 16384"),
        (dict(N=16320), None, "no known gain: sage2-8b-rotated by block lists wins from N=16384"),
        (dict(N=8192, settings={"force": True}), "sage2-8b-rotated", "forced"),
        (dict(dim=64), None, "no known gain: sage2-8b-rotated by block lists was not measured"),
    ],
    ids=str,
)
def test_auto_takes_it_where_it_was_timed(given, recipe, reason):
    (site,) = on_a_gpu(**given)
    assert (site.recipe, site.reason) == (recipe, reason)
    assert site.mask == "blocks of 128 x 64"


@pytest.mark.parametrize(
    "changed",
    [
        dict(topk=58), dict(topk=0, LUT=(1, 24, 591, 0)), dict(L=75647), dict(M_BLOCKS=590), dict(D=64), dict(BLOCK_N=32),
        dict(qk_scale=None), dict(grid=[(590, 24, 1)]), dict(grid=[(591, 24, 1), (591, 12, 1)]),
        dict(K=(1, 12, 75648, 128)), dict(V=(1, 24, 75648, 64)), dict(Q=(24, 75648, 128)),
        dict(LUT=(1, 24, 590, 59)), dict(strided={"K": ((1, 24, 75648, 128), (1, 128, 3072, 1))}),
        dict(strided={"LUT": ((1, 24, 591, 59), (1, 1, 1416, 24))}),
        dict(kernel=Foreign(L="N")), dict(kernel=Foreign(D="HEAD_DIM")),
    ],
    ids=lambda x: "-".join(x),
)  # fmt: skip
def test_a_near_miss_is_left_alone_with_a_reason(changed):
    (site,) = on_a_gpu(settings={"force": True}, **changed)
    assert site.reason.endswith("._attn_fwd` is another library's kernel for lists of blocks")
    assert "sparse_linear_attention" in site.why.cause.remedy


@pytest.mark.parametrize("kernel", [Foreign("attn"), Foreign(LUT="M")], ids=["name", "no-LUT"])
def test_another_kernel_is_no_row(kernel):
    assert not on_a_gpu(settings={"force": True}, kernel=kernel)


# -- SageSLA, whose kernels are in no graph ----


@torch.compiler.disable
def qk_int8_sv_f16_accum_f16_block_sparse_attn_inst_buf_with_pv_threshold(q, out):
    """As a function of a C++ extension, which Dynamo cannot trace."""
    return out.copy_(q)


def sage_sla(q):
    out = torch.empty_like(q)
    qk_int8_sv_f16_accum_f16_block_sparse_attn_inst_buf_with_pv_threshold(q, out)
    return out * 2


def test_the_report_says_where_a_graph_breaks_at_a_kernel_of_spargeattns():
    torch._dynamo.reset()
    with support.op_by_op():
        torch.compile(sage_sla, backend="sage", options=OPTIONS)(torch.ones(2))
    line = sage_sla.__code__.co_firstlineno + 2
    (told,) = (x for x in str(sage_inductor.report()).splitlines() if "SpargeAttn" in x)
    assert told == (
        f"{__file__}:{line}: a graph breaks at a kernel of SpargeAttn's (2 graphs so far); for SLA "
        "call sage_inductor.functional.sparse_linear_attention with the layer's proj_l; else give "
        'F.scaled_dot_product_attention a policy with "keep"'
    )


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [(64, 64), (128, 64)], ids=str)
def test_on_a_gpu_the_branch_is_the_kernels_up_to_8_bits(blocks):
    """By lists from outside: Inductor rounds means otherwise, and then another block is chosen."""
    q, k, v = (x.cuda().contiguous() for x in inputs(N=1000))
    given = q, k, v, chosen(q, k, 2, *blocks), 0.3, blocks
    with torch.no_grad():
        options = {"sage.force": True}
        out = torch.compile(sparse, backend="sage", fullgraph=True, options=options)(*given)
        want = sparse(*given)
    (site,) = sage_inductor.report()
    assert site.rewritten, site.reason
    assert 0 < support.relative_l2(out, want) < NEAR
