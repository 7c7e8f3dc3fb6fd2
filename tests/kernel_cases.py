"""The calls for which kernels are compared with their emulation, who runs them (Triton's
interpreter, and a GPU with longer ones), and how results are compared.

The interpreter (Triton 3.7) cannot multiply bf16 matrices and does not fuse tl.fma. Its rounding to
FP8 drops the carry (127 becomes 64), truncates subnormals and does not saturate (padding becomes
NaN, hence `saturate`). Its tl.maximum keeps NaN. So 16-bit numbers are fp16 there, INT8 codes may
differ by one and FP8 is compared loosely. On a GPU codes are compared exactly.

Lengths are a number of blocks and what lies beyond: -1, 0 or 1 rows, the ends of every tile.
"""

import dataclasses
import math
import os
from collections.abc import Callable
from typing import NamedTuple

import pytest
import support
import torch
from pairs import chosen
from torch import Tensor
from torch.testing import assert_close

from bench.providers import walk_of
from sage_inductor.ops import launch
from sage_inductor.ops.attention import tiles
from sage_inductor.ops.attention.select import (
    attention,
    hopper_tile,
    select,
)
from sage_inductor.ops.attention.tiles import Tile
from sage_inductor.ops.attention_call import AttentionCall
from sage_inductor.ops.formats import Prepared
from sage_inductor.ops.recipe import NAMED, Recipe
from sage_inductor.ops.reference import attention as emulation
from sage_inductor.ops.reference import quantize as reference
from sage_inductor.ops.visibility import NO_LISTS, BlockLists, Visibility

# -- who runs them ----


class Runner(NamedTuple):
    name: str
    device: str
    dtype: torch.dtype  # of 16 bits
    marks: tuple

    def __repr__(self):
        return self.name

    def qkv(self, *shape: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = support.qkv(*shape, dtype or self.dtype, self.device)
        return 2 * q, k, v

    def rand(self, *shape: int) -> Tensor:
        return torch.rand(*shape, device=self.device)


INTERPRETER = Runner("interpreter", "cpu", torch.float16, (
    pytest.mark.interpreter,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1",
        reason="needs TRITON_INTERPRET=1 (make test does)",
    ),
))  # fmt: skip
GPU = Runner("gpu", "cuda", torch.bfloat16, (pytest.mark.gpu,))


runners = pytest.mark.parametrize(
    "runner", [pytest.param(x, id=x.name, marks=x.marks) for x in (INTERPRETER, GPU)]
)


def in_interpreter(test):
    """Marks a test that the interpreter runs and no GPU."""
    for mark in INTERPRETER.marks:
        test = mark(test)
    return test


def on_hopper(test):
    no_hopper = "torch.cuda.get_device_capability() != (9, 0)"
    return pytest.mark.gpu(
        pytest.mark.skipif(no_hopper, reason="the Hopper kernel is for sm_90")(test)
    )


def on(interpreter=None, gpu=None):
    """Parametrizes a test by `runner` and `case`, a dictionary. Each runner has its own cases, given as
    a mark of pairs.py. Their axes may differ."""
    found = []
    for runner, mark in ((INTERPRETER, interpreter), (GPU, gpu)):
        names, rows = mark.args if mark else ("", ())
        for x in rows:
            case = dict(zip(names.split(", "), x.values, strict=True))
            text = "-".join([runner.name, *(f"{name}={value}" for name, value in case.items())])
            found.append(pytest.param(runner, case, marks=(*x.marks, *runner.marks), id=text))
    return pytest.mark.parametrize("runner, case", found)


def every(**axes):
    """Of the product of the axes all."""
    return chosen(lambda *_: True, **axes)


# -- calls ----

SMALL = [  # B, H_q, H_kv, N_q, N_kv, D
    (2, 4, 2, 70, 127, 64),  # groups that neither h % H_kv nor one head tells
    (1, 1, 1, 130, 65, 128),
    (1, 1, 1, 64, 128, 80),
    (1, 1, 1, 1, 1, 32),
    (1, 1, 1, 129, 300, 16),
]
LARGE = [
    (2, 4, 4, 1000, 777, 128),
    (2, 8, 2, 200, 1777, 128),
    (1, 4, 1, 333, 333, 64),
    (1, 2, 2, 1, 1, 80),
    (1, 2, 2, 63, 2048, 32),
    (3, 2, 1, 129, 64, 96),
    (1, 1, 1, 257, 1, 8),
    (2, 4, 2, 300, 333, 72),  # no head starts at a multiple of 16 elements
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]

