"""Functions whose Jacobians are read by workers. Made inside of functions: so cloudpickle sends them as they are."""

import functools
import multiprocessing
import os
import time
from pathlib import Path

import torch


def import_torch() -> None:
    """For workers who will import TensorFlow as well: the other order is known to crash."""
    torch.set_num_threads(1)


def watched(log: str | None = None, pause: float = 0.0, dies: str | None = None):
    """A function that notes each stack of reverse sweeps in a file and takes its time; a file ends its worker."""

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            if log is not None:
                with open(log, "a") as file:
                    file.write("sweep\n")
            time.sleep(pause)
            if dies is not None and multiprocessing.parent_process() is not None and Path(dies).exists():
                os._exit(1)
            return gradient.clone()

    def f(x, weight):
        return torch.tanh(Watched.apply(torch.tanh(weight @ x)))

    return f


class Fit:
    """A function as an object, which holds all kinds of things; some of them are in another order in each process."""

    known = frozenset({"tanh", "sine", "cube"})

    def __init__(self, inner, data=None, scale=1.0):
        self.inner = functools.partial(inner)
        self.data = data
        self.settings = {name: len(name) for name in {"rate", "decay", "seeds", "kind"}} | {"scale": scale}
        self.itself = self
        self.nothing = object()

    def __call__(self, x, *more):
        return self.inner(x, *more) * self.settings["scale"] if "sine" in self.known else None

    def method(self, x):
        return self.inner(self.data @ x) * self.settings["scale"]


def arguments(rows: int = 40, columns: int = 60):
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(columns, dtype=torch.float64, generator=generator),
        torch.randn(rows, columns, dtype=torch.float64, generator=generator) / 8,
    )


def net():
    torch.manual_seed(1)
    layers = torch.nn.Linear(12, 20), torch.nn.Dropout(0.5), torch.nn.Tanh(), torch.nn.Linear(20, 9)
    return torch.nn.Sequential(*layers).double(), torch.randn(12, dtype=torch.float64)
