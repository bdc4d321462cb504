"""Sweeps through a JAX function: its linear program, run forward or transposed, in batches and compiled."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp

from elementgrad._backends.autodiff import (
    Function,
    Linearization,
    NotBatchableError,
    TensorFunction,
    UnsupportedError,
    reason,
)
from elementgrad._backends.jax._compat import dce_jaxpr, is_missing_rule, jaxprs_in_params
from elementgrad._backends.jax.program import communicating_axes, is_reverse_only, shift
from elementgrad._backends.jax.sharding import make_varying, mapped_axes, varying_axes
from elementgrad._sparsity.pattern import Pattern
from elementgrad.errors import DtypeError, ElementgradError, FrameworkError

Array = jax.Array
Sweep = Callable[[Any, Array], list[Array]]
"""From the linear program and one seed to derivatives."""
REVERSE_ONLY = "a function has a custom rule for reverse sweeps only (jax.custom_vjp)"


class JaxLinearization(Linearization):
    """`jax.linearize` at the inputs: its residuals are shared by all sweeps, and nothing runs the function again.

    Programs are compiled for this object alone. A cache by function would give stale answers once a closure changes.
    """

    jvp_transposes_vjp = True

    def __init__(self, run: Function, inputs: Sequence[Array]):
        self.inputs = inputs
        self._run = run
        try:
            with plain_errors():
                self.outputs, self._program = jax.linearize(lambda *xs: tuple(run(*xs)), *inputs)
        except ElementgradError:
            raise
        except (NotImplementedError, TypeError, ValueError) as error:
            if not is_missing_rule(error):
                raise
            raise FrameworkError(f"jax can differentiate this in no direction: {reason(error)}") from error
        self._sweeps: dict[Any, tuple[Sweep, Sweep]] = {}
        self._ran_once: set[Any] = set()

    @classmethod
    def of(cls, run: TensorFunction, inputs: Sequence[Array | None]) -> "JaxLinearization":
        """Evaluate a function at its inputs; the input that stands for an activation is a change of it, at zero."""
        if not any(x is None for x in inputs):
            return cls(run, inputs)  # type: ignore[arg-type]
        is_activation = [x is None for x in inputs]

        def run_changed(*xs: Array) -> Sequence[Array]:
            return run(*[partial(_add_change, x) if new else x for x, new in zip(xs, is_activation, strict=True)])

        return cls(run_changed, _fill_in_changes(run, inputs))

    def gradient(self, output: int, seed: Array) -> "JaxLinearization":
        def gradient(*xs: Array) -> tuple[Array, ...]:
            y, vjp = jax.vjp(lambda *xs: self._run(*xs)[output], *xs)
            return vjp(make_varying(seed, varying_axes(y)))

        return JaxLinearization(gradient, self.inputs)

    def vjp(self, output: int, inputs: Sequence[int], seeds: Array) -> list[Array | None]:
        paths = [i in self.paths[output] for i in inputs]
        if not any(paths):
            return [None] * len(inputs)

        derivatives = self._sweep(("reverse", output, *inputs), self._make_vjp(output, inputs), seeds)
        return [derivative if path else None for derivative, path in zip(derivatives, paths, strict=True)]

    def compile_vjp(self, output: int, inputs: Sequence[int]) -> Callable[[Array], list[Array]]:
        """Return a compiled sweep back from one seed that makes the derivatives for some inputs, and no others."""
        return partial(jax.jit(self._make_vjp(output, inputs)), self._program)

    def _make_vjp(self, output: int, inputs: Sequence[int]) -> Sweep:
        xs, axes = self.inputs, varying_axes(self.outputs[output])  # a sweep that held the object would keep it alive

        def sweep(program: Any, seed: Array) -> list[Array]:
            transposed = jax.linear_transpose(lambda *ts: program(*ts)[output], *xs)(make_varying(seed, axes))
            return [transposed[i] for i in inputs]

        return sweep

    def jvp(self, input: int, outputs: Sequence[int], seeds: Array) -> list[Array | None]:
        if self.reverse_only:  # compiled, it would be found out too late
            raise UnsupportedError(self.reverse_only)
        xs = self.inputs

        def sweep(program: Any, seed: Array) -> list[Array]:
            tangents = [
                make_varying(seed if i == input else jnp.zeros_like(x), varying_axes(x)) for i, x in enumerate(xs)
            ]
            derivatives = program(*tangents)
            return [derivatives[o] for o in outputs]

        derivatives = self._sweep(("forward", input, *outputs), sweep, seeds)
        return [y if input in self.paths[o] else None for o, y in zip(outputs, derivatives, strict=True)]

    def _sweep(self, key: Any, sweep: Sweep, seeds: Array) -> Sequence[Array]:
        if key not in self._sweeps:
            self._sweeps[key] = jax.jit(sweep), jax.jit(jax.vmap(sweep, (None, 0)))
        single, batched = self._sweeps[key]
        if len(seeds) > 1:
            try:
                return batched(self._program, seeds)
            except Exception as error:
                raise NotBatchableError(reason(error)) from error
        if key not in self._ran_once:  # compiling pays from the second time on
            self._ran_once.add(key)
            single = sweep
        try:
            return [derivative[None] for derivative in single(self._program, seeds[0])]
        except Exception as error:
            raise UnsupportedError(reason(error)) from error

    def pattern(self, output: int, input: int, local: bool) -> Pattern | None:
        from elementgrad._backends.jax import sparsity

        if input not in self.paths[output]:
            return None
        try:
            if local:
                xs, program = self.inputs, self._program
                zeros = [make_varying(jnp.zeros_like(x), varying_axes(x)) for x in xs]
                return sparsity.pattern_here(
                    lambda t: program(*zeros[:input], t, *zeros[input + 1 :])[output], xs[input]
                )
            return sparsity.pattern_everywhere(partial(self._output_at, output, input), self.inputs[input])
        except ElementgradError:
            raise
        except Exception as error:  # it has run with numbers, so that this is about their absence
            raise UnsupportedError(reason(error)) from error

    def _output_at(self, output: int, input: int, x: Array) -> Array:
        return self._run(*[x if i == input else other for i, other in enumerate(self.inputs)])[output]

    def peak_bytes(self, forward: bool, source: int, targets: Sequence[int], sweeps: int) -> int:
        return max(map(_bytes, _iter_results(self._jaxpr.jaxpr)), default=0)

    @cached_property
    def _jaxpr(self) -> Any:
        return jax.make_jaxpr(self._program)(*self.inputs)

    @property
    def missing_rules(self) -> Mapping[str, str]:  # type: ignore[override]
        return {"forward": self.reverse_only} if self.reverse_only else {}

    @cached_property
    def reverse_only(self) -> str:
        """The reason for reverse sweeps alone; empty if there are others too.

        A function may be run by each member of an axis, and send numbers to others. Then a reverse sweep from one
        element is what `jax.grad` gives to each member, while a forward sweep would move the same element of all of
        them at once, which is another number.
        """
        if is_reverse_only(self._jaxpr.jaxpr):
            return REVERSE_ONLY
        axes = communicating_axes(self._jaxpr.jaxpr, mapped_axes())
        return f"a forward sweep varies all members of the axis {min(map(str, axes))!r} at once" if axes else ""

    @cached_property
    def paths(self) -> list[set[int]]:
        """For each output, the inputs that its derivative is computed from."""
        jaxpr = self._jaxpr.jaxpr
        return [
            {i for i, used in enumerate(dce_jaxpr(jaxpr, [o == output for o in range(len(self.outputs))])[1]) if used}
            for output in range(len(self.outputs))
        ]


@contextmanager
def plain_errors() -> Iterator[None]:
    """Raise our own errors as they were, without the note about its frames that JAX adds on their way."""
    try:
        yield
    except ElementgradError as error:
        raise type(error)(*error.args).with_traceback(error.__traceback__) from None


def _fill_in_changes(run: TensorFunction, inputs: Sequence[Array | None]) -> list[Array]:
    """Return the inputs, with zeros of the right shape for activations.

    The shapes are found without computing anything, where the function can be traced.
    """
    shapes: dict[int, tuple[Any, Any, frozenset[Any]]] = {}

    def note(number: int, x: Array) -> Array:
        if not jnp.issubdtype(x.dtype, jnp.number) and x.dtype != jnp.bool_:
            raise DtypeError(
                f"what is named is of dtype {x.dtype}, which has no gradients; name a floating point array"
            )
        shapes[number] = x.shape, x.dtype, varying_axes(x)
        return x

    def run_and_note(*arrays: Array) -> tuple[()]:
        remaining = iter(arrays)
        run(*[partial(note, number) if x is None else next(remaining) for number, x in enumerate(inputs)])
        return ()

    arrays = [x for x in inputs if x is not None]
    try:
        jax.eval_shape(run_and_note, *arrays)
        traced = True
    except Exception:  # an error that is not about tracing comes again
        traced = False
    if not traced:
        with plain_errors():
            run_and_note(*arrays)
    return [_zeros(*shapes[n]) if x is None else x for n, x in enumerate(inputs)]


def _zeros(shape: tuple[int, ...], dtype: Any, axes: frozenset[Any]) -> Array:
    return make_varying(jnp.zeros(shape, dtype), axes)


def _add_change(change: Array, activation: Array) -> Array:
    return shift(activation, change) if jnp.issubdtype(activation.dtype, jnp.inexact) else activation


def _iter_results(jaxpr: Any) -> Iterator[Any]:
    """Yield the types of all intermediate results of a program, inner programs included."""
    for equation in jaxpr.eqns:
        yield from [variable.aval for variable in equation.outvars]
        for inner in jaxprs_in_params(equation.params):
            yield from _iter_results(inner)


def _bytes(aval: Any) -> int:
    return math.prod(getattr(aval, "shape", ())) * getattr(getattr(aval, "dtype", None), "itemsize", 0)
