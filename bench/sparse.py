"""What leaving out keys costs a video model: its samples against density, by the order of tokens
and by what stands for the keys that are left out.

$ python bench/sparse.py                       # on one busy CPU core an hour
$ python bench/sparse.py --json --models 3     # and bench/results/GPU/DATE-sparse.json
$ python bench/sparse.py --corrections --json  # a quarter of an hour: DATE-corrections.json

The model is bench/video.py's. A block of 128 queries (a tile) computes the blocks of 64 keys that
``sage::select_blocks`` names, without a threshold of self-similarity: the diagonal, and by pooled
scores as many as the density asks for. Attention is plain PyTorch in fp32. With x_ij = s q_i.k_j, a
block J of which tile I computes some keys J(I), or none, stands in its softmax as one key more:

    o_i = (sum_J sum_{j in J(I)} e^x_ij v_j + sum_J e^(s q_i.k_J + b_IJ) v_J) / (the same without v)

with the block's means k_J and v_J, and b_IJ = log(keys of J that are not in J(I)), or what TAILS
says. So b is -inf for a block that is computed whole: none of its keys counts twice.

psnr: of samples to the dense model's of the same noise, in dB. frechet: of their features to drawn
videos'. snr: of attention's output to exact attention's, less the mean of v, in dB, for each layer
at a noise level; there q, k and v are the dense model's. Density counts the steps that are dense.

A gain is a difference of psnr. --models: trained from other seeds, too, each with its gains.

The last table is of the first model trained further by another rule for the blocks, SLA's
(arXiv:2509.24006) without its linear branch, in raster order: what it loses if another rule than
its own serves it.

--corrections: snr of CORRECTIONS in cubes, mean of LEVELS and of layers but the first, beside that
of a row tail of 64 with the blocks that the same time buys, as `cost_ms` estimates it; then of the
model trained further on videos four times as long, on a GPU sixteen times, too.

Shapes: B batch, H heads, N tokens, D head_dim, M_q tiles, M_kv blocks of keys, M_t of the tail.
"""

import copy
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench import harness, video
from bench.capture import attending, capture
from bench.tables import groups, markdown, show, wrapped
from bench.trained import EULER, Size, train
from bench.video import Subject
from sage_inductor.ops.recipe import NAMED
from sage_inductor.ops.sparse.selector import BLOCK_SIZE, PARTS, Selection

EYES = Size(0, 0, 0, 4096, 32, 400, 0)
SIZES = {
    "cpu": Size(3, 2, 64, 1024, 4, 1200, 8, rate=2e-3),
    "cuda": Size(3, 2, 128, 4096, 16, 1600, 64),
}
DENSITIES = 0.5, 0.3, 0.2
DENSE_STEPS = 3
LEVELS = 0.9, 0.5, 0.15  # of noise
ENOUGH = 64  # videos: of fewer a Frechet distance says nothing
MORE = 64  # keys that a tile computes beside its blocks
FURTHER = {"steps": 500, "rate": 3e-4, "seconds": math.inf}  # of the training by SLA's rule
SLA_SHARE = 0.2
SERVED = "sage2-8b-per-token"


# -- which keys a tile computes ----


def means(x: Tensor, n: int) -> Tensor:
    """Of each n rows of x [B, H, N, D], and of those that are left: [B, H, ceil(N / n), D]."""
    N = x.shape[2]
    rows = (N - torch.arange(0, N, n, device=x.device)).clamp(max=n)
    return F.pad(x, (0, 0, 0, -N % n)).unflatten(2, (-1, n)).sum(3) / rows[:, None]


