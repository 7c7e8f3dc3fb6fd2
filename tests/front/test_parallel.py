"""``sage_inductor.gather_attention`` and its op, on CPU with gloo: what ranks compute together is what
one device computes alone, and what they are called with wrongly is an error on all of them.

Six processes live as long as this module's tests (ranks.py): four together, and two apart.
"""

import contextlib
import itertools
import math
import os
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pairs import pairs
from ranks import Ranks, serve
from support import arguments, block_lists, op_by_op, qkv, relative_l1, sdpa, swept, with_gaps
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor, all_to_all_single
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental._context_parallel import flex_cp_allgather
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.attention.flex_attention import flex_attention
from torch.testing import assert_close

import sage_inductor
from sage_inductor import SageOptionError, config, gather_attention
from sage_inductor.choose import timing
from sage_inductor.ops import notes
from sage_inductor.ops.distributed import exchange, gather, peers, sharding, transport
from sage_inductor.ops.distributed.gather import Shards
from sage_inductor.ops.distributed.transport import Line, Rates, Transfer
from sage_inductor.ops.formats import K_BLOCK, MAX_ROWS
from sage_inductor.ops.recipe import NAMED
from sage_inductor.ops.register import OPAQUE
from sage_inductor.parallel import OF_AUTO

RECIPE = "sage2-8b-per-token"
BACKENDS = ("eager", "aot_eager", "inductor", "sage")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    ranks = Ranks(4, __file__, tmp_path_factory.mktemp("ranks"), apart=2)
    yield ranks
    ranks.stop()


# -- what they run ----


@torch.no_grad()
def attend(group, q, k, v, recipe=RECIPE, way="codes", lengths="ask", folder=None, **given):
    """way: the one that is chosen. Where lengths are not asked for, the host reads nothing of the
    other ranks. folder: the ranks map each other's memory, which is files there."""
    exchanged = gather._exchanged if lengths == "ask" else None
    given |= {"recipe": recipe, "lengths": lengths, "return_lse": True}
    memory = MappedFiles(group, folder) if folder else None
    with (
        mock.patch.object(transport, "choose", lambda *_: way),
        mock.patch.object(peers, "of", lambda *_: memory),
        mock.patch.object(exchange, "ONE_KERNEL", 2**25 if exchanged else 0),
        mock.patch.object(gather, "_exchanged", exchanged),
    ):
        if memory is None:
            return gather_attention(q, k, v, group, **given)
        with (
            mock.patch.object(gather, "_agree", memory.seeing("agree", gather._agree)),
            mock.patch.object(gather, "compose", memory.seeing("compute", gather.compose)),
        ):
            out = gather_attention(q, k, v, group, **given)
    back = ["arrive"] * (way == "heads")
    assert memory.did == ["begin", "agree", "arrive", "compute", *back, "end"]
    return out


class MappedFiles:
    """PeerMemory of processes on CPU. Nothing is written beyond what was reserved, or twice."""

    SIZE = 2**22

    def __init__(self, group, folder):
        self.group, self.rank, self.P = group, group.rank(), group.size()
        files = [f"{folder}/{rank}" for rank in range(self.P)]
        self.memory = [
            torch.from_file(x, shared=True, size=self.SIZE, dtype=torch.uint8) for x in files
        ]
        self.reserved, self.ends, self.did = 0, [0] * self.P, []

    def reserve(self, size):
        self.reserved, self.ends = size, [0] * self.P
        return self.SIZE >= size > 0

    def array(self, rank, shape, dtype, at):
        end = at + math.prod(shape) * dtype.itemsize
        assert at % exchange.ALIGN == 0 and self.ends[rank] <= at and end <= self.reserved
        self.ends[rank] = end
        return self.memory[rank][at:end].view(dtype).view(shape)

    @contextlib.contextmanager
    def in_order(self):
        self.did.append("begin")
        yield
        assert 0 <= self.reserved - max(self.ends) <= 5 * exchange.ALIGN
        self.did.append("end")

    def arrive(self):
        dist.barrier(self.group)
        self.did.append("arrive")

    def give_up(self):
        self.did.append("given up")

    def seeing(self, name, function):
        """function, of which `did` says when it was called."""

        def seen(*given, **named):
            self.did.append(name)
            return function(*given, **named)

        return seen


def prepared(group, q, k, v, lengths, recipe=RECIPE):
    torch.use_deterministic_algorithms(True)  # fills memory that is not set: bytes with 255
    try:
        encoded = NAMED[recipe].encode()
        return gather._gather_prepared(k, v, Shards(tuple(lengths)), group, encoded).tensors()
    finally:
        torch.use_deterministic_algorithms(False)


# -- inputs ----


def sharded(lengths, *tensors) -> list[tuple]:
    """Each rank's rows of each tensor."""
    return list(zip(*(x.split(list(lengths), 2) for x in tensors)))


def inputs(lengths, dtype=torch.bfloat16, D_v=None, **shape):
    N = sum(lengths)
    q, k, v = qkv(**{"B": 2, "H_q": 4, "H_kv": 2, "D": 64, **shape}, N_q=N, N_kv=N, dtype=dtype)
    # Contiguous: CPU's sums over rows depend on their strides in the last bit.
    return q.contiguous(), k.contiguous(), v[..., :D_v].contiguous()


def as_gathered(*tensors) -> list:
    return [x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for x in tensors]


LENGTHS = {
    "two of whole blocks": (128, 128),
    "four of whole blocks": (64, 64, 64, 64),
    "whole blocks, uneven": (192, 64, 128, 17),
    "uneven": (70, 1, 200, 33),
    "uneven, two": (100, 27),
    "short": (10, 10, 10, 10),
    "short within": (65, 5, 40, 130),
    "one row each": (1, 1, 1, 1),
    "three": (63, 66, 64),
    "four": (70, 30, 129, 64),
    "alone": (150,),
}


def test_auto_is_the_recipe_that_was_timed_on_several_gpus(gloo):
    given = inputs((70,))
    with torch.no_grad():
        default, auto, named, other = (
            gather_attention(*given, **recipe)
            for recipe in (
                {}, {"recipe": "auto"}, {"recipe": "sage2-8b-rotated"}, {"recipe": "sage2-8b-fp8qk"}
            )
        )  # fmt: skip
    assert torch.equal(default, named) and torch.equal(auto, named) and not named.equal(other)


