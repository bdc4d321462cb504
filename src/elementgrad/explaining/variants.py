"""Causes in closer words, where the operation at hand tells more than its cause: what is said, and what helps."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from elementgrad.backends.witness import STATISTIC, TO_A_LEAF
from elementgrad.explaining.causes import CAUSES, UNDECIDED, Cause
from elementgrad.explaining.operations import BANDS, MATRICES, NORMALISE, SUMMANDS

Fix = str | Mapping[str, str]
_ROOTS = """
    sqrt sqrt_ rsqrt norm linalg_norm linalg_vector_norm vector_norm cdist pdist dist pairwise_distance hypot
    normalize cosine_similarity"""
_LOGS = "log log_ log2 log10 xlogy logit binary_cross_entropy"
_QUOTIENTS = "div div_ true_divide truediv rdiv realdiv divide reciprocal"
_PRODUCTS = "mul mul_ multiply div true_divide divide prod reduce_prod cumprod multiply_no_nan divide_no_nan"
_ARCS = "acos asin atanh arccos arcsin arctanh"
_POWERS = "pow pow_ power float_power"
_COPIES = "tensor as_tensor asarray from_numpy new_tensor"
ELSEWHERE = "another result"
"""In place of an operation: what it goes into is used for other results."""
CONSTANT = "a constant"
"""In place of an operation: the result is computed from plain numbers alone."""
PHRASES = ("item assignment", TO_A_LEAF, STATISTIC, ELSEWHERE, CONSTANT)
"""Operations of several words."""
_AUGMENTED = "add_ sub_ mul_ div_ pow_"


def _clamped(call: str) -> dict[str, str]:
    """A call with its input kept in an interval, in each framework."""
    interval = "-1 + 1e-6, 1 - 1e-6"
    return {
        "torch": call.format(f"x.clamp({interval})"),
        "tensorflow": call.format(f"tf.clip_by_value(x, {interval})"),
        "jax": call.format(f"jnp.clip(x, {interval})"),
    }


def _safe(call: str, value: str = "1.0", x: str = "x") -> dict[str, str]:
    """A call with what it cannot take replaced before, in each framework."""
    homes = {"torch": "torch.where", "tensorflow": "tf.where", "jax": "jnp.where"}
    inner = {framework: call.format(f"{where}(ok, {x}, {value})") for framework, where in homes.items()}
    return {framework: f"make the input safe: {text}, and mask the result too" for framework, text in inner.items()}


def _said() -> Iterator[tuple[str, str, str | None, Fix]]:
    """A cause, its operations, what is said of them if it is something else, and what to do."""
    root = "keep what is under the root above zero, as in sqrt(x + 1e-12); of a square take the sum of squares itself"
    yield "singular", _ROOTS, None, root
    variance = "give it several numbers that differ, or keep the variance above zero, as in sqrt(var + 1e-12)"
    yield "singular", "std var", None, variance
    yield "singular", _LOGS, None, "keep its input above zero, as in log(x + 1e-12), or clamp it before"
    yield "singular", "log1p", None, "keep its input above -1, or clamp it before"
    yield "singular", _QUOTIENTS, None, "keep what it divides by away from zero, as in x / (y + 1e-12)"
    yield "singular", _ARCS, None, _clamped("keep its input inside of its interval, as in {{operation}}({})")
    yield "singular", _POWERS, None, "keep its base above zero, as in pow(x + 1e-12, p)"
    yield (
        "singular",
        "atan2 arctan2",
        None,
        "keep its two inputs from being zero at once, as in {operation}(y, x + 1e-12)",
    )
    yield "masked-branch", _QUOTIENTS, None, _safe("x / {}", x="y")
    yield "masked-branch", _ARCS, None, _safe("{{operation}}({})", "0.0")
    yield "masked-branch", _POWERS, None, _safe("pow({}, p)")
    for words in ("mul mul_ multiply", " ".join(MATRICES)):
        yield (
            "masked-branch",
            words,
            "{operation} takes a number that is not finite, and masking the result does not help",
            {
                "torch": "replace it before {operation}, as in torch.nan_to_num(x), and mask the result too",
                "tensorflow": "replace it before {operation}, as in tf.where(tf.math.is_finite(x), x, 0.0), and mask "
                "the result too",
                "jax": "replace it before {operation}, as in jnp.nan_to_num(x), and mask the result too",
            },
        )
    factor = "look at what {operation} multiplies it by: a mask, or weights that are zero at the start; behind such "
    factor += "weights nothing learns, so that others need random numbers"
    for words in (_PRODUCTS, " ".join(MATRICES)):
        yield (
            "masked",
            words,
            "{operation} multiplies it by zero",
            {
                "torch": f"{factor}, as with torch.nn.init.xavier_uniform_(weight)",
                "tensorflow": f"{factor}, as with kernel_initializer='glorot_uniform'",
                "jax": f"{factor}, as with jax.nn.initializers.glorot_uniform()",
            },
        )
    yield "masked", " ".join(BANDS), "{operation} leaves it out by its mask", CAUSES["masked"].fix
    lowered = "{operation} adds a number to it that is so low that it counts for nothing"
    yield "masked", " ".join(SUMMANDS), lowered, CAUSES["masked"].fix
    yield "masked", " ".join(NORMALISE), "{operation} gives it no weight, as its number is so low", CAUSES["masked"].fix
    alone = "normalise over several numbers: of one nothing is left once the mean is taken away"
    yield "cancelled", "layer_norm group_norm instance_norm batch_norm", None, alone
    hinge = "nothing, if it is a hinge or a bound that is meant; otherwise check what goes in, or use softplus"
    yield "dead-relu", "maximum fmax clamp clamp_min clip max", None, hinge
    item = "write to a clone(), as in y = x.clone(), or build it with torch.stack or torch.where"
    yield "modified-in-place", "setitem", None, item
    yield "modified-in-place", "item assignment", None, item
    yield "modified-in-place", _AUGMENTED, None, "write x = x + y instead of x += y or x.add_(y), or work on a clone()"
    leaf = "update it inside of torch.no_grad(), or write to a clone(), as in y = x.clone()"
    yield "modified-in-place", TO_A_LEAF, "a tensor that requires gradients is written to in place", leaf
    order = "call every backward() before optimizer.step(), or compute the second loss after it"
    yield "modified-in-place", "optimizer.step", None, order
    yield (
        "no-grad",
        "checkpoint",
        "it runs in a reentrant checkpoint, of which no input is tracked",
        ("call checkpoint with use_reentrant=False"),
    )
    draw = "use rsample() instead of sample(), or a loss of log_prob() where there is none"
    yield "discrete", "sample", "it is a draw, and {operation} passes nothing on", draw
    for word in _COPIES.split():
        says = f"torch.{word} copies its numbers and not where they came from"
        yield "left-framework", word, says, "put the tensors together with torch.stack or torch.cat instead"
    yield (
        "detached",
        "Parameter",
        "a new {operation} takes its numbers and not where they came from",
        ("use the tensor itself, as with torch.nn.functional or torch.func.functional_call, and not a new Parameter"),
    )
    yield (
        "not-tracked",
        STATISTIC,
        "{wrt} is a statistic that its layer moves by itself, and no gradient trains it",
        {
            "torch": "train the weight and the bias of the layer, or ask about those; its statistics follow the data "
            "while model.train() is on",
            "tensorflow": "train gamma and beta of the layer, or ask about those; its statistics follow the data where "
            "it is called with training=True",
            "jax": "train the scale and the bias of the layer, or ask about those; its statistics follow the data",
        },
    )
    classes = "it takes differences between classes alone: give it two or more, and what moves them apart"
    yield "cancelled", "cross_entropy softmax_cross_entropy_with_logits", None, classes
    yield "cancelled", "sparse_softmax_cross_entropy_with_logits", None, classes
    pools = "max_pool max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d"
    pools += " fractional_max_pool2d fractional_max_pool3d reduce_window"
    first = (
        "nothing, if those that tie may stand for each other, as zeros behind a rectifier do; ask about the one taken"
    )
    yield "tie", f"{pools} topk top_k sort kthvalue median nanmedian mode cummax cummin", None, first
    yield (
        "unused",
        ELSEWHERE,
        None,
        (
            "ask about the result that {wrt} leads to, or add that one to the loss; leave {wrt} out of what is trained "
            "if neither is meant"
        ),
    )
    yield (
        "unused",
        CONSTANT,
        "it is a constant, and nothing that is given goes into it",
        "compute {of} from {wrt}, or ask about another result: this one is made of plain numbers alone",
    )
    segments = "segment_sum segment_max segment_min unsorted_segment_sum unsorted_segment_prod unsorted_segment_max "
    segments += "unsorted_segment_min"
    yield (
        "out-of-range",
        segments,
        "{operation} is given an id that is of no segment, and drops what bears it",
        "check the ids before, as in assert ((ids >= 0) & (ids < num_segments)).all()",
    )
    yield (
        "row-not-used",
        "padding_idx",
        "it is the padding row, which gets no gradient, by {operation}",
        ("leave padding_idx out if the row is to learn, or ask about another one"),
    )


def _variants() -> Iterator[tuple[tuple[str, str], Cause]]:
    for cause, words, says, fix in _said():
        known = CAUSES[cause]
        for word in [words] if words in PHRASES else words.split():
            yield (cause, word), replace(known, says=says or known.says, fix=fix)


VARIANTS: Mapping[tuple[str, str], Cause] = dict(_variants())


def known(cause: str | None, operation: str | None) -> Cause:
    """What is said of a cause, by its operation where that matters."""
    if cause is None:
        return UNDECIDED
    return VARIANTS.get((cause, operation or ""), CAUSES[cause])
