"""A static cache of transformers whose layers of full attention hold INT8 (ops/quantize/cache.py).

Shapes: B batch, H heads of k and v, n new tokens, N max_cache_len, D head_dim (D_v of v).
"""

import torch
from torch import Tensor
from transformers.cache_utils import StaticCache, StaticLayer

from sage_inductor.ops.formats import HEAD_DIMS
from sage_inductor.ops.quantize.cache import append_kv, read_kv

OF_SEQUENCES = "key_codes", "key_scale", "value_codes", "value_scale", "anchor"


class Int8Cache(StaticCache):
    """A static cache of transformers in INT8, of about half the memory of one in 16 bits.

        cache = sage_inductor.Int8Cache(model.config, max_cache_len=8192)
        model.generate(**inputs, past_key_values=cache)

    config: the model's. max_cache_len: how many tokens of a sequence there is room for. A layer of
    full attention holds codes of one byte and an fp32 scale a token and head, 2 D + 8 bytes where
    16 bits take 4 D. Others (sliding windows, linear attention) are transformers' own.

    The first keys that a layer gets fix the mean that it takes off all keys, for each sequence and
    head. Masks are not known there, so padding is among them; any mean is exact, but for rounding.

    Eager code and every compiler compute with the numbers that the codes stand for. Under
    ``backend="sage"`` attention of up to 16 queries reads the codes: on Hopper, where that was
    timed, or with ``sage.force`` or ``sage.emulate``. ``reset()`` empties the cache for another
    text. A new cache makes compiled code compile again.

    Raises ValueError for a max_cache_len below 1 and for offloading; with the first keys for a
    head_dim that is no multiple of 16 or above 256; for another batch than the first one's. Tokens
    beyond max_cache_len raise IndexError on CPU, and fail an assertion on a GPU.
    """

    def __init__(self, config, max_cache_len: int, offloading: bool = False):
        if max_cache_len < 1:
            raise ValueError(f"Int8Cache: max_cache_len must be at least 1, got {max_cache_len}")
        if offloading:
            raise ValueError("Int8Cache: offloading must be False: a layer's codes stay on its GPU")
        super().__init__(config, max_cache_len)
        self.layers = [
            _Int8Layer(max_cache_len) if type(layer) is StaticLayer else layer
            for layer in self.layers
        ]

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last ``-tokens_to_remove`` tokens back. ValueError if a layer cannot."""
        if others := {type(layer).__name__ for layer in self.layers if not layer.is_croppable}:
            raise ValueError(
                f"Int8Cache: crop (assisted decoding) needs full attention alone, got {others}"
            )
        super().crop(tokens_to_remove)


class _Int8Layer(StaticLayer):
    is_croppable = True
    is_anchored = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        (B, H, _, D), D_v, N = key_states.shape, value_states.shape[3], self.max_cache_len
        self.batch_size, self.num_heads, self.k_head_dim, self.v_head_dim = B, H, D, D_v
        self.key_codes, self.value_codes = (
            torch.zeros(B, H, N, width, dtype=torch.int8, device=self.device) for width in (D, D_v)
        )
        self.key_scale, self.value_scale = (
            torch.zeros(B, H, N, device=self.device) for _ in range(2)
        )
        self.anchor = torch.zeros(B, H, D, device=self.device)
        self.cumulative_length = self.cumulative_length.to(self.device)
        for name in (*OF_SEQUENCES, "cumulative_length"):
            _stay(getattr(self, name))
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """k [B, H, n, D] and v [B, H, n, D_v] -> the whole cache [B, H, N, D] and [.., D_v]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if (B := key_states.shape[0]) != self.batch_size:
            raise ValueError(f"Int8Cache: the batch must be {self.batch_size}, the first, got {B}")
        if not self.is_anchored:
            self.anchor.copy_(key_states.mean(2, dtype=torch.float32))
            self.is_anchored = True
        append_kv(
            self.key_codes, self.key_scale, self.value_codes, self.value_scale, key_states,
            value_states, self.anchor, self.cumulative_length, self.k_head_dim in HEAD_DIMS,
        )  # fmt: skip
        self.cumulative_length.add_(key_states.shape[2])
        self.dtype = key_states.dtype
        return self.keys, self.values

    def _refuse(self, x: Tensor | None) -> None:
        if x is not None:  # as transformers' classes begin
            raise AttributeError("Int8Cache: update writes a layer's keys and values, nothing else")

    # Numbers, which models themselves read where an earlier step wrote them: in cross-attention.
    keys = property(lambda self: self._read("key"), _refuse)
    values = property(lambda self: self._read("value"), _refuse)

    def _read(self, name: str) -> Tensor | None:
        if not self.is_initialized:
            return None
        codes, scale = getattr(self, f"{name}_codes"), getattr(self, f"{name}_scale")
        of_k = (self.anchor, self.k_head_dim in HEAD_DIMS) if name == "key" else (None, False)
        return read_kv(codes, scale, *of_k, self.dtype)

    def reset(self) -> None:
        self.cumulative_length.zero_()
        if self.is_initialized:  # what is not written must be finite: a mask does not hide NaN
            self.key_scale.zero_()
            self.value_scale.zero_()
        self.is_anchored = False

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(f"crop: must be 0 or less tokens to remove, got {tokens_to_remove}")
        self.cumulative_length.add_(tokens_to_remove).clamp_(min=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        if not self.is_initialized:
            return
        for name in OF_SEQUENCES:
            x = getattr(self, name)
            chosen = x[indices.to(self.device)]
            if chosen.shape == x.shape:  # where compiled code has it
                x.copy_(chosen)
            else:
                setattr(self, name, chosen)
                _stay(chosen)
        self.batch_size = len(self.anchor)

    reorder_cache = batch_select_indices

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))


def _stay(x: Tensor) -> None:
    """CUDA graphs read and write x where it is, instead of a copy."""
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(x)
