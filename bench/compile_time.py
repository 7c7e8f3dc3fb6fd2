"""How long a Llama-like model takes to compile with backend="sage", beside backend="inductor"; and
with a policy of one stage ("stages"), which compiles two variants of it.

$ python bench/compile_time.py --json        # bench/results/GPU/DATE-compile_time.json

cold: from calling the compiled model to its synchronised first output, in a process of its own with
empty caches (Inductor's and Triton's). warm: the same in another process, with what the cold one
left. Imports, the weights and the start of CUDA are not in it; a small matmul comes before.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
from torch import nn

import sage_inductor
from bench import blocks, harness

BACKENDS = ("inductor", "sage", "stages")
DEFAULTS = {"layers": 24, "hidden": 1024, "heads": 8, "length": 8192}


class Model(nn.Module):
    """Layers of bench/blocks.py's Llama, without grouped heads."""

    def __init__(self, layers: int, row: blocks.Model):
        super().__init__()
        self.layers = nn.ModuleList(blocks.Llama(row) for _ in range(layers))

    def forward(self, x, cos, sin):
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


def main(argv=None) -> int:
    args = parse(argv)
    if args.measure:
        print(json.dumps(first_call(args.measure, args)))
        return 0
    harness.gpu(args)
    model = {name: getattr(args, name) for name in DEFAULTS}
    result = harness.Result("compile_time", method(args.rounds), args, model=model)
    harness.show(model=f"{model}")
    for turn in range(args.rounds):
        for backend in args.backends if turn % 2 == 0 else reversed(args.backends):
            with tempfile.TemporaryDirectory() as cache:
                for start in ("cold", "warm"):
                    found = in_a_process(backend, args, cache)
                    check(backend, start, found, args.layers)
                    row = {"plan": "compile_time", "backend": backend, "start": start}
                    result["rows"].append({**row, **found})
                    print(f"  {backend:9}{start:5}{found['seconds']:8.2f} s", flush=True)
        result["method"], result["summary"] = method(turn + 1), summary(result["rows"])
        result.save()
    for start, found in result["summary"].items():
        of = (f"{backend} {median:.2f} s ({least:.2f} to {most:.2f})"
              for backend, (median, least, most) in found["seconds"].items())  # fmt: skip
        ratios = (f"{name} {x:.3f}x" for name, x in found["ratios"].items())
        print(f"{start:5}", ", ".join((*of, *ratios)))
    return result.end()


def method(rounds: int) -> str:
    return (
        f"seconds to the synchronised first output; median of {rounds} rounds, each cold then "
        "warm, backends in turns, a process each; bf16, B = 1, causal, "
        f"{os.cpu_count()} CPU cores"
    )


def parse(argv) -> argparse.Namespace:
    parser = harness.parser(__doc__, rounds=2)
    for name, default in DEFAULTS.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument(
        "--backends", choices=BACKENDS, nargs="+", default=BACKENDS, help="default: all"
    )
    parser.add_argument("--measure", choices=BACKENDS, help="this one, in this process, as JSON")
    return parser.parse_args(argv)


def in_a_process(backend: str, args, cache: str) -> dict:
    """`first_call` in a process of its own, whose caches lie in the directory `cache`."""
    shape = (word for name in DEFAULTS for word in (f"--{name}", str(getattr(args, name))))
    done = subprocess.run(
        [sys.executable, __file__, "--measure", backend, "--device", str(args.device), *shape],
        env={**os.environ, **harness.caches(cache)}, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


@torch.no_grad()
def first_call(backend: str, args) -> dict:
    """Seconds to the first output of the compiled model; and what compiling it came to."""
    on_gpu = args.device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    if on_gpu:
        torch.cuda.set_device(args.device)
    N, H, D = args.length, args.heads, args.hidden // args.heads
    row = blocks.Model("", "", blocks.Llama, 1, H, H, N, D, 2 * args.hidden, is_causal=True)
    with args.device:
        model = Model(args.layers, row).to(dtype)
        given = [each.to(dtype) for each in blocks.Llama.inputs(row)]
        (given[0][0, :16] @ given[0][0, :16].mT).sum().item()  # CUDA and cuBLAS have started
    options = {"sage.force": True, "sage.emulate": not on_gpu}
    if backend == "stages":
        options["sage.policy"] = [{"stage": "edge", "recipe": "off"}]
    how = (
        {"backend": "inductor"}
        if backend == "inductor"
        else {"backend": "sage", "options": options}
    )
    start = time.perf_counter()
    out = torch.compile(model, **how)(*given)
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    counters = torch._dynamo.utils.counters
    phases = torch._dynamo.utils.compilation_time_metrics
    return {
        "seconds": seconds,
        "phases": {name: round(sum(each), 2) for name, each in phases.items() if sum(each) > 0.05},
        "finite": bool(out.isfinite().all()),
        "hits": counters["aot_autograd"]["autograd_cache_hit"],
        "graphs": counters["stats"]["unique_graphs"],
        "rewritten": sum(site.rewritten for site in sage_inductor.report()),
    }


def check(backend: str, start: str, found: dict, layers: int) -> None:
    """Exit unless what was timed is what it is called."""
    expected = {
        "finite": True,
        "hits": (2 if backend == "stages" else 1) if start == "warm" else 0,
        "graphs": 1,
        "rewritten": 0 if backend == "inductor" else layers,
    }
    got = {name: found[name] for name in expected}
    if got != expected:
        sys.exit(f"no time is reported: {backend}, {start} must be {expected}, got {got}")


def summary(rows: list[dict]) -> dict:
    """By start: the median, the least and the most seconds of each backend, and what of the medians
    sage's is to inductor's and that with a stage to sage's, where both were measured."""
    found = {}
    for start in ("cold", "warm"):
        times = {}
        for row in rows:
            if row["start"] == start:
                times.setdefault(row["backend"], []).append(row["seconds"])
        medians = {backend: statistics.median(each) for backend, each in times.items()}
        found[start] = {
            "seconds": {name: [medians[name], min(x), max(x)] for name, x in times.items()},
            "ratios": {
                f"{one}/{other}": medians[one] / medians[other]
                for one, other in (("sage", "inductor"), ("stages", "sage"))
                if {one, other} <= medians.keys()
            },
        }
    return found


if __name__ == "__main__":
    harness.run(main)
