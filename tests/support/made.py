"""Hypothesis strategies for indices of every form NumPy has, and how many of them a test makes."""

import os
from typing import Any

import numpy as np
from hypothesis import strategies as st

Shape = tuple[int, ...]
NUMPY_REFUSES = (IndexError, ValueError, DeprecationWarning)


# "long" is for sweeps that are too slow for every run: `HYPOTHESIS_PROFILE=long make test K=made`.
LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"


def counts(usual: int, long: int | None = None) -> int:
    """Return how many examples to make; in the long sweep five times as many, if it is not said."""
    return (long or usual * 5) if LONG else usual


@st.composite
def shapes(draw: st.DrawFn, max_axes: int = 5, min_size: int = 0, max_size: int = 4) -> Shape:
    return tuple(draw(st.lists(st.integers(min_size, max_size), max_size=max_axes)))


@st.composite
def slices(draw: st.DrawFn, size: int) -> slice:
    bounds = st.none() | st.integers(-size - 2, size + 2)
    steps = st.none() | st.integers(1, 3) | st.integers(-3, -1)
    return slice(draw(bounds), draw(bounds), draw(steps))


@st.composite
def int_arrays(draw: st.DrawFn, size: int, broadcast: Shape, out_of_range: bool) -> Any:
    """Integers for one axis, in a shape that broadcasts to `broadcast`, as an array or as nested lists."""
    shape = tuple(1 if draw(st.booleans()) else length for length in broadcast[draw(st.integers(0, len(broadcast))) :])
    low, high = (-size, size - 1) if size and not out_of_range else (-size - 2, size + 1)
    entries = draw(st.lists(st.integers(low, high), min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
    dtype = draw(st.sampled_from([np.int64, np.int32, np.int16]))
    array = np.array(entries, dtype=dtype).reshape(shape)
    return array.tolist() if draw(st.booleans()) and array.size and array.ndim else array


@st.composite
def masks(draw: st.DrawFn, shape: Shape) -> np.ndarray:
    size = int(np.prod(shape))
    return np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)), dtype=bool).reshape(shape)


@st.composite
def indices(draw: st.DrawFn, shape: Shape, wrong: bool = False, scalar_masks: bool = True) -> Any:
    """An index for a tensor of this shape; with `wrong`, one that may be out of range, too long or mismatched."""
    items: list[Any] = []
    axis = 0
    ellipsis = draw(st.booleans())
    broadcast = tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
    while axis < len(shape) + (wrong and draw(st.integers(0, 3)) == 0):
        size = shape[axis] if axis < len(shape) else 2
        form = draw(st.sampled_from(["int", "slice", "slice", "array", "mask", "skip", "stop", "true"]))
        if form == "stop":
            break
        if form == "skip" and ellipsis:
            items.append(...)
            axis += draw(st.integers(0, len(shape) - axis)) if axis < len(shape) else 0
            ellipsis = wrong and draw(st.integers(0, 9)) == 0
            continue
        if form == "true" and scalar_masks and draw(st.integers(0, 4)) == 0:
            items.append(draw(st.booleans()))
            continue
        out_of_range = wrong and draw(st.integers(0, 5)) == 0
        if form == "int" and (size or out_of_range):
            low, high = (-size, size - 1) if not out_of_range else (-size - 2, size + 2)
            items.append(draw(st.integers(low, high)))
        elif form == "array" and (size or 0 in broadcast or out_of_range):
            items.append(draw(int_arrays(size, broadcast, out_of_range)))
        elif form == "mask":
            width = draw(st.integers(1, max(1, len(shape) - axis)))
            covered = shape[axis : axis + width]
            if out_of_range and covered:
                covered = (covered[0] + 1, *covered[1:])
            items.append(draw(masks(covered)))
            axis += len(covered) - 1
        else:
            items.append(draw(slices(size)))
        axis += 1
    return items[0] if len(items) == 1 and draw(st.booleans()) else tuple(items)


@st.composite
def shapes_and_indices(draw: st.DrawFn, wrong: bool = False, max_axes: int = 5, min_size: int = 0) -> tuple[Shape, Any]:
    shape = draw(shapes(max_axes=max_axes, min_size=min_size))
    return shape, draw(indices(shape, wrong=wrong))


def fits_numpy(shape: Shape, index: Any) -> bool:
    try:
        np.empty(shape, dtype=bool)[index]
    except NUMPY_REFUSES:
        return False
    return True


@st.composite
def edits(draw: st.DrawFn, verbs: tuple[str, ...]) -> tuple[str, np.ndarray, Any, np.ndarray | None]:
    """A verb, a tensor, an index that fits (and repeats elements only where the verb allows it), and a value."""
    shape = draw(shapes(max_axes=3, min_size=1, max_size=3))
    index = draw(indices(shape).filter(lambda index: fits_numpy(shape, index)))
    verb = draw(st.sampled_from(verbs))
    positions = np.arange(int(np.prod(shape))).reshape(shape)[index]
    if verb not in ("get", "add", "multiply") and np.unique(positions).size != positions.size:
        verb = "add"
    seed = draw(st.integers(0, 2**31))
    rng = np.random.default_rng(seed)
    x = np.asarray(rng.uniform(0.5, 2.0, shape) * rng.choice([-1, 1], shape))
    value = None
    if verb in ("set", "add", "multiply"):
        target = positions.shape
        cut = draw(st.integers(0, len(target)))
        value = np.asarray(rng.uniform(0.5, 2.0, tuple(1 if rng.random() < 0.3 else n for n in target[cut:])))
    return verb, x, index, value


def spread(value: np.ndarray | None, x: np.ndarray, index: Any) -> np.ndarray:
    """The value, one for every element taken: `ufunc.at` reads past the end of one that a vector's index repeats."""
    return np.array(np.broadcast_to(np.asarray(value), x[index].shape))


def numpy_edit(verb: str, x: np.ndarray, index: Any, value: np.ndarray | None) -> np.ndarray:
    """Return the result of an edit in NumPy: the oracle."""
    if verb == "get":
        return np.asarray(x[index])
    edited = x.copy()
    if verb == "set":
        edited[index] = value
    elif verb == "add":
        np.add.at(edited, index, spread(value, edited, index))
    elif verb == "multiply":
        np.multiply.at(edited, index, spread(value, edited, index))
    elif verb == "apply":
        edited[index] = np.asarray(edited[index]) ** 3
    return edited
