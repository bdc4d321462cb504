"""Tensors as tiles of cells: how the axes of a tensor are drawn, which part is in sight, and what is left out of it.

A tensor of any shape is drawn as tiles (channels) of rows and columns; further axes are fixed at one index each. A view
is a window of that, of at most `MAX_CELLS` cells. Where there are more numbers, a cell is the number largest in size of
a block, with its position in the block, so that the number under the pointer is always that of one element.
"""

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elementgrad._show.values import IMAGE_CHANNELS, Scale

MAX_CELLS = 300_000
"""Cells of a view, over all of its tiles."""
MAX_TILES = 64
"""Tiles of a view; further ones are on further pages."""
MAX_SIDE = 512
"""Rows or columns of a tile."""
MAX_BARS = 1024
"""Columns of a tile that has one row."""
THUMBNAIL = 20
"""Rows and columns of the small picture of a tensor."""


@dataclass(frozen=True)
class Layout:
    """The role of each axis of a tensor in its picture.

    >>> from elementgrad._explore.views import Layout
    >>> Layout.of((1, 6, 8, 8), "activation", examples=1, tokens=None, channels_last=False)
    Layout(kind='maps', example=0, tile=1, row=2, column=3)
    """

    kind: str
    """One of image, maps, matrix, bars, tokens and number."""
    example: int | None = None
    """The axis that counts examples."""
    tile: int | None = None
    row: int | None = None
    column: int | None = None

    @classmethod
    def of(
        cls, shape: Sequence[int], kind: str, examples: int | None, tokens: int | None, channels_last: bool
    ) -> "Layout":
        """Choose roles by the shape; `examples` and `tokens` are how many of these there are, or None."""
        counts_examples = examples is not None and len(shape) > 0 and shape[0] == examples
        example = 0 if counts_examples and kind not in ("parameter", "buffer") and len(shape) > 1 else None
        axes = [axis for axis in range(len(shape)) if axis != example]
        if not axes:
            return cls("number", example)
        if len(axes) == 1:
            has_texts = tokens == shape[axes[0]] and kind == "input"
            return cls("tokens" if has_texts else "bars", example, column=axes[0])
        if len(axes) == 2:
            has_texts = tokens == shape[axes[0]] and kind not in ("parameter", "buffer")
            return cls("tokens" if has_texts else "matrix", example, row=axes[0], column=axes[1])
        *_, first, second, third = axes
        if channels_last and kind not in ("parameter", "buffer"):
            tile, row, column = third, first, second
        else:
            tile, row, column = first, second, third
        is_image = kind == "input" and shape[tile] in IMAGE_CHANNELS
        return cls("image" if is_image else "maps", example, tile, row, column)

    def fixed_axes(self, shape: Sequence[int]) -> list[int]:
        """Return the axes that are neither drawn nor count examples."""
        drawn = (self.example, self.tile, self.row, self.column)
        return [axis for axis in range(len(shape)) if axis not in drawn]

    def to_dict(self, shape: Sequence[int]) -> dict[str, Any]:
        roles = {"kind": self.kind, "example": self.example, "tile": self.tile, "row": self.row, "column": self.column}
        return {**roles, "fixed": self.fixed_axes(shape)}


@dataclass(frozen=True)
class ViewWindow:
    """The part of a tensor in sight: an index for each axis that is fixed, and ranges for those that are drawn."""

    index: tuple[int, ...]
    """One for each axis; that of the channels chooses the page of them, where `tiles` does not."""
    tiles: tuple[int, int]
    rows: tuple[int, int]
    columns: tuple[int, int]

    @classmethod
    def of(
        cls,
        layout: Layout,
        shape: Sequence[int],
        index: Sequence[int] = (),
        tiles: Sequence[int] | None = None,
        rows: Sequence[int] | None = None,
        columns: Sequence[int] | None = None,
    ) -> "ViewWindow":
        """Return the window within the shape that comes nearest to what is given; by default the page of the index."""

        def clip(axis: int | None, ends: Sequence[int] | None) -> tuple[int, int]:
            size = 1 if axis is None else shape[axis]
            start, stop = ends or (0, size)
            start = max(0, min(start, size - 1))
            return start, max(start + 1, min(stop, size)) if size else 0

        known = [*index, *[0] * len(shape)][: len(shape)]
        clipped = tuple(max(0, min(position, size - 1)) for position, size in zip(known, shape, strict=True))
        if tiles is None and layout.tile is not None:
            first = clipped[layout.tile] // MAX_TILES * MAX_TILES
            tiles = first, first + MAX_TILES
        start, stop = clip(layout.tile, tiles)
        return cls(clipped, (start, min(stop, start + MAX_TILES)), clip(layout.row, rows), clip(layout.column, columns))

    def cut(self, values: np.ndarray, layout: Layout) -> np.ndarray:
        """Return the numbers in sight as an array of tiles, rows and columns."""
        ranges = {layout.tile: self.tiles, layout.row: self.rows, layout.column: self.columns}
        drawn = [axis for axis in (layout.tile, layout.row, layout.column) if axis is not None]
        key = tuple(slice(*ranges[axis]) if axis in drawn else position for axis, position in enumerate(self.index))
        part = values[key]
        # The axes that are left are in the order of the tensor, and the picture may have another.
        part = np.transpose(part, [sorted(drawn).index(axis) for axis in drawn])
        sizes = iter(part.shape)
        roles = (layout.tile, layout.row, layout.column)
        return part.reshape([1 if axis is None else next(sizes) for axis in roles])


