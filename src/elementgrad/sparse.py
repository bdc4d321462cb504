"""What a Jacobian knows of its own sparsity: its pattern, its sparse matrix, and reads by colours."""

import math
from typing import Any

import numpy as np

from elementgrad.backends import Backend, plain
from elementgrad.backends.linear import UnsupportedError
from elementgrad.errors import OptionError, PatternError, quoted
from elementgrad.plan.compressed import Asked, Compressed
from elementgrad.plan.run import Reader
from elementgrad.prepared import Again, Format, Prepared
from elementgrad.selection import Selection
from elementgrad.side import Side
from elementgrad.sparsity.pattern import Pattern

Tensor = Any
LARGEST = 2 * 10**7
"""Blocks of more numbers than this are read row by row: where each of them is would take more memory than they do."""


class Sparse:
    """The part of a Jacobian that is about which of its entries can be nonzero."""

    _backend: Backend
    _reader: Reader
    _of: Side
    _wrt: Side
    _batch: int | None
    _again: Again | None
    _symmetric: bool
    _known: Pattern | None
    """The pattern of the whole tensors, once it was given or found."""
    _local = False
    """Whether that is the pattern at this point alone."""

    @plain
    def pattern(self, local: bool = False) -> Pattern:
        """Which entries can be nonzero: a row for each element of the output, a column for each of the input.

        It is found from the derivative program and holds for every input of the same shape and dtype, or with `local`
        for the one given here. It misses nothing; where an operation is not known it may hold too much. From then on
        reads of this Jacobian go by it.

        >>> import torch, elementgrad as eg
        >>> eg.jacobian(lambda x: x[1:] * x[:-1], torch.ones(5)).pattern().dense().astype(int)
        array([[1, 1, 0, 0, 0],
               [0, 1, 1, 0, 0],
               [0, 0, 1, 1, 0],
               [0, 0, 0, 1, 1]])
        """
        self._require_one()
        if not isinstance(local, bool):
            raise OptionError(f"local={quoted(local)} is neither True nor False; give one of them")
        if local or self._local:
            self._known, self._local = self._found(local), local
        return self._within(self._whole())

    @plain
    def sparse(self, format: Format | None = None) -> Any:
        """The whole Jacobian as a sparse matrix, of as many rows as the output has elements.

        It is the framework's own, in the layout that it likes best, or `"csr"`, `"coo"` or `"scipy"` (an array of
        scipy.sparse, by rows). It takes as many sweeps as the pattern has colours.

        >>> import torch, elementgrad as eg
        >>> eg.jacobian(lambda x: x[1:] * x[:-1], torch.arange(4.0)).sparse().to_dense()
        tensor([[1., 0., 0., 0.],
                [0., 2., 1., 0.],
                [0., 0., 3., 2.]])
        """
        return self._prepared(format).sparse()

    @plain
    def prepare(self, format: Format | None = None) -> "Prepared":
        """Everything that does not depend on the numbers, done once: `S = J.prepare()`, then `S(x)` at many x.

        >>> import torch, elementgrad as eg
        >>> S = eg.jacobian(lambda x: x**2, torch.zeros(3)).prepare()
        >>> S(torch.tensor([1.0, 2.0, 3.0])).to_dense().diagonal()
        tensor([2., 4., 6.])
        >>> print(S.plan)
        asked      3 rows, 3 columns: 3 numbers, 12 B
        naive      3 reverse sweeps for the whole Jacobian, 36 B
        coloured   1 colour against 3 rows and 3 columns
        planned    1 reverse sweep by rows
        speed-up   3x fewer sweeps
        """
        return self._prepared(format)

    @plain
    def verify(self) -> bool:
        """Whether the pattern misses nothing here, by random products; `PatternError` if it does.

        One or two reverse sweeps are held against the entries read by colours.

        >>> import numpy as np, torch, elementgrad as eg
        >>> eg.jacobian(torch.sin, torch.ones(3), pattern=eg.Pattern.from_dense(np.eye(3))).verify()
        True
        """
        self._prepared(None).verify()
        return True

    def _prepared(self, format: Format | None) -> "Prepared":
        self._require_one()
        if format not in (None, "csr", "coo", "scipy"):
            raise OptionError(
                f'format={quoted(format)} is none of "csr", "coo" and "scipy"; give one of them or leave it out'
            )
        return Prepared(self, self._within(self._whole()), format)

    def _require_one(self) -> None:
        if self._batch is not None:
            raise OptionError("with batch=True there is a Jacobian for each example; leave it out for a sparse one")

    def _whole(self) -> Pattern:
        if self._known is None:
            self._known = self._found(False)
        return self._known

    def _found(self, local: bool) -> Pattern:
        """The pattern of the whole tensors, from the derivative program."""
        shape = self._reader.of_size, self._reader.wrt_sizes[0]
        if 0 in shape:
            return Pattern.from_entries([], [], shape)
        try:
            found = self._reader.linear.pattern(self._of.number, self._wrt.number, local)
        except UnsupportedError as error:
            here = "" if local else f" that holds for every {self._wrt.name}"
            then = "" if local else "use J.pattern(local=True) for the one at this point, or "
            raise PatternError(
                f"no pattern{here} can be found: {error}; {then}give one, eg.jacobian(f, x, pattern=P)"
            ) from error
        if found is None:
            self._require_zero()
            return Pattern.from_entries([], [], shape)
        return found

    def _given(self, pattern: Any) -> Pattern:
        """A pattern that the user gave for both sides, as one of the whole tensors."""
        if not isinstance(pattern, Pattern):
            if not hasattr(pattern, "tocoo"):
                raise OptionError(
                    f"pattern is {type(pattern).__name__}; give an eg.Pattern or a matrix of scipy.sparse"
                )
            pattern = Pattern.from_scipy(pattern)
        shape = math.prod(self._of.shape), math.prod(self._wrt.shape)
        if pattern.shape != shape:
            raise OptionError(
                f"the pattern is of shape {pattern.shape}, and {self._of.name} with respect to {self._wrt.name} is "
                f"{shape}; give one row for each element of the output, one column for each of the input"
            )
        if self._of.base is None and self._wrt.base is None:
            return pattern
        rows, columns = self._places()
        of = self._reader.of_size, self._reader.wrt_sizes[0]
        return Pattern.from_entries(rows[pattern.rows], columns[pattern.columns], of)

    def _places(self) -> tuple[np.ndarray, np.ndarray]:
        """Where the elements of both sides are in their tensors."""
        rows, columns = (side.select(..., self._backend).flat().reshape(-1) for side in (self._of, self._wrt))
        return rows, columns

    def _within(self, whole: Pattern) -> Pattern:
        """Of the pattern of the whole tensors, that of both sides."""
        if self._of.base is None and self._wrt.base is None:
            return whole
        return whole.taken(*self._places())

    def _coloured(self, rows: np.ndarray, columns: np.ndarray, most: int) -> Compressed | None:
        """Entries by colours, where the pattern is known and that takes fewer sweeps than so many."""
        if self._known is None or self._batch is not None or not len(rows):
            return None
        asked = Asked(self._known, rows, columns)
        found = asked.coloured(self._reader.without)
        return Compressed(asked, self._reader, found) if found.sweeps < most else None

    def _block(self, rows: Selection, columns: Selection) -> Compressed | None:
        """The same for all of some rows with all of some columns."""
        if self._known is None or not 0 < rows.size * columns.size <= LARGEST:
            return None
        down, right = (selection.flat().reshape(-1) for selection in (rows, columns))
        most = min(len(np.unique(down)), len(np.unique(right)))
        return self._coloured(np.repeat(down, len(right)), np.tile(right, len(down)), most) if most > 1 else None

    def _require_zero(self) -> None:
        raise NotImplementedError

    def _shaped(self, block: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        raise NotImplementedError
