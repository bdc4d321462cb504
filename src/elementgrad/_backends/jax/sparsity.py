"""Sparsity patterns of JAX functions: the jaxpr of one sweep, followed equation by equation.

`RULES` at the end is the table from primitives to rules; `_sparsity/rules.py` has those that frameworks share. What
has no rule is taken to mix everything. The derivative of a composite function such as softmax is mul, sum and sub.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import GatherDimensionNumbers, GatherScatterMode
from jax.lax import gather as lax_gather

from elementgrad._backends.jax._compat import dce_jaxpr, jaxprs_in_params, scan_sizes
from elementgrad._backends.jax.program import FOLLOWED, bind, evaluate, is_reverse_only
from elementgrad._sparsity import rules
from elementgrad._sparsity.index_sets import Ids, IndexSets
from elementgrad._sparsity.pattern import Pattern
from elementgrad._sparsity.rules import (
    UNKNOWN,
    DependentValue,
    Propagator,
    Rule,
    Value,
    dependent_ids,
    elementwise,
    everything,
    mix,
    multiply,
    spread,
)

Array = jax.Array
MAX_UNROLLED = 4000
"""A loop of this many operations is followed in every turn; a longer one until nothing new is reached."""
INNER = {
    **FOLLOWED,
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}
"""The calls whose results are those of their inner program, and the parameter that has it. The program of a sweep has
applied custom rules already."""


def pattern_everywhere(function: Callable[[Array], Array], x: Array) -> Pattern:
    """Return the pattern of a function at every x of this shape."""
    forward = jax.make_jaxpr(lambda x, t: jax.jvp(function, (x,), (t,))[1])(x, x)
    if not is_reverse_only(forward.jaxpr):
        return _follow(forward, x.shape)
    y = jax.eval_shape(function, x)
    return _follow(jax.make_jaxpr(lambda x, u: jax.vjp(function, x)[1](u)[0])(x, y), y.shape).T


def pattern_here(sweep: Callable[[Array], Array], x: Array) -> Pattern:
    """Return the pattern of a forward sweep, a linear function of x whose constants are all known."""
    forward = jax.make_jaxpr(sweep)(x)
    if not is_reverse_only(forward.jaxpr):
        return _follow(forward, x.shape)
    y = jax.eval_shape(sweep, x)
    return _follow(jax.make_jaxpr(lambda u: jax.linear_transpose(sweep, x)(u)[0])(y), y.shape).T


def _follow(program: Any, shape: Sequence[int]) -> Pattern:
    """Return a row for each element of a program's result, with the elements of its last input that it depends on."""
    jaxpr, _ = dce_jaxpr(program.jaxpr, [True], instantiate=True)
    sets = IndexSets(math.prod(shape))
    propagator = JaxprPropagator(sets)
    operands = [*[UNKNOWN] * (len(jaxpr.invars) - 1), DependentValue(sets.seed_ids(shape))]
    with jax.ensure_compile_time_eval():
        (result,) = propagator.run(program.replace(jaxpr=jaxpr), operands)
    return sets.pattern(propagator.ids(result, program.out_avals[0].shape))


class JaxprPropagator(Propagator):
    """Follows jaxprs."""

    def run(self, program: Any, operands: Sequence[Value]) -> list[Value]:
        """Return the results of a program for these operands; its constants are known."""
        jaxpr, consts = getattr(program, "jaxpr", program), getattr(program, "consts", ())
        consts = [const if self.is_known(const) else UNKNOWN for const in consts]
        return evaluate(jaxpr, consts, operands, self._step)

    def _step(self, equation: Any, operands: list[Value]) -> Sequence[Value]:
        name = equation.primitive.name
        if all(map(self.is_known, operands)) and not equation.effects:
            return bind(equation, operands)
        if name in INNER:
            return self.run(equation.params[INNER[name]], operands)
        if not dependent_ids(operands):
            return [UNKNOWN] * len(equation.outvars)
        return RULES.get(name, everything)(self, equation, operands)

    def is_known(self, value: Value) -> bool:
        return value is not UNKNOWN and not isinstance(value, (DependentValue, jax.core.Tracer))

    def to_array(self, value: Value) -> np.ndarray:
        return np.asarray(value)

    def input_shapes(self, op: Any) -> Sequence[Any]:
        return [getattr(variable.aval, "shape", ()) for variable in op.invars]

    def output_shapes(self, op: Any) -> Sequence[Any]:
        return [getattr(variable.aval, "shape", ()) for variable in op.outvars]

    def all_ids(self, equation: Any, operands: Sequence[Value]) -> list[Ids]:
        """Return the ids of each operand, empty sets for those that do not depend on the seed."""
        return [self.ids(value, shape) for value, shape in zip(operands, self.input_shapes(equation), strict=True)]


