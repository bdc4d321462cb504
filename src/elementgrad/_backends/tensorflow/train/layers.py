"""Some entries of the gradient of a convolution's kernel.

Layers that know their trained elements: the class is swapped for one made of it, and back.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elementgrad._backends.tensorflow._compat import base_convolution, in_stateless_scope
from elementgrad._backends.tensorflow.distributed import here
from elementgrad._backends.tensorflow.train.parameter import (
    MULTIPLIED,
    SELECTED,
    KerasLookup,
    KerasPartialParameter,
    KerasProduct,
    coordinates,
    freezer,
    weight_of,
)
from elementgrad._cleanup import assign, close_scopes_after

Tensor = Any


@dataclass(frozen=True)
class KerasConvGrid:
    """How a convolution walks over its input."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: str
    """"valid", "same" or "causal"."""
    first: bool = False
    """Whether the channels come first."""

    def last(self, x: Tensor) -> Tensor:
        """The channels as the last axis."""
        return tf.transpose(x, [0, *range(2, x.shape.rank), 1]) if self.first else x

    def padded(self, x: Tensor) -> Tensor:
        """The input with the zeros that the convolution sees around it, channels last."""
        if self.padding == "valid":
            return x
        amounts: list[Any] = [[0, 0]]
        for axis, (size, stride, dilation) in enumerate(zip(self.size, self.stride, self.dilation, strict=True), 1):
            reach = (size - 1) * dilation
            if self.padding == "causal":
                amounts.append([reach, 0])
                continue
            length = tf.shape(x)[axis]
            outputs = (length + stride - 1) // stride
            total = tf.maximum((outputs - 1) * stride + reach + 1 - length, 0)
            amounts.append([total // 2, total - total // 2])
        return tf.pad(x, [*amounts, [0, 0]])

    def seen(self, x: Tensor, offset: Sequence[int], outputs: Tensor) -> Tensor:
        """What the outputs see of a padded input through one offset of the kernel."""
        starts = [at * dilation for at, dilation in zip(offset, self.dilation, strict=True)]
        windows = [
            slice(start, start + (outputs[axis] - 1) * stride + 1, stride)
            for axis, (start, stride) in enumerate(zip(starts, self.stride, strict=True), 1)
        ]
        return x[(slice(None), *windows, slice(None))]


class KerasCorrelation:
    """Entries of the kernel's gradient, given by their coordinates (offset..., in, out).

    One offset of the kernel pairs every output with one input, so its group of the gradient is the product of the two
    over all pairs, of which `Product` finds the entries.
    """

    def __init__(self, coordinates: np.ndarray, shape: tuple[int, ...], grid: KerasConvGrid):
        self._grid = grid
        *offsets, inside, out = coordinates.T
        offset = np.ravel_multi_index(tuple(offsets), shape[:-2])
        self._parts: list[Any] = []
        cost = 0.0
        for number in np.unique(offset):
            here = np.flatnonzero(offset == number)
            product = KerasProduct(inside[here], out[here], shape[-2], shape[-1])
            cost += product.cost + SELECTED * shape[-2]
            at = [int(axis) for axis in np.unravel_index(number, shape[:-2])]
            self._parts.append((at, here, product))
        order = np.concatenate([np.zeros(0, np.int64), *[here for _, here, _ in self._parts]])
        self._order = np.argsort(order)
        self.whole = cost > MULTIPLIED * np.prod(shape)
        """Whether the whole gradient is cheaper."""

    def __call__(self, x: Tensor, gradient: Tensor) -> Tensor:
        """The entries, for the input and the gradient of the output."""
        gradient = self._grid.last(gradient)
        x = self._grid.padded(self._grid.last(x))
        outputs = tf.shape(gradient)
        right = tf.reshape(gradient, [-1, gradient.shape[-1]])
        found = []
        for offset, _, product in self._parts:
            seen = self._grid.seen(x, offset, outputs)
            found.append(product(tf.reshape(seen, [-1, x.shape[-1]]), right))
        return tf.gather(tf.concat(found, 0), self._order)


Layer = Any

NOTE = "_elementgrad"
CLASS: Any = vars(object)["__class__"]
"""Sets the class of a layer that says to be of another."""


@dataclass(eq=False)
class KerasLayerKernel:
    """What a layer needs to give its elements their gradients. No container, in which Keras would look for weights."""

    weight: KerasPartialParameter | None = None
    kernel: Any = None


class FrozenLayer:
    """A layer whose variables hold still, until somebody says otherwise."""

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


class _KernelState(threading.local):
    linear: tuple[Layer, ...] = ()


_local = _KernelState()


class AffineLayer:
    """A layer that is linear in its kernel, up to a bias and an activation: the elements listen between the two."""

    @property
    def activation(self: Any) -> Any:
        """None for a moment, while the layer computes what comes before."""
        return None if any(layer is self for layer in _local.linear) else self.__dict__["activation"]

    @activation.setter
    def activation(self: Any, value: Any) -> None:
        self.__dict__["activation"] = value

    @close_scopes_after
    def call(self: Any, inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As ever."""
        use: KerasLayerKernel = self.__dict__[NOTE]
        if use.weight is None or not _followed(inputs):
            return super().call(inputs, *args, **kwargs)  # type: ignore[misc]
        with use.weight.bared():
            assign(_local, "linear", (*_local.linear, self))
            outputs = super().call(inputs, *args, **kwargs)  # type: ignore[misc]
        outputs = use.weight.paired(outputs, tf.convert_to_tensor(inputs), use.kernel)
        return outputs if self.activation is None else self.activation(outputs)

    call.autograph_info__ = None  # type: ignore[attr-defined]  # by this sign AutoGraph leaves a function alone


class LookupLayer:
    """A layer that looks up rows of a table: the elements listen to the tokens that named theirs."""

    def call(self: Any, inputs: Tensor) -> Tensor:
        """As ever, but read from the table itself: it is never copied."""
        use: KerasLayerKernel = self.__dict__[NOTE]
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
    if isinstance(layer, FrozenLayer):
        CLASS.__set__(layer, type(layer)._elementgrad_plain)  # type: ignore[attr-defined]
    layer.__dict__.pop(NOTE, None)
    if any(weight_of(variable) is not None for variable in layer.weights):
        known, use = _role(layer)
        roles: tuple[type, ...] = (TrainedLayer,) if known is None else (known, TrainedLayer)
    elif any(freezer.get_claim(variable) is not None for variable in layer.weights):
        roles, use = (FrozenLayer,), KerasLayerKernel()
    else:
        return
    layer.__dict__[NOTE] = use
    plain: Any = type(layer)
    CLASS.__set__(layer, _class(plain, roles))


def _leaves(layer: Layer) -> list[Any]:
    weights = [weight_of(variable) for variable in layer.weights] if layer.trainable else []
    return [group.leaf for weight in weights if weight is not None for group in weight.groups]


def _role(layer: Layer) -> tuple[type | None, KerasLayerKernel]:
    """How a layer uses its weight, if that is known; a class of the user's may do otherwise."""
    if _is(layer, keras.layers.Embedding, "call", "embeddings"):
        weight = weight_of(layer.__dict__.get("_embeddings"))
        if weight is not None:
            rows, columns = coordinates(weight.positions, tuple(weight.tensor.shape)).T
            return LookupLayer, KerasLayerKernel(weight, KerasLookup(rows, columns, weight.tensor.shape[1]))
    kernel = layer.__dict__.get("_kernel")
    weight = None if kernel is None else weight_of(kernel)
    if weight is None or not weight.tensor.dtype.is_floating:
        return None, KerasLayerKernel()
    shape = tuple(weight.tensor.shape)
    if _is(layer, keras.layers.Dense, "call", "kernel"):
        rows, columns = coordinates(weight.positions, shape).T
        product = KerasProduct(rows, columns, *shape)
        return AffineLayer, KerasLayerKernel(
            weight, lambda x, gradient: product(_flat(x, shape[0]), _flat(gradient, shape[1]))
        )
    calls = _is(layer, base_convolution(), "call") or _is(layer, keras.layers.Conv1D, "call")
    if calls and _is(layer, base_convolution(), "convolution_op", "kernel") and layer.groups == 1:
        grid = KerasConvGrid(
            tuple(layer.kernel_size),
            tuple(layer.strides),
            tuple(layer.dilation_rate),
            layer.padding,
            layer.data_format == "channels_first",
        )
        correlation = KerasCorrelation(coordinates(weight.positions, shape), shape, grid)
        if not correlation.whole:
            return AffineLayer, KerasLayerKernel(weight, correlation)
    return None, KerasLayerKernel()


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
