"""Times attention to packed documents, and torch's varlen_attn, a loop of SDPA and one of ours.

$ python bench/packed.py          # on a GPU about two minutes
$ python bench/packed.py --json   # and bench/results/GPU/DATE-packed.json

    documents    sage::documents, which a forward pass calls once
    preparation  of k and v
    kernel       attention by what is prepared
    ours         both, which each layer calls: what a graph does where lse is not read
    ours, loop   the same, of one document after another by dense calls
    varlen       torch.nn.attention.varlen.varlen_attn, FlashAttention 2
    FA3          the varlen kernel of the package fa3-fwd, where it is installed
    SDPA, loop   one document after another, by cuDNN where torch prefers it

All in CUDA graphs, so a loop costs nothing on the host. Shapes: T tokens of all documents, H heads,
head_dim D; q, k and v are stored as [T, H, D].
"""

import itertools
import math
import random
import statistics
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from bench import harness
from bench.measure import WRONG, Provider, Runner, interleave, relative_l1, summary
from bench.measure import attention as exact
from bench.models import version_of
from bench.peers import FA3
from bench.tables import gain, markdown, show, speed_of
from sage_inductor.choose.decide import DOCUMENTS_FROM
from sage_inductor.ops.attention.select import attention, hopper_tile
from sage_inductor.ops.recipe import NAMED
from sage_inductor.ops.sdpa import SdpaCall, _visibility, attend, attention_call, prepare
from sage_inductor.ops.visibility import CAUSAL, FULL

RECIPE = NAMED["sage2-8b-rotated"]
draw = random.Random(0)
DOCUMENTS = {
    "4 of 8,192": [8192] * 4,
    "images of 4K to 16K": [4096, 7700, 16384, 5632],
    "8 of about 7K": [draw.randint(6500, 7800) for _ in range(8)],
    "16 of 64 to 4,096": [draw.randint(64, 4096) for _ in range(16)],
    "16 of 4,096": [4096] * 16,
    "32 of 2,048": [2048] * 32,
    "64 of 1,024": [1024] * 64,
    "48 of 512": [512] * 48,
    "256 windows of 64": [64] * 256,
}


class Case(NamedTuple):
    documents: str
    lengths: list[int]
    causal: bool
    H: int = 16
    H_kv: int = 16
    D: int = 128

    def qkv(self, device) -> list[Tensor]:
        """[T, heads, D]."""
        sizes = (sum(self.lengths), self.H + 2 * self.H_kv, self.D)
        of_all = torch.randn(sizes, device=device, dtype=torch.bfloat16)
        return [x.contiguous() for x in of_all.split([self.H, self.H_kv, self.H_kv], 1)]


CASES = [Case(*each, causal) for each, causal in product(DOCUMENTS.items(), (False, True))]


def drawn() -> Case:
    """A packing that "auto" takes, by its mean length."""
    mean = 2 ** draw.uniform(math.log2(DOCUMENTS_FROM), 14)
    S, spread = max(1, int(2 ** draw.uniform(12, 16) / mean)), draw.choice([0, 0.3, 0.9])
    lengths = [int(mean * draw.uniform(1 - spread, 1 + spread)) for _ in range(S)]
    lengths[0] += max(0, S * DOCUMENTS_FROM - sum(lengths))
    H_kv, G, D = draw.choice([2, 4, 8, 16]), draw.choice([1, 1, 4]), draw.choice([128, 128, 80, 64])
    return Case("drawn", lengths, draw.random() < 0.5, H_kv * G, H_kv, D)


def main(argv=None) -> int:
    parser = harness.parser(__doc__, rounds=5, target_ms=10.0)
    parser.add_argument("--draws", type=int, default=40, help="random packings")
    args = parser.parse_args(argv)
    device = harness.gpu(args)
    torch.manual_seed(0)
    method = (
        f"bf16, sage2-8b-rotated; median of {args.rounds} rounds of {args.target_ms:g} ms of CUDA "
        "graphs, in turns"
    )
    found = {name: version for name in ("fa3-fwd",) if (version := version_of(name))}
    result = harness.Result("packed", method, args, versions=harness.installed() | found)
    for case in CASES + [drawn() for _ in range(args.draws)]:
        result.add([measure(case, device, args.rounds, args.target_ms)])
        show(table(result["rows"][-1:]))
        torch.cuda.empty_cache()
    return result.end()


def call_of(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, causal: bool) -> SdpaCall:
    """q, k, v [T, H, D]."""
    perm, perm_k, spans, documents, counts, indices, shown = torch.ops.sage.documents(cu, len(q))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return SdpaCall.of(
        q, k, v, q.shape[-1] ** -0.5, RECIPE.encode(), shown, CAUSAL if causal else FULL,
        out_bnhd=True, kv_num_blocks=counts, kv_indices=indices, block_q=128, block_kv=128,
        perm=perm, perm_k=perm_k, spans=spans, documents=documents,
    )  # fmt: skip


