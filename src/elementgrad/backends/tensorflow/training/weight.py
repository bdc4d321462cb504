"""One variable of a model, some of whose elements train: leaves hold their values, the variable is kept current."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from elementgrad.backends import training
from elementgrad.backends.tensorflow.training.casting import cast, same
from elementgrad.backends.tensorflow.training.entries import Lookup
from elementgrad.backends.tensorflow.training.replicas import copies, inside
from elementgrad.cleanup import assign, scope

Tensor = Any  # tf.Tensor, tf.Variable or a Keras variable
HALVES = (tf.float16, tf.bfloat16)


class _Local(threading.local):
    bare: "tuple[Weight, ...]" = ()


_local = _Local()


class Part(training.Part):
    """Elements of one place: a leaf that an optimizer may have, where they are, and what they were."""

    def __init__(self, tensor: Tensor, positions: np.ndarray, originals: np.ndarray, leaf: Tensor):
        self.tensor = tensor
        self.positions = positions
        self.originals = originals
        self.found = originals
        self.leaf = leaf
        self.mark = None
        self.weight: Weight | None = None
        self.copies = tuple(zip(copies(leaf._value), copies(tensor), strict=True))
        """The leaf and the variable on each replica."""
        shape = tuple(tensor.shape)
        self.index = coordinates(positions, shape)
        """Where they are, one row of coordinates each."""
        # Whole rows, each in its order, are written as such, which is faster.
        width = int(np.prod(shape[1:]))
        rows = positions[:: max(1, width)] // max(1, width)
        whole = shape and np.array_equal((rows[:, None] * width + np.arange(width)).reshape(-1), positions)
        self._rows = rows if whole else None

    def push(self, written: Tensor | None = None) -> None:
        """Write the values into the variable, on each replica or from the copy of the leaf that was written to.

        By raw operations: methods of both would answer each other.
        """
        for leaf, tensor in self.copies:
            if written is not None and leaf is not written:
                continue
            values = cast(_read(leaf), tensor.dtype)
            if self._rows is None:
                put(tensor, self.index, values)
            else:
                rows = tf.reshape(values, (len(self._rows), *tensor.shape[1:]))
                tf.raw_ops.ResourceScatterUpdate(resource=tensor.handle, indices=self._rows, updates=rows)

    def rebase(self) -> None:
        """Take the values there are for those that there were: another model has been loaded."""
        self.originals = take(self.tensor, self.positions)
        if self.mark is not None:
            self.mark.bits = bits(self.originals)[1]


class Weight:
    """A variable and the parts of it that train."""

    def __init__(self, variable: Any):
        self.variable = variable
        """Keras's own, around the tensor."""
        self.tensor = variable._value
        self.parts: list[Part] = []
        self.layers: dict[int, Any] = {}
        """The layers that know about it."""
        self.roots: dict[int, Any] = {}
        """The models that elements were named in, which are fitted."""

    def arrange(self) -> None:
        """Make ready for the parts there are."""
        self.sizes = [len(part.positions) for part in self.parts]
        self.positions = np.concatenate([np.zeros(0, np.int64), *[part.positions for part in self.parts]])
        self._lookup: Lookup | None = None
        regularizer = self.variable.regularizer
        for number, part in enumerate(self.parts):
            # Once, for the variable as a whole. Setting it the open way takes Keras's own only.
            part.leaf._regularizer = None if number or regularizer is None else lambda _: regularizer(self.variable)

    @property
    def bare(self) -> bool:
        """Whether somebody here wants the variable as it is, and sees to the gradients of the elements."""
        return any(weight is self for weight in _local.bare)

    @contextmanager
    def bared(self) -> Iterator[None]:
        """Let reads of the variable give it as it is, in this thread."""
        with scope():
            assign(_local, "bare", (*_local.bare, self))
            yield

    def alias(self) -> Tensor:
        """The value for any use of it: the elements are gathered from its gradient, which lives no longer."""
        return self.tapped(tf.convert_to_tensor(self.tensor), self._gathered)

    def lent(self, value: Tensor, scope: Any) -> Tensor:
        """A value that stands for the variable, with those that stand for its leaves, as in `model.stateless_call`."""
        for part in self.parts:
            leaf = scope.get_current_value(part.leaf)
            if leaf is not None:
                leaf = tf.cast(leaf, value.dtype)
                value = tf.tensor_scatter_nd_update(value, part.index, leaf) if value.shape.rank else leaf[0]
        return value

    def tapped(self, value: Tensor, entries: Callable[[Any], Tensor]) -> Tensor:
        """A value as it is; `entries` makes the gradients of all elements of that of the value."""

        def forward(value: Tensor, *leaves: Tensor) -> Any:
            def back(gradient: Any) -> Any:
                return gradient, *self._split(entries(gradient), [leaf.dtype for leaf in leaves])

            return tf.identity(value), back

        leaves = [tf.convert_to_tensor(part.leaf._value) for part in self.parts]
        return tf.custom_gradient(forward)(value, *leaves)

    def paired(self, value: Tensor, other: Tensor, entries: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """A value that is linear in the elements and in another tensor; `entries(other, gradient)` as in `tapped`.

        The gradient of the other one depends on the elements in turn, which derivatives of gradients have to know: it
        is given zeros that do.
        """
        heard = self.tapped(value, lambda gradient: entries(other, tf.convert_to_tensor(gradient)))
        if not other.dtype.is_floating:
            return heard

        def forward(value: Tensor, other: Tensor) -> Any:
            def back(gradient: Any) -> Any:
                gradient = tf.convert_to_tensor(gradient)
                return gradient, self.paired(tf.zeros_like(other), gradient, lambda one, two: entries(two, one))

            return tf.identity(value), back

        return tf.custom_gradient(forward)(heard, other)

    def pull(self, written: Tensor) -> None:
        """Read the leaves' values from a copy of the variable, where it holds others than theirs."""
        for part in self.parts:
            leaf = next(leaf for leaf, tensor in part.copies if tensor is written)
            found = _taken(written, part.index)
            now = _read(leaf)
            new = tf.where(same(cast(now, found.dtype), found), now, cast(found, now.dtype))
            tf.raw_ops.AssignVariableOp(resource=leaf.handle, value=new)

    def differs(self, written: Tensor, before: Tensor) -> bool:
        """Whether a copy of the variable, which was something before, is now something else where nothing trains."""
        now = _read(written)
        other = ((now != before) & ((now == now) | (before == before))).numpy().reshape(-1).copy()  # a NaN stays one
        other[self.positions] = False
        return bool(other.any())

    def _gathered(self, gradient: Any) -> Tensor:
        if isinstance(gradient, tf.IndexedSlices):  # of rows that were looked up
            width = self.tensor.shape[1:].num_elements()
            if self._lookup is None:
                self._lookup = Lookup(*np.divmod(self.positions, width), width)
            return self._lookup(tf.reshape(gradient.indices, [-1]), tf.reshape(gradient.values, [-1, width]))
        return tf.gather(tf.reshape(gradient, [-1]), self.positions)

    def _split(self, found: Tensor, dtypes: Sequence[Any]) -> list[Tensor]:
        each = [found] if len(self.sizes) == 1 else tf.split(found, self.sizes)
        return [tf.cast(gradient, dtype) for gradient, dtype in zip(each, dtypes, strict=True)]


def coordinates(positions: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Where flat positions are: one row of coordinates each."""
    return np.stack(np.unravel_index(positions, shape), -1).reshape(len(positions), len(shape)).astype(np.int64)


def take(tensor: Tensor, positions: np.ndarray | None = None) -> np.ndarray:
    """Elements of a tensor, or of what holds one, by their positions in C order; a large variable is not read whole."""
    tensor = inside(tensor)
    if not isinstance(tensor, tf.Variable):
        flat = np.asarray(tensor).reshape(-1)
        return flat if positions is None else flat[positions]
    tensor = copies(tensor)[0]
    if positions is None:
        return _read(tensor).numpy().reshape(-1)
    return _taken(tensor, coordinates(positions, tuple(tensor.shape))).numpy()


def put(tensor: Tensor, index: np.ndarray, values: Tensor) -> None:
    """Write elements of a plain variable by their coordinates."""
    if not index.shape[1]:
        tf.raw_ops.AssignVariableOp(resource=tensor.handle, value=tf.reshape(values, []))
    else:
        tf.raw_ops.ResourceScatterNdUpdate(ref=tensor.handle, indices=index, updates=values)


def bits(array: np.ndarray) -> tuple[str, np.ndarray]:
    """The dtype of an array, and the bytes of its elements."""
    array = np.asarray(array)
    return array.dtype.name, np.frombuffer(array.tobytes(), np.uint8).reshape(array.size, array.dtype.itemsize)


def _read(tensor: Tensor) -> Tensor:
    return tf.raw_ops.ReadVariableOp(resource=tensor.handle, dtype=tensor.dtype)


def _taken(tensor: Tensor, index: np.ndarray) -> Tensor:
    if not index.shape[1]:
        return tf.reshape(_read(tensor), [1])[: len(index)]
    return tf.raw_ops.ResourceGatherNd(resource=tensor.handle, indices=index, dtype=tensor.dtype)
