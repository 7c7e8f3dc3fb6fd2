"""The kernels of opaque ops compile while Inductor works on the graph around them.

Inductor does not see these kernels, so their first launch would compile them: 4 to 6 s for the
Hopper kernel on an H200's host, with the GPU waiting.
"""

import functools
import itertools
import logging
import threading
from collections.abc import Callable

import torch

from sage_inductor.ops.attention import tiles
from sage_inductor.ops.attention.arguments import AttentionCall
from sage_inductor.ops.attention.select import Problem, run_opaque, select
from sage_inductor.ops.launch import HAS_PDL, compile_ahead
from sage_inductor.ops.quantize.one_pass import launch_kv
from sage_inductor.ops.quantize.op import empty_kv
from sage_inductor.ops.recipe import decode
from sage_inductor.ops.sdpa import SdpaCall
from sage_inductor.ops.visibility import BlockLists, Visibility

_log = logging.getLogger("sage_inductor")


def precompile(call: SdpaCall) -> None:
    """Start to compile what the call will launch and Inductor does not compile, if its sizes are
    known."""
    recipe, masked, size = decode(call.recipe), call.attn_mask is not None, call.blocks.size
    selected = select(Problem.of(call.k, call.v, recipe, masked, call.portable, size))
    likes = tuple(map(_like, (call.q, call.k, call.v, call.attn_mask, *call.blocks[:4])))
    sizes = itertools.chain(*(each for like in likes if like is not None for each in like[1:]))
    known = all(isinstance(n, int) for n in sizes)
    runs_here = not (selected.kernel.traced or call.portable)
    if runs_here and recipe.sharing.one_pass and known:
        plain = call._replace(
            q=None, k=None, v=None, attn_mask=None, prepared=None,
            **BlockLists(block_q=call.block_q, block_kv=call.block_kv)._asdict(),
        )  # fmt: skip
        _start(_launch, call.q.device, likes, bool(call.prepared), plain, selected.tile)


def precompile_op(launch: Callable, arguments: dict) -> None:
    """As `precompile`, of a call of an op that does ``launch(arguments, run, gpu)``, whose tensors
    are its first arguments."""
    tensors = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    likes = {name: _like(x) for name, x in tensors.items()}
    others = {name: x for name, x in arguments.items() if name not in tensors}
    sizes = itertools.chain(*((*shape, *strides) for _, shape, strides in likes.values()))
    known = not any(isinstance(n, torch.SymInt) for n in (*sizes, *others.values()))
    device = next(iter(tensors.values())).device
    if known and device.type == "cuda":
        _start(_launch_op, device, launch, tuple(likes.items()), tuple(others.items()))


def _like(x: torch.Tensor | None) -> tuple | None:
    return None if x is None else (x.dtype, tuple(x.shape), tuple(x.stride()))


@functools.cache  # started once
def _start(work: Callable, *of_call) -> None:
    """In a thread of its own, where no mode of torch is on: while a graph is traced even a meta
    tensor is a fake one, without an address. It takes milliseconds; kernels compile elsewhere."""
    thread = threading.Thread(target=work, args=of_call)
    thread.start()
    thread.join()


def _launch_op(device: torch.device, launch: Callable, likes: tuple, others: tuple) -> None:
    given = {name: _made(like) for name, like in likes} | dict(others)
    gpu = tiles.Gpu(tiles.capability(device), tiles.processors(device))
    try:
        with torch.cuda.device(device):
            launch(given, compile_ahead, gpu)
    except Exception as error:  # of operands that are copied; of others the call says the same
        _log.debug("what the call launches is compiled then: %s", error)


def _made(like: tuple) -> torch.Tensor:
    dtype, shape, strides = like
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def _launch(device: torch.device, likes: tuple, is_prepared: bool, call: SdpaCall, tile) -> None:
    recipe = decode(call.recipe)
    q, k, v, attn_mask, *lists = (like and _made(like) for like in likes)
    blocks = BlockLists(*lists, call.block_q, call.block_kv)
    visibility = Visibility.of(attn_mask, call.band, k.shape[2], tile.BLOCK_M, blocks)
    of_v = None if recipe.of_pv.dtype is None else v
    inputs = AttentionCall.of(
        q, empty_kv(k, of_v, call.recipe), v, visibility, call.scale, k.shape[2], recipe,
        call.out_bnhd, warpgroups=call.warpgroups,
    )  # fmt: skip
    with torch.cuda.device(device):
        run_opaque(inputs.without_idle_bounds(), tile, compile_ahead, device)
        if not is_prepared:
            visible = visibility.keys(k.shape[1])
            launch_kv(k, of_v, visible, recipe, compile_ahead, pdl=HAS_PDL)
