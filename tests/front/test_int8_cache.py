"""``sage_inductor.Int8Cache``: `generate` of whole models with it, in eager and compiled; what it
holds; the calls that read its codes; its error."""

import pytest
import support
import torch
import torch.nn.functional as F
import transformers
from support import placeholders, valued
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import CompileConfig, Gemma3TextConfig, LlamaConfig, StaticCache
from transformers.cache_utils import STATIC_LAYER_TYPE_MAPPING, StaticLayer

import sage_inductor
from sage_inductor import Int8Cache
from sage_inductor.choose.decide import rewrite
from sage_inductor.integrations.int8_cache import OF_SEQUENCES
from sage_inductor.ops.attention.decode import decode
from sage_inductor.ops.quantize.cache import read_kv
from sage_inductor.ops.reference import decode as reference
from sage_inductor.options import Settings
from sage_inductor.patterns.sdpa import TARGETS

SIZES = dict(
    hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2,
    intermediate_size=64, vocab_size=50, eos_token_id=None,
)  # fmt: skip
FAMILIES = {  # head_dims that are rotated and not, layers with a window of 8 beside others
    "llama": ("Llama", dict(head_dim=64), torch.float16),
    "qwen3": ("Qwen3", dict(head_dim=128), torch.bfloat16),
    "mistral": ("Mistral", dict(head_dim=48, sliding_window=None), torch.bfloat16),
    "gemma3": (
        "Gemma3", dict(head_dim=32, sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
        torch.float16,
    ),
}  # fmt: skip
N = 40


def model_of(family: str):
    kind, sizes, dtype = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}{'Text' * (kind == 'Gemma3')}Config")(**SIZES | sizes)
    return getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype).eval()


def prompt(B: int, length: int = 7, padded: bool = False) -> dict:
    ids = torch.randint(3, 50, (B, length), generator=torch.Generator().manual_seed(B))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :3] = 0
    return dict(input_ids=ids, attention_mask=mask)


def generate(model, cache, given: dict, compiled: bool, **kwargs):
    """As transformers compiles it on a GPU: each token but the first by a compiled forward."""
    config = CompileConfig(backend="sage", mode=None, options={"sage.emulate": True})
    config._compile_all_devices = True
    return model.generate(
        **given, past_key_values=cache, do_sample=False, pad_token_id=0, max_new_tokens=6,
        return_dict_in_generate=True, output_logits=True, compile_config=config,
        disable_compile=not compiled, **kwargs,
    )  # fmt: skip


@pytest.fixture
def decoded(monkeypatch):
    """The dtypes of k and v, and the number of queries, in each call of sage::decode."""
    seen, decode = [], reference.decode

    def see(a, *rest):
        seen.append((a.k.dtype, a.v.dtype, a.q.shape[2]))
        return decode(a, *rest)

    monkeypatch.setattr(reference, "decode", see)
    torch._dynamo.reset()
    with support.op_by_op():
        yield seen


def check_alike(found, expected, dtype) -> None:
    """Logits within the rounding of p, q and out, which grows from layer to layer, and the tokens, up
    to one whose logit is as near to another's. From there on a sequence is another."""
    near = 8 * torch.finfo(dtype).eps
    for b in range(len(expected.logits[0])):
        for x, y in zip((x[b] for x in found.logits), (y[b] for y in expected.logits), strict=True):
            assert support.relative_l2(x, y) < near
            if x.argmax() != y.argmax():
                first, second = y.topk(2).values
                assert first - second <= near * y.abs().max()
                break
        else:
            assert found.sequences[b].tolist() == expected.sequences[b].tolist()


# -- whole models ----


