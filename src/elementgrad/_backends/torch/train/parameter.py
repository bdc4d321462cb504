"""Leaves, the parameters that they belong to, and the copying between the two.

`TorchElementGroup` has the leaf of one place. `TorchPartialParameter` has all groups of one parameter and keeps their
leaves and the parameter equal: `sync` in a forward, and hooks around each optimizer step. `ParameterStorage` reads and
writes elements of a parameter that this process has all of; `distributed.ShardedStorage` does it for one that
`fully_shard` has spread over processes.
"""

import sys
from collections.abc import Callable, Iterable, MutableMapping
from inspect import getfile
from operator import attrgetter
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import numpy as np
import torch

from elementgrad._backends.registry import uncompiled
from elementgrad._backends.torch._compat import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    in_torch_mode,
)
from elementgrad._cleanup import Lock
from elementgrad._train.bits import LAYOUTS, common_width, nan_bits
from elementgrad._train.trainer import ElementGroup, PartialParameter, ResolvedPlace
from elementgrad.errors import FrameworkError, OptionError

Tensor = torch.Tensor
HALVES = (torch.float16, torch.bfloat16)
_groups: WeakValueDictionary[int, "TorchElementGroup"] = WeakValueDictionary()
"""The group of each leaf, by the id of the leaf."""


class TorchElementGroup(ElementGroup):
    """The elements of one place, with the leaf that an optimizer moves."""

    parameter: "TorchPartialParameter | None"

    def __init__(
        self, target: ResolvedPlace, leaf: Tensor, originals: Tensor, initial: Tensor, dtype: torch.dtype | None
    ):
        super().__init__(target, leaf, originals, initial)
        self.dtype = dtype
        self.leaf_name = ""
        """The name of the leaf in the modules that own the parameter."""
        _groups[id(leaf)] = self

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)  # a deep copy or an unpickled model, with a leaf of its own
        _groups[id(self.leaf)] = self

    def set_originals(self, originals: Tensor) -> None:
        """Replace the originals after the model was loaded anew or converted, also in the change log."""
        self.originals = originals
        self.change.bits = tensor_bits(originals)[1]

    def leaf_dtype(self) -> torch.dtype:
        return self.dtype or default_leaf_dtype(self.tensor.dtype)


def default_leaf_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in HALVES else dtype  # small steps would be lost in half precision


def group_of(leaf: Tensor) -> TorchElementGroup | None:
    """Return the group whose leaf this is, and None for any other tensor."""
    group = _groups.get(id(leaf))
    return group if group is not None and group.leaf is leaf else None


class ParameterStorage:
    """A parameter that this process has all of: elements are read and written by their positions in C order."""

    sharded: ClassVar[bool] = False

    def __init__(self, tensor: Tensor):
        self._tensor = tensor

    @property
    def tensor(self) -> Any:
        """The parameter as it is named, saved and loaded."""
        return self._tensor

    @property
    def full_tensor(self) -> Tensor:
        """The parameter to compute with."""
        return self._tensor

    def matches(self, tensor: Any) -> bool:
        """Return True if `tensor` is the parameter, in any form in which modules hold it."""
        return tensor is self._tensor

    def read(self, index: Tensor) -> Tensor:
        tensor = self._tensor.detach()
        if tensor.is_contiguous():
            return tensor.view(-1).index_select(0, index)
        return tensor[torch.unravel_index(index, tensor.shape)]

    def write(self, index: Tensor, values: Tensor) -> None:
        # A detached tensor shares the version counter, so autograd notices if it saved the parameter for a backward.
        tensor = self._tensor.detach()
        values = cast(values, tensor.dtype)
        if tensor.is_contiguous():
            tensor.view(-1).index_copy_(0, index, values)
        else:
            tensor.index_put_(torch.unravel_index(index, tensor.shape), values)

    def still_holds(self, index: Tensor, values: Tensor) -> bool:
        """Return False if elements were overwritten in a way that changes no version counter."""
        return True

    def differs_outside(self, index: Tensor, loaded: Tensor) -> bool:
        """Return True if a tensor of the same shape differs in any element that is not in `index`."""
        differs = (loaded.to(self._tensor) != self._tensor).reshape(-1)
        differs[index] = False
        return bool(differs.any())


