"""Who is measured: the ways to compute one attention, each (q, k, v) or (q, k, v, attn_mask) -> out
on the same tensors.

cuDNN, flash,  SDPA restricted to one backend, in eager mode: Inductor's caches do not know
efficient      the restriction and would answer with another backend's graph. "flash (FA3)": where
               the process has activated another flash attention than torch's own
flex           compiled FlexAttention; causal, keys, documents and windows through a block mask
inductor       F.scaled_dot_product_attention compiled with backend="inductor"
RECIPE kernel  the attention kernel alone: k and v smoothed and quantized, and the mask summarized,
               beforehand
RECIPE MxNxS   the same by each tile of the Hopper kernel, of M rows, N keys and S stages
RECIPE op      the same F.scaled_dot_product_attention compiled with backend="sage": what a
               user gets, with all its preparation
FA3, FA4, ...  other packages (cases.PEERS), where they are installed: peers.py
RECIPE apart   the op where k and v are of one batch: given so many copies of them

A window is given to the kernel as a band; the op proves it, of a mask made of aranges in the
compiled function. The others read it as an attn_mask made beforehand, flex as a block mask.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from bench import peers
from bench.cases import PEERS, Case
from bench.measure import SEES, WINDOW, Provider, draw, draw_mask
from sage_inductor.choose import families
from sage_inductor.ops import gpus, launch
from sage_inductor.ops.attention import tiles
from sage_inductor.ops.attention.select import attention, hopper_tile, select
from sage_inductor.ops.attention.tiles import Tile
from sage_inductor.ops.attention_call import AttentionCall
from sage_inductor.ops.recipe import NAMED
from sage_inductor.ops.reference import attention as emulation
from sage_inductor.ops.sdpa import attention_call
from sage_inductor.ops.sdpa import prepare as prepare_kv
from sage_inductor.ops.visibility import Visibility

EAGER = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# strict: a call that stays SDPA is an error, not a row that flatters or slanders us.
SAGE_OPTIONS = {"sage.force": True, "sage.strict": True}
GATE_TOLERANCE = 1e-3  # few elements of out are a bf16 ulp (2^-8) off


def build(case: Case, kinds, recipes) -> list[Provider]:
    """The providers of one case, fresh: nothing is compiled before the first call."""
    return [provider for kind in kinds for provider in _build(case, kind, recipes)]


def _build(case: Case, kind: str, recipes) -> list[Provider]:
    def sdpa(q, k, v, mask=None):
        if case.shared:
            k, v = (x.expand(case.B, -1, -1, -1) for x in (k, v))
        return F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=case.is_causal, enable_gqa=case.H_q != case.H_kv
        )

    def window(q, k, v, mask):
        n = torch.arange(q.shape[2], device=q.device)
        return sdpa(q, k, v, SEES["window"](None, None, None, n[:, None], n))

    match kind:
        case "cuDNN" | "flash" | "efficient":
            activated = kind == "flash" and families.flash_attention() != families.TORCHS_FLASH
            name = f"{kind} ({families.flash_attention()})" if activated else kind
            return [Provider(name, sdpa_kernel(EAGER[kind])(sdpa))]
        case "flex":
            sayable = not case.mask or case.mask in SEES
            return [Provider(kind, _flex(case), _unmarked)] if sayable else []
        case "inductor":
            return [Provider(kind, torch.compile(sdpa, backend="inductor", fullgraph=True))]
        case "kernel":
            return [_kernel(case, recipe) for recipe in recipes]
        case "tiles":
            return [provider for recipe in recipes for provider in _tiles(case, recipe)]
        case "op":
            return [
                Provider(
                    f"{recipe} op",
                    torch.compile(
                        window if case.mask == "window" else sdpa,
                        backend="sage",
                        fullgraph=True,
                        options={**SAGE_OPTIONS, "sage.recipe": recipe},
                    ),
                    recipe=recipe,
                )
                for recipe in recipes
            ]
        case "apart":
            ops = _build(dataclasses.replace(case, shared=False), "op", recipes)
            return [
                dataclasses.replace(op, name=f"{op.recipe} apart", prepare=_apart)
                for op in ops * case.shared
            ]
        case _ if kind in PEERS:
            return peers.build(case, kind)
        case _:
            raise ValueError(f"provider must be one of cases.ALL, got {kind!r}")


def backend_of(name: str) -> SDPBackend:
    """That of a provider of this name."""
    return EAGER[name.partition(" (")[0]]


def _apart(q, k, v):
    """k and v [1, H, N, D], stored as [1, N, H, D], for each batch of q."""
    repeated = (x.transpose(1, 2).repeat(q.shape[0], 1, 1, 1).transpose(1, 2) for x in (k, v))
    return q, *repeated


def _unmarked(q, k, v, mask=None):
    """The same memory, for flex, whose BlockMask has one length: nothing is marked dynamic."""
    return tuple(x.data for x in (q, k, v))


def _flex(case: Case) -> Callable:
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    name = "causal" if case.is_causal else case.mask

    @functools.cache
    def block_mask(n: int, device):
        def sees(b, h, i, j):
            return SEES[name](case.B, n, b, i, j)

        B = case.B if name == "keys" else None
        return create_block_mask(sees, B, None, n, n, device=device)

    def call(q, k, v):
        blocks = block_mask(q.shape[2], q.device) if name else None
        return compiled(q, k, v, block_mask=blocks, enable_gqa=case.H_q != case.H_kv)

    return call


def _kernel(case: Case, name: str) -> Provider:
    recipe = NAMED[name]

    def prepare(q, k, v, mask=None):
        tile = _select(case, name, q.device)
        left = WINDOW - 1 if case.mask == "window" else None
        band = left, 0 if case.is_causal or left is not None else None, False
        seen = Visibility.of(mask if case.masked else None, band, k.shape[2], tile.BLOCK_M)
        prepared = prepare_kv(k, v, seen, recipe)
        return attention_call(q, k, v, prepared, seen, q.shape[3] ** -0.5, recipe)

    return Provider(f"{name} kernel", lambda *inputs: attention(*inputs)[0], prepare, name)


def _select(case: Case, name: str, device: torch.device) -> Tile:
    capability = gpus.capability(device) if device.type == "cuda" else None
    return select(capability, NAMED[name], case.D, case.masked)


def _tiles(case: Case, name: str) -> list[Provider]:
    """The Hopper kernel with every tile that its table has for such calls: their warpgroups name
    them."""
    of_kind = (9, 0), NAMED[name].pv, case.D, case.is_causal
    found = (tiles.hopper(*of_kind, tiles.ANY, n) for n in tiles.WARPGROUPS)
    prepare, columns = _kernel(case, name).prepare, []
    for tile in dict.fromkeys(tile for tile in found if tile is not None):
        plural = "s" * (tile.warpgroups != 1)
        label = f"{name}, {tile.warpgroups} warpgroup{plural}"
        columns.append(Provider(label, by_tile(tile), prepare, name))
    return columns


def by_tile(tile: Tile) -> Callable:
    """The Hopper kernel of an AttentionCall's fields."""
    from sage_inductor.ops.attention.hopper import plan  # imports Gluon, which may be missing

    return lambda *a: plan.launch(AttentionCall(*a), tile, launch.run)[0]


