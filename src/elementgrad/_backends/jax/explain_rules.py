"""Rules by which runs of JAX are explained: what users call its operations, and what these do to derivatives.

`JaxOp` is one operation of a run, with its arrays; JAX gives its jvp and vjp. The functions below it name the function
that the user called, and say why an operation lets no derivative through.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.ops
import jax.scipy.special
import numpy as np

from elementgrad._backends.jax._compat import dce_jaxpr, jaxprs_in_params
from elementgrad._backends.jax.read import JAX_PACKAGES
from elementgrad._backends.source_location import is_user_code, location_text
from elementgrad._explain.dependence import dependent_outputs, guess_dependent_outputs, is_tied
from elementgrad._explain.trace import cause_of_bound, is_masked_score

Array = Any
PACKAGES = (*JAX_PACKAGES, "optax", "equinox", "chex", "haiku", "jaxtyping", "numpy", "scipy")
"""Packages whose lines are not the user's."""
PUBLIC = (jnp, jnp.linalg, jnp.fft, jax.nn, jax.lax, jax.random, jax.scipy.special, jax.ops, jax)
"""Modules with the functions that users call by name."""
WORDS = {
    "select_n": "where",
    "logistic": "sigmoid",
    "max": "maximum",
    "min": "minimum",
    "integer_pow": "pow",
    "power": "pow",
    "clamp": "clip",
    "convert_element_type": "astype",
    "gather": "indexing",
    "dynamic_slice": "indexing",
    "slice": "indexing",
    "scatter": ".at[].set",
    "scatter-add": ".at[].add",
    "scatter_add": ".at[].add",
    "name": "checkpoint_name",
    "while": "while_loop",
    "gt": "greater",
    "lt": "less",
    "ge": "greater_equal",
    "le": "less_equal",
    "eq": "equal",
    "ne": "not_equal",
}
"""The user's words for primitives whose name is another."""
UPDATES = ("set", "add", "subtract", "multiply", "divide", "power", "min", "max", "apply", "get", "mul")
"""The methods of `x.at[index]`."""
RANDOM_OPS = frozenset({"random_bits", "random_gamma", "threefry2x32", "rng_bit_generator", "rng_uniform"})
STEP_OPS = {"round", "floor", "ceil", "sign", "round_nearest_even"}
CALLBACKS = {"pure_callback": "no-rule", "io_callback": "left-framework"}
NOT_RERUN = {*CALLBACKS, "while", "debug_callback"}
"""Primitives that are not run on other numbers, because they call the user's code or may never end."""
CUSTOM_JVP = {"custom_jvp_call"}
CUSTOM_VJP = {"custom_vjp_call", "custom_vjp_call_jaxpr"}
COMPARISONS = {"gt", "lt", "ge", "le", "eq", "ne", "argmax", "argmin", "is_finite"}
LOOKUPS = {"gather", "indexing", "take", "take_along_axis", ".at[].get"}
PRODUCTS = {"mul", "multiply", "div", "true_divide", "divide"}
POWERS = {"square", "integer_pow", "pow", "power", "float_power"}
CHOICES = frozenset(
    """
    reduce_max reduce_min sort top_k approx_top_k cummax cummin reduce_window_max reduce_window_min
    select_and_gather_add scatter-max scatter_max scatter-min scatter_min
    """.split()  # noqa: SIM905
)
"""Primitives that take some elements and leave others."""
CHOICE_WORDS = CHOICES | frozenset(
    """
    max min amax amin nanmax nanmin ptp partition lexsort median quantile percentile reduce_window max_pool min_pool
    segment_max segment_min .at[].max .at[].min
    """.split()  # noqa: SIM905
)
"""The user's words for them. A softmax has a maximum inside as well, but is not a choice."""
BOUNDS = {"maximum", "minimum", "fmax", "fmin"}
SOFTMAXES = {"softmax", "log_softmax"}
ROUNDING = 64.0
"""Tangents of so many units of rounding count as zero."""


