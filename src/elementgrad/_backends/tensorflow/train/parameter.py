"""Everything else holds still while elements train, and moves again when the last of them are released.

Some entries of the gradients of a product and of a table, without the others, by what every compiler knows.

Casts of tensors that keep the bits of a NaN.

One variable of a model, some of whose elements train: leaves hold their values, the variable is kept current.

Variables that keep each other current: whoever writes to a leaf or to the variable it is of writes to both.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import new_class
from typing import Any

import numpy as np
import tensorflow as tf

from elementgrad._backends.tensorflow._compat import get_stateless_scope, in_stateless_scope
from elementgrad._backends.tensorflow.distributed import copies, inside
from elementgrad._cleanup import assign, contained, scope
from elementgrad._train.freeze import FreezeClaim, Freezer
from elementgrad._train.numbers import LAYOUTS, common_width, nan_bits
from elementgrad._train.trainer import ElementGroup, PartialParameter, ResolvedPlace

Variable = Any
CLAIM = "_elementgrad_claim"


class KerasFreezer(Freezer):
    """Freezes variables one by one. `layer.trainable` would have BatchNormalization compute something else."""

    def get_claim(self, parameter: Variable) -> FreezeClaim | None:
        return parameter.__dict__.get(CLAIM)

    def set_claim(self, parameter: Variable, claim: FreezeClaim | None) -> None:
        if claim is None:
            del parameter.__dict__[CLAIM]
        else:
            parameter.__dict__[CLAIM] = claim

    def is_trainable(self, parameter: Variable) -> bool:
        return parameter._trainable

    def set_trainable(self, parameter: Variable, trainable: bool) -> None:
        parameter._trainable = trainable

    def request(self, variables: Iterable[Variable], trainable: bool) -> None:
        """Remember what the user sets `trainable` to while variables are frozen: it counts after the last release."""
        for variable in variables:
            claim = self.get_claim(variable)
            if claim is not None:
                claim.trainable = trainable


freezer = KerasFreezer()


Tensor = Any

# Costs per row of the factors, in nanoseconds, as measured on two cores in float32 (`make bench` shows the outcome).
GATHERED = 5.0  # one entry: two columns read, multiplied and summed
MULTIPLIED = 0.0105  # one entry of a matrix product
SELECTED = 2.0  # one column copied out of a factor


class KerasProduct:
    """Entries (row, column) of `left.T @ right`, where left has `rows` columns and right has `columns`.

    >>> import tensorflow as tf
    >>> from elementgrad._backends.tensorflow.train.parameter import KerasProduct
    >>> product = KerasProduct([0, 1], [1, 1], rows=2, columns=2)
    >>> product(tf.constant([[1.0, 2.0], [3.0, 4.0]]), tf.constant([[5.0, 6.0], [7.0, 8.0]])).numpy()
    array([30., 44.], dtype=float32)
    """

    def __init__(self, row: "np.ndarray", column: "np.ndarray", rows: int, columns: int):
        self._row, self._column = np.asarray(row, np.int64), np.asarray(column, np.int64)
        some_rows, row_of = np.unique(self._row, return_inverse=True)
        some_columns, column_of = np.unique(self._column, return_inverse=True)
        # All columns in their order are the factor itself, without a copy.
        self._rows = None if len(some_rows) == rows else some_rows
        self._columns = None if len(some_columns) == columns else some_columns
        self._cell = row_of.reshape(-1) * len(some_columns) + column_of.reshape(-1)
        self._every = bool(np.array_equal(self._cell, np.arange(rows * columns)))
        copied = sum(len(some) for some, all_of in ((some_rows, rows), (some_columns, columns)) if len(some) < all_of)
        gathered = GATHERED * len(self._row)
        multiplied = MULTIPLIED * len(some_rows) * len(some_columns) + SELECTED * copied
        self._gathers = gathered < multiplied
        self.cost = min(gathered, multiplied)
        """What a row of the factors costs, in nanoseconds."""

    def __call__(self, left: Tensor, right: Tensor) -> Tensor:
        """The entries, in the dtype of the right factor, for shapes (n, rows) and (n, columns); halves in float32."""
        if self._gathers:
            left, right = _alike(tf.gather(left, self._row, axis=1), tf.gather(right, self._column, axis=1))
            return tf.reduce_sum(left * right, 0)
        left = left if self._rows is None else tf.gather(left, self._rows, axis=1)
        right = right if self._columns is None else tf.gather(right, self._columns, axis=1)
        block = tf.reshape(tf.matmul(*_alike(left, right), transpose_a=True), [-1])
        return block if self._every else tf.gather(block, self._cell)


class KerasLookup:
    """Entries (row, column) of the gradient of a table of which rows were looked up.

    >>> import tensorflow as tf
    >>> from elementgrad._backends.tensorflow.train.parameter import KerasLookup
    >>> lookup = KerasLookup([0, 7], [1, 0], columns=2)
    >>> lookup(tf.constant([7, 3, 7]), tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])).numpy()
    array([0., 6.], dtype=float32)
    """

    def __init__(self, row: "np.ndarray", column: "np.ndarray", columns: int):
        self._rows, row_of = np.unique(np.asarray(row, np.int64), return_inverse=True)
        some, column_of = np.unique(np.asarray(column, np.int64), return_inverse=True)
        self._columns = None if len(some) == columns else some
        self._cell = row_of.reshape(-1) * len(some) + column_of.reshape(-1)
        self._every = bool(np.array_equal(self._cell, np.arange(len(self._rows) * len(some))))

    def __call__(self, tokens: Tensor, gradient: Tensor) -> Tensor:
        """The entries, for n tokens and the gradients of the n rows that they looked up."""
        count = len(self._rows)
        tokens = tf.cast(tokens, tf.int64)
        near = tf.minimum(tf.searchsorted(self._rows, tokens), count - 1)
        hit = tf.gather(self._rows, near) == tokens
        # The others are left out and not multiplied by zero, which would let NaN and inf through.
        if self._columns is None:
            gradient, near = _wide(gradient), tf.where(hit, near, -1)  # which is left out of sums
        else:
            some = tf.reshape(tf.where(hit), [-1])
            gradient, near = tf.gather(gradient, some), tf.gather(near, some)
            gradient = _wide(tf.gather(gradient, self._columns, axis=1))
        sums = tf.reshape(tf.math.unsorted_segment_sum(gradient, near, count), [-1])
        return sums if self._every else tf.gather(sums, self._cell)


def _alike(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    right = _wide(right)
    return tf.cast(left, right.dtype), right


def _wide(x: Tensor) -> Tensor:
    return tf.cast(x, tf.float32) if x.dtype in (tf.float16, tf.bfloat16) else x


INTEGERS = {8 * dtype.size: dtype for dtype in (tf.int16, tf.int32, tf.int64)}
REAL = {tf.complex64: tf.float32, tf.complex128: tf.float64}


def cast(values: Tensor, dtype: Any) -> Tensor:
    """Return values in another dtype; themselves if they are of it."""
    values, dtype = tf.convert_to_tensor(values), tf.as_dtype(dtype)
    if values.dtype == dtype:
        return values
    if values.dtype.is_complex and dtype.is_complex:
        return tf.bitcast(cast(tf.bitcast(values, REAL[values.dtype]), REAL[dtype]), dtype)
    plain = tf.cast(values, dtype)
    before, after = values.dtype.name, dtype.name
    if not {before, after} <= LAYOUTS.keys():
        return plain
    bits = tf.cast(as_integers(values), INTEGERS[common_width(before, after)])
    found = tf.cast(nan_bits(bits, before, after, tf.where), INTEGERS[LAYOUTS[after].bits])
    exact = tf.where(tf.math.is_nan(plain), found, as_integers(plain))
    if tf.float64 in (values.dtype, dtype) and tf.float16 not in (values.dtype, dtype):
        exact = _subnormal(values, bits, exact, dtype)
    return tf.bitcast(exact, dtype)


def _subnormal(values: Tensor, bits: Tensor, plain: Tensor, dtype: Any) -> Tensor:
    """Return the bits of a cast from or to float64 with those numbers in it that TensorFlow takes for zero.

    In float32 and bfloat16, the bits of a number below the normal ones count how many of the smallest number it is.
    """
    narrow = values.dtype if dtype == tf.float64 else dtype
    mantissa = LAYOUTS[narrow.name].mantissa
    smallest, normal = 2.0 ** -(126 + mantissa), 2.0**-126
    if dtype == tf.float64:
        count = bits & ((1 << (LAYOUTS[narrow.name].bits - 1)) - 1)
        size = tf.cast(count, tf.float64) * smallest
        return tf.where(count < 1 << mantissa, as_integers(tf.where(bits < 0, -size, size)), plain)
    size = tf.abs(values)
    count = tf.cast(tf.round(size / smallest), plain.dtype)
    return tf.where(size < normal, tf.where(bits < 0, count + plain.dtype.min, count), plain)


def as_integers(values: Tensor) -> Tensor:
    """Return the bits of real floats as integers, of which two are equal only if the floats are the same number."""
    return tf.bitcast(values, INTEGERS[8 * values.dtype.size])


def same(one: Tensor, other: Tensor) -> Tensor:
    """Return where values of one dtype are the same to the bit: -0.0 is not 0.0, and a NaN is itself."""
    if one.dtype.is_complex:
        pairs = (tf.bitcast(each, REAL[each.dtype]) for each in (one, other))
        return tf.reduce_all(same(*pairs), -1)
    if 8 * one.dtype.size not in INTEGERS:
        return one == other
    return as_integers(one) == as_integers(other)


# tf.Tensor, tf.Variable or a Keras variable
HALVES = (tf.float16, tf.bfloat16)


class _ParameterState(threading.local):
    bare: "tuple[KerasPartialParameter, ...]" = ()


_local = _ParameterState()


class KerasElementGroup(ElementGroup):
    """Elements of one place: a leaf that an optimizer may have, where they are, and what they were."""

    def __init__(self, target: ResolvedPlace, leaf: Tensor, originals: np.ndarray, initial: np.ndarray):
        super().__init__(target, leaf, originals, initial)
        tensor, positions = target.tensor, target.positions
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

    def write_to_parameter(self, written: Tensor | None = None) -> None:
        """Write the values into the variable, on each replica or from the copy of the leaf that was written to.

        By raw operations: methods of both would answer each other.
        """
        for leaf, tensor in self.copies:
            if written is not None and leaf is not written:
                continue
            values = cast(_read_entries(leaf), tensor.dtype)
            if self._rows is None:
                put(tensor, self.index, values)
            else:
                rows = tf.reshape(values, (len(self._rows), *tensor.shape[1:]))
                tf.raw_ops.ResourceScatterUpdate(resource=tensor.handle, indices=self._rows, updates=rows)

    def rebase(self) -> None:
        """Take the values there are for those that there were: another model has been loaded."""
        self.originals = take(self.tensor, self.positions)
        self.change.bits = bits(self.originals)[1]


class KerasPartialParameter(PartialParameter):
    """A variable and the parts of it that train."""

    def __init__(self, variable: Any):
        self.variable = variable
        """Keras's own, around the tensor."""
        self.tensor = variable._value
        self.groups: list[KerasElementGroup] = []
        self.layers: dict[int, Any] = {}
        """The layers that know about it."""
        self.roots: dict[int, Any] = {}
        """The models that elements were named in, which are fitted."""

    def arrange(self) -> None:
        """Make ready for the parts there are."""
        self.sizes = [len(group.positions) for group in self.groups]
        self.positions = np.concatenate([np.zeros(0, np.int64), *[group.positions for group in self.groups]])
        self._lookup: KerasLookup | None = None
        regularizer = self.variable.regularizer
        for number, group in enumerate(self.groups):
            # Once, for the variable as a whole. Setting it the open way takes Keras's own only.
            group.leaf._regularizer = None if number or regularizer is None else lambda _: regularizer(self.variable)

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
        for group in self.groups:
            leaf = scope.get_current_value(group.leaf)
            if leaf is not None:
                leaf = tf.cast(leaf, value.dtype)
                value = tf.tensor_scatter_nd_update(value, group.index, leaf) if value.shape.rank else leaf[0]
        return value

    def tapped(self, value: Tensor, entries: Callable[[Any], Tensor]) -> Tensor:
        """A value as it is; `entries` makes the gradients of all elements of that of the value."""

        def forward(value: Tensor, *leaves: Tensor) -> Any:
            def back(gradient: Any) -> Any:
                return gradient, *self._split(entries(gradient), [leaf.dtype for leaf in leaves])

            return tf.identity(value), back

        leaves = [tf.convert_to_tensor(group.leaf._value) for group in self.groups]
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

    def read_from_parameter(self, written: Tensor) -> None:
        """Read the leaves' values from a copy of the variable, where it holds others than theirs."""
        for group in self.groups:
            leaf = next(leaf for leaf, tensor in group.copies if tensor is written)
            found = _taken(written, group.index)
            now = _read_entries(leaf)
            new = tf.where(same(cast(now, found.dtype), found), now, cast(found, now.dtype))
            tf.raw_ops.AssignVariableOp(resource=leaf.handle, value=new)

    def differs(self, written: Tensor, before: Tensor) -> bool:
        """Whether a copy of the variable, which was something before, is now something else where nothing trains."""
        now = _read_entries(written)
        other = ((now != before) & ((now == now) | (before == before))).numpy().reshape(-1).copy()  # a NaN stays one
        other[self.positions] = False
        return bool(other.any())

    def _gathered(self, gradient: Any) -> Tensor:
        if isinstance(gradient, tf.IndexedSlices):  # of rows that were looked up
            width = self.tensor.shape[1:].num_elements()
            if self._lookup is None:
                self._lookup = KerasLookup(*np.divmod(self.positions, width), width)
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
        return _read_entries(tensor).numpy().reshape(-1)
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


