"""Layers with trained elements: the class of a layer is swapped for a subclass of it, and back.

A `Dense`, `Conv` or `Embedding` layer computes the gradients of the elements of its kernel alone. Any other layer reads
its variables, whose values have a gradient for the leaves, at the cost of one dense gradient.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import keras
import tensorflow as tf

from elementgrad._backends.tensorflow._compat import base_convolution, in_stateless_scope
from elementgrad._backends.tensorflow.distributed import local_copy
from elementgrad._backends.tensorflow.train.kernels import KerasConvGrid, KerasCorrelation, KerasLookup, KerasProduct
from elementgrad._backends.tensorflow.train.parameter import (
    OWNER,
    KerasPartialParameter,
    coordinates,
    freezer,
    partial_parameter_of,
)
from elementgrad._cleanup import assign, close_scopes_after

Tensor = Any
Layer = Any

CLASS: Any = vars(object)["__class__"]
"""Sets the class of a layer, whose own `__class__` is overridden."""


@dataclass(eq=False)
class KerasLayerKernel:
    """The parameter of a layer whose gradient it computes by a kernel. Not a tuple, which Keras would track."""

    parameter: KerasPartialParameter | None = None
    kernel: Any = None


def patch_class(layer: Layer) -> None:
    """Give a layer the class that its trained elements need, or its own where there are none."""
    if isinstance(layer, FrozenLayer):
        CLASS.__set__(layer, type(layer)._elementgrad_plain)  # type: ignore[attr-defined]
    layer.__dict__.pop(OWNER, None)
    bases: tuple[type, ...]
    if any(partial_parameter_of(variable) is not None for variable in layer.weights):
        kernel_class, kernel = _choose_kernel(layer)
        bases = (TrainedLayer,) if kernel_class is None else (kernel_class, TrainedLayer)
    elif any(freezer.get_claim(variable) is not None for variable in layer.weights):
        bases, kernel = (FrozenLayer,), KerasLayerKernel()
    else:
        return
    layer.__dict__[OWNER] = kernel
    plain: Any = type(layer)
    CLASS.__set__(layer, _subclass(plain, bases))


@cache
def _subclass(plain: Any, bases: Any) -> type:
    looks: dict[str, Any] = {"__module__": plain.__module__, "__qualname__": plain.__qualname__}
    looks |= {"__doc__": plain.__doc__, "_elementgrad_plain": plain}
    # Files and copies are made by the class that a layer claims to have.
    looks["__class__"] = property(lambda layer: plain)
    return type(plain.__name__, (*bases, plain), looks)


class FrozenLayer:
    """A layer with frozen variables."""

    def __setattr__(self: Any, name: str, value: Any) -> None:
        if name == "trainable":
            # The layer is trainable already, though its variables are not, and Keras would leave it at that.
            type(self).trainable.__set__(self, value)
            freezer.request(self.weights, bool(value))
        else:
            super().__setattr__(name, value)


class TrainedLayer(FrozenLayer):
    """A layer or model with elements that train somewhere inside."""

    @property
    def trainable_variables(self: Any) -> list[Any]:
        """The variables that train as a whole, and the leaves of the elements."""
        return super().trainable_variables + _leaves(self)  # type: ignore[misc]

    @property
    def trainable_weights(self: Any) -> list[Any]:
        """The same, but only for the model that is fitted, whose optimizer gets these; files take those of layers."""
        parameters = [partial_parameter_of(variable) for variable in self.weights]
        fitted = any(parameter is not None and id(self) in parameter.roots for parameter in parameters)
        return super().trainable_weights + (_leaves(self) if fitted else [])  # type: ignore[misc]

    def __reduce__(self: Any) -> Any:
        reduced: Any = super().__reduce__()
        return type(self)._elementgrad_plain._unpickle_model, *reduced[1:]  # a copy is a plain model


def _leaves(layer: Layer) -> list[Any]:
    parameters = [partial_parameter_of(variable) for variable in layer.weights] if layer.trainable else []
    return [group.leaf for parameter in parameters if parameter is not None for group in parameter.groups]


class _KernelThreadState(threading.local):
    without_activation: tuple[Layer, ...] = ()


_local = _KernelThreadState()


class AffineLayer:
    """A layer that is linear in its kernel, up to a bias and an activation.

    The gradient goes to the leaves between the two: the layer is called without its activation, which follows.
    """

    @property
    def activation(self: Any) -> Any:
        """None while the layer computes what comes before the activation."""
        return None if any(layer is self for layer in _local.without_activation) else self.__dict__["activation"]

    @activation.setter
    def activation(self: Any, value: Any) -> None:
        self.__dict__["activation"] = value

    @close_scopes_after
    def call(self: Any, inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Call the layer, with gradients for the elements of its kernel."""
        use: KerasLayerKernel = self.__dict__[OWNER]
        if use.parameter is None or not _is_plain_call(inputs):
            return super().call(inputs, *args, **kwargs)  # type: ignore[misc]
        with use.parameter.plain_reads():
            assign(_local, "without_activation", (*_local.without_activation, self))
            outputs = super().call(inputs, *args, **kwargs)  # type: ignore[misc]
        outputs = use.parameter.with_bilinear_gradient(outputs, tf.convert_to_tensor(inputs), use.kernel)
        return outputs if self.activation is None else self.activation(outputs)

    call.autograph_info__ = None  # type: ignore[attr-defined]  # by this sign AutoGraph leaves a function alone


