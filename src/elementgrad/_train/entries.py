"""Entries of a patch: the elements of one place, their values and their originals, apart from any model.

Scattered elements have no text of their own: that of a million takes seconds to write and to read. Their place is made
from their positions when it is asked for. An entry can be mapped to a model in which the tensor has another name,
or its axes another order.
"""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import index as as_int
from typing import TYPE_CHECKING, Any

import numpy as np

from elementgrad._place.grammar import nearest
from elementgrad._place.index import Index, IndexArray, Span, to_text
from elementgrad._place.place import Place
from elementgrad._train.bits import VIEWS, BitArray, is_floating
from elementgrad._train.fingerprint import require_fingerprint
from elementgrad._train.history import BitsAt, ascends
from elementgrad.errors import DuplicateError, OptionError, PatchError, quoted

LARGEST = np.iinfo(np.int64).max
Names = Mapping[str, str | tuple[str, Sequence[int]]]
"""Names in a patch to names in a model, or to a name and the order of axes."""
HINT = "give its name here, or the name and the order of axes, such as ('dense/kernel', (1, 0))"
FEW = 64
"""The number of indices that a place is written with in full."""
SHOWN = 3
"""The number of indices that are shown of longer lists."""


def place_label(place: Place) -> str:
    """Return the text of a place for tables and errors, with long lists of indices cut short.

    >>> import numpy as np, elementgrad as eg
    >>> from elementgrad._train.entries import place_label
    >>> place_label(eg.at("w")[3, :]), place_label(eg.at("w")[np.arange(1000)])
    ('w[3, :]', 'w[[0, 1, 2, ...]]')
    """
    if count_indices(place) <= FEW:
        return str(place)
    items = [_item_label(item) if isinstance(item, IndexArray) else to_text((item,))[1:-1] for item in place.index]
    return f"{place.name}[{', '.join(items)}]"


def _item_label(item: IndexArray) -> str:
    if item.values.size <= SHOWN:
        return str(item)
    return str(item.values.reshape(-1)[:SHOWN].tolist())[:-1] + ", ...]"


def count_indices(place: Place) -> int:
    """Return the number of indices that the lists in a place hold, as a measure of the length of its text."""
    return sum(item.values.size for item in place.index if isinstance(item, IndexArray))


class PlaceText:
    """The field `place` of an entry: a text or a place is set, or None for scattered elements, and a text is read."""

    def __set__(self, entry: "Entry", place: "str | Place | None") -> None:
        entry.__dict__["_place"] = place

    def __get__(self, entry: "Entry | None", owner: type) -> str:
        if entry is None:
            raise AttributeError  # no default
        place = entry.__dict__["_place"]
        return place if isinstance(place, str) else str(entry.where)


