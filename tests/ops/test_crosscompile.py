"""Every kernel compiles, without a GPU, for every architecture its recipe runs on, to the matrix
instruction that was meant and without spills in the register file."""

import functools
import re
from pathlib import Path

import noted
import pytest
import torch
import triton
from cubins import about, assembly_log, held_up, loops_over_keys, spilled, stack_bytes
from pairs import chosen, pairs, parametrize, rows
from support import attention_call, swept

from bench.tritons import ROWS
from sage_inductor.ops import compat, gpus
from sage_inductor.ops import sdpa as of_sdpa
from sage_inductor.ops.attention import nvfp4, tiles
from sage_inductor.ops.attention import triton as portable
from sage_inductor.ops.attention.hopper import kernel as hopper
from sage_inductor.ops.attention.hopper import plan
from sage_inductor.ops.attention.select import hopper_tile, select
from sage_inductor.ops.attention.tiles import Load
from sage_inductor.ops.call_shape import CallShape
from sage_inductor.ops.formats import pad_head_dim
from sage_inductor.ops.launch import run
from sage_inductor.ops.quantize import keys, one_pass, smooth, values
from sage_inductor.ops.recipe import NAMED
from sage_inductor.ops.sparse import pool as blocks_of_tokens
from sage_inductor.ops.visibility import CAUSAL, FULL, Band, BlockLists, Visibility

ROOT = Path(__file__).parents[2]
SHARED_MEMORY = {  # bytes that a program may have
    (8, 0): 163 << 10, (8, 6): 99 << 10, (8, 9): 99 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10,
    (12, 0): 99 << 10,
}  # fmt: skip
ARCHITECTURES = list(SHARED_MEMORY)
TRITON = tuple(map(int, triton.__version__.split(".")[:2]))
# Run under the oldest and the newest Triton too: each kernel, and each architecture, of what is
# compiled soonest.
on_every_triton = pytest.mark.tritons
SWEPT = pytest.mark.sweep


def chosen_for_tritons(*rows):
    """What `pairs` takes so that these variants always run, under every Triton."""
    return dict(
        each=lambda *row: [x for x in rows if x == row],
        marks=lambda *row: [on_every_triton] if row in rows else [],
    )


def picked(*others, tritons=(), where=None, **axes):
    """Parametrizes a test by the product of the axes, of which these variants always run: each
    takes seconds, and a greedy choice does not know how many. tritons: under every Triton."""
    found = rows(axes, where)
    assert {*tritons, *others} <= {*found}
    always = {i for i, row in enumerate(found) if row in (*tritons, *others)}
    return parametrize(
        axes, found, always, lambda *row: [on_every_triton] if row in tritons else []
    )


def runs_on(recipe, architecture):
    return NAMED[recipe].pv == "16bit" or architecture >= (8, 9)


FP8 = "sage2-8b-per-token"
attention_of = functools.partial(noted.kernel, "_attention_kernel", noted.sdpa)
hopper_of = functools.partial(noted.kernel, "_hopper_kernel", noted.hopper, (9, 0))


# -- triton.py ----

# What a call of the portable kernel hides and how. A row of keys for all queries, a row each, numbers.
KINDS = {
    "full": dict(D=64), "causal": dict(right=0), "rows": dict(right=0, mask="keys"),
    "mask": dict(right=0, mask="rows"), "bias": dict(D=256, right=0, mask="bias"),
    "window": dict(left=500, right=0, bottom_right=True), "lists": dict(right=0, size=(128, 128)),
    "lists of 64 x 192": dict(right=0, size=(64, 192)),
}  # fmt: skip
LISTS = ("lists", "lists of 64 x 192")
MASKED = ("rows", "mask")


@picked(
    # Each recipe, each kind, and each two formats of an instruction of its own.
    ((8, 6), "sage1-rotated", "lists of 64 x 192"), ((8, 9), "sage1", "bias"),
    ((9, 0), "sage1-per-token", "mask"), ((9, 0), "sage2-8b-fp8qk", "bias"),
    ((10, 0), "sage1-per-token", "rows"), ((10, 0), "sage2-8b-fp8qk", "full"),
    ((10, 0), "sage2-4b", "lists of 64 x 192"), ((12, 0), "sage2-8b-rotated", "window"),
    tritons=[
        ((8, 0), "sage1", "full"), ((8, 9), "sage2-4b", "rows"),
        ((9, 0), "sage2-8b-per-token", "lists"), ((10, 0), "sage2-8b", "causal"),
        ((12, 0), "sage2-8b-fp8qk", "full"),
    ],
    where=lambda architecture, recipe, kind: (
        recipe != "sage3" and runs_on(recipe, architecture)
        # Of 128 rows that share a scale no tile has 64.
        and (kind, recipe) != ("lists of 64 x 192", "sage1")
    ),
    architecture=ARCHITECTURES, recipe=NAMED, kind=KINDS,
)  # fmt: skip
def test_attention_compiles_to_the_matrix_instructions(architecture, recipe, kind):
    """Each product in FP8 starts from zero. Triton folds a plain addition into the accumulator on
    sm_89 and sm_120, where it keeps 13 mantissa bits."""
    pointers = architecture != (9, 0) or kind not in LISTS
    compiled = attention_of(architecture, recipe, pointers, warpgroups=0, **KINDS[kind])
    assert compiled.metadata.shared <= SHARED_MEMORY[architecture]
    stack = stack_bytes(compiled.asm["cubin"])
    assert stack <= stack_of_portable(architecture, recipe, kind), stack
    r, ptx = NAMED[recipe], compiled.asm["ptx"]
    if architecture == (10, 0):
        # INT8 q k^T is mma.sync there before Triton 3.8 (slow), then tcgen05's kind::i8.
        int8 = "kind::i8" if TRITON >= (3, 8) else "m16n8k32.row.col.satfinite.s32.s8.s8"
        q_k = "kind::f8f6f4" if r.qk == "fp8" else int8
        p_v = "tcgen05.mma.cta_group::1.kind::" + ("f8f6f4" if r.pv == "fp8" else "f16")
    elif architecture == (9, 0):
        q_k = "f32.e4m3.e4m3" if r.qk == "fp8" else "s32.s8.s8"
        p_v = "f32.e4m3.e4m3" if r.pv == "fp8" else "f32.bf16.bf16"
    else:
        q_k = "m16n8k32.row.col." + ("f32.e4m3.e4m3" if r.qk == "fp8" else "satfinite.s32.s8.s8")
        p_v = "f32.e4m3.e4m3.f32" if r.pv == "fp8" else "m16n8k16.row.col.f32.bf16.bf16.f32"
    products = [
        x
        for x in ptx.splitlines()
        if re.search(r"\s(mma\.sync|wgmma\.mma_async|tcgen05\.mma)\.", x)
    ]
    of_rotation = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    meant = [q_k, p_v, *[of_rotation] * r.rotated]
    assert all(any(each in x for x in products) for each in meant)
    assert all(any(each in x for each in meant) for x in products), products
    if r.pv == "fp8":
        of_fp8 = [x for x in compiled.asm["ttgir"].splitlines() if "f8E4M3FN" in x]
        products = [x for x in of_fp8 if " = tt.dot " in x or "group_dot " in x]
        fresh = r"dot %\w+, %\w+, %cst"
        if architecture == (10, 0):
            products = [x for x in of_fp8 if "gen5_mma " in x]
            fresh = r"gen5_mma %\w+, %\w+, [^,]+, %false,"
        assert products and all(re.search(fresh, x) for x in products), products


def stack_of_portable(architecture, recipe, kind) -> int:
    """At most so many bytes a thread spilled when this was written."""
    newer = TRITON >= (3, 8)
    if kind in MASKED:
        # In 16 bits sm_86 and sm_89 have tiles of 16 warps, of which a thread has 128 registers:
        # 1208 for a row of keys, 808 for a row each. Eight warps would spill nothing (untimed).
        return 1280 if NAMED[recipe].pv == "16bit" and architecture in ((8, 6), (8, 9)) else 128
    if kind == "bias":  # of 256 channels: 328 on sm_80, 352 on sm_90
        return 384
    if kind in LISTS and recipe.endswith("-per-token"):  # 104 on sm_90
        return 128 if newer or architecture == (9, 0) else 16
    # 0 but for FP8 on sm_90, where the capped variant runs, and INT8 on sm_100: 184 with Triton 3.9.
    return 192 if architecture == (10, 0) and newer else 128


