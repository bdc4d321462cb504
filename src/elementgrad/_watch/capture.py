"""The file of a captured step: a safetensors file with the tensors, and JSON for all that is no tensor.

The metadata are `format`, `version`, `framework`, `content` (the JSON) and `sha256`, a hash of all of it. Nothing is
pickled, and nothing in the file is executed when it is read: arguments that are neither tensors, arrays, numbers nor
texts, in plain containers, are listed as omitted. Results are there as hashes, so that a replay can tell if its bits
are the same.
"""

import hashlib
import json
import os
import sys
from collections import OrderedDict, UserDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from elementgrad._files import replace_file
from elementgrad._train.patch_file import (
    LayoutError,
    StoredTensor,
    find_tensors,
    hash_tensors,
    pack_safetensors,
    unique_names,
)
from elementgrad._watch.backend import CapturedStep, OutputRef, WatchBackend
from elementgrad._watch.report import WatchReport
from elementgrad.errors import OptionError, quoted

FORMAT = "elementgrad-capture"
VERSION = 1
LONGEST = 100_000_000
"""The most bytes of a header."""
STORED = {
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    "bfloat16": "BF16",
    "bool": "BOOL",
}
"""The safetensors names of dtypes; others are stored as bytes."""


@dataclass(frozen=True)
class CaptureFile:
    """A capture that was read: the step, the report, and hashes of the results."""

    step: CapturedStep
    report: WatchReport
    hashes: Mapping[str, str]
    framework: str


