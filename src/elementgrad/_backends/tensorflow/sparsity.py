"""A graph of TensorFlow followed operation by operation, with the sets of seed elements that values may depend on.

Sets of reach through the operations of TensorFlow that add at indices, or take by indices that are not known.

Sets of reach through the products of TensorFlow: of matrices, of convolutions, and through pools.

How sets of reach go through the operations of TensorFlow. What is not named here is taken to mix everything.

The pattern of a Jacobian from the graph of one reverse sweep.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from inspect import signature
from typing import Any

import numpy as np
import tensorflow as tf

from elementgrad._backends.tensorflow._compat import op_def_registry
from elementgrad._sparsity.index_sets import Ids, IndexSets, convolution, product, transposed_windows
from elementgrad._sparsity.pattern import Pattern
from elementgrad._sparsity.propagate import UNKNOWN, DependentValue, Value, joined, reached, settled

Operation = Any
Rule = Callable[["GraphPropagator", Operation, list[Value]], Sequence[Value]]
CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
BRANCHES = {"If", "StatelessIf"}
LOOPS = {"While", "StatelessWhile"}
OF_SHAPE = {"Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike"}
"""Operations whose results are those of any values of the same shape."""


@dataclass(frozen=True, eq=False)
class UnknownShape(DependentValue):
    """A value of a shape that is not known before it runs; its one set is that of all of its elements."""


def known(value: Value) -> bool:
    """Whether a value is the same at every point, and there to be looked at."""
    return value is not UNKNOWN and not isinstance(value, DependentValue)


def array_of(value: Any) -> np.ndarray:
    """Return a known value as an array. `np.asarray` fails where a single number is of a dtype that NumPy lacks."""
    return np.asarray(value.numpy())


class GraphPropagator:
    """Follows graphs, with one table of sets for all of their values."""

    def __init__(self, reach: IndexSets, rules: Mapping[str, Rule]):
        self.reach = reach
        self.rules = rules

    def run(
        self, graph: Any, operands: Sequence[Value], results: Sequence[Any], hidden: Sequence[Any] = ()
    ) -> list[Value]:
        """What a graph gives for some of its tensors, with these for its inputs; what is not needed is left out.

        What is hidden counts as unknown, even if it could be computed.
        """
        values: dict[Any, Value] = {x.ref(): value for x, value in zip(graph.inputs, operands, strict=True)}
        values.update({x.ref(): UNKNOWN for x in hidden})
        for operation in _needed(results):
            if operation.outputs and operation.outputs[0].ref() not in values:
                given = [values[x.ref()] for x in operation.inputs]
                values.update(zip([y.ref() for y in operation.outputs], self.step(operation, given), strict=True))
        return [values[y.ref()] for y in results]

    def step(self, operation: Operation, operands: list[Value]) -> Sequence[Value]:
        """The results of one operation."""
        kind = operation.type
        if kind in OF_SHAPE:
            operands = [_of_shape(value, x) for value, x in zip(operands, operation.inputs, strict=True)]
        inside = {**dict.fromkeys(BRANCHES, self._branch), **dict.fromkeys(LOOPS, self._loop)}.get(kind)
        if kind in CALLS or (inside and reached(operands)):
            try:
                return inside(operation, operands) if inside else self._call(operation, "f", operands)
            except _OpaqueError:
                pass
        elif all(map(known, operands)):
            return _evaluated(operation, operands)
        if not reached(operands):
            return [UNKNOWN] * len(operation.outputs)
        if any(isinstance(value, UnknownShape) for value in operands):
            return self.everything(operation, operands)
        return self.rules.get(kind, GraphPropagator.everything)(self, operation, operands)

    def everything(self, operation: Operation, operands: list[Value]) -> list[Value]:
        """The rule for what is not known: each result depends on all that any operand does."""
        all_of = self.reach.all_of(*reached(operands))
        return [
            DependentValue(np.full(y.shape.as_list(), all_of))
            if y.shape.is_fully_defined()
            else UnknownShape(np.array(all_of))
            for y in operation.outputs
        ]

    def ids(self, value: Value, x: Any) -> Ids:
        """The sets of a value; of one that does not depend on the seed they are empty."""
        return value.ids if isinstance(value, DependentValue) else np.zeros(x.shape.as_list(), dtype=np.int64)

    def _call(self, operation: Operation, attribute: str, operands: Sequence[Value], count: int = -1) -> list[Value]:
        """What a function of an operation's gives: as many values as the operation does, unless told."""
        graph = operation.graph._get_function(operation.get_attr(attribute).name).graph
        count = len(operation.outputs) if count < 0 else count
        if len(graph.inputs) != len(operands) or len(graph.outputs) != count:
            raise _OpaqueError  # the graph was added to for a gradient, after the function was made of it
        return self.run(graph, operands, graph.outputs)

    def _branch(self, operation: Operation, operands: list[Value]) -> Sequence[Value]:
        which, *rest = operands
        if isinstance(which, DependentValue):
            raise _OpaqueError
        names = ["then_branch", "else_branch"]
        if known(which):
            return self._call(operation, names[not array_of(which).any()], rest)
        results = [_shaped(self._call(operation, name, rest)) for name in names]
        return [joined(self.reach, *values) for values in zip(*results, strict=True)]

    def _loop(self, operation: Operation, operands: list[Value]) -> Sequence[Value]:
        start = _shaped(operands)
        state = settled(self.reach, start, lambda state: _shaped(self._call(operation, "body", state)))
        (more,) = self._call(operation, "cond", state, 1)
        if isinstance(more, DependentValue):
            raise _OpaqueError
        return state


