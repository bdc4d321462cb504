"""Stand-ins for plain tensors: the same memory with a place in the graph, so that what is computed has derivatives.

Writes in place, as they happen: which elements each operation writes, and what must be copied before it does.

What a recording saw written to: the versions of each piece of memory, noted as the writes happen.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Protocol

import torch
from torch.autograd.graph import GradientEdge
from torch.multiprocessing.reductions import StorageWeakRef

from elementgrad._backends.torch._compat import TorchDispatchMode
from elementgrad._backends.torch.record.calls import TensorSet, aside, clock, note_line
from elementgrad._backends.torch.record.history import (
    Region,
    StorageHistory,
    TensorVersion,
    Write,
    chain,
    edge_of,
    same,
)
from elementgrad._cleanup import close_scopes_after, defer, scope
from elementgrad.errors import FrameworkError, PlaceError

Tensor = torch.Tensor


class _AliasOfMemory(torch.autograd.Function):
    """The same memory as a tensor that is no view of another, so that it may be written to in place."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[None, None]:
        return None, None  # derivatives are asked for here and go no further


class _WiderView(torch.autograd.Function):
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


class _CutByWrites(torch.autograd.Function):
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


class Proxy:
    """The tensor that stands for plain memory in the graph. Recordings inside of one another share it."""

    def __init__(self, tensors: Sequence[Tensor]):
        self.inference = tensors[0].is_inference()
        base = _covering(tensors)
        base = _copy_tensor(base) if self.inference else base
        anchor = torch.zeros((), dtype=base.dtype, device=base.device, requires_grad=True)
        self.tensor: Tensor = _AliasOfMemory.apply(anchor, base)
        self.region = Region.of(self.tensor)
        self.grounds: list[ProxiedStorage] = []
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
        self.tensor = _WiderView.apply(self.tensor, _covering([x.detach() for x in (self.tensor, *tensors)]))
        self.region = Region.of(self.tensor)
        for ground in self.grounds:
            ground.widened(time)

    def cut(self, writes: Sequence[Write]) -> None:
        """Take in writes that autograd did not see."""
        with torch.enable_grad():
            self.tensor = _CutByWrites.apply(self.tensor, writes)


class ProxiedStorage(StorageHistory):
    """The track of a recorded tensor, with the tensor that stands for it in the graph.

    A tensor that requires gradients stands for itself. Several recorded tensors in one storage have one ground, which
    covers them all.
    """

    def __init__(self, tensors: Sequence[Tensor], time: int, made: TensorSet, around: Proxy | None = None):
        self.originals = list(tensors)
        self.made = made
        """What the recording saw made without a place in the graph."""
        self.stand: Proxy | None = None
        self._own = tensors[0]._base if tensors[0]._is_view() and tensors[0]._base is not None else tensors[0]
        if any(x.requires_grad for x in tensors):
            _require_one_base(tensors)
        else:
            for x in tensors:
                _require_dtype(x, around.tensor if around else tensors[0])
            if around:
                around.widen(tensors, time)  # what was computed before is none of ours
            self.stand = around or Proxy(tensors)
            self.stand.grounds.append(self)
        super().__init__(TensorVersion(edge_of(self.tensor), Region.of(self.tensor), -1, time))

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
        self.versions.append(TensorVersion(edge, Region.of(self.tensor), self.now.order, time, None, nodes))

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
        self.versions.append(TensorVersion(edge_of(x), Region.of(x), order, time, everything))

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


def _copy_tensor(x: Tensor) -> Tensor:
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


autograd: Any = torch._C._autograd

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
CHANGED = (
    "a tensor that this derivative needs was changed in place after the recording ended; make the change inside the "
    "block, or record again"
)
OVERWRITES = {"copy_", "fill_", "zero_", "masked_fill_", "masked_scatter_", "index_fill_", "index_copy_"}
ALIASES = {"aten::detach", "aten::alias"}
"""Compute nothing."""
RANDOM = {"normal_", "uniform_", "bernoulli_", "random_", "exponential_", "cauchy_", "geometric_", "log_normal_"}
"""Operations whose results do not depend on what was there before."""


