"""The words for every cause: the clause that says what is wrong, and the fix, one table for all frameworks.

`_WORDS` has the general words of each cause, and after `at` closer ones where the operation says more than the cause
alone: "multiplies it by zero" for `mul` where the cause is `masked`. `{operation}`, `{of}` and `{wrt}` are filled in,
and of `<a|b|c>` a user of PyTorch reads a, one of TensorFlow b, and one of JAX c.
`CAUSE_BY_OPERATION` says what it usually means that a derivative goes into an operation and none comes out.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from elementgrad._explain import kinds

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


UNDECIDED = Cause("the cause could not be determined", "see .evidence, and try eg.explain on a part of the computation")
_WORDS = """
not-tracked
    nothing tracks {wrt}
    -> <call requires_grad_(True) on it before it is used|call tape.watch(x) before it is used, if it is a plain tensor;
    otherwise set layer.trainable = True, or trainable of the variable|make it an argument of the function and name it
    in argnums>
  at a moving statistic
    {wrt} is a running statistic, which is not trained by gradients
    -> train <the weight and the bias|gamma and beta|the scale and the bias> of the layer; its statistics are updated
    from the data< in model.train() mode| when it is called with training=True|>
  at a step without gradients
    nothing that {of} is computed from requires gradients
    -> compute {of} from the parameters or tensors that you train, and call requires_grad_(True) on those that are
    frozen
integer
    {wrt} holds integers, which have no gradients
    -> take the gradient of the <weight|weight|table> that it indexes, or convert it< first, as in x.float()|:
    tf.cast(x, tf.float32)| first, as in x.astype(float)>
non-leaf
    {wrt} is not a leaf: it is computed from other tensors, so its .grad is not kept
    -> call retain_grad() on it before backward(), or use eg.grad
unused
    it is not computed from {wrt}
    -> use {wrt} in the computation, or name a tensor that is used
  at another result
    -> name the result that {wrt} is used for, or add that result to the loss; otherwise do not train {wrt}
  at a constant
    it is a constant, which does not depend on any argument
    -> compute {of} from {wrt}, or name another result: this one is a constant
  at an empty tensor
    {operation} makes an empty tensor, which contributes nothing
    -> give {operation} an input with elements: its batch, or what was selected for it, is empty
not-selected
    {operation} selects other elements than {wrt}
    -> name an element that is selected, or use a weighted mean such as softmax instead
resliced
    {wrt} is not the slice that was used, but a new one of the same tensor
    -> <keep the slice in a variable and use that variable everywhere, or name elements of the whole tensor|take the
    slice once, inside the tape, and use it everywhere, or take the gradient of the whole tensor and slice that|name
    elements of the whole array, as in wrt='x[0]'>
detached
    {operation} cuts the gradient
    -> leave <{operation}|tf.stop_gradient|stop_gradient> out, or apply it only where no gradient is wanted
  at Parameter
    a new {operation} copies the values without their graph
    -> use the tensor itself, as with torch.nn.functional or torch.func.functional_call, and not a new Parameter
left-framework
    its values leave the framework in {operation}
    -> use <operations of torch|operations of tf|functions of jnp> instead of {operation}<, and torch.stack to combine
    tensors||>
  at COPIES
    torch.{operation} copies the values without their graph
    -> combine the tensors with torch.stack or torch.cat instead
no-grad
    {operation} runs where gradients are disabled
    -> move it out of <torch.no_grad() or inference_mode()|tape.stop_recording()|stop_gradient>
  at checkpoint
    it runs in a reentrant checkpoint, none of whose inputs requires gradients
    -> call checkpoint with use_reentrant=False
outside-tape
    {operation} is computed outside of the recorded code
    -> <compute it inside the function|compute it inside the with block of the tape|use the argument of the function,
    and compute everything that depends on it inside the function>
discrete
    {operation} returns integers, booleans or random draws, which have no gradient
    -> use a smooth substitute: softmax for argmax, sigmoid for a comparison, eg.choose(..., hard=True) to choose
  at sample
    it is a random draw, and {operation} has no gradient
    -> use rsample() instead of sample(), or a loss with log_prob() if there is no rsample()
step-function
    {operation} is a step function, whose gradient is zero
    -> use a smooth substitute, or straight-through: x + <(x.round() - x).detach()|tf.stop_gradient(tf.round(x) -
    x)|stop_gradient(jnp.round(x) - x)>