@dataclass(frozen=True, eq=False)
class Entry:
    """One place of a patch: some elements of one tensor, their originals and their values.

    >>> import numpy as np
    >>> from elementgrad._train.entries import Entry
    >>> from elementgrad._train.bits import BitArray
    >>> old, new = BitArray.of(np.float32([1.0, 2.0])), BitArray.of(np.float32([1.5, 2.0]))
    >>> Entry("fc.bias[:2]", "fc.bias", (10,), "float32", np.array([0, 1]), new, old, "sample:...").largest_change
    0.5
    """

    if TYPE_CHECKING:
        place: Any
    else:
        place: str = PlaceText()  # a descriptor, and no default
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
    originals: BitArray | None
    """The values before, in the tensor's dtype; None if the patch keeps a checksum of them alone."""
    fingerprint: str
    """The fingerprint of the original tensor."""
    tied: tuple[str, ...] | None = None
    """Other names of the tensor where the patch was made; None if they are not known."""
    sha256: str | None = None
    """The SHA-256 of the bytes of the originals, where there are no originals."""
    since: BitsAt | None = None
    """Elements at which the fingerprinted tensor differs from the tensor to patch, with the fingerprinted bytes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", check_shape(self.name, self.shape))
        indices = np.asarray(self.indices)
        if indices.ndim != 1 or (indices.dtype.kind not in "iu" and indices.size):
            raise PatchError(
                f"{self.label}: indices are {indices.dtype} of shape {indices.shape}; give positions in one row"
            )
        if self.originals is None:
            self._check_sha256()
        elif self.originals.dtype != self.dtype:
            raise PatchError(f"{self.label}: the originals are {self.originals.dtype} and the tensor is {self.dtype}")
        originals = len(indices) if self.originals is None else len(self.originals)
        if not len(indices) == len(self.values) == originals:
            raise PatchError(
                f"{self.label}: {len(indices)} indices, {len(self.values)} values and {originals} originals; "
                "give one of each per element"
            )
        size = math.prod(self.shape)
        if len(indices) and not 0 <= indices.min() <= indices.max() < size:
            position = indices[(indices < 0) | (indices >= size)][0]
            raise PatchError(f"{self.label}: position {position} is out of range for {size} elements")
        indices = freeze(np.asarray(indices, np.int64))
        if (twice := _first_repeated(indices)) is not None:
            raise DuplicateError(f"{self.label}: position {twice} occurs twice among the indices")
        object.__setattr__(self, "indices", indices)
        if self.__dict__["_place"] is not None:
            self._check_place(indices)

    def _check_place(self, indices: np.ndarray) -> None:
        if not self.where.name:
            raise PatchError(f"{self.label}: the place names no tensor; write its name in front")
        selection = self.where.select(self.shape)
        if selection.size != len(indices) or not np.array_equal(selection.flat().reshape(-1), indices):
            raise PatchError(
                f"{self.label}: the place names {selection.size} of {math.prod(self.shape)} elements, and the "
                f"{len(indices)} indices are not theirs"
            )

    def _check_sha256(self) -> None:
        if not re.fullmatch("[0-9a-f]{64}", self.sha256 or ""):
            raise PatchError(f"{self.label}: there are no originals and no checksum of them; give one of the two")

    @cached_property
    def where(self) -> Place:
        """The place."""
        place = self.__dict__["_place"]
        if place is None:
            whole = Place(None, self.name)
            return whole.coords(np.stack(np.unravel_index(self.indices, self.shape), 1)) if self.shape else whole
        return place if isinstance(place, Place) else Place.parse(place)

    @property
    def label(self) -> str:
        """The text of the place, with long lists of indices cut short."""
        place = self.__dict__["_place"]
        if isinstance(place, str):
            return place
        if place is None and len(self.indices) > FEW:
            first = np.unravel_index(self.indices[:SHOWN], self.shape)
            return f"{self.name}[{', '.join(str(axis.tolist())[:-1] + ', ...]' for axis in first)}]"
        return place_label(self.where)

    @property
    def is_scattered(self) -> bool:
        """True if the text of the place is not worth writing, as it would hold many indices for its elements."""
        return self.__dict__["_place"] is None or count_indices(self.where) > max(FEW, len(self.indices) // 8)

    def originals_match(self, bits: np.ndarray) -> bool:
        """Return True if these are the bytes of the originals."""
        if self.originals is None:
            return hashlib.sha256(np.ascontiguousarray(bits).data).hexdigest() == self.sha256
        return np.array_equal(bits, self.originals.bits)

    def require_originals(self, what: str) -> BitArray:
        """Return the originals, or raise an error that says what needs them."""
        if self.originals is None:
            raise PatchError(
                f"{self.label}: the patch has only a checksum of the originals, and {what} needs them; "
                "make it with originals=True"
            )
        return self.originals

    def require_applicable(self) -> None:
        """Raise a `PatchError` for an entry that can fit no model, which `inspect` and `apply` both refuse."""
        kind = None if self.__dict__["_place"] is None else self.where.kind
        if kind not in (None, "parameter"):
            raise PatchError(f"{self.label}: the place is of kind {kind!r}, and only parameters are patched")
        if not len(self.indices):
            raise PatchError(f"{self.label}: the place names no element of a tensor of shape {self.shape}")
        alike = self.values.dtype.startswith("complex") == self.dtype.startswith("complex")
        castable = alike and is_floating(self.dtype) and is_floating(self.values.dtype)
        if not (castable or self.values.dtype == self.dtype):
            raise PatchError(f"{self.label}: values of {self.values.dtype} do not fit a tensor of {self.dtype}")
        try:
            require_fingerprint(self.fingerprint)
        except PatchError as error:
            raise PatchError(f"{self.label}: {error}") from None

    @property
    def largest_change(self) -> float | None:
        """The largest distance between a value and its original; None without elements or originals, or if unknown."""
        if not len(self.indices) or self.originals is None or not {self.values.dtype, self.dtype} <= VIEWS.keys():
            return None
        old, new = self.originals.floats(), self.values.floats()
        with np.errstate(invalid="ignore", over="ignore"):
            same = (old == new) | (np.isnan(old) & np.isnan(new))
            return float(np.where(same, 0.0, np.abs(new - old)).max())

    def _key(self) -> tuple[Any, ...]:
        header = (self.name, self.shape, self.dtype, self.fingerprint, self.tied, self.sha256)
        since = None if self.since is None else (self.since.positions.tobytes(), self.since.bits.tobytes())
        return (*header, since, self.indices.tobytes(), self.values, self.originals)

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, Entry) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())


def check_shape(name: str, shape: Any) -> tuple[int, ...]:
    """Return a shape as a tuple, or raise an error if it is none that a tensor can have."""
    try:
        sizes = tuple([as_int(size) for size in shape])
    except TypeError:
        sizes = (-1,)
    if any(not 0 <= size <= LARGEST for size in sizes) or math.prod(sizes) > LARGEST:
        raise PatchError(f"{name}: {shape!r} is not a shape; give a tuple of sizes, such as (3, 4)")
    return sizes


def short_place(name: str, shape: tuple[int, ...], positions: np.ndarray) -> Place | None:
    """Return the place of elements at ascending positions if they are all, whole rows, or few; else None."""
    whole = Place(None, name)
    if not shape or len(positions) == math.prod(shape):
        return whole
    if len(positions) == 1:
        return whole[tuple([int(axis) for axis in np.unravel_index(positions[0], shape)])]
    width = math.prod(shape[1:])
    if len(shape) > 1 and len(positions) % width == 0:
        rows = positions[::width] // width
        if np.array_equal((rows[:, None] * width + np.arange(width)).reshape(-1), positions):
            first, last = int(rows[0]), int(rows[-1]) + 1
            return whole[first if len(rows) == 1 else slice(first, last) if last - first == len(rows) else rows]
    if len(positions) * len(shape) <= FEW:
        return whole.coords(np.stack(np.unravel_index(positions, shape), 1))
    return None


def check_same_tensor(entries: Sequence[Entry]) -> None:
    """Raise an error if entries of one name are not of one tensor, or overlap."""
    first = entries[0]
    for entry in entries[1:]:
        if (entry.shape, entry.dtype) != (first.shape, first.dtype):
            raise PatchError(
                f"{entry.name} is {entry.dtype} of shape {entry.shape} for {entry.label} and {first.dtype} of shape "
                f"{first.shape} for {first.label}; one tensor has one"
            )
        comparable = entry.fingerprint.partition(":")[0] == first.fingerprint.partition(":")[0]
        if comparable and entry.fingerprint != first.fingerprint:
            raise PatchError(f"{entry.label} and {first.label} are of two tensors that were called {entry.name}")
    check_no_overlap(first.name, first.shape, [(entry.label, entry.indices) for entry in entries])


def check_no_overlap(name: str, shape: tuple[int, ...], places: Sequence[tuple[str, np.ndarray]]) -> None:
    """Raise a `DuplicateError` if two places of one tensor name the same element.

    >>> import numpy as np
    >>> from elementgrad._train.entries import check_no_overlap
    >>> check_no_overlap("fc.bias", (4,), [("fc.bias[:2]", np.array([0, 1])), ("fc.bias[1]", np.array([1]))])
    Traceback (most recent call last):
    elementgrad.DuplicateError: fc.bias[1] is named by fc.bias[:2] and by fc.bias[1]; name each element once
    """
    if len(places) < 2:  # each place by itself names every element once
        return
    twice = _first_repeated(np.concatenate([positions for _, positions in places]))
    if twice is not None:
        one, other, *_ = [place for place, positions in places if twice in positions]
        which = element_text(name, shape, twice)
        raise DuplicateError(f"{which} is named by {one} and by {other}; name each element once")


def freeze(array: np.ndarray) -> np.ndarray:
    """Return a read-only array that no other code can write to: a copy, unless it is one already."""
    if array.flags.writeable or not array.flags.owndata:
        array = np.array(array, order="C")
        array.setflags(write=False)
    return array


def _first_repeated(positions: np.ndarray) -> int | None:
    if ascends(positions):
        return None
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
    >>> from elementgrad._train.bits import BitArray
    >>> row = BitArray.of(np.float32([1.0, 2.0]))
    >>> entry = Entry("fc.weight[1]", "fc.weight", (3, 2), "float32", np.array([2, 3]), row, row, "")
    >>> (mapped,) = map_entries([entry], {"fc.weight": ("dense/kernel", (1, 0))})
    >>> mapped.entry.place, mapped.entry.shape, mapped.entry.indices.tolist()
    ('dense/kernel[:, 1]', (2, 3), [1, 4])
    """
    mapping = {} if names is None else names
    if not isinstance(mapping, Mapping):
        raise OptionError(
            f"names={quoted(names)} is not a dict; give one from names in the patch to names in the model"
        )
    known = {name: entry for entry in entries for name in (entry.name, _name_in_place(entry))}
    for name in mapping:
        if name not in known:
            raise OptionError(f"the patch holds no {name!r}, which names= maps; {nearest(str(name), list(known))}")
    return [_map_entry(entry, mapping.get(entry.name, mapping.get(_name_in_place(entry)))) for entry in entries]


