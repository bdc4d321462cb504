"""Every cause of a gradient that is missing, zero, not finite or wrong: what it is called, said as, and mended by.

One table for all frameworks. A cause says one clause, in which `{operation}`, `{of}` and `{wrt}` are filled in, and one
remedy, which may differ by framework.


What it means that a derivative goes into an operation and none comes out. The words are those of all frameworks.

Causes in closer words, where the operation at hand tells more than its cause: what is said, and what helps.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from elementgrad._explain.trace import LEAF_WRITE, MOVING_STATISTIC


@dataclass(frozen=True)
class Cause:
    """One reason for which a gradient is not what somebody expects."""

    says: str
    """The clause behind the verdict."""
    fix: str | Mapping[str, str]
    """What to do, in the framework's own words where they differ."""

    def remedy(self, framework: str) -> str:
        """What to do about it in a framework."""
        return self.fix if isinstance(self.fix, str) else self.fix[framework]


CAUSES: Mapping[str, Cause] = {
    "not-tracked": Cause(
        "nothing tracks {wrt}",
        {
            "torch": "call requires_grad_(True) on it before it is used",
            "tensorflow": "call tape.watch(x) before it is used, if it is a plain tensor; otherwise set "
            "layer.trainable = True, or trainable of the variable",
            "jax": "make it an argument of the function and name it in argnums",
        },
    ),
    "integer": Cause(
        "{wrt} holds integers, which have no gradients",
        {
            "torch": "ask about the weight that it looks up, or make it floating point before, as in x.float()",
            "tensorflow": "ask about the weight that it looks up, or make it floating point: tf.cast(x, tf.float32)",
            "jax": "ask about the table that it looks up, or make it floating point before, as in x.astype(float)",
        },
    ),
    "non-leaf": Cause(
        "{wrt} is computed from other tensors, and those do not keep their .grad",
        "call retain_grad() on it before backward(), or use eg.grad",
    ),
    "unused": Cause("it is not computed from {wrt}", "use {wrt} in the computation, or ask about what is used"),
    "not-selected": Cause(
        "{operation} takes other elements than {wrt}",
        "ask about an element that is taken, or take a weighted mean such as softmax instead",
    ),
    "resliced": Cause(
        "{wrt} is another slice of the tensor than the one that was used",
        {
            "torch": "keep the slice in a variable, use that one and ask about it, or ask about the elements of the "
            "whole tensor",
            "tensorflow": "take the slice once, inside of the tape, use that one and ask about it, or ask for the "
            "gradient of the whole tensor and slice that",
            "jax": "ask about the elements of the whole array, as in wrt='x[0]'",
        },
    ),
    "detached": Cause(
        "{operation} cuts it off",
        {
            "torch": "leave {operation} out, or apply it only where no gradient is wanted",
            "tensorflow": "leave tf.stop_gradient out, or apply it only where no gradient is wanted",
            "jax": "leave stop_gradient out, or apply it only where no gradient is wanted",
        },
    ),
    "left-framework": Cause(
        "its numbers leave the framework in {operation}",
        {
            "torch": "stay with tensors: operations of torch instead of {operation}, torch.stack to put them together",
            "tensorflow": "stay with tensors: operations of tf instead of {operation}",
            "jax": "stay with arrays: functions of jnp instead of {operation}",
        },
    ),
    "no-grad": Cause(
        "{operation} runs where gradients are switched off",
        {
            "torch": "move it out of torch.no_grad() or inference_mode()",
            "tensorflow": "move it out of tape.stop_recording()",
            "jax": "move it out of stop_gradient",
        },
    ),
    "outside-tape": Cause(
        "{operation} is computed outside of what is recorded",
        {
            "torch": "compute it inside of the function",
            "tensorflow": "compute it inside of the with block of the tape",
            "jax": "use the argument of the function, and compute inside of it what depends on it",
        },
    ),
    "discrete": Cause(
        "{operation} gives whole numbers, truths or draws, which have no slope",
        "use a smooth stand-in: softmax for argmax, sigmoid for a comparison, eg.choose(..., hard=True) to choose",
    ),
    "step-function": Cause(
        "{operation} is flat between its steps",
        {
            "torch": "use a smooth stand-in, or pass it straight through: x + (x.round() - x).detach()",
            "tensorflow": "use a smooth stand-in, or pass it straight through: x + tf.stop_gradient(tf.round(x) - x)",
            "jax": "use a smooth stand-in, or pass it straight through: x + stop_gradient(jnp.round(x) - x)",
        },
    ),
    "assigned-state": Cause(
        "{operation} keeps the value and not where it came from",
        {
            "torch": "use the new value itself, and write it to the state afterwards",
            "tensorflow": "use the tensor itself instead of reading the variable that it was assigned to",
            "jax": "use the new value itself instead of the state that holds it",
        },
    ),
    "no-rule": Cause(
        "{operation} has no derivative",
        {
            "torch": "use an operation that has one, or write a torch.autograd.Function",
            "tensorflow": "use an operation that has one, or write a tf.custom_gradient",
            "jax": "use an operation that has one, or write a jax.custom_vjp",
        },
    ),
    "inner-gradient": Cause(
        "the inner gradient, {operation}, is computed without a graph of its own",
        {
            "torch": "call it with create_graph=True",
            "tensorflow": "compute it inside of the outer tape",
            "jax": "use the argument of the function, and compute inside of it what depends on it",
        },
    ),
    "custom-rule": Cause(
        "the derivative that was written for {operation} does not pass it on as it is",
        {
            "torch": "correct the backward of {operation}; torch.autograd.gradcheck tries it out",
            "tensorflow": "correct the gradient function of {operation}",
            "jax": "correct the custom rule of {operation}; jax.test_util.check_grads tries it out",
        },
    ),
    "hook": Cause("a hook changes the gradient on its way", "remove the hook, or have it return the gradient as it is"),
    "freed-graph": Cause(
        "the graph was used by an earlier backward and is gone",
        {
            "torch": "compute the loss anew in each step, with h = h.detach() between steps for a state that is "
            "carried over, or call the first backward with retain_graph=True",
            "tensorflow": "use tf.GradientTape(persistent=True) to ask a tape twice",
            "jax": "compute it anew",
        },
    ),
    "dead-relu": Cause(
        "{operation} is flat at its input, which is not above zero",
        "check the input of {operation} and its bias, lower the learning rate, or use leaky_relu or gelu; weights that "
        "are all zero need random numbers at the start",
    ),
    "saturated": Cause(
        "{operation} is so far out that its slope is zero in this precision",
        "scale its input down, normalise before it, or use a loss that takes logits",
    ),
    "clamped": Cause(
        "{operation} is flat beyond its bounds",
        "widen the bounds, or use a smooth bound such as tanh or softplus",
    ),
    "masked": Cause(
        "{operation} puts something else in its place",
        "let the mask keep {wrt}, or ask about an element that it keeps",
    ),
    "dropped": Cause(
        "{operation} dropped it in this run",
        {
            "torch": "call model.eval(), or look at the mean over several runs",
            "tensorflow": "call the model with training=False, or look at the mean over several runs",
            "jax": "pass deterministic=True, or look at the mean over several keys",
        },
    ),
    "row-not-used": Cause(
        "{operation} does not look up its row: the input does not contain that index, or it is the padding row",
        "feed an input that contains the index, or ask about a row that occurs",
    ),
    "out-of-range": Cause(
        "{operation} is given an index out of range, which reads the nearest element or NaN and drops its gradient",
        "check the indices before, as in assert (ids < len(table)).all()",
    ),
    "overwritten": Cause(
        "{operation} writes over it before it is used",
        {
            "torch": "write to a copy, as in x.clone(), or use eg.at(x)[...].set(value), which mutates nothing",
            "tensorflow": "use what was there before, or write to other elements; eg.at(x)[...].set(value) is a copy",
            "jax": "use what was there before: x.at[...].set(value) gives a new array and keeps x",
        },
    ),
    "modified-in-place": Cause(
        "{operation} changes in place what the gradient still needs",
        "use the function that gives a new tensor instead of {operation}, or work on a clone()",
    ),
    "modified-through-data": Cause(
        "{operation} writes behind autograd's back, so that the gradient is one for other numbers",
        "compute a new tensor where autograd sees it, as in h = h * 2; writing through .data or detach(), or inside of "
        "torch.no_grad(), is for leaves between two steps",
    ),
    "cancelled": Cause(
        "its contributions cancel in {operation}",
        "ask about one term, or change what is added up: a sum over a softmax is always 1",
    ),
    "underflow": Cause(
        "the numbers are too small for the precision in {operation}",
        {
            "torch": "compute it in a wider dtype (float32 for halves, float64 for float32), or scale the loss with "
            "torch.amp.GradScaler",
            "tensorflow": "compute it in a wider dtype (float32 for halves, float64 for float32), or use a "
            "LossScaleOptimizer",
            "jax": "compute it in a wider dtype (float32 for halves, float64 for float32), or scale the loss up",
        },
    ),
    "overflow": Cause(
        "the numbers become too large for the precision in {operation}",
        "compute it in a wider dtype, or scale or clamp its input",
    ),
    "masked-branch": Cause(
        "{operation} has no finite value or slope there, and that it is masked afterwards does not help",
        {
            "torch": "make the input safe: {operation}(torch.where(ok, x, 1.0)), and mask the result too",
            "tensorflow": "make the input safe: {operation}(tf.where(ok, x, 1.0)), and mask the result too",
            "jax": "make the input safe: {operation}(jnp.where(ok, x, 1.0)), and mask the result too",
        },
    ),
    "singular": Cause(
        "{operation} has no finite slope at this input",
        "keep the input away from there, or clamp it before",
    ),
    "accumulated": Cause(
        "its .grad holds the sum of several calls of backward()",
        "call optimizer.zero_grad() before backward(), or use eg.grad, which never accumulates",
    ),
    "tie": Cause(
        "it ties with another element in {operation}, which takes only one of them",
        {
            "torch": "use amax, which shares the gradient among those that tie",
            "tensorflow": "break the tie, or use reduce_max, which shares the gradient",
            "jax": "break the tie, or use jnp.max, which shares the gradient",
        },
    ),
    "stationary": Cause(
        "{operation} has a slope of zero at this input, as at a minimum",
        "nothing, if the input is meant to be there; otherwise move it off that point",
    ),
    "kink": Cause(
        "{operation} has a kink exactly there, and its slope at it is taken to be zero",
        "move the input off the kink, or use a smooth stand-in",
    ),
}
UNDECIDED = Cause(
    "what was seen does not decide why", "look at .evidence, and try eg.explain on a part of the computation"
)


