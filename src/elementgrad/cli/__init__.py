"""The command line, `elementgrad` or `python -m elementgrad`."""

from collections.abc import Sequence
from importlib import import_module

from elementgrad.cli.failures import answered
from elementgrad.cli.parser import parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, 1 for a finding, 2 for a call that cannot work, 3 for user's code."""
    options = vars(parser().parse_args(arguments))
    debug = options.pop("debug", False)
    options.pop("command")
    options.pop("action", None)
    module, function = options.pop("run").split(".")
    return answered(lambda: getattr(import_module(f"elementgrad.cli.{module}"), function)(**options), debug)
