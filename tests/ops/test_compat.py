"""The private names of torch and Triton: each is there, is used, and is taken in one file alone."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton

from sage_inductor.ops import compat

ROOT = Path(__file__).parents[2]
FILES = {
    path: path.read_text()
    for room in ("ops", "lowering", "patterns", "sage_inductor")
    for path in (ROOT / room).rglob("*.py")
    if path.name != "compat.py"
}
# With an underscore, and documented all the same.
DOCUMENTED = {
    "torch._dynamo.reset", "torch._dynamo.list_backends", "torch._dynamo.mark_dynamic",
    "torch._dynamo.explain", "torch._inductor.aoti_compile_and_package",
    "torch._inductor.list_mode_options", "torch._inductor.config",
}  # fmt: skip


@pytest.mark.parametrize("row", compat.TABLE, ids=lambda row: row.places[0])
def test_every_name_is_there_on_this_torch_and_triton(row):
    since = re.fullmatch(r"torch (\d+)\.(\d+) on", row.seen)  # older ones have it not
    here = tuple(map(int, torch.__version__.split(".")[:2]))
    if since and here < tuple(map(int, since.groups())):
        assert row.value is None, f"it is there from {here} on"
    else:
        assert row.value is not None, f"without it {row.without} (seen in {row.seen})"
    assert sum(row.places[0] in each.places for each in compat.TABLE) == 1


def test_every_name_is_used():
    names = [name for name, value in vars(compat).items() if any(
        value is row.value for row in compat.TABLE) and not name.startswith("_")]  # fmt: skip
    imported = {
        alias.name
        for text in FILES.values()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and node.module == "sage_inductor.ops.compat"
        for alias in node.names
    }
    whole = "\n".join(FILES.values())
    unused = {n for n in names if n not in imported and f"compat.{n}" not in whole}
    assert len(names) >= len(compat.TABLE) and not unused, unused


def test_no_other_file_touches_one():
    for path, text in FILES.items():
        chains = {ast.unparse(n) for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Attribute)}
        private = {chain for chain in chains if re.match(r"(torch|triton)\._(?!_)", chain)}
        found = {c for c in private if not any(d.startswith(c) for d in DOCUMENTED)}
        assert not found, (path.name, found)


def test_a_needed_name_that_is_gone_is_said_with_what_it_costs(monkeypatch):
    monkeypatch.setattr(compat, "TABLE", [])
    with pytest.raises(
        ImportError, match=r"none of torch:_gone \(seen in 1.0\). Without it all ends"
    ):
        compat._take("torch:_gone", seen="1.0", without="all ends")
    assert compat._take("torch:_gone", seen="1.0", without="less", optional=True) is None
    assert compat._take("torch:_gone", "torch:Tensor", seen="1.0", without="").__name__ == "Tensor"
    assert [row.value is None for row in compat.TABLE] == [True, False]


def test_without_triton_the_import_says_what_is_needed():
    run = "import sys; sys.modules['triton'] = None; import sage_inductor"
    failed = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True)
    assert failed.returncode == 1
    assert "ImportError: sage_inductor needs Triton 3.6 or newer, which torch" in failed.stderr


@pytest.mark.parametrize(
    "torch, triton, said",
    [
        ("2.13.0+cpu", "3.7.1", ""),
        ("2.15.0", "3.9.0+git12", ""),
        ("2.13.0", "3.9.0", "untested: torch 2.13 with Triton 3.9 (tested: 2.11 with 3.6, 2.13 wi"),
        ("2.16.0.dev2", "3.10.0", "untested: torch 2.16 with Triton 3.10 (tested: "),
    ],
)
def test_a_pair_that_was_not_tested_is_said_to_be_untested(torch, triton, said):
    assert compat.untested(torch, triton)[: len(said)] == said
    assert bool(compat.untested(torch, triton)) == bool(said)


def test_the_pair_that_is_here_is_asked_about():
    assert compat.untested.__defaults__ == (torch.__version__, triton.__version__)
