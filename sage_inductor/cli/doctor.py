"""``python -m sage_inductor doctor``: what is installed, whether each recipe runs on each device,
and what the policy chooses there."""

import platform

import torch
import torch.nn.functional as F
import triton

from sage_inductor import cost
from sage_inductor.backend import explain
from sage_inductor.decide import auto_recipes
from sage_inductor.diagnose import compare
from sage_inductor.ops import recipe as recipes
from sage_inductor.ops.attention import tiles
from sage_inductor.ops.formats import HEAD_DIMS
from sage_inductor.ops.reference.exact import attention_exact

# Relative L1 error on normal inputs from which a kernel is wrong, not inaccurate, by Recipe.qk:
# 8-bit p and v cost 0.04, 4 bits 0.2; a wrong scale or a missed tile several times this.
WRONG = {"int8": 0.1, "fp8": 0.1, "int4": 0.5, "nvfp4": 0.4}


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
    print(f"  {'recipe':20}{'head_dim':10}{'kind':8}relative L1 error to exact attention")
    for name, recipe in recipes.NAMED.items():
        for head_dim in HEAD_DIMS:
            for kind in ("full", "causal", "mask"):
                verdict, runs = _probe(device, recipe, head_dim, kind)
                print(f"  {name:20}{head_dim:<10}{kind:8}{verdict}")
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
            q, k, v, padding, [], None, right, False, scale, recipe.encode(), None, True, False
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
            (site,) = explain(attention, *inputs)
            return f"SDPA: {site.reason}"
        (site,) = explain(attention, *inputs, options={"sage.force": True})
    if not site.rewritten:
        return f"SDPA: {site.reason}"
    rows = crossovers(cost.gpu_name(device), tiles.capability(device))
    if not rows:
        missing = f"no length was measured from which {site.recipe} is faster on this device"
        return f"SDPA: {missing} (`python -m sage_inductor tune` measures it)"
    return "what was measured to be faster, else SDPA" + "".join(f"\n    {row}" for row in rows)


def crossovers(gpu: str, capability: tuple[int, int]) -> list[str]:
    """From where "auto" chooses a recipe, a line for each kind of call."""
    rows = []
    for head_dim in range(1, HEAD_DIMS[-1] + 1):
        for kind in cost.KINDS:
            for recipe in auto_recipes(capability, head_dim, kind, portable=False):
                found = cost.crossover(gpu, recipe, head_dim, kind)
                lengths = ", ".join(f"N={n} with B*H >= {heads}" for heads, n in reversed(found))
                if lengths:
                    rows.append(f"head_dim {head_dim}, {kind}: {recipe} from {lengths}")
    return rows
