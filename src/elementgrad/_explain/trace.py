"""The interface between `eg.explain` and the backends: one traced run of the user's function.

A backend runs the function once and returns a `Trace`. Its `OpGraph` lists the operations in order, the values that
each read and made, and the values that the framework's derivative connects with the source. That settles whether there
is a path, and where it was cut. For a gradient that is zero or not finite, the trace follows the same operations again,
on demand: tangents from the source, cotangents from the target, or the numbers themselves.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from elementgrad._backends.autodiff import reason

Tensor = Any
Verdict = Literal["flows", "unconnected", "zero", "nonfinite", "mismatch"]


@dataclass(frozen=True, eq=False)
class Op:
    """One operation of the run, as the user would call it."""

    operation: str
    """The user's word: `detach`, `relu`, `argmax`, `MyFunction`."""
    where: str | None = None
    """The user's line, `model.py:42`."""
    module: str = ""
    """The module or layer in which it ran, `h.7.attn`."""
    inputs: tuple[int, ...] = ()
    """Ids of the values that it reads. A backend gives one id to each tensor, and a new one after each write to it."""
    outputs: tuple[int, ...] = ()
    """Ids of the values that it makes. A write in place makes a new value of each tensor that shares the memory."""
    cut_cause: str | None = None
    """The cause for which no derivative leaves it, if a connected value goes in, an unconnected one comes out, and the
    framework knows why: `detached`, `no-grad`, `discrete`, `left-framework`, `custom-rule`, `no-rule`, ..."""
    note: str = ""
    """An observation, as a part of a sentence: `float32 in, int64 out`."""
    custom_gradient: bool = False
    """True if the user wrote its derivative: an `autograd.Function`, a `tf.custom_gradient`, a `custom_vjp`."""
    branches: bool = False
    """True if a value leaves the framework for a decision of Python's (`if x > 0`)."""
    from_python: bool = False
    """True if it makes a tensor of plain numbers, which may have left the framework before."""
    opaque: bool = False
    """True if what it does with its inputs cannot be followed."""
    hidden: bool = False
    """True if it is not an operation of the user's own; lists of operations leave it out."""


@dataclass(frozen=True)
class Hint:
    """Something known about the source, the target or the whole run: a cause, the evidence, and the operation."""

    cause: str | None
    """None if the evidence does not decide."""
    evidence: str = ""
    op: Op | None = None
    """One of the graph's, or one made for the hint if there is a line to name."""


@dataclass(frozen=True)
class OpGraph:
    """The operations of one run. Values have ids; the source is one of them, and so is the target."""

    ops: Sequence[Op]
    source: int
    target: int
    connected: Collection[int]
    """The values from which the framework's derivative leads back to the source, the source included."""
    hints: Sequence[Hint] = ()
    """Causes that decide by themselves (`not-tracked`), or that make a derivative suspect although it flows (`hook`,
    `custom-rule`, `modified-through-data`)."""
    is_random: bool = False
    """True if the run draws random numbers: in another precision they may be different ones."""


@dataclass(frozen=True)
class TangentSizes:
    """The largest absolute tangent of the chosen elements at an operation's inputs and outputs."""

    at_inputs: float
    at_outputs: float
    cause: str | None = None
    """The cause if nothing leaves, where the backend knows better than the table of operations: `tie` for a maximum."""


@dataclass(frozen=True)
class CotangentSizes:
    """The largest absolute gradient at an operation's outputs, where it arrives, and at its inputs; NaN counts."""

    at_outputs: float
    at_inputs: float
    where_nonfinite: float
    """The largest at those outputs whose inputs get a gradient that is not finite; `at_outputs` if that is unknown."""
    all_zero: bool = False
    """True if nothing but zeros arrives, also at other elements than the chosen ones."""


@dataclass(frozen=True)
class FiniteFlags:
    """True for inputs, and for outputs, if all of their numbers are finite."""

    inputs: bool
    outputs: bool
    overflows: bool = False
    """True if infinity comes out, and no NaN, though no input is zero."""


@dataclass(frozen=True)
class ReachOverlap:
    """The values that can move with the source's chosen elements, and those among them that get a gradient there."""

    dependent: AbstractSet[int]
    """Values of which some element can move with the source's, at some numbers."""
    alive: AbstractSet[int]
    """Values of which such an element has a gradient other than zero."""