def cond(propagator: JaxprPropagator, equation: Any, operands: list[Value]) -> Sequence[Value]:
    """The branch that is taken at every point, or the union of all."""
    which, *rest = operands
    programs = equation.params["branches"]
    if isinstance(which, DependentValue):
        return everything(propagator, equation, operands)
    if propagator.is_known(which):
        return propagator.run(programs[min(max(int(which), 0), len(programs) - 1)], rest)
    results = [propagator.run(program, rest) for program in programs]
    return [propagator.union_values(*values) for values in zip(*results, strict=True)]


def scan(propagator: JaxprPropagator, equation: Any, operands: list[Value]) -> Sequence[Value]:
    """A loop with a known number of turns."""
    params = equation.params
    length, body = params["length"], params["jaxpr"]
    first, carries = scan_sizes(params)
    last = first + carries
    fixed, carried, rows = operands[:first], operands[first:last], operands[last:]
    if length * _operation_count(body.jaxpr) > MAX_UNROLLED:
        any_row = [
            DependentValue(propagator.sets.reduce(row.ids, [0])) if isinstance(row, DependentValue) else UNKNOWN
            for row in rows
        ]

        def turn(carried: list[Value]) -> list[Value]:
            return propagator.run(body, [*fixed, *carried, *any_row])

        carried = propagator.fixed_point(carried, lambda carried: turn(carried)[:carries])
        columns = [[value] * length for value in turn(carried)[carries:]]
    else:
        columns = [[UNKNOWN] * length for _ in equation.outvars[carries:]]
        for index in range(length)[::-1] if params["reverse"] else range(length):
            results = propagator.run(body, [*fixed, *carried, *[_row(propagator, row, index) for row in rows]])
            carried = results[:carries]
            for column, result in zip(columns, results[carries:], strict=True):
                column[index] = result
    shapes = propagator.output_shapes(equation)[carries:]
    return [*carried, *[_stack_rows(propagator, column, shape) for column, shape in zip(columns, shapes, strict=True)]]


def while_loop(propagator: JaxprPropagator, equation: Any, operands: list[Value]) -> Sequence[Value]:
    """A loop that ends by a condition: turn by turn while that is known, and then until nothing new is reached."""
    params = equation.params
    condition, body = params["cond_jaxpr"], params["body_jaxpr"]
    first, last = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    cond_consts, body_consts, carried = operands[:first], operands[first:last], operands[last:]
    turns_left = MAX_UNROLLED // _operation_count(body.jaxpr)
    while True:
        (goes_on,) = propagator.run(condition, [*cond_consts, *carried])
        is_known = propagator.is_known(goes_on)
        if is_known and not bool(goes_on):
            return carried
        if not is_known or not turns_left:
            break
        carried = propagator.run(body, [*body_consts, *carried])
        turns_left -= 1
    state = propagator.fixed_point(carried, lambda carried: propagator.run(body, [*body_consts, *carried]))
    (goes_on,) = propagator.run(condition, [*cond_consts, *state])
    if isinstance(goes_on, DependentValue):
        return everything(propagator, equation, [*operands, goes_on])
    return state


def linear_solve(propagator: JaxprPropagator, equation: Any, operands: list[Value]) -> Sequence[Value]:
    """`custom_linear_solve`: its own program for the solution."""
    lengths, programs = equation.params["const_lengths"], equation.params["jaxprs"]
    start = lengths.matvec + lengths.vecmat
    right = operands[sum(length or 0 for length in lengths) :]
    return propagator.run(programs.solve, [*operands[start : start + lengths.solve], *right])