def write_capture(path: str | os.PathLike[str], step: CapturedStep, report: WatchReport, backend: WatchBackend) -> None:
    """Write a step, readable by its owner alone, as a whole or not at all."""
    tensors: dict[str, StoredTensor] = {}
    described: dict[str, Any] = {}
    omitted = list(step.omitted)
    # An argument may be given twice, and is stored once.
    stored: dict[int, str] = {}

    def add(name: str, x: Any) -> None:
        dtype, shape, content, properties = (_array_bytes if isinstance(x, np.ndarray) else backend.to_bytes)(x)
        if dtype not in STORED:
            tensors[name] = StoredTensor("U8", (content.size,), content)
        else:
            tensors[name] = StoredTensor(STORED[dtype], shape, content)
        described[name] = {"dtype": dtype, "shape": shape, **properties}

    def encode(value: Any, name: str, above: tuple[Any, ...] = ()) -> Any:
        if value is None or type(value) in (bool, int, str):
            return {"value": value}
        if type(value) is float:
            return {"float": repr(value)}
        if isinstance(value, OutputRef):
            return {"output": value.position}
        if any(value is other for other in above):
            omitted.append(f"{name}, which contains itself")
            return {"omitted": name}
        inner = (*above, value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            fields = [encode(item, f"{name}.{key}", inner) for key, item in zip(value._fields, value, strict=True)]
            return {"namedtuple": [class_name(value), fields]}
        if type(value) in (list, tuple):
            return {type(value).__name__: [encode(item, f"{name}.{n}", inner) for n, item in enumerate(value)]}
        if isinstance(value, (dict, UserDict)) and all(isinstance(key, str) for key in value):
            items = {key: encode(item, f"{name}.{key}", inner) for key, item in value.items()}
            return {"dict": items} if type(value) is dict else {"mapping": [class_name(value), items]}
        if id(value) in stored:
            return {"tensor": stored[id(value)]}
        key = f"arguments/{len(described)}"  # paths are not unique: a key may have a dot in it
        try:
            add(key, value)
        except TypeError:
            omitted.append(f"{name}, of type {type(value).__name__}")
            return {"omitted": name}
        stored[id(value)] = key
        return {"tensor": key}

    arguments = encode(step.arguments, "arguments")
    for kind, some in (("held", step.held), ("random", step.random), ("gradients", step.gradients)):
        for name, x in some.items():
            add(f"{kind}/{name}", x)
    content = {
        "report": report.to_json(),
        "model": step.model,
        "arguments": arguments,
        "tensors": described,
        "results": {name: hash_of(x, backend) for name, x in step.results.items()},
        "settings": step.settings,
        "omitted": omitted,
    }
    meta = {"format": FORMAT, "version": str(VERSION), "framework": backend.name, "content": json.dumps(content)}
    replace_file(
        path, *pack_safetensors(tensors, {**meta, "sha256": hash_tensors(meta, tensors, with_bytes=True)}), mode=0o600
    )


def read_capture(
    path: str | os.PathLike[str], backend_named: Callable[[str], WatchBackend], arguments: Any = None
) -> CaptureFile:
    """Read a capture, or raise an `OptionError` that says what is wrong with the file.

    With `arguments` those count in place of the file's, which may lack some.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise OptionError(f"{quoted(path)} is not a path; give the name of a file, such as 'nan.capture'")
    name = Path(path).name
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            head = file.read(length) if length <= LONGEST else b""
            data = memoryview(file.read()) if head[:1] == b"{" else memoryview(b"")
    except OSError as error:
        raise OptionError(f"{path} cannot be read ({error.strerror}); give the file of a capture") from None
    try:
        header = json.loads(head, object_pairs_hook=unique_names) if len(head) == length else None
    except (ValueError, RecursionError):
        header = None
    meta = header.get("__metadata__") if isinstance(header, dict) else None
    if header is None or not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise OptionError(f"{name} is no capture, or is cut short; give a file that eg.watch wrote")
    if meta.get("version") != str(VERSION):
        raise OptionError(
            f"{name} is a capture of version {str(meta.get('version'))[:20]}, and this elementgrad reads {VERSION}"
        )
    try:
        tensors = find_tensors(header, data)
        if meta.pop("sha256", None) != hash_tensors(meta, tensors, with_bytes=True):
            raise LayoutError("its checksum is not that of what it holds")
        backend = backend_named(meta["framework"])
        return _decode(json.loads(meta["content"]), tensors, backend, arguments)
    except OptionError:
        raise
    except (LayoutError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise OptionError(f"{name} is damaged or cut short ({error}); let eg.watch write it again") from None


def _decode(content: Any, tensors: Mapping[str, StoredTensor], backend: WatchBackend, arguments: Any) -> CaptureFile:
    described = content["tensors"]

    @cache
    def tensor(name: str) -> Any:
        about, data = described[name], np.frombuffer(tensors[name].data, np.uint8)
        shape = tuple(map(int, about["shape"]))
        if about.get("numpy"):
            dtype = np.dtype(about["dtype"])
            if dtype.hasobject:
                raise ValueError(f"{name} is described as objects")
            return np.frombuffer(data.tobytes(), dtype).reshape(shape)
        return backend.from_bytes(str(about["dtype"]), shape, data, about)

    def decode(tree: Any) -> Any:
        ((kind, value),) = tree.items()
        if kind == "tensor":
            return tensor(value)
        if kind == "output":
            return OutputRef(int(value))
        if kind in ("list", "tuple"):
            return (list if kind == "list" else tuple)([decode(item) for item in value])
        if kind == "namedtuple":
            return _named_tuple(value[0], [decode(item) for item in value[1]])
        if kind == "mapping":
            return _mapping(value[0], {key: decode(item) for key, item in value[1].items()})
        if kind == "dict":
            return {key: decode(item) for key, item in value.items()}
        if kind == "omitted":
            raise OptionError(f"the capture lacks {listed_omitted(content['omitted'])}; replay it in the same process")
        return float(value) if kind == "float" else value

    def named(kind: str) -> dict[str, Any]:
        return {name.partition("/")[2]: tensor(name) for name in described if name.startswith(f"{kind}/")}

    step = CapturedStep(
        content["model"],
        decode(content["arguments"]) if arguments is None else arguments,
        named("held"),
        named("random"),
        named("gradients"),
        settings=content["settings"],
        omitted=content["omitted"],
    )
    return CaptureFile(step, WatchReport.from_json(content["report"]), content["results"], backend.name)


def class_name(value: Any) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


def _class_named(name: str) -> Any:
    """Return a class that is there already, or None: nothing is imported for the sake of a file."""
    module, _, path = name.partition(":")
    kind: Any = sys.modules.get(module)
    for part in path.split("."):
        kind = getattr(kind, part, None)
    return kind if isinstance(kind, type) else None


def _mapping(name: str, items: dict[str, Any]) -> Any:
    """Return a dict of a class of its own, such as that of a tokenizer, without a call of anything in that class."""
    kind = _class_named(name)
    if kind is not None and issubclass(kind, UserDict):
        other = object.__new__(kind)
        vars(other)["data"] = items
        return other
    if kind is None or not issubclass(kind, dict):
        return items
    base = OrderedDict if issubclass(kind, OrderedDict) else dict
    made = base.__new__(kind)
    for key, item in items.items():
        base.__setitem__(made, key, item)
    if hasattr(made, "__dict__"):  # some have their items as attributes, too
        vars(made).update({key: item for key, item in items.items() if key in _field_names(kind)})
        vars(made).update({key: None for key in _field_names(kind) if key not in items})
    return made


def _field_names(kind: Any) -> Sequence[str]:
    return list(getattr(kind, "__dataclass_fields__", ()))


def _named_tuple(name: str, entries: Sequence[Any]) -> Any:
    kind = _class_named(name)
    fits = kind is not None and issubclass(kind, tuple) and len(getattr(kind, "_fields", ())) == len(entries)
    return tuple.__new__(kind, entries) if fits else tuple(entries)


def listed_omitted(omitted: Sequence[str]) -> str:
    return ", ".join(omitted[:3]) + (" and more" if len(omitted) > 3 else "")


def hash_of(x: Any, backend: WatchBackend) -> str:
    """Return a hash of the dtype, the shape and the bits of a tensor."""
    dtype, shape, content, _ = backend.to_bytes(x)
    return hashlib.sha256(json.dumps([dtype, shape]).encode() + content.tobytes()).hexdigest()


def require_same_model(captured: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise an error if a step was captured of another model."""
    captured, given = json.loads(json.dumps(captured)), json.loads(json.dumps(given))
    if captured == given:
        return
    names = [name for name in {**captured, **given} if captured.get(name) != given.get(name)]
    name = names[0]
    was, now = [side.get(name, "not there") for side in (captured, given)]
    raise OptionError(
        f"the capture is of another model: {name} was {_plain(was)} and is {_plain(now)}; give the model that was "
        "watched"
    )


def _plain(description: Any) -> str:
    return " ".join(map(str, description)) if isinstance(description, list) else str(description)


def _array_bytes(x: np.ndarray) -> tuple[str, tuple[int, ...], np.ndarray, Mapping[str, Any]]:
    if x.dtype.hasobject or x.dtype.names:
        raise TypeError("objects")
    content = np.frombuffer(np.ascontiguousarray(x).tobytes(), np.uint8)
    return (str(x.dtype) if x.dtype.isnative else x.dtype.str), x.shape, content, {"numpy": True}
