"""The commands of ``python -m sage_inductor``, one a file."""

import argparse


def positive(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
    return int(text)
