"""Attention ops of other libraries: torch's varlen_attn itself, and stand-ins with the schemas that
flash-attn 2.8 and 3 register, none of which computes anything on a CPU."""

import itertools

import pytest
import torch
from support import op_by_op, run_seen
from torch.nn.attention.varlen import varlen_attn

import sage_inductor
from sage_inductor import patterns
from sage_inductor.choose import families, tables
from sage_inductor.choose.decide import decide
from sage_inductor.ops.attention import tiles
from sage_inductor.ops.call_shape import CallShape
from sage_inductor.ops.reference.exact import attention_exact
from sage_inductor.options import Settings
from sage_inductor.study import measure

LIBRARIES = []  # which unregister an op when they are collected
SCHEMAS = """
flash_attn::_flash_attn_varlen_forward(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float dropout_p, float softmax_scale, bool causal, SymInt window_size_left=-1, SymInt window_size_right=-1, float softcap=0.0, Tensor? alibi_slopes=None, bool return_softmax=False, Tensor? block_table=None) -> (Tensor, Tensor, Tensor, Tensor)
flash_attn::_flash_attn_forward(Tensor q, Tensor k, Tensor v, float dropout_p, float softmax_scale, bool causal) -> (Tensor, Tensor, Tensor, Tensor)
flash_attn::_flash_attn_backward(Tensor q, Tensor k, Tensor v, float dropout_p, float softmax_scale, bool causal) -> (Tensor, Tensor, Tensor, Tensor)
flash_attn_3::_flash_attn_forward(Tensor q, Tensor k, Tensor v, Tensor? k_new=None, Tensor? cu_seqlens_q=None, Tensor? page_table=None) -> (Tensor, Tensor, Tensor, Tensor)
my_vllm_flash_attn3_c0ffee::fwd(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None) -> (Tensor, Tensor, Tensor, Tensor)
other::flash_attn_fwd(Tensor x) -> (Tensor, Tensor, Tensor, Tensor)
"""


@pytest.fixture(scope="module", autouse=True)
def ops():
    def computed(q, *args, **kwargs):
        return torch.empty_like(q), *(q.new_empty(3) for _ in range(3))

    for schema in SCHEMAS.strip().split("\n"):
        namespace, name = schema[: schema.index("(")].split("::")
        library = torch.library.Library(namespace, "FRAGMENT")
        library.define(schema.removeprefix(f"{namespace}::"))
        library.impl(name, computed, "CompositeExplicitAutograd")
        LIBRARIES.append(library)
    library = torch.library.Library("torch_attn", "IMPL")
    library.impl("_varlen_attn", lambda *given: computed(*given)[:3], "CPU")
    LIBRARIES.append(library)


def run_rewritten(function, *inputs, see=None, by=None, **settings) -> tuple:
    """(what the rewritten graph returns, the sites of its calls). by: what decides."""
    found, given = [], Settings(**settings or {"emulate": True})

    def rewrite(gm):
        found.extend(patterns.rewrite(gm, by or (lambda call: decide(call, given))))
        if see is not None:
            see(gm)

    return run_seen(function, *inputs, see=rewrite), found


def sites_of(function, *inputs) -> list:
    return run_rewritten(function, *inputs)[1]


T, H, D = 24, 4, 16
GQA = {"enable_gqa": True} if torch.__version__ >= "2.12" else {}  # torch 2.11's takes any heads
CU = torch.tensor([0, 7, 7, 24], dtype=torch.int32)


def op(name):
    namespace, name = name.split(".")
    return getattr(getattr(torch.ops, namespace), name)


def varlen(q, k, v, cu_k, **given):
    return op("flash_attn._flash_attn_varlen_forward")(
        k=k, q=q, v=v, cu_seqlens_k=cu_k, cu_seqlens_q=CU, max_seqlen_q=17, max_seqlen_k=17,
        **{"dropout_p": 0.0, "softmax_scale": 0.3, "causal": False} | given,
    )  # fmt: skip


PACKED = {  # (the call, its band, its scale)
    "flash-attn": (
        lambda q, k, v, cu: op("flash_attn._flash_attn_varlen_forward")(
            q, k, v, CU, cu, 17, 17, 0.0, 0.3, True), (None, 0), 0.3),
    "by keywords": (varlen, (None, None), 0.3),
    "a window": (lambda *given: varlen(*given, window_size_left=5, window_size_right=2), (5, 2), 0.3),
    "causal by a window": (lambda *given: varlen(*given, window_size_right=0), (None, 0), 0.3),
    "a namespace with a hash": (
        lambda q, k, v, cu: op("my_vllm_flash_attn3_c0ffee.fwd")(q, k, v, CU, cu), (None, None), 0.25),
    "torch": (
        lambda q, k, v, cu: [varlen_attn(q, k, v, CU, cu, 17, 17, **GQA)], (None, None), 0.25),
    "torch, causal": (
        lambda q, k, v, cu: [varlen_attn(q, k, v, CU, cu, 17, 17, window_size=(-1, 0), scale=0.3, **GQA)], (None, 0), 0.3),
    "torch, a window": (
        lambda q, k, v, cu: [varlen_attn(q, k, v, CU, cu, 17, 17, window_size=(4, 0), **GQA)], (4, 0), 0.25),
}  # fmt: skip


