"""What is launched on a GPU that is not here, and what that compiles to.

The library's own launch functions note it (`launch.noted`), for tensors without memory. So no test
restates a kernel's arguments. Strides are multiples of 16 elements, lengths are not.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from unittest import mock

import support
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sage_inductor.ops import gpus
from sage_inductor.ops import sdpa as of_sdpa
from sage_inductor.ops.attention import select, tiles, triton
from sage_inductor.ops.attention_call import AttentionCall
from sage_inductor.ops.compile import Compilation, Launch, describe
from sage_inductor.ops.decode_call import DecodeCall
from sage_inductor.ops.formats import HEAD_DIMS
from sage_inductor.ops.launch import noted, run
from sage_inductor.ops.quantize.op import launch_prepare
from sage_inductor.ops.recipe import NAMED
from sage_inductor.ops.register import LAUNCHES
from sage_inductor.ops.sdpa import SdpaCall, unsmoothed_lse
from sage_inductor.ops.sparse import pool as of_tokens
from sage_inductor.ops.sparse.listed import listed_blocks
from sage_inductor.ops.training import rowscaled as of_rowscaled
from sage_inductor.ops.training import sagebwd as of_sagebwd
from sage_inductor.ops.visibility import NO_LISTS, BlockLists

H200 = gpus.Gpu((9, 0), 132)
B, H_Q, H_KV = 2, 6, 3
LENGTHS = 4097, 4999  # of so many queries no tile of the Hopper kernel is split
SPLIT = 65, 4999  # and of so few all are
ORDERED = 4999, 4999  # an order of tokens is for one length


@contextlib.contextmanager
def here(capability: tuple[int, int], processors: int = H200.processors) -> Iterator[None]:
    """Every device is such a GPU."""
    with (
        mock.patch.object(gpus, "_capability", lambda device: capability),
        mock.patch.object(gpus, "_multiprocessors", lambda device: processors),
    ):
        yield


class Launching(TorchDispatchMode):
    """An op launches what it does on a GPU. (For tensors without memory torch runs its fake.)"""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in LAUNCHES:
            return LAUNCHES[function](run, args[0].device, *args)
        return function(*args, **(kwargs or {}))


def launches(call: Callable, capability: tuple[int, int], *args, **kwargs) -> list[Launch]:
    with here(capability), noted() as found, Launching():
        call(*args, **kwargs)
    return found


def compilation_of(launch: Launch) -> Compilation:
    return describe(launch.kernel, launch.arguments, launch.options)


def written(found: list[Launch]) -> list[tuple]:
    """All of the launches but their tensors' memory."""
    return [(x.kernel, x.grid, [*map(_value, x.arguments)], x.options) for x in found]


def _value(x):
    if hasattr(x, "block_shape"):
        return _value(x.base), list(x.shape), list(x.strides), list(x.block_shape)
    return (x.dtype, x.shape, x.stride()) if isinstance(x, Tensor) else x


_compiled: dict = {}


def kernel(name: str, call: Callable, capability: tuple[int, int], *args, which: int = 0, **kwargs):
    """Triton's CompiledKernel of one that the call launches. which: if it launches several."""
    found = launches(call, capability, *args, **kwargs)
    found = compilation_of([each for each in found if each.kernel.__name__ == name][which])
    key = found.digest, capability
    if key not in _compiled:
        _compiled[key] = found.compile(capability)
    return _compiled[key]


# -- tensors ----


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def qkv(
    D: int = 128, dtype=torch.bfloat16, lengths=LENGTHS, batch: int = B
) -> tuple[Tensor, Tensor, Tensor]:
    return support.qkv(batch, H_Q, H_KV, *lengths, D, dtype, "meta")