def small(case: Case) -> Case:
    """The case that `gate` looks at: grouped heads, a tail, and no full tile for the first causal
    rows; beyond the window. With a mask, lengths that are multiples of 16 and as many heads as are
    timed: Triton compiles one kernel for both."""
    if not case.mask:
        return Case(1, 4, 2, 300, case.D, case.is_causal)
    return Case(2, 32, 16, 304 + WINDOW * (case.mask == "window"), case.D, mask=case.mask)


def gate(case: Case, name: str, device: torch.device) -> float:
    """The kernel's distance from its bit-faithful emulation, ||o - e|| / ||e||, the larger of
    normal and outlier inputs: on a small case, with the tile that the case itself runs with."""
    timed, case = case, small(case)
    kernel = _kernel(case, name)
    errors = []
    for kind in ("normal", "outlier"):
        a = kernel.prepare(*draw(case, kind, device), *draw_mask(case, device))
        tile = _select(case, name, device)
        tile = tile if device.type == "cpu" else tile_of(a, timed, tile)
        a = a._replace(warpgroups=tile.warpgroups or 0)
        with _poisoned_empty():
            out = kernel.call(*a)
        as_read = walk_of(a, tile) if a.attn_mask is not None and tile.warpgroups else None
        emulated = emulation.attention(a, tile.BLOCK_N, as_read)[0].double()
        errors.append(((out.double() - emulated).norm() / emulated.norm()).item())
    # max() would skip a NaN.
    return max(errors) if all(error == error for error in errors) else float("nan")