def _operation_count(jaxpr: Any) -> int:
    """Return how many operations a program takes, with loops inside it counted as often as they turn."""
    return 1 + sum(
        equation.params.get("length", 1) * sum(map(_operation_count, jaxprs_in_params(equation.params)), start=1)
        for equation in jaxpr.eqns
    )


def _row(propagator: JaxprPropagator, value: Value, index: int) -> Value:
    if isinstance(value, DependentValue):
        return DependentValue(value.ids[index])
    return value[index] if propagator.is_known(value) else UNKNOWN


def _stack_rows(propagator: JaxprPropagator, rows: Sequence[Value], shape: Sequence[int]) -> Value:
    if not dependent_ids(rows):
        return jnp.stack(rows) if len(rows) and all(map(propagator.is_known, rows)) else UNKNOWN
    return DependentValue(np.stack([propagator.ids(row, shape[1:]) for row in rows]))


def gather(propagator: JaxprPropagator, equation: Any, operands: list[Value]) -> list[Value]:
    """Along an axis that is indexed by what is not known, any element may be meant."""
    operand, indices = operands
    if isinstance(indices, DependentValue):
        return everything(propagator, equation, operands)
    params, ids = equation.params, operand.ids
    if not propagator.is_known(indices):
        sizes = zip(params["slice_sizes"], ids.shape, strict=True)
        cut = [axis for axis, (part, whole) in enumerate(sizes) if part < whole]
        indexed = params["dimension_numbers"].start_index_map
        ids = spread(propagator.sets, ids, [axis for axis in cut if axis in indexed])
        indices = jnp.zeros(equation.invars[1].aval.shape, jnp.int32)
    return [
        DependentValue(_gather_ids(ids, indices, params["dimension_numbers"], params["slice_sizes"], params["mode"]))
    ]


def dynamic_slice(propagator: JaxprPropagator, equation: Any, operands: list[Value]) -> list[Value]:
    """At an unknown start any element along the axis may be meant."""
    operand, *starts = operands
    if dependent_ids(starts):
        return everything(propagator, equation, operands)
    loose, where = _slice_axes(propagator, starts, operand.ids.shape, equation.params["slice_sizes"])
    return [DependentValue(spread(propagator.sets, operand.ids, loose)[tuple(where)])]


def dynamic_update_slice(propagator: JaxprPropagator, equation: Any, operands: list[Value]) -> list[Value]:
    """At an unknown start the update may land anywhere along the axis."""
    starts = operands[2:]
    if dependent_ids(starts):
        return everything(propagator, equation, operands)
    ids, update = propagator.all_ids(equation, operands)[:2]
    loose, where = _slice_axes(propagator, starts, ids.shape, update.shape)
    if loose:
        where = [slice(None) if axis in loose else part for axis, part in enumerate(where)]
        update = propagator.sets.union(ids[tuple(where)], propagator.sets.reduce(update, loose, keepdims=True))
    result = ids.copy()
    result[tuple(where)] = update
    return [DependentValue(result)]


def _slice_axes(
    propagator: JaxprPropagator, starts: Sequence[Value], shape: Sequence[int], sizes: Sequence[int]
) -> tuple[list[int], list[slice]]:
    """Return the axes along which a slice of some sizes may start anywhere, and the slices if it starts at 0 there.

    Known starts are clamped, as JAX does.
    """
    loose, where = [], []
    for axis, (start, whole, size) in enumerate(zip(starts, shape, sizes, strict=True)):
        is_known = propagator.is_known(start)
        low = min(max(int(start), 0), whole - size) if is_known else 0
        where.append(slice(low, low + size))
        if not is_known and size < whole:
            loose.append(axis)
    return loose, where


