"""Transformer blocks as their models' packages compute them, of the models' sizes, with random
weights.

Flux, HunyuanVideo, Wan, CogVideoX, SD3, SDXL   diffusers 0.42
Whisper, BERT                                   transformers 5.23
Llama, ViT, Qwen2.5-VL's vision                 written here, as transformers and timm have them:
                                                they are exported with a dynamic number of tokens,
                                                or hold no split by lengths that depend on data

A package is imported when one of its blocks is made.

x [B, N, C]: tokens of C = H_q D channels. A block gives its output, or of two streams (image or
video, text). Weights and inputs are random; what keeps attention from vanishing in the output, as
an average over N random values would, is that its scores have a deviation of SHARP.
"""

import dataclasses
import re

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.cases import Case
from bench.measure import SEES

SHARP = 3.0  # of softmax's inputs, where q and k of unit variance have 1
# The weights that q and k are proportional to: where they are normalized those of the norms.
NORMS = re.compile(r"\bnorm_(added_)?[qk]\.weight")
PROJECTIONS = re.compile(r"\b(to_[qk]|add_[qk]_proj|[qk]_proj|query|key|qkv)\.weight")


@dataclasses.dataclass(frozen=True)
class Model:
    """A row: one block of a model, and how many tokens it reads."""

    name: str
    title: str  # on the pages
    block: type["Block"]
    B: int
    H_q: int
    H_kv: int
    N: int
    D: int
    mlp: int  # channels between the two layers of the MLP
    text: int = 0  # tokens of text: the first or last ones of N; for Wan and SDXL beside them
    is_causal: bool = False
    mask: str = ""  # Case's

    @property
    def C(self) -> int:
        return self.H_q * self.D

    @property
    def case(self) -> Case:
        """The block's self-attention."""
        shape = self.B, self.H_q, self.H_kv, self.N, self.D
        return Case(*shape, self.is_causal, self.name, self.mask)


def draw(model: Model, device) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A block in bf16 with random weights, and its inputs."""
    with torch.device(device):
        block = model.block(model).bfloat16().eval()
        for module in block.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        sharpen(block)
        return block, model.block.inputs(model)


def sharpen(block: nn.Module) -> None:
    """Scores of unit deviation become scores of SHARP's."""
    named = dict(block.named_parameters())
    names = list(filter(NORMS.search, named)) or list(filter(PROJECTIONS.search, named))
    for name in names:
        weight = named[name].data
        rows = len(weight) * 2 // 3 if "qkv" in name else len(weight)  # without v's
        weight[:rows] *= SHARP**0.5


def first(out) -> Tensor:
    """Of two streams the image's or video's."""
    return out[0] if isinstance(out, (tuple, list)) else out


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16)


# -- what several models have ----


def angles(N: int, D: int) -> tuple[Tensor, Tensor]:
    """cos and sin [N, D / 2] in fp32."""
    frequencies = 10000.0 ** (-torch.arange(0, D, 2) / D)
    angle = torch.outer(torch.arange(N), frequencies)
    return angle.cos(), angle.sin()


def pairs(N: int, D: int) -> list[Tensor]:
    """cos and sin [N, D], each twice, for `interleaved`."""
    return [x.repeat_interleave(2, -1) for x in angles(N, D)]


def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of the pairs (2 i, 2 i + 1), as diffusers' apply_rotary_emb writes it; cos and sin
    broadcast to x."""
    real, imaginary = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    rotated = torch.stack([-imaginary, real], -1).flatten(-2)
    return (x.float() * cos + rotated.float() * sin).to(x.dtype)


def rotate_half(x: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, -1)
    return torch.cat((-x2, x1), -1)


def mlp(C: int, inner: int, approximate: str = "tanh") -> nn.Sequential:
    return nn.Sequential(nn.Linear(C, inner), nn.GELU(approximate), nn.Linear(inner, C))


def streams(m: Model, temb: int, rotated: int = 0) -> tuple[Tensor, ...]:
    """Image or video, text, modulation [B, temb], and where so many tokens are rotated `pairs`."""
    table = pairs(rotated, m.D) if rotated else ()
    return normal(m.B, m.N - m.text, m.C), normal(m.B, m.text, m.C), normal(m.B, temb), *table


# -- the blocks ----


class Block(nn.Module):
    """A package's block, which `make` makes; or where it makes none, one of ours."""

    def __init__(self, m: Model):
        super().__init__()
        self.m = m
        self.block = self.make(m)

    @staticmethod
    def make(m: Model) -> nn.Module | None:
        return None

    @staticmethod
    def inputs(m: Model) -> tuple[Tensor, ...]:
        return (normal(m.B, m.N, m.C),)

    def forward(self, *inputs: Tensor):
        return self.block(*inputs)


