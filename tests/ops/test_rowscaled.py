"""``sage::rowscaled``: its emulation against the laboratory's and exact gradients, the op, and (gpu)
its kernels. What it shares with ``sage::sagebwd``: test_training.py."""

import dataclasses
import functools
import heapq

import noted
import pytest
import support
import torch
import torch.nn.functional as F
from cubins import loops_over_keys, spilled
from noted import LENGTHS, SPLIT
from pairs import pairs
from support import everywhere, gradients_of, relative_l1, relative_l2
from support import trained as inputs
from torch.testing import assert_close

from bench import gradients
from bench.laboratory import draw
from sage_inductor.ops import gpus, launch
from sage_inductor.ops.attention import tiles
from sage_inductor.ops.reference import rowscaled as reference
from sage_inductor.ops.reference import training as of_training
from sage_inductor.ops.reference.quantize import estimate, sample_rows
from sage_inductor.ops.reference.rowscaled import Kept, permute_tokens
from sage_inductor.ops.training import rowscaled

pytestmark = pytest.mark.usefixtures("poisoned")

hopper_of = functools.partial(noted.kernel, "_hopper_kernel")
ROWSCALED = torch.ops.sage.rowscaled
BACKWARD = torch.ops.sage.rowscaled_backward
FAMILIES = (
    "normal",
    "k4x6",
    "channel_bias",
    "k_bias",
    "biased_v",
    "token_outliers",
    "sinks",
    "real_like",
)


def attend(q, k, v, grad, is_causal=False, scale=0.125, out_bnhd=True):
    return gradients_of(ROWSCALED, q, k, v, grad, is_causal, scale, out_bnhd)


# The laboratory's recipes: with a scale a channel in the place of one a head, and q and k in 16 bits.
# Causal, with the op's scale of 64 rows of k everywhere; the op has one a row near the diagonal.
FP8_BACKWARD = gradients.ENTRIES["FP8 backward, dP INT8"]
FP8_BACKWARD_CAUSAL = dataclasses.replace(
    gradients.ENTRIES["FP8 backward, of earlier rows alone"],
    do_of_dp=FP8_BACKWARD.do_of_dp,
    v_of_dp=FP8_BACKWARD.v_of_dp,
    k=gradients.INT8(64),
)


@pairs(family=FAMILIES, kind=list(gradients.OUTPUTS), is_causal=[False, True])
def test_gradients_are_as_near_as_the_laboratorys(family, kind, is_causal):
    q, k, v = draw(family, 0, 2, 512, 64)
    grad = gradients.draw_do(kind, 0, 2, 512, 64)
    found = attend(q, k, v, grad, is_causal)
    expected = gradients.exact(q, k, v, grad, is_causal)
    as_float = (x.float() for x in (q, k, v, grad))
    laboratory = gradients.gradients(
        *as_float, FP8_BACKWARD_CAUSAL if is_causal else FP8_BACKWARD, is_causal
    )
    for x, y, z in zip(found[1:], laboratory[1:], expected[1:], strict=True):
        assert relative_l1(x, z) < 1.1 * relative_l1(y, z) + 0.008
    assert 1e-3 < relative_l1(found[1], expected[1])


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_strong_channel_of_k_costs_little(is_causal):
    """Because q and k are rotated: without it o errs by 9 to 14 % and the gradients by 16 to 50."""
    q, k, v = draw("k1x60", 0, 2, 512, 64)
    grad = gradients.draw_do("varied", 0, 2, 512, 64)
    found, expected = attend(q, k, v, grad, is_causal), gradients.exact(q, k, v, grad, is_causal)
    for x, y, most in zip(found, expected, (0.03, 0.18, 0.07, 0.06), strict=True):
        assert relative_l1(x, y) < most


def test_what_is_kept_for_the_backward():
    q, k, v, _ = inputs(2, 4, 2, 70, 130, 64, torch.float32)
    out, *kept = ROWSCALED(q, k, v, False, 0.125, False)
    kept = Kept(*kept)
    k = k - estimate(k, shrink=False)[0][:, :, None]
    out_exact, lse = support.exactly(q, k, v, False, 0.125)
    assert relative_l1(out, out_exact) < 0.03
    assert_close(kept.stats[0], lse.float(), rtol=0.01, atol=0.05)
    scores = 0.125 * q @ k.repeat_interleave(2, 1).mT
    assert_close(kept.stats[1], scores.amax(3) / torch.tensor(2.0).log(), rtol=0.02, atol=0.2)
    rows = kept.v.float() * kept.v_scale[..., None] + kept.v_mean[:, :, None]
    assert_close(rows[:, :, :130], v, rtol=0, atol=0.05)
    bytes_kept = sum(x.numel() * x.element_size() for x in kept[1:])
    assert bytes_kept < 1.1 * (kept.q.numel() + 2 * kept.k.numel())


