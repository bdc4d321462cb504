"""Which elements of a storage a strided tensor covers, and where each of them is in it.

The versions that a tensor goes through when it is written to in place, and which of them a question is about.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from elementgrad.errors import PlaceError

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


@dataclass(frozen=True)
class TensorVersion:
    """A tensor as it stood after a write, or at first."""

    edge: GradientEdge | None
    """Where its derivative arrives in the graph; None if it has none."""
    region: Region
    """The elements that this derivative is for."""
    order: int
    """Its number among all writes of the recording."""
    time: int
    """What PyTorch's count of operations stood at: what was computed from it has this number or a higher one."""
    write: Write | None = None
    chain: tuple[Any, ...] = ()
    """The nodes that lead from it to the version before."""

    def after(self, orders: np.ndarray, times: np.ndarray) -> np.ndarray:
        """Which writes it came after: by its own, or by the time if it is a tensor that an operation made."""
        return orders < self.order if self.write else times <= self.time


class StorageHistory:
    """The versions of the tensors that lie in one storage."""

    def __init__(self, first: TensorVersion):
        self.versions = [first]

    @property
    def now(self) -> TensorVersion:
        """As it stands now."""
        return self.versions[-1]

    def hits(self, number: int, addresses: np.ndarray, itemsize: int) -> np.ndarray:
        """Which elements a version wrote."""
        write = self.versions[number].write
        return np.zeros(addresses.shape, bool) if write is None else write.hits(addresses, itemsize)

    def last(self, addresses: np.ndarray, itemsize: int, count: int | None = None) -> np.ndarray:
        """For each element the last of the first `count` versions that wrote it; where it begins, if none did."""
        last = self._begin(addresses)
        missing = np.ones(addresses.shape, bool)
        for number in range((count or len(self.versions)) - 1, 0, -1):
            found = missing & self.hits(number, addresses, itemsize)
            last[found] = number
            missing &= ~found
            if not missing.any():
                break
        return last

    def _begin(self, addresses: np.ndarray) -> np.ndarray:
        """For each element the first version that has it: a ground may become wider."""
        begin = np.zeros(addresses.shape, np.int64)
        missing = self.versions[0].region.locate(addresses) < 0
        for number, version in enumerate(self.versions if missing.any() else ()):
            if version.region != self.versions[number - 1].region:
                found = missing & (version.region.locate(addresses) >= 0)
                begin[found] = number
                missing &= ~found
        return begin

    def after(self, starts: np.ndarray, addresses: np.ndarray, itemsize: int) -> np.ndarray:
        """For each element the first version after its start that wrote it; the number of versions if none did."""
        ends = np.full(addresses.shape, len(self.versions), np.int64)
        for number in range(len(self.versions) - 1, int(starts.min(initial=0)), -1):
            ends[self.hits(number, addresses, itemsize) & (number > starts)] = number
        return ends

    def nth(self, addresses: np.ndarray, itemsize: int, write: int) -> np.ndarray:
        """For each element the version of its `write`-th write, from the end if negative."""
        table = [self.hits(number, addresses, itemsize) for number in range(len(self.versions))]
        counts = np.cumsum(table, 0)
        wanted = counts[-1] + write if write < 0 else np.full(addresses.shape, write)
        if ((wanted < 0) | (wanted >= counts[-1])).any():
            few = int(counts[-1].min())
            fits = f"give one of {-few} to {few - 1}, or leave it out" if few else "leave it out"
            times = "once" if few == 1 else f"{few} times"
            raise PlaceError(f"write={write} of an element that was written {times} in the recording; {fits}")
        return (counts > wanted).argmax(0)

    def before(self, targets: "StorageHistory", numbers: np.ndarray) -> np.ndarray:
        """How many versions there were when elements of a track came to be, each by its version of that number."""
        orders = np.array([version.order for version in self.versions[1:]])
        times = np.array([version.time for version in self.versions[1:]])
        distinct, which = np.unique(numbers, return_inverse=True)
        counts = [1 + int(targets.versions[number].after(orders, times).sum()) for number in distinct]
        return np.array(counts, np.int64)[which.reshape(-1)]


@dataclass(frozen=True)
class TrackedTensor:
    """A tensor that somebody named: the elements of a track that it is made of."""

    track: StorageHistory
    region: Region
    """Where its elements lie."""

    def addresses(self, positions: np.ndarray) -> np.ndarray:
        """Where the elements at these positions lie."""
        return self.region.at(positions)

    def versions(self, positions: np.ndarray, write: int | None, count: int | None = None) -> np.ndarray:
        """The version that each element is asked about at: the chosen write, or the last among the first `count`."""
        addresses, itemsize = self.addresses(positions), self.region.itemsize
        if write is None:
            return self.track.last(addresses, itemsize, count)
        return self.track.nth(addresses, itemsize, write)


def edge_of(x: Tensor) -> GradientEdge | None:
    """Where the derivative of a tensor arrives, if it has one."""
    if not x.requires_grad:
        return None
    node = x.grad_fn
    if node is not None and not isinstance(node, torch._C._FunctionBase):
        return GradientEdge(node, x.output_nr)
    # A leaf tells where its derivative arrives only by a view of it; a node of Python's is owned only by way of one.
    with torch.inference_mode(False), torch.enable_grad():
        return get_gradient_edge(x)


def same(one: GradientEdge | None, other: GradientEdge | None) -> bool:
    """Whether two edges are one."""
    if one is None or other is None:
        return one is other
    return one.node is other.node and one.output_nr == other.output_nr


def chain(edge: GradientEdge | None, before: GradientEdge | None) -> tuple[Any, ...]:
    """The nodes by which a version was made of the one before: their first slots hand on what they do not write."""
    nodes: list[Any] = []
    node, number = (edge.node, edge.output_nr) if edge is not None else (None, 0)
    while node is not None and before is not None and (node, number) != (before.node, before.output_nr):
        nodes.append(node)
        node, number = node.next_functions[0] if node.next_functions else (None, 0)
    return tuple(nodes) if node is not None else ()


def named(node: Any, write: Write | None = None) -> str:
    """What an operation is called, from the node that it left in the graph: MulBackward0 is mul."""
    made_by = getattr(node, "_forward_cls", None)
    if made_by is not None:
        return str(made_by.__name__)
    if write is not None:
        return write.operation
    name = node.name().rstrip("0123456789").removesuffix("Backward").lstrip("_")
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")
