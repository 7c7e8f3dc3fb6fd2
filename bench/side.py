"""One side of bench/compare.py: the cases, for whichever commit's library is imported.

Of the library it asks for what each commit since 0.1.0 has: `sage::sdpa`, whose arguments are put
together by the names in its schema, the backend, the report, and recipes by name.
"""

import concurrent.futures
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import sage_inductor
from bench import blocks, harness
from bench.cases import PLANS, Case
from bench.fingerprint import Call, arguments
from bench.measure import Provider, Runner, burst, draw, draw_sets
from sage_inductor.backend import sage_backend  # not by name: that asks what is installed
from sage_inductor.ops.recipe import NAMED

# What this commit calls them: the recipe and, in training, the FP8 backward.
RECIPE = next(x for x in ("sage2-8b-per-token", "sage2-8b-rows") if x in NAMED)
TRAINING = getattr(sys.modules.get("sage_inductor.ops.training.gradients"), "FP8_BACKWARD", "g")
MODELS = ("flux_double", "wan14b_480p", "llama3_8k")
HOST = Case(1, 8, 8, 1024, 128)  # the GPU is done before the host is
HOST_SMALL = Case(1, 2, 2, 64, 64)  # the rows of which compare.py makes ratios
SAGE_OPTIONS = {"sage.force": True, "sage.recipe": RECIPE}
HOST_CALLS = 20  # between two looks at the clock, and at what the GPU has yet to do


class Timed(NamedTuple):
    """A case, compiled."""

    time: Callable[[], float]  # ms a call, of one turn
    out: Tensor
    captured: bool | None = None  # in a CUDA graph


Case_ = Callable[[torch.device, float], Timed]  # with a turn's ms


def cases() -> dict[str, Case_]:
    found = {name_of(case): attention(case) for case in PLANS["load"].cases}
    found |= {f"block {name}": block(blocks.MODELS[name]) for name in MODELS}
    found |= {
        "host eager sage::sdpa": host(eager),
        "host compiled call": host(compiled(sage_backend, SAGE_OPTIONS)),
        "host torch.add (control)": host(lambda q, k, v: lambda: q + k),
    }
    for wrapper, of_inductor in (("", {}), (", cpp_wrapper", {"cpp_wrapper": True})):
        sdpa = compiled("inductor", of_inductor)
        sage = compiled(sage_backend, SAGE_OPTIONS | of_inductor)
        found |= {
            f"host SDPA{wrapper}": host(sdpa, HOST_SMALL),
            f"host sage{wrapper}": host(sage, HOST_SMALL),
        }
    found |= {
        "host SDPA, training": host(trained("inductor", {}), HOST_SMALL),
        "host sage, training": host(trained(sage_backend, {"sage.training": TRAINING}), HOST_SMALL),
    }
    return found


def name_of(case: Case) -> str:
    return f"attention {case.model and case.model + ' '}{case.shape}"


# -- the cases ----


def attention(case: Case) -> Case_:
    def prepare(device, target_ms):
        def call(q, k, v):
            return torch.ops.sage.sdpa(*op_arguments(case, q, k, v))[0]

        return replayed(call, draw_sets(case, device, dynamic=False), target_ms)

    return prepare


def op_arguments(case: Case, q, k, v) -> tuple:
    heads, kind = dict(B=case.B, H_q=case.H_q, H_kv=case.H_kv), "causal" * case.is_causal or "full"
    call = Call(case.N, case.D, kind, **heads, layout="BHND")
    return arguments(RECIPE, call, "eager", (q, k, v, None))


def block(model: blocks.Model) -> Case_:
    """As a user gets it."""

    def prepare(device, target_ms):
        module, inputs = blocks.draw(model, device)
        run = torch.compile(module, backend=sage_backend, fullgraph=True)

        return replayed(lambda *inputs: blocks.first(run(*inputs)), [inputs], target_ms)

    return prepare


