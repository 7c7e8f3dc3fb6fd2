"""The preparation of k and v: the time it takes beside the time its bytes take.

$ python bench/preparation.py --json        # bench/results/GPU/DATE-preparation.json

The floor is what it must read and write at the rate at which this run copies a tensor. It has
another beside it, that of two passes: k and v read twice, where statistics of the whole sequence
come before the first quantized row.
Speed is reported behind a gate: what is prepared must be what the reference prepares.
"""

import sys

import torch

from bench import harness
from bench.cases import MODELS, Case
from bench.measure import Provider, Runner, draw, draw_sets, interleave, summary
from bench.tables import case_of, markdown, show, wrapped
from sage_inductor.ops.recipe import NAMED
from sage_inductor.ops.sdpa import prepare
from sage_inductor.ops.visibility import Visibility

CASES = (
    Case(4, 32, 32, 8192, 128),
    Case(4, 32, 32, 2048, 128),
    *(case for case in MODELS if case.model in ("flux", "cogvideox", "wan14b_720p")),
)
RECIPE = NAMED["sage2-8b-per-token"]
# Bytes that are moved for each element of k (and of v, which has as many): 16-bit in, 8-bit out.
COPY, ONE_PASS, TWO_PASSES = 4, 6, 10  # the second read may hit L2


def main(argv=None) -> int:
    args = harness.parser(__doc__, rounds=5, target_ms=20.0).parse_args(argv)
    device = harness.gpu(args)
    torch.manual_seed(0)
    check(device)
    method = (
        f"median of {args.rounds} rounds of {args.target_ms:g} ms of CUDA graphs, in turns; k and "
        "v [B, H, N, D] in bf16, enough sets to fill L2 twice"
    )
    result = harness.Result("preparation", method, args)
    for case in CASES:
        result.add([measure(case, args, device)])
        show(table(result["rows"][-1:]))
    return result.end()


@torch.no_grad()
def measure(case: Case, args, device) -> dict:
    sets = draw_sets(case, device, dynamic=False)
    copy = Provider("copy", lambda x, y: y.copy_(x), lambda q, k, v: (k, torch.empty_like(k)))
    ours = Provider("prepare", prepared, lambda q, k, v: (k, v))
    runners = {each.name: Runner(each, sets) for each in (copy, ours)}
    times = interleave(runners, args.rounds, args.target_ms)
    return row(case, *(summary(times[name]) for name in runners))


def prepared(k, v):
    return prepare(k, v, Visibility(), RECIPE).k


def row(case: Case, copy: dict, found: dict) -> dict:
    """Beside its floor: its bytes at the rate of the copy."""
    floor = copy["ms"] * ONE_PASS / COPY
    shape = dict(B=case.B, H=case.H_kv, N=case.N, D=case.D, model=case.model)
    more = dict(copy_ms=copy["ms"], floor_ms=floor, ratio=found["ms"] / floor)
    return {"plan": "preparation", **shape, **found, **more}


def table(rows: list[dict]) -> str:
    lines = [["B x H x N x D", "ms", "x the floor of one pass", "of two"]]
    for row in rows:
        two = row["ratio"] * ONE_PASS / TWO_PASSES
        lines.append([case_of(row), f"{row['ms']:#.3g}", f"{row['ratio']:.2f}", f"{two:.2f}"])
    title = "Preparation of k and v, beside what a copy takes for 6 (one pass) and 10 bytes (two)"
    return f"{wrapped(title)}\n\n{markdown(lines)}"


@torch.no_grad()
def check(device) -> None:
    """Exit unless what is timed is what the reference computes: but for sums in another order,
    which move a mean by an ulp or two and a code in 10,000 by one."""
    _, k, v = draw(Case(1, 2, 2, 300, 80), "outlier", device)
    found, right = (prepare(k.to(x), v.to(x), Visibility(), RECIPE) for x in (device, "cpu"))
    for x, y in zip(found.tensors(), right.tensors(), strict=True):
        x, y = x.float().cpu(), y.float()
        near = ((x - y).abs() <= 1e-4 * (1 + y.abs())).float().mean()
        if not near > 0.999:
            sys.exit(f"no speed is reported: {1 - near:.1%} of what is prepared is wrong")


if __name__ == "__main__":
    harness.run(main)
