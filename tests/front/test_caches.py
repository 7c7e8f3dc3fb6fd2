"""Few queries against a cache. Heads that the model repeats: SDPA gets them as they were, or the row
says what they cost. Codes that are decoded before the call: the row says so."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from support import on_gpu, placeholders, swept, valued
from torch._subclasses.fake_tensor import FakeTensorMode

import sage_inductor
from sage_inductor.backend import op_by_op
from sage_inductor.choose import decide as choose
from sage_inductor.choose.decide import rewrite
from sage_inductor.options import Settings
from sage_inductor.patterns import reasons
from sage_inductor.patterns.sdpa import TARGETS
from sage_inductor.study.findings import remedies

pytestmark = pytest.mark.usefixtures("graphs_run_op_by_op")

B, H, G, N, D = 2, 3, 4, 40, 16


def expanded(x):
    return x[:, :, None].expand(B, x.shape[1], G, N, D).reshape(B, x.shape[1] * G, N, D)


def interleaved(x):  # gpt-fast's spelling, and torchao's
    return x.repeat_interleave(G, dim=1)


def decoder(repeat, mask=True, write=None):
    """A step of a static cache: the new token is written, then everything set is read."""

    def step(q, keys, values, new, end):
        keys.index_copy_(2, end, new)
        values.index_copy_(2, end, -new)
        seen = (torch.arange(N, device=q.device) <= end)[None, None, None] if mask else None
        k, v = repeat(keys), repeat(values)
        if write == "between":
            keys.mul_(2)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        if write == "after":
            values.mul_(2)
        return out

    return step


def inputs(n_q=1, dtype=torch.float32, heads=G * H):
    q = torch.randn(B, heads, n_q, D).to(dtype)
    keys, values = (torch.randn(B, H, N, D).to(dtype) for _ in range(2))
    return q, keys, values, torch.randn(B, H, 1, D).to(dtype), torch.tensor([17])


@pytest.fixture
def everywhere(monkeypatch):
    """Whatever the GPU, which is not there: a call gains whose heads are repeated."""
    monkeypatch.setattr(choose, "_gains_unrepeated", lambda call, shape: call.repeated > 1)


def compiled(step, *given, **options):
    torch._dynamo.reset()
    return torch.compile(step, backend="sage", fullgraph=True, options=options)(*given)


@pytest.mark.parametrize("mask", [True, False], ids=["mask", "no mask"])
@pytest.mark.parametrize("repeat", [expanded, interleaved])
def test_sdpa_takes_the_heads_that_a_static_cache_holds(everywhere, by_inductor, repeat, mask):
    given = inputs()
    copies = [x.clone() for x in given]
    step = decoder(repeat, mask)
    out = compiled(step, *copies, **{"sage.strict": True})  # which does not refuse it
    torch.testing.assert_close(out, step(*given))
    for found, expected in zip(copies, given):
        torch.testing.assert_close(found, expected)  # the caches were written as before
    (site,) = sage_inductor.report()
    assert not site.rewritten
    assert site.reason.startswith(f"SDPA, heads not repeated: {H} of k and v for {G * H} of q; ")
    assert sage_inductor.report().verdict == (
        "0 of 1 attention calls use sage on CPU; 1 stays: SDPA, heads not repeated"
    )


@pytest.mark.parametrize("write", ["between", "after"])
def test_a_cache_that_is_written_to_later_stays_repeated(everywhere, write):
    given, step = inputs(), decoder(expanded, write=write)
    out = compiled(step, *(x.clone() for x in given))
    torch.testing.assert_close(out, step(*given))
    (site,) = sage_inductor.report()
    assert "heads not repeated" not in site.reason


def test_off_leaves_the_repeats(everywhere):
    compiled(decoder(expanded), *inputs(), **{"sage.recipe": "off"})
    (site,) = sage_inductor.report()
    assert site.reason == "the recipe is 'off'"


# -- where it gains ----


@contextlib.contextmanager
def gpu(capability, cudnn=91900, enabled=True):
    with (
        on_gpu(capability),
        mock.patch.object(torch.backends.cudnn, "version", lambda: cudnn),
        mock.patch.object(torch.backends.cuda, "cudnn_sdp_enabled", lambda: enabled),
    ):
        yield


def site_of(
    n_q=1, D=128, dtype=torch.bfloat16, G=4, requires_grad=False, where=((9, 0),), batch=1,
    mask=None, N=4096, **settings,
):  # fmt: skip
    """The site and the node of a call with repeated heads, on tensors of a GPU. where: what `gpu` is
    given. mask: its dtype; None: q's, which SDPA adds."""
    graph = torch.fx.Graph()
    with FakeTensorMode():
        q, keys, k = (
            torch.empty(b, heads, n, D, device="cuda", dtype=dtype)
            for b, heads, n in ((batch, 8 * G, n_q), (1, 8, N), (1, 8 * G, N))
        )
        mask = torch.empty(1, 1, 1, N, device="cuda", dtype=mask or dtype)
        out = torch.empty_like(q).requires_grad_(requires_grad)
    values = {"q": q, "keys": keys, "values": keys, "mask": mask}
    q, *caches, mask = placeholders(graph, values)
    repeat = torch.repeat_interleave
    repeated = [valued(graph.call_function(repeat, (x, G), {"dim": 1}), k) for x in caches]
    call = graph.call_function(TARGETS[0], (q, *repeated), {"attn_mask": mask})
    graph.output(valued(call, out))
    module = torch.fx.GraphModule({}, graph)
    with gpu(*where):
        (site,) = rewrite(module, Settings(**settings))
    targets = torch.ops.sage.decode.default, *TARGETS
    (call,) = (node for node in module.graph.nodes if node.target in targets)
    return site, call


