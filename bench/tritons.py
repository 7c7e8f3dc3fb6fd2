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
import sys
from pathlib import Path

import torch
import triton
from triton.experimental.gluon import language as gl

from bench import harness
from bench.cases import Case
from bench.measure import Exact, Provider, Runner, draw, interleave
from sage_inductor.ops.attention import tiles
from sage_inductor.ops.attention.hopper import kernel, plan
from sage_inductor.ops.attention.tiles import Tile
from sage_inductor.ops.compile import Compilation
from sage_inductor.ops.formats import pad_head_dim
from sage_inductor.ops.launch import launch_cached
from sage_inductor.ops.recipe import NAMED
from sage_inductor.ops.sdpa import SdpaCall, kernel_inputs

DIVISIBLE = ("N_pad", "Q_pad", "K_pad", "Q_rows", "D2", "D2_V")  # by 16, where the head_dim is by 8
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
    parser.add_argument("--label", default=triton.__version__, help="of what is compiled")
    args = parser.parse_args(argv)
    return save(args.folder / args.label) if args.what == "compile" else run(args)


# -- without a GPU ----


def compile_kernel(kernel, architecture, constexprs, types, unaligned=(), **options):
    """Compile as the JIT would: strides, but for the unaligned, and padded sizes divisible by 16,
    pointers aligned. types: of what is neither a constexpr nor an i32, by name."""
    found, constants, aligned = [], [], []
    for i, name in enumerate(kernel.arg_names):
        if name in constexprs:
            found.append("constexpr")
            constants.append((i, constexprs[name]))
            continue
        found.append(types.get(name, "i32"))
        is_stride = name.startswith("stride") and name not in unaligned
        if found[-1][0] == "*" or is_stride or name in DIVISIBLE:
            aligned.append(i)
    parts = map(tuple, (found, constants, aligned, options.items()))
    return Compilation(kernel, *parts).compile(architecture)


@functools.cache
def compile_hopper(
    pv: str, head_dim: int, is_causal: bool, tile: Tile, dtype="bf16", split=False, band=None,
    mask=False, listed=False, keeps_max=False, own=False, rotated=False,
):  # fmt: skip
    """band: (left, right, bottom_right), -1 for no bound, where it is another than is_causal's."""
    BLOCK = pad_head_dim(head_dim)
    element = {"bf16": gl.bfloat16, "fp16": gl.float16}[dtype]

    def descriptor(name, shape, element):
        layout = gl.NVMMASharedLayout.get_default_for(shape, element)
        return f"tensordesc<{name}{shape},{layout!r}>"

    k = descriptor("i8", [tile.BLOCK_N, BLOCK], gl.int8)
    if pv == "fp8":
        v = descriptor("fp8e4nv", [BLOCK, tile.BLOCK_N], gl.float8e4nv)
    else:
        v = descriptor(dtype, [1, 1, tile.BLOCK_N, BLOCK], element)
    types = dict(
        Q=f"*{dtype}", K=k, K_scale="*fp32", K_own=k if own else "*fp32", V=v,
        K_own_scale=descriptor("fp32", [tile.BLOCK_N], gl.float32) if own else "*fp32",
        V_scale="*fp32", V_mean="*fp32", Out=f"*{dtype}", Lse="*fp32", Part="*fp32",
        Part_ml="*fp32", Words="*i32", List="*i32",
    )  # fmt: skip
    at_launch, consumer = plan.registers(tile)
    constexprs = dict(
        D=head_dim, D_V=head_dim, SCALE=head_dim**-0.5, LISTED=mask or listed, MASK=mask,
        SPLIT=split, ROTATED=rotated,
        BAND=band or (-1, 0 if is_causal else -1, False),
        FP8=pv == "fp8", KEEPS_MAX=keeps_max, OWN=own,
        BLOCK_N=tile.BLOCK_N, BLOCK_D=BLOCK, BLOCK_DV=BLOCK,
        WARPGROUPS=tile.warpgroups, STAGES=tile.num_stages, REGISTERS=consumer,
    )  # fmt: skip
    return compile_kernel(
        kernel._hopper_kernel, (9, 0), constexprs, types,
        num_warps=tile.num_warps, maxnreg=at_launch,
    )  # fmt: skip


