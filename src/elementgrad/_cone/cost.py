"""Whether a cone pays: its work beside the work of the whole, before anything has run."""

from elementgrad._cone.plan import Cone, Program, ProgramValue, whole_work

SMALLEST = 100_000
"""Inputs of fewer elements are evaluated as a whole: a recording would take as long."""
ELEMENTS_PER_OP = 500
"""A recording of more operations than one for so many elements is given up, as it would take longer than the whole."""
SPEED = 2e10
"""Multiplications and additions in a second."""
STEP = 60e-6
"""Seconds that one operation takes on however few elements."""
MARGIN = 1.2


def most_ops(elements: int) -> int:
    """Return how many operations may be recorded before the recording costs too much."""
    return elements // ELEMENTS_PER_OP


def share(program: Program, of: ProgramValue, cone: Cone) -> str:
    """Return the work of a cone as a share of the whole, such as `1/7600`."""
    ratio = whole_work(program.ops, of) / max(cone.work, 1.0)
    return f"1/{ratio:.0f}" if ratio >= 10 else f"1/{ratio:.1f}" if ratio > 1.05 else "all"


def pays(program: Program, of: ProgramValue, cone: Cone) -> bool:
    """Return True if a cone is cheaper than the whole of what the value depends on."""
    return whole_work(program.ops, of) / SPEED > STEP * len(cone.steps) + MARGIN * cone.work / SPEED
