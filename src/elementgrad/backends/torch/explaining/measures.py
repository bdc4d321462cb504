"""A call of a function that was watched, and who measures it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from elementgrad.backends.witness import Step

Tensor = torch.Tensor


@dataclass(frozen=True)
class Overwrite:
    """A write in place to a tensor that a step had used before."""

    step: Step
    shape: tuple[int, ...]
    maker: str
    """The function that the tensor came from."""


@dataclass(frozen=True)
class Ran:
    """One call of a function."""

    name: str
    func: Callable[..., Any]
    args: Any
    kwargs: Any
    taken: Sequence[Tensor]
    """Those of the tensors it took that are measured."""
    made: Sequence[Tensor]
    start: int
    """How many operations autograd had counted when it began."""
    takes: Sequence[int] = ()
    """The numbers of those that are measured."""
    given: Sequence[tuple[Tensor, int]] = ()
    """What has a new number now, those included that share memory with what was written to."""


class Meter:
    """Takes a measure of every step: of what it takes, before it runs, and of what it gave."""

    all = False
    """Whether what is not computed from the source is measured as well."""

    def before(self, taken: Sequence[Tensor], writes: bool) -> Any:
        """A measure of what a step takes, and may write to."""

    def after(self, ran: Ran, before: Any) -> Any:
        """The measure of a step."""
