"""`eg.plot`: choose the picture that fits an object, and draw it.

The pictures are in `pictures.py`, which imports matplotlib and is imported here only when one is drawn.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from elementgrad._backends import registry
from elementgrad._names.call import Operand
from elementgrad._place.place import Place
from elementgrad._read.contributions import Shares
from elementgrad._read.jacobian import Jacobian, operands
from elementgrad._show.values import (
    IMAGE_CHANNELS,
    MAX_MARKS,
    Planes,
    Scale,
    flat_positions,
    has_channels_last,
    mark_coordinates,
    move_marks,
    require_elements,
    to_floats,
)
from elementgrad._train.elements import Elements, patch_of
from elementgrad._train.patch import Patch
from elementgrad.errors import BroadcastError, OptionError, SizeError, require_packages

if TYPE_CHECKING:
    from elementgrad._show.style import Picture, Theme

    Drawing = tuple[Picture, list[str], str]
    """A picture, notes on what it leaves out, and a description for those who cannot see it."""

Tensor = Any
KINDS = ("vector", "matrix", "image", "channels", "tokens", "field", "spy")
"""Pictures of an array of gradients."""
KIND_NAMES = {"vector": "Bars", "tokens": "Tokens in colours", "field": "Image and receptive field"}
MAX_LINES = 128
"""Rows and columns of a Jacobian that are computed for a picture of its nonzeros."""
MAX_ENTRIES = 1 << 22
"""Entries of a Jacobian that are computed for any other picture, or for a report."""


@dataclass(frozen=True)
class ArrayOptions:
    """The options of `eg.plot` that are for arrays of gradients."""

    kind: str | None
    mark: Any
    tokens: Sequence[str] | None
    image: Tensor
    channels: str | None
    limit: float | None


def plot(
    what: Any,
    *,
    kind: str | None = None,
    mark: Any = None,
    title: str | None = None,
    theme: str = "light",
    tokens: Sequence[str] | None = None,
    image: Tensor = None,
    channels: str | None = None,
    limit: float | None = None,
) -> "Picture":
    """Draw gradients, or anything else that the library returns, as a matplotlib figure.

    Zero is in the middle of the colours, which end where a few large numbers would drown all others, or at `limit`.
    The picture says what is beyond, not finite or left out.

    Args:
        what: A tensor of any framework or an array, drawn by its shape without leading axes of size one: bars, a
            matrix, an image of one, three or four channels, or a grid of feature maps. A Jacobian is drawn by where it
            is not zero, contributions as a waterfall, elements and patches before and after, and a list of
            `{place: values}`, one for each step, as a trace. A place, such as one of `eg.field`, is framed in `image`.
        kind: Draw an array as `"vector"`, `"matrix"`, `"image"`, `"channels"`, `"tokens"`, `"field"` or `"spy"`.
        mark: Elements to frame: an index, a place or its text, such as `"x[0, 5]"`.
        title: The text at the head.
        theme: `"light"` or `"dark"`.
        tokens: One text for each position of a sequence, drawn in the colours of their gradients.
        image: The image over which the gradient is drawn, as a receptive field; or the tensor that a place is of.
        channels: `"first"` or `"last"`; by default where the framework has them.
        limit: The end of the colours.

    Returns:
        A figure that shows itself in a notebook, with a description in `alt` and what it leaves out in `notes`.

    Raises:
        OptionError: An option does not fit `what`, or there are no elements.
        FrameworkError: `what` is nothing that can be drawn.
        SizeError: A Jacobian has too many entries for the `kind`.

    >>> import torch, elementgrad as eg
    >>> gradient = eg.grad(lambda x: (x**3).sum(), torch.tensor([[1.0, -2.0], [0.5, 3.0]]))
    >>> figure = eg.plot(gradient, mark=(1, 1), title="cubes")
    >>> figure.axes[0].images[0].get_clim()
    (-27.0, 27.0)
    """
    require_packages("matplotlib", "eg.plot", "show")
    from elementgrad._show.style import get_theme

    colours = get_theme(theme)
    if kind is not None and kind not in KINDS:
        raise OptionError(f"kind={kind!r} is none of {', '.join(KINDS)}; give one of them, or leave it out")
    options = ArrayOptions(kind, mark, tokens, image, channels, limit)
    drawing = _draw_steps(what, options, colours)
    if drawing is None and isinstance(what, Jacobian):
        if kind in (None, "spy") and tokens is None and image is None:
            drawing = _draw_jacobian(what, mark, colours)
        else:
            what = _to_dense(what)
    if isinstance(what, Place):
        drawing = _draw_field(what, options, colours)
    picture, notes, alt = drawing or _draw_array(what, options, colours)
    return picture.finish(title, alt, notes)


def _draw_steps(what: Any, options: ArrayOptions, theme: "Theme") -> "Drawing | None":
    """Draw numbers that come one after another; return None for anything else."""
    from elementgrad._show import pictures

    draw: Any
    if isinstance(what, Shares):
        draw = pictures.draw_waterfall
    elif isinstance(what, Elements | Patch):
        draw = pictures.draw_changes
    elif pictures.is_trace(what):
        draw = pictures.draw_trace
    else:
        return None
    drawing: Drawing = draw(patch_of(what) if isinstance(what, Elements) else what, theme)
    for name, value in vars(options).items():
        if value is not None:
            raise OptionError(f"{name} is for arrays of gradients, and this is {type(what).__name__}; leave it out")
    return drawing


def _draw_array(what: Any, options: ArrayOptions, theme: "Theme") -> "Drawing":
    from elementgrad._show import pictures

    values, framework, limit = to_floats(what), _framework_of(what), options.limit
    require_elements(values.shape)
    kind = _choose_kind(options, values.shape, framework)
    marks = mark_coordinates(options.mark, values.shape)
    if kind == "tokens":
        numbers, texts = pictures.reduce_per_token(values, options.tokens)
        features = values.size // len(numbers)
        positions = (flat_positions(marks, values.shape) // features).tolist()
        picture, notes = pictures.draw_tokens(numbers, texts, positions, theme, limit, features)
    elif kind == "vector":
        picture, notes = pictures.draw_vector(values, marks, theme, limit)
    elif kind == "matrix":
        picture, notes = pictures.draw_matrix(values, marks, theme, limit)
    elif kind == "spy":
        table = pictures.as_matrix(values)
        marks_in_table = move_marks(marks, values.shape, table.shape)
        picture, notes = pictures.draw_spy(table, marks_in_table, theme, (None, None), table.shape)
    else:
        last = values.ndim > 2 and has_channels_last(values.shape, options.channels, framework)
        planes = Planes.of(values, marks, last)
        if kind == "channels":
            picture, notes = pictures.draw_channels(planes, theme, limit)
        else:
            _require_one_image(values.shape)
            if kind == "image":
                picture, notes = pictures.draw_image(planes, theme, limit)
            else:
                background = _to_background(options.image, planes, options.channels)
                picture, notes = pictures.draw_receptive_field(planes, background, theme, limit)
    name = KIND_NAMES.get(kind, "Heat map")
    alt = f"{name} of a gradient of shape {values.shape}: {Scale.of(values, limit).description}"
    return picture, [*_mark_notes(marks, values), *notes], alt + _marks_text(marks)


def _draw_field(field: Place, options: ArrayOptions, theme: "Theme") -> "Drawing":
    """Draw the tensor that a place is of, with the place in it framed."""
    from elementgrad._show import pictures

    if options.image is None:
        raise OptionError(f"{field} is drawn in its tensor; give that, as in eg.plot(field, image=x)")
    for name, value in vars(options).items():
        if value is not None and name not in ("image", "channels"):
            raise OptionError(f"{name} is for arrays of gradients, and this is a place; leave it out")
    values = to_floats(options.image)
    inside = np.zeros(values.shape)
    inside[tuple(mark_coordinates(field, values.shape).T)] = 1.0
    shape = drop_leading_ones(values.shape)
    shape = shape if len(shape) > 1 else (1, values.size)
    _require_one_image(shape)
    last = len(shape) > 2 and has_channels_last(shape, options.channels, _framework_of(options.image))
    planes = Planes.of(inside.reshape(shape), np.zeros((0, len(shape)), np.int64), last)
    background = _to_background(values.reshape(shape), planes, "last" if last else "first")
    picture, notes = pictures.draw_field(planes.stack.max(axis=0) > 0, background, theme)
    return picture, notes, f"{field} in a tensor of shape {values.shape}: {notes[0]}"


def _framework_of(what: Any) -> str | None:
    backend = registry.backend_of(what)
    return backend.name if backend is not None else None


def _choose_kind(options: ArrayOptions, shape: tuple[int, ...], framework: str | None) -> str:
    kind = options.kind
    for needed_by, argument in (("tokens", "tokens"), ("field", "image")):
        is_given = getattr(options, argument) is not None
        if is_given and kind not in (None, needed_by):
            raise OptionError(f'{argument} is for kind="{needed_by}" and not for kind="{kind}"; leave one of them out')
        if kind == needed_by and not is_given:
            raise OptionError(f'kind="{needed_by}" needs {argument}; give it, as in eg.plot(g, {argument}={argument})')
    if options.tokens is not None:
        return "tokens"
    if options.image is not None:
        return "field"
    axes = drop_leading_ones(shape)
    if kind is None and len(axes) > 2:
        last = has_channels_last(shape, options.channels, framework)
        return "image" if len(axes) == 3 and (axes[-1] if last else axes[0]) in IMAGE_CHANNELS else "channels"
    kind = kind or ("matrix" if len(axes) == 2 else "vector")
    if kind in ("image", "channels") and len(shape) < 2:
        raise OptionError(f'kind="{kind}" needs rows and columns, and the shape is {shape}; use kind="vector"')
    return kind


def _require_one_image(shape: tuple[int, ...]) -> None:
    count = math.prod(shape[:-3])
    if count != 1:
        raise OptionError(f"shape {shape} is that of {count} images; give one, as in eg.plot(g[0])")


def _to_background(image: Tensor, planes: Planes, channels: str | None) -> np.ndarray:
    """Return the image under a gradient, from 0 to 1, in grey or in three colours."""
    values = to_floats(image)
    rows, columns = planes.stack.shape[1:]
    shape = drop_leading_ones(values.shape)
    last = len(shape) == 3 and has_channels_last(shape, channels, _framework_of(image))
    shape = shape if len(shape) > 1 else (1, values.size)
    size = shape[:-1] if last else shape[-2:]
    if len(shape) not in (2, 3) or size != (rows, columns):
        raise BroadcastError(
            f"an image of shape {values.shape} under a gradient of {rows} rows and {columns} columns; give one of "
            "the same rows and columns"
        )
    values = values.reshape(shape)
    if len(shape) == 3:
        values = values if last else np.moveaxis(values, 0, -1)
        values = values[..., :3] if values.shape[-1] >= 3 else values[..., 0]
    finite = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    low, high = finite.min(initial=0.0), finite.max(initial=0.0)
    return (finite - low) / ((high - low) or 1.0)


def drop_leading_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape without leading axes of size one, such as that of a batch of one."""
    first = next((axis for axis, size in enumerate(shape) if size != 1), len(shape))
    return shape[first:]