class _OpaqueError(Exception):
    """Nobody can look into an operation, or what it carries has no shape that is known before it runs."""


def _shaped(values: Sequence[Value]) -> Sequence[Value]:
    if any(isinstance(value, UnknownShape) for value in values):
        raise _OpaqueError
    return values


def rerun(operation: Operation, operands: Sequence[Any]) -> list[Any]:
    """The same operation, now, on other tensors; its types are those of the tensors."""
    function, inputs, attributes = _raw(operation.type)
    left = iter(operands)
    given: dict[str, Any] = {}
    for name, argument in zip(inputs, operation.op_def.input_arg, strict=True):
        several = operation.get_attr(argument.number_attr) if argument.number_attr else None
        if argument.type_list_attr:
            several = len(operation.get_attr(argument.type_list_attr))
        given[name] = next(left) if several is None else [next(left) for _ in range(several)]
    results = function(**given, **{name: operation.get_attr(own) for name, own in attributes.items()})
    return list(results) if isinstance(results, (list, tuple)) else [results]


@lru_cache
def _raw(kind: str) -> tuple[Callable[..., Any], list[str], dict[str, str]]:
    """The function of an operation, what it calls the inputs, and for each attribute that it takes the name of it.

    In some functions an argument goes by another name than in the operation, but in the same order.
    """
    function = getattr(tf.raw_ops, kind)
    definition = op_def_registry.get(kind)
    taken = [name for name in signature(function).parameters if name != "name"]
    inputs = [argument.name for argument in definition.input_arg]
    implied = {a for x in definition.input_arg for a in (x.type_attr, x.number_attr, x.type_list_attr)}
    attributes = [attribute.name for attribute in definition.attr if attribute.name not in implied]
    own = [*inputs, *attributes]
    renamed = dict(zip([n for n in own if n not in taken], [n for n in taken if n not in own], strict=True))
    names = {name: renamed.get(name, name) for name in own}
    return function, [names[name] for name in inputs], {names[name]: name for name in attributes}


def _evaluated(operation: Operation, operands: Sequence[Any]) -> list[Value]:
    """The results of an operation of known values; unknown if it may give others another time, or cannot run alone."""
    if operation.type == "Const":
        return [tf.constant(tf.make_ndarray(operation.get_attr("value")))]
    if operation.op_def.is_stateful or any(y.dtype in (tf.variant, tf.resource) for y in operation.outputs):
        return [UNKNOWN] * len(operation.outputs)
    try:
        return rerun(operation, operands)
    except (AttributeError, TypeError, ValueError, tf.errors.OpError):
        return [UNKNOWN] * len(operation.outputs)


def _of_shape(value: Value, x: Any) -> Value:
    if known(value) or x.dtype == tf.variant:
        return value
    if isinstance(value, DependentValue) and not isinstance(value, UnknownShape):
        return tf.zeros(value.ids.shape, x.dtype)
    return tf.zeros(x.shape, x.dtype) if x.shape.is_fully_defined() else UNKNOWN