@pytest.mark.parametrize("N_q, N_kv", [(70, 300), (300, 70), (1, 200), (200, 1), (1, 1)])
def test_queries_and_keys_of_different_lengths(N_q, N_kv):
    q, k, v, grad = inputs(1, 2, 2, N_q, N_kv, 64)
    found, expected = attend(q, k, v, grad), gradients.exact(q, k, v, grad)
    for x, y in zip(found, expected, strict=True):
        if N_kv == 1 and x is not found[0] and x is not found[3]:  # of one key dS is 0
            assert x.abs().max() < 0.05
        else:
            assert relative_l1(x, y) < 0.1


def test_a_scale_is_honoured():
    q, k, v, grad = inputs(1, 2, 2, 100, 130, 48, torch.float32)
    for scale in (0.02, 0.3):
        q_, k_, v_ = (x.double().requires_grad_() for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q_, k_, v_, scale=scale)
        expected = torch.autograd.grad(out, (q_, k_, v_), grad.double())
        for x, y in zip(attend(q, k, v, grad, False, scale)[1:], expected, strict=True):
            assert relative_l1(x, y) < 0.12


def test_what_is_refused():
    """Beside what test_training.py has of both ops."""
    q, k, v, _ = inputs(1, 2, 2, 100, 101, 64)
    for scale in (0.0, -0.1):
        with pytest.raises(ValueError, match=f"scale must be more than 0, got {scale}"):
            ROWSCALED(q, k, v, False, scale, False)
    with pytest.raises(ValueError, match="causal, q and k must have as many rows, got 100 and 101"):
        ROWSCALED(q, k, v, True, 0.1, False)


# Rows, and those that stay: within a tile of the first rows; after blocks of keys that share a
# scale, of whose own block the rest changes; at the last row of one, whose rest is none.
@everywhere
@pytest.mark.parametrize(
    "N, n", [(200, 150), (700, 650), pytest.param(1300, 1210, marks=pytest.mark.sweep), (700, 448)]
)
def test_nothing_of_later_rows_is_in_earlier_ones(N, n, device):
    """The first n rows when those after change: theirs are the same bits; dK and dV where no later
    row has a gradient."""
    q, k, v, grad = inputs(1, 2, 1, N, N, 64, device=device)
    later = [x.clone() for x in (q, k, v, grad)]
    for x, factor in zip(later, (-3, 50, 20, 1000), strict=True):
        x[:, :, n:] *= factor
    here, there = attend(q, k, v, grad, True), attend(*later, True)
    for i, (x, y) in enumerate(zip(here, there, strict=True)):
        assert torch.equal(x[:, :, n:], y[:, :, n:]) is False
        assert i > 1 or torch.equal(x[:, :, :n], y[:, :, :n])
    grad[:, :, n:], later[3][:, :, n:] = 0, 0
    here, there = attend(q, k, v, grad, True), attend(*later, True)
    for x, y in zip(here, there, strict=True):
        assert torch.equal(x[:, :, :n], y[:, :, :n]) and x[:, :, :n].any()


def test_tokens_are_permuted_as_accumulators_hold_them():
    x = permute_tokens(torch.arange(32))
    for t in range(4):
        for h in range(2):
            for e in range(2):
                assert x[4 * t + 2 * h + e] == 8 * h + 2 * t + e
                assert x[16 + 4 * t + 2 * h + e] == 16 + 8 * h + 2 * t + e