class FluxDouble(Block):
    """Two streams with weights of their own, text before image, meet in attention."""

    @staticmethod
    def make(m):
        from diffusers.models.transformers.transformer_flux import FluxTransformerBlock

        return FluxTransformerBlock(m.C, m.H_q, m.D)

    @staticmethod
    def inputs(m):
        return streams(m, m.C, m.N)

    def forward(self, x, text, temb, cos, sin):
        return self.block(x, text, temb, (cos, sin))[::-1]


class FluxSingle(FluxDouble):
    """One stream, text before image; attention and MLP side by side."""

    @staticmethod
    def make(m):
        from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock

        return FluxSingleTransformerBlock(m.C, m.H_q, m.D, m.mlp / m.C)


class HunyuanSingle(Block):
    """The same with text after video, which alone is rotated. All text is seen: no mask."""

    @staticmethod
    def make(m):
        from diffusers.models.transformers import transformer_hunyuan_video as hunyuan

        return hunyuan.HunyuanVideoSingleTransformerBlock(m.H_q, m.D, m.mlp / m.C)

    @staticmethod
    def inputs(m):
        return streams(m, m.C, m.N - m.text)

    def forward(self, x, text, temb, cos, sin):
        return self.block(x, text, temb, None, (cos, sin))


class HunyuanPadded(Block):
    """Two streams, video before text, of which the last tokens are padding: a mask hides them."""

    @staticmethod
    def make(m):
        from diffusers.models.transformers import transformer_hunyuan_video as hunyuan

        return hunyuan.HunyuanVideoTransformerBlock(m.H_q, m.D, m.mlp / m.C)

    @staticmethod
    def inputs(m):
        seen = SEES[m.mask](m.B, m.N, 0, 0, torch.arange(m.N)).expand(m.B, 1, 1, m.N)
        return *streams(m, m.C, m.N - m.text), seen

    def forward(self, x, text, temb, cos, sin, mask):
        return self.block(x, text, temb, mask, (cos, sin))


class CogVideoX(Block):
    """Text before video with the same weights; video's part of q and k is rotated in place."""

    TEMB = 512

    @staticmethod
    def make(m):
        from diffusers.models.transformers.cogvideox_transformer_3d import CogVideoXBlock

        return CogVideoXBlock(m.C, m.H_q, m.D, CogVideoX.TEMB, attention_bias=True)

    @staticmethod
    def inputs(m):
        return streams(m, CogVideoX.TEMB, m.N - m.text)

    def forward(self, x, text, temb, cos, sin):
        return self.block(x, text, temb, (cos, sin))


class Wan(Block):
    """Self-attention, cross-attention to text, MLP; norms and modulation in fp32."""

    @staticmethod
    def make(m):
        from diffusers.models.transformers.transformer_wan import WanTransformerBlock

        return WanTransformerBlock(m.C, m.mlp, m.H_q, cross_attn_norm=True)

    @staticmethod
    def inputs(m):
        table = (x[None, :, None] for x in pairs(m.N, m.D))
        return normal(m.B, m.N, m.C), normal(m.B, m.text, m.C), normal(m.B, 6, m.C), *table

    def forward(self, x, text, temb, cos, sin):
        return self.block(x, text, temb, (cos, sin))


class SD3(Block):
    """Image and text with weights of their own, image before text, meet in attention."""

    @staticmethod
    def make(m):
        from diffusers.models.attention import JointTransformerBlock

        return JointTransformerBlock(m.C, m.H_q, m.D)

    @staticmethod
    def inputs(m):
        return streams(m, m.C)

    def forward(self, x, text, temb):
        return self.block(x, text, temb)[::-1]


class SDXL(Block):
    """Of the UNet: self-attention, cross-attention to text, gated MLP."""

    CONTEXT = 2048  # channels of the text

    @staticmethod
    def make(m):
        from diffusers.models.attention import BasicTransformerBlock

        return BasicTransformerBlock(m.C, m.H_q, m.D, cross_attention_dim=SDXL.CONTEXT)

    @staticmethod
    def inputs(m):
        return normal(m.B, m.N, m.C), normal(m.B, m.text, SDXL.CONTEXT)

    def forward(self, x, text):
        return self.block(x, encoder_hidden_states=text)


class Whisper(Block):
    """Of the encoder."""

    @staticmethod
    def make(m):
        from transformers import WhisperConfig
        from transformers.models.whisper.modeling_whisper import WhisperEncoderLayer

        sizes = dict(d_model=m.C, encoder_attention_heads=m.H_q, encoder_ffn_dim=m.mlp)
        return WhisperEncoderLayer(WhisperConfig(**sizes, attn_implementation="sdpa"))

    def forward(self, x):
        return self.block(x, None)


