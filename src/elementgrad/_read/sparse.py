"""Sparse Jacobians: entries are read in as many sweeps as their pattern has colours.

`Compressed` is such a read. `Prepared` is a Jacobian that is coloured once and read at many points, as `J.prepare()`
returns it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from elementgrad._backends.autodiff import PRECISION, UnsupportedError
from elementgrad._backends.base import Backend
from elementgrad._backends.registry import backend_of, not_compiled
from elementgrad._read.plan import Mode, Plan, Task
from elementgrad._read.sweeps import SweepRunner
from elementgrad._sparsity.coloring import Coloring, Shapes, color
from elementgrad._sparsity.pattern import Pattern, scipy_sparse
from elementgrad.errors import BroadcastError, FrameworkError, OptionError, PatternError, TracedError

if TYPE_CHECKING:
    from elementgrad._read.jacobian import Jacobian

Tensor = Any
READY = 10**7
"""Seeds of up to this many numbers are made once; more are made as they are needed."""
Format = Literal["csr", "coo", "scipy"]
PROBES = 2


@dataclass
class EntryRequest:
    """Entries of a whole Jacobian by row and column, in any order, with repeats; those outside the pattern are zero."""

    pattern: Pattern
    """The pattern of the whole tensors, flattened, with every entry of the rows or columns that are read."""
    rows: np.ndarray
    columns: np.ndarray
    symmetric: bool = False
    shapes: Shapes = ((), ())
    """Those of the tensors, whose elements the rows and the columns are."""

    def __post_init__(self) -> None:
        self.given_pattern = self.pattern
        if self.symmetric:
            self.pattern = self.pattern | self.pattern.T
        at = self.pattern.positions(self.rows, self.columns)
        inside = at >= 0
        rows, columns = np.zeros(self.pattern.shape[0], dtype=bool), np.zeros(self.pattern.shape[1], dtype=bool)
        rows[self.rows[inside]] = True
        columns[self.columns[inside]] = True
        near = rows[self.pattern.rows] | columns[self.pattern.columns]  # no other can collide with one of them
        if not near.all():
            self.pattern = Pattern.from_keys(self.pattern.keys[near], self.pattern.shape)
            at = self.pattern.positions(self.rows, self.columns)
        self.at = at
        """The entry of the pattern that each is; -1 for one outside."""
        self.needed = np.zeros(self.pattern.size, dtype=bool)
        self.needed[at[inside]] = True

    def without_symmetry(self) -> "EntryRequest":
        """Return the same entries of a matrix that need not be symmetric."""
        return EntryRequest(self.given_pattern, self.rows, self.columns, shapes=self.shapes)

    def color(self, missing_rules: Mapping[str, str]) -> Coloring:
        """Return the fewest sweeps for the entries, in the directions that have a rule."""
        needed = None if self.symmetric else self.needed
        return color(self.pattern, needed, self.symmetric, missing_rules, self.shapes)


class Compressed:
    """Entries coloured once, to be read at any point: seeds and positions are ready."""

    def __init__(self, request: EntryRequest, runner: SweepRunner, coloring: Coloring | None = None):
        self.request = request
        self._color(runner, coloring)

    def plan(self, runner: SweepRunner) -> Plan:
        """Return the plan of a read."""
        request, coloring = self.request, self.coloring
        numbers = len(request.at)
        parts = [runner.plan(coloring.reverse, [coloring.forward], numbers, mode) for mode in self._seeds]
        main = max(parts, key=lambda part: part.sweeps, default=runner.plan(0, [0], numbers, "reverse"))
        counts = len(np.unique(request.rows)), len(np.unique(request.columns))
        task = Task(*counts, runner.of_size, sum(runner.wrt_sizes), numbers, main.task.itemsize, runner.batch)
        return replace(main, task=task, sweeps=coloring.sweeps, colouring=coloring)

    def read(self, runner: SweepRunner) -> Tensor | None:
        """Return the value of each entry, in one dimension; None if there is no path."""
        while True:
            values, check = self.sweep(runner)
            if self.is_symmetric(values, check, runner):
                return values
            self.drop_symmetry(runner)

    def sweep(self, runner: SweepRunner) -> tuple[Tensor | None, Tensor | None]:
        """Return the values, and the product that `is_symmetric` looks at. It can be traced as part of a program."""
        while True:
            mode: Mode
            try:
                parts = []
                for mode, seeds in self._seeds.items():
                    (stack,) = runner.run_lazily(mode, seeds, seeds.count, self._chunk(mode, runner))
                    if stack is None:
                        return None, None
                    parts.append(runner.backend.reshape(stack, (-1,)))
            except UnsupportedError as error:
                runner.missing_rules[mode] = str(error)
                self._color(runner)
                continue
            check = parts[0][-runner.of_size :] if self.coloring.kind == "symmetric" else None
            return self._gather(parts, runner), check

    def is_symmetric(self, values: Tensor | None, check: Tensor | None, runner: SweepRunner) -> bool:
        """Return True if the matrix is symmetric, or was not taken to be.

        One sweep from generic numbers, beside those of the colours, must be what the entries say. A traced program has
        no numbers to compare.
        """
        backend, request, size = runner.backend, self.request, runner.of_size
        if check is None:
            return True
        product, entries = backend.to_float64(check), backend.to_float64(values)
        if product is None or entries is None:
            return True
        precision = PRECISION[backend.itemsize(runner.linear.inputs[runner.inputs[0]])]
        weighted = entries * _generic_weights(size)[request.rows]
        expected, sizes = (np.bincount(request.columns, part, size) for part in (weighted, np.abs(weighted)))
        wrong = np.abs(product - expected) > precision**0.5 * (sizes + np.abs(product))
        return not (wrong & np.isfinite(product)).any()

    def drop_symmetry(self, runner: SweepRunner) -> None:
        """Colour anew without symmetry, as for a rule of the user's own whose derivative is not symmetric."""
        self.request = self.request.without_symmetry()
        self._color(runner)

    def _color(self, runner: SweepRunner, coloring: Coloring | None = None) -> None:
        if len(runner.missing_rules) > 1:
            raise FrameworkError(
                f"{runner.backend.name} can differentiate this in no direction: {runner.missing_rules}"
            )
        backend, request = runner.backend, self.request
        coloring = coloring or request.color(runner.missing_rules)
        if request.symmetric and coloring.kind != "symmetric":
            request = self.request = request.without_symmetry()
            coloring = request.color(runner.missing_rules)
        y, x = runner.linear.outputs[runner.output], runner.linear.inputs[runner.inputs[0]]
        symmetric = coloring.kind == "symmetric"
        self.coloring = coloring
        self._seeds: dict[Mode, _Seeds] = {}
        self._chunks: dict[Mode, int] = {}
        if coloring.forward:
            self._seeds["forward"] = _Seeds(backend, coloring.columns, symmetric, x)
        if coloring.reverse:
            self._seeds["reverse"] = _Seeds(backend, coloring.rows, symmetric, y)
        length = coloring.forward * runner.of_size + coloring.reverse * sum(runner.wrt_sizes)
        length += runner.of_size if symmetric else 0
        positions = np.full(request.pattern.size + 1, length)  # the last is for entries outside, which are zero
        positions[:-1][request.needed | request.symmetric] = coloring.places
        self._has_outside = bool((request.at < 0).any())
        self._index = backend.load("read").index(positions[request.at], x)

    def _chunk(self, mode: Mode, runner: SweepRunner) -> int:
        # Planned at the first read, since a plan looks at every step of a sweep.
        if mode not in self._chunks:
            count = self._seeds[mode].count
            self._chunks[mode] = runner.plan(count, [count], len(self.request.at), mode).chunk
        return self._chunks[mode]

    def _gather(self, parts: list[Tensor], runner: SweepRunner) -> Tensor:
        backend = runner.backend
        if self._has_outside or not parts:
            parts = [*parts, runner.zeros((1,))]
        like = runner.linear.inputs[runner.inputs[0]]
        parts = [part if part.dtype == like.dtype else backend.cast(part, like) for part in parts]
        return backend.load("read").gather(parts[0] if len(parts) == 1 else backend.concat(parts), self._index)


