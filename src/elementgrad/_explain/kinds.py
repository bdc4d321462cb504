"""Kinds of operations: what each does to its operands, and why no derivative leaves it at some numbers.

`KINDS` has the kind of each operation by the user's word for it, which frameworks mostly share; backends add what is
their own. `why_nothing_leaves` is the one place that judges an operation by its kind, its numbers and the tangents that
arrive, where they say more than its name does.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from elementgrad._explain.dependence import dependent_outputs, is_tied
from elementgrad._explain.trace import Numbers, Op, uneven_weights

Tensor = Any
LOWER_BOUND, UPPER_BOUND = "lower bound", "upper bound"
"""A maximum, and a minimum, of two operands."""
CHOICE = "choice"
"""Takes some elements by their size, and leaves others."""
RECTIFIER, CAPPED_RECTIFIER = "rectifier", "capped rectifier"
SHARE = "share"
"""Weighs elements against each other by their exponentials, as a softmax does."""
PRODUCT = "product"
"""Multiplies or divides element by element."""
MATRIX_PRODUCT, SUM, NORM, POWER = "matrix product", "sum", "norm", "power"
LOOKUP = "lookup"
"""Takes rows of a table by their index."""
SELECTION = "selection"
"""Takes each element from one of several operands."""
ELEMENTWISE, MOVE = "elementwise", "move"
"""Works element by element; only moves elements to other places."""
PADDING = "padding_idx"
"""The cause where a lookup's own rule gives no gradient to a row that it looks up."""
MASK_SCORE = -1e4
"""Scores up to this one count as masked."""
ROUNDING = 64.0
"""Tangents of so many units of rounding count as zero."""


def parse_words(pairs: str) -> dict[str, str]:
    """Return the words in a text of pairs, `AddN=add`."""
    return dict([pair.split("=") for pair in pairs.split()])


def kind_table(words: Mapping[str, str]) -> dict[str, str]:
    """Return the kind of each operation, for a string of operations by kind."""
    return {operation: kind for kind, operations in words.items() for operation in operations.split()}


KINDS = kind_table(
    {
        LOWER_BOUND: "maximum",
        UPPER_BOUND: "minimum",
        CHOICE: """
            max min amax amin fmax fmin nanmax nanmin reduce_max reduce_min ptp topk top_k approx_top_k sort partition
            lexsort kthvalue nth_element median nanmedian mode quantile percentile cummax cummin scatter_reduce
            index_reduce segment_reduce scatter_max scatter_min scatter-max scatter-min tensor_scatter_max
            tensor_scatter_min segment_max segment_min unsorted_segment_max unsorted_segment_min .at[].max .at[].min
            max_pool max_pool1d max_pool2d max_pool3d max_pool_with_argmax adaptive_max_pool1d adaptive_max_pool2d
            adaptive_max_pool3d fractional_max_pool fractional_max_pool2d fractional_max_pool3d min_pool dilation2d
            reduce_window reduce_window_max reduce_window_min select_and_gather_add""",
        CAPPED_RECTIFIER: "relu6",
        LOOKUP: "embedding",
        SHARE: """
            softmax log_softmax softmin logsumexp cross_entropy softmax_cross_entropy_with_logits
            sparse_softmax_cross_entropy_with_logits""",
        PRODUCT: "mul mul_ multiply div true_divide divide truediv",
        NORM: "layer_norm group_norm instance_norm batch_norm",
        SUM: "sum reduce_sum mean reduce_mean add sub subtract bias_add cumsum",
        MATRIX_PRODUCT: """
            matmul mm bmm mv dot vdot inner tensordot dot_general linear dense einsum addmm baddbmm bilinear conv1d
            conv2d conv3d""",
        ELEMENTWISE: """
            neg negative tanh sigmoid logistic relu gelu silu exp erf erfc sin cos log sqrt rsqrt abs clone contiguous
            float double half bfloat16 squared_difference""",
        MOVE: """
            view reshape flatten transpose permute T mT squeeze unsqueeze expand_dims split chunk unbind unstack cat
            concat concatenate stack expand tile broadcast_in_dim index_select gather narrow indexing slice
            rev copy""",
    }
)
"""The kind of each operation by its word."""