@pytest.mark.parametrize("family, B, padded", [
    ("llama", 1, False), ("llama", 4, True), ("qwen3", 4, False), ("qwen3", 1, True),
    ("mistral", 1, False), ("mistral", 4, True), ("gemma3", 4, True),
    support.swept("gemma3", 1, False),
])  # fmt: skip
def test_generate_gives_the_tokens_of_eager(family, B, padded, decoded):
    model, given = model_of(family), prompt(B, padded=padded)
    caches = [Int8Cache(model.config, N) for _ in range(2)]
    expected = generate(model, caches[0], given, compiled=False)
    assert not decoded
    found = generate(model, caches[1], given, compiled=True)
    check_alike(found, expected, model.dtype)
    full = 1 if family == "gemma3" else 2
    assert decoded.count((torch.int8, torch.int8, 1)) == 5 * full  # each layer of each step
    assert len(decoded) == 10
    exact = generate(model, StaticCache(model.config, N), given, compiled=False)
    for x, y in zip(found.logits[:1], exact.logits):
        assert 0 < support.relative_l2(x, y) < 0.02


def test_beam_search_gives_the_tokens_of_eager(decoded):
    """Of a model that is compiled as a whole, with the first tokens."""
    model, given = model_of("llama"), prompt(2, padded=True)
    expected = generate(model, Int8Cache(model.config, N), given, False, num_beams=2)
    forward, options = model.forward, {"sage.emulate": True}
    model.forward = torch.compile(forward, backend="sage", dynamic=False, options=options)
    found = generate(model, Int8Cache(model.config, N), given, False, num_beams=2)
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert decoded.count((torch.int8, torch.int8, 1)) == 10
    moved = expected.beam_indices[:, :6]
    assert (moved != moved[:, :1]).any()  # beams changed their places


def test_two_turns_of_a_chat_share_a_cache(decoded):
    model, first = model_of("llama"), prompt(2)
    found = []
    for compiled in (True, False):
        cache = Int8Cache(model.config, N)
        told = generate(model, cache, first, compiled).sequences
        assert cache.get_seq_length() == 12  # all but the last token
        asked = torch.cat([told, prompt(2, 5)["input_ids"]], 1)
        given = dict(input_ids=asked, attention_mask=torch.ones_like(asked))
        found.append(generate(model, cache, given, compiled))
        assert cache.get_seq_length() == 12 + 6 + 5
    check_alike(*found, model.dtype)
    assert decoded


def test_one_graph_serves_a_cache_that_is_reset():
    """Compiled by Inductor, into CPU code."""
    torch._dynamo.reset()
    counters.clear()
    model, given = model_of("llama"), [prompt(2), prompt(2, 9), prompt(2)]
    cache, found = Int8Cache(model.config, N), []
    for each in given:
        found.append(generate(model, cache, each, compiled=True))
        cache.reset()
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert sage_inductor.report().verdict == "2 of 2 attention calls use decode"
    for each, tokens in zip(given, found):
        expected = generate(model, Int8Cache(model.config, N), each, compiled=False)
        check_alike(tokens, expected, model.dtype)


def test_speculative_queries_read_the_codes(decoded):
    model = model_of("qwen3")
    ids = prompt(2, 24)["input_ids"]

    def logits(run):
        cache = Int8Cache(model.config, N)
        with torch.no_grad():
            model(ids[:, :8], past_key_values=cache)
            return run(ids[:, 8:], past_key_values=cache).logits

    expected = logits(model)
    run = torch.compile(model, backend="sage", fullgraph=True, options={"sage.emulate": True})
    assert support.relative_l2(logits(run), expected) < 8 * torch.finfo(torch.bfloat16).eps
    assert decoded == 2 * [(torch.int8, torch.int8, 16)]


# -- the cache ----


def filled(B=3, D=64, D_v=32, n=10, dtype=torch.float16) -> tuple[Int8Cache, list]:
    cache = Int8Cache(LlamaConfig(**SIZES), N)
    k, v = torch.randn(B, 2, n, D).to(dtype) + 3, torch.randn(B, 2, n, D_v).to(dtype)
    return cache, [x[:, :, :n] for x in cache.update(k, v, 0)]


