"""Restores the attributes of Keras layers that a trace called, since a trace leaves tensors without numbers in them."""

from collections.abc import Callable
from typing import Any

from elementgrad._backends.tensorflow.names import run_before_layers
from elementgrad._cleanup import defer


def restore_layers(see: Callable[[Any], None]) -> None:
    """Restore the attributes of all layers that are called from now on, when the innermost open scope is left.

    `see` is called with each layer first.
    """
    undos: dict[int, Callable[[], None]] = {}

    def save(layer: Any) -> None:
        see(layer)
        # A layer that is built by the call keeps what building it made.
        if id(layer) not in undos and layer.built:
            undos[id(layer)] = _make_undo(layer)

    defer(_undo_all, undos)
    run_before_layers(save)


def holds_unbuilt_layers(layer: Any) -> bool:
    """Return True for a layer whose first run makes the variables of layers inside of it.

    In a graph Keras makes them only in part, and no other model can be built in that process from then on.
    """
    return not layer.built and any(not inner.built for inner in layer._flatten_layers(include_self=False))


def _undo_all(undos: dict[int, Callable[[], None]]) -> None:
    for undo in undos.values():
        undo()


def _make_undo(layer: Any) -> Callable[[], None]:
    attributes = dict(vars(layer))
    # Keras watches writes to the containers of a layer, for variables in them, and need not see these.
    lists = [(value, list(value)) for value in attributes.values() if _is_container(value, list)]
    dicts = [(value, dict(value)) for value in attributes.values() if _is_container(value, dict)]

    def undo() -> None:
        for changed, items in lists:
            list.__setitem__(changed, slice(None), items)
        for kept, entries in dicts:
            dict.clear(kept)
            dict.update(kept, entries)
        for name in vars(layer).keys() - attributes.keys():
            del vars(layer)[name]
        vars(layer).update(attributes)

    return undo


def _is_container(value: Any, kind: type) -> bool:
    """Return True for a list or dict, and for what Keras makes of one; TensorFlow's wrappers are neither."""
    return type(value) is kind or type(value).__name__ == f"Tracked{kind.__name__.title()}"
