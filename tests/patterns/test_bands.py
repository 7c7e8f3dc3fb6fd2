"""What is proven about masks: never more than what the mask says, and enough for real models.

`proven` captures a program with Dynamo and holds what was claimed against the mask that eager
PyTorch computes, so that every test below is a test of soundness too.
"""

import functools
import math
import os

import models
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, event, given, seed, settings
from hypothesis import strategies as st
from pairs import chosen, has_every_variant
from support import band_mask, run_seen

from sage_inductor.patterns.bands import prove
from sage_inductor.patterns.call import CAUSAL, FULL, Band
from sage_inductor.patterns.graph import GraphIndex, value_of

os.environ["HF_HUB_OFFLINE"] = "1"

inf = math.inf
LAST = Band(None, 0, bottom_right=True)
FLOAT = torch.float32


# -- the harness ----


def sdpa_masks(graph):
    """(node, mask, n_q, n_kv) of the SDPA calls with a mask."""
    targets = (F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default)
    for node in graph.nodes:
        if node.op == "call_function" and node.target in targets:
            mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
            if mask is not None:
                yield mask, value_of(node.args[0]).shape[2], value_of(node.args[1]).shape[2]


def weights(mask: torch.Tensor, n_q: int, n_kv: int) -> torch.Tensor:
    """softmax under `mask`, of fixed scores; 0 where a query sees no key."""
    scores = torch.randn(n_q, n_kv, generator=torch.Generator().manual_seed(0)).double()
    bias = mask.double().log() if mask.dtype == torch.bool else mask.double()
    return (scores + bias).softmax(-1).nan_to_num(0)


