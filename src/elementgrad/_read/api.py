"""`jacobian`, `hessian` and `grad`: names and options in, lazy Jacobians or their entries out."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import is_
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from elementgrad._backends.autodiff import Linearization
from elementgrad._backends.base import Backend
from elementgrad._backends.registry import backend_of, not_compiled
from elementgrad._backends.source_location import spelled_as
from elementgrad._names import pytree
from elementgrad._names.call import BoundCall, Operand, PartialCall, TensorRef
from elementgrad._place.place import Place
from elementgrad._read.budget import parse
from elementgrad._read.jacobian import Jacobian, JacobianSpec, Reason, explain_missing_path, read_together
from elementgrad._read.sparse import Again
from elementgrad.errors import OptionError, PlaceError, SelectionError, quoted

Tensor = Any
Named = str | Place | Tensor | None
"""What `of` and `wrt` take: the text of a place, a place, one of the tensors given, or None for the only one."""
Tree = Any
"""Something, or a tuple, list or dict of it."""
Unconnected = Literal["error", "zero"]
NOTHING: Mapping[str, Any] = MappingProxyType({})
ONLY = Place()
"""The only tensor there is."""


@not_compiled
@spelled_as("eg.jacobian")
def jacobian(
    f: Callable[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] = NOTHING,
    of: Tree = None,
    wrt: Tree = None,
    unconnected: Unconnected = "error",
    budget: int | str | None = None,
    create_graph: bool = False,
    batch: bool = False,
    pattern: Any = None,
) -> Any:
    """The derivative of an output of `f(*args, **kwargs)` with respect to an input, as an array to index.

    Both sides are named: an input by its parameter (`"x"`, `"params.weight"`, `"x[0, :]"`), an output (`"output"`,
    `"output.loss"`), an activation, parameter or buffer of a model (`"conv1[0, 12]"`, `"fc.weight"`), a tag. `wrt` may
    also be one of the tensors given. Both may be left out where there is only one. A tuple, list or dict of them gives
    the same structure of Jacobians. `budget` bounds the memory that grows with the number of
    sweeps run at once (`"200MB"`; by default an eighth of what is free). With `create_graph=True` results can be
    differentiated again. With `batch=True` the first axis of both sides counts examples that do not mix, and the result
    is one Jacobian per example. `pattern`, an `eg.Pattern` or a matrix of scipy.sparse, says which entries can be
    nonzero; reads are then by colours.

    >>> import torch, elementgrad as eg
    >>> J = eg.jacobian(lambda x, y: {"loss": (x * y).sum(), "x": x}, torch.ones(3), torch.arange(3.0),
    ...                 of="output.loss", wrt="x")
    >>> J[..., 2], J.shape
    (tensor(2.), (3,))
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU())
    >>> eg.jacobian(model, torch.ones(3), of="output", wrt="0").shape
    (2, 2)
    """
    reading = _Evaluation.start(f, args, kwargs, of, wrt, unconnected, budget, create_graph, batch, order=1)
    return pytree.map_tree(
        reading.of, lambda of: pytree.map_tree(reading.wrt, lambda wrt: reading.jacobian(of, wrt, pattern))
    )


@not_compiled
@spelled_as("eg.hessian")
def hessian(
    f: Callable[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] = NOTHING,
    of: Tree = None,
    wrt: Tree = None,
    unconnected: Unconnected = "error",
    budget: int | str | None = None,
    create_graph: bool = False,
    batch: bool = False,
    pattern: Any = None,
) -> Any:
    """The second derivatives of one output element, as an array to index: the lazy Jacobian of the gradient.

    With several inputs in `wrt` it is a structure of structures, `H["x"]["y"]`. The other arguments are those of
    `jacobian`.

    >>> import torch, elementgrad as eg
    >>> H = eg.hessian(lambda x: (x[0] * x[1] ** 2).sum(), torch.tensor([2.0, 3.0]))
    >>> H[0, 1], H[1, :], H.diagonal()
    (tensor(6.), tensor([6., 4.]), tensor([0., 4.]))
    """
    first = _Evaluation.start(f, args, kwargs, of, wrt, unconnected, budget, create_graph, batch, order=2)

    def second(of: Operand) -> Tree:
        reading = first.gradient(of)
        return pytree.map_tree(
            reading.wrt,
            lambda row: pytree.map_tree(
                reading.wrt,
                lambda column: reading.jacobian(reading.gradient_side(of, row), column, pattern, row is column),
            ),
        )

    return pytree.map_tree(first.of, second)


@not_compiled
@spelled_as("eg.grad")
def grad(
    f: Callable[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] = NOTHING,
    of: Tree = None,
    wrt: Tree = None,
    unconnected: Unconnected = "error",
    budget: int | str | None = None,
    create_graph: bool = False,
    batch: bool = False,
) -> Any:
    """The derivative of the elements that `of` names with respect to those that `wrt` names, computed now.

    Without `of` the function must give a single number. Its shape is that of `of`'s elements and then `wrt`'s. Several
    inputs share their sweeps. The other arguments are those of `jacobian`.

    >>> import torch, elementgrad as eg
    >>> X, Y = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0], [7.0, 8.0]])
    >>> eg.grad(lambda X, Y: X @ Y, X, Y, of="output[0, 0]", wrt="X")
    tensor([[5., 7.],
            [0., 0.]])
    >>> eg.grad(lambda X, Y: X @ Y, X, Y, of="output[0, 0]", wrt="X[0, 1]")
    tensor(7.)
    """
    reading = _Evaluation.start(f, args, kwargs, of, wrt, unconnected, budget, create_graph, batch, order=1)
    return pytree.map_tree(reading.of, lambda side: reading.gradients(side, single=of is None))


@dataclass
class _Evaluation:
    """A function evaluated at its arguments, with both sides found by their names."""

    backend: Backend
    linear: Linearization
    of: Tree
    wrt: Tree
    zero: bool
    budget: int | None
    batch: bool
    again: Again
    question: Callable[..., JacobianSpec]
    """What was asked, but for the sides."""
    why: Callable[[Operand, Operand], Reason | None] | None = None
    element: Place | None = None
    """The output whose gradient is read, where that is what is differentiated."""

    @classmethod
    def start(
        cls,
        f: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        of: Tree,
        wrt: Tree,
        unconnected: Unconnected,
        budget: int | str | None,
        create_graph: bool,
        batch: bool,
        order: int,
    ) -> "_Evaluation":
        zero = asks_for_zeros(unconnected)
        for name, flag in {"batch": batch, "create_graph": create_graph}.items():
            if not isinstance(flag, bool):
                raise OptionError(f"{name}={quoted(flag)} is neither True nor False; give one of them")
        limit = parse(budget)
        of, wrt = pytree.map_tree(of, parsed_target), pytree.map_tree(wrt, parsed)
        call = BoundCall(f, args, kwargs)
        places = pytree.leaves_of(wrt)
        sources = [call.find_source(place) for place in places]
        targets = [call.find_target(place) for place in pytree.leaves_of(of)]
        inputs, outputs = _distinct(sources), _distinct(targets)
        if not inputs or not outputs:
            raise PlaceError("of or wrt names nothing; name a tensor, or leave it out where there is only one")

        def sides(
            places: Sequence[Place], found: Sequence[TensorRef], among: Sequence[TensorRef], tensors: Sequence[Tensor]
        ) -> list[Operand]:
            numbers = map(among.index, found)
            return [
                call.operand(place, source, number, tensors[number], batch)
                for place, source, number in zip(places, found, numbers, strict=True)
                if tensors[number] is not None  # that of what is met is there after the run
            ]

        tensors = [source.tensor for source in inputs]
        ins = sides(places, sources, inputs, tensors)

        def linearized(tensors: Sequence[Tensor]) -> Linearization:
            return call.backend.linearize(PartialCall(call, inputs, outputs), tensors, create_graph, order)

        def again(number: int, x: Tensor) -> Linearization:
            if tensors[number] is None:
                raise OptionError(f"{inputs[number].name} is computed by the function, so it cannot be set")
            return linearized([x if i == number else other for i, other in enumerate(tensors)])

        linear = linearized(tensors)
        if not all(map(is_, linear.inputs, tensors)):
            ins = sides(places, sources, inputs, linear.inputs)
        outs = sides(pytree.leaves_of(of), targets, outputs, list(map(linear.value, range(len(outputs)))))

        def why(this: Operand, that: Operand) -> Reason | None:
            named = zip([side.name for side in (*outs, *ins)], [*pytree.leaves_of(of), *places], strict=True)
            by_name = dict(named)
            return explain_missing_path(call, by_name.get(this.name), by_name.get(that.name))

        filled = pytree.unflatten_like(of, outs), pytree.unflatten_like(wrt, ins)
        question = partial(JacobianSpec, f, args, dict(kwargs), zero, batch, create_graph)
        reading = cls(call.backend, linear, *filled, zero, limit, batch, again, question, why)
        reading._examples()
        forbid_forward(linear, call.backend, outs, ins)
        return reading

    def jacobian(self, of: Operand, wrt: Operand, pattern: Any = None, symmetric: bool = False) -> Jacobian:
        options = self.zero, self.budget, self._examples(), self.why, pattern, self.again, symmetric
        question = self.question(of.place, wrt.place, self.element)
        return Jacobian(self.backend, self.linear, of, wrt, *options, question)

    def gradients(self, of: Operand, single: bool) -> Tree:
        """The block of each input, all from the same sweeps."""
        if single and math.prod(of.shape) != 1:
            raise SelectionError(
                f"{of.name} of shape {of.shape} is not a single number; say which element, as in "
                f'of="{of.name}[{", ".join("0" * len(of.shape))}]", or use eg.jacobian'
            )
        if single:
            of = replace(of, base=of.select((0,) * len(of.shape), self.backend))
        return pytree.unflatten_like(
            self.wrt, read_together([self.jacobian(of, wrt) for wrt in pytree.leaves_of(self.wrt)])
        )

    def gradient(self, of: Operand) -> "_Evaluation":
        """The gradient of one element, as a function of the same inputs."""
        if math.prod(of.shape) != 1:
            raise SelectionError(
                f"{of.name} of shape {of.shape} has a Hessian for each element; say which, as in "
                f'of="{of.name}[{", ".join("0" * len(of.shape))}]"'
            )
        whole = of.select(..., self.backend)
        for wrt in pytree.leaves_of(self.wrt):
            self.jacobian(of, wrt).require_apart()
        position = whole.flat().reshape(-1)
        seeds = self.backend.load("read").one_hot_seeds(of.tensor, np.array(position), self._examples() or 1)

        def again(number: int, x: Tensor) -> Linearization:
            return self.again(number, x).gradient(of.index, seeds[0])

        linear = self.linear.gradient(of.index, seeds[0])
        inputs = pytree.leaves_of(self.wrt)
        forbid_forward(linear, self.backend, inputs, [of, *inputs])  # its outputs are numbered as the inputs are
        return replace(self, linear=linear, again=again, why=None, element=of.place)

    def gradient_side(self, of: Operand, wrt: Operand) -> Operand:
        """The gradient with respect to one input, as the output of that function."""
        return replace(wrt, name=f"the gradient of {of.name}", tensor=self.linear.value(wrt.index))

    def _examples(self) -> int | None:
        if not self.batch:
            return None
        sides = [*pytree.leaves_of(self.of), *pytree.leaves_of(self.wrt)]
        counts = {side.name: int(self.backend.shape(side.tensor)[0]) for side in sides}
        if len(set(counts.values())) != 1:
            raise OptionError(f"batch=True needs as many examples on every side, and there are {counts}")
        return next(iter(counts.values()))


def _distinct(sources: list[TensorRef]) -> list[TensorRef]:
    return list(dict.fromkeys(sources)) if len(sources) > 1 else sources


def forbid_forward(
    linear: Linearization, backend: Backend, outputs: Sequence[Operand], others: Sequence[Operand]
) -> None:
    """Allow reverse sweeps alone where a number is complex, since the two directions mean different derivatives."""
    if any(backend.kind(side.tensor) == "c" for side in (*outputs, *others)):
        for side in outputs:
            linear.without[side.index]["forward"] = "derivatives of complex numbers follow reverse mode"


def asks_for_zeros(unconnected: str) -> bool:
    """Whether zeros will do where there is no path."""
    if unconnected not in ("error", "zero"):
        raise OptionError(f'unconnected={quoted(unconnected)} is neither "error" nor "zero"; give one of them')
    return unconnected == "zero"


def parsed(wanted: Named) -> Place:
    """The place that somebody asks for; without a name and a tensor, the only one there is."""
    if wanted is None:
        return ONLY
    place = Place.parse(wanted) if isinstance(wanted, str) else wanted
    if isinstance(place, Place):
        return place
    if backend_of(place) is None:
        raise PlaceError(
            f'{quoted(place)} names no tensor; give a name such as "x" or "output[0]", a place or a tensor'
        )
    return Place(place)


def parsed_target(wanted: Named) -> Place:
    """What `of` may be, as far as that is known before the function has run."""
    place = parsed(wanted)
    if place.tensor is not None:
        raise PlaceError('of is given by name, as in of="output[0]", since the output is not there yet')
    return place
