"""Patches in the formats of others: adapters of PEFT, textual inversions, and a plain layout of positions and values.

None of these formats identifies the weights that a patch is for, so reading one takes the base: the weights before.
They hold values of elements (flat layout, TrainableTokens, textual inversion), or differences (SHiRA). None has a
checksum either, so files that are written here have one in their metadata, which other programs ignore.
"""

import hashlib
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
from elementgrad._train.bits import VIEWS, BitArray
from elementgrad._train.diff import take_rows, weights_of
from elementgrad._train.entries import Entry
from elementgrad._train.fingerprint import fingerprint
from elementgrad._train.patch import Change, Patch, changes_of, group_by_name, values_of
from elementgrad._train.weights import FileTensor, Weights, pack_tensors
from elementgrad.errors import DtypeError, OptionError, PatchError, warn

FORMATS = ("flat", "trainable-tokens", "shira", "textual-inversion")
CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"
CHECKSUM = "elementgrad.sha256"
"""The checksum of what we write, in the metadata of a file."""
PREFIX = "base_model.model."
"""What PEFT writes in front of the names of a model."""
Elements = tuple[str, np.ndarray, BitArray]
"""The name of a tensor, positions in it, and the values there."""


def read_foreign(path: str | os.PathLike[str], base: Any, place: Any = None) -> Patch:
    """Return the patch that a file or folder of another format makes of weights."""
    weights = weights_of(base, "base")
    found: dict[str, Entry | None] = {}
    for name, positions, values in _read_elements(Path(path), weights, place):
        first = weights.names_of(_find(weights, name))[0]
        entry = _to_entry(weights, first, positions, values)
        if found.setdefault(first, entry) != entry:
            names = listed(weights.names_of(_find(weights, name)))
            raise PatchError(f"{names} are one tensor of the base, and the file changes them differently")
    return Patch(tuple([entry for entry in found.values() if entry is not None]))


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
        replace_file(path, *_pack({str(token): FileTensor(values.dtype, shape, values.bits)}))
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
    if (np.diff(positions[order]) == 0).any():
        raise PatchError(f"{name}: the file changes an element twice; each has one value")
    try:
        new = values[order].round_to(tensor.dtype).bits
    except DtypeError as error:
        raise PatchError(f"{name}: {error}") from None
    mark = fingerprint(tensor.shape, tensor.dtype, lambda some: bits[some])
    empty = BitArray(tensor.dtype, bits[:0])
    tied = tuple(weights.names_of(tensor)[1:]) if weights.knows_ties else None
    entry = Entry(None, name, tensor.shape, tensor.dtype, np.zeros(0, np.int64), empty, empty, mark, tied)
    return Change(entry, positions[order], take_rows(bits, positions[order]), new).to_entry(None)


def _find(weights: Weights, name: str) -> FileTensor:
    if name not in weights.tensors:
        raise PatchError(f"the base has no tensor named {name!r}; {nearest(name, list(weights.tensors))}")
    return weights.tensors[name]


def _read_elements(path: Path, weights: Weights, place: Any) -> Iterator[Elements]:
    if path.is_dir():
        yield from _read_adapter(path, weights)
        return
    tensors = _read_tensors(path)
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
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        raise PatchError(f"{folder} has no {CONFIG} with a peft_type; give the folder of an adapter") from None
    if kind not in ("TRAINABLE_TOKENS", "SHIRA"):
        raise PatchError(
            f"{folder} is an adapter of type {kind}; merge it into the model, and eg.diff(base, merged) is the patch"
        )
    rows = config.get("token_indices")
    tensors = _read_tensors(folder / ADAPTER, rows)
    for name, tensor in tensors.items():
        module, _, part = name.removeprefix(PREFIX).rpartition(".")
        if part == "trainable_tokens_delta":
            if _is_left_out(name, tensors, weights):
                continue
            yield f"{module}.weight", _positions_of_rows(rows, _find_matrix(weights, module)), _numbers(tensor)
        elif part == "shira_weight":
            base = _find_matrix(weights, module)
            at = _integers(_part(tensors, f"{name.removesuffix('weight')}indices"))
            if len(at) != 2 or at.ndim != 2 or (at < 0).any() or (at.max(1, initial=0) >= base.shape).any():
                raise PatchError(f"{name.removesuffix('weight')}indices are not rows and columns of {base.shape}")
            positions = at[0] * base.shape[1] + at[1]
            difference = _numbers(tensor)
            if len(difference) != len(positions):
                raise PatchError(f"{name}: there are {len(positions)} positions and {len(difference)} values")
            old = BitArray(base.dtype, take_rows(base.read(), positions))
            yield f"{module}.weight", positions, _add(name, old, difference)
        elif part != "shira_indices":
            raise PatchError(f"{folder} holds {name}, which is not part of a {kind} adapter that only changes elements")


