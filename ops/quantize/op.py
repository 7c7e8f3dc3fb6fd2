"""What is made of k and v before q is looked at: on CUDA by kernels, on CPU by their oracles."""

from collections.abc import Callable

import torch
from torch import Tensor

from sage_inductor.ops import gpus
from sage_inductor.ops.formats import Prepared
from sage_inductor.ops.launch import run
from sage_inductor.ops.layout import ordered
from sage_inductor.ops.quantize.keys import empty_k, launch_k
from sage_inductor.ops.quantize.nvfp4 import empty_nvfp4, launch_nvfp4
from sage_inductor.ops.quantize.one_pass import launch_kv, overlaps
from sage_inductor.ops.quantize.smooth import launch_estimate, launch_smooth
from sage_inductor.ops.quantize.tail import launch_means, launch_tail
from sage_inductor.ops.quantize.values import empty_v, launch_v
from sage_inductor.ops.recipe import Recipe, decode
from sage_inductor.ops.reference import quantize as reference
from sage_inductor.ops.register import emulated, launched_by


@launched_by(lambda run, _gpu, x, perm=None: launch_smooth([x], None, 1, run, perm))
def smooth(x: Tensor, perm: Tensor | None = None) -> list[Tensor]:
    """The mean of x [B, H, N, D] over its rows and max |x - mean|, each [B, H, D] in fp32. perm: in
    which order they are added up (layout.py)."""
    return [*reference.smooth(ordered(x, perm))]


@launched_by(
    lambda run, gpu, k, v, visible, recipe, *order: launch_prepare(
        run, gpu, k, v, visible, decode(recipe), None, *order
    ).tensors(),
    lambda k, v, _, recipe, *order: empty_kv(k, v, recipe, *order).tensors(),
)
def quantize_kv(
    k: Tensor, v: Tensor, visible: Tensor | None, recipe: str, perm: Tensor | None = None,
    spans: Tensor | None = None, documents: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """`launch_prepare`: Prepared.tensors()."""
    order = perm, spans, documents
    return reference.quantize_kv(k, v, visible, decode(recipe), None, *order).tensors()


def launch_prepare(
    run: Callable, gpu: torch.device | gpus.Gpu, k: Tensor, v: Tensor, visible: Tensor | None,
    recipe: Recipe, tail_block: int | None = None, perm: Tensor | None = None,
    spans: Tensor | None = None, documents: Tensor | None = None,
) -> Prepared:  # fmt: skip
    """k [B, H, N, D] and, where the recipe quantizes it, v [B, H, N, D_v], any strides. Rows that
    are not `visible` (uint8 [B or 1, H or 1, N]; None: all are) have no part in statistics and
    scales, and saturate. With a tail_block, for which visible must be given, of means, too. perm:
    the order of what is made, and of visible (layout.py), in which a v of 16 bits is already; 4 x 4
    bits have none. spans, documents: documents.py's, for recipes of one pass with an 8-bit v, of
    which all rows are visible."""
    means, quantizes_v = None, recipe.of_pv.dtype is not None
    if tail_block is not None:
        means = launch_means(k, v, visible, recipe, tail_block, run, perm)
    if recipe.sharing.one_pass:
        how = overlaps(gpu), means, perm, (spans, documents)
        prepared = launch_kv(k, v if quantizes_v else None, visible, recipe, run, *how)
    else:
        prepared = _in_passes(k, v, visible, recipe, run, perm)
    return prepared if means is None else launch_tail(prepared, means, recipe, run)


def _in_passes(
    k: Tensor, v: Tensor, visible: Tensor | None, recipe: Recipe, run: Callable,
    perm: Tensor | None,
) -> Prepared:  # fmt: skip
    quantizes_v, saturate = recipe.of_pv.dtype is not None, visible is not None
    if recipe.of_pv.block_scaled:
        (k_mean, k_amax), (v_mean, v_amax) = (launch_smooth([x], visible, 1, run) for x in (k, v))
        k_codes, k_blocks, k_scale = launch_nvfp4(k, k_mean, k_amax, False, saturate, run)
        v_codes, v_blocks, v_scale = launch_nvfp4(v, v_mean, v_amax, True, saturate, run)
        return Prepared(k_codes, k_scale, k_mean, v_codes, v_scale, v_mean, k_blocks, v_blocks)
    together = quantizes_v and v.shape[3] == k.shape[3]
    k_mean, _, *of_v = launch_smooth([k, v] if together else [k], visible, 1, run, perm)
    of_k = *launch_k(k, k_mean, recipe, visible, run, perm=perm), k_mean
    if not quantizes_v:
        return Prepared(*of_k)
    v_mean, v_amax = of_v or launch_smooth([v], visible, 0, run, perm)
    return Prepared(*of_k, *launch_v(v, v_mean, v_amax, recipe, saturate, run, perm), v_mean)


def empty_kv(
    k: Tensor, v: Tensor, recipe: str, perm: Tensor | None = None, spans: Tensor | None = None,
    documents: Tensor | None = None,
) -> Prepared:  # fmt: skip
    """Memory for what is made of k and v."""
    r, (B, H, _, D) = decode(recipe), k.shape
    k_mean = k.new_empty((B if spans is None else spans.shape[0], H, D), dtype=torch.float32)
    if r.of_pv.block_scaled:
        (k_codes, k_blocks, k_scale), (v_codes, v_blocks, v_scale) = (
            empty_nvfp4(x, along_n) for x, along_n in ((k, False), (v, True))
        )
        of_v = v_codes, v_scale, torch.empty_like(v_scale)
        return Prepared(k_codes, k_scale, k_mean, *of_v, k_blocks, v_blocks)
    of_k = *empty_k(k, r, perm), k_mean
    if r.of_pv.dtype is None:
        return Prepared(*of_k)
    codes, v_scale = empty_v(v, r.of_pv, perm, spans)
    return Prepared(*of_k, codes, v_scale, torch.empty_like(v_scale))


# -- its parts, for k and v that come in pieces (gather.py) ----


def estimate(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """k_mean, v_mean and v_amax as `quantize_kv` estimates them in one pass."""
    if emulated(k):
        return reference.estimate(k)[0], *reference.estimate(v)
    k_mean, _, v_mean, v_amax, _ = launch_estimate([k, v], None, run)
    return k_mean, v_mean, v_amax


def quantize_k(k: Tensor, k_mean: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """`launch_k`: codes and scales of k."""
    of = k, k_mean, recipe, None
    return reference.quantize_k(*of) if emulated(k) else launch_k(*of, run)


def quantize_v(v: Tensor, v_mean: Tensor, v_amax: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """`launch_v`: codes and scales of v."""
    of = v, v_mean, v_amax, recipe, False
    return reference.quantize_v(*of) if emulated(v) else launch_v(*of, run)
