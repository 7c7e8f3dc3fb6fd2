"""The attention backend "sage_inductor" of diffusers.

diffusers' backends are the members of an enum, AttentionBackendName, each with a function in
_AttentionBackendRegistry. It has no call that adds a name from outside, so the member is made here.

Shapes: B batch, N_q and N_kv sequence, H_q and H_kv heads, D head_dim (D_v of v).
"""

import functools

import torch.nn.functional as F
from torch import Tensor

from sage_inductor.functional import attention

NAME = "sage_inductor"


@functools.cache
def register_backend() -> None:
    """Add the backend. Raises ImportError as `sage_inductor.register` says."""
    import diffusers  # without it: ModuleNotFoundError: No module named 'diffusers'

    try:
        from diffusers.models import attention_dispatch as dispatch

        names, registry = dispatch.AttentionBackendName, dispatch._AttentionBackendRegistry
        constraints = [dispatch._check_device, dispatch._check_shape]
        member = str.__new__(names, NAME)
        member._name_, member._value_ = NAME.upper(), NAME
        registry.register(member, constraints=constraints)(sage_attention)
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
    [B, H_q, N_q] in fp32. A mask may be [B, N_kv] too. Dropout is SDPA's."""
    if _parallel_config is not None:
        raise ValueError("attention backend sage_inductor: context parallelism is not supported")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))  # [B, H, N, D]
    if attn_mask is not None and attn_mask.shape == (q.shape[0], k.shape[2]):
        attn_mask = attn_mask[:, None, None]  # as diffusers' own backend reads it
    given = dict(attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    if dropout_p:
        if return_lse:
            raise ValueError("attention backend sage_inductor: no lse of dropout is known")
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, **given).transpose(1, 2)
    found = attention(q, k, v, **given, return_lse=return_lse)
    if isinstance(found, Tensor):
        return found.transpose(1, 2)
    out, lse = found
    return out.transpose(1, 2), lse
