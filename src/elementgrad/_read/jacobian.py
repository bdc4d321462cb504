"""The lazy Jacobian: an array that is computed where it is indexed, and nowhere else."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from elementgrad._backends.autodiff import Linearization, UnsupportedError
from elementgrad._backends.base import Backend
from elementgrad._backends.registry import backend_of, not_compiled
from elementgrad._html import box, never_raise
from elementgrad._names.call import BoundCall, Operand
from elementgrad._place import edit
from elementgrad._place.place import Place
from elementgrad._place.selection import Selection
from elementgrad._read.plan import BlockLayout, Plan, format_bytes
from elementgrad._read.sparse import Compressed, EntryRequest, Format, Prepared
from elementgrad._read.sweeps import SweepRunner
from elementgrad._sparsity.pattern import Pattern
from elementgrad.errors import (
    BroadcastError,
    DtypeError,
    FrameworkError,
    OptionError,
    PatternError,
    SelectionError,
    TracedError,
    UnconnectedError,
    quoted,
)

if TYPE_CHECKING:
    from concurrent.futures import Executor
    from os import PathLike

    from elementgrad._read.blocks import Blocks

Tensor = Any
Reason = tuple[str, str]
"""The cause of a missing path, and a remedy."""
SIDES = "a Jacobian has two sides, J[out, in], each an index such as 3, (0, 1), (0, ...) or :"
LARGEST_COLOURED = 2 * 10**7
"""The most numbers of a block that is read by colours; the positions of more would take more memory than they do."""


@dataclass(eq=False, slots=True)
class ReadOptions:
    """The options of a read."""

    zero: bool = False
    """True to get zeros instead where there is no path."""
    budget: int | None = None
    batch: int | None = None
    """The number of examples, with `batch=True`."""
    missing_rules: Mapping[str, str] = field(default_factory=dict)
    """Directions that are not to be used, and why."""


@dataclass(eq=False, slots=True)
class Origin:
    """The call that derivatives come from: evaluated again at another point, in another process, or to explain one."""

    call: BoundCall
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    create_graph: bool
    relinearize: Callable[[int, Tensor], Linearization]
    """Linearize the function anew, with another tensor for one of its inputs."""
    element: Place | None = None
    """The output element whose gradient is differentiated, for second derivatives."""


@dataclass(eq=False, slots=True)
class Evaluation:
    """A linearized function, whose Jacobians share it, and the options of their reads."""

    backend: Backend
    linear: Linearization
    options: ReadOptions
    origin: Origin | None = None
    """None for a recording."""


class Jacobian:
    """The derivative of one tensor with respect to another, computed where you index it. Make one with `eg.jacobian`.

    The function was evaluated when the Jacobian was made. Each read plans the fewest sweeps it can: reverse ones
    for rows, forward ones for columns.

    >>> import torch, elementgrad as eg
    >>> X, Y = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0], [7.0, 8.0]])
    >>> J = eg.jacobian(torch.matmul, X, Y, wrt=X)
    >>> J
    <Jacobian of output (2, 2) with respect to args.0 (2, 2): torch float32, shape (2, 2, 2, 2), 64 B if dense>
    >>> J[(0, 0), :]
    tensor([[5., 7.],
            [0., 0.]])
    >>> J[(0, 0), (0, 1)]
    tensor(7.)
    """

    __module__ = "elementgrad"

    __array_ufunc__ = None  # NumPy leaves `u @ J` to us
    __iter__ = None

    def __init__(self, evaluation: Evaluation, of: Operand, wrt: Operand, pattern: Any = None):
        options = evaluation.options
        self._backend = evaluation.backend
        self._of = of
        self._wrt = wrt
        self._options = options
        self._origin = evaluation.origin
        self._examples = () if options.batch is None else (options.batch,)
        self._runner = SweepRunner(
            evaluation.backend,
            evaluation.linear,
            of.index,
            [wrt.index],
            math.prod(of.of),
            [math.prod(wrt.of)],
            1 if options.batch is None else options.batch,
            options.budget,
            dict(options.missing_rules),
        )
        self._known_pattern = None if pattern is None else self._check_pattern(pattern)
        """The pattern of the whole tensors, once it was given or found."""
        self._pattern_is_local = False
        """True if that is the pattern at this point alone."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole: the output's and then the input's, after the batch if there is one."""
        return (*self._examples, *self._of.shape, *self._wrt.shape)

    @property
    def value(self) -> Tensor:
        """The value of the function: the tensor that is differentiated."""
        value = self._runner.linear.read_value(self._of.index, self._select(..., self._of))
        return self._backend.copy(self._pick(self._of.tensor[None], self._of)[0]) if value is None else value

    @not_compiled
    def __getitem__(self, sides: Any) -> Tensor:
        """Return the derivative of `y[out]` with respect to `x[in]`, of shape `y[out].shape + x[in].shape`."""
        if not isinstance(sides, tuple) or len(sides) != 2:
            count = f"{len(sides)} indices" if isinstance(sides, tuple) else "one index"
            raise SelectionError(f"{count}: {SIDES}")
        return self._read(*sides)

    def _read(self, out: Any = ..., in_: Any = ...) -> Tensor:
        rows, columns = self._select(out, self._of), self._select(in_, self._wrt)
        coloured = self._colour_block(rows, columns)
        block = coloured.read(self._runner) if coloured else self._runner.read_block(rows, [columns])[0]
        return self._finish(block, (*rows.shape, *columns.shape))

    @not_compiled
    def entries(self, outs: Any, ins: Any) -> Tensor:
        """Return one number per pair: the derivative of each element of `y[outs]` by its partner in `x[ins]`.

        Args:
            outs: An index into the output.
            ins: An index into the input. The two broadcast, as index arrays do.

        Returns:
            A tensor of the shape to which the two broadcast.

        >>> import torch, elementgrad as eg
        >>> J = eg.jacobian(lambda x: x**2, torch.tensor([1.0, 2.0, 3.0]))
        >>> J.entries([0, 1, 2], [0, 1, 0])
        tensor([2., 4., 0.])
        """
        rows, columns = self._select(outs, self._of), self._select(ins, self._wrt)
        try:
            pairs = np.broadcast_arrays(rows.flat(), columns.flat())
        except ValueError:
            raise BroadcastError(
                f"outs of shape {rows.shape} and ins of shape {columns.shape} do not pair up; give as many of each"
            ) from None
        outs, ins = (pair.reshape(-1) for pair in pairs)
        coloured = self._colour(outs, ins, min(len(np.unique(outs)), len(np.unique(ins))))
        block = coloured.read(self._runner) if coloured else self._runner.read_pairs(outs, ins)
        return self._finish(block, pairs[0].shape)

    @not_compiled
    def diagonal(self) -> Tensor:
        """Return the derivative of each element of the output with respect to its own element of the input.

        Returns:
            A tensor of the shape of the output, which must be that of the input.

        >>> import torch, elementgrad as eg
        >>> eg.jacobian(torch.exp, torch.zeros(3)).diagonal()
        tensor([1., 1., 1.])
        """
        if self._of.shape != self._wrt.shape:
            raise SelectionError(
                f"{self._of.name} of shape {self._of.shape} and {self._wrt.name} of shape {self._wrt.shape} have no "
                "diagonal; they must be of one shape, or use J.entries(outs, ins)"
            )
        return self.entries(..., ...)

    @not_compiled
    def plan(self, out: Any = ..., in_: Any = ...) -> Plan:
        """Return what `J[out, in]` would do: sweeps, their direction, chunks and bytes, against the whole.

        Args:
            out: An index into the output; all of it by default.
            in_: An index into the input; all of it by default.

        Returns:
            The plan, which prints itself.

        >>> import torch, elementgrad as eg
        >>> print(eg.jacobian(torch.sin, torch.ones(500)).plan(3, ...))
        asked      1 row, 500 columns: 500 numbers, 2 KB
        naive      500 reverse sweeps for the whole Jacobian, 1 MB
        planned    1 reverse sweep
        speed-up   500x fewer sweeps
        """
        rows, columns = self._select(out, self._of), self._select(in_, self._wrt)
        coloured = self._colour_block(rows, columns)
        if coloured:
            return coloured.plan(self._runner)
        cone = self._runner.linear.describe(self._of.index, rows, {self._wrt.index: self._wrt.name})
        return replace(self._runner.plan_block(rows, [columns]), cone=cone)

    @not_compiled
    def dense(self, executor: "Executor | None" = None, out: "str | PathLike[str] | None" = None) -> Any:
        """Return the whole Jacobian, of shape `J.shape`.

        Args:
            executor: An executor of concurrent.futures whose workers read blocks: a `ProcessPoolExecutor` that spawns,
                Dask's `client.get_executor()`, mpi4py's `MPIPoolExecutor`.
            out: A path, where the Jacobian is written to a Zarr array block by block. A call with the same path goes
                on where an earlier one ended.

        Returns:
            A tensor, or with `out` the Zarr array.

        >>> import torch, elementgrad as eg
        >>> eg.jacobian(lambda x: x * x.sum(), torch.ones(2)).dense()
        tensor([[3., 1.],
                [1., 3.]])
        """
        if executor is None and out is None:
            return self._read()
        if out is not None:
            from elementgrad._read.zarr import check_out

            check_out(out)
        blocks = self.blocks(executor)
        return blocks.gathered() if out is None else blocks.stored(out)

    @not_compiled
    def blocks(self, executor: "Executor | None" = None) -> "Blocks":
        """Return the whole Jacobian as blocks of rows or columns, to be iterated over.

        A block is read when the loop gets to it, and none is kept, so that a Jacobian larger than the memory can be
        passed through.

        Args:
            executor: An executor of concurrent.futures. Its workers read the blocks, which come as they are done.

        Returns:
            The blocks, each a NumPy array with its rows and columns.

        >>> import torch, elementgrad as eg
        >>> J = eg.jacobian(lambda x: x**2, torch.tensor([1.0, 2.0, 3.0]))
        >>> float(max(abs(block.values).max() for block in J.blocks()))
        6.0
        """
        from elementgrad._read.blocks import Blocks

        return Blocks(self, executor)

    @not_compiled
    def pattern(self, local: bool = False) -> Pattern:
        """Return which entries can be nonzero: a row for each element of the output, a column for each of the input.

        It is found from the framework's graph and misses nothing; an unknown operation counts as dense.
        From then on reads of this Jacobian go by it.

        Args:
            local: Find the pattern at this input, instead of one for every input of the same shape and dtype.

        Returns:
            The pattern.

        Raises:
            PatternError: No pattern can be found, as for a function that branches on its values.

        >>> import torch, elementgrad as eg
        >>> eg.jacobian(lambda x: x[1:] * x[:-1], torch.ones(5)).pattern().dense().astype(int)
        array([[1, 1, 0, 0, 0],
               [0, 1, 1, 0, 0],
               [0, 0, 1, 1, 0],
               [0, 0, 0, 1, 1]])
        """
        self._require_no_batch()
        if not isinstance(local, bool):
            raise OptionError(f"local={quoted(local)} is neither True nor False; give one of them")
        if local or self._pattern_is_local:
            self._known_pattern, self._pattern_is_local = self._find_pattern(local), local
        return self._restrict(self._whole_pattern())

    @not_compiled
    def sparse(self, format: Format | None = None) -> Any:
        """Return the whole Jacobian as a sparse matrix, of as many rows as the output has elements.

        It takes as many sweeps as the pattern has colours.

        Args:
            format: `"csr"`, `"coo"` or `"scipy"` (an array of scipy.sparse, by rows); by default the framework's own
                matrix in the layout that it likes best.

        Returns:
            The sparse matrix.

        >>> import torch, elementgrad as eg
        >>> eg.jacobian(lambda x: x[1:] * x[:-1], torch.arange(4.0)).sparse().to_dense()
        tensor([[1., 0., 0., 0.],
                [0., 2., 1., 0.],
                [0., 0., 3., 2.]])
        """
        return self._prepare(format).sparse()

    @not_compiled
    def prepare(self, format: Format | None = None) -> Prepared:
        """Do once what does not depend on the numbers: `S = J.prepare()`, then `S(x)` at many x.

        Args:
            format: The format of the matrices, as for `sparse`.

        Returns:
            A function from an input to the sparse Jacobian there.

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
        return self._prepare(format)

    @not_compiled
    def verify(self) -> bool:
        """Check by random products that the pattern misses nothing here.

        One or two reverse sweeps are compared with the entries read by colours.

        Returns:
            True.

        Raises:
            PatternError: The pattern misses an entry.

        >>> import numpy as np, torch, elementgrad as eg
        >>> eg.jacobian(torch.sin, torch.ones(3), pattern=eg.Pattern.from_dense(np.eye(3))).verify()
        True
        """
        self._prepare(None).verify()
        return True

    def require_apart(self) -> None:
        """Raise `BatchError` if the examples of a batch mix."""
        self._runner.check_examples_do_not_mix()

    @not_compiled
    def __matmul__(self, v: Any) -> Tensor:
        """Return the product with a tensor of the input's shape (more axes behind it are as many products)."""
        return self._product(v, self._wrt, self._of, forward=True)

    @not_compiled
    def __rmatmul__(self, u: Any) -> Tensor:
        """Return the product with a tensor of the output's shape (more axes before it are as many products)."""
        return self._product(u, self._of, self._wrt, forward=False)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise FrameworkError(
            "a Jacobian is not an array; J.dense() computes all of it; if this was a product u @ J, "
            "J.__rmatmul__(u) did not fit: it says why"
        )

    def __repr__(self) -> str:
        wrt, of = self._wrt, self._of
        size = math.prod(self.shape) * self._backend.itemsize(wrt.tensor)
        dtype = str(wrt.tensor.dtype).replace("torch.", "").replace("<dtype: ", "").strip("'>")
        batch = "" if self._options.batch is None else f" for each of {self._options.batch} examples"
        return (
            f"<Jacobian of {of.name} {of.shape} with respect to {wrt.name} {wrt.shape}{batch}: "
            f"{self._backend.name} {dtype}, shape {self.shape}, {format_bytes(size)} if dense>"
        )

    @never_raise
    def _repr_html_(self) -> str:
        head, *lines = repr(self)[1:-1].split(": ", 1)
        return box(head, lines)

    def _select(self, index: Any, side: Operand) -> Selection:
        return side.select(index, self._backend)

    def _finish(self, block: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        """Return what was read in its shape and dtype; zeros or an error where there is no path."""
        shape = (*self._examples, *shape)
        if block is None:
            self._require_zero_allowed()
            return self._backend.zeros(shape, self._wrt.tensor)
        if block.dtype != self._wrt.tensor.dtype:  # a forward sweep gives it in that of the output
            block = self._backend.cast(block, self._wrt.tensor)
        if tuple(self._backend.shape(block)) != shape:
            block = self._backend.reshape(block, shape)
        return self._backend.load("read").materialize(block)

    def _require_zero_allowed(self) -> None:
        if self._options.zero:
            return
        origin, reason = self._origin, None
        if origin is not None and origin.element is None:  # a missing path of second derivatives is not explained
            reason = explain_missing_path(origin.call, self._of.place, self._wrt.place)
        raise unconnected_error(self._of, self._wrt, self._backend, reason)

    def _read_part(self, plan: Plan, layout: BlockLayout, index: int) -> np.ndarray:
        """Return the values of a block, (rows, columns), after the examples if there is a batch."""
        rows, columns = self._select(..., self._of), self._select(..., self._wrt)
        down, right = layout.bounds(index)
        if layout.mode == "reverse":
            rows = Selection.at_flat(rows.flat().reshape(-1)[down], rows.of)
        else:
            columns = Selection.at_flat(columns.flat().reshape(-1)[right], columns.of)
        coloured = self._colour_block(rows, columns)
        block = coloured.read(self._runner) if coloured else self._runner.read_part(plan, rows, columns)
        return to_numpy(self._finish(block, (rows.size, columns.size)), self._backend)

    # Products

    def _product(self, factor: Any, source: Operand, target: Operand, forward: bool) -> Tensor:
        backend = self._backend
        factor = self._check_factor(factor, source)
        shape, side = tuple(backend.shape(factor)), (*self._examples, *source.shape)
        count = len(shape) - len(side)
        fits = count >= 0 and side == (shape[: len(side)] if forward else shape[count:])
        if not fits:
            raise BroadcastError(
                f"a factor of shape {shape} against {source.name} of shape {side}; give the same shape, with more axes "
                f"{'behind' if forward else 'before'} it for several products"
            )
        stack = shape[len(side) :] if forward else shape[:count]
        if forward and count:
            factor = backend.load("read").transpose(factor, (*range(len(side), len(shape)), *range(len(side))))
        seeds = self._embed(backend.reshape(factor, (math.prod(stack), *side)), source)
        product = self._runner.product(seeds, forward)
        if product is None:
            self._require_zero_allowed()
            product = backend.zeros((math.prod(stack), *backend.shape(target.tensor)), source.tensor)
        rest = (*self._examples, *target.shape)
        product = backend.reshape(backend.cast(self._pick(product, target), target.tensor), (*stack, *rest))
        if forward and count:
            product = backend.load("read").transpose(product, (*range(count, count + len(rest)), *range(count)))
        return backend.load("read").materialize(product)

    def _check_factor(self, factor: Any, side: Operand) -> Tensor:
        backend = self._backend
        if isinstance(factor, Jacobian):
            raise FrameworkError("two Jacobians are not multiplied; read one of them first, as in J @ K.dense()")
        owner = backend_of(factor)
        if owner not in (None, backend):
            raise FrameworkError(f"the Jacobian is {backend.name}'s and the other factor is not; use one framework")
        is_complex = backend.kind(factor) == "c" if owner else np.iscomplexobj(factor)
        if is_complex and backend.kind(side.tensor) != "c":
            raise DtypeError(
                f"a complex factor for {side.name}, which is real; take its real and imaginary parts separately"
            )
        try:
            return backend.cast(factor if factor is not None else "", side.tensor)  # old JAX makes a number of None
        except Exception:
            raise DtypeError(
                f"{type(factor).__name__} is not a factor for {side.name}; give a tensor of its shape"
            ) from None

    def _embed(self, seeds: Tensor, side: Operand) -> Tensor:
        """Return seeds for the elements that make up a side as seeds for the whole tensor."""
        if side.base is None:
            return seeds
        backend = self._backend
        where = side.base.stacked((backend.shape(seeds)[0], self._runner.batch))
        filled = edit.VERBS["add"](backend, backend.zeros(where.of, seeds), where, backend.reshape(seeds, where.shape))
        return backend.reshape(filled, (where.of[0], *backend.shape(side.tensor)))

    def _pick(self, stack: Tensor, side: Operand) -> Tensor:
        """Return the elements that make up a side, of each of a stack of tensors."""
        if side.base is None:
            return stack
        backend = self._backend
        where = side.base.stacked((backend.shape(stack)[0], self._runner.batch))
        picked = backend.take(backend.reshape(stack, where.of), where)
        return backend.reshape(picked, (where.of[0], *self._examples, *side.shape))

    # Sparsity

    def _prepare(self, format: Format | None) -> Prepared:
        self._require_no_batch()
        if format not in (None, "csr", "coo", "scipy"):
            raise OptionError(
                f'format={quoted(format)} is none of "csr", "coo" and "scipy"; give one of them or leave it out'
            )
        whole = self._whole_pattern()
        rows, columns = self._positions()
        pattern = self._restrict(whole)
        hessian = self._origin is not None and self._origin.element is not None
        symmetric = hessian and self._of.index == self._wrt.index and self._of.base is self._wrt.base is None
        symmetric = symmetric and self._backend.kind(self._wrt.tensor) == "f"
        shapes = self._of.of, self._wrt.of
        request = EntryRequest(whole, rows[pattern.rows], columns[pattern.columns], symmetric, shapes)
        return Prepared(self, pattern, request, format)

    def _require_no_batch(self) -> None:
        if self._options.batch is not None:
            raise OptionError("with batch=True there is a Jacobian for each example; leave it out for a sparse one")

    def _whole_pattern(self) -> Pattern:
        if self._known_pattern is None:
            self._known_pattern = self._find_pattern(False)
        return self._known_pattern

    def _find_pattern(self, local: bool) -> Pattern:
        """Return the pattern of the whole tensors, from the derivative program."""
        shape = self._runner.of_size, self._runner.wrt_sizes[0]
        if 0 in shape:
            return Pattern.from_entries([], [], shape)
        try:
            pattern = self._runner.linear.pattern(self._of.index, self._wrt.index, local)
        except UnsupportedError as error:
            here = "" if local else f" that holds for every {self._wrt.name}"
            then = "" if local else "use J.pattern(local=True) for the one at this point, or "
            raise PatternError(
                f"no pattern{here} can be found: {error}; {then}give one, eg.jacobian(f, x, pattern=P)"
            ) from error
        if pattern is None:
            self._require_zero_allowed()
            return Pattern.from_entries([], [], shape)
        return pattern

    def _check_pattern(self, pattern: Any) -> Pattern:
        """Return the user's pattern of both sides as one of the whole tensors."""
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
        rows, columns = self._positions()
        whole = self._runner.of_size, self._runner.wrt_sizes[0]
        return Pattern.from_entries(rows[pattern.rows], columns[pattern.columns], whole)

    def _positions(self) -> tuple[np.ndarray, np.ndarray]:
        """Return where the elements of both sides are in their flattened tensors."""
        rows, columns = (self._select(..., side).flat().reshape(-1) for side in (self._of, self._wrt))
        return rows, columns

    def _restrict(self, whole: Pattern) -> Pattern:
        """Return the part of a pattern of the whole tensors that is about both sides."""
        if self._of.base is None and self._wrt.base is None:
            return whole
        return whole.taken(*self._positions())

    def _colour(self, rows: np.ndarray, columns: np.ndarray, limit: int) -> Compressed | None:
        """Return a read of entries by colours, if the pattern is known and that takes fewer sweeps than `limit`."""
        if self._known_pattern is None or self._options.batch is not None or not len(rows):
            return None
        request = EntryRequest(self._known_pattern, rows, columns)
        coloring = request.color(self._runner.missing_rules)
        return Compressed(request, self._runner, coloring) if coloring.sweeps < limit else None

    def _colour_block(self, rows: Selection, columns: Selection) -> Compressed | None:
        if self._known_pattern is None or not 0 < rows.size * columns.size <= LARGEST_COLOURED:
            return None
        down, right = (selection.flat().reshape(-1) for selection in (rows, columns))
        limit = min(len(np.unique(down)), len(np.unique(right)))
        return self._colour(np.repeat(down, len(right)), np.tile(right, len(down)), limit) if limit > 1 else None


def read_together(jacobians: Sequence[Jacobian]) -> list[Tensor]:
    """Read all of several Jacobians of one output, from sweeps that they share."""
    first = jacobians[0]
    columns = [jacobian._select(..., jacobian._wrt) for jacobian in jacobians]
    runner = first._runner
    if len(jacobians) > 1:
        numbers = [jacobian._wrt.index for jacobian in jacobians]
        sizes = [jacobian._runner.wrt_sizes[0] for jacobian in jacobians]
        runner = runner.with_inputs(numbers, sizes)
    blocks = runner.read_block(first._select(..., first._of), columns)
    return [
        jacobian._finish(block, (*jacobian._of.shape, *jacobian._wrt.shape))
        for jacobian, block in zip(jacobians, blocks, strict=True)
    ]


def operands(jacobian: Jacobian) -> tuple[Operand, Operand]:
    """Return the output that is differentiated, and the input."""
    return jacobian._of, jacobian._wrt


def to_numpy(x: Tensor, backend: Backend) -> np.ndarray:
    """Return the values of a tensor; a dtype that NumPy lacks comes as float32, which holds it exactly."""
    values = backend.to_numpy(x)
    if values is None:
        raise TracedError(
            "blocks are numbers, and these are traced, so they are not known yet; read blocks outside of compiled code"
        )
    return values


def reverse_only(backend: Backend, sides: Sequence[Operand]) -> Mapping[str, str]:
    """Return that forward sweeps are not used for complex numbers, where the directions mean different derivatives."""
    for side in sides:
        if backend.kind(side.tensor) == "c":
            return {"forward": "derivatives of complex numbers follow reverse mode"}
    return {}


def unconnected_error(of: Operand, wrt: Operand, backend: Backend, reason: Reason | None = None) -> UnconnectedError:
    """Return the error about two tensors without a path between them, with the reason and a remedy if known."""
    backwards = of.order is not None and wrt.order is not None and of.order < wrt.order
    hint = (
        f'{wrt.name} is computed after {of.name}, so swap the two, of="{wrt.name}" and wrt="{of.name}"'
        if backwards
        else 'pass unconnected="zero" to get zeros instead'
    )
    why, fix = "no path leads from one to the other", ""
    if reason is not None and not backwards:
        why, fix = reason[0], f"{reason[1]}, or "
    return UnconnectedError(
        f"{of.name} does not depend on {wrt.name} in {backend.name}'s graph: {why}, so there is no "
        f"gradient, not even a zero one; {fix}{hint}"
    )


def explain_missing_path(call: BoundCall, of: Place | None, wrt: Place | None) -> Reason | None:
    """Return why there is no path, if that can be found out by running the function again."""
    from elementgrad._explain.api import Explanation  # only where an error is about to be raised

    if of is None or wrt is None:
        return None
    try:
        diagnosis = Explanation(call, wrt, of, probe=True).diagnosis()
    except Exception:  # the error that is about to be raised matters more
        return None
    return diagnosis.reason if diagnosis.verdict == "unconnected" and diagnosis.cause is not None else None
