"""Stand-ins for plain tensors: the same memory with a place in the graph, so that what is computed has derivatives."""

from collections.abc import Sequence
from typing import Any

import torch

from elementgrad.backends.torch.calls import Made
from elementgrad.backends.torch.regions import Region, Write
from elementgrad.backends.torch.versions import Track, Version, chain, edge_of, same
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


class Stand:
    """The tensor that stands for plain memory in the graph. Recordings inside of one another share it."""

    def __init__(self, tensors: Sequence[Tensor]):
        self.inference = tensors[0].is_inference()
        base = _covering(tensors)
        base = _copied(base) if self.inference else base
        anchor = torch.zeros((), dtype=base.dtype, device=base.device, requires_grad=True)
        self.tensor: Tensor = _Alias.apply(anchor, base)
        self.region = Region.of(self.tensor)
        self.grounds: list[Ground] = []
        """Those that stand on it, while their recordings last."""
        self._former: list[Tensor] = []

    def cut_off(self, x: Tensor) -> bool:
        """Whether a tensor in this memory was made as one that depends on nothing."""
        return any(x in ground.made for ground in self.grounds)

    def outgrown(self, x: Tensor) -> bool:
        """Whether a tensor is a view of what stood here before, and knows of nothing that was written since."""
        return bool(self._former) and any(x._base is base for base in self._former)

    def view(self, x: Tensor, time: int) -> Tensor:
        """The part that lies where a tensor lies."""
        region = Region.of(x)
        if not self.region.covers(region):
            self.widen([x], time)
        if region == self.region:
            return self.tensor
        return self.tensor.as_strided(x.shape, x.stride(), x.storage_offset())

    def widen(self, tensors: Sequence[Tensor], time: int) -> None:
        """Stand for these as well, from here on."""
        self._former.append(self.tensor)
        self.tensor = _Wider.apply(self.tensor, _covering([x.detach() for x in (self.tensor, *tensors)]))
        self.region = Region.of(self.tensor)
        for ground in self.grounds:
            ground.widened(time)

    def cut(self, writes: Sequence[Write]) -> None:
        """Take in writes that autograd did not see."""
        with torch.enable_grad():
            self.tensor = _Cut.apply(self.tensor, writes)


class Ground(Track):
    """The track of a recorded tensor, with the tensor that stands for it in the graph.

    A tensor that requires gradients stands for itself. Several recorded tensors in one storage have one ground, which
    covers them all.
    """

    def __init__(self, tensors: Sequence[Tensor], time: int, made: Made, around: Stand | None = None):
        self.originals = list(tensors)
        self.made = made
        """What the recording saw made without a place in the graph."""
        self.stand: Stand | None = None
        self._own = tensors[0]._base if tensors[0]._is_view() and tensors[0]._base is not None else tensors[0]
        if any(x.requires_grad for x in tensors):
            _require_one_base(tensors)
        else:
            for x in tensors:
                _require_dtype(x, around.tensor if around else tensors[0])
            if around:
                around.widen(tensors, time)  # what was computed before is none of ours
            self.stand = around or Stand(tensors)
            self.stand.grounds.append(self)
        super().__init__(Version(edge_of(self.tensor), Region.of(self.tensor), -1, time))

    @property
    def tensor(self) -> Tensor:
        """What stands for the recorded tensors."""
        return self.stand.tensor if self.stand else self._own

    def stand_in(self, x: Tensor, time: int) -> Tensor:
        """What takes the place of a tensor in this memory."""
        if self.stand is None or (not self.stand.outgrown(x) if x.requires_grad else self.stand.cut_off(x)):
            return x
        if x.dtype != self.stand.tensor.dtype and not (x.is_floating_point() or x.is_complex()):
            return x
        _require_dtype(x, self.stand.tensor)
        return self.stand.view(x, time)

    def widened(self, time: int) -> None:
        """Note that what stands here covers more memory than before."""
        edge = edge_of(self.tensor)
        nodes = chain(edge, self.now.edge)
        self.versions.append(Version(edge, Region.of(self.tensor), self.now.order, time, None, nodes))

    def settle(self, writes: Sequence[Write]) -> None:
        """After writes: take in what autograd did not see, and let inference tensors have what was written."""
        if self.stand and same(edge_of(self.tensor), self.now.edge):
            self.stand.cut(writes)
        if self.stand and self.stand.inference:
            with torch.inference_mode():
                for x in self.originals:
                    x.copy_(self.tensor.detach().as_strided(x.shape, x.stride(), x.storage_offset()))

    def adopt(self, x: Tensor, order: int, time: int) -> None:
        """Go on with the user's own tensor, which requires gradients from now on."""
        self.leave()
        self.stand, self._own = None, x
        everything = Write(Region.of(x), "requires_grad_", True)
        self.versions.append(Version(edge_of(x), Region.of(x), order, time, everything))

    def leave(self) -> None:
        """Hear no more of what stands here."""
        if self.stand and self in self.stand.grounds:
            self.stand.grounds.remove(self)


def _require_dtype(x: Tensor, like: Tensor) -> None:
    if x.dtype != like.dtype:
        raise PlaceError(  # which operators do not take for their own error, as they would a TypeError
            f"a view of dtype {x.dtype} of a recorded tensor of dtype {like.dtype} was made outside the block; make it "
            "inside"
        )


def _require_one_base(tensors: Sequence[Tensor]) -> None:
    bases = [x._base if x._is_view() and x._base is not None else x for x in tensors]
    if any(base is not bases[0] for base in bases):
        raise PlaceError(
            "two of the recorded tensors lie in one piece of memory but apart in the graph, as x and x.detach() "
            "do; record one of them, or a clone of the other"
        )


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
