"""The interface that a backend implements for cones: `ConeBackend` records programs, `RecordedProgram` runs parts."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from elementgrad._backends.autodiff import TensorFunction
from elementgrad._cone import cost
from elementgrad._cone.boxes import Box
from elementgrad._cone.plan import Cone, Program, ProgramValue, plan_need

Tensor = Any


class RecordedProgram(Program, ABC):
    """A recorded function, with its differentiated inputs and the tensors that were named in it."""

    tensors: Sequence[Tensor]
    """The outputs, as tensors that have a shape and a dtype and no numbers."""
    sources: Sequence[Tensor]
    """The differentiated inputs; for an activation such a tensor."""

    @abstractmethod
    def is_connected(self, output: int, input: int) -> bool:
        """Return True if the framework's own derivative program has a path from an input to an output."""

    def plan(self, of: ProgramValue, box: Box) -> Cone:
        """Return the cone by which a box of a value is read. Its boxes may be larger than what is needed."""
        return plan_need(self.ops, of, box)

    def pays(self, cone: Cone, of: ProgramValue) -> bool:
        """Return True if a cone is cheaper than the whole of what the value depends on."""
        return cost.pays(self, of, cone)

    @abstractmethod
    def evaluate(self, cone: Cone, of: ProgramValue) -> Tensor:
        """Return the numbers of the part of a value that a cone was planned for."""

    @abstractmethod
    def gradients(
        self, cone: Cone, of: ProgramValue, wrt: Sequence[ProgramValue], seeds: Tensor | np.ndarray
    ) -> list[Tensor | None]:
        """Return a derivative of the needed part of each source, from each seed.

        Args:
            cone: the cone of a part of `of`.
            of: the value that is differentiated.
            wrt: the sources.
            seeds: cotangents of that part, or the flat positions in it of the elements that are differentiated.

        Returns:
            A stack for each source, of the shape of what is needed of it; None if nothing of it is.
        """

    @abstractmethod
    def embed(self, part: Tensor, around: Sequence[tuple[int, int]]) -> Tensor:
        """Return a tensor with so many zeros before and behind it along each axis."""


class ConeBackend(ABC):
    """Records the programs of one framework."""

    op_seconds: float
    """The time to record one operation, roughly."""

    @abstractmethod
    def record(self, run: TensorFunction, inputs: Sequence[Tensor | None], limit: int | None) -> RecordedProgram:
        """Record a function; raise `NoConeError` if that cannot be done, or has more operations than the limit."""

    @abstractmethod
    def is_recorded(self, x: Any) -> bool:
        """Return True for a tensor of a recording, which has no numbers."""
