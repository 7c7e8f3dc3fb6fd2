"""README.md and docs/: what is printed there runs, and prints what is printed there.

EXPECTTEST_ACCEPT=1 writes into the pages what their snippets print.
"""

import contextlib
import ctypes
import dataclasses
import doctest
import inspect
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import comfyui_stand_in
import models
import pytest
import torch
from pairs import has_every_variant
from support import compile_cpp, op_by_op
from torch._dynamo.utils import counters

import sage_inductor
from bench import pages as written
from sage_inductor import lowering as launchers
from sage_inductor import options
from sage_inductor.choose import tables
from sage_inductor.policy import Policy

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
FENCED = re.compile(r"^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S)
LANGUAGES = {"python", "bash", "cpp", "cmake", "json", "text", "log"}  # log: of another machine

# Commands that are run elsewhere, or only where there is more than a test may ask for.
ELSEWHERE = {
    "pip install .": "tests/front/test_packaging.py::test_the_wheel_is_pure_and_holds_every_module",
    'python bench/side_by_side.py black-forest-labs/FLUX.1-dev "a lighthouse at dusk"': "tests/bench/test_side_by_side.py::test_an_image_is_one_row_and_the_first_call_is_of_two_steps",
    "python -m sage_inductor doctor": "tests/front/test_command_line.py::test_doctor_names_versions_and_runs_every_recipe",
}
# Words of snippets that take a package of the extra "models", or one that `make weights` installs.
NEEDED = {
    "diffusers": "diffusers", "transformers": "transformers", "lora": "peft", "torchao": "torchao",
}  # fmt: skip
ACCEPT = os.environ.get("EXPECTTEST_ACCEPT") == "1"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT).as_posix()).removeprefix("docs/")


class Block(NamedTuple):
    start: int  # of the text in the page
    language: str
    text: str
    file: str  # that the line before says it is: "`main.cpp`:"


def blocks_of(page: str) -> list[Block]:
    blocks = []
    for found in FENCED.finditer(page):
        named = re.search(r"`([\w.]+)`:\n\n$", page[: found.start()])
        text = found["text"]
        blocks += [Block(found.start("text"), found["language"], text, named[1] if named else "")]
    return blocks


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder to work in, and the settings of before when the test is over."""
    monkeypatch.chdir(tmp_path)
    before = {name: getattr(sage_inductor.config, name) for name in options.SETTINGS}
    yield tmp_path
    for name, value in before.items():
        setattr(sage_inductor.config, name, value)


# -- stand-ins for what is downloaded ----


@pytest.fixture
def small(monkeypatch, here):
    """What from_pretrained gives: models of the same classes, small and of random weights. ComfyUI
    is a stand-in."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    comfyui_stand_in.install(monkeypatch)
    with contextlib.suppress(ImportError):
        import diffusers

        monkeypatch.setattr(diffusers, "FluxPipeline", SmallFlux)
        monkeypatch.setattr(diffusers.WanPipeline, "from_pretrained", SmallWan.from_pretrained)
    with contextlib.suppress(ImportError):
        import transformers

        monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", small_tokenizer)
        monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", small_llama)
        auto = transformers.AutoModelForImageTextToText
        monkeypatch.setattr(auto, "from_pretrained", small_qwen_vl)


