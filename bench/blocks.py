"""Transformer blocks with the operations that their models' own code puts around attention.

Flux, HunyuanVideo, Wan, CogVideoX   diffusers 0.42: norms, modulation, the ways of writing RoPE
Llama                                transformers 5.23
ViT                                  timm 1.0

x [B, N, C]: tokens of C = H_q D channels. A block gives its output, or of two streams (image or
video, text). Weights and inputs are random; what keeps attention from vanishing in the output, as
an average over N random values would, is that its scores have a deviation of SHARP.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.cases import Case

SHARP = 3.0  # of softmax's inputs, where q and k of unit variance have 1


@dataclasses.dataclass(frozen=True)
class Model:
    """A row: one block of a model, and how many tokens it reads."""

    name: str
    title: str  # on the pages
    block: type
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
        block.sharpen()
        return block, block.inputs()


def first(out) -> Tensor:
    """Of two streams the image's or video's."""
    return out[0] if isinstance(out, (tuple, list)) else out


def normed(*layers: nn.Module) -> None:
    """`sharpen` where q and k are normalized."""
    for layer in layers:
        nn.init.constant_(layer.weight, SHARP**0.5)


def projected(*weights: Tensor) -> None:
    """`sharpen` where they are not."""
    for weight in weights:
        weight.data.mul_(SHARP**0.5)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16)


# -- what several models have ----


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q, k, v [B, N, H, D] -> [B, N, C]."""
    out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
    return out.transpose(1, 2).flatten(2)


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


