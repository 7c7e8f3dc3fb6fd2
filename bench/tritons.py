"""The Hopper kernel as several versions of Triton compile it, beside each other on one GPU.

$ python bench/tritons.py compile FOLDER           # under any Triton, without a GPU
$ python bench/tritons.py run FOLDER --json FILE   # on a Hopper GPU, under one of them

A new Triton may come with a torch that the GPU's machine has not. Its cubins need neither: `run`
launches those in FOLDER in the place of its own Triton's, and times all in turn. A cubin that takes
other parameters than the same kernel of this Triton is refused.
"""

import functools
import json
import re
import statistics
from pathlib import Path

import torch
import triton

from bench import harness
from bench.cases import Case
from bench.measure import Exact, Provider, Runner, draw, interleave
from sage_inductor.ops import gpus
from sage_inductor.ops import launch as of_ops
from sage_inductor.ops.attention import tiles
from sage_inductor.ops.attention.hopper import kernel, plan
from sage_inductor.ops.attention.tiles import Tile
from sage_inductor.ops.compile import Launch, describe
from sage_inductor.ops.launch import noted
from sage_inductor.ops.recipe import NAMED
from sage_inductor.ops.sdpa import attention_call, prepare
from sage_inductor.ops.visibility import Visibility

H200 = gpus.Gpu((9, 0), 132)
RECIPES = {"fp8": "sage2-8b-per-token", "16bit": "sage1-per-token"}  # by pv
# Of the Hopper kernel: a row of its table for each tile, and whether tiles are split.
ROWS = list({(*row[:3], row[4]): row for row in tiles.HOPPER}.values())
VARIANTS = [
    (row, split)
    for row in ROWS
    for split in (False, True)
    if not split or (not row[2] and row[4].warpgroups > 1)
]
HEADS, LENGTHS = (2, 16), (4096, 4352, 8192, 2048, 3072, 1024, 5120, 6144)


def main(argv=None) -> int:
    parser = harness.parser(__doc__, rounds=8, target_ms=20.0)
    parser.add_argument("what", choices=("compile", "run"))
    parser.add_argument("folder", type=Path)
    args = parser.parse_args(argv)
    return save(args.folder / triton.__version__) if args.what == "compile" else run(args)


# -- without a GPU ----


def save(folder: Path) -> int:
    """Each variant's cubin and what a launch has to know of it."""
    folder.mkdir(parents=True, exist_ok=True)
    for row, split in VARIANTS:
        name, (_, launches, _) = name_of(row, split), launches_of(row, split, torch.device("meta"))
        compiled = compiled_of(launches)
        cubin = compiled.asm["cubin"]
        about = {"entry": entry(compiled), "shared": compiled.metadata.shared}
        (folder / f"{name}.cubin").write_bytes(cubin)
        (folder / f"{name}.json").write_text(json.dumps(about))
        print(f"{folder.name} {name}: {len(cubin)} bytes")
    return 0


def launches_of(row, split: bool, device: torch.device):
    """(AttentionCall, launches, q k and v) of the first length whose call runs as this variant. On
    meta there is no memory, and an H200's processors."""
    pv, D, is_causal, _, tile = row
    recipe = NAMED[RECIPES[pv]]
    for N in LENGTHS:
        torch.manual_seed(0)
        q, k, v = draw(Case(HEADS[0], HEADS[1], HEADS[1], N, D), "normal", device)
        seen = Visibility.of(None, (None, 0 if is_causal else None, False), N, tile.BLOCK_M)
        call = attention_call(q, k, v, prepare(k, v, seen, recipe), seen, D**-0.5, recipe)
        with noted() as launches:
            plan.launch(call, tile, of_ops.run, H200 if device.type == "meta" else None)
        if split == (len(launches) == 2):
            return call, launches, (q, k, v)
    raise ValueError(f"{name_of(row, split)}: no length of {LENGTHS} has it")


