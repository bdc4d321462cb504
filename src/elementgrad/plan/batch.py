"""Whether the examples of a batch keep apart, as `batch=True` takes for granted."""

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from elementgrad.backends.linear import UnsupportedError
from elementgrad.errors import BatchError

if TYPE_CHECKING:
    from elementgrad.plan.run import Reader

Tensor = Any


def require_apart(reader: "Reader") -> None:
    """Raise if examples mix. Any two differ in a bit of their number: seeds that go by bits tell them apart."""
    if reader.apart or reader.batch <= 1:
        return
    for bit in range((reader.batch - 1).bit_length()):
        seeded = (np.arange(reader.batch) >> bit & 1) == np.array([[0], [1]])
        for derivative in _seeded(reader, seeded):
            values = None if derivative is None else reader.backend.read(derivative)
            if values is None:  # no path, or nobody can know while tracing
                continue
            values = np.abs(values).reshape(2, reader.batch, -1)
            leaked = (values > 0) & np.isfinite(values) & ~seeded[..., None]
            if leaked.any():
                raise BatchError(
                    f"the examples mix: example {leaked.any((0, 2)).argmax()} and another depend on each other, so "
                    "they have no Jacobians of their own; leave batch=True out"
                )
    reader.apart = True


def _seeded(reader: "Reader", examples: np.ndarray) -> list[Tensor | None]:
    """Derivatives from seeds for some examples, by whichever direction there is."""
    linear, backend = reader.linear, reader.backend

    def seeds(like: Tensor) -> Tensor:
        shape = tuple(backend.shape(like))
        weights = np.random.default_rng(0).uniform(0.5, 1.5, shape[1:])  # such that nothing cancels
        return backend.cast(examples.reshape(2, -1, *(1 for _ in shape[1:])) * weights, like)

    try:
        return reader.each("reverse", reader.pull, seeds(linear.outputs[reader.output]))
    except UnsupportedError:
        return [
            reader.each("forward", partial(reader.push, number), seeds(linear.inputs[number]))[0]
            for number in reader.inputs
        ]