class Bert(Block):
    """Normalized after each residual."""

    @staticmethod
    def make(m):
        from transformers import BertConfig
        from transformers.models.bert.modeling_bert import BertLayer

        sizes = dict(hidden_size=m.C, num_attention_heads=m.H_q, intermediate_size=m.mlp)
        return BertLayer(BertConfig(**sizes, attn_implementation="sdpa"))


class Llama(Block):
    """Prefill: grouped heads, causal; RoPE of the pairs (i, i + D / 2) by rotating halves."""

    def __init__(self, m: Model):
        super().__init__(m)
        self.norm1, self.norm2 = (nn.Parameter(torch.ones(m.C)) for _ in range(2))
        self.to_q, self.to_out = (nn.Linear(m.C, m.C, bias=False) for _ in range(2))
        self.to_k, self.to_v = (nn.Linear(m.C, m.H_kv * m.D, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(m.C, m.mlp, bias=False) for _ in range(2))
        self.down = nn.Linear(m.mlp, m.C, bias=False)

    @staticmethod
    def inputs(m):
        table = (x.repeat(1, 2)[None].bfloat16() for x in angles(m.N, m.D))
        return normal(m.B, m.N, m.C), *table

    def forward(self, x, cos, sin):
        h = self._norm(x, self.norm1)
        q, k, v = (
            to(h).unflatten(-1, (-1, self.m.D)).transpose(1, 2)
            for to in (self.to_q, self.to_k, self.to_v)
        )
        cos, sin = cos[:, None], sin[:, None]
        q, k = ((h * cos) + (rotate_half(h) * sin) for h in (q, k))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.to_out(out.transpose(1, 2).flatten(2))
        h = self._norm(x, self.norm2)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

    @staticmethod
    def _norm(x, weight):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)
        return weight * h.to(x.dtype)


class ViT(Block):
    """q, k and v from one projection; no RoPE."""

    def __init__(self, m: Model):
        super().__init__(m)
        self.norm1, self.norm2 = (nn.LayerNorm(m.C, eps=1e-6) for _ in range(2))
        self.qkv, self.proj = nn.Linear(m.C, 3 * m.C), nn.Linear(m.C, m.C)
        self.mlp = mlp(m.C, m.mlp, "none")

    def forward(self, x, mask=None):
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.m.H_q, self.m.D))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(q, k, v, mask)
        x = x + self.proj(out.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class QwenVision(ViT):
    """Qwen2.5-VL's, of a layer whose windows are the whole image: RMSNorm, RoPE of the pairs
    (i, i + D / 2) in fp32, a gated MLP."""

    def __init__(self, m: Model):
        super().__init__(m)
        self.norm1, self.norm2 = (nn.RMSNorm(m.C, eps=1e-6) for _ in range(2))
        self.gate, self.up = (nn.Linear(m.C, m.mlp) for _ in range(2))
        self.mlp = nn.Linear(m.mlp, m.C)

    @staticmethod
    def inputs(m):
        return *ViT.inputs(m), *(x.repeat(1, 2) for x in angles(m.N, m.D))

    def forward(self, x, cos, sin):
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.m.H_q, self.m.D))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        q, k = ((h.float() * cos + rotate_half(h.float()) * sin).to(h.dtype) for h in (q, k))
        out = F.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(out.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.mlp(F.silu(self.gate(h)) * self.up(h))


BESIDE = (Wan, SDXL)  # whose text is beside N, in cross-attention
MODELS = {
    model.name: model
    for model in (
        Model("flux_double", "Flux, double block", FluxDouble, 1, 24, 24, 4608, 128, 12288,
              text=512),
        Model("flux_single", "Flux, single block", FluxSingle, 1, 24, 24, 4608, 128, 12288,
              text=512),
        Model("wan14b_480p", "Wan 14B, 480p", Wan, 1, 40, 40, 32760, 128, 13824, text=512),
        Model("wan14b_720p", "Wan 14B, 720p", Wan, 1, 40, 40, 75600, 128, 13824, text=512),
        Model("hunyuan", "HunyuanVideo", HunyuanSingle, 1, 24, 24, 119056, 128, 12288, text=256),
        Model("cogvideox", "CogVideoX", CogVideoX, 2, 48, 48, 17776, 64, 12288, text=226),
        Model("llama3_8k", "Llama 3 8B, prefill of 8K", Llama, 1, 32, 8, 8192, 128, 14336,
              is_causal=True),
        Model("llama3_32k", "Llama 3 8B, prefill of 32K", Llama, 1, 32, 8, 32768, 128, 14336,
              is_causal=True),
        Model("vit_l_1024px", "ViT-L, 1024 px", ViT, 8, 16, 16, 4097, 64, 4096),
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
