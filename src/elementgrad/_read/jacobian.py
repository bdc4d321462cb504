"""Why there is no path between two tensors, and the error that says so.

One Jacobian as a question, which can be asked again in another process.

All of a Jacobian: at once, block by block, on workers, or straight to disk.

The lazy Jacobian: an array that you index, and nothing else is computed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from elementgrad._backends.autodiff import Linearization
from elementgrad._backends.base import Backend
from elementgrad._backends.registry import backend_of, not_compiled
from elementgrad._edit import edit
from elementgrad._html import box, never_raise
from elementgrad._names.call import BoundCall, Operand
from elementgrad._place.place import Place
from elementgrad._place.selection import Selection
from elementgrad._read.budget import to_text
from elementgrad._read.plan import Plan
from elementgrad._read.sparse import Again, Sparse
from elementgrad._read.sweeps import EntryReader
from elementgrad._sparsity.pattern import Pattern
from elementgrad.errors import BroadcastError, DtypeError, FrameworkError, SelectionError, UnconnectedError

if TYPE_CHECKING:
    from concurrent.futures import Executor
    from os import PathLike

    from elementgrad._read.blocks import Blocks

Reason = tuple[str, str]
"""Why there is no path, and what to do about it."""


def unconnected_error(of: Operand, wrt: Operand, backend: Backend, reason: Reason | None = None) -> UnconnectedError:
    """The error about two tensors without a path between them, with the reason and what helps, if they are known."""
    backwards = of.order is not None and wrt.order is not None and of.order < wrt.order
    hint = (
        f'{wrt.name} is computed after {of.name}, so ask the other way round, of="{wrt.name}" and wrt="{of.name}"'
        if backwards
        else 'pass unconnected="zero" if zeros will do'
    )
    why, fix = "no path leads from one to the other", ""
    if reason is not None and not backwards:
        why, fix = reason[0], f"{reason[1]}, or "
    return UnconnectedError(
        f"{of.name} does not depend on {wrt.name} in {backend.name}'s derivative program: {why}, so there is no "
        f"gradient, not even a zero one; {fix}{hint}"
    )


def explain_missing_path(call: BoundCall, of: Place | None, wrt: Place | None) -> Reason | None:
    """Why there is no path, if that can be told; the function runs again for it."""
    from elementgrad._explain.api import Explanation  # only where an error is about to be raised

    if of is None or wrt is None:
        return None
    try:
        found = Explanation(call, wrt, of, probe=True).diagnosis()
    except Exception:  # the error that is about to be raised matters more
        return None
    return found.reason if found.verdict == "unconnected" and found.cause is not None else None


@dataclass(frozen=True, eq=False)
class JacobianSpec:
    """The arguments of `jacobian`, or of `hessian`, for one output and one input."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    zero: bool
    batch: bool
    create_graph: bool
    of: Place | None
    """For a Hessian, the input of its rows."""
    wrt: Place | None
    element: Place | None = None
    """The output element that has the Hessian."""

    def ask(self, budget: int | None, pattern: "Pattern | None") -> "Jacobian":
        """Evaluate the function, here and now."""
        from elementgrad._read.api import (
            hessian,
            jacobian,  # they make Jacobians, which know their question
        )

        options: Any = {"unconnected": "zero" if self.zero else "error", "batch": self.batch, "budget": budget}
        options |= {"kwargs": self.kwargs, "pattern": pattern}
        if self.element is None:
            return jacobian(self.function, *self.args, of=self.of, wrt=self.wrt, **options)
        if self.of == self.wrt:
            return hessian(self.function, *self.args, of=self.element, wrt=self.wrt, **options)
        options["pattern"] = None  # which is that of one of four
        return hessian(self.function, *self.args, of=self.element, wrt=[self.of, self.wrt], **options)[0][1]


Tensor = Any


class Whole:
    """The part of a Jacobian that is about all of it."""

    @not_compiled
    def dense(self, executor: "Executor | None" = None, out: "str | PathLike[str] | None" = None) -> Any:
        """The whole Jacobian, of shape `J.shape`.

        With an `executor` of concurrent.futures (a `ProcessPoolExecutor` that spawns, Dask's `client.get_executor()`,
        mpi4py's `MPIPoolExecutor`) its blocks are read by workers. With `out`, a path, it is written to a Zarr array
        there block by block, which is what comes back. A call with the same `out` goes on where an earlier one
        ended.

        >>> import torch, elementgrad as eg
        >>> eg.jacobian(lambda x: x * x.sum(), torch.ones(2)).dense()
        tensor([[3., 1.],
                [1., 3.]])
        """
        if executor is None and out is None:
            return cast("Jacobian", self)[..., ...]
        if out is not None:
            from elementgrad._read.zarr import check_out

            check_out(out)
        blocks = self.blocks(executor)
        return blocks.gathered() if out is None else blocks.stored(out)

    @not_compiled
    def blocks(self, executor: "Executor | None" = None) -> "Blocks":
        """The whole Jacobian as blocks of rows or columns, to be iterated over: NumPy arrays with where they belong.

        Each is read when it is its turn, and none is kept, so that a Jacobian larger than the memory can be passed
        through. With an `executor` workers read them, and they come as they are done.

        >>> import torch, elementgrad as eg
        >>> J = eg.jacobian(lambda x: x**2, torch.tensor([1.0, 2.0, 3.0]))
        >>> float(max(abs(block.values).max() for block in J.blocks()))
        6.0
        """
        from elementgrad._read.blocks import Blocks

        return Blocks(cast("Jacobian", self), executor)


