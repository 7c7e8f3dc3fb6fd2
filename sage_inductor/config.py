"""Settings, with torch's own config machinery.

    sage_inductor.config.recipe = "sage1"
    with sage_inductor.config.patch(emulate=True): ...
    SAGE_INDUCTOR_FORCE=1 python train.py
    torch.compile(model, backend="sage", options={"sage.strict": True})     # one model

What each one means: sage_inductor/options.py. The environment is read when sage_inductor is
imported, by the program or by torch for ``backend="sage"``. So ``SAGE_INDUCTOR_ENABLED=1`` does
nothing in a program that does neither: it needs one line, ``import sage_inductor``. (torch could
import us with itself, by an entry point of its group "torch.backends". But then `import torch`
fails wherever our installation is broken or was moved, even in programs that never ask for us.)

From torch 2.13 on, a value that is assigned to one of torch's configs holds only in the thread that
assigned it. A server configures in one thread and compiles in another, so an assignment here holds
in the whole process. `patch` holds in its thread, as torch's does; a thread that has used one keeps
the values it found.
"""

import contextlib
import contextvars
import os
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

from sage_inductor import options
from sage_inductor import policy as policies
from sage_inductor.ops.compat import Config, install_config_module


def _setting(name: str):
    option = options.SETTINGS[name]
    return Config(default=option.default, env_name_default=option.variable)


recipe: str = _setting("recipe")
if typing.TYPE_CHECKING:
    policy: str | os.PathLike | policies.Policy | policies.Rule | dict | list | Callable
else:
    policy: str = _setting("policy")  # torch allows bool and str here
emulate: bool = _setting("emulate")
force: bool = _setting("force")
training: str = _setting("training")
strict: bool = _setting("strict")
calibrate: bool = _setting("calibrate")
enabled: bool = _setting("enabled")

install_config_module(sys.modules[__name__])

_patching = contextvars.ContextVar("sage_inductor.config.patch", default=False)
# name -> what is called with the value that was set, and whether it is the whole process's.
_followers: dict[str, Callable[[object, bool], None]] = {}


class _CheckedConfig(type(sys.modules[__name__])):
    """Refuses unknown names and ill-typed values when they are set, and tells who follows one."""

    def __setattr__(self, name, value):
        if name in self._config:
            check(name, value)
            value = policies.settled(value) if name == "policy" else value
        elif name not in self._bypass_keys:
            raise AttributeError(options.unknown(name, self._config, _PREFIX))
        super().__setattr__(name, value)
        if name in self._config and not _patching.get():
            # Where the environment's value is kept: below what a thread has set for itself.
            self._config[name].env_value_default = value
        if name in _followers:
            _followers[name](value, not _patching.get())

    def __dir__(self):
        return sorted([*self._config, "patch", "to_dict", "load_config", "save_config", "get_hash"])

    def __repr__(self):
        """Each setting, its value and, if it is another, its default."""
        rows = [f"{__name__}:"]
        for name, option in options.SETTINGS.items():
            value = getattr(self, name)
            default = "" if value == option.default else f"  (default {option.default!r})"
            rows.append(f"  {name} = {value!r}{default}")
        return "\n".join(rows)

    def patch(self, arg1=None, arg2=None, **kwargs):  # typed below
        if arg1 and kwargs:
            raise TypeError(
                f"patch takes a name and its value, a dict or keywords, got {kwargs} too"
            )
        changes = arg1 if isinstance(arg1, dict) else {arg1: arg2} if arg1 else kwargs
        for name, value in changes.items():  # before any is set: torch's patch takes none back
            if name not in self._config:
                raise AttributeError(options.unknown(name, self._config, _PREFIX))
            check(name, value)
        return _Patch(super().patch(changes))


class _Patch(contextlib.ContextDecorator):
    """torch's own, known to `__setattr__`."""

    def __init__(self, patch):
        self.patch = patch

    def __enter__(self) -> None:
        return self._run(self.patch.__enter__)

    def __exit__(self, *error: object) -> None:  # None: an error within is never swallowed
        return self._run(self.patch.__exit__, *error)

    @staticmethod
    def _run(step, *args):
        token = _patching.set(True)
        try:
            return step(*args)
        finally:
            _patching.reset(token)


if typing.TYPE_CHECKING:  # imported by itself, the bool TYPE_CHECKING would become a setting
    # What install_config_module puts into this module, which no type checker sees. torch's own
    # stub (torch.utils._config_typing) leaves open what patch returns.

    def patch(
        arg1: str | dict[str, Any] | None = None, arg2: Any = None, **kwargs: Any
    ) -> _Patch: ...
    def to_dict() -> dict[str, Any]: ...
    def save_config() -> bytes: ...
    def load_config(config: bytes | dict[str, Any]) -> None: ...
    def get_hash() -> bytes: ...


_PREFIX = "sage_inductor.config."


def check(name: str, value, prefix: str = _PREFIX) -> None:
    """Raise ValueError unless `value` may be given to the setting `name`; of a policy its file is
    read."""
    options.check(name, value, prefix)
    if name == "policy":
        try:
            policies.ruling(value)
        except ValueError as error:
            raise ValueError(f"{prefix}policy: {error}") from None


def follow(name: str, call: Callable[[object, bool], None]) -> None:
    """``call(value, for_all)`` now and whenever the setting is set: by an assignment, which is for
    all threads, or by a patch."""
    _followers[name] = call
    call(getattr(sys.modules[__name__], name), True)


types.ModuleType.__setattr__(sys.modules[__name__], "__class__", _CheckedConfig)
_self = sys.modules[__name__]
for _option in options.SETTINGS.values():  # what the environment says; an empty variable nothing
    _value = getattr(_self, _option.name)
    if _value == "":
        _self._config[_option.name].env_value_default = _option.default
    elif isinstance(_option.default, bool) and not isinstance(_value, bool):
        raise ValueError(f"{_option.variable} must be 1 or 0, got {_value!r}")
    else:
        check(_option.name, _value, f"{_option.variable}: ")
if _self.policy:
    _self._config["policy"].env_value_default = policies.settled(_self.policy)
