"""`plot`: something of the library in, a matplotlib figure out."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from elementgrad._backends import registry
from elementgrad._names.call import Operand
from elementgrad._optional import require
from elementgrad._read.contributions import Shares
from elementgrad._read.jacobian import Jacobian, sides
from elementgrad._show.heatmaps import COLOURS, Planes, bare, channels_last, without_ones
from elementgrad._show.values import MARKS, Scale, floats, marked, require_some
from elementgrad._train.elements import Elements, patch_of
from elementgrad._train.patch import Patch
from elementgrad.errors import BroadcastError, OptionError, SizeError

if TYPE_CHECKING:
    from elementgrad._show.style import Picture, Theme

Tensor = Any
HEATS = ("vector", "matrix", "image", "channels", "tokens", "field", "spy")
"""What an array of gradients can be shown as."""
WORDS = {"vector": "Bars", "tokens": "Tokens in colours", "field": "Image and receptive field"}
LINES = 128
"""Rows and columns of a Jacobian that are computed for a picture of it."""
READ = 1 << 22
"""Numbers that are computed of a Jacobian shown otherwise."""


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
    """A picture, as a matplotlib figure, of gradients or of whatever else the library gives.

    A tensor of any framework or an array is shown by its shape, without leading axes of size one: a `"vector"` as bars,
    a `"matrix"`, an `"image"` of one to four channels, more `"channels"` as a grid of feature maps; `kind` decides
    otherwise. With `tokens` it is a sequence of these texts, with `image` the receptive field over that image. A
    Jacobian is shown by where it is not zero (`"spy"`), contributions as a waterfall, elements and patches before and
    after, and a list of `{place: values}`, one for each step, as a trace.

    Zero is in the middle of the colours, which end where a few large numbers would drown all others, or at `limit`; the
    picture says what is beyond, not finite or left out. `mark` frames elements: an index, a place or its text, such as
    `"x[0, 5]"`. `channels="last"` is where TensorFlow has them. `theme` is `"light"` or `"dark"`.

    >>> import torch, elementgrad as eg
    >>> gradient = eg.grad(lambda x: (x**3).sum(), torch.tensor([[1.0, -2.0], [0.5, 3.0]]))
    >>> figure = eg.plot(gradient, mark=(1, 1), title="cubes")
    >>> figure.axes[0].images[0].get_clim()
    (-27.0, 27.0)
    """
    require("matplotlib", "eg.plot", "show")
    from elementgrad._show.style import theme_of

    colours = theme_of(theme)
    if kind is not None and kind not in HEATS:
        raise OptionError(f"kind={kind!r} is none of {', '.join(HEATS)}; give one of them, or leave it out")
    other = _ordered(what, colours)
    if other is not None:
        given = {"kind": kind, "mark": mark, "tokens": tokens, "image": image, "channels": channels, "limit": limit}
        for name, value in given.items():
            if value is not None:
                raise OptionError(f"{name} is for arrays of gradients, and this is {type(what).__name__}; leave it out")
        picture, notes, alt = other
        return picture.finish(title, alt, notes)
    if isinstance(what, Jacobian) and kind in (None, "spy") and tokens is None and image is None:
        return _spied(what, mark, colours, title)
    if isinstance(what, Jacobian):
        what = _dense(what)
    return _heated(what, kind, mark, title, colours, tokens, image, channels, limit)


def _ordered(what: Any, theme: "Theme") -> "tuple[Picture, list[str], str] | None":
    """Pictures of numbers that come one after another."""
    from elementgrad._show import steps

    if isinstance(what, Shares):
        return steps.waterfall(what, theme)
    if isinstance(what, Elements):
        return steps.changes(patch_of(what), theme)
    if isinstance(what, Patch):
        return steps.changes(what, theme)
    if steps.snapshots(what):
        return steps.trace(what, theme)
    return None


def _heated(
    what: Any,
    kind: str | None,
    mark: Any,
    title: str | None,
    theme: "Theme",
    tokens: Sequence[str] | None,
    image: Tensor,
    channels: str | None,
    limit: float | None,
) -> "Picture":
    from elementgrad._show import heatmaps
    from elementgrad._show.heatmaps import per_token, sequence

    values, framework = floats(what), _framework(what)
    require_some(values.shape)
    kind = _kind(kind, values.shape, channels, framework, tokens is not None, image is not None)
    marks = marked(mark, values.shape)
    if kind == "tokens":
        numbers, texts = per_token(values, tokens)
        each = values.size // len(numbers)
        positions = (bare(marks, values.shape) // each).tolist()
        made = sequence(numbers, texts, positions, theme, limit, each)
    elif kind == "vector":
        made = heatmaps.vector(values, marks, theme, limit)
    elif kind == "matrix":
        made = heatmaps.matrix(values, marks, theme, limit)
    elif kind == "spy":
        table = heatmaps.as_matrix(values)
        made = heatmaps.spy(
            table, heatmaps.flattened(marks, values.shape, table.shape), theme, (None, None), table.shape
        )
    else:
        shape = values.shape
        last = len(shape) > 2 and channels_last(shape, channels, framework)
        planes = Planes.of(values, marks, last)
        if kind == "channels":
            made = heatmaps.channels(planes, theme, limit)
        elif kind == "image":
            made = heatmaps.image(_single(planes, values.shape), theme, limit)
        else:
            made = heatmaps.field(_single(planes, values.shape), _under(image, planes, channels), theme, limit)
    picture, notes = made
    alt = f"{WORDS.get(kind, 'Heat map')} of a gradient of shape {values.shape}: {Scale.of(values, limit).described}"
    return picture.finish(title, alt + _named(marks), [*_named_values(marks, values), *notes])


def _framework(what: Any) -> str | None:
    owner = registry.backend_of(what)
    return owner.name if owner is not None else None


def _kind(
    kind: str | None, shape: tuple[int, ...], channels: str | None, framework: str | None, tokens: bool, image: bool
) -> str:
    """What an array is shown as."""
    needs = {"tokens": tokens, "field": image}
    for name, given in needs.items():
        argument = "tokens" if name == "tokens" else "image"
        if given and kind not in (None, name):
            raise OptionError(f'{argument} is for kind="{name}" and not for kind="{kind}"; leave one of them out')
        if kind == name and not given:
            raise OptionError(f'kind="{name}" needs {argument}; give it, as in eg.plot(g, {argument}={argument})')
    if tokens or image:
        return "tokens" if tokens else "field"
    axes = without_ones(shape)
    if kind is None and len(axes) > 2:
        last = channels_last(shape, channels, framework)
        return "image" if len(axes) == 3 and (axes[-1] if last else axes[0]) in COLOURS else "channels"
    kind = kind or ("matrix" if len(axes) == 2 else "vector")
    if kind in ("image", "channels") and len(shape) < 2:
        raise OptionError(f'kind="{kind}" needs rows and columns, and the shape is {shape}; use kind="vector"')
    return kind


def _single(planes: Planes, shape: tuple[int, ...]) -> Planes:
    """The planes of one image."""
    if len(shape) > 3 and math.prod(shape[:-3]) != 1:
        raise OptionError(f"shape {shape} is that of {math.prod(shape[:-3])} images; give one, as in eg.plot(g[0])")
    return planes


def _under(image: Tensor, planes: Planes, channels: str | None) -> np.ndarray:
    """The image that a gradient lies over, from 0 to 1, in grey or in three colours."""
    values, framework = floats(image), _framework(image)
    rows, columns = planes.stack.shape[1:]
    shape = without_ones(values.shape)
    last = len(shape) == 3 and channels_last(shape, channels, framework)
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


def _dense(jacobian: Jacobian) -> Tensor:
    size = math.prod(jacobian.shape)
    if size > READ:
        raise SizeError(f"{jacobian!r} has {size} entries, too many for a picture; plot some, as in eg.plot(J[0, :])")
    return jacobian.dense()


def _spied(jacobian: Jacobian, mark: Any, theme: "Theme", title: str | None) -> "Picture":
    """Some rows and columns of a Jacobian, evenly spread, and where they are not zero."""
    from elementgrad._show import heatmaps

    of, wrt = sides(jacobian)
    require_some(jacobian.shape)
    lines = [_spread(math.prod(side.shape)) for side in (of, wrt)]
    block = floats(jacobian[_index(of, lines[0]), _index(wrt, lines[1])])
    columns = len(lines[1])
    table = block.reshape(-1, columns)
    examples = len(table) // len(lines[0])
    height = math.prod(of.shape) * examples
    marks = marked(mark, jacobian.shape)
    positions = np.stack(np.unravel_index(bare(marks, jacobian.shape), (height, math.prod(wrt.shape))), axis=-1)
    rows = np.concatenate([lines[0] + math.prod(of.shape) * example for example in range(examples)])
    where = np.array([[np.abs(rows - row).argmin(), np.abs(lines[1] - column).argmin()] for row, column in positions])
    partly = [rows if len(rows) < height else None, lines[1] if columns < math.prod(wrt.shape) else None]
    picture, notes = heatmaps.spy(table, where.reshape(-1, 2), theme, partly, (height, math.prod(wrt.shape)))
    alt = f"Where the derivative of {of.name} {of.shape} by {wrt.name} {wrt.shape} is not zero: {notes[0]}"
    return picture.finish(title, alt + _named(marks), notes)


def _spread(size: int) -> np.ndarray:
    return np.unique(np.linspace(0, size - 1, min(size, LINES)).astype(np.int64))


def _index(side: Operand, positions: np.ndarray) -> Any:
    """Elements of a side by their positions in it."""
    if len(positions) == math.prod(side.shape):
        return ...
    return tuple(np.unravel_index(positions, side.shape))


def _named(marks: np.ndarray) -> str:
    return f"; marked: {', '.join([str(row) for row in marks[:3].tolist()])}" if len(marks) else ""


def _named_values(marks: np.ndarray, values: np.ndarray) -> list[str]:
    """The numbers of the first few marked elements."""
    shown = [f"{row} = {values[tuple(row)]:.4g}" for row in marks[:3].tolist()]
    more = [f"and {len(marks) - 3} more"] if len(marks) > 3 else []
    framed = [f"{MARKS} of {len(marks)} marked elements are framed"] if len(marks) > MARKS else []
    return [f"marked: {', '.join([*shown, *more])}", *framed] if shown else []
