"""Who called a function of PyTorch's: the user's line, and the verb of ours that stands there."""

import sys
from dataclasses import dataclass

from elementgrad.backends.lines import spelled, verb
from elementgrad.backends.torch.calls import outwards


@dataclass(frozen=True)
class Caller:
    """A line of the user's, and what they called there if it was ours."""

    where: str
    verb: str | None = None
    """As the user writes it: `eg.at(...).stop`, `eg.grad`."""

    @property
    def stops(self) -> str:
        """The cause if that verb lets no derivative through."""
        if self.verb == "eg.choose":
            return "discrete"
        return "detached" if str(self.verb).startswith("eg.at") else "inner-gradient"


def caller() -> Caller:
    """The nearest caller outside PyTorch and this library."""
    called = None
    for frame in outwards(sys._getframe(1)):
        called = verb(frame.f_code.co_filename, frame.f_code.co_name) or called
    return Caller(spelled(frame.f_code.co_filename, frame.f_lineno), called)
