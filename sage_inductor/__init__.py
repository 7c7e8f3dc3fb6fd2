"""Quantized attention as a torch.compile backend: ``torch.compile(model, backend="sage")``.

The public names by task. Modules and what else they hold are private: they change without notice.

    Compile: sage_backend, explain
    See what was rewritten: report, Report
    Call attention: attention, gather_attention, register
    Measure the error: diagnose, diagnosing, Diagnosis
    Choose by module, layer or step: Policy, Rule, CallDescription, stage, Schedule
    Set and name: config, Options, RECIPES, RecipeName, RecipeOption
    Train: diagnose_training, TrainingDiagnosis
    Export: aoti_compile_and_package, rewrite
    Errors: SageOptionError, SageRefused
"""

from typing import TYPE_CHECKING

from sage_inductor import inductor_pass as _inductor_pass  # noqa: F401  (follows the config)
from sage_inductor.backend import explain, sage_backend
from sage_inductor.diagnose import Diagnosis, diagnose, diagnosing
from sage_inductor.errors import SageOptionError, SageRefused
from sage_inductor.export import aoti_compile_and_package, rewrite
from sage_inductor.functional import attention
from sage_inductor.gradient_noise import TrainingDiagnosis, diagnose_training
from sage_inductor.integrations import register
from sage_inductor.names import RecipeOption
from sage_inductor.ops.recipe import RECIPES, RecipeName
from sage_inductor.ops.recipe import VERSION as __version__
from sage_inductor.options import Options
from sage_inductor.parallel import gather_attention
from sage_inductor.policy import CallDescription, Policy, Rule
from sage_inductor.report import Report, report
from sage_inductor.stages import Schedule, stage

if TYPE_CHECKING:  # to them it is the module that the object stands in the place of
    from sage_inductor.config import config
else:
    from sage_inductor import config

__all__ = [
    "CallDescription", "Diagnosis", "Options", "Policy", "RECIPES", "RecipeName", "RecipeOption",
    "Report", "Rule", "SageOptionError", "SageRefused", "Schedule", "TrainingDiagnosis",
    "__version__", "aoti_compile_and_package", "attention", "config", "diagnose",
    "diagnose_training", "diagnosing", "explain", "gather_attention", "register", "report",
    "rewrite", "sage_backend", "stage",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__
