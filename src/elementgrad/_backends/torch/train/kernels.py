"""Gradients for the leaves of a parameter instead of for the parameter.

Kernels compute the entries of a parameter's gradient that train, without the rest of it: `TorchProduct` for linear
layers, `TorchLookup` for embeddings, `TorchCorrelation` for convolutions. Each is made once for a set of elements, and
called in the backward with the gradient of the output and what else the layer saved.

Autograd functions call them: `KernelFunction` runs a linear operation or a convolution,
`LookupFunction` an embedding and `BagFunction` an embedding bag. `AliasFunction` is for all other uses of a parameter.
The parameter itself gets a gradient too if it asks for one.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from elementgrad._backends.torch._compat import is_compiling, unsafe_view
from elementgrad._backends.torch.train.parameter import index_tensor
from elementgrad._cleanup import safe_context
from elementgrad._train.kernels import CellBlock, split_by_offset
from elementgrad.errors import FrameworkError

Tensor = torch.Tensor

# Costs per row of the factors, in nanoseconds, in float32 on a CPU: rough, and only their ratios count (`make bench`
# shows the outcome). The first and the third were measured on one core, the others on two.
GATHERED = 3.8  # one entry: two columns read, multiplied and summed
MULTIPLIED = 0.0105  # one entry of a matrix product
SELECTED = 2.2  # one column copied out of a factor
TRANSPOSED = 2.3  # one column turned into a row
SAMPLED = 0.12  # one entry of a sampled product of such rows
CPU_CHUNK, DEVICE_CHUNK = 1 << 18, 1 << 24
"""Numbers of a factor that are processed at a time: on a CPU, as many as stay in its caches."""
SMALL_TABLE = 1 << 16
"""The most numbers for which all rows of a lookup are summed, without first finding the rows that occur."""


def connect_leaves(weight: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """Return `weight`, which holds `values` at `index` already, as a differentiable function of `values`."""
    change = (values - values.detach()).to(weight.dtype)
    return weight.reshape(-1).index_add(0, index, change).view(weight.shape)


class TorchProduct:
    """Entries (row, column) of `left.T @ right`, where left has `rows` columns and right has `columns`.

    There are three ways, and the cheapest is taken: "gather" multiplies the two columns of each entry, "block"
    multiplies the columns that occur and selects from their product, "sample" is PyTorch's sampled product.

    >>> import torch
    >>> from elementgrad._backends.torch.train.kernels import TorchProduct
    >>> product = TorchProduct([0, 1], [1, 1], rows=2, columns=2, device="cpu")
    >>> left, right = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0], [7.0, 8.0]])
    >>> product(left, right)
    tensor([30., 44.])
    """

    def __init__(self, row: np.ndarray, column: np.ndarray, rows: int, columns: int, device: torch.device | str):
        block = CellBlock(row, column, (rows, columns))
        self._size = rows, columns
        self._row, self._column = index_tensor(block.row, device), index_tensor(block.column, device)
        self._rows = None if block.has_all_rows else index_tensor(block.rows, device)
        self._columns = None if block.has_all_columns else index_tensor(block.columns, device)
        self._csr: Tensor | None = None
        self.costs = {
            "gather": GATHERED * len(block.row),
            "block": MULTIPLIED * block.size + SELECTED * block.copied,
            "sample": TRANSPOSED * (rows + columns) + SAMPLED * len(block.row),
        }
        self._differentiable = self._cheapest("gather", "block")
        self._fastest = self._cheapest("gather", "block", "sample")
        self._cell: Tensor | None = None
        if self._block in (self._differentiable, self._fastest) and not block.is_in_order:
            self._cell = index_tensor(block.cell, device)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_csr": None}

    @property
    def cost(self) -> float:
        """The cost of one row of the factors, in nanoseconds."""
        return min(self.costs.values())

    def __call__(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the entries, for factors of shape (n, rows) and (n, columns)."""
        return self._fastest(left, right) if self._can_sample(left, right) else self._differentiable(left, right)

    def connect(self, weight: Tensor, values: Tensor) -> Tensor:
        return connect_leaves(weight, self._row * self._size[1] + self._column, values)

    def _cheapest(self, *ways: str) -> Callable[[Tensor, Tensor], Tensor]:
        return getattr(self, f"_{min(ways, key=self.costs.__getitem__)}")

    def _can_sample(self, left: Tensor, right: Tensor) -> bool:
        # PyTorch can neither compile a sampled product nor differentiate it in this form.
        return (
            not is_compiling()
            and not (torch.is_grad_enabled() and (left.requires_grad or right.requires_grad))
            and left.device.type == "cpu"
            and left.dtype == right.dtype
            and left.dtype in (torch.float32, torch.float64)
        )

    def _gather(self, left: Tensor, right: Tensor) -> Tensor:
        chunk = CPU_CHUNK if left.device.type == "cpu" else DEVICE_CHUNK
        length = max(16, chunk // max(1, len(self._row)))
        if is_compiling() or len(left) <= length:
            return self._gather_chunk(left, right)
        first, *others = zip(left.split(length), right.split(length), strict=True)
        total = self._gather_chunk(*first)
        for factors in others:
            total = total + self._gather_chunk(*factors)
        return total

    def _gather_chunk(self, left: Tensor, right: Tensor) -> Tensor:
        return (left.index_select(1, self._row) * right.index_select(1, self._column)).sum(0)

    def _block(self, left: Tensor, right: Tensor) -> Tensor:
        left = left if self._rows is None else left.index_select(1, self._rows)
        right = right if self._columns is None else right.index_select(1, self._columns)
        block = (left.t() @ right).reshape(-1)
        return block if self._cell is None else block.index_select(0, self._cell)

    def _sample(self, left: Tensor, right: Tensor) -> Tensor:
        with safe_context(warnings.catch_warnings()):
            warnings.simplefilter("ignore")  # PyTorch warns once per process that the CSR layout is in beta
            pattern, order = self._csr_pattern(left.dtype)
            length = max(64, CPU_CHUNK // sum(self._size))
            first, *others = zip(left.split(length), right.split(length), strict=True)
            sums = torch.sparse.sampled_addmm(pattern, first[0].t(), first[1], beta=0)
            for factors in others:
                torch.sparse.sampled_addmm(sums, factors[0].t(), factors[1], out=sums)
            entries = sums.values()
        return entries if order is None else torch.empty_like(entries).index_copy_(0, order, entries)

    def _csr_pattern(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        if self._csr is None or self._csr.dtype != dtype:
            rows, columns = self._size
            flat = self._row * columns + self._column
            order = flat.argsort()
            self._order = None if bool((flat.diff() > 0).all()) else order
            ends = torch.bincount(self._row, minlength=rows).cumsum(0)
            starts = torch.cat([ends.new_zeros(1), ends])
            zeros = torch.zeros(len(flat), dtype=dtype)
            self._csr = torch.sparse_csr_tensor(
                starts, self._column[order], zeros, (rows, columns), check_invariants=False
            )
        return self._csr, self._order


class TorchLookup:
    """Entries (row, column) of the gradient of a table whose rows were looked up.

    >>> import torch
    >>> from elementgrad._backends.torch.train.kernels import TorchLookup
    >>> lookup = TorchLookup([0, 7], [1, 0], columns=2, device="cpu")
    >>> lookup(torch.tensor([7, 3, 7]), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    tensor([0., 6.])
    """

    def __init__(self, row: np.ndarray, column: np.ndarray, columns: int, device: torch.device | str):
        block = CellBlock(row, column, (int(np.max(row, initial=0)) + 1, columns))
        self._rows, self._row_of = index_tensor(block.rows, device), index_tensor(block.row_of, device)
        self._columns = None if block.has_all_columns else index_tensor(block.columns, device)
        self._column_of = index_tensor(block.column_of, device)
        self._width = len(block.columns)
        self._cell = None if block.is_in_order else index_tensor(block.cell, device)
        self._single = (int(block.rows[0]), int(block.columns[0])) if len(block.row) == 1 else None
        self._large = block.size > SMALL_TABLE + 4 * len(block.row)

    def __call__(self, tokens: Tensor, gradient: Tensor) -> Tensor:
        """Return the entries, for n tokens and the gradients of the n rows that they looked up."""
        if not len(self._row_of):
            return gradient.new_zeros(0)
        count = len(self._rows)
        if self._single is not None:
            row, column = self._single
            return gradient.select(1, column).masked_fill(tokens != row, 0).sum(0, keepdim=True)
        gradient = gradient if self._columns is None else gradient.index_select(1, self._columns)
        if count == 1:
            sums = gradient.masked_fill((tokens != self._rows).unsqueeze(1), 0).sum(0)
        else:
            place = torch.searchsorted(self._rows, tokens).clamp(max=count - 1)
            hit = self._rows.index_select(0, place) == tokens
            if self._large and not is_compiling():
                return self._sum_present_rows(place[hit], gradient[hit])
            place = place.where(hit, count)  # all other tokens are summed in a row that is cut off
            sums = gradient.new_zeros(count + 1, self._width).index_add(0, place, gradient)[:count].view(-1)
        return sums if self._cell is None else sums.index_select(0, self._cell)

    def connect(self, table: Tensor, values: Tensor) -> Tensor:
        column = self._column_of if self._columns is None else self._columns.index_select(0, self._column_of)
        return connect_leaves(table, self._rows.index_select(0, self._row_of) * table.shape[1] + column, values)

    def _sum_present_rows(self, rows: Tensor, gradient: Tensor) -> Tensor:
        """Compute sums only for the rows that occur, which may be far fewer than those that train."""
        present, place = rows.unique(return_inverse=True)
        sums = gradient.new_zeros(len(present) + 1, self._width).index_add(0, place, gradient)
        sum_of = torch.full_like(self._rows, len(present))
        sum_of = sum_of.index_copy_(0, present, torch.arange(len(present)).to(present))
        return sums.view(-1).index_select(0, sum_of.index_select(0, self._row_of) * self._width + self._column_of)


@dataclass(frozen=True)
class TorchConvGrid:
    """The geometry of a convolution."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def backward(self, gradient: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool]) -> Sequence[Any]:
        """Return the gradients of the input and of the weight, None where not wanted."""
        geometry = list(self.stride), list(self.padding), list(self.dilation)
        return torch.ops.aten.convolution_backward(
            gradient,
            x,
            weight,
            [weight.shape[0]],
            *geometry,
            False,
            [0] * len(self.stride),
            self.groups,
            [*wanted, False],
        )[:2]

    def overlap(self, offset: tuple[int, ...], size: torch.Size, out: torch.Size) -> tuple[list[slice], list[slice]]:
        """Return the outputs that an element of the kernel links to inputs, and those inputs, as slices per axis."""
        outputs, inputs = [], []
        for at, stride, padding, dilation, length, count in zip(
            offset, self.stride, self.padding, self.dilation, size, out, strict=True
        ):
            start = at * dilation - padding
            first = max(0, -(start // stride))
            last = max(first, min(count, (length - 1 - start) // stride + 1))
            outputs.append(slice(first, last))
            inputs.append(slice(first * stride + start, max(0, (last - 1) * stride + start + 1), stride))
        return outputs, inputs


class _OffsetEntries(NamedTuple):
    """The entries at one offset of a convolution's kernel."""

    offset: tuple[int, ...]
    outs: Tensor
    ins: Tensor
    """The channels that occur."""
    product: TorchProduct


class TorchCorrelation:
    """Entries of the gradient of a convolution's weight, given by their coordinates.

    One offset of the kernel pairs every output with one input, so the gradient at that offset is the product of the two
    over all pairs, of which `TorchProduct` computes entries. If there are many entries, it is cheaper to let PyTorch
    compute the whole gradient for the channels that occur.
    """

    def __init__(
        self,
        coordinates: tuple[np.ndarray, ...],
        shape: tuple[int, ...],
        grid: TorchConvGrid,
        device: torch.device | str,
    ):
        out, inside, *offsets = coordinates
        self._grid = grid
        self._index = index_tensor(np.ravel_multi_index(coordinates, shape), device)
        channel = out // (shape[0] // grid.groups) * shape[1] + inside
        parts, order = split_by_offset(np.ravel_multi_index(offsets, shape[2:]))
        self._order = index_tensor(order, device)
        self._parts: list[_OffsetEntries] = []
        cost = 0.0
        for offset, entries in parts:
            block = CellBlock(out[entries], channel[entries], (shape[0], shape[1] * grid.groups))
            product = TorchProduct(block.row_of, block.column_of, len(block.rows), len(block.columns), device)
            cost += product.cost + SELECTED * (len(block.rows) + len(block.columns))
            at = tuple([int(axis) for axis in np.unravel_index(offset, shape[2:])])
            outs, ins = index_tensor(block.rows, device), index_tensor(block.columns, device)
            self._parts.append(_OffsetEntries(at, outs, ins, product))
        # Channels cannot be left out of a convolution in groups.
        block, apart = CellBlock(out, inside, shape[:2]), grid.groups > 1
        self._outs = None if apart or block.has_all_rows else index_tensor(block.rows, device)
        self._ins = None if apart or block.has_all_columns else index_tensor(block.columns, device)
        self._shape = shape if apart else (len(block.rows), len(block.columns), *shape[2:])
        channels = (out, inside) if apart else (block.row_of, block.column_of)
        self._flat = index_tensor(np.ravel_multi_index((*channels, *offsets), self._shape), device)
        copied = 0 if apart else block.copied
        self._by_channels = cost > MULTIPLIED * prod(self._shape) + SELECTED * copied

    def __call__(self, gradient: Tensor, x: Tensor) -> Tensor:
        """Return the entries, for the gradient of the output and the input."""
        if not self._parts:
            return gradient.new_zeros(0)
        return self._take_from_channels(gradient, x) if self._by_channels else self._take_by_offset(gradient, x)

    def connect(self, weight: Tensor, values: Tensor) -> Tensor:
        return connect_leaves(weight, self._index, values)

    def _take_from_channels(self, gradient: Tensor, x: Tensor) -> Tensor:
        gradient = gradient if self._outs is None else gradient.index_select(1, self._outs)
        x = x if self._ins is None else x.index_select(1, self._ins)
        weight = gradient.new_empty(1).expand(self._shape)
        return self._grid.backward(gradient, x, weight, (False, True))[1].reshape(-1)[self._flat]

    def _take_by_offset(self, gradient: Tensor, x: Tensor) -> Tensor:
        values = []
        # `index_select` copies all of a tensor that is not contiguous, so select channels first and slice them then.
        gradient, x = gradient.contiguous(), x.contiguous()
        for part in self._parts:
            outputs, inputs = self._grid.overlap(part.offset, x.shape[2:], gradient.shape[2:])
            left = gradient.index_select(1, part.outs)[(slice(None), slice(None), *outputs)]
            right = x.index_select(1, part.ins)[(slice(None), slice(None), *inputs)]
            values.append(part.product(left.transpose(0, 1).flatten(1).t(), right.transpose(0, 1).flatten(1).t()))
        return torch.cat(values).index_select(0, self._order)


CONVOLUTIONS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}


# Each operation has the same three methods:
#   forward   returns the output;
#   backward  returns the gradients of the input and of the whole weight, None where not wanted;
#   entries   returns the gradients of the weight's leaves, by a kernel.
# `bias_axis` is the axis of the output that a bias is added along.


@dataclass(frozen=True)
class LinearOp:
    """`x @ weight.T + bias`, or `x @ weight + bias` if transposed."""

    transposed: bool = False
    bias_axis = -1

    def forward(self, x: Tensor, weight: Tensor, bias: Any) -> Tensor:
        if self.transposed:
            output = torch.addmm(bias, x.view(-1, x.shape[-1]), weight)
        else:
            output = functional.linear(x, weight, bias)
        # The output of an autograd function must not be a view, or it could not be written to in place.
        return unsafe_view(output, (*x.shape[:-1], output.shape[-1]))

    def backward(self, gradient: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool]) -> Any:
        of_input = gradient @ (weight.t() if self.transposed else weight).conj() if wanted[0] else None
        if not wanted[1]:
            return of_input, None
        left, right = _as_rows(gradient), _as_rows(x).conj()
        return of_input, right.t() @ left if self.transposed else left.t() @ right

    def entries(self, kernel: Any, gradient: Tensor, x: Tensor) -> Tensor:
        left, right = _as_rows(gradient), _as_rows(x).conj()
        return kernel(right, left) if self.transposed else kernel(left, right)


@dataclass(frozen=True)
class ConvolutionOp:
    """A convolution of one to three axes, not transposed."""

    grid: TorchConvGrid
    bias_axis = 1

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        grid = self.grid
        convolve = CONVOLUTIONS[len(grid.stride)]
        return convolve(x, weight, bias, grid.stride, grid.padding, grid.dilation, grid.groups)

    def backward(self, gradient: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool]) -> Any:
        return self.grid.backward(gradient, x, weight, wanted) if any(wanted) else (None, None)

    def entries(self, kernel: Any, gradient: Tensor, x: Tensor) -> Tensor:
        return kernel(gradient, x)


