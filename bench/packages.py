"""What a package gains: blocks of transformers as AOTInductor packages, with sage and with SDPA,
beside the compiled models.

$ python bench/packages.py --json                 # bench/results/GPU/DATE-packages.json, 4 minutes
$ python bench/packages.py --rows flux_double wan14b_480p
$ python bench/packages.py --dry-run              # small blocks on the CPU, emulated: that it runs

A package is exported with a dynamic number of tokens and built in a process of its own with empty
caches, all of them side by side; meanwhile other processes compile the models and compute what the
packages must give. Then this process loads the packages and times them and the compiled models in
turn. Speed is reported behind two gates: a package must give what the compiled model gives, and its
output must be near that of backend="inductor".
"""

import argparse
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import sage_inductor
from bench import blocks, harness
from bench.blocks import MODELS, Model, first
from bench.measure import SEES, Provider, Runner, draw_sets, in_turns, interleave, summary, wall
from bench.model import Wrong, backends, check, sites
from bench.providers import EAGER
from bench.tables import groups, markdown, show

# Relative L2 to the compiled model, from which a package computes something else. 0.5 to 1.2 % was
# seen of bf16 blocks that Inductor fused otherwise: INT8 codes then round the other way.
SAME = 3e-2
OTHERS = (1, 1001)  # tokens at which packages are compared besides those that are timed
KINDS = "sage", "SDPA"
# Each package's caches are empty: precompiled headers would be made for one use.
CONFIGS = {"aot_inductor.precompile_headers": False}
TIMEOUT_S = 300  # of a process


class Padded(blocks.ViT):
    """A batch of sequences of other lengths, whose keys at the end nobody sees."""

    @staticmethod
    def inputs(m):
        b, j = torch.arange(m.B)[:, None, None, None], torch.arange(m.N)
        return *blocks.ViT.inputs(m), SEES["keys"](m.B, m.N, b, 0, j)


class Row(NamedTuple):
    """A block. Of tokens are counted those whose number is dynamic: Flux's without its text."""

    model: Model
    longest: int  # that the package is made for
    tokens: tuple[int, ...]  # that are timed; the first is the export's example

    @property
    def beside(self) -> int:
        """Tokens of text in the model's N."""
        return self.model.text if self.model.block is blocks.FluxDouble else 0

    def at(self, n: int) -> Model:
        return dataclasses.replace(self.model, N=n + self.beside)


PADDED = Model("padded", "batch of 4, padded", Padded, 4, 16, 16, 4096, 128, 8192)
ROWS = {
    row.model.name: row
    for row in (
        Row(MODELS["flux_double"], 8192, (4096,)),
        Row(MODELS["wan14b_480p"], 32768, (32760,)),
        Row(MODELS["llama3_8k"], 16384, (8192, 16384)),
        Row(MODELS["vit_l_1024px"], 8192, (4097,)),
        Row(PADDED, 8192, (4096,)),
    )
}


def main(argv=None) -> int:
    parser = harness.parser(__doc__, rounds=6, target_ms=60.0)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--dry-run", action="store_true", help="small blocks on the CPU")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)  # be a process of it
    args = parser.parse_args(argv)
    torch.set_grad_enabled(False)
    sage_inductor.config.rewrite_inductor = False  # it would rewrite the baseline
    if args.job:
        print(json.dumps(work(**args.job)))
        return 0
    if args.dry_run:  # of which nothing is kept but in a file that is named
        args.device, args.json = torch.device("cpu"), args.json or None
    device = args.device if args.dry_run else harness.gpu(args)
    torch.manual_seed(0)
    result = harness.Result("packages", method(args), args)
    with tempfile.TemporaryDirectory() as folder:
        rows = {name: row_of(name, device) for name in args.rows}
        fastest = {name: fastest_sdpa(row, args, device) for name, row in rows.items()}
        built = build(rows, fastest, folder, device)
        print(f"  built     {time.perf_counter() - result.started:.0f} s after the start")
        for name, row in rows.items():
            for found in measure(row, built[name], fastest[name], folder, args, device):
                result.add([found])
                show(f"\n{table([found])}")
            torch.cuda.empty_cache()
    return result.end("model", "shape")