@dataclass(eq=False)
class JaxOp:
    """One operation that ran, or several that are one call of the user's."""

    op_type: str
    """The name of the primitive."""
    operation: str
    """The user's word for it."""
    where: str | None
    function: Callable[..., Sequence[Array]]
    """Computes all results from all operands."""
    inputs: Sequence[int]
    """Ids of the values that it reads, one for each operand."""
    operands: Sequence[Array]
    outputs: Sequence[int] = ()
    results: Sequence[Array] = ()
    params: Mapping[str, Any] = field(default_factory=dict)
    module: str = ""
    custom_gradient: bool = False
    """True if the user wrote its derivative."""
    branches: bool = False
    hidden: bool = False
    cut_cause: str | None = None
    note: str = ""
    call: tuple[str | None, str] | None = None
    """The line and name of the function of JAX that it is a part of."""
    error: Exception | None = field(default=None, repr=False)
    """Why JAX cannot differentiate it, if it cannot."""
    inner: frozenset[str] = frozenset()
    """The primitives that it is made of."""
    unsafe: bool = False
    """True if it is not run on other numbers."""
    discrete_values: Sequence[Array] = ()
    """The integers and booleans that are made inside, if it is one call of several operations."""
    written: frozenset[int] = frozenset()
    """Ids of the values that it writes into, if it writes."""

    def __post_init__(self) -> None:
        self.written = frozenset(self.inputs[:1] if self.op_type.startswith("scatter") else ())
        inner = {name for name in primitives(self.params) if not name.endswith("jit")}
        self.inner = frozenset(inner or {self.op_type})
        self.unsafe = not NOT_RERUN.isdisjoint({self.op_type, *inner})

    def run(self) -> None:
        self.results = [x if hasattr(x, "shape") else jnp.asarray(x) for x in self.function(*self.operands)]

    def connected_results(self, active: Sequence[int]) -> set[int]:
        """Return the indices of the results whose derivative, by JAX's own rules, uses that of an active operand."""
        differentiable = self._differentiable_results()
        active = [index for index in active if is_differentiable(self.operands[index])]
        if not differentiable or not active:
            return set()
        if self.op_type in CUSTOM_VJP:
            return set(differentiable)
        try:
            primals = [self.operands[index] for index in active]
            jaxpr = jax.make_jaxpr(lambda *ts: self._jvp(active, ts, differentiable))(*primals).jaxpr
        except Exception as error:  # there is no rule
            self.error = error
            return set()
        count = len(differentiable)
        uses_input = [any(dce_jaxpr(jaxpr, [other == n for other in range(count)])[1]) for n in range(count)]
        return {index for index, used in zip(differentiable, uses_input, strict=True) if used}

    def jvp(self, tangents: Mapping[int, Array]) -> dict[int, Array]:
        """Return the tangents of the results, by index, for those of some operands."""
        differentiable = self._differentiable_results()
        if not differentiable:
            return {}
        active, values = list(tangents), tuple(tangents.values())
        if self.op_type in CUSTOM_VJP:  # it has no jvp, but its vjp is linear in the cotangents
            results, pull = jax.vjp(self._partial(active, differentiable), *[self.operands[index] for index in active])
            (pushed,) = jax.linear_transpose(lambda cotangents: pull(cotangents), results)(values)
        else:
            pushed = self._jvp(active, values, differentiable)
        return dict(zip(differentiable, pushed, strict=True))

    def vjp(self, cotangents: Mapping[int, Array], active: Sequence[int]) -> dict[int, Array]:
        """Return the cotangents of the active operands, by index, for those of some results."""
        _, pull = jax.vjp(self._partial(active, list(cotangents)), *[self.operands[index] for index in active])
        return dict(zip(active, pull(tuple(cotangents.values())), strict=True))

    def _differentiable_results(self) -> list[int]:
        return [index for index, result in enumerate(self.results) if is_differentiable(result)]

    def _jvp(self, active: Sequence[int], tangents: Sequence[Array], results: Sequence[int]) -> tuple[Array, ...]:
        primals = tuple([self.operands[index] for index in active])
        return jax.jvp(self._partial(active, results), primals, tuple(tangents))[1]

    def _partial(self, active: Sequence[int], results: Sequence[int]) -> Callable[..., tuple[Array, ...]]:
        """Return the operation as a function from some operands to some results."""

        def function(*xs: Array) -> tuple[Array, ...]:
            operands = list(self.operands)
            for index, x in zip(active, xs, strict=True):
                operands[index] = x
            outputs = self.function(*operands)
            return tuple([outputs[index] for index in results])

        return function

    def dependent_outputs(self, masks: Sequence[np.ndarray | None]) -> list[np.ndarray]:
        """Return masks of the elements of the results that can move with those of the operands."""
        shapes = [tuple(x.shape) for x in self.results]
        if not self._can_rerun():
            return guess_dependent_outputs(masks, shapes)
        return dependent_outputs(self._rerun, [_to_numpy(x) for x in self.operands], masks, shapes)

    def is_tied(self, masks: Sequence[np.ndarray | None]) -> bool:
        """Return True if elements that a choice passed over are equal to those that it took."""
        coarse = [jnp.result_type(x) == jnp.bfloat16 for x in self.operands]
        return self._can_rerun() and is_tied(self._rerun, [_to_numpy(x) for x in self.operands], masks, coarse)

    def _can_rerun(self) -> bool:
        keys = [jnp.issubdtype(jnp.result_type(x), jax.dtypes.extended) for x in self.operands]
        return not self.unsafe and not any(keys)

    def _rerun(self, operands: Sequence[np.ndarray]) -> list[np.ndarray]:
        arrays = [jnp.asarray(x, jnp.result_type(y)) for x, y in zip(operands, self.operands, strict=True)]
        return [_to_numpy(x) for x in self.function(*arrays)]


