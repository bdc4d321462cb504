"""Stand-ins for plain tensors: the same memory with a place in the graph, so that what is computed has derivatives."""

from collections.abc import Sequence
from typing import Any

import torch

from elementgrad.backends.torch.regions import Region, Write
from elementgrad.backends.torch.versions import Track, Version, chain, edge_of
from elementgrad.errors import PlaceError

Tensor = torch.Tensor


class _Alias(torch.autograd.Function):
    """The same memory as a tensor that is no view of another, so that it may be written to in place."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[None, None]:
        return None, None  # derivatives are asked for here and go no further


class _Wider(torch.autograd.Function):
    """More of the memory that a stand-in lies in."""

    @staticmethod
    def forward(ctx: Any, narrow: Tensor, wide: Tensor) -> Tensor:
        ctx.narrow = narrow.shape, narrow.stride(), narrow.storage_offset()
        ctx.wide = wide.shape, wide.stride(), wide.storage_offset()
        return wide.detach()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        (shape, stride, offset), (_, wide_stride, wide_offset) = ctx.narrow, ctx.wide
        first = min(offset, wide_offset)
        room = upstream.new_zeros(_extent(ctx.wide) - first)
        room.as_strided(upstream.shape, wide_stride, wide_offset - first).copy_(upstream)
        return room.as_strided(shape, stride, offset - first).clone(), None


class _Cut(torch.autograd.Function):
    """The same tensor after writes that autograd was told not to see: what they wrote depends on nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, writes: Sequence[Write]) -> Tensor:
        ctx.writes, ctx.region = writes, Region.of(x)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        region = ctx.region
        for write in ctx.writes:
            hit = torch.from_numpy(write.hits(region.addresses, region.itemsize)).to(upstream.device)
            upstream = torch.where(hit, torch.zeros((), dtype=upstream.dtype, device=upstream.device), upstream)
        return upstream, None


class Ground(Track):
    """The track of a recorded tensor, with the tensor that stands for it in the graph.

    A tensor that requires gradients stands for itself. Several recorded tensors in one storage have one ground, which
    covers them all.
    """

    def __init__(self, tensors: Sequence[Tensor], time: int):
        self.originals = list(tensors)
        self.shadow = not any(x.requires_grad for x in tensors)
        self.inference = tensors[0].is_inference()
        bases = [x._base if x._is_view() and x._base is not None else x for x in tensors]
        if not self.shadow and any(base is not bases[0] for base in bases):
            raise PlaceError(
                "two of the recorded tensors lie in one piece of memory but apart in the graph, as x and x.detach() "
                "do; record one of them, or a clone of the other"
            )
        self.tensor = _covering(tensors) if self.shadow else bases[0]
        if self.shadow:
            base = _copied(self.tensor) if self.inference else self.tensor
            anchor = torch.zeros((), dtype=base.dtype, device=base.device, requires_grad=True)
            self.tensor = _Alias.apply(anchor, base)
        self.dtype = self.tensor.dtype
        super().__init__(Version(edge_of(self.tensor), Region.of(self.tensor), -1, time))

    def view(self, x: Tensor, time: int) -> Tensor:
        """The part of the ground that lies where a tensor lies."""
        region = Region.of(x)
        if region == self.now.region:
            return self.tensor
        if not self.now.region.covers(region):
            wide = _covering([self.tensor.detach(), x.detach()])
            self.tensor = _Wider.apply(self.tensor, wide)
            edge = edge_of(self.tensor)
            nodes = chain(edge, self.now.edge)
            self.versions.append(Version(edge, Region.of(self.tensor), self.now.order, time, None, nodes))
            if region == self.now.region:
                return self.tensor
        return self.tensor.as_strided(x.shape, x.stride(), x.storage_offset())

    def cut(self, writes: Sequence[Write]) -> None:
        """Take in writes that autograd did not see."""
        with torch.enable_grad():
            self.tensor = _Cut.apply(self.tensor, writes)

    def adopt(self, x: Tensor, order: int, time: int) -> None:
        """Go on with the user's own tensor, which requires gradients from now on."""
        self.shadow, self.tensor = False, x
        everything = Write(Region.of(x), "requires_grad_", True)
        self.versions.append(Version(edge_of(x), Region.of(x), order, time, everything))

    def give_back(self) -> None:
        """What was written to a copy of an inference tensor, for that tensor as well."""
        with torch.inference_mode():
            for x in self.originals:
                x.copy_(self.tensor.detach().as_strided(x.shape, x.stride(), x.storage_offset()))


def _covering(tensors: Sequence[Tensor]) -> Tensor:
    """One of the tensors if it covers all others, or else the stretch of memory that they lie in."""
    regions = [Region.of(x) for x in tensors]
    for x, region in zip(tensors, regions, strict=True):
        if region.apart and all(region.covers(other) for other in regions):
            return x
    start = min(x.storage_offset() for x in tensors)
    stop = max(_extent((x.shape, x.stride(), x.storage_offset())) for x in tensors)
    return tensors[0].as_strided((stop - start,), (1,), start)


def _copied(x: Tensor) -> Tensor:
    """The same elements at the same places of other memory."""
    with torch.inference_mode(False):
        room = torch.empty(0, dtype=x.dtype, device=x.device)
        return room.set_(x.untyped_storage().clone(), x.storage_offset(), x.shape, x.stride())  # type: ignore[call-overload]


def _extent(geometry: Any) -> int:
    """How far into its storage a tensor reaches."""
    shape, stride, offset = geometry
    if 0 in shape:
        return int(offset)
    return int(offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1)
