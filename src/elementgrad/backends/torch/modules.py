"""Modules that the user's function calls work on copies of their buffers, so that what they write to them is lost."""

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.modules.module import (
    _global_forward_hooks,
    _global_forward_hooks_always_called,
    _global_forward_pre_hooks,
)

from elementgrad.cleanup import defer

Module = torch.nn.Module
STILL = frozenset(
    f"torch.nn.modules.{kind}"
    for kind in ("activation", "container", "conv", "flatten", "fold", "linear", "normalization", "padding", "pooling")
)
"""Where PyTorch keeps modules that draw no random numbers, but for `DRAWING`."""
DRAWING = frozenset({"RReLU", "MultiheadAttention", "FractionalMaxPool2d", "FractionalMaxPool3d"})


class Lending:
    """Lends copies of its buffers to every module that this thread calls, for the time of each call, until the end.

    Within one run a module finds what it wrote there in an earlier call. Its attributes are put back at the end, since
    they may say something about its buffers. The first is one whose method is called without a call of the module.
    """

    def __init__(self, function: Any):
        self._thread = threading.get_ident()
        self._copies: dict[int, tuple[Any, Any]] = {}  # by the original, which is kept: a shared buffer stays shared
        self._open: list[tuple[Module, dict[str, Any]]] = []
        self._attributes: dict[int, tuple[Module, dict[str, Any]]] = {}
        self._leaving: Any = None
        self._function = function

    def start(self) -> None:
        """Begin to lend; the scope that is open now ends it."""
        defer(self._end)
        first = getattr(self._function, "__self__", None)
        if isinstance(first, Module):
            self._enter(first, None)
        _global_forward_pre_hooks[id(self)] = self._enter  # as registering does, in a tenth of the time

    def _enter(self, module: Module, _: Any) -> None:
        buffers = module._buffers
        if not buffers or threading.get_ident() != self._thread or isinstance(module, torch.jit.ScriptModule):
            return
        if any(isinstance(buffer, torch.nn.UninitializedBuffer) for buffer in buffers.values()):
            return  # it becomes itself in its first call, which cannot be undone
        if self._leaving is None:  # not before something is lent: each call of a module waits for its hooks
            self._leaving = id(self._open)
            _global_forward_hooks_always_called[self._leaving] = True
            _global_forward_hooks[self._leaving] = self._leave
        kept = dict(buffers)
        self._attributes.setdefault(id(module), (module, dict(module.__dict__)))
        # PyTorch does not call `_leave` after an interrupt. What has been lent must then come back before anything that
        # was changed earlier does, as by the scope that put these very buffers there.
        defer(self._take_back_from, len(self._open))
        self._open.append((module, kept))
        for name, buffer in kept.items():
            if buffer is not None:
                if id(buffer) not in self._copies:
                    self._copies[id(buffer)] = buffer, buffer.clone()
                buffers[name] = self._copies[id(buffer)][1]

    def _leave(self, module: Module, _: Any, __: Any) -> None:
        if self._open and self._open[-1][0] is module and threading.get_ident() == self._thread:
            self._take_back_from(len(self._open) - 1)

    def _take_back_from(self, number: int) -> None:
        while len(self._open) > number:
            self._take_back(*self._open[-1])
            self._open.pop()

    def _take_back(self, module: Module, kept: dict[str, Any]) -> None:
        for name, buffer in kept.items():
            if buffer is not None:
                self._copies[id(buffer)] = buffer, module._buffers.get(name)  # it may have been replaced
        module._buffers.clear()
        module._buffers.update(kept)

    def _end(self) -> None:
        """Put back what is still lent, and what was kept."""
        _global_forward_pre_hooks.pop(id(self), None)
        if self._leaving is not None:
            _global_forward_hooks.pop(self._leaving, None)
            _global_forward_hooks_always_called.pop(self._leaving, None)
        self._take_back_from(0)
        for module, attributes in self._attributes.values():
            restore_attributes(module, attributes)


def restore_attributes(module: Module, before: Mapping[str, Any]) -> None:
    """Give a module the attributes that it had, and no others."""
    for name in set(module.__dict__) - set(before):
        del module.__dict__[name]
    module.__dict__.update(before)


def add_hook(hooks: Any, hook: Any) -> None:
    """Put a hook among those of a module, or of all, until the innermost open scope is left.

    Registering it does the same, in Python: an interrupt there would leave the hook behind without a handle.
    """
    defer(hooks.pop, id(hook), None)
    hooks[id(hook)] = hook


def removed_later() -> list[Any]:
    """Return a list for handles of hooks on nodes of a graph, which are removed when the innermost scope is left.

    Have the list itself register hooks, as by `handles.extend(map(node.register_hook, [hook]))`: that runs in C, and no
    interrupt comes between the hook and the note of it.
    """
    handles: list[Any] = []
    defer(_remove, handles)
    return handles


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def still(function: Any) -> bool:
    """Whether a function is a module that leaves no trace: it and all inside are PyTorch's own, without buffers and
    hooks, write to no input and draw no random numbers. Then nothing needs to be kept, and every call is faster."""
    if not isinstance(function, Module) or _global_forward_hooks or _global_forward_pre_hooks:
        return False
    inside: list[Any] = [function]
    for part in inside:
        if part is None:
            continue
        kept, kind = part.__dict__, type(part)
        if "forward" in kept or kept["_buffers"] or kept["_forward_pre_hooks"] or kept["_forward_hooks"]:
            return False
        if kept.get("inplace") or kind.__module__ not in STILL or kind.__name__ in DRAWING:
            return False
        inside += kept["_modules"].values()
    return True
