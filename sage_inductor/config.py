"""``sage_inductor.config``: the settings of the process (options.py)."""

from sage_inductor.options import config as config
