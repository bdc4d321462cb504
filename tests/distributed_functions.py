"""Functions whose Jacobians are read by workers. Made inside of functions: so cloudpickle sends them as they are."""

import os
import time
from pathlib import Path

import torch


def import_torch() -> None:
    """For workers who will import TensorFlow as well: the other order is known to crash."""
    torch.set_num_threads(1)


def watched(log: str | None = None, pause: float = 0.0, dies: str | None = None):
    """A function that notes each stack of reverse sweeps in a file and takes its time; a file ends its worker."""
    here = os.getpid()

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
            if dies is not None and os.getpid() != here and Path(dies).exists():
                os._exit(1)
            return gradient.clone()

    def f(x, weight):
        return torch.tanh(Watched.apply(torch.tanh(weight @ x)))

    return f


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
