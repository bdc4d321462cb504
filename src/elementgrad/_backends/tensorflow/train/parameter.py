"""A Keras variable of which some elements train, and its leaves, which keep each other current.

While elements train, the classes of the variables are swapped. A write to a leaf, by an optimizer or by hand, is copied
into the variable (`_copy_leaf_to_parameter`), and a write to the variable is copied into its leaves. A read of the
variable returns a value whose gradient goes on to the leaves.
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
from elementgrad._backends.tensorflow.distributed import copies, unwrap
from elementgrad._backends.tensorflow.train.kernels import KerasLookup
from elementgrad._cleanup import assign, close_scopes_after, scope
from elementgrad._train.bits import LAYOUTS, array_bits, common_width, nan_bits
from elementgrad._train.trainer import ElementGroup, FreezeClaim, Freezer, PartialParameter, ResolvedPlace

Tensor = Any
"""A tf.Tensor, a tf.Variable or a Keras variable."""
Variable = Any
Entries = Callable[..., Tensor]
"""Computes the gradients of all elements of a parameter from a dense gradient, and maybe another tensor."""

CLAIM = "_elementgrad_claim"
OWNER = "_elementgrad"
"""The attribute of a variable with its partial parameter, or of a leaf with its group."""
HALVES = (tf.float16, tf.bfloat16)
INTEGERS = {8 * dtype.size: dtype for dtype in (tf.int16, tf.int32, tf.int64)}
REAL = {tf.complex64: tf.float32, tf.complex128: tf.float64}
WRITES = (
    *("assign", "assign_add", "assign_sub", "_strided_slice_assign", "_restore_from_tensors", "batch_scatter_update"),
    *[f"scatter_{how}" for how in ("add", "div", "max", "min", "mul", "sub", "update")],
    *[f"scatter_nd_{how}" for how in ("add", "max", "min", "sub", "update")],
)
"""The methods of a TensorFlow variable that change it."""
PLAIN_READS = (
    *("_serialize_to_tensors", "_restore_from_tensors", "_copy_trackable_to_cpu", "_export_to_saved_model_graph"),
    "_write_object_proto",
)
"""The methods of a Keras variable that need the variable inside, and not its value."""


class _ReadThreadState(threading.local):
    read_plain: "tuple[KerasPartialParameter, ...]" = ()


_local = _ReadThreadState()


class KerasElementGroup(ElementGroup):
    """The elements of one place: the leaf is a Keras variable."""

    parameter: "KerasPartialParameter | None" = None

    def __init__(self, target: ResolvedPlace, leaf: Tensor, originals: np.ndarray, initial: np.ndarray):
        super().__init__(target, leaf, originals, initial)
        self.copies = tuple(zip(copies(leaf._value), copies(self.tensor), strict=True))
        """The leaf and the variable on each replica."""
        self.index = coordinates(self.positions, self.shape)
        """One row of coordinates per element."""
        # Whole rows, each in its order, are written as such, which is faster.
        width = int(np.prod(self.shape[1:]))
        rows = self.positions[:: max(1, width)] // max(1, width)
        whole = self.shape and np.array_equal((rows[:, None] * width + np.arange(width)).reshape(-1), self.positions)
        self._rows = rows if whole else None

    def write_to_parameter(self, written: Tensor | None = None) -> None:
        """Copy the leaf's values into the variable, on each replica or only from the copy that was written to.

        By raw operations: the methods of the variables would trigger each other.
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

    def write_values(self, values: Tensor) -> None:
        """Write values into the variable on each replica, and not into the leaf."""
        for _, tensor in self.copies:
            put(tensor, self.index, values)

    def set_originals(self, originals: np.ndarray) -> None:
        """Replace the originals after another model was loaded, also in the change log."""
        self.originals = originals
        self.change.bits = array_bits(originals)[1]