def _is_left_out(name: str, tensors: Mapping[str, FileTensor], weights: Weights) -> bool:
    """Return True if a table is not in the base: PEFT writes a tied table once for each of its names."""

    def is_known(delta: str) -> bool:
        return f"{delta.removeprefix(PREFIX).rpartition('.')[0]}.weight" in weights.tensors

    bits = tensors[name].read()
    return not is_known(name) and any(
        is_known(other) and np.array_equal(tensor.read(), bits) for other, tensor in tensors.items()
    )


def _read_tensors(path: Path, rows: Any = None) -> dict[str, FileTensor]:
    """Return the tensors of a file, and check them, and the rows of an adapter, if we wrote it."""
    weights = Weights.read(path)
    if weights.metadata.get(CHECKSUM, "") not in ("", _checksum(weights.tensors, rows)):
        raise PatchError(
            f"{path.name} is damaged or was changed by another program (its checksum is not that of what it holds); "
            "write the patch again"
        )
    return weights.tensors


def _checksum(tensors: Mapping[str, FileTensor], rows: Any) -> str:
    """Hash names, dtypes, shapes and bytes of tensors, and the rows of an adapter, which are in its configuration."""
    names = sorted(tensors)
    described = [[name, tensors[name].dtype, tensors[name].shape] for name in names]
    digest = hashlib.sha256(json.dumps([described, rows]).encode())
    for name in names:
        digest.update(np.ascontiguousarray(tensors[name].read()).data)
    return digest.hexdigest()


def _pack(tensors: Mapping[str, FileTensor], rows: Any = None) -> list[Any]:
    """Return the parts of a safetensors file; readers of Hugging Face need to know that PyTorch is to read it."""
    return pack_tensors(tensors, {"format": "pt", CHECKSUM: _checksum(tensors, rows)})


def _part(tensors: Mapping[str, FileTensor], name: str) -> FileTensor:
    if name not in tensors:
        raise PatchError(f"the adapter has no {name}; it holds {listed(list(tensors))}")
    return tensors[name]


def _find_matrix(weights: Weights, module: str) -> FileTensor:
    tensor = _find(weights, f"{module}.weight")
    if len(tensor.shape) != 2:
        raise PatchError(f"{module}.weight is of shape {tensor.shape}, and the adapter changes rows and columns")
    return tensor


def _positions_of_rows(rows: Any, table: FileTensor) -> np.ndarray:
    if not isinstance(rows, list) or not all(type(row) is int and 0 <= row < table.shape[0] for row in rows):
        raise PatchError(
            f"token_indices in {CONFIG} are not a list of rows of the table, which has {table.shape[0]} of them"
        )
    return (np.array(rows, np.int64)[:, None] * table.shape[1] + np.arange(table.shape[1])).reshape(-1)


def _add(name: str, old: BitArray, difference: BitArray) -> BitArray:
    """Add as PEFT does: in the dtype of the weight, or in float32 if that is half precision."""
    wide = "float64" if "float64" in (old.dtype, difference.dtype) else "float32"
    try:
        left, right = (each.round_to(wide).bits.reshape(-1).view(VIEWS[wide]) for each in (old, difference))
    except DtypeError as error:
        raise PatchError(f"{name}: {error}") from None
    return BitArray.of(left + right).round_to(old.dtype)


