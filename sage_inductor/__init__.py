"""Quantized attention as a torch.compile backend: ``torch.compile(model, backend="sage")``."""

from sage_inductor import config
from sage_inductor.backend import SageOptionError, SageRefused, sage_backend
from sage_inductor.ops.recipe import VERSION as __version__
from sage_inductor.report import Report, report

__all__ = [
    "Report",
    "SageOptionError",
    "SageRefused",
    "__version__",
    "config",
    "report",
    "sage_backend",
]
