"""The ops that prepare k and v. On CPU each is its oracle."""

import torch
from torch import Tensor

from sage_inductor.ops import gpus
from sage_inductor.ops.formats import Prepared
from sage_inductor.ops.launch import HAS_PDL, run
from sage_inductor.ops.quantize.keys import empty_k, launch_k
from sage_inductor.ops.quantize.nvfp4 import empty_nvfp4, launch_nvfp4
from sage_inductor.ops.quantize.one_pass import launch_kv
from sage_inductor.ops.quantize.smooth import launch_estimate, launch_smooth
from sage_inductor.ops.quantize.values import empty_v, launch_v
from sage_inductor.ops.recipe import decode
from sage_inductor.ops.reference import quantize as reference
from sage_inductor.ops.register import launched_by

Pair = tuple[Tensor, Tensor]


def _launch_smooth(run, _gpu, x, other, visible, keep=1) -> Pair:
    return launch_smooth([x] if other is None else [x, other], visible, keep, run)


@launched_by(_launch_smooth)
def smooth(x: Tensor, other: Tensor | None, visible: Tensor | None, keep: int = 1) -> Pair:
    """`launch_smooth`: mean and max |x - mean| of one or two tensors, over the sequence."""
    return reference.smooth([x] if other is None else [x, other], visible, keep)


def _launch_k(run, _gpu, k, k_mean, recipe, visible) -> Pair:
    return launch_k(k, k_mean, decode(recipe), visible, run)


@launched_by(_launch_k)
def quantize_k(k: Tensor, k_mean: Tensor, recipe: str, visible: Tensor | None) -> Pair:
    """`launch_k`: codes and scales of k."""
    return reference.quantize_k(k, k_mean, decode(recipe), visible)


def _launch_v(run, _gpu, v, v_mean, v_amax, recipe, saturate) -> Pair:
    return launch_v(v, v_mean, v_amax, decode(recipe), saturate, run)


@launched_by(_launch_v)
def quantize_v(v: Tensor, v_mean: Tensor, v_amax: Tensor, recipe: str, saturate: bool) -> Pair:
    """`launch_v`: codes and scales of v."""
    return reference.quantize_v(v, v_mean, v_amax, decode(recipe), saturate)


def _launch_kv(run, gpu, k, v, visible, recipe) -> list[Tensor]:
    pdl = HAS_PDL and gpus.capability(gpu) == (9, 0)  # never run on later ones
    return launch_kv(k, v, visible, decode(recipe), run, pdl).tensors()


@launched_by(_launch_kv, lambda k, v, _, recipe: empty_kv(k, v, recipe).tensors())
def quantize_kv(k: Tensor, v: Tensor | None, visible: Tensor | None, recipe: str) -> list[Tensor]:
    """`launch_kv`: all of the preparation in one pass, by estimated statistics. In a head where a
    row of v is beyond the estimated amax, v is scaled by the amax of all its rows."""
    return reference.quantize_kv(k, v, visible, decode(recipe)).tensors()


def _launch_nvfp4(run, _gpu, *given) -> tuple[Tensor, Tensor, Tensor]:
    return launch_nvfp4(*given, run)


@launched_by(_launch_nvfp4)
def quantize_nvfp4(
    x: Tensor, mean: Tensor, amax: Tensor, along_n: bool, saturate: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`launch_nvfp4`: codes, scales of blocks and scales of k or (along_n) v."""
    return reference.quantize_nvfp4(x, mean, amax, along_n, saturate)


def estimate(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """k_mean, v_mean and v_amax as `quantize_kv` estimates them."""
    if k.device.type == "cpu":
        return reference.estimate(k)[0], *reference.estimate(v)
    k_mean, _, v_mean, v_amax, _ = launch_estimate([k, v], None, run)
    return k_mean, v_mean, v_amax


def empty_kv(k: Tensor, v: Tensor | None, recipe: str) -> Prepared:
    """Memory for what is made of k and, unless it is None, v."""
    r, (B, H, _, D) = decode(recipe), k.shape
    k_mean = k.new_empty((B, H, D), dtype=torch.float32)
    if r.of_pv.block_scaled:
        (k_codes, k_blocks, k_scale), (v_codes, v_blocks, v_scale) = (
            empty_nvfp4(x, along_n) for x, along_n in ((k, False), (v, True))
        )
        of_v = v_codes, v_scale, torch.empty_like(v_scale)
        return Prepared(k_codes, k_scale, k_mean, *of_v, k_blocks, v_blocks)
    of_k = *empty_k(k, r), k_mean
    if v is None:
        return Prepared(*of_k)
    codes, v_scale = empty_v(v, r.of_pv)
    return Prepared(*of_k, codes, v_scale, torch.empty_like(v_scale))
