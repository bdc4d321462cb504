"""Rules by which runs of TensorFlow are explained: what users call its operations, and what these do to derivatives.

`TensorflowOp` is one operation of a run, with its tensors. TensorFlow's own gradient rule, or the one that the user
wrote, gives its vjp and, transposed, its jvp. The functions below it say why an operation cuts derivatives.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from elementgrad._backends.tensorflow._compat import _gradient_function, context, execute, indexed_slices
from elementgrad._backends.tensorflow.tensor import backend
from elementgrad._cleanup import enter, scope
from elementgrad._explain import kinds
from elementgrad._explain.connect import Cuts, cause_inside
from elementgrad._explain.trace import Numbers, Op

Tensor = Any

_WORDS = kinds.parse_words(
    """
    AddN=add ArgMax=argmax ArgMin=argmin All=reduce_all Any=reduce_any BatchMatMul=matmul FusedBatchNorm=batch_norm
    Inv=reciprocal LRN=local_response_normalization MatMul=matmul Max=reduce_max MaxPool=max_pool2d Mean=reduce_mean
    Min=reduce_min Mul=multiply MulNoNan=multiply_no_nan Neg=negative Pack=stack Prod=reduce_prod RealDiv=truediv
    ResourceGather=embedding_lookup ResourceGatherNd=gather_nd Rint=round Select=where StridedSlice=indexing
    TensorScatterAdd=tensor_scatter_nd_add TensorScatterUpdate=tensor_scatter_nd_update Sub=subtract Sum=reduce_sum
    Unpack=unstack AssignVariableOp=assign AssignAddVariableOp=assign_add AssignSubVariableOp=assign_sub
    ReadVariableOp=read swish_impl=silu
    """
)
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
EXITS = kinds.parse_words(
    """
    __array__=numpy __bool__=bool __complex__=complex __float__=float __index__=int __int__=int __dlpack__=dlpack
    numpy=numpy
    """
)
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
RANDOM_OPS = frozenset(
    """
    Multinomial RandomPoisson RandomPoissonV2 RandomBinomial StatelessMultinomial StatelessRandomBinomial
    StatelessRandomPoisson StatefulRandomBinomial StatelessParameterizedTruncatedNormal ParameterizedTruncatedNormal
    """.split()  # noqa: SIM905
)
CUTS: Cuts = {
    "StopGradient": ("detached", ""),
    **dict.fromkeys(("PyFunc", "PyFuncStateless"), ("left-framework", "it passes values to Python code")),
    **dict.fromkeys(("Round", "Rint", "Floor", "Ceil", "FloorDiv", "Sign"), ("step-function", "it is flat")),
    **dict.fromkeys(RANDOM_OPS, ("discrete", "it draws")),
    **dict.fromkeys(("ArgMax", "ArgMin", "Bucketize"), ("discrete", "it gives integers")),
}
"""Operations that let no derivative through. Comparisons do not count: every compiled loop has one."""
COMPILED = ("__forward_", "__inference_")
"""Prefixes of the names of compiled functions."""
_AFFIXES = re.compile(r"^__(forward|inference|backward)_|_\d+$")
NOT_RERUN = {"", "PartitionedCall", "StatefulPartitionedCall", "While", "StatelessWhile", "EagerPyFunc", "PyFunc"}
"""Op types that are not run on other numbers, because they call other code or may never end."""
SEGMENTS = {"UnsortedSegmentSum", "UnsortedSegmentProd", "UnsortedSegmentMax", "UnsortedSegmentMin"}
LOOKUPS = {"GatherV2", "ResourceGather"}


def kind_of(op_type: str, word: str, operands: Sequence[Tensor]) -> str | None:
    """Return the kind of an operation; none inside of a function of another name, such as `clip_by_value`."""
    if op_type in LOOKUPS and word in ("gather", "embedding_lookup"):
        takes_rows = operands[0].shape.rank != 1 and (len(operands) < 3 or int(operands[2]) == 0)
        return kinds.LOOKUP if takes_rows else None
    return kinds.KINDS.get(word)


@dataclass(eq=False)
class TensorflowOp(Op):
    """One operation that ran eagerly; or a value that enters or leaves TensorFlow, which has no op type."""

    params: Sequence[Any] = ()
    recorded: bool = True
    """True if tapes were recording when it ran."""
    backward: Callable[..., Any] | None = None
    """A gradient function that was recorded with it, in place of the one registered for its type."""
    in_gradient: bool = False
    """True if one of the user's tapes ran it to compute a gradient."""
    pulled: list[bool] = field(default_factory=list)
    """A flag for each operand that gets a derivative, once that was tried; copies share it."""

    def __post_init__(self) -> None:
        self.branches = self.operation in DECISIONS
        handles = [x.dtype in (tf.resource, tf.variant, tf.string) for x in (*self.operands, *self.results)]
        rerunnable = self.backward is None and not self.inner and self.op_type not in NOT_RERUN
        self.can_rerun = rerunnable and not any(handles)
        named = not self.inner and not self.custom_gradient
        self.kind = kind_of(self.op_type, self.operation, self.operands) if named else None
        self.inner_cause, self.misses = cause_inside(self, CUTS), out_of_range(self)

    def vjp(self, cotangents: Sequence[Tensor | None], wanted: Sequence[bool] = ()) -> list[Tensor | None]:
        cotangents = [zeros_like(y) if g is None else g for g, y in zip(cotangents, self.results, strict=True)]
        if self.backward is not None:
            pulled = self.backward(*cotangents)
        else:
            operands, results = list(self.operands), list(self.results)
            skipped = tuple([n for n, needed in enumerate(wanted) if not needed])
            pulled = _gradient_function(
                self.op_type, self.params, len(operands), operands, results, list(cotangents), skipped, ""
            )
        if isinstance(pulled, indexed_slices.IndexedSlices) or not isinstance(pulled, (list, tuple)):
            pulled = [pulled]
        dense = [None if g is None else tf.convert_to_tensor(g) for g in pulled]
        return [*dense, *[None] * (len(self.operands) - len(dense))]

    def jvp(self, tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        moving = [n for n, t in enumerate(tangents) if t is not None]
        if self.can_rerun and self.kind in (kinds.MOVE, kinds.SUM):
            return self.rerun([_zeros_for(x) if t is None else t for x, t in zip(self.operands, tangents, strict=True)])
        if self.can_rerun and (self.kind == kinds.MATRIX_PRODUCT or self.op_type == "Mul"):
            parts = [[tangents[n] if m == n else x for m, x in enumerate(self.operands)] for n in moving]
            return [tf.add_n([self.rerun(operands)[0] for operands in parts])]
        # The vjp is linear in the cotangents, so that its own vjp is the jvp.
        cotangents = [zeros_like(y) for y in self.results]
        free = [seed for seed in cotangents if seed is not None and is_differentiable(seed)]
        with scope():
            tape = tf.GradientTape(watch_accessed_variables=False)
            enter(tape)
            tape.watch(free)
            pulled = self.vjp(cotangents, [n in moving for n in range(len(self.operands))])
        pairs = [(g, t) for g, t in zip(pulled, tangents, strict=True) if g is not None and t is not None]
        if not pairs:
            return [None] * len(self.results)
        pushed = iter(tape.gradient([g for g, _ in pairs], free, [t for _, t in pairs]))
        return [next(pushed) if is_differentiable(y) else None for y in self.results]

    def connected_results(self, active: Sequence[int]) -> set[int]:
        results = {n for n, y in enumerate(self.results) if is_differentiable(y)}
        if results and not self.pulled:  # the gradient function knows best which operands get a derivative
            seeds = [tf.ones_like(y) if is_differentiable(y) else zeros_like(y) for y in self.results]
            self.pulled.extend([g is not None for g in self.vjp(seeds)])
        if any(self.pulled[n] for n in active if n < len(self.pulled)):
            return results
        if results and not self.inner:
            raise LookupError("TensorFlow has no derivative for it")
        return set()

    def rerun(self, operands: Sequence[Tensor]) -> list[Tensor]:
        if self.backward is not None and self.operands[-1] is self.results[-1]:
            return list(operands[-len(self.results) :])  # other operations computed them, and this one differentiates
        return list(execute.execute(self.op_type, len(self.results), list(operands), self.params, context.context()))


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


def out_of_range(op: TensorflowOp) -> str:
    """Return a note on ids that belong to no segment, whose elements TensorFlow drops; empty if there are none."""
    if op.op_type not in SEGMENTS:
        return ""
    ids = op.operands[1].numpy()
    wrong = ids[(ids < 0) | (ids >= int(op.operands[2]))]
    if not wrong.size:
        return ""
    return f"id {wrong[0]} is out of range for {int(op.operands[2])} segments, and TensorFlow drops what bears it"


def is_differentiable(x: Tensor) -> bool:
    return bool(x.dtype.is_floating or x.dtype.is_complex)


def _zeros_for(operand: Tensor) -> Tensor:
    """Return zeros in place of an operand that does not move; integers stay what they are, such as an axis."""
    return tf.zeros_like(operand) if is_differentiable(operand) else operand


def zeros_like(x: Tensor) -> Tensor | None:
    """Return a cotangent of zeros, or None for a handle."""
    return None if x.dtype in (tf.resource, tf.variant, tf.string) else tf.zeros_like(x)


NUMBERS = Numbers(backend)