def tile_of(a: AttentionCall, case: Case, selected: Tile) -> Tile:
    """The tile of a call like `a`, of the case's sizes. selected: of the kernel of every call."""
    q = a.q.new_empty(case.D).expand(case.B, case.H_q, case.N, case.D)
    return hopper_tile(a._replace(q=q, n_kv=case.N)) or selected


def walk_of(a: AttentionCall, tile: Tile) -> Callable:
    """What the Hopper kernel reads by lists, its own or the caller's, as the emulation takes it. A
    block is BLOCK_N keys, or as many as divide it and the caller's blocks."""
    from sage_inductor.ops.attention.hopper import plan  # imports Gluon, which may be missing

    given = {}

    def run(kernel, grid, tensors, numbers, **options):
        launch.run(kernel, grid, tensors, numbers, **options)
        given.update(zip(kernel.arg_names, (*tensors, *numbers), strict=True))

    plan.launch(a, tile, run)
    B, H, num_m = *a.q.shape[:2], given["num_m"]
    strides = given["stride_lb"], given["stride_lh"], given["stride_lm"], 1
    rows = given["List"].as_strided((B, H, num_m, strides[2]), strides).tolist()
    room = plan.room_for_tail(tile, a.n_kv, a.tail_block)
    walk = torch.zeros(B, H, num_m * tile.warpgroups, strides[2], dtype=torch.int64)
    for b, h, m in itertools.product(range(B), range(H), range(num_m)):
        (whole, count, _), entries = rows[b][h][m][:3], rows[b][h][m][3 + room :]
        read = torch.tensor([*entries[:whole], *entries[::-1][: count - whole]], dtype=torch.int64)
        for wg in range(tile.warpgroups):
            code = read >> 2 * wg & 3
            walk[b, h, m * tile.warpgroups + wg, :count] = (read >> 6) * 4 + code
    n = tile.BLOCK_N if a.blocks.size is None else math.gcd(tile.BLOCK_N, a.blocks.block_kv)
    walk = F.pad(walk, (0, -walk.shape[3] % (tile.BLOCK_N // n)))  # whole steps, before a tail
    return functools.partial(as_walked, walk.to(a.q.device), n)


def as_walked(
    walk: torch.Tensor, n: int, x: torch.Tensor, x_banded: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [B, H_q, N_q, N_kv] in the order of a walk [B, H_q, tiles of 64 queries, entries] over
    blocks of n keys, each 4 j + code; the code is the Hopper kernel's (hopper/tile_lists.py).
    x_banded where it is 1, -inf where it is 0 or beyond the keys; and the keys, there 0."""
    n_q, n_kv = x.shape[2:]
    entry = walk[:, :, torch.arange(n_q, device=x.device) // 64].repeat_interleave(n, 3)
    key = entry // 4 * n + torch.arange(entry.shape[3], device=x.device) % n
    seen = (entry % 4 > 0) & (key < n_kv)
    key = torch.where(seen, key, 0)
    x = torch.where(entry % 4 == 1, x_banded.gather(3, key), x.gather(3, key))
    return x.masked_fill(~seen, -math.inf), key


@contextlib.contextmanager
def _poisoned_empty():
    """`torch.empty` gives NaN, so that an element nobody writes is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