assigned-state
    {operation} stores the value, and not how it was computed
    -> use the <new value itself, and store it in the state afterwards|tensor itself instead of reading the variable
    that it was assigned to|new value itself instead of the state that stores it>
no-rule
    {operation} has no derivative
    -> use an operation that has one, or write a <torch.autograd.Function|tf.custom_gradient|jax.custom_vjp>
inner-gradient
    the inner gradient, {operation}, is computed without a graph
    -> <call it with create_graph=True|compute it inside the outer tape|use the argument of the function, and compute
    everything that depends on it inside the function>
custom-rule
    the custom derivative of {operation} does not return the right gradient
    -> correct the <backward|gradient function|custom rule> of {operation}<; test it with torch.autograd.gradcheck||;
    test it with jax.test_util.check_grads>
hook
    a hook changes the gradient
    -> remove the hook, or let it return the gradient unchanged
freed-graph
    the graph was freed by an earlier backward
    -> <compute the loss again in each step, with h = h.detach() between steps for a state that is carried over, or call
    the first backward with retain_graph=True|use tf.GradientTape(persistent=True) to call gradient twice|compute it
    again>
dead-relu
    the input of {operation} is not above zero, where its gradient is zero
    -> check the input of {operation} and its bias, lower the learning rate, or use leaky_relu or gelu; if all weights
    are zero, initialise them randomly
  at maximum, fmax, clamp, clamp_min, clip, max
    -> nothing, if a hinge or a bound is intended; otherwise check the input, or use softplus
saturated
    {operation} is saturated: its gradient is zero in this precision
    -> scale its input down, normalise before it, or use a loss that takes logits
clamped
    the input of {operation} is beyond its bounds, where its gradient is zero
    -> widen the bounds, or use a smooth bound such as tanh or softplus
masked
    {operation} replaces it by another value
    -> change the mask to keep {wrt}, or name an element that it keeps
  at PRODUCTS, MATRIX_PRODUCTS, NORMS
    {operation} multiplies it by zero
    -> check the other factor of {operation}: a mask, or weights that are initially zero, which block all gradients and
    must be initialised randomly, as with
    <torch.nn.init.xavier_uniform_(weight)|kernel_initializer='glorot_uniform'|jax.nn.initializers.glorot_uniform()>
  at OWN_MASK
    the mask of {operation} removes it
  at ADDITIONS
    {operation} adds a large negative number, so that it has no weight
  at SHARES
    {operation} gives it no weight, since its value is so low
dropped
    {operation} dropped it in this run
    -> <call model.eval()|call the model with training=False|pass deterministic=True>, or average over several
    <runs|runs|keys>
row-not-used
    {operation} does not look up its row: the input does not contain that index, or it is the padding row
    -> use an input that contains the index, or name a row that occurs
  at padding_idx
    it is the padding row, which gets no gradient, by {operation}
    -> leave padding_idx out if the row should be trained, or name another row
out-of-range
    {operation} gets an index out of range, for which JAX reads the nearest element or NaN and drops the gradient
    -> check the indices first, as in assert (ids < len(table)).all()
  at WRITES
    {operation} gets an index out of range, and JAX drops what is written there
  at SEGMENTS
    {operation} gets an id outside of the segments, and drops its elements
    -> check the ids first, as in assert ((ids >= 0) & (ids < num_segments)).all()
  at dynamic_update_slice, dynamic_update_slice_in_dim, dynamic_update_index_in_dim
    {operation} gets a start out of range, for which JAX writes to the nearest place instead, and there over it
    -> check the start first, as in assert 0 <= start <= len(x) - len(update)
overwritten
    {operation} overwrites it before it is used
    -> <write to a copy, as in x.clone(), or use eg.at(x)[...].set(value), which returns a new tensor|use what was there
    before, or write to other elements; eg.at(x)[...].set(value) is a copy|use what was there before:
    x.at[...].set(value) gives a new array and keeps x>
modified-in-place
    {operation} changes a tensor in place that the gradient still needs
    -> use the function that returns a new tensor instead of {operation}, or work on a clone()
  at setitem, item assignment
    -> write to a clone(), as in y = x.clone(), or build it with torch.stack or torch.where
  at add_, sub_, mul_, div_, pow_
    -> write x = x + y instead of x += y or x.add_(y), or work on a clone()
  at a write in place to a leaf
    a tensor that requires gradients is written to in place
    -> update it inside torch.no_grad(), or write to a clone(), as in y = x.clone()
  at optimizer.step
    -> call every backward() before optimizer.step(), or compute the second loss after it
