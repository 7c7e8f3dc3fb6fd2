"""Timing: what ``python -m sage_inductor tune`` measures, writes and reads back, and what
``mode="max-autotune"`` measures of a call."""

import concurrent.futures
import contextlib
import dataclasses
import datetime
import functools
import itertools
import json
import logging
import re
import threading
import time
import warnings
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from support import cos_sim, relative_l1
from support import sdpa as support_sdpa
from torch.nn.attention import SDPBackend, sdpa_kernel

import sage_inductor
from sage_inductor import backend
from sage_inductor.__main__ import main
from sage_inductor.choose import cost, families, tables, timing
from sage_inductor.choose.candidates import Candidate
from sage_inductor.choose.cost import Sizes
from sage_inductor.choose.families import Family, Table
from sage_inductor.choose.timing import BenchmarkCase, agreed
from sage_inductor.cli.tune import lines
from sage_inductor.ops import gpus, launch
from sage_inductor.ops.attention import tiles
from sage_inductor.ops.call_shape import CallShape
from sage_inductor.ops.recipe import NAMED
from sage_inductor.ops.visibility import FULL, Band

GPU = tables.H200
PROPERTIES = SimpleNamespace(multi_processor_count=132)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """An H200 that is not there, its tables in a folder of the test's."""
    monkeypatch.setenv("SAGE_INDUCTOR_TABLES", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: GPU)
    monkeypatch.setattr(gpus, "capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: PROPERTIES)
    monkeypatch.setattr(timing, "measure", clock)
    monkeypatch.setattr(timing, "start_compiling", lambda cases: [])
    as_another_process()
    yield torch.device("cuda", 0)
    as_another_process()


def as_another_process():
    """As if this process had just begun."""
    tables._of_this_process.clear()
    timing._unmeasurable.clear()
    tables.forget()


def clock(case, rounds=3):
    """SDPA takes N_q N_kv, a recipe a fixed time more and half of that; causal ones never win."""
    B, H, N, _ = case.shape.q
    sdpa = B * H * N * case.shape.k[2] * 1e-9
    ours = 2 * sdpa if case.shape.band == Band(None, 0) else 0.1 + sdpa / 2
    sdpas = {"CUDNN_ATTENTION": sdpa, "FLASH_ATTENTION": 2 * sdpa}
    return sdpas | dict.fromkeys(case.candidates, ours)


def tuned(gpu, head_dims=(64,), kinds=("full",)):
    return timing.tune(gpu, head_dims, kinds)


FULL_64 = Family(64, 64, "full")
LONG = Sizes(1, 24, 24, 30000, 30000)


def predicted(family=FULL_64, sizes=LONG, recipe="sage2-8b-rotated", gpu=GPU):
    table = tables.with_times(gpu, family, recipe)
    return table and table.predict(family, recipe, sizes)


def test_a_table_is_measured_written_and_read(gpu):
    before = predicted()
    table = tuned(gpu, (64, 80), ("full", "causal", "window", "keys"))
    assert len(table.families) == 8 and len(table.families[FULL_64]) == len(timing.MANY)
    windows = {sizes.left for sizes in table.families[Family(64, 64, "window")]}
    assert windows == {1023, 4095, 255, 254, 174, 127, 95}  # a quarter of 1024, 1023, 700, ...
    path = tables.save(table)
    assert re.fullmatch("nvidia-h200-[0-9a-f]{8}.json", path.name), path
    written = json.loads(path.read_text())
    assert path == tables.path_of(GPU)
    assert (written["capability"], written["processors"]) == ([9, 0], 132)
    now = predicted()
    assert now != before and abs(now.sdpa / (24 * 30000**2 * 1e-9) - 1) < 0.05
    assert now.wins and not predicted(sizes=Sizes(1, 8, 8, 1024, 1024)).wins
    assert not predicted(Family(80, 80, "causal"), LONG._replace(right=0)).wins
    of_65 = predicted(Family(65, 65, "full"))
    assert of_65 and of_65 != predicted(Family(72, 72, "full"))  # rows 16 bytes apart, or not
    assert predicted(Family(72, 72, "full")) == predicted(Family(80, 80, "full"))
    assert tables.with_times(GPU, FULL_64, "sage2-8b") is not None
    assert tables.with_times(GPU, FULL_64, "sage1") is None
    (users, built_in) = tables.known(GPU)
    assert users.families.keys() == table.families.keys()
    assert users.families[FULL_64] == table.families[FULL_64]
    assert built_in is tables.built_in()[GPU]


def test_what_is_measured_again_takes_the_place_of_what_was(gpu):
    tables.save(tuned(gpu, kinds=("full", "causal")))
    other = tuned(gpu)
    for ms in other.families[FULL_64].values():
        ms["CUDNN_ATTENTION"], ms["sage1"] = 7.0, 9.0
        del ms["sage2-8b"]
    tables.save(other)
    found = tables.known(GPU)[0].families
    assert set(found) == {FULL_64, Family(64, 64, "causal")}
    for ms in found[FULL_64].values():
        assert ms["CUDNN_ATTENTION"] == 7.0 and ms["sage1"] == 9.0 and "sage2-8b" in ms


def family(**given):
    row = [1, 8, 8, 1024, 1024, None, None, {"sage1": 1.0, "CUDNN_ATTENTION": 1.0}]
    given = {"head_dim": 64, "head_dim_v": 64, "kind": "full", "times": [row]} | given
    return {"families": [given]}


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"versions": {"triton": "3.0.0"}}, "versions {'triton': '3.0.0'}, this is {"),
        ({"gpu": "NVIDIA H100"}, f"gpu NVIDIA H100, this is {GPU}"),
        ({"families": None}, "not iterable"),
        ({"capability": [9]}, "not enough values"),
        ({"families": [{"kind": "full"}]}, "KeyError: 'head_dim'"),
        (family(times=[[1, 8, 8, {}]]), "missing 2 required positional arguments"),
        (family(times=[[1, 8, 8, 1024, 1024, None, None, 1.0]]), "not iterable"),
        ("{", "Expecting property name"),
    ],
)
def test_a_table_written_otherwise_is_ignored_as_a_whole(gpu, change, reason, caplog):
    before = predicted()
    path = tables.path_of(GPU)
    path.write_text(json.dumps(tuned(gpu).to_json()))
    tables.forget()
    assert predicted() != before
    text = change if change == "{" else json.dumps(tuned(gpu).to_json() | change)
    path.write_text(text)
    tables.forget()
    with caplog.at_level(logging.WARNING, "sage_inductor"):
        for _ in range(2):
            assert predicted() == before
    (message,) = [record.getMessage() for record in caplog.records]  # once
    assert f"{path} is ignored" in message and "tune writes it anew" in message
    assert reason in message


def test_environments_keep_their_tables_apart(gpu, monkeypatch, caplog):
    """What one measures takes nothing from another; who has none is told once, of this GPU's."""
    ours = tables.save(tuned(gpu))
    tables.save(dataclasses.replace(tuned(gpu), gpu=f"{GPU} NVL"))
    assert len(tables.known(GPU)) == 2 and not caplog.records
    with monkeypatch.context() as other:
        other.setattr(families, "source_tag", lambda: "0.1.0+another")
        for _ in range(2):
            tables.forget()
            assert tables.known(GPU) == (tables.built_in()[GPU],)
        (message,) = [record.getMessage() for record in caplog.records]
        assert f"not used: {ours} (python" in message and "0.1.0+another" in message
        theirs = tables.save(tuned(gpu, (80,)))
        assert theirs != ours and len(tables.known(GPU)) == 2
    tables.forget()
    assert {each.head_dim for each in tables.known(GPU)[0].families} == {64}


@pytest.mark.parametrize("error", [None, RuntimeError, PermissionError])
def test_a_folder_that_cannot_be_read_is_ignored_with_one_warning(
    gpu, no_folder, error, caplog, monkeypatch
):
    """A file is in its place, or there is no home."""

    def home():
        raise error("Could not determine home directory.")

    if error:
        monkeypatch.delenv("SAGE_INDUCTOR_TABLES")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(tables.Path, "home", home)
    for kind in ("full", "causal"):
        assert predicted(Family(64, 64, kind))
    assert [record.getMessage().count("is ignored") for record in caplog.records] == [1]


