"""Operations of JAX in the words of the user, and the lines on which they wrote them.

One operation of a run, with its numbers: what it is linked to, and how derivatives go through it both ways.

What numbers of a step tell: how large they are, and why none leave.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.ops
import jax.scipy.special
import numpy as np

from elementgrad._backends.jax._compat import dce_jaxpr, jaxprs_in_params
from elementgrad._backends.jax.contributions import JAX_PACKAGES
from elementgrad._backends.source_location import is_user_code, location_text
from elementgrad._explain.dependence import dependent_outputs, guess_dependent_outputs, is_tied
from elementgrad._explain.trace import cause_of_bound, is_masked_score

PACKAGES = (*JAX_PACKAGES, "optax", "equinox", "chex", "haiku", "jaxtyping", "numpy", "scipy")
"""Whose lines of code are not the user's."""
DRAWS = frozenset({"random_bits", "random_gamma", "threefry2x32", "rng_bit_generator", "rng_uniform"})
"""Primitives behind random numbers."""
PUBLIC: tuple[ModuleType, ...] = (
    jnp,
    jnp.linalg,
    jnp.fft,
    jax.nn,
    jax.lax,
    jax.random,
    jax.scipy.special,
    jax.ops,
    jax,
)
"""Where functions live that users call by name."""
WORDS = {
    "select_n": "where",
    "logistic": "sigmoid",
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_prod": "prod",
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
"""Names that no user writes, and what they write instead."""
UPDATES = ("set", "add", "subtract", "multiply", "divide", "power", "min", "max", "apply", "get", "mul")
"""The methods of `x.at[index]`."""


class CallFrame(NamedTuple):
    """One call on the way to an operation."""

    file: str
    name: str
    line: int


class CallSite(NamedTuple):
    """The user's line, and the function of JAX that they call on it, if it has a name."""

    where: str | None
    word: str | None


def place(traceback: Any) -> CallSite:
    """Where an operation comes from."""
    inside: list[CallFrame] = []
    for frame in () if traceback is None else traceback.frames:
        if mine(frame.file_name):
            return CallSite(location_text(frame.file_name, frame.line_num), _called(inside))
        inside.append(CallFrame(frame.file_name, frame.function_name.rpartition(".")[2], frame.line_num))
    return CallSite(None, _called(inside))


def raised(error: BaseException) -> str | None:
    """The innermost line of the user's on which an error was raised."""
    found, frame = None, error.__traceback__
    while frame is not None:
        if mine(frame.tb_frame.f_code.co_filename):
            found = location_text(frame.tb_frame.f_code.co_filename, frame.tb_lineno)
        frame = frame.tb_next
    return found


@lru_cache(1024)
def mine(file: str) -> bool:
    """Whether a file is the user's."""
    return is_user_code(file, PACKAGES)


def _called(inside: list[CallFrame]) -> str | None:
    """The outermost function with a name that users know, among those between their line and an operation."""
    for frame in reversed(inside):
        if "/jax/" not in frame.file:
            if frame.name == "__call__" and frame.file.endswith("stochastic.py"):
                return "dropout"
            continue
        if frame.name in ("_getitem", "__getitem__"):
            return "indexing"
        if frame.file.endswith("array_methods.py") and frame.name in UPDATES:
            return f".at[].{frame.name}"
        if not frame.name.startswith("_") and any(hasattr(module, frame.name) for module in PUBLIC):
            return frame.name
    return None


def of_primitive(name: str) -> str:
    """What the user calls a primitive or a function of JAX's own that is compiled."""
    plain = name.lstrip("_")
    return WORDS.get(plain, plain.removeprefix("reduce_"))


def is_own(params: Mapping[str, Any]) -> bool:
    """Whether what a call runs was written by the user, and not by those who wrote JAX."""
    return mine(_home(params)[1])


def title(params: Mapping[str, Any]) -> str:
    """The name of the function that a call runs."""
    return _home(params)[0]


def _home(params: Mapping[str, Any]) -> tuple[str, str]:
    inner = next(iter(jaxprs_in_params(dict(params))), None)
    told = str(getattr(getattr(inner, "debug_info", None), "func_src_info", None) or "")
    name, _, source = told.partition(" at ")
    if not told and inner is not None and inner.eqns:
        return _outermost(inner.eqns[0])
    return name.rpartition(".")[2], source.rpartition(":")[0]


def _outermost(equation: Any) -> tuple[str, str]:
    """The name and file of the function that a program was traced from, by the calls to its first equation."""
    found = str(equation.params.get("name", "")), ""
    traceback = equation.source_info.traceback
    for frame in () if traceback is None else traceback.frames:
        if frame.file_name.endswith(("linear_util.py", "api_util.py", "custom_derivatives.py")):
            break
        name = frame.function_name.rpartition(".")[2]
        found = name if mine(frame.file_name) or not found[0] else found[0], frame.file_name
    return found


def primitives(params: Mapping[str, Any]) -> Iterator[str]:
    """The names of all primitives in the programs that a call runs."""
    for inner in jaxprs_in_params(dict(params)):
        for equation in inner.eqns:
            yield equation.primitive.name
            yield from primitives(equation.params)


Array = Any
STEPS = {"round", "floor", "ceil", "sign", "round_nearest_even"}
CALLBACKS = {"pure_callback": "no-rule", "io_callback": "left-framework"}
UNSAFE = {*CALLBACKS, "while", "debug_callback"}
"""What is not run on other numbers: they call the user's Python code, or may never end."""
CUSTOM_JVP = {"custom_jvp_call"}
CUSTOM_VJP = {"custom_vjp_call", "custom_vjp_call_jaxpr"}
LOOPS = {"while", "scan"}
"""Count their turns, which are whole numbers."""
COMPARISONS = {"gt", "lt", "ge", "le", "eq", "ne", "argmax", "argmin", "is_finite"}


@dataclass(eq=False)
class JaxOp:
    """One operation that was run."""

    name: str
    """The primitive."""
    params: Mapping[str, Any]
    function: Callable[..., Sequence[Array]]
    """From all operands to all results."""
    operands: Sequence[Array]
    takes: Sequence[int]
    where: str | None
    word: str
    own: bool = False
    """Whether the user wrote its derivative."""
    quiet: bool = False
    path: str = ""
    results: Sequence[Array] = ()
    gives: Sequence[int] = ()
    note: str = ""
    stops: str | None = None
    decides: bool = False
    group: tuple[str | None, str] | None = None
    """The call of a function of JAX's that it is a part of."""
    refused: Exception | None = field(default=None, repr=False)
    """Why it has no derivative, if it has none."""
    inner: frozenset[str] = frozenset()
    """The primitives that it is made of."""
    unsafe: bool = False
    """Whether it is not run on other numbers."""
    passing: Sequence[Array] = ()
    """Whole numbers and truths that it makes on the way, if it is one call of several operations."""

    arrays: frozenset[int] = frozenset()
    """The values that it writes into, if it writes."""

    def __post_init__(self) -> None:
        self.arrays = frozenset(self.takes[:1] if self.name.startswith("scatter") else ())
        inner = {name for name in primitives(self.params) if not name.endswith("jit")}
        self.inner = frozenset(inner or {self.name})
        self.unsafe = not UNSAFE.isdisjoint({self.name, *inner})

    def run(self) -> None:
        """Compute the results."""
        self.results = [x if hasattr(x, "shape") else jnp.asarray(x) for x in self.function(*self.operands)]

    def linked(self, active: Sequence[int]) -> set[int]:
        """The results whose derivative is computed from those of some operands, by JAX's own rules."""
        able = [number for number, result in enumerate(self.results) if smooth(result)]
        active = [number for number in active if smooth(self.operands[number])]
        if not able or not active:
            return set()
        if self.name in CUSTOM_VJP:
            return set(able)
        try:
            program = jax.make_jaxpr(lambda *tangents: self._jvp(active, tangents, able))(
                *[self.operands[number] for number in active]
            )
        except Exception as error:  # there is no rule
            self.refused = error
            return set()
        jaxpr = program.jaxpr
        leads = [any(dce_jaxpr(jaxpr, [o == n for o in range(len(able))])[1]) for n in range(len(able))]
        return {number for number, led in zip(able, leads, strict=True) if led}

    def _of(self, active: Sequence[int], results: Sequence[int]) -> Callable[..., tuple[Array, ...]]:
        """The operation as a function of some of its operands."""

        def function(*xs: Array) -> tuple[Array, ...]:
            operands = list(self.operands)
            for number, x in zip(active, xs, strict=True):
                operands[number] = x
            given = self.function(*operands)
            return tuple([given[number] for number in results])

        return function

    def _jvp(self, active: Sequence[int], tangents: Sequence[Array], results: Sequence[int]) -> tuple[Array, ...]:
        primals = tuple([self.operands[number] for number in active])
        return jax.jvp(self._of(active, results), primals, tuple(tangents))[1]

    def jvp(self, tangents: Mapping[int, Array]) -> dict[int, Array]:
        """The derivatives of the results, by number, for those of some operands."""
        able = [number for number, result in enumerate(self.results) if smooth(result)]
        if not able:
            return {}
        active = list(tangents)
        if self.name in CUSTOM_VJP:
            primals = [self.operands[number] for number in active]
            results, back = jax.vjp(self._of(active, able), *primals)
            (pushed,) = jax.linear_transpose(lambda cotangents: back(cotangents), results)(
                tuple([tangents[number] for number in active])
            )
        else:
            pushed = self._jvp(active, [tangents[number] for number in active], able)
        return dict(zip(able, pushed, strict=True))

    def vjp(self, cotangents: Mapping[int, Array], active: Sequence[int]) -> dict[int, Array]:
        """The gradients of some operands, by number, for those of some results."""
        results = list(cotangents)
        _, back = jax.vjp(self._of(active, results), *[self.operands[number] for number in active])
        return dict(zip(active, back(tuple([cotangents[number] for number in results])), strict=True))

    def touched(self, masks: Sequence[np.ndarray | None]) -> list[np.ndarray]:
        """Which elements of the results can move with some of the operands."""
        shapes = [tuple(x.shape) for x in self.results]
        if not self._repeatable():
            return guess_dependent_outputs(masks, shapes)
        return dependent_outputs(self._again, [_wide(x) for x in self.operands], masks, shapes)

    def ties(self, masks: Sequence[np.ndarray | None]) -> bool:
        """Whether elements of what a choice takes are level with those that it took."""
        coarse = [jnp.result_type(x) == jnp.bfloat16 for x in self.operands]
        return self._repeatable() and is_tied(self._again, [_wide(x) for x in self.operands], masks, coarse)

    def _repeatable(self) -> bool:
        """Whether it can be run on other numbers."""
        return not self.unsafe and not any(
            jnp.issubdtype(jnp.result_type(x), jax.dtypes.extended) for x in self.operands
        )

    def _again(self, operands: Sequence[np.ndarray]) -> list[np.ndarray]:
        kinds = [jnp.result_type(x) for x in self.operands]
        given = self.function(*[jnp.asarray(x, kind) for x, kind in zip(operands, kinds, strict=True)])
        return [_wide(x) for x in given]

    def why_stopped(self) -> tuple[str | None, str]:
        """Why it gives nothing that is linked though it takes something: a cause, and what was seen."""
        inner = self.inner | {self.name}
        for callback, cause in CALLBACKS.items():
            if callback in inner:
                return cause, "it hands the numbers to Python code, of which jax knows no derivative"
        if self.name == "stop_gradient":
            return "detached", ""
        if self.own:
            return "custom-rule", "its rule gives a derivative that does not depend on what comes in"
        if not any(map(smooth, self.results)):
            return "discrete", _kind_of(self.results)
        if self.refused is not None:
            return "no-rule", ""
        if inner & STEPS:
            return "step-function", ""
        if "stop_gradient" in inner:
            return "detached", "it calls stop_gradient inside"
        if inner & COMPARISONS or self.passing:
            return "discrete", _kind_of(self.passing)
        return None, ""


def connect(steps: Sequence[JaxOp], source: int) -> frozenset[int]:
    """The values that JAX's derivative leads back from to the source; the steps that end it are told why.

    Only after the run: a rule that somebody wrote may run once in it.
    """
    connected = {source}
    for step in steps:
        active = [number for number, value in enumerate(step.takes) if value in connected]
        if not active or step.stops is not None:
            continue
        linked = step.linked(active)
        connected.update([step.gives[number] for number in linked])
        if linked and not step.note and step.name not in LOOPS and not all(map(smooth, step.results)):
            step.stops = "discrete"  # of the rest, such as the indices beside the largest
        if not linked:
            cause, seen = step.why_stopped()
            step.stops, step.note = cause, step.note or seen
    return frozenset(connected)


def _kind_of(values: Sequence[Array]) -> str:
    kinds = [str(x.dtype) for x in values if hasattr(x, "dtype")][:1]
    return f"{kinds[0]} comes out" if kinds else ""


def smooth(x: Array) -> bool:
    """Whether a value can have derivatives."""
    return bool(jnp.issubdtype(jnp.result_type(x) if not hasattr(x, "dtype") else x.dtype, jnp.inexact))


def _wide(x: Array) -> np.ndarray:
    """Numbers in a precision that NumPy knows."""
    values = np.asarray(x)
    return values.astype(np.float32) if values.dtype.kind == "V" or values.dtype.name == "bfloat16" else values


PRODUCTS = {"mul", "multiply", "div", "true_divide", "divide"}
POWERS = {"square", "integer_pow", "pow", "power", "float_power"}
CHOICES = frozenset(
    """
    reduce_max reduce_min sort top_k approx_top_k cummax cummin reduce_window_max reduce_window_min
    select_and_gather_add scatter-max scatter_max scatter-min scatter_min
    """.split()  # noqa: SIM905
)
"""Primitives that take some elements and leave others."""
CHOOSERS = CHOICES | frozenset(
    """
    max min amax amin nanmax nanmin ptp partition lexsort median quantile percentile reduce_window max_pool min_pool
    segment_max segment_min .at[].max .at[].min
    """.split()  # noqa: SIM905
)
"""What users call them. A softmax has a maximum inside, too, and is none of them."""
BOUNDS = {"maximum", "minimum", "fmax", "fmin"}
SHARES = {"softmax", "log_softmax"}
"""Functions of differences between elements alone."""
ROUNDING = 64.0
LOOKUPS = {"gather", "indexing", "take", "take_along_axis", ".at[].get"}


def largest(x: Array) -> float:
    """The largest in size; NaN if there is one."""
    return float(np.abs(plain(x)).max()) if x.size else 0.0


def plain(x: Array) -> np.ndarray:
    """Numbers for NumPy to look at, which compiles nothing, in a precision that it knows."""
    values = np.asarray(x)
    return values.astype(np.float64) if values.dtype.kind in "fV" else values


def worst(sizes: Iterable[float]) -> float:
    """The largest of several, NaN counting most."""
    known = list(sizes)
    return math.nan if any(map(math.isnan, known)) else max(known, default=0.0)


def finite(x: Array) -> bool:
    """Whether all numbers are finite."""
    return not smooth(x) or bool(np.isfinite(plain(x)).all())


def ended(step: JaxOp, came: Mapping[int, Array]) -> str | None:
    """Why a step gives no derivative, where its numbers say more than its name."""
    moving = {n: plain(t) for n, t in came.items() if largest(t) > 0}
    if not moving or (step.stops is not None and not any(map(smooth, step.results))):
        return None
    first, tangent = next(iter(moving.items()))
    x = plain(step.operands[first])
    still = [plain(y) for n, y in enumerate(step.operands) if n not in moving and jnp.issubdtype(_kind(y), jnp.number)]
    named = {step.name, step.word}
    if _is_too_small(step, came):
        return "underflow"
    if step.note and "gather" not in step.inner and _goes_nowhere(step, first, tangent):
        return "out-of-range"
    if "gather" in step.inner and named & LOOKUPS:
        every = {first: jnp.ones_like(came[first])}
        return "out-of-range" if step.note and not worst(map(largest, step.jvp(every).values())) else "row-not-used"
    if step.name == "select_n" and step.word == "select":  # elsewhere it is a slice that is called so
        return "masked"
    bound = is_bound(step)
    if step.inner & CHOICES and named & CHOOSERS and not bound:
        masks = [None if n not in moving else moving[n] != 0 for n in range(len(step.operands))]
        return "tie" if step.ties(masks) else "not-selected"
    if bound:
        return None if not still else cause_of_bound("max" in step.inner, still[0])
    if named & PRODUCTS:
        if len(moving) > 1:
            return "cancelled" if bool(x[tangent != 0].any()) else "stationary"
        return "underflow" if still and bool((still[0] != 0).all()) else "masked"
    if named & POWERS:
        return "underflow" if bool((plain(step.operands[0]) != 0).all()) else "stationary"
    if "relu6" in named and bool((x[tangent != 0] > 0).all()):
        return "clamped"
    if named & SHARES and is_masked_score(x, tangent != 0):
        return "masked"
    if named & SHARES and not _moves_at_zero(step, came):
        return "cancelled"
    if step.inner == {"dot_general"}:
        return "cancelled" if len(moving) > 1 or not still or _meets(step, first, came[first]) else "masked"
    return None


def _goes_nowhere(step: JaxOp, number: int, tangent: np.ndarray) -> bool:
    """Whether what is written moves nothing, whatever it is. What is written over moves nothing either."""
    if step.takes[number] in step.arrays:
        return False
    masks = [tangent != 0 if n == number else None for n in range(len(step.operands))]
    return not any(mask.any() for mask in step.touched(masks))


def is_bound(step: JaxOp) -> bool:
    """Whether a step takes the larger or the smaller of two."""
    return step.word in BOUNDS or step.name in BOUNDS or step.name in ("max", "min")


def _is_too_small(step: JaxOp, came: Mapping[int, Array]) -> bool:
    """Whether something leaves if more comes in: a power of two, so that nothing is rounded in another way."""
    size = worst(map(largest, came.values()))
    if not size < 1:
        return False
    factor = 2.0 ** -math.frexp(size)[1]
    more = {n: jnp.asarray(plain(t) * factor, t.dtype) for n, t in came.items()}
    return worst(map(largest, step.jvp(more).values())) > 0


def _moves_at_zero(step: JaxOp, came: Mapping[int, Array]) -> bool:
    """Whether there is a slope where nothing is far out; if there is none, its parts cancel everywhere."""
    operands = [jnp.zeros_like(x) if n in came else x for n, x in enumerate(step.operands)]
    moves = worst(map(largest, replace(step, operands=operands).jvp(came).values()))
    finest = max(float(jnp.finfo(t.dtype).eps) for t in came.values())
    return not moves <= ROUNDING * finest * worst(map(largest, came.values()))


def _kind(x: Array) -> Any:
    return x.dtype if hasattr(x, "dtype") else type(x)


def _meets(step: JaxOp, number: int, tangent: Array) -> bool:
    """Whether a derivative meets factors other than zero in a product of matrices, and cancels with others there."""
    operands = [jnp.abs(x) for x in step.operands]
    operands[number] = jnp.abs(tangent).astype(operands[number].dtype)
    return bool(jnp.asarray(step.function(*operands)[0]).any())
