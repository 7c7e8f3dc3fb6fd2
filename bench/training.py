"""Attention that trains, beside SDPA: the time of forward and backward, what is kept between them,
and how near the gradients are.

$ python bench/training.py          # on a GPU about a minute
$ python bench/training.py --json   # and bench/results/GPU/DATE-backward.json
$ python bench/training.py --plan memory --json    # DATE-memory.json

Plan "backward": attention alone.

    forward   what a forward under autograd takes, with all preparation
    step      forward and backward
    backward  of what a forward kept, with all preparation
    kept      bytes a forward leaves for its backward, for each channel and token of q
    dq, ...   relative L1 of the gradients to float64, of one head of the shape's length

SDPA's backends are timed alone; "best" is the faster. Ops are called in eager mode, where a step
takes the host more than a millisecond, but for "compiled": SDPA's call by backend="sage". Turns and
medians: bench/measure.py.

Plan "memory": a step of a whole transformer, whose layers backend="inductor" and backend="sage"
compile, each once for all of them.

    kept      bytes a forward leaves for its backward, beside the weights
    peak      what a step has allocated at most, beside weights and inputs: the gradients too
    near      the least CosSim of a weight's gradient with inductor's
"""

import dataclasses
import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import blocks, gradients, harness
from bench.cases import Case
from bench.measure import Provider, Runner, interleave, relative_l1, summary
from bench.tables import groups, markdown, show
from sage_inductor.lowering import replay
from sage_inductor.ops.training.gradients import training_op

ROUNDS, TARGET_MS = 5, 40.0
MAX_EXACT = 16384  # of a head in float64: N x N numbers at once
GRADIENTS = ("dq", "dk", "dv")


SHAPES = (
    Case(1, 32, 32, 4096, 128),
    Case(1, 32, 32, 8192, 128),
    Case(1, 32, 32, 16384, 128),
    Case(1, 32, 32, 32768, 128),
    Case(1, 24, 24, 4608, 128),  # Flux
    Case(1, 32, 8, 8192, 128),
    Case(8, 16, 16, 4096, 64),
    Case(2, 32, 32, 16384, 64),
    Case(1, 32, 32, 4096, 128, is_causal=True),
    Case(1, 32, 32, 8192, 128, is_causal=True),
    Case(1, 32, 8, 8192, 128, is_causal=True),
    Case(1, 32, 32, 16384, 128, is_causal=True),
    Case(1, 32, 32, 32768, 128, is_causal=True),
    Case(8, 16, 16, 4096, 64, is_causal=True),
)


def sdpa(q, k, v, is_causal=False):
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=grouped)


def by_op(training: str):
    op = training_op(training)
    return lambda q, k, v, is_causal=False: op(q, k, v, is_causal, q.shape[3] ** -0.5, False)[0]


def compiled_by(training: str):
    """As a user gets it, of a call of SDPA's: later calls are launched by C++."""
    return torch.compile(sdpa, backend="sage", options={"sage.training": training}, dynamic=False)


ATTENTION = {
    "cudnn": sdpa_kernel(SDPBackend.CUDNN_ATTENTION)(sdpa),
    "flash": sdpa_kernel(SDPBackend.FLASH_ATTENTION)(sdpa),
    "fp8-backward": by_op("fp8-backward"),
    "fp8-backward, compiled": compiled_by("fp8-backward"),
    "sagebwd": by_op("sagebwd"),
}
RIVALS = ("cudnn", "flash")


def main(argv=None) -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--plan", choices=("backward", "memory"), default="backward")
    parser.add_argument(
        "--only", nargs="+", default=list(ATTENTION), choices=ATTENTION, help="of plan backward"
    )
    args = parser.parse_args(argv)
    device = harness.gpu(args)
    method = {"time": f"ms, median of {ROUNDS} turns of {TARGET_MS:g} ms, in turns"}
    result = harness.Result(args.plan, method, args)
    if args.plan == "memory":
        result.add(measure_steps(Model(), device))
        show(memory_table(result["rows"]))
    else:
        for shape in SHAPES:
            rows = measure(shape, args.only, device)
            result.add(rows)
            show(table(rows))
    return result.end()


# -- attention alone ----


