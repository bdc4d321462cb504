"""Where the elements that can move with the source meet a gradient, measured in one run and its way back."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad

from elementgrad import tree
from elementgrad.backends.torch.explaining.measures import Meter, Ran
from elementgrad.backends.torch.explaining.structure import structured
from elementgrad.backends.torch.quiet import generators, undisturbed
from elementgrad.backends.touching import Again, guessed, ties, touched

Tensor = torch.Tensor
KINDS = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool}
KINDS |= {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
"""What NumPy has numbers for."""


class Meeting(Meter):
    """Masks of the elements that can move with some of the source's, and hooks that see whether a gradient arrives."""

    def __init__(self, source: Callable[[], int], mask: np.ndarray):
        self._source = source
        self._mask = mask
        self.masks: dict[int, np.ndarray] = {}
        self.alive: set[int] = set()

    def before(self, taken: Sequence[Tensor], writes: bool) -> Any:
        """The numbers, if the step may overwrite them."""
        self.masks.setdefault(self._source(), self._mask)
        return {id(x): x.detach().clone() for x in taken} if writes else {}

    def after(self, ran: Ran, before: Any) -> None:
        """Mask what the step gave."""
        masks = {
            id(x): mask for x, n in zip(ran.taken, ran.takes, strict=True) if (mask := self.masks.get(n)) is not None
        }
        if not masks:
            return
        known = None if before else structured(ran, masks)
        found = tried(ran, before, masks) if known is None else known
        made = {id(x): mask for x, mask in zip(ran.made, found, strict=True)}
        spread = any(mask.any() for mask in made.values())
        for x, number in ran.given:
            mask = made.get(id(x))
            mask = np.full(tuple(x.shape), spread) if mask is None else mask  # it shares memory with one of them
            if mask.any():
                self.masks[number] = mask
                if x.requires_grad and (x.is_floating_point() or x.is_complex()):
                    x.register_hook(self._note(number, mask))

    def _note(self, number: int, mask: np.ndarray) -> Callable[[Tensor], None]:
        everywhere = bool(mask.all())

        def note(gradient: Tensor) -> None:
            dense = gradient.detach() if gradient.layout == torch.strided else gradient.detach().to_dense()
            if bool((dense if everywhere else dense[torch.from_numpy(mask).to(gradient.device)]).any()):
                self.alive.add(number)

        return note


def tried(ran: Ran, before: dict[int, Tensor], masks: dict[int, np.ndarray]) -> list[np.ndarray]:
    """Masks for what a step made or wrote to. The user's own functions are not run on numbers that are not theirs."""
    shapes = [tuple(x.shape) for x in ran.made]
    repeated = repeatable(ran, before)
    if repeated is None:
        return guessed([masks.get(id(x)) for x in ran.taken], shapes)
    again, taken, numbers = repeated
    return touched(again, numbers, [masks.get(id(x)) for x in taken], shapes)


def tied(ran: Ran, masks: dict[int, np.ndarray]) -> bool:
    """Whether elements of what a choice takes are level with those that it took."""
    repeated = repeatable(ran, {})
    if repeated is None:
        return False
    again, taken, numbers = repeated
    return ties(again, numbers, [masks.get(id(x)) for x in taken], [x.dtype == torch.bfloat16 for x in taken])


def repeatable(ran: Ran, before: dict[int, Tensor]) -> tuple[Again, list[Tensor], list[np.ndarray]] | None:
    """A step that can be run on other numbers, the tensors that it takes, and their numbers; None if it cannot be."""
    flat = tree.flat((ran.args, dict(ran.kwargs)))
    taken = {id(x): x for x in flat if isinstance(x, Tensor)}
    own = getattr(ran.func, "__name__", "") == "apply" or any(map(callable, flat))
    if own or not all(x.layout == torch.strided and x.dtype in KINDS for x in taken.values()):
        return None

    def again(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        others = {
            key: torch.from_numpy(array.copy()).to(x.device, x.dtype)
            for (key, x), array in zip(taken.items(), arrays, strict=True)
        }

        def other(x: Any) -> Any:
            return others[id(x)] if isinstance(x, Tensor) else x

        with undisturbed(None), torch.no_grad():
            before = generators()[0]
            result = ran.func(*tree.mapped(ran.args, other), **tree.mapped(dict(ran.kwargs), other))
            if not torch.equal(before, generators()[0]):
                raise RuntimeError("it draws random numbers, which would be others")
        results = [x for x in tree.flat(result) if isinstance(x, Tensor)]
        written = [others[id(x)] for x in ran.made if id(x) in others]
        return [_array(x) for x in {id(x): x for x in (*results, *written)}.values()]

    return again, list(taken.values()), [_array(before.get(key, x)) for key, x in taken.items()]


def _array(x: Tensor) -> np.ndarray:
    x = forward_ad.unpack_dual(x).primal.detach().cpu().resolve_conj().resolve_neg()
    return (x.float() if x.dtype == torch.bfloat16 else x).numpy()
