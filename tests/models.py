"""Small models of random weights that several files build, with inputs of theirs. lib: the module of
their library."""

import importlib.util
import sys
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn


class Of(nn.Module):
    """A function as a module: what is exported must be one."""

    def __init__(self, function):
        super().__init__()
        self.forward = function


class Attention(nn.Module):
    """Self-attention of x [B, N, dim] with fused QKV, as models hand it to SDPA: transposed views.
    Its weights are large enough for a softmax that looks at a few keys, not at all alike."""

    def __init__(self, dim=64, heads=2, is_causal=False, bias=True):
        super().__init__()
        self.qkv, self.out = (nn.Linear(dim, n * dim, bias=bias) for n in (3, 1))
        self.heads, self.is_causal = heads, is_causal
        with torch.no_grad():
            self.qkv.weight.mul_(2.0)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)


class Studied(Attention):
    """With attention by `attend`: q, k, v [B, H, N, D] -> [B, H, N, D_v], or what may be viewed as
    [B, N, C]. q is large."""

    def __init__(self, attend=F.scaled_dot_product_attention, **sizes):
        super().__init__(**sizes)
        self.by = attend

    def attend(self, q, k, v):
        return self.by(4 * q, k, v / 2)


class Transformer(nn.Module):
    """A layer for each of `attend`."""

    def __init__(self, *attend, **sizes):
        super().__init__()
        self.layers = nn.ModuleList(Studied(each, **sizes) for each in attend)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(F.layer_norm(x, x.shape[-1:]))
        return x


def library(name: str):
    """The module; without it the test is skipped. timm imports torchvision, whose wheels load beside
    the CUDA builds of torch only. Its transforms and datasets are for images on disk: a vision
    transformer runs without them."""
    with pytest.MonkeyPatch.context() as stand_in:
        if name == "timm" and importlib.util.find_spec("torchvision") is None:
            for part in (
                "", ".datasets", ".models", ".models.feature_extraction", ".ops", ".ops.misc",
                ".transforms", ".transforms.functional",
            ):  # fmt: skip
                stand_in.setitem(sys.modules, f"torchvision{part}", mock.MagicMock())
        return pytest.importorskip(name, exc_type=(ImportError, RuntimeError))


# -- transformers and timm, of two sequences of 70 tokens ----

# Of a decoder of transformers, for its config.
DECODER = dict(
    hidden_size=256, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
    intermediate_size=256, vocab_size=100,
)  # fmt: skip
# Tokens that nothing of a batch is.
NO_SPECIAL = dict(pad_token_id=0, eos_token_id=None, bos_token_id=None)


def decoder(lib, kind: str, **sizes):
    """A decoder that generates: `kind` is "Llama", "Qwen2"."""
    config = getattr(lib, f"{kind}Config")(**DECODER | NO_SPECIAL | sizes)
    return getattr(lib, f"{kind}ForCausalLM")(config)


def that_sees(lib, kind: str):
    """A model with a vision tower: `kind` is "Qwen2_5_VL" or "Qwen3VL". Its text part is not run."""
    width = dict(hidden_size=64, intermediate_size=64)
    text = width | dict(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=100,
        rope_parameters={"rope_type": "default", "mrope_section": [2, 3, 3]},
    )  # fmt: skip
    eyes = width | dict(depth=2, num_heads=2, out_hidden_size=64)
    eyes |= {
        "Qwen2_5_VL": dict(fullatt_block_indexes=[1], window_size=56),
        "Qwen3VL": dict(deepstack_visual_indexes=[0], num_position_embeddings=64),
    }[kind]
    config = getattr(lib, f"{kind}Config")(text_config=text, vision_config=eyes)
    return getattr(lib, f"{kind}ForConditionalGeneration")(config).eval()


def token_ids(length: int = 70):
    return torch.randint(0, 100, (2, length))


def padding():
    mask = torch.ones(2, 70, dtype=torch.long)
    mask[1, 50:] = 0
    return {"attention_mask": mask}


def bert(lib, attention="sdpa", **inputs):
    config = lib.BertConfig(
        hidden_size=128, num_hidden_layers=1, num_attention_heads=2, intermediate_size=256,
        vocab_size=100, attn_implementation=attention,
    )  # fmt: skip
    return lib.BertModel(config), {"input_ids": token_ids(), **inputs}


def modernbert(lib, **inputs):
    """Layers of global and of local attention in turn."""
    config = lib.ModernBertConfig(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=256,
        vocab_size=100, global_attn_every_n_layers=2, local_attention=16, pad_token_id=0,
        attn_implementation="sdpa", reference_compile=False,
    )  # fmt: skip
    return lib.ModernBertModel(config), {"input_ids": token_ids(), **inputs}


