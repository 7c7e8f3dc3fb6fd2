"""The rules by which checkpoints select blocks, each beside its public definition in plain PyTorch.

Shapes: B batch, H heads, N sequence, D head_dim, M_q and M blocks of queries and of keys.
"""

import functools
import itertools
import math
import random

import pytest
import support
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from sage_inductor.ops.sparse import selector
from sage_inductor.ops.sparse.selector import RULES, Selection

SPARSITIES = [round(0.05 * n, 2) for n in range(1, 20)]


def which(counts: Tensor, indices: Tensor) -> Tensor:
    """The lists [..., M_q] and [..., M_q, M] as bool [..., M_q, M]; each row must be in order."""
    M = indices.shape[-1]
    listed = torch.arange(M) < counts.unsqueeze(-1)
    assert torch.equal(indices.sort(-1)[0], torch.arange(M).int().expand_as(indices))
    in_order = torch.where(listed, indices, indices + M)
    assert torch.equal(in_order, in_order.sort(-1)[0])
    return torch.zeros_like(listed).scatter(-1, indices.long(), listed)


def select(q: Tensor, k: Tensor, asked: Selection, scale: float = 0.125) -> Tensor:
    return which(*torch.ops.sage.select_blocks(q, k, scale, *asked.arguments()))


# -- the definitions --


def pooled(x: Tensor, block: int) -> Tensor:
    """The mean of each block of x [B, H, N, D], of its own tokens, rounded once to x's dtype."""
    means = [each.float().sum(2) / each.shape[2] for each in x.split(block, 2)]
    return torch.stack(means, 2).to(x.dtype)