def scatter(propagator: JaxprPropagator, equation: Any, operands: list[Value]) -> list[Value]:
    """Every kind of scatter: at known indices written or joined there, at others joined anywhere."""
    indices, params, sets = operands[1], equation.params, propagator.sets
    if isinstance(indices, DependentValue):
        return everything(propagator, equation, operands)
    ids, _, updates = propagator.all_ids(equation, operands)
    if not ids.size:  # all updates are dropped, and there is no position to gather below
        return [DependentValue(ids)]
    if not propagator.is_known(indices):
        return [DependentValue(sets.union(ids, np.array(sets.union_all(updates))))]
    if equation.primitive.name == "scatter" and params["unique_indices"]:
        (result,) = bind(equation, [jnp.asarray(ids, jnp.int32), indices, jnp.asarray(updates, jnp.int32)])
        return [DependentValue(np.asarray(result, np.int64))]
    owners = _scatter_positions(ids.shape, updates.shape, indices, params)
    inside = owners >= 0
    return [DependentValue(rules.scatter(sets, ids, owners[inside], updates[inside]))]


def _scatter_positions(shape: Sequence[int], updates: Sequence[int], indices: Any, params: Any) -> np.ndarray:
    """Return for each element of the updates the position that it goes to, -1 for one that is dropped."""
    numbers = params["dimension_numbers"]
    narrow = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    window = iter(numbers.update_window_dims)
    sizes = [1 if axis in narrow else updates[next(window)] for axis in range(len(shape))]
    as_gather = GatherDimensionNumbers(
        offset_dims=numbers.update_window_dims,
        collapsed_slice_dims=numbers.inserted_window_dims,
        start_index_map=numbers.scatter_dims_to_operand_dims,
        operand_batching_dims=numbers.operand_batching_dims,
        start_indices_batching_dims=numbers.scatter_indices_batching_dims,
    )
    positions = np.arange(1, int(np.prod(shape)) + 1).reshape(shape)
    return _gather_ids(positions, indices, as_gather, sizes, params["mode"]) - 1


def _gather_ids(ids: Ids, indices: Any, numbers: Any, sizes: Sequence[int], mode: Any) -> Ids:
    """Gather ids, with 0 for what is out of range."""
    mode = GatherScatterMode.from_any(mode)
    if mode == GatherScatterMode.PROMISE_IN_BOUNDS:
        mode = GatherScatterMode.CLIP
    result = lax_gather(jnp.asarray(ids, jnp.int32), indices, numbers, tuple(sizes), mode=mode, fill_value=0)
    return np.asarray(result, np.int64)


def select(propagator: JaxprPropagator, equation: Any, operands: list[Value]) -> Sequence[Value]:
    """`select_n`: by a known choice one of the cases, else any."""
    which = operands[0]
    if not propagator.is_known(which):
        return elementwise(propagator, equation, operands)
    cases = propagator.all_ids(equation, operands)[1:]
    which = np.broadcast_to(np.asarray(which).astype(np.int64), equation.outvars[0].aval.shape)
    return [DependentValue(np.select([which == index for index in range(len(cases))], cases))]


def move(propagator: JaxprPropagator, equation: Any, operands: list[Value]) -> list[Value]:
    """The op itself, on ids."""
    results = MOVES[equation.primitive.name](equation.params, *propagator.all_ids(equation, operands))
    return [DependentValue(result) for result in (results if len(equation.outvars) > 1 else [results])]


def _broadcast(params: Any, x: np.ndarray) -> np.ndarray:
    shape = [1] * len(params["shape"])
    for axis, size in zip(params["broadcast_dimensions"], x.shape, strict=True):
        shape[axis] = size
    return np.broadcast_to(x.reshape(shape), params["shape"])


def _pad(params: Any, x: np.ndarray, filling: np.ndarray) -> np.ndarray:
    """Pad inside first, then outside; negative padding cuts off."""
    gaps = [gap for *_, gap in params["padding_config"]]
    spaced = np.full([n + max(0, n - 1) * gap for n, gap in zip(x.shape, gaps, strict=True)], filling)
    spaced[tuple([slice(None, None, gap + 1) for gap in gaps])] = x
    sides = [(low, high) for low, high, _ in params["padding_config"]]
    around = [(max(0, low), max(0, high), n) for (low, high), n in zip(sides, spaced.shape, strict=True)]
    padded = np.full([low + n + high for low, high, n in around], filling)  # `np.pad` refuses an array without axes
    padded[tuple([slice(low, low + n) for low, _, n in around])] = spaced
    cut = [slice(max(0, -low), n - max(0, -high)) for n, (low, high) in zip(padded.shape, sides, strict=True)]
    return padded[tuple(cut)]


