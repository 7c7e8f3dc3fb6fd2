"""Attention by lists of blocks: time against the share of blocks that the lists name.

$ python bench/lists.py          # on a GPU about two minutes
$ python bench/lists.py --json   # and bench/results/GPU/DATE-lists.json
$ python bench/lists.py --layout # tokens of a video in cubes of 4 x 4 x 4: less than a minute
$ python bench/lists.py --tail --json   # blocks that no list names have a tail; DATE-tail.json

Every block of keys is named with the same probability, by every block of queries of every head on
its own, and the one on the diagonal always. Without a probability: blocks of 64 tokens of a video,
those near in time, height and width, and 5 % of the others, as NABLA names them.

    dense    the kernel on the same tile without lists
    lists    the same kernel by lists, and what is made of them before
    op       lists, and the preparation of k and v: what a compiled model runs
    flex     compiled flex_attention by the same lists
    density  the share of blocks that the lists name
    per work dense's ms * density / lists' ms: 1, if time went with what is computed

But for "op", k and v are quantized beforehand.

--layout, of a video of Wan, with lists as sage::select_blocks makes them, and q, k and v stored as
[B, N, H, D]. Each of the call ("op"), the kernel alone ("lists"), the preparation of k and v, and
the selection of blocks is timed

    rows      in the order in which tokens come
    cubes     in the order of cubes, which kernels follow
    gathered  in that order by copies of q, k and v, and of out (the call alone)

--tail

    tail N   lists, and a key for each N keys that no list names: BlockLists.tail_block
    prepared, prepared N   k and v; and what the tail N reads
    SDPA     of all keys, by cuDNN where torch prefers it

Shapes: B = 1, H heads, N tokens, head_dim D.
"""

import functools
import itertools
import math
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from bench import harness
from bench.measure import WRONG, Provider, Runner, interleave, relative_l1, summary
from bench.providers import by_tile
from bench.tables import markdown, show
from sage_inductor.ops import launch
from sage_inductor.ops.attention.select import attention, hopper_tile
from sage_inductor.ops.attention_call import AttentionCall
from sage_inductor.ops.formats import TAIL_BLOCKS
from sage_inductor.ops.quantize.op import launch_prepare
from sage_inductor.ops.recipe import NAMED
from sage_inductor.ops.sdpa import attention_call, prepare
from sage_inductor.ops.sparse.selector import BLOCK_SIZE, Selection
from sage_inductor.ops.visibility import BlockLists, Visibility

H = 24
DENSITIES = 1.0, 0.5, 0.3, 0.1
GRID = 16, 48, 80  # of a video of 61,440 tokens, of which 4 x 4 x 4 are a block


class Setup(NamedTuple):
    N: int
    block_q: int
    block_kv: int
    density: float | None  # the probability
    with_flex: bool
    D: int = 128


SETUPS = [
    *(
        Setup(N, *size, density, N <= 75600 and size[0] == 128)
        for N, size in itertools.product((32768, 75600, 118800), ((128, 128), (192, 128)))
        for density in DENSITIES
    ),
    *(Setup(N, 128, 128, 0.3, True) for N in (1024, 2048, 4096, 8192)),
    *(Setup(16384, 128, 128, density, True, D) for density in (0.3, 0.1) for D in (128, 64)),
    Setup(16384, 192, 128, 0.1, False, 64),
    Setup(32768, 128, 64, 0.3, True),  # as sage::select_blocks makes them
    Setup(61440, 64, 64, None, True),
]
RECIPE = "sage2-8b-per-token"


VIDEO = 21, 45, 80  # of Wan
OF_LAYOUT = 0.3, 0.1  # densities
# As sage::select_blocks makes them.
OF_TAIL = [
    Setup(N, 128, 64, density, False)
    for N, density in itertools.product((32768, 75600), (0.5, 0.3, 0.1))
]


def main(argv=None) -> int:
    parser = harness.parser(__doc__, rounds=4, target_ms=60.0)
    plans = parser.add_mutually_exclusive_group()
    plans.add_argument("--layout", action="store_true", help="a video's tokens in cubes")
    plans.add_argument("--tail", action="store_true", help="what a tail costs")
    args = parser.parse_args(argv)
    device = harness.gpu(args)
    torch.manual_seed(0)
    method = (
        f"1 batch, {H} heads, bf16, {RECIPE}; median of {args.rounds} rounds of "
        f"{args.target_ms:g} ms of CUDA graphs, in turns"
    )
    plan, cases, of_case, table_of = "lists", SETUPS, measure, table
    if args.layout:
        plan, cases, of_case, table_of = "layout", OF_LAYOUT, measure_layout, table_of_layout
    elif args.tail:
        plan, cases, of_case, table_of = "tail", OF_TAIL, measure_tail, table_of_tails
    else:
        method += (
            "; time by work: the dense kernel's on the same tile * the listed share / the kernel's "
            "by lists"
        )
    result = harness.Result(plan, method, args)
    for case in cases:
        result.add([of_case(case, device, args.rounds, args.target_ms)])
        show(table_of(result["rows"][-1:]))
        torch.cuda.empty_cache()
    return result.end()