class Modulated(nn.Module):
    """diffusers' AdaLayerNormZero (parts=6) and AdaLayerNormZeroSingle (3): x normalized, shifted
    and scaled as temb says, and the other parts."""

    def __init__(self, C: int, parts: int):
        super().__init__()
        self.norm = nn.LayerNorm(C, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(C, parts * C)
        self.parts = parts

    def forward(self, x, temb):
        shift, scale, *rest = self.linear(F.silu(temb)).chunk(self.parts, 1)
        return self.norm(x) * (1 + scale[:, None]) + shift[:, None], *rest


def mlp(C: int, inner: int, approximate: str = "tanh") -> nn.Sequential:
    return nn.Sequential(nn.Linear(C, inner), nn.GELU(approximate), nn.Linear(inner, C))


# -- the blocks ----


class FluxDouble(nn.Module):
    """Two streams with weights of their own, text before image, meet in attention."""

    def __init__(self, m: Model):
        super().__init__()
        self.m = m
        self.streams = nn.ModuleList(nn.ModuleDict(self._stream(m)) for _ in range(2))

    @staticmethod
    def _stream(m: Model) -> dict[str, nn.Module]:
        return {
            "norm1": Modulated(m.C, 6),
            **{name: nn.Linear(m.C, m.C) for name in ("to_q", "to_k", "to_v", "to_out")},
            **{name: nn.RMSNorm(m.D, eps=1e-6) for name in ("norm_q", "norm_k")},
            "norm2": nn.LayerNorm(m.C, elementwise_affine=False, eps=1e-6),
            "mlp": mlp(m.C, m.mlp),
        }

    def sharpen(self):
        normed(*(s[name] for s in self.streams for name in ("norm_q", "norm_k")))

    def inputs(self):
        B, C, text = self.m.B, self.m.C, self.m.text
        return (
            normal(B, self.m.N - text, C), normal(B, text, C), normal(B, C),
            *pairs(self.m.N, self.m.D),
        )  # fmt: skip

    def forward(self, x, text, temb, cos, sin):
        of_text, of_image = self.streams
        text_in, *text_rest = of_text["norm1"](text, temb)
        x_in, *x_rest = of_image["norm1"](x, temb)
        q, k, v = (
            torch.cat([a, b], 1)
            for a, b in zip(self._qkv(of_text, text_in), self._qkv(of_image, x_in), strict=True)
        )
        q, k = (interleaved(h, cos[None, :, None], sin[None, :, None]) for h in (q, k))
        out = attend(q, k, v)
        text_out, x_out = out.split_with_sizes([text.shape[1], x.shape[1]], 1)
        x = self._finish(of_image, x, x_out, *x_rest)
        return x, self._finish(of_text, text, text_out, *text_rest)

    def _qkv(self, stream, x):
        q, k, v = (
            stream[name](x).unflatten(-1, (-1, self.m.D)) for name in ("to_q", "to_k", "to_v")
        )
        return stream["norm_q"](q), stream["norm_k"](k), v

    def _finish(self, stream, x, out, gate, shift_mlp, scale_mlp, gate_mlp):
        x = x + gate[:, None] * stream["to_out"](out.contiguous())
        h = stream["norm2"](x) * (1 + scale_mlp[:, None]) + shift_mlp[:, None]
        return x + gate_mlp[:, None] * stream["mlp"](h)


class FluxSingle(nn.Module):
    """One stream, text before image; attention and MLP side by side."""

    def __init__(self, m: Model):
        super().__init__()
        self.m = m
        self.norm = Modulated(m.C, 3)
        self.to_q, self.to_k, self.to_v = (nn.Linear(m.C, m.C) for _ in range(3))
        self.norm_q, self.norm_k = (nn.RMSNorm(m.D, eps=1e-6) for _ in range(2))
        self.proj_mlp = nn.Linear(m.C, m.mlp)
        self.proj_out = nn.Linear(m.C + m.mlp, m.C)

    def sharpen(self):
        normed(self.norm_q, self.norm_k)

    def inputs(self):
        return FluxDouble.inputs(self)

    def forward(self, x, text, temb, cos, sin):
        n = text.shape[1]

        def rotate(h):
            return interleaved(h, cos[None, :, None], sin[None, :, None])

        both = self.stream(torch.cat([text, x], 1), temb, rotate)
        return both[:, n:], both[:, :n]

    def stream(self, x, temb, rotate):
        h, gate = self.norm(x, temb)
        inner = F.gelu(self.proj_mlp(h), approximate="tanh")
        q, k, v = (to(h).unflatten(-1, (-1, self.m.D)) for to in (self.to_q, self.to_k, self.to_v))
        out = attend(rotate(self.norm_q(q)), rotate(self.norm_k(k)), v)
        return x + gate[:, None] * self.proj_out(torch.cat([out, inner], 2))


class HunyuanSingle(FluxSingle):
    """The same with text after video, which alone is rotated. All text is seen: no mask."""

    def inputs(self):
        x, text, temb, _, _ = super().inputs()
        return x, text, temb, *pairs(x.shape[1], self.m.D)

    def forward(self, x, text, temb, cos, sin):
        n = x.shape[1]

        def rotate(h):
            video = interleaved(h[:, :n], cos[None, :, None], sin[None, :, None])
            return torch.cat([video, h[:, n:]], 1)

        both = self.stream(torch.cat([x, text], 1), temb, rotate)
        return both[:, :n], both[:, n:]


class CogVideoX(nn.Module):
    """Text before video with the same weights; video's part of q and k is rotated in place."""

    def __init__(self, m: Model):
        super().__init__()
        self.m = m
        self.temb = 512
        self.modulations = nn.ModuleList(nn.Linear(self.temb, 6 * m.C) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(m.C, eps=1e-5) for _ in range(2))
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(m.C, m.C) for _ in range(4))
        self.norm_q, self.norm_k = (nn.LayerNorm(m.D, eps=1e-6) for _ in range(2))
        self.mlp = mlp(m.C, m.mlp)

    def sharpen(self):
        normed(self.norm_q, self.norm_k)

    def inputs(self):
        B, C, text = self.m.B, self.m.C, self.m.text
        n = self.m.N - text
        return normal(B, n, C), normal(B, text, C), normal(B, self.temb), *pairs(n, self.m.D)

    def forward(self, x, text, temb, cos, sin):
        n = text.shape[1]
        h, gate, text_gate = self._modulated(0, x, text, temb)
        q, k, v = (
            to(h).unflatten(-1, (-1, self.m.D)).transpose(1, 2)
            for to in (self.to_q, self.to_k, self.to_v)
        )
        q, k = self.norm_q(q), self.norm_k(k)
        for each in (q, k):
            each[:, :, n:] = interleaved(each[:, :, n:], cos, sin)
        out = F.scaled_dot_product_attention(q, k, v)
        out = self.to_out(out.transpose(1, 2).flatten(2))
        x, text = x + gate * out[:, n:], text + text_gate * out[:, :n]
        h, gate, text_gate = self._modulated(1, x, text, temb)
        out = self.mlp(h)
        return x + gate * out[:, n:], text + text_gate * out[:, :n]

    def _modulated(self, i, x, text, temb):
        parts = self.modulations[i](F.silu(temb))[:, None].chunk(6, 2)
        shift, scale, gate, text_shift, text_scale, text_gate = parts
        x = self.norms[i](x) * (1 + scale) + shift
        text = self.norms[i](text) * (1 + text_scale) + text_shift
        return torch.cat([text, x], 1), gate, text_gate