def why_nothing_leaves(op: Op, tangents: Sequence[Tensor | None], numbers: Numbers, leaves: bool = False) -> str | None:
    """Return why no tangent leaves an operation, by its kind and its numbers; None if they do not show it.

    With `leaves` one does, as half of it does where a maximum ties with its bound, or all of it from a padding row.
    """
    if leaves and op.kind == LOOKUP:
        # JAX drops the gradient of an index out of range too, and that is another cause.
        return PADDING if not op.misses and _drops_gradient(op, tangents, numbers) else None
    if leaves and op.kind not in (LOWER_BOUND, UPPER_BOUND):
        return None
    moving = {n: moved for n, t in enumerate(tangents) if t is not None and (moved := numbers.array(t) != 0).any()}
    if not moving or not any(map(numbers.is_differentiable, op.results)):
        return None
    if op.inner_cause is not None:
        return op.inner_cause
    first, moved = next(iter(moving.items()))
    others = [numbers.array(y) for n, y in enumerate(op.operands) if n not in moving and _is_number(numbers, y)]
    others += [np.asarray(float(each)) for each in op.scalars]
    if not leaves and _is_too_small(op, tangents, numbers):
        return "underflow"
    if op.misses and op.kind != LOOKUP and _is_dropped(op, first, moved, numbers):
        return "out-of-range"
    kind = op.kind
    if kind in (LOWER_BOUND, UPPER_BOUND, CHOICE):
        masks = [moving.get(n) for n in range(len(op.operands))]
        if not leaves and op.can_rerun and is_tied(op, masks, numbers):
            return "tie"
        bound = _cause_of_bound(kind == LOWER_BOUND, others[0]) if len(others) == 1 and kind != CHOICE else None
        return bound or ("not-selected" if not leaves else None)
    if kind == RECTIFIER:
        return "dead-relu"
    x = numbers.array(op.operands[first])[moved]
    if kind == CAPPED_RECTIFIER:
        return "clamped" if bool((x > 0).all()) else None
    if kind == LOOKUP:
        return "out-of-range" if op.misses and _reads_nothing(op, first, numbers) else "row-not-used"
    if kind == SELECTION:
        return "masked"
    if kind == SHARE:
        scores = numbers.array(op.operands[first])
        if bool((x <= MASK_SCORE).all() and (scores[~moved] > MASK_SCORE).any()):
            return "masked"
        return None if _moves_at_zero(op, tangents, numbers) else "cancelled"
    if kind == POWER:
        return "underflow" if bool(numbers.array(op.operands[0]).all()) else "stationary"
    if kind in (PRODUCT, MATRIX_PRODUCT) and len(moving) > 1:
        return "cancelled" if bool(x.any()) else "stationary"
    if kind == PRODUCT:
        return "underflow" if others and bool((others[0] != 0).all()) else "masked"
    if kind == NORM:
        return "masked" if find_zero_factors(op, tangents, numbers) else "cancelled"
    if kind in (SUM, MATRIX_PRODUCT):
        return "cancelled" if _adds_up(op, tangents, numbers) else "masked"
    return None


def find_zero_factors(op: Op, tangents: Sequence[Tensor | None], numbers: Numbers) -> list[int]:
    """Return the operands that are all zero, and that would let a tangent leave if they were one."""
    found = []
    for position, x in enumerate(op.operands):
        array = numbers.array(x) if _is_number(numbers, x) and numbers.is_differentiable(x) else np.ones(1)
        if array.size and not array.any():
            operands = [*op.operands[:position], numbers.like(np.ones(array.shape), x), *op.operands[position + 1 :]]
            there = replace(op, operands=operands, results=op.rerun(operands))
            found += [position] if _size(there.jvp(tangents), numbers) else []
    return found


