"""The three frameworks behind one interface, so that a test is written once. Float64 unless stated otherwise."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

Function = Callable[..., Any]


class Framework:
    """A framework by its name; it is imported by the first use of one of its functions.

    These are in `framework_torch.py`, `framework_tensorflow.py` and `framework_jax.py`: `jit(f)`, `vmap(f)`,
    `tensor(array, dtype)`, `numpy(tensor)`, `sum(tensor)`, `stack(tensors)`, and as references the framework's own
    derivatives, `grad(f, *xs)`, `jvp(f, xs, tangents)` and `hessians(f, x)`.
    """

    def __init__(self, name: str):
        self.name = name

    def __repr__(self) -> str:
        return self.name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest and copy look for marks, and are no use of the framework
            raise AttributeError(name)
        value = getattr(import_module(f"tests.support.framework_{self.name}"), name)
        setattr(self, name, value)
        return value


TORCH, TENSORFLOW, JAX = (Framework(name) for name in ("torch", "tensorflow", "jax"))
FRAMEWORKS = [TORCH, TENSORFLOW, JAX]


def difference(f: Callable[[np.ndarray], float], x: np.ndarray, step: float = 1e-6) -> np.ndarray:
    """Central finite differences of a scalar function of one float64 array."""
    gradient = np.zeros_like(x)
    for position in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[position] += step
        down[position] -= step
        gradient[position] = (f(up) - f(down)) / (2 * step)
    return gradient
