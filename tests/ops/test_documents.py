"""Packed documents: each is attended as if it were alone, to the bit, whatever its neighbours are.

Shapes: T tokens of all documents, H heads, D head_dim; P places, S documents.
"""

import itertools
import math
import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
import support
import torch
from kernel_cases import GPU, INTERPRETER, Runner, in_interpreter, on_hopper
from pairs import seeds
from support import run
from torch import Tensor

from sage_inductor.ops.attention import select, tiles
from sage_inductor.ops.attention.tiles import Tile
from sage_inductor.ops.documents import places_of
from sage_inductor.ops.gpus import Gpu
from sage_inductor.ops.quantize.op import launch_prepare
from sage_inductor.ops.recipe import NAMED
from sage_inductor.ops.reference.quantize import sample_rows
from sage_inductor.ops.sdpa import SdpaCall, attention_call, check
from sage_inductor.ops.visibility import Band, Visibility, seen_keys

pytestmark = pytest.mark.usefixtures("poisoned")

RECIPES = [name for name, r in NAMED.items() if r.sharing.one_pass and r.of_pv.dtype]
BANDS = Band(), Band(None, 0), Band(40, 0), Band(150, 20)


class Case(NamedTuple):
    q: Tensor  # [1, H, T_q, D]
    k: Tensor
    v: Tensor
    of_q: list[int]  # lengths of documents; the queries that are left see nothing
    of_k: list[int]
    used: list[int] | None  # so many keys of each
    band: Band
    recipe: str

    def alone(self, s: int) -> "Case":
        """Document s, of the keys that are used."""
        (begin, n_q), (begin_k, n_k) = ((sum(x[:s]), x[s]) for x in (self.of_q, self.of_k))
        n_k = n_k if self.used is None else min(n_k, self.used[s])
        k, v = (x[:, :, begin_k : begin_k + n_k] for x in (self.k, self.v))
        q = self.q[:, :, begin : begin + n_q]
        return Case(q, k, v, [n_q], [n_k], None, self.band, self.recipe)

    def documents(self) -> tuple:
        """What `sage::documents` gives."""
        device = self.q.device
        cu_q, cu_k = (
            torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32, device=device)
            for x in (self.of_q, self.of_k)
        )
        if self.used is None and self.of_q == self.of_k and self.k.shape[2] == self.q.shape[2]:
            return torch.ops.sage.documents(cu_q, self.q.shape[2])
        used = None if self.used is None else torch.tensor(self.used, device=device).int()
        return torch.ops.sage.documents(cu_q, self.q.shape[2], cu_k, self.k.shape[2], used)

    def call(self) -> SdpaCall:
        perm, perm_k, spans, documents, counts, indices, shown = self.documents()
        return SdpaCall.of(
            *self[:3], 0.1, NAMED[self.recipe].encode(), shown, self.band, block_q=128,
            block_kv=128, perm=perm, perm_k=perm_k, spans=spans, documents=documents,
            kv_num_blocks=counts, kv_indices=indices,
        )  # fmt: skip


ENDS = [0, 1, 63, 64, 65, 127, 128, 129, 192, 256]


def drawn(seed: int, runner: Runner, longest: int, dtype: torch.dtype | None = None) -> Case:
    """Lengths at the ends of blocks, none too, neighbours of other sizes, gaps of NaN, other
    strides, grouped heads."""
    draw = random.Random(seed)
    torch.manual_seed(seed)

    def lengths(S: int) -> list[int]:
        return [min(draw.choice([*ENDS, draw.randint(1, longest)]), longest) for _ in range(S)]

    of_q = lengths(draw.randint(1, 5))
    of_k = lengths(len(of_q)) if draw.random() < 0.4 else of_q
    used = [draw.randint(0, n + 9) for n in of_k] if draw.random() < 0.3 else None
    rest = draw.choice([0, 0, 1, 130])
    T_q, T_k = max(1, sum(of_q) + rest), max(1, sum(of_k) + rest)
    H_kv, G, (D, D_v) = draw.choice([1, 2]), draw.choice([1, 3]), draw.choice([(64, 64), (80, 40)])
    D, D_v = draw.choice([(D, D_v), (128, 128)])
    q, k, _ = runner.qkv(1, G * H_kv, H_kv, T_q, T_k, D, dtype=dtype)
    *_, v = runner.qkv(1, G * H_kv, H_kv, T_q, T_k, D_v, dtype=dtype)
    k, v = k + draw.choice([0, 3]), v - draw.choice([0, 2])
    for s, (begin, end) in enumerate(itertools.pairwise([0, *itertools.accumulate(of_k)])):
        factor = draw.choice([1, 1, 100, 1e-3])  # of fp16, too, with what is 50 times as large
        end_used = end if used is None else min(end, begin + used[s])
        unseen = [i for i in range(end_used - begin) if i not in sample_rows(end_used - begin)]
        if unseen:  # beyond what is estimated of a sample
            v[:, :, begin + draw.choice(unseen)] *= 50
        for x in (k, v):
            x[:, :, begin:end] *= factor
            x[:, :, end_used:end] = math.nan
    for x in (k, v):
        x[:, :, sum(of_k) :] = math.nan
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    return Case(q, k, v, of_q, of_k, used, draw.choice(BANDS), draw.choice(RECIPES))


