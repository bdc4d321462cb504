"""Writes in place, as they happen, and the proxies through which plain memory has a place in the autograd graph.

`describe_write` says which elements an op is about to write. `SavedTensors` copies what autograd saved before its
memory changes. `WriteHistory` has the versions of each storage that is written to. A `Proxy` is a tensor that shares
the memory of plain ones.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.multiprocessing.reductions import StorageWeakRef

from elementgrad._backends.torch._compat import functorch_is_active, saved_tensor_hooks, sequence_number, storage_key
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
from elementgrad._backends.torch.record.intercept import TensorSet, label_node, pause_recording
from elementgrad._cleanup import close_scopes_after, defer, scope
from elementgrad.errors import FrameworkError, PlaceError

Tensor = torch.Tensor
Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""The user's `pack` and `unpack` for saved tensors."""
CHANGED = (
    "a tensor that this derivative needs was changed in place after the recording ended; make the change inside the "
    "block, or record again"
)


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


def plain_storage_key(x: Tensor) -> int | None:
    """Return the key of a tensor's storage; None for a tensor without a storage of its own."""
    try:
        return storage_key(x)
    except (NotImplementedError, RuntimeError):  # sparse tensors, and wrappers of torch.func
        return None


class WriteHistory:
    """Histories of the recorded storages, and of all other storages that are written to.

    A write is noted before it happens, below autograd. Its version is appended by `flush` once the function that wrote
    has returned, when autograd has given the tensor its new edge.
    """

    def __init__(self) -> None:
        self._start = sequence_number()
        self._thread = threading.get_ident()
        self._recorded: dict[int, ProxiedStorage] = {}
        self._others: dict[int, tuple[StorageHistory, StorageWeakRef]] = {}
        self._limit = 64
        """Expired entries of `_others` are dropped when there are this many."""
        self._pending: list[tuple[StorageHistory, Tensor, Write]] = []
        self._inference_copies: list[tuple[Tensor, Tensor]] = []
        self._writes = 0
        self._open = True

    def add_recorded(self, tensors: Sequence[Tensor], detached: TensorSet, outer: Sequence["WriteHistory"]) -> None:
        """Start the histories of the recorded tensors, with the proxies of outer recordings where there are some."""
        groups: dict[Any, list[Tensor]] = {}
        for x in tensors:
            groups.setdefault(plain_storage_key(x), []).append(x)
        for key, group in groups.items():
            proxies = [history._recorded[key].proxy for history in outer if key in history._recorded]
            innermost = next((proxy for proxy in reversed(proxies) if proxy), None)
            storage = ProxiedStorage(group, sequence_number(), detached, innermost)
            self._recorded[key] = self._recorded[plain_storage_key(storage.tensor) or key] = storage

    def close(self) -> None:
        """Append the last versions. No writes come afterwards."""
        self._open = False
        self.flush()
        for storage in self._recorded.values():
            storage.leave_proxy()

    def recorded_storage(self, x: Tensor) -> ProxiedStorage | None:
        """Return the history of the storage of `x`, if a recorded tensor lies in it."""
        return self._recorded.get(plain_storage_key(x) or 0)

    def other_history(self, x: Tensor) -> StorageHistory | None:
        """Return the history of the storage of `x`, if it was written to and no recorded tensor lies in it."""
        entry = self._others.get(plain_storage_key(x) or 0)
        return entry[0] if entry else None

    def is_proxy(self, x: Any) -> bool:
        """Return True for a tensor that stands for a recorded one."""
        return any(x is storage.tensor for storage in self._recorded.values() if storage.proxy)

    def copy_inference(self, x: Tensor) -> Tensor:
        """Return a copy of an inference tensor, which autograd could not save; `flush` copies writes back."""
        copy = x.clone()
        self._inference_copies.append((x, copy))
        return copy

    def adopt(self, x: Tensor) -> None:
        """Replace the proxy of a recorded tensor by the tensor, which requires gradients by now."""
        storage = self.recorded_storage(x)
        if storage is not None and storage.proxy and any(x is original for original in storage.originals):
            self._writes += 1
            storage.adopt(x, self._writes, sequence_number())

    def note_write(self, x: Tensor, key: int, write: Write) -> None:
        """Note a write that is about to happen. Autograd still has the edge from before it."""
        base = base_of(x)
        history: StorageHistory | None = self._recorded.get(key)
        if history is None:
            entry = self._others.get(key)
            history = entry[0] if entry else self._start_history(key, base)
        self._pending.append((history, base, write))

    def _start_history(self, key: int, base: Tensor) -> StorageHistory:
        if len(self._others) >= self._limit:
            self._others = {k: entry for k, entry in self._others.items() if not entry[1].expired()}
            self._limit = max(64, 2 * len(self._others))
        # Below autograd a leaf does not show its edge. `_append_versions` asks for it afterwards: it stays the same.
        node = base.grad_fn
        edge, time = (GradientEdge(node, base.output_nr), node._sequence_nr()) if node is not None else (None, -1)
        history = StorageHistory(TensorVersion(edge, Region.of(base), -1, time))
        self._others[key] = history, StorageWeakRef(base.untyped_storage())
        return history

    def flush(self) -> None:
        """Append the versions that the last function made.

        Does nothing in another thread than the recording's, where it is not known if the function has returned.
        """
        if self._open and threading.get_ident() != self._thread:
            return
        copies, self._inference_copies = self._inference_copies, []
        pending, self._pending = self._pending, []
        if not pending and not copies:
            return
        with pause_recording():
            for x, copy in copies:
                if copy._version:
                    with torch.inference_mode():
                        x.copy_(copy.detach())
            for history in dict.fromkeys(history for history, _, _ in pending):
                self._append_versions(history, [(base, write) for other, base, write in pending if other is history])

    def _append_versions(self, history: StorageHistory, writes: Sequence[tuple[Tensor, Write]]) -> None:
        tensor = writes[-1][0]
        if history.latest.edge is None and tensor.is_leaf:
            history.versions[0] = replace(history.versions[0], edge=edge_of(tensor))
        before = history.latest.edge
        if isinstance(history, ProxiedStorage):
            history.apply_writes([write for _, write in writes])
            tensor = history.tensor
        edge, time = edge_of(tensor), sequence_number()
        if edge is not None:
            label_node(edge.node, self._start, None)
        nodes = nodes_between(edge, before)
        for _, write in writes:
            self._writes += 1
            history.versions.append(TensorVersion(edge, Region.of(tensor), self._writes, time, write, nodes))


