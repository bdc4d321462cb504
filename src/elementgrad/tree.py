"""Tensors inside tuples, lists and dicts: what each is called, and the same structure with some of them replaced."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any


def leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Everything that is no tuple, list or dict, with its path: `"x.weights.0"`."""
    if isinstance(tree, dict):
        for key, branch in tree.items():
            yield from leaves(branch, f"{name}.{key}")
    elif isinstance(tree, (tuple, list)):
        keys = getattr(tree, "_fields", range(len(tree)))
        for key, branch in zip(keys, tree, strict=True):
            yield from leaves(branch, f"{name}.{key}")
    else:
        yield name, tree


def replaced(tree: Any, name: str, new: Mapping[str, Any]) -> Any:
    """The tree with the leaves of these names replaced; what holds none of them is passed on as it is."""
    if name in new:
        return new[name]
    if isinstance(tree, dict):
        branches = {key: replaced(branch, f"{name}.{key}", new) for key, branch in tree.items()}
        if all(branches[key] is tree[key] for key in tree):
            return tree
        other = copy.copy(tree)  # a subclass stays what it is
        for key, branch in branches.items():
            other[key] = branch
        return other
    if isinstance(tree, (tuple, list)):
        keys = getattr(tree, "_fields", range(len(tree)))
        entries = [replaced(branch, f"{name}.{key}", new) for key, branch in zip(keys, tree, strict=True)]
        if all(entry is branch for entry, branch in zip(entries, tree, strict=True)):
            return tree
        return type(tree)(*entries) if hasattr(tree, "_fields") else type(tree)(entries)
    return tree


def mapped(tree: Any, function: Any) -> Any:
    """The same structure of tuples, lists and dicts around a function of each leaf."""
    if isinstance(tree, dict):
        return {key: mapped(branch, function) for key, branch in tree.items()}
    if isinstance(tree, (tuple, list)):
        return type(tree)(mapped(branch, function) for branch in tree)
    return function(tree)
