"""``sage::attention`` and ``sage::attention_opaque``: attention over what was made of k and v."""

from torch import Tensor
from torch.library import triton_op

from sage_inductor.ops.attention import tiles
from sage_inductor.ops.attention.arguments import AttentionCall, schema_of
from sage_inductor.ops.attention.select import Problem, select
from sage_inductor.ops.launch import define_opaque


def _run(a: AttentionCall, portable: bool) -> tuple[Tensor, Tensor]:
    capability = None if a.q.device.type == "cpu" else tiles.capability(a.q.device)
    masked = a.attn_mask is not None
    kernel, tile = select(Problem(capability, a.decoded, a.head_dim, masked, portable))
    return kernel.launch(a, tile)


def _attention(a: AttentionCall) -> tuple[Tensor, Tensor]:
    """Attention over quantized k, with v quantized or as it is (16-bit). Exportable.

    Arguments: AttentionCall's. The tile_summary is `Visibility.of`'s for this device's BLOCK_M.
    Returns out [B, H_q, N_q, D_v] of q's dtype, lse [B, H_q, N_q] fp32: natural log, over the keys
    as they were quantized (the caller knows what smoothing took off).
    """
    return _run(a, portable=True)


def _attention_opaque(a: AttentionCall) -> tuple[Tensor, Tensor]:
    """`attention` by the fastest kernel of a device whose tiles ask for what Inductor cannot pass
    on. Opaque to Inductor, so it does not export."""
    return _run(a, portable=False)


OUTPUTS = tuple[Tensor, Tensor]
attention = triton_op(
    "sage::attention", schema_of(AttentionCall, OUTPUTS, _attention), mutates_args=()
)
attention_opaque = define_opaque(
    "attention_opaque",
    schema_of(AttentionCall, OUTPUTS, _attention_opaque),
    schema_of(AttentionCall, OUTPUTS, AttentionCall.empty_outputs),
)