def _read_entries(tensor: Tensor) -> Tensor:
    return tf.raw_ops.ReadVariableOp(resource=tensor.handle, dtype=tensor.dtype)


def _taken(tensor: Tensor, index: np.ndarray) -> Tensor:
    if not index.shape[1]:
        return tf.reshape(_read_entries(tensor), [1])[: len(index)]
    return tf.raw_ops.ResourceGatherNd(resource=tensor.handle, indices=index, dtype=tensor.dtype)


NOTE = "_elementgrad"
"""Where a variable keeps what it belongs to."""
WRITES = (
    *("assign", "assign_add", "assign_sub", "_strided_slice_assign", "_restore_from_tensors", "batch_scatter_update"),
    *[f"scatter_{how}" for how in ("add", "div", "max", "min", "mul", "sub", "update")],
    *[f"scatter_nd_{how}" for how in ("add", "max", "min", "sub", "update")],
)
"""The methods of a variable that change it."""
AS_IT_IS = (
    *("_serialize_to_tensors", "_restore_from_tensors", "_copy_trackable_to_cpu", "_export_to_saved_model_graph"),
    "_write_object_proto",
)
"""The methods of Keras's variable that want the one inside, and not its value."""


def weight_of(tensor: Variable) -> KerasPartialParameter | None:
    """The weight whose variable this is, TensorFlow's or Keras's."""
    note = inside(tensor).__dict__.get(NOTE)
    return note if isinstance(note, KerasPartialParameter) else None


