"""One query against a static cache: SDPA with heads that the model repeats, and with them as they
are, which backend="sage" hands it on Hopper.

$ python bench/decoding.py --json    # on a GPU about five minutes

    values    SDPA with a mask and enable_gqa against float64 by hand, at random shapes
    calls     one layer's attention at random shapes: the compiled repeats and SDPA, and
              SDPA with enable_gqa; over enough caches that L2 holds none, as CUDA graphs

Its older results have steps of a decoder, which bench/decode.py has now, and `generate`.

Shapes: B batch, H_kv heads of k and v, of which each is read by G of q, N keys, head_dim D.
"""

import random
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import sage_inductor
from bench import harness
from bench.measure import Provider, Runner, interleave, relative_l1, summary
from bench.tables import gain, markdown, show, speed_of


class Shape(NamedTuple):
    B: int
    H_kv: int
    G: int
    N: int
    D: int
    dtype: str = "bfloat16"
    mask: str = "filled"  # a prefix is set; "padded": from a row's own start on; "random", "bias",
    # "none"


def drawn(count: int, seed: int = 0) -> list[Shape]:
    """Random shapes whose caches take at most 2 GiB."""
    rng = random.Random(seed)
    found = []
    while len(found) < count:
        N = rng.choice((64, 256, 1024, 2048, 4096, 8192, 32768)) + rng.choice((0, 0, 8, 57))
        shape = Shape(
            rng.choice((1, 1, 2, 4, 16)), rng.choice((1, 2, 4, 8)), rng.choice((2, 3, 4, 7, 8, 16)),
            N, rng.choice((64, 80, 96, 128)), rng.choice(("bfloat16", "float16")),
            rng.choice(("filled", "padded", "random", "bias", "none")),
        )  # fmt: skip
        if bytes_of(shape) <= 2**31:
            found.append(shape)
    return found


# Models' own: Llama 3 8B, a group of 8, Qwen's, one kv head.
CALLS = [
    *(Shape(B, 8, 4, N, 128) for B, N in ((1, 8192), (1, 32768), (16, 8192), (1, 131072))),
    Shape(1, 4, 8, 32768, 128), Shape(1, 8, 4, 32768, 64), Shape(1, 1, 16, 32768, 128),
    Shape(1, 8, 4, 256, 128), Shape(1, 8, 4, 1024, 128), Shape(1, 8, 4, 32768, 256),
]  # fmt: skip


