"""Casts of tensors that keep the bits of a NaN.

Where a parameter is kept, and how its elements are read and written there: here as a whole, or as a shard of it.

The elements of one place in a PyTorch model: the leaf that has their values, where they are, what they were.

Hooks on every optimizer and module of the process: they are there while elements train, and at no other time.

Everything else holds still while elements train, and moves again when the last of them are released.

Gradients that were computed apart come to their leaves as by one backward, of which wrappers of the model hear.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from inspect import getfile
from typing import Any, ClassVar
from weakref import WeakValueDictionary, ref

import numpy as np
import torch
from torch import distributed
from torch.utils.weak import WeakIdKeyDictionary

from elementgrad._cleanup import Lock, defer, scope
from elementgrad._train.freeze import FreezeClaim, Freezer
from elementgrad._train.numbers import LAYOUTS, common_width, nan_bits
from elementgrad._train.trainer import ElementGroup, ResolvedPlace
from elementgrad.errors import FrameworkError

Tensor = torch.Tensor
INTEGERS = {8 * dtype.itemsize: dtype for dtype in (torch.int16, torch.int32, torch.int64)}


def cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values in another dtype; themselves if they are of it."""
    if values.dtype is dtype:
        return values
    if values.is_complex() and dtype.is_complex:
        return torch.view_as_complex(cast(torch.view_as_real(values.resolve_conj()), dtype.to_real()))
    plain = values.to(dtype)
    before, after = (str(each).removeprefix("torch.") for each in (values.dtype, dtype))
    if not {before, after} <= LAYOUTS.keys():
        return plain
    bits = as_integers(values).to(INTEGERS[common_width(before, after)])
    found = nan_bits(bits, before, after, torch.where).to(INTEGERS[LAYOUTS[after].bits])
    return torch.where(values.isnan(), found, as_integers(plain)).view(dtype)


def as_integers(values: Tensor) -> Tensor:
    """Return the bits of real floats as integers, of which two are equal only if the floats are the same number."""
    return values.view(INTEGERS[8 * values.dtype.itemsize])


def same(one: Tensor, other: Tensor) -> Tensor:
    """Return where values of one dtype are the same to the bit: -0.0 is not 0.0, and a NaN is itself."""
    if one.is_complex():
        pairs = (torch.view_as_real(each.resolve_conj()) for each in (one, other))
        return same(*pairs).all(-1)
    if 8 * one.dtype.itemsize not in INTEGERS:
        return one == other
    return as_integers(one) == as_integers(other)


class ParameterStorage:
    """A parameter that this process has all of."""

    spread: ClassVar[bool] = False
    """Whether other processes have some of it."""

    def __init__(self, tensor: Tensor):
        self._tensor = tensor

    @property
    def tensor(self) -> Any:
        """The parameter, as it is named, saved and loaded."""
        return self._tensor

    @property
    def whole(self) -> Tensor | None:
        """All of it, to compute with."""
        return self._tensor

    def stands(self, tensor: Any) -> bool:
        """Whether a tensor stands for this parameter in its modules."""
        return tensor is self._tensor

    def take(self, positions: Tensor) -> Tensor:
        """Elements by their positions in C order, however it lies in memory."""
        tensor = self._tensor.detach()
        if tensor.is_contiguous():
            return tensor.view(-1).index_select(0, positions)
        return tensor[torch.unravel_index(positions, tensor.shape)]

    def put(self, positions: Tensor, values: Tensor) -> None:
        """Write elements by their positions in C order."""
        tensor = self._tensor.detach()  # of the same version: whoever kept the parameter to go back hears of the write
        values = cast(values, tensor.dtype)
        if tensor.is_contiguous():
            tensor.view(-1).index_copy_(0, positions, values)
        else:
            tensor.index_put_(torch.unravel_index(positions, tensor.shape), values)

    def kept(self, positions: Tensor, values: Tensor) -> bool:
        """Whether elements are still those that were written last, where writes of others leave no version behind."""
        return True

    def differs(self, loaded: Tensor, positions: Tensor) -> bool:
        """Whether another tensor of its shape differs outside of some positions."""
        other = (loaded.to(self._tensor) != self._tensor).reshape(-1)
        other[positions] = False
        return bool(other.any())


