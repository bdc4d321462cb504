"""Steps of the autograd graph that send gradients to leaves of some elements instead of to whole parameters."""

from collections.abc import Sequence
from typing import Any

import torch

from elementgrad.backends.torch.training.operations import of_bias
from elementgrad.backends.torch.training.products import again, connected
from elementgrad.errors import FrameworkError

Tensor = torch.Tensor


class ByKernel(torch.autograd.Function):
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
    return ByKernel.apply(operation, kernels, sizes, x, weight, bias, *leaves)


class ByLookup(torch.autograd.Function):
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


class Alias(torch.autograd.Function):
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


class Unheard(torch.autograd.Function):
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
