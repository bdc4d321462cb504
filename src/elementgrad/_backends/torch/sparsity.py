"""What is known of each tensor while a sweep is watched, kept by the memory that it lives in.

Views share memory, so they need no rules, and what is written in place is seen by all of them.


Values that leave PyTorch without an operation, as arrays, lists or addresses: nothing is known of what comes back.

Not by a mode of `__torch_function__`, which is off inside what it was asked about, a whole backward pass for one.


Watching a sweep: every operation of it, with the sets that its tensors depend on.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from elementgrad._backends.autodiff import UnsupportedError
from elementgrad._backends.monkeypatch import AttributePatch, Replace
from elementgrad._backends.torch._compat import TorchDispatchMode, tree_leaves
from elementgrad._backends.torch.isolate import in_mode
from elementgrad._cleanup import assign, scope
from elementgrad._sparsity.index_sets import Ids, IndexSets

Tensor = torch.Tensor
TIDY = 256
"""After so many new memories those that are gone are forgotten."""


@dataclass
class StorageCell:
    """One piece of memory."""

    weak: StorageWeakRef
    """Kept so that no other memory gets the same address."""
    unit: int
    """The bytes of one id: those of a real number."""
    ids: np.ndarray | None = None
    """The set that each number in it depends on; None if none does."""
    varies: bool = False
    """Whether it depends on the point of the derivative, so that its values are not known in general."""


class SetIdTable:
    """The ids of tensors, and which of them vary."""

    def __init__(self, reach: IndexSets):
        self.reach = reach
        self._cells: dict[int, StorageCell] = {}
        self._limit = TIDY

    def ids(self, x: Tensor) -> Ids | None:
        """The sets that the elements of a tensor depend on; None if it does not depend on the seed at all."""
        cell = self._cells.get(x.untyped_storage()._cdata)
        if cell is None or cell.ids is None:
            return None
        view = _view(cell, x)
        ids = view[..., 0] if view.shape[-1] == 1 else self.reach.over(view, [-1])  # of a complex number both parts
        return ids if ids.any() else None

    def varies(self, x: Tensor) -> bool:
        """Whether the values of a tensor depend on the point of the derivative."""
        cell = self._cells.get(x.untyped_storage()._cdata)
        return cell is not None and cell.varies

    def vary(self, x: Tensor) -> None:
        """Say so."""
        self._cell(x).varies = True

    def write(self, x: Tensor, ids: Ids | None) -> None:
        """The elements of a tensor depend on these sets from now on."""
        cell = self._cells.get(x.untyped_storage()._cdata)
        if ids is None and (cell is None or cell.ids is None):
            return
        cell = self._cell(x)
        if cell.ids is None:
            cell.ids = np.zeros(-(-x.untyped_storage().nbytes() // cell.unit), dtype=np.int64)
        _view(cell, x)[...] = 0 if ids is None else np.broadcast_to(ids, tuple(x.shape))[..., None]

    def shares(self, x: Tensor, others: list[Tensor]) -> bool:
        """Whether a tensor lives in the memory of another."""
        where = x.untyped_storage()._cdata
        return any(where == other.untyped_storage()._cdata for other in others)

    def tidy(self) -> None:
        """Forget the sets that no tensor depends on any more."""
        self._forget()
        self.reach.tidy([cell.ids for cell in self._cells.values() if cell.ids is not None])

    def _forget(self) -> None:
        self._cells = {key: cell for key, cell in self._cells.items() if not cell.weak.expired()}
        self._limit = 2 * len(self._cells) + TIDY

    def _cell(self, x: Tensor) -> StorageCell:
        storage = x.untyped_storage()
        cell = self._cells.get(storage._cdata)
        if cell is None:
            if len(self._cells) >= self._limit:
                self._forget()
            cell = StorageCell(StorageWeakRef(storage), _real_size(x))
            self._cells[storage._cdata] = cell
        return cell


def _real_size(x: Tensor) -> int:
    return x.element_size() // 2 if x.is_complex() else x.element_size()


def _view(cell: StorageCell, x: Tensor) -> np.ndarray:
    """The ids of a tensor's elements in its memory, with an axis behind for the parts of complex numbers."""
    if _real_size(x) != cell.unit:
        raise UnsupportedError("the bytes of one dtype are taken for those of another")
    parts, ids = x.element_size() // cell.unit, cell.ids
    assert ids is not None
    strides = [step * parts * ids.itemsize for step in x.stride()]
    start: Any = ids[x.storage_offset() * parts :]
    return np.lib.stride_tricks.as_strided(start, (*x.shape, parts), (*strides, ids.itemsize))


Notice = Callable[[torch.Tensor, str], None]
WAYS = ("numpy", "tolist", "__array__", "__dlpack__", "data_ptr")
_local = threading.local()


def _install(replace: Replace) -> None:
    for name in WAYS:
        replace(torch.Tensor, name, _noticed(getattr(torch.Tensor, name), name))


