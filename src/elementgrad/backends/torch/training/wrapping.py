"""Wrappers that reduce gradients between processes reduce those of the parameters that they have met."""

import sys
from collections.abc import Iterable
from weakref import WeakKeyDictionary

import torch
from torch.nn.parallel import DistributedDataParallel

from elementgrad.errors import FrameworkError

Module = torch.nn.Module
_met: WeakKeyDictionary[DistributedDataParallel, set[int]] = WeakKeyDictionary()
"""For each wrapper the parameters that it met when it was made, by their ids: it keeps them, so that these stay."""


def require_met(leaves: Iterable[torch.Tensor]) -> None:
    """Refuse a forward under a wrapper that was made before the leaves, as each process would train its own."""
    wrapper = DistributedDataParallel._active_ddp_module
    if wrapper is None or not torch.is_grad_enabled():
        return
    met = _met.get(wrapper)
    if met is None:
        _met[wrapper] = met = {id(parameter) for parameter in wrapper._module_parameters}
    if any(id(leaf) not in met and leaf.requires_grad for leaf in leaves):
        raise FrameworkError(
            "the model was wrapped in DistributedDataParallel before eg.trainable was called on its inside, and the "
            "elements' gradients would not be reduced; call eg.trainable first and wrap then"
        )


def require_unwrapped(model: Module) -> None:
    """Refuse a model that is closed, or that has a wrapper around it or inside which knows nothing of elements."""
    for module in model.modules():
        kind = type(module).__name__
        if isinstance(module, torch.jit.ScriptModule):
            raise FrameworkError("a scripted model is closed; give the module that it was made of")
        if kind == "DistributedDataParallel" or _replicated(module):
            raise FrameworkError(
                f"the model is wrapped in {kind} already, which would not reduce the elements' gradients; "
                "call eg.trainable first and wrap then"
            )
        if kind == "FullyShardedDataParallel":
            raise FrameworkError(f"the model is wrapped in {kind}, which flattens parameters; use fully_shard instead")


def _replicated(module: Module) -> bool:
    """Whether `replicate`, which makes other classes of modules, has wrapped one."""
    found = sys.modules.get("torch.distributed._composable.replicate")
    return found is not None and isinstance(module, found.DDP)
