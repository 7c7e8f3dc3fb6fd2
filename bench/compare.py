"""Two commits side by side on one GPU: the time of this checkout beside that of another's.

$ git worktree add /tmp/base COMMIT
$ python bench/compare.py /tmp/base --json FILE          # some minutes
$ python bench/compare.py /tmp/base --cases host flux    # whose names have one of these words

Each side is a process that stays: the library's sources are its folder's, the bench is this one's.
Both compile a case at once, then they are timed strictly in turn: a card that slows down as it
warms does so under both. A case that computes something else on one side is said to.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import harness  # imports nothing of the library

ROOMS = {  # pyproject.toml's
    "sage_inductor": "sage_inductor",
    "sage_inductor.lowering": "lowering",
    "sage_inductor.ops": "ops",
    "sage_inductor.patterns": "patterns",
}
NEAR = 1e-3  # relative difference of the outputs' norms from which two sides compute other things


def main(argv=None) -> int:
    args = parse(argv)
    if args.serve:
        sys.meta_path.insert(0, Sources(args.folder))
        from bench.side import serve  # imports the library, now from the folder

        return serve(args.folder, args.target_ms, harness.current(args))
    harness.gpu(args)
    folders = {"base": args.folder, "this": harness.ROOT}
    with tempfile.TemporaryDirectory() as cache:
        sides = {name: Side(folder, f"{cache}/{name}", args) for name, folder in folders.items()}
        try:
            return measure(sides, args)
        finally:
            for side in sides.values():
                side.close()


def parse(argv) -> argparse.Namespace:
    parser = harness.parser(__doc__, rounds=6, target_ms=40.0)
    parser.add_argument("folder", type=checkout, metavar="BASE_FOLDER", help="of another commit")
    parser.add_argument("--cases", nargs="+", default=[""], metavar="WORD", help="default: all")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)  # be a side
    return parser.parse_args(argv)


def checkout(text: str) -> Path:
    folder = Path(text).resolve()
    if not all((folder / room / "__init__.py").exists() for room in ROOMS.values()):
        raise argparse.ArgumentTypeError(f"must hold {list(ROOMS.values())}, got {text}")
    return folder


# -- the two sides ----


class Sources:
    """Finds the library in a checkout, before any that is installed."""

    def __init__(self, folder: Path):
        self.folder = folder

    def find_spec(self, name, path=None, target=None):
        if name not in ROOMS:
            return None  # a module of a room is found by the room's __path__
        file = self.folder / ROOMS[name] / "__init__.py"
        return importlib.util.spec_from_file_location(name, file)


class Side:
    """bench/side.py in a process of its own. A command is a line, its answer a line of JSON."""

    def __init__(self, folder: Path, cache: str, args: argparse.Namespace):
        self.folder = folder
        options = "--target-ms", str(args.target_ms), "--device", str(args.device)
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(folder), "--serve", *options],
            env={**os.environ, **harness.caches(cache)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def send(self, command: str) -> None:
        print(command, file=self.process.stdin, flush=True)

    def receive(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the side of {self.folder} has ended, see above")
        return json.loads(line)

    def close(self) -> None:
        self.process.stdin.close()  # it ends
        self.process.wait()


def at_once(sides: dict, command: str) -> dict[str, dict]:
    for side in sides.values():
        side.send(command)
    return {name: side.receive() for name, side in sides.items()}


# -- the measurement ----


def measure(sides: dict, args) -> int:
    found = at_once(sides, "describe")
    names = [n for n in found["this"]["cases"] if any(word in n for word in args.cases)]
    method = (
        f"ms a call, median of {args.rounds} turns of {args.target_ms:g} ms, the sides in turns; "
        "attention: sage::sdpa with its preparation, and blocks, in CUDA graphs; host: until the "
        "call returns; ratio: this over base, of medians, and its range over turns"
    )
    versions = {name: each["versions"] for name, each in found.items()}
    result = harness.Result("compare", method, args, versions)
    print(f"\n{'':44}{'base':>10}{'this':>10}{'ratio':>8}")
    for name in names:
        result.add([compare(sides, name, args.rounds)])
        print(line(result["rows"][-1]), flush=True)
    result["host over SDPA"] = over_sdpa(result["rows"])
    for name, ratios in result["host over SDPA"].items():
        print("{:44}{base:9.2f}x{this:9.2f}x of SDPA's".format(name, **ratios))
    result.end()
    return 1 if not names or any(row["error"] for row in result["rows"]) else 0


def compare(sides: dict, case: str, rounds: int) -> dict:
    """A row; where a side failed, or they compute different things, with an error."""
    prepared = at_once(sides, f"prepare {case}")
    row = {"case": case, "prepared": prepared, "error": difference(prepared), "ratio": None}
    times = {name: [] for name in sides}
    for turn in range(rounds):
        for name in list(sides)[:: -1 if turn % 2 else 1]:
            if any("error" in each for each in prepared.values()):
                break
            sides[name].send(f"run {case}")
            times[name].append(sides[name].receive()["ms"])
    at_once(sides, f"drop {case}")
    if all(times.values()):
        ratios = [this / base for this, base in zip(times["this"], times["base"], strict=True)]
        row["ms"] = {name: statistics.median(each) for name, each in times.items()}
        row["ratio"] = row["ms"]["this"] / row["ms"]["base"]
        row.update(range=[min(ratios), max(ratios)], times=times)
    return row


def difference(prepared: dict[str, dict]) -> str | None:
    """Why the times of two sides are not those of one thing."""
    for name, each in prepared.items():
        if "error" in each:
            return f"{name}: {each['error']}"
    base, this = prepared["base"], prepared["this"]
    for what in ("captured", "rewritten"):
        if base[what] != this[what]:
            return f"{what}: {base[what]}, now {this[what]}"
    if not abs(this["norm"] - base["norm"]) <= NEAR * abs(base["norm"]):
        return f"norm of the output: {base['norm']:.6g}, now {this['norm']:.6g}"
    return None


def over_sdpa(rows: list[dict]) -> dict[str, dict[str, float]]:
    """The host's time of a compiled call over that of the same with SDPA, on each side."""
    ms = {row["case"]: row["ms"] for row in rows if row["ratio"]}
    pairs = {name: name.replace("host sage", "host SDPA") for name in ms}
    return {
        name: {side: ms[name][side] / ms[sdpa][side] for side in ms[name]}
        for name, sdpa in pairs.items()
        if name != sdpa and sdpa in ms
    }


def line(row: dict) -> str:
    found = f"{row['case']:44}"
    if row["ratio"]:
        found += "{base:#10.4g}{this:#10.4g}".format(**row["ms"])
        found += "{:8.3f} ({:.3f} .. {:.3f})".format(row["ratio"], *row["range"])
    return f"{found}  {row['error'] or ''}".rstrip()


if __name__ == "__main__":
    harness.run(main)
