"""``python -m sage_inductor``, as a person runs it: in a process of its own."""

import re
import subprocess
import sys

import pytest
import torch

from sage_inductor import cost
from sage_inductor.cli.doctor import crossovers
from sage_inductor.ops import recipe as recipes

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="what is said without a GPU")


def run(*arguments, code: str | None = None) -> subprocess.CompletedProcess:
    command = ["-c", code] if code else ["-m", "sage_inductor"]
    return subprocess.run(
        [sys.executable, *command, *arguments], capture_output=True, text=True, timeout=300
    )


def test_help_names_the_commands():
    result = run("--help")
    assert result.returncode == 0
    assert re.search(r"^ +doctor .*recipe really runs here$", result.stdout, re.M)
    assert re.search(r"^ +demo .*report, accuracy, speed$", result.stdout, re.M)


@pytest.mark.parametrize("command", ["doctor", "demo"])
def test_every_command_explains_itself(command):
    result = run(command, "--help")
    assert result.returncode == 0
    assert f"usage: python -m sage_inductor {command}" in result.stdout


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "the following arguments are required: COMMAND"),
        (["docter"], "invalid choice: 'docter' (choose from"),
        (["demo", "--recipe", "sage9"], "invalid choice: 'sage9' (choose from"),
        (["demo", "--size", "63"], "--size: must be a positive even number, got '63'"),
        (["demo", "--layers", "0"], "--layers: must be a positive number, got '0'"),
    ],
    ids=["nothing", "command", "recipe", "size", "layers"],
)
def test_a_mistake_is_refused_with_what_was_got(arguments, message):
    result = run(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@on_cpu
def test_doctor_names_versions_and_runs_every_recipe():
    result = run("doctor")
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"torch {torch.__version__}, triton " in result.stdout
    assert 'backend="sage": registered' in result.stdout
    assert "no CUDA device: attention stays SDPA" in result.stdout
    errors = re.findall(
        r"^ +(\S+) +(64|128|256) +(full|causal|mask) +0\.(\d)\d+$", result.stdout, re.M
    )
    assert len(errors) == 9 * len(recipes.NAMED), result.stdout
    for name, *_, tenths in errors:
        assert tenths in ("012" if recipes.NAMED[name].of_qk.smooths_q else "0")
    assert "recipe 'auto': SDPA: on CPU attention stays as it was" in result.stdout


def test_doctor_says_from_which_lengths_a_recipe_is_chosen():
    assert crossovers(cost.H200, (9, 0))[0].startswith(
        "head_dim 64, full: sage2-8b-per-token from N="
    )
    assert crossovers("NVIDIA Test", (8, 0)) == []


@on_cpu
@pytest.mark.parametrize(
    "broken, finding",
    [
        ("lambda q, *_: (q * float('nan'), None)", "nan  WRONG: above 0.1"),
        ("lambda q, *_: (q * 0, None)", "1.0000  WRONG: above 0.1"),
        ("lambda q, *_: 1 / 0", "FAILED: ZeroDivisionError: division by zero"),
    ],
    ids=["NaN", "zeros", "raises"],
)
def test_doctor_fails_where_a_kernel_does(broken, finding):
    code = "import sys, torch; from sage_inductor.__main__ import main; "
    code += f"torch.ops.sage.sdpa = {broken}; sys.exit(main(['doctor']))"
    result = run(code=code)
    assert result.returncode == 1, result.stdout + result.stderr
    assert finding in result.stdout


@on_cpu
def test_demo_reports_its_calls_and_how_far_they_are_from_exact():
    result = run("demo", "--size", "16", "--layers", "2", "--recipe", "sage1")
    assert result.returncode == 0, result.stderr
    assert "2 layers, 4 heads of 64, 64 tokens; CPU, emulated" in result.stdout
    assert re.search(r"blocks\.\*\.attention +x2 .* sage1 +emulated$", result.stdout, re.M)
    assert "\n2 of 2 attention calls use sage1\n" in result.stdout
    cos_sim = dict(re.findall(r"^(\S.*?) {2,}(0\.\d+) +0\.\d+ +0\.\d+$", result.stdout, re.M))
    assert float(cos_sim['backend="sage"']) > 0.999
    assert float(cos_sim["attending to all keys alike"]) < 0.99
    assert 'backend="sage"' in result.stderr, "no progress was shown"


def test_demo_without_tqdm_says_what_is_missing():
    code = "import sys; sys.modules['tqdm'] = None; "
    code += "from sage_inductor.__main__ import main; sys.exit(main(['demo', '--layers', '1']))"
    result = run(code=code)
    assert result.returncode == 1
    assert "the demo needs tqdm" in result.stderr
    assert "Traceback" not in result.stderr
