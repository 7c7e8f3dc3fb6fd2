"""Our attention under names of diffusers and transformers, and the ways their users compile.

Small models of random weights. On CPU recipes are emulated, on a GPU they are forced.
"""

import copy
import functools
import os
import sys

import models
import pytest
import support
import torch
import torch.nn.functional as F
from support import op_by_op, relative_l2, swept
from torch._dynamo.utils import counters

import sage_inductor
from sage_inductor import config
from sage_inductor.integrations import diffusers as integration
from sage_inductor.integrations.diffusers import sage_attention as diffusers_attention
from sage_inductor.integrations.transformers import sage_attention_forward

os.environ["HF_HUB_OFFLINE"] = "1"
pytestmark = pytest.mark.models
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")

LENGTHS = (5, 6, 8)  # of an image's side in patches, for a text tens of tokens


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Where models are made; their attention is rewritten at any length."""
    on_cpu = request.param == "cpu"
    with config.patch(emulate=on_cpu, force=not on_cpu), torch.no_grad():
        yield request.param


def ready(model, device):
    return model.eval().to(device, torch.float32 if device == "cpu" else torch.bfloat16)


def cast(inputs, device) -> dict:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return {k: x.to(device, dtype if x.is_floating_point() else None) for k, x in inputs.items()}


# -- the models ----


def flux(device):
    return of_sides(models.flux, device, *({"patches": side**2} for side in LENGTHS))


def wan(device):
    return of_sides(models.wan, device, *({"side": side} for side in LENGTHS))


def of_sides(make, device, *sizes):
    """A model, and inputs of each of the sizes."""
    model, inputs = zip(*(make(**each) for each in sizes))
    return ready(model[0], device), [cast(each, device) for each in inputs]


def tokens(device, length: int, padded: bool = True) -> dict:
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, : 10 * padded] = 0
    return cast({"input_ids": torch.randint(1, 100, (2, length)), "attention_mask": mask}, device)


def decoder(kind, device, padded=False):
    model = ready(models.decoder(transformers, kind), device)
    return model, [{**tokens(device, 10 * n, padded), "use_cache": False} for n in LENGTHS]


llama, qwen = (functools.partial(decoder, kind) for kind in ("Llama", "Qwen2"))
llama_padded = functools.partial(llama, padded=True)


# -- the same as backend="sage" ----


def use_sdpa(model):
    if isinstance(model, diffusers.ModelMixin):
        model.set_attention_backend("native")
    else:
        model.set_attn_implementation("sdpa")


def use_ours(model):
    if isinstance(model, diffusers.ModelMixin):
        sage_inductor.register("diffusers")
        model.set_attention_backend("sage_inductor")
    else:
        sage_inductor.register("transformers")
        model.set_attn_implementation("sage_inductor")


def outputs(model, inputs, backend=None, dynamic=None) -> list:
    """Of each of the inputs. By itself torch compiles two graphs, the second for any length."""
    torch._dynamo.reset()
    counters.clear()
    run = (
        model
        if backend is None
        else torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    )
    found = [run(**each)[0] for each in inputs]
    assert counters["stats"]["unique_graphs"] == (0 if backend is None else 1 if dynamic else 2)
    return found


def check_registered(made, device, *backends, dynamic=None) -> None:
    """Registered, in eager and under each backend, a model computes what backend="sage" makes of its
    SDPA."""
    model, inputs = made
    use_sdpa(model)
    exact = outputs(model, inputs)
    with op_by_op(device == "cpu"):
        expected = outputs(model, inputs, "sage")
    use_ours(model)
    for backend in (None, *backends):
        found = outputs(model, inputs, backend, dynamic)
        sites = sage_inductor.report()
        assert len(sites) and len(sites.rewritten) == len(sites), str(sites)
        assert {site.spelling for site in sites} == {"sage_inductor.attention"}
        for actual, same, sdpas in zip(found, expected, exact):
            difference = relative_l2(same, sdpas)
            error = relative_l2(actual, same)
            # Rounded q and k may fall on another code. In bf16 the rest of the model rounds, too.
            assert error < 0.2 * difference if device == "cpu" else error < 0.03, (
                error,
                difference,
            )


@pytest.mark.parametrize(
    "make, others",
    [(llama, ["eager"]), *(swept(make, ["aot_eager"]) for make in (flux, llama_padded, qwen, wan))],
)
def test_registered_attention_gives_what_the_backend_gives(make, others, device):
    """Under another backend attention is decided when Dynamo traces it."""
    with op_by_op(device == "cpu"):
        check_registered(make(device), device, "sage", *others)


@pytest.mark.parametrize(
    "make, backends", [(llama_padded, ["inductor"]), (flux, ["sage", "inductor"])]
)
@pytest.mark.sweep
def test_registered_attention_compiles(make, backends, device):
    """By Inductor, for any length."""
    check_registered(make(device), device, *backends, dynamic=True)


@pytest.mark.parametrize("is_causal", [None, True])
def test_a_compiled_decode_of_one_query_sees_every_key(is_causal):
    """transformers says nothing, or is_causal=True, and gives no mask: SDPA's would be of the first
    key alone."""
    module = torch.nn.Module()
    module.is_causal, module.num_key_value_groups = True, 2

    def decode(q, k, v):
        return sage_attention_forward(module, q, k, v, None, is_causal=is_causal)[0]

    compiled = torch.compile(decode, backend="sage", fullgraph=True)
    with config.patch(emulate=True), op_by_op():
        for N in (70, 71, 90):  # the second is compiled for any
            q, k, v = (torch.randn(2, H, n, 64) for H, n in ((4, 1), (2, N), (2, N)))
            exact = F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)
            assert 0 < relative_l2(compiled(q, k, v), exact) < 0.1
            assert torch.equal(decode(q, k, v), exact)  # in eager it is SDPA's
    sites = sage_inductor.report()
    assert len(sites) == 2 and all(site.recipe and site.mask == "none" for site in sites)


@pytest.mark.parametrize("emulate", [False, True])
def test_a_prefill_reads_what_is_set_of_a_static_cache(emulate):
    q, k, v = support.random_qkv(N=40, N_kv=100)
    k[:, :, 40:] = v[:, :, 40:] = torch.nan
    with config.patch(emulate=emulate):
        found, _ = sage_attention_forward(torch.nn.Module(), q, k, v, None)
    exact = F.scaled_dot_product_attention(q, k[:, :, :40], v[:, :, :40], is_causal=True)
    assert relative_l2(found, exact.transpose(1, 2)) < 0.1


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_causal_query_of_diffusers_is_sdpas(dynamic):
    """One query, is_causal=True, no mask: SDPA's sees the first key."""
    q, k, v = (torch.randn(2, n, 2, 64) for n in (1, 70, 70))  # [B, N, H, D]

    def attend(q, k, v):
        return diffusers_attention(q, k, v, is_causal=True)

    compiled = torch.compile(attend, backend="sage", fullgraph=True, dynamic=dynamic)
    with config.patch(emulate=True), op_by_op():
        for found in (compiled(q, k, v), attend(q, k, v)):
            assert relative_l2(found, v[:, :1]) < 0.05