def test_what_is_in_force_is_of_one_gpu_flash_attention_and_kernel(gpu, monkeypatch):
    """A GPU of the same capability has another table."""
    assert tables.in_force() == (families.TORCHS_FLASH,)
    tables.save(tuned(gpu))
    assert timing.calibrate(gpu, NEW, *PER_TOKEN) is None  # this process's, beside the user's
    assert len(tables.known(GPU)) == 3 and tables.known("NVIDIA H100") == ()
    flash, *ours = tables.in_force()
    assert flash == families.TORCHS_FLASH
    assert ours == [repr(table.families) for table in tables.known(GPU)[:2]]
    with monkeypatch.context() as other:
        other.setattr(tiles, "hopper_unavailable", lambda capability: "lost")
        assert len(tables.known(GPU)) == 2  # the built-in one is of the Hopper kernel
    monkeypatch.setattr(families, "current_flash_attention_impl", lambda: "FA3")
    assert tables.known(GPU) == () and tables.in_force() == ("FA3",)


def test_the_command_writes_every_gpus_table(gpu, capsys):
    assert main(["tune", "--head-dims", "64", "--kinds", "full", "causal", "full-training"]) == 0
    printed, shown = capsys.readouterr()
    assert "step 2 of 3: head_dim 64, causal\n" in shown
    for kind, recipe in (("", "sage2-8b-rotated"), (", full-training", "fp8-backward")):
        first = rf"^{GPU}: head_dim 64{kind}: {recipe} from N=\d+ with B\*H >= 128, "
        assert re.search(rf"{first}.* \(\+-\d\.\d%\)$", printed, re.M), printed
    assert f"{GPU}: head_dim 64, causal: sage2-8b from no length" in printed
    kinds = [family.kind for family in tables.known(GPU)[0].families]
    assert kinds == ["full", "causal", "full-training"]


def test_what_trains_is_tuned_where_there_is_something_that_trains_it(gpu, monkeypatch):
    assert "full-training" in timing.TUNED_KINDS
    table = tuned(gpu, (96, 256), ("full", "full-training"))
    assert list(table.families) == [FULL_96, FULL_96_TRAINING, Family(256, 256, "full")]
    times = table.families[FULL_96_TRAINING]
    assert len(times) == len(timing.MANY)
    assert {*times[next(iter(times))]} == {"CUDNN_ATTENTION", "FLASH_ATTENTION", "fp8-backward"}
    assert "fp8-backward" not in {name for ms in table.families[FULL_96].values() for name in ms}
    with monkeypatch.context() as other:
        other.setattr(gpus, "capability", lambda device: (8, 9))
        assert tuned(gpu, (96,), ("full-training",)).families == {}
    monkeypatch.setattr(tiles, "hopper_unavailable", lambda capability: "no Gluon")
    assert tuned(gpu, (96,), ("full-training",)).families == {}


FULL_96, FULL_96_TRAINING = (Family(96, 96, kind) for kind in ("full", "full-training"))


def test_what_trains_is_predicted_by_its_own_times(gpu):
    """SDPA computes dK and dV for each head of q: sizes that share k and v are one size to it."""
    tables.save(tuned(gpu, (96,), ("full", "full-training")))
    assert predicted(FULL_96, recipe="fp8-backward") is None
    assert predicted(FULL_96_TRAINING) is None
    found = predicted(FULL_96_TRAINING, recipe="fp8-backward")
    assert found.wins and abs(found.sdpa / (24 * 30000**2 * 1e-9) - 1) < 0.05
    grouped = LONG._replace(H_kv=3)
    assert predicted(FULL_96_TRAINING, grouped, "fp8-backward").sdpa == found.sdpa
    assert predicted(Family(80, 80, "full-training"), recipe="fp8-backward").ours == found.ours
    users = tables.known(GPU)[0]
    assert users.predict(Family(80, 80, "causal-training"), "fp8-backward", LONG) is None
    assert FULL_96_TRAINING.of_sdpa(grouped) == LONG
    assert FULL_96.of_sdpa(grouped) == grouped
    of_causal = Family(96, 96, "causal-training").of_sdpa(grouped._replace(right=0))
    assert of_causal == LONG._replace(right=0)


def test_the_kernels_of_all_families_compile_before_the_first_is_timed(timed, gpu, monkeypatch):
    """Those of a family are waited for. And progress is shown of each."""
    compiling, shown, waited = [], [], []
    monkeypatch.setattr(timing, "start_compiling", lambda cases: compiling.extend(cases) or "jobs")
    monkeypatch.setattr(concurrent.futures, "wait", lambda *args: waited.append((args, len(timed))))

    def progress(families):
        assert not timed and {case.shape.q[3] for case in compiling} == {64, 80}
        assert len(compiling) == sum(map(len, table_of.values()))
        for each in families:
            shown.append(each)
            yield each

    table_of = {D: Family(D, D, "full").sizes(timing.MANY) for D in (64, 80)}
    table = timing.tune(gpu, (64, 80), ("full",), progress)
    assert compiling[: len(timed)] == timed and compiling[len(timed) :] == timed
    assert shown == list(table.families) and len(shown) == 2
    assert waited == [(("jobs", timing.LONGEST), n) for n in (0, len(table_of[64]))]


def test_what_tells_tiles_apart_is_measured(gpu):
    """Tiles that run at once, and by each tile fewer heads of k than of q."""
    at_once, grouped = 0, set()
    for kind in ("full", "causal"):
        for sizes in Family(128, 128, kind).sizes(timing.MANY):
            load = tiles.Load.of(Family(128, 128, kind).shape(gpu, sizes))
            at_once += load.reaches(tiles.AT_ONCE)
            if sizes.H_kv < sizes.H_q and sizes.N_q == sizes.N_kv:
                tile = tiles.hopper((9, 0), "fp8", 128, kind == "causal", load)
                grouped.add((kind, tile.warpgroups))
    assert at_once == 1
    assert grouped == {(kind, n) for kind in ("full", "causal") for n in (1, 3)}


def test_what_was_measured_before_an_interruption_is_kept(gpu, monkeypatch):
    def until_128(case, rounds):
        if case.shape.q[3] == 128:
            raise KeyboardInterrupt
        return clock(case)

    monkeypatch.setattr(timing, "measure", until_128)
    with pytest.raises(KeyboardInterrupt):
        timing.tune(gpu, (64, 128), ("full",), save=tables.save)
    assert set(tables.known(GPU)[0].families) == {FULL_64}


