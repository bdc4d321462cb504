"""A derivative split into shares, one per use of its source."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

from elementgrad import backends
from elementgrad.markup import grid, guarded

Tensor = Any


@dataclass(frozen=True, eq=False)
class Share:
    """What one use of a tensor contributes to a derivative; a use is one argument slot of one operation.

    >>> import torch, elementgrad as eg
    >>> x = torch.tensor([1.0, 2.0, 3.0])
    >>> with eg.record(x) as rec:
    ...     y = 2 * x[2] + x.sum()
    >>> share = rec.contributions(y, eg.at(x)[2])[0]
    >>> share.operation, share.value
    ('select', tensor(2.))
    """

    operation: str
    """What was done: `"mul"`, `"select"`, the name of an `autograd.Function`."""
    where: str | None
    """The line of the user's code, as `"file.py:12"`, where it is known."""
    value: Tensor
    """Of the shape of `of`'s elements and then `wrt`'s."""


class Shares(tuple[Share, ...]):
    """The shares of a derivative, in the order of computation. `eg.contributions` and `rec.contributions` give them.

    >>> import torch, elementgrad as eg
    >>> x = torch.tensor([1.0, 2.0, 3.0])
    >>> with eg.record(x) as rec:
    ...     y = 2 * x[2] + x.sum()
    >>> shares = rec.contributions(y, eg.at(x)[2])
    >>> [share.value.item() for share in shares], shares.total
    ([2.0, 1.0], tensor(3.))
    """

    _nothing: Tensor

    def __new__(cls, shares: Iterable[Share], nothing: Tensor) -> "Shares":
        """From the shares, and zeros in the shape of their values."""
        made = super().__new__(cls, shares)
        made._nothing = nothing
        return made

    @property
    def total(self) -> Tensor:
        """The whole derivative: the sum of the shares."""
        return reduce(add, [share.value for share in self]) if self else self._nothing

    @property
    def value(self) -> Tensor:
        """The same as `total`."""
        return self.total

    def __repr__(self) -> str:
        rows = self._rows()
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        return "\n".join(f"{name:<{widths[0]}}  {where:<{widths[1]}}  {value}" for name, where, value in rows)

    @guarded
    def _repr_html_(self) -> str:
        return grid([("operation", "line", "share"), *self._rows()])

    def _rows(self) -> list[tuple[str, str, str]]:
        rows = [(share.operation, share.where or "", _shown(share.value)) for share in self]
        return [*rows, ("total", "", _shown(self.total))]


def _shown(value: Tensor) -> str:
    number = backends.find(value).read(value) if tuple(value.shape) == () else None
    return f"values of shape {tuple(value.shape)}" if number is None else f"{number.item():.6g}"