@pytest.mark.parametrize(
    "given",
    [{"dropout_p": 1.0}, {"return_lse": True}, {"of_keys": True}, {"enable_gqa": True}, {"scale": 1.0}],
    ids="-".join,
)  # fmt: skip
def test_arguments_of_diffusers_are_honoured(given):
    H_kv = 1 if "enable_gqa" in given else 2
    q, k, v = (torch.randn(2, 70, H, 64) for H in (2, H_kv, H_kv))  # [B, N, H, D]
    mask = torch.arange(70)[None].expand(2, -1) < 50
    mask = mask if given.pop("of_keys", False) else mask[:, None, None].expand(-1, 2, 70, -1)
    with config.patch(emulate=True):
        found = diffusers_attention(q, k, v, mask, **given)
    if "dropout_p" in given:
        assert not found.any()  # every weight is dropped
        return
    out, lse = found if "return_lse" in given else (found, None)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    visible = mask.reshape(2, -1, mask.shape[-2] if mask.ndim == 4 else 1, 70)
    exact = F.scaled_dot_product_attention(
        q, k, v, visible, scale=given.get("scale"), enable_gqa=H_kv == 1
    )
    assert 0 < relative_l2(out, exact.transpose(1, 2)) < 0.1
    if lse is not None:
        scores = (q @ k.mT / 8).masked_fill(~visible, -torch.inf)
        torch.testing.assert_close(lse, scores.logsumexp(-1), atol=0.02, rtol=0.01)