def proven(program, *shapes, options=(), batch=2):
    """(band, what is left: None, "mask" for all of it, or its shape, as text), the last graph's.

    program(n_q, n_kv, padding [batch, n_kv], data [n_q, n_kv]) -> mask."""
    claims = []

    def backend(gm, _):
        ((mask, n_q, n_kv),) = sdpa_masks(gm.graph)
        band, left = prove(mask, n_q, n_kv, GraphIndex(gm.graph))
        (output,) = (node for node in gm.graph.nodes if node.op == "output")
        output.args = ((*output.args[0], mask, left),)
        gm.recompile()

        def run(*inputs):
            *outputs, mask_now, left_now = gm(*inputs)
            shape = None if left is None else str(list(value_of(left).shape)).replace("'", "")
            claims.append((band, "mask" if left is mask else shape, left_now))
            return outputs

        return run

    def call(q, k, padding, data):
        mask = program(q.shape[2], k.shape[2], padding, data)
        return F.scaled_dot_product_attention(q, k, k, mask), mask

    torch._dynamo.reset()
    compiled = torch.compile(call, backend=backend, fullgraph=True, **dict(options))
    for n_q, n_kv in shapes:
        padding = torch.ones(batch, n_kv, dtype=torch.long)
        padding[-1, n_kv // 2 :] = 0
        data = torch.randn(n_q, n_kv)
        _, mask = compiled(
            torch.randn(batch, 2, n_q, 8), torch.randn(batch, 2, n_kv, 8), padding, data
        )
        band, left, left_now = claims[-1]
        said = band_mask(band, n_q, n_kv)
        if left_now is not None and left_now.dtype == torch.bool:
            said = said & left_now
        elif left_now is not None:
            assert band == FULL
            said = left_now
        torch.testing.assert_close(
            *torch.broadcast_tensors(weights(said, n_q, n_kv), weights(mask, n_q, n_kv))
        )
        if mask.dtype == torch.bool:
            assert torch.equal(*torch.broadcast_tensors(said, mask)), (band, left)
    return band, left


def ones(n, m=None, dtype=torch.bool):
    return torch.ones(n, n if m is None else m, dtype=dtype)


def rows_and_columns(n_q, n_kv):
    return torch.arange(n_q)[:, None], torch.arange(n_kv)[None, :]


def window(n_q, n_kv, left=None, right=None):
    row, col = rows_and_columns(n_q, n_kv)
    mask = torch.ones(n_q, n_kv, dtype=torch.bool)
    if left is not None:
        mask = mask & (row - col <= left)
    return mask if right is None else mask & (col - row <= right)


# -- what must be proven ----

SQUARE = {
    "columns up to the row": (lambda n, m, p, d: torch.arange(m) <= torch.arange(n)[:, None], CAUSAL),
    "rows from the column": (lambda n, m, p, d: torch.arange(n)[:, None] >= torch.arange(m), CAUSAL),
    "strictly below the next row": (
        lambda n, m, p, d: torch.arange(m).int() < torch.arange(1, n + 1).int().unsqueeze(-1), CAUSAL),
    "an expanded 4-d mask": (
        lambda n, m, p, d: (torch.arange(m)[None, None, None] <= torch.arange(n).view(1, 1, -1, 1)).expand(2, 2, n, m), CAUSAL),
    "tril": (lambda n, m, p, d: torch.tril(ones(n)), CAUSAL),
    "tril of floats, bool": (lambda n, m, p, d: torch.ones(n, n).tril().bool(), CAUSAL),
    "tril of floats == 1": (lambda n, m, p, d: torch.ones(n, n).tril()[None, None] == 1, CAUSAL),
    "triu(1) == 0": (lambda n, m, p, d: torch.triu(torch.ones(n, n), diagonal=1) == 0, CAUSAL),
    "not triu(1)": (lambda n, m, p, d: ~ones(n).triu(1), CAUSAL),
    "logical_not of triu(1)": (lambda n, m, p, d: ones(n).triu(1).logical_not().contiguous(), CAUSAL),
    "triu transposed": (lambda n, m, p, d: ones(n).triu().T, CAUSAL),
    "triu and mT": (lambda n, m, p, d: ones(n).triu().mT, CAUSAL),
    "triu permuted": (lambda n, m, p, d: ones(n).triu()[None].permute(0, 2, 1), CAUSAL),
    "the corner of a larger mask": (
        lambda n, m, p, d: ones(64)[None, None].tril()[:, :, :n, :m].to(torch.bool), CAUSAL),
    "positions by cumsum": (
        lambda n, m, p, d: (torch.ones(m, dtype=torch.long).cumsum(0) - 1) <= torch.arange(n)[:, None], CAUSAL),
    "where 0 or -inf": (lambda n, m, p, d: torch.where(ones(n).tril(), 0.0, -inf), CAUSAL),
    "where -inf or 0": (lambda n, m, p, d: torch.where(ones(n).triu(1), -inf, 0.0), CAUSAL),
    "zeros.masked_fill": (
        lambda n, m, p, d: torch.zeros(n, m).masked_fill(~ones(n).tril(), torch.finfo(FLOAT).min), CAUSAL),
    "full(-inf).triu(1)": (lambda n, m, p, d: torch.full((n, m), -inf).triu(1), CAUSAL),
    "full(lowest).triu(1)": (lambda n, m, p, d: torch.full((n, m), torch.finfo(FLOAT).min).triu(diagonal=1), CAUSAL),
    "(1 - m) * lowest": (lambda n, m, p, d: (1.0 - ones(n).tril().float()) * torch.finfo(FLOAT).min, CAUSAL),
    "the log of a mask": (lambda n, m, p, d: ones(n).tril().float().log(), CAUSAL),
    "a sum of masks": (
        lambda n, m, p, d: torch.full((n, m), -inf).triu(1) + torch.full((n, m), -inf).tril(-4), Band(3, 0)),
    "a window": (lambda n, m, p, d: window(n, m, 3, 0), Band(3, 0)),
    "a window by distance": (
        lambda n, m, p, d: (torch.arange(n)[:, None] - torch.arange(m)).abs() <= 2, Band(2, 2)),
    "a window by distance, strictly": (
        lambda n, m, p, d: 3 > (torch.arange(n)[:, None] - torch.arange(m)).abs(), Band(2, 2)),
    "not far away": (
        lambda n, m, p, d: ~(2 < (torch.arange(n)[:, None] - torch.arange(m)).abs()), Band(2, 2)),
    "a window, as two triangles": (lambda n, m, p, d: ones(n).tril(2) & ones(n).triu(-1), Band(1, 2)),
    "not (above or below)": (lambda n, m, p, d: ~(ones(n).triu(3) | ones(n).tril(-2)), Band(1, 2)),
    "the diagonal": (lambda n, m, p, d: torch.arange(n)[:, None] == torch.arange(m), Band(0, 0)),
    "the first column, spread": (lambda n, m, p, d: ones(n).tril()[:, :1].expand(n, m), FULL),
    "all ones": (lambda n, m, p, d: ones(n), FULL),
    "all zeros": (lambda n, m, p, d: torch.zeros(1, 1, n, m), FULL),
    "a tautology": (lambda n, m, p, d: torch.arange(m)[None] >= 0 * torch.arange(n)[:, None], FULL),
}  # fmt: skip


def alternately(cases):
    """Each case with lengths that are numbers or, every other one, symbols."""
    names = list(cases)
    return chosen(
        lambda case, dynamic: names.index(case) % 2 == dynamic, case=names, dynamic=[False, True]
    )


@alternately(SQUARE)
def test_a_square_mask_is_proven_whatever_its_spelling(case, dynamic):
    program, band = SQUARE[case]
    shapes = (12, 12), (9, 9)
    assert proven(program, *shapes[: 1 + dynamic], options={"dynamic": dynamic}) == (band, None)


@pytest.mark.parametrize("n_q, n_kv", [(6, 6), (4, 7), (7, 4)])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_bound_that_hides_no_key_is_none(side, n_q, n_kv):
    """A window as long as the sequence is causal, or nothing."""
    n = n_q if side == "left" else n_kv
    for bound in range(n - 3, n + 2):
        band, left_over = proven(
            lambda n_q, n_kv, p, d, b=bound: window(n_q, n_kv, **{"right": 0, side: b}), (n_q, n_kv)
        )
        assert left_over is None and (getattr(band, side) is None) == (bound >= n - 1)


@pytest.mark.parametrize("most, band", [(9, CAUSAL), (10, Band(8, 0))])
def test_a_window_is_causal_where_a_dynamic_length_is_known_to_be_no_longer(most, band):
    """No guard is added for it."""
    found = []

    def see(gm):
        ((mask, n_q, n_kv),) = sdpa_masks(gm.graph)
        guards = len(n_q.node.shape_env.guards)
        found.append(prove(mask, n_q, n_kv, GraphIndex(gm.graph)))
        assert len(n_q.node.shape_env.guards) == guards

    x = torch.randn(1, 2, 7, 8)
    torch._dynamo.mark_dynamic(x, 2, min=2, max=most)

    def call(x):
        mask = window(x.shape[2], x.shape[2], 8, 0)
        return F.scaled_dot_product_attention(x, x, x, mask)

    run_seen(call, x, see=see)
    assert found == [(band, None)]


OBLONG = {
    "top left": (lambda n, m, p, d: torch.arange(m) <= torch.arange(n)[:, None], CAUSAL),
    "tril is top left": (lambda n, m, p, d: ones(n, m).tril(), CAUSAL),
    "queries are the last": (lambda n, m, p, d: torch.arange(m) <= torch.arange(m - n, m)[:, None], LAST),
    "an offset": (lambda n, m, p, d: torch.arange(m) <= torch.arange(n)[:, None] + (m - n), LAST),
    "tril(m - n)": (lambda n, m, p, d: ones(n, m).tril(m - n), LAST),
    "the last rows of a square": (lambda n, m, p, d: ones(m).tril()[m - n : m, :m], LAST),
    "the last rows of a square, counted back": (lambda n, m, p, d: ones(m).tril()[None, -n:], LAST),
    "a window of the last": (
        lambda n, m, p, d: window(m, m, 3, 0)[m - n :], Band(3, 0, bottom_right=True)),
    "top left, some ahead": (lambda n, m, p, d: ones(n, m).tril(2), Band(None, 2)),
}  # fmt: skip


def test_of_one_query_a_band_is_proven():
    first = lambda n, m, p, d: torch.arange(m) <= torch.arange(n)[:, None] + 3  # noqa: E731
    assert proven(first, (1, 12)) == (Band(None, 3), None)
    last = lambda n, m, p, d: torch.arange(m)[None] > torch.arange(m - n, m)[:, None] - 4  # noqa: E731
    assert proven(last, (1, 12)) == (Band(3, None, bottom_right=True), None)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("case", OBLONG)
def test_an_oblong_mask_is_proven_with_its_diagonal(case, dynamic):
    program, band = OBLONG[case]
    shapes = (7, 12), (5, 13)
    assert proven(program, *shapes[: 1 + dynamic], options={"dynamic": dynamic}) == (band, None)


def test_the_method_where_has_its_condition_second():
    def chosen(n, m, p, d):
        causal, recent = ones(n).tril(), ones(n).triu(-99)
        return causal.where(recent, torch.ones_like(causal))

    assert proven(chosen, (12, 12)) == (CAUSAL, None)
    swapped = lambda n, m, p, d: ones(n).triu(-99).where(ones(n).tril(), ones(n))  # noqa: E731
    assert proven(swapped, (12, 12)) == (FULL, None)


LEFT_OVER = {
    "padding": (lambda n, m, p, d: window(n, m, None, 0) & p.bool()[:, None, None], CAUSAL, "[2, 1, 1, 12]"),
    "padding, expanded": (
        lambda n, m, p, d: (ones(n).tril() & p.bool()[:, None, None, :].expand(2, 1, n, m)).expand(2, 2, n, m),
        CAUSAL, "[2, 1, 1, 12]"),
    "padding in a float mask": (
        lambda n, m, p, d: torch.where((p != 0)[:, None, None] & ones(n).tril(), 0.0, -inf), CAUSAL, "[2, 1, 1, 12]"),
    "padding alone": (lambda n, m, p, d: p.bool()[:, None, None].expand(2, 1, n, m), FULL, "[2, 1, 1, 12]"),
    "padding, negated": (lambda n, m, p, d: ones(n).tril() & ~(p == 0)[:, None, None], CAUSAL, "[2, 1, 1, 12]"),
    "a row of keys": (lambda n, m, p, d: ones(n).tril() & p[1].bool(), CAUSAL, "[12]"),
    "data": (lambda n, m, p, d: window(n, m, 3, 0) & (d > 0), Band(3, 0), "[12, 12]"),
    "data twice": (lambda n, m, p, d: ones(n).tril() & (d > 0) & (d < 1), FULL, "mask"),
    "one of several outputs": (lambda n, m, p, d: (d > 0).repeat(1, 2).chunk(2, 1)[0], FULL, "mask"),
    "data and padding": (lambda n, m, p, d: (d > 0) & p.bool()[:, None, None] & ones(n).tril(), FULL, "mask"),
    "data or causal": (lambda n, m, p, d: (d > 0) | ones(n).tril(), FULL, "mask"),
    "queries' own padding": (lambda n, m, p, d: ones(n).tril() & p.bool()[:, None, :, None], FULL, "mask"),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT_OVER)
def test_one_conjunct_of_data_is_left_over(case):
    program, band, left = LEFT_OVER[case]
    assert proven(program, (12, 12)) == (band, left)


# -- what must not ----


def setitem(n, m, p, d):
    mask = ones(n).tril()
    mask[0] = True
    return mask


def written_through_a_view(n, m, p, d):
    mask = ones(n).tril()
    row = mask.view(-1)[2:5]
    row |= True
    return mask


def masked_fill_(n, m, p, d):
    return ones(n).tril().masked_fill_(d > 0, False)


def written_out(n, m, p, d):
    mask = ones(n).tril()
    torch.logical_or(mask, d > 0, out=mask)
    return mask


def padding_written_later(n, m, p, d):
    valid = p.bool()[:, None, None]
    mask = ones(n).tril() & valid
    valid.fill_(True)
    return mask


def index_written(n, m, p, d):
    row = torch.arange(n)
    row[3:] += 2
    return torch.arange(m) <= row[:, None]


UNPROVEN = {
    "the upper triangle": lambda n, m, p, d: torch.arange(m) > torch.arange(n)[:, None],
    "below the diagonal only": lambda n, m, p, d: ones(n).tril(-1),
    "a lowest number where a query sees nothing": lambda n, m, p, d: torch.full((n, m), torch.finfo(FLOAT).min).triu(0),
    "-1e4 is no mask": lambda n, m, p, d: torch.full((n, m), -1e4).triu(1),
    "a bias below the diagonal": lambda n, m, p, d: torch.full((n, m), 2.0).triu(1),
    "every other": lambda n, m, p, d: torch.arange(0, 2 * m, 2) <= torch.arange(n)[:, None],
    "a tiny dtype wraps": lambda n, m, p, d: torch.arange(m).to(torch.int8) * 20 <= torch.arange(n)[:, None].to(torch.int8) * 20,
    "a column, spread": lambda n, m, p, d: ones(n).tril()[:, 2:3].expand(n, m),
    "off centre": lambda n, m, p, d: ones(64).tril()[:n, 2 : 2 + m],
    "blocks": lambda n, m, p, d: torch.arange(m) // 4 <= torch.arange(n)[:, None] // 4,
    "a prefix": lambda n, m, p, d: ones(n).tril() | (torch.arange(m) < 4),
    "xor": lambda n, m, p, d: ones(n).tril() ^ ones(n).tril(2),
    "data in an index": lambda n, m, p, d: p.cumsum(-1)[:, None, None] <= torch.arange(n)[:, None],
    "a gather that wraps around": lambda n, m, p, d: torch.arange(m)[torch.arange(m) - 3] <= torch.arange(n)[:, None],
    "a gather from the end": lambda n, m, p, d: torch.arange(m) <= torch.arange(n)[torch.arange(n) - 2][:, None],
    "padding by the lowest number": lambda n, m, p, d: torch.where((p != 0)[:, None, None] & ones(n).tril(), 0.0, torch.finfo(FLOAT).min),
    "a difference at the start": lambda n, m, p, d: torch.diff(torch.arange(m), prepend=torch.arange(5, 6)) + 0 * torch.arange(n)[:, None] == 1,
    "the bits of floats": lambda n, m, p, d: torch.ones(n, n).tril().view(torch.int32) == 1,
    "nothing": lambda n, m, p, d: torch.zeros(n, m, dtype=torch.bool),
    "-inf compared with the lowest": lambda n, m, p, d: (torch.full((n, m), -inf).triu(1) + torch.full((n, m), torch.finfo(FLOAT).min).tril(-4)) > torch.finfo(FLOAT).min - 1,
    **{f.__name__: f for f in (setitem, written_through_a_view, masked_fill_, written_out, padding_written_later, index_written)},
}  # fmt: skip


@alternately(UNPROVEN)
def test_nothing_is_claimed_of(case, dynamic):
    shapes, options = ((12, 12), (9, 9)), {"dynamic": dynamic}
    assert proven(UNPROVEN[case], *shapes[: 1 + dynamic], options=options) == (FULL, "mask")


def columns(m):
    return torch.arange(m)


def row_numbers(n):
    return torch.arange(n)[:, None]


# Each argument of torch's functions that changes what they compute: `proven` holds what is claimed
# against the mask.
ARGUMENTS = {
    "alpha": lambda n, m, p, d: columns(m) <= torch.add(row_numbers(n), torch.ones_like(row_numbers(n)), alpha=3),
    "alpha of a number": lambda n, m, p, d: columns(m) <= row_numbers(n).add(1, alpha=3),
    "alpha of sub": lambda n, m, p, d: torch.sub(row_numbers(n), columns(m), alpha=2) >= 0,
    "alpha of rsub": lambda n, m, p, d: torch.rsub(columns(m), row_numbers(n), alpha=2) >= 0,
    "alpha of floats": lambda n, m, p, d: torch.add(torch.zeros(n, m), torch.full((n, m), -inf).triu(1), alpha=0.5),
    "rounding": lambda n, m, p, d: torch.div(columns(m), 2, rounding_mode="floor") <= row_numbers(n),
    "rounding of a number": lambda n, m, p, d: columns(m).div(1, rounding_mode="trunc") <= row_numbers(n),
    "start": lambda n, m, p, d: torch.arange(2, m + 2) <= row_numbers(n),
    "step": lambda n, m, p, d: torch.arange(0, 3 * m, 3) <= row_numbers(n),
    "step by keyword": lambda n, m, p, d: torch.arange(start=0, end=3 * m, step=3) <= row_numbers(n),
    "dtype of a range": lambda n, m, p, d: torch.arange(m, dtype=torch.float32) <= row_numbers(n),
    "dtype of a sum": lambda n, m, p, d: torch.ones(m).cumsum(0, dtype=torch.int64) - 1 <= row_numbers(n),
    "dimension of a sum": lambda n, m, p, d: ones(n, m, torch.long).cumsum(0) <= columns(m),
    "diagonal": lambda n, m, p, d: ones(n).tril(diagonal=2),
    "n of diff": lambda n, m, p, d: torch.diff(columns(m), n=2, prepend=torch.arange(-2, 0)) + 0 * row_numbers(n) == 1,
    "append of diff": lambda n, m, p, d: torch.diff(columns(m), append=torch.arange(5, 6)) + 0 * row_numbers(n) == 1,
    "prepend and append": lambda n, m, p, d: torch.diff(columns(m)[1:], prepend=torch.arange(1), append=torch.arange(5, 6)) + 0 * row_numbers(n) == 1,
    "dimension of diff": lambda n, m, p, d: torch.diff(row_numbers(n).expand(n, m), dim=0, prepend=torch.full((1, m), -1)) <= columns(m),
    "dims by keyword": lambda n, m, p, d: torch.transpose(ones(n).tril(), dim0=1, dim1=0),
    "permute by keyword": lambda n, m, p, d: torch.permute(ones(n).tril(), dims=(1, 0)),
    "sizes by keyword": lambda n, m, p, d: torch.reshape(ones(n).tril(), shape=(m, n)),
    "step of a slice": lambda n, m, p, d: ones(2 * n).tril()[::2, ::2],
    "step of one slice": lambda n, m, p, d: ones(n, 2 * m).tril()[:, ::2],
    "a slice from the end": lambda n, m, p, d: ones(n + 3).tril()[-n:, :m],
    "repeats": lambda n, m, p, d: ones(1, m // 2).repeat(n, 2) & ones(n).tril(),
    "value by keyword": lambda n, m, p, d: torch.full(size=(n, m), fill_value=-inf).triu(1),
    "dtype of a fill": lambda n, m, p, d: torch.full((n, m), 1.5, dtype=torch.int64).tril() == 1,
    "dtype of ones": lambda n, m, p, d: torch.ones_like(torch.zeros(n, m), dtype=torch.bool).tril(),
    "memory format": lambda n, m, p, d: ones(n).tril().clone(memory_format=torch.contiguous_format),
    "copy": lambda n, m, p, d: ones(n).tril().to(torch.float32, copy=True) > 0.5,
    "dtype of a copy": lambda n, m, p, d: torch.full((n, m), -1.0).triu(1).to(torch.uint8) == 0,
}  # fmt: skip


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_that_change_what_is_computed_are_honoured_or_the_mask_stays(case):
    proven(ARGUMENTS[case], (12, 12))


def test_nothing_is_claimed_of_indices_that_wrap():
    def program(n, m, p, d):
        return torch.arange(m).to(torch.int8) <= torch.arange(n).to(torch.int8)[:, None]

    assert proven(program, (300, 300)) == (FULL, "mask")


def test_nothing_is_claimed_of_an_unknown_offset():
    def program(n_q, n_kv, padding, data):
        return torch.arange(n_kv) <= torch.arange(n_q)[:, None] + n_kv // 3

    assert proven(program, (12, 12), (9, 9), options={"dynamic": True}) == (FULL, "mask")
    assert proven(program, (12, 12)) == (Band(None, 4), None)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_lowest_number_is_no_band_where_a_query_may_see_no_key(dynamic):
    def program(n_q, n_kv, padding, data):  # more queries than keys: the first see nothing
        return torch.where(ones(n_q, n_kv).tril(n_kv - n_q), 0.0, torch.finfo(FLOAT).min)

    assert proven(program, (12, 7), options={"dynamic": dynamic}) == (FULL, "mask")

    # One query beyond the last key that the window shows; as many as can be, and see one.
    def ahead(n, m, p, d):
        return torch.where(window(n, m, 3, 0), 0.0, torch.finfo(FLOAT).min)

    assert proven(ahead, (11, 7), options={"dynamic": dynamic}) == (FULL, "mask")
    assert proven(ahead, (10, 7)) == (Band(3, 0), None)
    band, left = proven(lambda *args: program(*args) * 2, (12, 7), options={"dynamic": dynamic})
    assert (band, left) == (LAST, None)  # twice the lowest is -inf


# -- random programs ----

small = st.integers(-3, 3)


@st.composite
def indices(draw, n):
    start = draw(small)
    return draw(st.sampled_from([
        f"torch.arange({n})", f"torch.arange({n}, dtype=torch.int32)", f"(torch.arange({n}) + {start})",
        f"torch.arange({start}, {n} + {start})", f"({start} + torch.arange({n}) * {draw(small)})",
        f"(torch.ones({n}, dtype=torch.long).cumsum(0) - 1)", f"torch.arange({n} + 5)[{abs(start)}:{n} + {abs(start)}]",
        f"torch.arange(n_kv - {n}, n_kv)", f"(torch.arange({n}) + n_kv - n_q)", f"torch.arange({n} + 4)[torch.arange({n}) + {start}]",
        f"torch.arange({n})[None].expand(2, -1)[1]", f"torch.full(({n},), {start})", f"-torch.arange({n})",
        f"torch.arange(3 * {n})[::3]", f"padding[0, 0] * torch.arange({n})",
    ]))  # fmt: skip


@st.composite
def conditions(draw):
    """Source of a bool [n_q, n_kv] tensor."""
    row = draw(indices("n_q")) + draw(
        st.sampled_from(["[:, None]", ".unsqueeze(-1)", ".view(-1, 1)"])
    )
    col = draw(indices("n_kv")) + draw(st.sampled_from(["[None, :]", "", ".reshape(1, n_kv)"]))
    sides = draw(st.permutations([row, col]))
    op, c, e = draw(st.sampled_from(["<=", "<", ">=", ">", "==", "!="])), draw(small), draw(small)
    shape = draw(
        st.sampled_from(
            ["(n_q, n_kv)", "(n_q, n_kv), dtype=torch.bool", "(n_q, n_kv), dtype=torch.int32"]
        )
    )
    side = draw(st.sampled_from(["tril", "triu"]))
    offset = draw(st.sampled_from([f"{c}", "n_kv - n_q", f"n_kv - n_q + {c}", "n_q"]))
    return draw(st.sampled_from([
        f"({sides[0]} {op} {sides[1]})", f"({sides[0]} {op} {sides[1]})", f"({row} - {col} {op} {c})",
        f"(({sides[0]} - {sides[1]}).abs() {op} {c})", f"({c} {op} ({row} - {col}).abs())",
        f"({row} {op} {c}).expand(n_q, n_kv)", f"({col} {op} {c}).expand(n_q, n_kv)",
        f"torch.ones({shape}).{side}({offset}).bool()", f"(torch.ones({shape}).{side}({c}) {op} {abs(e)})",
        f"torch.ones(n_q + n_kv + 6, n_q + n_kv + 6).{side}({c})[{abs(c)}:n_q + {abs(c)}, {abs(e)}:n_kv + {abs(e)}].bool()",
        f"torch.ones(n_kv + 9, n_kv + 9).{side}({c})[:n_kv, :n_kv][-1:].expand(n_q, n_kv).to(torch.bool)",
        f"torch.ones(n_kv, n_q).{side}({c}).T.bool()", f"torch.ones(n_kv, n_q, dtype=torch.bool).{side}({offset}).mT",
        f"torch.ones(n_q, n_kv).{side}({c})[:, :1].bool().expand(n_q, n_kv)",
        f"torch.ones(n_q, n_kv).{side}({c})[torch.arange(n_q)[:, None], torch.arange(n_kv)].bool()",
        f"torch.ones(n_q, n_kv + 3).{side}({c})[torch.arange(n_q)[:, None], torch.arange(n_kv) + {e}].bool()",
        "torch.ones(n_q, n_kv, dtype=torch.bool)", "torch.full((n_q, n_kv), False)",
        f"(data {op} {c})", "padding[:1].bool().expand(n_q, n_kv)",
    ]))  # fmt: skip


def combinations(inner):
    two = st.tuples(inner, inner)
    return st.one_of(
        two.map(lambda ab: f"({ab[0]} & {ab[1]})"), two.map(lambda ab: f"({ab[0]} & {ab[1]})"),
        two.map(lambda ab: f"({ab[0]} | {ab[1]})"), two.map(lambda ab: f"torch.logical_and({ab[0]}, {ab[1]})"),
        two.map(lambda ab: f"torch.where({ab[0]}, {ab[1]}, False)"),
        two.map(lambda ab: f"{ab[0]}.masked_fill({ab[1]}, False)"),
        two.map(lambda ab: f"ior({ab[0]}.clone(), {ab[1]})"), two.map(lambda ab: f"{ab[0]}.clone().masked_fill_({ab[1]}, False)"),
        inner.map(lambda a: f"(~{a})"), inner.map(lambda a: f"{a}.logical_not()"),
        inner.map(lambda a: f"({a} == 0)"), inner.map(lambda a: f"({a}.float() != 0)"),
        inner.map(lambda a: f"{a}.clone().contiguous()"), inner.map(lambda a: f"assigned({a}.clone())"),
        inner.map(lambda a: f"{a}[None, None][0, 0]"), inner.map(lambda a: f"({a} & True)"),
    )  # fmt: skip


@st.composite
def masks(draw):
    """Source of a bool or float mask, [n_q, n_kv] or broadcastable from [2, 1, n_q, n_kv]."""
    m = draw(st.recursive(conditions(), combinations, max_leaves=3))
    low = draw(st.sampled_from(["-inf", "torch.finfo(FLOAT).min", "-1e4", "-2.0"]))
    other = draw(conditions())
    return draw(st.sampled_from([
        m, m, f"{m}[None, None]", f"{m}.expand(2, 2, n_q, n_kv)", f"({m} & padding.bool()[:, None, None])",
        f"(padding.bool()[:, None, None].expand(2, 1, n_q, n_kv) & {m})",
        f"torch.where({m}, 0.0, {low})", f"torch.where({m}, {low}, 0.0)",
        f"torch.zeros(n_q, n_kv).masked_fill({m}, {low})", f"(1.0 - {m}.float()) * {low}",
        f"torch.where({m} & padding.bool()[:, None, None], 0.0, {low})",
        f"torch.where({m}, 0.0, {low}) + torch.where({other}, 0.0, -inf)",
        f"torch.full((n_q, n_kv), {low}).masked_fill({m}, 0.0)", f"torch.where({m}, data, {low})",
        f"torch.full((n_q, n_kv), {low}).triu({draw(small)})", f"torch.where({m}, 0.0, {low}) * 0.5",
        f"(torch.where({m}, 0.0, {low}) > torch.finfo(FLOAT).min)", f"torch.log({m}.float())",
    ]))  # fmt: skip


def ior(a, b):
    a |= b
    return a


def assigned(a):
    a[-1] = True
    return a


@seed(int(os.environ["SEED"]))
@settings(
    max_examples=int(os.environ.get("MASK_PROGRAMS", 50 if has_every_variant() else 10)),
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(masks(), st.integers(1, 7), st.integers(1, 7), st.booleans(), st.booleans())
def test_what_is_proven_of_random_programs_is_what_they_compute(source, n_q, n_kv, square, dynamic):
    n_kv = n_q if square else n_kv
    program = eval(f"lambda n_q, n_kv, padding, data: {source}", globals())
    shapes = (
        [(n_q, n_kv), (n_q + 2, n_kv + 2), (n_q + 3, n_kv + 3 - square)]
        if dynamic
        else [(n_q, n_kv)]
    )
    try:
        for shape in shapes:
            F.scaled_dot_product_attention(
                torch.ones(2, 2, shape[0], 8), *[torch.ones(2, 2, shape[1], 8)] * 2,
                program(*shape, torch.ones(2, shape[1], dtype=torch.long), torch.ones(*shape)),
            )  # fmt: skip
    except (RuntimeError, IndexError):
        return event("not a program")
    band, left = proven(program, *shapes, options={"dynamic": dynamic})
    event(f"claimed: {(band != FULL or left != 'mask')}")


# -- export, biases, and real models ----


def test_masks_of_exported_programs_are_proven_too():
    class Model(torch.nn.Module):
        def forward(self, q, padding):
            n = q.shape[2]
            mask = torch.arange(n)[None, None, None] <= torch.arange(n)[None, None, :, None]
            mask = mask & padding[:, None, None] & ones(n + 3).triu(-2)[1 : n + 1, 1 : n + 1]
            return F.scaled_dot_product_attention(q, q, q, mask)

    n = torch.export.Dim("n", min=4, max=64)
    inputs = (torch.randn(2, 2, 16, 8), torch.ones(2, 16, dtype=torch.bool))
    ep = torch.export.export(Model(), inputs, dynamic_shapes=({2: n}, {1: n}))
    ((mask, n_q, n_kv),) = sdpa_masks(ep.graph)
    band, left = prove(mask, n_q, n_kv, GraphIndex(ep.graph))
    assert band == Band(2, 0) and value_of(left).shape[1:3] == (1, 1)


@pytest.mark.parametrize("lower_right", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_causal_bias_made_outside_is_inlined_into_tril_or_is_causal(lower_right, dynamic):
    """Made inside the compiled function it breaks the graph (its constructor is not traced), and
    the graph after the break sees what is seen here. Upper left is is_causal=True, without a mask."""
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left

    found = []

    def see(gm):
        found.extend(prove(*call, GraphIndex(gm.graph)) for call in sdpa_masks(gm.graph))

    bias = (causal_lower_right if lower_right else causal_upper_left)(7, 12)
    q, k = torch.randn(1, 2, 7, 8), torch.randn(1, 2, 12, 8)
    run_seen(F.scaled_dot_product_attention, q, k, k, bias, see=see, dynamic=dynamic)
    assert found == ([(LAST, None)] if lower_right else [])


NO_CACHE, PADDED = {"use_cache": False}, models.padding()


def qwen3(lib, **inputs):
    model = lib.Qwen3Model(lib.Qwen3Config(**models.DECODER, attn_implementation="sdpa"))
    return model, {"input_ids": models.token_ids(), **inputs}


def gemma3(lib, sliding_window=16, kinds=("sliding_attention", "full_attention"), **inputs):
    sizes = models.DECODER | {"num_hidden_layers": len(kinds), "layer_types": list(kinds)}
    config = lib.Gemma3TextConfig(
        **sizes, sliding_window=sliding_window, attn_implementation="sdpa"
    )
    return lib.Gemma3TextModel(config), {"input_ids": models.token_ids(), **inputs}


def with_long_windows(make, **given):
    """Of 4096 keys, longer than the prompt."""
    return functools.partial(make, sliding_window=4096, **given)


# To Dynamo of torch 2.11 torch.compiler.is_exporting() is True (pytorch#176499), where transformers
# makes a mask even for calls in which every query sees every key.
EVERY_KEY = [(FULL, None)] if torch.__version__ < "2.13" else []
# model, inputs, of each attention call with a mask: what a query sees, and the shape of the rest
OF_KEYS = 2, 1, 1, 70
GOLDEN = [
    (models.llama, NO_CACHE, [(CAUSAL, None)]),
    (models.llama, PADDED, [(CAUSAL, OF_KEYS)]),
    (qwen3, NO_CACHE, [(CAUSAL, None)]),
    (models.gpt2, NO_CACHE, [(CAUSAL, None)]),
    (models.gpt2, PADDED, [(CAUSAL, OF_KEYS)]),
    (models.mistral, NO_CACHE, [(Band(15, 0), None)]),
    (models.mistral, PADDED, [(Band(15, 0), OF_KEYS)]),
    (gemma3, NO_CACHE, [(Band(15, 0), None), (CAUSAL, None)]),
    (models.modernbert, {}, [*EVERY_KEY, (Band(8, 8), None)]),
    (models.modernbert, PADDED, [(FULL, OF_KEYS), (Band(8, 8), OF_KEYS)]),
    (models.bert, PADDED, [(FULL, OF_KEYS)]),
    (models.whisper, NO_CACHE, [(CAUSAL, None)]),
    (with_long_windows(models.mistral), PADDED, [(CAUSAL, OF_KEYS)]),
    (with_long_windows(gemma3, kinds=["sliding_attention"]), PADDED, [(CAUSAL, OF_KEYS)]),
]


@pytest.mark.models
@chosen(
    # Without padding a mask is made of lengths alone: symbols change what is read of it. Gemma's are
    # Llama's and Mistral's. front/test_models.py has models that pad, with lengths that are numbers.
    lambda row, dynamic: dynamic and row in (1, 7),
    row=range(len(GOLDEN)),
    dynamic=[False, True],
)
def test_what_is_proven_of_models(row, dynamic):
    make, given, expected = GOLDEN[row]
    model, inputs = make(models.library("transformers"), **given)
    found = []

    def backend(gm, _):
        for mask, n_q, n_kv in sdpa_masks(gm.graph):
            band, left = prove(mask, n_q, n_kv, GraphIndex(gm.graph))
            assert left is not mask
            left = left and tuple(
                n if isinstance(n, int) else n.node.hint for n in value_of(left).shape
            )
            found.append((band, left))
        return gm.forward

    with torch.no_grad():
        torch.compile(model.eval(), backend=backend, dynamic=dynamic)(**inputs)
    assert found == expected
