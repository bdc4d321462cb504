"""`eg.jacobian`, `eg.hessian` and `eg.grad`: names and options in, lazy Jacobians or their entries out."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import is_
from typing import Any, Literal, NamedTuple

import numpy as np

from elementgrad._backends.autodiff import Linearization
from elementgrad._backends.registry import not_compiled
from elementgrad._backends.source_location import spelled_as
from elementgrad._cone.plan import NoConeError
from elementgrad._names import pytree
from elementgrad._names.arguments import NOTHING, gather_arguments, option_error
from elementgrad._names.call import ONLY_OUTPUT, BoundCall, Operand, PartialCall, TensorRef
from elementgrad._names.names import expand_patterns
from elementgrad._place.place import Place, is_pattern, parse_place, parse_target
from elementgrad._place.selection import Selection
from elementgrad._read.cone import ConeLinearization, is_large, parse_cone, record
from elementgrad._read.jacobian import (
    Evaluation,
    Jacobian,
    Origin,
    ReadOptions,
    read_together,
    reverse_only,
)
from elementgrad._read.plan import parse_budget
from elementgrad.errors import OptionError, PlaceError, SelectionError

Tensor = Any
Tree = Any
"""A value, or a tuple, list or dict of values."""
Unconnected = Literal["error", "zero"]


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
    cone: bool | None = None,
    names_from: Any = None,
    **arguments: Any,
) -> Any:
    """Return the derivative of an output of `f(*args, **kwargs)` with respect to an input, as an array to index.

    Args:
        f: A function or model of PyTorch, TensorFlow or JAX. It runs once, now.
        args: The positional arguments of `f`.
        kwargs: The keyword arguments of `f`.
        of: The output by name (`"output"`, `"output.loss"`), or an activation or tag (`"conv1[0, 12]"`). It may be left
            out where there is only one output. A tuple, list or dict gives the same structure of Jacobians.
        wrt: The input by its parameter (`"x"`, `"params.weight"`, `"x[0, :]"`), a parameter, buffer or activation of a
            model (`"fc.weight"`), a tag, or one of the argument tensors. As with `of`, it may be left out or be a tree.
        unconnected: `"zero"` to return zeros where no path leads from `wrt` to `of`, instead of an error.
        budget: A bound on the memory that grows with the number of sweeps run at once, as `"200MB"`; by default an
            eighth of what is free.
        create_graph: True to be able to differentiate the results again.
        batch: True if the first axis of both sides counts examples that do not mix; the result has one Jacobian for
            each example.
        pattern: An `eg.Pattern` or a matrix of scipy.sparse of the entries that can be nonzero; reads then go by
            colours.
        cone: True to record `f` instead of evaluating it. Every read then runs the part of `f` that its elements depend
            on.
        names_from: A model that `f` calls and does not take as an argument, whose names `of` and `wrt` use; or a dict
            of models by the names that they are to have.
        arguments: More keyword arguments of `f`.

    Returns:
        A lazy `Jacobian`, or a tree of them.

    Raises:
        PlaceError: A name in `of` or `wrt` fits no tensor, or several.

    >>> import torch, elementgrad as eg
    >>> J = eg.jacobian(lambda x, y: {"loss": (x * y).sum(), "x": x}, torch.ones(3), torch.arange(3.0),
    ...                 of="output.loss", wrt="x")
    >>> J[..., 2], J.shape
    (tensor(2.), (3,))
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU())
    >>> eg.jacobian(model, torch.ones(3), of="output", wrt="0").shape
    (2, 2)
    """
    f, args, kwargs = gather_arguments(jacobian, f, args, kwargs, arguments, names_from)
    recorded = cone is not None and parse_cone(cone) is True
    options = _Options.parse(unconnected, budget, create_graph, batch)
    evaluation = _evaluate(f, args, kwargs, of, wrt, options, cone=recorded)
    return pytree.map_tree(
        evaluation.of, lambda of: pytree.map_tree(evaluation.wrt, lambda wrt: Jacobian(evaluation, of, wrt, pattern))
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
    names_from: Any = None,
    **arguments: Any,
) -> Any:
    """Return the second derivatives of one output element, as an array to index: the lazy Jacobian of the gradient.

    Args:
        f: A function or model, as for `jacobian`.
        args: The positional arguments of `f`.
        kwargs: The keyword arguments of `f`.
        of: The output element that has the Hessian.
        wrt: The input. With several, the result is a structure of structures, `H["x"]["y"]`.
        unconnected: As for `jacobian`.
        budget: As for `jacobian`.
        create_graph: As for `jacobian`.
        batch: As for `jacobian`.
        pattern: As for `jacobian`.
        names_from: As for `jacobian`.
        arguments: More keyword arguments of `f`.

    Returns:
        A lazy `Jacobian`, or a tree of them.

    >>> import torch, elementgrad as eg
    >>> H = eg.hessian(lambda x: (x[0] * x[1] ** 2).sum(), torch.tensor([2.0, 3.0]))
    >>> H[0, 1], H[1, :], H.diagonal()
    (tensor(6.), tensor([6., 4.]), tensor([0., 4.]))
    """
    f, args, kwargs = gather_arguments(hessian, f, args, kwargs, arguments, names_from)
    options = _Options.parse(unconnected, budget, create_graph, batch)
    first = _evaluate(f, args, kwargs, of, wrt, options, order=2)

    def blocks(of: Operand) -> Tree:
        gradient = first.gradient(of)
        return pytree.map_tree(
            gradient.wrt,
            lambda row: pytree.map_tree(
                gradient.wrt,
                lambda column: Jacobian(gradient, gradient.as_output(of, row), column, pattern),
            ),
        )

    return pytree.map_tree(first.of, blocks)


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
    cone: bool | None = None,
    names_from: Any = None,
    **arguments: Any,
) -> Any:
    """Return the derivative of the elements that `of` names with respect to those that `wrt` names, computed now.

    Args:
        f: A function or model, as for `jacobian`.
        args: The positional arguments of `f`.
        kwargs: The keyword arguments of `f`.
        of: The output elements. Without it the function must give a single number.
        wrt: The input elements. Several inputs share their sweeps.
        unconnected: As for `jacobian`.
        budget: As for `jacobian`.
        create_graph: As for `jacobian`.
        batch: As for `jacobian`.
        cone: By default only the part of `f` that the named elements depend on is run where that is cheaper: `f` is
            recorded first, without numbers. True to do so in any case, or raise an error that says why it cannot be
            done; False never to do so, for a function with side effects.
        names_from: As for `jacobian`.
        arguments: More keyword arguments of `f`.

    Returns:
        A tensor of the shape of `of`'s elements and then `wrt`'s, or a tree of them.

    >>> import torch, elementgrad as eg
    >>> X, Y = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0], [7.0, 8.0]])
    >>> eg.grad(lambda X, Y: X @ Y, X, Y, of="output[0, 0]", wrt="X")
    tensor([[5., 7.],
            [0., 0.]])
    >>> eg.grad(lambda X, Y: X @ Y, X, Y, of="output[0, 0]", wrt="X[0, 1]")
    tensor(7.)
    """
    f, args, kwargs = gather_arguments(grad, f, args, kwargs, arguments, names_from)
    cone = None if cone is None else parse_cone(cone)
    options = _Options.parse(unconnected, budget, create_graph, batch)

    def read(cone: bool | None) -> Tree:
        evaluation = _evaluate(f, args, kwargs, of, wrt, options, cone=cone, copy_values=False)
        evaluation.linear.once = not create_graph and len(pytree.leaves_of(evaluation.of)) == 1
        return pytree.map_tree(evaluation.of, lambda side: evaluation.gradients(side, require_single=of is None))

    with suppress(NoConeError):
        return read(cone)
    return read(False)


@not_compiled
@spelled_as("eg.value")
def value(
    f: Callable[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] = NOTHING,
    of: Tree = None,
    cone: bool | None = None,
    names_from: Any = None,
    **arguments: Any,
) -> Any:
    """Return the values of the elements that `of` names, without gradients.

    Args:
        f: A function or model, as for `jacobian`.
        args: The positional arguments of `f`.
        kwargs: The keyword arguments of `f`.
        of: The elements of an output, activation or tag. A tuple, list or dict gives the same structure of values.
        cone: As for `grad`: by default only what these elements depend on is computed, where that is cheaper.
        names_from: As for `jacobian`.
        arguments: More keyword arguments of `f`.

    Returns:
        A tensor of the shape of the named elements, or a tree of them.

    >>> import torch, elementgrad as eg
    >>> model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Softmax(0))
    >>> eg.value(model, torch.tensor([0.0, 0.0]), of="1[0]")
    tensor(0.5000)
    """
    f, args, kwargs = gather_arguments(value, f, args, kwargs, arguments, names_from)
    cone = parse_cone(cone)
    call = BoundCall(f, args, kwargs)
    of, _ = expand_patterns(call, pytree.map_tree(of, parse_target), ())
    places = pytree.leaves_of(of)
    targets = [call.find_target(place) for place in places]
    if not targets:
        raise PlaceError("of names nothing; name a tensor, or leave it out where there is only one")
    outputs, backend = _distinct(targets), call.backend
    numbers = [outputs.index(target) for target in targets]

    def select(place: Place, number: int, tensor: Tensor) -> Selection:
        name = call.output_name if outputs[number] is ONLY_OUTPUT else outputs[number].name
        return Place(None, name, place.index, pointwise=place.pointwise).select(tuple(backend.shape(tensor)))

    linear = None
    if cone or (cone is None and all(place.index for place in places) and is_large(call)):
        linear = record(call, [], outputs, bool(cone))
    if linear is not None:
        selections = [select(place, n, linear.outputs[n]) for place, n in zip(places, numbers, strict=True)]
        if cone or all(linear.pays(n, selection) for n, selection in zip(numbers, selections, strict=True)):
            with suppress(NoConeError):
                values = [linear.read_value(n, selection) for n, selection in zip(numbers, selections, strict=True)]
                return pytree.unflatten_like(of, values)
    with backend.isolated(call.function):
        tensors = [backend.stop(x) for x in call.run((), (), outputs, stops=True)]
    values = [
        backend.copy(backend.take(tensors[n], select(place, n, tensors[n])))
        for place, n in zip(places, numbers, strict=True)
    ]
    return pytree.unflatten_like(of, values)


class _Options(NamedTuple):
    """The options that all derivatives of functions have, checked."""

    zero: bool
    budget: int | None
    create_graph: bool
    batch: bool

    @classmethod
    def parse(cls, unconnected: Any, budget: Any, create_graph: Any, batch: Any) -> "_Options":
        for name, flag in (("batch", batch), ("create_graph", create_graph)):
            if flag is not False and flag is not True:
                raise option_error(name, flag, "is neither True nor False; give one of them")
        budget = None if budget is None else parse_budget(budget)
        return cls(parse_unconnected(unconnected), budget, create_graph, batch)


@dataclass(eq=False, slots=True)
class _NamedEvaluation(Evaluation):
    """A function evaluated at its arguments, with an operand for each name in `of` and `wrt`."""

    origin: Origin
    of: Tree = None
    wrt: Tree = None

    def gradients(self, of: Operand, require_single: bool) -> Tree:
        """Return the block of each input, all from the same sweeps."""
        if require_single:
            if math.prod(of.shape) != 1:
                raise SelectionError(
                    f"{of.name} of shape {of.shape} is not a single number; say which element, as in "
                    f'of="{of.name}[{", ".join("0" * len(of.shape))}]", or use eg.jacobian'
                )
            if of.shape:
                of = replace(of, base=of.select((0,) * len(of.shape), self.backend))
        blocks = read_together([Jacobian(self, of, wrt) for wrt in pytree.leaves_of(self.wrt)])
        return pytree.unflatten_like(self.wrt, blocks)

    def gradient(self, of: Operand) -> "_NamedEvaluation":
        """Return the gradient of one element, as a function of the same inputs, linearized."""
        if math.prod(of.shape) != 1:
            raise SelectionError(
                f"{of.name} of shape {of.shape} has a Hessian for each element; say which, as in "
                f'of="{of.name}[{", ".join("0" * len(of.shape))}]"'
            )
        backend, inputs = self.backend, pytree.leaves_of(self.wrt)
        for wrt in inputs:
            Jacobian(self, of, wrt).require_apart()
        position = np.array(of.select(..., backend).flat().reshape(-1))
        seed = backend.load("read").one_hot_seeds(of.tensor, position, self.options.batch or 1)[0]

        def relinearize(number: int, x: Tensor) -> Linearization:
            return self.origin.relinearize(number, x).gradient(of.index, seed)

        return replace(
            self,
            linear=self.linear.gradient(of.index, seed),
            options=replace(self.options, missing_rules=reverse_only(backend, [of, *inputs])),
            origin=replace(self.origin, relinearize=relinearize, element=of.place),
        )

    def as_output(self, of: Operand, wrt: Operand) -> Operand:
        """Return the gradient with respect to one input, as an output of this evaluation."""
        return replace(wrt, name=f"the gradient of {of.name}", tensor=self.linear.value(wrt.index))


def _evaluate(
    f: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    of: Tree,
    wrt: Tree,
    options: _Options,
    order: int = 1,
    cone: bool | None = False,
    copy_values: bool = True,
) -> _NamedEvaluation:
    """Find the tensors that are named, and run the function once.

    With `copy_values` the values of the outputs are copied, for `J.value`: the user may write to them later.
    """
    zero, budget, create_graph, batch = options
    of_places, wrt_places = list(map(parse_target, pytree.leaves_of(of))), list(map(parse_place, pytree.leaves_of(wrt)))
    call = BoundCall(f, args, kwargs, wrt_places)
    if any(is_pattern(place.name) for place in (*of_places, *wrt_places)):
        places = pytree.unflatten_like(of, of_places), pytree.unflatten_like(wrt, wrt_places)
        of, wrt = expand_patterns(call, *places)
        of_places, wrt_places = pytree.leaves_of(of), pytree.leaves_of(wrt)
    sources, targets = list(map(call.find_source, wrt_places)), list(map(call.find_target, of_places))
    inputs, outputs = _distinct(sources), _distinct(targets)
    if not inputs or not outputs:
        raise PlaceError("of or wrt names nothing; name a tensor, or leave it out where there is only one")
    tensors = [source.tensor for source in inputs]

    def make_operands(
        places: Sequence[Place], refs: Sequence[TensorRef], distinct: list[TensorRef], tensors: Sequence[Tensor]
    ) -> list[Operand]:
        operands = []
        for place, ref in zip(places, refs, strict=True):
            number = distinct.index(ref)
            if tensors[number] is not None:  # an activation is there after the run
                operands.append(call.operand(place, ref, number, tensors[number], batch))
        return operands

    def linearize(tensors: Sequence[Tensor]) -> Linearization:
        return call.backend.linearize(PartialCall(call, inputs, outputs), tensors, create_graph, order)

    def relinearize(number: int, x: Tensor) -> Linearization:
        if tensors[number] is None:
            raise OptionError(f"{inputs[number].name} is computed by the function, so it cannot be set")
        return linearize([x if i == number else other for i, other in enumerate(tensors)])

    ins = make_operands(wrt_places, sources, inputs, tensors)  # before the run, which may take long, for their errors
    linear: Any = None
    if cone is not False:
        linear = _record_cone(call, inputs, outputs, cone, create_graph or batch, of_places)
        if linear is not None and cone is None:
            recorded = make_operands(of_places, targets, outputs, linear.outputs)
            if not all(linear.pays(of.index, of.select(..., call.backend)) for of in recorded):
                linear = None
    if linear is None:
        linear = linearize(tensors)
    if not all(map(is_, linear.inputs, tensors)):
        ins = make_operands(wrt_places, sources, inputs, linear.inputs)
    values = list(map(linear.value, range(len(outputs)))) if copy_values else linear.outputs
    outs = make_operands(of_places, targets, outputs, values)
    examples = _count_examples(call, [*outs, *ins]) if batch else None
    read_options = ReadOptions(zero, budget, examples, reverse_only(call.backend, [*outs, *ins]))
    trees = pytree.unflatten_like(of, outs), pytree.unflatten_like(wrt, ins)
    origin = Origin(call, args, dict(kwargs), create_graph, relinearize)
    return _NamedEvaluation(call.backend, linear, read_options, origin, *trees)


def _record_cone(
    call: BoundCall,
    inputs: Sequence[TensorRef],
    outputs: list[TensorRef],
    cone: bool | None,
    unsupported: bool,
    places: Sequence[Place],
) -> ConeLinearization | None:
    """Record the function, if reads by cones are required or may pay; return None if it is to be evaluated."""
    if cone and unsupported:
        raise OptionError("cone=True goes with neither create_graph=True nor batch=True; leave one of them out")
    if cone is None and (unsupported or not all(place.index for place in places) or not is_large(call)):
        return None
    linear = record(call, inputs, outputs, bool(cone))
    if linear is None:
        return None
    ends = range(len(outputs)), range(len(inputs))
    connected = all(linear.is_connected(output, input) for output in ends[0] for input in ends[1])
    return linear if connected else None  # evaluating it says why there is no path


def _distinct(refs: list[TensorRef]) -> list[TensorRef]:
    return list(dict.fromkeys(refs)) if len(refs) > 1 else refs


def _count_examples(call: BoundCall, operands: Sequence[Operand]) -> int:
    counts = {operand.name: int(call.backend.shape(operand.tensor)[0]) for operand in operands}
    if len(set(counts.values())) != 1:
        raise OptionError(f"batch=True needs as many examples on every side, and there are {counts}")
    return next(iter(counts.values()))


def parse_unconnected(unconnected: str) -> bool:
    """Return True to get zeros instead where there is no path."""
    if not isinstance(unconnected, str) or unconnected not in ("error", "zero"):
        raise option_error("unconnected", unconnected, 'is neither "error" nor "zero"; give one of them')
    return unconnected == "zero"
