"""A whole Jacobian cut into blocks of rows or columns, which are boxes in an array of its shape."""

import math
from dataclasses import dataclass

import numpy as np

from elementgrad.plan.plan import Mode

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Block:
    """Some rows of a Jacobian with all columns, or the other way round; `J.blocks()` gives them.

    `rows` and `columns` are slices into the output and the input, both flattened, so that a block is a part of the
    Jacobian as a matrix: `matrix[block.rows, block.columns]` is `block.values`. With `batch=True` there is such a
    matrix for each example, and `matrices[:, block.rows, block.columns]` is `block.values`.

    >>> import torch, elementgrad as eg
    >>> J = eg.jacobian(lambda x: x[:3] ** 2, torch.arange(4.0))
    >>> next(iter(J.blocks()))
    Block(rows=slice(0, 1, None), columns=slice(0, 4, None), values=array([[0., 0., 0., 0.]], dtype=float32))
    """

    rows: slice
    columns: slice
    values: np.ndarray


@dataclass(frozen=True)
class Layout:
    """Where the blocks are. Each is one piece of the flattened side that is cut, and a box of it as well."""

    examples: Shape
    of: Shape
    wrt: Shape
    mode: Mode
    box: Shape
    """The sizes of a block along the axes of the side that is cut; the last along an axis may be smaller."""

    @classmethod
    def cut(cls, examples: Shape, of: Shape, wrt: Shape, mode: Mode, most: int) -> "Layout":
        """Blocks of at most so many rows, for reverse sweeps, or columns.

        >>> from elementgrad.plan.layout import Layout
        >>> Layout.cut((), (4, 10), (7,), "reverse", most=25).box, Layout.cut((), (4, 10), (7,), "reverse", most=6).box
        ((2, 10), (1, 5))
        """
        box: list[int] = []
        for size in reversed(of if mode == "reverse" else wrt):
            size = max(1, size)
            fits = min(size, most)
            box.append(-(-size // -(-size // fits)))  # of about equal size
            most = max(1, most // size) if fits == size else 1
        return cls(examples, of, wrt, mode, tuple(reversed(box)))

    @property
    def side(self) -> Shape:
        """The shape of the side that is cut."""
        return self.of if self.mode == "reverse" else self.wrt

    @property
    def shape(self) -> Shape:
        """The shape of the whole."""
        return (*self.examples, *self.of, *self.wrt)

    @property
    def chunks(self) -> Shape:
        """The shape of a block in an array of the whole's shape."""
        sides = (*self.box, *self.wrt) if self.mode == "reverse" else (*self.of, *self.box)
        return tuple([max(1, size) for size in (*self.examples, *sides)])

    @property
    def grid(self) -> Shape:
        """How many blocks there are along each axis of the whole."""
        return tuple([-(-size // chunk) for size, chunk in zip(self.shape, self.chunks, strict=True)])

    def __len__(self) -> int:
        return math.prod(self.grid)

    @property
    def most(self) -> int:
        """How many rows or columns the largest block has."""
        return math.prod(self.box)

    @property
    def numbers(self) -> int:
        """How many numbers the largest block has."""
        return math.prod(self.chunks)

    def coordinates(self, number: int) -> Shape:
        """Where a block is in the grid."""
        return tuple(map(int, np.unravel_index(number, self.grid))) if self.grid else ()

    def region(self, number: int) -> tuple[slice, ...]:
        """The box of a block in an array of the whole's shape."""
        boxes = zip(self.coordinates(number), self.chunks, self.shape, strict=True)
        return tuple([slice(at * chunk, min((at + 1) * chunk, size)) for at, chunk, size in boxes])

    def sizes(self, number: int) -> Shape:
        """The shape of that box."""
        return tuple([piece.stop - piece.start for piece in self.region(number)])

    def bounds(self, number: int) -> tuple[slice, slice]:
        """The rows and columns of a block."""
        first = len(self.examples) + (0 if self.mode == "reverse" else len(self.of))
        box = self.region(number)[first : first + len(self.side)]
        start = 0
        for size, piece in zip(self.side, box, strict=True):
            start = start * size + piece.start
        cut = slice(start, start + math.prod([piece.stop - piece.start for piece in box]))
        if self.mode == "reverse":
            return cut, slice(0, math.prod(self.wrt))
        return slice(0, math.prod(self.of)), cut
