"""Patches: which elements of which tensors were changed, from what to what, as a value and as a file.

Patches of one model in the words of another: tensors of other names, whose axes stand in another order.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index as as_int
from pathlib import Path
from typing import Any

import numpy as np

from elementgrad._html import Rows, Tabular
from elementgrad._place.grammar import nearest
from elementgrad._place.index import Index, IndexArray, Span
from elementgrad._place.place import Place
from elementgrad._train.entries import check_no_overlap, first_repeated
from elementgrad._train.fingerprint import require_fingerprint
from elementgrad._train.numbers import VIEWS, BitArray, is_floating
from elementgrad._train.patch_file import StoredTensor, pack, replace_file, unpack
from elementgrad.errors import DuplicateError, ElementgradError, OptionError, PatchError, quoted

LARGEST = np.iinfo(np.int64).max
SHOWN = 48
"""Characters of a place in the table."""
STORED = {
    "float64": ("F64", 1),
    "float32": ("F32", 1),
    "float16": ("F16", 1),
    "bfloat16": ("BF16", 1),
    "complex128": ("F64", 2),
    "complex64": ("F32", 2),
}
"""How safetensors calls a dtype, and how many of these make one number; all other dtypes are stored as bytes."""


@dataclass(frozen=True, eq=False)
class Entry:
    """One place of a patch: some elements of one tensor, what they were and what they are now.

    >>> import numpy as np
    >>> from elementgrad._train.numbers import BitArray
    >>> from elementgrad._train.patch import Entry
    >>> old, new = BitArray.of(np.float32([1.0, 2.0])), BitArray.of(np.float32([1.5, 2.0]))
    >>> Entry("fc.bias[:2]", "fc.bias", (10,), "float32", np.array([0, 1]), new, old, "sample:...").largest_change
    0.5
    """

    place: str
    """The text of the place, such as "fc.weight[3, :]"."""
    name: str
    """The name of the tensor; the place may call a shared tensor by another of its names."""
    shape: tuple[int, ...]
    """The shape of the tensor."""
    dtype: str
    """The dtype of the tensor."""
    indices: np.ndarray
    """The positions in the flattened tensor, in the order of the place: int64, read-only, none twice."""
    values: BitArray
    """What the elements are now; the dtype may be wider than the tensor's."""
    originals: BitArray
    """What they were, in the tensor's dtype."""
    fingerprint: str
    """By what the tensor is known."""
    tied: tuple[str, ...] | None = None
    """What else the tensor was called where the patch was made; None where that is not known."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", _shape(self.place, self.shape))
        indices = np.asarray(self.indices)
        if indices.ndim != 1 or (indices.dtype.kind not in "iu" and indices.size):
            raise PatchError(
                f"{self.place}: indices are {indices.dtype} of shape {indices.shape}; give positions in one row"
            )
        if self.originals.dtype != self.dtype:
            raise PatchError(f"{self.place}: the originals are {self.originals.dtype} and the tensor is {self.dtype}")
        if not len(indices) == len(self.values) == len(self.originals):
            raise PatchError(
                f"{self.place}: {len(indices)} indices, {len(self.values)} values and {len(self.originals)} originals; "
                "give one of each per element"
            )
        size = math.prod(self.shape)
        for position in indices[(indices < 0) | (indices >= size)][:1]:
            raise PatchError(f"{self.place}: position {position} is out of range for {size} elements")
        indices = np.array(indices, np.int64)
        if (twice := first_repeated(indices)) is not None:
            raise DuplicateError(f"{self.place}: position {twice} stands twice among the indices")
        self._check_place(indices)
        indices.setflags(write=False)
        object.__setattr__(self, "indices", indices)

    def _check_place(self, indices: np.ndarray) -> None:
        place = Place.parse(self.place)
        if not place.name:
            raise PatchError(f"{self.place}: the place names no tensor; write its name in front")
        selection = place.select(self.shape)
        if selection.size != len(indices) or not np.array_equal(selection.flat().reshape(-1), indices):
            raise PatchError(
                f"{self.place}: the place names {selection.size} of {math.prod(self.shape)} elements, and the "
                f"{len(indices)} indices are not theirs"
            )

    def require_applicable(self) -> None:
        """Raise a `PatchError` for an entry that fits no model whatever, which `inspect` and `apply` both refuse."""
        kind = Place.parse(self.place).kind
        if kind not in (None, "parameter"):
            raise PatchError(f"{self.place}: the place is of kind {kind!r}, and only parameters are patched")
        if not len(self.indices):
            raise PatchError(f"{self.place}: the place names no element of a tensor of shape {self.shape}")
        if not is_floating(self.dtype):
            raise PatchError(f"{self.place}: the tensor is {self.dtype}, and only floats are patched")
        alike = self.values.dtype.startswith("complex") == self.dtype.startswith("complex")
        if not (alike and is_floating(self.values.dtype)):
            raise PatchError(f"{self.place}: values of {self.values.dtype} do not fit a tensor of {self.dtype}")
        try:
            require_fingerprint(self.fingerprint)
        except PatchError as error:
            raise PatchError(f"{self.place}: {error}") from None

    @property
    def largest_change(self) -> float | None:
        """The largest distance between a value and its original; None without elements or for unknown dtypes."""
        if not len(self.indices) or not {self.values.dtype, self.dtype} <= VIEWS.keys():
            return None
        old, new = self.originals.floats(), self.values.floats()
        with np.errstate(invalid="ignore", over="ignore"):
            same = (old == new) | (np.isnan(old) & np.isnan(new))
            return float(np.where(same, 0.0, np.abs(new - old)).max())

    def _key(self) -> tuple[Any, ...]:
        described = (self.place, self.name, self.shape, self.dtype, self.fingerprint, self.tied)
        return (*described, self.indices.tobytes(), self.values, self.originals)

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, Entry) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())


@dataclass(frozen=True, repr=False)
class Patch(Tabular):
    """Changes of named elements, apart from any model: entries in the order in which they were trained.

    >>> import elementgrad as eg
    >>> from elementgrad._train.patch import Entry
    >>> from elementgrad._train.numbers import BitArray
    >>> old, new = BitArray.of(np.float32([0.25])), BitArray.of(np.float32([0.5]))
    >>> eg.Patch((Entry("fc.weight[3, 1]", "fc.weight", (10, 4), "float32", np.array([13]), new, old, "sample:..."),))
    place            elements  shape  dtype    largest change
    fc.weight[3, 1]  1         10x4   float32  0.25
    """

    __module__ = "elementgrad"

    entries: tuple[Entry, ...]
    """One for each place."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "entries", tuple(self.entries))
        together: dict[str, list[Entry]] = {}
        for entry in self.entries:
            together.setdefault(entry.name, []).append(entry)
        for entries in together.values():
            _check_apart(entries)

    @property
    def size(self) -> int:
        """How many elements are changed."""
        return sum(len(entry.indices) for entry in self.entries)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Patch":
        """The patch in a file, after everything in it is checked; nothing in it is ever executed."""
        text, tensors = unpack(path)
        try:
            return cls(tuple(_entries(text, tensors)))
        except ElementgradError as error:
            raise PatchError(f"{Path(path).name}: {error}") from None

    def write(self, path: str | os.PathLike[str]) -> None:
        """Save the patch, as a whole or not at all: what the file held before stays until all is written."""
        tensors: dict[str, StoredTensor] = {}
        for number, entry in enumerate(self.entries):
            positions = entry.indices.astype("<i8").tobytes()
            tensors[f"{number}.indices"] = StoredTensor("I64", entry.indices.shape, positions)
            tensors[f"{number}.values"] = _stored(entry.values)
            tensors[f"{number}.originals"] = _stored(entry.originals)
        described = [
            {
                "place": entry.place,
                "name": entry.name,
                "shape": entry.shape,
                "dtype": entry.dtype,
                "values": entry.values.dtype,
                "fingerprint": entry.fingerprint,
                **({} if entry.tied is None else {"tied": entry.tied}),
            }
            for entry in self.entries
        ]
        replace_file(path, pack({"entries": json.dumps(described)}, tensors))

    def _rows(self) -> Rows:
        rows = [("place", "elements", "shape", "dtype", "largest change")]
        for entry in self.entries:
            place = shorten(entry.place)
            change = "-" if entry.largest_change is None else f"{entry.largest_change:.4g}"
            shape = "x".join(map(str, entry.shape)) or "()"
            rows.append((place, str(len(entry.indices)), shape, entry.dtype, change))
        return rows


