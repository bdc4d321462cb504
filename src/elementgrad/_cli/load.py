"""Load the function or model that a command names, and its inputs as tensors of its framework.

Objects are named `file.py:name` or `package.module:name`. Inputs are arrays from files, JSON, or such objects; arrays
become tensors once the framework is known.
"""

import importlib.util
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from elementgrad._backends import registry
from elementgrad._backends.base import Backend
from elementgrad._cleanup import with_cleanup
from elementgrad._cli.output import InputError, say
from elementgrad._cli.parser import FRAMEWORKS
from elementgrad._files import read_npz
from elementgrad._names import pytree
from elementgrad._names.arguments import BoundArguments, referenced_values
from elementgrad._place.grammar import nearest
from elementgrad._place.place import Place, is_pattern
from elementgrad._train.bits import VIEWS
from elementgrad._train.weights import DTYPES
from elementgrad.errors import require_packages

ARRAY_FILES = (".npy", ".npz", ".safetensors", ".json")
"""The files of arrays that are read and written."""
OBJECT_FITS = "give file.py:name or package.module:name"
INPUT_FITS = "give a .npy, .npz, .safetensors or .json file, JSON such as '[1.0, 2.0]', or file.py:name"
NAMED_INPUT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
UNNAMED_ARRAY = re.compile(r"arr_\d+")
"""The names that `numpy.savez` gives to arrays without one."""
_loaded: dict[str, str] = {}
"""Files that are loaded, and the names of their modules."""