@pytest.fixture
def no_folder(monkeypatch, tmp_path):
    """A file is where the folder of tables would be."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SAGE_INDUCTOR_TABLES", str(tmp_path / "file"))


def test_a_folder_that_cannot_be_written_is_known_before_measuring(gpu, request, capsys):
    path = tables.save(tuned(gpu))
    before = path.read_text()
    tables.check_file(tables.place_of(GPU))
    assert path.read_text() == before
    path.unlink()
    tables.check_file(tables.place_of(GPU))
    assert not path.exists()
    request.getfixturevalue("no_folder")
    assert main(["tune"]) == 2
    error = capsys.readouterr().err
    assert "the table cannot be written" in error and "$SAGE_INDUCTOR_TABLES" in error


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is said without a GPU")
def test_without_a_gpu_nothing_is_measured(capsys):
    assert main(["tune"]) == 2
    assert "torch sees no CUDA device" in capsys.readouterr().err


def test_a_table_half_written_is_never_read(gpu, monkeypatch):
    """A full disk, or a reader while it is written."""
    path = tables.save(tuned(gpu))
    before, write_text = path.read_text(), tables.Path.write_text

    def half(self, text):
        write_text(self, text[: len(text) // 2])
        raise OSError("No space left on device")

    monkeypatch.setattr(tables.Path, "write_text", half)
    with pytest.raises(OSError, match="No space left"):
        tables.save(tuned(gpu, kinds=("causal",)))
    assert path.read_text() == before


def test_sizes_with_a_band_are_self_attention_longer_than_the_band():
    of = {kind: Family(64, 64, kind).sizes(timing.MANY) for kind in cost.TIMED}
    assert of["full-training"] == of["full"] and of["causal-training"] == of["causal"]
    for kind, shapes in (("full", 36), ("keys", 36), ("mask", 36), ("bias", 36), ("causal", 31)):
        right = {0 if kind == "causal" else None}
        assert len(of[kind]) == shapes and {each.left for each in of[kind]} == {None}
        assert {each.right for each in of[kind]} == right
    assert all(each.right == 0 and each.left < each.N_q - 1 for each in of["window"])
    assert all(each.N_q == each.N_kv for each in of["causal"] + of["window"])
    long = {each.left for each in of["window"] if each.N_q > 1024}
    assert long == {1023, 4095} and {each.N_q for each in of["window"]} > {384, 512, 1024}
    for kind in cost.TIMED:
        assert len(Family(64, 64, kind).sizes(timing.FEW)) >= cost.ENOUGH + 2


@pytest.mark.parametrize("kind", cost.TIMED)
def test_what_is_timed_of_a_family_are_calls_of_its_kind(kind, timed, gpu):
    band = (7, 0) if kind == "window" else (None, 0 if "causal" in kind else None)
    recipe = trained_or_not(kind)
    sizes = [Sizes(2, 4, 2, N, 50, *band) for N in range(30, 36)]
    timing.measure_family(gpu, Family(64, 32, kind), (recipe,), sizes)
    mask = {
        "keys": ((2, 1, 1, 50), torch.bool), "mask": ((1, 1, 30, 50), torch.bool),
        "bias": ((1, 1, 30, 50), torch.bfloat16),
    }.get(kind, (None, None))  # fmt: skip
    qkv = (2, 4, 30, 64), (2, 2, 50, 64), (2, 2, 50, 32)
    shape = CallShape(gpu, torch.bfloat16, *qkv, Band(*band), *mask, trains=kind in cost.TRAINED)
    assert timed[0].shape == shape and timed[0].candidates == (Candidate(recipe),)


def test_a_rotated_recipe_takes_the_times_without_rotation_until_it_is_timed():
    """And what rotation adds: at Flux's size 0.0094 ms, 0.0097 measured on an H100."""
    (table,), family = tables.known(tables.H200), Family(128, 128, "full")
    names, flux = ("sage2-8b-per-token", "sage2-8b-rotated"), Sizes(1, 24, 24, 4608, 4608)
    plain, rotated = (table.predict(family, name, flux) for name in names)
    assert rotated.recipe == names[1] and rotated.sdpa == plain.sdpa
    assert rotated.ours - plain.ours == pytest.approx(0.0094, abs=1e-4)
    assert table.error(family, names[1]) == table.error(family, names[0])
    assert table.predict(family, "sage1-rotated", flux) is None
    plain_of = {x: ms[names[0]] for x, ms in table.families[family].items() if names[0] in ms}
    times = {x: {names[1]: 2 * ms} for x, ms in plain_of.items()}
    timed = table.with_families({family: times}).predict(family, names[1], flux)
    assert timed.ours == pytest.approx(2 * plain.ours, rel=1e-3)


def test_the_narrowest_family_stands_for_a_call(gpu):
    wide, narrow = Family(128, 128, "full"), Family(112, 112, "full")
    times = tuned(gpu).families[FULL_64]
    table = Table(GPU, gpus.Gpu((9, 0), 132), {wide: times, narrow: times})
    assert table.find(Family(104, 104, "full"), *PER_TOKEN) == narrow
    assert table.find(Family(120, 120, "full"), *PER_TOKEN) == wide


@pytest.mark.parametrize(
    "measured_D, D, cudnn, flash",
    [
        (256, 256, 1, 1), (256, 200, 1, 1.1), (256, 192, 0.75, 0.75), (256, 136, 0.75, 0.825),
        (128, 72, 1, 0.825), (128, 96, 1, 0.75), (64, 40, 1, 1.1), (72, 72, 1, 1),
        (127, 97, 1, 1.1), (127, 95, 1, 0.75), (127, 65, 1, 0.825), (63, 33, 1, 1.1),
        (63, 57, 1, 1), (255, 249, 1, 1), (255, 190, 0.75, 0.75), (255, 129, 0.75, 0.825),
    ],
)  # fmt: skip
def test_a_narrower_kernel_of_sdpas_takes_less_time(measured_D, D, cudnn, flash, gpu):
    """cuDNN's are for multiples of 64 channels. Flash attention's are for 32, 64, 96, 128, 192 and
    256, and take longer where they are not filled. The others' are for any. What SDPA pads and ours
    reads in single elements, where rows are not 16 bytes apart, is fewer, too."""
    table, read = tuned(gpu, (measured_D,)), D / measured_D if D % 8 else 1
    wide, narrow = (Family(each, each, "full") for each in (measured_D, D))
    by_tile, rivals = families.fits(table, wide, *PER_TOKEN)
    found = table.predict(narrow, *PER_TOKEN, LONG)
    fit = by_tile[families._warpgroups(table.device, narrow, *PER_TOKEN, LONG)]
    assert found.ours == fit.ms(LONG, of_q=read)
    computed = {"CUDNN_ATTENTION": cudnn, "FLASH_ATTENTION": flash}
    times = {name: fit.ms(LONG, computed[name], read, read) for name, fit in rivals.items()}
    assert times.keys() == computed.keys() and found.sdpa == pytest.approx(min(times.values()))
    for name, expected in (*computed.items(), ("EFFICIENT_ATTENTION", 1), ("MATH", 1)):
        ratio = families._channels(name, D) / families._channels(name, measured_D)
        assert ratio == pytest.approx(expected), name
    assert table.predict(Family(D, D, "bias"), *PER_TOKEN, LONG) is None


@pytest.mark.parametrize("kind, own", [("causal", False), ("full", True)])
def test_what_the_preparation_takes_is_told_by_all_tiles_or_by_one(kind, own, gpu):
    """Causal calls ran by one warpgroup with as many rows of q as of k, where it cannot be told; by
    three they did not. Others ran with other lengths of k, which tell it."""
    family, name = Family(128, 128, kind), *PER_TOKEN
    table = tuned(gpu, (128,), (kind,))
    plain, _ = families.fits(tuned(gpu, (128,), (kind,)), family, name)
    times = table.families[family]
    of = {n: [each for each in times if families._warpgroups(table.device, family, name, each) == n]
          for n in (1, 3)}  # fmt: skip
    for each in [each for each in of[1] if each.H_kv < each.H_q]:
        of[1].remove(each)
        del times[each]
    for sizes in times if not own else of[1]:
        times[sizes][name] += 1e-3 * cost.features(sizes, 128, cost.IN_ORDER, 132).prepared
    by_tile, _ = families.fits(table, family, name)
    assert len(of[1]) >= families.ENOUGH_OF_A_TILE and any(x.H_q != x.H_kv for x in of[3])
    assert any(each.N_q != each.N_kv for each in of[1]) == own
    found, of_all = (by_tile[n].coefficients.prepared for n in (1, None))
    assert found == pytest.approx(1e-3, rel=0.05 if own else 0.1) and (found != of_all) == own
    if not own:
        grouped = Sizes(2, 32, 2, 1024, 1024, None, 0)
        more = 1e-3 * 4 * 1024 / 132
        assert by_tile[1].ms(grouped) == pytest.approx(plain[1].ms(grouped) + more, rel=0.15)


