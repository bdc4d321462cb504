"""Rules by which runs of JAX are explained: what users call its operations, and what these do to derivatives.

`JaxOp` is one operation of a run, with its arrays; JAX gives its jvp and vjp. The functions below it name the function
that the user called, and say why an operation lets no derivative through.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.ops
import jax.scipy.special
import numpy as np

from elementgrad._backends.jax._compat import dce_jaxpr, jaxprs_in_params, reverse_rule
from elementgrad._backends.jax.read import JAX_PACKAGES
from elementgrad._backends.jax.tensor import backend
from elementgrad._backends.source_location import is_user_code, location_text
from elementgrad._explain import kinds
from elementgrad._explain.connect import Cuts
from elementgrad._explain.trace import Numbers, Op

Array = Any
PACKAGES = (*JAX_PACKAGES, "optax", "equinox", "chex", "haiku", "jaxtyping", "numpy", "scipy")
"""Packages whose lines are not the user's."""
PUBLIC = (jnp, jnp.linalg, jnp.fft, jax.nn, jax.lax, jax.random, jax.scipy.special, jax.ops, jax)
"""Modules with the functions that users call by name."""
WORDS = kinds.parse_words(
    """
    select_n=where logistic=sigmoid max=maximum min=minimum integer_pow=pow power=pow clamp=clip
    convert_element_type=astype gather=indexing dynamic_slice=indexing slice=indexing scatter=.at[].set
    scatter-add=.at[].add scatter_add=.at[].add name=checkpoint_name while=while_loop gt=greater lt=less
    ge=greater_equal le=less_equal eq=equal ne=not_equal
    """
)
"""The user's words for primitives whose name is another."""
UPDATES = ("set", "add", "subtract", "multiply", "divide", "power", "min", "max", "apply", "get", "mul")
"""The methods of `x.at[index]`."""
RANDOM_OPS = frozenset({"random_bits", "random_gamma", "threefry2x32", "rng_bit_generator", "rng_uniform"})
_PYTHON = "it passes values to Python code, which JAX cannot differentiate"
CUTS: Cuts = {
    "pure_callback": ("no-rule", _PYTHON),
    "io_callback": ("left-framework", _PYTHON),
    "stop_gradient": ("detached", ""),
    **dict.fromkeys(("round", "floor", "ceil", "sign", "round_nearest_even"), ("step-function", "")),
}
"""Primitives that let no derivative through."""
NOT_RERUN = {"pure_callback", "io_callback", "while", "debug_callback"}
"""Primitives that are not run on other numbers, because they call the user's code or may never end."""
LOOPS = {"while", "scan"}
CUSTOM_JVP = {"custom_jvp_call"}
CUSTOM_VJP = {"custom_vjp_call", "custom_vjp_call_jaxpr"}
COMPARISONS = {"gt", "lt", "ge", "le", "eq", "ne", "argmax", "argmin", "is_finite"}
LOOKUPS = {"gather", "indexing", "take", "take_along_axis", ".at[].get"}
CHOICES = frozenset(
    """
    reduce_max reduce_min sort top_k approx_top_k cummax cummin reduce_window_max reduce_window_min
    select_and_gather_add scatter-max scatter_max scatter-min scatter_min
    """.split()  # noqa: SIM905
)
"""Primitives that take some elements and leave others."""
POWERS = {"square", "integer_pow", "pow", "power", "float_power"}


def kind_of(op_type: str, word: str, inner: AbstractSet[str]) -> str | None:
    """Return the kind of an operation, by its primitive, the user's word, and the primitives that it is made of."""
    names = {op_type, word}
    if "gather" in inner and names & LOOKUPS:
        return kinds.LOOKUP
    if op_type == "select_n" and word == "select":  # for other primitives that word is a slice
        return kinds.SELECTION
    if word in ("maximum", "minimum", "fmax", "fmin") or op_type in ("max", "min"):
        return kinds.LOWER_BOUND if "max" in inner else kinds.UPPER_BOUND
    if names & POWERS:
        return kinds.POWER
    kind = kinds.KINDS.get(word) or kinds.KINDS.get(op_type)
    if kind == kinds.CHOICE:  # a softmax has a maximum inside as well, but is not a choice
        return kind if inner & CHOICES else None
    return kind or (kinds.MATRIX_PRODUCT if inner == {"dot_general"} else None)


