"""Versions of the tensors in a storage: each write in place makes one, with its own edge in the autograd graph.

An element is known by its address, the bytes from the start of its storage. `Region` has the addresses of a strided
tensor, `Write` the ones that an op wrote, and `StorageHistory` finds the version of an element that a request means.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from elementgrad._backends.torch._compat import PythonNode
from elementgrad.errors import PlaceError

Tensor = torch.Tensor


@dataclass(frozen=True)
class Region:
    """Addresses of the elements of a strided tensor. Offset and strides are in bytes."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int

    @classmethod
    def of(cls, x: Tensor) -> "Region":
        """Return the region of a tensor."""
        item = x.element_size()
        return cls(int(x.storage_offset()) * item, tuple(x.shape), tuple([step * item for step in x.stride()]), item)

    @cached_property
    def addresses(self) -> np.ndarray:
        """Address of each element, in an array of the tensor's shape."""
        addresses = np.full((1,) * len(self.size), self.offset, np.int64)
        for axis, (size, step) in enumerate(zip(self.size, self.stride, strict=True)):
            line = np.arange(size, dtype=np.int64) * step
            addresses = addresses + line.reshape(-1, *(1,) * (len(self.size) - axis - 1))
        return np.broadcast_to(addresses, self.size)

    def addresses_at(self, positions: np.ndarray) -> np.ndarray:
        """Return the addresses at positions of the flattened tensor, without computing all."""
        addresses = np.full(np.shape(positions), self.offset, np.int64)
        rest = np.asarray(positions, np.int64)
        for size, step in zip(reversed(self.size), reversed(self.stride), strict=True):
            addresses += rest % max(size, 1) * step
            rest = rest // max(size, 1)
        return addresses

    @cached_property
    def axes_nest(self) -> bool:
        """True if no axis reaches into the next: elements share no address, and an address gives the coordinates."""
        extent = self.itemsize
        for step, size in sorted(zip(self.stride, self.size, strict=True)):
            if size > 1:
                if step < extent:
                    return False
                extent = step * size
        return True

    def locate(self, addresses: np.ndarray) -> np.ndarray:
        """Return the position of each address in the flattened tensor, -1 for one that it does not cover."""
        addresses = np.asarray(addresses, np.int64)
        if 0 in self.size:
            return np.full(addresses.shape, -1, np.int64)
        if not self.axes_nest:
            return self._search(addresses)
        behind = [math.prod(self.size[axis + 1 :]) for axis in range(len(self.size))]
        axes = sorted(zip(self.stride, self.size, behind, strict=True), key=lambda axis: -axis[0])
        rest = addresses - self.offset
        positions, inside = np.zeros(addresses.shape, np.int64), rest >= 0
        for step, size, weight in axes:
            if size > 1:
                coordinate = rest // step
                inside &= coordinate < size
                positions += coordinate * weight
                rest = rest - coordinate * step
        return np.where(inside & (rest == 0), positions, -1)

    def _search(self, addresses: np.ndarray) -> np.ndarray:
        own, positions = np.unique(self.addresses.reshape(-1), return_index=True)
        nearest = np.minimum(np.searchsorted(own, addresses), len(own) - 1)
        return np.where(own[nearest] == addresses, positions[nearest], -1)

    def covers(self, other: "Region") -> bool:
        """Return True if every element of `other` is one of this region."""
        return other.itemsize == self.itemsize and bool((self.locate(other.addresses) >= 0).all())

    def overlap_mask(self, addresses: np.ndarray, itemsize: int) -> np.ndarray:
        """Return which elements of this itemsize at these addresses share a byte with the region."""
        if itemsize == self.itemsize:
            return self.locate(addresses) >= 0
        if itemsize > self.itemsize:
            parts = [self.locate(addresses + part) >= 0 for part in range(0, itemsize, self.itemsize)]
            return np.logical_or.reduce(parts)
        whole = (addresses - self.offset) // self.itemsize * self.itemsize + self.offset
        return self.locate(whole) >= 0


@dataclass(frozen=True)
class Write:
    """One op's write to a storage."""

    region: Region
    """Region of the tensor that the op was given to write to."""
    operation: str
    overwrites: bool
    """True if the new values do not depend on the old ones at the same place."""
    mark: Callable[[Tensor], Tensor] | None = None
    """Marks the written elements in zeros of the tensor's shape; None if all were written."""

    @cached_property
    def _marks(self) -> np.ndarray:
        assert self.mark is not None
        return self.mark(torch.zeros(self.region.size)).reshape(-1).numpy() != 0

    def element_mask(self, addresses: np.ndarray, itemsize: int) -> np.ndarray:
        """Return which elements at these addresses were written."""
        if self.mark is None:
            return self.region.overlap_mask(addresses, itemsize)
        positions = self.region.locate(addresses)
        return (positions >= 0) & self._marks[np.maximum(positions, 0)] if self._marks.size else positions >= 0


@dataclass(frozen=True)
class TensorVersion:
    """A tensor as it was after a write, or at first."""

    edge: GradientEdge | None
    """Graph edge at which its derivative arrives; None if it has none."""
    region: Region
    """The elements that this derivative is for."""
    order: int
    """Index among all writes of the recording."""
    time: int
    """Autograd's sequence number: what was computed from it has this number or a higher one."""
    write: Write | None = None
    chain: tuple[Any, ...] = ()
    """The graph nodes from it to the version before."""

    def follows(self, orders: np.ndarray, times: np.ndarray) -> np.ndarray:
        """Return which writes came before: by the order of its own write, or by time if an op made the tensor."""
        return orders < self.order if self.write else times <= self.time


