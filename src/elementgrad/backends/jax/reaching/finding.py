"""The pattern of a Jacobian from the program that JAX makes for one sweep."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src.interpreters.partial_eval import dce_jaxpr

from elementgrad.backends.jax.program import one_way
from elementgrad.backends.jax.reaching.following import Follower
from elementgrad.backends.jax.reaching.rules import RULES
from elementgrad.sparsity.pattern import Pattern
from elementgrad.sparsity.reach import Reach
from elementgrad.sparsity.value import UNKNOWN, Reached

Array = jax.Array


def everywhere(function: Callable[[Array], Array], x: Array) -> Pattern:
    """The pattern of a function at every x of this shape."""
    forward = jax.make_jaxpr(lambda x, t: jax.jvp(function, (x,), (t,))[1])(x, x)
    if not one_way(forward.jaxpr):
        return _followed(forward, x.shape)
    y = jax.eval_shape(function, x)
    return _followed(jax.make_jaxpr(lambda x, u: jax.vjp(function, x)[1](u)[0])(x, y), y.shape).T


def here(sweep: Callable[[Array], Array], x: Array) -> Pattern:
    """The pattern of a linear function of x, whose numbers are all known."""
    forward = jax.make_jaxpr(sweep)(x)
    if not one_way(forward.jaxpr):
        return _followed(forward, x.shape)
    y = jax.eval_shape(sweep, x)
    return _followed(jax.make_jaxpr(lambda u: jax.linear_transpose(sweep, x)(u)[0])(y), y.shape).T


def _followed(program: Any, shape: Sequence[int]) -> Pattern:
    """A row for each element of what a program gives, with those of its last input that it depends on."""
    jaxpr, _ = dce_jaxpr(program.jaxpr, [True], instantiate=True)
    reach = Reach(math.prod(shape))
    follower = Follower(reach, RULES)
    operands = [*[UNKNOWN] * (len(jaxpr.invars) - 1), Reached(reach.start(shape))]
    with jax.ensure_compile_time_eval():
        (result,) = follower.run(program.replace(jaxpr=jaxpr), operands)
    return reach.pattern(follower.ids(result, jaxpr.outvars[0]))
