"""Everything else holds still while elements train, and moves again when the last of them are released."""

from dataclasses import dataclass

import torch
from torch.utils.weak import WeakIdKeyDictionary

from elementgrad.backends.torch.training.part import part_of

Module = torch.nn.Module


@dataclass
class _Claim:
    before: bool
    gradient: torch.Tensor | None
    count: int = 0


_claims: WeakIdKeyDictionary = WeakIdKeyDictionary()


def claim(model: Module) -> list[tuple[torch.nn.Parameter, bool]]:
    """Freeze the parameters of a model that nobody froze yet; what the user has let train since stays so.

    Returns which of them were to train before.
    """
    for tensor in _tensors(model):
        if tensor not in _claims:
            _claims[tensor] = _Claim(tensor.requires_grad, tensor.grad)
            tensor.requires_grad_(False)
            tensor.grad = None  # an optimizer moves whatever has a gradient, be it left over from before
        _claims[tensor].count += 1
    return [(tensor, _claims[tensor].before) for tensor in _tensors(model)]


def claim_copies(tensors: list[tuple[torch.nn.Parameter, bool]]) -> None:
    """Note that parameters are copies of frozen ones, and which of those were to train before."""
    for tensor, before in tensors:
        if tensor not in _claims:
            _claims[tensor] = _Claim(before, None)
        _claims[tensor].count += 1


def leave(model: Module) -> None:
    """One claim less; after the last, what was frozen may train again."""
    for tensor in _tensors(model):
        held = _claims.get(tensor)
        if held is not None:
            held.count -= 1
            if not held.count:
                del _claims[tensor]
                tensor.requires_grad_(held.before or tensor.requires_grad)
                tensor.grad = held.gradient if tensor.grad is None else tensor.grad


def _tensors(model: Module) -> list[torch.nn.Parameter]:
    return [tensor for tensor in model.parameters() if part_of(tensor) is None]