def shorten(place: str) -> str:
    """The text of a place in a table."""
    place = "".join(sign if sign.isprintable() else " " for sign in place)  # whatever a file holds
    return place if len(place) <= SHOWN else f"{place[: SHOWN - 4]} ..."


def inspect(path: str | os.PathLike[str]) -> Patch:
    """What is in the file of a patch, without the model: places, shapes, how far the elements moved.

    The file is checked as when it is applied, and printed the patch is a table.

    >>> import tempfile, pathlib, elementgrad as eg
    >>> path = pathlib.Path(tempfile.mkdtemp(), "patch.safetensors")
    >>> eg.Patch(()).write(path)
    >>> eg.inspect(path).size
    0
    """
    return Patch.read(path)


def _shape(place: str, shape: Iterable[Any]) -> tuple[int, ...]:
    try:
        sizes = tuple([as_int(size) for size in shape])
    except TypeError:
        sizes = (-1,)
    if any(not 0 <= size <= LARGEST for size in sizes) or math.prod(sizes) > LARGEST:
        raise PatchError(f"{place}: {shape!r} is not a shape; give a tuple of sizes, such as (3, 4)")
    return sizes


def _check_apart(entries: list[Entry]) -> None:
    """Refuse places of one tensor that overlap, for which of them would win?"""
    first = entries[0]
    for entry in entries[1:]:
        if (entry.shape, entry.dtype) != (first.shape, first.dtype):
            raise PatchError(
                f"{entry.name} is {entry.dtype} of shape {entry.shape} for {entry.place} and {first.dtype} of shape "
                f"{first.shape} for {first.place}; one tensor has one"
            )
        alike = entry.fingerprint.partition(":")[0] == first.fingerprint.partition(":")[0]
        if alike and entry.fingerprint != first.fingerprint:
            raise PatchError(f"{entry.place} and {first.place} are of two tensors that were called {entry.name}")
    check_no_overlap(first.name, first.shape, [(entry.place, entry.indices) for entry in entries])


