"""A few queries of a cache: which calls become ``sage::decode``, and what the model computes then."""

import pytest
import torch
import torch.nn.functional as F
from support import on_gpu, placeholders, swept, valued
from torch._subclasses.fake_tensor import FakeTensorMode

import sage_inductor
from sage_inductor.choose.decide import rewrite
from sage_inductor.ops.call_shape import CallShape
from sage_inductor.options import Settings
from sage_inductor.patterns.sdpa import TARGETS

pytestmark = pytest.mark.usefixtures("graphs_run_op_by_op")

B, H, G, N, D = 2, 2, 3, 150, 32
EMULATED = {"sage.emulate": True}


def compiled(function, *given, fullgraph=True, **options):
    torch._dynamo.reset()
    return torch.compile(function, backend="sage", fullgraph=fullgraph, options=options)(*given)


def decoder(q, keys, values, new, end):
    """A step of a static cache: the new tokens are written, then everything set is read."""
    N_q = q.shape[2]
    place = end + torch.arange(N_q)
    keys.index_copy_(2, place, new)
    values.index_copy_(2, place, -new)
    seen = torch.arange(N) <= place[:, None]
    k, v = (x[:, :, None].expand(B, H, G, N, D).reshape(B, H * G, N, D) for x in (keys, values))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[None, None])


def inputs(N_q: int, end: int, dtype=torch.float16):
    q, new = torch.randn(B, H * G, N_q, D).to(dtype), torch.randn(B, H, N_q, D).to(dtype)
    keys, values = (torch.randn(B, H, N, D).to(dtype) for _ in range(2))
    for x in (keys, values):
        x[:, :, end:] = float("nan")  # what was never written
    return q, keys, values, new, torch.tensor([end])


@pytest.mark.parametrize("N_q, end", [(1, 0), (1, 149), (4, 77), (16, 100)])
def test_a_step_of_a_cache_is_exact_and_reads_what_is_filled(N_q, end, by_inductor):
    given = inputs(N_q, end)
    out = compiled(decoder, *(x.clone() for x in given), **EMULATED)
    exact = decoder(*(x.nan_to_num() if x.is_floating_point() else x for x in given))
    torch.testing.assert_close(out, exact, rtol=4e-3, atol=4e-3)
    (site,) = sage_inductor.report()
    assert (site.recipe, site.reason) == ("decode", "emulated, exact")
    assert sage_inductor.report().verdict == "1 of 1 attention calls use decode"