class KerasPartialParameter(PartialParameter):
    """A Keras variable of which some elements train."""

    groups: list[KerasElementGroup]

    def __init__(self, variable: Any):
        self.variable = variable
        self.tensor = variable._value
        self.groups = []
        self.layers: dict[int, Any] = {}
        """The layers whose class depends on it."""
        self.roots: dict[int, Any] = {}
        """The models that `eg.trainable` was called with, which are fitted."""

    def refresh(self) -> None:
        super().refresh()
        self._lookup: KerasLookup | None = None
        regularizer = self.variable.regularizer
        for number, group in enumerate(self.groups):
            # Once, for the variable as a whole. The public setter accepts only Keras's own regularizers.
            group.leaf._regularizer = None if number or regularizer is None else lambda _: regularizer(self.variable)

    @property
    def is_read_plain(self) -> bool:
        """True where reads of the variable return it without gradients for the leaves, in this thread."""
        return any(parameter is self for parameter in _local.read_plain)

    @contextmanager
    def plain_reads(self) -> Iterator[None]:
        """Let reads of the variable return it as it is; the caller sees to the gradients of the elements."""
        with scope():
            assign(_local, "read_plain", (*_local.read_plain, self))
            yield

    def alias(self) -> Tensor:
        """Return the value for any use: the gradients of the elements are gathered from the dense one."""
        return self.with_gradient(tf.convert_to_tensor(self.tensor), self._gather_entries)

    def stateless_value(self, value: Tensor, scope: Any) -> Tensor:
        """Put the leaves' values of a stateless scope into that of the variable, as in `model.stateless_call`."""
        for group in self.groups:
            leaf = scope.get_current_value(group.leaf)
            if leaf is not None:
                leaf = tf.cast(leaf, value.dtype)
                value = tf.tensor_scatter_nd_update(value, group.index, leaf) if value.shape.rank else leaf[0]
        return value

    def with_gradient(self, value: Tensor, entries: Entries) -> Tensor:
        """Return a value from which gradients flow to the leaves, as `entries(gradient)` computes them."""

        def forward(value: Tensor, *leaves: Tensor) -> Any:
            def vjp(gradient: Any) -> Any:
                return gradient, *self._split(entries(gradient), [leaf.dtype for leaf in leaves])

            return tf.identity(value), vjp

        leaves = [tf.convert_to_tensor(group.leaf._value) for group in self.groups]
        return tf.custom_gradient(forward)(value, *leaves)

    def with_bilinear_gradient(self, value: Tensor, other: Tensor, entries: Entries) -> Tensor:
        """Do the same for a value that is linear in the elements and in `other`: `entries(other, gradient)`.

        The gradient of `other` depends on the elements in turn, which second derivatives have to know: it gets zeros
        that do.
        """
        value = self.with_gradient(value, lambda gradient: entries(other, tf.convert_to_tensor(gradient)))
        if not other.dtype.is_floating:
            return value

        def forward(value: Tensor, other: Tensor) -> Any:
            def vjp(gradient: Any) -> Any:
                gradient, zeros = tf.convert_to_tensor(gradient), tf.zeros_like(other)
                return gradient, self.with_bilinear_gradient(zeros, gradient, lambda one, two: entries(two, one))

            return tf.identity(value), vjp

        return tf.custom_gradient(forward)(value, other)

    def read_from_parameter(self, written: Tensor) -> None:
        """Copy values from a copy of the variable into the leaves, where they are not the leaves' own."""
        for group in self.groups:
            leaf = next(leaf for leaf, tensor in group.copies if tensor is written)
            now, values = _read(leaf), _gather(written, group.index)
            # A leaf may be wider than the variable, and keeps its digits where the variable has not changed.
            new = tf.where(same_bits(cast(now, values.dtype), values), now, cast(values, now.dtype))
            tf.raw_ops.AssignVariableOp(resource=leaf.handle, value=new)

    def differs(self, written: Tensor, before: Tensor) -> bool:
        """Return True if a copy of the variable has changed since `before` in elements that do not train."""
        now = _read(written)
        changed = ((now != before) & ((now == now) | (before == before))).numpy().reshape(-1).copy()  # NaN equals NaN
        changed[self.positions] = False
        return bool(changed.any())

    def _gather_entries(self, gradient: Any) -> Tensor:
        if isinstance(gradient, tf.IndexedSlices):  # the gradient of a lookup of rows
            width = self.tensor.shape[1:].num_elements()
            if self._lookup is None:
                self._lookup = KerasLookup(*np.divmod(self.positions, width), width)
            return self._lookup(tf.reshape(gradient.indices, [-1]), tf.reshape(gradient.values, [-1, width]))
        return tf.gather(tf.reshape(gradient, [-1]), self.positions)

    def _split(self, entries: Tensor, dtypes: Sequence[Any]) -> list[Tensor]:
        rows = [entries] if len(self.sizes) == 1 else tf.split(entries, self.sizes)
        return [tf.cast(gradient, dtype) for gradient, dtype in zip(rows, dtypes, strict=True)]


def partial_parameter_of(tensor: Variable) -> KerasPartialParameter | None:
    """Return the partial parameter of a variable, TensorFlow's or Keras's, while elements of it train."""
    owner = unwrap(tensor).__dict__.get(OWNER)
    return owner if isinstance(owner, KerasPartialParameter) else None