HALVES = (torch.float16, torch.bfloat16)
_leaves: WeakValueDictionary[int, "TorchElementGroup"] = WeakValueDictionary()


class TorchElementGroup(ElementGroup):
    """Elements of one place: a leaf that an optimizer may have, where they are, and what they were."""

    parameter: Any = None

    def __init__(
        self, target: ResolvedPlace, leaf: Tensor, originals: Tensor, initial: Tensor, dtype: torch.dtype | None
    ):
        super().__init__(target, leaf, originals, initial)
        self.dtype = dtype
        self.key = ""
        self.number, self.hook = 0, None  # of those whose gradients processes exchange
        self.become(leaf)

    def become(self, leaf: Tensor) -> None:
        """Have other values."""
        self.leaf = leaf
        _leaves[id(leaf)] = self

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)  # a copy of a model, or one from a file: its leaves are others
        _leaves[id(self.leaf)] = self

    def rebase(self) -> None:
        """Take the values there are for those that there were: another model has been loaded."""
        self.begin_from(cast(self.leaf.detach(), self.tensor.dtype).clone())

    def begin_from(self, originals: Tensor) -> None:
        """Have other originals, as of another model or in another dtype."""
        self.originals = originals
        self.change.bits = bits(originals)[1]

    def kept_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the leaf for a parameter of a dtype: small steps are lost in half precision."""
        return self.dtype or (torch.float32 if dtype in HALVES else dtype)


def part_of(leaf: Tensor) -> TorchElementGroup | None:
    """The part whose leaf this is."""
    part = _leaves.get(id(leaf))
    return part if part is not None and part.leaf is leaf else None


def bits(tensor: Tensor) -> tuple[str, np.ndarray]:
    """The dtype of a tensor, and the bytes of its elements."""
    held = tensor.detach().cpu().contiguous().view(-1)
    bytes_ = held.view(torch.uint8).numpy().reshape(len(held), held.element_size())
    return str(tensor.dtype).removeprefix("torch."), bytes_


STEPPING, HOLDING = getfile(torch.optim.Optimizer), getfile(torch.nn.Module)
RUNNING = {(STEPPING, "wrapper"), (HOLDING, "add_module"), (HOLDING, "__setattr__")}
"""The functions in which PyTorch goes through such hooks, which must not change meanwhile."""
_wanted: list[tuple[MutableMapping[int, Any], Any]] = []
_users: dict[int, "ref[Any]"] = {}
_lock = Lock()


def while_training(hooks: MutableMapping[int, Any]) -> Callable[[Any], Any]:
    """Mark a hook that is to be among PyTorch's for as long as elements train.

    It is put there as registering it does. That can be done twice, and an interrupt cannot come between the hook and a
    handle to remove it with.
    """

    def mark(hook: Any) -> Any:
        _wanted.append((hooks, hook))
        return hook

    return mark


def need(user: Any) -> None:
    """Have the hooks registered, until `user` is done or is no more."""
    with _lock.hold():
        key = id(user)
        _users[key] = ref(user, lambda gone: _lose(key, gone))
        for hooks, hook in _wanted:
            hooks[id(hook)] = hook


def done(user: Any) -> None:
    """Remove the hooks if nothing else needs them."""
    with _lock.hold():
        _users.pop(id(user), None)
        _tidy()


def _lose(key: int, gone: "ref[Any]") -> None:
    with _lock.hold():
        if _users.get(key) is gone:
            del _users[key]
        _tidy()


def _tidy() -> None:
    """Remove the hooks after the last user, unless PyTorch goes through them right now, in whichever thread.

    Garbage is collected at any time, also in the middle of a step. Then they stay, and do nothing, until elements train
    or are released the next time.
    """
    if not _users and not any(_running(frame) for frame in sys._current_frames().values()):
        for hooks, hook in _wanted:
            hooks.pop(id(hook), None)


def _running(frame: Any) -> bool:
    while frame is not None and (frame.f_code.co_filename, frame.f_code.co_name) not in RUNNING:
        frame = frame.f_back
    return frame is not None


Module = torch.nn.Module


class TorchFreezer(Freezer):
    """Freezes parameters by `requires_grad`, and puts their gradients aside meanwhile."""

    def __init__(self) -> None:
        self._claims: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def get_claim(self, parameter: Tensor) -> FreezeClaim | None:
        return self._claims.get(parameter)

    def set_claim(self, parameter: Tensor, claim: FreezeClaim | None) -> None:
        if claim is None:
            del self._claims[parameter]
        else:
            self._claims[parameter] = claim

    def is_trainable(self, parameter: Tensor) -> bool:
        return parameter.requires_grad

    def set_trainable(self, parameter: Tensor, trainable: bool) -> None:
        parameter.requires_grad_(trainable)

    def get_gradient(self, parameter: Tensor) -> Tensor | None:
        return parameter.grad

    def set_gradient(self, parameter: Tensor, gradient: Tensor | None) -> None:
        parameter.grad = gradient

    def claim_copies(self, tensors: Iterable[tuple[Tensor, bool, bool]], owner: object) -> None:
        """Claim copies of frozen parameters, given which of them were trainable before and which are kept."""
        for tensor, trainable, kept in tensors:
            claim = self._claims.setdefault(tensor, FreezeClaim(trainable))
            claim.owners.add(owner)
            if kept:
                claim.keepers.add(owner)


freezer = TorchFreezer()


def whole_parameters(model: Module) -> list[torch.nn.Parameter]:
    """Return the parameters of a model without the leaves of elements."""
    return [tensor for tensor in model.parameters() if part_of(tensor) is None]


@contextmanager
def muted(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Let no hook of a leaf run: those run once, when the gradient is delivered."""
    with scope():
        for held in [held for leaf in leaves if (held := leaf._backward_hooks)]:
            defer(held.update, dict(held))
            held.clear()
        yield