def _stored(numbers: BitArray) -> StoredTensor:
    dtype, shape = _described(numbers.dtype, len(numbers), numbers.bits.shape[1])
    return StoredTensor(dtype, shape, numbers.bits.tobytes())


def _described(dtype: str, count: int, width: int) -> tuple[str, tuple[int, ...]]:
    """Dtype and shape of some numbers in the file."""
    if dtype not in STORED:
        return "U8", (count, width)
    name, parts = STORED[dtype]
    return name, (count,) if parts == 1 else (count, parts)


def _entries(text: dict[str, str], tensors: dict[str, StoredTensor]) -> Iterable[Entry]:
    """The entries of a file whose bytes are as they were written, which says nothing of who wrote them."""
    try:
        described = json.loads(text["entries"])
        expected = {f"{number}.{part}" for number in range(len(described)) for part in _PARTS}
        if expected != set(tensors):
            raise PatchError(f"{len(described)} entries are described, and the tensors are {', '.join(tensors)}")
        for number, entry in enumerate(described):
            parts = [tensors[f"{number}.{part}"] for part in _PARTS]
            made = _entry(entry, *parts)
            made.require_applicable()
            yield made
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        if isinstance(error, ElementgradError):
            raise
        raise PatchError(f"the entries are not described as in a patch ({error!r})") from None


_PARTS = ("indices", "values", "originals")


def _entry(described: dict[str, Any], indices: StoredTensor, values: StoredTensor, originals: StoredTensor) -> Entry:
    place, name, dtype, wide, mark = [described[key] for key in ("place", "name", "dtype", "values", "fingerprint")]
    if not all(isinstance(text, str) for text in (place, name, dtype, wide, mark)):
        raise PatchError("the entries are not described as in a patch, by texts")
    tied = described.get("tied")
    if tied is not None and not (isinstance(tied, list) and all(isinstance(other, str) for other in tied)):
        raise PatchError(f"{place}: what else the tensor is called is {tied!r}, and not a list of names")
    if indices.dtype != "I64" or len(indices.shape) != 1:
        raise PatchError(f"{place}: indices are {indices.dtype} of shape {indices.shape}, not I64 in one row")
    positions = np.frombuffer(indices.data, "<i8")
    new, old = _numbers(place, wide, values), _numbers(place, dtype, originals)
    return Entry(
        place, name, described["shape"], dtype, positions, new, old, mark, None if tied is None else tuple(tied)
    )


def _numbers(place: str, dtype: str, stored: StoredTensor) -> BitArray:
    count = stored.shape[0] if stored.shape else 0
    width = np.dtype(VIEWS[dtype]).itemsize if dtype in VIEWS else stored.shape[-1] if stored.shape else 0
    if _described(dtype, count, width) != (stored.dtype, stored.shape):
        raise PatchError(f"{place}: {dtype} is not stored as {stored.dtype} of shape {stored.shape}")
    return BitArray(dtype, np.frombuffer(stored.data, np.uint8).reshape(count, width))


Names = Mapping[str, str | tuple[str, Sequence[int]]]
"""Names in the patch, and what each is called in the model, with the order of its axes there if it is another."""
FITS = "give its name here, or the name and the order of axes, such as ('dense/kernel', (1, 0))"


@dataclass(frozen=True)
class MappedEntry:
    """An entry of a patch as a model has it."""

    entry: Entry
    """In the words of the model. Its fingerprint is still that of the source."""
    source: Entry
    """In the words of the patch."""
    axes: tuple[int, ...]
    """Which axis of the source each axis of the model's tensor is."""

    @property
    def is_transposed(self) -> bool:
        """Whether the axes stand in another order."""
        return self.axes != tuple(range(len(self.axes)))

    def to_model(self, positions: np.ndarray) -> np.ndarray:
        """Where elements of the flattened source are in the model's tensor."""
        return _permuted(positions, self.source.shape, self.axes)

    def to_source(self, positions: np.ndarray) -> np.ndarray:
        """Where elements of the model's flattened tensor are in the source."""
        return _permuted(positions, self.entry.shape, tuple(np.argsort(self.axes).tolist()))


