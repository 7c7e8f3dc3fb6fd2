"""What dropping blocks of keys costs a diffusion transformer: PSNR against density.

$ python bench/sparse.py          # on a GPU minutes, on two CPU cores half an hour
$ python bench/sparse.py --json   # and bench/results/cpu or GPU/DATE-sparse.json

The model is bench/trained.py's dit with 1,024 tokens. Attention is exact in all (SDPA in bf16, a
mask in the place of the lists), so that what is measured is the choice of blocks alone: by
``sage::select_blocks``, with thresholds of self-similarity, and as many blocks drawn at random, the
diagonal among them. From 0: all steps; from 3: the first 3 of 12 steps compute all blocks.

Shapes: B batch, H heads, N tokens, D head_dim.
"""

import argparse
import datetime
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import machine, trained
from bench.attention import RESULTS, save
from bench.capture import attending
from bench.trained import EULER, Size, Subject
from sage_inductor.ops.reference.exact import how_often
from sage_inductor.ops.selector import BLOCK_SIZE, Selection
from sage_inductor.ops.visibility import BlockLists

EYES = Size(2, 2, 64, 256, 16, 100, 1)
SIZES = {
    "cpu": Size(3, 2, 64, 1024, 4, 400, 4),
    "cuda": Size(4, 4, 128, 1024, 32, 2000, 64),
}
TOP_K = 0.7, 0.5, 0.3, 0.2, 0.1
SIMILARITIES = 0.0, 0.1, 0.2, 0.3
EXACT_STEPS = 0, 3


class Selected:
    """Attention by selected blocks from a step on. densities: of the calls so far."""

    def __init__(self, subject: Subject, selection: Selection, first_step: int, at_random: bool):
        self.selection, self.at_random = selection, at_random
        self.exact = first_step * subject.calls
        self.made, self.densities = 0, []
        self.generator = torch.Generator(subject.example[0].device).manual_seed(0)
        self.sdpa = F.scaled_dot_product_attention

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        self.made += 1
        if self.made <= self.exact:
            return self.sdpa(q, k, v)
        found = q, k, q.shape[3] ** -0.5, *self.selection, *BLOCK_SIZE
        counts, indices = torch.ops.sage.select_blocks(*found)
        if self.at_random:  # but one on the diagonal
            drawn = torch.rand(indices.shape, generator=self.generator, device=q.device)
            m = torch.arange(indices.shape[2])
            drawn[..., m, m * BLOCK_SIZE[0] // BLOCK_SIZE[1]] = -1
            indices = drawn.argsort(3).int()
        self.densities.append(counts.sum().item() / indices.numel())
        lists = BlockLists(counts, indices, None, None, *BLOCK_SIZE)
        seen = how_often(lists, q.shape[2], k.shape[2], None, None, False) > 0
        return self.sdpa(q, k, v, attn_mask=seen)


@torch.no_grad()
def measure(subject: Subject) -> list[dict]:
    """A row for each choice of blocks, printed as it comes. density: in the last of EXACT_STEPS."""
    exact = subject.run(subject.model)
    choices = [(f"similarity {x}", x, False) for x in SIMILARITIES] + [("random", 0.0, True)]
    rows = []
    for name, similarity, at_random in choices:
        for top_k in TOP_K:
            row = dict(plan="sparse", choice=name, top_k=top_k)
            for first_step in EXACT_STEPS:
                selection = Selection(top_k, similarity=similarity)
                selected = Selected(subject, selection, first_step, at_random)
                with attending(selected):
                    psnr = subject.score(subject.run(subject.model), exact)["psnr"]
                row[f"psnr_from_{first_step}"] = psnr  # None: equal
                row["density"] = sum(selected.densities) / max(1, len(selected.densities))
            rows.append(row)
            figures = (f"from {n}: {row[f'psnr_from_{n}'] or math.inf:.1f} dB" for n in EXACT_STEPS)
            density = f"density {row['density']:.2f}"
            print(f"  {name:15} top_k {top_k}: {density}, {', '.join(figures)}", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", nargs="?", const="", help="write the results, here or to a file")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    eyes = trained.vit(EYES, device).model
    size = SIZES[device.type]
    subject = trained.dit(size, device, eyes)
    result = {
        "date": datetime.datetime.now().isoformat(timespec="seconds"),
        "machine": machine.describe(device) if on_gpu else {"gpu": "cpu"},
        "versions": machine.versions(),
        "model": f"dit, {size.N} tokens, {size.layers} layers, {subject.note}",
        "method": f"{size.evaluated} images, {EULER} steps; blocks of {BLOCK_SIZE} in exact "
        "attention; PSNR to samples of all blocks",
    }
    print(f"{result['model']}\n{result['method']}")
    result["rows"] = measure(subject)
    path = args.json
    if path == "":
        folder = Path(RESULTS) / result["machine"]["gpu"].lower().replace(" ", "-")
        path = folder / f"{result['date'][:10]}-sparse.json"
    save(result, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
