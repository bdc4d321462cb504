"""Names in a JAX module: the arrays of a callable that is a pytree, by their paths. It runs on copies of itself."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import jax

from elementgrad._backends.jax.program import capture_tags, is_array, name_in_graph
from elementgrad._names import pytree
from elementgrad._names.backend import Model, NamesBackend, Node, Replacement
from elementgrad._names.capture import Capture

Array = jax.Array
Path = tuple[str, ...]
BOX = ["value"]
"""The only key of a box around one array: `nnx.Param`, `nn.Partitioned`. The array has the name of the box."""


def flatten_node(value: Any) -> Node | None:
    """Return one level of any node of a pytree but tuples, lists and dicts."""
    if value is None or isinstance(value, (tuple, list, dict)):
        return None
    branches, structure = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda other: other is not value)
    if any(not path for path, _ in branches):
        return None
    keys = [_key_of(path[0]) for path, _ in branches]
    rebuild = partial(jax.tree_util.tree_unflatten, structure)
    return [None] if keys == BOX else keys, [branch for _, branch in branches], rebuild


class JaxModel(Model):
    """A function, or a callable that is a pytree such as a module of flax NNX or Equinox, or a method or partial."""

    def named_tensors(self) -> Iterator[tuple[str, str, Array]]:
        return ((".".join(path), kind, leaf) for path, kind, leaf in _find_arrays(self.function, (), "parameter", {}))

    def aliases(self) -> Mapping[str, str]:
        again: dict[Path, Path] = {}
        first_paths = {path: path for path, _, _ in _find_arrays(self.function, (), "parameter", {}, again)}
        for other, first in again.items():
            if other[: len(first)] == first:
                continue  # a reference back to what is above, by which paths have no end
            # All paths into the object are known by now, also those of what it shares itself.
            inside = [(path, named) for path, named in first_paths.items() if path[: len(first)] == first]
            first_paths |= {other + path[len(first) :]: named for path, named in inside}
        return {".".join(path): ".".join(named) for path, named in first_paths.items() if path != named}

    def canonical_name(self, name: str) -> str:
        return self.aliases().get(name, name)

    def lookup(self, name: str) -> list[tuple[str, Array | None]]:
        return [(kind, array) for other, kind, array in self.named_tensors() if other == name]

    @contextmanager
    def prepare(self, replacements: Sequence[Replacement], capture: Capture | None) -> Iterator[Callable[..., Any]]:
        function = CopyingFunction(self.function, {each.name: each.new for each in replacements})
        yield function if capture is None else CopyingFunction(capture_tags(function, capture))


class JaxNames(NamesBackend):
    """Names in callables that are pytrees."""

    model = JaxModel
    takes_arrays = True
    closure_limit = ", and what a function closes over is constant on JAX"
    model_hint = "; a model that the function closes over is constant on JAX, so pass it as an argument"
    flatten_node = staticmethod(flatten_node)
    name_in_graph = staticmethod(name_in_graph)

    def is_model(self, function: Any) -> bool:
        return next(iter(JaxModel(function).named_tensors()), None) is not None

    def is_shared_object(self, value: Any) -> bool:
        return not {"Pytree", "Object", "Variable"}.isdisjoint(_nnx_bases(value))

    def from_numpy(self, array: Any, model: Model) -> Array | None:
        return jax.numpy.asarray(array) if array.dtype.kind in "biufc" else None

    def traceable(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function if isinstance(function, CopyingFunction) else CopyingFunction(function)


class CopyingFunction:
    """A function that runs on copies of all that it could write to.

    The copies are made when it is called, inside of the transformation that calls it: only there may a module of flax
    NNX be written to.
    """

    def __init__(self, function: Callable[..., Any], replacements: Mapping[str, Array] | None = None):
        self._function = function
        self._replacements = replacements or {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        seen: dict[int, tuple[Any, Any]] = {}
        function = _copy(self._function, (), self._replacements, seen)
        args, kwargs = _copy((args, kwargs), (), {}, seen)
        return function(*args, **kwargs)


def copy_with(value: Any, replacements: Mapping[str, Array]) -> Any:
    """Return a value with copies of all that can be written to, and with the arrays of some names replaced."""
    return _copy(value, (), replacements, {})


def _find_arrays(
    value: Any,
    path: Path,
    kind: str,
    seen: dict[int, Path],
    again: dict[Path, Path] | None = None,
) -> Iterator[tuple[Path, str, Array]]:
    """Yield path, kind and array; an object that two others share, and that can be written to, is visited once.

    `again` gets the path by which an object is met again, with its first path.
    """
    if is_array(value):
        yield path, kind, value
        return
    node = _flatten(value)
    if node is None or id(value) in seen:
        if node is not None and again is not None:
            again[path] = seen[id(value)]
        return
    if _is_writable(value):
        seen[id(value)] = path
    kind = _variable_kind(value) or kind
    for key, branch in zip(*node[:2], strict=True):
        yield from _find_arrays(branch, path if key is None else (*path, str(key)), kind, seen, again)


def _copy(value: Any, path: Path, replacements: Mapping[str, Array], seen: dict[int, tuple[Any, Any]]) -> Any:
    if is_array(value):
        return replacements.get(".".join(path), value) if replacements else value
    if id(value) in seen:
        return seen[id(value)][1]
    node = _flatten(value)
    if node is None:
        return value
    keys, branches, rebuild = node
    entries = [
        _copy(branch, path if key is None else (*path, str(key)), replacements, seen)
        for key, branch in zip(keys, branches, strict=True)
    ]
    if _is_writable(value):
        seen[id(value)] = value, rebuild(entries)  # the value too, so that no other object gets its id
        return seen[id(value)][1]
    changed = any(entry is not branch for entry, branch in zip(entries, branches, strict=True))
    return rebuild(entries) if changed else value


def _flatten(value: Any) -> Node | None:
    if isinstance(value, partial):
        return _flatten_partial(value)
    if isinstance(value, MethodType):
        known = flatten_node(value.__self__) is not None
        return ([None], [value.__self__], lambda entries: MethodType(value.__func__, entries[0])) if known else None
    return pytree.flatten_one_level(value)


def _flatten_partial(value: partial) -> Node:
    """Return the function under an empty key, and the arguments by the names of its parameters."""
    try:
        parameters = list(inspect.signature(value.func).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = [parameter.name for parameter in parameters if parameter.kind <= parameter.POSITIONAL_OR_KEYWORD]
    names = names[: len(value.args)] + [f"args.{index}" for index in range(len(names), len(value.args))]
    count = 1 + len(names)

    def rebuild(entries: Sequence[Any]) -> partial:
        keywords = dict(zip(value.keywords, entries[count:], strict=True))
        return type(value)(entries[0], *entries[1:count], **keywords)

    return [None, *names, *value.keywords], [value.func, *value.args, *value.keywords.values()], rebuild


def _is_writable(value: Any) -> bool:
    """Return True if a run could write to an object, as to the statistics and counters of an NNX module."""
    parameters = getattr(type(value), "__dataclass_params__", None)
    return not (parameters is not None and parameters.frozen) and flatten_node(value) is not None


def _variable_kind(value: Any) -> str | None:
    """Return the kind of the arrays inside a variable of flax NNX; None for another object."""
    names = _nnx_bases(value)
    return None if "Variable" not in names else "parameter" if "Param" in names else "buffer"


def _nnx_bases(value: Any) -> list[str]:
    return [base.__name__ for base in type(value).__mro__ if base.__module__.startswith("flax.nnx")]


def _key_of(entry: Any) -> Any:
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return str(entry)