class TorchPartialParameter(PartialParameter):
    """A parameter of which some elements train: its storage and its element groups."""

    _joined: Tensor | None = None

    def __init__(self, storage: ParameterStorage):
        self.storage = storage
        self.tensor = storage.tensor
        self.groups: list[TorchElementGroup] = []
        self._compare_values = False
        self.refresh()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_joined": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)  # a deep copy or an unpickled model, whose elements train as well
        self._update_hooks()

    def refresh(self) -> None:
        """Recompute what depends on the groups and on the device, after either has changed."""
        super().refresh()
        self.leaves = tuple([group.leaf for group in self.groups])
        self.leaf_names = tuple([group.leaf_name for group in self.groups])
        self.index = index_tensor(self.positions, self.tensor.device)
        self._joined = None
        for group in self.groups:
            group.parameter = self
            group.originals = group.originals.to(self.tensor.device)
        self._mark_synced()
        self._update_hooks()

    def _update_hooks(self) -> None:
        (install_hooks if self.groups else remove_hooks)(self)

    @property
    def leaf(self) -> Tensor:
        """All leaves in one vector, from which gradients go on to each of them.

        It is joined once and used by every forward, as autograd would take long over many leaves in each of them. Only
        its place in the graph counts: no forward reads its values, which the leaves may have left behind.
        """
        if len(self.leaves) == 1:
            return self.leaves[0]
        if torch.compiler.is_compiling() or in_torch_mode() or torch.is_inference_mode_enabled():
            return torch.cat(self.leaves)
        joined = self._joined
        if joined is None:
            joined = torch.cat(self.leaves)
            if all(map(attrgetter("requires_grad"), self.leaves)):
                self._joined = joined
        return joined

    def sync(self) -> None:
        """Copy the leaves into the parameter if they changed, or the parameter into the leaves if it was written to."""
        if torch.compiler.is_compiling():
            # Versions are unknown to a compiler, so it always copies. What of a sharded parameter is gathered is
            # unknown as well: there the graph breaks.
            if self.storage.sharded:
                _sync_uncompiled(self)
            else:
                self.storage.write(self.index, self._leaf_values())
            return
        versions = self._versions()
        # Writes to `.data` change no version. They are found by comparing values, except right after a copy.
        if versions[1:] != self._synced_versions[1:] or (
            self._compare_values and not torch.equal(self._leaf_values(), self._synced_values)
        ):
            self.write_to_parameter()
        elif versions != self._synced_versions:
            self.read_from_parameter()
        self._compare_values = True

    def write_to_parameter(self) -> None:
        """Copy the values of the leaves into the parameter."""
        _, *versions = self._versions()
        values = self._leaf_values().clone()
        self.storage.write(self.index, values)
        # Last, so that an interrupted copy is done again.
        self._synced_versions, self._synced_values = [self.tensor._version, *versions], values
        self._compare_values = False

    def read_from_parameter(self) -> None:
        """Copy the parameter into the leaves, where it holds other values than theirs."""
        with torch.no_grad():
            values = self.storage.read(self.index)
            for leaf, new in zip(self.leaves, values.split(self.sizes), strict=True):
                # A leaf may be more precise than the parameter: keep it where it rounds to the parameter's value.
                leaf.copy_(torch.where(same_bits(cast(leaf, new.dtype), new), leaf, cast(new, leaf.dtype)))
        self._mark_synced()

    def prepare_step(self) -> None:
        """Copy what was written to the parameter since the last forward into the leaves, before an optimizer step."""
        versions = self._versions()
        if versions[0] != self._synced_versions[0] and versions[1:] == self._synced_versions[1:]:
            self.read_from_parameter()
        self.check_not_overwritten()

    def check_not_overwritten(self) -> None:
        """Raise if shards were written to without a trace, as the next copy would undo that."""
        if not self.storage.still_holds(self.index, self._synced_values):
            raise FrameworkError(
                "shards of the model were written to in place, as torch.distributed.checkpoint does, and elements that "
                "train do not know of it; call model.load_state_dict with what was loaded"
            )

    def insert(self, tensor: Tensor, leaves: Iterable[Tensor]) -> Tensor:
        """Return `tensor` with the values of `leaves` in it, by operations that every transform can differentiate."""
        values = torch.cat([leaf.reshape(-1) for leaf in leaves]).to(tensor.dtype)
        return tensor.reshape(-1).index_put((self.index,), values).view(tensor.shape)

    def _leaf_values(self) -> Tensor:
        return (self.leaves[0] if len(self.leaves) == 1 else _cat_values(self.leaves)).detach()

    def _versions(self) -> list[int]:
        return [self.tensor._version, *map(_version, self.leaves)]

    def _mark_synced(self) -> None:
        self._synced_versions = self._versions()
        self._synced_values = self._leaf_values().clone() if self.leaves else self.index
        self._compare_values = False


_version = attrgetter("_version")
_cat_values = torch.no_grad()(torch.cat)


@uncompiled
def _sync_uncompiled(parameter: TorchPartialParameter) -> None:
    parameter.sync()


_global_hooks: list[tuple[MutableMapping[int, Any], Any]] = []
_hook_users: dict[int, "ref[Any]"] = {}
_hooks_lock = Lock()
_OPTIMIZER_FILE, _MODULE_FILE = getfile(torch.optim.Optimizer), getfile(torch.nn.Module)
_HOOK_CALLERS = {(_OPTIMIZER_FILE, "wrapper"), (_MODULE_FILE, "add_module"), (_MODULE_FILE, "__setattr__")}
"""The functions of PyTorch that iterate over global hooks, which must not change meanwhile."""