def _cause_of_bound(lower: bool, bound: np.ndarray) -> str | None:
    """Return why an element loses against a constant bound: a lower bound of zero is a rectifier's."""
    if not bound.size or not bool((bound == bound.reshape(-1)[0]).all()):
        return None
    return "dead-relu" if lower and float(bound.reshape(-1)[0]) == 0 else "clamped"


def _is_number(numbers: Numbers, x: Tensor) -> bool:
    try:
        return numbers.array(x).dtype.kind in "fciu"
    except (TypeError, ValueError, NotImplementedError):  # a key or a handle
        return False


def _size(tensors: Sequence[Tensor | None], numbers: Numbers) -> float:
    return max([numbers.size(t) for t in tensors if t is not None], default=0.0)


def _reads_nothing(op: Op, operand: int, numbers: Numbers) -> bool:
    ones = [numbers.like(np.ones(tuple(y.shape)), y) if n == operand else None for n, y in enumerate(op.operands)]
    return not _size(op.jvp(ones), numbers)


def _drops_gradient(op: Op, tangents: Sequence[Tensor | None], numbers: Numbers) -> bool:
    """Return True if the rule of an operation gives no gradient to the elements that move, at whatever numbers."""
    ones = [numbers.like(np.ones(tuple(y.shape)), y) for y in op.results]
    pulled = zip(op.vjp(ones, [t is not None for t in tangents]), tangents, strict=True)
    return not any(numbers.array(g)[numbers.array(t) != 0].any() for g, t in pulled if g is not None and t is not None)


def _is_too_small(op: Op, tangents: Sequence[Tensor | None], numbers: Numbers) -> bool:
    """Return True if something leaves for larger tangents, by a power of two so that rounding is the same."""
    size = _size(tangents, numbers)
    if not size < 1:
        return False
    factor = 2.0 ** -math.frexp(size)[1]
    return _size(op.jvp(_scale(tangents, numbers, lambda t: np.asarray(factor))), numbers) > 0


def _adds_up(op: Op, tangents: Sequence[Tensor | None], numbers: Numbers) -> bool:
    """Return True if something leaves for other amounts of the same tangents: then the given ones had cancelled.

    Terms that were multiplied by zero stay zero.
    """
    amounts = iter(range(1, len(tangents) + 1))

    def uneven(t: np.ndarray) -> np.ndarray:
        return next(amounts) * (uneven_weights(t.size) + 0.5).reshape(t.shape)

    return _size(op.jvp(_scale(tangents, numbers, uneven)), numbers) > 0


def _scale(tangents: Sequence[Tensor | None], numbers: Numbers, factor: Any) -> list[Tensor | None]:
    arrays = [None if t is None else numbers.array(t) for t in tangents]
    wide = [None if t is None else t.astype(np.complex128 if t.dtype.kind == "c" else np.float64) for t in arrays]
    return [
        None if array is None else numbers.like(array * factor(array), t)
        for array, t in zip(wide, tangents, strict=True)
    ]


def _moves_at_zero(op: Op, tangents: Sequence[Tensor | None], numbers: Numbers) -> bool:
    """Return True if there is a slope at zero, where nothing saturates; if not, the parts cancel everywhere."""
    pairs = zip(op.operands, tangents, strict=True)
    operands = [x if t is None else numbers.like(np.zeros(tuple(x.shape)), x) for x, t in pairs]
    there = replace(op, operands=operands, results=op.rerun(operands))
    epsilon = max([np.finfo(numbers.array(t).dtype).eps for t in tangents if t is not None])
    coarse = any(numbers.dtype(t) == "bfloat16" for t in tangents if t is not None)
    epsilon = 2.0**-7 if coarse else float(epsilon)
    return not _size(there.jvp(tangents), numbers) <= ROUNDING * epsilon * _size(tangents, numbers)


def _is_dropped(op: Op, operand: int, moved: np.ndarray, numbers: Numbers) -> bool:
    """Return True if what is written reaches no result. An array that is written into never counts."""
    if op.inputs[operand] in op.written:
        return False
    masks = [moved if n == operand else None for n in range(len(op.operands))]
    return not any(mask.any() for mask in dependent_outputs(op, masks, numbers))