def block_shape(tiles: int, rows: int, columns: int) -> tuple[int, int]:
    """Return the rows and columns of the block behind each cell, so that a view is not too large.

    >>> from elementgrad._explore.views import block_shape
    >>> block_shape(1, 224, 224), block_shape(64, 112, 112), block_shape(1, 1, 50257)
    ((1, 1), (2, 2), (1, 50))
    """
    side = min(MAX_SIDE, max(8, math.isqrt(MAX_CELLS // max(1, tiles))))
    across = MAX_BARS if rows == 1 else side
    return max(1, -(-rows // side)), max(1, -(-columns // across))


def find_largest(stack: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Return the position in its block of the number that is largest in size, for each cell of each tile.

    NaN and inf count as largest.

    >>> import numpy as np
    >>> from elementgrad._explore.views import find_largest
    >>> find_largest(np.array([[[0.0, -3.0, 1.0, 2.0, 0.5]]]), (1, 2)).tolist()
    [[[1, 1, 0]]]
    """
    tiles, rows, columns = stack.shape
    down, across = -(-rows // block[0]), -(-columns // block[1])
    sizes = np.full((tiles, down * block[0], across * block[1]), -1.0)
    with np.errstate(over="ignore"):
        sizes[:, :rows, :columns] = np.where(np.isnan(stack), np.inf, np.abs(stack))
    blocks = sizes.reshape(tiles, down, block[0], across, block[1]).swapaxes(2, 3)
    return blocks.reshape(tiles, down, across, -1).argmax(axis=-1).astype(np.int32)


def pick(stack: np.ndarray, block: tuple[int, int], positions: np.ndarray) -> np.ndarray:
    """Return the numbers at these positions in their blocks."""
    tile, row, column = np.ogrid[tuple([slice(size) for size in positions.shape])]
    return stack[tile, row * block[0] + positions // block[1], column * block[1] + positions % block[1]]


def encode(values: np.ndarray) -> str:
    """Return numbers as base64 of little-endian float32 where that is exact, and of float64 elsewhere."""
    narrow = values.dtype.kind == "b" or (values.dtype.kind == "f" and values.dtype.itemsize <= 4)
    return base64.b64encode(np.ascontiguousarray(values, "<f4" if narrow else "<f8").tobytes()).decode()


def is_narrow(values: np.ndarray) -> bool:
    """Return True if numbers of this dtype are sent as float32."""
    return values.dtype.kind == "b" or (values.dtype.kind == "f" and values.dtype.itemsize <= 4)


def plain_number(value: Any) -> float | str:
    """Return a number as JSON has it: one that is not finite as a text."""
    number = float(value)
    return number if math.isfinite(number) else str(number)


@dataclass(frozen=True)
class View:
    """Cells of a window, and in words what they are and what is left out."""

    layout: Layout
    window: ViewWindow
    block: tuple[int, int]
    values: np.ndarray
    """The cells: tiles, rows and columns."""
    gradient: np.ndarray | None
    positions: np.ndarray | None
    """The position in its block of each cell's number; None where each cell is one number."""
    notes: Sequence[str]

    @classmethod
    def of(cls, layout: Layout, window: ViewWindow, values: np.ndarray, gradient: np.ndarray | None) -> "View":
        """Cut a window out of a tensor's values, and of the gradient with respect to it."""
        shape = values.shape
        stack = window.cut(values, layout)
        slopes = None if gradient is None else window.cut(gradient, layout)
        block = block_shape(*stack.shape)
        notes, positions = [], None
        if block != (1, 1):
            positions = find_largest(stack if slopes is None else slopes, block)
            stack = pick(stack, block, positions)
            slopes = None if slopes is None else pick(slopes, block, positions)
            what = "number" if gradient is None else "gradient"
            numbers = f"{block[0]} x {block[1]}" if block[0] > 1 else str(block[1])
            notes.append(f"each cell is the {what} largest in size of {numbers}; zoom in for single elements")
        if layout.tile is not None and window.tiles[1] - window.tiles[0] < shape[layout.tile]:
            first, stop = window.tiles
            which = f"channel {first}" if stop - first == 1 else f"channels {first} to {stop - 1}"
            notes.append(f"{which} of {shape[layout.tile]}")
        for axis, ends, word in ((layout.row, window.rows, "rows"), (layout.column, window.columns, "columns")):
            if axis is not None and ends[1] - ends[0] < shape[axis]:
                notes.append(f"{word} {ends[0]} to {ends[1] - 1} of {shape[axis]}")
        return cls(layout, window, block, stack, slopes, positions, notes)

    def to_dict(self) -> dict[str, Any]:
        return {
            "window": {
                "index": self.window.index,
                "tiles": self.window.tiles,
                "rows": self.window.rows,
                "columns": self.window.columns,
            },
            "cells": self.values.shape,
            "block": self.block,
            "values": encode(self.values),
            "narrow": is_narrow(self.values),
            "gradient": None if self.gradient is None else encode(self.gradient),
            "narrowGradient": self.gradient is not None and is_narrow(self.gradient),
            "positions": None if self.positions is None else base64.b64encode(self.positions.tobytes()).decode(),
            "notes": list(self.notes),
        }


def describe_scale(values: np.ndarray) -> dict[str, Any]:
    """Return the end of the colour scale of some numbers, their range, and a description in words."""
    scale = Scale.of(values.astype(np.float64, copy=False))
    return {
        "limit": scale.limit,
        "lowest": scale.lowest,
        "highest": scale.highest,
        "nonfinite": scale.nonfinite,
        "notes": scale.notes,
        "description": scale.description,
    }


def thumbnail(values: np.ndarray, layout: Layout, index: Sequence[int]) -> dict[str, Any]:
    """Return the small picture of a tensor in steps from -126 to 126; -128 is NaN, and -127 and 127 are -inf and inf.

    Of an image it has every so many pixels, grey. Elsewhere each cell is the number largest in size of all channels.
    """
    window = ViewWindow.of(layout, values.shape, index)
    ends = (0, 1 if layout.tile is None else values.shape[layout.tile])
    stack = ViewWindow(window.index, ends, window.rows, window.columns).cut(values, layout).astype(np.float64)
    block = -(-stack.shape[1] // THUMBNAIL), -(-stack.shape[2] // THUMBNAIL)
    if layout.kind == "image":
        plane = stack.mean(axis=0)[:: block[0], :: block[1]]
    else:
        pooled = pick(stack, block, find_largest(stack, block))
        plane = np.take_along_axis(pooled, find_strongest(pooled)[None], axis=0)[0]
    limit = Scale.of(plane).limit
    with np.errstate(invalid="ignore"):
        steps = np.where(np.isinf(plane), 127 * np.sign(plane), np.round(np.clip(plane / limit, -1, 1) * 126))
    steps = np.where(np.isnan(plane), -128, steps).astype(np.int8)
    return {"rows": plane.shape[0], "columns": plane.shape[1], "steps": base64.b64encode(steps.tobytes()).decode()}


def find_strongest(stack: np.ndarray) -> np.ndarray:
    """Return the tile with the number largest in size, for each cell."""
    return _sizes(stack).argmax(axis=0)


def rank(gradient: np.ndarray, values: np.ndarray, count: int) -> list[tuple[int, ...]]:
    """Return the indices of the elements with the largest gradients in size, the largest first; zeros are none.

    Of equal gradients, as those of a mean are, the one with the largest value in size is first.

    >>> import numpy as np
    >>> from elementgrad._explore.views import rank
    >>> rank(np.array([[0.0, -3.0], [np.nan, 3.0]]), np.array([[1.0, 0.0], [0.0, 2.0]]), 3)
    [(1, 0), (1, 1), (0, 1)]
    """
    sizes, others = _sizes(gradient).reshape(-1), _sizes(values).reshape(-1)
    others = np.where(np.isinf(sizes), 0.0, others)  # inf and NaN stay in the order of the tensor
    count = min(count, int(np.count_nonzero(sizes)))
    if not count:
        return []
    least = np.partition(sizes, sizes.size - count)[sizes.size - count]
    best = np.flatnonzero(sizes >= least)
    best = best[np.lexsort((best, -others[best], -sizes[best]))][:count]
    return [tuple(map(int, np.unravel_index(flat, gradient.shape))) for flat in best]


def _sizes(values: np.ndarray) -> np.ndarray:
    """Return how large numbers are; NaN counts as largest."""
    return np.where(np.isnan(values), np.inf, np.abs(values))
