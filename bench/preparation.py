"""The preparation of k and v, by step: the time it takes beside the time its bytes take.

$ python bench/preparation.py --json        # bench/results/GPU/DATE-preparation.json

The floor is what the steps must read and write at the rate at which this run copies a tensor. All
of the preparation has another beside it, that of two passes: k and v read twice, where statistics
of the whole sequence come before the first quantized row.
Speed is reported behind a gate: what is prepared must be what the reference prepares.
"""

import sys

import torch

from bench import harness
from bench.cases import MODELS, Case
from bench.measure import Provider, Runner, draw, draw_sets, interleave, summary
from bench.tables import case_of, markdown, show, wrapped
from sage_inductor.ops.quantize.op import quantize_k, quantize_v, smooth
from sage_inductor.ops.recipe import NAMED
from sage_inductor.ops.sdpa import prepare
from sage_inductor.ops.visibility import Visibility

CASES = (
    Case(4, 32, 32, 8192, 128),
    Case(4, 32, 32, 2048, 128),
    *(case for case in MODELS if case.model in ("flux", "cogvideox", "wan14b_720p")),
)
# Bytes that a step must move for each element of k (and of v, which has as many): 16-bit in, 8-bit
# out. "prepare" is all the steps.
BYTES = {"copy": 4, "smooth": 4, "quantize k": 3, "quantize v": 3, "prepare": 6}
TWO_PASSES = 10  # bytes; the second read may hit L2


def main(argv=None) -> int:
    parser = harness.parser(__doc__, rounds=5, target_ms=20.0)
    recipes = [name for name, recipe in NAMED.items() if recipe.pv == "fp8"]
    parser.add_argument("--recipe", choices=recipes, default="sage2-8b-per-token")
    args = parser.parse_args(argv)
    device = harness.gpu(args)
    torch.manual_seed(0)
    check(args.recipe, device)
    method = (
        f"median of {args.rounds} rounds of {args.target_ms:g} ms of CUDA graphs, in turns; k and "
        "v [B, H, N, D] in bf16, enough sets to fill L2 twice"
    )
    result = harness.Result("preparation", method, args, recipe=args.recipe)
    for case in CASES:
        rows = measure(case, args, device)
        result.add(rows)
        print(f"\n{case_of(rows[0])}")
        for row in rows:
            print("  {step:10} {ms:8.4f} ms, floor {floor_ms:8.4f} ms, {ratio:5.2f}x".format(**row))
    show(f"\n{table(result['rows'])}")
    result.end()
    return 0


def steps(recipe: str) -> list[Provider]:
    """Each (q, k, v) -> a tensor; what a step is given is computed before the clock starts."""
    r = NAMED[recipe]
    copy = Provider("copy", lambda x, y: y.copy_(x), lambda q, k, v: (k, torch.empty_like(k)))
    whole = Provider(
        "prepare", lambda k, v: prepare(k, v, Visibility(), r).k, lambda q, k, v: (k, v)
    )
    if r.sharing.one_pass:
        return [copy, whole]

    def smoothed(q, k, v):
        (k_mean, v_mean), (_, v_amax) = smooth([k, v], None)
        return k, v, k_mean, v_mean, v_amax

    def k_alone(k, v, k_mean, *of_v):
        return quantize_k(k, k_mean, r.encode(), None)[0]

    def v_alone(k, v, k_mean, *of_v):
        return quantize_v(v, *of_v, r.encode(), False)[0]

    return [
        copy,
        Provider("smooth", lambda k, v: smooth([k, v], None)[0], lambda q, k, v: (k, v)),
        Provider("quantize k", k_alone, smoothed),
        Provider("quantize v", v_alone, smoothed),
        whole,
    ]


@torch.no_grad()
def measure(case: Case, args, device) -> list[dict]:
    sets = draw_sets(case, device, dynamic=False)
    runners = {step.name: Runner(step, sets) for step in steps(args.recipe)}
    times = {
        name: summary(each)
        for name, each in interleave(runners, args.rounds, args.target_ms).items()
    }
    elements = case.B * case.H_kv * case.N * case.D
    return [row(case, name, found, times["copy"]["ms"], elements) for name, found in times.items()]


def row(case: Case, step: str, found: dict, copy_ms: float, elements: int) -> dict:
    """A step beside its floor: its bytes at the rate of the copy."""
    floor = copy_ms * BYTES[step] / BYTES["copy"]
    return {
        "plan": "preparation",
        **dict(B=case.B, H=case.H_kv, N=case.N, D=case.D, model=case.model, step=step),
        **found,
        "floor_ms": floor,
        "ratio": found["ms"] / floor,
        "tb_s": BYTES[step] * elements / found["ms"] / 1e9,
    }


def table(rows: list[dict]) -> str:
    lines = [["B x H x N x D", "ms", "x the floor of one pass", "of two"]]
    for row in rows:
        if row["step"] == "prepare":
            two = row["ratio"] * BYTES["prepare"] / TWO_PASSES
            lines.append([case_of(row), f"{row['ms']:#.3g}", f"{row['ratio']:.2f}", f"{two:.2f}"])
    title = "Preparation of k and v, beside what a copy takes for 6 (one pass) and 10 bytes (two)"
    return f"{wrapped(title)}\n\n{markdown(lines)}"


@torch.no_grad()
def check(recipe: str, device) -> None:
    """Exit unless what is timed is what the reference computes: but for sums in another order,
    which move a mean by an ulp or two and a code in 10,000 by one."""
    _, k, v = draw(Case(1, 2, 2, 300, 80), "outlier", device)
    r = NAMED[recipe]
    found, right = (prepare(k.to(x), v.to(x), Visibility(), r) for x in (device, "cpu"))
    for x, y in zip(found.tensors(), right.tensors(), strict=True):
        x, y = x.float().cpu(), y.float()
        near = ((x - y).abs() <= 1e-4 * (1 + y.abs())).float().mean()
        if not near > 0.999:
            sys.exit(f"no speed is reported: {1 - near:.1%} of what {recipe} prepares is wrong")


if __name__ == "__main__":
    harness.run(main)
