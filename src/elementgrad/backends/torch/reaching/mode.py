"""Watching a sweep: every operation of it, with the sets that its tensors depend on."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from elementgrad.backends.linear import UnsupportedError
from elementgrad.backends.torch.ambient import in_mode
from elementgrad.backends.torch.reaching.memory import Memory
from elementgrad.backends.torch.reaching.reads import noticing
from elementgrad.sparsity.reach import Ids, Reach

Tensor = torch.Tensor
MASKED = ("index", "masked_select", "_unsafe_index")
"""Of what these give, the shape depends on masks alone."""
FRESH = [
    *("zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty", "new_full"),
    *("new_empty_strided", "_efficientzerotensor"),
]
"""What takes from a tensor its shape and dtype alone."""


@dataclass
class Call:
    """One operation as it was called, for the rules."""

    mode: "Reaching"
    function: Any
    name: str
    arguments: dict[str, Any]
    """By the names of its schema, what was left out too."""
    outputs: list[Tensor]

    @property
    def reach(self) -> Reach:
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


Rule = Callable[[Call], "Sequence[Ids | None] | None"]
"""The sets of each output; None for a call that the rule does not cover."""


class Reaching(TorchDispatchMode):
    """Watches operations: which tensors vary with the point, and which elements of a seed each element depends on."""

    def __init__(self, size: int, rules: dict[str, Rule], trusting: bool):
        super().__init__()
        self.reach = Reach(size)
        self.memory = Memory(self.reach)
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
        call = Call(self, func, name, _bound(func, args, kwargs), outputs)
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

    def _sets(self, call: Call, reached: Sequence[Tensor]) -> Sequence[Ids | None]:
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
