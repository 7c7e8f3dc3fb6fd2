"""FastVideo's ops that attend by lists of blocks: stand-ins with the schemas that fastvideo-kernel
0.3.5 registers. They compute exactly what the sources of its kernels say."""

import math
import operator
from unittest import mock

import pytest
import support
import torch
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

import sage_inductor
from sage_inductor import patterns
from sage_inductor.choose import tables
from sage_inductor.choose.decide import rewrite
from sage_inductor.ops import gpus
from sage_inductor.ops.reference.exact import attention_exact
from sage_inductor.ops.visibility import BlockLists
from sage_inductor.options import Settings
from sage_inductor.patterns import fastvideo

LISTS = "Tensor q2k_idx, Tensor q2k_num, Tensor variable_block_sizes"
QKV = "Tensor q, Tensor k, Tensor v"
PADDED = "Tensor q_padded, Tensor k_padded, Tensor v_padded"
OPS = {
    "triton": f"({QKV}, {LISTS}) -> (Tensor, Tensor)",
    "sm90": f"({PADDED}, {LISTS}) -> (Tensor, Tensor)",
    "sm100a": f"({QKV}, {LISTS}) -> (Tensor, Tensor)",
    "sm100a_inference": f"({QKV}, {LISTS}) -> Tensor",
}
OTHERS = {
    "sm100a_from_mask_inference": f"({QKV}, Tensor block_map, Tensor variable_block_sizes) -> Tensor",
    "backward_triton":
        f"(Tensor grad_output, {QKV}, Tensor o, Tensor M, {LISTS}) -> (Tensor, Tensor, Tensor)",
}  # fmt: skip
LIBRARY = torch.library.Library("fastvideo_kernel", "FRAGMENT")  # unregisters when it is collected


def attend(q, k, v, index, count, sizes):
    """(out, logsumexp to the base 2), exact. A row that sees no key is 0."""
    block = k.shape[2] // len(sizes)
    is_token = (torch.arange(block) < sizes[:, None]).view(1, 1, 1, -1)
    lists = BlockLists(count, index, None, None, block, block)
    out, lse = attention_exact(q, k, v, q.shape[3] ** -0.5, is_token, blocks=lists)
    return out.to(q.dtype), (lse / math.log(2)).float()


def computes(name):
    def op(*args):
        out, lse = attend(*args)
        if name == "sm90":
            lse = -8 * lse[..., None]
        return out if name.endswith("inference") else (out, lse)

    def fake(q, *_):
        more = (1,) * (name == "sm90")
        out, lse = torch.empty_like(q), q.new_empty(*q.shape[:3], *more, dtype=torch.float32)
        return out if name.endswith("inference") else (out, lse)

    return op, fake


@pytest.fixture(scope="module", autouse=True)
def ops():
    for name, schema in {**OPS, **OTHERS}.items():
        full, (op, fake) = f"fastvideo_kernel::block_sparse_attn_{name}", computes(name)
        LIBRARY.define(full.split("::")[1] + schema)
        if name == "backward_triton":
            op = fake = lambda grad, q, k, v, *_: tuple(map(torch.empty_like, (q, k, v)))
        elif name not in OPS:
            op = fake = lambda q, *_: torch.empty_like(q)
        LIBRARY.impl(full.split("::")[1], op, "CPU")
        torch.library.register_fake(full, fake, lib=LIBRARY)
        if name in OPS and not name.endswith("inference"):
            torch.library.register_autograd(
                full, lambda ctx, *grads: (*grads[:1] * 3, None, None, None), lib=LIBRARY
            )


def of(name):
    return getattr(torch.ops.fastvideo_kernel, f"block_sparse_attn_{name}")


def inputs(
    blocks=4, sizes=(64, 33, 64, 1), H=2, D=64, block=64, B=1, N_q=None, dtype=torch.bfloat16
):
    """q, k, v of so many blocks of keys, whose padding is large, and lists of them."""
    torch.manual_seed(0)
    N = blocks * block
    q, k, v = (torch.randn(B, H, n, D) for n in (N_q or N, N, N))
    sizes = torch.tensor(sizes, dtype=torch.int32)
    k += 1  # smoothing matters
    padding = (torch.arange(block) >= sizes[:, None]).view(-1, 1)
    k, v = (x.masked_fill(padding, 100) for x in (k, v))
    count, index, *_ = support.block_lists(B, H, N_q or N, N, block, block, 0.6, False, unread=-1)
    return (*(x.to(dtype) for x in (q, k, v)), index, count, sizes)


OPTIONS = {"sage.emulate": True, "sage.recipe": "sage2-8b-per-token"}