_KILLERS = {
    "dead-relu": "relu relu_ relu6 threshold rrelu",
    "clamped": """
        clamp clamp_ clip clip_ clip_by_value clamp_min clamp_max hardtanh hardtanh_ hardsigmoid hardswish
        hard_sigmoid hard_tanh hard_silu hard_swish interp""",
    "masked": """
        where masked_fill masked_fill_ mul mul_ multiply div true_divide tril triu masked_scatter select_n
        nan_to_num nansum nanmean prod reduce_prod cumprod scaled_dot_product_attention attention boolean_mask
        multiply_no_nan divide_no_nan matrix_band_part band_part""",
    "dropped": "dropout dropout_ dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout",
    "row-not-used": "embedding embedding_bag embedding_lookup",
    "not-selected": """
        max min amax amin topk sort kthvalue median mode maximum minimum fmax fmin max_pool1d max_pool2d max_pool3d
        adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d
        scatter_reduce index_reduce reduce_max reduce_min cummax cummin maxpool max_pool top_k nanmax nanmin nanmedian
        segment_max segment_min unsorted_segment_max unsorted_segment_min reduce_window reduce_window_max
        reduce_window_min scatter_max scatter_min .at[].max .at[].min""",
    "unused": """
        indexing getitem select slice narrow index_select gather take take_along_dim masked_select split chunk unbind
        tensor_split strided_slice gather_nd dynamic_slice index diagonal diag trace
        take_along_axis index_in_dim dynamic_index_in_dim slice_in_dim dynamic_slice_in_dim array_split .at[].get""",
    "step-function": "round round_ floor floor_ ceil ceil_ trunc fix sign sgn heaviside floor_divide",
    "discrete": "bernoulli bernoulli_ multinomial normal poisson argmax argmin",
    "overwritten": """
        setitem copy_ fill_ zero_ index_put index_put_ scatter scatter_ index_fill index_fill_ index_copy index_copy_
        masked_scatter_ slice_scatter select_scatter dynamic_update_slice tensor_scatter_nd_update
        .at[].set dynamic_update_slice_in_dim dynamic_update_index_in_dim""",
    "saturated": """
        sigmoid sigmoid_ tanh tanh_ softmax log_softmax softmin erf logsigmoid gelu silu elu selu softplus mish celu
        softsign logistic swish cross_entropy sparse_softmax_cross_entropy_with_logits atan binary_cross_entropy
        logsumexp log_sigmoid logaddexp""",
    "cancelled": """
        sum mean add sub rsub sub_ add_ matmul mm bmm mv dot linear einsum conv1d conv2d conv3d layer_norm batch_norm
        group_norm instance_norm normalize baddbmm addmm reduce_sum reduce_mean dot_general cumsum
        bilinear dense subtract average vdot inner tensordot segment_sum""",
    "stationary": "var pow power square sin cos mse_loss smooth_l1_loss huber_loss cosh sinc",
    "underflow": "exp exp2",
    "kink": "abs absolute l1_loss norm linalg_norm linalg_vector_norm vector_norm cdist pdist std atan2 arctan2",
}
KILLS: Mapping[str, str] = {
    "item assignment": "overwritten",
    "eg.at(...).set": "overwritten",
    "eg.at(...).stop": "detached",
    "eg.at(...).only": "detached",
    "eg.at(...).get": "unused",
    "eg.at(...).multiply": "masked",
    **{word: cause for cause, words in _KILLERS.items() for word in words.split()},
}
"""For an operation, the cause that ends a derivative in it, unless the numbers say another."""
SATURATE = frozenset(_KILLERS["saturated"].split())
"""Operations that flatten out."""
SINGULAR = frozenset(
    """
    sqrt sqrt_ rsqrt log log_ log2 log10 log1p div true_divide div_ reciprocal pow power float_power divide norm
    linalg_norm linalg_vector_norm vector_norm cdist pdist acos asin atanh acosh xlogy logit std var normalize
    cosine_similarity truediv rdiv realdiv dist pairwise_distance binary_cross_entropy logdet slogdet atan2 logsumexp
    hypot arctan2 arccos arcsin arctanh arccosh pow_
    """.split()  # noqa: SIM905
)
"""Operations that have points without a finite slope."""
MATRICES = frozenset(
    "matmul mm bmm mv dot linear einsum baddbmm addmm dot_general dense vdot inner tensordot bilinear".split()  # noqa: SIM905
)
"""Sums of products: what is lost for some rows alone was multiplied by zero."""
QUOTIENTS = frozenset("div div_ true_divide divide truediv rdiv realdiv reciprocal".split())  # noqa: SIM905
"""Divisions, which multiply by zero only where their other part is zero or infinite."""
SELECT = frozenset(["where", "masked_fill", "masked_fill_", "select_n"])
"""Operations that put other numbers in the place of some."""
SUMMANDS = frozenset(["add", "add_", "sub", "sub_", "rsub", "subtract"])
"""Operations that add two numbers."""
NORMALISE = frozenset(["softmax", "log_softmax", "softmin", "logsumexp"])
"""Operations in which a masked element counts for nothing."""
BANDS = frozenset(["scaled_dot_product_attention", "attention", "tril", "triu", "matrix_band_part", "band_part"])
"""Operations with a mask of their own, which no tensor shows."""
GROWS = frozenset(
    "pow pow_ power float_power square div div_ true_divide divide truediv realdiv rdiv reciprocal".split()  # noqa: SIM905
)
"""Operations that give infinity for a zero that they take, or where numbers become too large."""


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
PHRASES = ("item assignment", LEAF_WRITE, MOVING_STATISTIC, ELSEWHERE, CONSTANT)
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
    yield "modified-in-place", LEAF_WRITE, "a tensor that requires gradients is written to in place", leaf
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
        MOVING_STATISTIC,
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
