"""Sweeps through a JAX function: its linear program, run forward or transposed, in batches and compiled."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from elementgrad._backends.autodiff import (
    Function,
    Linearization,
    NotBatchableError,
    TensorFunction,
    UnsupportedError,
    reason,
)
from elementgrad._backends.jax._compat import (
    dce_jaxpr,
    is_missing_rule,
    jaxprs_in_params,
    linear_jaxpr,
    transpose_linear,
    without_consts,
)
from elementgrad._backends.jax.compile_cache import Program, can_compile, find_or_make
from elementgrad._backends.jax.program import bind_cached, communicating_axes, evaluate, is_reverse_only, shift
from elementgrad._backends.jax.sharding import make_varying, mapped_axes, varying_axes
from elementgrad._sparsity.pattern import Pattern
from elementgrad.errors import DtypeError, ElementgradError, FrameworkError

Array = jax.Array
Sweep = Callable[[Any, Array], list[Array]]
"""From the linear program and one seed to derivatives."""
REVERSE_ONLY = "a function has a custom rule for reverse sweeps only (jax.custom_vjp)"


class CompiledLinearization:
    """The part that linearizations of equal programs share: compiled code, and the linear program without residuals."""

    def __init__(self, run: Program):
        def linearize(operands: Sequence[Array], *inputs: Array) -> Any:
            outputs, program = jax.linearize(lambda *xs: tuple(run(operands, *xs)), *inputs)
            # Residuals that are arguments, as weights are, would be copied on their way out.
            arguments = {id(x): number for number, x in enumerate((*operands, *inputs))}
            residuals, structure = jax.tree.flatten(program)
            sources = tuple([arguments.get(id(x)) for x in residuals])
            new = [x for x, source in zip(residuals, sources, strict=True) if source is None]
            return outputs, new, jax.tree_util.Partial(partial(_restore, structure, sources))

        self._linearize = jax.jit(linearize)
        self.sweeps: dict[Any, Sweep] = {}
        self.linear: LinearProgram | None = None
        """The linear program, once there is compiled code."""

    def linearize(self, operands: list[Array], inputs: Sequence[Array]) -> tuple[Any, Any]:
        """Return the outputs and the linear program, as `jax.linearize` does."""
        outputs, new, restore = self._linearize(operands, *inputs)
        program = restore((*operands, *inputs), new)
        if self.linear is None:
            self.linear = LinearProgram(without_consts(linear_jaxpr(program, inputs, len(outputs))), len(inputs))
        return outputs, program


def _run_eagerly(program: Any, *inputs: Array) -> list[Array]:
    return evaluate(program.jaxpr, program.consts, inputs, bind_cached)


def _restore(structure: Any, sources: Sequence[int | None], arguments: Sequence[Array], new: Sequence[Array]) -> Any:
    """Return a linear program from its structure and its residuals, some of which were arguments."""
    rest = iter(new)
    return jax.tree.unflatten(structure, [next(rest) if source is None else arguments[source] for source in sources])


class JaxLinearization(Linearization):
    """`jax.linearize` at the inputs: its residuals are shared by all sweeps, and nothing runs the function again.

    The function is traced, and the program runs operation by operation until several sweeps at a time are wanted: then
    it is compiled. From then on, every linearization of an equal program uses what was compiled. A function that cannot
    be traced, as it branches on values, is linearized as it is, and so is one inside of another transformation.
    """

    jvp_transposes_vjp = True

    def __init__(self, run: Function, inputs: Sequence[Array], traceable: bool = True):
        self.inputs = inputs
        self._run = run
        self._traceable = traceable
        self._compiled: tuple[CompiledLinearization, list[Array]] | None = None
        self._is_compiled = False
        self._sweeps: dict[Any, Sweep] = {}
        self._ran_once: set[Any] = set()
        try:
            with plain_errors():
                self._linearize(lambda *xs: tuple(run(*xs)))
        except ElementgradError:
            raise
        except (NotImplementedError, TypeError, ValueError) as error:
            if not is_missing_rule(error):
                raise
            raise FrameworkError(f"jax can differentiate this in no direction: {reason(error)}") from error
        # A sweep that held an input would keep it alive, for as long as what is compiled.
        self._like = [x if isinstance(x, jax.core.Tracer) else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs]

    def _linearize(self, run: Function) -> None:
        if self._traceable and can_compile(self.inputs):
            try:
                program = jax.make_jaxpr(run)(*self.inputs)
            except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):  # it branches in Python on values
                program = None
            if program is not None:
                self._compiled = find_or_make(program, CompiledLinearization)
                run = partial(_run_eagerly, program)
        if self._compiled is not None and self._compiled[0].linear is not None:
            self._compile()
        else:
            self.outputs, self._program = jax.linearize(lambda *xs: tuple(run(*xs)), *self.inputs)

    def _compile(self) -> None:
        """Linearize by compiled code, where programs can be compared."""
        if self._compiled is None:
            return
        (shared, operands), self._compiled = self._compiled, None
        self.outputs, self._program = shared.linearize(operands, self.inputs)
        assert shared.linear is not None
        self._linear, self._sweeps, self._is_compiled = shared.linear, shared.sweeps, True

    @classmethod
    def of(
        cls,
        run: TensorFunction,
        inputs: Sequence[Array | None],
        zeros: Sequence[Array] | None = None,
        traceable: bool = True,
    ) -> "JaxLinearization":
        """Evaluate a function at its inputs; the input that stands for an activation is a change of it, at zero.

        `zeros` are such changes, if their shapes are known; otherwise a run finds them. With `traceable=False` the
        function is not traced first, since it is known to fail then.
        """
        if not any(x is None for x in inputs):
            return cls(run, inputs, traceable)  # type: ignore[arg-type]
        is_activation = [x is None for x in inputs]

        def run_changed(*xs: Array) -> Sequence[Array]:
            return run(*[partial(_add_change, x) if new else x for x, new in zip(xs, is_activation, strict=True)])

        if zeros is None:
            return cls(run_changed, _fill_in_changes(run, inputs), traceable)
        known = [zero if x is None else x for x, zero in zip(inputs, zeros, strict=True)]
        return cls(run_changed, known, traceable)

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

    def vjp_of_element(self, output: int, inputs: Sequence[int], index: tuple[int, ...]) -> list[Array | None] | None:
        key, y = ("reverse", output, *inputs), self.outputs[output]
        if self._is_compiled or key in self._ran_once or not can_compile((*self.inputs, y)):
            return None
        seed = np.zeros(y.shape, y.dtype)
        seed[index] = 1
        seeds = [jnp.asarray(seed) if number == output else None for number in range(len(self.outputs))]
        with _raise_as(UnsupportedError):
            derivatives = transpose_linear(self._program, self._linear.jaxpr, seeds)
        if derivatives is None:
            return None
        self._ran_once.add(key)
        return [derivatives[i] if i in self.paths[output] else None for i in inputs]

    def compile_vjp(self, output: int, inputs: Sequence[int]) -> Callable[[Array], list[Array]]:
        """Return a compiled sweep back from one seed that makes the derivatives for some inputs, and no others."""
        return partial(jax.jit(self._make_vjp(output, inputs)), self._program)

    def _make_vjp(self, output: int, inputs: Sequence[int]) -> Sweep:
        xs, axes = self._like, varying_axes(self.outputs[output])

        def sweep(program: Any, seed: Array) -> list[Array]:
            transposed = jax.linear_transpose(lambda *ts: program(*ts)[output], *xs)(make_varying(seed, axes))
            return [transposed[i] for i in inputs]

        return sweep

    def jvp(self, input: int, outputs: Sequence[int], seeds: Array) -> list[Array | None]:
        if self.reverse_only:  # compiled, it would be found out too late
            raise UnsupportedError(self.reverse_only)
        xs = list(zip(self._like, map(varying_axes, self.inputs), strict=True))

        def sweep(program: Any, seed: Array) -> list[Array]:
            tangents = [
                make_varying(seed if i == input else jnp.zeros(x.shape, x.dtype), axes)
                for i, (x, axes) in enumerate(xs)
            ]
            derivatives = program(*tangents)
            return [derivatives[o] for o in outputs]

        derivatives = self._sweep(("forward", input, *outputs), sweep, seeds)
        return [y if input in self.paths[o] else None for o, y in zip(outputs, derivatives, strict=True)]

    def _sweep(self, key: Any, sweep: Sweep, seeds: Array) -> Sequence[Array]:
        if len(seeds) > 1:
            with _raise_as(NotBatchableError):
                self._compile()
                batched = self._get_jitted((*key, "batch"), lambda: jax.vmap(sweep, (None, 0)))
                return batched(self._program, seeds)
        if self._is_compiled or key in self._ran_once:  # else compiling pays from the second time on
            one = self._get_jitted(key, lambda: _sweep_one(sweep))
        else:
            self._ran_once.add(key)
            one = _sweep_one(sweep)
        with _raise_as(UnsupportedError):
            return one(self._program, seeds)

    def _get_jitted(self, key: Any, make: Callable[[], Sweep]) -> Sweep:
        if key not in self._sweeps:
            self._sweeps[key] = jax.jit(make())
        return self._sweeps[key]

    def pattern(self, output: int, input: int, local: bool) -> Pattern | None:
        from elementgrad._backends.jax import sparsity

        if input not in self.paths[output]:
            return None
        with _raise_as(UnsupportedError):  # it has run with numbers, so that an error is about their absence
            if local:
                xs, program = self.inputs, self._program
                zeros = [make_varying(jnp.zeros_like(x), varying_axes(x)) for x in xs]
                return sparsity.pattern_here(
                    lambda t: program(*zeros[:input], t, *zeros[input + 1 :])[output], xs[input]
                )
            return sparsity.pattern_everywhere(partial(self._output_at, output, input), self.inputs[input])

    def _output_at(self, output: int, input: int, x: Array) -> Array:
        return self._run(*[x if i == input else other for i, other in enumerate(self.inputs)])[output]

    def peak_bytes(self, forward: bool, source: int, targets: Sequence[int], sweeps: int) -> int:
        return self._linear.peak_bytes

    @cached_property
    def _linear(self) -> "LinearProgram":
        return LinearProgram(linear_jaxpr(self._program, self.inputs, len(self.outputs)), len(self.inputs))

    @property
    def missing_rules(self) -> Mapping[str, str]:  # type: ignore[override]
        return {"forward": self.reverse_only} if self.reverse_only else {}

    @property
    def reverse_only(self) -> str:
        """The reason for reverse sweeps alone; empty if there are others too."""
        return self._linear.reverse_only

    @property
    def paths(self) -> list[set[int]]:
        """For each output, the inputs that its derivative is computed from."""
        return self._linear.paths


class LinearProgram:
    """The equations of a linear program, and what follows from them for every sweep."""

    def __init__(self, jaxpr: Any, inputs: int):
        self.jaxpr = jaxpr
        self._inputs = inputs

    @cached_property
    def peak_bytes(self) -> int:
        """The bytes of the largest intermediate result."""
        return max(map(_bytes, _iter_results(self.jaxpr)), default=0)

    @cached_property
    def reverse_only(self) -> str:
        """The reason for reverse sweeps alone; empty if there are others too.

        A function may be run by each member of an axis, and send numbers to others. Then a reverse sweep from one
        element is what `jax.grad` gives to each member, while a forward sweep would move the same element of all of
        them at once, which is another number.
        """
        if is_reverse_only(self.jaxpr):
            return REVERSE_ONLY
        axes = communicating_axes(self.jaxpr, mapped_axes())
        return f"a forward sweep varies all members of the axis {min(map(str, axes))!r} at once" if axes else ""

    @cached_property
    def paths(self) -> list[set[int]]:
        """For each output, the inputs that its derivative is computed from."""
        count = len(self.jaxpr.outvars)
        used = [dce_jaxpr(self.jaxpr, [o == output for o in range(count)])[1] for output in range(count)]
        # Constants whose arrays were left out are inputs too, before the others.
        return [{i for i, is_used in enumerate(inputs[len(inputs) - self._inputs :]) if is_used} for inputs in used]


def _sweep_one(sweep: Sweep) -> Sweep:
    """Return a sweep from a batch of one seed to batches of one derivative."""
    return lambda program, seeds: [derivative[None] for derivative in sweep(program, seeds[0])]


@contextmanager
def _raise_as(kind: type[Exception]) -> Iterator[None]:
    """Raise what goes wrong in a sweep as an error that lets the caller try another way."""
    try:
        yield
    except (ElementgradError, FloatingPointError):
        # A floating-point error is that of `jax_debug_nans`: the user wants to see it, and another way is no answer.
        raise
    except Exception as error:
        raise kind(reason(error)) from error


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