class LookupLayer:
    """A layer that looks up rows of a table."""

    def call(self: Any, inputs: Tensor) -> Tensor:
        """Look up rows of the table itself, which is never copied, with gradients for its elements."""
        use: KerasLayerKernel = self.__dict__[OWNER]
        if use.parameter is None or self.lora_enabled or not _is_plain_call(inputs):
            return super().call(inputs)  # type: ignore[misc]
        ids = tf.convert_to_tensor(inputs)
        ids = ids if ids.dtype in (tf.int32, tf.int64) else tf.cast(ids, tf.int32)
        ids = tf.where(ids < 0, ids + tf.cast(self.input_dim, ids.dtype), ids)
        rows = tf.gather(local_copy(use.parameter.tensor), ids)
        width = rows.shape[-1]

        def entries(gradient: Any) -> Tensor:
            return use.kernel(tf.reshape(ids, [-1]), tf.reshape(tf.convert_to_tensor(gradient), [-1, width]))

        return tf.cast(use.parameter.with_gradient(rows, entries), self.compute_dtype)

    call.autograph_info__ = None  # type: ignore[attr-defined]


def _is_plain_call(inputs: Any) -> bool:
    """Return True for a call with a dense tensor and the layer's own variables, not those of a stateless scope."""
    return isinstance(inputs, (tf.Tensor, tf.Variable)) and not in_stateless_scope()


def _choose_kernel(layer: Layer) -> tuple[type | None, KerasLayerKernel]:
    """Return the subclass and the kernel for a layer whose `call` is Keras's own; a user's may do otherwise."""
    if _inherits(layer, keras.layers.Embedding, "call", "embeddings"):
        parameter = partial_parameter_of(layer.__dict__.get("_embeddings"))
        if parameter is not None:
            rows, columns = coordinates(parameter.positions, tuple(parameter.tensor.shape)).T
            return LookupLayer, KerasLayerKernel(parameter, KerasLookup(rows, columns, parameter.tensor.shape[1]))
    variable = layer.__dict__.get("_kernel")
    parameter = None if variable is None else partial_parameter_of(variable)
    if parameter is None or not parameter.tensor.dtype.is_floating:
        return None, KerasLayerKernel()
    shape = tuple(parameter.tensor.shape)
    if _inherits(layer, keras.layers.Dense, "call", "kernel"):
        return AffineLayer, KerasLayerKernel(parameter, _dense_kernel(parameter, shape))
    calls = _inherits(layer, base_convolution(), "call") or _inherits(layer, keras.layers.Conv1D, "call")
    if calls and _inherits(layer, base_convolution(), "convolution_op", "kernel") and layer.groups == 1:
        grid = KerasConvGrid(
            tuple(layer.kernel_size),
            tuple(layer.strides),
            tuple(layer.dilation_rate),
            layer.padding,
            layer.data_format == "channels_first",
        )
        correlation = KerasCorrelation(coordinates(parameter.positions, shape), shape, grid)
        if not correlation.is_dense_cheaper:
            return AffineLayer, KerasLayerKernel(parameter, correlation)
    return None, KerasLayerKernel()


def _dense_kernel(parameter: KerasPartialParameter, shape: tuple[int, ...]) -> Callable[[Tensor, Tensor], Tensor]:
    rows, columns = coordinates(parameter.positions, shape).T
    product = KerasProduct(rows, columns, *shape)
    return lambda x, gradient: product(tf.reshape(x, [-1, shape[0]]), tf.reshape(gradient, [-1, shape[1]]))


def _inherits(layer: Layer, known: type, *members: str) -> bool:
    """Return True if a layer is of a class of Keras, and overrides none of these members."""
    kind = type(layer)
    return issubclass(kind, known) and all(getattr(kind, name) is getattr(known, name) for name in members)
