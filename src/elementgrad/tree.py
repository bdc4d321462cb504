"""Tensors inside tuples, lists and dicts: what each is called, and the same structure around others."""

import copy
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any


def leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Everything that is no tuple, list or dict, with its path: `"x.weights.0"`."""
    if isinstance(tree, dict):
        for key, branch in tree.items():
            yield from leaves(branch, f"{name}.{key}")
    elif isinstance(tree, (tuple, list)):
        for key, branch in zip(getattr(tree, "_fields", count()), tree, strict=False):
            yield from leaves(branch, f"{name}.{key}")
    else:
        yield name, tree


def flat(tree: Any) -> list[Any]:
    """The leaves alone."""
    return [leaf for _, leaf in leaves(tree, "")]


def mapped(tree: Any, function: Callable[[Any], Any]) -> Any:
    """The same structure of tuples, lists and dicts around a function of each leaf, taken in the order of `leaves`.

    A container in which nothing changes is passed on as it is.
    """
    if isinstance(tree, dict):
        branches = {key: mapped(branch, function) for key, branch in tree.items()}
        if all(branches[key] is tree[key] for key in tree):
            return tree
        other = copy.copy(tree)  # a subclass stays what it is
        for key, branch in branches.items():
            other[key] = branch
        return other
    if isinstance(tree, (tuple, list)):
        entries = [mapped(branch, function) for branch in tree]
        if all(entry is branch for entry, branch in zip(entries, tree, strict=True)):
            return tree
        return type(tree)(*entries) if hasattr(tree, "_fields") else type(tree)(entries)
    return function(tree)


def replaced(tree: Any, new: Mapping[int, Any]) -> Any:
    """The tree with some leaves replaced, by their number in the order of `leaves`."""
    numbers = count()

    def other(leaf: Any) -> Any:
        return new.get(next(numbers), leaf)

    return mapped(tree, other)
