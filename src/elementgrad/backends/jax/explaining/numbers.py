"""What numbers of a step tell: how large they are, and why none leave."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from elementgrad.backends.jax.explaining.steps import Taken, smooth
from elementgrad.backends.witness import bounded, counts_for_nothing

Array = Any
PRODUCTS = {"mul", "multiply", "div", "true_divide", "divide"}
POWERS = {"square", "integer_pow", "pow", "power", "float_power"}
CHOICES = frozenset(
    """
    reduce_max reduce_min sort top_k approx_top_k cummax cummin reduce_window_max reduce_window_min
    select_and_gather_add scatter-max scatter_max scatter-min scatter_min
    """.split()  # noqa: SIM905
)
"""Primitives that take some elements and leave others."""
CHOOSERS = CHOICES | frozenset(
    """
    max min amax amin nanmax nanmin ptp partition lexsort median quantile percentile reduce_window max_pool min_pool
    segment_max segment_min .at[].max .at[].min
    """.split()  # noqa: SIM905
)
"""What users call them. A softmax has a maximum inside, too, and is none of them."""
BOUNDS = {"maximum", "minimum", "fmax", "fmin"}
SHARES = {"softmax", "log_softmax"}
"""Functions of differences between elements alone."""
ROUNDING = 64.0
LOOKUPS = {"gather", "indexing", "take", "take_along_axis", ".at[].get"}


def largest(x: Array) -> float:
    """The largest in size; NaN if there is one."""
    return float(np.abs(plain(x)).max()) if x.size else 0.0


def plain(x: Array) -> np.ndarray:
    """Numbers for NumPy to look at, which compiles nothing, in a precision that it knows."""
    values = np.asarray(x)
    return values.astype(np.float64) if values.dtype.kind in "fV" else values


def worst(sizes: Iterable[float]) -> float:
    """The largest of several, NaN counting most."""
    known = list(sizes)
    return math.nan if any(map(math.isnan, known)) else max(known, default=0.0)


def finite(x: Array) -> bool:
    """Whether all numbers are finite."""
    return not smooth(x) or bool(np.isfinite(plain(x)).all())


def ended(step: Taken, came: Mapping[int, Array]) -> str | None:
    """Why a step gives no derivative, where its numbers say more than its name."""
    moving = {n: plain(t) for n, t in came.items() if largest(t) > 0}
    if not moving or (step.stops is not None and not any(map(smooth, step.results))):
        return None
    first, tangent = next(iter(moving.items()))
    x = plain(step.operands[first])
    still = [plain(y) for n, y in enumerate(step.operands) if n not in moving and jnp.issubdtype(_kind(y), jnp.number)]
    named = {step.name, step.word}
    if _is_too_small(step, came):
        return "underflow"
    if step.note and "gather" not in step.inner and _goes_nowhere(step, first, tangent):
        return "out-of-range"
    if "gather" in step.inner and named & LOOKUPS:
        every = {first: jnp.ones_like(came[first])}
        return "out-of-range" if step.note and not worst(map(largest, step.push(every).values())) else "row-not-used"
    if step.name == "select_n" and step.word == "select":  # elsewhere it is a slice that is called so
        return "masked"
    bound = is_bound(step)
    if step.inner & CHOICES and named & CHOOSERS and not bound:
        masks = [None if n not in moving else moving[n] != 0 for n in range(len(step.operands))]
        return "tie" if step.ties(masks) else "not-selected"
    if bound:
        return None if not still else bounded("max" in step.inner, still[0])
    if named & PRODUCTS:
        if len(moving) > 1:
            return "cancelled" if bool(x[tangent != 0].any()) else "stationary"
        return "underflow" if still and bool((still[0] != 0).all()) else "masked"
    if named & POWERS:
        return "underflow" if bool((plain(step.operands[0]) != 0).all()) else "stationary"
    if "relu6" in named and bool((x[tangent != 0] > 0).all()):
        return "clamped"
    if named & SHARES and counts_for_nothing(x, tangent != 0):
        return "masked"
    if named & SHARES and not _moves_at_zero(step, came):
        return "cancelled"
    if step.inner == {"dot_general"}:
        return "cancelled" if len(moving) > 1 or not still or _meets(step, first, came[first]) else "masked"
    return None


def _goes_nowhere(step: Taken, number: int, tangent: np.ndarray) -> bool:
    """Whether what is written moves nothing, whatever it is. What is written over moves nothing either."""
    if step.takes[number] in step.arrays:
        return False
    masks = [tangent != 0 if n == number else None for n in range(len(step.operands))]
    return not any(mask.any() for mask in step.touched(masks))


def is_bound(step: Taken) -> bool:
    """Whether a step takes the larger or the smaller of two."""
    return step.word in BOUNDS or step.name in BOUNDS or step.name in ("max", "min")


def _is_too_small(step: Taken, came: Mapping[int, Array]) -> bool:
    """Whether something leaves if more comes in: a power of two, so that nothing is rounded in another way."""
    size = worst(map(largest, came.values()))
    if not size < 1:
        return False
    factor = 2.0 ** -math.frexp(size)[1]
    more = {n: jnp.asarray(plain(t) * factor, t.dtype) for n, t in came.items()}
    return worst(map(largest, step.push(more).values())) > 0


def _moves_at_zero(step: Taken, came: Mapping[int, Array]) -> bool:
    """Whether there is a slope where nothing is far out; if there is none, its parts cancel everywhere."""
    operands = [jnp.zeros_like(x) if n in came else x for n, x in enumerate(step.operands)]
    moves = worst(map(largest, replace(step, operands=operands).push(came).values()))
    finest = max(float(jnp.finfo(t.dtype).eps) for t in came.values())
    return not moves <= ROUNDING * finest * worst(map(largest, came.values()))


def _kind(x: Array) -> Any:
    return x.dtype if hasattr(x, "dtype") else type(x)


def _meets(step: Taken, number: int, tangent: Array) -> bool:
    """Whether a derivative meets factors other than zero in a product of matrices, and cancels with others there."""
    operands = [jnp.abs(x) for x in step.operands]
    operands[number] = jnp.abs(tangent).astype(operands[number].dtype)
    return bool(jnp.asarray(step.function(*operands)[0]).any())
