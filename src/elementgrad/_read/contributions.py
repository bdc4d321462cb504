"""`eg.contributions`: a derivative split into one share per use of its source, over all paths or some of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, Literal

import numpy as np

from elementgrad._backends import registry
from elementgrad._backends.autodiff import Linearization, UnsupportedError
from elementgrad._backends.base import Backend
from elementgrad._backends.registry import not_compiled
from elementgrad._backends.source_location import spelled_as
from elementgrad._html import grid, never_raise
from elementgrad._names import pytree
from elementgrad._names.arguments import NOTHING, gather_arguments
from elementgrad._names.call import BoundCall, Operand, PartialCall, TensorRef
from elementgrad._names.names import expand_patterns
from elementgrad._place.place import Named, Place, parse_place, parse_target
from elementgrad._read.api import parse_unconnected
from elementgrad._read.jacobian import unconnected_error
from elementgrad._read.sweeps import SweepRunner
from elementgrad.errors import FrameworkError, PlaceError, quoted

Tensor = Any


@dataclass(frozen=True, eq=False)
class Share:
    """The contribution of one use of a tensor to a derivative; a use is one argument slot of one operation.

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
    """The name of the operation: `"mul"`, `"select"`, the name of an `autograd.Function`."""
    where: str | None
    """The line of the user's code, as `"file.py:12"`, where it is known."""
    value: Tensor
    """A tensor of the shape of `of`'s elements and then `wrt`'s."""


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

    _zeros: Tensor

    def __new__(cls, shares: Iterable[Share], zeros: Tensor) -> "Shares":
        """Make a tuple of the shares, with zeros in the shape of their values."""
        made = super().__new__(cls, shares)
        made._zeros = zeros
        return made

    @property
    def total(self) -> Tensor:
        """The whole derivative: the sum of the shares."""
        return reduce(add, [share.value for share in self]) if self else self._zeros

    @property
    def value(self) -> Tensor:
        """An alias of `total`."""
        return self.total

    def __repr__(self) -> str:
        rows = self._rows()
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        return "\n".join(f"{name:<{widths[0]}}  {where:<{widths[1]}}  {value}" for name, where, value in rows)

    @never_raise
    def _repr_html_(self) -> str:
        return grid([("operation", "line", "share"), *self._rows()])

    def _rows(self) -> list[tuple[str, str, str]]:
        rows = [(share.operation, share.where or "", _format_value(share.value)) for share in self]
        return [*rows, ("total", "", _format_value(self.total))]


def _format_value(value: Tensor) -> str:
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
    names_from: Any = None,
    **arguments: Any,
) -> Any:
    """Return the derivative of one place with respect to another, as one share for each use of the source.

    A use is one argument slot of one operation; the shares add up to the derivative.

    Args:
        f: A function or model, as for `jacobian`.
        args: The positional arguments of `f`.
        kwargs: The keyword arguments of `f`.
        of: The output elements; by default the only output.
        wrt: The source, whose uses are split; by default the only input.
        via: Activations or tags: only paths that pass all of them count. A pattern stands for all that it matches.
        without: Activations or tags: only paths that pass none of them count.
        unconnected: `"zero"` to return zeros where there is no path, instead of an error.
        names_from: As for `jacobian`.
        arguments: More keyword arguments of `f`.

    Returns:
        The shares, in the order of computation. For a pattern such as `"h.*.weight[0]"` a dict of shares by the places
        that it matches.

    >>> import torch, elementgrad as eg
    >>> shares = eg.contributions(lambda x: 2 * x[2] + x.sum(), torch.tensor([1.0, 2.0, 3.0]), wrt="x[2]")
    >>> [(share.operation, share.value.item()) for share in shares], shares.total
    ([('select', 2.0), ('sum', 1.0)], tensor(3.))
    """
    zero = parse_unconnected(unconnected)
    _require_single_places(of=of, wrt=wrt)
    wrt_place, of_place = parse_place(wrt), parse_target(of)
    call = BoundCall(*gather_arguments(contributions, f, args, kwargs, arguments, names_from), [wrt_place])
    targets, sources, via, without = expand_patterns(
        call, of_place, wrt_place, _parse_waypoints("via", via), _parse_waypoints("without", without)
    )
    waypoints = {_resolve_waypoint(call, place): place for place in pytree.leaves_of(via)}
    cuts = {_resolve_waypoint(call, place).key: _make_cut(call.backend, place) for place in pytree.leaves_of(without)}
    return pytree.map_tree(
        targets, lambda of: pytree.map_tree(sources, lambda wrt: _split(call, of, wrt, waypoints, cuts, zero))
    )


