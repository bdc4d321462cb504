"""Everything else holds still while elements train, and moves again when the last of them are released."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.utils.weak import WeakIdKeyDictionary

from elementgrad.backends.torch.training.part import part_of
from elementgrad.backends.training import Standing
from elementgrad.cleanup import defer

Module = torch.nn.Module


@dataclass
class _Claim:
    before: bool
    gradient: torch.Tensor | None
    owners: set[object] = field(default_factory=set)
    """One for each call that froze the parameter."""
    keepers: set[object] = field(default_factory=set)
    """Those of them that were told to keep it as it was."""


_claims: WeakIdKeyDictionary = WeakIdKeyDictionary()


def claim(
    model: Module, owner: object, kept: Sequence[torch.Tensor] = ()
) -> list[tuple[torch.nn.Parameter, bool, bool]]:
    """Freeze the parameters of a model that nobody froze yet, but for those that are kept as they were.

    What the user has let train since stays so. Returns which of them were to train before, and which are kept.
    """
    spared = {id(tensor) for tensor in kept}
    for tensor in _tensors(model):
        held = _claims.get(tensor)
        if held is None:
            keep = id(tensor) in spared
            _claims[tensor] = _Claim(
                tensor.requires_grad, None if keep else tensor.grad, {owner}, {owner} if keep else set()
            )
            if not keep:
                tensor.requires_grad_(False)
                tensor.grad = None  # an optimizer moves whatever has a gradient, be it left over from before
            continue
        held.owners.add(owner)
        if id(tensor) in spared:
            defer(tensor.requires_grad_, tensor.requires_grad)
            held.keepers.add(owner)
            tensor.requires_grad_(held.before or tensor.requires_grad)
    return [(tensor, _claims[tensor].before, bool(_claims[tensor].keepers)) for tensor in _tensors(model)]


def claim_copies(tensors: list[tuple[torch.nn.Parameter, bool, bool]], owner: object) -> None:
    """Note that parameters are copies of frozen ones, which of those were to train before, and which are kept."""
    for tensor, before, kept in tensors:
        if tensor not in _claims:
            _claims[tensor] = _Claim(before, None)
        _claims[tensor].owners.add(owner)
        if kept:
            _claims[tensor].keepers.add(owner)


def standing(tensor: torch.Tensor) -> Standing:
    """Return whether a parameter trains as a whole."""
    held = _claims.get(tensor)
    able = tensor.is_floating_point() or tensor.is_complex()
    if held is None:
        return Standing(tensor.requires_grad, able=able)
    return Standing(held.before, claimed=True, kept=bool(held.keepers), able=able)


def leave(model: Module, owner: object) -> None:
    """Give up the claims of an owner; after the last, what was frozen may train again."""
    for tensor in _tensors(model):
        held = _claims.get(tensor)
        if held is None or owner not in held.owners:
            continue
        if len(held.owners) == 1:
            tensor.requires_grad_(held.before or tensor.requires_grad)
            tensor.grad = held.gradient if tensor.grad is None else tensor.grad
            del _claims[tensor]
        held.keepers.discard(owner)
        held.owners.discard(owner)


def _tensors(model: Module) -> list[torch.nn.Parameter]:
    return [tensor for tensor in model.parameters() if part_of(tensor) is None]
