"""`eg.tag`: a name for a value inside a function."""

import itertools
from typing import Any

from elementgrad._backends import registry
from elementgrad._names import pytree
from elementgrad._names.backend import NamesBackend
from elementgrad._names.capture import Value, innermost, open_entries
from elementgrad.errors import PlaceError

MARKS = "#:[]()\n"
"""Characters that no tag may have: calls are counted behind a "#", parts named behind a ":", elements in brackets."""
# The types of tensors whose tags do nothing without a capture, and so cost nothing. Neither this
# nor `MARKS` is a set: the compiler of PyTorch looks into no set in version 2.8.
_never_staged: tuple[type, ...] = ()


def tag(value: Value, name: str) -> Value:
    """Give a value inside a function a name, by which `of` and `wrt` can ask for it.

    The second tensor that gets a name is `name#1`, and the first is `name#0` then. Parts of a tuple, list or dict are
    `name:0` or `name:key`. A tag costs nothing while no read asks for it, and stays in compiled code.

    Args:
        value: a tensor, or a tuple, list or dict of tensors.
        name: the name, a str without brackets, parentheses, `#` and `:`.

    Returns:
        The value, to be used from there on: for a read of that name, the tensors before and after the tag are two
        different ones.

    >>> import torch, elementgrad as eg
    >>> def f(x):
    ...     hidden = eg.tag(x ** 2, "hidden")
    ...     return hidden.sum() * 3
    >>> eg.grad(f, torch.tensor([1.0, 2.0]), wrt="hidden")
    tensor([3., 3.])
    >>> eg.grad(f, torch.tensor([1.0, 2.0]), of="hidden[1]")
    tensor([0., 4.])
    """
    global _never_staged
    if not isinstance(name, str) or not name or (not name.isidentifier() and any(mark in name for mark in MARKS)):
        raise PlaceError(f"{name!r} is not a name for a tag; give a str without brackets, parentheses, '#' and ':'")
    if not open_entries and type(value) in _never_staged:
        return value
    if open_entries:
        capture, here = innermost()
        if capture is not None and here(name):
            return capture.capture("activation", name, value)
    backend = registry.backend_of(value)
    if backend is None:
        return _stage_parts(value, name)
    if type(backend.names).name_in_graph is NamesBackend.name_in_graph and backend.caches_type(type(value)):
        _never_staged = (*_never_staged, type(value))
    return backend.names.name_in_graph(value, name)


def _stage_parts(value: Value, name: str) -> Value:
    """Name the tensors of a value in the traced program; `Capture.capture_staged` reads these names."""
    leaves = [(key[1:], registry.backend_of(leaf)) for key, leaf in pytree.named_leaves(value, "")]
    count = len([backend for _, backend in leaves if backend is not None])
    if not count:
        registry.require_backend(value)  # raises, and says what fits
    parts, numbers = iter(leaves), itertools.count()

    def stage(leaf: Any) -> Any:
        key, backend = next(parts)
        if backend is None:
            return leaf
        return backend.names.name_in_graph(leaf, f"{name}:{next(numbers)}/{count}:{key}")

    return pytree.map_tree(value, stage)