@dataclass(eq=False)
class JaxOp(Op):
    """One operation that ran, or several that are one call of the user's."""

    function: Callable[..., Sequence[Array]] = field(default=lambda *xs: xs, repr=False)
    """Computes all results from all operands."""
    params: Mapping[str, Any] = field(default_factory=dict)
    call: tuple[str | None, str] | None = None
    """The line and name of the function of JAX that it is a part of."""
    updates: bool = False
    """True if it is a part of an optimizer's update."""

    def __post_init__(self) -> None:
        if self.inner:  # it is a copy, or was put together from others
            return
        self.written = frozenset(self.inputs[:1] if self.op_type.startswith("scatter") else ())
        inner = {name for name in primitives(self.params) if not name.endswith("jit")}
        self.inner = frozenset(inner or {self.op_type})
        keys = any(jnp.issubdtype(jnp.result_type(x), jax.dtypes.extended) for x in self.operands)
        self.can_rerun = not keys and NOT_RERUN.isdisjoint({self.op_type, *inner})
        self.kind = None if self.custom_gradient else kind_of(self.op_type, self.operation, self.inner)
        self.loops, self.compares = self.op_type in LOOPS, not COMPARISONS.isdisjoint(self.inner)

    def rerun(self, operands: Sequence[Array]) -> list[Array]:
        return [x if hasattr(x, "shape") else jnp.asarray(x) for x in self.function(*operands)]

    def connected_results(self, active: Sequence[int]) -> set[int]:
        """Return the indices of the results whose derivative, by JAX's own rules, uses that of an active operand."""
        differentiable = self._differentiable_results()
        active = [index for index in active if is_differentiable(self.operands[index])]
        if not differentiable or not active:
            return set()
        if self.op_type in CUSTOM_VJP:
            return set(differentiable)
        primals = [self.operands[index] for index in active]
        jaxpr = jax.make_jaxpr(lambda *ts: self._jvp(active, ts, differentiable))(*primals).jaxpr
        count = len(differentiable)
        uses_input = [any(dce_jaxpr(jaxpr, [other == n for other in range(count)])[1]) for n in range(count)]
        return {index for index, used in zip(differentiable, uses_input, strict=True) if used}

    def jvp(self, tangents: Sequence[Array | None]) -> list[Array | None]:
        results = self._differentiable_results()
        active = [n for n, t in enumerate(tangents) if t is not None]
        if not results or not active:
            return [None] * len(self.results)
        values = tuple([tangents[n] for n in active])
        if self.op_type in CUSTOM_VJP:  # it has no jvp, but its vjp is linear in the cotangents
            primals, pull = jax.vjp(self._partial(active, results), *[self.operands[n] for n in active])
            (pushed,) = jax.linear_transpose(lambda cotangents: pull(cotangents), primals)(values)
        else:
            pushed = self._jvp(active, values, results)
        by_index = dict(zip(results, pushed, strict=True))
        return [by_index.get(n) for n in range(len(self.results))]

    def vjp(self, cotangents: Sequence[Array | None], wanted: Sequence[bool]) -> list[Array | None]:
        arriving = {n: g for n, g in enumerate(cotangents) if g is not None}
        active = [n for n, needed in enumerate(wanted) if needed]
        # What is linear is transposed, without computing it forwards; a product is linear in each of its operands.
        linear = self.kind in (kinds.MOVE, kinds.SUM, kinds.MATRIX_PRODUCT)
        groups = [[n] for n in active] if self.kind == kinds.MATRIX_PRODUCT else [active]
        pulled: dict[int, Array] = {}
        for group in groups:
            function, xs = self._partial(group, list(arriving)), [self.operands[n] for n in group]
            pull = jax.linear_transpose(function, *xs) if linear else jax.vjp(function, *xs)[1]
            pulled.update(zip(group, pull(tuple(arriving.values())), strict=True))
        return [pulled.get(n) for n in range(len(self.operands))]

    def _differentiable_results(self) -> list[int]:
        return [index for index, result in enumerate(self.results) if is_differentiable(result)]

    def _jvp(self, active: Sequence[int], tangents: Sequence[Any], results: Sequence[int]) -> tuple[Array, ...]:
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


class CallSite(NamedTuple):
    """The user's line, and the function of JAX that they call there, if it has a public name."""

    where: str | None
    word: str | None
    updates: bool = False
    """True if it is a line of an optimizer's."""


