"""The learned choice of an element: which one is itself a parameter."""

from typing import Any

from elementgrad import backends
from elementgrad.backends import Backend
from elementgrad.edit import require_gradient
from elementgrad.errors import BroadcastError, DtypeError, FrameworkError, SelectionError

Tensor = Any


def choose(x: Tensor, logits: Tensor, axis: int = -1, hard: bool = False) -> Tensor:
    """Choose one element of x along an axis, with gradients to x and to the logits that choose.

    Soft, the result is the mean of x weighted by the softmax of the logits. With `hard=True` it is exactly the element
    whose logit is largest, and its derivatives are those of the soft choice (the straight-through estimator).

    The logits are one per element of the axis, or anything that broadcasts to x with that axis at full size.

    >>> import torch, elementgrad as eg
    >>> x, logits = torch.tensor([10.0, 30.0]), torch.zeros(2, requires_grad=True)
    >>> eg.choose(x, logits)
    tensor(20., grad_fn=<...>)
    >>> eg.choose(x, logits, hard=True)
    tensor(10., grad_fn=<...>)
    >>> torch.autograd.grad(eg.choose(x, logits, hard=True), logits)[0]
    tensor([-5., 5.])
    """
    backend = backends.find(x)
    if backends.owner(logits) is not backend:
        raise FrameworkError(
            f"x is {backend.name}'s and logits are {type(logits).__name__}; give logits of {backend.name}"
        )
    require_gradient(backend, x, "choose")
    require_gradient(backend, logits, "choose")
    if backend.kind(logits) == "c":
        raise DtypeError(f"logits must be real to have a largest one and {logits.dtype} is not; give floating logits")
    axis, logits = _align(backend, backend.shape(x), logits, axis)
    soft = backend.soft_choice(x, logits, axis)
    return backend.graft(backend.hard_choice(x, logits, axis), soft) if hard else soft


def _align(backend: Backend, shape: tuple[Any, ...], logits: Tensor, axis: int) -> tuple[int, Tensor]:
    """The axis counted from the front, and the logits with as many axes as x."""
    given = tuple(backend.shape(logits))
    if not -len(shape) <= axis < len(shape):
        raise SelectionError(f"axis {axis} is out of range for a tensor of {len(shape)} axes")
    axis %= len(shape)
    aligned = (*given, *(1,) * (len(shape) - axis - 1)) if len(given) == 1 else given
    if len(aligned) < len(shape):
        aligned = (1,) * (len(shape) - len(aligned)) + aligned
    fits = len(aligned) == len(shape) and all(a in (1, b) or b is None for a, b in zip(aligned, shape, strict=True))
    if not fits or aligned[axis] != shape[axis]:
        raise BroadcastError(f"logits of shape {given} do not fit x of shape {tuple(shape)} along axis {axis}")
    return axis, logits if aligned == given else backend.reshape(logits, aligned)
