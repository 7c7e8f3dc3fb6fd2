"""The rules by which checkpoints select blocks, each beside its public definition in plain PyTorch.

Shapes: B batch, H heads, N sequence, D head_dim, M_q and M blocks of queries and of keys.
"""

import random

import pytest
import torch
from torch import Tensor

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


SCORES = {"sla": of_sla}
COUNTS = {
    ("sla", "top_k"): lambda r, M: min(M, int(r * M)),
    ("sla", "sparsity"): lambda s, M: int((1 - s) * M),
}


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


def by_definition(q: Tensor, k: Tensor, asked: Selection, scale: float = 0.125) -> Tensor:
    """bool [B, H_q, M_q, M]: what is kept. The first of equal scores are."""
    scores = SCORES[asked.rule](q, k, asked, scale)
    N, (block_q, block_kv) = q.shape[2], asked.size
    of_q, of_kv = (torch.tensor(dense_blocks(N, n, asked.dense)) for n in (block_q, block_kv))
    always = (of_q[:, None] | of_kv).expand_as(scores)
    name, how_much = amount(asked)
    count = COUNTS[asked.rule, name](how_much, (~of_kv).sum().item())
    order = scores.masked_fill(always, -torch.inf).sort(dim=-1, descending=True, stable=True)[1]
    kept = torch.zeros_like(always).scatter(-1, order[..., :count], True) | always
    first = torch.zeros_like(kept).scatter(-1, order[..., :1], True)  # the reference divides by 0
    return torch.where(kept.any(-1, keepdim=True), kept, first)


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
    others = {"blocks": draw.choice([None, (64, 64), (128, 64), (64, 128), (128, 128)])}
    if "scores" in RULES[rule].others:
        others["scores"] = draw.choice(["as_trained", "as_trained", "fp32"])
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
        found, expected = select(q, k, asked), by_definition(q, k, asked)
        assert torch.equal(found, expected), (seed, asked, N, D, dtype)


def test_sla_takes_the_mean_off_k_in_the_dtype_of_k():
    """Both the mean and the differences are rounded, as scores next to each other show."""
    asked = Selection(0.3, rule="sla")
    for seed in range(20):
        torch.manual_seed(seed)
        q = exact_tokens(random.Random(seed), 1, 2, 4096, 8, torch.bfloat16)
        k = (q.flip(2) + torch.randint(0, 2, q.shape)).bfloat16()
        assert torch.equal(select(q, k, asked), by_definition(q, k, asked)), seed


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
        asked = drawn(draw, rule)._replace(dense=(), scores="as_trained")
        scores = AS_RUN[rule](q, k, asked).float()
        found = select(q, k, asked)
        expected = by_definition(q, k, asked)
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


AS_RUN = {"sla": sla_as_run}


# -- how many --


@pytest.mark.parametrize("rule, name", COUNTS)
def test_so_many_blocks_are_kept_as_the_expression_says(rule, name):
    """For every number of blocks up to 4,096."""
    rest = torch.arange(1, 4097)
    for how_much in SPARSITIES:
        asked = Selection(**{name: how_much}, rule=rule)
        expected = [COUNTS[rule, name](how_much, M) for M in rest.tolist()]
        assert selector._count(rest, asked).tolist() == expected, how_much
