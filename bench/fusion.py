"""What preparing k and v adds to a compiled graph that has made q, k and v.

$ python bench/fusion.py --json             # bench/results/GPU/DATE-fusion.json

The graph: RMSNorm and RoPE on q and k, v as it comes or projected. Inductor's gives q, k and v in
bf16; ours gives k and v to `sage::prepare` besides. The floor of the difference is the ten bytes
for each element of k (k and v read twice and written once) at the rate of this run's copy.
"""

import functools

import torch
import torch.nn.functional as F

import sage_inductor  # noqa: F401  (registers what sage::prepare opens into)
from bench import harness
from bench.blocks import angles, interleaved, pairs, rotate_half
from bench.cases import Case
from bench.measure import Provider, Runner, interleave, summary
from bench.model import Wrong
from bench.tables import case_of, groups, markdown, show, wrapped
from sage_inductor.ops.recipe import NAMED

RECIPE = "sage2-8b-per-token"
ENCODED = NAMED[RECIPE].encode()  # Dynamo cannot trace it
CASES = (
    Case(4, 32, 32, 8192, 128),
    Case(1, 24, 24, 4608, 128, model="flux"),
    Case(2, 48, 48, 17776, 64, model="cogvideox"),
    Case(1, 40, 40, 75600, 128, model="wan14b_720p"),
)
COPY, PREPARATION = 4, 10  # bytes an element of k
NEAR = 0.01  # how far prepared tensors may be apart: k is rounded to bf16 by two graphs


def main(argv=None) -> int:
    args = harness.parser(__doc__, rounds=3, target_ms=20.0).parse_args(argv)
    device = harness.gpu(args)
    torch.manual_seed(0)
    method = {
        "units": "ms a call; added: ours less inductor's",
        "time": f"median of {args.rounds} rounds of {args.target_ms:g} ms of CUDA graphs, after a "
        "third of the turn untimed; all take turns",
        "recipe": RECIPE,
    }
    result = harness.Result("fusion", method, args)
    torch.set_grad_enabled(False)
    for case in CASES:
        rows = measure(case, args, device)
        torch.cuda.empty_cache()
        result.add(rows)
        show(f"\n{table(rows)}")
    return result.end()


# -- the graphs ----


def rotated_half(x, cos, sin):
    return x * torch.cat([cos, cos], -1) + rotate_half(x) * torch.cat([sin, sin], -1)


def halves(x, cos, sin):
    x1, x2 = x.chunk(2, -1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)


ROPES = {"rotate-half": rotated_half, "halves": halves, "interleaved": interleaved}
GRAPHS = (*((rope, False) for rope in ROPES), ("rotate-half", True))  # with v projected or not


def graph(rope: str, q, k, v, norm_q, norm_k, project, cos, sin):
    """q, k, v [B, N, H, D] -> the same normalized and rotated, as [B, H, N, D]."""
    q = F.rms_norm(q, norm_q.shape, norm_q, 1e-6).transpose(1, 2)
    k = F.rms_norm(k, norm_k.shape, norm_k, 1e-6).transpose(1, 2)
    if project is not None:
        v = F.linear(v.flatten(2), project).view(v.shape)
    q, k = (ROPES[rope](x, cos, sin).bfloat16() for x in (q, k))
    return q, k, v.transpose(1, 2)


def prepared(rope: str, *inputs):
    q, k, v = graph(rope, *inputs)
    return q, *torch.ops.sage.prepare(k, v, None, ENCODED, False)


def inputs(case: Case, rope: str, projected: bool, qkv, device) -> tuple:
    """`graph`'s, around q, k and v [B, N, H, D]."""
    C = case.H_kv * case.D
    project = None
    if projected:
        project = torch.randn(C, C, device=device, dtype=torch.bfloat16) / C**0.5
    norms = [torch.rand(case.D, device=device).bfloat16() + 0.5 for _ in range(2)]
    table = pairs(case.N, case.D) if rope == "interleaved" else angles(case.N, case.D)
    return *qkv, *norms, project, *(x.to(device) for x in table)


# -- the measurement ----


def measure(case: Case, args, device) -> list[dict]:
    shape = (case.B, case.N, case.H_kv, case.D)
    qkv = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(3)]
    copy = Provider("copy", lambda x, y: y.copy_(x), lambda x: (x, torch.empty_like(x)))
    runners = {"copy": Runner(copy, [qkv[:1]])}
    for rope, projected in GRAPHS:
        torch._dynamo.reset()  # all are one code object to Dynamo, which keeps only so many
        given = inputs(case, rope, projected, qkv, device)
        made = {}
        for name, function in (("inductor", graph), ("ours", prepared)):
            call = torch.compile(functools.partial(function, rope), fullgraph=True)
            made[name] = runners[name, rope, projected] = Runner(Provider(name, call), [given])
            made[name].run()
        check(made["ours"].out, made["inductor"].out)
    found = interleave(runners, args.rounds, args.target_ms)
    times = {name: summary(each) for name, each in found.items()}
    return [
        row(case, rope, projected, times["copy"]["ms"],
            *(times[name, rope, projected] for name in ("inductor", "ours")))
        for rope, projected in GRAPHS
    ]  # fmt: skip


def check(ours, inductors) -> None:
    """Raise Wrong unless our graph prepares the k and v that inductor's gives."""
    (q, *found), (right_q, k, v) = ours, inductors
    right = torch.ops.sage.prepare(k, v, None, ENCODED, False)
    for x, y in zip((q, *found), (right_q, *right), strict=True):
        x, y = x.float(), y.float()
        # The mean of what has none is 0; of these q and k a number is about 1.
        error = (x - y).norm() / y.norm().clamp(min=0.03 * y.numel() ** 0.5)
        if not error < NEAR:
            raise Wrong(f"a tensor {list(x.shape)} is {error:.1e} from what prepare gives")


def row(case: Case, rope: str, projected: bool, copy_ms, inductor, ours) -> dict:
    floor = copy_ms * PREPARATION / COPY
    added = ours["ms"] - inductor["ms"]
    return {
        "plan": "fusion",
        **dict(B=case.B, H=case.H_kv, N=case.N, D=case.D, model=case.model),
        "graph": rope + ", v projected" * projected,
        "inductor": inductor,
        "ours": ours,
        "added_ms": added,
        "floor_ms": floor,
        "ratio": added / floor,
    }


def table(rows: list[dict]) -> str:
    graphs = list(groups(rows, "graph"))
    lines = [["B x H x N x D", *graphs]]
    for its in groups([{**row, "case": case_of(row)} for row in rows], "case").values():
        found = {row["graph"]: row for row in its}
        cells = (f"{found[g]['added_ms']:#.3g} ({found[g]['ratio']:.2f}x)" for g in graphs)
        lines.append([its[0]["case"], *cells])
    title = (
        "What it adds to a graph of RMSNorm and RoPE, by how RoPE is written: ms (x the floor of "
        "two passes)"
    )
    return f"{wrapped(title)}\n\n{markdown(lines)}"


if __name__ == "__main__":
    harness.run(main, fresh=harness.CACHES[:1])
