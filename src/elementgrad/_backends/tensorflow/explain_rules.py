"""Operations of TensorFlow's in the words of the user, and what each does to a derivative.

Operations as they ran, and their derivatives one by one: the rules are TensorFlow's, and those that users write.

What passes by each operation of a run: derivatives going forward, gradients coming back, numbers.

The account of a run, from what was recorded of it: which values a tape connects with the source.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow import string

from elementgrad._backends.tensorflow._compat import _gradient_function, context, execute, indexed_slices
from elementgrad._backends.tensorflow.isolate import without_log
from elementgrad._cleanup import enter, scope
from elementgrad._explain.dependence import dependent_outputs, guess_dependent_outputs, is_tied
from elementgrad._explain.trace import (
    CotangentSizes,
    FiniteFlags,
    Hint,
    Op,
    OpGraph,
    TangentSizes,
    cause_of_bound,
    is_masked_score,
    largest_where,
    uneven_weights,
)

Tensor = Any

_WORDS = {
    "AddN": "add",
    "AddV2": "add",
    "ArgMax": "argmax",
    "ArgMin": "argmin",
    "All": "reduce_all",
    "Any": "reduce_any",
    "BatchMatMul": "matmul",
    "BiasAdd": "bias_add",
    "Conv2D": "conv2d",
    "Conv3D": "conv3d",
    "Einsum": "einsum",
    "FusedBatchNorm": "batch_norm",
    "GatherV2": "gather",
    "Inv": "reciprocal",
    "L2Loss": "l2_loss",
    "LRN": "local_response_normalization",
    "MatMul": "matmul",
    "Max": "reduce_max",
    "MaxPool": "max_pool2d",
    "MaxPool3D": "max_pool3d",
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
    "SparseSoftmaxCrossEntropyWithLogits": "sparse_softmax_cross_entropy_with_logits",
    "StridedSlice": "indexing",
    "TensorScatterAdd": "tensor_scatter_nd_add",
    "TensorScatterUpdate": "tensor_scatter_nd_update",
    "Sub": "subtract",
    "Sum": "reduce_sum",
    "TopK": "top_k",
    "Unpack": "unstack",
    "Where": "where",
    "AssignVariableOp": "assign",
    "AssignAddVariableOp": "assign_add",
    "AssignSubVariableOp": "assign_sub",
    "ReadVariableOp": "read",
    "swish_impl": "silu",
}
"""Types of operations that no user writes, and what they write instead."""
_COMPOSITES = {
    "_init_from_args": "tf.Variable",
    "boolean_mask": "boolean_mask",
    "boolean_mask_v2": "boolean_mask",
    "clip_by_value": "clip_by_value",
    "divide_no_nan": "divide_no_nan",
    "dropout": "dropout",
    "dropout_v2": "dropout",
    "embedding_lookup_v2": "embedding_lookup",
    "embedding_lookup": "embedding_lookup",
    "general_dropout": "dropout",
    "hard_sigmoid": "hard_sigmoid",
    "hard_tanh": "hard_tanh",
    "norm": "norm",
    "norm_v2": "norm",
    "numpy_function": "numpy_function",
    "eager_py_func": "py_function",
    "stateless_dropout": "dropout",
    "vectorized_map": "vectorized_map",
}
"""Functions of TensorFlow's and Keras's that the user knows, and that are made of several operations."""
LEAVES = {
    "__array__": "numpy",
    "__bool__": "bool",
    "__complex__": "complex",
    "__float__": "float",
    "__index__": "int",
    "__int__": "int",
    "__dlpack__": "dlpack",
    "numpy": "numpy",
}
"""Methods by which the numbers of a tensor become Python's or NumPy's."""
DECIDES = {"bool"}
"""Those that give a truth to Python."""
ENTERS = {"constant", "convert_to_tensor_v2_with_dispatch", "convert_to_tensor", "convert_to_tensor_v2"}
"""Functions by which plain numbers become tensors."""
ASIDE = frozenset(
    """
    BroadcastGradientArgs DestroyResourceOp OnesLike Rank Shape ShapeN Size VarHandleOp VarIsInitializedOp VariableShape
    ZerosLike
    """.split()  # noqa: SIM905
)
"""Operations that take a tensor and nothing of its numbers."""
REPLACES = "AssignVariableOp"
"""The operation that gives a variable a value, whatever it was before."""
STEPS = frozenset({"Round", "Rint", "Floor", "Ceil", "FloorDiv", "Sign"})
DRAWS = frozenset(
    """
    Multinomial RandomPoisson RandomPoissonV2 RandomBinomial StatelessMultinomial StatelessRandomBinomial
    StatelessRandomPoisson StatefulRandomBinomial StatelessParameterizedTruncatedNormal ParameterizedTruncatedNormal
    """.split()  # noqa: SIM905
)
DISCRETE = frozenset({"ArgMax", "ArgMin", "Multinomial", "StatelessMultinomial", "Bucketize"})
"""Operations that give whole numbers, of those that are looked for in a compiled function; loops compare anyway."""
COMPILED = ("__forward_", "__inference_")
"""How the names of compiled functions begin."""
_LEADING = re.compile(r"^__(forward|inference|backward)_|_\d+$")


def word(kind: str, around: Iterable[str]) -> str:
    """What the user calls an operation, by its type and the functions of libraries that it runs in, innermost first."""
    composite = [_COMPOSITES.get(name, name) for name in around if name in _COMPOSITES or name.startswith("eg.")]
    return composite[-1] if composite else spelled(kind)


def written(name: str) -> str:
    """What the user calls a function with a rule of its own."""
    return "custom_gradient" if name == "<lambda>" else name


def spelled(kind: str) -> str:
    """The type of an operation in the user's words."""
    if kind.startswith(COMPILED):
        return _LEADING.sub("", _LEADING.sub("", kind)) or kind
    bare = re.sub(r"V\d+$", "", kind)
    known = _WORDS.get(kind) or _WORDS.get(bare)
    return known or re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z0-9])(?=[A-Z][a-z])", "_", bare).lower()


