"""bench/sparse.py, video.py, lists.py and packed.py: what they measure, their rows, their tables."""

import dataclasses
import itertools
import json
import math

import pytest
import support
import torch
import torch.nn.functional as F

from bench import lists, packed, pages, sparse, trained, video
from bench.capture import attending
from bench.sparse import Case
from bench.trained import Size

TINY = Size(1, 1, 16, 512, 2, 2, 2)


def smooth(N, heads=2, D=8):
    """q, k, v of tokens that resemble their neighbours."""
    return torch.randn(3, 1, heads, N, D).cumsum(3).div(3).unbind(0)


SOME = slice(1, None, 6)  # every sixth of 212 queries: a tile's second and the last


def naive(q, k, v, seen, tail, block, bug=""):
    """`sparse.attend` in fp64, a query and a key at a time, with a bug; of the queries of SOME."""
    q, k, v = (x.double() for x in (q, k, v))
    k, out, s = k - k.mean(2, keepdim=True), torch.empty_like(q), q.shape[3] ** -0.5
    for h, i in itertools.product(range(q.shape[1]), range(q.shape[2])[SOME]):
        tile, query = i // 128, q[0, h, i]
        centroid = q[0, h, 128 * tile : 128 * tile + 128].mean(0)
        sees = seen[0, h, tile].tolist()
        terms = [((s * query @ k[0, h, j]).exp(), v[0, h, j]) for j, it in enumerate(sees) if it]
        for first in range(0, len(sees) * (tail != "drop"), block):
            members = range(first, min(first + block, len(sees)))
            others = [j for j in members if not sees[j]]
            n = len(others)
            if bug == "log n omitted":
                n = min(n, 1)
            elif bug == "the last block is whole":
                n += (n > 0) * (block - len(members))
            elif bug == "a computed block is in the tail":
                n = n or len(members)
            elif bug == "keys of both count twice":
                n = n and len(members)
            if not n:
                continue
            its = k[0, h, list(members)]
            mean, at = its.mean(0), centroid if tail == "tile" else query
            weight = n * (s * at @ mean).exp()
            if tail == "variance":
                weight *= (s**2 / 2 * (query**2 * its.var(0, correction=0)).sum()).exp()
            elif tail == "scout":
                mass = sum((s * centroid @ (k[0, h, j] - mean)).exp() for j in others)
                weight = (s * query @ mean).exp() * mass
            terms.append((weight, v[0, h, list(members)].mean(0)))
        out[0, h, i] = sum(w * value for w, value in terms) / sum(w for w, _ in terms)
    return out[:, :, SOME]


