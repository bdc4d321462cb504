"""Writes in place, as they happen: which elements each operation writes, and what must be copied before it does."""

import weakref
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from elementgrad.backends.torch.functions import aside
from elementgrad.backends.torch.regions import Region, Write
from elementgrad.cleanup import contained, defer, scope
from elementgrad.errors import FrameworkError

autograd: Any = torch._C._autograd
Tensor = torch.Tensor
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


class Kept:
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

    @contained
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


class Pack:
    """What packs for us, on top of hooks of the user's if there are any. What it makes knows nothing of a recording."""

    def __init__(self, keeper: "Keeper", hooks: Hooks | None):
        self._keeper = keeper
        self._hooks = hooks

    def __call__(self, tensor: Tensor) -> Kept:
        """What stands for a saved tensor."""
        return self._keeper.keep(tensor, self._hooks)


class Keeper:
    """Keeps what PyTorch saves as it is, and copies it only if its memory is about to be written to."""

    def __init__(self) -> None:
        self._kept: dict[int, weakref.WeakSet[Kept]] = {}
        self.copies = 0

    def keep(self, tensor: Tensor, hooks: Hooks | None) -> Kept:
        """Keep a tensor, as hooks make of it."""
        key = storage(tensor)
        kept = Kept(tensor, key, hooks)
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

    def __init__(self, keeper: Keeper):
        self._keeper = keeper

    def __enter__(self) -> None:
        super().__enter__()
        if torch._C._are_functorch_transforms_active() or autograd._saved_tensors_hooks_get_disabled_error_message():
            return
        hooks = autograd._top_saved_tensors_default_hooks(False)
        if hooks and isinstance(hooks[0], Pack):
            return
        pack = Pack(self._keeper, hooks)
        defer(_stop_saving, pack)
        autograd._push_saved_tensors_default_hooks(pack, Kept.read)


def _stop_saving(pack: Pack) -> None:
    hooks = autograd._top_saved_tensors_default_hooks(False)
    if hooks and hooks[0] is pack:
        autograd._pop_saved_tensors_default_hooks()


def storage(x: Tensor) -> int | None:
    """What tells one piece of memory from another, while it is alive; None for a tensor that has none of its own."""
    try:
        return x.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse tensors, and what torch.func wraps
        return None


class Observer(Protocol):
    """Who is told of operations before they run."""

    def look(self, args: Any) -> None:
        """An operation is about to run."""

    def is_recorded(self, x: Any) -> bool:
        """Whether this is what stands for a recorded tensor."""

    def before_write(self, x: Tensor, key: int, write: Write) -> None:
        """A tensor in a storage is about to be written to."""


class Writes(TorchDispatchMode):
    """Sees every operation below autograd: its schema says which of its arguments it writes to."""

    def __init__(self, keeper: Keeper, observer: Observer):
        super().__init__()
        self._keeper = keeper
        self._observer = observer

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # that would import the compiler; it leaves code under such a mode alone by itself

    @contained
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
