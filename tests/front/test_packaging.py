"""What is installed: one pure-Python package, found by torch without being imported; and who in it
imports whom."""

import ast
import email
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from sage_inductor.__main__ import COMMANDS
from sage_inductor.choose import tables
from sage_inductor.inductor_pass import DECIDES_NOTHING
from sage_inductor.integrations import LIBRARIES
from sage_inductor.ops.sources import __version__ as VERSION

ROOT = Path(__file__).parents[2]
CHANGES = (ROOT / "CHANGELOG.md").read_text()
ROOMS = ("sage_inductor", "patterns", "lowering", "ops")


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")


def test_torch_lists_the_backend_without_importing_us_and_it_works(monkeypatch):
    """As config.py says, torch imports nothing of ours, whatever the environment asks. Nor is
    diffusers or transformers imported, until it is registered with."""
    monkeypatch.setenv("SAGE_INDUCTOR_REWRITE_INDUCTOR", "1")
    code = """
import sys, torch, torch.nn.functional as F, torch._inductor.config as c
print('sage' in torch._dynamo.list_backends(), 'sage_inductor' in sys.modules)
print(type(c.pre_grad_custom_pass).__name__)
c.fallback_by_default = True  # g++ would take half the time
f = torch.compile(F.scaled_dot_product_attention, backend="sage")
q = torch.randn(1, 2, 16, 64)
assert torch.equal(f(q, q, q), F.scaled_dot_product_attention(q, q, q))
import sage_inductor
print(len(sage_inductor.report()), type(c.pre_grad_custom_pass).__name__)
print('diffusers' in sys.modules, 'transformers' in sys.modules)
"""
    printed = ["True", "False", "NoneType", "1", "SagePass", "False", "False"]
    assert python(code).stdout.split() == printed


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a build leaves files beside the sources, and takes old ones in
    for room in BELOW:
        shutil.copytree(ROOT / room, source / room)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation",
         "-w", folder, source],
        check=True, capture_output=True,
    )  # fmt: skip
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_the_wheel_is_pure_and_holds_every_module(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")
    packed = {n for n in zipfile.ZipFile(wheel).namelist() if not n.split("/")[0].endswith("info")}
    sources = {
        f"{m.replace('.', '/')}{'/__init__' * (path.stem == '__init__')}.py"
        for m, (_, path) in SOURCES.items()
    }
    cpp = {f"sage_inductor/lowering/{name}" for name in ("launcher.h", "replay.cpp")}
    data = cpp | {"sage_inductor/py.typed"}
    data |= {f"sage_inductor/tables/{path.name}" for path in tables.BUILT_IN.iterdir()}
    assert packed == sources | data


def test_the_wheel_names_the_backend_as_other_libraries_do_too(wheel):
    files = zipfile.ZipFile(wheel)
    (entries,) = [name for name in files.namelist() if name.endswith("entry_points.txt")]
    names = re.findall(
        r"^(\w+) = sage_inductor.backend:sage_backend", files.read(entries).decode(), re.M
    )
    assert names == ["sage", "sage_inductor"]


def links_of(metadata):
    """Where the description of a package leads."""
    return re.findall(r"\]\(([^)]*)\)", metadata.get_payload())


def test_the_wheel_says_what_it_is_and_its_description_has_no_dead_link(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
    metadata = email.message_from_string(archive.read(name).decode())
    assert metadata["Version"] == VERSION and metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "torch.compile" in metadata["Keywords"].split(",")
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    python = metadata["Requires-Python"].removeprefix(">=")
    assert f"Programming Language :: Python :: {python}" in metadata.get_all("Classifier")
    readme = (ROOT / "README.md").read_text()
    headings = {re.sub(r"[^a-z -]", "", x.lower()).replace(" ", "-") for x in
                re.findall(r"^#+ (.*)$", readme, re.M)}  # fmt: skip
    links = links_of(metadata)
    assert len(links) >= 3
    assert not [x for x in links if not x.startswith("https://") and x[1:] not in headings]
    assert "![" not in metadata.get_payload()


def test_with_an_address_the_description_leads_to_the_files_of_the_repository(wheel, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(wheel.parent / "source", source, ignore=shutil.ignore_patterns("*.egg-info"))
    text, address = (source / "setup.py").read_text(), "https://example.org/a/b"
    assert text.count('ADDRESS = ""') == 1
    (source / "setup.py").write_text(text.replace('ADDRESS = ""', f'ADDRESS = "{address}"'))
    subprocess.run(
        [sys.executable, "setup.py", "-q", "egg_info", "-e", tmp_path],
        check=True, capture_output=True, cwd=source,
    )  # fmt: skip
    metadata = email.message_from_string((tmp_path / "sage_inductor.egg-info/PKG-INFO").read_text())
    assert f"Source, {address}" in metadata.get_all("Project-URL")
    within = [x for x in links_of(metadata) if x.startswith(address)]
    assert len(within) > 30 and f"{address}/blob/HEAD/CHANGELOG.md" in within
    for link in within:
        path = link.removeprefix(address).partition("HEAD/")[2].partition("#")[0]
        assert (ROOT / path).is_file(), link
    assert not [x for x in links_of(metadata) if not x.startswith(("https://", "#"))]


def test_the_citation_is_of_this_version():
    said = (ROOT / "CITATION.cff").read_text()
    date = re.search(rf"^## \[{re.escape(VERSION)}\] - (\S+)$", CHANGES, re.M)[1]
    assert f"\nversion: {VERSION}\ndate-released: {date}\n" in said


def test_the_changelog_begins_with_what_is_not_released():
    assert re.findall(r"^## \[(.*?)\]", CHANGES, re.M)[:2] == ["Unreleased", VERSION]


def test_the_demo_runs_from_the_wheel_beside_torch_and_triton_alone(wheel, tmp_path):
    """In a folder of links to what these two require, the wheel unpacked among them. What the backend
    rewrote runs op by op: g++ would take two thirds of the time."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    todo, done = ["torch", "triton"], set()
    while todo:
        name = todo.pop()
        if name in done:
            continue
        done.add(name)
        distribution = importlib.metadata.distribution(name)
        for requirement in map(Requirement, distribution.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                todo.append(requirement.name)
        for top in {file.parts[0] for file in distribution.files} - {".."}:
            if not (tmp_path / top).exists():
                (tmp_path / top).symlink_to(distribution.locate_file(top))
    assert "tqdm" not in done
    code = """
import runpy
from sage_inductor import RECIPES, backend
assert "sage1" in RECIPES
backend.InductorWrapper.__call__ = lambda self, gm, inputs: gm.forward
runpy.run_module("sage_inductor", None, "__main__", True)
"""
    result = subprocess.run(  # -S: without the environment's own packages
        [sys.executable, "-S", "-c", code, "demo", "--size", "16", "--layers", "1",
         "--recipe", "sage1"],
        capture_output=True, text=True, cwd="/", env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "blocks.0.attention" in result.stdout and "Traceback" not in result.stderr
    (cos_sim,) = re.findall(r'^backend="sage" +(0\.\d+) ', result.stdout, re.M)
    assert float(cos_sim) > 0.999


# room -> the rooms that it may import, besides itself
BELOW = {
    "ops": {"ops"},
    "lowering": {"ops", "lowering"},
    "patterns": {"ops", "patterns"},
    "sage_inductor": {"ops", "lowering", "patterns", "sage_inductor"},
}


# folder of ops/ -> the folders beside it that it may import
BESIDE = {
    "reference": set(),
    "quantize": {"reference"},
    "attention": {"quantize", "reference"},
    "training": {"quantize", "attention", "reference"},
    "sparse": {"quantize"},
    "distributed": {"quantize", "reference"},
}


def module_of(room: str, path: Path) -> str:
    parts = path.relative_to(ROOT / room).with_suffix("").parts
    front = ("sage_inductor",) if room == "sage_inductor" else ("sage_inductor", room)
    return ".".join([*front, *parts]).removesuffix(".__init__")


SOURCES = {module_of(room, p): (room, p) for room in BELOW for p in (ROOT / room).rglob("*.py")}


def imports_of(path: Path) -> set[str]:
    """The files of ours that a file imports, wherever in it, by their modules; those that it names
    in a string, too, which are imported later."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found |= {full if full in SOURCES else node.module for full in names.values()}
        elif isinstance(node, ast.Constant):
            found |= {str(node.value)} - {"sage_inductor"}  # the distribution's name
    return found & SOURCES.keys()


GRAPH = {module: imports_of(path) for module, (_, path) in SOURCES.items()}


def test_imports_go_down_the_rooms_only():
    wrong = [
        f"{module} -> {other}"
        for module, others in GRAPH.items()
        for other in others
        if SOURCES[other][0] not in BELOW[SOURCES[module][0]]
    ]
    assert not wrong, wrong


def test_in_ops_no_oracle_imports_a_kernel():
    def folder(module: str) -> str | None:
        return next((x for x in BESIDE if f"{module}.".startswith(f"sage_inductor.ops.{x}.")), None)

    wrong = [
        f"{module} -> {other}"
        for module, others in GRAPH.items()
        for other in others
        if folder(module) and folder(other) not in {None, folder(module), *BESIDE[folder(module)]}
    ]
    assert not wrong, wrong
    assert {folder(module) for module in GRAPH} == {None, *BESIDE}


def test_no_file_imports_itself_by_way_of_others():
    """Imports within functions, too: what they put off is the circle, not its cost."""
    left, circles = dict(GRAPH), None
    while left != circles:  # until taking away what imports nothing that is left changes nothing
        circles = left
        left = {m: others & left.keys() for m, others in left.items() if others & left.keys()}
    on = {m: sorted(others) for m, others in left.items() if m in set().union(*left.values())}
    assert not on, on


def test_the_graph_of_imports_is_the_real_one():
    """Of a room's files each but the entries is imported by some other."""
    entries = {"sage_inductor.__main__"}
    entries |= {module for module, (_, path) in SOURCES.items() if path.stem == "__init__"}
    entries |= {f"sage_inductor.cli.{command}" for command in COMMANDS}
    entries |= {f"sage_inductor.integrations.{library}" for library in LIBRARIES}
    assert SOURCES.keys() - set().union(*GRAPH.values()) <= entries
    assert "sage_inductor.ops.sdpa" in GRAPH["sage_inductor.choose.timing"]


def test_what_decides_imports_nothing_that_caches_are_not_keyed_on():
    unhashed = set()
    for name in DECIDES_NOTHING:
        place = ROOT / "sage_inductor" / name
        files = [place] if place.suffix else list(place.rglob("*.py"))
        assert files and all(file.exists() for file in files), name
        unhashed |= {module_of("sage_inductor", file) for file in files}
    deciding, todo = set(), ["sage_inductor.choose.decide", "sage_inductor.config"]
    while todo:
        deciding.add(module := todo.pop())
        todo += GRAPH[module] - deciding
    assert len(deciding) > 50 and not deciding & unhashed


def test_the_walk_from_the_backend_to_the_output_is_what_the_docs_say():
    steps = re.findall(
        r"^\d+\. `(\S+)` (.*)$", (ROOT / "docs/design/architecture.md").read_text(), re.M
    )
    files = [file for file, _ in steps]
    assert len(files) <= 7 == len(set(files)) and files[0] == "sage_inductor/backend.py"
    for file, what in steps:
        source = (ROOT / file).read_text()
        assert all(code in source for code in re.findall(r"`([^`]+)`", what)), (file, what)


def test_the_library_prints_nothing():
    for _, path in SOURCES.values():
        if path.parent.name != "cli" and path.name != "__main__.py":
            assert not re.search(r"^\s*print\(", path.read_text(), re.M), path


def test_bytes_become_numbers_in_an_order_that_is_said():
    """Python 3.10 knows none by itself."""
    for _, path in SOURCES.values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "from_bytes":
                assert len(node.args) + len(node.keywords) > 1, (path, node.lineno)


def test_private_names_of_torch_and_triton_are_imported_in_compat_alone():
    wrong = set()
    for _, path in SOURCES.values():
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in getattr(node, "names", ()) if hasattr(alias, "name")]
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{name}" for name in names]
            for name in names:
                home, *parts = name.split(".")
                if home in ("torch", "triton") and any(part[0] == "_" for part in parts):
                    wrong.add((path.relative_to(ROOT).as_posix(), name))
    assert not {each for each in wrong if each[0] != "ops/compat.py"}
