"""Times attention to packed documents, and torch's varlen_attn, a loop of SDPA and one of ours.

$ python bench/packed.py          # on a GPU about two minutes
$ python bench/packed.py --json   # and bench/results/GPU/DATE-packed.json

    documents    sage::documents, which a forward pass calls once
    preparation  of k and v
    kernel       attention by what is prepared
    packed       preparation and kernel, which each layer calls
    ours, loop   sage::sdpa of one document after another
    varlen       torch.nn.attention.varlen.varlen_attn
    SDPA, loop   one document after another, by cuDNN where torch prefers it

All in CUDA graphs, so a loop costs nothing on the host. Shapes: T tokens of all documents, H heads,
head_dim D; q, k and v are stored as [T, H, D].
"""

import itertools
import random
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from bench import harness
from bench.measure import WRONG, Provider, Runner, interleave, relative_l1, summary
from bench.measure import attention as exact
from bench.tables import markdown, show
from sage_inductor.ops.attention.select import attention, hopper_tile
from sage_inductor.ops.recipe import NAMED
from sage_inductor.ops.sdpa import SdpaCall, _visibility, attention_call, prepare
from sage_inductor.ops.visibility import CAUSAL, FULL

H, D, RECIPE = 16, 128, "sage2-8b-rotated"
draw = random.Random(0)
CASES = {
    "4 of 8,192": [8192] * 4,
    "images of 4K to 16K": [4096, 7700, 16384, 5632],
    "8 of about 7K": [draw.randint(6500, 7800) for _ in range(8)],
    "16 of 64 to 4,096": [draw.randint(64, 4096) for _ in range(16)],
    "64 of 1,024": [1024] * 64,
    "256 windows of 64": [64] * 256,
}


def main(argv=None) -> int:
    parser = harness.parser(__doc__, rounds=5, target_ms=20.0)
    args = parser.parse_args(argv)
    device = harness.gpu(args)
    torch.manual_seed(0)
    method = (
        f"{H} heads, head_dim {D}, bf16, {RECIPE}; median of {args.rounds} rounds of "
        f"{args.target_ms:g} ms of CUDA graphs, in turns"
    )
    result = harness.Result("packed", method, args)
    for (name, lengths), causal in itertools.product(CASES.items(), (False, True)):
        result.add([measure(name, lengths, causal, device, args.rounds, args.target_ms)])
        show(table(result["rows"][-1:]))
        torch.cuda.empty_cache()
    return result.end()


def call_of(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, causal: bool) -> SdpaCall:
    """q, k, v [T, H, D]."""
    perm, perm_k, spans, documents, counts, indices, shown = torch.ops.sage.documents(cu, len(q))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return SdpaCall.of(
        q, k, v, D**-0.5, NAMED[RECIPE].encode(), shown, CAUSAL if causal else FULL,
        out_bnhd=True, kv_num_blocks=counts, kv_indices=indices, block_q=128, block_kv=128,
        perm=perm, perm_k=perm_k, spans=spans, documents=documents,
    )  # fmt: skip


def looped(call: Callable, lengths: list[int]) -> Callable:
    """call(q, k, v [1, H, N, D]) of each document."""

    def loop(q, k, v):
        parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
        return [call(*(x.transpose(0, 1)[None] for x in part)) for part in parts][-1]

    return loop


def measure(name: str, lengths: list[int], causal: bool, device, rounds, target_ms) -> dict:
    T, recipe, longest = sum(lengths), NAMED[RECIPE], max(lengths)
    q, k, v = torch.randn(3, T, H, D, device=device, dtype=torch.bfloat16).unbind(0)
    cu = torch.tensor([0, *itertools.accumulate(lengths)], device=device, dtype=torch.int32)
    call = call_of(q, k, v, cu, causal)
    seen = _visibility(*call[1:4], call.band, recipe, call.blocks, call.perm)
    made = prepare(*call[1:3], seen, recipe, *call.keys_order)
    a = attention_call(*call[:3], made, seen, call.scale, recipe, True, None, *call[-4:])

    def packed(q, k, v):
        given = dict(zip("qkv", (x.transpose(0, 1)[None] for x in (q, k, v)), strict=True))
        return torch.ops.sage.sdpa(*call._replace(**given))[0]

    def ours(q, k, v):
        of = SdpaCall.of(q, k, v, call.scale, call.recipe, band=call.band, out_bnhd=True)
        return torch.ops.sage.sdpa(*of)[0]

    window = (-1, 0) if causal else (-1, -1)
    providers = {
        "documents": lambda *_: torch.ops.sage.documents(cu, T)[-1],
        "preparation": lambda *_: prepare(*call[1:3], seen, recipe, *call.keys_order).k,
        "kernel": lambda *_: attention(*a)[0],
        "packed": packed,
        "ours, loop": looped(ours, lengths),
        "varlen": lambda *of: varlen_attn(*of, cu, cu, longest, longest, window_size=window),
        "SDPA, loop": looped(
            lambda *of: F.scaled_dot_product_attention(*of, is_causal=causal), lengths
        ),
    }
    runners = {x: Runner(Provider(x, of), [(q, k, v)]) for x, of in providers.items()}
    out = runners["packed"].output()[0].transpose(0, 1)  # [T, H, D]
    parts = zip(*(x[:, -1:].transpose(0, 1).split(lengths, 1) for x in (out, q, k, v)), strict=True)
    rel_l1 = max(relative_l1(x, exact(*of, causal)) for x, *of in parts)
    if not rel_l1 < WRONG:
        sys.exit(f"wrong at {name}: relative L1 {rel_l1}")
    times = interleave(runners, rounds, target_ms)
    return {
        "plan": "packed",
        "documents": name,
        "lengths": lengths,
        "causal": causal,
        "tile": str(hopper_tile(a)),
        "rel_l1": rel_l1,
        "times": {name: summary(each) for name, each in times.items()},
    }


def table(rows: list[dict]) -> str:
    names = "documents", "preparation", "kernel", "packed", "ours, loop", "varlen", "SDPA, loop"
    lines = [["documents", "causal", *(f"{x}, ms" for x in names), "varlen / packed",
              "SDPA / packed", "packed / ours, loop", "rel. L1"]]  # fmt: skip
    for row in rows:
        ms = {name: each["ms"] for name, each in row["times"].items()}
        lines.append([
            row["documents"], "yes" if row["causal"] else "no", *(f"{ms[x]:.3f}" for x in names),
            f"{ms['varlen'] / ms['packed']:.2f}", f"{ms['SDPA, loop'] / ms['packed']:.2f}",
            f"{ms['packed'] / ms['ours, loop']:.2f}", f"{row['rel_l1']:.2%}",
        ])  # fmt: skip
    return markdown(lines)


if __name__ == "__main__":
    harness.run(main)
