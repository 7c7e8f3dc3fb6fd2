"""The laboratory of bench/: each technique against a definition written another way, or against
what must hold of it; and the orders that the papers report."""

import dataclasses
import itertools
import json

import pytest
import torch
from support import relative_l1, sdpa
from torch.testing import assert_close

from bench import accuracy
from bench import laboratory as lab
from bench.laboratory import FAMILIES, PRESETS, SAGE1, SAGE2_4B, SAGE2_8B, SAGE3, USUAL, Technique
from sage_inductor.ops.recipe import NAMED
from sage_inductor.ops.reference import quantize as reference
from sage_inductor.ops.reference.exact import attention_exact

INT8 = Technique("int8", "per_thread")
INT4 = Technique("int4", "per_thread")
E4M3 = Technique(pv="e4m3", v_scale="per_channel")
INT8_PV = {"pv": "int8", "v_scale": "per_channel"}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def draw(family="real_like", H=2, N=300, D=64):
    return [x.float() for x in lab.draw(family, 0, H, N, D)]


def exact(q, k, v, is_causal=False):
    right = 0 if is_causal else None
    return attention_exact(q, k, v, q.shape[3] ** -0.5, right=right)[0]


def error(technique, inputs, is_causal=False):
    return relative_l1(lab.attend(*inputs, technique, is_causal), exact(*inputs, is_causal))


def e4m3(x):
    return x.to(torch.float8_e4m3fn).float()


# -- what is exact ----


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"smooth_q": True},
        {"smooth_k": True},
        {"smooth_v": True},
        {"balance": True},
        {"rotation": 16},
        {"rotation": 64},
        {"smooth_q": True, "smooth_k": True, "smooth_v": True, "balance": True, "rotation": 32},
    ],
    ids=str,
)
def test_without_quantization_every_technique_is_exact(changes, is_causal):
    inputs = draw("channel_bias")
    out = lab.attend(*inputs, Technique(**changes), is_causal)
    assert_close(out, exact(*inputs, is_causal).float(), atol=2e-4, rtol=1e-4)


def test_the_rotation_is_orthogonal_and_mixes_all_channels_of_a_block():
    matrix = lab.rotate(torch.eye(64), 32)
    assert_close(matrix @ matrix.T, torch.eye(64))
    assert_close(matrix[:32, :32].abs(), torch.full((32, 32), 32**-0.5))
    assert matrix[:32, 32:].count_nonzero() == 0
    assert lab.rotate(torch.ones(32), 32).abs().max() < 0.75 * 32**0.5  # not all in one channel


# -- presets ----


@pytest.fixture
def every_mean(monkeypatch):
    """The papers take off every mean of v; what is shipped in FP8 leaves those that are noise."""
    monkeypatch.setattr(reference, "NO_SHIFT", 0.0)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_8_bit_presets_are_the_emulations_that_are_shipped(is_causal, every_mean):
    """And keep q's dtype; queries may be fewer than keys."""
    q, k, v = draw()
    inputs = q[:, :, :130], k, v
    shipped = lab.attend(*inputs, NAMED["sage2-8b"], is_causal)
    ours = dataclasses.replace(SAGE2_8B, accumulator="fp32", interval=None)
    assert relative_l1(lab.attend(*inputs, ours, is_causal), shipped) < 1e-5
    assert 1e-6 < relative_l1(lab.attend(*inputs, SAGE2_8B, is_causal), shipped) < 2e-4  # FP22
    inputs = [x.half() for x in inputs]
    shipped, out = (lab.attend(*inputs, x, is_causal) for x in (NAMED["sage1"], SAGE1))
    assert out.dtype == torch.float16 and relative_l1(out, shipped) < 1e-4


