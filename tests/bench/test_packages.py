"""What of the bench of packages needs no GPU: the blocks, a package of one, gates, tables."""

import functools
import json
from types import SimpleNamespace

import pytest
import torch
from instead import InThisProcess

from bench import measure, packages

CPU = torch.device("cpu")
ARGS = SimpleNamespace(rounds=2, target_ms=1.0)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[pytest.mark.sweep] * (i > 0)) for i, x in enumerate(packages.ROWS)],
)
def test_a_block_is_exported_for_any_number_of_tokens(name):
    row = packages.row_of(name, CPU)
    program = packages.exported(row, CPU)
    for n in (1, row.tokens[0], 333):
        given = packages.inputs(row, n, CPU)
        assert given[0].shape[1] == n
        out = packages.first(packages.block_of(row, CPU)(*given))
        found = packages.same(packages.first(program.module()(*given)), out)
        assert found["error"] is None and torch.equal(given[0], packages.inputs(row, n, CPU)[0])
        assert packages.same(1.1 * out, out)["error"] == "1.0e-01 from the compiled model"
    full = packages.ROWS[name]
    assert max(full.tokens) <= full.longest and packages.dynamic_dims(full)[0] == {1: 0}
    assert full.at(full.tokens[0]) == full.model


def test_nobody_sees_the_padding():
    row = packages.row_of("padded", CPU)
    x, mask = packages.inputs(row, 64, CPU)
    block = packages.block_of(row, CPU)
    other = x.masked_fill(~mask[:, 0, 0, :, None], 9.0)
    out, found = block(x, mask), block(other, mask)
    assert torch.equal(out[0, :48], found[0, :48]) and not torch.equal(out[0, 48:], found[0, 48:])


def once(calls, rounds, target_ms, clock, least):
    """measure.in_turns by a clock that is not looked at."""
    assert (rounds, target_ms) == (2, 1.0)
    for call in calls.values():
        call()
    return {name: [1.0, 2.0] for name in calls}


def test_a_package_is_loaded_so_that_a_cuda_graph_can_capture_it(monkeypatch):
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda *path, **how: (path, how))
    assert packages.load("x.pt2") == (("x.pt2",), {"run_single_threaded": True})


@pytest.mark.sweep
def test_a_package_is_built_and_measured(tmp_path, monkeypatch):
    """Llama's, at two lengths; with SDPA a model that is neither packaged nor compiled."""
    row, name = packages.row_of("llama3_8k", CPU), "llama3_8k"
    load, compile_, eager = packages.load, packages.compiled, packages.block_of(row, CPU)
    monkeypatch.setattr(packages, "OTHERS", (33,))
    monkeypatch.setattr(packages, "in_turns", once)
    monkeypatch.setattr(packages, "CONFIGS", {"aot_inductor.compile_wrapper_opt_level": "O0"})
    monkeypatch.setattr(packages, "load", lambda path: eager if "SDPA" in path else load(path))
    monkeypatch.setattr(
        packages, "compiled",
        lambda row, kind, device: compile_(row, kind, device) if kind == "sage" else eager,
    )  # fmt: skip
    built = {
        part: packages.work(name, part, str(tmp_path), "cpu", []) for part in ("sage", "expected")
    }
    ours, weights = built["sage"], sum(x.nbytes for x in eager.parameters())
    assert [site["recipe"] for site in ours["sites"]] == ["sage2-8b"]
    assert ours["weights_bytes"] == weights and 0 < ours["code_bytes"] < ours["bytes"]
    built["SDPA"] = {**ours, "sites": []}
    found = packages.measure(row, built, ["cuDNN"], str(tmp_path), ARGS, CPU)
    assert [(each["N"], each["error"]) for each in found] == [(192, None), (256, None)]
    for each in json.loads(json.dumps(found)):
        assert list(each["times"]) == [
            "package sage", "compiled sage", "package SDPA", "compiled SDPA"
        ]  # fmt: skip
        assert list(each["others"]) == ["33"] and list(each["equal"]) == ["sage", "SDPA"]
        assert packages.table([each]).count("| Llama 3 8B |") == 2
    # What a package gives elsewhere than where it is timed, is looked at too.
    right = torch.load(tmp_path / f"{name}.expected")
    torch.save({**right, 33: 1.1 * right[33]}, tmp_path / f"{name}.expected")
    for each in packages.measure(row, built, [], str(tmp_path), ARGS, CPU):
        assert each["error"].startswith("package sage at 33 tokens: 9.1e-02 from the")


def test_what_fails_in_a_process_is_the_rows_error(tmp_path, monkeypatch):
    monkeypatch.setattr(packages, "subprocess", InThisProcess())
    cache = tmp_path / "cache"
    cache.mkdir()
    job = dict(name="none", part="sage", folder=str(tmp_path), device="cpu", first=[])
    found = packages.in_a_process(job, str(cache))
    assert found["error"].startswith("exit 1: ") and "KeyError: 'none'" in found["error"]
    assert not cache.exists()
    row = packages.row_of("vit_l_1024px", CPU)
    built = {"SDPA": {}, "expected": {}, "sage": found}
    (row,) = packages.measure(row, built, [], str(tmp_path), ARGS, CPU)
    assert row["error"].startswith("Wrong: sage: exit 1")


def test_every_part_of_a_row_has_a_process_and_a_package_its_own_caches(monkeypatch, tmp_path):
    jobs = []

    def fail(job, cache):
        jobs.append((job["name"], job["part"], bool(cache) and job["name"] in cache))
        return {"error": "no compiler"}

    monkeypatch.setattr(packages, "in_a_process", fail)
    path = tmp_path / "found.json"
    names = ["vit_l_1024px", "padded"]
    with packages.sage_inductor.config.patch(rewrite_inductor=False):  # as main sets it
        assert packages.main(["--dry-run", "--rows", *names, "--json", str(path)]) == 1
    parts = [(part, part != "expected") for part in ("expected", *packages.KINDS)]
    assert sorted(jobs) == sorted((name, *part) for name in names for part in parts)
    found = json.loads(path.read_text())["rows"]
    assert [row["model"] for row in found] == names
    assert {row["error"] for row in found} == {"Wrong: expected: no compiler"}


def test_launched_calls_are_timed_until_they_are_done(monkeypatch):
    """The work of `slow` is done where the clock waits for it."""
    waiting, now = [], [0.0]

    def synchronize():
        now[0] += 0.002 * len(waiting)
        waiting.clear()

    def fast():
        now[0] += 0.0001

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])

    calls = {"slow": lambda: waiting.append(1), "fast": fast}
    clock = functools.partial(measure.wall, synchronize)
    found = packages.in_turns(calls, 3, 1.0, clock, least=3)
    assert len(found["slow"]) == len(found["fast"]) == 3
    assert found == {"slow": pytest.approx([2.0] * 3), "fast": pytest.approx([0.1] * 3)}