class Trace(ABC):
    """One run of the user's function, which can be followed again: each method returns one entry per operation.

    An entry is None for an operation that has none. A method returns None if the run cannot be followed in that way, as
    when an operation has no forward rule or a second run takes other operations; the diagnosis then leaves it open.
    """

    graph: OpGraph
    source: Tensor
    """The tensor that is differentiated by, as it was in the run."""
    target: Tensor
    """The tensor that is differentiated, detached."""

    def apply_source_hooks(self, gradient: Tensor) -> Tensor:
        """Return the gradient after the user's own hooks on the source."""
        return gradient

    def hint_for_error(self, error: Exception) -> Hint | None:
        """Return why the framework refused to compute the gradient, if that is a known cause."""
        return None

    @abstractmethod
    def gradient(self, of: np.ndarray, weights: np.ndarray) -> Tensor | None:
        """Return the gradient, for the whole source, of a weighted sum of the target's elements at flat positions `of`.

        None if the framework's derivative has no path. Errors of the framework pass through.
        """

    def tangent_sizes(self, wrt: np.ndarray) -> tuple[Sequence[TangentSizes | None], np.ndarray] | None:
        """Push tangents from the source's elements at flat positions `wrt`; also return the target's tangent."""
        return None

    def cotangent_sizes(
        self, of: np.ndarray, weights: np.ndarray, wrt: np.ndarray
    ) -> Sequence[CotangentSizes | None] | None:
        """Pull back the gradient of a weighted sum of the target's elements at flat positions `of`.

        Where an operation reads the source itself, only the source's elements at `wrt` count at its inputs.
        """
        return None

    def reach_overlap(self, of: np.ndarray, weights: np.ndarray, wrt: np.ndarray) -> ReachOverlap | None:
        """Find, element by element, what can move with the source's elements at `wrt` and has a gradient.

        Dependence is followed through cuts as well. Values without a derivative are never alive.
        """
        return None

    def finite_flags(self) -> Sequence[FiniteFlags | None] | None:
        """Check which inputs and outputs are finite."""
        return None


@dataclass(frozen=True)
class LiveReport:
    """A backend's findings about live tensors, or about a training step that was run as it is.

    Either the hint says it all, or the graph is searched for where the path was cut.
    """

    verdict: Verdict
    graph: OpGraph | None = None
    hint: Hint | None = None
    of: str = "the loss"
    wrt: str = "what it is computed from"
    value: Tensor | None = None
    cotangents: Sequence[CotangentSizes | None] | None = None
    """For each operation of the graph, where the gradient is zero or not finite."""


LEAF_WRITE = "a write in place to a leaf"
"""Stands for the operation where PyTorch refuses to write to a leaf."""
MOVING_STATISTIC = "a moving statistic"
"""Stands for the operation where the source is a statistic that a layer updates by itself, as a batch norm does."""
MASK_SCORE = -1e4
"""Scores up to this one count as masked."""


def uneven_weights(count: int) -> np.ndarray:
    """Return a weight for each of `count` elements: uneven, so that they do not cancel; 1 for a single one."""
    return np.ones(1) if count == 1 else 1 + np.modf(np.arange(count) * 0.6180339887498949)[0]


def cannot_follow(error: BaseException) -> str:
    """Return the evidence that a run could not be followed, and why."""
    return (
        f"the run could not be followed, so that cause and path are not known: {type(error).__name__}: {reason(error)}"
    )


def is_masked_score(x: np.ndarray, moving: np.ndarray) -> bool:
    """Return True if the moving elements of a softmax's input are as low as masks make them, and others are not."""
    return bool((x[moving] <= MASK_SCORE).all() and (x[~moving] > MASK_SCORE).any())


def largest_where(cotangent: np.ndarray, bad: np.ndarray) -> float | None:
    """Return the largest absolute cotangent at the outputs where inputs are `bad`, for shapes that broadcast.

    None if they do not, as for a product of matrices: then it is unknown which outputs belong to which inputs.
    """
    try:
        cotangent, bad = np.broadcast_arrays(cotangent, bad)
    except ValueError:
        return None
    return float(np.abs(cotangent[bad]).max(initial=0.0))


def cause_of_bound(lower: bool, bound: np.ndarray) -> str | None:
    """Return why an element loses against a constant bound: a lower bound of zero is a rectifier's."""
    if not bound.size or not bool((bound == bound.reshape(-1)[0]).all()):
        return None
    return "dead-relu" if lower and float(bound.reshape(-1)[0]) == 0 else "clamped"
