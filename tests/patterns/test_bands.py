"""What is proven about masks: never more than what the mask says, and enough for real models.

`proven` captures programs with Dynamo and holds what was claimed against the mask that eager
PyTorch computes, so that every test below is a test of soundness too.
"""

import functools
import itertools
import math
import os
import random

import models
import pytest
import torch
import torch.nn.functional as F
from pairs import chosen, has_every_variant
from support import band_mask, run_seen

from sage_inductor.ops.visibility import CAUSAL, FULL, Band
from sage_inductor.patterns.graph import GraphIndex, statically_true, value_of
from sage_inductor.patterns.masks.bands import prove
from sage_inductor.patterns.sdpa import TARGETS

os.environ["HF_HUB_OFFLINE"] = "1"

inf = math.inf
LAST = Band(None, 0, bottom_right=True)


# -- the harness ----


def sdpa_masks(graph):
    """(node, mask, n_q, n_kv) of the SDPA calls with a mask."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in TARGETS:
            mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
            if mask is not None:
                yield mask, value_of(node.args[0]).shape[2], value_of(node.args[1]).shape[2]


def weights(mask: torch.Tensor, n_q: int, n_kv: int) -> torch.Tensor:
    """softmax under `mask`, of fixed scores; 0 where a query sees no key."""
    scores = torch.randn(n_q, n_kv, generator=torch.Generator().manual_seed(0)).double()
    bias = mask.double().log() if mask.dtype == torch.bool else mask.double()
    return (scores + bias).softmax(-1).nan_to_num(0)


def proven(programs: dict, *shapes, dynamic=False, complete=False) -> dict:
    """Of each program (band, what is left): all are one graph, and this is its last compilation's.

    program(n_q, n_kv, padding [2, n_kv], data [n_q, n_kv]) -> mask. What is left: None, "mask" for
    all of it, or its shape as text, in which m is n_kv. complete: what is a band must be proven."""
    claims = []

    def backend(gm, _):
        index, found, given = GraphIndex(gm.graph), [], []
        for mask, n_q, n_kv in sdpa_masks(gm.graph):
            band, left = prove(mask, n_q, n_kv, index)
            sizes = [] if left is None else value_of(left).shape
            shape = ", ".join("m" if statically_true(n == n_kv) else str(n) for n in sizes)
            found.append((band, left and ("mask" if left is mask else shape)))
            given.append(left)
        (output,) = (node for node in gm.graph.nodes if node.op == "output")
        output.args = ((*output.args[0], *given),)
        gm.recompile()

        def run(*inputs):
            outputs = gm(*inputs)
            claims[:] = zip(found, outputs[-len(found) :], strict=True)
            return outputs[: -len(found)]

        return run

    def call(q, k, padding, data):
        masks = [program(q.shape[2], k.shape[2], padding, data) for program in programs.values()]
        return masks, [F.scaled_dot_product_attention(q, k, k, mask) for mask in masks]

    torch._dynamo.reset()
    compiled = torch.compile(call, backend=backend, fullgraph=True, dynamic=dynamic)
    for n_q, n_kv in shapes:
        q, k = (torch.randn(2, 2, n, 8) for n in (n_q, n_kv))
        masks, _ = compiled(q, k, *beside(n_q, n_kv))
        for name, mask, ((band, left), left_now) in zip(programs, masks, claims, strict=True):
            check_claim(mask, band, left, left_now, n_q, n_kv, name)
            seen = (mask if mask.dtype == torch.bool else mask == 0).expand(2, 2, n_q, n_kv)[0, 0]
            if complete and left == "mask" and sees_a_key(mask, seen):
                assert not any(seen.equal(each) for each in all_bands(n_q, n_kv)), name
    return {name: claim for name, (claim, _) in zip(programs, claims, strict=True)}


def beside(n_q: int, n_kv: int) -> tuple[torch.Tensor, torch.Tensor]:
    """padding, data: what masks are made of beside the lengths."""
    padding = torch.ones(2, n_kv, dtype=torch.long)
    padding[-1, n_kv // 2 :] = 0
    return padding, torch.randn(n_q, n_kv)


def check_claim(mask, band, left, left_now, n_q: int, n_kv: int, name: str) -> None:
    said = band_mask(band, n_q, n_kv)
    if left_now is not None and left_now.dtype == torch.bool:
        said = said & left_now
    elif left_now is not None:
        assert band == FULL, name
        said = left_now
    both = torch.broadcast_tensors(weights(said, n_q, n_kv), weights(mask, n_q, n_kv))
    torch.testing.assert_close(*both, msg=lambda text: f"{name}: {band}, {left}: {text}")
    if mask.dtype == torch.bool:
        assert torch.equal(*torch.broadcast_tensors(said, mask)), (name, band, left)


def sees_a_key(mask, seen) -> bool:
    """Where a query sees none, the lowest number is no mask."""
    return mask.dtype == torch.bool or not mask.isfinite().all() or bool(seen.any(-1).all())


@functools.cache
def all_bands(n_q: int, n_kv: int) -> list[torch.Tensor]:
    offsets = None, *range(n_q + n_kv)
    sides = itertools.product(offsets, offsets, (False, True))
    return [band_mask(Band(*each), n_q, n_kv) for each in sides]


def ones(n, m=None, dtype=torch.bool):
    return torch.ones(n, n if m is None else m, dtype=dtype)


def lowest():  # a number of the module would be a symbol
    return torch.finfo(torch.float32).min


def columns(m):
    return torch.arange(m)


def row_numbers(n):
    return torch.arange(n)[:, None]


def window(n_q, n_kv, left=None, right=None):
    row, col = row_numbers(n_q), columns(n_kv)
    mask = torch.ones(n_q, n_kv, dtype=torch.bool)
    if left is not None:
        mask = mask & (row - col <= left)
    return mask if right is None else mask & (col - row <= right)


# -- by hand: how models write their masks, what is left of some, what no band is ----

SQUARE = {
    "columns up to the row": (lambda n, m, p, d: columns(m) <= row_numbers(n), CAUSAL, None),
    "an expanded 4-d mask": (
        lambda n, m, p, d: (columns(m)[None, None, None] <= torch.arange(n).view(1, 1, -1, 1)).expand(2, 2, n, m), CAUSAL, None),
    "tril of floats == 1": (lambda n, m, p, d: torch.ones(n, n).tril()[None, None] == 1, CAUSAL, None),
    "not triu(1)": (lambda n, m, p, d: ~ones(n).triu(1), CAUSAL, None),
    "the corner of a larger mask": (
        lambda n, m, p, d: ones(64)[None, None].tril()[:, :, :n, :m].to(torch.bool), CAUSAL, None),
    "positions by cumsum": (
        lambda n, m, p, d: (torch.ones(m, dtype=torch.long).cumsum(0) - 1) <= row_numbers(n), CAUSAL, None),
    "zeros.masked_fill": (lambda n, m, p, d: torch.zeros(n, m).masked_fill(~ones(n).tril(), lowest()), CAUSAL, None),
    "full(-inf).triu(1)": (lambda n, m, p, d: torch.full((n, m), -inf).triu(1), CAUSAL, None),
    "full(lowest).triu(1)": (lambda n, m, p, d: torch.full((n, m), lowest()).triu(diagonal=1), CAUSAL, None),
    "(1 - m) * lowest": (lambda n, m, p, d: (1.0 - ones(n).tril().float()) * lowest(), CAUSAL, None),
    "a sum of masks": (
        lambda n, m, p, d: torch.full((n, m), -inf).triu(1) + torch.full((n, m), -inf).tril(-4), Band(3, 0), None),
    "a window": (lambda n, m, p, d: window(n, m, 3, 0), Band(3, 0), None),
    "a window by distance": (lambda n, m, p, d: (row_numbers(n) - columns(m)).abs() <= 2, Band(2, 2), None),
    "all zeros": (lambda n, m, p, d: torch.zeros(1, 1, n, m), FULL, None),
    "where as a method": (lambda n, m, p, d: ones(n).tril().where(ones(n).triu(-99), ones(n)), CAUSAL, None),
    "and the other way round": (lambda n, m, p, d: ones(n).triu(-99).where(ones(n).tril(), ones(n)), FULL, None),
    "padding": (lambda n, m, p, d: window(n, m, None, 0) & p.bool()[:, None, None], CAUSAL, "2, 1, 1, m"),
    "padding, expanded": (
        lambda n, m, p, d: (ones(n).tril() & p.bool()[:, None, None, :].expand(2, 1, n, m)).expand(2, 2, n, m),
        CAUSAL, "2, 1, 1, m"),
    "padding in a float mask": (
        lambda n, m, p, d: torch.where((p != 0)[:, None, None] & ones(n).tril(), 0.0, -inf), CAUSAL, "2, 1, 1, m"),
    "padding, negated": (lambda n, m, p, d: ones(n).tril() & ~(p == 0)[:, None, None], CAUSAL, "2, 1, 1, m"),
    "a row of keys": (lambda n, m, p, d: ones(n).tril() & p[1].bool(), CAUSAL, "m"),
    "int32 wraps": (
        lambda n, m, p, d: ones(n).tril() & (torch.arange(m, dtype=torch.int32) * 2**30 >= 0), CAUSAL, "m"),
    "data": (lambda n, m, p, d: window(n, m, 3, 0) & (d > 0), Band(3, 0), "m, m"),
}  # fmt: skip
OBLONG = {
    "top left": (lambda n, m, p, d: columns(m) <= row_numbers(n), CAUSAL, None),
    "queries are the last": (lambda n, m, p, d: columns(m) <= torch.arange(m - n, m)[:, None], LAST, None),
    "an offset": (lambda n, m, p, d: columns(m) <= row_numbers(n) + (m - n), LAST, None),
    "tril(m - n)": (lambda n, m, p, d: ones(n, m).tril(m - n), LAST, None),
    "dimensions in a cycle": (lambda n, m, p, d: ones(n, m).tril(m - n)[..., None].permute(2, 0, 1), LAST, None),
    "the last rows of a square": (lambda n, m, p, d: ones(m).tril()[m - n : m, :m], LAST, None),
    "the last rows of a square, counted back": (lambda n, m, p, d: ones(m).tril()[None, -n:], LAST, None),
    "a window of the last": (lambda n, m, p, d: window(m, m, 3, 0)[m - n :], Band(3, 0, bottom_right=True), None),
}  # fmt: skip


def setitem(n, m, p, d):
    return assigned(ones(n).tril(), 0)


def written_through_a_view(n, m, p, d):
    mask = ones(n).tril()
    row = mask.view(-1)[2:5]
    row |= True
    return mask


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
    return columns(m) <= row[:, None]


UNPROVEN = {
    "a lowest number where a query sees nothing": lambda n, m, p, d: torch.full((n, m), lowest()).triu(0),
    "-1e4 is no mask": lambda n, m, p, d: torch.full((n, m), -1e4).triu(1),
    "a bias below the diagonal": lambda n, m, p, d: torch.full((n, m), 2.0).triu(1),
    "a tiny dtype wraps": lambda n, m, p, d: columns(m).to(torch.int8) * 20 <= row_numbers(n).to(torch.int8) * 20,
    "blocks": lambda n, m, p, d: columns(m) // 4 <= row_numbers(n) // 4,
    "a prefix": lambda n, m, p, d: ones(n).tril() | (columns(m) < 4),
    "data in an index": lambda n, m, p, d: p.cumsum(-1)[:, None, None] <= row_numbers(n),
    "data twice": lambda n, m, p, d: ones(n).tril() & (d > 0) & (d < 1),
    "data or causal": lambda n, m, p, d: (d > 0) | ones(n).tril(),
    "data and padding": lambda n, m, p, d: (d > 0) & p.bool()[:, None, None] & ones(n).tril(),
    "queries' own padding": lambda n, m, p, d: ones(n).tril() & p.bool()[:, None, :, None],
    "one of several outputs": lambda n, m, p, d: (d > 0).repeat(1, 2).chunk(2, 1)[0],
    "a gather that wraps around": lambda n, m, p, d: columns(m)[columns(m) - 3] <= row_numbers(n),
    "a gather from the end": lambda n, m, p, d: columns(m) <= torch.arange(n)[torch.arange(n) - 2][:, None],
    "padding by the lowest number": lambda n, m, p, d: torch.where((p != 0)[:, None, None] & ones(n).tril(), 0.0, lowest()),
    "a difference at the start": lambda n, m, p, d: torch.diff(columns(m), prepend=torch.arange(5, 6)) + 0 * row_numbers(n) == 1,
    "the bits of floats": lambda n, m, p, d: torch.ones(n, n).tril().view(torch.int32) == 1,
    "nothing": lambda n, m, p, d: torch.zeros(n, m, dtype=torch.bool),
    "-inf compared with the lowest": lambda n, m, p, d: (torch.full((n, m), -inf).triu(1) + torch.full((n, m), lowest()).tril(-4)) > lowest() - 1,
    **{f.__name__: f for f in (setitem, written_through_a_view, written_out, padding_written_later, index_written)},
}  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True])
def test_masks_as_models_write_them_are_proven_and_no_others(dynamic):
    square = SQUARE | {name: (program, FULL, "mask") for name, program in UNPROVEN.items()}
    for cases, *shapes in ((square, (12, 12), (9, 9)), (OBLONG, (7, 12), (5, 13))):
        programs = {name: program for name, (program, *_) in cases.items()}
        found = proven(programs, *shapes[: 1 + dynamic], dynamic=dynamic)
        assert found == {name: tuple(expected) for name, (_, *expected) in cases.items()}


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
    "step by keyword": lambda n, m, p, d: torch.arange(start=0, end=3 * m, step=3) <= row_numbers(n),
    "dtype of a range": lambda n, m, p, d: torch.arange(m, dtype=torch.float32) <= row_numbers(n),
    "dtype of a sum": lambda n, m, p, d: torch.ones(m).cumsum(0, dtype=torch.int64) - 1 <= row_numbers(n),
    "dimension of a sum": lambda n, m, p, d: ones(n, m, torch.long).cumsum(0) > columns(m),
    "two numbers before": lambda n, m, p, d: torch.diff(columns(m)[1:], prepend=0 * torch.arange(2)) + 0 * row_numbers(n) == 1,
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
    "repeats of numbers": lambda n, m, p, d: torch.arange(m // 2).repeat(2) <= row_numbers(n),
    "tiles of numbers": lambda n, m, p, d: torch.arange(m // 2).tile(2) <= row_numbers(n),
    "value by keyword": lambda n, m, p, d: torch.full(size=(n, m), fill_value=-inf).triu(1),
    "dtype of a fill": lambda n, m, p, d: torch.full((n, m), 1.5, dtype=torch.int64).tril() == 1,
    "dtype of ones": lambda n, m, p, d: torch.ones_like(torch.zeros(n, m), dtype=torch.bool).tril(),
    "memory format": lambda n, m, p, d: ones(n).tril().clone(memory_format=torch.contiguous_format),
    "copy": lambda n, m, p, d: ones(n).tril().to(torch.float32, copy=True) > 0.5,
    "dtype of a copy": lambda n, m, p, d: torch.full((n, m), -1.0).triu(1).to(torch.uint8) == 0,
}  # fmt: skip


def test_arguments_that_change_what_is_computed_are_honoured_or_the_mask_stays():
    proven(ARGUMENTS, (12, 12))


def alone(program, *shapes, **options):
    return proven({"it": program}, *shapes, **options)["it"]


@pytest.mark.parametrize("n_q, n_kv", [(6, 6), (4, 7), (7, 4)])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_bound_that_hides_no_key_is_none(side, n_q, n_kv):
    """A window as long as the sequence is causal, or nothing."""
    n = n_q if side == "left" else n_kv
    programs = {
        bound: lambda n_q, n_kv, p, d, b=bound: window(n_q, n_kv, **{"right": 0, side: b})
        for bound in range(n - 3, n + 2)
    }
    for bound, (band, left_over) in proven(programs, (n_q, n_kv)).items():
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


def test_nothing_is_claimed_of_indices_that_wrap_or_of_an_unknown_offset():
    def wraps(n, m, p, d):
        return torch.arange(m).to(torch.int8) <= torch.arange(n).to(torch.int8)[:, None]

    def offset(n, m, p, d):
        return columns(m) <= row_numbers(n) + m // 3

    assert alone(wraps, (300, 300)) == (FULL, "mask")
    assert alone(offset, (12, 12), (9, 9), dynamic=True) == (FULL, "mask")
    assert alone(offset, (12, 12)) == (Band(None, 4), None)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_lowest_number_is_no_band_where_a_query_may_see_no_key(dynamic):
    def tall(n_q, n_kv, padding, data):  # more queries than keys: the first see nothing
        return torch.where(ones(n_q, n_kv).tril(n_kv - n_q), 0.0, lowest())

    # One query beyond the last key that the window shows; as many as can be, and see one.
    def ahead(n, m, p, d):
        return torch.where(window(n, m, 3, 0), 0.0, lowest())

    def hides(*args):  # twice the lowest is -inf
        return tall(*args) * 2

    found = proven({"tall": tall, "ahead": ahead, "hides": hides}, (11, 7), dynamic=dynamic)
    assert found == {"tall": (FULL, "mask"), "ahead": (FULL, "mask"), "hides": (LAST, None)}
    assert alone(ahead, (10, 7)) == (Band(3, 0), None)


# -- random programs ----


class Program:
    """Source of a random mask. banded: of operations that leave a band a band, and of which `prove`
    must read each; else of any."""

    def __init__(self, rng, banded: bool):
        self.rng, self.banded = rng, banded

    def pick(self, of_bands: list, others: list = ()):
        return self.rng.choice([*of_bands, *(() if self.banded else others)])

    def small(self) -> int:
        return self.rng.randint(-3, 3)

    def index(self, n: str) -> str:
        c, wide = self.small(), f"torch.arange({n} + 5)"
        return self.pick(
            [f"torch.arange({n})", f"torch.arange({n}, dtype=torch.int32)", f"(torch.arange({n}) + {c})",
             f"torch.arange({c}, {n} + {c})", f"({c} - torch.arange({n}) * -1)", f"(torch.arange({n}) - {c}).long()",
             f"(torch.ones({n}, dtype=torch.long).cumsum(0) - 1)", f"{wide}[{abs(c)}:{n} + {abs(c)}]",
             f"torch.arange(n_kv - {n}, n_kv)", f"(torch.arange({n}) + n_kv - n_q)", f"-(-torch.arange({n}))",
             f"{wide}[torch.arange({n}) + {abs(c)}]", f"torch.arange({n})[None].expand(2, -1)[1]"],
            [f"({c} + torch.arange({n}) * {self.small()})", f"{wide}[torch.arange({n}) + {c}]",
             f"torch.full(({n},), {c})", f"-torch.arange({n})", f"torch.arange(3 * {n})[::3]",
             f"padding[0, 0] * torch.arange({n})"],
        )  # fmt: skip

    def condition(self) -> str:
        row = self.index("n_q") + self.pick(["[:, None]", ".unsqueeze(-1)", ".view(-1, 1)"])
        col = self.index("n_kv") + self.pick(["[None, :]", "", ".reshape(1, n_kv)"])
        a, b = self.rng.sample([row, col], 2)
        op, c, e = self.pick(["<=", "<", ">=", ">"], ["==", "!="]), self.small(), self.small()
        near, far = self.rng.choice(["<=", "<"]), self.rng.choice([">=", ">"])
        shape = "(n_q, n_kv)" + self.pick(["", ", dtype=torch.bool", ", dtype=torch.int32"])
        side = self.pick(["tril", "triu"])
        offset = self.pick([f"{c}", "n_kv - n_q", f"n_kv - n_q + {c}"], ["n_q"])
        return self.pick(
            [f"({a} {op} {b})", f"({a} {op} {b})", f"({row} - {col} {op} {c})",
             f"(({a} - {b}).abs() {near} {c})", f"({c} {far} ({a} - {b}).abs())",
             f"(~({c} {near} ({a} - {b}).abs()))", f"(~(({a} - {b}).abs() {far} {c}))",
             f"({a} == {b})", f"torch.ones({shape}).{side}({offset}).bool()", f"(torch.ones({shape}).{side}({c}) == 1)",
             f"torch.ones(n_q + n_kv + 6, n_q + n_kv + 6).{side}({c})[{abs(c)}:n_q + {abs(c)}, {abs(e)}:n_kv + {abs(e)}].bool()",
             f"torch.ones(n_kv, n_q).{side}({c}).T.bool()", f"torch.ones(n_kv, n_q, dtype=torch.bool).{side}({offset}).mT",
             f"torch.ones(1, n_kv, n_q).{side}({c}).permute(0, 2, 1)[0].bool()",
             f"torch.ones(n_q, n_kv).{side}({c})[torch.arange(n_q)[:, None], torch.arange(n_kv)].bool()",
             f"torch.ones(n_q, n_kv + 3).{side}({c})[torch.arange(n_q)[:, None], torch.arange(n_kv) + {abs(e)}].bool()",
             "torch.ones(n_q, n_kv, dtype=torch.bool)"],
            [f"(({a} - {b}).abs() {op} {c})", f"({c} {op} ({row} - {col}).abs())", f"({row} {op} {c}).expand(n_q, n_kv)",
             f"({col} {op} {c}).expand(n_q, n_kv)", f"(torch.ones({shape}).{side}({c}) {op} {abs(e)})",
             f"torch.ones(n_kv + 9, n_kv + 9).{side}({c})[:n_kv, :n_kv][-1:].expand(n_q, n_kv).to(torch.bool)",
             f"torch.ones(n_q, n_kv).{side}({c})[:, :1].bool().expand(n_q, n_kv)", "torch.full((n_q, n_kv), False)",
             f"torch.ones(n_q, n_kv + 3).{side}({c})[torch.arange(n_q)[:, None], torch.arange(n_kv) + {e}].bool()",
             f"(data {op} {c})", "padding[:1].bool().expand(n_q, n_kv)"],
        )  # fmt: skip

    def combined(self, depth: int = 2) -> str:
        if not depth:
            return self.condition()
        a = self.combined(depth - 1)
        # `prove` reads two conditions joined; of three it need not.
        b = self.condition() if self.banded and depth == 2 else self.combined(depth - 1)
        both = [f"({a} & {b})", f"torch.logical_and({a}, {b})", f"torch.where({a}, {b}, False)",
                f"{a}.masked_fill(~{b}, False)", f"(~(~{a} | ~{b}))", f"{b}.where({a}, torch.zeros_like({a}))"]  # fmt: skip
        one = [a, f"(~(~{a}))", f"{a}.logical_not().logical_not()", f"(({a} == 0) == 0)", f"({a}.float() != 0)",
               f"({a}.int() > 0)", f"{a}.clone().contiguous()", f"{a}[None, None][0, 0]", f"({a} & True)",
               f"{a}.mT.contiguous().mT", f"{a}.view(1, n_q, n_kv).squeeze(0)"]  # fmt: skip
        others = [f"({a} | {b})", f"ior({a}.clone(), {b})", f"{a}.clone().masked_fill_({b}, False)", f"(~{a})",
                  f"assigned({a}.clone())", f"{a}.masked_fill({b}, False)", f"({a} ^ {b})"]  # fmt: skip
        return self.pick(both if depth == 1 else one, [*both, *one, *others])

    def mask(self) -> str:
        """bool or float, [n_q, n_kv] or broadcastable from [2, 1, n_q, n_kv]."""
        m, other = self.combined(), self.condition()
        low = self.pick(["-inf", "lowest()"], ["-1e4", "-2.0"])
        padding = "padding.bool()[:, None, None]"
        return self.pick(
            [m, m, f"{m}[None, None]", f"{m}.expand(2, 2, n_q, n_kv)", f"({m} & {padding})",
             f"({padding}.expand(2, 1, n_q, n_kv) & {m})", f"torch.where({m}, 0.0, {low})",
             f"torch.where(~{m}, {low}, 0.0)", f"torch.zeros(n_q, n_kv).masked_fill(~{m}, {low})",
             f"(1.0 - {m}.float()) * lowest()", f"torch.where({m} & {padding}, 0.0, -inf)",
             f"torch.full((n_q, n_kv), {low}).masked_fill({m}, 0.0)", f"torch.log({m}.float())"],
            [f"torch.where({m}, {low}, 0.0)", f"torch.where({m} & {padding}, 0.0, {low})",
             f"torch.where({m}, 0.0, {low}) + torch.where({other}, 0.0, -inf)", f"torch.where({m}, data, {low})",
             f"torch.full((n_q, n_kv), {low}).triu({self.small()})", f"torch.where({m}, 0.0, {low}) * 0.5",
             f"(torch.where({m}, 0.0, {low}) > lowest())"],
        )  # fmt: skip


def ior(a, b):
    a |= b
    return a


def assigned(a, row=-1):
    a[row] = True
    return a


def is_a_program(program, n_q: int, n_kv: int) -> bool:
    q, k = (torch.ones(2, 2, n, 8) for n in (n_q, n_kv))
    try:
        F.scaled_dot_product_attention(q, k, k, program(n_q, n_kv, *beside(n_q, n_kv)))
    except (RuntimeError, IndexError):
        return False
    return True


@pytest.mark.parametrize("banded, dynamic", [(True, False), (False, False), (False, True)])
def test_what_is_proven_of_random_programs_is_what_they_compute(banded, dynamic):
    """And of operations that leave a band a band, every band is proven where lengths are known."""
    rng = random.Random(f"{os.environ['SEED']} {banded} {dynamic}")
    for _ in range(20 if has_every_variant() else 1 + 2 * banded):
        n_q, n_kv = rng.randint(1, 7), rng.randint(2, 7)  # of one key `prove` reads no band of rows
        n_kv = rng.choice([n_q, n_kv])
        longer = [(n_q + 2, n_kv + 2), (n_q + 3, n_kv + 3 - (n_q == n_kv))]
        shapes = [(n_q, n_kv), *longer * dynamic]
        sources = [Program(rng, banded).mask() for _ in range(50 if banded else 30)]
        made = {x: eval(f"lambda n_q, n_kv, padding, data: {x}", globals()) for x in sources}
        programs = {x: f for x, f in made.items() if all(is_a_program(f, *each) for each in shapes)}
        assert len(programs) > (40 if banded else 12)
        proven(programs, *shapes, dynamic=dynamic, complete=banded)


# -- export, biases, and real models ----


def test_masks_of_exported_programs_are_proven_too():
    def model(q, padding):
        n = q.shape[2]
        mask = torch.arange(n)[None, None, None] <= torch.arange(n)[None, None, :, None]
        mask = mask & padding[:, None, None] & ones(n + 3).triu(-2)[1 : n + 1, 1 : n + 1]
        return F.scaled_dot_product_attention(q, q, q, mask)

    n = torch.export.Dim("n", min=4, max=64)
    inputs = (torch.randn(2, 2, 16, 8), torch.ones(2, 16, dtype=torch.bool))
    ep = torch.export.export(models.Of(model), inputs, dynamic_shapes=({2: n}, {1: n}))
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


def gemma3(lib, **inputs):
    layers = ["sliding_attention", "full_attention"]
    sizes = models.DECODER | {"num_hidden_layers": 2, "layer_types": layers}
    config = lib.Gemma3TextConfig(**sizes, sliding_window=16, attn_implementation="sdpa")
    return lib.Gemma3TextModel(config), {"input_ids": models.token_ids(), **inputs}


# model, inputs, of each attention call with a mask: what a query sees, and the shape of the rest
OF_KEYS = 2, 1, 1, 70
GOLDEN = [
    (models.llama, PADDED, [(CAUSAL, OF_KEYS)]),
    (gemma3, NO_CACHE, [(Band(15, 0), None), (CAUSAL, None)]),
    (models.gpt2, PADDED, [(CAUSAL, OF_KEYS)]),
    (models.mistral, PADDED, [(Band(15, 0), OF_KEYS)]),
    (models.modernbert, PADDED, [(FULL, OF_KEYS), (Band(8, 8), OF_KEYS)]),
    (models.bert, PADDED, [(FULL, OF_KEYS)]),
    (models.whisper, NO_CACHE, [(CAUSAL, None)]),
    (functools.partial(models.mistral, sliding_window=4096), PADDED, [(CAUSAL, OF_KEYS)]),
]


@pytest.mark.models
@chosen(
    # Without padding a mask is made of lengths alone: symbols change what is read of it. Gemma's are
    # Llama's and Mistral's. front/test_models.py has models that pad, with lengths that are numbers.
    lambda row, dynamic: dynamic and row < 2,
    row=range(len(GOLDEN)), dynamic=[False, True],
)  # fmt: skip
def test_what_is_proven_of_models(row, dynamic):
    make, given, expected = GOLDEN[row]
    model, inputs = make(models.library("transformers"), **given)
    found = []

    def backend(gm, _):
        for mask, n_q, n_kv in sdpa_masks(gm.graph):
            band, left = prove(mask, n_q, n_kv, GraphIndex(gm.graph))
            assert left is not mask
            sizes = left and value_of(left).shape
            sizes = sizes and tuple(n if isinstance(n, int) else n.node.hint for n in sizes)
            found.append((band, sizes))
        return gm.forward

    with torch.no_grad():
        torch.compile(model.eval(), backend=backend, dynamic=dynamic)(**inputs)
    assert found == expected