@pytest.mark.parametrize("N_q", [2, 33])
def test_a_mask_of_keys_of_diffusers_has_as_many_as_the_keys(N_q):
    """Text that an image reads is of another length."""
    q, k, v = (torch.randn(2, N, 2, 64) for N in (N_q, 70, 70))  # [B, N, H, D]
    mask = torch.arange(70) < torch.tensor([[50], [20]])
    with config.patch(emulate=True):
        found = diffusers_attention(q, k, v, mask)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    exact = F.scaled_dot_product_attention(q, k, v, mask[:, None, None])
    assert relative_l2(found, exact.transpose(1, 2)) < 0.1


@pytest.mark.parametrize("name", ["softcap", "s_aux"])
def test_what_transformers_asks_beyond_sdpa_is_refused(name):
    q = torch.randn(1, 2, 8, 64)
    with pytest.raises(ValueError, match=f'attention "sage" does not support {name}: use "eager"'):
        sage_attention_forward(torch.nn.Module(), q, q, q, None, **{name: torch.ones(2)})
    with config.patch(emulate=True):  # what asks for nothing is not left to SDPA
        off = {name: None, "output_attentions": False}
        sage_attention_forward(torch.nn.Module(), q, q, q, None, **off)
    assert sage_inductor.report().rewritten


def test_grouped_heads_of_dynamic_sizes_are_attended_to():
    class Attend(torch.nn.Module):
        num_key_value_groups = 2

        def forward(self, q, k, v):
            return sage_attention_forward(self, q, k, v, None)[0]

    q, k, v = support.random_qkv(H_kv=2)
    with op_by_op():
        compiled = torch.compile(Attend(), backend="sage", dynamic=True, fullgraph=True)
        for N in (32, 9):
            inputs = [x[:, :, :N] for x in (q, k, v)]
            torch.testing.assert_close(compiled(*inputs), Attend()(*inputs))


def test_what_only_transformers_sdpa_has_goes_there():
    q, bias = torch.randn(1, 2, 8, 64), torch.randn(1, 2, 8, 8)
    exact = F.scaled_dot_product_attention(q, q, q, bias).transpose(1, 2)
    with config.patch(emulate=True):
        given = dict(is_causal=False, position_bias=bias, softcap=None)
        out, _ = sage_attention_forward(torch.nn.Module(), q, q, q, None, **given)
        torch.testing.assert_close(out, exact)
        out, _ = sage_attention_forward(torch.nn.Module(), q, q, q, None, dropout=1.0)
        assert not out.any()
    assert len(sage_inductor.report()) == 0


# -- registering ----


def test_another_library_is_refused_by_name():
    with pytest.raises(
        ValueError, match='must be "comfyui", "diffusers" or "transformers", got \'vllm\''
    ):
        sage_inductor.register("vllm")


@pytest.mark.parametrize("library", ["diffusers", "transformers"])
def test_a_library_that_is_missing_is_named(library, monkeypatch):
    integration.register.cache_clear()
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=library):
        sage_inductor.register(library)


@pytest.mark.parametrize(
    "library, module, name",
    [
        ("diffusers", "models.attention_dispatch", "_AttentionBackendRegistry"),
        ("diffusers", "models.attention_dispatch", "_check_shape"),
        ("transformers", "masking_utils", "sdpa_mask"),
        ("transformers", "integrations.sdpa_attention", "use_gqa_in_sdpa"),
    ],
)
def test_a_library_that_has_changed_is_named_with_what_works(library, module, name, monkeypatch):
    integration.register.cache_clear()
    monkeypatch.delattr(f"{library}.{module}.{name}")
    with pytest.raises(ImportError, match=f'for {library} [0-9.]+ .* backend="sage".*{name}'):
        sage_inductor.register(library)


