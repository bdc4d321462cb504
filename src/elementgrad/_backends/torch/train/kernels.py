"""Some entries of the product `left.T @ right`, by whichever way is cheapest for those entries.

Some entries of the gradient of a convolution's weight.

What a layer computes, and the gradients of it: the framework's own, and those of some elements of its parameters.

Steps of the autograd graph that send gradients to leaves of some elements instead of to whole parameters.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from elementgrad._cleanup import safe_context
from elementgrad.errors import FrameworkError

Tensor = torch.Tensor

# Costs per row of the factors, in nanoseconds, in float32 on a CPU: rough, and only their ratios count (`make bench`
# shows the outcome). The first and the third were measured on one core, the others on two.
GATHERED = 3.8  # one entry: two columns read, multiplied and summed
MULTIPLIED = 0.0105  # one entry of a matrix product
SELECTED = 2.2  # one column copied out of a factor
TRANSPOSED = 2.3  # one column turned into a row
SAMPLED = 0.12  # one entry of a sampled product of such rows
CELLS, FAR_CELLS = 1 << 18, 1 << 24
"""How many numbers of a factor are dealt with at a time, so that they stay near; elsewhere than on a CPU more."""


class TorchProduct:
    """Entries (row, column) of `left.T @ right`, where left has `rows` columns and right has `columns`.

    >>> import torch
    >>> from elementgrad._backends.torch.train.kernels import TorchProduct
    >>> product = TorchProduct([0, 1], [1, 1], rows=2, columns=2, device="cpu")
    >>> left, right = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0], [7.0, 8.0]])
    >>> product(left, right)
    tensor([30., 44.])
    """

    def __init__(self, row: "np.ndarray", column: "np.ndarray", rows: int, columns: int, device: torch.device | str):
        row, column = np.asarray(row, dtype=np.int64), np.asarray(column, dtype=np.int64)
        self._size = rows, columns
        self._row, self._column = index(row, device), index(column, device)
        some_rows, row_of = np.unique(row, return_inverse=True)
        some_columns, column_of = np.unique(column, return_inverse=True)
        # All columns in their order are the factor itself, without a copy.
        self._rows = None if len(some_rows) == rows else index(some_rows, device)
        self._columns = None if len(some_columns) == columns else index(some_columns, device)
        self._cell = index(row_of * len(some_columns) + column_of, device)
        self._every = len(row) == rows * columns and bool((self._cell.numpy(force=True) == np.arange(len(row))).all())
        self._csr: Tensor | None = None
        copied = sum(len(some) for some, all_of in ((some_rows, rows), (some_columns, columns)) if len(some) < all_of)
        self.costs = {
            "gather": GATHERED * len(row),
            "block": MULTIPLIED * len(some_rows) * len(some_columns) + SELECTED * copied,
            "sample": TRANSPOSED * (rows + columns) + SAMPLED * len(row),
        }
        self._differentiable = self._cheapest("gather", "block")
        self._way = self._cheapest("gather", "block", "sample")

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_csr": None}

    @property
    def cost(self) -> float:
        """What a row of the factors costs, in nanoseconds."""
        return min(self.costs.values())

    def __call__(self, left: Tensor, right: Tensor) -> Tensor:
        """The entries, for factors of shape (n, rows) and (n, columns)."""
        return self._way(left, right) if self._sampling(left, right) else self._differentiable(left, right)

    def connected(self, weight: Tensor, values: Tensor) -> Tensor:
        """The weight, connected with the values of its elements."""
        return connected(weight, self._row * self._size[1] + self._column, values)

    def _cheapest(self, *ways: str) -> Callable[[Tensor, Tensor], Tensor]:
        return getattr(self, f"_{min(ways, key=self.costs.__getitem__)}")

    def _sampling(self, left: Tensor, right: Tensor) -> bool:
        """Whether a sampled product can be had: no compiler knows it, and nothing differentiates it again here."""
        return (
            not torch.compiler.is_compiling()
            and not (torch.is_grad_enabled() and (left.requires_grad or right.requires_grad))
            and left.device.type == "cpu"
            and left.dtype == right.dtype
            and left.dtype in (torch.float32, torch.float64)
        )

    def _gather(self, left: Tensor, right: Tensor) -> Tensor:
        cells = CELLS if left.device.type == "cpu" else FAR_CELLS
        length = max(16, cells // max(1, len(self._row)))
        if torch.compiler.is_compiling() or len(left) <= length:
            return self._gathered(left, right)
        first, *others = zip(left.split(length), right.split(length), strict=True)
        found = self._gathered(*first)
        for piece in others:
            found = found + self._gathered(*piece)
        return found

    def _gathered(self, left: Tensor, right: Tensor) -> Tensor:
        return (left.index_select(1, self._row) * right.index_select(1, self._column)).sum(0)

    def _block(self, left: Tensor, right: Tensor) -> Tensor:
        left = left if self._rows is None else left.index_select(1, self._rows)
        right = right if self._columns is None else right.index_select(1, self._columns)
        block = (left.t() @ right).reshape(-1)
        return block if self._every else block.index_select(0, self._cell)

    def _sample(self, left: Tensor, right: Tensor) -> Tensor:
        with safe_context(warnings.catch_warnings()):
            warnings.simplefilter("ignore")  # that this layout is in beta, once per process
            pattern, order = self._pattern(left.dtype)
            length = max(64, CELLS // sum(self._size))
            first, *others = zip(left.split(length), right.split(length), strict=True)
            sums = torch.sparse.sampled_addmm(pattern, first[0].t(), first[1], beta=0)
            for piece in others:
                torch.sparse.sampled_addmm(sums, piece[0].t(), piece[1], out=sums)
            found = sums.values()
        return found if order is None else torch.empty_like(found).index_copy_(0, order, found)

    def _pattern(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
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


def again() -> bool:
    """Whether what is computed going back is to be differentiated once more."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def connected(weight: Tensor, positions: Tensor, values: Tensor) -> Tensor:
    """A weight that holds values, as a step by which those values hear of what is computed with it."""
    change = (values - values.detach()).to(weight.dtype)
    return weight.reshape(-1).index_add(0, positions, change).view(weight.shape)


