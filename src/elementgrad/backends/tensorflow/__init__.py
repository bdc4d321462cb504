"""TensorFlow."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import tensorflow as tf

from elementgrad import cleanup
from elementgrad.backends.limits import Limits
from elementgrad.backends.linear import Linear, Run, Use
from elementgrad.backends.model import Model
from elementgrad.backends.protocol import Backend, Kind
from elementgrad.backends.recorder import Recorder
from elementgrad.backends.tensorflow import ambient, layers, staging, uses
from elementgrad.backends.tensorflow.linear import TensorflowLinear
from elementgrad.backends.tensorflow.matrices import TensorflowMatrices
from elementgrad.backends.tensorflow.model import KerasModel, TensorflowModel, root
from elementgrad.backends.tensorflow.positions import Rows
from elementgrad.backends.tensorflow.quiet import seeded, undisturbed
from elementgrad.backends.tensorflow.recorder import TensorflowRecorder
from elementgrad.backends.training import Trainer
from elementgrad.backends.witness import Told, Witness
from elementgrad.errors import FrameworkError, TracedError
from elementgrad.selection import Selection, forward

Tensor = Any  # tf.Tensor, tf.Variable or a Keras variable


class TensorflowBackend(TensorflowMatrices, Backend):
    """The operations of `Backend` on `tf.Tensor` and `tf.Variable`, eager or inside `tf.function`."""

    name = "tensorflow"

    def owns(self, kind: type) -> bool:
        return issubclass(kind, (tf.Tensor, tf.Variable, tf.__internal__.types.Tensor))

    def shape(self, x: Tensor) -> tuple[int, ...]:
        if x.shape.rank is None:
            raise TracedError("the tensor's number of axes is not known while tracing; give it with tf.ensure_shape")
        return tuple(x.shape)

    def kind(self, x: Tensor) -> Kind:
        dtype = tf.as_dtype(x.dtype)
        if dtype.is_floating:
            return "f"
        return "c" if dtype.is_complex else "b" if dtype.is_bool else "i" if dtype.is_integer else "o"

    def read(self, x: Tensor) -> np.ndarray | None:
        return tf.get_static_value(tf.convert_to_tensor(x))

    def limits(self, x: Tensor) -> Limits | None:
        return _limits(tf.as_dtype(x.dtype))

    def cast(self, value: Any, like: Tensor) -> Tensor:
        return tf.cast(value if tf.is_tensor(value) else np.asarray(value), like.dtype)  # a bare float is float32 here

    def take(self, x: Tensor, selection: Selection) -> Tensor:
        x = tf.convert_to_tensor(x)
        if selection.basic:
            index, flips = selection.basic
            return tf.reverse(x[index], flips) if flips else x[index]
        if selection.mask is not None and selection.traced:
            return tf.boolean_mask(x, selection.mask.values)
        return Rows(x, selection).take()

    def tensor(self, array: np.ndarray) -> Tensor:
        return tf.convert_to_tensor(array)

    def put(self, x: Tensor, selection: Selection, value: Any) -> Tensor:
        x = tf.convert_to_tensor(x)
        value = self.cast(value, x)
        if selection.basic and _strided_update_works(selection):
            return _strided_update(x, selection, value)
        return Rows(x, selection).put(value)

    def accumulate(self, x: Tensor, selection: Selection, value: Any, multiply: bool) -> Tensor:
        x = tf.convert_to_tensor(x)
        value = self.cast(value, x)
        return Rows(x, selection).multiply(value) if multiply else Rows(x, selection).add(value)

    def where(self, mask: Any, x: Tensor, y: Tensor) -> Tensor:
        return tf.where(mask, x, y)

    def stop(self, x: Tensor) -> Tensor:
        return tf.stop_gradient(x)

    def only(self, x: Tensor, selection: Selection) -> Tensor:
        mask = selection.mask
        if mask is not None:
            return _through(x, lambda g: tf.where(mask.values, g, tf.zeros_like(g)))
        return _through(x, lambda g: self.put(tf.zeros_like(g), selection, self.take(g, selection)))

    def all_but(self, x: Tensor, selection: Selection) -> Tensor:
        mask = selection.mask
        if mask is not None:
            return _through(x, lambda g: tf.where(mask.values, tf.zeros_like(g), g))
        return _through(x, lambda g: self.put(g, selection, 0))

    def reshape(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        # An array takes a fraction of the time of a tuple.
        return tf.reshape(x, np.array(shape, np.int64) if tf.executing_eagerly() else shape)

    def broadcast(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        return tf.broadcast_to(x, shape)

    def soft_choice(self, x: Tensor, logits: Tensor, axis: int) -> Tensor:
        x, logits = tf.convert_to_tensor(x), tf.convert_to_tensor(logits)
        weights = tf.nn.softmax(tf.cast(logits, tf.float32) if logits.dtype.size < 4 else logits, axis)
        weights = tf.cast(weights, x.dtype)
        return tf.reduce_sum(weights * tf.where(weights == 0, tf.zeros_like(x), x), axis)

    def hard_choice(self, x: Tensor, logits: Tensor, axis: int) -> Tensor:
        last = [*(other for other in range(x.shape.rank) if other != axis), axis]
        x = tf.transpose(x, last)
        chosen = tf.broadcast_to(tf.argmax(logits, axis), tf.shape(x)[:-1])
        return tf.gather(x, chosen, batch_dims=x.shape.rank - 1)

    def graft(self, value: Tensor, slope: Tensor) -> Tensor:
        return _graft(value, slope)

    def traceable(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if tf.executing_eagerly():
            return function
        autograph = tf.__internal__.autograph
        return autograph.tf_convert(function, autograph.control_status_ctx())

    def models(self, function: Any) -> bool:
        return root(function) is not None

    def model(self, function: Callable[..., Any]) -> Model:
        return TensorflowModel(function) if root(function) is None else KerasModel(function)

    def trainer(self, model: Any) -> Trainer:
        owner = root(model)
        if owner is None or staging.written(model) is not owner:
            raise FrameworkError(f"{model!r} is no Keras model but a function or a method of one; give the model")
        from elementgrad.backends.tensorflow.training.trainer import KerasTrainer

        return KerasTrainer(owner)

    def slopes(
        self,
        model: Any,
        parameters: Mapping[str, Tensor],
        losses: Callable[[], Iterable[Tensor]],
        squared: bool,
        give: Callable[[str, Tensor], None],
    ) -> None:
        from elementgrad.backends.tensorflow.scores import slopes

        slopes(model, parameters, losses, squared, give)

    def largest(
        self, x: Tensor, count: int, floor: float, minus: Tensor | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        from elementgrad.backends.tensorflow.scores import largest

        return largest(x, count, floor, minus)

    def called(self, function: Callable[..., Any]) -> Callable[..., Any]:
        written = staging.written(function)
        return written.call if root(function) is written else written

    def bare(self, x: Tensor) -> Tensor:
        value = getattr(x, "_value", None)
        return value if isinstance(value, tf.Variable) else x

    def passes(self, x: Tensor) -> bool:
        return layers.computing()

    def single(self, x: Tensor) -> bool:
        return not staging.inside(x)

    def undisturbed(self, function: Callable[..., Any]) -> AbstractContextManager[None]:
        return undisturbed()

    def surroundings(self, linear: Linear) -> Any:
        return linear.seeds if isinstance(linear, TensorflowLinear) else None

    def within(self, surroundings: Any) -> AbstractContextManager[Any]:
        return seeded(surroundings)

    def reducers(self) -> Mapping[type, Callable[[Any], tuple[Any, ...]]]:
        def compiled(f: Any) -> tuple[Any, ...]:
            options = f.input_signature, f._autograph, f._jit_compile, f._reduce_retracing
            return tf.function, (f.python_function, *options)

        return {type(tf.function(lambda: None)): compiled}

    def linearize(self, run: Run, inputs: Sequence[Tensor], create_graph: bool, order: int) -> Linear:
        return TensorflowLinear.of(run, inputs, create_graph, order)

    def recorder(self, tensors: Sequence[Tensor]) -> Recorder:
        return TensorflowRecorder(tensors)

    def uses(self, run: Run, inputs: Sequence[Tensor], input: int) -> tuple[Linear, list[Use]]:
        return uses.of(run, inputs, input)

    def itemsize(self, x: Tensor) -> int:
        return tf.as_dtype(x.dtype).size

    def zeros(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        return tf.zeros(shape, like.dtype)

    def units(self, like: Tensor, positions: np.ndarray, batch: int) -> Tensor:
        seeds = tf.one_hot(positions, math.prod(like.shape) // batch, dtype=like.dtype)
        return self.reshape(tf.repeat(seeds, batch, 0) if batch > 1 else seeds, (len(positions), *like.shape))

    def floats(self, x: Tensor) -> np.ndarray | None:
        return self.read(tf.cast(x, tf.float64))

    def convert(self, x: Tensor, dtype: str) -> Tensor:
        return x if tf.as_dtype(x.dtype).name == dtype else tf.cast(x, dtype)

    def witness(self, run: Run, source: Tensor | None, probe: bool) -> Witness:
        from elementgrad.backends.tensorflow.explaining.witness import TensorflowWitness

        return TensorflowWitness(run, source, probe)

    def step(self, function: Callable[[], Any], wrt: Tensor | None) -> Told:
        from elementgrad.backends.tensorflow.explaining.step import told

        return told(function, wrt)

    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        return tf.concat(parts, 0)

    def transpose(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        return tf.transpose(x, axes)

    def matmul(self, x: Tensor, y: Tensor) -> Tensor:
        return tf.matmul(x, y)


@cache
def _limits(dtype: tf.DType) -> Limits | None:
    if dtype.is_floating or dtype.is_complex:
        return Limits.of_floats(ml_dtypes.finfo(dtype.as_numpy_dtype))
    return Limits.of_integers(ml_dtypes.iinfo(dtype.as_numpy_dtype)) if dtype.is_integer else None


def _through(x: Tensor, keep: Callable[[Tensor], Tensor]) -> Tensor:
    """x itself, at no cost, with its derivatives passed through a linear map that is its own transpose."""
    # The value is cut off first: forward mode would follow it beside the rule.
    return tf.custom_gradient(lambda x: (tf.stop_gradient(x), keep))(tf.convert_to_tensor(x))


@tf.custom_gradient
def _graft(value: Tensor, slope: Tensor) -> Any:
    return tf.stop_gradient(value), lambda upstream: (None, upstream)


def _strided_update_works(selection: Selection) -> bool:
    """XLA, which may compile any graph later, updates only unit steps."""
    return tf.executing_eagerly() or all(
        abs(forward(part).step) == 1 for part in selection.parts if isinstance(part, range)
    )


def _strided_update(x: Tensor, selection: Selection, value: Tensor) -> Tensor:
    ranges = [range(part, part + 1) if isinstance(part, int) else part for part in selection.parts]
    ahead = [forward(part) for part in ranges]
    flips = [axis for axis, part in enumerate(ranges) if part.step < 0]
    value = tf.reshape(tf.broadcast_to(value, selection.shape), [len(part) for part in ranges])
    return tf.raw_ops.TensorStridedSliceUpdate(
        input=x,
        begin=np.array([part.start for part in ahead], np.int64),
        end=np.array([part.stop for part in ahead], np.int64),
        strides=np.array([part.step for part in ahead], np.int64),
        value=tf.reverse(value, flips) if flips else value,
    )


backend = TensorflowBackend()
cleanup.on_entry(ambient.snapshot)