@contextmanager
def user_code() -> Iterator[None]:
    """Run code of the user's: what it prints goes to stderr, and `sys` is restored afterwards."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # no messages about the machine when TensorFlow is imported
    path, modules, stdout = sys.path.copy(), set(_loaded), sys.stdout
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        sys.stdout = stdout
        sys.path[:] = path
        for name in set(_loaded) - modules:
            sys.modules.pop(_loaded.pop(name), None)


def require_places(*texts: str | None, single: bool = False) -> None:
    """Raise an error for a text that is not a place, or not a single one, before anything is loaded."""
    for text in texts:
        if text is not None and is_pattern(Place.parse(text).name) and single:
            raise InputError(f"{text} is a pattern of several names, and one place is needed here; give one name")


class CommandTarget:
    """A function or model of the user's with its arguments, to be made and called in `user_code`."""

    def __init__(
        self,
        model: str,
        inputs: Sequence[str],
        named: Sequence[str],
        framework: str | None,
        dtype: str | None,
        needs_inputs: bool = True,
        needs_call: bool = True,
    ):
        with _show_progress(f"loading {model}"):
            self.function, module = load_object(model)
        if not callable(self.function) and (needs_call or registry.backend_of_model(self.function) is None):
            kind = type(self.function).__name__
            raise InputError(
                f"{model} gives {kind}, which cannot be called; name a model, a function, or a factory of one"
            )
        arguments = read_inputs(inputs, named)
        self.backend = _choose_backend(model, self.function, module, arguments, framework)
        self._dtype = dtype
        target_dtype = dtype or _model_dtype(self.backend, self.function)
        with self.precision():
            self.args, self.kwargs = pytree.map_tree(arguments, lambda leaf: self._to_tensor(leaf, target_dtype))
        if not needs_call or (not needs_inputs and not self.args and not self.kwargs):
            return
        try:
            BoundArguments.of(self.function, self.args, self.kwargs)
        except TypeError as error:
            raise InputError(f"the inputs do not fit {model}{_signature(self.function)}: {error}") from None

    # A verb undoes what was left open before it, and so does not see a precision that no verb has set.

    @with_cleanup
    def call(self, verb: Callable[..., Any], **options: Any) -> Any:
        """Call a function of the library with the user's function and its arguments."""
        with self.precision():
            return verb(self.function, *self.args, kwargs=self.kwargs, **options)

    @with_cleanup
    def call_model(self, verb: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a function of the library with the user's model, and not with the model's arguments."""
        with self.precision():
            return verb(self.function, *args, **options)

    def loss(self, function: Callable[..., Any] | None) -> Callable[..., Any]:
        """Return a function of the model that computes the loss, or a step; None for a model that returns the loss."""
        if function is None:
            return self._own_loss
        try:
            parameters = list(inspect.signature(function).parameters)
        except (TypeError, ValueError):  # written in C
            parameters = ["output"]
        if not parameters:
            return function
        if parameters[0] == "model" or not callable(self.function) or not (self.args or self.kwargs):
            return lambda model: function(model, *self.args, **self.kwargs)
        return lambda model: function(model(*self.args, **self.kwargs))

    def _own_loss(self, model: Any) -> Any:
        output = model(*self.args, **self.kwargs)
        return getattr(output, "loss", output)

    def precision(self) -> AbstractContextManager[Any]:
        """Return the context in which numbers of the user's `--dtype` are computed."""
        return self.backend.precision(self._dtype)

    def _to_tensor(self, leaf: Any, dtype: str | None) -> Any:
        """Return an array as a tensor: floating ones in `dtype`, all others in their own."""
        if not isinstance(leaf, InputArray):
            return leaf
        tensor = self.backend.tensor(leaf.values)
        if leaf.values.dtype.kind != "f":
            return tensor
        target = dtype or leaf.dtype or "float32"
        if target != leaf.values.dtype.name:  # else it is made already, as far as the framework is set to have it
            tensor = self.backend.convert(tensor, target)
        new_dtype = self.backend.dtype(tensor)
        if leaf.dtype not in (None, new_dtype) and self._dtype is None:
            why = "as the model is" if dtype is not None else f"as {self.backend.name} is set to"
            say(f"{leaf.source} is {leaf.dtype} and used as {new_dtype}, {why}; --dtype decides otherwise")
        return tensor


@contextmanager
def _show_progress(text: str) -> Iterator[None]:
    """Show a text on a terminal while something runs."""
    is_terminal = sys.stderr.isatty()
    if is_terminal:
        print(f"{text} ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _choose_backend(model: str, function: Any, module: ModuleType, arguments: Any, framework: str | None) -> Backend:
    """Return the framework: as given, or the model's, or the inputs', or the one that the user's file uses."""
    if framework is not None:
        return _load_backend(framework)
    backend = registry.backend_of_model(function)
    if backend is not None:
        return backend
    backends = {backend.name: backend for backend in map(registry.backend_of, pytree.leaves_of(arguments)) if backend}
    if len(backends) == 1:
        return next(iter(backends.values()))
    imported = [name for name in FRAMEWORKS if sys.modules.get(name) is not None]
    used = _frameworks_of(referenced_values(function)) or _frameworks_of(vars(module).values()) or imported
    if len(used) == 1:
        return _load_backend(used[0])
    uses = f"uses {' and '.join(used)}" if used else "imports none of torch, tensorflow and jax"
    raise InputError(f"{model} {uses}, so the framework of its inputs is not known; give --framework")


def _load_backend(framework: str) -> Backend:
    try:
        import_module(framework)
        return import_module(f"elementgrad._backends.{framework}.tensor").backend  # type: ignore[no-any-return]
    except ModuleNotFoundError as error:
        if error.name != framework:
            raise
        raise InputError(f"{framework} is not installed; pip install 'elementgrad[{framework}]'") from None


def _frameworks_of(values: Iterable[Any]) -> list[str]:
    """Return the frameworks that modules, functions and other objects come from."""
    packages = set()
    for value in values:
        packages.add(value.__name__ if isinstance(value, ModuleType) else type(value).__module__)
        if callable(value):
            packages.add(str(getattr(value, "__module__", "")))
    packages = {name.partition(".")[0] for name in packages}
    if "keras" in packages and "keras" in sys.modules:
        packages.add(sys.modules["keras"].config.backend())
    return [name for name in FRAMEWORKS if name in packages]


def _model_dtype(backend: Backend, function: Any) -> str | None:
    """Return the floating dtype of a model's parameters if they all have the same."""
    tensors = [tensor for _, kind, tensor in backend.names.model(function).named_tensors() if kind == "parameter"]
    dtypes = {backend.dtype(tensor) for tensor in tensors if backend.kind(tensor) == "f"}
    return dtypes.pop() if len(dtypes) == 1 else None


def _signature(function: Any) -> str:
    backend = registry.backend_of_model(function)
    try:
        return str(inspect.signature(function if backend is None else backend.names.forward_of(function)))
    except (TypeError, ValueError):
        return ""


def is_reference(text: str) -> bool:
    """Return True for a text that looks like `file.py:name` or `package.module:name`."""
    home, colon, name = text.rpartition(":")
    dotted = all(part.isidentifier() for part in home.split("."))
    return bool(colon) and (home.endswith(".py") or dotted) and name.removesuffix("()").replace(".", "_").isidentifier()


def load_object(text: str) -> tuple[Any, ModuleType]:
    """Return the object that a text names and the module it is in; a factory is called first.

    A factory is a class, a function that takes no arguments, or anything with `()` behind its name.
    """
    value, module = _find_object(text)
    takes_nothing = isinstance(value, FunctionType) and not inspect.signature(value).parameters
    if not text.endswith("()") and not inspect.isclass(value) and not takes_nothing:
        return value, module
    arguments = _required_arguments(value)
    if arguments:
        raise InputError(f"{text} takes {', '.join(arguments)} and cannot be called without; name a factory that can")
    return value(), module


def load_step(text: str) -> Callable[[], Any]:
    """Return a training step of the user's, which takes no arguments, without calling it."""
    function, _ = _find_object(text)
    if not callable(function):
        raise InputError(f"{text} is {type(function).__name__}, which cannot be called; name a step")
    return function  # type: ignore[no-any-return]


def _find_object(text: str) -> tuple[Any, ModuleType]:
    home, colon, name = text.rpartition(":")
    if not colon or not home or not name:
        raise InputError(f"{text!r} names no object; {OBJECT_FITS}")
    module = _load_file(home) if home.endswith(".py") else _import_module(home, text)
    value: Any = module
    for part in name.removesuffix("()").split("."):
        if not hasattr(value, part):
            known = [other for other in vars(module) if not other.startswith("_")]
            raise InputError(f"{home} has no {name.removesuffix('()')!r}; {nearest(part, known)}")
        value = getattr(value, part)
    return value, module


def _required_arguments(value: Any) -> list[str]:
    """Return the names of the arguments that a call needs, as far as they are known."""
    if not callable(value):
        raise InputError(f"{type(value).__name__} cannot be called; leave () out")
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return []
    fixed = [parameter for parameter in parameters if parameter.kind not in VARIADIC]
    return [parameter.name for parameter in fixed if parameter.default is parameter.empty]


def _load_file(path: str) -> ModuleType:
    """Load a file as a module of its name, once, with its folder in `sys.path` as for `python file.py`."""
    file = os.path.realpath(path)
    key = os.path.normcase(file)
    if not os.path.isfile(file):
        raise InputError(f"{path} is not a file; {OBJECT_FITS}")
    if key in _loaded:
        return sys.modules[_loaded[key]]
    sys.path.insert(0, os.path.dirname(file))
    name = os.path.basename(file).removesuffix(".py")
    namesake = sys.modules.get(name)
    if namesake is not None:
        imported_from = getattr(namesake, "__file__", None)
        if imported_from is not None and os.path.normcase(os.path.realpath(imported_from)) == key:
            return namesake
        name = f"{name}_{len(_loaded)}"
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


def _import_module(home: str, text: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as for `python -m`
    try:
        return import_module(home)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{home}.".startswith(f"{error.name}."):
            raise
        hint = f"is {home}.py meant?" if os.path.isfile(f"{home}.py") else OBJECT_FITS
        raise InputError(f"{text!r}: there is no module {error.name!r}; {hint}") from None
    except (TypeError, ValueError):  # a name that no module can have
        raise InputError(f"{text!r} names no module; {OBJECT_FITS}") from None


class InputArray(pytree.Leaf):
    """An array that becomes a tensor. `dtype` is None for the numbers of JSON."""

    def __init__(self, values: np.ndarray, dtype: str | None, source: str):
        self.values = values
        self.dtype = dtype
        self.source = source


class NamedInputs(dict[str, Any]):
    """The arrays of a file, by name."""


def read_inputs(inputs: Sequence[str], named: Sequence[str]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments by position and by name, with an `InputArray` for each array.

    A file that holds several arrays by name gives several arguments; as `--input NAME=FILE` it is one, a dict.
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for text, match in [*[(text, None) for text in inputs], *[(text, NAMED_INPUT.fullmatch(text)) for text in named]]:
        if match is not None:
            _add_keyword(kwargs, match[1], _read_input(match[2]))
            continue
        if NAMED_INPUT.fullmatch(text) and not os.path.exists(text):
            raise InputError(f"{text!r} is among the inputs in order; give it by its name, as in --input {text}")
        value = _read_input(text)
        if not isinstance(value, NamedInputs):
            args.append(value)
            continue
        for name, part in value.items():
            if UNNAMED_ARRAY.fullmatch(name):
                args.append(part)
            elif name.isidentifier():
                _add_keyword(kwargs, name, part)
            else:
                raise InputError(
                    f"{text} holds {name!r}, which is not the name of an argument; give all of it as one, as in "
                    f"--input params={text}, or one of its arrays, as in '{text}:{name}'"
                )
    return args, kwargs


def _add_keyword(kwargs: dict[str, Any], name: str, value: Any) -> None:
    if name in kwargs:
        raise InputError(f"{name} is given twice; give each argument once")
    kwargs[name] = dict(value) if isinstance(value, NamedInputs) else value


def _read_input(text: str) -> Any:
    path, key = _split_key(text)
    if path.endswith(ARRAY_FILES):
        value = _read_file(path)
        if key is None:
            return value
        if not isinstance(value, Mapping) or key not in value:
            holds = ", ".join(value) if isinstance(value, Mapping) else "one array"
            raise InputError(f"{path} has no {key!r}; it holds {holds}")
        return value[key]
    if is_reference(text):
        return pytree.map_tree(load_object(text)[0], lambda leaf: _wrap_array(leaf, text))
    try:
        return _parse_json(text, text, repr(text))
    except InputError:
        raise
    except ValueError:
        subject = f"{text} is a file of another kind" if os.path.isfile(text) else f"{text!r} is not an input"
        raise InputError(f"{subject}; {INPUT_FITS}") from None


def _split_key(text: str) -> tuple[str, str | None]:
    """Split `data.npz:x` into the file and the name of an array in it."""
    for ending in ARRAY_FILES:
        path, separator, key = text.partition(f"{ending}:")
        if separator and not text.endswith(ARRAY_FILES):
            return path + ending, key
    return text, None


def _read_file(path: str) -> Any:
    if path.endswith(".json"):
        with open(path, encoding="utf-8") as file:
            try:
                return _parse_json(file.read(), path, path)
            except InputError:
                raise
            except ValueError as error:
                raise InputError(f"{path} is not valid JSON: {error}") from None
    if path.endswith(".safetensors"):
        return _read_safetensors(path)
    with open(path, "rb") as file:
        zipped = file.read(2) == b"PK"
    try:
        if not zipped:
            return _wrap_array(np.load(path, allow_pickle=False), path)
        arrays = read_npz(path)
    except (ValueError, EOFError) as error:
        raise InputError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
    return NamedInputs({name: _wrap_array(array, f"{path}:{name}") for name, array in arrays.items()})


def _read_safetensors(path: str) -> NamedInputs:
    require_packages("safetensors", f"reading {path}", "train")
    from safetensors import SafetensorError, deserialize

    with open(path, "rb") as file:
        content = file.read()
    try:
        tensors = deserialize(content)
    except SafetensorError as error:
        raise InputError(f"{path} is not a safetensors file: {error}") from None
    inputs = NamedInputs()
    for name, tensor in tensors:
        dtype = DTYPES.get(tensor["dtype"])
        if dtype is None:
            raise InputError(f"{path}: {name} is {tensor['dtype']}, which is not read here; store it as F32")
        values = np.frombuffer(bytes(tensor["data"]), VIEWS[dtype]).reshape(tensor["shape"])
        if dtype == "bfloat16":  # the upper half of a float32
            inputs[name] = InputArray((values.astype("<u4") << 16).view("<f4"), dtype, f"{path}:{name}")
        else:
            inputs[name] = _wrap_array(values, f"{path}:{name}")
    return inputs


DEEPEST = 200
"""The number of brackets inside one another in JSON. How many Python itself can take depends on its version."""


def _parse_json(text: str, source: str, subject: str) -> Any:
    if _depth(text) > DEEPEST:
        raise InputError(f"{subject} has too many brackets inside one another; give a list of numbers")
    return _wrap_json(json.loads(text), source)


def _depth(text: str) -> int:
    characters = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)
    opened, closed = np.isin(characters, list(b"[{")), np.isin(characters, list(b"]}"))
    return int(np.cumsum(opened.astype(np.int64) - closed).max(initial=0))


def _wrap_json(value: Any, source: str) -> Any:
    """Wrap lists of numbers as arrays, and a number with a fraction as one of no axes; keep anything else."""
    if isinstance(value, dict):
        return NamedInputs({name: _wrap_json(part, f"{source}:{name}") for name, part in value.items()})
    if isinstance(value, list) and not _is_numeric(value):
        return [_wrap_json(part, source) for part in value]
    if isinstance(value, list | float):
        try:
            array = np.array(value)
        except ValueError:
            raise InputError(f"{source}: the rows of a list have different lengths; give one length") from None
        return InputArray(array, None if array.dtype.kind == "f" else array.dtype.name, source)
    return value


def _is_numeric(value: Any) -> bool:
    return all(map(_is_numeric, value)) if isinstance(value, list) else isinstance(value, int | float)


def _wrap_array(value: Any, source: str) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.name == "bfloat16":
        return InputArray(value.astype(np.float32), "bfloat16", source)
    if value.dtype.kind not in "biufc":
        raise InputError(f"{source} is an array of {value.dtype}, and a tensor holds numbers")
    return InputArray(value, value.dtype.name, source)