@pytest.mark.sweep
@pytest.mark.parametrize(
    "D, is_causal, lengths",
    [(64, False, LENGTHS), (128, False, SPLIT), (64, True, LENGTHS), (128, True, LENGTHS)],
)
def test_loops_of_the_forward_are_those_of_inference(D, is_causal, lengths):
    """They spill no more for keeping maxima; causal, before a tile's own rows."""
    right = 0 if is_causal else None
    plain, own = (
        loops_over_keys(compiled.asm["cubin"])
        for compiled in (
            hopper_of(
                noted.hopper, (9, 0), tiles.THREE, "16bit", D=D, right=right, lengths=lengths
            ),
            hopper_of(noted.rowscaled, (9, 0), D, is_causal, lengths=lengths),
        )
    )
    assert len(own) == len(plain) > 0
    if is_causal:
        assert len(plain) == 6  # whole blocks and others, three times
        for x, y in zip(own[::2], plain[::2], strict=True):
            assert spilled(x) <= spilled(y) and abs(len(x) - len(y)) <= 8
    else:
        assert sum(map(spilled, own)) <= sum(map(spilled, plain))


@pytest.fixture
def plan():
    """What launches on an H200."""
    with noted.here((9, 0)):
        yield pytest.importorskip("sage_inductor.ops.training.hopper.launches")


class Recorded(list):
    """In the place of what launches: the kernel's name, the grid, its arguments and options, of
    each."""

    def __call__(self, kernel, grid, tensors, numbers, **options):
        of = dict(zip(kernel.arg_names, (*tensors, *numbers), strict=True))
        self.append((kernel.__name__, grid, of | options))


def test_what_a_training_step_launches(plan):
    """In this order: dK's and dV's kernel, which may begin before dQ's has ended, is right behind."""
    q, k, v, grad = inputs(2, 6, 2, 200, 333, 72)
    of_k, run = of_training.quantize(k), Recorded()
    out, stats = plan.launch_forward(q, *of_k, *of_k, v, False, 0.1, True, run, q.device)
    assert stats.shape == (2, 2, 6, 200) and out.shape == q.shape
    assert [name for name, *_ in run] == ["_hopper_kernel"]
    _, kept = reference.forward(q, k, v, False, 0.1)
    gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    plan.launch_backward(grad, q, kept, 0.1, *gradients, run := Recorded())
    names, grids, given = zip(*run, strict=True)
    assert names == ("_rows_kernel", "_bounds_kernel", "_turn_kernel", "dq_kernel", "dkdv_kernel")
    blocks = 2 * 6 * 256 // 64 + 2 * 2 * 384 // 64
    assert grids == ((blocks,), (4, 1), (2 * 6 + 2 * 2,), (2 * 6 * 2,), (2 * 2 * 3,))
    assert given[3]["PDL"] == given[4]["PDL"] == launch.HAS_PDL
    assert given[0]["V_mean"].shape == (2, 2, 72)
    pdl = [each.get("launch_pdl", False) for each in given]
    assert pdl == [False, False, False, False, launch.HAS_PDL]
    for of in given[3:]:  # not causal: not read, and no descriptor is made
        assert {x for name, x in of.items() if "own" in name} == {None}
    assert given[4]["Part"].numel() == 2 * 2 * 3 * 128 * 128
    of_dq, of_dkdv = {"H_q": 6, "H_kv": 2, "N2_q": 400, "Q_pad": 256, "K_pad": 384}, {"H_kv": 2}
    of_dkdv |= {"N2_kv": 2 * 333, "Q_rows": 3 * 256, "K_pad": 384, "last": 1}
    assert given[3].items() >= of_dq.items() and given[4].items() >= of_dkdv.items()


