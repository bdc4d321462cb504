"""Tensors inside tuples, lists, dicts, dataclasses and what a framework knows to open: what each is called there."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from itertools import count
from operator import is_
from typing import Any

from elementgrad._backends import registry
from elementgrad.errors import OptionError

Node = tuple[Sequence[Any], Sequence[Any], Callable[[Sequence[Any]], Any]]
"""The keys of what is inside (None in a box, whose content bears its name), what is inside, how to put others in."""

SIMPLE = {int, float, complex, bool, str, bytes, type(None)}
_closed: set[type] = set()
"""Types that were found to be never opened."""
DEEPEST = 200
"""Containers inside of one another; Python itself counts calls, and has room for about a thousand."""


class Leaf:
    """Base of what is never opened, though it has fields."""

    __slots__ = ()


def named_leaves(tree: Any, name: str, above: tuple[Any, ...] = ()) -> list[tuple[str, Any]]:
    """Everything that cannot be opened, with its path: `"x.weights.0"`. What leads back to something above is one."""
    node = None if type(tree) in _closed else _flatten_checked(tree, above)
    if node is None:
        return [(name, tree)]
    found = []
    for key, branch in zip(*node[:2], strict=True):
        found += named_leaves(branch, name if key is None else f"{name}.{key}", (*above, tree))
    return found


def leaves_of(tree: Any) -> list[Any]:
    """The leaves alone."""
    return [tree] if type(tree) in _closed else [leaf for _, leaf in named_leaves(tree, "")]


def map_tree(tree: Any, function: Callable[[Any], Any], above: tuple[Any, ...] = ()) -> Any:
    """The same structure around a function of each leaf, taken in the order of `leaves`.

    A container in which nothing changes is passed on as it is.
    """
    node = None if type(tree) in _closed else _flatten_checked(tree, above)
    if node is None:
        return function(tree)
    _, branches, rebuild = node
    entries = [map_tree(branch, function, (*above, tree)) for branch in branches]
    return tree if all(map(is_, entries, branches)) else rebuild(entries)


def replace_leaves(tree: Any, new: Mapping[int, Any]) -> Any:
    """The tree with some leaves replaced, by their number in the order of `leaves`."""
    numbers = count()
    return map_tree(tree, lambda leaf: new.get(next(numbers), leaf))


def unflatten_like(tree: Any, new: Sequence[Any]) -> Any:
    """The same structure around other leaves, in the order of `leaves`."""
    if isinstance(tree, Leaf):
        return new[0]
    left = iter(new)
    return map_tree(tree, lambda _: next(left))


def _flatten_checked(tree: Any, above: tuple[Any, ...]) -> Node | None:
    if len(above) > DEEPEST:
        raise OptionError(f"containers are nested more than {DEEPEST} deep; give tensors in fewer of them")
    return None if any(tree is other for other in above) else flatten_one_level(tree)


def flatten_one_level(tree: Any) -> Node | None:
    """What is inside of one level of a structure, or None for what is never opened."""
    if isinstance(tree, dict):
        return list(tree), list(tree.values()), lambda entries: _with_items(tree, entries)
    if isinstance(tree, (tuple, list)):
        named = getattr(tree, "_fields", None)
        rebuild = getattr(type(tree), "_make", type(tree))
        return named or range(len(tree)), tree, rebuild
    if isinstance(tree, Leaf) or type(tree) in SIMPLE:
        _closed.add(type(tree))
        return None
    backend = registry.backend_of(tree)
    if backend is not None:
        if backend.caches_type(type(tree)):
            _closed.add(type(tree))
        return None
    known = registry.flatten_node(tree)  # a framework that knows a dataclass knows which of its fields stay as they are
    if known is None and hasattr(type(tree), "__dataclass_fields__"):
        names = [field.name for field in fields(tree) if hasattr(tree, field.name)]
        return names, [getattr(tree, name) for name in names], lambda entries: _with_fields(tree, names, entries)
    return known


def _with_items(tree: dict[Any, Any], entries: Sequence[Any]) -> Any:
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
