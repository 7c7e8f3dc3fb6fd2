"""``sage::sdpa``: scaled dot-product attention with a recipe. What the pass puts into graphs.

    seen                   = summarize(attn_mask)                 what it hides, if there is one
    k_mean, v_mean, v_amax = smooth(k, v)
    k_8bit, k_scale        = quantize_k(k, k_mean)
    v_fp8, v_scale         = quantize_v(v, v_mean, v_amax)        (FP8 recipes)
    out, lse               = attention(q, k_8bit, ..., v_fp8, ...)
    lse                   += scale * q k_mean                     what smoothing k took off

In nvfp4 k and v are quantize_nvfp4's; and 4 bits have a smooth q:

    q_mean, delta          = smooth_q(q, k, k_mean)              which attention reads besides

Per row, one op, quantize_kv, takes the place of the middle three. Calls that share k and v can
share what is made of them alone: ``sage::prepare`` returns it.
Eager runs this composition; lowering/ hands it to Inductor. The gradient is exact attention's,
recomputed in the inputs' own precision.

A band (left, right, bottom_right): query i sees keys i - left .. i + right (None: no bound), with
i = 0 at the first key, or (bottom_right) the last query at the last key. SDPA's is_causal is
(None, 0, False).

Shapes: B batch, H_q and H_kv heads, N_q and N_kv sequence, D head_dim (D_v of v).
"""

import functools
import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_inductor.ops import mask, reference, tiles
from sage_inductor.ops import recipe as recipes
from sage_inductor.ops.attention import (
    attention,
    attention_opaque,
    empty_outputs,
    launch_fastest,
)
from sage_inductor.ops.launch import ahead, define_opaque, in_background
from sage_inductor.ops.nvfp4 import attention_nvfp4, quantize_nvfp4
from sage_inductor.ops.quantize import (
    empty_kv,
    launch_kv,
    quantize_k,
    quantize_kv,
    quantize_kv_opaque,
    quantize_v,
)
from sage_inductor.ops.reference import FP4_BLOCK, HEAD_DIMS, MAX_ROWS, PAD_N, pad_head_dim
from sage_inductor.ops.smooth import smooth, smooth_q


