"""Entries of a patch: the elements of one place, their values and their originals, apart from any model.

An entry can be mapped to a model in which the tensor has another name, or its axes another order.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index as as_int
from typing import Any

import numpy as np

from elementgrad._place.grammar import nearest
from elementgrad._place.index import Index, IndexArray, Span
from elementgrad._place.place import Place
from elementgrad._train.fingerprint import require_fingerprint
from elementgrad._train.numbers import VIEWS, BitArray, is_floating
from elementgrad.errors import DuplicateError, OptionError, PatchError, quoted

LARGEST = np.iinfo(np.int64).max
Names = Mapping[str, str | tuple[str, Sequence[int]]]
"""Names in a patch to names in a model, or to a name and the order of axes."""
HINT = "give its name here, or the name and the order of axes, such as ('dense/kernel', (1, 0))"


@dataclass(frozen=True, eq=False)
class Entry:
    """One place of a patch: some elements of one tensor, their originals and their values.

    >>> import numpy as np
    >>> from elementgrad._train.entries import Entry
    >>> from elementgrad._train.numbers import BitArray
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
    """The positions in the flattened tensor, in the order of the place: int64, read-only, unique."""
    values: BitArray
    """The values now; the dtype may be wider than the tensor's."""
    originals: BitArray
    """The values before, in the tensor's dtype."""
    fingerprint: str
    """The fingerprint of the original tensor."""
    tied: tuple[str, ...] | None = None
    """Other names of the tensor where the patch was made; None if they are not known."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", _checked_shape(self.place, self.shape))
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
        if (twice := _first_repeated(indices)) is not None:
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
        """Raise a `PatchError` for an entry that can fit no model, which `inspect` and `apply` both refuse."""
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
        header = (self.place, self.name, self.shape, self.dtype, self.fingerprint, self.tied)
        return (*header, self.indices.tobytes(), self.values, self.originals)

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, Entry) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())


def _checked_shape(place: str, shape: Iterable[Any]) -> tuple[int, ...]:
    try:
        sizes = tuple([as_int(size) for size in shape])
    except TypeError:
        sizes = (-1,)
    if any(not 0 <= size <= LARGEST for size in sizes) or math.prod(sizes) > LARGEST:
        raise PatchError(f"{place}: {shape!r} is not a shape; give a tuple of sizes, such as (3, 4)")
    return sizes


def check_same_tensor(entries: Sequence[Entry]) -> None:
    """Raise an error if entries of one name are not of one tensor, or overlap."""
    first = entries[0]
    for entry in entries[1:]:
        if (entry.shape, entry.dtype) != (first.shape, first.dtype):
            raise PatchError(
                f"{entry.name} is {entry.dtype} of shape {entry.shape} for {entry.place} and {first.dtype} of shape "
                f"{first.shape} for {first.place}; one tensor has one"
            )
        comparable = entry.fingerprint.partition(":")[0] == first.fingerprint.partition(":")[0]
        if comparable and entry.fingerprint != first.fingerprint:
            raise PatchError(f"{entry.place} and {first.place} are of two tensors that were called {entry.name}")
    check_no_overlap(first.name, first.shape, [(entry.place, entry.indices) for entry in entries])


def check_no_overlap(name: str, shape: tuple[int, ...], places: Sequence[tuple[str, np.ndarray]]) -> None:
    """Raise a `DuplicateError` if two places of one tensor name the same element.

    >>> import numpy as np
    >>> from elementgrad._train.entries import check_no_overlap
    >>> check_no_overlap("fc.bias", (4,), [("fc.bias[:2]", np.array([0, 1])), ("fc.bias[1]", np.array([1]))])
    Traceback (most recent call last):
    elementgrad.DuplicateError: fc.bias[1] is named by fc.bias[:2] and by fc.bias[1]; name each element once
    """
    twice = _first_repeated(np.concatenate([np.zeros(0, np.int64), *[positions for _, positions in places]]))
    if twice is not None:
        one, other, *_ = [place for place, positions in places if twice in positions]
        which = element_text(name, shape, twice)
        raise DuplicateError(f"{which} is named by {one} and by {other}; name each element once")


def _first_repeated(positions: np.ndarray) -> int | None:
    ordered = np.sort(positions)
    again = ordered[1:][ordered[1:] == ordered[:-1]]
    return int(again[0]) if again.size else None


def element_text(name: str, shape: tuple[int, ...], position: int) -> str:
    """Return the text of the place of one element, given its flat position."""
    return f"{name}{[int(axis) for axis in np.unravel_index(position, shape)]}" if shape else name


@dataclass(frozen=True)
class MappedEntry:
    """An entry of a patch as a model has it."""

    entry: Entry
    """The entry with the model's name and axes. Its fingerprint is still that of the source."""
    source: Entry
    """The entry as the patch has it."""
    axes: tuple[int, ...]
    """The axis of the source that each axis of the model's tensor is."""

    @property
    def is_transposed(self) -> bool:
        """True if the axes are in another order."""
        return self.axes != tuple(range(len(self.axes)))

    def to_model(self, positions: np.ndarray) -> np.ndarray:
        """Map flat positions in the source to those in the model's tensor."""
        return _permute(positions, self.source.shape, self.axes)

    def to_source(self, positions: np.ndarray) -> np.ndarray:
        """Map flat positions in the model's tensor to those in the source."""
        return _permute(positions, self.entry.shape, tuple(np.argsort(self.axes).tolist()))


