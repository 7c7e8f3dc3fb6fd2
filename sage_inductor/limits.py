"""Functions that Dynamo has stopped compiling: `report` names them at its foot.

Dynamo compiles only so many graphs of one function (``torch.compiler.config.recompile_limit``).
A call that fits none of them then runs as it is written, with all that it calls. No backend is
asked, so no report has a row for the attention in it.

Dynamo tells of a limit twice, in the same words from torch 2.11 to 2.15. A warning in its log names
the function. A counter has no name, but counts where the log is off, too.
"""

import logging
import re
import traceback
from types import CodeType

from sage_inductor.ops.compat import CompileContext, counters, dynamo_log
from sage_inductor.reset import on_reset

WARNING = re.compile(r"hit config\.(\w+) \((\d+)\)\s+function: (.+)")
COUNTED = "Dynamo recompile limit exceeded"

_named: list[tuple[int | None, str, str, str]] = []  # (frame, function, setting, its value)
_ours: set[int | str | None] = set()  # frames whose graphs the pass saw, and their callers' names
_counted_before = 0


def seen() -> None:
    """Take the function that is being compiled, and those that called it, for ours. One that breaks
    the graph at its start has no graph itself, but calls the rest of itself, which has. From now on
    Dynamo's log is listened to, until `torch._dynamo.reset()`."""
    global _counted_before
    if on_reset(_forget):
        _counted_before = _counted()
        if dynamo_log:
            dynamo_log.addFilter(_listen)
    _ours.add(_frame())
    _ours.update(_function(frame.f_code) for frame, _ in traceback.walk_stack(None))


def notes() -> list[str]:
    """A line for each function of ours that reached a limit, and one if Dynamo did not name all."""
    lines = [
        f"{function}: Dynamo compiles no more graphs of it. A call that fits none runs as it is "
        "written, and no row tells of attention in it: raise torch.compiler.config."
        f"{setting} (it was {value}) before compiling"
        for frame, function, setting, value in _named
        if frame in _ours or function in _ours
    ]
    unnamed = _counted() - _counted_before - len(_named) if _ours else 0
    if unnamed > 0:
        lines.append(
            f"Dynamo has reached a recompile limit (x{unnamed}), for sage or another backend, and "
            "named no function: turn warnings of the log torch._dynamo on"
        )
    return list(dict.fromkeys(lines))


def _listen(entry: logging.LogRecord) -> bool:
    """A filter of Dynamo's log that lets everything pass."""
    found = WARNING.search(entry.getMessage()) if entry.levelno == logging.WARNING else None
    if found:
        setting, value, function = found.groups()
        _named.append((_frame(), function, setting, value))
    return True


def _frame() -> int | None:
    """Dynamo's number of the function that it is compiling: the first one of "3/0"."""
    return getattr(CompileContext.current_compile_id(), "frame_id", None)


def _function(code: CodeType) -> str:
    """As Dynamo's warning names it."""
    return f"'{code.co_name}' ({code.co_filename}:{code.co_firstlineno})"


def _counted() -> int:
    told = counters.get("unimplemented", {})
    return sum(n for text, n in list(told.items()) if text.startswith(COUNTED))


def _forget() -> None:
    if dynamo_log:
        dynamo_log.removeFilter(_listen)
    _named.clear()
    _ours.clear()