def read(cache, n: int = 10) -> list:
    """What the first tokens are: a step more is written and taken back."""
    layer = cache.layers[0]
    dims = layer.k_head_dim, layer.v_head_dim
    found = layer.update(*(torch.zeros(layer.batch_size, 2, 1, D).half() for D in dims))
    layer.crop(-1)
    return [x[:, :, :n] for x in found]


def check_same(found, expected) -> None:
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


def test_keys_and_values_of_a_layer_are_numbers():
    """As models read them for cross-attention, without an update."""
    cache, before = filled()
    check_same([x[:, :, :10] for x in (cache.layers[0].keys, cache.layers[0].values)], before)
    assert cache.layers[1].keys is None is cache.layers[1].values
    with pytest.raises(AttributeError, match="update writes a layer's keys and values"):
        cache.layers[0].keys = before[0]


def test_a_token_takes_2_d_and_8_bytes_a_head():
    cache, _ = filled(D=64, D_v=64)
    layer = cache.layers[0]
    of_tokens = layer.key_codes, layer.key_scale, layer.value_codes, layer.value_scale
    assert sum(x.nbytes for x in of_tokens) == 3 * N * 2 * (2 * 64 + 8)
    assert {torch.int8, torch.float32} == {x.dtype for x in of_tokens}


def test_sequences_are_chosen_repeated_and_reordered():
    cache, before = filled()
    layer, order = cache.layers[0], torch.tensor([2, 0, 0])
    places = [getattr(layer, name).data_ptr() for name in OF_SEQUENCES]
    layer.reorder_cache(order)
    before = [x[order] for x in before]
    check_same(read(cache), before)
    assert places == [getattr(layer, name).data_ptr() for name in OF_SEQUENCES]
    layer.batch_repeat_interleave(2)
    before = [x.repeat_interleave(2, 0) for x in before]
    check_same(read(cache), before)
    assert cache.batch_size == 6
    layer.batch_select_indices(torch.tensor([5, 1]))
    check_same(read(cache), [x[[5, 1]] for x in before])
    assert cache.batch_size == 2
    for name in (*OF_SEQUENCES, "cumulative_length"):
        assert hasattr(getattr(layer, name), "_dynamo_static_input_type")


def test_crop_takes_the_last_tokens_back():
    cache, before = filled()
    cache.layers[0].crop(-4)
    assert cache.get_seq_length() == 6
    x = torch.randn(3, 2, 2, 64).half()
    k, _ = cache.layers[0].update(x, torch.zeros(3, 2, 2, 32).half())
    assert torch.equal(k[:, :, :6], before[0][:, :, :6])
    assert support.relative_l2(k[:, :, 6:8], x) < 0.05
    with pytest.raises(ValueError, match="crop: must be 0 or less tokens to remove, got 3"):
        cache.layers[0].crop(3)


def test_the_first_keys_fix_the_anchor_until_it_is_reset():
    cache, _ = filled()
    layer = cache.layers[0]
    anchor = layer.anchor.clone()
    k = torch.randn(3, 2, 5, 64).half() - 7
    layer.update(k, k[..., :32])
    assert torch.equal(layer.anchor, anchor) and (anchor - 3).abs().mean() < 0.5
    layer.value_scale[0, 0, 30] = float("nan")
    cache.reset()
    found, values = layer.update(k, k[..., :32])
    torch.testing.assert_close(layer.anchor, k.float().mean(2))
    assert cache.get_seq_length() == 5 and values.isfinite().all()
    assert support.relative_l2(found[:, :, :5] - k.mean(2, True), k - k.mean(2, True)) < 0.012


