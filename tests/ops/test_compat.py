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
    "torch._dynamo.reset", "torch._dynamo.list_backends", "torch._dynamo.mark_dynamic", "torch._dynamo.mark_static_address",
    "torch._dynamo.explain", "torch._inductor.aoti_compile_and_package",
    "torch._inductor.list_mode_options", "torch._inductor.config",
}  # fmt: skip


@pytest.mark.parametrize("row", compat.TABLE.values(), ids=lambda row: row.places[0])
def test_every_name_is_there_on_this_torch_and_triton(row):
    since = re.fullmatch(r"torch (\d+)\.(\d+) on", row.seen)  # older ones have it not
    here = tuple(map(int, torch.__version__.split(".")[:2]))
    if since and here < tuple(map(int, since.groups())):
        assert row.value() is None, f"it is there from {here} on"
    else:
        assert row.value() is not None, f"without it {row.without} (seen in {row.seen})"
    assert row.seen.lower().startswith(re.match(r"\w+", row.places[0])[0])
    assert sum(row.places[0] in each.places for each in compat.TABLE.values()) == 1


def test_every_name_is_used():
    imported = {
        alias.name
        for text in FILES.values()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and node.module == "sage_inductor.ops.compat"
        for alias in node.names
    }
    whole = "\n".join(FILES.values())
    unused = {n for n in compat.TABLE if n not in imported and f"compat.{n}" not in whole}
    assert len(compat.TABLE) > 70 and not unused, unused


def test_no_other_file_touches_one():
    for path, text in FILES.items():
        chains = {ast.unparse(n) for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Attribute)}
        private = {chain for chain in chains if re.match(r"(torch|triton)\._(?!_)", chain)}
        found = {c for c in private if not any(d.startswith(c) for d in DOCUMENTED)}
        assert not found, (path.name, found)


def test_a_needed_name_that_is_gone_is_said_with_what_it_costs(monkeypatch):
    def take(*places, **how):
        monkeypatch.setitem(compat.TABLE, "gone", compat._take(*places, seen="1.0", **how))
        monkeypatch.delitem(vars(compat), "gone", raising=False)
        return compat.gone

    with pytest.raises(
        ImportError, match=r"none of torch:_gone \(seen in 1.0\). Without it all ends"
    ):
        take("torch:_gone", without="all ends")
    assert take("torch:_gone", without="less", optional=True) is None
    assert take("torch:_gone", "torch:Tensor", without="").__name__ == "Tensor"
    monkeypatch.delitem(vars(compat), "gone")


def test_a_name_that_has_no_row_does_not_exist():
    with pytest.raises(AttributeError, match="compat' has no attribute 'nothing'"):
        _ = compat.nothing


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