class StorageHistory:
    """Versions of the tensors in one storage, in time."""

    def __init__(self, first: TensorVersion):
        self.versions = [first]

    @property
    def latest(self) -> TensorVersion:
        return self.versions[-1]

    def write_mask(self, index: int, addresses: np.ndarray, itemsize: int) -> np.ndarray:
        """Return which elements the version at `index` wrote."""
        write = self.versions[index].write
        return np.zeros(addresses.shape, bool) if write is None else write.element_mask(addresses, itemsize)

    def last_write(self, addresses: np.ndarray, itemsize: int, count: int | None = None) -> np.ndarray:
        """Return for each element the last of the first `count` versions that wrote it; its first version if none."""
        last = self._first_versions(addresses)
        missing = np.ones(addresses.shape, bool)
        for index in range((count or len(self.versions)) - 1, 0, -1):
            written = missing & self.write_mask(index, addresses, itemsize)
            last[written] = index
            missing &= ~written
            if not missing.any():
                break
        return last

    def _first_versions(self, addresses: np.ndarray) -> np.ndarray:
        """Return for each element the first version that has it, since a proxy may become wider."""
        first = np.zeros(addresses.shape, np.int64)
        missing = self.versions[0].region.locate(addresses) < 0
        for index, version in enumerate(self.versions if missing.any() else ()):
            if version.region != self.versions[index - 1].region:
                covered = missing & (version.region.locate(addresses) >= 0)
                first[covered] = index
                missing &= ~covered
        return first

    def next_write(self, starts: np.ndarray, addresses: np.ndarray, itemsize: int) -> np.ndarray:
        """Return for each element the first version after its start that wrote it; the number of versions if none."""
        ends = np.full(addresses.shape, len(self.versions), np.int64)
        for index in range(len(self.versions) - 1, int(starts.min(initial=0)), -1):
            ends[self.write_mask(index, addresses, itemsize) & (index > starts)] = index
        return ends

    def nth_write(self, addresses: np.ndarray, itemsize: int, write: int) -> np.ndarray:
        """Return for each element the version of its `write`-th write, from the end if negative."""
        masks = [self.write_mask(index, addresses, itemsize) for index in range(len(self.versions))]
        counts = np.cumsum(masks, 0)
        wanted = counts[-1] + write if write < 0 else np.full(addresses.shape, write)
        if ((wanted < 0) | (wanted >= counts[-1])).any():
            fewest = int(counts[-1].min())
            fits = f"give one of {-fewest} to {fewest - 1}, or leave it out" if fewest else "leave it out"
            times = "once" if fewest == 1 else f"{fewest} times"
            raise PlaceError(f"write={write} of an element that was written {times} in the recording; {fits}")
        return (counts > wanted).argmax(0)

    def count_before(self, other: "StorageHistory", indices: np.ndarray) -> np.ndarray:
        """Return how many versions there were when the versions of `other` at these indices were made."""
        orders = np.array([version.order for version in self.versions[1:]])
        times = np.array([version.time for version in self.versions[1:]])
        distinct, inverse = np.unique(indices, return_inverse=True)
        counts = [1 + int(other.versions[index].follows(orders, times).sum()) for index in distinct]
        return np.array(counts, np.int64)[inverse.reshape(-1)]


@dataclass(frozen=True)
class TrackedTensor:
    """A tensor that a request names, within the history of its storage."""

    history: StorageHistory
    region: Region

    def addresses(self, positions: np.ndarray) -> np.ndarray:
        """Return the addresses of the elements at these positions."""
        return self.region.addresses_at(positions)

    def version_indices(self, positions: np.ndarray, write: int | None, count: int | None = None) -> np.ndarray:
        """Return each element's version: that of the chosen write, or of the last among the first `count` versions."""
        addresses, itemsize = self.addresses(positions), self.region.itemsize
        if write is None:
            return self.history.last_write(addresses, itemsize, count)
        return self.history.nth_write(addresses, itemsize, write)


def base_of(x: Tensor) -> Tensor:
    """Return the tensor that `x` is a view of, or `x` itself."""
    return x._base if x._is_view() and x._base is not None else x


def edge_of(x: Tensor) -> GradientEdge | None:
    """Return the edge at which the derivative of a tensor arrives; None if it has none."""
    if not x.requires_grad:
        return None
    node = x.grad_fn
    if node is not None and not isinstance(node, PythonNode):
        return GradientEdge(node, x.output_nr)
    # A leaf shows its edge only by a view of it, and a Python node is kept alive only by an edge that PyTorch made.
    with torch.inference_mode(False), torch.enable_grad():
        return get_gradient_edge(x)


def same_edge(left: GradientEdge | None, right: GradientEdge | None) -> bool:
    """Return True if two edges are one."""
    if left is None or right is None:
        return left is right
    return left.node is right.node and left.output_nr == right.output_nr


def nodes_between(edge: GradientEdge | None, before: GradientEdge | None) -> tuple[Any, ...]:
    """Return the nodes by which a version was made of the one before: their first slots pass on what they keep."""
    nodes: list[Any] = []
    node, output = (edge.node, edge.output_nr) if edge is not None else (None, 0)
    while node is not None and before is not None and (node, output) != (before.node, before.output_nr):
        nodes.append(node)
        node, output = node.next_functions[0] if node.next_functions else (None, 0)
    return tuple(nodes) if node is not None else ()


def operation_name(node: Any, write: Write | None = None) -> str:
    """Return the name of the op that left a node in the graph: MulBackward0 is mul."""
    function = getattr(node, "_forward_cls", None)
    if function is not None:
        return str(function.__name__)
    if write is not None:
        return write.operation
    name = node.name().rstrip("0123456789").removesuffix("Backward").lstrip("_")
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")
