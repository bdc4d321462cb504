"""A derivative split into shares, one per use of its source.

`contributions`: a derivative split over the uses of its source, and over what its paths pass on their way.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, Literal

import numpy as np

from elementgrad._backends import registry
from elementgrad._backends.autodiff import Linearization
from elementgrad._backends.base import Backend
from elementgrad._backends.registry import not_compiled
from elementgrad._backends.source_location import spelled_as
from elementgrad._html import grid, never_raise
from elementgrad._names.call import BoundCall, Operand, PartialCall, TensorRef
from elementgrad._place.place import Place
from elementgrad._read.api import NOTHING, Named, asks_for_zeros, parsed, parsed_target
from elementgrad._read.jacobian import unconnected_error
from elementgrad._read.sweeps import SweepRunner
from elementgrad.errors import PlaceError

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

    __module__ = "elementgrad"

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

    __module__ = "elementgrad"

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

    @never_raise
    def _repr_html_(self) -> str:
        return grid([("operation", "line", "share"), *self._rows()])

    def _rows(self) -> list[tuple[str, str, str]]:
        rows = [(share.operation, share.where or "", _shown(share.value)) for share in self]
        return [*rows, ("total", "", _shown(self.total))]


def _shown(value: Tensor) -> str:
    number = registry.require_backend(value).read(value) if tuple(value.shape) == () else None
    return f"values of shape {tuple(value.shape)}" if number is None else f"{number.item():.6g}"


@not_compiled
@spelled_as("eg.contributions")
def contributions(
    f: Callable[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] = NOTHING,
    of: Named = None,
    wrt: Named = None,
    via: str | Place | Sequence[str | Place] = (),
    without: str | Place | Sequence[str | Place] = (),
    unconnected: Literal["error", "zero"] = "error",
) -> Shares:
    """The derivative of one place with respect to another, as one share for each use of the source.

    A use is one argument slot of one operation; the shares add up to the derivative. With `via="block1"` only the paths
    that pass this activation or tag count (all of them, if there are several names), with `without="block1"` only those
    that do not.

    >>> import torch, elementgrad as eg
    >>> shares = eg.contributions(lambda x: 2 * x[2] + x.sum(), torch.tensor([1.0, 2.0, 3.0]), wrt="x[2]")
    >>> [(share.operation, share.value.item()) for share in shares], shares.total
    ([('select', 2.0), ('sum', 1.0)], tensor(3.))
    """
    zero = asks_for_zeros(unconnected)
    _require_one(of=of, wrt=wrt)
    place, target_place = parsed(wrt), parsed_target(of)
    call = BoundCall(f, args, kwargs)
    backend = call.backend
    source, target = call.find_source(place), call.find_target(target_place)
    stops = {_waypoint(call, place): place for place in _waypoints(via)}
    cuts = {_waypoint(call, place).key: _cut(backend, place) for place in _waypoints(without)}
    passed = _passed(call, target_place, target, stops, cuts) if stops else None
    end = passed.end if passed else target
    linear, uses = backend.load("read").uses(PartialCall(call, [source], [end], cuts), [source.tensor], 0)
    to = passed.to if passed else call.operand(target_place, target, 0, linear.value(0), batch=False)
    since = call.operand(place, source, 0, linear.inputs[0] if source.computed else source.tensor, batch=False)
    seeds = passed.seeds if passed else _units(backend, to)
    pulled = [None] * len(uses) if seeds is None else _pulled(backend, linear, 0, range(len(uses)), seeds)
    if not zero and all(derivative is None for derivative in pulled):
        raise unconnected_error(to, since, backend)
    shape = (*to.shape, *since.shape)
    shares = [
        Share(use.operation, use.where, _taken(backend, derivative, since, shape))
        for use, derivative in zip(uses, pulled, strict=True)
        if derivative is not None
    ]
    return Shares(shares, backend.zeros(shape, since.tensor))


def _waypoint(call: BoundCall, place: Place) -> TensorRef:
    """What paths pass or do not pass: something that the function computes."""
    source = call.find_source(place)
    if not source.computed:
        raise PlaceError(
            f"{place} is of kind {source.kind} and not computed; name an activation or tag that paths pass"
        )
    return source


def _cut(backend: Backend, place: Place) -> Callable[[Tensor], Tensor]:
    """What lets no path through the elements that a place names."""
    if not place.index:
        return backend.stop
    return lambda x: backend.edit.stop_gradient_at(x, place.select(backend.shape(x)))


@dataclass(frozen=True)
class _Passed:
    """The derivatives of a target with respect to the first of the tensors that its paths must pass."""

    to: Operand
    end: TensorRef
    seeds: Tensor | None
    """None where no path passes them all."""


def _passed(
    call: BoundCall, place: Place, target: TensorRef, stops: Mapping[TensorRef, Place], cuts: Mapping[Any, Any]
) -> _Passed:
    """Go back from the target through all stops, the last that is computed first."""
    backend, targets = call.backend, [target, *stops]
    linear = backend.linearize(PartialCall(call, list(stops), targets, cuts), [None] * len(stops), False, 1)
    to = call.operand(place, target, 0, linear.value(0), batch=False)
    seeds: Tensor | None = _units(backend, to)
    here = target
    for stop in sorted(stops, key=lambda stop: call.orders[stop.key], reverse=True):
        if seeds is not None:
            (seeds,) = _pulled(backend, linear, targets.index(here), [targets.index(stop) - 1], seeds)
        if seeds is not None and stops[stop].index:
            seeds = _alone(backend, seeds, stops[stop])
        here = stop
    return _Passed(to, here, seeds)


def _alone(backend: Backend, stack: Tensor, place: Place) -> Tensor:
    """A stack of derivatives, with zeros for all but some elements."""
    shape = backend.shape(stack)
    where = place.select(shape[1:]).behind(shape[:1])
    return backend.put(backend.zeros(shape, stack), where, backend.take(stack, where))


def _units(backend: Backend, to: Operand) -> Tensor:
    return backend.load("read").one_hot_seeds(to.tensor, np.array(to.select(..., backend).flat().reshape(-1)), 1)


def _pulled(
    backend: Backend, linear: Linearization, output: int, inputs: Sequence[int], seeds: Tensor
) -> list[Tensor | None]:
    sweeper = SweepRunner(backend, linear, output, inputs, 0, [])
    return sweeper.sweep_from("reverse", sweeper.vjp_sweep(), seeds, backend.shape(seeds)[0])


def _taken(backend: Backend, stack: Tensor, side: Operand, shape: tuple[int, ...]) -> Tensor:
    """Of a stack of derivatives those of the elements that make up a side."""
    count = backend.shape(stack)[0]
    if side.base is not None:
        where = side.base.stacked((count,))
        stack = backend.take(backend.reshape(stack, where.of), where)
    return backend.load("read").materialize(backend.reshape(stack, shape))


def _require_one(**sides: Any) -> None:
    """Shares of several places would belong to several sums."""
    for argument, wanted in sides.items():
        if isinstance(wanted, (tuple, list, dict)):
            raise PlaceError(f'{argument}={wanted!r} is no single place; give one, such as "x[2]"')


def _waypoints(names: Any) -> list[Place]:
    listed = list(names) if isinstance(names, (list, tuple)) else [names]
    for name in listed:
        if not isinstance(name, str) and not (isinstance(name, Place) and name.name):
            raise PlaceError(f"{name!r} names nothing on the way; give a name or a list of them, such as 'block1'")
    return [parsed(name) for name in listed]
