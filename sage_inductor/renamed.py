"""The old name "enabled", which had two meanings: it works for one version more, and warns.

config.enabled, SAGE_INDUCTOR_ENABLED   config.rewrite_inductor, SAGE_INDUCTOR_REWRITE_INDUCTOR
"sage.enabled": False                   "sage.recipe": "off", and no policy
"""

import os
import warnings

from sage_inductor.names import OFF
from sage_inductor.options import PREFIX, SETTINGS, flag


def setting(name: str) -> str:
    """The setting that is meant by `name`."""
    if name != "enabled":
        return name
    _warn("sage_inductor.config.enabled", "sage_inductor.config.rewrite_inductor")
    return "rewrite_inductor"


def environment() -> dict[str, str]:
    """``os.environ`` with today's name of the variable."""
    old, new = "SAGE_INDUCTOR_ENABLED", SETTINGS["rewrite_inductor"].variable
    if old not in os.environ:
        return dict(os.environ)
    _warn(old, new)
    return {new: os.environ[old], **os.environ}


def options(ours: dict) -> dict:
    """The ``sage.`` options `ours` (without their prefix) by today's names."""
    if "enabled" not in ours:
        return ours
    _warn(f'"{PREFIX}enabled": False', f'"{PREFIX}recipe": "{OFF}"')
    off = {} if flag(f"{PREFIX}enabled", ours["enabled"]) else {"recipe": OFF, "policy": ""}
    return {name: value for name, value in ours.items() if name != "enabled"} | off


def _warn(old: str, new: str) -> None:
    text = f"{old} is called {new} now, and the old name will be refused"
    warnings.warn(text, FutureWarning, stacklevel=4)
