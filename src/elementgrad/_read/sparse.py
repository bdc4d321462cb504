"""`Prepared`: a sparse Jacobian that is coloured once and read at many points."""

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from elementgrad._backends.base import Backend
from elementgrad._backends.registry import backend_of, not_compiled
from elementgrad._read.compressed import Compressed, EntryRequest
from elementgrad._read.plan import Plan
from elementgrad._read.sweeps import PRECISION
from elementgrad._sparsity.pattern import Pattern, scipy_sparse
from elementgrad.errors import BroadcastError, FrameworkError, OptionError, PatternError, TracedError

if TYPE_CHECKING:
    from elementgrad._read.jacobian import Jacobian

Tensor = Any
Format = Literal["csr", "coo", "scipy"]
PROBES = 2


class Prepared:
    """A sparse Jacobian that is ready to be read at other points: `S(x)`. Made by `J.prepare()`.

    `S.pattern` is which entries there are, `S.plan` what a read does.
    """

    __module__ = "elementgrad"

    def __init__(self, jacobian: "Jacobian", pattern: Pattern, request: EntryRequest, format: Format | None):
        self.pattern = pattern
        self._jacobian = jacobian
        self._is_local = jacobian._pattern_is_local
        self._rows = request.rows
        self._compressed = Compressed(request, jacobian._runner)
        self._assemble = self._make_assembly(format)
        self._read: Callable[[Tensor], tuple[Tensor | None, Tensor | None]] | None = None

    @cached_property
    def plan(self) -> Plan:
        """The plan of a read: colours, sweeps, chunks and bytes, against the whole."""
        return self._compressed.plan(self._jacobian._runner)

    @not_compiled
    def __call__(self, x: Tensor) -> Any:
        """Return the sparse Jacobian at another point.

        Args:
            x: The new input, of the same shape and dtype; all else stays as it was.

        Returns:
            The sparse matrix, in the format that was prepared.

        Raises:
            PatternError: The pattern was found for one point alone.
        """
        jacobian, backend = self._jacobian, self._jacobian._backend
        side = jacobian._wrt
        if backend_of(x) is not backend:
            raise FrameworkError(f"S(x) takes a tensor of {backend.name} in place of {side.name}")
        if tuple(backend.shape(x)) != tuple(backend.shape(side.tensor)) or x.dtype != side.tensor.dtype:
            raise BroadcastError(
                f"S(x) with x of shape {tuple(backend.shape(x))} and {x.dtype}, and it was prepared for {side.name} of "
                f"shape {tuple(backend.shape(side.tensor))} and {side.tensor.dtype}; prepare another"
            )
        if self._is_local:
            raise PatternError(
                "the pattern was found for one point alone, and may miss entries at another; leave out "
                "J.pattern(local=True), or give a pattern that holds there, eg.jacobian(f, x, pattern=P)"
            )
        if jacobian._origin is None:
            raise OptionError(f"{side.name} is computed by the function, so it is not set; make the Jacobian anew")
        return self._matrix(self._read_at(x))

    @not_compiled
    def sparse(self) -> Any:
        """Return the sparse Jacobian where it was prepared."""
        return self._matrix(self._compressed.read(self._jacobian._runner))

    @not_compiled
    def verify(self) -> None:
        """Raise `PatternError` if the pattern misses something where it was prepared."""
        error = self._compare_with_products()
        if error is not None:
            raise PatternError(error)

    def __repr__(self) -> str:
        return f"<Prepared {self.pattern!r}, {self._compressed.coloring.text}>"

    def _read_at(self, x: Tensor) -> Tensor | None:
        while True:
            if self._read is None:
                self._read = self._compile_read()
            values, check = self._read(x)
            if self._compressed.is_symmetric(values, check, self._jacobian._runner):
                return values
            self._compressed.drop_symmetry(self._jacobian._runner)
            self._read = None

    def _compile_read(self) -> Callable[[Tensor], tuple[Tensor | None, Tensor | None]]:
        """Return a read at another point, compiled where the framework does that."""
        jacobian, compressed, origin = self._jacobian, self._compressed, self._jacobian._origin
        assert origin is not None
        if compressed.coloring.kind == "symmetric":
            # Checked here, since in a program of the user's that is traced there are no numbers to check.
            compressed.read(jacobian._runner)

        def read(x: Tensor) -> tuple[Tensor | None, Tensor | None]:
            return compressed.sweep(jacobian._runner.at(origin.relinearize(jacobian._wrt.index, x)))

        return jacobian._backend.load("read").maybe_compile(read)

    def _matrix(self, values: Tensor | None) -> Any:
        return self._assemble(self._jacobian._finish(values, (self.pattern.size,)))

    def _make_assembly(self, format: Format | None) -> Callable[[Tensor], Any]:
        """Return a function from values to a matrix, made now and not in a program that is traced later."""
        backend, pattern = self._jacobian._backend, self.pattern
        if format != "scipy":
            return backend.load("read").sparse(pattern, format, self._jacobian._wrt.tensor)
        csr_array = scipy_sparse().csr_array

        def assemble(values: Tensor) -> Any:
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

        return assemble

    def _compare_with_products(self) -> str | None:
        """Return what is wrong with the entries read by colours, compared with reverse sweeps; None if nothing is."""
        jacobian, pattern = self._jacobian, self.pattern
        runner, backend = jacobian._runner, jacobian._backend
        values = self._compressed.read(runner)
        entries = None if values is None else _to_numpy(values, backend)
        if entries is None:
            return None
        rows, columns = jacobian._positions()
        y = runner.linear.outputs[runner.output]
        precision = max(_precision(end, backend) for end in (y, jacobian._wrt.tensor))
        for seed_number in range(PROBES):
            weights = np.zeros(runner.of_size)
            random = np.random.default_rng(seed_number)
            weights[rows] = random.uniform(0.5, 1.5, len(rows)) * random.choice([-1, 1], len(rows))
            seed = backend.cast(weights.reshape(1, *backend.shape(y)), y)
            product = runner.product(seed, forward=False)
            if product is None:
                return None
            reverse = np.asarray(_to_numpy(product, backend)).reshape(-1)[columns]
            repeats = np.bincount(rows, minlength=runner.of_size)  # a side may name an element several times
            used = np.real(np.asarray(_to_numpy(seed, backend))).reshape(-1)
            weighted = (used / np.maximum(repeats, 1))[self._rows] * entries
            real, imaginary, sizes = (
                np.bincount(pattern.columns, part, pattern.shape[1])
                for part in (weighted.real, weighted.imag, np.abs(weighted))
            )
            wrong = ~(np.abs(reverse - (real + 1j * imaginary)) <= precision**0.5 * (sizes + np.abs(reverse)))
            wrong &= np.isfinite(reverse)
            if wrong.any():
                return (
                    f"the derivative with respect to element {int(wrong.argmax())} of {jacobian._wrt.name} has entries "
                    "outside the pattern, so that other entries come out wrong; leave pattern= out to have it found, "
                    "or add what it lacks (P | Q)"
                )
        return None


def _to_numpy(x: Tensor, backend: Backend) -> np.ndarray | None:
    """Return the values as float64 or complex numbers, or None if they are traced."""
    return backend.read(x) if backend.kind(x) == "c" else backend.to_float64(x)


def _precision(x: Tensor, backend: Backend) -> float:
    return PRECISION[backend.itemsize(x) // (2 if backend.kind(x) == "c" else 1)]