@pytest.mark.parametrize("of_k", [CU, torch.tensor([0, 9, 9, 30], dtype=torch.int32)])
@pytest.mark.parametrize("function, band, scale", PACKED.values(), ids=PACKED)
def test_documents_are_attended_one_by_one(function, band, scale, of_k):
    """Of which one is empty; keys as many as queries, or other numbers."""
    q, k, v = torch.randn(T, H, D), *torch.randn(2, int(of_k[-1]), H // 2, D)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    with torch.no_grad():
        out, (site,) = run_rewritten(lambda *given: function(*given)[0] + 0, q, k, v, of_k)
    assert site.recipe == "sage2-8b-rotated" and "packed documents" in site.mask
    assert out.shape == (T, H, D) and out.is_contiguous()
    for (a, b), (c, d) in zip(*map(itertools.pairwise, (CU.tolist(), of_k.tolist())), strict=True):
        if a < b:
            given = (x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d]))
            exact, _ = attention_exact(*given, scale, None, *band, bottom_right=True)
            error = (out[a:b] - exact[0].transpose(0, 1)).abs().mean() / exact.abs().mean()
            assert error < 0.06


@torch.no_grad()
def test_a_window_that_changes_from_call_to_call_is_that_of_numbers():
    """A dynamic int, of which torch's op is also told whether it is causal."""

    def attend(q, *window):
        return varlen_attn(q, q, q, CU, CU, 17, 17, window_size=window)

    q, windows = torch.randn(T, H, D).bfloat16(), [(4, 0), (2, 2), (3, 0), (-1, -1)]
    expected = [run_rewritten(attend, q, *each)[0] for each in windows]
    torch._dynamo.reset()
    with op_by_op():
        run = torch.compile(attend, backend="sage", dynamic=True, options={"sage.emulate": True})
        for each, exactly in zip(windows, expected):
            assert torch.equal(run(q, *each), exactly)
    assert {site.recipe for site in sage_inductor.report()} == {"sage2-8b-rotated"}


def test_calls_share_the_places_of_the_same_documents():
    def function(q, cu):
        x = varlen_attn(q, q, q, CU, CU, 17, 17)
        x = varlen_attn(x, q, q, CU, CU, 17, 17, window_size=(-1, 0))
        return varlen_attn(x, q, q, CU, cu, 17, 17)

    found = []
    with torch.no_grad():
        run_rewritten(function, torch.randn(T, H, D).bfloat16(), CU.clone(), see=found.append)
    made = found[0].graph.find_nodes(op="call_function", target=torch.ops.sage.documents.default)
    assert len(made) == 2 and len(made[0].args) == 2


TRAINS = "packed documents have no 8-bit backward"
CALLS = {
    "numbers of documents that differ": (
        lambda q: varlen(q, q, q, CU[:3]), "flash_attn.flash_attn_varlen_forward",
        "`flash_attn._flash_attn_varlen_forward` is another library's kernel"),
    "dropout": (
        lambda q: varlen(q, q, q, CU, dropout_p=0.1), "flash_attn.flash_attn_varlen_forward",
        "packed attention with dropout_p has no 8-bit kernel"),
    "softcap": (
        lambda q: varlen(q, q, q, CU, softcap=30.0), "flash_attn.flash_attn_varlen_forward",
        "packed attention with softcap has no 8-bit kernel"),
    "slopes": (
        lambda q: varlen(q, q, q, CU, alibi_slopes=torch.ones(H)),
        "flash_attn.flash_attn_varlen_forward", "packed attention with alibi_slopes has"),
    "lse": (
        lambda q: [sum(x.sum() for x in varlen(q, q, q, CU)[:2])],
        "flash_attn.flash_attn_varlen_forward", "the logsumexp or the maxima are used"),
    "pages": (
        lambda q: op("flash_attn._flash_attn_varlen_forward")(
            q, q, q, CU, CU, 17, 17, 0.0, 1.0, True, block_table=CU),
        "flash_attn.flash_attn_varlen_forward", "the keys lie in pages"),
    "dense": (
        lambda q: op("flash_attn._flash_attn_forward")(q[None], q[None], q[None], 0.0, 1.0, True),
        "flash_attn.flash_attn_forward", "`flash_attn._flash_attn_forward` is another library's kernel"),
    "FA3": (
        lambda q: op("flash_attn_3._flash_attn_forward")(q[None], q[None], q[None]),
        "flash_attn_3.flash_attn_forward", "another library's kernel"),
    "FA3, of padded k": (
        lambda q: op("flash_attn_3._flash_attn_forward")(q, q[None], q[None], cu_seqlens_q=CU),
        "flash_attn_3.flash_attn_forward", "another library's kernel"),
    "FA3, pages": (
        lambda q: op("flash_attn_3._flash_attn_forward")(q, q, q, page_table=CU, cu_seqlens_q=CU),
        "flash_attn_3.flash_attn_forward", "the keys lie in pages"),
}  # fmt: skip


