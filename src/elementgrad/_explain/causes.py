"""The words for every cause: the clause that says what is wrong, and the fix, one table for all frameworks.

`CAUSES` has the general words, and `VARIANTS` closer ones where the operation says more than the cause alone:
"multiplies it by zero" for `mul` where the cause is `masked`. `{operation}`, `{of}` and `{wrt}` are filled in, and of
`<a|b|c>` a user of PyTorch reads a, one of TensorFlow b, and one of JAX c.
`CAUSE_BY_OPERATION` says what it usually means that a derivative goes into an operation and none comes out.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from elementgrad._explain import kinds
from elementgrad._explain.trace import LEAF_WRITE, MOVING_STATISTIC, NOTHING_TRACKED

Variant = tuple[str, str]
"""A cause and an operation, or a phrase that stands for one."""
FRAMEWORKS = ("torch", "tensorflow", "jax")
_ALTERNATIVES = re.compile(r"<([^<>|]*)\|([^<>|]*)\|([^<>|]*)>")


@dataclass(frozen=True)
class Cause:
    """The words for one cause."""

    clause: str
    """The clause that follows the verdict and says what is wrong."""
    fix: str
    """The remedy, with `<a|b|c>` where frameworks differ."""

    def fix_in(self, framework: str) -> str:
        return _ALTERNATIVES.sub(lambda texts: texts[1 + FRAMEWORKS.index(framework)], self.fix)


def words_for(cause: str | None, operation: str | None) -> Cause:
    """Return the words for a cause, closer ones where the operation has some."""
    if cause is None:
        return UNDECIDED
    return VARIANTS.get((cause, operation or ""), CAUSES[cause])


_WHERE = "<torch.where|tf.where|jnp.where>"
CAUSES: Mapping[str, Cause] = {
    "not-tracked": Cause(
        "nothing tracks {wrt}",
        "<call requires_grad_(True) on it before it is used|call tape.watch(x) before it is used, if it is a plain "
        "tensor; otherwise set layer.trainable = True, or trainable of the variable|make it an argument of the "
        "function and name it in argnums>",
    ),
    "integer": Cause(
        "{wrt} holds integers, which have no gradients",
        "take the gradient of the <weight|weight|table> that it indexes, or convert it<"
        " first, as in x.float()|: tf.cast(x, tf.float32)| first, as in x.astype(float)>",
    ),
    "non-leaf": Cause(
        "{wrt} is not a leaf: it is computed from other tensors, so its .grad is not kept",
        "call retain_grad() on it before backward(), or use eg.grad",
    ),
    "unused": Cause("it is not computed from {wrt}", "use {wrt} in the computation, or name a tensor that is used"),
    "not-selected": Cause(
        "{operation} selects other elements than {wrt}",
        "name an element that is selected, or use a weighted mean such as softmax instead",
    ),
    "resliced": Cause(
        "{wrt} is not the slice that was used, but a new one of the same tensor",
        "<keep the slice in a variable and use that variable everywhere, or name elements of the whole tensor|take the "
        "slice once, inside the tape, and use it everywhere, or take the gradient of the whole tensor and slice that|"
        "name elements of the whole array, as in wrt='x[0]'>",
    ),
    "detached": Cause(
        "{operation} cuts the gradient",
        "leave <{operation}|tf.stop_gradient|stop_gradient> out, or apply it only where no gradient is wanted",
    ),
    "left-framework": Cause(
        "its values leave the framework in {operation}",
        "use <operations of torch|operations of tf|functions of jnp> instead of {operation}<"
        ", and torch.stack to combine tensors||>",
    ),
    "no-grad": Cause(
        "{operation} runs where gradients are disabled",
        "move it out of <torch.no_grad() or inference_mode()|tape.stop_recording()|stop_gradient>",
    ),
    "outside-tape": Cause(
        "{operation} is computed outside of the recorded code",
        "<compute it inside the function|compute it inside the with block of the tape|use the argument of the "
        "function, and compute everything that depends on it inside the function>",
    ),
    "discrete": Cause(
        "{operation} returns integers, booleans or random draws, which have no gradient",
        "use a smooth substitute: softmax for argmax, sigmoid for a comparison, eg.choose(..., hard=True) to choose",
    ),
    "step-function": Cause(
        "{operation} is a step function, whose gradient is zero",
        "use a smooth substitute, or straight-through: x + <(x.round() - x).detach()|tf.stop_gradient(tf.round(x) - x)|"
        "stop_gradient(jnp.round(x) - x)>",
    ),
    "assigned-state": Cause(
        "{operation} stores the value, and not how it was computed",
        "use the <new value itself, and store it in the state afterwards|tensor itself instead of reading the variable "
        "that it was assigned to|new value itself instead of the state that stores it>",
    ),
    "no-rule": Cause(
        "{operation} has no derivative",
        "use an operation that has one, or write a <torch.autograd.Function|tf.custom_gradient|jax.custom_vjp>",
    ),
    "inner-gradient": Cause(
        "the inner gradient, {operation}, is computed without a graph",
        "<call it with create_graph=True|compute it inside the outer tape|use the argument of the function, and "
        "compute everything that depends on it inside the function>",
    ),
    "custom-rule": Cause(
        "the custom derivative of {operation} does not return the right gradient",
        "correct the <backward|gradient function|custom rule> of {operation}<; test it with torch.autograd.gradcheck||"
        "; test it with jax.test_util.check_grads>",
    ),
    "hook": Cause("a hook changes the gradient", "remove the hook, or let it return the gradient unchanged"),
    "freed-graph": Cause(
        "the graph was freed by an earlier backward",
        "<compute the loss again in each step, with h = h.detach() between steps for a state that is carried over, or "
        "call the first backward with retain_graph=True|use tf.GradientTape(persistent=True) to call gradient twice|"
        "compute it again>",
    ),
    "dead-relu": Cause(
        "the input of {operation} is not above zero, where its gradient is zero",
        "check the input of {operation} and its bias, lower the learning rate, or use leaky_relu or gelu; if all "
        "weights are zero, initialise them randomly",
    ),
    "saturated": Cause(
        "{operation} is saturated: its gradient is zero in this precision",
        "scale its input down, normalise before it, or use a loss that takes logits",
    ),
    "clamped": Cause(
        "the input of {operation} is beyond its bounds, where its gradient is zero",
        "widen the bounds, or use a smooth bound such as tanh or softplus",
    ),
    "masked": Cause(
        "{operation} replaces it by another value", "change the mask to keep {wrt}, or name an element that it keeps"
    ),
    "dropped": Cause(
        "{operation} dropped it in this run",
        "<call model.eval()|call the model with training=False|pass deterministic=True>, or average over several "
        "<runs|runs|keys>",
    ),
    "row-not-used": Cause(
        "{operation} does not look up its row: the input does not contain that index, or it is the padding row",
        "use an input that contains the index, or name a row that occurs",
    ),
    "out-of-range": Cause(
        "{operation} gets an index out of range, for which JAX reads the nearest element or NaN and drops the gradient",
        "check the indices first, as in assert (ids < len(table)).all()",
    ),
    "overwritten": Cause(
        "{operation} overwrites it before it is used",
        "<write to a copy, as in x.clone(), or use eg.at(x)[...].set(value), which returns a new tensor|use what was "
        "there before, or write to other elements; eg.at(x)[...].set(value) is a copy|use what was there before: "
        "x.at[...].set(value) gives a new array and keeps x>",
    ),
    "modified-in-place": Cause(
        "{operation} changes a tensor in place that the gradient still needs",
        "use the function that returns a new tensor instead of {operation}, or work on a clone()",
    ),
    "modified-through-data": Cause(
        "{operation} writes without autograd, so the gradient is that of other values",
        "compute a new tensor where autograd sees it, as in h = h * 2; writing through .data or detach(), or inside of "
        "torch.no_grad(), is for leaves between two steps",
    ),
    "cancelled": Cause(
        "its contributions cancel in {operation}",
        "look at one term, or change the sum: a softmax always sums to 1, and values minus their mean to 0",
    ),
    "underflow": Cause(
        "values in {operation} are too small for the precision",
        "compute it in a wider dtype (float32 for half precision, float64 for float32), or <scale the loss with "
        "torch.amp.GradScaler|use a LossScaleOptimizer|scale the loss up>",
    ),
    "overflow": Cause(
        "values in {operation} become too large for the precision",
        "compute it in a wider dtype, or scale or clamp its input",
    ),
    "masked-branch": Cause(
        "{operation} has no finite value or gradient there, and masking its result does not help",
        f"make the input safe: {{operation}}({_WHERE}(ok, x, 1.0)), and mask the result too",
    ),
    "singular": Cause(
        "{operation} has no finite gradient at this input", "keep the input away from there, or clamp it first"
    ),
    "accumulated": Cause(
        "its .grad is the sum of several calls of backward()",
        "call optimizer.zero_grad() before backward(), or use eg.grad, which never accumulates",
    ),
    "tie": Cause(
        "it is equal to another element in {operation}, which selects only one of them",
        "<use amax|break the tie, or use reduce_max|break the tie, or use jnp.max>, which distributes the gradient"
        "< over equal elements||>",
    ),
    "stationary": Cause(
        "{operation} has a gradient of zero at this input, as at a minimum",
        "nothing, if the input should be there; otherwise change the input",
    ),
    "kink": Cause(
        "{operation} has a kink exactly there, at which its gradient is defined as zero",
        "move the input away from the kink, or use a smooth substitute",
    ),
}
UNDECIDED = Cause("the cause could not be determined", "see .evidence, and try eg.explain on a part of the computation")


_OPERATIONS_BY_CAUSE = {
    "dead-relu": "relu relu_ relu6 threshold rrelu",
    "clamped": """
        clamp clamp_ clip clip_ clip_by_value clamp_min clamp_max hardtanh hardtanh_ hardsigmoid hardswish
        hard_sigmoid hard_tanh hard_silu hard_swish interp""",
    "masked": """
        where masked_fill masked_fill_ tril triu masked_scatter select_n
        nan_to_num nansum nanmean prod reduce_prod cumprod scaled_dot_product_attention attention boolean_mask
        multiply_no_nan divide_no_nan matrix_band_part band_part""",
    "dropped": "dropout dropout_ dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout",
    "row-not-used": "embedding embedding_bag embedding_lookup",
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
        sigmoid sigmoid_ tanh tanh_ erf logsigmoid gelu silu elu selu softplus mish celu softsign logistic swish atan
        binary_cross_entropy log_sigmoid logaddexp""",
    "cancelled": "rsub sub_ add_ normalize average segment_sum",
    "stationary": "var pow power square sin cos mse_loss smooth_l1_loss huber_loss cosh sinc",
    "underflow": "exp exp2",
    "kink": """
        abs absolute l1_loss norm linalg_norm linalg_vector_norm vector_norm cdist pdist dist pairwise_distance std
        atan2 arctan2""",
}
_CAUSE_BY_KIND = {
    kinds.LOWER_BOUND: "not-selected",
    kinds.UPPER_BOUND: "not-selected",
    kinds.CHOICE: "not-selected",
    kinds.SHARE: "saturated",
    kinds.PRODUCT: "masked",
    kinds.SUM: "cancelled",
    kinds.MATRIX_PRODUCT: "cancelled",
    kinds.NORM: "cancelled",
}
CAUSE_BY_OPERATION: Mapping[str, str] = {
    **{word: _CAUSE_BY_KIND[kind] for word, kind in kinds.KINDS.items() if kind in _CAUSE_BY_KIND},
    "item assignment": "overwritten",
    "eg.at(...).set": "overwritten",
    "eg.at(...).stop": "detached",
    "eg.at(...).only": "detached",
    "eg.at(...).get": "unused",
    "eg.at(...).multiply": "masked",
    **{word: cause for cause, words in _OPERATIONS_BY_CAUSE.items() for word in words.split()},
}
"""The cause that usually ends a derivative in an operation; the numbers may say another."""
SATURATING = frozenset(word for word, cause in CAUSE_BY_OPERATION.items() if cause == "saturated")
"""Operations that flatten out."""
MATRIX_PRODUCTS = frozenset(word for word, kind in kinds.KINDS.items() if kind == kinds.MATRIX_PRODUCT)
"""Sums of products: what is lost for some rows alone was multiplied by zero."""
SELECTING = frozenset(["where", "masked_fill", "masked_fill_", "select_n"])
"""Operations that replace some of the numbers."""
ADDITIONS = frozenset(["add", "add_", "sub", "sub_", "rsub", "subtract"])
"""Operations that add two numbers."""
SOFTMAXES = frozenset(["softmax", "log_softmax", "softmin", "logsumexp"])
"""Operations in which a masked element counts for nothing."""
OWN_MASK = frozenset(["scaled_dot_product_attention", "attention", "tril", "triu", "matrix_band_part", "band_part"])
"""Operations with a mask of their own, which no tensor shows."""
DIVISIONS = frozenset("div div_ true_divide divide truediv rdiv realdiv reciprocal".split())  # noqa: SIM905
"""Divisions, which multiply by zero only where their other part is zero or infinite."""
_ROOTS = """
    sqrt sqrt_ rsqrt norm linalg_norm linalg_vector_norm vector_norm cdist pdist dist pairwise_distance hypot
    normalize cosine_similarity euclidean_norm"""