def _needed(results: Sequence[Any]) -> Iterator[Operation]:
    """The operations from which these tensors are computed, each after those that it needs."""
    done: set[Any] = set()
    left = [y.op for y in reversed(results)]
    while left:
        before = [x.op for x in left[-1].inputs if x.op not in done]
        if left[-1] in done or not before:
            operation = left.pop()
            if operation not in done:
                done.add(operation)
                yield operation
        else:
            left += before


def gathered(follower: GraphPropagator, operation: Operation, operands: list[Value]) -> Sequence[Value]:
    """`GatherV2`: along an axis that is indexed by what is not known, any element may be meant."""
    params, indices, axis = operands
    if isinstance(indices, DependentValue) or not known(axis):
        return follower.everything(operation, operands)
    ids = params.ids
    if not known(indices):
        shape = operation.inputs[1].shape
        if not shape.is_fully_defined():
            return follower.everything(operation, operands)
        ids = np.broadcast_to(follower.reach.over(ids, [int(axis)], keepdims=True), ids.shape)
        indices = tf.zeros(shape, operation.inputs[1].dtype)
    (taken,) = rerun(operation, [tf.constant(ids, tf.int64), indices, axis])
    return [DependentValue(array_of(taken))]


def scattered(follower: GraphPropagator, operation: Operation, operands: list[Value]) -> Sequence[Value]:
    """`ScatterNd`: everything is added where it goes."""
    indices, updates, shape = operands
    if not known(indices) or not known(shape) or not isinstance(updates, DependentValue):
        return follower.everything(operation, operands)
    shape = array_of(shape).tolist()
    return [_added(follower, np.zeros(shape, dtype=np.int64), indices, updates.ids)]


def scattered_onto(follower: GraphPropagator, operation: Operation, operands: list[Value]) -> Sequence[Value]:
    """`TensorScatterAdd` and its like: what is there, and what is added to it."""
    indices = operands[1]
    ends = [(operands[number], operation.inputs[number]) for number in (0, 2)]
    if not known(indices) or not all(isinstance(v, DependentValue) or x.shape.is_fully_defined() for v, x in ends):
        return follower.everything(operation, operands)
    there, updates = (follower.ids(value, x) for value, x in ends)
    return [_added(follower, there, indices, updates)]


def segmented(follower: GraphPropagator, operation: Operation, operands: list[Value]) -> Sequence[Value]:
    """Sums over segments: the first axes of the data are numbered by where they go, and negative numbers go nowhere."""
    data, segments = operands[:2]
    count = operands[2] if len(operands) > 2 else None
    if not known(segments) or (count is not None and not known(count)):
        return follower.everything(operation, operands)
    segments = array_of(segments).astype(np.int64)
    rest = data.ids.shape[segments.ndim :]
    total = int(count) if count is not None else int(segments.max(initial=-1)) + 1
    size = int(np.prod(rest))
    owners = (segments.reshape(-1, 1) * size + np.arange(size)).reshape(-1)
    inside = (owners >= 0) & (owners < total * size)
    unions = follower.reach.gathered(owners[inside], data.ids.reshape(-1)[inside], total * size)
    return [DependentValue(unions.reshape(total, *rest))]


def folded(follower: GraphPropagator, operation: Operation, operands: list[Value]) -> Sequence[Value]:
    """`MirrorPadGrad`: what was padded goes back to where it came from."""
    operand, paddings = operands
    if not known(paddings):
        return follower.everything(operation, operands)
    pads = array_of(paddings)
    shape = [n - int(low) - int(high) for n, (low, high) in zip(operand.ids.shape, pads, strict=True)]
    positions = tf.reshape(tf.range(int(np.prod(shape)), dtype=tf.int64), shape)
    mode = operation.get_attr("mode")
    owners = array_of(tf.raw_ops.MirrorPad(input=positions, paddings=paddings, mode=mode)).reshape(-1)
    unions = follower.reach.gathered(owners, operand.ids.reshape(-1), int(np.prod(shape)))
    return [DependentValue(unions.reshape(shape))]


def _added(follower: GraphPropagator, there: Ids, indices: Any, updates: Ids) -> DependentValue:
    positions = tf.reshape(tf.range(there.size, dtype=tf.int64), there.shape)
    owners = array_of(tf.gather_nd(positions, indices)).reshape(-1)
    both = (
        np.concatenate([np.arange(there.size), owners]),
        np.concatenate([there.reshape(-1), updates.reshape(-1)]),
    )
    return DependentValue(follower.reach.gathered(*both, there.size).reshape(there.shape))


