"""What is imported, and how many calls of Python a step takes: counts, which no machine's speed
changes."""

import subprocess
import sys

import pytest

HEAVY = "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy", "networkx"


# Each code is run by a fork of one process, which has imported torch: that takes most of the time.
FORKS = """
import os, sys, torch
for code in sys.stdin:
    if not (child := os.fork()):
        exec(eval(code), {})
        print(*sys.modules, flush=True)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print(flush=True)
"""


@pytest.fixture(scope="module")
def imported():
    """Gives the modules of a process that has imported torch and run some code."""
    command, pipe = [sys.executable, "-c", FORKS], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as forks:

        def imported(code: str) -> set[str]:
            print(repr(code), file=forks.stdin, flush=True)
            found = set(forks.stdout.readline().split())
            assert found, code
            return found

        yield imported
        forks.stdin.close()


def test_the_import_takes_nothing_of_torch_that_torch_does_not_take_itself(imported):
    new = imported("import sage_inductor") - imported("import triton")
    assert not {name for name in new if name.startswith(("torch", *HEAVY))}
    assert len(new) < 150 and "sage_inductor.ops.sdpa" in new


def test_what_torch_imports_later_is_told_of_our_ops_then(imported):
    told = "import sage_inductor, torch.distributed.tensor"
    assert "sage_inductor.ops.distributed.sharding" in imported(told)
    told = "import sage_inductor, torch._inductor.compile_fx"
    assert {"sage_inductor.lowering", "sage_inductor.ops.distributed.sharding"} <= imported(told)
    told = "import torch.distributed.tensor, torch._inductor.lowering, sage_inductor"
    assert {"sage_inductor.lowering", "sage_inductor.ops.distributed.sharding"} <= imported(told)


def test_without_transformers_the_other_names_are_there(imported):
    imported(
        "import sys; sys.modules['transformers'] = None\n"
        "import sage_inductor; from sage_inductor import *\n"
        "assert 'Int8Cache' not in dir(sage_inductor) and callable(attention)\n"
        "try: sage_inductor.Int8Cache\n"
        "except ModuleNotFoundError as error: assert 'transformers' in str(error)\n"
        "else: raise AssertionError"
    )


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["docto"], []], ids=str)
def test_the_command_line_answers_without_torch(arguments):
    """By a torch that cannot be imported."""
    code = "import sys; sys.modules['torch'] = None; import runpy; "
    code += "sys.orig_argv[1:3] = ['-m', 'sage_inductor']; "
    code += "runpy.run_module('sage_inductor', run_name='__main__', alter_sys=True)"
    run = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    said = {"--version": "sage_inductor 0.", "--help": "doctor    what is installed"}
    assert said.get(*arguments[:1] or [""], "COMMAND") in run.stdout + run.stderr
    assert "Traceback" not in run.stderr and run.returncode == 2 * (arguments[:1] not in (
        ["--version"], ["--help"]))  # fmt: skip


def test_every_public_name_is_found_when_it_is_asked_for(imported):
    """In any order: config is also a module's name."""
    names = "import sage_inductor; names = sage_inductor.__all__\n"
    for order in ("names", "reversed(names)"):
        code = names + f"assert all(hasattr(sage_inductor, x) for x in {order})"
        imported(code)
    imported(
        "import sage_inductor, sage_inductor.config as c\n"
        "from sage_inductor.config import config\n"
        "from sage_inductor import diagnose, report\n"
        "assert c is config is sage_inductor.config and callable(report) and callable(diagnose)\n"
        "import sage_inductor.backend; from sage_inductor import *\n"
        "assert sage_inductor.report is report and attention is sage_inductor.attention"
    )