class SmallFlux:
    """A pipeline whose transformer is real, and all that is around it noise."""

    def __init__(self, transformer, dtype):
        self.transformer, self.dtype = transformer.to(dtype), dtype

    @classmethod
    def from_pretrained(cls, name: str, torch_dtype):
        from safetensors.torch import save_file

        assert name.count("/") == 1
        for file in ("first", "second"):  # LoRAs
            key = "transformer.transformer_blocks.0.attn.to_q"
            A, B = torch.randn(8, 128), torch.randn(128, 8)
            state = {f"{key}.lora_A.weight": A, f"{key}.lora_B.weight": B}
            save_file(state, f"{file}.safetensors")
        return cls(models.flux()[0], torch_dtype)

    def to(self, device: str):
        self.transformer.to(device)
        return self

    @torch.no_grad()
    def run(self, inputs: dict):
        device = self.transformer.device
        kinds = {name: self.dtype if x.is_floating_point() else None for name, x in inputs.items()}
        return self.transformer(**{k: x.to(device, kinds[k]) for k, x in inputs.items()}).sample

    def __call__(self, prompt: str, height: int, width: int):
        return SimpleNamespace(images=[self.run(models.flux(patches=height * width // 256**2)[1])])


class SmallWan(SmallFlux):
    @classmethod
    def from_pretrained(cls, name: str, torch_dtype):
        return cls(models.wan()[0], torch_dtype)

    def __call__(self, prompt: str, height: int, width: int, num_frames: int):
        _, inputs = models.wan(text=6)
        inputs["hidden_states"] = torch.randn(1, 4, num_frames // 27, height // 90, width // 160)
        return SimpleNamespace(frames=[self.run(inputs)])


def small_llama(name: str, dtype, attn_implementation=None):
    import transformers

    given = {"num_hidden_layers": 2, "attn_implementation": attn_implementation}
    return models.decoder(transformers, "Llama", **given).eval().to(dtype)


def small_qwen_vl(name: str, dtype):
    import transformers

    return models.that_sees(transformers, "Qwen2_5_VL").to(dtype)


def small_tokenizer(name: str, padding_side="right"):
    import transformers

    def tokenize(texts: list[str], padding=False, return_tensors="pt"):
        ids = [1 + torch.arange(len(text)) % 99 for text in texts]  # of a vocabulary of 100
        ids = torch.nn.utils.rnn.pad_sequence(ids, True, padding_side=padding_side)
        return transformers.BatchEncoding({"input_ids": ids, "attention_mask": (ids > 0).long()})

    return tokenize


# -- snippets ----


# Pages whose snippets are compiled in each run: what Inductor makes is their subject.
COMPILED = "options.md", "packages.md"


def pages():
    """Each page once, and again with all compiled."""
    for page in PAGES:
        compiled = page.name in COMPILED or torch.cuda.is_available()
        yield pytest.param(page, compiled, id=name_of(page))
        if not compiled:
            yield pytest.param(page, True, id=f"{name_of(page)}-compiled", marks=pytest.mark.sweep)


@pytest.mark.parametrize("page, compiled", [*pages()])
def test_a_page_runs_from_top_to_bottom(page, compiled, here, small, monkeypatch):
    """Each Python snippet on its own, as in a new interpreter; files stay for the next one. Without a
    GPU "cuda" is read as "cpu", and 8192 tokens as 64. A snippet in a file is for torchrun, where the
    page has that command.
    Where it is not compiled, the graphs that backend="sage" rewrote run op by op, and the processes
    of torchrun are forks of one."""
    quick = torch._inductor.config.patch({"aot_inductor.compile_wrapper_opt_level": "O0"})
    whole, made = torch._inductor.aot_compile, {}

    def once(program, args=(), *more, **given):
        """packages.md packages one layer under three names, and compiles it once."""
        key = program.code, *((x.shape, x.dtype, x.device) for x in args)  # compiling changes code
        if key not in made:
            made[key] = whole(program, args, *more, **given)
        return made[key]

    monkeypatch.setattr(torch._inductor, "aot_compile", once)
    with contextlib.nullcontext() if compiled else op_by_op(), quick:
        run_page(page, compiled)


def run_page(page: Path, compiled: bool) -> None:
    text = page.read_text()
    out, renewed = None, []
    for block in blocks_of(text):
        if block.language == "text":
            if out is not None and not torch.cuda.is_available():  # the pages show a CPU's output
                renewed.append((block, checked(block.text, out)))
            out = None
        elif block.language == "python" and not (block.file and "\ntorchrun " in text):
            out = run_python(block, text, page)
        elif block.language == "bash":
            lines = block.text.splitlines()
            out = "".join(run_command(line if compiled else forked(line)) for line in lines)
        else:
            name = block.file or f"snippet.{block.language}"
            Path(name).write_text(block.text)
    if ACCEPT:
        for block, new in reversed(renewed):
            text = text[: block.start] + new + text[block.start + len(block.text) :]
        page.write_text(text)


def run_python(block: Block, text: str, page: Path) -> str | None:
    """What it prints; None where a package that it is about is not installed."""
    if any(word in block.text and not find_spec(name) for word, name in NEEDED.items()):
        return None
    torch._dynamo.reset()
    counters.clear()
    lines = "\n" * text.count("\n", 0, block.start)  # so that errors name the page's lines
    code = block.text
    if not torch.cuda.is_available():
        code = code.replace('"cuda"', '"cpu"').replace("8192", "64")
    out = io.StringIO()
    with contextlib.redirect_stdout(out), sage_inductor.stage(None):  # a Schedule names its stages
        exec(compile(lines + code, str(page), "exec"), {"__name__": "__main__"})
    return out.getvalue()


# torchrun imports torch in itself and in each of its processes: that takes most of its time.
FORK = """
import os, runpy, socket, sys
import sage_inductor
count, program = sys.argv[1:]
with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=count)
children = []
for rank in range(int(count)):
    if not (child := os.fork()):
        os.environ["RANK"] = str(rank)
        runpy.run_path(program, run_name="__main__")
        sys.exit()
    children.append(child)
sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
"""


def forked(line: str) -> str:
    """Of torchrun, the same program in forks of one process; any other command as it is."""
    found = re.fullmatch(r"torchrun --standalone --nproc-per-node (\d+) (\S+)", line)
    if not found:
        return line
    Path("fork.py").write_text(FORK)
    return f"{shlex.quote(sys.executable)} fork.py {found[1]} {found[2]}"


def run_command(line: str) -> str:
    """What it prints."""
    command = line.partition(" #")[0].strip()
    if command in ELSEWHERE:
        return ""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        command, shell=True, env={**os.environ, "PATH": path}, text=True,
        capture_output=True,
    )  # fmt: skip
    if torch.version.cuda and "I cannot find the CUDA" in result.stderr:
        pytest.skip("this torch's C++ needs the CUDA toolkit, and there is none")
    assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
    return result.stdout


def checked(shown: str, printed: str) -> str:
    """What a page is to show: what it shows, if that is what was printed. Decimal fractions and the
    widths of columns may differ; "..." fits anything."""
    if doctest.OutputChecker().check_output(rough(shown), rough(printed), doctest.ELLIPSIS):
        return shown
    if ACCEPT and "..." not in shown:
        return printed
    pytest.fail(f"the page shows\n{shown}\nbut this was printed\n{printed}")


def rough(text: str) -> str:
    text = re.sub(r"\d+(\.\d+)?e[-+]?\d+|\d+\.\d+", "0.0", text)
    return re.sub(r" {2,}", "  ", re.sub(r"-{3,}", "---", text))


def test_a_policy_in_json_is_one(here):
    found = [b.text for page in PAGES for b in blocks_of(page.read_text()) if b.language == "json"]
    for text in found:
        Path("policy.json").write_text(text)
        assert Policy.load("policy.json").rules
    assert found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_fence_has_a_language_and_an_end(page):
    text = page.read_text()
    blocks = blocks_of(text)
    assert len(re.findall(r"^```", text, re.M)) == 2 * len(blocks)
    assert {block.language for block in blocks} <= LANGUAGES


def test_commands_that_are_run_elsewhere_are_printed_and_run_there():
    commands = {
        line.partition(" #")[0].strip()
        for page in PAGES
        for block in blocks_of(page.read_text())
        if block.language == "bash"
        for line in block.text.splitlines()
    }
    assert ELSEWHERE.keys() <= commands
    for where in ELSEWHERE.values():
        file, name = where.split("::")
        assert f"def {name}(" in (ROOT / file).read_text()


# -- the rest ----


OF_LENGTHS = "lengths", "training_lengths"


def test_tables_are_what_the_results_say(monkeypatch):
    """Of two tables, which take long to compute, each run looks at one head_dim's rows."""
    if not has_every_variant():
        few = {}
        for gpu, table in tables.built_in().items():
            of_64 = {family: x for family, x in table.families.items() if family.head_dim == 64}
            few[gpu] = dataclasses.replace(table, families=of_64)
        monkeypatch.setattr(tables, "built_in", lambda: few)
        for page in PAGES:
            for found in written.MARKED.finditer(page.read_text()):
                if found[2] in OF_LENGTHS:
                    shown = found[0].removeprefix(found[1]).removesuffix(found[3])
                    expected = written.TABLES[found[2]]({})
                    assert "| 64 |" in expected and set(expected.splitlines()) <= set(
                        shown.splitlines()
                    )
                    monkeypatch.setitem(written.TABLES, found[2], lambda gpus, shown=shown: shown)
    assert written.main(["--check"]) == 0


def by_hand(page: Path) -> str:
    """What is neither a snippet nor made by bench/pages.py."""
    text = re.sub(r"<!-- table:\w+ -->.*?<!-- table:end -->", "", page.read_text(), flags=re.S)
    return FENCED.sub("", text)


def test_the_readme_is_short_and_lines_are_not_long():
    assert len(PAGES[0].read_text().splitlines()) <= 150
    for page in PAGES:
        prose = [x for x in by_hand(page).splitlines() if not x.startswith(("|", "!["))]
        assert not [x for x in prose if len(x) > 100], page


def long_sentences(text: str) -> list[str]:
    """Of more than 40 words, in paragraphs, items of lists and cells of tables. A code span is a
    word, and a link's address none."""
    text = re.sub(r"`` .*? ``|`[^`]*`", "code", text, flags=re.S)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    parts = re.split(r"\n\s*\n|^(?:\* |\d+\. |#.*$)|\|", text, flags=re.M)
    found = [each for part in parts for each in re.split(r"(?<=[.?!])[*)\"]*\s", part)]
    return [each for each in found if len(each.split()) > 40]


def test_no_sentence_is_long():
    for page in (*PAGES, ROOT / "CONTRIBUTING.md"):
        long = long_sentences(by_hand(page))
        assert not long, (page, long)


@pytest.mark.parametrize("place", ["{}", "# A\n{} B.", "B.\n\n{}", "* a\n* {}\n* b", "| a | {} |"])
def test_a_long_sentence_is_found_wherever_it_stands(place):
    words = "`a b c`", *["word\n "] * 36, "(see", "[a", "link](to.md)).*"
    assert not long_sentences(place.format(" ".join(words)))
    assert len(long_sentences(place.format(" ".join((*words[:2], *words[1:]))))) == 1


WORDS = "beside", "besides", "of ours", "is to be", "are to be", "kind of call", "kinds of calls"


def test_a_measured_number_of_the_changelog_names_the_page_that_has_it():
    """A page's tables are made of committed results: `test_tables_are_what_the_results_say`."""
    changes = (ROOT / "CHANGELOG.md").read_text()
    figure = re.compile(r"(?<!\w)\d[\d.,]*(x\b| ?%| (µs|us|ms|KB|times as)\b)")
    bullets = re.split(r"^\* ", changes, flags=re.M)[1:]
    measured = [each for each in bullets if figure.search(each)]
    assert len(measured) >= 1
    assert [each for each in measured if "docs/" not in each and "MIN_SPEEDUP" not in each] == []


def test_pages_are_written_in_plain_words():
    """CONTRIBUTING.md says in which. Tables that bench/pages.py makes have the words of results."""
    for page in PAGES:
        found = re.findall(rf"\b({'|'.join(WORDS)})\b", by_hand(page), re.I)
        assert not found, (page, found)


SOURCES = [
    file
    for room in ("sage_inductor", "ops", "lowering", "patterns")
    for kind in ("*.py", "*.cpp", "*.h")
    for file in (ROOT / room).rglob(kind)
]
# A sentence begins where a line, a comment or a docstring does, or after the end of another.
OPENING = re.compile(r"(?:^\s*(?:#:?|//|\*)?\s*(?:\"\"\")?|[.:;)] )Of [a-z\d]", re.M)
REFUSED = re.compile(r"\b(besides|so many|in sight|lent|lenders)\b")


def test_the_library_is_written_in_plain_words():
    assert len(SOURCES) > 100
    for file in (*SOURCES, *PAGES):
        text = file.read_text() if file in SOURCES else by_hand(file)
        assert not OPENING.findall(text), (file, OPENING.findall(text))
        assert not REFUSED.findall(text), (file, REFUSED.findall(text))


@pytest.mark.parametrize(
    "text", ['"""Of a row."""', "x = 1\n    # Of rows, 3", "A row. Of two, one"]
)
def test_a_sentence_that_opens_with_of_is_found(text):
    assert OPENING.search(text) and not OPENING.search(text.replace("Of", "For"))


def test_contributing_fits_on_a_page_and_names_files_that_are_there():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert len(page.splitlines()) <= 100
    files = re.findall(
        r"`([\w/]+\.(?:py|md))", page + (ROOT / "docs/design/architecture.md").read_text()
    )
    assert len(files) > 30 and not {x for x in files if not (ROOT / x).is_file()}


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)]+)\)", FENCED.sub("", page.read_text())):
            if not target.startswith("https://"):
                file, _, anchor = target.partition("#")
                path = page.parent / file if file else page
                assert path.exists(), (page, target)
                assert not anchor or anchor in anchors(path), (page, target)
    index = ROOT / "docs" / "index.md"
    names = set(map(name_of, PAGES[1:])) - {index.name}
    assert names == set(re.findall(r"\]\(([\w/-]+\.md)", index.read_text()))
    assert "](docs/index.md)" in PAGES[0].read_text()


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def test_every_option_is_explained():
    text = (ROOT / "docs/reference/options.md").read_text()
    assert all(f"`sage.{name}`" in text for name in options.OPTIONS)
    for name, option in options.SETTINGS.items():
        assert f"`config.{name}`" in text and f"`{option.variable}`" in text


