"""The interfaces that a backend implements for training and ranking: `TrainBackend` and `TopBackend`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from elementgrad._train.trainer import Trainer

Tensor = Any


class TrainBackend(ABC):
    """Makes the trainers of models."""

    @abstractmethod
    def trainer(self, model: Any) -> Trainer:
        """Return the trainer of a model's elements; raise `FrameworkError` for what is no model."""

    @abstractmethod
    def tensor_bits(self, tensor: Tensor) -> tuple[str, np.ndarray]:
        """Return the dtype of a tensor, and the bytes of its elements: uint8, one row per element."""

    @abstractmethod
    def from_bits(self, bits: np.ndarray, like: Tensor) -> Tensor:
        """Return a tensor with these bytes, of the dtype, shape and device of another one."""


class TopBackend(ABC):
    """Finds the elements of parameters that rank highest."""

    @abstractmethod
    def parameter_gradients(
        self,
        model: Any,
        parameters: Mapping[str, Tensor],
        losses: Callable[..., Iterable[Tensor]],
        squared: bool,
        give: Callable[[str, Tensor], None],
    ) -> None:
        """Pass the gradient of the sum of the losses for each parameter to `give`, one at a time, and keep none.

        With `squared` it is the sum of the squared derivatives of every number among the losses. `give` is not called
        for a parameter that no loss depends on. `losses()` runs the model itself, and `losses(other)` another model in
        its place, for a framework whose parameters are never written to.
        """

    @abstractmethod
    def topk_abs(self, x: Tensor, count: int, floor: float, minus: Tensor | None) -> tuple[np.ndarray, np.ndarray]:
        """Return the sizes (float64) and flat positions of the elements of `x - minus` with the largest absolute value.

        They are at most `count`, none smaller than `floor`; of equal ones those that come first. If an element is not
        finite, it alone is returned.
        """
