"""Videos that are drawn, and a diffusion transformer of them: the model of bench/sparse.py.

A video shows discs that move over a shaded ground. Its class says their texture and where they
drift: KINDS x DIRECTIONS. The transformer is video models' in what matters to attention: a token is
a patch of one frame, RoPE turns by frame, row and column, q and k are normed, nothing is masked.

Shapes: B batch, T frames, N tokens of T x H x W, C channels, D head_dim.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.trained import EULER, IMAGE, Size, frechet, noise_like, train
from sage_inductor.cli.demo import Block

KINDS, DIRECTIONS = 4, 4
CLASSES = KINDS * DIRECTIONS
DISCS = 3
FEATURES = 64  # of the eyes


@dataclasses.dataclass(frozen=True)
class Subject:
    """A trained model in fp32, for inference.

    run(model): samples [M, T, IMAGE, IMAGE], of the same noise each time.
    score(samples, exact): psnr of samples to samples, in dB, None where they are equal; frechet:
    squared distance of their features to as many drawn videos', where there are eyes.
    inputs(time): the model's inputs for drawn videos at that noise level.
    loss(model): of a batch that is drawn anew.
    calls: attention calls of a forward pass. note: how it was trained.
    """

    model: nn.Module
    run: Callable[[nn.Module], Tensor]
    score: Callable[[Tensor, Tensor], dict[str, float | None]]
    inputs: Callable[[float], tuple[Tensor, ...]]
    loss: Callable[[nn.Module], Tensor]
    calls: int
    note: str


# -- data ----


def videos(count: int, T: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Videos [count, T, IMAGE, IMAGE] in -1 .. 1 and labels [count]."""
    device = generator.device

    def uniform(low, high, *shape):
        drawn = torch.rand(count, *shape, generator=generator, device=device)
        return low + (high - low) * drawn[..., None, None]

    labels = torch.randint(CLASSES, (count,), generator=generator, device=device)
    kind, towards = (labels // DIRECTIONS)[:, None, None, None], labels % DIRECTIONS
    side = torch.linspace(-1, 1, IMAGE, device=device)
    y, x = side[:, None].expand(IMAGE, -1), side.expand(IMAGE, -1)
    slope, ground = uniform(-0.3, 0.3, 2, 1), uniform(-0.6, 0.0, 1)
    video = (ground + slope[:, 0] * x + slope[:, 1] * y).expand(-1, T, -1, -1)
    time = (torch.arange(T, device=device) - (T - 1) / 2)[:, None, None]
    drift = (math.pi / 2) * towards[:, None, None, None]  # of all discs of a video
    for _ in range(DISCS):
        angle, speed = drift + uniform(-0.4, 0.4, 1), uniform(0.04, 0.09, 1)
        dx = x - uniform(-0.6, 0.6, 1) - speed * angle.cos() * time  # [count, T, IMAGE, IMAGE]
        dy = y - uniform(-0.6, 0.6, 1) - speed * angle.sin() * time
        turn, waves, phase = uniform(0, math.pi, 1), uniform(8, 16, 1), uniform(0, 6.28, 1)
        u, w = dx * turn.cos() + dy * turn.sin(), dy * turn.cos() - dx * turn.sin()
        away, radius = (dx.square() + dy.square()).sqrt(), uniform(0.25, 0.45, 1)
        stripes = (waves * u + phase).sin()
        textures = torch.ones_like(u), stripes, stripes * (waves * w).cos(), (waves * away).cos()
        texture = sum(each * (kind == i) for i, each in enumerate(textures))
        shown = 0.4 + 0.5 * texture
        edge = ((radius - away) * IMAGE / 4).sigmoid()  # two pixels wide
        video = torch.lerp(video, shown, edge)
    return video.clamp(-1, 1), labels


# -- models ----


def frames_of(size: Size) -> int:
    """Tokens are as many in a row and a column as in 16 frames of 16 x 16."""
    return size.N // 256


def shape_of(size: Size) -> tuple[int, int, int]:
    """T, H and W of the tokens."""
    return frames_of(size), 16, 16


def cubes(shape: tuple[int, int, int], side: int = 4) -> Tensor:
    """The tokens [N] in raster order, listed cube by cube: those of a cube come one after another,
    and cubes at the far borders are cut."""
    places = torch.stack(torch.meshgrid(*map(torch.arange, shape), indexing="ij")).flatten(1)
    key = torch.zeros_like(places[0])
    for part in (places // side, places % side):
        for place, count in zip(part, shape, strict=True):
            key = key * max(count, side) + place
    return key.argsort()


def positions(shape: tuple[int, int, int], head_dim: int) -> Tensor:
    """Angles [N, D / 2]: a third of the planes turns by column, one by row, the rest by frame."""
    planes = head_dim // 2
    each = planes - 2 * (planes // 3), planes // 3, planes // 3
    places = torch.meshgrid(*map(torch.arange, shape), indexing="ij")
    turns = (
        place.flatten()[:, None] * 1e4 ** -torch.linspace(0, 1, count)
        for place, count in zip(places, each, strict=True)
    )
    return torch.cat([*turns], 1)


class VideoDiT(nn.Module):
    """Videos [B, T, IMAGE, IMAGE] at times [B] in 0 .. 1, labels [B] -> their velocity, noise less
    video."""

    def __init__(self, size: Size):
        super().__init__()
        C, (T, side, _) = size.heads * size.head_dim, shape_of(size)
        self.shape, self.patch = (T, side, side), IMAGE // side
        self.patch_in = nn.Linear(self.patch**2, C)
        self.patch_out = nn.Linear(C, self.patch**2)
        self.time = nn.Sequential(nn.Linear(1, C), nn.SiLU(), nn.Linear(C, C))
        self.label = nn.Embedding(CLASSES, C)
        layers = (Block(size.heads, size.head_dim) for _ in range(size.layers))
        self.blocks = nn.ModuleList(layers)
        self.register_buffer("angles", positions(self.shape, size.head_dim), persistent=False)

    def forward(self, videos: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        T, side, _ = self.shape
        cut = videos.unflatten(3, (side, -1)).unflatten(2, (side, -1))  # [B, T, H, p, W, p]
        x = self.patch_in(cut.transpose(3, 4).flatten(4).flatten(1, 3))  # [B, N, C]
        condition = self.time(times[:, None]) + self.label(labels)
        for block in self.blocks:
            x = block(x, condition, self.angles)
        x = self.patch_out(F.layer_norm(x, x.shape[-1:]))
        x = x.unflatten(1, self.shape).unflatten(4, (self.patch, -1))
        return x.transpose(3, 4).flatten(4).flatten(2, 3)


class Eyes(nn.Module):
    """Videos [B, T, IMAGE, IMAGE] -> logits [B, CLASSES], of `features` [B, FEATURES]."""

    def __init__(self):
        super().__init__()
        widths, layers = (1, 16, 32, FEATURES), []
        for a, b in itertools.pairwise(widths):
            layers += [nn.Conv3d(a, b, 3, (1, 2, 2), 1), nn.GroupNorm(8, b), nn.GELU()]
        self.layers = nn.Sequential(*layers, nn.Conv3d(FEATURES, FEATURES, 3, 2, 1))
        self.head = nn.Linear(FEATURES, CLASSES)

    def features(self, videos: Tensor) -> Tensor:
        return self.layers(videos[:, None]).flatten(2).mean(2)

    def forward(self, videos: Tensor) -> Tensor:
        return self.head(self.features(videos))


# -- training ----


def trained_eyes(size: Size, device: torch.device) -> Eyes:
    """Which class a video is of."""
    torch.manual_seed(1)
    generator, model = torch.Generator(device).manual_seed(1), Eyes().to(device)

    def loss_of():
        drawn, labels = videos(size.batch, frames_of(size), generator)
        return F.cross_entropy(model(drawn).float(), labels)

    train("eyes", model, loss_of, size, device)
    return model.float()


def trained_video(
    size: Size,
    device: torch.device,
    eyes: Eyes | None,
    start: nn.Module | None = None,
    seed: int = 0,
) -> Subject:
    """start: a model, maybe of another N, whose parameters the training begins with."""
    torch.manual_seed(seed)
    generator, T = torch.Generator(device).manual_seed(seed), frames_of(size)
    model = VideoDiT(size).to(device)
    if start is not None:
        model.load_state_dict(start.state_dict())

    def loss_of(model):
        drawn, labels = videos(size.batch, T, generator)
        noise = noise_like(drawn, generator)
        times = torch.randn(size.batch, generator=generator, device=device).sigmoid()
        at = torch.lerp(drawn, noise, times[:, None, None, None])
        return F.mse_loss(model(at, times, labels).float(), noise - drawn)

    note = train("video", model, lambda: loss_of(model), size, device)
    drawn, labels = videos(size.evaluated, T, generator)
    noise = noise_like(drawn, generator)

    @torch.no_grad()
    def run(model):
        x = noise
        for step in range(EULER):
            times = torch.full_like(labels, 1 - step / EULER, dtype=x.dtype)
            x = x - model(x, times, labels) / EULER
        return x

    @torch.no_grad()
    def score(out, exact):
        error = (out - exact).double().square().mean().item()
        figures = {"psnr": 10 * math.log10(2**2 / error) if error else None}
        if eyes is not None:
            figures["frechet"] = frechet(*(eyes.features(x).double() for x in (out, drawn)))
        return figures

    def inputs(time):
        few = slice(min(4, size.evaluated))
        times = torch.full_like(labels[few], time, dtype=drawn.dtype)
        return torch.lerp(drawn[few], noise[few], time), times, labels[few]

    return Subject(model.float(), run, score, inputs, loss_of, size.layers, note)
