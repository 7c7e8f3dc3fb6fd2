"""The ops that prepare k and v. On CPU each is its oracle."""

from collections.abc import Callable

import torch
from torch import Tensor

from sage_inductor.ops.formats import Prepared
from sage_inductor.ops.launch import HAS_PDL, launch_cached
from sage_inductor.ops.quantize.keys import empty_k, launch_k
from sage_inductor.ops.quantize.nvfp4 import empty_nvfp4, launch_nvfp4
from sage_inductor.ops.quantize.one_pass import launch_kv
from sage_inductor.ops.quantize.smooth import launch_estimate, launch_smooth
from sage_inductor.ops.quantize.values import empty_v, launch_v
from sage_inductor.ops.recipe import decode
from sage_inductor.ops.reference import quantize as reference
from sage_inductor.ops.register import opaque, triton_op


@triton_op
def smooth(xs: list[Tensor], visible: Tensor | None, keep: int = 1) -> tuple[Tensor, Tensor]:
    """`launch_smooth`: mean and max |x - mean| of one or two tensors, over the sequence."""
    return (reference.smooth if _on_cpu(xs[0]) else launch_smooth)(xs, visible, keep)


@triton_op
def quantize_k(
    k: Tensor, k_mean: Tensor, recipe: str, visible: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`launch_k`: codes and scales of k."""
    run = reference.quantize_k if _on_cpu(k) else launch_k
    return run(k, k_mean, decode(recipe), visible)


@triton_op
def quantize_v(
    v: Tensor, v_mean: Tensor, v_amax: Tensor, recipe: str, saturate: bool
) -> tuple[Tensor, Tensor]:
    """`launch_v`: codes and scales of v."""
    run = reference.quantize_v if _on_cpu(v) else launch_v
    return run(v, v_mean, v_amax, decode(recipe), saturate)


@triton_op
def quantize_kv(k: Tensor, v: Tensor | None, visible: Tensor | None, recipe: str) -> list[Tensor]:
    """`launch_kv`: all of the preparation in one pass, by estimated statistics. In a head where a
    row of v is beyond the estimated amax, v is scaled by the amax of all its rows."""
    run = reference.quantize_kv if _on_cpu(k) else launch_kv
    return run(k, v, visible, decode(recipe)).tensors()


def _quantize_kv_opaque(
    k: Tensor, v: Tensor | None, visible: Tensor | None, recipe: str
) -> list[Tensor]:
    """`quantize_kv`, opaque to Inductor, so it does not export. Nothing in these kernels could fuse
    with what is around them, and as one call of a graph they are traced and compiled in no time."""
    return launch_kv(k, v, visible, decode(recipe), launch_cached, HAS_PDL).tensors()


def launched(given: dict, run: Callable, _gpu) -> list[Tensor]:
    """What `quantize_kv_opaque` launches, of tensors on meta, by `run`."""
    given = given | {"recipe": decode(given["recipe"])}
    return launch_kv(**given, run=run, pdl=HAS_PDL).tensors()


quantize_kv_opaque = opaque(
    "quantize_kv_opaque",
    _quantize_kv_opaque,
    lambda k, v, visible, recipe: empty_kv(k, v, recipe).tensors(),
    launched,
)


def estimate(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """k_mean, v_mean and v_amax as `quantize_kv` estimates them."""
    if _on_cpu(k):
        return reference.estimate(k)[0], *reference.estimate(v)
    k_mean, _, v_mean, v_amax, _ = launch_estimate([k, v], None)
    return k_mean, v_mean, v_amax


@triton_op
def quantize_nvfp4(
    x: Tensor, mean: Tensor, amax: Tensor, along_n: bool, saturate: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`launch_nvfp4`: codes, scales of blocks and scales of k or (along_n) v."""
    run = reference.quantize_nvfp4 if _on_cpu(x) else launch_nvfp4
    return run(x, mean, amax, along_n, saturate)


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


def _on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu"