INDEXING: dict[str, Rule] = {
    "GatherV2": gathered,
    "ScatterNd": scattered,
    **dict.fromkeys(("TensorScatterAdd", "TensorScatterSub", "TensorScatterMax", "TensorScatterMin"), scattered_onto),
    **dict.fromkeys(("UnsortedSegmentSum", "SegmentSum", "SegmentMean", "SegmentSumV2"), segmented),
    "MirrorPadGrad": folded,
}


Pads = list[tuple[int, int]]


def multiply_sets(follower: GraphPropagator, operation: Operation, operands: list[Value]) -> Sequence[Value]:
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
    if isinstance(left, DependentValue):
        mask = flat(array_of(right) != 0, flips[1]) if known(right) else None
        found.append(product(follower.reach, flat(left.ids, flips[0]), mask, shape[-1]))
    if isinstance(right, DependentValue):
        mask = flat(array_of(left) != 0, not flips[0]) if known(left) else None
        through = product(follower.reach, flat(right.ids, not flips[1]), mask, shape[-2])
        found.append(through.transpose(0, 2, 1))
    return [DependentValue(follower.reach.union(*found).reshape(shape))]


def summed(follower: GraphPropagator, operation: Operation, operands: list[Value]) -> Sequence[Value]:
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
        if isinstance(value, DependentValue):
            ids = follower.reach.over(value.ids, [axis for axis, label in enumerate(term) if label not in after])
            left = [label for label in term if label in after]
            ids = ids.transpose([left.index(label) for label in after if label in left])
            shape = [n if label in left else 1 for label, n in zip(after, y.shape.as_list(), strict=True)]
            found.append(np.broadcast_to(ids.reshape(shape), y.shape.as_list()))
    return [DependentValue(follower.reach.union(*found))]


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


def convolved(follower: GraphPropagator, operation: Operation, operands: list[Value]) -> Sequence[Value]:
    """A convolution, of the image with a kernel and of the kernel with an image."""
    image, kernel = operands
    if not all(x.shape.is_fully_defined() for x in operation.inputs):
        return follower.everything(operation, operands)
    shapes = [x.shape.as_list() for x in operation.inputs]
    about = _Convolution(operation, *shapes)
    shape = operation.outputs[0].shape.as_list()
    found = []
    if isinstance(image, DependentValue):
        mask = about.kernel(_mask(kernel, shapes[1]))
        steps = about.strides, about.pads, about.dilations, None, about.groups
        found.append(about.back(convolution(follower.reach, image.ids.transpose(about.order), mask, *steps)))
    if isinstance(kernel, DependentValue):
        ids = about.kernel(kernel.ids)
        each = follower.reach.over(ids.reshape(len(ids), -1), [1])
        axes = [-1 if axis == about.order[1] else 1 for axis in range(len(shape))]
        found.append(np.broadcast_to(each.reshape(axes), shape))
    return [DependentValue(follower.reach.union(*found))]


