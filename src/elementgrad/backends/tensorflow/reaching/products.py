"""Sets of reach through the products of TensorFlow: of matrices, of convolutions, and through pools."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from elementgrad.backends.tensorflow.reaching.following import Follower, Operation, Rule, array_of, known
from elementgrad.sparsity.products import convolution, product, transposed_windows
from elementgrad.sparsity.reach import Ids
from elementgrad.sparsity.value import Reached, Value, reached

Pads = list[tuple[int, int]]


def multiplied(follower: Follower, operation: Operation, operands: list[Value]) -> Sequence[Value]:
    """Matrices in stacks that broadcast: each side that depends on the seed in turn, as if the other did not."""
    (y,) = operation.outputs
    if not y.shape.is_fully_defined():
        return follower.everything(operation, operands)
    names = ("transpose_a", "transpose_b") if operation.type == "MatMul" else ("adj_x", "adj_y")
    flips = [operation.get_attr(name) for name in names]
    shape = y.shape.as_list()
    stack, count = shape[:-2], int(np.prod(shape[:-2]))

    def flat(x: np.ndarray, flip: bool) -> np.ndarray:
        x = np.swapaxes(x, -1, -2) if flip else x
        return np.broadcast_to(x, (*stack, *x.shape[-2:])).reshape(count, *x.shape[-2:])

    left, right = operands
    found = []
    if isinstance(left, Reached):
        mask = flat(array_of(right) != 0, flips[1]) if known(right) else None
        found.append(product(follower.reach, flat(left.ids, flips[0]), mask, shape[-1]))
    if isinstance(right, Reached):
        mask = flat(array_of(left) != 0, not flips[0]) if known(left) else None
        through = product(follower.reach, flat(right.ids, not flips[1]), mask, shape[-2])
        found.append(through.transpose(0, 2, 1))
    return [Reached(follower.reach.union(*found).reshape(shape))]


def summed(follower: Follower, operation: Operation, operands: list[Value]) -> Sequence[Value]:
    """`Einsum`: the union over what is summed, wherever the other operands lead it."""
    equation = operation.get_attr("equation").decode()
    (y,) = operation.outputs
    before, _, after = equation.partition("->")
    terms = before.split(",")
    plain = "." not in equation and all(len(set(term)) == len(term) for term in (*terms, after))
    if not plain or not y.shape.is_fully_defined():
        return follower.everything(operation, operands)
    found = []
    for term, value in zip(terms, operands, strict=True):
        if isinstance(value, Reached):
            ids = follower.reach.over(value.ids, [axis for axis, label in enumerate(term) if label not in after])
            left = [label for label in term if label in after]
            ids = ids.transpose([left.index(label) for label in after if label in left])
            shape = [n if label in left else 1 for label, n in zip(after, y.shape.as_list(), strict=True)]
            found.append(np.broadcast_to(ids.reshape(shape), y.shape.as_list()))
    return [Reached(follower.reach.union(*found))]


class _Convolution:
    """What the attributes of a convolution say, with the channels after the batch and space last."""

    def __init__(self, operation: Operation, image: Sequence[int], kernel: Sequence[int]):
        form = operation.get_attr("data_format").decode()
        self.order = [form.index("N"), form.index("C"), *[axis for axis, name in enumerate(form) if name not in "NC"]]
        self.space = self.order[2:]
        dims = len(self.space)
        self.depthwise = operation.type.startswith("Depthwise")
        self.strides = [operation.get_attr("strides")[axis] for axis in self.space]
        self.dilations = [operation.get_attr("dilations")[axis] for axis in self.space]
        self.image = [image[axis] for axis in self.space]
        self.spans = [(n - 1) * step + 1 for n, step in zip(kernel[:dims], self.dilations, strict=True)]
        self.pads = self._pads(operation)
        channels = image[self.order[1]]
        self.groups = channels if self.depthwise else channels // kernel[-2]

    def _pads(self, operation: Operation) -> Pads:
        padding = operation.get_attr("padding")
        if padding == b"EXPLICIT":
            explicit = operation.get_attr("explicit_paddings")
            return [(explicit[2 * axis], explicit[2 * axis + 1]) for axis in self.space]
        return pads(padding, self.image, self.spans, self.strides)

    def kernel(self, x: np.ndarray) -> np.ndarray:
        """A kernel with its channels first: those that come out, and those of a group that go in."""
        if self.depthwise:
            x = x.reshape(*x.shape[:-2], 1, -1)
        return x.transpose(x.ndim - 1, x.ndim - 2, *range(x.ndim - 2))

    def back(self, ids: Ids) -> Ids:
        """From the order in which axes are here to that of the operation."""
        return ids.transpose(np.argsort(self.order))


def convolved(follower: Follower, operation: Operation, operands: list[Value]) -> Sequence[Value]:
    """A convolution, of the image with a kernel and of the kernel with an image."""
    image, kernel = operands
    if not all(x.shape.is_fully_defined() for x in operation.inputs):
        return follower.everything(operation, operands)
    shapes = [x.shape.as_list() for x in operation.inputs]
    about = _Convolution(operation, *shapes)
    shape = operation.outputs[0].shape.as_list()
    found = []
    if isinstance(image, Reached):
        mask = about.kernel(_mask(kernel, shapes[1]))
        steps = about.strides, about.pads, about.dilations, None, about.groups
        found.append(about.back(convolution(follower.reach, image.ids.transpose(about.order), mask, *steps)))
    if isinstance(kernel, Reached):
        ids = about.kernel(kernel.ids)
        each = follower.reach.over(ids.reshape(len(ids), -1), [1])
        axes = [-1 if axis == about.order[1] else 1 for axis in range(len(shape))]
        found.append(np.broadcast_to(each.reshape(axes), shape))
    return [Reached(follower.reach.union(*found))]


def convolved_back(follower: Follower, operation: Operation, operands: list[Value]) -> Sequence[Value]:
    """The gradient of a convolution for its image: a convolution with the kernel turned round."""
    _, kernel, seed = operands
    (y,) = operation.outputs
    if (
        isinstance(kernel, Reached)
        or not y.shape.is_fully_defined()
        or not operation.inputs[1].shape.is_fully_defined()
    ):
        return follower.everything(operation, operands)
    shape = operation.inputs[1].shape.as_list()
    about = _Convolution(operation, y.shape.as_list(), shape)
    mask = about.kernel(_mask(kernel, shape))
    out, into, *space = mask.shape
    mask = mask.reshape(about.groups, out // about.groups, into, *space).swapaxes(1, 2)
    mask = np.flip(mask.reshape(about.groups * into, out // about.groups, *space), tuple(range(2, 2 + len(space))))
    ids = seed.ids.transpose(about.order)
    back = [
        (span - 1 - low, whole - (n - 1) * step - 1 + low)
        for n, whole, step, span, (low, _) in zip(
            ids.shape[2:], about.image, about.strides, about.spans, about.pads, strict=True
        )
    ]
    ones = [1] * len(space)
    swept = convolution(follower.reach, ids, mask, ones, back, about.dilations, about.strides, about.groups)
    return [Reached(about.back(swept))]


def convolved_for_kernel(follower: Follower, operation: Operation, operands: list[Value]) -> Sequence[Value]:
    """The gradient of a convolution for its kernel: of each output channel everything mixes."""
    image, _, seed = operands
    (y,) = operation.outputs
    if isinstance(image, Reached) or not y.shape.is_fully_defined():
        return follower.everything(operation, operands)
    shape = y.shape.as_list()
    form = operation.get_attr("data_format").decode()
    each = follower.reach.over(seed.ids, [axis for axis, name in enumerate(form) if name != "C"])
    last = shape[-2:] if operation.type.startswith("Depthwise") else [1, shape[-1]]
    return [Reached(np.broadcast_to(each.reshape(*[1] * (len(shape) - 2), *last), shape))]


def pooled(follower: Follower, operation: Operation, operands: list[Value]) -> Sequence[Value]:
    """Windows, in the forward direction."""
    (ids,) = reached(operands[-1:]) or reached(operands[:1])
    if len(reached(operands)) > 1:
        return follower.everything(operation, operands)
    size, strides = operation.get_attr("ksize"), operation.get_attr("strides")
    padding = pads(operation.get_attr("padding"), ids.shape, size, strides)
    return [Reached(follower.reach.windows(ids, size, strides, padding))]


def pooled_back(follower: Follower, operation: Operation, operands: list[Value]) -> Sequence[Value]:
    """The gradient of a pool: each window's number goes to some of its elements."""
    (y,) = operation.outputs
    if any(isinstance(value, Reached) for value in operands[:-1]) or not y.shape.is_fully_defined():
        return follower.everything(operation, operands)
    size, strides, shape = operation.get_attr("ksize"), operation.get_attr("strides"), y.shape.as_list()
    padding = pads(operation.get_attr("padding"), shape, size, strides)
    return [Reached(transposed_windows(follower.reach, operands[-1].ids, shape, size, strides, padding))]


