"""One parameter of a model, some of whose elements train: leaves hold their values, the tensor is kept current."""

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from elementgrad.backends.torch.training import hooks
from elementgrad.backends.torch.training.casting import cast, same
from elementgrad.backends.torch.training.home import Home
from elementgrad.backends.torch.training.hooks import while_training
from elementgrad.backends.torch.training.part import Part, part_of
from elementgrad.backends.torch.training.products import index
from elementgrad.backends.torch.training.wrapping import require_met
from elementgrad.errors import FrameworkError, OptionError

Tensor = torch.Tensor
_moving: WeakKeyDictionary[torch.optim.Optimizer, "list[Weight]"] = WeakKeyDictionary()
"""For each optimizer in the middle of a step, the parameters whose elements it moves."""


class Weight:
    """A parameter and the parts of it that train."""

    def __init__(self, home: Home):
        self.home = home
        self.tensor = home.tensor
        self.parts: list[Part] = []
        self._used = False
        self.arrange()

    def arrange(self) -> None:
        """Make ready for the parts there are, on the device where the parameter is."""
        self.leaves = tuple([part.leaf for part in self.parts])
        self.keys = tuple([part.key for part in self.parts])
        self.sizes = [len(part.positions) for part in self.parts]
        self.everywhere = np.concatenate([np.zeros(0, dtype=np.int64), *[part.positions for part in self.parts]])
        self.positions = index(self.everywhere, self.tensor.device)
        for part in self.parts:
            part.weight = self
            part.originals = part.originals.to(self.tensor.device)
        self._note()
        self._need_hooks()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)  # a copy of a model, or one from a file, whose elements train as well
        self._need_hooks()

    def _need_hooks(self) -> None:
        (hooks.need if self.parts else hooks.done)(self)

    @property
    def live(self) -> Tensor:
        """The parameter to compute with: itself, or all of it where some is in other processes."""
        whole = self.home.whole
        return self.tensor if whole is None else whole

    def current(self) -> None:
        """Let the parameter hold what the leaves hold, or the leaves what was written to the parameter since."""
        if torch.compiler.is_compiling():
            if self.home.spread:  # what is gathered when is not known to a compiler: the graph breaks here
                _apart(self)
            else:  # nor are versions
                self.home.put(self.positions, self._values())
            return
        require_met(self.leaves)
        versions = self._versions()
        # Writes to `.data` leave no version behind: after a step that nobody announced, values are compared.
        if versions[1:] != self._seen[1:] or (self._used and not torch.equal(self._values(), self._held)):
            self.push()
        elif versions != self._seen:
            self.pull()
        self._used = True

    def ready(self) -> None:
        """Let the leaves hold what was written to the parameter since, before a step that is pushed in any case."""
        versions = self._versions()
        if versions[0] != self._seen[0] and versions[1:] == self._seen[1:]:
            self.pull()
        self.require_kept()

    def require_kept(self) -> None:
        """Refuse to go on where a parameter was written to without a trace, and what was written would be lost."""
        if not self.home.kept(self.positions, self._held):
            raise FrameworkError(
                "shards of the model were written to in place, as torch.distributed.checkpoint does, and elements that "
                "train do not know of it; call model.load_state_dict with what was loaded"
            )

    def push(self) -> None:
        """Write the leaves' values into the parameter."""
        self._note()
        self.home.put(self.positions, self._held)
        self._seen[0] = self.tensor._version

    def pull(self) -> None:
        """Read the leaves' values from the parameter, where it holds others than theirs."""
        with torch.no_grad():
            held = self.home.take(self.positions)
            for leaf, found in zip(self.leaves, held.split(self.sizes), strict=True):
                leaf.copy_(torch.where(same(cast(leaf, found.dtype), found), leaf, cast(found, leaf.dtype)))
        self._note()

    def with_values(self, tensor: Tensor, leaves: Iterable[Tensor]) -> Tensor:
        """Another tensor with the elements in it, as a step that every transform can differentiate."""
        values = torch.cat([leaf.reshape(-1) for leaf in leaves]).to(tensor.dtype)
        return tensor.reshape(-1).index_put((self.positions,), values).view(tensor.shape)

    def _values(self) -> Tensor:
        return self.leaves[0].detach() if len(self.leaves) == 1 else torch.cat([leaf.detach() for leaf in self.leaves])

    def _versions(self) -> list[int]:
        return [self.tensor._version, *[leaf._version for leaf in self.leaves]]

    def _note(self) -> None:
        self._seen = self._versions()
        self._held = self._values().clone() if self.leaves else self.positions
        self._used = False


@torch.compiler.disable
def _apart(weight: Weight) -> None:
    weight.current()


@while_training(_global_optimizer_pre_hooks)
def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """What was written to a parameter since the last forward is where its elements step from."""
    _moving[optimizer] = weights = _moved(optimizer)
    if weights and isinstance(optimizer, torch.optim.SparseAdam):
        raise OptionError("SparseAdam takes sparse gradients, and those of elements are dense; use torch.optim.Adam")
    for weight in weights:
        weight.ready()


@while_training(_global_optimizer_post_hooks)
def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """What an optimizer moved is in the model at once, however the optimizer wrote it."""
    for weight in _moving.pop(optimizer, ()):
        weight.push()


def _moved(optimizer: torch.optim.Optimizer) -> list[Weight]:
    """The parameters whose elements an optimizer has."""
    weights = {}
    for group in optimizer.param_groups:
        for leaf in group["params"]:
            part = part_of(leaf)
            if part is not None and part.weight is not None and part in part.weight.parts:
                weights[id(part.weight)] = part.weight
    return list(weights.values())