@pytest.mark.parametrize("flash", ["FA2", "FA3"])
def test_a_fit_is_told_which_kernels_cut_tiles(flash, gpu, monkeypatch):
    """FlashAttention 2, where tiles are few, and the Hopper kernel, where all keys are seen. What
    the user activates in the first one's place may not."""
    table = tuned(gpu, (64,), ("full", "causal", "keys"))
    monkeypatch.setattr(families, "flash_attention", lambda: flash)
    of_flash = {cost.FLASH} if flash == "FA2" else {cost.IN_ORDER, cost.LONGEST_FIRST}
    for family in table.families:
        by_tile, rivals = families.fits(table, family, *PER_TOKEN)
        cudnn, *rest = rivals.values()
        for n, fit in by_tile.items():
            assert (fit.dealt == cost.LAST_SHARED) == (n == 3 and family.kind == "full")
        assert cudnn.dealt in (cost.IN_ORDER, cost.LONGEST_FIRST)
        assert rest and {fit.dealt for fit in rest} <= of_flash


ROTATED, FAR = "sage2-8b-rotated", (1, 1, 1, 30465, 30465)


@pytest.mark.parametrize(
    "dims, kind, recipe, sizes, expected",
    [
        (64, "causal", ROTATED, (11, 1, 1, 14336, 14336, None, 0), 3),
        (64, "causal", ROTATED, (11, 1, 1, 11264, 11264, None, 0), 1),
        (64, "causal", "sage2-8b", (11, 1, 1, 14336, 14336, None, 0), 0),
        (64, "keys", ROTATED, (1, 1, 1, 1000, 1023), 0), ((64, 128), "full", ROTATED, (1, 1, 1, 30465, 1000), 1),
        (64, "full", ROTATED, (1, 1, 1, 1088, 3520), 3), (64, "full", ROTATED, (1, 4, 4, 1088, 3520), 1),
        (128, "full", ROTATED, (1, 4, 4, 1152, 4672), 2), (128, "full", ROTATED, (1, 1, 1, 16064, 16064, None, 9), 1),
        (128, "full", ROTATED, FAR, 3), (128, "keys", ROTATED, FAR, 1), (128, "bias", ROTATED, FAR, 0),
        (128, "mask", "sage1-per-token", FAR, 0),
        (128, "window", ROTATED, (8, 9, 9, 60000, 60000, 57342, 0), 1),
        (128, "window", ROTATED, (8, 9, 9, 60000, 60000, 57343, 0), 3),
    ],
)  # fmt: skip
def test_a_size_is_of_the_tile_that_it_runs_with(dims, kind, recipe, sizes, expected):
    dims = dims if isinstance(dims, tuple) else (dims, dims)
    gpu, family, sizes = gpus.Gpu((9, 0), 132), Family(*dims, kind), Sizes(*sizes)
    assert families._warpgroups(gpu, family, recipe, sizes) == expected
    other = gpus.Gpu((8, 9), 132)
    assert families._warpgroups(other, family, recipe, sizes) == 0


@pytest.mark.parametrize("short_ones", [families.ENOUGH_OF_A_TILE - 1, families.ENOUGH_OF_A_TILE])
def test_a_tile_is_a_kernel_with_times_of_its_own(short_ones, gpu):
    """Few keys of head_dim 64 run with one warpgroup. With few sizes of it there is one fit for
    both."""
    table, name = tuned(gpu), *PER_TOKEN
    times, short = table.families[FULL_64], []
    for sizes, ms in list(times.items()):
        alone = families._warpgroups(table.device, FULL_64, name, sizes) == 1
        if alone and len(short) == short_ones:
            del times[sizes]
        elif alone:
            short.append(sizes)
            ms[name] *= 7
    by_tile, _ = families.fits(table, FULL_64, name)
    own = short_ones == families.ENOUGH_OF_A_TILE
    assert len(short) == short_ones and by_tile.keys() == ({None, 1, 3} if own else {None, 3})
    for sizes, ms in times.items():
        wrong = abs(table.predict(FULL_64, name, sizes).ours / ms[name] - 1)
        assert wrong < 0.03 or (not own and sizes in short), sizes
    assert (table.error(FULL_64, name) < 0.03) == own


def test_a_prediction_is_as_wrong_as_both_its_fits(gpu):
    table = tuned(gpu)
    times = table.families[FULL_64]
    for i, ms in enumerate(times.values()):
        for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION"):
            ms[name] *= 1.2 if i % 2 else 0.85
    by_tile, rivals = families.fits(table, FULL_64, *PER_TOKEN)
    assert max(by_tile[n].error for n in (1, 3)) < 0.02
    assert min(fit.error for fit in rivals.values()) > 0.1
    for sizes in (LONG, Sizes(2, 8, 8, 3000, 3000)):
        ours = by_tile[families._warpgroups(table.device, FULL_64, *PER_TOKEN, sizes)]
        found = table.predict(FULL_64, *PER_TOKEN, sizes)
        fastest = min(rivals.values(), key=lambda fit: fit.ms(sizes))
        assert found.error == pytest.approx((ours.error**2 + fastest.error**2) ** 0.5)


# -- a family that nothing is known of ----


NEW = Family(48, 32, "full")
PER_TOKEN = ("sage2-8b-rotated",)


def trained_or_not(kind) -> str:
    """A recipe of such calls."""
    return "fp8-backward" if kind in cost.TRAINED else PER_TOKEN[0]


@pytest.fixture
def timed(gpu, monkeypatch):
    """Cases that are timed, by `clock`."""
    cases = []

    def benchmark(case, rounds):
        cases.append(case)
        return clock(case)

    monkeypatch.setattr(timing, "measure", benchmark)
    return cases


def test_a_family_is_measured_once_and_kept_for_other_processes(timed, gpu, caplog):
    assert predicted(NEW) is None
    with mock.patch.object(tables, "save", wraps=tables.save) as saved:
        assert timing.calibrate(gpu, NEW, *PER_TOKEN) is None
    saved.assert_called_once()
    assert predicted(NEW).wins and len(timed) == len(timing.FEW)
    assert timed[0].shape.q == (1, 24, 4096, 48) and timed[0].shape.v == (1, 24, 4096, 32)
    assert [each.recipe for each in timed[0].candidates] == list(PER_TOKEN)
    first, second = (record.getMessage() for record in caplog.records)
    assert "head_dim (48, 32) is measured on NVIDIA H200, once, for about 10 s" in first
    assert f"measured {len(timing.FEW)} sizes" in second
    kept = predicted(NEW)
    as_another_process()
    assert timing.calibrate(gpu, NEW, *PER_TOKEN) is None and predicted(NEW) == kept
    assert len(timed) == len(timing.FEW)


@pytest.mark.parametrize("kind", cost.TIMED)
def test_what_was_measured_of_a_kind_is_known_of_that_kind_alone(kind, timed, gpu, monkeypatch):
    """Also by a process that reads it."""
    recipe, family = trained_or_not(kind), Family(48, 32, kind)
    assert timing.calibrate(gpu, family, recipe) is None
    (sizes,) = family.sizes([LONG[:5]])
    for _ in range(2):
        for other in cost.KINDS:
            found = predicted(dataclasses.replace(family, kind=other), sizes, recipe)
            assert (found is not None) == (other == kind), other
        as_another_process()
    assert {case.shape.kind for case in timed} == {kind}


