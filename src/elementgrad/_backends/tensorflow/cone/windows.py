"""Rules of convolutions, pools and resized images."""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import tensorflow as tf

from elementgrad._backends.tensorflow.cone.moves import pick_rule
from elementgrad._backends.tensorflow.cone.rules import cut, known, rule
from elementgrad._cone.boxes import Box, sizes
from elementgrad._cone.maps import Along, AxisMap, Group, Link, Lookup, Relation, Spread, Whole, Window
from elementgrad._cone.plan import ProgramOp, Rule
from elementgrad._cone.rules import CustomRule

Tensor = Any
CHANNELS_LAST = ("NHWC", "NDHWC")


def _spatial(op: ProgramOp, name: str, space: int) -> list[int]:
    return [int(each) for each in op.details.attribute(name)[1 : 1 + space]]


def _low_padding(
    op: ProgramOp,
    image: Sequence[int],
    grid: Sequence[int],
    widths: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> list[int]:
    """Return the padding before each axis of an image, of which windows give a grid."""
    padding = op.details.attribute("padding")
    if padding == "EXPLICIT":
        return [int(each) for each in op.details.attribute("explicit_paddings")[2:-2:2]]
    if padding == "VALID":
        return [0] * len(image)
    return [
        max((out - 1) * stride + dilation * (width - 1) + 1 - n, 0) // 2
        for n, out, width, stride, dilation in zip(image, grid, widths, strides, dilations, strict=True)
    ]


def _pad(x: Tensor, pads: Sequence[tuple[int, int]]) -> Tensor:
    return tf.pad(x, [(0, 0), *pads, (0, 0)]) if any(map(any, pads)) else x


def _repeat_edges(x: Tensor, pads: Sequence[tuple[int, int]]) -> Tensor:
    """Pad an image with copies of its edges, which change no maximum.

    A window that sees padding sees the edge too, so a copy is the first maximum only where its original is. No number
    would do instead: a window that is -inf all over must not find its maximum in the padding.
    """
    for axis, (before, behind) in enumerate(pads, 1):
        if before or behind:
            size = x.shape[axis]
            x = tf.gather(x, np.clip(np.arange(-before, size + behind), 0, size - 1), axis=axis)
    return x


@rule("Conv2D", "Conv3D", "DepthwiseConv2dNative")
def convolution_rule(op: ProgramOp) -> Rule | None:
    x, kernel = op.operands
    if op.details.attribute("data_format") not in CHANNELS_LAST or x is kernel or 0 in x.shape:
        return None
    result, space = op.shapes[0], len(x.shape) - 2
    widths, strides = kernel.shape[:space], _spatial(op, "strides", space)
    dilations = _spatial(op, "dilations", space)
    lows = _low_padding(op, x.shape[1:-1], result[1:-1], widths, strides, dilations)
    windows = [
        Window(x.shape[i + 1], result[i + 1], widths[i], strides[i], lows[i], dilations[i]) for i in range(space)
    ]
    last, depthwise = space + 1, op.name.startswith("Depthwise")
    groups = x.shape[last] if depthwise else x.shape[last] // kernel.shape[space]
    by_group: AxisMap = Group(x.shape[last], result[last], groups)
    links = [Link((0,), (0,), Along(x.shape[0], result[0])), Link((last,), (last,), by_group)]
    links += [Link((i + 1,), (i + 1,), window) for i, window in enumerate(windows)]
    kernel_links = [Link((i,), (), Whole((widths[i],), ())) for i in range(space)]
    out: AxisMap = Along(result[last], result[last])
    if depthwise:
        kernel_links.append(Link((space,), (last,), by_group))
        kernel_links.append(Link((last,), (), Whole((kernel.shape[last],), ())))
    else:
        out = Group(result[last], result[last], groups) if groups > 1 else out
        kernel_links += [Link((space,), (), Whole((kernel.shape[space],), ())), Link((last,), (last,), out)]
    relations = [Relation(x.shape, result, tuple(links)), Relation(kernel.shape, result, tuple(kernel_links))]
    attributes = {name: op.details.op.get_attr(name) for name in ("strides", "dilations", "data_format")}
    function = getattr(tf.raw_ops, op.name)
    grouped = groups > 1

    def run(regions: list[Any], needs: Sequence[Box | None], box: Box) -> Tensor:
        part, weights = regions
        if part is None:  # windows that see padding alone
            return tf.zeros(sizes(box), x.dtype)
        pads = [window.padding(interval) for window, interval in zip(windows, box[1:-1], strict=True)]
        y = function(input=_pad(part, pads), filter=weights, padding="VALID", **attributes)
        if not grouped:
            return y
        return cut(y, box, (*box[:-1], *Group(result[last], result[last], groups).need([box[-1]])))

    return CustomRule(op, relations, run, float(prod(widths) * (1 if depthwise else kernel.shape[space])))


@rule("Conv2DBackpropInput", "Conv3DBackpropInputV2")
def transposed_rule(op: ProgramOp) -> Rule | None:
    _, kernel, x = op.operands
    if op.details.attribute("data_format") not in CHANNELS_LAST or x is kernel or 0 in x.shape:
        return None
    result, space = op.shapes[0], len(x.shape) - 2
    last = space + 1
    widths, strides = kernel.shape[:space], _spatial(op, "strides", space)
    dilations = _spatial(op, "dilations", space)
    if kernel.shape[space] != result[last] or kernel.shape[last] != x.shape[last]:
        return None  # in groups
    lows = _low_padding(op, result[1:-1], x.shape[1:-1], widths, strides, dilations)
    spreads = [
        Spread(x.shape[i + 1], result[i + 1], widths[i], strides[i], lows[i], dilations[i]) for i in range(space)
    ]
    links = [Link((0,), (0,), Along(x.shape[0], result[0])), Link((last,), (), Whole((x.shape[last],), ()))]
    links += [Link((i + 1,), (i + 1,), spread) for i, spread in enumerate(spreads)]
    kernel_links = [Link((i,), (), Whole((widths[i],), ())) for i in range(space)]
    kernel_links.append(Link((space,), (last,), Along(result[last], result[last])))
    kernel_links.append(Link((last,), (), Whole((kernel.shape[last],), ())))
    relations = [
        None,
        Relation(kernel.shape, result, tuple(kernel_links)),
        Relation(x.shape, result, tuple(links)),
    ]
    attributes = {name: op.details.op.get_attr(name) for name in ("strides", "dilations", "data_format")}
    function = getattr(tf.raw_ops, op.name)

    def run(regions: list[Any], needs: Sequence[Box | None], box: Box) -> Tensor:
        _, weights, part = regions
        need = needs[2]
        if part is None or need is None:  # between what is written
            return tf.zeros(sizes(box), x.dtype)
        written = [
            (mine.size - 1) * stride + dilation * (width - 1) + 1
            for mine, width, stride, dilation in zip(need[1:-1], widths, strides, dilations, strict=True)
        ]
        shape = [box[0].size, *written, box[-1].size]
        y = function(input_sizes=shape, filter=weights, out_backprop=part, padding="VALID", **attributes)
        hangs = [
            spread.overhang(interval, mine)
            for spread, interval, mine in zip(spreads, box[1:-1], need[1:-1], strict=True)
        ]
        begin = [0, *[max(before, 0) for before, _ in hangs], 0]
        kept = [n - max(before, 0) - max(behind, 0) for n, (before, behind) in zip(written, hangs, strict=True)]
        y = tf.slice(y, begin, [box[0].size, *kept, box[-1].size])
        return _pad(y, [(max(-before, 0), max(-behind, 0)) for before, behind in hangs])

    return CustomRule(op, relations, run, float(prod(widths) * kernel.shape[last]) / max(prod(strides), 1))


@rule("MaxPool", "MaxPool3D", "AvgPool", "AvgPool3D")
def pool_rule(op: ProgramOp) -> Rule | None:
    x, result = op.operands[0], op.shapes[0]
    if op.details.attribute("data_format") not in CHANNELS_LAST or 0 in x.shape:
        return None
    space = len(x.shape) - 2
    ksize = [int(each) for each in op.details.attribute("ksize")]
    strides = [int(each) for each in op.details.attribute("strides")]
    if ksize[0] != 1 or ksize[-1] != 1 or strides[0] != 1 or strides[-1] != 1:
        return None
    widths = ksize[1:-1]
    lows = _low_padding(op, x.shape[1:-1], result[1:-1], widths, strides[1:-1], [1] * space)
    windows = [Window(x.shape[i + 1], result[i + 1], widths[i], strides[i + 1], lows[i]) for i in range(space)]
    links = [Link((i,), (i,), Along(x.shape[i], x.shape[i])) for i in (0, space + 1)]
    links += [Link((i + 1,), (i + 1,), window) for i, window in enumerate(windows)]
    function = getattr(tf.raw_ops, op.name)
    attributes = {"ksize": ksize, "strides": strides, "data_format": op.details.attribute("data_format")}
    largest = op.name.startswith("Max")

    def run(regions: list[Any], needs: Any, box: Box) -> Tensor:
        part = regions[0]
        pads = [window.padding(interval) for window, interval in zip(windows, box[1:-1], strict=True)]
        padded = _repeat_edges(part, pads) if largest else _pad(part, pads)
        y = (
            function(input=padded, padding="VALID", **attributes)
            if largest
            else function(**{"input" if space == 3 else "value": padded}, padding="VALID", **attributes)
        )
        if largest or not any(map(any, pads)):
            return y
        # Averages are over the positions inside of the image alone.
        share = np.ones([1] * (space + 2))
        for axis, (window, interval) in enumerate(zip(windows, box[1:-1], strict=True), 1):
            counts = [window.need([type(interval)(p, p + 1)])[0].size for p in range(*interval)]
            shape = [1] * (space + 2)
            shape[axis] = len(counts)
            share = share * (window.width / np.array(counts, float)).reshape(shape)
        return y * tf.cast(share, y.dtype)

    return CustomRule(op, [Relation(x.shape, result, tuple(links))], run, float(prod(widths)))


@rule("ResizeNearestNeighbor", "ResizeBilinear", "ResizeBicubic")
def resize_rule(op: ProgramOp) -> Rule | None:
    """A product of both axes of the image with a matrix that is zero but for a band."""
    x, result = op.operands[0], op.shapes[0]
    if known(op.operands[1]) is None or 0 in x.shape or 0 in result:
        return None
    matrices = [_resize_matrix(op, x.shape[axis], result[axis]) for axis in (1, 2)]
    if op.name == "ResizeNearestNeighbor":
        return pick_rule(op, {axis: matrix.argmax(1) for axis, matrix in enumerate(matrices, 1)})
    links = [Link((i,), (i,), Along(x.shape[i], x.shape[i])) for i in (0, 3)]
    for axis, matrix in enumerate(matrices, 1):
        used = matrix != 0
        first, last = used.argmax(1), used.shape[1] - 1 - used[:, ::-1].argmax(1)
        links.append(Link((axis,), (axis,), Lookup(used.shape[1], first, last)))

    def run(regions: list[Any], needs: Sequence[Box | None], box: Box) -> Tensor:
        need = needs[0]
        assert need is not None
        rows, columns = (
            tf.constant(matrix[slice(*box[axis]), slice(*need[axis])], tf.float32)
            for axis, matrix in enumerate(matrices, 1)
        )
        # These operations compute in float32, whatever the dtype of the image.
        return tf.einsum("yh,xw,nhwc->nyxc", rows, columns, tf.cast(regions[0], tf.float32))

    return CustomRule(op, [Relation(x.shape, result, tuple(links)), None], run, 8.0)


def _resize_matrix(op: ProgramOp, before: int, after: int) -> np.ndarray:
    """Return the matrix by which one axis is resized: the images of its unit vectors."""
    units = tf.reshape(tf.eye(before), [1, before, 1, before])
    (made,) = op.details.run(tf.cast(units, op.operands[0].dtype), tf.constant([after, 1]))
    return tf.reshape(made, [after, before]).numpy()