def tie(weight: KerasPartialParameter) -> None:
    """Let the variable and its leaves know each other, on each replica: strategies write to the copies one by one."""
    weight.tensor.__dict__[NOTE] = weight
    for copy in copies(weight.tensor):
        _change(copy, _written(_plain(copy), _after_weight), weight)
    _change(weight.variable, _read_variable(_plain(weight.variable)), weight)
    for group in weight.groups:
        group.parameter = weight
        for copy in copies(group.leaf._value):
            _change(copy, _written(_plain(copy), _after_leaf), group)


def untie(*variables: Variable) -> None:
    """Plain variables again."""
    for variable in variables:
        for each in (variable, *copies(variable)):
            plain = _plain(each)
            each.__dict__.pop(NOTE, None)
            object.__setattr__(each, "__class__", plain)


def _plain(variable: Variable) -> type:
    kind = type(variable)
    return vars(kind).get("_elementgrad_plain", kind)


def _change(variable: Variable, kind: type, note: KerasElementGroup | KerasPartialParameter) -> None:
    variable.__dict__[NOTE] = note
    variable.__class__ = kind


def _after_leaf(leaf: Variable, before: Any) -> None:
    group: KerasElementGroup = leaf.__dict__[NOTE]
    if group.parameter is not None:
        group.write_to_parameter(leaf)


