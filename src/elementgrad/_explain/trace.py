"""The interface between `eg.explain` and the backends: one recorded run of the user's function.

A backend runs the function once and returns a `Trace`: the operations in order (`Op`), the values that each read and
made, and the values that the framework's derivative connects with the source. That settles whether there is a path, and
where it was cut. Each operation keeps its tensors and can be differentiated and run again by itself, so that tangents,
cotangents and dependence are followed through the record (`replay.py`) without another run of the function.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from elementgrad._backends.autodiff import reason
from elementgrad._backends.base import NATIVE, Backend

Tensor = Any
Verdict = Literal["flows", "unconnected", "zero", "nonfinite", "mismatch"]


@dataclass(eq=False)
class Op:
    """One operation of the run, as the user would call it. Backends derive from it, and say how it is differentiated.

    An operation that only has a name and a line, for a hint, has no operands.
    """

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
    block: str = ""
    """The user's line that begins a block in which gradients are switched off, if it runs in one and that is known."""

    op_type: str = ""
    """The framework's own name for it."""
    kind: str | None = None
    """What it does to its operands, by the backend's table of `kinds.py`."""
    operands: Sequence[Tensor] = ()
    """The tensors that it read, one for each of `inputs`."""
    results: Sequence[Tensor] = ()
    """The tensors that it made, one for each of `outputs`; none for a write to state that keeps numbers alone."""
    scalars: Sequence[float] = ()
    """Plain numbers among its arguments."""
    inner_cause: str | None = None
    """The cause if nothing leaves a compiled function, as far as what is inside shows it."""
    misses: str = ""
    """A note on indices that lie outside of what it reads or writes, if there are some."""
    written: Collection[int] = ()
    """Ids of the values among `inputs` that it writes into."""
    can_rerun: bool = True
    """False if it must not run on other numbers, as it calls the user's code or may never end."""
    inner: Collection[str] = frozenset()
    """The types of the operations that it is made of, if they are known."""
    loops: bool = False
    """True for a loop, which counts its iterations in integers that say nothing about its other results."""
    compares: bool = False
    """True if it is made of others, and some of them make integers or booleans."""
    error: Exception | None = field(default=None, repr=False)
    """Why the framework cannot differentiate it, if it cannot."""

    def connected_results(self, active: Sequence[int]) -> AbstractSet[int]:
        """Return the indices of the results with a derivative by one of the operands at indices `active`."""
        raise NotImplementedError

    def jvp(self, tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the tangents of the results for those of the operands; None for one that has none."""
        raise NotImplementedError

    def vjp(self, cotangents: Sequence[Tensor | None], wanted: Sequence[bool]) -> list[Tensor | None]:
        """Return the cotangents of the wanted operands for those of the results."""
        raise NotImplementedError

    def rerun(self, operands: Sequence[Tensor]) -> list[Tensor]:
        """Return the results for other operands, with the random numbers of the first run."""
        raise NotImplementedError


AnyOp = TypeVar("AnyOp", bound=Op)


class Numbers:
    """The numbers of a framework's tensors, read and made in sweeps over a record."""

    def __init__(self, backend: Backend):
        self._backend = backend

    def is_differentiable(self, x: Tensor) -> bool:
        """Return True for floating-point and complex tensors."""
        return self._backend.kind(x) in "fc"

    def dtype(self, x: Tensor) -> str:
        """Return the name of the dtype, `int64`."""
        return self._backend.dtype(x)

    def size(self, x: Tensor) -> float:
        """Return the largest absolute value; NaN if there is one."""
        values = self.array(x)
        if not values.size:
            return 0.0
        return float(np.abs(values).max() if values.dtype.kind == "c" else np.maximum(values.max(), -values.min()))

    def verdict(self, gradient: Tensor) -> Verdict:
        """Return the verdict that the numbers of a gradient show."""
        size = self.size(gradient)
        return "zero" if size == 0 else "flows" if math.isfinite(size) else "nonfinite"

    def array(self, x: Tensor) -> np.ndarray:
        """Return the numbers in a dtype that NumPy has, and no finer one than necessary."""
        native = not self.is_differentiable(x) or self._backend.dtype(x) in NATIVE
        values = self._backend.read(x) if native else self._backend.to_float64(x)
        if values is None or values.dtype.kind == "O":
            raise TypeError(f"a tensor of {self._backend.dtype(x)} has no numbers to read")
        return values if native and values.dtype.kind != "V" else values.astype(np.float32)

    def moved(self, x: Tensor, position: int, by: float) -> np.ndarray:
        """Return the numbers in float64, with the one at a flat position moved."""
        array = np.array(self.array(x), np.float64, order="C")  # or of a transposed tensor, `reshape` is a copy
        array.reshape(-1)[position] += by
        return array

    def like(self, array: np.ndarray, x: Tensor) -> Tensor:
        """Return a tensor of these numbers, with the dtype and on the device of another."""
        return self._backend.cast(array if array.flags.writeable else array.copy(), x)

    def widen(self, x: Tensor) -> Tensor:
        """Return the same numbers in float64, or in complex128, for use inside of `in_float64`."""
        return self._backend.convert(x, "complex128" if self._backend.kind(x) == "c" else "float64")

    def in_float64(self) -> AbstractContextManager[Any]:
        """Return a context in which operations run in float64."""
        return self._backend.precision("float64")

    def at(self, like: Tensor, positions: np.ndarray, values: np.ndarray) -> Tensor:
        """Return values at flat positions of a tensor like another, and zeros elsewhere."""
        flat = np.zeros(int(np.prod(like.shape, dtype=int)))
        flat[positions] = values
        return self.like(flat.reshape(tuple(like.shape)), like)


@dataclass(frozen=True)
class Hint:
    """Something known about the source, the target or the whole run: a cause, the evidence, and the operation."""

    cause: str | None
    """None if the evidence does not decide."""
    evidence: str = ""
    op: Op | None = None
    """One of the graph's, or one made for the hint if there is a line to name."""
    variant: str | None = None
    """Chooses the words for the cause in place of the operation, if there is something closer."""


@dataclass(frozen=True)
class OpGraph(Generic[AnyOp]):
    """The operations of one run. Values have ids; the source is one of them, and so is the target."""

    ops: Sequence[AnyOp]
    source: int
    target: int
    connected: AbstractSet[int]
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
class Tangents:
    """The tangents of the chosen elements, on their way to the target."""

    sizes: Mapping[Op, TangentSizes]
    """At each operation that they reach, in order."""
    reached: float
    """The largest at the target's chosen elements."""
    elsewhere: bool
    """True if other elements of the target have one."""


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
    undefined: bool = False
    """True if NaN comes out, and no infinity, though no input is so large that its square overflows."""


@dataclass(frozen=True)
class ReachOverlap:
    """The values that can move with the source's chosen elements, and those among them that get a gradient there."""

    dependent: AbstractSet[int]
    """Values of which some element can move with the source's, at some numbers."""
    alive: AbstractSet[int]
    """Values of which such an element has a gradient other than zero."""


@dataclass(eq=False)
class Trace:
    """A recorded run of the user's function, or of a training step, from one source to one target.

    `replay.py` follows it again.
    """

    graph: OpGraph[Any]
    numbers: Numbers
    source: Tensor
    """The tensor that is differentiated by, as it was in the run."""
    target: Tensor
    """The tensor that is differentiated, detached."""
    following: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Makes a context in which operations run again without disturbing anything."""
    later_ids: Sequence[int] = ()
    """Of a source that is a variable, the values after writes to it."""
    follows_rules: bool = False
    """True if the vjps of the operations are the framework's derivative of the run: no other one need be computed."""

    def apply_source_hooks(self, gradient: Tensor) -> Tensor:
        """Return the gradient after the user's own hooks on the source."""
        return gradient

    def hint_for_error(self, error: Exception) -> Hint | None:
        """Return why the framework refused to compute the gradient, if that is a known cause."""
        return None

    def gradient(self, of: np.ndarray, weights: np.ndarray) -> Tensor | None:
        """Return the gradient, for the whole source, of a weighted sum of the target's elements at flat positions `of`.

        None if the framework's derivative has no path. Errors of the framework pass through.
        """
        return None


class Record(ABC):
    """One run of the user's function, from which all questions about it are answered."""

    @abstractmethod
    def trace(self, source: int, target: int) -> Trace:
        """Return the run as seen from one of its sources to one of its targets, by their positions."""


@dataclass(frozen=True)
class LiveReport:
    """A backend's findings about live tensors, or about a training step that was run as it is.

    Either the hint says it all, or the graph is searched for where the path was cut.
    """

    verdict: Verdict
    graph: OpGraph | None = None
    hint: Hint | None = None
    of: str = "the loss"
    wrt: str = "its inputs"
    value: Tensor | None = None
    cotangents: Mapping[Op, CotangentSizes] | None = None
    """At each operation of the graph, where the gradient is zero or not finite."""
    step: Trace | None = None
    """The step, to follow it again, where the gradient is zero or not finite."""
    positions: np.ndarray | None = None
    """The elements of the step's source that are asked about; None for all."""
    suspect: Hint | None = None
    """What may make the gradient of a step wrong. A step does not run again, so that no difference can show it."""

    @classmethod
    def unfollowed(cls, verdict: Verdict, error: Exception, **more: Any) -> "LiveReport":
        """Return a verdict without a cause, as the run could not be followed."""
        return cls(verdict, None, Hint(None, cannot_follow(error)), **more)


LEAF_WRITE = "a write in place to a leaf"
"""Stands for the operation where PyTorch refuses to write to a leaf."""
NOTHING_TRACKED = "a step without gradients"
"""Stands for the operation where nothing that a step computes with requires gradients."""
MOVING_STATISTIC = "a moving statistic"
"""Stands for the operation where the source is a statistic that a layer updates by itself, as a batch norm does."""


def uneven_weights(count: int) -> np.ndarray:
    """Return a weight for each of `count` elements: uneven, so that they do not cancel; 1 for a single one."""
    # They repeat after a prime number of elements, so that no axis of a usual size meets the same weight again.
    period = 1 + np.modf(np.arange(min(count, 65_537)) * 0.6180339887498949)[0]
    return np.ones(1) if count == 1 else np.resize(period, count)


def cannot_follow(error: BaseException) -> str:
    """Return the evidence that a run could not be followed, and why."""
    return (
        f"the run could not be followed, so that cause and path are not known: {type(error).__name__}: {reason(error)}"
    )