def map_entries(entries: Sequence[Entry], names: Names | None) -> list[MappedEntry]:
    """Map entries to the names and axes of a model; a name that is not in `names` stays as it is.

    >>> import numpy as np
    >>> from elementgrad._train.entries import Entry, map_entries
    >>> from elementgrad._train.numbers import BitArray
    >>> row = BitArray.of(np.float32([1.0, 2.0]))
    >>> entry = Entry("fc.weight[1]", "fc.weight", (3, 2), "float32", np.array([2, 3]), row, row, "")
    >>> (mapped,) = map_entries([entry], {"fc.weight": ("dense/kernel", (1, 0))})
    >>> mapped.entry.place, mapped.entry.shape, mapped.entry.indices.tolist()
    ('dense/kernel[:, 1]', (2, 3), [1, 4])
    """
    mapping = {} if names is None else names
    if not isinstance(mapping, Mapping):
        raise OptionError(f"names={quoted(names)} is no map; give a dict from names in the patch to names in the model")
    known = {name: entry for entry in entries for name in (entry.name, _name_in_place(entry))}
    for name in mapping:
        if name not in known:
            raise OptionError(f"the patch holds no {name!r}, which names= maps; {nearest(str(name), list(known))}")
    return [_map_entry(entry, mapping.get(entry.name, mapping.get(_name_in_place(entry)))) for entry in entries]


def _name_in_place(entry: Entry) -> str:
    return Place.parse(entry.place).name or entry.name


def _map_entry(entry: Entry, to: Any) -> MappedEntry:
    axes = tuple(range(len(entry.shape)))
    if to is None:
        return MappedEntry(entry, entry, axes)
    name, order = (to, axes) if isinstance(to, str) else _check_target(entry, to)
    place = Place.parse(entry.place)
    if order == axes:
        renamed = Place(None, name, place.index, pointwise=place.pointwise)
        return MappedEntry(replace(entry, place=str(renamed), name=name), entry, axes)
    shape = tuple(entry.shape[axis] for axis in order)
    positions = _permute(entry.indices, entry.shape, order)
    transposed = _transpose(name, place.index, order, shape, positions)
    indices = transposed.select(shape).flat().reshape(-1)
    # The new place may list its elements in another order, which the values have to follow.
    rows = np.argsort(positions)[np.argsort(np.argsort(indices))]
    return MappedEntry(
        replace(
            entry,
            place=str(transposed),
            name=name,
            shape=shape,
            indices=indices,
            values=BitArray(entry.values.dtype, entry.values.bits[rows]),
            originals=BitArray(entry.originals.dtype, entry.originals.bits[rows]),
        ),
        entry,
        order,
    )


def _check_target(entry: Entry, to: Any) -> tuple[str, tuple[int, ...]]:
    try:
        name, order = to
        axes = tuple([as_int(axis) for axis in order])
    except (TypeError, ValueError):
        name, axes = None, ()
    if not isinstance(name, str):
        raise OptionError(f"names= maps {entry.name!r} to {quoted(to)}; {HINT}")
    if sorted(axes) != list(range(len(entry.shape))):
        raise OptionError(
            f"names= gives {entry.name} the axes {axes}, and it has {len(entry.shape)}; name each of them once, from 0"
        )
    return name, axes


def _permute(positions: np.ndarray, shape: tuple[int, ...], axes: tuple[int, ...]) -> np.ndarray:
    """Map flat positions in a tensor of a shape to those in its transpose."""
    if axes == tuple(range(len(axes))):
        return positions
    coordinates = np.unravel_index(positions, shape)
    permuted = np.ravel_multi_index([coordinates[axis] for axis in axes], [shape[axis] for axis in axes])
    return np.asarray(permuted, np.int64)


def _transpose(name: str, index: Index, axes: tuple[int, ...], shape: tuple[int, ...], positions: np.ndarray) -> Place:
    """Return the place of the same elements in the transpose."""
    whole = Span(None, None, None)
    if any(isinstance(item, IndexArray) and item.boolean for item in index):
        return Place(None, name).coords(np.stack(np.unravel_index(positions, shape), 1))
    missing = [whole] * (len(axes) - sum(item is not Ellipsis for item in index))
    cut = index.index(...) if any(item is Ellipsis for item in index) else len(index)
    items = [*index[:cut], *missing, *index[cut + 1 :]]
    transposed = tuple([items[axis] for axis in axes])
    return Place(None, name, () if all(item == whole for item in transposed) else transposed)