def _integers(tensor: FileTensor) -> np.ndarray:
    view = np.dtype(VIEWS.get(tensor.dtype, np.void))
    array = np.frombuffer(tensor.read().tobytes(), view).reshape(tensor.shape) if view.kind in "iuf" else None
    with np.errstate(invalid="ignore"):  # PEFT stores them as float32 on Windows
        integers = None if array is None else array.astype(np.int64)
    if integers is None or (integers != array).any():
        raise PatchError(f"indices are {tensor.dtype}, and not integers")
    return integers


def _numbers(tensor: FileTensor) -> BitArray:
    return BitArray(tensor.dtype, tensor.read())


def _module_of(name: str) -> str:
    if not name.endswith(".weight"):
        raise PatchError(f"{name} is not a weight of a module, as adapters of PEFT need; write format='flat'")
    return name.removesuffix(".weight")


def _write_flat(patch: Patch, path: str | os.PathLike[str]) -> None:
    tensors = {}
    for name, entries in group_by_name(patch.entries).items():
        positions, values = values_of(entries)
        tensors[f"{name}.indices"] = FileTensor.of(positions)
        tensors[f"{name}.values"] = FileTensor(entries[0].dtype, (len(positions),), values)
    replace_file(path, *_pack(tensors))


def _rows_of(patch: Patch, base: Weights | None) -> tuple[str, np.ndarray, BitArray, tuple[int, int]]:
    """Return the name of the only tensor, its changed rows, and all values of these rows."""
    names = list(dict.fromkeys(entry.name for entry in patch.entries))
    first = patch.entries[0] if len(names) == 1 else None
    if first is None or len(first.shape) != 2:
        raise PatchError(f"the patch changes {listed(names)}, and this format is for rows of one table")
    width = first.shape[1]
    changed, bits = values_of(patch.entries)
    rows = np.unique(changed // width)
    positions = (rows[:, None] * width + np.arange(width)).reshape(-1)
    if patch.size < len(positions) and base is not None:
        values = bits
        bits = np.array(take_rows(_find(base, names[0]).read(), positions))
        bits[np.searchsorted(positions, changed)] = values
    elif patch.size < len(positions):
        raise PatchError(
            f"the patch changes {patch.size} of {len(positions)} elements of its rows, and this format has whole rows; "
            "give base=, the weights before, for the others"
        )
    return names[0], rows, BitArray(first.dtype, bits), (len(rows), width)


def _write_shira(patch: Patch, path: Path) -> None:
    for entry in patch.entries:
        if len(entry.shape) != 2 or entry.dtype not in ("float32", "float64"):
            raise PatchError(
                f"{entry.label} is {entry.dtype} of shape {entry.shape}, and SHiRA adds to matrices; its differences "
                "are exact enough in float32 and float64 alone"
            )
    changes = changes_of(patch, "SHiRA")
    rank = max([1, *[-(-len(change.positions) // sum(change.entry.shape)) for change in changes.values()]])
    tensors, inexact = {}, 0
    for name, change in changes.items():
        shape, dtype, positions = change.entry.shape, VIEWS[change.entry.dtype], change.positions
        number = rank * sum(shape)
        if number > shape[0] * shape[1]:
            raise PatchError(
                f"{name} has too few elements for the rank {rank} that the patch takes; write format='flat'"
            )
        old, new = (np.ascontiguousarray(bits).reshape(-1).view(dtype) for bits in (change.originals, change.values))
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
        replace_file(temporary / ADAPTER, *_pack(tensors, config.get("token_indices")))
        temporary.rename(path)
    except BaseException:
        for file in (CONFIG, ADAPTER):
            (temporary / file).unlink(missing_ok=True)
        if temporary.exists():
            temporary.rmdir()
        raise
