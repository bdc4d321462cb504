"""`eg.diff`: the patch that turns one set of weights into another, found tensor by tensor.

Both sides are `Weights`: a model, a state dict, a file or a folder, of which one tensor at a time is read. They are
compared by bits, a chunk at a time.
"""

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from elementgrad._backends import registry
from elementgrad._backends.registry import not_compiled
from elementgrad._files import writable
from elementgrad._place.grammar import listed
from elementgrad._train.bits import BitArray
from elementgrad._train.entries import Entry, short_place
from elementgrad._train.fingerprint import fingerprint
from elementgrad._train.folder import read_weights
from elementgrad._train.patch import Patch
from elementgrad._train.weights import FileTensor, Weights
from elementgrad.errors import FrameworkError, OptionError, PatchError, warn

CHUNK = 1 << 18
"""The number of elements that are compared at once: they fit the cache."""
BLOCK = 1 << 21
"""Elements after which the pages of mapped files are given back."""
Progress = Callable[[int, int], None]
"""A function of the number of elements that are compared and of all."""


@not_compiled
def diff(
    before: Any,
    after: Any,
    out: str | os.PathLike[str] | None = None,
    only_common: bool = False,
    originals: bool = True,
) -> Patch:
    """Return the patch that turns the weights `before` into the weights `after`.

    They are compared by bits, so that -0.0 is not 0.0 and the payload of a NaN counts, one tensor at a time: a file is
    never loaded whole.

    Args:
        before: A model, a state dict or pytree of arrays, a .safetensors or .npz file, or the folder of a checkpoint.
        after: Weights with the same tensors, in any of these forms.
        out: A file to write the patch to.
        only_common: Leave out tensors that only one side has, or that have another shape or dtype, with a warning.
        originals: Store the original values, so that the patch can be undone without the weights that it was made for;
            otherwise store a checksum of them, by which other weights are refused.

    Returns:
        The patch, with one entry for each tensor that differs.

    Raises:
        PatchError: The tensors of the two do not correspond.

    >>> import numpy as np, elementgrad as eg
    >>> before = {"w": np.zeros((2, 3), np.float32), "b": np.ones(2, np.float32)}
    >>> after = {"w": np.zeros((2, 3), np.float32), "b": np.float32([1, 5])}
    >>> eg.diff(before, after)
    place  elements  shape  dtype    largest change
    b[1]   1         2      float32  4
    """
    if out is not None:
        writable(out, "patch.safetensors")
    patch = compare(weights_of(before, "before"), weights_of(after, "after"), only_common, originals)
    if out is not None:
        patch.write(out)
    return patch


def compare(
    before: Weights,
    after: Weights,
    only_common: bool = False,
    originals: bool = True,
    progress: Progress = lambda done, total: None,
) -> Patch:
    """Return the patch between two sets of weights."""
    pairs = _pairs(before, after, only_common)
    sizes = [math.prod(old.shape) for _, old, _ in pairs]
    done = 0
    entries, buffers = [], []
    for (name, old, new), size in zip(pairs, sizes, strict=True):
        entry = _compare_tensor(name, old, new, originals, before)
        done += size
        progress(done, sum(sizes))
        if entry is not None and old.is_buffer:
            buffers.append(name)
        elif entry is not None:
            entries.append(entry)
    if buffers and not only_common:
        raise PatchError(
            f"{listed(buffers)} are buffers of the model and differ, and patches of a model are for its parameters; "
            "give the state dicts, or only_common=True to leave buffers out"
        )
    if buffers:
        warn(f"{listed(buffers)} differ, and are left out, as they are buffers")
    return Patch(tuple(entries))


def _pairs(before: Weights, after: Weights, only_common: bool) -> list[tuple[str, FileTensor, FileTensor]]:
    """Return the tensors that both sides have, each once; raise an error if the others are not to be left out."""
    pairs: dict[tuple[int, int], tuple[str, FileTensor, FileTensor]] = {}
    problems = []
    # A tied tensor needs a partner by one of its names alone.
    common = before.tensors.keys() & after.tensors.keys()
    known = [{id(side.tensors[name]) for name in common} for side in (before, after)]
    for name in dict.fromkeys([*before.tensors, *after.tensors]):
        old, new = before.tensors.get(name), after.tensors.get(name)
        if old is None or new is None:
            alone, partnered = (old, known[0]) if new is None else (new, known[1])
            # A state dict has no buffers that are not persistent, and a patch of a model none at all.
            if not (alone and alone.is_buffer) and id(alone) not in partnered:
                problems.append(f"{name} ({'new' if old is None else 'gone'})")
        elif (old.shape, old.dtype) != (new.shape, new.dtype):
            problems.append(f"{name} ({old.dtype} of shape {old.shape}, then {new.dtype} of shape {new.shape})")
        else:
            pairs.setdefault((id(old), id(new)), (name, old, new))
    if problems and not only_common:
        raise PatchError(
            f"{len(problems)} tensors are not the same in both: {listed(problems)}; only_common=True leaves them out"
        )
    if problems:
        warn(f"{len(problems)} tensors are not the same in both and are left out: {listed(problems)}")
    return list(pairs.values())