def deliver(gradients: Sequence[tuple[Tensor, Tensor]], every: Sequence[Tensor], losses: Sequence[Tensor]) -> None:
    """Add gradients to those of leaves, by one backward for all.

    `DistributedDataParallel` reduces when it has heard of every leaf that a forward used, and of each once: those that
    hear none of the losses hear a zero for it, and nothing remains of that.
    """
    heard = {id(leaf) for leaf, _ in gradients}
    silent: list[Tensor] = []
    if is_distributed():
        used = {id(step.variable) for loss in losses for step in _steps(loss) if hasattr(step, "variable")} - heard
        silent = [leaf for leaf in every if id(leaf) in used]
    empty = [leaf for leaf in silent if leaf.grad is None]
    leaves = [leaf for leaf, _ in gradients] + silent
    torch.autograd.backward(leaves, [each for _, each in gradients] + [torch.zeros_like(leaf) for leaf in silent])
    if any(leaf.grad is not None and leaf.grad.any() for leaf in empty):
        raise FrameworkError(
            "another process has a loss for a place that this one has none for, and they would train apart; give "
            "losses for the same places in each"
        )
    for leaf in empty:
        leaf.grad = None


def check(loss: Tensor, of: str) -> None:
    """Refuse a loss of a model whose wrapper reduces at the end of the first backward, which is not the last here."""
    if is_distributed() and any(_static(step) for step in _steps(loss)):
        raise FrameworkError(
            f"the loss for {of} is of a model in DistributedDataParallel(static_graph=True), which reduces before all "
            "losses are heard; leave static_graph out"
        )


def is_distributed() -> bool:
    """Whether there may be other processes."""
    return distributed.is_available() and distributed.is_initialized()


def _static(step: Any) -> bool:
    wrapper = getattr(step, "ddp_weakref", None)
    return wrapper is not None and bool(wrapper().static_graph)


def _steps(loss: Tensor) -> Iterator[Any]:
    """Every step of the graph that a loss was computed by."""
    waiting: list[Any] = [loss.grad_fn]
    seen = set(waiting)
    while waiting:
        step = waiting.pop()
        yield step
        for other, _ in getattr(step, "next_functions", ()):
            if other is not None and other not in seen:
                seen.add(other)
                waiting.append(other)
