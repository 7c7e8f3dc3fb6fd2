"""The attention backend "sage_inductor" of diffusers.

diffusers' backends are the members of an enum, AttentionBackendName, each with a function in
_AttentionBackendRegistry. It has no call that adds a name from outside, so the member is made here.

Under diffusers' context parallelism each rank has some rows of the sequence:

    ring_degree       `gather_attention`, in one call for the keys of all ranks
    ulysses_degree    diffusers exchanges rows for heads, and attention is local
    both              rows are exchanged for heads within, and keys gathered across

Shapes: B batch, N_q and N_kv sequence, H_q and H_kv heads, D head_dim (D_v of v).
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_inductor.functional import attention
from sage_inductor.options import config
from sage_inductor.parallel import gather_attention

NAME = "sage_inductor"


@functools.cache
def register() -> None:
    """Add the backend. Raises ImportError as `sage_inductor.register` says."""
    import diffusers  # without it: ModuleNotFoundError: No module named 'diffusers'

    try:
        from diffusers.models import attention_dispatch as dispatch

        names, registry = dispatch.AttentionBackendName, dispatch._AttentionBackendRegistry
        constraints = [dispatch._check_device, dispatch._check_shape]
        member = str.__new__(names, NAME)
        member._name_, member._value_ = NAME.upper(), NAME
        registry.register(member, constraints=constraints, supports_context_parallel=True)(
            sage_attention
        )
        # What Enum does for the members of its class body.
        names._member_map_[member.name] = names._value2member_map_[NAME] = member
        names._member_names_.append(member.name)
    except (ImportError, AttributeError, TypeError) as error:
        raise ImportError(
            f"sage_inductor has no attention backend for diffusers {diffusers.__version__} (0.42 "
            'is known to work): use torch.compile(..., backend="sage"), which needs none '
            f"({error})"
        ) from error


def sage_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, return_lse: bool = False, _parallel_config: object = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """``sage_inductor.attention`` in diffusers' order: query [B, N_q, H_q, D], key and value
    [B, N_kv, H_kv, D] and [.., D_v] -> out [B, N_q, H_q, D_v], with return_lse also lse
    [B, H_q, N_q] in fp32. A mask may be [B, N_kv] too. Dropout is SDPA's. Under context parallelism
    N_q and N_kv are this rank's, and the keys are those of all ranks.

    Raises ValueError, before ranks meet, for what context parallelism does not compute."""
    if _parallel_config is not None:
        given = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal,
                 "enable_gqa": enable_gqa, "return_lse": return_lse}  # fmt: skip
        return _over_devices(query, key, value, scale, _parallel_config, given)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))  # [B, H, N, D]
    if attn_mask is not None and attn_mask.shape == (q.shape[0], k.shape[2]):
        attn_mask = attn_mask[:, None, None]  # as diffusers' own backend reads it
    given: dict[str, Any] = dict(
        attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )
    if dropout_p:
        if return_lse:
            raise ValueError("attention backend sage_inductor: no lse of dropout is known")
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, **given).transpose(1, 2)
    found = attention(q, k, v, **given, return_lse=return_lse)
    if isinstance(found, Tensor):
        return found.transpose(1, 2)
    out, lse = found
    return out.transpose(1, 2), lse


# -- over several devices ----


def _over_devices(q: Tensor, k: Tensor, v: Tensor, scale, parallel_config, given: dict) -> Tensor:
    """Attention of q [B, N_q, H_q, D] over the k and v of all ranks of diffusers' ParallelConfig;
    given: the other arguments of `sage_attention`."""
    from diffusers.models import attention_dispatch as dispatch

    parallel, mask = parallel_config.context_parallel_config, given.pop("attn_mask")
    refused = [name for name, value in given.items() if value]
    if parallel.ring_degree > 1 and mask is not None:
        refused.append("attn_mask")
    if refused:
        raise ValueError(
            "attention backend sage_inductor: context parallelism does not support "
            + ", ".join(refused)
        )
    if parallel.ring_degree == 1:
        grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        return dispatch._templated_context_parallel_attention(
            q, k, v, mask, scale=scale, _parallel_config=parallel_config,
            # In training attention is SDPA's.
            forward_op=dispatch._native_attention_forward_op if grad else _local,
            backward_op=dispatch._native_attention_backward_op,
        )  # fmt: skip
    exchanges, group = parallel.ulysses_degree > 1, parallel._ulysses_mesh.get_group()
    if exchanges:
        q, k, v = (dispatch.SeqAllToAllDim.apply(group, x, 2, 1) for x in (q, k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    lengths = "ask" if parallel.ring_anything else None
    out = gather_attention(
        q, k, v, parallel._ring_mesh.get_group(), scale=scale, recipe=_recipe(), lengths=lengths
    ).transpose(1, 2)
    return dispatch.SeqAllToAllDim.apply(group, out, 1, 2) if exchanges else out


def _local(ctx, q, k, v, mask, dropout_p, is_causal, scale, enable_gqa, return_lse, **_) -> Tensor:
    """diffusers' forward_op: between its exchanges."""
    return sage_attention(q, k, v, mask, scale=scale)


@torch.compiler.assume_constant_result
def _recipe() -> str:
    """The config's; `gather_attention` refuses what it does not compute with, and "off"."""
    return config.recipe
