"""``sage::sdpa``: scaled dot-product attention with a recipe. What the pass puts into graphs.

    k_mean, v_mean, v_amax = smooth(k, v)
    k_int8, k_scale        = quantize_k(k, k_mean)
    v_fp8, v_scale         = quantize_v(v, v_mean, v_amax)        (FP8 recipes)
    out, lse               = attention(q, k_int8, ..., v_fp8, ...)
    lse                   += scale * q k_mean                     what smoothing k took off

Eager runs this composition; lowering/ hands it to Inductor. The gradient is exact attention's,
recomputed in the inputs' own precision.

Shapes: B batch, H_q and H_kv heads, N_q and N_kv sequence, D head_dim.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_inductor.ops import recipe as recipes
from sage_inductor.ops import tiles
from sage_inductor.ops.attention import attention, attention_capped, empty_outputs
from sage_inductor.ops.quantize import quantize_k, quantize_v
from sage_inductor.ops.reference import HEAD_DIMS
from sage_inductor.ops.smooth import smooth


@torch.library.custom_op("sage::sdpa", mutates_args=())
def sdpa(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, recipe: str,
    out_bnhd: bool, portable: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(scale * q k^T) v, quantized as `recipe` says.

    q [B, H_q, N_q, D], k and v [B, H_kv, N_kv, D] of one dtype (fp16 or bf16; on CPU fp32 too) and
    device, any strides; H_q a multiple of H_kv. is_causal: query i sees keys 0..i (SDPA's
    top-left convention). recipe: `Recipe.encode()`. out_bnhd: store out in [B, N, H, D] order.
    portable: only kernels that travel in an exported package.

    Returns out [B, H_q, N_q, D] and lse [B, H_q, N_q] (natural log, fp32, not differentiable).
    Raises ValueError or TypeError saying what must hold and what was got.
    """
    check(q, k, v, scale)
    with torch.cuda.device_of(q):
        return compose(q, k, v, is_causal, scale, recipe, out_bnhd, portable)


def check(q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
    """Raise unless `sdpa` is defined for these arguments."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        _require(x.dim() == 4, f"{name} must be [B, H, N, D], got {x.dim()} dimensions")
        _require(x.dtype == q.dtype, f"{name} must have q's dtype {q.dtype}, got {x.dtype}")
        _require(x.device == q.device, f"{name} must be on q's device {q.device}, got {x.device}")
        _require(x.shape[2] >= 1, f"{name} must have at least one row, got N=0")
    valid = (torch.float16, torch.bfloat16) + ((torch.float32,) if q.device.type == "cpu" else ())
    if q.dtype not in valid:
        raise TypeError(f"sage::sdpa: dtype must be one of {valid}, got {q.dtype}")
    D = q.shape[3]
    _require(1 <= D <= HEAD_DIMS[-1], f"head_dim must be 1..{HEAD_DIMS[-1]}, got {D}")
    _require(k.shape == v.shape, f"k and v must have one shape, got {_shape(k)} and {_shape(v)}")
    _require(
        k.shape[0] == q.shape[0] and k.shape[3] == D,
        f"k must have q's batch and head_dim, got q {_shape(q)} and k {_shape(k)}",
    )
    _require(
        q.shape[1] % k.shape[1] == 0,
        f"the heads of q must be a multiple of k's, got {q.shape[1]} and {k.shape[1]}",
    )
    _require(math.isfinite(scale), f"scale must be finite, got {scale}")


def _require(holds, message: str) -> None:
    if not holds:
        raise ValueError(f"sage::sdpa: {message}")


def _shape(x: Tensor) -> list:
    return list(x.shape)


def compose(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, recipe: str,
    out_bnhd: bool, portable: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`sdpa` in terms of the ops that do the work."""
    r = recipes.decode(recipe)
    fp8 = r.pv == "fp8"
    mean, amax = smooth([k, v] if fp8 else [k])  # [tensors, B, H_kv, D]
    k_mean = mean[0]
    k_int8, k_scale = quantize_k(k, k_mean, r.granularity)
    if fp8:
        v_mean = mean[1]
        v_hat, v_scale = quantize_v(v, v_mean, amax[1])
    else:
        v_hat, v_scale, v_mean = v, k_mean, k_mean  # the last two are not read
    out, lse = _attention(q, r.pv, portable)(
        q, k_int8, k_scale, v_hat, v_scale, v_mean, is_causal, scale, k.shape[2], r.granularity,
        out_bnhd,
    )  # fmt: skip
    group = q.unflatten(1, (k.shape[1], -1)).float()  # [B, H_kv, H_q / H_kv, N_q, D]
    return out, lse + scale * (group @ k_mean[:, :, None, :, None]).flatten(1, 2)[..., 0]


def _attention(q: Tensor, pv: str, portable: bool):
    if portable or q.device.type == "cpu":
        return attention
    tile = tiles.tile(tiles.capability(q.device), pv, q.shape[3])
    return attention if tile.maxnreg is None else attention_capped


@sdpa.register_fake
def _(q, k, v, is_causal, scale, recipe, out_bnhd, portable):
    check(q, k, v, scale)
    return empty_outputs(q, out_bnhd)


def _save_inputs(ctx, inputs, output):
    q, k, v, ctx.is_causal, ctx.scale, *_ = inputs
    ctx.save_for_backward(q, k, v)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad_out, _grad_lse):
    """Exact attention's gradient, by SDPA's own backward on a recomputed forward."""
    inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
    with torch.enable_grad():
        out = F.scaled_dot_product_attention(
            *inputs, is_causal=ctx.is_causal, scale=ctx.scale, enable_gqa=True
        )
    return *torch.autograd.grad(out, inputs, grad_out), None, None, None, None, None


sdpa.register_autograd(_backward, setup_context=_save_inputs)


def _autocast(device_type: str):
    """SDPA's autocast rule: compute in autocast's dtype, whatever the inputs have."""
    key = getattr(torch._C.DispatchKey, f"Autocast{'CUDA' if device_type == 'cuda' else 'CPU'}")

    def cast(q, k, v, *args):
        dtype = torch.get_autocast_dtype(device_type)
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            return torch.ops.sage.sdpa(q.to(dtype), k.to(dtype), v.to(dtype), *args)

    return cast


_library = torch.library.Library("sage", "FRAGMENT")
_library.impl("sdpa", _autocast("cuda"), "AutocastCUDA")
_library.impl("sdpa", _autocast("cpu"), "AutocastCPU")