def call_site(traceback: Any) -> CallSite:
    inside: list[Any] = []
    for frame in () if traceback is None else traceback.frames:
        if is_user_file(frame.file_name):
            return CallSite(location_text(frame.file_name, frame.line_num), *_called(inside))
        inside.append(frame)
    return CallSite(None, *_called(inside))


def _called(frames: Sequence[Any]) -> tuple[str | None, bool]:
    return _public_function(frames), any("/optax/" in frame.file_name.replace("\\", "/") for frame in frames)


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


@lru_cache(1024)
def is_user_file(filename: str) -> bool:
    return is_user_code(filename, PACKAGES)


def op_word(name: str) -> str:
    """Return what the user calls a primitive, or a compiled function of JAX's own."""
    bare = name.lstrip("_")
    return WORDS.get(bare, bare.removeprefix("reduce_"))


def is_user_function(params: Mapping[str, Any]) -> bool:
    """Return True if a call runs a function of the user's, also by way of another library, as `filter_jit` does."""
    file = _called_function(params)[1]
    return is_user_file(file) or (is_user_code(file, ("jax", "jaxlib")) and _runs_user_code(params))


def _runs_user_code(params: Mapping[str, Any]) -> bool:
    for inner in jaxprs_in_params(dict(params)):
        for equation in inner.eqns:
            for frame in _frames_inside(equation):
                if is_user_file(frame.file_name):
                    return True
    return False


def _frames_inside(equation: Any) -> Iterator[Any]:
    """Yield the frames of an equation, the innermost first, up to where JAX traces the program that it is in.

    A call of a function with a rule of its own also begins in `custom_derivatives.py`, but in no function that flattens
    arguments, as those do that JAX traces.
    """
    traceback: Any = equation.source_info.traceback
    for frame in () if traceback is None else traceback.frames:
        traces_rule = frame.file_name.endswith("custom_derivatives.py") and "flatten" in frame.function_name
        if traces_rule or frame.file_name.endswith(("linear_util.py", "api_util.py")):
            return
        yield frame


def function_name(params: Mapping[str, Any]) -> str:
    return _called_function(params)[0]


def _called_function(params: Mapping[str, Any]) -> tuple[str, str]:
    """Return the name and the file of the function that a call runs."""
    inner = next(iter(jaxprs_in_params(dict(params))), None)
    info = str(getattr(getattr(inner, "debug_info", None), "func_src_info", None) or "")
    if info or inner is None:
        name, _, source = info.partition(" at ")
        return name.rpartition(".")[2], source.rpartition(":")[0]
    if not inner.eqns:  # a function that returns what it is given, whose rule alone tells whose it is
        return "custom_vjp", getattr(getattr(reverse_rule(params), "__code__", None), "co_filename", "")
    # Without debug info it is the outermost function on the way to the first equation that is not of JAX's tracing.
    function, file = str(inner.eqns[0].params.get("name", "")), ""
    for frame in _frames_inside(inner.eqns[0]):
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
    elif op_type == "dynamic_update_slice":
        axes, access, mode = range(len(operands[0].shape)), "write", "clip"
        indices, sizes = [np.asarray(start) for start in operands[2:]], operands[1].shape
    else:
        return ""
    shape = operands[0].shape
    columns = np.asarray(indices).reshape(-1, len(axes)) if len(axes) else np.zeros((0, 0), int)
    for column, (axis, size) in enumerate(zip(axes, sizes, strict=True)):
        wrong = [int(i) for i in columns[:, column] if not 0 <= i <= shape[axis] - size]
        if wrong:
            given = wrong[0] - shape[axis] if wrong[0] < 0 else wrong[0]  # JAX has added the size to negative ones
            head = f"index {given} is out of range for axis {axis} of size {shape[axis]}"
            return f"{head}, and JAX {_behaviour(mode.lower(), access)}"
    return ""


def _behaviour(mode: str, access: str) -> str:
    if "clip" in mode or mode.endswith("1"):
        return "takes the nearest one instead" if access == "read" else "writes to the nearest one instead"
    if "fill" in mode or "drop" in mode:
        return "gives NaN there" if access == "read" else "drops what is written there"
    return "reads the nearest one and drops its gradient" if access == "read" else "does what it likes"


def is_differentiable(x: Array) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x) if not hasattr(x, "dtype") else x.dtype, jnp.inexact))


NUMBERS = Numbers(backend)