def gpt2(lib, attention="sdpa", **inputs):
    config = lib.GPT2Config(
        n_embd=128, n_layer=1, n_head=2, n_positions=128, vocab_size=100, bos_token_id=None,
        eos_token_id=None, attn_implementation=attention,
    )  # fmt: skip
    return lib.GPT2Model(config), {"input_ids": token_ids(), **inputs}


def llama(lib, attention="sdpa", **inputs):
    config = lib.LlamaConfig(**DECODER, attn_implementation=attention)
    return lib.LlamaForCausalLM(config), {"input_ids": token_ids(), **inputs}


def mistral(lib, sliding_window=16, **inputs):
    config = lib.MistralConfig(**DECODER, sliding_window=sliding_window, attn_implementation="sdpa")
    return lib.MistralForCausalLM(config), {"input_ids": token_ids(), **inputs}


def gpt_oss(lib):
    """With learned sinks, which SDPA has not, and every second layer a window."""
    config = lib.GptOssConfig(
        hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, intermediate_size=256, num_local_experts=2, num_experts_per_tok=2,
        vocab_size=100, sliding_window=16, attn_implementation="eager",
    )  # fmt: skip
    return lib.GptOssForCausalLM(config), {
        "input_ids": token_ids(),
        "use_cache": False,
        **padding(),
    }


def t5(lib, attention="sdpa"):
    config = lib.T5Config(
        d_model=128, d_kv=64, d_ff=256, num_layers=1, num_decoder_layers=1, num_heads=2,
        vocab_size=100, decoder_start_token_id=0, attn_implementation=attention,
    )  # fmt: skip
    inputs = {"input_ids": token_ids(), "decoder_input_ids": token_ids(12), **padding()}
    return lib.T5Model(config), inputs


def vit(lib, attention="sdpa"):
    config = lib.ViTConfig(
        hidden_size=128, num_hidden_layers=1, num_attention_heads=2, intermediate_size=256,
        image_size=64, patch_size=8, attn_implementation=attention,
    )  # fmt: skip
    return lib.ViTModel(config), {"pixel_values": torch.randn(2, 3, 64, 64)}


def whisper(lib, attention="sdpa", **inputs):
    config = lib.WhisperConfig(
        d_model=128, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=256, decoder_ffn_dim=256, vocab_size=100,
        max_source_positions=100, max_target_positions=64, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1, attn_implementation=attention,
    )  # fmt: skip
    features = torch.randn(2, 80, 200)
    inputs = {"input_features": features, "decoder_input_ids": token_ids(12), **inputs}
    return lib.WhisperModel(config), inputs


def timm_vit(lib, by_hand=False):
    """by_hand: its attention is written out."""
    model = lib.models.VisionTransformer(
        img_size=64, patch_size=8, embed_dim=128, depth=2, num_heads=2, num_classes=10
    )
    for block in model.blocks:
        block.attn.fused_attn = not by_hand
    return model, {"x": torch.randn(2, 3, 64, 64)}


# -- diffusers ----


def flux(_=None, heads=2, head_dim=64, B=1, patches=64, text=16):
    """Two attentions: of a block of two streams, and of a single one."""
    from diffusers import FluxTransformer2DModel

    axes = (head_dim // 4, head_dim * 3 // 8, head_dim * 3 // 8)
    model = FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1,
        attention_head_dim=head_dim, num_attention_heads=heads, joint_attention_dim=32,
        pooled_projection_dim=32, axes_dims_rope=axes,
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(B, patches, 16),
        "encoder_hidden_states": torch.randn(B, text, 32),
        "pooled_projections": torch.randn(B, 32),
        "timestep": torch.full((B,), 0.5),
        "img_ids": torch.randn(patches, 3),
        "txt_ids": torch.zeros(text, 3),
    }


def wan(_=None, heads=2, head_dim=64, ffn_dim=256, layers=1, side=8, text=16):
    """In each layer an attention of the video and one to the text. side: of a frame, in patches."""
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=heads, attention_head_dim=head_dim,
        in_channels=4, out_channels=4, text_dim=32, freq_dim=32, ffn_dim=ffn_dim,
        num_layers=layers, cross_attn_norm=True, rope_max_seq_len=32,
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(1, 4, 3, 2 * side, 2 * side),
        "encoder_hidden_states": torch.randn(1, text, 32),
        "timestep": torch.tensor([500]),
    }