def _compare_tensor(name: str, old: FileTensor, new: FileTensor, originals: bool, before: Weights) -> Entry | None:
    old_bits, new_bits = old.read(), new.read()
    parts = []
    for start in range(0, max(1, len(old_bits)), BLOCK):
        end = start + BLOCK
        left, right = old_bits[start:end], new_bits[start:end]
        changed = changed_positions(left, right)
        parts.append((changed + start, take_rows(right, changed), take_rows(left, changed)))
        old.unload(start, end)
        new.unload(start, end)
    positions, *rows = (np.concatenate(some) for some in zip(*parts, strict=True))
    if not positions.size:
        return None
    values, former = (BitArray(old.dtype, some) for some in rows)
    tied = tuple(other for other in before.names_of(old) if other != name)
    mark = fingerprint(old.shape, old.dtype, lambda some: old_bits[some])
    old.unload()
    return Entry(
        short_place(name, old.shape, positions),
        name,
        old.shape,
        old.dtype,
        positions,
        values,
        former if originals else None,
        mark,
        tied=tied if before.knows_ties else None,
        sha256=None if originals else hashlib.sha256(former.bits.data).hexdigest(),
    )


def changed_positions(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Return where rows of bytes differ, ascending.

    >>> import numpy as np
    >>> changed_positions(np.float32([[0.0], [1.0]]).view(np.uint8), np.float32([[-0.0], [1.0]]).view(np.uint8))
    array([0])
    """
    old, new = _wide(old), _wide(new)
    positions = [np.zeros(0, np.int64)]
    differs = np.empty((min(CHUNK, len(old)), old.shape[1]), bool)
    for start in range(0, len(old), CHUNK):
        left, right = old[start : start + CHUNK], new[start : start + CHUNK]
        chunk = np.not_equal(left, right, out=differs[: len(left)])
        if chunk.any():
            positions.append(np.flatnonzero(chunk[:, 0] if chunk.shape[1] == 1 else chunk.any(1)) + start)
    return np.concatenate(positions)


def take_rows(bits: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return some rows of bytes."""
    rows = _wide(bits)[positions].view(np.uint8)
    rows.setflags(write=False)
    return rows


def _wide(bits: np.ndarray) -> np.ndarray:
    """Return rows of bytes as rows of the widest integers that they divide into, most often one."""
    width = next(width for width in (8, 4, 2, 1) if bits.shape[1] % width == 0)
    return bits.view(f"u{width}") if width > 1 else bits


def weights_of(value: Any, what: str = "weights") -> Weights:
    """Return a model, state dict, file or folder as tensors by name, each of which is read when it is needed."""
    if isinstance(value, Weights):
        return value
    if isinstance(value, str | os.PathLike):
        return read_weights(value)
    backend = registry.backend_of_model(value)
    if backend is not None:
        return _model_weights(value, backend)
    if isinstance(value, Mapping):
        return Weights(dict(state_tensors(value)))
    raise FrameworkError(
        f"{what}={type(value).__name__} holds no weights; give a model, a state dict, a .safetensors or .npz file, or "
        "the folder of a checkpoint"
    )


def _model_weights(model: Any, backend: Any) -> Weights:
    train = backend.load("train")
    trainer = train.trainer(model)
    tensors: dict[str, FileTensor] = {}
    by_id: dict[int, FileTensor] = {}
    for name, tensor in trainer.named_parameters():
        every = np.arange(int(np.prod(tensor.shape))) if trainer.is_distributed else None
        read = _reader(trainer.read_bits, tensor, every)
        weight = FileTensor(trainer.dtype_name(tensor), tensor.shape, read)
        tensors[trainer.stable_name(name)] = by_id.setdefault(id(tensor), weight)
    for name, kind, tensor in backend.names.model(model).named_tensors():
        if kind == "buffer":
            buffer = FileTensor(backend.dtype(tensor), tensor.shape, _reader(train.tensor_bits, tensor), is_buffer=True)
            tensors[name] = by_id.setdefault(id(tensor), buffer)
    return Weights(tensors, knows_ties=True)


def _reader(read: Callable[..., tuple[str, np.ndarray]], *arguments: Any) -> Callable[[], np.ndarray]:
    return lambda: read(*arguments)[1]


def _array_bits(array: np.ndarray) -> np.ndarray:
    return BitArray.of(array).bits


def state_tensors(state: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, FileTensor]]:
    """Yield the tensors of a state dict, those of dicts in it by names with dots."""
    for key, value in state.items():
        name = f"{prefix}{key}"
        backend = registry.backend_of(value)
        if isinstance(value, Mapping):
            yield from state_tensors(value, f"{name}.")
        elif isinstance(value, np.ndarray | np.generic):
            numbers = np.asarray(value)
            yield name, FileTensor(numbers.dtype.name, numbers.shape, partial(_array_bits, numbers))
        elif backend is not None:
            train = backend.load("train")
            dtype = backend.dtype(value)
            yield name, FileTensor(dtype, tuple(value.shape), _reader(train.tensor_bits, value))
        else:
            raise OptionError(f"{name} is {type(value).__name__}, and weights are tensors or arrays; leave it out")
