"""A sparse Jacobian that is ready to be read at many points.

What a Jacobian knows of its own sparsity: its pattern, its sparse matrix, and reads by colours.
"""

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal

import numpy as np

from elementgrad._backends.autodiff import Linearization, UnsupportedError
from elementgrad._backends.base import Backend
from elementgrad._backends.registry import backend_of, not_compiled
from elementgrad._names.call import Operand
from elementgrad._place.selection import Selection
from elementgrad._read.compressed import Compressed, EntryRequest
from elementgrad._read.plan import Plan
from elementgrad._read.sweeps import PRECISION, EntryReader
from elementgrad._sparsity.pattern import Pattern, scipy_sparse
from elementgrad.errors import BroadcastError, FrameworkError, OptionError, PatternError, TracedError, quoted

Tensor = Any
Format = Literal["csr", "coo", "scipy"]
Again = Callable[[int, Tensor], Linearization]
"""The function linearised anew, with another tensor for one of its inputs."""
PROBES = 2


class Prepared:
    """A sparse Jacobian that is ready to be read at other points: `S(x)`. Made by `J.prepare()`.

    `S.pattern` is which entries there are, `S.plan` what a read does.
    """

    __module__ = "elementgrad"

    def __init__(self, jacobian: "Sparse", pattern: Pattern, format: Format | None):
        self.pattern = pattern
        self._jacobian = jacobian
        self._format = format
        self._local = jacobian._local
        places = jacobian._places()
        self._rows, self._columns = places[0][pattern.rows], places[1][pattern.columns]
        symmetric = jacobian._symmetric and jacobian._backend.kind(jacobian._wrt.tensor) == "f"
        symmetric = symmetric and jacobian._of.base is jacobian._wrt.base is None
        shapes = jacobian._of.of, jacobian._wrt.of
        asked = EntryRequest(jacobian._whole(), self._rows, self._columns, symmetric, shapes)
        self._compressed = Compressed(asked, jacobian._reader)
        self._assemble = self._assembly()
        self._read: Callable[[Tensor], tuple[Tensor | None, Tensor | None]] | None = None

    @cached_property
    def plan(self) -> Plan:
        """What a read does: colours, sweeps, chunks and bytes, against the whole."""
        return self._compressed.plan(self._jacobian._reader)

    @not_compiled
    def __call__(self, x: Tensor) -> Any:
        """The sparse Jacobian at another x, of the same shape and dtype; all else is as it was."""
        jacobian, backend = self._jacobian, self._jacobian._backend
        side, given = jacobian._wrt, backend_of(x)
        if given is not backend:
            raise FrameworkError(f"S(x) takes a tensor of {backend.name} in place of {side.name}")
        if tuple(backend.shape(x)) != tuple(backend.shape(side.tensor)) or x.dtype != side.tensor.dtype:
            raise BroadcastError(
                f"S(x) with x of shape {tuple(backend.shape(x))} and {x.dtype}, and it was prepared for {side.name} of "
                f"shape {tuple(backend.shape(side.tensor))} and {side.tensor.dtype}; prepare another"
            )
        if self._local:
            raise PatternError(
                "the pattern was found for one point alone, and may miss entries at another; leave out "
                "J.pattern(local=True), or give a pattern that holds there, eg.jacobian(f, x, pattern=P)"
            )
        if jacobian._again is None:
            raise OptionError(f"{side.name} is computed by the function, so it is not set; make the Jacobian anew")
        return self._matrix(self._there(x))

    @not_compiled
    def sparse(self) -> Any:
        """The sparse Jacobian where it was prepared."""
        return self._matrix(self._values())

    @not_compiled
    def verify(self) -> None:
        """Raise `PatternError` if the pattern misses something where it was prepared."""
        error = self._error()
        if error is not None:
            raise PatternError(error)

    def __repr__(self) -> str:
        return f"<Prepared {self.pattern!r}, {self._compressed.colouring.text}>"

    def _repeated(self) -> Callable[[Tensor], tuple[Tensor | None, Tensor | None]]:
        """A read at another point, compiled where the framework does that."""
        jacobian, compressed = self._jacobian, self._compressed
        if compressed.colouring.kind == "symmetric":
            self._values()  # inside a program of the user's that is traced, nobody can see whether it is symmetric

        def read(x: Tensor) -> tuple[Tensor | None, Tensor | None]:
            assert jacobian._again is not None
            return compressed.sweep(jacobian._reader.at(jacobian._again(jacobian._wrt.index, x)))

        return jacobian._backend.load("read").maybe_compile(read)

    def _there(self, x: Tensor) -> Tensor | None:
        """The values at another point."""
        while True:
            if self._read is None:
                self._read = self._repeated()
            values, more = self._read(x)
            if self._compressed.mirrored(values, more, self._jacobian._reader):
                return values
            self._compressed.colour_plainly(self._jacobian._reader)
            self._read = None

    def _values(self) -> Tensor | None:
        return self._compressed.read(self._jacobian._reader)

    def _matrix(self, values: Tensor | None) -> Any:
        return self._assemble(self._jacobian._shaped(values, (self.pattern.size,)))

    def _assembly(self) -> Callable[[Tensor], Any]:
        """From values to a matrix. Made here and now, and not in a program that is traced later."""
        backend, pattern = self._jacobian._backend, self.pattern
        if self._format == "scipy":
            csr_array = scipy_sparse().csr_array

            def by_rows(values: Tensor) -> Any:
                numbers = backend.to_numpy(values)
                if numbers is None:
                    raise TracedError(
                        "a matrix of SciPy holds numbers, and these are traced; leave format out, or read it outside "
                        "of what is compiled"
                    )
                if numbers.dtype == np.float16:  # which SciPy lacks
                    numbers = numbers.astype(np.float32)
                # Copied, since SciPy may write to the places of the entries as well, which are the pattern's own.
                return csr_array((numbers, pattern.columns, pattern.starts), shape=pattern.shape, copy=True)

            return by_rows
        return backend.load("read").sparse(pattern, self._format, self._jacobian._wrt.tensor)

    def _error(self) -> str | None:
        """What is wrong with the entries read by colours, held against reverse sweeps; None if nothing is."""
        jacobian = self._jacobian
        reader, backend = jacobian._reader, jacobian._backend
        values = self._values()
        numbers = None if values is None else _numbers(values, backend)
        if numbers is None:
            return None
        places = jacobian._places()
        y = reader.linear.outputs[reader.output]
        precision = max(_precision(end, backend) for end in (y, jacobian._wrt.tensor))
        for number in range(PROBES):
            weights = np.zeros(reader.of_size)
            random = np.random.default_rng(number)
            weights[places[0]] = random.uniform(0.5, 1.5, len(places[0])) * random.choice([-1, 1], len(places[0]))
            seed = backend.cast(weights.reshape(1, *backend.shape(y)), y)
            product = reader.product(seed, forward=False)
            if product is None:
                return None
            swept = np.asarray(_numbers(product, backend)).reshape(-1)[places[1]]
            times = np.bincount(places[0], minlength=reader.of_size)  # a side may name an element several times
            used = np.real(np.asarray(_numbers(seed, backend))).reshape(-1)
            weighted = (used / np.maximum(times, 1))[self._rows] * numbers
            real, imaginary, sizes = (
                np.bincount(self.pattern.columns, part, self.pattern.shape[1])
                for part in (weighted.real, weighted.imag, np.abs(weighted))
            )
            own = real + 1j * imaginary
            wrong = ~(np.abs(swept - own) <= precision**0.5 * (sizes + np.abs(swept)))
            wrong &= np.isfinite(swept)
            if wrong.any():
                return (
                    f"the derivative with respect to element {int(wrong.argmax())} of {jacobian._wrt.name} has entries "
                    "outside the pattern, so that other entries come out wrong; leave pattern= out to have it found, "
                    "or add what it lacks (P | Q)"
                )
        return None


def _numbers(x: Tensor, backend: Backend) -> np.ndarray | None:
    """The values as float64 or complex numbers, or None if they are traced."""
    return backend.read(x) if backend.kind(x) == "c" else backend.to_float64(x)


def _precision(x: Tensor, backend: Backend) -> float:
    return PRECISION[backend.itemsize(x) // (2 if backend.kind(x) == "c" else 1)]


LARGEST = 2 * 10**7
"""Blocks of more numbers than this are read row by row: where each of them is would take more memory than they do."""


class Sparse:
    """The part of a Jacobian that is about which of its entries can be nonzero."""

    _backend: Backend
    _reader: EntryReader
    _of: Operand
    _wrt: Operand
    _batch: int | None
    _again: Again | None
    _symmetric: bool
    _known: Pattern | None
    """The pattern of the whole tensors, once it was given or found."""
    _local = False
    """Whether that is the pattern at this point alone."""

    @not_compiled
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

    @not_compiled
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

    @not_compiled
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

    @not_compiled
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
            found = self._reader.linear.pattern(self._of.index, self._wrt.index, local)
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
        asked = EntryRequest(self._known, rows, columns)
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
