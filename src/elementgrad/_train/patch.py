"""`Patch`: changes of named elements as a value, apart from any model, and the arithmetic of such values.

`eg.inspect` reads a patch from a file. Patches go one after another (`then`), backwards (`inverse`) and side by side
(`eg.merge`), and say what two of them disagree about (`conflicts`). All of it is computed by bits on ascending
positions, one tensor at a time (`Change`), and elements that end as they began are left out. The fingerprint of a
result is that of the tensor that the first patch was made for. Where a patch begins with a tensor that was never
fingerprinted, as the inverse of one does, `Entry.since` has the bytes that the fingerprinted tensor held instead.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Literal, NamedTuple

import numpy as np

from elementgrad._files import replace_file
from elementgrad._html import Rows, Tabular
from elementgrad._place.place import Place
from elementgrad._train.bits import VIEWS, BitArray
from elementgrad._train.entries import Entry, check_same_tensor, element_text, short_place
from elementgrad._train.fingerprint import sample_positions
from elementgrad._train.history import BitsAt, are_among, ascends, first_bits
from elementgrad._train.patch_file import PatchFile, encode_entries, pack
from elementgrad.errors import ElementgradError, OptionError, PatchError

SHOWN = 48
"""The number of characters of a place in a table."""
Rule = Literal["error", "first", "last"] | Callable[[np.ndarray, np.ndarray], Any]
"""What to do about elements that two patches change to different values."""


@dataclass(frozen=True, repr=False)
class Patch(Tabular):
    """Changes of named elements, apart from any model: entries in the order in which they were trained.

    >>> import numpy as np
    >>> import elementgrad as eg
    >>> from elementgrad._train.entries import Entry
    >>> from elementgrad._train.bits import BitArray
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
        for entries in group_by_name(self.entries).values():
            check_same_tensor(entries)

    @property
    def size(self) -> int:
        """The number of elements that are changed."""
        return sum(len(entry.indices) for entry in self.entries)

    @classmethod
    def read(cls, path: str | os.PathLike[str], base: Any = None, *, place: Any = None) -> "Patch":
        """Read a patch from a file, after everything in it is checked; nothing in it is ever executed.

        Args:
            path: The file that `elements.save` or `Patch.write` wrote. With `base`, a file of another format: the
                folder of a TrainableTokens or SHiRA adapter of PEFT, the flat layout, or a textual inversion.
            base: For another format, the weights that it is for: a model, a state dict, a file or a folder.
            place: For a textual inversion, the rows of its token, such as `"token_embedding.weight[49408]"`.

        Returns:
            The patch.

        Raises:
            PatchError: The file is damaged, or no patch.

        >>> import pathlib, tempfile, torch, elementgrad as eg
        >>> path = pathlib.Path(tempfile.mkdtemp(), "patch.safetensors")
        >>> eg.diff({"w": torch.zeros(3)}, {"w": torch.tensor([0.0, 5.0, 0.0])}).write(path)
        >>> eg.Patch.read(path).size
        1
        """
        if base is not None:
            from elementgrad._train.formats import read_foreign

            return read_foreign(path, base, place)
        file = PatchFile(path)
        entries = tuple(file.entries())
        try:
            return cls(entries)
        except ElementgradError as error:
            raise PatchError(f"{file.name}: {error}") from None

    def write(
        self,
        path: str | os.PathLike[str],
        *,
        compress: bool = False,
        format: str | None = None,
        base: Any = None,
        token: str | None = None,
    ) -> None:
        """Write the patch to a file, as a whole or not at all: the old content stays until all is written.

        Args:
            path: The file, such as `"patch.safetensors"`; for an adapter of PEFT a new folder.
            compress: Compress the tensors of the file, which needs `zstandard`, also to read it.
            format: Another format: `"flat"`, `"trainable-tokens"`, `"shira"` or `"textual-inversion"`.
            base: The weights before, for formats that have whole rows where the patch has parts of them.
            token: The name of the token of a textual inversion.
        """
        if format is not None:
            from elementgrad._train.formats import write_foreign

            write_foreign(self, path, format, base, token)
        else:
            replace_file(path, *pack(*encode_entries(self.entries, compress)))

    def then(self, other: "Patch") -> "Patch":
        """Return one patch with the effect of this one followed by another one.

        Args:
            other: A patch that fits what this one leaves.

        Returns:
            The patch, without elements that end as they began.

        Raises:
            PatchError: The other one does not fit.

        >>> import numpy as np, elementgrad as eg
        >>> a, b, c = ({"w": np.float32(x)} for x in ([1, 2, 3], [1, 5, 6], [1, 7, 3]))
        >>> eg.diff(a, b).then(eg.diff(b, c))
        place  elements  shape  dtype    largest change
        w[1]   1         3      float32  5
        """
        before, after = changes_of(self, "then"), changes_of(other, "then")
        entries = []
        for name in sorted(before.keys() | after.keys()):
            one, two = before.get(name), after.get(name)
            change = _compose(one, two) if one and two else one or two
            assert change is not None
            entries.append(change.to_entry(change.entry.since))
        return _patch_of(entries)

    def inverse(self) -> "Patch":
        """Return the patch that takes this one back, to the bit.

        Values that are wider than their tensor, such as float32 of a bfloat16 weight, are rounded to it first.

        >>> import numpy as np, elementgrad as eg
        >>> patch = eg.diff({"w": np.zeros(3)}, {"w": np.ones(3)})
        >>> patch.then(patch.inverse()).size
        0
        """
        entries = []
        for _, change in sorted(changes_of(self, "inverse").items()):
            backwards = Change(change.entry, change.positions, change.values, change.originals)
            entries.append(backwards.to_entry(_since(change)))
        return _patch_of(entries)

    def conflicts(self, other: "Patch") -> "Conflicts":
        """Return the elements that this patch and another one change to different values.

        Args:
            other: A patch of the same weights.

        Returns:
            A `Conflicts`, which has a length and prints as a table.
        """
        mine, theirs = group_by_name(self.entries), group_by_name(other.entries)
        conflicts = []
        for name in sorted(mine.keys() & theirs.keys()):
            entry = mine[name][0]
            _require_same_tensor(entry, theirs[name][0])
            (left, one), (right, two) = values_of(mine[name]), values_of(theirs[name])
            shared = left[are_among(left, right)]
            one, two = one[np.searchsorted(left, shared)], two[np.searchsorted(right, shared)]
            differs = (one != two).any(1)
            if differs.any():
                values = [BitArray(entry.dtype, bits[differs]) for bits in (one, two)]
                conflicts.append((entry, shared[differs], values[0], values[1]))
        return Conflicts(tuple(conflicts))

    def restricted(self, places: Any) -> "Patch":
        """Return the part of the patch that changes elements of some places.

        Args:
            places: The text of a place, such as `"embedding.weight[:100]"`, a place, or several.

        >>> import numpy as np, elementgrad as eg
        >>> patch = eg.diff({"a": np.zeros(3), "b": np.zeros(2)}, {"a": np.ones(3), "b": np.ones(2)})
        >>> patch.restricted("a[1:]").size, patch.restricted("b").size
        (2, 2)
        """
        texts = [places] if isinstance(places, str | Place) else list(places)
        wanted = [place if isinstance(place, Place) else Place.parse(place) for place in texts]
        for place in wanted:
            if not place.name:
                raise OptionError(f"{place} names no tensor; write its name in front")
        entries = []
        for entry in self.entries:
            selections = [place.select(entry.shape) for place in wanted if place.name == entry.name]
            if any(selection.whole for selection in selections):
                entries.append(entry)
            elif selections:
                positions = np.unique(np.concatenate([selection.flat().reshape(-1) for selection in selections]))
                kept = are_among(entry.indices, positions)
                if kept.any():
                    entries.append(entry if kept.all() else _part(entry, kept))
        return Patch(tuple(entries))

    def _rows(self) -> Rows:
        rows = [("place", "elements", "shape", "dtype", "largest change")]
        for entry in self.entries:
            change = "-" if entry.largest_change is None else f"{entry.largest_change:.4g}"
            shape = "x".join(map(str, entry.shape)) or "()"
            rows.append((shorten(entry.label), str(len(entry.indices)), shape, entry.dtype, change))
        return rows


