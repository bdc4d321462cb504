"""The arguments of a call: which keywords are options of ours, which are the function's, and what each is called."""

import inspect
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from elementgrad._backends import registry
from elementgrad._backends.base import Backend
from elementgrad._names import pytree
from elementgrad.errors import FrameworkError, OptionError, quoted

NOTHING: Mapping[str, Any] = MappingProxyType({})


def require_callable(function: Any) -> None:
    if not callable(function):
        raise FrameworkError(f"{type(function).__name__} cannot be called; give a function and then its arguments")


def gather_arguments(
    verb: Callable[..., Any],
    function: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    keywords: Mapping[str, Any],
    names_from: Any = None,
) -> tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]:
    """Return the function and its arguments: a keyword that is no option of the verb is an argument.

    The dict of a tokenizer, given alone to a model that takes its keys as parameters, is all of them by name.
    """
    if not callable(function):
        require_callable(function)
    if type(kwargs) not in (dict, MappingProxyType) and not isinstance(kwargs, Mapping):  # a slow check comes last
        raise OptionError(
            f"kwargs={quoted(kwargs)} is not a dict; give one of arguments, as in kwargs={{'mask': mask}}"
        )
    if keywords:
        _check_spelling(verb, function, kwargs, keywords)
        kwargs = {**kwargs, **keywords}
    first = args[0] if len(args) == 1 else None
    if isinstance(first, (dict, UserDict)) and _are_parameters(function, first):
        args, kwargs = (), {**first, **kwargs}
    return function if names_from is None else with_names(function, names_from), args, kwargs


def _check_spelling(
    verb: Callable[..., Any], function: Any, kwargs: Mapping[str, Any], keywords: Mapping[str, Any]
) -> None:
    parameters = _parameters(function)
    for name in keywords:
        if name in kwargs:
            raise OptionError(f"{name} is given both directly and in kwargs=; give it once")
        if name in parameters:
            continue
        # A function that takes any keyword may well mean this one; any other function would refuse it anyway.
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        close = get_close_matches(name, _options(verb), n=1, cutoff=0.8 if takes_any else 0.6)
        if close:
            raise OptionError(
                f"{name}= is not an option of eg.{verb.__name__}; did you mean {close[0]}=? An argument of the "
                f"function by that name goes into kwargs={{{name!r}: ...}}"
            )


def option_error(name: str, value: Any, fits: str) -> OptionError:
    """Return the error about an option of the wrong type, which may be meant for the function."""
    if type(value) in pytree.SIMPLE:
        return OptionError(f"{name}={quoted(value)} {fits}")
    return OptionError(
        f"{name}= of type {type(value).__name__} {fits}; an argument of the function by that name goes into "
        f"kwargs={{{name!r}: ...}}"
    )


@cache
def _options(verb: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(verb).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    backend = registry.backend_of_model(function)
    return _signature(function if backend is None else backend.names.forward_of(function)).parameters


def _are_parameters(function: Any, arguments: Mapping[Any, Any]) -> bool:
    """Return True if a model takes these keys by name, its first parameter among them."""
    if registry.module_of(function)[1] is None:
        return False
    parameters = _parameters(function)
    others = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    first = next(iter(parameters.values()), None)
    if first is not None and first.kind is first.VAR_POSITIONAL:
        # A wrapper passes all on to a model of Hugging Face, which says what its first parameter is called.
        return others and getattr(function, "main_input_name", "") in arguments
    return first is not None and first.name in arguments and all(others or name in parameters for name in arguments)


def backend_of_code(function: Any) -> Backend | None:
    """Return the only framework whose modules, tensors or models the code of a function refers to; or None."""
    matches = {}
    for value in (function, *referenced_values(function)):
        package = value.__name__ if isinstance(value, ModuleType) else str(getattr(value, "__module__", ""))
        names = {registry.PACKAGES.get(each.partition(".")[0]) for each in (package, type(value).__module__)}
        owner = registry.backend_of(value) or registry.module_of(value)[0]
        for backend in registry.imported_backends():
            if owner is backend or backend.name in names:
                matches[backend.name] = backend
    return next(iter(matches.values())) if len(matches) == 1 else None


def referenced_values(function: Any) -> list[Any]:
    """Return what the code of a function refers to outside of itself, as far as it is written in Python."""
    try:
        names = inspect.getclosurevars(inspect.unwrap(getattr(function, "python_function", function)))
    except (TypeError, ValueError):  # it is not written in Python, or uses a name that has no value yet
        return []
    return [*names.nonlocals.values(), *names.globals.values()]


class NamedFunction:
    """A function that calls models which are not among its arguments, with these models for their names."""

    def __init__(self, function: Callable[..., Any], models: Any):
        self.__wrapped__ = function
        self.roots: dict[str, Any] = {}
        for name, model in pytree.named_leaves(models, ""):
            registry.require_keras_on_tensorflow(model)
            root = registry.module_of(model)[1]
            if root is None:
                given = quoted(models) if type(models) in pytree.SIMPLE else type(models).__name__
                raise OptionError(
                    f"names_from={given} is not a model of PyTorch or Keras; give one, or a dict of models by the "
                    "names that they are to have. On JAX pass it to the function, since what a function closes over is "
                    "constant there"
                )
            self.roots[name[1:]] = root

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)


