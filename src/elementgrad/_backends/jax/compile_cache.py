"""A cache of compiled programs, in which a program is found by its equations.

A function is traced anew on every call, as its closure, a global or an attribute may have changed. The jaxpr of that
trace tells what it computes, and `find_or_make` returns what was compiled for an equal one. Arrays are no part of it:
they become operands, so that new weights need no new program, and none of them is kept alive here.
"""

from collections.abc import Callable, Hashable, Sequence
from enum import Enum
from functools import lru_cache
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from elementgrad._backends.jax._compat import (
    core,
    has_jvp_rule,
    is_wrapped_function,
    trace_jvp_rule,
    with_jvp_rule,
    without_consts,
)
from elementgrad._backends.jax.program import FOLLOWED, bind, evaluate

Made = TypeVar("Made")
Program = Callable[..., list[Any]]
"""A function of the operands, as a sequence, and the inputs; it is a `CachedProgram`."""
SIZE = 128
"""The number of programs that are kept, the last used ones."""
PLAIN = (type(None), bool, int, str, bytes, np.dtype, type, Enum)
FRAMEWORK = ("jax", "jaxlib", "numpy", "ml_dtypes")


def find_or_make(program: ClosedJaxpr, make: Callable[[Program], Made]) -> tuple[Made, list[Any]] | None:
    """Return what `make` made for an equal program, or makes now, and the arrays of this one to give to it.

    Programs are equal if they have the same equations on the same types, wherever the function is from. `make` must be
    a function of a module. None is returned for a program that cannot be compared: it has side effects, or Python
    functions that may compute something else the next time. What is made may differentiate it once, and not the
    derivative again: a function with a rule of its own is known by this rule, and its rule by what it computes.

    >>> import jax, jax.numpy as jnp
    >>> from elementgrad._backends.jax.compile_cache import find_or_make
    >>> scales = jnp.array([2.0]), jnp.array([3.0])
    >>> programs = [jax.make_jaxpr(lambda x: x * scale)(1.0) for scale in scales]
    >>> (first, _), (second, operands) = [find_or_make(program, jax.jit) for program in programs]
    >>> first is second, second(operands, 5.0)[0].tolist()
    (True, [15.0])
    """
    spelling = _Spelling()
    try:
        key, jaxpr = spelling.spell(program.jaxpr, program.consts, opens=True)
    except _IncomparableError:
        return None
    return _make(make, _Key(key, hash(key), jaxpr, len(program.consts))), spelling.arrays


@lru_cache(maxsize=SIZE)
def _make(make: Callable[[Program], Made], key: "_Key") -> Made:
    return make(CachedProgram(key.jaxpr, key.consts))


class CachedProgram:
    """A program without arrays: the function of the operands, as a sequence, and the inputs that `make` is given."""

    def __init__(self, jaxpr: Any, count: int):
        self.jaxpr = jaxpr
        self._count = count

    def __call__(self, operands: Sequence[Any], *inputs: Any) -> list[Any]:
        def step(equation: Any, values: list[Any]) -> Sequence[Any]:
            inner = equation.params.get(FOLLOWED.get(equation.primitive.name))
            if isinstance(inner, OpenedCall):
                return evaluate(inner.jaxpr, inner.select(operands), values, step)
            return bind(equation, values)

        return evaluate(self.jaxpr, self.select(operands), inputs, step)

    def select(self, operands: Sequence[Any]) -> Sequence[Any]:
        """Return the operands that are constants of the program itself, and not of a call in it."""
        return operands[: self._count]


class _Key:
    """A program as a key: equal if it is spelled the same, whatever its variables are."""

    def __init__(self, spelled: Hashable, hashed: int, jaxpr: Any, consts: int):
        self._spelled, self._hashed = spelled, hashed
        self.jaxpr = jaxpr
        self.consts = consts
        """The number of operands that are constants of the jaxpr itself."""

    def __hash__(self) -> int:
        return self._hashed

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._hashed == other._hashed and self._spelled == other._spelled


class OpenedCall(NamedTuple):
    """The inner program of a call that has arrays of its own: it is evaluated with those among the operands."""

    jaxpr: Any
    start: int
    stop: int

    def select(self, operands: Sequence[Any]) -> Sequence[Any]:
        """Return the operands that are the arrays of this program."""
        return operands[self.start : self.stop]


class _IncomparableError(Exception):
    """A program has something in it by which it cannot be compared with others."""