def rows_of(N: int, *shape: int, dtype=torch.uint8) -> Tensor:
    """[*shape, N], with rows that 16 divides."""
    return empty(*shape, -(-N // 16) * 16, dtype=dtype)[..., :N]


def mask_of(kind: str | None, N_q: int, N_kv: int) -> Tensor | None:
    """A row of keys for all queries; a row each, as it is and transposed; numbers."""
    return {
        None: lambda: None,
        "keys": lambda: rows_of(N_kv, B, 1, 1, dtype=torch.bool),
        "rows": lambda: rows_of(N_kv, B, 1, N_q, dtype=torch.bool),
        "transposed": lambda: rows_of(N_q, B, 1, N_kv, dtype=torch.bool).mT,
        "bias": lambda: rows_of(N_kv, B, H_Q, N_q, dtype=torch.bfloat16),
    }[kind]()


def lists_of(size: tuple[int, int] | None, full: bool, N_q: int, N_kv: int) -> BlockLists:
    """For every head; None: there are none."""
    if size is None:
        return NO_LISTS
    rows, columns = -(-N_q // size[0]), -(-N_kv // size[1])
    found = [empty(B, H_Q, rows, *n, dtype=torch.int32) for n in ((), (columns,))]
    return BlockLists(*found, *(found if full else (None, None)), *size)


def in_order(size: tuple[int, int] = (128, 64)) -> dict:
    """What a call by lists of blocks of this size is given to follow an order of tokens."""
    return dict(size=size, lengths=ORDERED, perm=empty(ORDERED[0], dtype=torch.int32))


def in_documents(right: int | None = None, count: int = 3) -> dict:
    """What a call is given to attend so many packed documents, with a band of `right`."""
    T, cu = ORDERED[0], empty(count + 1, dtype=torch.int32)
    *order, counts, indices, shown = torch.ops.sage.documents(cu, T)
    order = dict(zip(("perm", "perm_k", "spans", "documents"), order, strict=True))
    lists = dict(kv_num_blocks=counts, kv_indices=indices, block_q=128, block_kv=128)
    return dict(lengths=ORDERED, batch=1, right=right, attn_mask=shown, **lists, **order)


# -- calls ----


def sdpa_call(
    recipe: str, D: int = 128, lengths=LENGTHS, dtype=torch.bfloat16, mask: str | None = None,
    size: tuple[int, int] | None = None, full: bool = True, batch: int = B, **given,
) -> SdpaCall:  # fmt: skip
    """size: of lists of blocks. full: of full ones too."""
    lists = lists_of(size, full, *lengths)._asdict()
    given = {"attn_mask": mask_of(mask, *lengths), **lists, **given}
    found = support.arguments(*qkv(D, dtype, lengths, batch), False, D**-0.5, recipe, **given)
    return SdpaCall(*found)


def prepared_call(recipe: str, **given) -> AttentionCall:
    """What the attention op takes of k and v that are prepared."""
    call = sdpa_call(recipe, **given).of_seen_keys()
    r, (q, k, v) = NAMED[recipe], call[:3]
    seen = of_sdpa._visibility(k, v, call.attn_mask, call.band, r, call.blocks, call.perm)
    if call.tail_block is None:
        prepared = of_sdpa.prepare(k, v, seen, r, *call.keys_order)
    else:
        given = dict(tail_block=call.tail_block, perm=call.perm)
        prepared = launch_prepare(run, H200, k, v, seen.keys(k), r, **given)
    last = call.out_bnhd, call.warpgroups, *call[-4:]
    return of_sdpa.attention_call(q, k, v, prepared, seen, call.scale, r, *last)


def attend(call: SdpaCall) -> None:
    """As sage::sdpa, but for lse's correction."""
    with Launching():
        of_sdpa.attend(call)


def sdpa(recipe: str, pointers: bool = False, **given) -> None:
    """pointers: by the kernel of every call, as on a GPU whose tile has no register cap."""
    if not pointers:
        return attend(sdpa_call(recipe, **given))
    a = prepared_call(recipe, **given)
    tile = dataclasses.replace(select.tile_of(a.shape(a.q.device), a.decoded), maxnreg=None)
    triton.launch(a, tile, run)


def hopper(tile: tiles.Tile, pv: str, rotated: bool = False, **given) -> None:
    """As `attend`, by this tile of the Hopper kernel."""
    recipe = {"fp8": "sage2-8b", "16bit": "sage1"}[pv] + ("-rotated" if rotated else "-per-token")
    select._hopper().launch(prepared_call(recipe, **given), tile, run)


def decode(
    D: int = 128, codes: torch.dtype | None = None, N_q: int = 1, heads=(32, 8), N: int = 8192,
    dtype=torch.bfloat16, masked: bool = False, **given,
) -> None:  # fmt: skip
    """codes: of k and v; None: they are of dtype."""
    q, k, v = (
        support.heads(B, H, n, D, dtype, "meta").to(of)
        for H, n, of in ((heads[0], N_q, dtype), *[(heads[1], N, codes or dtype)] * 2)
    )
    scale = empty(B, heads[1], N, dtype=torch.float32) if codes else None
    end = empty(B, dtype=torch.int64)
    mask = empty(B, N_q, N, dtype=torch.bool) if masked else None
    call = DecodeCall(q, k, v, end, end, D**-0.5, scale, scale, mask, **given)
    torch.ops.sage.decode(*call)


def append(D: int = 128, D_v: int | None = None, n: int = 1, dtype=torch.bfloat16) -> None:
    """Rotated where it can be."""
    N, D_v = 8192, D_v or D
    k, v = (support.heads(B, H_KV, n, width, dtype, "meta") for width in (D, D_v))
    codes = (empty(B, H_KV, N, width, dtype=torch.int8) for width in (D, D_v))
    scales = (empty(B, H_KV, N, dtype=torch.float32) for _ in range(2))
    of_cache = (x for pair in zip(codes, scales) for x in pair)
    anchor, length = empty(B, H_KV, D, dtype=torch.float32), empty(dtype=torch.int64)
    torch.ops.sage.append_kv(*of_cache, k, v, anchor, length, D in HEAD_DIMS)


def unsmooth(D: int) -> None:
    q, k, _ = qkv(D)
    unsmoothed_lse(q[..., 0].float(), q, k[:, :, 0].float(), 0.1)


def pool(D: int, block: int, shifted: bool, ordered: bool = False) -> None:
    x = qkv(D)[1]
    perm = empty(x.shape[2], dtype=torch.int32) if ordered else None
    of_tokens.pool_blocks(x, x[:, :, 0].float() if shifted else None, block, perm=perm)


def largest() -> None:
    scores = empty(B, H_Q, 37, 577, dtype=torch.float32)
    of_tokens.largest(scores, empty(B, H_Q, 37, dtype=torch.int32))


def listed() -> None:
    lists = lists_of((128, 64), False, *LENGTHS)
    listed_blocks(lists.kv_num_blocks, lists.kv_indices, 79)


def sagebwd(D: int = 128, is_causal: bool = False, dtype=torch.bfloat16) -> None:
    """A step: forward and backward."""
    q, k, v = qkv(D, dtype)
    last = is_causal, 0.1, True
    saved = of_sagebwd.sagebwd(q, k, v, *last)
    of_sagebwd.sagebwd_backward(q, v, *saved, *last)


def rowscaled(D: int = 128, is_causal: bool = False, dtype=torch.bfloat16, lengths=LENGTHS) -> None:
    """As `sagebwd`."""
    q, k, v = qkv(D, dtype, lengths[:1] * 2 if is_causal else lengths)
    out, *kept = of_rowscaled.rowscaled(q, k, v, is_causal, 0.1, True)
    of_rowscaled.rowscaled_backward(q, out, *kept, k.shape[2], 0.1, True)
