"""Rules by which runs of TensorFlow are explained: what users call its operations, and what these do to derivatives.

`TensorflowOp` is one operation of a run, with its tensors. TensorFlow's own gradient rule, or the one that the user
wrote, gives its vjp and, transposed, its jvp. The functions below it say why an operation lets no derivative through.
"""

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import tensorflow as tf

from elementgrad._backends.tensorflow._compat import _gradient_function, context, execute, indexed_slices
from elementgrad._cleanup import enter, scope
from elementgrad._explain.dependence import dependent_outputs, guess_dependent_outputs, is_tied
from elementgrad._explain.trace import cause_of_bound, is_masked_score, uneven_weights

Tensor = Any

_WORDS = {
    "AddN": "add",
    "ArgMax": "argmax",
    "ArgMin": "argmin",
    "All": "reduce_all",
    "Any": "reduce_any",
    "BatchMatMul": "matmul",
    "FusedBatchNorm": "batch_norm",
    "Inv": "reciprocal",
    "LRN": "local_response_normalization",
    "MatMul": "matmul",
    "Max": "reduce_max",
    "MaxPool": "max_pool2d",
    "Mean": "reduce_mean",
    "Min": "reduce_min",
    "Mul": "multiply",
    "MulNoNan": "multiply_no_nan",
    "Neg": "negative",
    "Pack": "stack",
    "Prod": "reduce_prod",
    "RealDiv": "truediv",
    "ResourceGather": "embedding_lookup",
    "ResourceGatherNd": "gather_nd",
    "Rint": "round",
    "Select": "where",
    "StridedSlice": "indexing",
    "TensorScatterAdd": "tensor_scatter_nd_add",
    "TensorScatterUpdate": "tensor_scatter_nd_update",
    "Sub": "subtract",
    "Sum": "reduce_sum",
    "Unpack": "unstack",
    "AssignVariableOp": "assign",
    "AssignAddVariableOp": "assign_add",
    "AssignSubVariableOp": "assign_sub",
    "ReadVariableOp": "read",
    "swish_impl": "silu",
}
"""The user's words for op types whose name is another."""
_COMPOSITES = frozenset(
    """
    boolean_mask clip_by_value divide_no_nan dropout embedding_lookup hard_sigmoid hard_tanh norm numpy_function
    vectorized_map
    """.split()  # noqa: SIM905
)
"""Functions of TensorFlow and Keras that users call, and that run several operations."""
_ALIASES = {
    "_init_from_args": "tf.Variable",
    "eager_py_func": "py_function",
    "general_dropout": "dropout",
    "stateless_dropout": "dropout",
}
"""The user's words for functions of libraries whose name is another."""
EXITS = {
    "__array__": "numpy",
    "__bool__": "bool",
    "__complex__": "complex",
    "__float__": "float",
    "__index__": "int",
    "__int__": "int",
    "__dlpack__": "dlpack",
    "numpy": "numpy",
}
"""Methods that turn a tensor into numbers of Python or NumPy."""
DECISIONS = {"bool"}
"""Of these, the ones that Python branches on."""
CONVERSIONS = {"constant", "convert_to_tensor_v2_with_dispatch", "convert_to_tensor", "convert_to_tensor_v2"}
"""Functions that turn plain numbers into tensors."""
SHAPE_OPS = frozenset(
    """
    BroadcastGradientArgs DestroyResourceOp OnesLike Rank Shape ShapeN Size VarHandleOp VarIsInitializedOp VariableShape
    ZerosLike
    """.split()  # noqa: SIM905
)
"""Operations that do not read the numbers of a tensor."""
OVERWRITE = "AssignVariableOp"
"""The operation that gives a variable a value that does not depend on the one before."""
STEP_OPS = frozenset({"Round", "Rint", "Floor", "Ceil", "FloorDiv", "Sign"})
RANDOM_OPS = frozenset(
    """
    Multinomial RandomPoisson RandomPoissonV2 RandomBinomial StatelessMultinomial StatelessRandomBinomial
    StatelessRandomPoisson StatefulRandomBinomial StatelessParameterizedTruncatedNormal ParameterizedTruncatedNormal
    """.split()  # noqa: SIM905
)
COMPILED_CAUSES = {
    "detached": {"StopGradient"},
    "step-function": STEP_OPS,
    "discrete": {"ArgMax", "ArgMin", "Multinomial", "StatelessMultinomial", "Bucketize"},
    "left-framework": {"PyFunc", "PyFuncStateless"},
}
"""Op types inside a compiled function that can stop its derivative. Comparisons do not count: every loop has one."""
COMPILED = ("__forward_", "__inference_")
"""Prefixes of the names of compiled functions."""
_AFFIXES = re.compile(r"^__(forward|inference|backward)_|_\d+$")
NOT_RERUN = {"", "PartitionedCall", "StatefulPartitionedCall", "While", "StatelessWhile", "EagerPyFunc", "PyFunc"}
"""Op types that are not run on other numbers, because they call other code or may never end."""
CHOICES = frozenset(
    """
    Max Min TopK TopKV2 Maximum Minimum MaxPool MaxPoolV2 MaxPool3D MaxPoolWithArgmax Dilation2D FractionalMaxPool
    NthElement SegmentMax SegmentMin SegmentMaxV2 SegmentMinV2 UnsortedSegmentMax UnsortedSegmentMin
    TensorScatterMax TensorScatterMin
    """.split()  # noqa: SIM905
)
BOUNDS = {"Maximum", "Minimum"}
SOFTMAXES = {"Softmax", "LogSoftmax", "SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"}
PRODUCTS = {"Mul", "RealDiv"}
MATRIX_PRODUCTS = {"MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "Conv2D", "Conv3D"}
SUMS = {*MATRIX_PRODUCTS, "Sum", "Mean", "AddV2", "AddN", "Sub", "BiasAdd", "Cumsum"}
LOOKUPS = {"GatherV2", "ResourceGather"}
SEGMENTS = {"UnsortedSegmentSum", "UnsortedSegmentProd", "UnsortedSegmentMax", "UnsortedSegmentMin"}


@dataclass(eq=False)
class TensorflowOp:
    """One operation that ran eagerly; or a value that enters or leaves TensorFlow, which has no op type."""

    op_type: str
    operation: str
    """The user's word for it."""
    where: str | None
    module: str = ""
    inputs: tuple[int, ...] = ()
    """Ids of the values that it reads: of `operands`, if it has any."""
    outputs: tuple[int, ...] = ()
    operands: Sequence[Tensor] = ()
    results: Sequence[Tensor] = ()
    """Empty for a write to a variable, although there is an id for the new value."""
    params: Sequence[Any] = ()
    recorded: bool = True
    """True if tapes were recording when it ran."""
    backward: Callable[..., Any] | None = None
    """A gradient function that was recorded with it, in place of the one registered for its type."""
    custom_gradient: bool = False
    """True if the user wrote that function."""
    inner: Collection[str] = ()
    """The types of the operations in it, if it is a compiled function."""
    in_gradient: bool = False
    """True if one of the user's tapes ran it to compute a gradient."""
    from_python: bool = False
    """True if the user made a tensor of plain numbers with it."""
    cut_cause: str | None = None

    @property
    def branches(self) -> bool:
        return self.operation in DECISIONS

    def vjp(self, cotangents: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the cotangents of the operands for those of the results."""
        if self.backward is not None:
            pulled = self.backward(*cotangents)
        else:
            operands, results = list(self.operands), list(self.results)
            pulled = _gradient_function(
                self.op_type, self.params, len(operands), operands, results, list(cotangents), (), ""
            )
        if isinstance(pulled, indexed_slices.IndexedSlices) or not isinstance(pulled, (list, tuple)):
            pulled = [pulled]
        dense = [None if g is None else tf.convert_to_tensor(g) for g in pulled]
        return [*dense, *[None] * (len(self.operands) - len(dense))]

    def jvp(self, tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the tangents of the results for those of the operands."""
        # The vjp is linear in the cotangents, so that its own vjp is the jvp.
        cotangents = [zeros_like(y) for y in self.results]
        free = [seed for seed in cotangents if seed is not None and is_differentiable(seed)]
        with scope():
            tape = tf.GradientTape(watch_accessed_variables=False)
            enter(tape)
            tape.watch(free)
            pulled = self.vjp(cotangents)
        pairs = [(g, t) for g, t in zip(pulled, tangents, strict=True) if g is not None and t is not None]
        if not pairs:
            return [None] * len(self.results)
        pushed = iter(tape.gradient([g for g, _ in pairs], free, [t for _, t in pairs]))
        return [next(pushed) if is_differentiable(y) else None for y in self.results]

    @cached_property
    def differentiable_operands(self) -> list[bool]:
        """A flag for each operand: True if it gets a derivative, which the gradient function knows best."""
        if not any(map(is_differentiable, self.results)):
            return [False] * len(self.inputs)
        seeds = [tf.ones_like(y) if is_differentiable(y) else zeros_like(y) for y in self.results]
        return [g is not None for g in self.vjp(seeds)]

    def dependent_outputs(self, masks: Sequence[np.ndarray | None]) -> list[np.ndarray]:
        """Return masks of the elements of the results that can move with those of the operands."""
        if not self.results:  # a write to a variable, whose elements stay in their places
            return [mask for mask in masks if mask is not None][:1]
        shapes = [tuple(y.shape) for y in self.results]
        if not self._can_rerun():
            return guess_dependent_outputs(masks, shapes)
        return dependent_outputs(self._rerun, [_to_numpy(x) for x in self.operands], masks, shapes)

    def is_tied(self, masks: Sequence[np.ndarray | None]) -> bool:
        """Return True if elements that a choice passed over are equal to those that it took."""
        coarse = [x.dtype == tf.bfloat16 for x in self.operands]
        return self._can_rerun() and is_tied(self._rerun, [_to_numpy(x) for x in self.operands], masks, coarse)

    def _can_rerun(self) -> bool:
        handles = [x.dtype in (tf.resource, tf.variant, tf.string) for x in (*self.operands, *self.results)]
        return self.backward is None and not self.inner and self.op_type not in NOT_RERUN and not any(handles)

    def _rerun(self, operands: Sequence[np.ndarray]) -> list[np.ndarray]:
        tensors = [tf.constant(x, y.dtype) for x, y in zip(operands, self.operands, strict=True)]
        results = execute.execute(self.op_type, len(self.results), tensors, self.params, context.context())
        return [_to_numpy(y) for y in results]


def op_word(op_type: str, callers: Sequence[str]) -> str:
    """Return what the user calls an operation, by its type and the library functions around it, innermost first."""
    for name in reversed(callers):
        known = _ALIASES.get(name, name.removesuffix("_v2"))
        if name in _ALIASES or known in _COMPOSITES or name.startswith("eg."):
            return known
    if op_type.startswith(COMPILED):
        return _AFFIXES.sub("", _AFFIXES.sub("", op_type)) or op_type
    bare = re.sub(r"V\d+$", "", op_type)
    word = _WORDS.get(op_type) or _WORDS.get(bare)
    return word or re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z0-9])(?=[A-Z][a-z])", "_", bare).lower()


