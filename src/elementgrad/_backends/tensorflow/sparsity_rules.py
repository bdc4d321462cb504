"""Rules by which index sets go through TensorFlow's ops.

`RULES` at the end is the table from op types to rules; `_sparsity/rules.py` has those that frameworks share. What has
no rule is taken to mix everything.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from elementgrad._backends.tensorflow.graph_ops import Operation, rerun, static_shape
from elementgrad._sparsity import rules
from elementgrad._sparsity.index_sets import EMPTY, Ids
from elementgrad._sparsity.rules import (
    UNKNOWN,
    DependentValue,
    Propagator,
    Rule,
    Value,
    dependent_ids,
    elementwise,
    everything,
    mix,
    multiply,
    spread,
)


def relu_backward(propagator: Propagator, op: Operation, operands: list[Value]) -> Sequence[Value]:
    """`ReluGrad`: elementwise, and nothing where the function is known to be flat."""
    (result,) = elementwise(propagator, op, operands)
    if propagator.is_known(operands[1]) and type(result) is DependentValue:
        result = DependentValue(np.where(propagator.to_array(operands[1]) > 0, result.ids, EMPTY))
    return [result]


def select(propagator: Propagator, op: Operation, operands: list[Value]) -> Sequence[Value]:
    """By a known condition one of two, else either."""
    return (move if propagator.is_known(operands[0]) else elementwise)(propagator, op, operands)


def move(propagator: Propagator, op: Operation, operands: list[Value]) -> Sequence[Value]:
    """The op itself, on ids; inputs of another type than the data, such as indices, must be known."""
    arguments: list[Any] = []
    for value, x, is_index in zip(operands, op.inputs, _index_inputs(op), strict=True):
        shape = static_shape(x)
        if not (propagator.is_known(value) if is_index else isinstance(value, DependentValue) or shape is not None):
            return everything(propagator, op, operands)
        arguments.append(value if is_index else tf.constant(propagator.ids(value, shape), tf.int64))
    try:
        results = rerun(op, arguments)
    except (AttributeError, TypeError, ValueError, tf.errors.OpError):  # not for integers
        return everything(propagator, op, operands)
    return [DependentValue(propagator.to_array(result)) for result in results]


def _index_inputs(op: Operation) -> list[bool]:
    """Return for each input if it is of a type of its own, as indices, shapes and axes are, and not of the data's."""
    kinds: list[str] = []
    for argument in op.op_def.input_arg:
        kinds += [argument.type_attr] * (op.get_attr(argument.number_attr) if argument.number_attr else 1)
    data = "Tparams" if "Tparams" in kinds else "T"
    return [kind != data for kind in kinds]


def gather(propagator: Propagator, op: Operation, operands: list[Value]) -> Sequence[Value]:
    """`GatherV2`: along an axis that is indexed by what is not known, any element may be meant."""
    params, indices, axis = operands
    if isinstance(indices, DependentValue) or not propagator.is_known(axis):
        return everything(propagator, op, operands)
    ids = params.ids
    if not propagator.is_known(indices):
        shape = static_shape(op.inputs[1])
        if shape is None:
            return everything(propagator, op, operands)
        ids = spread(propagator.sets, ids, [int(axis)])
        indices = tf.zeros(shape, op.inputs[1].dtype)
    (result,) = rerun(op, [tf.constant(ids, tf.int64), indices, axis])
    return [DependentValue(propagator.to_array(result))]


def scatter_nd(propagator: Propagator, op: Operation, operands: list[Value]) -> Sequence[Value]:
    """`ScatterNd`: updates are added to zeros."""
    indices, updates, shape = operands
    if not propagator.is_known(indices) or not propagator.is_known(shape) or not isinstance(updates, DependentValue):
        return everything(propagator, op, operands)
    zeros = np.zeros(propagator.to_array(shape).tolist(), dtype=np.int64)
    return [_scatter(propagator, zeros, indices, updates.ids)]


def scatter(propagator: Propagator, op: Operation, operands: list[Value]) -> Sequence[Value]:
    """`TensorScatterAdd` and its like: updates are joined to what is there."""
    tensor, indices, updates = operands
    shapes = propagator.input_shapes(op)
    ends = (tensor, shapes[0]), (updates, shapes[2])
    if not propagator.is_known(indices) or any(
        shape is None and not isinstance(value, DependentValue) for value, shape in ends
    ):
        return everything(propagator, op, operands)
    ids, added = (propagator.ids(value, shape) for value, shape in ends)
    return [_scatter(propagator, ids, indices, added)]


