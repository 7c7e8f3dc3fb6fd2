"""``python -m sage_inductor``, as Python runs it: the module's file, by that name. A process of its
own has it in test_packaging.py."""

import io
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
from support import op_by_op

from sage_inductor.cli import doctor
from sage_inductor.cli.doctor import Probe, verdict
from sage_inductor.cli.progress import Progress, track
from sage_inductor.ops import gpus
from sage_inductor.ops import recipe as recipes

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="what is said without a GPU")


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the command line; what it returned and printed."""

    def run(*arguments: str) -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["sage_inductor", *arguments])
        monkeypatch.delitem(sys.modules, "sage_inductor.__main__", raising=False)
        capsys.readouterr()
        with pytest.raises(SystemExit) as exited:
            runpy.run_module("sage_inductor", run_name="__main__", alter_sys=True)
        stdout, stderr = capsys.readouterr()
        return SimpleNamespace(returncode=exited.value.code, stdout=stdout, stderr=stderr)

    return run


def test_help_names_the_commands(run):
    result = run("--help")
    assert result.returncode == 0
    assert re.search(r"^ +doctor .*recipe really runs here$", result.stdout, re.M)
    assert re.search(r"^ +demo .*report, accuracy, speed$", result.stdout, re.M)


def test_help_of_tune_names_the_types_of_calls_and_what_is_measured_without_options(run):
    said = " ".join(run("tune", "--help").stdout.split())
    assert "of full, causal, window, keys, mask, bias, full-training, causal-training; def" in said
    assert "default: 64, 96, 128, 256" in said


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["demo", "--recipe", "sage9"], "invalid choice: 'sage9' (choose from"),
        (["demo", "--size", "63"], "--size: must be a positive even number, got '63'"),
        (["demo", "--layers", "0"], "--layers: must be a positive number, got '0'"),
    ],
    ids=["recipe", "size", "layers"],
)
def test_a_mistake_is_refused_with_what_was_got(arguments, message, run):
    result = run(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_the_version_names_the_sources(run):
    result = run("--version")
    assert result.returncode == 0
    assert result.stdout == f"sage_inductor {recipes.source_tag()}\n"


@on_cpu
def test_doctor_names_versions_and_runs_every_recipe(run):
    result = run("doctor")
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"torch {torch.__version__}, triton " in result.stdout
    assert result.stdout.splitlines()[0].startswith("NO SPEED HERE: ")
    assert "accuracy of all 9 recipes can be studied" in result.stdout.splitlines()[0]
    assert "step 9 of 9: sage3 on cpu" in result.stderr
    assert 'backend="sage": registered' in result.stdout
    assert "no CUDA device: attention stays SDPA" in result.stdout
    assert "\ncpu\n  SDPA runs " in result.stdout
    errors = re.findall(r"^ +(\S+) +all +all +at most 0\.(\d)\d+$", result.stdout, re.M)
    assert len(errors) == len(recipes.NAMED), result.stdout
    for name, tenths in errors:
        assert tenths in ("012" if recipes.NAMED[name].of_qk.smooths_q else "0")
    assert "recipe 'auto': SDPA: on CPU attention stays as it was" in result.stdout


@on_cpu
@pytest.mark.parametrize(
    "broken, finding",
    [
        (lambda q, *_: (q * float("nan"), None), "nan  WRONG: above 0.1"),
        pytest.param(
            lambda q, *_: (q * 0, None), "1.0000  WRONG: above 0.1", marks=pytest.mark.sweep
        ),
        (lambda q, *_: 1 / 0, "FAILED: ZeroDivisionError: division by zero"),
    ],
    ids=["NaN", "zeros", "raises"],
)
def test_doctor_fails_where_a_kernel_does(broken, finding, run, monkeypatch):
    monkeypatch.setattr(torch.ops.sage, "sdpa", broken)
    result = run("doctor")
    assert result.returncode == 1, result.stdout + result.stderr
    assert finding in result.stdout
    assert re.match(r"BROKEN: 81 of 81 probes fail on CPU. Do not ask for sage1, ", result.stdout)


def test_doctor_has_one_line_for_a_recipe_that_runs_and_all_for_another():
    good = [Probe("sage1", D, "full", True, f"0.0{D}") for D in (64, 128)]
    bad = [Probe("sage3", 64, "full", True, "0.2"), Probe("sage3", 64, "mask", False, "FAILED: x")]
    worst = Probe("sage1", "all", "all", True, "at most 0.064")
    assert doctor.shortened(good + bad) == [worst, *bad]


def a_probe(recipe, runs):
    return Probe(recipe, 64, "full", runs, "")


@pytest.mark.parametrize(
    "probes, auto_rewrites, here, expected",
    [
        ([a_probe("sage1", True), a_probe("sage3", None)], True, {},
         'READY: 1 of 9 recipes run on NVIDIA Test, and "auto" rewrites the calls'),
        ([a_probe("sage1", True)], False, {},
         'NOT MEASURED: 1 of 9 recipes run on NVIDIA Test, but "auto" rewrites nothing until `python'),
        ([a_probe("sage1", True)], True, {"triton": "3.10.0"},
         "SLOWER THAN IT COULD BE: 1 of 9 recipes run on NVIDIA Test, but the Hopper kernel is"),
        ([a_probe("sage1", True)], True, {"replay": "no g++"},
         "SLOWER THAN IT COULD BE: 1 of 9 recipes run on NVIDIA Test, but Python submits calls, 5 times "
         "as slowly as C++ would: no g++"),
        ([a_probe("sage1", True), a_probe("sage2-8b", False)], True, {},
         "BROKEN: 1 of 2 probes fail on NVIDIA Test. Do not ask for sage2-8b: see"),
        ([a_probe("sage1", None)], False, {"capability": (7, 5)},
         "NOTHING RUNS HERE: NVIDIA Test (sm_75) is older"),
        ([a_probe("sage1", False)], False, {"hip": "6.4"},
         "NOTHING RUNS HERE: NVIDIA Test is an AMD GPU: all stays SDPA"),
    ],
    ids=["ready", "not measured", "slower", "no compiler", "broken", "too old", "AMD's"],
)  # fmt: skip
def test_the_verdict_says_what_runs_and_what_to_do(
    monkeypatch, probes, auto_rewrites, here, expected
):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test")
    monkeypatch.setattr(gpus, "capability", lambda device: here.get("capability", (9, 0)))
    monkeypatch.setattr(torch.version, "hip", here.get("hip"))
    monkeypatch.setattr(triton, "__version__", here.get("triton", triton.__version__))
    monkeypatch.setattr(doctor.replay, "why_python", lambda: here.get("replay", ""))
    each = [(torch.device("cuda", i), probes, auto_rewrites) for i in range(2)]
    line = verdict(True, each)  # of two like GPUs one verdict
    assert line.startswith(expected) and line.count("NVIDIA Test") == 1 and "\n" not in line
    assert verdict(False, each).startswith('BROKEN: torch does not know backend="sage"')


@pytest.mark.parametrize("why, row", [
    ("", "C++ submits the calls of compiled models"),
    ("no g++", "Python submits calls, 5 times as slowly as C++ would: no g++"),
])  # fmt: skip
def test_doctor_says_who_submits_calls_on_a_gpu(why, row, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(recipes, "NAMED", {})
    monkeypatch.setattr(doctor.replay, "why_python", lambda: why)
    for name in ("_name", "sdpa_backend"):
        monkeypatch.setattr(doctor, name, str)
    monkeypatch.setattr(doctor, "verdict", lambda *_: "")
    monkeypatch.setattr(doctor, "_policy", lambda device: ("SDPA", False))
    assert doctor.doctor() == 0
    assert row in capsys.readouterr().out.splitlines()


def test_doctor_names_what_sdpa_runs_and_an_untested_torch(monkeypatch, capsys):
    assert doctor.sdpa_backend(torch.device("cpu")) == "FLASH_ATTENTION"
    q = torch.zeros(1, 1, 8, 64)
    monkeypatch.setattr(doctor, "_inputs", lambda *args: (q, q, q))
    monkeypatch.setattr(doctor.families, "flash_attention", lambda: "FA3")
    assert doctor.sdpa_backend(torch.device("cuda")) == "FLASH_ATTENTION (FA3)"
    monkeypatch.setattr(doctor, "fused_sdp_choice", lambda *args: 3)
    assert doctor.sdpa_backend(torch.device("cuda")) == "CUDNN_ATTENTION"
    monkeypatch.setattr(doctor, "fused_sdp_choice", None)
    assert doctor.sdpa_backend(torch.device("cuda")) == "?"
    monkeypatch.setattr(doctor, "untested", lambda: "untested: so and so")
    monkeypatch.setattr(recipes, "NAMED", {})
    assert doctor.doctor() == 0
    assert "\nuntested: so and so\n" in capsys.readouterr().out
    monkeypatch.setattr(torch._dynamo, "list_backends", lambda: ["inductor"])
    assert doctor.doctor() == 1
    assert capsys.readouterr().out.startswith("BROKEN: torch does not know")


@on_cpu
def test_demo_reports_its_calls_and_how_far_they_are_from_exact(run):
    with op_by_op():  # test_packaging.py compiles it
        result = run("demo", "--size", "16", "--layers", "2", "--recipe", "sage1")
    assert result.returncode == 0, result.stderr
    assert "2 layers, 4 heads of 64, 64 tokens; CPU, emulated" in result.stdout
    assert re.search(r"blocks\.\*\.attention +x2 .* sage1 +emulated$", result.stdout, re.M)
    assert "\n2 of 2 attention calls use sage1\n" in result.stdout
    cos_sim = dict(re.findall(r"^(\S.*?) {2,}(0\.\d+) +0\.\d+ +0\.\d+$", result.stdout, re.M))
    assert float(cos_sim['backend="sage"']) > 0.999
    assert float(cos_sim["attending to all keys alike"]) < 0.99
    assert 'step 3 of 3: backend="sage" (first call: compiles)' in result.stderr


@pytest.mark.parametrize("on_terminal", [True, False])
def test_progress_goes_on_while_a_step_runs(monkeypatch, on_terminal):
    stream = io.StringIO()
    stream.isatty = lambda: on_terminal
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(Progress, "EVERY", {on_terminal: 0.01})
    for _ in track(["compiling"], str):
        seen, hangs = re.compile(r"step 1 of 1: compiling, \d+ s"), time.monotonic() + 600
        while len(seen.findall(stream.getvalue())) < 2:
            assert time.monotonic() < hangs
            time.sleep(0.01)
    shown = stream.getvalue()
    assert shown.startswith("\r"[:on_terminal] + "step 1 of 1: compiling")
    assert "\n" not in shown if on_terminal else "\r" not in shown
    assert not on_terminal or not shown.split("\r")[-2].strip()  # the line is cleared


@on_cpu
def test_make_gpu_refuses_a_machine_without_one():
    command = ["make", "gpu", f"PYTHON={sys.executable}"]
    made = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=600
    )
    assert made.returncode == 2 and "torch sees no CUDA device" in made.stderr
    assert "test session starts" not in made.stdout
