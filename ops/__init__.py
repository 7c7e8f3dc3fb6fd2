"""What a sage op means, and its kernels. Importing this package registers ``torch.ops.sage``."""

from sage_inductor.ops import compat  # noqa: F401  (first: it says what is missing)
from sage_inductor.ops.attention.select import attention, attention_opaque
from sage_inductor.ops.gather import gather_sdpa
from sage_inductor.ops.lse import exact_lse, with_sink
from sage_inductor.ops.quantize.op import (
    quantize_k,
    quantize_kv,
    quantize_kv_opaque,
    quantize_nvfp4,
    quantize_v,
    smooth,
)
from sage_inductor.ops.sdpa import prepare_kv, sdpa
from sage_inductor.ops.selector import select_blocks
from sage_inductor.ops.training.rowscaled import rowscaled, rowscaled_backward
from sage_inductor.ops.training.sagebwd import sagebwd, sagebwd_backward

if compat.register_sharding is not None:
    from sage_inductor.ops import sharding  # noqa: F401  (registers)

__all__ = [
    "attention",
    "attention_opaque",
    "exact_lse",
    "gather_sdpa",
    "prepare_kv",
    "quantize_k",
    "quantize_kv",
    "quantize_kv_opaque",
    "quantize_nvfp4",
    "quantize_v",
    "rowscaled",
    "rowscaled_backward",
    "sagebwd",
    "sagebwd_backward",
    "sdpa",
    "select_blocks",
    "smooth",
    "with_sink",
]