def assert_as_alone(call: Callable, case: Case) -> None:
    """out and lse of each document, to the bit; what is in none, and what sees no key, is 0 and
    -inf."""
    (out, lse), begin = call(case), 0
    for s, n_q in enumerate(case.of_q):
        alone, here = case.alone(s), slice(begin, begin + n_q)
        begin += n_q
        if n_q and alone.k.shape[2]:
            for x, expected in zip((out, lse), call(alone), strict=True):
                assert not x[:, :, here].isnan().any()
                assert torch.equal(x[:, :, here], expected), (case[3:], s)
        elif n_q:
            assert not out[:, :, here].any() and (lse[:, :, here] == -math.inf).all()
    assert not out[:, :, begin:].any() and (lse[:, :, begin:] == -math.inf).all()


def by_op(case: Case) -> tuple[Tensor, Tensor]:
    return torch.ops.sage.sdpa(*case.call())


@pytest.mark.parametrize("seed", range(300))
def test_places_are_of_documents_by_blocks(seed):
    case = drawn(seed, INTERPRETER, 400)._replace(q=None)
    draw = random.Random(seed)
    T_q, T_k = (sum(x) + draw.choice([0, 5]) for x in (case.of_q, case.of_k))
    q, k = (torch.empty(1, 1, T, 1) for T in (max(T_q, 1), max(T_k, 1)))
    case = case._replace(q=q, k=k)
    perm, perm_k, spans, documents, counts, indices, shown = case.documents()
    assert len(perm) % 128 == 0 and len(documents) * 64 == len(perm) == len(perm_k)
    assert perm[perm >= 0].tolist() == list(range(q.shape[2]))
    assert torch.equal(shown.flatten(), perm_k >= 0)
    assert places_of(perm, q.shape[2]).tolist() == perm.ge(0).nonzero()[:, 0].tolist()
    keys, last = [], 0
    for s, (first_k, n_k, first_q, n_q) in enumerate(spans[:-1].tolist()):
        begin, begin_k = sum(case.of_q[:s]), sum(case.of_k[:s])
        given = case.of_k[s] if case.used is None else min(case.of_k[s], case.used[s])
        assert (n_q, n_k) == (case.of_q[s], given) and first_k % 128 == 0
        assert first_q + n_q == first_k + n_k  # the bottom right
        assert perm[first_q : first_q + n_q].tolist() == list(range(begin, begin + n_q))
        keys += range(begin_k, begin_k + n_k)
        assert perm_k[first_k : first_k + n_k].tolist() == list(range(begin_k, begin_k + n_k))
        blocks = list(range(first_k // 128, -(-(first_k + n_k) // 128)))
        for m in range(first_q // 128, -(-(first_q + n_q) // 128)):
            assert m >= last and indices[0, 0, m, : counts[0, 0, m]].tolist() == blocks
        if n_q or n_k:
            last = -(-(first_k + n_k) // 128)
            first, end = min(first_q, first_k) // 64, -(-(first_k + n_k) // 64)
            assert (documents[first:end] == s).all()
    of_documents = perm_k[: last * 128]
    assert of_documents[of_documents >= 0].tolist() == keys
    first, n = spans[-1, 2:].tolist()
    assert n == q.shape[2] - sum(case.of_q) and (n == 0 or first >= last * 128)
    assert not counts[0, 0, last:].any()


@seeds(300, always=15)
def test_a_document_is_attended_as_a_call_of_its_own(seed):
    """By the emulation. A call of its own has a band at the bottom right, and where it hides a key
    from every query that key is in no mean."""
    case = drawn(seed, INTERPRETER, 260, torch.bfloat16)
    assert_as_alone(by_op, case)
    (out, lse), begin = by_op(case), 0
    left, right, _ = case.band
    for s, n_q in enumerate(case.of_q):
        q, k, v, *_ = case.alone(s)
        band = dict(left=left, right=right, bottom_right=True)
        if n_q and k.shape[2] and seen_keys(Band(**band), n_q, k.shape[2]) is None:
            dense = support.sdpa(q, k, v, False, 0.1, case.recipe, **band)
            assert torch.equal(out[:, :, begin : begin + n_q], dense[0])
            found = lse[:, :, begin : begin + n_q]
            torch.testing.assert_close(found, dense[1], rtol=1e-5, atol=1e-5)
        begin += n_q


def by_kernels(case: Case) -> tuple[Tensor, Tensor]:
    """The portable kernels; lse of smoothed keys."""
    call, r = case.call(), NAMED[case.recipe]
    prepared = launch_prepare(run, Gpu((8, 9), 1), *call[1:3], None, r, None, *call.keys_order)
    codes = prepared.v.view(torch.uint8)  # in the interpreter places without a key may be NaN
    codes.masked_fill_(codes & 127 == 127, 0)
    seen = Visibility.of(call.attn_mask, case.band, call.perm.shape[0], 128, call.blocks)
    a = attention_call(*call[:3], prepared, seen, call.scale, r, False, None, *call[-4:])
    out, lse = support.launch_portable(a, Tile(128, 64, 4, 2))
    return out, lse[:, :, places_of(call.perm, case.q.shape[2])]


@pytest.mark.parametrize("D, tile", [(64, tiles.ALONE_64), (128, tiles.ALONE_128)])
def test_on_hopper_a_warpgroup_alone_attends_documents(D, tile):
    """And not two, as by other lists of such blocks."""
    x = torch.zeros(1, 2, 5000, D, dtype=torch.bfloat16)
    call = Case(x, x, x, [2500] * 2, [2500] * 2, None, Band(), "sage2-8b-rotated").call()
    seen = Visibility.of(call.attn_mask, call.band, call.perm.shape[0], 128, call.blocks)
    a = attention_call(
        *call[:3], None, seen, 0.1, NAMED["sage2-8b-rotated"], False, None, *call[-4:]
    )
    shape = a.shape(Gpu((9, 0), 132))
    for packed, expected in ((shape.packed, tile), (False, tiles.TWO)):
        found = select.tile_of_hopper(shape._replace(packed=packed), NAMED["sage2-8b-rotated"])
        assert found == expected


@in_interpreter
@seeds(300, always=4)
def test_kernels_attend_each_document_as_if_alone(seed):
    """And prepare it so."""
    case = drawn(seed, INTERPRETER, 200)
    assert_as_alone(by_kernels, case)
    call, r = case.call(), NAMED[case.recipe]
    gpu = Gpu((8, 9), 1)
    found = launch_prepare(run, gpu, *call[1:3], None, r, None, *call.keys_order)
    for s, (first, n_k, *_) in enumerate(call.spans[:-1].tolist()):
        if n_k:
            one = launch_prepare(run, gpu, *case.alone(s)[1:3], None, r)
            end = first + one.k.shape[2]
            here = (found.k[:, :, first:end], found.k_scale[:, :, first // 64 : end // 64],
                    found.k_mean[s : s + 1], found.v[..., first:end].view(torch.uint8),
                    found.v_scale[s : s + 1], found.v_mean[s : s + 1])  # fmt: skip
            expected = one._replace(v=one.v.view(torch.uint8)).tensors()
            assert all(map(torch.equal, here, expected)), (case[3:], s)


@pytest.mark.gpu
@seeds(100, always=40)
def test_a_gpu_attends_each_document_as_if_alone(seed, monkeypatch):
    """And much as the dense kernel does, whose tiles are others. At head_dim 64 the portable kernel
    attends all of them; else it would attend short documents and not what holds them."""
    monkeypatch.setattr(tiles, "LISTED_KEYS", math.inf)
    case = drawn(seed, GPU, 1500)
    assert_as_alone(by_op, case)
    (out, lse), begin = by_op(case), 0
    left, right, _ = case.band
    for s, n_q in enumerate(case.of_q):
        q, k, v, *_ = case.alone(s)
        band, here = Band(left, right, True), slice(begin, begin + n_q)
        if n_q and k.shape[2] and seen_keys(band, n_q, k.shape[2]) is None:
            dense = SdpaCall.of(q, k, v, 0.1, NAMED[case.recipe].encode(), band=band)
            expected, expected_lse = torch.ops.sage.sdpa(*dense)
            assert support.relative_l1(out[:, :, here], expected) < 0.06, (case[3:], s)
            torch.testing.assert_close(lse[:, :, here], expected_lse, rtol=1e-3, atol=1e-2)
        begin += n_q


@on_hopper
@seeds(40, always=20)
def test_the_hopper_kernel_attends_documents(seed, monkeypatch):
    launch, seen = select._hopper().launch, []
    monkeypatch.setattr(select._hopper(), "launch", lambda *x: seen.append(x) or launch(*x))
    monkeypatch.setattr(tiles, "LISTED_KEYS", 0)  # of short calls the other kernel is faster
    case = drawn(seed, GPU, 3000)._replace(recipe="sage2-8b-per-token")
    assert_as_alone(by_op, case)
    assert seen and all(x[0].documents is not None for x in seen)


@pytest.mark.gpu
def test_a_cuda_graph_replays_with_other_lengths():
    q, k, v = (x.bfloat16() for x in GPU.qkv(1, 4, 2, 3000, 3000, 128))
    case = Case(q, k, v, [1000, 0, 2000], [1000, 0, 2000], None, Band(None, 0), RECIPES[0])
    cu = torch.tensor([0, 1000, 1000, 3000], dtype=torch.int32, device="cuda")
    fixed = case.call()

    def call():
        perm, perm_k, spans, documents, counts, indices, shown = torch.ops.sage.documents(cu, 3000)
        return torch.ops.sage.sdpa(*fixed._replace(
            attn_mask=shown, perm=perm, perm_k=perm_k, spans=spans, documents=documents,
            kv_num_blocks=counts, kv_indices=indices,
        ))  # fmt: skip

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    for lengths in ([1000, 0, 2000], [129, 1, 2500], [3000, 0, 0]):
        case = case._replace(of_q=lengths, of_k=lengths)
        cu.copy_(torch.tensor([0, *itertools.accumulate(lengths)]))
        graph.replay()
        assert all(map(torch.equal, found, by_op(case)))


# -- what it is not for --

REFUSED = {
    "spans go with perm, perm_k, documents, and block lists": dict(perm_k=None),
    "perm, perm_k, documents, and block lists": dict(kv_num_blocks=None),
    "spans go without prepared, tail_block": dict(tail_block=64),
    "and packages for a CPU": dict(portable=True),
    "no kernel for packed documents but those": dict(recipe=NAMED["sage2-4b"].encode()),
    "an 8-bit v in one pass, got": dict(recipe=NAMED["sage1-per-token"].encode()),
    "spans go with perm": dict(perm=None),
    "perm_k must be .256. where perm has 256 places, got .128.": dict(
        perm_k=torch.zeros(128).int()
    ),
    "spans must be .2, 4. .*got .2, 2.": dict(spans=torch.zeros(2, 2).int()),
    "documents must be .4. .*got .2.": dict(documents=torch.zeros(2).int()),
    "with spans blocks must be of 128, got .128, 64.": dict(block_kv=64),
    "spans must be int32, got torch.int64": dict(spans=torch.zeros(2, 4).long()),
    "documents must be contiguous": dict(documents=torch.zeros(8).int()[::2]),
    "q must be of one batch, got .2": dict(q=torch.zeros(2, 2, 70, 16)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_has_no_documents_is_refused(message):
    case = Case(*support.qkv(1, 2, 2, 70, 70, 16), [70], [70], None, Band(), RECIPES[0])
    given = REFUSED[message]
    call = case.call()._replace(**given)
    if "q" in given:
        call = call._replace(k=given["q"], v=given["q"])
    with pytest.raises((ValueError, TypeError), match=message):
        check(call)


def test_what_torch_asks_of_ops_of_documents():
    case = drawn(1, INTERPRETER, 100, torch.float32)
    utilities = "test_schema", "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(torch.ops.sage.sdpa.default, tuple(case.call()), test_utils=utilities)
    cu = torch.tensor([0, 3, 70], dtype=torch.int32)
    for more in ((), (cu, 71), (cu, 71, cu[1:].contiguous())):
        torch.library.opcheck(torch.ops.sage.documents.default, (cu, 70, *more))
