"""PyTorch behind the common interface of `frameworks`."""

from typing import Any

import numpy as np
import torch

from tests.support.frameworks import Function


def jit(f: Function) -> Function:
    torch.compiler.reset()  # tests compile the same few lambdas again and again
    return torch.compile(f, fullgraph=True, backend="aot_eager")


def tensor(array: Any, dtype: str = "float64") -> torch.Tensor:
    return torch.tensor(np.asarray(array)).to(getattr(torch, dtype))


def numpy(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach().resolve_conj()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def grad(f: Function, *xs: torch.Tensor) -> list[np.ndarray]:
    xs = tuple(x.detach().clone().requires_grad_() for x in xs)
    return [numpy(g) for g in torch.autograd.grad(f(*xs), xs, materialize_grads=True)]


def jvp(f: Function, xs: list[Any], tangents: list[Any]) -> np.ndarray:
    return numpy(torch.func.jvp(f, tuple(xs), tuple(tangents))[1])


def hessians(f: Function, x: torch.Tensor) -> dict[str, np.ndarray]:
    return {
        "forward over reverse": numpy(torch.func.jacfwd(torch.func.jacrev(f))(x)),
        "reverse over reverse": numpy(torch.autograd.functional.hessian(f, x)),
    }


def stack(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(tensors)


def sum(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.sum()


def vmap(f: Function) -> Function:
    return torch.func.vmap(f)