def test_while_one_process_measures_the_others_wait_for_what_it_finds(timed, gpu, monkeypatch):
    """As processes, threads have locks of their own."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(case, rounds):
        begun.set()
        go_on.wait(600)
        timed.append(case)
        return clock(case)

    monkeypatch.setattr(timing, "measure", slow)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(timing._calibrated, gpu, NEW, *PER_TOKEN)
        assert begun.wait(600)
        second = pool.submit(timing._calibrated, gpu, NEW, *PER_TOKEN)
        time.sleep(0.2)  # in which it would have begun
        waits = not second.done() and not timed
        go_on.set()
        assert waits
        assert first.result()["families"] == second.result()["families"]
    assert len(timed) == len(timing.FEW)


def test_times_of_too_few_sizes_predict_nothing(gpu):
    """As many as a fit needs must be of the recipe, and as many of one backend of SDPA's."""
    sizes = NEW.sizes(timing.FEW)
    for ours, cudnn, flash, known in (
        (5, 5, 0, True), (4, 9, 9, False), (9, 4, 4, False), (9, 9, 2, True)
    ):  # fmt: skip
        tables._of_this_process.clear()
        times = {each: {} for each in sizes}
        of = {"sage1": sizes[:ours], "CUDNN_ATTENTION": sizes[:cudnn]}
        of["FLASH_ATTENTION"] = sizes[len(sizes) - flash :]
        for name, timed_ones in of.items():
            for each in timed_ones:
                times[each][name] = 1.0
        table = Table(GPU, gpus.Gpu((9, 0), 132), {NEW: times})
        tables._of_this_process[GPU, families.flash_attention()] = table
        assert (predicted(NEW, recipe="sage1") is not None) == known
        assert bool(lines(tables.known(GPU)[0])) == known


@pytest.mark.parametrize(
    "measured_D, D, known",
    [
        (128, 128, True), (128, 72, True), (128, 64, False), (128, 121, False), (127, 121, True),
        (127, 128, False), (256, 136, True), (160, 168, False), (63, 33, True), (64, 32, False),
    ],
)  # fmt: skip
def test_a_wider_head_dim_of_the_same_kernel_stands_for_a_narrower_one(measured_D, D, known):
    """Up to twice as wide, its rows aligned as the other's are."""
    wide, narrow = Family(measured_D, measured_D, "full"), Family(D, D, "full")
    for kind, other in itertools.product(cost.KINDS, repeat=2):
        one, two = (dataclasses.replace(x, kind=k) for x, k in ((wide, kind), (narrow, other)))
        assert one.stands_for(two) == (known and kind == other), (kind, other)
    assert not wide.stands_for(dataclasses.replace(narrow, head_dim_v=D - 1))
    assert not dataclasses.replace(wide, head_dim_v=measured_D - 1).stands_for(narrow)


@pytest.mark.parametrize("computed", [(), ("FLASH_ATTENTION",)])
def test_where_no_backend_computes_a_call_sdpas_math_is_timed(computed, on_cpu, monkeypatch):
    """SDPA itself falls back to it. EFFICIENT_ATTENTION is not asked."""
    cases = []
    monkeypatch.setattr(timing, "calls_of", lambda case: cases.append(case) or case)

    def timed(case, rounds):
        found = {name: RuntimeError("no kernel") for name in case.rivals[:2]}
        if case.rivals == ("MATH",):
            found = {"MATH": 2.0}
        return found | dict.fromkeys((*case.candidates, *computed), 1.0)

    monkeypatch.setattr(timing, "time_calls", timed)
    of_mask = Family(63, 63, "mask")
    (case,) = timing.cases_of(torch.device("cpu"), of_mask, PER_TOKEN, [LONG]).values()
    times = timing.measure(case)
    assert times[case.candidates[0]] == 1.0
    assert times.get("MATH") == (None if computed else 2.0)
    assert len(cases) == (1 if computed else 2) and not any(each.candidates for each in cases[1:])


def test_a_size_that_sdpa_cannot_compute_is_left_out(gpu, monkeypatch):
    def fails(case, rounds):
        none = dict.fromkeys(case.rivals, "OutOfMemoryError: 80 GiB")
        return clock(case) if case.shape.q[2] < 8000 else none | dict.fromkeys(case.candidates, 1.0)

    monkeypatch.setattr(timing, "measure", fails)
    sizes = NEW.sizes(timing.FEW)
    found = timing.measure_family(gpu, NEW, PER_TOKEN, sizes)
    assert list(found) == [each for each in sizes if each.N_q < 8000]


def test_why_a_backend_has_no_such_calls_is_not_told_the_user(on_cpu, monkeypatch, recwarn):
    """SDPA warns of each cause, on the way to the error that is kept."""

    def fails(calls, rounds):
        warnings.warn("Flash Attention does not support non-null attn_mask.", stacklevel=1)
        return dict.fromkeys(calls, RuntimeError("no kernel"))

    monkeypatch.setattr(timing, "time_calls", fails)
    timing.measure(case())
    assert not recwarn.list
    warnings.warn("another", stacklevel=1)
    assert len(recwarn.list) == 1


def test_an_h100_takes_an_h200s_times():
    ((name, other),) = tables.ALIKE.items()
    own, others = tables.built_in()[name], tables.built_in()[other]
    assert (own.gpu, others.gpu) == (name, other) and own.device == others.device
    assert own.families == others.families
    for family in (FULL_64, Family(255, 255, "keys")):
        assert predicted(family, LONG, *PER_TOKEN, name).wins


def test_time_that_is_over_leaves_the_sizes_that_were_timed(timed, gpu, monkeypatch):
    """A size takes two seconds; the clock is asked once five of them are timed. It does not run
    while kernels compile, which takes as long as it takes."""
    compiling = []
    monkeypatch.setattr(timing, "start_compiling", lambda cases: compiling.append(100.0) or [])
    monkeypatch.setattr(timing.time, "monotonic", lambda: 2.0 * len(timed) + sum(compiling))
    sizes = NEW.sizes(timing.FEW)
    for seconds, count in ((15, 8), (10, 6), (8, 5), (0, 5)):
        timed.clear()
        found = timing.measure_family(gpu, NEW, PER_TOKEN, sizes, 1, seconds)
        assert list(found) == sizes[:count]
    with pytest.raises(RuntimeError, match="4 sizes were timed, 5 are needed: no more were given"):
        timing.measure_family(gpu, NEW, PER_TOKEN, sizes[:4], 1, 10)
    monkeypatch.setattr(timing, "SECONDS", -1.0)
    timed.clear()
    assert timing.calibrate(gpu, NEW, *PER_TOKEN) is None
    assert len(timed) == cost.ENOUGH and predicted(NEW).wins


@pytest.mark.parametrize("second", [GPU, "another GPU"])
def test_what_cannot_be_measured_is_tried_once_and_keeps_nothing_else_from_it(
    second, timed, gpu, monkeypatch
):
    """The reason is kept. Another family or GPU may work."""
    names, other = [GPU, second], torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[device.index])

    def fails(case, rounds):
        timed.append(case)
        if case.shape.device == other or case.shape.q[3] != 48:
            return clock(case)
        return {"CUDNN_ATTENTION": 1.0} | dict.fromkeys(case.candidates, "OutOfMemoryError: 1 GiB")

    monkeypatch.setattr(timing, "measure", fails)
    for _ in range(2):
        error = timing.calibrate(gpu, NEW, *PER_TOKEN)
        assert error == ("RuntimeError: 0 sizes were timed, 5 are needed: OutOfMemoryError: 1 GiB")
    assert len(timed) == len(timing.FEW) and predicted(NEW) is None
    family = Family(40, 24, "full")
    assert timing.calibrate(gpu, family, *PER_TOKEN) is None and predicted(family).wins
    assert timing.calibrate(other, NEW, *PER_TOKEN) is None
    assert predicted(NEW, LONG, *PER_TOKEN, second).wins
    assert timing.calibrate(gpu, NEW, *PER_TOKEN) == error


def test_what_the_candidates_launch_is_compiled_and_not_launched(monkeypatch):
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: contextlib.nullcontext())
    monkeypatch.setattr(gpus, "capability", lambda device: (9, 0))
    given, x = [], torch.zeros(4)
    monkeypatch.setattr(timing, "compile_elsewhere", lambda *args: given.append(args) or "jobs")

    def calls_of(case):
        if case.shape.q[2] == 1024:
            raise RuntimeError("out of memory")
        run, N = functools.partial(launch.run, "kernel", (1,), (x,)), case.shape.q[2]
        runs = {each: functools.partial(run, (N, each.recipe)) for each in case.candidates}
        return runs | {Candidate("sage1"): lambda: 1 / 0}

    monkeypatch.setattr(timing, "calls_of", calls_of)
    names = "sage1", *PER_TOKEN
    sizes = [Sizes(1, 2, 2, N, N) for N in (1024, 2048)]
    cases = list(timing.cases_of(torch.device("cuda", 0), NEW, names, sizes).values())
    assert timing.start_compiling(cases) == "jobs"
    ((launches, capability),) = given
    assert capability == (9, 0)
    assert [each.arguments[1:] for each in launches] == [(2048, *PER_TOKEN)]
    assert launches[0].arguments[0].is_meta  # the inputs of ten sizes are not kept


