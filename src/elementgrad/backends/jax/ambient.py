"""The trace that JAX is in: every verb leaves it as it found it, whatever was interrupted in it.

JAX enters traces by `with` statements, of which an interrupt can skip the end. Every computation of the thread would
then go to a trace that has ended.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from jax._src import core

context: Any = core.trace_ctx


def snapshot() -> Callable[[], None]:
    """Note the trace; the undo that is returned puts it back."""
    return partial(restore, context.trace, context.axis_env)


def restore(trace: Any, axes: Any) -> None:
    """Put back a trace and the axes that have names in it."""
    if context.axis_env is not axes:
        context.set_axis_env(axes)
    if context.trace is not trace:
        context.set_trace(trace)
