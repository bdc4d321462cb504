"""How sets of reach go through the operations of JAX. What is not named here is taken to mix everything."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from elementgrad.backends.jax.reaching.following import Follower, Rule, everything, known
from elementgrad.backends.jax.reaching.indexing import INDEXING
from elementgrad.sparsity.products import convolution, product, transposed_windows
from elementgrad.sparsity.value import Reached, Value, reached

ELEMENTWISE = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp complex conj
convert_element_type copy cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma
igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min name ne neg
nextafter not optimization_barrier or polygamma pow pvary random_gamma_grad real reduce_precision
regularized_incomplete_beta rem round rsqrt sharding_constraint sign sin sinh sqrt square stop_gradient sub tan tanh
xor zeta
"""
REDUCING = "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin"
CUMULATIVE = "cumsum cumprod cummax cummin cumlogsumexp"
WINDOWS = "reduce_window_sum reduce_window_max reduce_window_min select_and_gather_add"


def elementwise(follower: Follower, equation: Any, operands: list[Value]) -> list[Value]:
    """Each element of the result depends on those of the operands in its place; several results go one to one."""
    if len(equation.outvars) > 1:
        return operands
    return [Reached(np.broadcast_to(follower.reach.union(*reached(operands)), equation.outvars[0].aval.shape))]


def multiplied(follower: Follower, equation: Any, operands: list[Value]) -> list[Value]:
    """Elementwise, and nothing where a factor is known to be zero."""
    (result,) = elementwise(follower, equation, operands)
    for value in operands:
        if known(value):
            result = Reached(np.where(np.asarray(value) != 0, result.ids, 0))
    return [result]


def chosen(follower: Follower, equation: Any, operands: list[Value]) -> list[Value]:
    """`select_n`: by a known choice one of the cases, else any."""
    which, *cases = operands
    if not known(which):
        return elementwise(follower, equation, operands)
    shape = equation.outvars[0].aval.shape
    sets = [follower.ids(value, variable) for value, variable in zip(cases, equation.invars[1:], strict=True)]
    which = np.broadcast_to(np.asarray(which).astype(np.int64), shape)
    return [Reached(np.select([which == number for number in range(len(sets))], sets))]


def moved(follower: Follower, equation: Any, operands: list[Value]) -> list[Value]:
    """The operation itself, on numbers of sets."""
    pairs = zip(operands, equation.invars, strict=True)
    sets = [follower.ids(value, variable) for value, variable in pairs]
    results = MOVING[equation.primitive.name](equation.params, *sets)
    return [Reached(result) for result in (results if len(equation.outvars) > 1 else [results])]


def _broadcast(params: Any, x: np.ndarray) -> np.ndarray:
    shape = [1] * len(params["shape"])
    for axis, size in zip(params["broadcast_dimensions"], x.shape, strict=True):
        shape[axis] = size
    return np.broadcast_to(x.reshape(shape), params["shape"])


def _padded(params: Any, x: np.ndarray, filling: np.ndarray) -> np.ndarray:
    """With gaps inside first, then more or less outside."""
    gaps = [gap for *_, gap in params["padding_config"]]
    spread = np.full([n + max(0, n - 1) * gap for n, gap in zip(x.shape, gaps, strict=True)], filling)
    spread[tuple([slice(None, None, gap + 1) for gap in gaps])] = x
    sides = [(low, high) for low, high, _ in params["padding_config"]]
    around = [(max(0, low), max(0, high), n) for (low, high), n in zip(sides, spread.shape, strict=True)]
    more = np.full([low + n + high for low, high, n in around], filling)  # `np.pad` refuses an array without axes
    more[tuple([slice(low, low + n) for low, _, n in around])] = spread
    cut = [slice(max(0, -low), n - max(0, -high)) for n, (low, high) in zip(more.shape, sides, strict=True)]
    return more[tuple(cut)]


def _sliced(params: Any, x: np.ndarray) -> np.ndarray:
    steps = params["strides"] or [1] * x.ndim
    return x[tuple(map(slice, params["start_indices"], params["limit_indices"], steps))]


MOVING: dict[str, Callable[..., Any]] = {
    "reshape": lambda params, x: x.transpose(params["dimensions"] or range(x.ndim)).reshape(params["new_sizes"]),
    "transpose": lambda params, x: x.transpose(params["permutation"]),
    "broadcast_in_dim": _broadcast,
    "slice": _sliced,
    "squeeze": lambda params, x: x.squeeze(params["dimensions"]),
    "rev": lambda params, x: np.flip(x, params["dimensions"]),
    "concatenate": lambda params, *xs: np.concatenate(xs, params["dimension"]),
    "pad": _padded,
    "split": lambda params, x: np.split(x, np.cumsum(params["sizes"])[:-1], params["axis"]),
    "stack": lambda params, *xs: np.stack(xs, params["axis"]),
    "unstack": lambda params, x: list(np.moveaxis(x, params["axis"], 0)),
    "tile": lambda params, x: np.tile(x, params["reps"]),
}
"""Operations that only move data. NumPy's own are used, since JAX compiles each anew for a new shape."""


def reduced(follower: Follower, equation: Any, operands: list[Value]) -> list[Value]:
    """The union over some axes."""
    return [Reached(follower.reach.over(operands[0].ids, equation.params["axes"]))]


def accumulated(follower: Follower, equation: Any, operands: list[Value]) -> list[Value]:
    """The union of all up to each, along an axis."""
    return [Reached(follower.reach.along(operands[0].ids, equation.params["axis"], equation.params["reverse"]))]


