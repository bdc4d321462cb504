"""Every private name of JAX that this backend relies on, so that an upgrade is one file."""

import inspect
from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import jax

if jax.__version_info__ < (0, 5):
    raise ImportError("elementgrad needs JAX 0.5 or newer")

# The trace and the settings that a thread is in, which verbs restore after an interrupt, and traces of our own for
# explanations. Functions that JAX wraps for its transformations are parameters of operations with rules of their own.
from jax._src import api, config, linear_util
from jax._src import core as core
from jax._src.ad_util import Zero

# The named axes of `vmap`, `pmap` and `shard_map` around a function, and whether two lines run in the same trace.
from jax._src.core import get_axis_env as get_axis_env
from jax._src.core import get_opaque_trace_state as get_opaque_trace_state

# Programs: those inside an equation's parameters, and the parts of one that an output needs.
from jax._src.core import jaxprs_in_params as jaxprs_in_params

# The transpose of a linear jaxpr; `jax.linear_transpose` traces it once more, which takes most of a small sweep.
from jax._src.interpreters import ad
from jax._src.interpreters.partial_eval import dce_jaxpr as dce_jaxpr

# The user's lines and names, kept when an equation is evaluated again.
from jax._src.source_info_util import current as current
from jax._src.source_info_util import current_name_stack as current_name_stack
from jax._src.source_info_util import user_context as user_context

# A recorder has tracers of its own. `get_aval` became `typeof`, and tracers compute what they once stored in a slot.
typeof = getattr(core, "typeof" if hasattr(core, "typeof") else "get_aval")
TRACERS_STORE_AVAL = "aval" in core.Tracer.__slots__
TRANSPOSES = list(inspect.signature(ad.backward_pass).parameters)[1:3] == ["transform_stack", "consts"]

SETTINGS = tuple(state for state in config.config._value_holders.values() if isinstance(state, config.State))
"""The settings that a thread can have a value of its own of, as inside `with jax.debug_nans(False)`."""
POST_HOOKS = tuple(filter(None, [getattr(api, "_post_hook_state", None)]))
"""The check for NaN that a thread runs after each compiled program. Before 0.8 a thread always has that of all threads.

`with jax.debug_nans(False)` leaves None here as the thread's own, which then hides the check that
`jax.config.update("jax_debug_nans", True)` turns on for all threads.
"""


def local_settings() -> list[Any]:
    """Return the values of the settings that are this thread's own; one that it has none of has a marker in its place.

    It is asked for by every verb, and so it takes microseconds.
    """
    return [*map(config.State.get_local, SETTINGS), *(hook.get_local() for hook in POST_HOOKS)]


def restore_local_settings(values: Sequence[Any]) -> None:
    """Give this thread back its own values of settings, and tell JAX of those that it keeps a copy of."""
    here = local_settings()
    if all(map(is_, values, here)):  # as nearly always
        return
    for state, value, now in zip(SETTINGS, values, here, strict=False):
        if value is now:
            continue
        state.set_local(value)
        if state._update_thread_local_hook:
            state._update_thread_local_hook(None if value is config.config_ext.unset else value)
    for hook, value in zip(POST_HOOKS, values[len(SETTINGS) :], strict=True):  # last, as the settings above set it
        hook.set_local(value)


def is_wrapped_function(value: Any) -> bool:
    """Return True for a Python function in the parameters of an equation."""
    return isinstance(value, linear_util.WrappedFun)


def reverse_rule(params: Mapping[str, Any]) -> Any:
    """Return the reverse rule among the parameters of a `custom_vjp` as the user wrote it; None if it has no such."""
    rule = params.get("bwd")
    return getattr(getattr(rule, "__self__", rule), "f", None)  # older versions have a method of the wrapped function


def without_consts(jaxpr: Any) -> Any:
    """Return a jaxpr without the arrays of its constants, which are its first inputs then. Before 0.12 it has none."""
    return jaxpr.with_consts([]) if getattr(jaxpr, "consts", None) else jaxpr


def linear_jaxpr(program: Any, inputs: Sequence[Any], outputs: int) -> Any:
    """Return the jaxpr of what `jax.linearize` returned: it is in there, unless some of its outputs are constants."""
    jaxpr = next(iter(getattr(program.func, "args", ())), None)
    if isinstance(jaxpr, core.Jaxpr) and (len(jaxpr.invars), len(jaxpr.outvars)) == (len(inputs), outputs):
        return jaxpr
    return jax.make_jaxpr(program)(*inputs).jaxpr


def transpose_linear(program: Any, jaxpr: Any, cotangents: Sequence[Any]) -> list[Any] | None:
    """Transpose what `jax.linearize` returned, operation by operation; return None if it is made in another way here.

    A cotangent that is None is zero.
    """
    held: Any = getattr(program, "args", ())
    is_inside = next(iter(getattr(program.func, "args", ())), None) is jaxpr
    if not TRANSPOSES or not is_inside or len(held) != 1 or len(held[0]) != len(jaxpr.constvars):
        return None
    inputs = [ad.UndefinedPrimal(variable.aval) for variable in jaxpr.invars]
    seeds = [
        Zero(variable.aval.to_tangent_aval()) if seed is None else seed
        for variable, seed in zip(jaxpr.outvars, cotangents, strict=True)
    ]
    return [ad.instantiate_zeros(x) for x in ad.backward_pass(jaxpr, False, held[0], inputs, seeds)]


def has_jvp_rule(equation: Any) -> bool:
    """Return True for a function with `jax.custom_jvp` whose rule does not ask which of its tangents are zero."""
    params = equation.params
    return is_wrapped_function(params.get("jvp_jaxpr_fun")) and params.get("symbolic_zeros") is False


def trace_jvp_rule(equation: Any) -> tuple[Any, Sequence[Any], Sequence[bool]]:
    """Return the rule of such a function as a jaxpr, its arrays, and which of the tangents it returns are zero."""
    count = len(equation.invars) - equation.params["num_consts"]
    return equation.params["jvp_jaxpr_fun"].call_wrapped(*[False] * count)


def with_jvp_rule(params: Mapping[str, Any], call: Any, rule: Any) -> dict[str, Any]:
    """Return the parameters of such an equation with a rule that was traced, in place of a function of the user."""
    former = params["jvp_jaxpr_fun"]
    function = linear_util.wrap_init(lambda *zeros: rule, debug_info=former.debug_info)
    return {**params, "call_jaxpr": call, "jvp_jaxpr_fun": function}


def is_missing_rule(error: BaseException) -> bool:
    """Return True if an operation has no derivative rule; JAX says so in several wordings."""
    return any(word in str(error) for word in ("JVP", "ifferentiation", "autodiff"))


def scan_sizes(params: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many operands of a scan are the same in every turn, and how many are carried from turn to turn."""
    if "ft_in" in params:  # a tree of the operands, since 0.12
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return params["num_consts"], params["num_carry"]