def _bias_gradient(op: Any, gradient: Tensor, index: Tensor | None = None) -> Tensor:
    """Return the gradient of a bias, or its entries at `index`."""
    axis = op.bias_axis % gradient.ndim
    gradient = gradient if index is None else gradient.index_select(axis, index)
    others = [other for other in range(gradient.ndim) if other != axis]
    return gradient.sum(others) if others else gradient  # an empty list of axes would mean all of them


def _as_rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _differentiates_backward() -> bool:
    return torch.is_grad_enabled() and not is_compiling()


class KernelFunction(torch.autograd.Function):
    """An operation of a layer. The leaves of the weight are one vector, and so are those of the bias."""

    @staticmethod
    def forward(
        ctx: Any, op: Any, kernels: tuple[Any, Any], x: Tensor, weight: Tensor, bias: Any, leaf: Any, bias_leaf: Any
    ) -> Tensor:
        ctx.op, ctx.kernels = op, kernels
        # Only what the backward needs is saved, as autograd refuses a backward if a saved tensor was written to.
        needs_weight = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
        ctx.save_for_backward(x, *((weight, leaf) if needs_weight else (None, None)))
        return op.forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        op, (kernel, bias_kernel) = ctx.op, ctx.kernels
        x, weight, leaf = ctx.saved_tensors
        if leaf is not None and _differentiates_backward():
            weight = kernel.connect(weight, leaf)
        _, _, input_wanted, weight_wanted, bias_wanted, leaf_wanted, bias_leaf_wanted = ctx.needs_input_grad
        of_input, of_weight = op.backward(gradient, x, weight, (input_wanted, weight_wanted))
        of_bias = _bias_gradient(op, gradient) if bias_wanted else None
        of_leaf = op.entries(kernel, gradient, x) if leaf_wanted else None
        of_bias_leaf = _bias_gradient(op, gradient, bias_kernel) if bias_leaf_wanted else None
        return None, None, of_input, of_weight, of_bias, of_leaf, of_bias_leaf


