"""Attention by lists of blocks beside other packages', where they are installed.

$ python bench/sparse_peers.py --json            # DATE-sparse-peers.json
$ python bench/sparse_peers.py --N 75648 --without fastvideo
$ python bench/sparse_peers.py --whole --json    # DATE-sparse-whole.json
$ python bench/sparse_peers.py --own --json      # DATE-sparse-own.json

Equal lists: each row names as many blocks, the one on the diagonal and others at random. q, k and v
share a part within 64 tokens, so that some blocks weigh more than others.

    kernel, op      ours by the lists; op: with the preparation of k and v
    128 x 64        ours by other lists of that size, of the same share
    cuDNN           cudnn-frontend's FP8; kernel: of what it has quantized before
    fastvideo       fastvideo-kernel's two, in bf16; "TK" is built for Hopper
    SLA             the Triton kernel of thu-ml's SLA, in bf16
    flex, FLASH     compiled flex_attention, by Triton and by FlashAttention-4
    selected        ours, compiled: a policy's `keep` with a tail, its selection included
    tail            ours by the lists that it selects with a tail, the preparation included
    sol_attn        comfy-kitchen's with its tail: the same share of the blocks, which it selects

x: its time over ours: over selected's or, where there is none, a kernel's over kernel's and others'
over op's of that size. Errors: relative L1 at 256 rows of the last head, to float64 attention by
the lists and to that of all keys. A peer that fails is named with its error.

--whole: one call of Wan 14B at 720p by `keep` with cubes and a tail, what it consists of, and
cuDNN's dense bf16. --own: fastvideo's and SLA's calls alone, and rewritten, which is the same call
compiled with backend="sage" and sage.force. cut: a quarter of fastvideo's blocks has 16 tokens, so
the errors are of other attention.

Shapes: B = 1, H heads, N tokens, head_dim 128. N is a multiple of 128, as cuDNN asks for.
"""

import dataclasses
import importlib
import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import sage_inductor
from bench import harness, lists
from bench.measure import Provider, Runner, interleave, relative_l1, summary
from bench.models import version_of
from bench.tables import markdown, show
from sage_inductor.ops import launch
from sage_inductor.ops.attention.select import attention
from sage_inductor.ops.quantize.op import launch_prepare
from sage_inductor.ops.recipe import NAMED
from sage_inductor.ops.sdpa import SdpaCall, attention_call, compose
from sage_inductor.ops.sparse.selector import BLOCK_SIZE, Selection
from sage_inductor.ops.visibility import BlockLists, Visibility

D, TAIL, RECIPE = 128, 64, NAMED[lists.RECIPE]
OTHER = " 128 x 64"  # ends the names of what computes blocks of that size next to 64 x 64
PACKAGES = (
    "nvidia-cudnn-frontend", "nvidia-cutlass-dsl", "comfy-kitchen", "fastvideo-kernel",
    "flash-attn-4",
)  # fmt: skip


class Case(NamedTuple):
    N: int
    size: tuple[int, int] | None  # of a block; None: each selects its own
    density: float
    heads: int = lists.H
    video: tuple[int, int, int] | None = None


LENGTHS = 75648, 32768, 118784  # flex, compiled for each, is of the first alone
SIZES = (128, 128), (64, 64), None
DENSITIES = 0.5, 0.3, 0.1
WHOLE = [Case(math.prod(lists.VIDEO), None, x, 40, lists.VIDEO) for x in (0.2, 0.1)]