def compiled(function, *args, dynamic=None, grad=False, options=OPTIONS):
    """What `function` returns, and the only site."""
    torch._dynamo.reset()
    with torch.set_grad_enabled(grad), support.op_by_op():
        out = torch.compile(
            function, backend="sage", fullgraph=True, dynamic=dynamic, options=options
        )(*args)
    (site,) = sage_inductor.report()
    return out, site


def first(name="triton"):
    if name.endswith("inference"):
        return lambda *args: of(name)(*args) + 0
    return lambda *args: of(name)(*args)[0]


def judged(args):
    """The error of the emulation by an op's own lists and sizes, which is that of 8 bits."""
    out, site = compiled(first(), *args)
    assert site.rewritten, site.reason
    return support.relative_l2(out, attend(*args)[0])


NEAR = 0.05  # of 8 bits; the planted bugs' are above 0.3


@pytest.mark.parametrize("name", OPS)
def test_an_op_is_rewritten_and_attends_to_the_tokens_of_the_blocks_it_lists(name):
    """Of blocks that padding cuts, named twice, rows without blocks; lists of each head."""
    args = inputs()
    out, site = compiled(first(name), *args)
    assert (site.spelling, site.recipe) == (
        f"fastvideo_kernel.block_sparse_attn_{name}", "sage2-8b-per-token",
    ), site.reason  # fmt: skip
    assert site.mask == "blocks of 64 x 64 + bool[1, 1, 1, 256]"
    assert support.relative_l2(out, attend(*args)[0]) < NEAR


def test_the_result_is_the_ops_by_the_same_lists_and_mask():
    *qkv, index, count, sizes = inputs()
    out, _ = compiled(first(), *qkv, index, count, sizes)
    mask = (torch.arange(64) < sizes[:, None]).view(1, 1, 1, -1)
    own = support.arguments(
        *qkv, recipe="sage2-8b-per-token", attn_mask=mask, out_bnhd=False,
        kv_num_blocks=count, kv_indices=index, block_q=64, block_kv=64,
    )  # fmt: skip
    assert torch.equal(out, torch.ops.sage.sdpa(*own)[0])


@pytest.mark.parametrize(
    "given",
    [
        dict(sizes=(64,) * 4),
        dict(B=2, sizes=(1, 2, 3, 4)),
        dict(N_q=128),  # fewer blocks of queries than of keys
        dict(D=40),
    ],
    ids=str,
)
def test_sizes_of_calls_and_blocks(given):
    assert judged(inputs(**given)) < NEAR


def test_a_graph_takes_new_lists_sizes_and_lengths():
    torch._dynamo.reset()
    counters.clear()
    run = torch.compile(first(), backend="sage", fullgraph=True, dynamic=True, options=OPTIONS)
    for blocks in (4, 6, 3):
        for size in (64, 17):
            args = inputs(blocks, (64,) * (blocks - 1) + (size,))
            with torch.no_grad(), support.op_by_op():
                assert support.relative_l2(run(*args), attend(*args)[0]) < NEAR
    assert counters["stats"]["unique_graphs"] == 1 and sage_inductor.report()[-1].rewritten


def wrong_lists(node, index):
    """Those of a query given to another."""
    call = fastvideo.find(node, index)
    if call and call.blocks.size:
        flip = [call.emit(torch.ops.aten.flip.default, x, [2]) for x in call.blocks[:2]]
        call.blocks = BlockLists(*flip, *call.blocks[2:])
    return call


def without_sizes(node, index):
    call = fastvideo.find(node, index)
    if call:
        call.attn_mask = None
    return call


def one_size_less(node, index):
    """Block j has the size of block j - 1."""
    call = fastvideo.find(node, index)
    if call and call.attn_mask:
        call.attn_mask = call.emit(torch.ops.aten.roll.default, call.attn_mask, [64], [3])
    return call


@pytest.mark.parametrize("bug", [wrong_lists, without_sizes, one_size_less])
def test_a_planted_bug_is_an_error_that_the_tests_see(monkeypatch, bug):
    monkeypatch.setattr(patterns, "FINDERS", [bug, *patterns.FINDERS])
    assert judged(inputs()) > 6 * NEAR


def stays(function, *args, **options):
    _, site = compiled(function, *args, **options)
    assert not site.rewritten
    assert site.spelling.startswith("fastvideo_kernel.block_sparse_attn_")
    return site.reason


@pytest.mark.parametrize("name", ["triton", "sm90"])
def test_a_used_logsumexp_keeps_the_op(name):
    args = inputs()
    (_, lse), site = compiled(lambda *args: of(name)(*args), *args)
    assert site.reason == "the logsumexp or the maxima are used" and not site.rewritten
    assert torch.equal(lse, of(name)(*args)[1])


def test_a_logsumexp_of_which_the_shape_is_used_keeps_nothing():
    def function(*args):
        out, lse = of("sm90")(*args)
        return out * lse.shape[3]

    assert compiled(function, *inputs())[1].rewritten