@chosen(lambda D: D == 128, D=[64, 128])
def test_the_register_cap_keeps_spills_small(D):
    """At most 8 bytes a thread when this was timed."""
    compiled = attention_of((9, 0), "sage2-8b", D=D, right=0)
    assert "cp.async.bulk.tensor.2d" in compiled.asm["ptx"]
    assert stack_bytes(compiled.asm["cubin"]) <= 64


# -- hopper/ ----

BANDS = {
    "none": {}, "both": dict(left=300, right=200, bottom_right=True), "causal": dict(right=0)
}  # fmt: skip
KINDS_OF_HOPPER = {
    "full": {}, "full, fp16": dict(dtype=torch.float16), "causal": BANDS["causal"],
    "split": dict(lengths=noted.SPLIT), "both": BANDS["both"],
    "bottom right": dict(right=0, bottom_right=True), "mask": dict(mask="rows"),
    "causal mask": dict(right=0, mask="rows"),
}  # fmt: skip
TILES_OF_HOPPER = {(*row[:3], row[4].warpgroups): row[4] for row in ROWS}


def is_of_hopper(pv, head_dim, warpgroups, kind):
    """With a mask, 16 bits are triton.py's. One warpgroup has no split tiles."""
    if (pv, head_dim, kind == "causal", warpgroups) not in TILES_OF_HOPPER:
        return False
    if kind == "full, fp16":
        return pv == "16bit" and warpgroups == 3
    return pv != "16bit" if "mask" in kind else kind != "split" or warpgroups > 1


@picked(
    # One and three warpgroups in FP8, each kind of loop; keys that are hidden by a mask by one
    # warpgroup, which compiles in a third of the time of three.
    ("fp8", 128, 1, "full"), ("fp8", 128, 3, "causal"),
    tritons=[("fp8", 64, 1, "causal mask"), ("16bit", 64, 3, "full, fp16"), ("fp8", 64, 1, "both")],
    where=is_of_hopper,
    pv=["fp8", "16bit"], head_dim=[64, 128, 256], warpgroups=[1, 2, 3], kind=KINDS_OF_HOPPER,
)  # fmt: skip
def test_hopper_kernel_keeps_its_tiles_in_registers(pv, head_dim, warpgroups, kind):
    """A loop holds at most 9 loads and stores of spilled registers in FP8, 16 in 16 bits; with
    Triton 3.8 and head_dim 256, 25. Variants for it that held 88 and 117 were 44 and 40 % slower.
    What hides keys by a band or a mask is in a branch of a loop. In 16 bits nothing but its product
    waits for a warpgroup's turn, if head_dim is above 64 (`_pin`)."""
    is_causal = kind == "causal"
    tile = TILES_OF_HOPPER[pv, head_dim, is_causal, warpgroups]
    compiled = hopper_of(tile, pv, D=head_dim, **KINDS_OF_HOPPER[kind])
    ptx = compiled.asm["ptx"]
    assert "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8" in ptx
    of_16_bits = "k16.f32." + ("f16.f16" if kind == "full, fp16" else "bf16.bf16")
    assert (".f32.e4m3.e4m3" if pv == "fp8" else of_16_bits) in ptx
    assert ("setmaxnreg.inc" in ptx) == (warpgroups > 1) and "cp.async.bulk.tensor" in ptx
    assert "st.shared.b8" not in ptx  # q is in vectors of 16 bytes: test_no_byte_is_stored...
    assert compiled.metadata.shared <= 227 * 1024
    loops = loops_over_keys(compiled.asm["cubin"])
    is_pinned = pv == "16bit" and head_dim > 64 and warpgroups > 1
    assert ("nanosleep" in ptx) == is_pinned  # elsewhere it costs 0 to 6 %
    if is_pinned:
        assert held_up(compiled.asm["cubin"]) == []
    # Whole blocks and the rest for each warpgroup, or all.
    parts = 1 if kind in ("both", "bottom right") else 2
    assert len(loops) == parts * warpgroups
    if warpgroups == 1:
        programs = 4 if head_dim == 64 else 3  # of an SM
        assert tile.maxnreg * 32 * tile.num_warps * programs <= 65536
        assert (compiled.metadata.shared + 1024) * programs <= 228 * 1024
        # What all warps have read is fetched over: Triton puts a barrier there, too.
        unguarded = r"wgmma\.wait_group(?:(?!bar\.sync).)*cp\.async\.bulk\.tensor"
        assert not re.search(unguarded, ptx, re.DOTALL)
    if warpgroups == 1 and kind in ("full", "causal"):
        # Products wait where addresses of TMA are moved to uniform registers between them. With
        # eight of those, and 190 instructions more before the keys, N=8192 took 1.07x as long. The
        # ptxas of Triton 3.9 has some where it is causal, which was not timed.
        moves = any("R2UR" in instruction for loop in loops for instruction in loop)
        assert not moves or (TRITON >= (3, 9) and is_causal)
    for loop in loops:
        products = set(re.findall("[IQH]GMMA", " ".join(loop)))
        assert {"IGMMA", "QGMMA" if pv == "fp8" else "HGMMA"} <= products
        plain = kind in ("full", "full, fp16", "causal", "split")
        allowed = 28 if head_dim == 256 else 16 if pv == "16bit" and plain else 10
        assert spilled(loop) <= allowed, (len(loop), spilled(loop))


@picked(
    ("16bit", 128, (128, 64), 64), ("fp8", 128, (64, 64), 32),
    where=lambda pv, head_dim, blocks, tail_block: (
        tiles.hopper_of_blocks((9, 0), pv, head_dim, 9999, *blocks) is not None
    ),
    pv=["fp8", "16bit"], head_dim=[64, 128, 256], blocks=[(192, 128), (128, 64), (64, 64)],
    tail_block=[32, 64],
)  # fmt: skip
def test_a_tail_leaves_the_loops_by_lists_as_they_are(pv, head_dim, blocks, tail_block):
    """It has a loop of its own, and all of them are in registers: at most 8 are spilled."""
    tile = tiles.hopper_of_blocks((9, 0), pv, head_dim, 9999, *blocks)
    plain, tailed = (
        loops_over_keys(hopper_of(tile, pv, D=head_dim, size=blocks, **given).asm["cubin"])
        for given in ({}, {"tail_block": tail_block})
    )
    assert len(plain) == 2 * tile.warpgroups and len(tailed) == 3 * tile.warpgroups
    listed = [loop for n, loop in enumerate(tailed) if n % 3 < 2]
    for n, (before, after) in enumerate(zip(plain, listed, strict=True)):
        fetches = 110 if tile.warpgroups == 1 else 0  # of the tail, too; odd: what is hidden in it
        assert abs(len(after) - len(before)) <= (32 if n % 2 else 12) + fetches
    assert all(spilled(loop) <= 8 for loop in tailed), [*map(spilled, tailed)]


@picked(
    tritons=[("fp8", 64, 1)],
    where=lambda pv, head_dim, warpgroups: (pv, head_dim, False, warpgroups) in TILES_OF_HOPPER,
    pv=["fp8", "16bit"], head_dim=[64, 128, 256], warpgroups=[1, 2, 3],
)  # fmt: skip
def test_rotation_leaves_the_loops_as_they_are(pv, head_dim, warpgroups):
    """It exchanges nothing between threads: 16 channels are one product of registers."""
    tile = TILES_OF_HOPPER[pv, head_dim, False, warpgroups]
    plain, rotated = (
        hopper_of(tile, pv, D=head_dim, rotated=rotated).asm for rotated in (False, True)
    )
    products = rotated["ptx"].count("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32")
    assert products == warpgroups * head_dim // 8
    assert rotated["ptx"].count("shfl.sync") == plain["ptx"].count("shfl.sync")
    loops = [loops_over_keys(each["cubin"]) for each in (plain, rotated)]
    for before, after in zip(*loops, strict=True):
        assert abs(len(after) - len(before)) <= 8 and spilled(after) <= spilled(before)