_LOGS = "log log_ log2 log10 xlogy logit binary_cross_entropy"
_PRODUCTS = "mul mul_ multiply div true_divide divide prod reduce_prod cumprod multiply_no_nan divide_no_nan"
_ARCS = "acos asin atanh arccos arcsin arctanh"
_POWERS = "pow pow_ power float_power"
_DECOMPOSITIONS = "eig eigh linalg_eig linalg_eigh svd linalg_svd"
SINGULAR = DIVISIONS.union(
    *[words.split() for words in (_ROOTS, _LOGS, _ARCS, _POWERS, _DECOMPOSITIONS)],
    "log1p acosh arccosh std var logdet slogdet atan2 arctan2 logsumexp".split(),  # noqa: SIM905
)
"""Operations that have points without a finite slope."""
GROWING = DIVISIONS.union(_POWERS.split(), ["square"])
"""Operations that give infinity for an input of zero, or where numbers become too large."""
_COPIES = "tensor as_tensor asarray from_numpy new_tensor"
_POOLS = """
    max_pool max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
    fractional_max_pool2d fractional_max_pool3d reduce_window"""
_ORDERS = "topk top_k sort kthvalue median nanmedian mode cummax cummin"
_CROSS_ENTROPIES = """
    cross_entropy softmax_cross_entropy_with_logits sparse_softmax_cross_entropy_with_logits"""
