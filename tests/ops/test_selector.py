"""Selected blocks: which they are, said again by loops, and what they cost in accuracy.

Shapes: B batch, H heads, N sequence, D head_dim, M blocks of a sequence.
"""

import itertools
import math
import random
from fractions import Fraction

import pytest
import support
import torch
from torch import Tensor

from sage_inductor.ops.reference.exact import attention_exact
from sage_inductor.ops.sparse.selector import BLOCK_SIZE, Selection
from sage_inductor.ops.visibility import BLOCK_SIZES, BlockLists


def select(q, k, selection: Selection, scale=0.125, size=BLOCK_SIZE) -> tuple[Tensor, Tensor]:
    return torch.ops.sage.select_blocks(q, k, scale, *selection.arguments, *size)


def as_lists(found: tuple[Tensor, Tensor], size=BLOCK_SIZE) -> BlockLists:
    return BlockLists(*found, None, None, *size)


# -- which blocks --


def blocks_of(x: Tensor, block: int) -> list[Tensor]:
    return list(x.double().split(block))


def self_similarity(x: Tensor) -> float:
    """The mean over all pairs of tokens of x [tokens, D] of their cosine."""
    unit = x / x.norm(dim=1, keepdim=True)
    return (unit @ unit.mT).mean().item()


def check_row(count, order, scores, tokens, always, selection, block_kv) -> None:
    """The blocks of keys that one block of queries keeps, of M: `order`, the first `count` of it.
    scores, tokens: of each block; always: those that are kept in any case."""
    M, first = len(scores), len(always)
    assert sorted(order) == list(range(M))
    assert order[:count] == sorted(order[:count]) and order[count:] == sorted(order[count:])
    assert set(always) <= set(order[:count])
    scores = [s + math.log(n / block_kv) for s, n in zip(scores, tokens, strict=True)]
    worst = min((scores[j] for j in order[:count] if j not in always), default=math.inf)
    assert all(scores[j] <= worst + 1e-4 for j in order[count:])
    order = always + sorted(set(order) - set(always), key=lambda j: -scores[j])
    kept = first + math.ceil(Fraction(str(selection.top_k)) * (M - first))
    weights = [math.exp(s - max(scores)) for s in scores]
    reached = list(itertools.accumulate(weights[j] / sum(weights) for j in order))
    least, most = (
        next((n for n, mass in enumerate(reached, 1) if mass >= top_p), M)
        for top_p in (selection.top_p - 1e-5, selection.top_p + 1e-5)
    )
    if selection.top_p == 0:
        least = most = 0
    assert max(kept, least) <= count <= max(kept, most)