def normalised_back(follower: Follower, operation: Operation, operands: list[Value]) -> Sequence[Value]:
    """The gradient of a batch normalisation: each channel by itself, and each element where statistics are given."""
    seed, *others = operands
    if reached(others):
        return follower.everything(operation, operands)
    form = operation.get_attr("data_format").decode()
    axes = [axis for axis, name in enumerate(form) if name != "C"]
    whole = follower.reach.over(seed.ids, axes, keepdims=True)
    each = np.broadcast_to(whole, seed.ids.shape) if operation.get_attr("is_training") else seed.ids
    rest = [np.zeros(y.shape.as_list(), dtype=np.int64) for y in operation.outputs[3:]]
    return [Reached(ids) for ids in (each, whole.reshape(-1), whole.reshape(-1), *rest)]


def pads(padding: bytes, image: Sequence[int], spans: Sequence[int], strides: Sequence[int]) -> Pads:
    """How much is added on both sides, for windows that cover so much."""
    if padding != b"SAME":
        return [(0, 0)] * len(image)
    missing = [
        max(0, (-(-n // step) - 1) * step + span - n) for n, span, step in zip(image, spans, strides, strict=True)
    ]
    return [(n // 2, n - n // 2) for n in missing]


def _mask(kernel: Any, shape: Sequence[int]) -> np.ndarray:
    return array_of(kernel) != 0 if known(kernel) else np.ones(shape, dtype=bool)


PRODUCTS: dict[str, Rule] = {
    **dict.fromkeys(("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), multiplied),
    "Einsum": summed,
    **dict.fromkeys(("Conv2D", "Conv3D", "DepthwiseConv2dNative"), convolved),
    **dict.fromkeys(
        ("Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNativeBackpropInput"), convolved_back
    ),
    **dict.fromkeys(
        ("Conv2DBackpropFilter", "Conv3DBackpropFilterV2", "DepthwiseConv2dNativeBackpropFilter"), convolved_for_kernel
    ),
    **dict.fromkeys(("AvgPool", "MaxPool", "AvgPool3D", "MaxPool3D", "MaxPoolGradGrad"), pooled),
    **dict.fromkeys(("AvgPoolGrad", "MaxPoolGrad", "AvgPool3DGrad", "MaxPool3DGrad"), pooled_back),
    "FusedBatchNormGradV3": normalised_back,
}
