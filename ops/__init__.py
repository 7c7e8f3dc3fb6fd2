"""What a sage op means, and its kernels. Importing this package registers ``torch.ops.sage``."""

from sage_inductor.ops.attention import attention, attention_opaque
from sage_inductor.ops.nvfp4 import attention_nvfp4, quantize_nvfp4
from sage_inductor.ops.quantize import quantize_k, quantize_kv, quantize_kv_opaque, quantize_v
from sage_inductor.ops.sdpa import prepare_kv, sdpa
from sage_inductor.ops.smooth import smooth

__all__ = [
    "attention",
    "attention_nvfp4",
    "attention_opaque",
    "prepare_kv",
    "quantize_k",
    "quantize_kv",
    "quantize_kv_opaque",
    "quantize_nvfp4",
    "quantize_v",
    "sdpa",
    "smooth",
]
