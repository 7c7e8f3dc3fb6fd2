"""What leaving out keys costs a diffusion transformer: quality of its samples against density.

$ python bench/sparse.py                       # on two CPU cores an hour
$ python bench/sparse.py --json --budget 220   # and bench/results/GPU/DATE-sparse.json

The model is bench/trained.py's dit with 1,024 tokens, in bf16; psnr and frechet are its, beside
samples of exact attention. Density is the part of the keys that a query computes, the mean over
heads, layers and all steps. With dense steps so many first ones of 12 compute all keys.

RECIPES: blocks by ``sage::select_blocks`` in exact attention (SDPA, a mask in the place of the
lists), or in ``sage::sdpa`` by the lists: its kernels, on CPU the emulation. With two names the
second computes the steps of EDGE.
OTHERS: exact attention by other keys than those, at the density that the selector has. Of
skip-softmax that is the part of p v: q k^T, the other half of the work, is computed for all keys.

Shapes: B batch, H heads, N tokens, D head_dim, M_q blocks of queries, M_kv of keys.
"""

import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import harness, trained
from bench.capture import attending
from bench.tables import groups, markdown
from bench.trained import EULER, Size, Subject
from sage_inductor.ops.recipe import NAMED
from sage_inductor.ops.reference.exact import how_often
from sage_inductor.ops.sparse.selector import BLOCK_SIZE, Selection
from sage_inductor.ops.visibility import NO_LISTS, BlockLists

EYES = {"cpu": Size(2, 2, 64, 256, 16, 100, 1), "cuda": Size(2, 2, 64, 256, 64, 600, 1, 10)}
SIZES = {"cpu": Size(3, 2, 64, 1024, 4, 400, 4), "cuda": Size(4, 4, 128, 1024, 32, 4000, 256, 80)}
TOP_K = 1.0, 0.7, 0.5, 0.3, 0.2
DENSE_STEPS = 0, 3
STEP = 64, 128  # queries and keys: a warpgroup's in the Hopper kernel
EDGE = 3, 1  # the first steps and the last
ENOUGH = 64  # images: of fewer a Frechet distance says nothing (of 4, samples "beat" exact ones)


# -- the keys, as lists of blocks or bool [B, H, 1, N] ----


def selected(q: Tensor, k: Tensor, top_k: float, density: float, similarity=0.1) -> BlockLists:
    selection = Selection(top_k, similarity=similarity)
    found = torch.ops.sage.select_blocks(
        q, k, q.shape[3] ** -0.5, *selection.arguments, *BLOCK_SIZE
    )
    return BlockLists(*found, None, None, *BLOCK_SIZE)


