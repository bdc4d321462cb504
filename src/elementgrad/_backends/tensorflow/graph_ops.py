"""Ops of TensorFlow: their shapes in graphs, how to run one again on other tensors, and to see each that runs."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from inspect import signature
from typing import Any

import tensorflow as tf

from elementgrad._backends.tensorflow._compat import context, op_callbacks, op_def_registry
from elementgrad._cleanup import defer

Operation = Any


def static_shape(x: Any) -> list[int] | None:
    """Return the shape of a tensor of a graph; None if it is not known before it runs."""
    return x.shape.as_list() if x.shape.is_fully_defined() else None


def rerun(op: Operation, operands: Sequence[Any]) -> list[Any]:
    """Run the same op eagerly on other tensors, whose dtypes it takes."""
    function, inputs, attributes = _raw_op(op.type)
    remaining = iter(operands)
    arguments: dict[str, Any] = {}
    for name, argument in zip(inputs, op.op_def.input_arg, strict=True):
        count = op.get_attr(argument.number_attr) if argument.number_attr else None
        if argument.type_list_attr:
            count = len(op.get_attr(argument.type_list_attr))
        arguments[name] = next(remaining) if count is None else [next(remaining) for _ in range(count)]
    results = function(**arguments, **{name: op.get_attr(attribute) for name, attribute in attributes.items()})
    return list(results) if isinstance(results, (list, tuple)) else [results]


@lru_cache
def _raw_op(kind: str) -> tuple[Callable[..., Any], list[str], dict[str, str]]:
    """Return the function of `tf.raw_ops`, its names for the inputs, and the op's attribute for each other argument.

    Some functions name an argument otherwise than the op does, but in the same order.
    """
    function = getattr(tf.raw_ops, kind)
    definition = op_def_registry.get(kind)
    parameters = [name for name in signature(function).parameters if name != "name"]
    inputs = [argument.name for argument in definition.input_arg]
    implied = {a for x in definition.input_arg for a in (x.type_attr, x.number_attr, x.type_list_attr)}
    attributes = [attribute.name for attribute in definition.attr if attribute.name not in implied]
    own = [*inputs, *attributes]
    others = [name for name in parameters if name not in own]
    renamed = dict(zip([name for name in own if name not in parameters], others, strict=True))
    names = {name: renamed.get(name, name) for name in own}
    return function, [names[name] for name in inputs], {names[name]: name for name in attributes}


def see_operations(see: Any) -> None:
    """Have `see` called after each operation of this thread, until the innermost open scope is left."""
    callback: Any = lambda *args, **kwargs: see(*args, **kwargs)  # noqa: E731  # a new one, to be removed alone
    defer(_remove_callback, callback)
    op_callbacks.add_op_callback(callback)


def _remove_callback(callback: Any) -> None:
    if callback in context.context().op_callbacks:
        op_callbacks.remove_op_callback(callback)
