"""The command line, `elementgrad` or `python -m elementgrad`."""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from elementgrad import __version__
from elementgrad.errors import ElementgradError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, or 2 for a call that cannot work."""
    parser = argparse.ArgumentParser(
        prog="elementgrad",
        description="Gradients, one element at a time: read, explain, edit and train single elements of any tensor.",
    )
    parser.add_argument("--version", action="version", version=f"elementgrad {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    tour = commands.add_parser("tour", help="answer the founding questions, with code and numbers")
    tour.add_argument("--framework", choices=("torch", "tensorflow", "jax"), default="torch", help="torch by default")
    options = vars(parser.parse_args(arguments))
    try:
        import_module(f"elementgrad.cli.{options.pop('command')}").run(**options)
    except ElementgradError as error:
        print(f"elementgrad: {error}", file=sys.stderr)
        return 2
    return 0