class Change(NamedTuple):
    """All elements of one tensor that a patch changes, ascending, in the dtype of the tensor."""

    entry: Entry
    """An entry of the tensor, for its name, shape and fingerprint."""
    positions: np.ndarray
    originals: np.ndarray
    values: np.ndarray

    def to_entry(self, since: BitsAt | None) -> Entry | None:
        """Return the entry, without elements that end as they began; None if none are left."""
        kept = (self.originals != self.values).any(1)
        if not kept.any():
            return None
        entry, positions = self.entry, self.positions[kept]
        return replace(
            entry,
            place=short_place(entry.name, entry.shape, positions),
            indices=positions,
            values=BitArray(entry.dtype, self.values[kept]),
            originals=BitArray(entry.dtype, self.originals[kept]),
            since=since,
        )

    def find_shared(self, other: "Change") -> tuple[np.ndarray, np.ndarray]:
        """Return which elements of another change are among these too, and where they are among these."""
        shared = are_among(other.positions, self.positions)
        return shared, np.searchsorted(self.positions, other.positions[shared])

    def extend(self, values: np.ndarray, other: "Change", chosen: np.ndarray) -> "Change":
        """Return these elements with other values, and some elements of another change besides."""
        mine, theirs = (self.positions, self.originals, values), (other.positions, other.originals, other.values)
        arrays = [np.concatenate([array, more[chosen]]) for array, more in zip(mine, theirs, strict=True)]
        order = np.argsort(arrays[0], kind="stable")
        return Change(self.entry, *[array[order] for array in arrays])


