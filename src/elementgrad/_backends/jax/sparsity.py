"""A program of JAX followed equation by equation, with the sets of seed elements that each value may depend on.

Sets of reach through the operations of JAX that take indices: known ones move data, others may move any.

How sets of reach go through the operations of JAX. What is not named here is taken to mix everything.

The pattern of a Jacobian from the program that JAX makes for one sweep.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import GatherDimensionNumbers, GatherScatterMode, gather

from elementgrad._backends.jax._compat import dce_jaxpr, jaxprs_in_params
from elementgrad._backends.jax.program import FOLLOWED, bind, evaluate, is_reverse_only
from elementgrad._sparsity.index_sets import Ids, IndexSets, convolution, product, transposed_windows
from elementgrad._sparsity.pattern import Pattern
from elementgrad._sparsity.propagate import UNKNOWN, DependentValue, Value, joined, reached, settled

UNROLLED = 4000
"""A loop of so many operations is followed in every turn; a longer one until nothing new is reached."""
INNER = {
    **FOLLOWED,
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}
"""The calls whose results are those of their inner program, and where that is. Their rules are in the program."""


Rule = Callable[["JaxprPropagator", Any, list[Value]], Sequence[Value]]


def known(value: Value) -> bool:
    """Whether a value is the same at every point, and there to be looked at."""
    return value is not UNKNOWN and not isinstance(value, (DependentValue, jax.core.Tracer))


class JaxprPropagator:
    """Follows programs, with one table of sets for all of their values."""

    def __init__(self, reach: IndexSets, rules: Mapping[str, Rule]):
        self.reach = reach
        self.rules = {"cond": branches, "scan": scanned, "while": repeated, "custom_linear_solve": solved, **rules}

    def run(self, program: Any, operands: Sequence[Value]) -> list[Value]:
        """What a program gives for these operands; its constants are known."""
        jaxpr, consts = getattr(program, "jaxpr", program), getattr(program, "consts", ())
        consts = [const if known(const) else UNKNOWN for const in consts]
        return evaluate(jaxpr, consts, operands, self.step)

    def step(self, equation: Any, operands: list[Value]) -> Sequence[Value]:
        """The results of one equation."""
        name = equation.primitive.name
        if all(map(known, operands)) and not equation.effects:
            return bind(equation, operands)
        if name in INNER:
            return self.run(equation.params[INNER[name]], operands)
        if not any(isinstance(operand, DependentValue) for operand in operands):
            return [UNKNOWN] * len(equation.outvars)
        return self.rules.get(name, everything)(self, equation, operands)

    def ids(self, value: Value, variable: Any) -> Ids:
        """The sets of a value; of one that does not depend on the seed they are empty."""
        return value.ids if isinstance(value, DependentValue) else np.zeros(variable.aval.shape, dtype=np.int64)


def everything(follower: JaxprPropagator, equation: Any, operands: list[Value]) -> list[Value]:
    """The rule for what is not known: each result depends on all that any operand does."""
    all_of = follower.reach.all_of(*reached(operands))
    return [DependentValue(np.full(getattr(variable.aval, "shape", ()), all_of)) for variable in equation.outvars]


def branches(follower: JaxprPropagator, equation: Any, operands: list[Value]) -> Sequence[Value]:
    """The branch that is taken at every point, or what any of them gives."""
    which, *rest = operands
    programs = equation.params["branches"]
    if isinstance(which, DependentValue):
        return everything(follower, equation, operands)
    if known(which):
        return follower.run(programs[min(max(int(which), 0), len(programs) - 1)], rest)
    results = [follower.run(program, rest) for program in programs]
    return [joined(follower.reach, *values) for values in zip(*results, strict=True)]


def scanned(follower: JaxprPropagator, equation: Any, operands: list[Value]) -> Sequence[Value]:
    """A loop with a known number of turns."""
    params = equation.params
    length, body = params["length"], params["jaxpr"]
    first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
    fixed, carried, rows = operands[:first], operands[first:last], operands[last:]
    carries = last - first
    if length * size_of(body.jaxpr) > UNROLLED:
        whole = [
            DependentValue(follower.reach.over(row.ids, [0])) if isinstance(row, DependentValue) else UNKNOWN
            for row in rows
        ]

        def turn(carried: list[Value]) -> list[Value]:
            return follower.run(body, [*fixed, *carried, *whole])

        carried = settled(follower.reach, carried, lambda carried: turn(carried)[:carries])
        each = turn(carried)[carries:]
        columns = [[value] * length for value in each]
    else:
        columns = [[UNKNOWN] * length for _ in equation.outvars[carries:]]
        for number in range(length)[::-1] if params["reverse"] else range(length):
            results = follower.run(body, [*fixed, *carried, *[_row(row, number) for row in rows]])
            carried = results[:carries]
            for column, result in zip(columns, results[carries:], strict=True):
                column[number] = result
    variables = equation.outvars[carries:]
    return [*carried, *[_stacked(column, variable) for column, variable in zip(columns, variables, strict=True)]]


def repeated(follower: JaxprPropagator, equation: Any, operands: list[Value]) -> Sequence[Value]:
    """A loop that ends by a condition: turn by turn while that is known, and then until nothing new is reached."""
    params = equation.params
    condition, body = params["cond_jaxpr"], params["body_jaxpr"]
    first, last = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    of_condition, of_body, carried = operands[:first], operands[first:last], operands[last:]
    left = UNROLLED // size_of(body.jaxpr)
    while True:
        (more,) = follower.run(condition, [*of_condition, *carried])
        if known(more) and not bool(more):
            return carried
        if not known(more) or not left:
            break
        carried = follower.run(body, [*of_body, *carried])
        left -= 1
    state = settled(follower.reach, carried, lambda carried: follower.run(body, [*of_body, *carried]))
    (more,) = follower.run(condition, [*of_condition, *state])
    return everything(follower, equation, [*operands, more]) if isinstance(more, DependentValue) else state


def solved(follower: JaxprPropagator, equation: Any, operands: list[Value]) -> Sequence[Value]:
    """A linear system: what its program for the solution does."""
    lengths, programs = equation.params["const_lengths"], equation.params["jaxprs"]
    start = lengths.matvec + lengths.vecmat
    right = operands[sum(length or 0 for length in lengths) :]
    return follower.run(programs.solve, [*operands[start : start + lengths.solve], *right])


def size_of(jaxpr: Any) -> int:
    """How many operations a program takes, loops inside it counted as often as they turn."""
    return 1 + sum(
        equation.params.get("length", 1) * sum(map(size_of, jaxprs_in_params(equation.params)), start=1)
        for equation in jaxpr.eqns
    )


def _row(value: Value, number: int) -> Value:
    if isinstance(value, DependentValue):
        return DependentValue(value.ids[number])
    return value[number] if known(value) else UNKNOWN


def _stacked(column: Sequence[Value], variable: Any) -> Value:
    if not any(isinstance(value, DependentValue) for value in column):
        return jnp.stack(column) if len(column) and all(map(known, column)) else UNKNOWN
    empty = np.zeros(variable.aval.shape[1:], dtype=np.int64)
    return DependentValue(np.stack([value.ids if isinstance(value, DependentValue) else empty for value in column]))


def gathered(follower: JaxprPropagator, equation: Any, operands: list[Value]) -> list[Value]:
    """`gather`: along an axis that is indexed by what is not known, any element may be meant."""
    operand, indices = operands
    if isinstance(indices, DependentValue):
        return everything(follower, equation, operands)
    params = equation.params
    ids = operand.ids
    if not known(indices):
        sizes = zip(params["slice_sizes"], ids.shape, strict=True)
        cut = [axis for axis, (part, whole) in enumerate(sizes) if part < whole]
        ids = _smeared(follower, ids, [axis for axis in cut if axis in params["dimension_numbers"].start_index_map])
        indices = jnp.zeros(equation.invars[1].aval.shape, jnp.int32)
    return [_taken(ids, indices, params["dimension_numbers"], params["slice_sizes"], params["mode"])]


def sliced(follower: JaxprPropagator, equation: Any, operands: list[Value]) -> list[Value]:
    """`dynamic_slice`."""
    operand, *starts = operands
    if any(isinstance(start, DependentValue) for start in starts):
        return everything(follower, equation, operands)
    ids, sizes = operand.ids, equation.params["slice_sizes"]
    loose = [axis for axis, start in enumerate(starts) if not known(start) and sizes[axis] < ids.shape[axis]]
    ids = _smeared(follower, ids, loose)
    corner = _corner(starts, ids.shape, sizes)
    return [DependentValue(ids[tuple([slice(low, low + size) for low, size in zip(corner, sizes, strict=True)])])]


def updated(follower: JaxprPropagator, equation: Any, operands: list[Value]) -> list[Value]:
    """`dynamic_update_slice`."""
    starts = operands[2:]
    if any(isinstance(start, DependentValue) for start in starts):
        return everything(follower, equation, operands)
    ids, update = (
        follower.ids(value, variable) for value, variable in zip(operands, equation.invars[:2], strict=False)
    )
    sizes = update.shape
    loose = [axis for axis, start in enumerate(starts) if not known(start) and sizes[axis] < ids.shape[axis]]
    corner = _corner(starts, ids.shape, sizes)
    where = tuple([slice(low, low + size) for low, size in zip(corner, sizes, strict=True)])
    if not loose:
        result = ids.copy()
        result[where] = update
        return [DependentValue(result)]
    where = tuple([slice(None) if axis in loose else part for axis, part in enumerate(where)])
    any_of = follower.reach.over(update, loose, keepdims=True)
    result = ids.copy()
    result[where] = follower.reach.union(ids[where], any_of)
    return [DependentValue(result)]


def scattered(follower: JaxprPropagator, equation: Any, operands: list[Value]) -> list[Value]:
    """Every kind of scatter: at known indices written or joined there, at others joined anywhere."""
    indices = operands[1]
    if isinstance(indices, DependentValue):
        return everything(follower, equation, operands)
    ids, updates = (follower.ids(operands[number], equation.invars[number]) for number in (0, 2))
    if not ids.size:  # everything is dropped, and nothing can be taken to find out where it would go
        return [DependentValue(ids)]
    params = equation.params
    if not known(indices):
        return [DependentValue(follower.reach.union(ids, np.array(follower.reach.all_of(updates))))]
    if equation.primitive.name == "scatter" and params["unique_indices"]:
        sets = [jnp.asarray(ids, jnp.int32), indices, jnp.asarray(updates, jnp.int32)]
        (result,) = bind(equation, sets)
        return [DependentValue(np.asarray(result, np.int64))]
    owners = _owners(ids.shape, updates.shape, indices, params)
    inside = owners >= 0
    both = np.concatenate([np.arange(ids.size), owners[inside]]), np.concatenate([ids.reshape(-1), updates[inside]])
    return [DependentValue(follower.reach.gathered(*both, ids.size).reshape(ids.shape))]


def _owners(shape: Sequence[int], updates: Sequence[int], indices: Any, params: Any) -> np.ndarray:
    """For each element of the updates the position that it goes to, -1 for one that is dropped."""
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
    return _taken(positions, indices, as_gather, sizes, params["mode"]).ids - 1


def _taken(ids: Ids, indices: Any, numbers: Any, sizes: Sequence[int], mode: Any) -> DependentValue:
    """A gather of numbers of sets; what is out of range is 0."""
    mode = GatherScatterMode.from_any(mode)
    if mode == GatherScatterMode.PROMISE_IN_BOUNDS:
        mode = GatherScatterMode.CLIP
    taken = gather(jnp.asarray(ids, jnp.int32), indices, numbers, tuple(sizes), mode=mode, fill_value=0)
    return DependentValue(np.asarray(taken, np.int64))


def _smeared(follower: JaxprPropagator, ids: Ids, axes: Sequence[int]) -> Ids:
    """Any element along some axes in place of each."""
    return np.broadcast_to(follower.reach.over(ids, axes, keepdims=True), ids.shape) if axes else ids


def _corner(starts: Sequence[Value], shape: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Where a slice starts: it is moved to be inside, and one that is not known counts as 0."""
    return [
        min(max(int(start), 0), whole - size) if known(start) else 0
        for start, whole, size in zip(starts, shape, sizes, strict=True)
    ]


