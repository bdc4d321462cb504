"""Gradients of elements in a sharded model: the mean over all processes, k numbers at the end of a backward."""

from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import distributed

from elementgrad.backends.torch.training.part import Part, part_of
from elementgrad.errors import FrameworkError

Tensor = torch.Tensor
_parts: WeakValueDictionary[int, Part] = WeakValueDictionary()
"""All that are exchanged, in the order in which they came, which is the same in all processes."""
_numbers = count()
_heard: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""For each model the last backward that it heard of."""


def hear(part: Part) -> None:
    """Let all processes have the same gradients of a part, if its parameter is spread over them.

    What a leaf has heard before and every process has alike is its own mean, and what one alone has heard while
    gradients were not synchronised is reduced with the next that are: so each gradient counts once, in any order.
    """
    if part.weight.home.spread:
        part.number = next(_numbers)
        _parts[part.number] = part
        part.hook = part.leaf.register_post_accumulate_grad_hook(_hear)


def unhear(part: Part) -> None:
    """Leave the gradients of a part alone."""
    if part.hook is not None:
        part.hook.remove()
        part.hook = None
        _parts.pop(part.number, None)


def _hear(leaf: Tensor) -> None:
    part = part_of(leaf)
    assert part is not None
    if len(leaf._post_accumulate_grad_hooks) > 1:  # type: ignore[attr-defined]
        raise FrameworkError(
            f"a hook that runs when {part.key} has its gradient would see that of this process alone; use the gradient "
            "after backward"
        )
    model, sweep = part.weight.home.together, torch._C._current_graph_task_id()
    if _heard.get(model) != sweep:  # once for each backward, after all of its leaves
        _heard[model] = sweep
        reduce = partial(_reduce, model)
        torch.autograd.Variable._execution_engine.queue_callback(reduce)  # type: ignore[no-untyped-call]


@torch.no_grad()
def _reduce(model: Any) -> None:
    """For all that train in a model: a process may have heard nothing of what another has heard of."""
    homes = [(part, part.weight.home) for part in _parts.values() if part.weight is not None]
    parts = [part for part, home in homes if home.together is model and home.synchronising]
    if any(part.leaf.grad is not None and part.leaf.grad.requires_grad for part in parts):
        raise FrameworkError("gradients of a sharded model are reduced as numbers; leave out create_graph")
    if any(part.weight.home.scaled for part in parts):
        raise FrameworkError(
            "gradients of elements are the mean over all processes; leave set_gradient_divide_factor out, and scale "
            "the loss instead"
        )
    exchanged: dict[tuple[Any, torch.dtype], list[Part]] = {}
    for part in parts:
        exchanged.setdefault((part.weight.home.processes, _exchanged(part.leaf)), []).append(part)
    for (processes, dtype), some in exchanged.items():
        _mean(some, processes, dtype)


def _mean(parts: Sequence[Part], processes: Any, dtype: torch.dtype) -> None:
    heard = [part.leaf.grad is not None for part in parts]
    each = [_real(torch.zeros_like(part.leaf) if part.leaf.grad is None else part.leaf.grad) for part in parts]
    # A process whose data did not reach a leaf adds nothing, and must still hear what the others found.
    flags = torch.tensor(heard, dtype=dtype, device=each[0].device)
    whole = torch.cat([*[gradient.to(dtype) for gradient in each], flags])
    distributed.all_reduce(whole, group=processes)
    *sums, counts = whole.split([*[len(gradient) for gradient in each], len(parts)])
    size = distributed.get_world_size(processes)
    for part, total, heard_by in zip(parts, sums, counts.tolist(), strict=True):
        if heard_by:
            mean = (total / size).to(_real(part.leaf).dtype)
            part.leaf.grad = torch.view_as_complex(mean.view(-1, 2)) if part.leaf.is_complex() else mean


def _exchanged(leaf: Tensor) -> torch.dtype:
    """The dtype that a leaf's gradient is summed in: halves lose too much."""
    return torch.float64 if _real(leaf).dtype is torch.float64 else torch.float32


def _real(values: Tensor) -> Tensor:
    values = values.detach()
    return torch.view_as_real(values).reshape(-1) if values.is_complex() else values
