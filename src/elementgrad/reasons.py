"""Why there is no path between two tensors, and the error that says so."""

from elementgrad.backends import Backend
from elementgrad.errors import UnconnectedError
from elementgrad.place import Place
from elementgrad.side import Side
from elementgrad.trace import Call

Reason = tuple[str, str]
"""Why there is no path, and what to do about it."""


def unconnected(of: Side, wrt: Side, backend: Backend, reason: Reason | None = None) -> UnconnectedError:
    """The error about two tensors without a path between them, with the reason and what helps, if they are known."""
    backwards = of.order is not None and wrt.order is not None and of.order < wrt.order
    hint = (
        f'{wrt.name} is computed after {of.name}, so ask the other way round, of="{wrt.name}" and wrt="{of.name}"'
        if backwards
        else 'pass unconnected="zero" if zeros will do'
    )
    why, fix = "no path leads from one to the other", ""
    if reason is not None and not backwards:
        why, fix = reason[0], f"{reason[1]}, or "
    return UnconnectedError(
        f"{of.name} does not depend on {wrt.name} in {backend.name}'s derivative program: {why}, so there is no "
        f"gradient, not even a zero one; {fix}{hint}"
    )


def explained(call: Call, of: Place | None, wrt: Place | None) -> Reason | None:
    """Why there is no path, if that can be told; the function runs again for it."""
    from elementgrad.explaining.inquiry import Inquiry  # only where an error is about to be raised

    if of is None or wrt is None:
        return None
    try:
        found = Inquiry(call, wrt, of, probe=True).diagnosis()
    except Exception:  # the error that is about to be raised matters more
        return None
    return found.reason if found.verdict == "unconnected" and found.cause is not None else None