def test_what_another_process_has_measured_meanwhile_is_not_measured(timed, gpu):
    """This process has looked for a table before there was one."""
    theirs = tuned(gpu)
    wide, narrow = Family(128, 128, "mask"), Family(120, 120, "mask")
    theirs = dataclasses.replace(theirs, families={wide: theirs.families[FULL_64]})
    timed.clear()
    assert predicted(narrow) is None
    tables.path_of(GPU).write_text(tables.to_text(theirs))
    assert timing.calibrate(gpu, narrow, *PER_TOKEN) is None and not timed
    assert predicted(narrow).wins


def test_a_process_does_not_wait_for_ever_for_one_that_hangs(timed, gpu, monkeypatch):
    monkeypatch.setattr(tables, "PATIENCE", 0.05)
    lock = tables.FileLock(f"{tables.path_of(GPU)}.lock")
    with concurrent.futures.ThreadPoolExecutor(1) as other:  # one thread would be told at once
        other.submit(lock.acquire).result()
        assert timing.calibrate(gpu, NEW, *PER_TOKEN) is None
        other.submit(lock.release).result()
    assert predicted(NEW).wins and len(timed) == len(timing.FEW)


def test_two_processes_that_save_keep_both_tables(gpu):
    """The second to come reads the first one's families."""
    table = tuned(gpu)
    assert len(tables.known(GPU)) == 1  # there is none of the user's yet
    first, second = (
        dataclasses.replace(table, families={Family(D, D, "mask"): table.families[FULL_64]})
        for D in (64, 128)
    )
    lock = tables.FileLock(f"{tables.path_of(GPU)}.lock")
    with concurrent.futures.ThreadPoolExecutor(1) as other:
        with lock:
            saving = other.submit(tables.save, second)
            with pytest.raises(concurrent.futures.TimeoutError):
                saving.result(timeout=0.3)
            tables.path_of(GPU).write_text(tables.to_text(first))
        assert saving.result(timeout=600) == tables.path_of(GPU)
    found, _ = tables.known(GPU)  # before the built-in one
    assert found.families.keys() == first.families.keys() | second.families.keys()


def test_what_this_process_has_measured_stays_in_force_in_it(timed, gpu):
    """As the ranks of a job have agreed, whatever their hosts' tables say later."""
    assert timing.calibrate(gpu, NEW, *PER_TOKEN) is None
    before, (table, *_) = predicted(NEW), tables.known(GPU)
    of_new = table.families[NEW]
    twice = {x: {name: 2 * each for name, each in ms.items()} for x, ms in of_new.items()}
    tables.save(dataclasses.replace(table, families={NEW: twice}))
    assert predicted(NEW) == before
    as_another_process()
    assert predicted(NEW).ours == pytest.approx(2 * before.ours)


def test_where_nothing_can_be_written_it_is_known_in_this_process(timed, gpu, no_folder, caplog):
    assert timing.calibrate(gpu, NEW, *PER_TOKEN) is None
    assert predicted(NEW).wins and "is kept for this process alone" in caplog.text
    assert timing.calibrate(gpu, Family(40, 24, "full"), *PER_TOKEN) is None
    assert predicted(NEW).wins and predicted(Family(40, 24, "full")).wins


def test_ranks_predict_by_the_times_of_one_of_them(timed, gpu, monkeypatch):
    monkeypatch.setattr(timing, "agreed", None)  # what is known is asked of no other rank
    for D in (128, 126, 104, 50):
        assert timing.calibrate(gpu, Family(D, D, "full"), *PER_TOKEN) is None
    assert not timed
    store = torch.distributed.HashStore()
    monkeypatch.setattr(timing, "agreed", functools.partial(agreed, store=store))
    assert timing.calibrate(gpu, NEW, *PER_TOKEN) is None
    first = predicted(NEW)
    as_another_process()
    tables.path_of(GPU).unlink()  # another host's
    assert timing.calibrate(gpu, NEW, *PER_TOKEN) is None
    assert predicted(NEW) == first and len(timed) == len(timing.FEW)
    as_another_process()  # of the next job of both hosts
    assert predicted(NEW) == first
    # What it did not find it finds now: of another family, recipe or GPU.
    for i, (family, recipe, name) in enumerate((
        (Family(40, 24, "full"), "sage2-8b-rotated", GPU), (NEW, "sage2-8b", GPU),
        (NEW, "sage2-8b-rotated", "NVIDIA H100"),
    )):  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_, name=name: name)
        as_another_process()
        assert timing.calibrate(gpu, family, recipe) is None
        assert predicted(family, LONG, recipe, name).wins
        assert len(timed) == (i + 2) * len(timing.FEW)
    monkeypatch.setattr(timing, "agreed", lambda key, find: {"families": []})
    error = timing.calibrate(gpu, Family(24, 24, "full"), *PER_TOKEN)
    assert error.startswith("ValueError: it holds no times: KeyError: 'capability'")


# -- mode="max-autotune" ----


def case(mask=None, dtype=None, band=FULL, D_v=32, recipes=("sage2-8b-rotated", "sage1-per-token")):
    """96 queries, 64 keys, two heads to each of k's."""
    cpu = torch.device("cpu")
    q, k, v = (2, 4, 96, 32), (2, 2, 64, 32), (2, 2, 64, D_v)
    shape = CallShape(cpu, torch.bfloat16, q, k, v, band, mask, dtype)
    return BenchmarkCase(shape, tuple(map(Candidate, recipes)))


def with_shape(case, **changes):
    return case._replace(shape=case.shape._replace(**changes))


@pytest.fixture
def on_cpu(monkeypatch):
    """Trials run where no GPU is: SDPA's backends are CPU's one, and the runs are what is noted,
    as (name, output)."""
    runs = []

    def medians(calls, rounds):
        runs.extend((name, call()) for name, call in calls.items())
        return dict.fromkeys(calls, 1.0)

    monkeypatch.setattr(timing, "time_calls", medians)

    def sdpa(q, k, v, attn_mask, is_causal, **kwargs):
        assert attn_mask is None or not is_causal  # an error on CUDA, CPU's takes both
        given = dict(is_causal=is_causal, **kwargs)
        return torch.ops.aten.scaled_dot_product_attention(q, k, v, attn_mask, **given)

    monkeypatch.setattr(timing.F, "scaled_dot_product_attention", sdpa)
    monkeypatch.setattr(timing, "sdpa_kernel", lambda backend: lambda function: function)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: contextlib.nullcontext())
    timing.benchmark.cache_clear()
    yield runs
    timing.benchmark.cache_clear()


@pytest.mark.parametrize(
    "asked, count",
    [
        (case(), 2), (case(band=Band(None, 0)), 2), (case(band=Band(16, 0)), 3),
        (case((2, 1, 1, 64), torch.bool), 3), (case((96, 64), torch.bool, Band(None, 0)), 3),
        (case((1, 4, 96, 64), torch.float16, Band(16, 3)), 3), (case(D_v=16), 3),
    ],
)  # fmt: skip
def test_all_that_is_timed_is_the_same_attention(asked, count, on_cpu):
    assert set(timing.benchmark(asked)) == {name for name, _ in on_cpu}
    exact = on_cpu[0][1].float()
    assert len(on_cpu) == count + 2 and exact.shape == (2, 4, 96, asked.shape.v[3])
    seen = ~exact.isnan() & (exact != 0)  # a row that sees nothing is NaN or 0
    for _, out in on_cpu:
        error = (out.float() - exact)[seen].abs().sum() / exact[seen].abs().sum()
        assert error < 0.08