def index(array: np.ndarray, device: torch.device | str) -> Tensor:
    """Positions as a tensor of their own."""
    return torch.from_numpy(np.array(array, dtype=np.int64).reshape(-1)).to(device)


@dataclass(frozen=True)
class TorchConvGrid:
    """How a convolution walks over its input."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def backward(self, gradient: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool]) -> list[Tensor]:
        """The gradients of the input, the weight and the bias, as far as they are wanted."""
        walk = list(self.stride), list(self.padding), list(self.dilation)
        return torch.ops.aten.convolution_backward(
            gradient, x, weight, [weight.shape[0]], *walk, False, [0] * len(self.stride), self.groups, list(wanted)
        )

    def seen(self, offset: tuple[int, ...], size: torch.Size, out: torch.Size) -> tuple[list[slice], list[slice]]:
        """Which outputs see an element of the kernel inside of the input, and which inputs those are."""
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


class TorchCorrelation:
    """Entries of the weight's gradient, given by their coordinates.

    One offset of the kernel pairs every output with one input, so its part of the gradient is the product of the two
    over all pairs, of which `Product` finds the entries. Where many are named, the framework's own gradient of the
    channels that occur is cheaper.
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
        self._positions = index(np.ravel_multi_index(coordinates, shape), device)
        offset = np.ravel_multi_index(offsets, shape[2:])
        channel = out // (shape[0] // grid.groups) * shape[1] + inside
        self._parts: list[Any] = []
        cost = 0.0
        for number in np.unique(offset):
            here = np.flatnonzero(offset == number)
            outs, out_of = np.unique(out[here], return_inverse=True)
            ins, in_of = np.unique(channel[here], return_inverse=True)
            product = TorchProduct(out_of.reshape(-1), in_of.reshape(-1), len(outs), len(ins), device)
            cost += product.cost + SELECTED * (len(outs) + len(ins))
            at = tuple([int(axis) for axis in np.unravel_index(number, shape[2:])])
            self._parts.append((at, *[index(array, device) for array in (here, outs, ins)], product))
        order = [part[1] for part in self._parts]
        self._order = torch.cat(order).argsort() if order else index(np.zeros(0), device)
        # Groups keep their channels together: there all of them are asked.
        outs, out_of = np.unique(out, return_inverse=True)
        ins, in_of = np.unique(inside, return_inverse=True)
        if grid.groups > 1:
            outs, out_of, ins, in_of = np.arange(shape[0]), out, np.arange(shape[1]), inside
        self._shape = len(outs), len(ins), *shape[2:]
        some = [len(outs) < shape[0], len(ins) < shape[1]]
        self._outs, self._ins = [
            index(channels, device) if fewer else None for channels, fewer in zip((outs, ins), some, strict=True)
        ]
        flat = np.ravel_multi_index((out_of.reshape(-1), in_of.reshape(-1), *offsets), self._shape)
        self._flat = index(flat, device)
        copied = some[0] * len(outs) + some[1] * len(ins)
        self.whole = cost > MULTIPLIED * prod(self._shape) + SELECTED * copied

    def __call__(self, gradient: Tensor, x: Tensor) -> Tensor:
        """The entries, for the gradient of the output and the input."""
        if not self._parts:
            return gradient.new_zeros(0)
        return self._of_channels(gradient, x) if self.whole else self._of_offsets(gradient, x)

    def connected(self, weight: Tensor, values: Tensor) -> Tensor:
        """The weight, connected with the values of its elements."""
        return connected(weight, self._positions, values)

    def _of_channels(self, gradient: Tensor, x: Tensor) -> Tensor:
        gradient = gradient if self._outs is None else gradient.index_select(1, self._outs)
        x = x if self._ins is None else x.index_select(1, self._ins)
        weight = gradient.new_empty(1).expand(self._shape)
        return self._grid.backward(gradient, x, weight, (False, True, False))[1].reshape(-1)[self._flat]

    def _of_offsets(self, gradient: Tensor, x: Tensor) -> Tensor:
        found = []
        # A selection copies all that it selects from unless that lies in order: channels first, windows of them then.
        gradient, x = gradient.contiguous(), x.contiguous()
        for offset, _, outs, ins, product in self._parts:
            outputs, inputs = self._grid.seen(offset, x.shape[2:], gradient.shape[2:])
            left = gradient.index_select(1, outs)[(slice(None), slice(None), *outputs)]
            right = x.index_select(1, ins)[(slice(None), slice(None), *inputs)]
            found.append(product(left.transpose(0, 1).flatten(1).t(), right.transpose(0, 1).flatten(1).t()))
        return torch.cat(found).index_select(0, self._order)