@torch.library.custom_op("sage::sdpa", mutates_args=())
def sdpa(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, prepared: list[Tensor],
    left: int | None, right: int | None, bottom_right: bool, scale: float, recipe: str,
    out_bnhd: bool, portable: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(scale * q k^T + mask) v, quantized as `recipe` says.

    q [B, H_q, N_q, D], k [B, H_kv, N_kv, D], v [B, H_kv, N_kv, D_v] of one dtype (fp16, bf16, fp32)
    and device, any strides; H_q a multiple of H_kv. attn_mask: bool (True: sees) or floating
    (added), two to four dimensions that broadcast to [B, H_q, N_q, N_kv], any strides; and a band:
    a query sees what both show. prepared: what `prepare_kv` gives for this k, v, attn_mask and
    recipe, or nothing. recipe: `Recipe.encode()`. out_bnhd: store out in [B, N, H, D] order.
    portable: only kernels that travel in an exported package.

    Returns out [B, H_q, N_q, D_v] and lse [B, H_q, N_q] (natural log, fp32, not differentiable). A
    row that sees no key is 0 and its lse -inf. Keys that no query sees may hold anything.
    Raises ValueError or TypeError saying what must hold and what was got.
    """
    check(q, k, v, attn_mask, prepared, left, right, scale, recipe)
    with torch.cuda.device_of(q):
        return compose(
            q, k, v, attn_mask, prepared, left, right, bottom_right, scale, recipe, out_bnhd,
            portable,
        )  # fmt: skip


@torch.library.custom_op("sage::prepare", mutates_args=())
def prepare_kv(
    k: Tensor, v: Tensor, attn_mask: Tensor | None, recipe: str, portable: bool
) -> list[Tensor]:
    """What `sdpa` makes of k and v before it looks at q, for calls that share them.

    Arguments: as `sdpa`'s. Returns `prepare`'s tensors, contiguous; none of them differentiable.
    """
    check(k, k, v, None, [], None, None, 0.0, recipe)
    with torch.cuda.device_of(k):
        prepared = compose_prepare(k, v, attn_mask, recipe, portable)
    # The means of k and v are parts of one tensor, which outputs of an op may not be.
    return [x.clone(memory_format=torch.contiguous_format) for x in prepared]


def check(q, k, v, attn_mask, prepared, left, right, scale: float, recipe: str) -> None:
    """Raise unless `sdpa` is defined for these arguments."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        _require(x.dim() == 4, f"{name} must be [B, H, N, D], got {x.dim()} dimensions")
        _require(x.dtype == q.dtype, f"{name} must have q's dtype {q.dtype}, got {x.dtype}")
        _require(x.device == q.device, f"{name} must be on q's device {q.device}, got {x.device}")
        N = x.shape[2]
        _require(1 <= N <= MAX_ROWS, f"{name} must have 1 to {MAX_ROWS} rows, got N={N}")
        D = x.shape[3]
        _require(1 <= D <= HEAD_DIMS[-1], f"head_dim must be 1..{HEAD_DIMS[-1]}, got {D}")
    valid = (torch.float16, torch.bfloat16, torch.float32)
    if q.dtype not in valid:
        raise TypeError(f"sage::sdpa: dtype must be one of {valid}, got {q.dtype}")
    _require(
        k.shape[:3] == v.shape[:3],
        f"k and v must have one batch, heads and length, got {_shape(k)} and {_shape(v)}",
    )
    _require(
        k.shape[0] == q.shape[0] and k.shape[3] == q.shape[3],
        f"k must have q's batch and head_dim, got q {_shape(q)} and k {_shape(k)}",
    )
    _require(
        q.shape[1] % k.shape[1] == 0,
        f"the heads of q must be a multiple of k's, got {q.shape[1]} and {k.shape[1]}",
    )
    if attn_mask is not None:
        if attn_mask.dtype != torch.bool and attn_mask.dtype not in valid:
            raise TypeError(f"sage::sdpa: attn_mask must be bool or {valid}, got {attn_mask.dtype}")
        _require(
            attn_mask.device == q.device,
            f"attn_mask must be on q's device {q.device}, got {attn_mask.device}",
        )
        full = (*q.shape[:3], k.shape[2])
        shape = (1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape)
        _require(
            2 <= attn_mask.dim() <= 4
            and all(m == 1 or m == n for m, n in zip(shape, full, strict=False)),
            f"attn_mask must broadcast to {list(full)}, got {_shape(attn_mask)}",
        )
    for name, bound in (("left", left), ("right", right)):
        _require(bound is None or bound >= 0, f"{name} must be None or at least 0, got {bound}")
    _require(math.isfinite(scale), f"scale must be finite, got {scale}")
    if prepared:
        n = {"16bit": 3, "fp8": 6, "nvfp4": 8}[recipes.decode(recipe).pv]
        _require(len(prepared) == n, f"prepared must be empty or {n} tensors, got {len(prepared)}")


def _require(holds, message: str) -> None:
    if not holds:
        raise ValueError(f"sage::sdpa: {message}")


def _shape(x: Tensor) -> list:
    return list(x.shape)


def compose(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, prepared: list[Tensor],
    left: int | None, right: int | None, bottom_right: bool, scale: float, recipe: str,
    out_bnhd: bool, portable: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`sdpa` in terms of the ops that do the work."""
    r = recipes.decode(recipe)
    op, attn_mask, seen = _kernel_and_mask(k, v, attn_mask, r, portable)
    opaque = op is attention_opaque
    quantized, k_mean = operands(v, prepared or prepare(k, v, seen, r, opaque))
    out, lse = op(
        q, *quantized, attn_mask, seen, left, right, bottom_right, scale, k.shape[2],
        r.granularity, out_bnhd, *of_q(q, k, k_mean, seen, r),
        **({"warpgroups": r.warpgroups} if opaque else {}),
    )  # fmt: skip
    correct = unsmoothed_lse_opaque if opaque else unsmoothed_lse
    return out, correct(lse, q, k_mean, scale)


def unsmoothed_lse(lse: Tensor, q: Tensor, k_mean: Tensor, scale: float) -> Tensor:
    """lse [B, H_q, N_q] of the keys as they were before k_mean [B, H_kv, D] was taken off them."""
    group = q.unflatten(1, (k_mean.shape[1], -1))  # [B, H_kv, H_q / H_kv, N_q, D]
    # In fp32, as k_mean.
    return lse + scale * (group * k_mean[:, :, None, None]).sum(-1).flatten(1, 2)


# Few read lse, and for the others 8 operations less are traced: of 24 layers' 20 s, 1.
unsmoothed_lse_opaque = define_opaque("unsmoothed_lse", unsmoothed_lse)
torch.library.register_fake("sage::unsmoothed_lse", lambda lse, *_: torch.empty_like(lse))


def compose_prepare(
    k: Tensor, v: Tensor, attn_mask: Tensor | None, recipe: str, portable: bool
) -> list[Tensor]:
    """`prepare_kv` in terms of the ops that do the work."""
    r = recipes.decode(recipe)
    op, _, seen = _kernel_and_mask(k, v, attn_mask, r, portable)
    return prepare(k, v, seen, r, op is attention_opaque)


def _kernel_and_mask(k, v, attn_mask, recipe: recipes.Recipe, portable: bool) -> tuple:
    """(the attention op, attn_mask in four dimensions, what its tiles of queries see of it)."""
    head_dim = max(int(k.shape[3]), int(v.shape[3]))
    op, block_m = kernel(k.device, recipe, head_dim, attn_mask is not None, portable)
    if attn_mask is None:
        return op, None, None
    attn_mask = mask.as_4d(attn_mask)
    return op, attn_mask, mask.summarize(attn_mask, k.shape[2], block_m)


def compile_ahead(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, prepared: list[Tensor],
    left: int | None, right: int | None, bottom_right: bool, scale: float, recipe: str,
    out_bnhd: bool, portable: bool,
) -> None:  # fmt: skip
    """Start to compile what the call (arguments as `sdpa`'s) will launch and Inductor does not
    compile, if its sizes are known and no mask is in the way."""
    r = recipes.decode(recipe)
    head_dim = max(int(q.shape[3]), int(v.shape[3]))
    op, _ = kernel(q.device, r, head_dim, attn_mask is not None, portable)
    likes = tuple((x.dtype, tuple(x.shape), tuple(x.stride())) for x in (q, k, v))
    known = all(isinstance(n, int) for _, *sizes in likes for n in itertools.chain(*sizes))
    if op is attention_opaque and r.granularity == "per_row" and attn_mask is None and known:
        band = left, right, bottom_right
        _compile_ahead(q.device, likes, bool(prepared), band, scale, recipe, out_bnhd)


@functools.cache  # started once
def _compile_ahead(device, likes, prepared: bool, band, scale, recipe: str, out_bnhd: bool) -> None:
    def compile():
        r = recipes.decode(recipe)
        q, k, v = (
            torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            for dtype, shape, stride in likes
        )
        with torch.cuda.device(device):
            of_v = v if r.pv == "fp8" else None
            shapes = empty_kv(k, of_v, r.qk, r.granularity)
            quantized, _ = operands(v, shapes)
            launch_fastest(
                ahead, device, q, *quantized, None, None, *band, scale, k.shape[2], r.granularity,
                out_bnhd, warpgroups=r.warpgroups,
            )  # fmt: skip
            if not prepared:
                launch_kv(k, of_v, None, r.qk, ahead, pdl=True)

    in_background(compile)


def prepare(
    k: Tensor, v: Tensor, seen: Tensor | None, recipe: recipes.Recipe, opaque: bool = False
) -> list[Tensor]:
    """[k_8bit, k_scale, k_mean], and with FP8 also v_fp8, v_scale, v_mean; in nvfp4 [k_fp4, k_e4m3,
    k_scale, k_mean, v_fp4, v_e4m3, v_scale, v_mean]. opaque: where torch need not look inside."""
    visible = None if seen is None else mask.visible_keys(seen, k.shape[1])
    if recipe.pv == "nvfp4":
        of_both = []
        for x, along_n in ((k, False), (v, True)):
            mean, amax = (y[0] for y in smooth([x], visible))
            of_both += [*quantize_nvfp4(x, mean, amax, along_n, visible is not None), mean]
        return of_both
    if recipe.granularity == "per_row":
        op = quantize_kv_opaque if opaque else quantize_kv
        return op(k, v if recipe.pv == "fp8" else None, visible, recipe.qk)
    if recipe.pv == "fp8" and v.shape[3] == k.shape[3]:
        mean, amax = smooth([k, v], visible)  # [2, B, H_kv, D]: one launch
        k_mean, v_mean, v_amax = mean[0], mean[1], amax[1]
    else:
        k_mean = smooth([k], visible)[0][0]
        if recipe.pv == "fp8":
            v_mean, v_amax = (x[0] for x in smooth([v], visible, keep=0))
    k_8bit, k_scale = quantize_k(k, k_mean, recipe.qk, recipe.granularity, visible)
    if recipe.pv != "fp8":
        return [k_8bit, k_scale, k_mean]
    v_fp8, v_scale = quantize_v(v, v_mean, v_amax, visible is not None)
    return [k_8bit, k_scale, k_mean, v_fp8, v_scale, v_mean]


def operands(v: Tensor, prepared: list[Tensor]) -> tuple[tuple, Tensor]:
    """(k_8bit, k_scale, v_fp8 or v in 16 bits, v_scale, v_mean), which `attention` reads, or what
    `attention_nvfp4` does, and k_mean, which lse is corrected by. Without FP8, v_scale and v_mean
    are fillers."""
    if len(prepared) == 8:  # nvfp4
        return (*prepared[:3], *prepared[4:]), prepared[3]
    k_8bit, k_scale, k_mean, *of_v = prepared
    if not of_v:
        of_v = v if v.dtype != torch.float32 else v.bfloat16(), k_mean, k_mean
    return (k_8bit, k_scale, *of_v), k_mean


def of_q(
    q: Tensor, k: Tensor, k_mean: Tensor, seen: Tensor | None, recipe: recipes.Recipe
) -> tuple[Tensor, ...]:
    """(q_mean, delta), which the attention op reads last, or nothing where q is not smoothed."""
    if not recipe.smooths_q:
        return ()
    return smooth_q(q, k, k_mean, None if seen is None else mask.visible_keys(seen, k.shape[1]))


def kernel(
    device: torch.device, recipe: recipes.Recipe, head_dim: int, masked: bool, portable: bool
):
    """The attention op that runs there, and its BLOCK_M."""
    nvfp4 = recipe.pv == "nvfp4"
    if device.type == "cpu":
        return attention_nvfp4 if nvfp4 else attention, 128
    tile = tiles.tile(tiles.capability(device), recipe.qk, recipe.pv, head_dim, masked)
    if nvfp4:
        return attention_nvfp4, tile.BLOCK_M
    return attention if portable or tile.maxnreg is None else attention_opaque, tile.BLOCK_M


def emulation(recipe: recipes.Recipe):
    """Of the op that `kernel` gives, what computes it in plain PyTorch."""
    return reference.attention_nvfp4 if recipe.pv == "nvfp4" else reference.attention


@sdpa.register_fake
def _(
    q, k, v, attn_mask, prepared, left, right, bottom_right, scale, recipe, out_bnhd, portable
):  # fmt: skip
    check(q, k, v, attn_mask, prepared, left, right, scale, recipe)
    return empty_outputs(q, v.shape[3], out_bnhd)


@prepare_kv.register_fake
def _(k, v, attn_mask, recipe, portable):
    check(k, k, v, None, [], None, None, 0.0, recipe)
    r, (B, H, N, D), D_v = recipes.decode(recipe), k.shape, v.shape[3]
    if r.pv == "nvfp4":
        N_pad = (N + PAD_N - 1) // PAD_N * PAD_N
        outputs = []
        for (rows, columns), scale, d in (
            ((N_pad, pad_head_dim(int(D))), (B, H), D),
            ((pad_head_dim(int(D_v)), N_pad), (B, H, D_v), D_v),
        ):
            outputs += [
                ((B, H, rows, columns // 2), torch.uint8),
                ((B, H, rows, columns // FP4_BLOCK), torch.uint8),
                (scale, torch.float32),
                ((B, H, d), torch.float32),
            ]
        return [k.new_empty(s, dtype=dtype) for s, dtype in outputs]
    return empty_kv(k, v if r.pv == "fp8" else None, r.qk, r.granularity)


def _save_inputs(ctx, inputs, output):
    q, k, v, attn_mask, prepared, *ctx.band, ctx.scale, _, _, _ = inputs
    ctx.prepared = len(prepared)
    ctx.save_for_backward(q, k, v, attn_mask)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad_out, _grad_lse):
    """Exact attention's gradient, by SDPA's own backward on a recomputed forward."""
    saved = [x if x is None else x.detach() for x in ctx.saved_tensors]
    q, k, v, attn_mask = saved
    needed = [i for i in range(4) if ctx.needs_input_grad[i]]
    for i in needed:
        saved[i].requires_grad_()
    # With a scale that is not positive, CPU's causal SDPA gives NaN (torch 2.13).
    is_causal = attn_mask is None and tuple(ctx.band) == (None, 0, False) and ctx.scale > 0
    with torch.enable_grad():
        if not is_causal and any(bound is not None for bound in ctx.band[:2]):
            if attn_mask is None or attn_mask.dtype == torch.bool:
                hidden = attn_mask is not None and ~attn_mask
                attn_mask = q.new_zeros(1).masked_fill(torch.as_tensor(hidden), -math.inf)
            shape = torch.broadcast_shapes(attn_mask.shape, (q.shape[2], k.shape[2]))
            attn_mask = reference.masked(attn_mask.expand(shape), None, *ctx.band)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=ctx.scale, enable_gqa=True
        )
    grads = torch.autograd.grad(out, [saved[i] for i in needed], grad_out)
    found = dict(zip(needed, grads, strict=True))
    return *(found.get(i) for i in range(4)), [None] * ctx.prepared, *(None,) * 7


sdpa.register_autograd(_backward, setup_context=_save_inputs)
prepare_kv.register_autograd(
    lambda ctx, _grads: (None,) * 5,  # of no use: no output has a gradient
    setup_context=lambda ctx, inputs, output: ctx.mark_non_differentiable(*output),
)


def _autocast(op: str, device_type: str):
    """SDPA's autocast rule: compute in autocast's dtype, whatever the inputs have."""
    key = getattr(torch._C.DispatchKey, f"Autocast{'CUDA' if device_type == 'cuda' else 'CPU'}")

    def cast(*args):
        dtype = torch.get_autocast_dtype(device_type)
        floating = (isinstance(x, Tensor) and x.is_floating_point() for x in args)
        args = [x.to(dtype) if f else x for x, f in zip(args, floating, strict=True)]
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            return getattr(torch.ops.sage, op)(*args)

    return cast


_library = torch.library.Library("sage", "FRAGMENT")
for _op in ("sdpa", "prepare"):
    _library.impl(_op, _autocast(_op, "cuda"), "AutocastCUDA")
    _library.impl(_op, _autocast(_op, "cpu"), "AutocastCPU")
