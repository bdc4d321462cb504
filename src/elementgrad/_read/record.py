"""`eg.record`: derivatives of a block of eager code, read during the block or after it."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from elementgrad._backends import registry
from elementgrad._backends.base import Backend
from elementgrad._backends.registry import not_compiled
from elementgrad._cleanup import InterruptSafeExit, OwnedUndos, with_rollback
from elementgrad._names import pytree
from elementgrad._names.call import Operand
from elementgrad._place.place import Place
from elementgrad._read.api import parse_unconnected
from elementgrad._read.backend import ElementRequest, Recorder
from elementgrad._read.contributions import Share, Shares
from elementgrad._read.jacobian import (
    Evaluation,
    Jacobian,
    ReadOptions,
    read_together,
    reverse_only,
    unconnected_error,
)
from elementgrad._read.plan import parse_budget
from elementgrad.errors import DtypeError, FrameworkError, OptionError, PlaceError, SelectionError

Tensor = Any
Tree = Any
"""A tensor or place, or a tuple, list or dict of them."""


def record(*tensors: Tensor) -> "Recording":
    """Record what a block of eager code computes from tensors, to read derivatives then and afterwards.

    Plain tensors will do: they need not require gradients, and nothing about them changes.

    Args:
        *tensors: The tensors to differentiate with respect to, all of one framework.

    Returns:
        A `Recording`, to be used as a context manager once.

    Raises:
        PlaceError: No tensors, or a place instead of a tensor.
        FrameworkError: Tensors of several frameworks, or of JAX, whose eager code leaves no trace.
        DtypeError: A tensor that is not floating point.

    >>> import torch, elementgrad as eg
    >>> X, Y = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0], [7.0, 8.0]])
    >>> with eg.record(X) as rec:
    ...     Z = X @ Y
    >>> rec.grad(eg.at(Z)[0, 0], X)
    tensor([[5., 7.],
            [0., 0.]])
    """
    return Recording(tensors)


class Recording:
    """A block of eager code with its derivatives. Make one with `eg.record`.

    Read derivatives during the block or after it, as often as you like: nothing accumulates, and no `.grad` is touched.

    >>> import torch, elementgrad as eg
    >>> t = torch.tensor([3.0, 0.0, 0.0, 0.0, 0.0])
    >>> with eg.record(t) as rec:
    ...     t[1] = 2 * t[0]
    ...     t[3] = t[1] ** 2 + t[0]
    ...     t[4] = t[3] * t[1]
    >>> rec.grad(eg.at(t)[4], eg.at(t)[1])
    tensor(111.)
    """

    __module__ = "elementgrad"

    def __init__(self, tensors: Sequence[Tensor]):
        self._backend = _one_backend(tensors)
        for x in tensors:
            _require_gradient(self._backend, x)
        self._recorder: Recorder = self._backend.load("read").recorder(tensors)
        self._undos = OwnedUndos()
        self._begun = False

    @with_rollback
    def __enter__(self) -> "Recording":
        if self._begun:
            raise OptionError("a recording is of one block; call eg.record again for another")
        self._begun = True
        self._undos.adopt(self)
        self._recorder.start()
        return self

    __exit__ = InterruptSafeExit()

    def __del__(self) -> None:
        if "_undos" in self.__dict__:  # it was made without an error
            self._undos.undo_in_thread()

    @not_compiled
    def grad(self, of: Tree, wrt: Tree, unconnected: str = "error") -> Tree:
        """Compute the derivative of the elements that `of` names with respect to those that `wrt` names.

        Args:
            of: A single number, or a place such as `eg.at(z)[0, 0]`, of a tensor that was recorded or made in the
                block; or a tuple, list or dict of them.
            wrt: A tensor or place of a tensor, recorded or made in the block; or a tuple, list or dict of them.
            unconnected: `"error"` or `"zero"` where no path leads from one to the other.

        Returns:
            The gradient, in the shape of `of`'s elements and then `wrt`'s; in the structure of `of` and `wrt`.

        Raises:
            SelectionError: `of` is a whole tensor of several elements.
            PlaceError: A tensor is not part of the recording.
            UnconnectedError: No path leads from `wrt` to `of`.

        >>> import torch, elementgrad as eg
        >>> x = torch.tensor([1.0, 2.0, 3.0])
        >>> with eg.record(x) as rec:
        ...     y = x**2
        ...     z = y.sum()
        >>> rec.grad(z, eg.at(x)[2]), rec.grad(eg.at(y)[:2], eg.at(x)[0])
        (tensor(6.), tensor([2., 0.]))
        >>> rec.grad(z, {"x": x, "y": y})
        {'x': tensor([2., 4., 6.]), 'y': tensor([1., 1., 1.])}
        """
        reading = _RecordedRead(self, of, wrt, unconnected, None)
        leaves = iter(pytree.leaves_of(of))
        return pytree.map_tree(reading.of, lambda operand: reading.gradients(operand, next(leaves)))

    @not_compiled
    def jacobian(self, of: Tree, wrt: Tree, unconnected: str = "error", budget: int | str | None = None) -> Tree:
        """Return the derivative of one tensor with respect to another as a lazy `Jacobian`.

        Args:
            of: A tensor or place, recorded or made in the block; or a tuple, list or dict of them.
            wrt: The same for the input.
            unconnected: `"error"` or `"zero"` where no path leads from one to the other.
            budget: Bytes that a read may take at once, as `2**30` or `"1 GiB"`; by default what is free.

        Returns:
            A `Jacobian`, which computes what you index; in the structure of `of` and `wrt`.

        Raises:
            PlaceError: A tensor is not part of the recording, or `of` names an earlier write.

        >>> import torch, elementgrad as eg
        >>> x = torch.tensor([1.0, 2.0, 3.0])
        >>> with eg.record(x) as rec:
        ...     y = x**2 * x[0]
        >>> J = rec.jacobian(y, x)
        >>> J[2, :], J.diagonal()
        (tensor([9., 0., 6.]), tensor([3., 4., 6.]))
        """
        for place in pytree.leaves_of(of):
            if isinstance(place, Place) and place.write is not None:
                raise PlaceError(
                    f"{place!r} as the output of a Jacobian, whose value is no longer there; leave write out, or use "
                    "rec.grad"
                )
        reading = _RecordedRead(self, of, wrt, unconnected, budget)
        return pytree.map_tree(
            reading.of, lambda side: pytree.map_tree(reading.wrt, lambda source: reading.jacobian(side, source))
        )

    @not_compiled
    def contributions(self, of: Tensor | Place, wrt: Tensor | Place, unconnected: str = "error") -> Shares:
        """Split a derivative into one share per use of the source; a use is one argument slot of one operation.

        PyTorch only.

        Args:
            of: A tensor or place, recorded or made in the block.
            wrt: The tensor or place whose uses are listed.
            unconnected: `"error"` or `"zero"` where no path leads from one to the other.

        Returns:
            The `Shares`, in order of computation; they add up to the gradient.

        Raises:
            FrameworkError: The recording is of TensorFlow.
            PlaceError: `of` or `wrt` is a structure of several tensors.

        >>> import torch, elementgrad as eg
        >>> x = torch.tensor([1.0, 2.0, 3.0])
        >>> with eg.record(x) as rec:
        ...     y = 2 * x[2] + x.sum()
        >>> rec.contributions(y, eg.at(x)[2])
        select  ...  2
        sum     ...  1
        total  ...3
        """
        reading = _RecordedRead(self, of, wrt, unconnected, None)
        if not isinstance(reading.of, Operand) or not isinstance(reading.wrt, Operand):
            raise PlaceError("contributions are from one tensor to another; call it for each pair")
        return reading.shares(*reading.requests)


class _RecordedRead:
    """One read of a recording: its linearization, and `of` and `wrt` as operands in their own structure."""

    def __init__(self, recording: Recording, of: Tree, wrt: Tree, unconnected: str, budget: int | str | None):
        self.zero = parse_unconnected(unconnected)
        if not recording._begun:
            raise OptionError("nothing is recorded yet; read inside the block, with eg.record(x) as rec: ...")
        limit = parse_budget(budget)
        self.backend = backend = recording._backend
        self.recorder = recording._recorder
        outputs, inputs = [[_element_request(leaf, backend) for leaf in pytree.leaves_of(side)] for side in (of, wrt)]
        if not outputs or not inputs:
            raise PlaceError("of or wrt names nothing; name a tensor of the recording")
        self.requests = outputs[0], inputs[0]
        self.linear = self.recorder.linear(outputs, inputs)
        self.of = _operands(of, outputs, "of", self.linear.value, backend)
        self.wrt = _operands(wrt, inputs, "wrt", self.linear.inputs.__getitem__, backend)
        sides = [*pytree.leaves_of(self.of), *pytree.leaves_of(self.wrt)]
        options = ReadOptions(self.zero, limit, missing_rules=reverse_only(backend, sides))
        self.evaluation = Evaluation(backend, self.linear, options)

    def jacobian(self, of: Operand, wrt: Operand) -> Jacobian:
        return Jacobian(self.evaluation, of, wrt)

    def gradients(self, of: Operand, leaf: Tensor | Place) -> Tree:
        """Compute the gradients for all inputs by the same sweeps. `leaf` is what the caller gave for `of`."""
        if of.base is None and not (isinstance(leaf, Place) and leaf.index):
            if math.prod(of.shape) != 1:
                index = ", ".join("0" * len(of.shape))
                raise SelectionError(
                    f"of is a tensor of shape {of.shape} and not a single number; say which elements, as in "
                    f"eg.at(z)[{index}] or eg.at(z)[...], or use rec.jacobian"
                )
            of = replace(of, base=of.select((0,) * len(of.shape), self.backend))
        blocks = iter(read_together([self.jacobian(of, wrt) for wrt in pytree.leaves_of(self.wrt)]))
        return pytree.map_tree(self.wrt, lambda _: next(blocks))

    def shares(self, of: ElementRequest, wrt: ElementRequest) -> Shares:
        """Run one sweep for each output element, and join the shares of the same use."""
        backend = self.backend
        rows = [self.recorder.uses(of, int(position), wrt) for position in of.positions.reshape(-1)]
        shape = (*self.of.shape, *self.wrt.shape)
        zeros = backend.zeros(shape, self.wrt.tensor)
        if all(row is None for row in rows):
            if not self.zero:
                raise unconnected_error(self.of, self.wrt, backend)
            return Shares((), zeros)
        if len(rows) == 1:
            shares = [(flow.use.operation, flow.use.where, flow.value) for flow in rows[0] or ()]
        else:
            shares = self._join_rows(rows)
        return Shares(
            [Share(name, line, backend.copy(backend.reshape(value, shape))) for name, line, value in shares], zeros
        )

    def _join_rows(self, rows: Sequence[Any]) -> list[tuple[str, str | None, Tensor]]:
        slots: dict[Any, dict[int, Any]] = {}
        for index, row in enumerate(rows):
            for flow in row or ():
                slots.setdefault((flow.order, flow.use.operation, flow.use.where), {})[index] = flow.value
        zeros = self.backend.zeros(self.wrt.shape, self.wrt.tensor)
        return [
            (
                name,
                line,
                self.backend.concat([by_row[i][None] if i in by_row else zeros[None] for i in range(len(rows))]),
            )
            for (_, name, line), by_row in sorted(slots.items(), key=lambda slot: slot[0][0])
        ]


def _one_backend(tensors: Sequence[Tensor]) -> Backend:
    if not tensors:
        raise PlaceError("eg.record() needs at least one tensor, as in eg.record(x)")
    for x in tensors:
        if isinstance(x, Place):
            raise PlaceError(f"eg.record takes whole tensors and {x!r} is a place; record x, and name places later")
    backends = {backend.name: backend for backend in map(registry.require_backend, tensors)}
    if len(backends) > 1:
        raise FrameworkError(f"tensors of {' and '.join(sorted(backends))} in one recording; use one framework for all")
    return next(iter(backends.values()))


def _require_gradient(backend: Backend, x: Tensor) -> None:
    if backend.kind(x) not in "fc":
        raise DtypeError(f"a tensor of dtype {x.dtype} has no gradients; make it floating point first")


def _element_request(leaf: Any, backend: Backend) -> ElementRequest:
    place = leaf if isinstance(leaf, Place) else None
    if isinstance(leaf, str) or (place is not None and place.tensor is None):
        raise PlaceError(
            f"{str(leaf)!r} names no tensor in a recording, which has no names; give the tensor, as in eg.at(x)[0]"
        )
    x = place.tensor if place is not None else leaf
    if registry.require_backend(x) is not backend:
        raise FrameworkError(
            f"the recording is of {backend.name} and the tensor is {registry.require_backend(x).name}'s; use one "
            "framework"
        )
    _require_gradient(backend, x)
    shape = tuple(backend.shape(x))
    if place is not None and place.index:
        return ElementRequest(x, np.asarray(place.select().flat()), place.write)
    return ElementRequest(x, np.arange(math.prod(shape)).reshape(shape), place.write if place is not None else None)


def _operands(tree: Tree, requests: Sequence[ElementRequest], name: str, value_of: Any, backend: Backend) -> Tree:
    """Return operands in the structure of a tree."""
    indices = iter(range(len(requests)))

    def operand(leaf: Any) -> Operand:
        index = next(indices)
        shape = tuple(backend.shape(requests[index].tensor))
        base = leaf.select() if isinstance(leaf, Place) and leaf.index else None
        return Operand(name, index, value_of(index), shape, base)

    return pytree.map_tree(tree, operand)
