"""What every bench has: a command line, a device, and a result that says how it was made.

    args = harness.parser(__doc__, rounds=5, target_ms=20.0).parse_args(argv)
    device = harness.gpu(args)
    result = harness.Result("preparation", method, args)  # prints where and how it measures
    for case in CASES:
        result.add(measure(case, args, device))           # saves, where --json was given
    result.end()

A result holds its command, commit, date, machine, versions and method. With them a stranger can
repeat it.
"""

import argparse
import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import triton

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
NCCL = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE")  # "1": no NVLink; no shared memory
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
FAILED = (OSError, subprocess.SubprocessError)


def run(main: Callable[[], int], fresh: Sequence[str] = ()) -> None:
    """Exit with what `main` returns. fresh: those of CACHES that are empty at first, and removed at
    the end. A warm cache may hold graphs of SDPA under other backend flags."""
    sys.stdout.reconfigure(line_buffering=True)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(caches(folder, fresh))
        sys.exit(main())


def caches(folder: str, names: Sequence[str] = CACHES) -> dict[str, str]:
    """The environment of a process whose caches lie in `folder`."""
    return {name: f"{folder}/{name}" for name in names}


# -- the command line ----


def parser(
    doc: str, rounds: int | None = None, target_ms: float | None = None
) -> argparse.ArgumentParser:
    """rounds, target_ms: the defaults of a bench whose providers take turns."""
    found = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if rounds is not None:
        found.add_argument("--rounds", type=positive, default=rounds, help=f"default: {rounds}")
    if target_ms is not None:
        help = f"of one provider's turn in a round; default: {target_ms:g}"
        found.add_argument("--target-ms", type=float, default=target_ms, help=help)
    found.add_argument(
        "--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu",
        help="cuda, cuda:INDEX or cpu; default: a GPU, where there is one",
    )  # fmt: skip
    found.add_argument(
        "--json", nargs="?", const="", metavar="FILE",
        help="save the result; default: bench/results/GPU/DATE-PLAN.json",
    )  # fmt: skip
    return found


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def device(text: str) -> torch.device:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"must be cuda, cuda:INDEX or cpu, got {text!r}")
    return torch.device("cpu") if text == "cpu" else torch.device("cuda", int(text[5:] or 0))


def gpu(args: argparse.Namespace) -> torch.device:
    """The GPU of --device. Exits with 2 where there is none."""
    if args.device.type != "cuda" or not torch.cuda.is_available():
        why = "got --device cpu" if torch.cuda.is_available() else "torch sees no CUDA device"
        print(f"{script()} measures on a GPU: {why}", file=sys.stderr)
        sys.exit(2)
    return current(args)


def current(args: argparse.Namespace) -> torch.device:
    """The device of --device. A GPU is torch's current one from here on."""
    if args.device.type == "cuda":
        torch.cuda.set_device(args.device)
    return args.device


def script() -> str:
    """The file that runs, as it is named from ROOT. No other folder gets into a result."""
    path = Path(sys.argv[0]).resolve()
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name


