"""Operations of TensorFlow's in the words of the user, and what each does to a derivative."""

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from tensorflow import string
from tensorflow.python.eager.context import context

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


def draws(kind: str) -> bool:
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
        for node in context().get_function_def(ahead.pop()).node_def:
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