def main(argv=None) -> int:
    parser = harness.parser(__doc__, rounds=3, target_ms=40.0)
    parser.add_argument("--N", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--without", nargs="+", default=[], help="columns, by their first words")
    parser.add_argument("--whole", action="store_true", help="one call of Wan 14B")
    parser.add_argument("--own", action="store_true", help="fastvideo's and SLA's calls, rewritten")
    args = parser.parse_args(argv)
    device = harness.gpu(args)
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    sage_inductor.config.rewrite_inductor = False  # it would rewrite what is beside ours
    drawn = itertools.product(args.N, [(64, 64)] if args.own else SIZES, DENSITIES)
    cases = WHOLE if args.whole else [Case(*each) for each in drawn]
    method = (
        f"1 batch, {cases[0].heads} heads, bf16, {lists.RECIPE}; median of {args.rounds} rounds of "
        f"{args.target_ms:g} ms, in turns, of CUDA graphs but where captured says no"
    )
    found = {name: version for name in PACKAGES if (version := version_of(name))}
    plan = "sparse-" + ("whole" if args.whole else "own" if args.own else "peers")
    result = harness.Result(plan, method, args, versions=harness.installed() | found)
    for case in cases:
        torch._dynamo.reset()  # which compiles one code object only so often
        result.add([measure(case, device, args) | {"plan": plan}])
        show(table(result["rows"][-1:]))
        torch.cuda.empty_cache()
    return result.end()


def table(rows: list[dict]) -> str:
    """A line for each that ran, then why the others did not."""
    lines = [["N", "blocks", "listed", "", "ms", "x", "captured", "error by lists", "to dense"]]
    failed = []
    for row in rows:
        size = "{} x {}".format(*row["size"]) if row["size"] else "selected"
        ms = {name: its["ms"] for name, its in row["times"].items()}
        for name, its in row["times"].items():
            to = "selected" if "selected" in ms else "kernel" if "kernel" in name else "op"
            to += OTHER * name.endswith(OTHER)
            lines.append([
                str(row["N"]), size, f"{row['listed']:.1%}", name, f"{ms[name]:.3f}",
                f"{ms[name] / ms[to]:.2f}" if to in ms else "", "yes" if its["captured"] else "no",
                *(f"{its[x]:.2%}" if x in its else "" for x in ("of_lists", "of_dense")),
            ])  # fmt: skip
        failed += [f"failed: {name}: {error}\n" for name, error in row["errors"].items()]
    return "".join([markdown(lines), *failed])


OWN = "SLA", "fastvideo", "cut", "rewritten"  # begin the columns of --own
OF_KERNELS = ("cuDNN kernel",)
OF_CALLS = (
    "cuDNN op", "fastvideo TK", "fastvideo Triton", "SLA", f"SLA{OTHER}", "flex", "FLASH",
    "sol_attn",
)  # fmt: skip


def in_short(rows: list[dict]) -> str:
    """A line a row: our times, others' over ours, and errors by the lists."""
    names = [x for x in (*OF_KERNELS, *OF_CALLS) if any(x in row["times"] for row in rows)]
    lines = [["N", "blocks", "listed", "kernel, ms", "call, ms", *names, "error", "cuDNN's"]]
    for row in sorted(rows, key=lambda row: row["N"]):
        its, size = row["times"], row["size"] or (128, 64)
        ours = ("kernel", "op") if row["size"] else ("tail", "selected")
        kernel, call = (its[name]["ms"] for name in ours)
        over = {name: kernel for name in OF_KERNELS}
        if f"op{OTHER}" in its:
            over[f"SLA{OTHER}"] = its[f"op{OTHER}"]["ms"]
        ratios = (f"{its[x]['ms'] / over.get(x, call):.2f}" if x in its else "" for x in names)
        errors = (its.get(name, {}).get("of_lists") for name in (ours[1], "cuDNN op"))
        lines.append([
            str(row["N"]), "{} x {}".format(*size) + ", a tail" * (not row["size"]),
            f"{row['listed']:.0%}", f"{kernel:.3f}", f"{call:.3f}", *ratios,
            *(f"{x:.2%}" if x else "" for x in errors),
        ])  # fmt: skip
    return markdown(lines)


def of_own(rows: list[dict]) -> str:
    """A line a row: the times of their calls, and those over what becomes of them."""
    names = "SLA", f"SLA{OTHER}", "fastvideo TK", "cut fastvideo"
    names = [name for name in names if any(name in row["times"] for row in rows)]
    lines = [["N", "listed", *(x for name in names for x in (f"{name}, ms", "x"))]]
    for row in sorted(rows, key=lambda row: row["N"]):
        its = {name: each["ms"] for name, each in row["times"].items()}
        became = {name: its[f"rewritten {name.removesuffix(' TK')}"] for name in names}
        found = ((f"{its[x]:.3f}", f"{its[x] / became[x]:.2f}") for x in names)
        lines.append([str(row["N"]), f"{row['listed']:.0%}", *itertools.chain(*found)])
    return markdown(lines)


def of_whole(rows: list[dict]) -> str:
    """A line a row: --whole's, x cuDNN's time over the call's."""
    parts = "selection", "preparation", "tail, kernel"
    lines = [["N", "listed", "SDPA, ms", "call", "x", *parts, "error"]]
    for row in rows:
        ms = {name: its["ms"] for name, its in row["times"].items()}
        lines.append([
            str(row["N"]), f"{row['listed']:.0%}", f"{ms['SDPA']:.1f}", f"{ms['selected']:.2f}",
            f"{ms['SDPA'] / ms['selected']:.2f}", *(f"{ms[name]:.2f}" for name in parts),
            f"{row['times']['selected']['of_lists']:.2%}",
        ])  # fmt: skip
    return markdown(lines)


# -- inputs and lists ----


def alike(case: Case, device, order: Tensor | None) -> list[Tensor]:
    """q, k, v [1, H, N, D], contiguous; where 64 tokens of an order share a part, stored as
    [1, N, H, D]."""
    found, make = [], {"device": device, "dtype": torch.bfloat16}
    for _ in range(3):
        x = torch.randn(1, case.heads, case.N, D, **make)
        part = torch.randn(1, case.heads, -(-case.N // 64), D, **make)
        x += part.repeat_interleave(64, 2)[:, :, : case.N]
        if order is not None:
            stored = torch.empty(1, case.N, case.heads, D, **make).transpose(1, 2)
            x = stored.index_copy_(2, order.long(), x)
        found.append(x)
    return found


def equal(case: Case, size: tuple[int, int], device) -> Tensor:
    """bool [1, H, blocks of queries, blocks of keys], as many in each row."""
    columns = case.N // size[1]
    rows = torch.arange(case.N // size[0], device=device)
    drawn = torch.rand(1, case.heads, len(rows), columns, device=device)
    drawn[:, :, rows, rows * size[0] // size[1]] = 2.0
    most = drawn.topk(round(case.density * columns)).indices
    return torch.zeros_like(drawn, dtype=torch.bool).scatter_(3, most, True)


def indices(blocks: Tensor) -> Tensor:
    """int32 [1, H, blocks of queries, as many as each row names], ascending."""
    return blocks.nonzero()[:, 3].int().view(*blocks.shape[:3], -1)


def named_by(counts: Tensor, index: Tensor) -> Tensor:
    """bool, as `equal` draws it."""
    listed = torch.arange(index.shape[3], device=index.device) < counts[..., None]
    return torch.zeros_like(listed).scatter_(3, index.long(), listed)


# -- providers: what makes each ----


def ours(size, blocks: Tensor, note: str = "") -> dict[str, Callable]:
    visibility = Visibility(blocks=lists.lists_of(blocks, *size))

    def given(q, k, v):
        prepared = lists.prepare(k, v, visibility, RECIPE)
        return attention_call(q, k, v, prepared, visibility, D**-0.5, RECIPE)

    return {
        f"kernel{note}": lambda: Provider("kernel", lambda *a: attention(*a)[0], given),
        f"op{note}": lambda: Provider("op", lists.by_op(visibility)),
    }


def cudnn(size, index: Tensor) -> dict[str, Callable]:
    n, name = index.shape[3], "cudnn.block_sparse_attention"

    def kernel():
        quantize = importlib.import_module(f"{name}._fp8_quant")._quantize_sage_bhsd
        its = importlib.import_module(f"{name}._interface")
        attend = getattr(its, f"_bsa_attn_fwd_sm90_fp8_blk{size[1]}")
        given = partial(quantize, v_layout="bhds")
        return Provider("cuDNN", lambda *six: attend(*six, index, n)[0], given)

    def op():
        attend = importlib.import_module(name).block_sparse_attention_fp8_forward
        given = {"block_sparse_num": n, "sparse_block_size": size[1]}
        return Provider("cuDNN", lambda *qkv: attend(*qkv, index, **given)["o_tensor"])

    return {"cuDNN kernel": kernel, "cuDNN op": op}


def fastvideo(index: Tensor) -> dict[str, Callable]:
    count = torch.full(index.shape[:3], index.shape[3], device=index.device, dtype=torch.int32)
    whole = torch.full(index.shape[2:3], 64, device=index.device, dtype=torch.int32)
    cut = whole.index_fill(0, torch.arange(3, len(whole), 4, device=index.device), 16)

    def provider(op: str, sizes: Tensor = whole) -> Provider:
        importlib.import_module("fastvideo_kernel")
        attend = getattr(torch.ops.fastvideo_kernel, f"block_sparse_attn_{op}")
        return Provider("fastvideo", lambda *qkv: attend(*qkv, index, count, sizes)[0])

    return {
        "fastvideo TK": lambda: provider("sm90"), "fastvideo Triton": lambda: provider("triton"),
        "rewritten fastvideo": lambda: rewritten(provider("sm90")),
        "cut fastvideo": lambda: provider("sm90", cut),
        "rewritten cut fastvideo": lambda: rewritten(provider("sm90", cut)),
    }  # fmt: skip


def sla(size, index: Tensor, note: str = "") -> dict[str, Callable]:
    def make():
        apply = importlib.import_module("sparse_linear_attention.kernel")._attention.apply
        return Provider("SLA", lambda *qkv: apply(*qkv, index, index, index.shape[3], *size))

    return {f"SLA{note}": make, f"rewritten SLA{note}": lambda: rewritten(make())}


def rewritten(provider: Provider) -> Provider:
    how = {"options": {"sage.force": True}, "fullgraph": True, "dynamic": False}
    return Provider("rewritten", torch.compile(provider.call, backend="sage", **how))


def sol(density: float) -> Provider:
    attend = partial(importlib.import_module("comfy_kitchen").sol_attn, topk_ratio=density)
    return Provider("sol", lambda *x: attend(*(y.transpose(1, 2) for y in x)).transpose(1, 2))


def selecting(case: Case, q: Tensor, k: Tensor, order: Tensor | None) -> tuple[dict, Tensor]:
    """`keep` of a density, with a tail; of a video, what it consists of."""
    places = [] if order is None else [order]
    asked = D**-0.5, *Selection(case.density, similarity=0.0).arguments(*places)
    counts, index = torch.ops.sage.select_blocks(q, k, *asked)
    blocks = BlockLists(counts, index, None, None, *BLOCK_SIZE, TAIL)
    visibility = Visibility(blocks=blocks)
    keep = {"top_k": case.density, "similarity": 0, "tail": True}
    keep |= {"layout": list(case.video)} if case.video else {}
    options = {"sage.policy": [{"recipe": lists.RECIPE, "keep": keep}]}
    usual = {"fullgraph": True, "dynamic": False}
    sdpa = F.scaled_dot_product_attention
    whole = torch.compile(lambda q, k, v: sdpa(q, k, v), backend="sage", options=options, **usual)
    select = torch.compile(lambda q, k, _: torch.ops.sage.select_blocks(q, k, *asked)[1], **usual)
    of_tail = {**blocks._asdict(), "perm": order}

    def prepared(q, k, v):
        seen = visibility.keys(k)
        return launch_prepare(launch.run, k.device, k, v, seen, RECIPE, TAIL, order)

    def given(*qkv):
        how = visibility, D**-0.5, RECIPE
        return attention_call(*qkv, prepared(*qkv), *how, perm=order)

    parts = {
        "selection": Provider("selection", select),
        "preparation": Provider("preparation", lambda *qkv: prepared(*qkv).k),
        "tail, kernel": Provider("kernel", lambda *a: attention(*a)[0], given),
        "SDPA": Provider("SDPA", sdpa_kernel(SDPBackend.CUDNN_ATTENTION)(sdpa)),
    }
    found = {
        "selected": Provider("selected", whole),
        "tail": Provider("tail", lambda *qkv: compose(
            SdpaCall.of(*qkv, D**-0.5, RECIPE.encode(), **of_tail)
        )[0]),
    }  # fmt: skip
    makers = {
        name: lambda it=it: it for name, it in {**found, **(parts if case.video else {})}.items()
    }
    others = {} if case.video else {"sol_attn": lambda: sol(case.density)}
    return makers | others, named_by(counts, index)


def columns(case: Case, q: Tensor, k: Tensor, order: Tensor | None) -> tuple[dict, Tensor]:
    """What makes each provider, and the blocks that they compute."""
    if (size := case.size) is None:
        return selecting(case, q, k, order)
    blocks = equal(case, size, q.device)
    index = indices(blocks)
    found = ours(size, blocks) | cudnn(size, index)
    if size[0] == 64:
        others = equal(case, BLOCK_SIZE, q.device)
        found |= ours(BLOCK_SIZE, others, OTHER) | sla(BLOCK_SIZE, indices(others), OTHER)
        found |= fastvideo(index) | sla(size, index)
    if case.N == LENGTHS[0]:
        flex = partial(lists.by_flex, lists.lists_of(blocks, *size), case.N)
        found["flex"] = lambda: Provider("flex", flex())
        found["FLASH"] = lambda: Provider("FLASH", flex(flash=True))
    return found, blocks


# -- the measurement ----


def measure(case: Case, device, args) -> dict:
    order = None
    if case.video:
        of = torch.empty(1, 1, case.N, 1, device=device)
        order = torch.ops.sage.cube_order(of, case.video, [4, 4, 4], 0)
    q, k, v = alike(case, device, order)
    makers, blocks = columns(case, q, k, order)
    rows = torch.randint(case.N, (256,), device=device)
    at = rows if order is None else order[rows]
    last = [x[:, -1:] if order is None else x[:, -1:].index_select(2, order) for x in (q, k, v)]
    size, tail = (case.size, None) if case.size else (BLOCK_SIZE, TAIL)
    exact = {"of_lists": lists.exact(rows, *last, blocks, size, tail)}
    exact["of_dense"] = lists.exact(rows, *last, torch.ones_like(blocks), size)
    runners, errors, found = {}, {}, {}
    for name, make in makers.items():
        first = name.split(" ")[0]
        asked = first in OWN if args.own else first not in ("cut", "rewritten")
        if first in args.without or not asked:
            continue
        try:
            runners[name] = runner = started(make(), (q, k, v))
            found[name] = {"captured": runner.captured}
            if (runner.out.dtype, runner.out.shape) == (q.dtype, q.shape):
                out = runner.output()
                has = ["of_dense"] if name.endswith(OTHER) or name == "sol_attn" else exact
                found[name] |= {x: relative_l1(out[0, -1, at], exact[x]) for x in has}
        except Exception as error:  # one that fails must not cost the others
            errors[name] = harness.in_a_line(error)[:300]
            runners.pop(name, None)
    times = interleave(runners, args.rounds, args.target_ms)
    times = {name: summary(each) | found[name] for name, each in times.items()}
    listed = blocks.float().mean().item()
    return {**case._asdict(), "listed": listed, "errors": errors, "times": times}


def started(provider: Provider, inputs) -> Runner:
    """Launched where a CUDA graph of it fails, or is empty: it runs in another stream."""
    try:
        runner = Runner(provider, [inputs])
        is_float = runner.out.is_floating_point()
        if not (runner.captured and is_float and runner.output().isnan().any()):
            return runner
    except Exception as error:  # each has its own; without a graph it comes again
        print(f"{provider.name}: {harness.in_a_line(error)[:200]}")
    return Runner(dataclasses.replace(provider, captures=False), [inputs])


if __name__ == "__main__":
    harness.run(main)