def _noticed(original: Any, name: str) -> Any:
    @wraps(original)
    def read(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for notice in getattr(_local, "notices", ()):
            notice(x, name)
        return original(x, *args, **kwargs)

    return read


_patch = AttributePatch(_install)


@contextmanager
def noticing(notice: Notice) -> Iterator[None]:
    """In here, and in this thread, it is told what is read; it may raise."""
    with scope():
        assign(_local, "notices", (*getattr(_local, "notices", ()), notice))
        _patch.enter()
        yield


MASKED = ("index", "masked_select", "_unsafe_index")
"""Of what these give, the shape depends on masks alone."""
FRESH = [
    *("zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty", "new_full"),
    *("new_empty_strided", "_efficientzerotensor"),
]
"""What takes from a tensor its shape and dtype alone."""


@dataclass
class OpCall:
    """One operation as it was called, for the rules."""

    mode: "SparsityMode"
    function: Any
    name: str
    arguments: dict[str, Any]
    """By the names of its schema, what was left out too."""
    outputs: list[Tensor]

    @property
    def reach(self) -> IndexSets:
        """The table of sets."""
        return self.mode.reach

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return [x for x in tree_leaves(self.arguments) if isinstance(x, Tensor)]

    def ids(self, x: Any) -> Ids | None:
        """The sets of a tensor, None if it has none or is none."""
        return self.mode.memory.ids(x) if isinstance(x, Tensor) else None

    def known(self, x: Any) -> Tensor | None:
        """A constant, if its values are the same at every point; numbers are."""
        if not isinstance(x, Tensor):
            return torch.as_tensor(x)
        varies = self.mode.memory.varies(x) or not self.mode.trusting or self.ids(x) is not None
        return None if varies else x


Rule = Callable[[OpCall], "Sequence[Ids | None] | None"]
"""The sets of each output; None for a call that the rule does not cover."""


class SparsityMode(TorchDispatchMode):
    """Watches operations: which tensors vary with the point, and which elements of a seed each element depends on."""

    def __init__(self, size: int, rules: dict[str, Rule], trusting: bool):
        super().__init__()
        self.reach = IndexSets(size)
        self.memory = SetIdTable(self.reach)
        self.trusting = trusting
        """Whether constants that do not vary are known for good."""
        self._rules = rules

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Run a program in here."""
        with noticing(lambda x, name: self.require_steady([x], name)), in_mode(self):
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and follow the sets through it."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            return self._followed(func, args, kwargs)

    def require_steady(self, tensors: Sequence[Tensor], what: str) -> None:
        """Raise if a program goes by values that change with the point or the seed."""
        memory = self.memory
        if any(memory.ids(x) is not None for x in tensors):
            raise UnsupportedError(f"a reverse rule reads the gradient that it is given ({what})")
        if any(memory.varies(x) for x in tensors):
            raise UnsupportedError(f"the function goes by its values ({what})")

    def _followed(self, func: Any, args: Any, kwargs: Any) -> Any:
        memory = self.memory
        if self.reach.large:
            memory.tidy()
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(x.layout is not torch.strided for x in tensors):
            raise UnsupportedError("sparse tensors on the way are not looked into")
        name = func._schema.name.removeprefix("aten::")
        if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
            masks = [x for x in tensors if x.dtype is torch.bool]
            self.require_steady(masks if name in MASKED else tensors, name)
        reached = [x for x in tensors if memory.ids(x) is not None]
        name = name if name.startswith("__") else name.rstrip("_")
        if reached and name not in self._rules and torch.Tag.pointwise not in func.tags and name not in FRESH:
            try:
                with self:
                    result = _in_parts(func, args, kwargs)
            except (NotImplementedError, RuntimeError, TypeError, ArithmeticError):  # a mean divides by the size
                result = NotImplemented
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        outputs: list[Tensor] = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        written = _written(func, args, kwargs)
        random = torch.Tag.nondeterministic_seeded in func.tags
        if random or any(memory.varies(x) for x in tensors):
            for x in (*outputs, *written):
                memory.vary(x)
        if not reached or name in FRESH:
            for x in written:
                memory.write(x, None)
            return result
        if not written and all(memory.shares(x, tensors) for x in outputs):
            return result
        call = OpCall(self, func, name, _bound(func, args, kwargs), outputs)
        ids = self._sets(call, reached)
        changed = {id(x): x for x in written}
        for x, sets in zip(outputs, ids, strict=True):
            memory.write(x, sets)
            changed.pop(id(x), None)
        if changed:
            everything = self.reach.all_of(*[s for s in map(memory.ids, reached) if s is not None])
            for x in changed.values():
                memory.write(x, np.full(tuple(x.shape), everything))
        return result

    def _sets(self, call: OpCall, reached: Sequence[Tensor]) -> Sequence[Ids | None]:
        rule = self._rules.get(call.name)
        if rule is None and torch.Tag.pointwise in call.function.tags:
            rule = self._rules["pointwise"]
        found = None
        if rule is not None:
            try:
                found = rule(call)
            except (NotImplementedError, RuntimeError, ValueError, IndexError, TypeError, KeyError):
                found = None  # another overload than the rule is about
        if found is None or any(
            ids is not None and not _fits(ids, x) for ids, x in zip(found, call.outputs, strict=True)
        ):
            everything = self.reach.all_of(*[ids for ids in map(self.memory.ids, reached) if ids is not None])
            return [np.full(tuple(x.shape), everything) for x in call.outputs]
        return found


def _in_parts(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation by simpler ones that it is made of, if there are any."""
    from torch._decomp import decomposition_table  # takes a second to import, and is rarely needed

    if func in decomposition_table:
        return decomposition_table[func](*args, **kwargs)
    return func.decompose(*args, **kwargs)


def _fits(ids: Ids, x: Tensor) -> bool:
    try:
        np.broadcast_to(ids, tuple(x.shape))
    except ValueError:
        return False
    return True


def _bound(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    arguments = func._schema.arguments
    bound = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    return bound | {argument.name: x for argument, x in zip(arguments, args, strict=False)} | kwargs


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that an operation writes to."""
    if not func._schema.is_mutable:
        return []
    bound = _bound(func, args, kwargs)
    names = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [x for name in names for x in tree_leaves(bound.get(name)) if isinstance(x, Tensor)]