def inner_op_types(op_type: str) -> frozenset[str]:
    """Return the types of the operations in a compiled function, and in those that it calls; none for an operation."""
    op_types: set[str] = set()
    ahead, seen = [op_type] if op_type.startswith(COMPILED) else [], {op_type}
    while ahead:
        for node in context.context().get_function_def(ahead.pop()).node_def:
            op_types.add(node.op)
            called = {attribute.func.name for attribute in node.attr.values() if attribute.HasField("func")} - seen
            seen |= called
            ahead += called
    return frozenset(op_types)


def is_random(op: TensorflowOp) -> bool:
    return any("Random" in op_type or op_type in RANDOM_OPS for op_type in (op.op_type, *op.inner))


def cause_of_cut(op: TensorflowOp) -> tuple[str | None, str]:
    """Return why no result of an operation is connected although an operand is: a cause, and an observation."""
    if op.op_type == "StopGradient":
        return "detached", ""
    if op.op_type in STEP_OPS:
        return "step-function", "TensorFlow has no derivative for it"
    if op.op_type in RANDOM_OPS:
        return "discrete", "it draws"
    if op.results and all(y.dtype == tf.string for y in op.results):
        return "left-framework", "text comes out"
    if not any(map(is_differentiable, op.results)):
        return "discrete", f"{op.results[0].dtype.name} comes out" if op.results else ""
    if not op.recorded:
        return "outside-tape", "no tape records there"
    if op.custom_gradient:
        return "custom-rule", "its gradient function gives None"
    if op.op_type.startswith(COMPILED):
        return _cause_in_compiled(op), "it is a compiled function"
    return "no-rule", "TensorFlow has no derivative for it"


