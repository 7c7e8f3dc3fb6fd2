"""What is forgotten at ``torch._dynamo.reset()``."""

import types
from collections.abc import Callable

from sage_inductor.ops.compat import cached_backends


def on_reset(forget: Callable[[], None]) -> bool:
    """Have the next reset call `forget`, once. False: it was to call it already."""
    if id(forget) in cached_backends:  # a reset calls what is listed here, and empties the list
        return False
    cached_backends[id(forget)] = types.SimpleNamespace(reset=forget)
    return True