# -- what docs/guide/models.md has snippets of: test_docs.py runs them, here are their values ----


def test_a_model_of_diffusers_with_our_backend_in_eager():
    with config.patch(emulate=True), torch.no_grad():
        model, (inputs, *_) = flux("cpu")
        exact = model(**inputs)[0]
        use_ours(model)
        assert 0 < relative_l2(model(**inputs)[0], exact) < 0.02
    assert [site.module for site in sage_inductor.report().rewritten] == [""]
    name = diffusers.models.attention_dispatch.AttentionBackendName["SAGE_INDUCTOR"]
    assert (name.name, name.value) == ("SAGE_INDUCTOR", "sage_inductor")


def lora(rank: int) -> dict:
    """An adapter of `rank` for a projection of the transformer that `flux` makes."""
    name = "transformer.transformer_blocks.0.attn.to_q"
    down, up = torch.randn(rank, 128), torch.randn(128, rank)
    return {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}


def test_a_lora_is_swapped_in_a_compiled_model():
    pytest.importorskip("peft")
    model, (inputs, *_) = flux("cpu")
    exact, second = copy.deepcopy(model), lora(4)
    model.enable_lora_hotswap(target_rank=8)
    model.load_lora_adapter(lora(8), adapter_name="style")
    model.compile(backend="sage", fullgraph=True)
    with config.patch(emulate=True), torch.no_grad(), op_by_op():
        model(**inputs)
        with torch._dynamo.config.patch(error_on_recompile=True):
            model.load_lora_adapter(second, adapter_name="style", hotswap=True)
            found = model(**inputs)[0]
        modules = {site.module for site in sage_inductor.report().rewritten}
        assert modules == {"single_transformer_blocks.0.attn", "transformer_blocks.0.attn"}
        exact.load_lora_adapter(second, adapter_name="style")
        assert 0 < relative_l2(found, exact(**inputs)[0]) < 0.02


def registered(load):
    sage_inductor.register("transformers")
    return load(attn_implementation="sage"), {}


def prefilled(load):
    model = load()
    model.forward = torch.compile(model.forward, backend="sage")
    return model, {"disable_compile": True}


def by_generate(load, **given):
    options = {"sage.recipe": "sage1"}
    compiled = transformers.CompileConfig(backend="sage", mode=None, options=options)
    return load(), {"compile_config": compiled, **given}


@pytest.mark.parametrize(
    "make, queries",
    [
        (registered, [70]),
        (prefilled, [70, 1]),
        (functools.partial(by_generate, prefill_chunk_size=35), [35, 1]),
        (by_generate, [1]),  # mode=None alone: the prefill is not compiled
    ],
    ids=["registered", "prefill", "chunked prefill", "decode"],
)
def test_tokens_that_a_model_generates(make, queries, tmp_path, monkeypatch):
    """Batches are padded on the left. generate compiles by itself on a GPU only."""
    monkeypatch.setattr(transformers.CompileConfig, "_compile_all_devices", True)
    torch.manual_seed(0)
    model, _ = llama("cpu")
    model.save_pretrained(tmp_path)
    load = functools.partial(transformers.AutoModelForCausalLM.from_pretrained, tmp_path)
    given = {**tokens("cpu", 70), "max_new_tokens": 8}
    # transformers has Inductor compile the decode of `registered`
    with config.patch(emulate=True), torch.no_grad(), op_by_op(make is not prefilled):
        expected = model.generate(**given)
        made, options = make(load)
        assert torch.equal(
            made.generate(**given, cache_implementation="static", **options), expected
        )
    sites = sage_inductor.report()
    assert [site.q[2] for site in sites.rewritten] == queries and not sites.refused, str(sites)