def _name_in_place(entry: Entry) -> str:
    return entry.name if entry.__dict__["_place"] is None else entry.where.name or entry.name


def _map_entry(entry: Entry, to: Any) -> MappedEntry:
    axes = tuple(range(len(entry.shape)))
    if to is None:
        return MappedEntry(entry, entry, axes)
    name, order = (to, axes) if isinstance(to, str) else _check_target(entry, to)
    place = None if entry.__dict__["_place"] is None else entry.where
    if order == axes:
        renamed = None if place is None else Place(None, name, place.index, pointwise=place.pointwise)
        return MappedEntry(replace(entry, place=renamed, name=name), entry, axes)
    shape = tuple(entry.shape[axis] for axis in order)
    positions = _permute(entry.indices, entry.shape, order)
    transposed = None if place is None else _transpose(name, place.index, order, shape, positions)
    indices = np.sort(positions) if transposed is None else transposed.select(shape).flat().reshape(-1)
    # The new place may list its elements in another order, which the values have to follow.
    rows = np.argsort(positions)[np.argsort(np.argsort(indices))]
    return MappedEntry(
        replace(
            entry,
            place=transposed,
            name=name,
            shape=shape,
            indices=indices,
            values=entry.values[rows],
            originals=None if entry.originals is None else entry.originals[rows],
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
