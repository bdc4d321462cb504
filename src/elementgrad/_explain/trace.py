"""What a framework tells of one run of the user's function, so that somebody can say where a derivative was lost.

A backend runs the function once and writes an `Account`: its steps in order, which values each took and gave, and which
values the framework's derivative connects with the source. That settles whether there is a path and where it was cut.
For a gradient that is there but zero or not finite, the witness follows numbers through the same steps, on demand:
`push` from the source, `pull` from the target, `values` for the numbers themselves.
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
    path: str = ""
    """The module or layer in which it ran, `h.7.attn`."""
    takes: tuple[int, ...] = ()
    """The values that it computes with, by numbers that the backend gives out: one per tensor and write to it."""
    gives: tuple[int, ...] = ()
    """The values that it makes. A write in place gives a new value to each tensor that lies in the memory."""
    stops: str | None = None
    """The cause for which no derivative leaves it, if it takes a connected value, gives one that is not, and the
    framework can tell why: `detached`, `no-grad`, `discrete`, `left-framework`, `custom-rule`, `no-rule`, ..."""
    note: str = ""
    """What there was to see, as a part of a sentence: `float32 in, int64 out`."""
    own: bool = False
    """Whether the user wrote its derivative: an `autograd.Function`, a `tf.custom_gradient`, a `custom_vjp`."""
    decides: bool = False
    """Whether what it takes leaves the framework for a decision of Python's (`if x > 0`)."""
    enters: bool = False
    """Whether it makes a tensor of plain numbers, which may have left before."""
    closed: bool = False
    """Whether it cannot be followed what becomes of what it takes."""
    quiet: bool = False
    """Whether it is no step of the user's own, and is left out where steps are shown."""


@dataclass(frozen=True)
class Hint:
    """Something known about the source, the target or the run as a whole: a cause, what was seen, and the step."""

    cause: str | None
    """None if what was seen does not decide."""
    evidence: str = ""
    step: Op | None = None
    """One of the account's, or one made for the remark, if there is a line to name."""


@dataclass(frozen=True)
class OpGraph:
    """One run. Values have numbers; the source is one of them and so is the target."""

    steps: Sequence[Op]
    source: int
    target: int
    connected: Collection[int]
    """The values from which the framework's derivative program leads back to the source, the source included."""
    remarks: Sequence[Hint] = ()
    """What decides by itself (`not-tracked`), or makes a derivative suspect although it flows (`hook`, `custom-rule`,
    `modified-through-data`)."""
    draws: bool = False
    """Whether the run draws random numbers: in another precision they may be others."""


@dataclass(frozen=True)
class TangentSizes:
    """How the elements asked for move a step: the largest derivative, in size, of what it takes and what it gives."""

    arrives: float
    leaves: float
    cause: str | None = None
    """Why nothing leaves, where the backend can see that better than the table of operations: `tie` for a maximum."""


@dataclass(frozen=True)
class CotangentSizes:
    """The largest gradient, in size, that arrives at what a step gave and that leaves at what it took; NaN counts."""

    arrives: float
    leaves: float
    there: float
    """The largest that arrives at those elements where what leaves is not finite; `arrives` if nobody can tell."""
    dead: bool = False
    """Whether nothing but zeros arrives, also at other elements than those asked for."""


@dataclass(frozen=True)
class FiniteFlags:
    """Whether all numbers that a step took, and all that it gave, are finite."""

    takes: bool
    gives: bool
    grows: bool = False
    """Whether it gives infinity, and no NaN, though it took no zero."""


@dataclass(frozen=True)
class ReachOverlap:
    """Where what the elements asked for can move, at whatever numbers, meets the gradient of what was asked for."""

    touched: AbstractSet[int]
    """The values of which some element can move with those of the source."""
    alive: AbstractSet[int]
    """The values of which such an element has a gradient other than zero."""