def map_entries(patch: Patch, names: Names | None) -> list[MappedEntry]:
    """The entries of a patch in the words of a model; what is not in the map is called the same.

    >>> import numpy as np
    >>> from elementgrad._train.patch import map_entries
    >>> from elementgrad._train.numbers import BitArray
    >>> from elementgrad._train.patch import Entry, Patch
    >>> row = BitArray.of(np.float32([1.0, 2.0]))
    >>> patch = Patch((Entry("fc.weight[1]", "fc.weight", (3, 2), "float32", np.array([2, 3]), row, row, ""),))
    >>> (one,) = map_entries(patch, {"fc.weight": ("dense/kernel", (1, 0))})
    >>> one.entry.place, one.entry.shape, one.entry.indices.tolist()
    ('dense/kernel[:, 1]', (2, 3), [1, 4])
    """
    given = {} if names is None else names
    if not isinstance(given, Mapping):
        raise OptionError(f"names={quoted(names)} is no map; give a dict from names in the patch to names in the model")
    known = {name: entry for entry in patch.entries for name in (entry.name, _called(entry))}
    for name in given:
        if name not in known:
            raise OptionError(f"the patch holds no {name!r}, which names= maps; {nearest(str(name), list(known))}")
    return [_mapped(entry, given.get(entry.name, given.get(_called(entry)))) for entry in patch.entries]


def _called(entry: Entry) -> str:
    """How the place calls the tensor, which may have several names."""
    return Place.parse(entry.place).name or entry.name


def _mapped(entry: Entry, to: Any) -> MappedEntry:
    axes = tuple(range(len(entry.shape)))
    if to is None:
        return MappedEntry(entry, entry, axes)
    name, order = (to, axes) if isinstance(to, str) else _parts(entry, to)
    place = Place.parse(entry.place)
    if order == axes:
        renamed = Place(None, name, place.index, pointwise=place.pointwise)
        return MappedEntry(replace(entry, place=str(renamed), name=name), entry, axes)
    shape = tuple(entry.shape[axis] for axis in order)
    there = _permuted(entry.indices, entry.shape, order)
    turned = _turned(name, place.index, order, shape, there)
    indices = turned.select(shape).flat().reshape(-1)
    rows = np.argsort(there)[np.argsort(np.argsort(indices))]  # values in the order of the place
    return MappedEntry(
        replace(
            entry,
            place=str(turned),
            name=name,
            shape=shape,
            indices=indices,
            values=BitArray(entry.values.dtype, entry.values.bits[rows]),
            originals=BitArray(entry.originals.dtype, entry.originals.bits[rows]),
        ),
        entry,
        order,
    )


def _parts(entry: Entry, to: Any) -> tuple[str, tuple[int, ...]]:
    """Name and order of axes, checked."""
    try:
        name, order = to
        axes = tuple([as_int(axis) for axis in order])
    except (TypeError, ValueError):
        name, axes = None, ()
    if not isinstance(name, str):
        raise OptionError(f"names= maps {entry.name!r} to {quoted(to)}; {FITS}")
    if sorted(axes) != list(range(len(entry.shape))):
        raise OptionError(
            f"names= gives {entry.name} the axes {axes}, and it has {len(entry.shape)}; name each of them once, from 0"
        )
    return name, axes


def _permuted(positions: np.ndarray, shape: tuple[int, ...], axes: tuple[int, ...]) -> np.ndarray:
    """Flat positions, after the axes of a tensor were put into another order."""
    if axes == tuple(range(len(axes))):
        return positions
    coordinates = np.unravel_index(positions, shape)
    found = np.ravel_multi_index([coordinates[axis] for axis in axes], [shape[axis] for axis in axes])
    return np.asarray(found, np.int64)


def _turned(name: str, index: Index, axes: tuple[int, ...], shape: tuple[int, ...], positions: np.ndarray) -> Place:
    """The place of the same elements after the axes were put into another order."""
    whole = Span(None, None, None)
    if any(isinstance(item, IndexArray) and item.boolean for item in index):
        return Place(None, name).coords(np.stack(np.unravel_index(positions, shape), 1))
    missing = [whole] * (len(axes) - sum(item is not Ellipsis for item in index))
    cut = index.index(...) if any(item is Ellipsis for item in index) else len(index)
    items = [*index[:cut], *missing, *index[cut + 1 :]]
    turned = tuple([items[axis] for axis in axes])
    return Place(None, name, () if all(item == whole for item in turned) else turned)
