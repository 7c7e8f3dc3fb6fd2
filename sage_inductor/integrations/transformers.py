"""The attention implementation "sage" of transformers, or "sage_inductor".

Masks arrive as SDPA's do (True: visible). Calls that `attention` has no argument for go to
transformers' own "sdpa": dropout, position biases, a paged cache, and in eager a single query,
where quantizing k and v costs more than attention does.

Shapes: B batch, H_q and H_kv heads, N_q and N_kv sequence, D head_dim (D_v of v).
"""

import torch
from torch import Tensor, nn

from sage_inductor.functional import attention

NAMES = "sage", "sage_inductor"  # its own, and what other libraries call ours
SDPAS = ("position_bias", "cache", "output_attentions")  # arguments that "sdpa" has an answer to
REFUSED = ("softcap", "s_aux", "sinks", "block_indices")  # and those that SDPA cannot compute


def register_implementation() -> None:
    """Add the implementation. Raises ImportError as `sage_inductor.register` says."""
    import transformers  # without it: ModuleNotFoundError: No module named 'transformers'

    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.integrations.sdpa_attention import (  # noqa: F401  (for when it is called)
            repeat_kv,
            sdpa_attention_forward,
            use_gqa_in_sdpa,
        )
        from transformers.masking_utils import sdpa_mask

        for name in NAMES:
            AttentionInterface.register(name, sage_attention_forward)
            AttentionMaskInterface.register(name, sdpa_mask)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"sage_inductor has no attention implementation for transformers "
            f"{transformers.__version__} (5.23 is known to work): use "
            f'torch.compile(..., backend="sage"), which needs none ({error})'
        ) from error


def sage_attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None,
    **kwargs,
) -> tuple[Tensor, None]:  # fmt: skip
    """query [B, H_q, N_q, D], key and value [B, H_kv, N_kv, D] and [.., D_v] -> out
    [B, N_q, H_q, D_v]. Heads of k and v are repeated where transformers repeats them for SDPA,
    whose masked kernels take no fewer than q's."""
    from transformers.integrations.sdpa_attention import (
        repeat_kv,
        sdpa_attention_forward,
        use_gqa_in_sdpa,
    )

    given = {name for name, value in kwargs.items() if value is not None and value is not False}
    if refused := given.intersection(REFUSED):
        raise ValueError(f'attention "sage" does not support {", ".join(refused)}: use "eager"')
    one_query = not torch.compiler.is_compiling() and query.shape[2] == 1
    if dropout or one_query or given.intersection(SDPAS):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling,
            is_causal=is_causal, **kwargs,
        )  # fmt: skip
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    N_q = query.shape[2]
    # In this order: `N_q > 1` of a dynamic N_q is no bool.
    is_causal = N_q > 1 and attention_mask is None and is_causal
    if is_causal and key.shape[2] > N_q:  # a prefill into an empty static cache: the rest is unset
        key, value = key[:, :, :N_q], value[:, :, :N_q]
    groups = getattr(module, "num_key_value_groups", 1)
    grouped = False
    if groups > 1 and use_gqa_in_sdpa(attention_mask, key, value):
        grouped = True  # of dynamic head_dims the answer is a SymBool, which SDPA does not take
    if groups > 1 and not grouped:
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    out = attention(
        query, key, value, attention_mask, is_causal=is_causal, scale=scaling, enable_gqa=grouped
    )
    return out.transpose(1, 2).contiguous(), None
