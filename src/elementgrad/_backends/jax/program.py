"""The jaxpr of the user's function, evaluated equation by equation, so that tags in it can be captured."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Literal

from elementgrad._backends.jax._compat import current_name_stack, get_opaque_trace_state, jaxprs_in_params, user_context
from elementgrad._cleanup import assign, scope
from elementgrad._names import pytree
from elementgrad._names.capture import Capture
from elementgrad.errors import PlaceError

Step = Callable[[Any, list[Any]], Sequence[Any]]
"""Takes an equation and its operands, and returns its results."""
PREFIX = "elementgrad:"
"""The start of the names of our tags, among the names that users give to checkpoints."""
FOLLOWED = {"jit": "jaxpr", "pjit": "jaxpr", "remat2": "jaxpr", "checkpoint": "jaxpr", "closed_call": "call_jaxpr"}
"""The calls that are equivalent to their inner jaxpr, and the parameter that has it: tags inside them are captured."""
LOOPS = {"scan": "a scan", "while": "a while loop"}
_local = threading.local()


def name_in_graph(x: Any, name: str) -> Any:
    """Return a traced value with a name that stays in the jaxpr and lowers to nothing; a concrete value as it is.

    While a program is traced to capture this name, a concrete value becomes a part of the program as well.
    """
    capture = getattr(_local, "capture", None)
    if isinstance(x, jax.core.Tracer) or (capture is not None and capture.wants(name.partition(":")[0])):
        return checkpoint_name(x, PREFIX + name)
    return x


def capture_tags(function: Callable[..., Any], capture: Capture) -> Callable[..., Any]:
    """Return a function that is traced to a jaxpr and then evaluated, with its tags captured.

    A function that branches in Python on values cannot be traced. It runs as it is, with the tags captured that Python
    itself executes.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            returned, program = _trace(lambda: function(*args, **kwargs), capture)
        except Exception:  # if it is not about tracing, the function raises it again below
            program = None
        if program is None:
            with capture.open(_at_level(capture)):
                return function(*args, **kwargs)
        results = iter(evaluate(program.jaxpr, program.consts, [], _capturing_step(capture)))
        return pytree.map_tree(returned, lambda leaf: next(results) if is_array(leaf) else leaf)

    return run