def drawn(q: Tensor, k: Tensor, top_k: float, density: float) -> BlockLists:
    """As many as are selected, and one of them on the diagonal."""
    lists = selected(q, k, top_k, density)
    scores = torch.rand(lists.kv_indices.shape, device=q.device)
    m = torch.arange(scores.shape[2])
    scores[..., m, m * BLOCK_SIZE[0] // BLOCK_SIZE[1]] = -1
    return lists._replace(kv_indices=scores.argsort(3).int())


def windows(q: Tensor, k: Tensor, top_k: float, density: float) -> BlockLists:
    """Every s-th block for half of the density, then those nearest to the diagonal. The same for
    all heads."""
    M_q, M_kv = (-(-x.shape[2] // n) for x, n in zip((q, k), BLOCK_SIZE, strict=True))
    of_q, of_kv = (
        (torch.arange(M, device=q.device) + 0.5) * n
        for M, n in zip((M_q, M_kv), BLOCK_SIZE, strict=True)
    )
    apart = (of_q[:, None] - of_kv).abs()
    apart[:, :: round(2 / density)] = -1
    counts = torch.full((1, 1, M_q), round(density * M_kv), dtype=torch.int32, device=q.device)
    return BlockLists(counts, apart.argsort(1).int()[None, None], None, None, *BLOCK_SIZE)


def pruned(q: Tensor, k: Tensor, top_k: float, density: float) -> Tensor:
    """The keys of a head that its queries attend to most, on average: the same for all queries."""
    attention = (q @ k.mT * q.shape[3] ** -0.5).softmax(-1, dtype=torch.float32).mean(2)
    most = attention.topk(round(density * k.shape[2])).indices
    return torch.zeros_like(attention, dtype=torch.bool).scatter_(2, most, True).unsqueeze(2)


def skipped(q: Tensor, k: Tensor, top_k: float, density: float) -> Tensor:
    """Skip-softmax (BLASST, arXiv:2512.12087): a step of the kernel leaves out p v where its scores
    are far enough below the largest so far, in each row. The threshold is a call's, and leaves
    `density` of the steps; q k^T they compute all the same."""
    (N_q, N_kv), (rows, keys) = (q.shape[2], k.shape[2]), STEP
    scores = (q @ k.mT).float() * q.shape[3] ** -0.5
    scores = F.pad(scores, (0, -N_kv % keys, 0, -N_q % rows), value=-math.inf)
    largest = scores.unflatten(3, (-1, keys)).amax(4)
    before = F.pad(largest.cummax(3).values[..., :-1], (1, 0), value=-math.inf)
    above = (largest - before).nan_to_num(-math.inf, math.inf)  # nan: rows that are padding
    above = above.unflatten(2, (-1, rows)).amax(3)
    least = above.flatten().kthvalue(above.numel() - round(density * above.numel()) + 1).values
    kept = (above >= least).repeat_interleave(rows, 2).repeat_interleave(keys, 3)
    return kept[:, :, :N_q, :N_kv]


# -- the cases ----

RECIPES = {
    "exact": None,
    "sage2-8b-per-token": ("sage2-8b-per-token",) * 2,
    "sage2-4b, edges sage1-per-token": ("sage2-4b", "sage1-per-token"),
}
OTHERS = {
    "pruned keys": pruned,
    "skip-softmax": skipped,
    "window and stride": windows,
    "similarity 0": functools.partial(selected, similarity=0.0),
    "similarity 0.2": functools.partial(selected, similarity=0.2),
    "random": drawn,
}


class Case(NamedTuple):
    choice: str
    top_k: float
    dense_steps: int
    keys: Callable
    recipes: tuple[str, str] | None  # of the steps between and at the edges; None: exact


def cases() -> Iterator[Case]:
    for choice, recipes in RECIPES.items():
        for dense_steps in DENSE_STEPS:
            for top_k in TOP_K:
                if top_k < 1 or not dense_steps:
                    yield Case(choice, top_k, dense_steps, selected, recipes)
    for choice, keys in OTHERS.items():
        yield from (Case(choice, top_k, 0, keys, None) for top_k in TOP_K if top_k < 1)


class Sparse:
    """Attention of a case. density: of the selector, for keys that are to be as many. densities: of
    the calls so far."""

    def __init__(self, case: Case, calls: int, density: float = 0.0):
        self.case, self.calls, self.density = case, calls, density
        self.made, self.densities = 0, []
        self.sdpa = F.scaled_dot_product_attention

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        step, case = self.made // self.calls, self.case
        self.made += 1
        keys, density = NO_LISTS, torch.ones((), device=q.device)
        if case.top_k < 1 and step >= case.dense_steps:
            keys = case.keys(q, k, case.top_k, self.density)
            density = keys.float().mean() if isinstance(keys, Tensor) else share(keys)
        self.densities.append(density)
        if case.recipes:
            at_edge = step < EDGE[0] or step >= EULER - EDGE[1]
            recipe = NAMED[case.recipes[at_edge]].encode()
            scale = q.shape[3] ** -0.5
            return torch.ops.sage.sdpa(
                q, k, v, None, [], None, None, False, scale, recipe, None, False, False, *keys
            )[0]
        if keys is NO_LISTS:
            return self.sdpa(q, k, v)
        if isinstance(keys, BlockLists):
            keys = how_often(keys, q.shape[2], k.shape[2], None, None, False) > 0
        return self.sdpa(q, k, v, attn_mask=keys)


def share(lists: BlockLists) -> Tensor:
    return lists.kv_num_blocks.sum() / lists.kv_indices.numel()


@torch.no_grad()
def measure(subject: Subject, until: float = math.inf) -> Iterator[dict]:
    """A row for each case that can be computed, printed as it comes; none that would begin after
    `until` of time.perf_counter()."""
    exact, densities = subject.run(subject.model), {}
    for case in cases():
        if time.perf_counter() > until:
            print("the budget is spent: the other cases are left out", flush=True)
            return
        attention = Sparse(case, subject.calls, densities.get(case.top_k, 0.0))
        torch.manual_seed(0)
        what = f"  {case.choice:32} top_k {case.top_k}, {case.dense_steps} dense steps"
        try:
            with attending(attention):
                figures = subject.score(subject.run(subject.model), exact)
        except Exception as error:  # one that fails must not cost the others
            print(f"{what}: {type(error).__name__}: {error}", flush=True)
            continue
        density = torch.stack(attention.densities).mean().item()
        densities.setdefault(case.top_k, density)  # the first is the selector's
        row = case._asdict() | figures | {"plan": "sparse", "density": density}
        del row["keys"]
        shown = (f"{name} {x or math.inf:.2f}" for name, x in figures.items())  # None: equal
        print(f"{what}: density {density:.2f}, {', '.join(shown)}", flush=True)
        yield row


def table(rows: list[dict]) -> str:
    """A line per way to choose keys, a column per top_k."""
    columns = groups(rows, "top_k")
    lines = [["keys", *(f"top_k {x:g}" for x in columns)]]
    for title, its in by_choice(rows).items():
        cells = {row["top_k"]: cell(row) for row in its}
        lines += [[title, *(cells.get(x, "") for x in columns)]]
    distance = ", Frechet distance" * ("frechet" in rows[0])
    return f"The part of the keys that is computed: PSNR in dB{distance}.\n\n{markdown(lines)}"


def by_choice(rows: list[dict]) -> dict[str, list[dict]]:
    """What a line of the table, and of the plot, is called -> its rows."""
    found = {}
    for row in rows:
        steps = row["dense_steps"]
        title = row["choice"] + (f", first {steps} steps dense" if steps else "")
        found.setdefault(title, []).append(row)
    return found


def cell(row: dict) -> str:
    figures = ["equal" if row["psnr"] is None else f"{row['psnr']:.1f}"]
    figures += [f"{row['frechet']:.2f}"] if "frechet" in row else []
    return f"{row['density']:.2f}: {', '.join(figures)}"


def main(argv=None) -> int:
    started = time.perf_counter()
    parser = harness.parser(__doc__)
    parser.add_argument(
        "--budget", type=float, default=math.inf, help="no new case after so many s"
    )
    args = parser.parse_args(argv)
    device = harness.current(args)
    size = SIZES[device.type]
    subject = trained.dit(size, device, trained.vit(EYES[device.type], device).model)
    method = (
        f"{size.evaluated} images, {EULER} steps; edges: the first {EDGE[0]} and the last "
        f"{EDGE[1]}; blocks of {BLOCK_SIZE}; PSNR to samples of exact attention"
    ) + ", Frechet distance of their features to other images'" * (size.evaluated >= ENOUGH)
    model = f"dit, {size.N} tokens, {size.layers} layers, {subject.note}"
    result = harness.Result("sparse", method, args, model=model)
    harness.show(model=model)
    for row in measure(subject, started + args.budget):
        if size.evaluated < ENOUGH:
            row.pop("frechet", None)
        result.add([row])
    return result.end()


if __name__ == "__main__":
    harness.run(main)