@pytest.mark.parametrize("is_causal", [False, True])
def test_what_the_forward_is_prepared_by(is_causal, plan):
    q, k, v, _ = inputs(2, 6, 2, 200, 200 if is_causal else 333, 72)
    out, *kept = plan.launch(run := Recorded(), q.device, q, k, v, is_causal, 0.1, True)
    kept = Kept(*kept)
    names, _, given = zip(*run, strict=True)
    estimate = () if is_causal else ("_estimate_kernel",)
    assert names == (*estimate, *["_quantize_kernel"] * 3, "_hopper_kernel")
    *of_means, of_q, of_k, of_v, attend = given
    of_kept = {"q": (of_q, False, 1, q), "k": (of_k, not is_causal, 64, k),
               "v": (of_v, not is_causal, 1, v)}  # fmt: skip
    for name, (of, smooths, shared, x) in of_kept.items():
        assert of["Codes"] is getattr(kept, name) and of["Scale"] is getattr(kept, f"{name}_scale")
        assert of["X"] is x and (of["SMOOTH"], of["SHARED"]) == (smooths, shared)
        assert of["TWICE"] == (name == "k" and is_causal)
        assert of["ROTATED"] == {"q": 1.0, "k": 0.5, "v": 0.0}[name]
        if smooths:
            assert of["Mean"] is of_means[0]["Mean0" if name == "k" else "Mean1"]
    if is_causal:
        assert kept.v_mean.shape == (2, 2, 0)
    else:
        assert of_means[0]["X0"] is k and of_means[0]["X1"] is v and of_means[0]["TWO"]
        assert not of_means[0]["SHRINK"]
        assert of_means[0]["Mean1"] is kept.v_mean
    assert attend["K"].base is kept.k and attend["K_scale"].data_ptr() == kept.k_scale.data_ptr()
    assert attend["OWN"] == is_causal
    if is_causal:
        assert of_k["Own"] is attend["K_own"].base is kept.k_own
        assert of_k["Own_scale"] is attend["K_own_scale"].base is kept.k_own_scale
    assert kept.k_own.shape == (2, 2, 256 if is_causal else 0, 128)
    assert kept.k_own_scale.shape == kept.k_own.shape[:3]
    assert attend["Out"] is out and attend["Lse"] is kept.stats


@pytest.mark.parametrize("out_bnhd", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_what_is_launched_gives_tensors_as_the_fakes_do(is_causal, out_bnhd):
    pytest.importorskip("sage_inductor.ops.training.hopper.launches")
    lengths = 200, 200 if is_causal else 333
    q, k, v, grad = (x.to("meta") for x in inputs(2, 6, 2, *lengths, 72))
    last = 0.1, out_bnhd
    given, gpu = (q, k, v, is_causal, *last), (Recorded(), noted.H200)
    found, expected = rowscaled._launch(*gpu, *given), ROWSCALED(*given)
    given = grad, *expected, k.shape[2], *last
    found += rowscaled._launch_backward(*gpu, *given)
    for x, y in zip(found, expected + BACKWARD(*given), strict=True):
        assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)


def test_what_a_causal_training_step_launches(plan, monkeypatch):
    monkeypatch.setattr(plan, "LAST_TILES", 5)
    q, k, v, grad = inputs(2, 6, 2, 200, 200, 72)
    _, kept = reference.forward(q, k, v, True, 0.1)
    assert kept.is_causal and kept.k_own_scale.shape == (2, 2, 256) == kept.v_scale.shape
    assert kept.k_scale.shape == (2, 2, 4) and kept.v_mean.shape == (2, 2, 0)
    of_k, run = (kept.k, kept.k_scale, kept.k_own, kept.k_own_scale), Recorded()
    plan.launch_forward(q, *of_k, v, True, 0.1, True, run, q.device)
    plan.launch_backward(grad, q, kept, 0.1, *(torch.empty_like(x) for x in (q, k, v)), run)
    names, grids, (forward, rows, bounds, turn, dq, dkdv) = zip(*run, strict=True)
    assert names == (
        "_hopper_kernel", "_rows_kernel", "_bounds_kernel", "_turn_kernel", "dq_kernel",
        "dkdv_kernel",
    )  # fmt: skip
    band = [forward[name] for name in ("LEFT", "RIGHT", "BOTTOM_RIGHT")]
    assert forward["OWN"] and band == [-1, 0, False] and grids[2] == (4, 1)
    # By these tiles the emulation knows where k_own is read.
    assert (forward["WARPGROUPS"], forward["BLOCK_N"]) == (3, 128)
    assert all(each["CAUSAL"] for each in (rows, turn, dq, dkdv))
    assert dkdv["last"] == 3  # of two tiles each

    def same(x, y):
        x, y = (getattr(each, "base", each) for each in (x, y))
        return x.data_ptr() == y.data_ptr() and x.numel() == y.numel()

    assert same(dq["M"], bounds["M"]) and same(dq["Row_scale"], bounds["Row_scale"])
    assert same(dq["Delta"], rows["Delta"]) and not same(rows["Delta"], turn["Vectors"][2])
    assert same(dq["V_scale"], turn["V_of_dq"]) and same(dq["V_scale_own"], kept.v_scale)
    assert same(dkdv["V_scale"], turn["V_scaled"])
    assert same(dq["Kt"], turn["Kt"]) and same(dq["Kt_own"], turn["Kt_own"])
    for each in (forward, dq, dkdv):
        assert same(each["K"], kept.k) and same(each["K_own"], kept.k_own)
        assert same(each["K_scale"], kept.k_scale)
        assert same(each["K_own_scale"], kept.k_own_scale)
    assert same(turn["K"], kept.k) and same(turn["K_own"], kept.k_own)
    assert same(turn["Of_head"], bounds["Of_head"]) and same(turn["Beta"], bounds["Beta"])
    assert same(dkdv["Vectors"], turn["Vectors"])


