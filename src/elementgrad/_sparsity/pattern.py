"""`eg.Pattern`: the entries of a matrix that can be nonzero, as an immutable value."""

import html
import io
import os
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from elementgrad._files import ArchiveError, read_npz, replace_file
from elementgrad.errors import OptionError, SelectionError, SizeError

DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
"""Bits of the dots of a Braille character, four rows of two."""
MAX_LINES, MAX_CHARACTERS = 16, 32
"""Size of the largest picture."""
MAX_ENTRIES = 10**8
"""Larger patterns raise an error."""


@dataclass(frozen=True, eq=False, repr=False)
class Pattern:
    """The entries of a matrix that can be nonzero; all others are always zero.

    A Jacobian counts as a matrix: a row for each element of the output, a column for each of the input, both in the
    order of the flattened tensors. A pattern may have more entries than are needed, and must have no fewer. It is
    stored by rows (CSR): the columns of row `i` are `columns[starts[i]:starts[i + 1]]`, in rising order.

    Args:
        shape: Number of rows and of columns.
        starts: Where each row starts in `columns`, and at last the number of entries.
        columns: The column of each entry.

    Raises:
        OptionError: The arrays are no CSR structure of this shape.

    >>> import numpy as np, elementgrad as eg
    >>> P = eg.Pattern.from_dense(np.eye(4) + np.eye(4, k=1))
    >>> P
    <Pattern (4, 4): 7 of 16 entries, 43.8 %>
    >>> P.rows.tolist(), P.columns.tolist()
    ([0, 0, 1, 1, 2, 2, 3], [0, 1, 1, 2, 2, 3, 3])
    >>> P | P.T == eg.Pattern.from_dense(np.eye(4) + np.eye(4, k=1) + np.eye(4, k=-1))
    True
    """

    __module__ = "elementgrad"

    shape: tuple[int, int]
    starts: np.ndarray
    columns: np.ndarray

    def __post_init__(self) -> None:
        shape, starts, columns = _check(self.shape, self.starts, self.columns)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "starts", _freeze(starts, len(columns)))
        object.__setattr__(self, "columns", _freeze(columns, shape[1]))

    @classmethod
    def from_entries(cls, rows: Any, columns: Any, shape: tuple[int, int]) -> "Pattern":
        """Return the pattern of entries in any order; one named twice is there once.

        Args:
            rows: The row of each entry.
            columns: The column of each entry, beside `rows`.
            shape: Number of rows and of columns.

        Raises:
            OptionError: Not as many rows as columns.
            SelectionError: An entry is outside the shape.

        >>> import elementgrad as eg
        >>> eg.Pattern.from_entries([1, 0, 1], [2, 0, 2], (2, 3)).columns.tolist()
        [0, 2]
        """
        rows, columns = (np.asarray(x).reshape(-1) for x in (rows, columns))
        if len(rows) != len(columns):
            raise OptionError(f"{len(rows)} rows and {len(columns)} columns do not pair up; give as many of each")
        for indices, size, name in ((rows, shape[0], "row"), (columns, shape[1], "column")):
            if len(indices) and (indices.dtype.kind not in "iu" or indices.min() < 0 or indices.max() >= size):
                raise SelectionError(f"a {name} of an entry is no int from 0 to {size - 1}; shape is {tuple(shape)}")
        keys = np.unique(rows.astype(np.int64) * shape[1] + columns)
        return cls.from_keys(keys, shape)

    @classmethod
    def from_keys(cls, keys: np.ndarray, shape: tuple[int, int]) -> "Pattern":
        """Return the pattern of entries by their positions in the flattened matrix.

        Args:
            keys: The positions, in rising order.
            shape: Number of rows and of columns.

        Returns:
            The pattern.

        >>> import numpy as np, elementgrad as eg
        >>> eg.Pattern.from_keys(np.array([0, 5]), (2, 3))
        <Pattern (2, 3): 2 of 6 entries, 33.3 %>
        """
        rows = keys // max(1, shape[1])
        starts = np.searchsorted(rows, np.arange(shape[0] + 1))
        return cls(shape, starts, keys - rows * shape[1])

    @classmethod
    def from_dense(cls, matrix: Any) -> "Pattern":
        """Return the entries of a matrix that are not zero (NaN is not), or that are true.

        >>> import numpy as np, elementgrad as eg
        >>> eg.Pattern.from_dense(np.eye(2)).rows.tolist()
        [0, 1]
        """
        matrix = np.asarray(matrix)
        if matrix.ndim != 2:
            raise OptionError(f"a pattern is that of a matrix, and this has {matrix.ndim} axes; reshape it to two")
        return cls.from_keys(np.flatnonzero(matrix), matrix.shape)

    @classmethod
    def from_scipy(cls, matrix: Any) -> "Pattern":
        """Return the entries that a matrix of scipy.sparse stores, with the zeros that it stores."""
        matrix = matrix.tocoo()
        return cls.from_entries(matrix.row, matrix.col, matrix.shape)

    @classmethod
    def full(cls, shape: tuple[int, int]) -> "Pattern":
        """Return the pattern of all entries."""
        require_room(shape[0] * shape[1])
        return cls(shape, np.arange(shape[0] + 1) * shape[1], np.tile(np.arange(shape[1]), shape[0]))

    @property
    def size(self) -> int:
        """Number of entries that can be nonzero."""
        return len(self.columns)

    @property
    def density(self) -> float:
        """Share of entries that can be nonzero."""
        return self.size / max(1, self.shape[0] * self.shape[1])

    @cached_property
    def rows(self) -> np.ndarray:
        """The row of each entry, beside `columns`."""
        return _freeze(np.repeat(np.arange(self.shape[0]), np.diff(self.starts)), self.shape[0])

    @cached_property
    def keys(self) -> np.ndarray:
        """The position of each entry in the flattened matrix, in rising order."""
        keys = self.rows.astype(np.int64) * self.shape[1] + self.columns
        keys.flags.writeable = False
        return keys

    @cached_property
    def T(self) -> "Pattern":  # noqa: N802
        """The pattern of the transposed matrix."""
        order = np.argsort(self.columns, kind="stable")
        starts = np.concatenate([[0], np.cumsum(np.bincount(self.columns, minlength=self.shape[1]))])
        return Pattern((self.shape[1], self.shape[0]), starts, self.rows[order])

    def dense(self) -> np.ndarray:
        """Return a matrix of booleans."""
        matrix = np.zeros(self.shape, dtype=bool)
        matrix[self.rows, self.columns] = True
        return matrix

    def to_scipy(self) -> Any:
        """Return a `scipy.sparse.csr_array` of ones; needs SciPy (the extra `sparse`)."""
        csr = np.ones(self.size), self.columns, self.starts
        return scipy_sparse().csr_array(csr, shape=self.shape, copy=True)  # SciPy may write to what it is given

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the pattern to a `.npz` file, as a whole or not at all. Reading it executes nothing."""
        archive = io.BytesIO()
        np.savez_compressed(archive, shape=np.array(self.shape), starts=self.starts, columns=self.columns)
        replace_file(path, archive.getbuffer())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Pattern":
        """Read a file that `save` wrote.

        Raises:
            OptionError: The file has no pattern.
        """
        try:
            arrays = read_npz(path)
            shape, starts, columns = (arrays[name] for name in ("shape", "starts", "columns"))
        except (KeyError, ArchiveError) as error:
            where = os.fspath(path)
            raise OptionError(f"{where!r} holds no pattern ({error}); give a file that Pattern.save wrote") from None
        return cls(tuple(np.atleast_1d(shape).tolist()), starts, columns)

    def positions(self, rows: Any, columns: Any) -> np.ndarray:
        """Return the index of entries in `self.columns`; -1 for one outside the pattern.

        Args:
            rows: The row of each entry.
            columns: The column of each entry, beside `rows`.

        Returns:
            The indices, as an array of the shape of `rows`.

        >>> import numpy as np, elementgrad as eg
        >>> eg.Pattern.from_dense(np.eye(3)).positions([2, 0], [2, 1]).tolist()
        [2, -1]
        """
        keys = np.asarray(rows, dtype=np.int64) * self.shape[1] + np.asarray(columns, dtype=np.int64)
        if not self.size:
            return np.full(keys.shape, -1)
        nearest = np.minimum(np.searchsorted(self.keys, keys), self.size - 1)
        return np.where(self.keys[nearest] == keys, nearest, -1)

    def taken(self, rows: np.ndarray, columns: np.ndarray) -> "Pattern":
        """Return the pattern of some rows and columns.

        Args:
            rows: The rows, in the order of the result; each may be named several times.
            columns: The same for columns.

        Returns:
            The pattern of that part, with as many rows and columns as are named.

        >>> import numpy as np, elementgrad as eg
        >>> eg.Pattern.from_dense(np.eye(3)).taken(np.array([1, 2]), np.array([0, 1])).dense().tolist()
        [[False, True], [False, False]]
        """
        counts = np.diff(self.starts)[rows]
        ends = np.cumsum(counts)
        entries = np.arange(int(counts.sum())) + np.repeat(self.starts[rows] - (ends - counts), counts)
        order = np.argsort(columns, kind="stable")
        low, high = (np.searchsorted(columns[order], self.columns[entries], side) for side in ("left", "right"))
        times = high - low
        down = np.repeat(np.repeat(np.arange(len(rows)), counts), times)
        within = np.arange(len(down)) - np.repeat(np.cumsum(times) - times, times)
        return Pattern.from_entries(down, order[np.repeat(low, times) + within], (len(rows), len(columns)))

    def __or__(self, other: "Pattern") -> "Pattern":
        """Return the union of two patterns."""
        if not isinstance(other, Pattern):
            return NotImplemented
        if other.shape != self.shape:
            raise OptionError(f"patterns of shapes {self.shape} and {other.shape} have no union; give one shape")
        return Pattern.from_keys(np.union1d(self.keys, other.keys), self.shape)

    def __le__(self, other: "Pattern") -> bool:
        """Return True if the other has every entry of this one."""
        if not isinstance(other, Pattern):
            return NotImplemented
        return self.shape == other.shape and bool((other.positions(self.rows, self.columns) >= 0).all())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Pattern):
            return NotImplemented
        same = self.shape == other.shape and np.array_equal(self.starts, other.starts)
        return same and np.array_equal(self.columns, other.columns)

    def __hash__(self) -> int:
        return hash((self.shape, self.starts.tobytes(), self.columns.tobytes()))

    def __repr__(self) -> str:
        entries = f"{self.size} of {self.shape[0] * self.shape[1]} entries"
        return f"<Pattern {self.shape}: {entries}, {100 * self.density:.3g} %>"

    def __str__(self) -> str:
        """Return a picture of at most 16 lines of 32 characters, with a dot where at least one entry is."""
        return "\n".join([repr(self)[1:-1], *self.picture(_can_print_braille())])

    def picture(self, braille: bool = True) -> list[str]:
        """Return the lines of the picture. Without `braille`, which has eight dots, a character is one dot.

        >>> import numpy as np, elementgrad as eg
        >>> eg.Pattern.from_dense(np.eye(3)).picture(braille=False)
        ['*..', '.*.', '..*']
        """
        down, across = DOTS.shape if braille else (1, 1)
        high = max(1, min(down * MAX_LINES, self.shape[0]))
        wide = max(1, min(across * MAX_CHARACTERS, self.shape[1]))
        dots = np.zeros((-(-high // down) * down, -(-wide // across) * across), dtype=bool)
        if self.size:
            rows = self.rows.astype(np.int64) * high // self.shape[0]
            dots[rows, self.columns.astype(np.int64) * wide // self.shape[1]] = True
        if not braille:
            return ["".join(np.where(line, "*", ".")) for line in dots]
        cells = dots.reshape(dots.shape[0] // down, down, dots.shape[1] // across, across)
        return ["".join(map(chr, line)) for line in 0x2800 + np.einsum("iajb,ab->ij", cells, DOTS)]

    def _repr_html_(self) -> str:
        picture = "\n".join(self.picture())
        return f"<div>{html.escape(repr(self)[1:-1])}</div><pre style='line-height: 1.1'>{picture}</pre>"


def _can_print_braille() -> bool:
    """Return True unless the terminal has an encoding without such characters, as on many a Windows."""
    try:
        "\u28ff".encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def require_room(entries: int) -> None:
    """Raise if a pattern has too many entries for memory."""
    if entries > MAX_ENTRIES:
        raise SizeError(
            f"the pattern would have {entries} entries: every output depends on very many inputs, so the Jacobian is "
            "not sparse; read some of its rows or columns, or multiply with it"
        )


def scipy_sparse() -> Any:
    """Return the module `scipy.sparse`; raise an error with the remedy if it is not installed."""
    try:
        import scipy.sparse as sparse  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise OptionError("SciPy is not installed; pip install elementgrad[sparse]") from None
    return sparse


def _check(shape: Any, starts: Any, columns: Any) -> tuple[tuple[int, int], np.ndarray, np.ndarray]:
    starts, columns = np.asarray(starts), np.asarray(columns)
    if len(shape) != 2 or min(shape) < 0:
        raise OptionError(f"a pattern has two axes, rows and columns, and not shape {tuple(shape)}")
    rows, width = map(int, shape)
    arrays = starts.ndim == columns.ndim == 1 and len(starts) == rows + 1
    if not arrays or starts[0] != 0 or starts[-1] != len(columns) or (np.diff(starts) < 0).any():
        raise OptionError(f"starts must rise from 0 to the {columns.size} entries, one more than the {rows} rows")
    if len(columns):
        if columns.min() < 0 or columns.max() >= width:
            raise OptionError(f"a column is out of range for shape {(rows, width)}")
        inside = np.ones(len(columns), dtype=bool)
        inside[starts[starts < len(columns)]] = False
        if (np.diff(columns) <= 0)[inside[1:]].any():
            raise OptionError("the columns of each row must rise; Pattern.from_entries sorts them")
    return (rows, width), starts, columns


def _freeze(indices: np.ndarray, limit: int) -> np.ndarray:
    """Return a read-only copy in the smallest integers that hold `limit`."""
    indices = np.array(indices, dtype=np.int32 if limit < 2**31 else np.int64)
    indices.flags.writeable = False
    return indices