def group_by_name(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Return the entries of each tensor."""
    grouped: dict[str, list[Entry]] = {}
    for entry in entries:
        grouped.setdefault(entry.name, []).append(entry)
    return grouped


def _patch_of(entries: Iterable[Entry | None]) -> Patch:
    """Return the patch of entries, some of which turned out to change nothing."""
    return Patch(tuple([entry for entry in entries if entry is not None]))


def changes_of(patch: Patch, what: str) -> dict[str, Change]:
    """Return the changes of a patch by tensor; raise an error if it keeps no originals."""
    return {name: _join(entries, what) for name, entries in group_by_name(patch.entries).items()}


def _join(entries: Sequence[Entry], what: str) -> Change:
    positions = np.concatenate([entry.indices for entry in entries])
    originals = np.concatenate([entry.require_originals(what).bits for entry in entries])
    values = np.concatenate([entry.values.round_to(entry.dtype).bits for entry in entries])
    order = np.argsort(positions, kind="stable")
    since = first_bits(entry.since for entry in reversed(entries))
    return Change(replace(entries[0], since=since), positions[order], originals[order], values[order])


def _compose(first: Change, second: Change) -> Change:
    _require_same_tensor(first.entry, second.entry)
    again, at = first.find_shared(second)
    differs = (first.values[at] != second.originals[again]).any(1)
    if differs.any():
        where = element_text(first.entry.name, first.entry.shape, int(second.positions[again][differs][0]))
        raise PatchError(f"the second patch does not fit what the first leaves: {where} is another value there")
    # If the first changes nothing that a fingerprint covers, it leaves a tensor with the same fingerprint.
    if _since(first) is None and second.entry.since is None and _are_apart(first.entry, second.entry):
        raise PatchError(
            f"the second patch does not fit what the first leaves: it was made for another tensor that was called "
            f"{first.entry.name}; give one that was made after the first"
        )
    values = first.values.copy()
    values[at] = second.values[again]
    return first.extend(values, second, ~again)


def _require_same_tensor(first: Entry, second: Entry) -> None:
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        raise PatchError(
            f"{first.name} is {first.dtype} of shape {first.shape} in the one patch and {second.dtype} of shape "
            f"{second.shape} in the other; give patches of one model"
        )


def _are_apart(first: Entry, second: Entry) -> bool:
    """Return True if two fingerprints, both of samples or both of all elements, are those of different tensors."""
    marks = first.fingerprint, second.fingerprint
    return marks[0] != marks[1] and len({mark.partition(":")[0] for mark in marks}) == 1


def _since(change: Change) -> BitsAt | None:
    """Return where the fingerprinted tensor holds other bytes than a tensor after a change."""
    entry = change.entry
    positions, originals, values = change.positions, change.originals, change.values
    if entry.fingerprint.startswith("sample:"):  # others do not count
        counted = are_among(positions, sample_positions(entry.shape))
        positions, originals, values = positions[counted], originals[counted], values[counted]
    former = first_bits([entry.since, BitsAt(positions, originals)])
    assert former is not None
    # Bytes that the change has brought back to those of the fingerprinted tensor need no mention.
    at = np.minimum(np.searchsorted(positions, former.positions), max(len(positions) - 1, 0))
    if len(positions):
        same = (positions[at] == former.positions) & (values[at] == former.bits).all(1)
        former = BitsAt(former.positions[~same], former.bits[~same])
    return former if len(former.positions) else None


class Conflict(NamedTuple):
    """One element that two patches change to different values."""

    place: str
    first: Any
    second: Any


@dataclass(frozen=True, repr=False, eq=False)
class Conflicts(Tabular):
    """The elements that two patches change to different values; printed it is a table.

    Made by `patch.conflicts`. It has a length, and gives a `Conflict` (place, first value, second value) for each.

    >>> import numpy as np, elementgrad as eg
    >>> w, one, two = ({"w": np.float32(x)} for x in ([1, 2, 3], [1, 5, 6], [1, 7, 6]))
    >>> eg.diff(w, one).conflicts(eg.diff(w, two))
    place  first  second
    w[1]   5      7
    """

    __module__ = "elementgrad"

    entries: tuple[tuple[Entry, np.ndarray, BitArray, BitArray], ...]
    """For each tensor an entry of it, positions, and the values of the one and of the other patch."""

    def __len__(self) -> int:
        return sum(len(positions) for _, positions, _, _ in self.entries)

    def __iter__(self) -> Iterator[Conflict]:
        for entry, positions, first, second in self.entries:
            for position, one, other in zip(positions, _to_shown(first), _to_shown(second), strict=True):
                yield Conflict(element_text(entry.name, entry.shape, int(position)), one, other)

    def _rows(self) -> Rows:
        return [("place", "first", "second"), *[(place, f"{one:.6g}", f"{other:.6g}") for place, one, other in self]]


def _to_shown(values: BitArray) -> Any:
    return values.floats() if values.dtype in VIEWS else np.full(len(values), np.nan)


def values_of(entries: Sequence[Entry]) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions that entries of one tensor change, ascending, and the values there in its dtype."""
    positions = np.concatenate([entry.indices for entry in entries])
    order = np.argsort(positions, kind="stable")
    return positions[order], np.concatenate([entry.values.round_to(entry.dtype).bits for entry in entries])[order]


def merge(patches: Iterable[Patch], on_conflict: Rule = "error") -> Patch:
    """Return one patch with the changes of several, all made for the same weights.

    Args:
        patches: The patches.
        on_conflict: What to do about elements that two of them change to different values: `"error"`, take the value
            of the `"first"` or of the `"last"`, or a function of the values of the one and of the other, as float64
            arrays for one tensor, that returns those to take.

    Returns:
        The patch.

    Raises:
        PatchError: They disagree, or were made for different weights.

    >>> import numpy as np, elementgrad as eg
    >>> w, one, two = ({"w": np.float32(x)} for x in ([1, 2, 3], [1, 5, 3], [1, 7, 6]))
    >>> p, q = eg.diff(w, one), eg.diff(w, two)
    >>> eg.apply(w, eg.merge([p, q], on_conflict="first"))["w"].tolist()
    [1.0, 5.0, 6.0]
    >>> eg.apply(w, eg.merge([p, q], on_conflict=lambda a, b: (a + b) / 2))["w"].tolist()
    [1.0, 6.0, 6.0]
    """
    if not (callable(on_conflict) or on_conflict in ("error", "first", "last")):
        raise OptionError(
            f'on_conflict={on_conflict!r} is none of "error", "first" and "last", and no function; give one'
        )
    if not isinstance(patches, Iterable):
        raise OptionError(f"{type(patches).__name__} is not a list of patches; give one, as in eg.merge([p, q])")
    every = list(patches)
    for patch in every:
        if not isinstance(patch, Patch):
            raise OptionError(f"{type(patch).__name__} is not a patch; eg.inspect reads one from a file")
    return reduce(lambda left, right: _merge_two(left, right, on_conflict), every, Patch(()))


def _merge_two(first: Patch, second: Patch, rule: Rule) -> Patch:
    disagreed = first.conflicts(second)
    if len(disagreed) and rule == "error":
        place, one, other = next(iter(disagreed))
        raise PatchError(
            f"{len(disagreed)} elements are changed to different values, such as {place} to {one:.6g} and {other:.6g}; "
            'say what to take by on_conflict="first", "last" or a function'
        )
    shared = {entry.name for entry in first.entries} & {entry.name for entry in second.entries}
    alone = [entry for patch in (first, second) for entry in patch.entries if entry.name not in shared]
    sides = [changes_of(Patch([e for e in patch.entries if e.name in shared]), "merge") for patch in (first, second)]  # type: ignore[arg-type]
    joined = [_join_two(sides[0][name], sides[1][name], rule).to_entry(sides[0][name].entry.since) for name in shared]
    return Patch(tuple(sorted([*alone, *_patch_of(joined).entries], key=lambda entry: entry.name)))


def _join_two(first: Change, second: Change, rule: Rule) -> Change:
    again, at = first.find_shared(second)
    apart = first.entry.since is None and second.entry.since is None and _are_apart(first.entry, second.entry)
    if apart or (first.originals[at] != second.originals[again]).any():
        raise PatchError(
            f"the patches were made for two tensors that were called {first.entry.name}; merge those of one"
        )
    values = first.values.copy()
    if rule == "last":
        values[at] = second.values[again]
    elif callable(rule):
        values[at] = _resolve(first.entry, values[at], second.values[again], rule)
    return first.extend(values, second, ~again)


def _resolve(entry: Entry, first: np.ndarray, second: np.ndarray, rule: Callable[..., Any]) -> np.ndarray:
    """Return the values that the user's function takes where two differ, in the dtype of the tensor."""
    differs = (first != second).any(1)
    if not differs.any():
        return first
    sides = [BitArray(entry.dtype, bits[differs]).floats() for bits in (first, second)]
    taken = np.asarray(rule(*sides), sides[0].dtype)
    if taken.shape != sides[0].shape:
        raise OptionError(
            f"on_conflict gave {taken.shape} values for {sides[0].shape} elements of {entry.name}; give one for each"
        )
    values = first.copy()
    values[differs] = BitArray.of(taken).round_to(entry.dtype).bits
    return values


def _part(entry: Entry, kept: np.ndarray) -> Entry:
    originals, positions = entry.require_originals("a part of it"), entry.indices[kept]
    place = short_place(entry.name, entry.shape, positions) if ascends(positions) else None
    return replace(entry, place=place, indices=positions, values=entry.values[kept], originals=originals[kept])


def inspect(path: str | os.PathLike[str]) -> Patch:
    """Read the file of a patch, without the model: places, shapes, how far the elements moved.

    The file is checked as when it is applied, and printed the patch is a table.

    Args:
        path: The file of a patch.

    Returns:
        The patch, as a value.

    Raises:
        PatchError: The file is damaged, or no patch.

    >>> import tempfile, pathlib, elementgrad as eg
    >>> path = pathlib.Path(tempfile.mkdtemp(), "patch.safetensors")
    >>> eg.Patch(()).write(path)
    >>> eg.inspect(path).size
    0
    """
    return Patch.read(path)


def shorten(place: str) -> str:
    """Return the text of a place for a table, printable whatever a file held."""
    place = "".join(sign if sign.isprintable() else " " for sign in place)
    return place if len(place) <= SHOWN else f"{place[: SHOWN - 4]} ..."