def test_the_tested_versions_are_those_that_are_installed_for_tests():
    page = (ROOT / "docs/install.md").read_text()
    pins = dict(re.findall(r"^([\w-]+)==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.M))
    for name in ("torch", "Triton", "diffusers", "transformers", "PEFT"):
        assert f"{name} {pins[name.lower()]}" in page, name


@pytest.mark.gpu
def test_first_programs_are_rewritten_on_a_gpu_that_was_measured(here):
    if not tables.known(torch.cuda.get_device_name()):
        pytest.skip("no length is measured on this GPU")
    for page, shown, calls in (
        (PAGES[0], "", 1),
        (PAGES[0].parent / "docs/install.md", "relative L1", 3),
    ):
        text = page.read_text()
        first, *_ = [each for each in blocks_of(text) if each.language == "python"]
        assert shown in run_python(first, text, page)
        assert len(sage_inductor.report()) == calls and not sage_inductor.report().refused


# -- packages ----


@pytest.mark.gpu
def test_the_deployment_replays_a_cuda_graph(here):
    """As printed, by cmake; where that or the CUDA toolkit is missing, by g++ and what is there."""
    page = ROOT / "docs/guide/packages.md"
    text = page.read_text()
    ctypes.CDLL("libstdc++.so.6", ctypes.RTLD_GLOBAL)  # reference/packages.md: troubles
    commands, without = [], ""
    for block in blocks_of(text[: text.index("## Which lengths it serves")]):
        if block.language == "python":
            run_python(block, text, page)
        elif block.language == "bash":
            commands = block.text.splitlines()
        elif block.file:
            Path(block.file).write_text(block.text)
    if not (shutil.which("cmake") and shutil.which("nvcc")):
        without, commands = compile_cpp("main.cpp", "run"), ["./run"]
    out = "".join(map(run_command, commands))
    assert "[1, 1024, 128]" in out
    if without:
        pytest.skip(without)
    assert float(re.search(r"replayed, differs by (\S+)", out)[1]) == 0


def test_every_error_of_a_package_is_explained():
    page = (ROOT / "docs/reference/packages.md").read_text()
    launcher = Path(launchers.__file__).with_name("launcher.h").read_text()
    failures = re.findall(r"fail\((.*?)\);\n", launcher, re.S)
    texts = {text for each in failures for text in re.findall(r'"([^"\n]*)"', each)}
    long = {text.strip() for text in texts if len(text) > 14}
    assert len(long) > 5 and not {text for text in long if text not in page}


def test_the_api_has_each_public_name_once():
    names = [name for its in written.TASKS.values() for name in its]
    assert sorted(names) == sorted({*sage_inductor.__all__} - {"__version__"})


def test_the_docstring_of_a_public_function_names_each_parameter_and_what_it_raises():
    functions = [getattr(sage_inductor, name) for name in sage_inductor.__all__]
    for function in filter(inspect.isfunction, functions):
        given = inspect.signature(function).parameters.values()
        names = [each.name for each in given if each.kind is not each.VAR_KEYWORD]
        missing = [name for name in names if not re.search(rf"\b{name}\b", function.__doc__)]
        assert not missing, (function.__name__, missing)
        assert not names or "Raises " in function.__doc__, function.__name__