def table(rows: list[dict]) -> str:
    """A line per kind of lists."""
    lines = [
        ["N", "head_dim", "blocks", "listed", "kernel, ms", "with preparation", "flex",
         "flex / ours", "dense kernel", "time by work"],
    ]  # fmt: skip
    for row in rows:
        ms = {name: each["ms"] for name, each in row["times"].items()}
        flex = (f"{ms['flex']:.3f}", f"{ms['flex'] / ms['op']:.2f}") if "flex" in ms else ("", "")
        lines.append([
            str(row["N"]), str(row["D"]), f"{row['block_q']} x {row['block_kv']}",
            f"{row['density']:.0%}", f"{ms['lists']:.3f}", f"{ms['op']:.3f}", *flex,
            *(f"{x:.{n}f}" if x else "" for x, n in ((ms.get("dense"), 3), (row["per_work"], 2))),
        ])  # fmt: skip
    return markdown(lines)


def table_of_tails(rows: list[dict]) -> str:
    lines = [
        ["N", "listed", "SDPA, ms", "dense kernel", "listed", *(f"tail {n}" for n in TAIL_BLOCKS),
         *(f"tail {n} / dense" for n in TAIL_BLOCKS), "preparation",
         *(f"with tail {n}" for n in TAIL_BLOCKS)],
    ]  # fmt: skip
    for row in rows:
        ms = {name: each["ms"] for name, each in row["times"].items()}
        tails = [ms[f"tail {n}"] for n in TAIL_BLOCKS]
        lines.append([
            str(row["N"]), f"{row['density']:.0%}",
            *(f"{x:.3f}" for x in (ms["SDPA"], ms["dense"], ms["lists"], *tails)),
            *(f"{(x - ms['lists']) / ms['dense']:.2%}" for x in tails),
            *(f"{ms[x]:.3f}" for x in ("prepared", *(f"prepared {n}" for n in TAIL_BLOCKS))),
        ])  # fmt: skip
    return markdown(lines)


# -- lists ----


