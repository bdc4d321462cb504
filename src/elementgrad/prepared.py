"""A sparse Jacobian that is ready to be read at many points."""

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from elementgrad.backends import Backend, owner, plain
from elementgrad.backends.linear import Linear
from elementgrad.errors import BroadcastError, FrameworkError, OptionError, PatternError, TracedError
from elementgrad.plan.compressed import Asked, Compressed
from elementgrad.plan.plan import Plan
from elementgrad.plan.sweep import PRECISION
from elementgrad.sparsity.pattern import Pattern, scipy_sparse

if TYPE_CHECKING:
    from elementgrad.sparse import Sparse

Tensor = Any
Format = Literal["csr", "coo", "scipy"]
Again = Callable[[int, Tensor], Linear]
"""The function linearised anew, with another tensor for one of its inputs."""
PROBES = 2


class Prepared:
    """A sparse Jacobian that is ready to be read at other points: `S(x)`. Made by `J.prepare()`.

    `S.pattern` is which entries there are, `S.plan` what a read does.
    """

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
        asked = Asked(jacobian._whole(), self._rows, self._columns, symmetric, shapes)
        self._compressed = Compressed(asked, jacobian._reader)
        self._assemble = self._assembly()
        self._read: Callable[[Tensor], tuple[Tensor | None, Tensor | None]] | None = None

    @cached_property
    def plan(self) -> Plan:
        """What a read does: colours, sweeps, chunks and bytes, against the whole."""
        return self._compressed.plan(self._jacobian._reader)

    @plain
    def __call__(self, x: Tensor) -> Any:
        """The sparse Jacobian at another x, of the same shape and dtype; all else is as it was."""
        jacobian, backend = self._jacobian, self._jacobian._backend
        side, given = jacobian._wrt, owner(x)
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

    @plain
    def sparse(self) -> Any:
        """The sparse Jacobian where it was prepared."""
        return self._matrix(self._values())

    @plain
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
            return compressed.sweep(jacobian._reader.at(jacobian._again(jacobian._wrt.number, x)))

        return jacobian._backend.repeated(read)

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
                numbers = backend.array(values)
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
        return backend.sparse(pattern, self._format, self._jacobian._wrt.tensor)

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
    return backend.read(x) if backend.kind(x) == "c" else backend.floats(x)


def _precision(x: Tensor, backend: Backend) -> float:
    return PRECISION[backend.itemsize(x) // (2 if backend.kind(x) == "c" else 1)]
