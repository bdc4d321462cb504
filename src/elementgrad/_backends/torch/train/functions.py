"""Autograd functions that send gradients to the leaves of a parameter instead of to the parameter.

`KernelFunction` runs one of the operations below (linear, convolution, layer norm, RMS norm), `LookupFunction` an
embedding and `BagFunction` an embedding bag; their leaves get their gradients from a kernel of `kernels.py`.
`AliasFunction` is for all other uses of a parameter. The parameter itself gets a gradient too if it asks for one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from elementgrad._backends.torch._compat import is_compiling, unsafe_view
from elementgrad._backends.torch.train.kernels import TorchConvGrid, connect_leaves
from elementgrad.errors import FrameworkError

Tensor = torch.Tensor
CONVOLUTIONS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}


# Each operation has the same three methods:
#   forward   returns the output, and what else its gradients need;
#   backward  returns the gradients of the input and of the whole weight, None where not wanted;
#   entries   returns the gradients of the weight's leaves, by a kernel.
# `bias_axis` is the axis of the output that a bias is added along, or None if it is added to the normalised axes.


@dataclass(frozen=True)
class LinearOp:
    """`x @ weight.T + bias`, or `x @ weight + bias` if transposed."""

    transposed: bool = False
    bias_axis = -1

    def forward(self, x: Tensor, weight: Tensor, bias: Any) -> tuple[Tensor, ...]:
        if self.transposed:
            output = torch.addmm(bias, x.view(-1, x.shape[-1]), weight)
        else:
            output = functional.linear(x, weight, bias)
        # The output of an autograd function must not be a view, or it could not be written to in place.
        return (unsafe_view(output, (*x.shape[:-1], output.shape[-1])),)

    def backward(self, gradient: Tensor, x: Tensor, weight: Tensor, saved: Any, wanted: tuple[bool, bool]) -> Any:
        of_input = gradient @ (weight.t() if self.transposed else weight).conj() if wanted[0] else None
        if not wanted[1]:
            return of_input, None
        left, right = _as_rows(gradient), _as_rows(x).conj()
        return of_input, right.t() @ left if self.transposed else left.t() @ right

    def entries(self, kernel: Any, gradient: Tensor, x: Tensor, saved: Any) -> Tensor:
        left, right = _as_rows(gradient), _as_rows(x).conj()
        return kernel(right, left) if self.transposed else kernel(left, right)


@dataclass(frozen=True)
class ConvolutionOp:
    """A convolution of one to three axes, not transposed."""

    grid: TorchConvGrid
    bias_axis = 1

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        grid = self.grid
        convolve = CONVOLUTIONS[len(grid.stride)]
        return (convolve(x, weight, bias, grid.stride, grid.padding, grid.dilation, grid.groups),)

    def backward(self, gradient: Tensor, x: Tensor, weight: Tensor, saved: Any, wanted: tuple[bool, bool]) -> Any:
        return self.grid.backward(gradient, x, weight, wanted) if any(wanted) else (None, None)

    def entries(self, kernel: Any, gradient: Tensor, x: Tensor, saved: Any) -> Tensor:
        return kernel(gradient, x)


@dataclass(frozen=True)
class LayerNormOp:
    """Normalisation of the last axes by mean and variance."""

    shape: tuple[int, ...]
    eps: float
    bias_axis = None

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        return torch.native_layer_norm(x, self.shape, weight, bias, self.eps)

    def backward(self, gradient: Tensor, x: Tensor, weight: Tensor, saved: Any, wanted: tuple[bool, bool]) -> Any:
        if not any(wanted):
            return None, None
        backward = torch.ops.aten.native_layer_norm_backward
        return backward(gradient, x, self.shape, *saved, weight, None, [*wanted, False])[:2]

    def entries(self, kernel: Any, gradient: Tensor, x: Tensor, saved: Any) -> Tensor:
        width = len(self.shape)
        if _differentiates_backward():  # what was saved is not connected to the input
            axes = list(range(-width, 0))
            saved = x.mean(axes), torch.rsqrt(x.var(axes, correction=0) + self.eps)
        mean, scale = [each.reshape(-1, 1) for each in saved]
        gradient, x = [_as_normalised_rows(each, width).index_select(1, kernel) for each in (gradient, x)]
        return (gradient * ((x - mean) * scale)).sum(0)


@dataclass(frozen=True)
class RMSNormOp:
    """Normalisation of the last axes by the root of the mean square."""

    shape: tuple[int, ...]
    eps: float | None
    bias_axis = None

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        return (functional.rms_norm(x, self.shape, weight, self.eps),)

    def backward(self, gradient: Tensor, x: Tensor, weight: Tensor, saved: Any, wanted: tuple[bool, bool]) -> Any:
        if not any(wanted):
            return None, None
        wide, axes, scale = self._scale(x)
        unit, scaled = wide * scale, (gradient * weight).to(wide.dtype)
        of_input = scale * (scaled - unit * (scaled * unit).mean(axes, keepdim=True)) if wanted[0] else None
        of_weight = (gradient * unit).reshape(-1, *self.shape).sum(0) if wanted[1] else None
        return [None if each is None else each.to(x.dtype) for each in (of_input, of_weight)]

    def entries(self, kernel: Any, gradient: Tensor, x: Tensor, saved: Any) -> Tensor:
        width = len(self.shape)
        wide, _, scale = self._scale(x)
        gradient, wide = [_as_normalised_rows(each, width).index_select(1, kernel) for each in (gradient, wide)]
        return (gradient * (wide * scale.reshape(-1, 1))).sum(0)

    def _scale(self, x: Tensor) -> tuple[Tensor, list[int], Tensor]:
        """Return the input in the precision that PyTorch computes in, the axes, and the scale."""
        axes = list(range(-len(self.shape), 0))
        wide = x.float() if x.dtype.itemsize < 4 else x
        eps = torch.finfo(wide.dtype).eps if self.eps is None else self.eps
        return wide, axes, torch.rsqrt(wide.square().mean(axes, keepdim=True) + eps)


def _bias_gradient(op: Any, gradient: Tensor, shape: torch.Size, index: Tensor | None = None) -> Tensor:
    """Return the gradient of a bias, or its entries at `index`."""
    if op.bias_axis is None:
        rows = _as_normalised_rows(gradient, len(shape))
        return rows.sum(0).view(shape) if index is None else rows.index_select(1, index).sum(0)
    axis = op.bias_axis % gradient.ndim
    gradient = gradient if index is None else gradient.index_select(axis, index)
    others = [other for other in range(gradient.ndim) if other != axis]
    return gradient.sum(others) if others else gradient  # an empty list of axes would mean all of them


def _as_normalised_rows(x: Tensor, axes: int) -> Tensor:
    return x.flatten(-axes).reshape(-1, x.shape[-axes:].numel())


def _as_rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _split(values: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    return (values,) if len(sizes) == 1 else values.split_with_sizes(sizes)


def _differentiates_backward() -> bool:
    return torch.is_grad_enabled() and not is_compiling()


class KernelFunction(torch.autograd.Function):
    """An operation of a layer. The leaves are those of the weight, followed by those of the bias."""

    @staticmethod
    def forward(
        ctx: Any,
        op: Any,
        kernels: tuple[Any, Any],
        sizes: tuple[Sequence[int], Sequence[int]],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *leaves: Tensor,
    ) -> Tensor:
        output, *saved = op.forward(x, weight, bias)
        ctx.op, ctx.kernels, ctx.sizes = op, kernels, sizes
        ctx.bias_shape = None if bias is None else bias.shape
        # Only what the backward needs is saved, as autograd refuses a backward if a saved tensor was written to.
        needs_weight = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
        ctx.leaf_count = len(sizes[0]) if needs_weight else 0
        ctx.save_for_backward(x, weight if needs_weight else None, *leaves[: ctx.leaf_count], *saved)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        op, (weight_kernel, bias_kernel), (weight_sizes, bias_sizes) = ctx.op, ctx.kernels, ctx.sizes
        x, weight, *others = ctx.saved_tensors
        leaves, saved = others[: ctx.leaf_count], others[ctx.leaf_count :]
        if leaves and _differentiates_backward():
            values = torch.cat(leaves)
            if isinstance(weight_kernel, Tensor):
                weight = connect_leaves(weight, weight_kernel, values)
            else:
                weight = weight_kernel.connect(weight, values)
        _, _, _, input_wanted, weight_wanted, bias_wanted, *leaves_wanted = ctx.needs_input_grad
        of_input, of_weight = op.backward(gradient, x, weight, saved, (input_wanted, weight_wanted))
        of_bias = _bias_gradient(op, gradient, ctx.bias_shape) if bias_wanted else None
        count = len(weight_sizes)
        of_leaves: list[Tensor | None] = [None] * len(leaves_wanted)
        if any(leaves_wanted[:count]):
            of_leaves[:count] = _split(op.entries(weight_kernel, gradient, x, saved), weight_sizes)
        if any(leaves_wanted[count:]):
            of_leaves[count:] = _split(_bias_gradient(op, gradient, ctx.bias_shape, bias_kernel), bias_sizes)
        return None, None, None, of_input, of_weight, of_bias, *of_leaves


def run_with_kernels(
    op: Any,
    kernels: tuple[Any, Any],
    sizes: tuple[Sequence[int], Sequence[int]],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *leaves: Tensor,
) -> Tensor:
    """Run `KernelFunction` in the dtype of autocast, which does not see operations inside of a function."""
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = _autocast(x, dtype), _autocast(weight, dtype)
        bias = None if bias is None else _autocast(bias, dtype)
    return KernelFunction.apply(op, kernels, sizes, x, weight, bias, *leaves)


def _autocast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype is torch.float64 else x.to(dtype)


class LookupFunction(torch.autograd.Function):
    """Rows of a table, as in `nn.Embedding`."""

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
        tokens, rows = (ids, gradient) if ids.ndim == 1 else (ids.reshape(-1), _as_rows(gradient))
        if by_frequency:
            rows = rows / token_counts(tokens).unsqueeze(1)
        if padding is not None:
            tokens = tokens.where(tokens != padding, -1)
        return None, None, None, None, table, *_split(ctx.lookup(tokens, rows), ctx.sizes)


class BagFunction(torch.autograd.Function):
    """Sums or means of rows of a table, as in `nn.EmbeddingBag`.

    The gradient of a token's row is that of its bag, times its share of the bag and its weight, by its frequency.
    """

    @staticmethod
    def forward(
        ctx: Any,
        lookup: Any,
        sizes: Sequence[int],
        run: Callable[[Tensor, Tensor | None], Tensor],
        tokens: Tensor,
        bags: Tensor,
        share: Tensor,
        frequency: Tensor | None,
        table: Tensor,
        weights: Tensor | None,
        *leaves: Tensor,
    ) -> Tensor:
        ctx.lookup, ctx.sizes, ctx.table_shape = lookup, sizes, table.shape
        needed = (table, weights, *leaves) if ctx.needs_input_grad[8] else (None, weights)
        ctx.save_for_backward(tokens, bags, share, frequency, *needed)
        return run(table, weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        tokens, bags, share, frequency, table, weights, *leaves = ctx.saved_tensors
        of_rows = gradient.index_select(0, bags) * share.unsqueeze(1)
        rows = tokens.clamp(min=0)  # padding is -1, and its share is 0
        of_weights = None
        if ctx.needs_input_grad[8]:
            table = ctx.lookup.connect(table, torch.cat(leaves)) if _differentiates_backward() else table
            of_weights = (of_rows * table.index_select(0, rows)).sum(1).reshape(weights.shape)
        if weights is not None:
            of_rows = of_rows * weights.reshape(-1, 1)
        if frequency is not None:
            of_rows = of_rows / frequency.unsqueeze(1)
        of_table = None
        if ctx.needs_input_grad[7]:
            known = of_rows.masked_fill((tokens < 0).unsqueeze(1), 0)
            of_table = gradient.new_zeros(ctx.table_shape).index_add(0, rows, known)
        of_leaves = ctx.lookup(tokens, of_rows).split_with_sizes(ctx.sizes)
        return None, None, None, None, None, None, None, of_table, of_weights, *of_leaves


def token_counts(tokens: Tensor) -> Tensor:
    """Return for each token how often it occurs."""
    _, place, counts = tokens.unique(return_inverse=True, return_counts=True)
    return counts[place]


class AliasFunction(torch.autograd.Function):
    """The parameter for any use of it: the leaves take their entries from its dense gradient, which is dropped then."""

    @staticmethod
    def forward(ctx: Any, index: Tensor, sizes: Sequence[int], tensor: Tensor, *leaves: Tensor) -> Tensor:
        ctx.sizes = sizes
        ctx.save_for_backward(index)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (index,) = ctx.saved_tensors
        gradient = gradient.to_dense() if gradient.layout is not torch.strided else gradient
        dense = gradient if ctx.needs_input_grad[2] else None
        return None, None, dense, *_split(gradient.reshape(-1).index_select(0, index), ctx.sizes)


class NoGradientFunction(torch.autograd.Function):
    """A sharded parameter that is read outside of a forward: a gradient of it is an error."""

    @staticmethod
    def forward(ctx: Any, name: str, tensor: Tensor, *leaves: Tensor) -> Tensor:
        ctx.name = name
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise FrameworkError(
            f"a loss uses {ctx.name} of a sharded model directly, and its elements only get gradients of what "
            "modules compute with it in their forward; let a module compute that part of the loss"
        )
