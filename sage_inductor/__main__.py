"""The command line.

python -m sage_inductor doctor     what is installed, and whether each recipe really runs here
python -m sage_inductor tune       measure from which lengths "auto" is faster on this GPU
python -m sage_inductor demo       a diffusion transformer, compiled: report, accuracy, speed
"""

import argparse
import copy
import functools
import platform
import statistics
import sys

import torch
import torch.nn.functional as F
import triton

import sage_inductor
from sage_inductor import demo as demo_model
from sage_inductor import tune as tuning
from sage_inductor.decide import candidates
from sage_inductor.diagnose import compare
from sage_inductor.ops import recipe as recipes
from sage_inductor.ops import tiles
from sage_inductor.ops.reference import HEAD_DIMS, attention_exact

# Relative L1 error on normal inputs from which a kernel is wrong, not inaccurate, by Recipe.qk:
# 8-bit p and v cost 0.04, 4 bits 0.2; a wrong scale or a missed tile several times this.
WRONG = {"int8": 0.1, "fp8": 0.1, "int4": 0.5, "nvfp4": 0.4}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m sage_inductor",
        description="Quantized attention as a torch.compile backend.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser(
        "doctor",
        help="what is installed, and whether each recipe really runs here",
        description="Print versions and devices, run every recipe on every device against exact "
        "attention, and say what the policy chooses. Exit code 1 if one that should run fails.",
    )
    command = commands.add_parser(
        "tune",
        help='measure from which lengths "auto" is faster on this GPU',
        description="Measure self-attention with all preparation against SDPA's backends on every "
        "GPU, and write the lengths from which 'auto' may rewrite a call to where later processes "
        "read them. Minutes a GPU; nothing else should run on it.",
    )
    command.add_argument("--head-dims", type=_number, nargs="+", default=tuning.HEAD_DIMS)
    command.add_argument("--lengths", type=_number, nargs="+", default=tuning.LENGTHS)
    command = commands.add_parser(
        "demo",
        help="compile a diffusion transformer: report, accuracy, speed",
        description="Compile a diffusion transformer with backend='sage'; print what became of "
        "its attention calls, how far the output is from exact attention and, on a GPU, the time "
        "beside backend='inductor'. On CPU the recipe is emulated.",
    )
    command.add_argument(
        "--recipe", default="auto", choices=("auto", *recipes.NAMED), help="default: auto"
    )
    command.add_argument(
        "--size", type=_size, help="side of the latent image; tokens = (size / 2)^2 (64; GPU: 256)"
    )
    command.add_argument("--layers", type=_number, default=4, help="default: 4")
    command.add_argument(
        "--force", action="store_true", help="on a GPU: rewrite also where SDPA is faster"
    )
    options = vars(parser.parse_args(arguments))
    run = {"doctor": doctor, "tune": tune, "demo": demo}[options.pop("command")]
    return run(**options)


def _size(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0 and int(text) % demo_model.PATCH == 0):
        raise argparse.ArgumentTypeError(f"must be a positive even number, got {text!r}")
    return int(text)


