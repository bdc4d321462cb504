"""`elementgrad completion`."""

from elementgrad.cli.failures import InputError
from elementgrad.cli.parser import parser

FILES = ("model", "inputs", "out", "plot", "patch", "target")
"""Arguments for which files are offered."""


def completion(*, shell: str) -> None:
    """Print the script that a shell completes by."""
    try:
        import shtab
    except ImportError:
        raise InputError("completion needs shtab; pip install 'elementgrad[completion]'") from None
    made = parser()
    waiting = [made]
    while waiting:
        for action in waiting.pop()._actions:
            if isinstance(action.choices, dict):
                waiting += action.choices.values()
            elif action.dest in FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(made, shell))