modified-through-data
    {operation} writes without autograd, so the gradient is that of other values
    -> compute a new tensor where autograd sees it, as in h = h * 2; writing through .data or detach(), or inside of
    torch.no_grad(), is for leaves between two steps
cancelled
    its contributions cancel in {operation}
    -> look at one term, or change the sum: a softmax always sums to 1, and values minus their mean to 0
  at layer_norm, group_norm, instance_norm, batch_norm
    -> normalise over several values: a single value minus its mean is always zero
  at CROSS_ENTROPIES
    -> it depends only on differences between classes: use two or more, and an input that changes them differently
underflow
    values in {operation} are too small for the precision
    -> compute it in a wider dtype (float32 for half precision, float64 for float32), or <scale the loss with
    torch.amp.GradScaler|use a LossScaleOptimizer|scale the loss up>
overflow
    values in {operation} become too large for the precision
    -> compute it in a wider dtype, or scale or clamp its input
masked-branch
    {operation} has no finite value or gradient there, and masking its result does not help
    -> make the input safe: {operation}(<torch.where|tf.where|jnp.where>(ok, x, 1.0)), and mask the result too
  at DIVISIONS
    -> make the input safe: x / <torch.where|tf.where|jnp.where>(ok, y, 1.0), and mask the result too
  at ARCS
    -> make the input safe: {operation}(<torch.where|tf.where|jnp.where>(ok, x, 0.0)), and mask the result too
  at POWERS
    -> make the input safe: pow(<torch.where|tf.where|jnp.where>(ok, x, 1.0), p), and mask the result too
  at MATRIX_PRODUCTS, mul, mul_, multiply
    an input of {operation} is not finite, and masking the result does not help
    -> replace it before {operation}, as in <torch.nan_to_num(x)|tf.where(tf.math.is_finite(x), x,
    0.0)|jnp.nan_to_num(x)>, and mask the result too
