"""``python -m sage_inductor demo``: a diffusion transformer's denoiser, compiled.

What matters to attention is as in Flux, SD3 and Wan: RMSNorm on q and k, rotary positions over
rows and columns, no mask, q and k and v as transposed views of [B, N, H, D].

Shapes: B batch, N tokens, C channels, H heads, D head_dim.
"""

import argparse
import copy
import functools
import statistics

import torch
import torch.nn.functional as F
import triton
from torch import Tensor, nn

from sage_inductor.cli import positive
from sage_inductor.cli.progress import Progress, track
from sage_inductor.names import AUTO
from sage_inductor.ops.recipe import NAMED
from sage_inductor.study.measure import compare
from sage_inductor.study.report import report

LATENT_CHANNELS = 16
PATCH = 2  # a token is PATCH x PATCH latents
QK_GAIN = 1.5  # logits then have a standard deviation of 2.25: rows that attend to some keys


class Attention(nn.Module):
    def __init__(self, heads: int, head_dim: int):
        super().__init__()
        C = heads * head_dim
        self.heads = heads
        self.qkv, self.out = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.norm_q, self.norm_k = nn.RMSNorm(head_dim), nn.RMSNorm(head_dim)
        nn.init.constant_(self.norm_q.weight, QK_GAIN)
        nn.init.constant_(self.norm_k.weight, QK_GAIN)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)  # [B, N, H, D]
        q, k = rotate(self.norm_q(q), angles), rotate(self.norm_k(k), angles)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))  # [B, H, N, D]
        out = F.scaled_dot_product_attention(q, k, v)
        return self.out(out.transpose(1, 2).flatten(2))


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """x [B, N, H, D] rotated in its D/2 planes by angles [N, D/2]."""
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]  # [N, 1, D/2]
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def positions(side: int, head_dim: int, device) -> Tensor:
    """Angles [N, D/2] of side x side tokens: half of the planes turn with the row, half with the
    column."""
    frequencies = 1e4 ** -torch.linspace(0, 1, head_dim // 4, device=device)
    turns = torch.arange(side, device=device)[:, None] * frequencies  # [side, D/4]
    rows, columns = turns[:, None].expand(-1, side, -1), turns[None].expand(side, -1, -1)
    return torch.cat((rows, columns), -1).flatten(0, 1)


class Block(nn.Module):
    """Attention and MLP, each normed, shifted, scaled and gated by the conditioning."""

    def __init__(self, heads: int, head_dim: int):
        super().__init__()
        C = heads * head_dim
        self.modulation = nn.Linear(C, 6 * C)
        self.attention = Attention(heads, head_dim)
        self.mlp = nn.Sequential(nn.Linear(C, 4 * C), nn.GELU("tanh"), nn.Linear(4 * C, C))

    def forward(self, x: Tensor, condition: Tensor, angles: Tensor) -> Tensor:
        modulation = self.modulation(F.silu(condition))[:, None]  # [B, 1, 6 C]
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = modulation.chunk(6, -1)
        normed = F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
        x = x + (1 + gate) * self.attention(normed, angles)
        normed = F.layer_norm(x, x.shape[-1:]) * (1 + scale_mlp) + shift_mlp
        return x + (1 + gate_mlp) * self.mlp(normed)


class Denoiser(nn.Module):
    """Latents [B, LATENT_CHANNELS, size, size] and times [B] -> the predicted noise, like them."""

    def __init__(self, layers: int, heads: int, head_dim: int):
        super().__init__()
        C = heads * head_dim
        self.head_dim = head_dim
        self.patch_in = nn.Conv2d(LATENT_CHANNELS, C, PATCH, stride=PATCH)
        self.time = nn.Sequential(nn.Linear(1, C), nn.SiLU(), nn.Linear(C, C))
        self.blocks = nn.ModuleList(Block(heads, head_dim) for _ in range(layers))
        self.patch_out = nn.ConvTranspose2d(C, LATENT_CHANNELS, PATCH, stride=PATCH)

    def forward(self, latents: Tensor, times: Tensor) -> Tensor:
        x = self.patch_in(latents)  # [B, C, side, side]
        side = x.shape[-1]
        angles = positions(side, self.head_dim, x.device)
        x = x.flatten(2).mT  # [B, N, C]
        condition = self.time(times[:, None])
        for block in self.blocks:
            x = block(x, condition, angles)
        x = F.layer_norm(x, x.shape[-1:])
        return self.patch_out(x.mT.unflatten(2, (side, side)))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compile a diffusion transformer with backend='sage'; print what became of its attention "
        "calls, how far the output is from exact attention and, on a GPU, the times with it and "
        "with backend='inductor'. On CPU the recipe is emulated."
    )
    parser.add_argument("--recipe", default=AUTO, choices=(AUTO, *NAMED), help="default: auto")
    parser.add_argument(
        "--size", type=_even, help="side of the latent image; tokens = (size / 2)^2 (64; GPU: 256)"
    )
    parser.add_argument("--layers", type=positive, default=4, help="default: 4")
    force = "on a GPU: rewrite also where SDPA is faster"
    parser.add_argument("--force", action="store_true", help=force)


