"""Proxies: tensors that share the memory of plain ones and have a place in the autograd graph."""

from collections.abc import Sequence
from typing import Any

import torch

from elementgrad._backends.torch.record.history import (
    Region,
    StorageHistory,
    TensorVersion,
    Write,
    base_of,
    edge_of,
    nodes_between,
    same_edge,
)
from elementgrad._backends.torch.record.intercept import TensorSet
from elementgrad.errors import PlaceError

Tensor = torch.Tensor


class Proxy:
    """The tensor that stands for plain memory in the graph. Nested recordings share it."""

    def __init__(self, tensors: Sequence[Tensor]):
        self.inference = tensors[0].is_inference()
        base = _covering_tensor(tensors)
        base = _copy_storage(base) if self.inference else base
        anchor = torch.zeros((), dtype=base.dtype, device=base.device, requires_grad=True)
        self.tensor: Tensor = _AliasOfMemory.apply(anchor, base)
        self.region = Region.of(self.tensor)
        self.storages: list[ProxiedStorage] = []
        """Its users, while their recordings last."""
        self._narrower: list[Tensor] = []
        """The former values of `tensor`, before it was widened."""

    def is_detached(self, x: Tensor) -> bool:
        """Return True for a tensor in this memory that the user's code cut off from the graph, as by `detach`."""
        return any(x in storage.detached for storage in self.storages)

    def is_outdated(self, x: Tensor) -> bool:
        """Return True for a view of a narrower proxy, which knows nothing of later writes."""
        return bool(self._narrower) and any(x._base is base for base in self._narrower)

    def view_for(self, x: Tensor, time: int) -> Tensor:
        """Return the part of the proxy that lies where `x` lies; widen the proxy if needed."""
        region = Region.of(x)
        if not self.region.covers(region):
            self.widen([x], time)
        if region == self.region:
            return self.tensor
        return self.tensor.as_strided(x.shape, x.stride(), x.storage_offset())

    def widen(self, tensors: Sequence[Tensor], time: int) -> None:
        """Cover these tensors as well from now on."""
        self._narrower.append(self.tensor)
        self.tensor = _WiderView.apply(self.tensor, _covering_tensor([x.detach() for x in (self.tensor, *tensors)]))
        self.region = Region.of(self.tensor)
        for storage in self.storages:
            storage.append_widened(time)

    def cut(self, writes: Sequence[Write]) -> None:
        """Cut the graph at elements that were written without autograd's knowledge."""
        with torch.enable_grad():
            self.tensor = _CutByWrites.apply(self.tensor, writes)


class ProxiedStorage(StorageHistory):
    """History of the storage of recorded tensors, with the tensor that stands for them in the graph.

    A tensor that requires gradients stands for itself; plain ones get a proxy. Several recorded tensors in one storage
    share one that covers them all.
    """

    def __init__(self, tensors: Sequence[Tensor], time: int, detached: TensorSet, outer: Proxy | None = None):
        self.originals = list(tensors)
        self.detached = detached
        """Tensors that the recording saw made without a place in the graph."""
        self.proxy: Proxy | None = None
        self._own = base_of(tensors[0])
        if any(x.requires_grad for x in tensors):
            _require_one_base(tensors)
        else:
            for x in tensors:
                _require_dtype(x, outer.tensor if outer else tensors[0])
            if outer:
                outer.widen(tensors, time)  # so that this recording starts at an edge of its own
            self.proxy = outer or Proxy(tensors)
            self.proxy.storages.append(self)
        super().__init__(TensorVersion(edge_of(self.tensor), Region.of(self.tensor), -1, time))

    @property
    def tensor(self) -> Tensor:
        """The tensor that stands for the recorded ones."""
        return self.proxy.tensor if self.proxy else self._own

    def substitute(self, x: Tensor, time: int) -> Tensor:
        """Return the tensor to compute with in place of `x`, which lies in this storage."""
        if self.proxy is None or (not self.proxy.is_outdated(x) if x.requires_grad else self.proxy.is_detached(x)):
            return x
        if x.dtype != self.proxy.tensor.dtype and not (x.is_floating_point() or x.is_complex()):
            return x
        _require_dtype(x, self.proxy.tensor)
        return self.proxy.view_for(x, time)

    def append_widened(self, time: int) -> None:
        """Append a version for the proxy's new edge and region."""
        edge = edge_of(self.tensor)
        nodes = nodes_between(edge, self.latest.edge)
        self.versions.append(TensorVersion(edge, Region.of(self.tensor), self.latest.order, time, None, nodes))

    def apply_writes(self, writes: Sequence[Write]) -> None:
        """Cut the proxy at writes that autograd did not see, and copy the new values to inference tensors."""
        if self.proxy and same_edge(edge_of(self.tensor), self.latest.edge):
            self.proxy.cut(writes)
        if self.proxy and self.proxy.inference:
            with torch.inference_mode():
                for x in self.originals:
                    x.copy_(self.tensor.detach().as_strided(x.shape, x.stride(), x.storage_offset()))

    def adopt(self, x: Tensor, order: int, time: int) -> None:
        """Replace the proxy by the user's tensor, which requires gradients from now on."""
        self.leave_proxy()
        self.proxy, self._own = None, x
        everything = Write(Region.of(x), "requires_grad_", True)
        self.versions.append(TensorVersion(edge_of(x), Region.of(x), order, time, everything))

    def leave_proxy(self) -> None:
        """Stop being notified when the proxy is widened."""
        if self.proxy and self in self.proxy.storages:
            self.proxy.storages.remove(self)


