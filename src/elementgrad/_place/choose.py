"""`eg.choose`: the learned choice of one element along an axis."""

from operator import index as as_int
from typing import Any

from elementgrad._backends import registry
from elementgrad._backends.base import Backend
from elementgrad._backends.source_location import spelled_as
from elementgrad._place.edit import require_gradient
from elementgrad.errors import BroadcastError, DtypeError, FrameworkError, SelectionError

Tensor = Any


@spelled_as("eg.choose")
def choose(x: Tensor, logits: Tensor, axis: int = -1, hard: bool = False) -> Tensor:
    """Choose one element of x along an axis, with gradients for x and for the logits that choose.

    Args:
        x: the tensor to choose from.
        logits: one per element of the axis, or anything that broadcasts to x with that axis at full size.
        axis: the axis to choose along.
        hard: False for the mean of x weighted by the softmax of the logits. True for exactly the element whose logit
            is largest, with the derivatives of that mean (the straight-through estimator).

    Returns:
        A tensor of x's shape without the axis.

    >>> import torch, elementgrad as eg
    >>> x, logits = torch.tensor([10.0, 30.0]), torch.zeros(2, requires_grad=True)
    >>> eg.choose(x, logits)
    tensor(20., grad_fn=<...>)
    >>> eg.choose(x, logits, hard=True)
    tensor(10., grad_fn=<...>)
    >>> torch.autograd.grad(eg.choose(x, logits, hard=True), logits)[0]
    tensor([-5., 5.])
    """
    backend = registry.require_backend(x)
    if registry.backend_of(logits) is not backend:
        raise FrameworkError(
            f"x is {backend.name}'s and logits are {type(logits).__name__}; give logits of {backend.name}"
        )
    require_gradient(backend, x, "choose")
    require_gradient(backend, logits, "choose")
    if backend.kind(logits) == "c":
        raise DtypeError(f"logits must be real to have a largest one and {logits.dtype} is not; give floating logits")
    axis, logits = _align(backend, backend.shape(x), logits, axis)
    soft = backend.edit.soft_choice(x, logits, axis)
    return backend.edit.straight_through(backend.edit.hard_choice(x, logits, axis), soft) if hard else soft


def _align(backend: Backend, shape: tuple[Any, ...], logits: Tensor, axis: int) -> tuple[int, Tensor]:
    """Return the axis counted from the front, and the logits with as many axes as x."""
    logits_shape = tuple(backend.shape(logits))
    try:
        axis = as_int(axis)
    except TypeError:
        raise SelectionError(f"axis {axis!r} is not an int; give one from {-len(shape)} to {len(shape) - 1}") from None
    if not -len(shape) <= axis < len(shape):
        raise SelectionError(f"axis {axis} is out of range for a tensor of {len(shape)} axes")
    axis %= len(shape)
    if shape[axis] == 0:
        raise SelectionError(f"axis {axis} of x is empty, and nothing can be chosen from it")
    behind = len(shape) - axis - 1 if len(logits_shape) == 1 else 0
    before = len(shape) - len(logits_shape) - behind
    aligned = (1,) * before + logits_shape + (1,) * behind
    fits = len(aligned) == len(shape) and all(
        a in (1, b, None) or b is None for a, b in zip(aligned, shape, strict=True)
    )
    if not fits or (aligned[axis] != shape[axis] and None not in (aligned[axis], shape[axis])):
        raise BroadcastError(
            f"logits of shape {logits_shape} do not fit x of shape {tuple(shape)} along axis {axis}; "
            "give one per element"
        )
    if aligned == logits_shape:
        return axis, logits
    return axis, logits[(None,) * before + (..., *(None,) * behind)]