def convolved_back(follower: GraphPropagator, operation: Operation, operands: list[Value]) -> Sequence[Value]:
    """The gradient of a convolution for its image: a convolution with the kernel turned round."""
    _, kernel, seed = operands
    (y,) = operation.outputs
    if (
        isinstance(kernel, DependentValue)
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
    return [DependentValue(about.back(swept))]


def convolved_for_kernel(follower: GraphPropagator, operation: Operation, operands: list[Value]) -> Sequence[Value]:
    """The gradient of a convolution for its kernel: of each output channel everything mixes."""
    image, _, seed = operands
    (y,) = operation.outputs
    if isinstance(image, DependentValue) or not y.shape.is_fully_defined():
        return follower.everything(operation, operands)
    shape = y.shape.as_list()
    form = operation.get_attr("data_format").decode()
    each = follower.reach.over(seed.ids, [axis for axis, name in enumerate(form) if name != "C"])
    last = shape[-2:] if operation.type.startswith("Depthwise") else [1, shape[-1]]
    return [DependentValue(np.broadcast_to(each.reshape(*[1] * (len(shape) - 2), *last), shape))]


def pooled(follower: GraphPropagator, operation: Operation, operands: list[Value]) -> Sequence[Value]:
    """Windows, in the forward direction."""
    (ids,) = reached(operands[-1:]) or reached(operands[:1])
    if len(reached(operands)) > 1:
        return follower.everything(operation, operands)
    size, strides = operation.get_attr("ksize"), operation.get_attr("strides")
    padding = pads(operation.get_attr("padding"), ids.shape, size, strides)
    return [DependentValue(follower.reach.windows(ids, size, strides, padding))]


def pooled_back(follower: GraphPropagator, operation: Operation, operands: list[Value]) -> Sequence[Value]:
    """The gradient of a pool: each window's number goes to some of its elements."""
    (y,) = operation.outputs
    if any(isinstance(value, DependentValue) for value in operands[:-1]) or not y.shape.is_fully_defined():
        return follower.everything(operation, operands)
    size, strides, shape = operation.get_attr("ksize"), operation.get_attr("strides"), y.shape.as_list()
    padding = pads(operation.get_attr("padding"), shape, size, strides)
    return [DependentValue(transposed_windows(follower.reach, operands[-1].ids, shape, size, strides, padding))]


def normalised_back(follower: GraphPropagator, operation: Operation, operands: list[Value]) -> Sequence[Value]:
    """The gradient of a batch normalisation: each channel by itself, and each element where statistics are given."""
    seed, *others = operands
    if reached(others):
        return follower.everything(operation, operands)
    form = operation.get_attr("data_format").decode()
    axes = [axis for axis, name in enumerate(form) if name != "C"]
    whole = follower.reach.over(seed.ids, axes, keepdims=True)
    each = np.broadcast_to(whole, seed.ids.shape) if operation.get_attr("is_training") else seed.ids
    rest = [np.zeros(y.shape.as_list(), dtype=np.int64) for y in operation.outputs[3:]]
    return [DependentValue(ids) for ids in (each, whole.reshape(-1), whole.reshape(-1), *rest)]


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
    **dict.fromkeys(("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), multiply_sets),
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
    return DependentValue(np.broadcast_to(ids, y.shape.as_list() if y.shape.is_fully_defined() else ids.shape))


def elementwise(follower: GraphPropagator, operation: Operation, operands: list[Value]) -> Sequence[Value]:
    """Each element of the result depends on those of the operands in its place; several results go one to one."""
    if len(operation.outputs) > 1:
        return operands
    (y,) = operation.outputs
    if not y.shape.is_fully_defined() and any(not isinstance(value, DependentValue) for value in operands):
        return follower.everything(operation, operands)
    return [shaped(follower.reach.union(*reached(operands)), y)]


def multiplied(follower: GraphPropagator, operation: Operation, operands: list[Value]) -> Sequence[Value]:
    """Elementwise, and nothing where a factor is known to be zero."""
    (result,) = elementwise(follower, operation, operands)
    for value in operands:
        if known(value) and type(result) is DependentValue:
            result = DependentValue(np.where(array_of(value) != 0, result.ids, 0))
    return [result]


def rectified(follower: GraphPropagator, operation: Operation, operands: list[Value]) -> Sequence[Value]:
    """`ReluGrad`: elementwise, and nothing where the function is known to be flat."""
    (result,) = elementwise(follower, operation, operands)
    if known(operands[1]) and type(result) is DependentValue:
        result = DependentValue(np.where(array_of(operands[1]) > 0, result.ids, 0))
    return [result]


def moved(follower: GraphPropagator, operation: Operation, operands: list[Value]) -> Sequence[Value]:
    """The operation itself, on numbers of sets; what is of another type than the data says where they go."""
    given: list[Any] = []
    for value, x, index in zip(operands, operation.inputs, _indices(operation), strict=True):
        sure = known(value) if index else (isinstance(value, DependentValue) or x.shape.is_fully_defined())
        if not sure:
            return follower.everything(operation, operands)
        given.append(value if index else tf.constant(follower.ids(value, x), tf.int64))
    try:
        results = rerun(operation, given)
    except (AttributeError, TypeError, ValueError, tf.errors.OpError):  # not for integers
        return follower.everything(operation, operands)
    return [DependentValue(array_of(result)) for result in results]


def _indices(operation: Operation) -> list[bool]:
    """Which inputs are not of the type of the data, but of their own, as indices, shapes and axes are."""
    kinds: list[str] = []
    for argument in operation.op_def.input_arg:
        kinds += [argument.type_attr] * (operation.get_attr(argument.number_attr) if argument.number_attr else 1)
    data = "Tparams" if "Tparams" in kinds else "T"
    return [kind != data for kind in kinds]


def chosen(follower: GraphPropagator, operation: Operation, operands: list[Value]) -> Sequence[Value]:
    """By a known condition one of two, else either."""
    if not known(operands[0]):
        return elementwise(follower, operation, operands)
    return moved(follower, operation, operands)


def reduced(follower: GraphPropagator, operation: Operation, operands: list[Value]) -> Sequence[Value]:
    """The union over some axes."""
    operand, axes = operands
    if not known(axes):
        return follower.everything(operation, operands)
    axes = array_of(axes).reshape(-1).tolist()
    return [DependentValue(follower.reach.over(operand.ids, axes, operation.get_attr("keep_dims")))]


def accumulated(follower: GraphPropagator, operation: Operation, operands: list[Value]) -> Sequence[Value]:
    """The union of all up to each, along an axis."""
    operand, axis = operands
    if not known(axis):
        return follower.everything(operation, operands)
    return [DependentValue(follower.reach.along(operand.ids, int(axis), operation.get_attr("reverse")))]


def mixed(axes: int, follower: GraphPropagator, operation: Operation, operands: list[Value]) -> Sequence[Value]:
    """Everything in the last axes mixes, and nothing across the others."""
    (y,) = operation.outputs
    sets = reached(operands)
    if not y.shape.is_fully_defined() or any(ids.ndim != y.shape.rank for ids in sets):
        return follower.everything(operation, operands)
    wholes = [follower.reach.over(ids, range(-axes, 0), keepdims=True) for ids in sets]
    return [shaped(follower.reach.union(*wholes), y)]


def by_channel(follower: GraphPropagator, operation: Operation, operands: list[Value]) -> Sequence[Value]:
    """`BiasAddGrad`: the sum over all but the channels."""
    (operand,) = operands
    channel = 1 if operation.get_attr("data_format") == b"NCHW" else operand.ids.ndim - 1
    return [
        DependentValue(follower.reach.over(operand.ids, [axis for axis in range(operand.ids.ndim) if axis != channel]))
    ]


def biased(follower: GraphPropagator, operation: Operation, operands: list[Value]) -> Sequence[Value]:
    """`BiasAdd`: a number for each channel."""
    value, bias = operands
    (y,) = operation.outputs
    if not y.shape.is_fully_defined():
        return follower.everything(operation, operands)
    sets = reached([value])
    if isinstance(bias, DependentValue):
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


Tensor = Any
Swept = tuple[Tensor | None, Tensor | None]


def found(sweep: Callable[..., Swept], x: Tensor | None, y: Tensor, like: Tensor) -> Pattern | None:
    """The pattern of a function, from a reverse sweep: `sweep(seed)` here, or `sweep(x, seed)` at any x.

    It gives the tensor that is differentiated, which counts as unknown, and its derivative, as `like` is; None if there
    is none. The seed is as the output y is.
    """
    given = [tf.TensorSpec(end.shape, end.dtype) for end in (x, y) if end is not None]
    swept: list[Any] = []

    def program(*ends: Tensor) -> Tensor:
        swept[:] = sweep(*ends)
        return tf.zeros([]) if swept[1] is None else swept[1]

    graph = tf.function(program, autograph=False).get_concrete_function(*given).graph
    source, derivative = swept
    if derivative is None:
        return None
    reach = IndexSets(math.prod(y.shape))
    captured = [_captured(external) for external, _ in graph.captures]
    operands = [*[UNKNOWN] * (len(given) - 1), DependentValue(reach.start(y.shape)), *captured]
    hidden = [source] if getattr(source, "graph", None) is graph else []
    with tf.init_scope(), tf.device("CPU"):
        (result,) = GraphPropagator(reach, RULES).run(graph, operands, graph.outputs[:1], hidden)
    shape = math.prod(like.shape)
    if isinstance(result, UnknownShape):
        result = DependentValue(np.full(shape, result.ids))
    return reach.pattern(result.ids if isinstance(result, DependentValue) else np.zeros(shape, dtype=np.int64)).T


def _captured(external: Any) -> Any:
    """A tensor from outside of the graph. One of a graph has no value, and what a variable holds may change."""
    return UNKNOWN if not hasattr(external, "numpy") or external.dtype in (tf.resource, tf.variant) else external