singular
    {operation} has no finite gradient at this input
    -> keep the input away from there, or clamp it first
  at ROOTS
    -> keep the argument of the root above zero, as in sqrt(x + 1e-12); or use the sum of squares without a root
  at std, var
    -> give it several different values, or keep the variance above zero, as in sqrt(var + 1e-12)
  at LOGS
    -> keep its input above zero, as in log(x + 1e-12), or clamp it first
  at DECOMPOSITIONS
    {operation} has no finite gradient of its vectors where eigenvalues or singular values are equal
    -> use the eigenvalues or singular values alone, or move equal ones apart, as by adding a small diagonal matrix of
    different numbers
  at log1p
    -> keep its input above -1, or clamp it first
  at DIVISIONS
    -> keep the denominator away from zero, as in x / (y + 1e-12)
  at ARCS
    -> keep its input inside its domain, as in {operation}(<x.clamp(|tf.clip_by_value(x, |jnp.clip(x, >-1 + 1e-6, 1 -
    1e-6))
  at POWERS
    -> keep its base above zero, as in pow(x + 1e-12, p)
  at atan2, arctan2
    -> avoid that both inputs are zero, as in {operation}(y, x + 1e-12)
accumulated
    its .grad is the sum of several calls of backward()
    -> call optimizer.zero_grad() before backward(), or use eg.grad, which never accumulates
tie
    it is equal to another element in {operation}, which selects only one of them
    -> <use amax|break the tie, or use reduce_max|break the tie, or use jnp.max>, which distributes the gradient< over
    equal elements||>
  at POOLS, ORDERS
    -> nothing, if equal elements are interchangeable, such as zeros after a ReLU; otherwise name the selected one
stationary
    {operation} has a gradient of zero at this input, as at a minimum
    -> nothing, if the input should be there; otherwise change the input
kink
    {operation} has a kink exactly there, at which its gradient is defined as zero
    -> move the input away from the kink, or use a smooth substitute
"""
"""For each cause the clause, after an arrow the fix, and the same again for operations or groups of them."""
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
_OPERATIONS_BY_GROUP = {
    "SELECTING": "where masked_fill masked_fill_ select_n",
    "ADDITIONS": "add add_ sub sub_ rsub subtract",
    "OWN_MASK": "scaled_dot_product_attention attention tril triu matrix_band_part band_part",
    "DIVISIONS": "div div_ true_divide divide truediv rdiv realdiv reciprocal",
    "ROOTS": """
        sqrt sqrt_ rsqrt norm linalg_norm linalg_vector_norm vector_norm cdist pdist dist pairwise_distance
        hypot normalize cosine_similarity euclidean_norm""",
    "LOGS": "log log_ log2 log10 xlogy logit binary_cross_entropy",
    "PRODUCTS": """
        mul mul_ multiply div true_divide divide prod reduce_prod cumprod multiply_no_nan divide_no_nan""",
    "ARCS": "acos asin atanh arccos arcsin arctanh",
    "POWERS": "pow pow_ power float_power",
    "DECOMPOSITIONS": "eig eigh linalg_eig linalg_eigh svd linalg_svd",
    "OTHER_SINGULAR": "log1p acosh arccosh std var logdet slogdet atan2 arctan2 logsumexp",
    "COPIES": "tensor as_tensor asarray from_numpy new_tensor",
    "POOLS": """
        max_pool max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
        fractional_max_pool2d fractional_max_pool3d reduce_window""",
    "ORDERS": "topk top_k sort kthvalue median nanmedian mode cummax cummin",
    "CROSS_ENTROPIES": """
        cross_entropy softmax_cross_entropy_with_logits sparse_softmax_cross_entropy_with_logits""",
    "WRITES": """
        .at[].set .at[].add .at[].subtract .at[].multiply .at[].divide .at[].power .at[].min .at[].max""",
    "SEGMENTS": """
        segment_sum segment_max segment_min unsorted_segment_sum unsorted_segment_prod unsorted_segment_max
        unsorted_segment_min""",
}
GROUPS: Mapping[str, frozenset[str]] = {
    "MATRIX_PRODUCTS": frozenset(word for word, kind in kinds.KINDS.items() if kind == kinds.MATRIX_PRODUCT),
    "NORMS": frozenset(word for word, kind in kinds.KINDS.items() if kind == kinds.NORM),
    "SHARES": frozenset(word for word, kind in kinds.KINDS.items() if kind == kinds.SHARE),
    **{name: frozenset(words.split()) for name, words in _OPERATIONS_BY_GROUP.items()},
}
"""Groups of operations, by their names in the table of words."""
MATRIX_PRODUCTS = GROUPS["MATRIX_PRODUCTS"]
"""Sums of products: what is lost for some rows alone was multiplied by zero."""
SHARES = GROUPS["SHARES"]
"""Operations in which a masked element counts for nothing."""
SELECTING = GROUPS["SELECTING"]
"""Operations that replace some of the numbers."""
ADDITIONS = GROUPS["ADDITIONS"]
"""Operations that add two numbers."""
OWN_MASK = GROUPS["OWN_MASK"]
"""Operations with a mask of their own, which no tensor shows."""
DIVISIONS = GROUPS["DIVISIONS"]
"""Divisions, which multiply by zero only where their other part is zero or infinite."""
SINGULAR = frozenset().union(
    *[GROUPS[name] for name in ("DIVISIONS", "ROOTS", "LOGS", "ARCS", "POWERS", "DECOMPOSITIONS", "OTHER_SINGULAR")]
)
"""Operations that have points without a finite slope."""
GROWING = DIVISIONS | GROUPS["POWERS"] | {"square"}
"""Operations that give infinity for an input of zero, or where numbers become too large."""
ELSEWHERE = "another result"
"""Stands for the operation where the source is used for other results only."""
CONSTANT = "a constant"
"""Stands for the operation where the result is computed from plain numbers alone."""
EMPTY = "an empty tensor"
"""Stands for the operation where its result has no elements."""


def _parse_words() -> tuple[dict[str, Cause], dict[Variant, Cause]]:
    causes: dict[str, Cause] = {}
    variants: dict[Variant, Cause] = {}
    for block in re.split(r"\n(?=\S)", _WORDS.strip()):
        name, _, words = block.partition("\n")
        general, *closer = words.split("\n  at ")
        causes[name] = _parse_cause(general, Cause("", ""))
        for part in closer:
            groups, _, words = part.partition("\n")
            operations = [operation for group in groups.split(", ") for operation in GROUPS.get(group, [group])]
            variants |= dict.fromkeys([(name, each) for each in operations], _parse_cause(words, causes[name]))
    return causes, variants


def _parse_cause(words: str, general: Cause) -> Cause:
    clause, _, fix = " ".join(words.split()).partition("-> ")
    return Cause(clause.strip() or general.clause, fix or general.fix)


CAUSES, VARIANTS = _parse_words()
