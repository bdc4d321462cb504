"""What is measured of every step of a second run: derivatives going forward, gradients coming back, numbers."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from elementgrad import tree
from elementgrad.backends.torch.calls import clock
from elementgrad.backends.torch.explaining.endings import BOUNDS, largest, tangent_of, why_none
from elementgrad.backends.torch.explaining.measures import Meter, Ran
from elementgrad.backends.witness import Pulled, Pushed, Seen, arriving

Tensor = torch.Tensor


class Tangents(Meter):
    """The largest derivative of what a step takes and gives by the elements that were asked for."""

    def before(self, taken: Sequence[Tensor], writes: bool) -> Any:
        tangents = [tangent_of(x) for x in taken]
        if writes:
            tangents = [None if t is None else t.clone() for t in tangents]
        return tangents if any(t is not None for t in tangents) else None

    def after(self, ran: Ran, before: Any) -> Pushed:
        if before is None:
            return Pushed(0.0, 0.0)
        arrives = max([largest(t) for t in before if t is not None], default=0.0)
        leaves = max([largest(t) for x in ran.made if (t := tangent_of(x)) is not None], default=0.0)
        cause = None
        if arrives > 0 and (leaves == 0 or ran.name in BOUNDS):
            cause = why_none(ran, before)
        return Pushed(arrives, leaves, cause)


class Gradients(Meter):
    """Hooks on the nodes that each step made, which note what arrives from behind and what leaves at the front.

    Where a step takes the source itself, what leaves counts at the elements asked for alone.
    """

    def __init__(self, leads: Callable[[Any], bool], source: Callable[[], int], positions: np.ndarray):
        self._leads = leads
        self._source = source
        self._positions = positions

    def after(self, ran: Ran, before: Any) -> "Flow":
        flow = Flow()
        start, now = ran.start, clock()
        tops: set[Any] = {x.grad_fn for x in ran.made if x.grad_fn is not None and x.grad_fn._sequence_nr() >= start}
        seen, ahead = set(tops), list(tops)
        while ahead:
            node = ahead.pop()
            ends, first = [], True
            for slot, (following, _) in enumerate(node.next_functions):
                if following is None or hasattr(following, "variable"):
                    continue
                number = following._sequence_nr()
                if start <= number < now:
                    if following not in seen:
                        seen.add(following)
                        ahead.append(following)
                elif self._leads(following):
                    ends.append(slot)
                    first &= number == self._source()
            node.register_hook(note_flow(flow, node in tops, ends, self._positions if ends and first else None))
        return flow


class Flow:
    """What came by one step of a backward sweep."""

    def __init__(self) -> None:
        self.arrives: float | None = None
        self.leaves: float | None = None
        self.there: float | None = None
        self.dead = True

    def pulled(self) -> Pulled | None:
        """The sizes, if anything came by."""
        if self.arrives is None and self.leaves is None:
            return None
        arrives, leaves = self.arrives or 0.0, self.leaves or 0.0
        return Pulled(arrives, leaves, arrives if self.there is None else self.there, self.dead)


def note_flow(flow: Flow, top: bool, ends: Sequence[int], positions: np.ndarray | None = None) -> Any:
    """A hook for a node that notes what arrives, if it is the last of its step, and what leaves at some slots.

    With positions, at those elements alone of what leaves, and of what arrives if it is of the same shape.
    """
    chosen = None if positions is None else torch.from_numpy(positions.copy())

    def hook(inward: Sequence[Tensor | None], outward: Sequence[Tensor | None]) -> None:
        came = whole = [g.detach() for g in outward if g is not None]
        flow.dead = flow.dead and not (top and any(bool(g.any()) for g in came))
        for slot in ends:
            went = inward[slot] if slot < len(inward) else None
            if went is None:
                continue
            same = whole[0] if whole and whole[0].shape == went.shape else None
            if chosen is not None:
                went = _only(went, chosen)
                came = came if same is None else [same.reshape(-1)[chosen]]
            flow.leaves = _worst([flow.leaves, largest(went)])
            if not math.isfinite(flow.leaves) and whole:
                bad = (~torch.isfinite(went.detach())).cpu().numpy()
                there = arriving(whole[0].abs().double().cpu().numpy(), bad) if bad.any() else None
                flow.there = flow.there if there is None else max(flow.there or 0.0, there)
        if top:
            flow.arrives = _worst([flow.arrives, *map(largest, came)])

    return hook


def _only(x: Tensor, positions: Tensor) -> Tensor:
    """Zeros, but for some flat positions of a gradient."""
    x = x.detach()
    kept = torch.zeros(x.numel(), dtype=torch.bool, device=x.device)
    kept[positions.to(x.device)] = True
    return torch.where(kept.reshape(x.shape), x, torch.zeros_like(x))


def _worst(sizes: Sequence[float | None]) -> float:
    known = [size for size in sizes if size is not None]
    return math.nan if any(map(math.isnan, known)) else max(known, default=0.0)


class Numbers(Meter):
    """Whether the numbers of each step are finite."""

    all = True

    def before(self, taken: Sequence[Tensor], writes: bool) -> Any:
        return all(map(_finite, taken)), all(bool(x.detach().all()) for x in taken)

    def after(self, ran: Ran, before: Any) -> Seen:
        given = [x for x in tree.flat((ran.args, ran.kwargs)) if isinstance(x, float)]
        finite, nonzero = before
        grows = nonzero and not any(bool(x.detach().isnan().any()) for x in ran.made)
        return Seen(finite and all(map(math.isfinite, given)), all(map(_finite, ran.made)), grows)


def _finite(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex()) or bool(torch.isfinite(x.detach()).all())


class Prints(Meter):
    """A number for what each step takes and gives, which is another if any bit of theirs is another."""

    def before(self, taken: Sequence[Tensor], writes: bool) -> Any:
        return _print(taken)

    def after(self, ran: Ran, before: Any) -> tuple[int, int]:
        return before, _print(ran.made)


def _print(tensors: Sequence[Tensor]) -> int:
    total = 0
    for number, x in enumerate(tensors, 1):
        if x.is_floating_point() and x.numel():
            bits = x.detach().contiguous().view(BITS[x.element_size()]).reshape(-1)
            places = torch.arange(1, 2 * len(bits), 2, device=x.device)
            total += number * int((bits.long() * (places * 2654435761)).sum())  # it wraps around, which is no harm
    return total


BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