class CallSite(NamedTuple):
    """The user's line, and the function of JAX that they call there, if it has a public name."""

    where: str | None
    word: str | None


def call_site(traceback: Any) -> CallSite:
    inside: list[Any] = []
    for frame in () if traceback is None else traceback.frames:
        if is_user_file(frame.file_name):
            return CallSite(location_text(frame.file_name, frame.line_num), _public_function(inside))
        inside.append(frame)
    return CallSite(None, _public_function(inside))


def _public_function(frames: Sequence[Any]) -> str | None:
    """Return the outermost function that users know, of the frames from an operation to the user's line."""
    for frame in reversed(frames):
        file, name = frame.file_name, frame.function_name.rpartition(".")[2]
        if "/jax/" not in file or "/_backends/jax/" in file:  # our own folder has that name too
            if name == "__call__" and file.endswith("stochastic.py"):
                return "dropout"
            continue
        if name in ("_getitem", "__getitem__"):
            return "indexing"
        if file.endswith("array_methods.py") and name in UPDATES:
            return f".at[].{name}"
        if not name.startswith("_") and any(hasattr(module, name) for module in PUBLIC):
            return str(name)
    return None


def user_line_of(error: BaseException) -> str | None:
    """Return the innermost line of the user's on which an error was raised."""
    line, frame = None, error.__traceback__
    while frame is not None:
        if is_user_file(frame.tb_frame.f_code.co_filename):
            line = location_text(frame.tb_frame.f_code.co_filename, frame.tb_lineno)
        frame = frame.tb_next
    return line


@lru_cache(1024)
def is_user_file(filename: str) -> bool:
    return is_user_code(filename, PACKAGES)


def op_word(name: str) -> str:
    """Return what the user calls a primitive, or a compiled function of JAX's own."""
    bare = name.lstrip("_")
    return WORDS.get(bare, bare.removeprefix("reduce_"))


def is_user_function(params: Mapping[str, Any]) -> bool:
    return is_user_file(_called_function(params)[1])


def function_name(params: Mapping[str, Any]) -> str:
    return _called_function(params)[0]


def _called_function(params: Mapping[str, Any]) -> tuple[str, str]:
    """Return the name and the file of the function that a call runs."""
    inner = next(iter(jaxprs_in_params(dict(params))), None)
    info = str(getattr(getattr(inner, "debug_info", None), "func_src_info", None) or "")
    if info or inner is None or not inner.eqns:
        name, _, source = info.partition(" at ")
        return name.rpartition(".")[2], source.rpartition(":")[0]
    # Without debug info it is the outermost function on the way to the first equation that is not of JAX's tracing.
    function, file = str(inner.eqns[0].params.get("name", "")), ""
    traceback: Any = inner.eqns[0].source_info.traceback
    for frame in () if traceback is None else traceback.frames:
        if frame.file_name.endswith(("linear_util.py", "api_util.py", "custom_derivatives.py")):
            break
        if is_user_file(frame.file_name) or not function:
            function = frame.function_name.rpartition(".")[2]
        file = frame.file_name
    return function, file