@picked(
    ("fp8", 128, "none", (64, 64)),  # which a tail leaves as it is: compiled once
    where=lambda pv, head_dim, band, blocks: (
        (band == "none" or head_dim == 128)
        and tiles.hopper_of_blocks((9, 0), pv, head_dim, 9999, *blocks) is not None
    ),
    pv=["fp8", "16bit"], head_dim=[64, 128, 256], band=["none", "both"],
    blocks=[(192, 128), (128, 128), (64, 64), (256, 192)],
)  # fmt: skip
def test_hopper_kernel_by_lists_keeps_its_tiles_in_registers(pv, head_dim, band, blocks):
    tile = tiles.hopper_of_blocks((9, 0), pv, head_dim, 9999, *blocks)
    compiled = hopper_of(tile, pv, D=head_dim, size=blocks, **BANDS[band])
    assert compiled.metadata.shared <= 227 * 1024
    loops = loops_over_keys(compiled.asm["cubin"])
    assert len(loops) == 2 * tile.warpgroups  # whole blocks and the rest
    allowed = 10 if pv == "fp8" else 16  # as without lists
    assert all(spilled(loop) <= allowed for loop in loops), [spilled(loop) for loop in loops]


@picked(
    ("fp8", 64, (128, 64)),
    pv=["fp8", "16bit"], head_dim=[64, 128], blocks=[(192, 128), (128, 64)],
)  # fmt: skip
def test_an_order_of_tokens_leaves_the_loops_as_they_are(pv, head_dim, blocks):
    """Its rows of q are still read 16 bytes at a time, and so are those of o stored. A thread has two
    rows, and asks where they are for q of the first tile and of the next one, for o and for lse."""
    tile = tiles.hopper_of_blocks((9, 0), pv, head_dim, 9999, *blocks)
    given = noted.in_order(blocks)
    ordered = hopper_of(tile, pv, D=head_dim, **given).asm
    plain = hopper_of(tile, pv, D=head_dim, **given | {"perm": None}).asm
    for access in ("ld.global.v4", "st.global.v4"):
        assert ordered["ptx"].count(access) == plain["ptx"].count(access) > 0
    asked = ordered["ptx"].count("ld.global.b32") - plain["ptx"].count("ld.global.b32")
    assert asked == 8 * tile.warpgroups
    loops = [loops_over_keys(each["cubin"]) for each in (plain, ordered)]
    for before, after in zip(*loops, strict=True):
        assert abs(len(after) - len(before)) <= 8 and spilled(after) <= spilled(before)


@pytest.mark.parametrize("right", [swept(None), 0])
def test_documents_leave_the_loops_by_lists_and_a_mask_as_they_are(right, monkeypatch):
    """Of one tile. And are no more launches."""
    monkeypatch.setattr(tiles, "hopper_of_blocks", lambda *given: tiles.ALONE_128)
    given = noted.in_documents(right)
    plain = given | dict.fromkeys(("perm", "perm_k", "spans", "documents"))
    plain["lengths"] = (given["perm"].shape[0],) * 2
    names = [
        [x.kernel.__name__ for x in noted.launches(noted.sdpa, (9, 0), FP8, **each)]
        for each in (plain, given)
    ]
    assert names[1] == [x for x in names[0] if x != "_listed_kernel"]
    loops = [
        loops_over_keys(
            noted.kernel("_hopper_kernel", noted.sdpa, (9, 0), FP8, **each).asm["cubin"]
        )
        for each in (plain, given)
    ]
    assert len(loops[0]) == 2
    for before, after in zip(*loops, strict=True):
        assert abs(len(after) - len(before)) <= 16 and spilled(after) <= spilled(before)


@pytest.mark.parametrize("architecture", [swept((8, 9)), (10, 0), (12, 0)], ids=str)
def test_all_kernels_of_a_call_of_documents_compile(architecture):
    """With 8 bytes of spills more than another call by lists and a mask."""
    for launch in noted.launches(noted.sdpa, architecture, FP8, **noted.in_documents()):
        compiled = noted.compilation_of(launch).compile(architecture)
        assert compiled.metadata.shared <= SHARED_MEMORY[architecture]
        if launch.kernel.__name__ == "_attention_kernel":
            allowed = stack_of_portable(architecture, FP8, "rows") + 8
            assert stack_bytes(compiled.asm["cubin"]) <= allowed


@pytest.mark.parametrize(
    "head_dim, blocks, warpgroups, keys",
    [(128, (64, 64), 1, 128), (128, (128, 128), 2, 128), (64, (192, 256), 3, 128),
     (128, (192, 64), 3, 64), (128, (256, 192), 2, 128), (256, (192, 128), 2, 128)],
)  # fmt: skip
def test_tiles_of_lists_share_a_list_where_they_can(head_dim, blocks, warpgroups, keys):
    """And 64 queries have a tile of their own. In 16 bits they share three lists."""
    for pv in ("fp8", "16bit")[: 2 if head_dim <= 128 else 1]:
        n, k = (3, 64) if (pv, warpgroups) == ("16bit", 1) else (warpgroups, keys)
        tile = tiles.hopper_of_blocks((9, 0), pv, head_dim, 2048, *blocks)
        assert (tile.BLOCK_M, tile.BLOCK_N, tile.warpgroups) == (64 * n, k, n)
        assert tile.num_stages * k == {1: 256, 2: 512, 3: 384}[n] // (1 + head_dim // 256)


def test_short_lists_of_blocks_are_the_portable_kernels():
    found = {
        (pv, head_dim, n_kv): tiles.hopper_of_blocks((9, 0), pv, head_dim, n_kv, 64, 64) is not None
        for pv in ("fp8", "16bit") for head_dim in (40, 64, 72, 256) for n_kv in (2047, 2048)
    }  # fmt: skip
    without = [("fp8", 40, 2047), ("fp8", 64, 2047), ("16bit", 256, 2047), ("16bit", 256, 2048)]
    assert [each for each, is_there in found.items() if not is_there] == without
    assert tiles.hopper_of_blocks((8, 9), "fp8", 128, 4096, 64, 64) is None


@picked(
    ((8, 0), "sage1-per-token", 64), ((12, 0), "sage2-8b-fp8qk", 32),
    ((9, 0), "sage2-8b-per-token", 32),
    tritons=[((8, 9), "sage2-8b", 64)],
    where=lambda architecture, recipe: (
        runs_on(recipe, architecture) and not NAMED[recipe].of_qk.smooths_q
    ),
    architecture=ARCHITECTURES, recipe=NAMED, tail_block=[32, 64],
)  # fmt: skip
def test_all_kernels_of_a_call_with_a_tail_compile(architecture, recipe, tail_block):
    """As a call by the same lists without one: at most 128 bytes are spilled, by attention alone; in
    one pass with blocks of 32 some are, so that as many programs share an SM as without."""
    found = noted.launches(
        noted.sdpa, architecture, recipe, size=(128, 64), mask="keys", tail_block=tail_block
    )
    names = {x.kernel.__name__ for x in found}
    assert "_quantize_tail_kernel" in names
    assert "_mean_kernel" in names or "_quantize_kv_kernel" in names
    for launch in found:
        name = launch.kernel.__name__
        compiled = noted.compilation_of(launch).compile(architecture)
        assert compiled.metadata.shared <= SHARED_MEMORY[architecture]
        if name.endswith("attention_kernel"):
            # With a row of keys it is what MASKED says above.
            assert stack_bytes(compiled.asm["cubin"]) <= stack_of_portable(
                architecture, recipe, "rows"
            )
        elif name != "_hopper_kernel":
            is_old = TRITON <= (3, 6)
            in_one_pass = {(10, 0): (80, 128), (12, 0): (64, 104)}.get(architecture, (40, 96))
            spills = {"_quantize_kv_kernel": in_one_pass[is_old], "_list_tiles_kernel": 8 * is_old}
            assert stack_bytes(compiled.asm["cubin"]) <= spills.get(name, 0), name


@pytest.mark.parametrize(
    "kernel, given",
    [("_pack_mask_kernel", dict(mask="rows")),
     pytest.param("_list_tiles_kernel", dict(size=(64, 192), **BANDS["both"]), marks=SWEPT),
     *[pytest.param(*x, marks=on_every_triton) for x in (
         ("_pack_mask_kernel", dict(mask="keys")), ("_pack_mask_kernel", dict(mask="transposed")),
         ("_list_tiles_kernel", dict(mask="rows", **BANDS["both"])),
         ("_rank_tiles_kernel", dict(mask="rows")),
         ("_list_tiles_kernel", dict(mask="rows", size=(192, 128), full=False, **BANDS["both"])),
     )]],
)  # fmt: skip
def test_what_is_made_of_mask_and_lists_compiles(kernel, given):
    """Each load has a mask: the last tile has rows that no list is for."""
    compiled = noted.kernel(kernel, noted.sdpa, (9, 0), "sage2-8b-per-token", warpgroups=3, **given)
    assert stack_bytes(compiled.asm["cubin"]) == 0
    loads = re.findall(r"tt\.load ([^:{]*)", compiled.asm["ttir"])
    assert loads and all("," in operands for operands in loads), loads