# The way that keys travel, which lengths, and what else of the call: each full and causal.
CALLS = [
    *(("codes", name, {}) for name in LENGTHS),
    *(
        ("codes", "four", given)
        for given in (
            {"H_q": 6, "H_kv": 1}, {"H_q": 3, "H_kv": 3, "D": 72}, {"D": 128, "D_v": 40},
            {"D": 24, "B": 1, "dtype": torch.float32}, {"D": 20, "B": 1, "H_q": 1, "H_kv": 1},
            {"dtype": torch.float16, "recipe": "sage2-8b-fp8qk"},
            {"H_q": 3, "H_kv": 3, "D": 72, "recipe": "sage2-8b-rotated"},
            {"D": 24, "B": 1, "dtype": torch.float32, "recipe": "sage2-8b-rotated"},
        )
    ),
    *(
        (way, *each)
        for way in ("rows", "heads")
        for each in (
            ("two of whole blocks", {}), ("uneven, two", {"dtype": torch.float16}),
            ("uneven, two", {"D_v": 40, "B": 1}), ("uneven", {"H_q": 8, "H_kv": 4}),
            ("four of whole blocks", {"H_q": 4, "H_kv": 4, "dtype": torch.float32}),
            *(("uneven, two", {"recipe": x}) for x in ("sage1-per-token", "sage2-8b", "sage3")),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "way, name, given",
    [swept(*x, unless=x[0] != "codes" or "of whole blocks" not in x[1]) for x in CALLS],
    ids=str,
)
def test_ranks_compute_what_one_device_does(ranks, way, name, given, is_causal, tmp_path):
    """Bit for bit."""
    given, lengths = dict(given), LENGTHS[name]
    recipe = given.pop("recipe", RECIPE)
    q, k, v = inputs(lengths, **given)
    of_ranks = sharded(lengths, q, k, v)
    if way == "codes" and not is_causal:
        one = torch.ops.sage.prepare(k, v, None, NAMED[recipe].encode(), False)
        for found in ranks(prepared, *of_ranks, lengths=lengths, recipe=recipe):
            check_prepared(found, one, sum(lengths))
    if way != "codes":  # CPU's sums over rows depend on their strides in the last bit
        k, v = as_gathered(k, v)
    known = None if len({*lengths}) == 1 else lengths
    asked = {"scale": 0.2, "recipe": recipe}
    asked_of_ranks = dict(way=way, is_causal=is_causal, lengths="ask" if is_causal else known)
    found = ranks(attend, *of_ranks, **asked_of_ranks, **asked)
    if way != "codes":
        found_by_peers = ranks(attend, *of_ranks, **asked_of_ranks, **asked, folder=tmp_path)
        for by_collectives, by_peers in zip(found, found_by_peers):
            for x, y in zip(by_collectives, by_peers):
                assert torch.equal(x, y) and x.stride() == y.stride()
    first = 0
    for (q_r, *_), (out, lse) in zip(of_ranks, found):
        n = q_r.shape[2]
        if way == "rows":  # it prepares no keys that no query of its own sees
            expected = sdpa(q_r, k, v, right=first if is_causal else None, **asked)
        else:
            whole = sdpa(q, k, v, right=0 if is_causal else None, **asked)
            expected = [x[:, :, first : first + n] for x in whole]
        first += n
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
        assert out.transpose(1, 2).is_contiguous() and lse.is_contiguous()
        assert (out.dtype, lse.dtype) == (q.dtype, torch.float32)


def check_prepared(found, one, N: int) -> None:
    """Bit for bit, but for padding: no block of it has a scale, and no p reads its v."""
    blocks = -(-N // K_BLOCK)
    (k, k_scale, k_mean, v, v_scale, v_mean), expected = found, one
    for x, y in (
        (k, expected[0]), (k_scale[:, :, :blocks], expected[1][:, :, :blocks]), (k_mean, expected[2]),
        (v_scale, expected[4]), (v_mean, expected[5]),
    ):  # fmt: skip
        assert x.dtype == y.dtype and torch.equal(x, y)
    assert v.shape == expected[3].shape and v.dtype == expected[3].dtype
    v, v_one = (x.view(torch.uint8) for x in (v, expected[3]))
    D_v, end = v_scale.shape[2], blocks * K_BLOCK
    assert torch.equal(v[:, :, :D_v, :end], v_one[:, :, :D_v, :end])
    assert not (k_scale[:, :, blocks:].any() or v[:, :, D_v:].any() or v[..., end:].any())


def test_queries_need_not_be_as_many_as_keys(ranks):
    q, k, v = inputs((40, 90), D=32)
    queries = q[:, :, :3], q[:, :, 3:9]
    of_ranks = [(q_r, *of_kv) for q_r, of_kv in zip(queries, sharded((40, 90), k, v))]
    for (q_r, _, _), (out, _) in zip(of_ranks, ranks(attend, *of_ranks)):
        assert torch.equal(out, sdpa(q_r, k, v, scale=32**-0.5, recipe=RECIPE)[0])


@pytest.mark.parametrize("way", ["codes", "heads"])
def test_strides_of_a_projection_are_taken_as_they_are(ranks, way):
    q, k, v = qkv(N_q=130, N_kv=130, dtype=torch.bfloat16)
    if way == "heads":  # rows that are no multiple of eight bytes apart
        q, k, v = (with_gaps(x, (0, 2, 1, 3)) for x in (q, k, v))
    found = ranks(attend, *sharded((67, 63), q, k, v), way=way)
    out, lse = (torch.cat(each, 2) for each in zip(*found))
    expected = sdpa(q, k, v, recipe=RECIPE)
    assert_close(out, expected[0], atol=0.02, rtol=0.01)  # a last bit of a mean may differ
    assert_close(lse, expected[1], atol=1e-3, rtol=0)


def test_lse_without_a_batch_is_computed_whole():
    """[H, N, D]: what is sharded of [B, H, N, D] is another dimension."""
    x = torch.zeros(4, 16, 8)
    assert sharding._lse(x, x, None, False, None) == [([Replicate()], [Replicate()] * 2)]
    assert sharding._lse(x, x, x, False, None) == [([Replicate()], [Replicate()] * 3)]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("rank", range(4))
def test_an_outlier_of_v_on_one_rank_alone_is_decided_together(ranks, rank, sign):
    lengths = 70, 90, 64, 33
    q, k, v = inputs(lengths)
    row = unsampled(sum(lengths), sum(lengths[:rank]))
    assert row < sum(lengths[: rank + 1])
    v[1, 1, row, 5] = sign * 1000
    of_ranks = sharded(lengths, q, k, v)
    one = torch.ops.sage.prepare(k, v, None, NAMED[RECIPE].encode(), False)
    assert one[4][1, 1, 5] > 2 and one[4][0].max() < 0.2  # a head that had to be done again
    for found in ranks(prepared, *of_ranks, lengths=lengths):
        check_prepared(found, one, sum(lengths))


def unsampled(N: int, first: int) -> int:
    """The next row that the sample does not have."""
    rows = gather.sample_rows(N).tolist()
    return next(n for n in range(first, N) if n not in rows)


def test_a_nan_in_v_is_seen_by_every_rank(ranks):
    q, k, v = inputs((64, 64))
    v[0, 0, 100, 7] = math.nan
    for out, lse in ranks(attend, *sharded((64, 64), q, k, v)):
        assert out[0, :2, :, 7].isnan().all() and lse.isfinite().all()
        assert out.isnan().sum() == out[0, :2, :, 7].numel()


def test_a_nan_does_not_hide_an_outlier_of_its_channel(ranks):
    """Saturated, the outlier would be a wrong number to causal queries that do not see the NaN."""
    q, k, v = inputs((200, 200))
    v[0, 0, unsampled(400, 0), 7], v[0, 0, 399, 7] = 1000, math.nan
    for found in ranks(prepared, *sharded((200, 200), q, k, v), lengths=(200, 200)):
        assert found[4][0, 0, 7].isnan() and found[4].isnan().sum() == 1


# -- under torch.compile ----


@torch.no_grad()
def compiled(group, backend, *calls, dynamic, equal=False):
    """Each call by one compiled function, and the same in eager; how many graphs there were."""

    def function(q, k, v):
        lengths = [k.shape[2]] * group.size() if equal else "ask"
        out, lse = gather_attention(q * 1.0, k, v, group, lengths=lengths, return_lse=True)
        return out.transpose(1, 2).flatten(2) + 1, lse

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    by_backend = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
    with mock.patch.object(gather, "_exchanged", None if equal else gather._exchanged):
        found = [(by_backend(*call), function(*call)) for call in calls]
    return found, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    "backend, lengths",
    [
        *((backend, [(70, 27)]) for backend in BACKENDS),
        ("inductor", [(70, 27), (71, 27), (40, 90)]),
        ("sage", [(70, 70), (71, 71), (128, 128)]),  # given, by the call's own shapes
    ],
)
def test_a_compiled_call_is_the_eager_one_at_any_length_of_any_rank(ranks, backend, lengths):
    calls = [sharded(each, *inputs(each)) for each in lengths]
    of_ranks = [(backend, *(call[rank] for call in calls)) for rank in range(2)]
    dynamic = True if len(lengths) > 1 else None
    for found, graphs in ranks(compiled, *of_ranks, dynamic=dynamic, equal=lengths[0] == (70, 70)):
        assert graphs == 1 and len(found) == len(lengths)
        for actual, expected in found:
            for x, y in zip(actual, expected):
                assert torch.equal(x, y) and x.stride() == y.stride()


@torch.no_grad()
def reported(group, q, k, v) -> list[dict]:
    torch._dynamo.reset()
    function = torch.compile(
        lambda q, k, v: (
            gather_attention(q, k, v, group, True),
            torch.ops.sage.gather_sdpa(
                q, k, v=v, group_name=group.group_name, is_causal=False, scale=1.0,
                recipe=NAMED["sage2-8b-fp8qk"].encode(),
            ),
        ),
        backend="sage", options={"sage.strict": True},
    )  # fmt: skip
    with op_by_op():
        function(q, k, v)
    return sage_inductor.report().to_dicts()


OF_ALL_KEYS = "asked for, of all keys; how they travel between ranks is chosen when it runs"


def test_the_report_has_calls_that_gather(ranks):
    q, k, v = inputs((64,), dtype=torch.float16)
    (calls,) = ranks(reported, (q, k, v))
    assert [(call["mask"], call["recipe"]) for call in calls] == [
        ("causal", "sage2-8b-rotated"), ("none", "sage2-8b-fp8qk"),
    ]  # fmt: skip
    for call in calls:
        assert call["spelling"] == "sage_inductor.gather_attention"
        assert (call["q"], call["k"]) == ([2, 4, 64, 64], [2, 2, 64, 64])
        assert (call["dtype"], call["device"]) == ("float16", "cpu")
        assert call["reason"] == OF_ALL_KEYS


KEEPS = {
    "a tail": {"top_k": 0.3, "similarity": 0, "tail": True},
    "cubes": {"top_k": 0.3, "similarity": 0, "layout": [4, 9, 12], "dense_last": 8},
    "cubes, segments": {"rule": "vsa", "sparsity": 0.7, "segments": [128], "layout": [4, 8, 12]},
    "sla": {"rule": "sla", "sparsity": 0.7, "dense": [[0, 70]]},
    "sol": {"rule": "sol", "tau": 1.3},
    "error": {"rule": "error", "top_k": 0.2, "tail": True, "tail_block": 32},
}


def for_heads(group, x):
    """[B, H, N / P, D] -> all rows of H / P heads, as Ulysses exchanges them."""
    parts = torch.stack(x.chunk(group.size(), 1))
    return torch.cat([*all_to_all_single(parts, None, None, group)], 2)


@torch.no_grad()
def selected(group, q, k, v, keep, emulate=True) -> tuple:
    """By heads: the output and the report's row. The rows, where keys are gathered."""

    def by_heads(q, k, v):
        return F.scaled_dot_product_attention(*(for_heads(group, x) for x in (q, k, v)), **gqa)

    def by_keys(q, k, v):
        # Not by dimension 2, which torch 2.11 does not trace.
        all_ = (all_gather_tensor(x.contiguous(), 0, group) for x in (k, v))
        k, v = (torch.cat(x.chunk(group.size()), 2) for x in all_)
        out = F.scaled_dot_product_attention(q, k, v, **gqa)
        return out, gather_attention(q, k, v, group)

    gqa, found = {"enable_gqa": True}, []
    given = {"sage.policy": [{"recipe": RECIPE, "keep": keep}]}
    given |= {"sage.emulate" if emulate else "sage.force": True}
    for function in by_heads, by_keys:
        torch._dynamo.reset()
        with op_by_op(emulate):
            out = torch.compile(function, backend="sage", options=given, fullgraph=True)(q, k, v)
        found += [out] if function is by_heads else []
        found += [site.reason for site in sage_inductor.report()]
    return *found, group.rank()


@pytest.mark.parametrize("keep", KEEPS.values(), ids=KEEPS)
def test_ranks_select_the_blocks_that_one_device_does(ranks, keep):
    """Between Ulysses' exchanges. Where a rank has its own queries alone, a reason says so."""
    q, k, v = inputs((440 if "dense_last" in keep else 512,))
    policy = [{"recipe": RECIPE, "keep": keep}]
    with torch.no_grad(), config.patch(emulate=True, policy=policy):
        expected = sage_inductor.attention(q, k, v, enable_gqa=True)
    n = q.shape[2] // 2
    for out, *reasons, rank in ranks(selected, *sharded((n, n), q, k, v), keep=keep):
        assert torch.equal(out, expected.chunk(2, 1)[rank])
        assert reasons[0].startswith("emulated; keep {")
        assert f"for self-attention, got {n} queries and {2 * n} keys" in reasons[1]
        assert reasons[2] == OF_ALL_KEYS


@torch.no_grad()
def selected_by_head(group, q, k, v, keep) -> tuple:
    """The outputs, and the report's rows, by fractions of all heads and by those of a rank's own."""
    n, found = q.shape[1] // group.size(), []
    own = keep[group.rank() * n : (group.rank() + 1) * n]
    for fractions in keep, own:
        torch._dynamo.reset()
        given = {"sage.emulate": True, "sage.policy": [{"recipe": RECIPE, "keep": fractions}]}
        with op_by_op():
            compiled = torch.compile(sdpa_of_heads, backend="sage", options=given, fullgraph=True)
            found += [compiled(group, q, k, v), sage_inductor.report()[0].reason]
    return *found, group.rank()


def sdpa_of_heads(group, *qkv):
    return F.scaled_dot_product_attention(*(for_heads(group, x) for x in qkv), enable_gqa=True)


def test_a_rank_selects_by_the_fractions_of_its_own_heads(ranks):
    """Which heads a rank has the library does not know: where it is given all, a reason says so."""
    q, k, v = (x.float() for x in inputs((512,)))
    keep = [0.1, 0.5, 0.9, 0.3]
    policy = [{"recipe": RECIPE, "keep": keep}]
    with torch.no_grad(), config.patch(emulate=True, policy=policy):
        expected = sage_inductor.attention(q, k, v, enable_gqa=True)
    exact = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    for of_all, why, own, reason, rank in ranks(
        selected_by_head, *sharded((256, 256), q, k, v), keep=keep
    ):
        assert relative_l1(of_all, exact.chunk(2, 1)[rank]) < 1e-5
        assert why.startswith("keep must have a fraction for each of q's 2 heads, or one for all, ")
        assert torch.equal(own, expected.chunk(2, 1)[rank])
        assert f"keep {(*keep[2 * rank : 2 * rank + 2],)}" in reason


@torch.no_grad()
def graph_of_two(group, q, k, v) -> str:
    """The graph, after AOTAutograd, of two calls that know nothing of each other."""
    texts = []

    def see(gm, _):
        texts.append(gm.print_readable(print_output=False))
        return gm.forward

    def function(q, k, v):
        return gather_attention(q, k, v, group), gather_attention(q, v, k, group)

    from torch._dynamo.backends.common import aot_autograd

    torch.compile(function, backend=aot_autograd(fw_compiler=see), fullgraph=True)(q, k, v)
    return texts[0]


def test_two_calls_keep_their_order(ranks):
    q, k, v = inputs((64,))
    (text,) = ranks(graph_of_two, (q, k, v))
    assert text.count("with_effects(") == 2, text  # the second takes the first's token


@torch.no_grad()
def autocast(group, q, k, v):
    with torch.autocast("cpu", torch.bfloat16):
        return attend(group, q, k, v)[0]


def test_under_autocast_it_computes_in_its_dtype(ranks):
    q, k, v = inputs((40, 60), dtype=torch.float32)
    cast = sharded((40, 60), *(x.bfloat16() for x in (q, k, v)))
    found = ranks(autocast, *sharded((40, 60), q, k, v))
    for x, (y, _) in zip(found, ranks(attend, *cast)):
        assert x.dtype == torch.bfloat16 and torch.equal(x, y)


def checked(group, q, k, v):
    args = q, k, v, group.group_name, False, 0.125, NAMED[RECIPE].encode()
    utils = "test_schema", "test_autograd_registration", "test_faketensor"
    return torch.library.opcheck(torch.ops.sage.gather_sdpa.default, args, test_utils=utils)


def test_the_op_is_what_it_says_to_torch(ranks):
    q, k, v = inputs((40,), D_v=24)
    (found,) = ranks(checked, (q, k, v))
    assert set(found.values()) == {"SUCCESS"}, found
    assert torch.ops.sage.gather_sdpa.default in OPAQUE  # no package may hold it


# -- models whose attention is local: the backend finds it ----


class Attention(nn.Module):
    """Its heads may be spread over ranks by its weights."""

    def __init__(self, dim: int, head_dim: int):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.head_dim = head_dim

    def forward(self, x):
        q, k, v = (
            f(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@torch.no_grad()
def tensor_parallel(group, weights: dict, x):
    """What a compiled model computes of its heads of x, and the report."""
    model = Attention(x.shape[2], 32)
    model.load_state_dict(weights)
    plan = dict.fromkeys("qkv", ColwiseParallel()) | {"o": RowwiseParallel()}
    model = parallelize_module(model, DeviceMesh.from_group(group, "cpu"), plan)
    torch._dynamo.reset()
    options = {"sage.emulate": True, "sage.recipe": RECIPE}
    with op_by_op(split=True):  # of local tensors, whose collectives are waited for
        out = torch.compile(model, backend="sage", options=options, fullgraph=True)(x)
    return out, sage_inductor.report().verdict


@torch.no_grad()
def test_local_attention_of_a_parallel_model_is_rewritten(ranks):
    """test_parallel_models.py has Ulysses."""
    model, x = Attention(128, 32), torch.randn(2, 96, 128)
    with sage_inductor.config.patch(emulate=True, recipe=RECIPE), op_by_op():
        expected = torch.compile(model, backend="sage")(x)
    for out, verdict in ranks(tensor_parallel, *[(model.state_dict(), x)] * 2):
        assert verdict == f"1 of 1 attention calls use {RECIPE}"
        assert_close(out, expected, atol=1e-5, rtol=0)
    assert 1e-5 < relative_l1(expected, model(x)) < 0.1


@torch.no_grad()
def by_diffusers(group, q, k, v, mask, ring: int, ulysses: int, recipe: str):
    """What diffusers' dispatch calls of one rank's rows: so many ranks are a ring, so many exchange
    heads."""
    from sage_inductor.integrations.diffusers import sage_attention

    meshes = dict.fromkeys(("ring", "ulysses"), SimpleNamespace(get_group=lambda: group))
    if ring == ulysses == 2:
        ranks = torch.arange(4).view(2, 2)
        meshes = DeviceMesh("cpu", ranks, mesh_dim_names=("ring", "ulysses"))
    context = SimpleNamespace(
        ring_degree=ring, ulysses_degree=ulysses, ring_anything=False, ulysses_anything=False,
        _ring_mesh=meshes["ring"], _ulysses_mesh=meshes["ulysses"],
    )  # fmt: skip
    asked = SimpleNamespace(context_parallel_config=context)
    with (
        sage_inductor.config.patch(emulate=True, recipe=recipe),
        mock.patch.object(gather, "_exchanged", None),  # the shards' lengths are known to be equal
    ):
        return sage_attention(q, k, v, mask, scale=0.3, _parallel_config=asked)


@pytest.mark.models
@pytest.mark.parametrize("recipe", [RECIPE, "sage2-8b-fp8qk"])
@pytest.mark.parametrize("ring, ulysses", [(2, 1), (1, 2), (2, 2)])
@torch.no_grad()
def test_what_a_model_of_diffusers_asks_for_is_passed_on(ranks, ring, ulysses, recipe):
    pytest.importorskip("diffusers")
    q, k, v = (torch.randn(2, 128, 4, 32) for _ in range(3))  # [B, N, H, D]
    mask = (torch.arange(128) < 100).expand(2, 128) if ring == 1 else None
    of_ranks = zip(
        *([None] * 4 if x is None else x.chunk(ring * ulysses, 1) for x in (q, k, v, mask))
    )
    found = ranks(by_diffusers, *of_ranks, ring=ring, ulysses=ulysses, recipe=recipe)
    mask = None if mask is None else mask[:, None, None]
    heads = (x.transpose(1, 2) for x in (q, k, v))
    expected, _ = sdpa(*heads, scale=0.3, recipe=recipe, attn_mask=mask)
    atol = 0 if ring == 1 else 2e-5
    assert_close(torch.cat(found, 1), expected.transpose(1, 2), rtol=0, atol=atol)


# -- what ranks decide ----


# -- DTensors ----


ALL = Replicate()
BY = {"replicated": ALL, "batch": Shard(0), "heads": Shard(1), "sequence": Shard(2)}


def on_dtensors(group, name, placements, tensors, given, backend=None, grid=(2,)):
    """A sage op of DTensors, replicated where no placement is given, on a grid of ranks. Returns
    whole tensors and where they are: its outputs and, where `grad` of the first is given, the
    gradients of the other tensors."""
    if len(grid) == 1:
        mesh = DeviceMesh.from_group(group, "cpu")
    else:  # makes groups, for which all ranks must come
        mesh = DeviceMesh("cpu", torch.arange(group.size()).view(grid))
    tensors = {k: as_dtensor(x, mesh, placements.get(k, ALL)) for k, x in tensors.items()}
    found = [*call_op(name, tensors, given, backend)]
    return [whole(x) for x in found], [x.placements for x in found]


def whole(x):
    if x.dtype != torch.float8_e4m3fn:
        return x.full_tensor()
    codes = x.to_local().view(torch.uint8)  # gloo gathers no FP8
    return DTensor.from_local(codes, x.device_mesh, x.placements).full_tensor().view(x.dtype)


def as_dtensor(x, mesh, placements):
    """x, or each of a list, of which this rank keeps its part."""
    if isinstance(x, list):
        return [as_dtensor(each, mesh, placements) for each in x]
    placements = placements if isinstance(placements, tuple) else (placements,) * mesh.ndim
    shard = x
    for i, placement in enumerate(placements):  # not distribute_tensor: gloo does not scatter FP8
        if placement != ALL:
            shard = shard.chunk(mesh.size(i), placement.dim)[mesh.get_local_rank(i)]
    return DTensor.from_local(shard, mesh, placements, shape=x.shape, stride=x.stride())


def call_op(name: str, tensors: dict, given: dict, backend=None):
    op = getattr(torch.ops.sage, name.split(",")[0])
    if backend is not None:
        torch._dynamo.reset()
        eager = op
        op = torch.compile(lambda *a, **b: eager(*a, **b), backend=backend, fullgraph=True)
    tensors = dict(tensors)
    grad = tensors.pop("grad", None)
    if grad is not None:
        tensors = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    args, given = (), {**tensors, **given}
    if name == "sdpa":
        args, given = arguments(**given), {}
    with torch.set_grad_enabled(grad is not None):
        found = op(*args, **given)
    if grad is None:
        return [found] if isinstance(found, torch.Tensor) else found
    return *found, *torch.autograd.grad(found[0], [*tensors.values()], grad)


def check_on_dtensors(
    ranks, name, placements: dict, tensors: dict, given: dict, placed=None, grid=(2,), **how
) -> None:
    """Bit for bit what one device computes. placed: where outputs are; None: it does not matter."""
    expected = call_op(name, tensors, given)
    of_ranks = [(name, placements, tensors, given)] * math.prod(grid)
    for found in ranks(on_dtensors, *of_ranks, grid=grid, **how):
        assert isinstance(found, tuple), found
        outputs, of_outputs = found
        for x, y in zip(outputs, expected, strict=True):
            assert x.dtype == y.dtype and torch.equal(as_bytes(x), as_bytes(y))
        if placed is not None:
            wanted = [placed] * len(outputs)
            if name.startswith("rowscaled"):  # stats, of [2, B, H, N]
                wanted[1] = tuple(x if x == ALL else Shard(x.dim + 1) for x in placed)
            assert of_outputs == wanted


def as_bytes(x):
    return x.contiguous().view(torch.uint8)  # of FP8, too


SHARDED = {
    "replicated": ((ALL, ALL), {}, ALL),
    "batch": ((Shard(0), Shard(0)), {}, Shard(0)),
    "heads": ((Shard(1), Shard(1)), {}, Shard(1)),
    "heads, one of k": ((Shard(1), ALL), {"H_kv": 1}, Shard(1)),
    "queries": ((Shard(2), ALL), {}, Shard(2)),
    "queries and keys": ((Shard(2), Shard(2)), {}, Shard(2)),
    "queries and keys, causal": ((Shard(2), Shard(2)), {"right": 0}, None),
}
MASKS = [None, (2, 1, 1, 64), (64, 64), (4, 1, 64), (1, 4, 64, 1)]


@pytest.mark.parametrize("case", SHARDED)
@pytest.mark.parametrize(
    "name, mask", [*(("sdpa", x) for x in MASKS), *(("lse", x) for x in MASKS[::2])], ids=str
)
def test_a_call_on_dtensors_is_that_of_whole_tensors(ranks, name, case, mask):
    (of_q, of_kv), shape, placed = SHARDED[case]
    q, k, v = inputs((64,), H_kv=shape.get("H_kv", 2))
    right, tensors = shape.get("right"), dict(q=q, k=k, v=v)
    given = {"right": right, "recipe": RECIPE}
    if name == "lse":
        del tensors["v"]
        given = {"is_causal": right == 0, "scale": None, "attn_mask": None}
    if mask is not None:
        given.pop("attn_mask", None)
        tensors["attn_mask"] = torch.rand(mask) > 0.3
    if case == "heads, one of k" and mask in MASKS[3:]:  # which keys count, of all heads
        placed = None
    placed = None if placed is None else (placed,)
    check_on_dtensors(ranks, name, {"q": of_q, "k": of_kv, "v": of_kv}, tensors, given, placed)


@pytest.mark.parametrize("dim", [0, 1])
def test_what_is_prepared_is_sharded_as_k(ranks, dim):
    q, k, v = inputs((64,))
    prepared = torch.ops.sage.prepare(k, v, None, NAMED[RECIPE].encode(), False)
    tensors = dict(q=q, k=k, v=v, prepared=prepared)
    placements, given = dict.fromkeys(tensors, Shard(dim)), {"recipe": RECIPE}
    check_on_dtensors(ranks, "sdpa", placements, tensors, given, (Shard(dim),))


@pytest.mark.parametrize("of_q, placed", [(0, 0), (1, 1), (2, None)])
@pytest.mark.parametrize("B, H, full", [(2, 4, False), (1, 4, True), (2, 1, True)])
def test_block_lists_are_sharded_by_what_they_tell_apart(ranks, of_q, placed, B, H, full):
    q, k, v = inputs((254,))  # half of it is no whole number of blocks
    lists = block_lists(B, H, 254, 254, 64, 64, 0.5, full, unread=3)._asdict()
    sizes = {name: lists.pop(name) for name in ("block_q", "block_kv")}
    tensors = dict(q=q, k=k, v=v, **{name: x for name, x in lists.items() if x is not None})
    placements, given = dict.fromkeys("qkv", Shard(of_q)), {**sizes, "recipe": RECIPE}
    placed = None if placed is None else (Shard(placed),)
    check_on_dtensors(ranks, "sdpa", placements, tensors, given, placed)


@pytest.mark.parametrize("H_kv, tail", [(1, None), (1, 64), (2, 32)])
def test_lists_of_grouped_heads_are_sharded(ranks, H_kv, tail):
    """Which keys of one head of k count, the lists of all heads say, unless there is a tail."""
    q, k, v = inputs((254,), H_kv=H_kv)
    lists = block_lists(2, 4, 254, 254, 64, 64, 0.1, False, unread=3)
    tensors = dict(q=q, k=k, v=v, kv_num_blocks=lists.kv_num_blocks, kv_indices=lists.kv_indices)
    given = {"block_q": 64, "block_kv": 64, "tail_block": tail, "recipe": RECIPE}
    placements = {"q": Shard(1), **dict.fromkeys("kv", ALL if H_kv == 1 else Shard(1))}
    placed = None if H_kv == 1 and tail is None else (Shard(1),)
    check_on_dtensors(ranks, "sdpa", placements, tensors, given, placed)


@pytest.mark.parametrize("by", ["batch", "heads", "sequence"])
def test_calls_in_an_order_of_tokens_are_sharded(ranks, by):
    """The order is whole on each rank."""
    q, k, v = inputs((254,))
    tensors, layout = dict(q=q, k=k), dict(size=[4, 6, 10], cube=[4, 4, 4], before=9)
    perm = torch.ops.sage.cube_order(q, **layout)
    placements, placed = dict.fromkeys("qkv", BY[by]), None if by == "sequence" else (BY[by],)
    check_on_dtensors(ranks, "cube_order", {"x": BY[by]}, {"x": q}, layout, (ALL,))
    tensors["perm"] = perm
    check_on_dtensors(ranks, "select_blocks", placements, tensors, SELECTION, placed)
    lists = block_lists(2, 4, 254, 254, 64, 64, 0.5, False, unread=3)
    tensors |= dict(v=v, kv_num_blocks=lists.kv_num_blocks, kv_indices=lists.kv_indices)
    given = {"block_q": 64, "block_kv": 64, "recipe": RECIPE}
    check_on_dtensors(ranks, "sdpa", placements, tensors, given, placed)


@pairs(
    of_k=BY, of_v=BY, H=[2, 3], recipe=["sage1-per-token", RECIPE, "sage3"],
    mask=[None, (2, 1, 1, 64), (2, 1, 64)], where=lambda H, mask: H == 2 or mask != (2, 1, 64),
)  # fmt: skip
def test_k_and_v_of_dtensors_are_prepared_where_k_is(ranks, of_k, of_v, H, recipe, mask):
    """Whole, where ranks do not divide its heads, or by rows."""
    _, k, v = inputs((64,), H_q=H, H_kv=H)
    tensors, given = dict(k=k, v=v), {"recipe": NAMED[recipe].encode(), "portable": False}
    if mask is None:
        given["attn_mask"] = None
    else:
        tensors["attn_mask"] = torch.rand(mask) > 0.3
    whole = of_k == "sequence" or of_k == "heads" and H == 3
    placements, placed = {"k": BY[of_k], "v": BY[of_v]}, (ALL if whole else BY[of_k],)
    check_on_dtensors(ranks, "prepare", placements, tensors, given, placed)


def call_of(name: str, **shape) -> tuple[dict, dict]:
    """An op's tensors, with a gradient for ops that train, and what else it is given."""
    q, k, v = inputs((200,), **{"H_kv": 2, **shape})
    training = {"grad": torch.randn_like(q)}, {"scale": 0.125, "out_bnhd": False}
    by_head = [0.1, 0.4, 0.4, 0.9, 0, 1, *[0.3] * 6][: q.shape[1]]
    tensors, given = {
        "sdpa": ({}, {"recipe": RECIPE}),
        "prepare": ({}, {"attn_mask": None, "recipe": NAMED[RECIPE].encode(), "portable": False}),
        "lse": ({}, {"attn_mask": None, "is_causal": True, "scale": None}),
        "select_blocks": ({}, SELECTION),
        "select_blocks, sla": ({}, {**SELECTION, "top_p": 0.0, "others": '{"rule": "sla"}'}),
        BY_HEAD: ({}, {**SELECTION, "others": f'{{"top_k": {by_head}}}'}),
        "sagebwd": (training[0], {**training[1], "is_causal": False}),
        "sagebwd, causal": (training[0], {**training[1], "is_causal": True}),
        "rowscaled": (training[0], {**training[1], "is_causal": False}),
        "rowscaled, causal": (training[0], {**training[1], "is_causal": True}),
    }[name]
    read = {"prepare": dict(k=k, v=v), "lse": dict(q=q, k=k), "select_blocks": dict(q=q, k=k)}
    read |= dict.fromkeys(("select_blocks, sla", BY_HEAD), read["select_blocks"])
    return {**read.get(name, dict(q=q, k=k, v=v)), **tensors}, given


SELECTION = dict(
    scale=0.125, top_k=0.3, top_p=0.2, similarity=0.1, dense_first=0, dense_last=70, block_q=64,
    block_kv=64,
)  # fmt: skip
BY_HEAD = "select_blocks, by head"  # by batch alone
OPS = (
    "sdpa", "prepare", "lse", "select_blocks", "select_blocks, sla", BY_HEAD,
    "sagebwd", "sagebwd, causal", "rowscaled", "rowscaled, causal",
)  # fmt: skip
TRAINING = OPS[6:]


@pairs(
    name=[x for x in OPS if x != "prepare"], by=[*BY], of_heads=[(4, 1), (4, 2), (3, 3), (6, 3), (6, 2)],
    is_whole=[False, True],
    # How a call is sharded does not depend on is_causal, nor on how many heads a rank has.
    alike=dict(
        name=lambda name: name.removesuffix(", causal"),
        of_heads=lambda of_heads: {(6, 2): (4, 2)}.get(of_heads, of_heads),
    ),
)  # fmt: skip
def test_ops_of_dtensors_are_those_of_whole_tensors(ranks, name, by, of_heads, is_whole):
    """is_whole: k and v are on each rank."""
    H_q, H_kv = of_heads
    tensors, given = call_of(name, H_q=H_q, H_kv=H_kv)
    placements = dict.fromkeys(tensors, BY[by])
    placed = None
    if is_whole or by == "heads" and H_kv == 1:
        placements |= dict.fromkeys("kv", ALL)
    elif by != "sequence" and (by, H_q, H_kv) != ("heads", 6, 3):
        placed = (BY["batch" if name == BY_HEAD and by == "heads" else by],)
    check_on_dtensors(ranks, name, placements, tensors, given, placed)


@pytest.mark.parametrize(
    "name, of_grad",
    [  # how a call is sharded does not depend on is_causal
        swept(name, of_grad, unless="causal" not in name or of_grad == "sequence")
        for name in TRAINING
        for of_grad in BY
    ],
)
def test_a_gradient_that_is_placed_otherwise_is_redistributed(ranks, name, of_grad):
    tensors, given = call_of(name)
    placements = {**dict.fromkeys("qkv", Shard(1)), "grad": BY[of_grad]}
    check_on_dtensors(ranks, name, placements, tensors, given, (Shard(1),))


@pytest.mark.parametrize("by", ["batch", "heads"])
@pytest.mark.parametrize(
    "others", ['{"rule": "vsa", "sparsity": [0.9, 0.5, 0, 1]}', '{"rule": "sla"}']
)
def test_dtensors_are_sharded_by_heads_where_they_have_no_fraction_each(ranks, by, others):
    tensors, given = call_of("select_blocks")
    placed = "batch" if "[" in others else by
    given = {**given, "top_p": 0.0, "others": others}
    placements = dict.fromkeys(tensors, BY[by])
    check_on_dtensors(ranks, "select_blocks", placements, tensors, given, (BY[placed],))


OF_MESH = [
    ((Shard(0), Shard(1)), {}),
    # 6 heads on 2 x 2 ranks: of k 2, 1, 2 and 1, of twice as many of q 3 each.
    *(((Shard(1), Shard(1)), {"H_q": H_q, "H_kv": 6, "B": 1}) for H_q in (6, 12)),
]


@pytest.mark.parametrize("placed, shape", OF_MESH, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_ops_are_sharded_over_two_dimensions_of_a_mesh(ranks, name, placed, shape):
    tensors, given = call_of(name, **shape)
    placements, placed = dict.fromkeys(tensors, placed), None if shape else placed
    placed = (Shard(0), ALL) if name == BY_HEAD and not shape else placed
    check_on_dtensors(ranks, name, placements, tensors, given, placed, grid=(2, 2))


@pytest.mark.parametrize(
    "name, by, portable",
    [
        *(
            swept(name, by, False, unless=by == "heads" or name == "sdpa")
            for name in OPS
            for by in ("batch", "heads")
        ),
        # On CPU only these open, on the local tensors.
        ("sdpa", "heads", True), ("prepare", "heads", True),
    ],
)  # fmt: skip
def test_compiled_ops_take_dtensors(ranks, name, by, portable):
    tensors, given = call_of(name)
    given |= {"portable": True} if portable else {}
    placements, placed = dict.fromkeys(tensors, BY[by]), (BY["batch" if name == BY_HEAD else by],)
    check_on_dtensors(ranks, name, placements, tensors, given, placed, backend="aot_eager")


# -- flex_attention under torch's context parallelism ----


@torch.no_grad()
def flex_of_gathered(group, q, k, v):
    """Compiled, as torch's _ContextParallel has it: keys of all ranks, in their own dtype."""

    def function(q, k, v):
        k, v = flex_cp_allgather(k, v, 2, group.group_name)
        return flex_attention(q, k, v, scale=0.125)

    torch._dynamo.reset()
    options = {"sage.emulate": True, "sage.recipe": RECIPE}
    with op_by_op():
        out = torch.compile(function, backend="sage", options=options)(q, k, v)
    return out, sage_inductor.report().verdict


def test_flex_attention_over_gathered_keys(ranks):
    """Its causal mask captures tensors, which say what rows a rank has: test_flex.py has such."""
    q, k, v = inputs((128, 128), B=1, H_kv=4)
    found = ranks(flex_of_gathered, *sharded((128, 128), q, k, v))
    for q_r, (out, verdict) in zip(q.chunk(2, 2), found):
        assert verdict == f"1 of 1 attention calls use {RECIPE}"
        assert_close(out, sdpa(q_r, k, v, recipe=RECIPE)[0], atol=0.02, rtol=0.01)


# -- what is sent ----


@torch.no_grad()
def sent(group, q, k, v) -> list[int]:
    """Bytes of each collective."""
    sizes, send = [], gather.compat.all_gather_single

    def counted(output, input, group):
        assert output.numel() == group.size() * input.numel()
        sizes.append(input.numel() * input.element_size())
        return send(output, input, group=group)

    gather.compat.all_gather_single = counted
    try:
        attend(group, q, k, v)
    finally:
        gather.compat.all_gather_single = send
    return sizes


@pytest.mark.parametrize("P, D", [(2, 64), (4, 128), (2, 72)])
def test_half_the_bytes_of_bf16_are_sent(ranks, P, D):
    N, H = 8192, 2
    q, k, v = (torch.randn(1, H, n, D, dtype=torch.bfloat16) for n in (1, P * N, P * N))
    of_ranks = [(q, *each) for each in sharded([N] * P, k, v)]
    in_16_bits = 2 * H * N * D * 2
    for facts, small, large in ranks(sent, *of_ranks):
        assert facts == gather.FACTS
        assert large <= 0.501 * in_16_bits
        assert facts + small + large <= 0.51 * in_16_bits


def timed_while_a_receive_waits(group, on) -> tuple:
    """The first rank times a call, on a GPU that is not there, with a receive under way that the
    second one answers when it has the first one's times."""
    store, x = dist.distributed_c10d._get_default_store(), torch.zeros(3)
    if group.rank():
        store.get("timing")
    else:
        receive = dist.irecv(x, 1, group)

    def measure():
        store.set("timing", "")
        with mock.patch.multiple(torch.cuda, **on_no_gpu(receive.wait)):
            return timing.time_calls({"call": int}, 1)

    found = timing.agreed("with a receive under way", measure)
    if group.rank():
        dist.send(x + 1, 0, group)
    else:
        receive.wait()
    return found, x.tolist()


def on_no_gpu(wait) -> dict:
    """Of torch.cuda: an event tells 1 ms, and whoever waits for the whole device waits."""
    event = SimpleNamespace(record=int, synchronize=int, elapsed_time=lambda end: 1.0)
    graph = SimpleNamespace(
        capture_begin=lambda *pool, capture_error_mode: None, capture_end=int, replay=int, pool=int
    )
    return {
        "Event": lambda enable_timing: event, "CUDAGraph": lambda: graph,
        **dict.fromkeys(("synchronize", "graph", "empty_cache"), lambda *_, **__: wait()),
        **dict.fromkeys(("Stream", "stream"), lambda *_: contextlib.nullcontext()),
    }  # fmt: skip


def test_who_times_for_all_ranks_does_not_wait_for_what_they_have_yet_to_send(ranks):
    first, second = ranks(timed_while_a_receive_waits, (None,), (None,))
    assert first == ({"call": 0.04}, [1.0] * 3) and second == ({"call": 0.04}, [0.0] * 3)


# -- errors ----


SHAPE = {"B": 1, "H_q": 2, "H_kv": 2, "D": 32, "dtype": torch.bfloat16}

# What the call of one rank has unlike the others', and what all of them are told.
DIFFERENT = [
    ({"dtype": torch.float16}, {}, "dtype torch.float16, rank 0 has dtype torch.bfloat16"),
    ({"D": 48}, {}, "head_dim 48, head_dim of v 48, rank 0 has head_dim 32, head_dim of v 32"),
    ({"D_v": 16}, {}, "head_dim of v 16, rank 0 has head_dim of v 32"),
    ({"H_q": 4}, {}, "heads 4, rank 0 has heads 2"),
    ({"H_kv": 1}, {}, "heads of k 1, rank 0 has heads of k 2"),
    ({"B": 2}, {}, "batch 2, rank 0 has batch 1"),
    ({}, {"recipe": "sage2-8b-fp8qk"}, "recipe fp8/per_token,fp8@"),
    ({}, {"scale": 0.25}, "scale 0.25, rank 0 has scale 0.125"),
    ({}, {"is_causal": True}, "is_causal True, rank 0 has is_causal False"),
]


def called(group, tensors, options, backend="eager"):
    """Compiled, it is the same op, that the graph calls."""
    torch._dynamo.reset()

    def run(q, k, v):
        return attend(group, q, k, v, **options)

    run = run if backend == "eager" else torch.compile(run, backend=backend)
    return run(*tensors)


def of_three(ranks, alike, other, wrong: int, **how) -> list:
    """What a call says on each of three ranks, one of which has another; they still meet then."""
    found = ranks(called, *(other if rank == wrong else alike for rank in range(3)), **how)
    check_that_they_still_meet(ranks)
    return found


@pytest.mark.parametrize("shape, options, message", DIFFERENT, ids=lambda x: str(x)[:30])
def test_what_differs_is_an_error_on_every_rank(ranks, shape, options, message):
    """Where lengths are given, none is told what it is."""
    for lengths in {}, {"lengths": (40, 40, 40)}:
        alike = inputs((40,), **SHAPE), {"scale": 0.125, **lengths}
        other = inputs((40,), **{**SHAPE, **shape}), {"scale": 0.125, **options, **lengths}
        found = of_three(ranks, alike, other, 1)
        if lengths:
            check_unlike(found)
            continue
        for each in found:
            assert each.kind == "ValueError"
            assert f"sage::gather_sdpa: rank 1 has {message}" in each.text


def check_that_they_still_meet(ranks) -> None:
    q, k, v = inputs((10, 20, 30))
    of_ranks = sharded((10, 20, 30), q, k, v)
    for (q_r, _, _), (out, _) in zip(of_ranks, ranks(attend, *of_ranks)):
        assert torch.equal(out, sdpa(q_r, k, v, recipe=RECIPE)[0])


def wrong():
    """What is wrong with the call of one rank, and what all of them are told. Of the errors that any
    call of sage::sdpa raises, some."""
    q, k, v = inputs((40,), **SHAPE)
    whole = torch.zeros(1, 2, 1, 32, dtype=torch.bfloat16).expand(1, 2, MAX_ROWS, 32)
    return {
        "dimensions": ((q[0], k, v), {}, "rank 2: sage::sdpa: q must be [B, H, N, D]"),
        "dtype": ([x.double() for x in (q, k, v)], {}, "rank 2: sage::sdpa: dtype must be one"),
        "no keys": ((q, k[:, :, :0], v[:, :, :0]), {}, "rank 2: sage::sdpa: k must have 1 to"),
        "scale": ((q, k, v), {"scale": math.inf}, "rank 2: sage::sdpa: scale must be finite"),
        "causal": ((q[:, :, :9], k, v), {"is_causal": True}, "rank 2: is_causal needs as many"),
        "too many keys": ((whole, whole, whole), {}, f"at most {MAX_ROWS} keys, got {MAX_ROWS + 80}"),
    }  # fmt: skip


def called_by_op(group, tensors, recipe):
    return torch.ops.sage.gather_sdpa(*tensors, group.group_name, False, 0.125, recipe, [])


@pytest.mark.parametrize("text", ["é", '"', "\N{GRINNING FACE}", "a"])
def test_a_long_message_of_any_characters_reaches_every_rank(ranks, text):
    """What the ranks tell each other has as many bytes on all of them, else they wait for ever."""
    recipe = {"right": NAMED[RECIPE].encode(), "wrong": 600 * text}
    tensors = inputs((40,), **SHAPE)
    of_ranks = [(tensors, recipe["wrong" if rank == 1 else "right"]) for rank in range(3)]
    for found in ranks(called_by_op, *of_ranks):
        assert found.kind == "ValueError", found
        assert f"sage::gather_sdpa: rank 1: recipe: '{50 * text}" in found.text
    check_that_they_still_meet(ranks)


def test_heads_are_not_exchanged_by_some_ranks_alone(ranks):
    """Whether they can be is what all ranks have to agree on."""
    q, k, v = inputs((40,), **SHAPE)
    more = torch.cat([q, q[:, :, :1]], 2)
    for found in ranks(called, *[((each, k, v), {}) for each in (q, more)]):
        assert found.kind == "ValueError"
        assert "rank 1 has as many queries as keys False, rank 0 has" in found.text
    check_that_they_still_meet(ranks)


def check_unlike(found) -> None:
    for each in found:
        assert each.kind == "RuntimeError"
        assert "called with different arguments or unequal lengths, or one" in each.text


@pytest.mark.parametrize(
    "case, backend",
    [*((case, "eager") for case in wrong()), *((x, "aot_eager") for x in ("scale", "dimensions"))],
)
def test_what_is_wrong_on_one_rank_is_an_error_on_every_rank(ranks, case, backend):
    """Where lengths are given, the others are not told what it is."""
    tensors, options, message = wrong()[case]
    right = inputs((40,), **SHAPE), {}
    for found in of_three(ranks, right, (tensors, options), 2, backend=backend):
        assert found.kind == "ValueError"
        assert found.text.startswith("sage::gather_sdpa: ") and message in found.text
    lengths = {"lengths": (40, 40, MAX_ROWS if "many" in case else 40)}
    alike, other = (right[0], lengths), (tensors, {**lengths, **options})
    *others, its = of_three(ranks, alike, other, 2, backend=backend)
    if case == "too many keys":  # which the lengths say on all of them
        assert all(x.kind == "ValueError" and message in x.text for x in (*others, its))
        return
    assert its.kind == "ValueError" and its.text.startswith("sage::gather_sdpa: rank 2: ")
    assert message in its.text
    check_unlike(others)


@pytest.mark.parametrize("lengths", [(40, 40), (40, 40, 39), (40, 0, 40), (40, 40, 40, 1)])
def test_lengths_that_no_ranks_have(ranks, lengths):
    call = inputs((40,), **SHAPE), {"lengths": lengths}
    found = ranks(called, call, call, call)
    for rank, each in enumerate(found):
        wrong_here = len(lengths) != 3 or lengths[rank] != 40 or 0 in lengths
        assert each.kind == ("ValueError" if wrong_here else "RuntimeError")
        told = "lengths must be the numbers of keys of 3 ranks, 40 of them rank"
        assert (told in each.text) == wrong_here
    check_that_they_still_meet(ranks)


def test_unequal_lengths_that_are_not_asked_for(ranks):
    q, k, v = inputs((40, 41, 40))
    check_unlike(
        ranks(called, *[(each, {"lengths": None}) for each in sharded((40, 41, 40), q, k, v)])
    )
    check_that_they_still_meet(ranks)


@pytest.mark.parametrize("lengths", ["all", [], ()])
def test_lengths_that_are_none(gloo, lengths):
    with pytest.raises(
        SageOptionError, match="lengths must be the number of keys of each rank, None"
    ):
        gather_attention(*inputs((10,)), lengths=lengths)


def test_all_ranks_or_none_ask_for_lengths(ranks):
    tensors = inputs((40,), **SHAPE)
    given, not_given = (tensors, {"lengths": (40, 40, 40)}), (tensors, {})
    first, its, last = ranks(called, not_given, given, not_given)
    check_unlike([its])
    for each in first, last:
        assert each.kind == "ValueError"
        assert "rank 1: did not ask for lengths, and another rank did" in each.text
    check_that_they_still_meet(ranks)


# -- which way ----


def test_the_host_is_waited_for_in_eager():
    call, group = transfer(N=4608, P=8, H=24), SimpleNamespace(size=lambda: 8)
    with mock.patch.object(transport, "rates_of", lambda *_: NVLINK):
        assert transport.choose(call, group, torch.device("cpu")) == "rows"
    assert choose(call, NVLINK) == "heads"


def transfer(P=2, N=75600, H=40, D=128, recipe=RECIPE, **given) -> Transfer:
    fields = dict(
        lengths=(N // P,) * P, B=1, H_q=H, H_kv=H, D=D, D_v=D, itemsize=2, is_causal=False,
        square=True, recipe=NAMED[recipe],
    )  # fmt: skip
    return Transfer(**{**fields, **given})


NVLINK = Rates(Line(1.5e-5, 244e9), Line(1.5e-5, 207e9), 3.8e12, 2.2e-6)  # two H200s
WRITTEN = NVLINK._replace(put=Line(6e-6, 307e9))
LIMIT = 10**9  # bytes of a rank's memory that others may write to
PCIE = Rates(Line(4e-5, 20e9), Line(4e-5, 20e9), 2e12, 2.2e-6)


@pytest.mark.parametrize(
    "call, rates, way",
    [
        (transfer(), NVLINK, "codes"),
        (transfer(P=8), NVLINK, "heads"),
        (transfer(), PCIE, "codes"),
        (transfer(H_q=40, H_kv=8), PCIE, "codes"),
        (transfer(recipe="sage1-per-token", square=False), PCIE, "rows"),
        (transfer(P=8), PCIE, "heads"),
        (transfer(P=8, square=False), PCIE, "codes"),
        (transfer(P=8, H=44), PCIE, "codes"),
        (transfer(is_causal=True), NVLINK, "heads"),
        (transfer(N=4608, H=24), NVLINK, "rows"),
        (transfer(is_causal=True, H_kv=1, recipe="sage2-8b"), NVLINK, "rows"),
        (transfer(N=17776, H_q=48, H_kv=12, D=64), WRITTEN, "rows"),
        (transfer(N=17776, H=48, D=64, P=8), WRITTEN, "heads"),
        (transfer(), WRITTEN, "codes"),  # no more may be written
    ],
)
def test_the_way_of_the_least_predicted_time(call, rates, way):
    assert choose(call, rates) == way


def test_the_report_says_so_if_there_is_no_memory_after_all():
    assert choose(transfer(N=4608, H=24), WRITTEN, has_it=False) == "rows"


@pytest.mark.parametrize(
    "way, mapped, sends, messages, received, copied",
    [
        # Bytes of 1000 rows of 2 heads of 64: a rank's k and v, or q, k, v and the output.
        ("rows", False, "gather", 2, 512e3, 2 * 768e3),
        ("rows", True, "put", 1, 512e3, 2 * 768e3),
        ("heads", False, "exchange", 5, 1024e3 / 2, 768e3 + 512e3),
        ("heads", True, "put", 2, 1024e3 / 2, 768e3 + 512e3),
        ("codes", True, "gather", 2, 256e3, 768e3 + 2.0 * 2 * 768e3),
    ],
)
def test_the_bytes_that_are_sent_and_copied_are_counted(
    way, mapped, sends, messages, received, copied
):
    call, free = transfer(N=2000, H=2, D=64), Line(0.0, math.inf)
    rates = Rates(free, free, math.inf, 0.0, free if mapped else None)
    computed = call.seconds(way, rates)
    assert computed == pytest.approx(2 * 2 * 200 * 1000 * 2000 / transport.FLOPS)
    line = Line(1e-3, 1e9)
    assert call.seconds(way, rates._replace(**{sends: line})) - computed == pytest.approx(
        received / 1e9 + (messages + (sends == "gather")) * 1e-3  # what the ranks agree on
    )
    assert call.seconds(way, rates._replace(copy=1e8)) - computed == pytest.approx(copied / 1e8)
    launched = call.seconds(way, rates._replace(launch=1.0)) - computed
    assert launched == pytest.approx(50 + 2 * 3 if way == "codes" else 0)


@pytest.mark.parametrize(
    "way, pairs", [("rows", 1500 * 2000), ("codes", 1500 * 2000), ("heads", 1000 * 2000)]
)
def test_of_a_causal_call_the_pairs_of_the_last_rank_are_counted(way, pairs):
    """Of 2000 rows the second half sees 1500 keys a row, and half of the heads 1000."""
    full, causal = (transfer(N=2000, H=2, is_causal=each) for each in (False, True))
    free = Rates(*[Line(0.0, math.inf)] * 2, math.inf, 0.0)
    saved = full.seconds(way, free) - causal.seconds(way, free)
    left_out = 1000 * 2000 - pairs // 2
    assert saved == pytest.approx(2 * 2 * 256 * left_out / transport.FLOPS, rel=1e-3)


@pytest.mark.parametrize("way", ["rows", "heads"])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_ranks_are_sent_fits_what_is_asked_for(way, rank):
    lengths, N = (70, 33), 103
    q, k, v = (torch.randn(2, H, lengths[rank], D) for H, D in ((4, 64), (2, 64), (2, 40)))
    memory = SimpleNamespace(
        rank=rank, array=lambda _, shape, dtype, at: torch.zeros(shape, dtype=dtype),
        arrive=lambda: None,
    )  # fmt: skip
    by = exchange.Peers(memory, lengths)
    if way == "rows":
        by.rows((k, v))
    else:
        by.heads((q, k, v))
        by.back((torch.randn(2, 2, N, 40), torch.randn(2, 2, N, 1)))
    asked_for = transport.Transfer.of(q, k, v, lengths, False, NAMED[RECIPE]).written(way)
    assert by.at <= asked_for


def test_few_channels_wait_for_exponentials():
    free = Rates(*[Line(0.0, math.inf)] * 2, math.inf, 0.0)
    few, some, many = (transfer(D=D).seconds("rows", free) for D in (64, 100, 128))
    assert few == some == pytest.approx(many * 200 / 256)


def choose(call: Transfer, rates: Rates, has_it: bool = True) -> str:
    group = SimpleNamespace(size=lambda: len(call.lengths))
    fits = lambda size: size < LIMIT  # noqa: E731
    memory = SimpleNamespace(fits=fits, reserve=lambda size: has_it) if rates.put else None
    with (
        mock.patch.multiple(transport, rates_of=lambda *_: rates, captures=lambda _: True),
        mock.patch.object(transport.peers, "of", lambda *_: memory),
    ):
        found = transport.choose(call, group, torch.device("cuda"))
    (line,) = [each for each in notes.NOTES.values()][-1:]
    by_peers = rates.put and found != "codes" and call.written(found) < LIMIT and has_it
    how = "written to the GPUs' memory" if by_peers else "by collectives"
    whom = f"{len(call.lengths)} ranks, {sum(call.lengths)} keys, {call.H_q} heads of {call.D}: "
    before, _, predicted = line.partition(" (predicted ms: rows ")
    assert before.endswith(f"{whom}{transport.WAYS[found].format(bits=16)}, {how}")
    timed = rates if call.written("rows") < LIMIT else rates._replace(put=None)
    assert float(predicted.split(",")[0].strip(")")) == pytest.approx(
        1e3 * call.seconds("rows", timed), rel=5e-3
    )
    notes.NOTES.clear()
    return found


def rates_by_files(group, folder: str, seconds: float) -> tuple:
    """The rates, when a large write takes so long and everything else one second; what is done."""
    memory, of_calls = MappedFiles(group, folder), iter([1.0] * 7 + [seconds])

    def clock(call, ahead, device):
        memory.ends = [0] * memory.P
        ahead()
        call()
        return next(of_calls)

    sends = {
        name: memory.seeing(name, getattr(exchange.compat, name))
        for name in ("all_gather_single", "all_to_all_single")
    }
    with (
        mock.patch.multiple(transport, _clock=clock),
        mock.patch.multiple(exchange.compat, **sends),
        mock.patch.object(peers, "of", lambda *_: memory),
    ):
        rates = transport._measure(group, torch.device("cpu"))
    said = exchange.said(bytes([group.rank(), 7]), group, torch.device("cpu"))
    return rates, memory.did, said


@pytest.mark.parametrize("seconds, used", [(0.25, True), (1.5, False)])
def test_memory_is_used_if_it_is_written_faster_than_collectives_send(
    ranks, tmp_path, seconds, used
):
    for rates, did, said in ranks(rates_by_files, *[(str(tmp_path), seconds)] * 2):
        sent = transport.SENT["cpu"][1] / 2
        assert rates.put == (Line(seconds / 2, sent / (seconds / 2)) if used else None)
        assert rates.gather == Line(0.5, 2 * 2 * sent) and rates.exchange == Line(0.5, 2 * sent)
        together = ["all_gather_single"]  # before each, and when all have measured
        measured = together * 2 + (together + together) * 2 + (together + ["all_to_all_single"]) * 2
        measured += (together + ["arrive"]) * 2 + together
        assert did == measured + ["given up"] * (not used)
        assert said == [b"\0\7", b"\1\7"]


def test_a_rate_is_that_of_one_call_of_several(monkeypatch):
    calls, before = [], []
    monkeypatch.setattr(transport.time, "perf_counter", lambda: 0.5 * len(calls))
    ahead = lambda: before.append(len(calls))  # noqa: E731
    assert transport._clock(lambda: calls.append(1), ahead, torch.device("cpu")) == 0.5
    assert len(calls) == transport.REPEATS * transport.IN_A_ROW
    assert before == [n * transport.IN_A_ROW for n in range(transport.REPEATS)]


def test_what_travels_as_codes_and_by_heads():
    names = {name for name in NAMED if transfer(recipe=name).why_not("codes") is None}
    assert names == {"sage2-8b-per-token", "sage2-8b-rotated", "sage2-8b-fp8qk"}
    assert "do not divide 40 heads of q and 3 of k" in transfer(H_kv=3).why_not("heads")
    assert "as many queries as keys" in transfer(square=False).why_not("heads")
    assert "got 'pigeons'" in transfer().why_not("pigeons")


@torch.no_grad()
def measured(group, q, k, v) -> tuple:
    notes.NOTES.clear()
    transport._measured.clear()
    with mock.patch.object(transport, "_clock", lambda *_: 1.0 + group.rank()):
        out = gather_attention(q, k, v, group, recipe=RECIPE)
    with mock.patch.object(transport, "_measure", None):  # once a group
        assert torch.equal(out, gather_attention(q, k, v, group, recipe=RECIPE))
    rates = transport.rates_of(group, q.device)
    transport._measured.clear()
    return rates, str(sage_inductor.report()).splitlines()[-1]  # above it: calls of other tests


def test_ranks_choose_by_the_rates_of_the_slowest(ranks):
    q, k, v = inputs((64, 64, 64))
    (rates, note), *others = ranks(measured, *sharded((64, 64, 64), q, k, v))
    sent = transport.SENT["cpu"][1] // (3 * 128) * 128 * 3
    assert rates == Rates(
        Line(1.5, 2 * sent / 1.5),
        Line(1.5, 2 * sent / 3 / 1.5),
        4 * transport.SENT["cpu"][1] / 3,
        3,
    )
    assert all(each == (rates, note) for each in others)
    assert note.startswith("gather_attention of 3 ranks, 192 keys, 4 heads of 64: ")


def with_gradient(group, q, k, v):
    return gather_attention(q, k.requires_grad_(), v, group)


def outside(group, q, k, v):
    """Of a group of the first rank alone."""
    alone = dist.new_group([0])
    return gather_attention(q, k, v, alone) if dist.get_rank() else None


def misnamed(group, q, k, v):
    return gather_attention(q, k, v, group, recipe="sage2")


def test_errors_that_need_no_other_rank(ranks):
    q, k, v = inputs((40,), **SHAPE)
    with pytest.raises(RuntimeError, match="needs torch.distributed.init_process_group"):
        gather_attention(q, k, v)
    (found,) = ranks(with_gradient, (q, k, v))
    assert (found.kind, "has no gradient" in found.text) == ("RuntimeError", True)
    (found,) = ranks(misnamed, (q, k, v))
    assert found.kind == SageOptionError.__name__ and "got 'sage2'" in found.text
    *_, found = ranks(outside, *[(q, k, v)] * 4)
    assert (found.kind, "not in the group" in found.text) == ("RuntimeError", True)


def leave(group, q, k, v):
    if group.rank():
        os._exit(0)
    return attend(group, q, k, v)


def test_a_rank_that_is_gone_is_an_error_within_the_time_out(ranks):
    """Of two that nothing else asks for."""
    call = inputs((40,), **SHAPE)
    for rank in (4, 5):
        ranks.send(rank, ("leave", 2, call, {}))
    found = ranks.receive(4)
    assert found.kind in ("RuntimeError", "DistBackendError"), found
    assert "gloo" in found.text.lower(), found


# -- one rank ----


def check_one_rank(*tensors) -> None:
    """Bit for bit: in bf16 nine of ten numbers of these two recipes are equal, the others near."""
    found = {x: gather_attention(*tensors, recipe=x) for x in (RECIPE, OF_AUTO)}
    assert not found[RECIPE].equal(found[OF_AUTO])
    assert torch.equal(gather_attention(*tensors), found[OF_AUTO])
    for recipe, out in found.items():
        assert torch.equal(out, sdpa(*tensors, scale=128**-0.5, recipe=recipe)[0])


@torch.no_grad()
def test_one_rank_computes_what_the_op_does(gloo):
    q, k, v = inputs((1000,), D=128)
    check_one_rank(q, *as_gathered(k, v))


@pytest.mark.gpu
@torch.no_grad()
def test_a_call_is_captured_in_a_cuda_graph(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        tensors = [x.cuda() for x in inputs((1000,), D=128)]
        others = [torch.randn_like(x) for x in tensors]
        expected = [gather_attention(*each) for each in (tensors, others)]
        check_one_rank(*tensors)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = gather_attention(*tensors)
        graph.replay()
        assert torch.equal(out, expected[0])
        for x, y in zip(tensors, others):
            x.copy_(y)
        graph.replay()
        assert torch.equal(out, expected[1])
    finally:
        dist.destroy_process_group()


# -- who has what ----


def test_every_block_is_quantized_once_of_all_its_rows():
    for lengths in itertools.product((1, 2, 63, 64, 65, 130), repeat=3):
        shards, rows = Shards(lengths), []
        for rank, n in enumerate(lengths):
            first, leading = shards.offset(rank), shards.leading(rank)
            own = [*range(first + leading, first + n)]
            for other in shards.completing(rank):
                at = shards.offset(other)
                own += range(at, at + shards.leading(other))
            assert -(-len(own) // K_BLOCK) == shards.blocks(rank)
            assert not own or own[0] == shards.first_block(rank) * K_BLOCK
            rows += own
        assert rows == [*range(shards.N)]
        assert sum(map(len, shards.samples())) == 128


def test_the_tensors_of_a_message_are_aligned_and_apart():
    specs = [
        ((3,), torch.uint8),
        ((5,), torch.int64),
        ((1, 0, 2), torch.half),
        ((7, 1), torch.half),
    ]
    message = gather._message(specs, torch.device("cpu"))
    for messages in (message, torch.stack([message, message])):
        views = gather._views(messages, specs)
        for n, (view, (shape, dtype)) in enumerate(zip(views, specs)):
            assert (view.shape[-len(shape) :], view.dtype) == (shape, dtype)
            assert view.storage_offset() * dtype.itemsize % gather.ALIGN == 0
            view.fill_(n)
        assert all((view == n).all() for n, view in enumerate(views))


if __name__ == "__main__":
    serve(globals())
