"""Attention that trains, beside SDPA: the time of forward and backward, what is kept between them,
and how near the gradients are.

$ python bench/training.py          # on a GPU about a minute
$ python bench/training.py --json   # and bench/results/GPU/DATE-backward.json

    forward   what a forward under autograd takes, with all preparation
    step      forward and backward
    backward  of what a forward kept, with all preparation
    kept      bytes a forward leaves for its backward, for each channel and token of q
    dq, ...   relative L1 of the gradients to float64, of one head of the shape's length

SDPA's backends are timed alone; "best" is the faster. Turns and medians: bench/measure.py.
"""

import argparse
import datetime
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import gradients, machine
from bench.attention import RESULTS, save
from bench.measure import Provider, Runner, interleave, summary
from sage_inductor.ops.training.gradients import training_call

ROUNDS, TARGET_MS = 5, 40.0
MAX_EXACT = 16384  # of a head in float64: N x N numbers at once
GRADIENTS = ("dq", "dk", "dv")


class Shape(NamedTuple):
    B: int
    H_q: int
    H_kv: int
    N: int
    D: int

    def __str__(self):
        heads = f"{self.H_q}" if self.H_q == self.H_kv else f"{self.H_q}/{self.H_kv}"
        return f"{self.B}x{heads}x{self.N}x{self.D}"


SHAPES = (
    Shape(1, 32, 32, 4096, 128),
    Shape(1, 32, 32, 8192, 128),
    Shape(1, 32, 32, 16384, 128),
    Shape(1, 32, 32, 32768, 128),
    Shape(1, 24, 24, 4608, 128),  # Flux
    Shape(1, 32, 8, 8192, 128),
    Shape(8, 16, 16, 4096, 64),
    Shape(2, 32, 32, 16384, 64),
)


def by_sdpa(backend: SDPBackend):
    def attend(q, k, v):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])

    return attend


def by_op(training: str):
    def attend(q, k, v):
        op, args = training_call(training, q, k, v, False, q.shape[3] ** -0.5, out_bnhd=False)
        return op(*args)[0]

    return attend


ATTENTION = {
    "cudnn": by_sdpa(SDPBackend.CUDNN_ATTENTION),
    "flash": by_sdpa(SDPBackend.FLASH_ATTENTION),
    "g": by_op("g"),
    "sagebwd": by_op("sagebwd"),
}
RIVALS = ("cudnn", "flash")


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", nargs="?", const="", metavar="FILE", help="write the results")
    parser.add_argument("--only", nargs="+", default=list(ATTENTION), choices=ATTENTION)
    parser.add_argument("--shapes", type=int, nargs="+", help="of the list, by number")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench/training.py times GPU kernels: torch sees no CUDA device", file=sys.stderr)
        return 2
    device = torch.device("cuda", 0)
    result = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine.describe(device),
        "versions": machine.versions(),
        "method": {"time": f"ms, median of {ROUNDS} turns of {TARGET_MS:g} ms, in turns"},
        "rows": [],
    }
    path = args.json
    if path == "":
        slug = result["machine"]["gpu"].lower().replace(" ", "-")
        path = Path(RESULTS) / slug / f"{result['date'][:10]}-backward.json"
    print(f"{result['machine']['gpu']}, {result['versions']}")
    for number, shape in enumerate(SHAPES):
        if args.shapes is None or number in args.shapes:
            result["rows"] += measure(shape, args.only, device)
            save(result, path)
    return 0


def measure(shape: Shape, names: list[str], device: torch.device) -> list[dict]:
    """A row for each way to attend."""
    B, H_q, H_kv, N, D = shape
    q, k, v, do = (
        torch.randn(B, H, N, D, device=device, dtype=torch.bfloat16) for H in (H_q, H_kv, H_kv, H_q)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    runners, found = {}, {}
    for name in names:
        attend = ATTENTION[name]
        out = attend(*leaves)
        parts = {
            "forward": (attend, leaves),
            "backward": (lambda *x: grad(*x)[0], (out, leaves, do)),
            "step": (lambda *x, attend=attend: grad(attend(*x), x, do)[0], leaves),
        }
        for part, (call, given) in parts.items():  # launched: a graph captures no kept forward's
            runners[name, part] = Runner(Provider(name, call, captures=False), [given])
        found[name] = kept_bytes(attend, leaves), errors(attend, shape, device)
    times = interleave(runners, ROUNDS, TARGET_MS)
    rows = []
    for name in names:
        kept, of = found[name]
        ms = {part: summary(times[name, part]) for part in ("forward", "backward", "step")}
        rows.append({
            "plan": "backward", "provider": name, "shape": str(shape), **shape._asdict(),
            "times": ms, "kept": kept / (B * H_q * N * D), "rel_l1": of,
            "peak_bytes": runners[name, "step"].peak_bytes(),
        })  # fmt: skip
        near = "/".join(f"{of[each]:.4f}" for each in GRADIENTS) if of else "-"
        its = "".join(f" {part} {ms[part]['ms']:8.3f}{over(times, name, part)}" for part in ms)
        print(f"{shape!s:22} {name:8}{its} kept {rows[-1]['kept']:.2f} {near}")
    return rows


def over(times: dict, name: str, part: str) -> str:
    """How much faster than the best of the rivals that ran."""
    rivals = [statistics.median(times[n, p]) for n, p in times if n in RIVALS and p == part]
    if name in RIVALS or not rivals:
        return " " * 8
    return f" ({min(rivals) / statistics.median(times[name, part]):.2f}x)"


def grad(out, leaves, do):
    return torch.autograd.grad(out, leaves, do, retain_graph=True)


def kept_bytes(attend, leaves) -> int:
    """Of the tensors that a forward saves; a storage that two of them share counts once."""
    storages = {}

    def note(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        attend(*leaves)
    return sum(storages.values())


def errors(attend, shape: Shape, device) -> dict | None:
    """One head of k. dO's tokens differ in size, k has a bias in each channel, v a mean."""
    N, D, group = shape.N, shape.D, shape.H_q // shape.H_kv
    if N > MAX_EXACT:
        return None
    q, k, v, do = (torch.randn(1, H, N, D, device=device) for H in (group, 1, 1, group))
    k, v = k + 2 * torch.randn(D, device=device), v + 1
    do = do * torch.exp(torch.randn(1, group, N, 1, device=device))
    q, k, v, do = (x.bfloat16() for x in (q, k, v, do))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    found = grad(attend(*leaves), leaves, do)
    exact = gradients.exact(q, k, v, do)[1:]
    return {
        name: ((x.double() - y).abs().sum() / y.abs().sum()).item()
        for name, x, y in zip(GRADIENTS, found, exact, strict=True)
    }


if __name__ == "__main__":
    sys.exit(main())
