"""The cost of a cone, and if it pays: its work beside the work of the whole, before anything has run."""

from elementgrad._cone.plan import Cone, Program, ProgramValue, whole_work

SMALLEST = 100_000
"""Inputs of fewer elements are evaluated as a whole: a recording would take as long."""
SECONDS_PER_ELEMENT = 5e-7
"""A recording that takes longer than so many seconds for each element of the inputs is given up."""
MOVED = 40.0
"""The multiplications and additions in the time that it takes to write one element of a result, and to read it."""
STEP = 60e-6
"""Seconds that one operation takes on however few elements."""
MARGIN = 1.2
MOST_IN_VAIN = 0.25
"""The share of the time of the whole that a recording in vain may take each time."""


def most_ops(elements: int, op_seconds: float) -> int:
    """Return how many operations may be recorded, at so many seconds each, before the recording costs too much."""
    return int(elements * SECONDS_PER_ELEMENT / op_seconds)


def share(program: Program, of: ProgramValue, cone: Cone) -> str:
    """Return the work of a cone as a share of the whole, such as `1/7600`."""
    ratio = whole_work(program.ops, of) / max(cone.count_work(), 1.0)
    return f"1/{ratio:.0f}" if ratio >= 10 else f"1/{ratio:.1f}" if ratio > 1.05 else "all"


def pays(program: Program, of: ProgramValue, cone: Cone) -> bool:
    """Return True if a recording and a cone are cheaper than the whole of what the value depends on."""
    part = program.recording_seconds + STEP * len(cone.steps) + MARGIN * cone.count_work(MOVED) / program.speed
    return whole_work(program.ops, of, MOVED) / program.speed > part


def may_repeat(program: Program, of: ProgramValue) -> bool:
    """Return True if a recording is so cheap, beside the whole, that another one may be made for another element."""
    return program.recording_seconds <= MOST_IN_VAIN * whole_work(program.ops, of, MOVED) / program.speed
