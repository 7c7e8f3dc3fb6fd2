"""The attention implementations "sage" (or "sage_inductor") and "sage_flash" of transformers.

Masks arrive as SDPA's do (True: visible). Calls that `attention` has no argument for go to
transformers' own "sdpa": dropout, position biases, a paged cache, and in eager a single query,
where quantizing k and v costs more than attention does.

Packed documents: a vision tower calls "sage" once for each, which breaks the graph, and a name with
"flash" once for all. transformers 5.23 takes it for a part of a model: "sage_packed" is for others.

Shapes: B batch, H_q and H_kv heads, N_q and N_kv sequence, D head_dim (D_v of v), S documents.
"""

from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from sage_inductor.functional import attention

NAMES = "sage", "sage_inductor"  # its own, and what other libraries call ours
PACKED = "sage_flash", "sage_packed"  # of a tower, and of a whole model
# Where varlen_attn has no such argument (torch 2.11), it takes fewer heads of k and v by itself.
GROUPED: Any = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
SDPAS = ("position_bias", "cache", "output_attentions")  # arguments that "sdpa" has an answer to
REFUSED = ("softcap", "s_aux", "sinks", "block_indices")  # and those that SDPA cannot compute


def register() -> None:
    """Add the implementation. Raises ImportError as `sage_inductor.register` says."""
    import transformers  # without it: ModuleNotFoundError: No module named 'transformers'

    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.integrations import sdpa_attention as theirs
        from transformers.masking_utils import sdpa_mask

        # For when it is called.
        theirs.repeat_kv, theirs.sdpa_attention_forward, theirs.use_gqa_in_sdpa  # noqa: B018
        for name in (*NAMES, *PACKED):
            forward = packed_attention_forward if name in PACKED else sage_attention_forward
            AttentionInterface.register(name, forward)
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
    from transformers.integrations import sdpa_attention as theirs

    given = {name for name, value in kwargs.items() if value is not None and value is not False}
    if refused := given.intersection(REFUSED):
        raise ValueError(f'attention "sage" does not support {", ".join(refused)}: use "eager"')
    one_query = not torch.compiler.is_compiling() and query.shape[2] == 1
    if dropout or one_query or given.intersection(SDPAS):
        return theirs.sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling,
            is_causal=is_causal, **kwargs,
        )  # fmt: skip
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    N_q = query.shape[2]
    # In this order: `N_q > 1` of a dynamic N_q is no bool.
    is_causal = N_q > 1 and attention_mask is None and is_causal
    if is_causal and key.shape[2] > N_q:  # a prefill into an empty static cache: the rest is unset
        key, value = key[:, :, :N_q], value[:, :, :N_q]
    groups, grouped = getattr(module, "num_key_value_groups", 1), False
    if groups > 1 and theirs.use_gqa_in_sdpa(attention_mask, key, value):
        grouped = True  # of dynamic head_dims the answer is a SymBool, which SDPA does not take
    elif groups > 1:
        key, value = theirs.repeat_kv(key, groups), theirs.repeat_kv(value, groups)
    out = attention(
        query, key, value, attention_mask, is_causal=is_causal, scale=scaling, enable_gqa=grouped
    )
    return out.transpose(1, 2).contiguous(), None


def packed_attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    cu_seq_lens_q: Tensor | None = None, **kwargs,
) -> tuple[Tensor, None]:  # fmt: skip
    """As `sage_attention_forward`, but exact where cu_seq_lens [S + 1] are given: rows cu[s] to
    cu[s + 1] of all batches together are document s. They say what is seen, and attention_mask is
    not read. Causal is the bottom right of each document."""
    if cu_seq_lens_q is None:
        return sage_attention_forward(module, query, key, value, attention_mask, **kwargs)
    given = {name: x for name, x in kwargs.items() if x is not None}
    if refused := [x for x in (*REFUSED, *SDPAS) if given.get(x, False) is not False]:
        raise ValueError(f"packed attention does not support {', '.join(refused)}")
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))  # [T, H, D]
    cu, width = (cu_seq_lens_q, given["cu_seq_lens_k"]), given.get("sliding_window", 0)
    scale, dropout = given.get("scaling"), given.get("dropout", 0.0)
    causal = given.get("is_causal", getattr(module, "is_causal", True))
    if q.is_cuda and q.dtype.itemsize == 2 and not dropout and q.shape[2] == v.shape[2]:
        longest, left = (given["max_length_q"], given["max_length_k"]), width - 1
        window = left, 0 if causal else left
        out: Any = varlen_attn(q, k, v, *cu, *longest, scale=scale, window_size=window, **GROUPED)
    else:
        (of_q, to_q), (of_k, to_k) = map(_places, cu, (q, k))
        ahead = to_q[:, None] - to_k  # [T_q, T_k]: from a query to a key
        seen = (of_q[:, None] == of_k) & (ahead <= 0 if causal else True)
        seen = seen & (ahead.abs() < width) if width else seen
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, seen, dropout, scale=scale, enable_gqa=True)
        out = out[0].transpose(0, 1)
    return out.unflatten(0, query.shape[::2]), None


def _places(cu: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The document of each row of x, and how far the document's end is."""
    row = torch.arange(x.shape[0], device=cu.device)
    document = torch.bucketize(row, cu, right=True)  # from 1 on
    return document, cu[document] - row