def masked(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def seen(*shape):
    return torch.rand(shape).lt(0.7)


STAYS = {  # what sage::decode does not compute, of q [2, 6, N_q, D]: another op does, or none
    "17 queries": (17, torch.float16, seen(2, 1, 17, N)), "fp32": (3, torch.float32, seen(2, 1, 3, N)),
    "a head's mask": (3, torch.float16, seen(2, 6, 3, N)), "a bias": (3, torch.float16, torch.randn(2, 1, 3, N).half()),
    "three dimensions": (3, torch.float16, seen(1, 3, N)), "one key's": (3, torch.float16, seen(2, 1, 3, 1)),
}  # fmt: skip
TAKEN = {
    "a batch's": (3, torch.float16, seen(2, 1, 3, N)), "every query's": (16, torch.bfloat16, seen(1, 1, 1, N)),
    "one query": (1, torch.bfloat16, seen(2, 1, 1, N)),
}  # fmt: skip


@pytest.mark.parametrize("name", [*STAYS, *TAKEN])
def test_which_calls_decode(name):
    N_q, dtype, mask = (STAYS | TAKEN)[name]
    q, k, v = (torch.randn(2, h, n, D).to(dtype) for h, n in ((6, N_q), (2, N), (2, N)))
    out = compiled(masked, q, k, v, mask, **EMULATED)
    (site,) = sage_inductor.report()
    assert (site.recipe == "decode") == (name in TAKEN)
    if name in TAKEN:
        exact = masked(*(x.double() for x in (q, k, v)), mask)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(out.double(), exact, rtol=4 * eps, atol=4 * eps)


def test_a_recipe_by_name_computes_the_call_and_gradients_stay_exact_attentions():
    q, k, v = (torch.randn(2, h, n, D).half() for h, n in ((6, 3), (2, N), (2, N)))
    compiled(masked, q, k, v, seen(2, 1, 3, N), **EMULATED, **{"sage.recipe": "sage2-8b"})
    assert [site.recipe for site in sage_inductor.report()] == ["sage2-8b"]
    compiled(masked, q.requires_grad_(), k, v, seen(2, 1, 3, N), **EMULATED).sum().backward()
    assert [site.recipe for site in sage_inductor.report()] == ["sage2-8b"] and q.grad is not None


@pytest.mark.parametrize("force", [True, False])
def test_on_a_gpu_it_is_forced_where_nobody_timed_it(force):
    graph, shapes = torch.fx.Graph(), ((2, 8, 4, 64), (2, 2, 2 * N, 64), (2, 2, 2 * N, 64))
    with FakeTensorMode(), on_gpu((8, 9)):
        q, *kv = (torch.empty(x, dtype=torch.bfloat16, device="cuda") for x in shapes)
        mask = torch.empty(2, 1, 4, 2 * N, dtype=torch.bool, device="cuda")
        nodes = placeholders(graph, [q, *kv, mask], "val")
        call = graph.call_function(TARGETS[0], tuple(nodes), {"enable_gqa": True})
        graph.output(valued(call, torch.empty_like(q), "val"))
        gm = torch.fx.GraphModule({}, graph)
        (site,) = rewrite(gm, Settings(force=force))
    ops = [str(node.target) for node in gm.graph.nodes if "sage" in str(node.target)]
    if force:
        assert (site.recipe, site.reason) == ("decode", "forced, exact")
        assert ops == ["sage.seen_range.default", "sage.decode.default"]
    else:
        assert site.recipe is None and not ops
        assert site.reason.endswith("; sage::decode for N_q=4 was never timed")


@pytest.mark.parametrize("sizes, becomes", [
    ([(1, 1), (2, 1), (3, 1), (64, 1), (65, 1)], ["decode", "decode", None]),  # of H_kv = 2
    ([(2, 20), (2, 30), (2, 3), (2, 2), (2, 16), (2, 17)], [None, None, "decode"]),
])  # fmt: skip
def test_sizes_that_are_dynamic_decode_as_numbers_do(sizes, becomes, monkeypatch):
    """A second batch, and as many queries as speculative decoding happens to check."""
    monkeypatch.setattr(CallShape, "capability", (9, 0))
    run = torch.compile(masked, backend="sage", fullgraph=True, options={"sage.calibrate": False})
    for batch, N_q in sizes:
        q, k = (torch.randn(batch, *x, D).half() for x in ((6, N_q), (2, 2 * N)))
        mask = seen(1, 1, N_q, 2 * N)
        out, exact = run(q, k, k, mask), masked(q.double(), k.double(), k.double(), mask)
        torch.testing.assert_close(out.double(), exact, rtol=4e-3, atol=4e-3)
    assert [site.recipe for site in sage_inductor.report()] == becomes


def test_a_package_of_any_number_of_queries_holds_no_decode():
    q, k, mask = torch.randn(2, 6, 3, D).half(), torch.randn(2, 2, N, D).half(), seen(2, 1, 3, N)

    class Masked(torch.nn.Module):
        forward = staticmethod(masked)

    for most, recipe in ((16, "decode"), (17, "sage2-8b")):
        N_q = torch.export.Dim("N_q", min=2, max=most)
        shapes = {2: N_q}, None, None, {2: N_q}
        program = torch.export.export(Masked(), (q, k, k, mask), dynamic_shapes=shapes)
        (site,) = rewrite(program.module(), Settings(emulate=True, portable=True))
        assert site.recipe == recipe


# -- models ----

SIZES = dict(
    hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, head_dim=16,
    intermediate_size=64, vocab_size=50,
)  # fmt: skip


def model_of(family: str):
    import transformers

    config = getattr(transformers, f"{family}Config")(**SIZES)
    return getattr(transformers, f"{family}ForCausalLM")(config).half().eval()


@pytest.mark.models
@pytest.mark.parametrize(
    "family, padded",
    [
        ("Llama", True), swept("Mistral", False), swept("Llama", False), swept("Mistral", True),
    ],
)  # fmt: skip
def test_generate_gives_the_tokens_of_sdpa(family, padded):
    """Greedy, of left-padded prompts of a batch, with a static cache that `generate` makes."""
    model = model_of(family)
    ids = torch.randint(3, 50, (2, 7))
    given = dict(input_ids=ids, attention_mask=torch.ones_like(ids))
    if padded:
        given["attention_mask"][0, :3] = 0
    from transformers import GenerationConfig

    wanted = GenerationConfig(
        max_new_tokens=5, do_sample=False, cache_implementation="static", disable_compile=True,
        pad_token_id=0,
    )  # fmt: skip
    expected = model.generate(**given, generation_config=wanted)
    torch._dynamo.reset()
    forward = model.forward
    model.forward = torch.compile(forward, backend="sage", options=EMULATED, dynamic=False)
    tokens = model.generate(**given, generation_config=wanted)
    assert tokens.tolist() == expected.tolist()
    by = [site.recipe for site in sage_inductor.report() if site.q[2] == 1]
    assert by and set(by) == {"decode"}


@pytest.mark.models
def test_queries_of_speculative_decoding_read_a_static_cache():
    from transformers import StaticCache

    model = model_of("Llama")
    ids = torch.randint(3, 50, (1, 9))

    def logits(run):
        cache = StaticCache(config=model.config, max_cache_len=64)
        with torch.no_grad():
            model(ids[:, :5], past_key_values=cache)
            return run(ids[:, 5:], past_key_values=cache).logits

    expected = logits(model)
    torch._dynamo.reset()
    found = logits(torch.compile(model, backend="sage", fullgraph=True, options=EMULATED))
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert {site.recipe for site in sage_inductor.report()} == {"decode"}
