"""One block of a Jacobian, as NumPy has it: read in the same way here and by a worker."""

from typing import Any

import numpy as np

from elementgrad.backends import Backend
from elementgrad.errors import TracedError
from elementgrad.lazy import Jacobian
from elementgrad.plan.layout import Layout
from elementgrad.plan.plan import Plan
from elementgrad.selection import Selection

Tensor = Any


def part(jacobian: Jacobian, plan: Plan, layout: Layout, number: int) -> np.ndarray:
    """The values of a block, (rows, columns), after the examples if there is a batch."""
    rows, columns = (jacobian._select(..., side) for side in (jacobian._of, jacobian._wrt))
    down, right = layout.bounds(number)
    if layout.mode == "reverse":
        rows = Selection.at_flat(rows.flat().reshape(-1)[down], rows.of)
    else:
        columns = Selection.at_flat(columns.flat().reshape(-1)[right], columns.of)
    coloured, reader = jacobian._block(rows, columns), jacobian._reader
    block = coloured.read(reader) if coloured else reader.part(plan, rows, columns)
    return numbers(jacobian._shaped(block, (rows.size, columns.size)), jacobian._backend)


def numbers(x: Tensor, backend: Backend) -> np.ndarray:
    """The values of a tensor; a dtype that NumPy lacks comes as float32, which holds it exactly."""
    values = backend.array(x)
    if values is None:
        raise TracedError(
            "blocks are numbers, and these are traced, so nobody knows them; read blocks outside of what is compiled"
        )
    return values
