"""Quantized attention as a torch.compile backend: ``torch.compile(model, backend="sage")``.

The public names by task. Modules and what else they hold are private: they change without notice.

    Compile: sage_backend, explain
    See what was rewritten: report, Report
    Call attention: attention, gather_attention, register
    Generate text: Int8Cache
    Measure the error: diagnose, diagnosing, Diagnosis
    Choose by module, layer or step: Policy, Rule, CallDescription, stage, Schedule
    Set and name: config, Options, RECIPES, RecipeName, RecipeOption
    Train: diagnose_training, TrainingDiagnosis
    Export: aoti_compile_and_package, rewrite
    Errors: SageOptionError, SageRefused
"""

import importlib
import importlib.util
import sys
import types
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sage_inductor.backend import explain, sage_backend
    from sage_inductor.config import config
    from sage_inductor.errors import SageOptionError, SageRefused
    from sage_inductor.export import aoti_compile_and_package, rewrite
    from sage_inductor.functional import attention
    from sage_inductor.integrations import register
    from sage_inductor.integrations.int8_cache import Int8Cache
    from sage_inductor.names import RecipeOption
    from sage_inductor.ops.recipe import RECIPES, RecipeName
    from sage_inductor.ops.sources import __version__
    from sage_inductor.options import Options
    from sage_inductor.parallel import gather_attention
    from sage_inductor.policy import CallDescription, Policy, Rule
    from sage_inductor.stages import Schedule, stage
    from sage_inductor.study.diagnose import Diagnosis, diagnose, diagnosing
    from sage_inductor.study.diagnose_training import TrainingDiagnosis, diagnose_training
    from sage_inductor.study.findings import Report
    from sage_inductor.study.report import report

__all__ = [
    "CallDescription", "Diagnosis", "Int8Cache", "Options", "Policy", "RECIPES", "RecipeName",
    "RecipeOption", "Report", "Rule", "SageOptionError", "SageRefused", "Schedule",
    "TrainingDiagnosis", "__version__", "aoti_compile_and_package", "attention", "config",
    "diagnose", "diagnose_training", "diagnosing", "explain", "gather_attention", "register",
    "report", "rewrite", "sage_backend", "stage",
]  # fmt: skip
if importlib.util.find_spec("transformers") is None:
    __all__.remove("Int8Cache")
_PLACES = {
    "backend": "explain sage_backend",
    "config": "config",
    "errors": "SageOptionError SageRefused",
    "export": "aoti_compile_and_package rewrite",
    "functional": "attention",
    "integrations": "register",
    "integrations.int8_cache": "Int8Cache",
    "names": "RecipeOption",
    "ops.recipe": "RECIPES RecipeName",
    "ops.sources": "__version__",
    "options": "Options",
    "parallel": "gather_attention",
    "policy": "CallDescription Policy Rule",
    "stages": "Schedule stage",
    "study.diagnose": "Diagnosis diagnose diagnosing",
    "study.diagnose_training": "TrainingDiagnosis diagnose_training",
    "study.findings": "Report",
    "study.report": "report",
}
_PLACE_OF = {name: place for place, names in _PLACES.items() for name in names.split()}


class _Package(types.ModuleType):
    """Its public names are imported when they are first asked for: torch's compiler, which many of
    them need, takes longer than torch."""

    def __dir__(self) -> list[str]:
        return __all__

    def __getattr__(self, name: str):
        if name not in _PLACE_OF:
            what = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(what, name=name, obj=self)  # Python tells a near name
        value = getattr(importlib.import_module(f"{__name__}.{_PLACE_OF[name]}"), name)
        vars(self)[name] = value
        return value

    def __setattr__(self, name: str, value) -> None:
        if name == "config" and isinstance(value, types.ModuleType):
            value = value.config  # Python sets a submodule here when it was imported
        elif name == "config":
            raise AttributeError(
                f"sage_inductor.config cannot be replaced, got {value!r}: assign to its settings, "
                "sage_inductor.config.recipe = ..., or call sage_inductor.config.patch"
            )
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

if sys.orig_argv[1:3] != ["-m", __name__]:  # whose --help imports no torch
    from sage_inductor import ops  # noqa: F401  (registers them)
    from sage_inductor.config import config
    from sage_inductor.ops.compat import after_import

    def _install_pass(on: bool, for_all: bool = False) -> None:
        from sage_inductor.inductor_pass import install_pass

        install_pass(on, for_all)

    config.followers["rewrite_inductor"] = _install_pass
    if config.rewrite_inductor:
        _install_pass(True, for_all=True)
    after_import("torch._inductor.lowering", "sage_inductor.lowering")
