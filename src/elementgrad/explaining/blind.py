"""Runs that cannot be followed, as when a framework has changed: the verdict is kept, and the diagnosis says so."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from elementgrad.backends import Backend
from elementgrad.backends.linear import Linear
from elementgrad.backends.witness import Account, Met, Pulled, Pushed, Remark, Seen, Witness, unfollowed
from elementgrad.trace import Run

Tensor = Any
T = TypeVar("T")
UNSEEN = "no step was seen on the way that the gradient takes, so that the path is not known"


class Blind(Witness):
    """The derivative of a run of which no step was seen."""

    def __init__(self, backend: Backend, run: Run, source: Tensor | None):
        self._backend = backend
        self._run = run
        self._given = source
        met: list[Tensor] = []

        def meet(x: Tensor) -> Tensor:
            met.append(x)
            return x

        with backend.undisturbed(run.function):
            (self.target,) = run(meet if source is None else source)
        self.source = met[0] if source is None else source
        self.account = Account((), 0, 1, frozenset((0, 1)))

    def gradient(self, of: np.ndarray, weights: np.ndarray) -> Tensor | None:
        """Compute it as a read does."""
        linear: Linear = self._backend.linearize(self._run, [self._given], False, 1)
        like = linear.value(0)
        shape = tuple(self._backend.shape(like))
        seed = np.zeros(int(np.prod(shape, dtype=int)))
        seed[of] = weights
        (pulled,) = linear.pull(0, [0], self._backend.cast(seed.reshape(1, *shape), like))
        return None if pulled is None else self._backend.reshape(pulled, tuple(self._backend.shape(pulled))[1:])

    def push(self, wrt: np.ndarray) -> None:
        """No step was seen."""

    def pull(self, of: np.ndarray, weights: np.ndarray, wrt: np.ndarray) -> None:
        """No step was seen."""

    def meet(self, of: np.ndarray, weights: np.ndarray, wrt: np.ndarray) -> None:
        """No step was seen."""

    def values(self) -> None:
        """No step was seen."""


class Guarded(Witness):
    """A run that was seen, and that may turn out not to be followed again; why is kept."""

    def __init__(self, witness: Witness):
        self._witness = witness
        self.account, self.source, self.target = witness.account, witness.source, witness.target
        self.failures: list[str] = []

    def _tried(self, follow: Callable[[], T | None]) -> T | None:
        try:
            return follow()
        except Exception as error:
            self.failures.append(unfollowed(error))
            return None

    def arriving(self, gradient: Tensor) -> Tensor:
        """Ask the run."""
        return self._witness.arriving(gradient)

    def refusal(self, error: Exception) -> Remark | None:
        """Ask the run."""
        return self._witness.refusal(error)

    def gradient(self, of: np.ndarray, weights: np.ndarray) -> Tensor | None:
        """Ask the run; what the framework raises is for the user."""
        return self._witness.gradient(of, weights)

    def push(self, wrt: np.ndarray) -> tuple[Sequence[Pushed | None], np.ndarray] | None:
        """Follow the elements, if that can be."""
        return self._tried(lambda: self._witness.push(wrt))

    def pull(self, of: np.ndarray, weights: np.ndarray, wrt: np.ndarray) -> Sequence[Pulled | None] | None:
        """Follow the gradient, if that can be."""
        return self._tried(lambda: self._witness.pull(of, weights, wrt))

    def meet(self, of: np.ndarray, weights: np.ndarray, wrt: np.ndarray) -> Met | None:
        """Follow both, if that can be."""
        return self._tried(lambda: self._witness.meet(of, weights, wrt))

    def values(self) -> Sequence[Seen | None] | None:
        """Look at the numbers, if that can be."""
        return self._tried(self._witness.values)