def _even(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0 and int(text) % PATCH == 0):
        raise argparse.ArgumentTypeError(f"must be a positive even number, got {text!r}")
    return int(text)


def demo(recipe: str, size: int | None, layers: int, force: bool) -> int:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    size = size or (256 if on_gpu else 64)
    heads, head_dim = (24, 128) if on_gpu else (4, 64)
    torch.manual_seed(0)
    with device:
        model32 = Denoiser(layers, heads, head_dim).eval()
        latents = torch.randn(1, LATENT_CHANNELS, size, size)
        times = torch.rand(1)
    model, inputs = copy.deepcopy(model32).to(dtype), (latents.to(dtype), times.to(dtype))
    where = f"{torch.cuda.get_device_name(device)}, bfloat16" if on_gpu else "CPU, emulated"
    print(f"a diffusion transformer of {layers} layers, {heads} heads of {head_dim},", end=" ")
    print(f"{(size // PATCH) ** 2} tokens; {where}")
    options = {"sage.recipe": recipe, "sage.emulate": not on_gpu, "sage.force": force and on_gpu}
    compiled = torch.compile(model, backend="sage", options=options, fullgraph=True)
    outputs = {}

    def step(what: str, run) -> None:
        progress.step(what)
        outputs[what] = run()

    with torch.no_grad(), Progress(4 if on_gpu else 3) as progress:
        step("exact attention, float32", lambda: model32(latents, times))
        if on_gpu:
            step("SDPA", lambda: model(*inputs))
        for block in model32.blocks:  # a control: how much of the output is what attention selects
            torch.nn.init.zeros_(block.attention.norm_q.weight)
        step("attending to all keys alike", lambda: model32(latents, times))
        step('backend="sage" (first call: compiles)', lambda: compiled(*inputs))

    found = report()
    print(f"\nwhat became of its attention calls (sage_inductor.report()):\n{found}")
    exact = outputs.pop("exact attention, float32")
    print(f"\n{'the output, against exact attention':40}CosSim     relative L1  RMSE")
    for name, output in outputs.items():
        error = compare(output, exact)
        print(f"{name.removesuffix(' (first call: compiles)'):40}", end="")
        print(f"{error['CosSim']:<11.6f}{error['relative L1']:<13.5f}{error['RMSE']:.5f}")
    if on_gpu:
        _time_both(model, compiled, inputs)
        if not found.rewritten:
            print("\nevery call stays SDPA here; --force runs the kernels all the same")
    else:
        print("\nno GPU: the emulation shows accuracy, not speed")
    return 0


def _time_both(model, compiled, inputs) -> None:
    """The two backends in turn, so that a clock that drifts drifts for both."""
    stock = torch.compile(model, backend="inductor", fullgraph=True)
    times = {'backend="inductor"': [], 'backend="sage"': []}
    with torch.no_grad():
        for _ in track(range(5), lambda _: "the speed of both backends, in turn"):
            for found, run in zip(times.values(), (stock, compiled), strict=True):
                forward = functools.partial(run, *inputs)
                found.append(triton.testing.do_bench(forward, return_mode="median"))
    inductor, sage = map(statistics.median, times.values())
    print("\nmedian time of a forward pass (5 rounds of triton.testing.do_bench, in turn)")
    for (name, found), median in zip(times.items(), (inductor, sage), strict=True):
        print(f"{name:40}{median:.3f} ms   ({min(found):.3f} .. {max(found):.3f})")
    print(f"{'inductor / sage':40}{inductor / sage:.3f}")