def _number(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
    return int(text)


# -- doctor ----


def doctor() -> int:
    print(f"sage_inductor {recipes.source_tag()}")
    print(f"torch {torch.__version__}, triton {triton.__version__}", end=", ")
    print(f"Python {platform.python_version()}, {platform.platform()}")
    registered = "sage" in torch._dynamo.list_backends()
    print('backend="sage":', "registered" if registered else "NOT registered: install the package")

    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    if not devices:
        print("no CUDA device: attention stays SDPA; what follows is the recipes' emulation")
    healthy = [_examine(device) for device in devices or [torch.device("cpu")]]
    return 0 if registered and all(healthy) else 1


def _examine(device: torch.device) -> bool:
    """Print what `device` is, that each recipe runs on it, and what the policy chooses for it."""
    print()
    if device.type == "cuda":
        print(f"{device}: {torch.cuda.get_device_name(device)}, sm_{_sm(device)}")
    else:
        print(device)
    healthy = True
    print(f"  {'recipe':15}{'head_dim':10}{'kind':8}relative L1 error to exact attention")
    for name, recipe in recipes.NAMED.items():
        for head_dim in HEAD_DIMS:
            for kind in ("full", "causal", "mask"):
                verdict, runs = _probe(device, recipe, head_dim, kind)
                print(f"  {name:15}{head_dim:<10}{kind:8}{verdict}")
                healthy &= runs
    print(f"  recipe 'auto': {_policy(device)}")
    return healthy


def _sm(device: torch.device) -> str:
    return "{}{}".format(*tiles.capability(device))


def _probe(device, recipe: recipes.Recipe, head_dim: int, kind: str) -> tuple[str, bool]:
    """(what a small call of `recipe` gives, False if it should have run and did not)."""
    if device.type == "cuda":
        try:
            capability, masked = tiles.capability(device), kind == "mask"
            tiles.tile(capability, recipe.qk, recipe.pv, head_dim, masked)
        except ValueError as error:
            return f"stays SDPA: {error}", True
    q, k, v = _inputs(device, 333, head_dim)
    scale, right = head_dim**-0.5, 0 if kind == "causal" else None
    padding = torch.arange(333, device=device)[None] < 300 if kind == "mask" else None
    try:
        out, _ = torch.ops.sage.sdpa(
            q, k, v, padding, [], None, right, False, scale, recipe.encode(), True, False
        )
        error = compare(out, attention_exact(q, k, v, scale, padding, right=right)[0])
    except Exception as exception:  # whatever a driver or a compiler makes of it is the finding
        return f"FAILED: {type(exception).__name__}: {str(exception).partition(chr(10))[0]}", False
    wrong = WRONG[recipe.qk]
    right = error["relative L1"] <= wrong  # also False for NaN
    return f"{error['relative L1']:.4f}" + ("" if right else f"  WRONG: above {wrong}"), right


def _inputs(device: torch.device, length: int, head_dim: int):
    """q, k and v [1, 4 or 2, length, head_dim], in the layout models give them."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    make = {"generator": generator, "device": device, "dtype": dtype}
    return (torch.randn(1, length, H, head_dim, **make).transpose(1, 2) for H in (4, 2, 2))


def _policy(device: torch.device) -> str:
    """What "auto" does on `device`: asked of the pass itself, with a call that it has to decide."""

    def attention(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    with torch.no_grad():
        inputs = list(_inputs(device, 128, HEAD_DIMS[-1]))
        if device.type == "cpu":
            (site,) = sage_inductor.explain(attention, *inputs)
            return f"SDPA: {site.reason}"
        (site,) = sage_inductor.explain(attention, *inputs, options={"sage.force": True})
    if not site.rewritten:
        return f"SDPA: {site.reason}"
    rows = _crossovers(tiles.capability(device))
    if not rows:
        return f"SDPA: no length was measured from which {site.recipe} is faster on this device"
    return "what was measured to be faster, else SDPA" + "".join(f"\n    {row}" for row in rows)


def _crossovers(capability: tuple[int, int]) -> list[str]:
    """From where "auto" chooses a recipe, a line for each kind of call."""
    rows = []
    for head_dim in range(1, HEAD_DIMS[-1] + 1):
        for kind in tiles.KINDS:
            for recipe in candidates(capability, head_dim, kind, portable=False):
                found = tiles.crossover(capability, recipe, head_dim, kind)
                lengths = ", ".join(f"N={n} with B*H >= {heads}" for heads, n in reversed(found))
                if lengths:
                    rows.append(f"head_dim {head_dim}, {kind}: {recipe} from {lengths}")
    return rows


# -- tune ----


def tune(head_dims: list[int], lengths: list[int]) -> int:
    if not torch.cuda.is_available():
        print("tune measures GPUs: torch sees no CUDA device", file=sys.stderr)
        return 2
    try:
        from tqdm import tqdm as progress
    except ModuleNotFoundError:
        progress = list
    of_name = {torch.cuda.get_device_name(i): i for i in range(torch.cuda.device_count())}
    for name, index in of_name.items():
        table = tuning.tune(torch.device("cuda", index), head_dims, lengths, progress=progress)
        for recipe, head_dim, kind, row in table["crossover"]:
            found = ", ".join(f"N={N} with B*H >= {heads}" for heads, N in row) or "never"
            print(f"{name}: head_dim {head_dim}, {kind}: {recipe} from {found}")
        print(f"written to {tuning.save(table)}")
    return 0


# -- demo ----


def demo(recipe: str, size: int | None, layers: int, force: bool) -> int:
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        print("the demo needs tqdm to show its progress: pip install tqdm", file=sys.stderr)
        return 1

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    size = size or (256 if on_gpu else 64)
    heads, head_dim = (24, 128) if on_gpu else (4, 64)
    torch.manual_seed(0)
    with device:
        model32 = demo_model.Denoiser(layers, heads, head_dim).eval()
        latents = torch.randn(1, demo_model.LATENT_CHANNELS, size, size)
        times = torch.rand(1)
    model = copy.deepcopy(model32).to(dtype)
    inputs = (latents.to(dtype), times.to(dtype))

    where = f"{torch.cuda.get_device_name(device)}, bfloat16" if on_gpu else "CPU, emulated"
    print(f"a diffusion transformer of {layers} layers, {heads} heads of {head_dim},", end=" ")
    print(f"{(size // demo_model.PATCH) ** 2} tokens; {where}")
    options = {"sage.recipe": recipe, "sage.emulate": not on_gpu, "sage.force": force and on_gpu}
    compiled = torch.compile(model, backend="sage", options=options, fullgraph=True)
    outputs = {}
    steps = tqdm(total=4 if on_gpu else 3, bar_format="{desc}step {n} of {total}, {elapsed}")

    def step(what: str, run):
        steps.set_description(what)
        with torch.no_grad():
            outputs[what] = run()
        steps.update()

    step("exact attention, float32", lambda: model32(latents, times))
    if on_gpu:
        step("SDPA", lambda: model(*inputs))
    for block in model32.blocks:  # a control: how much of the output is what attention selects
        torch.nn.init.zeros_(block.attention.norm_q.weight)
    step("attending to all keys alike", lambda: model32(latents, times))
    step('backend="sage" (first call: compiles)', lambda: compiled(*inputs))
    steps.close()

    report = sage_inductor.report()
    print(f"\nwhat became of its attention calls (sage_inductor.report()):\n{report}")
    exact = outputs.pop("exact attention, float32")
    print(f"\n{'the output, against exact attention':40}CosSim     relative L1  RMSE")
    for name, output in outputs.items():
        found = compare(output, exact)
        print(f"{name.removesuffix(' (first call: compiles)'):40}", end="")
        print(f"{found['CosSim']:<11.6f}{found['relative L1']:<13.5f}{found['RMSE']:.5f}")
    if on_gpu:
        _race(model, compiled, inputs, tqdm)
    else:
        print("\nno GPU: the emulation shows accuracy, not speed")
    if on_gpu and not report.rewritten:
        print("\nevery call stays SDPA here; --force runs the kernels all the same")
    return 0


def _race(model, compiled, inputs, tqdm) -> None:
    """The two backends in turn, so that a clock that drifts drifts for both."""
    stock = torch.compile(model, backend="inductor", fullgraph=True)
    times = {'backend="inductor"': [], 'backend="sage"': []}
    with torch.no_grad():
        for _ in tqdm(range(5), desc="speed, in turn"):
            for found, run in zip(times.values(), (stock, compiled), strict=True):
                forward = functools.partial(run, *inputs)
                found.append(triton.testing.do_bench(forward, return_mode="median"))
    median = {name: statistics.median(found) for name, found in times.items()}
    print("\nmedian time of a forward pass (5 rounds of triton.testing.do_bench, in turn)")
    for name, found in times.items():
        print(f"{name:40}{median[name]:.3f} ms   ({min(found):.3f} .. {max(found):.3f})")
    inductor, sage = median.values()
    print(f"{'inductor / sage':40}{inductor / sage:.3f}")


if __name__ == "__main__":
    sys.exit(main())