def _scatter(propagator: Propagator, ids: Ids, indices: Any, updates: Ids) -> DependentValue:
    positions = tf.reshape(tf.range(ids.size, dtype=tf.int64), ids.shape)
    owners = propagator.to_array(tf.gather_nd(positions, indices))
    return DependentValue(rules.scatter(propagator.sets, ids, owners, updates))


def segment_sum(propagator: Propagator, op: Operation, operands: list[Value]) -> Sequence[Value]:
    """The first axes of the data go to the segments of these numbers; negative ones go nowhere."""
    data, segments = operands[:2]
    count = operands[2] if len(operands) > 2 else None
    if not propagator.is_known(segments) or (count is not None and not propagator.is_known(count)):
        return everything(propagator, op, operands)
    segments = propagator.to_array(segments).astype(np.int64)
    rest = data.ids.shape[segments.ndim :]
    total = int(count) if count is not None else int(segments.max(initial=-1)) + 1
    size = math.prod(rest)
    owners = (segments.reshape(-1, 1) * size + np.arange(size)).reshape(-1)
    inside = (owners >= 0) & (owners < total * size)
    unions = propagator.sets.union_by_owner(owners[inside], data.ids.reshape(-1)[inside], total * size)
    return [DependentValue(unions.reshape(total, *rest))]


def mirror_pad_backward(propagator: Propagator, op: Operation, operands: list[Value]) -> Sequence[Value]:
    """`MirrorPadGrad`: what was padded goes back to where it came from."""
    operand, paddings = operands
    if not propagator.is_known(paddings):
        return everything(propagator, op, operands)
    pads = propagator.to_array(paddings)
    shape = [n - int(low) - int(high) for n, (low, high) in zip(operand.ids.shape, pads, strict=True)]
    positions = tf.reshape(tf.range(math.prod(shape), dtype=tf.int64), shape)
    padded = tf.raw_ops.MirrorPad(input=positions, paddings=paddings, mode=op.get_attr("mode"))
    owners = propagator.to_array(padded).reshape(-1)
    unions = propagator.sets.union_by_owner(owners, operand.ids.reshape(-1), math.prod(shape))
    return [DependentValue(unions.reshape(shape))]


def resize_backward(propagator: Propagator, op: Operation, operands: list[Value]) -> Sequence[Value]:
    """The gradient of a resized image: each axis is multiplied with a matrix, found by resizing unit vectors."""
    ids, (shape,) = operands[0].ids, propagator.output_shapes(op)
    if shape is None:
        return everything(propagator, op, operands)
    resize = getattr(tf.raw_ops, op.type.removesuffix("Grad"))
    options = {name: op.get_attr(name) for name in ("align_corners", "half_pixel_centers")}
    for axis in (1, 2):
        old, new = ids.shape[axis], shape[axis]
        units = np.eye(new, dtype=np.float32).reshape([new, *[new if other == axis else 1 for other in (1, 2)], 1])
        size = [old if other == axis else 1 for other in (1, 2)]
        resized = propagator.to_array(resize(images=tf.constant(units), size=size, **options)).reshape(new, old)
        ids = rules.along_axis(propagator.sets, ids, axis, resized.T != 0)
    return [DependentValue(ids)]


def normalize_backward(propagator: Propagator, op: Operation, operands: list[Value]) -> Sequence[Value]:
    """`LRNGrad`: a channel mixes with those near it."""
    seed, *others = operands
    if dependent_ids(others) or not isinstance(seed, DependentValue):
        return everything(propagator, op, operands)
    channels = np.arange(seed.ids.shape[-1])
    near = np.abs(channels[:, None] - channels) <= op.get_attr("depth_radius")
    return [DependentValue(rules.along_axis(propagator.sets, seed.ids, seed.ids.ndim - 1, near))]


def reduce(propagator: Propagator, op: Operation, operands: list[Value]) -> Sequence[Value]:
    operand, axes = operands
    if not propagator.is_known(axes):
        return everything(propagator, op, operands)
    axes = propagator.to_array(axes).reshape(-1).tolist()
    return [DependentValue(propagator.sets.reduce(operand.ids, axes, op.get_attr("keep_dims")))]


def cumulative(propagator: Propagator, op: Operation, operands: list[Value]) -> Sequence[Value]:
    operand, axis = operands
    if not propagator.is_known(axis):
        return everything(propagator, op, operands)
    return [DependentValue(propagator.sets.cumulative(operand.ids, int(axis), op.get_attr("reverse")))]


