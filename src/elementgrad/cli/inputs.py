"""Inputs as they are given on the command line: arrays from files, JSON, or objects of the user's own files."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from elementgrad import archive, tree
from elementgrad.cli.failures import InputError
from elementgrad.cli.loading import is_reference, load
from elementgrad.cli.results import ARRAYS
from elementgrad.extras import require
from elementgrad.train.numbers import VIEWS
from elementgrad.train.weights import DTYPES

FITS = "give a .npy, .npz, .safetensors or .json file, JSON such as '[1.0, 2.0]', or file.py:name"
NAMED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
IN_ORDER = re.compile(r"arr_\d+")
"""How `numpy.savez` calls arrays that nobody named."""


class Array(tree.Leaf):
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
        return _keyed(_from_file(path), path, key)
    if is_reference(text):
        return tree.mapped(load(text)[0], lambda leaf: _wrapped(leaf, text))
    try:
        return _of_json(json.loads(text), text)
    except RecursionError:
        raise InputError(f"{text!r} has too many brackets inside one another; give a list of numbers") from None
    except ValueError as error:
        if isinstance(error, InputError):
            raise
    exists = f"{text} is a file of another kind" if os.path.isfile(text) else f"{text!r} is no input"
    raise InputError(f"{exists}; {FITS}")


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


def _from_file(path: str) -> Any:
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
        arrays = archive.read(path)
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
            found[name] = Array((values.astype("<u4") << 16).view("<f4"), dtype, f"{path}:{name}")
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
        return Array(array, None if array.dtype.kind == "f" else array.dtype.name, source)
    return value


def _numbers(value: Any) -> bool:
    return all(map(_numbers, value)) if isinstance(value, list) else isinstance(value, int | float)


def _wrapped(value: Any, source: str) -> Any:
    """A NumPy array of numbers as an array to be made a tensor."""
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.name == "bfloat16":
        return Array(value.astype(np.float32), "bfloat16", source)
    if value.dtype.kind not in "biufc":
        raise InputError(f"{source} is an array of {value.dtype}, and a tensor holds numbers")
    return Array(value, value.dtype.name, source)
