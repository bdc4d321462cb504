"""Layers that know their trained elements: the class is swapped for one made of it, and back."""

import threading
from dataclasses import dataclass
from functools import cache
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.layers.convolutional.base_conv import BaseConv

from elementgrad.backends.tensorflow.training.correlations import Correlation, Grid
from elementgrad.backends.tensorflow.training.entries import Lookup, Product
from elementgrad.backends.tensorflow.training.freezing import ask, frozen
from elementgrad.backends.tensorflow.training.replicas import here
from elementgrad.backends.tensorflow.training.variables import weight_of
from elementgrad.backends.tensorflow.training.weight import Weight, coordinates
from elementgrad.cleanup import assign, contained

Layer = Any
Tensor = Any
NOTE = "_elementgrad"
CLASS: Any = vars(object)["__class__"]
"""Sets the class of a layer that says to be of another."""


@dataclass(eq=False)
class Use:
    """What a layer needs to give its elements their gradients. No container, in which Keras would look for weights."""

    weight: Weight | None = None
    kernel: Any = None


class Frozen:
    """A layer whose variables hold still, until somebody says otherwise."""

    def __setattr__(self: Any, name: str, value: Any) -> None:
        if name == "trainable":
            # The layer is trainable already, though its variables are not, and Keras would leave it at that.
            type(self).trainable.__set__(self, value)
            ask(self.weights, bool(value))
        else:
            super().__setattr__(name, value)


class Holding(Frozen):
    """A layer or model with elements that train somewhere inside."""

    @property
    def trainable_variables(self: Any) -> list[Any]:
        """Those of the plain layer that train as a whole, and the leaves of the elements."""
        return super().trainable_variables + _leaves(self)  # type: ignore[misc]

    @property
    def trainable_weights(self: Any) -> list[Any]:
        """The same for the model that is fitted: the optimizer gets these, and old formats of files those of layers."""
        weights = [weight_of(variable) for variable in self.weights]
        fitted = any(weight is not None and id(self) in weight.roots for weight in weights)
        return super().trainable_weights + (_leaves(self) if fitted else [])  # type: ignore[misc]

    def __reduce__(self: Any) -> Any:
        made: Any = super().__reduce__()
        return type(self)._elementgrad_plain._unpickle_model, *made[1:]  # a copy is a plain model


class _Local(threading.local):
    linear: tuple[Layer, ...] = ()


_local = _Local()