@pytest.mark.parametrize(
    "given",
    [
        {}, {"n_q": 2}, {"n_q": 16}, {"D": 256}, {"dtype": torch.float16}, {"G": 1}, {"N": 256},
        {"where": ((9, 0), 91500)}, {"where": ((9, 0), 91900, False)},
    ],
    ids=str,
)  # fmt: skip
def test_on_hopper_few_queries_are_decoded(given):
    site, call = site_of(**given, mask=torch.bool)
    assert site.recipe == "decode" and site.reason == "exact, faster than SDPA from 256 keys on"
    if given.get("G") != 1:
        assert [str(x) for x in call.args[:3]] == ["q", "keys", "values"]
    start, end, mask, is_run = (call.args[i] for i in (3, 4, 8, 9))
    seen = start.args[0]
    assert seen.target is torch.ops.sage.seen_range.default and seen.args == (mask,)
    assert [x.args[1] for x in (start, end)] == [0, 1]
    if given.get("n_q", 1) == 1:
        assert is_run.args == (seen, 2)
    else:
        assert is_run is None  # one row of the mask for all queries is no run of each


@pytest.mark.parametrize(
    "given",
    [
        {"n_q": 17}, {"where": ((8, 9),)}, {"where": ((10, 0),)}, {"dtype": torch.float32},
        {"requires_grad": True}, {"recipe": "off"}, {"N": 255}, {"recipe": "sage2-8b"}, {"D": 72},
    ],
    ids=str,
)  # fmt: skip
def test_others_are_not_decoded(given):
    site, call = site_of(**given, mask=torch.bool)
    assert site.recipe is None and call.target in TARGETS


def test_many_heads_of_few_keys_are_not_decoded():
    """The cache of the test is one for all batches: it counts as often as it is read."""
    for batch, n_q, recipe in ((16, 1, "decode"), (17, 1, None), (17, 2, "decode")):
        assert site_of(n_q, batch=batch, mask=torch.bool, N=512)[0].recipe == recipe