def run_with_kernels(
    op: Any, kernels: tuple[Any, Any], x: Tensor, weight: Tensor, bias: Any, leaf: Any, bias_leaf: Any
) -> Tensor:
    """Run `KernelFunction` in the dtype of autocast, which does not see operations inside of a function."""
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = _autocast(x, dtype), _autocast(weight, dtype)
        bias = None if bias is None else _autocast(bias, dtype)
    return KernelFunction.apply(op, kernels, x, weight, bias, leaf, bias_leaf)


def _autocast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype is torch.float64 else x.to(dtype)


class LookupFunction(torch.autograd.Function):
    """Rows of a table, as in `nn.Embedding`."""

    @staticmethod
    def forward(ctx: Any, lookup: Any, options: tuple[Any, ...], ids: Tensor, table: Tensor, leaf: Tensor) -> Tensor:
        ctx.lookup, ctx.options, ctx.rows = lookup, options, table.shape[0]
        ctx.save_for_backward(ids)
        return torch.embedding(table, ids)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        padding, by_frequency = ctx.options
        table = None
        if ctx.needs_input_grad[3]:
            no_row = -1 if padding is None else padding
            table = torch.ops.aten.embedding_backward(gradient, ids, ctx.rows, no_row, by_frequency, False)
        tokens, rows = (ids, gradient) if ids.ndim == 1 else (ids.reshape(-1), _as_rows(gradient))
        if by_frequency:
            rows = rows / token_counts(tokens).unsqueeze(1)
        if padding is not None:
            tokens = tokens.where(tokens != padding, -1)
        return None, None, None, table, ctx.lookup(tokens, rows)


