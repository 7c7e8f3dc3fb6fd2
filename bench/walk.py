"""What one call of attention costs beside its kernels: calls, files, objects, nodes, imports.

$ python bench/walk.py

compile: of one SDPA call with backend="sage" on a CPU, emulated, after another was compiled. eager:
of sage_inductor.attention, decided before, which is emulated or stays SDPA. Calls are those of
functions in the library's files. Objects are the library's classes whose objects its functions are
given or return. Nodes are those that Inductor gets for the call. The import's CPU time beyond
torch's is in imports of torch, in one process. The time of attention() that stays is in times of
SDPA: the least of many interleaved rounds of a small call.
"""

import collections
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

import sage_inductor

ROOT = Path(__file__).parents[1]
ROOMS = tuple(str(ROOT / room) for room in ("sage_inductor", "ops", "lowering", "patterns"))
ROUNDS, REPEATS = 2000, 20


def walk(run: Callable) -> dict[str, int]:
    """The calls that `run()` makes of the library, their files, and the kinds of its objects."""
    calls, kinds = collections.Counter(), set()

    def see(frame, event: str, returned) -> None:
        if event not in ("call", "return") or not frame.f_code.co_filename.startswith(ROOMS):
            return
        values = [returned]
        if event == "call":
            calls[frame.f_code.co_filename] += 1
            values = frame.f_locals.values()
        kinds.update(type(x) for x in values if type(x).__module__.startswith("sage_inductor"))

    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(None)
    return {"calls": calls.total(), "files": len(calls), "objects": len(kinds)}


def compiled() -> dict[str, int]:
    """Of one call that is compiled, and the nodes that Inductor gets for it."""
    import torch._inductor.config as inductor

    nodes = []

    def sdpa(q, k, v):
        return F.scaled_dot_product_attention(q, k, v)

    def compile(N: int) -> None:
        torch._dynamo.reset()
        q, k, v = (torch.randn(1, 2, N, 64) for _ in range(3))
        options = {"sage.emulate": True, "sage.recipe": "sage2-8b"}
        torch.compile(sdpa, backend="sage", options=options)(q, k, v)

    def see(graph) -> None:
        nodes.append(sum(node.op == "call_function" for node in graph.nodes))

    settings = {"force_disable_caches": True, "post_grad_custom_pre_pass": see}
    with torch.no_grad(), inductor.patch(settings):
        compile(64)
        found = walk(lambda: compile(80))
    return {**found, "nodes": nodes[-1]}


def eager(**settings) -> dict[str, int]:
    q, k, v = (torch.randn(1, 2, 16, 64) for _ in range(3))
    with torch.no_grad(), sage_inductor.config.patch(**settings):
        sage_inductor.attention(q, k, v)
        return walk(lambda: sage_inductor.attention(q, k, v))


def of_sdpa() -> float:
    """The time of a small attention() that stays SDPA, in times of SDPA."""
    q, k, v = (torch.randn(1, 2, 16, 16) for _ in range(3))
    calls = sage_inductor.attention, F.scaled_dot_product_attention
    least = [float("inf")] * 2
    for _ in range(ROUNDS):
        for i, call in enumerate(calls):
            began = time.perf_counter()
            for _ in range(REPEATS):
                call(q, k, v)
            least[i] = min(least[i], time.perf_counter() - began)
    return least[0] / least[1]


def of_torch() -> float:
    """The CPU time of `import sage_inductor` beyond `import torch`, in imports of torch."""
    code = (
        "from time import process_time as t; a = t(); import torch; b = t(); import sage_inductor; "
        "print((t() - b) / (b - a))"
    )
    runs = (subprocess.run([sys.executable, "-c", code], capture_output=True) for _ in range(3))
    return min(float(run.stdout) for run in runs)


def counts() -> dict[str, dict[str, int]]:
    return {
        "compile": compiled(), "eager, emulated": eager(emulate=True, recipe="sage2-8b"),
        "eager, stays SDPA": eager(),
    }  # fmt: skip


def main() -> int:
    for name, found in counts().items():
        print(f"{name}: " + ", ".join(f"{n} {what}" for what, n in found.items()))
    print(f"attention() that stays: {of_sdpa():.2f} x SDPA")
    print(f"import beyond torch: {of_torch():.2f} x import torch")
    return 0


if __name__ == "__main__":
    sys.exit(main())
