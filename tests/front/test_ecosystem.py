"""Our attention under names of diffusers and transformers, and the ways their users compile.

Small models of random weights. On CPU recipes are emulated, on a GPU they are forced.
"""

import os
import subprocess
import sys

import pytest
import torch
from support import relative_l2
from torch._dynamo.utils import counters

import sage_inductor
from sage_inductor import config

os.environ["HF_HUB_OFFLINE"] = "1"
pytestmark = pytest.mark.models
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")

LENGTHS = (4, 6, 8)  # of an image's side in patches, for a text tens of tokens


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
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=64,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=(16, 24, 24),
    )  # fmt: skip
    return ready(model, device), [
        cast({
            "hidden_states": torch.randn(1, side**2, 16),
            "encoder_hidden_states": torch.randn(1, 16, 32),
            "pooled_projections": torch.randn(1, 32),
            "timestep": torch.tensor([0.5]),
            "img_ids": torch.randn(side**2, 3),
            "txt_ids": torch.zeros(16, 3),
        }, device)
        for side in LENGTHS
    ]  # fmt: skip


def wan(device):
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=64, in_channels=4,
        out_channels=4, text_dim=32, freq_dim=32, ffn_dim=256, num_layers=1, cross_attn_norm=True,
        rope_max_seq_len=32,
    )  # fmt: skip
    return ready(model, device), [
        cast({
            "hidden_states": torch.randn(1, 4, 3, 2 * side, 2 * side),
            "encoder_hidden_states": torch.randn(1, 16, 32),
            "timestep": torch.tensor([500]),
        }, device)
        for side in LENGTHS
    ]  # fmt: skip


SIZES = dict(
    hidden_size=256, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    head_dim=64, intermediate_size=256, vocab_size=100, pad_token_id=0, eos_token_id=None,
    bos_token_id=None,
)  # fmt: skip


def tokens(device, length: int, padded: bool = True) -> dict:
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, : 10 * padded] = 0
    return cast({"input_ids": torch.randint(1, 100, (2, length)), "attention_mask": mask}, device)


def llama(device, padded=False):
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    inputs = [{**tokens(device, 10 * n, padded), "use_cache": False} for n in LENGTHS]
    return ready(model, device), inputs


def llama_padded(device):
    return llama(device, padded=True)


def qwen(device):
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES))
    return ready(model, device), [
        {**tokens(device, 10 * n, False), "use_cache": False} for n in LENGTHS
    ]


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
        model.set_attn_implementation("sage")


def outputs(model, inputs, backend=None) -> list:
    """Of each of the inputs; of as many graphs as were compiled, all but the first dynamic."""
    torch._dynamo.reset()
    counters.clear()
    run = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    found = [run(**each)[0] for each in inputs]
    assert counters["stats"]["unique_graphs"] == (0 if backend is None else 2)
    return found


@pytest.mark.parametrize("make", [flux, wan, llama, llama_padded, qwen])
def test_registered_attention_gives_what_the_backend_gives(make, device):
    model, inputs = make(device)
    use_sdpa(model)
    exact = outputs(model, inputs)
    expected = outputs(model, inputs, "sage")
    use_ours(model)
    for backend in (None, "sage", "inductor"):
        found = outputs(model, inputs, backend)
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


# -- registering ----


def test_neither_library_is_imported_before_it_is_registered_with():
    code = "import sys, sage_inductor; print([x in sys.modules for x in ('diffusers', 'transformers')])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stdout.split() == ["[False,", "False]"], out.stderr


def test_another_library_is_refused_by_name():
    with pytest.raises(ValueError, match='must be "diffusers" or "transformers", got \'vllm\''):
        sage_inductor.register("vllm")


@pytest.mark.parametrize("library", ["diffusers", "transformers"])
def test_a_library_that_is_missing_is_named(library, monkeypatch):
    forget()
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
    forget()
    monkeypatch.delattr(f"{library}.{module}.{name}")
    with pytest.raises(ImportError, match=f'for {library} [0-9.]+ .* backend="sage".*{name}'):
        sage_inductor.register(library)


def forget():
    from sage_inductor.integrations.diffusers import register_backend

    register_backend.cache_clear()