def _split(
    call: BoundCall,
    of_place: Place,
    wrt_place: Place,
    waypoints: Mapping[TensorRef, Place],
    cuts: Mapping[Any, Any],
    zero: bool,
) -> Shares:
    """Return the shares of one derivative."""
    backend = call.backend
    source, target = call.find_source(wrt_place), call.find_target(of_place)
    swept = _sweep_through_waypoints(call, of_place, target, waypoints, cuts) if waypoints else None
    end = swept.end if swept else target
    linear, uses = backend.load("read").uses(PartialCall(call, [source], [end], cuts), [source.tensor], 0)
    output = swept.output if swept else call.operand(of_place, target, 0, linear.value(0), batch=False)
    input = call.operand(wrt_place, source, 0, linear.inputs[0] if source.computed else source.tensor, batch=False)
    seeds = swept.seeds if swept else _one_hot_seeds(backend, output)
    derivatives = [None] * len(uses) if seeds is None else _vjp(backend, linear, 0, range(len(uses)), seeds)
    if not zero and all(derivative is None for derivative in derivatives):
        raise unconnected_error(output, input, backend)
    shape = (*output.shape, *input.shape)
    shares = [
        Share(use.operation, use.where, _pick(backend, derivative, input, shape))
        for use, derivative in zip(uses, derivatives, strict=True)
        if derivative is not None
    ]
    return Shares(shares, backend.zeros(shape, input.tensor))


def _resolve_waypoint(call: BoundCall, place: Place) -> TensorRef:
    source = call.find_source(place)
    if not source.computed:
        raise PlaceError(
            f"{place} is of kind {source.kind} and not computed; name an activation or tag that paths pass"
        )
    return source


def _make_cut(backend: Backend, place: Place) -> Callable[[Tensor], Tensor]:
    """Return a function that lets no path through the elements that a place names."""
    if not place.index:
        return backend.stop
    return lambda x: backend.edit.stop_gradient_at(x, place.select(backend.shape(x)))


@dataclass(frozen=True)
class _WaypointSweep:
    """The derivatives of a target with respect to the first of the tensors that its paths must pass."""

    output: Operand
    end: TensorRef
    seeds: Tensor | None
    """None where no path passes them all."""


def _sweep_through_waypoints(
    call: BoundCall, place: Place, target: TensorRef, waypoints: Mapping[TensorRef, Place], cuts: Mapping[Any, Any]
) -> _WaypointSweep:
    """Sweep back from the target through all waypoints, the last that is computed first."""
    backend, targets = call.backend, [target, *waypoints]
    linear = backend.linearize(PartialCall(call, list(waypoints), targets, cuts), [None] * len(waypoints), False, 1)
    output = call.operand(place, target, 0, linear.value(0), batch=False)
    seeds: Tensor | None = _one_hot_seeds(backend, output)
    here = target
    for waypoint in sorted(waypoints, key=lambda waypoint: call.orders[waypoint.key], reverse=True):
        if seeds is not None:
            (seeds,) = _vjp(backend, linear, targets.index(here), [targets.index(waypoint) - 1], seeds)
        if seeds is not None and waypoints[waypoint].index:
            seeds = _keep_only(backend, seeds, waypoints[waypoint])
        here = waypoint
    return _WaypointSweep(output, here, seeds)


def _keep_only(backend: Backend, stack: Tensor, place: Place) -> Tensor:
    """Return a stack of derivatives with zeros for all elements but those that a place names."""
    shape = backend.shape(stack)
    where = place.select(shape[1:]).behind(shape[:1])
    return backend.put(backend.zeros(shape, stack), where, backend.take(stack, where))


def _one_hot_seeds(backend: Backend, output: Operand) -> Tensor:
    return backend.load("read").one_hot_seeds(
        output.tensor, np.array(output.select(..., backend).flat().reshape(-1)), 1
    )


def _vjp(
    backend: Backend, linear: Linearization, output: int, inputs: Sequence[int], seeds: Tensor
) -> list[Tensor | None]:
    try:
        return SweepRunner(backend, linear, output, inputs).run("reverse", seeds, backend.shape(seeds)[0])
    except UnsupportedError as error:
        raise FrameworkError(f"{backend.name} has no reverse sweep through this: {error}") from error


def _pick(backend: Backend, stack: Tensor, side: Operand, shape: tuple[int, ...]) -> Tensor:
    """Return the derivatives of the elements that make up a side, of a stack of derivatives."""
    count = backend.shape(stack)[0]
    if side.base is not None:
        where = side.base.stacked((count,))
        stack = backend.take(backend.reshape(stack, where.of), where)
    return backend.load("read").materialize(backend.reshape(stack, shape))


def _require_single_places(**sides: Any) -> None:
    for argument, named in sides.items():
        if isinstance(named, (tuple, list, dict)):
            raise PlaceError(f'{argument}={named!r} is not a single place; give one, such as "x[2]"')


def _parse_waypoints(option: str, names: Any) -> list[Place]:
    listed = list(names) if isinstance(names, (list, tuple)) else [names]
    for name in listed:
        if not isinstance(name, str) and not (isinstance(name, Place) and name.name):
            more = (
                ""
                if type(name) in pytree.SIMPLE
                else f"; an argument of the function goes into kwargs={{{option!r}: ...}}"
            )
            raise PlaceError(
                f"{quoted(name)} names no activation or tag; give a name or a list of them, such as 'block1'{more}"
            )
    return [parse_place(name) for name in listed]
