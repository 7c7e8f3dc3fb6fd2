"""The commands of ``python -m sage_inductor``, one a file."""
