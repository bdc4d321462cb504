"""The command line, `elementgrad` or `python -m elementgrad`.

`parser.py` declares commands, options and help, and imports nothing that takes time. `main` parses, then calls the
function of `commands.py` that the parser names in `run`. Commands load what the user names (`load.py`: a model or
function, and its inputs as tensors), call the library, and print text or one JSON object. `output.py` turns what a
command returns or raises into messages and an exit code: 0, 1 for a finding, 2 for a call that cannot work, 3 for an
error of the user's code.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from elementgrad._cli.output import USAGE, is_stdout_closed, report_error, run_command, say, tolerant_streams
from elementgrad._cli.parser import make_parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    with tolerant_streams():
        if is_stdout_closed():
            say("standard output is closed, so that no result can be printed; send it to a file or to /dev/null")
            return USAGE
        try:
            options = _parse(arguments)
        except OSError as error:
            return report_error(error)
        debug, function = options.pop("debug"), options.pop("run")
        return run_command(lambda: getattr(import_module("elementgrad._cli.commands"), function)(**options), debug)


def _parse(arguments: Sequence[str] | None) -> dict[str, Any]:
    try:
        options = vars(make_parser().parse_args(arguments))
    except SystemExit:  # after the help, or after a line that says what does not parse
        sys.stdout.flush()
        raise
    return {name: value for name, value in options.items() if name not in ("command", "action")}
