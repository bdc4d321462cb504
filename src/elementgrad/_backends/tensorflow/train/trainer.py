"""The trainer of a Keras model or layer: names, checks, starting and stopping, gradients by a tape."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elementgrad._backends.tensorflow import distributed
from elementgrad._backends.tensorflow.autodiff import python_function_of
from elementgrad._backends.tensorflow.names import KerasModel, layer_of
from elementgrad._backends.tensorflow.train.layers import patch_class
from elementgrad._backends.tensorflow.train.parameter import (
    HALVES,
    KerasElementGroup,
    KerasPartialParameter,
    attach,
    bits,
    cast,
    detach,
    freezer,
    partial_parameter_of,
    take,
)
from elementgrad._train.backend import TrainBackend
from elementgrad._train.freeze import TrainingState
from elementgrad._train.trainer import ResolvedPlace, Trainer
from elementgrad.errors import DtypeError, FrameworkError, OptionError

Tensor = Any


class KerasTrainer(Trainer):
    """A Keras model or layer whose elements train."""

    alternatives: Mapping[str, str] = {
        "parameters": "elements.variables",
        "backward": "elements.gradients(tape, {place: loss})",
    }
    noun = "trainable variable"
    other_nouns: Mapping[str, str] = {"activation": "a layer", "buffer": "a variable that no optimizer updates"}
    separator = "/"

    def __init__(self, model: Any):
        if not tf.executing_eagerly():
            raise FrameworkError("elements are chosen before a function is compiled; call this outside of tf.function")
        self._root = layer_of(model)
        distributed.require_outside(self._root)
        self._model = KerasModel(self._root)
        self._owner = object()
        parameters = [variable for _, kind, variable in self._model._variables() if kind == "parameter"]
        self._variables = {id(variable._value): variable for variable in parameters}

    def names(self) -> Iterator[str]:
        return (name for name, kind, _ in self._model.named_tensors() if kind == "parameter")

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for path, layer in self._model._layers():
            for variable in layer._trainable_variables:
                if variable._value is not None:
                    yield f"{path}/{variable.name}" if path else variable.name, variable._value

    def parameter(self, name: str) -> Tensor:
        matches = self._model.lookup(name)
        for kind, tensor in matches:
            if kind == "parameter" and tensor is not None:
                return tensor
        if not any(self.names()):
            raise FrameworkError("the model has no variables yet; call it once, or model.build(...), before")
        raise self.unknown_name_error(name, matches[0][0] if matches else None)

    def stable_name(self, name: str) -> str:
        return self._model.stable_name(self._model.canonical_name(name))

    def name_of(self, tensor: Tensor) -> str:
        for name, kind, parameter in self._model.named_tensors():
            if kind == "parameter" and parameter is distributed.unwrap(tensor):
                return name
        raise self.not_a_parameter_error(tensor)

    def check_parameter(self, tensor: Tensor, name: str) -> None:
        distributed.require_mirrored(tensor, name)
        if not (tensor.dtype.is_floating or tensor.dtype.is_complex):
            raise DtypeError(f"{name} is {tensor.dtype.name}, and only floats train")
        if self._variables[id(tensor)].constraint is not None:
            raise FrameworkError(
                f"{name} has a constraint, which rewrites all of it after every step; set its constraint to None"
            )

    def training_state(self, tensor: Tensor) -> TrainingState:
        return freezer.state(self._variables[id(tensor)])

    def read_bits(self, tensor: Tensor, positions: np.ndarray | None = None) -> tuple[str, np.ndarray]:
        return bits(take(tensor, positions))

    def parse_dtype(self, dtype: Any) -> Any:
        try:
            parsed = None if dtype is None else tf.as_dtype(dtype)
        except TypeError:
            parsed = tf.int32
        if parsed is not None and not (parsed.is_floating or parsed.is_complex):
            raise OptionError(f"dtype={dtype!r} is not a floating dtype; give tf.float32 or tf.float64, or None")
        return parsed

    def make_group(
        self, target: ResolvedPlace, dtype: Any, values: Any = None, originals: Any = None
    ) -> KerasElementGroup:
        tensor = target.tensor
        initial = take(tensor, target.positions)
        now = initial if values is None else _from_bits(values)
        if dtype is None and values is None:
            dtype = tf.float32 if tensor.dtype in HALVES else tensor.dtype  # half precision loses small steps
        dtype = dtype or tf.as_dtype(now.dtype)
        variable = self._variables[id(tensor)]
        taken = {group.leaf.name for group in self.groups_of(tensor)}
        name = next(name for number in count() if (name := f"{variable.name}_elements_{number}") not in taken)
        with distributed.scope(tensor):
            leaf = keras.Variable(cast(now, dtype), dtype=dtype.name, autocast=False, name=name)
        leaf._path = f"{variable.path}_elements_{name.rpartition('_')[2]}"  # optimizers leave variables out by it
        return KerasElementGroup(target, leaf, initial if originals is None else _from_bits(originals), initial)

    def groups_of(self, tensor: Tensor) -> Sequence[KerasElementGroup]:
        parameter = partial_parameter_of(tensor)
        return [] if parameter is None else parameter.groups

    def start(self, groups: Sequence[Any], keep: Sequence[Tensor] = ()) -> None:
        freezer.claim(self._variables.values(), self._owner, [self._variables[id(tensor)] for tensor in keep])
        for group in groups:
            parameter = partial_parameter_of(group.tensor) or KerasPartialParameter(self._variables[id(group.tensor)])
            group.parameter = parameter
            parameter.groups.append(group)
            parameter.arrange()
            attach(parameter)
        changed = _parameters_of(groups)
        for parameter in changed:
            parameter.layers |= {id(layer): layer for _, layer in self._model._layers()}
            parameter.roots[id(self._root)] = self._root
        for group in groups:
            group.write_to_parameter()
        _update_layers(changed)

    def stop(self, groups: Sequence[Any]) -> None:
        # Called again after an interrupt, it goes on from wherever it was.
        changed = _parameters_of(groups)
        for parameter in changed:
            parameter.groups[:] = [group for group in parameter.groups if all(group is not other for other in groups)]
        for group in groups:
            detach(group.leaf._value)
        for parameter in changed:
            parameter.arrange()
            if not parameter.groups:
                detach(parameter.tensor, parameter.variable)
                # Writes of single elements have made every read of the variable copy it, which is over now.
                for copy in distributed.copies(parameter.tensor):
                    tf.raw_ops.DisableCopyOnRead(resource=copy.handle)
        freezer.leave(self._variables.values(), self._owner)
        _update_layers(changed)
        for group in groups:
            group.parameter = None

    def cancel(self, groups: Sequence[Any]) -> None:
        self.stop(groups)
        for group in groups:
            group.write_values(group.initial)

    def write_to_parameter(self, group: Any) -> None:
        group.write_to_parameter()

    def restore(self, group: Any) -> None:
        group.leaf.assign(cast(group.originals, group.leaf._value.dtype))
        group.write_values(group.originals)

    def check_loss(self, loss: Tensor, of: str) -> None:
        if not tf.is_tensor(loss):
            raise FrameworkError(f"the loss for {of} is {type(loss).__name__}; give a tf.Tensor of one number")
        if loss.shape.num_elements() != 1:
            raise OptionError(f"the loss for {of} has shape {loss.shape}; give one number, such as tf.reduce_sum(loss)")

    def check_tape(self, tape: Any, losses: int) -> None:
        if not isinstance(tape, tf.GradientTape):
            raise OptionError(f"{type(tape).__name__} is not a tape; give the tf.GradientTape that recorded the losses")
        if losses > 1 and not tape._persistent:
            raise OptionError(
                f"the tape gives one gradient, and there are {losses} losses; use tf.GradientTape(persistent=True)"
            )

    def gradients(self, loss: Tensor, groups: Sequence[Any], last: bool, tape: Any = None) -> list[Tensor | None]:
        return tape.gradient(loss, [group.leaf for group in groups])

    def add_gradient(self, total: Tensor | None, gradient: Tensor, elements: np.ndarray) -> Tensor:
        if len(elements) < gradient.shape[0]:
            some = tf.gather(gradient, elements)
            gradient = tf.scatter_nd(elements[:, None], some, tf.shape(gradient, out_type=tf.int64))
        return gradient if total is None else total + gradient

    @property
    def is_distributed(self) -> bool:
        return self._strategy is not None

    @property
    def is_rank_zero(self) -> bool:
        return bool(self._strategy.extended.should_checkpoint)  # the chief

    def allgather(self, row: np.ndarray) -> np.ndarray:
        return distributed.allgather(self._strategy, row)

    @property
    def _strategy(self) -> Any:
        return distributed.multi_process_strategy(variable._value for variable in self._variables.values())


def _parameters_of(groups: Iterable[KerasElementGroup]) -> list[KerasPartialParameter]:
    return list({id(group.parameter): group.parameter for group in groups if group.parameter is not None}.values())


def _update_layers(changed: Sequence[KerasPartialParameter]) -> None:
    """Swap the classes of the layers of changed parameters, and drop functions that were compiled before."""
    layers = {id(layer): layer for parameter in changed for layer in parameter.layers.values()}
    for layer in layers.values():
        patch_class(layer)
        for function in ("train_function", "test_function", "predict_function"):
            if getattr(layer, function, None) is not None:
                setattr(layer, function, None)


def _from_bits(numbers: Any) -> np.ndarray:
    return np.frombuffer(numbers.bits.tobytes(), tf.as_dtype(numbers.dtype).as_numpy_dtype)


class KerasTrain(TrainBackend):
    """Makes trainers of Keras models and layers."""

    def trainer(self, model: Any) -> Trainer:
        owner = layer_of(model)
        if owner is None or python_function_of(model) is not owner:
            raise FrameworkError(f"{model!r} is a function or a method, and not a Keras model; give the model")
        return KerasTrainer(owner)

    def tensor_bits(self, tensor: Tensor) -> tuple[str, np.ndarray]:
        return bits(take(tensor))

    def from_bits(self, bits: np.ndarray, like: Tensor) -> Tensor:
        return tf.constant(np.frombuffer(bits.tobytes(), like.dtype.as_numpy_dtype).reshape(like.shape))


implementation = KerasTrain()