def bias_add(propagator: Propagator, op: Operation, operands: list[Value]) -> Sequence[Value]:
    """One bias for each channel."""
    value, bias = operands
    (shape,) = propagator.output_shapes(op)
    if shape is None:
        return everything(propagator, op, operands)
    tensors = dependent_ids([value])
    if isinstance(bias, DependentValue):
        channel = _bias_axis(op, len(shape))
        tensors.append(bias.ids.reshape([-1 if axis == channel else 1 for axis in range(len(shape))]))
    return [DependentValue(np.broadcast_to(propagator.sets.union(*tensors), shape))]


def bias_add_backward(propagator: Propagator, op: Operation, operands: list[Value]) -> Sequence[Value]:
    """`BiasAddGrad`: the sum over all axes but that of the channels."""
    ids = operands[0].ids
    channel = _bias_axis(op, ids.ndim)
    return [DependentValue(propagator.sets.reduce(ids, [axis for axis in range(ids.ndim) if axis != channel]))]


def _bias_axis(op: Operation, rank: int) -> int:
    return 1 if op.get_attr("data_format") == b"NCHW" else rank - 1


def batch_norm_backward(propagator: Propagator, op: Operation, operands: list[Value]) -> Sequence[Value]:
    """Each channel mixes in itself; with given statistics, the gradient for the data is elementwise."""
    seed, *others = operands
    if dependent_ids(others):
        return everything(propagator, op, operands)
    whole = propagator.sets.reduce(seed.ids, _other_axes(op, "C"), keepdims=True)
    data = np.broadcast_to(whole, seed.ids.shape) if op.get_attr("is_training") else seed.ids
    rest = [np.zeros(y.shape.as_list(), dtype=np.int64) for y in op.outputs[3:]]
    return [DependentValue(ids) for ids in (data, whole.reshape(-1), whole.reshape(-1), *rest)]


def _other_axes(op: Operation, names: str) -> list[int]:
    """Return the axes that have none of these names in the op's data format, such as "NHWC"."""
    return [axis for axis, name in enumerate(op.get_attr("data_format").decode()) if name not in names]


def matmul(propagator: Propagator, op: Operation, operands: list[Value]) -> Sequence[Value]:
    """Matrices in stacks that broadcast."""
    (shape,) = propagator.output_shapes(op)
    if shape is None:
        return everything(propagator, op, operands)
    names = ("transpose_a", "transpose_b") if op.type == "MatMul" else ("adj_x", "adj_y")

    def matrices(x: np.ndarray | None, is_transposed: bool) -> np.ndarray | None:
        if x is None:
            return None
        x = np.swapaxes(x, -1, -2) if is_transposed else x
        return np.broadcast_to(x, (*shape[:-2], *x.shape[-2:]))

    flips = [op.get_attr(name) for name in names]
    ids = [value.ids if isinstance(value, DependentValue) else None for value in operands]
    factors = [matrices(x, flip) for x, flip in zip(ids, flips, strict=True)]
    masks = [matrices(propagator.mask(value), flip) for value, flip in zip(operands, flips, strict=True)]
    return [DependentValue(rules.matmul(propagator.sets, factors, masks, *shape[-2:]))]


def einsum(propagator: Propagator, op: Operation, operands: list[Value]) -> Sequence[Value]:
    """The union over what is summed, wherever the other operands lead it."""
    equation = op.get_attr("equation").decode()
    (shape,) = propagator.output_shapes(op)
    terms, _, result = equation.partition("->")
    terms = terms.split(",")
    is_plain = "." not in equation and all(len(set(term)) == len(term) for term in (*terms, result))
    if not is_plain or shape is None:
        return everything(propagator, op, operands)
    parts = []
    for term, value in zip(terms, operands, strict=True):
        if isinstance(value, DependentValue):
            ids = propagator.sets.reduce(value.ids, [axis for axis, label in enumerate(term) if label not in result])
            remaining = [label for label in term if label in result]
            ids = ids.transpose([remaining.index(label) for label in result if label in remaining])
            expanded = [n if label in remaining else 1 for label, n in zip(result, shape, strict=True)]
            parts.append(np.broadcast_to(ids.reshape(expanded), shape))
    return [DependentValue(propagator.sets.union(*parts))]


