"""What a compilation raises because of what the user asked for."""

from sage_inductor.ops.compat import ShortenTraceback


class _UserError(ShortenTraceback):
    """Dynamo re-raises a ShortenTraceback as it is, not wrapped in BackendCompilerFailed."""

    def __init__(self, message: str):
        super().__init__(message, first_useful_frame=None)


class SageOptionError(_UserError, ValueError):
    """An option of ``torch.compile(..., options=...)`` that cannot be."""


class SageRefused(_UserError):
    """``sage.strict``: an attention call stays as it was."""
