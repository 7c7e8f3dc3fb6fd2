"""What type checkers make of a user's file: mypy, and pyright as basedpyright ships it (pyright's
own package downloads node and itself when it runs)."""

import collections
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch

from sage_inductor import RECIPES, Options, RecipeOption, options
from sage_inductor.names import AUTO, OFF, TRAINING, TrainingOption
from sage_inductor.ops.recipe import TABLE

ROOT = Path(__file__).parents[2]
TYPE_ERRORS = Path(__file__).with_name("type_errors.json")

# What each line must be: a type, by assert_type, or the error that its comment asks to be given.
USERS = """\
# pyright: standard
from typing import Any, assert_type, cast

import torch

import sage_inductor
from sage_inductor import RECIPES, Diagnosis, Options, Policy, RecipeName, RecipeOption, Report, Rule
from sage_inductor import TrainingDiagnosis, config

model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)

with config.patch(emulate=True, recipe="sage1"):
    assert_type(sage_inductor.report(), Report)


@config.patch("force", True)
def answer(question: str) -> int:
    return len(question)


assert_type(answer("?"), int)
assert_type(config.recipe, RecipeOption)
assert_type(config.force, bool)
assert_type(sage_inductor.explain(model, options={"sage.recipe": "sage1"})(x), Report)
assert_type(sage_inductor.rewrite(torch.export.export(model, (x,))), Report)
assert_type(sage_inductor.diagnose(model)(x), Diagnosis)
with sage_inductor.diagnosing(model) as found:
    assert_type(found, Diagnosis)
assert_type(sage_inductor.diagnose_training(model, loss=torch.mean)(x), TrainingDiagnosis)
assert_type(Policy.load("policy.json"), Policy)
assert_type(sage_inductor.attention(x, x, x, is_causal=True, recipe="sage1"), torch.Tensor)
out, lse = sage_inductor.attention(x, x, x, return_lse=True)
assert_type(lse, torch.Tensor)
policy = Policy([Rule("sage1", module="*.attn", layer=(0, 3)), Rule("off", layer=1, head_dim=64)])
config.policy = policy
config.policy = [Rule("off"), {"recipe": "auto"}]
config.policy = lambda call: "off" if call.head_dim == 64 else None
sage_inductor.register("diffusers")
assert_type(RECIPES, tuple[RecipeName, ...])
for name in RECIPES:
    sage_inductor.attention(x, x, x, recipe=name)
    config.recipe = name
    sage_inductor.diagnose(model, recipes=[name])
options: Options = {"sage.recipe": "sage1", "sage.policy": policy, "sage.mode": "default"}
sage_inductor.explain(model, options=options)
torch.compile(model, backend="sage", options=cast(dict[str, Any], options))
sage_inductor.register("vllm")  # refused
config.recpie = "sage1"  # refused
answer(1)  # refused
sage_inductor.attention(x, x, x, recipe="sage2")  # refused
sage_inductor.gather_attention(x, x, x, recipe="off")  # refused
sage_inductor.diagnose(model, recipes="sage2")  # refused
config.recipe = "sage9"  # refused
config.training = "fp8"  # refused
Rule("of")  # refused
Rule("off", layer="1")  # refused
Rule("off", head_dim=64.0)  # refused
Rule("off", training="fp8")  # refused
config.patch(recpie="sage1")  # refused
config.patch(recipe="sage9")  # refused
config.patch(force=1)  # refused
wrong: Options = {"sage.recipe": "sage9"}  # refused
missing: Options = {"sage.recpie": "sage1"}  # refused
sage_inductor.explain(model, options="sage1")  # refused
"""
REFUSED = [i for i, line in enumerate(USERS.splitlines(), 1) if line.endswith("# refused")]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder in which a type checker finds the package as a wheel lays it out, and a user's
    file. An editable install is seen by none: its finder is code, not a folder."""
    site = tmp_path_factory.mktemp("typing") / "site"
    for room in ("sage_inductor", "patterns", "lowering", "ops"):
        front = room == "sage_inductor"
        shutil.copytree(
            ROOT / room, site / "sage_inductor" / ("" if front else room), dirs_exist_ok=True
        )
    (site / "user.py").write_text(USERS)
    return site.resolve()


def of_mypy(site: Path) -> list[tuple[int, str]]:
    """Line and text of what it says of the user's file."""
    pytest.importorskip("mypy")
    found = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--no-color-output",
         "--no-error-summary", f"--cache-dir={site.parent / 'cache'}", "user.py"],
        capture_output=True, text=True, cwd=site,
    )  # fmt: skip
    assert not found.stderr, found.stderr
    return [(int(line.split(":")[1]), line) for line in found.stdout.splitlines()]


@pytest.fixture(scope="module")
def by_pyright(site):
    """File -> what basedpyright says of it, in "basic"; of the user's file in "standard". Once for
    all: most of the time it reads torch."""
    pytest.importorskip("basedpyright")
    settings = {"typeCheckingMode": "basic", "include": ["user.py", "sage_inductor"]}
    (site / "pyrightconfig.json").write_text(json.dumps(settings))
    found = subprocess.run(
        [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable],
        capture_output=True, text=True, cwd=site,
    )  # fmt: skip
    assert found.stdout, found.stderr
    files = collections.defaultdict(list)
    for each in json.loads(found.stdout)["generalDiagnostics"]:
        files[Path(each["file"]).relative_to(site).as_posix()].append(each)
    return files


def test_what_type_checkers_read_is_what_the_tables_say():
    assert RECIPES == tuple(TABLE)
    assert get_args(RecipeOption) == (AUTO, OFF, *TABLE)
    assert {*get_args(TrainingOption)} == {*TRAINING}
    fields = get_type_hints(options.Table)
    assert get_type_hints(options.Values) == {name: fields[name] for name in options.SETTINGS}
    assert get_type_hints(Options) == {f"sage.{name}": fields[name] for name in options.OPTIONS}
    assert not Options.__required_keys__ | options.Values.__required_keys__


@pytest.mark.parametrize("checker", [pytest.param("mypy", marks=pytest.mark.sweep), "pyright"])
def test_a_users_file_has_the_types_that_it_says_and_errors_where_it_is_wrong(checker, request):
    if checker == "mypy":
        found = of_mypy(request.getfixturevalue("site"))
    else:
        each = request.getfixturevalue("by_pyright")["user.py"]
        found = [(x["range"]["start"]["line"] + 1, x["message"]) for x in each]
    assert sorted({line for line, _ in found}) == REFUSED, found


def test_the_library_has_no_type_error_more_than_it_had(by_pyright):
    """Errors, by file. A number may only be lowered: UPDATE=1 writes what is found. What kernels say
    to Triton no checker knows."""
    if f"torch=={torch.__version__.split('+')[0]}\n" not in (ROOT / "constraints.txt").read_text():
        pytest.skip("the numbers are of the torch of constraints.txt")
    counts = collections.Counter(
        name.removeprefix("sage_inductor/")
        for name, each in by_pyright.items()
        for x in each
        if x["severity"] == "error" and name != "user.py"
    )
    known = json.loads(TYPE_ERRORS.read_text())
    if os.environ.get("UPDATE"):
        TYPE_ERRORS.write_text(json.dumps(dict(sorted(counts.items())), indent=1) + "\n")
    assert dict(counts) == known, (
        f"more, or fewer (UPDATE=1 lowers them): {counts - collections.Counter(known)}"
    )