INDEXING: dict[str, Rule] = {
    "gather": gathered,
    "dynamic_slice": sliced,
    "dynamic_update_slice": updated,
    **dict.fromkeys(("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max", "scatter-sub"), scattered),
}


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


def elementwise(follower: JaxprPropagator, equation: Any, operands: list[Value]) -> list[Value]:
    """Each element of the result depends on those of the operands in its place; several results go one to one."""
    if len(equation.outvars) > 1:
        return operands
    return [DependentValue(np.broadcast_to(follower.reach.union(*reached(operands)), equation.outvars[0].aval.shape))]


def multiplied(follower: JaxprPropagator, equation: Any, operands: list[Value]) -> list[Value]:
    """Elementwise, and nothing where a factor is known to be zero."""
    (result,) = elementwise(follower, equation, operands)
    for value in operands:
        if known(value):
            result = DependentValue(np.where(np.asarray(value) != 0, result.ids, 0))
    return [result]


def chosen(follower: JaxprPropagator, equation: Any, operands: list[Value]) -> list[Value]:
    """`select_n`: by a known choice one of the cases, else any."""
    which, *cases = operands
    if not known(which):
        return elementwise(follower, equation, operands)
    shape = equation.outvars[0].aval.shape
    sets = [follower.ids(value, variable) for value, variable in zip(cases, equation.invars[1:], strict=True)]
    which = np.broadcast_to(np.asarray(which).astype(np.int64), shape)
    return [DependentValue(np.select([which == number for number in range(len(sets))], sets))]


