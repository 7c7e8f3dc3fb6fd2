"""What attention of few queries to a cache computes from: the arguments of ``sage::decode``.

Query i of a sequence sees the keys from max(start, end - N_q + i - left) to end - N_q + i: the last
query stands at the last key. start and end lie on the device. So `end` may change from replay to
replay of a CUDA graph, and a cache is read as far as it is filled.

Shapes: B batch, H_q and H_kv heads, N_q queries, N keys that the cache has room for, D head_dim
(D_v of v).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sage_inductor.ops.attention_call import empty_outputs
from sage_inductor.ops.formats import HEAD_DIMS, MAX_ROWS

CODES = torch.int8, torch.float8_e4m3fn
MAX_QUERIES = 16
BLOCK_N = 64  # keys of a tile, which have one running maximum
# For a product with codes a row of q is made fp16 times a power of two. Its biased exponent is this
# less that of the row's largest absolute value, which is then at least 2^7 and less than 2^8.
UP = 127 + 7 + 127
P_BITS = 15.0  # beside codes p is times 2 to this, so that fp16 holds what small scales leave of it


class DecodeCall(NamedTuple):
    q: Tensor  # [B, H_q, N_q, D] fp16 or bf16, any strides; 1 to MAX_QUERIES queries
    # [B, H_kv, N, D] and [B, H_kv, N, D_v] of q's dtype or of CODES; strides any but the last, 1
    k: Tensor
    v: Tensor
    start: Tensor  # [B or 1], int32 or int64: the first key. Below 0 it counts as 0
    end: Tensor  # the same: the key after the last. Beyond N it counts as N
    scale: float  # of the softmax
    # [B or 1, H_kv or 1, N or 1] fp32: what a code is multiplied by; of 16 bits None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    # [B or 1, N_q or 1, N] bool, any strides: the keys from start to end that a query sees. All of
    # v from start to end must be finite. None: a query sees the keys up to its own place
    mask: Tensor | None = None
    # [B or 1] bool, with a mask: whether it shows each query all keys from start to its own place.
    # Then it is not read: reading it takes a third of the time of 16 bits
    is_run: Tensor | None = None
    left: int | None = None  # without a mask: keys before its own that a query sees; None: all
    rotated: bool = False  # k is of its half, rotated: quantize/rotate.py
    out_bnhd: bool = False  # store out in [B, N, H, D] order

    def fake(self) -> tuple[Tensor, Tensor]:
        """What the op gives, without memory."""
        self.check()
        return empty_outputs(self.q, self.v.shape[3], self.out_bnhd)

    def check(self) -> None:
        """Raise ValueError or TypeError unless ``sage::decode`` is defined for these arguments."""
        q, k, v, start, end, _, k_scale, v_scale, mask, is_run, left, *_ = self
        q.dim() == k.dim() == v.dim() == 4 or _refuse(
            f"q, k and v must have 4 dimensions, got {q.dim()}, {k.dim()}, {v.dim()}"
        )
        (B, H_q, N_q, D), (_, H_kv, N, _), D_v = q.shape, k.shape, v.shape[3]
        of_kv, of_border = (q.dtype, *CODES), (torch.int32, torch.int64)
        check_tensors(
            "sage::decode", ("start", "end", "k_scale", "v_scale", "mask", "is_run"),
            ("q", q, (B, H_q, N_q, D), (torch.float16, torch.bfloat16)),
            ("k", k, (B, H_kv, N, D), of_kv), ("v", v, (B, H_kv, N, D_v), of_kv),
            ("start", start, (B,), of_border), ("end", end, (B,), of_border),
            ("k_scale", k_scale, (B, H_kv, N), (torch.float32,)),
            ("v_scale", v_scale, (B, H_kv, N), (torch.float32,)),
            ("mask", mask, (B, N_q, N), (torch.bool,)), ("is_run", is_run, (B,), (torch.bool,)),
        )  # fmt: skip
        for name, x, x_scale in (("k", k, k_scale), ("v", v, v_scale)):
            (x_scale is not None) == (x.dtype in CODES) or _refuse(
                f"{name}_scale goes with codes, and only that: {name} is {x.dtype}"
            )
        check_cache("sage::decode", k, v, self.rotated)
        H_q % H_kv == 0 or _refuse(f"heads of q must be a multiple of k's, got {H_q}, {H_kv}")
        1 <= N_q <= MAX_QUERIES or _refuse(f"q must have 1 to {MAX_QUERIES} rows, got N_q={N_q}")
        left is None or left >= 0 or _refuse(f"left must be None or at least 0, got {left}")
        is_run is None or mask is not None or _refuse("is_run must be None without a mask")
        left is None or mask is None or _refuse(f"left must be None with a mask, got {left}")


def check_tensors(op: str, broadcast: tuple[str, ...], *rows: tuple) -> None:
    """Raise ValueError or TypeError unless the tensors of an op have these dtypes and shapes, and
    the first one's device. rows: (name, tensor or None, shape, dtypes). broadcast: names of those
    that may have 1 for any size."""
    device = rows[0][1].device
    for name, x, shape, dtypes in rows:
        if x is None:
            continue
        if x.dtype not in dtypes:
            raise TypeError(f"{op}: {name} must be one of {dtypes}, got {x.dtype}")
        repeats = name in broadcast
        x.dim() == len(shape) and all(
            n == m or (repeats and n == 1) for n, m in zip(x.shape, shape, strict=True)
        ) or _refuse(f"{name} must be {[*shape]}{' or broadcast' * repeats}, got {[*x.shape]}", op)
        x.device == device or _refuse(f"{name} must be on {device}, got {x.device}", op)


def check_cache(op: str, k: Tensor, v: Tensor, rotated: bool) -> None:
    """Raise ValueError unless an op is defined for a cache [B, H, N, D] and [B, H, N, D_v]."""
    N, D, D_v = *k.shape[2:], v.shape[3]
    for name, x in (("k", k), ("v", v)):
        x.stride(3) == 1 or _refuse(f"{name}'s last stride must be 1, got {x.stride(3)}", op)
    (D % 16 == D_v % 16 == 0 < min(D, D_v) and max(D, D_v) <= HEAD_DIMS[-1]) or _refuse(
        f"head_dim must be a multiple of 16 up to {HEAD_DIMS[-1]}, got {D}, {D_v}", op
    )
    1 <= N <= MAX_ROWS or _refuse(f"k must have 1 to {MAX_ROWS} rows, got N={N}", op)
    (not rotated or D in HEAD_DIMS) or _refuse(
        f"rotated, head_dim must be one of {HEAD_DIMS}, got {D}", op
    )


def _refuse(message: str, op: str = "sage::decode") -> None:
    raise ValueError(f"{op}: {message}")