def primitives(params: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of all primitives in the programs that a call runs."""
    for inner in jaxprs_in_params(dict(params)):
        for equation in inner.eqns:
            yield equation.primitive.name
            yield from primitives(equation.params)


def out_of_range(op_type: str, params: Mapping[str, Any], operands: Sequence[Any]) -> str:
    """Return a note on indices of a lookup or write that lie outside of the array; empty if there are none."""
    if op_type == "gather":
        axes, access, mode = params["dimension_numbers"].start_index_map, "read", str(params["mode"])
        indices, sizes = operands[1], [params["slice_sizes"][axis] for axis in axes]
    elif op_type.startswith("scatter"):
        axes, access, mode = params["dimension_numbers"].scatter_dims_to_operand_dims, "write", str(params["mode"])
        indices, sizes = operands[1], [1] * len(axes)
    elif op_type == "dynamic_slice":
        axes, access, mode = range(len(operands[0].shape)), "read", "clip"
        indices, sizes = [np.asarray(start) for start in operands[1:]], params["slice_sizes"]
    else:
        return ""
    shape = operands[0].shape
    columns = np.asarray(indices).reshape(-1, len(axes)) if len(axes) else np.zeros((0, 0), int)
    for column, (axis, size) in enumerate(zip(axes, sizes, strict=True)):
        wrong = [int(i) for i in columns[:, column] if not 0 <= i <= shape[axis] - size]
        if wrong:
            head = f"index {wrong[0]} is out of range for axis {axis} of size {shape[axis]}"
            return f"{head}, and JAX {_behaviour(mode.lower(), access)}"
    return ""


def _behaviour(mode: str, access: str) -> str:
    if "clip" in mode or mode.endswith("1"):
        return "takes the nearest one instead" if access == "read" else "writes to the nearest one instead"
    if "fill" in mode or "drop" in mode:
        return "gives NaN there" if access == "read" else "drops what is written there"
    return "reads the nearest one and drops its gradient" if access == "read" else "does what it likes"


def cause_of_cut(op: JaxOp) -> tuple[str | None, str]:
    """Return why no result of an operation is connected although an operand is: a cause, and an observation."""
    inner = op.inner | {op.op_type}
    for callback, cause in CALLBACKS.items():
        if callback in inner:
            return cause, "it hands the numbers to Python code, of which jax knows no derivative"
    if op.op_type == "stop_gradient":
        return "detached", ""
    if op.custom_gradient:
        return "custom-rule", "its rule gives a derivative that does not depend on what comes in"
    if not any(map(is_differentiable, op.results)):
        return "discrete", _dtype_note(op.results)
    if op.error is not None:
        return "no-rule", ""
    if inner & STEP_OPS:
        return "step-function", ""
    if "stop_gradient" in inner:
        return "detached", "it calls stop_gradient inside"
    if inner & COMPARISONS or op.discrete_values:
        return "discrete", _dtype_note(op.discrete_values)
    return None, ""


def _dtype_note(values: Sequence[Array]) -> str:
    dtypes = [str(x.dtype) for x in values if hasattr(x, "dtype")][:1]
    return f"{dtypes[0]} comes out" if dtypes else ""


def cause_of_zero_tangent(op: JaxOp, tangents: Mapping[int, Array]) -> str | None:
    """Return why no tangent leaves an operation, where its numbers say more than its name."""
    moving = {n: to_float64(t) for n, t in tangents.items() if max_abs(t) > 0}
    if not moving or (op.cut_cause is not None and not any(map(is_differentiable, op.results))):
        return None
    first, tangent = next(iter(moving.items()))
    x, moved = to_float64(op.operands[first]), tangent != 0
    constants = [to_float64(y) for n, y in enumerate(op.operands) if n not in moving and _is_number(y)]
    names = {op.op_type, op.operation}
    if _underflows(op, tangents):
        return "underflow"
    if op.note and "gather" not in op.inner and _is_dropped(op, first, moved):
        return "out-of-range"
    if "gather" in op.inner and names & LOOKUPS:
        every = {first: jnp.ones_like(tangents[first])}
        return "out-of-range" if op.note and not _size(op.jvp(every)) else "row-not-used"
    if op.op_type == "select_n" and op.operation == "select":  # for other primitives that word is a slice
        return "masked"
    if is_bound(op):
        return None if not constants else cause_of_bound("max" in op.inner, constants[0])
    if op.inner & CHOICES and names & CHOICE_WORDS:
        masks = [None if n not in moving else moving[n] != 0 for n in range(len(op.operands))]
        return "tie" if op.is_tied(masks) else "not-selected"
    if names & PRODUCTS:
        if len(moving) > 1:
            return "cancelled" if bool(x[moved].any()) else "stationary"
        return "underflow" if constants and bool((constants[0] != 0).all()) else "masked"
    if names & POWERS:
        return "underflow" if bool((to_float64(op.operands[0]) != 0).all()) else "stationary"
    if "relu6" in names and bool((x[moved] > 0).all()):
        return "clamped"
    if names & SOFTMAXES and is_masked_score(x, moved):
        return "masked"
    if names & SOFTMAXES and not _moves_at_zero(op, tangents):
        return "cancelled"
    if op.inner == {"dot_general"}:
        return (
            "cancelled" if len(moving) > 1 or not constants or _meets_factors(op, first, tangents[first]) else "masked"
        )
    return None


def is_bound(op: JaxOp) -> bool:
    """Return True if an operation takes the larger or the smaller of two operands."""
    return op.operation in BOUNDS or op.op_type in BOUNDS or op.op_type in ("max", "min")


def _underflows(op: JaxOp, tangents: Mapping[int, Array]) -> bool:
    size = _size(tangents)
    if not size < 1:
        return False
    factor = 2.0 ** -math.frexp(size)[1]  # a power of two, so that nothing is rounded differently
    return _size(op.jvp({n: jnp.asarray(to_float64(t) * factor, t.dtype) for n, t in tangents.items()})) > 0


def _is_dropped(op: JaxOp, operand: int, moved: np.ndarray) -> bool:
    """Return True if what is written reaches no result. An array that is written into never counts."""
    if op.inputs[operand] in op.written:
        return False
    masks = [moved if n == operand else None for n in range(len(op.operands))]
    return not any(mask.any() for mask in op.dependent_outputs(masks))


def _moves_at_zero(op: JaxOp, tangents: Mapping[int, Array]) -> bool:
    # At zero no element of a softmax is far below the others. If nothing moves even there, the parts always cancel.
    operands = [jnp.zeros_like(x) if n in tangents else x for n, x in enumerate(op.operands)]
    epsilon = max(float(jnp.finfo(t.dtype).eps) for t in tangents.values())
    return not _size(replace(op, operands=operands).jvp(tangents)) <= ROUNDING * epsilon * _size(tangents)


def _meets_factors(op: JaxOp, operand: int, tangent: Array) -> bool:
    """Return True if a tangent is multiplied by something other than zero in a product of matrices."""
    operands = [jnp.abs(x) for x in op.operands]
    operands[operand] = jnp.abs(tangent).astype(operands[operand].dtype)
    return bool(jnp.asarray(op.function(*operands)[0]).any())


def is_differentiable(x: Array) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x) if not hasattr(x, "dtype") else x.dtype, jnp.inexact))


def _is_number(x: Array) -> bool:
    return bool(jnp.issubdtype(x.dtype if hasattr(x, "dtype") else type(x), jnp.number))


def _size(arrays: Mapping[int, Array]) -> float:
    return max_or_nan(map(max_abs, arrays.values()))


def max_abs(x: Array) -> float:
    """Return the largest absolute value; NaN if there is one."""
    return float(np.abs(to_float64(x)).max()) if x.size else 0.0


def max_or_nan(sizes: Iterable[float]) -> float:
    values = list(sizes)
    return math.nan if any(map(math.isnan, values)) else max(values, default=0.0)


def to_float64(x: Array) -> np.ndarray:
    """Convert to a dtype that NumPy has; NumPy compiles nothing."""
    values = np.asarray(x)
    return values.astype(np.float64) if values.dtype.kind in "fV" else values


def _to_numpy(x: Array) -> np.ndarray:
    """Convert to a dtype that NumPy has, and no finer one than necessary."""
    values = np.asarray(x)
    return values.astype(np.float32) if values.dtype.kind == "V" or values.dtype.name == "bfloat16" else values