def moved(follower: JaxprPropagator, equation: Any, operands: list[Value]) -> list[Value]:
    """The operation itself, on numbers of sets."""
    pairs = zip(operands, equation.invars, strict=True)
    sets = [follower.ids(value, variable) for value, variable in pairs]
    results = MOVING[equation.primitive.name](equation.params, *sets)
    return [DependentValue(result) for result in (results if len(equation.outvars) > 1 else [results])]


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


def reduced(follower: JaxprPropagator, equation: Any, operands: list[Value]) -> list[Value]:
    """The union over some axes."""
    return [DependentValue(follower.reach.over(operands[0].ids, equation.params["axes"]))]


def accumulated(follower: JaxprPropagator, equation: Any, operands: list[Value]) -> list[Value]:
    """The union of all up to each, along an axis."""
    return [DependentValue(follower.reach.along(operands[0].ids, equation.params["axis"], equation.params["reverse"]))]


def mixed(axes: Any, follower: JaxprPropagator, equation: Any, operands: list[Value]) -> list[Value]:
    """Everything along some axes mixes, of all operands, and nothing across the others."""
    results = []
    for variable in equation.outvars:
        shape = variable.aval.shape
        along = [axis % len(shape) for axis in axes(equation)]
        sets = [
            follower.reach.over(value.ids, along, keepdims=True)
            for value in operands
            if isinstance(value, DependentValue)
        ]
        results.append(DependentValue(np.broadcast_to(follower.reach.union(*sets), shape)))
    return results


