"""Who called a function of PyTorch's: the user's line, and the verb of ours that stands there."""

import os
import sys
from dataclasses import dataclass

from elementgrad.backends.lines import spelled, verb
from elementgrad.backends.torch.calls import outwards

CALLED = {"sample": ("distributions", "sample"), "step": ("optim", "optimizer.step")}
"""Methods of PyTorch's that do many things at once: the folder that they live in, and what the user calls them."""


@dataclass(frozen=True)
class Caller:
    """A line of the user's, and what they called there if it was ours, or does many things at once."""

    where: str
    verb: str | None = None
    """As the user writes it: `eg.at(...).stop`, `eg.grad`, `sample`, `optimizer.step`."""

    def stops(self, seen: str | None) -> str | None:
        """The cause if that verb lets no derivative through, in place of what is to be seen of one step of it."""
        if seen is None or self.verb is None:
            return seen
        if self.verb in ("eg.choose", "sample"):
            return "discrete"
        if self.verb.startswith("eg.at"):
            return "detached"
        return "inner-gradient" if self.verb.startswith("eg.") else seen


def caller() -> Caller:
    """The nearest caller outside PyTorch and this library."""
    called = None
    for frame in outwards(sys._getframe(1)):
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        called = verb(file, name) or (_of_torch(file, name) if name in CALLED else None) or called
    return Caller(spelled(frame.f_code.co_filename, frame.f_lineno), called)


def _of_torch(file: str, name: str) -> str | None:
    folder, word = CALLED[name]
    return word if os.path.join("torch", folder) + os.sep in file else None
