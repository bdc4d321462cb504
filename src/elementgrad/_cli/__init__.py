"""The command line, `elementgrad` or `python -m elementgrad`."""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from elementgrad._cli.output import USAGE, answered, closed, failed, forgiving, say
from elementgrad._cli.parser import parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, 1 for a finding, 2 for a call that cannot work, 3 for user's code."""
    with forgiving():
        if closed():
            say("standard output is closed, so that no result can be printed; send it to a file or to /dev/null")
            return USAGE
        try:
            options = _parsed(arguments)
        except OSError as error:
            return failed(error)
        debug = options.pop("debug", False)
        options.pop("command")
        options.pop("action", None)
        function = options.pop("run").rpartition(".")[2]
        return answered(lambda: getattr(import_module("elementgrad._cli.commands"), function)(**options), debug)


def _parsed(arguments: Sequence[str] | None) -> dict[str, Any]:
    try:
        return vars(parser().parse_args(arguments))
    except SystemExit:  # after the help, or after a line that says what does not parse
        sys.stdout.flush()
        raise