def windowed(follower: JaxprPropagator, equation: Any, operands: list[Value]) -> list[Value]:
    """The union over windows."""
    params = equation.params
    sets = follower.reach.union(*reached(operands))
    window = params["window_dimensions"], params["window_strides"], params["padding"]
    return [DependentValue(follower.reach.windows(sets, *window, params["window_dilation"], params["base_dilation"]))]


def scattered_windows(follower: JaxprPropagator, equation: Any, operands: list[Value]) -> list[Value]:
    """Each window's number goes to one of its elements, nobody knows which."""
    source, operand = operands
    if isinstance(operand, DependentValue):
        return everything(follower, equation, operands)
    params, shape = equation.params, equation.outvars[0].aval.shape
    window = params["window_dimensions"], params["window_strides"], params["padding"]
    return [DependentValue(transposed_windows(follower.reach, source.ids, shape, *window))]


def contracted(follower: JaxprPropagator, equation: Any, operands: list[Value]) -> list[Value]:
    """`dot_general`: each side that depends on the seed in turn, as if the other did not."""
    (left_sum, right_sum), (left_stack, right_stack) = equation.params["dimension_numbers"]
    left, right = operands
    shape = equation.outvars[0].aval.shape
    left_shape, right_shape = (variable.aval.shape for variable in equation.invars)
    ends = (left_shape, left_stack, left_sum), (right_shape, right_stack, right_sum)
    found = []
    for this, other, (mine, theirs), flipped in ((left, right, ends, False), (right, left, ends[::-1], True)):
        if isinstance(this, DependentValue):
            ids = _stack(this.ids, *mine[1:], first=True)
            mask = _stack(np.asarray(other) != 0, *theirs[1:], first=False) if known(other) else None
            width = int(np.prod([n for axis, n in enumerate(theirs[0]) if axis not in (*theirs[1], *theirs[2])]))
            through = product(follower.reach, ids, mask, width)
            found.append((through.transpose(0, 2, 1) if flipped else through).reshape(shape))
    return [DependentValue(follower.reach.union(*found))]


