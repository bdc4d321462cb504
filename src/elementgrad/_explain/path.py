"""The way of data through a run, from source to target, and what is found on it.

Runs that cannot be followed, as when a framework has changed: the verdict is kept, and the diagnosis says so.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from elementgrad._backends.autodiff import Linearization
from elementgrad._backends.base import Backend
from elementgrad._explain.trace import (
    MOVING_STATISTIC,
    CotangentSizes,
    FiniteFlags,
    Hint,
    Op,
    OpGraph,
    ReachOverlap,
    TangentSizes,
    Trace,
    cannot_follow,
)
from elementgrad._names.call import PartialCall


@dataclass
class CauseFinding:
    """A cause and the step that it is about, as far as the evidence decides."""

    cause: str | None
    step: Op | None = None
    evidence: list[str] = field(default_factory=list)
    others: list[Op] = field(default_factory=list)
    """Further steps at which other paths end."""
    variant: str | None = None
    """What tells more of the cause than the operation does, if something does."""

    @classmethod
    def of_remark(cls, remark: Hint) -> "CauseFinding":
        """What a backend knew at once."""
        evidence = [remark.evidence] if remark.evidence else []
        if remark.op is not None and remark.op.operation == MOVING_STATISTIC:
            return cls(remark.cause, None, evidence, variant=MOVING_STATISTIC)
        return cls(remark.cause, remark.op, evidence)


class DataPath:
    """The steps of an account that lie between source and target, by their data."""

    def __init__(self, account: OpGraph):
        self.graph = account
        self.reached = {account.source}
        """Values computed from the source."""
        for step in account.ops:
            if not self.reached.isdisjoint(step.inputs):
                self.reached.update(step.outputs)
        self.leading = {account.target}
        """Values that the target is computed from."""
        for step in reversed(account.ops):
            if not self.leading.isdisjoint(step.outputs):
                self.leading.update(step.inputs)

    @property
    def joined(self) -> bool:
        """Whether the target was computed from the source, however."""
        return self.graph.target in self.reached

    def between(self, step: Op) -> bool:
        """Whether data passes the step on its way from source to target."""
        return not self.reached.isdisjoint(step.inputs) and any(
            value in self.reached and value in self.leading for value in step.outputs
        )

    def cut(self, step: Op) -> bool:
        """Whether nothing that a step gives is connected."""
        return not any(value in self.graph.connected for value in step.outputs)

    def cuts(self, until: Collection[int] | None = None) -> list[Op]:
        """The steps at which paths end: they take what is connected and give what is not, and is needed."""
        connected = self.graph.connected
        needed = self.leading if until is None else until
        return [
            step
            for step in self.graph.ops
            if any(value in connected for value in step.inputs)
            and any(value in needed and value in self.reached and value not in connected for value in step.outputs)
        ]

    def exits(self) -> list[Op]:
        """The steps by which what was computed from the source left the framework."""
        return [
            step
            for step in self.graph.ops
            if step.cut_cause == "left-framework" and not self.reached.isdisjoint(step.inputs)
        ]

    def came_back(self, exit: Op) -> bool:
        """Whether the target is computed from plain numbers that became a tensor after others had left."""
        later = self.graph.ops[_index(self.graph.ops, exit) :]
        return any(step.from_python and not self.leading.isdisjoint(step.outputs) for step in later)

    def before(self, step: Op) -> set[int]:
        """The values that a step was computed from, those it takes included."""
        found = set(step.inputs)
        steps = list(self.graph.ops)
        for earlier in reversed(steps[: steps.index(step)]):
            if not found.isdisjoint(earlier.outputs):
                found.update(earlier.inputs)
        return found

    def last_of(self, ended: Sequence[Op]) -> Op:
        """Of several steps that let nothing through the one to which all others lead; if there is none, the first."""
        behind = self.before(ended[-1])
        return ended[-1] if all(not behind.isdisjoint(step.outputs) for step in ended[:-1]) else ended[0]

    def closed(self) -> CauseFinding | None:
        """That something takes the source which cannot be looked into, if it does."""
        for step in self.graph.ops:
            if step.opaque and not self.reached.isdisjoint(step.inputs):
                return CauseFinding(None, step, [f"{step.operation} takes it, and cannot be looked into"])
        return None

    def line(self, broken: Op | None = None) -> list[str]:
        """One way from source to target in operations, through a break if there is one."""
        if broken is None or not any(step is broken for step in self.graph.ops):
            way = self._behind(self.graph.target) if self.joined else []
        else:
            way = [*self._behind(*[value for value in broken.inputs if value in self.reached][:1]), broken]
            way += self._ahead(broken)
        return [
            f"{step.operation} (broken here)" if step is broken else step.operation
            for step in way
            if not step.hidden or step is broken
        ]

    def _behind(self, *values: int) -> list[Op]:
        """The steps of one way from the source to a value."""
        made = {value: step for step in self.graph.ops for value in step.outputs}
        way: list[Op] = []
        ahead = list(values)
        while ahead and ahead[0] in made and ahead[0] != self.graph.source:
            step = made[ahead[0]]
            way.append(step)
            ahead = [value for value in step.inputs if value in self.reached]
        return way[::-1]

    def _ahead(self, step: Op) -> list[Op]:
        """The steps of one way from a step to the target; none if there is no way."""
        way: list[Op] = []
        here = step
        for other in list(self.graph.ops)[_index(self.graph.ops, step) + 1 :]:
            if not set(here.outputs).isdisjoint(other.inputs) and not self.leading.isdisjoint(other.outputs):
                way.append(other)
                here = other
        return way


def _index(steps: Sequence[Op], step: Op) -> int:
    return next(number for number, other in enumerate(steps) if other is step)


Tensor = Any
T = TypeVar("T")
UNSEEN = "no step was seen on the way that the gradient takes, so that the path is not known"


class OpaqueTrace(Trace):
    """The derivative of a run of which no step was seen."""

    def __init__(self, backend: Backend, run: PartialCall, source: Tensor | None):
        self._backend = backend
        self._run = run
        self._given = source
        met: list[Tensor] = []

        def meet(x: Tensor) -> Tensor:
            met.append(x)
            return x

        with backend.isolated(run.function):
            (self.target,) = run(meet if source is None else source)
        self.source = met[0] if source is None else source
        self.graph = OpGraph((), 0, 1, frozenset((0, 1)))

    def gradient(self, of: np.ndarray, weights: np.ndarray) -> Tensor | None:
        """Compute it as a read does."""
        linear: Linearization = self._backend.linearize(self._run, [self._given], False, 1)
        like = linear.value(0)
        shape = tuple(self._backend.shape(like))
        seed = np.zeros(int(np.prod(shape, dtype=int)))
        seed[of] = weights
        (pulled,) = linear.vjp(0, [0], self._backend.cast(seed.reshape(1, *shape), like))
        return None if pulled is None else self._backend.reshape(pulled, tuple(self._backend.shape(pulled))[1:])

    def tangent_sizes(self, wrt: np.ndarray) -> None:
        """No step was seen."""

    def cotangent_sizes(self, of: np.ndarray, weights: np.ndarray, wrt: np.ndarray) -> None:
        """No step was seen."""

    def reach_overlap(self, of: np.ndarray, weights: np.ndarray, wrt: np.ndarray) -> None:
        """No step was seen."""

    def finite_flags(self) -> None:
        """No step was seen."""


class CheckedTrace(Trace):
    """A run that was seen, and that may turn out not to be followed again; why is kept."""

    def __init__(self, witness: Trace):
        self._witness = witness
        self.graph, self.source, self.target = witness.graph, witness.source, witness.target
        self.failures: list[str] = []

    def _tried(self, follow: Callable[[], T | None]) -> T | None:
        try:
            return follow()
        except Exception as error:
            self.failures.append(cannot_follow(error))
            return None

    def apply_source_hooks(self, gradient: Tensor) -> Tensor:
        """Ask the run."""
        return self._witness.apply_source_hooks(gradient)

    def hint_for_error(self, error: Exception) -> Hint | None:
        """Ask the run."""
        return self._witness.hint_for_error(error)

    def gradient(self, of: np.ndarray, weights: np.ndarray) -> Tensor | None:
        """Ask the run; what the framework raises is for the user."""
        return self._witness.gradient(of, weights)

    def tangent_sizes(self, wrt: np.ndarray) -> tuple[Sequence[TangentSizes | None], np.ndarray] | None:
        """Follow the elements, if that can be."""
        return self._tried(lambda: self._witness.tangent_sizes(wrt))

    def cotangent_sizes(
        self, of: np.ndarray, weights: np.ndarray, wrt: np.ndarray
    ) -> Sequence[CotangentSizes | None] | None:
        """Follow the gradient, if that can be."""
        return self._tried(lambda: self._witness.cotangent_sizes(of, weights, wrt))

    def reach_overlap(self, of: np.ndarray, weights: np.ndarray, wrt: np.ndarray) -> ReachOverlap | None:
        """Follow both, if that can be."""
        return self._tried(lambda: self._witness.reach_overlap(of, weights, wrt))

    def finite_flags(self) -> Sequence[FiniteFlags | None] | None:
        """Look at the numbers, if that can be."""
        return self._tried(self._witness.finite_flags)