def with_names(function: Callable[..., Any], names_from: Any) -> Callable[..., Any]:
    """Return a function that knows the names of models which it closes over."""
    if registry.backend_of_model(function) is not None:
        raise OptionError("names_from= is for a function that calls a model, and this is a model; leave it out")
    return NamedFunction(function, names_from)


class BoundArguments:
    """Arguments by the names of the parameters that they are for."""

    def __init__(self, arguments: dict[str, Any], positional: int, signature: inspect.Signature | None):
        self.arguments = arguments
        self._positional = positional
        self._signature = signature
        """None if all were given by position."""
        self.keywords: str | None = None
        """The parameter that takes arguments of any name, if there are such; each of them has its own name."""
        if signature is not None:
            parameters = signature.parameters.values()
            self.keywords = next((each.name for each in parameters if each.kind is each.VAR_KEYWORD), None)

    def named_leaves(self, shared: pytree.SharedObjects) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
        """Yield each argument with its leaves by name."""
        for argument, value in self.arguments.items():
            if argument == self.keywords:
                names = [key if key not in self.arguments else f"{argument}.{key}" for key in value]
                leaves = [pytree.named_leaves(*pair, shared=shared) for pair in zip(value.values(), names, strict=True)]
                yield argument, [leaf for named in leaves for leaf in named]
            else:
                yield argument, pytree.named_leaves(value, argument, shared=shared)

    @classmethod
    def of(cls, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> "BoundArguments":
        """Bind arguments to the parameters of a function; for a model, to those of the user's forward."""
        backend = registry.backend_of_model(function)
        function = function if backend is None else backend.names.forward_of(function)
        names = None if kwargs else _positional_names(function, len(args))
        if names is not None:
            return cls(dict(zip(names, args, strict=True)), len(args), None)
        signature = _signature(function)
        if backend is not None:
            signature = _with_keywords(signature, [name for name in backend.names.extra_keywords if name in kwargs])
        return cls(dict(signature.bind(*args, **kwargs).arguments), len(args), signature)

    def split(self, arguments: dict[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return these arguments, or others of the same names, by position and by name as they were given."""
        if self._signature is None:
            return tuple(arguments.values()), {}
        bound = inspect.BoundArguments(self._signature, arguments)  # type: ignore[arg-type]
        # What was given by name is passed on by name: it may be that the function takes it in no other way.
        args, rest = bound.args[: self._positional], bound.args[self._positional :]
        return args, dict(zip(list(arguments)[self._positional :], rest, strict=False)) | bound.kwargs


ANY = inspect.signature(lambda *args, **kwargs: None)
_signatures: WeakKeyDictionary[Any, inspect.Signature] = WeakKeyDictionary()


def _positional_names(function: Callable[..., Any], count: int) -> Sequence[str] | None:
    """Return the names of `count` positional arguments, if a plain function takes just that.

    Its code object knows them, and making a signature takes longer than many a sweep.
    """
    method = getattr(function, "__func__", None)
    plain = function if method is None else method
    if type(plain) is not FunctionType or plain.__dict__:  # a function that wraps another has the other's signature
        return None
    code, first = plain.__code__, 0 if method is None else 1
    limit = code.co_argcount - first
    required = limit - len(plain.__defaults__ or ())
    fits = required <= count <= limit and not code.co_kwonlyargcount
    return code.co_varnames[first : first + count] if fits else None


def positional_parameters(function: Callable[..., Any] | None) -> list[str]:
    """Return the names of the parameters that a function takes by position."""
    parameters = [] if function is None else _signature(function).parameters.values()
    return [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]


def _with_keywords(signature: inspect.Signature, names: Sequence[str]) -> inspect.Signature:
    """Return a signature that takes arguments of these names as well."""
    parameters = list(signature.parameters.values())
    missing = [name for name in names if name not in signature.parameters]
    if not missing or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return signature
    more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in missing]
    return signature.replace(parameters=[*parameters, *more])


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    # Made once for each method of a class, as it takes as long as a small read.
    method = getattr(function, "__func__", None)
    known = _signatures.get(method) if method is not None else None
    if known is None:
        try:
            known = inspect.signature(function)
        except (TypeError, ValueError):  # written in C
            known = ANY
        if method is not None:
            _signatures[method] = known
    return known
