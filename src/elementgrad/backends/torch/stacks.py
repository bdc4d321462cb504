"""Sweeps that run as one stack: what `torch.func.vmap` does for a function of one tensor, without its trees."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch._C._functorch import _add_batch_dim, _remove_batch_dim
from torch._C._functorch import _vmap_decrement_nesting as leave_vmap  # type: ignore[attr-defined]
from torch._C._functorch import _vmap_increment_nesting as enter_vmap  # type: ignore[attr-defined]
from torch._functorch.predispatch import lazy_load_decompositions
from torch.autograd.graph import disable_saved_tensors_hooks

from elementgrad.cleanup import enter, entered, scope

Tensor = torch.Tensor
HOOKS = "saved tensor hooks do not go with a stack of sweeps"


def together(sweep: Callable[[Tensor], Sequence[Tensor | None]], seeds: Tensor) -> list[Tensor | None]:
    """Sweeps from a stack of seeds.

    Not by `is_grads_batched=True`, which knows fewer rules and worse ones.
    """
    lazy_load_decompositions()
    count = len(seeds)
    with scope():
        enter(no_advice())
        enter(disable_saved_tensors_hooks(HOOKS))
        level = enter_vmap(count, "error")
        try:
            swept = sweep(_add_batch_dim(seeds, 0, level))
            return [None if x is None else _remove_batch_dim(x, level, count, 0) for x in swept]
        finally:
            leave_vmap()


@contextmanager
def no_advice() -> Iterator[None]:
    """Leave out PyTorch's warnings about speed: they are about our stacks and not about the user's code."""
    with entered(warnings.catch_warnings()):
        warnings.filterwarnings("ignore", message=".*performance drop")
        yield