def attach(parameter: KerasPartialParameter, groups: Iterable[KerasElementGroup]) -> None:
    """Swap the classes of a variable and its leaves, on each replica: strategies write to the copies one by one."""
    parameter.tensor.__dict__[OWNER] = parameter
    for copy in copies(parameter.tensor):
        _set_class(copy, _class_with_write_hook(_plain_class(copy), _copy_parameter_to_leaves), parameter)
    _set_class(parameter.variable, _class_with_gradient(_plain_class(parameter.variable)), parameter)
    for group in groups:
        for copy in copies(group.leaf._value):
            _set_class(copy, _class_with_write_hook(_plain_class(copy), _copy_leaf_to_parameter), group)


def detach(*variables: Variable) -> None:
    """Give variables their plain classes back."""
    for variable in variables:
        for each in (variable, *copies(variable)):
            plain = _plain_class(each)
            each.__dict__.pop(OWNER, None)
            object.__setattr__(each, "__class__", plain)


def _plain_class(variable: Variable) -> type:
    kind = type(variable)
    return vars(kind).get("_elementgrad_plain", kind)


def _set_class(variable: Variable, kind: type, owner: KerasElementGroup | KerasPartialParameter) -> None:
    variable.__dict__[OWNER] = owner
    variable.__class__ = kind


def _copy_leaf_to_parameter(leaf: Variable, before: Any) -> None:
    group: KerasElementGroup = leaf.__dict__[OWNER]
    if group.parameter is not None:
        group.write_to_parameter(leaf)


def _copy_parameter_to_leaves(tensor: Variable, before: Any) -> None:
    parameter: KerasPartialParameter = tensor.__dict__[OWNER]
    parameter.read_from_parameter(tensor)
    if before is not None and parameter.differs(tensor, before):
        # Another model was loaded: its values are the originals.
        for group in parameter.groups:
            group.set_originals(take(group.tensor, group.positions))


@cache
def _class_with_write_hook(kind: type, after: Callable[[Variable, Any], None]) -> type:
    """Return a subclass of a variable's class that calls `after(variable, value before)` after each write."""

    def hook(name: str) -> Callable[..., Any]:
        method = getattr(kind, name)

        def write(self: Variable, *args: Any, **kwargs: Any) -> Any:
            eager = tf.executing_eagerly() and after is _copy_parameter_to_leaves
            before = tf.identity(_read(self)) if eager else None
            result = method(self, *args, **kwargs)
            after(self, before)
            return result

        write.__name__ = name
        write.autograph_info__ = None  # type: ignore[attr-defined]  # by this sign AutoGraph leaves a function alone
        return write

    return make_subclass(kind, (kind,), {name: hook(name) for name in WRITES if hasattr(kind, name)})


class TrainedVariable:
    """The methods that a Keras variable has besides, while elements of it train."""

    @property
    def value(self: Any) -> Any:
        """The value, with a gradient that goes on to the leaves."""
        parameter: KerasPartialParameter = self.__dict__[OWNER]
        if in_stateless_scope():
            return parameter.stateless_value(super().value, get_stateless_scope())  # type: ignore[misc]
        return super().value if parameter.is_read_plain else self._maybe_autocast(parameter.alias())  # type: ignore[misc]

    @property
    def handle(self: Any) -> Any:
        """The handle of the variable inside."""
        return self._value.handle

    @property
    def _shared_name(self: Any) -> Any:
        return self._value._shared_name

    @property
    def trainable(self: Any) -> bool:
        """False while elements train; what the user sets counts after their release."""
        return False

    @trainable.setter
    def trainable(self: Any, value: bool) -> None:
        self._trainable = bool(value)
        freezer.request([self], bool(value))


@cache
def _class_with_gradient(kind: type) -> type:
    """Return a subclass of a Keras variable's class whose value has a gradient for the leaves."""

    def read_plain(name: str) -> Callable[..., Any]:
        method = getattr(kind, name)

        @close_scopes_after
        def call(self: Variable, *args: Any, **kwargs: Any) -> Any:
            with self.__dict__[OWNER].plain_reads():
                return method(self, *args, **kwargs)

        return call

    methods = {name: read_plain(name) for name in PLAIN_READS if hasattr(kind, name)}
    return make_subclass(kind, (TrainedVariable, kind), methods)