class SavedTensors:
    """The tensors that autograd saved, each copied only when its memory is about to be written to."""

    def __init__(self) -> None:
        self._by_storage: dict[int, weakref.WeakSet[SavedTensor]] = {}
        self.copies = 0

    def save(self, tensor: Tensor, hooks: Hooks | None) -> "SavedTensor":
        """Register a tensor that autograd saves."""
        key = plain_storage_key(tensor)
        saved = SavedTensor(tensor, key, hooks)
        if key is not None:
            self._by_storage.setdefault(key, weakref.WeakSet()).add(saved)
        return saved

    def copy_before_write(self, key: int) -> None:
        """Copy what lies in a storage that is about to change. Each tensor is copied once."""
        for saved in self._by_storage.pop(key, ()):
            self.copies += saved.copy()


class SavedTensor:
    """One saved tensor: the tensor itself, what the user's `pack` hook made of it, or a copy from before a write."""

    __slots__ = ("__weakref__", "_copy", "_key", "_memory", "_packed", "_unpack", "_version")

    def __init__(self, tensor: Tensor, key: int | None, hooks: Hooks | None):
        self._copy: Tensor | None = None
        self._key, self._version = key, tensor._version
        self._unpack = hooks[1] if hooks else None
        # While this lives, no other storage gets the same key.
        self._memory = StorageWeakRef(tensor.untyped_storage()) if hooks and key is not None else None
        self._packed: Any = hooks[0](tensor) if hooks else tensor

    def copy(self) -> bool:
        """Copy the values, unless a hook has moved them elsewhere already; return True if they were copied."""
        tensor = self._unpack_tensor()
        if plain_storage_key(tensor) != self._key:
            return False
        self._copy, self._packed = tensor.clone(), None
        return True

    @close_scopes_after
    def read(self) -> Tensor:
        """Return the values as they were saved; this is the `unpack` hook."""
        if self._copy is not None:
            return self._copy
        tensor = self._unpack_tensor()
        if tensor._version != self._version and plain_storage_key(tensor) == self._key:
            raise FrameworkError(CHANGED)
        return tensor

    def _unpack_tensor(self) -> Tensor:
        if self._unpack is None:
            return self._packed
        with pause_recording():
            return self._unpack(self._packed)


class PackHook:
    """The `pack` hook, on top of hooks of the user's if there are any. `SavedTensor` holds no recording alive."""

    def __init__(self, saved: SavedTensors, hooks: Hooks | None):
        self._saved = saved
        self._hooks = hooks

    def __call__(self, tensor: Tensor) -> SavedTensor:
        return self._saved.save(tensor, self._hooks)


