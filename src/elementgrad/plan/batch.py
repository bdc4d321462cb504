"""Whether the examples of a batch keep apart, as `batch=True` takes for granted."""

from typing import Any

import numpy as np

from elementgrad.backends.linear import UnsupportedError
from elementgrad.errors import BatchError
from elementgrad.plan.sweep import Sweeper

Tensor = Any


def require_apart(sweeper: Sweeper) -> None:
    """Raise if examples mix. Any two differ in a bit of their number: seeds that go by bits tell them apart."""
    for bit in range(max(0, sweeper.batch - 1).bit_length()):
        seeded = (np.arange(sweeper.batch) >> bit & 1) == np.array([[0], [1]])
        for derivative in _seeded(sweeper, seeded):
            values = None if derivative is None else sweeper.backend.read(derivative)
            if values is None:  # no path, or nobody can know while tracing
                continue
            values = np.abs(values).reshape(2, sweeper.batch, -1)
            leaked = (values > 0) & np.isfinite(values) & ~seeded[..., None]
            if leaked.any():
                raise BatchError(
                    f"the examples mix: example {leaked.any((0, 2)).argmax()} and another depend on each other, so "
                    "they have no Jacobians of their own; leave batch=True out"
                )


def _seeded(sweeper: Sweeper, examples: np.ndarray) -> list[Tensor | None]:
    """Derivatives from seeds for some examples, by whichever direction there is."""
    linear, backend = sweeper.linear, sweeper.backend

    def seeds(like: Tensor) -> Tensor:
        shape = tuple(backend.shape(like))
        weights = np.random.default_rng(0).uniform(0.5, 1.5, shape)  # such that nothing cancels
        return backend.cast(examples.reshape(2, -1, *(1 for _ in shape[1:])) * weights, like)

    try:
        return sweeper.sweep_from("reverse", sweeper.pulling(), seeds(linear.outputs[sweeper.output]), 2)
    except UnsupportedError:
        return [
            sweeper.sweep_from("forward", sweeper.pushing(number), seeds(linear.inputs[number]), 2)[0]
            for number in sweeper.inputs
        ]
