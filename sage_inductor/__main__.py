"""The command line: ``python -m sage_inductor doctor``."""

import argparse
import importlib
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

COMMANDS = {
    "doctor": "what is installed, and whether each recipe really runs here",
    "tune": 'measure what "auto" decides by on this GPU',
    "demo": "compile a diffusion transformer: report, accuracy, speed",
}


class _Version(argparse.Action):
    """The sources' version. They are read without their package, which imports torch."""

    def __call__(self, parser, *args):
        file = Path(find_spec("sage_inductor.ops").origin).with_name("sources.py")
        print(f"sage_inductor {runpy.run_path(file)['source_tag']()}")
        parser.exit()


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code. A command's own module has its options, and imports
    torch."""
    parser = argparse.ArgumentParser(
        prog="python -m sage_inductor",
        description="Quantized attention as a torch.compile backend.",
        epilog="In Python: sage_inductor.report() says what became of each attention call, "
        "explain(model)(*inputs) what would, diagnose(model)(*inputs) how accurate it is.",
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="show the version and its sources, and exit"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    known, rest = parser.parse_known_args(arguments)
    module = importlib.import_module(f"sage_inductor.cli.{known.command}")
    parser = argparse.ArgumentParser(prog=f"{parser.prog} {known.command}")
    module.add_options(parser)
    return getattr(module, known.command)(**vars(parser.parse_args(rest)))


if __name__ == "__main__":
    sys.exit(main())