def global_hook(hooks: MutableMapping[int, Any]) -> Callable[[Any], Any]:
    """Mark a function as a hook that is in one of PyTorch's tables of global hooks while elements train."""

    def mark(hook: Any) -> Any:
        _global_hooks.append((hooks, hook))
        return hook

    return mark


def install_hooks(user: Any) -> None:
    """Install the global hooks until `remove_hooks(user)`, or until `user` is garbage collected."""
    with _hooks_lock.hold():
        key = id(user)
        _hook_users[key] = ref(user, lambda dead: _remove_dead_user(key, dead))
        for hooks, hook in _global_hooks:
            # PyTorch's own function for this returns a handle, which an interrupt may lose. This can be repeated.
            hooks[id(hook)] = hook


def remove_hooks(user: Any) -> None:
    """Remove the global hooks if there is no other user."""
    with _hooks_lock.hold():
        _hook_users.pop(id(user), None)
        _remove_unused_hooks()


def _remove_dead_user(key: int, dead: "ref[Any]") -> None:
    with _hooks_lock.hold():
        if _hook_users.get(key) is dead:
            del _hook_users[key]
        _remove_unused_hooks()


def _remove_unused_hooks() -> None:
    # Garbage is collected at any time, also while PyTorch iterates over the hooks in some thread. The hooks then stay,
    # without effect, until elements train or are released the next time.
    if not _hook_users and not any(_calls_hooks(frame) for frame in sys._current_frames().values()):
        for hooks, hook in _global_hooks:
            hooks.pop(id(hook), None)


def _calls_hooks(frame: Any) -> bool:
    while frame is not None and (frame.f_code.co_filename, frame.f_code.co_name) not in _HOOK_CALLERS:
        frame = frame.f_back
    return frame is not None


_stepping: WeakKeyDictionary[torch.optim.Optimizer, list[TorchPartialParameter]] = WeakKeyDictionary()
"""For each optimizer in the middle of a step, the parameters whose elements it moves."""


@global_hook(_global_optimizer_pre_hooks)
def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Copy what was written to parameters into the leaves, where the step starts from."""
    _stepping[optimizer] = parameters = _find_trained(optimizer)
    if parameters and isinstance(optimizer, torch.optim.SparseAdam):
        raise OptionError("SparseAdam takes sparse gradients, and those of elements are dense; use torch.optim.Adam")
    for parameter in parameters:
        parameter.prepare_step()


@global_hook(_global_optimizer_post_hooks)
def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Copy the leaves into the parameters, however the optimizer wrote to the leaves."""
    for parameter in _stepping.pop(optimizer, ()):
        parameter.write_to_parameter()


def _find_trained(optimizer: torch.optim.Optimizer) -> list[TorchPartialParameter]:
    parameters = {}
    for param_group in optimizer.param_groups:
        for leaf in param_group["params"]:
            group = group_of(leaf)
            if group is not None and group.parameter is not None:
                parameters[id(group.parameter)] = group.parameter
    return list(parameters.values())


_INTEGERS = {8 * dtype.itemsize: dtype for dtype in (torch.int16, torch.int32, torch.int64)}


def cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `values` in another dtype, with the payload of each NaN kept as far as it fits."""
    if values.dtype is dtype:
        return values
    if values.is_complex() and dtype.is_complex:
        return torch.view_as_complex(cast(torch.view_as_real(values.resolve_conj()), dtype.to_real()))
    converted = values.to(dtype)
    before, after = (str(each).removeprefix("torch.") for each in (values.dtype, dtype))
    if not {before, after} <= LAYOUTS.keys():
        return converted
    bits = _as_integers(values).to(_INTEGERS[common_width(before, after)])
    nans = nan_bits(bits, before, after, torch.where).to(_INTEGERS[LAYOUTS[after].bits])
    return torch.where(values.isnan(), nans, _as_integers(converted)).view(dtype)


def same_bits(left: Tensor, right: Tensor) -> Tensor:
    """Return where two tensors of one dtype are equal to the bit: -0.0 is not 0.0, and a NaN equals itself."""
    if left.is_complex():
        return same_bits(*(torch.view_as_real(each.resolve_conj()) for each in (left, right))).all(-1)
    if 8 * left.dtype.itemsize not in _INTEGERS:
        return left == right
    return _as_integers(left) == _as_integers(right)


def _as_integers(values: Tensor) -> Tensor:
    return values.view(_INTEGERS[8 * values.dtype.itemsize])


def tensor_bits(tensor: Tensor) -> tuple[str, np.ndarray]:
    """Return the name of a tensor's dtype, and its elements as rows of bytes."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    rows = flat.view(torch.uint8).numpy().reshape(len(flat), flat.element_size())
    return str(tensor.dtype).removeprefix("torch."), rows


def index_tensor(positions: np.ndarray, device: torch.device | str) -> Tensor:
    """Return positions as a flat int64 tensor, which may share their memory and must not be written to."""
    return torch.from_numpy(np.require(positions, np.int64, ["C", "W"]).reshape(-1)).to(device)
