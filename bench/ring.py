"""diffusers' context parallelism: Wan 14B at 720p by its ring with cuDNN and by ours.

$ torchrun --nproc-per-node 2 bench/ring.py --json   # bench/results/GPU/DATE-ring.json

Two things are timed, without CUDA graphs: attention of one call (`dispatch_attention_fn`), and the
transformer with one of its blocks, which is compiled as diffusers recommends. "cuDNN" is diffusers'
backend "_native_cudnn" and Inductor, "sage" is `sage_inductor.register` and backend="sage".
"""

import functools
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import sage_inductor
from bench import harness, models
from bench.parallel import RECIPE, Clock, as_a_rank
from bench.tables import markdown, show

BLOCK = models.Model(
    "Wan 14B, 720p", 75600, lambda: models.wan(40, 13824, 1), lambda: models.of_wan(720, 1280, 81)
)
ATTENTION = 75600, 40, 128  # N, H, D of self-attention
WAYS = {"cuDNN": ("_native_cudnn", "inductor"), "sage": ("sage_inductor", "sage")}


def main(argv=None) -> int:
    args = harness.parser(__doc__, rounds=5, target_ms=500.0).parse_args(argv)
    sage_inductor.register("diffusers")
    sage_inductor.config.recipe = RECIPE
    sage_inductor.config.rewrite_inductor = False
    with as_a_rank(args), torch.no_grad():
        clock = Clock(args.device, args.rounds, args.target_ms)
        method = (
            f"bf16, {RECIPE}, no CUDA graphs; median of {args.rounds} rounds of "
            f"{args.target_ms:g} ms, in turns, of the slowest rank; similarity: cosine of the "
            "output and one GPU's by cuDNN"
        )
        result = harness.Result("ring", method, args, world=dist.get_world_size())
        for what in (attention, block):
            calls = what(args.device)
            result.add(rows_of(what.__name__, calls, clock))
        show(table(result["rows"]))
        return result.end()


def attention(device: torch.device) -> dict[tuple[str, int], Callable[[], Tensor]]:
    """(way, GPUs) -> a call. What two compute are their rows of q."""
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    torch.manual_seed(0)
    N, H, D = ATTENTION
    whole = [torch.randn(1, N, H, D, device=device).bfloat16() for _ in range(3)]
    world, rank = dist.get_world_size(), dist.get_rank()
    part = [x.chunk(world, 1)[rank].contiguous() for x in whole]
    spread = parallel(models.draw(BLOCK, device)[0])._parallel_config
    calls = {}
    for way, (backend, _) in WAYS.items():
        calls[way, 1] = functools.partial(dispatch_attention_fn, *whole, backend=backend)
        calls[way, world] = functools.partial(
            dispatch_attention_fn, *part, backend=backend, parallel_config=spread
        )
    return calls


def block(device: torch.device) -> dict[tuple[str, int], Callable[[], Tensor]]:
    """The same of a transformer with one block."""
    calls = {}
    for way, (attention, compiler) in WAYS.items():
        for ranks in (1, dist.get_world_size()):
            model, inputs = models.draw(BLOCK, device)
            model.set_attention_backend(attention)
            model = parallel(model) if ranks > 1 else model
            model.compile_repeated_blocks(backend=compiler)
            calls[way, ranks] = functools.partial(run, model, inputs)
    return calls


def run(model, inputs: dict) -> Tensor:
    return model(**inputs, return_dict=False)[0]


def parallel(model):
    from diffusers import ContextParallelConfig

    model.enable_parallelism(config=ContextParallelConfig(ring_degree=dist.get_world_size()))
    return model


def rows_of(what: str, calls: dict, clock: Clock) -> list[dict]:
    right, found = calls["cuDNN", 1](), {}
    for (way, ranks), call in calls.items():
        out, expected = call(), right
        if out.shape != right.shape:  # this rank's rows
            expected = right.chunk(ranks, 1)[dist.get_rank()]
        found[way, ranks] = F.cosine_similarity(
            out.double().flatten(), expected.double().flatten(), dim=0
        ).item()
    ms = clock.eager(calls)
    return [
        {"what": what, "way": way, "gpus": ranks, "ms": ms[way, ranks], "similarity": similarity}
        for (way, ranks), similarity in found.items()
    ]


def table(rows: list[dict]) -> str:
    """A line for attention and one for the block: ms, speed-up over one GPU, similarity."""
    of = {(row["what"], row["way"], row["gpus"]): row for row in rows}
    world = max(row["gpus"] for row in rows)
    lines = [["", "GPUs", *WAYS, "sage over cuDNN", "cosine similarity"]]
    for what in dict.fromkeys(row["what"] for row in rows):
        for gpus in (1, world):
            its = [of[what, way, gpus] for way in WAYS]
            cells = [
                f"{row['ms']:.1f}" + f" ({of[what, way, 1]['ms'] / row['ms']:.2f}x)" * (gpus > 1)
                for way, row in zip(WAYS, its, strict=True)
            ]
            gain = its[0]["ms"] / its[1]["ms"]
            lines.append([what, str(gpus), *cells, f"{gain:.2f}x", f"{its[1]['similarity']:.5f}"])
    return markdown(lines)


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
