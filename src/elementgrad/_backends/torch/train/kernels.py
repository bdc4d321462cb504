"""Kernels: the entries of a parameter's gradient that train, computed without the rest of it.

`TorchProduct` is for linear layers, `TorchLookup` for embeddings, `TorchCorrelation` for convolutions. Each is made
once for a set of elements, and called in the backward with the gradient of the output and what else the layer saved.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from elementgrad._backends.torch._compat import is_compiling
from elementgrad._backends.torch.train.parameter import index_tensor
from elementgrad._cleanup import safe_context

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
"""Numbers up to which all rows of a lookup get a sum, without looking first which of them occur."""


def connect_leaves(weight: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """Return `weight`, which holds `values` at `index` already, as a differentiable function of `values`."""
    change = (values - values.detach()).to(weight.dtype)
    return weight.reshape(-1).index_add(0, index, change).view(weight.shape)


def _counts_up(cells: np.ndarray, size: int) -> bool:
    return len(cells) == size and np.array_equal(cells, np.arange(size))


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
        row, column = np.asarray(row, dtype=np.int64), np.asarray(column, dtype=np.int64)
        self._size = rows, columns
        self._row, self._column = index_tensor(row, device), index_tensor(column, device)
        unique_rows, row_of = np.unique(row, return_inverse=True)
        unique_columns, column_of = np.unique(column, return_inverse=True)
        # If all columns of a factor occur, the factor is used as it is, without a copy.
        self._rows = None if len(unique_rows) == rows else index_tensor(unique_rows, device)
        self._columns = None if len(unique_columns) == columns else index_tensor(unique_columns, device)
        cell = row_of * len(unique_columns) + column_of
        self._cell = None if _counts_up(cell, rows * columns) else index_tensor(cell, device)
        self._csr: Tensor | None = None
        copied = sum(
            len(unique) for unique, size in ((unique_rows, rows), (unique_columns, columns)) if len(unique) < size
        )
        self.costs = {
            "gather": GATHERED * len(row),
            "block": MULTIPLIED * len(unique_rows) * len(unique_columns) + SELECTED * copied,
            "sample": TRANSPOSED * (rows + columns) + SAMPLED * len(row),
        }
        self._differentiable = self._cheapest("gather", "block")
        self._fastest = self._cheapest("gather", "block", "sample")

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
            warnings.simplefilter("ignore")  # PyTorch says once per process that the CSR layout is in beta
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
        rows, row_of = np.unique(np.asarray(row, dtype=np.int64), return_inverse=True)
        unique_columns, column_of = np.unique(np.asarray(column, dtype=np.int64), return_inverse=True)
        self._rows, self._row_of = index_tensor(rows, device), index_tensor(row_of, device)
        self._columns = None if len(unique_columns) == columns else index_tensor(unique_columns, device)
        self._column_of = index_tensor(column_of, device)
        self._width = len(unique_columns)
        cell = row_of.reshape(-1) * self._width + column_of.reshape(-1)
        self._cell = None if _counts_up(cell, len(rows) * self._width) else index_tensor(cell, device)
        self._single = (int(rows[0]), int(unique_columns[0])) if len(row_of) == 1 else None
        self._large = len(rows) * self._width > SMALL_TABLE + 4 * len(row_of)

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
        offset = np.ravel_multi_index(offsets, shape[2:])
        channel = out // (shape[0] // grid.groups) * shape[1] + inside
        self._parts: list[_OffsetEntries] = []
        order = [np.zeros(0, np.int64)]
        cost = 0.0
        for each in np.unique(offset):
            entries = np.flatnonzero(offset == each)
            outs, out_of = np.unique(out[entries], return_inverse=True)
            ins, in_of = np.unique(channel[entries], return_inverse=True)
            product = TorchProduct(out_of.reshape(-1), in_of.reshape(-1), len(outs), len(ins), device)
            cost += product.cost + SELECTED * (len(outs) + len(ins))
            at = tuple([int(axis) for axis in np.unravel_index(each, shape[2:])])
            order.append(entries)
            self._parts.append(_OffsetEntries(at, index_tensor(outs, device), index_tensor(ins, device), product))
        self._order = index_tensor(np.concatenate(order).argsort(), device)
        # Channels cannot be left out of a convolution in groups.
        outs, out_of = np.unique(out, return_inverse=True)
        ins, in_of = np.unique(inside, return_inverse=True)
        if grid.groups > 1:
            outs, out_of, ins, in_of = np.arange(shape[0]), out, np.arange(shape[1]), inside
        self._shape = len(outs), len(ins), *shape[2:]
        self._outs = index_tensor(outs, device) if len(outs) < shape[0] else None
        self._ins = index_tensor(ins, device) if len(ins) < shape[1] else None
        flat = np.ravel_multi_index((out_of.reshape(-1), in_of.reshape(-1), *offsets), self._shape)
        self._flat = index_tensor(flat, device)
        copied = sum(len(channels) for channels in (self._outs, self._ins) if channels is not None)
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