def _cause_in_compiled(op: TensorflowOp) -> str | None:
    """Return why a compiled function stops derivatives, if only one thing in it could."""
    causes = [cause for cause, op_types in COMPILED_CAUSES.items() if not op_types.isdisjoint(op.inner)]
    return causes[0] if len(causes) == 1 else None


def out_of_range(op: TensorflowOp) -> str:
    """Return a note on ids that belong to no segment, whose elements TensorFlow drops; empty if there are none."""
    if op.op_type not in SEGMENTS:
        return ""
    wrong = op.operands[1].numpy()[_is_of_no_segment(op)]
    if not wrong.size:
        return ""
    return f"id {wrong[0]} is out of range for {int(op.operands[2])} segments, and TensorFlow drops what bears it"


def _is_of_no_segment(op: TensorflowOp) -> np.ndarray:
    ids = op.operands[1].numpy()
    return np.asarray((ids < 0) | (ids >= int(op.operands[2])))


def cause_of_zero_tangent(op: TensorflowOp, tangents: Sequence[Tensor | None]) -> str | None:
    """Return why no tangent leaves an operation, where its numbers say more than its name."""
    moving = [(x, t) for x, t in zip(op.operands, tangents, strict=False) if t is not None and max_abs(t) > 0]
    x, tangent = moving[0]
    if op.inner:
        return _cause_in_compiled(op)
    moved = np.abs(tangent.numpy()) > 0
    if _underflows(op, tangents):
        return "underflow"
    if op.op_type in SOFTMAXES and not np.ptp(tangent.numpy(), axis=-1).any():  # only differences count
        return "cancelled"
    if op.op_type in SOFTMAXES and is_masked_score(tf.cast(x, tf.float64).numpy(), moved):
        return "masked"
    if op.op_type == "Relu6" and bool((np.asarray(x)[moved] > 0).all()):
        return "clamped"
    if op.op_type in SEGMENTS and bool(_is_of_no_segment(op)[np.nonzero(moved)[: op.operands[1].ndim]].all()):
        return "out-of-range"
    if op.op_type in CHOICES and op.operation not in ("clip_by_value", "relu6", "hard_sigmoid"):
        if op.is_tied([None if t is None else np.abs(t.numpy()) > 0 for t in tangents]):
            return "tie"
        return cause_at_bound(op, tangents) or "not-selected"
    if op.op_type in LOOKUPS and op.operation not in ("boolean_mask", "indexing") and tangent.shape.rank > 1:
        axis = int(op.operands[2]) if op.op_type == "GatherV2" else 0
        return "row-not-used" if axis == 0 else None
    if op.op_type in (*PRODUCTS, *MATRIX_PRODUCTS) and op.operation not in ("dropout", "norm"):
        if len(moving) > 1:
            return "stationary" if not np.asarray(x)[moved].any() else "cancelled"
        constants = _constant_operands(op, tangents)
        if constants and is_differentiable(constants[0]) and bool((constants[0].numpy() != 0).all()):
            return "underflow" if op.op_type in PRODUCTS else _cause_of_zero_sum(op, tangents)
    return _cause_of_zero_sum(op, tangents) if op.op_type in SUMS else None


