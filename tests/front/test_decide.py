"""What becomes of a call, on tensors of a GPU that is not there: predicted times, policies, and
the clock of max-autotune."""

import contextlib
import itertools
import re
from pathlib import Path
from unittest import mock
from unittest.mock import Mock

import pytest
import support
import torch
import torch.nn.attention as torchs
import torch.nn.functional as F
import triton
from pairs import chosen
from support import placeholders, relative_l1, valued
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from sage_inductor import Policy, diagnose, names, options, patterns
from sage_inductor.choose import cost, families, tables, timing
from sage_inductor.choose.candidates import recipes_of
from sage_inductor.choose.decide import decide as decide_call
from sage_inductor.choose.decide import rewrite
from sage_inductor.choose.families import Family, Table
from sage_inductor.ops import gpus
from sage_inductor.ops import recipe as recipes
from sage_inductor.ops.sparse.selector import Selection
from sage_inductor.ops.visibility import Band, BlockLists
from sage_inductor.options import Settings
from sage_inductor.patterns import eligible
from sage_inductor.patterns.call import Call
from sage_inductor.patterns.graph import Emitter, GraphIndex
from sage_inductor.policy import Rule

MASKS = {
    "window": lambda B, N: torch.empty(N, N, dtype=torch.bool, device="cuda"),
    "keys": lambda B, N: torch.empty(B, 1, 1, N, dtype=torch.bool, device="cuda"),
    "mask": lambda B, N: torch.empty(B, 1, N, N, dtype=torch.bool, device="cuda"),
    "bias": lambda B, N: torch.empty(N, N, dtype=torch.bfloat16, device="cuda"),
}


KEEPING = Rule("sage2-8b-rotated", keep=Selection(0.3))
AUTO_FROM_8192 = (Rule("sage1", head_dim=(64,)), Rule("auto", length=(8192, None)))


def gpu(capability):
    """Of capability (9, 0) the H200, which the built-in table knows."""
    name = tables.H200 if capability == (9, 0) else f"NVIDIA Test {capability}"
    return support.on_gpu(capability, name)


def decide(
    shape, kind="full", capability=(9, 0), requires_grad=False, D_v=None, shape_env=None, band=None,
    N_kv=None, shared=False, dtype=torch.bfloat16, **settings,
):  # fmt: skip
    """shared: k and v are of one batch, which the graph expands."""
    graph = torch.fx.Graph()
    with FakeTensorMode(shape_env=shape_env):
        B, H_q, H_kv, N, D = shape
        values = [
            torch.empty(b, n, H, d, device="cuda", dtype=dtype).transpose(1, 2)
            for b, H, n, d in (
                (B, H_q, N, D),
                (1 if shared else B, H_kv, N_kv or N, D),
                (1 if shared else B, H_kv, N_kv or N, D_v or D),
                (B, H_q, N, D_v or D),
            )
        ]
        out = values.pop().requires_grad_(requires_grad)
        if kind in MASKS:
            values.append(MASKS[kind](B, N))
    nodes = placeholders(graph, values)
    if shared:
        emit = Emitter(graph.call_function(torch.neg, (nodes[0],)), GraphIndex(graph))
        size = emit.size(nodes[0], 0), -1, -1, -1
        nodes[1:3] = (emit(torch.ops.aten.expand.default, x, size) for x in nodes[1:3])
    given = {"is_causal": kind == "causal", "enable_gqa": True}
    call = graph.call_function(F.scaled_dot_product_attention, tuple(nodes), given)
    graph.output(valued(call, out))
    # A window is as if its mask had been made of aranges.
    windows = mock.patch.object(patterns, "prove", lambda *args: (band or Band(1023, 0), None))
    with gpu(capability), windows if kind == "window" else contextlib.nullcontext():
        (site,) = rewrite(torch.fx.GraphModule({}, graph), Settings(**settings))
    return site


LAUNCH, KEYS = 0.05, 1e-5  # ms, and ms a key that a processor's tiles of 128 rows see


def table(*kinds, recipes=("sage2-8b-rotated",), D=128, gpu_name=tables.H200):
    """SDPA takes as long as keys are seen, a recipe half of that and a launch more."""
    measured = {}
    for kind in kinds or ("full",):
        family = Family(D, D, kind)
        measured[family] = {}
        for sizes in family.sizes(timing.MANY):
            seen = sizes if kind in families.SEES_A_BAND else sizes._replace(left=None, right=None)
            sdpa = KEYS * cost.features(seen, 128, cost.IN_ORDER, 132).keys
            ours = LAUNCH + KEYS / 2 * cost.features(sizes, 128, cost.IN_ORDER, 132).keys
            times = {"CUDNN_ATTENTION": sdpa, "FLASH_ATTENTION": 2 * sdpa}
            measured[family][sizes] = times | dict.fromkeys(recipes, ours)
    return Table(gpu_name, gpus.Gpu((9, 0), 132), measured)