def test_many_keys_of_head_dim_64_are_not_decoded():
    """By the cache's whole length."""
    for given, recipe in (
        ({}, "decode"), ({"N": 2**15 + 1}, None), ({"batch": 2}, None), ({"n_q": 2, "batch": 2}, "decode"),
        ({"D": 80, "batch": 2}, "decode"), ({"D": 48, "batch": 2}, None),
    ):  # fmt: skip
        site, _ = site_of(**{"D": 64, "N": 2**15} | given, mask=torch.bool)
        assert site.recipe == recipe and (recipe or site.decision.unrepeats), given


def test_on_hopper_one_query_reads_the_heads_as_they_are():
    """One cache for all batches is expanded, and stays so."""
    site, call = site_of()
    assert [str(x) for x in call.args] == ["q", "keys", "values", "mask", "0.0", "False"]
    assert call.kwargs == {"scale": None, "enable_gqa": True}
    of_two, expanded = site_of(batch=2)
    assert site.decision.unrepeats and of_two.decision.unrepeats
    assert [x.target for x in expanded.args[1:3]] == [torch.ops.aten.expand.default] * 2
    expanded.graph.lint()


@pytest.mark.parametrize(
    "given",
    [
        {"n_q": 2}, {"D": 256}, {"dtype": torch.float32}, {"G": 1}, {"requires_grad": True},
        {"where": ((8, 0),)}, {"where": ((10, 0),)}, {"where": ((9, 0), 91500)},
        {"where": ((9, 0), 91900, False)}, {"recipe": "off"},
    ],
    ids=str,
)  # fmt: skip
def test_elsewhere_the_repeats_stay(given):
    site, call = site_of(**given)
    assert not site.decision.unrepeats and not site.rewritten
    assert [x.target for x in call.args[1:3]] == [torch.repeat_interleave] * 2
    assert "enable_gqa" not in call.kwargs


# -- models ----

SIZES = dict(
    hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=100, head_dim=16,
)  # fmt: skip


def cached(name: str):
    """A model of transformers with a cache of 5 tokens, a step of it and its arguments."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**SIZES | {"num_attention_heads": 8})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()

    def run(step):
        cache = transformers.StaticCache(config, max_cache_len=32)
        tokens = torch.arange(10)[None] % 7
        outputs = []
        with torch.no_grad():
            model(tokens[:, :5], past_key_values=cache)
            for i in range(5, 8):
                outputs.append(step(tokens[:, i : i + 1], past_key_values=cache).logits)
        return torch.cat(outputs, 1)

    return model, run


@pytest.mark.models
@pytest.mark.parametrize("name", ["Llama", swept("Qwen3"), "Mistral", swept("Gemma")])
def test_a_decoder_with_a_static_cache_gives_the_same_logits(everywhere, name):
    torch.manual_seed(0)
    model, run = cached(name)
    expected = run(model)
    torch._dynamo.reset()
    found = run(torch.compile(model, backend="sage", fullgraph=True))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    sites = sage_inductor.report()
    assert len(sites) in (2, 4)  # a sliding cache compiles its length as a number, twice
    assert all(site.reason.startswith("SDPA, heads not repeated: 2 of k") for site in sites)


# -- what is slow, of models whose graphs are captured on a CPU and judged as on a GPU ----

SHORT = "no known gain: a call with fewer than 256 queries or keys"


def sites_on_a_gpu(run, *where) -> list:
    """The sites of the graphs that Dynamo captures in ``run(backend)``, as if all tensors were on a
    GPU of this capability."""
    sites = []

    def see(gm, example_inputs):
        for node in gm.graph.nodes:
            x = node.meta.get("example_value")
            if isinstance(x, torch.Tensor):
                like = {"dtype": x.dtype, "device": "cuda"}
                with x.fake_mode:
                    valued(node, torch.empty_strided(x.shape, x.stride(), **like))
        with gpu(*where):
            sites.extend(rewrite(gm, Settings()))
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        run(see)
    return sites


def steps(cache: str, queries: int = 1, dtype=torch.bfloat16):
    """A Llama that reads a cache of 8 tokens, compiled."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**SIZES)
    model = transformers.LlamaForCausalLM(config).eval().to(dtype)
    tokens = torch.arange(8 + queries)[None]

    def run(backend):
        made = {
            "static": lambda: transformers.StaticCache(config, max_cache_len=64),
            "fp8": lambda: transformers.QuantizedCache("fp8", config),
        }[cache]()
        model(tokens[:, :8], past_key_values=made)
        torch.compile(model, backend=backend)(tokens[:, 8:], past_key_values=made)

    return run


