"""Sparsity patterns of PyTorch functions: one sweep under a dispatch mode that follows index sets through every op.

The ids of a tensor are kept by the storage that it lies in (`SetIdTable`). Views share storages, so they need no rules,
and all of them see what is written in place. `sparsity_rules.py` has the rules.
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
from elementgrad._backends.torch._compat import (
    DisableTorchFunction,
    PlainDispatchMode,
    decomposition_table,
    derivative_is_missing,
    storage_key,
    tree_leaves,
)
from elementgrad._backends.torch.isolate import in_mode, isolated, without_autocast
from elementgrad._backends.torch.sparsity_rules import RULES, OpCall
from elementgrad._cleanup import AttributePatch, Replace, assign, scope
from elementgrad._sparsity.index_sets import EMPTY, Ids, IndexSets
from elementgrad._sparsity.pattern import Pattern

Tensor = torch.Tensor
Evaluate = Callable[[], tuple[list[Any], list[Tensor]]]
"""Runs the function once more; returns where its gradients end, and its outputs."""


def find_pattern(
    evaluate: Evaluate,
    jvp: Callable[[Tensor], Any],
    y: Tensor,
    output: int,
    x: Tensor | None,
    input: int,
    local: bool,
) -> Pattern | None:
    """Return the pattern by a reverse sweep, or by a forward one if an op has no reverse rule; None without a path.

    Only values that vary with `x` are unknown. All other constants are known, and zeros among them cut dependences.
    Without `x` no constant is known, and with `local` all are.
    """
    try:
        return _find_by_reverse(_sparsity_mode(y.numel(), x, local), evaluate, output, input)
    except (NotImplementedError, RuntimeError) as error:
        if x is None or not derivative_is_missing(error):
            raise
    return _find_by_forward(_sparsity_mode(x.numel(), x, local), jvp, x)


def _sparsity_mode(size: int, x: Tensor | None, local: bool) -> "SparsityMode":
    mode = SparsityMode(size, constants_known=local or x is not None)
    if x is not None and not local:
        mode.table.mark_varying(x)
    return mode


def _find_by_reverse(mode: "SparsityMode", evaluate: Evaluate, output: int, input: int) -> Pattern | None:
    with mode.propagate():
        leaves, outputs = evaluate()
    y = outputs[output]
    if not y.requires_grad:
        return None
    seed = mode.seed_like(y)
    with isolated(None), without_autocast(), mode.propagate():
        (swept,) = torch.autograd.grad(y, leaves[input], seed, allow_unused=True)
    return None if swept is None else mode.pattern(swept).T


def _find_by_forward(mode: "SparsityMode", jvp: Callable[[Tensor], Any], x: Tensor) -> Pattern:
    seed = mode.seed_like(x)
    with mode.propagate():
        (swept,) = jvp(seed[None])
    return mode.pattern(swept[0])


MASK_INDEXED = ("index", "masked_select", "_unsafe_index")
"""Ops whose output shape depends on masks alone."""
FACTORIES = [
    *("zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty", "new_full"),
    *("new_empty_strided", "_efficientzerotensor"),
]
"""Ops that take only the shape and dtype from a tensor."""


class SparsityMode(PlainDispatchMode):
    """Follows ops: which tensors vary with the point, and which elements of a seed each element depends on."""

    def __init__(self, size: int, constants_known: bool):
        super().__init__()
        self.sets = IndexSets(size)
        self.table = SetIdTable(self.sets)
        self.constants_known = constants_known
        """True if the values of constants that do not vary may be used."""

    def seed_like(self, x: Tensor) -> Tensor:
        """Return a seed in the shape of x, each element of which depends on itself."""
        seed = torch.ones_like(x, requires_grad=False, memory_format=torch.contiguous_format)
        self.table.write(seed, self.sets.seed_ids(tuple(seed.shape)))
        return seed

    def pattern(self, x: Tensor) -> Pattern:
        """Return a row for each element of x, with the elements of the seed that it may depend on."""
        ids = self.table.ids(x)
        if ids is None:
            return Pattern.from_entries([], [], (x.numel(), self.sets.size))
        return self.sets.pattern(ids)

    @contextmanager
    def propagate(self) -> Iterator[None]:
        """Follow the ops of a block."""
        with _watch_exports(lambda x, name: self.require_constant([x], name)), in_mode(self):
            yield

    def require_constant(self, tensors: Sequence[Tensor], what: str) -> None:
        """Raise if a program goes by values that change with the point or the seed."""
        if any(self.table.ids(x) is not None for x in tensors):
            raise UnsupportedError(f"a reverse rule reads the gradient that it is given ({what})")
        if any(self.table.varies(x) for x in tensors):
            raise UnsupportedError(f"the function goes by its values ({what})")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with DisableTorchFunction():
            return self._run_op(func, args, kwargs or {})

    def _run_op(self, func: Any, args: Any, kwargs: Any) -> Any:
        table = self.table
        if self.sets.is_large:
            table.compact()
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(x.layout is not torch.strided for x in tensors):
            raise UnsupportedError("sparse tensors inside the function are not supported")
        name = func._schema.name.removeprefix("aten::")
        if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
            masks = [x for x in tensors if x.dtype is torch.bool]
            self.require_constant(masks if name in MASK_INDEXED else tensors, name)
        dependent = [x for x in tensors if table.ids(x) is not None]
        name = name if name.startswith("__") else name.rstrip("_")
        if dependent and name not in RULES and torch.Tag.pointwise not in func.tags and name not in FACTORIES:
            try:
                with self:
                    result = _decompose(func, args, kwargs)
            except (NotImplementedError, RuntimeError, TypeError, ArithmeticError):  # a mean divides by the size
                result = NotImplemented
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        outputs: list[Tensor] = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        written = _written_tensors(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags or any(table.varies(x) for x in tensors):
            for x in (*outputs, *written):
                table.mark_varying(x)
        if not dependent or name in FACTORIES:
            for x in written:
                table.write(x, None)
            return result
        if not written and all(table.shares_storage(x, tensors) for x in outputs):
            return result
        call = OpCall(self, func, name, _bind_arguments(func, args, kwargs), outputs)
        others = {id(x): x for x in written}
        for x, ids in zip(outputs, self._apply_rule(call, dependent), strict=True):
            table.write(x, ids)
            others.pop(id(x), None)
        if others:
            union = self._union_all(dependent)
            for x in others.values():
                table.write(x, np.full(tuple(x.shape), union))
        return result

    def _apply_rule(self, call: OpCall, dependent: Sequence[Tensor]) -> Sequence[Ids | None]:
        rule = RULES.get(call.name)
        if rule is None and torch.Tag.pointwise in call.function.tags:
            rule = RULES["pointwise"]
        results = None
        if rule is not None:
            try:
                results = rule(call)
            except (NotImplementedError, RuntimeError, ValueError, IndexError, TypeError, KeyError):
                results = None  # another overload than the rule is about
        if results is None or any(
            ids is not None and not _broadcasts(ids, x) for ids, x in zip(results, call.outputs, strict=True)
        ):
            union = self._union_all(dependent)
            return [np.full(tuple(x.shape), union) for x in call.outputs]
        return results

    def _union_all(self, dependent: Sequence[Tensor]) -> int:
        return self.sets.union_all(*[ids for ids in map(self.table.ids, dependent) if ids is not None])


def _decompose(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an op as the simpler ops that it is made of, if there are any."""
    table = decomposition_table()
    return table[func](*args, **kwargs) if func in table else func.decompose(*args, **kwargs)


