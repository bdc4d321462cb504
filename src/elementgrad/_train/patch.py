"""`Patch`: changes of named elements as a value, apart from any model; `eg.inspect` reads one from a file."""

import os
from dataclasses import dataclass
from typing import Any

from elementgrad._files import replace_file
from elementgrad._html import Rows, Tabular
from elementgrad._train.entries import Entry, check_same_tensor
from elementgrad._train.patch_file import PatchFile, encode_entries, pack
from elementgrad.errors import ElementgradError, PatchError

SHOWN = 48
"""The number of characters of a place in a table."""


@dataclass(frozen=True, repr=False)
class Patch(Tabular):
    """Changes of named elements, apart from any model: entries in the order in which they were trained.

    >>> import numpy as np
    >>> import elementgrad as eg
    >>> from elementgrad._train.entries import Entry
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
        by_name: dict[str, list[Entry]] = {}
        for entry in self.entries:
            by_name.setdefault(entry.name, []).append(entry)
        for entries in by_name.values():
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

        Raises:
            PatchError: The file is damaged, or no patch.
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
        """Return one patch that does what this one and then another one do.

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
        return _algebra().then(self, other)

    def inverse(self) -> "Patch":
        """Return the patch that takes this one back, to the bit.

        Values that are wider than their tensor, such as float32 of a bfloat16 weight, are rounded to it first.

        >>> import numpy as np, elementgrad as eg
        >>> patch = eg.diff({"w": np.zeros(3)}, {"w": np.ones(3)})
        >>> patch.then(patch.inverse()).size
        0
        """
        return _algebra().inverse(self)

    def conflicts(self, other: "Patch") -> Any:
        """Return the elements that this patch and another one change to different values.

        Args:
            other: A patch of the same weights.

        Returns:
            A `Conflicts`, which has a length and prints as a table.
        """
        return _algebra().conflicts(self, other)

    def restricted(self, places: Any) -> "Patch":
        """Return the part of the patch that is about some places.

        Args:
            places: The text of a place, such as `"embedding.weight[:100]"`, a place, or several.

        >>> import numpy as np, elementgrad as eg
        >>> patch = eg.diff({"a": np.zeros(3), "b": np.zeros(2)}, {"a": np.ones(3), "b": np.ones(2)})
        >>> patch.restricted("a[1:]").size, patch.restricted("b").size
        (2, 2)
        """
        return _algebra().restrict(self, places)

    def _rows(self) -> Rows:
        rows = [("place", "elements", "shape", "dtype", "largest change")]
        for entry in self.entries:
            change = "-" if entry.largest_change is None else f"{entry.largest_change:.4g}"
            shape = "x".join(map(str, entry.shape)) or "()"
            rows.append((shorten(entry.label), str(len(entry.indices)), shape, entry.dtype, change))
        return rows


def _algebra() -> Any:
    from elementgrad._train import algebra  # which makes patches itself

    return algebra


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