class _Convolution:
    """Attributes of a convolution, with the channels after the batch and space last."""

    def __init__(self, op: Operation, image: Sequence[int], kernel: Sequence[int]):
        form = op.get_attr("data_format").decode()
        self.space = _other_axes(op, "NC")
        self.order = [form.index("N"), form.index("C"), *self.space]
        self.is_depthwise = op.type.startswith("Depthwise")
        self.strides = [op.get_attr("strides")[axis] for axis in self.space]
        self.dilations = [op.get_attr("dilations")[axis] for axis in self.space]
        self.size = [image[axis] for axis in self.space]
        self.pads = self._pads(op, kernel[: len(self.space)])
        channels = image[self.order[1]]
        self.groups = channels if self.is_depthwise else channels // kernel[-2]

    def _pads(self, op: Operation, kernel: Sequence[int]) -> list[tuple[int, int]]:
        padding = op.get_attr("padding")
        if padding == b"EXPLICIT":
            explicit = op.get_attr("explicit_paddings")
            return [(explicit[2 * axis], explicit[2 * axis + 1]) for axis in self.space]
        spans = [(n - 1) * step + 1 for n, step in zip(kernel, self.dilations, strict=True)]
        return _same_pads(padding, self.size, spans, self.strides)

    def kernel(self, x: np.ndarray) -> np.ndarray:
        """Return a kernel as (channels out, channels in of a group, *space)."""
        if self.is_depthwise:
            x = x.reshape(*x.shape[:-2], 1, -1)
        return x.transpose(x.ndim - 1, x.ndim - 2, *range(x.ndim - 2))

    def restore_order(self, ids: Ids) -> Ids:
        """Return ids in the op's own order of axes."""
        return ids.transpose(np.argsort(self.order))


def convolve(propagator: Propagator, op: Operation, operands: list[Value]) -> Sequence[Value]:
    """The image with a kernel, and the kernel with an image."""
    image, kernel = operands
    image_shape, kernel_shape = propagator.input_shapes(op)
    if image_shape is None or kernel_shape is None:
        return everything(propagator, op, operands)
    about = _Convolution(op, image_shape, kernel_shape)
    shape = op.outputs[0].shape.as_list()
    parts = []
    if isinstance(image, DependentValue):
        mask = about.kernel(_kernel_mask(propagator, kernel, kernel_shape))
        steps = about.strides, about.pads, about.dilations, None, about.groups
        ids = image.ids.transpose(about.order)
        parts.append(about.restore_order(rules.convolve(propagator.sets, ids, mask, *steps)))
    if isinstance(kernel, DependentValue):
        ids = about.kernel(kernel.ids)
        per_channel = propagator.sets.reduce(ids.reshape(len(ids), -1), [1])
        axes = [-1 if axis == about.order[1] else 1 for axis in range(len(shape))]
        parts.append(np.broadcast_to(per_channel.reshape(axes), shape))
    return [DependentValue(propagator.sets.union(*parts))]


def convolve_backward(propagator: Propagator, op: Operation, operands: list[Value]) -> Sequence[Value]:
    """The gradient of a convolution for its image."""
    _, kernel, seed = operands
    (shape,), kernel_shape = propagator.output_shapes(op), static_shape(op.inputs[1])
    if isinstance(kernel, DependentValue) or shape is None or kernel_shape is None:
        return everything(propagator, op, operands)
    about = _Convolution(op, shape, kernel_shape)
    mask = about.kernel(_kernel_mask(propagator, kernel, kernel_shape))
    steps = about.strides, [low for low, _ in about.pads], about.dilations, about.groups
    ids = seed.ids.transpose(about.order)
    result = rules.convolve_transposed(propagator.sets, ids, mask, about.size, *steps)
    return [DependentValue(about.restore_order(result))]


def convolve_backward_kernel(propagator: Propagator, op: Operation, operands: list[Value]) -> Sequence[Value]:
    """The gradient of a convolution for its kernel: everything of an output channel mixes."""
    image, _, seed = operands
    (shape,) = propagator.output_shapes(op)
    if isinstance(image, DependentValue) or shape is None:
        return everything(propagator, op, operands)
    per_channel = propagator.sets.reduce(seed.ids, _other_axes(op, "C"))
    last = shape[-2:] if op.type.startswith("Depthwise") else [1, shape[-1]]
    return [DependentValue(np.broadcast_to(per_channel.reshape(*[1] * (len(shape) - 2), *last), shape))]