@pytest.mark.models
@pytest.mark.parametrize("queries, where", [(1, [(8, 9)]), (16, [(9, 0)]), (1, [(9, 0), 91500])])
def test_a_static_cache_of_which_heads_are_copied_says_so_and_names_the_switch(queries, where):
    """Its 64 keys are too few to be decoded."""
    untimed = f"; {reasons.DECODE_UNTIMED(queries)}" if where[0] == (8, 9) else ""
    for site in sites_on_a_gpu(steps("static", queries), *where):
        copies = f"2 heads of k and v are copied to 4 at each call, for N_q={queries}"
        assert site.reason == f"{copies}; {SHORT}{untimed}" and site.k == (1, 2, 64, 16)
        (told,) = remedies([site])
        assert told.startswith("heads of k and v are copied: in transformers TRANSFORMERS_SDPA_")


@pytest.mark.models
def test_transformers_switch_leaves_the_copies_out(monkeypatch):
    monkeypatch.setenv("TRANSFORMERS_SDPA_FORCE_GQA", "1")
    sites = sites_on_a_gpu(steps("static"), (8, 9))
    assert [site.reason for site in sites] == [f"{SHORT}; {reasons.DECODE_UNTIMED(1)}"] * 2


@pytest.mark.models
def test_many_queries_and_caches_whose_heads_are_not_copied_are_no_such_rows():
    for run, where in [(steps("static", 17), (8, 9)), (steps("static"), (9, 0))]:
        assert not [x for x in sites_on_a_gpu(run, where) if "are copied" in x.reason]


@pytest.mark.models
def test_of_fp32_the_dtype_is_what_to_change_first():
    first, _ = sites_on_a_gpu(steps("static", dtype=torch.float32), (8, 9))
    assert first.reason.endswith("; 2 heads of k and v are copied to 4 at each call, for N_q=1")
    assert first.why.cause.remedy.startswith("run the model in bfloat16")


@pytest.mark.models
@pytest.mark.parametrize("queries", [1, 4])
def test_transformers_fp8_cache_is_read_as_codes(queries, monkeypatch):
    """On Hopper. Elsewhere it is decoded before the call, and the row says so."""
    monkeypatch.setattr(choose, "DECODED_CODES", 1)
    monkeypatch.setattr(choose, "DECODES_FROM", 1)
    for site in sites_on_a_gpu(steps("fp8", queries), (9, 0)):
        assert site.recipe == "decode" and site.reason == "exact: k and v are read as codes"
        assert site.k == (1, 2, 8 + queries, 16)  # not repeated
    sites = sites_on_a_gpu(steps("fp8", queries), (8, 9))
    decoded = "k is decoded from float8_e4m3fn codes by `mul` before the call"
    untimed = str(reasons.DECODE_UNTIMED(queries))
    assert [site.reason for site in sites] == [f"{decoded}; {SHORT}; {untimed}"] * 2
    (told,) = remedies(sites)
    assert told.startswith("k is decoded from float8_e4m3fn codes: a cache in 16 bits is faster")
    torch._dynamo.reset()
    steps("fp8")("sage")
    report = sage_inductor.report()
    assert [site.reason.endswith(f"; {decoded}") for site in report] == [True] * 2
    assert report[0].why.cause.remedy.startswith("move the model to a GPU")


