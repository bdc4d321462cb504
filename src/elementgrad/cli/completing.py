"""`elementgrad completion`."""

from elementgrad.cli.parser import parser
from elementgrad.extras import require

FILES = ("model", "inputs", "out", "plot", "patch", "target")
"""Arguments for which files are offered."""


def completion(*, shell: str) -> None:
    """Print the script that a shell completes by."""
    require("shtab", "completion", "completion")
    import shtab

    made = parser()
    waiting = [made]
    while waiting:
        for action in waiting.pop()._actions:
            if isinstance(action.choices, dict):
                waiting += action.choices.values()
            elif action.dest in FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(made, shell))