def is_random_op(kind: str) -> bool:
    """Whether operations of a type give random numbers."""
    return "Random" in kind or kind in DRAWS


def why_stopped(
    kind: str, own: bool, outputs: Sequence[Tensor], recorded: bool, inside: Collection[str]
) -> tuple[str | None, str]:
    """Why an operation that took a connected tensor gave none: a cause, and what was seen."""
    if kind == "StopGradient":
        return "detached", ""
    if kind in STEPS:
        return "step-function", "TensorFlow has no derivative for it"
    if kind in DRAWS:
        return "discrete", "it draws"
    if outputs and all(y.dtype == string for y in outputs):
        return "left-framework", "text comes out"
    if not any(y.dtype.is_floating or y.dtype.is_complex for y in outputs):
        return "discrete", f"{outputs[0].dtype.name} comes out" if outputs else ""
    if not recorded:
        return "outside-tape", "no tape records there"
    if own:
        return "custom-rule", "its gradient function gives None"
    if kind.startswith(COMPILED):
        return suspect(inside), "it is a compiled function"
    return "no-rule", "TensorFlow has no derivative for it"


def inside(kind: str) -> frozenset[str]:
    """The types of the operations in a compiled function, and in those that it calls; none for an operation."""
    found: set[str] = set()
    ahead, seen = [kind] if kind.startswith(COMPILED) else [], {kind}
    while ahead:
        for node in context.context().get_function_def(ahead.pop()).node_def:
            found.add(node.op)
            called = {attribute.func.name for attribute in node.attr.values() if attribute.HasField("func")} - seen
            seen |= called
            ahead += called
    return frozenset(found)