class pack_saved_tensors(scope):  # noqa: N801
    """Block in which autograd saves tensors to `SavedTensors`.

    Where hooks are disabled, PyTorch itself refuses derivatives that need what was overwritten.
    """

    __slots__ = ("_saved",)

    def __init__(self, saved: SavedTensors):
        self._saved = saved

    def __enter__(self) -> None:
        super().__enter__()
        if functorch_is_active() or saved_tensor_hooks._saved_tensors_hooks_get_disabled_error_message():
            return
        hooks = saved_tensor_hooks._top_saved_tensors_default_hooks(False)
        if hooks and isinstance(hooks[0], PackHook):
            return
        pack = PackHook(self._saved, hooks)
        defer(_pop_pack_hook, pack)
        saved_tensor_hooks._push_saved_tensors_default_hooks(pack, SavedTensor.read)


def _pop_pack_hook(pack: PackHook) -> None:
    hooks = saved_tensor_hooks._top_saved_tensors_default_hooks(False)
    if hooks and hooks[0] is pack:
        saved_tensor_hooks._pop_saved_tensors_default_hooks()


def tensors_written_by(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Tensor, bool]]:
    """Yield the tensors that an op writes to by its schema, each with True if it is an `out=` argument."""
    for index, name, is_out in _written_arguments(func):
        value = args[index] if index < len(args) else kwargs.get(name)
        for x in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(x, Tensor):
                yield x, is_out


@cache
def _written_arguments(func: Any) -> tuple[tuple[int, str, bool], ...]:
    return tuple(
        (index, argument.name, argument.kwarg_only)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def describe_write(func: Any, name: str, x: Tensor, is_out: bool, args: Any, kwargs: Any) -> Write:
    """Return what the op called `name` is about to write to `x`, one of its arguments."""
    region = Region.of(x)
    if is_out or name in RANDOM:
        return Write(region, name, True)
    if name not in PARTIAL or x is not args[0]:
        return Write(region, name, name in OVERWRITES)
    arguments = {
        argument.name: args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)
        for index, argument in enumerate(func._schema.arguments)
    }
    accumulates = bool(arguments.get("accumulate")) or "reduce" in arguments or name in ("index_add_", "scatter_add_")
    names, mark = PARTIAL[name]
    where = [_copy_index(arguments[name]) for name in names]
    return Write(region, name, not accumulates, lambda zeros: mark(zeros, *where))


def _copy_index(index: Any) -> Any:
    """Return a copy, since an index may be written to as well."""
    if isinstance(index, (list, tuple)):
        return [_copy_index(part) for part in index]
    return index.detach().clone().cpu() if isinstance(index, Tensor) else index


def _mark_slices(zeros: Tensor, dim: int, index: Tensor) -> Tensor:
    return zeros.index_fill(dim, index.reshape(-1).long(), 1.0) if zeros.ndim else zeros.fill_(1.0)


def _mark_indices(zeros: Tensor, indices: Any) -> Tensor:
    zeros[tuple([slice(None) if index is None else index for index in indices])] = 1.0  # None is a whole axis
    return zeros


RANDOM = {"normal_", "uniform_", "bernoulli_", "random_", "exponential_", "cauchy_", "geometric_", "log_normal_"}
OVERWRITES = {"copy_", "fill_", "zero_", "masked_fill_", "masked_scatter_", "index_fill_", "index_copy_"}
"""Ops whose results do not depend on what was there before; so do those of `RANDOM` not."""
_SLICES: Any = (("dim", "index"), _mark_slices)
_SCATTER: Any = (("dim", "index"), lambda zeros, dim, index: zeros.scatter(dim, index, 1.0))
_MASK: Any = (("mask",), lambda zeros, mask: zeros.masked_fill(mask, 1.0))
_INDICES: Any = (("indices",), _mark_indices)
PARTIAL: dict[str, Any] = {
    "index_put_": _INDICES,
    "_index_put_impl_": _INDICES,
    "_unsafe_index_put_": _INDICES,
    "index_copy_": _SLICES,
    "index_fill_": _SLICES,
    "index_add_": _SLICES,
    "index_reduce_": _SLICES,
    "scatter_": _SCATTER,
    "scatter_add_": _SCATTER,
    "scatter_reduce_": _SCATTER,
    "masked_fill_": _MASK,
    "masked_scatter_": _MASK,
    "put_": (("index",), lambda zeros, index: zeros.put(index, torch.ones(index.shape))),
    "fill_diagonal_": (("wrap",), lambda zeros, wrap: zeros.fill_diagonal_(1.0, bool(wrap))),
}
"""Ops that write only some elements: the arguments that say which, and a function that marks these in zeros."""