class Trace(ABC):
    """One run of the user's function, which can be followed again: each method gives one entry per step of the account.

    An entry is None for a step that has none. A method gives None if the run cannot be followed so, as when an
    operation has no forward rule or a second run takes other steps; then the question is open, and is said to be.
    """

    account: OpGraph
    source: Tensor
    """The tensor that is differentiated by, as the run met it."""
    target: Tensor
    """The tensor that is differentiated, apart from the graph."""

    def arriving(self, gradient: Tensor) -> Tensor:
        """What the user's own hooks on the source make of its gradient."""
        return gradient

    def refusal(self, error: Exception) -> Hint | None:
        """Why the framework refused to compute the gradient, if that is a cause that it knows."""
        return None

    @abstractmethod
    def gradient(self, of: np.ndarray, weights: np.ndarray) -> Tensor | None:
        """The gradient, for the whole source, of a weighted sum of the target's elements at these flat positions.

        None if the framework's derivative program has no path. It raises what the framework raises.
        """

    @abstractmethod
    def jvp(self, wrt: np.ndarray) -> tuple[Sequence[TangentSizes | None], np.ndarray] | None:
        """Follow the elements of the source at these flat positions; and the derivative of each of the target's."""

    @abstractmethod
    def vjp(self, of: np.ndarray, weights: np.ndarray, wrt: np.ndarray) -> Sequence[CotangentSizes | None] | None:
        """Follow the gradient of a weighted sum of the target's elements at these flat positions.

        Where a step takes the source itself, what leaves counts at the source's elements at `wrt` alone.
        """

    @abstractmethod
    def meet(self, of: np.ndarray, weights: np.ndarray, wrt: np.ndarray) -> ReachOverlap | None:
        """Element by element: what can move with the source's elements at `wrt`, and whether a gradient arrives there.

        What can move is followed through cuts as well. Values apart from the framework's derivative are never alive.
        """

    @abstractmethod
    def values(self) -> Sequence[FiniteFlags | None] | None:
        """Look at the numbers themselves."""


@dataclass(frozen=True)
class LiveReport:
    """What a framework tells of live tensors, or of a step that was run as it is.

    Either a remark says it all, or the account is followed to where the path was cut.
    """

    verdict: Verdict
    account: OpGraph | None = None
    remark: Hint | None = None
    of: str = "the loss"
    wrt: str = "what it is computed from"
    value: Tensor | None = None
    pulled: Sequence[CotangentSizes | None] | None = None
    """What came by each step of the account, where the gradient is zero or not finite."""


TO_A_LEAF = "a write in place to a leaf"
"""An operation that PyTorch refuses to run."""


LOW = -1e4
"""What is added to a score to mask it, or less."""
STATISTIC = "a moving statistic"
"""What stands for an operation where the source is a statistic that a layer moves by itself, as a batch norm does."""


def weights(count: int) -> np.ndarray:
    """A weight for each of several elements asked about: uneven, so that they do not cancel; 1 for one."""
    return np.ones(1) if count == 1 else 1 + np.modf(np.arange(count) * 0.6180339887498949)[0]


def unfollowed(error: BaseException) -> str:
    """That a run could not be followed, and why, as something that was seen."""
    told = f"{type(error).__name__}: {reason(error)}"
    return f"the run could not be followed, so that cause and path are not known: {told}"


def counts_for_nothing(x: np.ndarray, moved: np.ndarray) -> bool:
    """Whether elements of what a softmax takes are as low as masks make them, and others are not."""
    return bool((x[moved] <= LOW).all() and (x[~moved] > LOW).any())


def arriving(came: np.ndarray, bad: np.ndarray) -> float | None:
    """The largest gradient that arrives where some that leave are bad, for shapes that stretch to each other.

    None if they do not, as for a product of matrices: then nobody can tell which belongs to which.
    """
    try:
        came, bad = np.broadcast_arrays(came, bad)
    except ValueError:
        return None
    return float(np.abs(came[bad]).max(initial=0.0))


def bounded(lower: bool, bound: np.ndarray) -> str | None:
    """Why an element loses against a bound that is the same everywhere: one of zero from below is a rectifier's."""
    if not bound.size or not bool((bound == bound.reshape(-1)[0]).all()):
        return None
    return "dead-relu" if lower and float(bound.reshape(-1)[0]) == 0 else "clamped"
