"""Hand-written softmax attention, found and written as SDPA; what is not taken, and why.

Update the golden graphs with EXPECTTEST_ACCEPT=1.
"""

import functools
import itertools
import math
import os
import random
import re

import models
import numpy as np
import pytest
import support
import torch
import torch.nn.functional as F
from expecttest import TestCase
from pairs import chosen, has_every_variant
from support import calls, every, run_seen, written
from torch import nn

import sage_inductor
from sage_inductor import SageRefused, patterns
from sage_inductor.choose.decide import Settings
from sage_inductor.choose.decide import decide as decide_call
from sage_inductor.ops.lse import compose_with_sink
from sage_inductor.ops.visibility import FULL
from sage_inductor.patterns.graph import GraphIndex, value_of
from sage_inductor.patterns.softmax.build import find

os.environ["HF_HUB_OFFLINE"] = "1"


def lse_of(q, k, attn_mask, is_causal, scale):
    """As ``sage::lse``, in q's dtype."""
    s = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
    if attn_mask is not None:
        hides = attn_mask.dtype == torch.bool
        s = s.masked_fill(~attn_mask, -math.inf) if hides else s + attn_mask
    return s.logsumexp(-1)


def canonicalise(gm: torch.fx.GraphModule) -> tuple[list, list[str]]:
    """Every attention found becomes F.scaled_dot_product_attention; (calls taken, reasons)."""
    taken, reasons, index = [], [], GraphIndex(gm.graph)
    for node in list(gm.graph.nodes):
        before = written(gm.graph)
        if call := find(node, index):
            index = GraphIndex(gm.graph)
        if call is None or call.refused:
            if call:
                call.emit.undo()
                reasons.append(str(call.refused))
            assert written(gm.graph) == before
            continue
        target, lse, weighed = F.scaled_dot_product_attention, lse_of, compose_with_sink
        if call.emit.key == "val":  # an exported graph holds nothing but operators
            target = torch.ops.aten.scaled_dot_product_attention.default
            lse, weighed = torch.ops.sage.lse.default, torch.ops.sage.with_sink.default
        assert call.band == FULL  # bands are for who proves masks
        mask = {} if call.attn_mask is None else {"attn_mask": call.attn_mask}
        gqa = {"enable_gqa": True} if call.enable_gqa else {}
        new = call.emit(target, call.q, call.k, call.v, **mask, scale=call.scale, **gqa)
        if call.sink is not None:
            lse = call.emit(lse, call.q, call.k, call.attn_mask, False, call.scale)
            new = call.emit(weighed, new, lse, call.sink)
        assert value_of(new).shape == call.out.shape and value_of(new).dtype == call.out.dtype
        result = call.finish(new)
        assert value_of(result).shape == value_of(call.node).shape
        call.node.replace_all_uses_with(result)
        for dead in (call.node, *call.dead):
            if not dead.users:
                gm.graph.erase_node(dead)
        taken.append(call)
    gm.graph.lint()
    gm.recompile()
    return taken, reasons


def capture(function, *inputs, dynamic=None, **kwargs):
    """Run `function` compiled with the canonicalised graph: (its calls, taken, reasons, its result)."""
    found = []

    def see(gm):
        known = set(gm.graph.nodes)
        found.extend(canonicalise(gm))
        found.append(calls(gm.graph, known))

    result = run_seen(function, *inputs, see=see, kwargs=kwargs, dynamic=dynamic)
    taken, reasons, golden = found
    return golden, taken, reasons, result


def random_qkv(**sizes):
    return support.random_qkv(**{**dict(N=8, D=16, dtype=torch.float64), **sizes})


def check(function, *inputs, number=1, **options):
    """All of the attention of `function` is taken, and the result is eager's; the calls."""
    expected = function(*inputs)
    golden, taken, reasons, actual = capture(function, *inputs, **options)
    assert len(taken) == number and not reasons, reasons
    atol = 1e-6 if function is transformers_t5 else 1e-12  # eager rounds to float32 within
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)
    return golden


MASK = torch.ones(8, 8, dtype=torch.bool).tril()
PADDING = torch.arange(8) < torch.tensor([8, 5])[:, None, None, None]  # [2, 1, 1, 8]
LOW, LOW_32 = (torch.finfo(dtype).min for dtype in (torch.float64, torch.float32))
BIAS = torch.rand(1, 4, 8, 8, dtype=torch.float64)
ALIBI = torch.rand(8, 1, 8, dtype=torch.float64)


# -- the spellings ----


def textbook(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1) @ v


def of_llama(q, k, v):
    """Its scores, with a mask, and v."""
    k, v = (x[:, :2] for x in (k, v))
    k, v = (x[:, :, None, :, :].expand(2, 2, 2, 8, 16).reshape(2, 4, 8, 16) for x in (k, v))
    mask = torch.where(MASK, 0.0, torch.finfo(torch.float32).min).to(q.dtype)[None, None]
    return torch.matmul(q, k.transpose(2, 3)) * 0.25 + mask, v


def transformers_llama(q, k, v):
    """Also BERT (no mask here) and ViT; Whisper scales q."""
    weights, v = of_llama(q, k, v)
    weights = F.softmax(weights, dim=-1, dtype=torch.float64).to(q.dtype)
    weights = F.dropout(weights, p=0.0, training=False)
    return torch.matmul(weights, v).transpose(1, 2).contiguous()


def transformers_gpt2(q, k, v):
    s = torch.matmul(q, k.transpose(-1, -2))
    s = s / torch.full([], v.size(-1) ** 0.5, dtype=s.dtype, device=s.device)
    low = torch.full([], torch.finfo(s.dtype).min, dtype=s.dtype, device=s.device)
    s = torch.where(MASK[None, None], s.to(s.dtype), low)
    p = nn.Dropout(0.1).eval()(F.softmax(s, dim=-1).type(v.dtype))
    return torch.matmul(p, v).transpose(1, 2)


def transformers_t5(q, k, v):
    s = torch.matmul(q, k.transpose(3, 2))
    s += BIAS
    p = F.softmax(s.float(), dim=-1).type_as(s)
    return torch.matmul(F.dropout(p, p=0.1, training=False), v)


def transformers_bloom(q, k, v):
    q3, k3, v3 = (x.reshape(8, 8, 16) for x in (q, k, v))
    s = ALIBI.baddbmm(batch1=q3, batch2=k3.transpose(-1, -2), beta=1.0, alpha=0.25)
    s = torch.masked_fill(s.view(2, 4, 8, 8), PADDING.logical_not(), LOW)
    p = F.softmax(s, dim=-1)
    return torch.bmm(p.view(8, 8, -1), v3).view(2, 4, 8, 16).permute(0, 2, 1, 3)


def transformers_opt(q, k, v):
    q, k, v = (x.reshape(8, 8, 16) for x in (q * 0.25, k, v))
    s = torch.bmm(q, k.transpose(1, 2))
    s = (s.view(2, 4, 8, 8) + BIAS).view(8, 8, 8) + ALIBI
    return torch.bmm(F.softmax(s, dim=-1), v)


def timm_vit(q, k, v):
    q = q * 0.25
    attn = q @ k.transpose(-2, -1)
    attn = attn.softmax(dim=-1)
    attn = nn.Dropout(0.0)(attn)
    return (attn @ v).transpose(1, 2).reshape(2, 8, 64)


def diffusers_processor(q, k, v):
    q, k, v = (x.reshape(8, 8, 16) for x in (q, k, v))
    empty = torch.empty(8, 8, 8, dtype=q.dtype, device=q.device)
    s = torch.baddbmm(empty, q, k.transpose(-1, -2), beta=0, alpha=0.25)
    return torch.bmm(s.softmax(dim=-1).to(q.dtype), v)


def nano_gpt(q, k, v):
    T = q.size(2)
    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    att = att.masked_fill(MASK.long()[None, None, :T, :T] == 0, float("-inf"))
    return F.softmax(att, dim=-1) @ v


def x_transformers(q, k, v):
    dots = torch.einsum("b h i d, b h j d -> b h i j", q, k) * 0.25
    dots = dots.masked_fill(~PADDING, -torch.finfo(dots.dtype).max)
    dots = dots.masked_fill(~MASK, -torch.finfo(dots.dtype).max)
    return torch.einsum("b h i j, b h j d -> b h i d", dots.softmax(dim=-1), v)