def named(setup: Setup, device) -> Tensor:
    """bool [1, H, blocks of queries, blocks of keys]"""
    rows, columns = -(-setup.N // setup.block_q), -(-setup.N // setup.block_kv)
    drawn = torch.rand(1, H, rows, columns, device=device)
    if setup.density is None:
        return (drawn < 0.05) | near(device)
    block = torch.arange(rows, device=device) * setup.block_q // setup.block_kv
    return (drawn < setup.density) | (block[:, None] == torch.arange(columns, device=device))


def near(device) -> Tensor:
    """bool [blocks, blocks]: at most 1, 2 and 3 blocks apart in time, height and width."""
    T, Y, X = (n // 4 for n in GRID)
    i = torch.arange(T * Y * X, device=device)
    places = i // (Y * X), i // X % Y, i % X
    apart = [(x[:, None] - x).abs() for x in places]
    return (apart[0] <= 1) & (apart[1] <= 2) & (apart[2] <= 3)


def lists_of(blocks: Tensor, block_q: int, block_kv: int) -> BlockLists:
    """Full blocks, in the order of their keys."""
    index = torch.argsort(~blocks, dim=-1, stable=True).int()
    count = blocks.sum(-1, dtype=torch.int32)
    return BlockLists(torch.zeros_like(count), index, count, index, block_q, block_kv)


# -- the measurement ----


def measure(setup: Setup, device, rounds: int, target_ms: float) -> dict:
    q, k, v = (
        torch.randn(1, H, setup.N, setup.D, device=device, dtype=torch.bfloat16) for _ in range(3)
    )
    size = setup.block_q, setup.block_kv
    blocks = named(setup, device)
    lists = lists_of(blocks, *size)
    recipe, visibility = NAMED[RECIPE], Visibility(blocks=lists)
    prepared = prepare(k, v, visibility, recipe)
    a = attention_call(q, k, v, prepared, visibility, setup.D**-0.5, recipe)
    providers = {"lists": Provider("lists", lambda *a: attention(*a)[0], lambda *_: a)}
    if (tile := hopper_tile(a)) is not None:
        dense = a._replace(**dict.fromkeys(BlockLists._fields))
        providers["dense"] = Provider("dense", by_tile(tile), lambda *_: dense)
    providers["op"] = Provider("op", by_op(visibility))
    if setup.with_flex:
        providers["flex"] = Provider("flex", by_flex(lists, setup.N))
    runners = {name: Runner(each, [(q, k, v)]) for name, each in providers.items()}
    by_lists = [runner for name, runner in runners.items() if name != "dense"]
    rel_l1 = max(error(each.output(), q, k, v, blocks, size) for each in by_lists)
    if not rel_l1 < WRONG:
        sys.exit(f"wrong at {setup}: relative L1 {rel_l1}")
    times = interleave(runners, rounds, target_ms)
    row = {
        "plan": "lists",
        **setup._asdict(),
        "density": blocks.float().mean().item(),
        "rel_l1": rel_l1,
        "tile": str(tile),
        "times": {name: summary(each) for name, each in times.items()},
    }
    ms = {name: each["ms"] for name, each in row["times"].items()}
    row["per_work"] = ms["dense"] * row["density"] / ms["lists"] if "dense" in ms else None
    return row


def measure_tail(setup: Setup, device, rounds: int, target_ms: float) -> dict:
    q, k, v = (
        torch.randn(1, H, setup.N, setup.D, device=device, dtype=torch.bfloat16) for _ in range(3)
    )
    blocks = named(setup, device)
    lists, recipe = lists_of(blocks, setup.block_q, setup.block_kv), NAMED[RECIPE]

    def prepared(tail_block: int | None, q, k, v) -> AttentionCall:
        of = Visibility(blocks=lists._replace(tail_block=tail_block))
        made = launch_prepare(launch.run, device, k, v, of.keys(k), recipe, tail_block=tail_block)
        return attention_call(q, k, v, made, of, setup.D**-0.5, recipe)

    def of_calls(name: str, tail_block: int | None) -> dict[str, Provider]:
        suffix = f" {tail_block}" if tail_block else ""
        make = functools.partial(prepared, tail_block)
        return {
            name: Provider(name, lambda *a: attention(*a)[0], make),
            f"prepared{suffix}": Provider("prepared", lambda *of: make(*of).k),
        }

    a = prepared(None, q, k, v)
    dense = a._replace(**dict.fromkeys(BlockLists._fields))
    providers = of_calls("lists", None)
    for n in TAIL_BLOCKS:
        providers |= of_calls(f"tail {n}", n)
    providers["dense"] = Provider("dense", by_tile(hopper_tile(a)), lambda *_: dense)
    providers["SDPA"] = Provider("SDPA", F.scaled_dot_product_attention)
    runners = {name: Runner(each, [(q, k, v)]) for name, each in providers.items()}
    rel_l1 = {}
    for name, n in {"lists": None, **{f"tail {n}": n for n in TAIL_BLOCKS}}.items():
        rel_l1[name] = error(runners[name].output(), q, k, v, blocks, setup[1:3], n)
    if not max(rel_l1.values()) < WRONG:
        sys.exit(f"wrong at {setup}: relative L1 {rel_l1}")
    times = interleave(runners, rounds, target_ms)
    return {
        "plan": "tail",
        **setup._asdict(),
        "density": blocks.float().mean().item(),
        "rel_l1": rel_l1,
        "tile": str(hopper_tile(a)),
        "times": {name: summary(each) for name, each in times.items()},
    }


def by_op(visibility: Visibility, perm: Tensor | None = None) -> Callable:
    recipe = NAMED[RECIPE]

    def call(q, k, v):
        prepared = prepare(k, v, visibility, recipe, perm)
        given = prepared, visibility, q.shape[3] ** -0.5, recipe
        return attention(*attention_call(q, k, v, *given, perm=perm))[0]

    return call


def by_flex(lists: BlockLists, n: int, flash: bool = False) -> Callable:
    """flash: by FlashAttention-4, which reads lists only beside a mask of its own."""
    seen = (lambda b, h, i, j: j >= 0) if flash else None
    mask = BlockMask.from_kv_blocks(
        *lists[:4], BLOCK_SIZE=(lists.block_q, lists.block_kv), mask_mod=seen, seq_lengths=(n, n)
    )
    torch._dynamo.reset()  # a graph for each shape
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    tile = (
        {"BLOCK_M": 64, "BLOCK_N": 64} if lists.block_kv == 64 else None
    )  # its own do not divide it
    options = {"BACKEND": "FLASH"} if flash else tile
    return lambda q, k, v: compiled(q, k, v, block_mask=mask, kernel_options=options)


def error(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, size,
    tail_block: int | None = None,
) -> float:  # fmt: skip
    """Relative L1 of out's last head at 256 rows, against float64."""
    rows = torch.randint(q.shape[2], (256,), device=q.device)
    return relative_l1(out[0, -1, rows], exact(rows, q, k, v, blocks, size, tail_block))


def exact(rows: Tensor, q, k, v, blocks: Tensor, size, tail_block: int | None = None) -> Tensor:
    """Attention by lists, or with a tail, of these rows of the last head, in float64."""
    k, v = k[0, -1].double(), v[0, -1].double()
    seen = blocks[0, -1, rows // size[0]].repeat_interleave(size[1], 1)[:, : k.shape[0]]
    added = torch.where(seen, 0.0, float("-inf")).double()
    if tail_block:
        parts = [x.split(tail_block) for x in (k, v)]
        k, v = (torch.cat([x, torch.stack([y.mean(0) for y in of])])
                for x, of in zip((k, v), parts, strict=True))  # fmt: skip
        count = torch.tensor([len(x) for x in parts[0]], device=q.device)
        of_tail = torch.where(seen[:, ::tail_block], float("-inf"), count.double().log())
        added = torch.cat([added, of_tail], 1)
    s = q[0, -1, rows].double() @ k.mT * q.shape[3] ** -0.5 + added
    return s.softmax(-1) @ v


# -- the order of a video's tokens ----


def measure_layout(density: float, device, rounds: int, target_ms: float, video=VIDEO) -> dict:
    N, recipe = math.prod(video), NAMED[RECIPE]
    q, k, v = (
        torch.randn(1, N, H, 128, device=device, dtype=torch.bfloat16).transpose(1, 2)
        for _ in range(3)
    )
    perm = torch.ops.sage.cube_order(q, video, [4, 4, 4], 0)
    blocks = named(Setup(N, *BLOCK_SIZE, density, False), device)
    visibility = Visibility(blocks=lists_of(blocks, *BLOCK_SIZE))
    back = torch.empty_like(perm).index_copy_(0, perm.long(), torch.arange(N, device=device).int())

    def gathered(q, k, v):
        out = by_op(visibility)(*(x.index_select(2, perm) for x in (q, k, v)))
        return out.index_select(2, back)

    def selected(q, k, v, *order):
        selection = Selection(density, similarity=0.0)
        return torch.ops.sage.select_blocks(q, k, 0.1, *selection.arguments(*order))[1]

    providers = {"op, gathered": Provider("gathered", gathered)}
    for name, order in (("rows", None), ("cubes", perm)):
        a = attention_call(
            q, k, v, prepare(k, v, visibility, recipe, order), visibility, 128**-0.5, recipe,
            perm=order,
        )  # fmt: skip
        calls = {
            "op": (by_op(visibility, order), None),
            "lists": (lambda *a: attention(*a)[0], a),
            "preparation": (lambda q, k, v, p=order: prepare(k, v, visibility, recipe, p).k, None),
            "selection": (lambda q, k, v, p=order: selected(q, k, v, p), None),
        }
        for part, (call, given) in calls.items():
            prepared = (lambda *_, a=given: a) if given else (lambda *inputs: inputs)
            providers[f"{part}, {name}"] = Provider(part, call, prepared)
    runners = {name: Runner(each, [(q, k, v)]) for name, each in providers.items()}
    same = "op, gathered", "op, cubes", "lists, cubes"
    outs = [runners[name].output() for name in same]
    if not all(torch.equal(outs[0], x) for x in outs):
        sys.exit("wrong: by its order a call is not what it is by copies")
    times = interleave(runners, rounds, target_ms)
    found = {name: summary(each) for name, each in times.items()}
    return {"plan": "layout", "video": video, "density": blocks.float().mean().item(),
            "times": found}  # fmt: skip


def table_of_layout(rows: list[dict]) -> str:
    lines = [["video", "listed", "", "rows, ms", "cubes", "cubes / rows", "gathered / rows"]]
    for row in rows:
        ms = {name: each["ms"] for name, each in row["times"].items()}
        for part in ("op", "lists", "preparation", "selection"):
            rows_ms, gathered = ms[f"{part}, rows"], ms.get(f"{part}, gathered")
            lines.append([
                " x ".join(map(str, row["video"])), f"{row['density']:.0%}", part,
                f"{rows_ms:.3f}", f"{ms[f'{part}, cubes']:.3f}",
                f"{ms[f'{part}, cubes'] / rows_ms:.4f}",
                f"{gathered / rows_ms:.4f}" if gathered else "",
            ])  # fmt: skip
    return markdown(lines)


if __name__ == "__main__":
    harness.run(main)
