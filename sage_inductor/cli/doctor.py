"""``python -m sage_inductor doctor``: what is installed, whether each recipe runs on each device,
and what the policy chooses there."""

import argparse
import itertools
import platform
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch.nn.attention import SDPBackend

from sage_inductor.backend import explain
from sage_inductor.choose import families, tables
from sage_inductor.cli.progress import track
from sage_inductor.cli.tune import lines
from sage_inductor.lowering import replay
from sage_inductor.ops import gpus
from sage_inductor.ops import recipe as recipes
from sage_inductor.ops.attention import tiles
from sage_inductor.ops.compat import fused_sdp_choice, untested
from sage_inductor.ops.formats import HEAD_DIMS
from sage_inductor.ops.reference.exact import attention_exact
from sage_inductor.ops.sdpa import SdpaCall
from sage_inductor.ops.sources import source_tag
from sage_inductor.ops.visibility import Band
from sage_inductor.options import config
from sage_inductor.study.measure import compare


class Probe(NamedTuple):
    """What a small call of a recipe gave on a device."""

    recipe: str
    head_dim: int | str  # "all"
    kind: str
    runs: bool | None  # None: the device has no kernel for it. False: it should have run
    finding: str


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print versions and devices, run every recipe on every device against exact attention, and "
        "say what recipe 'auto' chooses. Exit code 1 if one that should run fails."
    )
    parser.add_argument("--verbose", action="store_true", help="a line for each small call")


def doctor(verbose: bool = False) -> int:
    """verbose: a line for each probe, also where all of a recipe run."""
    registered = "sage" in torch._dynamo.list_backends()
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    asked = list(itertools.product(devices or [torch.device("cpu")], recipes.NAMED))
    probes: dict[torch.device, list[Probe]] = {device: [] for device, _ in asked}
    for device, name in track(asked, lambda each: f"{each[1]} on {each[0]}"):
        for D, kind in itertools.product(HEAD_DIMS, ("full", "causal", "mask")):
            probes[device].append(Probe(name, D, kind, *_probe(device, name, D, kind)))
    policies = {device: _policy(device) for device in probes}

    print(verdict(registered, [(d, probes[d], policies[d][1]) for d in probes]))
    print(f"\nsage_inductor {source_tag()}")
    print(f"torch {torch.__version__}, triton {triton.__version__}", end=", ")
    print(f"Python {platform.python_version()}, {platform.platform()}")
    if untested():
        print(untested())
    print('backend="sage":', "registered" if registered else "NOT registered: install the package")
    without = "no CUDA device: attention stays SDPA; what follows is the recipes' emulation"
    print((_by_python() or "C++ submits the calls of compiled models") if devices else without)
    for device in probes:
        print(f"\n{_name(device)}")
        print(f"  SDPA runs {sdpa_backend(device)}")
        print(f"  {'recipe':20}{'head_dim':10}{'kind':8}relative L1 error to exact attention")
        for probe in probes[device] if verbose else shortened(probes[device]):
            print(f"  {probe.recipe:20}{probe.head_dim:<10}{probe.kind:8}{probe.finding}")
        print(f"  recipe 'auto': {policies[device][0]}")
    return int(not registered or any(x.runs is False for each in probes.values() for x in each))


def shortened(probes: list[Probe]) -> list[Probe]:
    """One line for a recipe all of whose probes run, with the worst error."""
    found = []
    for name, of_name in itertools.groupby(probes, lambda probe: probe.recipe):
        its = list(of_name)
        if all(probe.runs for probe in its):
            worst = max(its, key=lambda probe: float(probe.finding)).finding
            its = [Probe(name, "all", "all", True, f"at most {worst}")]
        found += its
    return found


def verdict(registered: bool, found: list[tuple[torch.device, list[Probe], bool]]) -> str:
    """One line: what runs here, what does not, and what to do. found: of each device its probes,
    and whether "auto" rewrites anything there."""
    if not registered:
        return 'BROKEN: torch does not know backend="sage". Install the package: pip install .'
    return "; ".join(dict.fromkeys(_verdict(*each) for each in found))


