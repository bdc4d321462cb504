"""Models of each framework for the tests that rank elements, and the elements that are expected."""

from collections.abc import Callable
from typing import Any

import numpy as np

import elementgrad as eg

HOW = ("gradient", "fisher")
Case = tuple[Any, Callable[[Any], Any]]
"""A model and a function of it that gives a vector of losses."""


class Ranked:
    """One framework."""

    pieces: Any
    """The module that says how many elements are looked at together."""
    models: dict[str, Callable[[], Case]]

    def parameters(self, model: Any) -> dict[str, np.ndarray]:
        """The values of all parameters, in the model's order."""
        raise NotImplementedError

    def tensors(self, model: Any) -> dict[str, Any]:
        """The parameters themselves."""
        raise NotImplementedError

    def dense(self, model: Any, loss_fn: Callable[[Any], Any], by: str) -> dict[str, np.ndarray]:
        """Scores of all elements that the losses reach, by the framework alone."""
        raise NotImplementedError

    def chain(self, kernels: list[np.ndarray], biases: list[np.ndarray | None], frozen: bool, tied: bool) -> Any:
        """Linear layers, each followed by ReLU; where they are tied the last one has the kernel of the first."""
        raise NotImplementedError

    def tensor(self, array: Any) -> Any:
        """An array as a tensor."""
        raise NotImplementedError

    def sums(self, y: Any) -> Any:
        """The sum of each row."""
        raise NotImplementedError

    def copied(self, model: Any) -> Any:
        """A model of its own, of the same values."""
        raise NotImplementedError

    def assign(self, model: Any, values: dict[str, np.ndarray]) -> None:
        """Write to parameters."""
        raise NotImplementedError


def best(scores, k, allowed=lambda name, position: True):
    """Of equal ones the first, by parameter and position."""
    rows = [
        (-score, number, position, name)
        for number, (name, values) in enumerate(scores.items())
        for position, score in enumerate(values.reshape(-1).tolist())
        if allowed(name, position)
    ]
    return [(name, position) for _, name, position in sorted(row[1:2] + row[3:] + row[2:3] for row in sorted(rows)[:k])]


def named(places, framework, model):
    """The same for what `top` gave, which must be in order."""
    shapes = {name: (number, x.shape) for number, (name, x) in enumerate(framework.parameters(model).items())}
    found = []
    for place in places:
        number, shape = shapes[place.name]
        assert place.tensor is None
        assert place.pointwise == bool(shape)
        positions = place.select(shape).flat().reshape(-1).tolist()
        assert positions == sorted(set(positions))
        found += [(number, place.name, position) for position in positions]
    assert found == sorted(found)
    assert len({place.name for place in places}) == len(places)
    return [element[1:] for element in found]


def assert_best(framework, model, loss_fn, k, by, **options):
    scores = framework.dense(model, loss_fn, by)
    assert named(eg.top(model, loss_fn, k, by, **options), framework, model) == best(scores, k)
