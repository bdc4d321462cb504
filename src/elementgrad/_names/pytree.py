"""Trees of tensors: tuples, lists, dicts, dataclasses and the containers that a framework knows, and names in them."""

import copy
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from itertools import count
from operator import is_
from typing import Any

from elementgrad._backends import registry
from elementgrad._names.backend import Node
from elementgrad._place.place import Place
from elementgrad.errors import OptionError

SIMPLE = {int, float, complex, bool, str, bytes, type(None)}
DEPTH_LIMIT = 200
"""Containers inside of one another; Python itself limits the depth of calls, to about a thousand."""
_leaf_types: set[type] = set()
"""Types that are known to be always leaves."""


class Leaf:
    """Base of dataclasses that are leaves all the same, as places are."""

    __slots__ = ()


class SharedObjects:
    """Objects with an identity, such as modules of flax NNX; a walk over a tree visits each of them once."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[Any, str, Any]] = {}  # the object too, so that no other gets its id
        self.aliases: dict[str, str] = {}
        """The later paths of each object, each with the first."""

    def __bool__(self) -> bool:
        return bool(self._first)

    def add(self, value: Any, name: str = "", new: Any = None) -> None:
        if registry.is_shared_object(value):
            self._first[id(value)] = value, name, new

    def find(self, value: Any, name: str = "") -> tuple[Any, str, Any] | None:
        """Return the object, its first path and what it became; None at the first visit."""
        first = self._first.get(id(value)) if self._first else None
        if first is not None:
            self.aliases[name] = first[1]
        return first

    def first_path(self, name: str) -> str:
        """Return the first path of a leaf."""
        for other, first in self.aliases.items():
            if name == other or name.startswith(f"{other}."):
                return self.first_path(first + name[len(other) :])  # what is inside may be shared as well
        return name


def named_leaves(
    tree: Any, name: str, above: tuple[Any, ...] = (), shared: SharedObjects | None = None
) -> list[tuple[str, Any]]:
    """Return every leaf with its path, such as `"x.weights.0"`. A reference back to a container above is a leaf."""
    node = None if type(tree) in _leaf_types else _flatten_checked(tree, above)
    if node is None:
        return [(name, tree)]
    shared = SharedObjects() if shared is None else shared
    if shared.find(tree, name) is not None:
        return []
    shared.add(tree, name)
    leaves = []
    for key, branch in zip(*node[:2], strict=True):
        leaves += named_leaves(branch, name if key is None else f"{name}.{key}", (*above, tree), shared)
    return leaves


def leaves_of(tree: Any) -> list[Any]:
    return [tree] if type(tree) in _leaf_types else [leaf for _, leaf in named_leaves(tree, "")]


def map_tree(
    tree: Any, function: Callable[[Any], Any], above: tuple[Any, ...] = (), shared: SharedObjects | None = None
) -> Any:
    """Return the same structure with a function applied to each leaf, in the order of `leaves_of`.

    A container in which nothing changes is returned as it is.
    """
    node = None if type(tree) in _leaf_types else _flatten_checked(tree, above)
    if node is None:
        return function(tree)
    shared = SharedObjects() if shared is None else shared
    first = shared.find(tree)
    if first is not None:
        return first[2]
    _, branches, rebuild = node
    entries = [map_tree(branch, function, (*above, tree), shared) for branch in branches]
    new = tree if all(map(is_, entries, branches)) else rebuild(entries)
    shared.add(tree, new=new)
    return new


def replace_leaves(tree: Any, new: Mapping[int, Any]) -> Any:
    """Return the tree with some leaves replaced, by their index in `leaves_of`."""
    indices = count()
    return map_tree(tree, lambda leaf: new.get(next(indices), leaf))


def unflatten_like(tree: Any, new: Sequence[Any]) -> Any:
    """Return the same structure with other leaves, in the order of `leaves_of`."""
    if type(tree) in _leaf_types:
        return new[0]
    rest = iter(new)
    return map_tree(tree, lambda _: next(rest))


def _flatten_checked(tree: Any, above: tuple[Any, ...]) -> Node | None:
    if len(above) > DEPTH_LIMIT:
        raise OptionError(f"containers are nested more than {DEPTH_LIMIT} deep; give tensors in fewer of them")
    return None if any(tree is other for other in above) else flatten_one_level(tree)


def flatten_one_level(tree: Any) -> Node | None:
    """Return the contents of a container, or None for a leaf."""
    if isinstance(tree, (dict, UserDict)):
        return list(tree), list(tree.values()), lambda entries: _with_items(tree, entries)
    if isinstance(tree, (tuple, list)):
        keys = getattr(tree, "_fields", None) or range(len(tree))  # a named tuple has fields
        return keys, tree, getattr(type(tree), "_make", type(tree))
    if isinstance(tree, (Leaf, Place)) or type(tree) in SIMPLE:
        _leaf_types.add(type(tree))
        return None
    backend = registry.backend_of(tree)
    if backend is not None:
        if backend.caches_type(type(tree)):
            _leaf_types.add(type(tree))
        return None
    node = registry.flatten_node(tree)  # before dataclasses: a framework knows which of their fields are static
    if node is None and hasattr(type(tree), "__dataclass_fields__"):
        names = [field.name for field in fields(tree) if hasattr(tree, field.name)]
        return names, [getattr(tree, name) for name in names], lambda entries: _with_fields(tree, names, entries)
    return node


def _with_items(tree: Any, entries: Sequence[Any]) -> Any:
    if type(tree) is dict:
        return dict(zip(tree, entries, strict=True))
    other = copy.copy(tree)  # a subclass stays what it is
    for key, entry in zip(tree, entries, strict=True):
        other[key] = entry
    return other


def _with_fields(tree: Any, names: Sequence[str], entries: Sequence[Any]) -> Any:
    other = copy.copy(tree)
    for name, entry in zip(names, entries, strict=True):
        object.__setattr__(other, name, entry)  # a frozen one too
    return other
