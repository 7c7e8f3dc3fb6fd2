"""Small models of random weights that several files build, with inputs of theirs."""

import torch

# Of a decoder of transformers, for its config.
DECODER = dict(
    hidden_size=256, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
    intermediate_size=256, vocab_size=100,
)  # fmt: skip
# Tokens that nothing of a batch is.
NO_SPECIAL = dict(pad_token_id=0, eos_token_id=None, bos_token_id=None)


def flux(heads=2, head_dim=64, B=1, patches=64, text=16):
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


def wan(heads=2, head_dim=64, ffn_dim=256, layers=1, side=8, text=16):
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