def test_other_layers_and_other_caches_are_transformers_own():
    config = Gemma3TextConfig(**SIZES | FAMILIES["gemma3"][1])
    sliding, full = Int8Cache(config, N).layers
    of_static = [type(layer) for layer in StaticCache(config, N).layers]
    assert of_static == [type(sliding), StaticLayer] and isinstance(full, StaticLayer)
    assert STATIC_LAYER_TYPE_MAPPING["full_attention"] is StaticLayer
    assert Int8Cache(config, N).is_compileable
    with pytest.raises(ValueError, match="alone, got {'StaticSlidingWindowLayer'}"):
        Int8Cache(config, N).crop(-1)


@pytest.mark.parametrize("given, message", [
    (dict(max_cache_len=0), "Int8Cache: max_cache_len must be at least 1, got 0"),
    (dict(max_cache_len=9, offloading=True), "Int8Cache: offloading must be False"),
])  # fmt: skip
def test_what_cannot_be_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Int8Cache(LlamaConfig(**SIZES), **given)


@pytest.mark.parametrize("D", [40, 272])
def test_a_head_dim_that_decode_has_not_is_refused(D):
    message = f"head_dim must be a multiple of 16 up to 256, got {D}, 64"
    with pytest.raises(ValueError, match=message):
        filled(D=D, D_v=64)


def test_more_tokens_than_there_is_room_for_are_an_error():
    cache, _ = filled(n=38)
    x = torch.zeros(3, 2, 3, 64).half()
    with pytest.raises(IndexError, match="out of bounds"):
        cache.update(x, x[..., :32], 0)
    with pytest.raises(ValueError, match="k must have 1 to 40 rows, as the cache has, got 41"):
        filled(n=41)


@pytest.mark.parametrize("B", [1, 2])
def test_another_batch_is_refused_also_after_a_reset(B):
    cache, _ = filled(B=3)
    cache.reset()
    with pytest.raises(ValueError, match=f"the batch must be 3, the first, got {B}"):
        cache.update(*(torch.zeros(B, 2, 1, D).half() for D in (64, 32)), 0)


def test_a_model_of_another_dtype_gets_numbers_of_its_own():
    cache, _ = filled()
    found = cache.update(*(torch.zeros(3, 2, 1, D) for D in (64, 32)), 0)
    assert [x.dtype for x in found] == [torch.float32] * 2


# -- which calls read codes ----


