"""Where a parameter is kept, and how its elements are read and written there: here as a whole, or as a shard of it."""

from typing import Any, ClassVar

import torch

from elementgrad.backends.torch.training.casting import cast

Tensor = torch.Tensor


class Home:
    """A parameter that this process has all of."""

    spread: ClassVar[bool] = False
    """Whether other processes have some of it."""

    def __init__(self, tensor: Tensor):
        self._tensor = tensor

    @property
    def tensor(self) -> Any:
        """The parameter, as it is named, saved and loaded."""
        return self._tensor

    @property
    def whole(self) -> Tensor | None:
        """All of it, to compute with."""
        return self._tensor

    def stands(self, tensor: Any) -> bool:
        """Whether a tensor stands for this parameter in its modules."""
        return tensor is self._tensor

    def take(self, positions: Tensor) -> Tensor:
        """Elements by their positions in C order, however it lies in memory."""
        tensor = self._tensor.detach()
        if tensor.is_contiguous():
            return tensor.view(-1).index_select(0, positions)
        return tensor[torch.unravel_index(positions, tensor.shape)]

    def put(self, positions: Tensor, values: Tensor) -> None:
        """Write elements by their positions in C order."""
        tensor = self._tensor.detach()  # of the same version: whoever kept the parameter to go back hears of the write
        values = cast(values, tensor.dtype)
        if tensor.is_contiguous():
            tensor.view(-1).index_copy_(0, positions, values)
        else:
            tensor.index_put_(torch.unravel_index(positions, tensor.shape), values)

    def kept(self, positions: Tensor, values: Tensor) -> bool:
        """Whether elements are still those that were written last, where writes of others leave no version behind."""
        return True

    def differs(self, loaded: Tensor, positions: Tensor) -> bool:
        """Whether another tensor of its shape differs outside of some positions."""
        other = (loaded.to(self._tensor) != self._tensor).reshape(-1)
        other[positions] = False
        return bool(other.any())
