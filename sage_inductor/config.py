"""Settings, with torch's own config machinery.

    sage_inductor.config.recipe = "sage1"
    with sage_inductor.config.patch(emulate=True): ...
    SAGE_INDUCTOR_FORCE=1 python train.py
    torch.compile(model, backend="sage", options={"sage.strict": True})     # one model

An option of `torch.compile` overrides the setting, which overrides the environment (read when
sage_inductor is imported).
"""

import difflib
import os
import sys
import types

from torch.utils._config_module import Config, install_config_module

# How attention calls are quantized: "auto" (by device), a recipe's name, or "off".
recipe: str = Config(default="auto", env_name_default="SAGE_INDUCTOR_RECIPE")

# The path of a file of rules: which recipe which attention call gets (sage_inductor/policy.py).
policy: str = Config(default="", env_name_default="SAGE_INDUCTOR_POLICY")

# Run the recipes' bit-faithful emulation where there is no kernel (CPU), whatever the length.
emulate: bool = Config(default=False, env_name_default="SAGE_INDUCTOR_EMULATE")

# Rewrite every call the kernels can run, also below the measured crossover and in training.
force: bool = Config(default=False, env_name_default="SAGE_INDUCTOR_FORCE")

# Raise SageRefused when a call stays as it was.
strict: bool = Config(default=False, env_name_default="SAGE_INDUCTOR_STRICT")

# Rewrite graphs compiled with backend="inductor" too, by a pass beside the user's own.
enabled: bool = Config(default=False, env_name_default="SAGE_INDUCTOR_ENABLED")

install_config_module(sys.modules[__name__])


class _CheckedConfig(type(sys.modules[__name__])):
    """Refuses unknown names and ill-typed values when they are set, and keeps `enabled`'s pass."""

    def __setattr__(self, name, value):
        if name in self._config:
            check(name, value)
        elif name not in self._bypass_keys:
            raise AttributeError(unknown(name, self._config))
        super().__setattr__(name, value)
        if name == "enabled":
            from sage_inductor.backend import install_pass

            install_pass(value)

    def patch(self, arg1=None, arg2=None, **kwargs):
        changes = arg1 if isinstance(arg1, dict) else {arg1: arg2} if arg1 else kwargs
        for name in changes:
            if name not in self._config:
                raise AttributeError(unknown(name, self._config))
        return super().patch(changes)


def check(name: str, value, prefix: str = "sage_inductor.config.") -> None:
    """Raise ValueError unless `value` may be given to the setting `name`."""
    from sage_inductor.ops.recipe import NAMED

    if name == "recipe":
        valid = ("auto", "off", *NAMED)
        if value not in valid:
            near = difflib.get_close_matches(str(value), valid, n=1) or ["auto"]
            raise ValueError(
                f"{prefix}recipe must be one of {valid}, got {value!r}: did you mean {near[0]!r}?"
            )
    elif name == "policy":
        if not isinstance(value, (str, os.PathLike, type(None))):
            raise ValueError(f"{prefix}policy must be a path, got {value!r}")
        if value:
            from sage_inductor.policy import Policy

            Policy.load(value)
    elif not isinstance(value, bool):
        raise ValueError(f"{prefix}{name} must be True or False, got {value!r}")


def unknown(name: str, valid, prefix: str = "sage_inductor.config.") -> str:
    """The message for a name that does not exist, with the nearest one that does."""
    near = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.0)[0]
    return f"{prefix}{name} does not exist: did you mean {prefix}{near}?"


types.ModuleType.__setattr__(sys.modules[__name__], "__class__", _CheckedConfig)
for _name in list(sys.modules[__name__]._config):  # what the environment says
    check(_name, getattr(sys.modules[__name__], _name), "SAGE_INDUCTOR_* environment: ")