TRAINS = with_shape(case(recipes=("fp8-backward",)), trains=True)


@pytest.mark.parametrize("recipe, band", [("fp8-backward", FULL), ("sagebwd", Band(None, 0))])
def test_of_a_case_that_trains_all_that_is_timed_are_the_same_gradients(recipe, band, on_cpu):
    asked = with_shape(TRAINS, band=band)._replace(candidates=(Candidate(recipe),))
    assert len(timing.benchmark(asked)) == 3
    exact = on_cpu[0][1]
    assert [x.shape for x in exact] == [TRAINS.shape.q, TRAINS.shape.k, TRAINS.shape.v]
    for _, found in on_cpu:
        for x, y in zip(found, exact, strict=True):
            assert relative_l1(x, y) < (0.08 if band == FULL else 0.1)
    assert not torch.equal(on_cpu[2][1][0], exact[0])  # which is the recipe's
    # The first query of a causal call sees one key, whatever it asks for.
    assert (exact[0][:, :, 0].abs().max() < 1e-3) == (band != FULL)


def test_nothing_of_the_users_is_in_force_where_a_step_is_timed(on_cpu):
    """The measurement runs while a model compiles: inside its checkpoint, in eager or by compiled
    autograd, under its autocast, inference_mode and dispatch modes."""
    seen = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **kwargs or {})

    def note(x):
        seen.append(x)
        return x

    compiled_autograd = torch._dynamo.compiled_autograd._enable(lambda gm: seen.append(gm) or gm)
    hooks = torch.autograd.graph.saved_tensors_hooks(note, note)
    with compiled_autograd, hooks, torch.autocast("cpu", torch.float16), Mode():
        assert all(isinstance(ms, float) for ms in timing.measure(TRAINS).values())
    with torch.inference_mode():
        assert all(isinstance(ms, float) for ms in timing.measure(TRAINS).values())
    assert not seen and len(on_cpu) == 6
    assert {x.dtype for _, found in on_cpu for x in found} == {torch.bfloat16}


def test_the_kernels_of_a_step_are_all_compiled_before(on_cpu, monkeypatch):
    """Those of the backward too, which autograd launches: in the thread that notes."""
    given, threads = [], []
    monkeypatch.setattr(gpus, "capability", lambda device: (9, 0))
    monkeypatch.setattr(timing, "compile_elsewhere", lambda launches, _: given.append(launches))

    class Launches(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            launch.run("forward", (1,), (q,), ())
            return q.clone()

        @staticmethod
        def backward(ctx, grad):
            threads.append(threading.get_ident())
            assert not torch._C._is_multithreading_enabled()  # else, on a GPU, another thread's
            launch.run("backward", (1,), (grad,), ())
            return grad, None, None

    def training_op(training):
        threads.append(threading.get_ident())
        return lambda q, k, v, *_: (Launches.apply(q, k, v),)

    grad = functools.partial(torch.autograd.grad, allow_unused=True)
    monkeypatch.setattr(timing, "training_op", training_op)
    monkeypatch.setattr(torch.autograd, "grad", grad)
    timing.start_compiling([TRAINS])
    assert [each.kernel for each in given[0]] == ["forward", "backward"]
    assert len(set(threads)) == 1 and threads[0] != threading.get_ident()


def test_what_the_user_switched_off_is_no_rival(on_cpu):
    assert families.rivals() == tuple(families.BACKENDS)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        assert families.rivals() == ("FLASH_ATTENTION",)
    with sdpa_kernel(SDPBackend.MATH):
        assert families.rivals() == ("MATH",)
    for given, timed in (
        (("MATH",), {"MATH"}),
        (("FLASH_ATTENTION", "EFFICIENT_ATTENTION"), {"FLASH_ATTENTION"}),
        (("EFFICIENT_ATTENTION",), {"EFFICIENT_ATTENTION"}),
    ):
        asked = case()._replace(rivals=given)
        assert timing.benchmark(asked).keys() == timed | {*asked.candidates}


def test_a_case_is_timed_once_and_leaves_the_users_random_numbers(on_cpu):
    torch.manual_seed(3)
    expected = torch.randn(4)
    torch.manual_seed(3)
    first = timing.benchmark(case())
    assert timing.benchmark(case()) is first and len(on_cpu) == 4
    assert torch.equal(torch.randn(4), expected)
    timing.benchmark(case(D_v=16))
    assert len(on_cpu) == 4 + 5
    timing.benchmark(case()._replace(flash_attention="FA3"))
    assert len(on_cpu) == 4 + 5 + 4


def test_each_tile_is_timed_as_such(on_cpu, monkeypatch):
    told = []

    attend = timing.attend
    monkeypatch.setattr(timing, "attend", lambda call: told.append(call) or attend(call))
    candidates = tuple(Candidate("sage2-8b-rotated", n) for n in (0, 2, 3, None))
    found = timing.benchmark(case()._replace(candidates=candidates))
    assert tuple(found) == ("CUDNN_ATTENTION", "FLASH_ATTENTION", *candidates)
    assert [call.warpgroups for call in told] == [0, 2, 3, None]
    recipe = NAMED["sage2-8b-rotated"].encode()
    assert {(call.recipe, call.portable) for call in told} == {(recipe, False)}


def test_what_fails_has_its_error_instead_of_a_time(on_cpu, monkeypatch):
    medians, (rows, accurate) = timing.time_calls, case().candidates
    failing = lambda calls, n: medians(calls, n) | {accurate: OSError("a\nb")}  # noqa: E731
    monkeypatch.setattr(timing, "time_calls", failing)
    times = {"CUDNN_ATTENTION": 1.0, "FLASH_ATTENTION": 1.0, rows: 1.0}
    assert timing.benchmark(case()) == times | {accurate: "OSError: a"}

    def no_memory(case):
        raise torch.OutOfMemoryError("of 80 GiB")

    monkeypatch.setattr(timing, "calls_of", no_memory)
    found = timing.benchmark(case(D_v=16))
    assert found == dict.fromkeys((rows, accurate), "OutOfMemoryError: of 80 GiB")


def test_calls_take_turns_and_one_that_fails_is_left_out(monkeypatch):
    turns = []

    def time_call(call, graphs):
        turns.append(call)
        if call == "b" and len(turns) > 3:
            raise ValueError("b")
        return {"a": 3.0, "b": 1.0, "c": timing.ONE_ROUND_MS + 1.0}[call]

    monkeypatch.setattr(timing, "time_call", time_call)
    found = timing.time_calls({name: name for name in "abc"})
    assert "".join(turns) == "abc" + "ba" + "a"  # c is long
    assert (found["a"], found["c"]) == (3.0, timing.ONE_ROUND_MS + 1.0) and str(found["b"]) == "b"


@pytest.mark.parametrize("is_enough", [True, False])
def test_what_has_too_little_memory_is_timed_again_with_what_torch_had_cached(
    is_enough, monkeypatch
):
    freed, held = [], []

    def time_call(call, graphs):
        held.append(list(graphs))
        graphs[:] = [call]
        if call == "b" and not (freed and is_enough):
            raise torch.OutOfMemoryError("of 80 GiB")
        return 1.0

    monkeypatch.setattr(timing, "time_call", time_call)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(True))
    found = timing.time_calls({name: name for name in "abc"}, 1)
    assert (found["a"], found["c"], len(freed)) == (1.0, 1.0, 1)
    assert held == [[], ["a"], [], ["b"]]  # whose memory the next graph takes
    assert found["b"] == 1.0 if is_enough else str(found["b"]) == "of 80 GiB"


def test_calls_are_timed_while_dynamo_compiles(on_cpu):
    """With real tensors, whatever the compilation has for its own."""

    def compiler(gm, example_inputs):
        timing.benchmark(case())
        return gm.forward

    with torch.autocast("cpu", torch.float16):
        torch.compile(lambda x: x @ x, backend=compiler, dynamic=True)(torch.randn(4, 4))
    assert len(on_cpu) == 4 and all(type(out) is torch.Tensor for _, out in on_cpu)
    assert {out.dtype for _, out in on_cpu} == {torch.bfloat16}