def method(args) -> dict[str, str]:
    return {
        "units": "ms a call",
        "time": f"median of {args.rounds} rounds of {args.target_ms:g} ms, after a third of the "
        "turn untimed; all take turns. Replayed: CUDA graphs between two events. Launched: the "
        "wall clock over repeated calls from Python, until the GPU is done",
        "blocks": "one block, inference, bf16, random weights; N is dynamic in packages and in "
        "compiled models; SDPA's fastest backend first for all of them",
        "columns": "sage: as a user gets it; SDPA: sage.recipe off, and backend inductor",
        "accuracy": "of the replayed graph's output, poisoned with NaN before; equal: to the "
        "compiled model at the timed N, to the compiled exported program at others",
        "packages": f"seconds: with {len(os.sched_getaffinity(0))} CPU cores for all packages at "
        "once, of a process with empty caches and one compile thread, without precompiled headers; "
        "bytes: weights are in the package's .so",
    }


# -- the blocks ----


def row_of(name: str, device: torch.device) -> Row:
    row = ROWS[name]
    if device.type == "cuda":
        return row
    m = row.model
    small = dataclasses.replace(
        m, B=min(m.B, 2), H_q=4, H_kv=max(1, 4 * m.H_kv // m.H_q), D=64, mlp=256,
        text=m.text and 32,
    )  # fmt: skip
    return Row(small, 2048, (192, 256)[: len(row.tokens)])


def block_of(row: Row, device: torch.device) -> nn.Module:
    """The same weights in every process."""
    torch.manual_seed(0)
    return blocks.draw(row.at(64), device)[0]


def inputs(row: Row, n: int, device) -> tuple[Tensor, ...]:
    """The same in every process."""
    torch.manual_seed(n)
    with torch.device(device):
        return row.model.block.inputs(row.at(n))


def dynamic_dims(row: Row) -> list[dict[int, int]]:
    """For each input, dimension -> what it has more than tokens."""
    few, more = ([x.shape for x in inputs(row, n, "meta")] for n in (64, 65))
    return [
        {d: a - 64 for d, (a, b) in enumerate(zip(x, y, strict=True)) if a != b}
        for x, y in zip(few, more, strict=True)
    ]


def exported(row: Row, device: torch.device) -> torch.export.ExportedProgram:
    N = torch.export.Dim("tokens", min=1, max=row.longest)  # N is a function of sympy's
    shapes = [{d: N + k if k else N for d, k in dims.items()} for dims in dynamic_dims(row)]
    given = inputs(row, row.tokens[0], device)
    return torch.export.export(block_of(row, device), given, dynamic_shapes=tuple(shapes))


def marked(row: Row, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """`given`, for whose first compilation N is dynamic."""
    for x, dims in zip(given, dynamic_dims(row), strict=True):
        torch._dynamo.mark_dynamic(x, list(dims))
    return given


def options(kind: str, device: torch.device) -> dict:
    return {"sage.recipe": "off"} if kind == "SDPA" else {"sage.emulate": device.type == "cpu"}


def compiled(row: Row, kind: str, device: torch.device) -> Callable:
    block = block_of(row, device)
    if kind == "SDPA":
        return torch.compile(block, fullgraph=True)
    return torch.compile(block, backend="sage", fullgraph=True, options=options(kind, device))


def fastest_sdpa(row: Row, args, device: torch.device) -> list[str]:
    """The names of SDPA's backends that compute the block's attention, the fastest first."""
    if device.type == "cpu":
        return []
    case = dataclasses.replace(row.model.case, mask="keys" if row.model is PADDED else "")
    return list(backends(case, draw_sets(case, device, dynamic=False), args.target_ms))


def sdpa_first(names: list[str]) -> contextlib.AbstractContextManager:
    """A context in which SDPA takes the first of `names` that it can."""
    rest = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    wanted = [EAGER[name] for name in names]
    return sdpa_kernel([*wanted, *(b for b in rest if b not in wanted)], set_priority=True)


# -- what other processes do ----


def build(rows: dict[str, Row], fastest: dict, folder: str, device) -> dict[str, dict]:
    """For each row, what became of "expected" and of each of KINDS."""
    jobs = [(name, part) for part in ("sage", "expected", "SDPA") for name in rows]

    def run(job):
        name, part = job
        given = dict(name=name, part=part, folder=folder, device=str(device), first=fastest[name])
        # What is compiled, is compiled again here: from the cache.
        cache = f"{folder}/cache-{name}-{part}" if part in KINDS else None
        return in_a_process(given, cache)

    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = zip(jobs, pool.map(run, jobs), strict=True)
        done = {name: {} for name in rows}
        for (name, part), answer in found:
            done[name][part] = answer
    return done


def in_a_process(job: dict, cache: str | None) -> dict:
    """What `work` gives for a job; {"error": ...} where it fails. cache: a folder for its caches,
    which is removed: the weights are in it."""
    env = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    env |= harness.caches(cache) if cache else {}
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--job", json.dumps(job)],
            env=env, capture_output=True, text=True, timeout=TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        return {"error": str(error)}
    finally:
        if cache:
            shutil.rmtree(cache, ignore_errors=True)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        return {"error": f"exit {done.returncode}: {' / '.join(said[-3:])}"[:500]}
    return json.loads(done.stdout.splitlines()[-1])


def work(name: str, part: str, folder: str, device: str, first: list[str]) -> dict:
    """One process's part of a row: "expected", or a package of one of KINDS."""
    device = torch.device(device)
    row = row_of(name, device)
    with sdpa_first(first):
        if part == "expected":
            return expect(row, device, f"{folder}/{name}.expected")
        return package(row, part, device, f"{folder}/{name}-{part}.pt2")


def package(row: Row, kind: str, device: torch.device, path: str) -> dict:
    """Makes a package: how long it took, what it weighs, what became of its calls."""
    program = exported(row, device)
    begin = time.perf_counter()
    sage_inductor.aoti_compile_and_package(
        program, package_path=path, inductor_configs=dict(CONFIGS), options=options(kind, device)
    )
    seconds = time.perf_counter() - begin
    tensors = [x for x in (program.state_dict | program.constants).values() if hasattr(x, "nbytes")]
    with zipfile.ZipFile(path) as archive:
        (code,) = (x.file_size for x in archive.infolist() if x.filename.endswith(".so"))
    weights = sum(x.nbytes for x in tensors)
    return {
        "seconds": seconds,
        "bytes": os.path.getsize(path),
        "code_bytes": code - weights,  # the .so without them
        "weights_bytes": weights,
        "sites": sites(sage_inductor.report()),
    }


def expect(row: Row, device: torch.device, path: str) -> dict:
    """Writes what the package must give at OTHERS, and compiles what will be timed: into the
    caches. The rewritten program is compiled, as its lengths are decided by the example's."""
    program = exported(row, device)
    report = sage_inductor.rewrite(program, options=options("sage", device))
    if not report.rewritten:
        raise Wrong(f"no call is rewritten: {sites(report)}")
    run = torch.compile(program.module(check_guards=False), dynamic=True, fullgraph=True)
    torch.save({n: first(run(*inputs(row, n, device))).cpu() for n in OTHERS}, path)
    given = inputs(row, row.tokens[0], device)
    for kind in KINDS:
        compiled(row, kind, device)(*marked(row, given))
    return {}


# -- the measurement ----


def measure(row: Row, built: dict, fastest: list[str], folder: str, args, device) -> list[dict]:
    """A result for each timed N; where it failed or is wrong, with an error instead of times."""
    found = []
    for n in row.tokens:
        model = row.at(n)
        found.append({
            "plan": "packages", "model": model.name, "shape": model.case.shape, "N": n,
            "error": None, "attention": next(iter(fastest), None),
            "packages": {kind: built[kind] for kind in KINDS},
        })  # fmt: skip
    try:
        for part in ("expected", *KINDS):
            if "error" in built[part]:
                raise Wrong(f"{part}: {built[part]['error']}")
        torch._dynamo.reset()
        with sdpa_first(fastest):
            calls, of_compiled = {}, {}
            for kind in KINDS:
                calls[f"package {kind}"] = load(f"{folder}/{row.model.name}-{kind}.pt2")
                before = len(sage_inductor.report())
                calls[f"compiled {kind}"] = compiled(row, kind, device)
                given = marked(row, inputs(row, row.tokens[0], device))
                calls[f"compiled {kind}"](*given)
                of_compiled[kind] = sites(sage_inductor.report(), before)
            others = compare_others(row, calls["package sage"], folder, device)
            for each in found:
                each.update(compiled=of_compiled, others=others)
                each.update(timed(row, each["N"], calls, args, device))
                wrong = [f"{what}: {x['error']}" for what, x in compared(each) if x["error"]]
                if device.type == "cuda":
                    times = each["times"].items()
                    wrong += [f"{what}: not captured" for what, x in times if not x["captured"]]
                each["error"] = "; ".join(wrong) or None
    except Exception as error:  # a row that fails must not cost the others
        for each in found:
            if "times" not in each:
                each["error"] = harness.in_a_line(error)
    return found


def compared(row: dict) -> list[tuple[str, dict]]:
    """What was compared, and how it came out."""
    others = [(f"package sage at {n} tokens", x) for n, x in row["others"].items()]
    return [
        (f"package {kind} at {row['N']} tokens", x) for kind, x in row["equal"].items()
    ] + others


def load(path: str) -> Callable:
    """A package, as a function that a CUDA graph can capture: the ordinary run records events."""
    # Where the compiler linked libstdc++ into the package, torch 2.11 crashes without.
    if sys.platform == "linux":
        ctypes.CDLL("libstdc++.so.6", ctypes.RTLD_GLOBAL)
    return torch._inductor.aoti_load_package(path, run_single_threaded=True)


def compare_others(row: Row, package: Callable, folder: str, device) -> dict[str, dict]:
    """The package beside the compiled program at OTHERS."""
    right = torch.load(f"{folder}/{row.model.name}.expected")
    found = {}
    for n in OTHERS:
        try:
            out = first(package(*inputs(row, n, device)))
            found[str(n)] = same(out, right[n].to(device))
        except RuntimeError as error:  # other lengths may still do
            found[str(n)] = {"error": f"{error}".split("\n")[0]}
    return found


def same(out: Tensor, right: Tensor) -> dict:
    """How far `out` is from `right`; with an error if it is something else."""
    distance = (out - right).double().norm().div(right.double().norm()).item()
    error = None if distance < SAME else f"{distance:.1e} from the compiled model"
    return {"bit_equal": torch.equal(out, right), "rel_l2": distance, "error": error}


def timed(row: Row, n: int, calls: dict, args, device) -> dict:
    """Accuracy and times of all `calls` with n tokens."""
    given, on_gpu = inputs(row, n, device), device.type == "cuda"
    runners = {
        name: (Runner if on_gpu else Launched)(
            Provider(name, lambda *x, run=run: first(run(*x))), [given]
        )
        for name, run in calls.items()
    }
    outputs = {name: runner.output() for name, runner in runners.items()}
    equal = {kind: same(outputs[f"package {kind}"], outputs[f"compiled {kind}"]) for kind in KINDS}
    accuracy = check({**outputs, "inductor": outputs["compiled SDPA"]})
    turns = args.rounds, args.target_ms
    launched = {name: lambda run=run: run(*given) for name, run in calls.items()}
    clock = functools.partial(wall, torch.cuda.synchronize if on_gpu else int)
    launched = in_turns(launched, *turns, clock, least=3)
    replayed = interleave(runners, *turns) if on_gpu else launched
    times = {
        name: {
            "captured": runners[name].captured,
            "replayed": summary(replayed[name]),
            "launched": summary(launched[name]),
        }
        for name in calls
    }
    return {"equal": equal, "accuracy": accuracy, "times": times}


class Launched:
    """What `timed` asks of a Runner, on a CPU."""

    captured = False

    def __init__(self, provider: Provider, sets):
        self.output = lambda: provider.call(*sets[0])


# -- the tables ----


def table(rows: list[dict]) -> str:
    """A package beside the compiled model and beside the same package with SDPA: time, then what
    it gives, weighs and takes."""
    rows = [row for row in rows if not row["error"]]
    return f"{markdown(times_of(rows))}\n{markdown(sizes_of(rows), '---')}"


def times_of(rows: list[dict]) -> list[list[str]]:
    lines = [[
        "ms a call", "B x H x N x D", "package", "compiled", "package, SDPA", "faster",
        "launched: package", "compiled", "package, SDPA",
    ]]  # fmt: skip
    for row in rows:
        times, names = row["times"], ("package sage", "compiled sage", "package SDPA")
        replayed, launched = (
            [times[name][way]["ms"] for name in names] for way in ("replayed", "launched")
        )
        lines.append([
            title_of(row), row["shape"], *(f"{ms:#.4g}" for ms in replayed),
            f"**{replayed[2] / replayed[0]:.2f}x**", *(f"{ms:#.4g}" for ms in launched),
        ])  # fmt: skip
    return lines


def sizes_of(rows: list[dict]) -> list[list[str]]:
    lines = [["", "beside the compiled model", "code, MB (SDPA's)", "packaging, s (SDPA's)"]]
    for its in groups(rows, "model").values():
        ours, sdpa = (its[0]["packages"][kind] for kind in KINDS)
        found = its[0]["others"] | {str(row["N"]): row["equal"]["sage"] for row in its}
        equal = ", ".join(
            f"N={n}: {'bit-equal' if x['bit_equal'] else format(x['rel_l2'], '.1e')}"
            for n, x in sorted(found.items(), key=lambda each: int(each[0]))
        )
        lines.append([
            title_of(its[0]), equal,
            f"{ours['code_bytes'] / 1e6:.1f} ({sdpa['code_bytes'] / 1e6:.1f})",
            f"{ours['seconds']:.0f} ({sdpa['seconds']:.0f})",
        ])  # fmt: skip
    return lines


def title_of(row: dict) -> str:
    return ROWS[row["model"]].model.title.partition(", prefill")[0]


if __name__ == "__main__":
    harness.run(main, fresh=() if "--job" in sys.argv else harness.CACHES)