def evaluate(jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any], step: Step) -> list[Any]:
    """Evaluate a jaxpr, with `step` called for each equation."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))
    last = {variable: index for index, equation in enumerate(jaxpr.eqns) for variable in _variables(equation.invars)}
    for variable in _variables(jaxpr.outvars):
        last.pop(variable, None)
    for index, equation in enumerate(jaxpr.eqns):
        results = step(equation, [_read(atom, values) for atom in equation.invars])
        for variable in set(_variables(equation.invars)):
            if last.get(variable) == index:
                del values[variable]  # its memory is freed after the last use
        values.update(zip(equation.outvars, results, strict=True))
    return [_read(atom, values) for atom in jaxpr.outvars]


def follow(equation: Any, operands: Sequence[Any], step: Step) -> list[Any]:
    """Evaluate the inner jaxpr of a call, with `step` called for each equation."""
    inner = equation.params[FOLLOWED[equation.primitive.name]]
    return evaluate(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), operands, step)


def bind(equation: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """Evaluate an equation as it is, with its derivative rule, sharding and line of code."""
    parameters = equation.primitive.get_bind_params(equation.params)
    functions, parameters = parameters if isinstance(parameters, tuple) else ((), parameters)
    stack = current_name_stack() + equation.source_info.name_stack
    with user_context(equation.source_info.traceback, name_stack=stack), equation.ctx.manager:
        results = equation.primitive.bind(*functions, *operands, **parameters)
    return list(results) if equation.primitive.multiple_results else [results]


def bind_cached(equation: Any, operands: list[Any]) -> Sequence[Any]:
    """Evaluate an equation by compiled code that JAX differentiates once for all equations that are the same.

    The functions of `jax.numpy` are compiled too: differentiating their operations one by one takes several times as
    long to trace.
    """
    has_functions = any(callable(value) and not isinstance(value, type) for value in equation.params.values())
    if (
        equation.primitive.multiple_results
        or equation.effects
        or has_functions  # which may do something else the next time
        or any(jaxprs_in_params(equation.params))
    ):
        return bind(equation, operands)
    try:
        call = _jit_primitive(equation.primitive, tuple(equation.params.items()))
    except TypeError:  # a parameter that has no hash
        return bind(equation, operands)
    stack = current_name_stack() + equation.source_info.name_stack
    with user_context(equation.source_info.traceback, name_stack=stack), equation.ctx.manager:
        return [call(*operands)]


@lru_cache(maxsize=1024)
def _jit_primitive(primitive: Any, params: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    return jax.jit(partial(primitive.bind, **dict(params)), inline=True)


@jax.custom_jvp
def shift(value: jax.Array, change: jax.Array) -> jax.Array:
    """Return `value` to the bit (`-0.0 + 0.0` is `0.0`), with the derivatives of `value + change`."""
    return value


@shift.defjvp
def _shift_jvp(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    return shift(*primals), tangents[0] + tangents[1]


def is_reverse_only(jaxpr: Any) -> bool:
    """Return True if a linear jaxpr has a rule for reverse sweeps alone, which is an operation of its own there."""
    return any(
        equation.primitive.name == "custom_lin" or any(map(is_reverse_only, jaxprs_in_params(equation.params)))
        for equation in jaxpr.eqns
    )


def communicating_axes(jaxpr: Any, names: frozenset[Any]) -> set[Any]:
    """Return those of some named axes along which a program communicates."""
    communicating: set[Any] = set()
    for equation in jaxpr.eqns:
        for key in ("axes", "axis_name"):
            axes = equation.params.get(key, ())
            communicating |= {axis for axis in (axes if isinstance(axes, tuple | list) else [axes]) if axis in names}
        for inner in jaxprs_in_params(equation.params):
            communicating |= communicating_axes(inner, names)
    return communicating


def is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, jax.core.Tracer))


def _trace(function: Callable[[], Any], capture: Capture) -> tuple[Any, Any]:
    """Return what a function returned, and the jaxpr that computes the arrays in it."""
    returned: list[Any] = []

    def arrays() -> list[Any]:
        returned.append(function())
        return [leaf for leaf in pytree.leaves_of(returned[-1]) if is_array(leaf)]

    with capture.open(lambda name: False), _stage_names(capture):
        program = jax.make_jaxpr(arrays)()
    return returned[-1], program


@contextmanager
def _stage_names(capture: Capture) -> Iterator[None]:
    with scope():
        assign(_local, "capture", capture)
        yield


def _at_level(capture: Capture) -> Callable[[str], bool]:
    """Return a function that is True for a tag in the function itself, and False while something inside is traced."""
    level = get_opaque_trace_state(convention="elementgrad")

    def here(name: str) -> bool:
        if get_opaque_trace_state(convention="elementgrad") == level:
            return True
        if name in capture.bases:
            raise PlaceError(
                f"{name!r} is tagged inside a jax.jit, jax.vmap or the like, and the function around it cannot be "
                "traced as it branches on values; tag what that returns, or branch by jnp.where or jax.lax.cond"
            )
        return False

    return here


def _capturing_step(capture: Capture) -> Step:
    known: dict[int, set[str]] = {}

    def step(equation: Any, operands: list[Any]) -> Sequence[Any]:
        tag = _tag(equation)
        if tag is not None:
            (value,) = operands
            value = value if is_array(value) else jnp.asarray(value, equation.invars[0].aval.dtype)
            return [capture.capture_staged(tag, value)]
        inside = {name for inner in jaxprs_in_params(equation.params) for name in _tags_in(inner, known)}
        if inside and equation.primitive.name in FOLLOWED:
            return follow(equation, operands, step)
        for name in sorted(inside & capture.bases):
            raise _unreachable_error(name, equation)
        return bind(equation, operands)

    return step


def _tags_in(jaxpr: Any, known: dict[int, set[str]]) -> set[str]:
    if id(jaxpr) not in known:
        known[id(jaxpr)] = set()
        for equation in jaxpr.eqns:
            tag = _tag(equation)
            known[id(jaxpr)] |= set() if tag is None else {tag.partition(":")[0]}
            for inner in jaxprs_in_params(equation.params):
                known[id(jaxpr)] |= _tags_in(inner, known)
    return known[id(jaxpr)]


def _tag(equation: Any) -> str | None:
    if equation.primitive.name != "name" or not equation.params["name"].startswith(PREFIX):
        return None
    return equation.params["name"].removeprefix(PREFIX)


def _unreachable_error(name: str, equation: Any) -> PlaceError:
    primitive = equation.primitive.name
    if primitive in LOOPS:
        why = f"is tagged inside {LOOPS[primitive]}, where it has no single value; return it from the loop and tag it"
        return PlaceError(f"{name!r} {why} there")
    if primitive == "cond":
        why = "is tagged inside a branch of a cond, which may not run; return it from the branch and tag it there"
        return PlaceError(f"{name!r} {why}")
    return PlaceError(
        f"{name!r} is tagged inside a {primitive}, which has rules of its own and cannot be opened; tag what goes into "
        "it or comes out of it"
    )


def _read(atom: Any, values: dict[Any, Any]) -> Any:
    return atom.val if isinstance(atom, Literal) else values[atom]


def _variables(atoms: Sequence[Any]) -> Iterator[Any]:
    return (atom for atom in atoms if not isinstance(atom, Literal))
