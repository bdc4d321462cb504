"""Which elements of a storage a strided tensor covers, and where each of them is in it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

Tensor = torch.Tensor


@dataclass(frozen=True)
class Region:
    """The elements of a strided tensor, by their addresses: bytes from the start of its storage."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int

    @classmethod
    def of(cls, x: Tensor) -> "Region":
        """That of a tensor."""
        item = x.element_size()
        return cls(int(x.storage_offset()) * item, tuple(x.shape), tuple([step * item for step in x.stride()]), item)

    @cached_property
    def addresses(self) -> np.ndarray:
        """The address of each element, in an array of the tensor's shape."""
        addresses = np.full((1,) * len(self.size), self.offset, np.int64)
        for axis, (size, step) in enumerate(zip(self.size, self.stride, strict=True)):
            line = np.arange(size, dtype=np.int64) * step
            addresses = addresses + line.reshape(-1, *(1,) * (len(self.size) - axis - 1))
        return np.broadcast_to(addresses, self.size)

    def at(self, positions: np.ndarray) -> np.ndarray:
        """The addresses of the elements at these positions of the flattened tensor, without making all."""
        addresses = np.full(np.shape(positions), self.offset, np.int64)
        rest = np.asarray(positions, np.int64)
        for size, step in zip(reversed(self.size), reversed(self.stride), strict=True):
            addresses += rest % max(size, 1) * step
            rest = rest // max(size, 1)
        return addresses

    @cached_property
    def apart(self) -> bool:
        """Whether the axes nest, so that no two elements share an address and each tells its coordinates."""
        reach = self.itemsize
        for step, size in sorted(zip(self.stride, self.size, strict=True)):
            if size > 1:
                if step < reach:
                    return False
                reach = step * size
        return True

    def locate(self, addresses: np.ndarray) -> np.ndarray:
        """The position of each address in the flattened tensor, -1 for one that is not covered."""
        addresses = np.asarray(addresses, np.int64)
        if 0 in self.size:
            return np.full(addresses.shape, -1, np.int64)
        if not self.apart:
            return self._search(addresses)
        behind = [math.prod(self.size[axis + 1 :]) for axis in range(len(self.size))]
        axes = sorted(zip(self.stride, self.size, behind, strict=True), key=lambda axis: -axis[0])
        rest = addresses - self.offset
        positions, inside = np.zeros(addresses.shape, np.int64), rest >= 0
        for step, size, weight in axes:
            if size > 1:
                along = rest // step
                inside &= along < size
                positions += along * weight
                rest = rest - along * step
        return np.where(inside & (rest == 0), positions, -1)

    def covers(self, other: "Region") -> bool:
        """Whether every element of another region is one of this."""
        return other.itemsize == self.itemsize and bool((self.locate(other.addresses) >= 0).all())

    def touched(self, addresses: np.ndarray, itemsize: int) -> np.ndarray:
        """Which of the elements of this size at these addresses share a byte with the region."""
        if itemsize == self.itemsize:
            return self.locate(addresses) >= 0
        if itemsize > self.itemsize:
            parts = [self.locate(addresses + part) >= 0 for part in range(0, itemsize, self.itemsize)]
            return np.logical_or.reduce(parts)
        whole = (addresses - self.offset) // self.itemsize * self.itemsize + self.offset
        return self.locate(whole) >= 0

    def _search(self, addresses: np.ndarray) -> np.ndarray:
        own, positions = np.unique(self.addresses.reshape(-1), return_index=True)
        found = np.minimum(np.searchsorted(own, addresses), len(own) - 1)
        return np.where(own[found] == addresses, positions[found], -1)


@dataclass(frozen=True)
class Write:
    """What one operation wrote to a storage."""

    region: Region
    """The tensor that it was given to write to."""
    operation: str
    overwrites: bool
    """Whether the new values do not depend on the old ones at the same place."""
    mark: Callable[[Tensor], Tensor] | None = None
    """Where only some elements were written: marks them in a tensor of zeros of that shape."""

    @cached_property
    def _marked(self) -> np.ndarray:
        assert self.mark is not None
        return self.mark(torch.zeros(self.region.size)).reshape(-1).numpy() != 0

    def hits(self, addresses: np.ndarray, itemsize: int) -> np.ndarray:
        """Which of the elements at these addresses were written."""
        if self.mark is None:
            return self.region.touched(addresses, itemsize)
        found = self.region.locate(addresses)
        return (found >= 0) & self._marked[np.maximum(found, 0)] if self._marked.size else found >= 0
