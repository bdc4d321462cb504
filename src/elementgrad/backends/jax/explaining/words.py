"""Operations of JAX in the words of the user, and the lines on which they wrote them."""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.ops
import jax.scipy.special
from jax._src.core import jaxprs_in_params

from elementgrad.backends.jax.uses import PACKAGES as FRAMEWORK
from elementgrad.backends.lines import is_users, spelled

PACKAGES = (*FRAMEWORK, "optax", "equinox", "chex", "haiku", "jaxtyping", "numpy", "scipy")
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


class Frame(NamedTuple):
    """One call on the way to an operation."""

    file: str
    name: str
    line: int


class Place(NamedTuple):
    """The user's line, and the function of JAX that they call on it, if it has a name."""

    where: str | None
    word: str | None


def place(traceback: Any) -> Place:
    """Where an operation comes from."""
    inside: list[Frame] = []
    for frame in () if traceback is None else traceback.frames:
        if mine(frame.file_name):
            return Place(spelled(frame.file_name, frame.line_num), _called(inside))
        inside.append(Frame(frame.file_name, frame.function_name.rpartition(".")[2], frame.line_num))
    return Place(None, _called(inside))


def raised(error: BaseException) -> str | None:
    """The innermost line of the user's on which an error was raised."""
    found, frame = None, error.__traceback__
    while frame is not None:
        if mine(frame.tb_frame.f_code.co_filename):
            found = spelled(frame.tb_frame.f_code.co_filename, frame.tb_lineno)
        frame = frame.tb_next
    return found


@lru_cache(1024)
def mine(file: str) -> bool:
    """Whether a file is the user's."""
    return is_users(file, PACKAGES)


def _called(inside: list[Frame]) -> str | None:
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
