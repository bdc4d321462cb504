"""Every private name of TensorFlow and Keras that this backend relies on, so that an upgrade is one file.

Names of Keras are looked up when they are needed: it may not be imported yet, or may run on another backend.
"""

# ruff: noqa: I001 (grouped by what they are for)
import sys
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

if tuple(map(int, tf.__version__.split(".")[:2])) < (2, 18):
    raise ImportError("elementgrad needs TensorFlow 2.18 or newer")

# Eager execution: the context with its seed and kernels, and the two ways in which an operation is executed.
from tensorflow.python import pywrap_tfe as pywrap_tfe
from tensorflow.python.eager import context as context
from tensorflow.python.eager import execute as execute

# Tapes: whether one records now, the gradient functions that they call, and how they are asked for gradients.
from tensorflow.python.eager import record as record
from tensorflow.python.eager.backprop import _gradient_function as _gradient_function
from tensorflow.python.eager.backprop import _handle_or_self as _handle_or_self
from tensorflow.python.eager.imperative_grad import imperative_grad as imperative_grad
from tensorflow.python.eager.record import could_possibly_record as could_possibly_record
from tensorflow.python.eager.record import should_record_backprop as should_record_backprop
from tensorflow.python.framework import indexed_slices as indexed_slices

# `tf.function` and AutoGraph: the user's Python function inside, to be run as Python with its arguments bound.
from tensorflow.python.autograph.core.ag_ctx import ControlStatusCtx as ControlStatusCtx
from tensorflow.python.autograph.core.ag_ctx import Status as Status
from tensorflow.python.eager.polymorphic_function.function_type_utils import (
    bind_function_inputs as bind_function_inputs,
)
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function as Function
from tensorflow.python.eager.polymorphic_function.tf_method_target import TfMethodTarget as TfMethodTarget
from tensorflow.python.framework.auto_control_deps import AutomaticControlDependencies as AutomaticControlDependencies

# Gradients: functions that bring their own, and those registered for each type of operation.
from tensorflow.python.framework.ops import get_gradient_function as get_gradient_function
from tensorflow.python.ops import custom_gradient as custom_gradient

# Operations as they run: callbacks on each, their definitions, and values that leave TensorFlow or enter it.
from tensorflow.python.framework import constant_op as constant_op
from tensorflow.python.framework import op_callbacks as op_callbacks
from tensorflow.python.framework import op_def_registry as op_def_registry
from tensorflow.python.ops import script_ops as script_ops

# Tensors and variables: their types, whose methods are replaced to see writes, and the counter that numbers tensors.
from tensorflow.python.framework.ops import _EagerTensorBase as _EagerTensorBase
from tensorflow.python.framework.ops import uid as uid
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable as BaseResourceVariable
from tensorflow.python.ops.resource_variable_ops import ResourceVariable as ResourceVariable

# The functions of TensorFlow's modules by which variables are written to, beside their own methods.
from tensorflow.python.ops import gen_array_ops as gen_array_ops
from tensorflow.python.ops import gen_resource_variable_ops as gen_resource_variable_ops
from tensorflow.python.ops import gen_state_ops as gen_state_ops
from tensorflow.python.ops import gen_stateful_random_ops as gen_stateful_random_ops

WRITES: list[tuple[Any, str]] = [
    *[
        (gen_resource_variable_ops, name)
        for name in dir(gen_resource_variable_ops)
        if name.startswith("resource_scatter_")
    ],
    *[(gen_state_ops, name) for name in dir(gen_state_ops) if name.startswith("resource_scatter_nd_")],
    (gen_array_ops, "resource_strided_slice_assign"),
    (gen_stateful_random_ops, "rng_read_and_skip"),
]
"""These functions, by module and name; each takes the handle of the variable first."""
WRITES = [(owner, name) for owner, name in WRITES if not name.endswith("_eager_fallback")]
TENSOR_TYPES = (tf.Tensor, tf.Variable, tf.__internal__.types.Tensor)
"""The types of tensors; the last is the base of symbolic tensors and others that are no `tf.Tensor`."""


TAPE_GRADIENT = tf.GradientTape.gradient


def gradients_on_tape(tape: Any, y: Any, sources: Sequence[Any], seed: Any) -> list[Any]:
    """Return what `tape.gradient` does, for tensors and variables.

    `tape.gradient` flattens and packs trees of composite tensors several times, which takes as long as a small sweep.
    While it is replaced it is called all the same: an explanation or audit of the code around sees its calls.
    """
    if tf.GradientTape.gradient is not TAPE_GRADIENT:
        return list(tape.gradient(y, list(sources), output_gradients=seed))
    y, *sources = [x if isinstance(x, tf.Tensor) else _handle_or_self(x) for x in (y, *sources)]
    gradients = imperative_grad(tape._tape, [y], sources, output_gradients=None if seed is None else [seed])
    return list(gradients)


def convert_by_autograph(function: Any) -> Any:
    """Return a function as AutoGraph would call it from here."""
    autograph = tf.__internal__.autograph
    return autograph.tf_convert(function, autograph.control_status_ctx())


def function_options(function: Any) -> tuple[Any, ...]:
    """Return the arguments of `tf.function`, in order, that make the same compiled function again."""
    return (
        function.python_function,
        function.input_signature,
        function._autograph,
        function._jit_compile,
        function._reduce_retracing,
    )