def attend(q, k_codes, k_scale, v_codes, v_scale, anchor, mask, case: str):
    """A part of a model that reads its cache."""
    k = read_kv(k_codes, k_scale, anchor, True, torch.float16)
    of_v = None, case == "v is rotated"
    if case == "v has an anchor":
        of_v = anchor, False
    v = read_kv(v_codes, v_scale, *of_v, torch.float16)
    if case == "codes are written to":
        k_codes.neg_()
    if case == "scales are written to":
        v_scale.mul_(2)
    if case == "some tokens":  # of the second sequence
        q, mask = q[1:], mask[1:, :, :, 3:33]
        k, v = k[1:, :, 3:33], v[:, :, 3:33][1:, :]
    if case == "some channels":
        q, k = q[..., :32], k[:, :, :, :32]
    if case == "a head":
        k, v = k[:, 1][:, None].expand(-1, 2, -1, -1), v[:, 1][:, None].expand(-1, 2, -1, -1)
    if case == "heads repeated":
        k, v = (x[:, :, None].expand(-1, -1, 3, -1, -1).flatten(1, 2) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


CODES, NUMBERS = torch.int8, torch.float16
READ = {  # of k and v
    "all tokens": (CODES, CODES), "some tokens": (CODES, CODES),
    "heads repeated": (CODES, CODES), "codes are written to": (NUMBERS, CODES),
    "scales are written to": (CODES, NUMBERS), "v has an anchor": (CODES, NUMBERS),
    "v is rotated": (CODES, NUMBERS), "some channels": (NUMBERS, CODES), "a head": (NUMBERS, NUMBERS),
}  # fmt: skip


@pytest.mark.parametrize("case", READ)
def test_which_reads_are_of_codes(case, decoded):
    torch.manual_seed(0)
    codes = [torch.randint(-127, 128, (2, 2, N, 64), dtype=torch.int8) for _ in range(2)]
    scale = [torch.rand(2, 2, N) / 50 for _ in range(2)]
    given = [torch.randn(2, 6, 5, 64).half(), codes[0], scale[0], codes[1], scale[1]]
    given += [3 * torch.randn(2, 2, 64), torch.rand(2, 1, 5, N) < 0.7]
    expected = attend(*(x.clone() for x in given), case)
    run = torch.compile(attend, backend="sage", fullgraph=True, options={"sage.emulate": True})
    found = run(*given, case)
    assert decoded == [(*READ[case], 5)]
    torch.testing.assert_close(found, expected, rtol=4e-3, atol=8e-3)


def attend_scaled(q, k_codes, k_scale, v_codes, v_scale, mask, case: str):
    """As transformers' FP8 cache is read: one scale for all."""
    k, v = ((x.float() * y).to(q.dtype) for x, y in ((k_codes, k_scale), (v_codes, v_scale)))
    if case == "codes are written to":
        k_codes.copy_(v_codes)
    if case == "scales are written to":
        v_scale.mul_(2)
    if case == "some tokens":
        q, k, v = q[1:], k[1:, :, 3:33], v[:, :, 3:33][1:, :]
    mask = None if mask is None else mask[-len(q) :, :, :, : k.shape[2]]
    if case == "queries at the end":
        mask = torch.ones(q.shape[2], N, dtype=torch.bool).tril(N - q.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


E4M3 = torch.float8_e4m3fn
SCALED = {  # k's and v's dtype, and queries without a mask; none: the call stays, or has a recipe
    "all tokens": (E4M3, E4M3, 1), "some tokens": (E4M3, E4M3, 1), "INT8": None,
    "a negative scale": (E4M3, E4M3, 1), "codes are written to": (NUMBERS, E4M3, 1),
    "scales are written to": (E4M3, NUMBERS, 1), "queries with a mask": (E4M3, E4M3, 5),
    "queries at the end": (E4M3, E4M3, 5), "queries": None, "a scale a token": None, "a scale of 16 bits": None,
}  # fmt: skip


@pytest.mark.parametrize("case", SCALED)
def test_codes_of_one_scale_are_read(case, decoded):
    torch.manual_seed(0)
    n_q, dtype = 5 if "queries" in case else 1, CODES if case == "INT8" else E4M3
    codes = [(3 * torch.randn(2, 2, N, 64)).to(dtype) for _ in range(2)]
    scale = [torch.tensor(x) for x in (0.3, 0.2)]
    if case == "a negative scale":
        scale = [-x for x in scale]
    if case == "a scale a token":
        scale = [x.expand(2, 2, N, 1).clone() for x in scale]
    if case == "a scale of 16 bits":
        scale = [x.half() for x in scale]
    given = [torch.randn(2, 6, n_q, 64).half(), codes[0], scale[0], codes[1], scale[1]]
    given += [torch.rand(2, 1, n_q, N) < 0.7 if "mask" in case else None]
    copies = [x.clone() if x is not None else None for x in given]
    expected = attend_scaled(*copies, case)
    options = {"sage.emulate": True}
    found = torch.compile(attend_scaled, backend="sage", fullgraph=True, options=options)(
        *given, case
    )
    assert decoded == ([SCALED[case]] if SCALED[case] else [])
    assert "could not be read" not in sage_inductor.report()[-1].reason
    if SCALED[case]:
        torch.testing.assert_close(found, expected, rtol=4e-3, atol=8e-3)


@pytest.mark.parametrize("force, capability", [(True, (8, 9)), (False, (8, 9)), (False, (9, 0))])
def test_on_a_gpu_codes_are_read_where_that_is_forced_or_was_timed(force, capability):
    graph, shapes = torch.fx.Graph(), ((2, 8, 1, 64), (2, 2, N, 64), (2, 2, N), (2, 1, 1, N))
    dtypes = torch.bfloat16, torch.int8, torch.float32, torch.bool
    with FakeTensorMode(), support.on_gpu(capability):
        values = [torch.empty(x, dtype=y, device="cuda") for x, y in zip(shapes, dtypes)]
        q, codes, scale, mask = placeholders(graph, values, "val")
        read = codes, scale, None, False, torch.bfloat16
        k = graph.call_function(torch.ops.sage.read_kv.default, read)
        valued(k, values[1].bfloat16(), "val")
        call = graph.call_function(TARGETS[0], (q, k, k, mask), {"enable_gqa": True})
        graph.output(valued(call, torch.empty_like(values[0]), "val"))
        gm = torch.fx.GraphModule({}, graph)
        (site,) = rewrite(gm, Settings(force=force))
    (decode,) = [n for n in gm.graph.nodes if n.target is torch.ops.sage.decode.default] or [None]
    if force or capability == (9, 0):
        assert site.reason == ("forced, exact" if force else "exact: k and v are read as codes")
        assert site.recipe == "decode" and decode.args[1:3] == (codes,) * 2
        assert decode.args[6:8] == (scale,) * 2
    else:
        assert site.recipe is None and decode is None
        assert site.reason.endswith("sage::decode for N_q=1 was never timed")


# -- its error ----

HEADS, D, LONG, FROZEN = 4, 128, 4096, 512


def rope(x):
    angle = torch.arange(LONG)[:, None] * 1e4 ** -(torch.arange(0, D, 2) / D)
    a, b = x[..., ::2], x[..., 1::2]
    turned = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
    return torch.stack(turned, -1).flatten(-2)


def family(name: str) -> list:
    """q, k and v whose keys are hard to quantize."""
    q, k, v = (torch.randn(1, HEADS, n, D) for n in (16, LONG, LONG))
    if name == "k bias":
        k += 4 * torch.randn(HEADS, 1, D)
    if name == "2 channels x 12":
        k[..., [7, 77]] *= 12
    if name == "bias before RoPE":
        k[..., [5, 88]] += 12
        k = rope(k)
    if name == "sinks":
        q, k[:, :, :4] = q + 1, k[:, :, :4] + 1
    if name == "later keys x 4":
        k[:, :, FROZEN:] *= 4
    return [x.bfloat16() for x in (q, k, v)]


@pytest.mark.parametrize(
    "name",  # of 1.0, 1.0, 1.7, 1.4, 1.0 and 2.0 %
    ["normal", "k bias", "2 channels x 12", "bias before RoPE", "sinks", "later keys x 4"],
)
def test_the_error_of_attention_is_small(name):
    """Of what sage::decode computes from the codes, and what eager does from their numbers."""
    torch.manual_seed(0)
    q, k, v = family(name)
    cache = Int8Cache(LlamaConfig(**SIZES), LONG)
    cache.update(k[:, :, :FROZEN], v[:, :, :FROZEN], 0)
    numbers = cache.update(k[:, :, FROZEN:], v[:, :, FROZEN:], 0)
    exact = F.scaled_dot_product_attention(*(x.double() for x in (q, k, v)))
    layer, border = cache.layers[0], torch.tensor([0, LONG])[:, None]
    codes = layer.key_codes, layer.value_codes
    of_cache = *codes, *border, D**-0.5, layer.key_scale, layer.value_scale
    of_codes, _ = decode(q, *of_cache, torch.ones(1, 1, LONG).bool(), None, None, True, False)
    of_numbers = F.scaled_dot_product_attention(*(x.double() for x in (q, *numbers)))
    errors = [support.relative_l1(x, exact) for x in (of_codes, of_numbers)]
    assert max(errors) < 0.02