def _to_dense(jacobian: Jacobian) -> Tensor:
    size = math.prod(jacobian.shape)
    if size > MAX_ENTRIES:
        raise SizeError(f"{jacobian!r} has {size} entries, too many for a picture; plot some, as in eg.plot(J[0, :])")
    return jacobian.dense()


def _draw_jacobian(jacobian: Jacobian, mark: Any, theme: "Theme") -> "Drawing":
    """Draw where some rows and columns of a Jacobian, evenly spread, are not zero."""
    from elementgrad._show import pictures

    of, wrt = operands(jacobian)
    require_elements(jacobian.shape)
    of_size, width = math.prod(of.shape), math.prod(wrt.shape)
    of_positions, columns = _spread_positions(of_size), _spread_positions(width)
    block = to_floats(jacobian[_index_of(of, of_positions), _index_of(wrt, columns)])
    table = block.reshape(-1, len(columns))
    # A Jacobian of a batch has the rows of `of` once for each example.
    examples = len(table) // len(of_positions)
    rows = np.concatenate([of_positions + of_size * example for example in range(examples)])
    height = of_size * examples
    marks = mark_coordinates(mark, jacobian.shape)
    nearest = [
        [np.abs(rows - row).argmin(), np.abs(columns - column).argmin()]
        for row, column in move_marks(marks, jacobian.shape, (height, width))
    ]
    lines = [rows if len(rows) < height else None, columns if len(columns) < width else None]
    marks_in_table = np.array(nearest, np.int64).reshape(-1, 2)
    picture, notes = pictures.draw_spy(table, marks_in_table, theme, lines, (height, width))
    alt = f"Where the derivative of {of.name} {of.shape} by {wrt.name} {wrt.shape} is not zero: {notes[0]}"
    return picture, notes, alt + _marks_text(marks)


def _spread_positions(size: int) -> np.ndarray:
    return np.unique(np.linspace(0, size - 1, min(size, MAX_LINES)).astype(np.int64))


def _index_of(side: Operand, positions: np.ndarray) -> Any:
    if len(positions) == math.prod(side.shape):
        return ...
    return tuple(np.unravel_index(positions, side.shape))


def _marks_text(marks: np.ndarray) -> str:
    return f"; marked: {', '.join([str(row) for row in marks[:3].tolist()])}" if len(marks) else ""


def _mark_notes(marks: np.ndarray, values: np.ndarray) -> list[str]:
    """Return the values of the first few marked elements as text."""
    if not len(marks):
        return []
    texts = [f"{row} = {values[tuple(row)]:.4g}" for row in marks[:3].tolist()]
    if len(marks) > 3:
        texts.append(f"and {len(marks) - 3} more")
    framed = [f"{MAX_MARKS} of {len(marks)} marked elements are framed"] if len(marks) > MAX_MARKS else []
    return [f"marked: {', '.join(texts)}", *framed]