def compiled_of(launches: list[Launch]):
    """The Hopper kernel, compiled anew."""
    (found,) = (each for each in launches if each.kernel is kernel._hopper_kernel)
    return describe(found.kernel, found.arguments, found.options).compile(H200.capability)


def name_of(row, split: bool) -> str:
    pv, head_dim, is_causal, _, tile = row
    kind = "causal" if is_causal else "split" if split else "full"
    return f"{pv}-{head_dim}-{kind}-{tile.warpgroups}"


def entry(compiled) -> str:
    """The kernel's name and the types of its parameters, as the cubin's caller sees them."""
    text = re.search(r"\.entry (.*?)\)", compiled.asm["ptx"], re.DOTALL).group(1)
    return " ".join(re.sub(r"//.*", "", text).split())


# -- on a GPU ----


def run(args) -> int:
    device = harness.gpu(args)
    method = (
        f"median of {args.rounds} rounds of {args.target_ms:g} ms of CUDA graphs, in turns; ratio: "
        "over the JIT's of the same round"
    )
    result = harness.Result("tritons", method, args)
    folders = sorted(each for each in args.folder.iterdir() if each.is_dir())
    for row, split in VARIANTS:
        result.add(measure(row, split, folders, args, device))
    return result.end()


def measure(row, split: bool, folders: list[Path], args, device) -> list[dict]:
    """The variant by this Triton's JIT and by each folder's cubin."""
    variant, tile = name_of(row, split), row[4]
    call, launches, qkv = launches_of(row, split, device)
    exact = Exact(*qkv, is_causal=row[2])
    compiled = compiled_of(launches)
    ways = {"JIT": of_ops.run}
    for folder in folders:
        if not (folder / f"{variant}.json").exists():
            continue
        told = json.loads((folder / f"{variant}.json").read_text())
        if told["entry"] != entry(compiled):
            expected = entry(compiled)
            raise ValueError(f"{folder}: parameters must be\n{expected}\ngot\n{told['entry']}")
        cubin = (folder / f"{variant}.cubin").read_bytes()
        ways[folder.name] = with_cubin(launches, cubin, told["shared"])
    runners = {
        name: Runner(Provider(name, functools.partial(_attend, call, tile, way)), [()])
        for name, way in ways.items()
    }
    outputs = {name: runner.output().clone() for name, runner in runners.items()}
    times = interleave(runners, args.rounds, args.target_ms)
    rows = []
    for name in runners:
        ratios = [a / b for a, b in zip(times[name], times["JIT"], strict=True)]
        difference = (outputs[name].float() - outputs["JIT"].float()).abs().max().item()
        rows.append({
            "triton": name, "variant": variant, "N": call.q.shape[2],
            "ms": statistics.median(times[name]), "ratio": statistics.median(ratios),
            "equal": bool(torch.equal(outputs[name], outputs["JIT"])),
            "largest_difference": difference, "rel_l1": exact.compare(outputs[name])["rel_l1"],
        })  # fmt: skip
        print(
            "{variant:18} N={N:<5} {triton:16} {ms:.4f} ms {ratio:.3f}x, equal: {equal} "
            "({largest_difference:.2g}), rel. L1 {rel_l1:.4f}".format(**rows[-1]),
            flush=True,
        )
    return rows


def _attend(call, tile: Tile, way) -> torch.Tensor:
    return plan.launch(call, tile, way)[0]


def with_cubin(launches: list[Launch], cubin: bytes, shared: int):
    """A way to launch (as ops/launch.py's) in which the kernel is that of `cubin`."""
    compiled = compiled_of(launches)
    compiled._init_handles()
    utils = triton.runtime.driver.active.utils
    compiled.module, compiled.function, *_ = utils.load_binary(
        compiled.metadata.name, cubin, shared, torch.cuda.current_device()
    )

    def launch(jit, grid, tensors, numbers, **options):
        if jit is kernel._hopper_kernel:
            compiled[grid](*tensors, *numbers)
        else:
            of_ops.run(jit, grid, tensors, numbers, **options)

    return launch


if __name__ == "__main__":
    harness.run(main)
