"""Patches of one model in the words of another: tensors of other names, whose axes stand in another order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index as as_int
from typing import Any

import numpy as np

from elementgrad.errors import OptionError, quoted
from elementgrad.index import Index, IndexArray, Span
from elementgrad.place import Place
from elementgrad.text import nearest
from elementgrad.train.numbers import Numbers
from elementgrad.train.patch import Entry, Patch

Names = Mapping[str, str | tuple[str, Sequence[int]]]
"""Names in the patch, and what each is called in the model, with the order of its axes there if it is another."""
FITS = "give its name here, or the name and the order of axes, such as ('dense/kernel', (1, 0))"


@dataclass(frozen=True)
class Mapped:
    """An entry of a patch as a model has it."""

    entry: Entry
    """In the words of the model. Its fingerprint is still that of the source."""
    source: Entry
    """In the words of the patch."""
    axes: tuple[int, ...]
    """Which axis of the source each axis of the model's tensor is."""

    @property
    def turned(self) -> bool:
        """Whether the axes stand in another order."""
        return self.axes != tuple(range(len(self.axes)))

    def here(self, positions: np.ndarray) -> np.ndarray:
        """Where elements of the flattened source are in the model's tensor."""
        return _permuted(positions, self.source.shape, self.axes)

    def there(self, positions: np.ndarray) -> np.ndarray:
        """Where elements of the model's flattened tensor are in the source."""
        return _permuted(positions, self.entry.shape, tuple(np.argsort(self.axes).tolist()))


def mapped(patch: Patch, names: Names | None) -> list[Mapped]:
    """The entries of a patch in the words of a model; what is not in the map is called the same.

    >>> import numpy as np
    >>> from elementgrad.train.mapping import mapped
    >>> from elementgrad.train.numbers import Numbers
    >>> from elementgrad.train.patch import Entry, Patch
    >>> row = Numbers.of(np.float32([1.0, 2.0]))
    >>> patch = Patch((Entry("fc.weight[1]", "fc.weight", (3, 2), "float32", np.array([2, 3]), row, row, ""),))
    >>> (one,) = mapped(patch, {"fc.weight": ("dense/kernel", (1, 0))})
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


def _mapped(entry: Entry, to: Any) -> Mapped:
    axes = tuple(range(len(entry.shape)))
    if to is None:
        return Mapped(entry, entry, axes)
    name, order = (to, axes) if isinstance(to, str) else _parts(entry, to)
    place = Place.parse(entry.place)
    if order == axes:
        renamed = Place(None, name, place.index, pointwise=place.pointwise)
        return Mapped(replace(entry, place=str(renamed), name=name), entry, axes)
    shape = tuple(entry.shape[axis] for axis in order)
    there = _permuted(entry.indices, entry.shape, order)
    turned = _turned(name, place.index, order, shape, there)
    indices = turned.select(shape).flat().reshape(-1)
    rows = np.argsort(there)[np.argsort(np.argsort(indices))]  # values in the order of the place
    return Mapped(
        replace(
            entry,
            place=str(turned),
            name=name,
            shape=shape,
            indices=indices,
            values=Numbers(entry.values.dtype, entry.values.bits[rows]),
            originals=Numbers(entry.originals.dtype, entry.originals.bits[rows]),
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