def main(argv=None) -> int:
    parser = harness.parser(__doc__, rounds=8, target_ms=20.0)
    parser.add_argument(
        "--draws", type=harness.positive, default=50, help="random shapes; half of them timed"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    return run_parts("decoding", parser.parse_args(argv), PARTS, table)


def run_parts(plan: str, args, parts: dict, table: Callable, more: str = "") -> int:
    """The exit status. A row for each that the asked parts yield. more: of the method. A result of
    some parts has a name of its own: it does not hide the one of all."""
    device = harness.gpu(args)
    if args.parts != list(parts):
        plan = "-".join([plan, *args.parts])
    torch.manual_seed(0)
    method = (
        f"median of {args.rounds} rounds of {args.target_ms:g} ms of CUDA graphs, in turns, over "
        f"caches that L2 does not hold{more}"
    )
    result = harness.Result(plan, method, args)
    with torch.no_grad():
        for part in args.parts:
            for row in parts[part](args, device):
                result.add([{"part": part, **row}])
                torch.cuda.empty_cache()
    show(table(result["rows"]))
    return result.end("part", "shape")


# -- one call ----


def bytes_of(shape) -> int:
    """Of k and v in 16 bits."""
    return 4 * shape.B * shape.H_kv * shape.N * shape.D


def draw(shape: Shape, device) -> tuple[Tensor, ...]:
    """q [B, H_kv G, 1, D], k and v [B, H_kv, N, D], mostly a mask [B, 1, 1, N]; v has a mean."""
    B, H, G, N, D, dtype, kind = shape
    make = {"device": device, "dtype": getattr(torch, dtype)}
    q = torch.randn(B, H * G, 1, D, **make)
    k, v = (torch.randn(B, H, N, D, **make) for _ in range(2))
    j = torch.arange(N, device=device)
    first = torch.arange(B, device=device)[:, None, None, None] * (N // (2 * B))
    match kind:
        case "filled":
            mask = (j <= N * 3 // 4).expand(B, 1, 1, N)
        case "padded":
            mask = (j >= first) & (j <= N * 3 // 4)
        case "random":
            mask = (torch.rand(B, 1, 1, N, device=device) < 0.5) | (j == 0)
        case "bias":
            mask = torch.randn(B, 1, 1, N, **make)
        case "none":
            return q, k, v + 1
    return q, k, v + 1, mask


def repeated(q, k, v, mask=None):
    """As transformers' static cache is read."""
    (B, H, N, D), H_q = k.shape, q.shape[1]
    k, v = (x.unsqueeze(2).expand(B, H, H_q // H, N, D).reshape(B, H_q, N, D) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def unrepeated(q, k, v, mask=None):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def by_hand(q, k, v, mask=None):
    """float64."""
    G = q.shape[1] // k.shape[1]
    q, k, v = (x.double() for x in (q, k.repeat_interleave(G, 1), v.repeat_interleave(G, 1)))
    s = q @ k.mT * q.shape[3] ** -0.5
    if mask is not None:
        s = s.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else s + mask.double()
    return s.softmax(-1) @ v


def values(args, device):
    """Rows of SDPA's errors, which are wrong from 1 % on."""
    for shape in [*drawn(args.draws), *CALLS[:5]]:
        inputs = draw(shape, device)
        exact = by_hand(*inputs)
        row = {"shape": shape._asdict(), "error": None}
        for name, call in (("repeated", repeated), ("unrepeated", unrepeated)):
            row[name] = relative_l1(call(*inputs).double(), exact)
        if not row["unrepeated"] < 0.01:
            row["error"] = f"SDPA with enable_gqa is wrong: relative L1 {row['unrepeated']:.3g}"
        yield row


def calls(args, device):
    for shape in [*CALLS, *drawn(args.draws // 2, 1)]:
        torch._dynamo.reset()
        count = max(2, min(40, int(2 * 2**26 / bytes_of(shape)) + 1))
        sets = [draw(shape, device) for _ in range(count)]
        runners = {
            "repeated": Runner(Provider("repeated", torch.compile(repeated, dynamic=False)), sets),
            "unrepeated": Runner(Provider("unrepeated", unrepeated), sets),
            "sage": Runner(Provider("sage", by_sage()), sets),
        }
        report = sage_inductor.report()
        times = interleave(runners, args.rounds, args.target_ms)
        yield {
            "shape": shape._asdict(), "error": None,
            "unrepeats": any(site.decision.unrepeats for site in report),
            "times": {name: summary(each) for name, each in times.items()},
            "speed": speed_of(times["sage"], times["repeated"]),
        }  # fmt: skip
        del runners, sets
        torch.cuda.empty_cache()


def by_sage():
    return torch.compile(repeated, backend="sage", dynamic=False)


PARTS = {"values": values, "calls": calls}


# -- the tables ----


def table(rows: list[dict]) -> str:
    """The calls of models, then the decoder's steps."""
    lines = [["", "B", "H_kv", "G", "N", "D", "repeated, ms", "as they are", "gain"]]
    random_ones = []
    for row in (row for row in rows if row["part"] != "values" and not row["error"]):
        shape = Shape(**{"H_kv": 8, "G": 4, "D": 128, **row["shape"]})
        if row["part"] == "calls" and shape not in CALLS:
            random_ones.append(row["speed"]["x"])
            continue
        by_part = row.get("ms") or {name: each["ms"] for name, each in row["times"].items()}
        ms, sizes = [*by_part.values()], map(str, shape[:5])
        lines.append([row["part"], *sizes, f"{ms[0]:.3g}", f"{ms[-1]:.3g}", gain(row["speed"])])
    notes = []
    if random_ones:
        least, most = min(random_ones), max(random_ones)
        notes = [f"{len(random_ones)} random shapes gain {least:.2f}x to {most:.2f}x."]
    if errors := [row["unrepeated"] for row in rows if row["part"] == "values"]:
        notes += [
            f"At {len(errors)} shapes SDPA's relative L1 to float64 is at most {max(errors):.2%}."
        ]
    return markdown(lines) + "\n" + "\n".join([*notes, ""])


if __name__ == "__main__":
    harness.run(main)
