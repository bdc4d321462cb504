"""What a layer computes, and the gradients of it: the framework's own, and those of some elements of its parameters."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from elementgrad.backends.torch.training.correlations import Grid
from elementgrad.backends.torch.training.products import again

Tensor = torch.Tensor
CONVOLUTIONS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}


@dataclass(frozen=True)
class Linear:
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
class Convolution:
    """A convolution without transposition, of any number of axes."""

    grid: Grid
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
class LayerNorm:
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
class RMSNorm:
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
