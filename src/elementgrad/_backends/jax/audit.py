"""The part of JAX in `eg.audit`: the gradients of a loss for all arrays of a pytree, and which of them are tables."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from elementgrad._audit.backend import AuditBackend, AuditedParameter, GradientSummary, Sweep
from elementgrad._backends.jax._compat import jaxprs_in_params
from elementgrad._backends.jax.autodiff import JaxLinearization
from elementgrad._backends.jax.explain_rules import CUSTOM_JVP, CUSTOM_VJP, is_user_function
from elementgrad._backends.jax.names import JaxModel, copy_with
from elementgrad.errors import FrameworkError

Array = jax.Array
LOOKUPS = frozenset({"gather", "dynamic_slice", "slice"})
"""Primitives that take some rows."""
MOVES = frozenset({"convert_element_type", "transpose", "reshape", "squeeze", "broadcast_in_dim", "copy"})
"""Primitives that take all elements as they are."""


class JaxAudit(AuditBackend):
    """Audits pytrees of arrays."""

    def parameters(self, model: JaxModel) -> list[AuditedParameter]:  # type: ignore[override]
        return [
            AuditedParameter(name or "the array", x, tuple(x.shape), x.dtype.name)
            for name, kind, x in model.named_tensors()
            if kind == "parameter" and jnp.issubdtype(x.dtype, jnp.floating)
        ]

    def summarize_loss(
        self,
        model: JaxModel,  # type: ignore[override]
        parameters: Sequence[AuditedParameter],
        loss: Callable[[Any], Array],
    ) -> Sweep:
        arrays = [each.tensor for each in parameters]
        if any(isinstance(x, jax.core.Tracer) for x in arrays):
            raise FrameworkError("parameters that are traced have no numbers to look at; call eg.audit outside of jit")
        names = ["" if each.name == "the array" else each.name for each in parameters]

        def run(*new: Array) -> list[Array]:
            replaced = dict(zip(names, new, strict=True))
            return [loss(copy_with(model.function, replaced)).reshape(())]

        linear = JaxLinearization(run, arrays)
        reached = [number for number in range(len(arrays)) if number in linear.paths[0]]
        if not reached:
            return Sweep({})
        gradients = linear.compile_vjp(0, reached)(jnp.ones_like(linear.outputs[0]))
        is_finite = bool(jnp.isfinite(linear.outputs[0]).all())
        summaries = {}
        for number in reached:
            summaries[parameters[number].name] = _summarize(gradients.pop(0))
        try:
            program = jax.make_jaxpr(run)(*arrays).jaxpr
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):  # it branches in Python on values
            return Sweep(summaries, True, is_finite)
        if any(0 in sizes for summary in summaries.values() for sizes in summary.slices.values()):
            for number in _find_lookups(program).intersection(reached):
                name = parameters[number].name
                summaries[name] = GradientSummary(summaries[name].largest, summaries[name].slices, True)
        return Sweep(summaries, _has_rules(program), is_finite)


implementation = JaxAudit()


def _summarize(gradient: Array) -> GradientSummary:
    if not gradient.size:
        return GradientSummary(1.0)
    sizes = jnp.abs(gradient.reshape(gradient.shape or (1,)))
    axes = dict.fromkeys([sizes.ndim - 1, 0])  # a layer's units are along the last axis, or along the first
    slices = {
        axis: np.asarray(sizes.max(tuple([n for n in range(sizes.ndim) if n != axis])), np.float64) for axis in axes
    }
    return GradientSummary(float(np.max(slices[0])), slices)


def _has_rules(jaxpr: Any) -> bool:
    """Return True if a program calls a function whose derivative the user wrote."""
    for equation in jaxpr.eqns:
        is_custom = equation.primitive.name in CUSTOM_JVP | CUSTOM_VJP
        if (is_custom and is_user_function(equation.params)) or any(map(_has_rules, jaxprs_in_params(equation.params))):
            return True
    return False


def _find_lookups(jaxpr: Any) -> set[int]:
    """Return the positions of the inputs of a program of which all readers take some rows alone."""
    return {
        n
        for n, variable in enumerate(jaxpr.invars)
        if (readers := set(_readers(jaxpr, variable))) <= LOOKUPS and readers
    }


def _readers(jaxpr: Any, variable: Any) -> Iterator[str]:
    """Yield the primitives that read a variable, also behind moves and inside of calls.

    What a call returns may be read by anything, and counts as such.
    """
    if any(result is variable for result in jaxpr.outvars):
        yield "return"
    for equation in jaxpr.eqns:
        for position, operand in enumerate(equation.invars):
            if operand is not variable:
                continue
            name = equation.primitive.name
            inner = list(jaxprs_in_params(equation.params))
            if name in MOVES:
                yield from _readers(jaxpr, equation.outvars[0])
            elif len(inner) == 1 and len(inner[0].invars) == len(equation.invars):
                yield from _readers(inner[0], inner[0].invars[position])
            else:
                yield name