def replayed(call: Callable, sets: list[tuple], target_ms: float) -> Timed:
    """The time on the GPU, after a third of the turn untimed."""
    runner = Runner(Provider("", call), sets)
    repeats = max(1, round(target_ms / burst(runner.run, 1)))

    def time_turn():
        burst(runner.run, max(1, repeats // 3))
        return burst(runner.run, repeats) / len(runner.args)

    return Timed(time_turn, runner.output(), runner.captured)


def host(make: Callable[..., Callable[[], Tensor]], case: Case = HOST) -> Case_:
    """The time until a call returns, the least of HOST_CALLS each that fill a turn: whatever else
    the host does only adds to it."""

    def prepare(device, target_ms):
        call = make(*draw(case, "normal", device))
        await_library(device)
        synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None

        def time_turn():
            found, end = [], time.perf_counter() + target_ms / 1e3
            while not found or time.perf_counter() < end:
                synchronize()
                start = time.perf_counter()
                for _ in range(HOST_CALLS):
                    call()
                found.append((time.perf_counter() - start) / HOST_CALLS * 1e3)
            return min(found)

        out = call()
        time_turn()
        return Timed(time_turn, out)

    return prepare


def await_library(device: torch.device) -> None:
    """Until then calls are submitted by Python, as by commits that have no such library."""
    if device.type == "cuda" and importlib.util.find_spec("sage_inductor.lowering.replay"):
        concurrent.futures.wait(
            [importlib.import_module("sage_inductor.lowering.replay").library()]
        )


def eager(q, k, v) -> Callable[[], Tensor]:
    given = op_arguments(HOST, q, k, v)
    return lambda: torch.ops.sage.sdpa(*given)[0]


def compiled(backend, options: dict) -> Callable[..., Callable[[], Tensor]]:
    def make(q, k, v):
        # A function of its own: what is timed includes Dynamo's guards, as in a user's call.
        run = torch.compile(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v), backend=backend,
            fullgraph=True, options=options,
        )  # fmt: skip
        return lambda: run(q, k, v)

    return make


def trained(backend, options: dict) -> Callable[..., Callable[[], Tensor]]:
    """Forward and backward."""

    def make(q, k, v):
        run = compiled(backend, options)(*(x.requires_grad_() for x in (q, k, v)))

        def call():
            with torch.enable_grad():
                out = run()
                torch.autograd.grad(out, (q, k, v), out)
            return out.detach()

        return call

    return make


# -- the protocol ----


def serve(folder: Path, target_ms: float, device: torch.device) -> int:
    """Answer compare.py's commands, one line each, until there are no more. Exits at once unless
    the library is the folder's."""
    for name, module in sys.modules.items():
        file = getattr(module, "__file__", None)  # config is an object
        if name.split(".")[0] == "sage_inductor" and file and folder not in Path(file).parents:
            sys.exit(f"{name} must come from {folder}, got {file}")
    commands, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # nor do processes that they start read commands
    torch.set_grad_enabled(False)
    known, held = cases(), {}
    for command in commands:
        what, _, case = command.strip().partition(" ")
        try:
            answer = ANSWERS[what](case, device, target_ms, known, held)
        except Exception as error:  # a case that fails must not cost the others
            answer = {"error": harness.in_a_line(error)}
        print(json.dumps(answer), file=answers, flush=True)
    return 0


def describe(case, device, target_ms, known, held) -> dict:
    return {"versions": harness.installed(), "cases": list(known)}


def prepare(case, device, target_ms, known, held) -> dict:
    torch._dynamo.reset()  # and the report
    torch.manual_seed(0)
    held[case] = timed = known[case](device, target_ms)
    norm = timed.out.double().norm().item()
    rewritten = sum(site.rewritten for site in sage_inductor.report())
    return {"norm": norm, "captured": timed.captured, "rewritten": rewritten}


def run(case, device, target_ms, known, held) -> dict:
    return {"ms": held[case].time()}


def drop(case, device, target_ms, known, held) -> dict:
    held.pop(case, None)
    torch.cuda.empty_cache()
    return {}


ANSWERS = {"describe": describe, "prepare": prepare, "run": run, "drop": drop}