_SEGMENTS = """
    segment_sum segment_max segment_min unsorted_segment_sum unsorted_segment_prod unsorted_segment_max
    unsorted_segment_min"""
ELSEWHERE = "another result"
"""Stands for the operation where the source is used for other results only."""
CONSTANT = "a constant"
"""Stands for the operation where the result is computed from plain numbers alone."""

_COPY_FIRST = "write to a clone(), as in y = x.clone(), or build it with torch.stack or torch.where"


def _variants(cause: str, operations: str | Iterable[str], fix: str, clause: str | None = None) -> dict[Variant, Cause]:
    """Return the words for a cause at some operations, given as one string of words or one by one."""
    words = operations.split() if isinstance(operations, str) else operations
    known = CAUSES[cause]
    return {(cause, word): replace(known, clause=clause or known.clause, fix=fix) for word in words}


def _safe(call: str) -> str:
    """Return the advice to replace what a call cannot take before it is called."""
    return f"make the input safe: {call}, and mask the result too"


VARIANTS: Mapping[Variant, Cause] = {
    **_variants(
        "singular",
        _ROOTS,
        "keep the argument of the root above zero, as in sqrt(x + 1e-12); or use the sum of squares without a root",
    ),
    **_variants(
        "singular",
        "std var",
        "give it several different values, or keep the variance above zero, as in sqrt(var + 1e-12)",
    ),
    **_variants("singular", _LOGS, "keep its input above zero, as in log(x + 1e-12), or clamp it first"),
    **_variants(
        "singular",
        _DECOMPOSITIONS,
        "use the eigenvalues or singular values alone, or move equal ones apart, as by adding a small diagonal matrix "
        "of different numbers",
        "{operation} has no finite gradient of its vectors where eigenvalues or singular values are equal",
    ),
    **_variants("singular", "log1p", "keep its input above -1, or clamp it first"),
    **_variants("singular", DIVISIONS, "keep the denominator away from zero, as in x / (y + 1e-12)"),
    **_variants(
        "singular",
        _ARCS,
        "keep its input inside its domain, as in {operation}(<x.clamp(|tf.clip_by_value(x, |jnp.clip(x, >-1 + 1e-6, "
        "1 - 1e-6))",
    ),
    **_variants("singular", _POWERS, "keep its base above zero, as in pow(x + 1e-12, p)"),
    **_variants("singular", "atan2 arctan2", "avoid that both inputs are zero, as in {operation}(y, x + 1e-12)"),
    **_variants("masked-branch", DIVISIONS, _safe(f"x / {_WHERE}(ok, y, 1.0)")),
    **_variants("masked-branch", _ARCS, _safe(f"{{operation}}({_WHERE}(ok, x, 0.0))")),
    **_variants("masked-branch", _POWERS, _safe(f"pow({_WHERE}(ok, x, 1.0), p)")),
    **_variants(
        "masked-branch",
        ("mul", "mul_", "multiply", *MATRIX_PRODUCTS),
        "replace it before {operation}, as in <torch.nan_to_num(x)|tf.where(tf.math.is_finite(x), x, 0.0)|"
        "jnp.nan_to_num(x)>, and mask the result too",
        "an input of {operation} is not finite, and masking the result does not help",
    ),
    **_variants(
        "masked",
        (*_PRODUCTS.split(), *MATRIX_PRODUCTS),
        "check the other factor of {operation}: a mask, or weights that are initially zero, which block all gradients "
        "and must be initialised randomly, as with <torch.nn.init.xavier_uniform_(weight)|"
        "kernel_initializer='glorot_uniform'|jax.nn.initializers.glorot_uniform()>",
        "{operation} multiplies it by zero",
    ),
    **_variants("masked", OWN_MASK, CAUSES["masked"].fix, "the mask of {operation} removes it"),
    **_variants(
        "masked",
        ADDITIONS,
        CAUSES["masked"].fix,
        "{operation} adds a large negative number, so that it has no weight",
    ),
    **_variants("masked", SOFTMAXES, CAUSES["masked"].fix, "{operation} gives it no weight, since its value is so low"),
    **_variants(
        "cancelled",
        "layer_norm group_norm instance_norm batch_norm",
        "normalise over several values: a single value minus its mean is always zero",
    ),
    **_variants(
        "dead-relu",
        "maximum fmax clamp clamp_min clip max",
        "nothing, if a hinge or a bound is intended; otherwise check the input, or use softplus",
    ),
    **_variants("modified-in-place", ["setitem", "item assignment"], _COPY_FIRST),
    **_variants(
        "modified-in-place",
        "add_ sub_ mul_ div_ pow_",
        "write x = x + y instead of x += y or x.add_(y), or work on a clone()",
    ),
    **_variants(
        "modified-in-place",
        [LEAF_WRITE],
        "update it inside torch.no_grad(), or write to a clone(), as in y = x.clone()",
        "a tensor that requires gradients is written to in place",
    ),
    **_variants(
        "modified-in-place",
        "optimizer.step",
        "call every backward() before optimizer.step(), or compute the second loss after it",
    ),
    **_variants(
        "no-grad",
        "checkpoint",
        "call checkpoint with use_reentrant=False",
        "it runs in a reentrant checkpoint, none of whose inputs requires gradients",
    ),
    **_variants(
        "discrete",
        "sample",
        "use rsample() instead of sample(), or a loss with log_prob() if there is no rsample()",
        "it is a random draw, and {operation} has no gradient",
    ),
    **_variants(
        "left-framework",
        _COPIES,
        "combine the tensors with torch.stack or torch.cat instead",
        "torch.{operation} copies the values without their graph",
    ),
    **_variants(
        "detached",
        "Parameter",
        "use the tensor itself, as with torch.nn.functional or torch.func.functional_call, and not a new Parameter",
        "a new {operation} copies the values without their graph",
    ),
    **_variants(
        "not-tracked",
        [MOVING_STATISTIC],
        "train <the weight and the bias|gamma and beta|the scale and the bias> of the layer; its statistics are "
        "updated from the data< in model.train() mode| when it is called with training=True|>",
        "{wrt} is a running statistic, which is not trained by gradients",
    ),
    **_variants(
        "cancelled",
        _CROSS_ENTROPIES,
        "it depends only on differences between classes: use two or more, and an input that changes them differently",
    ),
    **_variants(
        "tie",
        f"{_POOLS} {_ORDERS}",
        "nothing, if equal elements are interchangeable, such as zeros after a ReLU; otherwise name the selected one",
    ),
    **_variants(
        "unused",
        [ELSEWHERE],
        "name the result that {wrt} is used for, or add that result to the loss; otherwise do not train {wrt}",
    ),
    **_variants(
        "unused",
        [CONSTANT],
        "compute {of} from {wrt}, or name another result: this one is a constant",
        "it is a constant, which does not depend on any argument",
    ),
    **_variants(
        "not-tracked",
        [NOTHING_TRACKED],
        "compute {of} from the parameters or tensors that you train, and call requires_grad_(True) on those that are "
        "frozen",
        "nothing that {of} is computed from requires gradients",
    ),
    **_variants(
        "out-of-range",
        [f".at[].{write}" for write in ("set", "add", "subtract", "multiply", "divide", "power", "min", "max")],
        CAUSES["out-of-range"].fix,
        "{operation} gets an index out of range, and JAX drops what is written there",
    ),
    **_variants(
        "out-of-range",
        _SEGMENTS,
        "check the ids first, as in assert ((ids >= 0) & (ids < num_segments)).all()",
        "{operation} gets an id outside of the segments, and drops its elements",
    ),
    **_variants(
        "out-of-range",
        "dynamic_update_slice dynamic_update_slice_in_dim dynamic_update_index_in_dim",
        "check the start first, as in assert 0 <= start <= len(x) - len(update)",
        "{operation} gets a start out of range, for which JAX writes to the nearest place instead, and there over it",
    ),
    **_variants(
        "row-not-used",
        "padding_idx",
        "leave padding_idx out if the row should be trained, or name another row",
        "it is the padding row, which gets no gradient, by {operation}",
    ),
}
