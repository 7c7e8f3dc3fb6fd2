"""What of the comparison of two commits needs no GPU: whose sources a side has, turns, verdicts."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from bench import compare, side
from bench.cases import Case

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.mark.sweep
def test_each_side_has_the_sources_of_its_folder(tmp_path, capsys):
    for room in compare.ROOMS.values():
        shutil.copytree(ROOT / room, tmp_path / room)
    (tmp_path / "ops" / "recipe.py").open("a").write("# another commit\n")
    args = compare.parse([str(tmp_path), "--cases", "control", "--rounds", "2", "--target-ms", "1"])
    base = compare.Side(args.folder, str(tmp_path / "base"), args)
    sides = {"base": base, "this": base}  # which answers twice
    found = compare.at_once(sides, "describe")
    assert found["base"] == found["this"]
    this = json.loads(json.dumps(side.describe("", CPU, 1.0, side.cases(), {})))
    of_base, of_this = (each["versions"].pop("sage_inductor") for each in (found["this"], this))
    assert of_base != of_this and found["this"] == this and len(this["cases"]) == 36
    row = compare.compare(sides, "host torch.add (control)", 3)
    assert row["error"] is None and [len(each) for each in row["times"].values()] == [3, 3]
    unknown = compare.compare(sides, "no such case", 3)
    assert "KeyError: 'no such case'" in unknown["error"] and unknown["ratio"] is None
    base.close()
    assert base.process.returncode == 0
    with pytest.raises(SystemExit, match="has ended"):
        base.receive()
    with pytest.raises(SystemExit):
        compare.parse([str(tmp_path / "ops")])
    assert "must hold ['sage_inductor', 'lowering', 'ops', 'patterns']" in capsys.readouterr().err


class Answering:
    """A side whose times are known; all sides' commands and answers are in `log`."""

    def __init__(self, folder, *_):
        self.name = "this" if folder == ROOT else "base"
        self.times = iter([9.0, 3.0, 4.0] if self.name == "this" else [2.0, 2.0, 2.0])

    def send(self, command):
        self.command = command
        log.append((self.name, command))

    def receive(self):
        log.append((self.name, "answers"))
        return {
            "describe": dict(versions={"torch": "2"}, cases=["one x", "other"]),
            "prepare one x": dict(norm=1.0, captured=True, rewritten=1),
            "run one x": dict(ms=next(self.times) if "run" in self.command else None),
            "drop one x": {},
        }[self.command]

    def close(self):
        log.append((self.name, "closed"))


log = []


def test_sides_are_timed_strictly_in_turn(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare, "Side", Answering)
    monkeypatch.setattr(compare.harness, "gpu", lambda args: args.device)
    for room in compare.ROOMS.values():
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").touch()
    log.clear()
    given = [str(tmp_path), "--cases", "one", "--rounds", "3", "--json", str(tmp_path / "found")]
    given += ["--device", "cpu"]
    assert compare.main(given) == 0
    start = log.index(("base", "run one x"))
    turns = ["base", "this", "this", "base", "base", "this"]
    runs = [each for name in turns for each in ((name, "run one x"), (name, "answers"))]
    assert log[start : start + 12] == runs
    assert log[4:6] == [("base", "prepare one x"), ("this", "prepare one x")]  # at once
    assert log[-2:] == [("base", "closed"), ("this", "closed")]
    (row,) = json.loads((tmp_path / "found").read_text())["rows"]
    assert (row["ratio"], row["range"]) == (2.0, [1.5, 4.5])
    assert "2.000     4.000   2.000 (1.500 .. 4.500)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "changed, said",
    [
        ({}, None),
        ({"norm": 2.0001}, None),
        ({"norm": 2.01}, "norm of the output: 2, now 2.01"),
        ({"norm": float("nan")}, "norm of the output: 2, now nan"),
        ({"rewritten": 0}, "rewritten: 1, now 0"),
        ({"captured": False}, "captured: True, now False"),
        ({"error": "ValueError: x"}, "this: ValueError: x"),
    ],
    ids=str,
)
def test_what_makes_times_those_of_two_things_is_said(changed, said):
    base = {"norm": 2.0, "captured": True, "rewritten": 1}
    assert compare.difference({"base": base, "this": base | changed}) == said


def test_the_hosts_time_of_a_call_is_the_least_of_many_without_waiting(monkeypatch):
    """A clock of which each call takes what is given, and looking at it nothing."""
    durations = iter([9.0] * 21 + [2.0] * 20 + [1.0] * 20 + [3.0] * 1000)  # ms
    now, waits = [0.0], []

    def call():
        now[0] += next(durations) / 1e3
        return torch.ones(1)

    def make(q, k, v):
        assert q.shape == (1, 2, 64, 64)
        return call

    monkeypatch.setattr(side.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(now[0]))
    monkeypatch.setattr(side, "draw", lambda case, *_: torch.empty(3, *shape_of(case)))
    timed = side.host(make, side.HOST_SMALL)(torch.device("cuda"), 100.0)
    assert len(waits) == 1 and timed.captured is None  # the warm-up: one burst of 9 ms a call
    assert timed.time() == pytest.approx(1.0)
    gaps = [end - start for start, end in zip(waits[1:], waits[2:])]
    assert gaps == pytest.approx([0.04, 0.02] + [0.06] * (len(gaps) - 2))  # after 20 calls each


def shape_of(case: Case) -> tuple:
    return case.B, case.H_q, case.N, case.D


def test_sage_is_set_beside_sdpa_on_each_side():
    def row(case, base, this):
        return {"case": case, "ms": {"base": base, "this": this}, "ratio": this / base}

    rows = [
        row("host SDPA", 4.0, 5.0), row("host sage", 24.0, 6.0), row("attention x", 1.0, 1.0),
        row("host SDPA, cpp_wrapper", 2.0, 2.0), {"case": "host sage, cpp_wrapper", "ratio": None},
    ]  # fmt: skip
    assert compare.over_sdpa(rows) == {"host sage": {"base": 6.0, "this": 1.2}}
    rows[-1] = row("host sage, cpp_wrapper", 3.0, 2.5)
    expected = {"base": 1.5, "this": 1.25}
    assert compare.over_sdpa(rows)["host sage, cpp_wrapper"] == expected
    assert not compare.over_sdpa(rows[1:3])


@pytest.mark.parametrize(
    "name", ["host SDPA", "host sage", "host sage, cpp_wrapper", "host sage, training"]
)
def test_the_hosts_rows_are_of_compiled_calls(name, monkeypatch):
    given = []
    monkeypatch.setattr(torch, "compile", lambda f, **options: given.append(options) or f)
    timed = side.cases()[name](torch.device("cpu"), 1.0)
    (options,) = given
    assert (options["backend"] == "inductor") == (name == "host SDPA") and options["fullgraph"]
    assert options["options"].get("cpp_wrapper", False) == name.endswith("cpp_wrapper")
    assert options["options"].get("sage.training") == (
        "fp8-backward" if "training" in name else None
    )
    if "training" not in name:
        assert options["options"].get("sage.force", False) == ("sage" in name)
    assert timed.out.shape == (1, 2, 64, 64)