def suspect(inside: Collection[str]) -> str | None:
    """Why a compiled function stops derivatives, if only one thing in it could."""
    causes = {
        "detached": {"StopGradient"},
        "step-function": STEPS,
        "discrete": DISCRETE,
        "left-framework": {"PyFunc", "PyFuncStateless"},
    }
    found = [cause for cause, kinds in causes.items() if not kinds.isdisjoint(inside)]
    return found[0] if len(found) == 1 else None


SKIPPED_RECORDS = {"", "PartitionedCall", "StatefulPartitionedCall", "While", "StatelessWhile", "EagerPyFunc", "PyFunc"}
"""What is not run on other numbers: it calls code, or may never end."""


@dataclass(eq=False)
class TensorflowOp:
    """One operation that ran eagerly; or a way by which numbers left TensorFlow, which has no type."""

    kind: str
    word: str
    where: str | None
    path: str
    takes: tuple[int, ...] = ()
    gives: tuple[int, ...] = ()
    inputs: Sequence[Tensor] = ()
    outputs: Sequence[Tensor] = ()
    attributes: Sequence[Any] = ()
    recorded: bool = True
    """Whether tapes recorded when it ran."""
    backward: Callable[..., Any] | None = None
    """A rule that was recorded with it, in place of the one for its type."""
    own: bool = False
    """Whether the user wrote that rule."""
    inside: Collection[str] = ()
    """The types of the operations in it, if it is a compiled function."""
    inner: bool = False
    """Whether a tape of the user's did it, to compute a gradient."""
    enters: bool = False
    """Whether it makes a tensor of plain numbers, at the user's wish."""
    stops: str | None = None
    note: str = ""
    passing: list[bool] = field(default_factory=list)
    """Which of its inputs get a derivative."""

    def vjp(self, seeds: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients of the inputs for those of the outputs."""
        if self.backward is not None:
            pulled = self.backward(*seeds)
        else:
            pulled = _gradient_function(
                self.kind, self.attributes, len(self.inputs), list(self.inputs), list(self.outputs), list(seeds), (), ""
            )
        if isinstance(pulled, indexed_slices.IndexedSlices) or not isinstance(pulled, (list, tuple)):
            pulled = [pulled]
        dense = [None if g is None else tf.convert_to_tensor(g) for g in pulled]
        return [*dense, *[None] * (len(self.inputs) - len(dense))]

    def jvp(self, tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Derivatives of the outputs for those of the inputs: the rule transposed, which is linear in its seeds."""
        seeds = [tf.zeros_like(y) if differentiable(y) else zeros(y) for y in self.outputs]
        free = [seed for seed in seeds if seed is not None and differentiable(seed)]
        with scope():
            tape = tf.GradientTape(watch_accessed_variables=False)
            enter(tape)
            tape.watch(free)
            pulled = self.vjp(seeds)
        pairs = [(g, t) for g, t in zip(pulled, tangents, strict=True) if g is not None and t is not None]
        if not pairs:
            return [None] * len(self.outputs)
        pushed = iter(tape.gradient([g for g, _ in pairs], free, [t for _, t in pairs]))
        return [next(pushed) if differentiable(y) else None for y in self.outputs]

    def touched(self, masks: Sequence[np.ndarray | None]) -> list[np.ndarray]:
        """Which elements of the outputs can move with some of the inputs; a write to a variable keeps its places."""
        if not self.outputs:
            return [mask for mask in masks if mask is not None][:1]
        shapes = [tuple(y.shape) for y in self.outputs]
        if not self._repeatable():
            return guess_dependent_outputs(masks, shapes)
        return dependent_outputs(self._again, [_widen_record(x) for x in self.inputs], masks, shapes)

    def ties(self, masks: Sequence[np.ndarray | None]) -> bool:
        """Whether elements of what a choice takes are level with those that it took."""
        coarse = [x.dtype == tf.bfloat16 for x in self.inputs]
        return self._repeatable() and is_tied(self._again, [_widen_record(x) for x in self.inputs], masks, coarse)

    def _repeatable(self) -> bool:
        """Whether it can be run on other numbers."""
        foreign = [x.dtype in (tf.resource, tf.variant, tf.string) for x in (*self.inputs, *self.outputs)]
        return self.backward is None and not self.inside and self.kind not in SKIPPED_RECORDS and not any(foreign)

    def _again(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        tensors = [tf.constant(x, y.dtype) for x, y in zip(inputs, self.inputs, strict=True)]
        given = execute.execute(self.kind, len(self.outputs), tensors, self.attributes, context.context())
        return [_widen_record(y) for y in given]


def _widen_record(x: Tensor) -> np.ndarray:
    """Numbers in a precision that NumPy knows."""
    return np.asarray(tf.cast(x, tf.float32) if x.dtype == tf.bfloat16 else x)


def differentiable(x: Tensor) -> bool:
    """Whether a tensor is of a dtype that has derivatives."""
    return bool(x.dtype.is_floating or x.dtype.is_complex)


def zeros(x: Tensor) -> Tensor | None:
    """A gradient of zeros for a tensor, of whatever kind."""
    return None if x.dtype in (tf.resource, tf.variant, tf.string) else tf.zeros_like(x)


CHOOSES = frozenset(
    """
    Max Min TopK TopKV2 Maximum Minimum MaxPool MaxPoolV2 MaxPool3D MaxPoolWithArgmax Dilation2D FractionalMaxPool
    NthElement SegmentMax SegmentMin SegmentMaxV2 SegmentMinV2 UnsortedSegmentMax UnsortedSegmentMin
    TensorScatterMax TensorScatterMin
    """.split()  # noqa: SIM905
)
BOUNDS = {"Maximum", "Minimum"}
"""Of those, the ones that may take a constant."""
SHARES = {"Softmax", "LogSoftmax", "SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"}
PRODUCTS = {"Mul", "RealDiv"}
MATRICES = {"MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "Conv2D", "Conv3D"}
SUMS = {*MATRICES, "Sum", "Mean", "AddV2", "AddN", "Sub", "BiasAdd", "Cumsum"}
LOOKS_UP = {"GatherV2", "ResourceGather"}
SEGMENTS = {"UnsortedSegmentSum", "UnsortedSegmentProd", "UnsortedSegmentMax", "UnsortedSegmentMin"}


def reached(records: Sequence[TensorflowOp], source: int) -> set[int]:
    """The values computed from one."""
    found = {source}
    for each in records:
        if not found.isdisjoint(each.takes):
            found.update(each.gives)
    return found


def leading(records: Sequence[TensorflowOp], target: int) -> set[int]:
    """The values that one is computed from."""
    found = {target}
    for each in reversed(records):
        if not found.isdisjoint(each.gives):
            found.update(each.takes)
    return found


def spread(like: Tensor, positions: np.ndarray, values: np.ndarray) -> Tensor:
    """Zeros, but for some flat positions."""
    flat = np.zeros(math.prod(like.shape))
    flat[positions] = values
    return tf.cast(flat.reshape(tuple(like.shape)), like.dtype)


def pushed(
    records: Sequence[TensorflowOp], connected: Collection[int], start: Mapping[int, Tensor], target: int
) -> tuple[list[TangentSizes | None], Tensor | None]:
    """How far derivatives get that start somewhere, step by step; and what arrives at the target."""
    tangents = dict(start)
    found: list[TangentSizes | None] = []
    for each in records:
        taken = [tangents.get(value) for value in each.takes]
        arrives = max([_size(t) for t in taken if t is not None], default=0.0)
        if not each.inputs or arrives == 0:
            found.append(TangentSizes(0.0, 0.0) if each.inputs else None)
            continue
        if not each.outputs:  # a write to a variable, which keeps numbers alone
            found.append(TangentSizes(arrives, 0.0))
            continue
        given: list[Tensor | None] = [None] * len(each.outputs)
        if not set(each.gives).isdisjoint(connected):
            given = each.jvp(taken)
        tangents.update({n: t for n, t in zip(each.gives, given, strict=False) if t is not None})
        leaves = max([_size(t) for t in given if t is not None], default=0.0)
        found.append(TangentSizes(arrives, leaves, _why_none(each, taken) if leaves == 0 else _bounded(each, taken)))
    return found, tangents.get(target)


def pulled(
    records: Sequence[TensorflowOp],
    connected: Collection[int],
    start: tuple[int, Tensor],
    counts: tuple[int, np.ndarray] | None = None,
    gradients: dict[int, Tensor] | None = None,
) -> list[CotangentSizes | None]:
    """What gradients come back to each step, and what it makes of them; of one value some elements alone may count.

    The gradients of all values go into `gradients`, if it is given.
    """
    gradients = {} if gradients is None else gradients
    gradients.update([start])
    found: list[CotangentSizes | None] = []
    for each in reversed(records):
        came = [gradients.get(value) for value in each.gives]
        if all(g is None for g in came) or set(each.takes).isdisjoint(connected) or not each.outputs or not each.inputs:
            found.append(None)
            continue
        seeds = [zeros(y) if g is None else g for g, y in zip(came, each.outputs, strict=True)]
        went = each.vjp(seeds) if not set(each.gives).isdisjoint(connected) else [None] * len(each.inputs)
        arrives = _worst([_size(g) for g in came if g is not None])
        leaves, there = 0.0, None
        for value, g in zip(each.takes, went, strict=False):
            if g is None or value not in connected:
                continue
            gradients[value] = gradients[value] + g if value in gradients else g
            if counts is not None and counts[0] == value:
                g = _only(g, counts[1])
            leaves = _worst([leaves, _size(g)])
            if not math.isfinite(_size(g)):
                bad = ~np.isfinite(np.abs(g.numpy()))
                size = None if came[0] is None else largest_where(np.abs(tf.cast(came[0], tf.float64).numpy()), bad)
                there = max(there or 0.0, arrives if size is None else size)
        found.append(CotangentSizes(arrives, leaves, arrives if there is None else there, arrives == 0))
    return found[::-1]


def touching(records: Sequence[TensorflowOp], start: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
    """Masks of the elements that can move with some that are given, at whatever numbers."""
    masks = dict(start)
    for each in records:
        if any(value in masks for value in each.takes):
            found = each.touched([masks.get(value) for value in each.takes])
            masks.update({n: mask for n, mask in zip(each.gives, found, strict=False) if mask.any()})
    return masks


def seen(each: TensorflowOp) -> FiniteFlags | None:
    """Whether the numbers of a step are finite."""
    if not each.inputs:
        return None
    takes, gives = [x for x in each.inputs if differentiable(x)], [y for y in each.outputs if differentiable(y)]
    grows = all(np.all(x.numpy()) for x in takes) and not any(np.isnan(y.numpy()).any() for y in gives)
    return FiniteFlags(all(map(_finite, takes)), all(map(_finite, gives)), grows)


def out_of_range(each: TensorflowOp) -> str:
    """What is to be said of the ids of segments, if some are of none: TensorFlow drops what bears them."""
    if each.kind not in SEGMENTS:
        return ""
    wrong = each.inputs[1].numpy()[_of_no_segment(each)]
    if not wrong.size:
        return ""
    return f"id {wrong[0]} is out of range for {int(each.inputs[2])} segments, and TensorFlow drops what bears it"


def _of_no_segment(each: TensorflowOp) -> np.ndarray:
    ids = each.inputs[1].numpy()
    return np.asarray((ids < 0) | (ids >= int(each.inputs[2])))


def _why_none(each: TensorflowOp, tangents: Sequence[Tensor | None]) -> str | None:
    """Why a step gives no derivative, where its numbers say more than its name."""
    carrying = [(x, t) for x, t in zip(each.inputs, tangents, strict=False) if t is not None and _size(t) > 0]
    x, tangent = carrying[0]
    if each.inside:
        return suspect(each.inside)
    moved = np.abs(tangent.numpy()) > 0
    if _is_too_small(each, tangents):
        return "underflow"
    if each.kind in SHARES and not np.ptp(tangent.numpy(), axis=-1).any():  # it takes differences alone
        return "cancelled"
    if each.kind in SHARES and is_masked_score(tf.cast(x, tf.float64).numpy(), moved):
        return "masked"
    if each.kind == "Relu6" and bool((np.asarray(x)[moved] > 0).all()):
        return "clamped"
    if each.kind in SEGMENTS and bool(_of_no_segment(each)[np.nonzero(moved)[: each.inputs[1].ndim]].all()):
        return "out-of-range"
    if each.kind in CHOOSES and each.word not in ("clip_by_value", "relu6", "hard_sigmoid"):
        if each.ties([None if t is None else np.abs(t.numpy()) > 0 for t in tangents]):
            return "tie"
        return _bounded(each, tangents) or "not-selected"
    if each.kind in LOOKS_UP and each.word not in ("boolean_mask", "indexing") and tangent.shape.rank > 1:
        axis = int(each.inputs[2]) if each.kind == "GatherV2" else 0
        return "row-not-used" if axis == 0 else None
    if each.kind in (*PRODUCTS, *MATRICES) and each.word not in ("dropout", "norm"):
        if len(carrying) > 1:
            return "stationary" if not np.asarray(x)[np.abs(tangent.numpy()) > 0].any() else "cancelled"
        others = [y for y, t in zip(each.inputs, tangents, strict=False) if t is None or _size(t) == 0]
        if others and differentiable(others[0]) and bool((others[0].numpy() != 0).all()):
            return "underflow" if each.kind in PRODUCTS else _why_no_sum(each, tangents)
    return _why_no_sum(each, tangents) if each.kind in SUMS else None


def _bounded(each: TensorflowOp, tangents: Sequence[Tensor | None]) -> str | None:
    """What a maximum or minimum with a bound is."""
    still = [y for y, t in zip(each.inputs, tangents, strict=False) if t is None or _size(t) == 0]
    if each.kind not in BOUNDS or each.word == "clip_by_value" or len(still) != 1:
        return None
    return cause_of_bound(each.kind == "Maximum", still[0].numpy())


def _is_too_small(each: TensorflowOp, tangents: Sequence[Tensor | None]) -> bool:
    """Whether something leaves if more comes in: a power of two, so that nothing is rounded in another way."""
    size = max([_size(t) for t in tangents if t is not None])
    if not size < 1:
        return False
    factor = 2.0 ** -math.frexp(size)[1]
    more = [None if t is None else tf.cast(_wide(t) * factor, t.dtype) for t in tangents]
    return any(t is not None and _size(t) > 0 for t in each.jvp(more))


def _wide(x: Tensor) -> Tensor:
    return tf.cast(x, tf.complex128 if x.dtype.is_complex else tf.float64)


def _why_no_sum(each: TensorflowOp, tangents: Sequence[Tensor | None]) -> str:
    """Whether parts had cancelled, which come in other amounts then; or each was multiplied by zero."""
    parts = [None if t is None else t * _amounts(t, number) for number, t in enumerate(tangents, 1)]
    return "cancelled" if any(t is not None and _size(t) > 0 for t in each.jvp(parts)) else "masked"


def _amounts(like: Tensor, number: int) -> Tensor:
    return tf.cast(number * (uneven_weights(math.prod(like.shape)) + 0.5).reshape(tuple(like.shape)), like.dtype)


def _only(x: Tensor, positions: np.ndarray) -> Tensor:
    """Zeros, but for some flat positions of a gradient."""
    mask = np.zeros(math.prod(x.shape), bool)
    mask[positions] = True
    return tf.where(mask.reshape(tuple(x.shape)), x, tf.zeros_like(x))


def _size(x: Tensor) -> float:
    """The largest in size; NaN if there is one."""
    x = tf.convert_to_tensor(x)
    return float(tf.reduce_max(tf.abs(x))) if math.prod(x.shape) else 0.0


def _worst(sizes: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, sizes)) else max(sizes, default=0.0)


def _finite(x: Tensor) -> bool:
    return not differentiable(x) or bool(tf.reduce_all(tf.math.is_finite(tf.abs(x))))


Follows = Callable[[int, TensorflowOp], str | None]
"""Why a tape does not follow what a record did, a cause; None where it does."""


def account(
    records: Sequence[TensorflowOp],
    source: int,
    target: int,
    follows: Follows,
    remarks: Sequence[Hint] = (),
    again: Collection[int] = (),
) -> OpGraph:
    """Whatever leads from the source, and how it ends; a variable counts with whatever it holds later, too."""
    connected = {source, *again}
    with without_log():
        steps = [_step(number, each, connected, follows) for number, each in enumerate(records)]
    own = [
        Hint("custom-rule", "", step)
        for step in steps
        if step.custom_gradient and not connected.isdisjoint(step.inputs) and not connected.isdisjoint(step.outputs)
    ]
    own += [
        Hint("out-of-range", told, step)
        for each, step in zip(records, steps, strict=True)
        if not connected.isdisjoint(step.inputs) and (told := out_of_range(each))
    ]
    draws = any(is_random_op(kind) for each in records for kind in (each.kind, *each.inside))
    return OpGraph(steps, source, target, frozenset(connected), [*remarks, *own], draws)


def _step(number: int, each: TensorflowOp, connected: set[int], follows: Follows) -> Op:
    stops, note = each.stops, each.note
    if stops is None and not connected.isdisjoint(each.takes):
        stops, note = _followed(number, each, connected, follows)
    return Op(
        "tape.gradient" if stops == "inner-gradient" else each.word,
        each.where,
        each.path,
        tuple(sorted(each.takes, key=lambda value: value not in connected)),  # the way that derivatives take is shown
        each.gives,
        stops,
        note,
        each.own,
        each.word in DECIDES,
        each.enters,
        each.kind == "Identity",
    )


def _followed(number: int, each: TensorflowOp, connected: set[int], follows: Follows) -> tuple[str | None, str]:
    """Connect what a record gave with what it took, if there is a derivative; otherwise why there is none."""
    if not each.outputs:
        return "assigned-state", "a variable keeps numbers and not where they came from"
    unfollowed = follows(number, each)
    if unfollowed is not None and any(map(differentiable, each.outputs)):
        return ("detached", "") if each.kind == "StopGradient" else (unfollowed, "")
    try:
        passes = _passes(each)
    except (LookupError, NotImplementedError) as error:
        return "no-rule", _first_line(error)
    takes = [value in connected for value in each.takes]
    if any(took and passed for took, passed in zip(takes, passes, strict=False)):
        connected.update([n for n, y in zip(each.gives, each.outputs, strict=True) if differentiable(y)])
    if any(value in connected for value in each.gives):
        whole = [y for y in each.outputs if not differentiable(y)]  # such as the indices beside the largest
        return ("discrete", f"{whole[0].dtype.name} comes out") if whole else (None, "")
    return why_stopped(each.kind, each.own, each.outputs, each.recorded, each.inside)


def _passes(each: TensorflowOp) -> list[bool]:
    """Which of its inputs get a derivative from its outputs: the rule itself knows best."""
    if not each.passing:
        if any(map(differentiable, each.outputs)):
            seeds = [tf.ones_like(y) if differentiable(y) else zeros(y) for y in each.outputs]
            each.passing = [g is not None for g in each.vjp(seeds)]
        else:
            each.passing = [False] * len(each.takes)
    return each.passing


def _first_line(error: Exception) -> str:
    return (str(error).strip("'\" ").splitlines() or [""])[0]