def pooled(q: Tensor, k: Tensor, density: float, similarity: float = 0.0) -> Tensor:
    """Our rule's blocks: bool [B, H, M_q, M_kv], round(density * M_kv) of a row, but at least the
    diagonal, and more by a threshold of self-similarity."""
    tile, block = BLOCK_SIZE
    M, diagonal = -(-k.shape[2] // block), tile // block
    rest = max(1, M - diagonal)
    more = max(0, round(density * M) - diagonal)
    selection = Selection(more * PARTS // rest / PARTS, similarity=similarity)
    scale = q.shape[3] ** -0.5
    counts, indices = torch.ops.sage.select_blocks(q, k, scale, *selection.arguments())
    first = torch.arange(M, device=q.device) < counts[..., None]
    return torch.zeros_like(first).scatter_(3, indices.long(), first)


@torch.no_grad()
def sla(q: Tensor, k: Tensor, share: float, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """SLA's blocks, bool [B, H, M_q, M_kv]: int(share * M_kv) of a row, at least one, by the
    product of means, each rounded to dtype. Nothing is always kept, and nothing is scaled."""
    k = k.to(dtype) - k.to(dtype).mean(2, keepdim=True)
    q_mean, k_mean = (
        means(x.float(), n).to(dtype) for x, n in zip((q.to(dtype), k), BLOCK_SIZE, strict=True)
    )
    with torch.autocast(q.device.type, enabled=False):
        scores = q_mean @ k_mean.mT
    count = max(1, int(share * scores.shape[3]))
    kept = torch.zeros_like(scores, dtype=torch.bool)
    return kept.scatter_(3, scores.topk(count).indices, True)


def keys_of(kept: Tensor, N: int) -> Tensor:
    """The keys of blocks: bool [B, H, M_q, N]."""
    return kept.repeat_interleave(BLOCK_SIZE[1], 3)[..., :N]


def with_more(q: Tensor, k: Tensor, seen: Tensor, group: int, more: int) -> Tensor:
    """And so many keys that a tile does not see yet, in groups of neighbours, by the product of the
    tile's mean and the group's."""
    scores, hidden = means(q, BLOCK_SIZE[0]) @ means(k, group).mT, seen[..., ::group]
    best = scores.masked_fill(hidden, -math.inf).topk(more // group).indices
    found = torch.zeros_like(hidden).scatter_(3, best, True)
    return seen | found.repeat_interleave(group, 3)[..., : k.shape[2]]


# -- attention ----

TAILS = {
    "drop": "nothing",
    "tile": "q_i is its tile's mean: one number for all of the tile's queries",
    "row": "as above",
    "variance": "b + s^2/2 sum_d q_id^2 var_J(k_d): of independent normal channels",
    "scout": "b = log of the sum over J's other keys of e^(s q_I.(k_j - k_J)), q_I the tile's mean",
}


def attend(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, tail: str = "drop", block: int = 64
) -> Tensor:
    """Attention [B, H, N, D] by the keys that each tile sees, bool [B, H, M_q, N], and by a tail of
    blocks of so many keys for the others. q, k, v [B, H, N, D]."""
    (N, D), tile = q.shape[2:], BLOCK_SIZE[0]
    q, k = q * D**-0.5, k - k.mean(2, keepdim=True)
    bias = torch.zeros_like(seen, dtype=q.dtype).masked_fill(~seen, -math.inf)
    keys, values = k, v
    if tail != "drop":
        k_mean = means(k, block)
        keys, values = torch.cat([k, k_mean], 2), torch.cat([v, means(v, block)], 2)
        left = F.pad(~seen, (0, -N % block)).unflatten(3, (-1, block))  # [B, H, M_q, M_t, block]
        log_mass = left.sum(4).log()
        centroid = means(q, tile)
        if tail == "scout":
            apart = centroid @ (k - k_mean.repeat_interleave(block, 2)[:, :, :N]).mT
            apart = F.pad(apart, (0, -N % block)).unflatten(3, (-1, block))
            log_mass = apart.masked_fill(~left, -math.inf).logsumexp(4)
        bias = torch.cat([bias, log_mass], 3)

    rows = F.pad(q, (0, 0, 0, -N % tile))
    scores = (rows @ keys.mT).unflatten(2, (-1, tile))  # [B, H, M_q, tile, N + M_t]
    if tail == "tile":
        scores[..., N:] = (centroid @ k_mean.mT).unsqueeze(3)
    elif tail == "variance":
        spread = means(k.square(), block) - k_mean.square()
        scores[..., N:] += (rows.square() @ spread.mT / 2).unflatten(2, (-1, tile))
    scores += bias.unsqueeze(3)
    return (scores.softmax(-1).flatten(2, 3) @ values)[:, :, :N]


def served(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    """By the kernels of SERVED that take lists of blocks, on CPU the emulation."""
    q, k, v = (x.bfloat16() for x in (q, k, v))
    lists = (
        kept.sum(3).int(),
        (~kept).int().argsort(dim=3, stable=True).int(),
        None,
        None,
        *BLOCK_SIZE,
    )
    return torch.ops.sage.sdpa(
        q, k, v, None, [], None, None, False, q.shape[3] ** -0.5, NAMED[SERVED].encode(), None,
        False, False, *lists,
    )[0].float()  # fmt: skip


# -- the cases ----


class Way(NamedTuple):
    """tail and block: `attend`'s. group and more: `with_more`'s. similarity: `pooled`'s."""

    tail: str = "drop"
    block: int = 64
    group: int = 1
    more: int = 0
    similarity: float = 0.0


WAYS = {
    "drop": Way(),
    "tile-wide tail": Way("tile"),
    "row tail of 64": Way("row"),
    "row tail of 32": Way("row", 32),
}
CURVES = {  # in cubes alone
    "variance": Way("variance"),
    "scout": Way("scout"),
    "row tail, a block more": Way("row", group=64, more=MORE),
    "row tail, 4 groups of 16 more": Way("row", group=16, more=MORE),
    "row tail, 64 tokens more": Way("row", more=MORE),
}
OURS = {"drop, similarity 0.1": Way(similarity=0.1)}  # what `keep` does, in raster order
CORRECTIONS = {
    **{name: (WAYS | CURVES)[name] for name in ("drop", "row tail of 32", "variance", "scout")},
    "row tail of 16": Way("row", 16),
    **{f"row tail, {n} single keys": Way("row", more=n) for n in (4, 16, 64, 256)},
}
ORDERS = "raster", "cubes"


class Case(NamedTuple):
    order: str
    way: str
    asked: float  # density, without dense steps
    dense_steps: int = 0


def cases() -> Iterator[Case]:
    """What matters most comes first: a budget leaves out the last."""
    for steps in (0, DENSE_STEPS):
        for order in ORDERS:
            yield from (Case(order, way, asked, steps) for way in WAYS for asked in DENSITIES)
        if not steps:
            yield from (Case("cubes", way, asked) for way in CURVES for asked in DENSITIES)
            yield from (Case("raster", way, asked) for way in OURS for asked in DENSITIES)


class Sparse:
    """Attention of a case. densities: of the calls so far."""

    def __init__(self, case: Case, subject: Subject):
        self.case, self.calls = case, subject.calls
        self.way = (WAYS | CURVES | OURS | CORRECTIONS)[case.way]
        self.order = None
        if case.order == "cubes":
            self.order = video.cubes(subject.model.shape).to(subject.model.angles.device)
        self.made, self.densities = 0, []
        self.sdpa = F.scaled_dot_product_attention

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        step = self.made // self.calls
        self.made += 1
        if step < self.case.dense_steps:
            self.densities.append(torch.ones((), device=q.device))
            return self.sdpa(q, k, v)
        if self.order is not None:
            q, k, v = (x[:, :, self.order] for x in (q, k, v))
        seen = keys_of(pooled(q, k, self.case.asked, self.way.similarity), k.shape[2])
        if self.way.more:
            seen = with_more(q, k, seen, self.way.group, self.way.more)
        self.densities.append(seen.float().mean())
        o = attend(q, k, v, seen, self.way.tail, self.way.block)
        return o if self.order is None else o[:, :, self.order.argsort()]


def measure(subject: Subject, cases: Iterable[Case], until: float = math.inf) -> Iterator[dict]:
    """A row for each case, printed as it comes; none that would begin after `until` of
    time.perf_counter()."""
    exact = subject.run(subject.model)
    calls = {level: capture(subject.model, subject.inputs(level)) for level in LEVELS}
    for case in cases:
        if time.perf_counter() > until:
            print("the budget is spent: the other cases are left out", flush=True)
            return
        attention = Sparse(case, subject)
        with attending(attention):
            figures = subject.score(subject.run(subject.model), exact)
        density = torch.stack(attention.densities).mean().item()
        row = {"plan": "sparse", **case._asdict(), "density": density, **figures}
        if not case.dense_steps:
            for level, its in calls.items():
                row[f"snr {level}"] = [snr(attention, call) for call in its]
        print(f"  {title(row):44} density {density:.3f}, {shown(figures)}", flush=True)
        yield row


@torch.no_grad()
def snr(attention: Callable, call) -> float:
    """In dB, of a captured call."""
    exact = F.scaled_dot_product_attention(call.q, call.k, call.v)
    error = attention(call.q, call.k, call.v, False) - exact
    signal = exact - call.v.mean(2, keepdim=True)
    return 10 * (signal.double().square().sum() / error.double().square().sum()).log10().item()


# -- a model that another rule has trained ----


def by_blocks(rule: Callable, tail: str = "drop") -> Callable:
    """rule(q, k) -> blocks."""
    return lambda q, k, v, _: attend(q, k, v, keys_of(rule(q, k), k.shape[2]), tail)


def measure_trained(subject: Subject, size: Size) -> Iterator[dict]:
    """subject trained FURTHER by SLA's rule: a row for each way to serve it. Its figures are of
    samples to those by that rule in fp32."""

    def rule(q, k, dtype=torch.bfloat16):
        return sla(q, k, SLA_SHARE, dtype)

    def ours(q, k):
        return pooled(q, k, rule(q, k).float().mean().item())

    model, sdpa = further(subject, by_blocks(rule), size), F.scaled_dot_product_attention
    ways = {
        "its rule": by_blocks(rule),
        f"its rule, {SERVED}": lambda q, k, v, _: served(q, k, v, rule(q, k)),
        "its rule, scores in fp32": by_blocks(lambda q, k: rule(q, k, torch.float32)),
        "our rule": by_blocks(ours),
        f"our rule, {SERVED}": lambda q, k, v, _: served(q, k, v, ours(q, k)),
        "our rule, row tail of 64": by_blocks(ours, "row"),
        "dense": lambda q, k, v, _: sdpa(q, k, v),
    }
    exact = None
    for name, attention in ways.items():
        with attending(attention):
            samples = subject.run(model)
        exact = samples if exact is None else exact
        figures = subject.score(samples, exact)
        print(f"  trained by sla, {name:34} {shown(figures)}", flush=True)
        yield {"plan": "sparse-trained", "way": name, "share": SLA_SHARE, **figures}


def further(subject: Subject, attention: Callable, size: Size) -> nn.Module:
    """A copy that has been trained further with attention in the place of SDPA."""
    model = copy.deepcopy(subject.model).train().requires_grad_(True)
    size = dataclasses.replace(size, **FURTHER)
    with attending(attention):
        train("video by sla", model, lambda: subject.loss(model), size, model.angles.device)
    return model.float()


# -- corrections at equal time ----

DENSE_MS = 80.0  # of (1, 24, TOKENS, 128) on an H200, 2026-11-29; also what follows
TOKENS = 75_600
LISTS_MS = (0.1, 0.3, 0.5, 1.0), (9.14, 26.03, 42.30, DENSE_MS)  # by density
TAIL_MS = {64: 1.75, 32: 4.0, 16: 8.0}  # 1.6 to 1.85; 3.3 to 4.7; not measured: twice 32's
GRID = 2, 3, 4, 5, 6, 8, 10, 12, 14  # sixteenths of the blocks
TRAINING = {  # seconds, of the model and of each of videos four times as long as the one before
    "cpu": (400, 220),
    "cuda": (60, 60, 60),
}


def cost_ms(way: Way, density: float, share: float = 0.0) -> float:
    """Estimated, in the correction's favour. density: of blocks. share: of keys, single ones'.

    lists: LISTS_MS at density + 2 share: a key that is gathered takes the time of two
    selection: 0.7
    a tail: TAIL_MS. variance: a half more, since its product of q^2 has no p v
    scout, single keys: each tile's mean by all keys in INT8, without p v: DENSE_MS / (2 * 128)
    single keys: those scores in 16 bits, written and read once, 4 TB/s: 4 * 24 M_q N B"""
    ms = float(numpy.interp(density + 2 * share, *LISTS_MS)) + 0.7
    if way.tail != "drop":
        ms += TAIL_MS[way.block] * (1.5 if way.tail == "variance" else 1)
    if way.tail == "scout" or way.more:
        ms += DENSE_MS / (2 * BLOCK_SIZE[0])
    return ms + bool(way.more) * 4 * 24 * -(-TOKENS // BLOCK_SIZE[0]) * TOKENS / 4e9


def measure_corrections(subject: Subject) -> Iterator[dict]:
    """of: the keys of which single ones, at most 1/16 here, are timed as a part: N or TOKENS. time:
    in DENSE_MS. equal: snr of the row tail of 64 at that time."""
    N = math.prod(subject.model.shape)
    calls = [call for level in LEVELS for call in capture(subject.model, subject.inputs(level))[1:]]

    def found(name: str, asked: float, of: int = N) -> tuple[float, float]:
        attention = Sparse(Case("cubes", name, asked), subject)
        decibels = statistics.mean(snr(attention, call) for call in calls)
        way = attention.way
        density = torch.stack(attention.densities).mean().item() - way.more / N
        return cost_ms(way, density, way.more / of) / DENSE_MS, decibels

    curve = [*zip(*(found(ROW[1], sixteenths / 16) for sixteenths in GRID), strict=True)]
    for name, way in CORRECTIONS.items():
        for of in (N, TOKENS) if way.more == MORE else (N,):
            for asked in DENSITIES if way.more <= N / 16 else ():
                time, decibels = found(name, asked, of)
                row = {"plan": "corrections", "N": N, "way": name, "of": of, "asked": asked}
                row |= {"time": time, "snr": decibels, "equal": float(numpy.interp(time, *curve))}
                yield row


def corrections_table(rows: list[dict]) -> str:
    text = "Estimated time in parts of the dense call's: dB, row tail of 64 at that time, gain.\n"
    for N, its in groups(rows, "N").items():
        lines = {}
        for row in its:
            name = row["way"] + f", timed as of {TOKENS:,}" * (row["of"] != N)
            gain = row["snr"] - row["equal"]
            cell = f"{row['time']:.2f}: {row['snr']:.1f}, {row['equal']:.1f}, {gain:+.1f}"
            lines.setdefault(name, [name]).append(cell)
        head = [f"{N:,} tokens, in cubes", *map(str, DENSITIES)]
        text += "\n" + markdown([head, *lines.values()])
    return text


def main_corrections(args, size: Size) -> int:
    first, *longer = TRAINING[args.device.type]
    size = dataclasses.replace(size, seconds=first)
    subjects = [video.trained_video(size, args.device, None)]
    for seconds in longer:
        more = {"N": 4 * size.N, "batch": max(1, size.batch // 4), "steps": max(1, size.steps // 4)}
        size = dataclasses.replace(size, **more, evaluated=1, seconds=seconds)
        subjects.append(video.trained_video(size, args.device, None, subjects[-1].model))
    models = "; ".join(f"{' x '.join(map(str, x.model.shape))}: {x.note}" for x in subjects)
    method = f"4 videos, 1 of the longer; attention in fp32; at noise levels {LEVELS}; {models}"
    result = harness.Result("corrections", method, args)
    for subject in subjects:
        result.add([*measure_corrections(subject)])
    show(corrections_table(result["rows"]))
    return result.end()


# -- tables ----


def title(row: dict) -> str:
    """What a line of the table, and of the plot, is called."""
    steps = row["dense_steps"]
    return f"{row['order']}, {row['way']}" + (f", first {steps} steps dense" if steps else "")


def shown(figures: dict) -> str:
    psnr, distance = figures["psnr"], figures.get("frechet")
    parts = ["equal" if psnr is None else f"{psnr:.1f}"]
    return ", ".join(parts if distance is None else [*parts, f"{distance:.2f}"])


def level_means(row: dict) -> list[float]:
    """The mean signal-to-noise ratio of the layers from the second on, by level: the first sees
    little but noise."""
    layers = (row[f"snr {level}"] for level in LEVELS)
    return [statistics.mean(each[1:] or each) for each in layers]


def table(rows: list[dict]) -> str:
    """A line per way, a column per density: samples, then attention's output."""
    distance = ", Frechet distance" * ("frechet" in rows[0])
    levels = " / ".join(map(str, LEVELS))
    return "\n".join(
        [
            f"The part of the keys that is computed: PSNR of samples in dB{distance}.\n",
            by_density(rows, lambda row: f"{row['density']:.2f}: {shown(row)}"),
            f"Attention's output in dB, at noise {levels}: mean of the layers but the first.\n",
            by_density(
                [row for row in rows if not row["dense_steps"]],
                lambda row: " / ".join(f"{x:.1f}" for x in level_means(row)),
            ),
        ]
    )


def by_density(rows: list[dict], cell: Callable[[dict], str]) -> str:
    columns = groups(rows, "asked")
    lines = [["order of tokens, what stands for the other keys", *map(str, columns)]]
    for name, its in by_title(rows).items():
        cells = {row["asked"]: cell(row) for row in its}
        lines += [[name, *(cells.get(x, "") for x in columns)]]
    return markdown(lines)


def by_title(rows: list[dict]) -> dict[str, list[dict]]:
    found = {}
    for row in rows:
        found.setdefault(title(row), []).append(row)
    return found


class Gain(NamedTuple):
    """dB of one (order, way) over another, in the mean of densities. asked: what speaks for it."""

    of: tuple[str, str]
    over: tuple[str, str]
    densities: tuple[float, ...]
    asked: float

    def cases(self) -> list[Case]:
        return [Case(*way, x) for way in (self.of, self.over) for x in self.densities]


ROW = "cubes", "row tail of 64"
GAINS = {
    "in cubes, row tail of 64 over drop, the mean": Gain(ROW, ("cubes", "drop"), DENSITIES, 2.5),
    "in cubes, row tail of 64 over tile-wide tail, at 0.3": Gain(
        ROW, ("cubes", "tile-wide tail"), (0.3,), 1.0
    ),
    "in cubes, row tail of 64 over raster, drop, at 0.3": Gain(
        ROW, ("raster", "drop"), (0.3,), 5.0
    ),
}


def gains(rows: list[dict], model: str) -> dict:
    """A row. Nothing of a gain whose rows a budget has left out."""
    psnr = {Case(*(row[x] for x in Case._fields)): row["psnr"] for row in rows}
    found = {}
    for name, gain in GAINS.items():
        if all(case in psnr for case in gain.cases()):
            each = [psnr[case] for case in gain.cases()]
            half = len(gain.densities)
            found[name] = statistics.mean(each[:half]) - statistics.mean(each[half:])
    return {"plan": "sparse-gains", "model": model, "gains": found}


def gains_table(rows: list[dict]) -> str:
    """A column per model."""
    models = [f"model {i}" for i, _ in enumerate(rows)]
    lines = [["PSNR of samples, dB", *models, "mean", "asked"]]
    for name, gain in GAINS.items():
        found = [row["gains"][name] for row in rows if name in row["gains"]]
        if len(found) == len(rows):
            cells = (f"{x:+.1f}" for x in (*found, statistics.mean(found)))
            lines += [[name, *cells, f"{gain.asked:g}"]]
    notes = "; ".join(f"{name}: {row['model']}" for name, row in zip(models, rows, strict=True))
    return f"{markdown(lines)}\n{wrapped(notes + '.')}\n"


def trained_table(rows: list[dict]) -> str:
    distance = ", Frechet distance" * ("frechet" in rows[0])
    share = rows[0]["share"]
    lines = [["served by", f"PSNR, dB{distance}"], *([row["way"], shown(row)] for row in rows)]
    return f"Trained further by SLA's rule, {share:g} of the blocks.\n\n{markdown(lines)}"


def main(argv=None) -> int:
    started = time.perf_counter()
    parser = harness.parser(__doc__)
    parser.add_argument(
        "--budget", type=float, default=math.inf, help="no new case after so many s"
    )
    parser.add_argument("--models", type=harness.positive, default=1, help="default: 1")
    parser.add_argument("--corrections", action="store_true", help="nothing else")
    args = parser.parse_args(argv)
    device = harness.current(args)
    size = SIZES[device.type]
    if args.corrections:
        return main_corrections(args, size)
    eyes = None
    if size.evaluated >= ENOUGH:
        eyes = video.trained_eyes(dataclasses.replace(EYES, N=size.N), device)
    subject = video.trained_video(size, device, eyes)
    method = (
        f"{size.evaluated} videos, {EULER} steps; blocks of {BLOCK_SIZE}; attention in fp32; PSNR "
        "to samples of the dense model"
    ) + ", Frechet distance of their features to as many other videos'" * (eyes is not None)
    T, H, W = subject.model.shape
    model = (
        f"video, {T} x {H} x {W} tokens, {size.layers} layers, {size.heads} heads of "
        f"{size.head_dim}, {subject.note}"
    )
    result = harness.Result("sparse", method, args, model=model)
    harness.show(model=model)
    for row in measure(subject, cases(), started + args.budget):
        result.add([row])
    result.add([gains(result["rows"], subject.note)])
    for row in measure_trained(subject, size):
        result.add([row])
    of_gains = list(dict.fromkeys(case for gain in GAINS.values() for case in gain.cases()))
    for seed in range(1, args.models):
        subject = video.trained_video(size, device, eyes, seed=seed)
        result.add([gains([*measure(subject, of_gains)], subject.note)])
    return result.end()


if __name__ == "__main__":
    harness.run(main)
