"""Every private name of JAX that this backend relies on, so that an upgrade is one file."""

from collections.abc import Mapping
from typing import Any

import jax

if jax.__version_info__ < (0, 5):
    raise ImportError("elementgrad needs JAX 0.5 or newer")

# The trace that a thread is in, which verbs restore after an interrupt, and traces of our own for explanations.
from jax._src import core as core

# The named axes of `vmap`, `pmap` and `shard_map` around a function, and whether two lines run in the same trace.
from jax._src.core import get_axis_env as get_axis_env
from jax._src.core import get_opaque_trace_state as get_opaque_trace_state

# Programs: those inside an equation's parameters, and the parts of one that an output needs.
from jax._src.core import jaxprs_in_params as jaxprs_in_params
from jax._src.interpreters.partial_eval import dce_jaxpr as dce_jaxpr

# The user's lines and names, kept when an equation is evaluated again.
from jax._src.source_info_util import current as current
from jax._src.source_info_util import current_name_stack as current_name_stack
from jax._src.source_info_util import user_context as user_context

# A recorder has tracers of its own. `get_aval` became `typeof`, and tracers compute what they once stored in a slot.
typeof = getattr(core, "typeof" if hasattr(core, "typeof") else "get_aval")
TRACERS_STORE_AVAL = "aval" in core.Tracer.__slots__


def is_missing_rule(error: BaseException) -> bool:
    """Return True if an operation has no derivative rule; JAX says so in several wordings."""
    return any(word in str(error) for word in ("JVP", "ifferentiation", "autodiff"))


def scan_sizes(params: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many operands of a scan are the same in every turn, and how many are carried from turn to turn."""
    if "ft_in" in params:  # a tree of the operands, since 0.12
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return params["num_consts"], params["num_carry"]
