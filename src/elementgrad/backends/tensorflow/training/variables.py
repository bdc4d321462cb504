"""Variables that keep each other current: whoever writes to a leaf or to the variable it is of writes to both."""

from collections.abc import Callable
from functools import cache
from types import new_class
from typing import Any

import tensorflow as tf
from keras.src.backend.common.stateless_scope import get_stateless_scope, in_stateless_scope

from elementgrad.backends.tensorflow.training.freezing import ask
from elementgrad.backends.tensorflow.training.replicas import copies, inside
from elementgrad.backends.tensorflow.training.weight import Part, Weight
from elementgrad.cleanup import contained

Variable = Any
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


def weight_of(tensor: Variable) -> Weight | None:
    """The weight whose variable this is, TensorFlow's or Keras's."""
    note = inside(tensor).__dict__.get(NOTE)
    return note if isinstance(note, Weight) else None


def tie(weight: Weight) -> None:
    """Let the variable and its leaves know each other, on each replica: strategies write to the copies one by one."""
    weight.tensor.__dict__[NOTE] = weight
    for copy in copies(weight.tensor):
        _change(copy, _written(_plain(copy), _after_weight), weight)
    _change(weight.variable, _read(_plain(weight.variable)), weight)
    for part in weight.parts:
        part.weight = weight
        for copy in copies(part.leaf._value):
            _change(copy, _written(_plain(copy), _after_leaf), part)


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


def _change(variable: Variable, kind: type, note: Part | Weight) -> None:
    variable.__dict__[NOTE] = note
    variable.__class__ = kind


def _after_leaf(leaf: Variable, before: Any) -> None:
    part: Part = leaf.__dict__[NOTE]
    if part.weight is not None:
        part.push(leaf)


def _after_weight(tensor: Variable, before: Any) -> None:
    weight: Weight = tensor.__dict__[NOTE]
    weight.pull(tensor)
    if before is not None and weight.differs(tensor, before):
        # Another model altogether: what its elements were is what was written.
        for part in weight.parts:
            part.rebase()


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


class Trained:
    """What Keras's variable does besides, while elements of it train."""

    @property
    def value(self: Any) -> Any:
        """The value, whose gradient the elements hear."""
        weight: Weight = self.__dict__[NOTE]
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
        ask([self], bool(value))


@cache
def _read(kind: type) -> type:
    def bared(name: str) -> Callable[..., Any]:
        method = getattr(kind, name)

        @contained
        def call(self: Variable, *args: Any, **kwargs: Any) -> Any:
            with self.__dict__[NOTE].bared():
                return method(self, *args, **kwargs)

        return call

    return _made(kind, (Trained, kind), {name: bared(name) for name in AS_IT_IS if hasattr(kind, name)})


def _made(plain: type, bases: tuple[type, ...], members: dict[str, Any]) -> type:
    """A class that looks like another."""
    looks = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
    body = members | looks | {"_elementgrad_plain": plain}
    return new_class(plain.__name__, bases, exec_body=lambda names: names.update(body))
