"""One operation of a run, with its numbers: what it is linked to, and how derivatives go through it both ways."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.interpreters.partial_eval import dce_jaxpr

from elementgrad.backends.jax.explaining import words
from elementgrad.backends.touching import guessed, ties, touched

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
class Taken:
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
        inner = {name for name in words.primitives(self.params) if not name.endswith("jit")}
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

    def push(self, tangents: Mapping[int, Array]) -> dict[int, Array]:
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

    def pull(self, cotangents: Mapping[int, Array], active: Sequence[int]) -> dict[int, Array]:
        """The gradients of some operands, by number, for those of some results."""
        results = list(cotangents)
        _, back = jax.vjp(self._of(active, results), *[self.operands[number] for number in active])
        return dict(zip(active, back(tuple([cotangents[number] for number in results])), strict=True))

    def touched(self, masks: Sequence[np.ndarray | None]) -> list[np.ndarray]:
        """Which elements of the results can move with some of the operands."""
        shapes = [tuple(x.shape) for x in self.results]
        if not self._repeatable():
            return guessed(masks, shapes)
        return touched(self._again, [_wide(x) for x in self.operands], masks, shapes)

    def ties(self, masks: Sequence[np.ndarray | None]) -> bool:
        """Whether elements of what a choice takes are level with those that it took."""
        coarse = [jnp.result_type(x) == jnp.bfloat16 for x in self.operands]
        return self._repeatable() and ties(self._again, [_wide(x) for x in self.operands], masks, coarse)

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


def connect(steps: Sequence[Taken], source: int) -> frozenset[int]:
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
