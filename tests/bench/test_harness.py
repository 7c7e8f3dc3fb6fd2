"""bench/harness.py: how a result can be made again, where it is kept, and what needs a GPU."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch

from bench import harness

SCRIPTS = sorted(
    path.stem
    for path in (harness.ROOT / "bench").glob("*.py")
    if "\ndef main(argv" in path.read_text()
)
ON_GPU = (
    "attention", "compare", "compile_time", "fusion", "lists", "model", "packages", "preparation",
    "regret", "training", "tritons",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The project's, empty but for a bench that runs."""
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "bench" / "x.py"), "--only", "a b", "--json"])
    return tmp_path


def test_a_result_says_how_it_is_made_again_and_is_saved_as_it_goes(folder, monkeypatch, capsys):
    args = harness.parser("", rounds=3).parse_args(["--json", "--device", "cpu"])
    result = harness.Result("plan", {"time": "the median"}, args, more=[1])
    result.add([{"ms": 1.0}])
    (path,) = (folder / "results" / "cpu").iterdir()
    assert path.name == f"{result['date'][:10]}-plan.json"
    assert json.loads(path.read_text()) == result and result["rows"] == [{"ms": 1.0}]
    assert result["command"] == "python bench/x.py --only 'a b' --json"
    assert result["machine"] == {"gpu": "cpu"} and result["versions"] == harness.installed()
    assert (result["more"], result["commit"], result["method"]) == (
        [1],
        None,
        {"time": "the median"},
    )
    monkeypatch.setattr(harness, "state", lambda device: "cool")
    result["rows"] += [{"ms": 2.0, "error": None}, *[{"model": "m", "N": 8, "error": "E: x"}] * 2]
    assert result.end("model", "N") == 1 and not harness.Result.end(result)
    kept = json.loads(path.read_text())
    assert kept == result and kept["state"] == {"start": None, "end": "cool"}
    assert len(kept["rows"]) == 4 and 0 <= kept["elapsed_s"] < 60
    printed = capsys.readouterr().out
    assert printed.count("failed:") == 1 == printed.count("failed: m, 8: E: x\n")
    assert result["command"] in printed and "time      the median" in printed


def test_without_json_nothing_is_kept(folder):
    result = harness.Result("plan", "", harness.parser("").parse_args(["--device", "cpu"]))
    result.add([{}])
    assert not list(folder.iterdir())


def test_a_command_names_torchrun_and_no_folder_of_this_machine(folder, monkeypatch):
    for name in harness.NCCL:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert harness.command().startswith("torchrun --nproc-per-node 2 bench/x.py ")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert harness.command().startswith("NCCL_P2P_DISABLE=1 torchrun --nproc-per-node 2 bench/x.")
    monkeypatch.delenv("NCCL_P2P_DISABLE")
    monkeypatch.setattr(sys, "argv", ["/home/somebody/bench/y.py"])
    assert harness.command() == "torchrun --nproc-per-node 2 y.py"


@pytest.mark.skipif(not shutil.which("git"), reason="a commit is what git says")
def test_a_commit_is_named_with_what_has_changed_since(folder):
    def git(*command):
        author = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", folder, *author, *command], check=True, capture_output=True)

    assert harness.commit() is None
    git("init")
    (folder / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    clean = harness.commit()
    assert re.fullmatch("[0-9a-f]{12}", clean)
    (folder / "result.json").write_text("{}")  # is no change of the sources
    assert harness.commit() == clean
    (folder / "file").write_text("2")
    assert harness.commit() == f"{clean}-dirty"


def test_fresh_caches_are_empty_and_removed():
    def main():
        seen.update({name: os.environ[name] for name in harness.CACHES})
        assert os.path.isdir(os.path.dirname(seen[harness.CACHES[0]]))
        return 3

    seen, before = {}, dict.fromkeys(harness.CACHES, "as it was")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", open(os.devnull, "w"))
        for name, value in before.items():
            patch.setenv(name, value)
        with pytest.raises(SystemExit) as end:
            harness.run(main, fresh=harness.CACHES[:1])
    assert end.value.code == 3 and seen[harness.CACHES[1]] == "as it was"
    assert not os.path.exists(os.path.dirname(seen[harness.CACHES[0]]))


@pytest.mark.parametrize("name", ON_GPU)
def test_without_a_gpu_nothing_is_timed(name, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    needed = {"compare": [str(harness.ROOT)], "tritons": ["run", "folder"]}
    with torch.no_grad(), pytest.raises(SystemExit) as end:
        importlib.import_module(f"bench.{name}").main(needed.get(name, []))
    assert end.value.code == 2 and "torch sees no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_says_what_it_takes(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as end:
        importlib.import_module(f"bench.{name}").main()
    assert end.value.code == 0 and "usage: " in capsys.readouterr().out


def test_the_gpu_is_the_one_that_is_named(monkeypatch):
    current = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    for given, index in (([], 0), (["--device", "cuda:3"], 3)):
        found = harness.gpu(harness.parser("").parse_args(given))
        assert found == torch.device("cuda", index) == current.pop()
    with pytest.raises(SystemExit):
        harness.gpu(harness.parser("").parse_args(["--device", "cpu"]))