def global_seed() -> Any:
    """Return the seed that `tf.random.set_seed` set, or None."""
    return getattr(context.context(), "_seed", None)


def variable_dtype(handle: Any) -> Any:
    """Return the dtype of the variable that a resource handle refers to, or None if it is not known to be one."""
    data: Any = getattr(handle, "_handle_data", None)
    known = data is not None and data.is_set and len(data.shape_and_type) == 1
    return tf.as_dtype(data.shape_and_type[0].dtype) if known else None


def registered_gradient(op: Any) -> Any:
    """Return the gradient function of an operation of a graph; None if no derivative flows through it."""
    try:
        return get_gradient_function(op)
    except LookupError:  # a tape raises it when a sweep comes through here
        return LookupError


def keras_backend() -> Any:
    """Return the module of Keras from which its layers take `rnn`; Keras must be imported."""
    return sys.modules["keras.src.backend"]


def in_symbolic_scope() -> bool:
    """Return True if Keras runs layers only to find out shapes."""
    scopes = sys.modules.get("keras.src.backend.common.symbolic_scope")
    return scopes is not None and bool(scopes.in_symbolic_scope())


def in_stateless_scope() -> bool:
    """Return True if Keras keeps updates of variables apart, as in `stateless_call`."""
    from keras.src.backend.common.stateless_scope import in_stateless_scope as inside

    return bool(inside())


def get_stateless_scope() -> Any:
    """Return the scope that keeps updates of variables apart."""
    from keras.src.backend.common.stateless_scope import get_stateless_scope as current

    return current()


def base_convolution() -> type:
    """Return the base of Keras's convolution layers, whose `call` is known."""
    from keras.src.layers.convolutional.base_conv import BaseConv

    return BaseConv


def is_tape_used_up(error: Exception) -> bool:
    """Return True if a tape that is not persistent was asked for a second gradient."""
    return "non-persistent" in str(error)


def op_type_without_gradient(error: Exception) -> str | None:
    """Return the op type that has no registered gradient, if the error says so."""
    text = str(error)
    return text.rpartition(":")[2].strip(" '\"") if "gradient registry has no entry for" in text else None


def is_about_gradients(error: Exception) -> bool:
    """Return True if an error may come from a gradient that is None, as those of optimizers do."""
    return any(word in str(error) for word in ("None", "gradients"))


def convert_with_autograph_on(function: Any) -> Any:
    """Return a function rewritten by AutoGraph, as `tf.function` has it in a graph, whatever is on outside."""
    return tf.__internal__.autograph.tf_convert(function, ControlStatusCtx(Status.ENABLED))


def uses_autograph(function: Any) -> bool:
    """Return True if a function of `tf.function` has its code rewritten."""
    return bool(function._autograph)


def bind_arguments(function: Any, args: Any, kwargs: Any) -> Any:
    """Return the arguments of a function of `tf.function`, with its defaults and the tensors of its signature."""
    return bind_function_inputs(args, kwargs, function.function_type, function._default_values)


def replace_input(operation: Any, slot: int, tensor: Any) -> None:
    """Have an operation of a graph take another tensor."""
    operation._update_input(slot, tensor)


def function_of_graph(wrapped: Any, inputs: Any, outputs: Any) -> Any:
    """Return a wrapped function with other inputs and outputs in the same graph.

    `prune` copies the graph, and gradients that were written by the user still refer to tensors of the first one.
    """
    graph = wrapped.graph
    graph.inputs = [*inputs, *graph.internal_captures]
    graph.outputs = list(outputs)
    graph.structured_outputs = list(outputs)
    graph.structured_input_signature = None
    function = type(wrapped)(graph, variable_holder=wrapped._variable_holder)
    function._num_positional_args = len(inputs)
    function._arg_keywords = [tensor.op.name for tensor in inputs]
    return function


def copy_keras_mask(source: Any, target: Any) -> None:
    """Give a tensor the mask by which Keras knows which steps of another count."""
    mask = getattr(source, "_keras_mask", None)
    if mask is not None:
        target._keras_mask = mask


# Watching `fit`: what its training step calls.
def compute_loss_of(model: Any) -> Any:
    """Return the method by which a training step computes the loss: the private one also tracks metrics."""
    return getattr(model, "_compute_loss", model.compute_loss)


def build_symbolically(model: Any, data: Any) -> None:
    """Make the variables of a model by a call on the shapes of a batch, which changes nothing else."""
    model._symbolic_build(data_batch=data)


def takes_training(model: Any) -> bool:
    """Return True if a training step calls the model with `training=True`."""
    return bool(getattr(model, "_call_has_training_arg", True))


def variable_inside(variable: Any) -> Any:
    """Return TensorFlow's variable in one of Keras, whose own `value` may be cast; anything else as it is."""
    return getattr(variable, "_value", variable)


def trained_variables(optimizer: Any) -> list[Any]:
    """Return the variables that an optimizer of Keras was built for; `apply` without any takes these."""
    # A LossScaleOptimizer of older versions of Keras leaves them to the optimizer that it wraps.
    while (inner := getattr(optimizer, "inner_optimizer", None)) is not None:
        optimizer = inner
    return list(optimizer._trainable_variables)


def tensor_id(x: Any) -> int:
    """Return the number that TensorFlow gives to a tensor or handle."""
    return int(x._id)