class _Spelling:
    """Spells programs as nested tuples, with numbers for variables, and takes the arrays out of them."""

    def __init__(self) -> None:
        self.arrays: list[Any] = []
        self._contexts: dict[int, str] = {}
        self._spelled: dict[tuple[int, bool, bool], tuple[Any, Hashable, Any]] = {}
        """Inner programs without arrays of their own, by their identity."""
        self._in_rule = False

    def spell(self, jaxpr: Any, consts: Sequence[Any], opens: bool = False) -> tuple[Hashable, Any]:
        """Return a jaxpr as tuples, and one without arrays and without functions of the user.

        With `opens`, calls in it may have arrays of their own; elsewhere, as in the body of a loop, nothing can.
        """
        if jaxpr.effects or (consts and not opens):
            raise _IncomparableError
        self.arrays += consts
        numbers: dict[Any, int] = {}
        for variable in (*jaxpr.constvars, *jaxpr.invars):
            numbers[variable] = len(numbers)
        types = tuple([variable.aval for variable in numbers])
        rows, equations, changed = [], [], False
        for equation in jaxpr.eqns:
            operands = tuple([self._atom(atom, numbers) for atom in equation.invars])
            spelled, parameters = self._parameters(equation, opens and equation.primitive.name in FOLLOWED)
            for variable in equation.outvars:
                numbers[variable] = len(numbers)
            results = tuple([variable.aval for variable in equation.outvars])
            rows.append((equation.primitive, operands, spelled, results, self._context(equation.ctx)))
            changed = changed or parameters is not equation.params
            equations.append(equation if parameters is equation.params else equation.replace(params=parameters))
        outputs = tuple([self._atom(atom, numbers) for atom in jaxpr.outvars])
        jaxpr = jaxpr.replace(eqns=equations) if changed else jaxpr
        return (types, tuple(rows), outputs), without_consts(jaxpr)

    def _atom(self, atom: Any, numbers: dict[Any, int]) -> Hashable:
        if not isinstance(atom, Literal):
            return numbers[atom]
        value = np.asarray(atom.val)
        if value.ndim:
            raise _IncomparableError  # an array
        return value.tobytes(), atom.aval

    def _context(self, context: Any) -> str:
        if id(context) not in self._contexts:
            self._contexts[id(context)] = repr(context)
        return self._contexts[id(context)]

    def _parameters(self, equation: Any, opens: bool) -> tuple[Hashable, Any]:
        parameters = equation.params
        if has_jvp_rule(equation):
            inner, call = self._value(parameters["call_jaxpr"])
            if self._in_rule:  # often the function itself, for its value
                return inner, with_jvp_rule(parameters, call, None)
            jaxpr, consts, zeros = trace_jvp_rule(equation)
            self._in_rule = True
            key, jaxpr = self.spell(jaxpr, consts)
            self._in_rule = False
            return (inner, key, tuple(zeros)), with_jvp_rule(parameters, call, (jaxpr, [], zeros))
        spelled, new = [], {}
        for name, value in parameters.items():
            key, replacement = self._value(value, opens)
            spelled.append((name, key))
            if replacement is not value:
                new[name] = replacement
        return tuple(spelled), parameters | new if new else parameters

    def _value(self, value: Any, opens: bool = False) -> tuple[Hashable, Any]:
        """Return a parameter of an equation as a key, and what stands for it in the program that is kept."""
        kind = type(value)
        if kind in PLAIN or isinstance(value, PLAIN):
            return (kind, value), value
        if isinstance(value, ClosedJaxpr):
            # JAX traces a jitted function once for all calls with the same types.
            seen = id(value), opens, self._in_rule
            if seen in self._spelled:
                return self._spelled[seen][1:]
            start = len(self.arrays)
            key, jaxpr = self.spell(value.jaxpr, value.consts, opens)
            made: Any = value
            if jaxpr is not value.jaxpr or value.consts:
                opened = OpenedCall(jaxpr, start, start + len(value.consts))
                made = opened if opens else value.replace(jaxpr=jaxpr)
            if len(self.arrays) == start:
                self._spelled[seen] = value, key, made  # which keeps it alive, and its identity its own
            return key, made
        if isinstance(value, Jaxpr):
            return self.spell(value, ())
        if isinstance(value, tuple | list):
            items = [self._value(item) for item in value]
            key = type(value), *[key for key, _ in items]
            if all(new is old for (_, new), old in zip(items, value, strict=True)):
                return key, value
            entries = [new for _, new in items]
            return key, type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
        if isinstance(value, dict):
            return tuple([(name, self._value(item)[0]) for name, item in value.items()]), value
        if isinstance(value, float | complex | np.generic):
            return (type(value), np.asarray(value).tobytes()), value
        return self._object(value), value

    def _object(self, value: Any) -> Hashable:
        """Return an object of the framework as a key: one that never changes and is equal by its value.

        A function of the framework without a closure does the same every time.
        """
        kind = type(value)
        if isinstance(value, FunctionType):
            if value.__closure__ is None and _is_framework(value.__module__):
                return value
        elif isinstance(value, jax.sharding.Mesh):  # which is a function too, as decorators are
            return value
        elif _is_framework(kind.__module__) and not callable(value) and not is_wrapped_function(value):
            by_identity: Any = object.__hash__
            if kind.__hash__ is not None and kind.__hash__ is not by_identity:
                return kind, value
            if not getattr(value, "__dict__", True):
                return kind.__name__  # a mark without any state
        raise _IncomparableError


def _is_framework(module: str) -> bool:
    return module.partition(".")[0] in FRAMEWORK


def can_compile(arrays: Sequence[Any]) -> bool:
    """Return True if arrays are concrete, and programs are compiled here: not in a trace, nor with jit disabled."""
    clean = core.trace_state_clean() and not jax.config.jax_disable_jit  # type: ignore[attr-defined]
    return clean and not any(isinstance(x, jax.core.Tracer) for x in arrays)
