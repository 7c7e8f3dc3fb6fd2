"""The library's version, and a hash of its sources. It imports no torch: the command line runs it
alone for ``--version``."""

import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path

__version__ = "0.2.0"


def hash_of(places: Iterable[Path]) -> str:
    """The hash of all sources that these are, or that lie in them, and of the tables."""
    found = {file for place in places for file in (place, *place.rglob("*"))}
    files = (file for file in found if file.suffix in (".py", ".h", ".json"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()


@functools.cache
def source_tag() -> str:
    """``version+hash`` of the sources that decide what a recipe means."""
    ops = Path(__file__).parent
    return f"{__version__}+{hash_of((ops, ops.parent / 'lowering'))[:8]}"