def einsum_bnhd(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    p = torch.einsum("bqhd,bkhd->bhqk", q, k).mul(0.25).softmax(dim=-1)
    return torch.einsum("bhqk,bkhd->bqhd", p, v)


def einsum_with_queries_before_heads(q, k, v):
    s = torch.einsum("bhid,bhjd->bihj", q, k) + BIAS[0, :1, :, None]
    return torch.einsum("bhjd,bihj->bhid", v, s.softmax(-1))


def three_dimensions(q, k, v):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return torch.bmm(F.softmax(torch.bmm(q, k.mT) / 4 / 2, dim=2), v)


def by_name(*functions) -> dict:
    return {f.__name__: f for f in functions}


SPELLINGS = by_name(
    textbook, transformers_llama, transformers_gpt2, transformers_t5, transformers_bloom,
    transformers_opt, timm_vit, diffusers_processor, nano_gpt, x_transformers, einsum_bnhd,
    einsum_with_queries_before_heads, three_dimensions,
)  # fmt: skip


# -- a learned sink ----

SINKS = torch.rand(4, dtype=torch.float64)


def gpt_oss(q, k, v):
    weights, v = of_llama(q, k, v)
    sinks = SINKS.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
    combined = torch.cat([weights, sinks], dim=-1)
    combined = combined - combined.max(dim=-1, keepdim=True).values
    scores = F.softmax(combined, dim=-1, dtype=combined.dtype)[..., :-1]
    weights = F.dropout(scores, p=0.0, training=False).to(v.dtype)
    return torch.matmul(weights, v).transpose(1, 2).contiguous()


def sink_of_each_query(q, k, v):
    s = torch.concat(((q @ k.mT).masked_fill(~MASK, -math.inf), q[..., 3:4]), 3)
    return s.softmax(-1).narrow(-1, 0, 8) @ v


def sink_in_three_dimensions(q, k, v):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    s = torch.cat([q @ k.mT / 4 + ALIBI, SINKS.repeat(2)[:, None, None].expand(8, 8, 1)], -1)
    return s.softmax(-1)[:, :, :8] @ v


def sink_by_einsum(q, k, v):
    s = torch.einsum("bhid,bhjd->bihj", q, k)
    s = torch.cat([s, SINKS[None, None, :, None].expand(2, 8, 4, 1)], dim=3)
    return torch.einsum("bihj,bhjd->bihd", s.softmax(-1)[:, :, :, :-1], v)


def sink_of_any_length(q, k, v):
    s = torch.cat([q @ k.mT * 0.25, SINKS[:, None, None].expand(*q.shape[:3], 1)], -1)
    return s.softmax(-1)[..., :-1] @ v


WITH_SINK = by_name(gpt_oss, sink_of_each_query, sink_in_three_dimensions, sink_by_einsum)


class TestGoldenGraphs(TestCase):
    def golden(self, functions: dict, expected):
        found = [f"{name}: {check(f, *random_qkv())}" for name, f in functions.items()]
        self.assertExpectedInline("\n".join(found), expected, skip=1)

    def test_every_spelling_becomes_one_call(self):
        self.golden(
            SPELLINGS,
            """\
textbook: scaled_dot_product_attention = scaled_dot_product_attention(l_q_, l_k_, l_v_, scale=0.25)
transformers_llama: scaled_dot_product_attention = scaled_dot_product_attention(l_q_, k, v, attn_mask=mask, scale=0.25, enable_gqa=True)
transformers_gpt2: logical_not_default = logical_not(getitem)
scaled_dot_product_attention = scaled_dot_product_attention(l_q_, l_k_, l_v_, attn_mask=masked_fill(zeros_like(logical_not_default, dtype=torch.float64), logical_not_default, -1e+30), scale=0.25)
transformers_t5: scaled_dot_product_attention = scaled_dot_product_attention(l_q_, l_k_, l_v_, attn_mask=g_bias_, scale=1.0)
transformers_bloom: scaled_dot_product_attention = scaled_dot_product_attention(unflatten(q3, 0, [2, 4]), unflatten(k3, 0, [2, 4]), unflatten(v3, 0, [2, 4]), attn_mask=masked_fill(unflatten(g_alibi_, 0, [2, 4]), logical_not, -1e+30), scale=0.25)
transformers_opt: scaled_dot_product_attention = scaled_dot_product_attention(unflatten(q, 0, [2, 4]), unflatten(k, 0, [2, 4]), unflatten(v, 0, [2, 4]), attn_mask=add(g_bias_, unflatten(g_alibi_, 0, [2, 4])), scale=1.0)
timm_vit: scaled_dot_product_attention = scaled_dot_product_attention(q, l_k_, l_v_, scale=1.0)
diffusers_processor: scaled_dot_product_attention = scaled_dot_product_attention(unsqueeze(q, 0), unsqueeze(k, 0), unsqueeze(v, 0), scale=0.25)
nano_gpt: scaled_dot_product_attention = scaled_dot_product_attention(l_q_, l_k_, l_v_, attn_mask=logical_not(eq), scale=0.25)
x_transformers: logical_or_default = logical_or(invert, invert_1)
scaled_dot_product_attention = scaled_dot_product_attention(l_q_, l_k_, l_v_, attn_mask=masked_fill(zeros_like(logical_or_default, dtype=torch.float64), logical_or_default, -1e+30), scale=0.25)
einsum_bnhd: scaled_dot_product_attention = scaled_dot_product_attention(permute(q, [0, 2, 1, 3]), permute(k, [0, 2, 1, 3]), permute(v, [0, 2, 1, 3]), scale=0.25)
einsum_with_queries_before_heads: scaled_dot_product_attention = scaled_dot_product_attention(l_q_, l_k_, l_v_, attn_mask=permute(getitem, [0, 2, 1, 3]), scale=1.0)
three_dimensions: scaled_dot_product_attention = scaled_dot_product_attention(unsqueeze(q, 0), unsqueeze(k, 0), unsqueeze(v, 0), scale=0.125)""",
        )

    def test_a_sink_takes_its_weight_from_the_output(self):
        self.golden(
            WITH_SINK,
            """\
gpt_oss: scaled_dot_product_attention = scaled_dot_product_attention(l_q_, k, v, attn_mask=mask, scale=0.25, enable_gqa=True)
sink_of_each_query: scaled_dot_product_attention = scaled_dot_product_attention(l_q_, l_k_, l_v_, attn_mask=g_mask_, scale=1.0)
sink_in_three_dimensions: unsqueeze_default = unsqueeze(q, 0)
unsqueeze_default_1 = unsqueeze(k, 0)
scaled_dot_product_attention = scaled_dot_product_attention(unsqueeze_default, unsqueeze_default_1, unsqueeze(v, 0), attn_mask=g_alibi_, scale=0.25)
sink_by_einsum: scaled_dot_product_attention = scaled_dot_product_attention(l_q_, l_k_, l_v_, scale=1.0)""",
        )


def check_close(functions, found, expected, **given) -> None:
    """Of each function what it returned."""
    for name, x, y in zip(functions, found, expected, strict=True):
        torch.testing.assert_close(x, y, **given, msg=lambda text, name=name: f"{name}: {text}")


def check_all(functions, **given) -> None:
    """All are found in one graph, which computes what they do."""
    inputs = random_qkv()
    _, taken, reasons, actual = capture(every(functions), *inputs)
    assert len(taken) == len(functions) and not reasons, reasons
    check_close(functions, actual, every(functions)(*inputs), **given)


def check_exported(functions, **given) -> torch.fx.GraphModule:
    inputs = random_qkv()
    program = torch.export.export(models.Of(every(functions)), inputs)
    taken, reasons = canonicalise(program.graph_module)
    assert len(taken) == len(functions) and not reasons, reasons
    check_close(functions, program.module()(*inputs), every(functions)(*inputs), **given)
    return program.graph_module


def test_an_exported_program_is_rewritten_with_aten_alone():
    gm = check_exported(SPELLINGS | WITH_SINK | composed(1), rtol=0, atol=1e-6)
    for node in gm.graph.nodes:
        assert node.op != "call_function" or isinstance(node.target, torch._ops.OpOverload)


def test_a_program_opened_into_bmm_and_views_is_attention_still():
    inputs = random_qkv()
    program = torch.export.export(models.Of(nano_gpt), tuple(inputs)).run_decompositions()
    taken, reasons = canonicalise(program.graph_module)
    assert len(taken) == 1 and not reasons
    torch.testing.assert_close(program.module()(*inputs), nano_gpt(*inputs))


def test_gradients_pass_through_the_attention_that_was_found():
    functions = SPELLINGS | WITH_SINK | composed(1)
    inputs = [x.requires_grad_() for x in random_qkv()]
    _, taken, reasons, actual = capture(every(functions), *inputs)
    assert len(taken) == len(functions), reasons
    cotangents = [torch.randn_like(out) for out in actual]
    found, expected = (
        [torch.autograd.grad(out, inputs, x) for out, x in zip(outs, cotangents)]
        for outs in (actual, every(functions)(*inputs))
    )
    check_close(functions, found, expected, rtol=0, atol=1e-5)


def heads_repeated(q, k, v):
    B, H, N, D = k.shape
    k, v = (x[:, :, None].expand(B, H, 2, N, D).reshape(B, H * 2, N, D) for x in (k, v))
    return (q @ k.mT / 4).softmax(-1) @ v


def heads_split_off_the_batch(q, k, v):
    B = q.shape[0]
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    s = (q @ k.mT / 4).view(B, 4, 8, 8) + BIAS
    return s.softmax(-1).view(B * 4, 8, 8) @ v


@pytest.mark.parametrize(
    "spelling, dims",
    [(textbook, (0, 2)), (nano_gpt, (0,)), (einsum_bnhd, (0, 2)), (three_dimensions, (0, 2)),
     (sink_of_any_length, (0, 2)), (heads_repeated, (0, 2)), (heads_split_off_the_batch, (0,))],
)  # fmt: skip
def test_dynamic_lengths_and_batches_stay_dynamic(spelling, dims):
    inputs = random_qkv(H_kv=2 if spelling is heads_repeated else 4)
    for d in dims:
        for x in inputs:
            torch._dynamo.mark_dynamic(x, d)
    _, (call,), reasons, actual = capture(spelling, *inputs)
    assert not reasons and call.scale == (0.125 if spelling is three_dimensions else 0.25)
    assert any(isinstance(n, torch.SymInt) for n in call.out.shape)
    assert call.enable_gqa == (spelling is heads_repeated)
    assert not call.enable_gqa or value_of(call.k).shape[1] == 2
    torch.testing.assert_close(actual, spelling(*inputs))


def test_rows_that_a_finite_mask_hides_all_over_stay_the_mean_of_all_values():
    hidden = torch.zeros(8, 8, dtype=torch.bool)
    hidden[3] = True
    of_fp16 = torch.float16, torch.finfo(torch.float16).min
    for dtype, low in ((torch.float32, -1e9), (torch.float64, -1e9), (torch.float64, LOW), of_fp16):

        def masked(q, k, v, low=low):
            return (q @ k.mT).masked_fill(hidden, low).softmax(-1) @ v

        q, k, v = random_qkv(dtype=dtype)
        _, taken, _, actual = capture(masked, q, k, v)
        assert len(taken) == 1
        given = {"atol": 4e-3, "rtol": 1e-2} if dtype == torch.float16 else {}
        torch.testing.assert_close(actual, masked(q, k, v), **given)
        torch.testing.assert_close(actual[:, :, 3], v.mean(2), **given)


def test_a_finite_mask_takes_the_place_of_what_was_added_before():
    hidden = torch.zeros(8, 8, dtype=torch.float64).masked_fill(~MASK, -math.inf)
    padding = torch.arange(8) < 3
    check(scored(lambda s: (s + hidden).masked_fill(padding, -1e9)), *random_qkv())
    check(scored(lambda s: s.masked_fill(padding, -1e9) + hidden), *random_qkv())
    low, half = torch.finfo(torch.float16).min, BIAS.half()  # which has no number that hides more
    function = scored(lambda s: (s + half).masked_fill(padding, low))
    _, taken, _, actual = capture(function, *(inputs := random_qkv(dtype=torch.float16)))
    assert len(taken) == 1
    torch.testing.assert_close(actual, function(*inputs), atol=4e-3, rtol=1e-2)


def test_another_librarys_softmax_is_none_of_torchs():
    @torch.library.custom_op("sage_test::softmax", mutates_args=())
    def softmax(x: torch.Tensor, dim: int) -> torch.Tensor:
        return x.exp() / (x.exp().sum(dim, True) + 1)

    softmax.register_fake(lambda x, dim: torch.empty_like(x))
    attend = lambda q, k, v: torch.ops.sage_test.softmax(q @ k.mT, -1) @ v  # noqa: E731
    _, taken, reasons, _ = capture(attend, *random_qkv())
    assert not taken and not reasons


def test_half_precision_scores_in_float32():
    def mixed(q, k, v):
        s = (q @ k.mT).float().masked_fill(~MASK, torch.finfo(torch.float32).min)
        return F.softmax(s, -1).to(q.dtype) @ v

    def in_autocast(q, k, v):  # which casts the weights
        with torch.autocast("cpu", q.dtype):
            return ((q @ k.mT) + MASK.float().log()).softmax(-1) @ v

    for dtype in (torch.bfloat16, torch.float16):
        for function in (mixed, in_autocast):
            _, (call,), _, actual = capture(function, *random_qkv(dtype=dtype))
            assert {value_of(x).dtype for x in (call.q, call.k, call.v, actual)} == {dtype}
            assert value_of(call.attn_mask).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_q_and_k_cast_to_float32_for_the_scores(dtype):
    """GPT-J and GPT-Neo in transformers."""

    def of_scores(s, v):
        return torch.matmul((s / 4).masked_fill(~MASK, LOW_32).softmax(-1).to(v.dtype), v)

    def wide(q, k, v):
        q, k = (x.transpose(1, 2).to(torch.float32).transpose(1, 2) for x in (q, k))
        return of_scores(torch.matmul(q, k.transpose(-1, -2)), v)

    def scaled(q, k, v):  # by numbers that v's dtype does not hold
        return of_scores(torch.matmul(q.float() * 0.3, k.float().mT), v)

    inputs = random_qkv(dtype=dtype)
    _, (call,), _, actual = capture(wide, *inputs)
    assert [value_of(x).dtype for x in (call.q, call.k, call.v)] == [dtype] * 3
    torch.testing.assert_close(actual, wide(*inputs), rtol=0, atol=2e-2)
    _, taken, (reason,), _ = capture(scaled, *inputs)
    assert not taken and "q, k and v must have one dtype" in str(reason)


def test_attention_returns_the_strides_the_second_product_had_in_any_order():
    def rotated(q, k, v):
        return torch.einsum("bhij,bhjd->ibhd", (q @ k.mT).softmax(-1), v)

    inputs = random_qkv(N=6, N_kv=8)
    _, (call,), _, _ = capture(einsum_bnhd, *inputs)
    assert call.out.shape == (2, 4, 6, 16)
    assert call.out.stride() == einsum_bnhd(*inputs).transpose(1, 2).stride()
    check(rotated, *random_qkv())


# -- grouped heads ----


REPEATED = {  # of 2 heads 2 * G, and whether G of q's in a row share one then
    "interleaved": (lambda x, G: x.repeat_interleave(G, dim=1), True),
    "unsqueezed": (lambda x, G: x.unsqueeze(2).expand(-1, -1, G, -1, -1).flatten(1, 2), True),
    "indexed": (lambda x, G: x[:, :, None, :, :].expand(2, 2, G, 8, 16).reshape(2, 2 * G, 8, 16).contiguous(), True),
    "tiled": (lambda x, G: x.repeat(1, G, 1, 1), False),
    "tiled by expansion": (lambda x, G: x.unsqueeze(1).expand(2, G, 2, 8, 16).reshape(2, 2 * G, 8, 16), False),
    "along the sequence": (lambda x, G: x[:, :, :, None].expand(2, 2, 8, G, 16).reshape(2, 2 * G, 8, 16), False),
    "interleaved along the sequence": (lambda x, G: x.repeat(1, G, 1, 1).repeat_interleave(2, dim=2), False),
    "picked by an index": (lambda x, G: x[:, [1, 0], None].expand(2, 2, G, 8, 16).reshape(2, 2 * G, 8, 16), False),
}  # fmt: skip


@pytest.mark.parametrize("G", [2, 3])  # as many as heads of k, where [B, H, G] is as [B, G, H]
@pytest.mark.parametrize("how", REPEATED)
def test_only_heads_repeated_in_a_row_are_grouped(how, G):
    repeat, groups = REPEATED[how]

    def attention(q, k, v):
        return (q @ repeat(k, G).mT).softmax(-1) @ repeat(v, G)

    q, k, v = random_qkv(H=2 * G, H_kv=2)
    _, (call,), _, actual = capture(attention, q, k, v)
    assert call.enable_gqa == groups
    assert value_of(call.k).shape[1] == value_of(call.v).shape[1] == (2 if groups else 2 * G)
    torch.testing.assert_close(actual, attention(q, k, v))


def test_keys_and_values_repeated_unequally_are_not_grouped():
    attention = lambda q, k, v: (q @ k.repeat_interleave(3, dim=1).mT).softmax(-1) @ v  # noqa: E731
    _, (call,), _, _ = capture(attention, *random_qkv(H=6, H_kv=2)[:2], random_qkv(H=6)[2])
    assert not call.enable_gqa


def unsqueezed_and_written(x):
    one = x.unsqueeze(2)
    y = one.expand(-1, -1, 3, -1, -1).flatten(1, 2)
    one[:, :, :, 2:4] = 0
    return y


def interleaved_and_written(x):
    y = x.repeat_interleave(3, dim=1)
    x[:, :, 2:4].zero_()  # through a view
    return y


def unsqueezed_then_written(x):
    y = x[:, :, None].expand(-1, -1, 3, -1, -1).reshape(x.shape[0], -1, *x.shape[2:])
    y[:, 1] += 3
    return y


def interleaved_then_written(x):
    y = x.repeat_interleave(3, dim=1)
    y[:, 1].zero_()
    return y.contiguous()


WRITTEN = unsqueezed_and_written, interleaved_and_written, unsqueezed_then_written


@pytest.mark.parametrize("repeat", [*WRITTEN, interleaved_then_written])
def test_heads_are_not_taken_from_a_cache_that_is_written_later(repeat):
    def attention(q, k, v):
        k, v = repeat(k.clone()), repeat(v.clone())
        return (q @ k.mT).softmax(-1) @ v

    inputs = random_qkv(H=6, H_kv=2)
    _, (call,), _, actual = capture(attention, *inputs)
    assert not call.enable_gqa
    torch.testing.assert_close(actual, attention(*inputs))


def test_a_negated_mask_is_not_taken_from_a_tensor_that_is_written_later():
    def attention(q, k, v, mask):
        hidden = ~mask
        mask.fill_(True)
        return (q @ k.mT).masked_fill(hidden, -math.inf).softmax(-1) @ v

    _, (_,), _, actual = capture(attention, *(inputs := random_qkv()), MASK.clone())
    torch.testing.assert_close(actual, attention(*inputs, MASK.clone()))


# -- what is not taken ----


def scored(between=lambda s: s, after=lambda p: p, dim=-1):
    """Attention with something between its products."""
    return lambda q, k, v: after(between(q @ k.mT).softmax(dim)) @ v


def weights_returned(q, k, v):
    p = (q @ k.mT).softmax(-1)
    return p @ v, p


def scores_returned(q, k, v):
    s = q @ k.mT
    return s.softmax(-1) @ v, s.mean()


def scores_written_beside(q, k, v):
    s = q @ k.mT
    s.view(-1).mul_(2)
    return s.softmax(-1) @ v


def scores_before_a_write_are_used(q, k, v):
    s = q @ k.mT
    twice = s * 2
    s += BIAS
    return s.softmax(-1) @ v + twice.sum()


TRAINED = torch.ones(16, dtype=torch.float64, requires_grad=True)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def function_between(q, k, v):
    s = q @ k.mT
    v = Doubled.apply(v * TRAINED)
    return s.softmax(-1) @ v


def checkpoint_between(q, k, v):
    s = q @ k.mT
    v = torch.utils.checkpoint.checkpoint(torch.sin, v, use_reentrant=False)
    return s.softmax(-1) @ v


def keys_written_between(q, k, v):
    k = k + 1
    s = q @ k.mT
    k.mul_(2)
    return s.softmax(-1) @ v + k.sum()


def scores_added_to_themselves(q, k, v):
    s = q @ k.mT
    return (s + s).softmax(-1) @ v


def weights_squared(q, k, v):
    p = (q @ k.mT).softmax(-1)
    return p @ p


def softmax_over_the_queries(q, k, v):
    return torch.einsum("bhkq,bhkd->bhqd", (k @ q.mT).softmax(-2), v)


ONE = SINKS[:, None, None].expand(2, 4, 8, 1)


def sunk(after=lambda s: s, weights=lambda p: p[..., :-1], of_v=lambda v: v):
    """With a sink, and something wrong."""
    return lambda q, k, v: weights(after(torch.cat([q @ k.mT, ONE], -1)).softmax(-1)) @ of_v(v)


def a_sink_after_the_other(q, k, v):
    s = torch.cat([torch.cat([q @ k.mT, ONE], -1), ONE], -1)
    return s.softmax(-1)[..., :-1][..., :-1] @ v


def sink_of_the_scores(q, k, v):
    s = q @ k.mT
    return torch.cat([s, s[..., :1]], -1).softmax(-1)[..., :-1] @ v


def sink_behind_shifted_scores(q, k, v):
    """The sink's logit is compared with scores that are moved in each row."""
    s = q @ k.mT
    return torch.cat([s - s.amax(-1, True), ONE], -1).softmax(-1)[..., :-1] @ v


def sink_of_the_one_key(q, k, v):
    s = q @ k[:, :, :1].mT
    return torch.cat([s, s], -1).softmax(-1)[..., :-1] @ v[:, :, :1]


def every_other_weight(q, k, v):
    """Of two keys and a sink, as many as there are keys."""
    return torch.cat([q @ k[:, :, :2].mT, ONE], -1).softmax(-1)[..., ::2] @ v[:, :, :2]


def padded(v):
    return F.pad(v, (0, 0, 0, 1), value=1.0)


def first_batch_alone(q, k, v):
    return (q @ k[:1].mT).softmax(-1) @ v


def one_head_of_keys(q, k, v):
    return torch.einsum(
        "bhij,bjd->bhid", torch.einsum("bhid,bjd->bhij", q, k[:, 0]).softmax(-1), v[:, 0]
    )


def two_dimensions(q, k, v):
    q, k, v = (x[0, 0] for x in (q, k, v))
    return (q @ k.mT).softmax(-1) @ v


def heads_split_in_two_ways(q, k, v):
    s = (q @ k.mT).view(8, 8, 8).view(4, 2, 8, 8) + BIAS[0, :, None]
    return s.softmax(-1).view(8, 8, 8).view(2, 4, 8, 8) @ v


def autocast_between(q, k, v):
    s = q @ k.mT
    with torch.autocast("cpu", torch.bfloat16):
        return s.softmax(-1) @ v


def gradient_mode_between(q, k, v):
    s = q @ k.mT
    with torch.no_grad():
        p = s.softmax(-1)
    return p @ v


def scaled_by_what_is_written(shape=(), view=lambda scale: scale):
    def attention(q, k, v):
        scale = torch.full(shape, 2.0, dtype=q.dtype)
        view(scale).mul_(2)
        return (q @ k.mT / scale).softmax(-1) @ v

    return attention


def into_out(q, k, v):
    out = torch.zeros_like(q)
    torch.matmul((q @ k.mT).softmax(-1), v, out=out)
    return out


def weights_into_out(q, k, v):
    s = q @ k.mT
    return torch.softmax(s, -1, out=torch.empty_like(s)) @ v


def output_product(**factors):
    def attention(q, k, v):
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        return torch.baddbmm(v, (q @ k.mT).softmax(-1), v, **factors)

    return attention


def deep_use_of_the_weights(q, k, v):
    p = (q @ k.mT).softmax(-1)
    o = p.sum()
    for _ in range(1200):
        o = o.sin()
    return p @ v + o


SCALE = torch.tensor(0.5, dtype=torch.float64)
REFUSED = {
    "weights returned": (weights_returned, "the weights `p` are also used by `output`"),
    "scores returned": (scores_returned, "the scores `s` are also used by `mean`"),
    "scores written beside": (scores_written_beside, "the scores `s` are also used by `view`"),
    "scores used before a write": (scores_before_a_write_are_used, "the scores `s` are also used by `twice`"),
    "keys written between": (keys_written_between, "`mul_` may write to what it is given, and is between"),
    "a function of autograd between": (function_between, "`autograd_function_apply` may write to what"),
    "a checkpoint between": (checkpoint_between, "may write to what it is given, and is between"),
    "dropout": (scored(after=lambda p: F.dropout(p, 0.1)), "dropout is active"),
    "dropout of the default rate": (scored(after=lambda p: F.dropout(p)), "dropout is active"),
    "dropout in place": (scored(after=lambda p: F.dropout(p, inplace=True)), "dropout is active"),
    "softmax over another dimension": (scored(dim=2), "softmax is over dimension 2 of 4"),
    "sum over the queries": (
        lambda q, k, v: torch.einsum("bhqk,bhqd->bhkd", (q @ k.mT).softmax(-1), v), r"the weights are not \[..., N_q, N_k\] in both"),
    "heads are summed": (
        lambda q, k, v: torch.einsum("bhij,bhjd->bid", (q @ k.mT).softmax(-1), v), r"a product is not \[\*batch, N, D\]"),
    "mask before the scale": (
        lambda q, k, v: ((q @ k.mT + BIAS) * 0.25).softmax(-1) @ v, "a mask is applied before the scale"),
    "negative scale of a mask": (
        scored(lambda s: s.masked_fill(MASK, -math.inf) * -1.0), "a mask is applied before the scale"),
    "own scores": (scores_added_to_themselves, "an operand is computed from the scores"),
    "own weights": (weights_squared, "an operand is computed from the scores"),
    "tensor scale": (scored(lambda s: s * SCALE), "the scores are scaled by a tensor"),
    "zero scale": (scored(lambda s: s * 0), "the scores are scaled by 0.0"),
    "softcap": (scored(lambda s: (s / 50).tanh() * 50), "softcap"),
    "sink before the scores": (
        lambda q, k, v: torch.cat([ONE, q @ k.mT], -1).softmax(-1)[..., 1:] @ v, "concatenated with other logits"),
    "two sinks": (
        lambda q, k, v: torch.cat([q @ k.mT, ONE, ONE], -1).softmax(-1)[..., :-2] @ v, "concatenated with other logits"),
    "a sink after the other": (a_sink_after_the_other, "which is no learned sink"),
    "sink of the scores": (sink_of_the_scores, "the scores `s` are also used by"),
    "sink of the one key": (sink_of_the_one_key, "an operand is computed from the scores"),
    "sink with a value": (sunk(weights=lambda p: p, of_v=padded), "which is no learned sink"),
    "weights of the sink": (sunk(weights=lambda p: p[..., 1:]), "the weights pass through `getitem`"),
    "every other weight": (every_other_weight, "the weights pass through `getitem`"),
    "other weights": (sunk(weights=lambda p: p.narrow(-1, 1, 8)), "the weights pass through `narrow`"),
    "a key dropped with the sink": (
        sunk(weights=lambda p: p[..., :-2], of_v=lambda v: v[:, :, :-1]), "the weights pass through `getitem`"),
    "a column behind the weights": (
        scored(after=lambda p: torch.cat([p, ONE], -1)[..., :-1]), "the weights pass through `cat`"),
    "queries of one key": (
        lambda q, k, v: torch.cat([q @ k[:, :, :1].mT, ONE], 2).softmax(-1) @ v[:, :, :1],
        "concatenated with other logits"),
    "weights by keywords": (
        sunk(weights=lambda p: torch.narrow(input=p, dim=-1, start=0, length=8)), "the weights pass through `narrow`"),
    "scaled sink": (sunk(lambda s: s * 0.25), "a learned sink is scaled or masked"),
    "masked sink": (sunk(lambda s: s + padded(MASK.mT * 1.0).mT), "a learned sink is scaled or masked"),
    "sink behind shifted scores": (
        sink_behind_shifted_scores, "the row maximum is subtracted before a learned sink"),
    "a key dropped": (
        lambda q, k, v: (q @ k.mT).softmax(-1)[..., :-1] @ v[:, :, :-1], "which is no learned sink"),
    "a key dropped before": (
        lambda q, k, v: (q @ k.mT)[..., :-1].softmax(-1) @ v[:, :, :-1], "which is no learned sink"),
    "clamp": (scored(lambda s: s.clamp(-5, 5)), "`clamp` stands between the products"),
    "weak mask": (scored(lambda s: s.masked_fill(MASK, -1e4)), "replaced by -10000.0, which does not hide"),
    "masks of two values": (
        scored(lambda s: s.masked_fill(~MASK, LOW).masked_fill(~PADDING, -1e9)), "hide with different values"),
    "other scores": (scored(lambda s: torch.where(MASK, s, BIAS)), "replaced by a tensor"),
    "head mask": (scored(after=lambda p: p * BIAS), "the weights pass through `mul`"),
    "a mask of whole heads": (
        scored(after=lambda p: p * SINKS.view(1, 4, 1, 1)), "the weights pass through `mul`"),
    "weights capped": (scored(after=lambda p: p.tanh()), "the weights pass through `tanh`"),
    "weights filled": (
        scored(after=lambda p: p.masked_fill(~MASK, 0.0)), "the weights pass through `masked_fill`"),
    "weights of other bits": (
        scored(after=lambda p: p.half().view(torch.bfloat16).double()), "the weights pass through `view`"),
    "heads mixed by einsum": (
        lambda q, k, v: torch.einsum("bhij,hg->bgij", (q @ k.mT).softmax(-1), FAR[:4, :4]) @ v,
        "the weights pass through `einsum`"),
    "heads mixed by matmul": (
        scored(after=lambda p: (FAR[:4, :4] @ p.transpose(1, 2)).transpose(1, 2)),
        "the weights pass through `matmul`"),
    "weights masked": (scored(after=lambda p: p.masked_fill(~MASK, -math.inf)), "the weights pass through `masked_fill`"),
    "weights shifted": (scored(after=lambda p: p + BIAS), "the weights pass through `add`"),
    "weights transposed": (
        lambda q, k, v: (q @ k.mT).softmax(-1).transpose(-1, -2) @ v, r"the weights are not \[..., N_q, N_k\] in both"),
    "on the right": (
        lambda q, k, v: v.mT @ (q @ k.mT).softmax(-1), r"the weights are not \[..., N_q, N_k\] in both"),
    "2 dimensions": (two_dimensions, r"3 or 4 dimensions, got \[2, 2, 2\]"),
    "autocast between": (autocast_between, "`_enter_autocast` changes a mode"),
    "deep use": (deep_use_of_the_weights, "the weights `p` are also used by `o`"),
    "maximum": (scored(lambda s: torch.max(s, SCALE)), "`max` stands between the products"),
    "maximum over the queries": (scored(lambda s: s - s.amax(-2, True)), "are also used by `amax"),
    "place of the maximum": (scored(lambda s: s - s.max(-1, True)[1]), "are also used by `max"),
    "scale that is written": (scaled_by_what_is_written(), "scaled by a tensor"),
    "scale written through a view": (
        scaled_by_what_is_written((1,), lambda scale: scale.view(-1)), "scaled by a tensor"),
    "scale written by another name": (
        scaled_by_what_is_written(view=lambda scale: scale.detach()), "scaled by a tensor"),
    "out=": (into_out, "is given out="),
    "out= of the weights": (weights_into_out, "is given out="),
    "residual in the output product": (output_product(), "the output product adds or scales"),
    "factor of the output product": (output_product(beta=0, alpha=3), "the output product adds or scales"),
    "other bits": (
        scored(lambda s: s.half().view(torch.bfloat16).double()), "the scores are moved by `view`"),
    "gradient mode between": (gradient_mode_between, "`_set_grad_enabled` changes a mode"),
    "softmax over two queries": (
        lambda q, k, v: (q @ k.mT).reshape(2, 4, 4, 16).softmax(-1).reshape(2, 4, 8, 8) @ v,
        "`softmax` is not over the keys of a query"),
    "two dtypes": (
        lambda q, k, v: (q @ k.mT).softmax(-1).float() @ v.float(), "q, k and v must have one dtype"),
    "one of the batches of q": (
        lambda q, k, v: (q[:1, 0] @ k[:, 0].mT).softmax(-1) @ v[:, 0], "a product broadcasts: q .1, 8, 16., k"),
    "broadcast scores": (
        scored(lambda s: s + torch.broadcast_tensors(MASK, s)[1]), "are also used by `broadcast"),
    "scores broadcast twice": (
        lambda q, k, v: (lambda s: s[0].softmax(-1) @ v * s[1].sum())(torch.broadcast_tensors(*[q @ k.mT] * 2)),
        "are also used by"),
}  # fmt: skip


def refusals(cases) -> list[str]:
    """Why each of these is not taken, by one graph; nodes lose their numbers."""
    functions = {case: function for case, (function, _) in cases.items()}
    _, taken, reasons, _ = capture(every(functions), *random_qkv())
    assert not taken and len(reasons) == len(cases), reasons
    return [re.sub(r"_\d+`", "`", reason) for reason in reasons]


DEEP = {"deep use": REFUSED.pop("deep use")}


@pytest.mark.parametrize("cases", [REFUSED, DEEP], ids=["all", "deep use"])
def test_what_is_not_sdpa_stays_and_says_why(cases):
    for (case, (_, reason)), got in zip(cases.items(), refusals(cases), strict=True):
        assert re.search(reason, got), (case, got)


# Each argument of torch's functions between the products that changes what they compute.
ARGUMENTS = {
    "rounding of a scale": scored(lambda s: torch.div(s, 0.5, rounding_mode="floor")),
    "rounding by the method": scored(lambda s: s.div(0.5, rounding_mode="trunc")),
    "rounding in place": scored(lambda s: s.div_(0.5, rounding_mode="floor")),
    "rounding by a synonym": scored(lambda s: torch.divide(s, 0.5, rounding_mode="trunc")),
    "rounding by a tensor": scored(
        lambda s: torch.div(s, torch.full([], 0.5, dtype=s.dtype), rounding_mode="floor")),
    "alpha": scored(lambda s: torch.add(s, BIAS, alpha=3)),
    "alpha of the scores": scored(lambda s: torch.add(BIAS, s, alpha=3)),
    "alpha in place": scored(lambda s: s.add_(BIAS, alpha=3)),
    "alpha of sub": scored(lambda s: torch.sub(s, BIAS, alpha=3)),
    "alpha of the maximum": scored(lambda s: torch.sub(s, s.amax(-1, keepdim=True), alpha=3)),
    "alpha of rsub": scored(lambda s: torch.rsub(s, s.amax(-1, keepdim=True), alpha=2)),
    "beta": output_product(beta=0.5),
    "beta of the scores": lambda q, k, v: torch.baddbmm(
        BIAS.flatten(0, 1)[:1], q.flatten(0, 1), k.flatten(0, 1).mT, beta=0.5
    ).softmax(-1) @ v.flatten(0, 1),
    "alpha of the scores' product": lambda q, k, v: torch.baddbmm(
        BIAS.flatten(0, 1)[:1], q.flatten(0, 1), k.flatten(0, 1).mT, alpha=0.5
    ).softmax(-1) @ v.flatten(0, 1),
    "dimensions of the maximum": scored(lambda s: s - s.amax((1, 3), keepdim=True)),
    "the maximum's dimension kept": scored(lambda s: s - s.max(-1, True)[0]),
    "dim of cat": lambda q, k, v: torch.cat([q @ k.mT, ONE], dim=-1).softmax(-1)[..., :-1] @ v,
    "step of a slice": every_other_weight,
    "where of three": scored(lambda s: torch.where(MASK, other=s, input=s * 2)),
    "value of a fill": scored(lambda s: s.masked_fill(mask=~MASK, value=-math.inf)),
    "softmax by keywords": scored(after=lambda p: torch.softmax(input=p, dim=-1)),
    "p and training": scored(after=lambda p: F.dropout(p, p=0.5, training=False)),
    "inplace": scored(after=lambda p: F.dropout(p, 0.5, False, True)),
}  # fmt: skip


@pytest.mark.parametrize("exported", [False, True])
def test_arguments_that_change_what_is_computed_are_honoured_or_refused(exported):
    inputs, function = random_qkv(), every(ARGUMENTS)
    if exported:
        program = torch.export.export(models.Of(function), inputs)
        canonicalise(program.graph_module)
        found = program.module()(*inputs)
    else:
        found = capture(function, *inputs)[3]
    check_close(ARGUMENTS, found, function(*inputs))


def mvit(q, k, v):
    """A bias that is added to a part of the scores, in place."""
    s = q @ k.mT
    s[:, :, 1:, 1:] = s[:, :, 1:, 1:] + BIAS[..., 1:, 1:]
    return s.softmax(-1) @ v


def slots(q, k, v):
    p = (q @ k.mT).softmax(-2)
    return (p / p.sum(-1, keepdim=True)) @ v


UNREAD = {
    "written by slices": (mvit, "could not be read: `setitem` between"),
    "weights that are normalised again": (slots, "the weights pass through `truediv`"),
    "rolled scores": (scored(lambda s: s.roll(1, -1)), "could not be read: `roll` between"),
    "sorted weights": (scored(after=lambda p: p.flip(-1)), "could not be read: `flip` between"),
    "gathered scores": (
        scored(lambda s: s.gather(-1, torch.zeros(2, 4, 8, 8, dtype=torch.long))), "read: `gather` between"),
    "heads mixed by a convolution": (
        scored(after=lambda p: F.conv2d(p, FAR[:4, :4, None, None])), "read: `conv2d` between"),
    "scores of heads mixed by a linear layer": (
        scored(lambda s: F.linear(s.permute(0, 2, 3, 1), FAR[:4, :4]).permute(0, 3, 1, 2)),
        "read: `linear` between"),
    "weights normalised over the batch": (
        scored(after=lambda p: F.batch_norm(p, None, None, training=True)), "read: `batch_norm` between"),
    "softmax by keywords": (
        lambda q, k, v: torch.softmax(input=(q @ k.mT).roll(1, -1), dim=-1) @ v, "read: `roll` between"),
    "summed scores": (scored(lambda s: s.cumsum(-1)), "read: `cumsum` between"),
    "exp of the logarithm": (
        lambda q, k, v: (q @ k.mT).log_softmax(-1).exp() @ v, "read: `exp`, `log_softmax` between"),
    "exp over its sum": (
        lambda q, k, v: (lambda e: e / e.sum(-1, keepdim=True))((q @ k.mT).exp()) @ v,
        "read: `exp`, `truediv` between"),
    "exp over its sum, not by 0": (
        lambda q, k, v: (lambda e: e / (e.sum(dim=-1).unsqueeze(-1) + 1e-6))((q @ k.mT).exp()) @ v,
        "read: `exp`, `truediv` between"),
    "exp less the logarithm of the sum": (
        lambda q, k, v: (lambda s: s - s.logsumexp(-1, keepdim=True))(q @ k.mT).exp() @ v,
        "read: `exp` between"),
    "one head by mm": (
        lambda q, k, v: torch.mm(torch.mm(q[0, 0], k[0, 0].t()).softmax(-1), v[0, 0]),
        "q, k and v must have 3 or 4 dimensions"),
    "one head by tensordot": (
        lambda q, k, v: torch.tensordot(
            torch.tensordot(q[0, 0], k[0, 0], dims=([-1], [1])).softmax(-1), v[0, 0], 1),
        "q, k and v must have 3 or 4 dimensions"),
    "rolled scores by tensordot": (
        lambda q, k, v: torch.tensordot(
            torch.tensordot(q[0, 0], k[0, 0].T, 1).roll(1, -1).softmax(-1), v[0, 0], 1),
        "read: `roll` between"),
    "two": (scored(lambda s: s.roll(1, -1), lambda p: p.flip(-1)), "`roll`, `flip`"),
}  # fmt: skip


def test_a_softmax_between_two_products_that_is_not_read_says_so():
    for (case, (_, reason)), got in zip(UNREAD.items(), refusals(UNREAD), strict=True):
        assert reason in got, (case, got)


def test_under_strict_a_softmax_between_two_products_that_is_not_read_is_an_error():
    options = {"sage.emulate": True, "sage.strict": True}
    strict = torch.compile(mvit, backend="sage", options=options)
    with pytest.raises(SageRefused, match="could not be read: `setitem` between the products"):
        strict(*random_qkv(dtype=torch.float32))


W = torch.randn(16, 16, dtype=torch.float64)
TABLE = nn.Parameter(torch.randn(16, 8, dtype=torch.float64), requires_grad=False)


clamped = scored(lambda s: s.clamp(-5, 5))  # It stays a softmax between two products.


def pooled(q, k, v):
    """By one trained logit for each position of an attention's output."""
    x = F.linear(clamped(q, k, v).transpose(1, 2).flatten(2), POOL)
    return F.linear(x, POOL[:1]).softmax(1).mT @ x


def soft_argmax(q, k, v):
    """The place of the largest of a trained map of an attention's output."""
    x = clamped(q, k, v).transpose(1, 2).flatten(2)
    heat = F.conv1d(x.mT, POOL[:3, :, None]).softmax(-1)
    return torch.einsum("bcn,n->bc", heat, torch.linspace(-1, 1, 8, dtype=q.dtype))


def experts(q, k, v):
    """Each takes a part of every position, and gives it back."""
    x = clamped(q, k, v).transpose(1, 2).flatten(2)
    logits = F.linear(x, POOL[:5])
    taken = torch.einsum("bne,bnd->bed", logits.softmax(1), x)
    return torch.einsum("bne,bed->bnd", logits.softmax(-1), taken)


POOL = torch.randn(64, 64, dtype=torch.float64)
BEHIND_ATTENTION = (pooled, soft_argmax, experts)


def test_a_softmax_of_what_attention_returns_or_of_something_else_is_not_spoken_of():
    _, taken, reasons, _ = capture(every(NOT_ATTENTION), *random_qkv())
    assert not taken and not reasons
    _, taken, reasons, _ = capture(every(dict(enumerate(BEHIND_ATTENTION))), *random_qkv())
    assert not taken and len(reasons) == len(BEHIND_ATTENTION), reasons
    assert all("`clamp" in reason for reason in reasons), reasons


NOT_ATTENTION = {
    "classifier": lambda q, k, v: F.linear(q, W).softmax(-1),
    "router": lambda q, k, v: (q @ W).softmax(-1).topk(2)[0] @ W[:2],
    "codebook of rows": lambda q, k, v: (q[0, 0] @ TABLE).softmax(-1) @ TABLE.t(),
    "codebook by mm": lambda q, k, v: torch.mm(torch.mm(q[0, 0], TABLE).softmax(-1), TABLE.t()),
    "contrast in logarithms": lambda q, k, v: F.nll_loss(
        (q[0, 0] @ k[0, 0].mT).log_softmax(-1), torch.arange(8)
    ),
    "a number's": lambda q, k, v: q.sum().softmax(0) * v,
    "odds": lambda q, k, v: q.exp() / q.exp().sum(-1, keepdim=True) * v,
    "gate": lambda q, k, v: F.softmax(F.linear(q, W), -1) @ W,
    "contrast": lambda q, k, v: (q @ k.mT).softmax(-1),
    "mixture": lambda q, k, v: BIAS.softmax(-1) @ v,
    "another layer's": lambda q, k, v: (
        F.linear((q @ k.mT)[..., :16] @ W[:8], W).softmax(-1) @ W @ v.mT
    ),
}


# -- every combination of spellings ----


def swin(q, k, v):
    """Two windows of an image: a mask for each, the same for all heads."""
    s = (q @ k.mT).view(1, 2, 4, 8, 8) + torch.stack([-100 * ~MASK, BIAS[0, 0]])[:, None]
    return s.view(-1, 4, 8, 8).softmax(-1) @ v


def vit_det(q, k, v):
    """A bias of the rows of an image and one of its columns, for queries of 2 x 4 and such keys."""
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    rows, columns = q.unflatten(1, (2, 4)) @ FAR[:2].mT, q.unflatten(1, (2, 4)) @ FAR[2:].mT
    s = (q * 0.25 @ k.mT).view(8, 2, 4, 2, 4) + rows[..., None] + columns[..., None, :]
    return (s.view(8, 8, 8).softmax(-1) @ v).view(2, 4, 8, 16)


FAR = torch.randn(6, 16, dtype=torch.float64)


def sagan(q, k, v):
    """Channels before positions; each query's weights are a column of the second product."""
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return torch.bmm(v.mT, torch.bmm(q, k.mT).softmax(-1).permute(0, 2, 1))


def channels_first(q, k, v):
    return v.mT @ (k @ q.mT * 0.25 + BIAS.mT).softmax(-2)


def keys_first(q, k, v):
    s = (k @ q.mT).masked_fill(~MASK.mT, -math.inf).transpose(2, 3)
    return s.softmax(3) @ v


def einsums(scores, values):
    return lambda q, k, v: torch.einsum(*values(torch.einsum(*scores(q, k)).softmax(-1), v))


TAKEN = {
    # A shape is read of the scores, no number.
    "expand_as": scored(lambda s: s.masked_fill(~MASK.expand_as(s), -math.inf)),
    "view_as": scored(lambda s: s + torch.cat([BIAS, BIAS]).flatten(0, 1).view_as(s)),
    "reshape_as": scored(lambda s: s + torch.cat([BIAS, BIAS]).flatten().reshape_as(s)),
    "broadcast_tensors": scored(
        lambda s: s.masked_fill(~torch.broadcast_tensors(MASK, s)[0], -math.inf)),
    "both broadcast": scored(
        lambda s: (lambda mask, s: s.masked_fill(~mask, -math.inf))(*torch.broadcast_tensors(MASK, s))),
    "keywords": scored(lambda s: s + BIAS.expand_as(other=s)),
    # The order of the dimensions is another one.
    "SAGAN": sagan,
    "channels first": channels_first,
    "keys first": keys_first,
    "softmax over the queries": softmax_over_the_queries,
    "einsum of a mirror": lambda q, k, v: torch.einsum(
        "bhdj,bhij->bhdi", v.mT, torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1)),
    # The scores are viewed in other dimensions.
    "Swin": swin,
    "ViTDet": vit_det,
    "heads split in two ways": heads_split_in_two_ways,
    "a dimension of None": scored(lambda s: (s[:, None] + BIAS[:, None]).squeeze(1)),
    # einsum
    "ellipsis": einsums(lambda q, k: ("...id,...jd->...ij", q, k), lambda p, v: ("...ij,...jd->...id", p, v)),
    "ellipsis, spaces": einsums(lambda q, k: ("... i d, ... j d -> ... i j", q, k), lambda p, v: ("... i j, ... j d -> ... i d", p, v)),
    "sublists": einsums(
        lambda q, k: (q, [0, 1, 2, 3], k, [0, 1, 4, 3], [0, 1, 2, 4]), lambda p, v: (p, [..., 2, 4], v, [..., 4, 3], [..., 2, 3])),
    "no arrow": einsums(lambda q, k: ("bhid,bhjd->bhij", q, k), lambda p, v: ("...zj,...jd", p, v)),
    "operands in a list": einsums(lambda q, k: ("bhid,bhjd->bhij", [q, k]), lambda p, v: ("bhij,bhjd->bhid", [p, v])),
    # Numbers
    "numpy": scored(lambda s: s / np.sqrt(16)),
    "a number of numpy": scored(lambda s: s * float(np.float32(0.2))),
    "numpy's float32": scored(lambda s: s * np.float32(0.2)),
    "a division by numpy's root": scored(lambda s: s * float(1 / np.sqrt(16))),
    "a quotient of numpy's": scored(lambda s: s * (1 / np.sqrt(16))),
    "numpy's arithmetic": scored(lambda s: s * (2 - np.exp(-0.5 * np.log(16.0))) / np.float64(9) ** 0.5),
    "an array of numpy's": scored(lambda s: s * -np.asarray(0.25).astype(np.float32)),
    "pow of a tensor": scored(lambda s: s * torch.tensor(16.0, dtype=s.dtype).pow(-0.5)),
    "rsqrt": scored(lambda s: s * torch.rsqrt(torch.tensor(16.0))),
    "sqrt of a whole number": scored(lambda s: s / torch.tensor(7).sqrt()),
    "two numbers": scored(lambda s: s * (torch.full([1], 3.0) / torch.full([], 7.0))),
    "a whole number": scored(lambda s: s / torch.full((), 3.9, dtype=torch.int64)),  # has no fraction
    "a detached number": scored(lambda s: s * torch.full((), 0.25).detach_()),
    "sizes": lambda q, k, v: (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v,
    "root of a size": lambda q, k, v: (q @ k.mT / math.sqrt(q.size(-1))).softmax(-1) @ v,
    "negative": scored(lambda s: -s),
    # Masks
    "plus 0": scored(lambda s: s + 0),
    "0 plus": scored(lambda s: 0 + s - 0.0),
    "minus a mask": scored(lambda s: s - 1e10 * (1 - PADDING.double())),
    "minus a bias": scored(lambda s: torch.sub(s, BIAS, alpha=2)),
    "alpha": scored(lambda s: s.add(BIAS, alpha=2)),
    # What SDPA broadcasts
    "one head of keys": lambda q, k, v: (q @ k[:, :1].mT).softmax(-1) @ v[:, :1],
    "one head of keys alone": lambda q, k, v: (q @ k[:, :1].mT).softmax(-1) @ v,
    "one batch": first_batch_alone,
    "one head of queries": lambda q, k, v: (q[:, :1] @ k.mT + BIAS).softmax(-1) @ v,
    "keys without heads": one_head_of_keys,
}  # fmt: skip
if torch.__version__ < "2.12":  # whose graph has detach_() in place, which is not read
    del TAKEN["a detached number"]
# Of these no size is read: they are tried with known ones alone.
OF_NUMPY = ("numpy", "a number of numpy", "numpy's float32", "a division by numpy's root",
            "a quotient of numpy's", "numpy's arithmetic", "an array of numpy's")  # fmt: skip
NUMBERS = (*OF_NUMPY, "pow of a tensor", "rsqrt",
           "sqrt of a whole number", "two numbers", "a whole number", "a detached number", "negative", "plus 0", "0 plus", "minus a mask",
           "minus a bias", "alpha")  # fmt: skip
# torch.export lifts what torch.tensor makes to an input, and has no numpy.
NOT_EXPORTED = (
    "pow of a tensor", "rsqrt", "sqrt of a whole number", "a detached number", *OF_NUMPY
)  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_mirror_is_rewritten_and_stored_as_it_was(dynamic):
    """By the backend, not by the pass alone: what follows views positions as rows and columns."""

    def images(q, k, v):
        return [TAKEN[name](q, k, v).unflatten(-1, (2, 4)).view(-1) for name in names]

    names = "SAGAN", "einsum of a mirror", "no arrow"
    inputs, options = torch.randn(3, 2, 4, 8, 16).unbind(), {"sage.emulate": True}
    torch._dynamo.reset()
    with torch.no_grad(), support.op_by_op():
        found = torch.compile(images, backend="sage", options=options, dynamic=dynamic)(*inputs)
    assert [site.rewritten for site in sage_inductor.report()] == [True] * 3
    for out, expected in zip(found, images(*inputs), strict=True):
        assert out.shape == expected.shape and support.relative_l2(out, expected) < 0.1


@pytest.mark.parametrize("how", ["known sizes", "symbols", "exported"])
def test_it_is_attention_beside_all_others(how):
    # Queries and keys of ViTDet are split, which needs known lengths.
    left_out = {"symbols": (*NUMBERS, "ViTDet"), "exported": NOT_EXPORTED}.get(how, ())
    functions = {name: function for name, function in TAKEN.items() if name not in left_out}
    if how == "exported":
        check_exported(functions)
        return
    check(every(functions), *random_qkv(), number=len(functions), dynamic=how == "symbols")


# What the caller gives as a number, which Dynamo may hold as a symbol.
GIVEN = {
    "a power": lambda q, k, v, n: (q @ k.mT * n**-0.5).softmax(-1) @ v,
    "a root": lambda q, k, v, n: (q @ k.mT / math.sqrt(n)).softmax(-1) @ v,
    "keys up to it": lambda q, k, v, n: (q @ k[:, :, :n].mT).softmax(-1) @ v[:, :, :n],
    "padding from it on": lambda q, k, v, n: (
        (q @ k.mT).masked_fill(torch.arange(8) >= n, -math.inf).softmax(-1) @ v
    ),
}


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", GIVEN)
def test_a_number_that_the_caller_gives_scales_scores_or_counts_keys(name, dynamic):
    check(GIVEN[name], *random_qkv(), 5, dynamic=dynamic)


# -- compositions: one of each stage ----

PRODUCTS = {
    "matmul": lambda q, k: torch.matmul(q, k.transpose(2, 3)),
    "mT": lambda q, k: q @ k.mT,
    "permute": lambda q, k: q.matmul(k.permute(0, 1, 3, 2)),
    "permuted, then scaled": lambda q, k: q.matmul(k.permute(0, 1, 3, 2) * 0.5),
    "stored transposed": lambda q, k: q @ k.transpose(-1, -2).contiguous(),
    "einsum": lambda q, k: torch.einsum("bhnd,bhmd->bhnm", q, k),
    "bmm": lambda q, k: torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).view(2, 4, 8, 8),
    "baddbmm": lambda q, k: torch.baddbmm(
        torch.empty(8, 8, 8, dtype=q.dtype), q.flatten(0, 1), k.flatten(0, 1).mT, beta=0, alpha=0.3
    ).unflatten(0, (2, 4)),
}
SCALES = {
    "none": lambda s: s,
    "div": lambda s: s / 4,
    "mul": lambda s: 0.25 * s * 2.0,
    "imul": lambda s: s.mul_(0.25),
    "tensors": lambda s: s / torch.full([], 4.0, dtype=s.dtype) / torch.full([], 16.0).sqrt(),
}
MASKS = {
    "none": lambda s: s,
    "additive": lambda s: BIAS + s,
    "iadd": lambda s: s.add_(BIAS),
    "causal": lambda s: s.masked_fill(~MASK, -math.inf),
    "padding": lambda s: s.where(PADDING, LOW),
    "where": lambda s: torch.where(MASK == 0, torch.full([], LOW, dtype=s.dtype), s),
    "both": lambda s: (s + BIAS).masked_fill_(MASK.logical_not(), -math.inf),
    "both in place": lambda s: s.masked_fill_(~MASK, -math.inf).add_(BIAS[0, 0, 0]),
    "two bools": lambda s: torch.where(~MASK, -math.inf, s.where(PADDING, -math.inf)),
    "bool added": lambda s: (BIAS + s).masked_fill(~MASK, -math.inf) + MASK,
    "of the scores' shape": lambda s: s + torch.full_like(s, -math.inf).triu(1).type_as(s),
}
SOFTMAXES = {
    "method": lambda s: s.softmax(-1),
    "function": lambda s: F.softmax(s, dim=3),
    "cast": lambda s: F.softmax(s.to(torch.float64), dim=-1, dtype=torch.float64).type_as(s),
    "casts": lambda s: F.softmax(s.float().to(s.dtype).view(2, 4, 8, 8), -1).to(s).contiguous(),
    "module": lambda s: nn.Dropout(0.1).eval()(nn.Softmax(dim=-1)(s)),
    "maximum": lambda s: (s - s.amax(-1, keepdim=True)).softmax(-1),
    "two maxima": lambda s: (lambda s: s - s.amax(dim=-1, keepdim=True).detach())(
        s - s.max(-1, keepdim=True)[0]
    ).softmax(-1),
    "sink": lambda s: torch.cat([s, ONE], -1).softmax(-1)[..., :8],
}
SUMS = {
    "matmul": lambda p, v: p @ v,
    "dropout": lambda p, v: F.dropout(p, 0.5, training=False) @ v,
    "einsum": lambda p, v: torch.einsum("bhnm,bhmd->bnhd", p, v),
    "swapped": lambda p, v: torch.einsum("bhmd,bhnm->hbnd", v, p),
    "bmm": lambda p, v: torch.bmm(p.view(8, 8, 8), v.flatten(0, 1)).view(2, 4, 8, 16),
}
STAGES = (PRODUCTS, SCALES, MASKS, SOFTMAXES, SUMS)
BEFORE_THE_SCALE = ("none", "causal", "two bools")  # these hide by -inf, which a scale leaves


