"""What a command is about: a function or model, its arguments as tensors, and whose tensors they are."""

import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from types import ModuleType
from typing import Any

from elementgrad import backends, tree
from elementgrad.backends import Backend
from elementgrad.cli.failures import InputError, say
from elementgrad.cli.inputs import Array, read
from elementgrad.cli.loading import find, load, notice
from elementgrad.cli.parser import FRAMEWORKS
from elementgrad.place import Place
from elementgrad.signature import bind


class Subject:
    """A function or model of the user's with its arguments. To be made and used in a `workplace`."""

    def __init__(
        self, model: str, inputs: Sequence[str], named: Sequence[str], framework: str | None, dtype: str | None
    ):
        with notice(f"loading {model}"):
            self.function, module = load(model)
        if not callable(self.function):
            kind = type(self.function).__name__
            raise InputError(
                f"{model} gives {kind}, which cannot be called; name a model, a function, or a factory of one"
            )
        args, kwargs = read(inputs, named)
        self.backend = _backend(model, self.function, module, (args, kwargs), framework)
        self._dtype = dtype
        own = None if dtype is not None else _own_dtype(self.backend, self.function)
        with self.precision():
            tensors = tree.mapped((args, kwargs), lambda leaf: self._tensor(leaf, dtype or own))
        self.args, self.kwargs = tensors
        try:
            bind(self.function, self.args, self.kwargs)
        except TypeError as error:
            raise InputError(f"the inputs do not fit {model}{_signature(self.function)}: {error}") from None

    def precision(self) -> AbstractContextManager[Any]:
        """Where numbers of the dtype that was asked for can be computed with."""
        return self.backend.precision(self._dtype)

    def _tensor(self, leaf: Any, wanted: str | None) -> Any:
        """An array as a tensor: floating ones in the dtype wanted, all others in their own."""
        if not isinstance(leaf, Array):
            return leaf
        tensor = self.backend.tensor(leaf.values)
        if not leaf.floating:
            return tensor
        target = wanted or leaf.dtype or "float32"
        if target != leaf.values.dtype.name:  # else it is made already, as far as the framework is set to have it
            tensor = self.backend.convert(tensor, target)
        given, made = leaf.dtype, self.backend.dtype(tensor)
        if given not in (None, made) and self._dtype is None:
            why = "as the model is" if wanted is not None else f"as {self.backend.name} is set to"
            say(f"{leaf.source} is {given} and used as {made}, {why}; --dtype decides otherwise")
        return tensor


def require_places(*texts: str | None) -> None:
    """Refuse what is no place before anything is loaded."""
    for text in texts:
        if text is not None:
            Place.parse(text)


def step(model: str) -> Callable[[], Any]:
    """A training step of the user's, which takes nothing and is not called yet."""
    function, _ = find(model)
    if not callable(function):
        raise InputError(f"{model} is {type(function).__name__}, which cannot be called; name a step")
    return function  # type: ignore[no-any-return]


def _backend(model: str, function: Any, module: ModuleType, given: Any, framework: str | None) -> Backend:
    """The framework: as told, or the model's, or the inputs', or the one that the user's file uses."""
    if framework is not None:
        return _of_framework(framework)
    held = backends.holder(function)
    if held is not None:
        return held
    owners = {backend.name: backend for backend in map(backends.owner, tree.flat(given)) if backend is not None}
    if len(owners) == 1:
        return next(iter(owners.values()))
    used = _used(function) or _used(module) or [name for name in FRAMEWORKS if sys.modules.get(name) is not None]
    if len(used) == 1:
        return _of_framework(used[0])
    uses = f"uses {' and '.join(used)}" if used else "imports none of torch, tensorflow and jax"
    raise InputError(f"{model} {uses}, so nothing tells whose tensors its inputs are; give --framework")


def _of_framework(name: str) -> Backend:
    try:
        import_module(name)
        made = import_module(f"elementgrad.backends.{name}")
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise InputError(f"{name} is not installed; pip install 'elementgrad[{name}]'") from None
    return made.backend  # type: ignore[no-any-return]


def _used(home: Any) -> list[str]:
    """The frameworks that the names used in a function, or defined in a module, come from."""
    if isinstance(home, ModuleType):
        values = list(vars(home).values())
    else:
        try:
            told = inspect.getclosurevars(inspect.unwrap(home))
        except (TypeError, ValueError):
            return []
        values = [*told.nonlocals.values(), *told.globals.values()]
    names = [value.__name__ if isinstance(value, ModuleType) else type(value).__module__ for value in values]
    names += [str(getattr(value, "__module__", "")) for value in values if callable(value)]
    packages = {name.partition(".")[0] for name in names}
    if "keras" in packages and "keras" in sys.modules:
        packages.add(sys.modules["keras"].config.backend())
    return [name for name in FRAMEWORKS if name in packages]


def _own_dtype(backend: Backend, function: Any) -> str | None:
    """The one floating dtype of all parameters of a model."""
    tensors = [tensor for _, kind, tensor in backend.model(function).held() if kind == "parameter"]
    dtypes = {backend.dtype(tensor) for tensor in tensors if backend.kind(tensor) == "f"}
    return dtypes.pop() if len(dtypes) == 1 else None


def _signature(function: Any) -> str:
    holder = backends.holder(function)
    try:
        return str(inspect.signature(function if holder is None else holder.called(function)))
    except (TypeError, ValueError):
        return ""