def drawn_keys(N):
    """Half of the blocks, the last of them only for one head's first tile, and ten single keys."""
    kept = torch.rand(1, 2, -(-N // 128), -(-N // 64)) < 0.5
    kept[..., -1] = False
    kept[0, 0, 0, -1] = kept[..., 0] = True
    seen, tokens = sparse.keys_of(kept, N), torch.zeros(1, 2, -(-N // 128), N, dtype=torch.bool)
    return seen | tokens.scatter(3, torch.randint(N, (*tokens.shape[:3], 10)), True)


@pytest.mark.parametrize("block", [64, 32])
@pytest.mark.parametrize("tail", sparse.TAILS)
def test_attention_is_the_formula(tail, block):
    q, k, v = smooth(N := 212)
    seen = drawn_keys(N)
    out = sparse.attend(q, k, v, seen, tail, block)
    assert (out[:, :, SOME] - naive(q, k, v, seen, tail, block)).abs().max() < 1e-5
    every = torch.ones_like(seen)
    exact = F.scaled_dot_product_attention(q, k, v)
    assert (sparse.attend(q, k, v, every, tail, block) - exact).abs().max() < 1e-5


@pytest.mark.parametrize(
    "bug",
    [
        "log n omitted",
        "the last block is whole",
        "a computed block is in the tail",
        "keys of both count twice",
    ],
)
def test_the_formula_with_a_bug_is_another(bug):
    q, k, v = smooth(N := 212)
    seen = drawn_keys(N)
    wrong = naive(q, k, v, seen, "row", 64, bug)
    assert (sparse.attend(q, k, v, seen, "row")[:, :, SOME] - wrong).abs().max() > 1e-3


def test_the_other_tails_are_not_the_tail_of_rows():
    q, k, v = smooth(N := 212)
    seen = drawn_keys(N)
    outs = [sparse.attend(q, k, v, seen, tail) for tail in sparse.TAILS]
    assert all((a - b).abs().max() > 1e-4 for a, b in itertools.combinations(outs, 2))
    exact = F.scaled_dot_product_attention(q, k, v)
    errors = {x: (o - exact).square().sum() for x, o in zip(sparse.TAILS, outs, strict=True)}
    assert errors["row"] < errors["drop"]


def test_means_are_of_the_rows_that_there_are():
    x = torch.randn(1, 2, 150, 4)
    expected = torch.stack([part.mean(2) for part in x.split(64, 2)], 2)
    assert torch.allclose(sparse.means(x, 64), expected, atol=1e-6)


@pytest.mark.parametrize("density", [0.5, 0.3, 0.2])
def test_our_rule_has_as_many_blocks_as_are_asked_for(density):
    """Those of the highest pooled scores, but for the diagonal."""
    q, k, _ = smooth(2048)
    kept = sparse.pooled(q, k, density)
    assert kept.shape == (1, 2, 16, 32) and (kept.sum(3) == round(density * 32)).all()
    tiles = torch.arange(16)
    assert kept[:, :, tiles, 2 * tiles].all() and kept[:, :, tiles, 2 * tiles + 1].all()
    scores = sparse.means(q, 128) @ sparse.means(k, 64).mT
    own = torch.arange(32) // 2 == tiles[:, None]
    least = scores.masked_fill(~kept | own, math.inf).amin(3)
    assert (least >= scores.masked_fill(kept, -math.inf).amax(3)).all()
    assert sparse.pooled(q, k, density, similarity=1.0).all()


@pytest.mark.parametrize("share, count", [(0.2, 6), (0.99, 31), (0.01, 1), (1.0, 32)])
def test_slas_rule_keeps_the_highest_products_of_means(share, count):
    """As many as `int` says, without a diagonal; values and means are exact in bf16."""
    q, k = torch.randint(-2, 3, (2, 1, 2, 2048, 8)).float()
    k[:, :, 1024:] = -k[:, :, :1024]  # of mean 0
    kept = sparse.sla(q, k, share)
    assert kept.shape == (1, 2, 16, 32) and (kept.sum(3) == count).all()
    q_mean, k_mean = (sparse.means(x, n).bfloat16() for x, n in ((q, 128), (k, 64)))
    scores = (q_mean.float() @ k_mean.float().mT).bfloat16()
    least = scores.masked_fill(~kept, math.inf).amin(3)
    assert (least >= scores.masked_fill(kept, -math.inf).amax(3)).all()
    in_fp32 = sparse.sla(q + torch.randn_like(q), k, share, torch.float32)
    assert (in_fp32.sum(3) == count).all()


@pytest.mark.parametrize("group", [64, 16, 1])
def test_more_keys_are_the_groups_of_the_highest_scores_that_are_not_seen(group):
    q, k, _ = smooth(N := 512)
    seen = sparse.keys_of(torch.rand(1, 2, 4, 8) < 0.5, N)
    found = sparse.with_more(q, k, seen, group, sparse.MORE)
    assert (found & seen).sum() == seen.sum() and ((found & ~seen).sum(3) == 64).all()
    for h, m in itertools.product(range(2), range(4)):
        centroid, scores = q[0, h, 128 * m : 128 * m + 128].mean(0), {True: [], False: []}
        for first in range(0, N, group):
            here = slice(first, first + group)
            if not seen[0, h, m, here].any():
                its = found[0, h, m, here]
                assert its.all() or not its.any()
                scores[its[0].item()].append((centroid @ k[0, h, here].mean(0)).item())
        assert min(scores[True]) >= max(scores[False]) - 1e-5


def test_listed_blocks_are_served_by_the_op():
    q, k, v = smooth(N := 512, D=16)
    kept = torch.rand(1, 2, 4, 8) < 0.5
    kept[..., 0] = True
    exact = sparse.attend(q, k, v, sparse.keys_of(kept, N))
    out = sparse.served(q, k, v, kept)
    assert (out - exact).norm() / exact.norm() < 0.05
    other = sparse.attend(q, k, v, sparse.keys_of(kept.roll(1, 3), N))
    assert (out - other).norm() / exact.norm() > 0.1


# -- the model ----


@pytest.mark.parametrize("shape", [(4, 8, 16), (3, 5, 6), (1, 16, 16)])
def test_cubes_list_each_token_once_and_neighbours_together(shape):
    order = video.cubes(shape).tolist()
    assert sorted(order) == list(range(math.prod(shape)))
    places = [*itertools.product(*map(range, shape))]
    cubes = [tuple(x // 4 for x in places[i]) for i in order]
    assert [key for key, _ in itertools.groupby(cubes)] == sorted(set(cubes))


def test_positions_turn_by_frame_row_and_column():
    angles = video.positions((2, 3, 5), 16)
    assert angles.shape == (30, 8)
    apart = angles.view(2, 3, 5, 8)
    for axis, planes in enumerate(([0, 1, 2, 3], [4, 5], [6, 7])):
        step = apart.diff(dim=axis).flatten(0, 2)
        others = [i for i in range(8) if i not in planes]
        assert (step[:, planes[0]] == 1).all() and not step[:, others].any()


def test_a_token_is_a_patch_of_a_frame():
    model = video.VideoDiT(dataclasses.replace(TINY, layers=0))
    x, times, labels = torch.randn(1, 2, 64, 64), torch.zeros(1), torch.zeros(1, dtype=torch.long)
    with torch.no_grad():
        before = model(x, times, labels)
        x[0, 1, 20:24, 40:44] += torch.randn(4, 4)
        changed = model(x, times, labels) != before
    assert changed[0, 1, 20:24, 40:44].all() and changed.sum() == 16


def test_videos_move_as_their_class_says():
    drawn, labels = video.videos(64, 4, torch.Generator().manual_seed(0))
    assert drawn.shape == (64, 4, 64, 64) and drawn.abs().max() <= 1
    assert set((labels // video.DIRECTIONS).tolist()) == set(range(video.KINDS))
    later = drawn[labels == 0][:, 1:]  # plain discs, to the right
    moved = [(drawn[labels == 0][:, :-1].roll(d, 3) - later).square().mean() for d in (2, -2)]
    assert moved[0] < 0.5 * moved[1]


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    """More than are dense."""
    for module in (sparse, trained, video):
        monkeypatch.setattr(module, "EULER", 5)


def untrained(size=TINY):
    torch.manual_seed(0)
    model = video.VideoDiT(size).eval().requires_grad_(False)
    x, labels = torch.randn(2, video.frames_of(size), 64, 64), torch.tensor([0, 5])

    def run(model):
        found = x
        for step in range(sparse.EULER):
            times = torch.full((2,), 1 - step / sparse.EULER)
            found = found - model(found, times, labels) / sparse.EULER
        return found

    def score(out, exact):
        error = (out - exact).square().mean().item()
        return {"psnr": -10 * math.log10(error) if error else None}

    inputs = lambda level: (x, torch.full((2,), level), labels)  # noqa: E731
    loss = lambda model: model(*inputs(0.5)).square().mean()  # noqa: E731
    return video.Subject(model, run, score, inputs, loss, 1, "")


@pytest.mark.parametrize("order", sparse.ORDERS)
def test_of_all_blocks_samples_are_the_dense_models(order):
    subject = untrained()
    exact = subject.run(subject.model)
    attention = sparse.Sparse(Case(order, "row tail of 64", 1.0), subject)
    with attending(attention):
        out = subject.run(subject.model)
    assert (out - exact).abs().max() < 1e-4
    assert torch.stack(attention.densities).tolist() == [1.0] * sparse.EULER
    some = sparse.Sparse(Case(order, "drop", 0.5), subject)
    with attending(some):
        assert (subject.run(subject.model) - exact).abs().max() > 1e-3


def test_the_first_steps_are_dense():
    subject, found = untrained(), {}
    exact = subject.run(subject.model)
    for steps in (0, 3, sparse.EULER):
        attention = sparse.Sparse(Case("cubes", "drop", 0.5, steps), subject)
        with attending(attention):
            out = subject.run(subject.model)
        found[steps] = torch.stack(attention.densities).tolist()
        assert torch.equal(out, exact) == (steps == sparse.EULER)
    assert found[3] == [1.0] * 3 + [0.5] * 2 and found[0] == [0.5] * 5


def test_a_row_for_each_case_and_none_beyond_the_budget(capsys):
    rows = list(sparse.measure(untrained(), sparse.cases()))
    assert [(row["order"], row["way"], row["asked"], row["dense_steps"]) for row in rows] == [
        *sparse.cases()
    ]
    assert capsys.readouterr().out.count("density") == len(rows)
    assert all(("snr 0.5" in row) == (row["dense_steps"] == 0) for row in rows)
    assert json.loads(json.dumps(rows)) == rows
    text = sparse.table(rows)
    assert text.count("| cubes, row tail of 64 |") == 2
    assert sparse.gains(rows, "")["gains"].keys() == sparse.GAINS.keys()
    assert not list(sparse.measure(untrained(), sparse.cases(), until=0.0))
    assert not sparse.gains(rows[:3], "")["gains"]


def test_gains_are_differences_of_rows():
    at = {("cubes", "row tail of 64"): 30, ("cubes", "tile-wide tail"): 28.5,
          ("cubes", "drop"): 26, ("raster", "drop"): 21}  # fmt: skip
    rows = [
        {"order": order, "way": way, "asked": x, "dense_steps": steps, "psnr": psnr + 9 * x + steps}
        for (order, way), psnr in at.items() for x in sparse.DENSITIES for steps in (0, 3)
    ]  # fmt: skip
    row = sparse.gains(rows, "of 9 steps")
    lines = sparse.gains_table([row, {**row, "gains": dict.fromkeys(row["gains"], 0.0)}])
    assert [line.split(" | ")[1:4] for line in lines.splitlines()[2:5]] == [
        ["+4.0", "+0.0", "+2.0"], ["+1.5", "+0.0", "+0.8"], ["+9.0", "+0.0", "+4.5"],
    ]  # fmt: skip
    assert "model 0: of 9 steps; model 1" in lines


def test_the_output_of_attention_in_decibels():
    q, k, v = smooth(300)
    exact = F.scaled_dot_product_attention(q, k, v)
    noise = 0.1 * (exact - v.mean(2, keepdim=True))
    call = sparse.capture(lambda *x: F.scaled_dot_product_attention(*x), (q, k, v))[0]
    assert sparse.snr(lambda q, k, v, _: exact + noise, call) == pytest.approx(20)


def test_a_model_trained_further_is_served_by_its_rule(monkeypatch):
    monkeypatch.setattr(sparse, "FURTHER", {"steps": 2, "rate": 1e-2, "seconds": math.inf})
    monkeypatch.setattr(sparse, "SLA_SHARE", 0.25)
    subject = untrained()
    before = subject.run(subject.model)
    rows = {row["way"]: row["psnr"] for row in sparse.measure_trained(subject, TINY)}
    assert torch.equal(subject.run(subject.model), before)  # a copy was trained
    assert rows["its rule"] is None
    assert rows["its rule, sage2-8b-per-token"] > rows["our rule"]
    assert (
        sparse.trained_table([{"way": "a", "psnr": 30.0, "share": 0.2}]).count("| a | 30.0 |") == 1
    )


def test_the_rule_trains_under_autocast():
    """As on a GPU."""
    q, k, v = (x.requires_grad_() for x in smooth(512))
    with torch.autocast("cpu", torch.bfloat16):
        out = sparse.by_blocks(lambda q, k: sparse.sla(q, k, 0.3))(q, k, v, False)
    out.float().square().sum().backward()
    assert all(x.grad.isfinite().all() and x.grad.any() for x in (q, k, v))


@pytest.mark.parametrize("enough", [2, 3])
def test_the_whole_run_on_a_model_of_nothing(enough, tmp_path, monkeypatch):
    """Of two videos. Of fewer than `enough` no Frechet distance is told."""
    monkeypatch.setattr(sparse, "ENOUGH", enough)
    monkeypatch.setattr(sparse, "FURTHER", {"steps": 1, "rate": 1e-3, "seconds": math.inf})
    monkeypatch.setattr(sparse, "SIZES", {"cpu": TINY, "cuda": TINY})
    monkeypatch.setattr(sparse, "EYES", dataclasses.replace(TINY, steps=2))
    monkeypatch.setattr(sparse, "CURVES", {})
    monkeypatch.setattr(sparse, "OURS", {})
    sparse.main(["--json", str(tmp_path / "x.json"), "--models", "2"])
    found = pages.newest(tmp_path)
    one, other = (row["gains"] for row in found["sparse-gains"]["rows"])
    assert one.keys() == other.keys() == sparse.GAINS.keys() and one != other  # of another seed
    told, result = enough == 2, found["sparse"]
    assert len(result["rows"]) == 2 * 2 * 4 * 3 and ("Frechet" in result["method"]) == told
    for plan in ("sparse", "sparse-trained"):
        assert all(row.get("frechet", -1) > 0 if told else "frechet" not in row
                   for row in found[plan]["rows"])  # fmt: skip
    shown = {
        "sparse": "cubes, drop",
        "sparse_trained": "its rule",
        "sparse_gains": [*sparse.GAINS][0],
    }
    assert all(f"| {x} |" in pages.TABLES[name]({"cpu": found}) for name, x in shown.items())


# -- corrections ----


@pytest.mark.parametrize(
    "way, share, more",
    [
        ("drop", 0, 0),
        ("row tail of 32", 0, 4.0),
        ("variance", 0, 1.5 * 1.75),
        ("scout", 0, 1.75 + 80 / 256),
        # Two thousandths of the keys cost their lists; 591 tiles' 16-bit scores go out and back.
        ("row tail, 64 single keys", 1e-3, 1.75 + 80 / 256 + 0.16270 + 1.07231),
    ],
)
def test_what_a_correction_costs(way, share, more):
    found = sparse.cost_ms(sparse.CORRECTIONS[way], 0.3, share)
    assert found == pytest.approx(26.03 + 0.7 + more, abs=1e-4)


def test_gains_of_corrections_are_at_equal_time(monkeypatch):
    """So the row tail itself gains nothing."""
    ways = {"same": sparse.Way("row"), **sparse.CORRECTIONS}
    monkeypatch.setattr(sparse, "CORRECTIONS", ways)
    subject = untrained(dataclasses.replace(TINY, layers=2, N=1024))  # 16 blocks, as GRID
    rows = list(sparse.measure_corrections(subject))
    at = {(row["way"], row["of"], row["asked"]): row for row in rows}
    single = {4: [1024], 16: [1024], 64: [1024, sparse.TOKENS]}  # 256 are more than 1/16
    names = {(name, 1024) for name, way in ways.items() if not way.more}
    names |= {(f"row tail, {n} single keys", of) for n, its in single.items() for of in its}
    assert set(at) == {(*name, asked) for name in names for asked in sparse.DENSITIES}
    for asked, blocks in zip(sparse.DENSITIES, (8, 5, 3), strict=True):
        same = at["same", 1024, asked]
        assert same["time"] == pytest.approx(sparse.cost_ms(ways["same"], blocks / 16) / 80)
        assert same["equal"] == pytest.approx(same["snr"], abs=1e-4)
        dear, cheap = (at["row tail, 64 single keys", of, asked] for of in single[64])
        assert dear["snr"] == cheap["snr"] > same["snr"] and dear["equal"] > cheap["equal"]
        assert dear["time"] == pytest.approx(
            sparse.cost_ms(sparse.CORRECTIONS["row tail, 64 single keys"], blocks / 16, 1 / 16) / 80
        )


def test_the_table_of_corrections(tmp_path, monkeypatch):
    monkeypatch.setattr(sparse, "SIZES", {"cpu": dataclasses.replace(TINY, layers=2)})
    monkeypatch.setattr(sparse, "GRID", (4, 8))
    sparse.main(["--corrections", "--device", "cpu", "--json", str(tmp_path / "x.json")])
    found = pages.newest(tmp_path)
    rows, text = found["corrections"]["rows"], pages.TABLES["corrections"]({"cpu": found})
    assert [*dict.fromkeys(row["N"] for row in rows)] == [512, 2048]
    assert "2 x 16 x 16: " in text and "8 x 16 x 16: " in text and text.count("| drop |") == 2
    row = {"N": 512, "way": "a", "of": 512, "asked": 0.5, "time": 0.25, "snr": 9.0, "equal": 9.5}
    line = "| a | 0.25: 9.0, 9.5, -0.5 |"
    others = [row | {"of": sparse.TOKENS}, row | {"N": 2048, "of": 2048}]
    lines = sparse.corrections_table([row, *others]).splitlines()
    assert lines.count(line) == 2 and line.replace("a", "a, timed as of 75,600", 1) in lines


def test_training_begins_with_the_parameters_of_another_length():
    start = untrained().model
    size = dataclasses.replace(TINY, N=1024, batch=1, steps=1, rate=1e-9)
    subject = video.trained_video(size, torch.device("cpu"), None, start)
    assert subject.model.shape == (4, 16, 16)
    for name, x in start.state_dict().items():
        assert torch.allclose(subject.model.state_dict()[name], x, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("seconds", [math.inf, 1e-9])
def test_training_that_has_no_time_leaves_out_steps(seconds):
    model, steps = torch.nn.Linear(4, 1), []

    def loss_of():
        steps.append(1)
        return model(torch.ones(2, 4)).square().mean()

    size = Size(1, 1, 16, 16, 2, 50, 2, seconds)
    note = trained.train("a", model, loss_of, size, torch.device("cpu"))
    assert len(steps) == (50 if seconds == math.inf else 1) and f" {len(steps)} steps" in note


@pytest.mark.parametrize(
    "setup", [lists.Setup(1000, 192, 128, 0.3, False), lists.Setup(1000, 64, 64, 0.1, False)]
)
def test_lists_name_the_drawn_blocks(setup):
    size = setup.block_q, setup.block_kv
    blocks = lists.named(setup, "cpu")
    assert blocks.shape == (1, lists.H, *(-(-1000 // n) for n in size))
    rows = torch.arange(blocks.shape[2]) * size[0] // size[1]
    assert blocks[:, :, torch.arange(len(rows)), rows].all()
    assert abs(blocks.float().mean() - setup.density) < 0.15
    of = lists.lists_of(blocks, *size)
    listed = torch.zeros_like(blocks)
    for row in itertools.product(*map(range, blocks.shape[:3])):
        listed[row][of.full_kv_indices[row][: of.full_kv_num_blocks[row]].long()] = True
    assert torch.equal(listed, blocks) and not of.kv_num_blocks.any()


def test_near_blocks_of_a_video():
    near = lists.near("cpu")
    assert near.shape == (960, 960) and near.diagonal().all() and torch.equal(near, near.T)
    assert near[0].sum() == 2 * 3 * 4 and near[240 + 6 * 20 + 10].sum() == 3 * 5 * 7


@pytest.mark.parametrize("tail_block", [32, 64])
def test_the_error_of_attention_with_a_tail(tail_block):
    setup = lists.Setup(300, 128, 64, 0.4, False, 64)
    q, k, v = torch.randn(3, 1, lists.H, 300, 64)
    blocks = lists.named(setup, "cpu")
    of = lists.lists_of(blocks, 128, 64)._asdict()
    given = dict(scale=64**-0.5, recipe="sage1-per-token")
    outs = [support.sdpa(q, k, v, **given, **of | {"tail_block": n})[0] for n in (None, tail_block)]
    found = [lists.error(out, q, k, v, blocks, (128, 64), tail_block) for out in outs]
    assert found[1] < 0.03 and found[0] > 0.1


def test_a_row_of_what_a_tail_costs():
    names = "SDPA", "dense", "lists", "tail 32", "tail 64", "prepared", "prepared 32", "prepared 64"
    times = {name: {"ms": n + 1.0} for n, name in enumerate(names)}
    (row,) = lists.table_of_tails([{"N": 300, "density": 0.31, "times": times}]).splitlines()[2:]
    assert [x.strip() for x in row.strip("|").split("|")] == [
        "300", "31%", "1.000", "2.000", "3.000", "4.000", "5.000", "50.00%", "100.00%", "6.000",
        "7.000", "8.000",
    ]  # fmt: skip


@pytest.mark.parametrize("wrong", [False, True])
def test_the_error_of_attention_by_lists(wrong):
    setup = lists.Setup(300, 128, 64, 0.4, False, 16)
    q, k, v = torch.randn(3, 1, lists.H, 300, 16)
    blocks = lists.named(setup, "cpu")
    mask = blocks.repeat_interleave(128, 2)[:, :, :300].repeat_interleave(64, 3)[..., :300]
    out = F.scaled_dot_product_attention(q, k, v, mask ^ wrong)
    assert (lists.error(out, q, k, v, blocks, (128, 64)) < 1e-5) != wrong


class AtOnce:
    """bench.measure.Runner without a clock."""

    def __init__(self, provider, sets):
        self.call = lambda: provider.call(*provider.prepare(*sets[0]))
        self.call()

    def output(self):
        return self.call()


@pytest.mark.parametrize("wrong", [False, True])
def test_a_layout_is_timed_beside_copies_that_give_the_same(monkeypatch, wrong):
    monkeypatch.setattr(lists, "Runner", AtOnce)
    monkeypatch.setattr(lists, "H", 2)
    monkeypatch.setattr(
        lists, "interleave", lambda runners, *_: {name: [2.0, 3.0] for name in runners}
    )
    if wrong:
        monkeypatch.setattr(
            lists, "by_op", lambda visibility, perm=None, by_op=lists.by_op: by_op(visibility)
        )
        with pytest.raises(SystemExit, match="by its order a call is not what it is by copies"):
            lists.measure_layout(0.3, "cpu", 2, 1.0, (2, 12, 16))
        return
    row = lists.measure_layout(0.3, "cpu", 2, 1.0, (2, 12, 16))
    assert len(row["times"]) == 9
    table = lists.table_of_layout([row]).splitlines()
    assert table[2].split("|")[1:-1] == [
        " 2 x 12 x 16 ", f" {row['density']:.0%} ", " op ", " 2.500 ", " 2.500 ", " 1.0000 ", " 1.0000 "
    ]  # fmt: skip


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("name, H", [("three", 16), ("drawn", 4)])
def test_documents_are_timed_beside_loops_and_torchs_op(monkeypatch, wrong, name, H):
    def varlen(q, k, v, *_, window_size):
        assert window_size == (-1, 0) and q.shape == k.shape == v.shape
        return q

    monkeypatch.setattr(packed, "Runner", AtOnce)
    monkeypatch.setattr(packed, "varlen_attn", varlen)
    times = {"ours": 2.0, "varlen": 5.0, "SDPA, loop": 3.0, "ours, loop": 1.6}
    monkeypatch.setattr(
        packed, "interleave", lambda runners, *_: {x: [times.get(x, 1.0)] for x in runners}
    )
    monkeypatch.setattr(packed, "hopper_tile", lambda a: None)
    case = packed.Case(name, [130, 5, 200], True, H, 2, 64)
    if wrong:
        monkeypatch.setattr(packed, "CAUSAL", packed.FULL)
        with pytest.raises(SystemExit, match=f"wrong at Case.*{name}.*: relative L1"):
            packed.measure(case, "cpu", 1, 1.0)
        return
    row = packed.measure(case, "cpu", 1, 1.0)
    known = [" 1.000 ", " 1.000 ", " 1.000 ", " 1.600 ", " 2.000 ", " 2.50x (2.50 to 2.50) ", "  "]
    if name == "drawn":
        known = ["  "] * 4 + known[4:]
    of_sdpa = " 1.50x (1.50 to 1.50) " if name == "three" else "  "
    assert packed.table([row]).splitlines()[2].split("|")[1:-1] == [
        " three " if name == "three" else " 3, 200 at most ", " 335 ", " yes ", f" {H}, 2, 64 ",
        *known, of_sdpa, f" {row['rel_l1']:.2%} ",
    ]  # fmt: skip


def test_drawn_packings_are_some_that_auto_takes():
    for _ in range(200):
        case = packed.drawn()
        assert sum(case.lengths) >= packed.DOCUMENTS_FROM * len(case.lengths)
        assert 2**11 <= sum(case.lengths) < 2**17 and min(case.lengths) > 0