def measure(shape: Case, names: list[str], device: torch.device) -> list[dict]:
    """A row for each way to attend."""
    B, H_q, H_kv, N, D = shape.B, shape.H_q, shape.H_kv, shape.N, shape.D
    q, k, v, do = (
        torch.randn(B, H, N, D, device=device, dtype=torch.bfloat16) for H in (H_q, H_kv, H_kv, H_q)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    runners, found = {}, {}
    replay.library().result()  # which launches compiled calls, once it is compiled itself
    torch._dynamo.reset()
    for name in names:
        attend = functools.partial(ATTENTION[name], is_causal=shape.is_causal)
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
            "plan": "backward", "provider": name, "shape": shape.shape, **dataclasses.asdict(shape),
            "times": ms, "kept": kept / (B * H_q * N * D), "rel_l1": of,
            "peak_bytes": runners[name, "step"].peak_bytes(),
        })  # fmt: skip
    return rows


def table(rows: list[dict]) -> str:
    """A line per shape and way to train: ms, and beside ours how much faster than SDPA's best."""
    parts = ("forward", "backward", "step")
    lines = [["B x H x N x D", "", *parts, "kept", "dQ/dK/dV, %"]]
    for shape, its in groups(rows, "shape").items():
        rivals = [row["times"] for row in its if row["provider"] in RIVALS]
        for row in its:
            cells = []
            for part in parts:
                ms = row["times"][part]["ms"]
                cells.append(f"{ms:#.4g}")
                if rivals and row["provider"] not in RIVALS:
                    cells[-1] += f" ({min(each[part]['ms'] for each in rivals) / ms:.2f}x)"
            error = row["rel_l1"]
            near = "/".join(f"{100 * x:.1f}" for x in error.values()) if error else "-"
            lines.append([shape, row["provider"], *cells, f"{row['kept']:.1f}", near])
    return markdown(lines)


def grad(out, leaves, do):
    return torch.autograd.grad(out, leaves, do, retain_graph=True)


def kept_bytes(call, inputs, beside=()) -> int:
    """Of the tensors that a forward saves, but for those in `beside`; a storage that two of them
    share counts once."""
    storages, known = {}, {x.untyped_storage().data_ptr() for x in beside}

    def note(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        out = call(*inputs)  # holds what it saved until all is counted
    del out
    return sum(size for storage, size in storages.items() if storage not in known)


def errors(attend, shape: Case, device) -> dict | None:
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
    exact = gradients.exact(q, k, v, do, shape.is_causal)[1:]
    return dict(zip(GRADIENTS, map(relative_l1, found, exact), strict=True))


# -- a step of a whole transformer ----


class Model(NamedTuple):
    """The layers of a transformer for video or images. A token has H D channels."""

    layers: int = 24
    B: int = 1
    H: int = 16
    N: int = 8192
    D: int = 128

    def __str__(self):
        return f"{self.layers} layers, {self.B}x{self.H}x{self.N}x{self.D}"


class Layer(nn.Module):
    """Attention with QK-norm and RoPE, and an MLP."""

    def __init__(self, C: int, D: int):
        super().__init__()
        self.D = D
        self.norm1, self.norm2 = (nn.RMSNorm(C, eps=1e-6) for _ in range(2))
        self.to_q, self.to_k, self.to_v, self.to_out = (
            nn.Linear(C, C, bias=False) for _ in range(4)
        )
        self.norm_q, self.norm_k = (nn.RMSNorm(D, eps=1e-6) for _ in range(2))
        self.mlp = blocks.mlp(C, 4 * C)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, N, C], cos and sin [N, D]."""
        h, cos, sin = self.norm1(x), cos[None, :, None], sin[None, :, None]
        q, k, v = (to(h).unflatten(-1, (-1, self.D)) for to in (self.to_q, self.to_k, self.to_v))
        q, k = (blocks.interleaved(h, cos, sin) for h in (self.norm_q(q), self.norm_k(k)))
        out = F.scaled_dot_product_attention(*(h.transpose(1, 2) for h in (q, k, v)))
        x = x + self.to_out(out.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


COMPILED = {
    "inductor": {"backend": "inductor"},
    "fp8-backward": {
        "backend": "sage",
        "options": {"sage.training": "fp8-backward", "sage.strict": True},
    },
}
# The fastest first, by this bench: both columns take the first that a call can have.
PRIORITY = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


def measure_steps(model: Model, device: torch.device, compiled: dict = COMPILED) -> list[dict]:
    """A row for each way to compile, inductor's first; without a GPU no times and peaks."""
    layers, tables = draw(model, device)
    x, grad = (
        torch.randn(model.B, model.N, model.H * model.D, device=device, dtype=torch.bfloat16)
        for _ in range(2)
    )
    x.requires_grad_()  # as behind an embedding: the first layer's graph is that of all
    leaves = [x, *layers.parameters()]
    forwards, rows, exact = {}, [], None
    for name, given in compiled.items():
        forwards[name] = forward = by_compiler(layers, tables, given)
        found = torch.autograd.grad(forward(x), leaves, grad)
        exact = found if exact is None else exact
        rows.append({
            "plan": "memory", "provider": name, "shape": str(model), **model._asdict(),
            "kept_bytes": kept_bytes(forward, [x], beside=[*leaves, *tables]),
            "weight_bytes": sum(p.nbytes for p in layers.parameters()),
            "cos_sim": min(map(cos_sim, found, exact)),
        })  # fmt: skip
    del found, exact
    for row, more in zip(rows, timed(forwards, x, leaves, grad), strict=True):
        row.update(more)
    return rows