def _kernel_mask(propagator: Propagator, kernel: Value, shape: Sequence[int]) -> np.ndarray:
    mask = propagator.mask(kernel)
    return np.ones(shape, dtype=bool) if mask is None else mask


def pool(propagator: Propagator, op: Operation, operands: list[Value]) -> Sequence[Value]:
    if len(dependent_ids(operands)) > 1:
        return everything(propagator, op, operands)
    (ids,) = dependent_ids(operands[-1:]) or dependent_ids(operands[:1])
    size, strides = op.get_attr("ksize"), op.get_attr("strides")
    pads = _same_pads(op.get_attr("padding"), ids.shape, size, strides)
    return [DependentValue(propagator.sets.windows(ids, size, strides, pads))]


def pool_backward(propagator: Propagator, op: Operation, operands: list[Value]) -> Sequence[Value]:
    """Each window's value goes to some of its elements."""
    (shape,) = propagator.output_shapes(op)
    if dependent_ids(operands[:-1]) or shape is None:
        return everything(propagator, op, operands)
    size, strides = op.get_attr("ksize"), op.get_attr("strides")
    padding = [low for low, _ in _same_pads(op.get_attr("padding"), shape, size, strides)]
    return [DependentValue(rules.windows_transposed(propagator.sets, operands[-1].ids, shape, size, strides, padding))]