def composed(rounds: int) -> dict:
    """Attention of one of each stage: in a round each occurs, and SEED draws beside which others."""
    rng, found = random.Random(os.environ["SEED"]), {}
    longest = max(map(len, STAGES))
    for _ in range(rounds):
        columns = [
            [*rng.sample([*stage], len(stage)), *rng.choices([*stage], k=longest)]
            for stage in STAGES
        ]
        for names in itertools.islice(zip(*columns), longest):
            mask_first = rng.random() < 0.5 and names[2] in BEFORE_THE_SCALE
            found[(*names, mask_first)] = composition(names, mask_first)
    return found


def composition(names, mask_first: bool):
    product, scale, mask, softmax, total = (stage[n] for stage, n in zip(STAGES, names))

    def attention(q, k, v):
        s = product(q, k)
        s = scale(mask(s)) if mask_first else mask(scale(s))
        return total(softmax(s), v)

    return attention


def test_any_composition_is_attention():
    check_all(composed(20 if has_every_variant() else 2), rtol=0, atol=1e-6)


# -- scores [B * H, N, N] ----

BROADCAST = [(8, 8), (1, 8, 8), (8, 1, 8), (8, 8, 8), (8, 8, 1), (1, 1, 8), (8,)]
SPLIT = [(8, 8), (1, 8, 8), (4, 1, 8), (1, 4, 8, 8), (2, 1, 1, 8), (2, 4, 1, 1), (2, 4, 8, 8)]
HOW = {
    "added": lambda s, x: s + x,
    "fills": lambda s, x: s.masked_fill(hidden_by(x), -math.inf),
    "fills with a number": lambda s, x: s.masked_fill(hidden_by(x), LOW),
    "fills what was added": lambda s, x: (s + x).masked_fill(hidden_by(x), LOW),
}