def _stack(x: np.ndarray, stack: Sequence[int], summed: Sequence[int], first: bool) -> np.ndarray:
    """Three axes: those of stacks, those that stay and those that are summed over; or the last two the other way."""
    free = [axis for axis in range(x.ndim) if axis not in (*stack, *summed)]
    counts = [int(np.prod([x.shape[axis] for axis in axes])) for axes in (stack, free, summed)]
    array = x.transpose([*stack, *free, *summed]).reshape(counts)
    return array if first else array.transpose(0, 2, 1)


def convolved(follower: JaxprPropagator, equation: Any, operands: list[Value]) -> list[Value]:
    """A convolution, of the image with a kernel and of the kernel with an image."""
    params = equation.params
    if params["batch_group_count"] > 1:
        return everything(follower, equation, operands)
    image, kernel = operands
    of_image, of_kernel, of_result = params["dimension_numbers"]
    back = np.argsort(of_result)
    shape = np.array(equation.outvars[0].aval.shape)[list(of_result)]
    found = []
    if isinstance(image, DependentValue):
        mask = np.asarray(kernel) != 0 if known(kernel) else np.ones(equation.invars[1].aval.shape, dtype=bool)
        steps = params["window_strides"], params["padding"], params["rhs_dilation"], params["lhs_dilation"]
        masked = mask.transpose(of_kernel)
        found.append(
            convolution(follower.reach, image.ids.transpose(of_image), masked, *steps, params["feature_group_count"])
        )
    if isinstance(kernel, DependentValue):
        ids = kernel.ids.transpose(of_kernel)
        each = follower.reach.over(ids.reshape(len(ids), -1), [1]).reshape(1, -1, *[1] * (len(shape) - 2))
        found.append(np.broadcast_to(each, shape))
    return [DependentValue(follower.reach.union(*found).transpose(back))]


def triangular(follower: JaxprPropagator, equation: Any, operands: list[Value]) -> list[Value]:
    """A triangular system: along the side of the matrix everything mixes."""
    matrix, right = operands
    axis = -2 if equation.params["left_side"] else -1
    shape = equation.outvars[0].aval.shape
    found = []
    if isinstance(right, DependentValue):
        found.append(follower.reach.over(right.ids, [axis], keepdims=True))
    if isinstance(matrix, DependentValue):
        found.append(follower.reach.over(matrix.ids, [-1, -2], keepdims=True))
    return [DependentValue(np.broadcast_to(follower.reach.union(*found), shape))]


def transformed(follower: JaxprPropagator, equation: Any, operands: list[Value]) -> list[Value]:
    """A Fourier transform, over the last axes."""
    axes = range(-len(equation.params["fft_lengths"]), 0)
    whole = follower.reach.over(operands[0].ids, axes, keepdims=True)
    return [DependentValue(np.broadcast_to(whole, equation.outvars[0].aval.shape))]


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


Array = jax.Array


def everywhere(function: Callable[[Array], Array], x: Array) -> Pattern:
    """The pattern of a function at every x of this shape."""
    forward = jax.make_jaxpr(lambda x, t: jax.jvp(function, (x,), (t,))[1])(x, x)
    if not is_reverse_only(forward.jaxpr):
        return _followed(forward, x.shape)
    y = jax.eval_shape(function, x)
    return _followed(jax.make_jaxpr(lambda x, u: jax.vjp(function, x)[1](u)[0])(x, y), y.shape).T


def here(sweep: Callable[[Array], Array], x: Array) -> Pattern:
    """The pattern of a linear function of x, whose numbers are all known."""
    forward = jax.make_jaxpr(sweep)(x)
    if not is_reverse_only(forward.jaxpr):
        return _followed(forward, x.shape)
    y = jax.eval_shape(sweep, x)
    return _followed(jax.make_jaxpr(lambda u: jax.linear_transpose(sweep, x)(u)[0])(y), y.shape).T


def _followed(program: Any, shape: Sequence[int]) -> Pattern:
    """A row for each element of what a program gives, with those of its last input that it depends on."""
    jaxpr, _ = dce_jaxpr(program.jaxpr, [True], instantiate=True)
    reach = IndexSets(math.prod(shape))
    follower = JaxprPropagator(reach, RULES)
    operands = [*[UNKNOWN] * (len(jaxpr.invars) - 1), DependentValue(reach.start(shape))]
    with jax.ensure_compile_time_eval():
        (result,) = follower.run(program.replace(jaxpr=jaxpr), operands)
    return reach.pattern(follower.ids(result, jaxpr.outvars[0]))
