"""What tests of several rooms share: inputs in the layout that models give them, calls, measures."""

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_inductor.ops import mask, nvfp4, reference
from sage_inductor.ops import recipe as recipes
from sage_inductor.ops.attention import _launch
from sage_inductor.ops.launch import traced
from sage_inductor.ops.sdpa import of_q, operands, prepare

# -- measures ----


def relative_l1(actual: Tensor, expected: Tensor) -> float:
    """sum |error| / sum |expected|, the papers' measure."""
    error = (actual.double() - expected.double()).abs().sum()
    return (error / expected.double().abs().sum()).item()


def relative_l2(actual: Tensor, expected: Tensor) -> float:
    """|error| / |expected|, in the Euclidean norm."""
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def cos_sim(actual: Tensor, expected: Tensor) -> float:
    return F.cosine_similarity(actual.double().flatten(), expected.double().flatten(), 0).item()


# -- inputs ----


def heads(B: int, H: int, N: int, D: int, dtype=torch.float32, device="cpu") -> Tensor:
    """Random [B, H, N, D], stored as [B, N, H, D]: what a projection's output is viewed as."""
    return torch.randn(B, N, H, D, device=device).to(dtype).transpose(1, 2)


def qkv(B=2, H_q=4, H_kv=2, N_q=65, N_kv=70, D=64, dtype=torch.float32, device="cpu"):
    """q, k with a bias in each channel, v with a mean: random normal inputs hide wrong smoothing
    and one-level accumulation."""
    k_bias = 4 * torch.randn(H_kv, 1, D, device=device).to(dtype)
    q, k, v = (
        heads(B, H, N, D, dtype, device) for H, N in ((H_q, N_q), (H_kv, N_kv), (H_kv, N_kv))
    )
    return q, k + k_bias, v + 3


# -- calls ----


def arguments(q, k, v, is_causal=False, scale=0.125, recipe="sage2-8b", **given) -> tuple:
    """The arguments of ``torch.ops.sage.sdpa`` in its schema's order, the rest as SDPA has it.
    recipe: a name, a Recipe or its string."""
    recipe = recipes.NAMED.get(recipe, recipe)
    recipe = recipe if isinstance(recipe, str) else recipe.encode()
    values = dict(
        q=q, k=k, v=v, attn_mask=None, prepared=[], left=None, right=0 if is_causal else None,
        bottom_right=False, scale=scale, recipe=recipe, warpgroups=None, out_bnhd=True,
        portable=False,
    )  # fmt: skip
    assert given.keys() <= values.keys(), given.keys()
    return tuple((values | given)[x.name] for x in torch.ops.sage.sdpa.default._schema.arguments)


def sdpa(*args, **kwargs) -> tuple[Tensor, Tensor]:
    return torch.ops.sage.sdpa(*arguments(*args, **kwargs))


def exactly(q, k, v, is_causal, scale, attn_mask=None, **band) -> tuple[Tensor, Tensor]:
    band = {"right": 0 if is_causal else None, **band}
    return reference.attention_exact(q, k, v, scale, attn_mask, **band)


# -- what the attention ops read ----


def kernel_inputs(q, k, v, recipe, seen=None, prepared=None) -> tuple[tuple, tuple]:
    """What the attention op of a recipe reads of k and v, after q, and of a smoothed q, at last:
    of what `prepared` holds, or the device's kernels (on CPU the reference) make of k and v."""
    r = recipes.NAMED[recipe] if isinstance(recipe, str) else recipe
    quantized, k_mean = operands(v, prepared or prepare(k, v, seen, r))
    return quantized, of_q(q, k, k_mean, seen, r)


def run_portable(
    q, k, v, recipe, tile, scale=0.1, attn_mask=None, band=(None, None, False), prepared=None,
    tma=False,
):  # fmt: skip
    """(out, lse) of the portable kernel of a recipe, and those of its emulation: of the same
    quantized k and v, lse that of the smoothed keys."""
    r = recipes.NAMED[recipe]
    seen = None if attn_mask is None else mask.summarize(attn_mask, k.shape[2], tile.BLOCK_M)
    quantized, means = kernel_inputs(q, k, v, r, seen, prepared)
    args = (q, *quantized, attn_mask, seen, *band, scale, k.shape[2])
    if r.pv == "nvfp4":
        found = nvfp4.launch(*args, True, *means, tile, native=False)
        return found, reference.attention_nvfp4(*args, r.granularity, tile.BLOCK_N, *means)
    means = means or (None, None)
    found = _launch(traced, *args, r.granularity, True, *means, tile, tma=tma)
    return found, reference.attention(*args, r.granularity, tile.BLOCK_N, *means)