CONVOLUTIONS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}


@dataclass(frozen=True)
class LinearOp:
    """`x @ weight.T + bias`, or with the weight the other way round."""

    transposed: bool = False
    axis = -1
    """Which axis of the output a bias is for."""

    def run(self, x: Tensor, weight: Tensor, bias: Any) -> tuple[Tensor, ...]:
        """The output, and what else the gradients need."""
        if self.transposed:
            output = torch.addmm(bias, x.view(-1, x.shape[-1]), weight)
        else:
            output = functional.linear(x, weight, bias)
        # What comes out of a step of the graph must not be a view, or nothing could be written into it in place.
        return (torch.ops.aten._unsafe_view(output, (*x.shape[:-1], output.shape[-1])),)

    def back(self, gradient: Tensor, x: Tensor, weight: Tensor, kept: Any, wanted: tuple[bool, bool]) -> Any:
        """The gradients of the input and of the whole weight, where wanted."""
        of_input = gradient @ (weight.t() if self.transposed else weight).conj() if wanted[0] else None
        if not wanted[1]:
            return of_input, None
        left, right = _rows(gradient), _rows(x).conj()
        return of_input, right.t() @ left if self.transposed else left.t() @ right

    def entries(self, kernel: Any, gradient: Tensor, x: Tensor, kept: Any) -> Tensor:
        """The gradients of some elements of the weight."""
        left, right = _rows(gradient), _rows(x).conj()
        return kernel(right, left) if self.transposed else kernel(left, right)


@dataclass(frozen=True)
class ConvolutionOp:
    """A convolution without transposition, of any number of axes."""

    grid: TorchConvGrid
    axis = 1

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        """The output."""
        grid = self.grid
        convolve = CONVOLUTIONS[len(grid.stride)]
        return (convolve(x, weight, bias, grid.stride, grid.padding, grid.dilation, grid.groups),)

    def back(self, gradient: Tensor, x: Tensor, weight: Tensor, kept: Any, wanted: tuple[bool, bool]) -> Any:
        """The gradients of the input and of the whole weight, where wanted."""
        if not any(wanted):
            return None, None
        return self.grid.backward(gradient, x, weight, (*wanted, False))[:2]

    def entries(self, kernel: Any, gradient: Tensor, x: Tensor, kept: Any) -> Tensor:
        """The gradients of some elements of the weight."""
        return kernel(gradient, x)


