"""Multi-head attention, whose projections are linear layers inside of one function of PyTorch's."""

import inspect
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from elementgrad.backends.torch.training.functions import by_kernel
from elementgrad.backends.torch.training.operations import Linear
from elementgrad.backends.torch.training.products import Product, index
from elementgrad.backends.torch.training.weight import Weight

Tensor = torch.Tensor
INSIDE = ("_in_projection_packed", "_in_projection", "multi_head_attention_forward")
"""The functions of PyTorch's through which a projection is reached, the innermost first."""


class Rows:
    """The elements that train of some rows of a projection: all others hear nothing of it."""

    def __init__(self, weight: Weight, first: int, count: int):
        columns = weight.tensor.shape[1]
        row, column = np.divmod(weight.everywhere, columns)
        here = np.flatnonzero((row >= first) & (row < first + count))
        self._product = Product(row[here] - first, column[here], count, columns, weight.tensor.device)
        self._here = index(here, weight.tensor.device)
        self._total = len(row)

    def __call__(self, left: Tensor, right: Tensor) -> Tensor:
        """The gradients of all elements of the weight."""
        found = self._product(left, right)
        return found.new_zeros(self._total).index_copy(0, self._here, found)

    def connected(self, weight: Tensor, values: Tensor) -> Tensor:
        """The rows, connected with the values of their elements."""
        return self._product.connected(weight, values.index_select(0, self._here))


class Projections:
    """The weights of one attention that train in part, and the kernels of their rows."""

    def __init__(self, weights: list[Weight]):
        self._weights = weights
        self._rows: dict[tuple[int, int, int], Rows] = {}

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`functional.linear`, where the weight may be some rows of one that trains."""
        for number, known in enumerate(self._weights):
            tensor = known.live
            if weight.ndim == 2 and weight.is_contiguous() and _within(weight, tensor):
                first = (weight.storage_offset() - tensor.storage_offset()) // tensor.shape[1]
                key = number, first, len(weight)
                if key not in self._rows:
                    self._rows[key] = Rows(known, first, len(weight))
                rows = tensor if len(weight) == len(tensor) else tensor.narrow(0, first, len(weight))
                kernels, sizes = (self._rows[key], None), (known.sizes, ())
                return by_kernel(Linear(), kernels, sizes, x, rows, bias, *known.leaves)
        return functional.linear(x, weight, bias)

    def attend(self, layer: Any, *arguments: Any, **options: Any) -> Any:
        """What the layer computes, by PyTorch's own code, in which `linear` is ours."""
        others: dict[str, Any] = {"linear": self.linear}
        for name in INSIDE:
            others[name] = _with(getattr(functional, name), others)
        forward = _with(nn.MultiheadAttention.forward, {"F": SimpleNamespace(**(vars(functional) | others))})
        return forward(layer, *arguments, **options)


def _within(weight: Tensor, tensor: Tensor) -> bool:
    """Whether a matrix lies in another one's memory, in whole rows."""
    return (
        tensor.is_contiguous()
        and weight.shape[1] == tensor.shape[1]
        and weight.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        and 0 <= weight.storage_offset() - tensor.storage_offset() <= tensor.numel() - weight.numel()
    )


def _with(function: Callable[..., Any], others: dict[str, Any]) -> Any:
    """The same code with other meanings of some global names."""
    function = inspect.unwrap(function)
    other = FunctionType(
        function.__code__,
        {**function.__globals__, **others},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    other.__kwdefaults__ = function.__kwdefaults__
    return other
