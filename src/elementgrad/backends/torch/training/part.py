"""The elements of one place in a PyTorch model: the leaf that has their values, where they are, what they were."""

from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from elementgrad.backends import training
from elementgrad.backends.torch.training.casting import cast

Tensor = torch.Tensor
HALVES = (torch.float16, torch.bfloat16)
_leaves: WeakValueDictionary[int, "Part"] = WeakValueDictionary()


class Part(training.Part):
    """Elements of one place: a leaf that an optimizer may have, where they are, and what they were."""

    def __init__(
        self, tensor: Tensor, positions: np.ndarray, leaf: Tensor, originals: Tensor, dtype: torch.dtype | None = None
    ):
        self.tensor = tensor
        self.positions = positions
        self.originals = originals
        self.dtype = dtype
        self.mark = None
        self.found = leaf
        self.key = ""
        self.number, self.hook = 0, None  # of those whose gradients processes exchange
        self.weight: Any = None
        """The parameter with all of its parts, while they train."""
        self.become(leaf)

    def become(self, leaf: Tensor) -> None:
        """Have other values."""
        self.leaf = leaf
        _leaves[id(leaf)] = self

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)  # a copy of a model, or one from a file: its leaves are others
        _leaves[id(self.leaf)] = self

    def rebase(self) -> None:
        """Take the values there are for those that there were: another model has been loaded."""
        self.begin_from(cast(self.leaf.detach(), self.tensor.dtype).clone())

    def begin_from(self, originals: Tensor) -> None:
        """Have other originals, as of another model or in another dtype."""
        self.originals = originals
        if self.mark is not None:
            self.mark.bits = bits(originals)[1]

    def kept_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the leaf for a parameter of a dtype: small steps are lost in half precision."""
        return self.dtype or (torch.float32 if dtype in HALVES else dtype)


def part_of(leaf: Tensor) -> Part | None:
    """The part whose leaf this is."""
    part = _leaves.get(id(leaf))
    return part if part is not None and part.leaf is leaf else None


def bits(tensor: Tensor) -> tuple[str, np.ndarray]:
    """The dtype of a tensor, and the bytes of its elements."""
    held = tensor.detach().cpu().contiguous().view(-1)
    bytes_ = held.view(torch.uint8).numpy().reshape(len(held), held.element_size())
    return str(tensor.dtype).removeprefix("torch."), bytes_