@dataclass(frozen=True)
class LayerNormOp:
    """Normalisation over the last axes by mean and variance."""

    shape: tuple[int, ...]
    eps: float
    axis = None

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        """The output, the means and the inverse deviations."""
        return torch.native_layer_norm(x, self.shape, weight, bias, self.eps)

    def back(self, gradient: Tensor, x: Tensor, weight: Tensor, kept: Any, wanted: tuple[bool, bool]) -> Any:
        """The gradients of the input and of the whole weight, where wanted."""
        if not any(wanted):
            return None, None
        backward = torch.ops.aten.native_layer_norm_backward
        return backward(gradient, x, self.shape, *kept, weight, None, [*wanted, False])[:2]

    def entries(self, kernel: Any, gradient: Tensor, x: Tensor, kept: Any) -> Tensor:
        """The gradients of some elements of the weight."""
        width = len(self.shape)
        if again():
            axes = list(range(-width, 0))
            kept = x.mean(axes), torch.rsqrt(x.var(axes, correction=0) + self.eps)
        mean, scale = [part.reshape(-1, 1) for part in kept]
        gradient, x = [_normalised(part, width).index_select(1, kernel) for part in (gradient, x)]
        return (gradient * ((x - mean) * scale)).sum(0)


@dataclass(frozen=True)
class RMSNormOp:
    """Normalisation over the last axes by the root of the mean square."""

    shape: tuple[int, ...]
    eps: float | None
    axis = None

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        """The output."""
        return (functional.rms_norm(x, self.shape, weight, self.eps),)

    def back(self, gradient: Tensor, x: Tensor, weight: Tensor, kept: Any, wanted: tuple[bool, bool]) -> Any:
        """The gradients of the input and of the whole weight, where wanted."""
        if not any(wanted):
            return None, None
        wide, axes, scale = self._scale(x)
        unit, along = wide * scale, (gradient * weight).to(wide.dtype)
        of_input = scale * (along - unit * (along * unit).mean(axes, keepdim=True)) if wanted[0] else None
        of_weight = (gradient * unit).reshape(-1, *self.shape).sum(0) if wanted[1] else None
        return [None if found is None else found.to(x.dtype) for found in (of_input, of_weight)]

    def entries(self, kernel: Any, gradient: Tensor, x: Tensor, kept: Any) -> Tensor:
        """The gradients of some elements of the weight."""
        width = len(self.shape)
        wide, _, scale = self._scale(x)
        gradient, wide = [_normalised(part, width).index_select(1, kernel) for part in (gradient, wide)]
        return (gradient * (wide * scale.reshape(-1, 1))).sum(0)

    def _scale(self, x: Tensor) -> tuple[Tensor, list[int], Tensor]:
        """The input in the precision that the framework computes in, where squares are finite; axes; the scale."""
        axes = list(range(-len(self.shape), 0))
        wide = x.float() if x.dtype.itemsize < 4 else x
        eps = torch.finfo(wide.dtype).eps if self.eps is None else self.eps
        return wide, axes, torch.rsqrt(wide.square().mean(axes, keepdim=True) + eps)


def of_bias(operation: Any, kernel: Tensor | None, gradient: Tensor, shape: torch.Size) -> Tensor:
    """The gradient of a bias: all of it, or some of its elements."""
    if operation.axis is None:  # one number per normalised element
        rows = _normalised(gradient, len(shape))
        return rows.sum(0).view(shape) if kernel is None else rows.index_select(1, kernel).sum(0)
    axis = operation.axis % gradient.ndim
    gradient = gradient if kernel is None else gradient.index_select(axis, kernel)
    others = [other for other in range(gradient.ndim) if other != axis]
    return gradient.sum(others) if others else gradient  # no axes would mean all of them


def _normalised(x: Tensor, axes: int) -> Tensor:
    """What is normalised together as one row each."""
    return x.flatten(-axes).reshape(-1, x.shape[-axes:].numel())


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


