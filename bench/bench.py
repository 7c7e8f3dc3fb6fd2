"""The package `bench`, for a script that is run by its path: python then looks for modules in the
script's folder, which is the package's, and not in the one around it."""

from pathlib import Path

__path__ = [str(Path(__file__).parent)]