class SavedTensor:
    """A tensor that PyTorch saved for a derivative; a copy from when its memory was about to be written to.

    Where the user has hooks for what is saved, it is what their `pack` made of it.
    """

    __slots__ = ("__weakref__", "_copy", "_key", "_memory", "_packed", "_unpack", "_version")

    def __init__(self, tensor: Tensor, key: int | None, hooks: Hooks | None):
        self._copy: Tensor | None = None
        self._key, self._version = key, tensor._version
        self._unpack = hooks[1] if hooks else None
        # While this lives, no other memory goes by the same key.
        self._memory = StorageWeakRef(tensor.untyped_storage()) if hooks and key is not None else None
        self._packed: Any = hooks[0](tensor) if hooks else tensor

    def copy(self) -> bool:
        """Keep the values as they are now, unless they lie elsewhere already."""
        tensor = self._unpacked()
        if storage(tensor) != self._key:
            return False
        self._copy, self._packed = tensor.clone(), None
        return True

    @close_scopes_after
    def read(self) -> Tensor:
        """What was saved."""
        if self._copy is not None:
            return self._copy
        tensor = self._unpacked()
        if tensor._version != self._version and storage(tensor) == self._key:
            raise FrameworkError(CHANGED)
        return tensor

    def _unpacked(self) -> Tensor:
        if self._unpack is None:
            return self._packed
        with aside():
            return self._unpack(self._packed)


class PackHook:
    """What packs for us, on top of hooks of the user's if there are any. What it makes knows nothing of a recording."""

    def __init__(self, keeper: "SavedTensors", hooks: Hooks | None):
        self._keeper = keeper
        self._hooks = hooks

    def __call__(self, tensor: Tensor) -> SavedTensor:
        """What stands for a saved tensor."""
        return self._keeper.keep(tensor, self._hooks)


class SavedTensors:
    """Keeps what PyTorch saves as it is, and copies it only if its memory is about to be written to."""

    def __init__(self) -> None:
        self._kept: dict[int, weakref.WeakSet[SavedTensor]] = {}
        self.copies = 0

    def keep(self, tensor: Tensor, hooks: Hooks | None) -> SavedTensor:
        """Keep a tensor, as hooks make of it."""
        key = storage(tensor)
        kept = SavedTensor(tensor, key, hooks)
        if key is not None:
            self._kept.setdefault(key, weakref.WeakSet()).add(kept)
        return kept

    def release(self, key: int) -> None:
        """Copy what lies in a storage, which is about to change. Each is copied once."""
        for kept in self._kept.pop(key, ()):
            self.copies += kept.copy()


class saving(scope):  # noqa: N801
    """Have what PyTorch saves in a block of code kept.

    Where nobody may have it packed, PyTorch refuses what was overwritten by itself.
    """

    __slots__ = ("_keeper",)

    def __init__(self, keeper: SavedTensors):
        self._keeper = keeper

    def __enter__(self) -> None:
        super().__enter__()
        if torch._C._are_functorch_transforms_active() or autograd._saved_tensors_hooks_get_disabled_error_message():
            return
        hooks = autograd._top_saved_tensors_default_hooks(False)
        if hooks and isinstance(hooks[0], PackHook):
            return
        pack = PackHook(self._keeper, hooks)
        defer(_stop_saving, pack)
        autograd._push_saved_tensors_default_hooks(pack, SavedTensor.read)


def _stop_saving(pack: PackHook) -> None:
    hooks = autograd._top_saved_tensors_default_hooks(False)
    if hooks and hooks[0] is pack:
        autograd._pop_saved_tensors_default_hooks()


def storage(x: Tensor) -> int | None:
    """What tells one piece of memory from another, while it is alive; None for a tensor that has none of its own."""
    try:
        return x.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse tensors, and what torch.func wraps
        return None


class WriteObserver(Protocol):
    """Who is told of operations before they run."""

    def look(self, args: Any) -> None:
        """An operation is about to run."""

    def is_recorded(self, x: Any) -> bool:
        """Whether this is what stands for a recorded tensor."""

    def before_write(self, x: Tensor, key: int, write: Write) -> None:
        """A tensor in a storage is about to be written to."""


