"""Where the elements of a parameter lie in memory: whether one number is several of them, or of two parameters."""

import torch

from elementgrad.backends.torch.training.sharding import is_spread

Tensor = torch.Tensor


def repeats(tensor: Tensor) -> bool:
    """Return whether one number in memory is several elements of a tensor."""
    if not _lies(tensor) or tensor.is_contiguous() or not tensor.numel():
        return False
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return True
    # Each axis steps over all that the narrower ones span, as in any permutation of a contiguous tensor.
    span = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= span:
                return len(_numbers(tensor).unique()) < tensor.numel()
            span += (size - 1) * stride
    return False


def overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have a number in common; one that is the other does not count."""
    if one is other or not (_lies(one) and _lies(other) and one.numel() and other.numel()):
        return False
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    (first, last), (begin, end) = _span(one), _span(other)
    if last < begin or end < first:  # as weights of recurrent layers, which lie one after another
        return False
    if one.dtype.itemsize != other.dtype.itemsize or (one.is_contiguous() and other.is_contiguous()):
        return True
    return bool(torch.isin(_numbers(one), _numbers(other)).any())


def _lies(tensor: Tensor) -> bool:
    """Whether it has a plain memory of its own or of another tensor's."""
    lazy = isinstance(tensor, torch.nn.parameter.UninitializedParameter)
    return not lazy and not is_spread(tensor) and tensor.layout is torch.strided and type(tensor.data) is Tensor


def _span(tensor: Tensor) -> tuple[int, int]:
    """The first and the last byte."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    width, start = tensor.dtype.itemsize, int(tensor.storage_offset())
    return start * width, (start + steps + 1) * width - 1


def _numbers(tensor: Tensor) -> Tensor:
    """Which numbers of its storage the elements of a tensor are."""
    every = torch.arange(tensor.untyped_storage().nbytes() // tensor.dtype.itemsize)
    return every.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).reshape(-1)