class WanAttention(nn.Module):
    """Of x [B, N, C] to itself, rotated, or to text."""

    def __init__(self, m: Model):
        super().__init__()
        self.m = m
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(m.C, m.C) for _ in range(4))
        self.norm_q, self.norm_k = (nn.RMSNorm(m.C, eps=1e-6) for _ in range(2))

    def forward(self, x, context, *table):
        q, k, v = self.norm_q(self.to_q(x)), self.norm_k(self.to_k(context)), self.to_v(context)
        q, k, v = (h.unflatten(2, (self.m.H_q, -1)) for h in (q, k, v))
        if table:
            q, k = (self._rotate(h, *table) for h in (q, k))
        return self.to_out(attend(q, k, v))

    @staticmethod
    def _rotate(x, cos, sin):
        """RoPE of the pairs (2 i, 2 i + 1), stored through strided slices."""
        x1, x2 = x.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = cos[..., 0::2], sin[..., 1::2]
        out = torch.empty_like(x)
        out[..., 0::2] = x1 * cos - x2 * sin
        out[..., 1::2] = x1 * sin + x2 * cos
        return out


class Wan(nn.Module):
    """Self-attention, cross-attention to text, MLP; norms and modulation in fp32."""

    def __init__(self, m: Model):
        super().__init__()
        self.m = m
        self.attention, self.cross = (WanAttention(m) for _ in range(2))
        self.norm2 = nn.LayerNorm(m.C, eps=1e-6)
        self.mlp = mlp(m.C, m.mlp)
        self.table = nn.Parameter(torch.randn(1, 6, m.C) / m.C**0.5)

    def sharpen(self):
        normed(*(norm for a in (self.attention, self.cross) for norm in (a.norm_q, a.norm_k)))

    def inputs(self):
        B, N, C = self.m.B, self.m.N, self.m.C
        table = (x[None, :, None] for x in pairs(N, self.m.D))
        return normal(B, N, C), normal(B, self.m.text, C), normal(B, 6, C), *table

    def forward(self, x, text, temb, cos, sin):
        parts = (self.table + temb.float()).chunk(6, 1)
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = parts
        h = (self._norm(x) * (1 + scale) + shift).type_as(x)
        x = (x.float() + self.attention(h, h, cos, sin) * gate).type_as(x)
        h = self._norm(x, self.norm2.weight.float(), self.norm2.bias.float()).type_as(x)
        x = x + self.cross(h, text)
        h = (self._norm(x) * (1 + scale_mlp) + shift_mlp).type_as(x)
        return (x.float() + self.mlp(h).float() * gate_mlp).type_as(x)

    def _norm(self, x, weight=None, bias=None):
        return F.layer_norm(x.float(), (self.m.C,), weight, bias, 1e-6)


class Llama(nn.Module):
    """Prefill: grouped heads, causal; RoPE of the pairs (i, i + D / 2) by rotating halves."""

    def __init__(self, m: Model):
        super().__init__()
        self.m = m
        self.norm1, self.norm2 = (nn.Parameter(torch.ones(m.C)) for _ in range(2))
        self.to_q, self.to_out = (nn.Linear(m.C, m.C, bias=False) for _ in range(2))
        self.to_k, self.to_v = (nn.Linear(m.C, m.H_kv * m.D, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(m.C, m.mlp, bias=False) for _ in range(2))
        self.down = nn.Linear(m.mlp, m.C, bias=False)

    def sharpen(self):
        projected(self.to_q.weight, self.to_k.weight)

    def inputs(self):
        table = (x.repeat(1, 2)[None].bfloat16() for x in angles(self.m.N, self.m.D))
        return normal(self.m.B, self.m.N, self.m.C), *table

    def forward(self, x, cos, sin):
        h = self._norm(x, self.norm1)
        q, k, v = (
            to(h).unflatten(-1, (-1, self.m.D)).transpose(1, 2)
            for to in (self.to_q, self.to_k, self.to_v)
        )
        cos, sin = cos[:, None], sin[:, None]
        q, k = ((h * cos) + (self._rotate_half(h) * sin) for h in (q, k))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.to_out(out.transpose(1, 2).flatten(2))
        h = self._norm(x, self.norm2)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

    @staticmethod
    def _norm(x, weight):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)
        return weight * h.to(x.dtype)

    @staticmethod
    def _rotate_half(x):
        x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return torch.cat((-x2, x1), -1)


class ViT(nn.Module):
    """q, k and v from one projection; no RoPE."""

    def __init__(self, m: Model):
        super().__init__()
        self.m = m
        self.norm1, self.norm2 = (nn.LayerNorm(m.C, eps=1e-6) for _ in range(2))
        self.qkv, self.proj = nn.Linear(m.C, 3 * m.C), nn.Linear(m.C, m.C)
        self.mlp = mlp(m.C, m.mlp, "none")

    def sharpen(self):
        projected(self.qkv.weight[: 2 * self.m.C])

    def inputs(self):
        return (normal(self.m.B, self.m.N, self.m.C),)

    def forward(self, x, mask=None):
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.m.H_q, self.m.D))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(q, k, v, mask)
        x = x + self.proj(out.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


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
    )
}  # fmt: skip
