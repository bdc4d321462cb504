"""Functions of `tf.function` that run as the Python they were written in, so that what they compute can be met."""

import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.autograph.core.ag_ctx import ControlStatusCtx, Status
from tensorflow.python.eager.polymorphic_function.function_type_utils import bind_function_inputs
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function
from tensorflow.python.eager.polymorphic_function.tf_method_target import TfMethodTarget

from elementgrad.backends.patch import Patch, Replace
from elementgrad.cleanup import assign, scope


class _Local(threading.local):
    graphs: tuple[Any, ...] = ()


_local = _Local()


@contextmanager
def unstaged() -> Iterator[None]:
    """Have this thread's calls of compiled functions run their Python, traced or not as the caller is."""
    with scope():
        _calls.enter()
        assign(_local, "graphs", (*_local.graphs, _graph()))
        yield


def passed_by(error: BaseException) -> bool:
    """Whether an exception comes out of a compiled function that ran as Python."""
    return any(frame.f_code.co_filename == __file__ for frame, _ in traceback.walk_tb(error.__traceback__))


def written(function: Any) -> Any:
    """The function that the user wrote, of one that is compiled; any other is that itself."""
    if not isinstance(function, Function):
        return function
    python = function.python_function
    for inner in ("__original_wrapped__", "__wrapped__"):  # AutoGraph puts its own in the second, once it has run
        if hasattr(python, inner):
            python = getattr(python, inner)
            break
    owner = getattr(python, "__self__", None)
    # A compiled method holds its object in a box.
    return MethodType(python.__func__, owner.target) if isinstance(owner, TfMethodTarget) else python


def inside(x: Any) -> bool:
    """Whether a tensor is of a graph inside of that in which the run started: of a loop or a branch."""
    return bool(_local.graphs) and getattr(x, "graph", None) is not _local.graphs[-1]


def _graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _install(replace: Replace) -> None:
    original = Function.__call__

    @wraps(original)
    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        python = function.python_function
        if not _local.graphs or _of_tensorflow(python):
            return original(function, *args, **kwargs)
        args, kwargs = _converted(function, args, kwargs)
        if function._autograph and not tf.executing_eagerly():
            python = tf.__internal__.autograph.tf_convert(python, ControlStatusCtx(Status.ENABLED))
        return python(*args, **kwargs)

    replace(Function, "__call__", call)


_calls = Patch(_install)


def _converted(function: Any, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments as the Python of a compiled function gets them: tensors for arrays and where its signature says so."""
    bound = bind_function_inputs(args, kwargs, function.function_type, function._default_values)
    args, kwargs = bound.args, bound.kwargs
    if any(isinstance(leaf, np.ndarray) for leaf in tf.nest.flatten((args, kwargs))):
        args, kwargs = tf.nest.map_structure(_tensor, (args, kwargs))
    return args, kwargs


def _tensor(x: Any) -> Any:
    return tf.convert_to_tensor(x) if isinstance(x, np.ndarray) else x


def _of_tensorflow(function: Any) -> bool:
    """TensorFlow's own functions, such as those of `tf.vectorized_map`, need the graphs that they are traced into."""
    return str(getattr(function, "__module__", "")).startswith("tensorflow.")
