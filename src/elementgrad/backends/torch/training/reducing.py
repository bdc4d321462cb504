"""Gradients of elements in a sharded model: the mean over all processes, k numbers at the end of a backward."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed

from elementgrad.backends.torch.training.part import Part
from elementgrad.errors import FrameworkError

Tensor = torch.Tensor
Module = torch.nn.Module


class Reduction:
    """Leaves that all processes have, whose gradients are to be the same in all of them.

    What a leaf has heard before and every process has alike is its own mean, and what one alone has heard while
    gradients were not synchronised is reduced with the next that are: so each gradient counts once, in any order.
    """

    def __init__(self, processes: Any):
        self._processes = processes
        self._parts: list[Part] = []
        self._handles: dict[int, Any] = {}
        self._sweep = -1

    def add(self, part: Part) -> None:
        """Reduce the gradients of a part from now on."""
        self._parts.append(part)
        self._handles[id(part)] = part.leaf.register_post_accumulate_grad_hook(self._hear)

    def remove(self, part: Part) -> None:
        """Leave the gradients of a part alone."""
        if id(part) in self._handles:
            self._handles.pop(id(part)).remove()
            self._parts = [other for other in self._parts if other is not part]

    def _hear(self, leaf: Tensor) -> None:
        sweep = torch._C._current_graph_task_id()
        if sweep != self._sweep:  # once for each backward, after all of its leaves
            self._sweep = sweep
            torch.autograd.Variable._execution_engine.queue_callback(self._reduce)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _reduce(self) -> None:
        parts = [part for part in self._parts if part.weight is not None and part.weight.synchronising]
        if any(part.leaf.grad is not None and part.leaf.grad.requires_grad for part in parts):
            raise FrameworkError("gradients of a sharded model are reduced as numbers; leave out create_graph")
        for dtype in (torch.float32, torch.float64):
            self._mean([part for part in parts if _exchanged(part.leaf) is dtype], dtype)

    def _mean(self, parts: Sequence[Part], dtype: torch.dtype) -> None:
        if not parts:
            return
        heard = [part.leaf.grad is not None for part in parts]
        each = [_real(torch.zeros_like(part.leaf) if part.leaf.grad is None else part.leaf.grad) for part in parts]
        # A process whose data did not reach a leaf adds nothing, and must still hear what the others found.
        flags = torch.tensor(heard, dtype=dtype, device=each[0].device)
        whole = torch.cat([*[gradient.to(dtype) for gradient in each], flags])
        distributed.all_reduce(whole, group=self._processes)
        *sums, counts = whole.split([*[len(gradient) for gradient in each], len(parts)])
        count = distributed.get_world_size(self._processes)
        for part, total, heard_by in zip(parts, sums, counts.tolist(), strict=True):
            if heard_by:
                mean = (total / count).to(_real(part.leaf).dtype)
                part.leaf.grad = torch.view_as_complex(mean.view(-1, 2)) if part.leaf.is_complex() else mean


def _exchanged(leaf: Tensor) -> torch.dtype:
    """The dtype that a leaf's gradient is summed in: halves lose too much."""
    return torch.float64 if _real(leaf).dtype is torch.float64 else torch.float32


def _real(values: Tensor) -> Tensor:
    values = values.detach()
    return torch.view_as_real(values).reshape(-1) if values.is_complex() else values