def make_subclass(plain: type, bases: tuple[type, ...], members: dict[str, Any]) -> type:
    """Make a class that looks like `plain`."""
    looks = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
    body = members | looks | {"_elementgrad_plain": plain}
    return new_class(plain.__name__, bases, exec_body=lambda names: names.update(body))


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


def coordinates(positions: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return the coordinates of flat positions, one row each."""
    return np.stack(np.unravel_index(positions, shape), -1).reshape(len(positions), len(shape)).astype(np.int64)


def take(tensor: Tensor, positions: np.ndarray | None = None) -> np.ndarray:
    """Read elements of a tensor or variable by their flat positions; a large variable is not read whole."""
    tensor = unwrap(tensor)
    if not isinstance(tensor, tf.Variable):
        flat = np.asarray(tensor).reshape(-1)
        return flat if positions is None else flat[positions]
    tensor = copies(tensor)[0]
    if positions is None:
        return _read(tensor).numpy().reshape(-1)
    return _gather(tensor, coordinates(positions, tuple(tensor.shape))).numpy()


def put(tensor: Tensor, index: np.ndarray, values: Tensor) -> None:
    """Write elements of a plain variable by their coordinates."""
    if not index.shape[1]:
        tf.raw_ops.AssignVariableOp(resource=tensor.handle, value=tf.reshape(values, []))
    else:
        tf.raw_ops.ResourceScatterNdUpdate(ref=tensor.handle, indices=index, updates=values)


def _read(tensor: Tensor) -> Tensor:
    return tf.raw_ops.ReadVariableOp(resource=tensor.handle, dtype=tensor.dtype)


def _gather(tensor: Tensor, index: np.ndarray) -> Tensor:
    if not index.shape[1]:
        return tf.reshape(_read(tensor), [1])[: len(index)]
    return tf.raw_ops.ResourceGatherNd(resource=tensor.handle, indices=index, dtype=tensor.dtype)


def cast(values: Tensor, dtype: Any) -> Tensor:
    """Cast values so that NaNs keep their bits and small numbers are not flushed to zero."""
    values, dtype = tf.convert_to_tensor(values), tf.as_dtype(dtype)
    if values.dtype == dtype:
        return values
    if values.dtype.is_complex and dtype.is_complex:
        return tf.bitcast(cast(tf.bitcast(values, REAL[values.dtype]), REAL[dtype]), dtype)
    plain = tf.cast(values, dtype)
    before, after = values.dtype.name, dtype.name
    if not {before, after} <= LAYOUTS.keys():
        return plain
    integers = tf.cast(_as_integers(values), INTEGERS[common_width(before, after)])
    nans = tf.cast(nan_bits(integers, before, after, tf.where), INTEGERS[LAYOUTS[after].bits])
    exact = tf.where(tf.math.is_nan(plain), nans, _as_integers(plain))
    if tf.float64 in (values.dtype, dtype) and tf.float16 not in (values.dtype, dtype):
        exact = _with_subnormals(values, integers, exact, dtype)
    return tf.bitcast(exact, dtype)


def _with_subnormals(values: Tensor, integers: Tensor, plain: Tensor, dtype: Any) -> Tensor:
    """Return the bits of a cast from or to float64, with the subnormal numbers that TensorFlow flushes to zero.

    In float32 and bfloat16, the bits of a subnormal number count how many of the smallest number it is.
    """
    narrow = values.dtype if dtype == tf.float64 else dtype
    mantissa = LAYOUTS[narrow.name].mantissa
    smallest, normal = 2.0 ** -(126 + mantissa), 2.0**-126
    if dtype == tf.float64:
        count = integers & ((1 << (LAYOUTS[narrow.name].bits - 1)) - 1)
        size = tf.cast(count, tf.float64) * smallest
        return tf.where(count < 1 << mantissa, _as_integers(tf.where(integers < 0, -size, size)), plain)
    size = tf.abs(values)
    count = tf.cast(tf.round(size / smallest), plain.dtype)
    return tf.where(size < normal, tf.where(integers < 0, count + plain.dtype.min, count), plain)


def same_bits(left: Tensor, right: Tensor) -> Tensor:
    """Compare values of one dtype to the bit: -0.0 is not 0.0, and a NaN equals itself."""
    if left.dtype.is_complex:
        return tf.reduce_all(same_bits(*[tf.bitcast(each, REAL[each.dtype]) for each in (left, right)]), -1)
    if 8 * left.dtype.size not in INTEGERS:
        return left == right
    return _as_integers(left) == _as_integers(right)


def _as_integers(values: Tensor) -> Tensor:
    return tf.bitcast(values, INTEGERS[8 * values.dtype.size])