def _slice(params: Any, x: np.ndarray) -> np.ndarray:
    steps = params["strides"] or [1] * x.ndim
    return x[tuple(map(slice, params["start_indices"], params["limit_indices"], steps))]


MOVES: dict[str, Callable[..., Any]] = {
    "reshape": lambda params, x: x.transpose(params["dimensions"] or range(x.ndim)).reshape(params["new_sizes"]),
    "transpose": lambda params, x: x.transpose(params["permutation"]),
    "broadcast_in_dim": _broadcast,
    "slice": _slice,
    "squeeze": lambda params, x: x.squeeze(params["dimensions"]),
    "rev": lambda params, x: np.flip(x, params["dimensions"]),
    "concatenate": lambda params, *xs: np.concatenate(xs, params["dimension"]),
    "pad": _pad,
    "split": lambda params, x: np.split(x, np.cumsum(params["sizes"])[:-1], params["axis"]),
    "stack": lambda params, *xs: np.stack(xs, params["axis"]),
    "unstack": lambda params, x: list(np.moveaxis(x, params["axis"], 0)),
    "tile": lambda params, x: np.tile(x, params["reps"]),
}
"""Ops that only move data. NumPy runs them, since JAX would compile each anew for a new shape."""


def reduce(propagator: JaxprPropagator, equation: Any, operands: list[Value]) -> list[Value]:
    return [DependentValue(propagator.sets.reduce(operands[0].ids, equation.params["axes"]))]


def cumulative(propagator: JaxprPropagator, equation: Any, operands: list[Value]) -> list[Value]:
    axis, reverse = equation.params["axis"], equation.params["reverse"]
    return [DependentValue(propagator.sets.cumulative(operands[0].ids, axis, reverse))]


def sort(propagator: JaxprPropagator, equation: Any, operands: list[Value]) -> Sequence[Value]:
    return mix(propagator, equation, operands, [equation.params["dimension"]])


def fft(propagator: JaxprPropagator, equation: Any, operands: list[Value]) -> Sequence[Value]:
    return mix(propagator, equation, operands, range(-len(equation.params["fft_lengths"]), 0))


def pool(propagator: JaxprPropagator, equation: Any, operands: list[Value]) -> list[Value]:
    params = equation.params
    ids = propagator.sets.union(*dependent_ids(operands))
    window = params["window_dimensions"], params["window_strides"], params["padding"]
    return [DependentValue(propagator.sets.windows(ids, *window, params["window_dilation"], params["base_dilation"]))]


def pool_backward(propagator: JaxprPropagator, equation: Any, operands: list[Value]) -> list[Value]:
    """`select_and_scatter_add`: each window's value goes to one of its elements, it is not known which."""
    source, operand = operands
    if isinstance(operand, DependentValue):
        return everything(propagator, equation, operands)
    params, shape = equation.params, equation.outvars[0].aval.shape
    window = params["window_dimensions"], params["window_strides"], [low for low, _ in params["padding"]]
    return [DependentValue(rules.windows_transposed(propagator.sets, source.ids, shape, *window))]


def matmul(propagator: JaxprPropagator, equation: Any, operands: list[Value]) -> list[Value]:
    """`dot_general`, as a product of stacks of matrices."""
    (left_sum, right_sum), (left_stack, right_stack) = equation.params["dimension_numbers"]
    shape = equation.outvars[0].aval.shape

    def matrices(x: np.ndarray | None, stack: Sequence[int], summed: Sequence[int], is_left: bool) -> Any:
        """Return x with three axes: those of the stack, those that stay, those summed over; the right the other way."""
        if x is None:
            return None
        free = [axis for axis in range(x.ndim) if axis not in (*stack, *summed)]
        counts = [int(np.prod([x.shape[axis] for axis in axes])) for axes in (stack, free, summed)]
        array = x.transpose([*stack, *free, *summed]).reshape(counts)
        return array if is_left else array.transpose(0, 2, 1)

    ids, masks, widths = [], [], []
    sides = (left_stack, left_sum, True), (right_stack, right_sum, False)
    for value, size, (stack, summed, is_left) in zip(operands, propagator.input_shapes(equation), sides, strict=True):
        dependent = value.ids if isinstance(value, DependentValue) else None
        ids.append(matrices(dependent, stack, summed, is_left))
        masks.append(matrices(propagator.mask(value), stack, summed, is_left))
        widths.append(math.prod([n for axis, n in enumerate(size) if axis not in (*stack, *summed)]))
    return [DependentValue(rules.matmul(propagator.sets, ids, masks, *widths).reshape(shape))]