def hidden_by(x):
    return (x > 0.5) & (torch.arange(x.shape[-1]) > 0)  # The first key is seen.


def flat(how, mask, seen: bool, split: bool, sink: bool):
    """seen: a view of 4 dimensions tells how many heads there are. split: the mask is for it."""

    def attention(q, k, v):
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        s = torch.bmm(q, k.mT) * 0.25
        s = how(s.view(2, 4, 8, 8) if split else s, mask)
        s = torch.cat([s, ONE if split else ONE.flatten(0, 1)], -1) if sink else s
        p = s.softmax(-1)[..., :8] if sink else s.softmax(-1)
        return torch.bmm((p.view(2, 4, 8, 8) if seen else p).view(8, 8, 8), v)

    return attention


def flats() -> dict:
    found, generator = {}, torch.Generator().manual_seed(0)
    for split, shapes in ((False, BROADCAST), (True, SPLIT)):
        for i, (shape, (name, how)) in enumerate(itertools.product(shapes, HOW.items())):
            mask = torch.rand(shape, generator=generator, dtype=torch.float64)
            seen, sink = i % 3 > 0, i % 5 > 2
            found[name, shape, seen, split, sink] = flat(how, mask, seen, split, sink)
    return found


def test_a_mask_of_any_shape_is_aligned_with_scores_of_batch_and_heads_together():
    check_all(flats(), rtol=0, atol=1e-12)


