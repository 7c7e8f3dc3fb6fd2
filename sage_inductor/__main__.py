"""The command line.

python -m sage_inductor doctor     what is installed, and whether each recipe really runs here
python -m sage_inductor tune       measure what "auto" decides by on this GPU
python -m sage_inductor demo       a diffusion transformer, compiled: report, accuracy, speed
"""

import argparse
import sys

from sage_inductor.choose.cost import TIMED
from sage_inductor.choose.timing import TUNED_HEAD_DIMS, TUNED_KINDS
from sage_inductor.cli.demo import PATCH, demo
from sage_inductor.cli.doctor import doctor
from sage_inductor.cli.tune import tune
from sage_inductor.names import AUTO
from sage_inductor.ops.recipe import NAMED, canonical, source_tag


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m sage_inductor",
        description="Quantized attention as a torch.compile backend.",
        epilog="In Python: sage_inductor.report() says what became of each attention call, "
        "explain(model)(*inputs) what would, diagnose(model)(*inputs) how accurate it is.",
    )
    parser.add_argument("--version", action="version", version=f"sage_inductor {source_tag()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    command = commands.add_parser(
        "doctor",
        help="what is installed, and whether each recipe really runs here",
        description="Print versions and devices, run every recipe on every device against exact "
        "attention, and say what recipe 'auto' chooses. Exit code 1 if one that should run fails.",
    )
    command.add_argument("--verbose", action="store_true", help="a line for each small call")
    command = commands.add_parser(
        "tune",
        help='measure what "auto" decides by on this GPU',
        description="Measure attention with all preparation against SDPA's backends on every GPU, "
        "and write the times by which 'auto' predicts a call's to where later processes read "
        "them. Some minutes a GPU; nothing else should run on it.",
    )
    command.add_argument(
        "--head-dims", type=_positive, nargs="+", default=TUNED_HEAD_DIMS, metavar="D",
        help=f"default: {_listed(TUNED_HEAD_DIMS)}",
    )  # fmt: skip
    command.add_argument(
        "--kinds", choices=TIMED, nargs="+", default=TUNED_KINDS, metavar="KIND",
        help=f"types of calls, of {_listed(TIMED)}; default: {_listed(TUNED_KINDS)}",
    )  # fmt: skip
    command = commands.add_parser(
        "demo",
        help="compile a diffusion transformer: report, accuracy, speed",
        description="Compile a diffusion transformer with backend='sage'; print what became of "
        "its attention calls, how far the output is from exact attention and, on a GPU, the times "
        "with it and with backend='inductor'. On CPU the recipe is emulated.",
    )
    command.add_argument(
        "--recipe", default=AUTO, type=canonical, choices=(AUTO, *NAMED), help="default: auto"
    )
    command.add_argument(
        "--size", type=_even, help="side of the latent image; tokens = (size / 2)^2 (64; GPU: 256)"
    )
    command.add_argument("--layers", type=_positive, default=4, help="default: 4")
    command.add_argument(
        "--force", action="store_true", help="on a GPU: rewrite also where SDPA is faster"
    )
    options = vars(parser.parse_args(arguments))
    run = {"doctor": doctor, "tune": tune, "demo": demo}[options.pop("command")]
    return run(**options)


def _listed(names) -> str:
    return ", ".join(map(str, names))


def _even(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0 and int(text) % PATCH == 0):
        raise argparse.ArgumentTypeError(f"must be a positive even number, got {text!r}")
    return int(text)


def _positive(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