def convolve(propagator: JaxprPropagator, equation: Any, operands: list[Value]) -> list[Value]:
    """The image with a kernel, and the kernel with an image."""
    params, sets = equation.params, propagator.sets
    image, kernel = operands
    image_axes, kernel_axes, result_axes = params["dimension_numbers"]
    shape = np.array(equation.outvars[0].aval.shape)[list(result_axes)]
    parts = []
    if isinstance(image, DependentValue):
        mask = propagator.mask(kernel)
        mask = np.ones(equation.invars[1].aval.shape, dtype=bool) if mask is None else mask
        steps = params["window_strides"], params["padding"], params["rhs_dilation"], params["lhs_dilation"]
        # Groups of examples meet groups of kernels, and each gives channels of its own.
        groups = params["feature_group_count"]
        examples = np.split(image.ids.transpose(image_axes), params["batch_group_count"])
        kernels = np.split(mask.transpose(kernel_axes), params["batch_group_count"])
        pairs = zip(examples, kernels, strict=True)
        parts.append(np.concatenate([rules.convolve(sets, ids, own, *steps, groups) for ids, own in pairs], 1))
    if isinstance(kernel, DependentValue):
        ids = kernel.ids.transpose(kernel_axes)
        per_channel = sets.reduce(ids.reshape(len(ids), -1), [1]).reshape(1, -1, *[1] * (len(shape) - 2))
        parts.append(np.broadcast_to(per_channel, shape))
    return [DependentValue(sets.union(*parts).transpose(np.argsort(result_axes)))]


def triangular_solve(propagator: JaxprPropagator, equation: Any, operands: list[Value]) -> list[Value]:
    """Along the side of the matrix everything mixes."""
    matrix, right = operands
    axis = -2 if equation.params["left_side"] else -1
    parts = []
    if isinstance(right, DependentValue):
        parts.append(propagator.sets.reduce(right.ids, [axis], keepdims=True))
    if isinstance(matrix, DependentValue):
        parts.append(propagator.sets.reduce(matrix.ids, [-1, -2], keepdims=True))
    return [DependentValue(np.broadcast_to(propagator.sets.union(*parts), equation.outvars[0].aval.shape))]


ELEMENTWISE = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp complex conj
convert_element_type copy cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma
igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min name ne neg
nextafter not optimization_barrier or polygamma pow pvary random_gamma_grad real reduce_precision
regularized_incomplete_beta rem round rsqrt sharding_constraint sign sin sinh sqrt square stop_gradient sub tan tanh
xor zeta
"""
REDUCTIONS = "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin"
CUMULATIVE = "cumsum cumprod cummax cummin cumlogsumexp"
POOLS = "reduce_window_sum reduce_window_max reduce_window_min select_and_gather_add"
SCATTERS = "scatter scatter-add scatter-mul scatter-min scatter-max scatter-sub"
RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE.split(), elementwise),
    "mul": multiply,
    "select_n": select,
    **dict.fromkeys(MOVES, move),
    "gather": gather,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    **dict.fromkeys(SCATTERS.split(), scatter),
    **dict.fromkeys(REDUCTIONS.split(), reduce),
    **dict.fromkeys(CUMULATIVE.split(), cumulative),
    "sort": sort,
    "fft": fft,
    **dict.fromkeys(POOLS.split(), pool),
    "select_and_scatter_add": pool_backward,
    "dot_general": matmul,
    "conv_general_dilated": convolve,
    "triangular_solve": triangular_solve,
    "custom_linear_solve": linear_solve,
    "cond": cond,
    "scan": scan,
    "while": while_loop,
}
"""The rule of each primitive."""
