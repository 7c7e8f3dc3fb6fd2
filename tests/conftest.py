import ctypes
import os
import random
import sys

import pairs
import pytest
import settings  # noqa: F401
import torch
import torch._inductor.config as inductor
from torch._dynamo import eval_frame

from sage_inductor.ops.notes import NOTES

# -- which tests run ----


def pytest_addoption(parser):
    parser.addoption("--sweep", action="store_true", help="run every variant of every test")


def pytest_configure(config):
    """pairs.py reads both, in xdist's processes too. A variant that is named on the command line
    runs."""
    os.environ.setdefault("SEED", str(random.randrange(10_000)))
    if config.getoption("dist", "no") == "loadgroup" and not hasattr(pytest.Item, "_nodeid"):
        raise pytest.UsageError(
            f"--dist loadgroup has no effect with pytest {pytest.__version__}: pytest-xdist 3.8 writes "
            "groups where pytest 9.2 reads none (pytest-xdist's issue 1386); install pytest 9.1"
        )
    if config.getoption("sweep") or any("[" in argument for argument in config.args):
        os.environ["EVERY_VARIANT"] = "1"


def pytest_report_header(config):
    if not config.getoption("sweep"):
        return f"SEED={os.environ['SEED']} draws {pairs.DRAWN:.1%} of the variants beyond all pairs"


@pytest.hookimpl(tryfirst=True)  # xdist then writes the groups
def pytest_collection_modifyitems(config, items):
    """What is marked by hand is too slow to be drawn. A file's tests that share a fixture are one
    group, which xdist's --dist loadgroup gives to one process: the fixture is made once."""
    if not pairs.has_every_variant():
        left = {x for x in items if x.get_closest_marker("sweep")}
        config.hook.pytest_deselected(items=left)
        items[:] = [x for x in items if x not in left]
    for item in filter(shares_a_fixture, items):
        item.add_marker(pytest.mark.xdist_group(item.location[0]))


def shares_a_fixture(item) -> bool:
    defined = item._fixtureinfo.name2fixturedefs.values()
    return any(each[-1].scope == "module" for each in defined)


# -- what every test starts from ----


@pytest.fixture(autouse=True)
def fresh():
    """Every test starts from one seed and an empty Dynamo (and so an empty report)."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    NOTES.clear()  # reset does it where the report's module was imported
    if torch.__version__ < "2.13":
        # There one flag of all threads says that fullgraph=True runs. Threads that run it at once
        # leave it set: what follows a graph break is compiled no more.
        eval_frame.set_eval_frame_override(eval_frame._EvalFrameOverride.NONE)
        # Threads that run a model of dynamic=True at once leave this off: what is compiled next
        # has dynamic lengths from the start.
        torch._dynamo.config.assume_static_by_default = True


@pytest.fixture(autouse=True)
def default_of_diffusers():
    """A model's set_attention_backend changes the process's default, too."""
    yield
    if dispatch := sys.modules.get("diffusers.models.attention_dispatch"):
        dispatch._AttentionBackendRegistry.set_active_backend(dispatch.AttentionBackendName.NATIVE)


@pytest.fixture(scope="session")
def one_libstdcxx():
    """Without it Python crashes where it loads a package that holds its own: see export.py."""
    ctypes.CDLL("libstdc++.so.6", ctypes.RTLD_GLOBAL)


@pytest.fixture
def by_inductor():
    """For tests of which Inductor compiles the graphs, in a file that has `graphs_run_op_by_op`."""


@pytest.fixture
def graphs_run_op_by_op(request):
    """No code of Inductor's: what it is given runs op by op, but on a GPU."""
    from support import op_by_op

    on_gpu = "cuda" in request.node.name or request.node.get_closest_marker("gpu")
    with op_by_op("by_inductor" not in request.fixturenames and not on_gpu):
        yield


@pytest.fixture
def generated():
    """Inductor fuses ops into code of its own, with layouts that it chooses."""
    if not hasattr(inductor, "fallback_by_default"):
        yield
        return
    with inductor.patch({"fallback_by_default": False}):
        yield


@pytest.fixture
def vectorized(generated):
    """Where flex_attention compiles for a CPU: it needs AVX2."""
    with inductor.patch({"cpp.simdlen": None}):
        yield


@pytest.fixture
def poisoned():
    """Every torch.empty is NaN: an element that a kernel does not write fails its test."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def gloo(tmp_path):
    """A process group of one."""
    import torch.distributed as dist

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist
    dist.destroy_process_group()