@pytest.mark.parametrize(
    "heads, num_m, group",
    [
        (1, 683, 1), (1, 1024, 1), (2, 683, 1), (6, 343, 3), (7, 343, 2), (24, 171, 12),
        (3, 320, 2), (9, 121, 5), (5, 256, 3), (6, 209, 3),
    ],
)  # fmt: skip
def test_tiles_of_a_causal_call_are_dealt_about_equally(heads, num_m, group, monkeypatch):
    monkeypatch.setattr(hopper.tl, "minimum", min)  # of ints
    programs, found = 132, []
    for t in range(heads * num_m):
        found.append(hopper._head_and_tile.fn(t, num_m, heads, group))
    assert sorted(found) == [(head, m) for head in range(heads) for m in range(num_m)]
    busy = [sum(m + 1 for _, m in found[program::programs]) for program in range(programs)]
    assert max(busy) <= 1.06 * sum(busy) / programs


@pytest.mark.parametrize(
    "heads, of_one_kv, N, most, group",
    [
        (1, 1, 68441, None, 1),
        (3, 1, 61427, None, 2),  # 30 of 48 MB
        (3, 1, 107904, None, 1),  # 53 MB: three groups and an empty one
        (5, 1, 49116, None, 3),
        (9, 1, 23232, None, 5),
        (10, 5, 61427, None, 5),  # of two of k and v
        (9, 1, 41000, None, 2),  # 50 MB: two heads in 24
        (64, 1, 16384, None, 6),
        (128, 1, 8192, None, 11),
        (9, 1, 100, 4, 3),  # by lists: three groups and an empty one
        (0, 1, 100, None, 0),
    ],
)
def test_causal_heads_are_in_groups_that_l2_holds(heads, of_one_kv, N, most, group):
    assert plan._heads_of_a_group(heads, of_one_kv, N * 2 * 128, most) == group


