"""Lines for the report's foot, of what runs: how keys travel, what is slower than it could be."""

import functools
import logging
from collections.abc import Hashable

NOTES: dict[Hashable, str] = {}  # since torch._dynamo.reset()
_log = logging.getLogger("sage_inductor")


def lost(what: str, error: BaseException | str, warn: bool = False) -> str:
    """Note that something goes the slower way, and why. warn: also in a warning, once."""
    reason = str(error).partition("\n")[0] or type(error).__name__
    line = NOTES[what] = f"{what}: {reason}"
    (warn_once if warn else _log.debug)(line)
    return line


@functools.cache
def warn_once(text: str) -> None:
    """Once in a process."""
    _log.warning("%s", text)