SIDES = "a Jacobian has two sides, J[out, in], each an index such as 3, (0, 1), (0, ...) or :"


class Jacobian(Whole, Sparse):
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

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise FrameworkError(
            "a Jacobian is no array until it is read, and J.dense() is all of it; if this was a product u @ J, "
            "J.__rmatmul__(u) did not fit: it says why"
        )

    def __init__(
        self,
        backend: Backend,
        linear: Linearization,
        of: Operand,
        wrt: Operand,
        zero: bool = False,
        budget: int | None = None,
        batch: int | None = None,
        why: Callable[[Operand, Operand], Reason | None] | None = None,
        pattern: Pattern | None = None,
        again: Again | None = None,
        symmetric: bool = False,
        question: JacobianSpec | None = None,
    ):
        self._backend = backend
        self._of = of
        self._wrt = wrt
        self._zero = zero
        self._batch = batch
        self._linear = linear
        self._why = why
        self._again = again
        self._symmetric = symmetric
        self._question = question
        sizes = math.prod(of.of), [math.prod(wrt.of)]
        self._reader = EntryReader(
            backend, linear, of.index, [wrt.index], *sizes, 1 if batch is None else batch, budget
        )
        self._known = None if pattern is None else self._given(pattern)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole: the output's and then the input's, after the batch if there is one."""
        return (*self._examples, *self._of.shape, *self._wrt.shape)

    @property
    def value(self) -> Tensor:
        """What the function gave: the tensor that is differentiated."""
        return self._backend.copy(self._picked(self._of.tensor[None], self._of)[0])

    @not_compiled
    def __getitem__(self, sides: Any) -> Tensor:
        """The derivative of `y[out]` with respect to `x[in]`, of shape `y[out].shape + x[in].shape`."""
        rows, columns = self._sides(sides)
        coloured = self._block(rows, columns)
        block = coloured.read(self._reader) if coloured else self._reader.block(rows, [columns])[0]
        return self._shaped(block, (*rows.shape, *columns.shape))

    @not_compiled
    def entries(self, outs: Any, ins: Any) -> Tensor:
        """One number per pair: the derivative of each element of `y[outs]` with respect to its partner in `x[ins]`.

        The two broadcast, as index arrays do.

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
        coloured = self._coloured(outs, ins, min(len(np.unique(outs)), len(np.unique(ins))))
        block = coloured.read(self._reader) if coloured else self._reader.pairs(outs, ins)
        return self._shaped(block, pairs[0].shape)

    @not_compiled
    def diagonal(self) -> Tensor:
        """The derivative of each element of the output with respect to its own element of the input.

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
        """What `J[out, in]` would do: sweeps, their direction, chunks and bytes, against the whole.

        >>> import torch, elementgrad as eg
        >>> print(eg.jacobian(torch.sin, torch.ones(500)).plan(3, ...))
        asked      1 row, 500 columns: 500 numbers, 2 KB
        naive      500 reverse sweeps for the whole Jacobian, 1 MB
        planned    1 reverse sweep
        speed-up   500x fewer sweeps
        """
        rows, columns = self._select(out, self._of), self._select(in_, self._wrt)
        coloured = self._block(rows, columns)
        return coloured.plan(self._reader) if coloured else self._reader.plan_of(rows, [columns])

    @not_compiled
    def __matmul__(self, v: Any) -> Tensor:
        """The product with a tensor of the input's shape (more axes behind it are as many products)."""
        return self._product(v, self._wrt, self._of, forward=True)

    @not_compiled
    def __rmatmul__(self, u: Any) -> Tensor:
        """The product with a tensor of the output's shape (more axes before it are as many products)."""
        return self._product(u, self._of, self._wrt, forward=False)

    def __repr__(self) -> str:
        wrt, of = self._wrt, self._of
        size = math.prod(self.shape) * self._backend.itemsize(wrt.tensor)
        dtype = str(wrt.tensor.dtype).replace("torch.", "").replace("<dtype: ", "").strip("'>")
        batch = "" if self._batch is None else f" for each of {self._batch} examples"
        return (
            f"<Jacobian of {of.name} {of.shape} with respect to {wrt.name} {wrt.shape}{batch}: "
            f"{self._backend.name} {dtype}, shape {self.shape}, {to_text(size)} if dense>"
        )

    @never_raise
    def _repr_html_(self) -> str:
        head, *lines = repr(self)[1:-1].split(": ", 1)
        return box(head, lines)

    def require_apart(self) -> None:
        """Raise `BatchError` if the examples of a batch mix."""
        self._reader.require_apart()

    @property
    def _examples(self) -> tuple[int, ...]:
        return () if self._batch is None else (self._batch,)

    def _sides(self, sides: Any) -> tuple[Selection, Selection]:
        if not isinstance(sides, tuple) or len(sides) != 2:
            given = f"{len(sides)} indices" if isinstance(sides, tuple) else "one index"
            raise SelectionError(f"{given}: {SIDES}")
        return self._select(sides[0], self._of), self._select(sides[1], self._wrt)

    def _select(self, index: Any, side: Operand) -> Selection:
        return side.select(index, self._backend)

    def _shaped(self, block: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        """What was read, in the shape it is wanted in; where there is no path, zeros or an error."""
        shape = (*self._examples, *shape)
        if block is None:
            self._require_zero()
            return self._backend.zeros(shape, self._wrt.tensor)
        if block.dtype != self._wrt.tensor.dtype:  # a forward sweep gives it in that of the output
            block = self._backend.cast(block, self._wrt.tensor)
        if tuple(self._backend.shape(block)) != shape:
            block = self._backend.reshape(block, shape)
        return self._backend.load("read").materialize(block)

    def _require_zero(self) -> None:
        if not self._zero:
            reason = self._why(self._of, self._wrt) if self._why is not None else None
            raise unconnected_error(self._of, self._wrt, self._backend, reason)

    def _product(self, other: Any, this: Operand, that: Operand, forward: bool) -> Tensor:
        backend = self._backend
        if isinstance(other, Jacobian):
            raise FrameworkError("two Jacobians are not multiplied; read one of them first, as in J @ K.dense()")
        if backend_of(other) not in (None, backend):
            raise FrameworkError(f"the Jacobian is {backend.name}'s and the other factor is not; use one framework")
        complex_ = backend.kind(other) == "c" if backend_of(other) else np.iscomplexobj(other)
        if complex_ and backend.kind(this.tensor) != "c":
            raise DtypeError(
                f"a complex factor for {this.name}, which is real; take its real and imaginary parts apart"
            )
        try:
            other = backend.cast(other if other is not None else "", this.tensor)  # old JAX makes a number of None
        except Exception:
            raise DtypeError(
                f"{type(other).__name__} is no factor for {this.name}; give a tensor of its shape"
            ) from None
        shape, mine = tuple(backend.shape(other)), (*self._examples, *this.shape)
        count = len(shape) - len(mine)
        fits = count >= 0 and mine == (shape[: len(mine)] if forward else shape[count:])
        if not fits:
            raise BroadcastError(
                f"a factor of shape {shape} against {this.name} of shape {mine}; give the same shape, with more axes "
                f"{'behind' if forward else 'before'} it for several products"
            )
        more = shape[len(mine) :] if forward else shape[:count]
        if forward and count:
            axes = (*range(len(mine), len(shape)), *range(len(mine)))
            other = backend.load("read").transpose(other, axes)
        seeds = self._embedded(backend.reshape(other, (math.prod(more), *mine)), this)
        product = self._reader.product(seeds, forward)
        if product is None:
            self._require_zero()
            product = backend.zeros((math.prod(more), *backend.shape(that.tensor)), this.tensor)
        rest = (*self._examples, *that.shape)
        product = backend.reshape(backend.cast(self._picked(product, that), that.tensor), (*more, *rest))
        if forward and count:
            product = backend.load("read").transpose(product, (*range(count, count + len(rest)), *range(count)))
        return backend.load("read").materialize(product)

    def _embedded(self, seeds: Tensor, side: Operand) -> Tensor:
        """Seeds for some elements of a tensor, as seeds for all of it."""
        if side.base is None:
            return seeds
        backend = self._backend
        where = side.base.stacked((backend.shape(seeds)[0], self._batch or 1))
        filled = edit.VERBS["add"](backend, backend.zeros(where.of, seeds), where, backend.reshape(seeds, where.shape))
        return backend.reshape(filled, (where.of[0], *backend.shape(side.tensor)))

    def _picked(self, stack: Tensor, side: Operand) -> Tensor:
        """Of each of a stack of tensors the elements that make up a side."""
        if side.base is None:
            return stack
        backend = self._backend
        where = side.base.stacked((backend.shape(stack)[0], self._batch or 1))
        picked = backend.take(backend.reshape(stack, where.of), where)
        return backend.reshape(picked, (where.of[0], *self._examples, *side.shape))


def read_together(jacobians: Sequence[Jacobian]) -> list[Tensor]:
    """All of several Jacobians of one output, from sweeps that they share."""
    first = jacobians[0]
    numbers = [jacobian._reader.inputs[0] for jacobian in jacobians]
    sizes = [jacobian._reader.wrt_sizes[0] for jacobian in jacobians]
    columns = [jacobian._select(..., jacobian._wrt) for jacobian in jacobians]
    blocks = replace(first._reader, inputs=numbers, wrt_sizes=sizes).block(first._select(..., first._of), columns)
    return [
        jacobian._shaped(block, (*jacobian._of.shape, *jacobian._wrt.shape))
        for jacobian, block in zip(jacobians, blocks, strict=True)
    ]


def sides(jacobian: Jacobian) -> tuple[Operand, Operand]:
    """What is differentiated, and with respect to what."""
    return jacobian._of, jacobian._wrt
