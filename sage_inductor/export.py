"""The same rewrite for exported programs and AOTInductor packages."""

import contextlib
import copy
import logging
import sys
import zipfile
from collections.abc import Iterator

import torch
from torch.export.graph_signature import TensorArgument

from sage_inductor import stages
from sage_inductor.choose.decide import rewrite as _rewrite
from sage_inductor.errors import SageOptionError
from sage_inductor.ops.notes import NOTES
from sage_inductor.ops.recipe import renewed
from sage_inductor.ops.register import OPAQUE
from sage_inductor.options import Options, resolve, split
from sage_inductor.patterns.graph import by_schema, graph_modules
from sage_inductor.study.findings import Report
from sage_inductor.study.report import raise_if_refused, record, whole

_log = logging.getLogger("sage_inductor")
PORTABLE_IF_ASKED = torch.ops.sage.sdpa.default, torch.ops.sage.prepare.default


def rewrite(
    exported_program: torch.export.ExportedProgram, *, options: Options | dict | None = None
) -> Report:
    """Rewrite the attention calls of a program from ``torch.export.export``, in place.

    A program that was rewritten, saved and loaded is updated to the installed sage_inductor, which
    refuses to run it before that. options play no part in the update.

    exported_program: it is changed, and not copied.
    options: the ``sage.`` options of ``torch.compile(..., backend="sage")``. The example's lengths
    and the stage in force decide which calls are rewritten (a package of several models can have
    one for each stage). Only kernels that travel in a package are used.

    Returns the Report of its sites. The program then goes to torch's own
    ``aoti_compile_and_package`` or, for several models in one package, to its ``aot_compile`` and
    ``package_aoti``.

    Raises TypeError if it is no ExportedProgram; SageOptionError for an unknown or ill-typed option
    and for Inductor's; SageRefused under ``sage.strict``; ValueError if the program calls a sage op
    that needs Python to run, or was rewritten by a version whose recipes mean something else.
    """
    if not isinstance(exported_program, torch.export.ExportedProgram):
        what = "rewrite takes a program, what torch.export.export(model, inputs) returns"
        raise TypeError(f"{what}, got {type(exported_program).__name__}")
    ours, theirs = split(options or {})
    if theirs or "mode" in ours:
        what = f"rewrite takes sage.* options, got {sorted(options)}: give Inductor's to "
        raise SageOptionError(what + "aoti_compile_and_package(inductor_configs=...)")
    settings = resolve(ours, portable=True, stage=stages.current())
    gm = exported_program.graph_module
    for node in _nodes(gm):
        if node.target in PORTABLE_IF_ASKED:  # the recipe's string of today
            given = by_schema(node, node.target)
            node.update_arg(list(given).index("recipe"), renewed(given["recipe"]))
        node.meta.pop("sage", None)  # what an earlier rewrite has left, other options may take
    with _names_kept_up(exported_program):
        sites = _rewrite(gm, settings)
    _check_travels(gm)
    record(sites, settings.policy)
    if settings.strict:
        raise_if_refused(sites)
    return whole([("export", site) for site in sites], settings.policy, notes=[*NOTES.values()])


@contextlib.contextmanager
def _names_kept_up(program: torch.export.ExportedProgram) -> Iterator[None]:
    """A call may be an output, or what a module of ``preserve_module_call_signature`` takes or
    returns: the program's signatures know it by its node's name. Inside, all of these are outputs,
    so that none of them is lost. (A name may be of no node after somebody else's pass.)"""
    nodes = {node.name: node for node in program.graph.nodes}
    signatures = (entry.signature for entry in program.module_call_graph if entry.signature)
    named = (x for of in signatures for x in (*of.inputs, *of.outputs))
    of_modules = [x for x in named if isinstance(x, TensorArgument) and x.name in nodes]
    output = program.graph.output_node()
    outputs = output.args[0]
    output.args = ((*outputs, *(nodes[x.name] for x in of_modules)),)
    try:
        yield
    finally:
        now = output.args[0]
        output.args = (now[: len(outputs)],)
        for before, after in zip(outputs, now[: len(outputs)], strict=True):
            if isinstance(before, torch.fx.Node):
                program.graph_signature.replace_all_uses(before.name, after.name)
        for x, node in zip(of_modules, now[len(outputs) :], strict=True):
            x.name = node.name
        program.graph_module.recompile()


def _nodes(gm: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [node for module in graph_modules(gm) for node in module.graph.nodes]


def _check_travels(gm: torch.fx.GraphModule) -> None:
    """Raise ValueError if an op is left that no package can hold: the rewrite inserts none, but
    the model may call one, or have been through a pass that did."""
    what = "rewrite: every sage op must be portable to travel in a package"
    for node in _nodes(gm):
        portable = node.target not in OPAQUE
        if node.target in PORTABLE_IF_ASKED:
            portable = by_schema(node, node.target)["portable"]
        if not portable:
            raise ValueError(f"{what}, got `{node.name}`, a call of {node.target} that is not")


def aoti_compile_and_package(
    exported_program: torch.export.ExportedProgram, *, package_path=None,
    inductor_configs: dict | None = None, options: Options | dict | None = None,
) -> str:  # fmt: skip
    """``torch._inductor.aoti_compile_and_package`` with the attention calls rewritten.

    exported_program: of ``torch.export.export``; it stays as it is.
    package_path, inductor_configs: torch's.
    options: `rewrite`'s.

    The package needs neither Python nor sage_inductor, and ``sage_inductor.report()`` tells what
    was rewritten.

    Returns the package's path.

    Raises what `rewrite` raises, and what torch's function does.
    """
    program = copy.deepcopy(exported_program)
    rewrite(program, options=options)
    path = torch._inductor.aoti_compile_and_package(
        program, package_path=package_path, inductor_configs=inductor_configs
    )
    # It crashes with torch 2.11 and 2.13, not with 2.15; those between were not tried.
    crashes = sys.platform == "linux" and torch.__version__ < "2.15"
    if crashes and _holds_its_own_libstdcxx(path):
        _log.warning(
            "%s: the C++ compiler linked libstdc++ into the package. Python crashes when it loads "
            "that (torch parses the device by a std::regex of two libraries) unless it did "
            "`ctypes.CDLL('libstdc++.so.6', ctypes.RTLD_GLOBAL)` first; C++ does not", path,
        )  # fmt: skip
    return path


def _holds_its_own_libstdcxx(path) -> bool:
    """Whether the code in a package names no libstdc++.so (nor libc++.so) that it needs."""
    with zipfile.ZipFile(path) as archive:
        for name in filter(lambda name: name.endswith(".so"), archive.namelist()):
            with archive.open(name) as code:  # with the weights in it, gigabytes
                end = b""
                while chunk := code.read(1 << 20):
                    if b"c++.so." in end + chunk:
                        break
                    end = chunk[-8:]
                else:
                    return True
    return False