@pytest.mark.parametrize(
    "shape, capability, force, reason",
    [
        ((16, 8, 1024, 128), (9, 0), False, "exact: k and v are read as codes"),
        ((8, 16, 2048, 64), (9, 0), False, "exact: k and v are read as codes"),
        ((16, 8, 1023, 128), (9, 0), False, None), ((128, 8, 255, 128), (9, 0), False, None),
        ((16, 8, 1024, 128), (8, 9), False, None), ((1, 8, 64, 128), (8, 9), True, "forced, exact"),
        ((16, 8, 1024, 128), (8, 0), True, None),  # has no E4M3
    ],
)  # fmt: skip
def test_an_fp8_cache_is_read_as_codes_where_that_was_faster(shape, capability, force, reason):
    graphs, (B, *_, D) = [], shape

    def step(q, codes, scale):
        k = (codes.float() * scale).to(q.dtype)
        return F.scaled_dot_product_attention(q, k, k, enable_gqa=True)

    with FakeTensorMode(), gpu(capability), op_by_op(graphs.append) as run:
        q = torch.empty(B, 32, 1, D, device="cuda", dtype=torch.bfloat16)
        codes = torch.empty(shape, device="cuda", dtype=torch.float8_e4m3fn)
        run(step, (q, codes, torch.empty((), device="cuda")), {})
        (site,) = rewrite(graphs[0], Settings(force=force))
    assert (site.reason == reason) == (site.recipe == "decode") == bool(reason), site


def torchao_step(q, codes, scales, new):
    """As torchao's AffineQuantizedKVCache: the product holds the new token as it came."""
    k = codes * scales
    k[:, :, -1:] = new
    k = k.repeat_interleave(G, dim=1)
    return F.scaled_dot_product_attention(q, k, k)


@torch.library.custom_op("other::dequantize_rows", mutates_args=())
def dequantize_rows(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return codes * scales


dequantize_rows.register_fake(lambda codes, scales: codes * scales)


def attends(decode):
    """To keys that are k and v."""

    def step(q, codes, scales, new):
        k = decode(q, codes, scales, new)
        return F.scaled_dot_product_attention(q, k, k, enable_gqa=True)

    return step


DECODED = {  # and by what
    "torchao": (torchao_step, "mul"),
    # As HQQ's and quanto's layers of transformers, which keep the last tokens in 16 bits.
    "with a residual": (
        attends(lambda q, codes, scales, new: torch.cat([(codes.to(q.dtype) - 3) * scales, new], dim=-2)), "mul"),
    "cast alone": (attends(lambda q, codes, *_: codes.to(q.dtype)), "to"),
    "dequantized": (attends(lambda q, codes, scales, new: dequantize_rows(codes, scales)), "other::dequantize_rows"),
    "of a bool": (attends(lambda q, codes, scales, new: new.expand(-1, -1, N, -1) * (codes > 0)), None),
    "of 8-bit weights": (attends(
        lambda q, codes, scales, new: F.linear(new.expand(-1, -1, N, -1), (codes * scales)[0, 0, :D])), None),
}  # fmt: skip


@pytest.mark.parametrize("step, by", DECODED.values(), ids=DECODED.keys())
def test_codes_are_seen_whatever_decodes_them_and_nothing_else_is(step, by):
    given = (
        torch.randn(1, H * G, 1, D).bfloat16(), torch.randint(-99, 99, (1, H, N, D)).to(torch.int8),
        torch.rand(1, H, N, 1).bfloat16(), torch.randn(1, H, 1, D).bfloat16(),
    )  # fmt: skip
    run = lambda backend: torch.compile(step, backend=backend, fullgraph=True)(*given)  # noqa: E731
    (site,) = sites_on_a_gpu(run, (9, 0))
    assert not site.rewritten and ("codes" in site.reason) == bool(by)
    told = f"k is decoded from int8 codes by `{by}` before the call; "
    assert site.reason.startswith(told if by else "")
