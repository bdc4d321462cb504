"""What is measured of every step of a second run: derivatives going forward, gradients coming back, numbers."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad

from elementgrad import tree
from elementgrad.backends.torch.calls import clock
from elementgrad.backends.torch.explaining.measures import Meter, Ran
from elementgrad.backends.torch.functions import aside
from elementgrad.backends.witness import Pulled, Pushed, Seen, bounded

Tensor = torch.Tensor
CHOOSES = {"max", "min", "amax", "amin", "topk", "maximum", "minimum", "max_pool1d", "max_pool2d", "sort", "kthvalue"}
BOUNDS = {"maximum", "minimum"}
SUMS = {"sum", "mean", "add", "sub", "__rsub__", "matmul", "mm", "bmm", "mv", "dot", "linear", "einsum", "addmm"}
SUMS |= {"baddbmm", "conv1d", "conv2d", "conv3d", "cumsum", "layer_norm", "group_norm", "logsumexp", "bilinear"}
PRODUCTS = {"mul", "mul_", "__rmul__", "__imul__", "div", "true_divide"}


class Tangents(Meter):
    """The largest derivative of what a step takes and gives by the elements that were asked for."""

    def before(self, taken: Sequence[Tensor]) -> Any:
        tangents = [_tangent(x) for x in taken]
        return [None if t is None else t.clone() for t in tangents] if any(t is not None for t in tangents) else None

    def after(self, ran: Ran, before: Any) -> Pushed:
        if before is None:
            return Pushed(0.0, 0.0)
        arrives = max([_largest(t) for t in before if t is not None], default=0.0)
        leaves = max([_largest(t) for x in ran.made if (t := _tangent(x)) is not None], default=0.0)
        cause = None
        if arrives > 0 and (leaves == 0 or ran.name in BOUNDS):
            cause = _why_none(ran, before)
        return Pushed(arrives, leaves, cause)


def _why_none(ran: Ran, before: Sequence[Tensor | None]) -> str | None:
    """Why a step gives no derivative, where its numbers say more than its name."""
    name = ran.name.removeprefix("linalg_")
    carrying = [(x, t) for x, t in zip(ran.taken, before, strict=True) if t is not None and bool(t.any())]
    x, tangent = carrying[0]
    if name in BOUNDS and len(carrying) == 1 and "out" not in ran.kwargs:
        (bound,) = [y for y in (*ran.args, *ran.kwargs.values()) if y is not x]
        return bounded(name == "maximum", bound.detach().double().cpu().numpy()) or "not-selected"
    if name in CHOOSES and ran.made and ran.made[0].is_floating_point():
        return "tie" if bool(torch.isin(x.detach()[tangent != 0], ran.made[0].detach()).any()) else "not-selected"
    if name in PRODUCTS:
        if len(carrying) > 1:
            return "stationary" if not bool(x.detach()[tangent != 0].any()) else "cancelled"
        others = [y for y in ran.args if y is not x and isinstance(y, (Tensor, float, int))]
        if others and bool(torch.as_tensor(others[0]).detach().ne(0).all()):
            return "underflow"
    if name in SUMS:
        return "cancelled" if _adds_up(ran, before) else "masked"
    return None


def _adds_up(ran: Ran, before: Sequence[Tensor | None]) -> bool:
    """Whether a sum gives something for parts that come in other amounts: then what came in had cancelled."""
    slots = {id(x): tangent for x, tangent in zip(ran.taken, before, strict=True) if tangent is not None}
    generator = torch.Generator().manual_seed(0)

    def other(x: Any) -> Any:
        tangent = slots.get(id(x)) if isinstance(x, Tensor) else None
        if tangent is None:
            return x
        amounts = torch.rand(tangent.shape, generator=generator, dtype=torch.float64).to(tangent) + 0.5
        return forward_ad.make_dual(forward_ad.unpack_dual(x).primal.detach(), tangent * amounts)

    with aside():
        again = ran.func(*tree.mapped(ran.args, other), **tree.mapped(dict(ran.kwargs), other))
    return any(bool(t.any()) for x in tree.flat(again) if isinstance(x, Tensor) and (t := _tangent(x)) is not None)


def _tangent(x: Tensor) -> Tensor | None:
    return forward_ad.unpack_dual(x).tangent if x.is_floating_point() or x.is_complex() else None


def _largest(x: Tensor) -> float:
    return float(x.detach().abs().max()) if x.numel() else 0.0


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

    def pulled(self) -> Pulled | None:
        """The sizes, if anything came by."""
        if self.arrives is None and self.leaves is None:
            return None
        arrives, leaves = self.arrives or 0.0, self.leaves or 0.0
        return Pulled(arrives, leaves, arrives if self.there is None else self.there)


def note_flow(flow: Flow, top: bool, ends: Sequence[int], positions: np.ndarray | None = None) -> Any:
    """A hook for a node that notes what arrives, if it is the last of its step, and what leaves at some slots.

    With positions, at those elements alone of what leaves, and of what arrives if it is of the same shape.
    """
    chosen = None if positions is None else torch.from_numpy(positions.copy())

    def hook(inward: Sequence[Tensor | None], outward: Sequence[Tensor | None]) -> None:
        came = [g.detach() for g in outward if g is not None]
        for slot in ends:
            went = inward[slot] if slot < len(inward) else None
            if went is None:
                continue
            same = came[0] if came and came[0].shape == went.shape else None
            if chosen is not None:
                went = went.reshape(-1)[chosen]
                same = None if same is None else same.reshape(-1)[chosen]
                came = came if same is None else [same]
            flow.leaves = _worst([flow.leaves, _size(went)])
            if same is not None and not math.isfinite(flow.leaves):
                flow.there = max(flow.there or 0.0, _size(same[~torch.isfinite(went)]))
        if top:
            flow.arrives = _worst([flow.arrives, *map(_size, came)])

    return hook


def _size(x: Tensor) -> float:
    """The largest in size; NaN if there is one."""
    return float(x.detach().abs().max()) if x.numel() else 0.0


def _worst(sizes: Sequence[float | None]) -> float:
    known = [size for size in sizes if size is not None]
    return math.nan if any(map(math.isnan, known)) else max(known, default=0.0)


class Numbers(Meter):
    """Whether the numbers of each step are finite."""

    all = True

    def before(self, taken: Sequence[Tensor]) -> Any:
        return all(map(_finite, taken))

    def after(self, ran: Ran, before: Any) -> Seen:
        return Seen(before, all(map(_finite, ran.made)))


def _finite(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex()) or bool(torch.isfinite(x.detach()).all())


class Prints(Meter):
    """A number for what each step takes and gives, which is another if any bit of theirs is another."""

    def before(self, taken: Sequence[Tensor]) -> Any:
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