@pytest.mark.parametrize("family", ["real_like", "channel_bias"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_sage2_4b_is_the_emulation_that_is_shipped(is_causal, family, every_mean):
    """But for q's mean and what it takes off the scores, which are shipped with 8 significant bits:
    here and there another code of q, and no more error."""
    inputs = draw(family)
    shipped, int4 = NAMED["sage2-4b"], error(SAGE2_4B, inputs, is_causal)
    difference = relative_l1(
        lab.attend(*inputs, shipped, is_causal), lab.attend(*inputs, SAGE2_4B, is_causal)
    )
    assert difference < 0.25 * int4
    assert abs(error(shipped, inputs, is_causal) / int4 - 1) < 0.02


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_sage3_with_v_smoothed_is_the_emulation_that_is_shipped(is_causal):
    """But for q's mean and what it takes off the scores, as above."""
    inputs, ours = draw(), dataclasses.replace(SAGE3, smooth_v=True)
    fp4 = error(ours, inputs, is_causal)
    difference = relative_l1(
        lab.attend(*inputs, NAMED["sage3"], is_causal), lab.attend(*inputs, ours, is_causal)
    )
    assert difference < 0.15 * fp4
    assert abs(error(NAMED["sage3"], inputs, is_causal) / fp4 - 1) < 0.01
    biased = draw("biased_v")
    assert 5 * error(NAMED["sage3"], biased, is_causal) < error(SAGE3, biased, is_causal)


@pytest.mark.sweep
def test_means_that_are_noise_are_left(every_mean, monkeypatch):
    """Less a tiny mean, bf16 numbers are rounded to E4M3 to one side: at N = 64K that is most of
    the error."""
    inputs = [x[:, :, :n] for x, n in zip(draw("normal", 1, 65536, 64), (128, 65536, 65536))]
    papers = error(NAMED["sage2-8b"], inputs)
    monkeypatch.undo()
    assert error(NAMED["sage2-8b"], inputs) < min(0.042, 0.8 * papers)


@pytest.mark.parametrize("recipe", NAMED)
def test_shipped_recipes_in_blocks_are_the_op(recipe):
    q, k, v = draw(N=300)
    expected, _ = sdpa(q, k, v, is_causal=True, recipe=recipe, portable=True)
    assert_close(lab.attend(q, k, v, NAMED[recipe], True), expected, atol=1e-5, rtol=1e-5)


def test_fa3_fp8_is_its_definition():
    q, k, v = (x[0, 0] for x in draw(H=1, N=128))
    q_hat, k_hat, v_hat = (
        e4m3(x * (448 / x.abs().max())) * (x.abs().max() / 448) for x in (q, k, v)
    )
    s = q_hat @ k_hat.T / 8
    p = (s - s.amax(1, keepdim=True)).exp()
    expected = e4m3(p * 448) / 448 @ v_hat / p.sum(1, keepdim=True)
    out = lab.attend(*(x[None, None] for x in (q, k, v)), PRESETS["FA3_FP8"])[0, 0]
    assert relative_l1(out, expected) < 2e-3


# -- formats ----


def test_nvfp4_holds_e2m1_by_e4m3():
    x = torch.randn(64, 128) * torch.logspace(-6, 5, 64)[:, None]
    code, scale = lab.nvfp4_parts(x)
    assert torch.isin(code.abs(), E2M1).all() and set(code.abs().unique().tolist()) == set(
        E2M1.tolist()
    )
    assert scale.shape == (64, 8, 1) and scale.equal(e4m3(scale))
    assert scale.max() == 448 and scale.min() == 0
    assert lab.nvfp4(x).isfinite().all()


def test_e2m1_is_rounded_to_nearest_even():
    x = torch.tensor([0.2, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -5.1, 6, 0, 0, 0, 0, 0, 0])
    code, scale = lab.nvfp4_parts(x)
    assert scale.item() == 1
    assert code[0, :10].tolist() == [0, 0, 1, 1, 2, 2, 4, 4, -6, 6]


def test_truncated_keeps_13_bits_towards_zero():
    kept = torch.tensor([1.0, -1.0, 3.0, -0.75]) + torch.tensor([1, -1, 2, -0.5]) * 2**-13
    assert lab.truncated(kept).equal(kept)
    assert lab.truncated(kept * (1 + 2**-15)).equal(kept)
    assert lab.truncated(torch.tensor([1 + 2**-13 - 2**-23, -1 - 2**-14])).tolist() == [1, -1]


@pytest.mark.parametrize("interval", [None, 32, 64, 128])
def test_the_accumulator_follows_the_maximum(interval):
    """Over tiles whose maximum rises, FP22 is fp32 within 13 bits."""
    q, k, v = draw("normal", N=512)
    k = k * torch.linspace(0.5, 3, 512)[:, None]
    fp22 = dataclasses.replace(E4M3, accumulator="fp22", interval=interval)
    out = lab.attend(q, k, v, fp22)
    assert 0 < relative_l1(out, lab.attend(q, k, v, E4M3)) < 2e-3


# -- the papers' orders ----


def test_one_level_is_worse_than_two_and_the_more_so_the_longer():
    q, k, v = draw("biased_v", N=2048)
    ratios = []
    for N in (512, 2048):
        inputs = q[:, :, :128], k[:, :, :N], v[:, :, :N]
        one, two, fp32 = (
            error(dataclasses.replace(E4M3, **changes), inputs)
            for changes in ({"accumulator": "fp22"}, {"accumulator": "fp22", "interval": 64}, {})
        )
        assert one > two >= fp32 * 0.999
        ratios.append(one / two)
    assert ratios[1] > ratios[0] and ratios[1] > 1.2


FINER = [
    dataclasses.replace(INT4, granularity=each, smooth_k=True, smooth_q=True)
    for each in reversed(accuracy.GRANULARITIES)
]
# family -> techniques from the worst to the best, and the least factor between neighbours.
ORDERS = {
    "smoothing, INT8": ("channel_bias", [
        INT8, dataclasses.replace(INT8, smooth_k=True),
        dataclasses.replace(INT8, smooth_k=True, smooth_q=True),
    ], 1.2),
    "smoothing, INT4": ("channel_bias", [
        INT4, dataclasses.replace(INT4, smooth_k=True),
        dataclasses.replace(INT4, smooth_k=True, smooth_q=True),
    ], 1.2),
    "smoothing v": ("biased_v", [E4M3, dataclasses.replace(E4M3, smooth_v=True)], 5),
    **{f"finer scales, {family}": (family, FINER, 0.98) for family in USUAL},
    **{f"p and v, {family}": (family, [
        dataclasses.replace(E4M3, pv="e5m2"), E4M3, Technique(pv="fp16")], 1.5)
       for family in USUAL},
}  # fmt: skip


@pytest.mark.parametrize("name", ORDERS)
def test_techniques_come_in_the_papers_order(name):
    family, techniques, factor = ORDERS[name]
    inputs = draw(family, N=512)
    errors = [error(technique, inputs) for technique in techniques]
    assert all(worse > factor * better for worse, better in itertools.pairwise(errors)), errors
    assert errors[0] > 1.1 * errors[-1]


@pytest.mark.parametrize("technique, factor", [(INT8_PV, 20), ({"pv": "nvfp4"}, 1.25)], ids=str)
def test_two_levels_keep_small_p(technique, factor):
    """INT8: each tile has all codes. NVFP4: a scale of E4M3 has no normal numbers below 2^-6, so
    blocks of p below 6 * 2^-6 need the second level."""
    p = torch.rand(64, 128) / 100
    p[:, 0] = 1 if technique["pv"] == "nvfp4" else 0.01
    one, two = (
        relative_l1(lab.quantize_p(p, Technique(**technique, two_level_p=each)), p)
        for each in (False, True)
    )
    assert one > factor * two


def test_what_is_refused():
    fp22 = {"pv": "e4m3", "v_scale": "per_channel", "accumulator": "fp22"}
    for changes, message in (
        ({"qk": "int8"}, "granularity must be one of .*with qk='int8', got None"),
        ({"smooth_q": 1}, "smooth_q must be one of"),
        ({"rotation": 48}, "rotation must be one of"),
        ({"pv": "e4m3"}, "v_scale must be one of"),
        ({"pv": "fp16", "two_level_p": True}, "two_level_p must be one of"),
        ({**INT8_PV, "accumulator": "fp22"}, "accumulator must be one of"),
        (fp22 | {"interval": 48}, "interval must be one of .*got 48"),
    ):
        with pytest.raises(ValueError, match=message):
            Technique(**changes)
    q, k, v = draw(N=16)
    for args, message in (
        ((q[0], k, v, SAGE1), r"must be \[B, H, N, D\]"),
        ((q[:, :1], k, v, SAGE1), "one B, H and D"),
        ((q, k, v, "sage1"), "must be a Technique or a Recipe"),
        ((q, k, v, Technique(rotation=128)), "multiple of 128 for this rotation, got 64"),
        ((*(x[..., :40] for x in (q, k, v)), SAGE3), "multiple of 16 for this qk, got 40"),
    ):
        with pytest.raises(ValueError, match=message):
            lab.attend(*args)


# -- families and tables ----


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_drawn_again_alike_and_are_what_they_say(family):
    first, again, other = (lab.draw(family, seed, 2, 256, 64) for seed in (0, 0, 1))
    assert all(x.equal(y) and not x.equal(z) for x, y, z in zip(first, again, other))
    assert all(x.shape == (1, 2, 256, 64) and x.dtype == torch.bfloat16 for x in first)
    q, k, v = (x[0].double() for x in first)
    centred = v - v.mean(1, keepdim=True)
    p = (q @ k.mT / 8).softmax(-1).mean(1).topk(4)  # [H, 4]
    seen = {
        "channel_bias": k.mean(1).abs().mean() > 4 and q.mean(1).abs().mean() > 1,
        "k_bias": k.mean(1).abs().mean() > 4 and q.mean(1).abs().mean() < 0.2,
        "biased_v": v.mean(1).sub(8).abs().max() < 0.5,
        "token_outliers": 1 < (k.norm(dim=2) > 60).sum() <= 20,
        "sinks": p.values.sum(-1).min() > 0.2 and p.indices.sort().values.eq(torch.arange(4)).all(),
        "real_like": (centred[:, 1:] * centred[:, :-1]).mean() > 0.8 * centred.square().mean(),
    }
    names = [name for name, holds in seen.items() if holds]
    assert names == ([family] if family in seen else [])


def test_a_few_channels_of_each_head_are_strong():
    """Their sizes over the others', and how many there are."""
    for family, count, factor, of in (
        ("k4x6", 4, 6, "k"), ("k2x12", 2, 12, "k"), ("k1x60", 1, 60, "k"), ("qk4x4", 4, 4, "qk"),
    ):  # fmt: skip
        for name, x in zip("qkv", lab.draw(family, 0, 4, 4096, 64)):
            size = x[0].double().square().mean(1).sqrt()  # [H, D]
            strong = size > 2
            assert strong.sum(1).tolist() == [count * (name in of)] * 4
            assert_close(size, torch.where(strong, float(factor), 1.0).double(), atol=0, rtol=0.05)
        q, k = (x[0].double().norm(dim=1) for x in lab.draw(family, 0, 4, 4096, 64)[:2])
        assert len({tuple(each.topk(count).indices.tolist()) for each in k}) > 1  # not one for all
        assert of == "k" or q.topk(4).indices.sort().values.equal(k.topk(4).indices.sort().values)


def test_rope_follows_what_is_strong():
    """It turns pairs of channels, q and k alike; v has none."""
    q, k, v = (x.double() for x in lab.draw("qk4x4", 0, 2, 256, 64))
    *turned, v_rope = (x.double() for x in lab.draw("qk4x4_rope", 0, 2, 256, 64))
    assert v.equal(v_rope)
    for x, y in zip((q, k), turned):
        a, b = (torch.complex(*each.chunk(2, -1)) for each in (x, y))
        n, i = torch.arange(256)[:, None], torch.arange(32)
        assert_close(b, a * torch.exp(1j * n * 10000.0 ** (-i / 32)), atol=0.02, rtol=0.02)


def test_a_few_tokens_are_strong_and_sinks_may_be_anywhere():
    for family, count, factor, of in (("key1x6", 1, 6, "k"), ("v4x15", 4, 15, "v")):
        for name, x in zip("qkv", lab.draw(family, 0, 4, 512, 128)):
            size = x[0].double().square().mean(2).sqrt()  # [H, N]
            assert (size > 2).sum(1).tolist() == [count * (name == of)] * 4
            assert_close(size[size > 2], torch.full_like(size[size > 2], factor), atol=0, rtol=0.2)
    q, k, v = (x[0].double() for x in lab.draw("sinks_spread", 0, 4, 512, 64))
    p = (q @ k.mT / 8).softmax(-1).mean(1).topk(4)  # [H, 4]
    assert p.values.sum(-1).min() > 0.2 and p.indices.min() > 3
    small = v.norm(dim=2).topk(4, largest=False)
    assert small.indices.sort().values.equal(p.indices.sort().values) and small.values.max() < 1


def test_tables_are_printed_and_kept(tmp_path, capsys):
    path = tmp_path / "results" / "cpu" / "found.json"
    args = "--families channel_bias --N 128 --D 64 --heads 1 --layers 2 --models --tables".split()
    args += accuracy.tables(64)
    assert accuracy.main([*args, "--device", "cpu", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    tables = accuracy.tables(64)
    assert {row["table"] for row in rows} == set(tables)
    assert len(rows) == sum(len(t.entries) * (3 if t.over_n else 1) for t in tables.values())
    for row in rows:
        assert row["worst"]["rel_l1"] >= row["average"]["rel_l1"] > 0
        assert row["worst"]["cos_sim"] <= row["average"]["cos_sim"] <= 1 + 1e-9
    text = capsys.readouterr().out
    assert all(table.title in text for table in tables.values())