def save(folder: Path) -> int:
    """Each variant's cubin and what a launch has to know of it."""
    folder.mkdir(parents=True, exist_ok=True)
    for row, split in VARIANTS:
        compiled, cubin = _compile(row, split)
        about = {"entry": entry(compiled), "shared": compiled.metadata.shared}
        (folder / f"{name_of(row, split)}.cubin").write_bytes(cubin)
        (folder / f"{name_of(row, split)}.json").write_text(json.dumps(about))
        print(f"{folder.name} {name_of(row, split)}: {len(cubin)} bytes")
    return 0


def _compile(row, split: bool):
    pv, head_dim, is_causal, _, tile = row
    compiled = compile_hopper(pv, head_dim, is_causal, tile, split=split)
    return compiled, compiled.asm["cubin"]


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
    result.end()
    return 0


def measure(row, split: bool, folders: list[Path], args, device) -> list[dict]:
    """The variant by this Triton's JIT and by each folder's cubin."""
    pv, D, is_causal, _, tile = row
    found = next((inputs for n in LENGTHS if (inputs := _call(row, n, split, device))), None)
    if found is None:
        print(f"{name_of(row, split)}: no length of {LENGTHS} has it", file=sys.stderr)
        return []
    call, qkv = found
    exact = Exact(*qkv, is_causal=is_causal)
    compiled, _ = _compile(row, split)
    ways = {"JIT": launch_cached}
    for folder in folders:
        if not (folder / f"{name_of(row, split)}.json").exists():
            continue
        told = json.loads((folder / f"{name_of(row, split)}.json").read_text())
        if told["entry"] != entry(compiled):
            expected = entry(compiled)
            raise ValueError(f"{folder}: parameters must be\n{expected}\ngot\n{told['entry']}")
        cubin = (folder / f"{name_of(row, split)}.cubin").read_bytes()
        ways[folder.name] = with_cubin(row, split, cubin, told["shared"])
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
            "triton": name, "variant": name_of(row, split), "N": call.q.shape[2],
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


def _call(row, N: int, split: bool, device):
    """(an AttentionCall that runs as this variant, q, k and v), or None."""
    pv, D, is_causal, _, tile = row
    torch.manual_seed(0)
    q, k, v = draw(Case(HEADS[0], HEADS[1], HEADS[1], N, D), "normal", device)
    arguments = SdpaCall(
        q, k, v, None, [], None, 0 if is_causal else None, False, D**-0.5,
        NAMED[RECIPES[pv]].encode(), None, True, False,
    )  # fmt: skip
    call, _, _ = kernel_inputs(arguments)
    seen = []
    plan.launch(call, tile, lambda *args, **options: seen.append(args), device)
    return (call, (q, k, v)) if split == (len(seen) == 2) else None


def _attend(call, tile: Tile, way) -> torch.Tensor:
    return plan.launch(call, tile, way)[0]


def with_cubin(row, split: bool, cubin: bytes, shared: int):
    """A way to launch (as ops/launch.py's) in which the kernel is that of `cubin`."""
    compile_hopper.cache_clear()
    compiled, _ = _compile(row, split)
    compiled._init_handles()
    utils = triton.runtime.driver.active.utils
    compiled.module, compiled.function, *_ = utils.load_binary(
        compiled.metadata.name, cubin, shared, torch.cuda.current_device()
    )

    def launch(jit, grid, tensors, numbers, **options):
        if jit is kernel._hopper_kernel:
            compiled[grid](*tensors, *numbers)
        else:
            launch_cached(jit, grid, tensors, numbers, **options)

    return launch


if __name__ == "__main__":
    harness.run(main)