def product(q_mean: Tensor, k_mean: Tensor) -> Tensor:
    """q_mean [B, H_q, M_q, D], k_mean [B, H_kv, M, D] -> [B, H_q, M_q, M], rounded once."""
    k_mean = k_mean.repeat_interleave(q_mean.shape[1] // k_mean.shape[1], 1)
    return (q_mean.double() @ k_mean.double().mT).to(q_mean.dtype)


def of_sla(q: Tensor, k: Tensor, asked: Selection, scale: float) -> Tensor:
    if asked.scores == "fp32":
        q, k = q.float(), k.float()
    k = k - k.float().mean(2, keepdim=True).to(k.dtype)
    return product(pooled(q, asked.size[0]), pooled(k, asked.size[1]))


def of_vsa(q: Tensor, k: Tensor, asked: Selection, scale: float) -> Tensor:
    if asked.scores == "fp32" or asked.segments:
        q, k = q.float(), k.float()
    scores = product(pooled(q, asked.size[0]), pooled(k, asked.size[1]))
    return (scores.double() / q.shape[3] ** 0.5).to(q.dtype)


def of_error(q: Tensor, k: Tensor, asked: Selection, scale: float) -> Tensor:
    q, k = q.double(), k.double()
    k_mean, squares = pooled(k, asked.size[1]), pooled(k.square(), asked.size[1])
    spread = (squares - k_mean.square()).sum(-1).clamp(min=2.0**-126).log()
    k_of_q = q.shape[1] // k.shape[1]
    scores = scale * product(pooled(q, asked.size[0]), k_mean)
    return scores + spread.repeat_interleave(k_of_q, 1).unsqueeze(2)


SCORES = {"sla": of_sla, "vsa": of_vsa, "error": of_error}
COUNTS = {
    ("sla", "top_k"): lambda r, M: min(M, int(r * M)),
    ("sla", "sparsity"): lambda s, M: int((1 - s) * M),
    ("vsa", "sparsity"): lambda s, M: max(1, min(math.ceil((1 - s) * M), M)),
    ("error", "top_k"): lambda d, M: max(1, int(d * M)),
}


def sol(q: Tensor, k: Tensor, asked: Selection, scale: float) -> tuple[Tensor, Tensor]:
    """(what is kept, what float64 cannot tell from the threshold), bool [B, H_q, M_q, M]."""
    (block_q, block_kv), G = asked.size, q.shape[1] // k.shape[1]
    q_mean, k_mean = pooled(q.double(), block_q), pooled(k.double(), block_kv)
    k_mean = (k_mean - k_mean.mean(2, keepdim=True)).repeat_interleave(G, 1)
    scores = torch.stack(
        [(scale * each @ k_mean.mT).mean(2) for each in q.double().split(block_q, 2)], 2
    )
    variance = k_mean.square().mean(2, keepdim=True)
    deviation = scale**2 * (q_mean.square() * variance).sum(3) + 1e-6 / math.log2(math.e) ** 2
    bound = asked.tau * deviation.sqrt().unsqueeze(3)
    kept = scores > bound
    for m, j in itertools.product(range(kept.shape[2]), range(kept.shape[3])):
        of_q = range(m * block_q // block_kv, -(-(m + 1) * block_q // block_kv))
        kept[..., m, j] |= any(abs(i - j) <= 1 for i in of_q)
    return kept, (scores - bound).abs() < 1e-6 * (bound.abs() + 1)


def dense_blocks(N: int, block: int, dense: tuple) -> list[bool]:
    is_dense = [False] * N
    for start, end in dense:
        for i in range(*slice(start, end).indices(N)):
            is_dense[i] = True
    return [any(is_dense[first : first + block]) for first in range(0, N, block)]


def amount(asked: Selection) -> tuple[str, float]:
    usual = Selection()
    return next(
        (name, getattr(asked, name))
        for name in RULES[asked.rule].amounts
        if getattr(asked, name) != getattr(usual, name)
    )


def by_definition(q: Tensor, k: Tensor, asked: Selection, scale=0.125) -> tuple[Tensor, Tensor]:
    """What is kept, the first of equal scores, and what fp32 cannot tell from the least that is or
    the first that is not. bool [B, H_q, M_q, M]."""
    N, (block_q, block_kv), prefix = q.shape[2], asked.size, sum(asked.segments)
    of_queries = (*asked.dense, (0, prefix))
    of_keys = asked.dense if asked.mode == "compete" else of_queries
    of_q = torch.tensor(dense_blocks(N, block_q, of_queries))
    of_kv = torch.tensor(dense_blocks(N, block_kv, of_keys))
    always = of_q[:, None] | of_kv
    if asked.rule == "sol":
        kept, unsure = sol(q, k, asked, scale)
        return kept | always, unsure & ~always
    scores = SCORES[asked.rule](q, k, asked, scale)
    always = always.expand_as(scores)
    name, how_much = amount(asked)
    of_prefix = -(-min(prefix, N) // block_kv) if asked.mode == "compete" else 0
    rest = (~of_kv).sum().item() - of_prefix
    count = of_prefix + (COUNTS[asked.rule, name](how_much, rest) if rest else 0)
    ranked = scores.masked_fill(always, -torch.inf)
    order = ranked.sort(dim=-1, descending=True, stable=True)[1]
    kept = torch.zeros_like(always).scatter(-1, order[..., :count], True) | always
    first = torch.zeros_like(kept).scatter(-1, order[..., :1], True)  # the reference divides by 0
    kept = torch.where(kept.any(-1, keepdim=True), kept, first)
    tail = [N % block for block in asked.size]
    if asked.rule != "error" and not any(n & (n - 1) for n in tail):  # means are exact
        return kept, torch.zeros_like(kept)
    least = ranked.gather(-1, order[..., [count - 1]]) if count else -torch.inf
    tolerance = 1e-5 if scores.dtype in (torch.float32, torch.float64) else 0
    return kept, ((ranked - least).abs() < tolerance) & ~always


# -- the draws --


LENGTHS = 1, 2, 63, 64, 65, 127, 128, 129, 191, 700, 1024, 1025, 4096, 4097
RANGES = (), ((0, 1),), ((0, 100), (-70, None)), ((64, 128),), ((130, -200),), ((-5000, 3),)


def exact_tokens(draw: random.Random, B: int, H: int, N: int, D: int, dtype) -> Tensor:
    """Integers of -2 to 2 whose sum is 0 in each channel, in no plain layout: all means of blocks
    of 64 and 128 are exact in bf16, and all products in fp32. What is beside them is NaN."""
    whole = torch.full((B, N + 2, H + 1, D), torch.nan, dtype=dtype)
    alike = draw.choice([1, 30])  # tokens in a row, so that means are large and round
    half = torch.randint(-2, 3, (B, N // 2 // alike + 1, H, D)).repeat_interleave(alike, 1)
    half = half[:, : N // 2]
    tokens = torch.cat([half, -half, torch.zeros(B, N % 2, H, D)], 1).roll(draw.randint(0, N), 1)
    if draw.random() < 0.3:  # few different scores, and many equal ones
        tokens[..., 1:] = 0
    whole[:, 1:-1, :H] = tokens.to(dtype)
    return whole[:, 1:-1, :H].transpose(1, 2)


def drawn(draw: random.Random, rule: str) -> Selection:
    name = draw.choice(RULES[rule].amounts)
    how_much = draw.choice([*SPARSITIES, draw.random(), 0.001, 0.999])
    how_much = draw.choice([-0.5, 0.0, 0.5, 1.0, 1.3, 2]) if name == "tau" else how_much
    others = {"blocks": draw.choice([None, (64, 64), (128, 64), (64, 128), (128, 128)])}
    if "scores" in RULES[rule].others:
        others["scores"] = draw.choice(["as_trained", "as_trained", "fp32"])
    if "segments" in RULES[rule].others and draw.random() < 0.6:
        others["segments"] = draw.choice([(128,), (256, 0, 128), (1024, 384)])
        others["mode"] = draw.choice(["exempt", "compete"])
    else:
        others["dense"] = draw.choice([(), *RANGES])
    return Selection(**{name: how_much}, rule=rule, **others)


TRAINED = [rule for rule in RULES if rule != "pooled"]


@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("rule", TRAINED)
def test_a_rule_is_its_definition_where_arithmetic_is_exact(rule, part):
    """100 draws each: any length, tails, prefixes, grouped heads, every dtype, equal scores."""
    for seed in range(100 * part, 100 * (part + 1)):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        B, H_kv, G = draw.choice([1, 1, 2]), draw.choice([1, 2]), draw.choice([1, 1, 2, 3])
        N, D = (
            draw.choice([*LENGTHS, *(draw.randint(2, 2000) for _ in LENGTHS)]),
            draw.choice([8, 64]),
        )
        dtype = draw.choice([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32])
        asked = drawn(draw, rule)
        q, k = (exact_tokens(draw, B, H, N, D, dtype) for H in (H_kv * G, H_kv))
        found, (expected, unsure) = select(q, k, asked), by_definition(q, k, asked)
        assert ((found == expected) | unsure).all(), (seed, asked, N, D, dtype)
        if rule != "sol":
            assert torch.equal(found.sum(-1), expected.sum(-1)), (seed, asked, N, D, dtype)


@pytest.mark.parametrize(
    "asked",
    [
        Selection(0.3, rule="sla"),
        Selection(rule="vsa", sparsity=0.7),
        Selection(rule="vsa", sparsity=0.7, segments=(256,)),
    ],
    ids=["sla", "vsa", "segments"],
)
def test_scores_are_rounded_where_the_reference_rounds_them(asked):
    """Keys with a common part: SLA takes it off in their dtype, VSA leaves it. Large scores are
    next to each other in bf16."""
    for seed in range(20):
        torch.manual_seed(seed)
        q = exact_tokens(random.Random(seed), 1, 2, 4096, 8, torch.bfloat16)
        k = (q.flip(2) + torch.randint(0, 2, q.shape) + 1).bfloat16()
        assert torch.equal(select(q + 1, k, asked), by_definition(q + 1, k, asked)[0]), seed


@pytest.mark.parametrize("rule", TRAINED)
def test_the_first_of_equal_scores_are_kept(rule):
    """All of them are equal here. Of sol none is above its threshold: the diagonal is kept."""
    q, k = torch.ones(2, 1, 2, 64 * 10, 16).unbind(0)
    how_much = {RULES[rule].amounts[0]: 1.0 if rule == "sol" else 0.4}
    found = select(q, k, Selection(**how_much, rule=rule, blocks=(64, 64)))
    count = {"vsa": 6, "sla": 4, "error": 4}.get(rule)
    i = torch.arange(10)
    expected = (i < count) if count else (i[:, None] - i).abs() <= 1
    assert torch.equal(found, expected.expand(1, 2, 10, 10))


def ulps(scores: Tensor) -> Tensor:
    """The distance of bf16 numbers from each of [..., M] to the next one."""
    return 2.0 ** (scores.float().abs().clamp(min=2.0**-126).log2().floor() - 7)


@pytest.mark.parametrize("rule", [x for x in TRAINED if "scores" in RULES[x].others])
def test_of_random_tokens_only_scores_next_to_the_least_that_is_kept_differ(rule):
    """The definition as its authors run it, in bf16 from beginning to end."""
    for seed in range(12):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        N, G = draw.randint(64, 4100), draw.choice([1, 2])
        tokens = torch.randn(1, 2 * G + 2, N, 64) + torch.randn(1, 1, N, 64).cumsum(2) / 8
        q, k = tokens.bfloat16().split([2 * G, 2], 1)
        asked = drawn(draw, rule)._replace(
            dense=(), segments=(), mode="exempt", scores="as_trained"
        )
        scores = AS_RUN[rule](q, k, asked).float()
        found = select(q, k, asked)
        expected, _ = by_definition(q, k, asked)
        count = expected.sum(-1, keepdim=True)
        assert torch.equal(found.sum(-1, keepdim=True), count)
        order = scores.sort(-1, descending=True)[0]
        least, next_one = (
            order.gather(-1, count - 1),
            order.gather(-1, count.clamp(max=order.shape[-1] - 1)),
        )
        near = (scores >= least - 2 * ulps(least)) & (scores <= next_one + 2 * ulps(next_one))
        assert found[scores > least + 2 * ulps(least)].all(), seed
        assert not found[scores < least - 2 * ulps(least)].any(), seed
        assert near[found != expected].all(), seed


def sla_as_run(q: Tensor, k: Tensor, asked: Selection) -> Tensor:
    k = k - k.mean(2, keepdim=True)
    q_mean, k_mean = (
        torch.stack([each.mean(2) for each in x.split(block, 2)], 2)
        for x, block in zip((q, k), asked.size, strict=True)
    )
    return q_mean @ k_mean.repeat_interleave(q.shape[1] // k.shape[1], 1).mT


def vsa_as_run(q: Tensor, k: Tensor, asked: Selection) -> Tensor:
    q_mean, k_mean = pooled(q, asked.size[0]), pooled(k, asked.size[1])
    scores = q_mean @ k_mean.repeat_interleave(q.shape[1] // k.shape[1], 1).mT
    return scores / q.shape[3] ** 0.5


AS_RUN = {"sla": sla_as_run, "vsa": vsa_as_run}


# -- how many --


@pytest.mark.parametrize("rule, name", COUNTS)
def test_so_many_blocks_are_kept_as_the_expression_says(rule, name):
    """For every number of blocks up to 4,096."""
    rest = torch.arange(1, 4097)
    for how_much in SPARSITIES:
        asked = Selection(**{name: how_much}, rule=rule)
        expected = [COUNTS[rule, name](how_much, M) for M in rest.tolist()]
        assert selector._count(rest, asked).tolist() == expected, how_much


def check_every_length(device: str, lengths: list[int], parts: list[float], **given) -> None:
    """That one graph has the counts of all lengths."""
    asked = [(pair, part) for pair in COUNTS for part in parts]
    of_op = [Selection(**{name: x}, rule=rule).arguments() for (rule, name), x in asked]
    compiled, graphs = by_one_graph(
        lambda q: [torch.ops.sage.select_blocks(q, q, 1.0, *each)[0] for each in of_op], **given
    )
    for N in lengths:
        q = torch.zeros(1, 1, N, 8, device=device, dtype=torch.bfloat16)
        torch._dynamo.mark_dynamic(q, 2)
        blocks = [-(-N // RULES[rule].blocks[1]) for (rule, _), _ in asked]
        expected = [max(1, COUNTS[pair](x, M)) for (pair, x), M in zip(asked, blocks, strict=True)]
        assert [x.unique().item() for x in compiled(q)] == expected, N
    assert graphs() == 1


def by_one_graph(function, **given):
    """(it compiled, a function that says how many graphs there are)"""
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(function, fullgraph=True, **given)
    return compiled, lambda: counters["stats"]["unique_graphs"]


def test_one_graph_counts_the_blocks_of_every_length():
    lengths = [64 * n for n in (3, 10, 59, 100, 590)] + [130, 6401]
    check_every_length("cpu", lengths, [0.1, 0.9], backend="aot_eager")


@pytest.mark.gpu
def test_on_a_gpu_one_graph_counts_the_blocks_of_every_length():
    """Doubles are doubles in Triton's code, too."""
    lengths = [64 * n for n in range(3, 1200, 7)] + [130, 6401, 37761]
    check_every_length("cuda", lengths, [0.1, 0.15, 0.2, 0.3, 0.7, 0.8, 0.85, 0.9])


# -- a fraction for each head --

BY_HEAD = [pair for pair in COUNTS if pair[1] in ("top_k", "sparsity")] + [("pooled", "top_k")]
COUNTS_BY_HEAD = {**COUNTS, ("pooled", "top_k"): lambda r, M: -(-M * round(r * 10_000) // 10_000)}


def fractions(draw: random.Random, heads: int) -> tuple:
    """Some follow their like, and some are 0 or 1, which are no floats."""
    found = []
    while len(found) < heads:
        x = draw.choice([*SPARSITIES, draw.random(), 0.001, 0, 1])
        found += [x] * draw.choice([1, 1, 2, 5])
    return tuple(found[:heads])


@pytest.mark.parametrize("rule, name", BY_HEAD)
def test_each_head_keeps_so_many_blocks_as_the_expression_says(rule, name):
    """For every number of blocks up to 600, and more heads than an integer has bits."""
    for seed in range(20):
        draw = random.Random(seed)
        of_heads = fractions(draw, draw.choice([1, 2, 24, 70]))
        expected = [[COUNTS_BY_HEAD[rule, name](x, M) for M in range(1, 601)] for x in of_heads]
        found = selector._count(torch.arange(1, 601), Selection(**{name: of_heads}, rule=rule))
        assert found.tolist() == expected, of_heads


@pytest.mark.parametrize("rule, name", BY_HEAD)
def test_a_head_selects_the_bits_that_it_does_by_its_own_fraction(rule, name):
    """Beside heads of the same fraction, and alone."""
    for seed in range(40):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        B, H_kv, G = draw.choice([1, 2]), draw.choice([1, 2]), draw.choice([1, 2, 3])
        N, D = draw.choice([*LENGTHS[:-2], draw.randint(2, 2000)]), draw.choice([8, 64])
        dtype = draw.choice([torch.bfloat16, torch.float32])
        q, k = (exact_tokens(draw, B, H, N, D, dtype) for H in (H_kv * G, H_kv))
        others = {"top_p": draw.choice([0, 0.4])} if rule == "pooled" else {}
        asked = Selection(**others, rule=rule) if others else drawn(draw, rule)
        asked = asked._replace(top_k=0.0, sparsity=None, dense=draw.choice(RANGES))
        asked = asked._replace(segments=(), mode="exempt")
        of_heads = fractions(draw, H_kv * G)
        found = select(q, k, asked._replace(**{name: of_heads}))
        for h, x in enumerate(of_heads):
            one = asked._replace(**{name: x})
            alone = select(q[:, h : h + 1], k[:, h // G : h // G + 1], one)
            assert torch.equal(found[:, h], select(q, k, one)[:, h]), (seed, h, of_heads)
            assert torch.equal(found[:, h], alone[:, 0]), (seed, h, of_heads)


def check_each_head_at_every_length(device: str, lengths: list[int], **given) -> None:
    """That one graph has the counts of all lengths and heads."""
    of_heads, pairs = fractions(random.Random(1), 24), BY_HEAD[:-1]
    of_op = [Selection(**{name: of_heads}, rule=rule).arguments() for rule, name in pairs]
    compiled, graphs = by_one_graph(
        lambda q: [torch.ops.sage.select_blocks(q, q, 1.0, *each)[0] for each in of_op], **given
    )
    for N in lengths:
        q = torch.zeros(1, len(of_heads), N, 8, device=device, dtype=torch.bfloat16)
        torch._dynamo.mark_dynamic(q, 2)
        for pair, counts in zip(pairs, compiled(q), strict=True):
            blocks = -(-N // RULES[pair[0]].blocks[1])
            expected = [max(1, COUNTS[pair](x, blocks)) for x in of_heads]
            assert (counts[0].T.cpu() == torch.tensor(expected)).all(), (pair, N)
    assert graphs() == 1


@pytest.mark.parametrize("backend", ["aot_eager", support.swept("inductor")])
def test_one_graph_counts_the_blocks_of_each_head_and_every_length(backend):
    lengths = [64 * n for n in (3, 10, 59, 100, 590)] + [130, 6401]
    check_each_head_at_every_length("cpu", lengths, backend=backend)


@pytest.mark.gpu
def test_on_a_gpu_one_graph_counts_the_blocks_of_each_head_and_every_length():
    lengths = [64 * n for n in range(3, 1200, 31)] + [130, 6401, 37761]
    check_each_head_at_every_length("cuda", lengths)


@pytest.mark.parametrize("rule, name", BY_HEAD)
def test_the_fractions_of_heads_are_made_on_the_device(rule, name):
    """None is a constant of the graph, or copied from the host: a CUDA graph has no such thing."""
    asked = Selection(**{name: (0.1, 0.5, 0.5, 0.9)}, rule=rule)
    with FakeTensorMode():
        q = torch.empty(1, 4, 700, 64, device="cuda", dtype=torch.bfloat16)
        opened = functools.partial(selector.compose_select, scale=0.1)
        names = ("top_k", "top_p", "similarity", "dense_first", "dense_last", "block_q", "block_kv",
                 "others")  # fmt: skip
        given = dict(zip(names, asked.arguments(), strict=True))
        graph = make_fx(lambda q, k: opened(q, k, **given))(q, q).graph
    assert not graph.find_nodes(op="get_attr")
    values = [x for node in graph.nodes for x in tree_leaves(node.meta.get("val"))]
    assert {x.device.type for x in values if isinstance(x, Tensor)} == {"cuda"}
    wheres = graph.find_nodes(op="call_function", target=torch.ops.aten.where.self)
    dtype = torch.long if rule == "pooled" else torch.double
    assert sum(node.meta["val"].dtype == dtype for node in wheres) == 2  # one for a head alike


@pytest.mark.parametrize("heads", [1, 3, 5])
def test_another_number_of_heads_is_an_error(heads):
    q, given = torch.randn(1, heads, 300, 16), (0.1,) * (4 if heads < 5 else 1)
    what = f"select_blocks: fractions must be one for each of q's {heads} heads, got {len(given)}"
    for asked in (Selection(given), Selection(rule="vsa", sparsity=given)):
        with pytest.raises(ValueError, match=what):
            torch.ops.sage.select_blocks(q, q, 0.1, *asked.arguments())


def test_a_fraction_for_all_is_what_it_was_to_the_op():
    """In the arguments of old programs, whose graphs stay the same."""
    assert Selection(0.3).arguments() == (0.3, 0.0, 0.1, 0, 0, 128, 64)
    of_sla = Selection(rule="sla", top_k=0.3).arguments()
    assert of_sla == (0.3, 0.0, 0.1, 0, 0, 128, 64, '{"rule": "sla"}')
    said = '{"top_k": [0.3, 1]}'
    assert Selection((0.3, 1)).arguments() == (0.0, 0.0, 0.1, 0, 0, 128, 64, said)
    said = '{"rule": "sla", "sparsity": [0.3, 0]}'
    of_sla = Selection(rule="sla", sparsity=(0.3, 0), tail=True).arguments()
    assert of_sla == (0.0, 0.0, 0.1, 0, 0, 128, 64, said)


def test_what_torch_asks_of_an_op_with_a_fraction_for_each_head():
    q, k = torch.randn(1, 4, 300, 16), torch.randn(1, 2, 300, 16)
    utilities = "test_schema", "test_autograd_registration", "test_faketensor"
    for asked in (Selection((0.1, 0.5, 0.5, 1)), Selection(rule="vsa", sparsity=(0.1, 0.9, 0, 1))):
        given = q, k, 0.1, *asked.arguments()
        torch.library.opcheck(torch.ops.sage.select_blocks.default, given, test_utils=utilities)


@pytest.mark.gpu
def test_on_a_gpu_nothing_waits_for_the_device():
    q = torch.randn(1, 2, 9000, 64, device="cuda").bfloat16()
    by_head = Selection((0.1, 0.4)), Selection(rule="vsa", sparsity=(0.3, 0.9))
    for asked in (*(drawn(random.Random(0), rule) for rule in TRAINED), *by_head):
        given = asked.arguments()
        torch.ops.sage.select_blocks(q, q, 0.1, *given)
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.ops.sage.select_blocks(q, q, 0.1, *given)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("rule", TRAINED)
def test_on_a_gpu_a_rule_is_its_definition_where_arithmetic_is_exact(rule):
    """In eager, and compiled for any length, whose code must round where the reference does."""
    for seed in range(24):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        H_kv, G = draw.choice([1, 2]), draw.choice([1, 3])
        N, D = draw.choice([129, 704, 1025, 4096, 4097, 8992]), draw.choice([64, 72, 128])
        dtype = draw.choice([torch.bfloat16, torch.float16, torch.float32])
        asked = drawn(draw, rule)
        q, k = (exact_tokens(draw, 1, H, N, D, dtype) for H in (H_kv * G, H_kv))
        expected, unsure = by_definition(q, k, asked)
        given = asked.arguments()
        given, x = asked.arguments(), [q.cuda(), k.cuda()]
        run = functools.partial(
            lambda given, q, k: torch.ops.sage.select_blocks(q, k, *given), (0.125, *given)
        )
        for each in x:
            torch._dynamo.mark_dynamic(each, 2)
        for each in (run, by_one_graph(run)[0]):
            found = which(*(x.cpu() for x in each(*x)))
            assert ((found == expected) | unsure).all(), (seed, asked, N, D, dtype)
