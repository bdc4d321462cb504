"""Some entries of the gradient of a convolution's weight."""

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from elementgrad.backends.torch.training.products import MULTIPLIED, SELECTED, Product, connected, index

Tensor = torch.Tensor


@dataclass(frozen=True)
class Grid:
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


class Correlation:
    """Entries of the weight's gradient, given by their coordinates.

    One offset of the kernel pairs every output with one input, so its part of the gradient is the product of the two
    over all pairs, of which `Product` finds the entries. Where many are named, the framework's own gradient of the
    channels that occur is cheaper.
    """

    def __init__(
        self, coordinates: tuple[np.ndarray, ...], shape: tuple[int, ...], grid: Grid, device: torch.device | str
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
            product = Product(out_of.reshape(-1), in_of.reshape(-1), len(outs), len(ins), device)
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
