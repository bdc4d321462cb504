"""What it means that a derivative goes into an operation and none comes out. The words are those of all frameworks."""

from collections.abc import Mapping

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