class WriteMode(TorchDispatchMode):
    """Sees every operation below autograd: its schema says which of its arguments it writes to."""

    def __init__(self, keeper: SavedTensors, observer: WriteObserver):
        super().__init__()
        self._keeper = keeper
        self._observer = observer

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # that would import the compiler; it leaves code under such a mode alone by itself

    @close_scopes_after
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name not in ALIASES:
            self._observer.look(args)
        names = _written(func)
        if names:
            for x, is_out in _tensors(names, args, kwargs):
                self._about_to_write(func, x, is_out, args, kwargs)
        return func(*args, **kwargs)

    def _about_to_write(self, func: Any, x: Tensor, is_out: bool, args: Any, kwargs: Any) -> None:
        key, name = storage(x), func._schema.name.partition("::")[2]
        if key is None:
            return
        if torch.Tag.inplace_view in func.tags:
            if self._observer.is_recorded(x):
                raise FrameworkError(
                    f"{name} gives a recorded tensor another shape or memory; use {name.rstrip('_')}, which makes a "
                    "new tensor"
                )
            return
        self._keeper.release(key)
        self._observer.before_write(x, key, Write(Region.of(x), name, *_effect(func, name, x, is_out, args, kwargs)))


@cache
def _written(func: Any) -> tuple[tuple[int, str, bool], ...]:
    """The arguments of an operation that it writes to, and whether they are for results alone."""
    return tuple(
        (number, argument.name, argument.kwarg_only)
        for number, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _tensors(names: tuple[tuple[int, str, bool], ...], args: Any, kwargs: Any) -> Iterator[tuple[Tensor, bool]]:
    for number, name, is_out in names:
        given = args[number] if number < len(args) else kwargs.get(name)
        for x in given if isinstance(given, (list, tuple)) else (given,):
            if isinstance(x, Tensor):
                yield x, is_out


def _effect(
    func: Any, name: str, x: Tensor, is_out: bool, args: Any, kwargs: Any
) -> tuple[bool, Callable[[Tensor], Tensor] | None]:
    """Whether an operation overwrites without reading, and how to mark what it writes if that is not all."""
    if is_out or name in RANDOM:
        return True, None
    if name not in PARTIAL or x is not args[0]:
        return name in OVERWRITES, None
    named = {
        argument.name: args[number] if number < len(args) else kwargs.get(argument.name, argument.default_value)
        for number, argument in enumerate(func._schema.arguments)
    }
    accumulates = bool(named.get("accumulate")) or "reduce" in named or name in ("index_add_", "scatter_add_")
    where = [_copied(named[part]) for part in PARTIAL[name][0]]
    fill = PARTIAL[name][1]
    return not accumulates, lambda zeros: fill(zeros, *where)


def _copied(part: Any) -> Any:
    """An index as it is now: it may be written to as well."""
    if isinstance(part, (list, tuple)):
        return [_copied(entry) for entry in part]
    return part.detach().clone().cpu() if isinstance(part, Tensor) else part


def _filled_by_index(zeros: Tensor, dim: int, index: Tensor) -> Tensor:
    return zeros.index_fill(dim, index.reshape(-1).long(), 1.0) if zeros.ndim else zeros.fill_(1.0)


def _filled_at(zeros: Tensor, indices: Any) -> Tensor:
    index = tuple([slice(None) if part is None else part for part in indices])  # left out: a whole axis
    zeros[index] = 1.0
    return zeros


BY_DIM: Any = (("dim", "index"), _filled_by_index)
SCATTER: Any = (("dim", "index"), lambda zeros, dim, index: zeros.scatter(dim, index, 1.0))
MASK: Any = (("mask",), lambda zeros, mask: zeros.masked_fill(mask, 1.0))
PUT: Any = (("indices",), _filled_at)
PARTIAL: dict[str, Any] = {
    "index_put_": PUT,
    "_index_put_impl_": PUT,
    "_unsafe_index_put_": PUT,
    "index_copy_": BY_DIM,
    "index_fill_": BY_DIM,
    "index_add_": BY_DIM,
    "index_reduce_": BY_DIM,
    "scatter_": SCATTER,
    "scatter_add_": SCATTER,
    "scatter_reduce_": SCATTER,
    "masked_fill_": MASK,
    "masked_scatter_": MASK,
    "put_": (("index",), lambda zeros, index: zeros.put(index, torch.ones(index.shape))),
    "fill_diagonal_": (("wrap",), lambda zeros, wrap: zeros.fill_diagonal_(1.0, bool(wrap))),
}
"""Operations that write some elements only: the arguments that say which, and how to mark these."""


class WriteHistory:
    """The grounds of the recorded tensors, and a track for all other memory that is written to."""

    def __init__(self) -> None:
        self._start = clock()
        self._thread = threading.get_ident()
        self._grounds: dict[int, ProxiedStorage] = {}
        self._tracks: dict[int, tuple[StorageHistory, Any]] = {}
        self._limit = 64
        self._pending: list[tuple[StorageHistory, Tensor, Write]] = []
        self._lent: list[tuple[Tensor, Tensor]] = []
        self._writes = 0
        self._open = True

    def lay(self, tensors: Sequence[Tensor], made: TensorSet, outer: Sequence["WriteHistory"]) -> None:
        """Lay the grounds of the recorded tensors, on those of recordings around this one where these have some."""
        together: dict[Any, list[Tensor]] = {}
        for x in tensors:
            together.setdefault(storage(x), []).append(x)
        for key, group in together.items():
            around = [tracks._grounds[key].stand for tracks in outer if key in tracks._grounds]
            ground = ProxiedStorage(group, clock(), made, next((stand for stand in reversed(around) if stand), None))
            self._grounds[key] = self._grounds[storage(ground.tensor) or key] = ground

    def close(self) -> None:
        """Note the last writes. None come afterwards."""
        self._open = False
        self.flush()
        for ground in self._grounds.values():
            ground.leave()

    def ground(self, x: Tensor) -> ProxiedStorage | None:
        """That of the memory in which a tensor lies, if any of it is recorded."""
        return self._grounds.get(storage(x) or 0)

    def is_stand_in(self, x: Any) -> bool:
        """Whether this is what stands for a recorded tensor."""
        return any(x is ground.tensor for ground in self._grounds.values() if ground.stand)

    def written(self, x: Tensor) -> StorageHistory | None:
        """The track of the memory in which a tensor lies, if it was written to and none of it is recorded."""
        known = self._tracks.get(storage(x) or 0)
        return known[0] if known else None

    def lend(self, x: Tensor) -> Tensor:
        """A copy of an inference tensor, which could not be saved for a derivative."""
        copy = x.clone()
        self._lent.append((x, copy))
        return copy

    def adopt(self, x: Tensor) -> None:
        """Go on with the user's own tensor if it is a recorded one that requires gradients by now."""
        ground = self.ground(x)
        if ground is not None and ground.stand and any(x is other for other in ground.originals):
            self._writes += 1
            ground.adopt(x, self._writes, clock())

    def before_write(self, x: Tensor, key: int, write: Write) -> None:
        """Below autograd, and before it knows: the graph still leads to what the tensor was."""
        base = x._base if x._is_view() and x._base is not None else x
        track: StorageHistory | None = self._grounds.get(key)
        if track is None:
            known = self._tracks.get(key)
            track = known[0] if known else self._begin(key, base)
        self._pending.append((track, base, write))

    def _begin(self, key: int, base: Tensor) -> StorageHistory:
        if len(self._tracks) >= self._limit:
            self._tracks = {k: kept for k, kept in self._tracks.items() if not kept[1].expired()}
            self._limit = max(64, 2 * len(self._tracks))
        made = base.grad_fn._sequence_nr() if base.grad_fn is not None else -1
        # Below autograd a leaf does not say where its derivative arrives; what it says afterwards is the same.
        edge = GradientEdge(base.grad_fn, base.output_nr) if base.grad_fn is not None else None
        track = StorageHistory(TensorVersion(edge, Region.of(base), -1, made))
        self._tracks[key] = track, StorageWeakRef(base.untyped_storage())
        return track

    def flush(self) -> None:
        """Note the versions that the last function made, now that autograd knows of them.

        Somebody who asks from another thread does not know whether it is done with its writes.
        """
        if self._open and threading.get_ident() != self._thread:
            return
        lent, self._lent = self._lent, []
        pending, self._pending = self._pending, []
        if not pending and not lent:
            return
        with aside():
            for x, copy in lent:
                if copy._version:
                    with torch.inference_mode():
                        x.copy_(copy.detach())
            for track in dict.fromkeys(track for track, _, _ in pending):
                self._note(track, [(base, write) for other, base, write in pending if other is track])

    def _note(self, track: StorageHistory, writes: Sequence[tuple[Tensor, Write]]) -> None:
        tensor = writes[-1][0]
        if track.now.edge is None and tensor.is_leaf:
            track.versions[0] = replace(track.versions[0], edge=edge_of(tensor))
        before = track.now.edge
        if isinstance(track, ProxiedStorage):
            track.settle([write for _, write in writes])
            tensor = track.tensor
        edge, time = edge_of(tensor), clock()
        if edge is not None:
            note_line(edge.node, self._start, None)
        nodes = chain(edge, before)
        for _, write in writes:
            self._writes += 1
            track.versions.append(TensorVersion(edge, Region.of(tensor), self._writes, time, write, nodes))