def _after_weight(tensor: Variable, before: Any) -> None:
    weight: KerasPartialParameter = tensor.__dict__[NOTE]
    weight.read_from_parameter(tensor)
    if before is not None and weight.differs(tensor, before):
        # Another model altogether: what its elements were is what was written.
        for group in weight.groups:
            group.rebase()


@cache
def _written(kind: type, after: Callable[[Variable, Any], None]) -> type:
    def writing(name: str) -> Callable[..., Any]:
        method = getattr(kind, name)

        def write(self: Variable, *args: Any, **kwargs: Any) -> Any:
            eager = tf.executing_eagerly() and after is _after_weight
            before = tf.identity(tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.dtype)) if eager else None
            result = method(self, *args, **kwargs)
            after(self, before)
            return result

        write.__name__ = name
        write.autograph_info__ = None  # type: ignore[attr-defined]  # by this sign AutoGraph leaves a function alone
        return write

    members = {name: writing(name) for name in WRITES if hasattr(kind, name)}
    return _made(kind, (kind,), members)


class TrainedVariable:
    """What Keras's variable does besides, while elements of it train."""

    @property
    def value(self: Any) -> Any:
        """The value, whose gradient the elements hear."""
        weight: KerasPartialParameter = self.__dict__[NOTE]
        if in_stateless_scope():
            return weight.lent(super().value, get_stateless_scope())  # type: ignore[misc]
        return super().value if weight.bare else self._maybe_autocast(weight.alias())  # type: ignore[misc]

    @property
    def handle(self: Any) -> Any:
        """That of the variable inside."""
        return self._value.handle

    @property
    def _shared_name(self: Any) -> Any:
        return self._value._shared_name

    @property
    def trainable(self: Any) -> bool:
        """Never as a whole; what somebody asks for counts when the elements are released."""
        return False

    @trainable.setter
    def trainable(self: Any, value: bool) -> None:
        self._trainable = bool(value)
        freezer.request([self], bool(value))


@cache
def _read_variable(kind: type) -> type:
    def bared(name: str) -> Callable[..., Any]:
        method = getattr(kind, name)

        @close_scopes_after
        def call(self: Variable, *args: Any, **kwargs: Any) -> Any:
            with self.__dict__[NOTE].bared():
                return method(self, *args, **kwargs)

        return call

    return _made(kind, (TrainedVariable, kind), {name: bared(name) for name in AS_IT_IS if hasattr(kind, name)})


def _made(plain: type, bases: tuple[type, ...], members: dict[str, Any]) -> type:
    """A class that looks like another."""
    looks = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
    body = members | looks | {"_elementgrad_plain": plain}
    return new_class(plain.__name__, bases, exec_body=lambda names: names.update(body))