def _same_pads(
    padding: bytes, image: Sequence[int], spans: Sequence[int], strides: Sequence[int]
) -> list[tuple[int, int]]:
    """Return how much "SAME" padding adds on both sides, for windows of these spans; "VALID" adds nothing."""
    if padding != b"SAME":
        return [(0, 0)] * len(image)
    missing = [
        max(0, (-(-n // step) - 1) * step + span - n) for n, span, step in zip(image, spans, strides, strict=True)
    ]
    return [(n // 2, n - n // 2) for n in missing]


# Lists of tensors, of which loops are made. The ids of a list are those of any of its elements.


def to_list(propagator: Propagator, op: Operation, operands: list[Value]) -> Sequence[Value]:
    return [DependentValue(propagator.sets.reduce(operands[0].ids, [0]))]


def join_lists(propagator: Propagator, op: Operation, operands: list[Value]) -> Sequence[Value]:
    """The union of lists, and of elements that are put into them."""
    tensors = dependent_ids(operands)
    if len({ids.shape for ids in tensors if ids.ndim}) > 1:
        return everything(propagator, op, operands)
    return [DependentValue(propagator.sets.union(*tensors))]


def take_from_list(propagator: Propagator, op: Operation, operands: list[Value]) -> Sequence[Value]:
    """An element, several of them in a tensor, or an element and the rest of the list."""
    (ids,) = dependent_ids(operands)
    results: list[Value] = []
    for y, shape in zip(op.outputs, propagator.output_shapes(op), strict=True):
        if y.dtype == tf.variant:
            results.append(DependentValue(ids))
        elif shape is None or list(ids.shape) != shape[len(shape) - ids.ndim :]:
            return everything(propagator, op, operands)
        else:
            results.append(DependentValue(np.broadcast_to(ids, shape)))
    return results


def describe_list(propagator: Propagator, op: Operation, operands: list[Value]) -> Sequence[Value]:
    """Its length or shape, or zeros like it."""
    return [UNKNOWN]


LIST_RULES: dict[str, Rule] = {
    "TensorListFromTensor": to_list,
    **dict.fromkeys(("TensorListSetItem", "TensorListPushBack", "Identity", "AddN"), join_lists),
    **dict.fromkeys(("TensorListGetItem", "TensorListPopBack", "TensorListStack"), take_from_list),
    **dict.fromkeys(("TensorListLength", "TensorListElementShape", "ZerosLike"), describe_list),
}
"""The rule of each op type that takes or gives a list."""
ELEMENTWISE = """
Abs Acos Acosh Add AddN AddV2 Angle Asin Asinh Atan Atan2 Atanh BesselI0e BesselI1e Cast Ceil CheckNumerics ClipByValue
Complex ComplexAbs Conj Cos Cosh Digamma Div DivNoNan Elu EluGrad EnsureShape Equal Erf Erfc Erfinv Exp Expm1 Floor
FloorDiv FloorMod Greater GreaterEqual Identity IdentityN Igamma IgammaGradA Igammac Imag Inv InvGrad IsFinite IsInf
IsNan LeakyRelu LeakyReluGrad Less LessEqual Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum Mod Ndtri
Neg NextAfter NotEqual PlaceholderWithDefault Polygamma Pow PreventGradient Real RealDiv Reciprocal ReciprocalGrad Relu
Relu6 Relu6Grad Rint Round Rsqrt RsqrtGrad Selu SeluGrad Sigmoid SigmoidGrad Sign Sin Sinh Snapshot Softplus
SoftplusGrad Softsign SoftsignGrad Sqrt SqrtGrad Square SquaredDifference StopGradient Sub Tan Tanh TanhGrad TruncateDiv
TruncateMod Xdivy Xlog1py Xlogy Zeta
"""
MOVES = """
BatchToSpace BatchToSpaceND BroadcastTo Concat ConcatV2 DepthToSpace Diag DiagPart DynamicStitch ExpandDims
ExtractImagePatches GatherNd MatrixBandPart MatrixDiag MatrixDiagPart MatrixDiagPartV2 MatrixDiagPartV3 MatrixDiagV2
MatrixDiagV3 MatrixSetDiag MatrixSetDiagV2 MatrixSetDiagV3 MirrorPad Pack ParallelConcat Pad PadV2 Reshape Reverse
ReverseSequence ReverseV2 Roll Slice SpaceToBatch SpaceToBatchND SpaceToDepth Split SplitV Squeeze StridedSlice
StridedSliceGrad TensorScatterUpdate TensorStridedSliceUpdate Tile Transpose Unpack
"""
"""Ops that only move data: they are run on the ids themselves."""
REDUCTIONS = "Sum Mean Max Min Prod Any All EuclideanNorm"
CUMULATIVE = "Cumsum Cumprod CumulativeLogsumexp"
FOURIER = {"FFT": 1, "IFFT": 1, "RFFT": 1, "IRFFT": 1, "FFT2D": 2, "IFFT2D": 2, "RFFT2D": 2, "IRFFT2D": 2}
MATRICES = "Cholesky MatrixInverse MatrixSolve MatrixTriangularSolve"
SCATTERS = "TensorScatterAdd TensorScatterSub TensorScatterMax TensorScatterMin"
SEGMENT_SUMS = "UnsortedSegmentSum SegmentSum SegmentMean SegmentSumV2"
CONVOLUTIONS = "Conv2D Conv3D DepthwiseConv2dNative"
CONVOLUTION_GRADIENTS = "Conv2DBackpropInput Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput"
KERNEL_GRADIENTS = "Conv2DBackpropFilter Conv3DBackpropFilterV2 DepthwiseConv2dNativeBackpropFilter"
RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE.split(), elementwise),
    **dict.fromkeys(["Mul", "MulNoNan"], multiply),
    "ReluGrad": relu_backward,
    **dict.fromkeys(["Select", "SelectV2"], select),
    **dict.fromkeys(MOVES.split(), move),
    "GatherV2": gather,
    "ScatterNd": scatter_nd,
    **dict.fromkeys(SCATTERS.split(), scatter),
    **dict.fromkeys(SEGMENT_SUMS.split(), segment_sum),
    "MirrorPadGrad": mirror_pad_backward,
    **dict.fromkeys(["ResizeBilinearGrad", "ResizeNearestNeighborGrad", "ResizeBicubicGrad"], resize_backward),
    "LRNGrad": normalize_backward,
    "Cross": partial(mix, axes=[-1]),
    **dict.fromkeys(REDUCTIONS.split(), reduce),
    **dict.fromkeys(CUMULATIVE.split(), cumulative),
    **{name: partial(mix, axes=range(-axes, 0)) for name, axes in FOURIER.items()},
    **dict.fromkeys(MATRICES.split(), partial(mix, axes=range(-2, 0))),
    "BiasAdd": bias_add,
    "BiasAddGrad": bias_add_backward,
    "FusedBatchNormGradV3": batch_norm_backward,
    **dict.fromkeys(["MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"], matmul),
    "Einsum": einsum,
    **dict.fromkeys(CONVOLUTIONS.split(), convolve),
    **dict.fromkeys(CONVOLUTION_GRADIENTS.split(), convolve_backward),
    **dict.fromkeys(KERNEL_GRADIENTS.split(), convolve_backward_kernel),
    **dict.fromkeys(["AvgPool", "MaxPool", "AvgPool3D", "MaxPool3D", "MaxPoolGradGrad"], pool),
    **dict.fromkeys(["AvgPoolGrad", "MaxPoolGrad", "AvgPool3DGrad", "MaxPool3DGrad"], pool_backward),
}
"""The rule of each op type."""