@pytest.mark.parametrize("seed", range(48))
def test_the_selected_blocks_are_those_that_loops_select(seed):
    """Tails, grouped heads, every size, dtypes and strides, keys with a common part; what is beside
    the tensors is NaN."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    size = draw.choice(BLOCK_SIZES), draw.choice(BLOCK_SIZES)
    B, H_kv, G = draw.choice([1, 2]), draw.choice([1, 2]), draw.choice([1, 2, 3])
    N, D = draw.choice([1, 63, 64, 65, 192, *(draw.randint(60, 900) for _ in range(5))]), 8
    dtype = draw.choice([torch.float32, torch.bfloat16])
    text = [*[0] * 5, 1, 1, 70, N + 5]
    scale = draw.choice([0.02, 0.1, -0.5])
    whole = torch.full((B, N + 2, H_kv * (G + 1) + 1, D), torch.nan, dtype=dtype)
    tokens = whole[:, 1:-1, : H_kv * (G + 1)]
    common = (
        3 * torch.randn(tokens.shape[2], D) * (torch.arange(tokens.shape[2])[:, None] >= H_kv * G)
    )
    tokens.copy_(torch.randn(tokens.shape) + torch.randn(B, N, 1, D).cumsum(1) / 4 + common)
    q, k = tokens.transpose(1, 2).split([H_kv * G, H_kv], 1)
    centred = k.double() - k.double().mean(2, keepdim=True)

    similarity, alike = 0.0, {}
    if draw.random() < 0.8:
        for x, block in ((q, size[0]), (centred, size[1])):
            alike[id(x)] = [
                [[self_similarity(each) for each in blocks_of(head, block)] for head in heads]
                for heads in x
            ]
        every = sorted(s for of in alike.values() for heads in of for head in heads for s in head)
        a, b = draw.choice(list(itertools.pairwise([0.0, *every])))
        similarity = (a + b) / 2 if b - a > 1e-5 else 0.0
    selection = Selection(
        draw.choice([0.0, 0.0, 0.1, 0.3, 0.9, 1.0]), draw.choice([0.0, 0.3, 0.7, 0.95, 1.0]),
        similarity, draw.choice(text), draw.choice(text),
    )  # fmt: skip
    counts, indices = select(q, k, selection, scale, size)
    M_q, M_kv = (-(-N // block) for block in size)
    assert counts.shape == (B, H_kv * G, M_q) and indices.shape == (B, H_kv * G, M_q, M_kv)
    assert counts.dtype == indices.dtype == torch.int32

    def is_always(x, b, h, m, block):
        first, end = m * block, min(N, (m + 1) * block)
        is_dense = first < selection.dense_first or end > N - selection.dense_last
        return is_dense or similarity > 0 and alike[id(x)][b][h][m] < similarity

    for b, h, m in itertools.product(range(B), range(H_kv * G), range(M_q)):
        mean = blocks_of(q[b, h], size[0])[m].mean(0)
        of_k = blocks_of(centred[b, h // G], size[1])
        rows = range(m * size[0], min(N, (m + 1) * size[0]))
        always = [
            j
            for j in range(M_kv)
            if any(i // size[1] == j for i in rows)
            or is_always(q, b, h, m, size[0])
            or is_always(centred, b, h // G, j, size[1])
        ]
        check_row(
            counts[b, h, m].item(), indices[b, h, m].tolist(),
            [scale * (mean @ each.mean(0)).item() for each in of_k], list(map(len, of_k)),
            always, selection, size[1],
        )  # fmt: skip


def test_under_autocast_means_and_scores_stay_fp32():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 2, 700, 64).unbind(0)
    selection = Selection(0.3, similarity=0)
    expected = select(q, k, selection)
    with torch.autocast("cpu", torch.bfloat16):
        found = select(q, k, selection)
    assert all(map(torch.equal, found, expected))


def test_a_short_tail_weighs_as_many_tokens_as_it_has():
    """An eighth of a block, whose tokens score 1 more than all others: -1.08."""
    q, k = torch.zeros(2, 1, 1, 64 * 5 + 8, 16).unbind(0)
    q[..., 0], k[..., 320:, 0] = 1, 1
    counts, indices = select(q, k, Selection(0.75, similarity=0), scale=1.0)
    assert indices[0, 0, 0, : counts[0, 0, 0]].tolist() == [0, 1, 2, 3, 4]


def test_a_common_part_of_the_keys_changes_nothing():
    """Nor does it make blocks alike: softmax does not see it."""
    torch.manual_seed(0)
    q, k = torch.randint(-4, 5, (2, 1, 2, 512, 16)).float().unbind(0)
    selection = Selection(0.3)
    expected = select(q, k, selection)
    assert all(map(torch.equal, select(q, k + 64, selection), expected))
    assert (expected[0] == 8).all()  # random tokens are not alike


def test_what_torch_asks_of_an_op():
    q, k = torch.randn(2, 1, 2, 300, 16, requires_grad=True).unbind(0)
    given = q, k, 0.1, *Selection(0.3, 0.5).arguments, *BLOCK_SIZE
    # Compiled by symbols it is test_sparse.py's.
    utilities = "test_schema", "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(torch.ops.sage.select_blocks.default, given, test_utils=utilities)
    torch.library.opcheck(
        torch.ops.sage.pool_blocks.default, (k.detach(), torch.ones(1, 2, 16), 64)
    )
    counts, scores = torch.tensor([[0, 9, 5]]).int(), torch.randn(1, 3, 9)
    torch.library.opcheck(torch.ops.sage.largest.default, (scores, counts))
    assert not any(x.requires_grad for x in torch.ops.sage.select_blocks(*given))


# -- what they cost --


def video(frames=8, height=12, width=16, heads=2, D=32, noise=0.3) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v [1, heads, N, D] of tokens in raster order that resemble their neighbours in space
    and time: waves of low frequency and some noise."""
    grid = torch.cartesian_prod(*(torch.linspace(0, 1, n) for n in (frames, height, width)))
    waves = (grid @ (torch.randn(3, heads * D) * 5) + torch.rand(heads * D) * 2 * math.pi).cos()
    tokens = waves.unflatten(1, (heads, D)).transpose(0, 1)[None]
    q, k, v = (tokens + noise * torch.randn(tokens.shape) for _ in range(3))
    return 2 * q, 2 * k, v


def at_random(counts: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """As many blocks, drawn; one on the diagonal stays."""
    drawn = torch.rand(indices.shape)
    m = torch.arange(indices.shape[2])
    drawn[..., m, m * BLOCK_SIZE[0] // BLOCK_SIZE[1]] = -1
    return counts, drawn.argsort(-1).int()


DENSITIES = 0.1, 0.2, 0.5, 0.8, 1.0


@pytest.mark.parametrize(
    "similarity", [*[pytest.param(x, marks=pytest.mark.sweep) for x in (0.0, 0.1)], 0.25]
)
def test_the_error_falls_with_the_density_and_is_far_below_that_of_random_blocks(similarity):
    torch.manual_seed(0)
    q, k, v = video()
    exact, _ = attention_exact(q, k, v, 0.25)
    errors, of_random = [], []
    for top_k in DENSITIES:
        found = select(q, k, Selection(top_k, similarity=similarity), 0.25)
        for errors_of, lists in ((errors, found), (of_random, at_random(*found))):
            out, _ = attention_exact(q, k, v, 0.25, blocks=as_lists(lists))
            errors_of.append(support.relative_l1(out, exact))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-12
    assert all(a < b / 3 for a, b in zip(errors[1:4], of_random[1:4], strict=True))
