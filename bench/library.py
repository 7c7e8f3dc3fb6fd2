"""Transformer blocks of other packages, as their own code computes them: random weights, the sizes
of the models that they are of.

SD3, SDXL, HunyuanVideo   diffusers
Whisper, BERT             transformers

Imported when a block is made: nothing else of the bench asks for these packages. Other rows are of
blocks.py's own blocks. Qwen2.5-VL's vision is among them because transformers splits its tokens by
lengths that depend on data, which no single graph holds.
"""

import torch
import torch.nn.functional as F
from torch import nn

from bench import blocks
from bench.blocks import Llama, Model, ViT, angles, normal, pairs, projected
from bench.measure import SEES


class SD3(nn.Module):
    """Image and text with weights of their own, image before text, meet in attention."""

    def __init__(self, m: Model):
        from diffusers.models.attention import JointTransformerBlock

        super().__init__()
        self.m = m
        self.block = JointTransformerBlock(m.C, m.H_q, m.D)

    def sharpen(self):
        a = self.block.attn
        projected(*(each.weight for each in (a.to_q, a.to_k, a.add_q_proj, a.add_k_proj)))

    def inputs(self):
        B, C, text = self.m.B, self.m.C, self.m.text
        return normal(B, self.m.N - text, C), normal(B, text, C), normal(B, C)

    def forward(self, x, text, temb):
        return self.block(x, text, temb)[::-1]


class SDXL(nn.Module):
    """Of the UNet: self-attention, cross-attention to text, gated MLP."""

    CONTEXT = 2048  # channels of the text

    def __init__(self, m: Model):
        from diffusers.models.attention import BasicTransformerBlock

        super().__init__()
        self.m = m
        self.block = BasicTransformerBlock(m.C, m.H_q, m.D, cross_attention_dim=self.CONTEXT)

    def sharpen(self):
        layers = self.block.attn1, self.block.attn2
        projected(*(each.weight for a in layers for each in (a.to_q, a.to_k)))

    def inputs(self):
        return normal(self.m.B, self.m.N, self.m.C), normal(self.m.B, self.m.text, self.CONTEXT)

    def forward(self, x, text):
        return self.block(x, encoder_hidden_states=text)


class HunyuanPadded(nn.Module):
    """Two streams, video before text, of which the last tokens are padding: a mask hides them."""

    def __init__(self, m: Model):
        from diffusers.models.transformers import transformer_hunyuan_video as hunyuan

        super().__init__()
        self.m = m
        self.block = hunyuan.HunyuanVideoTransformerBlock(m.H_q, m.D, m.mlp / m.C)

    def sharpen(self):
        a = self.block.attn
        blocks.normed(a.norm_q, a.norm_k, a.norm_added_q, a.norm_added_k)

    def inputs(self):
        B, N, C, text = self.m.B, self.m.N, self.m.C, self.m.text
        seen = SEES[self.m.mask](B, N, 0, 0, torch.arange(N)).expand(B, 1, 1, N)
        streams = normal(B, N - text, C), normal(B, text, C), normal(B, C)
        return *streams, seen, *pairs(N - text, self.m.D)

    def forward(self, x, text, temb, mask, cos, sin):
        return self.block(x, text, temb, mask, (cos, sin))


class Whisper(nn.Module):
    """Of the encoder."""

    def __init__(self, m: Model):
        from transformers import WhisperConfig
        from transformers.models.whisper.modeling_whisper import WhisperEncoderLayer

        super().__init__()
        self.m = m
        config = WhisperConfig(
            d_model=m.C, encoder_attention_heads=m.H_q, encoder_ffn_dim=m.mlp,
            attn_implementation="sdpa",
        )  # fmt: skip
        self.block = WhisperEncoderLayer(config)

    def sharpen(self):
        projected(self.block.self_attn.q_proj.weight, self.block.self_attn.k_proj.weight)

    def inputs(self):
        return (normal(self.m.B, self.m.N, self.m.C),)

    def forward(self, x):
        return self.block(x, None)


class Bert(nn.Module):
    """Normalized after each residual."""

    def __init__(self, m: Model):
        from transformers import BertConfig
        from transformers.models.bert.modeling_bert import BertLayer

        super().__init__()
        self.m = m
        config = BertConfig(
            hidden_size=m.C, num_attention_heads=m.H_q, intermediate_size=m.mlp,
            attn_implementation="sdpa",
        )  # fmt: skip
        self.block = BertLayer(config)

    def sharpen(self):
        layers = self.block.attention.self
        projected(layers.query.weight, layers.key.weight)

    def inputs(self):
        return (normal(self.m.B, self.m.N, self.m.C),)

    def forward(self, x):
        return self.block(x)


class QwenVision(ViT):
    """Qwen2.5-VL's, of a layer whose windows are the whole image: RMSNorm, RoPE of the pairs
    (i, i + D / 2) in fp32, a gated MLP."""

    def __init__(self, m: Model):
        super().__init__(m)
        self.norm1, self.norm2 = (nn.RMSNorm(m.C, eps=1e-6) for _ in range(2))
        self.gate, self.up = (nn.Linear(m.C, m.mlp) for _ in range(2))
        self.mlp = nn.Linear(m.mlp, m.C)

    def inputs(self):
        table = (x.repeat(1, 2) for x in angles(self.m.N, self.m.D))
        return *super().inputs(), *table

    def forward(self, x, cos, sin):
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.m.H_q, self.m.D))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        q, k = ((h.float() * cos + Llama._rotate_half(h.float()) * sin).to(h.dtype) for h in (q, k))
        out = F.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(out.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.mlp(F.silu(self.gate(h)) * self.up(h))


BESIDE = (blocks.Wan, SDXL)  # whose text is beside N, in cross-attention
MODELS = blocks.MODELS | {
    model.name: model
    for model in (
        Model("sd3_1024px", "SD3, 1024 px", SD3, 2, 24, 24, 4429, 64, 6144, text=333),
        Model("sdxl_64x64", "SDXL UNet, 64 x 64", SDXL, 2, 10, 10, 4096, 64, 2560, text=77),
        Model("sdxl_32x32", "SDXL UNet, 32 x 32", SDXL, 2, 20, 20, 1024, 64, 5120, text=77),
        Model("hunyuan_padded", "HunyuanVideo, padded text", HunyuanPadded, 1, 24, 24, 32656, 128,
              12288, 256, mask="padding"),
        Model("whisper_large", "Whisper, encoder", Whisper, 8, 20, 20, 1500, 64, 5120),
        Model("vit_h_224px", "ViT-H, 224 px", ViT, 64, 16, 16, 257, 80, 5120),
        Model("vit_h_1024px", "ViT-H, 1024 px", ViT, 4, 16, 16, 5330, 80, 5120),
        Model("bert_large_512", "BERT, N=512", Bert, 32, 16, 16, 512, 64, 4096),
        Model("llama3_2k", "Llama 3 8B, prefill of 2K", Llama, 1, 32, 8, 2048, 128, 14336,
              is_causal=True),
        Model("qwen_vl_980px", "Qwen2.5-VL, vision", QwenVision, 1, 16, 16, 4900, 80, 3420),
    )
}  # fmt: skip