class KernelFunction(torch.autograd.Function):
    """A layer's own operation; the elements of its weight and of its bias get their gradients by kernels.

    Both whole parameters get theirs too where they ask for one. The leaves are those of the weight, then of the bias.
    """

    @staticmethod
    def forward(
        ctx: Any,
        operation: Any,
        kernels: tuple[Any, Any],
        sizes: tuple[Sequence[int], Sequence[int]],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *leaves: Tensor,
    ) -> Tensor:
        output, *kept = operation.run(x, weight, bias)
        ctx.operation, ctx.kernels, ctx.sizes = operation, kernels, sizes
        ctx.bias_shape = None if bias is None else bias.shape
        # What is not needed is not kept: it may change before anybody goes back.
        needed = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
        ctx.count = len(sizes[0]) if needed else 0
        ctx.save_for_backward(x, weight if needed else None, *leaves[: ctx.count], *kept)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        operation, (of_weight, to_bias), sizes = ctx.operation, ctx.kernels, ctx.sizes
        x, weight, *others = ctx.saved_tensors
        values, kept = others[: ctx.count], others[ctx.count :]
        if values and again():
            whole = torch.cat(values)
            weight = (
                connected(weight, of_weight, whole)
                if isinstance(of_weight, Tensor)
                else of_weight.connected(weight, whole)
            )
        _, _, _, input_wanted, weight_wanted, bias_wanted, *wanted = ctx.needs_input_grad
        given = operation.back(gradient, x, weight, kept, (input_wanted, weight_wanted))
        bias = of_bias(operation, None, gradient, ctx.bias_shape) if bias_wanted else None
        leaves: list[Tensor | None] = []
        count = len(sizes[0])
        if count:
            heard = any(wanted[:count])
            leaves += _split(operation.entries(of_weight, gradient, x, kept), sizes[0]) if heard else [None] * count
        if sizes[1]:
            heard = any(wanted[count:])
            each = _split(of_bias(operation, to_bias, gradient, ctx.bias_shape), sizes[1]) if heard else None
            leaves += [None] * len(sizes[1]) if each is None else each
        return None, None, None, *given, bias, *leaves


def _split(values: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """The values of each leaf."""
    return (values,) if len(sizes) == 1 else values.split_with_sizes(sizes)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype is torch.float64 else x.to(dtype)  # as autocast does


def by_kernel(
    operation: Any,
    kernels: tuple[Any, Any],
    sizes: tuple[Sequence[int], Sequence[int]],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *leaves: Tensor,
) -> Tensor:
    """`ByKernel`, in the dtype that autocast asks for: going back nobody asks."""
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = _cast(x, dtype), _cast(weight, dtype)
        bias = None if bias is None else _cast(bias, dtype)
    return KernelFunction.apply(operation, kernels, sizes, x, weight, bias, *leaves)


class LookupFunction(torch.autograd.Function):
    """Rows of a table; the elements get their gradients from the tokens that looked them up."""

    @staticmethod
    def forward(
        ctx: Any,
        lookup: Any,
        sizes: Sequence[int],
        options: tuple[Any, ...],
        ids: Tensor,
        table: Tensor,
        *leaves: Tensor,
    ) -> Tensor:
        ctx.lookup, ctx.sizes, ctx.options, ctx.rows = lookup, sizes, options, table.shape[0]
        ctx.save_for_backward(ids)
        return torch.embedding(table, ids)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        padding, by_frequency = ctx.options
        table = None
        if ctx.needs_input_grad[4]:
            no_row = -1 if padding is None else padding
            table = torch.ops.aten.embedding_backward(gradient, ids, ctx.rows, no_row, by_frequency, False)
        flat = ids.ndim == 1
        tokens, rows = (ids, gradient) if flat else (ids.reshape(-1), gradient.reshape(-1, gradient.shape[-1]))
        if by_frequency:
            _, place, count = tokens.unique(return_inverse=True, return_counts=True)
            rows = rows / count[place].unsqueeze(1)
        if padding is not None:
            tokens = tokens.where(tokens != padding, -1)
        return None, None, None, None, table, *_split(ctx.lookup(tokens, rows), ctx.sizes)


class AliasFunction(torch.autograd.Function):
    """The parameter itself, for any use of it: the elements are gathered from its gradient, which lives no longer."""

    @staticmethod
    def forward(ctx: Any, positions: Tensor, sizes: Sequence[int], weight: Tensor, *leaves: Tensor) -> Tensor:
        ctx.sizes = sizes
        ctx.save_for_backward(positions)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (positions,) = ctx.saved_tensors
        gradient = gradient.to_dense() if gradient.layout is not torch.strided else gradient
        whole = gradient if ctx.needs_input_grad[2] else None
        return None, None, whole, *_split(gradient.reshape(-1).index_select(0, positions), ctx.sizes)


class NoGradientFunction(torch.autograd.Function):
    """A sharded parameter for whoever looks at it: no gradient of it goes anywhere, and who asks for one is told."""

    @staticmethod
    def forward(ctx: Any, name: str, weight: Tensor, *leaves: Tensor) -> Tensor:
        ctx.name = name
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise FrameworkError(
            f"a loss uses {ctx.name} of a sharded model itself, and its elements hear what modules compute with it in "
            "their forward; let a module compute that part of the loss"
        )