class _Seeds:
    """Seeds for each colour: one where the colour is. A generic one comes last, if asked for. Few are kept ready."""

    def __init__(self, backend: Backend, colors: np.ndarray, with_generic: bool, like: Tensor):
        self.count = int(colors.max()) + 1 + with_generic
        self._backend, self._like = backend, like
        (self._colored,) = np.nonzero(colors >= 0)
        self._colors = colors[self._colored]
        self._size, self._with_generic = len(colors), with_generic
        self._ready = self._make(0, self.count) if self.count * self._size <= READY else None

    def __call__(self, start: int, stop: int) -> Tensor:
        if self._ready is None:
            return self._make(start, stop)
        return self._ready if stop - start == self.count else self._ready[start:stop]

    def _make(self, start: int, stop: int) -> Tensor:
        seeds = np.zeros((stop - start, self._size))
        here = (self._colors >= start) & (self._colors < stop)
        seeds[self._colors[here] - start, self._colored[here]] = 1
        if self._with_generic and stop == self.count:
            seeds[-1] = _generic_weights(self._size)
        return self._backend.cast(seeds.reshape(len(seeds), *self._backend.shape(self._like)), self._like)


@lru_cache(maxsize=4)
def _generic_weights(size: int) -> np.ndarray:
    """Return numbers that every dtype holds exactly, of both signs."""
    random = np.random.default_rng(1)
    return random.integers(8, 24, size) / 16 * random.choice([-1, 1], size)