class _AliasOfMemory(torch.autograd.Function):
    """The same memory as a tensor that is no view, so that it may be written to in place."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[None, None]:
        return None, None  # derivatives are read off here and go no further


class _WiderView(torch.autograd.Function):
    """A tensor over more of the memory that a proxy lies in."""

    @staticmethod
    def forward(ctx: Any, narrow: Tensor, wide: Tensor) -> Tensor:
        ctx.narrow = narrow.shape, narrow.stride(), narrow.storage_offset()
        ctx.wide = wide.shape, wide.stride(), wide.storage_offset()
        return wide.detach()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        (shape, stride, offset), (_, wide_stride, wide_offset) = ctx.narrow, ctx.wide
        first = min(offset, wide_offset)
        buffer = upstream.new_zeros(_storage_end(*ctx.wide) - first)
        buffer.as_strided(upstream.shape, wide_stride, wide_offset - first).copy_(upstream)
        return buffer.as_strided(shape, stride, offset - first).clone(), None


class _CutByWrites(torch.autograd.Function):
    """The same tensor after writes under `no_grad`: what they wrote depends on nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, writes: Sequence[Write]) -> Tensor:
        ctx.writes, ctx.region = writes, Region.of(x)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        region = ctx.region
        for write in ctx.writes:
            mask = torch.from_numpy(write.element_mask(region.addresses, region.itemsize)).to(upstream.device)
            upstream = torch.where(mask, torch.zeros((), dtype=upstream.dtype, device=upstream.device), upstream)
        return upstream, None


def _require_dtype(x: Tensor, like: Tensor) -> None:
    if x.dtype != like.dtype:
        raise PlaceError(  # operators of PyTorch would take a TypeError for their own
            f"a view of dtype {x.dtype} of a recorded tensor of dtype {like.dtype} was made outside the block; make it "
            "inside"
        )


def _require_one_base(tensors: Sequence[Tensor]) -> None:
    bases = [base_of(x) for x in tensors]
    if any(base is not bases[0] for base in bases):
        raise PlaceError(
            "two of the recorded tensors lie in one piece of memory but apart in the graph, as x and x.detach() "
            "do; record one of them, or a clone of the other"
        )


def _covering_tensor(tensors: Sequence[Tensor]) -> Tensor:
    """Return one of the tensors if it covers all others, or else the stretch of memory that they lie in."""
    regions = [Region.of(x) for x in tensors]
    for x, region in zip(tensors, regions, strict=True):
        if region.axes_nest and all(region.covers(other) for other in regions):
            return x
    start = min(x.storage_offset() for x in tensors)
    stop = max(_storage_end(x.shape, x.stride(), x.storage_offset()) for x in tensors)
    return tensors[0].as_strided((stop - start,), (1,), start)


def _copy_storage(x: Tensor) -> Tensor:
    """Return the same elements at the same offsets of a storage of its own."""
    with torch.inference_mode(False):
        copy = torch.empty(0, dtype=x.dtype, device=x.device)
        return copy.set_(x.untyped_storage().clone(), x.storage_offset(), x.shape, x.stride())  # type: ignore[call-overload]


def _storage_end(shape: Sequence[int], stride: Sequence[int], offset: Any) -> int:
    """Return the offset behind the last element."""
    if 0 in shape:
        return int(offset)
    return int(offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1)