def command() -> str:
    """As a user types it in ROOT."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE")
    launcher = ["torchrun", "--nproc-per-node", ranks] if ranks else ["python"]
    told = [f"{name}={os.environ[name]}" for name in NCCL if name in os.environ]
    return shlex.join([*told, *launcher, script(), *sys.argv[1:]])


def commit() -> str | None:
    """Of the sources, with "-dirty" where they have changed since; None where git does not say."""
    if not (ROOT / ".git").exists():
        return None
    describe = ("git", "-C", ROOT, "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12")
    try:
        return output_of(*describe)
    except FAILED:
        return None


def output_of(*command) -> str:
    """Raises one of FAILED where the command is missing or fails."""
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    return found.stdout.strip()


# -- the machine ----


def describe(device: torch.device) -> dict:
    if device.type == "cpu":
        return {"gpu": "cpu"}
    gpu = torch.cuda.get_device_properties(device)
    return {
        "gpu": gpu.name,
        "capability": [gpu.major, gpu.minor],
        "sms": gpu.multi_processor_count,
        "memory_gib": round(gpu.total_memory / 2**30, 1),
        "l2_mib": round(getattr(gpu, "L2_cache_size", 0) / 2**20, 1),
        "driver": nvidia_smi(device, "driver_version"),
    }


def installed() -> dict[str, str]:
    """The versions of what is measured, and of what it stands on."""
    # Not above: bench/compare.py first says which checkout the library comes from.
    from sage_inductor.ops.sources import source_tag

    cudnn = torch.backends.cudnn.version()
    return {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "cudnn": f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}" if cudnn else "none",
        "python": platform.python_version(),
        "sage_inductor": source_tag(),
    }


def state(device: torch.device) -> str | None:
    """Clocks, power and temperature of a GPU now."""
    if device.type == "cuda":
        query = "clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu"
        return nvidia_smi(device, query)


def nvidia_smi(device: torch.device, query: str) -> str:
    """The queried fields of `device`, found by its UUID: nvidia-smi numbers GPUs its own way."""
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    try:
        return output_of("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "-i", uuid)
    except FAILED as error:
        return f"unknown ({type(error).__name__})"


# -- the result ----


def in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0]


class Result(dict):
    """What a bench has found so far."""

    def __init__(
        self, plan: str, method: str | dict[str, str], args: argparse.Namespace,
        versions: dict | None = None, **more,
    ):  # fmt: skip
        """Prints where and how it measures. versions: instead of `installed()`. more: what this
        bench alone has."""
        self.started, self.device, self.path = time.perf_counter(), args.device, args.json
        date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        super().__init__(
            date=date, command=command(), commit=commit(), machine=describe(args.device),
            versions=versions or installed(), state={"start": state(args.device)},
            method=method, **more, rows=[],
        )  # fmt: skip
        if self.path == "":
            folder = RESULTS / self["machine"]["gpu"].lower().replace(" ", "-")
            self.path = folder / f"{date[:10]}-{plan}.json"
        print(f"{plan}, {date}")
        gpu = "{gpu}, {sms} SMs, {memory_gib} GiB, {l2_mib} MiB L2, driver {driver}"
        on_gpu = args.device.type == "cuda"
        show(machine=gpu.format(**self["machine"]) if on_gpu else "cpu", command=self["command"])
        show(versions=", ".join(f"{name} {x}" for name, x in self["versions"].items()))
        if on_gpu:
            show(state=f"{self['state']['start']} (SM and memory clock, power of limit, Celsius)")
        show(**(method if isinstance(method, dict) else {"method": method}))

    def add(self, rows: list[dict]) -> None:
        self["rows"] += rows
        self.save()

    def save(self) -> None:
        self["elapsed_s"] = round(time.perf_counter() - self.started, 1)
        if self.path:
            Path(self.path).parent.mkdir(parents=True, exist_ok=True)
            Path(self.path).write_text(written(self))

    def end(self, *names: str) -> int:
        """The exit status: 1 where a row has an error, which is printed with what `names` say."""
        failed = [row for row in self["rows"] if row.get("error")] if names else []
        said = (f"{', '.join(str(row[name]) for name in names)}: {row['error']}" for row in failed)
        for line in dict.fromkeys(said):
            print(f"failed: {line}")
        self["state"]["end"] = state(self.device)
        self.save()
        if self.device.type == "cuda":
            print(f"\nstate at the end: {self['state']['end']}")
        print(f"elapsed: {self['elapsed_s']} s")
        return int(bool(failed))


def written(result: dict) -> str:
    """JSON, a row a line."""
    lines = []
    for key, value in result.items():
        text = json.dumps(value, indent=1)
        if key == "rows":
            text = "[\n" + ",\n".join(map(json.dumps, value)) + "\n]"
        lines.append(f"{json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def show(**lines: str) -> None:
    """A paragraph for each, after its name."""
    for name, line in lines.items():
        print(textwrap.fill(line, 100, initial_indent=f"  {name:9} ", subsequent_indent=" " * 12))
