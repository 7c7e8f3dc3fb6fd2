"""The attention function "sage_inductor" of ComfyUI, and what a node sets on one of its models.

ComfyUI calls ``function(q, k, v, heads, mask, ...)``. A model's transformer_options may hold one
override, which is called with that function in front. A call goes on to the override that was there
before, else to the function, where

    low_precision_attention=False, attn_precision=float32     its model asks for exact attention
    the stage in force is `exact`                             a node's user does (`by_percent`)
    the policy, a limit or predicted times say so             SDPA would compute it

While torch.compile traces it, only the first are known: the other calls become
``sage_inductor.attention``, and whoever compiles them decides.

Run in ComfyUI 0.33.0, 0.18.1, 0.8.0, 0.3.68 on a CPU, emulated (tests/front/test_comfyui_nodes.py).

Shapes: B batch, H_q and H_kv heads, N_q and N_kv sequence, D head_dim (D_v of v).
"""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from sage_inductor import stages
from sage_inductor.functional import attention, quantized
from sage_inductor.names import AUTO

# Not "sage": so ComfyUI calls SageAttention where that is installed, and it keeps the first.
NAME = "sage_inductor"
_log = logging.getLogger("sage_inductor")


def register() -> None:
    """Add the function. Raises ImportError as `sage_inductor.register` says."""
    try:
        from comfy.ldm.modules import attention as comfy

        registered, add = comfy.get_attention_function, comfy.register_attention_function
        comfy.attention_pytorch  # noqa: B018  (for when it is called)
        ours = comfy.wrap_attn(sage_attention)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            "sage_inductor has no attention function for this ComfyUI: "
            "comfy.ldm.modules.attention must be importable, as it is in a file of custom_nodes, "
            "and have register_attention_function, get_attention_function, wrap_attn and "
            f'attention_pytorch; torch.compile(..., backend="sage") needs none ({error})'
        ) from error
    there = registered(NAME, None)
    if there is None:
        add(NAME, ours)
    elif getattr(there, "__wrapped__", None) is not sage_attention:
        _log.warning("ComfyUI has another attention function %r, and keeps it", NAME)


def sage_attention(*args, **kwargs) -> Tensor:
    """ComfyUI's attention function, of the arguments of `_attend`; what that leaves is
    attention_pytorch's."""
    out = _attend(*args, **kwargs)
    if out is None:
        from comfy.ldm.modules.attention import attention_pytorch

        return attention_pytorch(*args, **kwargs)
    return out


def override(
    previous: Callable | None = None, recipe: str = AUTO, exact: str | None = None
) -> Callable:
    """A value for transformer_options["optimized_attention_override"]. previous: the one that was
    there. recipe: as `sage_inductor.attention` takes it. exact: a stage whose calls are left."""

    def sage_override(function, *args, **kwargs):
        out = _attend(*args, recipe=recipe, exact=exact, **kwargs)
        if out is not None:
            return out
        if previous is not None:
            return previous(function, *args, **kwargs)
        return function(*args, **kwargs)

    return sage_override


def by_percent(**ranges: tuple[float, float]) -> Callable:
    """A wrapper for ModelPatcher.add_wrapper_with_key("apply_model", ...): each step of a sampler
    runs in a stage by its place in the denoising, which goes from 0 to 1.

    edge=(0.1, 0.9): steps before 0.1 or after 0.9 are in the stage "edge", the others in none. With
    several stages, the first that claims a step has it. Each call of the model waits for the GPU
    once, to read sigma.

    Raises ValueError unless 0 <= start <= end <= 1.
    """
    for name, (start, end) in ranges.items():
        if not 0 <= start <= end <= 1:
            raise ValueError(
                f"{name}: the range must start at or before its end, and both must be in 0 .. 1, "
                f"got start {start} and end {end}"
            )

    def in_stage(executor, x: Tensor, t: Tensor, *args, **kwargs):
        sigma = t.flatten()[0].cpu()  # compared in its dtype, in which a bound of 0.9 is 0.9
        # Read at each step: a ModelSampling node may come after ours.
        at = executor.class_obj.model_sampling.percent_to_sigma
        names = (
            name for name, (start, end) in ranges.items()
            # A flow starts at the sigma of 0, so a range that ends at 0 is known by its end alone.
            if end <= 0 or (start > 0 and sigma > at(start)) or (end < 1 and sigma < at(end))
        )  # fmt: skip
        with stages.stage(next(names, None)):
            return executor(x, t, *args, **kwargs)

    return in_stage


def _attend(  # noqa: PLR0913  (ComfyUI's)
    q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Tensor | None = None,
    attn_precision: torch.dtype | None = None, skip_reshape: bool = False,
    skip_output_reshape: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    low_precision_attention: bool = True, transformer_options: dict | None = None,
    recipe: str = AUTO, exact: str | None = None, **_,
) -> Tensor | None:  # fmt: skip
    """q [B, N_q, H_q * D], k and v [B, N_kv, H_kv * D], with skip_reshape [B, H, N, D] each
    -> [B, N_q, H_q * D_v], with skip_output_reshape [B, H_q, N_q, D_v]. mask: [N_q, N_kv],
    [B, N_q, N_kv] or SDPA's. None: the call is left to another."""
    if low_precision_attention is False or attn_precision == torch.float32:
        return None
    tracing = torch.compiler.is_compiling()
    if not tracing and exact is not None and stages.current() == exact:
        return None
    if not skip_reshape:
        D = q.shape[-1] // heads
        H_kv = k.shape[-1] // D if enable_gqa else heads
        # -> [B, H, N, D], as ComfyUI does it: v of SD3 and CogVideoX is [B, N, H, D].
        each = (q, heads), (k, H_kv), (v, H_kv)
        q, k, v = (x.reshape(len(x), -1, H, D).transpose(1, 2) for x, H in each)
    if mask is not None and mask.ndim < 4:
        mask = mask.reshape(-1, 1, *mask.shape[-2:])
    if tracing:
        out = attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa, recipe=recipe)
    else:
        module = _module(transformer_options or {})
        out = quantized(q, k, v, mask, scale, enable_gqa, recipe=recipe, module=module)
    if out is None or skip_output_reshape:
        return out
    return out.transpose(1, 2).flatten(2)


def _module(options: dict) -> str:
    """The path by which rules of a policy know the block that calls: "double.3" of a transformer,
    "input.4.0" of a UNet, "" outside of blocks."""
    if "block_index" not in options:
        return ""
    where = options.get("block") or (options.get("block_type", "block"),)
    return ".".join(map(str, (*where, options["block_index"])))