BANDS = {  # left, right, bottom_right
    "full": (None, None, False),
    "causal": (None, 0, False),
    "bottom right": (None, 0, True),
    "window": (100, 0, False),
    "wide": (300, 60, False),  # with blocks that all rows of a tile see whole
    "narrow": (3, 2, True),
    "left": (300, None, False),
}


def rand(*shape, device="cpu"):
    return torch.rand(*shape, device=device)


def documents(N, device="cpu"):
    """Four documents one after the other."""
    return torch.arange(N, device=device) * 4 // N


def blocks(B, H, N_q, N_kv, device="cpu"):
    """Each 64 queries see of each 128 keys nothing, a part or all."""
    seen = 3 * rand(B, H, -(-N_q // 64), -(-N_kv // 128), device=device) - 1
    seen = seen.repeat_interleave(64, 2).repeat_interleave(128, 3)[:, :, :N_q, :N_kv]
    return rand(B, H, N_q, N_kv, device=device) < seen


def some(B, H, N_q, N_kv, device="cpu"):
    """Each query of each head sees keys of its own, and none of some keys of the head."""
    kept = rand(B, H, N_q, N_kv, device=device) > 0.7
    return kept & (rand(B, H, 1, N_kv, device=device) > 0.2)


MASKS = {  # B, H, N_q, N_kv, device
    "none": None,
    "keys": lambda B, H, N_q, N_kv, x: rand(B, 1, 1, N_kv, device=x) > 0.5,
    "left padding": lambda B, H, N_q, N_kv, x: rand(B, 1, 1, N_kv, device=x).sort().values > 0.5,
    "rows": some,
    "2-D": lambda B, H, N_q, N_kv, x: rand(N_q, N_kv, device=x) > 0.7,
    "transposed": lambda B, H, N_q, N_kv, x: (rand(H, N_kv, N_q, device=x) > 0.7).mT,
    "broadcast keys": lambda B, H, N_q, N_kv, x: rand(1, 1, N_q, 1, device=x) > 0.5,
    "documents": lambda B, H, N_q, N_kv, x: documents(N_q, x)[:, None] == documents(N_kv, x),
    "blocks": blocks,
    "fp32": lambda B, H, N_q, N_kv, x: torch.randn(1, H, N_q, N_kv, device=x),
    "fp16": lambda B, H, N_q, N_kv, x: torch.randn(B, 1, N_q, N_kv, device=x).half(),
    "bf16, expanded": lambda B, H, N_q, N_kv, x: (
        rand(B, 1, 1, N_kv, device=x).bfloat16().expand(B, H, N_q, N_kv)
    ),
    "lowest": lambda B, H, N_q, N_kv, x: torch.where(
        rand(B, 1, 1, N_kv, device=x) > 0.5, 0.0, -65504.0
    ).half(),
    "-inf": lambda B, H, N_q, N_kv, x: torch.where(  # of each third query all
        (rand(1, 1, N_q, N_kv, device=x) > 0.5) & (torch.arange(N_q, device=x) % 3 < 2)[:, None],
        0.0,
        -math.inf,
    ),
    "nothing": lambda B, H, N_q, N_kv, x: torch.zeros(N_q, N_kv, dtype=torch.bool, device=x),
}
BOOL = "keys", "left padding", "rows", "2-D", "transposed", "documents", "blocks", "nothing"


def mask_of(name: str, B: int, H: int, N_q: int, N_kv: int, device="cpu") -> Tensor | None:
    return MASKS[name] and MASKS[name](B, H, N_q, N_kv, device)


def length(blocks: int, block: int, beyond: int) -> int:
    """Of so many blocks, and one row less or more; of no block 1 to 3."""
    return max(blocks * block + beyond, beyond + 2)


def tile_fits(recipe: str, BLOCK_M: int) -> bool:
    return BLOCK_M % NAMED[recipe].sharing.q_span == 0


def hide(k: Tensor, v: Tensor, visibility: Visibility, H_q: int, of_v=math.nan) -> None:
    """Writes Inf and `of_v` where the mask hides keys from every query of a head's group."""
    B, H_kv, N_kv, _ = k.shape
    seen = visibility.tile_summary.amax(2) == 0
    hidden = seen.expand(B, H_q, N_kv).unflatten(1, (H_kv, -1)).all(2)
    k[hidden], v[hidden] = math.inf, of_v


# -- attention kernels ----


@dataclasses.dataclass(frozen=True)
class Interpreted:
    """The portable kernel of a recipe, with this tile. prepared: a function of k, v, the keys that
    count and the recipe that prepares k and v; None: the emulation does."""

    tile: Tile
    tma: bool = False
    prepared: Callable | None = None

    runner = INTERPRETER

    def of(self, recipe: Recipe, head_dim: int, masked: bool, size) -> "Interpreted":
        return self

    def prepare(self, k: Tensor, v: Tensor, visibility: Visibility, r: Recipe) -> Prepared:
        if self.prepared is not None:
            return self.prepared(k, v, visibility.keys(k), r)
        # Stored as the kernels would.
        found = support.prepared_of(k, v, visibility, r)
        return Prepared(*(x if x is None else x.contiguous() for x in found))

    def launch(self, a: AttentionCall) -> tuple[Tensor, Tensor]:
        return support.launch_portable(a, self.tile, self.tma)

    def emulate(self, a: AttentionCall) -> tuple[Tensor, Tensor]:
        return emulation.attention(a, self.tile.BLOCK_N)

    def tolerances(self, a: AttentionCall, lse: Tensor) -> tuple[float, float, float]:
        """Of |out|, and of lse: relative and absolute."""
        r, N_q = a.decoded, a.q.shape[2]
        if r.of_qk.block_scaled:  # single numbers between two of E2M1 fall on the other side
            return 1e-3, 1e-5, 1e-5
        # An INT8 code that a tie rounds the other way moves a score by up to 0.2 scale, and so a p to
        # the next number of E4M3, up to 1/8 away. Few rows average less: of 2,564 variants three,
        # with 1 and 3 rows, were off by 2.3 %.
        few = 2e-3 if r.pv == "16bit" else 1e-2 if N_q > 16 else 2.5e-2
        return few, 1e-4, 1e-4 + 0.2 * abs(a.scale)


@dataclasses.dataclass(frozen=True)
class OnGpu:
    """The op. portable: the kernel of every call, though the Hopper kernel computes this one."""

    portable: bool
    tile: Tile | None = None

    runner = GPU

    def of(self, recipe: Recipe, head_dim: int, masked: bool, size) -> "OnGpu":
        capability = torch.cuda.get_device_capability()
        return OnGpu(self.portable, select(capability, recipe, head_dim, masked, size))

    def prepare(self, *_) -> None:
        """The device's kernels do it."""

    def launch(self, a: AttentionCall) -> tuple[Tensor, Tensor]:
        return attention(*(a._replace(warpgroups=0) if self.portable else a))

    def of_hopper(self, a: AttentionCall) -> Tile | None:
        """The Hopper kernel's tile, where that computes the call."""
        return None if self.portable else hopper_tile(a.without_idle_bounds())

    def emulate(self, a: AttentionCall) -> tuple[Tensor, Tensor]:
        a, tile = a.without_idle_bounds(), self.of_hopper(a)
        return hopper_emulation(a, tile) if tile else emulation.attention(a, self.tile.BLOCK_N)

    def tolerances(self, a: AttentionCall, lse: Tensor) -> tuple[float, float, float]:
        """A bf16 ulp is 2^-8, and few elements are an ulp off.

        FP8 q k^T: the tensor cores keep 13 bits below the largest of 32 products and what they were
        added to. Simulated so (D of 8 to 256, scales to 2), out moves by up to 2e-3, most of it p
        that FP8 rounds the other way, and lse by up to 2^-11 of the largest: twice that is allowed.
        NVFP4: from one number of E2M1 to the next is a quarter to all of it. Simulated, with scores
        off by 5e-7 of themselves, out moves by up to 7e-4.
        """
        if a.decoded.qk == "fp8":
            return 4e-3, 1e-5, 1e-4 + 2**-10 * lse.nan_to_num(neginf=0.0).abs().max().item()
        return 4e-3 if a.decoded.of_qk.block_scaled else 1e-3, 1e-5, 1e-4


@dataclasses.dataclass(frozen=True)
class OfHopper(OnGpu):
    """The Hopper kernel by a tile of tiles.HOPPER, for whatever lengths it is."""

    portable: bool = False

    def of(self, *_) -> "OfHopper":
        return self

    def of_hopper(self, a: AttentionCall) -> Tile:
        return self.tile

    def launch(self, a: AttentionCall) -> tuple[Tensor, Tensor]:
        from sage_inductor.ops.attention.hopper import plan  # imports Gluon, which may be missing

        assert plan.reads(a)
        return plan.launch(a, self.tile, launch.run)

    def emulate(self, a: AttentionCall) -> tuple[Tensor, Tensor]:
        return hopper_emulation(a, self.tile)


OPS = {"portable": OnGpu(True), "opaque": OnGpu(False)}


def check_attention(
    kernel, recipe: str | Recipe, heads, lengths, channels, scale=0.1, band=(None, None, False),
    mask="none", lists: BlockLists = NO_LISTS, out_bnhd=True, dtype=None, stored=lambda x: x,
) -> bool:  # fmt: skip
    """out and lse of a kernel are its emulation's; keys that the mask hides from every query hold
    Inf and NaN. heads: B, H_q, H_kv; stored: in which layout q, k and v are. Whether it was the
    Hopper kernel."""
    r, (B, H_q, _), (N_q, N_kv) = NAMED.get(recipe, recipe), heads, lengths
    kernel = kernel.of(r, max(channels), mask != "none", lists.size)
    q, k, _ = kernel.runner.qkv(*heads, *lengths, channels[0], dtype=dtype)
    *_, v = kernel.runner.qkv(*heads, *lengths, channels[1], dtype=dtype)
    q, k, v = map(stored, (q, k, v))
    on_gpu = kernel.runner is GPU
    if not on_gpu:
        q = rounded_alike(q, r.qk)
    attn_mask = mask_of(mask, B, H_q, N_q, N_kv, kernel.runner.device)
    visibility = Visibility.of(attn_mask, band, N_kv, kernel.tile.BLOCK_M, lists)
    if attn_mask is not None:
        hide(k, v, visibility, H_q, math.nan if on_gpu or r.pv != "nvfp4" else math.inf)
    prepared = kernel.prepare(k, v, visibility, r)
    a = support.attention_call(q, k, v, r, visibility, scale, out_bnhd, prepared)
    (out, lse), (out_ref, lse_ref) = kernel.launch(a), kernel.emulate(a)
    few, rtol, atol = kernel.tolerances(a, lse_ref)
    empty = lse_ref == -math.inf
    assert out.isfinite().all() and (out[empty] == 0).all() and (lse[empty] == -math.inf).all()
    exact = out_ref.double()
    ulp = torch.finfo(out.dtype).eps * exact.abs().max()  # of a single element of a small one
    assert (out.double() - exact).norm() <= few * exact.norm() + ulp
    assert_close(lse, lse_ref, rtol=rtol, atol=atol)
    if on_gpu:
        again = kernel.launch(a)
        assert torch.equal(out, again[0]) and torch.equal(lse, again[1])
    return on_gpu and kernel.of_hopper(a) is not None


def rounded_alike(q: Tensor, qk: str) -> Tensor:
    """q near q, which the interpreter quantizes as a GPU does. FP8: what E4M3 holds at a scale of
    1 / 128, which its first channel makes each row's, and is not rounded again: the interpreter
    would lose carries. INT4: in fp32, without ties, of which a code is a large step."""
    if qk == "int4":
        return q.float() + torch.randn(q.shape) / 1000
    if qk != "fp8":
        return q
    q = q.clamp(-3.5, 3.5) * 128
    q[..., 0] = 448
    return (q.to(torch.float8_e4m3fn).float() / 128).to(torch.float16)


# -- what the Hopper kernel computes ----


def cuts(heads: int, N_q: int, N_kv: int, tile: Tile) -> dict[int, list[int]]:
    """tile -> the blocks at which it is handed from program to program, of those that are."""
    num_tiles, blocks = heads * -(-N_q // tile.BLOCK_M), -(-N_kv // tile.BLOCK_N)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    alone = tile.warpgroups == 1  # then all are whole
    shares = None if alone else tiles.schedule(num_tiles, blocks, processors)
    programs, whole = shares or (1, num_tiles)
    starts = [c * (num_tiles - whole) * blocks // programs for c in range(1, programs)]
    found = {}
    for start in starts:
        if start % blocks and whole < num_tiles:
            found.setdefault(whole + start // blocks, []).append(start % blocks)
    return found


def hopper_emulation(a: AttentionCall, tile: Tile) -> tuple[Tensor, Tensor]:
    """A piece of a tile has its own running maximum, from its first block on, which decides how its
    p is rounded."""
    if a.attn_mask is not None or a.blocks.size is not None:
        return emulation.attention(a, tile.BLOCK_N, walk_of(a, tile))
    (B, H_q, N_q, _), H_kv = a.q.shape, a.k.shape[1]

    def emulate(q, b, heads, begin, end):
        keys = slice(begin * tile.BLOCK_N, end * tile.BLOCK_N)
        of_v = (b, heads, slice(None), keys) if a.v_mean is not None else (b, heads, keys)
        return emulation.attention(
            a._replace(
                q=q, k=a.k[b, heads, keys], k_scale=a.k_scale[b, heads, begin * 2 : end * 2],
                v=a.v[of_v], n_kv=min(a.n_kv, keys.stop) - keys.start,
                v_scale=None if a.v_mean is None else a.v_scale[b, heads],
                v_mean=None if a.v_mean is None else a.v_mean[b, heads],
            ),
            tile.BLOCK_N,
        )  # fmt: skip

    whole, blocks, num_m = slice(None), -(-a.n_kv // tile.BLOCK_N), -(-N_q // tile.BLOCK_M)
    out, lse = emulate(a.q, whole, whole, 0, blocks)
    if (a.left, a.right) != (None, None):
        return out, lse
    for t, inner in cuts(B * H_q, N_q, a.n_kv, tile).items():
        head, m = divmod(t, num_m)
        m = num_m - 1 - m if (B * H_q - 1 - head) % 2 == 0 else m
        b, h = slice(head // H_q, head // H_q + 1), head % H_q
        here = b, slice(h, h + 1), slice(m * tile.BLOCK_M, (m + 1) * tile.BLOCK_M)
        h_kv = slice(h * H_kv // H_q, h * H_kv // H_q + 1)
        pieces = zip([0, *inner], [*inner, blocks])
        outs, lses = zip(*(emulate(a.q[here].float(), b, h_kv, *piece) for piece in pieces))
        lse[here] = torch.stack(lses).logsumexp(0)
        weights = [(x - lse[here]).exp()[..., None] for x in lses]
        out[here] = sum(o * w for o, w in zip(outs, weights)).to(out.dtype)
    return out, lse


# -- codes ----


def check_codes(
    runner: Runner, found: Tensor, expected: Tensor, where=..., rotated: bool = False
) -> None:
    """where: what the interpreter gives as a GPU does, of FP8 codes numbers, of rotated INT8's those
    of rows without NaN."""
    if runner is GPU and not rotated:  # rotated numbers are sums in another order
        assert torch.equal(found.float(), expected.float())
    elif found.dtype == torch.float8_e4m3fn:
        # But for a lost carry, which halves a value, and subnormals, which are truncated.
        x, y = found[where].float(), expected[where].float()
        assert (x == y).float().mean() > 0.95
        assert ((x - y).abs() <= y.abs() / 2 + 2**-9).all()
    else:
        if found.dtype == torch.uint8:
            found, expected = reference.unpack(found), reference.unpack(expected)
        far = (found.int() - expected.int()).abs()[where]
        assert far.max() <= 1 and (far > 0).float().mean() < 1e-3