def test_what_another_librarys_kernel_alone_computes_stays_with_a_reason():
    q, *others = inputs()
    assert stays(first(), q.requires_grad_(), *others, grad=True) == (
        "training: block lists have no backward here"
    )
    half = inputs(dtype=torch.float16)
    assert stays(first(), *half) == "dtype must be one of ['bfloat16'], got float16"
    *qkv, index, count, sizes = inputs()
    wide = *qkv, index.long(), count, sizes
    assert stays(first(), *wide).startswith("block lists must be int32, got ['int32', 'int64']")
    few = inputs(H=1)[1:3]
    assert stays(lambda q, *args: first()(q, *few, *args), q.detach(), index, count, sizes) == (
        "q has 2 heads and k 1, with enable_gqa=False"
    )
    listed = (
        "`fastvideo_kernel.block_sparse_attn_{}` is another library's kernel for lists of blocks"
    )
    from_mask = lambda *args: of("sm100a_from_mask_inference")(*args) + 0  # noqa: E731
    name = "sm100a_from_mask_inference"
    assert stays(from_mask, *qkv, index > 0, sizes) == listed.format(name)
    of_128 = inputs(blocks=2, sizes=(128, 3), block=128)
    assert stays(first("sm100a"), *of_128) == listed.format("sm100a")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_casts_no_op_of_fastvideo(dtype):
    def function(*args):
        with torch.autocast("cpu", dtype):
            return of("triton")(*args)[0]

    out, site = compiled(function, *inputs())
    assert out.dtype == torch.bfloat16 and site.rewritten == (dtype == torch.bfloat16)
    with torch.autocast("cpu", dtype):
        out, site = compiled(first(), *inputs())
    assert out.dtype == torch.bfloat16 and site.rewritten == (dtype == torch.bfloat16)


def test_a_backward_is_no_row():
    q, k, v, index, count, sizes = inputs()

    def function(*args):
        return of("backward_triton")(*args)[0]

    torch._dynamo.reset()
    torch.compile(function, backend="sage", options=OPTIONS)(q, q, k, v, q, q, index, count, sizes)
    assert not sage_inductor.report()


# -- which calls "auto" takes ----


def on_a_gpu(name="sm90", N=75648, dim=128, **settings):
    """The site of a call in a graph on an H200, which is not here."""
    graph, H = torch.fx.Graph(), 24
    M = N // 64
    with FakeTensorMode():
        q, *lists = (
            torch.empty(*shape, device="cuda", dtype=torch.int32)
            for shape in ((1, H, N, dim), (1, H, M, M), (1, H, M), (M,))
        )
        values = *[q.bfloat16()] * 3, *lists
        nodes = [graph.placeholder(f"x{i}") for i in range(6)]
        nodes.append(graph.call_function(of(name).default, tuple(nodes)))
        values += (of(name)(*values),)
        nodes.append(graph.call_function(operator.getitem, (nodes[-1], 0)))
        for node, value in zip(nodes, (*values, values[-1][0]), strict=True):
            node.meta["val"] = value
    graph.output(nodes[-1])
    with (
        mock.patch.object(gpus, "capability", lambda device: (9, 0)),
        mock.patch.object(tables, "gpu_name", lambda device: tables.H200),
    ):
        (site,) = rewrite(torch.fx.GraphModule({}, graph), Settings(**settings))
    return site


@pytest.mark.parametrize("name", ["sm90", "triton"])
def test_auto_takes_what_was_timed_and_force_the_others(name):
    """With a mask: the blocks' sizes, which are data."""
    recipe, none = "sage2-8b-rotated", "no known gain: sage2-8b-rotated by block lists"
    for given, expected in (
        (dict(N=65536), (recipe, "by block lists, N >= 65536")),
        (dict(N=65472), (None, f"{none} wins from N=65536")),
        (dict(N=65472, force=True), (recipe, "forced")),
        (dict(dim=64), (None, f"{none} was not measured")),
    ):
        site = on_a_gpu(name, **given)
        assert (site.recipe, site.reason) == expected
        assert site.mask == f"blocks of 64 x 64 + bool[1, 1, 1, {given.get('N', 75648)}]"


def test_an_op_of_another_namespace_is_a_row_alone():
    schema = f"block_sparse_attn_triton{OPS['triton']}"
    library = torch.library.Library("other_kernel", "FRAGMENT")
    library.define(schema)
    library.impl("block_sparse_attn_triton", computes("triton")[0], "CompositeExplicitAutograd")
    op = torch.ops.other_kernel.block_sparse_attn_triton
    torch.library.register_fake("other_kernel::block_sparse_attn_triton", computes("triton")[1])
    _, site = compiled(lambda *args: op(*args)[0], *inputs())
    assert site.reason == (
        "`other_kernel.block_sparse_attn_triton` is another library's kernel for lists of blocks"
    )
