"""The lazy Jacobian: an array that you index, and nothing else is computed."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from elementgrad import edit
from elementgrad.backends import Backend, owner, plain
from elementgrad.backends.linear import Linear
from elementgrad.errors import BroadcastError, DtypeError, FrameworkError, SelectionError
from elementgrad.markup import box, guarded
from elementgrad.plan import budget as bytes_of
from elementgrad.plan.plan import Plan
from elementgrad.plan.run import Reader
from elementgrad.prepared import Again
from elementgrad.question import Question
from elementgrad.reasons import Reason, unconnected
from elementgrad.selection import Selection
from elementgrad.side import Side
from elementgrad.sparse import Sparse
from elementgrad.sparsity.pattern import Pattern
from elementgrad.whole import Whole

Tensor = Any
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
        linear: Linear,
        of: Side,
        wrt: Side,
        zero: bool = False,
        budget: int | None = None,
        batch: int | None = None,
        why: Callable[[Side, Side], Reason | None] | None = None,
        pattern: Pattern | None = None,
        again: Again | None = None,
        symmetric: bool = False,
        question: Question | None = None,
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
        self._reader = Reader(backend, linear, of.number, [wrt.number], *sizes, 1 if batch is None else batch, budget)
        self._known = None if pattern is None else self._given(pattern)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole: the output's and then the input's, after the batch if there is one."""
        return (*self._examples, *self._of.shape, *self._wrt.shape)

    @property
    def value(self) -> Tensor:
        """What the function gave: the tensor that is differentiated."""
        return self._backend.fresh(self._picked(self._of.tensor[None], self._of)[0])

    @plain
    def __getitem__(self, sides: Any) -> Tensor:
        """The derivative of `y[out]` with respect to `x[in]`, of shape `y[out].shape + x[in].shape`."""
        rows, columns = self._sides(sides)
        coloured = self._block(rows, columns)
        block = coloured.read(self._reader) if coloured else self._reader.block(rows, [columns])[0]
        return self._shaped(block, (*rows.shape, *columns.shape))

    @plain
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

    @plain
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

    @plain
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

    @plain
    def __matmul__(self, v: Any) -> Tensor:
        """The product with a tensor of the input's shape (more axes behind it are as many products)."""
        return self._product(v, self._wrt, self._of, forward=True)

    @plain
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
            f"{self._backend.name} {dtype}, shape {self.shape}, {bytes_of.to_text(size)} if dense>"
        )

    @guarded
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

    def _select(self, index: Any, side: Side) -> Selection:
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
        return self._backend.materialize(block)

    def _require_zero(self) -> None:
        if not self._zero:
            reason = self._why(self._of, self._wrt) if self._why is not None else None
            raise unconnected(self._of, self._wrt, self._backend, reason)

    def _product(self, other: Any, this: Side, that: Side, forward: bool) -> Tensor:
        backend = self._backend
        if isinstance(other, Jacobian):
            raise FrameworkError("two Jacobians are not multiplied; read one of them first, as in J @ K.dense()")
        if owner(other) not in (None, backend):
            raise FrameworkError(f"the Jacobian is {backend.name}'s and the other factor is not; use one framework")
        complex_ = backend.kind(other) == "c" if owner(other) else np.iscomplexobj(other)
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
            other = backend.transpose(other, axes)
        seeds = self._embedded(backend.reshape(other, (math.prod(more), *mine)), this)
        product = self._reader.product(seeds, forward)
        if product is None:
            self._require_zero()
            product = backend.zeros((math.prod(more), *backend.shape(that.tensor)), this.tensor)
        rest = (*self._examples, *that.shape)
        product = backend.reshape(backend.cast(self._picked(product, that), that.tensor), (*more, *rest))
        if forward and count:
            product = backend.transpose(product, (*range(count, count + len(rest)), *range(count)))
        return backend.materialize(product)

    def _embedded(self, seeds: Tensor, side: Side) -> Tensor:
        """Seeds for some elements of a tensor, as seeds for all of it."""
        if side.base is None:
            return seeds
        backend = self._backend
        where = side.base.stacked((backend.shape(seeds)[0], self._batch or 1))
        filled = edit.VERBS["add"](backend, backend.zeros(where.of, seeds), where, backend.reshape(seeds, where.shape))
        return backend.reshape(filled, (where.of[0], *backend.shape(side.tensor)))

    def _picked(self, stack: Tensor, side: Side) -> Tensor:
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


def sides(jacobian: Jacobian) -> tuple[Side, Side]:
    """What is differentiated, and with respect to what."""
    return jacobian._of, jacobian._wrt
