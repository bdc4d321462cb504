"""What the user calls by `file.py:name` or `package.module:name`.

Inputs as they are given on the command line: arrays from files, JSON, or objects of the user's own files.

What a command is about: a function or model, its arguments as tensors, and whose tensors they are.
"""

import importlib.util
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from elementgrad import _npz
from elementgrad._backends import registry
from elementgrad._backends.base import Backend
from elementgrad._cli.output import InputError, say
from elementgrad._cli.parser import FRAMEWORKS
from elementgrad._cli.results import ARRAYS
from elementgrad._names import pytree
from elementgrad._names.call import BoundArguments
from elementgrad._optional import require
from elementgrad._place.grammar import nearest
from elementgrad._place.place import Place
from elementgrad._train.numbers import VIEWS
from elementgrad._train.weights import DTYPES

OBJECT_FITS = "give file.py:name or package.module:name"


@contextmanager
def workplace() -> Iterator[None]:
    """Where the user's files can be loaded: what they print is no result, and afterwards `sys` is as it was."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # what TensorFlow tells of the machine when it is imported
    path, modules, stdout = sys.path.copy(), set(_loaded), sys.stdout
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        sys.stdout = stdout
        sys.path[:] = path
        for name in set(_loaded) - modules:
            sys.modules.pop(_loaded.pop(name), None)


@contextmanager
def notice(text: str) -> Iterator[None]:
    """Say on a terminal what takes its time, for as long as it does."""
    shown = sys.stderr.isatty()
    if shown:
        print(f"{text} ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def is_reference(text: str) -> bool:
    """Whether a text looks like `file.py:name` or `package.module:name`."""
    home, colon, name = text.rpartition(":")
    dotted = all(part.isidentifier() for part in home.split("."))
    return bool(colon) and (home.endswith(".py") or dotted) and name.removesuffix("()").replace(".", "_").isidentifier()


def load(text: str) -> tuple[Any, ModuleType]:
    """The object that a text names, and the module it stands in; it is called first if it is a factory.

    A class is one, and a function that takes no arguments, and whatever has `()` behind its name.
    """
    found, module = find(text)
    if not text.endswith("()") and not is_factory(found):
        return found, module
    needed = _needed(found)
    if needed:
        raise InputError(f"{text} takes {', '.join(needed)} and cannot be called without; name a factory that can")
    return found(), module


def find(text: str) -> tuple[Any, ModuleType]:
    """The object that a text names, as it is, and the module it stands in."""
    home, colon, name = text.rpartition(":")
    if not colon or not home or not name:
        raise InputError(f"{text!r} names no object; {OBJECT_FITS}")
    module = _object_from_file(home) if home.endswith(".py") else _imported(home, text)
    found: Any = module
    for part in name.removesuffix("()").split("."):
        if not hasattr(found, part):
            known = [other for other in vars(module) if not other.startswith("_")]
            raise InputError(f"{home} has no {name.removesuffix('()')!r}; {nearest(part, known)}")
        found = getattr(found, part)
    return found, module


def is_factory(found: Any) -> bool:
    """Whether an object is there to be called without arguments: a class, or a function that can take none."""
    if inspect.isclass(found):
        return True
    return isinstance(found, FunctionType) and not inspect.signature(found).parameters


def _needed(found: Any) -> list[str]:
    """The arguments that a call cannot do without, as far as can be told."""
    if not callable(found):
        raise InputError(f"{type(found).__name__} cannot be called; leave () out")
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return []
    fixed = [one for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    return [one.name for one in fixed if one.default is one.empty]


_loaded: dict[str, str] = {}
"""Files that are loaded, and the names of their modules."""


def _object_from_file(path: str) -> ModuleType:
    """A file as a module of its own name, loaded once, with its folder in `sys.path` as for `python file.py`."""
    file = os.path.realpath(path)
    key = os.path.normcase(file)
    if not os.path.isfile(file):
        raise InputError(f"{path} is no file; {OBJECT_FITS}")
    if key in _loaded:
        return sys.modules[_loaded[key]]
    sys.path.insert(0, os.path.dirname(file))
    name = os.path.basename(file).removesuffix(".py")
    there = sys.modules.get(name)
    if there is not None and _same(getattr(there, "__file__", None), key):
        return there
    if there is not None:
        name = f"{name}_{len(_loaded)}"  # a module of that name is imported already, from elsewhere
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} cannot be loaded as Python; {OBJECT_FITS}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickles look themselves up there
    _loaded[key] = name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name], _loaded[key]
        raise
    return module


def _same(one: str | None, other: str) -> bool:
    return one is not None and os.path.normcase(os.path.realpath(one)) == other


def _imported(home: str, text: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as for `python -m`
    try:
        return import_module(home)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{home}.".startswith(f"{error.name}."):
            raise
        file = f"; is {home}.py meant?" if os.path.isfile(f"{home}.py") else ""
        raise InputError(f"{text!r}: there is no module {error.name!r}{file or f'; {OBJECT_FITS}'}") from None
    except (TypeError, ValueError):  # a name that no module can have
        raise InputError(f"{text!r} names no module; {OBJECT_FITS}") from None


INPUT_FITS = "give a .npy, .npz, .safetensors or .json file, JSON such as '[1.0, 2.0]', or file.py:name"
NAMED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
IN_ORDER = re.compile(r"arr_\d+")
"""How `numpy.savez` calls arrays that nobody named."""


class InputArray(pytree.Leaf):
    """An array that becomes a tensor, and its dtype where it has one: the numbers of JSON have none."""

    def __init__(self, values: np.ndarray, dtype: str | None, source: str):
        self.values = values
        self.dtype = dtype
        self.source = source

    @property
    def floating(self) -> bool:
        """Whether it has a gradient."""
        return self.values.dtype.kind == "f"


def read(inputs: Sequence[str], named: Sequence[str]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments by position and by name, with an `Array` for each array.

    A file that holds several arrays by name gives several arguments; behind a name of its own it is one, a dict.
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for text, match in [*[(text, None) for text in inputs], *[(text, NAMED.fullmatch(text)) for text in named]]:
        if match is not None:
            _add(kwargs, match[1], _value(match[2]))
            continue
        if NAMED.fullmatch(text) and not os.path.exists(text):
            raise InputError(f"{text!r} stands among the inputs in order; give it by its name, as in --input {text}")
        value = _value(text)
        if not isinstance(value, _Several):
            args.append(value)
            continue
        for name, part in value.items():
            if IN_ORDER.fullmatch(name):
                args.append(part)
            elif name.isidentifier():
                _add(kwargs, name, part)
            else:
                raise InputError(
                    f"{text} holds {name!r}, which is no name of an argument; give all of it as one, as in "
                    f"--input params={text}, or one of its arrays, as in '{text}:{name}'"
                )
    return args, kwargs


class _Several(dict[str, Any]):
    """What a file holds by name."""


def _add(kwargs: dict[str, Any], name: str, value: Any) -> None:
    if name in kwargs:
        raise InputError(f"{name} is given twice; give each argument once")
    kwargs[name] = dict(value) if isinstance(value, _Several) else value


def _value(text: str) -> Any:
    path, key = _split(text)
    if path.endswith(ARRAYS):
        return _keyed(_input_from_file(path), path, key)
    if is_reference(text):
        return pytree.map_tree(load(text)[0], lambda leaf: _wrapped(leaf, text))
    try:
        return _of_json(json.loads(text), text)
    except RecursionError:
        raise InputError(f"{text!r} has too many brackets inside one another; give a list of numbers") from None
    except ValueError as error:
        if isinstance(error, InputError):
            raise
    exists = f"{text} is a file of another kind" if os.path.isfile(text) else f"{text!r} is no input"
    raise InputError(f"{exists}; {INPUT_FITS}")


def _split(text: str) -> tuple[str, str | None]:
    """A file, and what is wanted of it: `data.npz:x`."""
    for ending in ARRAYS:
        path, found, key = text.partition(f"{ending}:")
        if found and not text.endswith(ARRAYS):
            return path + ending, key
    return text, None


def _keyed(value: Any, path: str, key: str | None) -> Any:
    if key is None:
        return value
    if not isinstance(value, Mapping) or key not in value:
        holds = ", ".join(value) if isinstance(value, Mapping) else "one array"
        raise InputError(f"{path} has no {key!r}; it holds {holds}")
    return value[key]


def _input_from_file(path: str) -> Any:
    if path.endswith(".json"):
        with open(path, encoding="utf-8") as file:
            try:
                return _of_json(json.load(file), path)
            except RecursionError:
                raise InputError(f"{path} has too many brackets inside one another; give a list of numbers") from None
            except ValueError as error:
                raise error if isinstance(error, InputError) else InputError(f"{path} is no JSON: {error}") from None
    if path.endswith(".safetensors"):
        return _of_safetensors(path)
    with open(path, "rb") as file:
        zipped = file.read(2) == b"PK"
    try:
        if not zipped:
            return _wrapped(np.load(path, allow_pickle=False), path)
        arrays = _npz.read(path)
    except (ValueError, EOFError) as error:
        raise InputError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
    return _Several({name: _wrapped(array, f"{path}:{name}") for name, array in arrays.items()})


def _of_safetensors(path: str) -> "_Several":
    require("safetensors", f"reading {path}", "train")
    from safetensors import SafetensorError, deserialize

    with open(path, "rb") as file:
        content = file.read()
    try:
        held = deserialize(content)
    except SafetensorError as error:
        raise InputError(f"{path} is no safetensors file: {error}") from None
    found = _Several()
    for name, one in held:
        dtype = DTYPES.get(one["dtype"])
        if dtype is None:
            raise InputError(f"{path}: {name} is {one['dtype']}, which is not read here; store it as F32")
        values = np.frombuffer(bytes(one["data"]), VIEWS[dtype]).reshape(one["shape"])
        if dtype == "bfloat16":  # the upper half of a float32
            found[name] = InputArray((values.astype("<u4") << 16).view("<f4"), dtype, f"{path}:{name}")
        else:
            found[name] = _wrapped(values, f"{path}:{name}")
    return found


def _of_json(value: Any, source: str) -> Any:
    """Lists of numbers are arrays, and a number with a fraction is one of no axes; anything else stays what it is."""
    if isinstance(value, dict):
        return _Several({name: _of_json(part, f"{source}:{name}") for name, part in value.items()})
    if isinstance(value, list) and not _numbers(value):
        return [_of_json(part, source) for part in value]
    if isinstance(value, list | float):
        try:
            array = np.array(value)
        except ValueError:
            raise InputError(f"{source}: the rows of a list have different lengths; give one length") from None
        return InputArray(array, None if array.dtype.kind == "f" else array.dtype.name, source)
    return value


def _numbers(value: Any) -> bool:
    return all(map(_numbers, value)) if isinstance(value, list) else isinstance(value, int | float)


def _wrapped(value: Any, source: str) -> Any:
    """A NumPy array of numbers as an array to be made a tensor."""
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.name == "bfloat16":
        return InputArray(value.astype(np.float32), "bfloat16", source)
    if value.dtype.kind not in "biufc":
        raise InputError(f"{source} is an array of {value.dtype}, and a tensor holds numbers")
    return InputArray(value, value.dtype.name, source)


class CommandTarget:
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
            tensors = pytree.map_tree((args, kwargs), lambda leaf: self._tensor(leaf, dtype or own))
        self.args, self.kwargs = tensors
        try:
            BoundArguments.of(self.function, self.args, self.kwargs)
        except TypeError as error:
            raise InputError(f"the inputs do not fit {model}{_signature(self.function)}: {error}") from None

    def precision(self) -> AbstractContextManager[Any]:
        """Where numbers of the dtype that was asked for can be computed with."""
        return self.backend.precision(self._dtype)

    def _tensor(self, leaf: Any, wanted: str | None) -> Any:
        """An array as a tensor: floating ones in the dtype wanted, all others in their own."""
        if not isinstance(leaf, InputArray):
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
    held = registry.backend_of_model(function)
    if held is not None:
        return held
    owners = {
        backend.name: backend for backend in map(registry.backend_of, pytree.leaves_of(given)) if backend is not None
    }
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
        made = import_module(f"elementgrad._backends.{name}.tensor")
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
    tensors = [tensor for _, kind, tensor in backend.names.model(function).named_tensors() if kind == "parameter"]
    dtypes = {backend.dtype(tensor) for tensor in tensors if backend.kind(tensor) == "f"}
    return dtypes.pop() if len(dtypes) == 1 else None


def _signature(function: Any) -> str:
    holder = registry.backend_of_model(function)
    try:
        return str(inspect.signature(function if holder is None else holder.names.forward_of(function)))
    except (TypeError, ValueError):
        return ""
