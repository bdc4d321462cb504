"""Wrappers that reduce gradients between processes reduce those of the parameters that they have met."""

import sys
import warnings
from collections import Counter
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed import distributed_c10d
from torch.nn.modules.module import _global_module_registration_hooks
from torch.nn.parallel import DistributedDataParallel

from elementgrad.backends.torch.training.hooks import while_training
from elementgrad.backends.torch.training.part import Part, bits, part_of
from elementgrad.backends.training import digest, unlike
from elementgrad.errors import FrameworkError

Module = torch.nn.Module
_met: WeakKeyDictionary[DistributedDataParallel, "_Meeting"] = WeakKeyDictionary()
_notes: WeakKeyDictionary[DistributedDataParallel, str] = WeakKeyDictionary()
"""What a wrapper is called between processes: its model, and how many were made around models like it before."""
_made: Counter[str] = Counter()


class _Meeting:
    """What is known of a wrapper since elements were first computed with under it."""

    def __init__(self, wrapper: DistributedDataParallel):
        self.ids = {id(parameter) for parameter in wrapper._module_parameters}
        """Of the parameters that it met when it was made. It keeps them, so that these stay."""
        self._note = f"elementgrad/{wrapper.process_group.group_name}/{_notes.get(wrapper)}"
        parts = [(name, part) for name, _, part in _named(wrapper.module) if part is not None]
        self._elements = [(name, part.positions) for name, part in parts]
        self._began = [(name, bits(part.originals)[1]) for name, part in parts]
        self._alike = False

    def require_alike(self) -> None:
        """Refuse elements that are not those of the other processes: the wrapper compares nothing but their number.

        Whoever comes first leaves a note where processes find each other, and the others compare. Nobody waits: others
        may come later, or never if their data does not lead here.
        """
        if self._alike:
            return
        if not self._noted("elements", self._elements):
            raise unlike(self._elements)
        if not self._noted("originals", self._began):
            warnings.warn(
                "the elements of this process had other values than those of another one before the wrapper gave all "
                "those of the first; let all start from the same weights, from a file or by one seed, or save and "
                "undo in the first alone",
                stacklevel=2,
            )
        self._alike = True

    def _noted(self, what: str, numbers: list[tuple[Any, ...]]) -> bool:
        """Whether a note about some numbers is that of this process, which leaves one if there is none."""
        store, mine = distributed_c10d._get_default_store(), digest(numbers).hex()  # type: ignore[no-untyped-call]
        return store is None or store.compare_set(f"{self._note}/{what}", "", mine).decode() == mine


@while_training(_global_module_registration_hooks)
def _wrap(wrapper: Module, name: str, module: Module | None) -> None:
    """Give a wrapper its name as it takes its model in: all processes make them together, and so in the same order."""
    if not isinstance(wrapper, DistributedDataParallel) or name != "module" or module is None:
        return
    named = _named(module)
    if any(part is not None for _, _, part in named):  # models of others are left alone, those without shapes too
        kind = digest([(f"{name} {tuple(tensor.shape)}",) for name, tensor, part in named if part is None]).hex()
        _made[kind] += 1
        _notes[wrapper] = f"{kind}/{_made[kind]}"


def _named(model: Module) -> list[tuple[str, torch.Tensor, Part | None]]:
    """The parameters of a model and the leaves of its elements, with which elements those are."""
    return [
        (f"{path}.{name}", tensor, part_of(tensor))
        for path, module in model.named_modules()
        for name, tensor in module._parameters.items()
        if tensor is not None
    ]


def require_met(leaves: Iterable[torch.Tensor]) -> None:
    """Refuse a forward under a wrapper that was made before the leaves, as each process would train its own."""
    wrapper = DistributedDataParallel._active_ddp_module
    if wrapper is None or not torch.is_grad_enabled():
        return
    meeting = _met.get(wrapper)
    if meeting is None:
        _met[wrapper] = meeting = _Meeting(wrapper)
    if any(id(leaf) not in meeting.ids and leaf.requires_grad for leaf in leaves):
        raise FrameworkError(
            "the model was wrapped in DistributedDataParallel before eg.trainable was called on its inside, and the "
            "elements' gradients would not be reduced; call eg.trainable first and wrap then"
        )
    meeting.require_alike()


def require_unwrapped(model: Module) -> None:
    """Refuse a model that is closed, or that has a wrapper around it or inside which knows nothing of elements."""
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise FrameworkError("a scripted model is closed; give the module that it was made of")
        if isinstance(module, torch.nn.DataParallel):
            raise FrameworkError("DataParallel copies the model in every forward; use DistributedDataParallel instead")
        kind = type(module).__name__
        if isinstance(module, DistributedDataParallel) or _is(module, "torch.distributed._composable.replicate", "DDP"):
            raise FrameworkError(
                f"the model is wrapped in {kind} already, which would not reduce the elements' gradients; "
                "call eg.trainable first and wrap then"
            )
        if _is(module, "torch.distributed.fsdp", "FullyShardedDataParallel"):
            raise FrameworkError(f"the model is wrapped in {kind}, which flattens parameters; use fully_shard instead")


def _is(module: Module, home: str, kind: str) -> bool:
    """Whether a module is of a class in a home of PyTorch's that takes long to import: if nobody has, it is not."""
    found = sys.modules.get(home)
    return found is not None and isinstance(module, getattr(found, kind))