def test_ranks_share_times_by_the_kind_of_gpu(monkeypatch):
    names = {0: "NVIDIA H200", 1: "NVIDIA H200", 2: "NVIDIA H100"}
    store = torch.distributed.HashStore()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[device.index])
    monkeypatch.setattr(timing, "measure", lambda case: {"measured": case.shape.device.index})
    monkeypatch.setattr(timing, "agreed", functools.partial(agreed, store=store))
    cases = [with_shape(case(), device=torch.device("cuda", i)) for i in names]
    assert [timing.benchmark(each)["measured"] for each in cases] == [0, 0, 2]


def test_threads_are_timed_one_at_a_time(on_cpu, monkeypatch):
    running = []

    def time_calls(calls, rounds):
        running.append(1)
        time.sleep(0.05)
        assert running == [1]
        running.pop()
        return dict.fromkeys(calls, 1.0)

    monkeypatch.setattr(timing, "time_calls", time_calls)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = list(pool.map(timing.benchmark, (case(), case(D_v=16))))
    assert all(set(times.values()) == {1.0} for times in found)


def test_with_a_fake_process_group_there_is_no_other_rank_to_wait_for():
    """Its store counts nothing and holds nothing."""
    store = SimpleNamespace(add=lambda key, n: 0, set=lambda key, value: None, get=None)
    assert agreed("key", lambda: [1.0], store) == [1.0]


@pytest.mark.parametrize("first", ["is gone", "has failed"])
def test_a_rank_times_for_itself_where_the_one_that_was_to_do_it(first, caplog):
    store = torch.distributed.HashStore()
    store.set_timeout(datetime.timedelta(milliseconds=10))
    if first == "has failed":
        with pytest.raises(ZeroDivisionError):
            agreed("key", lambda: 1 / 0, store)
    second = SimpleNamespace(add=lambda key, n: 2, get=store.get)
    assert agreed("key", lambda: [1.0], second) == [1.0]
    assert ("this rank does it for itself" in caplog.text) == (first == "is gone")


CLOCKS = "max-autotune", "max-autotune-no-cudagraphs"


@pytest.mark.parametrize("mode", [*CLOCKS, "reduce-overhead", "default", None])
def test_the_mode_says_whether_a_clock_decides(mode, monkeypatch):
    seen, resolve = [], backend.resolve
    clock = timing.benchmark if mode and "max-autotune" in mode else None
    monkeypatch.setattr(backend, "resolve", lambda x: seen.append(resolve(x)) or seen[-1])
    options = {} if mode is None else {"sage.mode": mode}
    x = torch.randn(4)
    torch.compile(torch.sin, backend="sage", mode=mode)(x)
    torch._dynamo.reset()
    torch.compile(torch.sin, backend="sage", options=options)(x)
    torch._dynamo.reset()
    sage_inductor.explain(torch.sin, options=options)(x)
    assert [settings.benchmark for settings in seen] == [clock] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("D, is_causal", [(64, True), (128, False)])
def test_the_fastest_tile_on_the_gpu_is_taken_and_each_is_right(D, is_causal, monkeypatch):
    q, k, v = (torch.randn(1, 8, 2048, D, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    clock, found = timing.benchmark, {}

    def ours(case):
        """Ours alone, so that one of them wins."""
        found.update(clock(case))
        return {each: ms if isinstance(each, Candidate) else 1e3 for each, ms in found.items()}

    def sdpa(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    monkeypatch.setattr(timing, "benchmark", ours)
    torch._dynamo.reset()
    outs = [torch.compile(sdpa, backend="sage", mode="max-autotune-no-cudagraphs")(q, k, v)]
    (site,) = sage_inductor.report()
    times = {each: ms for each, ms in found.items() if isinstance(each, Candidate)}
    assert (site.recipe, site.decision.warpgroups) == min(times, key=times.get), site.reason
    rivals = tiles.rivals(gpus.capability(q.device), "fp8", D, is_causal)
    assert {n for name, n in times if name == "sage2-8b-rotated"} in (set(rivals), set())
    for each in times:
        given = {"scale": D**-0.5, "is_causal": is_causal, **each._asdict()}
        outs.append(support_sdpa(q, k, v, **given)[0])
    assert all(cos_sim(out, sdpa(q, k, v)) > 0.99 for out in outs)


@pytest.mark.gpu
def test_a_call_is_timed_while_another_thread_allocates():
    """In CUDA's own mode of capture its cudaMalloc would break the capture, or fail."""
    stop, failed = threading.Event(), []

    def allocate():
        while not stop.is_set():
            try:
                torch.empty(64 << 20, dtype=torch.uint8, device="cuda").fill_(1)
                torch.cuda.empty_cache()
            except RuntimeError as error:
                failed.append(error)

    x, graphs = torch.randn(256, 256, device="cuda"), []
    with concurrent.futures.ThreadPoolExecutor(1) as pool, torch.cuda.stream(torch.cuda.Stream()):
        pool.submit(allocate)
        try:
            assert all(0 < timing.time_call(lambda: x @ x, graphs) < 1 for _ in range(5))
        finally:
            stop.set()
    assert not failed


@triton.jit
def _wait_kernel(flag):
    while tl.atomic_cas(flag, 1, 1) == 0:
        pass


@pytest.mark.gpu
def test_a_call_is_timed_while_another_stream_waits():
    """As for a rank that has yet to send. Nothing on the device ends before the flag is set."""
    flag, one = (torch.full((1,), n, device="cuda", dtype=torch.int32) for n in (0, 1))
    device, sizes = torch.device("cuda", 0), FULL_64.sizes([(1, 8, 8, 1024, 1024)])
    (case,) = timing.cases_of(device, FULL_64, ("sage2-8b",), sizes).values()
    expected = timing.measure(case, 1)  # all is compiled and loaded
    _wait_kernel[(1,)](one)
    waiting, other = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(waiting):
        _wait_kernel[(1,)](flag)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        try:
            found = pool.submit(timing.measure, case, 1).result(120)  # reached only where it hangs
            assert not waiting.query()
        finally:
            with torch.cuda.stream(other):
                flag.copy_(one)
    assert found.keys() == expected.keys() and not any(isinstance(x, str) for x in found.values())


@pytest.mark.gpu
def test_every_way_of_a_case_is_timed(monkeypatch, tmp_path):
    monkeypatch.setenv("SAGE_INDUCTOR_TABLES", str(tmp_path))
    device = torch.device("cuda", 0)
    for kind in (*timing.TUNED_KINDS, "mask", "bias"):
        recipe = "fp8-backward" if kind in cost.TRAINED else "sage2-8b"
        family = Family(64, 64, kind)
        sizes = [(1, 8, 8, N, N) for N in (1024, 1280, 1536, 2048, 3072, 4096)]
        found = timing.measure_family(device, family, (recipe,), family.sizes(sizes), 1)
        for ms in found.values():
            assert {recipe} < set(ms) and min(ms.values()) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("trains", [False, True])
def test_a_family_of_this_gpu_is_measured_while_a_call_compiles(trains, monkeypatch, tmp_path):
    monkeypatch.setenv("SAGE_INDUCTOR_TABLES", str(tmp_path))
    as_another_process()
    monkeypatch.setattr(tables, "built_in", dict)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    q, k, v = (torch.randn(1, 24, 8192, 48, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    q.requires_grad_(trains)
    with sage_inductor.config.patch(calibrate=False, training="auto"):
        (site,) = sage_inductor.explain(sdpa)(q, k, v)
        assert not site.rewritten and "was not measured on" in site.reason
    with sage_inductor.config.patch(calibrate=True, training="auto"):
        (site,) = sage_inductor.explain(sdpa)(q, k, v)
        assert "x SDPA by the cost model" in site.reason, site.reason
    assert list(tmp_path.glob("*.json"))
    as_another_process()