def _broadcasts(ids: Ids, x: Tensor) -> bool:
    try:
        np.broadcast_to(ids, tuple(x.shape))
    except ValueError:
        return False
    return True


def _bind_arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    arguments = func._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    return defaults | {argument.name: x for argument, x in zip(arguments, args, strict=False)} | kwargs


def _written_tensors(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    if not func._schema.is_mutable:
        return []
    arguments = _bind_arguments(func, args, kwargs)
    names = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [x for name in names for x in tree_leaves(arguments.get(name)) if isinstance(x, Tensor)]


@dataclass
class StorageCell:
    """The ids of one storage, and whether it varies."""

    weak: StorageWeakRef
    """Keeps the storage alive, so that no other one gets its address."""
    unit: int
    """Bytes per id: those of a real number."""
    ids: np.ndarray | None = None
    """The set that each number in it depends on; None if none does."""
    varies: bool = False
    """True if its values depend on the point of the derivative, so that they are not known in general."""


class SetIdTable:
    """The ids of tensors, and which of them vary."""

    SLACK = 256
    """Cells of storages that are gone are dropped after this many new ones."""

    def __init__(self, sets: IndexSets):
        self._sets = sets
        self._cells: dict[int, StorageCell] = {}
        self._limit = self.SLACK

    def ids(self, x: Tensor) -> Ids | None:
        """Return the ids of a tensor; None if it does not depend on the seed."""
        cell = self._cells.get(storage_key(x))
        if cell is None or cell.ids is None:
            return None
        view = _view_ids(cell, x)
        ids = view[..., 0] if view.shape[-1] == 1 else self._sets.reduce(view, [-1])  # both parts of a complex number
        return ids if ids.any() else None

    def varies(self, x: Tensor) -> bool:
        """Return True if the values of a tensor depend on the point of the derivative."""
        cell = self._cells.get(storage_key(x))
        return cell is not None and cell.varies

    def mark_varying(self, x: Tensor) -> None:
        """Note that the values of a tensor depend on the point of the derivative."""
        self._cell(x).varies = True

    def write(self, x: Tensor, ids: Ids | None) -> None:
        """Set the ids of a tensor."""
        cell = self._cells.get(storage_key(x))
        if ids is None and (cell is None or cell.ids is None):
            return
        cell = self._cell(x)
        if cell.ids is None:
            cell.ids = np.zeros(-(-x.untyped_storage().nbytes() // cell.unit), dtype=np.int64)
        _view_ids(cell, x)[...] = EMPTY if ids is None else np.broadcast_to(ids, tuple(x.shape))[..., None]

    def shares_storage(self, x: Tensor, others: list[Tensor]) -> bool:
        """Return True if a tensor lies in the storage of another."""
        key = storage_key(x)
        return any(key == storage_key(other) for other in others)

    def compact(self) -> None:
        """Drop the sets that no tensor depends on any more."""
        self._drop_expired()
        self._sets.compact([cell.ids for cell in self._cells.values() if cell.ids is not None])

    def _drop_expired(self) -> None:
        self._cells = {key: cell for key, cell in self._cells.items() if not cell.weak.expired()}
        self._limit = 2 * len(self._cells) + self.SLACK

    def _cell(self, x: Tensor) -> StorageCell:
        key = storage_key(x)
        cell = self._cells.get(key)
        if cell is None:
            if len(self._cells) >= self._limit:
                self._drop_expired()
            cell = StorageCell(StorageWeakRef(x.untyped_storage()), _real_size(x))
            self._cells[key] = cell
        return cell


def _real_size(x: Tensor) -> int:
    return x.element_size() // 2 if x.is_complex() else x.element_size()


def _view_ids(cell: StorageCell, x: Tensor) -> np.ndarray:
    """Return a view of the storage's ids in the tensor's shape, with a last axis for the parts of complex numbers."""
    if _real_size(x) != cell.unit:
        raise UnsupportedError("the bytes of one dtype are taken for those of another")
    parts, ids = x.element_size() // cell.unit, cell.ids
    assert ids is not None
    strides = [step * parts * ids.itemsize for step in x.stride()]
    start: Any = ids[x.storage_offset() * parts :]
    return np.lib.stride_tricks.as_strided(start, (*x.shape, parts), (*strides, ids.itemsize))


# Values also leave PyTorch without an op, as arrays, lists or addresses, and nothing is known of what comes back. The
# methods are patched, since a mode of `__torch_function__` is off inside what it was called for, as a backward pass.
_local = threading.local()


@contextmanager
def _watch_exports(callback: Callable[[Tensor, str], None]) -> Iterator[None]:
    """Call back for each tensor that this thread exports in a block; the callback may raise."""
    with scope():
        assign(_local, "callbacks", (*getattr(_local, "callbacks", ()), callback))
        _patch.enter()
        yield


def _install(replace: Replace) -> None:
    for name in ("numpy", "tolist", "__array__", "__dlpack__", "data_ptr"):
        replace(torch.Tensor, name, _with_callbacks(getattr(torch.Tensor, name), name))


def _with_callbacks(original: Any, name: str) -> Any:
    @wraps(original)
    def export(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        for callback in getattr(_local, "callbacks", ()):
            callback(x, name)
        return original(x, *args, **kwargs)

    return export


_patch = AttributePatch(_install)
