"""Patches in the formats of others: adapters of PEFT, textual inversions, and a plain layout of positions and values.

None of them knows the weights that it is for, so reading one takes the base: the weights before. What they hold are
values of elements (flat layout, TrainableTokens, textual inversion), or differences (SHiRA).
"""

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from elementgrad._files import replace_file
from elementgrad._place.grammar import listed, nearest
from elementgrad._place.place import Place
from elementgrad._train.algebra import Change
from elementgrad._train.diff import take_rows, weights_of
from elementgrad._train.entries import Entry
from elementgrad._train.fingerprint import fingerprint
from elementgrad._train.numbers import VIEWS, BitArray
from elementgrad._train.patch import Patch
from elementgrad._train.weights import FileTensor, Weights, pack_tensors
from elementgrad.errors import OptionError, PatchError, warn

FORMATS = ("flat", "trainable-tokens", "shira", "textual-inversion")
CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What PEFT writes in front of the names of a model."""
Elements = tuple[str, np.ndarray, BitArray]
"""The name of a tensor, positions in it, and the values there."""


def read_foreign(path: str | os.PathLike[str], base: Any, place: Any = None) -> Patch:
    """Return the patch that a file or folder of another format makes of weights."""
    weights = weights_of(base, "base")
    found = [_to_entry(weights, *elements) for elements in _read_elements(Path(path), weights, place)]
    return Patch(tuple([entry for entry in found if entry is not None]))


def write_foreign(
    patch: Patch, path: str | os.PathLike[str], format: str, base: Any = None, token: str | None = None
) -> None:
    """Write a patch in another format."""
    if format not in FORMATS:
        raise OptionError(f"format={format!r} is none of {', '.join(FORMATS)}; give one, or none for a file of our own")
    if (token is None) == (format == "textual-inversion"):
        raise OptionError("token= is the name of the token of a textual inversion; give it with that format alone")
    weights = None if base is None else weights_of(base, "base")
    if format == "flat":
        _write_flat(patch, path)
    elif format == "textual-inversion":
        _, _, values, shape = _rows_of(patch, weights)
        replace_file(path, *pack_tensors({str(token): FileTensor(values.dtype, shape, values.bits)}, {"format": "pt"}))
    elif format == "trainable-tokens":
        name, rows, values, shape = _rows_of(patch, weights)
        module = _module_of(name)
        tensors = {f"{PREFIX}{module}.trainable_tokens_delta": FileTensor(values.dtype, shape, values.bits)}
        config = {"peft_type": "TRAINABLE_TOKENS", "token_indices": rows.tolist(), "target_modules": [module]}
        _write_adapter(Path(path), config, tensors)
    else:
        _write_shira(patch, Path(path))


def _to_entry(weights: Weights, name: str, positions: np.ndarray, values: BitArray) -> Entry | None:
    tensor = _find(weights, name)
    bits = tensor.read()
    if len(positions) and not 0 <= positions.min() <= positions.max() < len(bits):
        raise PatchError(f"{name} has {len(bits)} elements, and the file changes number {positions.max()}")
    if len(positions) != len(values):
        raise PatchError(f"{name}: there are {len(positions)} positions and {len(values)} values")
    order = np.argsort(positions, kind="stable")
    new = values[order].round_to(tensor.dtype).bits
    mark = fingerprint(tensor.shape, tensor.dtype, lambda some: bits[some])
    empty = BitArray(tensor.dtype, bits[:0])
    entry = Entry(None, name, tensor.shape, tensor.dtype, np.zeros(0, np.int64), empty, empty, mark)
    return Change(entry, positions[order], take_rows(bits, positions[order]), new).to_entry(None)


def _find(weights: Weights, name: str) -> FileTensor:
    if name not in weights.tensors:
        raise PatchError(f"the base has no tensor named {name!r}; {nearest(name, list(weights.tensors))}")
    return weights.tensors[name]


def _read_elements(path: Path, weights: Weights, place: Any) -> Iterator[Elements]:
    if path.is_dir():
        yield from _read_adapter(path, weights)
        return
    tensors = Weights.read(path).tensors
    if place is not None:
        yield _read_inversion(path, tensors, weights, place)
        return
    names = [name.removesuffix(".indices") for name in tensors if name.endswith(".indices")]
    if {f"{name}.{part}" for name in names for part in ("indices", "values")} != set(tensors) or not names:
        raise PatchError(
            f"{path.name} holds {listed(list(tensors))}, and not `<name>.indices` and `<name>.values` of each tensor; "
            "of a textual inversion give place=, the rows of its token"
        )
    for name in names:
        yield name, _integers(tensors[f"{name}.indices"]), _numbers(tensors[f"{name}.values"])


def _read_inversion(path: Path, tensors: Mapping[str, FileTensor], weights: Weights, place: Any) -> Elements:
    where = place if isinstance(place, Place) else Place.parse(place)
    if len(tensors) != 1 or not where.name:
        raise PatchError(
            f"{path.name} holds {listed(list(tensors))}; a textual inversion has one tensor, and place= a name"
        )
    (tensor,) = tensors.values()
    return where.name, where.select(_find(weights, where.name).shape).flat().reshape(-1), _numbers(tensor)


def _read_adapter(folder: Path, weights: Weights) -> Iterator[Elements]:
    try:
        config = json.loads((folder / CONFIG).read_bytes())
        kind = config["peft_type"]
    except (OSError, ValueError, LookupError, TypeError):
        raise PatchError(f"{folder} has no {CONFIG} with a peft_type; give the folder of an adapter") from None
    if kind not in ("TRAINABLE_TOKENS", "SHIRA"):
        raise PatchError(
            f"{folder} is an adapter of type {kind}; merge it into the model, and eg.diff(base, merged) is the patch"
        )
    tensors = Weights.read(folder / ADAPTER).tensors
    for name, tensor in tensors.items():
        module, _, part = name.removeprefix(PREFIX).rpartition(".")
        if part == "trainable_tokens_delta":
            rows = np.asarray(config["token_indices"], np.int64)
            width = _find(weights, f"{module}.weight").shape[1]
            yield f"{module}.weight", (rows[:, None] * width + np.arange(width)).reshape(-1), _numbers(tensor)
        elif part == "shira_weight":
            at = _integers(tensors[f"{name.removesuffix('weight')}indices"]).reshape(2, -1)
            base = _find(weights, f"{module}.weight")
            positions = np.ravel_multi_index((at[0], at[1]), base.shape)
            old = BitArray(base.dtype, take_rows(base.read(), positions))
            yield f"{module}.weight", np.asarray(positions, np.int64), _add(old, _numbers(tensor))
        elif part != "shira_indices":
            raise PatchError(f"{folder} holds {name}, which is not part of a {kind} adapter that only changes elements")


def _add(old: BitArray, difference: BitArray) -> BitArray:
    """Add as PEFT does: in the dtype of the weight, or in float32 if that is half precision."""
    wide = "float64" if "float64" in (old.dtype, difference.dtype) else "float32"
    left, right = (each.round_to(wide).bits.reshape(-1).view(VIEWS[wide]) for each in (old, difference))
    return BitArray.of(left + right).round_to(old.dtype)


def _integers(tensor: FileTensor) -> np.ndarray:
    if tensor.dtype not in VIEWS:
        raise PatchError(f"indices are {tensor.dtype}, and not integers")
    array = np.frombuffer(tensor.read().tobytes(), VIEWS[tensor.dtype]).reshape(tensor.shape)
    return array.astype(np.int64)  # PEFT stores them as float32 on Windows


def _numbers(tensor: FileTensor) -> BitArray:
    return BitArray(tensor.dtype, tensor.read())


def _module_of(name: str) -> str:
    if not name.endswith(".weight"):
        raise PatchError(f"{name} is not a weight of a module, as adapters of PEFT need; write format='flat'")
    return name.removesuffix(".weight")


def _write_flat(patch: Patch, path: str | os.PathLike[str]) -> None:
    tensors = {}
    for name in dict.fromkeys(entry.name for entry in patch.entries):
        entries = [entry.ordered() for entry in patch.entries if entry.name == name]
        positions = np.concatenate([entry.indices for entry in entries])
        values = np.concatenate([entry.values.round_to(entry.dtype).bits for entry in entries])
        order = np.argsort(positions, kind="stable")
        tensors[f"{name}.indices"] = FileTensor.of(positions[order])
        tensors[f"{name}.values"] = FileTensor(entries[0].dtype, (len(positions),), values[order])
    replace_file(path, *pack_tensors(tensors))


def _rows_of(patch: Patch, base: Weights | None) -> tuple[str, np.ndarray, BitArray, tuple[int, int]]:
    """Return the name of the only tensor, its changed rows, and all values of these rows."""
    names = list(dict.fromkeys(entry.name for entry in patch.entries))
    first = patch.entries[0] if len(names) == 1 else None
    if first is None or len(first.shape) != 2:
        raise PatchError(f"the patch changes {listed(names)}, and this format is for rows of one table")
    width = first.shape[1]
    rows = np.unique(np.concatenate([entry.indices // width for entry in patch.entries]))
    positions = (rows[:, None] * width + np.arange(width)).reshape(-1)
    if patch.size == len(positions):
        bits = np.zeros((len(positions), first.values.round_to(first.dtype).bits.shape[1]), np.uint8)
    elif base is not None:
        bits = np.array(take_rows(_find(base, names[0]).read(), positions))
    else:
        raise PatchError(
            f"the patch changes {patch.size} of {len(positions)} elements of its rows, and this format has whole rows; "
            "give base=, the weights before, for the others"
        )
    for entry in patch.entries:
        bits[np.searchsorted(positions, entry.indices)] = entry.values.round_to(entry.dtype).bits
    return names[0], rows, BitArray(first.dtype, bits), (len(rows), width)


def _write_shira(patch: Patch, path: Path) -> None:
    changes: dict[str, list[Entry]] = {}
    for entry in patch.entries:
        if len(entry.shape) != 2 or entry.dtype not in ("float32", "float64"):
            raise PatchError(
                f"{entry.label} is {entry.dtype} of shape {entry.shape}, and SHiRA adds to matrices; its differences "
                "are exact enough in float32 and float64 alone"
            )
        changes.setdefault(entry.name, []).append(entry)
    rank, tensors, inexact = 1, {}, 0
    for entries in changes.values():
        count = sum(len(entry.indices) for entry in entries)
        rank = max(rank, -(-count // sum(entries[0].shape)))
    for name, entries in changes.items():
        shape, dtype = entries[0].shape, VIEWS[entries[0].dtype]
        number = rank * sum(shape)
        if number > shape[0] * shape[1]:
            raise PatchError(
                f"{name} has too few elements for the rank {rank} that the patch takes; write format='flat'"
            )
        positions = np.concatenate([entry.indices for entry in entries])
        old = np.concatenate([entry.require_originals("SHiRA").bits for entry in entries]).reshape(-1).view(dtype)
        new = np.concatenate([entry.values.round_to(entry.dtype).bits for entry in entries]).reshape(-1).view(dtype)
        difference = new - old
        inexact += int(((old + difference) != new).sum())
        # A layer of SHiRA has as many elements as its rank says: the rest are others, to which zero is added.
        others = np.setdiff1d(np.arange(min(shape[0] * shape[1], number + len(positions))), positions)
        every = np.concatenate([positions, others[: number - len(positions)]])
        difference = np.concatenate([difference, np.zeros(number - len(positions), dtype)])
        prefix = f"{PREFIX}{_module_of(name)}"
        tensors[f"{prefix}.shira_indices"] = FileTensor.of(np.stack(np.unravel_index(every, shape)).astype(np.int32))
        tensors[f"{prefix}.shira_weight"] = FileTensor.of(difference)
    if inexact:
        warn(f"{inexact} values cannot be written as a difference exactly, and come back rounded")
    modules = [_module_of(name) for name in changes]
    _write_adapter(path, {"peft_type": "SHIRA", "r": rank, "mask_type": "random", "target_modules": modules}, tensors)


def _write_adapter(path: Path, config: Mapping[str, Any], tensors: Mapping[str, FileTensor]) -> None:
    """Write a folder that is not there yet, as a whole or not at all."""
    if path.exists():
        raise OptionError(f"{path} is there already; give a new folder")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        temporary.mkdir()
        common = {"base_model_name_or_path": None, "inference_mode": True, "task_type": None}
        replace_file(temporary / CONFIG, json.dumps({**common, **config}, indent=2).encode())
        replace_file(temporary / ADAPTER, *pack_tensors(tensors, {"format": "pt"}))
        temporary.rename(path)
    except BaseException:
        for file in (CONFIG, ADAPTER):
            (temporary / file).unlink(missing_ok=True)
        if temporary.exists():
            temporary.rmdir()
        raise