def _verdict(device: torch.device, probes: list[Probe], auto_rewrites: bool) -> str:
    where = "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
    if device.type == "cuda" and torch.version.hip:
        return f"NOTHING RUNS HERE: {where} is an AMD GPU: all stays SDPA"
    broken = list(dict.fromkeys(x.recipe for x in probes if x.runs is False))
    run = list(dict.fromkeys(x.recipe for x in probes if x.runs))
    if broken:
        count = f"{sum(x.runs is False for x in probes)} of {len(probes)} probes fail"
        return f"BROKEN: {count} on {where}. Do not ask for {', '.join(broken)}: see the rows below"
    if device.type == "cpu":
        why = "torch sees no GPU" if torch.version.cuda else "this torch is built without CUDA"
        return (
            f"NO SPEED HERE: {why}, so attention stays SDPA. The accuracy of all {len(run)} "
            "recipes can be studied (sage.emulate); for speed use an NVIDIA GPU, sm_80 or newer"
        )
    if not run:
        return f"NOTHING RUNS HERE: {where} (sm_{_sm(device)}) is older than sm_80: all stays SDPA"
    some = f"{len(run)} of {len(recipes.NAMED)} recipes run on {where}"
    if lost := tiles.hopper_unavailable(gpus.capability(device)) or _by_python():
        return f"SLOWER THAN IT COULD BE: {some}, but {lost}"
    if not auto_rewrites:
        until = "`python -m sage_inductor tune` has found from which lengths it is faster"
        return f'NOT MEASURED: {some}, but "auto" rewrites nothing until {until}'
    return f'READY: {some}, and "auto" rewrites the calls that are measured to be faster'


def _by_python() -> str:
    return (why := replay.why_python()) and f"{replay.BY_PYTHON}: {why}"


def _name(device: torch.device) -> str:
    if device.type == "cpu":
        return str(device)
    return f"{device}: {torch.cuda.get_device_name(device)}, sm_{_sm(device)}"


def sdpa_backend(device: torch.device) -> str:
    """The backend of SDPA that computes a self-attention in 16 bits here; "?" where torch does not
    say."""
    if fused_sdp_choice is None:
        return "?"
    q, *_ = _inputs(device, 333, 128)
    name = SDPBackend(fused_sdp_choice(q, q, q)).name
    several = device.type == "cuda" and name == "FLASH_ATTENTION"
    return name if not several else f"{name} ({families.flash_attention()})"


def _sm(device: torch.device) -> str:
    return "{}{}".format(*gpus.capability(device))


def _probe(device, name: str, head_dim: int, kind: str) -> tuple[bool | None, str]:
    """(runs, finding) of a Probe."""
    recipe, wrong_from, *_ = recipes.TABLE[name]
    if device.type == "cuda":
        try:
            capability, masked = gpus.capability(device), kind == "mask"
            tiles.tile(capability, recipe.qk, recipe.pv, head_dim, masked)
        except ValueError as error:
            return None, f"stays SDPA: {error}"
    q, k, v = _inputs(device, 333, head_dim)
    scale, right = head_dim**-0.5, 0 if kind == "causal" else None
    padding = torch.arange(333, device=device)[None] < 300 if kind == "mask" else None
    try:
        band = Band(None, right)
        call = SdpaCall.of(q, k, v, scale, recipe.encode(), padding, band, out_bnhd=True)
        out, _ = torch.ops.sage.sdpa(*call)
        error = compare(out, attention_exact(q, k, v, scale, padding, right=right)[0])
    except Exception as exception:  # noqa: BLE001  (what a driver or a compiler says is the finding)
        return False, f"FAILED: {type(exception).__name__}: {str(exception).partition(chr(10))[0]}"
    right = error["relative L1"] <= wrong_from  # also False for NaN
    return right, f"{error['relative L1']:.4f}" + ("" if right else f"  WRONG: above {wrong_from}")


def _inputs(device: torch.device, length: int, head_dim: int):
    """q, k and v [1, 4 or 2, length, head_dim], in the layout models give them."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    make = {"generator": generator, "device": device, "dtype": dtype}
    return (torch.randn(1, length, H, head_dim, **make).transpose(1, 2) for H in (4, 2, 2))


def _policy(device: torch.device) -> tuple[str, bool]:
    """What "auto" does on `device`, and whether that is ever to rewrite: asked of the pass itself,
    with a call that it has to decide."""

    def attention(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    with torch.no_grad():
        inputs, forced = _inputs(device, 128, HEAD_DIMS[-1]), {"sage.force": device.type != "cpu"}
        (site,) = explain(attention, options=forced)(*inputs)
    if device.type == "cpu" or not site.rewritten:
        return f"SDPA: {site.reason}", False
    rows = [row for table in tables.known(tables.gpu_name(device)) for row in lines(table)]
    if not (rows or config.calibrate):
        missing = f"nothing was measured on this device, of {site.recipe} or another recipe"
        return f"SDPA: {missing} (`python -m sage_inductor tune` measures it)", False
    more = "; what is not in this list is measured when it first compiles" * config.calibrate
    what = f"what is predicted to be faster, else SDPA{more}"
    return what + "".join(f"\n    {row}" for row in rows), True
