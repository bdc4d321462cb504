"""Memory of results: PyTorch hands out derivatives that are not stored anywhere, or that somebody else holds too.

A derivative may be a tensor of zeros without memory, a number expanded to a shape, a conjugate or negative that is only
marked as such, or a small part of a large tensor. Such a result cannot be written to, converted to NumPy, or saved at
its own size. It may also be the seed of the sweep, the derivative for another input (`x + y` passes one tensor on to
both), or a tensor that a backward of the user's own has saved and returns: writing to it would change the user's
numbers, or those of the next read.
"""

import torch
from torch._C import _storage_Use_Count as use_count
from torch._C._functorch import is_functorch_wrapped_tensor

Tensor = torch.Tensor
ALONE = 2
"""The uses of a storage that one tensor holds: the tensor's own, and the one through which we look at it."""


def materialize(x: Tensor) -> Tensor:
    """Return x, copied unless it holds all of its numbers itself and no others."""
    if _is_opaque(x):
        return x
    if x._is_zerotensor() or x.is_conj() or x.is_neg():
        return x.clone()
    if x.untyped_storage().nbytes() != x.numel() * x.element_size() or _is_expanded(x):
        return x.clone(memory_format=torch.contiguous_format)
    return x


def unshare(derivatives: list[Tensor | None], create_graph: bool) -> list[Tensor | None]:
    """Copy those of the derivatives in a list whose memory is held by anything else as well, and return the list.

    With `create_graph` each is copied, since what it was computed from may hold it.
    """
    for i in range(len(derivatives)):
        x = derivatives[i]
        if x is None:
            continue
        # Another tensor for the same memory takes its place: the first is gone then, unless something else holds it.
        derivatives[i] = x = x.clone() if create_graph else x.detach()
        if create_graph or _is_opaque(x) or x._is_zerotensor():
            continue
        if use_count(x.untyped_storage()._cdata) > ALONE:
            derivatives[i] = x.clone()
    return derivatives


def _is_opaque(x: Tensor) -> bool:
    """Return whether there is no memory to look at: in a transform of the user's, or in a class of its own."""
    return type(x) is not Tensor or is_functorch_wrapped_tensor(x) or torch._is_functional_tensor(x)


def _is_expanded(x: Tensor) -> bool:
    return 0 in x.stride() and any(not step and size > 1 for step, size in zip(x.stride(), x.shape, strict=True))