@pytest.mark.parametrize(
    "heads, group, N",
    [
        (32, 1, 4096), (32, 1, 8192), (7, 1, 32768), (8, 4, 8192), (16, 6, 5000), (4, 8, 10000),
        (1, 1, 68000),
    ],
)  # fmt: skip
def test_causal_tiles_are_dealt_about_equally(heads, group, N, plan, monkeypatch):
    """Who is first done takes the next: dQ's tiles, then dK's and dV's."""
    from sage_inductor.ops.training.hopper import backward_kernels as kernel

    monkeypatch.setattr(kernel.gl, "where", lambda is_x, x, y: x if is_x else y)  # of ints

    def deal(heads: int, rows: int, last: int, down: bool) -> list[int]:
        tiles_of_head = -(-N // rows)
        programs = heads * tiles_of_head
        found = [kernel._tile.fn(n, programs, N, last, rows, down) for n in range(programs)]
        assert sorted(found) == [(h, rows * m) for h in range(heads) for m in range(tiles_of_head)]
        return [row for _, row in found]

    def busiest(last: int) -> float:
        done = [0.0] * 132
        for row in deal(group * heads, 192, 1, True):  # 64 keys by 192 queries
            heapq.heapreplace(done, done[0] + 1.2 * (row / 64 + 5))
        for row in deal(heads, 128, last, False):  # 64 queries by 128 keys
            heapq.heapreplace(done, done[0] + group * (N - row) / 64 + 2)
        return max(done) / (sum(done) / 132)

    last = min(heads, -(-plan.LAST_TILES // -(-N // 128)))
    assert busiest(last) <= min(1.05, 1.001 * busiest(1))


def test_rows_of_v_that_tma_cannot_read_are_copied(plan):
    for D, copied in ((72, False), (74, True)):
        q, k, v, _ = inputs(1, 2, 2, 200, 333, D)
        of_k = of_training.quantize(k)
        plan.launch_forward(q, *of_k, *of_k, v, False, 0.1, True, run := Recorded(), q.device)
        ((_, _, given),) = run
        assert given["V"].shape == [*v.shape]
        assert all(stride * 2 % 16 == 0 for stride in given["V"].strides[:3])
        assert (list(given["V"].strides[1:]) != list(v.stride()[1:])) == copied
    q, k, v, _ = inputs(1, 2, 2, 200, 333, 64)
    apart, of_k = v.mT.contiguous().mT, of_training.quantize(k)
    plan.launch_forward(q, *of_k, *of_k, apart, False, 0.1, True, run := Recorded(), q.device)
    ((_, _, given),) = run
    assert given["V"].strides[3] == 1 and given["V"].shape == [*apart.shape]


def test_another_gpu_is_refused(plan):
    q, k, v, _ = inputs(1, 2, 2, 200, 130, 64)
    with (
        noted.here((8, 9), 128),
        pytest.raises(ValueError, match="needs compute capability 9.0 .*got 8.9 and Triton"),
    ):
        plan.launch_forward(q, *of_training.quantize(k) * 2, v, False, 0.1, True, None, q.device)
    with pytest.raises(ValueError, match="got 8.9 and Triton"):
        rowscaled._launch(Recorded(), gpus.Gpu((8, 9), 128), q, k, v, False, 0.1, True)


def test_too_many_rows_are_refused(plan, monkeypatch):
    monkeypatch.setattr(plan, "MAX_ROWS", 2 * 256)
    q, k, v, grad = inputs(1, 2, 1, 200, 130, 64)
    _, kept = reference.forward(q, k, v, False, 0.1)
    with pytest.raises(ValueError, match="fewer than 512 rows in all heads.*got 512"):
        plan.launch_backward(grad, q, kept, 0.1, q, k, v, Recorded())


@everywhere
def test_gradients_are_finite_where_all_scores_are_far_below_zero(device):
    """Of k as it is, all scores of a row are below -128, and p of keys that only pad is infinite; so
    it is of k less a mean that is shrunk where the sample's rows differ as much as here."""
    q, k, v, grad = inputs(1, 4, 2, 150, 200, 64, torch.float16, device)
    k, q = k.mul(0.05).sub(8), q.mul(0.1).add(8)
    k[:, :, sample_rows(200, device)[5:7]] = -400
    grad[:, :, 3] = 0  # infinity times the 0 that dP less delta is here, were NaN
    assert (q.double() @ k.double().repeat_interleave(2, 1).mT * 0.125).max() < -200
    out, *gradients = attend(q, k, v, grad)
    for x in gradients:
        assert x.isfinite().all() and x.any()
    assert not gradients[0][:, :, 3].any()


@everywhere
@pytest.mark.parametrize("where", ["q", "grad"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_nan_reaches_the_gradients_that_it_reaches_in_exact_attention(where, is_causal, device):
    """dk and dv of the heads that share k and v, and dq of its own row alone."""
    given = dict(zip(("q", "k", "v", "grad"), inputs(1, 4, 2, 150, 150, 64, torch.float16, device)))
    given[where][0, 1, 70, 5] = torch.nan
    _, *found = attend(*given.values(), is_causal=is_causal)
    leaves = [x.detach().float().requires_grad_() for x in (given["q"], given["k"], given["v"])]
    out = F.scaled_dot_product_attention(*leaves, is_causal=is_causal, enable_gqa=True)
    for x, y in zip(found, torch.autograd.grad(out, leaves, given["grad"].float())):
        assert y.isnan().any() and y.isfinite().any()
        if x.shape[1] == 2:
            assert x[:, 0].isnan().any() and x[:, 1].isfinite().all()
        else:
            assert torch.equal(x.isnan(), y.isnan())


# -- the kernels ----

SHAPES = [  # B, H_q, H_kv, N_q, N_kv, D
    (2, 4, 2, 150, 130, 64), (1, 6, 1, 1000, 777, 128), (2, 2, 1, 300, 1100, 72),
    (1, 1, 1, 1, 1, 32), (1, 2, 2, 130, 63, 128), (1, 2, 2, 63, 200, 96),
    (1, 4, 4, 2048, 2048, 128), (1, 2, 2, 4160, 4160, 128), (1, 6, 1, 4160, 1000, 64),
    (3, 4, 2, 128, 256, 128), (1, 2, 2, 4160, 1, 128), (1, 2, 2, 100, 90, 77),
]  # fmt: skip
CAUSAL = [  # B, H_q, H_kv, N, D
    (2, 4, 2, 150, 64), (1, 6, 1, 1000, 128), (2, 2, 1, 300, 72), (1, 1, 1, 1, 32),
    (1, 2, 2, 64, 128), (1, 2, 2, 63, 96), (1, 4, 4, 2048, 128), (1, 3, 1, 4160, 128),
    (1, 6, 1, 4200, 64), (3, 4, 2, 128, 128), (1, 2, 2, 100, 77), (1, 2, 1, 193, 128),
]  # fmt: skip
CASES = [(shape, False) for shape in SHAPES]
CASES += [((*shape[:4], *shape[3:]), True) for shape in CAUSAL]


@pytest.mark.gpu
@pairs(case=CASES, dtype=[torch.float16, torch.bfloat16], out_bnhd=[False, True])
def test_the_kernels_are_their_emulation(case, dtype, out_bnhd):
    shape, is_causal = case
    from sage_inductor.ops.training.hopper.prepare import launch_prepare

    scale = 0.9 * shape[-1] ** -0.5
    q, k, v, grad = inputs(*shape, dtype, "cuda")
    out, *kept = ROWSCALED(q, k, v, is_causal, scale, out_bnhd)
    kept = Kept(*kept)
    _, expected = reference.forward(q, k, v, is_causal, scale)
    for name in ("q", "k", "k_own", "v") if is_causal else ("q", "k", "v"):
        codes, its = getattr(kept, name), getattr(expected, name)
        assert (codes.int() - its.int()).abs().max() <= 1 and (codes != its).float().mean() < 2e-3
    for name in ("q_scale", "k_scale", "k_own_scale", "v_scale", "v_mean"):
        assert_close(getattr(kept, name), getattr(expected, name), rtol=1e-4, atol=1e-5)
    # From what was kept: each step alone.
    exact_out, stats = reference.attend(q, v, kept, scale)
    assert relative_l2(out, exact_out) < 3e-3
    assert_close(kept.stats, stats, rtol=1e-4, atol=1e-3)
    operands = reference.prepare(grad, out, kept, scale)
    support.same_operands(launch_prepare(grad, out, kept, scale, launch.run), operands)
    found = BACKWARD(grad, out, *kept, k.shape[2], scale, out_bnhd)
    emulated = reference.backward(grad, out, kept, k.shape[2], scale)
    for x, y, its in zip(found, emulated, (q, k, v), strict=True):
        assert x.shape == its.shape and x.dtype == dtype
        assert (x.transpose(1, 2) if out_bnhd else x).is_contiguous()
        if k.shape[2] == 1 and its is not v:  # of one key dS is what o was rounded by
            assert x.abs().max() < 0.5
        else:  # 13 bits of accumulation
            assert relative_l1(x, y) < 0.012
    again = BACKWARD(grad, out, *kept, k.shape[2], scale, out_bnhd)
    assert all(torch.equal(x, y) for x, y in zip(found, again, strict=True))


@pytest.mark.gpu
def test_strided_inputs_on_a_gpu():
    """Views of one projection, and cotangents of any strides. Sums over a row are not in one order
    for all strides: a code may differ."""
    qkv = torch.randn(2, 300, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    for grad in (
        torch.ones((), dtype=q.dtype, device="cuda").expand(q.shape),
        torch.randn(2, 4, 64, 300, device="cuda").to(q.dtype).mT,
        torch.randn(2, 4, 300, 128, device="cuda").to(q.dtype)[..., ::2],
    ):
        expected = attend(*(x.contiguous() for x in (q, k, v, grad)))
        odd = (x.mT.contiguous().mT for x in (q, k, v))  # channels apart
        for found in (attend(q, k, v, grad), attend(*odd, grad)):
            for x, y in zip(found, expected, strict=True):
                assert relative_l2(x, y) < 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_batch_is_computed_as_its_parts(is_causal):
    """To the bit, where heads have their neighbours' rows beside them."""
    q, k, v, grad = inputs(3, 4, 2, 200, 200 if is_causal else 333, 64, device="cuda")
    whole = attend(q, k, v, grad, is_causal)
    for b in range(3):
        part = attend(*(x[b : b + 1] for x in (q, k, v, grad)), is_causal)
        for x, y in zip(whole, part, strict=True):
            assert torch.equal(x[b], y[0])


@pytest.mark.gpu
def test_who_computes_a_tile_changes_nothing(monkeypatch):
    """To the bit: of five heads of six tiles of keys, the last 5, 3, 2, 1 in turn."""
    from sage_inductor.ops.training.hopper import launches as plan

    given = inputs(1, 10, 5, 700, 700, 64, device="cuda")
    expected = attend(*given, True)
    for tiles_in_turn in (18, 12, 1):
        monkeypatch.setattr(plan, "LAST_TILES", tiles_in_turn)
        for x, y in zip(attend(*given, True), expected, strict=True):
            assert torch.equal(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("bnhd", [False, True])
def test_nothing_is_written_beside_the_gradients(bnhd):
    """Of outputs that are parts of others, with a head, rows and channels more."""
    from sage_inductor.ops.training.hopper import launches as plan

    q, k, v, grad = inputs(2, 4, 2, 200, 333, 72, device="cuda")
    out, *kept = ROWSCALED(q, k, v, False, 0.1, False)
    wholes, parts = [], []
    for B, H, N, D in (q.shape, k.shape, k.shape):
        shape = (B, N + 1, H + 1, D + 8) if bnhd else (B, H + 1, N + 1, D + 8)
        wholes.append(q.new_full(shape, float("nan")))
        whole = wholes[-1].transpose(1, 2) if bnhd else wholes[-1]
        parts.append(whole[:, :H, :N, :D])
    plan.launch_backward(grad, out, Kept(*kept), 0.1, *parts, launch.run)
    expected = BACKWARD(grad, out, *kept, 333, 0.1, False)
    for part, whole, x in zip(parts, wholes, expected, strict=True):
        assert torch.equal(part, x)
        assert whole.isnan().sum() == whole.numel() - part.numel()