@pytest.mark.parametrize("function, spelling, reason", CALLS.values(), ids=CALLS)
def test_a_call_of_another_librarys_op_is_a_row(function, spelling, reason):
    (site,) = sites_of(lambda q: function(q)[0] + 1, torch.randn(T, H, D))
    assert site.spelling == spelling and reason in site.reason and site.q[-1] == D
    assert site.dtype == "float32" and not site.rewritten


def test_an_op_with_other_arguments_and_a_backward_are_no_rows():
    x = torch.randn(T, H, D)
    assert not sites_of(lambda x: op("other.flash_attn_fwd")(x)[0], x)
    assert not sites_of(
        lambda x: op("flash_attn._flash_attn_backward")(x, x, x, 0.0, 1.0, True)[0], x
    )


def decided(gm, settings: Settings) -> list:
    """The sites of a graph, which stays."""
    return patterns.rewrite(gm, lambda call: decide(call, settings), put=lambda *given: None)


WIN = "packed documents in 8 bits win from a mean of 2048 tokens on"


@pytest.mark.parametrize("given, reason", [
    (dict(), f"no known gain: {WIN}; here 6143 tokens in 3"),
    (dict(T=6144), None),
    (dict(T=6144, S=4), f"no known gain: {WIN}; here 6144 tokens in 4"),
    (dict(T_k=6143), f"no known gain: {WIN}; here 6144 tokens in 3"),
    (dict(T=6144, window_size=(-1, 0)), None),
    (dict(T=6144, window_size=(64, 0)), "were measured on an H200 alone, up to head_dim 128, without a window"),
    (dict(T=6144, D=256), "were measured on an H200 alone"),
    (dict(T=6144, gpu="NVIDIA A100"), "were measured on an H200 alone"),
    (dict(T=6144, hopper="lost"), "were measured on an H200 alone"),
    (dict(T=18432, flash="FA3"), "are computed about as fast by FA3"),
    (dict(T=18432, D=128, flash="FA3", window_size=(-1, 0)), "are computed about as fast by FA3"),
    (dict(T=18431, D=128, flash="FA3"), "win from a mean of 6144 tokens on; here 18431 tokens in 3"),
    (dict(T=18432, D=128, flash="FA3"), None),
    (dict(T=18432, D=128, flash="FA4"), "are computed about as fast by FA4"),
    (dict(T=6144, op="my_vllm_flash_attn3_c0ffee.fwd"), "are computed about as fast by my_vllm_flash_attn3_c0ffee.fwd"),
    (dict(T=6144, op="flash_attn._flash_attn_varlen_forward", flash="FA3"), None),
    (dict(T=24, force=True), None),
])  # fmt: skip
def test_auto_takes_documents_from_the_mean_length_that_gained(given, reason, monkeypatch):
    given = {
        "T": 6143,
        "S": 3,
        "D": 64,
        "gpu": tables.H200,
        "hopper": None,
        "flash": "torch",
    } | given
    monkeypatch.setattr(CallShape, "capability", (9, 0))
    monkeypatch.setattr(tables, "gpu_name", lambda device: given["gpu"])
    monkeypatch.setattr(tiles, "hopper_unavailable", lambda capability: given["hopper"])
    monkeypatch.setattr(families, "flash_attention", lambda: given["flash"])
    T_q = 6144 if "T_k" in given else given["T"]
    q, k = (
        torch.empty(T, 2, given["D"], dtype=torch.bfloat16) for T in (T_q, given.get("T_k", T_q))
    )
    cu = torch.zeros(given["S"] + 1, dtype=torch.int32)

    def function(q, k):
        if given.get("op", "").startswith("flash"):
            return op(given["op"])(q, k, k, cu, cu, 9, 9, 0.0, 0.3, True)[0]
        if "op" in given:
            return op(given["op"])(q, k, k, cu, cu)[0]
        return varlen_attn(q, k, k, cu, cu, 9, 9, window_size=given.get("window_size", (-1, -1)))

    found, settings = [], Settings(calibrate=False, force=given.get("force", False))
    with torch.no_grad():
        run_seen(function, q, k, see=lambda gm: found.extend(decided(gm, settings)))
    (site,) = found
    assert (reason or "") in str(site.reason)
    assert site.recipe == (None if reason else "sage2-8b-rotated")


