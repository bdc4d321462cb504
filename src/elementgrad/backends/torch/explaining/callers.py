"""Who called a function of PyTorch's: the user's line, and the verb of ours that stands there."""

import os
import sys
from dataclasses import dataclass
from typing import Any

from elementgrad.backends.torch.calls import HOMES

OURS = HOMES[1]
EDITS = ("get", "set", "add", "multiply", "apply", "only", "stop")
READS = ("grad", "jacobian", "hessian", "contributions")


@dataclass(frozen=True)
class Caller:
    """A line of the user's, and what they called there if it was ours."""

    where: str
    verb: str | None = None
    """As the user writes it: `eg.at(...).stop`, `eg.grad`."""
    stops: str | None = None
    """The cause if that verb lets no derivative through."""


def caller() -> Caller:
    """The nearest caller outside PyTorch and this library."""
    frame: Any = sys._getframe(1)
    verb, stops = None, None
    while frame.f_back is not None and frame.f_code.co_filename.startswith(HOMES):
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file == OURS + "place.py" and name in EDITS:
            verb, stops = f"eg.at(...).{name}", "detached"
        elif file == OURS + "read.py" and name in READS:
            verb, stops = f"eg.{name}", "inner-gradient"
        elif file == OURS + "choice.py" and name == "choose":
            verb, stops = "eg.choose", "discrete"
        frame = frame.f_back
    return Caller(f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}", verb, stops)
