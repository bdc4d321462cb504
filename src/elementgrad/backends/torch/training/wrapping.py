"""Wrappers that reduce gradients between processes reduce those of the parameters that they have met."""

from collections.abc import Iterable
from weakref import WeakKeyDictionary

import torch
from torch.nn.parallel import DistributedDataParallel

from elementgrad.errors import FrameworkError

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