def test_no_program_of_these_is_one_that_could_not_be_read():
    programs = {**SPELLINGS, **WITH_SINK, **TAKEN, **ARGUMENTS, **NOT_ATTENTION, **flats()}
    programs |= composed(1) | {name: f for name, (f, _) in (REFUSED | UNREAD).items()}
    sites = []

    def see(gm):
        settings = Settings(emulate=True, force=True)
        sites.extend(patterns.rewrite(gm, functools.partial(decide_call, settings=settings)))

    run_seen(every(programs), *random_qkv(), see=see)
    assert len(sites) > 150
    faults = [str(site.reason) for site in sites if "a fault of ours" in str(site.reason)]
    assert not faults


# -- real models, whose attention is written out ----


def bloom(lib):
    config = lib.BloomConfig(
        hidden_size=32, n_layer=1, n_head=4, vocab_size=100, attn_implementation="eager"
    )
    return lib.BloomModel(config), {"input_ids": models.token_ids(), **models.padding()}


MODELS = {  # and how many attentions each has
    "bert": (lambda lib: models.bert(lib, "eager", **models.padding()), 1),
    "gpt_oss": (models.gpt_oss, 2),
    "bloom": (bloom, 1),
}


@pytest.mark.models
@chosen(
    # Training has the inference's graph, and gradients. The other models: front/test_models.py.
    lambda name, training: training and name != "bloom", name=list(MODELS), training=[False, True],
)  # fmt: skip
def test_a_model_keeps_its_output_with_all_its_attention_found(name, training):
    build, number = MODELS[name]
    model, inputs = build(models.library("transformers"))
    for module in model.modules():
        for rate in ("p", "dropout", "attention_dropout", "hidden_dropout"):
            if isinstance(getattr(module, rate, None), float):
                setattr(module, rate, 0.0)
    model.train(training)
    with torch.set_grad_enabled(training):
        expected = model(**inputs)
        _, taken, reasons, actual = capture(model, **inputs)
    assert len(taken) == number and not reasons, reasons
    expected, actual = (x if isinstance(x, torch.Tensor) else x[0] for x in (expected, actual))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    if training:
        grads = []
        for out in (actual, expected):
            model.zero_grad()
            out.backward(torch.cos(torch.arange(out.numel())).view_as(out), retain_graph=True)
            grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-4)
