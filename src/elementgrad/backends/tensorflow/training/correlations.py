"""Some entries of the gradient of a convolution's kernel."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from elementgrad.backends.tensorflow.training.entries import MULTIPLIED, SELECTED, Product

Tensor = Any


@dataclass(frozen=True)
class Grid:
    """How a convolution walks over its input."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: str
    """"valid", "same" or "causal"."""
    first: bool = False
    """Whether the channels come first."""

    def last(self, x: Tensor) -> Tensor:
        """The channels as the last axis."""
        return tf.transpose(x, [0, *range(2, x.shape.rank), 1]) if self.first else x

    def padded(self, x: Tensor) -> Tensor:
        """The input with the zeros that the convolution sees around it, channels last."""
        if self.padding == "valid":
            return x
        amounts: list[Any] = [[0, 0]]
        for axis, (size, stride, dilation) in enumerate(zip(self.size, self.stride, self.dilation, strict=True), 1):
            reach = (size - 1) * dilation
            if self.padding == "causal":
                amounts.append([reach, 0])
                continue
            length = tf.shape(x)[axis]
            outputs = (length + stride - 1) // stride
            total = tf.maximum((outputs - 1) * stride + reach + 1 - length, 0)
            amounts.append([total // 2, total - total // 2])
        return tf.pad(x, [*amounts, [0, 0]])

    def seen(self, x: Tensor, offset: Sequence[int], outputs: Tensor) -> Tensor:
        """What the outputs see of a padded input through one offset of the kernel."""
        starts = [at * dilation for at, dilation in zip(offset, self.dilation, strict=True)]
        windows = [
            slice(start, start + (outputs[axis] - 1) * stride + 1, stride)
            for axis, (start, stride) in enumerate(zip(starts, self.stride, strict=True), 1)
        ]
        return x[(slice(None), *windows, slice(None))]


class Correlation:
    """Entries of the kernel's gradient, given by their coordinates (offset..., in, out).

    One offset of the kernel pairs every output with one input, so its part of the gradient is the product of the two
    over all pairs, of which `Product` finds the entries.
    """

    def __init__(self, coordinates: np.ndarray, shape: tuple[int, ...], grid: Grid):
        self._grid = grid
        *offsets, inside, out = coordinates.T
        offset = np.ravel_multi_index(tuple(offsets), shape[:-2])
        self._parts: list[Any] = []
        cost = 0.0
        for number in np.unique(offset):
            here = np.flatnonzero(offset == number)
            product = Product(inside[here], out[here], shape[-2], shape[-1])
            cost += product.cost + SELECTED * shape[-2]
            at = [int(axis) for axis in np.unravel_index(number, shape[:-2])]
            self._parts.append((at, here, product))
        order = np.concatenate([np.zeros(0, np.int64), *[here for _, here, _ in self._parts]])
        self._order = np.argsort(order)
        self.whole = cost > MULTIPLIED * np.prod(shape)
        """Whether the whole gradient is cheaper."""

    def __call__(self, x: Tensor, gradient: Tensor) -> Tensor:
        """The entries, for the input and the gradient of the output."""
        gradient = self._grid.last(gradient)
        x = self._grid.padded(self._grid.last(x))
        outputs = tf.shape(gradient)
        right = tf.reshape(gradient, [-1, gradient.shape[-1]])
        found = []
        for offset, _, product in self._parts:
            seen = self._grid.seen(x, offset, outputs)
            found.append(product(tf.reshape(seen, [-1, x.shape[-1]]), right))
        return tf.gather(tf.concat(found, 0), self._order)
