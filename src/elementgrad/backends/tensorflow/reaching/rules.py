"""How sets of reach go through the operations of TensorFlow. What is not named here is taken to mix everything."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from elementgrad.backends.tensorflow.reaching.following import Follower, Operation, Rule, array_of, known, rerun
from elementgrad.backends.tensorflow.reaching.indexing import INDEXING
from elementgrad.backends.tensorflow.reaching.products import PRODUCTS
from elementgrad.sparsity.value import Reached, Value, reached

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
FACTORS = "Mul MulNoNan"
REDUCING = "Sum Mean Max Min Prod Any All EuclideanNorm"
CUMULATIVE = "Cumsum Cumprod CumulativeLogsumexp"
MOVING = """
BatchToSpace BatchToSpaceND BroadcastTo Concat ConcatV2 DepthToSpace Diag DiagPart DynamicStitch ExpandDims
ExtractImagePatches GatherNd MatrixBandPart MatrixDiag MatrixDiagPart MatrixDiagPartV2 MatrixDiagPartV3 MatrixDiagV2
MatrixDiagV3 MatrixSetDiag MatrixSetDiagV2 MatrixSetDiagV3 MirrorPad Pack ParallelConcat Pad PadV2 Reshape Reverse
ReverseSequence ReverseV2 Roll Slice SpaceToBatch SpaceToBatchND SpaceToDepth Split SplitV Squeeze StridedSlice
StridedSliceGrad TensorScatterUpdate TensorStridedSliceUpdate Tile Transpose Unpack
"""
"""Operations that only move data: they are run on the numbers of sets themselves."""
FOURIER = {"FFT": 1, "IFFT": 1, "RFFT": 1, "IRFFT": 1, "FFT2D": 2, "IFFT2D": 2, "RFFT2D": 2, "IRFFT2D": 2}
MATRICES = "Cholesky MatrixInverse MatrixSolve MatrixTriangularSolve"


def shaped(ids: np.ndarray, y: Any) -> Value:
    """Sets in the shape of a result."""
    return Reached(np.broadcast_to(ids, y.shape.as_list() if y.shape.is_fully_defined() else ids.shape))


def elementwise(follower: Follower, operation: Operation, operands: list[Value]) -> Sequence[Value]:
    """Each element of the result depends on those of the operands in its place; several results go one to one."""
    if len(operation.outputs) > 1:
        return operands
    (y,) = operation.outputs
    if not y.shape.is_fully_defined() and any(not isinstance(value, Reached) for value in operands):
        return follower.everything(operation, operands)
    return [shaped(follower.reach.union(*reached(operands)), y)]


def multiplied(follower: Follower, operation: Operation, operands: list[Value]) -> Sequence[Value]:
    """Elementwise, and nothing where a factor is known to be zero."""
    (result,) = elementwise(follower, operation, operands)
    for value in operands:
        if known(value) and type(result) is Reached:
            result = Reached(np.where(array_of(value) != 0, result.ids, 0))
    return [result]


def rectified(follower: Follower, operation: Operation, operands: list[Value]) -> Sequence[Value]:
    """`ReluGrad`: elementwise, and nothing where the function is known to be flat."""
    (result,) = elementwise(follower, operation, operands)
    if known(operands[1]) and type(result) is Reached:
        result = Reached(np.where(array_of(operands[1]) > 0, result.ids, 0))
    return [result]


def moved(follower: Follower, operation: Operation, operands: list[Value]) -> Sequence[Value]:
    """The operation itself, on numbers of sets; what is of another type than the data says where they go."""
    given: list[Any] = []
    for value, x, index in zip(operands, operation.inputs, _indices(operation), strict=True):
        sure = known(value) if index else (isinstance(value, Reached) or x.shape.is_fully_defined())
        if not sure:
            return follower.everything(operation, operands)
        given.append(value if index else tf.constant(follower.ids(value, x), tf.int64))
    try:
        results = rerun(operation, given)
    except (AttributeError, TypeError, ValueError, tf.errors.OpError):  # not for integers
        return follower.everything(operation, operands)
    return [Reached(array_of(result)) for result in results]


def _indices(operation: Operation) -> list[bool]:
    """Which inputs are not of the type of the data, but of their own, as indices, shapes and axes are."""
    kinds: list[str] = []
    for argument in operation.op_def.input_arg:
        kinds += [argument.type_attr] * (operation.get_attr(argument.number_attr) if argument.number_attr else 1)
    data = "Tparams" if "Tparams" in kinds else "T"
    return [kind != data for kind in kinds]


def chosen(follower: Follower, operation: Operation, operands: list[Value]) -> Sequence[Value]:
    """By a known condition one of two, else either."""
    if not known(operands[0]):
        return elementwise(follower, operation, operands)
    return moved(follower, operation, operands)


def reduced(follower: Follower, operation: Operation, operands: list[Value]) -> Sequence[Value]:
    """The union over some axes."""
    operand, axes = operands
    if not known(axes):
        return follower.everything(operation, operands)
    axes = array_of(axes).reshape(-1).tolist()
    return [Reached(follower.reach.over(operand.ids, axes, operation.get_attr("keep_dims")))]


def accumulated(follower: Follower, operation: Operation, operands: list[Value]) -> Sequence[Value]:
    """The union of all up to each, along an axis."""
    operand, axis = operands
    if not known(axis):
        return follower.everything(operation, operands)
    return [Reached(follower.reach.along(operand.ids, int(axis), operation.get_attr("reverse")))]


def mixed(axes: int, follower: Follower, operation: Operation, operands: list[Value]) -> Sequence[Value]:
    """Everything in the last axes mixes, and nothing across the others."""
    (y,) = operation.outputs
    sets = reached(operands)
    if not y.shape.is_fully_defined() or any(ids.ndim != y.shape.rank for ids in sets):
        return follower.everything(operation, operands)
    wholes = [follower.reach.over(ids, range(-axes, 0), keepdims=True) for ids in sets]
    return [shaped(follower.reach.union(*wholes), y)]


def by_channel(follower: Follower, operation: Operation, operands: list[Value]) -> Sequence[Value]:
    """`BiasAddGrad`: the sum over all but the channels."""
    (operand,) = operands
    channel = 1 if operation.get_attr("data_format") == b"NCHW" else operand.ids.ndim - 1
    return [Reached(follower.reach.over(operand.ids, [axis for axis in range(operand.ids.ndim) if axis != channel]))]


def biased(follower: Follower, operation: Operation, operands: list[Value]) -> Sequence[Value]:
    """`BiasAdd`: a number for each channel."""
    value, bias = operands
    (y,) = operation.outputs
    if not y.shape.is_fully_defined():
        return follower.everything(operation, operands)
    sets = reached([value])
    if isinstance(bias, Reached):
        channel = 1 if operation.get_attr("data_format") == b"NCHW" else y.shape.rank - 1
        sets.append(bias.ids.reshape([-1 if axis == channel else 1 for axis in range(y.shape.rank)]))
    return [shaped(follower.reach.union(*sets), y)]


RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE.split(), elementwise),
    **dict.fromkeys(FACTORS.split(), multiplied),
    **dict.fromkeys(MOVING.split(), moved),
    **dict.fromkeys(("Select", "SelectV2"), chosen),
    **dict.fromkeys(REDUCING.split(), reduced),
    **dict.fromkeys(CUMULATIVE.split(), accumulated),
    **{name: partial(mixed, axes) for name, axes in FOURIER.items()},
    **dict.fromkeys(MATRICES.split(), partial(mixed, 2)),
    **INDEXING,
    **PRODUCTS,
    "ReluGrad": rectified,
    "BiasAdd": biased,
    "BiasAddGrad": by_channel,
}