@pytest.mark.parametrize("processors", [1, 7, 132])
def test_shares_of_blocks_are_equal_and_make_up_the_tiles(processors):
    for num_tiles in (1, 5, 131, 132, 133, 200, 576):
        for blocks in (1, 7, 36, 600):
            shared = tiles.schedule(num_tiles, blocks, processors)
            if shared is None:
                continue
            programs, whole = shared
            assert 1 <= programs <= processors and 0 <= whole < num_tiles
            dealt = (num_tiles - whole) * blocks
            shares = [(c + 1) * dealt // programs - c * dealt // programs for c in range(programs)]
            assert sum(shares) == dealt and max(shares) - min(shares) <= 1
            assert whole % programs == 0 and min(shares) >= min(tiles.MIN_BLOCKS_OF_A_PIECE, dealt)
            longest = whole // programs * blocks + max(shares)
            assert longest <= -(-num_tiles // processors) * blocks - tiles.MIN_BLOCKS_SAVED + 1
    assert tiles.schedule(10 * processors, 600, processors) is None
    assert (tiles.schedule(5, 600, processors) is None) == (processors == 1)


@functools.cache
def calls():
    """(AttentionCall, whether the Hopper kernel computes it)."""
    q, k, v = (torch.randn(2, 300, 4, 128, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3))
    wide = torch.empty(2, 300, 4, 129, dtype=torch.bfloat16).transpose(1, 2)
    every = torch.ones(2, 1, 1, 300, dtype=torch.bool)
    mask, bias = (Visibility.of(x, (None, None, False), 300, 64) for x in (every, every.bfloat16()))
    lists = torch.ones(1, 1, 3, dtype=torch.int32), torch.ones(1, 1, 3, 2, dtype=torch.int32)
    lists = BlockLists(*lists, block_q=128, block_kv=128)
    apart = torch.empty(*q.shape, 2, dtype=q.dtype)[..., 0]

    def call(recipe="sage2-8b-per-token", visibility=None, **given):
        return attention_call(q, k, v, recipe, visibility)._replace(**given)

    def of_v(v):
        return call("sage1-per-token", v=v), False

    return {
        "full": (call(), True),
        "causal": (call(right=0), True),
        "fp16": (call(q=q.half()), True),
        "16-bit v": (call("sage1-per-token"), True),
        "INT4 k": (call("sage2-4b"), False),
        "FP8 k": (call("sage2-8b-fp8qk"), False),
        "another granularity": (call("sage2-8b"), False),
        "a mask": (call(visibility=mask), True),
        "a mask and a band": (call(visibility=mask, right=0), True),
        "a bias": (call(visibility=bias), False),
        "16-bit v with a mask": (call("sage1-per-token", mask), False),
        "block lists": (call(visibility=Visibility(blocks=lists)), True),
        "a window": (call(left=9, right=0), True),
        "16-bit v in a window": (call("sage1-per-token", left=9, right=5), True),
        "a wider band": (call(right=1), True),
        "bottom right": (call(right=0, bottom_right=True), True),
        "fp32": (call(q=q.float()), False),
        "q's channels apart": (call(q=apart), False),
        "v's rows unaligned": of_v(wide[..., :128]),
        "v's channels unaligned": of_v(v[..., 1:]),
        "v expanded": of_v(v[:, :1].expand(-1, 4, -1, -1)),
    }


@pytest.mark.parametrize("name", calls())
def test_hopper_kernel_takes_the_calls_it_computes_by_the_tile_that_is_chosen(name):
    a, computes = calls()[name]
    is_causal = (a.left, a.right) == (None, 0)
    fp8 = computes and a.decoded.pv == "fp8" and a.blocks.size is None  # 16 bits: all of 3
    with noted.here((9, 0)):
        of_table = hopper_tile(a)
        assert (of_table is not None) == computes
        for warpgroups in (1, 2, 3):
            tile = hopper_tile(a._replace(warpgroups=warpgroups))
            if fp8 and not (is_causal and warpgroups == 2):
                assert tile.warpgroups == warpgroups and tile.BLOCK_M == 64 * warpgroups
            else:
                assert tile == of_table
        assert hopper_tile(a._replace(warpgroups=0)) is None
    with noted.here((8, 9)):
        assert hopper_tile(a._replace(warpgroups=3)) is None


def test_one_warpgroup_is_a_program_for_each_tile():
    """Two and three deal their tiles, or shares of them, to as many programs as run at once."""
    q, k, v = (torch.randn(1, 2, N, 64, dtype=torch.bfloat16) for N in (6000, 2500, 2500))
    programs = {}
    for warpgroups in (1, 3):
        for band in ((None, None), (None, 0), (99, 0)):
            visible = Visibility(band=Band(*band))
            a = attention_call(q, k, v, "sage2-8b-per-token", visible)
            tile = tiles.hopper((9, 0), "fp8", 64, False, tiles.ANY, warpgroups)
            first, *more = noted.launches(plan.launch, (9, 0), a, tile, run)
            whole = first.arguments[first.kernel.arg_names.index("whole_tiles")]
            programs[warpgroups, band] = first.grid[0], whole, len(more), first.options["maxnreg"]
    of_3 = (64, 64, 0, 128)  # 32 tiles a head
    assert programs == {
        **dict.fromkeys([(1, (None, None)), (1, (None, 0)), (1, (99, 0))], (188, 188, 0, 128)),
        (3, (None, None)): (132, 0, 1, 128), (3, (None, 0)): of_3, (3, (99, 0)): of_3,
    }  # fmt: skip


@pytest.mark.parametrize("recipe, capability, mask, kernel, capped", [
    ("sage2-8b", (9, 0), None, portable, True),
    ("sage2-8b", (8, 9), None, portable, False),
    ("sage2-4b", (9, 0), "keys", portable, False),
    ("sage3", (9, 0), None, nvfp4, False),
    ("sage2-8b-per-token", (9, 0), None, hopper, True),
    ("sage2-8b-per-token", (9, 0), "bias", portable, True),
])  # fmt: skip
def test_what_computes_a_call(recipe, capability, mask, kernel, capped):
    *_, of_call = noted.launches(noted.sdpa, capability, recipe, mask=mask)
    assert of_call.kernel.__module__ == kernel.__name__
    assert ("maxnreg" in of_call.options) == capped


def test_warpgroups_name_a_tile():
    """In a call: so none of its tiles may have another's."""
    assert all(tiles.ANY.reaches(row[3]) for row in tiles.HOPPER)
    for pv, head_dim, is_causal, *_ in tiles.HOPPER:
        rows = {row[-1] for row in tiles.HOPPER if row[:3] == (pv, head_dim, is_causal)}
        named = {tile.warpgroups: tile for tile in rows}
        assert len(named) == len(rows) and named.keys() <= {1, *plan.REGISTERS}
        for n, tile in named.items():
            assert n in tiles.WARPGROUPS
            for load in (Load(), tiles.ANY):
                assert tiles.hopper((9, 0), pv, head_dim, is_causal, load, n) == tile
    # A choice of what is not there is the table's.
    of_256 = tiles.hopper((9, 0), "fp8", 256, False, tiles.ANY)
    assert (
        tiles.hopper((9, 0), "fp8", 256, False, tiles.ANY, 3) == of_256 and of_256.warpgroups == 2
    )


BAND = Band(700, 500)


@pytest.mark.parametrize(
    "D, heads, N_q, N_kv, band, masked, warpgroups",
    [
        (64, 99, 9999, 6143, FULL, False, 1), (64, 99, 9999, 6144, FULL, False, 3),
        (64, 100, 1472, 6144, FULL, False, 3),  # 23 tiles of 64 rows, 8 of 192: 95 %
        (64, 100, 1408, 6144, FULL, False, 1),  # 22 and 8: 91 %
        (64, 132, 128, 4608, FULL, False, 3),  # 66 %, but two tiles of 64 rows a processor
        (64, 133, 128, 4608, FULL, False, 1), (64, 132, 128, 4607, FULL, False, 1),
        (64, 1, 4224, 3000, FULL, False, 3),  # four processors a tile of 128 rows
        (64, 1, 4225, 3000, FULL, False, 1), (64, 1, 4224, 2999, FULL, False, 1),
        (64, 3, 6358, 5119, FULL, False, 1),
        (64, 3, 6358, 5120, FULL, False, 3),  # 102 tiles of 192 rows, 150 of 128: at once or not
        (64, 99, 14334, 14334, CAUSAL, False, 1),
        (64, 6, 14336, 14336, CAUSAL, False, 1),  # few pairs
        (64, 7, 14336, 14336, CAUSAL, False, 3),
        (64, 99, 99999, 99999, (98000, 302), False, 1),  # one key in 16 counts
        (64, 99, 99999, 99999, (98000, 303), False, 3),
        (64, 16, 9999, 2560, FULL, True, 3),  # 20 tiles of 64 rows a processor, 7 of 192: 95 %
        (64, 16, 9999, 2559, FULL, True, 1), (64, 15, 9999, 2560, FULL, True, 1),  # 18 and 7: 85 %
        (64, 2, 36000, 36000, FULL, True, 3),  # 9 and 3
        (64, 3, 37000, 4000, FULL, True, 1),  # 14 and 5: 93 %
        (64, 4, 34000, 4000, FULL, True, 3),  # 17 and 6: 94 %
        (128, 2, 30000, 4000, FULL, True, 1),  # 8 and 3: 88 %
        (128, 3, 37000, 4000, FULL, True, 3), (64, 1, 100, 1024, FULL, True, 1),
        (64, 1, 100, 1023, FULL, True, 0),  # few keys and few pairs
        (64, 33, 1024, 1024, FULL, True, 1), (64, 33, 1024, 1023, FULL, True, 0),
        (64, 34, 1024, 1023, FULL, True, 1), (64, 1, 100, 100, (20, 20), False, 1),
        (128, 999, 6336, 447, FULL, False, 1), (128, 537, 6336, 448, FULL, False, 3),
        (128, 536, 6336, 448, FULL, False, 1),  # few pairs
        (128, 2500, 1408, 448, FULL, False, 1),  # 91 %
        (128, 68, 2100, 2943, FULL, False, 1), (128, 68, 2100, 2944, FULL, False, 3),
        (128, 67, 2100, 2944, FULL, False, 1),  # few pairs
        (128, 100, 1472, 3000, FULL, False, 3), (128, 100, 1408, 3000, FULL, False, 1),  # 91 %
        (128, 100, 1408, 3583, FULL, False, 1), (128, 100, 1408, 3584, FULL, False, 3),
        (128, 100, 1024, 3584, FULL, False, 1),  # 88 %
        (128, 33, 2047, 4096, FULL, False, 1),  # few pairs
        (128, 33, 2048, 4096, FULL, False, 3), (128, 1, 4224, 2047, FULL, False, 1),
        (128, 1, 4224, 2048, FULL, False, 2),  # four processors a tile of 128 rows
        (128, 1, 4225, 2048, FULL, False, 1), (128, 2, 8448, 4095, FULL, False, 1),
        (128, 2, 8448, 4096, FULL, False, 2),  # two tiles of 64 rows a processor
        (128, 2, 8449, 4096, FULL, False, 1),
        (128, 2, 8448, 4096, FULL, True, 1),  # whose tiles are not shared
        (128, 1, 8448, 70000, (65535, 0), False, 1), (128, 3, 8960, 5631, FULL, False, 1),
        (128, 3, 8960, 5632, FULL, False, 3), (128, 16, 1408, 5632, FULL, False, 3),  # 91 %
        (128, 34, 1024, 5632, FULL, False, 1),  # 88 %
        (128, 2, 8448, 7167, FULL, False, 2), (128, 2, 8448, 7168, FULL, False, 3),
        (128, 11, 1408, 8000, FULL, False, 2),  # 91 %
        (128, 132, 128, 16383, FULL, False, 2),
        (128, 132, 128, 16384, FULL, False, 3),  # 66 %, but many pairs
        (128, 3, 6358, 5119, FULL, False, 1),
        (128, 3, 6358, 5120, FULL, False, 3),  # 102 tiles of 192 rows, 150 of 128: at once or not
        (128, 2, 6358, 6358, FULL, False, 2),  # one round by either
        (128, 3, 6358, 6358, FULL, True, 3),  # 3 tiles of 64 rows a processor, 1 of 192
        (128, 99, 5631, 5631, CAUSAL, False, 1),
        (128, 43, 5632, 5632, CAUSAL, False, 1),  # few pairs
        (128, 44, 5632, 5632, CAUSAL, False, 3), (128, 60, 8000, 2559, FULL, True, 1),
        (128, 60, 8000, 2560, FULL, True, 3),  # 57 tiles of 64 rows a processor, 20 of 192
        (128, 1, 36000, 36000, FULL, True, 1),  # 5 and 2
        (128, 2, 36000, 36000, FULL, True, 3),  # 9 and 3
        (128, 2, 36000, 36000, (9000, 9000), True, 1),
        (128, 99, 99999, 99999, (57342, 0), False, 1),
        (128, 99, 99999, 99999, (57343, 0), False, 3),
        (128, 99, 99999, 57343, (90000, 90000), False, 1),  # fewer keys than the band is wide
        (128, 99, 99999, 57344, (90000, 90000), False, 3),
        (128, 1, 1920, 99999, (90200, 0), False, 1),  # few pairs
        (128, 0, 896, 896, FULL, False, 1),  # nothing
        (256, 1, 1, 1, FULL, False, 2),
    ],
)  # fmt: skip
def test_a_calls_load_chooses_its_tile(D, heads, N_q, N_kv, band, masked, warpgroups, monkeypatch):
    monkeypatch.setattr(gpus, "processors", lambda device: 132)
    mask = (1, 1, N_q, N_kv) if masked else None
    shape = CallShape(torch.device("cuda"), torch.bfloat16, (1, heads, N_q, D), (1, heads, N_kv, D),
                      (1, heads, N_kv, D), Band(*band), mask)  # fmt: skip
    load = Load.of(shape)
    tile = tiles.hopper((9, 0), "fp8", D, shape.band == CAUSAL, load)
    assert (tile.warpgroups if tile else 0) == warpgroups


def test_hopper_kernel_falls_back_where_gluon_is_another(monkeypatch, caplog):
    assert tiles.hopper((9, 0), "fp8", 128, False, tiles.ANY)
    assert tiles.hopper((10, 0), "fp8", 128, False, tiles.ANY) is None
    assert tiles.hopper((9, 0), "16bit", 256, False, 4096) is None
    assert tiles.hopper_unavailable((9, 0)) is None and not caplog.records
    for version in ("3.5.1", "3.10.0+git1234", "4.6.0"):
        monkeypatch.setattr(triton, "__version__", version)
        assert tiles.hopper_unavailable((10, 0)) is None
        lost = tiles.hopper_unavailable((9, 0))
        assert f"with Triton 3.6 to 3.9, not {version}: calls run in the portable kernel" in lost
        assert tiles.hopper((9, 0), "fp8", 128, False, tiles.ANY) is None, version
        assert tiles.hopper((9, 0), "fp8", 128, False, tiles.ANY, 3) is None, version
        assert tiles.rivals((9, 0), "fp8", 128, False) == (None,), version
        assert not caplog.records  # a question says nothing, whoever asks it first
        for capability, recipe in (
            ((10, 0), "sage2-8b-per-token"), ((9, 0), "sage2-8b"), ((9, 0), "sage2-8b-per-token"),
            ((9, 0), "sage2-8b-per-token"),
        ):  # fmt: skip
            noted.launches(noted.sdpa, capability, recipe)
        assert [x.getMessage() for x in caplog.records] == [lost]  # a launch does, once
        caplog.clear()
    for version in ("3.6.0", "3.8.0+git1234", "3.9.1"):
        monkeypatch.setattr(triton, "__version__", version)
        assert tiles.hopper((9, 0), "fp8", 128, False, tiles.ANY), version
    assert not caplog.records


@pytest.mark.parametrize(
    "name", ["gluon", "aggregate", "gluon_barrier", "reinterpret", "tma_load", "GluonDescriptor"]
)
def test_a_name_of_gluon_that_is_gone_costs_the_hopper_kernel_alone(name, monkeypatch):
    tiles._unavailable.cache_clear()
    monkeypatch.setattr(compat, name, None)
    assert "the Hopper kernel is tested with" in tiles.hopper_unavailable((9, 0))
    tiles._unavailable.cache_clear()


def test_every_row_is_the_tile_of_the_calls_that_it_names():
    for capability, formats, head_dim, masked, tile in tiles.TILES:
        *qk, pv = formats.split()
        found = tiles.tile(capability, *(qk or ["int8"]), pv, head_dim, bool(masked))
        assert found == tile, (capability, formats, head_dim, masked)


def test_fp8_recipes_are_refused_before_sm_89():
    for architecture in ((8, 0), (8, 6)):
        with pytest.raises(ValueError, match="no kernel for pv='fp8'"):
            tiles.tile(architecture, "int8", "fp8", 128, False)


# -- nvfp4.py ----


BLOCK_SCALED = {
    (10, 0): "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale."
    + ("block16" if TRITON >= (3, 8) else "scale_vec::4X"),
    (12, 0): "m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3",
}


KINDS_OF_NVFP4 = {each: KINDS[each] | {"D": 128} for each in ("causal", "mask", "bias", "window")}
KINDS_OF_NVFP4 |= {f"causal of {D}": dict(D=D, right=0) for D in (64, 256)}


@picked(
    ((8, 6), "mask"),
    tritons=[((10, 0), "causal of 64"), ((12, 0), "mask")],
    architecture=ARCHITECTURES, kind=KINDS_OF_NVFP4,
)  # fmt: skip
def test_nvfp4_compiles_to_block_scaled_products_or_to_fp16(architecture, kind):
    compiled = attention_of(architecture, "sage3", **KINDS_OF_NVFP4[kind])
    ptx = compiled.asm["ptx"]
    products = re.findall(r"\s((?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\..*?) ", ptx)
    native = architecture in BLOCK_SCALED
    meant = BLOCK_SCALED.get(architecture) or ".f32.f16.f16"
    assert products and all(meant in x for x in products), set(products)
    assert ("cvt.rn.satfinite.e2m1x2.f32" in ptx) == native
    assert compiled.metadata.shared <= SHARED_MEMORY[architecture]
    stack = stack_bytes(compiled.asm["cubin"])
    if not kind.startswith("causal"):
        # With Triton 3.8 up to 648 on sm_100, with 3.7 and 3.9 344.
        assert stack <= (648 if architecture == (10, 0) and TRITON == (3, 8) else 344)
    else:
        # Registers hold p in fp32 beside the accumulator: with 256 channels, more than there are.
        assert stack <= (1280 if kind == "causal of 256" else 32)
    if architecture == (10, 0):
        # Triton 3.7 leaves the scales of a product that starts from a known 0 uninitialized.
        ir = compiled.asm["ttgir"].splitlines()
        (name,) = (x.split()[0] for x in ir if "= #ttng.tensor_memory_scales_encoding" in x)
        scales = [x for x in ir if "tmem_alloc" in x and f"{name}," in x]
        assert len(scales) >= 4 and all("tmem_alloc %" in x for x in scales), scales


# -- k and v ----

# Of sage::decode: each width of a tile of rows, of channels and of codes.
CACHES = {
    "16 bits": dict(left=100), "mask": dict(masked=True, N_q=4), "64 rows": dict(N_q=16), "256 channels": dict(D=256, N_q=8),
    "INT8": dict(codes=torch.int8, D=80), "INT8, 64 rows": dict(codes=torch.int8, N_q=16, rotated=True),
    "E4M3": dict(codes=torch.float8_e4m3fn, dtype=torch.float16, D=80),
    "E4M3, 256 channels": dict(codes=torch.float8_e4m3fn, D=256, N_q=16),
}  # fmt: skip
# What has one loop, or none: the kernel, what launches it, and how.
SHORT = {
    "largest": ("_largest_kernel", noted.largest, {}),
    "listed": ("_listed_kernel", noted.listed, dict(which=1)),
    **{f"cache, {name}": ("_decode_kernel", noted.decode, given) for name, given in CACHES.items()},
    "splits": ("_combine_splits_kernel", noted.decode, dict(D=256)),
    **{f"append, D={D}": ("_append_kv_kernel", noted.append, dict(D=D, **given)) for D, given in (
        (64, {}), (80, dict(D_v=128)), (128, dict(dtype=torch.float16)), (256, dict(n=20)))},
    **{f"lse, D={D}": ("_unsmooth_kernel", noted.unsmooth, dict(D=D)) for D in (32, 64, 80, 256)},
    **{f"NVFP4, D={D}{', along N' * along_n}":
           ("_quantize_kernel", noted.sdpa, dict(recipe="sage3", D=D, which=along_n))
       for D in (8, 128, 256) for along_n in (False, True)},
    # The sum of a split tile's pieces.
    "pieces": ("_combine_kernel", noted.hopper, dict(tile=tiles.THREE, pv="fp8", lengths=noted.SPLIT)),
    "pieces, training": ("_combine_kernel", noted.rowscaled, dict(lengths=noted.SPLIT)),
}  # fmt: skip


@picked(
    ((8, 6), "largest"), ((9, 0), "listed"), ((8, 0), "lse, D=256"), ((12, 0), "lse, D=80"), ((8, 6), "NVFP4, D=128"),
    ((10, 0), "NVFP4, D=256, along N"), ((9, 0), "cache, INT8"), ((12, 0), "cache, 256 channels"),
    ((8, 0), "append, D=64"), ((9, 0), "append, D=256"), ((12, 0), "append, D=128"),
    tritons=[
        ((12, 0), "largest"), ((9, 0), "lse, D=32"), ((9, 0), "NVFP4, D=8"),
        ((12, 0), "NVFP4, D=8, along N"), ((9, 0), "pieces"), ((9, 0), "pieces, training"),
        ((8, 0), "cache, INT8, 64 rows"), ((9, 0), "cache, E4M3"), ((12, 0), "cache, 64 rows"),
        ((8, 9), "splits"), ((9, 0), "append, D=80"), ((12, 0), "append, D=256"),
    ],
    where=lambda architecture, kernel: (
        (architecture == (9, 0) or "pieces" not in kernel)
        and (architecture >= (8, 9) or "E4M3" not in kernel)
    ),
    architecture=ARCHITECTURES, kernel=SHORT,
)  # fmt: skip
def test_short_kernels_spill_nothing(architecture, kernel):
    name, call, given = SHORT[kernel]
    compiled = noted.kernel(name, call, architecture, **given)
    stack = 256 if kernel.startswith("NVFP4, D=256") else 8 if kernel.startswith("cache") else 0
    assert stack_bytes(compiled.asm["cubin"]) <= stack
    assert compiled.metadata.shared <= SHARED_MEMORY[architecture]
    if kernel.startswith("cache"):
        assert re.search(r"mma\S*(\.bf16|\.f16|::f16)", compiled.asm["ptx"])


def test_a_cache_without_room_fails_an_assertion():
    """On the device, where its length is. No Triton compiles one unless it is asked to."""
    ptx = noted.kernel("_append_kv_kernel", noted.append, (9, 0)).asm["ptx"]
    assert "__assertfail" in ptx
    assert ptx.count("assertMessage_0[") == 1 and "assertMessage_1" not in ptx  # none of overflows


def of_k(recipe):
    return "_quantize_k_kernel", lambda x, visible, pdl: keys.launch_k(
        x, x[:, :, 0].float(), NAMED[recipe], visible, run, pdl
    )


def of_both(recipe="sage2-8b-per-token"):
    return lambda x, visible, pdl: one_pass.launch_kv(x, x, visible, NAMED[recipe], run, pdl)


def smoothed(x, visible, pdl=False):
    return smooth.launch_smooth([x, x], visible, 1, run)


def of_v(x, visible, pdl):
    mean, amax, *_ = smoothed(x, visible)
    return values.launch_v(x, mean, amax, NAMED["sage2-8b"], visible is not None, run)


# The kernel, and what launches it, of k or v, the rows that count, and whether kernels overlap.
PREPARATION = {
    "smooth": ("_partial_kernel", smoothed), "smooth's end": ("_final_kernel", smoothed),
    "estimate": ("_estimate_kernel", of_both()), "v": ("_quantize_v_kernel", of_v),
    "v again": ("quantize_v_again_kernel", of_both()), "kv": ("_quantize_kv_kernel", of_both()),
    "kv, FP8": ("_quantize_kv_kernel", of_both("sage2-8b-fp8qk")), "k": of_k("sage1"),
    "kv, rotated": ("_quantize_kv_kernel", of_both("sage2-8b-rotated")),
    "k, rotated": of_k("sage1-rotated"),
    "k, 4 scales": of_k("sage2-8b"), "k, INT4": of_k("sage2-4b"), "k, FP8": of_k("sage2-8b-fp8qk"),
    "pool": ("_pool_kernel", lambda x, visible, pdl: blocks_of_tokens.pool_blocks(x, None, 128)),
}  # fmt: skip


def preparation_of(name, architecture, D, masked=False, pdl=False):
    kernel, launch = PREPARATION[name]
    x, visible = noted.qkv(D)[1], noted.rows_of(noted.LENGTHS[1], noted.B, 1) if masked else None
    return noted.kernel(kernel, launch, architecture, x, visible, pdl)


@chosen(
    lambda kernel, D: D == (1 if kernel in ("attention", "v again") else 80),
    kernel=["k, FP8", "kv, FP8", "v again", "attention"], D=[1, 8, 80],
)  # fmt: skip
def test_no_conversion_to_fp8_merges_with_an_unrelated_register(kernel, D):
    """A conversion of two numbers makes 16 bits; with another's, 32. Where ptxas (CUDA 12.8) knows
    the two to be equal, as zeros of padded channels are, it puts any register in the other's place.
    """
    if kernel == "attention":
        compiled = attention_of((9, 0), "sage2-8b-fp8qk", pointers=True, D=D, right=0)
    else:
        compiled = preparation_of(kernel, (9, 0), D)
    writer, conversions = {"RZ": "zero"}, 0
    for line in about(compiled.asm["cubin"], "nvdisasm", "-c").splitlines():
        instruction = re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@\S+ )?(\S+) (R\d+)(.*?)\s*;", line)
        if instruction is None:
            continue
        name, target, rest = instruction.groups()
        if name == "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C":
            other = writer.get(rest.split(", ")[-1].removesuffix(".reuse"), "")
            assert other == "zero" or "E4M3" in other, (line, other)
            conversions += 1
        writer[target] = name
    assert conversions >= 8


@pytest.mark.parametrize("recipe", ["sage1", pytest.param("sage1-per-token", marks=SWEPT)])
def test_no_byte_is_stored_of_a_float(recipe):
    """The low byte of a sum is the quantized number, but the ptxas of CUDA 12.8 stores F2IP.U8 of a
    register that it has seen written by a float's instruction: 255. It happened where heads of q
    start anywhere, as of 36 channels side by side, so that a thread has single bytes of a row.
    """
    compiled = attention_of((9, 0), recipe, pointers=True, D=36, right=0)
    writer, bytes_stored = {}, 0
    for line in compiled.asm["ptx"].splitlines():
        name, *operands = re.sub("[,;]", " ", line.replace("::cta", "")).split() or [""]
        if name in ("st.shared.b8", "cvt.s8.s32"):  # one (Triton 3.6), the other first (3.7)
            assert ".f32" not in writer[operands[-1]], line
            bytes_stored += name == "st.shared.b8"
        if len(operands) > 1:
            writer[operands[0]] = name
    assert bytes_stored > 0


@pytest.mark.parametrize("kernel", ["hopper", "attention", "kv", "pool", "k", "smooth"])
def test_rows_of_72_channels_are_read_16_bytes_at_a_time(kernel):
    """Strides come doubled, so 16 divides them: test_launch.py."""
    if kernel == "hopper":
        compiled = hopper_of(tiles.hopper((9, 0), "fp8", 72, False, Load()), "fp8", D=72)
    elif kernel == "attention":
        compiled = attention_of((9, 0), "sage2-8b-per-token", pointers=True, D=72, right=0)
    else:
        compiled = preparation_of(kernel, (9, 0), 72)
    ptx = compiled.asm["ptx"]
    assert "ld.global.v4.b32" in ptx and not re.search(r"[ls][dt]\.global\.b16", ptx)


@picked(
    ((8, 0), 128, 128, False), ((12, 0), 80, 64, True),
    tritons=[((10, 0), 128, 64, True)],
    where=lambda block, shift: shift == (block == 64),
    architecture=ARCHITECTURES, D=[80, 128, 256], block=[128, 64], shift=[False, True],
)  # fmt: skip
def test_pooling_compiles_to_loads_of_16_bytes(architecture, D, block, shift):
    compiled = noted.kernel("_pool_kernel", noted.pool, architecture, D, block, shift)
    assert stack_bytes(compiled.asm["cubin"]) == 0
    threads = 32 * blocks_of_tokens.pool_warps(pad_head_dim(D))
    assert compiled.asm["ptx"].count("ld.global.v4.b32") * threads * 8 >= block * D


OVERLAP = {"estimate", "v again", *[name for name in PREPARATION if name.startswith("k")]}
OF_FP8 = {"v", "v again", "kv", "kv, rotated", "k, FP8"}


@pairs(
    where=lambda architecture, kernel: (
        kernel not in ("pool", "kv, FP8") and (architecture >= (8, 9) or kernel not in OF_FP8)
    ),
    alike=dict(
        architecture=lambda a: a >= (9, 0), D=lambda D: D == 256,
        kernel=lambda name: PREPARATION[name][0],
    ),
    **chosen_for_tritons(
        ("smooth", (8, 0), 128, False), ("smooth's end", (8, 6), 128, False),
        ("estimate", (9, 0), 128, True), ("v", (10, 0), 128, False),
        ("v again", (12, 0), 128, True), ("kv", (8, 9), 256, True), ("k", (9, 0), 128, False),
        ("k, 4 scales", (8, 0), 128, True), ("k, INT4", (8, 6), 64, False),
        ("k, FP8", (10, 0), 128, False), ("kv, rotated", (10, 0), 256, True),
    ),
    kernel=PREPARATION, architecture=ARCHITECTURES, D=[64, 80, 128, 256], masked=[False, True],
)  # fmt: skip
def test_preparation_compiles(kernel, architecture, D, masked):
    """From sm_90 on, kernels overlap where they may. The first waits for who wrote k and v before it
    lets the second start, which reads rows of theirs and waits for the estimate; nothing is stored
    by who has not waited."""
    overlaps = kernel in OVERLAP and architecture >= (9, 0)
    compiled = preparation_of(kernel, architecture, D, masked, overlaps)
    # Of one kernel, rotated or not, Triton 3.6 spills two registers.
    spills = (TRITON, architecture, D, masked) == ((3, 6), (8, 9), 256, True)
    allowed = 8 if spills and kernel in ("kv", "kv, rotated") else 0
    if kernel.endswith("rotated") and architecture == (10, 0):
        allowed = 48  # k of 256 channels, 32 with Triton 3.6; both of 64 channels: 16
    if (kernel, D) == ("v", 256):
        # Four warps hold 128 rows, 256 numbers a thread: 1080 bytes on sm_89 and sm_90 where keys
        # are hidden, else 368. Eight would spill nothing (untimed).
        allowed = 1088 if masked and architecture < (10, 0) else 384
    assert stack_bytes(compiled.asm["cubin"]) <= allowed
    wait, launch = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
    found = re.findall("|".join((wait, launch, "ld.global", "st.global")), compiled.asm["ptx"])
    if not overlaps:
        assert "griddepcontrol" not in compiled.asm["ptx"]
    elif kernel == "estimate":
        assert found[:3] == [wait, launch, "ld.global"]
    elif kernel == "v again":
        assert found[:2] == [wait, "ld.global"]
    else:
        first, *rest = " ".join(found).split(wait)
        # One for rows of k and one for rows of v.
        assert len(rest) == (2 if kernel.startswith("kv") else 1) and launch not in found
        assert set(first.split()) == {"ld.global"}
        assert all(part.split()[0] == "ld.global" for part in rest)
        assert all(part.split()[-1] == "ld.global" for part in rest[:-1])


def test_every_kernel_compiles_with_the_oldest_and_the_newest_triton():
    """By the Makefile, which runs the tests marked "tritons" under each."""
    (line,) = re.findall(r"^TRITONS := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert tuple(tuple(map(int, each.split(".")[:2])) for each in line.split()) == compat.GLUON


def test_the_kernel_is_that_of_the_wider_head_dim(monkeypatch):
    asked, recipe = [], NAMED["sage2-8b"]
    monkeypatch.setattr(of_sdpa, "select", lambda *given: asked.append(given) or select(*given))
    for D, D_v in ((64, 200), (200, 64)):
        q, v = torch.randn(1, 2, 8, D), torch.randn(1, 2, 8, D_v)
        seen = of_sdpa._visibility(q, v, None, FULL, recipe, BlockLists(), None)
        a = of_sdpa.attention_call(q, q, v, None, seen, 1.0, recipe)
        assert asked.pop() == (None, recipe, 200, False, None, False)
        shape = a.shape(q.device)
        assert (shape.head_dim, shape.capability, shape.q[3], shape.v[3]) == (200, None, D, D_v)


TRAINING = {  # sage::sagebwd's kernels, which launch of it, and whether it computes dP, in 16 bits
    "forward": ("_forward_kernel", 0, False), "dq": ("_dq_kernel", 0, True),
    "dk": ("_over_rows_kernel", 0, True), "dv": ("_over_rows_kernel", 1, False),
}  # fmt: skip


@picked(
    ((9, 0), "dq", 128),
    tritons=[((9, 0), "forward", 128), ((12, 0), "dq", 64), ((10, 0), "dk", 64), ((8, 0), "dv", 64)],
    architecture=ARCHITECTURES, name=TRAINING, D=[64, 128],
)  # fmt: skip
def test_training_compiles_to_the_matrix_instructions(architecture, name, D):
    kernel, which, is_16_bit = TRAINING[name]
    compiled = noted.kernel(kernel, noted.sagebwd, architecture, D, True, which=which)
    assert compiled.metadata.shared <= SHARED_MEMORY[architecture]
    # 0 on sm_90. 1400 where dK and dV were one kernel.
    assert stack_bytes(compiled.asm["cubin"]) <= (0 if architecture == (9, 0) else 128)
    ptx = compiled.asm["ptx"]
    if architecture == (9, 0):
        assert "wgmma.mma_async.sync.aligned" in ptx and ".s32.s8.s8" in ptx
        assert (".f32.bf16.bf16" in ptx) == is_16_bit and "mma.sync" not in ptx
    else:
        assert "s8.s8" in ptx or "kind::i8" in ptx
        assert is_16_bit == ("bf16.bf16" in ptx or "kind::f16" in ptx)


@pytest.mark.parametrize("causal", [False, pytest.param(True, marks=on_every_triton)])
@pytest.mark.parametrize("kernel", ["_rows_kernel", "_turn_kernel"])
def test_codes_of_the_row_scaled_backward_are_read_and_stored_16_bytes_at_a_time(kernel, causal):
    compiled = noted.kernel(kernel, noted.rowscaled, (9, 0), 80, causal)
    ptx = compiled.asm["ptx"]
    of_rows = {"b32", "v2.b32"}
    if kernel == "_turn_kernel":  # by products, whose operands are copied to shared memory
        assert "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8" in ptx
        assert set(re.findall(r"cp\.async\.cg\.shared\.global \[.*?\], \[.*?\], (\S+),", ptx)) == {
            "0x10"
        }
        assert set(re.findall(r"ld\.global\.(\S+)", ptx)) <= of_rows
    else:
        assert set(re.findall(r"ld\.global\.(\S+)", ptx)) - of_rows == {"v4.b32"}
    assert set(re.findall(r"st\.global\.(\S+)", ptx)) - of_rows == {"v4.b32"}
    assert stack_bytes(compiled.asm["cubin"]) == 0


@on_every_triton
@pytest.mark.parametrize("kernel, which", [("_quantize_kernel", 3), ("_turn_kernel", 0)])
def test_transposed_codes_are_stored_16_bytes_at_a_time(kernel, which):
    """Of dO, and of k."""
    compiled = noted.kernel(kernel, noted.sagebwd, (9, 0), 80, which=which)
    assert re.search(r"st\.global\.v[24]\.b32", compiled.asm["ptx"])
    assert stack_bytes(compiled.asm["cubin"]) <= 16  # quantize: 16 with Triton 3.7


@picked(
    tritons=[("dq", True, 64, torch.bfloat16), ("dkdv", False, 64, torch.float16)],
    name=["dq", "dkdv"], causal=[False, True], D=[64, 72, 128], dtype=[torch.bfloat16, torch.float16],
)  # fmt: skip
def test_the_row_scaled_backward_compiles_without_spills_or_waits(name, causal, D, dtype):
    """ptxas serializes all wgmma of a kernel where it cannot follow them, and only its log says so.
    Causal, what it spills is of the blocks that are masked. dK's and dV's kernel starts when all of
    dQ's programs have, and ends after their end."""
    compiled = noted.kernel(f"{name}_kernel", noted.rowscaled, (9, 0), D, causal, dtype)
    ptx, cubin = compiled.asm["ptx"], compiled.asm["cubin"]
    products = set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\S+)", ptx))
    of_p = f"m64n{pad_head_dim(D)}k32.f32.e4m3.e4m3"
    assert products == {"m64n64k32.s32.s8.s8", of_p}
    assert "serialized" not in assembly_log(ptx)
    loops = loops_over_keys(cubin)
    newest = TRITON >= (3, 9)
    if causal and name == "dq":  # each second one is of the tile's own rows, one to four blocks
        assert all(spilled(x) <= (32 if newest else 8) for x in loops[1::2])
        loops = loops[::2]
    assert len(loops) == (3 if name == "dq" else 2) and not any(map(spilled, loops))
    allowed = (160 if newest else 64) if causal else 8 if newest else 0
    assert stack_bytes(cubin) <= allowed
    assert compiled.metadata.shared <= SHARED_MEMORY[9, 0]
    begins, ends = "griddepcontrol.launch_dependents", "griddepcontrol.wait"
    assert (ptx.count(begins), ptx.count(ends)) == ((1, 0) if name == "dq" else (0, 1))
    if name == "dq":
        assert ptx.index(begins) < ptx.index("mbarrier.init")
    else:
        assert ptx.rindex("cp.async.bulk.tensor") < ptx.index(ends)


def test_the_log_tells_of_waits():
    ptx = noted.kernel("dkdv_kernel", noted.rowscaled, (9, 0), 64, False, torch.float16).asm["ptx"]
    registers, fewer = (f"setmaxnreg.inc.sync.aligned.u32 \t{n};" for n in (240, 160))
    assert registers in ptx
    log = assembly_log(ptx.replace(registers, fewer))
    assert "wgmma.mma_async instructions are serialized" in log