def looped(call: Callable, lengths: list[int]) -> Callable:
    """call(q, k, v [1, H, N, D]) of each document."""

    def loop(q, k, v):
        parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
        return [call(*(x.transpose(0, 1)[None] for x in part)) for part in parts][-1]

    return loop


def measure(case: Case, device, rounds, target_ms) -> dict:
    name, lengths, causal = case[:3]
    T, longest = sum(lengths), max(lengths)
    q, k, v = case.qkv(device)
    cu = torch.tensor([0, *itertools.accumulate(lengths)], device=device, dtype=torch.int32)
    call = call_of(q, k, v, cu, causal)
    seen = _visibility(*call[1:4], call.band, RECIPE, call.blocks, call.perm)
    made = prepare(*call[1:3], seen, RECIPE, *call.keys_order)
    a = attention_call(*call[:3], made, seen, call.scale, RECIPE, True, None, *call[-4:])

    def packed(q, k, v):
        given = dict(zip("qkv", (x.transpose(0, 1)[None] for x in (q, k, v)), strict=True))
        return attend(call._replace(**given))[0]

    def alone(q, k, v):
        of = SdpaCall.of(q, k, v, call.scale, call.recipe, band=call.band, out_bnhd=True)
        return attend(of)[0]

    grouped, varlen = case.H != case.H_kv, (cu, cu, longest, longest)
    window = (-1, 0) if causal else (-1, -1)
    # torch 2.11's op knows no heads of a group; later ones do by enable_gqa.
    of_varlen = (q, *(x.repeat_interleave(case.H // case.H_kv, 1) for x in (k, v)))
    providers = {
        "ours": packed,
        "varlen": lambda *_: varlen_attn(*of_varlen, *varlen, window_size=window),
    }
    if find_spec(FA3):
        fa3 = import_module(FA3).flash_attn_varlen_func
        providers["FA3"] = lambda *of: fa3(*of, *varlen, causal=causal)
    if name != "drawn":
        providers |= {
            "documents": lambda *_: torch.ops.sage.documents(cu, T)[-1],
            "preparation": lambda *_: prepare(*call[1:3], seen, RECIPE, *call.keys_order).k,
            "kernel": lambda *_: attention(*a)[0],
            "ours, loop": looped(alone, lengths),
            "SDPA, loop": looped(
                lambda *of: F.scaled_dot_product_attention(
                    *of, is_causal=causal, enable_gqa=grouped
                ),
                lengths,
            ),
        }
    runners = {x: Runner(Provider(x, of), [(q, k, v)]) for x, of in providers.items()}
    out = runners["ours"].output()[0].transpose(0, 1)  # [T, H, D]
    parts = zip(*(x[:, -1:].transpose(0, 1).split(lengths, 1) for x in (out, q, k, v)), strict=True)
    rel_l1 = max(relative_l1(x, exact(*of, causal)) for x, *of in parts)
    if not rel_l1 < WRONG:
        sys.exit(f"wrong at {case}: relative L1 {rel_l1}")
    times = interleave(runners, rounds, target_ms)
    return case._asdict() | {
        "plan": "packed",
        "tile": str(hopper_tile(a)),
        "rel_l1": rel_l1,
        "times": {name: summary(each) for name, each in times.items()},
        "speed": {name: speed_of(times["ours"], times[name]) for name in times if name != "ours"},
    }


def in_short(rows: list[dict]) -> str:
    """The table of the packings that have a name, and a line of those that are drawn."""
    random_ones = [row for row in rows if row["documents"] == "drawn"]
    said = table([row for row in rows if row["documents"] != "drawn"])
    for other in ("varlen", "FA3"):
        x = [row["speed"][other]["x"] for row in random_ones if other in row["speed"]]
        if x:
            least, median, most = min(x), statistics.median(x), max(x)
            said += f"\n{len(x)} random packings: ours over {other} {least:.2f}x to {most:.2f}x, "
            said += f"median {median:.2f}x.\n"
    return said


def table(rows: list[dict]) -> str:
    names = "documents", "preparation", "kernel", "ours, loop", "ours"
    others = "varlen", "FA3", "SDPA, loop"
    lines = [["documents", "T", "causal", "H, H_kv, D", *(f"{x}, ms" for x in names)]]
    lines[0] += [*(f"ours over {x}" for x in others), "rel. L1"]
    for row in rows:
        ms = {name: f"{each['ms']:.3f}" for name, each in row["times"].items()}
        lengths, sizes = row["lengths"], [row["H"], row["H_kv"], row["D"]]
        is_drawn = row["documents"] == "drawn"
        named = f"{len(lengths)}, {max(lengths):,} at most" if is_drawn else row["documents"]
        gains = (gain(row["speed"][x]) if x in row["speed"] else "" for x in others)
        lines.append([
            named, f"{sum(lengths):,}", "yes" if row["causal"] else "no", str(sizes)[1:-1],
            *(ms.get(x, "") for x in names), *gains, f"{row['rel_l1']:.2%}",
        ])  # fmt: skip
    return markdown(lines)


if __name__ == "__main__":
    harness.run(main)