class Affine:
    """A layer that is linear in its kernel, up to a bias and an activation: the elements listen between the two."""

    @property
    def activation(self: Any) -> Any:
        """None for a moment, while the layer computes what comes before."""
        return None if any(layer is self for layer in _local.linear) else self.__dict__["activation"]

    @activation.setter
    def activation(self: Any, value: Any) -> None:
        self.__dict__["activation"] = value

    @contained
    def call(self: Any, inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As ever."""
        use: Use = self.__dict__[NOTE]
        if use.weight is None or not _followed(inputs):
            return super().call(inputs, *args, **kwargs)  # type: ignore[misc]
        with use.weight.bared():
            assign(_local, "linear", (*_local.linear, self))
            outputs = super().call(inputs, *args, **kwargs)  # type: ignore[misc]
        outputs = use.weight.paired(outputs, tf.convert_to_tensor(inputs), use.kernel)
        return outputs if self.activation is None else self.activation(outputs)

    call.autograph_info__ = None  # type: ignore[attr-defined]  # by this sign AutoGraph leaves a function alone


class Looking:
    """A layer that looks up rows of a table: the elements listen to the tokens that named theirs."""

    def call(self: Any, inputs: Tensor) -> Tensor:
        """As ever, but read from the table itself: it is never copied."""
        use: Use = self.__dict__[NOTE]
        if use.weight is None or self.lora_enabled or not _followed(inputs):
            return super().call(inputs)  # type: ignore[misc]
        ids = tf.convert_to_tensor(inputs)
        ids = ids if ids.dtype in (tf.int32, tf.int64) else tf.cast(ids, tf.int32)
        ids = tf.where(ids < 0, ids + tf.cast(self.input_dim, ids.dtype), ids)
        rows = tf.gather(here(use.weight.tensor), ids)
        width = rows.shape[-1]

        def entries(gradient: Any) -> Tensor:
            return use.kernel(tf.reshape(ids, [-1]), tf.reshape(tf.convert_to_tensor(gradient), [-1, width]))

        return tf.cast(use.weight.tapped(rows, entries), self.compute_dtype)

    call.autograph_info__ = None  # type: ignore[attr-defined]


def _followed(inputs: Any) -> bool:
    """Whether a layer is called in the usual way: with a dense tensor, and not where other variables are lent to it."""
    return isinstance(inputs, (tf.Tensor, tf.Variable)) and not in_stateless_scope()


def dress(layer: Layer) -> None:
    """Give a layer the class that the elements inside of it need, or its own where there are none."""
    if isinstance(layer, Frozen):
        CLASS.__set__(layer, type(layer)._elementgrad_plain)  # type: ignore[attr-defined]
    layer.__dict__.pop(NOTE, None)
    if any(weight_of(variable) is not None for variable in layer.weights):
        known, use = _role(layer)
        roles: tuple[type, ...] = (Holding,) if known is None else (known, Holding)
    elif any(frozen(variable) for variable in layer.weights):
        roles, use = (Frozen,), Use()
    else:
        return
    layer.__dict__[NOTE] = use
    plain: Any = type(layer)
    CLASS.__set__(layer, _class(plain, roles))


def _leaves(layer: Layer) -> list[Any]:
    weights = [weight_of(variable) for variable in layer.weights] if layer.trainable else []
    return [part.leaf for weight in weights if weight is not None for part in weight.parts]


def _role(layer: Layer) -> tuple[type | None, Use]:
    """How a layer uses its weight, if that is known; a class of the user's may do otherwise."""
    if _is(layer, keras.layers.Embedding, "call", "embeddings"):
        weight = weight_of(layer.__dict__.get("_embeddings"))
        if weight is not None:
            rows, columns = coordinates(weight.positions, tuple(weight.tensor.shape)).T
            return Looking, Use(weight, Lookup(rows, columns, weight.tensor.shape[1]))
    kernel = layer.__dict__.get("_kernel")
    weight = None if kernel is None else weight_of(kernel)
    if weight is None or not weight.tensor.dtype.is_floating:
        return None, Use()
    shape = tuple(weight.tensor.shape)
    if _is(layer, keras.layers.Dense, "call", "kernel"):
        rows, columns = coordinates(weight.positions, shape).T
        product = Product(rows, columns, *shape)
        return Affine, Use(weight, lambda x, gradient: product(_flat(x, shape[0]), _flat(gradient, shape[1])))
    calls = _is(layer, BaseConv, "call") or _is(layer, keras.layers.Conv1D, "call")
    if calls and _is(layer, BaseConv, "convolution_op", "kernel") and layer.groups == 1:
        grid = Grid(
            tuple(layer.kernel_size),
            tuple(layer.strides),
            tuple(layer.dilation_rate),
            layer.padding,
            layer.data_format == "channels_first",
        )
        correlation = Correlation(coordinates(weight.positions, shape), shape, grid)
        if not correlation.whole:
            return Affine, Use(weight, correlation)
    return None, Use()


def _is(layer: Layer, known: type, *members: str) -> bool:
    """Whether a layer is of a class of Keras's, and has these of it as they are there."""
    kind = type(layer)
    return issubclass(kind, known) and all(getattr(kind, name) is getattr(known, name) for name in members)


def _flat(x: Tensor, width: int) -> Tensor:
    return tf.reshape(x, [-1, width])


@cache
def _class(plain: Any, roles: Any) -> type:
    looks: dict[str, Any] = {"__module__": plain.__module__, "__qualname__": plain.__qualname__}
    looks |= {"__doc__": plain.__doc__, "_elementgrad_plain": plain}
    # Files and copies are made by the class that a layer says to be of.
    looks["__class__"] = property(lambda layer: plain)
    return type(plain.__name__, (*roles, plain), looks)
