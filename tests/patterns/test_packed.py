"""Attention ops of other libraries: torch's varlen_attn itself, and stand-ins with the schemas that
flash-attn 2.8 and 3 register. None is run: a GPU would be needed."""

import pytest
import torch
from support import run_seen
from torch.nn.attention.varlen import varlen_attn

import sage_inductor
from sage_inductor import config, patterns
from sage_inductor.choose.decide import decide
from sage_inductor.options import Settings

LIBRARIES = []  # which unregister an op when they are collected
SCHEMAS = """
flash_attn::_flash_attn_varlen_forward(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float dropout_p, float softmax_scale, bool causal, SymInt window_size_left=-1, SymInt window_size_right=-1, float softcap=0.0, Tensor? alibi_slopes=None, bool return_softmax=False, Tensor? block_table=None) -> (Tensor, Tensor, Tensor, Tensor)
flash_attn::_flash_attn_forward(Tensor q, Tensor k, Tensor v, float dropout_p, float softmax_scale, bool causal) -> (Tensor, Tensor, Tensor, Tensor)
flash_attn::_flash_attn_backward(Tensor q, Tensor k, Tensor v, float dropout_p, float softmax_scale, bool causal) -> (Tensor, Tensor, Tensor, Tensor)
flash_attn_3::_flash_attn_forward(Tensor q, Tensor k, Tensor v, Tensor? k_new=None, Tensor? cu_seqlens_q=None, Tensor? page_table=None) -> (Tensor, Tensor, Tensor, Tensor)
my_vllm_flash_attn3_c0ffee::fwd(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q=None) -> (Tensor, Tensor, Tensor, Tensor)
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


def sites_of(function, *inputs) -> list:
    found = []

    def see(gm):
        found.extend(patterns.rewrite(gm, lambda call: decide(call, Settings(emulate=True))))

    run_seen(function, *inputs, see=see)
    return found


T, H, D = 24, 4, 16
CU = torch.tensor([0, 7, 7, 24], dtype=torch.int32)


def op(name):
    namespace, name = name.split(".")
    return getattr(getattr(torch.ops, namespace), name)


PACKED = "packed sequences have no 8-bit kernel: 24 tokens in 3 documents"
CALLS = {
    "flash-attn": (
        lambda q: op("flash_attn._flash_attn_varlen_forward")(q, q, q, CU, CU, 17, 17, 0.0, 1.0, True),
        "flash_attn.flash_attn_varlen_forward", PACKED),
    "by keywords": (
        lambda q: op("flash_attn._flash_attn_varlen_forward")(
            k=q, q=q[:, :2], v=q, cu_seqlens_k=CU, cu_seqlens_q=CU[:3], max_seqlen_q=9, max_seqlen_k=9,
            dropout_p=0.0, softmax_scale=1.0, causal=False),
        "flash_attn.flash_attn_varlen_forward", "24 tokens in 2 documents"),
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
    "a namespace with a hash": (
        lambda q: op("my_vllm_flash_attn3_c0ffee.fwd")(q, q, q, CU),
        "my_vllm_flash_attn3_c0ffee.fwd", PACKED),
    "FA3, packed": (
        lambda q: op("flash_attn_3._flash_attn_forward")(q, q, q, cu_seqlens_q=CU),
        "flash_attn_3.flash_attn_forward", PACKED),
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


@pytest.mark.parametrize("window", [(-1, 0), (8, 0), (-1, -1)])
def test_torchs_varlen_attn_is_a_row_of_the_report(window):
    """The graph is compiled; torch has no kernel on a CPU to run it by."""

    def packed(q, cu):
        return varlen_attn(q, q, q, cu, cu, 17, 17, window_size=window)

    compiled = torch.compile(packed, backend="sage", fullgraph=True)
    with config.patch(emulate=True), pytest.raises(NotImplementedError, match="CPU"):
        compiled(torch.randn(T, H, D, dtype=torch.bfloat16), CU)
    (site,) = sage_inductor.report()
    assert site.spelling == "torch_attn.varlen_attn" and site.reason == PACKED
    assert "a long one gains as a call of" in str(sage_inductor.report())