def known(monkeypatch, *given):
    """These tables, and nothing else."""
    monkeypatch.setattr(
        tables, "known", lambda gpu: tuple(each for each in given if each.gpu == gpu)
    )


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("kind", ["full", "causal", "window"])
def test_a_call_is_rewritten_where_the_fit_says_that_it_is_faster(kind, portable, monkeypatch):
    """A window SDPA computes with a mask, every key of it."""
    known(monkeypatch, table("full", "causal", "window"))
    for N in (1024, 2000, 4096, 5000, 16384):
        site = decide((2, 8, 8, N, 128), kind, portable=portable)
        first = {"full": N, "causal": N, "window": 1023}[kind]
        seen = [  # whole blocks of 128 keys
            -(-N // 128) if kind == "full" else row + 1 - max(0, 128 * row - first) // 128
            for row in range(-(-N // 128))
        ]
        ours = KEYS * 16 * 128 * sum(seen) / 132
        sdpa = KEYS * 16 * 128 * len(seen) ** 2 / 132 if kind == "window" else ours
        expected = sdpa / (LAUNCH + ours / 2)
        assert f"{expected:.2f}x SDPA by the cost model" in site.reason
        assert site.rewritten == (expected >= cost.MIN_SPEEDUP), site.reason


@pytest.mark.parametrize(
    "shape, dtype, reason",
    [
        ((), torch.bool, "broadcast"), ((299,), torch.bool, "broadcast"),
        ((1, 2, 4, 300, 300), torch.bool, "broadcast"), ((1, 1, 1, 1, 1), torch.bool, "broadcast"),
        ((299, 300), torch.bool, "broadcast"), ((300, 299), torch.bool, "broadcast"),
        ((2, 300, 300), torch.bool, "broadcast"), ((3, 1, 1, 300), torch.bool, "broadcast"),
        ((300, 300), torch.int32, "be bool or floating, got torch.int32"),
        ((300, 300), torch.float64, "be bool or floating, got torch.float64"),
        ((300,), torch.bool, ""), ((1, 1), torch.bool, ""), ((1, 300), torch.bool, ""), ((300, 1), torch.bool, ""),
        ((4, 1, 300), torch.float32, ""), ((2, 4, 300, 300), torch.float16, ""),
    ],
)  # fmt: skip
def test_a_mask_that_does_not_broadcast_or_has_another_dtype_is_refused(
    shape, dtype, reason, monkeypatch
):
    """On a GPU, where SDPA's math may take what it refuses on a CPU."""
    mask = lambda B, N: torch.empty(shape, dtype=dtype, device="cuda")  # noqa: E731
    monkeypatch.setitem(MASKS, "other", mask)
    site = decide((2, 4, 4, 300, 64), "other", force=True)
    assert site.rewritten == (not reason), site.reason
    assert site.rewritten or f"attn_mask must {reason}" in site.reason


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_a_mask_on_another_device_is_refused(device, monkeypatch):
    monkeypatch.setitem(MASKS, "there", lambda B, N: torch.empty(N, N, device=device))
    reason = decide((2, 4, 4, 300, 64), "there", force=True).reason
    assert reason.startswith("the device must be cuda (or cpu, emulated), got ")
    assert device in reason


@pytest.mark.parametrize("ms, recipe", [(0.95, "sage2-8b-rotated"), (0.85, "sage2-8b")])
def test_another_recipe_than_the_first_is_faster_by_its_fits_error(ms, recipe, monkeypatch):
    known(monkeypatch, table(recipes=("sage2-8b-rotated", "sage2-8b")))
    ours = {"sage2-8b-rotated": 1.0, "sage2-8b": ms}

    def predict(_, family, name, *given):
        return cost.Prediction(name, ours[name], 2.0, 0.1)

    monkeypatch.setattr(families.Table, "predict", predict)
    site = decide((2, 32, 32, 4096, 128))
    assert site.recipe == recipe, site.reason


def said(site) -> float:
    """ms of the recipe, by the reason."""
    return float(re.search(r"x SDPA by the cost model \(([\d.e-]+) and", site.reason)[1])


def test_the_heads_of_k_and_v_are_counted(monkeypatch):
    """What is prepared once for several heads of q."""
    of_kv = table()
    (times,) = of_kv.families.values()
    for sizes, ms in times.items():
        ms["sage2-8b-rotated"] += 1e-3 * cost.features(sizes, 128, cost.IN_ORDER, 132).prepared
    known(monkeypatch, of_kv)
    for H_kv in (32, 8, 1):
        site = decide((1, 32, H_kv, 4096, 128))
        ours = LAUNCH + (KEYS / 2 * 32 * 32 * 4096 + 1e-3 * H_kv * 4096) / 132
        assert said(site) == pytest.approx(ours, rel=0.02)


@pytest.mark.parametrize("bottom_right", [False, True])
@pytest.mark.parametrize("left", [None, 1023])
def test_a_band_of_other_keys_than_queries_is_predicted_by_what_it_shows(
    left, bottom_right, monkeypatch
):
    N_q, N_kv = 2048, 8192
    known(monkeypatch, table("causal", "window"))
    band = Band(left, 0, bottom_right)
    site = decide((4, 32, 32, N_q, 128), "window", band=band, N_kv=N_kv)
    seen = support.band_mask(band, N_q, N_kv)
    keys = sum(int(tile.any(0).sum()) for tile in seen.split(128))
    assert said(site) == pytest.approx(LAUNCH + KEYS / 2 * 128 * keys / 132, rel=0.02)


def dynamic(**hints) -> tuple:
    """A ShapeEnv, and a size of it for each hint."""
    env, sizes = ShapeEnv(), []
    for name, hint in hints.items():
        source = ConstantSource(name)
        symbol = env.create_symbol(hint, source, DimDynamic.DYNAMIC)
        sizes.append(env.create_symintnode(symbol, hint=hint, source=source))
    return env, *sizes


def test_only_lengths_that_are_dynamic_are_guarded(monkeypatch):
    """Where there are always 4096 keys, more queries are needed than in self-attention."""
    known(monkeypatch, table())

    def wins(N_q):
        sdpa = KEYS * 4 * -(-N_q // 128) * 4096 / 132
        return cost.Prediction("sage1", LAUNCH + sdpa / 2, sdpa, 0.0).wins

    first = cost.first_length(wins)
    assert first > table().first_length(Family(128, 128, "full"), "sage2-8b-rotated", 4)
    shape_env, N = dynamic(N=2 * first)
    site = decide((1, 4, 4, N, 128), shape_env=shape_env, N_kv=4096)
    assert site.reason.startswith(f"N >= {first}, "), site.reason
    for shape, N_kv in (((1, 64, 64, N, 128), 1), ((1, 64, 64, 1, 128), N)):
        site = decide(shape, shape_env=shape_env, N_kv=N_kv)
        assert site.reason == "no known gain: a call with fewer than 256 queries or keys"


def test_both_dynamic_lengths_must_reach_where_the_recipe_begins_to_win(monkeypatch):
    known(monkeypatch, table())
    first = table().first_length(Family(128, 128, "full"), "sage2-8b-rotated", 16)
    for hints in ((16384, first - 1), (first - 1, 16384), (first, first)):
        shape_env, N_q, N_kv = dynamic(q=hints[0], k=hints[1])
        site = decide((2, 8, 8, N_q, 128), shape_env=shape_env, N_kv=N_kv)
        assert site.rewritten == (hints == (first, first)), site.reason


def test_a_package_is_predicted_by_its_examples_batch(monkeypatch):
    known(monkeypatch, table())
    shape_env, B = dynamic(B=11)
    site = decide((B, 8, 8, 4096, 128), shape_env=shape_env, portable=True)
    assert site.reason == decide((11, 8, 8, 4096, 128)).reason
    assert not [guard for guard in shape_env.guards if "8" in str(guard.expr)]


@pytest.mark.parametrize("portable", [False, True])
def test_a_dynamic_length_is_guarded_where_the_recipe_begins_to_win(portable, monkeypatch):
    known(monkeypatch, table())
    first = table().first_length(Family(128, 128, "full"), "sage2-8b-rotated", 16)
    assert 1024 < first < 16384
    for hint, rewritten, reason in (
        (16384, True, rf"^N >= {first}, 1\.\d\dx SDPA by the cost model \(.* ms\) at N=16384$"),
        (1536, False, rf"wins from N={first} \(sage.force=True overrides\)$"),
    ):
        shape_env, N = dynamic(N=hint)
        site = decide((2, 8, 8, N, 128), shape_env=shape_env, portable=portable)
        assert site.rewritten == rewritten
        guards = [str(guard.expr) for guard in shape_env.guards]
        if portable:
            assert not any(str(first) in guard for guard in guards)
            assert "x SDPA by the cost model" in site.reason
        else:
            assert re.search(reason, site.reason), site.reason
            assert (site.decision.times is not None) == rewritten
            assert any(str(first) in guard for guard in guards), guards


@pytest.mark.parametrize("first", [8, 11])
def test_more_batches_than_the_power_of_2_of_the_first_ones_need_no_other_graph(first, monkeypatch):
    known(monkeypatch, table())
    shape_env, B = dynamic(B=first)
    site = decide((B, 8, 8, 4096, 128), shape_env=shape_env)
    of_8 = decide((8, 8, 8, 4096, 128))
    assert site.rewritten and site.reason == of_8.reason
    assert [str(guard.expr) for guard in shape_env.guards if "8" in str(guard.expr)]


@pytest.mark.parametrize(
    "reason, given",
    [
        ("q, k and v are fp32", {"dtype": torch.float32}),
        ("training", {"requires_grad": True, "training": "off"}),
        ("the policy says off", {"policy": (Rule("off", head_dim=()),)}),
        ("wins from N=", {}),
        ("SDPA is faster", {"benchmark": lambda case: dict.fromkeys(case.candidates, 2.0) | {"MATH": 1.0}}),
    ],
)  # fmt: skip
def test_a_call_that_stays_whatever_its_sizes_guards_none_of_them(reason, given, monkeypatch):
    """But the length from which it would be rewritten."""
    known(monkeypatch, table())
    shape_env, B, H, N, D = dynamic(B=2, H=8, N=300, D=128)
    site = decide((B, H, H, N, D), shape_env=shape_env, **given)
    assert not site.rewritten and reason in site.reason, site.reason
    guards = [str(guard.expr) for guard in shape_env.guards]
    assert len(guards) == ("wins" in reason), guards


def test_shared_k_and_v_are_prepared_once_in_the_prediction_too(monkeypatch):
    """Where preparation decides: k and v of 8 batches cost more than attention saves."""
    with_preparation = table()
    (times,) = with_preparation.families.values()
    for sizes, ms in times.items():
        rows = cost.features(sizes, 128, cost.IN_ORDER, 132).prepared
        ms["sage2-8b-rotated"] = 0.5 * ms["CUDNN_ATTENTION"] + 3e-4 * rows
    known(monkeypatch, with_preparation)
    shape = (8, 16, 16, 2048, 128)
    apart = decide(shape)
    assert not apart.rewritten and "0." in apart.reason, apart.reason
    site = decide(shape, shared=True)
    assert site.rewritten and site.q == (8, 16, 2048, 128) and site.k == (8, 16, 2048, 128)
    assert site.reason.endswith("; all batches share k and v, which are prepared once")
    sdpa = re.compile(r"and (\S+) ms")
    assert sdpa.search(site.reason)[1] == sdpa.search(apart.reason)[1]
    # Whose scales would be shared by queries of two batches is predicted, and computed, as apart.
    of_blocks = (8, 16, 16, 2048 + 16, 128)
    asked = {"recipe": "sage2-8b", "force": True, "shared": True}
    assert "share" in decide(shape, **asked).reason
    assert "share" not in decide(of_blocks, **asked).reason


def test_shared_k_and_v_are_timed_as_such():
    clock = Clock(sage2_8b=0.5, sage2_8b_rotated=0.7)
    assert decide((4, 4, 2, 64, 128), benchmark=clock, shared=True).rewritten
    case = clock.cases[0]
    assert case.shape[2:5] == ((4, 4, 64, 128), (1, 2, 64, 128), (1, 2, 64, 128))  # q, k, v
    here = case._replace(shape=case.shape._replace(device=torch.device("cpu")), rivals=("MATH",))
    sdpa, *ours = (call() for call in timing.calls_of(here).values())
    assert len(ours) == len(case.candidates) and sdpa.shape == case.shape.q
    for out in ours:
        assert out.shape == (1, 4, 256, 128)
        out = out.transpose(1, 2).unflatten(1, (4, 64))[0].transpose(1, 2)
        assert relative_l1(out, sdpa) < 0.1
    # Where one of the recipes would have another graph, all are timed apart.
    decide((4, 4, 2, 63, 128), benchmark=clock, shared=True)
    assert clock.cases[-1].shape.k == (4, 2, 63, 128)


FARTHEST = cost.Sizes(1, 1, 1, 320, 78097)  # two tiles that are shared by all processors: 37 %


# Of each kind of calls one family always: what is wrong with a fit is wrong with all of a kind.
@chosen(
    lambda gpu, family: (
        family.head_dim == 64
        and (gpu == tables.H200) == (family.kind in ("full", "window", "full-training"))
    ),
    gpu=list(tables.built_in()), family=list(tables.built_in()[tables.H200].families),
)  # fmt: skip
def test_the_built_in_table_says_what_it_measured(gpu, family):
    """Each fit is near the times that it was made of: nearest of the recipe that "auto" mostly
    takes."""
    built_in = tables.built_in()[gpu]
    assert built_in.families.keys() == tables.built_in()[tables.H200].families.keys()
    times = built_in.families[family]
    assert len(times) >= cost.ENOUGH, family
    assert family.kind != "window" or all(0 < each.left < each.N_q - 1 for each in times)
    for recipe in {name for ms in times.values() for name in ms} - {*families.OF_SDPA}:
        first = recipe in recipes_of((9, 0), family)[:1]
        error = built_in.error(family, recipe)
        assert error < (0.07 if first else 0.1), (recipe, error)
        for sizes, ms in times.items():
            if recipe in ms:
                found = built_in.predict(family, recipe, sizes)
                wrong = abs(found.ours / ms[recipe] - 1)
                near = 0.4 if sizes == FARTHEST else 0.3 if first else 0.35
                assert wrong < near, (recipe, sizes, wrong)


FASTER = r"^[12]\.\d\dx SDPA by the cost model .[\d.]+ and [\d.]+ ms."


def by_flex(
    requires_grad=False, shape=(2, 8, 256), N=32768, D=128, capability=(9, 0),
    version=triton.__version__, band=None, **settings,
):  # fmt: skip
    """Of a call of flex_attention's: under a band, else by block lists of 128, each of `shape`. q has
    2 batches, 8 heads, N rows."""
    graph = torch.fx.Graph()
    with FakeTensorMode():
        q, out = (
            torch.empty(2, N, 8, D, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
            for _ in range(2)
        )
        lists = [torch.empty(*shape, *w, device="cuda", dtype=torch.int32) for w in ((), (9,))]
    q, *lists = placeholders(graph, [q, *lists])
    anchor = valued(graph.call_function(torch.relu, (q,)), out)
    seen = {"band": band} if band else {"blocks": BlockLists(*lists, None, None, 128, 128)}
    emit, out = Emitter(anchor, GraphIndex(graph)), out.requires_grad_(requires_grad)
    call = Call(anchor, "flex_attention", emit, q, q, q, out, **seen)
    with gpu(capability), mock.patch.object(triton, "__version__", version):
        return decide_call(call, Settings(**settings))


@pytest.mark.parametrize(
    "given, recipe, reason",
    [
        ({}, "sage2-8b-rotated", "by block lists, N >= 16384"),
        (dict(N=16383), None, "sage2-8b-rotated by block lists wins from N=16384"),
        (dict(D=48), "sage2-8b-rotated", "by block lists, N >= 16384"),
        (dict(D=160), None, "sage2-8b-rotated by block lists was not measured"),
        (dict(capability=(8, 9)), None, "sage2-8b by block lists was not measured"),
        (dict(version="3.5.0"), None, "sage2-8b by block lists was not measured; the Hopper kernel"),
        (dict(recipe="sage2-8b-rotated", version="3.5.0"), None, "by block lists was not measured"),
        (dict(portable=True), "sage2-8b-rotated", "by block lists, N >= 16384"),
        (dict(recipe="sage2-8b"), None, "sage2-8b by block lists was not measured"),
        (dict(benchmark=Mock(side_effect=AssertionError)), "sage2-8b-rotated", "by block lists"),
        (dict(force=True), "sage2-8b-rotated", "forced"),
        (dict(force=True, recipe="sage2-4b"), "sage2-4b", "forced"),
        (dict(force=True, recipe="sage3"), None, "no kernel for block lists with qk="),
        (dict(force=True, requires_grad=True), None, "training: block lists have no backward"),
        (dict(force=True, shape=(2, 4, 256)), None, "block lists must have q's batch and heads"),
        (dict(force=True, shape=(1, 1, 255)), None, "block lists must be for all queries"),
    ],
)  # fmt: skip
def test_calls_by_block_lists_are_rewritten_where_they_were_measured_and_where_forced(
    given, recipe, reason
):
    found = by_flex(**given)
    assert found.recipe == recipe and reason in str(found.reason)


ROTATED = "sage2-8b-rotated"


@pytest.mark.parametrize(
    "given, recipe, reason",  # of B, H_q, H_kv, N, D = 4, 32, 32, 16384, 128 on a GPU of 9.0
    [
        ({}, ROTATED, FASTER),
        ({"N": 4096, "D": 256}, ROTATED, FASTER),
        ({"D": 41}, ROTATED, FASTER),
        ({"portable": True}, ROTATED, FASTER),
        ({"portable": True, "force": True}, ROTATED, "^forced$"),
        ({"portable": True, "force": True, "capability": (8, 9)}, "sage2-8b", "forced$"),
        ({"D": 64, "recipe": "sage1-per-token"}, None,
         "^no known gain: sage1-per-token with head_dim 64, B\\*H=128 was not measured on NVIDIA H200: run"),
        ({"N": 255}, None, "^no known gain: a call with fewer than 256 queries or keys$"),
        ({"N_kv": 77}, None, "fewer than 256 queries or keys"),
        ({"N": 1024}, None,
         "^no known gain: sage2-8b-rotated with head_dim 128, B\\*H=128 is 0.\\d\\dx SDPA by the cost model"),
        ({"N": 1024, "force": True}, ROTATED, "forced"),
        ({"capability": (8, 9)}, None, "sage2-8b .* was not measured on NVIDIA Test .8, 9.: run"),
        ({"capability": (8, 6), "force": True}, "sage1", "forced"),
        ({"capability": (10, 0), "force": True}, "sage2-8b-fp8qk", "forced"),
        ({"capability": (10, 3), "D": 256, "force": True, "portable": True}, "sage2-8b-fp8qk", "forced"),
        ({"capability": (12, 0), "force": True}, "sage2-8b", "forced"),
        ({"capability": (8, 9), "force": True, "recipe": "sage2-8b-fp8qk"}, "sage2-8b-fp8qk", "forced"),
        ({"capability": (8, 6), "force": True, "recipe": "sage2-8b"}, None,
         "no kernel for pv='fp8', head_dim=128 on compute capability"),
        ({"capability": (7, 5), "force": True}, None, "no kernel for pv='16bit'"),
        ({"recipe": "off", "policy": AUTO_FROM_8192}, ROTATED, FASTER + ".*rule 2 of the policy.$"),
        ({"N": 8191, "recipe": "off", "policy": AUTO_FROM_8192}, None, "the recipe is 'off'"),
        ({"N": 1024, "policy": (Rule("auto"),)}, None, "no known gain.*rule 1 of the policy"),
        ({"N": 16, "policy": (Rule("sage1-per-token"),), "force": True}, "sage1-per-token", "forced .rule 1"),
        ({"policy": (Rule("off"),), "force": True}, None, "the policy says off .rule 1."),
        ({"policy": (KEEPING,)}, ROTATED, "^by block lists, N >= 16384; keep 0.3 .rule 1 of the policy.$"),
        ({"N": 8192, "policy": (KEEPING,)}, None,
         "^no known gain: sage2-8b-rotated by block lists wins from N=16384; keep 0.3 .rule 1 of the policy.$"),
        ({"policy": (KEEPING,), "benchmark": Mock(side_effect=AssertionError)}, ROTATED, "by block lists"),
        ({"H_kv": 8, "policy": (KEEPING,), "force": True}, ROTATED, "^forced; keep 0.3 .rule 1 of the policy.$"),
        ({"capability": (8, 6), "policy": (KEEPING,), "force": True}, None, "no kernel for pv='fp8'"),
        ({"D_v": 64}, None, "with head_dim .128, 64., .* was not measured"),
        ({"D_v": 64, "force": True}, ROTATED, "forced"),
        ({"requires_grad": True, "training": "off"}, None, "^the output requires a gradient"),
        ({"requires_grad": True, "training": "off", "force": True}, ROTATED, "forced"),
    ],
)  # fmt: skip
def test_what_auto_and_policies_do_on_a_gpu(given, recipe, reason):
    sizes = {"B": 4, "H_q": 32, "H_kv": 32, "N": 16384, "D": 128}
    shape = tuple(given.get(name, n) for name, n in sizes.items())
    site = decide(shape, **{name: x for name, x in given.items() if name not in sizes})
    assert site.recipe == recipe and re.search(reason, site.reason), site.reason


def test_on_an_amd_gpu_all_stays(monkeypatch):
    """Its capability is that of a GPU which it is not."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    site = decide((1, 32, 32, 32768, 128), capability=(9, 4), recipe="sage2-8b", force=True)
    assert site.reason == "the GPU must be NVIDIA's, got AMD's: this torch is built for ROCm 6.4"


@pytest.mark.parametrize("shape", [(4, 32, 32, 16384, 128), (4, 32, 32, 128, 128)])
def test_the_reason_says_that_the_hopper_kernel_is_lost(shape, monkeypatch):
    before = decide(shape)
    monkeypatch.setattr(triton, "__version__", "3.10.0")
    lost = "; the Hopper kernel is tested with Triton 3.6 to 3.9, not 3.10.0: calls run in the port"
    assert "Hopper kernel" not in before.reason
    assert lost in decide(shape).reason
    for kind, recipe in (("causal", "sage1-per-token"), ("mask", "auto"), ("window", "auto")):
        assert lost in decide(shape, kind, recipe=recipe).reason, kind
    wide = (*shape[:4], 256)
    for not_its, given, capability, kind, settings in (
        ("another GPU", shape, (10, 0), "full", {}),
        ("a bias", shape, (9, 0), "bias", {}),
        ("a mask over 16-bit v", shape, (9, 0), "mask", {"recipe": "sage1-per-token"}),
        ("another granularity", shape, (9, 0), "full", {"recipe": "sage2-8b"}),
        ("16-bit p v of head_dim 256", wide, (9, 0), "full", {"recipe": "sage1-per-token"}),
    ):
        reason = decide(given, kind, capability, **settings).reason
        assert "Hopper" not in reason, not_its


def test_a_package_of_an_unknown_triton_holds_no_kernel(monkeypatch):
    """Nobody saw how its compiled kernels are called. What is not for a GPU travels all the same."""
    shape = 4, 32, 32, 16384, 128
    monkeypatch.setattr(triton, "__version__", "3.10.0")
    for capability in ((9, 0), (8, 9)):
        given = dict(recipe="sage2-8b", capability=capability, force=True)
        site = decide(shape, portable=True, **given)
        assert str(site.reason) == "with Triton 3.10.0 no kernel can travel in a package"
        assert not site.rewritten
        assert decide(shape, **given).rewritten


@pytest.fixture
def flash_attention_3():
    """SDPA's flash attention as `activate_flash_attention_impl` would have it, without a kernel."""
    torchs.register_flash_attention_impl("FA3 of a test", register_fn=Mock)
    torchs.activate_flash_attention_impl("FA3 of a test")
    yield "FA3 of a test"
    torchs.restore_flash_attention_impl()


def test_against_an_activated_flash_attention_only_what_was_measured_is_faster(
    flash_attention_3, monkeypatch
):
    shape = (4, 32, 32, 16384, 128)
    for portable in (False, True):
        site = decide(shape, kind="window", portable=portable)
        assert not site.rewritten, site.reason
    assert "was not measured on NVIDIA H200" in site.reason
    clock = Clock(sage2_8b_rotated=0.5, sage2_8b=0.8)
    with torchs.sdpa_kernel(torchs.SDPBackend.FLASH_ATTENTION):
        site = decide(shape, benchmark=clock)
    assert site.reason.endswith("with 1 warpgroup; SDPA's flash attention is FA3 of a test")
    (case,) = clock.cases
    assert (case.flash_attention, case.rivals) == ("FA3 of a test", ("FLASH_ATTENTION",))
    monkeypatch.setattr(tables, "_users", lambda gpu, flash: table())
    assert decide(shape).rewritten  # measured against it: families.versions()
    assert families.versions()["flash attention"] == tables.in_force()[0] == "FA3 of a test"


TRAINED = (2, 8, 8, 4096, 128)


@pytest.mark.parametrize(
    "given, capability, reason",
    [
        ({}, (9, 0), None),
        ({"kind": "causal"}, (8, 0), None),
        ({"N_kv": 100, "kind": "causal"}, (12, 0), None),
        ({"dtype": torch.float32}, (9, 0), "q, k and v are fp32"),
        ({"dtype": torch.float32, "force": True}, (9, 0), None),
        ({"kind": "keys"}, (9, 0), "without a mask but the causal one, got bool"),
        ({"kind": "window"}, (9, 0), "got window(1023, 0)"),
        ({"kind": "window", "band": Band(None, 0, True)}, (9, 0), None),
        ({"kind": "window", "band": Band(None, 0, True), "N_kv": 9}, (9, 0), "got causal, bottom"),
        ({"kind": "window", "band": Band(None, 2)}, (9, 0), "got causal + 2"),
        ({"D_v": 64}, (9, 0), "one of q, k and v, got 128 and 64"),
        ({"shape": (2, 8, 8, 4096, 160)}, (9, 0), "up to 128, one of q, k and v, got 160"),
        ({}, (7, 5), "from compute capability 8.0 on, got 7.5"),
    ],
    ids=str,
)
def test_which_calls_are_trained_by_sagebwd(given, capability, reason):
    given = dict(given)
    shape = given.pop("shape", TRAINED)
    asked = {"capability": capability, "training": "sagebwd", **given}
    site = decide(shape, requires_grad=True, **asked)
    if reason is None:
        assert site.recipe == "sagebwd" and site.reason == "asked for, forward and backward"
    else:
        assert not site.rewritten and reason in site.reason
    if not given and shape == TRAINED and capability == (9, 0):
        assert decide(shape, **asked).recipe != "sagebwd"


# -- training by "auto" ----

LONG_STEP = (1, 32, 32, 16384, 128)
TRAINS = "the FP8 backward trains"


def trained_table():
    return table("full-training", "causal-training", recipes=("fp8-backward",))


def step(shape=LONG_STEP, **given):
    return decide(shape, **{"requires_grad": True, "training": "auto"} | given)


def test_a_call_trains_by_the_fp8_backward_where_the_fit_says_that_a_step_is_faster(monkeypatch):
    known(monkeypatch, trained_table())
    site, number = step(), r"([\d.]+)"
    by_the_model = rf"{number}x SDPA by the cost model \({number} and {number} ms\)"
    found = re.fullmatch(by_the_model, site.reason)
    assert site.recipe == "fp8-backward"
    speedup, ours, sdpa = map(float, found.groups())
    assert speedup > 1.5 and sdpa / ours == pytest.approx(speedup, rel=0.01)
    assert site.decision.times == pytest.approx((ours, sdpa), rel=0.01)
    by_policy = step(training="off", policy=(Rule("auto", training="auto"),))
    assert by_policy.recipe == "fp8-backward"
    site = step((1, 2, 2, 512, 128))
    assert not site.rewritten and site.decision.times[0] > site.decision.times[1]
    of_family = r"no known gain: fp8-backward with head_dim 128, full-training, B\*H=2 is "
    assert re.fullmatch(of_family + by_the_model, site.reason)[1].startswith("0.")
    site = step((1, 32, 32, 255, 128))
    assert site.reason == "no known gain: a call with fewer than 256 queries or keys"
    assert site.decision.times is None


def test_the_fp8_backward_wins_by_the_margin_of_inference(monkeypatch):
    known(monkeypatch, trained_table())
    shown = []
    monkeypatch.setattr(
        cost.Prediction, "wins", property(lambda self: shown.append(self) or self.ours > 1e9)
    )
    assert not step().rewritten and {each.recipe for each in shown} == {"fp8-backward"}


@pytest.mark.parametrize(
    "given, reason",
    [
        ({"kind": "keys"}, f"{TRAINS} calls without a mask but the causal one, got bool"),
        ({"kind": "window"}, f"{TRAINS} calls without a mask but the causal one, got win"),
        ({"kind": "causal", "N_kv": 9000}, f"{TRAINS} causal calls of as many queries"),
        ({"shape": (1, 32, 32, 16384, 160)}, f"{TRAINS} head_dims up to 128"),
        ({"capability": (8, 9)}, f"{TRAINS} on compute capability 9.0, got 8.9"),
        ({"dtype": torch.float32}, "q, k and v are fp32"),
        ({"recipe": "off", "policy": (Rule("auto", head_dim=(64,)),)}, "the recipe is 'off'"),
        ({"policy": (Rule("off"),)}, "the policy says off"),
        ({"policy": (Rule("auto", training="off"),)}, "the output requires a gradient"),
    ],
    ids=str,
)
def test_what_the_fp8_backward_does_not_train_stays_and_is_not_measured(given, reason, monkeypatch):
    measuring = Measuring(monkeypatch, trained_table())
    site = step(**given)
    assert not site.rewritten and site.reason.startswith(reason)
    assert not measuring.asked and not site.why.cause.remedy.startswith("please report")


@pytest.mark.parametrize("kind", ["full", "causal"])
def test_a_step_that_nothing_is_known_of_is_measured_while_it_compiles(kind, monkeypatch):
    measuring = Measuring(monkeypatch, trained_table())
    assert step(kind=kind).recipe == "fp8-backward"
    assert measuring.asked == [("cuda", Family(128, 128, f"{kind}-training"), "fp8-backward")]
    step((1, 32, 32, 8192, 128), kind=kind)
    assert len(measuring.asked) == 1  # it is known now
    measuring.tables.clear()
    for given in ({"training": "fp8-backward"}, {"force": True}, {"training": "off"}):
        step(kind=kind, **given)
    assert len(measuring.asked) == 1


@pytest.mark.parametrize("kind", ["full", "causal"])
def test_training_is_decided_by_the_times_that_are_built_in(kind, monkeypatch):
    """Of other head_dims a GPU measures its own."""
    built_in = tables.built_in()[tables.H200]
    measuring = Measuring(monkeypatch, built_in)
    measuring.tables.append(built_in)
    for D in range(40, 129, 8):  # of whose training times are built in
        site = step((1, 32, 8, 65536, D), kind=kind)
        assert site.recipe == "fp8-backward" and re.match(FASTER, site.reason), site.reason
        site = step((1, 32, 8, 512, D), kind=kind)
        assert not site.rewritten and "x SDPA by the cost model" in site.reason, site.reason
    assert not measuring.asked
    others = 32, 34, 63, 65, 100, 127
    for D in others:
        step((1, 32, 8, 65536, D), kind=kind)
    assert [family for _, family, _ in measuring.asked] == [
        Family(D, D, f"{kind}-training") for D in others
    ]


def test_the_page_on_training_shows_a_reason_of_the_built_in_times(monkeypatch):
    known(monkeypatch, tables.built_in()[tables.H200])
    site = step((1, 32, 32, 8192, 128))
    page = Path(__file__).parents[2] / "docs" / "guide" / "training.md"
    assert site.recipe == "fp8-backward" and f"`{site.reason}`" in page.read_text()


def test_what_is_forced_is_not_decided_by_speed(monkeypatch):
    known(monkeypatch, trained_table())
    site = step(force=True)
    assert site.recipe == "sage2-8b-rotated"
    assert site.reason == "forced; its backward is exact attention's"
    site = step(force=True, training="fp8-backward")
    assert (site.recipe, site.reason) == ("fp8-backward", "asked for, forward and backward")
    assert (site.decision.recipe, site.decision.trained_by) == (None, "fp8-backward")


def test_causal_calls_whose_k_has_a_bias_are_left_to_the_user(monkeypatch):
    known(monkeypatch, trained_table())
    assert step(kind="causal").recipe == "fp8-backward"
    monkeypatch.setattr(eligible, "is_biased", lambda k: True)
    site = step(kind="causal")
    assert site.reason.startswith("training: causal, and k's channels have a bias")
    assert "sage.training" in site.why.cause.remedy
    assert step(kind="causal", training="fp8-backward").recipe == "fp8-backward"
    assert step().recipe == "fp8-backward"


def test_under_max_autotune_a_step_is_timed():
    for ms, recipe, reason in (
        (0.5, "fp8-backward", "autotuned: 2.00x the fastest of SDPA"),
        (1.25, None, "autotuned: SDPA is faster (0.80x)"),
        ("E: 1", None, "autotuned: no recipe could be timed; fp8-backward failed: E: 1"),
    ):
        clock = Clock(fp8_backward=ms)
        site = step((2, 8, 4, 1000, 64), benchmark=clock)
        assert (site.recipe, site.reason) == (recipe, reason)
        assert site.decision.times == (None if isinstance(ms, str) else (ms, 1.0))
        (case,) = clock.cases
        assert case.shape.trains and case.candidates == (("fp8-backward", None),)
        assert (case.shape.q, case.shape.k) == ((2, 8, 1000, 64), (2, 4, 1000, 64))
    clock = Clock(sage2_8b_rotated=0.5, sage2_8b=0.8)
    decide((2, 8, 4, 1000, 64), training="auto", benchmark=clock)
    assert not clock.cases[0].shape.trains


# -- where a clock decides instead of the table ----


class Clock:
    """SDPA's best takes 1 ms; the recipes what is given, an error's message included: for all tiles
    or, by warpgroups, for each."""

    def __init__(self, **ms):
        self.ms = {name.replace("_", "-"): each for name, each in ms.items()}
        self.cases = []

    def __call__(self, case):
        self.cases.append(case)
        sdpa = {"CUDNN_ATTENTION": 1.0, "FLASH_ATTENTION": 1.5, "EFFICIENT_ATTENTION": "no"}
        return {**sdpa, **{each: self.of(*each) for each in case.candidates}}

    def of(self, recipe, warpgroups):
        ms = self.ms[recipe]
        return ms[warpgroups] if isinstance(ms, dict) else ms


SHORT = (1, 4, 2, 64, 128)  # never faster by the table


@pytest.mark.parametrize(
    "ms, recipe, reason",
    [
        ({"sage2_8b_rotated": {1: 0.7, 2: 0.5, 3: 0.6}, "sage2_8b": 0.8}, "sage2-8b-rotated",
         "autotuned: 2.00x the fastest of SDPA, with 2 warpgroups"),
        ({"sage2_8b_rotated": {1: 0.9, 2: 0.5, 3: "E: 3"}, "sage2_8b": "E: 1"}, "sage2-8b-rotated",
         "autotuned: 2.00x the fastest of SDPA, with 2 warpgroups; "
         "sage2-8b-rotated with 3 warpgroups failed: E: 3; sage2-8b failed: E: 1"),
        ({"sage2_8b_rotated": 0.8, "sage2_8b": 0.5}, "sage2-8b", "autotuned: 2.00x the fastest of SDPA"),
        ({"sage2_8b_rotated": 2.0, "sage2_8b": 1.25}, None, "autotuned: SDPA is faster (0.80x)"),
        ({"sage2_8b_rotated": 0.99, "sage2_8b": 1.25}, None, "autotuned: SDPA is as fast (1.01x)"),
        ({"sage2_8b_rotated": {1: "E: 0", 2: "E: 1", 3: "E: 3"}, "sage2_8b": "E: 2"}, None,
         "autotuned: no recipe could be timed; sage2-8b-rotated with 1 warpgroup failed: E: 0; "
         "sage2-8b-rotated with 2 warpgroups failed: E: 1; "
         "sage2-8b-rotated with 3 warpgroups failed: E: 3; sage2-8b failed: E: 2"),
    ],
)  # fmt: skip
def test_the_fastest_by_the_clock_is_taken(ms, recipe, reason):
    clock = Clock(**ms)
    site = decide(SHORT, benchmark=clock)
    assert (site.recipe, site.reason) == (recipe, reason)
    of_tiles = (each.values() if isinstance(each, dict) else [each] for each in ms.values())
    timed = [each for each in itertools.chain(*of_tiles) if not isinstance(each, str)]
    assert site.decision.times == ((min(timed), 1.0) if timed else None)
    site = decide(SHORT, benchmark=lambda case: dict.fromkeys(case.candidates, 1.0))
    assert (site.recipe, site.reason) == (None, "autotuned: no backend of SDPA could be timed")


OF_KIND = {  # of 64 keys: its band, the mask's shape and dtype
    "causal": (Band(None, 0), None, None),
    "window": (Band(1023, 0), None, None),
    "keys": (Band(), (1, 1, 1, 64), torch.bool),
    "mask": (Band(), (1, 1, 64, 64), torch.bool),
    "bias": (Band(), (64, 64), torch.bfloat16),
}


@pytest.mark.parametrize(
    "D, kind, warpgroups",
    [
        (64, "full", (0, 1, 3)),  # short ones with a mask are Triton's
        (64, "causal", (1, 3)),
        (80, "causal", (1, 3)),
        (128, "full", (1, 2, 3)),
        (256, "full", (None,)),
        (128, "window", (1, 2, 3)),
        (64, "window", (0, 1, 3)),
        (128, "keys", (1, 2, 3)),
        (128, "mask", (1, 2, 3)),
        (128, "bias", (None,)),
    ],
)
def test_the_tiles_that_compute_a_call_are_timed_on_the_calls_mask(D, kind, warpgroups):
    clock = Clock(sage2_8b_rotated=0.5, sage2_8b=0.8, sage1_per_token=0.5)
    site = decide((1, 4, 2, 64, D), kind, benchmark=clock)
    (case,) = clock.cases
    assert case.shape[2:5] == ((1, 4, 64, D), (1, 2, 64, D), (1, 2, 64, D))  # q, k, v
    assert case.shape[5:8] == OF_KIND.get(kind, (Band(), None, None))
    assert (case.shape.device.type, case.shape.dtype) == ("cuda", torch.bfloat16)
    timed = [("sage2-8b-rotated", n) for n in warpgroups] + [("sage2-8b", None)]
    assert [*case.candidates] == timed and site.decision.warpgroups == warpgroups[0]
    how = {None: "", 0: ", with the Triton kernel"}.get(warpgroups[0], ", with 1 warpgroup")
    assert site.reason == f"autotuned: 2.00x the fastest of SDPA{how}"
    # One tile each, and a device without that kernel.
    decide((1, 4, 2, 64, D), kind, benchmark=clock, recipe="sage1-per-token", D_v=32)
    assert clock.cases[-1].candidates == (("sage1-per-token", None),)
    assert clock.cases[-1].shape.v == (1, 2, 64, 32)
    decide((1, 4, 2, 64, D), kind, (8, 9), benchmark=clock, recipe="sage2-8b-rotated")
    assert clock.cases[-1].candidates == (("sage2-8b-rotated", None),)


def test_the_fastest_tile_is_in_the_graph_and_calls_with_several_share_k_and_v():
    """What prepares k and v is the same for all."""

    def clock(case):
        fastest = 2 if case.shape.q[2] < 1000 else 3
        ours = {each: 0.5 if each.warpgroups == fastest else 0.6 for each in case.candidates}
        return {"FLASH_ATTENTION": 1.0} | ours

    graph, given = torch.fx.Graph(), {"device": "cuda", "dtype": torch.bfloat16}
    with FakeTensorMode():
        lengths = (2048, 2048, 512, 2048, 4096)
        values = [torch.empty(1, N, 4, 128, **given).transpose(1, 2) for N in lengths]
    k, v, *queries = placeholders(graph, values)
    outs = [graph.call_function(F.scaled_dot_product_attention, (q, k, v)) for q in queries]
    graph.output(tuple(map(valued, outs, values[2:])))
    with gpu((9, 0)):
        sites = rewrite(torch.fx.GraphModule({}, graph), Settings(benchmark=clock))
    assert [site.decision.warpgroups for site in sites] == [2, 3, 3]
    calls = graph.find_nodes(op="call_function", target=torch.ops.sage.sdpa.default)
    rows = recipes.NAMED["sage2-8b-rotated"]
    assert [call.args[9:11] for call in calls] == [(rows.encode(), n) for n in (2, 3, 3)]
    (prepare,) = graph.find_nodes(op="call_function", target=torch.ops.sage.prepare.default)
    assert prepare.args == (k, v, None, rows.encode(), False)
    assert all(x.args[0] is prepare for call in calls for x in call.args[4]) and calls[0].args[4]


AUTOS = ("sage2-8b-rotated", "sage2-8b")


@pytest.mark.parametrize(
    "rules, raced, recipe, reason",
    [
        ((Rule("auto"),), {AUTOS}, "sage2-8b", "autotuned: 2.00x the fastest of SDPA (rule 1 of the policy)"),
        ((Rule("auto", head_dim=(64,)), Rule("sage1"), Rule("auto")), {("sage1",)}, "sage1",
         "autotuned: 1.25x the fastest of SDPA (rule 2 of the policy)"),
        ((Rule("sage1-per-token"), Rule("auto")), {("sage1-per-token",)}, None,
         "autotuned: SDPA is faster (0.50x) (rule 1 of the policy)"),
        ((Rule("sage1-per-token", length=(65, None)),), {AUTOS}, "sage2-8b", "autotuned: 2.00x the fastest of SDPA"),
        ((Rule("off"), Rule("auto")), set(), None, "the policy says off (rule 1)"),
    ],
)  # fmt: skip
def test_max_autotune_races_what_the_first_rule_that_fits_allows(
    rules, raced, recipe, reason, monkeypatch, tmp_path
):
    clock = Clock(sage2_8b_rotated=0.6, sage2_8b=0.5, sage1=0.8, sage1_per_token=2.0)
    monkeypatch.setattr(timing, "benchmark", clock)
    path = str(tmp_path / "policy.json")
    Policy(rules).save(path)
    asked = options.resolve({"mode": "max-autotune", "policy": path})
    site = decide(SHORT, **vars(asked))
    assert (site.recipe, site.reason) == (recipe, reason)
    assert {tuple(dict(case.candidates)) for case in clock.cases} == raced


def test_a_band_at_the_bottom_right_is_timed_only_where_that_is_the_top_left():
    """None of SDPA's backends is given it otherwise."""
    clock = Clock(sage2_8b=0.5, sage2_8b_rotated=0.7)
    right = {"kind": "window", "band": Band(None, 0, bottom_right=True), "benchmark": clock}
    site = decide((1, 4, 2, 64, 128), **right, N_kv=96)
    assert site.mask == "causal, bottom right" and "no known gain" in site.reason
    assert not clock.cases
    assert decide(SHORT, **right).recipe == "sage2-8b"
    assert clock.cases[0].shape.band == Band(None, 0)


@pytest.mark.parametrize("portable", [False, True])
def test_a_length_that_depends_on_data_is_no_fault_and_no_guard(portable, monkeypatch):
    """It is taken to be as long as is known."""
    shape_env = ShapeEnv()
    N = shape_env.create_unbacked_symint()
    torch._check(N >= 2)
    known(monkeypatch, table("keys", recipes=("sage2-8b",)))
    first = table("keys").first_length(Family(128, 128, "keys"), "sage2-8b-rotated", 24)
    given = {"shape_env": shape_env, "portable": portable, "recipe": "sage2-8b", "kind": "keys"}
    site = decide((1, 24, 24, N, 128), **given)
    assert f"wins from N={first}" in site.reason, site.reason
    assert "of ours" not in decide((N, 24, 24, 9, 128), **given).reason
    rule = (Rule("off", length=(5000, None)), Rule("sage2-8b", length=(None, 99)))
    site = decide((1, 24, 24, N, 128), **given, policy=rule, force=True)
    assert site.reason.startswith("forced"), site.reason
    clock = Clock()
    decide((1, 24, 24, N, 128), **given, benchmark=clock)
    assert not clock.cases  # there is no size to time
    torch._check(N >= first)
    site = decide((1, 24, 24, N, 128), **given)
    assert site.reason.startswith(f"N >= {first}"), site.reason


class Measuring:
    """In the place of `timing.calibrate`, on a GPU that is there: what is asked of it, and the
    table that it finds."""

    def __init__(self, monkeypatch, table=None, error=None, capturing=False, available=True):
        self.asked, self.tables, self.table, self.error = [], [], table, error
        monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
        monkeypatch.setattr(tables, "known", lambda gpu: tuple(self.tables))
        monkeypatch.setattr(timing, "calibrate", self)

    def __call__(self, device, family, recipe):
        self.asked.append((device.type, family, recipe))
        self.tables = [self.table] if self.error is None else []
        return self.error


@pytest.mark.parametrize("kind", ["full", "causal", "window", "keys", "mask", "bias"])
def test_a_call_that_nothing_is_known_of_is_measured_while_it_compiles(kind, monkeypatch):
    measuring = Measuring(monkeypatch, table(kind))
    site = decide((1, 24, 24, 16384, 128), kind)
    assert site.rewritten and "x SDPA by the cost model" in site.reason
    assert measuring.asked == [("cuda", Family(128, 128, kind), "sage2-8b-rotated")]
    site = decide((1, 1, 1, 1024, 128), kind)
    assert not site.rewritten and "x SDPA by the cost model" in site.reason
    assert len(measuring.asked) == 1  # it is known now


def test_the_reason_says_why_a_call_could_not_be_measured(monkeypatch):
    Measuring(monkeypatch, error="OutOfMemoryError: 1 GiB")
    for site in (decide((1, 24, 24, 16384, 128)), step()):
        assert not site.rewritten
        assert site.reason.endswith(" was not measured on NVIDIA H200: OutOfMemoryError: 1 GiB")


@pytest.mark.parametrize(
    "asked",
    [
        {"calibrate": False}, {"capturing": True}, {"available": False}, {"N_kv": 255},
        {"shape": (1, 24, 24, 255, 128)}, {"requires_grad": True, "training": "off"},
        {"force": True}, {"emulate": True}, {"recipe": "off"},
        {"benchmark": lambda case: {each: 1.0 for each in (*case.candidates, "CUDNN_ATTENTION")}},
    ],
    ids=lambda asked: next(iter(asked)),
)  # fmt: skip
def test_nothing_is_measured_where_it_cannot_or_need_not_be(asked, monkeypatch):
    asked = dict(asked)
    gpu = {name: asked.pop(name) for name in ("capturing", "available") if name in asked}
    measuring = Measuring(monkeypatch, table(), **gpu)
    shape = asked.pop("shape", (1, 24, 24, 16384, 128))
    reason, cannot = decide(shape, **asked).reason, bool(gpu or "calibrate" in asked)
    assert not measuring.asked
    assert reason.endswith("run `python -m sage_inductor tune` there") == cannot


@pytest.mark.parametrize("hint, asked", [(255, 0), (256, 1)])
def test_nothing_is_measured_while_a_dynamic_length_is_short(hint, asked, monkeypatch):
    measuring, (shape_env, N) = Measuring(monkeypatch, table()), dynamic(N=hint)
    site = decide((1, 24, 24, N, 128), shape_env=shape_env)
    assert len(measuring.asked) == asked
    assert ("fewer than 256 queries or keys" in site.reason) == (not asked)


@pytest.mark.parametrize("benchmark", [None, Mock(side_effect=AssertionError)])
def test_a_window_of_flex_attentions_is_not_measured(benchmark, monkeypatch):
    """SDPA has none to compare it with; a causal call of flex_attention's is as SDPA's."""
    measuring = Measuring(monkeypatch, table("causal"))
    site = by_flex(band=Band(99, 0), benchmark=benchmark)
    assert site.reason.text.endswith("flex_attention computes such a window itself")
    assert not measuring.asked
    assert by_flex(band=Band(None, 0)).recipe == "sage2-8b-rotated"
    assert [family.kind for _, family, _ in measuring.asked] == ["causal"]


def test_users_who_say_nothing_have_their_calls_measured_and_trained_exactly():
    """The tests switch calibration off for themselves: tests/settings.py."""
    assert options.OPTIONS["calibrate"].default is True and Settings().calibrate is True
    assert options.OPTIONS["training"].default == Settings().training == "off"


@pytest.mark.parametrize(
    "settings, reason",
    [
        ({}, "no known gain"),
        ({"portable": True}, "no known gain"),
        ({"force": True}, "forced"),
        ({"requires_grad": True, "training": "off"}, "the output requires a gradient"),
        ({"recipe": "off"}, "the recipe is 'off'"),
    ],
)
def test_what_needs_no_clock_asks_none(settings, reason):
    clock = Clock()
    given = {"benchmark": clock} if settings else {}
    site = decide(SHORT, **settings, **given)
    assert site.reason.startswith(reason) and not clock.cases


def test_a_dynamic_length_is_timed_at_its_hint_without_a_guard():
    shape_env, N = dynamic(N=96)
    shape, clock = (4, 32, 32, N, 128), Clock(sage2_8b_rotated=0.5, sage2_8b=0.8)
    site = decide(shape, shape_env=shape_env, benchmark=clock)
    assert clock.cases[0].shape.q == (4, 32, 96, 128)
    assert site.reason == "autotuned at [4, 32, 96, 128]: 2.00x the fastest of SDPA"
    # Each length has a tile by the table.
    assert (site.recipe, site.decision.warpgroups) == ("sage2-8b-rotated", None)
    rule = (Rule("sage2-8b", length=(64, 128)),)
    given = {"shape_env": shape_env, "portable": True, "policy": rule}
    assert "rule 1" in decide(shape, **given).reason
    assert not shape_env.guards
    decide(shape, shape_env=shape_env)
    assert shape_env.guards  # the table's


@pytest.mark.parametrize("old", ["sage2-8b-rows", "accurate"])
def test_the_message_about_a_recipes_old_name_has_the_new_one(old):
    said = f"got .*'{old}'.*: it is called '{names.RENAMED[old]}' since 0.2"
    for ask in (
        lambda: options.OPTIONS["recipe"].check("sage.recipe", old), lambda: Rule(old),
        lambda: diagnose(torch.nn.Identity(), recipes=old),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            ask()