def test_one_guard_says_whether_documents_are_long_enough(monkeypatch):
    """With T and S dynamic there are two graphs, one on each side."""
    monkeypatch.setattr(CallShape, "capability", (9, 0))
    monkeypatch.setattr(tables, "gpu_name", lambda device: tables.H200)
    monkeypatch.setattr(tiles, "hopper_unavailable", lambda capability: None)
    recipes = []

    def backend(gm, inputs):
        with torch.no_grad():
            recipes.extend(site.recipe for site in decided(gm, Settings()))
        return gm.forward

    @torch.compile(backend=backend, dynamic=True)
    def function(q, cu):
        return varlen_attn(q, q, q, cu, cu, 9, 9)

    with torch.no_grad():
        for T, S in ((4000, 2), (2100, 3), (4200, 2), (5000, 2), (8192, 4), (9000, 8)):
            function(torch.empty(T, 2, 64, dtype=torch.bfloat16), torch.zeros(S + 1).int())
    assert recipes == [None, "sage2-8b-rotated"]


def test_packages_for_a_cpu_hold_no_documents():
    q = torch.randn(T, H, D, dtype=torch.bfloat16)
    with torch.no_grad():
        _, (site,) = run_rewritten(
            lambda q: varlen_attn(q, q, q, CU, CU, 17, 17), q, emulate=True, portable=True
        )
    assert site.reason == "no kernel for packed documents in a package for a CPU"


@pytest.mark.parametrize("inside", [False, True])
def test_what_autocast_would_cast_stays(inside):
    def function(q):
        with torch.autocast("cpu", torch.bfloat16, enabled=True):
            return varlen_attn(q, q, q, CU, CU, 17, 17)

    q = torch.randn(T, H, D, dtype=torch.float16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        (site,) = sites_of(
            function if inside else lambda q: varlen_attn(q, q, q, CU, CU, 17, 17), q
        )
    assert "float16" in site.reason and "got bfloat16" in site.reason


def test_diagnose_measures_no_documents():
    q = torch.randn(T, H, D, dtype=torch.bfloat16)
    with torch.no_grad():
        _, (site,) = run_rewritten(
            lambda q: varlen_attn(q, q, q, CU, CU, 17, 17), q, by=measure._measurable
        )
    assert site.reason == "was not run: diagnose knows no exact attention of packed documents"


def test_documents_that_train_stay():
    q = torch.randn(T, H, D, dtype=torch.bfloat16, requires_grad=True)
    (site,) = sites_of(lambda q: varlen_attn(q, q, q, CU, CU, 17, 17), q)
    assert site.reason == TRAINS


def test_the_numbers_of_documents_must_be_alike():
    with pytest.raises(
        ValueError, match=r"cu_k must be \[4\] of integers, got \[3\] of torch.int32"
    ):
        torch.ops.sage.documents(CU, T, CU[1:], T)
    with pytest.raises(ValueError, match=r"seqused_k must be \[3\] of integers, got \[4\]"):
        torch.ops.sage.documents(CU, T, CU, T, CU)


class Varlen(torch.nn.Module):
    def forward(self, q, cu):
        return varlen_attn(q, q + 1, q, cu, cu, 4096, 4096, window_size=(-1, 0))


@pytest.mark.gpu
@torch.no_grad()
def test_a_package_of_documents_runs_at_other_lengths(tmp_path, one_libstdcxx):
    """And other numbers of them."""

    def given(lengths):
        q = torch.randn(sum(lengths), 4, 64, device="cuda", dtype=torch.bfloat16)
        return q, torch.tensor([0, *itertools.accumulate(lengths)], device="cuda").int()

    T, S = (torch.export.Dim(name, min=2, max=8192) for name in "TS")
    program = torch.export.export(Varlen(), given([700, 800, 500]), dynamic_shapes=({0: T}, {0: S}))
    path = sage_inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "model.pt2"), options={"sage.force": True}
    )
    (site,) = sage_inductor.report()
    assert site.recipe == "sage2-8b-rotated"
    package = torch._inductor.aoti_load_package(path)
    for lengths in ([700, 800, 500], [1], [64, 1, 3000, 129]):
        q, cu = given(lengths)
        out, exact = package(q, cu), Varlen()(q, cu)
        assert (out - exact).abs().mean() < 0.06 * exact.abs().mean()
