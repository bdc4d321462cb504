"""Indices that lie outside of an array: JAX raises nothing, so that somebody must say so."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

LOOKUPS = {"gather", "scatter", "scatter-add", "scatter_add", "dynamic_slice", "dynamic_update_slice"}
"""Primitives that look up places by numbers."""


def out_of_range(name: str, params: Mapping[str, Any], operands: Sequence[Any]) -> str:
    """What is to be said of the indices of a lookup or write, if some lie outside."""
    if name == "gather":
        numbers = params["dimension_numbers"]
        sizes = [params["slice_sizes"][axis] for axis in numbers.start_index_map]
        return _told(operands[0].shape, operands[1], numbers.start_index_map, sizes, str(params["mode"]), "read")
    if name.startswith("scatter"):
        numbers = params["dimension_numbers"]
        axes = numbers.scatter_dims_to_operand_dims
        return _told(operands[0].shape, operands[1], axes, [1] * len(axes), str(params["mode"]), "write")
    if name == "dynamic_slice":
        shape, sizes = operands[0].shape, params["slice_sizes"]
        starts = np.stack([np.asarray(start) for start in operands[1:]]) if len(operands) > 1 else np.zeros(0, int)
        return _told(shape, starts, range(len(shape)), sizes, "clip", "read")
    return ""


def _told(shape: Sequence[int], indices: Any, axes: Sequence[int], sizes: Sequence[int], mode: str, what: str) -> str:
    columns = np.asarray(indices).reshape(-1, len(axes)) if len(axes) else np.zeros((0, 0), int)
    for column, (axis, size) in enumerate(zip(axes, sizes, strict=True)):
        wrong = [int(i) for i in columns[:, column] if not 0 <= i <= shape[axis] - size]
        if wrong:
            head = f"index {wrong[0]} is out of range for axis {axis} of size {shape[axis]}"
            return f"{head}, and JAX {_instead(mode.lower(), what)}"
    return ""


def _instead(mode: str, what: str) -> str:
    if "clip" in mode or mode.endswith("1"):
        return "takes the nearest one instead" if what == "read" else "writes to the nearest one instead"
    if "fill" in mode or "drop" in mode:
        return "gives NaN there" if what == "read" else "drops what is written there"
    return "reads the nearest one and drops its gradient" if what == "read" else "does what it likes"