class BagFunction(torch.autograd.Function):
    """Sums or means of rows of a table, as in `nn.EmbeddingBag`.

    The gradient of a token's row is that of its bag, times its share of the bag and its weight, by its frequency.
    """

    @staticmethod
    def forward(
        ctx: Any,
        lookup: Any,
        run: Callable[[Tensor, Tensor | None], Tensor],
        tokens: Tensor,
        bags: Tensor,
        share: Tensor,
        frequency: Tensor | None,
        table: Tensor,
        weights: Tensor | None,
        leaf: Tensor,
    ) -> Tensor:
        ctx.lookup, ctx.table_shape = lookup, table.shape
        needed = (table, leaf) if ctx.needs_input_grad[7] else (None, None)
        ctx.save_for_backward(tokens, bags, share, frequency, weights, *needed)
        return run(table, weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        tokens, bags, share, frequency, weights, table, leaf = ctx.saved_tensors
        of_rows = gradient.index_select(0, bags) * share.unsqueeze(1)
        rows = tokens.clamp(min=0)  # padding is -1, and its share is 0
        of_weights = None
        if ctx.needs_input_grad[7]:
            table = ctx.lookup.connect(table, leaf) if _differentiates_backward() else table
            of_weights = (of_rows * table.index_select(0, rows)).sum(1).reshape(weights.shape)
        if weights is not None:
            of_rows = of_rows * weights.reshape(-1, 1)
        if frequency is not None:
            of_rows = of_rows / frequency.unsqueeze(1)
        of_table = None
        if ctx.needs_input_grad[6]:
            known = of_rows.masked_fill((tokens < 0).unsqueeze(1), 0)
            of_table = gradient.new_zeros(ctx.table_shape).index_add(0, rows, known)
        return None, None, None, None, None, None, of_table, of_weights, ctx.lookup(tokens, of_rows)


def token_counts(tokens: Tensor) -> Tensor:
    """Return for each token how often it occurs."""
    _, place, counts = tokens.unique(return_inverse=True, return_counts=True)
    return counts[place]


class AliasFunction(torch.autograd.Function):
    """The parameter for any use of it: the leaves take their entries from its dense gradient, which is dropped then."""

    @staticmethod
    def forward(ctx: Any, index: Tensor, tensor: Tensor, leaf: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (index,) = ctx.saved_tensors
        gradient = gradient.to_dense() if gradient.layout is not torch.strided else gradient
        dense = gradient if ctx.needs_input_grad[1] else None
        return None, dense, gradient.reshape(-1).index_select(0, index)


class NoGradientFunction(torch.autograd.Function):
    """A sharded parameter that is read outside of a forward: a gradient of it is an error."""

    @staticmethod
    def forward(ctx: Any, name: str, tensor: Tensor, leaf: Tensor) -> Tensor:
        ctx.name = name
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise FrameworkError(
            f"a loss uses {ctx.name} of a sharded model directly, and its elements only get gradients of what "
            "modules compute with it in their forward; let a module compute that part of the loss"
        )