def mixed(axes: Any, follower: Follower, equation: Any, operands: list[Value]) -> list[Value]:
    """Everything along some axes mixes, of all operands, and nothing across the others."""
    results = []
    for variable in equation.outvars:
        shape = variable.aval.shape
        along = [axis % len(shape) for axis in axes(equation)]
        sets = [
            follower.reach.over(value.ids, along, keepdims=True) for value in operands if isinstance(value, Reached)
        ]
        results.append(Reached(np.broadcast_to(follower.reach.union(*sets), shape)))
    return results


def windowed(follower: Follower, equation: Any, operands: list[Value]) -> list[Value]:
    """The union over windows."""
    params = equation.params
    sets = follower.reach.union(*reached(operands))
    window = params["window_dimensions"], params["window_strides"], params["padding"]
    return [Reached(follower.reach.windows(sets, *window, params["window_dilation"], params["base_dilation"]))]


def scattered_windows(follower: Follower, equation: Any, operands: list[Value]) -> list[Value]:
    """Each window's number goes to one of its elements, nobody knows which."""
    source, operand = operands
    if isinstance(operand, Reached):
        return everything(follower, equation, operands)
    params, shape = equation.params, equation.outvars[0].aval.shape
    window = params["window_dimensions"], params["window_strides"], params["padding"]
    return [Reached(transposed_windows(follower.reach, source.ids, shape, *window))]


def contracted(follower: Follower, equation: Any, operands: list[Value]) -> list[Value]:
    """`dot_general`: each side that depends on the seed in turn, as if the other did not."""
    (left_sum, right_sum), (left_stack, right_stack) = equation.params["dimension_numbers"]
    left, right = operands
    shape = equation.outvars[0].aval.shape
    left_shape, right_shape = (variable.aval.shape for variable in equation.invars)
    ends = (left_shape, left_stack, left_sum), (right_shape, right_stack, right_sum)
    found = []
    for this, other, (mine, theirs), flipped in ((left, right, ends, False), (right, left, ends[::-1], True)):
        if isinstance(this, Reached):
            ids = _stack(this.ids, *mine[1:], first=True)
            mask = _stack(np.asarray(other) != 0, *theirs[1:], first=False) if known(other) else None
            width = int(np.prod([n for axis, n in enumerate(theirs[0]) if axis not in (*theirs[1], *theirs[2])]))
            through = product(follower.reach, ids, mask, width)
            found.append((through.transpose(0, 2, 1) if flipped else through).reshape(shape))
    return [Reached(follower.reach.union(*found))]


def _stack(x: np.ndarray, stack: Sequence[int], summed: Sequence[int], first: bool) -> np.ndarray:
    """Three axes: those of stacks, those that stay and those that are summed over; or the last two the other way."""
    free = [axis for axis in range(x.ndim) if axis not in (*stack, *summed)]
    counts = [int(np.prod([x.shape[axis] for axis in axes])) for axes in (stack, free, summed)]
    array = x.transpose([*stack, *free, *summed]).reshape(counts)
    return array if first else array.transpose(0, 2, 1)


def convolved(follower: Follower, equation: Any, operands: list[Value]) -> list[Value]:
    """A convolution, of the image with a kernel and of the kernel with an image."""
    params = equation.params
    if params["batch_group_count"] > 1:
        return everything(follower, equation, operands)
    image, kernel = operands
    of_image, of_kernel, of_result = params["dimension_numbers"]
    back = np.argsort(of_result)
    shape = np.array(equation.outvars[0].aval.shape)[list(of_result)]
    found = []
    if isinstance(image, Reached):
        mask = np.asarray(kernel) != 0 if known(kernel) else np.ones(equation.invars[1].aval.shape, dtype=bool)
        steps = params["window_strides"], params["padding"], params["rhs_dilation"], params["lhs_dilation"]
        masked = mask.transpose(of_kernel)
        found.append(
            convolution(follower.reach, image.ids.transpose(of_image), masked, *steps, params["feature_group_count"])
        )
    if isinstance(kernel, Reached):
        ids = kernel.ids.transpose(of_kernel)
        each = follower.reach.over(ids.reshape(len(ids), -1), [1]).reshape(1, -1, *[1] * (len(shape) - 2))
        found.append(np.broadcast_to(each, shape))
    return [Reached(follower.reach.union(*found).transpose(back))]


def triangular(follower: Follower, equation: Any, operands: list[Value]) -> list[Value]:
    """A triangular system: along the side of the matrix everything mixes."""
    matrix, right = operands
    axis = -2 if equation.params["left_side"] else -1
    shape = equation.outvars[0].aval.shape
    found = []
    if isinstance(right, Reached):
        found.append(follower.reach.over(right.ids, [axis], keepdims=True))
    if isinstance(matrix, Reached):
        found.append(follower.reach.over(matrix.ids, [-1, -2], keepdims=True))
    return [Reached(np.broadcast_to(follower.reach.union(*found), shape))]


def transformed(follower: Follower, equation: Any, operands: list[Value]) -> list[Value]:
    """A Fourier transform, over the last axes."""
    axes = range(-len(equation.params["fft_lengths"]), 0)
    whole = follower.reach.over(operands[0].ids, axes, keepdims=True)
    return [Reached(np.broadcast_to(whole, equation.outvars[0].aval.shape))]


RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE.split(), elementwise),
    **dict.fromkeys(MOVING, moved),
    **dict.fromkeys(REDUCING.split(), reduced),
    **dict.fromkeys(CUMULATIVE.split(), accumulated),
    **dict.fromkeys(WINDOWS.split(), windowed),
    **INDEXING,
    "mul": multiplied,
    "select_n": chosen,
    "sort": partial(mixed, lambda equation: [equation.params["dimension"]]),
    "select_and_scatter_add": scattered_windows,
    "dot_general": contracted,
    "conv_general_dilated": convolved,
    "triangular_solve": triangular,
    "fft": transformed,
}