def memory_table(rows: list[dict]) -> str:
    """A line per model and way to compile it, the others beside inductor."""
    lines = [["", "compiled by", "step, ms", "kept, GiB", "peak, GiB", "weights, GiB", "CosSim"]]
    for shape, its in groups(rows, "shape").items():
        first = its[0]
        for row in its:
            ms, inductors = (each["times"]["step"]["ms"] for each in (row, first))
            cells = [f"{ms:#.4g}" + (f" ({inductors / ms:.2f}x)" if row is not first else "")]
            for part in ("kept_bytes", "peak_bytes"):
                less = f" ({row[part] / first[part] - 1:+.1%})" if row is not first else ""
                cells.append(f"{row[part] / 2**30:.2f}{less}")
            weights = f"{row['weight_bytes'] / 2**30:.2f}"
            lines.append([shape, row["provider"], *cells, weights, f"{row['cos_sim']:.4f}"])
    return markdown(lines)


def timed(forwards: dict, x: Tensor, leaves: list[Tensor], grad: Tensor) -> list[dict]:
    """The times and the peak of a step by each; nothing without a GPU."""
    if not torch.cuda.is_available():
        return [{} for _ in forwards]
    runners = {
        name: Runner(Provider(name, step_of(forward, leaves, grad), captures=False), [(x,)])
        for name, forward in forwards.items()
    }
    times = interleave(runners, ROUNDS, TARGET_MS)
    return [
        {"times": {"step": summary(times[name])}, "peak_bytes": runners[name].peak_bytes()}
        for name in forwards
    ]


def draw(model: Model, device: torch.device) -> tuple[nn.ModuleList, list[Tensor]]:
    """Layers of random weights in bf16, and cos and sin."""
    with torch.device(device):
        layers = nn.ModuleList(Layer(model.H * model.D, model.D) for _ in range(model.layers))
        return layers.bfloat16(), blocks.pairs(model.N, model.D)


def by_compiler(layers: nn.ModuleList, tables: list[Tensor], given: dict):
    """x -> the last layer's output."""
    runs = [torch.compile(layer, fullgraph=True, **given) for layer in layers]

    def forward(x: Tensor) -> Tensor:
        with sdpa_kernel(PRIORITY, set_priority=True):
            for run in runs:
                x = run(x, *tables)
        return x

    return forward


def step_of(forward, leaves: list[Tensor], grad: Tensor):
    """What is timed: it leaves nothing behind."""

    def step(x: Tensor) -> None:
        torch.autograd.grad(forward(x), leaves, grad)

    return step


def cos_sim(x: Tensor, y: Tensor) -> float:
    x, y = x.double(), y.double()
    return (x * y).sum().div(x.norm() * y.norm()).item()


if __name__ == "__main__":
    harness.run(main, fresh=harness.CACHES[:1])