class Prepared:
    """A sparse Jacobian that is ready to be read at other points: `S(x)`. Made by `J.prepare()`.

    `S.pattern` is which entries there are, `S.plan` what a read does, and `S.value_and_jacobian(x)` has the value too.

    >>> import torch, elementgrad as eg
    >>> S = eg.jacobian(lambda x: x**2, torch.ones(3)).prepare()
    >>> S.pattern.size, S(torch.tensor([1.0, 2.0, 3.0])).to_dense().diagonal()
    (3, tensor([2., 4., 6.]))
    """

    __module__ = "elementgrad"

    def __init__(self, jacobian: "Jacobian", pattern: Pattern, request: EntryRequest, format: Format | None):
        self.pattern = pattern
        self._jacobian = jacobian
        self._is_local = jacobian._pattern_is_local
        self._rows = request.rows
        self._compressed = Compressed(request, jacobian._runner)
        self._assemble = self._make_assembly(format)
        self._read: Callable[[Tensor], tuple[Tensor | None, Tensor | None, Tensor]] | None = None

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
            PatternError: The pattern was found at one point only.
        """
        return self.value_and_jacobian(x)[1]

    @not_compiled
    def value_and_jacobian(self, x: Tensor) -> tuple[Tensor, Any]:
        """Return the value of the function at another point, and its sparse Jacobian there, from one evaluation.

        Solvers ask for both. Of a Hessian the value is the gradient.

        Args:
            x: The new input, of the same shape and dtype; all else stays as it was.

        Returns:
            The tensor that is differentiated, and the sparse matrix, in the format that was prepared.

        Raises:
            PatternError: The pattern was found at one point only.

        >>> import torch, elementgrad as eg
        >>> S = eg.jacobian(lambda x: x**2, torch.zeros(3)).prepare("scipy")
        >>> value, matrix = S.value_and_jacobian(torch.tensor([1.0, 2.0, 3.0]))
        >>> value.tolist(), matrix.diagonal().tolist()
        ([1.0, 4.0, 9.0], [2.0, 4.0, 6.0])
        """
        self._require_settable(x)
        values, value = self._read_at(x)
        of = self._jacobian._of
        return self._jacobian._pick(value[None], of)[0], self._matrix(values)

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

    def _require_settable(self, x: Tensor) -> None:
        """Raise if x cannot stand in the place of the input."""
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
                "the pattern was found at one point only, and may miss entries at another; leave out "
                "J.pattern(local=True), or give a pattern that holds there, eg.jacobian(f, x, pattern=P)"
            )
        if jacobian._origin is None:
            raise OptionError(f"{side.name} is computed by the function, so it is not set; make a new Jacobian")

    def _read_at(self, x: Tensor) -> tuple[Tensor | None, Tensor]:
        while True:
            if self._read is None:
                self._read = self._compile_read()
            values, check, value = self._read(x)
            if self._compressed.is_symmetric(values, check, self._jacobian._runner):
                return values, value
            self._compressed.drop_symmetry(self._jacobian._runner)
            self._read = None

    def _compile_read(self) -> Callable[[Tensor], tuple[Tensor | None, Tensor | None, Tensor]]:
        """Return a read at another point, compiled where the framework does that."""
        jacobian, compressed, origin = self._jacobian, self._compressed, self._jacobian._origin
        assert origin is not None
        if compressed.coloring.kind == "symmetric":
            # Checked here, since in a program of the user's that is traced there are no numbers to check.
            compressed.read(jacobian._runner)

        def read(x: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
            runner = jacobian._runner.at(origin.relinearize(jacobian._wrt.index, x))
            return *compressed.sweep(runner), runner.linear.value(runner.output)

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
