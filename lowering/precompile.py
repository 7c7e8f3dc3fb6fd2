"""The kernels of opaque ops compile while Inductor works on the graph around them: in its
processes (ops/compile.py), as what is noted of the ops' own Python on tensors without memory."""

import functools
import itertools
import logging
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch

from sage_inductor.ops import gpus
from sage_inductor.ops.attention.select import Problem, run_opaque, select
from sage_inductor.ops.compile import compile_elsewhere
from sage_inductor.ops.launch import HAS_PDL, launch_cached, noted
from sage_inductor.ops.quantize.one_pass import launch_kv
from sage_inductor.ops.quantize.op import empty_kv
from sage_inductor.ops.recipe import decode
from sage_inductor.ops.sdpa import SdpaCall, attention_call
from sage_inductor.ops.visibility import BlockLists, Visibility

_log = logging.getLogger("sage_inductor")


class _Like(NamedTuple):
    """A tensor without memory, as a key."""

    dtype: torch.dtype
    shape: tuple
    strides: tuple

    @classmethod
    def of(cls, x):
        """Of a tensor; anything else stays what it is."""
        is_tensor = isinstance(x, torch.Tensor)
        return cls(x.dtype, tuple(x.shape), tuple(x.stride())) if is_tensor else x

    def made(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


def _made(x):
    return x.made() if isinstance(x, _Like) else x


def _are_known(likes: tuple) -> bool:
    numbers = ((*x.shape, *x.strides) if isinstance(x, _Like) else (x,) for x in likes)
    return not any(isinstance(n, torch.SymInt) for n in itertools.chain(*numbers))


def precompile(call: SdpaCall) -> None:
    """Start to compile what the call will launch and Inductor does not compile, if its sizes are
    known."""
    call = call.of_seen_keys()
    recipe, masked, size = decode(call.recipe), call.attn_mask is not None, call.blocks.size
    selected = select(Problem.of(call.k, call.v, recipe, masked, call.portable, size))
    likes = tuple(map(_Like.of, (call.q, call.k, call.v, call.attn_mask, *call.blocks[:4])))
    runs_here = not (selected.kernel.traced or call.portable)
    if runs_here and recipe.sharing.one_pass and _are_known(likes):
        plain = call._replace(
            q=None, k=None, v=None, attn_mask=None, prepared=None,
            **BlockLists(block_q=call.block_q, block_kv=call.block_kv)._asdict(),
        )  # fmt: skip
        _start(_launch, call.q.device, likes, bool(call.prepared), plain, selected.tile)


def precompile_op(launch: Callable, arguments: dict) -> None:
    """As `precompile`, of a call of an op that does ``launch(arguments, run, gpu)``."""
    device = next(x.device for x in arguments.values() if isinstance(x, torch.Tensor))
    likes = tuple(map(_Like.of, arguments.values()))
    if device.type == "cuda" and _are_known(likes):
        _start(_launch_op, device, launch, tuple(arguments), likes)


@functools.cache  # started once
def _start(work: Callable, *of_call) -> None:
    """In a thread of its own, where no mode of torch is on: while a graph is traced even a meta
    tensor is a fake one, without an address. It takes milliseconds: kernels compile elsewhere."""
    thread = threading.Thread(target=work, args=of_call)
    thread.start()
    thread.join()


def _launch_op(device: torch.device, launch: Callable, names: tuple, likes: tuple) -> None:
    given = dict(zip(names, map(_made, likes), strict=True))
    gpu = gpus.Gpu(gpus.capability(device), gpus.processors(device))
    with noted() as launches:
        try:
            launch(given, launch_cached, gpu)
        except Exception as error:  # of operands that are copied; of others the call says the same
            _log.debug("what the call launches is compiled then: %s", error)
    compile_elsewhere(launches, gpu.capability)


def _launch(device: torch.device, likes: tuple, is_prepared: bool, call: SdpaCall, tile) -> None:
    recipe = decode(call.recipe)
    q, k, v, attn_mask, *lists = map(_made, likes)
    blocks = BlockLists(*lists, call.block_q, call.block_kv)
    visibility = Visibility.of(attn_mask, call.band, k.shape[2], tile.BLOCK_M, blocks)
    of_v = None if recipe.of_pv.dtype is None else v
    inputs = attention_call(
        q, k, v, empty_kv(k, of_v, call.recipe), visibility, call.scale, recipe, call.out_bnhd,
        call.warpgroups,
    )  # fmt: skip
    with noted() as launches:
        run_opaque(inputs.without_idle_bounds(), tile, launch_cached, device)
        if not is_prepared:
            visible = visibility.keys(k)
            launch_kv(k, of_v, visible, recipe, launch_cached, pdl=HAS_PDL)
    compile_elsewhere(launches, gpus.capability(device))
