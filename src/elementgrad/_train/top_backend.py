"""The interface that a framework implements so that `eg.top` ranks the elements of its models."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from elementgrad.errors import FrameworkError

Tensor = Any


class TopBackend(ABC):
    """Finds the elements of parameters that rank highest."""

    PIECE = 2**18
    """The number of elements that are ranked at a time, so that no copy of a whole tensor is made."""

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
    def pieces(self, x: Tensor) -> Iterator[np.ndarray]:
        """Yield the elements of a tensor in order, as float64, up to `PIECE` at a time."""

    def topk_abs(self, x: Tensor, count: int, floor: float, minus: Tensor | None) -> tuple[np.ndarray, np.ndarray]:
        """Return the sizes (float64) and flat positions of the elements of `x - minus` with the largest absolute value.

        They are at most `count`, none smaller than `floor`; of equal ones those that come first. If an element is not
        finite, it alone is returned.
        """
        others = None if minus is None else self.pieces(minus)
        start = 0
        sizes, places = [np.zeros(0)], [np.zeros(0, np.int64)]
        for piece in self.pieces(x):
            size = np.abs(piece if others is None else piece - next(others))
            unknown = np.flatnonzero(~np.isfinite(size))[:1]
            if len(unknown):
                return size[unknown], start + unknown
            place = np.flatnonzero(size >= floor)
            sizes.append(size[place])
            places.append(start + place)
            start += len(piece)
            if sum(map(len, sizes)) > 2 * max(count, self.PIECE):
                size, place = _keep_largest(np.concatenate(sizes), np.concatenate(places), count)
                sizes, places, floor = [size], [place], max(floor, float(size.min()))
        return _keep_largest(np.concatenate(sizes), np.concatenate(places), count)


def _keep_largest(sizes: np.ndarray, places: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the `count` largest; of equal ones those that come first."""
    if len(sizes) <= count:
        return sizes, places
    least = np.partition(sizes, -count)[-count]
    kept = sizes > least
    kept[np.flatnonzero(sizes == least)[: count - np.count_nonzero(kept)]] = True
    return sizes[kept], places[kept]


def require_same_losses(first: Sequence[float], again: Sequence[float]) -> None:
    """Raise an error if the user's function returned different losses when it ran again."""
    if len(first) != len(again) or not np.allclose(again, first, 1e-3, 1e-6, equal_nan=True):
        raise FrameworkError(
            "loss_fn returns other losses when called again, as it is for each group of parameters; start it from the "
            "same data each time, or return a list of losses"
        )


def group_by_size(sizes: Mapping[str, int]) -> list[list[str]]:
    """Group neighbours up to the size of the largest, which must fit in memory in any case.

    >>> from elementgrad._train.top_backend import group_by_size
    >>> group_by_size({"embedding": 100, "weight": 60, "bias": 10, "head": 90})
    [['embedding'], ['weight', 'bias'], ['head']]
    """
    room = max(sizes.values())
    groups: list[list[str]] = [[]]
    for name, size in sizes.items():
        if sum(sizes[other] for other in groups[-1]) + size > room:
            groups.append([])
        groups[-1].append(name)
    return groups