def cause_at_bound(op: TensorflowOp, tangents: Sequence[Tensor | None]) -> str | None:
    """Return the cause for elements that lose against the constant of a maximum or minimum."""
    constants = _constant_operands(op, tangents)
    if op.op_type not in BOUNDS or op.operation == "clip_by_value" or len(constants) != 1:
        return None
    return cause_of_bound(op.op_type == "Maximum", constants[0].numpy())


def _constant_operands(op: TensorflowOp, tangents: Sequence[Tensor | None]) -> list[Tensor]:
    return [y for y, t in zip(op.operands, tangents, strict=False) if t is None or max_abs(t) == 0]


def _underflows(op: TensorflowOp, tangents: Sequence[Tensor | None]) -> bool:
    size = max([max_abs(t) for t in tangents if t is not None])
    if not size < 1:
        return False
    factor = 2.0 ** -math.frexp(size)[1]  # a power of two, so that nothing is rounded differently

    def scale(t: Tensor) -> Tensor:
        return tf.cast(tf.cast(t, tf.complex128 if t.dtype.is_complex else tf.float64) * factor, t.dtype)

    return _moves(op, [None if t is None else scale(t) for t in tangents])


def _cause_of_zero_sum(op: TensorflowOp, tangents: Sequence[Tensor | None]) -> str:
    # Terms that cancel do not cancel any more in other amounts; terms that were multiplied by zero stay zero.
    def uneven(t: Tensor, factor: int) -> Tensor:
        amounts = factor * (uneven_weights(math.prod(t.shape)) + 0.5)
        return t * tf.cast(amounts.reshape(tuple(t.shape)), t.dtype)

    terms = [None if t is None else uneven(t, factor) for factor, t in enumerate(tangents, 1)]
    return "cancelled" if _moves(op, terms) else "masked"


def _moves(op: TensorflowOp, tangents: Sequence[Tensor | None]) -> bool:
    return any(t is not None and max_abs(t) > 0 for t in op.jvp(tangents))


def is_differentiable(x: Tensor) -> bool:
    return bool(x.dtype.is_floating or x.dtype.is_complex)


def zeros_like(x: Tensor) -> Tensor | None:
    """Return a cotangent of zeros, or None for a handle."""
    return None if x.dtype in (tf.resource, tf.variant, tf.string) else tf.zeros_like(x)


def max_abs(x: Tensor) -> float:
    """Return the largest absolute value; NaN if there is one."""
    x = tf.convert_to_tensor(x)
    return float(tf.reduce_max(tf.abs(x))) if math.prod(x.shape) else 0.0


def _to_numpy(x: Tensor) -> np.ndarray:
    """Convert to a dtype that NumPy has."""
    return np.asarray(tf.cast(x, tf.float32) if x.dtype == tf.bfloat16 else x)
